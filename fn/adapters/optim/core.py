"""A torch optimizer around pure updates: all of a step, in the order in which things happen.

    gradients, clip, take   every unit is staged: all that can fail; then all are written, or none
    exchange                behind the local step of a round: difference, mean, outer step
    land                    a mean that travelled while local steps went on is written

A subclass that adds to a step overrides `gradients` (unscaling) or `exchange` (a quorum). Watchers use
torch's own hooks, `register_step_pre_hook` and `register_step_post_hook`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import zip_longest
from operator import is_
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.optim.clipping import clip, clip_late
from fn.adapters.optim.exchange_header import LOCAL_STEP_TAKEN, announce
from fn.adapters.optim.groups import names_of
from fn.adapters.optim.resting import hold
from fn.adapters.optim.shards import pieces, placed
from fn.adapters.optim.units import Flight, Unit, Units
from fn.base import Exchange, Guarded, NewParams, Phase, Round, UpdateFn, facts_of
from fn.collectives import following
from fn.collectives.agreement import true_on_all
from fn.collectives.axis import Binding, in_turn
from fn.collectives.background import Background
from fn.collectives.profiling import step_range
from fn.collectives.transports.failure_detection import falling_silent, raising_peer_lost
from fn.compiling import original
from fn.errors import expected
from fn.inplace import head_and_body
from fn.inplace.match import in_place
from fn.inplace.memory import aside, check_apart, copy_into, copy_plan, move
from fn.inplace.protocol import InPlace, Staged, on_host, wait_for_flags
from fn.kernels import flags
from fn.schedules import Schedule, phase_of

Tree = Any
Grads = list[list[Tensor]]
"""The gradients of each param group."""

logger = logging.getLogger("fn")


class Core(Units):
    """Step units by their transforms: `fn.Optimizer` without what watches it.

    Args:
        params, defaults: as `torch.optim.Optimizer` takes them.
        schedule: step -> Phase or Round.
        binding: the axes that are bound in a step. axes: those of them over which the transforms communicate.
        max_norm: the norm to which gradients are clipped; None: they are not.
    """

    _step_supports_amp_scaling = True  # a GradScaler then always calls step, also on the rank that saw an Inf

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        schedule: Schedule,
        binding: Binding,
        axes: list[str],
        max_norm: float | None = None,
    ):
        self.schedule, self.binding, self.axes, self.max_norm = schedule, binding, axes, max_norm
        self.steps = 0
        self.now: Phase | Round = Phase.WARMUP  # of the step that is taken, or was taken last
        self.moved = False  # whether that moved anything
        self.units: list[Unit] = []
        self.updates: dict[tuple[bool, Phase], list[Update]] = {}  # what `updates_of` made
        self.staged: dict[int, Staged] = {}  # by unit; an overlap fills it behind the backward pass
        self.ahead: Callable[[Phase | Round], None] | None = None  # lets an overlap fill it, see `fn.adapters.ddp`
        self.flights: list[Flight] = []
        self.background = Background()  # what means travel on
        self.refused = ""  # why nothing may be stepped or saved
        self.has_begun = False  # whether ranks have compared params that something else wrote before the first step
        self.warned = False  # of params that something else wrote later
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step from the gradients in `p.grad`.

        Args: closure: recomputes the loss and the gradients, as for torch. Returns: what it returned.
        Raises: `PeerLost` if a rank ends or stops answering, `RanksDisagree` if ranks meet in different exchanges, and
            ValueError or TypeError for gradients or a phase that cannot be stepped. Params and state are then as before
            the step; where the exchange of a round fails, as after its local step, which counts.
        """
        return self._step(closure)

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        """Take a step without the hooks that torch puts around `step` of every class: they would run several times."""
        self.check_free("step")
        # `step` runs under no_grad, in which a closure could not call backward.
        loss = None if closure is None else torch.enable_grad()(closure)()
        with self.communicating("parameters and state are as before the step"), following.aside():
            # In this context: a rank where this raises closes its connections, and the others do not wait for it.
            self.follow_groups()
            phase = self.now = self.next_phase
            self.moved = take(self, phase)
        record_versions(self)
        # Counted before the exchange: the local step has been taken, also if the exchange fails.
        self.steps += 1
        if isinstance(phase, Round) and phase != Round():
            with self.communicating(LOCAL_STEP_TAKEN), following.aside():
                self.exchange(phase)
        return loss

    def follow_groups(self) -> None:
        """Take over what was written into the param groups since the last step."""
        follow_members(self)

    def check_phase(self, phase: Phase) -> None:
        """Raise an error on all ranks if a phase, before its first step, does not go with those that were taken."""

    def check_group(self, unit: Unit, group: dict[str, Any]) -> None:
        """Raise the error that a step would raise if a param group of a unit held these entries."""

    def gradients(self, phase: Phase | Round) -> Grads:
        """Return the gradients of a step, per param group: zeros where there is none."""
        lists = [group["params"] for group in self.param_groups]
        pairs = [zip(pieces(params), params, strict=True) for params in lists]
        zeros = torch.zeros_like
        return [pieces([zeros(x) if p.grad is None else placed(p.grad, p) for x, p in pair]) for pair in pairs]

    def exchange(self, round_: Round) -> None:
        """Take what follows the local step of a round, among the ranks that are bound."""
        stage_exchange(self, round_).commit()

    @property
    def next_phase(self) -> Phase | Round:
        """Return the phase of the next step, a round where there is an exchange behind the warm-up.

        The first step that moves anything is a warm-up, where the scheduled phase needs one.
        """
        phase = phase_of(self.schedule, self.steps)
        if any(phase.phase in unit.transform.needs_warmup for unit in self.units) and self.steps == skipped(self):
            return Phase.WARMUP
        if any(unit.transform.exchange is not None for unit in self.units):
            # A schedule without rounds: a compressed step exchanges at once, a local step exchanges nothing.
            rounds: dict[Any, Round] = {Phase.COMPRESSED: Round(0, 0), Phase.LOCAL: Round()}
            return rounds.get(phase, phase)
        return phase.phase

    def agreeing(self, index: int, part: str, number: int | None = None) -> AbstractContextManager[None]:
        """Name the place of what all ranks get alike: a unit, the phase of its step, or a part of an exchange."""

        def axes() -> Collection[str]:
            facts = facts_of(self.units[index].transform)
            if number is not None:
                return {*facts.axes}.difference(facts.inside)
            averaged: tuple[str, ...] = getattr(facts.averaged, part)
            return averaged or facts.axes

        return following.at(self.log, (index, part if number is None else f"{part} {number}"), axes)

    @property
    def states(self) -> tuple[Tree, ...]:
        """Return the state of each unit, live buffers, when the means that are on their way have come."""
        land(self)
        return tuple(unit.state for unit in self.units)

    @property
    def wires(self) -> dict[str, str]:
        """Return {axis: transport of its messages} of the axes with several ranks."""
        shards = (axis for unit in self.units for axis in facts_of(unit.transform).shards)
        bound = {axis: self.binding.axes[axis] for axis in (*self.axes, *shards) if axis in self.binding.axes}
        return {axis: of.transport for axis, of in bound.items() if of.size > 1}

    def check_free(self, what: str) -> None:
        """Refuse to go on where that is not possible, with a RuntimeError. Args: what: the function that is called."""
        if self.refused:
            raise RuntimeError(f"{what}: refused, for {self.refused}")

    @contextmanager
    def communicating(self, left: str) -> Iterator[None]:
        """Bind the axes; where this rank fails alone, fall silent.

        Args: left: how parameters and state are then.
        """
        wires = self.wires
        with in_turn(wires), self.binding, falling_silent(wires.values()), raising_peer_lost(wires, left=left):
            try:
                yield
            finally:
                # What was staged and not taken is of this step's numbers; the next step must not write it.
                self.staged.clear()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Refuse everything behind an exception that comes while parameters and state are written, such as Ctrl-C."""
        # No `finally`: behind an exception `refused` has to stay.
        before, self.refused = self.refused, TORN
        yield
        self.refused = before


"""How a failed exchange leaves parameters and state."""

TORN = (
    "an exception came while parameters and state were written, so that they may be half of one step and half of the "
    "next; load both from a checkpoint, with fn.adapters.checkpoint.load, or load_state_dict of model and optimizer"
)


def follow_members(core: Core) -> None:
    """Refuse parameters that were added, taken out, replaced or moved by hand; take over lists and dicts made anew.

    A state is made for its parameters: one more would never be trained, and others would be given its moments.

    Raises: ValueError that names the group and the parameter.
    """
    known = [(unit, i, given) for unit in core.units for i, given in enumerate(unit.given)]
    # What is no list, no dict or no list of parameters has none of them, and is refused like one that lost them.
    groups = core.param_groups if isinstance(core.param_groups, list | tuple) else []
    for g, entry in enumerate(groups):
        unit, i, given = known[g] if g < len(known) else (None, 0, {"params": []})
        group = entry if isinstance(entry, dict) else {}
        held = group.get("params")
        # A copy: a generator would be empty behind this.
        params = [*held] if isinstance(held, Iterable) and not isinstance(held, Tensor) else []
        if (
            unit is None
            or group is not entry
            or len(params) != len(given["params"])
            or not all(map(is_, params, given["params"]))
        ):
            refuse_edited(g, given, {**group, "params": params})
        if len(names_of(group | {"params": params})) != len(params):
            wanted = f"a name for each of the {len(params)} parameters of group {g}"
            raise ValueError(expected("param_names", wanted, f"{len(group['param_names'])}"))
        if not isinstance(group["params"], list):
            group["params"] = params
        unit.groups[i] = group
    for g, (_, _, given) in [*enumerate(known)][len(groups) :]:
        refuse_edited(g, given, {"params": []})


def refuse_edited(g: int, given: dict[str, Any], now: dict[str, Any]) -> NoReturn:
    """Refuse a param group, by its number, with a ValueError that names the first parameter that is another one."""
    before, after = given["params"], now["params"]
    place = next((i for i, (p, q) in enumerate(zip_longest(before, after)) if p is not q), 0)
    done = "added" if place >= len(before) else "taken out" if place == len(after) else "replaced or moved"
    done = done if before or after else "added, taken out or replaced"
    names = names_of(given if place < len(before) else now)
    name = names[place] if place < len(names) else place
    which = f"parameter {name} of param group {g}" if before or after else f"param group {g}"
    cure = "add parameters by add_param_group, and retire them by requires_grad_(False), on all ranks"
    wanted = "the groups and parameters that the optimizer was given"
    raise ValueError(expected("param_groups", wanted, f"{which} {done} by hand", cure))


def take(core: Core, phase: Phase | Round) -> bool:
    """Take a step, or the local step of a round; return whether it moved. The axes must be bound."""
    if core.ahead is not None:
        core.ahead(phase)
    units = range(len(core.units))
    if len(core.staged) < len(units):
        clipped, unaveraged = clip(core, phase, core.gradients(phase))
        lists = iter(clipped)
        grads = [unit.tree_of([next(lists) for _ in unit.groups]) for unit in core.units]
        with unaveraged:
            for i in units:
                if i not in core.staged:
                    core.staged[i] = stage_group(core, i, phase, grads[i])
    # One wait for the device, for the flags of all units.
    steps = wait_for_flags([core.staged.pop(i) for i in units])
    moves = agree_to_step(core, all(step.ok for step in steps), phase)
    # Copied before the first write; what rests gets its numbers back behind the last one.
    put_back = hold(core) if moves else nothing
    with core.writing(), step_range("apply"):
        for step in steps if moves else ():
            step.commit()
        put_back()
        # Units are skipped together: one whose own numbers are finite counts the step, too.
        for unit in () if moves else core.units:
            unit.state.skipped.add_(1)
    return moves


def agree_to_step(core: Core, ok: bool, phase: Phase | Round) -> bool:
    """Return whether a step is taken: where ranks hold pieces of one model, or an island's steps, only if all agree."""
    facts = [facts_of(unit.transform) for unit in core.units]
    axes = dict.fromkeys(axis for one in facts for axis in (*one.shards, *(one.inside if phase != phase.phase else ())))
    if len(core.units) < 2 or not axes:  # a unit's own guard asks the ranks that have the rest of its tensors
        return ok
    flag, device = torch.tensor(ok, dtype=torch.bool, device="cpu"), device_of(core)
    with following.at(core.log, ("step", "taken"), tuple):
        return bool(true_on_all(flag, tuple(axes), device))


