"""The compressed collective without servers: codes go from every rank to every rank, and each averages what it gets.

    x (n,) on each rank
      | compensate with the worker error, encode one row
      | all-gather, one uint8 message
      | decode W rows, mean over the ranks                     -> (n,), the same on every rank

The mean is not encoded a second time, so there is no server error. A rank sends W - 1 times its codes, where
`compressed_all_reduce` sends 2 (W - 1) / W times, in two messages that wait for each other: the same bytes for two
ranks, twice as many for four.

Paper: Stich, Cordonnier and Jaggi, Sparsified SGD with memory (NeurIPS 2018): every worker sends what it compressed and
    keeps the rest; what was sent is what is applied.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fn.collectives import messages
from fn.collectives.codec import Codec, mean_of_rows, segmented
from fn.collectives.compressed import check_vector, encode
from fn.collectives.feedback import Feedback
from fn.collectives.observe import step_range
from fn.collectives.segments import Segments

Tree = Any


def check_no_server(server: Tree) -> None:
    """Refuse a server's error, which nobody would deliver. Raises: ValueError."""
    if not isinstance(server, tuple) or server:
        raise ValueError("error: has a server's part, but no rank serves; a state belongs to what it was made for")


def all_gather_mean(
    x: Tensor,
    errors: tuple[Tree, Tree],
    axis: str,
    codec: Codec,
    feedback: Feedback,
    *,
    segments: Segments | None = None,
    consume: bool = False,
) -> tuple[Tensor, tuple[Tree, Tree]]:
    """Average a vector over the ranks of an axis in codes, which every rank sends to all others.

    Args:
        x: (n,) floating, n a multiple of codec.align.
        errors: the worker's, and () in place of a server's.
        axis, codec, feedback: as for `compressed_all_reduce`. segments: in one row. consume: x is not needed any more.
    Returns: the mean (n,) in the dtype of x, the same on every rank, and the next errors.
    Raises: as `compressed_all_reduce`, and ValueError for an error with a server's part.
    """
    worker, server = errors
    check_no_server(server)
    check_vector(x, worker, codec.align, "x")
    codec = codec if segments is None else segmented(codec, segments)
    payload, worker = encode(codec, feedback, x.view(1, -1), worker, consume=consume)
    gathered = messages.gather(payload, axis)
    with step_range("decode"):
        mean = mean_of_rows(codec, gathered)
    return mean.to(x.dtype), (worker, server)
