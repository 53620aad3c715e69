"""Islands that come and go: local steps whose exchanges are among those that torchft's quorum finds.

    manager.start_quorum()      who is there
      | ranks of the island     whether all of them are well, and whether the island is behind
      | counts                  who has something to say, and for how many tokens it speaks
      | the state of one        an island that is behind becomes a copy of one that is not, see `handing_over`
      | difference, mean        over the process group of this quorum; nothing is written yet
      | all have come so far    else nobody writes
    manager.should_commit()     then the exchange is written, or dropped, on all ranks of an island alike

A process group of torchft's spans the ranks in one place of all islands: the first of each, the second of each. So what
is to be the same on all ranks of an island is agreed on inside of it first.

A dropped exchange costs its time only: params stay where local steps led, and the next difference is of both rounds.
"""

from __future__ import annotations

import hashlib
import logging
import math
import platform
import weakref
from collections.abc import Callable, Sequence
from functools import partial, singledispatch
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions  # type: ignore[attr-defined]

from fn import roles, tree
from fn.adapters.optim.core import device_of, record_versions, stage_exchange
from fn.adapters.optim.groups import check_make
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.optim.shards import pieces
from fn.adapters.optim.units import Flight
from fn.adapters.torchft.checks import check, check_late, check_warmup
from fn.adapters.torchft.handing_over import become, given_to, hand_over, made_of, measure, nearest, state_of, takers_of
from fn.adapters.torchft.pace import LOOKS, Goodput, Pace, clock, goodput_of
from fn.arguments import checked
from fn.base import Phase, Round, Transform
from fn.collectives.agreement import gather_values
from fn.collectives.axis import ALONE, Axis, Binding, bind, current_binding, ranks_around
from fn.collectives.primitives import all_gather, mean_in_place
from fn.collectives.transports.registry import Transport, register
from fn.errors import PeerLost, expected
from fn.inplace.protocol import Staged
from fn.kernels.table import agreed_row, rows
from fn.schedules import EverySeconds, Schedule

logger = logging.getLogger("fn")