class Update(NamedTuple):
    """How a unit takes the steps of a phase.

    pure: its update, guarded. kernels: how kernels take the whole step; None where none do. head, body: else.
    """

    pure: UpdateFn
    kernels: InPlace | None
    head: UpdateFn
    body: UpdateFn


def way_of(update: UpdateFn, kernels: InPlace | None = None) -> Update:
    """Return how the steps of an update are taken."""
    return Update(update, kernels, *head_and_body.split(update))


@torch.no_grad()
def stage_group(core: Core, index: int, phase: Phase | Round, grads: Tree) -> Staged:
    """Take the step of a unit up to where it is written, in place where the device has kernels for it.

    Args: grads: like its params. The axes must be bound. Raises: whatever may fail; nothing has changed then.
    """
    unit, update = core.units[index], updates_of(core, phase)[index]
    params = unit.params
    with core.agreeing(index, phase.phase.value):
        staged = update.kernels.stage(grads, unit.state, params) if update.kernels else None
        return stage_purely(update, grads, unit.state, params) if staged is None else staged


def stage_purely(update: Update, grads: Tree, state: Tree, params: Tree) -> Staged:
    """Compute the head of a step, which waits to be written with its body, as if all flags of a device were true.

    Then nobody waits for them. Where one is false, a step that the guard looks at is skipped. A local one, of which no
    other rank hears, is computed once more.
    """
    params = tree.map(Tensor.detach, params)
    check_apart(state, params)

    def computed() -> tuple[bool | Tensor, Callable[[], None]]:
        moves, after = update.head(grads, state, params)
        check_shapes(moves, params)
        # Where the state is written before the params, it would overwrite updates that lie in its memory.
        moves = tree.map_lists(lambda lists: aside(lists[0], tree.leaves(state)), [moves])
        # The count of a step that is taken is not written, so that nobody waits for a device to read it.
        # A mean that is on its way may read the gradients that were kept last, in their memory.
        write_state = copy_plan(state, after._replace(skipped=state.skipped), roles.find(state, "taken"))
        dropped = zip(*(roles.find(inner, "dropped") for inner in (state.inner, after.inner)), strict=True)
        counts = [(old, new) for old, new in dropped if new is not old]

        def commit() -> None:
            is_left_out = any(bool(new != old) for old, new in counts)  # by this rank alone, which counts it
            if isinstance(moves, NewParams):
                write_state()
                move(params, moves)
                return
            if not is_left_out:
                head_and_body.take(update.body, moves, state, params)
            write_state()

        # The same tensor comes back from a guard that knew the answer. Else the comparison is a 0-d flag of the device,
        # for which nobody waits here.
        return after.skipped is state.skipped or after.skipped == state.skipped, commit

    with flags.assumed() as assumed:
        taken, commit = computed()
    holds, pure = flags.all_of(assumed), original(update.pure)
    if isinstance(pure, Guarded) and pure.looks:
        return Staged(taken if holds is True else holds & taken, commit)
    # `otherwise` runs outside of `assumed`, so the second computation waits for each flag and holds in any case.
    return Staged(holds, commit, lambda: computed()[1]())


