"""What an optimizer trains, and where it stands: `Training`.

`fn.Optimizer` is the interface of torch around one. What takes a step, saves or warns works on it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.optim import param_groups
from fn.adapters.optim.consistency import by_path, check_paths, check_start
from fn.adapters.optim.donate import check_changes, owned
from fn.adapters.optim.gradients import Gradients
from fn.adapters.optim.local_shards import Division, LocalShards
from fn.adapters.optim.momentum import check_has_codes
from fn.adapters.optim.param_groups import check_writable
from fn.adapters.optim.signals import TORN, writing
from fn.base import Part, Phase, Round, Transform, facts_of
from fn.collectives.axis import Binding, rank_dims
from fn.errors import expected
from fn.inplace.memory import written_into
from fn.inplace.protocol import Staged, on_host
from fn.schedules import FreezeWhenStable, Schedule, phase_of
from fn.transforms.adam import momentum_as_codes, momentum_as_floats
from fn.transforms.skip_nonfinite import SkipState, skip_nonfinite, together

Tree = Any


@dataclass(eq=False)
class Sent:
    """A mean on its way.

    exchange: its number in a `Round`. wait: waits for it, and returns the states with it. process: in which it has
    begun; a child that was forked since has no thread that it could arrive on. changed: the leaves of the states that
    it changed, by their places; None until it has come, and where it failed.
    """

    exchange: int
    wait: Callable[[], Tree]
    process: int
    changed: dict[int, Tensor] | None = None


@dataclass(eq=False)
class Training:
    """The data of `fn.Optimizer`.

    make, schedule, max_norm, compile: as it was given. binding: the axes that were bound when it was built; axes: those
    of them that it communicates over. groups: the param groups of torch; lists below have an entry for each.
    """

    make: Callable[..., Transform]
    schedule: Schedule
    binding: Binding
    axes: list[str]
    max_norm: float | None = None
    compile: bool = False
    doubts: Any = ()
    """The phases in which gradients may turn out to be averaged already, see `gradients.still_in_doubt`."""
    groups: list[dict[str, Any]] = field(default_factory=list)
    steps: int = 0
    skipped_in_a_row: int = 0
    """How many of the last steps were skipped, one after the other, without local ones."""
    states: Tree = ()
    """The transform's state, the live buffers: a tuple with an entry per param group."""
    transforms: list[Any] = field(default_factory=list)
    """A `Transform` per param group; none while a copy is made."""
    lrs: list[Tensor] = field(default_factory=list)
    """Learning rates, 0-d, which transforms were made with and which are filled in place."""
    hypers: list[dict[str, Any]] = field(default_factory=list)
    """The other hyper-parameters that transforms were made with."""
    guarded: list[bool] = field(default_factory=list)
    """Whether `make` made a transform that skips steps by itself."""
    seen: dict[int, dict[str, Any] | None] = field(default_factory=dict)
    """What each param group held when it was followed last, by its number."""
    gradients: Gradients = field(default_factory=Gradients)
    shards: LocalShards = field(default_factory=LocalShards)
    divided: dict[str, Any] = field(default_factory=dict)
    """The paths of what is in the state and divided as a parameter is, and its DTensor."""
    scale: tuple[Tensor | None, Tensor | None] = None, None
    """What `torch.amp.GradScaler` says of this step: the scale of the loss, and whether it found an Inf."""
    updates: dict[Phase | Part, Any] = field(default_factory=dict)
    """What `step.update_of` made for a phase from the numbers that the param groups hold."""
    bounds: dict[Any, Any] = field(default_factory=dict)
    """Bounds of the numbers in params and state, for steps in place, see `fn.inplace.bounds`."""
    ahead: Callable[[Phase], tuple[Sequence[Staged] | None, Exception | None]] | None = None
    """Set by `fn.adapters.ddp.overlap`: see `fn.adapters.ddp.overlapped.Overlap.ahead`."""
    meet: Callable[[Round], None] | None = None
    """Set by `fn.adapters.torchft`, which takes the exchanges of rounds among ranks that come and go."""
    compiled_at: set[int] = field(default_factory=set)
    """Steps with other hyper-parameters, of updates that are compiled."""
    sending: list[Sent] = field(default_factory=list)
    """The means that have begun in rounds and are not taken over yet, in their order."""
    settling: Any = field(default_factory=threading.RLock)  # a handler of signals may read the states meanwhile
    """Held by the thread that waits for those means."""
    background: Any = None
    """The stream of an accelerator, or the thread, on which means are sent, see `exchange.in_background`."""
    momentum_as_codes: bool = False
    """Whether the momentum of 1-bit Adam is kept as codes between compressed steps, see `momentum`."""
    in_codes: bool = False
    """Whether it is now."""
    lent: bool = False
    """Whether the params are those that all ranks agree on, in the place of this rank's own: see `agreed_params`."""
    torn: bool = False
    """Whether an exception has left parameters and state half written: see `signals.writing`."""
    said: set[Any] = field(default_factory=set)
    """What was said in the log already."""
    found_counters: tuple[Tree, dict[str, list[Tensor]]] = field(default_factory=lambda: ((), {}))
    """States, and the counters that were found in them by role."""
    missed_in_a_row: dict[int | str, int] = field(default_factory=dict)
    """How many exchanges in a row were left out, by the number of the fragment; as "local", this rank's local steps."""
    unseen_local_steps: int = 0
    """Local steps since `dropped` was looked at last."""
    seen_dropped: int = 0
    """What `dropped` was then."""

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: not the transforms, which would go on with this one."""
        self.settle()
        left_here = dict.fromkeys(("ahead", "meet", "background", "settling"))
        made_anew = {"updates": {}, "bounds": {}, "seen": {}, "transforms": [None] * len(self.transforms)}
        return {**vars(self), **left_here, **made_anew, "sending": [], "lent": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, which nobody else waits for."""
        vars(self).update(state)
        self.settling = threading.RLock()

    def settle(self, exchange: int | None = None) -> None:
        """Wait for means that have begun, and write them into the states: who reads or saves them calls this first.

        A momentum that is kept as codes is in floating point from then on, until the next compressed step.

        Args: exchange: the number of one, up to which the others are waited for. None: all of them.
        Raises: what was raised while one was sent; the states are then as before it began, and later ones are left out.
            RuntimeError in a process that was forked meanwhile.
        """
        self.keep_momentum(Phase.WARMUP)
        first = next(iter(self.sending), None)
        if first is not None and os.getpid() != first.process:  # before the lock, which a thread may hold for good
            wanted = "to be read in the process that sends the mean on its way"
            got = f"a child of it, process {os.getpid()} of {first.process}"
            raise RuntimeError(expected("states", wanted, got, "call opt.state_dict() before the fork"))
        # Another thread may read the states. What it waits for has to be written before this one takes a step.
        with self.settling:
            while self.sending and (exchange is None or any(sent.exchange == exchange for sent in self.sending)):
                try:
                    states = self.sending[0].wait()
                except Exception:  # Ctrl-C is none, and leaves the means on their way: they can be waited for again
                    self.sending.clear()
                    raise
                write = written_into(self.states, states)
                with writing(self):
                    write()
                del self.sending[0]

    def keep_momentum(self, phase: Phase | Round) -> None:
        """Let the states have the momentum in the form in which a step of a phase leaves it, or needs it."""
        kept = self.momentum_as_codes and phase is Phase.COMPRESSED
        if kept == self.in_codes or (kept and all(self.binding.axes[name].size == 1 for name in self.axes)):
            return
        with torch.no_grad():
            self.states = (momentum_as_codes if kept else momentum_as_floats)(self.states)
        self.in_codes = kept

    def check_own_params(self, what: str) -> None:
        """Refuse to write params that are put back at the end of `fn.adapters.agreed_params`.

        Args: what: the function that is called. Raises: RuntimeError inside of that context.
        """
        if self.lent:
            wanted = "to be called outside of fn.adapters.agreed_params, which puts this rank's own params back"
            raise RuntimeError(expected(what, wanted, "a call inside of it", "end the context first"))

    def check_whole(self, what: str) -> None:
        """Refuse what would go on from parameters and state that are half written.

        Args: what: the function that is called. Raises: RuntimeError until a checkpoint is loaded.
        """
        if self.torn:
            raise RuntimeError(f"{what}: refused, for an exception came {TORN}")

    @property
    def all_axes(self) -> list[str]:
        """Return the axes, and those over which the params are divided and the ranks take steps together."""
        divided = [axis for t in self.transforms if t is not None for axis in facts_of(t).shards]
        return [*self.axes, *dict.fromkeys(axis for axis in divided if axis not in self.axes)]

    @property
    def inside(self) -> list[str]:
        """Return those of the axes whose ranks are an island, and take local steps together."""
        named = {axis for t in self.transforms if t is not None for axis in facts_of(t).inside}
        return [axis for axis in self.axes if axis in named]

    @property
    def outside(self) -> list[str]:
        """Return those of the axes over which rounds are exchanged."""
        inside = self.inside
        return [axis for axis in self.axes if axis not in inside]

    @property
    def transports(self) -> dict[str, str]:
        """Return what the axes travel over."""
        return {axis: self.binding.axes[axis].transport for axis in self.all_axes}

    @property
    def params(self) -> list[list[Tensor]]:
        """Return the parameters of each group."""
        return [group["params"] for group in self.groups]

    @property
    def phase(self) -> Phase | Round:
        """Return the phase of the next step; behind the warm-up a round, for transforms that have rounds."""
        has_moved = self.steps > self.skipped
        scheduled = phase_of(self.schedule, self.steps)
        if not has_moved and self.needs_warmup(scheduled.phase):
            return Phase.WARMUP
        if any(transform.rounds is not None for transform in self.transforms):
            as_rounds = {Phase.COMPRESSED: Round(0, 0), Phase.LOCAL: Round()}
            return scheduled if isinstance(scheduled, Round) else as_rounds.get(scheduled, scheduled)
        return scheduled.phase

    def needs_warmup(self, phase: Phase, group: int | None = None) -> bool:
        """Return whether a phase needs a warm-up step before it, in a param group or in any of them."""
        chosen = self.transforms if group is None else self.transforms[group : group + 1]
        return any(phase in transform.needs_warmup for transform in chosen)

    @property
    def skipped(self) -> int:
        """Return how many steps were skipped because a gradient was not finite."""
        return max(self.skip_counts(), default=0)

    def skip_counts(self) -> list[int]:
        """Return how many steps each guard has skipped; a device is waited for only where one was."""
        states, counters = self.found_counters
        if states is not self.states or "skips" not in counters:  # asked several times in a step
            return [int(on_host(count)) for count in self.counters("skips")]
        return [int(count if count.device.type == "cpu" else on_host(count)) for count in counters["skips"]]

    def counters(self, role: str) -> list[Tensor]:
        """Return the tensors of all states that count something. Args: role: of the field, see `fn.Roles`."""
        if self.found_counters[0] is not self.states:
            self.found_counters = self.states, {}
        counters = self.found_counters[1]
        if role not in counters:  # a walk through all states takes longer than a small step
            counters[role] = roles.find(self.states, role)
        return counters[role]

    @property
    def left_out(self) -> int:
        """Return how many exchanges of rounds were left out because a mean or an outer step was not finite."""
        return max((int(on_host(count)) for count in self.counters("left_out")), default=0)

    @property
    def dropped(self) -> int:
        """Return how many local steps this rank left out because they were not finite."""
        return max((int(on_host(count)) for count in self.counters("dropped")), default=0)

    def count(self, phase: Phase | Round, moved: bool) -> None:
        """Count a step that was taken, and let a schedule that watches the training see it.

        Args: phase: of the step. moved: whether it was not skipped.
        """
        self.steps += 1
        if phase.phase is not Phase.LOCAL:
            self.skipped_in_a_row = 0 if moved else self.skipped_in_a_row + 1
        if isinstance(self.schedule, FreezeWhenStable) and phase is Phase.WARMUP:
            self.schedule.observe(self.steps - 1, self.second_moment_norm() if moved else None)

    def joined(self) -> Transform:
        """Return the transform of all param groups, whose state is `states`."""
        return together(self.transforms)

    def prepare(self, group: dict[str, Any]) -> tuple[Tensor, Transform | None]:
        """Return a group's learning rate as a tensor and its transform; asks no other rank."""
        lr = param_groups.learning_rate(group)
        made = self.made(group["params"], lr, param_groups.shown(group, self.make))
        self.shards.check(made, self.max_norm, group["params"])
        return lr, param_groups.check_made(made, self.schedule)

    def made(self, params: Sequence[Tensor], lr: Tensor, hyper: Mapping[str, Any]) -> Any:
        """Return what `make` makes for a param group, which is told how DTensors are divided if it takes that."""
        more = {}
        if (division := self._division(params)) is not None:
            self.binding, more = division.bound(self.binding), {"shards": division.shards}
        with self.binding:
            return self.make(lr=lr, **{**more, **hyper})

    def _division(self, params: Sequence[Tensor]) -> Division | None:
        """Return how DTensors are divided, if `make` is to know; None without any."""
        return self.shards.division(params) if param_groups.leaves_open(self.make, "shards") else None

    def start(self, group: dict[str, Any], lr: Tensor, transform: Transform | None) -> None:
        """Make the state of a group that was prepared, and take both in."""
        assert transform is not None
        self.settle()
        params = [p.detach() for p in group["params"]]
        with self.binding:
            state = owned(transform.init(params), params)
            guarded = isinstance(state, SkipState)
            if not guarded:  # a chain of the caller's own: guarded like the named ones
                transform = skip_nonfinite(transform)
                state = owned(transform.init(params), params)
            check_paths(state)
            if self.momentum_as_codes:
                check_has_codes(transform, state)
            check_start(self.axes, transform, state, group, len(self.transforms))
        hyper = param_groups.hyper_parameters(group, self.make)
        self.divided.update(self.divided_like_params(state, group["params"], lr, hyper, guarded=guarded))
        param_groups.show_rate(group, lr)
        self.lrs.append(lr)
        self.guarded.append(guarded)
        self.hypers.append(hyper)
        self.transforms.append(transform)
        self.states = (*self.states, state)
        self.updates.clear()

    def divided_like_params(
        self, state: Tree, params: Sequence[Tensor], lr: Tensor, hyper: dict[str, Any], *, guarded: bool
    ) -> dict[str, Any]:
        """Return {path: the DTensor that it is divided like} of what is in the next group's state, of momenta say.

        Which leaf belongs to which parameter an init tells of stand-ins, no two of which have the same shape.
        """
        dtensors = [self.shards.dtensor_of(p) for p in params]
        if all(dtensor is None for dtensor in dtensors):
            return {}
        shapes = [(1000 + i, *(1 for _ in p.shape[1:])) if p.ndim else () for i, p in enumerate(params)]
        stand_ins = [p.new_zeros(shape) for p, shape in zip(params, shapes, strict=True)]
        if (division := self._division(params)) is not None:
            hyper = {"shards": division.shards.axis, **hyper}
        with self.binding:
            transform = self.make(lr=lr, **hyper)
            of_stand_ins = (transform if guarded else skip_nonfinite(transform)).init(stand_ins)
        place_of = {shape: i for i, shape in enumerate(shapes) if shape and dtensors[i] is not None}
        leaves, found = by_path(state, f"state.{len(self.transforms)}."), {}
        for path, stand_in in by_path(of_stand_ins, f"state.{len(self.transforms)}.").items():
            i = place_of.get(tuple(stand_in.shape))
            if i is not None and path in leaves and leaves[path].shape == params[i].shape:
                found[path] = dtensors[i]
        return found

    def check_group(self, index: int, group: Mapping[str, Any]) -> None:
        """Raise what a step would raise if a param group held these entries. Nothing is changed."""
        param_groups.checked_rate(group["lr"])
        hyper = param_groups.current(group, self.hypers[index], self.make)
        self.made(self.groups[index]["params"], self.lrs[index], hyper)

    def remake(self, index: int) -> None:
        """Make a group's transform again from hyper-parameters that were written into the group; its state stays."""
        transform = self.made(self.groups[index]["params"], self.lrs[index], self.hypers[index])
        self.transforms[index] = transform if self.guarded[index] else skip_nonfinite(transform)

    def follow_groups(self) -> Exception | None:
        """Take over what was written into the param groups since the last step; return why that is not possible."""
        for i, (group, lr) in enumerate(zip(self.groups, self.lrs, strict=True)):
            before = self.hypers[i]
            try:
                check_writable(self.groups, i)
                if param_groups.is_as_before(group, self.seen.get(i)):
                    continue
                self.seen.pop(i, None)  # or a group that is put back behind an error would keep the rate that was wrong
                param_groups.follow(group, lr)
                param_groups.fold_betas(group, before)
                hyper = param_groups.current(group, before, self.make)
                if not param_groups.same(hyper, before):
                    if self.compile:
                        check_changes(before, hyper, self.compiled_at, self.steps)
                    self.hypers[i] = hyper
                    self.remake(i)
                    self.updates.clear()
                self.seen[i] = param_groups.remembered(group)
            except Exception as error:  # raised with the gradients: here the other ranks would wait for this one
                self.hypers[i] = before
                return error
        return None

    def second_moment_norm(self) -> float:
        """Return the 1-norm of the second moment, for `fn.freeze_when_stable`.

        Raises: ValueError if there is none, or each rank has a piece of it.
        """
        moments = roles.find(self.states, "second_moment")
        if not moments:
            text = "needs a transform whose state has a second moment; a state of your own names it in its `roles`"
            raise ValueError(f"schedule: freeze_when_stable {text}")
        if any(dim == 0 for dims in roles.find(rank_dims(self.states), "second_moment") for dim in tree.leaves(dims)):
            wanted = "a second moment that all ranks hold, since freeze_when_stable compares its norm"
            got = "one of which each rank has a part, of its shards or of the tensors that it owns"
            raise ValueError(expected("schedule", wanted, got, "use fn.freeze_after(step)"))
        leaves = [leaf for nu in moments for leaf in tree.leaves(nu)]
        norms = torch._foreach_norm(leaves, 1, dtype=torch.float64) if leaves else []
        return float(torch.stack([norm.to(norms[0].device) for norm in norms]).sum()) if norms else 0.0
