"""What a transform says of itself: see `Facts`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from fn import tree
from fn.errors import expected


class Averages(NamedTuple):
    """The axes over which the updates of *all* parameters are averaged in each phase.

    In a local phase, also those of an exchange that follows later, as where each rank goes to params of its own.
    """

    warmup: tuple[str, ...] = ()
    compressed: tuple[str, ...] = ()
    local: tuple[str, ...] = ()


class Facts(NamedTuple):
    """What a transform says about itself, to combinators and adapters that cut tensors into pieces or shard them.

    axes: the names of the axes that it communicates over.
    whole: the names of its links that need whole tensors, because they use norms, shapes, rows or tiles. (): it works
        element by element, so that it can be given pieces. An average in codes counts as element by element, too,
        although each piece then has scales of its own.
    silent: whether one of its links has no facts (`Transform.facts` is None), so that it may communicate over any axis.
    tree: the names of its links that need all tensors, because they use a norm of the whole tree.
    unequal: whether what it averages differs between the ranks, as the mean of two of them does.
    shards: the names of the axes over whose ranks the tensors are divided that it is given. It brings whole tensors
        together there, so it can be given rows of them, and the ranks skip a step together.
    inside: the names of those axes within an island over which the inner optimizer of `fn.outer` communicates. Their
        ranks take local steps together.
    averages: the axes that each phase averages over. None: all of `axes`, in every phase.
    batched: whether what needs whole tensors takes each matrix of a stack, the last two dimensions, by itself, so that
        ranks may own slices of stacks; of a partition a function of params: whether that is so of each leaf.

    >>> import fn
    >>> fn.chain(fn.average("data"), fn.scale_by_adam(), fn.scale_by_shape()).facts
    Facts(axes=('data',), whole=('scale_by_shape',), silent=False, tree=(), unequal=False, shards=(), inside=(),
    averages=Averages(warmup=('data',), compressed=(), local=()), batched=False)
    """

    axes: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    silent: bool = False
    tree: tuple[str, ...] = ()
    unequal: bool = False
    shards: tuple[str, ...] = ()
    inside: tuple[str, ...] = ()
    averages: Averages | None = None
    batched: bool | Callable[[Any], list[bool]] = False

    @property
    def averaged(self) -> Averages:
        """Return the axes that each phase averages over."""
        return Averages(self.axes, self.axes, self.axes) if self.averages is None else self.averages

    def in_slices(self, params: Any) -> list[bool]:
        """Return whether each leaf of params is a stack whose slices, along the first dimension, may have owners."""
        leaves = tree.leaves(params)
        batched = self.batched(params) if callable(self.batched) else [self.batched] * len(leaves)
        return [flag and p.ndim > 2 and len(p) > 1 for p, flag in zip(leaves, batched, strict=True)]


ELEMENTWISE = Facts()
"""The facts of a link that communicates with nobody and treats each element by itself."""


def merged(*facts: Facts) -> Facts:
    """Return the facts of a transform that consists of several: their names together, and a flag where one has it.

    Raises: TypeError if axes, or links, are a plain string and no tuple.
    """

    def names(field: str) -> tuple[str, ...]:
        values = [getattr(one, field) for one in facts]
        for value in values:
            if isinstance(value, str):
                raise TypeError(expected(f"facts.{field}", "a tuple of names", f"{value!r}", f"write ({value!r},)"))
        return (*dict.fromkeys(name for value in values for name in value),)

    fields = {field: names(field) for field in ("axes", "whole", "tree", "shards", "inside")}
    flags = {field: any(getattr(one, field) for one in facts) for field in ("silent", "unequal")}
    phases = zip(*(one.averaged for one in facts), strict=True)
    averages = Averages(*((*dict.fromkeys(axis for axes in phase for axis in axes),) for phase in phases))
    whole = Facts(**fields, **flags, batched=_batched(facts))  # type: ignore[arg-type]
    return whole if averages == whole.averaged else whole._replace(averages=averages)


def _batched(facts: tuple[Facts, ...]) -> bool | Callable[[Any], list[bool]]:
    """Return the fact `batched` of several together: no leaf is a batch where one of them needs whole stacks."""
    flags = [one.batched for one in facts if one.whole]
    functions = [batched for batched in flags if callable(batched)]
    if not functions or True in flags or not all(flags):
        return bool(flags) and all(flags)

    def batched(params: Any) -> list[bool]:
        return [any(flags) for flags in zip(*(f(params) for f in functions), strict=True)]

    return functions[0] if len(functions) == 1 else batched


def of_branches(whole: Facts, branches: list[Facts]) -> Facts:
    """Return the facts of a transform that gives each parameter to one branch: it averages what all of them do."""
    phases = zip(*(one.averaged for one in branches), strict=True)
    each = [[axis for axis in first if all(axis in axes for axes in rest)] for first, *rest in phases]
    return whole._replace(averages=Averages(*map(tuple, each)))
