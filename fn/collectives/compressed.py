"""The two compressed collectives that generate everything: `reduce_scatter_wide` and `all_gather_shards`.

One after the other they are `compressed_all_reduce`, which has a way without servers, too.

    x (n,) on each rank
      | compensate with the worker error, encode W rows        } reduce_scatter_wide
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

from fn.collectives import messages
from fn.collectives.axis import axis_index, axis_size
from fn.collectives.codecs.codec import Codec, Segments, mean_of_rows, segmented
from fn.collectives.feedback import DampedError, Feedback, LazyError, Off, StoredError, fused_with, settle
from fn.collectives.profiling import observe_kept, observe_loss, observed, step_range
from fn.errors import expected

Tree = Any


class ErrorFeedbackState(NamedTuple):
    """What was not delivered yet, per flat buffer: worker errors (n,) and server errors (n / W,), one rank's own."""

    worker: Tree
    server: Tree

    @property
    def rank_local(self) -> frozenset[str]:
        """Return the fields that belong to one rank."""
        return frozenset({"worker", "server"})


def reduce_scatter_wide(
    x: Tensor, error: Tree, axis: str, codec: Codec, feedback: Feedback, *, segments: Segments | None = None
) -> tuple[Tensor, Tree]:
    """Average a vector over the ranks of an axis in codes; each rank gets its shard of the mean.

    Args:
        x: (n,) floating, n a multiple of W * codec.align.
        error: what `feedback.init(x)`, `initial_errors` or the last call returned.
        axis: the axis' name, of size W.
        segments: where several tensors lie side by side in the W rows of x. None: x is one tensor.
    Returns: the shard (n / W,), unrounded, in float32 where x is in half precision; and the next error.
    Raises: ValueError if n is misaligned, the error does not fit x, or the axis is not bound; TypeError if x is
        not floating.
    """
    size = axis_size(axis)
    check_vector(x, error, size * codec.align, "x")
    payload, error = encode(for_rows(codec, segments), feedback, x.view(size, -1), error)
    received = messages.exchange(payload, axis)
    with step_range("decode"):
        shard = mean_of_rows(for_own_row(codec, segments, axis), received)
    return (shard.float() if shard.element_size() < 4 else shard), error


def all_gather_shards(
    shard: Tensor, error: Tree, axis: str, codec: Codec, feedback: Feedback, *, segments: Segments | None = None
) -> tuple[Tensor, Tree]:
    """Give every rank the whole vector, in codes, of which each has a shard.

    Args:
        shard: (n / W,) floating, its length a multiple of codec.align.
        error: what `feedback.init(shard)`, `initial_errors` or the last call returned.
        axis, codec, feedback, segments: as for `reduce_scatter_wide`.
    Returns: the vector (n,) in the dtype of the shard, the same on every rank, and the next error.
    Raises: as `reduce_scatter_wide`.
    """
    payload, error = _encode_shard(shard, error, for_own_row(codec, segments, axis), codec, feedback)
    gathered = messages.gather(payload, axis)
    return decode(for_rows(codec, segments), gathered, shard.dtype), error


def compressed_all_reduce(
    x: Tensor,
    errors: tuple[Tree, Tree],
    axis: str,
    codec: Codec,
    feedback: Feedback,
    *,
    segments: Segments | None = None,
    consume: bool = False,
    servers: bool = True,
) -> tuple[Tensor, tuple[Tree, Tree]]:
    """Average a vector over the ranks of an axis in codes: `reduce_scatter_wide`, then `all_gather_shards`.

    Where the codec has a kernel for it, the server's part is one pass: decode, mean, feedback, encode. The numbers
    are the same either way. Without servers every rank sends its codes to all others:

    x (n,) on each rank
      | compensate with the worker error, encode one row
      | all-gather, one uint8 message
      | decode W rows, mean over the ranks                     -> (n,), the same on every rank

    That mean is not encoded a second time, so there is no server error. A rank sends W - 1 times its codes, where
    servers send 2 (W - 1) / W times, in two messages that wait for each other: the same bytes for two ranks, twice as
    many for four.

    Paper: without servers: Stich, Cordonnier and Jaggi, Sparsified SGD with memory (NeurIPS 2018): every worker sends
        what it compressed and keeps the rest; what was sent is what is applied.

    Args:
        x: (n,) floating, n a multiple of W * codec.align, without servers of codec.align.
        errors: the worker's and the server's, without servers () in place of the second.
        axis, codec, feedback, segments: as for `reduce_scatter_wide`; without servers segments lie in one row.
        consume: x is not needed any more, and its memory may be used for the error.
    Returns: the mean (n,) in the dtype of x, the same on every rank, and the next errors.
    Raises: as `reduce_scatter_wide`, and ValueError without servers for an error with a server's part.
    """
    gathered, errors = mean_in_codes(x, errors, axis, codec, feedback, segments, consume=consume, servers=servers)
    return (decode if servers else mean_of_codes)(for_rows(codec, segments), gathered, x.dtype), errors


