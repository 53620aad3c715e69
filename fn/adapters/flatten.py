"""Parameters as views of one flat buffer, on any device.

    flat = fn.flatten_parameters(model, dtype=torch.bfloat16, gradients=True)
    loss.backward(); opt.step(); flat.zero_grad()

A parameter on a device is never given memory of the host, which some devices refuse, and never lives twice on its
device. Its values go to the host, its own memory on the device is given up, and when all values are on the host, one
buffer of them moves to the device:

    device   | a | b | c |     host   | . . . |
    device   |   | b | c |     host   | a . . |       copied, then given up: one after the other
    device   |   |   |   |     host   | a b c |
    device   | a b c |                                moved once; the parameters are views of it

There is one buffer for each dtype and device. Parameters that share memory share a span of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fn.errors import expected

Key = tuple[torch.dtype, torch.device]


def flatten_parameters(
    module_or_params: nn.Module | Iterable[Tensor],
    dtype: torch.dtype | None = torch.bfloat16,
    *,
    gradients: bool = False,
    align: int = 1,
) -> FlatParameters:
    """Make parameters views of one flat buffer per (dtype, device); in place.

        >>> model = nn.Linear(3, 2)
        >>> flat = flatten_parameters(model, dtype=torch.bfloat16)
        >>> (buffer,) = flat.buffers.values()
        >>> buffer.shape, buffer.dtype, model.weight.data_ptr() == buffer.data_ptr()
        (torch.Size([8]), torch.bfloat16, True)
        >>> flat.restore()
        >>> model.weight.dtype
        torch.float32

    The parameters remain the same objects; build the optimizer afterwards, or before if dtypes stay. Memory on the
    device is at most max(the parameters, the buffers) plus the largest parameter, provided that nothing else holds
    the parameters' memory. Frozen and empty parameters take part; parameters that share memory share it afterwards;
    others become contiguous. Buffers of a module stay as they are.

    Args:
        module_or_params: a module, of which all parameters are taken, or parameters.
        dtype: of floating parameters from now on. None: their own. Others keep theirs.
        gradients: make the gradients of parameters that require one views of a flat buffer too, in the order of the
            parameters: averaging these over the ranks copies nothing. They start at zero, or at what they were, and
            are zeros instead of None from then on, so weight decay moves a parameter that is not used.
        align: elements; every parameter starts at a multiple of it. 8 lets kernels for 16-bit numbers read whole
            vectors where sizes are odd; the gaps are zero.
    Returns: the buffers, and the way back.
    Raises: TypeError for parameters that are sparse, of a tensor subclass such as DTensor, or that share memory in
        different dtypes; ValueError for parameters on the meta device or an align below 1. Nothing is changed then.

    Differs: DeepSpeed gives parameters host memory on the way, which only CUDA and the CPU allow, and does not undo.
    """
    params = module_or_params.parameters() if isinstance(module_or_params, nn.Module) else module_or_params
    unique = list({id(p): p for p in params}.values())
    _check(unique, dtype, align)
    return FlatParameters(unique, dtype, gradients, align)


def _check(params: list[Tensor], dtype: torch.dtype | None, align: int) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(expected("dtype", "a floating dtype or None", f"{dtype}"))
    if align < 1:
        raise ValueError(expected("align", "a whole number of at least 1", f"{align}"))
    for i, p in enumerate(params):
        if type(p) not in (Tensor, nn.Parameter) or type(p.data) is not Tensor or p.layout != torch.strided:
            got = f"{type(p.data).__name__}, {p.layout}" if isinstance(p, Tensor) else type(p).__name__
            raise TypeError(expected("params", f"parameter {i} to be a dense tensor", got))
        if not p.is_leaf:
            raise ValueError(expected("params", f"parameter {i} to be a leaf", "one that was computed from others"))
        if p.is_meta:
            raise ValueError(f"params: parameter {i} is on the meta device; give it memory first, `Module.to_empty`")


class FlatParameters:
    """Parameters that are views of flat buffers; made by `flatten_parameters`.

    buffers: {(dtype, device): (n,)}, the memory of the parameters, in their order. gradients: the same for the
    gradients of those that require one; empty without `gradients=True`. Both are empty after `restore`.
    """

    def __init__(self, params: list[Tensor], dtype: torch.dtype | None, gradients: bool, align: int):
        self.buffers: dict[Key, Tensor] = {}
        self.gradients: dict[Key, Tensor] = {}
        self._params = params
        self._dtypes = [p.dtype for p in params]
        self._layouts = _layouts([p.detach() for p in params], dtype, align)
        self._gradient_views: dict[int, View] = {}
        grads = self._take_gradients()
        try:
            for layout in self._layouts:
                self._flatten(layout)
        except BaseException:
            self._unflatten()
            for p, grad in zip(params, grads, strict=True):
                p.grad = grad
            raise
        if gradients:
            self._make_gradients(align)
        self._give_gradients(grads)

    def zero_grad(self) -> None:
        """Set the gradients to zero and make them views of their buffer again; without such a buffer, to None."""
        for buffer in self.gradients.values():
            buffer.zero_()
        for i, p in enumerate(self._params):
            p.grad = self._gradient_of(i)

    @torch.no_grad()
    def restore(self) -> None:
        """Give every parameter, and its gradient, memory of its own, with the dtype and strides that it had.

        Values that were rounded stay so. Memory on the device is bounded as it is for `flatten_parameters`.

        Raises: ValueError if a parameter is no view of its buffer any more, restored ones included; nothing is
            changed then.
        """
        self._check_views()
        grads = self._take_gradients()
        self._unflatten()
        self.gradients.clear()
        self._gradient_views.clear()
        self._give_gradients(grads)

    def _check_views(self) -> None:
        for layout in self._layouts:
            buffer = self.buffers.get((layout.dtype, layout.device))
            for span in layout.spans:
                for i, view in zip(span.places, span.views, strict=True):
                    if buffer is None or not _same_memory(self._params[i], buffer, view):
                        raise ValueError(f"params: parameter {i} is not a view of its flat buffer any more")

    @torch.no_grad()
    def _flatten(self, layout: Layout) -> None:
        """Move the parameters of one buffer into it, or leave them as they are."""
        host = torch.empty(layout.size, dtype=layout.dtype, device="cpu")
        moved: list[Span] = []
        try:
            for span in layout.spans:
                # The gap that `align` leaves is memory that nobody wrote, which may read as NaN.
                host[moved[-1].end if moved else 0 : span.start].zero_()
                self._to_host(span, host)
                moved.append(span)
            flat = _to(host, layout.device)
        except BaseException:  # Ctrl-C, too: until now the values of these parameters are on the host only
            for span in moved:
                self._separate(span, host, layout.device)
            raise
        self.buffers[layout.dtype, layout.device] = flat
        for span in layout.spans:
            for i, view in zip(span.places, span.views, strict=True):
                self._params[i].data = view.of(flat)

    def _to_host(self, span: Span, host: Tensor) -> None:
        """Copy a span to the host and give up its memory on the device."""
        first = self._params[span.places[0]].detach()
        if span.source is None:
            span.views[0].of(host).copy_(first)
        else:
            # The whole piece of memory that they share, gaps included. as_strided counts from the beginning of a
            # storage, so any of the parameters will do.
            host[span.start : span.end].copy_(span.source.of(first))
        for i in span.places:
            self._params[i].data = torch.empty(0, dtype=host.dtype, device=first.device)

    def _unflatten(self) -> None:
        """Give the parameters of all buffers memory of their own."""
        for layout in self._layouts:
            flat = self.buffers.pop((layout.dtype, layout.device), None)
            if flat is None:
                continue
            # As long as parameters are views of the buffer, its memory stays taken.
            for i in (i for span in layout.spans for i in span.places):
                self._params[i].data = torch.empty(0, dtype=layout.dtype, device=layout.device)
            host = flat.cpu()
            del flat  # the device has no room for the buffer and its pieces at once
            for span in layout.spans:
                self._separate(span, host, layout.device)

    def _separate(self, span: Span, host: Tensor, device: torch.device) -> None:
        """Give the parameters of a span memory of their own, with values from the host."""
        dtype = self._dtypes[span.places[0]]
        if span.source is None:
            shape, stride, _ = span.before[0]
            # A row-major view of the buffer -> the strides that the parameter had.
            alone = torch.empty_strided(shape, stride, dtype=dtype, device=device).copy_(span.views[0].of(host))
            self._params[span.places[0]].data = alone
            return
        shared = torch.empty(span.length, dtype=dtype, device=device)
        shared.copy_(host[span.start : span.end])
        for i, before in zip(span.places, span.before, strict=True):
            self._params[i].data = before.of(shared)

    def _make_gradients(self, align: int) -> None:
        """Make the buffers of the gradients: every parameter that requires one has a piece, tied or not."""
        sizes: dict[Key, int] = {}
        for i, p in enumerate(self._params):
            if p.requires_grad:
                key = (p.dtype, p.device)
                start = -(-sizes.get(key, 0) // align) * align
                self._gradient_views[i] = View(p.shape, _strides_alone(p), start)  # as autograd wants them
                sizes[key] = start + p.numel()
        self.gradients = {key: torch.zeros(n, dtype=key[0], device=key[1]) for key, n in sizes.items()}

    def _gradient_of(self, i: int) -> Tensor | None:
        p = self._params[i]
        return self._gradient_views[i].of(self.gradients[p.dtype, p.device]) if i in self._gradient_views else None

    def _take_gradients(self) -> list[Tensor | None]:
        grads = [p.grad for p in self._params]
        for p in self._params:
            p.grad = None  # torch refuses to change the dtype or the shape of a parameter that has a gradient
        return grads

    @torch.no_grad()
    def _give_gradients(self, grads: list[Tensor | None]) -> None:
        for i, (p, grad) in enumerate(zip(self._params, grads, strict=True)):
            view = self._gradient_of(i)
            if grad is not None:
                p.grad = torch.empty_like(p).copy_(grad) if view is None else view.copy_(grad)
            elif view is not None:
                p.grad = view
            grads[i] = None  # the old one is given up before the next one is copied


def _to(host: Tensor, device: torch.device) -> Tensor:
    """Return a copy of the host's buffer on a device; on the CPU the buffer itself."""
    if device.type == "cpu":
        return host
    return torch.empty(host.shape, dtype=host.dtype, device=device).copy_(host)


