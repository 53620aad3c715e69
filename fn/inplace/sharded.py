"""Sharded AdamW's step in place: one kernel updates the shard, in memory of the pool."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.base import Link, Step, links_of
from fn.collectives.axis import axis_index, axis_size
from fn.inplace.adam import count_step, kernel_args
from fn.inplace.bounds import MOVE, SMALLEST, MatchedChain
from fn.inplace.links import Descent, descent_of
from fn.inplace.memory import successor
from fn.inplace.protocol import InPlace, Staged, has_kernel
from fn.kernels import memory_pool
from fn.kernels.tracing import is_concrete
from fn.transforms import flat_layout as layouts
from fn.transforms.adam import Adam, AdamState
from fn.transforms.sharded import (
    Kept,
    Sharded,
    ShardedState,
    check_shards,
    followed,
    gather_in_place,
    kept_of,
    reduce_to_rows,
    shard_of,
)
from fn.transforms.skip_nonfinite import all_addable, all_finite

Tree = Any


def stage_shards(rule: Sharded, chain: MatchedChain) -> InPlace | str:
    """Return how a step of `sharded` over a chain of Adam's moments, weight decays and learning rates is staged.

    The shard's new params and moments are made in fresh memory of the pool and take the old ones' place when all
    ranks know that they are finite, so nothing has to be bounded. Params travel back, also where the pure chain sends
    updates.
    """
    rules, inner = rule.rules, links_of(rule.inner)
    adam = inner[0].update.rule if inner and isinstance(inner[0].update, Step) else None
    if not isinstance(adam, Adam) or rules.momentum is not None:
        return "fn.sharded has kernels for a chain that begins with scale_by_adam"
    h, behind = adam, descent_of(inner[1:])
    if isinstance(behind, Link):
        return "fn.sharded has kernels for weight decays, then rates, behind scale_by_adam"
    if chain.descent != Descent(0.0, ()):
        return "expected weight decays and rates inside of fn.sharded, but got one behind it"

    def moments_of(state: Tree) -> AdamState:
        moments: AdamState = inner[0].state(chain.link.state(state).inner)
        return moments

    def fits(updates: Tree, state: Tree, params: Tree) -> bool:
        inside: ShardedState = chain.link.state(state)
        moments = moments_of(state)
        leaves, masters = tree.leaves(params), tree.leaves(inside.master)
        if rules.gather is not None and len(masters) != len(inside.master):
            return False  # updates in codes are not the same as params in codes
        eager = is_concrete(*leaves, *tree.leaves(updates)) and all(p.is_contiguous() for p in leaves)
        known = has_kernel("adamw_into_", (), (), tree.leaves(moments.mu), tree.leaves(moments.nu), masters)
        return h.eps >= SMALLEST and eager and known

    def stage(updates: Tree, state: Tree, params: Tree) -> Staged:
        inside: ShardedState = chain.link.state(state)
        moments = moments_of(state)
        made, keep = chain.head.run(updates, state, params)
        tree.check_updates(made, params)
        leaves, grads, index = tree.leaves(params), tree.leaves(made), axis_index(rules.axis)
        codes = rule.codes and axis_size(rules.axis) > 1
        plan, steps = rules.arrange(leaves), []
        check_shards(inside, plan, index)
        after = moments._replace(  # the weights after this step
            mu_weight=h.b1 * moments.mu_weight + (1 - h.b1), nu_weight=h.b2 * moments.nu_weight + (1 - h.b2)
        )
        mus, nus = tree.leaves(moments.mu), tree.leaves(moments.nu)
        for bucket, kept, master, mu, nu in zip(plan, kept_of(inside), inside.master, mus, nus, strict=True):
            rows, kept = reduce_to_rows(grads, kept, bucket, rules, codes)
            keeps = isinstance(master, Tensor)
            old = master if keeps else shard_of(leaves, bucket, index)
            if keeps and rules.gather is None:
                old = followed(master, leaves, bucket, index)
            dtype = leaves[bucket.leaf_indices[0]].dtype if keeps else rows[0].dtype
            whole = memory_pool.empty((bucket.segments.valid.shape[0], old.shape[0]), dtype, old.device)
            mine = whole[int(index)]  # params that are not kept are made where they travel from
            new = [memory_pool.empty(x.shape, x.dtype, x.device) for x in (old, mu, nu)]
            new[0] = new[0] if keeps or old.dtype != dtype else mine
            descent = *kernel_args(h, behind.weight_decay, behind.rate, after), math.inf
            peaks = torch.ops.fn.adamw_into_(new, rows, [old, mu, nu], h.b1, h.b2, *descent)
            if not (_are_finite(peaks, dtype) and _is_addable(peaks, new[0], old)):
                new[0].fill_(float("nan"))  # for all ranks to see
            full, kept = gather_in_place(new[0], whole, kept, bucket, rules, codes)
            steps.append(_Step(bucket, kept, new, full))
        exact = not codes or rules.gather is None
        masters = tuple(s.new[0] if isinstance(m, Tensor) else () for s, m in zip(steps, inside.master, strict=True))
        olds = mus, nus, inside.master, kept_of(inside)
        news = [s.new[1] for s in steps], [s.new[2] for s in steps], masters, [s.kept for s in steps]
        renew = successor(olds, news)

        def commit() -> None:
            count_step(moments, h.b1, h.b2)
            for step in steps:
                layouts.split_into([leaves[i] for i in step.bucket.leaf_indices], step.whole, step.bucket)
            renew()
            keep()

        return Staged(_agree([s.whole for s in steps], plan, exact), commit)

    return InPlace(chain.update, fits, stage)


class _Step(NamedTuple):
    """A vector's step. kept: by its exchanges. new: param, mu and nu of the shard. whole: the params (n,)."""

    bucket: layouts.Bucket
    kept: Kept
    new: list[Tensor]
    whole: Tensor


def _are_finite(peaks: Tensor, dtype: torch.dtype) -> bool:
    """Return whether the square of the largest gradient and the largest param, in the dtype it travels in, are."""
    return bool(peaks[0].square().isfinite() & peaks[1].to(dtype).isfinite())


def _is_addable(peaks: Tensor, new: Tensor, old: Tensor) -> bool:
    """Return whether the step is one that a pure one would add, looked at closely only where it may not be."""
    return bool(peaks[1] < MOVE) or bool(all_addable([new - old.to(new.dtype)]))


def _agree(wholes: list[Tensor], plan: list[layouts.Bucket], exact: bool) -> bool:
    """Return whether all ranks' shards are finite: one that is not is NaN throughout, padding too if sent exactly."""
    if not exact:
        return bool(all_finite(wholes))
    firsts = [x.view(b.segments.valid.shape[0], -1)[:, 0] for x, b in zip(wholes, plan, strict=True) if x.numel()]
    return bool(all_finite(firsts))
