"""Averages of low rank follow the recorded runs of PowerSGD, as PyTorch and as its authors have it, and of Dion.

`tests/golden/README_low_rank.md` says what the arrays are, and where the originals differ on purpose. A run of one rank
is replayed by two that have the same gradients, since a mean of one rank is not coded here.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from golden_cases import Recording, recordings
from torch import Tensor

import fn
from fn import Phase, tree
from fn.base import unchanged
from fn.transforms.low_rank import LowRankState

FOLDER = Path(__file__).parent / "compressors"


class Case(Recording):
    """A recording of an average of low rank."""

    @property
    def hyper(self) -> dict[str, Any]:
        return {**self.row["hyper"], **self.row["hyper"].get("hook", {}), **self.row["hyper"].get("config", {})}

    @property
    def world(self) -> int:
        return max(2, int(self.row["world"]))

    @property
    def warmup(self) -> int:
        return int(self.hyper.get("start_powerSGD_iter", self.hyper.get("start_compressing_after_num_steps", 0)))

    def lost_its_basis(self, tensor: str, step: int) -> bool:
        """Tell whether PyTorch's hook had a Q of zeros before a step, with which it never sends that tensor again."""
        q = self.arrays.get(f"{tensor}.Q")
        coded = self.row["method"] == "powersgd_torch" and q is not None and step > self.warmup
        return coded and any(not x.any() for x in q[self.warmup : step])

    def given(self, name: str, i: int) -> Tensor | None:
        found = self.arrays.get(f"p{i}.{name}")
        return None if found is None else torch.from_numpy(found.copy())

    def off(self, ours: Tensor, name: str, step: int) -> float:
        """Hold an array against the recorded one, errors' means; return how far off in units of the tolerance."""
        recorded = self.arrays[name][step].astype(np.float64)
        largest = max(1.0, float(np.abs(recorded).max()))
        if name.endswith((".error", ".momentum")):
            recorded = recorded.mean(0)
        off = float(np.abs(ours.numpy().astype(np.float64) - recorded).max()) / largest
        assert off <= self.row["tolerance"], f"{self.row['name']} {name} step {step}: off by {off}"
        return off / self.row["tolerance"]


CASES = [Case(*recording) for recording in recordings(FOLDER, "index_low_rank.json")]
each_case = pytest.mark.parametrize("case", CASES, ids=[case.row["name"] for case in CASES])


class HalvesState(NamedTuple):
    """errors; of each matrix the factor that is the next basis, and the other one. Factors are sums over the ranks."""

    errors: list[Tensor]
    basis: list[Tensor]
    other: list[Tensor]
    rank_local = ("errors",)


def halves(case: Case) -> fn.Transform:
    """Return what the authors of PowerSGD do now: half a power iteration a message, from the other's factor each."""
    chosen = [i for i, coded in enumerate(case.arrays["compressed"]) if coded]
    sides = [(case.row["shapes"][i][0], math.prod(case.row["shapes"][i][1:])) for i in chosen]

    def orthonormal(k: int, factors: list[Tensor]) -> Tensor:
        """Divide a single column by the norm of all matrices of its shape together, as they do."""
        if factors[k].shape[1] > 1:
            return torch.linalg.qr(factors[k]).Q
        alike = [x for x, side in zip(factors, sides, strict=True) if side == sides[k]]
        return factors[k] / torch.cat(alike).norm().clamp(min=1e-16)

    def init(params: list[Tensor]) -> HalvesState:
        p, q = ([case.given(name, i) for i in chosen] for name in ("P_random", "Q_random"))
        return HalvesState([torch.zeros_like(params[i]) for i in chosen], p, q)

    def update(updates: list[Tensor], state: HalvesState, params: Any, /) -> tuple[list[Tensor], HalvesState]:
        basis, other, out = state.basis, state.other, fn.pmean(updates, "data")
        rest = [(updates[i] + e).reshape(side) for i, e, side in zip(chosen, state.errors, sides, strict=True)]
        total = [torch.zeros(side) for side in sides]
        for _ in range(case.hyper["num_iters_per_step"]):
            basis = [orthonormal(k, basis) for k in range(len(basis))]
            for k, b in enumerate(basis):
                of_rows = b.shape[0] == sides[k][0]  # no matrix here is square
                own = rest[k].mT @ b if of_rows else rest[k] @ b
                rest[k] = rest[k] - (b @ own.mT if of_rows else own @ b.mT)
                mean = fn.pmean(own, "data")
                total[k] = total[k] + (b @ mean.mT if of_rows else mean @ b.mT)
                other = [*other[:k], mean * fn.axis_size("data"), *other[k + 1 :]]
            basis, other = other, basis
        found = {i: x.view(updates[i].shape) for i, x in zip(chosen, total, strict=True)}
        errors = [x.view(updates[i].shape) for i, x in zip(chosen, rest, strict=True)]
        return [found.get(i, x) for i, x in enumerate(out)], HalvesState(errors, basis, other)

    return fn.Transform(init, unchanged, update, unchanged)


def powersgd(case: Case) -> fn.Transform:
    hyper = case.hyper
    feedback = fn.classic() if hyper.get("use_error_feedback", True) else fn.off()
    rank, rate = hyper["matrix_approximation_rank"], hyper["min_compression_rate"]
    return fn.low_rank_average("data", rank, feedback=feedback, min_rate=rate)


