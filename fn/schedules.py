"""Schedules: which phase, or round, a step is in. Host functions int -> Phase or Round; steps count from 0."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from fn.arguments import check_interval, check_whole
from fn.base import Phase, Round, check_round
from fn.errors import expected

Schedule = Callable[[int], Phase | Round]


@runtime_checkable
class Remembering(Protocol):
    """A schedule with a memory, which a state dict keeps: whole numbers, others, and lists of those, by name."""

    def memory(self) -> dict[str, Any]:
        """Return what to keep."""

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on from what `memory` returned."""


def freeze_after(steps: int) -> Schedule:
    """Warm up for `steps` steps, then compress.

        >>> import fn
        >>> [fn.freeze_after(2)(step).name for step in range(4)]
        ['WARMUP', 'WARMUP', 'COMPRESSED', 'COMPRESSED']

    Raises: ValueError if steps is negative or no whole number.

    Paper: Tang et al., 1-bit Adam (arXiv 2102.02888), algorithm 1: T_w.
    """
    return FreezeAfter(_whole("steps", steps, 0))


def _whole(argument: str, value: Any, least: int) -> int:
    number = float(value) if isinstance(value, numbers.Real) else math.nan
    if not number >= least or not number.is_integer():
        wanted = f"a whole number of at least {least}, such as int(0.2 * total)"
        raise ValueError(expected(argument, wanted, f"{value!r}"))
    return int(number)


@dataclass(frozen=True)
class FreezeAfter:
    """The schedule of `freeze_after`: a function that can be pickled. steps: of the warm-up."""

    steps: int

    def __call__(self, step: int) -> Phase:
        """Return the phase of a step."""
        return Phase.WARMUP if step < self.steps else Phase.COMPRESSED


def phase_of(schedule: Schedule, step: int) -> Phase | Round:
    """Return the phase or the round that a schedule gives for a step. Raises TypeError or ValueError if it is none."""
    phase = schedule(step)
    if isinstance(phase, Round):
        check_round(phase)
        return phase
    try:
        return Phase(phase)
    except ValueError as error:
        wanted = f"a phase for step {step}, such as fn.Phase.WARMUP"
        raise ValueError(expected("schedule", wanted, f"{phase}")) from error


def phases_of(schedule: Schedule) -> tuple[Phase, ...]:
    """Return the phases after the warm-up that a schedule comes to; of other modules, those that it has as `phases`."""
    if isinstance(schedule, ZeroOneSchedule) and schedule.local_step_clipper > 1:
        return Phase.COMPRESSED, Phase.LOCAL
    if isinstance(schedule, Every):
        return (Phase.COMPRESSED,) if schedule.h == schedule.fragments else (Phase.COMPRESSED, Phase.LOCAL)
    if isinstance(schedule, Periodic):
        return (Phase.COMPRESSED,) if schedule.period > 1 else ()
    known = isinstance(schedule, FreezeAfter | FreezeWhenStable | ZeroOneSchedule)
    return (Phase.COMPRESSED,) if known else getattr(schedule, "phases", ())


def always_warm_up(step: int) -> Phase:
    """Return WARMUP for every step: the schedule of optimizers that do not compress."""
    return Phase.WARMUP


def zero_one_schedule(
    var_freeze_step: int = 100_000,
    var_update_scaler: int = 16,
    local_step_scaler: int = 32_678,
    local_step_clipper: int = 16,
    *,
    first: int = 1,
) -> Schedule:
    """Alternate variance steps, synchronising steps and local steps, ever less often.

    Until var_freeze_step: a variance step (WARMUP) every k-th step, where k doubles after var_update_scaler of them;
    the steps in between synchronise (COMPRESSED). From then on: a synchronising step every k-th step, where k doubles
    after local_step_scaler steps up to local_step_clipper; the steps in between are LOCAL. The defaults are for long
    runs: the first LOCAL step is number 132,678. `zero_one_adam` says what a short run did with others.

        >>> import fn
        >>> schedule = fn.zero_one_schedule(8, var_update_scaler=2, local_step_scaler=6, local_step_clipper=4)
        >>> "".join(schedule(step).name[0] for step in range(24))          # Warm-up, Compressed, Local
        'WWCWCWCWCCCCCCLCLCLCLLLC'

    Args:
        var_freeze_step: steps before the variance is frozen.
        var_update_scaler, local_step_scaler: after how many the interval doubles.
        local_step_clipper: the longest interval.
        first: the number of the first step, of which multiples are taken; DeepSpeed's first update has number 2.
    Raises: ValueError if an argument is out of range or no whole number.

    Paper: Lu et al., 0/1 Adam (arXiv 2202.06009), section 6: the policies for T_v and T_u.
    """
    return ZeroOneSchedule(
        _whole("var_freeze_step", var_freeze_step, 0),
        _whole("var_update_scaler", var_update_scaler, 1),
        _whole("local_step_scaler", local_step_scaler, 1),
        _whole("local_step_clipper", local_step_clipper, 1),
        _whole("first", first, 0),
    )


