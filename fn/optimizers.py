"""Named optimizers: each is a chain under its docstring, in the same two wrappers.

`skip_nonfinite` skips steps that are not finite, and `agreed` compares the ranks' settings at init. To follow 1-bit
Adam from the gradient to the wire to the weight, read on in

    fn.transforms.adam              the momentum and the step: `scale_by_onebit_adam`
    fn.transforms.average           the momentum's average in codes, as a link: `compressed_average`
    fn.collectives.compressed       its two halves, with error feedback: a reduce-scatter and an all-gather of codes
    fn.collectives.codecs.sign      what the codes are: a bit per element and a scale per block or tensor
    fn.collectives.messages         how codes and scales become the bytes that a rank sends
    fn.kernels.rules                the arithmetic of a step, for one element or many

These are pure functions. `fn.Optimizer` takes the same steps by kernels that write over the old state: `fn.inplace`.

A named optimizer takes at most twelve arguments. Whoever wants another link, or another argument of a link, writes the
chain, as the docstrings show; `fn.Optimizer` guards a chain as it guards these.
"""

from __future__ import annotations

from torch import Tensor

from fn.base import Transform, chain
from fn.collectives.axis import AxisNames
from fn.collectives.codecs.integer import int4
from fn.collectives.codecs.sign import sign
from fn.collectives.feedback import classic, damped
from fn.collectives.hierarchy import Codecs, Feedbacks, hops
from fn.transforms.adam import scale_by_adam, scale_by_onebit_adam
from fn.transforms.average import agreed, always_average, average, compressed_average
from fn.transforms.decay_and_lr import add_decayed_weights, scale_by_learning_rate
from fn.transforms.sharded import sharded
from fn.transforms.skip_nonfinite import skip_nonfinite


def warm_up(axis: AxisNames, warmup: Codecs | None) -> Transform:
    """Return the average of gradients in the warm-up, in full precision or in codes."""
    if warmup is not None:
        hops(axis, warmup, damped(), ("warmup", "feedback"))
    return average(axis, warmup)


def average_in_codes(
    axis: AxisNames, codec: Codecs | None, feedback: Feedbacks | None, layout: str, servers: bool
) -> Transform:
    """Return the compressed average, of signs in blocks with `classic` feedback if nothing else is given."""
    codec, feedback = sign(block=64) if codec is None else codec, classic() if feedback is None else feedback
    return compressed_average(axis, codec, feedback, layout=layout, servers=servers)


def adamw(
    lr: float | Tensor = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    axis: AxisNames | None = None,
) -> Transform:
    """Train with AdamW over exactly averaged gradients; on one rank this is `torch.optim.AdamW`.

    Take it where the network is no bottleneck, and to compare the others with.

        p <- p - lr (mu / (1 - b1^t) / (sqrt(nu / (1 - b2^t)) + eps) + weight_decay p)

        >>> import fn
        >>> fn.testing.train(fn.adamw(0.1, axis="data"))
        Loss(before=0.944, after=0.009)

    Args: lr: a float or a 0-d tensor. b1, b2, eps, weight_decay: as in torch. axis: over which the gradients are
        averaged; None for none.
    Returns: a transform with a warm-up phase only.
    Raises: ValueError if an argument is out of range.

    Paper: Loshchilov and Hutter (arXiv 1711.05101), algorithm 2.
    """
    tx = chain(
        always_average(axis),
        scale_by_adam(b1, b2, eps, await_gradient=axis is not None),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(lr),
    )
    return agreed(skip_nonfinite(tx), axis)


