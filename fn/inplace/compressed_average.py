"""The compressed all-reduce of steps in place: tensors travel as vectors, and the step is taken from what comes back.

Where the quantized values are signs with a scale per tensor, a kernel decodes them in the step itself, so that no mean
is ever written to memory. Any other mean is decoded first. The next residual errors are kept beside the old ones until
the step is written: an exchange that fails, or a mean that is not finite, then leaves the state as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.base import UpdateFn, links_of
from fn.collectives import messages
from fn.collectives.codecs.codec import Fused, Segments
from fn.collectives.codecs.sign import SignPayload
from fn.collectives.compressed import (
    ErrorFeedbackState,
    Servers,
    check_no_server,
    compressed_all_reduce,
    encode,
    gather_codes,
    reduce_exactly,
    servers_of,
)
from fn.collectives.feedback import fused_with, settle
from fn.collectives.hierarchy import Hop, hops, levels, row_count
from fn.collectives.profiling import observe_kept, observe_loss, observed, step_range
from fn.inplace.memory import successor, written_into
from fn.kernels.table import direct
from fn.kernels.tracing import cached_plan
from fn.transforms import flat_layout as layouts
from fn.transforms.average import CompressedAverage
from fn.transforms.flat_layout import Bucket

Tree = Any


class BucketMean(NamedTuple):
    """The mean of a bucket: as its codes, as those of all ranks, or as a vector (n,). keep: write the errors."""

    bucket: Bucket
    mean: SignPayload | Tensor
    keep: Callable[[], None]


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
        for bucket, mean, _ in self.buckets:
            lists = [[each[i] for i in bucket.leaf_indices] if each else [] for each in (params, mu, nu, copies)]
            (p, m, v), p_copies = lists[:3], lists.pop()
            with step_range("decode and apply"):
                if isinstance(mean, SignPayload):
                    rows = bucket.segments.valid.shape[0]
                    # (R M, S) -> (R, M, S) and (R M, n / 8) -> (R, M, n / 8): M messages of each row, one where
                    # servers sent the mean, those of all ranks without servers.
                    scales, bits = (t.unflatten(0, (rows, -1)) for t in mean)
                    mean_codes = bits, scales if factor == 1 else scales * factor
                    layout = _valid_on(bucket.segments, p[0].device), bucket.segments.runs
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


@cached_plan
def _like(segments: Segments) -> Tensor:
    """Return a tensor with the shape of rows of these segments, without memory."""
    # On the meta device: only the shape is asked for, and a row may be as long as the model.
    return torch.empty((segments.valid.shape[0], segments.row_length), dtype=torch.float32, device="meta")


class BucketPlan(NamedTuple):
    """The parts of a bucket's mean that are the same in every step.

    errors: a worker's and a server's. ends: those of the last hop. segments: of the rows there. parts: what is averaged
    exactly before, a bucket at a time. fused: the codec and its feedback in kernels, None where the codes are not signs
    by tensor. servers: None without. shard: what a server's mean is like.
    """

    bucket: Bucket
    errors: tuple[Tree, Tree]
    ends: tuple[Tree, Tree]
    segments: Segments
    parts: list[Bucket]
    fused: Fused | None
    servers: Servers | None
    shard: Tensor


class CodedAverage(NamedTuple):
    """`compressed_average` for steps in place: in codes over the last axis, exactly over those before it, `inner`.

    plans: (state, its plans), of the state that was averaged with last; filled here.
    """

    rule: CompressedAverage
    inner: tuple[str, ...]
    last: Hop
    plans: list[tuple[ErrorFeedbackState, list[BucketPlan]]]

    def plan(self, leaves: Sequence[Tensor], sync: ErrorFeedbackState) -> list[BucketPlan]:
        """Return a plan for each vector that travels, made once for a state."""
        # By identity: steps in place keep the state, and to compare its leaves would take longer than a small step.
        if self.plans and self.plans[0][0] is sync:
            return self.plans[0][1]
        codec, servers = self.last.codec, self.rule.servers
        rows, plans = row_count(self.rule.axis, servers=servers), []
        buckets = layouts.buckets(leaves, rows, codec.align, self.rule.layout)
        for bucket, worker, server in zip(buckets, sync.worker, sync.server, strict=True):
            segments = levels(bucket.segments, self.rule.axis, servers=servers)[-1]
            assert segments is not None
            ends = (worker[-1], server[-1]) if self.inner else (worker, server)
            if not servers:
                check_no_server(ends[1])
            # A fused bucket has one scale for all of its tensors; the kernels take one for each.
            by_tensor = not bucket.fused and (servers or not self.inner)
            fused = self._fused(segments, *ends) if by_tensor else None
            parts = layouts.parts(bucket) if self.inner else [bucket]
            there = servers_of(self.last, segments) if servers else None
            # (R, n / R) -> (1, n / R)
            shard = _like(segments)[:1]
            plans.append(BucketPlan(bucket, (worker, server), ends, segments, parts, fused, there, shard))
        self.plans[:] = [(sync, plans)]
        return plans

    def _fused(self, segments: Segments, worker: Tree, server: Tree) -> Fused | None:
        """Return the codec's kernels for averages; None if they, or the servers', do not fit these errors."""
        fused = fused_with(self.last.for_rows(segments), self.last.feedback)
        rows = _like(segments)
        if fused is None or fused.averages is None or not fused.accepts(rows, worker):
            return None
        if self.rule.servers and (fused.serve is None or not fused.accepts(rows[:1], server)):
            return None
        return fused

    def in_signs(self, leaves: Sequence[Tensor], sync: ErrorFeedbackState) -> bool:
        """Return whether all codes are signs by tensor."""
        return all(plan.fused is not None for plan in self.plan(leaves, sync))

    def average_rows(
        self, leaves: Sequence[Tensor], sync: ErrorFeedbackState, rows: Callable[[Bucket], Tensor]
    ) -> CodedMean:
        """Average vectors that are formed for this and may be overwritten. rows: bucket -> (n,)."""

        def encoded(plan: BucketPlan) -> tuple[Tree, Tree]:
            count = plan.segments.valid.shape[0]
            # The exact mean over the inner axes comes first; only that is encoded.
            x = reduce_exactly(map(rows, plan.parts), self.inner, count) if self.inner else rows(plan.bucket)  # (n,)
            rule = self.last.for_rows(plan.segments), self.last.feedback
            # (n,) -> (R, n / R)
            return encode(*rule, x.view(count, -1), plan.ends[0], consume=True)

        return self._average(self.plan(leaves, sync), rows, encoded)

    def average_moments(
        self, sync: ErrorFeedbackState, mu: list[Tensor], grads: list[Tensor], decay: float, params: Tree = None
    ) -> CodedMean:
        """Average decay * mu + (1 - decay) * grad. params: of no use here."""

        def rows(bucket: Bucket) -> Tensor:
            return moving_averages(mu, grads, decay, bucket)

        def encoded(plan: BucketPlan) -> tuple[Tree, Tree]:
            return self._encoded(plan, mu, grads, decay)

        return self.average_rows(mu, sync, rows) if self.inner else self._average(self.plan(mu, sync), rows, encoded)

    def _encoded(self, plan: BucketPlan, mu: list[Tensor], grads: list[Tensor], decay: float) -> tuple[Tree, Tree]:
        """Encode the moving averages of a bucket."""
        assert plan.fused is not None
        assert plan.fused.averages is not None
        moments, fresh = ([tensors[i] for i in plan.bucket.leaf_indices] for tensors in (mu, grads))
        with step_range("encode"):
            count = plan.segments.valid.shape[0]
            payload, worker = plan.fused.averages(moments, fresh, decay, error=plan.ends[0], rows=count)
        if observed():  # the whole difference is the error, so what was encoded is the sum of the two
            codec = self.last.for_rows(plan.segments)
            kept = settle(codec, self.last.feedback, worker, _like(plan.segments))
            observe_kept(kept)
            # (R, n / R) -> (n,)
            observe_loss(codec.decode(payload).reshape(-1).add_(kept), kept)
        return payload, worker

    def _average(
        self, plans: list[BucketPlan], rows: Callable[[Bucket], Tensor],
        encoded: Callable[[BucketPlan], tuple[Tree, Tree]],
    ) -> CodedMean:  # fmt: skip
        """Average bucket by bucket. encoded: plan -> (payload, next error of the worker), for signs by tensor."""
        means = []
        for plan in plans:
            vector = plan.fused is None
            means.append(self._of_vector(plan, rows(plan.bucket)) if vector else self._of_codes(plan, *encoded(plan)))
        return CodedMean(means)

    def _of_vector(self, plan: BucketPlan, x: Tensor) -> BucketMean:
        """Average x (n,), which may be overwritten."""
        rule, segments = (self.rule.axis, self.rule.codec, self.rule.feedback), plan.bucket.segments
        mean, errors = compressed_all_reduce(
            x, plan.errors, *rule, segments=segments, consume=True, servers=self.rule.servers
        )
        return BucketMean(plan.bucket, mean, successor(plan.errors, errors))

    def _of_codes(self, plan: BucketPlan, payload: Tree, worker: Tree) -> BucketMean:
        """Average what is encoded. worker: the next error."""
        server = plan.ends[1]
        if plan.servers is not None:
            payload, server = plan.servers.pass_on(payload, server, plan.shard)
            payload = gather_codes(payload, self.inner) if self.inner else payload
        else:
            payload = messages.gather(payload, self.last.axis)
        return BucketMean(plan.bucket, payload, successor(plan.ends, (worker, server)))


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
        return PureMean([m.contiguous() for m in tree.leaves(mean)], written_into(sync, new_sync))


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
        *inner, last = hops(rule.axis, rule.codec, rule.feedback)
        if all(hop.exact for hop in inner):
            return CodedAverage(rule, tuple(hop.axis for hop in inner), last, [])
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
