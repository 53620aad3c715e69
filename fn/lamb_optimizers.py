"""Named optimizers that scale each tensor by its trust ratio: LAMB and 1-bit LAMB."""

from __future__ import annotations

from torch import Tensor

import fn.inplace.lamb  # noqa: F401  (fills the table of steps in place)
from fn.base import Transform, chain
from fn.collectives.axis import AxisNames
from fn.collectives.hierarchy import Codecs, Feedbacks
from fn.optimizers import average_in_codes, warm_up
from fn.transforms.adam import scale_by_adam
from fn.transforms.average import agreed, always_average
from fn.transforms.decay_and_lr import add_decayed_weights, scale_by_learning_rate
from fn.transforms.lamb import LambHyper, scale_by_onebit_lamb, scale_by_trust_ratio
from fn.transforms.skip_nonfinite import skip_nonfinite


def lamb(
    lr: float | Tensor = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    *,
    axis: AxisNames | None = None,
    max_coeff: float = 10.0,
    min_coeff: float = 0.0,
) -> Transform:
    """LAMB over exactly averaged gradients: Adam's direction, each tensor scaled by its trust ratio.

        >>> import torch, fn
        >>> tx = fn.lamb(0.1, axis="data")
        >>> def train(target):                # of each rank; their mean is [2, -1, 1]
        ...     p = torch.zeros(3)
        ...     state = tx.init(p)
        ...     for step in range(30):
        ...         updates, state = tx.update(fn.Phase.WARMUP)(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> fn.simulate(train, "data", 2)(torch.tensor([[1.5, -1.5, 0.5], [2.5, -0.5, 1.5]]))[0]
        tensor([ 1.8326, -1.4248,  1.4248])

    Args: lr: a float or a 0-d tensor; start with AdamW's rate times 2. b1, b2, eps, weight_decay: as for Adam. axis:
        over which the gradients are averaged; None for none. max_coeff, min_coeff: bounds of the trust ratio.
    Returns: a transform with a warm-up phase only.

    Paper: You et al., LAMB (arXiv 1904.00962), algorithm 2, phi the identity within the bounds.
    """
    tx = chain(
        always_average(axis),
        scale_by_adam(b1, b2, eps),
        add_decayed_weights(weight_decay),
        scale_by_trust_ratio(min_coeff, max_coeff),
        scale_by_learning_rate(lr),
    )
    return agreed(skip_nonfinite(tx), axis)


def onebit_lamb(
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
    layout: str = "fused",
    servers: bool = True,
    max_coeff: float = 10.0,
    min_coeff: float = 0.01,
    coeff_beta: float = 0.9,
    factor_max: float = 4.0,
    factor_min: float = 0.5,
    factor_threshold: float = 0.1,
    keep_zeros: bool = True,
    max_step: float | None = None,
) -> Transform:
    """1-bit LAMB: LAMB in the warm-up; then trust ratios are frozen up to a bounded factor, and momentum is signs.

        >>> import torch, fn
        >>> tx, schedule = fn.onebit_lamb(0.1, axis="data"), fn.freeze_after(10)
        >>> def train(target):                # of each rank; their mean is [2, -1, 1]
        ...     p = torch.zeros(3)
        ...     state = tx.init(p)
        ...     for step in range(40):
        ...         updates, state = tx.update(schedule(step))(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> fn.simulate(train, "data", 2)(torch.tensor([[1.5, -1.5, 0.5], [2.5, -0.5, 1.5]]))[0]
        tensor([ 1.3636, -0.8136,  1.1490])

    Args:
        lr: a float or a 0-d tensor; start with AdamW's rate times 2. axis: the ranks that train together.
        codec, feedback, warmup: as for `onebit_adam`. layout: "fused" is one scale for the whole model, as in
            the paper; "flat" keeps one per tensor, which the momentum scaling then does not change. servers: as for
            `onebit_adam`.
        others: as for `scale_by_onebit_lamb`. There is no max_step by default: with 1.0 it trained more slowly.
    Returns: a transform with a warm-up and a compressed phase; `freeze_after(n)` is its schedule.

    Paper: Li et al., 1-bit LAMB (arXiv 2104.06069), algorithm 1.
    Differs: with a `max_step` the direction of the compressed phase is clamped, before decay and norms.
    """
    hyper = LambHyper(
        b1, b2, eps, weight_decay, max_coeff, min_coeff, coeff_beta, factor_max, factor_min, factor_threshold
    )
    sync = average_in_codes(axis, codec, feedback, layout, servers)
    link = scale_by_onebit_lamb(**hyper._asdict(), sync=sync, keep_zeros=keep_zeros, max_step=max_step)
    return agreed(skip_nonfinite(chain(warm_up(axis, warmup), link, scale_by_learning_rate(lr))), axis)