@checked("schedule", "late", "axis", "inside")
def optimizer(
    params: Any,
    make: Callable[..., Transform],
    manager: Any,
    *,
    schedule: Schedule,
    tokens: Callable[[], float] | None = None,
    axis: str = "islands",
    inside: dist.ProcessGroup | Axis | None = None,
    late: tuple[float, float, float] | None = (6.0, 5.0, 60.0),
    **more: Any,
) -> Optimizer:
    """Return an `fn.Optimizer` on one of the islands that torchft keeps track of.

        manager = torchft.Manager(pg=torchft.ProcessGroupGloo(timeout), use_async_quorum=False, min_replica_size=1,
                                  load_state_dict=None, state_dict=None, ...)
        opt = fn.adapters.torchft.optimizer(model.parameters(), partial(fn.diloco, servers=False), manager,
                                            schedule=fn.every(100), lr=4e-4)

    An island is one rank, or the ranks of torch.distributed: DDP, FSDP2 or both average gradients among them. Each has
    a manager with its rank. The ranks in one place of all islands exchange with each other, so islands have equal
    layouts. When a rank dies its island is lost; torchrun starts it again.

    Before its first step an island waits for a quorum. Where others are in the middle of a run, that is their next
    exchange. It takes part in that, but its difference, which is nothing, does not count in the mean. Afterwards every
    exchange asks for a quorum. An island that is lost is left out from the next quorum on. If an exchange fails, it is
    dropped on all islands, and the next one carries both rounds.

    An island that is behind is healed: it gets the whole state of the nearest, with the moments of the inner optimizer,
    the learning rate and the step. Its params become the anchor, its errors zero, and gradients from before its first
    step are dropped. All its ranks are healed from the same island, or none is. In the first quorum all become copies
    of the first, where they do not start alike. What else a model or a run has, such as buffers or a scheduler, is
    healed by `manager.register_state_dict_fn`.

    Args:
        params: as for `fn.Optimizer`. make: a method of local steps, called with `axis` besides; with codes and
            servers=False, since errors must not depend on the number of islands.
        manager: torchft's Manager with use_async_quorum=False. Its quorum's time-out has to be longer than a round,
            as in torchft's own DiLoCo, and the lighthouse's join time-out longer than islands are apart.
        schedule: alike on all islands: `fn.every(h)`, or `fn.every_seconds(t)`, by which a fast island takes more
            steps up to the next exchange than a slow one. In a warm-up every step waits for a quorum, and its
            gradients are averaged over the islands that are there. With a delay a mean travels while local steps go on.
        tokens: () -> how many tokens this rank has trained on since the last call; called once per exchange. A
            difference then counts by its island's tokens; those of a dropped exchange count in the next. None: it
            counts by its island's steps.
        axis: the name that the islands get. inside: the ranks of this island, or an `Axis` of them over a
            registered transport; None: those of torch.distributed, or this process alone where that is not initialized.
            more: as for `fn.Optimizer`, such as lr.
        late: (k, least, most): an island in the middle of its steps is late, once its round has lasted longer than
            the median of its last 20 by k times their median absolute deviation, at least by the second number of
            seconds and at most by the third. It then takes the outer step with the others, who wait; its difference
            counts in the next round. None: it takes all its steps first. Without effect where a schedule has a delay.
    Returns: the optimizer. Outside of exchanges it is alone on its axis, so a checkpoint is that of one rank.
    Raises: ValueError for a method that has no local steps, or has errors of servers; for one of
        several processes that cannot reach the others; from `step` for a manager with an asynchronous quorum or spares,
        for a closure, a GradScaler or `ddp.overlap` in a warm-up, for ranks of one island that took different numbers
        of steps, or an island that was made otherwise than the others. From `step` also what torchft raises where no
        quorum is found: the local step is then taken.
    """
    if tokens is not None and not callable(tokens):
        raise TypeError(expected("tokens", "a function that returns a number", f"{tokens!r}"))
    if not callable(getattr(manager, "register_state_dict_fn", None)):
        raise TypeError(expected("manager", "a torchft Manager", f"{manager!r}"))
    check_late(late)
    make = check_make(make, "fn.diloco")
    ranks = Binding({_INSIDE: _ranks_of(inside)})
    with Binding({**current_binding().axes, axis: _axis(1, 0, ALONE)}):
        opt = Islands(params, partial(make, axis=axis), schedule=schedule, **more)
    check(opt, axis)
    # An exchange with itself, written nowhere: in its first one others would wait while this island loads kernels.
    itself = register("an island by itself", Transport(torch.clone, lambda x: torch.stack([x, x]), torch.clone))
    with torch.no_grad(), Binding({**opt.binding.axes, axis: _axis(2, 0, itself)}):
        stage_exchange(opt, Round(0, 0))
    opt.pace, opt.given, opt.late, opt.row = Pace(device_of(opt)), given_to(opt), late, row_of(device_of(opt))
    opt.manager, opt.islands, opt.ranks, opt.tokens = manager, axis, ranks, tokens
    # What torchft itself sends to an island that is behind says no more than that it is.
    manager.register_state_dict_fn(f"fn.{axis}", opt.fall_behind, dict)
    if not int(ranks.axes[_INSIDE].rank):
        weakref.finalize(opt, _tell, opt.pace)  # at the end of the process, too, also behind an exception
    opt.register_step_pre_hook(lambda _, args, kwargs: opt.before_step([*args[1:], *kwargs.values()]))
    opt.register_step_post_hook(lambda *_: opt.after_step())
    return opt


_INSIDE = "ranks of this island"
"""The name of the axis within an island."""


class _Word(NamedTuple):
    """The message of an island to the others at a quorum, the same on all its ranks.

    speaks: whether it has something to say. tokens: for how many. steps: that it has taken. behind: whether it needs
    the state of another island. joined: whether it was in a quorum before. warm: whether it is in a warm-up step.
    entering: its steps that no exchange has taken yet. pace: its seconds a step. passed, waited, exchanged: see
    `Pace.tell`. row: a number of what it computes with, see `row_of`. line: of the last exchange that it wrote. away:
    see `measure`, on its slowest rank.
    """

    speaks: float
    tokens: float
    steps: float
    behind: float
    joined: float
    warm: float
    entering: float
    pace: float
    passed: float
    waited: float
    exchanged: float
    row: float
    line: float
    away: Sequence[float]