def updates_of(core: Core, phase: Phase | Round) -> list[Update]:
    """Return how each unit takes a step of a phase, found once for each.

    In a round, a unit with an exchange takes a local step; one without takes the round's phase.
    """
    key = isinstance(phase, Round), phase.phase
    if key not in core.updates:
        core.check_phase(phase.phase)
        phases = [Phase.LOCAL if key[0] and unit.transform.exchange else phase.phase for unit in core.units]
        updates = [unit.transform.composed(own) for unit, own in zip(core.units, phases, strict=True)]
        ways = [in_place(update) for update in updates]
        if reason := next((way for way in ways if isinstance(way, str)), ""):
            level = logging.INFO if device_of(core).type == "cpu" else logging.WARNING
            text = "the %s step is taken link by link: %s; see `python -m fn explain`"
            logger.log(level, text, phase.phase.value, reason)
        core.updates[key] = [
            way_of(update, None if isinstance(way, str) else way) for update, way in zip(updates, ways, strict=True)
        ]
    return core.updates[key]


def stage_exchange(core: Core, round_: Round, weight: float = 1.0) -> Staged:
    """Take what follows the local step of a round up to where it is written. The axes must be bound.

    Where an exchange begins and ends: difference, mean, outer step. Else the difference of what begins and the outer
    step of what ends, with the mean that has come; the mean of what begins flies while local steps go on.

    Args: weight: what this rank's difference is multiplied by.
    """
    begin, end = round_
    at_once = begin == end
    live, params = [unit.state for unit in core.units], [unit.params for unit in core.units]
    landed = live if at_once or end is None else tree.with_leaves(live, arrived(core, end))
    states, new, flight, carried = landed, params, None, dict[int, Tensor]()
    compare, heard = nothing, list[Tensor]()

    # 1. begin: this rank's difference to the anchor, and its mean if the exchange ends at once
    if begin is not None:
        states, new = each(core, "difference", begin, states, new)
        # Before the mean, which sends the difference.
        states = weighed(landed, states, weight)
        if at_once:
            compare = announce(core, begin, core.steps, core.resting)
            with flags.assumed() as heard:  # what an accelerator has heard is read with the flags of the outer step
                compare()
            states, new = each(core, "mean", begin, states, new)
    noted = [] if at_once else tree.leaves(states)

    # 2. end: the outer step, from a mean that is there
    if end is not None:
        with flags.assumed() as assumed:
            taken = each(core, "outer", end, states, new)
        # One wait for the device, for all flags of the exchange.
        if not flags.all_of([*heard, *assumed]):
            compare()
            # Nothing is sent in this part, so a rank may take it again alone.
            taken = each(core, "outer", end, states, new)
        states, new = taken

    # 3. write: what the other two made, in the commit; the mean of an exchange that ends later leaves now
    before, after = tree.leaves(live), tree.leaves(states)
    if begin is not None and not at_once:  # what the difference wrote travels with the mean, and lands with it
        changed = (i for i, x in enumerate(tree.leaves(landed)) if noted[i] is not x and after[i] is noted[i])
        carried = {i: noted[i] for i in changed}
        flight = fly(core, begin, states, carried)
    # What lands with the mean is not written now: until then these leaves stay as they were.
    kept = [x if i in carried else y for i, (x, y) in enumerate(zip(before, after, strict=True))]
    # The state is written first, so `rounded_into` copies new params aside that lie in its memory.
    write_state, write_params = copy_plan(before, kept), rounded_into(params, new, before)
    put_back = hold(core, exchange=True)

    def commit() -> None:
        with core.writing():
            write_state()
            write_params()
            put_back()
        record_versions(core)
        if end is not None and not at_once:
            core.flights[:] = [other for other in core.flights if other.number != end]
        core.flights += [flight] if flight else []

    return Staged(True, commit)


