"""What staged steps in codes share: lists of tensors travel as vectors, and the step is taken from what comes back.

Where the codes are signs with a scale per tensor, the kernels read them as they came. Any other mean is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.base import Step, UpdateFn, links_of
from fn.collectives import messages
from fn.collectives.codecs.codec import PendingError, segmented
from fn.collectives.codecs.segments import Segments
from fn.collectives.codecs.sign import SignPayload
from fn.collectives.compressed import ErrorFeedbackState, check_no_server, encode
from fn.collectives.hierarchy import (
    Hop,
    compressed_all_reduce,
    gather_codes,
    hops,
    levels,
    reduce_exactly,
    row_count,
)
from fn.collectives.profiling import step_range
from fn.inplace.compressed import EncodeAverages, Serve, encode_averages, successor, through_servers_later
from fn.inplace.memory import written_into
from fn.kernels import ops
from fn.kernels.tracing import cached_plan
from fn.transforms import flat_layout as layouts
from fn.transforms.average import CompressedAverage
from fn.transforms.flat_layout import Bucket

Tree = Any


class BucketMean(NamedTuple):
    """The mean of a bucket: as its codes, as those of all ranks, or as a vector (n,).

    keep: write the errors, but a worker's that is formed from `sent` with the step.
    """

    bucket: Bucket
    mean: SignPayload | Tensor
    keep: Callable[[], None]
    sent: PendingError | None = None


class CodedMean(NamedTuple):
    """A mean that all ranks have, not written yet. grads, decay: of the averages, where a bucket has `sent`."""

    buckets: list[BucketMean]
    grads: Sequence[Tensor] = ()
    decay: float = 0.0

    @property
    def numbers(self) -> list[Tensor]:
        """Return tensors whose elements are finite if the mean is, and as large as its largest one or larger.

        Of codes they are the scales: those of the mean, or of all ranks.
        """
        means = [each.mean for each in self.buckets]
        return [mean.scales if isinstance(mean, SignPayload) else mean for mean in means]

    def step(
        self, params: list[Tensor], mu: list[Tensor], nu: list[Tensor], tail: Sequence[float], *,
        factor: float = 1.0, keep_zeros: bool = True, copies: Sequence[Tensor] = (),
    ) -> None:  # fmt: skip
        """Write factor times the mean into mu, and take the step of `onebit_adam_` from it; errors too, from `sent`.

        Args: tail: eps, weight decay, learning rate and the weights of the moments. keep_zeros: must be true where the
            mean is no codes. copies: tensors into which the new params are copied, or none; not with `sent`.
        """
        for bucket, mean, _, sent in self.buckets:
            p, m, v = lists = [[t[i] for i in bucket.leaf_indices] for t in (params, mu, nu)]
            too = [copies[i] for i in bucket.leaf_indices] if copies else []
            with step_range("decode and apply"):
                if isinstance(mean, SignPayload):
                    rows = bucket.segments.valid.shape[0]
                    scales, bits = (t.unflatten(0, (rows, -1)) for t in mean)
                    codes = bits, scales if factor == 1 else scales * factor
                    if sent is not None:
                        feedback = [self.grads[i] for i in bucket.leaf_indices], self.decay, sent.error, sent.scales
                        rule = *codes, sent.valid, sent.runs, *tail, keep_zeros
                        ops.direct("onebit_adam_feedback_", *lists, *feedback, *rule)
                    else:
                        place = _valid_on(bucket.segments, p[0].device), bucket.segments.runs
                        ops.direct("onebit_adam_", *lists, *codes, *place, *tail, keep_zeros, too)
                else:
                    layouts.split_into(m, mean if factor == 1 else mean.mul_(factor), bucket)
                    ops.direct("adamw_", p, m, m, v, 0.0, 0.0, *tail, True)
                    if too:
                        torch._foreach_copy_(too, p)

    def keep(self) -> None:
        """Write the errors that are not written with the step."""
        for each in self.buckets:
            each.keep()


@cached_plan
def _valid_on(segments: Segments, device: torch.device) -> Tensor:
    return segments.valid.to(device)


class BucketPlan(NamedTuple):
    """What the mean of a bucket needs in every step.

    errors: a worker's and a server's. worker: the worker's at the last hop. segments: of the rows there. parts: what
    is averaged exactly before, a bucket at a time. encode: of moving averages, None where the codes are not signs by
    tensor. serve: None without servers.
    """

    bucket: Bucket
    errors: tuple[Tree, Tree]
    worker: Tree
    segments: Segments
    parts: list[Bucket]
    encode: EncodeAverages | None
    serve: Serve | None


class CodedAverage(NamedTuple):
    """`compressed_average` for steps in place: in codes over the last axis, exactly over those before it, `inner`.

    plans: (state, its plans), of the state that was averaged with last; filled here.
    """

    rule: CompressedAverage
    inner: tuple[str, ...]
    last: Hop
    plans: list[tuple[ErrorFeedbackState, list[BucketPlan]]]

    def plan(self, leaves: Sequence[Tensor], sync: ErrorFeedbackState) -> list[BucketPlan]:
        """Return what each vector that travels needs, planned once for a state."""
        if self.plans and self.plans[0][0] is sync:
            return self.plans[0][1]
        axis, codec, feedback = self.last
        servers = self.rule.servers
        rows, found = row_count(self.rule.axis, servers=servers), []
        buckets = layouts.buckets(leaves, rows, codec.align, self.rule.layout)
        for bucket, e, d in zip(buckets, sync.worker, sync.server, strict=True):
            at = levels(bucket.segments, self.rule.axis, servers=servers)[-1]
            assert at is not None
            worker, server = (e[-1], d[-1]) if self.inner else (e, d)
            if not servers:
                check_no_server(server)
            by_tensor = not bucket.fused and (servers or not self.inner)
            signs = encode_averages(codec, feedback, at, worker, server, servers=servers) if by_tensor else None
            serve = through_servers_later(server, axis, codec, feedback, segments=at) if servers else None
            parts = layouts.parts(bucket) if self.inner else [bucket]
            found.append(BucketPlan(bucket, (e, d), worker, at, parts, signs, serve))
        self.plans[:] = [(sync, found)]
        return found

    def in_signs(self, leaves: Sequence[Tensor], sync: ErrorFeedbackState) -> bool:
        """Return whether all codes are signs by tensor."""
        return all(plan.encode is not None for plan in self.plan(leaves, sync))

    def average_rows(
        self, leaves: Sequence[Tensor], sync: ErrorFeedbackState, rows: Callable[[Bucket], Tensor]
    ) -> CodedMean:
        """Average vectors that are formed for this and may be overwritten. rows: bucket -> (n,)."""
        found = []
        for plan in self.plan(leaves, sync):
            if plan.encode is None:
                found.append(self._of_vector(plan, rows(plan.bucket)))
                continue
            at, e = plan.segments, plan.worker
            size = at.valid.shape[0]
            x = reduce_exactly(map(rows, plan.parts), self.inner, size) if self.inner else rows(plan.bucket)
            payload, after = encode(
                segmented(self.last.codec, at), self.last.feedback, x.view(size, -1), e, consume=True
            )
            found.append(self._of_codes(plan, payload, successor(e, after)))
        return CodedMean(found)

    def average_moments(
        self, sync: ErrorFeedbackState, mu: list[Tensor], grads: list[Tensor], decay: float, params: Tree = None
    ) -> CodedMean:
        """Average decay * mu + (1 - decay) * grad. params: of no use here."""
        if self.inner:
            return self.average_rows(mu, sync, lambda bucket: moving_averages(mu, grads, decay, bucket))
        found = []
        for plan in self.plan(mu, sync):
            if plan.encode is None:
                found.append(self._of_vector(plan, moving_averages(mu, grads, decay, plan.bucket)))
            else:
                lists = [mu[i] for i in plan.bucket.leaf_indices], [grads[i] for i in plan.bucket.leaf_indices]
                found.append(self._of_codes(plan, *plan.encode(*lists, decay)))
        return CodedMean(found, grads, decay)

    def _of_vector(self, plan: BucketPlan, x: Tensor) -> BucketMean:
        """Average x (n,), which may be overwritten."""
        rule, at = (self.rule.axis, self.rule.codec, self.rule.feedback), plan.bucket.segments
        mean, after = compressed_all_reduce(
            x, plan.errors, *rule, segments=at, consume=True, servers=self.rule.servers
        )
        return BucketMean(plan.bucket, mean, successor(plan.errors, after))

    def _of_codes(
        self, plan: BucketPlan, payload: Tree, keep_worker: Callable[[], None], sent: PendingError | None = None
    ) -> BucketMean:
        """Average what is encoded."""
        if plan.serve is None:
            return BucketMean(plan.bucket, messages.gather(payload, self.last.axis), keep_worker, sent)
        gathered, keep_server = plan.serve(payload)

        def keep() -> None:
            keep_worker()
            keep_server()

        gathered = gather_codes(gathered, self.inner) if self.inner else gathered
        return BucketMean(plan.bucket, gathered, keep, sent)


class PureAverage(NamedTuple):
    """Any average of trees, such as one over several axes or a user's own, for steps in place."""

    update: UpdateFn

    def average_moments(
        self, sync: Tree, mu: list[Tensor], grads: list[Tensor], decay: float, params: Tree
    ) -> PureMean:
        """Average decay * mu + (1 - decay) * grad."""
        own = [torch.lerp(g.to(m.dtype), m, decay) for g, m in zip(grads, mu, strict=True)]
        structure = tree.flatten(params)[1]
        mean, after = self.update(tree.unflatten(structure, own), sync, params)
        return PureMean([m.contiguous() for m in tree.leaves(mean)], written_into(sync, after))


