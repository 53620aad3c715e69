"""Named optimizers whose averages are of low rank: each is a chain under its docstring."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from fn import tree
from fn.arguments import check_interval, check_number
from fn.base import Phase, Transform, chain, missing
from fn.collectives.axis import AxisNames
from fn.collectives.feedback import Feedback, decayed
from fn.transforms.adam import scale_by_adam
from fn.transforms.average import agreed, average
from fn.transforms.decay_and_lr import add_decayed_weights, check_rate, scale_by_learning_rate
from fn.transforms.low_rank import low_rank_average
from fn.transforms.mask_and_partition import Labels, hidden_and_other, partition, unfrozen
from fn.transforms.scaling import scale, scale_by_shape
from fn.transforms.skip_nonfinite import skip_nonfinite
from fn.transforms.unsharded import Shards, labelled, unsharded


def powersgd_adamw(
    lr: float | Tensor = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    *,
    axis: AxisNames,
    rank: int | float = 4,
    feedback: Feedback | None = None,
    mean: Transform | None = None,
    min_rate: float = 1.0,
    seed: int = 0,
) -> Transform:
    """Train with PowerSGD and AdamW: average gradients as products of two thin factors, with error feedback.

    Take it where links are very slow and large matrices are most of the model; gradients in int4 train to a lower loss.
    Small matrices shrink little: on a text, 200 steps of a transformer of 35,000 parameters on four ranks, it sent
    4.3 times fewer bytes and ended 0.10 and 0.16 nats above `adamw`, with two batch sizes and AdamW's best rates;
    gradients in int4 took 7.6 times fewer bytes and ended 0.01 and 0.03 above it.

        c_r = g_r + e_r;    P = qr(mean_r c_r qr(Q));    Q <- mean_r c_r^T P;    P Q^T is AdamW's gradient

        >>> import fn
        >>> fn.testing.train(fn.powersgd_adamw(0.1, axis="data", rank=1), fn.freeze_after(1))
        Loss(before=0.944, after=0.017)

    Args:
        lr: a float or a 0-d tensor; start with AdamW's rate. b1, b2, eps, weight_decay: as for `adamw`.
        axis: the ranks that train together. rank, feedback, mean, min_rate, seed: as for `low_rank_average`.
    Returns: a transform with a warm-up, which is exact, and a compressed phase; `freeze_after(n)` is its schedule.
        Nothing is frozen, so n may be small.
    Raises: TypeError or ValueError that names the argument.

    Paper: Vogels et al., PowerSGD (arXiv 1905.13727), algorithms 1 and 2, with Adam as the optimizer.
    """
    low_rank = low_rank_average(axis, rank, feedback=feedback, mean=mean, min_rate=min_rate, seed=seed)
    low_rank = low_rank._replace(local_update=missing(Phase.LOCAL, "PowerSGD"))
    adam = scale_by_adam(b1, b2, eps, await_gradient=True)
    ends = add_decayed_weights(weight_decay), scale_by_learning_rate(lr)
    return agreed(skip_nonfinite(chain(average(axis), low_rank, adam, *ends)), axis)


def dion(
    lr: float | Tensor = 0.04,
    momentum: float = 0.95,
    weight_decay: float = 0.01,
    *,
    axis: AxisNames,
    labels: Labels = None,
    shards: Shards | str | None = None,
    rank: int | float = 0.25,
    multiple_of: int = 1,
    adamw_rate: float = 1.0,
    mean: Transform | None = None,
    iterations: int = 1,
    seed: int = 0,
) -> Transform:
    """Train with Dion: send and step along orthonormal thin factors of a momentum; AdamW for other tensors.

    Take it where Newton-Schulz iterations of whole matrices take too long; else `muon` with a codec, which sends less.

        c_r = m_r + g_r;    P = qr(mean_r c_r Q);    R = mean_r c_r^T P;    m_r <- c_r - (1 - mu) P R_r^T
        Q = R, its columns divided by their norms;    p <- p - lr (s P Q^T + weight_decay p)

        >>> import fn
        >>> fn.testing.train(fn.dion(0.07, axis="data", rank=2), fn.freeze_after(1))
        Loss(before=0.944, after=0.023)

    Args:
        lr: of matrices, a float or a 0-d tensor; start with AdamW's rate times 3, at most 0.04. adamw_rate: AdamW's
            learning rate, as a multiple of it.
        labels: which tensors are "hidden", Dion's, and which "other", averaged exactly for AdamW:
            `fn.labels_of(model)`, which leaves it embeddings and the head. None: all tensors of two dimensions and more
            are Dion's, for their shapes do not tell. Labels with splits or heads are refused.
        momentum: mu; the momentum loses 1 - mu of what is sent. weight_decay: of all tensors. AdamW's betas are 0.9 and
            0.95.
        axis: the ranks that train together. rank, multiple_of, mean, iterations, seed: as for `low_rank_average`. The
            authors' code begins at rank=1.0, which saves no bytes; they train 3 billion parameters with 1/4.
        shards: the axis over which params are divided by rows, as for `fn.unsharded`, another one than `axis`: matrices
            are brought whole to one rank, which keeps their momentum. `fn.Optimizer` gives it for params of FSDP2.
    Returns: a transform with two phases, which differ only where `mean` is given: factors are exact in the warm-up.
    Raises: TypeError or ValueError that names the argument.

    Paper: Ahn et al., Dion (arXiv 2504.05295), algorithm 3.
    Differs: the first step sends no more than the others; the authors' code averages the gradient in it, too.
    """
    check_interval("momentum", momentum, "[0, 1)")
    check_number("adamw_rate", adamw_rate)
    check_rate(adamw_rate, "adamw_rate")
    named = hidden_and_other(labels, {"hidden": "dion", "other": "adamw"}, lambda p: p.ndim > 1, takes_parts=False)
    low_rank = partial(
        low_rank_average, axis, rank, feedback=decayed(1.0, 1.0 - momentum), mean=mean, orthonormal=True,
        multiple_of=multiple_of, iterations=iterations, seed=seed,
    )  # fmt: skip
    decay, rate = add_decayed_weights(weight_decay), scale_by_learning_rate(lr)
    if shards is not None:
        kind_of, shards_of = labelled(shards, named, labels)
        whole = unsharded(chain(low_rank(), scale_by_shape()), shards_of("dion"))
        adam = unfrozen(average(axis)), scale_by_adam(0.9, 0.95), decay, scale(adamw_rate), rate
        inner = partition({"dion": chain(whole, decay, rate), "adamw": chain(*adam)}, kind_of)
        return agreed(skip_nonfinite(inner), axis)
    factors = low_rank(exactly=lambda params: tree.map(lambda label: label == "adamw", named(params)))
    kinds = {
        "dion": chain(scale_by_shape(), decay, rate),
        "adamw": chain(scale_by_adam(0.9, 0.95, await_gradient=True), decay, scale(adamw_rate), rate),
    }
    return agreed(skip_nonfinite(chain(factors, partition(kinds, named))), axis)
