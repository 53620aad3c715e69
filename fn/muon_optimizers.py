"""Named optimizers of the Muon family: each is a chain under its docstring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fn import tree
from fn.base import Phase, Transform, chain, check_interval, missing
from fn.collectives.codecs.codec import Codec
from fn.collectives.feedback import Feedback
from fn.errors import expected
from fn.transforms import scaling
from fn.transforms.adam import scale_by_adam
from fn.transforms.average import agreed, always_average, average
from fn.transforms.decay_and_lr import add_decayed_weights, scale_by_learning_rate
from fn.transforms.lion import scale_by_lion
from fn.transforms.masking import Labels, hidden_and_other, partition, unfrozen
from fn.transforms.momentum import trace
from fn.transforms.muon import Scale, Triple, orthogonalize, scale_by_muon
from fn.transforms.owned import newton_schulz_costs
from fn.transforms.owned import owned as by_owners
from fn.transforms.skip_nonfinite import skip_nonfinite
from fn.transforms.unsharded import Shards, labelled, unsharded

Tree = Any


def muon(
    lr: float | Tensor = 0.02,
    momentum: float = 0.95,
    weight_decay: float = 0.01,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    *,
    axis: str | None = None,
    labels: Labels = None,
    owned: bool = True,
    nesterov: bool = True,
    scale: Scale = "spectral_norm",
    coefficients: str | Sequence[Triple] = "polar_express",
    dtype: torch.dtype | None = None,
    flatten: bool = False,
    cautious: bool = False,
    other: Literal["adamw", "lion"] = "adamw",
    other_rate: float = 1.0,
    codec: Codec | None = None,
    feedback: Feedback | None = None,
    gather: Codec | None = None,
    shards: Shards | str | None = None,
) -> Transform:
    """Muon: matrices of hidden layers move along their momentum, made orthogonal; AdamW, or Lion, moves the others.

        >>> import torch, fn
        >>> tx = fn.muon(0.1, axis="data")
        >>> def train(target):                # of each rank; the best p is their mean
        ...     p = torch.zeros(4, 3)
        ...     state = tx.init(p)
        ...     for step in range(30):
        ...         updates, state = tx.update(fn.Phase.WARMUP)(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> targets = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
        >>> best, p = targets.mean(0), fn.simulate(train, "data", 2)(targets)[0]
        >>> print(f"{best.square().mean():.3f} -> {(p - best).square().mean():.3f}")
        0.450 -> 0.007

    Args:
        lr: of matrices, a float or a 0-d tensor; start with AdamW's rate times 2 where scale="rms_norm". other_rate:
            the rate of the others, as a multiple of it.
        momentum, nesterov, scale, coefficients, dtype, flatten: as for `scale_by_muon`; with scale="rms_norm" a rate of
            AdamW fits both kinds.
        weight_decay, cautious: of all tensors, as for `add_decayed_weights`.
        axis: the ranks that train together; None for none.
        owned: whether each tensor's step is taken by one rank, see `fn.owned`, which keeps its state. False: all ranks
            take all steps. The params are the same up to rounding.
        codec, feedback, gather: as for `fn.owned`, where tensors are owned; as for `fn.unsharded`, where they are in
            shards.
        shards: the axis over which params are divided by rows, or more of it, as for `fn.unsharded`: momentum stays on
            the shards, and each matrix is brought to one rank for the iterations. `fn.Optimizer` gives it for params of
            FSDP2. `axis` is then another one; no tensors are owned over it.
        labels: which tensors are "hidden", Muon's, and which "other": `fn.labels_of(model)`, which leaves embeddings
            and the head to AdamW. None: all matrices are Muon's, for their shapes do not tell.
        other: what moves the others. b1, b2: of it. eps: of AdamW and of Muon.
    Returns: a transform with a warm-up; where tensors are owned, or travel from shards in codes, also with a compressed
        phase, which is exact, too, if there is neither codec nor gather.

    Paper: Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024); coefficients of Amsel et al.,
        The Polar Express (arXiv 2505.16932).
    Differs: the iterations are in float32 unless dtype=torch.bfloat16 is given, which all originals use.
    """
    check_interval("momentum", momentum, "[0, 1)")
    check_interval("other_rate", other_rate, "[0, inf)")
    if other not in ("adamw", "lion"):
        raise ValueError(expected("other", "'adamw' or 'lion'", f"{other!r}"))
    if not isinstance(owned, bool):
        raise TypeError(expected("owned", "True or False", f"{owned!r}"))
    decay, rate = add_decayed_weights(weight_decay, cautious), scale_by_learning_rate(lr)
    direction = scale_by_adam(b1, b2, eps) if other == "adamw" else scale_by_lion(b1, b2)
    is_matrix = (lambda p: p.ndim >= 2) if flatten else (lambda p: p.ndim == 2)
    named = hidden_and_other(labels, {"hidden": "muon", "other": other}, is_matrix)
    rule = partial(orthogonalize, eps=eps, scale=scale, coefficients=coefficients, dtype=dtype, flatten=flatten)
    kind_of: Tree | Callable[[Tree], Tree] = named
    if shards is None:
        iterations = scale_by_muon(momentum, nesterov, **rule.keywords)
    else:
        kind_of, shards_of = labelled(shards, named, labels)
        whole = unsharded(rule(), shards_of("muon"), codec=codec, feedback=feedback, gather=gather)
        iterations = chain(trace(momentum, nesterov), whole)
    kinds = {
        "muon": chain(iterations, decay, rate),
        other: chain(direction, decay, rate)
        if other_rate == 1
        else chain(direction, decay, scaling.scale(other_rate), rate),
    }
    inner = partition(kinds, kind_of)
    if shards is not None:
        in_codes = codec is not None or gather is not None
        mean = unfrozen(average(axis)) if in_codes else always_average(axis)
        without = missing(Phase.LOCAL, "Muon")
        return agreed(skip_nonfinite(chain(mean, inner)._replace(local_update=without)), axis)

    def costs(params: Tree) -> Tree:
        pairs = named(params), newton_schulz_costs(params), params
        return tree.map(lambda label, cost, p: cost if label == "muon" else p.numel(), *pairs)

    if owned and axis is not None:
        tx = by_owners(inner, axis, codec=codec, feedback=feedback, gather=gather, cost=costs)
        return agreed(skip_nonfinite(tx), axis)
    for name, given in (("codec", codec), ("feedback", feedback), ("gather", gather)):
        if given is not None:
            raise ValueError(f"{name}: is given where no tensors are owned; pass owned=True and an axis")
    return agreed(skip_nonfinite(chain(always_average(axis), inner)), axis)
