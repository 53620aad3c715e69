"""Islands that come and go: local steps whose exchanges are among those that torchft's quorum finds.

    manager.start_quorum()      who is there; an island that is behind gets the state of one that is not
      | counts                  who has something to say, and for how many tokens it speaks
      | difference, mean        over the process group of this quorum; nothing is written yet
      | all have come so far    else nobody writes
    manager.should_commit()     then the exchange is written, or dropped

A dropped exchange costs its time only: params stay where local steps led, and the next difference is of both rounds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions  # type: ignore[attr-defined]

from fn import tree
from fn.adapters.optim.consistency import ERROR, by_path, device_among, kinds
from fn.adapters.optim.exchange import stage_exchange, weight_of
from fn.adapters.optim.optimizer import Optimizer
from fn.base import Phase, Round, Transform
from fn.collectives.agreement import describe
from fn.collectives.axis import ALONE, Axis, Binding
from fn.collectives.compressed import ErrorFeedbackState
from fn.collectives.primitives import all_gather
from fn.collectives.transports.registry import Transport, register
from fn.errors import expected
from fn.inplace.protocol import Staged
from fn.schedules import Every, Schedule
from fn.transforms.outer import OuterState

logger = logging.getLogger("fn")


def optimizer(
    params: Any,
    make: Callable[..., Transform],
    manager: Any,
    *,
    schedule: Schedule,
    tokens: Callable[[], float] | None = None,
    axis: str = "islands",
    **more: Any,
) -> Optimizer:
    """Return an `fn.Optimizer` whose ranks are islands that torchft keeps track of.

        manager = torchft.Manager(pg=torchft.ProcessGroupGloo(timeout), use_async_quorum=False, min_replica_size=1,
                                  world_size=1, rank=0, load_state_dict=None, state_dict=None, ...)
        opt = fn.adapters.torchft.optimizer(model.parameters(), partial(fn.diloco, servers=False), manager,
                                            schedule=fn.every(100), lr=4e-4)

    Before its first step an island waits for a quorum. Where others are in the middle of a run, that is their next
    exchange. It takes part in that, but its difference, which is nothing, does not count in the mean. Afterwards every
    exchange asks for a quorum. An island that is lost is left out from the next quorum on. If an exchange fails, it is
    dropped on all islands, and the next one carries both rounds.

    An island that is behind is healed: it gets the whole state of another, with the moments of the inner optimizer,
    the learning rate and the step. Its params become the anchor, its errors zero, and gradients from before its first
    step are dropped. What else a model or a run has, such as buffers or a scheduler, is healed by
    `manager.register_state_dict_fn`.

    Args:
        params: as for `fn.Optimizer`. make: a method of local steps, called with `axis` besides; with codes and
            servers=False, since errors must not depend on the number of islands.
        manager: torchft's Manager with use_async_quorum=False. Its quorum's time-out has to be longer than a round,
            as in torchft's own DiLoCo, and the lighthouse's join time-out longer than islands are apart.
        schedule: of local steps only, without a delay, alike on all islands: `fn.every(h)`.
        tokens: () -> how many tokens this island has trained on since the last call; called once per exchange. A
            difference then counts by its tokens; those of a dropped exchange count in the next. None: all alike.
        axis: the name that the islands get. more: as for `fn.Optimizer`, such as lr.
    Returns: the optimizer. Outside of exchanges it is alone on its axis, so a checkpoint is that of one rank.
    Raises: ValueError for a method that has no local steps, or has errors of servers; for a schedule with a warm-up or
        a delay; from `step` for a manager with an asynchronous quorum or spares, or an island that was made otherwise
        than the others. From `step` also what torchft raises where no quorum is found: the local step is then taken.
    """
    if tokens is not None and not callable(tokens):
        raise TypeError(expected("tokens", "a function that returns a number", f"{tokens!r}"))
    with Binding({axis: Axis(1, torch.tensor(0, dtype=torch.int64, device="cpu"), ALONE)}):
        opt = Optimizer(params, partial(make, axis=axis), schedule=schedule, **more)
    _check_method(opt)
    _check_schedule(opt)
    islands = _Islands(opt, manager, axis, tokens)
    manager.register_state_dict_fn(f"fn.{axis}", islands.load, islands.save)
    opt.training.meet = islands.meet
    opt.register_step_pre_hook(islands.before_step)
    return opt


class _Islands:
    """What an island remembers between exchanges.

    joined: whether it was in a quorum. healed: whether the last one gave it another's state. unsent: tokens to count.
    """

    def __init__(self, optimizer: Optimizer, manager: Any, axis: str, tokens: Callable[[], float] | None):
        self.optimizer, self.manager, self.axis, self.tokens = optimizer, manager, axis, tokens
        self.joined, self.healed, self.unsent = False, False, 0.0

    def save(self) -> dict[str, Any]:
        """Return what an island that is behind needs."""
        return {"state": self.optimizer.state_dict(), "made": self.made()}

    def made(self) -> dict[str, str]:
        """Return what islands must have alike."""
        return describe((self.optimizer.make, self.optimizer.schedule))

    @torch.no_grad()
    def load(self, saved: dict[str, Any]) -> None:
        """Become a copy of another island at its anchor, with nothing undelivered."""
        ours, theirs = self.made(), saved["made"]
        for name in (n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n)):
            wanted = f"{name} to be {theirs.get(name, 'nothing')}, as on the other islands"
            raise ValueError(expected("make", wanted, ours.get(name, "nothing")))
        training = self.optimizer.training
        self.optimizer.load_state_dict(saved["state"])
        marks = by_path(kinds(training.states))
        for path, x in by_path(training.states).items():
            if marks[path] == ERROR:
                x.zero_()
        for params, state in zip(training.params, training.states, strict=True):
            (outer,) = tree.instances(state, OuterState)
            for p, x in zip(params, tree.leaves(outer.anchor), strict=True):
                p.copy_(x)
        self.healed, self.unsent = True, 0.0

    def before_step(self, *args: Any) -> None:
        """Join the others before the first step, and refuse a phase that islands do not have before any other."""
        training = self.optimizer.training
        if not self.joined:
            healed = False
            while not self.take(trained=False):
                healed = healed or self.healed
            if healed or self.healed:
                for p in tree.leaves(training.params):
                    p.grad = None  # of other params
            self.joined = True
        _check_schedule(self.optimizer)

    def meet(self, round_: Round) -> None:
        """Take the exchange of a round, or drop it."""
        if round_.begin != round_.end:
            raise ValueError(expected("schedule", "exchanges without a delay", f"{round_}", "use fn.every(h)"))
        counted = 1.0 if self.tokens is None else float(self.tokens())
        if not 0 <= counted < math.inf:
            raise ValueError(expected("tokens", "to return a number of at least 0", f"{counted}"))
        self.unsent = 1.0 if self.tokens is None else self.unsent + counted
        self.take(trained=True)

    @torch.no_grad()
    def take(self, *, trained: bool) -> bool:
        """Take an exchange among those that are there; return whether it was written.

        Args: trained: whether this island has something to say.
        """
        manager, staged, self.healed = self.manager, None, False
        manager.start_quorum()  # calls `load`, if this island is behind
        if manager.errored() is None:
            group = self.group()
            try:
                staged = self.stage(group, trained and not self.healed)
            except RuntimeError as error:
                logger.warning("an exchange between islands failed and is dropped: %s", error)
                manager.report_error(error)
                group.abort()  # whoever waits for this island notices
        # Nothing is written before all islands say that theirs succeeded: one that wrote alone would move its anchor.
        if not manager.should_commit():
            return False
        if staged is not None:
            staged.commit()
        self.unsent = 0.0
        return True

    def group(self) -> Any:
        """Return the process group of this quorum. Raises: ValueError if it is not of this quorum's islands only."""
        from torchft.process_group import ManagedProcessGroup

        manager, group = self.manager, ManagedProcessGroup(self.manager).parent
        if not manager.is_participating() or manager.num_participants() != group.size():
            got = "islands that wait outside of the quorum"
            raise ValueError(expected("manager", "use_async_quorum=False, and no spares", got))
        return group

    def stage(self, group: Any, present: bool) -> Staged | None:
        """Take an exchange up to where it is written; None if nobody has anything to say.

        Raises: RuntimeError if communication fails, here or, as far as it can be known, on another island.
        """
        training, size, rank = self.optimizer.training, group.size(), self.manager.participating_rank()
        name = register(f"torchft {id(self.manager)}", _transport(group, size))
        with Binding(
            {**training.binding.axes, self.axis: Axis(size, torch.tensor(rank, dtype=torch.int64, device="cpu"), name)}
        ):
            header, device = [float(present), self.unsent, training.steps], device_among(training.groups)
            mine = torch.tensor(header, dtype=torch.float64, device=device)
            rows = all_gather(mine, self.axis).tolist()
            if not any(speaks for speaks, _, _ in rows):
                return None
            # An island that missed a quorum may have taken fewer steps, and goes on from where the others are.
            latest = int(max(steps for speaks, _, steps in rows if speaks))
            training.steps = latest - 1  # the schedule is asked for the step that they have taken
            round_, training.steps = training.phase, latest
            assert isinstance(round_, Round)
            tokens = [speaks * tokens for speaks, tokens, _ in rows]
            weights = tokens if any(tokens) else [speaks for speaks, _, _ in rows]
            staged = stage_exchange(training, round_, weight_of(weights, rank))
            all_gather(mine, self.axis)  # raises, so that nobody writes, where an island was lost meanwhile
        return staged


