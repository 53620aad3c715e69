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

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions  # type: ignore[attr-defined]

from fn import tree
from fn.adapters.optim.consistency import device_among
from fn.adapters.optim.exchange import stage_exchange, weight_of
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.torchft.handing_over import become, hand_over, state_of, takers_of
from fn.base import Phase, Round, Transform
from fn.collectives.agreement import gather_values
from fn.collectives.axis import ALONE, Axis, Binding, bind, current_binding, ranks_around
from fn.collectives.compressed import ErrorFeedbackState
from fn.collectives.primitives import all_gather, mean_in_place
from fn.collectives.transports.registry import Transport, register
from fn.errors import PeerLost, RanksDisagree, expected
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
    inside: dist.ProcessGroup | None = None,
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

    An island that is behind is healed: it gets the whole state of another, with the moments of the inner optimizer,
    the learning rate and the step. Its params become the anchor, its errors zero, and gradients from before its first
    step are dropped. All its ranks are healed from the same island, or none is. In the first quorum all become copies
    of the first, where they do not start alike. What else a model or a run has, such as buffers or a scheduler, is
    healed by `manager.register_state_dict_fn`.

    Args:
        params: as for `fn.Optimizer`. make: a method of local steps, called with `axis` besides; with codes and
            servers=False, since errors must not depend on the number of islands.
        manager: torchft's Manager with use_async_quorum=False. Its quorum's time-out has to be longer than a round,
            as in torchft's own DiLoCo, and the lighthouse's join time-out longer than islands are apart.
        schedule: alike on all islands: `fn.every(h)`. In a warm-up every step waits for a quorum, and its gradients are
            averaged over the islands that are there. With a delay a mean travels while local steps go on.
        tokens: () -> how many tokens this rank has trained on since the last call; called once per exchange. A
            difference then counts by its island's tokens; those of a dropped exchange count in the next. None: all
            islands count alike.
        axis: the name that the islands get. inside: the ranks of this island; None: those of torch.distributed, or
            this process alone where that is not initialized. more: as for `fn.Optimizer`, such as lr.
    Returns: the optimizer. Outside of exchanges it is alone on its axis, so a checkpoint is that of one rank.
    Raises: ValueError for a method that has no local steps, or has errors of servers; for one of
        several processes that cannot reach the others; from `step` for a manager with an asynchronous quorum or spares,
        for a closure, a GradScaler or `ddp.overlap` in a warm-up, for ranks of one island that took different numbers
        of steps, or an island that was made otherwise than the others. From `step` also what torchft raises where no
        quorum is found: the local step is then taken.
    """
    if tokens is not None and not callable(tokens):
        raise TypeError(expected("tokens", "a function that returns a number", f"{tokens!r}"))
    alone = Axis(1, torch.tensor(0, dtype=torch.int64, device="cpu"), ALONE)
    ranks = Binding({_INSIDE: _ranks_of(inside, alone)})
    with Binding({**current_binding().axes, axis: alone}):
        opt = Optimizer(params, partial(make, axis=axis), schedule=schedule, **more)
    _check_method(opt)
    _check_schedule(opt)
    islands = _Islands(opt, manager, axis, ranks, tokens)
    # What torchft itself sends to an island that is behind says no more than that it is.
    manager.register_state_dict_fn(f"fn.{axis}", islands.fall_behind, dict)
    opt.training.meet = islands.meet
    opt.register_step_pre_hook(islands.before_step)
    return opt


_INSIDE = "ranks of this island"
"""The name of the axis within an island."""


class _Word(NamedTuple):
    """What an island says to the others at a quorum, the same on all its ranks.

    speaks: whether it has something to say. tokens: for how many. steps: that it has taken. behind: whether it needs
    the state of another island. joined: whether it was in a quorum before. warm: whether it is in a warm-up step.
    """

    speaks: float
    tokens: float
    steps: float
    behind: float
    joined: float
    warm: float


@dataclass
class _Flight:
    """A mean on its way. before: what it replaced in the state, with what that was. failure: why it did not come."""

    group: Any
    binding: Binding
    before: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    failure: RuntimeError | None = None


class _OtherRanks(ValueError):
    """Islands have other numbers of ranks."""


class _Islands:
    """What an island remembers between exchanges.

    ranks: the binding of the axis within the island. joined: whether it was in a quorum. behind: whether it needs the
    state of another island, as all do at the start. healed: whether the last quorum gave it one. averaged: whether it
    made the gradients those of a warm-up step. unsent: tokens of this rank to count. flight: of a mean on its way.
    greeted: the process group of torch whose islands are known to have as many ranks.
    """

    def __init__(
        self, optimizer: Optimizer, manager: Any, axis: str, ranks: Binding, tokens: Callable[[], float] | None
    ):
        self.optimizer, self.manager, self.axis, self.ranks, self.tokens = optimizer, manager, axis, ranks, tokens
        self.joined, self.behind, self.healed, self.averaged, self.unsent = False, True, False, False, 0.0
        self.flight: _Flight | None = None
        self.greeted: Any = None

    @property
    def device(self) -> torch.device:
        """Where messages are."""
        return device_among(self.optimizer.training.groups)

    def fall_behind(self, saved: Any) -> None:
        """Hear from torchft that others wrote an exchange which this island did not."""
        self.behind = True

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Join the others before the first step, and average the gradients of a warm-up step with them."""
        healed, self.averaged = False, False
        if self.is_warm():
            _check_warmup(self.optimizer, [*args[1:], *kwargs.values()])
            self.count()
        while not self.averaged and (not self.joined or self.is_warm()):
            came = self.take(trained=self.joined and not healed)  # gradients of other params say nothing
            self.joined, healed = self.joined or came, healed or self.healed
        if healed and not self.averaged:
            self.optimizer.zero_grad()

    def is_warm(self) -> bool:
        """Return whether the next step is one of a warm-up."""
        return self.optimizer.phase is Phase.WARMUP

    def count(self) -> None:
        """Ask for the tokens of this rank since the last call."""
        counted = 1.0 if self.tokens is None else float(self.tokens())
        if not 0 <= counted < math.inf:
            raise ValueError(expected("tokens", "to return a number of at least 0", f"{counted}"))
        self.unsent = 1.0 if self.tokens is None else self.unsent + counted

    def meet(self, round_: Round) -> None:
        """Take the exchange of a round, or drop it."""
        if round_.begin is not None:
            self.count()
            self.take(trained=True, late=round_.end is None)
        if round_.end is not None and round_.end != round_.begin:
            self.land(round_)

    @torch.no_grad()
    def take(self, *, trained: bool, late: bool = False) -> bool:
        """Take an exchange among those that are there; return whether it was written, or is on its way.

        Args: trained: whether this island has something to say. late: whether the mean is taken over some steps later.
        """
        manager, staged, problem, self.healed = self.manager, None, None, False
        group: Any = None
        try:
            manager.start_quorum()  # calls `fall_behind`, if this island is
            group = self.group() if manager.errored() is None else None
            if group is not None and group.parent is not self.greeted:
                self.greet(group)
        except _OtherRanks:  # those of this island wait for ranks that the others do not have
            group.abort()
            raise
        except Exception as error:  # told to the other ranks of this island, which would wait for this one
            problem = error
        came = False
        try:
            word = self.agreed(problem, trained)
            if word is not None:
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
            logger.warning("an exchange between islands failed and is dropped: %s", error)
            manager.report_error(error)
        if trained and not late:
            # Nothing is written before all islands say that theirs succeeded: one that wrote alone would move its
            # anchor.
            return self.voted(staged, trained)
        # A rank that votes now while another of its island votes at the end of the round would wait for it in vain.
        told = self.within([came, late])
        all_came = all(of_rank for of_rank, _ in told)
        if came and not all_came:
            manager.report_error(RuntimeError("another rank of this island lost the exchange"))
            group.abort()
        if late and (all_came or trained):
            self.flight = None
            if all_came and staged is not None:
                staged.commit()
                self.flight = self.note_changes(group, self.binding)
            return True
        return self.voted(staged if all_came else None, trained)

    def voted(self, staged: Staged | None, trained: bool) -> bool:
        """Let the ranks of this island say that theirs has come, and write it if all have; return whether it was."""
        if not self.manager.should_commit():
            return False
        if staged is not None:
            staged.commit()
        self.unsent = 0.0 if trained else self.unsent
        return True

    def note_changes(self, group: Any, binding: Binding) -> _Flight:
        """Let whoever waits for the mean note what it replaces, and why it does not come: it may still be dropped."""
        training, flight = self.optimizer.training, _Flight(group, binding)
        (sent,) = training.sending
        wait = sent.wait

        def states() -> Any:
            try:
                after = wait()
            except RuntimeError as error:
                flight.failure = error
                return training.states
            pairs = zip(tree.leaves(training.states), tree.leaves(after), strict=True)
            flight.before = [(x, x.clone()) for x, new in pairs if new is not x]
            return after

        sent.wait = states
        return flight

    @torch.no_grad()
    def land(self, round_: Round) -> None:
        """Take over a mean that was on its way, or drop it on all ranks of this island."""
        training, flight, staged = self.optimizer.training, self.flight, None
        self.flight = None
        if flight is not None:
            try:
                training.settle()
                if flight.failure is not None:
                    raise flight.failure
                with flight.binding:  # raises, so that nobody writes, where an island was lost meanwhile
                    all_gather(torch.zeros(1, dtype=torch.int64, device=self.device), self.axis)
                staged = stage_exchange(training, round_._replace(begin=None))
            except RuntimeError as error:
                flight.group.abort()
                logger.warning("an exchange between islands failed and is dropped: %s", error)
                self.manager.report_error(error)
        if not self.voted(staged, trained=True) and flight is not None:
            for x, before in flight.before:
                x.copy_(before)

    def group(self) -> Any:
        """Return the process group of this quorum. Raises: ValueError if it is not of this quorum's islands only."""
        from torchft.process_group import ManagedProcessGroup

        manager, group = self.manager, ManagedProcessGroup(self.manager).parent
        if not manager.is_participating() or manager.num_participants() != group.size():
            got = "islands that wait outside of the quorum"
            raise ValueError(expected("manager", "use_async_quorum=False, and no spares", got))
        return group

    def greet(self, group: Any) -> None:
        """Compare how many ranks islands have, in a new process group: a rank without a partner would wait for one.

        Raises: ValueError on an island that has other ranks than those that were there before, or than the first.
        """
        size = self.ranks.axes[_INSIDE].size
        with self.among(group):
            mine = torch.tensor([size, self.joined], dtype=torch.int64, device=self.device)
            try:
                told = all_gather(mine, self.axis).tolist()
            except RuntimeError as error:  # an island is lost
                self.manager.report_error(error)
                return
        wanted = next((ranks for ranks, joined in told if joined), told[0][0])
        if size != wanted:
            raise _OtherRanks(expected("island", f"{wanted} ranks, as the others have", f"{size}"))
        self.greeted = group.parent

    def among(self, group: Any) -> Binding:
        """Return the binding of the islands of a quorum."""
        size, rank = group.size(), torch.tensor(self.manager.participating_rank(), dtype=torch.int64, device="cpu")
        name = register(f"torchft {id(self.manager)}", _transport(group, size))
        return Binding({**self.optimizer.training.binding.axes, self.axis: Axis(size, rank, name)})

    def within(self, value: Any) -> list[Any]:
        """Return the values of all ranks of this island. Raises: `PeerLost` if one of them is lost."""
        try:
            with self.ranks:
                return gather_values(value, _INSIDE, self.device)
        except PeerLost as error:
            error.axis = _INSIDE  # whatever else the group is bound as
            raise

    def agreed(self, problem: Exception | None, trained: bool) -> _Word | None:
        """Return what this island says; None if a rank of it is not in the quorum.

        Args: problem: what this rank raises. trained: as for `take`.
        Raises: `problem`; `PeerLost` if another rank of the island raises; ValueError for unequal steps.
        """
        errored = self.manager.errored()
        fault = problem or getattr(errored, "original_exception", errored)  # without its traceback
        text = None if fault is None else f"{type(fault).__name__}: {fault}"
        steps = self.optimizer.steps
        told = self.within([steps, int(self.behind), self.unsent, int(problem is not None), text])
        if problem is not None:
            raise problem
        rank, fault_there = next(((r, row[4]) for r, row in enumerate(told) if row[4] is not None), (0, None))
        if any(raised for *_, raised, _ in told):
            text = f"rank {rank} of this island left the exchange: {fault_there}"
            raise PeerLost(text, axis=_INSIDE, lost=(rank,))
        if fault_there is not None:
            logger.warning("an exchange between islands is dropped: rank %d of this one: %s", rank, fault_there)
            return None  # torchft knows it from that rank
        if any(row[0] != steps for row in told):
            counts = ", ".join(str(row[0]) for row in told)
            raise ValueError(expected("step", "as many steps on all ranks of an island", f"{counts}, by rank"))
        self.behind = any(row[1] for row in told)
        speaks, tokens = trained and not self.behind, sum(row[2] for row in told)
        return _Word(speaks, tokens, steps, self.behind, self.joined, self.is_warm())

    def stage(self, group: Any, word: _Word) -> tuple[Staged | None, bool]:
        """Take an exchange up to where it is written; None if nobody has anything to say.

        Returns: also whether it is taken over some steps later.
        Raises: RuntimeError if communication fails, here or, as far as it can be known, on another island.
        """
        training, rank = self.optimizer.training, self.manager.participating_rank()
        self.binding = self.among(group)
        with self.binding:
            mine = torch.tensor(word, dtype=torch.float64, device=self.device)
            words = [_Word(*row) for row in all_gather(mine, self.axis).tolist()]
            if any(of.behind for of in words):
                self.heal(group, words, rank)
            current = [of for of in words if of.joined and not of.behind]
            if len({of.warm for of in current}) > 1:
                raise RuntimeError("some islands are in their warm-up, and others are not")
            tokens = [of.speaks * of.tokens for of in words]
            weights = tokens if any(tokens) else [of.speaks for of in words]
            if current and current[0].warm:
                staged, late = self.average(weights, rank), False
            elif any(of.speaks for of in words):
                # An island that missed a quorum may have taken fewer steps, and goes on from where the others are.
                latest = int(max(of.steps for of in words if of.speaks))
                training.steps = latest - 1  # the schedule is asked for the step that they have taken
                round_, training.steps = training.phase, latest
                assert isinstance(round_, Round)
                staged, late = stage_exchange(training, round_, weight_of(weights, rank)), round_.end is None
            else:
                return None, False
            if not late:
                all_gather(mine, self.axis)  # raises, so that nobody writes, where an island was lost meanwhile
        return staged, late

    def average(self, weights: list[float], rank: int) -> Staged:
        """Average the gradients of a warm-up step, up to where they are written. Islands of weight 0 have none.

        Raises: `RanksDisagree` if some islands have a gradient where others have none.
        """
        training = self.optimizer.training
        training.shards.take_gradients()
        params = [p for group in training.params for p in group]
        here = torch.tensor([p.grad is not None for p in params], dtype=torch.uint8, device=self.device)
        for other, row in enumerate(all_gather(here, self.axis).tolist()):
            for i, (theirs, ours) in enumerate(zip(row, here.tolist(), strict=True)):
                if theirs != ours:
                    text = f"parameter {i} has a gradient on some islands only; in a warm-up all have the same ones"
                    raise RanksDisagree(text, rank=other, field=f"gradient of parameter {i}")
        grads = [p.grad for p in params if p.grad is not None] if any(weights) else []
        kinds = {(g.dtype, g.device) for g in grads}
        means = list[tuple[Tensor, Tensor]]()
        for kind in sorted(kinds, key=str):
            alike = [g for g in grads if (g.dtype, g.device) == kind]
            message = torch.cat([g.reshape(-1) for g in alike])
            message = message.mul_(weight_of(weights, rank)) if weights[rank] else torch.zeros_like(message)
            mean = mean_in_place(message, self.axis)
            means += zip(alike, mean.split([g.numel() for g in alike]), strict=True)

        def commit() -> None:
            for g, mean in means:
                g.copy_(mean.view(g.shape))
            if not any(weights):  # nobody has gradients of these params
                self.optimizer.zero_grad()
            self.averaged = True

        return Staged(True, commit)

    def heal(self, group: Any, words: list[_Word], rank: int) -> None:
        """Let the islands that are behind become copies of one that is not. All islands of a quorum call it.

        Raises: as `stage`; ValueError on an island that was made otherwise.
        """
        behind = [i for i, of in enumerate(words) if of.behind]
        current = [i for i in range(len(words)) if i not in behind] or behind
        source = max(current, key=lambda i: (words[i].steps, -i))
        optimizer = self.optimizer
        failure, state, takers = None, state_of(optimizer), list[int]()
        try:
            takers = takers_of(optimizer, self.axis, source, behind, rank)
            state = hand_over(state, group, rank, source, takers, self.device)
        except RuntimeError as error:
            failure = error
        if rank in behind and rank != source:  # all of its ranks become copies, or none does
            told = self.within([failure is None, rank in takers])
            if failure is None and not all(came for came, _ in told):
                failure = RuntimeError("another rank of this island did not get the state")
            if failure is None and any(needed for _, needed in told):
                become(optimizer, state)
                self.healed, self.unsent = True, 0.0
        if failure is not None:
            raise failure
        self.behind = False


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

    return Transport(all_to_all, gather, psum, own_thread=True)


