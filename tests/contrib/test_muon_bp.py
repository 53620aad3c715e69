"""What `fn.contrib.muon_bp` and its link promise beside the recorded runs and the common contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from muon_on_shards import take_the_steps_of_whole_matrices
from recorded_muon import Case, each_of, replayed
from simulated import normal, one_step, same

import fn
from fn import Phase, roles

W = Phase.WARMUP


def test_all_ranks_take_the_steps_of_all_blocks() -> None:
    """Which are those of blocks alone, each by its own shape; blocks are as many as ranks.

    Differs: fn.contrib._muon_bp.muon_bp: where params are whole every rank takes the steps of all blocks; in the
        paper they lie in shards.
    """
    g = normal(3, 7, 4)
    found = one_step(fn.contrib.muon_bp(0.1, 0.0, axis="data"), g)
    rule = {"eps": 1e-7, "scale": "rms_norm", "coefficients": "jordan"}
    each = [fn.orthogonalize(**rule).local_update(x, (), x)[0] for x in g.mean(0).split([3, 3, 1])]
    torch.testing.assert_close(found, -0.05 * torch.cat(each))


def test_on_shards_it_is_what_it_is_on_whole_matrices() -> None:
    take_the_steps_of_whole_matrices(fn.contrib.muon_bp(0.1, blocks=2), fn.contrib.muon_bp(0.1, shards="shard"))


def test_what_has_fewer_rows_than_blocks_has_fewer_blocks() -> None:
    seen: list[Any] = []
    link = fn.stateless(lambda u, p: seen.append([x.shape[0] for x in u if x.ndim]) or u)
    params = {"a": torch.ones(2, 3), "b": torch.ones(5), "c": torch.tensor(1.0)}
    tx = fn.contrib.in_blocks(link, 3)
    u, _ = tx.update(W)(params, tx.init(params), params)
    assert seen == [[1, 1, 2, 2, 1]]
    assert same(u, params)


@pytest.mark.parametrize(
    ("make", "kind", "match"),
    [
        (
            lambda: fn.contrib.muon_bp(),
            ValueError,
            "blocks: expected a whole number, where there is no axis, but got None",
        ),
        (lambda: fn.contrib.muon_bp(blocks=2, shards="shard"), ValueError, "blocks: expected None, where blocks are"),
        (lambda: fn.contrib.muon_bp(blocks=2, block_rate=0.0), ValueError, "block_rate: expected"),
        (lambda: fn.contrib.in_blocks(fn.trace(0.9), 0), ValueError, "blocks: expected a whole number of at least 1"),
        (lambda: fn.contrib.in_blocks(fn.trace(0.9), 2, -1), ValueError, "dim: expected a whole number of at least 0"),
    ],
)
def test_what_is_wrong_is_named(make: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        make()


@each_of(Path(__file__).parent / "golden/muon_bp")
def test_muon_bp_follows_the_equations_of_its_paper(case: Case) -> None:
    hyper = case.hyper
    tx = fn.contrib.muon_bp(
        hyper["lr"], hyper["mu"], hyper["weight_decay"], axis="data", dim=hyper["shard"],
        block_rate=hyper["block_lr"] / hyper["lr"],
    )  # fmt: skip
    for t, params, state in replayed(case, tx, fn.periodic(hyper["period"])):
        for i, (p, m) in enumerate(zip(params, roles.find(state, "first_moment")[0], strict=True)):
            case.hold(p, f"p{i}.param", t)
            case.hold(m, f"p{i}.momentum", t)
