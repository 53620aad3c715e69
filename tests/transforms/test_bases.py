"""Averages in another basis: nothing is lost on the way there and back, and tiles are what they are said to be."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import chains
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fn
from fn import Phase, Round
from fn.transforms import bases
from fn.transforms.bases import Basis

SHAPES = st.lists(st.integers(0, 9), max_size=4)
EXACT = fn.compressed_average("data", fn.identity(), fn.off(), servers=False)


def numbers(shape: Sequence[int], seed: int = 0) -> Tensor:
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rotation(n: int) -> Basis:
    """Return a basis that is no order of the numbers: runs of n, each rotated; what is left over is another part."""
    turns = [torch.linalg.qr(numbers((length, length)))[0] for length in range(n + 1)]

    def into(x: Tensor) -> list[Tensor]:
        flat, whole = x.reshape(-1), x.numel() // n * n
        parts = [flat[:whole].reshape(whole // n, n)]
        parts += [flat[whole:].reshape(1, x.numel() - whole)] if x.numel() - whole else []
        return [part @ turns[part.shape[1]] for part in parts]

    def back(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
        return torch.cat([(part @ turns[part.shape[1]].T).flatten() for part in parts]).reshape(shape)

    return Basis(into, back)


@given(SHAPES, st.integers(1, 11))
def test_tiles_lose_no_number_and_come_back(shape: list[int], tile: int) -> None:
    x = torch.arange(math.prod(shape)).reshape(shape)
    parts = fn.tiles(tile).into(x)
    assert parts
    assert torch.equal(torch.cat([part.flatten() for part in parts]).sort().values, x.flatten())
    assert torch.equal(fn.tiles(tile).back(parts, x.shape), x)


@pytest.mark.parametrize(
    ("kind", "dtype", "batch"),
    [
        (fn.tiles, torch.float32, 1),
        (fn.tiles, torch.bfloat16, 60),
        (fn.dct, torch.float64, 60),
        (fn.dct, torch.float32, 1 << 18),
    ],
)
@given(shapes=st.lists(SHAPES, min_size=1, max_size=6), tile=st.integers(1, 11))
def test_a_list_is_cut_and_put_together_as_its_tensors_are(kind, dtype, batch, shapes, tile) -> None:
    basis, shapes = kind(tile), [torch.Size(shape) for shape in [*shapes, *shapes[:2]]]
    tensors = [numbers(shape, i).to(dtype) for i, shape in enumerate(shapes)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bases, "BATCH_OF_CPU", batch)
        parts = basis.parts_of(tensors)
        together = basis.tensors_of(parts, shapes)
    within = {"rtol": 0, "atol": 0} if kind is fn.tiles else {}  # matrices of another height are multiplied otherwise
    for x, of_one, again in zip(tensors, parts, together, strict=True):
        torch.testing.assert_close(of_one, basis.into(x), **within)
        torch.testing.assert_close(again, basis.back(of_one, x.shape), **within)


@given(SHAPES, st.integers(1, 11))
def test_each_chunk_is_a_tile_row_by_row(shape: list[int], tile: int) -> None:
    x = torch.arange(math.prod(shape)).reshape(shape)
    matrix = x.reshape(shape[0] if len(shape) > 1 else 1, -1) if x.numel() else x.reshape(0, 0)
    wanted = [
        matrix[i : i + tile, j : j + tile].flatten().tolist()
        for i in range(0, matrix.shape[0], tile)
        for j in range(0, matrix.shape[1], tile)
    ]
    assert sorted(chunk for part in fn.tiles(tile).into(x) for chunk in part.tolist()) == sorted(wanted)


def test_tiles_stand_in_the_order_of_rows_and_cut_ones_behind():
    parts = fn.tiles(2).into(torch.arange(15).view(3, 5))
    assert [part.tolist() for part in parts] == [
        [[0, 1, 5, 6], [2, 3, 7, 8]],
        [[4, 9]],
        [[10, 11], [12, 13]],
        [[14]],
    ]


def test_of_a_prime_length_not_everything_is_sent():
    """
    Differs: fn.transforms.bases.tiles: their chunks are as long as the largest divisor of a side up to `tile`, so that
        of a prime length each element is a chunk of its own, and everything is sent.
    """
    parts = fn.tiles(64).into(torch.zeros(67))
    assert [tuple(part.shape) for part in parts] == [(1, 64), (1, 3)]


@pytest.mark.parametrize("sync", [EXACT, lambda n: EXACT], ids=["one transform", "one for each length"])
@given(shapes=st.lists(SHAPES, min_size=1, max_size=3), n=st.integers(1, 5), rotated=st.booleans())
def test_an_exact_mean_is_the_mean_in_any_basis(sync: Any, shapes: list[list[int]], n: int, rotated: bool) -> None:
    """Also of numbers and of empty tensors, under `vmap`; every rank gets the same, which `simulate` checks."""
    tx = fn.in_basis(rotation(n) if rotated else fn.tiles(n), sync)
    x = {str(i): numbers((3, *shape), i) for i, shape in enumerate(shapes)}

    def on_rank(x: Any) -> Any:
        backwards = dict(reversed(x.items()))
        return tx.compressed_update(backwards, tx.init(x), x)[0]

    mean = fn.simulate(on_rank, "data", 3, in_dims=0, out_dims=None)(x)
    for name, own in x.items():
        torch.testing.assert_close(mean[name], own.mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("basis", [fn.tiles(3), rotation(4)], ids=["tiles", "rotated"])
def test_what_arrived_and_the_errors_are_what_was_to_be_sent(basis: Basis) -> None:
    """The errors are those of the basis."""
    tx = fn.in_basis(basis, lambda n: fn.compressed_average("data", fn.top_k(0.2, n), servers=False))
    sent = [numbers((3, 5, 4, 7), 1), numbers((3, 5, 10), 2)]  # ranks, steps, shape

    def on_rank(sent: list[Tensor]) -> Any:
        params = [x[0] for x in sent]
        state, means = tx.init(params), []
        for step in range(5):
            mean, state = tx.compressed_update([x[step] for x in sent], state, params)
            means.append(mean)
        return [sum(each) for each in zip(*means, strict=True)], [own.worker[0] for own in state]

    arrived, errors = fn.simulate(on_rank, "data", 3, in_dims=0, out_dims=(None, 0))(sent)
    missing = [x.mean(0).sum(0) - a for x, a in zip(sent, arrived, strict=True)]
    assert all(x.abs().max() > 0.01 for x in missing)
    parts = [part for x in missing for part in basis.into(x) if part.numel()]
    for length, error in zip(sorted({part.shape[1] for part in parts}), errors, strict=True):
        wanted = torch.cat([part.flatten() for part in parts if part.shape[1] == length])
        torch.testing.assert_close(error.mean(0), wanted, rtol=0, atol=1e-12)


def test_at_rest_nothing_is_taken_anywhere():
    tx = fn.in_basis(fn.tiles(2), EXACT)
    assert tx.warmup_update is EXACT.warmup_update
    assert tx.local_update is EXACT.local_update


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: fn.tiles(0), ValueError, "tile: expected a whole number of at least 1, but got 0"),
        (lambda: fn.in_basis(fn.tiles(2), lambda n: n).init([torch.ones(2)]), TypeError, r"sync\(2\): expected a tran"),
        (lambda: fn.sparse_loco(axis="data", k=0), ValueError, "k: expected a whole number of at least 1"),
        (lambda: fn.sparse_loco(axis="data", k=0.1), TypeError, "k: expected a whole number"),
        (lambda: fn.sparse_loco(axis="data", k=5, tile=2), ValueError, "k: expected .* at most 4"),
        (lambda: fn.sparse_loco(axis="data", keep=0.0), ValueError, "keep: expected"),
    ],
)
def test_bad_input_is_refused_by_name(make: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()


def test_updates_of_other_shapes_are_refused():
    tx, params = fn.in_basis(fn.tiles(2), EXACT), [torch.ones(3)]
    with pytest.raises(ValueError, match="updates: expected leaf '0' to have its shape"):
        tx.compressed_update([torch.ones(4)], tx.init(params), params)


def run(tx: fn.Transform, start: list[Tensor], gradients: list[Tensor], schedule: Any) -> list[list[Tensor]]:
    """Train W simulated ranks, each with gradients of its own in every step (W, ...); return the params after each."""
    world, found = gradients[0].shape[0], []
    dims = fn.rank_dims(tx.init(start))
    state = fn.simulate(tx.init, "data", world, in_dims=None, out_dims=dims)(start)
    params = [p.expand(world, *p.shape).clone() for p in start]

    def step(when: Phase | Round, g: Any, s: Any, p: Any) -> Any:
        updates, s = tx.update(when)(g, s, p)
        return fn.apply_updates(p, updates), s

    for t, g in enumerate(gradients):
        grads = [g[:, : p[0].numel()].reshape(p.shape) for p in params]
        one = partial(step, schedule(t))
        params, state = fn.simulate(one, "data", world, in_dims=(0, dims, 0), out_dims=(0, dims))(grads, state, params)
        found.append(params)
    return found


@pytest.mark.parametrize(("over", "share"), [("senders", 1.0), ("ranks", 0.5)])
def test_sparse_loco_takes_what_the_senders_of_an_element_say(over: str, share: float) -> None:
    """Each of two ranks has moved another element, and sends no other.

    Differs: fn.local_optimizers.sparse_loco: the mean of an element is over those ranks that sent it, as in the
        authors' code; the paper divides by all, as `top_k` does with over="ranks".
    """
    tx = chains.sparse_loco(0.1, weight_decay=0.0, axis="data", k=1, tile=2, over=over, values=fn.identity())
    gradients = torch.eye(2)
    (params,) = run(tx, [torch.zeros(2)], [gradients], fn.every(1))[-1]
    torch.testing.assert_close(params, torch.full((2, 2), -0.1 * share))
