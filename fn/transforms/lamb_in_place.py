"""1-bit LAMB's steps in place, beside the pure chain of the same name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.base import Transform
from fn.collectives.axis import axis_size
from fn.collectives.hierarchy import Codecs
from fn.kernels.eager import remembered
from fn.transforms import layout as layouts
from fn.transforms.average_in_place import stage_warmup
from fn.transforms.coded_in_place import CodedAverage, moving_averages
from fn.transforms.finite import SkipState
from fn.transforms.host_numbers import on_host
from fn.transforms.in_place import Fits, InPlace, Staged
from fn.transforms.lamb import (
    LambHyper,
    OnebitLambState,
    bounded_factor,
    common_scale_of,
    frozen_ratio,
    moved_coefficient,
    ratio_of,
)
from fn.transforms.layout import Bucket
from fn.transforms.zero_one import largest

Tree = Any


def with_onebit_lamb_in_place(
    tx: Transform,
    average: CodedAverage | None,
    lr: float | Tensor,
    h: LambHyper,
    *,
    keep_zeros: bool,
    warmup: Codecs | None,
) -> Transform:
    """Let the steps of a chain (average, 1-bit LAMB, learning rate) be staged.

    Without an `average`, over several axes, they stay the pure ones, and the compressed ones with other layouts than
    "fused".
    """
    if average is None:
        return tx
    fits = Fits("lamb_step_", ("mu", "nu", "nu_fresh"), h.eps)

    def fits_codes(updates: Tree, state: SkipState, params: Tree) -> bool:
        return average.layout == "fused" and axis_size(average.axis) > 1 and fits(updates, state, params)

    def descend(link: OnebitLambState, params: list[Tensor], ratio: Tensor) -> None:
        rate = float(on_host(lr)) if isinstance(lr, Tensor) else lr
        moments = tree.leaves(link.mu), tree.leaves(link.nu)
        torch.ops.fn.lamb_step_(params, *moments, rate * ratio, h.eps, h.weight_decay)
        _write(link.ratio, ratio)
        link.step.add_(1)

    def write_warmup(link: OnebitLambState, params: list[Tensor], grads: list[Tensor]) -> None:
        mu, nu = tree.leaves(link.mu), tree.leaves(link.nu)
        squares = torch.ops.fn.lamb_moments_(params, grads, mu, nu, h.b1, h.b2, h.eps, h.weight_decay)
        weight, update, rms = squares.sqrt().unbind(1)
        ratio = ratio_of(weight.float(), update.float(), h.min_coeff, h.max_coeff)
        _write(link.coefficient, moved_coefficient(h, _read(link.coefficient), ratio))
        _write(link.factor, torch.ones_like(ratio))
        _write(link.scaling, common_scale_of(rms / _counts(mu).clamp(min=1).sqrt()).float())
        torch._foreach_copy_(tree.leaves(link.nu_fresh), nu)
        descend(link, params, ratio)

    def compressed(updates: Tree, state: SkipState, params: Tree) -> Staged:
        link: OnebitLambState = state.inner[1]
        leaves, mu, nu, fresh = (tree.leaves(t) for t in (params, link.mu, link.nu, link.nu_fresh))
        scaling = _read(link.scaling)
        sent, grads = [*mu, link.tail], [*tree.leaves(updates), link.tail]
        factors = [*tree.leaves(link.scaling), torch.ones_like(scaling[0])]

        def rows(bucket: Bucket) -> Tensor:
            return moving_averages(sent, grads, h.b1, bucket, factors)

        mean = average.average_rows(sent, link.sync, rows)
        ((bucket, vector, *_),) = mean.buckets
        *averages, tail = layouts.split(vector, bucket)  # type: ignore[arg-type]
        # No square of a gradient can overflow, nor what is divided by the scaling.
        bound = (largest(mean.numbers) / scaling.min() * 2 / (1 - h.b1)).square()

        def commit() -> None:
            rule = h.b1, h.b2, h.eps, h.weight_decay, keep_zeros
            sums = torch.ops.fn.onebit_lamb_moments_(leaves, averages, scaling, mu, nu, fresh, *rule)
            last = _read(link.factor)
            factor = bounded_factor(h, last, sums[:, 0].float(), *sums[:, 1:].sqrt().float().unbind(1))
            factor = torch.where(_counts(mu) > 0, factor, last)
            _write(link.factor, factor)
            link.tail.copy_(tail)
            descend(link, leaves, frozen_ratio(_read(link.coefficient), factor))
            mean.keep()

        return Staged(bound.isfinite(), commit)

    return tx._replace(
        warmup_update=InPlace(tx.warmup_update, fits, stage_warmup(average.axis, warmup, write_warmup)),
        compressed_update=InPlace(tx.compressed_update, fits_codes, compressed),
    )


def _read(numbers: Tree) -> Tensor:
    """Return the numbers of tensors as (S,)."""
    return torch.stack(tree.leaves(numbers))


def _write(numbers: Tree, values: Tensor) -> None:
    torch._foreach_copy_(tree.leaves(numbers), values.unbind())


def _counts(tensors: list[Tensor]) -> Tensor:
    device = tensors[0].device if tensors else torch.device("cpu")
    return _numbers(tuple(map(Tensor.numel, tensors)), device)


@remembered
def _numbers(counts: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(counts, dtype=torch.float64, device=device)
