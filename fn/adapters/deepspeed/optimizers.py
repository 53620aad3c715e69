"""Drop-ins for DeepSpeed's `OnebitAdam`, `OnebitLamb` and `ZeroOneAdam`: their arguments and their numbers.

    >>> from fn.adapters.deepspeed import OnebitAdam
    >>> p = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    >>> opt = OnebitAdam([p], lr=0.1, freeze_step=3)        # two steps of warm-up, then signs travel
    >>> for _ in range(3):
    ...     p.grad = torch.tensor([0.5, -0.5])
    ...     opt.step()
    >>> opt.frozen, p.data
    (True, tensor([-0.3473,  3.3473]))

They take each rank's own gradients and average them themselves in the warm-up. What each does step by step is in
`fn.adapters.deepspeed.transforms`; what to change when leaving DeepSpeed, in `docs/leaving-deepspeed.md`. The 4-bit
reductions of its ZeRO-3, `loco_quant_reduce` and `quant_reduce`, are in `fn.adapters.deepspeed.loco`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fn import tree
from fn.adapters.deepspeed import transforms as numerics
from fn.adapters.deepspeed.checkpoint import load_checkpoint
from fn.adapters.donate import write_back
from fn.adapters.optim.groups import hyper_parameters
from fn.adapters.optim.optimizer import Optimizer, Params
from fn.adapters.optim.units import Unit
from fn.arguments import checked
from fn.base import Phase, Transform
from fn.collectives.axis import Binding, axis_size, bind
from fn.collectives.primitives import pmean
from fn.collectives.transports.mpi import Communicator
from fn.errors import expected
from fn.schedules import Schedule, freeze_after, zero_one_schedule

Tree = Any
Group = dist.ProcessGroup | Communicator
AXIS = "data"


SETTINGS = (
    "bias_correction", "eps_inside_sqrt", "amsgrad", "cuda_aware", "comm_backend_name", "initialising_call", "betas",
    "max_grad_norm",
)  # fmt: skip
"""Arguments of all drop-ins whose kinds nothing else looks at."""


class DeepSpeedOptimizer(Optimizer):
    """A drop-in for one of DeepSpeed's 1-bit optimizers; `_numerics` says which. Args are those of the drop-ins."""

    freeze_flag = "adam_freeze_key"
    """DeepSpeed's name of the attribute that says whether the optimizer is frozen."""

    def __init__(
        self,
        params: Params,
        schedule: Schedule,
        process_group: Group | None,
        deepspeed: Any,
        initialising_call: bool,
        **numbers: Any,
    ):
        if deepspeed is not None:
            check_engine("deepspeed", deepspeed)
        self.engine: Any = None
        self.initialize = not initialising_call
        with _binding(process_group):
            self._world = axis_size(AXIS)
            # An engine that is not attached goes on averaging, which is right, though it saves nothing.
            super().__init__(params, self._of_group, schedule=schedule, refuse_averaged=False, **numbers)
        if deepspeed is not None:
            self.attach(deepspeed)

    def _numerics(self, groups: Sequence[numerics.ParamGroup]) -> Transform:
        """Return the transform of param groups: of a single one but in 1-bit LAMB."""
        raise NotImplementedError

    def _of_group(self, lr: Tensor, **entries: Any) -> Transform:
        return self._numerics([_described(entries, lr)])

    @property
    def frozen(self) -> bool:
        """Return whether the next step is past the freeze, as DeepSpeed's freeze flag says."""
        return self.phase is not Phase.WARMUP

    def __getattr__(self, name: str) -> Any:
        if name == type(self).freeze_flag:
            return self.frozen
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, grads: Any = None) -> Any:
        """Take a step from each rank's own gradients in `p.grad`.

        Args: closure: as for torch. grads: stands in DeepSpeed's signature and must be None.
        Raises: ValueError if grads are given; else as `fn.Optimizer.step`.
        """
        if grads is not None:
            raise ValueError(expected("grads", "None", "gradients", "put them into p.grad"))
        if self.initialize:
            loss = self._step(closure)
        else:
            self.initialize = True
            loss = None if closure is None else torch.enable_grad()(closure)()
            self._take_initial_moments()
        self._switch_engine()
        return loss

    def _take_initial_moments(self) -> None:
        """Take what DeepSpeed takes from its initialising call: nothing, but in groups with `ParamGroup.non_freeze`."""

    def follow_groups(self) -> None:
        """Take over what was written into the param groups, before the first step also DeepSpeed's float32 copies.

        In half precision its wrapper puts these in the place of the parameters of each group, one for one.
        """
        groups = [*zip((given for unit in self.units for given in unit.given), self.param_groups or (), strict=False)]
        for given, group in groups if self.steps == 0 else ():
            params, masters = given["params"], group.get("params") if isinstance(group, dict) else None
            if (
                isinstance(masters, list | tuple)
                and [p.shape for p in params] == [p.shape for p in masters]
                and _are_masters(params, masters)
            ):
                given["params"] = [*masters]  # a list of its own: the script may write into that of the group
        super().follow_groups()

    def attach(self, engine: Any) -> None:
        """Let a DeepSpeed engine average gradients in the warm-up, and no longer once the phase changes.

        While the engine averages, averaging again here changes nothing. Without `attach` the engine goes on averaging
        in the compressed phase: right, but without the saving.

        Raises: ValueError if the engine runs ZeRO, which hands an optimizer shards instead of parameters; TypeError for
            what is no engine.
        """
        check_engine("engine", engine)
        stage = getattr(engine, "zero_optimization_stage", int)()
        if stage:
            wanted = "ZeRO stage 0, as for DeepSpeed's 1-bit optimizers"
            raise ValueError(expected("engine", wanted, f"ZeRO stage {stage}"))
        self.engine = engine
        self._switch_engine()

    def _switch_engine(self) -> None:
        if self.engine is not None:
            switch = "enable_backward_allreduce"
            pipeline = hasattr(self.engine, f"pipeline_{switch}")  # a pipeline engine has the other one off for good
            setattr(self.engine, f"pipeline_{switch}" if pipeline else switch, self.phase is Phase.WARMUP)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` returned and continue exactly, errors included. Raises as `fn.Optimizer`."""
        super().load_state_dict(state_dict)
        self._resume()

    def _resume(self) -> None:
        """Go on from what was loaded, with no initialising call."""
        self.initialize = True
        self._switch_engine()

    def reset_errors(self) -> None:
        """Set worker and server errors to zero, as DeepSpeed's restart does."""
        self._write(numerics.reset_errors(self.states))

    def load_checkpoint(self, checkpoint: Mapping[str, Any]) -> None:
        """Load what DeepSpeed's optimizer of this name saved.

        Steps, moments, LAMB's coefficients and 0/1 Adam's local steps continue; errors start at zero, as DeepSpeed
        restarts them.

        Args: checkpoint: its state dict, or a checkpoint of the engine with it; groups that DeepSpeed's fp16 wrapper
            flattened are split.
        Raises: ValueError if groups or parameters are missing or have other shapes; nothing is loaded then.
        """
        steps, state, rates = load_checkpoint(self.states, self.param_groups, checkpoint)
        self._write(state)
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
        self.steps = steps
        self._resume()

    def _write(self, states: Tree) -> None:
        with torch.no_grad(), self.writing():
            write_back(self.states, states)


def _described(group: Mapping[str, Any], lr: Tensor) -> numerics.ParamGroup:
    """Return the settings of a param group."""
    mask, (b1, b2) = group.get("exp_avg_mask"), group["betas"]
    return numerics.ParamGroup(
        lr,
        b1,
        b2,
        group["eps"],
        group["weight_decay"],
        tuple(p.numel() for p in group.get("params", ())),
        None if mask is None else mask.detach(),
        bool(group.get("non_freeze", False)),
        group.get("max_coeff", 10.0),
        group.get("min_coeff", 0.01),
    )


def check_engine(argument: str, engine: Any) -> None:
    """Raise a TypeError that names the argument unless a value has what is used of a DeepSpeed engine."""
    used = ("enable_backward_allreduce", "zero_optimization_stage")
    if isinstance(engine, type) or not any(hasattr(engine, name) for name in used):
        raise TypeError(expected(argument, "a DeepSpeed engine", f"{engine!r}"))


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


def _are_masters(params: Sequence[Tensor], copies: Sequence[Tensor]) -> bool:
    """Tell whether these are float32 copies of parameters, some in half precision."""
    is_half = any(p.element_size() < 4 for p in params)
    return is_half and all(x is not p and x.dtype == torch.float32 for p, x in zip(params, copies, strict=True))


class OnebitAdam(DeepSpeedOptimizer):
    """DeepSpeed's 1-bit Adam.

    Args:
        params: parameters or param groups; a group may set lr, betas, eps, weight_decay, exp_avg_mask (a tensor that
            keeps momentum at zero where it is zero) and non_freeze (full precision for good).
        deepspeed: an engine to `attach`.
        lr, betas, eps, weight_decay: as in Adam, without bias correction.
        freeze_step: DeepSpeed counts its initialising call, so there are max(freeze_step - 1, 1) warm-up steps.
        bias_correction, eps_inside_sqrt, max_grad_norm, cuda_aware, comm_backend_name: accepted; they had no effect
            on DeepSpeed's numbers and have none here.
        amsgrad: must be False.
        process_group: a group of torch.distributed or a communicator of mpi4py. None is the default group.
        initialising_call: make the first `step` DeepSpeed's initialising call, which drops a batch.
    Raises: RuntimeError for amsgrad, as DeepSpeed does.

    Differs: errors are saved by `state_dict` and continue; `reset_errors()` gives DeepSpeed's restart. Non-finite
        steps are skipped on all ranks.
    """

    @checked("freeze_step", *SETTINGS)
    def __init__(
        self,
        params: Params,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        *,
        process_group: Group | None = None,
        initialising_call: bool = False,
    ):
        check_unused("1-bit Adam", amsgrad, bias_correction, eps_inside_sqrt, max_grad_norm, cuda_aware)
        self.freeze_step = freeze_step
        self.comm_backend_name = comm_backend_name
        schedule = freeze_after(max(freeze_step - 1, 1))
        numbers = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, schedule, process_group, deepspeed, initialising_call, **numbers)

    def _numerics(self, groups: Sequence[numerics.ParamGroup]) -> Transform:
        (transform,) = numerics.onebit_adam(groups, axis=AXIS, world_size=self._world)
        return transform

    def _take_initial_moments(self) -> None:
        described = [_described(group, unit.rates[0]) for unit in self.units for group in unit.groups]
        with self.communicating("the initialising call is left out"):
            self._write(numerics.initialise(self.states, described, pmean(self.gradients(self.phase), AXIS)))


class ZeroOneAdam(DeepSpeedOptimizer):
    """DeepSpeed's 0/1 Adam.

    Args: as `OnebitAdam`, and
        var_freeze_step: updates before the variance is frozen.
        var_update_scaler, local_step_scaler, local_step_clipper: as for `fn.zero_one_schedule`.
    Raises: RuntimeError for amsgrad, as DeepSpeed does.

    Differs: a restart in the frozen phase continues; there it updates the variance with local gradients.
    """

    @checked(*SETTINGS)
    def __init__(
        self,
        params: Params,
        deepspeed: Any = None,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        var_freeze_step: int = 100_000,
        var_update_scaler: int = 16,
        local_step_scaler: int = 32_678,
        local_step_clipper: int = 16,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        *,
        process_group: Group | None = None,
        initialising_call: bool = False,
    ):
        check_unused("0/1 Adam", amsgrad, bias_correction, eps_inside_sqrt, max_grad_norm, cuda_aware)
        self.var_freeze_step = var_freeze_step
        self.comm_backend_name = comm_backend_name
        intervals = (var_update_scaler, local_step_scaler, local_step_clipper)
        schedule = zero_one_schedule(var_freeze_step, *intervals, first=2)
        numbers = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, schedule, process_group, deepspeed, initialising_call, **numbers)

    @property
    def frozen(self) -> bool:
        """Return whether the variance is frozen."""
        return self.steps >= self.var_freeze_step

    def _numerics(self, groups: Sequence[numerics.ParamGroup]) -> Transform:
        (transform,) = numerics.zero_one_adam(groups, axis=AXIS, world_size=self._world, frozen=self.frozen)
        return transform

    def made_of(self, given: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the hyper-parameters of a transform, and the freeze, behind which it is another one."""
        return {**super().made_of(given), "frozen": self.frozen}

    def _step(self, closure: Callable[[], Any] | None) -> Any:
        before = self.frozen
        loss = super()._step(closure)
        if self.frozen and not before:
            self.reset_errors()
        return loss


class OnebitLamb(DeepSpeedOptimizer):
    """DeepSpeed's 1-bit LAMB: one message and one scale for all param groups.

    Args: as `OnebitAdam`, and
        max_coeff, min_coeff: bounds of the trust ratio, also per group. coeff_beta: decay of its average.
        factor_max, factor_min, factor_threshold: as for `fn.scale_by_onebit_lamb`.
    Raises: RuntimeError for amsgrad, as DeepSpeed does; from `add_param_group` after construction, because the message
        spans all groups.

    Differs: a momentum that is zero at the switch is no division by zero.
    """

    freeze_flag = "lamb_freeze_key"

    @checked("freeze_step", *SETTINGS)
    def __init__(
        self,
        params: Params,
        deepspeed: Any = None,
        lr: float = 1e-3,
        freeze_step: int = 100_000,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_grad_norm: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
        amsgrad: bool = False,
        cuda_aware: bool = False,
        comm_backend_name: str = "nccl",
        coeff_beta: float = 0.9,
        factor_max: float = 4.0,
        factor_min: float = 0.5,
        factor_threshold: float = 0.1,
        *,
        process_group: Group | None = None,
        initialising_call: bool = False,
    ):
        check_unused("1-bit LAMB", amsgrad, bias_correction, eps_inside_sqrt, max_grad_norm, cuda_aware)
        self.freeze_step = freeze_step
        self.comm_backend_name = comm_backend_name
        self._factors: Mapping[str, float] = {
            "coeff_beta": coeff_beta,
            "factor_max": factor_max,
            "factor_min": factor_min,
            "factor_threshold": factor_threshold,
        }
        self._complete = False
        schedule = freeze_after(max(freeze_step - 1, 1))
        numbers = {"lr": lr, "betas": tuple(betas), "eps": eps, "weight_decay": weight_decay}
        coeffs = {"max_coeff": max_coeff, "min_coeff": min_coeff}
        super().__init__(params, schedule, process_group, deepspeed, initialising_call, **numbers, **coeffs)
        self._complete = True

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group after construction with a RuntimeError."""
        if self._complete:
            raise RuntimeError("add_param_group: 1-bit LAMB's message spans all groups; give them to the constructor")
        super().add_param_group(param_group)

    def _numerics(self, groups: Sequence[numerics.ParamGroup]) -> Transform:
        return numerics.onebit_lamb(
            groups, axis=AXIS, world_size=self._world, copy_fresh=self.freeze_step >= 2, **self._factors
        )

    def made(self, given: list[dict[str, Any]], rates: list[Tensor]) -> Transform:
        """Return the transform of param groups, all of them or one that is looked at alone."""
        return self._numerics([_described(*pair) for pair in zip(given, rates, strict=True)])

    def made_of(self, given: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the hyper-parameters of the groups' transform, those of the first group under their own names."""
        each = [hyper_parameters(group, self.arguments) for group in given]
        return {f"{name} of group {g}" if g else name: x for g, hyper in enumerate(each) for name, x in hyper.items()}

    def prepared(self, group: dict[str, Any]) -> Unit:
        """Return all groups so far, up to this one, as a unit."""
        rates = [rate for unit in (*self.units, super().prepared(group)) for rate in unit.rates]
        groups = [*self.param_groups]
        return Unit(self.made(groups, rates), groups, rates, self.made_of(groups), spans=True)

    def start(self, unit: Unit) -> None:
        """Make the state of all groups, in place of that of the groups before the last."""
        self.units.clear()
        super().start(unit)

    def get_lamb_coeffs(self) -> list[float]:
        """Return the factor of each parameter's last update, in the order of the parameters."""
        (lamb,) = tree.instances(self.states, numerics.PaddedLambState)
        return [float(ratio) for ratio in tree.leaves(lamb.ratio)]


NAMES: Mapping[str, type[DeepSpeedOptimizer]] = {
    "OneBitAdam": OnebitAdam,
    "OneBitLamb": OnebitLamb,
    "ZeroOneAdam": ZeroOneAdam,
}
"""The drop-ins by their names in a DeepSpeed configuration."""

BACKENDS = ("nccl", "mpi", "hccl", "compressed")
"""The values of `comm_backend_name`."""


@checked("config")
def from_config(params: Params, config: Mapping[str, Any], **more: Any) -> DeepSpeedOptimizer:
    """Make the optimizer that the optimizer block of a DeepSpeed configuration describes.

        >>> params = [torch.nn.Parameter(torch.ones(2))]
        >>> block = {"type": "OneBitLamb", "params": {"lr": 0.01, "freeze_step": 500}}      # of ds_config.json
        >>> opt = from_config(params, {"optimizer": block, "train_batch_size": 8})
        >>> type(opt).__name__, opt.freeze_step, opt.param_groups[0]["lr"]
        ('OnebitLamb', 500, 0.01)

    Args:
        params: parameters or param groups.
        config: {"type": one of `NAMES`, case aside, "params": {...}}, or a whole configuration with an "optimizer".
        **more: further arguments of the drop-in, such as process_group.
    Raises: ValueError if type or comm_backend_name are not known; TypeError for an unknown parameter.
    """
    block = config.get("optimizer", config)
    known = {name.lower(): kind for name, kind in NAMES.items()}
    kind = known.get(str(block.get("type", "")).lower())
    if kind is None:
        raise ValueError(expected("config", f"type to be one of {sorted(NAMES)}", f"{block.get('type')!r}"))
    arguments = dict(block.get("params", {}))
    backend = arguments.get("comm_backend_name", "nccl")
    if backend not in BACKENDS:
        raise ValueError(expected("config", f"comm_backend_name to be one of {BACKENDS}", f"{backend!r}"))
    return kind(params, **{**arguments, **more})
