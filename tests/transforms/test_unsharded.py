"""Whole matrices where each rank has rows: what the transform makes of pieces is what its inner makes of the whole."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import fn
from fn import Phase, tree
from fn.transforms.muon import orthogonalize
from fn.transforms.owned import OwnedState
from fn.transforms.unsharded import Shards

W, C = Phase.WARMUP, Phase.COMPRESSED

SHAPES = ((8, 5), (8, 5), (7, 6), (2, 9), (5, 8), (8, 3), (0, 4), (3, 5, 4), (3, 7, 4), (2, 4, 3))
"""Rows that two and four ranks divide evenly, unevenly, and of which a rank has none; and stacks of matrices."""

DIMS = (0, 0, 0, 0, 1, None, 0, 0, 1, 2)


SHARDS = Shards("shard", SHAPES, DIMS)
"""How they are divided: the fifth by columns, the sixth not at all; the stacks by matrices, by rows, by columns."""


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def pieces(x: Tensor, dim: int | None, world: int) -> Tensor:
    """Return the pieces of all ranks, (W, ...), padded with zeros as those of simulated ranks are."""
    if dim is None:
        return x.expand(world, *x.shape)
    x = x.movedim(dim, 0)
    rows = -(-x.shape[0] // world)
    x = F.pad(x, (0,) * (2 * x.ndim - 1) + (world * rows - x.shape[0],))
    return x.view(world, rows, *x.shape[1:]).movedim(1, dim + 1)


def joined(xs: Tensor, shape: tuple[int, ...], dim: int | None) -> Tensor:
    """Take back `pieces`."""
    if dim is None:
        return xs[0]
    xs = xs.movedim(dim + 1, 1)
    return xs.reshape(-1, *xs.shape[2:])[: shape[dim]].movedim(0, dim)


def own_piece(x: Tensor, dim: int | None, world: int, rank: int) -> Tensor:
    """Return a real rank's piece, without padding."""
    if dim is None:
        return x.clone()
    rows = -(-x.shape[dim] // world)
    first = min(rank * rows, x.shape[dim])
    return x.narrow(dim, first, min(rows, x.shape[dim] - first)).clone()


def muon(inner: fn.Transform, **codes: Any) -> fn.Transform:
    return fn.chain(fn.trace(0.9), fn.unsharded(inner, SHARDS, **codes), fn.scale(-1.0))


INNER = {
    "muon": partial(orthogonalize, scale="max"),
    "with a state": lambda: fn.chain(fn.trace(0.5), orthogonalize(), fn.scale_by_neuron_norm()),
    "element by element": fn.scale_by_sign,
}
CODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "int8": {"codec": fn.int8(), "gather": fn.int8()},
    "int4 damped": {"codec": fn.int4(), "gather": fn.int8(), "feedback": fn.damped()},
    "signs": {"codec": fn.sign(), "gather": fn.sign()},
}


def simulated(tx: fn.Transform, world: int, phases: list[Phase]) -> tuple[list[list[Tensor]], Any, int]:
    """Return the updates of all steps, put together, the last state of all ranks, and what a rank has sent."""
    books: list[fn.Ledger] = []

    def run(*steps: Any) -> Any:
        state, found = tx.init([*steps[0]]), []
        with fn.ledger() as book:
            for phase, g in zip(phases, steps, strict=True):
                updates, state = tx.update(phase)([*g], state, None)
                found.append(updates)
        books.append(book)
        return found, state

    grads = [[pieces(g, dim, world) for g, dim in zip(gradients(t), DIMS, strict=True)] for t in range(len(phases))]
    found, state = fn.simulate(run, "shard", world)(*grads)
    whole = [[joined(u, *form) for u, *form in zip(us, SHAPES, DIMS, strict=True)] for us in found]
    return whole, state, books[0].total


