"""Where parameters lie in flat buffers: one buffer per (dtype, device), one span per piece of memory.

parameters a, b, c, of which b and c share memory      ->      | a a a a | b b b |      c is a view of b's span
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fn.errors import expected


class View(NamedTuple):
    """How a parameter looks at a buffer: as `torch.as_strided`."""

    shape: torch.Size
    stride: tuple[int, ...]
    start: int

    def of(self, buffer: Tensor) -> Tensor:
        """Return the view of a flat buffer."""
        return buffer.as_strided(self.shape, self.stride, self.start)


class Span(NamedTuple):
    """A piece of memory, of `length` elements from `start`, and the parameters that look at it.

    places: where they are in the list of parameters. views: how they look at the flat buffer. before: how they looked
    at memory of their own, counted from its first element. source: what to copy, in elements of that memory; None
    for one parameter alone, whose elements are copied in order.
    """

    start: int
    length: int
    places: tuple[int, ...]
    views: tuple[View, ...]
    before: tuple[View, ...]
    source: View | None

    @property
    def end(self) -> int:
        """Return the element after the last."""
        return self.start + self.length


class Layout(NamedTuple):
    """A flat buffer: `size` elements of a dtype on a device."""

    dtype: torch.dtype
    device: torch.device
    size: int
    spans: tuple[Span, ...]


def layouts(params: Sequence[Tensor], dtype: torch.dtype | None, align: int) -> list[Layout]:
    """Return the flat buffers of parameters, in the order of the parameters.

    Args:
        dtype: of floating parameters in the buffers. None: their own.
        align: every span starts at a multiple of it.
    Raises: TypeError if parameters of different dtypes share memory.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[list[int]]] = {}
    for shared in _sharing(params):
        first = params[shared[0]]
        if len({params[i].dtype for i in shared}) > 1:
            dtypes = [params[i].dtype for i in shared]
            wanted = f"one dtype for the parameters {shared}, which share memory"
            raise TypeError(expected("params", wanted, f"{dtypes}"))
        target = dtype if dtype is not None and first.is_floating_point() else first.dtype
        groups.setdefault((target, first.device), []).append(shared)
    return [_layout(params, *key, pieces, align) for key, pieces in groups.items()]


def _layout(
    params: Sequence[Tensor], dtype: torch.dtype, device: torch.device, pieces: list[list[int]], align: int
) -> Layout:
    spans: list[Span] = []
    end = 0
    for places in pieces:
        start = -(-end // align) * align
        spans.append(_span(params, places, start))
        end = spans[-1].end
    return Layout(dtype, device, end, tuple(spans))


def _span(params: Sequence[Tensor], places: list[int], start: int) -> Span:
    if len(places) == 1:
        p = params[places[0]]
        view, own = View(p.shape, _row_major(p.shape), start), View(p.shape, own_strides(p), 0)
        return Span(start, p.numel(), tuple(places), (view,), (own,), None)
    low = min(_offset(params[i]) for i in places)
    length = max(_offset(params[i]) + _extent(params[i]) for i in places) - low
    before = tuple(View(params[i].shape, params[i].stride(), _offset(params[i]) - low) for i in places)
    views = tuple(View(shape, stride, offset + start) for shape, stride, offset in before)
    return Span(start, length, tuple(places), views, before, View(torch.Size([length]), (1,), low))


def _sharing(params: Sequence[Tensor]) -> list[list[int]]:
    """Group the places of parameters that overlap in memory; the groups are in the order of their first member."""
    by_storage: dict[int, list[int]] = {}
    alone: list[list[int]] = []
    for i, p in enumerate(params):
        if p.numel():
            by_storage.setdefault(p.untyped_storage()._cdata, []).append(i)
        else:
            alone.append([i])
    for places in by_storage.values():
        places.sort(key=lambda i: (_bytes(params[i])[0], i))
        until = -1
        for i in places:
            low, high = _bytes(params[i])
            if low < until:
                alone[-1].append(i)
            else:
                alone.append([i])
            until = max(until, high)
    return sorted((sorted(group) for group in alone), key=lambda group: group[0])


def _bytes(p: Tensor) -> tuple[int, int]:
    """Return the first byte of p in its storage, and the one after its last."""
    return _offset(p) * p.element_size(), (_offset(p) + _extent(p)) * p.element_size()


def _offset(p: Tensor) -> int:
    return int(p.storage_offset())


def _extent(p: Tensor) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(p.shape, p.stride(), strict=True)) if p.numel() else 0


def own_strides(p: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor like p in memory of its own: those of p, or row-major ones if they leave gaps."""
    expected = 1
    for step, n in sorted((step, n) for step, n in zip(p.stride(), p.shape, strict=True) if n != 1):
        if step != expected:
            return _row_major(p.shape)
        expected *= n
    return p.stride()


def _row_major(shape: torch.Size) -> tuple[int, ...]:
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step *= max(n, 1)
    return tuple(reversed(steps))
