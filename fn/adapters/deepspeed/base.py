"""What the drop-ins for DeepSpeed's optimizers share: one transform over all groups, the engine's switch, restarts."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fn.adapters.deepspeed import transforms as numerics
from fn.adapters.deepspeed.checkpoint import load_checkpoint
from fn.adapters.optim.donate import write_back
from fn.adapters.optim.optimizer import Optimizer, Params
from fn.adapters.optim.param_groups import checked_rate, host_tensor, show_rate
from fn.adapters.optim.training import Training
from fn.base import Phase, Transform
from fn.collectives.axis import Binding, axis_size, bind
from fn.collectives.transports.mpi import Communicator
from fn.errors import expected
from fn.schedules import Schedule

Tree = Any
Group = dist.ProcessGroup | Communicator
AXIS = "data"


class DeepSpeedTraining(Training):
    """A training whose transform spans all param groups and is made from them when an update is."""

    built = False
    """Whether there is a state, to which a new group's entry is added."""

    def prepare(self, group: dict[str, Any]) -> tuple[Tensor, Transform | None]:
        """Return a group's learning rate as a tensor; the transform is that of all groups."""
        return host_tensor(group["lr"], torch.float32).detach().clone(), None

    def start(self, group: dict[str, Any], lr: Tensor, transform: Transform | None) -> None:
        """Take a group in; its state is made once the optimizer is built."""
        show_rate(group, lr)
        self.lrs.append(lr)
        self.hypers.append({k: v for k, v in group.items() if k not in ("params", "lr", "initial_lr", "param_names")})
        if self.built:
            with self.binding:
                self.states = (*self.states, self.fresh_states()[-1])
        self.updates.clear()

    def needs_warmup(self, phase: Phase, group: int | None = None) -> bool:
        """Return whether a phase needs a warm-up step before it; all param groups are one transform."""
        return phase in self.joined().needs_warmup

    def check_group(self, index: int, group: Mapping[str, Any]) -> None:
        """Raise what a step would raise if a param group held these entries. Nothing is changed."""
        checked_rate(group["lr"])
        groups = self.described()
        groups[index] = _group(group, self.lrs[index])
        with self.binding:
            self.make(groups)

    def remake(self, index: int) -> None:
        """Do nothing: the transform is made from the groups when an update is."""

    def joined(self) -> Transform:
        """Return the transform of all param groups."""
        return self.make(self.described())

    def fresh_states(self) -> Tree:
        """Return states as they start."""
        return self.joined().init(tuple([p.detach() for p in params] for params in self.params))

    def described(self) -> list[numerics.ParamGroup]:
        """Return what the param groups say."""
        return [_group(group, lr) for group, lr in zip(self.groups, self.lrs, strict=True)]


