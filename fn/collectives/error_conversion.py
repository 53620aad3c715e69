"""Errors as the vectors that they stand for, and back: what survives a change of the number of ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fn.collectives.codecs.codec import Codec, segmented
from fn.collectives.codecs.segments import Segments, tile
from fn.collectives.compressed import settle
from fn.collectives.error_storage import to_blocks
from fn.collectives.feedback import DampedError, Decayed, Differences, Feedback, LazyError, Off, StoredClassic
from fn.errors import expected

Tree = Any


def to_plain(error: Tree, codec: Codec, feedback: Feedback, segments: Segments, dtype: torch.dtype) -> Tensor | None:
    """Return the vector that an error stands for; None for a feedback that keeps nothing.

    Args: error: of R rows of `segments`. codec, feedback: with which it was made. dtype: of the vectors that travelled.
    Raises: TypeError for an error of a feedback that does not tell its rule, unless it is such a vector itself.
    """
    if isinstance(feedback.rule, Off) or (feedback.rule is not None and isinstance(error, tuple) and not error):
        return None
    if feedback.rule is None or isinstance(feedback.rule, Decayed | Differences):  # it adds something else to a message
        return _own(error, segments)
    device = error.device if isinstance(error, Tensor) else error[0].device
    like = torch.zeros(segments.valid.shape[0], segments.row_length, dtype=dtype, device=device)
    return settle(segmented(codec, segments), feedback, error, like)


def _own(error: Tree, segments: Segments) -> Tensor:
    """Return an error that is added up as it is, and not as what it adds to a message, as its feedback alone knows.

    That is right wherever what is sent later is linear in it, such as `x + 0.9 * error`.
    """
    length = segments.valid.shape[0] * segments.row_length
    if isinstance(error, Tensor) and error.shape == (length,) and error.is_floating_point():
        return error
    form = f"{error.dtype} {tuple(error.shape)}" if isinstance(error, Tensor) else type(error).__name__
    raise TypeError(
        f"feedback: is one of your own, and its error is {form}; errors that move to another number of ranks are "
        f"floating vectors like the {length} numbers that are encoded; save and load on the same number, or start anew"
    )


def from_plain(vector: Tensor, like: Tree, segments: Segments, feedback: Feedback, age: Tensor | None) -> Tree:
    """Return an error in the form of `like` that stands for a vector; to 8 bits where that form has 8.

    Args: vector: (R * n,). like: an error of the same rows. age: of the errors that the vector comes from, for a
        feedback that counts steps.
    Raises: TypeError for a form that is not known here.
    """
    if isinstance(like, Tensor):
        return vector.to(like.dtype)
    if isinstance(like, LazyError):
        return LazyError(vector.to(like.buffer.dtype), torch.zeros_like(like.scale))
    if isinstance(like, DampedError):
        rows, block = segments.valid.shape[0], feedback.rule.block
        wide = vector.to(like.scales.dtype)
        if like.scales.ndim == 1:
            codes, scales = to_blocks(wide, block)
        else:
            at = tile(segments.widths, segments.valid.to(wide.device), block)
            codes, scales = torch.ops.fn.quantize(wide.view(rows, -1), *at, 8)
        return DampedError(codes.reshape(-1), scales.view(like.scales.shape), like.age if age is None else age)
    if isinstance(feedback.rule, StoredClassic):
        return feedback.residual(vector.float(), torch.zeros_like(vector, dtype=torch.float32), like)
    raise TypeError(expected("error", "a vector, a LazyError or a DampedError", type(like).__name__))


def age_of(error: Tree) -> Tensor | None:
    """Return how many steps an error counts, 0-d int64; None if it does not count."""
    return error.age if isinstance(error, DampedError) else None
