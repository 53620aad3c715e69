"""Top-k: which elements travel, where they land, in how many bytes, and what a mean over ranks that sent others is."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fn
from fn.collectives.codecs.codec import Segments, mean_of_rows, pack, segmented, unpack

CODECS = {
    "k of a block": partial(fn.top_k, 3, 16),
    "a part of a block": partial(fn.top_k, 0.25, 32),
    "k of the tensor": partial(fn.top_k, 5),
    "a part of the tensor": partial(fn.top_k, 0.1),
    "all": partial(fn.top_k, 1.0, 8),
    "senders": partial(fn.top_k, 2, 12, over="senders"),
    "bins": partial(fn.top_k, 8, 64, values=fn.bins(4, 6)),
    "int8": partial(fn.top_k, 4, 64, values=fn.int8(16)),
    "sign": partial(fn.top_k, 6, 64, over="senders", values=fn.sign()),
}
SIZES = [0, 1, 7, 1009, 1023]


def kept(n, k):
    return min(k, n) if isinstance(k, int) else math.ceil(k * n)


def by_hand(x, k, block):
    """Return what arrives of a vector: by magnitude, then by lower index."""
    out = torch.zeros_like(x)
    for start in range(0, x.shape[0], block or max(1, x.shape[0])):
        part = x[start : start + (block or x.shape[0])]
        order = sorted(range(part.shape[0]), key=lambda i: (-abs(float(part[i])), i))
        for i in order[: kept(part.shape[0], k)]:
            out[start + i] = part[i]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize(("k", "block"), [(3, 16), (0.25, 24), (5, None), (0.125, None), (1.0, 8), (1, 1), (64, 4096)])
def test_exactly_the_k_largest_of_every_block_come_back(k, block, n, dtype):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    codec = fn.top_k(k, block)
    found = codec.decode(codec.encode(x[None]))[0]
    assert torch.equal(found, by_hand(x, k, block).to(found.dtype))
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


@given(
    st.lists(st.sampled_from([-2.0, -1.0, 0.0, 1.0, 2.0]), max_size=40),
    st.integers(1, 6),
    st.one_of(st.none(), st.integers(6, 17)),
)
def test_of_equally_large_elements_the_first_are_sent(numbers, k, block):
    x, codec = torch.tensor(numbers), fn.top_k(k, block)
    assert torch.equal(codec.decode(codec.encode(x[None]))[0], by_hand(x, k, block))


def test_a_prime_length_is_cut_into_blocks_as_any_other():
    """67 elements by 16: four whole blocks and one of 3; 3 of each are sent, 15 of 67, where the authors send all.

    Differs: fn.collectives.codecs.top_k.top_k: indices are packed; the authors of DeMo and SparseLoCo send 64 bits for
        each. Their blocks divide the sides of a tensor, so that of a prime length each element is a block of its own,
        and everything is sent.
    """
    codec, x = fn.top_k(3, 16), torch.arange(1.0, 68.0)
    payload = codec.encode(x[None])
    (part,) = payload.tensor
    assert part.values.shape == (1, 1, 15)
    assert part.indices.shape == (1, 1, 8)  # 15 indices of 4 bits
    assert codec.decode(payload).count_nonzero() == 15
    assert codec.decode(payload)[0, -3:].tolist() == [65.0, 66.0, 67.0]  # the last block, whole


@given(st.integers(1, 31), st.integers(0, 40), st.integers(0, 2**31))
def test_numbers_are_packed_to_their_bits(width, n, seed):
    numbers = torch.randint(0, 2**width, (3, n), generator=torch.Generator().manual_seed(seed))
    packed = pack(numbers, width)
    assert packed.shape == (3, -(-n * width // 8))
    assert torch.equal(unpack(packed, width, n), numbers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("values", [None, fn.int8(16), fn.bins(4, 6)], ids=["whole", "int8", "bins"])
def test_a_mean_is_over_ranks_or_over_senders(values, dtype):
    x = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)).to(dtype)
    for over in ("ranks", "senders"):
        codec = fn.top_k(4, 25, over=over, values=values)
        payload = codec.encode(x)
        rows, held = codec.decode(payload), fn.top_k(4, 25).decode(fn.top_k(4, 25).encode(x)) != 0
        count = 4 if over == "ranks" else held.sum(0).clamp(min=1)
        torch.testing.assert_close(mean_of_rows(codec, payload), rows.sum(0) / count)
        tx = fn.compressed_average("data", codec, fn.off(), servers=False)
        update = fn.simulate(lambda g, tx=tx: tx.compressed_update(g, tx.init(g), g)[0], "data", 4, out_dims=None)
        torch.testing.assert_close(update(x), rows.sum(0) / count)


def test_padding_is_no_kept_element():
    """Two rows, of which the second has 2 real elements: both are sent, and bins or a scale are those of real ones."""
    x = torch.tensor([[1.0, -3.0, 2.0, 8.0, 5.0], [4.0, -6.0, 0.0, 0.0, 0.0]])
    for values in (fn.bins(256, 6), fn.sign()):
        codec = segmented(fn.top_k(4, 8, values=values), Segments((5,), torch.tensor([[5], [2]])))
        found = codec.decode(codec.encode(x))
        scale = math.sqrt((9 + 4 + 64 + 25 + 16 + 36) / 6)  # of signs: one for all rows of a tensor
        wanted = [4.0, -6.0] if values.bits == 8 else [scale, -scale]
        torch.testing.assert_close(found[1, :2], torch.tensor(wanted))
        assert not found[1, 2:].any()
        assert found[0].count_nonzero() == 4


@pytest.mark.parametrize("world", [2, 3])
def test_a_server_sends_the_k_largest_of_the_mean_and_keeps_the_rest(world):
    n, rounds = 12 * world, 5
    x = torch.randn(world, n, generator=torch.Generator().manual_seed(world), dtype=torch.float64)
    tx = fn.compressed_average("data", fn.top_k(2, 6), fn.classic())

    def on_rank(x):
        state, total = tx.init(x), torch.zeros_like(x)
        for _ in range(rounds):
            mean, state = tx.compressed_update(x, state, x)
            total = total + mean
        return mean, total, state.worker[0], state.server[0]

    mean, total, worker, server = fn.simulate(on_rank, "data", world, out_dims=(None, 0, 0, 0))(x)
    assert mean.view(-1, 6).count_nonzero(1).tolist() == [2] * (n // 6)
    sent = rounds * x.mean(0)
    torch.testing.assert_close(total[0] + worker.mean(0) + server.flatten(), sent)  # nothing is lost


@pytest.mark.parametrize(("make", "argument", "error"), [
    (lambda: fn.top_k(0), "k", ValueError), (lambda: fn.top_k(9, 8), "k", ValueError),
    (lambda: fn.top_k(0.0), "k", ValueError), (lambda: fn.top_k(1.5, 8), "k", ValueError),
    (lambda: fn.top_k("3"), "k", TypeError), (lambda: fn.top_k(math.nan), "k", ValueError),
    (lambda: fn.top_k(1, 0), "block", ValueError), (lambda: fn.top_k(1, 8.0), "block", TypeError),
    (lambda: fn.top_k(1, over="rank"), "over", ValueError),
    (lambda: fn.top_k(1, values=fn.int8), "values", TypeError), (lambda: fn.top_k(1, values=8), "values", TypeError),
])  # fmt: skip
def test_bad_arguments_are_named(make, argument, error):
    with pytest.raises(error, match=rf"^{argument}: expected .*, but got "):
        make()