class DeepSpeedOptimizer(Optimizer):
    """A drop-in for one of DeepSpeed's 1-bit optimizers; `_numerics` says which.

    The transform spans all param groups, because 1-bit LAMB's message does. Args are those of the drop-ins.
    """

    _training_class = DeepSpeedTraining
    training: DeepSpeedTraining

    freeze_flag = "adam_freeze_key"
    """DeepSpeed's name of the attribute that says whether the optimizer is frozen."""

    def __init__(
        self,
        params: Params,
        schedule: Schedule,
        *,
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        process_group: Group | None,
        deepspeed: Any,
        initialising_call: bool,
        **defaults: Any,
    ):
        self.engine: Any = None
        self.initialize = not initialising_call
        hyper = {"betas": tuple(betas), "eps": eps, "weight_decay": weight_decay, **defaults}
        with _binding(process_group):
            self._world = axis_size(AXIS)
            # An engine that is not attached goes on averaging, which is right, though it saves nothing.
            super().__init__(params, self._numerics, schedule=schedule, lr=lr, refuse_averaged=False, **hyper)
            self.states = self.training.fresh_states()
        self.training.built = True
        if deepspeed is not None:
            self.attach(deepspeed)

    def _numerics(self, groups: Sequence[numerics.ParamGroup]) -> Transform:
        """Return the transform over all param groups."""
        raise NotImplementedError

    @property
    def frozen(self) -> bool:
        """Return whether the next step is past the freeze, as DeepSpeed's freeze flag says."""
        return self.phase is not Phase.WARMUP

    def __getattr__(self, name: str) -> Any:
        if name == type(self).freeze_flag:
            return self.frozen
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def step(self, closure: Callable[[], Any] | None = None, grads: Any = None) -> Any:
        """Take a step from each rank's own gradients in `p.grad`.

        Args: closure: as for torch. grads: stands in DeepSpeed's signature and must be None.
        Raises: ValueError if grads are given; else as `fn.Optimizer.step`.
        """
        if grads is not None:
            raise ValueError(expected("grads", "None", "gradients", "put them into p.grad"))
        if self.initialize:
            loss = super().step(closure)
        else:
            self.initialize = True
            loss = None if closure is None else torch.enable_grad()(closure)()
            with torch.no_grad():
                self._take_initial_moments()
        self._switch_engine()
        return loss

    def _take_initial_moments(self) -> None:
        """Take what DeepSpeed takes from its initialising call: nothing, but in groups with `ParamGroup.non_freeze`."""

    def attach(self, engine: Any) -> None:
        """Let a DeepSpeed engine average gradients in the warm-up, and no longer once the phase changes.

        While the engine averages, averaging again here changes nothing. Without `attach` the engine goes on averaging
        in the compressed phase: right, but without the saving.

        Raises: ValueError if the engine runs ZeRO, which hands an optimizer shards instead of parameters.
        """
        stage = getattr(engine, "zero_optimization_stage", int)()
        if stage:
            wanted = "ZeRO stage 0, as for DeepSpeed's 1-bit optimizers"
            raise ValueError(expected("engine", wanted, f"ZeRO stage {stage}"))
        self.engine = engine
        self._switch_engine()

    def _switch_engine(self) -> None:
        if self.engine is not None:
            switch = "enable_backward_allreduce"
            pipeline = hasattr(self.engine, f"pipeline_{switch}")  # this engine has the other one off for good
            setattr(self.engine, f"pipeline_{switch}" if pipeline else switch, self.phase is Phase.WARMUP)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned and continue exactly, errors included. Raises as `fn.Optimizer`."""
        super().load_state_dict(state_dict)
        self.initialize = True
        self.training.updates.clear()
        self._switch_engine()

    def reset_errors(self) -> None:
        """Set worker and server errors to zero, as DeepSpeed's restart does."""
        with torch.no_grad():
            write_back(self.states, numerics.reset_errors(self.states))

    def load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what DeepSpeed's optimizer of this name saved.

        Steps, moments, LAMB's coefficients and 0/1 Adam's local steps continue; errors start at zero, as DeepSpeed
        restarts them.

        Args: checkpoint: its state dict, or a checkpoint of the engine with it; groups that DeepSpeed's fp16 wrapper
            flattened are split.
        Raises: ValueError if groups or parameters are missing or have other shapes; nothing is loaded then.
        """
        load_checkpoint(self, checkpoint)
        self.initialize = True
        self.training.updates.clear()
        self._switch_engine()


def _group(group: Mapping[str, Any], lr: Tensor) -> numerics.ParamGroup:
    mask, (b1, b2) = group.get("exp_avg_mask"), group["betas"]
    return numerics.ParamGroup(
        lr,
        b1,
        b2,
        group["eps"],
        group["weight_decay"],
        tuple(p.numel() for p in group["params"]),
        None if mask is None else host_tensor(mask).detach(),
        bool(group.get("non_freeze", False)),
        group.get("max_coeff", 10.0),
        group.get("min_coeff", 0.01),
    )


def _binding(group: Group | None) -> Binding:
    if group is None:
        group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return Binding({}) if group is None else bind({AXIS: group})


UNUSED = {"bias_correction": True, "eps_inside_sqrt": False, "max_grad_norm": 0.0, "cuda_aware": False}
"""Arguments that had no effect on DeepSpeed's numbers, with their defaults."""


def check_unused(method: str, amsgrad: bool, *given: Any) -> None:
    """Raise a RuntimeError if amsgrad is asked for, as DeepSpeed does, and warn about values of `UNUSED` that are set.

    Args: given: in the order of `UNUSED`.
    """
    if amsgrad:
        raise RuntimeError(f"amsgrad: is True; {method} does not support the AMSGrad variant")
    for (name, default), value in zip(UNUSED.items(), given, strict=True):
        if value != default:
            warnings.warn(f"{name}: had no effect on DeepSpeed's numbers and has none here", stacklevel=4)
