"""Adam's and 1-bit Adam's steps in place, beside the pure chains of the same names."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fn import tree
from fn.base import Transform
from fn.collectives.axis import AxisNames, axis_size
from fn.collectives.hierarchy import Codecs
from fn.kernels import ops
from fn.transforms.average_in_place import squares_are_finite, stage_warmup
from fn.transforms.coded_in_place import CodedAverage
from fn.transforms.finite import SkipState
from fn.transforms.host_numbers import on_host, write
from fn.transforms.in_place import Fits, InPlace, Staged
from fn.transforms.moments import AdamState, OnebitAdamState

Tree = Any


class Descent(NamedTuple):
    """The hyper-parameters of a step, as for `fn.adamw`. corrected: whether moments are divided by their weights."""

    lr: float | Tensor
    b1: float
    b2: float
    eps: float
    weight_decay: float
    corrected: bool

    @property
    def rate(self) -> float | Tensor:
        """Return the learning rate on the host."""
        return on_host(self.lr) if isinstance(self.lr, Tensor) else self.lr

    def tail(self, state: Any) -> tuple[float, float, float, float, float]:
        """Return eps, weight decay, learning rate and the weights of the moments, as the kernels take them."""
        if not self.corrected:
            return self.eps, self.weight_decay, float(self.rate), 1.0, 1.0
        weights = float(on_host(state.mu_weight)), float(on_host(state.nu_weight)) or 1.0
        return self.eps, self.weight_decay, float(self.rate), *weights


def with_adam_in_place(
    tx: Transform, axis: AxisNames | None, h: Descent, warmup: Codecs | None = None
) -> Transform:
    """Let the warm-up of a chain (average, Adam's moments, weight decay, learning rate) be staged.

    Over several axes it stays the pure one. warmup: the codec of the average.
    """
    if axis is not None and not isinstance(axis, str):
        return tx

    def write(moments: AdamState | OnebitAdamState, params: list[Tensor], grads: list[Tensor]) -> None:
        step_weights(moments, h, warmup=True)
        lists = params, grads, tree.leaves(moments.mu), tree.leaves(moments.nu)
        ops.direct("adamw_", *lists, h.b1, h.b2, *h.tail(moments), False)

    fits = Fits("adamw_", ("mu", "nu"), h.eps)
    return tx._replace(warmup_update=InPlace(tx.warmup_update, fits, stage_warmup(axis, warmup, write)))


def with_onebit_adam_in_place(
    tx: Transform, average: CodedAverage | None, h: Descent, *, keep_zeros: bool
) -> Transform:
    """Let the compressed phase of a chain (average, 1-bit Adam's moments, decay, learning rate) be staged.

    Without an `average`, over several axes, it stays the pure one.
    """
    if average is None:
        return tx
    fits_alone, fits_among = (Fits(op, ("mu", "nu"), h.eps) for op in ("adamw_", "onebit_adam_"))

    def fits(updates: Tree, state: SkipState, params: Tree) -> bool:
        if axis_size(average.axis) == 1:
            return keep_zeros and fits_alone(updates, state, params)
        if not fits_among(updates, state, params):
            return False
        return keep_zeros or average.in_signs(tree.leaves(params), state.inner[1].sync)

    def stage(updates: Tree, state: SkipState, params: Tree) -> Staged:
        moments: OnebitAdamState = state.inner[1]
        leaves, mu, nu, grads = (tree.leaves(t) for t in (params, moments.mu, moments.nu, updates))
        alone = axis_size(average.axis) == 1  # the momentum is its own mean
        mean = None if alone else average.average_moments(moments.sync, mu, grads, h.b1)

        def commit() -> None:
            step_weights(moments, h, warmup=False)
            if mean is None:
                ops.direct("adamw_", leaves, grads, mu, nu, h.b1, h.b2, *h.tail(moments), True)
            else:
                mean.step(leaves, mu, nu, h.tail(moments), keep_zeros=keep_zeros)
                mean.keep()

        return Staged(squares_are_finite(grads) if mean is None else mean.ok, commit)

    return tx._replace(compressed_update=InPlace(tx.compressed_update, fits, stage))


def step_weights(moments: AdamState | OnebitAdamState, h: Descent, *, warmup: bool) -> None:
    """Count a step, in place."""
    moments.step.add_(1)
    write(moments.mu_weight, lambda weight: weight.mul_(h.b1).add_(1 - h.b1))
    if warmup:
        write(moments.nu_weight, lambda weight: weight.mul_(h.b2).add_(1 - h.b2))
