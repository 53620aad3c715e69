"""Adam's and 1-bit Adam's steps in place, beside the pure chains of the same names."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.base import Transform
from fn.collectives import primitives
from fn.collectives.axis import AxisNames, axis_size
from fn.collectives.codec import Codec
from fn.collectives.compressed import ErrorFeedbackState, encode_averages, pass_on
from fn.collectives.feedback import Feedback
from fn.collectives.hierarchy import Codecs, Feedbacks
from fn.collectives.observe import step_range
from fn.transforms import layout as layouts
from fn.transforms.finite import SkipState
from fn.transforms.in_place import InPlace, Staged, has_kernel, same_shapes, swap
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

    def tail(self, state: Any) -> tuple[float, float, float, float, float]:
        """Return eps, weight decay, learning rate and the weights of the moments, as the kernels take them."""
        weights = (float(state.mu_weight), float(state.nu_weight)) if self.corrected else (1.0, 1.0)
        return self.eps, self.weight_decay, float(self.lr), *weights


def with_adam_in_place(tx: Transform, axis: AxisNames | None, h: Descent) -> Transform:
    """Let the warm-up of a chain (average, Adam's moments, weight decay, learning rate) be staged.

    Over several axes it stays the pure one.
    """
    if axis is not None and not isinstance(axis, str):
        return tx

    def fits(updates: Tree, state: SkipState, params: Tree) -> bool:
        moments: AdamState | OnebitAdamState = state.inner[1]
        lists = [tree.leaves(t) for t in (params, updates, moments.mu, moments.nu)]
        return h.eps > 0 and same_shapes(lists) and has_kernel("adamw_", lists)

    def stage(updates: Tree, state: SkipState, params: Tree) -> Staged:
        moments: AdamState | OnebitAdamState = state.inner[1]
        grads, ok = averaged(tree.leaves(updates), axis)

        def commit() -> None:
            step_weights(moments, h, warmup=True)
            lists = [tree.leaves(params), grads, tree.leaves(moments.mu), tree.leaves(moments.nu)]
            torch.ops.fn.adamw_(*lists, h.b1, h.b2, *h.tail(moments), False)

        return Staged(ok, commit)

    return tx._replace(warmup_update=InPlace(tx.warmup_update, fits, stage))


def with_onebit_adam_in_place(
    tx: Transform, axis: AxisNames, h: Descent, codec: Codecs, feedback: Feedbacks, layout: str, *, keep_zeros: bool
) -> Transform:
    """Let the compressed phase of a chain (average, 1-bit Adam's moments, decay, learning rate) be staged.

    Over several axes it stays the pure one.
    """
    if not isinstance(axis, str) or not isinstance(codec, Codec) or not isinstance(feedback, Feedback):
        return tx

    def arrange(leaves: list[Tensor]) -> list[layouts.Bucket]:
        return layouts.buckets(leaves, axis_size(axis), codec.align, layout)

    def fits(updates: Tree, state: SkipState, params: Tree) -> bool:
        moments: OnebitAdamState = state.inner[1]
        lists = [tree.leaves(t) for t in (params, updates, moments.mu, moments.nu)]
        if layout == "fused" or axis_size(axis) == 1 or h.eps <= 0 or not has_kernel("onebit_adam_", lists):
            return False
        if not same_shapes(lists) or (h.corrected and not moments.nu_weight > 0):  # nothing to divide by: pure, skipped
            return False
        errors = zip(arrange(lists[0]), moments.sync.worker, moments.sync.server, strict=True)
        return all(encode_averages(codec, feedback, bucket.segments, e, d) is not None for bucket, e, d in errors)

    def stage(updates: Tree, state: SkipState, params: Tree) -> Staged:
        moments: OnebitAdamState = state.inner[1]
        leaves, mu, nu, grads = (tree.leaves(t) for t in (params, moments.mu, moments.nu, updates))
        found, errors = [], []
        for bucket, e, d in zip(arrange(leaves), moments.sync.worker, moments.sync.server, strict=True):
            encode = encode_averages(codec, feedback, bucket.segments, e, d)
            assert encode is not None
            payload, e = encode([mu[i] for i in bucket.places], [grads[i] for i in bucket.places], h.b1)
            gathered, d = pass_on(payload, d, axis, codec, feedback, segments=bucket.segments)
            found.append((bucket, gathered))
            errors.append((e, d))
        ok = all(bool(torch.isfinite(gathered.scales).all()) for _, gathered in found)

        def commit() -> None:
            step_weights(moments, h, warmup=False)
            for bucket, gathered in found:
                lists = [[t[i] for i in bucket.places] for t in (leaves, mu, nu)]
                place = bucket.segments.valid, bucket.segments.runs
                codes = gathered.bits, gathered.scales
                with step_range("decode and apply"):
                    torch.ops.fn.onebit_adam_(*lists, *codes, *place, *h.tail(moments), keep_zeros)
            after = ErrorFeedbackState(*(tuple(half) for half in zip(*errors, strict=True)))
            for old, new in zip(tree.leaves(moments.sync), tree.leaves(after), strict=True):
                swap(old, new)

        return Staged(ok, commit)

    return tx._replace(compressed_update=InPlace(tx.compressed_update, fits, stage))


def averaged(leaves: list[Tensor], axis: str | None) -> tuple[list[Tensor], bool]:
    """Return the gradients' means over the ranks, and whether they and their squares are finite."""
    if axis is not None and axis_size(axis) > 1:
        (bucket,) = layouts.buckets(leaves, 1, 1, "flat")
        mean = primitives.pmean(layouts.join(leaves, bucket), axis)
        return layouts.part(mean, bucket), squares_are_finite([mean])
    return leaves, squares_are_finite(leaves)


def squares_are_finite(leaves: list[Tensor]) -> bool:
    """Return whether the square of every element is finite."""
    flat = [x.view(-1) for x in leaves if x.numel()]
    if not flat:
        return True
    if bool(torch.isfinite(torch.stack([torch.dot(x, x) for x in flat])).all()):
        return True  # a finite sum proves it; another one proves nothing
    return bool(torch.isfinite(torch.stack([x.abs().max().square() for x in flat])).all())


def step_weights(moments: AdamState | OnebitAdamState, h: Descent, *, warmup: bool) -> None:
    """Count a step, in place."""
    moments.step.add_(1)
    moments.mu_weight.mul_(h.b1).add_(1 - h.b1)
    if warmup:
        moments.nu_weight.mul_(h.b2).add_(1 - h.b2)
