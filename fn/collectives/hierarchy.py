"""The compressed collectives over several axes: within a node first, then across nodes, each hop with its own codec.

With one axis they are those of `compressed`. With `axis=("local", "node")`, from the fastest network to the slowest,

    x (n,)  --reduce-scatter over "local"-->  (n / L,)  --reduce-scatter over "node"-->  (n / (L N),)

and the all-gather goes the way back. Rank (n, l) ends up with piece l N + n, which is its `axis_index(axis)`. Where the
hops before the last one are exact, so is what they gather: the codes of the last hop, which all ranks decode alike.

    codec, feedback                         hop "local"            hop "node"
    int4(), damped()                        exact                  int4, damped
    (int4(), int4()), damped()              int4, damped           int4, damped      ZeRO++'s qgZ with LoCo's errors
    (identity(torch.bfloat16), int4()),     bf16, no feedback      int4, damped
        (off(), damped())

Errors are then tuples with an entry per hop, in the order of the axes. On the way back every node has servers of the
same pieces, with errors of their own at an inner hop; the nodes' results are equal because these errors are. A
simulation looks whether they are, and so cannot be compiled with replicated results; with `off()` there it can.

Paper: Wang et al., ZeRO++ (arXiv 2306.10209), section 4.3, hierarchical all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, zip_longest
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fn import tree
from fn.collectives import compressed, messages, primitives
from fn.collectives.axis import AxisNames, axis_size, names, resolve
from fn.collectives.codecs.codec import Codec, Segments, identity, is_exact
from fn.collectives.feedback import Feedback, Off, off
from fn.collectives.primitives import is_differentiated, refuse_to_differentiate
from fn.collectives.simulation import found_alike
from fn.errors import expected
from fn.kernels.tracing import cached_plan, is_concrete

Tree = Any
Codecs = Codec | tuple[Codec, ...]
Feedbacks = Feedback | tuple[Feedback, ...]


class Hop(NamedTuple):
    """One axis of several, and how its messages travel."""

    axis: str
    codec: Codec
    feedback: Feedback

    @property
    def exact(self) -> bool:
        """Return whether messages travel as they are, so that there is nothing to feed back."""
        return is_exact(self.codec) and isinstance(self.feedback.rule, Off)


def hops(
    axis: AxisNames, codec: Codecs, feedback: Feedbacks, called: tuple[str, str] = ("codec", "feedback")
) -> list[Hop]:
    """Return the hops of an exchange, from the fastest network to the slowest.

    Args: axis: one name or several. codec: one per name; or a single one, for the last hop, the others being exact.
        feedback: one per name; or a single one for all hops that have a codec given. called: what the caller calls the
            two, for messages.
    Raises: ValueError if there are not as many codecs or feedbacks as names; TypeError for anything else.
    """
    found = names(axis)
    exact = 0
    if isinstance(codec, Codec):
        exact = len(found) - 1
        codec = (*(identity(),) * exact, codec)
    if isinstance(feedback, Feedback):
        feedback = (*(off(),) * exact, *(feedback,) * (len(found) - exact))
    for argument, values, kind in zip(called, (codec, feedback), (Codec, Feedback), strict=True):
        if not isinstance(values, tuple | list) or not all(isinstance(value, kind) for value in values):
            example = "fn.sign()" if kind is Codec else "fn.classic()"
            wanted = f"a {kind.__name__}, such as {example}, or one per axis"
            raise TypeError(expected(argument, wanted, f"{values!r}"))
        if len(values) != len(found):
            raise ValueError(expected(argument, f"one entry for each of the axes {found}", f"{len(values)}"))
    return [Hop(*each) for each in zip(found, codec, feedback, strict=True)]


def reduce_scatter_mean(
    x: Tensor, error: Tree, axis: AxisNames, codec: Codecs, feedback: Feedbacks, *, segments: Segments | None = None
) -> tuple[Tensor, Tree]:
    """Average a vector over the ranks of an axis, or of several, in codes; each rank gets its shard of the mean.

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
    _refuse_to_differentiate(x, "reduce_scatter_mean", axis)
    plan = hops(axis, codec, feedback)
    if isinstance(axis, str):
        return compressed.reduce_scatter_wide(x, error, *plan[0], segments=segments)
    after = []
    for hop, at, e in zip(plan, levels(segments, axis), _each(error, plan), strict=True):
        x, e = compressed.reduce_scatter_wide(x, e, *hop, segments=at)
        after.append(e)
    return x, tuple(after)


