"""The compressed all-reduce of steps in place: tensors travel as vectors, and the step is taken from what comes back.

Where the quantized values are signs with a scale per tensor or block, a kernel decodes them in the step itself, so that
no mean is ever written to memory. Any other mean is decoded first. The next residual errors are kept beside the old
ones until the step is written: an exchange that fails, or a mean that is not finite, then leaves the state as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.base import UpdateFn, links_of
from fn.collectives.codecs.codec import Fused, Segments
from fn.collectives.codecs.sign import SignPayload, scales_of
from fn.collectives.compressed import ErrorFeedbackState, VectorPlan, plan_of, reduce_exactly
from fn.collectives.feedback import fused_with, plain_error
from fn.collectives.following import unheard
from fn.collectives.hierarchy import hops, split_errors
from fn.collectives.profiling import observe_kept, observe_loss, observed, step_range
from fn.inplace.memory import copy_plan, successor
from fn.kernels.layout import scale_dtype
from fn.kernels.table import direct
from fn.kernels.tracing import cached_plan
from fn.transforms import flat_layout as layouts
from fn.transforms.average import CompressedAverage
from fn.transforms.flat_layout import Bucket

Tree = Any


class BucketMean(NamedTuple):
    """The mean of a bucket: as its codes, as those of all ranks, or as a vector (n,).

    keep: write the errors. block: of codes, as in `Fused`.
    """

    bucket: Bucket
    mean: SignPayload | Tensor
    keep: Callable[[], None]
    block: int = 0


class CodedMean(NamedTuple):
    """A mean that all ranks have, not written yet; until then the next errors are kept beside the old ones."""

    buckets: list[BucketMean]

    @property
    def numbers(self) -> list[Tensor]:
        """Return tensors whose elements are finite if the mean is, and as large as its largest one or larger.

        Of codes they are the scales: those of the mean, or of all ranks.
        """
        means = [bucket_mean.mean for bucket_mean in self.buckets]
        return [mean.scales if isinstance(mean, SignPayload) else mean for mean in means]

    def step(
        self, params: list[Tensor], mu: list[Tensor], nu: list[Tensor], descent: Sequence[float], *,
        factor: float = 1.0, keep_zeros: bool = True, copies: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        """Write factor times the mean into mu, and take the step of `onebit_adam_` from it.

        Args: descent: eps, weight decay, learning rate and max_step.
            keep_zeros: must be true where the mean is no codes. copies: into which the new params are copied, or none.
        """
        for bucket, mean, _, block in self.buckets:
            lists = [[each[i] for i in bucket.leaf_indices] if each else [] for each in (params, mu, nu, copies)]
            (p, m, v), p_copies = lists[:3], lists.pop()
            with step_range("decode and apply"):
                if isinstance(mean, SignPayload):
                    rows = bucket.segments.valid.shape[0]
                    # (R M, B) -> (R, M, B) and (R M, n / 8) -> (R, M, n / 8): M messages of each row, one where
                    # servers sent the mean, those of all ranks without servers.
                    scales, bits = (t.unflatten(0, (rows, -1)) for t in mean)
                    mean_codes = bits, scales if factor == 1 else scales * factor
                    layout = _valid_on(bucket.segments, p[0].device), bucket.segments.runs, block
                    direct("onebit_adam_", *lists, *mean_codes, *layout, *descent, keep_zeros, p_copies)
                else:
                    # The vector is this step's own, so it may be multiplied in place.
                    layouts.split_into(m, mean if factor == 1 else mean.mul_(factor), bucket)
                    apply_momentum(p, m, v, descent)
                    if p_copies:
                        torch._foreach_copy_(p_copies, p)

    def keep(self) -> None:
        """Write the errors."""
        for bucket_mean in self.buckets:
            bucket_mean.keep()


def apply_momentum(params: list[Tensor], mu: list[Tensor], nu: list[Tensor], descent: Sequence[float]) -> None:
    """Take the step from a momentum that is there already; it is masked where nu is zero. descent: as in `step`.

    It is AdamW's frozen step with the momentum for a gradient and b1 = 0, which kernels know by the list given twice.
    """
    direct("adamw_", params, mu, mu, nu, 0.0, 0.0, *descent, True)


@cached_plan
def _valid_on(segments: Segments, device: torch.device) -> Tensor:
    return segments.valid.to(device)


class BucketPlan(NamedTuple):
    """What is the same in every step of a bucket's average.

    vector: how it travels. errors: a worker's and a server's, of the last hop. rows: like what is encoded there,
    (R, n / R), without memory. parts: what is averaged exactly before, a bucket at a time. fused: the codec and its
    feedback in kernels, None where the codes are not signs by tensor.
    """

    bucket: Bucket
    vector: VectorPlan
    errors: tuple[Tree, Tree]
    rows: Tensor
    parts: list[Bucket]
    fused: Fused | None

    def encode(self, vector_of: Callable[[Bucket], Tensor]) -> tuple[Tree, Tree]:
        """Encode a vector that may be overwritten; return the codes and a worker's next error."""
        # The exact mean over the axes before the last one comes first; only that is encoded.
        x = reduce_exactly(map(vector_of, self.parts), self.vector.exact, self.vector.rows)
        return self.vector.encode(x, self.errors[0], consume=True)

    def encode_moments(self, mu: list[Tensor], grads: list[Tensor], decay: float) -> tuple[Tree, Tree]:
        """Encode decay * mu + (1 - decay) * grad in the kernel that forms it."""
        assert self.fused is not None
        assert self.fused.averages is not None
        moments, fresh = ([tensors[i] for i in self.bucket.leaf_indices] for tensors in (mu, grads))
        with step_range("encode"):
            payload, worker = self.fused.averages(moments, fresh, decay, error=self.errors[0], rows=self.vector.rows)
        if observed():  # the whole difference is the error, so what was encoded is the sum of the two
            kept = plain_error(self.vector.codec, self.vector.hops[-1].feedback, worker, self.rows)
            observe_kept(kept)
            # (R, n / R) -> (n,)
            observe_loss(self.vector.codec.decode(payload).reshape(-1).add_(kept), kept)
        return payload, worker

    def average(self, encode: Callable[[], tuple[Tree, Tree]]) -> BucketMean:
        """Average what is encoded. encode: () -> codes, and a worker's next error."""

        def sent() -> tuple[Tree, tuple[Tree, Tree]]:
            payload, worker = encode()
            payload, server = self.vector.serve(payload, self.errors[1], self.rows[0])
            return payload, (worker, server)

        payload, errors = unheard(sent, kept=self.errors)
        payload = self.vector.gather(payload)
        keep = successor(self.errors, errors)
        if self.fused is None:
            return BucketMean(self.bucket, self.vector.decode(payload, self.rows.dtype), keep)
        return BucketMean(self.bucket, payload._replace(scales=scales_of(payload)), keep, self.fused.block)