def versions_of(unit: Unit) -> list[tuple[int, int]]:
    """Return where each param lies, and torch's count of the times that it was written."""
    return [(x.untyped_storage()._cdata, x._version) for x in tree.leaves(unit.params)]


def record_versions(core: Core) -> None:
    """Note that fn has written the params last."""
    for unit in core.units:
        unit.versions = versions_of(unit) if unit.has_copies else []


def nothing() -> None:
    """Do nothing, where there is nothing to compare or to give back."""


def each(core: Core, part: str, number: int, states: list[Tree], params: list[Tree]) -> tuple[list[Tree], list[Tree]]:
    """Take one of the three functions of an exchange, unit by unit; return the states and the params."""
    after = []
    for i, (unit, state, p) in enumerate(zip(core.units, states, params, strict=True)):
        exchange: Exchange | None = unit.transform.exchange
        with core.agreeing(i, part, number):
            after.append((p, state) if exchange is None else getattr(exchange, part)(number, state, p))
    return [state for _, state in after], [p for p, _ in after]


def fly(core: Core, number: int, states: list[Tree], carried: dict[int, Tensor]) -> Flight:
    """Begin a mean that travels while local steps go on. It is shown no params, which these steps write meanwhile.

    It starts from the present states and from what earlier means change in them, such as residual errors.
    """
    # Other tensors in the same memory: the next local step gives those of the state another one.
    states = [roles.replace(state, "taken", partial(tree.map, Tensor.detach)) for state in states]
    # Copies and a number, not the optimizer's: the job may run while the training changes them.
    earlier, steps, resting, device = [*core.flights], core.steps, core.resting, device_of(core)
    given, live = tree.leaves(states), tree.leaves([unit.state for unit in core.units])
    # () -> the shape of p, without memory. NaN, so that a mean that calculates with params is seen to do so.
    unread = [tree.map(lambda p: p.new_full((), torch.nan).expand_as(p), unit.params) for unit in core.units]
    changed: dict[int, Tensor] = {}

    def job() -> Callable[[], None]:
        # Jobs run one after the other, so what earlier means change is known by now. A leaf that the difference of this
        # exchange has made anew stays as it is: that difference was taken with it.
        base = {i: x for flight in earlier for i, x in flight.changed.items() if given[i] is live[i]}
        from_states = tree.with_leaves(states, base)
        compare = announce(core, number, steps, resting)
        if device.type == "cpu":
            compare()  # on an accelerator whoever queues the job would wait here for the other ranks
        from_states = clip_late(core, from_states, "taken")
        averaged, returned = each(core, "mean", number, from_states, unread)
        averaged = left_out_together(from_states, clip_late(core, averaged, "mean"))
        if any(x is not p for x, p in zip(tree.leaves(returned), tree.leaves(unread), strict=True)):
            wanted = "`mean` to return the params that it got, for local steps move them while it travels"
            cure = "return params in `outer`, or use a schedule without a delay"
            raise ValueError(expected("exchange", wanted, "others", cure))
        pairs = enumerate(zip(tree.leaves(from_states), tree.leaves(averaged), strict=True))
        changed.update(carried | {i: x for i, (was, x) in pairs if x is not was})
        return compare

    landed = following.flight(core.log, job, lambda job: core.background.begin(core.binding, device, job))
    return Flight(number, changed, lambda: landed()())