def dion(case: Case) -> fn.Transform:
    """Return `fn.dion`; where other tensors have Lion, which that does not offer, the chain that it is."""
    hyper, scalar = case.hyper, case.hyper["scalar"]
    rank = {"rank": hyper["rank_fraction"], "multiple_of": hyper.get("rank_multiple_of", 1)}
    rank["iterations"] = hyper.get("power_iters", 1)
    if scalar["algorithm"] == "adamw":
        rate = scalar["lr"] / hyper["lr"]
        return fn.dion(hyper["lr"], hyper["mu"], hyper["weight_decay"], axis="data", adamw_rate=rate, **rank)
    decay = fn.add_decayed_weights(hyper["weight_decay"])
    kinds = {
        "dion": fn.chain(fn.scale_by_shape(), decay, fn.scale_by_learning_rate(hyper["lr"])),
        "lion": fn.chain(fn.scale_by_lion(0.9, 0.95), decay, fn.scale_by_learning_rate(scalar["lr"])),
    }
    feedback = fn.decayed(1, 1 - hyper["mu"])
    return fn.chain(
        fn.low_rank_average("data", feedback=feedback, orthonormal=True, **rank),
        fn.partition(kinds, lambda params: tree.map(lambda p: "dion" if p.ndim == 2 else "lion", params)),
    )


def transform(case: Case) -> fn.Transform:
    """Return what ran."""
    method = case.row["method"]
    if method == "dion":
        return dion(case)
    average = powersgd(case) if method == "powersgd_torch" else halves(case)
    return fn.chain(fn.average("data"), average, fn.scale_by_learning_rate(case.hyper["lr"]))


def with_drawn(case: Case, state: Any, draw: int) -> Any:
    """Return a state whose bases are those that were drawn in the recorded run."""

    def drawn(s: LowRankState) -> LowRankState:
        found = [case.given("Q_random", i) if isinstance(q, Tensor) else () for i, q in enumerate(s.q)]
        return s._replace(q=tuple(q[draw] if isinstance(q, Tensor) and q.ndim == 3 else q for q in found))

    return tree.replace(state, LowRankState, drawn)


def step_of(tx: fn.Transform, when: Phase, g: Any, s: Any, p: Any) -> tuple[Any, Any]:
    updates, s = tx.update(when)(g, s, p)
    return fn.apply_updates(p, updates), s


def errors_of(case: Case, state: Any) -> dict[int, Tensor]:
    """Return the errors of the tensors that have one, flat."""
    found = tree.fields(state, "errors")[0]
    if case.row["method"] == "powersgd_epfml":
        chosen = [i for i, coded in enumerate(case.arrays["compressed"]) if coded]
        return dict(zip(chosen, found, strict=True))
    return {i: e for i, e in enumerate(found) if isinstance(e, Tensor)}


def replay(case: Case, step: Any, state: Any, params: Any) -> float:
    """Take all steps; return how far off anything was, in units of the tolerance."""
    state, worst, grads = with_drawn(case, state, 0), 0.0, case.each("grad")
    for t in range(int(case.row["steps"])):
        if case.hyper.get("warm_start") is False and t > case.warmup:
            state = with_drawn(case, state, t - case.warmup)
        mine = [g[t].expand(case.world, *g.shape[2:]) for g in grads]
        when = Phase.WARMUP if t < case.warmup else Phase.COMPRESSED
        params, state = step(when, mine, state, params)
        found = {f"p{i}.param": p for i, p in enumerate(params)}
        name = "momentum" if case.row["method"] == "dion" else "error"
        found |= {f"p{i}.{name}": e.mean(0).view(params[i].shape) for i, e in errors_of(case, state).items()}
        for key in sorted(found):
            if t >= case.warmup and not case.lost_its_basis(key.split(".")[0], t):
                worst = max(worst, case.off(found[key], key, t))
    return worst


@each_case
def test_the_recorded_run_is_replayed_in_simulated_ranks(case: Case) -> None:
    tx, start = transform(case), case.each("init")
    dims = fn.rank_dims(tx.init(start))
    state = fn.simulate(tx.init, "data", case.world, in_dims=None, out_dims=dims)(start)

    def step(when: Phase, *args: Any) -> tuple[Any, Any]:
        run = partial(step_of, tx, when)
        return fn.simulate(run, "data", case.world, in_dims=(0, dims, None), out_dims=(None, dims))(*args)

    assert 0 < replay(case, step, state, start) <= 1


def test_a_matrix_moves_on_after_steps_without_a_gradient() -> None:
    """PyTorch's hook, with an epsilon that keeps it from NaN, leaves its params where they are for good."""
    (case,) = (c for c in CASES if c.hyper.get("orthogonalization_epsilon"))
    i = next(i for i in range(case.count) if case.lost_its_basis(f"p{i}", int(case.row["steps"]) - 1))
    theirs = case.arrays[f"p{i}.param"]
    assert (theirs[case.warmup :] == theirs[-1]).all()
    assert case.arrays[f"p{i}.grad"][-1].any()
    tx, p = fn.low_rank_average("data", 1), [torch.zeros(5, 17)]
    grads = torch.from_numpy(case.arrays[f"p{i}.grad"][case.warmup :].copy())

    def on_rank(g: Tensor) -> list[Tensor]:
        state, found = tx.init(p), []
        for x in g:
            (out,), state = tx.update(Phase.COMPRESSED)([x], state, p)
            found.append(out)
        return found

    found = fn.simulate(on_rank, "data", 2, in_dims=1, out_dims=None)(grads)
    assert [bool(out.any()) for out in found] == [bool(g.any()) for g in grads]
