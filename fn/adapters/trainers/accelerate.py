"""accelerate with an optimizer of `fn`, and its LocalSGD with codes and an outer optimizer.

    accelerator = Accelerator()
    pair = fn.adapters.trainers.hf.factory(fn.muloco, lr=0.02, schedule=fn.every(30), codec=fn.int8())
    model, opt = prepare(accelerator, model, pair)
    loader = accelerator.prepare(loader)

Tested with accelerate 1.15.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fn.adapters.agreed_params import agreed_params
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.trainers import ranks
from fn.adapters.trainers.hf import Factory
from fn.base import Round, Transform, apply_updates
from fn.collectives.axis import bind
from fn.collectives.codecs.codec import Codec, identity
from fn.collectives.feedback import Feedback, classic, off
from fn.errors import expected
from fn.transforms.average import compressed_average
from fn.transforms.decay_and_lr import scale_by_learning_rate
from fn.transforms.outer import outer as outer_steps

__all__ = ["LocalSGD", "prepare"]


def prepare(accelerator: Any, model: nn.Module, opt: Any) -> tuple[nn.Module, Any]:
    """Prepare a model and an optimizer of `fn` with an Accelerator: model, opt = prepare(accelerator, model, opt).

    DDP then sends nothing: the optimizer communicates in opt.step(). Behind a step that all ranks leave out, for a NaN
    or Inf, accelerator.optimizer_step_was_skipped is True, and schedulers rest. accelerator.save_state saves each
    rank's own, with the params that all ranks agree on as the model, and load_state continues bit for bit. Evaluate
    inside of with fn.adapters.agreed_params(opt.optimizer):. To clip, give the optimizer max_norm.

    Args:
        accelerator: without DeepSpeed and FSDP.
        model: that accelerator.prepare has not wrapped yet.
        opt: an `fn.Optimizer` over its parameters, or what `fn.adapters.trainers.hf.factory` returns, of which one is
            made for all ranks, with the labels of the model.
    Returns: the model and the optimizer as accelerator.prepare returns them.
    Raises: TypeError for another optimizer; ValueError, with the cure, for DeepSpeed, FSDP, find_unused_parameters, and
        fp16 with local steps.
    """
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    handler = accelerator.ddp_handler
    ranks.refuse(
        ("deepspeed_plugin", "None", kind if kind in ("DEEPSPEED", "MEGATRON_LM") else None, ranks.DEEPSPEED),
        ("fsdp_plugin", "None", kind if kind == "FSDP" else None, ranks.SHARDS),
        ("find_unused_parameters", "False", handler is not None and handler.find_unused_parameters, ranks.UNUSED),
    )
    if isinstance(opt, tuple) and opt and isinstance(opt[0], Factory):
        opt = ranks.optimizer_of(model.to(accelerator.device), opt[0].make, opt[1])
    if not isinstance(opt, Optimizer):
        cure = "behind accelerator.prepare, fn.adapters.ddp.average_gradients keeps an optimizer of torch"
        raise TypeError(expected("opt", "an fn.Optimizer or hf.factory(...)", type(opt).__name__, cure))
    local = ranks.has_local_steps(opt.schedule)
    refuse_scaling(accelerator, local)
    module, number = model, len(accelerator._optimizers)
    wrapped, prepared = accelerator.prepare(model, opt)
    ranks.keep_to_itself(wrapped, local=local)
    ranks.tell_of_skips(prepared, opt)

    def saving(models: list[nn.Module], weights: list[dict[str, Tensor]], folder: str) -> None:
        ranks.write(folder, ranks.of_rank(opt, module), number)
        with agreed_params(opt, module):
            for place, saved in enumerate(weights):
                if local and (models[place] is module or models[place] is wrapped):
                    weights[place] = {name: x.clone() for name, x in saved.items()}

    accelerator.register_save_state_pre_hook(saving)
    accelerator.register_load_state_pre_hook(lambda models, folder: ranks.restore_instead(folder, opt, module, number))
    return wrapped, prepared


def refuse_scaling(accelerator: Any, local: bool) -> None:
    """Refuse a scaled loss with local steps."""
    scaled = local and accelerator.mixed_precision == "fp16"
    ranks.refuse(("mixed_precision", "'bf16' or 'no' with local steps", scaled and "fp16", ranks.SCALING))


class LocalSGD:
    """accelerate's LocalSGD, and with codes or an outer optimizer more than it.

        with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8, codec=fn.int8()) as local_sgd:
            for batch in loader:
                ...
                optimizer.step()
                local_sgd.step()

    Without both, params are averaged by accelerate's own code, tensor by tensor, in float32. With them, x the params
    that all ranks agreed on last, p those of this rank and d the mean, over ranks and in codes, of x - p:

        x <- x + outer(d);  p <- x

    Args:
        accelerator, model, local_sgd_steps, enabled: as accelerate's.
        codec: of the pseudo-gradients x - p, such as `fn.int8()`; None: exact. feedback: of the codec; None: classic.
        outer: the optimizer of x, such as `fn.chain(fn.trace(0.8, nesterov=True), fn.scale_by_learning_rate(0.9))`;
            None: x - d, the mean of the params.
    Raises: ValueError for fp16, as `prepare`; NotImplementedError from accelerate, for DeepSpeed and FSDP.
    """

    num_steps: int
    enabled: bool
    model: nn.Module

    def __new__(cls, *args: Any, **options: Any) -> Any:
        """Make an instance that is also of accelerate's class, which is imported now."""
        from accelerate.local_sgd import LocalSGD as Base

        return object.__new__(type(cls.__name__, (cls, Base), {}))

    def __init__(
        self,
        accelerator: Any,
        model: nn.Module,
        local_sgd_steps: int,
        enabled: bool = True,
        *,
        codec: Codec | None = None,
        feedback: Feedback | None = None,
        outer: Transform | None = None,
    ) -> None:
        refuse_scaling(accelerator, enabled)
        super().__init__(accelerator, model, local_sgd_steps, enabled)  # type: ignore[call-arg]
        self.tx: Transform | None = None
        self.averaged = 0  # behind which step
        if codec is not None or outer is not None:
            exact = compressed_average("data", identity(), off())
            sync = exact if codec is None else compressed_average("data", codec, feedback or classic())
            self.tx = outer_steps(scale_by_learning_rate(1.0), outer or scale_by_learning_rate(1.0), sync)

    def __enter__(self) -> Any:
        """Start local steps from the params as they are now, which are alike on all ranks."""
        if self.tx is not None and self.enabled:
            with bind({"data": dist.group.WORLD}), torch.no_grad():
                self.state = self.tx.init(self._params())
        return super().__enter__()  # type: ignore[misc]

    def __exit__(self, *raised: Any) -> None:
        """Average what the last steps have moved, and give DDP its gradients back."""
        super().__exit__(*raised)  # type: ignore[misc]

    def step(self) -> None:
        """Count a step; behind every local_sgd_steps-th the ranks average."""
        super().step()  # type: ignore[misc]

    def _sync_and_avg_model_params(self) -> None:
        """Average; it takes the place of accelerate's."""
        if self.tx is None:
            super()._sync_and_avg_model_params()  # type: ignore[misc]
            return
        if self.num_steps == self.averaged:  # at the end, behind an average: a momentum would go on without steps
            return
        self.averaged = self.num_steps
        params = self._params()
        with bind({"data": dist.group.WORLD}), torch.no_grad():
            still = [torch.zeros_like(p) for p in params]
            moves, self.state = self.tx.update(Round(0, 0))(still, self.state, params)
            for p, x in zip(params, apply_updates(params, moves), strict=True):
                p.copy_(x)

    def _params(self) -> list[Tensor]:
        return [p.detach() for p in self.model.parameters() if p.requires_grad]