@dataclass(frozen=True)
class ZeroOneSchedule:
    """The schedule of `zero_one_schedule`: a function that can be pickled. Its fields are the arguments of that."""

    var_freeze_step: int
    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int
    first: int

    def __call__(self, step: int) -> Phase:
        """Return the phase of a step."""
        frozen = step >= self.var_freeze_step
        due = (step + self.first) % self._interval(step, frozen) == 0
        if frozen:
            return Phase.COMPRESSED if due else Phase.LOCAL
        return Phase.WARMUP if due else Phase.COMPRESSED

    def _interval(self, step: int, frozen: bool) -> int:
        """Return the interval in force in a step, counted from the start of its regime."""
        if frozen:  # doubles with the number of steps
            # Bounded: 2**doubled would be a number of thousands of digits late in a run, before the clipper cuts it.
            doubled = min((step - self.var_freeze_step) // self.local_step_scaler, 62)
            return int(min(self.local_step_clipper, 2**doubled))
        interval, updates = 1, 0  # doubles with the number of variance steps: replayed, a few numbers per doubling
        number = self.first
        while True:
            # The number of the step that is the last variance step before the interval doubles.
            nth = -(-number // interval) * interval + interval * (self.var_update_scaler - 1 - updates)
            if nth >= step + self.first:
                return interval
            number, interval, updates = nth + 1, interval * 2, 0


def every(h: int, *, fragments: int = 1, delay: int = 0, start: int = 0) -> Schedule:
    """Warm up for `start` steps, then exchange each fragment of the params every h steps, one after the other.

    With q = h / fragments, round k is of q steps, and exchanges fragment k mod fragments. An exchange ends with a
    round, `delay` steps after it began: below q in the round in which it began, else in a later one. Steps in which
    nothing begins or ends send nothing.

        >>> [tuple(every(4, fragments=2, delay=1)(step)) for step in range(4)]      # begin and end of each `Round`
        [(0, None), (None, 0), (1, None), (None, 1)]

    Args:
        h: steps from one exchange of a fragment to the next. fragments: into how many `fn.outer` divides the params.
        delay: steps between sending and taking over, at most h. With h itself an exchange ends as the next one of its
            fragment begins, and their numbers alternate: 2 fragment and 2 fragment + 1. `fn.outer` takes less than h.
        start: steps of the warm-up.
    Returns: step -> `Phase.WARMUP`, then `Round`.
    Raises: ValueError if an argument is out of range or no whole number, or h is not divisible by fragments.

    Paper: Douillard et al., DiLoCo (arXiv 2311.08105), algorithm 1: H; Streaming DiLoCo (arXiv 2501.18512): fragments.
    """
    steps, parts = _whole("h", h, 1), _whole("fragments", fragments, 1)
    if steps % parts:
        raise ValueError(expected("h", f"a multiple of the {parts} fragments", f"{h}"))
    late = _whole("delay", delay, 0)
    if late > steps:
        raise ValueError(expected("delay", f"at most h={steps}", f"{delay}"))
    return Every(steps, parts, late, _whole("start", start, 0))


@dataclass(frozen=True)
class Every:
    """The schedule of `every`: a function that can be pickled. Its fields are the arguments of that."""

    h: int
    fragments: int
    delay: int
    start: int

    def __call__(self, step: int) -> Phase | Round:
        """Return the phase or the round of a step."""
        if step < self.start:
            return Phase.WARMUP
        length = self.h // self.fragments
        number, place = divmod(step - self.start, length)
        rounds, steps = divmod(self.delay, length)
        # A delay is whole rounds and the steps left over: an exchange begins so many steps before its round ends.
        begins = place == length - 1 - steps
        ends = place == length - 1 and number >= rounds
        return Round(self._exchange(number) if begins else None, self._exchange(number - rounds) if ends else None)

    def _exchange(self, number: int) -> int:
        """Return the number of a round's exchange in its `Round`."""
        turn, fragment = divmod(number, self.fragments)
        return fragment if self.delay < self.h else 2 * fragment + turn % 2


def every_seconds(seconds: float) -> EverySeconds:
    """Exchange after about so many seconds of local steps, on islands of unequal speed.

    Take it where `every` would let the fast islands wait for the slow ones. An island takes, up to its next exchange,

        n = max(1, floor(seconds / s)) local steps,   s = the median of its own seconds a step

        >>> import fn
        >>> schedule, exchanges = fn.every_seconds(1.0), []
        >>> for step in range(12):
        ...     if schedule(step) == fn.Round(0, 0):
        ...         schedule.plan(step + 1, 0.24)          # its median, measured or, under `fn.simulate`, given
        ...         exchanges.append(step)
        >>> exchanges
        [1, 5, 9]

    No clock decides in a step: `fn.adapters.torchft.optimizer` measures, and its islands agree on n in each exchange.
    The first round, of which nothing is known, has two steps. A state dict holds n, so a resume is exact. Learning
    rates follow `opt.progress`, which all islands have alike.

    Args: seconds: of local steps from one exchange to the next.
    Returns: an `EverySeconds`, whose `plan` is called behind each exchange.
    Raises: ValueError unless seconds is finite and above 0; `fn.Optimizer` refuses it, for its ranks take steps alike.
    """
    return EverySeconds(seconds)


FIRST_ROUND = 2
"""Steps of a round before any step was timed: the first one is no measure of the others."""


@dataclass(eq=False)
class EverySeconds:
    """The schedule of `every_seconds`. Args and Raises: as there.

    What it remembers is not compared, for islands have other numbers and one schedule. due: the step of the next
    exchange. begun: steps taken when the last difference was sent. pace: seconds a step that the present round was
    planned with, 0 while not known. progress: the mean over islands of the steps that have entered exchanges.
    """

    fragments = 1
    phases = Phase.COMPRESSED, Phase.LOCAL

    seconds: float
    due: int = field(default=FIRST_ROUND - 1, init=False, compare=False)
    begun: int = field(default=0, init=False, compare=False)
    pace: float = field(default=0.0, init=False, compare=False)
    progress: float = field(default=0.0, init=False, compare=False)

    def __post_init__(self) -> None:
        check_interval("seconds", self.seconds, "(0, inf)")
        self.seconds = float(self.seconds)

    def __call__(self, step: int) -> Round:
        """Return the round of a step."""
        return Round(0, 0) if step >= self.due else Round()

    def plan(self, steps: int, seconds: float = 0.0, *, entered: float | None = None, sent: bool = True) -> None:
        """Say behind an exchange when the next one is.

        Args: steps: taken so far. seconds: a step, on the slowest rank of the island; 0: as in the last round.
            entered: the steps that entered the exchange, in the mean over islands; None: all since the last one.
            sent: whether those of this island did; else they count in the next one.
        """
        self.pace = seconds or self.pace
        self.progress += steps - self.begun if entered is None else entered
        self.begun = steps if sent else self.begun
        self.due = steps - 1 + (max(1, int(self.seconds / self.pace)) if self.pace else FIRST_ROUND)

    def memory(self) -> dict[str, Any]:
        """Return what a state dict keeps of it."""
        return {name: getattr(self, name) for name in ("due", "begun", "pace", "progress")}

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on from a `memory`."""
        vars(self).update(memory)


def periodic(period: int) -> Schedule:
    """Take one step of every `period` in the warm-up, which is exact, and the others in the compressed phase.

    Of methods with two rules over one momentum: a costly one now and then, a cheap one between.

        >>> import fn
        >>> "".join(fn.periodic(3)(step).name[0] for step in range(8))          # Warm-up, Compressed
        'WCCWCCWC'

    Raises: ValueError if period is no whole number of at least 1.
    """
    return Periodic(_whole("period", period, 1))


@dataclass(frozen=True)
class Periodic:
    """The schedule of `periodic`: a function that can be pickled. period: as its argument."""

    period: int

    def __call__(self, step: int) -> Phase:
        """Return the phase of a step."""
        return Phase.COMPRESSED if step % self.period else Phase.WARMUP


class FreezeWhenStable:
    """Warm up until the second moment has become stable, then compress for good.

        ||v_t||_1 / ||v_{t - D}||_1 >= threshold,   D = 1 / (1 - b2)

    It has to be fed: after each warm-up step, `observe` takes the norm, a number that is the same on every rank.
    `fn.Optimizer` does so from its state, and saves the schedule in its state dict. Your own loop does it after each
    update, or nothing freezes:

        norm = sum(nu.abs().sum() for leaf in fn.roles.find(state, "second_moment") for nu in fn.tree.leaves(leaf))
        schedule.observe(step, float(norm))

        >>> schedule = FreezeWhenStable(b2=0.5)            # D = 2
        >>> for step, norm in enumerate([1.0, 8.0, 9.0, 8.2]):
        ...     schedule.observe(step, norm)
        >>> schedule(3), schedule(4)
        (<Phase.WARMUP: 'warmup'>, <Phase.COMPRESSED: 'compressed'>)

    Args:
        b2: it looks back 1 / (1 - b2) steps; the paper takes the decay of the second moment. With the default a freeze
            comes after 1000 steps at the earliest, with the 0.95 of `onebit_adam` after 20.
        threshold: the ratio in (0, 1] that counts as stable.
        min_steps: never freeze before this many steps: as long as a learning-rate warm-up lasts.
    Raises: ValueError if an argument is out of range.

    Paper: Tang et al., 1-bit Adam (arXiv 2102.02888), section 7.1, the rule for T_w.
    Differs: the smaller norm is divided by the larger. The paper's v starts at zero and grows, so that the plain ratio
        is above 1 from the first comparison on. That of named optimizers is bias-corrected, and stable sooner.
    """

    def __init__(self, b2: float = 0.999, threshold: float = 0.96, min_steps: int = 0):
        check_interval("b2", b2, "[0, 1)")
        check_interval("threshold", threshold, "(0, 1]")
        check_whole("min_steps", min_steps, 0)
        if min_steps < 0:
            raise ValueError(expected("min_steps", "a whole number of at least 0", f"{min_steps}"))
        self.threshold = threshold
        self.min_steps = min_steps
        self.distance = max(1, round(1 / (1 - float(b2))))
        self.norms: list[float] = []
        self.frozen_at: int | None = None

    def observe(self, step: int, norm: float | None) -> None:
        """Take ||v||_1 after a step; steps must come in order. After the freeze it is ignored.

        None is for a step that was skipped: it says nothing of v, which rested without being stable.
        """
        if norm is None or self.frozen_at is not None:
            return
        # distance + 1 numbers: the first one is of `distance` observed steps ago.
        self.norms = [*self.norms[-self.distance :], norm]
        # norm > 0: moments of zero, before any gradient came, rest without being stable, and 0 / 0 is no ratio.
        ready = len(self.norms) > self.distance and step + 1 >= self.min_steps
        if ready and norm > 0 and min(norm, self.norms[0]) / max(norm, self.norms[0]) >= self.threshold:
            self.frozen_at = step + 1

    def memory(self) -> dict[str, Any]:
        """Return what a state dict keeps of it."""
        return {"norms": self.norms, "frozen_at": -1 if self.frozen_at is None else self.frozen_at}

    def recall(self, memory: Mapping[str, Any]) -> None:
        """Go on from a `memory`."""
        self.norms, frozen_at = memory["norms"], memory["frozen_at"]
        self.frozen_at = None if frozen_at < 0 else frozen_at

    def __call__(self, step: int) -> Phase:
        """Return the phase of a step."""
        return Phase.WARMUP if self.frozen_at is None or step < self.frozen_at else Phase.COMPRESSED


def freeze_when_stable(b2: float = 0.999, threshold: float = 0.96, min_steps: int = 0) -> FreezeWhenStable:
    """Return a `FreezeWhenStable` schedule, the 1-bit Adam paper's automatic freeze.

    `fn.Optimizer` feeds it. In a loop of your own nothing freezes unless you do, with two lines after each update:

        norm = sum(nu.abs().sum() for leaf in fn.roles.find(state, "second_moment") for nu in fn.tree.leaves(leaf))
        schedule.observe(step, float(norm))

        >>> import torch, fn
        >>> tx, schedule = fn.onebit_adam(b2=0.9, axis="data"), fn.freeze_when_stable(b2=0.9)
        >>> params = torch.zeros(3)
        >>> state = tx.init(params)
        >>> for step in range(60):
        ...     updates, state = tx.update(schedule(step))(torch.ones(3), state, params)
        ...     schedule.observe(step, float(fn.roles.find(state, "second_moment")[0].sum()))
        >>> schedule.frozen_at
        11

    Args and Raises: as `FreezeWhenStable`.
    """
    return FreezeWhenStable(b2, threshold, min_steps)
