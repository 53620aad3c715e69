"""A named variant of Muon that sends less: a chain under its docstring."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fn.base import Phase, Transform, chain, check_interval, missing
from fn.collectives.axis import AxisNames
from fn.collectives.codecs.ballots import ballots
from fn.collectives.feedback import off
from fn.errors import expected
from fn.transforms.average import agreed, average, compressed_average
from fn.transforms.decay_and_lr import add_decayed_weights, scale_by_learning_rate
from fn.transforms.masking import Labels, hidden_and_other, partition
from fn.transforms.momentum import local_momentum
from fn.transforms.muon import Scale, Triple, orthogonalize
from fn.transforms.scaling import scale as scale_by
from fn.transforms.scaling import scale_by_sign
from fn.transforms.skip_nonfinite import skip_nonfinite


def sign_muon(
    lr: float | Tensor = 0.01,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    eps: float = 1e-7,
    *,
    axis: AxisNames,
    labels: Labels = None,
    votes: Literal["momenta", "directions"] = "momenta",
    servers: bool = True,
    other_rate: float = 0.2,
    scale: Scale = "rms_norm",
    coefficients: str | Sequence[Triple] = "jordan",
    dtype: torch.dtype | None = None,
    flatten: bool = False,
) -> Transform:
    """Muon by majority: ranks vote on the signs of their momenta, with one bit a number, and Muon steps along the vote.

        m_r <- mu m_r + (1 - mu) g_r
        p <- p - lr (s NS(majority_r sgn(m_r)) + weight_decay p)        votes="momenta"
        p <- p - lr (majority_r sgn(NS(m_r)) + weight_decay p)          votes="directions"

        >>> import torch, fn
        >>> tx, schedule = fn.sign_muon(0.3, axis="data"), fn.freeze_after(0)
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
        0.944 -> 0.011

    Args:
        lr: a float or a 0-d tensor. With scale="rms_norm" a number moves by about 0.2 lr, so start with AdamW's
            rate times 4. momentum: mu. weight_decay: decoupled.
        axis: the ranks that train together.
        labels: which tensors are "hidden", Muon's, and which "other", as for `muon`; others step along the sign of
            their vote. other_rate: their rate, as a multiple of lr; with 0.2 all are equally long where
            scale="rms_norm".
        votes: on what ranks vote, their momenta, which are orthogonalised after it, or on directions that each rank
            has orthogonalised by itself. Then every number of a step is lr or -lr, and `scale` changes nothing.
        servers: as for `lion_vote`; where there are none, a tie is 0.
        eps, scale, coefficients, dtype, flatten: Muon's, as for `scale_by_muon`.
    Returns: a transform with a warm-up, in which the mean of what ranks vote on is exact, and a compressed phase;
        `freeze_after(n)` is its schedule, and n may be 0.

    Paper: SignMuon and MuonUSign of github intsystems/SignMuon; Bernstein et al., signSGD with majority vote (arXiv
        1810.05291).
    Differs: with servers, ties and zeros vote by their index; there they are 0.
    """
    check_interval("momentum", momentum, "[0, 1)")
    check_interval("other_rate", other_rate, "[0, inf)")
    if votes not in ("momenta", "directions"):
        raise ValueError(expected("votes", "'momenta' or 'directions'", f"{votes!r}"))
    is_matrix = (lambda p: p.ndim >= 2) if flatten else (lambda p: p.ndim == 2)
    named = hidden_and_other(labels, {"hidden": "muon", "other": "other"}, is_matrix)
    sign, exact = scale_by_sign(), average(axis)
    vote = chain(exact, sign, compressed_average(axis, ballots(), off(), servers=servers), sign)
    iterations = orthogonalize(eps=eps, scale=scale, coefficients=coefficients, dtype=dtype, flatten=flatten)
    step = partition({"muon": iterations, "other": scale_by_sign()}, named)
    links = (vote, step) if votes == "momenta" else (step, vote)
    rates = partition({"muon": chain(), "other": scale_by(other_rate)}, named)
    ends = add_decayed_weights(weight_decay), scale_by_learning_rate(lr)
    tx = chain(local_momentum(1 - momentum), *links, rates, *ends)
    return agreed(skip_nonfinite(tx._replace(local_update=missing(Phase.LOCAL, "sign_muon"))), axis)
