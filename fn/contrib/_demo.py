"""DeMo: decoupled momentum; the ranks send a few large cosines of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from torch import Tensor

import fn
from fn.arguments import check_whole, checked
from fn.base import missing, unchanged
from fn.collectives.axis import AxisNames
from fn.transforms.average import agreed

__all__ = ["demo"]


@checked("keep", "axis")
def demo(
    lr: float | Tensor = 3e-4,
    weight_decay: float = 0.0,
    *,
    axis: AxisNames,
    k: int = 32,
    tile: int | Callable[[int], int] = 64,
    keep: float = 0.999,
    over: str = "senders",
    values: fn.Codec | None = None,
) -> fn.Transform:
    """DeMo: each rank keeps a momentum and sends its largest cosines; all step along the sign of their mean.

    Take it for few ranks on very slow links: it sends 20 to 50 times fewer bytes than AdamW.

        delta_r <- b delta_r + lr g_r;   q_r = top_k(DCT delta_r);   delta_r <- delta_r - DCT^-1 q_r
        p <- p - lr (sgn(DCT^-1 mean_r q_r) + weight_decay p)

        >>> import fn
        >>> fn.testing.train(fn.contrib.demo(0.1, axis="data", k=2, tile=4), fn.freeze_after(0))
        Loss(before=0.944, after=0.008)

    Args:
        lr: a float or a 0-d tensor; start with AdamW's rate. weight_decay: decoupled.
        axis: the ranks that train together. All send to all others, so it is for few of them.
        k: how many coefficients of a tile are sent; of a smaller one all. tile: the side of a tile, as for `dct`.
        keep: b, weight of the old momentum.
        over: what the mean of a coefficient is taken over, the ranks that sent it or all ranks, as for `top_k`.
        values: how the coefficients are quantized; None is full precision.
    Returns: a transform with a warm-up and a compressed phase; `freeze_after(0)` is its schedule.
    Raises: as `dct`, `top_k` and `decayed`; ValueError if k is more than tile^2.

    Paper: Peng et al., DeMo (arXiv 2411.19870), algorithm 1.
    Differs: in the warm-up, and on one rank, it is signSGD without the momentum. A mean below 1e-6 of the tensor's
        largest counts as 0; in the authors' code the sign of a rounding error moves the parameter.
    """
    basis = fn.dct(tile)
    check_whole("k", k)
    fn.top_k(k, None if callable(tile) else tile * tile, over=over, values=values)  # refuses before there are params

    def mean(n: int) -> fn.Transform:  # of n cosines of a tile, in the compressed phase
        codec = fn.top_k(min(k, n), n, over=over, values=values)
        return fn.compressed_average(axis, codec, fn.decayed(keep), servers=False)

    cosines = fn.in_basis(basis, mean, axis=axis)._replace(warmup_update=unchanged)
    step = fn.scale_by_sign(noise=1e-6), fn.add_decayed_weights(weight_decay), fn.scale_by_learning_rate(lr)
    tx = fn.chain(fn.average(axis), fn.scale(lr), cosines, *step)
    tx = tx._replace(local_update=missing(fn.Phase.LOCAL, "demo"))
    return agreed(fn.skip_nonfinite(tx), axis)


def plan_rows(planner: Any, options: Any) -> list[Any]:
    """Return the row of `python -m fn plan --contrib`. planner: `fn.planner.methods`. options: of its tables."""
    kept = 32 if options.density is None else max(1, round(options.density * 64**2))
    cosines = partial(planner.traffic.in_tiles, tile=64, codec_of=partial(_kept, kept=kept))
    return [planner.Row("demo", cosines, 120)]


@cache
def _kept(n: int, kept: int) -> fn.Codec:
    """Return what is sent of a tile of n cosines; one object for each n, by which the planner finds its bytes again."""
    return fn.top_k(min(kept, n), n)
