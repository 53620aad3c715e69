"""Two-phase steps in place: `stage` computes and communicates, `commit` writes.

A transform is pure, and that costs memory traffic: every link reads and writes what the next one reads again, and the
new state is copied back into the buffers of the old one. Where the table has a kernel for a whole step, `match` finds
it for a chain; where nothing is faster torch's functions of lists are one (`foreach`). The numbers are the same up to
rounding; only adapters, which own their buffers, use it.

A step in place has two parts: `stage` does all that can fail, communication first of all, and writes nothing;
`commit` writes, and cannot fail. So a step that fails leaves params and state as they were.

A step is taken if the numbers that enter it are finite, and skipped otherwise, on all ranks alike. Nobody looks at the
result: finite numbers that overflow in it, because of an absurd learning rate say, are as in torch.
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


class Asked:
    """What a commit has to know of some tensors. places: of the tensors. flags: (S,) bool, perhaps on a device."""

    def __init__(self, places: Sequence[int], flags: Tensor) -> None:
        self.places, self.flags = places, flags
        self.known: list[bool] | None = None

    def answers(self) -> list[bool]:
        """Return the flags on the host; a device is waited for where `wait_for_flags` has not brought them along."""
        if self.known is None:
            self.known = self.flags.tolist()
        return self.known


class Staged(NamedTuple):
    """A step that waits to be written. commit: write it, if it is ok.

    ok: what it is taken from is finite, on all ranks alike; if not, all skip it. A 0-d bool where nobody has waited for
    the device yet. otherwise: what to write if it is not ok, in a step of which no other rank hears. asked: what the
    commit reads, which then comes with the flags.
    """

    ok: bool | Tensor
    commit: Callable[[], None]
    otherwise: Callable[[], None] | None = None
    asked: Asked | None = None


def wait_for_flags(steps: Sequence[Staged]) -> list[Staged]:
    """Return steps with bools; a device is waited for once."""
    # Steps may share a flag, which then travels once; those of several devices are read one by one.
    flags = [step.ok for step in steps]
    on_device = {id(flag): flag for flag in flags if isinstance(flag, Tensor) and flag.device.type != "cpu"}
    if len({flag.device for flag in on_device.values()}) == 1:
        asked = [step.asked for step in steps if step.asked is not None]
        # F flags of (), and (S,) of each that asks, -> (F + S ...,): one copy to the host, so one wait.
        of_steps = torch.stack([*on_device.values()])
        found = (torch.cat([of_steps, *(x.flags for x in asked)]) if asked else of_steps).cpu().tolist()
        numbers = dict(zip(on_device, found, strict=False))
        flags = [numbers.get(id(flag), flag) for flag in flags]
        rest = iter(found[len(on_device) :])
        for x in asked:
            x.known = [next(rest) for _ in x.places]
    return [
        Staged(bool(ok), step.commit) if ok or step.otherwise is None else Staged(True, step.otherwise)
        for step, ok in zip(steps, flags, strict=True)
    ]


class InPlace(NamedTuple):
    """A pure update that can also be staged.

    pure: the update. stage: (updates, state, params) -> Staged; None if no kernels fit them, before anything is sent:
        every rank answers alike, or sends the same messages either way.
    """

    pure: UpdateFn
    stage: Callable[[Tree, Tree, Tree], Staged | None]

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the result of the pure update."""
        return self.pure(updates, state, params)


class Eligibility:
    """Whether the table has a kernel for the whole step of lists of tensors: contiguous, of one device, of one shape.

    Moments are float32; params are that, too, or all of another one of `dtypes`.

    A look at every tensor takes longer than a small step. So params and state, which stay from step to step, are looked
    once, and then only whether they are the same objects at the same addresses; gradients are always looked at.

    Args: op: the kernel. fields: of the state of the link that keeps the moments, the lists. dtypes: of params.
    """

    def __init__(self, op: str, fields: Sequence[str], dtypes: Sequence[torch.dtype] = ()) -> None:
        self._op, self._fields, self._dtypes = op, fields, dtypes or PARAM_DTYPES
        self._lists: list[list[Tensor]] = []
        self._seen: tuple[list[int], list[torch.Size]] | None = None  # their addresses, the shapes of params

    def __call__(self, updates: Tree, moments: Tree, params: Tree) -> list[list[Tensor]] | None:
        """Return params and fields of the state `moments` as lists; None if no kernel fits them and the updates.

        It is the same list for as long as they are the same tensors.
        """
        grads, *lists = tree.lists(updates, params, *(getattr(moments, name) for name in self._fields))
        tensors, shapes = [*chain(*lists)], [*map(_SHAPE, lists[0])]
        # addresses, too: whoever assigns `p.data` keeps the object and changes its memory
        # Tensors that a compiler traces have no addresses to compare.
        if torch.compiler.is_compiling() or not self._as_before(tensors, shapes):
            self._seen = None
            if any([*map(_SHAPE, others)] != shapes for others in lists):  # kernels would go on behind an end
                return None
            if not has_kernel(self._op, self._dtypes, *lists):
                return None
            self._lists, self._seen = lists, ([*map(Tensor.data_ptr, tensors)], shapes)
        fit = [*map(_SHAPE, grads)] == shapes and has_kernel(self._op, WITH_FLOAT16, grads)
        return self._lists if fit and grads[0].device == tensors[0].device else None

    def _as_before(self, tensors: list[Tensor], shapes: list[torch.Size]) -> bool:
        before = [*chain(*self._lists)]
        if self._seen is None or len(tensors) != len(before) or not all(map(is_, tensors, before)):
            return False
        return ([*map(Tensor.data_ptr, tensors)], shapes) == self._seen


_SHAPE, DTYPE, _DEVICE = (attrgetter(name) for name in ("shape", "dtype", "device"))


PARAM_DTYPES = (torch.float32, torch.bfloat16)
"""Dtypes of params that all kernels take; moments are float32. Sums that are rounded to float16 may overflow."""

WITH_FLOAT16 = (*PARAM_DTYPES, torch.float16)
"""Dtypes of gradients that all kernels take."""


def has_kernel(op: str, dtypes: Sequence[torch.dtype], first: Sequence[Tensor], *others: Sequence[Tensor]) -> bool:
    """Return whether the table has a kernel for the whole step of these tensors: contiguous, and on one device.

    Args: first: a list of one dtype among `dtypes`. others: lists in float32.
    """
    tensors = [*first, *chain(*others)]
    if not tensors or not is_concrete(*tensors):
        return False
    of_first, of_others = {*map(DTYPE, first)}, {*map(DTYPE, chain(*others))}
    fit = len(of_first) <= 1 and of_first <= {*dtypes} and of_others <= {torch.float32}
    fit = fit and len({*map(_DEVICE, tensors)}) == 1 and all(map(Tensor.is_contiguous, tensors))
    return fit and bool(cells(op, tensors[0].device.type))


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
    """Write into a 0-d tensor, and into its copy on the host if that was asked for.

    Args: how: writes into the tensor that it is given. What it takes from elsewhere has to be on the host.
    """
    known: tuple[int, Tensor] | None = _copies.get(x)
    # Asked before the write, which raises the version.
    is_current = known is not None and known[0] == x._version
    how(x)
    if known is not None and is_current:
        how(known[1])
        _copies[x] = x._version, known[1]
