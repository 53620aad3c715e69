"""Methods on Muon follow their recorded runs: `tests/golden/README_muon.md`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from golden.test_golden_muon import FOLDER, Case, case_of
from torch import Tensor

import fn
from fn import Phase, roles

METHODS = ("lion_muon",)
ROWS = {method: json.loads((FOLDER / f"index_{method}.json").read_text())["cases"] for method in METHODS}


def loaded(row: dict[str, Any]) -> Case:
    """Return a recording in the precision in which it ran; its problem is written down in float32."""
    case = case_of(row)
    if case.hyper.get("precision") != "float64":
        return case
    return case._replace(arrays={name: x.astype(np.float64) for name, x in case.arrays.items()})


def each_of(method: str) -> Any:
    return pytest.mark.parametrize("row", ROWS[method], ids=[row["name"] for row in ROWS[method]])


def replayed(
    case: Case, tx: fn.Transform, schedule: Callable[[int], Phase]
) -> Iterator[tuple[int, list[Tensor], Any]]:
    """Take all steps in simulated ranks, from gradients at our own params; yield each with params and state after it.

    That `simulate` returns one copy of the params shows that they are the same on all ranks.
    """
    params = case.each("init")
    dims = fn.rank_dims(tx.init(params))
    state = fn.simulate(tx.init, "data", case.world, in_dims=None, out_dims=dims)(params)

    def step(phase: Phase, g: Any, s: Any, p: Any) -> Any:
        updates, s = tx.update(phase)(g, s, p)
        return fn.apply_updates(p, updates), s

    for t in range(int(case.hyper["steps"])):
        on_rank = partial(step, schedule(t))
        run = fn.simulate(on_rank, "data", case.world, in_dims=(0, dims, None), out_dims=(None, dims))
        params, state = run(case.gradients(params, t), state, params)
        yield t, params, state


def labels(case: Case) -> list[str]:
    return ["hidden" if kind == "matrix" else "other" for kind in case.hyper["kinds"]]


@each_of("lion_muon")
def test_lion_muon_follows_its_authors_code(row: dict[str, Any]) -> None:
    """Whose ranks average gradients; a momentum of each rank has the same mean.

    Differs: fn.muon_variant_optimizers.lion_muon: ranks vote between; in the authors' code they average gradients
        exactly in every step. Every rank takes Muon's step of all matrices; there owners take it, and an all-reduce
        adds up their updates.
    """
    case = loaded(row)
    hyper, others = case.hyper, case.places("adamw")
    lr = hyper["lr"]
    tx = fn.lion_muon(
        lr, hyper["beta1"], hyper["beta2"], hyper["weight_decay"], axis="data", labels=labels(case),
        lion_rate=hyper["lion_lr"] / lr, votes=False, other=fn.scale_by_adam(*hyper["betas"], hyper["eps"]),
        other_rate=hyper["scalar_lr"] / lr,
    )  # fmt: skip
    for t, params, state in replayed(case, tx, fn.periodic(hyper["period"])):
        for i, p in enumerate(params):
            case.hold(p, f"p{i}.param", t)
        for i, v in zip(others, roles.find(state, "second_moment")[0], strict=True):
            case.hold(v, f"p{i}.variance", t)
