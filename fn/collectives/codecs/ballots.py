"""The ballots codec: one bit per element, for or against, and no magnitude. `ballots`."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn.collectives.codecs.codec import Codec, Segments, segments_of
from fn.errors import expected
from fn.kernels import ops  # noqa: F401  it defines torch.ops.fn
from fn.kernels.tracing import cached_plan

Tree = Any

TIES = ("even", "plus")
"""How a zero may vote."""


class Ballots(NamedTuple):
    """A payload. bits: (R, n / 8) uint8, 1 is a vote for +; valid: (R, 1) uint8, 0 where a number was not finite."""

    bits: Tensor
    valid: Tensor


def ballots(ties: str = "even") -> Codec:
    """Send one bit per element, and no magnitude: a vote for + or for -.

        C(x) = sgn(x),   C(0) = +1 at an even index, -1 at an odd one

    With servers the mean of the ranks' votes is voted on once more, so the majority arrives. Without servers the mean
    of the votes arrives. A row with a NaN or an Inf comes back as NaN, for which each row has a byte. Use it for
    gradients or momenta where the learning rate alone sets the length of a step, and use it with `off()`: a vote leaves
    out the whole magnitude, which would make errors large.

    >>> import torch, fn
    >>> codec = fn.ballots()
    >>> codec.decode(codec.encode(torch.tensor([[3.0, -0.1, 0.0, 0.0, -2.0, 5.0, 0.2, -1.0]])))
    tensor([[ 1., -1.,  1., -1., -1.,  1.,  1., -1.]])

    Args:
        ties: how a zero votes, and a server whose ranks are divided. "even": for + where the element's index in its
            tensor is even, else for -, so that ties cancel and neither sign is preferred. "plus": always for +, as in
            signSGD; params then drift wherever an even number of ranks disagree.
    Raises: ValueError if ties is neither.

    Paper: Bernstein et al., signSGD with majority vote is communication efficient and fault tolerant (arXiv
        1810.05291), algorithm 1; Liu et al., Distributed Lion (arXiv 2404.00438).
    Differs: a tie votes by its index; in the paper it is 0, in the code of Distributed Lion always -1.
    """
    if ties not in TIES:
        raise ValueError(expected("ties", "'even' or 'plus'", f"{ties!r}"))
    return _ballots(ties, None)._replace(make=partial(ballots, ties))


def is_vote(codec: Codec) -> bool:
    """Return whether a codec is `ballots`, which keeps no magnitude."""
    return isinstance(codec.make, partial) and codec.make.func is ballots


def _ballots(ties: str, segments: Segments | None) -> Codec:
    @cached_plan
    def ties_of(dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return what two zeros in a row stand for; tensors begin at multiples of 8 in a row."""
        return torch.tensor([1.0, -1.0 if ties == "even" else 1.0], dtype=dtype, device=device)

    @cached_plan
    def lay_out(rows: int, n: int, device: torch.device) -> tuple[Tensor, list[int]]:
        cut = segments_of(segments, rows, n, device)
        return cut.valid.contiguous(), cut.runs

    def encode(x: Tensor) -> Ballots:
        # (R, n) -> (R, n / 2, 2): one element at an even index and one at an odd one
        pairs = x.unflatten(1, (x.shape[1] // 2, 2))
        decided = torch.where(pairs == 0, ties_of(x.dtype, x.device), pairs).flatten(1)
        # Two reductions to (R, 1) notice every NaN and Inf without a mask (R, n). They refuse rows without elements.
        ends = [x.amin(1, keepdim=True), x.amax(1, keepdim=True)] if x.shape[1] else [x.new_zeros(len(x), 1)]
        # (2, R, 1) -> (R, 1)
        finite = torch.stack([end.isfinite() for end in ends]).all(0)
        return Ballots(torch.ops.fn.pack_bits(decided), finite.to(torch.uint8))

    def decode(payload: Ballots) -> Tensor:
        rows, n = payload.bits.shape[0], 8 * payload.bits.shape[1]
        valid, runs = lay_out(rows, n, payload.bits.device)
        # (R, 1) -> (R, S); a kernel takes an address, to which an expanded tensor is one number
        scales = torch.where(payload.valid == 1, 1.0, torch.nan).expand(rows, valid.shape[1]).contiguous()
        votes: Tensor = torch.ops.fn.sign_decode(payload.bits, scales, valid, runs)
        return votes

    made = cached_plan(lambda s: _ballots(ties, s))
    return Codec(encode, decode, align=8, bits=1.0, segmented=made)
