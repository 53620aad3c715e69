"""LionMuon: Muon's steps and Lion's along one momentum, with votes between."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

import fn
from fn.arguments import check_flag, check_interval, check_is_transform
from fn.base import missing, unchanged
from fn.collectives.axis import AxisNames
from fn.transforms.average import agreed
from fn.transforms.lion import lion_direction
from fn.transforms.mask_and_partition import Labels, hidden_and_other
from fn.transforms.unsharded import labelled

__all__ = ["lion_muon"]


def lion_muon(
    lr: float | Tensor = 0.01,
    b1: float = 0.95,
    b2: float = 0.99,
    weight_decay: float = 0.1,
    *,
    axis: AxisNames | None = None,
    labels: Labels = None,
    lion_rate: float = 0.2,
    votes: bool = True,
    other: fn.Transform | None = None,
    other_rate: float = 1.0,
    dtype: torch.dtype | None = None,
    shards: fn.Shards | str | None = None,
) -> fn.Transform:
    """LionMuon: Muon one step in P, Lion between, both along one momentum; between, ranks vote with one bit a number.

    Take it on a slow network, where Muon's iterations cost much, too: both happen in one step of P.

        z_r = b1 m_r + (1 - b1) g_r;    m_r <- b2 m_r + (1 - b2) g_r
        warm-up:     p <- p - lr (s NS(mean_r z_r) + weight_decay p)
        compressed:  p <- p - lion_rate lr (majority_r sgn(z_r) + weight_decay p)

        >>> import fn
        >>> fn.testing.train(fn.contrib.lion_muon(0.3, axis="data"), fn.periodic(5))
        Loss(before=0.944, after=0.077)

    Args:
        lr: of Muon's steps, a float or a 0-d tensor. A number moves by about 0.2 lr in them (scale="rms_norm"), so
            start with AdamW's rate times 2. lion_rate: of Lion's steps, as a multiple of it; with 0.2 they are as
            long. weight_decay: of all tensors, at the step's rate.
        b1: weight of the old momentum in the step. b2: its weight in the momentum that is kept.
        axis: the ranks that train together; None for none.
        labels: which tensors are "hidden", Muon's, and which "other", as for `muon`.
        votes: between, ranks vote with one bit a number, and keep momenta of their own, whose mean is that of one
            momentum over mean gradients. False: all that ranks send is exact, in every step.
        other: what gives the direction of the others, `scale_by_adam(await_gradient=True)` say, from gradients that are
            averaged exactly in every step; other_rate: its rate, as a multiple of lr. None: Lion, with the votes of the
            rest.
        dtype: Muon's, as for `scale_by_muon`, whose coefficients are "jordan" here.
        shards: as for `muon`: on FSDP2's shards matrices are brought together for Muon's steps, and for no others.
    Returns: a transform with a warm-up, Muon's steps, and a compressed phase, Lion's; `periodic(p)` is its schedule.
    Raises: TypeError or ValueError that names the argument.

    Paper: LionMuon: alternating spectral and sign descent (arXiv 2609.35297, of which the authors' code names
        2605.19811); Liu et al., Distributed Lion (arXiv 2404.00438), for the votes.
    Differs: ranks vote between; in the authors' code they average gradients exactly in every step. Every rank takes
        Muon's step of all matrices; there owners take it, and an all-reduce adds up their updates.
    """
    check_interval("lion_rate", lion_rate, "(0, inf)")
    check_interval("other_rate", other_rate, "[0, inf)")
    check_flag("votes", votes)
    if other is not None:
        check_is_transform("other", other)
    named = hidden_and_other(labels, {"hidden": "muon", "other": "other"}, lambda p: p.ndim == 2)
    kind_of, muon_step = named, fn.orthogonalize(eps=1e-7, scale="rms_norm", coefficients="jordan", dtype=dtype)
    if shards is not None:  # matrices are brought together for Muon's steps
        kind_of, shards_of = labelled(shards, named, labels)
        muon_step = fn.unsharded(muon_step, shards_of("muon"))
    exact, direction, sign = fn.unfrozen(fn.average(axis)), lion_direction(b1, b2), fn.scale_by_sign()
    mean, majority = (fn.average(axis) if votes else exact), fn.chain()
    if votes and axis is not None:  # a sign in front of the vote changes no ballot, and is all of it on one rank
        majority = fn.compressed_average(axis, fn.ballots(), fn.off())
    muon_step = muon_step._replace(compressed_update=unchanged)
    decay, slower, rate = fn.add_decayed_weights(weight_decay), fn.scale(lion_rate), fn.scale_by_learning_rate(lr)
    lion_step = fn.chain(sign, majority)._replace(warmup_update=unchanged)
    slower_lion = slower._replace(warmup_update=unchanged)
    lion = fn.chain(direction, mean, sign, majority, decay, slower, rate)
    kinds = {
        "muon": fn.chain(direction, mean, muon_step, lion_step, decay, slower_lion, rate),
        "other": lion if other is None else fn.chain(exact, other, decay, fn.scale(other_rate), rate),
    }
    tx = fn.partition(kinds, kind_of)._replace(local_update=missing(fn.Phase.LOCAL, "lion_muon"))
    return agreed(fn.skip_nonfinite(tx), axis)


PERIOD = 5
"""Steps from one of Muon's to the next in the plan."""


def plan_rows(planner: Any, options: Any) -> list[Any]:
    """Return the row of `python -m fn plan --contrib`. planner: `fn.planner.methods`. options: of its tables."""
    votes = partial(planner.traffic.codes, codec=planner.BALLOTS)
    send = partial(planner.traffic.apart, hidden=votes, other=votes)
    exact = partial(planner.traffic.apart, hidden=planner.traffic.exact, other=planner.traffic.exact)
    return [planner.Row("lion_muon", send, coded=24, iterated=16, exact=exact, period=PERIOD)]
