"""Named optimizers of the Muon family: each is a chain under its docstring."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from fn import tree
from fn.arguments import check_flag, check_interval
from fn.base import Phase, Transform, chain, missing
from fn.collectives.axis import AxisNames
from fn.collectives.codecs.ballots import ballots
from fn.collectives.codecs.codec import Codec
from fn.collectives.codecs.integer import int8
from fn.collectives.feedback import classic, off
from fn.errors import expected
from fn.transforms import scaling
from fn.transforms.adam import scale_by_adam
from fn.transforms.average import agreed, always_average, average, compressed_average
from fn.transforms.decay_and_lr import add_decayed_weights, compensate_rounding, scale_by_learning_rate
from fn.transforms.lion import scale_by_lion
from fn.transforms.mask_and_partition import Labels, hidden_and_other, in_slices, partition, unfrozen
from fn.transforms.momentum import local_momentum, trace
from fn.transforms.muon import Scale, orthogonalize, scale_by_muon, scale_by_neuron_norm
from fn.transforms.owned import newton_schulz_costs
from fn.transforms.owned import owned as by_owners
from fn.transforms.scaling import scale_by_sign
from fn.transforms.skip_nonfinite import skip_nonfinite
from fn.transforms.unsharded import Shards, labelled, unsharded

Tree = Any


def muon(
    lr: float | Tensor = 0.02,
    momentum: float = 0.95,
    weight_decay: float = 0.01,
    *,
    axis: AxisNames | None = None,
    labels: Labels = None,
    shards: Shards | str | None = None,
    owned: bool = True,
    codec: Codec | None = None,
    other: Literal["adamw", "lion"] = "adamw",
    other_rate: float = 1.0,
    scale: Scale = "spectral_norm",
    dtype: torch.dtype | None = None,
) -> Transform:
    """Train with Muon: move matrices of hidden layers along their orthogonalised momentum, all else by AdamW or Lion.

    Take it for transformers, with `labels`; over slow links with a codec, or `sign_muon` in its place.

        m <- momentum m + g;    z = g + momentum m;    p <- p - lr (s NS(z) + weight_decay p)

        >>> import fn
        >>> fn.testing.train(fn.muon(0.07, axis="data"))
        Loss(before=0.944, after=0.052)

    With Keller Jordan's coefficients, cautious decay, betas of AdamW's, and codes one way only it is this chain:

        >>> ends = fn.add_decayed_weights(0.01, cautious=True), fn.scale_by_learning_rate(0.02)
        >>> kinds = {
        ...     "hidden": fn.scale_by_muon(0.95, nesterov=True, scale="max", coefficients="jordan"),
        ...     "other": fn.chain(fn.scale_by_adam(0.8, 0.95), fn.scale(0.1)),
        ... }
        >>> kind_of = lambda params: fn.tree.map(lambda p: "hidden" if p.ndim == 2 else "other", params)
        >>> owned = fn.owned(fn.partition(kinds, kind_of), "data", codec=fn.int8(), feedback=fn.classic())
        >>> tx = fn.chain(owned, *ends)

    Args:
        lr: of matrices, a float or a 0-d tensor; start with 0.02. other_rate: the rate of the others, as a multiple of
            it.
        momentum, scale, dtype: as for `scale_by_muon`; with scale="rms_norm" a rate of AdamW fits both kinds.
        weight_decay: of all tensors, decoupled.
        axis: the ranks that train together; None for none. ("local", "node"): owned over two axes, as for `fn.owned`.
        labels: which tensors are "hidden", Muon's, and which "other": `fn.labels_of(model)`, which leaves embeddings
            and the head to AdamW. None: all matrices are Muon's, for their shapes do not tell.
        shards: the axis over which params are divided by rows, or more of it, as for `fn.unsharded`: momentum stays on
            the shards, and each matrix is brought to one rank for the iterations. `fn.Optimizer` gives it for params of
            FSDP2. `axis` is then another one; no tensors are owned over it.
        owned: whether each tensor's step is taken by one rank, see `fn.owned`, which keeps its state. False: all ranks
            take all steps. The params are the same up to rounding.
        codec: how gradients travel to the owners, or rows to the rank that has the matrix, and updates back, in the
            compressed phase, with `classic()` feedback; None is exactly.
        other: what moves the others: AdamW with betas 0.9 and 0.95, or Lion with them.
    Returns: a transform with a warm-up; where tensors are owned, or travel from shards in codes, also with a compressed
        phase, which is exact, too, if there is no codec. `freeze_after(n)` is its schedule then, and n may be small.
    Raises: TypeError or ValueError that names the argument.

    Paper: Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024); coefficients of Amsel et al.,
        The Polar Express (arXiv 2505.16932).
    Differs: the iterations are in float32 unless dtype=torch.bfloat16 is given, which all originals use. Of params in
        half precision, what rounding drops is added to the next step; `torch.optim.Muon` loses it.
    """
    if other not in ("adamw", "lion"):
        raise ValueError(expected("other", "'adamw' or 'lion'", f"{other!r}"))
    adam = scale_by_adam(0.9, 0.95, await_gradient=axis is not None and shards is None)
    direction = adam if other == "adamw" else scale_by_lion(0.9, 0.95)
    return _muon(
        [], {other: direction}, lr, momentum, weight_decay, axis, labels, shards, owned, codec, other_rate, scale, dtype
    )


def normuon(
    lr: float | Tensor = 0.02,
    momentum: float = 0.95,
    b2: float = 0.95,
    weight_decay: float = 0.01,
    *,
    axis: AxisNames | None = None,
    labels: Labels = None,
    shards: Shards | str | None = None,
    owned: bool = True,
    codec: Codec | None = None,
    other_rate: float = 1.0,
    scale: Scale = "spectral_norm",
    dtype: torch.dtype | None = None,
) -> Transform:
    """Train with NorMuon: Muon whose rows move about as fast as each other; all other tensors by AdamW.

    Take it where `muon` fits; it keeps one more number for each row.

        m <- momentum m + g;    u = s NS(g + momentum m);    v <- b2 v + (1 - b2) mean_columns u^2
        y = u / (sqrt(v) + 1e-8);    p <- p - lr (y |u|_F / |y|_F + weight_decay p)

        >>> import fn
        >>> fn.testing.train(fn.normuon(0.07, axis="data"))
        Loss(before=0.944, after=0.075)

    With Lion for the others, say, it is `muon`'s chain with `fn.scale_by_neuron_norm(b2)` behind `fn.scale_by_muon`.

    Args:
        lr, momentum, weight_decay, axis, labels, shards, owned, codec, other_rate, scale, dtype: as for `muon`.
        b2: how much of v a step keeps, as for `scale_by_neuron_norm`.
    Returns: as `muon`.
    Raises: TypeError or ValueError that names the argument.

    Paper: Li et al., NorMuon: making Muon more efficient and scalable (arXiv 2510.05491).
    """
    kinds = {"adamw": scale_by_adam(0.9, 0.95, await_gradient=axis is not None and shards is None)}
    norm = scale_by_neuron_norm(b2)
    return _muon(
        [norm], kinds, lr, momentum, weight_decay, axis, labels, shards, owned, codec, other_rate, scale, dtype
    )


def _muon(
    behind: Sequence[Transform], others: Mapping[str, Transform], lr: float | Tensor, momentum: float,
    weight_decay: float, axis: AxisNames | None, labels: Labels, shards: Shards | str | None, owned: bool,
    codec: Codec | None, other_rate: float, scale: Scale, dtype: torch.dtype | None,
) -> Transform:  # fmt: skip
    """Return Muon with links behind its iterations. others: the label of the other tensors, and their direction."""
    check_interval("momentum", momentum, "[0, 1)")
    check_interval("other_rate", other_rate, "[0, inf)")
    check_flag("owned", owned)
    ((other, direction),) = others.items()
    named = hidden_and_other(labels, {"hidden": "muon", "other": other})
    rule = partial(orthogonalize, scale=scale, coefficients="polar_express", dtype=dtype)
    kind_of: Tree | Callable[[Tree], Tree] = named
    if shards is None:
        iterations = scale_by_muon(momentum, True, **rule.keywords)
        iterations = chain(iterations, *behind) if behind else iterations
    else:
        kind_of, shards_of = labelled(shards, named, labels)
        whole = chain(rule(), *behind) if behind else rule()
        iterations = chain(trace(momentum, True), unsharded(whole, shards_of("muon"), codec=codec, gather=codec))
    slower = [] if other_rate == 1 else [partition({"muon": chain(), other: scaling.scale(other_rate)}, kind_of)]
    inner = partition({"muon": iterations, other: direction}, kind_of)
    # What travels are directions. Behind them all ranks decay by the params, and step by the rate, that they have now.
    ends = add_decayed_weights(weight_decay), *slower, scale_by_learning_rate(lr), compensate_rounding()
    if shards is not None:
        mean = always_average(axis) if codec is None else unfrozen(average(axis))
        return _finished(chain(mean, inner, *ends), axis, "Muon")

    def costs(params: Tree) -> Tree:
        pairs = named(params), newton_schulz_costs(params, flatten=False), params
        return tree.map(lambda label, cost, p: cost if label == "muon" else p.numel(), *pairs)

    if owned and axis is not None:
        directions = by_owners(inner, axis, codec=codec, gather=codec, cost=costs)
        return agreed(skip_nonfinite(chain(directions, *ends)), axis)
    if codec is not None:
        raise ValueError("codec: is given where no tensors are owned; pass owned=True and an axis")
    return agreed(skip_nonfinite(chain(always_average(axis), inner, *ends)), axis)


def sign_muon(
    lr: float | Tensor = 0.04,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    *,
    axis: AxisNames,
    labels: Labels = None,
    shards: Shards | str | None = None,
    votes: Literal["momenta", "directions"] = "momenta",
    servers: bool = True,
    other_rate: float = 1.0,
    scale: Scale = "rms_norm",
    dtype: torch.dtype | None = None,
) -> Transform:
    """Train with SignMuon: vote on momenta with one bit a number, and move along the vote, made orthogonal.

    Take it for transformers over slow links, in every step: about 1/32 of the bytes of hidden matrices, a quarter of
    those of the other tensors, no warm-up.

        m_r <- momentum m_r + (1 - momentum) g_r;    p <- p - lr (s NS(majority_r sgn(m_r)) + weight_decay p)
        votes="directions":                          p <- p - lr (majority_r sgn(NS(m_r)) + weight_decay p)

        >>> import fn
        >>> fn.testing.train(fn.sign_muon(0.3, axis="data"), fn.freeze_after(0))
        Loss(before=0.944, after=0.075)

    Of convolutions, taken as matrices, it is this chain:

        >>> votes = fn.compressed_average("data", fn.ballots(), fn.off())
        >>> vote = fn.chain(fn.average("data"), fn.scale_by_sign(), votes)
        >>> step = fn.chain(fn.scale_by_sign(), fn.orthogonalize(scale="rms_norm", coefficients="jordan", flatten=True))
        >>> tx = fn.chain(fn.local_momentum(0.1), vote, step, fn.scale_by_learning_rate(0.01))

    Args:
        lr: a float or a 0-d tensor; start with AdamW's rate times 4, at most 0.04, for with scale="rms_norm" a number
            moves by about 0.2 lr. momentum: mu. weight_decay: decoupled.
        axis: the ranks that train together.
        labels: which tensors are "hidden", Muon's, and which "other", as for `muon`; others are AdamW's, behind means
            in 8 bits whose errors are kept. other_rate: their rate, as a multiple of lr.
        shards: the axis over which params are divided, as for `muon`; `fn.Optimizer` gives it for params of FSDP2.
            Ranks vote on their shards, over `axis`, and matrices are brought together behind the vote.
        votes: on what ranks vote, their momenta, which are orthogonalised after it, or on directions that each rank
            has orthogonalised by itself. Then every number of a step is lr or -lr, and `scale` changes nothing.
        servers: as for `lion_vote`; where there are none, a tie is 0.
        scale, dtype: Muon's, as for `scale_by_muon`; the coefficients are "jordan".
    Returns: a transform with a warm-up, in which the mean of what ranks vote on is exact, and a compressed phase;
        `freeze_after(n)` is its schedule, and n may be 0.
    Raises: TypeError or ValueError that names the argument.

    Paper: Trivedi et al., SignMuon (arXiv 2605.16311), and MuonUSign, both of github intsystems/SignMuon; Bernstein et
        al., signSGD with majority vote (arXiv 1810.05291).
    Differs: with servers, ties and zeros take turns, and only blocks of zeros abstain; there all are 0.
    """
    check_interval("momentum", momentum, "[0, 1)")
    check_interval("other_rate", other_rate, "[0, inf)")
    if votes not in ("momenta", "directions"):
        raise ValueError(expected("votes", "'momenta' or 'directions'", f"{votes!r}"))
    named = hidden_and_other(labels, {"hidden": "muon", "other": "other"})
    sign, iterations = scale_by_sign(), orthogonalize(eps=1e-7, scale=scale, coefficients="jordan", dtype=dtype)
    kind_of: Tree | Callable[[Tree], Tree] = named
    if shards is not None:
        kind_of, shards_of = labelled(shards, named, labels)
        iterations = unsharded(iterations, shards_of("muon"))

    def stacks(params: Tree) -> list[bool]:
        return [p.ndim > 2 and len(p) > 0 for p in tree.leaves(params)]

    # By slices, so that an expert whose momentum is zero on all ranks shares its ballots with no other.
    ballot = in_slices(compressed_average(axis, ballots(), off(), servers=servers), stacks)
    # A sign in front of the vote changes no ballot, and is all of it on one rank.
    vote = chain(average(axis), sign, ballot, sign)
    links = (vote, iterations) if votes == "momenta" else (iterations, vote)
    mean = chain(average(axis), compressed_average(axis, int8(), classic()))
    kinds = {
        "muon": chain(local_momentum(1 - momentum), *links),
        "other": chain(mean, scale_by_adam(0.9, 0.95, await_gradient=shards is None), scaling.scale(other_rate)),
    }
    ends = add_decayed_weights(weight_decay), scale_by_learning_rate(lr), compensate_rounding()
    return _finished(chain(partition(kinds, kind_of), *ends), axis, "sign_muon")


def _finished(tx: Transform, axis: AxisNames | None, name: str) -> Transform:
    """Return an optimizer in the usual wrappers, and without a local phase."""
    return agreed(skip_nonfinite(tx._replace(local_update=missing(Phase.LOCAL, name))), axis)