def left_out_together(before: list[Tree], after: list[Tree]) -> list[Tree]:
    """Return the states after a mean; where one of them misses it, all as they were, and all miss it."""
    flags: list[Tensor] = roles.find(after, "missing")
    lost = torch.stack([flag.to(flags[0].device) for flag in flags]).any() if flags else None
    if lost is None or (lost.device.type == "cpu" and not lost):
        return after
    instead = [roles.replace(state, "missing", torch.ones_like) for state in before]
    # On a device a flag is not read: whoever queues a mean does not wait for it.
    chosen = lambda new, old: new if new is old else torch.where(lost.to(new.device), old, new)  # noqa: E731
    return instead if lost.device.type == "cpu" else [*map(partial(tree.map, chosen), after, instead)]


def arrived(core: Core, number: int) -> dict[int, Tensor]:
    """Wait for the mean of an exchange and return the leaves that it changes; none if no mean of that number flies.

    Raises: what was raised while it travelled; it and the means behind it are left out then.
    """
    for flight in (flight for flight in core.flights if flight.number == number):
        try:
            flight.wait()
        except Exception:
            core.flights.clear()
            raise
        return flight.changed
    return {}


def land(core: Core) -> None:
    """Wait for the means that are on their way, and write what they changed, before somebody reads the states.

    Raises: as `arrived`.
    """
    while core.flights:
        changed = arrived(core, core.flights[0].number)
        before = tree.leaves([unit.state for unit in core.units])
        write = copy_plan([before[i] for i in changed], [*changed.values()])
        with core.writing(), torch.no_grad():
            write()
        del core.flights[0]