def alone(inner: fn.Transform, phases: list[Phase]) -> list[list[Tensor]]:
    tx = fn.chain(fn.trace(0.9), inner, fn.scale(-1.0))
    state, found = tx.init(gradients(0)), []
    for t, _ in enumerate(phases):
        updates, state = tx.update(W)(gradients(t), state, gradients(t))
        found.append(updates)
    return found


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", INNER)
def test_pieces_take_the_steps_of_the_whole(name: str, world: int) -> None:
    found, _, _ = simulated(muon(INNER[name]()), world, [W, C, W])
    for ours, theirs in zip(found, alone(INNER[name](), [W, C, W]), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_what_codes_leave_out_is_kept_for_the_next_step() -> None:
    """Of an inner that hands on what it is given, what arrives and the errors of both ways add up to what was given."""
    tx, world, phases = fn.unsharded(fn.scale(1.0), SHARDS, codec=fn.sign(), gather=fn.int4()), 2, [C] * 6
    found, state, _ = simulated(tx, world, phases)
    for i, dim in enumerate(DIMS):
        given = sum(gradients(t)[i] for t in range(len(phases)))
        total = sum(us[i] for us in found)
        if dim is None or not given.numel():
            torch.testing.assert_close(total, given)
            continue
        owner, elements = int(state.owners[0][i]), pieces(given, dim, world)[0].numel()
        on_the_way = [state.errors.worker[i], state.errors.server[i][owner].view(world, -1)]
        kept = sum(x[:, :elements] for x in on_the_way).reshape(pieces(given.movedim(dim, 0), 0, world).shape)
        whole = joined(kept, given.movedim(dim, 0).shape, 0).movedim(0, dim)
        torch.testing.assert_close(total + whole, given, rtol=1e-4, atol=1e-4)


def on_real_ranks(tcp: bool) -> dict[str, Any]:
    world, rank, found = dist.get_world_size(), dist.get_rank(), {}
    phases = [W, C, C]
    with fn.bind({"shard": dist.group.WORLD}, tcp=tcp):
        for name, codes in CODES.items():
            tx = muon(orthogonalize(), **codes)
            pairs = [zip(gradients(t), DIMS, strict=True) for t in range(len(phases))]
            own = [[own_piece(g, dim, world, rank) for g, dim in of_step] for of_step in pairs]
            state, updates = tx.init(own[0]), []
            with fn.ledger() as sent:
                for phase, g in zip(phases, own, strict=True):
                    moves, state = tx.update(phase)(g, state, None)
                    updates.append(moves)
            found[name] = updates, sent.total
    return found


@pytest.mark.parametrize(("world", "tcp"), [(2, False), (4, True)])
def test_real_ranks_take_the_steps_of_simulated_ones(world: int, tcp: bool) -> None:
    """Over connections of our own and over gloo: updates to the bit, and bytes in the mean over the ranks."""
    of_ranks = ranks.run(world, on_real_ranks, tcp)
    for name, codes in CODES.items():
        expected, _, sent = simulated(muon(orthogonalize(), **codes), world, [W, C, C])
        for rank, found in enumerate(of_ranks):
            for ours, theirs in zip(found[name][0], expected, strict=True):
                for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                    assert torch.equal(a, own_piece(b, DIMS[i], world, rank)), (name, i)
        assert sum(found[name][1] for found in of_ranks) == pytest.approx(world * sent, abs=world * 6), name


def test_a_rank_sends_its_rows_and_their_updates() -> None:
    """2 (W - 1) / W of the N / W elements that it has.

    Differs: fn.transforms.unsharded.unsharded: that sends no codes, and a message for every W matrices; this is one
        message for all.
    """
    tx = fn.unsharded(orthogonalize(), "shard")

    def run(g: Tensor) -> Tensor:
        state = tx.init([g, g])
        with fn.ledger() as book:
            updates, _ = tx.update(W)([g, g], state, None)
        books.append(book)
        return updates[0]

    books: list[fn.Ledger] = []
    fn.simulate(run, "shard", 4)(torch.randn(4, 2, 6))
    assert books[0].sent == {("shard", "all_to_all"): 2 * (3 * 2 * 2 * 6 * 4) // 4}
    assert books[0].messages == {("shard", "all_to_all"): 2}


def guarded(on_rank: Tensor) -> tuple[Tensor, Tensor]:
    """Take a step of a matrix of which the last rank has no row, and of a vector that goes element by element."""
    labels = ["muon", "sgd"]
    kinds = {"muon": fn.unsharded(orthogonalize(), Shards("shard", ((3, 2),), (0,))), "sgd": fn.scale(1.0)}
    tx = fn.skip_nonfinite(fn.partition(kinds, labels))
    params = [torch.ones(1, 2), torch.ones(1)]
    grads = [on_rank[0].view(1, 1).expand(1, 2), on_rank[1].view(1)]
    updates, state = tx.update(W)(grads, tx.init(params), params)
    return torch.cat([u.reshape(-1) for u in updates]), state.skipped


@pytest.mark.parametrize("place", [(0, 0), (1, 1), (3, 1)])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_number_that_is_not_finite_on_one_rank_skips_the_step_on_all(place: tuple[int, int], bad: float) -> None:
    """Also where the other ranks have no row of that tensor, or it is brought together nowhere."""
    g = torch.ones(4, 2)
    g[place] = bad
    moves, skipped = fn.simulate(guarded, "shard", 4)(g)
    assert skipped.tolist() == [1] * 4
    assert not moves.any()
    moves, skipped = fn.simulate(guarded, "shard", 4)(torch.ones(4, 2))
    assert skipped.tolist() == [0] * 4
    assert moves[:, -1].all()


def test_local_steps_are_left_out_by_all_ranks_of_an_island() -> None:
    """Inside of fn.outer, where a rank would leave out its own alone."""
    whole = fn.unsharded(orthogonalize(), "shard")
    sync = fn.compressed_average("island", fn.identity(), fn.off())
    rate = fn.scale_by_learning_rate(0.1)
    tx = fn.outer(fn.chain(fn.trace(0.9), whole, rate), fn.chain(rate), sync)

    def run(g: Tensor) -> tuple[Tensor, Tensor]:
        params = [torch.ones(2, 3)]
        state = tx.init(params)
        updates, state = tx.update(fn.Round())([g], state, params)
        return updates[0], state.dropped

    g = torch.randn(2, 2, 2, 3, generator=torch.Generator().manual_seed(0))  # islands, shards
    g[1, 0, 0, 0] = torch.nan
    moves, dropped = fn.simulate(fn.simulate(run, "shard", 2), "island", 2)(g)
    assert dropped.tolist() == [[0, 0], [1, 1]]
    assert moves[0].abs().min() > 0
    assert not moves[1].any()


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: fn.unsharded(orthogonalize(), ("a", "b")), TypeError, "shards: expected the name of one axis"),
        (lambda: fn.unsharded(fn.average("shard"), "shard"), ValueError, "inner: expected no communication over the"),
        (lambda: fn.unsharded(fn.clip_by_global_norm(1.0), "shard"), ValueError, "inner: expected links that treat"),
        (lambda: fn.unsharded(fn.stateless(lambda u, p: u), "shard"), ValueError, "inner: expected links that treat"),
        (lambda: fn.unsharded(fn.diloco(axis="x"), "shard"), ValueError, "inner: expected a transform with phases"),
        (lambda: fn.unsharded(fn.trace(0.9), "shard", feedback=fn.classic()), ValueError, "feedback: is given without"),
        (lambda: fn.unsharded(fn.trace(0.9), SHARDS).init([torch.ones(2)]), ValueError, "shards: expected one for"),
    ],
)
def test_bad_input_is_refused_by_name(make: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()


def test_a_state_of_other_tensors_is_refused() -> None:
    tx = fn.unsharded(orthogonalize(), "shard")
    state = tx.init([torch.ones(2, 2), torch.ones(2, 2)])
    with pytest.raises(ValueError, match=r"state\.owners: expected 1 tensors"):
        tx.update(W)([torch.ones(2, 2)], state, None)
    assert [type(s) for s in tree.instances(state, OwnedState)] == [OwnedState]


def test_weight_decay_inside_is_seen() -> None:
    """It would need numbers of the params, which no rank has whole: NaN, and no decay of zero."""
    tx = fn.unsharded(fn.add_decayed_weights(0.1), "shard")
    params = [torch.ones(2, 2)]
    assert tx.update(W)(params, tx.init(params), params)[0][0].isnan().all()
