"""The ballots codec: one bit per element, for or against, and no magnitude. `ballots`."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn.arguments import check_whole
from fn.collectives.codecs.codec import Codec, Fused, Segments, segments_of
from fn.collectives.feedback import Counted, Off
from fn.errors import expected
from fn.kernels import ops  # noqa: F401  it defines torch.ops.fn
from fn.kernels.layout import tile
from fn.kernels.tracing import cached_plan

TIES = ("alternate", "even", "plus")
"""How a zero may vote."""

EVEN = 0b01010101
"""Eight ties as they vote where the signs of even indices are +; the first element is the lowest bit."""

GOLDEN = 2654435769
"""2^32 over the golden ratio. The top bit of its multiples is 0 as often as 1 among all t, and among every k-th t."""


class Ballots(NamedTuple):
    """A payload, all of it uint8.

    bits: (R, n / 8), 1 is a vote for +. cast: a bit for each block, 0 where it abstains; (R, F / 8), for each tensor
    begins a byte of its own.
    valid: (R, 1), 0 where a number was not finite.
    """

    bits: Tensor
    cast: Tensor
    valid: Tensor


def ballots(ties: str = "alternate", block: int = 64) -> Codec:
    """Send one bit per element, and no magnitude: a vote for + or for -.

        C(x) = sgn(x);   C(0) = 0 in a block of zeros, else +1 or -1 by turns

    With servers the mean of the ranks' votes is voted on once more, so the majority arrives. Without servers the mean
    of the votes arrives. A row with a NaN or an Inf comes back as NaN, for which each row has a byte. Use it for
    gradients or momenta where the learning rate alone sets the length of a step, and use it with `off()`: a vote leaves
    out the whole magnitude, which would make errors large.

    A zero has nothing to say. Where a whole block of elements of a tensor is zero (a token that this rank has not
    seen, an expert without a token), the rank abstains, and others decide. Where all abstain, or all elements of a
    block are tied, 0 arrives. A zero among other numbers has to use its bit. It votes for + in half of the steps, and
    so does a server whose ranks are divided: the signs take turns, so that what is 0 or tied moves to and fro.

    >>> import torch, fn
    >>> codec = fn.ballots()
    >>> codec.decode(codec.encode(torch.tensor([[3.0, -0.1, 0.0, 0.0, -2.0, 5.0, 0.2, -1.0]])))
    tensor([[ 1., -1.,  1., -1., -1.,  1.,  1., -1.]])
    >>> codec.decode(codec.encode(torch.zeros(1, 8))).count_nonzero()
    tensor(0)

    Args:
        ties: how a zero votes, and a server whose ranks are divided. "alternate": as above, at even indices for + where
            it is for - at odd ones. The step is counted where errors are kept otherwise, which takes `off()` and a
            link such as `compressed_average`; without a count, every step is the first one. "even": always for + where
            the element's index in its tensor is even, else for -. "plus": always for +, as in signSGD. With the last
            two nothing abstains, and params drift wherever an even number of ranks disagree; they replay recorded runs.
        block: elements of a tensor that abstain together, a multiple of 8; each sends a flag, 1 / block bit an
            element.
    Raises: ValueError if ties is none of them, or for a block that is no multiple of 8.

    Paper: Bernstein et al., signSGD with majority vote is communication efficient and fault tolerant (arXiv
        1810.05291), algorithm 1; Liu et al., Distributed Lion (arXiv 2404.00438).
    Differs: ties take turns; in the paper a tie is 0, in the code of Distributed Lion always -1. Zeros abstain or take
        turns; there they vote for -.
    """
    if ties not in TIES:
        raise ValueError(expected("ties", "'alternate', 'even' or 'plus'", f"{ties!r}"))
    check_whole("block", block, least=8)
    if block % 8:
        raise ValueError(expected("block", "a multiple of 8", f"{block}"))
    return _ballots(ties, block, None)._replace(make=partial(ballots, ties, block))


def is_vote(codec: Codec) -> bool:
    """Return whether a codec is `ballots`, which keeps no magnitude."""
    return isinstance(codec.make, partial) and codec.make.func is ballots


def _ballots(ties: str, block: int, segments: Segments | None) -> Codec:
    @cached_plan
    def lay_out(rows: int, n: int, device: torch.device) -> tuple[Tensor, list[int], Tensor, Tensor, int]:
        """Return what is real of each block (R, B), the runs, and what `_places` says."""
        widths, valid = segments_of(segments, rows, n, device)
        return *tile(widths, valid.contiguous(), block), *_places(widths, block, device)

    def encode(x: Tensor, against: Tensor | int = 2 * EVEN) -> Ballots:
        """Return the votes. against: a byte with a 1 at the indices where a zero votes for -."""
        # (R, n) -> (R, n / 8). A zero is neither above nor below; NaN is not zero.
        plus, minus = torch.ops.fn.pack_bits(x), torch.ops.fn.pack_bits(-x)
        zero = plus & minus
        # A zero has a 1 in `plus`, which is taken away at the indices that vote for -.
        bits = plus if ties == "plus" else plus ^ (zero & against)
        # Two reductions to (R, 1) notice every NaN and Inf without a mask (R, n). They refuse rows without elements.
        most, least = (x.amax(1, True), x.amin(1, True)) if x.shape[1] else [x.new_zeros(len(x), 1)] * 2
        finite = most - most == least - least  # NaN if they are not
        _, _, octets, _, length = lay_out(x.shape[0], x.shape[1], x.device)
        if ties == "alternate":
            # (R, n / 8) -> (R, F, block / 8) -> (R, F)
            silent = (zero == 0xFF).index_select(1, octets).unflatten(1, (-1, block // 8)).all(-1)
            cast = silent * -1.0  # whose sign is packed: 0 where a rank abstains
        else:
            cast = x.new_zeros(len(x), length)
        return Ballots(bits, torch.ops.fn.pack_bits(cast), finite.to(torch.uint8))

    def scales_of(payload: Ballots, rows: int) -> Tensor:
        _, _, _, flags, length = lay_out(rows, 8 * payload.bits.shape[1], payload.bits.device)
        # (R, F / 8) -> (R, F) -> (R, B): 1, or 0 in a block that abstains
        cast = torch.ops.fn.unpack_bits(payload.cast, length, torch.float32)
        scales = cast.index_select(1, flags).clamp(min=0)
        return torch.where(payload.valid == 1, scales, torch.nan)

    def decode(payload: Ballots) -> Tensor:
        valid, runs, *_ = lay_out(payload.bits.shape[0], 8 * payload.bits.shape[1], payload.bits.device)
        # (R, ...) -> (R, 1, ...): a mean of one message
        one = payload.bits[:, None], scales_of(payload, len(valid))[:, None]
        votes: Tensor = torch.ops.fn.sign_decode_mean(*one, valid, runs, 0)
        return votes

    def decode_mean(payload: Ballots) -> Tensor:
        valid, runs, *_ = lay_out(1, 8 * payload.bits.shape[1], payload.bits.device)
        # (W, n / 8) -> (1, W, n / 8), one mean of W messages
        mean: Tensor = torch.ops.fn.sign_decode_mean(payload.bits[None], scales_of(payload, 1)[None], valid, runs, 0)
        return mean[0]

    def init(x: Tensor) -> Counted:
        return Counted(torch.zeros((), dtype=torch.int64, device=x.device))

    def in_turn(x: Tensor, error: Counted) -> tuple[Ballots, Counted]:
        turn = (error.age * GOLDEN >> 31) & 1
        # A rank has a row for each server, a server has one. Zeros of ranks vote against what servers do with ties in
        # the same step: of four ranks, two with zeros would else decide against the other two in every second step.
        against = EVEN << turn if x.shape[0] > 1 else 2 * EVEN >> turn
        return encode(x, against.to(torch.uint8)), Counted(error.age + 1)

    counting = Fused(init, lambda x, error: isinstance(error, Counted), in_turn, None)

    def fused(rule: Any) -> Fused | None:
        return counting if isinstance(rule, Off) and ties == "alternate" else None

    made = cached_plan(lambda s: _ballots(ties, block, s))
    return Codec(encode, decode, 8, 1.0 + 1.0 / block, decode_mean, segmented=made, fused=fused)


@cached_plan
def _places(widths: tuple[int, ...], block: int, device: torch.device) -> tuple[Tensor, Tensor, int]:
    """Return the places of the bytes of each flag's block (F block / 8,), those of each block's flag (B,), and F.

    Flags of a tensor begin a byte of their own, so that a message of several tensors is as long as messages of one
    together. A shorter block repeats its last byte, as a flag without a block does.
    """
    octets: list[int] = []
    flags: list[int] = []
    first, length = 0, 0
    for width in widths:
        blocks, end = -(-width // block), first + width // 8
        whole = -(-blocks // 8) * 8
        octets += [min(k, end - 1) for k in range(first, first + whole * block // 8)]
        flags += range(length, length + blocks)
        first, length = end, length + whole
    of_bytes, of_flags = (torch.tensor(places, dtype=torch.int64, device=device) for places in (octets, flags))
    return of_bytes, of_flags, length
