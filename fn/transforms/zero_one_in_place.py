"""0/1 Adam's steps in place, beside the pure link of `zero_one`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.base import Transform
from fn.collectives.axis import axis_size
from fn.collectives.hierarchy import Codecs
from fn.kernels import ops
from fn.transforms.adam_in_place import Descent
from fn.transforms.average_in_place import squares_are_finite, stage_warmup
from fn.transforms.coded_in_place import CodedAverage
from fn.transforms.finite import SkipState
from fn.transforms.host_numbers import on_host, write
from fn.transforms.in_place import Fits, InPlace, Staged
from fn.transforms.layout import Bucket
from fn.transforms.zero_one import ZeroOneAdamState, check_synchronised, largest

Tree = Any


def with_zero_one_in_place(
    tx: Transform, average: CodedAverage | None, h: Descent, *, steps: bool, warmup: Codecs | None
) -> Transform:
    """Let the steps of a chain (average, anchored 0/1 Adam) be staged.

    Without an `average`, over several axes, they stay the pure ones. steps: whether steps are what is compressed; if
    not, synchronising steps stay pure, and there are no local ones.
    """
    if average is None:
        return tx
    fits = Fits("adamw_", ("mu", "nu", "anchor"), h.eps)

    def descend(link: ZeroOneAdamState, params: list[Tensor], grads: list[Tensor], *, frozen: bool) -> None:
        lists = params, grads, tree.leaves(link.mu), tree.leaves(link.nu)
        decay = 0.0 if frozen else h.weight_decay  # that of local steps comes with the synchronisation
        ops.direct("adamw_", *lists, h.b1, h.b2, h.eps, decay, float(h.rate), 1.0, 1.0, frozen)
        link.step.add_(1)

    def write_variance(link: ZeroOneAdamState, params: list[Tensor], grads: list[Tensor]) -> None:
        link.peak.copy_(ops.direct("largest_magnitude", grads))
        descend(link, params, grads, frozen=False)
        torch._foreach_copy_(tree.leaves(link.anchor), params)

    stage_variance = stage_warmup(average.axis, warmup, write_variance)

    def variance(updates: Tree, state: SkipState, params: Tree) -> Staged:
        check_synchronised(on_host(state.inner[1].elapsed))
        return stage_variance(updates, state, params)

    def local(updates: Tree, state: SkipState, params: Tree) -> Staged:
        link: ZeroOneAdamState = state.inner[1]
        grads = tree.leaves(updates)
        ok = bool(squares_are_finite(grads))

        def commit() -> None:
            if ok:
                descend(link, tree.leaves(params), grads, frozen=True)
            else:  # this rank's own: no message tells the others
                link.dropped.add_(1)
                link.step.add_(1)
            write(link.elapsed, lambda elapsed: elapsed.add_(h.rate))

        return Staged(True, commit)

    def moved(updates: Tree, state: SkipState, params: Tree) -> bool:
        link: ZeroOneAdamState = state.inner[1]
        whole = average.layout != "fused" and axis_size(average.axis) > 1
        return whole and bool(on_host(link.elapsed) + h.rate > 0) and fits(updates, state, params)

    def synchronise(updates: Tree, state: SkipState, params: Tree) -> Staged:
        link: ZeroOneAdamState = state.inner[1]
        mu, nu, anchor = tree.leaves(link.mu), tree.leaves(link.nu), tree.leaves(link.anchor)
        lists = tree.leaves(params), anchor, mu, tree.leaves(updates), nu
        elapsed = float(on_host(link.elapsed).add(h.rate).to(link.elapsed.dtype))

        def drifts(bucket: Bucket) -> Tensor:
            here = [[t[i] for i in bucket.places] for t in lists]
            segments = bucket.segments
            place = segments.valid.shape[0], segments.runs
            drift: Tensor = ops.direct("drift", *here, h.b1, h.eps, float(h.rate), *place)
            return drift.view(-1)

        mean = average.average_rows(anchor, link.sync, drifts)
        peak = largest(mean.numbers)

        def commit() -> None:  # from the anchor, with the mean in place of minus the learning rates times the momentum
            tail = h.eps, h.weight_decay, elapsed, 1.0, 1.0
            mean.step(anchor, mu, nu, tail, factor=-1 / elapsed, copies=tree.leaves(params))
            link.peak.copy_(peak)
            link.step.add_(1)
            write(link.elapsed, Tensor.zero_)
            mean.keep()

        return Staged(mean.ok, commit)

    tx = tx._replace(warmup_update=InPlace(tx.warmup_update, fits, variance))
    if not steps:
        return tx
    return tx._replace(
        compressed_update=InPlace(tx.compressed_update, moved, synchronise),
        local_update=InPlace(tx.local_update, fits, local),
    )
