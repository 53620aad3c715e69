"""Signum with majority vote: a momentum of each rank's own, and a vote on its signs."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

import fn
from fn.arguments import check_interval
from fn.base import missing
from fn.collectives.axis import AxisNames
from fn.transforms.average import agreed

__all__ = ["signum_vote"]


def signum_vote(
    lr: float | Tensor = 1e-4,
    b: float = 0.9,
    weight_decay: float = 0.0,
    *,
    axis: AxisNames,
    ties: str = "alternate",
    servers: bool = True,
) -> fn.Transform:
    """Signum with majority vote: each rank keeps a momentum, and votes on the sign of the step with one bit.

    Take it in place of `lion_vote` to keep one weight b, or, with b = 0, signSGD.

        m_r <- b m_r + (1 - b) g_r;   s = majority_r sgn(m_r);   p <- p - lr (s + weight_decay p)

        >>> import fn
        >>> fn.testing.train(fn.contrib.signum_vote(0.07, axis="data"), fn.freeze_after(0))
        Loss(before=0.944, after=0.017)

    Args: lr: start with AdamW's rate times 0.2. b: weight of the old momentum, in [0, 1); 0 is signSGD. lr,
        weight_decay, axis, ties, servers: as for `lion_vote`.
    Returns: a transform with the phases of `lion_vote`.
    Raises: ValueError if b is out of range.

    Paper: Bernstein et al., signSGD with majority vote (arXiv 1810.05291), algorithm 1.
    """
    check_interval("b", b, "[0, 1)")
    mean = fn.average(axis), fn.scale_by_sign()  # changes no ballot, and on one rank it is all of the vote
    vote = fn.compressed_average(axis, fn.ballots(ties), fn.off(), servers=servers)
    step = fn.add_decayed_weights(weight_decay), fn.scale_by_learning_rate(lr)
    tx = fn.chain(fn.local_momentum(1 - b), *mean, vote, *step)
    return agreed(fn.skip_nonfinite(tx._replace(local_update=missing(fn.Phase.LOCAL, "signum_vote"))), axis)


def plan_rows(planner: Any, options: Any) -> list[Any]:
    """Return the row of `python -m fn plan --contrib`. planner: `fn.planner.methods`. options: of its tables."""
    return [planner.Row("signum_vote", partial(planner.traffic.codes, codec=planner.BALLOTS), coded=24)]
