"""Lightning with an optimizer of `fn`: a strategy, and the line of configure_optimizers.

    class Model(LightningModule):
        def configure_optimizers(self):
            return fn.adapters.trainers.lightning.optimizer(self, fn.muloco, lr=0.02, schedule=fn.every(30))

    Trainer(strategy=fn.adapters.trainers.lightning.FnStrategy(), ...).fit(Model(), loader)

Tested with lightning 2.6.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from fn.adapters.agreed_params import agreed_buffers, agreed_pairs, agreed_params, in_place_of_own
from fn.adapters.optim.groups import check_make
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.trainers import ranks
from fn.arguments import checked
from fn.base import Transform
from fn.errors import expected
from fn.schedules import Schedule

__all__ = ["FnStrategy", "optimizer"]


@checked("module", "lr")
def optimizer(
    module: nn.Module,
    make: Callable[..., Transform],
    *,
    lr: float | Tensor,
    schedule: Schedule | None = None,
    **numbers: Any,
) -> Optimizer:
    """Make the optimizer of a LightningModule over all ranks, with its labels, in configure_optimizers.

    Args: module: the LightningModule. make, lr, schedule, **numbers: as for `fn.adapters.trainers.hf.factory`.
    """
    return ranks.optimizer_of(module, check_make(make, "fn.muloco"), {"lr": lr, "schedule": schedule, **numbers})


class FnStrategy:
    """Lightning's DDPStrategy that leaves the communication to the module's `fn.Optimizer`: FnStrategy(**options).

    Beside each checkpoint is a folder with each rank's own, NAME.ckpt.ranks, and fit(ckpt_path=) continues bit for
    bit. A checkpoint's state_dict, validation and the module after fit have the params that all ranks agree on.

    Args: **options: of DDPStrategy.
    Raises: ValueError, with the cure, for find_unused_parameters; when fit begins for fp16 with local steps and for
        gradient_clip_val; TypeError for an optimizer of torch.
    """

    def __new__(cls, **options: Any) -> Any:
        """Make an instance that is also of Lightning's class, imported now, in whichever of its two packages."""
        try:
            from lightning.pytorch.strategies import DDPStrategy
        except ImportError:
            from pytorch_lightning.strategies import DDPStrategy

        return object.__new__(type(cls.__name__, (cls, DDPStrategy), {}))

    model: nn.Module
    optimizers: list[Any]
    precision_plugin: Any

    def __init__(self, **options: Any) -> None:
        ranks.refuse(("find_unused_parameters", "False", options.get("find_unused_parameters"), ranks.UNUSED))
        super().__init__(**options)
        self.opts: list[Optimizer] = []
        self.buffers: list[tuple[Tensor, Tensor]] = []  # and their means, while the module is validated
        self.loaded: str | None = None

    def setup(self, trainer: Any) -> None:
        """Wrap the module; let DDP send nothing."""
        super().setup(trainer)  # type: ignore[misc]
        self.opts = []
        for opt in self.optimizers:
            if not isinstance(opt, Optimizer):
                cure = "return fn.adapters.trainers.lightning.optimizer(self, ...) there"
                raise TypeError(expected("configure_optimizers", "an fn.Optimizer", type(opt).__name__, cure))
            local, plugin = ranks.has_local_steps(opt.schedule), self.precision_plugin
            scaled = local and getattr(plugin, "scaler", None) is not None and plugin.precision
            ranks.refuse(("precision", "'bf16-mixed' or '32-true' with local steps", scaled, ranks.SCALING))
            clipping = "leave it out, and give the optimizer max_norm, which clips by the norm of all ranks"
            ranks.refuse(("gradient_clip_val", "0", trainer.gradient_clip_val, clipping))
            ranks.keep_to_itself(self.model, local=local)
            self.opts.append(opt)

    def agreed(self) -> AbstractContextManager[None]:
        """Return the context in which the module has the params that all ranks agree on."""
        return agreed_params(self.opts[0], self.model) if len(self.opts) == 1 else nullcontext()

    def on_validation_start(self) -> None:
        """Average buffers here, not in each step: ranks may take different numbers of steps."""
        super().on_validation_start()  # type: ignore[misc]
        with torch.no_grad():
            self.buffers = agreed_buffers(self.opts[0], [self.model]) if len(self.opts) == 1 else []

    def validation_step(self, *args: Any, **options: Any) -> Any:
        """Validate with what all agree on: between these steps, callbacks may save what is the rank's own."""
        if len(self.opts) != 1:
            return super().validation_step(*args, **options)  # type: ignore[misc]
        with torch.no_grad():
            pairs = [*agreed_pairs(self.opts[0]), *self.buffers]
        with in_place_of_own(self.opts[0], pairs):
            return super().validation_step(*args, **options)  # type: ignore[misc]

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model as it is saved."""
        with self.agreed():
            found: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
            return {name: x.clone() if isinstance(x, Tensor) else x for name, x in found.items()}

    def on_train_end(self) -> None:
        """Leave the module with the agreed params."""
        for opt in self.opts:
            ranks.load_agreed(opt, self.model)
        super().on_train_end()  # type: ignore[misc]

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, *args: Any, **options: Any) -> None:
        """Save a checkpoint, and this rank's own beside it."""
        for number, opt in enumerate(self.opts if "optimizer_states" in checkpoint else []):
            ranks.write(f"{filepath}.ranks", ranks.of_rank(opt, self.model), number)
        super().save_checkpoint(checkpoint, filepath, *args, **options)  # type: ignore[misc]

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint with its folder."""
        super().remove_checkpoint(filepath)  # type: ignore[misc]
        shutil.rmtree(f"{filepath}.ranks", ignore_errors=True)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Read a checkpoint; its folder is read behind it."""
        self.loaded = f"{checkpoint_path}.ranks"
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **options)  # type: ignore[misc]
        return found

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Load this rank's optimizers in the place of rank 0's."""
        for number, opt in enumerate(self.opts):
            ranks.restore_instead(self.loaded, opt, self.model, number)
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