def _same_memory(p: Tensor, buffer: Tensor, view: View) -> bool:
    """Tell whether a parameter lies where its view of the buffer lies."""
    same = p.untyped_storage()._cdata == buffer.untyped_storage()._cdata and p.storage_offset() == view.start
    return p.shape == view.shape and (same or not p.numel())


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
        """The element after the last."""
        return self.start + self.length


class Layout(NamedTuple):
    """A flat buffer: `size` elements of a dtype on a device."""

    dtype: torch.dtype
    device: torch.device
    size: int
    spans: tuple[Span, ...]


def _layouts(params: Sequence[Tensor], dtype: torch.dtype | None, align: int) -> list[Layout]:
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
        view, restored = View(p.shape, _row_major(p.shape), start), View(p.shape, _strides_alone(p), 0)
        return Span(start, p.numel(), tuple(places), (view,), (restored,), None)
    tensors = [params[i] for i in places]
    # From the first element that one of them looks at to the last; offsets are counted from there.
    low = min(map(_offset, tensors))
    length = max(_offset(p) + _extent(p) for p in tensors) - low
    before = tuple(View(p.shape, p.stride(), _offset(p) - low) for p in tensors)
    views = tuple(View(shape, stride, offset + start) for shape, stride, offset in before)
    return Span(start, length, tuple(places), views, before, View(torch.Size([length]), (1,), low))


