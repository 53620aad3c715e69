"""Schedules: which phase a step is in. Host functions int -> Phase; steps count from 0."""

from __future__ import annotations

from collections.abc import Callable

from fn.base import Phase

Schedule = Callable[[int], Phase]


def freeze_after(steps: int) -> Schedule:
    """Warm up for `steps` steps, then compress.

    Raises: ValueError if steps is negative.

    Paper: Tang et al., 1-bit Adam (arXiv 2102.02888), algorithm 1: T_w.
    """
    if steps < 0:
        raise ValueError(f"steps: is {steps}; allowed is at least 0")
    return lambda step: Phase.WARMUP if step < steps else Phase.COMPRESSED


class FreezeWhenStable:
    """Warm up until the second moment has become stable, then compress for good.

        ||v_t||_1 / ||v_{t - D}||_1 >= threshold,   D = 1 / (1 - b2)

    A schedule that is fed: after each warm-up step, `observe` takes the norm, a number that is the same on every
    rank. `fn.Optimizer` feeds it from its state and saves it in its state dict; a custom loop calls
    `schedule.observe(step, float(norm))` itself.

        >>> schedule = FreezeWhenStable(b2=0.5)            # D = 2
        >>> for step, norm in enumerate([1.0, 8.0, 9.0, 8.5]):
        ...     schedule.observe(step, norm)
        >>> schedule(3), schedule(4)
        (<Phase.WARMUP: 'warmup'>, <Phase.COMPRESSED: 'compressed'>)

    Args:
        b2: the decay of the second moment.
        threshold: the ratio in (0, 1] that counts as stable.
        min_steps: never freeze before this many steps: as long as a learning-rate warm-up lasts.
    Raises: ValueError if an argument is out of range.

    Paper: Tang et al., 1-bit Adam (arXiv 2102.02888), section 7.1, the rule for T_w.
    """

    def __init__(self, b2: float = 0.999, threshold: float = 0.96, min_steps: int = 0):
        if not 0.0 <= b2 < 1.0:
            raise ValueError(f"b2: is {b2}; allowed is [0, 1)")
        if not 0.0 < threshold <= 1.0:
            raise ValueError(f"threshold: is {threshold}; allowed is (0, 1]")
        if min_steps < 0:
            raise ValueError(f"min_steps: is {min_steps}; allowed is at least 0")
        self.threshold = threshold
        self.min_steps = min_steps
        self.distance = max(1, round(1 / (1 - b2)))
        self.norms: list[float] = []
        self.frozen_at: int | None = None

    def observe(self, step: int, norm: float) -> None:
        """Take ||v||_1 after a step; steps must come in order. After the freeze it is ignored."""
        if self.frozen_at is not None:
            return
        self.norms = [*self.norms[-self.distance :], norm]
        ready = len(self.norms) > self.distance and step + 1 >= self.min_steps
        if ready and norm > 0 and min(norm, self.norms[0]) / max(norm, self.norms[0]) >= self.threshold:
            self.frozen_at = step + 1

    def __call__(self, step: int) -> Phase:
        """Return the phase of a step."""
        return Phase.WARMUP if self.frozen_at is None or step < self.frozen_at else Phase.COMPRESSED


def freeze_when_stable(b2: float = 0.999, threshold: float = 0.96, min_steps: int = 0) -> FreezeWhenStable:
    """Return a `FreezeWhenStable` schedule, the 1-bit Adam paper's automatic freeze."""
    return FreezeWhenStable(b2, threshold, min_steps)
