"""`fn.Optimizer`: any transform behind the interface of `torch.optim`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters import param_groups
from fn.adapters.alike_gradients import in_doubt
from fn.adapters.carried import Carried, added, due
from fn.adapters.clipping import check_max_norm
from fn.adapters.compiled import check_changes
from fn.adapters.donate import owned
from fn.adapters.held import Held
from fn.adapters.interrupts import whole_step
from fn.adapters.jumps import warn_of_jumps
from fn.adapters.missing_gradients import Gradients
from fn.adapters.rank_checks import check_accepted, check_listed, check_start, device_among, refuse_elsewhere
from fn.adapters.staged import stage
from fn.adapters.state_dict import of_rank, restore_of_rank
from fn.adapters.step_order import Update, take, write
from fn.adapters.unmoved import warn_at_start, warn_of_late_group
from fn.base import Phase, Transform
from fn.collectives.agreement import describe
from fn.collectives.axis import current_binding, rank_dims
from fn.collectives.peers import named
from fn.schedules import FreezeWhenStable, Schedule, always_warm_up, phase_of
from fn.transforms.finite import SkipState, skip_nonfinite, together
from fn.transforms.host_numbers import on_host
from fn.transforms.in_place import InPlace, Staged

Tree = Any
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class Optimizer(torch.optim.Optimizer):
    """Drive a transform as a `torch.optim.Optimizer`; gradients are each rank's own.

        with fn.bind(mesh):
            opt = fn.Optimizer(model.parameters(), partial(fn.onebit_adam, axis="data"),
                               schedule=fn.freeze_after(1000), lr=1e-3)
        loss.backward(); opt.step(); opt.zero_grad()

    Args:
        params: parameters, named parameters or param groups, as for torch. A group's own keys override the defaults.
        make: (lr=tensor, **hyper-parameters) -> Transform, called once per param group, in which its numbers are shown.
        schedule: step -> Phase, steps from 0, alike on all ranks. None: always warm-up, for what does not compress.
        lr: the learning rate, a number or a 0-d tensor, which is copied and which torch's schedulers then fill in
            place. What is written into `group["lr"]` takes effect in the next step, and so do other hyper-parameters
            of a group, for which the transform is made again.
        compile: run the update of each phase through `torch.compile`, anew if a number but lr changes.
        max_norm: clip by the global norm over all groups: of the averaged gradient in an exact warm-up, by a norm that
            the ranks agree on where codes travel (see `fn.adapters.clipping`). None: do not clip.
        refuse_averaged: raise a ValueError if the first compressed step finds the same gradients on all ranks, which
            something averaged before, such as DDP without `fn.adapters.ddp.keep_local`; the first warm-up step warns.
        **defaults: further hyper-parameters for `make`; `betas` for b1 and b2, as `OneCycleLR` asks for.
    Raises: TypeError if params is a tensor; what `make` and the transform's init raise: the axis is not bound, the
        ranks disagree, also in the numbers that parameters start from.

    The axes that are bound when the optimizer is built stay bound in its steps. Parameters and moments keep their
    buffers from step to step, errors their tensors. Where the device has kernels for a whole step they take it, see
    `transforms.in_place`; the numbers are the same up to rounding. A step with a NaN or Inf gradient on any rank is
    skipped on all; `skipped` counts them. A parameter that has no gradient on any rank counts as gradient zero and is
    not moved; one that has none on some ranks only is refused, on all ranks.

    Under `torch.amp.GradScaler` and `ShardedGradScaler` the gradients are unscaled before they are averaged or
    encoded, and a rank that finds an Inf makes all ranks skip.
    """

    _step_supports_amp_scaling = True  # a scaler then always calls step, on the ranks that saw an Inf, too

    def __init__(
        self,
        params: Params,
        make: Callable[..., Transform],
        *,
        schedule: Schedule | None = None,
        lr: float | Tensor = 1e-3,
        compile: bool = False,
        max_norm: float | None = None,
        refuse_averaged: bool = True,
        **defaults: Any,
    ):
        self.make = param_groups.check_make(make)
        self.schedule: Schedule = param_groups.check_schedule(always_warm_up if schedule is None else schedule)
        self.steps = 0
        self.states: Tree = ()
        """The transform's state, the live buffers: a tuple with an entry per param group."""
        self.carried: Carried = ()  # see its module: what was undelivered when the number of ranks changed
        self._compile = compile
        self._binding = current_binding()
        self._max_norm = max_norm
        self._doubts = in_doubt(refuse_averaged, schedule is not None)  # whether gradients are each rank's own
        self._axes = self._find_axes()
        self._transports = {axis: self._binding.axes[axis].transport for axis in self._axes}
        self._transforms: list[Transform] = []
        self._lrs: list[Tensor] = []
        self._guarded: list[bool] = []
        self._hypers: list[dict[str, Any]] = []
        self._compiled_at: set[int] = set()  # steps with other hyper-parameters, of updates that are compiled
        self._counts: tuple[Tree, list[Tensor]] = (), []
        self._updates: dict[Phase, Update] = {}
        self._gradients, self._held = Gradients(), Held()
        self.ahead: Callable[[Phase], tuple[Sequence[Staged] | None, Exception | None]] | None = None
        """Set by `fn.adapters.ddp.overlap`: see `Overlap.ahead`."""
        listed = param_groups.as_list(params)
        with self._binding:
            check_listed(self._axes, listed, {"max_norm": max_norm, "compile": compile, **describe(self.schedule)})
        check_max_norm(max_norm, self._axes)
        super().__init__(listed, {"lr": lr, **defaults})
        if isinstance(self.schedule, FreezeWhenStable):
            self._second_moment_norm()
        warn_at_start(self, given=schedule is not None)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: not the transforms and a scheduler's `step`, which would go on with this one."""
        kept = {k: v for k, v in vars(self).items() if k != "step" and not k.startswith(("_optimizer_", "_zero_grad"))}
        return {**kept, "ahead": None, "_updates": {}, "_transforms": [None] * len(self._transforms)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, with transforms of its own."""
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it; no transform takes it
        for index in range(len(self._transforms)):
            self._remake(index)

    def _find_axes(self) -> list[str]:
        """Return the bound axes that `make` names; all of them if it names none that can be seen."""
        named = set(describe(self.make).values())
        return [axis for axis in self._binding.axes if repr(axis) in named] or list(self._binding.axes)

    @property
    def phase(self) -> Phase:
        """Return the phase of the next step.

        Until a transform with a second moment has taken a step, steps are warm-up steps, whatever the schedule says.
        """
        phase = phase_of(self.schedule, self.steps)
        first = self.steps == self.skipped and bool(tree.fields(self.states, "nu"))
        return Phase.WARMUP if first else phase

    @property
    def skipped(self) -> int:
        """Return how many steps were skipped because a gradient was not finite."""
        return max((int(on_host(count)) for count in self._skip_counts()), default=0)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group: its transform is made and its state starts at zero.

        Raises: as the constructor; the optimizer is then as it was.
        """
        before, problem = len(self.param_groups), None
        try:
            try:
                super().add_param_group(param_group)
                refuse_elsewhere(self.param_groups[-1]["params"])
                tree.check_real(self.param_groups[-1]["params"], "params")
                prepared = self._prepare(self.param_groups[-1])
            except Exception as error:
                problem = error
            with self._binding:
                check_accepted(self._axes, before, problem, device_among(self.param_groups))
            self._start(self.param_groups[-1], *prepared)
        except BaseException:
            del self.param_groups[before:]
            raise
        warn_of_late_group(self)

    def _prepare(self, group: dict[str, Any]) -> tuple[Tensor, Transform | None]:
        """Return a group's learning rate as a tensor and its transform; asks no other rank."""
        lr = param_groups.learning_rate(group)
        with self._binding:
            made = self.make(lr=lr, **param_groups.shown(group, self.make))
        return lr, param_groups.check_made(made, self.schedule)

    def _start(self, group: dict[str, Any], lr: Tensor, transform: Transform | None) -> None:
        assert transform is not None
        params = [p.detach() for p in group["params"]]
        with self._binding:
            state = owned(transform.init(params), params)
            guarded = isinstance(state, SkipState)
            if not guarded:  # a chain of the caller's own: guarded like the named ones
                transform = skip_nonfinite(transform)
                state = owned(transform.init(params), params)
            check_start(self._axes, transform, state, group, len(self._transforms))
        param_groups.show_rate(group, lr)
        self._lrs.append(lr)
        self._guarded.append(guarded)
        self._hypers.append(param_groups.hyper_parameters(group, self.make))
        self._transforms.append(transform)
        self.states = (*self.states, state)
        self._updates.clear()

    def _remake(self, index: int) -> None:
        """Make a group's transform again from hyper-parameters that were written into the group; its state stays."""
        with self._binding:
            transform = self.make(lr=self._lrs[index], **self._hypers[index])
        self._transforms[index] = transform if self._guarded[index] else skip_nonfinite(transform)

    @whole_step()
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step from the gradients in `p.grad`.

        Args: closure: recomputes the loss and the gradients, as for torch.
        Returns: what the closure returned.
        Raises: TypeError for sparse or complex gradients; ValueError for a phase that the transform does not have;
            `RanksDisagree` on all ranks for what holds on some ranks only, such as a missing or a sparse gradient;
            `PeerLost` if a rank ends or stops answering. Parameters and state are then as before the step.
        """
        loss = None if closure is None else torch.enable_grad()(closure)()
        phase, problem, skipped = self.phase, self._follow_groups(), self.skipped
        with self._binding, named(self._transports):
            early, changed = (None, None) if self.ahead is None else self.ahead(phase)
            if early is None:
                take(self, phase, problem or changed)
            elif problem is not None:
                raise problem
            else:
                write(self, phase, early)
        self.carried = () if due(self, phase) and self.skipped == skipped else self.carried
        self.steps += 1
        if isinstance(self.schedule, FreezeWhenStable) and phase is Phase.WARMUP:
            self.schedule.observe(self.steps - 1, self._second_moment_norm() if self.skipped == skipped else None)
        warn_of_jumps(self, phase)
        if early is not None and changed is not None:
            raise changed
        return loss

    def _joined(self) -> Transform:
        """Return the transform of all param groups, whose state is `self.states`."""
        return together(self._transforms)

    @torch.no_grad()
    def stage_group(self, index: int, phase: Phase, grads: list[Tensor]) -> Staged:
        """Take a step of a param group up to where it would be written. Nothing is changed.

        Args: index: of the group. phase: of the step. grads: one per parameter. The axes must be bound.
        """
        params = self.param_groups[index]["params"]
        update = self._transforms[index].update(phase)
        if self._gradients.absent and isinstance(update, InPlace):  # as `take` does
            update = update.pure
        (grads,) = added(due(self, phase)[index : index + 1], (grads,))
        return stage(update, grads, self.states[index], params)

    def _skip_counts(self) -> list[Tensor]:
        if self._counts[0] is not self.states:  # a walk through all states takes longer than a small step
            self._counts = self.states, tree.fields(self.states, "skipped")
        return self._counts[1]

    def _follow_groups(self) -> Exception | None:
        """Take over what was written into the param groups since the last step; return why that is not possible."""
        for i, (group, lr) in enumerate(zip(self.param_groups, self._lrs, strict=True)):
            before = self._hypers[i]
            try:
                param_groups.follow(group, lr)
                hyper = param_groups.current(group, before, self.make)
                if not param_groups.same(hyper, before):
                    if self._compile:
                        check_changes(before, hyper, self._compiled_at, self.steps)
                    self._hypers[i] = hyper
                    self._remake(i)
                    self._updates.clear()
            except Exception as error:  # not raised here, where the other ranks would wait
                self._hypers[i] = before
                return error
        return None

    def _second_moment_norm(self) -> float:
        moments = tree.fields(self.states, "nu")
        if not moments:
            raise ValueError("schedule: freeze_when_stable needs a transform whose state has a second moment `nu`")
        if any(dim == 0 for dims in tree.fields(rank_dims(self.states), "nu") for dim in tree.leaves(dims)):
            raise ValueError("schedule: freeze_when_stable needs a second moment that all ranks hold; this is sharded")
        return sum(float(leaf.abs().double().sum()) for nu in moments for leaf in tree.leaves(nu))

    def state_dict(self) -> dict[str, Any]:
        """Return everything that continues the training, as a flat {path: tensor}.

        Elsewhere it continues without this rank's errors, whose paths name it; `fn.adapters.checkpoint` keeps all.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        found: dict[str, Any] = of_rank(self)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, found)
            found = found if changed is None else changed
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, bit for bit.

        Raises: ValueError that names the first path that is missing, unexpected or of another shape or dtype;
            nothing is loaded then.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, dict(state_dict))
            state_dict = state_dict if changed is None else changed
        restore_of_rank(self, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)