def all_gather_shards(
    shard: Tensor, error: Tree, axis: AxisNames, codec: Codecs, feedback: Feedbacks, *, segments: Segments | None = None
) -> tuple[Tensor, Tree]:
    """Give every rank the whole vector, in codes, of which each has a shard.

    Args:
        shard: (n / W,) floating, its length a multiple of codec.align.
        error: what `feedback.init(shard)`, `initial_errors` or the last call returned.
        axis, codec, feedback, segments: as for `reduce_scatter_mean`; the last axis is gathered first.
    Returns: the vector (n,) in the dtype of the shard, the same on every rank, and the next error.
    Raises: as `reduce_scatter_mean`.
    """
    _refuse_to_differentiate(shard, "all_gather_shards", axis)
    plan = hops(axis, codec, feedback)
    if isinstance(axis, str):
        return compressed.all_gather_shards(shard, error, *plan[0], segments=segments)
    x, after = shard, []
    places, errors = levels(segments, axis), _each(error, plan)
    for i in reversed(range(len(plan))):
        x, e = compressed.all_gather_shards(x, errors[i], *plan[i], segments=places[i])
        x = _alike(x, plan[i + 1 :])
        after.append(e)
    return x, tuple(reversed(after))


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
    """Average a vector in codes: `reduce_scatter_mean`, then `all_gather_shards`; at the last hop in one pass.

    Args: x (n,); errors: the worker's and the server's; the rest as for `reduce_scatter_mean`. consume: x is not
        needed any more, and its memory may be used for the error. servers: False for one message from each to all at
        the last hop, to whose ranks segments then give one row together.
    Returns: the mean (n,) in the dtype of x, the same on every rank, and the next errors.
    Raises: as `reduce_scatter_mean`.
    """
    _refuse_to_differentiate(x, "compressed_all_reduce", axis)
    plan = hops(axis, codec, feedback)
    if isinstance(axis, str):
        return compressed.compressed_all_reduce(
            x, errors, *plan[0], segments=segments, consume=consume, servers=servers
        )
    worker, server = (list(_each(half, plan)) for half in errors)
    places, dtype, last = levels(segments, axis, servers=servers), x.dtype, len(plan) - 1
    ends = worker[last], server[last]
    if all(hop.exact for hop in plan[:last]):
        x = exact_shard(x, names(axis)[:-1], segments)
        payload, (worker[last], server[last]) = compressed.mean_in_codes(
            x, ends, *plan[last], places[last], servers=servers
        )
        payload = gather_codes(payload, names(axis)[:-1])
        mean = _decoded(payload, plan[last], segments, x.dtype, axis_size(plan[last].axis), servers=servers)
        return mean.to(dtype), (tuple(worker), tuple(server))
    for i, hop in enumerate(plan[:last]):
        x, worker[i] = compressed.reduce_scatter_wide(x, worker[i], *hop, segments=places[i])
    x, (worker[last], server[last]) = compressed.compressed_all_reduce(
        x, ends, *plan[last], segments=places[last], servers=servers
    )
    for i in reversed(range(last)):
        x, server[i] = compressed.all_gather_shards(x, server[i], *plan[i], segments=places[i])
        x = _alike(x, plan[i + 1 :])
    return x.to(dtype), (tuple(worker), tuple(server))


def _decoded(
    payload: Tree, hop: Hop, segments: Segments | None, dtype: torch.dtype, ranks: int, *, servers: bool
) -> Tensor:
    """Return the mean that all ranks have as codes: the rows of the servers, or without those all ranks' of each."""
    if servers:
        return compressed.decode(compressed.for_rows(hop.codec, segments), payload, dtype)
    count = tree.leaves(payload)[0].shape[0] // ranks
    found = []
    for row in range(count):
        codes = tree.map(lambda leaf, row=row: leaf[row * ranks : (row + 1) * ranks], payload)
        codec = compressed.for_rows(hop.codec, None if segments is None else segments.row(row))
        found.append(compressed.mean_of_codes(codec, codes, dtype))
    return found[0] if count == 1 else torch.cat(found)


PIECE = 1 << 27
"""Elements that travel together exactly within a node, or those of one tensor; more would take memory for nothing."""


def pieces(segments: Segments | None) -> list[tuple[int, int]]:
    """Return which tensors of a vector travel together exactly: (first, end) of each piece."""
    found, count = [(0, 0)], 0
    for i, width in enumerate(segments.widths if segments is not None else ()):
        size = width * segments.valid.shape[0] if segments is not None else 0
        full = count and count + size > PIECE
        found, count = ([*found, (i, i + 1)], size) if full else ([*found[:-1], (found[-1][0], i + 1)], count + size)
    return found


