"""Named variants of Muon that send less, or compute less: each is a chain under its docstring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fn.base import Facts, Phase, Transform, chain, check_interval, check_is_transform, missing, unchanged
from fn.collectives.axis import AxisNames
from fn.collectives.codecs.ballots import ballots
from fn.collectives.codecs.codec import Codec
from fn.collectives.codecs.top_k import top_k
from fn.collectives.feedback import differences, off
from fn.errors import expected
from fn.transforms.adam import scale_by_adam
from fn.transforms.average import agreed, average, compressed_average
from fn.transforms.blocks import in_blocks
from fn.transforms.decay_and_lr import add_decayed_weights, scale_by_learning_rate
from fn.transforms.dion2 import Side, scale_by_dion2
from fn.transforms.lion import lion_direction
from fn.transforms.masking import Labels, hidden_and_other, partition, unfrozen
from fn.transforms.momentum import local_momentum, running_sum, trace
from fn.transforms.muon import Scale, Triple, orthogonalize
from fn.transforms.scaling import scale as scale_by
from fn.transforms.scaling import scale_by_sign
from fn.transforms.skip_nonfinite import skip_nonfinite
from fn.transforms.unsharded import Shards, labelled, unsharded

Tree = Any


def lion_muon(
    lr: float | Tensor = 0.01,
    b1: float = 0.95,
    b2: float = 0.99,
    weight_decay: float = 0.1,
    eps: float = 1e-7,
    *,
    axis: AxisNames | None = None,
    labels: Labels = None,
    lion_rate: float = 0.2,
    votes: bool = True,
    servers: bool = True,
    other: Transform | None = None,
    other_rate: float = 1.0,
    scale: Scale = "rms_norm",
    coefficients: str | Sequence[Triple] = "jordan",
    dtype: torch.dtype | None = None,
    flatten: bool = False,
    shards: Shards | str | None = None,
) -> Transform:
    """LionMuon: Muon one step in P, Lion between, both along one momentum; between, ranks vote with one bit a number.

        z_r = b1 m_r + (1 - b1) g_r;    m_r <- b2 m_r + (1 - b2) g_r
        warm-up:     p <- p - lr (s NS(mean_r z_r) + weight_decay p)
        compressed:  p <- p - lion_rate lr (majority_r sgn(z_r) + weight_decay p)

        >>> import torch, fn
        >>> tx, schedule = fn.lion_muon(0.2, axis="data"), fn.periodic(5)
        >>> def train(target):                # of each rank; ranks differ little, so that votes agree
        ...     p = torch.zeros(4, 3)
        ...     state = tx.init(p)
        ...     for step in range(40):
        ...         updates, state = tx.update(schedule(step))(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> noise = torch.randn(3, 4, 3, generator=torch.Generator().manual_seed(0))
        >>> targets = noise[0] + 0.1 * noise
        >>> best, p = targets.mean(0), fn.simulate(train, "data", 3)(targets)[0]
        >>> print(f"{best.square().mean():.3f} -> {(p - best).square().mean():.3f}")
        0.944 -> 0.060

    Args:
        lr: of Muon's steps, a float or a 0-d tensor. With scale="rms_norm" a number moves by about 0.2 lr in them, so
            start with AdamW's rate times 2. lion_rate: of Lion's steps, as a multiple of it; with 0.2 they are as
            long. weight_decay: of all tensors, at the step's rate.
        b1: weight of the old momentum in the step. b2: its weight in the momentum that is kept.
        axis: the ranks that train together; None for none.
        labels: which tensors are "hidden", Muon's, and which "other", as for `muon`.
        votes: between, ranks vote with one bit a number, and keep momenta of their own, whose mean is that of one
            momentum over mean gradients. False: all that ranks send is exact, in every step. servers: as for
            `lion_vote`.
        other: what gives the direction of the others, `scale_by_adam()` say, from gradients that are averaged exactly
            in every step; other_rate: its rate, as a multiple of lr. None: Lion, with the votes of the rest.
        eps, scale, coefficients, dtype, flatten: Muon's, as for `scale_by_muon`.
        shards: as for `muon`: on FSDP2's shards matrices are brought together for Muon's steps, and for no others.
    Returns: a transform with a warm-up, Muon's steps, and a compressed phase, Lion's; `periodic(p)` is its schedule.

    Paper: LionMuon: alternating spectral and sign descent (arXiv 2609.35297, of which the authors' code names
        2605.19811); Liu et al., Distributed Lion (arXiv 2404.00438), for the votes.
    Differs: ranks vote between; in the authors' code they average gradients exactly in every step. Every rank takes
        Muon's step of all matrices; there owners take it, and an all-reduce adds up their updates.
    """
    check_interval("lion_rate", lion_rate, "(0, inf)")
    check_interval("other_rate", other_rate, "[0, inf)")
    if not isinstance(votes, bool):
        raise TypeError(expected("votes", "True or False", f"{votes!r}"))
    if other is not None:
        check_is_transform("other", other)
    exact, direction, sign = unfrozen(average(axis)), lion_direction(b1, b2), scale_by_sign()
    mean, majority = (average(axis) if votes else exact), chain()
    if votes and axis is not None:  # a sign in front of the vote changes no ballot, and is all of it on one rank
        majority = compressed_average(axis, ballots(), off(), servers=servers)
    muon_step = orthogonalize(eps=eps, scale=scale, coefficients=coefficients, dtype=dtype, flatten=flatten)
    kind_of, muon_step = _on_shards(muon_step, shards, labels, flatten)
    muon_step = muon_step._replace(compressed_update=unchanged)
    decay, slower, rate = add_decayed_weights(weight_decay), scale_by(lion_rate), scale_by_learning_rate(lr)
    lion_step = chain(sign, majority)._replace(warmup_update=unchanged)
    slower_lion = slower._replace(warmup_update=unchanged)
    lion = chain(direction, mean, sign, majority, decay, slower, rate)
    kinds = {
        "muon": chain(direction, mean, muon_step, lion_step, decay, slower_lion, rate),
        "other": lion if other is None else chain(exact, other, decay, scale_by(other_rate), rate),
    }
    return _finished(partition(kinds, kind_of), axis, "lion_muon")


def ef21_muon(
    lr: float | Tensor = 0.01,
    eta: float = 0.1,
    weight_decay: float = 0.0,
    eps: float = 1e-7,
    *,
    axis: str,
    labels: Labels = None,
    codec: Codec | None = None,
    sends: Literal["momenta", "directions"] = "momenta",
    other_rate: float = 0.2,
    scale: Scale = "rms_norm",
    coefficients: str | Sequence[Triple] = "jordan",
    dtype: torch.dtype | None = None,
    flatten: bool = False,
) -> Transform:
    """EF21-Muon: ranks send, in codes, the difference between their momentum and what they have sent of it.

        m_r <- (1 - eta) m_r + eta g_r;    c_r = C(m_r - h_r);    h_r <- h_r + c_r;    G <- G + mean_r c_r
        p <- p - lr (s NS(G) + weight_decay p)

        >>> import torch, fn
        >>> tx, schedule = fn.ef21_muon(0.1, 0.5, axis="data", codec=fn.top_k(0.25)), fn.freeze_after(1)
        >>> def train(target):                # of each rank; the best p is their mean
        ...     p = torch.zeros(4, 3)
        ...     state = tx.init(p)
        ...     for step in range(40):
        ...         updates, state = tx.update(schedule(step))(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> targets = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
        >>> best, p = targets.mean(0), fn.simulate(train, "data", 2)(targets)[0]
        >>> print(f"{best.square().mean():.3f} -> {(p - best).square().mean():.3f}")
        0.450 -> 0.000

    Args:
        lr: a float or a 0-d tensor. With scale="rms_norm" a number moves by about 0.2 lr, so start with AdamW's
            rate times 2. eta: weight of the new gradient in the momentum. weight_decay: decoupled.
        axis: the ranks that train together. All send to all others, so it is for few of them.
        labels: which tensors are "hidden", Muon's, and which "other", as for `muon`; others step along the sign of G.
            other_rate: their rate, as a multiple of lr; with 0.2 all are equally long where scale="rms_norm".
        codec: C; None is `top_k(0.05)`.
        sends: "momenta", as above; or "directions", where each rank orthogonalises its momentum before it is sent, and
            the step goes along G itself.
        eps, scale, coefficients, dtype, flatten: Muon's, as for `scale_by_muon`.
    Returns: a transform with a warm-up, in which m_r arrives exactly, and a compressed phase; `freeze_after(n)` is its
        schedule, and n may be 0.

    Paper: Gruntkowska et al., Error feedback for Muon and friends (arXiv 2510.00643), with momentum and identical
        clients; github intsystems/SignMuon for "directions".
    Differs: ranks add up what all send and take the step themselves; in the paper a server takes it and sends the model
        back, in codes as well.
    """
    _check_sent("sends", sends)
    mean = compressed_average(axis, top_k(0.05) if codec is None else codec, differences(), servers=False)
    muon_step = orthogonalize(eps=eps, scale=scale, coefficients=coefficients, dtype=dtype, flatten=flatten)
    return _sent_and_stepped(
        local_momentum(eta), chain(mean, running_sum()), muon_step, sends, _named(labels, flatten),
        other_rate, weight_decay, lr, axis, "ef21_muon",
    )  # fmt: skip


def dion2(
    lr: float | Tensor = 0.02,
    decay: float = 0.95,
    weight_decay: float = 0.01,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    *,
    axis: AxisNames | None = None,
    labels: Labels = None,
    fraction: float = 0.25,
    side: Side = "smaller",
    blocks: int = 1,
    other_rate: float = 1.0,
    scale: Scale = "spectral_norm",
    coefficients: str | Sequence[Triple] = "polar_express",
    dtype: torch.dtype | None = None,
    flatten: bool = False,
) -> Transform:
    """Dion2: Muon of the largest rows of each momentum, a fraction of them; only these travel. AdamW for other tensors.

        >>> import torch, fn
        >>> tx, schedule = fn.dion2(0.05, axis="data", fraction=0.5), fn.freeze_after(0)
        >>> def train(target):                # of each rank; the best p is their mean
        ...     p = torch.zeros(4, 3)
        ...     state = tx.init(p)
        ...     for step in range(40):
        ...         updates, state = tx.update(schedule(step))(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> targets = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
        >>> best, p = targets.mean(0), fn.simulate(train, "data", 2)(targets)[0]
        >>> print(f"{best.square().mean():.3f} -> {(p - best).square().mean():.3f}")
        0.450 -> 0.017

    Args:
        lr: of matrices, a float or a 0-d tensor; with scale="rms_norm" start with AdamW's rate times 3. other_rate: of
            the others, as a multiple of it.
        decay, fraction, side, blocks: as for `scale_by_dion2`, whose equations these are. A fraction of 1 is Muon.
        weight_decay: of all tensors, decoupled.
        axis: the ranks that train together; None for none.
        labels: which tensors are "hidden", Dion2's, and which "other", as for `muon`. Others are averaged exactly.
        b1, b2: of AdamW, which moves the others. eps: of both.
        scale, coefficients, dtype, flatten: as for `scale_by_muon`.
    Returns: a transform with a warm-up, in which all rows arrive exactly, and a compressed phase; `freeze_after(n)` is
        its schedule, and n may be 0.

    Paper: Dion2: a simple method to shrink matrix in Muon (arXiv 2512.16928).
    """
    check_interval("other_rate", other_rate, "[0, inf)")
    rows = scale_by_dion2(
        axis, fraction, decay, side=side, blocks=blocks, eps=eps, scale=scale, coefficients=coefficients, dtype=dtype,
        flatten=flatten,
    )  # fmt: skip
    shrink, rate = add_decayed_weights(weight_decay), scale_by_learning_rate(lr)
    exact = unfrozen(average(axis))
    kinds = {
        "muon": chain(rows, shrink, rate),
        "other": chain(exact, scale_by_adam(b1, b2, eps), shrink, scale_by(other_rate), rate),
    }
    return _finished(partition(kinds, _named(labels, flatten)), axis, "dion2")


def muon_bp(
    lr: float | Tensor = 0.02,
    momentum: float = 0.95,
    weight_decay: float = 0.01,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-7,
    *,
    axis: AxisNames | None = None,
    labels: Labels = None,
    blocks: int | None = None,
    dim: int = 0,
    block_rate: float = 0.5,
    other_rate: float = 1.0,
    nesterov: bool = True,
    scale: Scale = "rms_norm",
    coefficients: str | Sequence[Triple] = "jordan",
    dtype: torch.dtype | None = None,
    flatten: bool = False,
    shards: Shards | str | None = None,
) -> Transform:
    """MuonBP: Muon of whole matrices one step in P, of blocks of them between, each kind at a rate of its own.

        m <- momentum m + g;    z as for `trace`
        warm-up:     p <- p - lr (s NS(z) + weight_decay p)
        compressed:  p <- p - block_rate lr (s NS(z_B) for each block B + weight_decay p)

        >>> import torch, fn
        >>> tx, schedule = fn.muon_bp(0.2, axis="data"), fn.periodic(5)
        >>> def train(target):                # of each rank; the best p is their mean
        ...     p = torch.zeros(4, 3)
        ...     state = tx.init(p)
        ...     for step in range(40):
        ...         updates, state = tx.update(schedule(step))(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> targets = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
        >>> best, p = targets.mean(0), fn.simulate(train, "data", 2)(targets)[0]
        >>> print(f"{best.square().mean():.3f} -> {(p - best).square().mean():.3f}")
        0.450 -> 0.007

    Args:
        lr: of steps of whole matrices, a float or a 0-d tensor; with scale="rms_norm" start with AdamW's rate times 4.
            block_rate: of steps of blocks, as a multiple of it. other_rate: of the others.
        momentum, nesterov, scale, coefficients, dtype, flatten: as for `scale_by_muon`; of a block, s is that of its
            own shape. weight_decay: of all tensors, at the step's rate.
        axis: the ranks that train together, which average all gradients exactly in every step; None for none.
        blocks: into how many blocks a matrix is cut; None: as many as the axis has ranks. dim: along which dimension.
        labels: which tensors are "hidden", Muon's, and which "other", as for `muon`. b1, b2: of AdamW, which moves the
            others. eps: of both.
        shards: as for `muon`: on FSDP2's shards a block is what a rank has of a matrix, and its steps send nothing.
    Returns: a transform with a warm-up, the steps of whole matrices, and a compressed phase, those of blocks;
        `periodic(p)` is its schedule.

    Paper: Khaled et al., MuonBP: faster Muon via block-periodic orthogonalization (arXiv 2510.16981).
    Differs: where params are whole every rank takes the steps of all blocks; in the paper they lie in shards.
    """
    check_interval("block_rate", block_rate, "(0, inf)")
    check_interval("other_rate", other_rate, "[0, inf)")
    if shards is not None and blocks is not None:
        raise ValueError(expected("blocks", "None, where blocks are shards", f"{blocks}"))
    cut = axis if blocks is None else blocks
    if shards is None and cut is None:
        raise ValueError(expected("blocks", "a whole number, where there is no axis", "None"))
    iterations = orthogonalize(eps=eps, scale=scale, coefficients=coefficients, dtype=dtype, flatten=flatten)
    kind_of, whole = _on_shards(iterations, shards, labels, flatten)
    pieces = iterations._replace(facts=Facts())  # a shard is all that they are to see
    if shards is None and cut is not None:
        pieces = in_blocks(iterations, cut, dim)
    pieces = pieces._replace(warmup_update=unchanged)
    decay, rate = add_decayed_weights(weight_decay), scale_by_learning_rate(lr)
    slower = scale_by(block_rate)._replace(warmup_update=unchanged)
    whole = whole._replace(compressed_update=unchanged)
    kinds = {
        "muon": chain(trace(momentum, nesterov), whole, pieces, decay, slower, rate),
        "other": chain(scale_by_adam(b1, b2, eps), decay, scale_by(other_rate), rate),
    }
    return _finished(chain(unfrozen(average(axis)), partition(kinds, kind_of)), axis, "muon_bp")


def _check_sent(argument: str, value: str) -> None:
    if value not in ("momenta", "directions"):
        raise ValueError(expected(argument, "'momenta' or 'directions'", f"{value!r}"))


def _sent_and_stepped(
    momentum: Transform, exchange: Transform, muon_step: Transform, sent: str, named: Callable[[Tree], Tree],
    other_rate: float, weight_decay: float, lr: float | Tensor, axis: AxisNames, name: str,
) -> Transform:  # fmt: skip
    """Return momentum, exchange and step: Muon's of hidden matrices, the sign of others, which may come first."""
    check_interval("other_rate", other_rate, "[0, inf)")
    step = partition({"muon": muon_step, "other": scale_by_sign()}, named)
    rates = partition({"muon": chain(), "other": scale_by(other_rate)}, named)
    links = (exchange, step) if sent == "momenta" else (step, exchange)
    ends = add_decayed_weights(weight_decay), scale_by_learning_rate(lr)
    return _finished(chain(momentum, *links, rates, *ends), axis, name)


def _named(labels: Labels, flatten: bool) -> Callable[[Tree], Tree]:
    """Return the labels of `partition`: "muon" for hidden matrices, "other" for the rest."""
    is_matrix = (lambda p: p.ndim >= 2) if flatten else (lambda p: p.ndim == 2)
    return hidden_and_other(labels, {"hidden": "muon", "other": "other"}, is_matrix)


def _on_shards(
    iterations: Transform, shards: Shards | str | None, labels: Labels, flatten: bool
) -> tuple[Tree | Callable[[Tree], Tree], Transform]:
    """Return the labels of `partition`, and the iterations, on whole matrices where params are in shards."""
    named = _named(labels, flatten)
    if shards is None:
        return named, iterations
    kind_of, shards_of = labelled(shards, named, labels)
    return kind_of, unsharded(iterations, shards_of("muon"))


def _finished(tx: Transform, axis: AxisNames | None, name: str) -> Transform:
    """Return an optimizer in the usual wrappers, and without a local phase."""
    return agreed(skip_nonfinite(tx._replace(local_update=missing(Phase.LOCAL, name))), axis)
