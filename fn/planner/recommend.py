"""What to take: of the picks the one with the least time to AdamW's loss, or to stay with DDP."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from fn.planner.methods import label
from fn.planner.predict import WORTH, Plan, Prediction
from fn.planner.units import show_seconds


class Pick(NamedTuple):
    """name: of the runs that compared it with AdamW. row: in the table of methods. when: to take it. code: its line."""

    name: str
    row: str
    when: str
    code: str


IMPORTS = "import fn, fn.adapters.ddp, fn.adapters.fsdp; from functools import partial"
"""What the code of the picks needs."""

PICKS = (
    Pick("adamw, int4 gradients", "adamw, int4 gradients", "you keep your optimizer, under DDP",
         "fn.adapters.ddp.average_gradients(model, fn.int4(), fn.damped())"),
    Pick("sign_muon", "sign_muon", "transformers over slow links, in every step",
         "opt = fn.adapters.ddp.optimizer(model, fn.sign_muon, schedule=fn.freeze_after(0), lr=0.02)"),
    Pick("muloco, int8", "diloco, int8", "between sites; fn.diloco if AdamW is a must",
         'with fn.bind(mesh): opt = fn.Optimizer(model.parameters(), partial(fn.muloco, axis="data", codec=fn.int8()), '
         "labels=fn.labels_of(model), schedule=fn.every(100))"),
    Pick("loco_adamw, int4, int8 back", "loco_adamw, int4, int8 back", "shards: FSDP2, ZeRO",
         "fn.adapters.fsdp.compress(model, gather=fn.int8())"),
    Pick("onebit_adam", "onebit_adam", "you leave DeepSpeed",
         "from fn.adapters.deepspeed import OnebitAdam, OnebitLamb, ZeroOneAdam"),
)  # fmt: skip
"""In the order in which every page has them."""


@cache
def measured() -> dict[str, Any]:
    """Return the steps of methods over AdamW's to the same loss, of whole runs of a small model, with their commit."""
    found: dict[str, Any] = json.loads(files("fn.planner").joinpath("same_loss.json").read_text(encoding="utf-8"))
    return found


class Candidate(NamedTuple):
    """A method whose steps to AdamW's loss were measured, on a network.

    steps: that it takes over those in which AdamW has its loss, and the ends of their interval; 1 where that holds 1.
    time: to AdamW's loss over AdamW's own, with the same interval. The warm-up of the runs counts in it.
    """

    name: str
    prediction: Prediction
    steps: tuple[float, ...]
    time: tuple[float, ...]

    @property
    def label(self) -> str:
        """Return the name with the topology."""
        return label(self.name, self.prediction.method.topology)


def candidate(name: str, prediction: Prediction, plan: Plan) -> Candidate | None:
    """Return a method with its time to AdamW's loss; None where no runs compared it."""
    found = measured()["methods"].get(name)
    if found is None:
        return None
    low, high = found["interval"]
    steps = (1.0 if low <= 1 <= high else found["ratio"], low, high)
    first = plan.of(found["warm_up_as"]).step
    step = found["warm_up"] * first + (1 - found["warm_up"]) * prediction.step
    return Candidate(name, prediction, steps, tuple(x * step / plan.of("adamw").step for x in steps))


class Recommendation(NamedTuple):
    """take: what to take; None is to stay with DDP. picks: all of them. lines: what is said, at most three lines."""

    take: Candidate | None
    picks: tuple[Candidate, ...]
    lines: tuple[str, ...]


def recommend(plan: Plan) -> Recommendation:
    """Return the pick with the least time to AdamW's loss among those that save time in a step, too; or none."""
    base = plan.of("adamw").step
    plain = next(p for p in plan.predictions if p.method.overlapped and not p.method.compressed)
    picks = tuple(c for pick in PICKS if (c := candidate(pick.name, plan.of(pick.row), plan)))
    limit = (1 - WORTH) * plain.step
    worth = [c for c in picks if max(c.prediction.step, c.time[0] * base) <= limit]
    if not worth:
        ddp = plain if plain.step <= (1 - WORTH) * base else plan.of("adamw")
        return Recommendation(None, picks, (
            f"Stay with DDP: {ddp.method.label} takes {show_seconds(ddp.step)} a step, of which "
            f"{show_seconds(round(ddp.exposed, 9))} is communication that is not hidden.",
            f"No pick saves {100 * WORTH:.0f} % of a step; one that needs fewer steps needs as few without codes.",
        ))  # fmt: skip
    take, kept = min(worth, key=lambda c: c.time[0]), next((c for c in worth if c.name == PICKS[0].name), None)
    lines = [
        f"Take {take.label}: {show_seconds(take.prediction.step)} a step, where AdamW under DDP takes "
        f"{show_seconds(base)}.",
        f"Time to the same loss: {show_parts(take.time)} of AdamW's, in {show_parts(take.steps)} of its steps, as runs "
        f"of a small model say.",
    ]
    if kept is not None and kept != take:
        lines.append(
            f"Or keep your optimizer, with {kept.label}: {show_seconds(kept.prediction.step)} a step, "
            f"{show_parts(kept.time)} of the time."
        )
    return Recommendation(take, picks, tuple(lines))


def show_parts(values: tuple[float, ...]) -> str:
    """Spell a part of a whole in per cent, and the ends of its interval, if they are given."""
    mean, *ends = (f"{x:.2g}" if x < 9.95 else f"{int(x + 0.5)}" for x in (100 * v for v in values))
    return f"{mean} % ({' to '.join(ends)} %)" if ends else f"{mean} %"