def _ranks_of(inside: dist.ProcessGroup | None, alone: Axis) -> Axis:
    """Return the ranks of this island as an axis. Raises: ValueError if there are others that are not reached."""
    if inside is None and dist.is_initialized():
        inside = dist.group.WORLD
    if inside is not None:
        return bind({_INSIDE: inside}).axes[_INSIDE]
    if ranks_around() > 1:
        got = f"one of {ranks_around()} processes without it"
        cure = "call torch.distributed.init_process_group first"
        raise ValueError(expected("inside", "the process group of this island's ranks", got, cure))
    return alone


def _check_warmup(optimizer: Optimizer, arguments: Sequence[Any]) -> None:
    """Refuse a warm-up step whose gradients are not there yet, or not the ones that are averaged.

    Args: arguments: of `step`. Raises: ValueError with the cure.
    """
    found = {
        "a closure": any(x is not None for x in arguments),
        "torch.amp.GradScaler": getattr(optimizer, "grad_scale", None) is not None,
        "fn.adapters.ddp.overlap": optimizer.training.ahead is not None,
    }
    for got in (name for name, there in found.items() if there):
        wanted = "gradients in p.grad, which islands average before each step of a warm-up"
        raise ValueError(expected("step", wanted, got, "leave it out, or use a schedule without a warm-up"))


def _check_schedule(optimizer: Optimizer) -> None:
    schedule = optimizer.schedule
    if isinstance(schedule, Every) and schedule.delay >= schedule.h // schedule.fragments:
        wanted = "one mean on its way at a time between islands"
        got = f"fn.every.delay={schedule.delay}, h={schedule.h}, fragments={schedule.fragments}"
        raise ValueError(expected("schedule", wanted, got, "use a delay below h / fragments"))


def _check_method(optimizer: Optimizer) -> None:
    for params, state in zip(optimizer.training.params, optimizer.training.states, strict=True):
        shapes = [[x.shape for x in tree.leaves(outer.anchor)] for outer in tree.instances(state, OuterState)]
        if shapes != [[p.shape for p in params]]:
            wanted = "fn.outer around all parameters of a group, such as fn.diloco"
            raise ValueError(expected("make", wanted, f"{len(shapes)} anchors that are not like them"))
        across = tree.replace(state, OuterState, lambda outer: outer._replace(inner=()))  # what is sent to islands
        if tree.leaves([errors.server for errors in tree.instances(across, ErrorFeedbackState)]):
            cure = "give it servers=False: without them errors do not depend on the number of islands"
            raise ValueError(expected("make", "a method without errors of servers", "one with them", cure))