def _sharing(params: Sequence[Tensor]) -> list[list[int]]:
    """Group the places of parameters that overlap in memory; the groups are in the order of their first member."""
    by_storage: dict[int, list[int]] = {}
    groups: list[list[int]] = []
    for i, p in enumerate(params):
        if p.numel():
            by_storage.setdefault(p.untyped_storage()._cdata, []).append(i)
        else:
            groups.append([i])
    for places in by_storage.values():
        # By their first bytes: whoever begins before the farthest end so far shares memory with the group.
        places.sort(key=lambda i: (_bytes(params[i])[0], i))
        until = -1
        for i in places:
            low, high = _bytes(params[i])
            if low < until:
                groups[-1].append(i)
            else:
                groups.append([i])
            until = max(until, high)
    return sorted((sorted(group) for group in groups), key=lambda group: group[0])


def _bytes(p: Tensor) -> tuple[int, int]:
    """Return the first byte of p in its storage, and the one after its last."""
    return _offset(p) * p.element_size(), (_offset(p) + _extent(p)) * p.element_size()


def _offset(p: Tensor) -> int:
    return int(p.storage_offset())


def _extent(p: Tensor) -> int:
    """Return how many elements of its storage p reaches over."""
    return 1 + sum((n - 1) * step for n, step in zip(p.shape, p.stride(), strict=True)) if p.numel() else 0


def _strides_alone(p: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor like p in memory of its own: those of p, or row-major ones if they leave gaps."""
    dense = 1  # the stride that the next dimension has, from the innermost on, where there are no gaps
    for step, n in sorted((step, n) for step, n in zip(p.stride(), p.shape, strict=True) if n != 1):
        if step != dense:
            return _row_major(p.shape)
        dense *= n
    return p.stride()


def _row_major(shape: torch.Size) -> tuple[int, ...]:
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step *= max(n, 1)
    return tuple(reversed(steps))
