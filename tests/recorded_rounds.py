"""The recorded runs in `tests/golden/outer` and `tests/golden/rounds`: what they hold, how ours are run beside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from golden_cases import Recording, recorded_form, recordings
from torch import Tensor

import fn
from fn import Phase, Round, tree
from fn.transforms.average_params import AverageParamsState

FOLDER = Path(__file__).parent / "golden" / "outer"
ROUNDS = Path(__file__).parent / "golden" / "rounds"


class Case(Recording):
    """A recording of local steps."""

    def gradients(self) -> Callable[[int, list[Tensor]], list[Tensor]]:
        """Return (step, params) -> the gradients of all ranks."""
        a, c, noise = self.each("a"), self.each("c"), self.each("noise")

        def at(t: int, params: list[Tensor]) -> list[Tensor]:
            return [x * (p - y) + n[t] for x, p, n, y in zip(a, params, noise, c, strict=True)]

        return at

    def off(self, ours: Tensor, name: str, row: int, rank: int | None = None) -> float:
        """Hold an array against the recorded one; return how far it is off, in units of the tolerance."""
        recorded = self.arrays[name][row]
        recorded = recorded if rank is None else recorded[rank]
        allowed = self.row["tolerance"] * max(1.0, float(np.abs(self.arrays[name]).max()))
        off = float(np.abs(ours.numpy().astype(np.float64) - recorded).max())
        assert off <= allowed, f"{self.row['name']} {name} row {row}: off by {off}, allowed {allowed}"
        return off / allowed


def load(index: str, folder: Path = FOLDER) -> list[Case]:
    return [Case(*recording) for recording in recordings(folder, index)]


def step_of(tx: fn.Transform, when: Phase | Round, g: Any, s: Any, p: Any) -> tuple[Any, Any]:
    updates, s = tx.update(when)(g, s, p)
    return fn.apply_updates(p, updates), s


def in_simulation(
    case: Case, tx: fn.Transform, of_rank: Callable[..., tuple[Any, Any]] = step_of
) -> tuple[Callable[..., tuple[Any, Any]], Any, list[Tensor]]:
    """Return a step as `step_of` of all ranks together, and the state and the params that they start with.

    Args: of_rank: what takes the step of a rank, with the arguments of `step_of`.
    """
    start = case.each("init")
    dims = fn.rank_dims(tx.init(start))
    state = fn.simulate(tx.init, "data", case.world, in_dims=None, out_dims=dims)(start)

    def step(tx: fn.Transform, when: Phase | Round, *args: Any) -> tuple[Any, Any]:
        run = partial(of_rank, tx, when)
        return fn.simulate(run, "data", case.world, in_dims=(0, dims, 0), out_dims=(0, dims))(*args)

    return step, state, [p.expand(case.world, *p.shape).clone() for p in start]


def inner_of(hyper: dict[str, Any]) -> fn.Transform:
    links = (fn.add_decayed_weights(hyper.get("weight_decay", 0.0)), fn.scale_by_learning_rate(hyper["lr"]))
    if hyper["kind"] == "adamw":
        return fn.chain(fn.scale_by_adam(*hyper.get("betas", (0.9, 0.999))), *links)
    return fn.chain(fn.trace(hyper.get("momentum", 0.0)), *links)


def outer_step(hyper: dict[str, Any]) -> fn.Transform:
    return fn.chain(fn.trace(hyper["momentum"], hyper["nesterov"]), fn.scale_by_learning_rate(hyper["lr"]))


def exact() -> fn.Transform:
    return fn.compressed_average("data", fn.identity(), fn.off())


class Method(NamedTuple):
    """How a run is replayed. tx, schedule: what runs. momentum: what ours is multiplied by to be the recorded one."""

    tx: fn.Transform
    schedule: Callable[[int], fn.Phase | Round]
    momentum: float = 1.0


def fragments(case: Case) -> list[list[int]]:
    return case.hyper.get("fragments") or [[*range(case.count)]]


def outer_state(state: Any) -> Any:
    """Return the state of local steps, whatever is around it."""
    return tree.instances(state, (fn.OuterState, AverageParamsState))[0]


def errors_of(state: fn.OuterState, case: Case) -> list[tuple[int, Tensor]]:
    """Return the number of each tensor and its error; `in_basis` has those of short tensors first."""
    workers = [error for each in tree.fields(state.sync, "worker") for error in each]
    sizes = [x.numel() for x in case.each("init")]
    assert len(workers) == len({*sizes}) == case.count
    return [*zip(sorted(range(case.count), key=lambda i: sizes[i]), workers, strict=True)]


def replay(case: Case, method: Method, step: Any, state: Any, params: list[Tensor]) -> float:
    """Take all steps; return how far off anything was, in units of the tolerance."""
    gradients, parts = case.gradients(), fragments(case)
    begun, ended, worst = [0] * case.count, [0] * case.count, [0.0]
    for t in range(int(case.hyper["steps"])):
        when = method.schedule(t)
        with fn.ledger() as sent:
            params, state = step(method.tx, when, gradients(t, params), state, params)
        assert (sent.total > 0) == (when.begin is not None)
        assert (-1 if when.end is None else when.end % len(parts)) == case.arrays["applied"][t]
        own = outer_state(state)
        whose = None if "anchor" in fn.roles.rank_local(own) else 0
        mu, nu = (recorded_form(own.inner, field, case.hyper["inner"].get("betas")) for field in ("mu", "nu"))
        for name, found in (("param", params), ("exp_avg", mu), ("exp_avg_sq", nu)):
            worst += [case.off(x, f"p{i}.{name}", t) for i, x in enumerate(found)]
        if "p0.anchor" not in case.arrays:
            continue
        if when.begin is not None:
            for i in parts[when.begin % len(parts)]:
                if when.end is None:
                    worst.append(case.off(own.pending[i], f"p{i}.mean", begun[i], whose))
                begun[i] += 1
        if when.begin is not None and "p0.error" in case.arrays:
            for i, error in errors_of(own, case):
                kept = error[..., : case.each("init")[i].numel()].reshape(params[i].shape)
                worst.append(case.off(kept, f"p{i}.error", begun[i] - 1))
        if when.end is not None:
            fragment = when.end % len(parts)
            (momenta,) = tree.fields(own.outer[fragment], "mu")
            for place, i in enumerate(parts[fragment]):
                buffer = method.momentum * momenta[place]
                worst.append(case.off(own.anchor[i], f"p{i}.anchor", ended[i], whose))
                worst.append(case.off(buffer, f"p{i}.outer_momentum", ended[i], whose))
                ended[i] += 1
    for i in range(case.count):
        assert "p0.anchor" not in case.arrays or ended[i] == len(case.arrays[f"p{i}.anchor"]) > 1
    return max(worst)