def weighed(before: list[Tree], noted: list[Tree], weight: float) -> list[Tree]:
    """Return states in which a difference was noted, times a weight."""
    if weight == 1.0:
        return noted
    # Only what was noted now: a difference of another fragment, on its way since before, has its weight already.
    own = {id(x) for x, was in zip(tree.leaves(noted), tree.leaves(before), strict=True) if x is not was}
    scaled = partial(tree.map, lambda x: weight * x if id(x) in own else x)
    found: list[Tree] = roles.replace(noted, "difference", scaled)
    return found


def rounded_into(params: list[Tree], new: list[Tree], state: list[Tensor]) -> Callable[[], None]:
    """Return a function that writes new params into the params, rounded to their dtype. state: is written before."""
    olds, news = tree.leaves(params), tree.leaves(new)
    if [x.shape for x in news] != [p.shape for p in olds]:
        wanted = f"params of the shapes {[tuple(p.shape) for p in olds]}"
        raise ValueError(expected("exchange", wanted, f"{[tuple(x.shape) for x in news]}"))
    pairs = [(p, x.to(p.dtype)) for p, x in zip(olds, news, strict=True) if x is not p]
    news = aside([x for _, x in pairs], [*state, *olds])
    return lambda: copy_into([*zip([p for p, _ in pairs], news, strict=True)])


