"""DES-LoC: local steps whose params and moments are averaged at periods of their own."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

import fn
from fn.arguments import check_whole
from fn.collectives.axis import AxisNames
from fn.transforms.average import agreed

__all__ = ["des_loc", "periods"]


def periods(params: int, first_moment: int, second_moment: int, *, start: int = 0) -> Periods:
    """Warm up for `start` steps, then average params and moments, each every so many steps.

    After step t, counted from `start`, params are averaged if t + 1 is a multiple of `params`, and so are the moments.
    `Round(n, n)` says by the bits of n + 1 what is averaged: 1 the params, 2 first moments, 4 second moments.

        >>> import fn
        >>> [fn.contrib.periods(2, 4, 8)(step).begin for step in range(8)]
        [None, 0, None, 2, None, 0, None, 6]

    Raises: TypeError or ValueError that names the argument.

    Paper: Iacob et al., DES-LoC (arXiv 2505.22549): K_x, K_u, K_v.
    """
    for name, value in (("params", params), ("first_moment", first_moment), ("second_moment", second_moment)):
        check_whole(name, value, 1)
    check_whole("start", start, 0)
    return Periods(params, first_moment, second_moment, start)


@dataclass(frozen=True)
class Periods:
    """The schedule of `periods`: a function that can be pickled. Its fields are the arguments of that."""

    params: int
    first_moment: int
    second_moment: int
    start: int

    @property
    def phases(self) -> tuple[fn.Phase, ...]:
        """Return the phases after the warm-up."""
        always = 1 in (self.params, self.first_moment, self.second_moment)
        return (fn.Phase.COMPRESSED,) if always else (fn.Phase.COMPRESSED, fn.Phase.LOCAL)

    def __call__(self, step: int) -> fn.Phase | fn.Round:
        """Return the phase or the round of a step."""
        if step < self.start:
            return fn.Phase.WARMUP
        each = (self.params, self.first_moment, self.second_moment)
        bits = sum(2**bit for bit, period in enumerate(each) if (step - self.start + 1) % period == 0)
        return fn.Round(bits - 1, bits - 1) if bits else fn.Round()


def des_loc(
    lr: float | Tensor = 4e-4,
    b1: float = 0.95,
    b2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    *,
    axis: AxisNames,
) -> fn.Transform:
    """DES-LoC: AdamW on each rank; params and both moments are averaged, each at a period of its own.

    Take it where DiLoCo loses too much: moments that are averaged keep ranks together, for more bytes.

        p_r <- AdamW(p_r, m_r, v_r);    p, m, v <- their mean over the ranks, where a period of theirs ends

        >>> import fn
        >>> fn.testing.train(fn.contrib.des_loc(0.1, axis="data"), fn.contrib.periods(2, 4, 8))
        Loss(before=0.944, after=0.018)

    Args: lr, b1, b2, eps, weight_decay: of AdamW. lr: start with AdamW's rate. axis: the ranks that train together.
    Returns: a transform with a warm-up, exact, and rounds; `periods(64, 192, 692)` is its schedule: the slower a moment
        changes, the more rarely it is averaged.
    Raises: TypeError or ValueError that names the argument.

    Paper: Iacob et al., DES-LoC (arXiv 2505.22549), algorithm 1.
    Differs: a moment is averaged after the step that its period ends with; the paper averages the moment of the last
        step just before it is used, which is one step later.
    """
    rate = fn.scale_by_learning_rate(lr)
    adamw = fn.chain(fn.scale_by_adam(b1, b2, eps), fn.add_decayed_weights(weight_decay), rate)
    tx = fn.average_params(adamw, fn.compressed_average(axis, fn.identity(), fn.off()))
    return agreed(fn.skip_nonfinite(fn.chain(fn.average(axis), tx)), axis)


def plan_rows(planner: Any, options: Any) -> list[Any]:
    """Return the row of `python -m fn plan --contrib`. planner: `fn.planner.methods`. options: of its tables."""
    send = partial(planner.traffic.codes, codec=planner.traffic.EXACTLY)
    name, h = "des_loc, without its moments", options.local_steps
    return [planner.Row(name, send, planner.EXCHANGE, interval=h, local=True)]
