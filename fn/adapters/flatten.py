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

import torch
from torch import Tensor, nn

from fn.arguments import check_flag, check_kind
from fn.errors import expected
from fn.inplace.memory import overlaps

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
    as they are. An exception on the way, out of memory say, leaves parameters without numbers: make the module again.

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
    wanted = "a module, or parameters in an iterable"
    check_kind("module_or_params", module_or_params, (nn.Module, Iterable), wanted)
    check_flag("gradients", gradients)
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
        self._params = params
        self._shapes = {id(p): p.shape for p in params}
        # As torch lays out a copy: as the parameter is, where that leaves no gaps.
        self._own = {id(p): (torch.empty_like(p, device="meta").stride(), p.dtype) for p in params}
        grads = self._take_gradients()
        self._groups: dict[Key, list[Tensor]] = {}
        for p in params:
            key = dtype if dtype is not None and p.is_floating_point() else p.dtype, p.device
            self._groups.setdefault(key, []).append(p)
        self.buffers = {key: _flattened(group, *key) for key, group in self._groups.items()}
        self.gradients: dict[Key, Tensor] = {}
        self._views: dict[int, Tensor] = {}  # the gradient of a parameter, by the identity of that
        for (kind, device), group in self._groups.items() if gradients else ():
            if trained := [p for p in group if p.requires_grad]:
                flat = self.gradients[kind, device] = torch.zeros(_elements(trained), dtype=kind, device=device)
                self._views |= zip(map(id, trained), _views_of(flat, [p.shape for p in trained]), strict=True)
        self._give_gradients(grads)

    def zero_grad(self) -> None:
        """Set the gradients to zero and make them views of their buffer again; without such a buffer, to None."""
        for buffer in self.gradients.values():
            buffer.zero_()
        for p in self._params:
            p.grad = self._views.get(id(p))

    @torch.no_grad()
    def restore(self) -> None:
        """Give every parameter, and its gradient, memory of its own, with the dtype and strides that it had.

        Values that were rounded stay so. Memory on the device is bounded as it is for `flatten_parameters`.

        Raises: ValueError if a parameter is no view of its buffer any more, restored ones included; nothing is
            changed then.
        """
        self._check_views()
        grads = self._take_gradients()
        for (dtype, device), group in self._groups.items():
            # As long as parameters are views of the buffer, its memory stays taken.
            for p in group:
                p.data = torch.empty(0, dtype=dtype, device=device)
            # The device has no room for the buffer and its pieces at once.
            host = self.buffers.pop((dtype, device)).cpu()
            for p, values in zip(group, _views_of(host, [self._shapes[id(p)] for p in group]), strict=True):
                stride, own = self._own[id(p)]
                p.data = torch.empty_strided(values.shape, stride, dtype=own, device=device).copy_(values)
        self.gradients.clear()
        self._views.clear()
        self._give_gradients(grads)

    def _check_views(self) -> None:
        views: dict[int, Tensor] = {}
        for key, buffer in self.buffers.items():
            group = self._groups[key]
            views |= zip(map(id, group), _views_of(buffer, [self._shapes[id(p)] for p in group]), strict=True)
        for i, p in enumerate(self._params):
            if id(p) not in views or not _is_same_memory(p, views[id(p)]):
                raise ValueError(f"params: parameter {i} is not a view of its flat buffer any more")

    def _take_gradients(self) -> list[Tensor | None]:
        grads = [p.grad for p in self._params]
        for p in self._params:
            p.grad = None  # torch refuses to change the dtype or the shape of a parameter that has a gradient
        return grads

    @torch.no_grad()
    def _give_gradients(self, grads: list[Tensor | None]) -> None:
        for i, (p, grad) in enumerate(zip(self._params, grads, strict=True)):
            view = self._views.get(id(p))
            p.grad = view if grad is None else (torch.empty_like(p) if view is None else view).copy_(grad)
            grads[i] = None  # the old one is given up before the next one is copied


@torch.no_grad()
def _flattened(params: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make parameters of one device views of one buffer, (n,), and return that."""
    shapes = [p.shape for p in params]
    host = torch.empty(_elements(params), dtype=dtype, device="cpu")
    for p, view in zip(params, _views_of(host, shapes), strict=True):
        view.copy_(p)
        p.data = torch.empty(0, dtype=dtype, device=device)
    flat = host if device.type == "cpu" else torch.empty(host.shape, dtype=dtype, device=device).copy_(host)
    for p, view in zip(params, _views_of(flat, shapes), strict=True):
        p.data = view
    return flat


def _elements(params: list[Tensor]) -> int:
    return sum(p.numel() for p in params)


def _views_of(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    """Return views of a buffer, (n,), with these shapes, end to end."""
    return [x.view(shape) for x, shape in zip(flat.split([shape.numel() for shape in shapes]), shapes, strict=True)]


def _is_same_memory(p: Tensor, view: Tensor) -> bool:
    """Tell whether a parameter lies where its view of the buffer lies."""
    places = [(x.untyped_storage()._cdata, x.storage_offset()) for x in (p, view)]
    return p.shape == view.shape and (places[0] == places[1] or not p.numel())