def check_shapes(moves: Tree, params: Tree) -> None:
    """Refuse updates that adding to the params would broadcast, with a ValueError that names the first."""
    shapes, wanted = [x.shape for x in tree.leaves(moves)], [p.shape for p in tree.leaves(params)]
    if len(shapes) != len(wanted):
        raise ValueError(expected("updates", f"{len(wanted)}, one for each parameter", f"{len(shapes)}"))
    for path, shape, right in zip(tree.paths(moves), shapes, wanted, strict=True) if shapes != wanted else ():
        if shape != right:
            text = f"leaf {path!r} to have the shape of its parameter, {tuple(right)}"
            raise ValueError(expected("updates", text, f"{tuple(shape)}"))


def skipped(core: Core) -> int:
    """Return how many steps all ranks have skipped; a device is waited for only where one was."""
    return max((int(on_host(unit.state.skipped)) for unit in core.units), default=0)


def count_of(core: Core, role: str) -> int:
    """Return the largest count that the states have with a role, see `fn.Roles`."""
    counts = [count for unit in core.units for count in roles.find(unit.state, role)]
    return max((int(on_host(count)) for count in counts), default=0)


def device_of(core: Core) -> torch.device:
    """Return the device of the first param; the CPU if there is none."""
    return next((p.device for group in core.param_groups for p in group["params"]), torch.device("cpu"))
