"""The ballots codec: one bit per element, for or against, and no magnitude. `ballots`."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn.collectives.codecs.codec import Codec, Segments, pack, unpack
from fn.errors import expected
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

    With servers the mean of the ranks' votes is voted on once more: what arrives is the majority. Without them what
    arrives is the mean of the votes. A row with a NaN or an Inf comes back as NaN; one byte for each row says so. For
    gradients or momenta behind which the learning rate alone says how far to go; with `off()`, for what a vote leaves
    out is no small number.

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
    def encode(x: Tensor) -> Ballots:
        index = torch.arange(x.shape[1], dtype=torch.int64, device=x.device)  # tensors begin at multiples of 8 in a row
        undecided = (index % 2 == 0) if ties == "even" else torch.ones_like(index, dtype=torch.bool)
        votes = (x > 0) | ((x == 0) & undecided)
        return Ballots(pack(votes.to(torch.uint8), 1), x.isfinite().all(1, keepdim=True).to(torch.uint8))

    def decode(payload: Ballots) -> Tensor:
        n = 8 * payload.bits.shape[1]
        votes = 2.0 * unpack(payload.bits, 1, n).to(torch.float32) - 1.0
        votes = torch.where(payload.valid == 1, votes, torch.nan)
        return votes if segments is None else segments.clear(votes)

    made = cached_plan(lambda s: _ballots(ties, s))
    return Codec(encode, decode, align=8, bits=1.0, segmented=made)