def exact_shard(x: Tensor, axes: Sequence[str], segments: Segments | None) -> Tensor:
    """Average a vector over axes exactly, piece by piece; return this rank's rows, (n / W,), half precision wide."""
    cuts = pieces(segments)
    if segments is None or len(cuts) == 1:
        return reduce_exactly([x], axes, 1)
    rows, ends = x.view(segments.valid.shape[0], -1), [0, *accumulate(segments.widths)]
    parts = (rows[:, ends[first] : ends[end]].reshape(-1) for first, end in cuts)
    return reduce_exactly(parts, axes, rows.shape[0] // axis_size(tuple(axes)))


def reduce_exactly(parts: Iterable[Tensor], axes: Sequence[str], rows: int) -> Tensor:
    """Average vectors over axes exactly, one after the other, and lay this rank's rows of them side by side: (n,)."""
    found = []
    for part in parts:
        for axis in axes:
            part, _ = compressed.reduce_scatter_wide(part, (), axis, identity(), off())
        found.append(part.view(rows, -1))
    return (found[0] if len(found) == 1 else torch.cat(found, dim=1)).reshape(-1)


def gather_codes(payload: Tree, axes: Sequence[str]) -> Tree:
    """Gather the rows of a payload over axes, the last one first; all rows lie one after the other then."""
    for axis in reversed(axes):
        gathered = messages.gather(tree.map(lambda leaf: leaf[None], payload), axis)
        payload = tree.map(lambda leaf: leaf.flatten(0, 1), gathered)
    return payload


def initial_errors(
    x: Tensor, axis: AxisNames, codec: Codecs, feedback: Feedbacks, *, segments: Segments | None = None,
    servers: bool = True,
) -> tuple[Tree, Tree]:  # fmt: skip
    """Return the errors with which a worker and a server start, for vectors like x (n,); see `compressed`."""
    plan = hops(axis, codec, feedback)
    if isinstance(axis, str):
        return compressed.initial_errors(x, *plan[0], segments=segments, servers=servers)
    found = []
    for i, (hop, at) in enumerate(zip(plan, levels(segments, axis, servers=servers), strict=True)):
        x = x if i == 0 or x.element_size() >= 4 else x.float()  # between the hops nothing is rounded
        found.append(compressed.initial_errors(x, *hop, segments=at, servers=servers or i + 1 < len(plan)))
        x = x[: x.shape[0] // axis_size(hop.axis)]
    worker, server = zip(*found, strict=True)
    return worker, server


def exact_mean(x: Tensor, axis: AxisNames, *, consume: bool = False) -> Tensor:
    """Average a vector (n,) exactly; over several axes, only the last sees 1 / W of it, W the ranks of the others.

    Args: consume: x is not needed any more, and the mean may take its memory.
    """
    *inner, last = names(axis)
    if not inner:
        mean: Tensor = primitives.mean_in_place(x, last) if consume else primitives.pmean(x, last)
        return mean
    size = axis_size(tuple(inner))
    padded = F.pad(x, (0, -x.shape[0] % size)) if x.shape[0] % size else x
    rules = (tuple(inner), (identity(),) * len(inner), off())
    shard, _ = reduce_scatter_mean(padded, ((),) * len(inner), *rules)
    del padded
    whole, _ = all_gather_shards(primitives.mean_in_place(shard, last), ((),) * len(inner), *rules)
    return whole[: x.shape[0]]


def row_count(axis: AxisNames, *, servers: bool = True) -> int:
    """Return how many rows a vector has that travels over an axis, or several: one for each rank that serves."""
    return axis_size(axis) // (1 if servers else axis_size(names(axis)[-1]))


def levels(segments: Segments | None, axis: AxisNames, *, servers: bool = True) -> list[Segments | None]:
    """Return the segments of every hop, one row for each rank of its axis that serves.

    Rows that a later hop divides lie side by side in one row of the hop before it.
    """
    if segments is None:
        return [None] * len(names(axis))
    *inner, last = (resolve(name) for name in names(axis))
    sizes = (*(each.size for each in inner), last.size if servers else 1)
    ranks = tuple(each.rank for each in inner)
    if is_concrete(segments.valid, *ranks):  # every step asks: plans are found again by the objects that they are for
        return [*_planned(segments, sizes, tuple(map(int, ranks)))]
    return [*_cut(segments, sizes, ranks)]


def _cut(rows: Segments, sizes: tuple[int, ...], ranks: tuple[Tensor | int, ...]) -> Iterator[Segments]:
    """Yield the segments of hops with so many rows each; ranks: which of them is this rank's, but at the last hop."""
    tensors = len(rows.widths)
    for size, rank in zip_longest(sizes, ranks):
        parts = rows.valid.shape[0] // size
        hop = Segments(rows.widths * parts, rows.valid.reshape(size, parts * tensors))
        yield hop
        if rank is not None:
            rows = Segments(rows.widths, hop.row(rank).valid.reshape(parts, tensors))


@cached_plan
def _planned(segments: Segments, sizes: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[Segments, ...]:
    return (*_cut(segments, sizes, ranks),)


def _refuse_to_differentiate(x: Tensor, collective: str, axis: AxisNames) -> None:
    """Refuse it here, for codes have no gradient that the exchange of them could notice."""
    if is_differentiated(x) and axis_size(axis) > 1:
        refuse_to_differentiate(x, collective, axis)


def _alike(x: Tensor, outer: list[Hop]) -> Tensor:
    """Return what a hop gathered; where outer axes are simulated, out of their levels if their ranks found the same.

    It is made with servers' errors, which are each rank's own, and equal only because all their history is.
    """
    return found_alike(x, tuple(hop.axis for hop in outer)) if outer else x


def _each(error: Tree, plan: list[Hop]) -> tuple[Tree, ...]:
    if isinstance(error, tuple) and not error:
        return ((),) * len(plan)
    if not isinstance(error, tuple) or hasattr(error, "_fields") or len(error) != len(plan):
        raise ValueError(
            f"error: is not a tuple of {len(plan)} errors, one for each of the axes {[hop.axis for hop in plan]}; a "
            f"state belongs to the axes that it was made for"
        )
    return error
