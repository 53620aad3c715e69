"""The exchange of a round, behind its local step, which is written already.

    Round(begin=f, end=f)    difference, mean and outer step of fragment f at once, written together
    Round(begin=f)           difference now; the mean is on its way while local steps go on
    Round(end=f)             the outer step of fragment f, with the mean that has come

A difference is that of a rank's params to the anchor, a pseudo-gradient; the outer step moves the anchor by the mean of
all ranks' differences. A mean that travels while the training goes on does so on a thread of a CPU, or on a stream of
an accelerator (`in_background`). It is no part of the state: whoever reads the states waits for it first, with
`Training.settle`. Several may be on their way, and arrive in the order in which they began.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from fn import tree
from fn.adapters.optim.consistency import LOCAL_STEP_TAKEN, check_islands, device_among
from fn.adapters.optim.gradients import shared_in_doubt
from fn.adapters.optim.signals import if_broken, writing
from fn.adapters.optim.step import checked
from fn.adapters.optim.training import Sent, Training
from fn.base import NewParams, Part, Phase, Round
from fn.collectives.axis import ALONE, Axis, Binding, axis_size, current_binding
from fn.collectives.comm_thread import CommunicationThread, bind_twin
from fn.collectives.primitives import all_gather, group_of, psum
from fn.collectives.profiling import Watchers, watched_by
from fn.collectives.transports.failure_detection import abort_connections, raising_peer_lost
from fn.collectives.transports.registry import has_own_thread, registered
from fn.errors import RanksDisagree, expected
from fn.inplace.memory import among, copy_into, written_into
from fn.inplace.protocol import Staged
from fn.kernels import flags
from fn.roles import has_local_params
from fn.transforms.norm_guard import GuardState
from fn.transforms.outer import OuterState, lane_of

Tree = Any
Params = tuple[list[Tensor], ...]
"""Tensors of each param group."""


def exchange(training: Training, round_: Round) -> None:
    """Take the exchange of a round. The axes must be bound.

    Raises: what communication raises; ValueError from the first one if something averaged the gradients;
        `RanksDisagree` on all ranks if it is of another fragment or step on one of them, where a mean travels meanwhile
        from `settle`. Params and states are then those after the local step, and the exchange is left out, on this rank
        at least.
    """
    if training.meet is not None:
        training.meet(round_)
        return
    if round_.begin is not None and Phase.COMPRESSED in training.doubts:
        check_islands(training.inside, training.groups)
        training.doubts = shared_in_doubt(training.doubts, training.params, training.outside)
    stage_exchange(training, round_).commit()


def stage_exchange(training: Training, round_: Round, weight: float = 1.0) -> Staged:
    """Take the exchange of a round up to where it is written.

    Args: weight: what this rank's difference is multiplied by before it is sent, see `weight_of`.
    Raises: as `exchange`.
    """
    _settle(training, round_)
    update = training.joined()
    params = tuple([p.detach() for p in group] for group in training.params)
    nothing = _filled(params, 0.0)

    def run(part: Part, states: Tree, before: Params) -> tuple[Tree, Params]:
        """Return the states and the params after a part."""
        moves, states = checked(update.composed(part))(nothing, states, before)
        return states, _moved(before, moves, nothing)

    states, after, parts = training.states, params, {part.kind: part for part in round_.exchange}
    heard = Heard((), lambda: None)
    departed: Sent | None = None
    if "mean" in parts:
        states, after = run(parts["difference"], states, after)
        states = _weighed(training.states, states, weight)
        fragment, average = parts["mean"].fragment, partial(run, parts["mean"])
        if round_.end == round_.begin:
            with _heard_if_broken(training):
                heard = _announce(training, fragment, training.steps)
                if not (heard.on_device and _is_whole(states)):
                    heard.compare()
                states, after = average(states, after)  # the differences are freed behind it
        else:
            departed = _send(training, fragment, average, states, params)
            states = training.states  # the differences are kept when the mean has come, not before

    if "outer" in parts:
        with flags.assumed() as assumed:
            taken = run(parts["outer"], states, after)
        if not flags.all_of([*assumed, *heard.on_device]):  # the one wait for all of them
            heard.compare()  # nothing was written yet; nor is it sent in this part, so a rank may take it again alone
            taken = run(parts["outer"], states, after)
        states, after = taken

    def commit() -> None:
        triples = zip(*map(tree.leaves, (tuple(training.params), params, after)), strict=True)
        lies_in_old = among([*tree.leaves(training.states), *tree.leaves(params)])  # which is written first
        changed = [(p, x.clone() if lies_in_old(x) else x) for p, old, x in triples if x is not old]
        write_states = written_into(training.states, states)
        with writing(training):
            write_states()
            copy_into(*([pair[side] for pair in changed] for side in (0, 1)))
        if departed is not None:
            training.sending.append(departed)

    return Staged(True, commit)


def _send(
    training: Training, fragment: int, average: Callable[..., tuple[Tree, Params]], differences: Tree, params: Params
) -> Sent:
    """Begin a mean that travels while local steps go on. Args: average: (states, params) -> both behind the mean.

    Local steps write the params meanwhile, so it is shown none: what it read would depend on the time, and params that
    it returned would undo those steps.
    """
    unknown, steps = _filled(params, torch.nan), training.steps  # of now, since it is sent later
    sent, before = Sent(fragment, lambda: None, os.getpid()), _Before(training.states, differences, [*training.sending])

    def mean() -> tuple[Tree, Callable[[], None]]:
        with _heard_if_broken(training):  # in this thread, on an accelerator; others hear no signals
            given = before.given()
            compare = _announce(training, fragment, steps).compare
            if device_among(training.groups).type == "cpu":
                compare()  # on an accelerator the training would wait here for the other ranks
            averaged, new = average(given, unknown)
        _check_unmoved(unknown, new)
        averaged, sent.changed = before.taken(averaged)
        return averaged, compare

    wait = in_background(training, mean)

    def take_over() -> Tree:
        averaged, compare = wait()
        compare()
        return averaged

    sent.wait = take_over
    return sent


class Heard(NamedTuple):
    """What all ranks said of the exchange that follows.

    on_device: whether they said the same, a 0-d flag of an accelerator that nobody has waited for; () on a CPU and on
    one rank. compare: wait for them, and raise `RanksDisagree`, on all ranks alike, if they did not.
    """

    on_device: tuple[Tensor, ...]
    compare: Callable[[], None]


def _is_whole(states: Tree) -> bool:
    """Return whether exchanges are always of all params, so that messages fit each other whatever was announced."""
    outers = tree.instances(states, OuterState)
    return bool(outers) and all(len(state.sync) == 1 for state in outers)


def _settle(training: Training, round_: Round) -> None:
    """Wait for the means that have to be there before a round's exchange: that which ends, and those before it.

    Means that are on their way at once need a state of which it is known what they read: that of `fn.outer`. For others
    all are waited for.
    """
    local = [x for x in tree.instances(training.states, tuple) if hasattr(x, "_fields") and has_local_params(x)]
    overlap = all(isinstance(x, OuterState | GuardState) for x in local)
    if overlap and all(sent.exchange != round_.begin for sent in training.sending):
        if round_.end is not None:
            training.settle(round_.end)
        return
    training.settle()


class _Before:
    """The states that a mean is made from while others are on their way, or are taken over meanwhile.

    It is given what those before it have changed, which is not written yet: residual errors are handed on from mean to
    mean. Outer steps move anchors meanwhile, so it is given copies where several exchanges of a fragment overlap.
    """

    def __init__(self, live: Tree, differences: Tree, earlier: list[Sent]):
        self.live, (self.noted, self.structure) = tree.leaves(live), tree.flatten(differences)
        self.earlier, self.swapped = earlier, dict[int, Tensor]()
        places = {id(x): place for place, x in enumerate(self.noted)}
        for old, new in zip(tree.instances(live, OuterState), tree.instances(differences, OuterState), strict=True):
            for lane in range(1 + len(new.more)) if new.more else ():
                noted = zip(*(tree.leaves(lane_of(state, lane)[0]) for state in (old, new)), strict=True)
                for x, (before, after) in zip(tree.leaves(new.anchor), noted, strict=True):
                    if after is not before:
                        self.swapped[places[id(x)]] = x.clone()

    def given(self) -> Tree:
        """Return the states that the mean is to be made from. Those before it have come, or failed."""
        for sent in self.earlier:
            if sent.changed is None:
                raise RuntimeError("an exchange before this one failed, so this one is left out")
            own = [place for place in sent.changed if self.noted[place] is self.live[place]]
            self.swapped.update((place, sent.changed[place]) for place in own)
        self.earlier = []
        return tree.unflatten(self.structure, [self.swapped.get(place, x) for place, x in enumerate(self.noted)])

    def taken(self, averaged: Tree) -> tuple[Tree, dict[int, Tensor]]:
        """Return the states with what the mean changed of the live ones, and that alone, by place."""
        found = [
            live if self.swapped.get(place) is x else x
            for place, (live, x) in enumerate(zip(self.live, tree.leaves(averaged), strict=True))
        ]
        changed = {place: x for place, (live, x) in enumerate(zip(self.live, found, strict=True)) if x is not live}
        return tree.unflatten(self.structure, found), changed


def _announce(training: Training, fragment: int, steps: int) -> Heard:
    """Tell the other ranks which exchange follows, and hear it from them.

    What travels says nothing of what it is: if a rank's schedule ran a fragment ahead, or one had left out an exchange,
    a mean of two fragments of one size would be taken for one of each. Islands of torchft have as many steps by now.

    Args: steps: taken on this rank.
    """
    axes = tuple(training.outside)
    if not axes or axis_size(axes) == 1:
        return Heard((), lambda: None)
    device = device_among(training.groups)
    # Numbers that are filled in are queued; a copy from the host would wait for what was queued before it.
    mine = torch.stack([torch.full((), n, dtype=torch.int64, device=device) for n in (fragment, steps)])
    with watched_by(Watchers()):  # a header, which no ledger counts
        rows = all_gather(mine, axes)

    def compare() -> None:
        first, *others = rows.cpu().tolist()
        for rank, row in enumerate(others, 1):
            if row != first:
                raise RanksDisagree(
                    f"ranks disagree: an exchange is of fragment {row[0]} after {row[1]} steps on rank {rank} of "
                    f"{' x '.join(map(repr, axes))}, and of fragment {first[0]} after {first[1]} steps on rank 0; "
                    f"a schedule may depend on the step only, and a checkpoint is loaded on all ranks; "
                    f"{LOCAL_STEP_TAKEN}",
                    rank=rank,
                    field="step" if row[0] == first[0] else "fragment",
                )

    return Heard(() if device.type == "cpu" else ((rows == rows[:1]).all(),), compare)


def _heard_if_broken(training: Training) -> AbstractContextManager[None]:
    """Let the other ranks raise `PeerLost` at once where a signal breaks off a mean, as if this rank had been killed.

    Whoever has heard the announcement waits in the mean. A rank that is interrupted before its own mean, and lives on,
    would keep the others waiting until the group's time-out.
    """

    def hang_up() -> None:
        for transport in training.transports.values():
            abort_connections(transport)

    return if_broken(hang_up)


def _filled(params: Params, value: float) -> Params:
    """Return trees like the params that hold one number everywhere, without memory for more."""
    numbers = {(p.dtype, p.device): p for group in params for p in group}
    numbers = {kind: p.new_full((), value) for kind, p in numbers.items()}
    return tuple([numbers[p.dtype, p.device].expand_as(p) for p in group] for group in params)


def _moved(params: Params, moves: Any, nothing: Params) -> Params:
    """Return the params after a part: the very tensors where it moved nothing."""

    def moved(p: Tensor, x: Tensor, zero: Tensor) -> Tensor:
        if isinstance(moves, NewParams):
            return x.to(p.dtype)
        return p if x is zero else (p + x).to(p.dtype)

    groups = zip(params, moves.params if isinstance(moves, NewParams) else moves, nothing, strict=True)
    return tuple([moved(*leaves) for leaves in zip(*map(tree.leaves, group), strict=True)] for group in groups)


def _check_unmoved(given: Params, returned: Params) -> None:
    """Refuse a mean that travels while local steps go on, and returns params."""
    pairs = zip(tree.leaves(given), tree.leaves(returned), strict=True)
    if any(x is not p and not bool(x.isnan().all()) for p, x in pairs):
        wanted = "the part 'mean' of a round to return no params, for local steps move them while it travels"
        cure = "keep the mean in the state and return params in the part 'outer', or use a schedule without a delay"
        raise ValueError(expected("rounds", wanted, "some", cure))


def weight_of(tokens: Sequence[float], rank: int) -> float:
    """Return the weight of a rank's difference: its tokens over the mean of all ranks' tokens.

    The mean of what the ranks send is then weighed by tokens. It is the plain mean where nobody has any.
    """
    total = sum(tokens)
    return len(tokens) * tokens[rank] / total if total else 1.0


def _weighed(before: Tree, after: Tree, weight: float) -> Tree:
    """Return states after a difference was noted in them, with that difference times a weight."""
    if weight == 1.0:
        return after
    old = iter(tree.instances(before, OuterState))

    def scaled(state: OuterState) -> OuterState:
        was = next(old)
        if state.guard:  # which weighs the differences itself, by their own norms
            pairs = zip(state.guard, was.guard, strict=True)
            told = (s if s is s_old else s._replace(weight=torch.full_like(s.weight, weight)) for s, s_old in pairs)
            return state._replace(guard=tuple(told))
        pending = tree.map(lambda new, was: new if new is was else weight * new, state.pending, was.pending)
        return state._replace(pending=pending)

    return tree.replace(after, OuterState, scaled)


Job = Callable[[], Any]


def in_background(training: Training, job: Job) -> Callable[[], Any]:
    """Begin a job that communicates; return what waits for it and returns its result. All ranks must call it.

    A thread of its own runs it, over process groups of its own, so that its messages cannot be mixed up with those of
    the training. On an accelerator this thread queues it on a stream of its own: exchanges of two threads could start
    in another order on another rank. Over transports that are no process groups it runs here and now.
    """
    device = device_among(training.groups)
    if device.type != "cpu":
        return _on_stream(training, device, job)
    if any(has_own_thread(axis.transport) for axis in current_binding().axes.values()):
        if training.background is None:
            training.background = CommunicationThread(Binding({}), device)
        return _on_thread(training.background, current_binding(), job)
    bound = {name: axis for name, axis in training.binding.axes.items() if axis.size > 1}
    if not bound or any(axis.transport == ALONE or axis.transport in registered for axis in bound.values()):
        result = job()
        return lambda: result
    future = _thread_of(training.binding, bound).submit(job)

    def wait() -> Any:
        with raising_peer_lost(training.transports):
            return future.result()

    return wait


def _on_thread(thread: CommunicationThread, binding: Binding, job: Job) -> Callable[[], Any]:
    """Begin a job over the axes that are bound now."""

    def run() -> Any:
        with binding:
            return job()

    return thread.submit(run).result


_threads: WeakKeyDictionary[dist.ProcessGroup, dict[Any, CommunicationThread]] = WeakKeyDictionary()
"""First process group of a binding -> the binding's axes -> its thread, until torch destroys the group."""