class CodedAverage(NamedTuple):
    """`compressed_average` for steps in place: in codes over the last axis, exactly over those before it.

    plans: (state, its plans), of the state that was averaged with last; filled here.
    """

    rule: CompressedAverage
    plans: list[tuple[ErrorFeedbackState, list[BucketPlan]]]

    def plan(self, leaves: Sequence[Tensor], sync: ErrorFeedbackState) -> list[BucketPlan]:
        """Return a plan for each vector that travels, made once for a state."""
        # By identity: steps in place keep the state, and to compare its leaves would take longer than a small step.
        if self.plans and self.plans[0][0] is sync:
            return self.plans[0][1]
        rule, plans = self.rule, []
        for bucket, *halves in zip(rule.arrange(leaves), sync.worker, sync.server, strict=True):
            vector = plan_of(rule.axis, rule.codec, rule.feedback, bucket.segments, servers=rule.servers)
            worker, server = (split_errors(half, rule.axis)[-1] for half in halves)
            dtype = scale_dtype(leaves[bucket.leaf_indices[0]])
            # On the meta device: a row may be as long as the model.
            rows = torch.empty((vector.rows, bucket.segments.row_length), dtype=dtype, device="meta")
            parts = layouts.parts(bucket) if vector.exact else [bucket]
            # A fused bucket is one tensor to the codec; the kernels take scales of each of its tensors.
            by_tensor = not bucket.fused and (rule.servers or not vector.exact)
            fused = _kernels(vector, rows, worker, server) if by_tensor else None
            plans.append(BucketPlan(bucket, vector, (worker, server), rows, parts, fused))
        self.plans[:] = [(sync, plans)]
        return plans

    def in_signs(self, leaves: Sequence[Tensor], sync: ErrorFeedbackState) -> bool:
        """Return whether all codes are signs by tensor."""
        return all(plan.fused is not None for plan in self.plan(leaves, sync))

    def average_rows(
        self, leaves: Sequence[Tensor], sync: ErrorFeedbackState, vector_of: Callable[[Bucket], Tensor]
    ) -> CodedMean:
        """Average vectors that are formed for this and may be overwritten. vector_of: bucket -> (n,)."""
        return CodedMean([plan.average(partial(plan.encode, vector_of)) for plan in self.plan(leaves, sync)])

    def average_moments(
        self, sync: ErrorFeedbackState, mu: list[Tensor], grads: list[Tensor], decay: float, params: Tree = None
    ) -> CodedMean:
        """Average decay * mu + (1 - decay) * grad. params: of no use here."""

        def averages(bucket: Bucket) -> Tensor:
            return moving_averages(mu, grads, decay, bucket)

        means = []
        for plan in self.plan(mu, sync):
            formed = plan.fused is None or plan.vector.exact  # else the kernel that encodes them forms them, too
            own = partial(plan.encode, averages) if formed else partial(plan.encode_moments, mu, grads, decay)
            means.append(plan.average(own))
        return CodedMean(means)


