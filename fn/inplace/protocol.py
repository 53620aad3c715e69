"""Two-phase steps in place: `stage` computes and communicates, `commit` writes.

A transform is pure, and that costs memory traffic: every link reads and writes what the next one reads again, and the
new state is copied back into the buffers of the old one. Where the table has a kernel for a whole step, `match` finds
it for a chain; where nothing is faster torch's functions of lists are one (`foreach`). The numbers are the same up to
rounding; only adapters, which own their buffers, use it.

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
from torch.utils.weak import WeakIdKeyDictionary

from fn import tree
from fn.base import UpdateFn
from fn.kernels.table import cells
from fn.kernels.tracing import is_concrete

Tree = Any


class Staged(NamedTuple):
    """A step that waits to be written. commit: write it, if it is ok and safe.

    ok: what it is taken from is finite; if not, it is skipped. safe: so is what it writes (see `bounds`); if it may not
    be, the pure step is taken instead. On all ranks alike; 0-d bools where nobody has waited for the device yet.
    """

    ok: bool | Tensor
    commit: Callable[[], None]
    safe: bool | Tensor = True

    @property
    def on_host(self) -> bool:
        """Return whether the flags are known without waiting for a device."""
        return all(isinstance(flag, bool) or flag.device.type == "cpu" for flag in (self.ok, self.safe))

    def settled(self) -> Staged:
        """Return it with bools; a device is waited for once."""
        (found,) = settled([self])
        return found


def settled(steps: Sequence[Staged]) -> list[Staged]:
    """Return steps with bools; a device is waited for once."""
    flags = read([flag for step in steps for flag in (step.ok, step.safe)])
    each = zip(steps, flags[::2], flags[1::2], strict=True)
    return [Staged(ok, step.commit, safe or not ok) for step, ok, safe in each]


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


def read(flags: Sequence[bool | Tensor]) -> list[bool]:
    """Return 0-d bools as bools; a device is waited for once."""
    there = {id(x): x for x in flags if isinstance(x, Tensor) and x.device.type != "cpu"}
    if len({x.device for x in there.values()}) != 1:
        return [*map(bool, flags)]
    known = dict(zip(there, torch.stack([*there.values()]).cpu().tolist(), strict=True))
    return [known[id(x)] if id(x) in known else bool(x) for x in flags]


class Eligibility:
    """Whether the table has a kernel for the whole step of lists of tensors: contiguous, of one device, of one shape.

    Moments are float32; params are that, too, or all of another one of `kinds`.

    A look at every tensor takes longer than a small step. So params and state, which stay from step to step, are looked
    at once, and then only whether they are the same objects at the same addresses; gradients are always looked at.

    Args: op: the kernel. fields: of the state of the link that keeps the moments, the lists. kinds: dtypes of params.
    """

    def __init__(self, op: str, fields: Sequence[str], kinds: Sequence[torch.dtype] = ()) -> None:
        self._op, self._fields, self._kinds = op, fields, kinds or KINDS
        self._lists: list[list[Tensor]] = []
        self._seen: tuple[list[int], list[torch.Size]] | None = None  # their addresses, the shapes of params

    def __call__(self, updates: Tree, own: Tree, params: Tree) -> list[list[Tensor]] | None:
        """Return params and the fields of a link's state as lists; None if there is no kernel for them and the updates.

        It is the same list for as long as they are the same tensors.
        """
        grads, *lists = tree.lists(updates, params, *(getattr(own, name) for name in self._fields))
        kept, shapes = [*chain(*lists)], [*map(_SHAPE, lists[0])]
        if torch.compiler.is_compiling() or not self._as_before(kept, shapes):
            self._seen = None
            if not same_shapes(lists) or not has_kernel(self._op, self._kinds, *lists):
                return None
            self._lists, self._seen = lists, ([*map(Tensor.data_ptr, kept)], shapes)
        alike = [*map(_SHAPE, grads)] == shapes and has_kernel(self._op, GRADIENTS, grads)
        return self._lists if alike and grads[0].device == kept[0].device else None

    def _as_before(self, kept: list[Tensor], shapes: list[torch.Size]) -> bool:
        if self._seen is None or not are_same(kept, [*chain(*self._lists)]):
            return False
        return ([*map(Tensor.data_ptr, kept)], shapes) == self._seen


def are_same(a: list[Tensor], b: list[Tensor]) -> bool:
    """Return whether two lists hold the same objects."""
    return len(a) == len(b) and all(map(is_, a, b))


_SHAPE, DTYPE, _DEVICE = (attrgetter(name) for name in ("shape", "dtype", "device"))


GRADIENTS = (torch.float32, torch.float16, torch.bfloat16)
"""Dtypes of gradients that all kernels take."""

KINDS = (torch.float32, torch.bfloat16)
"""Dtypes of params that all kernels take; moments are float32. float16 overflows where bounds of float32 hold."""

HALF_TOO = (*KINDS, torch.float16)
"""Those of steps that have bounds for float16, too."""


def has_kernel(op: str, kinds: Sequence[torch.dtype], first: Sequence[Tensor], *others: Sequence[Tensor]) -> bool:
    """Return whether the table has a kernel for the whole step of these tensors: contiguous, and on one device.

    Args: first: a list of one dtype among `kinds`. others: lists in float32.
    """
    tensors = [*first, *chain(*others)]
    if not tensors or not is_concrete(*tensors):
        return False
    found, wide = {*map(DTYPE, first)}, {*map(DTYPE, chain(*others))} <= {torch.float32}
    alike = wide and len(found) <= 1 and found <= {*kinds} and len({*map(_DEVICE, tensors)}) == 1
    return alike and all(map(Tensor.is_contiguous, tensors)) and bool(cells(op, tensors[0].device.type))


def same_shapes(lists: Sequence[Sequence[Tensor]]) -> bool:
    """Return whether all lists hold tensors of the same shapes; kernels see addresses and would go on behind an end."""
    first, *others = ([*map(_SHAPE, tensors)] for tensors in lists)
    return all(shapes == first for shapes in others)


# A step needs some numbers of a state on the host: weights of moments, sums of learning rates. They are 0-d tensors on
# the device of the params, and to read one in every step would be to wait for the device in every step. So a number is
# read once. What a step writes into it is written into the copy on the host, too, in the same arithmetic, for as long
# as nobody else writes.
_copies: Any = WeakIdKeyDictionary()  # tensor of a device -> (its version, its copy)


def on_host(x: Tensor) -> Tensor:
    """Return a 0-d tensor's number on the host, not to be written into; x itself if it is there."""
    if x.device.type == "cpu":
        return x
    known: tuple[int, Tensor] | None = _copies.get(x)
    if known is None or known[0] != x._version:
        known = _copies[x] = x._version, x.cpu()
    return known[1]


def number(x: Tensor | float) -> float:
    """Return a number, or that of a 0-d tensor, on the host."""
    return float(on_host(x) if isinstance(x, Tensor) else x)


def write(x: Tensor, how: Callable[[Tensor], Any]) -> None:
    """Write into a 0-d tensor, and into its copy on the host if that was asked for. how: writes into what it is given.

    What it takes from elsewhere has to be on the host.
    """
    known: tuple[int, Tensor] | None = _copies.get(x)
    is_right = known is not None and known[0] == x._version
    how(x)
    if known is not None and is_right:
        how(known[1])
        _copies[x] = x._version, known[1]
