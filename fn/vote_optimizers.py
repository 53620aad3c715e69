"""The named optimizer whose ranks vote: a chain under its docstring."""

from __future__ import annotations

from torch import Tensor

from fn.base import Phase, Transform, chain, missing
from fn.collectives.axis import AxisNames
from fn.collectives.codecs.ballots import ballots
from fn.collectives.feedback import off
from fn.transforms.average import agreed, average, compressed_average
from fn.transforms.decay_and_lr import add_decayed_weights, scale_by_learning_rate
from fn.transforms.lion import lion_direction
from fn.transforms.scaling import scale_by_sign
from fn.transforms.skip_nonfinite import skip_nonfinite


def lion_vote(
    lr: float | Tensor = 3e-3,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    *,
    axis: AxisNames,
    ties: str = "alternate",
    servers: bool = True,
) -> Transform:
    """Train with Distributed Lion: keep Lion's momentum on each rank, and vote on the sign of the step with one bit.

    Take it over slow links where Lion trains, with a low rate and a high decay; for transformers `sign_muon` is better.
    It is good for bytes and memory, a bit a number from the first step on and one momentum as state, not for AdamW's
    loss: on a text, 200 steps of a transformer of 35,000 parameters on four ranks, it ended 0.36 to 0.65 nats above
    `adamw` at its best rate, with two batch sizes, and `sign_muon` 0.33 to 0.38 below.

        u_r = b1 m_r + (1 - b1) g_r;   m_r <- b2 m_r + (1 - b2) g_r;   s = majority_r sgn(u_r)
        p <- p - lr (s + weight_decay p)

        >>> import fn
        >>> fn.testing.train(fn.lion_vote(0.2, axis="data"), fn.freeze_after(0))
        Loss(before=0.944, after=0.009)

    Args:
        lr: a float or a 0-d tensor; start with AdamW's rate times 0.3, at most 0.006. b1, b2: as for `scale_by_lion`.
            weight_decay: decoupled.
        axis: the ranks that train together. ties: as for `ballots`.
        servers: True is the majority, in one bit both ways. False is the mean of the votes, which each rank sends to
            all others.
    Returns: a transform with a warm-up, the sign of the exact mean of u_r, and a compressed phase; `freeze_after(n)` is
        its schedule, and n may be 0.
    Raises: TypeError or ValueError that names the argument.

    Paper: Liu et al., Distributed Lion (arXiv 2404.00438), algorithm 1, with majority vote or averaging.
    Differs: ties and zeros take turns, and blocks of zeros abstain; in the authors' code all are -1, so that with two
        ranks params drift wherever the ranks disagree. One bit travels for an element; theirs are added up as 64 bit
        numbers.
    """
    mean = average(axis), scale_by_sign()  # changes no ballot, and on one rank it is all of the vote
    vote = compressed_average(axis, ballots(ties), off(), servers=servers)
    step = add_decayed_weights(weight_decay), scale_by_learning_rate(lr)
    tx = chain(lion_direction(b1, b2), *mean, vote, *step)._replace(local_update=missing(Phase.LOCAL, "lion_vote"))
    return agreed(skip_nonfinite(tx), axis)
