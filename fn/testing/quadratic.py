"""The small problem on which the docstrings of the named optimizers show that they train."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fn.arguments import check_is_transform, checked
from fn.base import Transform, apply_updates
from fn.collectives.simulation import simulate
from fn.schedules import Schedule, always_warm_up, phase_of

RANKS, STEPS = 3, 30


class Loss(NamedTuple):
    """The mean square distance from the best params, over ranks and elements, to three digits behind the point.

    before: where training starts, at zero. after: where it ends.
    """

    before: float
    after: float


@checked("schedule")
def train(tx: Transform, schedule: Schedule = always_warm_up) -> Loss:
    """Train a matrix (4, 3) for 30 steps on 3 simulated ranks, where each pulls it to a target of its own.

    Take it to see in one line that an optimizer learns, before there is a model.

        p_r, state_r <- step(p_r - target_r, state_r, p_r);    the best p is the mean of the targets

        >>> import fn
        >>> fn.testing.train(fn.chain(fn.average("data"), fn.scale_by_learning_rate(0.1)))
        Loss(before=0.944, after=0.002)

    Args:
        tx: the optimizer, over the axis "data". schedule: step -> Phase or Round; by default all steps are a warm-up.
    Returns: the loss before and after.
    Raises: TypeError or ValueError that names the argument.
    """
    check_is_transform("tx", tx)
    noise = torch.randn(RANKS, 4, 3, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu")
    targets = noise[0] + 0.1 * noise  # little apart, or votes of three ranks would say nothing

    def run(target: Tensor) -> Tensor:
        p = torch.zeros_like(target)
        state = tx.init(p)
        for step in range(STEPS):
            updates, state = tx.update(phase_of(schedule, step))(p - target, state, p)
            p = apply_updates(p, updates)
        return p

    best, ends = targets.mean(0), simulate(run, "data", RANKS)(targets)
    before, after = (round((p - best).square().mean().item(), 3) for p in (torch.zeros_like(ends), ends))
    return Loss(before, after)
