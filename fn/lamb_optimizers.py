"""Named optimizers that scale each tensor by its trust ratio: LAMB and 1-bit LAMB."""

from __future__ import annotations

from torch import Tensor

from fn.base import Transform, chain
from fn.collectives.axis import AxisNames
from fn.collectives.codecs.sign import sign
from fn.collectives.hierarchy import Codecs, Feedbacks
from fn.optimizers import average_in_codes, warm_up
from fn.transforms.adam import scale_by_adam
from fn.transforms.average import agreed, always_average
from fn.transforms.decay_and_lr import add_decayed_weights, scale_by_learning_rate
from fn.transforms.lamb import scale_by_onebit_lamb, scale_by_trust_ratio
from fn.transforms.skip_nonfinite import skip_nonfinite


def lamb(
    lr: float | Tensor = 0.03,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    *,
    axis: AxisNames | None = None,
    max_coeff: float = 10.0,
    min_coeff: float = 0.0,
) -> Transform:
    """Train with LAMB over exactly averaged gradients: Adam's direction, each tensor scaled by its trust ratio.

    Take it for very large batches, where AdamW's rate would be too high for some layers.

        u = mu / (1 - b1^t) / (sqrt(nu / (1 - b2^t)) + eps) + weight_decay p
        p <- p - lr clamp(|p| / |u|, min_coeff, max_coeff) u

        >>> import fn
        >>> fn.testing.train(fn.lamb(0.15, axis="data"))
        Loss(before=0.944, after=0.047)

    Args: lr: a float or a 0-d tensor; start with 0.03, or with 0.01 to fine-tune. b1, b2, eps, weight_decay: as for
        Adam. axis: over which the gradients are averaged; None for none. max_coeff, min_coeff: bounds of the trust
        ratio.
    Returns: a transform with a warm-up phase only.
    Raises: ValueError if an argument is out of range.

    Paper: You et al., LAMB (arXiv 1904.00962), algorithm 2, phi the identity within the bounds.
    """
    tx = chain(
        always_average(axis),
        scale_by_adam(b1, b2, eps, await_gradient=axis is not None),
        add_decayed_weights(weight_decay),
        scale_by_trust_ratio(min_coeff, max_coeff),
        scale_by_learning_rate(lr),
    )
    return agreed(skip_nonfinite(tx), axis)


def onebit_lamb(
    lr: float | Tensor = 0.02,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    axis: AxisNames,
    codec: Codecs | None = None,
    feedback: Feedbacks | None = None,
    warmup: Codecs | None = None,
    servers: bool = True,
    max_coeff: float = 10.0,
    factor_max: float = 4.0,
) -> Transform:
    """Train with 1-bit LAMB: LAMB in the warm-up; then freeze trust ratios up to a factor, and send momentum as signs.

    Take it where LAMB trains and the network is slow, or to leave DeepSpeed.

        compressed:  mu <- C((b1 mu + (1 - b1) g_r) s) / s;    u = mu / (sqrt(nu) + eps) + weight_decay p
                     p <- p - lr (coefficient factor) u,       s, coefficient and factor as in `scale_by_onebit_lamb`

        >>> import fn
        >>> fn.testing.train(fn.onebit_lamb(0.15, axis="data"), fn.freeze_after(10))
        Loss(before=0.944, after=0.026)

    At the default rate it kept up with `adamw` at its best on a text, 0.01 nats above and 0.02 below with two batch
    sizes, but lost 0.13 of accuracy on small images; at 0.03 it lost 0.02 to 0.03 there. These were 200 steps on four
    ranks, of a transformer of 35,000 parameters and a convolutional network of 8,000.

    Without a clamp it diverged at a rate of 0.03 on two convolutional networks, where LAMB trained. With other bounds,
    another clamp, or one scale per tensor, which the factors s then do not change, it is this chain:

        >>> mean = fn.compressed_average("data", fn.sign(), layout="flat")
        >>> link = fn.scale_by_onebit_lamb(sync=mean, min_coeff=0.1, coeff_beta=0.8, max_step=10.0)
        >>> tx = fn.chain(fn.average("data"), link, fn.scale_by_learning_rate(0.1))

    Args:
        lr: a float or a 0-d tensor; start with AdamW's rate times 2, at most 0.03. b1, b2, eps, weight_decay,
            max_coeff, factor_max: as for `scale_by_onebit_lamb`.
        axis: the ranks that train together. codec: how the momentum is quantized; None is `sign()`, with one scale for
            all tensors, as in the paper. feedback, warmup, servers: as for `onebit_adam`.
    Returns: a transform with a warm-up and a compressed phase; `freeze_after(n)` is its schedule.
    Raises: ValueError or TypeError that names the argument.

    Paper: Li et al., 1-bit LAMB (arXiv 2104.06069), algorithm 1.
    Differs: mu / (sqrt(nu) + eps) of the compressed phase is clamped to 3.
    """
    # one scale, which the factors of the tensors assume
    sync = average_in_codes(axis, sign() if codec is None else codec, feedback, "fused", servers)
    hyper = {"max_coeff": max_coeff, "factor_max": factor_max, "max_step": 3.0}
    link = scale_by_onebit_lamb(b1, b2, eps, weight_decay, sync=sync, **hyper)
    return agreed(skip_nonfinite(chain(warm_up(axis, warmup), link, scale_by_learning_rate(lr))), axis)
