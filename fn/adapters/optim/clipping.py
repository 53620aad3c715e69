"""Clipping by the norm over all param groups: one link in front of all units.

exact mean    averaged here, in one message, and clipped by its norm; units then have nothing to average
codes         the mean is not known before it is sent: all ranks scale by one factor, from the root of the mean
              squared norm, an upper bound of the norm of the mean, in a message of 4 bytes
local step    each rank by its own norm
a step late   where the mean is exact, by its norm when it has arrived; else before it is sent, as for codes
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.optim.shards import squared_norm
from fn.adapters.optim.units import Units
from fn.base import Phase, Round, Transform, chain
from fn.collectives import following
from fn.collectives.axis import AxisNames, Binding, bind_alone
from fn.transforms.average import average
from fn.transforms.clip import clip_by

Tree = Any
Grads = list[list[Tensor]]


def clip(core: Units, phase: Phase | Round, grads: Grads) -> tuple[Grads, Binding]:
    """Clip the gradients of a step; return them, and the axes over which units have yet to average them."""
    states = [unit.state for unit in core.units]
    if core.max_norm is None or (isinstance(phase, Round) and roles.find(states, "taken")):  # kept ones come late
        return grads, core.binding
    kind, params = Phase.LOCAL if isinstance(phase, Round) else phase, tuple(unit.params for unit in core.units)
    kind = Phase.COMPRESSED if kind is Phase.WARMUP and roles.find(states, "warmup_errors") else kind
    link = chain(average(_name_of(core.axes)), _clip_by(core, core.max_norm))
    with following.at(core.log, ("gradients", kind.value), lambda: core.axes):
        grads = [*link.update(kind)(tuple(grads), ((), ()), params)[0]]
    if not core.axes or kind is not Phase.WARMUP or _have_their_own(states):
        return grads, core.binding
    # An average over one rank returns what it is given, and sends nothing.
    return grads, Binding({**core.binding.axes, **bind_alone(core.axes).axes})


def clip_late(core: Units, states: list[Tree], role: str) -> list[Tree]:
    """Return states whose late gradients are clipped. Args: role: "taken", not sent yet, or "mean", arrived."""
    found = tuple(roles.find(states, role))
    if core.max_norm is None or not found or (role == "taken" and roles.find(states, "mean")):
        return states
    phase = Phase.WARMUP if role == "mean" else Phase.COMPRESSED
    with following.at(core.log, ("gradients", role), lambda: core.axes):
        clipped = iter(_clip_by(core, core.max_norm).update(phase)(found, (), None)[0])
    after: list[Tree] = roles.replace(states, role, lambda old: next(clipped))
    # A norm whose square overflows made all of them NaN.
    lost = torch.stack([x.isnan().any() for x in tree.leaves(roles.find(after, role)) if x.numel()][:1]).any()
    return roles.replace(after, "missing", lambda flag: flag | lost) if role == "mean" else after


def _clip_by(core: Units, max_norm: float) -> Transform:
    # Of units: torch appends a group that is added before a mean that is on its way has landed.
    params = [group["params"] for unit in core.units for group in unit.groups]
    return clip_by(max_norm, _name_of(core.axes), lambda grads: squared_norm(grads, params))


def _name_of(axes: Sequence[str]) -> AxisNames | None:
    return None if not axes else axes[0] if len(axes) == 1 else tuple(axes)


def _have_their_own(state: Tree) -> bool:
    """Tell whether ranks have anything of their own that a warm-up step needs, such as momenta that it averages.

    Then it needs all ranks, and averages the mean once more, which costs its bytes again. It does not read residual
    errors, nor does it follow steps in which params came to differ.
    """
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        if roles.has_local_params(state):
            return False
        declared = roles.roles_of(state)
        if roles.rank_local(state).difference(declared.errors, declared.taken):
            return True
    return any(map(_have_their_own, tree.children(state)))
