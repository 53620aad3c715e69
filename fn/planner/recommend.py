"""What to take: AdamW with gradients in codes, what is published as better at that size, or to stay with DDP."""

from __future__ import annotations

from typing import NamedTuple

from fn.planner.evidence import AT_SIZE, GIVEN, Evidence, evidence, given, measured, show_parts
from fn.planner.methods import label
from fn.planner.predict import WORTH, Plan, Prediction
from fn.planner.units import show_seconds

DDP, ALONE = "under DDP", "of ranks that train alone"
"""What `model` is in the code of a pick."""


class Pick(NamedTuple):
    """name: of what is known of it. row: in the table of methods. when: to take it. code: its line.

    model: `DDP` or `ALONE`, where a probe can run the code with a model of its own.
    """

    name: str
    row: str
    when: str
    code: str
    model: str = ""


IMPORTS = "import fn, fn.adapters.ddp, fn.adapters.fsdp; from functools import partial"
"""What the code of the picks needs."""

PICKS = (
    Pick("adamw, int4 gradients", "adamw, int4 gradients", "you keep your optimizer, under DDP",
         "fn.adapters.ddp.average_gradients(model, fn.int4(), fn.damped())", DDP),
    Pick("sign_muon", "sign_muon", "transformers over slow links, in every step",
         "opt = fn.adapters.ddp.optimizer(model, fn.sign_muon, schedule=fn.freeze_after(0), lr=0.02)", DDP),
    Pick("muloco, int8", "muloco, int8", "between sites; fn.diloco if AdamW is a must",
         'with fn.bind(mesh): opt = fn.Optimizer(model.parameters(), partial(fn.muloco, axis="data", codec=fn.int8()), '
         "labels=fn.labels_of(model), schedule=fn.every(30))", ALONE),
    Pick("loco_adamw, int4, int8 back", "loco_adamw, int4, int8 back", "shards: FSDP2, ZeRO",
         "fn.adapters.fsdp.compress(model, gather=fn.int8())"),
    Pick("onebit_adam, 1 bit", "onebit_adam, 1 bit", "you leave DeepSpeed",
         "from fn.adapters.deepspeed import OnebitAdam, OnebitLamb, ZeroOneAdam"),
)  # fmt: skip
"""In the order in which every page has them."""

BASE = Pick("adamw", "adamw", "nothing pays: DDP as it is", "", DDP)
"""What all are compared with."""

EXACT_MUON = Pick("muon", "muon, DDP", "exact Muon under DDP, which sends what AdamW does", "")
"""Stands beside the picks: what Muon is worth without codes."""

FRONT = (GIVEN, AT_SIZE)
"""Grades of what may stand in front of the first pick."""


class Candidate(NamedTuple):
    """A method on a network, and what is known of its steps to AdamW's loss.

    share: the time of its step over AdamW's, both measured or both predicted; the warm-up of the runs counts in it.
    time: to AdamW's loss over AdamW's own, with the ends of its range; None where no published number says the steps.
    """

    name: str
    prediction: Prediction
    share: float
    evidence: Evidence

    @property
    def label(self) -> str:
        """Return the name with the topology."""
        return label(self.name, self.prediction.method.topology)

    @property
    def time(self) -> tuple[float, ...] | None:
        """Return the product of both factors."""
        return self.evidence.steps and tuple(x * self.share for x in self.evidence.steps)

    @property
    def factors(self) -> str:
        """Return a sentence with both factors apart."""
        return f"{show_parts((self.share,))} of the time of a step, on your network; {self.evidence.words}."


def candidate(name: str, prediction: Prediction, plan: Plan, ratio: float | None = None) -> Candidate:
    """Return a method with what is known of it; ratio: steps over AdamW's that are given, in place of those."""
    own, made = measured()["methods"].get(name), prediction.method
    step = prediction.step
    if own is not None and own["warm_up"]:
        step = own["warm_up"] * plan.of(own["warm_up_as"]).step + (1 - own["warm_up"]) * step
    replicas, rounds = (plan.replicas(made.topology), made.interval) if made.local else (1, 1)
    known = evidence(name, plan.params, replicas=replicas, local_steps=rounds) if ratio is None else given(ratio)
    base = plan.base
    over = base.predicted if base.predicted is not None and not prediction.measured else base.step
    return Candidate(name, prediction, step / over, known)


