"""The named optimizer with local steps between synchronisations in codes: 0/1 Adam."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

import fn.inplace.zero_one_adam  # noqa: F401  (fills the table of steps in place)
from fn.base import Transform, chain
from fn.collectives.axis import AxisNames
from fn.collectives.hierarchy import Codecs, Feedbacks
from fn.optimizers import average_in_codes, warm_up
from fn.transforms.average import agreed
from fn.transforms.skip_nonfinite import skip_nonfinite
from fn.transforms.zero_one_adam import scale_by_zero_one_adam


def zero_one_adam(
    lr: float | Tensor = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    axis: AxisNames,
    codec: Codecs | None = None,
    feedback: Feedbacks | None = None,
    warmup: Codecs | None = None,
    layout: str = "flat",
    servers: bool = True,
    compress: Literal["steps", "gradients"] = "steps",
    keep_zeros: bool = True,
    max_step: float | None = 10.0,
) -> Transform:
    """0/1 Adam: steps that update the variance, steps that synchronise in codes, and local steps that send nothing.

        >>> import torch, fn
        >>> tx, schedule = fn.zero_one_adam(0.05, axis="data"), fn.zero_one_schedule(20, 2, 10, 4)
        >>> def train(target):                # of each rank; their mean is [2, -1, 1]
        ...     p = torch.zeros(3)
        ...     state = tx.init(p)
        ...     for step in range(60):
        ...         updates, state = tx.update(schedule(step))(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> fn.simulate(train, "data", 2)(torch.tensor([[1.5, -1.5, 0.5], [2.5, -0.5, 1.5]]))[0]
        tensor([ 2.4710, -1.1555,  1.0592])

    Args:
        lr: a float or a 0-d tensor; start with AdamW's rate times 0.6. b1, b2, eps: as for Adam. weight_decay:
            decoupled.
        axis: the ranks that train together. codec, feedback: as for `onebit_adam`. warmup: as there, for the variance
            steps. layout, servers: as for `compressed_average`.
        compress, keep_zeros, max_step: as for `scale_by_zero_one_adam`; max_step=None is the paper's step. The default
            is larger than 1-bit Adam's, because a synchronising step consists of codes alone: with 1.0 it trained more
            slowly.
    Returns: a transform with all three phases; `zero_one_schedule(...)` is its schedule. With compress="gradients" it
        has no local phase, which that schedule asks for once the variance is frozen.

    Paper: Lu et al., 0/1 Adam (arXiv 2202.06009), algorithm 1.
    Differs: a synchronising step is clamped to `max_step`, and the momentum is rebuilt from the clamped step.
    """
    sync = average_in_codes(axis, codec, feedback, layout, servers)
    link = scale_by_zero_one_adam(
        lr, b1, b2, eps, weight_decay, sync=sync, compress=compress, keep_zeros=keep_zeros, max_step=max_step
    )
    return agreed(skip_nonfinite(chain(warm_up(axis, warmup), link)), axis)
