"""Averages of two ranks, and local steps whose anchors differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from recorded_rounds import Case, Method, in_simulation, inner_of, load, replay
from torch import Tensor

import fn
from fn import tree


@pytest.mark.parametrize("world", [1, 2, 5, 8])
def test_every_rank_has_a_partner_but_one_of_an_odd_number(world: int) -> None:
    for turn in range(50):
        partners = fn.contrib.random_pairs(turn, world, 0)
        assert [partners[p] for p in partners] == [*range(world)]
        assert sum(p == r for r, p in enumerate(partners)) == world % 2


def test_all_pairs_come_as_often() -> None:
    counts = torch.zeros(6, 6)
    for turn in range(5000):
        for rank, partner in enumerate(fn.contrib.random_pairs(turn, 6, 3)):
            counts[rank, partner] += 1
    assert counts.diagonal().sum() == 0
    others = counts[~torch.eye(6, dtype=torch.bool)]
    assert (others - 1000).abs().max() < 130  # 4.6 standard deviations of 28.3
    assert fn.contrib.random_pairs(0, 64, 0) != fn.contrib.random_pairs(0, 64, 1) != fn.contrib.random_pairs(1, 64, 1)


def turn_of(world: int, d: Tensor, x: Tensor, **arguments: Any) -> tuple[Tensor, Any]:
    tx = fn.contrib.pair_average("data", **arguments)
    dims = fn.rank_dims(tx.init(d[0]))
    run = fn.simulate(lambda d, x: tx.compressed_update(d, tx.init(d), x), "data", world, out_dims=(0, dims))
    return run(d, x)


def test_a_pair_has_the_mean_of_its_differences_and_pulls_its_anchors_together() -> None:
    d, x = torch.randn(5, 3), torch.randn(5, 3)
    with fn.ledger() as sent:
        found, state = turn_of(5, d, x, pull=0.3, seed=2)
    partners = fn.contrib.random_pairs(0, 5, 2)
    expected = (d + d[partners]) / 2 + 0.3 * (x - (x + x[partners]) / 2)
    torch.testing.assert_close(found, expected)
    assert int(state.turn) == 1
    assert sent.sent == {("data", "permute"): 2 * 3 * 4}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_stays_in_its_pair(bad: float) -> None:
    d, x = torch.randn(4, 3), torch.randn(4, 3)
    d[2, 1] = bad
    found, state = turn_of(4, d, x, pairs=lambda turn, world: [1, 0, 3, 2])
    torch.testing.assert_close(found[:2], d[:2].mean(0).expand(2, 3))
    assert torch.equal(found[2], torch.zeros(3))
    assert torch.equal(found[3], d[3])
    assert state.left_out.tolist() == [0, 0, 1, 1]


SGD = fn.scale_by_learning_rate(0.1)


def refusals() -> dict[str, Any]:
    one = torch.ones(2, 1)
    return {
        "pull: expected a number": lambda: fn.contrib.pair_average("data", pull=-1.0),
        "axis: expected the name of one axis": lambda: fn.contrib.pair_average(("a", "b")),  # type: ignore[arg-type]
        "and partners that have each other, but got": lambda: turn_of(2, one, one, pairs=lambda turn, world: [1, 1]),
        "pairs: expected for each of the 2 ranks": lambda: turn_of(2, one, one, pairs=lambda turn, world: [1]),
        "its partner, and partners that have each other": lambda: turn_of(2, one, one, pairs=lambda t, world: [1, 2]),
        "sync: expected an average that is the same on all ranks": lambda: fn.outer(
            SGD, SGD, fn.contrib.pair_average("data")
        ),
        r"one that differs": lambda: fn.outer(SGD, SGD, fn.chain(fn.contrib.pair_average("data"))),
        "outer_tx: expected": lambda: fn.contrib.own_anchors(
            fn.average("data"), SGD, fn.scale(1.0), fn.contrib.pair_average("data")
        ),
    }


@pytest.mark.parametrize("text", refusals())
def test_what_does_not_fit_is_refused_by_name(text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        refusals()[text]()


def test_a_turn_that_differs_between_ranks_is_refused() -> None:
    tx, d = fn.contrib.pair_average("data"), torch.ones(2, 3)
    run = fn.simulate(lambda s, d: tx.compressed_update(d, s, d)[0], "data", 2, in_dims=(0, 0))
    state = tx.init(d)._replace(turn=torch.tensor([0, 1]), left_out=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"state\.turn: expected a number that the host knows"):
        run(state, d)


SHAPES = ((4, 3), (3,))


def gradients(rank: int, step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def trained() -> Any:
    """Return params of a rank of three after 14 steps of `fn.Optimizer`, its turn and its counts; rank 1 breaks."""
    rank = dist.get_rank()
    with fn.bind({"data": dist.group.WORLD}):
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        opt = fn.Optimizer(
            params, lambda lr: fn.contrib.no_loco(lr, axis="data"), schedule=fn.every(3, start=2), lr=0.05
        )
        for step in range(14):
            for p, g in zip(params, gradients(rank, step), strict=True):
                p.grad = g
            if rank == 1 and step == 7:  # in the middle of a round
                params[0].data[0, 0] = torch.nan
            opt.step()
        ((of_pairs,),) = tree.fields(opt.states, "sync")
        return [p.detach().clone() for p in params], int(of_pairs.turn), int(of_pairs.left_out)


def test_a_rank_whose_params_are_not_finite_returns_to_its_anchor_and_the_others_go_on() -> None:
    found = ranks.run(3, trained)
    partners = fn.contrib.random_pairs(1, 3, 0)
    for rank, (params, turn, left_out) in enumerate(found):
        assert turn == 4
        assert left_out == (rank in (1, partners[1]))
        assert all(x.isfinite().all() for x in params)


def test_there_is_nothing_that_all_ranks_agree_on() -> None:
    p = torch.nn.Parameter(torch.ones(2))
    opt = fn.Optimizer([p], lambda lr: fn.contrib.no_loco(lr, axis="data"), schedule=fn.every(3), lr=0.05)
    p.grad = torch.ones(2)
    opt.step()
    with pytest.raises(ValueError, match="OwnAnchorState, which has local_params"), fn.adapters.agreed_params(opt):
        pass


RECORDED = load("index.json", Path(__file__).parent / "golden/no_loco")
each_recorded = pytest.mark.parametrize("case", RECORDED, ids=[case.row["name"] for case in RECORDED])


def recorded(case: Case, *, over_rate: bool = True) -> Method:
    """NoLoCo, in the recorded pairs. The momentum there is lr b. over_rate: whether `pull` is gamma / lr, or gamma."""
    outer = case.hyper["outer"]
    rule = fn.chain(fn.trace(outer["momentum"]), fn.scale_by_learning_rate(outer["lr"]))

    def partners(turn: int, ranks: int) -> list[int]:
        groups = case.hyper["pairs"][turn % len(case.hyper["pairs"])]
        return [next(p for group in groups for p in group if rank in group and p != rank) for rank in range(ranks)]

    pull = outer["gamma"] / outer["lr"] if over_rate else outer["gamma"]
    mean = fn.contrib.pair_average("data", pull=pull, pairs=partners)
    tx = fn.contrib.own_anchors(fn.average("data"), inner_of(case.hyper["inner"]), rule, mean)
    return Method(tx, fn.every(case.hyper["H"]), momentum=outer["lr"])


@each_recorded
def test_the_recorded_run_is_replayed_in_simulated_ranks(case: Case) -> None:
    method = recorded(case)
    assert 0 < replay(case, method, *in_simulation(case, method.tx)) <= 1


@each_recorded
def test_the_recorded_gamma_is_pull_times_the_outer_rate(case: Case) -> None:
    """With gamma itself as `pull` the params leave the recorded ones; with gamma / lr the run is replayed above.

    Differs: fn.contrib._no_loco.no_loco: `pull` is gamma / lr, as the outer rate stands behind the momentum here.
    """
    assert case.hyper["outer"]["lr"] != 1
    method = recorded(case, over_rate=False)
    with pytest.raises(AssertionError, match=r"p0\.param row \d+: off by"):
        replay(case, method, *in_simulation(case, method.tx))