def onebit_adam(
    lr: float | Tensor = 1e-3,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    axis: AxisNames,
    codec: Codecs | None = None,
    feedback: Feedbacks | None = None,
    warmup: Codecs | None = None,
    servers: bool = True,
    max_step: float | None = 3.0,
) -> Transform:
    """Train with 1-bit Adam: Adam in the warm-up; then freeze the second moment, and average the momentum as signs.

    Take it for Adam's training over slow links, with a warm-up of a fifth of the run, or to leave DeepSpeed. For
    transformers `sign_muon` sends as little and needs no warm-up.

        warm-up:     mu, nu as Adam's, of the mean gradient, bias-corrected
        compressed:  mu <- C(mu + c (g_r - mu));    u = mu / (sqrt(nu) + eps), at most max_step
        p <- p - lr (u + weight_decay p),    c = (1 - b1) / (1 - b1^t)

        >>> import fn
        >>> fn.testing.train(fn.onebit_adam(0.1, axis="data"), fn.freeze_after(10))
        Loss(before=0.944, after=0.115)

    In 200 steps on two texts it ended at most 0.04 nats above `adamw` at the same rate; with b2 = 0.999, one scale per
    tensor and a clamp of 1 it was 0.19 to 0.47. On plain digits it had AdamW's accuracy. On digits that are moved and
    noisy it had 0.09 more at 0.001, and 0.11 ± 0.13 less at AdamW's best rate, 0.03.

    In the paper's form a second moment that is frozen before b2 has filled it makes all later steps too large: on two
    small transformers it ended at 2.76 and 2.94, AdamW at 2.20 and 2.29. That form, without a clamp, too, and in
    another layout of the messages, is this chain:

        >>> mean = fn.compressed_average("data", fn.sign(), layout="per_tensor")
        >>> moments = fn.scale_by_onebit_adam(b2=0.999, sync=mean)
        >>> tx = fn.chain(fn.average("data"), moments, fn.add_decayed_weights(0.01), fn.scale_by_learning_rate(0.1))

    Args:
        lr: a float or a 0-d tensor; start with AdamW's rate. b1, eps: as for Adam. weight_decay: decoupled.
        b2: as for Adam, but 0.95: what is frozen are mean squares of the last tens of steps. With 0.999 they are those
            of the whole warm-up, whose first gradients are unlike all that follow.
        axis: the ranks that train together; `("local", "node")` averages exactly within a node, in codes across them.
        codec: how the momentum is quantized; None is `sign(block=64)`, 1.25 bits a number; `sign()` has one scale per
            tensor.
        feedback: what becomes of the residual errors; None is `classic()`: they are sent with the next momentum.
            `classic(lazy=True)` is the same in fewer passes over memory.
        warmup: how gradients are quantized in the warm-up, with `damped()` feedback; None is full precision. See
            `average`.
        servers: as for `compressed_average`; False is faster for two ranks.
        max_step: as for `scale_by_onebit_adam`; None is the paper's step.
    Returns: a transform with a warm-up and a compressed phase; `freeze_after(n)` is its schedule.
    Raises: ValueError or TypeError that names the argument.

    Paper: Tang et al., 1-bit Adam (arXiv 2102.02888), algorithm 1.
    Differs: weight decay is decoupled, as in the authors' code; the initialising call of that code is not made. Each
        block of 64 has a scale. The step of the compressed phase is clamped to `max_step`. Moments are bias-corrected.
    """
    sync = average_in_codes(axis, codec, feedback, "flat", servers)
    tx = chain(
        warm_up(axis, warmup),
        scale_by_onebit_adam(b1, b2, eps, sync=sync, bias_correction=True, max_step=max_step),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(lr),
    )
    return agreed(skip_nonfinite(tx), axis)


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
    """Train with LoCo: AdamW on shards (ZeRO), whose gradients are reduced in 4 bits with a damped error feedback.

    Take it where params and moments are divided among ranks, or should be. On the atlas's texts its loss was not told
    apart from AdamW's.

        h = g_r + e_r;    e_r <- beta e_r + (1 - beta) (h - Q_4(h));    a shard of mean_r Q_4(h) is Adam's gradient

        >>> import fn
        >>> fn.testing.train(fn.loco_adamw(0.1, axis="data"), fn.freeze_after(2))
        Loss(before=0.944, after=0.01)

    Args:
        lr: a float or a 0-d tensor; start with AdamW's rate. b1, b2, eps, weight_decay: as for `adamw`.
        axis: the ranks that train together, among which moments and master params are divided; with several names,
            such as ("local", "node"), a tuple of codecs has one for each network, see
            `fn.collectives.hierarchy.hops`.
        codec: how gradients are quantized; None is `int4()`. feedback: None is `damped()`, the error in 8 bits.
        gather, master, layout: as for `sharded`.
    Returns: a transform with a warm-up, in full precision, and a compressed phase; `freeze_after(n)` is its schedule.
        n may be small: nothing is frozen, only the gradients go over to codes.
    Raises: ValueError or TypeError that names the argument.

    Paper: Xie et al., LoCo (arXiv 2407.04480), algorithm 1 with Adam as the optimizer.
    Differs: see `damped` and `int4`; the scale is each block's maximum, not given.
    """
    inner = chain(scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay), scale_by_learning_rate(lr))
    feedback = damped() if feedback is None else feedback
    codec = int4() if codec is None else codec
    tx = sharded(inner, axis, codec, feedback, gather=gather, master=master, layout=layout)
    return agreed(skip_nonfinite(tx), axis)


def sharded_onebit_adam(
    lr: float | Tensor = 1e-3,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    axis: AxisNames,
    codec: Codecs | None = None,
    feedback: Feedbacks | None = None,
    gather: Codecs | None = None,
    master: bool | None = None,
    layout: str = "flat",
    max_step: float | None = 3.0,
) -> Transform:
    """Train with 1-bit Adam over ZeRO-1: divide the frozen second moment and the master params among the ranks.

    Take it where memory is short, and `onebit_adam` where only the network is slow. The momentum is all-reduced in
    codes, as there, and stays whole on every rank, because every rank adds its gradient to it. On top of that the
    updates are gathered, in the params' dtype if `gather` is None.

        p_s <- p_s - lr (clamp(mu_s / (sqrt(nu_s) + eps)) + weight_decay p_s)    for the shard s of each rank

        >>> import fn
        >>> fn.testing.train(fn.sharded_onebit_adam(0.1, axis="data"), fn.freeze_after(10))
        Loss(before=0.944, after=0.115)

    Args:
        lr: a float or a 0-d tensor; start with AdamW's rate. b1, eps: as for Adam. weight_decay: decoupled.
        b2, axis, codec, feedback, max_step: as for `onebit_adam`. gather, master, layout: as for `sharded`.
    Returns: a transform with a warm-up and a compressed phase; `freeze_after(n)` is its schedule.
    Raises: ValueError or TypeError that names the argument.

    Paper: Tang et al., 1-bit Adam (arXiv 2102.02888), algorithm 1; Rajbhandari et al., ZeRO (arXiv 1910.02054).
    Differs: elements that never received a gradient take part in the exchange, where their momentum is not zero; their
        params do not move. Each block of 64 has a scale. The step of the compressed phase is clamped to `max_step`.
        Moments are bias-corrected.
    """
    inner = chain(
        # sync does nothing: the shard that it sees is of the mean already
        scale_by_onebit_adam(b1, b2, eps, sync=chain(), bias_correction=True, max_step=max_step),
        add_decayed_weights(weight_decay),
        scale_by_learning_rate(lr),
    )
    codec = sign(block=64) if codec is None else codec
    tx = sharded(inner, axis, codec, feedback, gather=gather, master=master, layout=layout, momentum=b1)
    return agreed(skip_nonfinite(tx), axis)
