"""Updates that can also take their step in place: what a device with a kernel for the whole step does in an adapter.

A transform is pure, and that costs memory traffic: every link reads and writes what the next one reads again, and the
new state is copied back into the buffers of the old one. Where the table has a kernel for a whole step, a named
optimizer offers it beside its pure update; where nothing is faster torch's functions of lists are one (`foreach`). The
numbers are the same up to rounding; only adapters, which own their buffers, use it.

A step in place has two parts: `stage` does all that can fail, communication first of all, and writes nothing;
`commit` writes, and cannot fail. So a step that fails leaves params and state as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.base import UpdateFn
from fn.kernels.eager import is_eager
from fn.kernels.table import cells

Tree = Any


class Staged(NamedTuple):
    """A step that waits to be written. commit: write it.

    ok: its numbers are finite, on all ranks alike; 0-d bool where nobody has waited for the device yet.
    """

    ok: bool | Tensor
    commit: Callable[[], None]


class InPlace(NamedTuple):
    """A pure update that can also be staged.

    pure: the update. fits: whether these (updates, state, params) can be staged; every rank answers alike, or sends
        the same messages either way. stage: (updates, state, params) -> Staged.
    """

    pure: UpdateFn
    fits: Callable[[Tree, Tree, Tree], bool]
    stage: Callable[[Tree, Tree, Tree], Staged]

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return what the pure update returns."""
        return self.pure(updates, state, params)


def side_by_side(updates: Sequence[UpdateFn], pure: UpdateFn) -> UpdateFn:
    """Return `pure`, the update of tuples of trees, staged where each of `updates`, one per tree, can be."""
    found = [u for u in updates if isinstance(u, InPlace)]
    if len(found) != len(updates):
        return pure

    def fits(grads: Tree, states: Tree, params: Tree) -> bool:
        return all(u.fits(*args) for u, args in zip(found, zip(grads, states, params, strict=True), strict=True))

    def stage(grads: Tree, states: Tree, params: Tree) -> Staged:
        parts = [u.stage(*args) for u, args in zip(found, zip(grads, states, params, strict=True), strict=True)]

        def commit() -> None:
            for part in parts:
                part.commit()

        return Staged(all_ok([part.ok for part in parts]), commit)

    return InPlace(pure, fits, stage)


def all_ok(found: Sequence[bool | Tensor]) -> bool:
    """Return whether all steps are finite; a device is waited for once."""
    there = [ok for ok in found if isinstance(ok, Tensor) and ok.device.type != "cpu"]
    if len(there) > 1 and len({ok.device for ok in there}) == 1:
        found = [torch.stack(there).all(), *(ok for ok in found if not any(ok is one for one in there))]
    return all(map(bool, found))


class Fits:
    """Whether the table has a kernel for the whole step of lists of tensors: plain, contiguous, of one kind and shape.

    A look at every tensor takes longer than a small step. So params and state, which stay from step to step, are looked
    at once, and then only whether they are the same objects at the same addresses; gradients are always looked at.

    Args: op: the kernel. fields: of the state of the chain's second link, the lists. eps: the step's, which a kernel
        needs above zero.
    """

    def __init__(self, op: str, fields: Sequence[str], eps: float) -> None:
        self._op, self._fields, self._eps = op, fields, eps
        # the tensors, their addresses, the shapes of params
        self._seen: tuple[list[Tensor], list[int], list[torch.Size]] | None = None

    def __call__(self, updates: Tree, state: Tree, params: Tree) -> bool:
        """Return the answer for the arguments of an update."""
        if not self._eps > 0:
            return False
        link = state.inner[1]
        lists = [tree.leaves(params), *(tree.leaves(getattr(link, name)) for name in self._fields)]
        kept, shapes = [*chain(*lists)], [*map(_SHAPE, lists[0])]
        if torch.compiler.is_compiling() or not self._as_before(kept, shapes):
            self._seen = None
            if not same_shapes(lists) or not has_kernel(self._op, lists):
                return False
            self._seen = kept, [*map(Tensor.data_ptr, kept)], shapes
        grads = tree.leaves(updates)
        alike = [*map(_SHAPE, grads)] == shapes and has_kernel(self._op, [grads])
        return alike and grads[0].device == kept[0].device

    def _as_before(self, kept: list[Tensor], shapes: list[torch.Size]) -> bool:
        if self._seen is None or len(kept) != len(self._seen[0]) or not all(map(is_, kept, self._seen[0])):
            return False
        return [*map(Tensor.data_ptr, kept)] == self._seen[1] and shapes == self._seen[2]


_SHAPE, _DTYPE, _DEVICE = (attrgetter(name) for name in ("shape", "dtype", "device"))


def has_kernel(op: str, lists: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether the table has a kernel for the whole step of these tensors: plain, contiguous, of one kind."""
    tensors = [*chain(*lists)]
    if not tensors or not is_eager(*tensors):
        return False
    alike = {*map(_DTYPE, tensors)} == {torch.float32} and len({*map(_DEVICE, tensors)}) == 1
    return alike and all(map(Tensor.is_contiguous, tensors)) and bool(cells(op, tensors[0].device.type))


def same_shapes(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether all lists hold tensors of the same shapes; kernels see addresses and would go on behind an end."""
    first, *others = ([*map(_SHAPE, tensors)] for tensors in lists)
    return all(shapes == first for shapes in others)
