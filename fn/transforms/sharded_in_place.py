"""Sharded AdamW's step in place, beside the pure chain: one kernel updates the shard, in memory of the pool."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.base import Transform
from fn.collectives.axis import axis_index, axis_size
from fn.collectives.compressed_in_place import successor
from fn.kernels import buffers
from fn.kernels.eager import is_eager
from fn.transforms import adam_in_place, exchange
from fn.transforms import layout as layouts
from fn.transforms.adam_in_place import Descent
from fn.transforms.exchange import Rules
from fn.transforms.finite import SkipState, all_finite
from fn.transforms.in_place import InPlace, Staged, has_kernel
from fn.transforms.moments import AdamState
from fn.transforms.sharded import ShardedState, check_shards, kept_of
from fn.transforms.shards import followed, take

Tree = Any


def with_sharded_adam_in_place(tx: Transform, rules: Rules, h: Descent) -> Transform:
    """Let both phases of `sharded` over a chain (Adam's moments, weight decay, learning rate) be staged.

    The shard's new params and moments are made in fresh memory of the pool and take the old ones' place when all
    ranks know that they are finite. Params travel back, also where the pure chain sends updates.
    """

    def fits(updates: Tree, state: SkipState, params: Tree) -> bool:
        inside: ShardedState = state.inner
        moments: AdamState = inside.inner[0]
        leaves, masters = tree.leaves(params), tree.leaves(inside.master)
        if rules.gather is not None and len(masters) != len(inside.master):
            return False  # updates in codes are not the same as params in codes
        eager = is_eager(*leaves, *tree.leaves(updates)) and all(p.is_contiguous() for p in leaves)
        lists = [tree.leaves(moments.mu), tree.leaves(moments.nu)]
        known = has_kernel("adamw_into_", lists) and (not masters or has_kernel("adamw_into_", [masters]))
        return h.eps > 0 and eager and known

    def stage(codes: bool, updates: Tree, state: SkipState, params: Tree) -> Staged:
        inside: ShardedState = state.inner
        moments: AdamState = inside.inner[0]
        leaves, grads, index = tree.leaves(params), tree.leaves(updates), axis_index(rules.axis)
        codes = codes and axis_size(rules.axis) > 1
        plan, steps = rules.arrange(leaves), []
        check_shards(inside, plan, index)
        after = moments._replace(  # the weights after this step
            mu_weight=h.b1 * moments.mu_weight + (1 - h.b1), nu_weight=h.b2 * moments.nu_weight + (1 - h.b2)
        )
        each = zip(plan, kept_of(inside), inside.master, tree.leaves(moments.mu), tree.leaves(moments.nu), strict=True)
        for bucket, kept, master, mu, nu in each:
            rows, kept = exchange.reduce_to_rows(grads, kept, bucket, rules, codes)
            keeps = isinstance(master, Tensor)
            old = master if keeps else take(leaves, bucket, index)
            if keeps and rules.gather is None:
                old = followed(master, leaves, bucket, index)
            dtype = leaves[bucket.places[0]].dtype if keeps else rows[0].dtype
            whole = buffers.empty((bucket.segments.valid.shape[0], old.shape[0]), dtype)
            mine = whole[int(index)]  # params that are not kept are made where they travel from
            new = [buffers.empty(x.shape, x.dtype) for x in (old, mu, nu)]
            new[0] = new[0] if keeps or old.dtype != dtype else mine
            peaks = torch.ops.fn.adamw_into_(new, rows, [old, mu, nu], h.b1, h.b2, *h.tail(after))
            if not _are_finite(peaks, dtype):
                new[0].fill_(float("nan"))  # for all ranks to see
            full, kept = exchange.back_from_rows(new[0], whole, kept, bucket, rules, codes)
            steps.append(_Step(bucket, kept, new, full))
        exact = not codes or rules.gather is None
        masters = tuple(s.new[0] if isinstance(m, Tensor) else () for s, m in zip(steps, inside.master, strict=True))
        olds = tree.leaves(moments.mu), tree.leaves(moments.nu), inside.master, kept_of(inside)
        news = [s.new[1] for s in steps], [s.new[2] for s in steps], masters, [s.kept for s in steps]
        renew = successor(olds, news)

        def commit() -> None:
            adam_in_place.step_weights(moments, h, warmup=True)
            for step in steps:
                layouts.split_into([leaves[i] for i in step.bucket.places], step.whole, step.bucket)
            renew()

        return Staged(_agree([s.whole for s in steps], plan, exact), commit)

    def both(update: Any, codes: bool) -> InPlace:
        return InPlace(update, fits, lambda updates, state, params: stage(codes, updates, state, params))

    return tx._replace(warmup_update=both(tx.warmup_update, False), compressed_update=both(tx.compressed_update, True))


class _Step(NamedTuple):
    """A vector's step. kept: by its exchanges. new: param, mu and nu of the shard. whole: the params (n,)."""

    bucket: layouts.Bucket
    kept: exchange.Kept
    new: list[Tensor]
    whole: Tensor


def _are_finite(peaks: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the square of the largest gradient and the largest param, in the dtype it travels in, are."""
    return bool(peaks[0].square().isfinite() & peaks[1].to(dtype).isfinite())


def _agree(wholes: list[Tensor], plan: list[layouts.Bucket], exact: bool) -> bool:
    """Return whether all ranks' shards are finite: one that is not is NaN throughout, padding too if sent exactly."""
    if not exact:
        return bool(all_finite(wholes))
    firsts = [x.view(b.segments.valid.shape[0], -1)[:, 0] for x, b in zip(wholes, plan, strict=True) if x.numel()]
    return bool(all_finite(firsts))
