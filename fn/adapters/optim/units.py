"""What an optimizer steps: its param groups in units, with their states, over which axes, and which of them rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.optim.groups import names_of
from fn.adapters.optim.shards import pieces
from fn.base import Transform, facts_of
from fn.collectives import following
from fn.collectives.axis import Binding
from fn.schedules import Schedule
from fn.transforms.residuals import Residuals

Tree = Any


@dataclass(eq=False)
class Unit:
    """Param groups that are staged together.

    transform: guarded, so that its state counts skipped steps. groups: the param groups that it steps. rates: their
    learning rates, 0-d, which are filled in place. hyper: its other hyper-parameters. spans: whether its trees are
    tuples of lists, one for each group, or the list of a single one. state: live buffers. has_copies: whether it
    has `copies`. versions: of the params, as fn left them; [] where that is not known. given: the parameters and
    names of each group, for which its state is made. places: the number of the parameter that each leaf of the state
    belongs to, or None; [] until somebody asks. parts: of each leaf, if it is a vector with parts of several, the
    number of each and what finds its part. divided: the numbers of the parameters that each state of shards divides.
    residuals: (which `ErrorFeedbackState` of the state, how it is laid out, the numbers of its parameters).
    """

    transform: Transform
    groups: list[dict[str, Any]]
    rates: list[Tensor]
    hyper: dict[str, Any] = field(default_factory=dict)
    spans: bool = False
    state: Tree = ()
    has_copies: bool = False
    versions: list[tuple[int, int]] = field(default_factory=list)
    given: list[dict[str, Any]] = field(default_factory=list)
    places: list[int | None] = field(default_factory=list)
    parts: list[list[tuple[int, Callable[[Tensor], Tensor]]]] = field(default_factory=list)
    divided: list[list[int]] = field(default_factory=list)
    residuals: list[tuple[int, Residuals, list[int]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.given:
            # Lists of its own: a script may write into those of the groups.
            self.given = [{"params": [*g["params"]], "param_names": [*names_of(g)]} for g in self.groups]

    @property
    def params(self) -> Tree:
        """Return the tensors that the transform steps: of a DTensor this rank's piece."""
        return self.tree_of([pieces(group["params"]) for group in self.given])

    @property
    def members(self) -> list[Tensor]:
        """Return the parameters of its groups, DTensors as they are."""
        return [p for group in self.given for p in group["params"]]

    @property
    def names(self) -> list[str]:
        """Return the names of its parameters."""
        return [name for group in self.given for name in names_of(group)]

    @property
    def copies(self) -> list[list[Tensor]]:
        """Return the copies of all params in its state, such as an anchor; those of shards are none."""
        found, shapes = roles.find(self.state, "copies"), [p.shape for p in tree.leaves(self.params)]
        return [copy for copy in map(tree.leaves, found) if [x.shape for x in copy] == shapes]

    def tree_of(self, lists: Sequence[list[Tensor]]) -> Tree:
        """Return lists, one for each of its groups, as the tree that its transform takes."""
        return tuple(lists) if self.spans else lists[0]


class Flight(NamedTuple):
    """A mean on its way.

    number: of its exchange. changed: the leaves that it changes, {place among the leaves of all states: new tensor};
    read it when `wait` has waited for it.
    """

    number: int
    changed: dict[int, Tensor]
    wait: Callable[[], None]


class Units(torch.optim.Optimizer):
    """An optimizer's units, without its steps, which are `core.Core`'s.

    schedule, binding, axes, max_norm: as for `core.Core`. units: what it steps.
    """

    islands = ""
    """An axis whose ranks come and go: they are bound in exchanges only."""

    log: following.Log | None = None
    """What all ranks get alike in a step, where somebody follows this run or this replays one."""

    schedule: Schedule
    binding: Binding
    axes: list[str]
    max_norm: float | None
    units: list[Unit]

    @property
    def resting(self) -> list[str]:
        """Return the names of the parameters whose `requires_grad` is switched off, with their groups."""
        return [
            f"parameter {name} in group {g}"
            for g, group in enumerate(self.param_groups)
            for name, p in zip(names_of(group), group["params"], strict=True)
            if not p.requires_grad
        ]

    @property
    def exchange_axes(self) -> tuple[str, ...]:
        """Return the axes over which an exchange averages: not those whose ranks take local steps together."""
        inside = {axis for unit in self.units for axis in facts_of(unit.transform).inside}
        return tuple(axis for axis in self.axes if axis not in inside)
