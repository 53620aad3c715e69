"""The two compressed collectives that generate everything: `reduce_scatter_mean` and `all_gather_shards`.

One after the other they are an all-reduce of quantized values, `compressed_all_reduce`, which can do without servers.

    x (n,) on each rank, a gradient or a momentum
      | compensate with the worker error, encode W rows        } reduce_scatter_mean
      | all-to-all, one uint8 message                          }
      | decode, mean over the ranks                            }   -> shard (n / W,)
      | compensate with the server error, encode one row       } all_gather_shards
      | all-gather, one uint8 message                          }
      | decode W rows                                          }   -> (n,), the same on every rank

With `axis=("local", "node")`, from the fastest network to the slowest, each axis is one hop:

    x (n,)  --reduce-scatter over "local"-->  (n / L,)  --reduce-scatter over "node"-->  (n / (L N),)

and the all-gather goes the way back. `hierarchy` says which codec, feedback and rows each hop has.

Paper: Tang et al., 1-bit Adam (arXiv 2102.02888), figure 3 and algorithm 1; the exchange in two halves is theirs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fn import tree
from fn.arguments import check_kind
from fn.collectives import messages, primitives
from fn.collectives.axis import AxisNames, axis_size, names
from fn.collectives.codecs.codec import Codec, Segments, identity, mean_of_rows
from fn.collectives.differentiation import is_differentiated, refuse_to_differentiate
from fn.collectives.feedback import DampedError, Feedback, LazyError, Off, StoredError, fused_with, off, plain_error
from fn.collectives.following import shared, unheard
from fn.collectives.hierarchy import Codecs, Feedbacks, Hop, hops, join_errors, levels, pieces, split_errors
from fn.collectives.profiling import observe_kept, observe_loss, observed, step_range
from fn.collectives.simulation import replicated_if_equal
from fn.errors import expected
from fn.roles import declare

Tree = Any


@declare(rank_local=("worker", "server"), errors=("worker", "server"))
class ErrorFeedbackState(NamedTuple):
    """One rank's errors, per flat buffer: what it did not deliver as a worker, (n,), or as a server, (n / W,)."""

    worker: Tree
    server: Tree


def _check(x: Any, argument: str, segments: Any) -> None:
    check_kind(argument, x, Tensor, "a vector")
    if segments is not None:
        check_kind("segments", segments, Segments, "fn.collectives.codecs.codec.Segments or None")


def reduce_scatter_mean(
    x: Tensor, error: Tree, axis: AxisNames, codec: Codecs, feedback: Feedbacks, *, segments: Segments | None = None
) -> tuple[Tensor, Tree]:
    """Average a vector over the ranks of an axis, or of several, in codes; each rank gets its shard of the mean.

    Two ranks average four numbers in 8 bits. Rank r gets the r-th half, and keeps the rounding of its codes as error:

    >>> import torch, fn
    >>> def on_rank(x):
    ...     return fn.reduce_scatter_mean(x, torch.zeros(4), "data", fn.int8(), fn.classic())
    >>> shards, errors = fn.simulate(on_rank, "data", 2)(torch.tensor([[1.0, 2, 3, 4], [3.0, 2, 1, 0]]))
    >>> shards
    tensor([[1.9883, 1.9883],
            [1.9961, 1.9844]])
    >>> errors
    tensor([[0.0000, 0.0156, 0.0000, 0.0312],
            [0.0234, 0.0078, 0.0078, 0.0000]])

    Args:
        x: (n,) floating, n a multiple of W * codec.align.
        error: what `feedback.init(x)`, `initial_errors` or the last call returned.
        axis: the axis' name, or several from the fastest network to the slowest, of W ranks together.
        codec, feedback: how messages travel; for several axes see `hops`.
        segments: where several tensors lie side by side in the W rows of x. None: x is one tensor.
    Returns: the shard (n / W,) in the dtype of x, piece `axis_index(axis)` of the mean, and the next error.
    Raises: ValueError if n is misaligned, the error does not fit x, or an axis is not bound; TypeError if x is
        not floating.

    Not differentiable: ValueError for an x that is being differentiated, wherever ranks exchange, real or simulated.
    """
    shard, error = reduce_scatter_wide(x, error, axis, codec, feedback, segments=segments)
    return shard.to(x.dtype), error