class _OtherRanks(ValueError):
    """Islands have other numbers of ranks."""


class Islands(Optimizer):
    """An optimizer of one rank of an island, made by `optimizer`.

    manager: torchft's. islands: the name of their axis. ranks: the binding of the axis within the island. tokens: since
    the last call. joined: whether it was in a quorum. behind: whether it needs the state of another island, as all do
    at the start. healed: whether the last quorum gave it one. averaged: whether it made the gradients those of a
    warm-up step. unsent: tokens of this rank to count. flying: a mean on its way, and its process group, kept apart
    from `flights`: who reads the states must not write what may still be dropped. greeted: the process group of torch
    whose islands are known to have as many ranks, and `away` of them: see `measure`. pace: when the last local
    steps ended. seconds: a step took, on the slowest rank; 0: not known. entered: the steps that entered the last
    exchange, in the mean over islands. given: the numbers of the param groups at the start. late: as for `optimizer`.
    sent: steps when a difference was taken last; sending: when the one that is on its way was. line: a number of the
    last exchange that was written, alike on all that wrote it; next_line: of the one that is taken. asks: whether a
    quorum was not voted on yet. most: how many islands there were.
    """

    plans = True
    manager: Any
    islands: str
    ranks: Binding
    tokens: Callable[[], float] | None
    joined = healed = averaged = unlike = said_unlike = asks = False
    row: str
    behind = True
    unsent = 0.0
    flying: tuple[Flight, Any, bool] | None = None
    greeted: Any = None
    pace: Pace
    seconds = entered = 0.0
    away: Sequence[float] = ()
    given: dict[str, str]
    late: tuple[float, float, float] | None
    sent = sending = most = 0
    line = next_line = 0.0

    @property
    def goodput(self) -> Goodput:
        """Return what all islands made of their time since this one began."""
        return self.pace.goodput

    def fall_behind(self, saved: Any) -> None:
        """Hear from torchft that others wrote an exchange which this island did not."""
        self.behind = True

    def before_step(self, arguments: Sequence[Any]) -> None:
        """Join the others before the first step, and average the gradients of a warm-up step with them.

        Who is healed there may be in another phase than before, so it comes before the step looks at its phase.

        Args: arguments: of `step`.
        """
        healed = self.averaged = False
        if self.phase is Phase.WARMUP:
            check_warmup(self, arguments)
            self.count()
        while not self.averaged and (not self.joined or self.phase is Phase.WARMUP):
            came = self.take(trained=self.joined and not healed)  # gradients of other params say nothing
            self.joined, healed = self.joined or came, healed or self.healed
            self.pace.began = clock()
        if healed and isinstance(self.schedule, EverySeconds):
            self.schedule.plan(self.steps, entered=self.entered)  # at the pace of the island that it is a copy of
        if healed and not self.averaged:
            self.zero_grad()

    def exchange(self, round_: Round) -> None:
        """Take the exchange of a round among the islands that are there, or drop it."""
        if round_.begin is None:
            self.land(round_)
            return
        self.pace.step()
        self.arrive(trained=True, late=round_.end is None)

    def after_step(self) -> None:
        """Note the end of a local step, and take the outer step with the others where this island is late."""
        if self.now is Phase.WARMUP:  # a step of all islands, which no difference has
            self.sent, self.unsent = self.steps, 0.0
        if self.pace.taken or self.now == Round():  # not behind an exchange, which has begun a round
            self.pace.step()
        pace, steps = self.pace, max(1, self.pace.before // LOOKS)
        has_delay = getattr(self.schedule, "delay", 0) > 0
        if self.late is None or not self.joined or has_delay or len(pace.arrivals) < 3:
            return
        if not pace.taken or pace.taken % steps:  # the same on all ranks of an island, which ask each other
            return
        if any(self.gather(pace.is_late(*self.late))):
            logger.warning("this island is late, and takes the outer step with the others in the middle of its round")
            self.arrive(trained=False)

    def arrive(self, *, trained: bool, late: bool = False) -> None:
        """Take the exchange behind a local step, and begin another round. Args: as for `take`."""
        self.count()
        self.pace.arrive()
        written = self.take(trained=trained, late=late)
        self.pace.begin()
        if isinstance(self.schedule, EverySeconds):  # also where the exchange was dropped
            self.schedule.plan(self.steps, self.seconds, entered=self.entered, sent=written and trained)

    def load_state_dict(self, state_dict: Any) -> None:
        """Load what `state_dict` returned. A mean that is on its way, of what was before, is dropped."""
        super().load_state_dict(state_dict)
        self.flying, self.sent = None, getattr(self.schedule, "begun", self.steps)
        if not hasattr(self.schedule, "begun"):
            while self.sent and getattr(self.schedule(self.sent - 1), "begin", 0) is None:
                self.sent -= 1  # back to where the last exchange began
        self.pace.ends.clear()

    def count(self) -> None:
        """Ask for the tokens of this rank since the last call."""
        counted = 0.0 if self.tokens is None else float(self.tokens())
        if not 0 <= counted < math.inf:
            raise ValueError(expected("tokens", "to return a number of at least 0", f"{counted}"))
        self.unsent += counted

    @torch.no_grad()
    def take(self, *, trained: bool, late: bool = False) -> bool:
        """Take an exchange among those that are there; return whether it was written, or is on its way.

        Args: trained: whether this island has something to say. late: whether the mean is taken over some steps later.
        """
        manager, staged, problem, came, self.healed, self.entered = self.manager, None, None, False, False, 0.0
        group: Any = None
        since = self.pace.ask()
        try:
            self.asks = True
            manager.start_quorum()  # calls `fall_behind`, if this island is
            group = self.group() if manager.errored() is None else None
            if group is not None and group.parent is not self.greeted:
                self.greet(group)
        except _OtherRanks:  # those of this island wait for ranks that the others do not have
            group.abort()
            raise
        except Exception as error:  # told to the other ranks of this island, which would wait for this one
            problem = error
        try:
            word = self.agreed(problem, trained, since)
            if word is not None:
                with self.among(group):
                    staged, late_there = self.stage(group, word)
                came, late = True, late or late_there
            elif group is not None:
                group.abort()
        except Exception as error:
            if group is not None:
                group.abort()  # whoever waits for this island notices
            lost_within = isinstance(error, PeerLost) and error.axis == _INSIDE
            if lost_within or problem is not None or not isinstance(error, RuntimeError):
                raise
            self.drop(error)
        # A rank that votes now while another of its island votes at the end of the round would wait for it in vain.
        told = self.gather([came, late, True])
        while not all(ends for *_, ends in told):  # another rank was in `heal`, which this one has not come to
            told = self.gather([came, late, True])
        all_came, late = all(of_rank for of_rank, *_ in told), any(of_rank for _, of_rank, _ in told)
        if came and not all_came:
            group.abort()
            self.drop(RuntimeError("another rank of this island lost it"))
        if all_came and staged is not None:
            self.sent, self.steps = self.sent + self.sending - self.steps, self.sending
        if not late:
            written = self.voted(staged if all_came else None, trained)
            self.pace.end()
            return written
        self.pace.end()
        if all_came and staged is not None:
            staged.commit()
            self.flying = self.flights.pop(), group, self.unlike
        return all_came or trained or self.voted(None, trained)

    @torch.no_grad()
    def land(self, round_: Round) -> None:
        """Take over a mean that was on its way, or drop it on all ranks of this island."""
        flying, self.flying, staged = self.flying, None, None
        if flying is not None:
            flight, group, unlike = flying
            self.flights.append(flight)
            try:
                flight.wait()
                with self.among(group), agreed_row(unlike):  # as when it began
                    self.meet()
                    staged = stage_exchange(self, round_)
            except RuntimeError as error:
                group.abort()
                self.drop(error)
        if self.asks:  # not where this island joined behind the others' begin, and voted there
            self.voted(staged, trained=True)
        self.flights.clear()

    def drop(self, error: RuntimeError) -> None:
        """Let torchft know that an exchange failed: then this island votes against it."""
        logger.warning("an exchange between islands failed and is dropped: %s", error)
        self.manager.report_error(error)

    def voted(self, staged: Staged | None, trained: bool) -> bool:
        """Let the ranks of this island say that theirs has come, and write it if all have; return whether it was."""
        self.asks = False
        if not self.manager.should_commit():
            self.entered = 0.0
            return False
        if staged is not None:
            staged.commit()
        if staged is not None or not self.joined:
            made = self.pace.count()
            if made.could and not int(self.ranks.axes[_INSIDE].rank):
                text = "exchange %d between islands: goodput %s; since this island began %s"
                logger.info(text, self.manager.current_step(), made, self.goodput)
        self.line = self.next_line
        # Only here: tokens of an exchange that was dropped count in the next one, as where nobody had anything to say.
        if trained and staged is not None:
            self.unsent, self.sent = 0.0, self.sending
        return True

    def group(self) -> Any:
        """Return the process group of this quorum; None where torchft goes on with that of an earlier one.

        Raises: ValueError if it is not of this quorum's islands only.
        """
        manager, group = self.manager, group_of(self.manager)
        try:
            size, is_new = group.size(), group.parent is not self.greeted
        except AssertionError:  # torchft's: this island has left it
            size, is_new = 0, False
        if manager.num_participants() != size and not is_new:
            # A lighthouse that is started again counts quorums from 1, and torchft opens connections only where the
            # number is not that of its last one. A dropped exchange brings a new number.
            manager.report_error(RuntimeError("this quorum has the number of an earlier one"))
            return None
        if not manager.is_participating() or manager.num_participants() != size:
            got = "islands that wait outside of the quorum"
            raise ValueError(expected("manager", "use_async_quorum=False, and no spares", got))
        return group

    def among(self, group: Any) -> Binding:
        """Return the binding of the islands of a quorum."""
        name = register(f"torchft {id(self.manager)}", _transport(group))
        axis = _axis(group.size(), self.manager.participating_rank(), name)
        return Binding({**self.binding.axes, self.islands: axis})

    def greet(self, group: Any) -> None:
        """Compare how many ranks islands have, in a new process group: a rank without a partner would wait for one.

        Then the ways to those that are to be healed are measured, where there is more than one to heal them.

        Raises: ValueError on an island that has other ranks than those that were there before, or than the first.
        """
        size = self.ranks.axes[_INSIDE].size
        with self.among(group):
            try:
                told = self.meet(size, self.joined, self.behind)
                wanted = next((ranks for ranks, joined, _ in told if joined), told[0][0])
                if size != wanted:
                    raise _OtherRanks(expected("island", f"{wanted:.0f} ranks, as the others have", f"{size}"))
                takers = [i for i, (*_, behind) in enumerate(told) if behind]
                sources = [i for i in range(len(told)) if i not in takers]
                rank = self.manager.participating_rank()
                self.away = measure(sources, takers, group, rank, device_of(self))
            except RuntimeError as error:  # an island is lost
                self.manager.report_error(error)
                return
        self.greeted = group.parent

    def meet(self, *numbers: float) -> list[list[float]]:
        """Return the numbers of each island. Raises: RuntimeError where an island was lost, so that nobody writes."""
        mine = torch.tensor(numbers or (0,), dtype=torch.float64, device=device_of(self))
        # (k,) -> (W, k), a row of each island.
        told: list[list[float]] = all_gather(mine, self.islands).tolist()
        return told

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks of this island. Raises: `PeerLost` if one of them is lost."""
        try:
            with self.ranks:
                return gather_values(value, _INSIDE, device_of(self))
        except PeerLost as error:
            error.axis = _INSIDE  # whatever else the group is bound as
            raise

    def agreed(self, problem: Exception | None, trained: bool, since: float) -> _Word | None:
        """Return the message of this island; None if a rank of it is not in the quorum.

        Args: problem: what this rank raises. trained: as for `take`. since: when it began to wait for the others.
        Raises: `problem`; `PeerLost` if another rank of the island raises; ValueError for unequal steps.
        """
        errored = self.manager.errored()
        fault = problem or getattr(errored, "original_exception", errored)  # without its traceback
        text = None if fault is None else f"{type(fault).__name__}: {fault}"
        told = self.gather(
            [self.steps, self.behind, self.unsent, self.pace.seconds(), self.row, self.away,
             self.manager.current_step(), problem is not None, text]
        )  # fmt: skip
        latest = max(row[6] for row in told)
        if latest != self.manager.current_step():
            # torchft tells a rank that meets nobody nothing of how far others are, and would heal its island once more.
            self.manager.load_state_dict({**self.manager.state_dict(), "step": latest})
        if problem is not None:
            raise problem
        self.seconds = max(row[3] for row in told)
        rank, fault_there = next(((r, row[-1]) for r, row in enumerate(told) if row[-1] is not None), (0, None))
        if any(raised for *_, raised, _ in told):
            text = f"rank {rank} of this island left the exchange: {fault_there}"
            raise PeerLost(text, axis=_INSIDE, lost=(rank,))
        if fault_there is not None:
            logger.warning("an exchange between islands is dropped: rank %d of this one: %s", rank, fault_there)
            return None  # torchft knows it from that rank
        if any(row[0] != self.steps for row in told):
            counts = ", ".join(str(row[0]) for row in told)
            raise ValueError(expected("step", "as many steps on all ranks of an island", f"{counts}, by rank"))
        self.behind = any(row[1] for row in told)
        speaks = trained and not self.behind
        warm, entering, spent = self.phase is Phase.WARMUP, self.steps - self.sent, self.pace.tell(since)
        of_steps = 1.0 if warm else entering
        tokens = of_steps if self.tokens is None else sum(row[2] for row in told)
        # The slowest of its ranks decides: all of them are healed from the same island.
        away = [max(of_rank) for of_rank in zip(*(row[5] for row in told), strict=True)]
        said = speaks, tokens, self.steps, self.behind, self.joined, warm, entering, self.seconds, *spent
        return _Word(*said, row_number(*{row[4] for row in told}), self.line, away)

    def stage(self, group: Any, word: _Word) -> tuple[Staged | None, bool]:
        """Take an exchange up to where it is written; None if nobody has anything to say. The islands must be bound.

        Returns: also whether it is taken over some steps later.
        Raises: RuntimeError if communication fails, here or, as far as it can be known, on another island.
        """
        rank = self.manager.participating_rank()
        size = len(word.away)
        words = [_Word._make([*row[:-size], row[-size:]]) for row in self.meet(*word[:-1], *word.away)]
        # A lighthouse that was started again may have let some islands write without the others, and these as often
        # without them. torchft compares counts only, and their anchors would stay apart.
        line = words[source_of(words)].line
        words = [of if of.line == line else of._replace(behind=True, speaks=0.0) for of in words]
        self.next_line, word = row_number(*map(str, words)), words[rank]
        if any(of.behind for of in words):
            self.heal(group, words, rank)
        current = [of for of in words if of.joined and not of.behind]
        self.most = max(self.most, len(words))
        self.pace.of_round = goodput_of(words, self.most)
        # Also where one was healed behind its local step: it has no gradients for the others' step, and takes the next.
        if any(of.warm for of in current) and not all(of.warm for of in words if of.joined):
            raise RuntimeError("some islands are in their warm-up, and others are not")
        self.unlike = self.are_unlike(words)
        tokens = [of.speaks * of.tokens for of in words]
        weights = tokens if any(tokens) else [of.speaks for of in words]
        if current and current[0].warm:
            staged, late = self.average(weight_of(weights, rank) if weights[rank] else 0.0), False
            self.sending = self.steps
        elif any(of.speaks for of in words):
            round_: Any = Round(0, 0)
            steps = self.steps
            if isinstance(self.schedule, EverySeconds):
                self.entered = sum(of.speaks * of.entering for of in words) / max(1, len(current))
            else:
                # An island that missed a quorum may have taken fewer steps, and goes on from where the others are.
                latest = int(max(of.steps for of in words if of.speaks))
                self.steps = latest - 1  # the schedule is asked for the step that they have taken
                round_, self.steps = self.next_phase, latest
            try:
                with agreed_row(self.unlike):
                    staged, late = stage_exchange(self, round_, weight_of(weights, rank)), round_.end is None
            finally:  # `take` moves on where all ranks of this island have the exchange: one that lost it stays here
                self.sending, self.steps = self.steps, steps
            if word.joined and not (word.behind or word.speaks):
                staged = self.going_on(staged)
        else:
            return None, False
        if not late:
            self.meet()
        return staged, late

    def are_unlike(self, words: Sequence[_Word]) -> bool:
        """Return whether islands compute with other kernels, and say so once.

        Raises: ValueError in a warm-up, whose steps each island would take with its own.
        """
        unlike = len({of.row for of in words}) > 1
        if unlike and any(of.warm for of in words):
            wanted, got = "rounds from the first step on", "a warm-up, in which islands with other kernels would part"
            raise ValueError(expected("schedule", wanted, got, "leave `start` out, as in fn.every(100)"))
        if unlike and not self.said_unlike:
            self.said_unlike = True
            logger.warning(
                "islands compute with other kernels, versions of torch or processors (this one: %s); exchanges take "
                "plain arithmetic that is alike on all of them", self.row,
            )  # fmt: skip
        return unlike

    def going_on(self, staged: Staged) -> Staged:
        """Return an exchange behind which the params are as far from the new anchor as they are from this one."""
        pairs = [
            pair
            for unit in self.units
            for pair in zip(tree.leaves(unit.params), tree.leaves(roles.find(unit.state, "copies")[0]), strict=True)
        ]
        apart = [p.detach() - anchor for p, anchor in pairs]

        def commit() -> None:
            staged.commit()
            with self.writing():
                for (p, anchor), x in zip(pairs, apart, strict=True):
                    p.copy_(anchor + x)
            record_versions(self)

        return Staged(True, commit)

    def average(self, weight: float) -> Staged:
        """Average the gradients of a warm-up step, up to where they are written; one that is missing counts as zero.

        Args: weight: of this island's. 0: it has none of these params.
        """
        params = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        for p in params:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad  # or it would rest here, and move elsewhere
        grads = pieces([p.grad for p in params])
        means = list[tuple[Tensor, Tensor]]()
        # Sorted: a set has another order in each process, and islands would add messages of different dtypes up.
        for kind in sorted({(g.dtype, g.device) for g in grads}, key=str):
            alike = [g for g in grads if (g.dtype, g.device) == kind]
            # (...) each -> (n,)
            message = torch.cat([g.reshape(-1) for g in alike])
            # Zeros, and not 0 times the gradients: where these are NaN so would the mean of all islands be.
            mean = mean_in_place(message.mul_(weight) if weight else torch.zeros_like(message), self.islands)
            means += zip(alike, mean.split([g.numel() for g in alike]), strict=True)

        def commit() -> None:
            for g, mean in means:
                # (n_i,) -> the gradient's shape.
                g.copy_(mean.view(g.shape))
            self.averaged = True

        return Staged(True, commit)

    def heal(self, group: Any, words: list[_Word], rank: int) -> None:
        """Let the islands that are behind become copies of one that is not. All islands of a quorum call it.

        Raises: as `stage`; ValueError on an island that was made otherwise.
        """
        behind, source = [i for i, of in enumerate(words) if of.behind], source_of(words)
        failure, state, takers = None, state_of(self), list[int]()
        try:
            takers = takers_of(self, made_of(self, self.given), self.islands, source, behind, rank)
            state = hand_over(state, group, rank, source, takers, device_of(self))
        except RuntimeError as error:
            failure = error
        if rank in behind and rank != source:  # all of its ranks become copies, or none does
            told = self.gather([failure is None, rank in takers, False])
            if failure is None and not all(came for came, *_ in told):
                failure = RuntimeError("another rank of this island did not get the state")
            if failure is None and any(needed for _, needed, _ in told):
                become(self, state)
                self.healed, self.unsent, self.sent = True, 0.0, self.steps
        if failure is not None:
            raise failure
        self.behind, self.line = False, words[source].line


def source_of(words: Sequence[_Word]) -> int:
    """Return the island whose state others get, alike on all: of those with the most steps the nearest."""
    behind = [i for i, of in enumerate(words) if of.behind]
    current = [i for i in range(len(words)) if i not in behind] or behind
    steps = max(words[i].steps for i in current)
    return nearest([of.away for of in words], [i for i in current if words[i].steps == steps], behind)


def _tell(pace: Pace) -> None:
    """Say what the islands made of their time: the last line of an island's log, which it has without settings."""
    if pace.goodput.could:
        logger.warning("this island ends; goodput of all islands since it began: %s", pace.goodput)


def row_of(device: torch.device) -> str:
    """Return what a machine computes with: what decides about the last bit of a sum, as far as one can ask."""
    if device.type == "cpu":
        name = torch.backends.cpu.get_cpu_capability()
    else:
        name = torch.get_device_module(device).get_device_name(device)
    kernels = ", ".join(row.name for row in rows(device.type))
    return f"torch {torch.__version__} on {platform.machine()}, {device.type} {name}, kernels of {kernels}"


def row_number(*texts: str) -> float:
    """Return a number for texts that a message of float64 carries as it is."""
    return float(int.from_bytes(hashlib.blake2b(repr(sorted(texts)).encode(), digest_size=6).digest(), "big"))


def weight_of(tokens: Sequence[float], rank: int) -> float:
    """Return the weight of a rank's difference: its tokens over the mean of all ranks' tokens.

    The mean of what the ranks send is then weighed by tokens. It is the plain mean where nobody has any.
    """
    total = sum(tokens)
    return len(tokens) * tokens[rank] / total if total else 1.0


def _axis(size: int, rank: int, transport: str) -> Axis:
    return Axis(size, torch.tensor(rank, dtype=torch.int64, device="cpu"), transport)


@singledispatch
def group_of(manager: Any) -> Any:
    """Return the process group of torchft's manager; for what stands for one, register what returns its group."""
    from torchft.process_group import ManagedProcessGroup

    return ManagedProcessGroup(manager).parent


def _transport(group: Any) -> Transport:
    """Return the exchanges of a process group of torchft, which torch.distributed does not know."""
    size = group.size()

    def all_to_all(x: Tensor) -> Tensor:
        received = torch.empty_like(x)
        group.alltoall_base(received, x, [], [], AllToAllOptions()).wait()
        return received

    def gather(x: Tensor) -> Tensor:
        # (...) -> (W, ...); torchft writes into the W views of it.
        rows = x.new_empty((size, *x.shape))
        group.allgather([list(rows.unbind())], [x], AllgatherOptions()).wait()
        return rows

    def psum(x: Tensor) -> Tensor:
        group.allreduce([x], AllreduceOptions()).wait()
        return x

    return Transport(all_to_all, gather, psum, own_thread=True)


def _ranks_of(inside: dist.ProcessGroup | Axis | None) -> Axis:
    """Return the ranks of this island as an axis. Raises: ValueError if there are others that are not reached."""
    if isinstance(inside, Axis):
        return inside
    if inside is None and dist.is_initialized():
        inside = dist.group.WORLD
    if inside is not None:
        return bind({_INSIDE: inside}).axes[_INSIDE]
    if ranks_around() > 1:
        got = f"one of {ranks_around()} processes without it"
        cure = "call torch.distributed.init_process_group first"
        raise ValueError(expected("inside", "the process group of this island's ranks", got, cure))
    return _axis(1, 0, ALONE)
