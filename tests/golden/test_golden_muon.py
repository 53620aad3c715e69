"""Muon follows the recorded runs of its authors' code, and of Dion's: `tests/golden/README_muon.md`."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import chains
import numpy as np
import pytest
import torch
from golden_cases import recorded_weight
from torch import Tensor

import fn
from fn import Phase, roles

FOLDER = Path(__file__).parent / "muon"


class Case(NamedTuple):
    """A recording: its row of the index, and its arrays by name."""

    row: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def hyper(self) -> dict[str, Any]:
        found: dict[str, Any] = self.row["hyper"]
        return found

    @property
    def world(self) -> int:
        return int(self.hyper["world"])

    def each(self, name: str) -> list[Tensor]:
        return [torch.from_numpy(self.arrays[f"p{i}.{name}"].copy()) for i in range(len(self.hyper["shapes"]))]

    def places(self, kind: str) -> list[int]:
        return [i for i, given in enumerate(self.hyper["kinds"]) if given == kind]

    def gradients(self, params: list[Tensor], step: int) -> list[Tensor]:
        """Return those of all ranks, (W, shape), at params that all ranks have."""
        a, c, noise = (self.each(name) for name in ("a", "c", "noise"))
        grads = [x * (p - y) + n[step] for x, p, y, n in zip(a, params, c, noise, strict=True)]
        for j, first, end in self.hyper.get("zero", ()):
            grads[j] = torch.zeros_like(grads[j]) if first <= step < end else grads[j]
        return grads

    def hold(self, ours: Tensor, name: str, step: int) -> None:
        recorded = self.arrays[name][step].astype(np.float64)
        limit = self.row["tolerance"] * max(1.0, float(np.abs(recorded).max()))
        np.testing.assert_allclose(ours.double().numpy(), recorded, rtol=0, atol=limit, err_msg=f"{name} {step}")


RECORDED = json.loads((FOLDER / "index_muon.json").read_text())["cases"]
ROWS = [row for row in RECORDED if row["name"] != "muon_w2_flatten"]  # a defect of the original
each_row = pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])


def case_of(row: dict[str, Any]) -> Case:
    assert hashlib.sha256((FOLDER / row["file"]).read_bytes()).hexdigest() == row["sha256"]
    return Case(row, dict(np.load(FOLDER / row["file"])))


def muon(case: Case, kind: str, **more: Any) -> fn.Transform:
    """Return what ran. kind: of the tensors that are compared; of "kj" matrices have an eps of their own."""
    hyper = case.hyper
    eps = 1e-7 / (1 - hyper["mu"]) if (hyper["source"], kind) == ("kj", "matrix") else hyper["eps"]
    other = "adamw" if kind == "matrix" else kind
    others = case.places("adamw") + case.places("lion")
    hidden = ["other" if i in others else "hidden" for i in range(len(hyper["shapes"]))]
    return chains.muon(
        hyper["lr"], hyper["mu"], hyper["weight_decay"], *hyper["betas"], eps, axis="data", labels=hidden,
        nesterov=hyper["nesterov"], scale=hyper["adjust_lr"], coefficients=hyper["newton_schulz"],
        dtype=getattr(torch, hyper["precision"]), cautious=hyper["cautious_wd"], other=other,
        other_rate=hyper["scalar_lr"] / hyper["lr"], **more,
    )  # fmt: skip


def replay(case: Case, tx: fn.Transform, kind: str) -> None:
    """Take all steps in simulated ranks, and hold params, momenta and variances of a kind to the recorded ones.

    Kinds are replayed one by one, because a run may have both AdamW and Lion; tensors do not see each other.
    """
    params = case.each("init")
    dims = fn.rank_dims(tx.init(params))
    state = fn.simulate(tx.init, "data", case.world, in_dims=None, out_dims=dims)(params)

    def step(g: Any, s: Any, p: Any) -> Any:
        updates, s = tx.update(Phase.WARMUP)(g, s, p)
        return fn.apply_updates(p, updates), s

    run = fn.simulate(step, "data", case.world, in_dims=(0, dims, None), out_dims=(None, dims))
    for t in range(int(case.hyper["steps"])):
        params, state = run(case.gradients(params, t), state, params)
        for i in case.places(kind):
            case.hold(params[i], f"p{i}.param", t)
        for name, role in (("momentum", "first_moment"), ("variance", "second_moment")):
            if case.hyper["source"] != "kj" or name == "variance":
                hold_moments(case, state, kind, name, role, t)


def hold_moments(case: Case, state: Any, kind: str, name: str, role: str, step: int) -> None:
    label = "muon" if kind == "matrix" else kind
    places = [i for i, k in enumerate(case.hyper["kinds"]) if (k == "matrix") == (kind == "matrix")]
    is_owned = hasattr(state.inner, "owners")  # simulated ranks have zeros for what others own
    own = (state.inner.inner if is_owned else state.inner[1])[label]
    weight = recorded_weight(own, int(role == "second_moment"), case.hyper["betas"])
    for values in roles.find(own, role):
        for i, moment in zip(places, values, strict=True):
            if i in case.places(kind):
                case.hold(weight * (moment.sum(0) if is_owned else moment), f"p{i}.{name}", step)


@pytest.mark.parametrize("owned", [False, True], ids=["replicated", "owned"])
@each_row
def test_the_recorded_run_is_replayed(row: dict[str, Any], owned: bool) -> None:
    """From gradients at our own params.

    Differs: fn.muon_optimizers.muon: the iterations are in float32 unless dtype=torch.bfloat16 is given, which all
        originals use.
    """
    case = case_of(row)
    for kind in sorted({*case.hyper["kinds"]}):
        replay(case, muon(case, kind, owned=owned), kind)


def test_the_run_of_shards_is_replayed_on_shards() -> None:
    """Each of four ranks has its rows of params and momenta; of the vector of 11 elements the last one has two."""
    (row,) = [row for row in ROWS if row["hyper"].get("shard") is not None]
    case = case_of(row)
    assert case.hyper["shard"] == 0
    tx = muon(case, "matrix", shards=fn.Shards("shard", *shapes_and_dims(case)))
    params, shapes = case.each("init"), [tuple(shape) for shape in case.hyper["shapes"]]
    pieces = [in_rows(p, case.world) for p in params]
    with fn.collectives.axis.Binding({"data": fn.collectives.axis.Axis(1, torch.tensor(0), "alone")}):
        state = fn.simulate(tx.init, "shard", case.world)(pieces)

        def step(g: Any, s: Any, p: Any) -> Any:
            updates, s = tx.update(Phase.WARMUP)(g, s, p)
            return fn.apply_updates(p, updates), s

        for t in range(int(case.hyper["steps"])):
            grads = [in_rows(g.mean(0), case.world) for g in case.gradients(params, t)]
            pieces, state = fn.simulate(step, "shard", case.world)(grads, state, pieces)
            params = [p.flatten(0, 1)[: shape[0]] for p, shape in zip(pieces, shapes, strict=True)]
            for i, p in enumerate(params):
                case.hold(p, f"p{i}.param", t)
            (momenta,) = roles.find(state.inner[1]["muon"], "first_moment")
            for i, mu in zip(case.places("matrix"), momenta, strict=True):
                case.hold(mu.flatten(0, 1)[: shapes[i][0]], f"p{i}.momentum", t)


def shapes_and_dims(case: Case) -> tuple[Any, Any]:
    shapes = tuple(tuple(shape) for shape in case.hyper["shapes"])
    return shapes, tuple(0 for _ in shapes)


def in_rows(x: Tensor, world: int) -> Tensor:
    """Return the rows of each rank, (W, n / W, ...), zeros behind the last."""
    rows = -(-x.shape[0] // world)
    padding = x.new_zeros((world * rows - x.shape[0], *x.shape[1:]))
    return torch.cat([x, padding]).view(world, rows, *x.shape[1:])
