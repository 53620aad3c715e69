"""What `fn.contrib.lion_muon` promises beside the recorded runs and the common contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from golden_cases import recorded_form
from muon_on_shards import take_the_steps_of_whole_matrices
from recorded_muon import Case, each_of, labels, replayed
from simulated import World, normal

import fn
from fn import Phase

W, C = Phase.WARMUP, Phase.COMPRESSED


def test_lion_votes_between_the_steps_of_muon() -> None:
    """Of momenta that are alike on all ranks the majority is the sign, so that votes change nothing."""
    params = [normal(6, 5), normal(4, seed=1)]
    votes, exact = (World(fn.contrib.lion_muon(0.1, axis="data", votes=votes), params, 3) for votes in (True, False))
    for t in range(6):
        g = [normal(*p.shape, seed=t).expand(3, *p.shape) for p in params]
        for w in (votes, exact):
            w.step(fn.periodic(3)(t), g)
    torch.testing.assert_close(votes.params, exact.params)
    before = exact.params
    after = exact.step(C).params
    moved = [(a - b * (1 - 0.1 * 0.2 * 0.1)).abs() for a, b in zip(after, before, strict=True)]
    for x in moved:
        torch.testing.assert_close(x, torch.full_like(x, 0.1 * 0.2))


def test_votes_are_on_momenta_whose_mean_is_that_of_mean_gradients() -> None:
    votes, exact = (
        World(fn.contrib.lion_muon(0.1, axis="data", votes=votes), [normal(6, 5)], 3) for votes in (True, False)
    )
    for t in range(4):
        g = [normal(3, 6, 5, seed=t)]
        for w in (votes, exact):
            w.step(fn.periodic(4)(t), g)
    means = [fn.roles.find(w.state, "first_moment")[0][0].mean(0) for w in (votes, exact)]
    torch.testing.assert_close(*means)
    assert not torch.equal(votes.params[0], exact.params[0])


def test_bytes_between_are_a_bit_a_number() -> None:
    params = [torch.zeros(64, 64), torch.zeros(512)]
    tx, sent = fn.contrib.lion_muon(axis="data"), {}
    for phase in (W, C):
        with fn.ledger() as book:
            fn.simulate(lambda g: tx.update(phase)(g, tx.init(params), params)[0], "data", 2)(  # noqa: B023
                [torch.ones(2, *p.shape) for p in params]
            )
        sent[phase] = book.total
    assert 31 < sent[W] / sent[C] <= 32


def test_on_shards_it_is_what_it_is_on_whole_matrices() -> None:
    take_the_steps_of_whole_matrices(fn.contrib.lion_muon(0.1), fn.contrib.lion_muon(0.1, shards="shard"))


@pytest.mark.parametrize(
    ("make", "kind", "match"),
    [
        (
            lambda: fn.contrib.lion_muon(lion_rate=0.0),
            ValueError,
            r"lion_rate: expected a number in \(0, inf\), but got 0.0",
        ),
        (lambda: fn.contrib.lion_muon(other_rate=-1.0), ValueError, "other_rate: expected"),
        (lambda: fn.contrib.lion_muon(b1=1.0), ValueError, "b1: expected"),
    ],
)
def test_what_is_wrong_is_named(make: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        make()


@each_of(Path(__file__).parent / "golden/lion_muon")
def test_lion_muon_follows_its_authors_code(case: Case) -> None:
    """Whose ranks average gradients; a momentum of each rank has the same mean.

    Differs: fn.contrib._lion_muon.lion_muon: ranks vote between; in the authors' code they average gradients
        exactly in every step. Every rank takes Muon's step of all matrices; there owners take it, and an all-reduce
        adds up their updates.
    """
    hyper, others = case.hyper, case.places("adamw")
    lr = hyper["lr"]
    tx = fn.contrib.lion_muon(
        lr, hyper["beta1"], hyper["beta2"], hyper["weight_decay"], axis="data", labels=labels(case),
        lion_rate=hyper["lion_lr"] / lr, votes=False, other=fn.scale_by_adam(*hyper["betas"], hyper["eps"]),
        other_rate=hyper["scalar_lr"] / lr,
    )  # fmt: skip
    for t, params, state in replayed(case, tx, fn.periodic(hyper["period"])):
        for i, p in enumerate(params):
            case.hold(p, f"p{i}.param", t)
        for i, v in zip(others, recorded_form(state, "nu", hyper["betas"]), strict=True):
            case.hold(v, f"p{i}.variance", t)
