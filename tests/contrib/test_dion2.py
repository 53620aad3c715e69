"""What `fn.contrib.dion2` and its link promise beside the recorded runs and the common contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import recorded_form
from recorded_muon import Case, each_of, labels, replayed
from simulated import normal
from torch import Tensor

import fn
from fn import Phase, roles

W, C = Phase.WARMUP, Phase.COMPRESSED


def test_all_ranks_choose_the_rows_whose_mean_size_is_largest() -> None:
    """Row 0 cancels in the mean, where its size does not.

    Differs: fn.contrib._dion2.scale_by_dion2: ranks send chosen rows of momenta of their own, and choose by the mean
        of their sizes; in the authors' code they average all gradients first.
    """
    g = torch.tensor([[[9.0, 0.0], [1.0, 0.0], [0.0, 2.0]], [[-9.0, 0.0], [1.0, 0.0], [0.0, 2.0]]])
    tx = fn.contrib.scale_by_dion2("data", 0.6, side="rows", scale=None)
    for phase, rows in ((C, [0, 2]), (W, [1, 2])):

        def on_rank(g: Tensor, phase: Phase = phase) -> tuple[Tensor, Any]:
            return tx.update(phase)(g, tx.init(g), g)

        u, state = fn.simulate(on_rank, "data", 2, out_dims=(None, 0))(g)
        assert [i for i in range(3) if (state.mu[0, i] != (g if phase is C else g.mean(0, True))[0, i]).any()] == rows
        assert u[rows[1], 1] == pytest.approx(1.0, abs=0.15)
        torch.testing.assert_close(state.mu[:, 2], 0.95 * g[:, 2])


def test_a_fraction_of_one_is_muon() -> None:
    """Whose momentum then fades after it was used, not before."""
    p = [normal(6, 5), normal(5, 8, seed=1)]
    ours, theirs = fn.contrib.scale_by_dion2(None, 1.0), fn.scale_by_muon(coefficients="polar_express")
    states = [ours.init(p), theirs.init(p)]
    for t in range(3):
        g = [normal(*x.shape, seed=t) for x in p]
        found = []
        for k, tx in enumerate((ours, theirs)):
            u, states[k] = tx.local_update(g, states[k], p) if tx is theirs else tx.update(W)(g, states[k], p)
            found.append(u)
        torch.testing.assert_close(*found)


def test_of_equal_rows_the_first_are_chosen_and_a_fraction_is_rounded_up() -> None:
    tx, g = fn.contrib.scale_by_dion2(None, 0.3, side="rows"), torch.ones(4, 6)
    u, _ = tx.update(W)(g, tx.init(g), g)
    assert [bool(row.any()) for row in u] == [True, True, False, False]


@pytest.mark.parametrize("choice", [{"side": "rows", "blocks": 2}, {"side": "columns", "flatten": True}], ids=str)
def test_ranks_send_the_rows_or_columns_that_are_chosen_and_the_rest_waits(choice: dict[str, Any]) -> None:
    """Of blocks of rows as many each; of a kernel that is taken as the matrix (2, 9)."""
    shape = (2, 3, 3) if "flatten" in choice else (6, 5)
    tx, g = fn.contrib.scale_by_dion2("data", 0.5, **choice), normal(2, *shape)
    u, state = fn.simulate(lambda g: tx.update(C)(g, tx.init(g), g), "data", 2, out_dims=(None, 0))(g)
    lines = (u.flatten(1).mT if "flatten" in choice else u).any(1)
    assert lines.sum() == (5 if "flatten" in choice else 4)
    waits = ~lines.expand_as(u.flatten(1)) if "flatten" in choice else ~lines[:, None].expand_as(u)
    for own, momentum in zip(g, state.mu, strict=True):
        assert torch.equal(own.view(waits.shape)[waits], momentum.view(waits.shape)[waits])


@pytest.mark.parametrize(
    ("make", "kind", "match"),
    [
        (lambda: fn.contrib.dion2(fraction=0.0), ValueError, r"fraction: expected a number in \(0, 1\], but got 0.0"),
        (lambda: fn.contrib.dion2(decay=1.0), ValueError, "decay: expected"),
        (
            lambda: fn.contrib.dion2(side="top"),
            ValueError,
            "side: expected 'smaller', 'rows' or 'columns', but got 'top'",
        ),
        (lambda: fn.contrib.dion2(blocks=0), ValueError, "blocks: expected a whole number of at least 1, but got 0"),
        (lambda: fn.contrib.dion2(scale="rms"), ValueError, "scale: expected one of"),
        (
            lambda: fn.contrib.scale_by_dion2(None).init([torch.ones(3)]),
            ValueError,
            "params: expected leaf '0' to be a matrix",
        ),
    ],
)
def test_what_is_wrong_is_named(make: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        make()


@each_of(Path(__file__).parent / "golden/dion2")
def test_dion2_follows_its_authors_code(case: Case) -> None:
    """In the warm-up, in which rows are chosen as there; cut into shards, of which as many are chosen each, too.

    Differs: fn.contrib._dion2.scale_by_dion2: ranks send chosen rows of momenta of their own, and choose by the mean
        of their sizes; in the authors' code they average all gradients first.
    """
    hyper, others, lr = case.hyper, case.places("adamw"), case.hyper["lr"]
    in_shards = hyper["shard"] is not None
    tx = fn.contrib.dion2(
        lr, hyper["ef_decay"], hyper["weight_decay"], axis="data", labels=labels(case),
        fraction=hyper["fraction"], side="rows" if in_shards else "smaller",
        blocks=case.world if in_shards and hyper["scope"] == "local" else 1,
        other=fn.scale_by_adam(*hyper["betas"], hyper["eps"]), other_rate=hyper["scalar_lr"] / lr,
        scale=hyper["adjust_lr"],
    )  # fmt: skip
    for t, params, state in replayed(case, tx, lambda step: W):
        rows = roles.find(state.inner["muon"], "first_moment")[0]
        for i, p in enumerate(params):
            case.hold(p, f"p{i}.param", t)
        for i, m in zip(case.places("matrix"), rows, strict=True):
            for of_rank in m:
                case.hold(of_rank, f"p{i}.momentum", t)
        for i, v in zip(others, recorded_form(state, "nu", hyper["betas"]), strict=True):
            case.hold(v, f"p{i}.variance", t)