def reduce_scatter_wide(
    x: Tensor, error: Tree, axis: AxisNames, codec: Codecs, feedback: Feedbacks, *, segments: Segments | None = None
) -> tuple[Tensor, Tree]:
    """Do what `reduce_scatter_mean` does, and return the shard of half precision vectors in float32, unrounded."""
    _check(x, "x", segments)
    _refuse_to_differentiate(x, "reduce_scatter_mean", axis)
    errors = split_errors(error, axis)
    shard = _reduce(x, errors, hops(axis, codec, feedback), levels(segments, axis))
    return shard, join_errors(errors, axis)


def all_gather_shards(
    shard: Tensor, error: Tree, axis: AxisNames, codec: Codecs, feedback: Feedbacks, *, segments: Segments | None = None
) -> tuple[Tensor, Tree]:
    """Give every rank the whole vector, in codes, from the shard that each rank has.

    >>> import torch, fn
    >>> def on_rank(shard):
    ...     return fn.all_gather_shards(shard, (), "data", fn.int8(), fn.off())[0]
    >>> fn.simulate(on_rank, "data", 2, out_dims=None)(torch.tensor([[1.0, 2.0], [3.0, -4.0]]))
    tensor([ 1.0000,  1.9844,  3.0000, -4.0000])

    Args:
        shard: (n / W,) floating, its length a multiple of codec.align.
        error: what `feedback.init(shard)`, `initial_errors` or the last call returned.
        axis, codec, feedback, segments: as for `reduce_scatter_mean`; the last axis is gathered first.
    Returns: the vector (n,) in the dtype of the shard, the same on every rank, and the next error.
    Raises: as `reduce_scatter_mean`.
    """
    _check(shard, "shard", segments)
    _refuse_to_differentiate(shard, "all_gather_shards", axis)
    plan, errors = hops(axis, codec, feedback), split_errors(error, axis)
    whole = _gather(shard, errors, plan, levels(segments, axis), len(plan))
    return whole, join_errors(errors, axis)


