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

There is one buffer for each dtype and device.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fn.errors import expected
from fn.inplace.memory import overlaps
from fn.kernels.layout import is_dense

Key = tuple[torch.dtype, torch.device]


def flatten_parameters(
    module_or_params: nn.Module | Iterable[Tensor],
    dtype: torch.dtype | None = torch.bfloat16,
    *,
    gradients: bool = False,
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
    the parameters' memory. Frozen and empty parameters take part, and all become contiguous. Buffers of a module stay
    as they are.

    Args:
        module_or_params: a module, of which all parameters are taken, or parameters.
        dtype: of floating parameters from now on. None: their own. Others keep theirs.
        gradients: make the gradients of parameters that require one views of a flat buffer too, in the order of the
            parameters: averaging these over the ranks copies nothing. They start at zero, or at what they were, and
            are zeros instead of None from then on, so weight decay moves a parameter that is not used.
    Returns: the buffers, and the way back.
    Raises: TypeError for parameters that are sparse or of a tensor subclass such as DTensor; ValueError for parameters
        on the meta device, or two that share memory. Nothing is changed then.

    Differs: DeepSpeed gives parameters host memory on the way, which only CUDA and the CPU allow, and does not undo.
    """
    params = module_or_params.parameters() if isinstance(module_or_params, nn.Module) else module_or_params
    unique = list({id(p): p for p in params}.values())
    _check(unique, dtype)
    return FlatParameters(unique, dtype, gradients)


def _check(params: list[Tensor], dtype: torch.dtype | None) -> None:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(expected("dtype", "a floating dtype or None", f"{dtype}"))
    for i, p in enumerate(params):
        if type(p) not in (Tensor, nn.Parameter) or type(p.data) is not Tensor or p.layout != torch.strided:
            got = f"{type(p.data).__name__}, {p.layout}" if isinstance(p, Tensor) else type(p).__name__
            raise TypeError(expected("params", f"parameter {i} to be a dense tensor", got))
        if not p.is_leaf:
            raise ValueError(expected("params", f"parameter {i} to be a leaf", "one that was computed from others"))
        if p.is_meta:
            raise ValueError(f"params: parameter {i} is on the meta device; give it memory first, `Module.to_empty`")
    for i, j in overlaps(params):
        cure = "to tie them, let both modules have one nn.Parameter"
        raise ValueError(expected("params", "memory of its own for each", f"one for {i} and {j}", cure))


class FlatParameters:
    """Parameters that are views of flat buffers; made by `flatten_parameters`.

    buffers: {(dtype, device): (n,)}, the memory of the parameters, in their order. gradients: the same for the
    gradients of those that require one; empty without `gradients=True`. Both are empty after `restore`.
    """

    def __init__(self, params: list[Tensor], dtype: torch.dtype | None, gradients: bool):
        self.buffers: dict[Key, Tensor] = {}
        self.gradients: dict[Key, Tensor] = {}
        self._params = params
        self._dtypes = [p.dtype for p in params]
        self._layouts = _layouts(params, dtype)
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
            self._make_gradients()
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
            for i, view, _ in layout.pieces:
                if buffer is None or not _same_memory(self._params[i], buffer, view):
                    raise ValueError(f"params: parameter {i} is not a view of its flat buffer any more")

    @torch.no_grad()
    def _flatten(self, layout: Layout) -> None:
        """Move the parameters of one buffer into it, or leave them as they are."""
        host = torch.empty(layout.size, dtype=layout.dtype, device="cpu")
        moved: list[Piece] = []
        try:
            for piece in layout.pieces:
                p = self._params[piece.place]
                piece.view.of(host).copy_(p.detach())
                p.data = torch.empty(0, dtype=host.dtype, device=layout.device)
                moved.append(piece)
            flat = _to(host, layout.device)
        except BaseException:  # Ctrl-C, too: until now the values of these parameters are on the host only
            self._separate(moved, host, layout.device)
            raise
        self.buffers[layout.dtype, layout.device] = flat
        for i, view, _ in layout.pieces:
            self._params[i].data = view.of(flat)

    def _unflatten(self) -> None:
        """Give the parameters of all buffers memory of their own."""
        for layout in self._layouts:
            flat = self.buffers.pop((layout.dtype, layout.device), None)
            if flat is None:
                continue
            # As long as parameters are views of the buffer, its memory stays taken.
            for i, _, _ in layout.pieces:
                self._params[i].data = torch.empty(0, dtype=layout.dtype, device=layout.device)
            host = flat.cpu()
            del flat  # the device has no room for the buffer and its pieces at once
            self._separate(layout.pieces, host, layout.device)

    def _separate(self, pieces: Iterable[Piece], host: Tensor, device: torch.device) -> None:
        """Give parameters memory of their own, with values from the host."""
        for i, view, stride in pieces:
            # A row-major view of the buffer -> the strides that the parameter had.
            alone = torch.empty_strided(view.shape, stride, dtype=self._dtypes[i], device=device)
            self._params[i].data = alone.copy_(view.of(host))

    def _make_gradients(self) -> None:
        """Make the buffers of the gradients: every parameter that requires one has a piece."""
        sizes: dict[Key, int] = {}
        for i, p in enumerate(self._params):
            if p.requires_grad:
                key = (p.dtype, p.device)
                start = sizes.get(key, 0)
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


class Piece(NamedTuple):
    """A parameter of a buffer.

    place: where it is in the list of parameters. view: how it looks at the buffer. stride: that of memory of its own.
    """

    place: int
    view: View
    stride: tuple[int, ...]


class Layout(NamedTuple):
    """A flat buffer: `size` elements of a dtype on a device."""

    dtype: torch.dtype
    device: torch.device
    size: int
    pieces: list[Piece]


def _layouts(params: list[Tensor], dtype: torch.dtype | None) -> list[Layout]:
    """Return the flat buffers of parameters, in their order. dtype: of floating ones there; None: their own."""
    pieces: dict[Key, list[Piece]] = {}
    sizes: dict[Key, int] = {}
    for i, p in enumerate(params):
        key = dtype if dtype is not None and p.is_floating_point() else p.dtype, p.device
        start = sizes.get(key, 0)
        view = View(p.shape, _row_major(p.shape), start)
        pieces.setdefault(key, []).append(Piece(i, view, _strides_alone(p)))
        sizes[key] = start + p.numel()
    return [Layout(*key, sizes[key], of_key) for key, of_key in pieces.items()]


def _strides_alone(p: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor like p in memory of its own: those of p, or row-major ones if they leave gaps."""
    dense = is_dense([(step, n) for step, n in zip(p.stride(), p.shape, strict=True) if n != 1])
    return p.stride() if dense else _row_major(p.shape)


def _row_major(shape: torch.Size) -> tuple[int, ...]:
    steps, step = [], 1
    for n in reversed(shape):
        steps.append(step)
        step *= max(n, 1)
    return tuple(reversed(steps))