def mean_in_codes(
    x: Tensor,
    errors: tuple[Tree, Tree],
    axis: str,
    codec: Codec,
    feedback: Feedback,
    segments: Segments | None,
    *,
    consume: bool = False,
    servers: bool,
) -> tuple[Tree, tuple[Tree, Tree]]:
    """Return what `compressed_all_reduce` decodes, W rows, and the next errors. Args: as there."""
    worker, server = errors
    if not servers:
        check_no_server(server)
        check_vector(x, worker, codec.align, "x")
        payload, worker = encode(for_rows(codec, segments), feedback, x.view(1, -1), worker, consume=consume)
        return messages.gather(payload, axis), (worker, server)
    size = axis_size(axis)
    mine = for_own_row(codec, segments, axis)
    fused = fused_with(mine, feedback)
    shard = x[: x.shape[0] // size].view(1, -1)  # stands for a shard in shape and dtype
    if fused is None or fused.serve is None or x.dtype not in _SCALE_DTYPES or not fused.accepts(shard, server):
        wide, worker = reduce_scatter_wide(x, worker, axis, codec, feedback, segments=segments)
        payload, server = _encode_shard(wide.to(x.dtype), server, mine, codec, feedback)
        return messages.gather(payload, axis), (worker, server)
    check_vector(x, worker, size * codec.align, "x")
    check_vector(shard[0], server, codec.align, "shard")
    payload, worker = encode(for_rows(codec, segments), feedback, x.view(size, -1), worker, consume=consume)
    gathered, server = through_servers(payload, server, axis, codec, feedback, segments=segments)
    return gathered, (worker, server)


def _encode_shard(shard: Tensor, error: Tree, own: Codec, codec: Codec, feedback: Feedback) -> tuple[Tree, Tree]:
    check_vector(shard, error, codec.align, "shard")
    return encode(own, feedback, shard.view(1, -1), error, worker=False)


def through_servers(
    payload: Tree, server: Tree, axis: str, codec: Codec, feedback: Feedback, *, segments: Segments | None = None
) -> tuple[Tree, Tree]:
    """Carry encoded rows through the servers: exchange, decode, mean, feedback, encode, gather.

    Args: payload: W rows; server: the server's error; the rest as for `reduce_scatter_wide`. The codec must have a
        kernel for the server's part.
    Returns: the payload of the mean, W rows, the same on every rank, and the next error.
    """
    fused = fused_with(for_own_row(codec, segments, axis), feedback)
    if fused is None or fused.serve is None:
        raise TypeError("codec: has no kernel that serves; use reduce_scatter_mean and all_gather_shards")
    received = messages.exchange(payload, axis)
    with step_range("serve"):
        payload, server = fused.serve(received, server)
    if observed():
        observe_kept(fused.settle(server, 1))
    return messages.gather(payload, axis), server


def initial_errors(
    x: Tensor, axis: str, codec: Codec, feedback: Feedback, *, segments: Segments | None = None, servers: bool = True
) -> tuple[Tree, Tree]:
    """Return the errors with which a worker and a server start, for vectors like x (n,).

    They have the form in which the codec's kernels are fastest where the feedback leaves that open: `classic` with
    lazy=True, and `damped` with the codec's own block. Without servers, theirs is ().
    """
    size = axis_size(axis) if servers else 1
    shard = x[: x.shape[0] // size]

    def initial(codec: Codec, x: Tensor, rows: int) -> Tree:
        fused = fused_with(codec, feedback)
        free = fused is not None and getattr(feedback.rule, "lazy", True)
        return fused.init(x.view(rows, -1)) if fused is not None and free else feedback.init(x)

    worker = initial(for_rows(codec, segments), x, size)
    return worker, initial(for_own_row(codec, segments, axis), shard, 1) if servers else ()


def settle_errors(
    x: Tensor,
    errors: tuple[Tree, Tree],
    axis: str,
    codec: Codec,
    feedback: Feedback,
    *,
    segments: Segments | None = None,
) -> tuple[Tensor, Tensor]:
    """Return a worker's and a server's error as the plain vectors (n,) and (n / W,) that they stand for; x as sent."""
    size, (worker, server) = axis_size(axis), errors
    shard = x[: x.shape[0] // size]
    sent = settle(for_rows(codec, segments), feedback, worker, x.view(size, -1))
    return sent, settle(for_own_row(codec, segments, axis), feedback, server, shard.view(1, -1))


def encode(
    codec: Codec, feedback: Feedback, x: Tensor, error: Tree, *, consume: bool = False, worker: bool = True
) -> tuple[Tree, Tree]:
    """Compensate x (R, n) with an error and encode it; return the payload and the next error.

    Args: consume: x is not needed any more. worker: x is what this rank has to say, not a mean that it passes on.
    """
    if not observed() or codec.bits >= 32:
        with step_range("encode"):
            return _encode(codec, feedback, x, error, consume)
    compensated = x.reshape(-1) + settle(codec, feedback, error, x) if worker else x  # before x is consumed
    with step_range("encode"):
        payload, after = _encode(codec, feedback, x, error, consume)
    if worker:
        observe_loss(compensated, compensated - codec.decode(payload).reshape(-1))
    if not isinstance(feedback.rule, Off):
        observe_kept(settle(codec, feedback, after, x))
    return payload, after


def _encode(codec: Codec, feedback: Feedback, x: Tensor, error: Tree, consume: bool) -> tuple[Tree, Tree]:
    """Do what `encode` says. The algebra below is what a kernel of the codec for this feedback must compute."""
    fused = fused_with(codec, feedback)
    if fused is not None and fused.accepts(x, error):
        return (fused.encode_over if consume and fused.encode_over is not None else fused.encode)(x, error)
    if isinstance(error, tuple) and not error and feedback.rule is not None and not isinstance(feedback.rule, Off):
        raise ValueError("error: is empty, but this feedback keeps one; a state belongs to what it was made for")
    compensated = feedback.compensate(x.reshape(-1), error)
    payload = codec.encode(compensated.view_as(x))
    if isinstance(feedback.rule, Off):  # nothing is kept, so nothing needs decoding
        return payload, ()
    return payload, feedback.residual(compensated, codec.decode(payload).reshape(-1), error)


def decode(codec: Codec, payload: Tree, dtype: torch.dtype) -> Tensor:
    """Return decoded rows as one vector in a dtype."""
    with step_range("decode"):
        return codec.decode(payload).reshape(-1).to(dtype)


_SCALE_DTYPES = (torch.float32, torch.float64)  # a shard in another dtype is rounded between the halves


def for_rows(codec: Codec, segments: Segments | None) -> Codec:
    """Return the codec for the rows of all ranks."""
    return codec if segments is None else segmented(codec, segments)


def for_own_row(codec: Codec, segments: Segments | None, axis: str) -> Codec:
    """Return the codec for the row that this rank serves."""
    return codec if segments is None else segmented(codec, segments.row(axis_index(axis)))


def check_vector(x: Tensor, error: Tree, align: int, argument: str) -> None:
    """Refuse a vector that cannot travel, or does not fit its error. argument: what the caller calls it."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(expected(argument, "float16, bfloat16, float32 or float64", f"{x.dtype}"))
    if x.ndim != 1 or x.shape[0] % align:
        raise ValueError(expected(argument, f"one dimension, a multiple of {align} long", f"shape {tuple(x.shape)}"))
    first = error[0] if isinstance(error, LazyError | DampedError | StoredError) else error
    if isinstance(first, Tensor) and first.shape != x.shape:
        raise ValueError(
            f"error: has shape {tuple(first.shape)}, but {argument} has {tuple(x.shape)}; a state belongs to the "
            f"world size and the parameters that it was made for"
        )


def check_no_server(server: Tree) -> None:
    """Refuse a server's error, which nobody would deliver. Raises: ValueError."""
    if not isinstance(server, tuple) or server:
        raise ValueError("error: has a server's part, but no rank serves; a state belongs to what it was made for")


def mean_of_codes(codec: Codec, payload: Tree, dtype: torch.dtype) -> Tensor:
    """Return the mean of decoded rows (n,) in a dtype."""
    with step_range("decode"):
        return mean_of_rows(codec, payload).to(dtype)
