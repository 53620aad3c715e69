"""Named optimizers: each is a chain under its docstring."""

from __future__ import annotations

from torch import Tensor

from fn.base import Transform, chain
from fn.collectives.codec import Codec, sign
from fn.transforms.agreed import agreed
from fn.transforms.average import always_average, average, compressed_average
from fn.transforms.finite import skip_nonfinite
from fn.transforms.moments import scale_by_adam, scale_by_onebit_adam
from fn.transforms.weights import add_decayed_weights, scale_by_learning_rate


def adamw(
    lr: float | Tensor = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    axis: str | None = None,
) -> Transform:
    """AdamW over exactly averaged gradients; on one rank the same as `torch.optim.AdamW`.

    Args: lr: a float or a 0-d tensor. b1, b2, eps, weight_decay: as in torch. axis: over which the gradients are
        averaged; None for none.
    Returns: a transform with a warm-up phase only.

    Paper: Loshchilov and Hutter (arXiv 1711.05101), algorithm 2.
    """
    tx = chain(
        always_average(axis),
        scale_by_adam(b1, b2, eps),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(lr),
    )
    return agreed(skip_nonfinite(tx), axis)


def onebit_adam(
    lr: float | Tensor = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    axis: str,
    codec: Codec | None = None,
    layout: str = "flat",
    bias_correction: bool = False,
    keep_zeros: bool = True,
) -> Transform:
    """1-bit Adam: Adam in the warm-up, then a frozen second moment and a momentum that travels as signs.

    Args:
        lr: a float or a 0-d tensor. b1, b2, eps: as for Adam. weight_decay: decoupled.
        axis: the ranks that train together.
        codec: what the momentum travels as; None is `sign()`, one bit per element and one scale per tensor.
        layout, bias_correction, keep_zeros: as for `compressed_average` and `scale_by_onebit_adam`.
    Returns: a transform with a warm-up and a compressed phase; `freeze_after(n)` is its schedule.

    Paper: Tang et al., 1-bit Adam (arXiv 2102.02888), algorithm 1.
    Differs: weight decay is decoupled, as in the authors' code; the initialising call of that code is not made.
    """
    sync = compressed_average(axis, codec or sign(), layout=layout)
    tx = chain(
        average(axis),
        scale_by_onebit_adam(b1, b2, eps, sync=sync, bias_correction=bias_correction, keep_zeros=keep_zeros),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(lr),
    )
    return agreed(skip_nonfinite(tx), axis)