class PureMean(NamedTuple):
    """A mean that all ranks have, as tensors like the params. keep: write the errors."""

    mean: list[Tensor]
    keep: Callable[[], None]

    @property
    def numbers(self) -> list[Tensor]:
        """Return tensors whose elements are finite if the mean is, and as large as its largest one."""
        return self.mean

    def step(
        self, params: list[Tensor], mu: list[Tensor], nu: list[Tensor], tail: Sequence[float], *, keep_zeros: bool
    ) -> None:
        """Write the mean into mu, and take the step from it. keep_zeros: must be true."""
        torch._foreach_copy_(mu, self.mean)
        ops.direct("adamw_", params, mu, mu, nu, 0.0, 0.0, *tail, True)


Mean = CodedMean | PureMean


def average_of(update: UpdateFn) -> CodedAverage | PureAverage | None:
    """Return an average for steps in place; None for one that does nothing."""
    links = links_of(update)
    rule = links[0].update.rule if len(links) == 1 and isinstance(links[0].update, Step) else None
    if isinstance(rule, CompressedAverage) and update is links[0].update:
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
    m, g = ([t[i] for i in bucket.leaf_indices] for t in (mu, grads))
    rows, widths = bucket.segments.valid.shape[0], list(bucket.segments.widths)
    if bucket.fused:
        sizes = [*map(Tensor.numel, m)]
        rows, widths = 1, [*sizes[:-1], sizes[-1] + rows * sum(widths) - sum(sizes)]
    runs = [value for width in widths for value in (1, width)]
    found: Tensor = ops.direct("momentum_rows", m, g, decay, factors, rows, runs)
    return found.view(-1)
