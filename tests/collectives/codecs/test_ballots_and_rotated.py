"""Votes and rotated messages: what they say by hand, what a majority is, what padding does, what is refused."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import Tensor

import fn
from fn.collectives.codecs.codec import Segments, segmented


def voted(x: Tensor, codec: fn.Codec, *, servers: bool = True) -> Tensor:
    """Average x (W, ...) in codes without feedback."""
    tx = fn.compressed_average("data", codec, fn.off(), servers=servers)

    def on_rank(x: Tensor) -> Tensor:
        return tx.compressed_update(x, tx.init(x), x)[0]

    return fn.simulate(on_rank, "data", len(x), in_dims=0, out_dims=None)(x)


def test_zeros_that_always_vote_plus_are_reported() -> None:
    assert fn.testing.check_codec(fn.ballots("plus")).faults == ("zeros: moved",)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("n", [1, 7, 8, 33])
@pytest.mark.parametrize("ties", ["even", "plus"])
def test_a_majority_decides_and_a_tie_as_it_is_told(world: int, n: int, ties: str) -> None:
    """
    Differs: fn.collectives.codecs.ballots.ballots: ties take turns; in the paper a tie is 0, in the code of Distributed
        Lion always -1. Zeros abstain or take turns; there they vote for -.
    """
    x = torch.randint(-1, 2, (world, n), generator=torch.Generator().manual_seed(world)).float()
    undecided = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0) if ties == "even" else torch.ones(n)
    ballots = torch.where(x == 0, undecided, x.sign())
    mean = ballots.mean(0)
    majority = torch.where(mean == 0, undecided, mean.sign())
    if world > 1:
        assert torch.equal(voted(x, fn.ballots(ties)), majority)
        torch.testing.assert_close(voted(x, fn.ballots(ties), servers=False), mean)


def over_time(x: Tensor, ties: str = "alternate", *, servers: bool = True, steps: int = 60) -> Tensor:
    """Return how far so many votes on x (W, ...) go in all, at most on the way."""
    tx = fn.compressed_average("data", fn.ballots(ties), fn.off(), servers=servers)

    def on_rank(x: Tensor) -> Tensor:
        state, far, most = tx.init(x), torch.zeros(x.shape), torch.zeros(x.shape)
        for _ in range(steps):
            vote, state = tx.compressed_update(x, state, x)
            far = far + vote
            most = torch.maximum(most, far.abs())
        return torch.stack([far, most])

    return fn.simulate(on_rank, "data", len(x), in_dims=0, out_dims=None)(x)


@pytest.mark.parametrize(("world", "servers"), [(3, False), (4, True)])
def test_ties_and_zeros_move_to_and_fro_and_never_away(world: int, servers: bool) -> None:
    x = torch.ones(world, 12)
    x[: world // 2] = -1.0  # divided where the number of ranks is even
    x[:, :4] = 0.0
    x[:, 8:] = 3.0
    far, most = over_time(x, servers=servers)
    still = 8 if world % 2 == 0 else 4
    assert most[:still].max() <= 4
    assert (far[8:] == 60).all()
    assert over_time(x, "even", servers=True)[1][:4].min() == 60


@pytest.mark.parametrize("period", [2, 3])
def test_no_period_of_the_data_makes_ties_drift(period: int) -> None:
    """Half of the elements are divided, in every k-th step only."""
    tx = fn.compressed_average("data", fn.ballots(), fn.off())

    def on_rank(sign: Tensor) -> Tensor:
        state, far, most = tx.init(sign), torch.zeros(sign.shape), torch.zeros(sign.shape)
        for t in range(30 * period):
            vote, state = tx.compressed_update(sign if t % period == 0 else sign.abs(), state, sign)
            if t % period == 0:
                far = far + vote
                most = torch.maximum(most, far.abs())
        return most

    signs = torch.ones(2, 16)
    signs[1, :8] = -1.0
    most = fn.simulate(on_rank, "data", 2, in_dims=0, out_dims=None)(signs)
    assert most[:8].max() <= 10
    assert (most[8:] == 30).all()


def test_a_block_of_zeros_abstains_and_where_all_abstain_nothing_moves() -> None:
    """Also beside other blocks of the tensor, in a shorter last one, and through one rank that has something to say."""
    x = torch.zeros(4, 1000)  # in pieces of 256, the last one shorter
    x[0, 128:192] = 1.0  # of the four ranks only one has seen this token
    x[:, 200] = -1.0
    votes = voted(x, fn.ballots("alternate"))
    assert (votes[128:192] == 1.0).all()
    assert votes[200] == -1.0
    assert not votes[:128].any()
    assert not votes[256:].any()


def test_two_ranks_that_agree_outvote_two_with_nothing_to_say() -> None:
    x = torch.ones(4, 16)
    x[:2, :8] = 0.0
    far, _ = over_time(x, steps=20)
    assert (far == 20).all()


def test_a_tensor_counts_from_its_own_beginning_and_padding_says_nothing() -> None:
    codec = segmented(fn.ballots("even"), Segments((16, 8), torch.tensor([[13, 3]])))
    found = codec.decode(codec.encode(torch.zeros(1, 24)))[0]
    assert found[:13].tolist() == [1.0, -1.0] * 6 + [1.0]
    assert found[16:19].tolist() == [1.0, -1.0, 1.0]
    assert not found[13:16].any()
    assert not found[19:].any()


def test_votes_take_a_bit_and_rotated_codes_what_they_take_unrotated() -> None:
    def total(codec: fn.Codec) -> int:
        with fn.ledger() as sent:
            voted(torch.ones(2, 2**14), codec)
        return sent.total

    # both halves send half a vector, a bit for each block of 64, and a byte for the row
    assert total(fn.ballots()) == 2**14 // 8 + 2**14 // 64 // 8 + 2
    assert total(fn.rotated(fn.int4())) == total(fn.int4())
    assert fn.rotated(fn.int4()).bits == fn.int4().bits


@pytest.mark.parametrize("block", [1, 2, 32, 256])
def test_blocks_are_multiplied_by_the_matrix_of_sylvester(block: int) -> None:
    """
    Differs: fn.collectives.codecs.rotated.rotated: H is divided by sqrt(block) on both ways; the authors divide by
        block on the way back, which gives the same numbers behind a codec that scales.
    """
    x = torch.randn(3, 2 * block, dtype=torch.float64)
    H = torch.tensor([[(-1.0) ** (a & b).bit_count() for a in range(block)] for b in range(block)]).double()
    codec = fn.rotated(fn.identity(), block)
    sent = codec.encode(x)
    torch.testing.assert_close(sent.view(3, 2, block), x.view(3, 2, block) @ H / block**0.5)
    torch.testing.assert_close(codec.decode(sent), x)
    theirs = fn.int8(256)
    y = (x.float().view(3, 2, block) @ H.float()).reshape(3, -1)
    back = (theirs.decode(theirs.encode(y)).view(3, 2, block) @ H.float() / block).reshape(3, -1)
    ours = fn.rotated(theirs, block)
    torch.testing.assert_close(ours.decode(ours.encode(x.float())), back, rtol=0, atol=0.02 * float(x.abs().max()))


def test_a_block_that_a_tensor_ends_in_is_filled_up_and_gives_nothing_to_its_neighbour() -> None:
    segments = Segments((64, 32), torch.tensor([[37, 5]]))
    codec = segmented(fn.rotated(fn.int8(32)), segments)
    x = torch.where(segments.mask(torch.device("cpu")), torch.randn(1, 96), 0.0)
    found = codec.decode(codec.encode(x))
    torch.testing.assert_close(found, x, rtol=0, atol=0.05)
    assert not found[~segments.mask(found.device)].any()


def test_an_outlier_costs_its_block_less_behind_the_transform() -> None:
    x = torch.randn(1, 4096, generator=torch.Generator().manual_seed(0))
    x[0, ::128] *= 30

    def lost(codec: fn.Codec) -> float:
        return float((codec.decode(codec.encode(x)) - x).norm())

    assert lost(fn.rotated(fn.int4(128))) < 0.6 * lost(fn.int4(128))


@pytest.mark.parametrize("codec", [fn.ballots("plus"), fn.rotated(fn.int8(64), 16)], ids=repr)
def test_they_are_pickled_and_spelled(codec: fn.Codec) -> None:
    again, x = pickle.loads(pickle.dumps(codec)), torch.randn(2, 64)
    assert repr(again) == repr(codec)
    assert torch.equal(again.decode(again.encode(x)), codec.decode(codec.encode(x)))


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: fn.ballots("minus"), ValueError, "ties: expected 'alternate', 'even' or 'plus', but got 'minus'"),
        (lambda: fn.rotated(fn.int4(), 24), ValueError, "block: expected a power of two, but got 24"),
        (lambda: fn.rotated(fn.int4(), 0), ValueError, "block: expected a power of two, but got 0"),
        (lambda: fn.top_k(2, 8, values=fn.ballots()), ValueError, "values: expected a codec that keeps magnitudes"),
    ],
)
def test_bad_input_is_refused_by_name(make, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()