def _transport(group: Any, size: int) -> Transport:
    """Return the exchanges of a process group of torchft, which torch.distributed does not know."""

    def all_to_all(x: Tensor) -> Tensor:
        received = torch.empty_like(x)
        group.alltoall_base(received, x, [], [], AllToAllOptions()).wait()
        return received

    def gather(x: Tensor) -> Tensor:
        rows = x.new_empty((size, *x.shape))
        group.allgather([list(rows.unbind())], [x], AllgatherOptions()).wait()
        return rows

    def psum(x: Tensor) -> Tensor:
        group.allreduce([x], AllreduceOptions()).wait()
        return x

    return Transport(all_to_all, gather, psum)


def _check_schedule(optimizer: Optimizer) -> None:
    schedule = optimizer.schedule
    if optimizer.phase is Phase.WARMUP:
        wanted, got = "local steps from the first one on", "a warm-up, which averages gradients in every step"
        raise ValueError(expected("schedule", wanted, got, "use fn.every(h) with start=0"))
    if isinstance(schedule, Every) and schedule.delay:
        raise ValueError(expected("schedule", "exchanges without a delay", f"fn.every.delay={schedule.delay}"))


def _check_method(optimizer: Optimizer) -> None:
    for params, state in zip(optimizer.training.params, optimizer.training.states, strict=True):
        shapes = [[x.shape for x in tree.leaves(outer.anchor)] for outer in tree.instances(state, OuterState)]
        if shapes != [[p.shape for p in params]]:
            wanted = "fn.outer around all parameters of a group, such as fn.diloco"
            raise ValueError(expected("make", wanted, f"{len(shapes)} anchors that are not like them"))
        if tree.leaves([errors.server for errors in tree.instances(state, ErrorFeedbackState)]):
            cure = "give it servers=False: without them errors do not depend on the number of islands"
            raise ValueError(expected("make", "a method without errors of servers", "one with them", cure))
