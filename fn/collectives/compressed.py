"""The two compressed collectives that generate everything: `reduce_scatter_mean` and `all_gather_shards`.

    x (n,) on each rank
      | compensate with the worker error, encode W rows        } reduce_scatter_mean
      | all-to-all, one uint8 message                          }
      | decode, mean over the ranks                            }   -> shard (n / W,)
      | compensate with the server error, encode one row       } all_gather_shards
      | all-gather, one uint8 message                          }
      | decode W rows                                          }   -> (n,), the same on every rank

Paper: Tang et al., 1-bit Adam (arXiv 2102.02888), figure 3 and algorithm 1; the exchange in two halves is theirs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.collectives import primitives
from fn.collectives.axis import axis_index, axis_size
from fn.collectives.codec import Codec, Segments, mean_of_rows, segmented
from fn.collectives.feedback import Feedback

Tree = Any


class ErrorFeedbackState(NamedTuple):
    """What was not delivered yet, per flat buffer: worker errors (n,) and server errors (n / W,), one rank's own."""

    worker: Tree
    server: Tree

    rank_local = frozenset({"worker", "server"})


def reduce_scatter_mean(
    x: Tensor, error: Tree, axis: str, codec: Codec, feedback: Feedback, *, segments: Segments | None = None
) -> tuple[Tensor, Tree]:
    """Average a vector over the ranks of an axis in codes; each rank gets its shard of the mean.

    Args:
        x: (n,) floating, n a multiple of W * codec.align.
        error: what `feedback.init(x)` or the last call returned.
        axis: the axis' name, of size W.
        segments: where several tensors lie side by side in the W rows of x. None: x is one tensor.
    Returns: the shard (n / W,) in the dtype of x, and the next error.
    Raises: ValueError if n is misaligned, the error does not fit x, or the axis is not bound; TypeError if x is
        not floating.
    """
    size = axis_size(axis)
    _check(x, error, size * codec.align, "x")
    rows = codec if segments is None else segmented(codec, segments)
    compensated = feedback.compensate(x, error)
    payload = rows.encode(compensated.view(size, -1))
    error = feedback.residual(compensated, rows.decode(payload).view(-1), error)
    received = primitives.exchange(payload, axis)
    mine = codec if segments is None else segmented(codec, segments.row(axis_index(axis)))
    return mean_of_rows(mine, received).to(x.dtype), error


def all_gather_shards(
    shard: Tensor, error: Tree, axis: str, codec: Codec, feedback: Feedback, *, segments: Segments | None = None
) -> tuple[Tensor, Tree]:
    """Give every rank the whole vector, in codes, of which each has a shard.

    Args:
        shard: (n / W,) floating, its length a multiple of codec.align.
        error: what `feedback.init(shard)` or the last call returned.
        axis, codec, feedback, segments: as for `reduce_scatter_mean`.
    Returns: the vector (n,) in the dtype of the shard, the same on every rank, and the next error.
    Raises: as `reduce_scatter_mean`.
    """
    _check(shard, error, codec.align, "shard")
    mine = codec if segments is None else segmented(codec, segments.row(axis_index(axis)))
    compensated = feedback.compensate(shard, error)
    payload = mine.encode(compensated.view(1, -1))
    error = feedback.residual(compensated, mine.decode(payload).view(-1), error)
    gathered = primitives.gather(payload, axis)
    rows = codec if segments is None else segmented(codec, segments)
    return rows.decode(gathered).reshape(-1).to(shard.dtype), error


def _check(x: Tensor, error: Tree, align: int, argument: str) -> None:
    if not x.is_floating_point():
        raise TypeError(f"{argument}: has dtype {x.dtype}; allowed are floating dtypes")
    if x.ndim != 1 or x.shape[0] % align:
        raise ValueError(f"{argument}: has shape {tuple(x.shape)}; allowed is one dimension, a multiple of {align} long")
    for leaf in tree.leaves(error):
        if isinstance(leaf, Tensor) and leaf.ndim == 1 and leaf.shape != x.shape:
            raise ValueError(
                f"error: has shape {tuple(leaf.shape)}, but {argument} has {tuple(x.shape)}; a state belongs to the "
                f"world size and the parameters that it was made for"
            )
