"""EF21-SGDM: error feedback by differences, behind a momentum of each rank's own."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

import fn
from fn.arguments import checked
from fn.collectives.axis import AxisNames
from fn.transforms.average import agreed

__all__ = ["ef21_sgdm"]


@checked("axis")
def ef21_sgdm(
    lr: float | Tensor = 1e-2,
    eta: float = 0.1,
    weight_decay: float = 0.0,
    *,
    axis: AxisNames,
    k: int | float = 0.01,
    block: int | None = None,
    values: fn.Codec | None = None,
) -> fn.Transform:
    """EF21-SGDM: momentum SGD whose ranks send the difference between their momentum and what they have sent of it.

    Take it where momentum SGD trains the model, for few ranks: errors of the codes vanish where momenta settle.

        v_r <- (1 - eta) v_r + eta g_r;   c_r = top_k(v_r - h_r);   h_r <- h_r + c_r;   s <- s + mean_r c_r
        p <- p - lr (s + weight_decay p)

        >>> import fn
        >>> fn.testing.train(fn.contrib.ef21_sgdm(0.1, 0.5, axis="data", k=1), fn.freeze_after(1))
        Loss(before=0.944, after=0.002)

    Args:
        lr: a float or a 0-d tensor; start with AdamW's rate times 100. eta: weight of the new gradient in the momentum.
            weight_decay: decoupled.
        axis: the ranks that train together, one name. All send to all others.
        k, block, values: as for `top_k`; by default a hundredth of each tensor is sent.
    Returns: a transform with a warm-up, exact, and a compressed phase; `freeze_after(1)` starts at the gradient.
    Raises: TypeError or ValueError that names the argument.

    Paper: Fatkhullin, Tyurin and Richtarik, Momentum provably improves error feedback (arXiv 2305.15155), algorithm 1.
    Differs: the step is made with the new gradient; in the paper it is made before that.
    """
    mean = fn.compressed_average(axis, fn.top_k(k, block, values=values), fn.differences(), servers=False)
    step = fn.add_decayed_weights(weight_decay), fn.scale_by_learning_rate(lr)
    return agreed(fn.skip_nonfinite(fn.chain(fn.local_momentum(eta), mean, fn.running_sum(), *step)), axis)


def plan_rows(planner: Any, options: Any) -> list[Any]:
    """Return the row of `python -m fn plan --contrib`. planner: `fn.planner.methods`. options: of its tables."""
    largest = partial(planner.traffic.largest, fraction=0.01 if options.density is None else options.density)
    return [planner.Row("ef21_sgdm", largest, 80, two_level=False, fits=planner.can_be_searched)]
