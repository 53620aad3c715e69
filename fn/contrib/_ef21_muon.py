"""EF21-Muon: Muon behind momenta whose differences travel in codes."""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

import fn
from fn.arguments import check_interval, checked
from fn.collectives.axis import AxisNames
from fn.errors import expected
from fn.transforms.average import agreed
from fn.transforms.mask_and_partition import Labels, hidden_and_other
from fn.transforms.muon import Scale

__all__ = ["ef21_muon"]


@checked("axis")
def ef21_muon(
    lr: float | Tensor = 0.01,
    eta: float = 0.1,
    weight_decay: float = 0.0,
    *,
    axis: AxisNames,
    labels: Labels = None,
    codec: fn.Codec | None = None,
    sends: Literal["momenta", "directions"] = "momenta",
    other_rate: float = 0.2,
    scale: Scale = "rms_norm",
    dtype: torch.dtype | None = None,
    flatten: bool = False,
) -> fn.Transform:
    """EF21-Muon: ranks send, in codes, the difference between their momentum and what they have sent of it.

    Take it for few ranks on slow links, where errors of the codes have to vanish: they do where momenta settle.

        m_r <- (1 - eta) m_r + eta g_r;    c_r = C(m_r - h_r);    h_r <- h_r + c_r;    G <- G + mean_r c_r
        p <- p - lr (s NS(G) + weight_decay p)

        >>> import fn
        >>> fn.testing.train(fn.contrib.ef21_muon(0.15, 0.5, axis="data", codec=fn.top_k(0.25)), fn.freeze_after(1))
        Loss(before=0.944, after=0.067)

    Args:
        lr: a float or a 0-d tensor. With scale="rms_norm" a number moves by about 0.2 lr, so start with AdamW's
            rate times 2. eta: weight of the new gradient in the momentum. weight_decay: decoupled.
        axis: the ranks that train together. All send to all others, so it is for few of them.
        labels: which tensors are "hidden", Muon's, and which "other", as for `muon`; others step along the sign of G.
            other_rate: their rate, as a multiple of lr; with 0.2 all are equally long where scale="rms_norm".
        codec: C; None is `top_k(0.05)`.
        sends: "momenta", as above; or "directions", where each rank orthogonalises its momentum before it is sent, and
            the step goes along G itself.
        scale, dtype, flatten: Muon's, as for `scale_by_muon`, whose coefficients are "jordan" here.
    Returns: a transform with a warm-up, in which m_r arrives exactly, and a compressed phase; `freeze_after(n)` is its
        schedule, and n may be 0.
    Raises: TypeError or ValueError that names the argument.

    Paper: Gruntkowska et al., Error feedback for Muon and friends (arXiv 2510.00643), with momentum and identical
        clients; github intsystems/SignMuon for "directions".
    Differs: ranks add up what all send and take the step themselves; in the paper a server takes it and sends the model
        back, in codes as well.
    """
    check_interval("other_rate", other_rate, "[0, inf)")
    if sends not in ("momenta", "directions"):
        raise ValueError(expected("sends", "'momenta' or 'directions'", f"{sends!r}"))
    named = hidden_and_other(
        labels, {"hidden": "muon", "other": "other"}, lambda p: p.ndim == 2 or (flatten and p.ndim > 2)
    )
    codec = fn.top_k(0.05) if codec is None else codec
    mean = fn.chain(fn.compressed_average(axis, codec, fn.differences(), servers=False), fn.running_sum())
    iterations = fn.orthogonalize(eps=1e-7, scale=scale, coefficients="jordan", dtype=dtype, flatten=flatten)
    step = fn.partition({"muon": iterations, "other": fn.scale_by_sign()}, named)
    links = (mean, step) if sends == "momenta" else (step, mean)
    rates = fn.partition({"muon": fn.chain(), "other": fn.scale(other_rate)}, named)
    ends = fn.add_decayed_weights(weight_decay), fn.scale_by_learning_rate(lr)
    return agreed(fn.skip_nonfinite(fn.chain(fn.local_momentum(eta), *links, rates, *ends)), axis)


def plan_rows(planner: Any, options: Any) -> list[Any]:
    """Return the row of `python -m fn plan --contrib`. planner: `fn.planner.methods`. options: of its tables."""
    largest = partial(planner.traffic.largest, fraction=0.05 if options.density is None else options.density)
    return [planner.Row("ef21_muon", largest, 80, iterated=16, two_level=False, fits=planner.can_be_searched)]
