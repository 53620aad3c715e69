"""Sending to one rank: the same in simulated ranks and real ones, over connections of our own and over gloo."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor

import fn

RINGS = {2: [1, 0], 3: [1, 2, 0], 4: [2, 3, 1, 0]}
PAIR_OF_THREE = [2, 1, 0]  # rank 1 keeps its value

SHAPES = [(), (5,), (3, 0), (2, 3)]
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.uint8, torch.bool]


def of_rank(rank: int) -> list[Tensor]:
    """Return a tensor of each shape and dtype, of this rank; of the floating ones some are NaN, infinite or -0."""
    found = []
    for dtype in DTYPES:
        for shape in SHAPES:
            x = (torch.arange(torch.Size(shape).numel()).view(shape) + 10.0 * rank).to(dtype)
            if dtype.is_floating_point and x.numel() > 4:
                x.view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -0.0]).to(dtype)
            found.append(x)
    return found


def bits(x: Tensor) -> list[int]:
    return x.contiguous().view(-1).view(torch.uint8).tolist() if x.numel() else []


def check(received: list[Tensor], sender: int) -> None:
    for ours, theirs in zip(received, of_rank(sender), strict=True):
        assert ours.dtype == theirs.dtype
        assert ours.shape == theirs.shape
        assert bits(ours) == bits(theirs)


@pytest.mark.parametrize("perm", [*RINGS.values(), PAIR_OF_THREE, [0, 1, 2]], ids=str)
def test_each_simulated_rank_gets_the_value_of_the_one_that_sends_to_it(perm: list[int]) -> None:
    size = len(perm)
    x = [torch.stack(rows) for rows in zip(*map(of_rank, range(size)), strict=True)]
    found = fn.simulate(lambda x: fn.permute(x, "data", perm), "data", size)(x)
    for rank in range(size):
        check([rows[rank] for rows in found], perm.index(rank))


def on_processes(tcp: bool) -> dict[str, list[Tensor]]:
    size, rank = dist.get_world_size(), dist.get_rank()
    perms = {"ring": RINGS[size], "kept": [*range(size)], "back": [RINGS[size].index(r) for r in range(size)]}
    found = {}
    with fn.bind({"data": dist.group.WORLD}, tcp=tcp):
        for name, perm in perms.items():
            found[name] = fn.permute(of_rank(rank), "data", perm)
            assert fn.psum(torch.ones(1), "data") == size  # the others can follow
            rows = torch.arange(size)
            assert torch.equal(fn.all_to_all(rows, "data"), torch.full((size,), rank))
        with fn.ledger() as sent:
            fn.permute(torch.ones(100), "data", RINGS[size])
        assert sent.sent == {("data", "permute"): 400}
        assert sent.messages == {("data", "permute"): 1}
    return found


@pytest.mark.parametrize(("world", "tcp"), [(2, True), (3, False), (4, True)])
def test_real_ranks_get_what_simulated_ones_get(world: int, tcp: bool) -> None:
    ring = RINGS[world]
    for rank, found in enumerate(ranks.run(world, on_processes, tcp)):
        check(found["ring"], ring.index(rank))
        check(found["kept"], rank)
        check(found["back"], ring[rank])


def pairs_on_processes(tcp: bool) -> tuple[Tensor, Tensor, int]:
    rank = dist.get_rank()
    with fn.bind({"data": dist.group.WORLD}, tcp=tcp):
        x = torch.arange(4.0) + 10 * rank
        with fn.ledger() as sent:
            swapped = fn.permute(x, "data", PAIR_OF_THREE)
        f = lambda x: fn.permute(x, "data", PAIR_OF_THREE) + 1  # noqa: E731
        f = f if tcp else torch.compile(f, fullgraph=True, backend="aot_eager")  # which takes no connections of ours
        batch = torch.func.vmap(lambda y: fn.permute(y, "data", PAIR_OF_THREE), in_dims=1)(x.view(2, 2))
        assert torch.equal(batch, swapped.view(2, 2).T)
        return swapped, f(x), sent.total


@pytest.mark.parametrize("tcp", [True, False])
def test_a_rank_that_keeps_its_value_sends_nothing(tcp: bool) -> None:
    for rank, (swapped, compiled, sent) in enumerate(ranks.run(3, pairs_on_processes, tcp)):
        assert torch.equal(swapped, torch.arange(4.0) + 10 * PAIR_OF_THREE[rank])
        assert torch.equal(compiled, swapped + 1)
        assert sent == (0 if rank == 1 else 16)


def test_the_ledger_counts_it_in_simulated_ranks_and_nothing_for_the_identity() -> None:
    for perm, size in (([1, 0], 400), ([0, 1], 0)):
        with fn.ledger() as sent:
            fn.simulate(lambda x, perm=perm: fn.permute(x, "data", perm), "data", 2)(torch.ones(2, 100))
        assert sent.total == size


@pytest.mark.parametrize("inside", [True, False])
def test_another_vmap_passes_by(inside: bool) -> None:
    x = torch.arange(18).view(3, 3, 2)  # (other, rank, n)

    def f(x: Tensor) -> Tensor:
        return fn.permute(x, "data", [1, 2, 0])

    mapped = fn.simulate(torch.func.vmap(f), "data", 3, in_dims=1, out_dims=1)
    found = mapped(x) if inside else torch.func.vmap(fn.simulate(f, "data", 3))(x)
    assert torch.equal(found, x.roll(1, 1))


def test_what_all_ranks_share_is_still_shared() -> None:
    run = fn.simulate(lambda x: fn.permute(x, "data", [1, 0]), "data", 2, in_dims=None, out_dims=None)
    assert torch.equal(run(torch.ones(3)), torch.ones(3))


def test_simulated_ranks_compile_to_one_graph(graphs) -> None:  # type: ignore[no-untyped-def]
    f = fn.simulate(lambda x: fn.permute(2 * x, "data", [1, 2, 0]), "data", 3)
    compiled = torch.compile(f, fullgraph=True, backend=graphs)
    x = torch.randn(3, 4)
    assert torch.equal(compiled(x), 2 * x.roll(1, 0))
    assert graphs.count == 1


@pytest.mark.parametrize("perm", [[0], [0, 0], [1, 2], [0, 1, 2], [-1, 0]])
def test_what_is_no_permutation_of_the_ranks_is_refused(perm: list[int]) -> None:
    with pytest.raises(ValueError, match=r"perm: expected each of the 2 ranks of 'data' once, but got \["):
        fn.simulate(lambda x: fn.permute(x, "data", perm), "data", 2)(torch.ones(2))


@pytest.mark.parametrize("perm", [None, [1.0, 0.0], "10", 1])
def test_what_has_no_numbers_is_refused_by_name(perm: Any) -> None:
    with pytest.raises(TypeError, match="perm: expected a whole number for each rank, but got"):
        fn.simulate(lambda x: fn.permute(x, "data", perm), "data", 2)(torch.ones(2))


def test_one_rank_keeps_its_value() -> None:
    assert torch.equal(fn.permute(torch.ones(2), "data", [0]), torch.ones(2))


def gone() -> str:
    rank = dist.get_rank()
    with fn.bind({"data": dist.group.WORLD}):
        fn.permute(torch.ones(3), "data", [1, 2, 0])
        if rank == 2:
            os._exit(7)
        try:
            for _ in range(2):  # rank 0 waits for rank 2, and rank 1 for rank 0
                fn.permute(torch.ones(3), "data", [1, 2, 0])
        except fn.PeerLost as error:
            return str(error)
    return "nothing was raised"


def test_a_rank_that_ends_is_missed() -> None:
    first, second, third = ranks.outcomes(3, gone)
    assert third == ranks.Died(7)
    assert "permute by rank 0" in first
    assert "permute by rank 1" in second