def _kernels(vector: VectorPlan, rows: Tensor, worker: Tree, server: Tree) -> Fused | None:
    """Return the codec's kernels for averages; None if they, or the servers', do not fit these errors."""
    fused = fused_with(vector.codec, vector.hops[-1].feedback)
    if fused is None or fused.averages is None or not fused.accepts(rows, worker):
        return None
    served = vector.server is None or (fused.serve is not None and fused.accepts(rows[:1], server))
    return fused if served else None


class PureAverage(NamedTuple):
    """Any average of trees, such as one over several axes or a user's own, for steps in place."""

    update: UpdateFn

    def average_moments(
        self, sync: Tree, mu: list[Tensor], grads: list[Tensor], decay: float, params: Tree
    ) -> PureMean:
        """Average decay * mu + (1 - decay) * grad."""
        # Widened before the sum, in which a gradient of half precision would lose digits of the momentum.
        averages = [torch.lerp(g.to(m.dtype), m, decay) for g, m in zip(grads, mu, strict=True)]
        structure = tree.flatten(params)[1]
        mean, new_sync = self.update(tree.unflatten(structure, averages), sync, params)
        return PureMean([m.contiguous() for m in tree.leaves(mean)], copy_plan(sync, new_sync))


class PureMean(NamedTuple):
    """A mean that all ranks have, as tensors like the params. keep: write the errors."""

    mean: list[Tensor]
    keep: Callable[[], None]

    @property
    def numbers(self) -> list[Tensor]:
        """Return tensors whose elements are finite if the mean is, and as large as its largest one."""
        return self.mean

    def step(
        self, params: list[Tensor], mu: list[Tensor], nu: list[Tensor], descent: Sequence[float], *, keep_zeros: bool
    ) -> None:
        """Write the mean into mu, and take the step from it. keep_zeros: must be true."""
        torch._foreach_copy_(mu, self.mean)
        apply_momentum(params, mu, nu, descent)


Mean = CodedMean | PureMean


def average_of(update: UpdateFn) -> CodedAverage | PureAverage | None:
    """Return an average for steps in place; None for one that does nothing."""
    links = links_of(update)
    rule = links[0].update if len(links) == 1 else None
    # `is`: a wrapper around the rule may do more than the rule says.
    if isinstance(rule, CompressedAverage) and update is rule:
        *inner, _ = hops(rule.axis, rule.codec, rule.feedback)
        if all(hop.exact for hop in inner):
            return CodedAverage(rule, [])
    return PureAverage(update) if links else None


def moving_averages(
    mu: list[Tensor], grads: list[Tensor], decay: float, bucket: Bucket, factors: Tensor | None = None
) -> Tensor:
    """Return decay * mu + (1 - decay) * grad of a bucket's tensors as one vector (n,).

    factors: by which the averages are multiplied; one per tensor.
    """
    m, g = ([tensors[i] for i in bucket.leaf_indices] for tensors in (mu, grads))
    rows, widths = bucket.segments.valid.shape[0], list(bucket.segments.widths)
    if bucket.fused:
        sizes = [*map(Tensor.numel, m)]
        # One row, in which the tensors lie end to end; the padding of the whole vector belongs to the last one.
        rows, widths = 1, [*sizes[:-1], sizes[-1] + rows * sum(widths) - sum(sizes)]
    runs = [value for width in widths for value in (1, width)]
    averages: Tensor = direct("momentum_rows", m, g, decay, factors, rows, runs)
    # (R, n / R) -> (n,)
    return averages.view(-1)