def compressed_all_reduce(
    x: Tensor,
    errors: tuple[Tree, Tree],
    axis: AxisNames,
    codec: Codecs,
    feedback: Feedbacks,
    *,
    segments: Segments | None = None,
    consume: bool = False,
    servers: bool = True,
) -> tuple[Tensor, tuple[Tree, Tree]]:
    """Average a vector in codes: `reduce_scatter_mean`, then `all_gather_shards`.

    Where the codec has a kernel for it, the server's part is one pass: decode, mean, feedback, encode. The numbers
    are the same either way. Without servers every rank of the last hop sends its codes to all others:

    x (n,) on each rank
      | compensate with the worker error, encode one row
      | all-gather, one uint8 message
      | decode W rows, mean over the ranks                     -> (n,), the same on every rank

    That mean is not encoded a second time, so there is no server error. A rank sends W - 1 times its codes, where
    servers send 2 (W - 1) / W times, in two messages that wait for each other: the same bytes for two ranks, twice as
    many for four.

    Args:
        x: (n,) floating, n a multiple of W * codec.align, without servers of codec.align.
        errors: the worker's and the server's, without servers () in place of the second.
        axis, codec, feedback, segments: as for `reduce_scatter_mean`. Without servers segments give the ranks of the
            last hop one row together.
        consume: x is not needed any more, and its memory may be used for the error.
    Returns: the mean (n,) in the dtype of x, the same on every rank, and the next errors.
    Raises: as `reduce_scatter_mean`, and ValueError without servers for an error with a server's part.

    Paper: without servers: Stich, Cordonnier and Jaggi, Sparsified SGD with memory (NeurIPS 2018): every worker sends
        what it compressed and keeps the rest; what was sent is what is applied.
    """
    _refuse_to_differentiate(x, "compressed_all_reduce", axis)
    plan = plan_of(axis, codec, feedback, segments, servers=servers)
    worker, server = (split_errors(half, axis) for half in errors)
    coded, dtype = [] if plan.exact else plan.hops[:-1], x.dtype  # with one axis there is no hop before the last one
    # To this rank's part of x, averaged over the axes before the last one.
    x = _exact_shard(x, plan.exact, segments) if plan.exact else _reduce(x, worker, coded, plan.cuts)

    # The last hop: codes go to the servers and come back as codes of the mean, or go from each rank to all others.
    def sent() -> tuple[Tree, tuple[Tree, Tree]]:
        payload, own = plan.encode(x, worker[-1], consume=consume)
        payload, served = plan.serve(payload, server[-1], x[: x.shape[0] // plan.rows])
        return payload, (own, served)

    payload, (worker[-1], server[-1]) = unheard(sent, kept=(worker[-1], server[-1]))
    payload = plan.gather(payload)
    # (n / W of the coded hops,) -> (n,)
    mean = _gather(plan.decode(payload, x.dtype), server, plan.hops, plan.cuts, len(coded))
    return mean.to(dtype), (join_errors(worker, axis), join_errors(server, axis))


class VectorPlan(NamedTuple):
    """How vectors of one layout are averaged in codes: what is the same in every step.

    hops: one for each axis. segments: of the vector. cuts: of the rows of each hop. exact: the axes before the last
    one, where the mean over them is exact; else (). rows: how many the last hop encodes, one for each of its servers.
    codec: of these rows. server: the codec of the row that this rank serves; None without servers.
    """

    hops: list[Hop]
    segments: Segments | None
    cuts: list[Segments | None]
    exact: tuple[str, ...]
    rows: int
    codec: Codec
    server: Codec | None

    def encode(self, x: Tensor, error: Tree, *, consume: bool) -> tuple[Tree, Tree]:
        """Encode what the last hop averages, (n,); return the codes and the next error. consume: as for `encode`."""
        last = self.hops[-1]
        check_vector(x, error, self.rows * last.codec.align, "x")
        # (n,) -> (W, n / W): row r goes to server r
        return encode(self.codec, last.feedback, x.view(self.rows, -1), error, consume=consume)

    def serve(self, payload: Tree, error: Tree, shard: Tensor) -> tuple[Tree, Tree]:
        """Let servers decode, average and encode a row each; without servers the codes stay as they are.

        Args: payload: `rows` rows. error: the server's. shard: like a server's mean (n / W,), of any numbers.
        Returns: codes of one row, which all ranks get, and the next error.
        """
        last = self.hops[-1]
        if self.server is None:
            check_no_server(error)
            return payload, error
        check_vector(shard, error, last.codec.align, "shard")
        return _serve(self.server, last.feedback, messages.exchange(payload, last.axis), error, shard)

    def gather(self, payload: Tree) -> Tree:
        """Return codes of the mean, or those of all ranks, the same on every rank. payload: what `serve` returned."""
        # Within the node, too: codes are fewer bytes than what they stand for.
        return gather_codes(payload, (*self.exact, self.hops[-1].axis))

    def decode(self, payload: Tree, dtype: torch.dtype) -> Tensor:
        """Decode what `gather` returned to the mean (n,); the codes of all ranks for a row are averaged here."""
        # Where the hops before are exact, all ranks hold the codes of the whole vector now.
        last, segments = self.hops[-1], self.segments if self.exact else self.cuts[-1]
        if self.server is not None:
            return _decode(last.for_rows(segments), payload, dtype)
        ranks, means = axis_size(last.axis), []
        for row in range(tree.leaves(payload)[0].shape[0] // ranks):
            codes = tree.map(lambda leaf, row=row: leaf[row * ranks : (row + 1) * ranks], payload)  # (W, ...), of a row
            codec = last.for_rows(None if segments is None else segments.row(row))
            with step_range("decode"):
                means.append(mean_of_rows(codec, codes).to(dtype))
        # (n / rows,) of each row -> (n,)
        return means[0] if len(means) == 1 else torch.cat(means)


def plan_of(
    axis: AxisNames, codec: Codecs, feedback: Feedbacks, segments: Segments | None, *, servers: bool
) -> VectorPlan:
    """Return the plan for vectors with these segments, on the axes as they are bound here."""
    *inner, last = plan = hops(axis, codec, feedback)
    cuts = levels(segments, axis, servers=servers)
    exact = tuple(hop.axis for hop in inner) if all(hop.exact for hop in inner) else ()
    rows, server = (axis_size(last.axis), last.for_own_row(cuts[-1])) if servers else (1, None)
    return VectorPlan(plan, segments, cuts, exact, rows, last.for_rows(cuts[-1]), server)


def _serve(codec: Codec, feedback: Feedback, received: Tree, error: Tree, shard: Tensor) -> tuple[Tree, Tree]:
    """Decode, average and encode W rows; return the codes of their mean, which is like `shard`, and the next error."""
    fused, shard = fused_with(codec, feedback), shard.view(1, -1)  # (n / W,) -> (1, n / W)
    # A kernel does not round the mean to half precision before it encodes it; the two halves in a row do.
    if fused is not None and fused.serve is not None and shard.element_size() >= 4 and fused.accepts(shard, error):
        with step_range("serve"):
            payload, error = fused.serve(received, error)
        if observed():
            observe_kept(plain_error(codec, feedback, error, shard))
        return payload, error
    with step_range("decode"):
        mean = mean_of_rows(codec, received).to(shard.dtype)  # (W, n / W) -> (n / W,)
    return encode(codec, feedback, mean.view(1, -1), error, worker=False)


def _reduce(x: Tensor, errors: list[Tree], plan: Sequence[Hop], cuts: Sequence[Segments | None]) -> Tensor:
    """Reduce-scatter x hop by hop; return the shard, half precision wide, and replace each hop's error by the next."""
    for i, hop in enumerate(plan):
        size = axis_size(hop.axis)
        check_vector(x, errors[i], size * hop.codec.align, "x")
        payload, errors[i] = encode(hop.for_rows(cuts[i]), hop.feedback, x.view(size, -1), errors[i])
        received = messages.exchange(payload, hop.axis)
        with step_range("decode"):
            x = mean_of_rows(hop.for_own_row(cuts[i]), received)  # (size, n / size) -> (n / size,)
        # The next hop adds up means of this one: rounded to half precision in between, their errors would grow.
        x = x.float() if x.element_size() < 4 else x
    return x


def _gather(x: Tensor, errors: list[Tree], plan: Sequence[Hop], cuts: Sequence[Segments | None], count: int) -> Tensor:
    """All-gather x over the first `count` hops, the last of them first; replace each hop's error by the next."""
    for i in reversed(range(count)):
        hop = plan[i]
        check_vector(x, errors[i], hop.codec.align, "shard")
        codec = hop.for_own_row(cuts[i])
        payload, errors[i] = encode(codec, hop.feedback, x.view(1, -1), errors[i], worker=False)
        # The first hop is gathered last: by then the ranks of all hops have the same.
        payload = messages.gather(payload, hop.axis, alike=() if i else tuple(one.axis for one in plan))
        x = _decode(hop.for_rows(cuts[i]), payload, x.dtype)  # (n / size,) -> (n,)
        # Ranks of the outer axes gather the same numbers only because their servers' errors have the same history. vmap
        # cannot know that, so where outer axes are simulated, x is compared, and leaves their levels if it is the same.
        x = replicated_if_equal(x, tuple(outer.axis for outer in plan[i + 1 :])) if plan[i + 1 :] else x
    return x


def exact_mean(x: Tensor, axis: AxisNames, *, consume: bool = False) -> Tensor:
    """Average a vector (n,) exactly. Over several axes, the last axis carries 1 / W of it, W the ranks of the others.

    Args: consume: x is not needed any more, and the mean may take its memory.
    """
    *inner, last = names(axis)
    if not inner:
        mean: Tensor = primitives.mean_in_place(x, last) if consume else primitives.pmean(x, last)
        return mean
    whole: Tensor = shared("mean", axis, lambda: x, lambda: _mean_over(x, inner, last))
    return whole


def _mean_over(x: Tensor, inner: Sequence[str], last: str) -> Tensor:
    size = axis_size(tuple(inner))
    # (n,) -> (a multiple of W,)
    padded = F.pad(x, (0, -x.shape[0] % size)) if x.shape[0] % size else x  # zeros, which no mean of others changes
    rules = (tuple(inner), (identity(),) * len(inner), off())
    shard, _ = reduce_scatter_mean(padded, (), *rules)
    del padded  # it is as large as the params, and the gather makes another one
    whole, _ = all_gather_shards(primitives.mean_in_place(shard, last), (), *rules)
    return whole[: x.shape[0]]


def _exact_shard(x: Tensor, axes: Sequence[str], segments: Segments | None) -> Tensor:
    """Average a vector over axes exactly, piece by piece; return this rank's rows, (n / W,), half precision wide."""
    cuts = pieces(segments)
    if segments is None or len(cuts) == 1:
        return reduce_exactly([x], axes, 1)
    rows, ends = x.view(segments.valid.shape[0], -1), [0, *accumulate(segments.widths)]
    # of each piece (rows, width) -> (rows width,)
    parts = (rows[:, ends[first] : ends[end]].reshape(-1) for first, end in cuts)
    return reduce_exactly(parts, axes, rows.shape[0] // axis_size(tuple(axes)))


def reduce_exactly(parts: Iterable[Tensor], axes: Sequence[str], rows: int) -> Tensor:
    """Average vectors over axes exactly, one after the other, and lay this rank's rows of them side by side: (n,)."""
    plan = [Hop(axis, identity(), off()) for axis in axes]
    # each (n_i,) -> (n_i / W,) -> (rows, width): a row of the last hop is cut out of every piece
    shards = [_reduce(part, [()] * len(plan), plan, [None] * len(plan)).view(rows, -1) for part in parts]
    return (shards[0] if len(shards) == 1 else torch.cat(shards, dim=1)).reshape(-1)


def gather_codes(payload: Tree, axes: tuple[str, ...]) -> Tree:
    """Gather a payload of one row over axes, the last one first; all rows lie one after the other then."""

    def gathered() -> Tree:
        codes = messages.gather(payload, axes[-1])  # (size, ...)
        for axis in reversed(axes[:-1]):
            of_ranks = messages.gather(tree.map(lambda leaf: leaf[None], codes), axis)  # (size, rows, ...)
            codes = tree.map(lambda leaf: leaf.flatten(0, 1), of_ranks)  # (size rows, ...)
        return codes

    return shared("gather", axes, lambda: messages.codes_like(payload, axis_size(axes)), gathered)


def encode(
    codec: Codec, feedback: Feedback, x: Tensor, error: Tree, *, consume: bool = False, worker: bool = True
) -> tuple[Tree, Tree]:
    """Compensate x (R, n) with a residual error and encode it; return the payload and the next error.

    Args: consume: x is not needed any more, and its memory may become the error's. worker: whether x is this rank's
        own, and not a mean that it passes on as a server; profiles report what codes lose of the former only.
    """
    if not observed() or codec.bits >= 32:
        with step_range("encode"):
            return _encode(codec, feedback, x, error, consume)
    # Before the kernel consumes x: afterwards its memory holds the error.
    compensated = x.reshape(-1) + plain_error(codec, feedback, error, x) if worker else x  # (R, n) -> (R n,)
    with step_range("encode"):
        payload, after = _encode(codec, feedback, x, error, consume)
    if worker:
        observe_loss(compensated, compensated - codec.decode(payload).reshape(-1))
    if not isinstance(feedback.rule, Off):
        observe_kept(plain_error(codec, feedback, after, x))
    return payload, after


def _encode(codec: Codec, feedback: Feedback, x: Tensor, error: Tree, consume: bool) -> tuple[Tree, Tree]:
    """Do what `encode` says. The algebra below is what a kernel of the codec for this feedback must compute."""
    fused = fused_with(codec, feedback)
    if fused is not None and fused.accepts(x, error):
        return (fused.encode_over if consume and fused.encode_over is not None else fused.encode)(x, error)
    if isinstance(error, tuple) and not error and feedback.rule is not None and not isinstance(feedback.rule, Off):
        raise ValueError("error: is empty, but this feedback keeps one; a state belongs to what it was made for")
    compensated = feedback.compensate(x.reshape(-1), error)  # (R, n) -> (R n,), as the error lies
    payload = codec.encode(compensated.view_as(x))
    if isinstance(feedback.rule, Off):  # nothing is kept, so nothing needs decoding
        return payload, ()
    return payload, feedback.residual(compensated, codec.decode(payload).reshape(-1), error)


def _decode(codec: Codec, payload: Tree, dtype: torch.dtype) -> Tensor:
    with step_range("decode"):
        # (W, n / W) -> (n,)
        return codec.decode(payload).reshape(-1).to(dtype)


def check_vector(x: Tensor, error: Tree, align: int, argument: str) -> None:
    """Refuse a vector that cannot travel, or does not fit its error. argument: what the caller calls it."""
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(expected(argument, "float16, bfloat16, float32 or float64", f"{x.dtype}"))
    if x.ndim != 1 or x.shape[0] % align:
        raise ValueError(expected(argument, f"one dimension, a multiple of {align} long", f"shape {tuple(x.shape)}"))
    first = error[0] if isinstance(error, LazyError | DampedError | StoredError) else error  # codes or buffer, (n,)
    if isinstance(first, Tensor) and first.shape != x.shape:
        raise ValueError(
            f"error: has shape {tuple(first.shape)}, but {argument} has {tuple(x.shape)}; a state belongs to the "
            f"world size and the parameters that it was made for"
        )


def check_no_server(server: Tree) -> None:
    """Refuse a server's error, which nobody would deliver. Raises: ValueError."""
    if not isinstance(server, tuple) or server:
        raise ValueError("error: has a server's part, but no rank serves; a state belongs to what it was made for")


def _refuse_to_differentiate(x: Tensor, collective: str, axis: AxisNames) -> None:
    """Refuse it here, for codes have no gradient that the exchange of them could notice."""
    if is_differentiated(x) and axis_size(axis) > 1:
        refuse_to_differentiate(x, collective, axis)