class Recommendation(NamedTuple):
    """take: what to take; None is to stay with DDP. picks: all of them. exact: Muon without codes, beside them.

    lines: what is said, at most three lines. why: whether compression pays, behind all tables.
    """

    take: Candidate | None
    picks: tuple[Candidate, ...]
    exact: Candidate
    lines: tuple[str, ...]
    why: str


def recommend(plan: Plan, ratio: float | None = None) -> Recommendation:
    """Return what to take: the first pick, or one that published numbers say to be sooner at AdamW's loss; or none.

    Of both it is the far end of the range that counts: a number that may be later does not go in front. Where steps
    were measured, no prediction on the same ranks stands against them.

    Args: ratio: steps of every pick over AdamW's, in place of what is known.
    """
    base = plan.base
    plain = base if base.measured else next(
        p for p in plan.predictions if p.method.overlapped and not p.method.compressed
    )  # fmt: skip
    picks = tuple(candidate(pick.name, plan.of(pick.row), plan, ratio) for pick in PICKS)
    exact = candidate(EXACT_MUON.name, plan.of(EXACT_MUON.row), plan)
    limit = (1 - WORTH) * plain.step
    tried = [c for c in picks if c.prediction.measured or not base.measured or c.prediction.method.topology != "flat"]
    worth = [c for c in tried if max(c.share, expected_time(c)) * base.step <= limit]
    known = [c for c in worth if c is picks[0] or c.evidence.grade in FRONT]
    if not known:
        ddp = plain if plain.step <= (1 - WORTH) * base.step else base
        return Recommendation(None, picks, exact, (
            f"Stay with DDP: {ddp.method.label} takes {said_step(ddp)}, "
            f"{show_seconds(round(ddp.beyond, 9))} on top of its computation.",
            f"No pick that is known to reach AdamW's loss saves {100 * WORTH:.0f} % of a step.",
            f"Exact Muon under DDP: {exact.evidence.words}.",
        ), f"Compression does not pay here: {show_seconds(round(ddp.beyond, 9))} of {show_seconds(ddp.step)} come on "
           f"top of the computation.")  # fmt: skip
    take = min(known, key=latest_time)
    other = picks[0] if picks[0] in worth else None
    if take is picks[0]:  # what sends less and is known from small models only is named beside it, not in front of it
        other = min((c for c in worth if c.time and c is not take), key=expected_time, default=None)
    time = f"Time to AdamW's loss: {show_parts(take.time)} of AdamW's: " if take.time else ""
    lines = [
        f"Take {take.label}: {said_step(take.prediction)}, where AdamW under DDP takes {show_seconds(base.step)}.",
        f"{time}{take.factors}",
    ]
    if other is not None and other != take:
        what = "Or keep your optimizer, with" if other is picks[0] else "Or"
        lines.append(f"{what} {other.label}: {said_step(other.prediction)}; {other.factors}")
    why = (
        f"Compression pays: under DDP {show_seconds(base.beyond)} of AdamW's step come on top of its computation, with "
        f"{take.label} {show_seconds(take.prediction.beyond)}."
    )
    return Recommendation(take, picks, exact, tuple(lines), why)


def said_step(prediction: Prediction) -> str:
    """Return the seconds of a step in a sentence."""
    said, predicted = f"{show_seconds(prediction.step)} a step", prediction.predicted
    return said if predicted is None else f"{said}, measured (predicted: {show_seconds(predicted)})"


def expected_time(c: Candidate) -> float:
    """Return the part of AdamW's time by which picks are compared, with our own small model's steps if need be."""
    return _steps(c)[0] * c.share


def latest_time(c: Candidate) -> float:
    """Return the same at the far end of the range."""
    return _steps(c)[-1] * c.share


def _steps(c: Candidate) -> tuple[float, ...]:
    return c.evidence.steps or c.evidence.own or (1.0,)
