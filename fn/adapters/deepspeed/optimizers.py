"""Drop-ins for DeepSpeed's `OnebitAdam`, `OnebitLamb` and `ZeroOneAdam`: their arguments and their numbers.

    from fn.adapters.deepspeed.optimizers import OnebitAdam
    opt = OnebitAdam(model.parameters(), lr=1e-3, freeze_step=1000)

They take each rank's own gradients and average them themselves in the warm-up. What each does step by step is in
`fn.adapters.deepspeed.transforms`; what to change when leaving DeepSpeed, in `docs/leaving-deepspeed.md`. The 4-bit
reductions of its ZeRO-3, `loco_quant_reduce` and `quant_reduce`, are in `fn.adapters.deepspeed.loco`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fn import tree
from fn.adapters.deepspeed import transforms as numerics
from fn.adapters.deepspeed.base import AXIS, DeepSpeedOptimizer, Group, check_unused
from fn.adapters.deepspeed.loco import LocoErrors, loco_quant_reduce, quant_reduce
from fn.adapters.optim.donate import write_back
from fn.adapters.optim.optimizer import Params
from fn.adapters.optim.step import collect
from fn.base import Transform
from fn.collectives.primitives import pmean
from fn.errors import expected
from fn.schedules import freeze_after, zero_one_schedule
from fn.transforms.lamb import OnebitLambState

__all__ = [
    "BACKENDS",
    "NAMES",
    "LocoErrors",
    "OnebitAdam",
    "OnebitLamb",
    "ZeroOneAdam",
    "from_config",
    "loco_quant_reduce",
    "quant_reduce",
]


class OnebitAdam(DeepSpeedOptimizer):
    """DeepSpeed's 1-bit Adam.

    Args:
        params: parameters or param groups; a group may set lr, betas, eps, weight_decay, exp_avg_mask (a tensor that
            keeps momentum at zero where it is zero) and non_freeze (full precision for good).
        deepspeed: an engine to `attach`.
        lr, betas, eps, weight_decay: as there, without bias correction.
        freeze_step: as there: the initialising call is counted, so there are max(freeze_step - 1, 1) warm-up steps.
        bias_correction, eps_inside_sqrt, max_grad_norm, cuda_aware, comm_backend_name: accepted; they had no effect
            on the numbers there and have none here.
        amsgrad: must be False.
        process_group: a group of torch.distributed or a communicator of mpi4py. None is the default group.
        initialising_call: make the first `step` DeepSpeed's initialising call, which drops a batch.
    Raises: RuntimeError for amsgrad, as there.

    Differs: errors are saved by `state_dict` and continue; `reset_errors()` gives DeepSpeed's restart. Non-finite
        steps are skipped on all ranks.
    """

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
        super().__init__(
            params,
            freeze_after(max(freeze_step - 1, 1)),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            process_group=process_group,
            deepspeed=deepspeed,
            initialising_call=initialising_call,
        )

    def _numerics(self, groups: Sequence[numerics.ParamGroup]) -> Transform:
        return numerics.onebit_adam(groups, axis=AXIS, world_size=self._world)

    def _take_initial_moments(self) -> None:
        training = self.training
        training.groups, training.scale = self.param_groups, (None, None)
        grads = collect(training, self.phase)
        with training.binding:
            write_back(self.states, numerics.initialise(self.states, self.training.described(), pmean(grads, AXIS)))


class ZeroOneAdam(DeepSpeedOptimizer):
    """DeepSpeed's 0/1 Adam.

    Args: as `OnebitAdam`, and
        var_freeze_step: updates before the variance is frozen.
        var_update_scaler, local_step_scaler, local_step_clipper: as for `fn.zero_one_schedule`.
    Raises: RuntimeError for amsgrad, as there.

    Differs: a restart in the frozen phase continues; there it updates the variance with local gradients.
    """

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
        super().__init__(
            params,
            zero_one_schedule(var_freeze_step, var_update_scaler, local_step_scaler, local_step_clipper, first=2),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            process_group=process_group,
            deepspeed=deepspeed,
            initialising_call=initialising_call,
        )

    @property
    def frozen(self) -> bool:
        """Return whether the variance is frozen."""
        return self.steps >= self.var_freeze_step

    def _numerics(self, groups: Sequence[numerics.ParamGroup]) -> Transform:
        return numerics.zero_one_adam(groups, axis=AXIS, world_size=self._world, frozen=self.frozen)

    def step(self, closure: Callable[[], Any] | None = None, grads: Any = None) -> Any:
        """Take a step, as `DeepSpeedOptimizer.step`; at the freeze the errors are set to zero, once."""
        before = self.frozen
        loss = super().step(closure, grads)
        if self.frozen and not before:
            self.reset_errors()
            self.training.updates.clear()
        return loss


class OnebitLamb(DeepSpeedOptimizer):
    """DeepSpeed's 1-bit LAMB: one message and one scale for all param groups.

    Args: as `OnebitAdam`, and
        max_coeff, min_coeff: bounds of the trust ratio, also per group. coeff_beta: decay of its average.
        factor_max, factor_min, factor_threshold: as for `fn.scale_by_onebit_lamb`.
    Raises: RuntimeError for amsgrad, as there; from `add_param_group` after construction, because the message spans
        all groups.

    Differs: a momentum that is zero at the switch is no division by zero.
    """

    freeze_flag = "lamb_freeze_key"

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
        super().__init__(
            params,
            freeze_after(max(freeze_step - 1, 1)),
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            process_group=process_group,
            deepspeed=deepspeed,
            initialising_call=initialising_call,
            max_coeff=max_coeff,
            min_coeff=min_coeff,
        )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse a group after construction with a RuntimeError."""
        if self.training.built:
            raise RuntimeError("add_param_group: 1-bit LAMB's message spans all groups; give them to the constructor")
        super().add_param_group(param_group)

    def _numerics(self, groups: Sequence[numerics.ParamGroup]) -> Transform:
        return numerics.onebit_lamb(
            groups, axis=AXIS, world_size=self._world, copy_fresh=self.freeze_step >= 2, **self._factors
        )

    def get_lamb_coeffs(self) -> list[float]:
        """Return what the last update of each parameter was scaled by, in the order of the parameters."""
        (lamb,) = tree.instances(self.states, OnebitLambState)
        return [float(ratio) for ratio in tree.leaves(lamb.ratio)]


NAMES: Mapping[str, type[DeepSpeedOptimizer]] = {
    "OneBitAdam": OnebitAdam,
    "OneBitLamb": OnebitLamb,
    "ZeroOneAdam": ZeroOneAdam,
}
"""The drop-ins by their names in a DeepSpeed configuration."""

BACKENDS = ("nccl", "mpi", "hccl", "compressed")
"""The values of `comm_backend_name`."""


def from_config(params: Params, config: Mapping[str, Any], **more: Any) -> DeepSpeedOptimizer:
    """Make the optimizer that the optimizer block of a DeepSpeed configuration describes.

        from_config(model.parameters(), json.load(open("ds_config.json"))["optimizer"])

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
