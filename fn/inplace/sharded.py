"""Steps of sharded AdamW and 1-bit Adam in place: one kernel updates the shard, in memory of the pool.

Only the rank that owns a shard sees whether its step is sound. It says so in the shard, which travels anyway: NaN
throughout where something is not finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.base import Link, links_of
from fn.collectives.axis import axis_index, axis_size
from fn.inplace.adam import Ages, count_step
from fn.inplace.links import NO_EPS, MatchedChain, descent_of
from fn.inplace.match import register
from fn.inplace.memory import successor
from fn.inplace.protocol import InPlace, Staged, has_kernel, number
from fn.kernels import memory_pool
from fn.kernels.reference.steps import is_normal
from fn.kernels.table import direct
from fn.kernels.tracing import is_concrete
from fn.transforms import flat_layout as layouts
from fn.transforms.adam import Adam, Moments, OnebitAdam
from fn.transforms.sharded import (
    Kept,
    Sharded,
    ShardedState,
    check_shards,
    gather_in_place,
    kept_of,
    reduce_to_rows,
    refreshed,
    shard_of,
    zero_on_all,
)
from fn.transforms.skip_nonfinite import all_finite

Tree = Any


def stage_shards(rule: Sharded, chain: MatchedChain) -> InPlace | str:
    """Return how a step of `sharded` over a chain of Adam's moments, weight decays and learning rates is staged.

    The moments may be 1-bit Adam's, whose second one rests. The shard's new params and moments are made in fresh memory
    of the pool and take the old ones' place when all ranks know that they are finite.
    Params travel back, also where the pure chain sends updates.
    """
    rules, inner = rule.rules, links_of(rule.inner)
    h = inner[0].update if inner else None
    rests = isinstance(h, OnebitAdam) and h.keep_zeros and not links_of(h.average)
    if not isinstance(h, Adam | OnebitAdam) or not (rests or (isinstance(h, Adam) and not h.awaits)):
        adams = "scale_by_adam without await_gradient, or with scale_by_onebit_adam whose sync does nothing"
        return f"fn.sharded has kernels for a chain that begins with {adams}"
    ages = Ages(h.corrected)
    if not is_normal(h.eps, torch.float32):
        return NO_EPS
    frozen = isinstance(h, OnebitAdam)
    max_step = h.max_step if isinstance(h, OnebitAdam) else math.inf
    behind = descent_of(inner[1:])
    if isinstance(behind, Link):
        return "fn.sharded has kernels for weight decays, then rates, behind the moments"

    def moments_of(state: Tree) -> Moments:
        moments: Moments = inner[0].state(chain.link.state(state).inner)
        return moments

    def fits(updates: Tree, inside: ShardedState, moments: Moments, params: Tree) -> bool:
        leaves, masters = tree.leaves(params), tree.leaves(inside.master)
        if rules.gather is not None and len(masters) != len(inside.master):
            return False  # updates in codes are not the same as params in codes
        eager = is_concrete(*leaves, *tree.leaves(updates)) and all(p.is_contiguous() for p in leaves)
        known = has_kernel("adamw_into_", (), (), tree.leaves(moments.mu), tree.leaves(moments.nu), masters)
        return eager and known

    def stage(updates: Tree, state: Tree, params: Tree) -> Staged | None:
        inside: ShardedState = chain.link.state(state)
        moments = moments_of(state)
        if not fits(updates, inside, moments, params):
            return None
        made, keep = chain.head.run(updates, state, params)
        tree.check_updates(made, params)
        leaves, grads, index = tree.leaves(params), tree.leaves(made), axis_index(rules.axis)
        codes = rule.codes and axis_size(rules.axis) > 1
        plan, steps = rules.arrange(leaves), []
        check_shards(inside, plan, index)
        numbers = h.eps, behind.weight_decay, behind.rate, max_step, frozen
        mus, nus = tree.leaves(moments.mu), tree.leaves(moments.nu)
        counted, counts = moments._replace(rested=inside.rested), tree.leaves(inside.rested)
        latest = int(number(moments.ages[-1])) - 1 if counts and not frozen else -1
        if latest >= 0 and latest in ages.rested(counted):
            zero = zero_on_all([*zip(plan, nus, strict=True)], [n == latest for n in counts], index, rules.axis)
            # The kernel takes numbers, so here a device is waited for: in the second step, and while a tensor waits.
            rests = torch.stack(zero).tolist()
            counted = counted._replace(rested=[n + 1 if x else n for n, x in zip(counts, rests, strict=True)])
        # The counts of tensors, which share vectors: usually they are alike, and so are all decays.
        decays = ages.decays(counted, h.b1, h.b2 if isinstance(h, Adam) else 0.0)
        for bucket, kept, master, mu, nu in zip(plan, kept_of(inside), inside.master, mus, nus, strict=True):
            of_tensors = [decays[i] for i in bucket.leaf_indices] if len(decays) > 1 else decays
            # the momentum that travels is the inner's, and decays alike
            here = rules if rules.momentum is None else rules._replace(momentum=_first_of(of_tensors, bucket, mu))
            rows, kept = reduce_to_rows(grads, kept, bucket, here, codes)  # W of (n/W,), or their mean
            keeps = isinstance(master, Tensor)
            # (n / W,): this rank's row of the params.
            old = master if keeps else shard_of(leaves, bucket, index)
            if keeps and rules.gather is None:
                old = refreshed(master, leaves, bucket, index)
            dtype = leaves[bucket.leaf_indices[0]].dtype if keeps else rows[0].dtype
            shape = bucket.segments.valid.shape[0], old.shape[0]
            whole = memory_pool.empty(shape, dtype, old.device) if old.device.type == "cpu" else None
            moved = [old, mu] if frozen else [old, mu, nu]
            new = [memory_pool.empty(x.shape, x.dtype, x.device) for x in moved]
            if whole is not None and not keeps and old.dtype == dtype:
                new[0] = whole[int(index)]  # params that are not kept are made where they travel from
            cuts = [old.shape[0]] if len(of_tensors) == 1 else layouts.cuts(bucket, int(index))
            peaks = _move(new, rows, [old, mu, nu], cuts, of_tensors, numbers)
            del rows, old, moved  # gradients are as large as the params, and the gather makes another vector like that
            # Before the gather: the NaN tells all ranks in the message that travels in any case.
            _mark(new[0], peaks, dtype)
            full, kept = gather_in_place(new[0], dtype, whole, kept, bucket, rules, codes)  # (n,)
            steps.append(_Step(bucket, kept, new, full))
        # What codes make of a NaN need not be in the first element of a row.
        exact = not codes or rules.gather is None
        masters = tuple(s.new[0] if isinstance(m, Tensor) else () for s, m in zip(steps, inside.master, strict=True))
        squares = [nu if frozen else s.new[2] for s, nu in zip(steps, nus, strict=True)]
        olds = mus, nus, inside.master, kept_of(inside)
        # The new moments lie in memory of the pool already, so the state takes that, without a copy.
        renew = successor(olds, ([s.new[1] for s in steps], squares, masters, [s.kept for s in steps]))

        def commit() -> None:
            for count, new in zip(counts, tree.leaves(counted.rested), strict=True):
                if new is not count:
                    count.copy_(new)
            count_step(moments, frozen=frozen)
            for step in steps:
                layouts.split_into([leaves[i] for i in step.bucket.leaf_indices], step.whole, step.bucket)
            renew()
            keep()

        return Staged(_agree([s.whole for s in steps], plan, exact), commit)

    return InPlace(chain.update, stage)


class _Step(NamedTuple):
    """A vector's step. kept: by its exchanges. new: the shard's param, and moments that move. whole: params (n,)."""

    bucket: layouts.Bucket
    kept: Kept
    new: list[Tensor]
    whole: Tensor


def _first_of(decays: list[tuple[float, ...]], bucket: layouts.Bucket, like: Tensor) -> float | Tensor:
    """Return the decay of first moments: of all tensors of a bucket, or (W, n / W) of its elements."""
    if len({*decays}) == 1:
        return decays[0][0]
    return layouts.spread([like.new_tensor(b1) for b1, *_ in decays], bucket)


def _move(
    new: list[Tensor], rows: Sequence[Tensor] | Tensor, old: list[Tensor], cuts: list[int],
    decays: list[tuple[float, ...]], numbers: tuple[Any, ...],
) -> Tensor:  # fmt: skip
    """Take the step of a shard, and return the peaks: a kernel for each run of tensors whose moments decay alike.

    Args: new, rows, old, numbers: as for `adamw_into_`. cuts: how many elements each tensor has. decays: of each.
    """
    peaks, start = [], 0
    for betas, run in groupby(zip(decays, cuts, strict=True), itemgetter(0)):
        end = start + sum(n for _, n in run)
        whole = end - start == old[0].shape[0]
        at = [some if whole else [x[start:end] for x in some] for some in (new, rows, old)]
        peaks.append(direct("adamw_into_", *at, *betas, *numbers))
        start = end
    # (2,) each -> (2,)
    return torch.stack(peaks).amax(0) if len(peaks) > 1 else peaks[0]


def _mark(shard: Tensor, peaks: Tensor, dtype: torch.dtype) -> None:
    """Make a shard NaN if its step is not finite; nothing waits for a device.

    Args: shard: the new params. peaks: as `adamw_into_` returns them. dtype: in which params travel.
    """
    # (2,) -> (): of the gradient as it is, of the new param as it travels, in a dtype that may overflow.
    sound = peaks[0].isfinite() & peaks[1].to(dtype).isfinite()
    # On a device always, for to ask whether it is needed would be to wait.
    if sound.device.type != "cpu" or not sound:
        shard.masked_fill_(~sound, math.nan)


def _agree(wholes: list[Tensor], plan: list[layouts.Bucket], exact: bool) -> bool | Tensor:
    """Return whether all ranks' shards are finite: what `_mark` says of them.

    Args: exact: whether shards travelled as they are, padding included; then each one's first element tells.
    """
    # (n,) -> (W, n / W) -> (W,): `_mark` fills a whole row, so one element of it tells.
    firsts = [x.view(b.segments.valid.shape[0], -1)[:, 0] for x, b in zip(wholes, plan, strict=True) if x.numel()]
    if not firsts:
        return True
    ok = ~torch.cat(firsts).isnan().any() if exact else all_finite(wholes)
    return ok if ok.device.type != "cpu" else bool(ok)


register(Sharded, stage_shards, last="expected weight decays and rates inside of fn.sharded, but got one behind it")
