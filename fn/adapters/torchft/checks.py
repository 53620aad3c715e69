"""What islands cannot work with, refused by name: schedules, methods, and steps of a warm-up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.optim.units import Unit
from fn.collectives.axis import SIMULATED, Axis, Binding
from fn.errors import expected
from fn.schedules import Every


def check_late(late: Any) -> None:
    """Refuse what is no (k, least, most) with a ValueError."""
    if late is not None and not (len(late) == 3 and late[0] >= 0 and 0 <= late[1] <= late[2] < math.inf):
        raise ValueError(expected("late", "(k, least, most), of at least 0 and in order, or None", f"{late}"))


def check_warmup(opt: Optimizer, arguments: Sequence[Any]) -> None:
    """Refuse a warm-up step whose gradients are not there yet, or not the ones that are averaged.

    Args: arguments: of `step`. Raises: ValueError with the cure.
    """
    found = {
        "a closure": any(x is not None for x in arguments),
        "torch.amp.GradScaler": getattr(opt, "grad_scale", None) is not None,
        "fn.adapters.ddp.overlap": opt.ahead is not None,
    }
    for got in (name for name, there in found.items() if there):
        wanted = "gradients in p.grad, which islands average before each step of a warm-up"
        raise ValueError(expected("step", wanted, got, "leave it out, or use a schedule without a warm-up"))


def check(opt: Optimizer, axis: str) -> None:
    """Refuse a schedule or a method that does not fit islands that come and go, with a ValueError."""
    schedule = opt.schedule
    if isinstance(schedule, Every) and schedule.delay >= schedule.h // schedule.fragments:
        wanted = "one mean on its way at a time between islands"
        got = f"fn.every.delay={schedule.delay}, h={schedule.h}, fragments={schedule.fragments}"
        raise ValueError(expected("schedule", wanted, got, "use a delay below h / fragments"))
    for unit in opt.units:
        copies = [x.shape for x in tree.leaves(roles.find(unit.state, "copies")[:1])]
        if unit.transform.exchange is None or copies != [p.shape for p in tree.leaves(unit.params)]:
            wanted = "fn.outer around all parameters of a group, such as fn.diloco"
            raise ValueError(expected("make", wanted, "a state without a copy of each"))
        two = Axis(2, torch.tensor(0, dtype=torch.int64, device="cpu"), SIMULATED)
        if _shapes(opt, unit, {axis: two}) != _shapes(opt, unit, {}):
            wanted = "a method whose state does not depend on the number of islands"
            cure = "give it servers=False: without errors of servers it does not"
            raise ValueError(expected("make", wanted, "another state for two than for one", cure))


def _shapes(opt: Optimizer, unit: Unit, axes: dict[str, Axis]) -> dict[str, torch.Size]:
    """Return the shapes of what the state of a unit would be with other axes."""
    with Binding({**opt.binding.axes, **axes}):
        state = unit.transform.init(tree.map(Tensor.detach, unit.params)) if axes else unit.state
    return {path: x.shape for path, x in tree.by_path(state).items()}
