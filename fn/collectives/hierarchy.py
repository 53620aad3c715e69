"""Several axes: within a node first, then across nodes. Each is a hop with a codec and a feedback of its own.

This module says what a hop is, which rows it exchanges, and with which errors it starts; `compressed` does the
exchanges. Over `axis=("local", "node")`, from the fastest network to the slowest, rank (n, l) ends up with piece
l N + n, which is its `axis_index(axis)`. Where the hops before the last one are exact, so is what they gather: the
codes of the last hop, which all ranks decode alike.

    codec, feedback                         hop "local"            hop "node"
    int4(), damped()                        exact                  int4, damped
    (int4(), int4()), damped()              int4, damped           int4, damped      ZeRO++'s qgZ with LoCo's errors
    (identity(torch.bfloat16), int4()),     bf16, no feedback      int4, damped
        (off(), damped())

Errors are then tuples with an entry per hop, in the order of the axes. On the way back every node has servers of the
same pieces, with errors of their own at an inner hop. The nodes' results are equal because these errors are. A
simulation looks whether they are, so it cannot be compiled with replicated results; with `off()` there it can.

Paper: Wang et al., ZeRO++ (arXiv 2306.10209), section 4.3, hierarchical all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import Any, NamedTuple

from torch import Tensor

from fn.collectives.axis import AxisNames, axis_index, axis_size, names, resolve
from fn.collectives.codecs.codec import Codec, Segments, identity, is_exact, segmented
from fn.collectives.feedback import Feedback, Off, fused_with, off
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
        """Return whether messages travel in full precision, so that there is nothing to feed back."""
        return is_exact(self.codec) and isinstance(self.feedback.rule, Off)

    def for_rows(self, segments: Segments | None) -> Codec:
        """Return the codec for the rows of all ranks."""
        return segmented(self.codec, segments)

    def for_own_row(self, segments: Segments | None) -> Codec:
        """Return the codec for the row that this rank serves."""
        return segmented(self.codec, None if segments is None else segments.row(axis_index(self.axis)))


def hops(
    axis: AxisNames, codec: Codecs, feedback: Feedbacks, called: tuple[str, str] = ("codec", "feedback")
) -> list[Hop]:
    """Return the hops of an exchange, from the fastest network to the slowest.

    >>> import fn
    >>> from fn.collectives.hierarchy import hops
    >>> for hop in hops(("local", "node"), fn.int4(), fn.damped()):
    ...     print(hop.axis, hop.codec, hop.exact)
    local fn.identity(None) True
    node fn.int4(256) False

    Args: axis: one name or several. codec: one per name; or a single one, for the last hop, the others being exact.
        feedback: one per name; or a single one for all hops that have a codec given. called: what the caller calls the
            two, for messages.
    Raises: ValueError if there are not as many codecs or feedbacks as names; TypeError for anything else.
    """
    axes = names(axis)
    exact = 0
    if isinstance(codec, Codec):
        exact = len(axes) - 1
        codec = (*(identity(),) * exact, codec)
    if isinstance(feedback, Feedback):
        feedback = (*(off(),) * exact, *(feedback,) * (len(axes) - exact))
    for argument, values, kind in zip(called, (codec, feedback), (Codec, Feedback), strict=True):
        if not isinstance(values, tuple | list) or not all(isinstance(value, kind) for value in values):
            example = "fn.sign()" if kind is Codec else "fn.classic()"
            wanted = f"a {kind.__name__}, such as {example}, or one per axis"
            raise TypeError(expected(argument, wanted, f"{values!r}"))
        if len(values) != len(axes):
            raise ValueError(expected(argument, f"one entry for each of the axes {axes}", f"{len(values)}"))
    return [Hop(*parts) for parts in zip(axes, codec, feedback, strict=True)]


def initial_errors(
    x: Tensor, axis: AxisNames, codec: Codecs, feedback: Feedbacks, *, segments: Segments | None = None,
    servers: bool = True,
) -> tuple[Tree, Tree]:  # fmt: skip
    """Return the residual errors with which a worker and a server start, for vectors like x (n,).

    They have the form in which the codec's kernels are fastest where the feedback leaves that open: `classic` with
    lazy=True, and `damped` with the codec's own block. Over several axes each is a tuple with an entry per hop. Without
    servers, the server's error of the last hop is ().

    >>> import torch, fn
    >>> from fn.collectives.hierarchy import initial_errors
    >>> worker, server = initial_errors(torch.ones(16), "data", fn.int4(), fn.classic())
    >>> worker.shape, server.shape                  # (n,) and (n / W,), with one rank on the axis
    (torch.Size([16]), torch.Size([16]))
    """
    plan = hops(axis, codec, feedback)
    worker, server = [], []
    for i, (hop, cut) in enumerate(zip(plan, levels(segments, axis, servers=servers), strict=True)):
        serves = servers or i + 1 < len(plan)
        size = axis_size(hop.axis) if serves else 1
        shard = x[: x.shape[0] // size]  # (n,) -> (n / size,), what the next hop sees
        worker.append(_initial_error(hop.for_rows(cut), hop.feedback, x.view(size, -1)))
        server.append(_initial_error(hop.for_own_row(cut), hop.feedback, shard.view(1, -1)) if serves else ())
        x = shard if shard.element_size() >= 4 else shard.float()  # between the hops nothing is rounded
    return join_errors(worker, axis), join_errors(server, axis)


def _initial_error(codec: Codec, feedback: Feedback, x: Tensor) -> Tree:
    fused = fused_with(codec, feedback)
    # `classic` without lazy promises an error that can be looked at. Other rules leave its form open.
    may_choose = fused is not None and getattr(feedback.rule, "lazy", True)
    return fused.init(x) if fused is not None and may_choose else feedback.init(x.reshape(-1))


def split_errors(error: Tree, axis: AxisNames) -> list[Tree]:
    """Return the error of each hop. Raises: ValueError for an error of other axes."""
    if isinstance(axis, str):
        return [error]
    if isinstance(error, tuple) and not error:
        return [()] * len(names(axis))
    # A NamedTuple such as `LazyError` is one error, and no tuple of errors of hops.
    if not isinstance(error, tuple) or hasattr(error, "_fields") or len(error) != len(names(axis)):
        raise ValueError(
            f"error: is not a tuple of {len(names(axis))} errors, one for each of the axes {[*names(axis)]}; a "
            f"state belongs to the axes that it was made for"
        )
    return [*error]


def join_errors(errors: Sequence[Tree], axis: AxisNames) -> Tree:
    """Return the errors of all hops as one: of a single axis given by its name, that of its hop."""
    return errors[0] if isinstance(axis, str) else tuple(errors)


def row_count(axis: AxisNames, *, servers: bool = True) -> int:
    """Return how many rows a vector has that travels over an axis, or several: one for each rank that serves."""
    return axis_size(axis) // (1 if servers else axis_size(names(axis)[-1]))


def levels(segments: Segments | None, axis: AxisNames, *, servers: bool = True) -> list[Segments | None]:
    """Return the segments of every hop, one row for each rank of its axis that serves.

    Rows that a later hop divides lie side by side in one row of the hop before it.
    """
    *inner, last = (resolve(name) for name in names(axis))
    if segments is None or not inner:
        return [segments] * (len(inner) + 1)
    sizes = (*(bound.size for bound in inner), last.size if servers else 1)
    ranks = tuple(bound.rank for bound in inner)
    if is_concrete(segments.valid, *ranks):  # every step asks: plans are found again by the objects that they are for
        return [*_planned(segments, sizes, tuple(map(int, ranks)))]
    return [*_cut(segments, sizes, ranks)]


def _cut(rows: Segments, sizes: tuple[int, ...], ranks: tuple[Tensor | int, ...]) -> Iterator[Segments]:
    """Yield the segments of each hop. sizes: rows of each hop. ranks: this rank's row, of all hops but the last."""
    tensors = len(rows.widths)
    for size, rank in zip_longest(sizes, ranks):
        parts = rows.valid.shape[0] // size
        # (size parts, tensors) -> (size, parts tensors): what a later hop divides lies side by side in a row
        hop = Segments(rows.widths * parts, rows.valid.reshape(size, parts * tensors))
        yield hop
        if rank is not None:
            # The row that this rank got is cut again at the next hop.
            rows = Segments(rows.widths, hop.row(rank).valid.reshape(parts, tensors))  # (1, parts tensors) -> these


@cached_plan
def _planned(segments: Segments, sizes: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[Segments, ...]:
    return (*_cut(segments, sizes, ranks),)


PIECE = 1 << 27
"""Elements that travel together exactly within a node, or those of one tensor; more would take memory for nothing."""


def pieces(segments: Segments | None) -> list[tuple[int, int]]:
    """Return which tensors of a vector travel together exactly: (first, end) of each piece."""
    if segments is None:
        return [(0, 0)]
    firsts, count = [0], 0
    for i, width in enumerate(segments.widths):
        size = width * segments.valid.shape[0]
        if count and count + size > PIECE:
            firsts, count = [*firsts, i], 0
        count += size
    return [*pairwise([*firsts, len(segments.widths)])]