def _thread_of(binding: Binding, bound: dict[str, Axis]) -> CommunicationThread:
    """Return the thread of a binding, made in the first call, which all ranks must make.

    All optimizers of a binding share it. One per optimizer could not be given back when that is collected, which
    happens at other times on other ranks; and torch keeps every process group. Their jobs run one after the other, in
    the order in which they were submitted, which is the same on all ranks.
    """
    threads = _threads.setdefault(group_of(next(iter(bound.values())).transport), {})
    key = frozenset((name, axis.transport) for name, axis in binding.axes.items())
    if key not in threads:
        # New groups meet in the store, which waits for a lost rank till the time-out and hears no Ctrl-C meanwhile. So
        # the ranks meet before that, in a sum: a barrier of gloo does not hear it either.
        with watched_by(Watchers()):
            for name in bound:
                psum(torch.zeros(1, dtype=torch.int64, device="cpu"), name)
        twins = {name: bind_twin(name, group_of(axis.transport)).axes[name] for name, axis in bound.items()}
        threads[key] = CommunicationThread(Binding({**binding.axes, **twins}), torch.device("cpu"))
    return threads[key]


def _on_stream(training: Training, device: torch.device, job: Job) -> Callable[[], Any]:
    if training.background is None:
        training.background = torch.Stream(device=device)
    stream: torch.Stream = training.background
    stream.wait_stream(torch.accelerator.current_stream(device))
    with stream:
        result = job()

    # `kept` holds what the job reads until the main stream has waited; else its memory could be used again meanwhile.
    def wait(kept: Job = job) -> Any:
        torch.accelerator.current_stream(device).wait_stream(stream)
        return result

    return wait
