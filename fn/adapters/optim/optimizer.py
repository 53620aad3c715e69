"""`fn.Optimizer`: any transform behind the interface of `torch.optim`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.labels import Labels
from fn.adapters.optim import gradients, groups
from fn.adapters.optim.core import (
    TORN,
    Core,
    Grads,
    count_of,
    device_of,
    follow_members,
    land,
    skipped,
    stage_exchange,
    versions_of,
)
from fn.adapters.optim.exchange_header import LOCAL_STEP_TAKEN
from fn.adapters.optim.hooks import agree, watch, written
from fn.adapters.optim.shards import (
    are_divided,
    check_divided,
    check_placed,
    division_of,
    has_dtensors,
    pieces,
)
from fn.adapters.optim.state_dict import Elsewhere, of_rank, refuse_layout, restore_of_rank
from fn.adapters.optim.units import Unit
from fn.arguments import check_flag, check_is_transform
from fn.base import Guarded, Phase, Round, Transform, facts_of, has_phase
from fn.collectives import agreement
from fn.collectives.axis import Binding, current_binding
from fn.collectives.background import Background
from fn.errors import RefusedByAll, expected
from fn.inplace.memory import owned
from fn.kernels.table import warm_kernels
from fn.schedules import Schedule, always_warm_up, phase_of, phases_of
from fn.transforms.skip_nonfinite import skip_nonfinite

Tree = Any
Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class Optimizer(Core):
    """Drive a transform as a `torch.optim.Optimizer`; gradients are each rank's own.

        with fn.bind(mesh):
            opt = fn.Optimizer(model.parameters(), partial(fn.onebit_adam, axis="data"),
                               schedule=fn.freeze_after(1000), lr=1e-3)
        loss.backward(); opt.step(); opt.zero_grad()

    Args:
        params: parameters, named parameters or param groups, as for torch. A group's own keys override the defaults.
            Those that do not require gradients are left out.
        make: (lr=tensor, **hyper-parameters) -> Transform, called once per param group, in which its numbers are shown.
        schedule: step -> Phase or Round, steps from 0, alike on all ranks. None: always warm-up, for what does not
            compress.
        lr: the learning rate, a number or a 0-d tensor, which is copied and which torch's schedulers then fill in
            place. What is written into `group["lr"]` takes effect in the next step, and so do other hyper-parameters
            of a group, for which the transform is made again.
        max_norm: clip by the global norm over all groups: of the averaged gradient in an exact warm-up, by a norm that
            the ranks agree on where codes travel (see `fn.adapters.optim.gradients`). A script that clips before the
            step is warned. None: do not clip.
        refuse_averaged: raise a ValueError if the first compressed step finds the same gradients on all ranks, which
            something averaged before, such as DDP without `fn.adapters.ddp.keep_local`; the first warm-up step warns.
            In the first exchange of a round no two ranks may have the same: DDP may average within an island only.
        **defaults: further hyper-parameters for `make`; b1 and b2 are shown as torch's `betas`, and may be given so.
            labels=fn.labels_of(model) becomes the labels of each group's parameters.
    Raises: TypeError if params is a tensor; what `make` and the transform's init raise: the axis is not bound, the
        ranks disagree, also in the numbers that parameters start from.

    The axes that are bound when the optimizer is built stay bound in its steps. Parameters and moments keep their
    buffers from step to step. Where the device has kernels for a whole step they take it, see `fn.inplace`; the numbers
    are the same up to rounding. A step with a NaN or Inf gradient on any rank is skipped on all; `skipped` counts them.

    A parameter without a gradient counts as gradient zero on that rank; where the optimizer has no axis of more than
    one rank it stays as it is, as in torch. So does one whose `requires_grad` is switched off, on all ranks alike.

    In rounds, such as those of `fn.diloco`, `max_norm` is of each rank's own gradients, and a step that is not finite
    is left out by that rank alone. Parameters of FSDP2 are stepped on piece by piece, see `fn.adapters.optim.shards`.

    >>> import torch, fn
    >>> p = torch.nn.Parameter(torch.zeros(2))
    >>> opt = fn.Optimizer([p], fn.adamw, lr=0.1)
    >>> for grad in ([1.0, -2.0], [1.0, float("nan")]):
    ...     p.grad = torch.tensor(grad)
    ...     opt.step()
    >>> [round(x, 4) for x in p.tolist()], opt.steps, opt.skipped
    ([-0.1, 0.1], 2, 1)
    """

    plans = False
    """Whether it says behind an exchange when the next one is, to a schedule that asks."""

    def __init__(
        self,
        params: Params,
        make: Callable[..., Transform],
        *,
        schedule: Schedule | None = None,
        lr: float | Tensor = 1e-3,
        max_norm: float | None = None,
        refuse_averaged: bool = True,
        **defaults: Any,
    ):
        check_flag("refuse_averaged", refuse_averaged)
        self.make, self.arguments = groups.check_make(make), groups.arguments_of(make)
        self.untrained: list[tuple[str, Tensor]] = []  # what required no gradients, and has no state
        # phases whose first step looks at its gradients
        self.doubts = {Phase.WARMUP, Phase.COMPRESSED} if refuse_averaged else set[Phase]()
        self.taken = set[Phase]()  # phases of the steps so far
        self.clipped_before = gradients.ClippedBefore()
        given, schedule = schedule is not None, check_schedule(always_warm_up if schedule is None else schedule)
        binding, listed = current_binding(), groups.as_list(params)
        axes = axes_of(self.make, binding, listed, {"lr": lr, **defaults})
        with binding, agreement.calling(agreement.CONSTRUCTION, axes, agreement.device_of(listed)):
            # Before super().__init__ makes states, which communicates: ranks with other groups would wait there.
            agree.check_listed(axes, listed, {"max_norm": max_norm, **agreement.describe(schedule)})
            gradients.check_max_norm(max_norm)
            groups.spell_betas(defaults, self.arguments)
            rate = {"lr": lr, **defaults}
            super().__init__(listed, rate, schedule=schedule, binding=binding, axes=axes, max_norm=max_norm)
        self.state = Elsewhere(dict)
        watch.at_start(self, given=given)
        warm_kernels(self.param_groups, compress=bool(roles.find(self.states, "errors")))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group: its transform is made and its state starts at zero.

        Raises: as the constructor; the optimizer is then as it was.
        """
        self.check_free("add_param_group")
        with self.binding, agreement.calling("add_param_group", agree.axes_of_calls(self), device_of(self)):
            self._add(param_group)
        watch.late_group(self)

    def _add(self, param_group: dict[str, Any]) -> None:
        before, frozen, problem, unit = len(self.param_groups), self.untrained, None, None
        try:
            try:
                follow_members(self)
                groups.spell_betas(param_group, self.arguments, self.defaults)
                super().add_param_group(param_group)
                unit = self.prepared(self.param_groups[-1])
            except Exception as error:  # told to the other ranks, which would wait for this one where states are made
                problem = error
            with self.binding:  # which has the axis of shards by now
                agree.check_accepted(self.axes, before, problem, self.param_groups)
            # `check_accepted` has raised where there is a problem.
            assert unit is not None
            self.start(unit)
        except BaseException:
            # torch has appended the group by now.
            del self.param_groups[before:]
            self.untrained = frozen
            raise

    def prepared(self, group: dict[str, Any]) -> Unit:
        """Return a param group as a unit without a state; asks no other rank."""
        params, names = group["params"], groups.names_of(group)
        for name, x in group.items():
            if isinstance(x, Labels):
                group[name] = x.of(p for p in params if p.requires_grad)
        tree.check_real(pieces(params), "params")
        left, come = [p.requires_grad for p in params], {id(p) for p in params}
        # Parameters that are added again are not frozen any more, or are noted anew in the next line.
        self.untrained = [(name, p) for name, p in self.untrained if id(p) not in come]
        self.untrained += [(name, p) for name, p, trained in zip(names, params, left, strict=True) if not trained]
        for key in ("params", "param_names"):
            if key in group:
                group[key] = [x for x, trained in zip(group[key], left, strict=True) if trained]
        check_placed(group["params"], self.axes, self.binding)
        groups.check_params(self.param_groups)
        rate = groups.new_rate(group)
        groups.show_defaults(group, self.make)
        # Made before the ranks say whether they accept the group: what one of them refuses, all hear of.
        transform = self.made([group], [rate])
        check_divided(transform, group["params"])
        check_fits(transform, self.schedule)
        if hasattr(self.schedule, "plan") and not self.plans:
            cure = "use fn.adapters.torchft.optimizer, whose islands tell each other their seconds a step"
            wanted = "steps that are alike on all ranks, as those of fn.every are"
            raise ValueError(expected("schedule", wanted, type(self.schedule).__name__, cure))
        if problem := gradients.apart_in(transform, first_and_later(transform, self.schedule)):
            raise ValueError(problem)
        return Unit(transform, [group], [rate], self.made_of([group]))

    def made_of(self, given: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the hyper-parameters that the transform of a unit is made with, but for the learning rates."""
        return groups.hyper_parameters(given[0], self.arguments)

    def made(self, given: list[dict[str, Any]], rates: list[Tensor]) -> Transform:
        """Return the guarded transform that `make` makes for one param group; it is given `shards` if it takes them."""
        (group,), (rate,) = given, rates
        argument, more = self.arguments.get("shards"), {}
        division = division_of(group["params"]) if argument is not None and argument.default is None else None
        if division is not None:
            self.binding, more = division.bound(self.binding), {"shards": division.shards}
        if self.max_norm is not None and are_divided(group.get("params", ())):
            self.binding = (division or division_of(group["params"])).bound(self.binding)  # type: ignore[union-attr]
        with self.binding:
            transform = self.make(lr=rate, **{**more, **groups.hyper_parameters(group, self.arguments)})
            check_is_transform("make's result", transform)
            if are_divided(group.get("params", ())) and facts_of(transform).axes:
                # Ages that begin with the first gradient would differ between the pieces of a tensor, and so the ranks.
                init = transform.init
                transform = transform._replace(init=lambda p: roles.replace(init(p), "rested", lambda counts: ()))
            guarded = isinstance(transform.warmup_update, Guarded)
        return transform if guarded else skip_nonfinite(transform)

    def start(self, unit: Unit) -> None:
        """Make the state of a unit, compare with the other ranks where it starts from, and take it in."""
        params = tree.map(Tensor.detach, unit.params)
        with self.binding:
            unit.state = owned(unit.transform.init(params), params)
            agree.check_paths(unit.state)
            agree.check_start(self.axes, unit, len(self.units))
        self.states  # noqa: B018  # means that are on their way know the places of the leaves that there were
        unit.versions, unit.has_copies = versions_of(unit), bool(unit.copies)
        self.units.append(unit)
        self.updates.clear()

    def follow_groups(self) -> None:
        """Take over what was written into the param groups since the last step."""
        super().follow_groups()
        refuse_thawed(self.untrained)
        with self.binding:  # an overlap comes here from the backward pass
            written.follow_params(self)
        for g, unit in enumerate(self.units):
            for group, rate in zip(unit.groups, unit.rates, strict=True):
                groups.check_writable(group, g)
                groups.follow_rate(group, rate)
            hyper = self.made_of(unit.groups)
            for name in unit.hyper.keys() - hyper.keys():
                cure = "change it, but do not take it out"
                raise ValueError(expected(name, "a value in its param group", "none", cure))
            if not groups.same(hyper, unit.hyper):
                unit.transform, unit.hyper = self.made(unit.groups, unit.rates), hyper
                self.updates.clear()

    def check_phase(self, phase: Phase) -> None:
        """Refuse a phase that leaves out an average of those before it, where only the schedule itself knew of it."""
        for unit in self.units:
            # A phase that a transform lacks is refused by name when its update is asked for.
            apart = gradients.apart_in(unit.transform, {*self.taken, phase})
            if apart and has_phase(unit.transform, phase):
                raise RefusedByAll(apart)
        self.taken.add(phase)

    def check_group(self, unit: Unit, group: dict[str, Any]) -> None:
        """Raise the error that a step would raise if a param group of a unit held these entries."""
        self.made([group], unit.rates[:1])

    def gradients(self, phase: Phase | Round) -> Grads:
        """Return the gradients of a step, unscaled: zeros where there is none."""
        grads = super().gradients(phase)
        gradients.check_kinds(grads, [groups.names_of(group) for group in self.param_groups])
        # Unscaled before they are looked at or clipped: the ranks' scales may differ.
        grads = gradients.unscaled(grads, getattr(self, "grad_scale", None), getattr(self, "found_inf", None))
        if isinstance(phase, Phase) and phase in self.doubts:
            averaged = {axis for unit in self.units for axis in gradients.averaged_in(unit.transform, phase)}
            axes = [axis for axis in self.axes if axis in averaged]
            if gradients.look_at_first(grads, phase, axes, compresses=self.schedule is not always_warm_up):
                self.doubts.discard(phase)
        if self.max_norm is not None:
            members = [p for unit in self.units for p in unit.members]
            self.clipped_before.look(members, grads, float(self.max_norm))
        return grads

    def exchange(self, round_: Round) -> None:
        """Take what follows the local step of a round, among the ranks that are bound."""
        if round_.begin is not None and Phase.COMPRESSED in self.doubts:
            outside, is_late = self.exchange_axes, bool(roles.find([unit.state for unit in self.units], "taken"))
            # This looks ahead of the exchange, whose header comes later, or on a group of its own.
            with agreement.calling(agreement.EXCHANGE, outside, device_of(self), left=LOCAL_STEP_TAKEN):
                agree.check_islands(self)
                grads = super().gradients(round_)
                if gradients.look_at_shared(grads, outside, LOCAL_STEP_TAKEN, is_late=is_late):
                    self.doubts.discard(Phase.COMPRESSED)
        stage_exchange(self, round_).commit()

    @property
    def phase(self) -> Phase:
        """Return the phase of the next step; of a round, whether something is exchanged in it.

        Until a step was taken, a phase that needs a warm-up step before it is one, whatever the schedule says.
        """
        return self.next_phase.phase

    @property
    def progress(self) -> float:
        """Return the steps so far, all islands alike: in rounds of unequal steps the mean of those that were sent."""
        return float(getattr(self.schedule, "progress", self.steps))

    @property
    def skipped(self) -> int:
        """Return how many steps, and exchanges of rounds, all ranks left out because they were not finite."""
        return skipped(self) + count_of(self, "left_out")

    @property
    def dropped(self) -> int:
        """Return how many local steps this rank alone left out because they were not finite."""
        return count_of(self, "dropped")

    def state_dict(self) -> dict[str, Any]:
        """Return everything that continues the training, as a flat {path: tensor}.

        Elsewhere it continues without this rank's errors, whose paths name it; `fn.adapters.checkpoint` keeps all.
        """
        refuse_layout()
        # torch runs these hooks in its own state_dict, which is not called here.
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict: dict[str, Any] = of_rank(self)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, bit for bit.

        Raises: ValueError that names the first path that is missing, unexpected or of another shape, dtype or layout,
            or whose number is out of range; TypeError for keys that are no strings; nothing is loaded then.
        """
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            # A copy, as torch makes one: a hook may change it, and the caller's stays as it is.
            changed = before(self, dict(state_dict))
            state_dict = state_dict if changed is None else changed
        restore_of_rank(self, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes that a copy needs: none that hold on to this one's learning rates, nor its hooks."""
        land(self)
        of_this_one = {"step", "arguments", "updates", "staged", "flights", "background", "ahead", "log"}
        kept = {k: v for k, v in vars(self).items() if k not in of_this_one}
        kept = {k: v for k, v in kept.items() if not k.startswith(("_optimizer_", "_zero_grad"))}
        # A transform closes over the learning rates of this optimizer; the copy makes one over its own, and finds anew
        # which parts of its state belong to which parameters.
        nothing_found: dict[str, Any] = {name: [] for name in ("places", "parts", "divided", "residuals")}
        units = [replace(unit, transform=None, **nothing_found) for unit in self.units]  # type: ignore[arg-type]
        return {**kept, "units": units}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, with transforms, learning rates and default hooks of its own."""
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it; no transform takes it
        self.arguments = groups.arguments_of(self.make)
        self.refused = TORN if self.refused == TORN else ""  # a copy may step inside of `agreed_params`
        self.updates, self.staged, self.flights, self.ahead, self.background = {}, {}, [], None, Background()
        self.remake()
        watch.register(self)

    def remake(self) -> None:
        """Make all transforms anew, from what the param groups hold."""
        for unit in self.units:
            unit.transform, unit.versions = self.made(unit.groups, unit.rates), versions_of(unit)
        self.updates.clear()


def check_schedule(schedule: Schedule) -> Schedule:
    """Return a schedule as it is. Raises TypeError if it is no function, ValueError if it gives no phase."""
    if not callable(schedule):
        wanted = "a function, such as fn.freeze_after(1000)"
        raise TypeError(expected("schedule", wanted, type(schedule).__name__))
    phase_of(schedule, 0)
    return schedule


def check_fits(transform: Transform, schedule: Schedule) -> None:
    """Refuse a schedule whose phases or rounds a transform does not have, with a ValueError.

    A schedule of this library says now what it comes to; a step would say so after thousands of others.
    """
    # `composed` raises for a phase that the transform does not have.
    for phase in phases_of(schedule):
        try:
            transform.composed(phase)
        except ValueError as error:
            kind = type(schedule).__name__
            raise ValueError(f"schedule: is {kind}, which does not fit this optimizer; {error}") from error
    if transform.exchange is not None:
        transform.exchange.check(schedule)


def first_and_later(transform: Transform, schedule: Schedule) -> set[Phase]:
    """Return the phases that a schedule of this library comes to; of any other function, that of the first step."""
    first = phase_of(schedule, 0).phase
    return {Phase.WARMUP if first in transform.needs_warmup else first, *phases_of(schedule)}


def refuse_thawed(frozen: list[tuple[str, Tensor]]) -> None:
    """Refuse a step in which a parameter requires gradients that has no state, with a ValueError that names it.

    As `requires_grad` is switched on all ranks alike, none of them falls silent: the cure needs their connections.
    """
    for name, p in frozen:
        if p.requires_grad:
            wanted = f"parameter {name} to go on without gradients, as when the optimizer was made: it has no state"
            cure = "call add_param_group with it on all ranks"
            raise RefusedByAll(expected("requires_grad", wanted, "one that requires them", cure))


def axes_of(make: Callable[..., Transform], binding: Binding, listed: list[Any], defaults: dict[str, Any]) -> list[str]:
    """Return the bound axes over which the transforms of the param groups communicate; all of them if there are none.

    Of params of FSDP2, which averages their gradients itself, an optimizer may communicate over none. Also all if one
    cannot be made: what is wrong with it is said, and told to other ranks, where it is made for good.
    """
    given = groups.groups_of(listed)
    members = [p[1] if isinstance(p, tuple) else p for group in given for p in group["params"]]
    has_shards = has_dtensors(members)
    if len(binding.axes) < 2 and not has_shards:
        return list(binding.axes)  # there is nothing to choose, so `make` is called once only
    named, arguments = set[str](), groups.arguments_of(make)
    for group in given:
        try:
            with binding:
                spelled = {**defaults, **{k: v for k, v in group.items() if k != "params"}}
                groups.spell_betas(spelled, arguments)
                lr = torch.as_tensor(spelled["lr"], dtype=torch.float32, device="cpu")
                named |= {*facts_of(make(lr=lr, **groups.hyper_parameters(spelled, arguments))).axes}
        except Exception:
            return list(binding.axes)
    return [axis for axis in binding.axes if axis in named] or ([] if has_shards else list(binding.axes))
