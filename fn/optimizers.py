"""Named optimizers: each is a chain under its docstring, in the same wrappers.

`skip_nonfinite` skips steps that are not finite, and `agreed` compares the ranks' settings at init.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from fn.base import Transform, chain
from fn.collectives.axis import AxisNames
from fn.collectives.codecs.integer import int4
from fn.collectives.codecs.sign import sign
from fn.collectives.feedback import classic, damped
from fn.collectives.hierarchy import Codecs, Feedbacks, hops
from fn.transforms.adam import scale_by_adam, scale_by_onebit_adam
from fn.transforms.agreed import agreed
from fn.transforms.average import always_average, average, compressed_average
from fn.transforms.decay_and_lr import add_decayed_weights, scale_by_learning_rate
from fn.transforms.lamb import LambHyper, scale_by_onebit_lamb, scale_by_trust_ratio
from fn.transforms.sharded import sharded
from fn.transforms.skip_nonfinite import skip_nonfinite
from fn.transforms.zero_one_adam import scale_by_zero_one_adam


def _warm_up(axis: AxisNames, warmup: Codecs | None) -> Transform:
    """Return the average of a warm-up, exact or in codes."""
    if warmup is not None:
        hops(axis, warmup, damped(), ("warmup", "feedback"))
    return average(axis, warmup)


def _average_in_codes(
    axis: AxisNames, codec: Codecs | None, feedback: Feedbacks | None, layout: str, servers: bool
) -> Transform:
    """Return the compressed average, signs with `classic` if nothing else is said."""
    return compressed_average(axis, codec or sign(), feedback or classic(), layout=layout, servers=servers)


def adamw(
    lr: float | Tensor = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    axis: AxisNames | None = None,
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
    axis: AxisNames,
    codec: Codecs | None = None,
    feedback: Feedbacks | None = None,
    warmup: Codecs | None = None,
    layout: str = "flat",
    servers: bool = True,
    bias_correction: bool = False,
    keep_zeros: bool = True,
    max_step: float | None = 1.0,
) -> Transform:
    """1-bit Adam: Adam in the warm-up, then a frozen second moment and a momentum that travels as signs.

    Args:
        lr: a float or a 0-d tensor. b1, b2, eps: as for Adam. weight_decay: decoupled.
        axis: the ranks that train together; `("local", "node")` averages exactly within a node, in codes across them.
        codec: what the momentum travels as; None is `sign()`, one bit per element and one scale per tensor.
        feedback: what becomes of what was not delivered; None is `classic()`, and `classic(lazy=True)` the same in
            fewer passes over memory.
        warmup: what gradients travel as in the warm-up, with `damped()`; None is exactly. See `average`.
        layout, servers: as for `compressed_average`; servers=False is faster for two ranks.
        bias_correction, keep_zeros, max_step: as for `scale_by_onebit_adam`; max_step=None is the paper's step.
    Returns: a transform with a warm-up and a compressed phase; `freeze_after(n)` is its schedule.

    Paper: Tang et al., 1-bit Adam (arXiv 2102.02888), algorithm 1.
    Differs: weight decay is decoupled, as in the authors' code; the initialising call of that code is not made. The
        step of the compressed phase is clamped to `max_step`.
    """
    sync = _average_in_codes(axis, codec, feedback, layout, servers)
    tx = chain(
        _warm_up(axis, warmup),
        scale_by_onebit_adam(
            b1, b2, eps, sync=sync, bias_correction=bias_correction, keep_zeros=keep_zeros, max_step=max_step
        ),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(lr),
    )
    return agreed(skip_nonfinite(tx), axis)


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

    Args: lr: a float or a 0-d tensor. b1, b2, eps, weight_decay: as for Adam. axis: over which the gradients are
        averaged; None for none. max_coeff, min_coeff: bounds of the trust ratio.
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
    """1-bit LAMB: LAMB in the warm-up, then frozen trust ratios that a bounded factor corrects, and signs.

    Args:
        lr: a float or a 0-d tensor. axis: the ranks that train together.
        codec, feedback, warmup: as for `onebit_adam`. layout: "fused" is one scale for the whole model, as in
            the paper; "flat" keeps one per tensor, which the momentum scaling then does not change. servers: as for
            `onebit_adam`.
        others: as for `scale_by_onebit_lamb`. No max_step is the default: clamped to 1.0 it trained more slowly.
    Returns: a transform with a warm-up and a compressed phase; `freeze_after(n)` is its schedule.

    Paper: Li et al., 1-bit LAMB (arXiv 2104.06069), algorithm 1.
    Differs: with a `max_step` the direction of the compressed phase is clamped, before decay and norms.
    """
    hyper = LambHyper(
        b1, b2, eps, weight_decay, max_coeff, min_coeff, coeff_beta, factor_max, factor_min, factor_threshold
    )
    sync = _average_in_codes(axis, codec, feedback, layout, servers)
    link = scale_by_onebit_lamb(**hyper._asdict(), sync=sync, keep_zeros=keep_zeros, max_step=max_step)
    return agreed(skip_nonfinite(chain(_warm_up(axis, warmup), link, scale_by_learning_rate(lr))), axis)


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
    """0/1 Adam: variance steps, synchronising steps in codes, and local steps without any message.

    Args:
        lr: a float or a 0-d tensor. b1, b2, eps: as for Adam. weight_decay: decoupled.
        axis: the ranks that train together. codec, feedback: as for `onebit_adam`. warmup: as there, for the variance
            steps. layout, servers: as for `compressed_average`.
        compress, keep_zeros, max_step: as for `scale_by_zero_one_adam`; max_step=None is the paper's step. Its agreed
            steps consist of codes alone and are larger than 1-bit Adam's: clamped to 1.0 they trained more slowly.
    Returns: a transform with all three phases; `zero_one_schedule(...)` is its schedule. With compress="gradients" it
        has no local phase, which that schedule asks for once the variance is frozen.

    Paper: Lu et al., 0/1 Adam (arXiv 2202.06009), algorithm 1.
    Differs: a synchronising step is clamped to `max_step`, and the momentum is rebuilt from the clamped step.
    """
    sync = _average_in_codes(axis, codec, feedback, layout, servers)
    link = scale_by_zero_one_adam(
        lr, b1, b2, eps, weight_decay, sync=sync, compress=compress, keep_zeros=keep_zeros, max_step=max_step
    )
    return agreed(skip_nonfinite(chain(_warm_up(axis, warmup), link)), axis)


def loco_adamw(
    lr: float | Tensor = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    axis: AxisNames,
    codec: Codecs | None = None,
    feedback: Feedbacks | None = None,
    gather: Codecs | None = None,
    master: bool | None = None,
    layout: str = "flat",
) -> Transform:
    """LoCo: AdamW on shards, whose gradients travel in 4 bits with a damped error feedback.

    Args:
        lr: a float or a 0-d tensor. b1, b2, eps, weight_decay: as for `adamw`.
        axis: the ranks that train together, among which moments and master params are divided; with several names,
            such as ("local", "node"), a tuple of codecs says what travels in each network, see
            `fn.collectives.hierarchy.hops`.
        codec: what gradients travel as; None is `int4()`. feedback: None is `damped()`, the error in 8 bits.
        gather, master, layout: as for `sharded`.
    Returns: a transform with a warm-up, which is exact, and a compressed phase; `freeze_after(n)` is its schedule, and
        n may be small: nothing is frozen, only the gradients change over to codes.

    Paper: Xie et al., LoCo (arXiv 2407.04480), algorithm 1 with Adam as the optimizer.
    Differs: see `damped` and `int4`; the scale is each block's maximum, not given.
    """
    inner = chain(scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay), scale_by_learning_rate(lr))
    feedback = damped() if feedback is None else feedback
    codec = int4() if codec is None else codec
    tx = sharded(inner, axis, codec, feedback, gather=gather, master=master, layout=layout)
    return agreed(skip_nonfinite(tx), axis, kernel="adamw_into_")


def sharded_onebit_adam(
    lr: float | Tensor = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    axis: AxisNames,
    codec: Codecs | None = None,
    feedback: Feedbacks | None = None,
    gather: Codecs | None = None,
    master: bool | None = None,
    layout: str = "flat",
    max_step: float | None = 1.0,
) -> Transform:
    """1-bit Adam over ZeRO-1: the frozen second moment and the master params divided among the ranks.

    The momentum travels as in `onebit_adam`, there and back, and stays whole on every rank, because every rank adds
    its gradient to it. What comes on top is the way back of the updates, exact in the params' dtype unless `gather`
    says something else: take this where memory is short, `onebit_adam` where only the network is slow.

    Args:
        lr: a float or a 0-d tensor. b1, b2, eps: as for Adam. weight_decay: decoupled.
        axis, codec, feedback, max_step: as for `onebit_adam`. gather, master, layout: as for `sharded`.
    Returns: a transform with a warm-up and a compressed phase; `freeze_after(n)` is its schedule.

    Paper: Tang et al., 1-bit Adam (arXiv 2102.02888), algorithm 1; Rajbhandari et al., ZeRO (arXiv 1910.02054).
    Differs: elements that never received a gradient take part in the exchange, where their momentum is not zero; their
        params do not move. The step of the compressed phase is clamped to `max_step`.
    """
    inner = chain(
        # nothing is left to be averaged: the shards are of the mean
        scale_by_onebit_adam(b1, b2, eps, sync=chain(), max_step=max_step),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(lr),
    )
    codec = sign() if codec is None else codec
    tx = sharded(inner, axis, codec, feedback, gather=gather, master=master, layout=layout, momentum=b1)
    return agreed(skip_nonfinite(tx), axis)
