"""`fn.Optimizer`: any transform behind the interface of `torch.optim`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters.labels import Labels
from fn.adapters.optim import param_groups
from fn.adapters.optim.consistency import (
    LOCAL_STEP_TAKEN,
    check_accepted,
    check_fragments,
    check_listed,
    device_among,
    refuse_elsewhere,
)
from fn.adapters.optim.donate import warm_kernels
from fn.adapters.optim.exchange import exchange
from fn.adapters.optim.gradients import check_max_norm, in_doubt
from fn.adapters.optim.param_groups import check_params
from fn.adapters.optim.signals import defer_signals, stoppable
from fn.adapters.optim.state_dict import of_rank, restore_of_rank
from fn.adapters.optim.step import stage_group, take, write
from fn.adapters.optim.training import Training
from fn.adapters.optim.warnings import (
    is_due,
    warn_at_start,
    warn_of_jumps,
    warn_of_late_group,
    warn_of_skips,
    watch_exchange,
    watch_local_steps,
)
from fn.base import Phase, Round, Transform, facts_of
from fn.collectives.agreement import describe
from fn.collectives.axis import Binding, current_binding, in_turn
from fn.collectives.transports.failure_detection import raising_peer_lost
from fn.inplace.protocol import Staged
from fn.schedules import FreezeWhenStable, Schedule, always_warm_up
from fn.transforms.momentum_codes import MomentumCodes

Tree = Any
UNMOVED = "parameters and state are as before the step"
"""What a loss leaves in a step."""

Params = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


def _of_training(name: str, meaning: str) -> Any:
    """Return a property that reads and writes a field of `training`."""

    def read(self: Optimizer) -> Any:
        return getattr(self.training, name)

    def write(self: Optimizer, value: Any) -> None:
        setattr(self.training, name, value)

    return property(read, write, doc=meaning)


class Optimizer(torch.optim.Optimizer):
    """Drive a transform as a `torch.optim.Optimizer`; gradients are each rank's own.

        with fn.bind(mesh):
            opt = fn.Optimizer(model.parameters(), partial(fn.onebit_adam, axis="data"),
                               schedule=fn.freeze_after(1000), lr=1e-3)
        loss.backward(); opt.step(); opt.zero_grad()

    Args:
        params: parameters, named parameters or param groups, as for torch. A group's own keys override the defaults.
        make: (lr=tensor, **hyper-parameters) -> Transform, called once per param group, in which its numbers are shown.
        schedule: step -> Phase or Round, steps from 0, alike on all ranks. None: always warm-up, for what does not
            compress.
        lr: the learning rate, a number or a 0-d tensor, which is copied and which torch's schedulers then fill in
            place. What is written into `group["lr"]` takes effect in the next step, and so do other hyper-parameters
            of a group, for which the transform is made again.
        compile: run the update of each phase through `torch.compile`, anew if a number but lr changes.
        max_norm: clip by the global norm over all groups: of the averaged gradient in an exact warm-up, by a norm that
            the ranks agree on where codes travel (see `fn.adapters.optim.gradients`). None: do not clip.
        refuse_averaged: raise a ValueError if the first compressed step finds the same gradients on all ranks, which
            something averaged before, such as DDP without `fn.adapters.ddp.keep_local`; the first warm-up step warns.
            In the first exchange of a round no two ranks may have the same: DDP may average within an island only.
        momentum_as_codes: keep the momentum of `fn.onebit_adam` as two bits per element from the first compressed step
            on, see `fn.momentum_as_codes`: the same numbers in less memory. `states` and checkpoints have it in
            float32, in which it stays until the next step.
        **defaults: further hyper-parameters for `make`; b1 and b2 are shown as torch's `betas`, and may be given so.
            labels=fn.labels_of(model) becomes the labels of each group's parameters.
    Raises: TypeError if params is a tensor; what `make` and the transform's init raise: the axis is not bound, the
        ranks disagree, also in the numbers that parameters start from.

    The axes that are bound when the optimizer is built stay bound in its steps. Parameters and moments keep their
    buffers from step to step, errors their tensors. Where the device has kernels for a whole step they take it, see
    `fn.inplace`; the numbers are the same up to rounding. A step with a NaN or Inf gradient on any rank is
    skipped on all; `skipped` counts them. A parameter that has no gradient on any rank counts as gradient zero and is
    not moved; one that has none on some ranks only is refused, on all ranks.

    In rounds, such as those of `fn.diloco`, gradients are each rank's own. Nobody is asked about them, `max_norm` is of
    their own norm, and a step that is not finite is left out by that rank alone. Parameters of FSDP2 are stepped on
    shard by shard, see `fn.adapters.optim.local_shards`.

    Under `torch.amp.GradScaler` and `ShardedGradScaler` the gradients are unscaled before they are averaged or
    encoded, and a rank that finds an Inf makes all ranks skip.

    >>> import torch, fn
    >>> p = torch.nn.Parameter(torch.zeros(2))
    >>> opt = fn.Optimizer([p], fn.adamw, lr=0.1)
    >>> for grad in ([1.0, -2.0], [1.0, float("nan")]):
    ...     p.grad = torch.tensor(grad)
    ...     opt.step()
    >>> [round(x, 4) for x in p.tolist()], opt.steps, opt.skipped
    ([-0.1, 0.1], 2, 1)
    """

    _training_class = Training
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
        momentum_as_codes: bool = False,
        **defaults: Any,
    ):
        make = param_groups.check_make(make)
        schedule_given, schedule = schedule is not None, always_warm_up if schedule is None else schedule
        binding = current_binding()
        listed = param_groups.as_list(params)
        axes = _axes_of(make, binding, listed, {"lr": lr, **defaults})
        self.training = self._training_class(
            make, param_groups.check_schedule(schedule), binding, axes, max_norm, compile,
            in_doubt(refuse_averaged, schedule_given), momentum_as_codes=momentum_as_codes,
        )  # fmt: skip
        """What is trained and where it stands, which everything that helps this optimizer works on."""
        with binding:
            check_listed(axes, listed, {"max_norm": max_norm, "compile": compile, **describe(self.schedule)})
        check_max_norm(max_norm, axes)
        param_groups.spell_betas(defaults, make, {})
        super().__init__(listed, {"lr": lr, **defaults})
        if isinstance(self.schedule, FreezeWhenStable):
            self.training.second_moment_norm()
        check_fragments(self.schedule, self.states)
        warn_at_start(self.training, given=schedule_given)
        warm_kernels(self.states, (p for group in self.param_groups for p in group["params"]))

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy needs: not a scheduler's `step`, which would go on with this one."""
        return {k: v for k, v in vars(self).items() if k != "step" and not k.startswith(("_optimizer_", "_zero_grad"))}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, with transforms of its own."""
        super().__setstate__(state)
        self.defaults.pop("differentiable", None)  # torch adds it; no transform takes it
        self.training.groups = self.param_groups
        for index in range(len(self.training.transforms)):
            self.training.remake(index)

    make: Callable[..., Transform] = _of_training("make", "What makes the transform of a param group.")
    schedule: Schedule = _of_training("schedule", "Step -> Phase.")
    steps: int = _of_training("steps", "Steps taken, skipped ones included.")
    skipped_in_a_row: int = _of_training("skipped_in_a_row", "Steps skipped in a row, but for local ones.")
    ahead: Any = _of_training("ahead", "Set by `fn.adapters.ddp.overlap`, which takes steps behind the backward pass.")

    @property
    def phase(self) -> Phase:
        """Return the phase of the next step; of a round, whether something is exchanged in it.

        Until a step was taken, a phase that needs a warm-up step before it is one, whatever the schedule says.
        """
        return self.training.phase.phase

    @property
    def states(self) -> Tree:
        """Return the transform's state, live buffers: a tuple with an entry per param group.

        A mean that has begun in a round, to be taken over some steps later, is waited for.
        """
        self.training.settle()
        return self.training.states

    @states.setter
    def states(self, value: Tree) -> None:
        self.training.states = value
        self.training.in_codes = bool(tree.instances(value, MomentumCodes))

    @property
    def skipped(self) -> int:
        """Return how many steps, and exchanges of rounds, all ranks left out because they were not finite."""
        return self.training.skipped + self.training.left_out

    @property
    def dropped(self) -> int:
        """Return how many local steps this rank alone left out because they were not finite."""
        return self.training.dropped

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a param group: its transform is made and its state starts at zero.

        Raises: as the constructor; the optimizer is then as it was.
        """
        training = self.training
        training.check_own_params("add_param_group")
        before, sharded_before = len(self.param_groups), len(training.shards.pairs)
        problem, strided = None, list[str]()
        try:
            try:
                if isinstance(param_group, dict):
                    param_groups.spell_betas(param_group, self.make, self.defaults)
                super().add_param_group(param_group)
                group = self.param_groups[-1]
                named = {name: value for name, value in group.items() if isinstance(value, Labels)}
                group.update({name: labels.of(group["params"]) for name, labels in named.items()})
                refuse_elsewhere(group["params"])
                group["params"] = training.shards.of(group["params"], training.axes, training.binding)
                tree.check_real(group["params"], "params")
                check_params(self.param_groups)
                prepared = training.prepare(group)
                names = param_groups.names_of(group)
                strided = [name for name, p in zip(names, group["params"], strict=True) if not p.is_contiguous()]
            except Exception as error:  # told to the other ranks, which would wait for this one where states are made
                problem = error
            with training.binding:
                check_accepted(training.axes, before, problem, device_among(self.param_groups), strided)
            training.groups = self.param_groups
            training.start(group, *prepared)
        except BaseException:
            del self.param_groups[before:], training.shards.pairs[sharded_before:]
            raise
        warn_of_late_group(training)

    @defer_signals()
    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step from the gradients in `p.grad`.

        Args: closure: recomputes the loss and the gradients, as for torch.
        Returns: what the closure returned.
        Raises: TypeError for sparse or complex gradients; ValueError for a phase that the transform does not have;
            `RanksDisagree` on all ranks for what holds on some ranks only, such as a missing or a sparse gradient, or
            an exchange of another fragment;
            `PeerLost` if a rank ends or stops answering; RuntimeError while another thread is inside of a step over the
            same process group. Parameters and state are then as before the step; if the exchange of a round fails, as
            after its local step, which counts. RuntimeError if a kernel raises while the step is written: parameters
            and state may then be half of it, and steps and saves are refused until a checkpoint is loaded.
        """
        training = self.training
        training.check_own_params("step")
        training.check_whole("step")
        loss = None if closure is None else torch.enable_grad()(closure)()
        training.groups = self.param_groups
        training.shards.take_gradients()
        training.scale = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        problem, phase = training.follow_groups(), training.phase
        transports, staged, changed = training.transports, None, None
        shared = {axis: wire for axis, wire in transports.items() if training.binding.axes[axis].size > 1}
        exchanged = phase if isinstance(phase, Round) and phase != Round() else None
        # A round is written twice. Its local step is whole and counted before its exchange waits for other ranks: there
        # a signal may raise.
        with nullcontext() if exchanged is None else defer_signals():
            with in_turn(shared), training.binding, raising_peer_lost(transports, left=UNMOVED):
                if isinstance(phase, Phase) and training.ahead is not None:
                    staged, changed = training.ahead(phase)
                if staged is None:
                    moved = take(training, phase, problem or changed)  # which tells the other ranks of a problem
                elif problem is None:
                    moved = write(training, phase.phase, staged)
                else:
                    raise problem
            training.count(phase, moved)
            if phase.phase is Phase.LOCAL or isinstance(phase, Round):
                watch_local_steps(training, phase)
        if exchanged is not None:
            left_out, left = training.left_out, raising_peer_lost(transports, left=LOCAL_STEP_TAKEN)
            with stoppable(), in_turn(shared), training.binding, left:
                exchange(training, exchanged)
            with training.binding, raising_peer_lost(transports):
                watch_exchange(training, exchanged, left_out)
        warn_of_jumps(training, phase)
        if moved and phase is Phase.COMPRESSED:  # else the momentum is as it was
            training.keep_momentum(phase)
        if phase.phase is not Phase.LOCAL and is_due(training.skipped_in_a_row):
            with training.binding, raising_peer_lost(transports):
                warn_of_skips(training)
        if staged is not None and changed is not None:  # the step was written all the same: the other ranks wrote it
            raise changed
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as torch's optimizers do."""
        super().zero_grad(set_to_none)
        self.training.shards.zero_grad(set_to_none)

    def stage_group(self, index: int, phase: Phase, grads: list[Tensor]) -> Staged:
        """Take a step of a param group up to where it would be written. Nothing is changed.

        Args: index: of the group. phase: of the step. grads: one per parameter. The axes must be bound.
        """
        return stage_group(self.training, index, phase, grads)

    def state_dict(self) -> dict[str, Any]:
        """Return everything that continues the training, as a flat {path: tensor}.

        Elsewhere it continues without this rank's errors, whose paths name it; `fn.adapters.checkpoint` keeps all.
        """
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state_dict: dict[str, Any] = of_rank(self.training)
        for after in self._optimizer_state_dict_post_hooks.values():
            changed = after(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned, bit for bit.

        Raises: ValueError that names the first path that is missing, unexpected or of another shape, dtype or layout,
            or whose number is out of range; TypeError for keys that are no strings; nothing is loaded then.
        """
        self.training.check_own_params("load_state_dict")
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            changed = before(self, dict(state_dict))
            state_dict = state_dict if changed is None else changed
        restore_of_rank(self.training, state_dict)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def _axes_of(
    make: Callable[..., Transform], binding: Binding, listed: list[Any], defaults: dict[str, Any]
) -> list[str]:
    """Return the bound axes over which the transforms of the param groups communicate; all of them if there are none.

    Of params of FSDP2, which averages their gradients itself, an optimizer may communicate over none. Also all if one
    cannot be made: what is wrong with it is said, and told to other ranks, where it is made for good.
    """
    groups = param_groups.groups_of(listed)
    members = [p[1] if isinstance(p, tuple) else p for group in groups for p in group["params"]]
    has_shards = any(hasattr(p, "device_mesh") for p in members)
    if len(binding.axes) < 2 and not has_shards:
        return list(binding.axes)  # there is nothing to choose, so `make` is called once only
    named = set[str]()
    for group in groups:
        try:
            with binding:
                spelled = {**defaults, **{k: v for k, v in group.items() if k != "params"}}
                param_groups.spell_betas(spelled, make, {})
                lr = torch.as_tensor(spelled["lr"], dtype=torch.float32, device="cpu")
                made = make(lr=lr, **param_groups.hyper_parameters(spelled, make))
                named |= {*facts_of(made).axes}
        except Exception:
            return list(binding.axes)
    return [axis for axis in binding.axes if axis in named] or ([] if has_shards else list(binding.axes))
