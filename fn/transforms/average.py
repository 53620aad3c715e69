"""What ranks agree on: `average` and `compressed_average` on a mean, `agreed` on their settings.

`average` is an all-reduce of gradients in the warm-up. `compressed_average` is an all-reduce in codes (quantized
values) in the compressed phase, of a momentum, say:

    leaves -> vectors (`fn.transforms.flat_layout`) -> `fn.collectives.compressed.compressed_all_reduce` -> leaves

Everything that crosses ranks is in `fn.collectives`; this file takes trees apart for it, and keeps its residual errors
as the state of a link.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.arguments import check_flag
from fn.base import Phase, Transform, UpdateFn, check_state, declare_rule, facts_of, missing, unchanged
from fn.collectives import primitives
from fn.collectives.agreement import check_agreement, describe, describe_leaves, device_of
from fn.collectives.axis import AxisNames, axis_size, names
from fn.collectives.codecs.codec import Segments
from fn.collectives.compressed import (
    ErrorFeedbackState,
    all_gather_shards,
    compressed_all_reduce,
    exact_mean,
    reduce_scatter_mean,
)
from fn.collectives.feedback import Feedback, classic, damped
from fn.collectives.hierarchy import Codecs, Feedbacks, hops, initial_errors, row_count
from fn.errors import expected
from fn.facts import Averages, Facts
from fn.roles import declare
from fn.transforms import flat_layout as layouts
from fn.transforms.resharding import errors_reshape, reshapes
from fn.transforms.residuals import Residuals, residuals

Tree = Any
Errors = tuple[Tree, Tree]


@declare(warmup_errors=("gradient_errors",))
class CodedAverageState(NamedTuple):
    """The state of `average` in codes. gradient_errors: the residual errors of the gradients."""

    gradient_errors: ErrorFeedbackState


@declare_rule(name="average")
class Average(NamedTuple):
    """The rule of the warm-up of `average`, with its arguments."""

    axis: AxisNames | None
    codec: Codecs | None
    feedback: Feedbacks | None
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the mean of the updates, and the next state."""
        return self.run(updates, state, params)


@declare_rule(name="compressed_average")
class CompressedAverage(NamedTuple):
    """The rule of `compressed_average`, with its arguments. arrange: leaves -> the vectors that travel."""

    axis: AxisNames
    codec: Codecs
    feedback: Feedbacks
    layout: str
    servers: bool
    arrange: Callable[[Sequence[Tensor]], list[layouts.Bucket]]
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the mean of the updates, and the state with the next errors."""
        return self.run(updates, state, params)


def average(
    axis: AxisNames | None,
    codec: Codecs | None = None,
    feedback: Feedbacks | None = None,
    *,
    layout: str = "flat",
) -> Transform:
    """Average the updates over the ranks of an axis in the warm-up, by one all-reduce per dtype and device.

    In the other phases it is the identity: each rank keeps its own updates, which a compressed average further down the
    chain brings together.

        >>> import torch, fn
        >>> tx = fn.average("data")
        >>> step = lambda g: tx.update(fn.Phase.WARMUP)(g, tx.init(g), g)[0]
        >>> fn.simulate(step, "data", 2)(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))      # a row for each rank
        tensor([[2., 3.],
                [2., 3.]])

    Args:
        axis: the axis' name, or several names from the fastest network to the slowest. None: nothing is averaged.
        codec: what the updates travel as; None is full precision. A warm-up in full precision of a fifth of a run whose
            other steps send one bit per element is most of what the run sends; in `int8()` it takes a quarter of the
            bytes of float32, in `int4()` an eighth.
        feedback: how residual errors are kept, where there is a codec; None is `damped()`, which keeps a byte
            per element.
        layout: as for `compressed_average`.
    Returns: a transform without state if there is no codec, else with a `CodedAverageState`.
    Raises: ValueError for a feedback without a codec, or a codec without an axis; from the update if the axis is not
        bound; TypeError from the update, before anything is sent, for leaves that are no dense, real, floating tensors.

    Paper: in codes, Xie et al., LoCo (arXiv 2407.04480), whose gradients for Adam travel in 4 bits.
    """
    layouts.check_layout(layout)
    if codec is None:
        if feedback is not None:
            raise ValueError("feedback: is given without a codec; give one, for an exact mean has no residual errors")
        return _exact_average(axis)
    if axis is None:
        raise ValueError("codec: is given without an axis; give an axis, for without one nothing is sent")
    inner = _in_codes(axis, codec, damped() if feedback is None else feedback, layout)

    def init(params: Tree) -> CodedAverageState:
        return CodedAverageState(inner.init(params))

    def warmup(updates: Tree, state: CodedAverageState, params: Tree, /) -> tuple[Tree, CodedAverageState]:
        check_state(state, CodedAverageState)
        mean, errors = inner.compressed_update(updates, state.gradient_errors, params)
        return mean, CodedAverageState(errors)

    rule = Average(axis, codec, feedback, warmup)
    return Transform(init, rule, unchanged, unchanged, facts=_facts(axis, warmup=True))


def _exact_average(axis: AxisNames | None) -> Transform:
    def init(params: Tree) -> Tree:
        if axis is not None:
            # Ranks with other leaves would send vectors of other lengths, and wait or read wrong numbers.
            check_agreement(axis, {"average": axis, **describe_leaves(params)}, device_of(params))
        return ()

    def warmup(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        if axis is None:
            return updates, state
        tree.check_real(updates, "updates")
        if axis_size(axis) == 1:
            return primitives.pmean(updates, axis), state
        leaves, structure = tree.flatten(_in_order(updates, params))
        means: dict[int, Tensor] = {}
        for bucket in layouts.buckets(leaves, 1, 1, "flat"):  # a single row: nobody serves a part of it
            x = layouts.join(leaves, bucket)
            mean = exact_mean(x, axis, consume=layouts.is_fresh(x, leaves, bucket))
            means.update(zip(bucket.leaf_indices, layouts.split(mean, bucket), strict=True))
        return layouts.restore(structure, means), state

    rule = Average(axis, None, None, warmup)
    return Transform(init, rule, unchanged, unchanged, facts=_facts(axis, warmup=True))


def _facts(axis: AxisNames | None, *, warmup: bool = False, compressed: bool = False) -> Facts:
    axes = () if axis is None else names(axis)
    return Facts(axes, averages=Averages(axes if warmup else (), axes if compressed else ()))


def always_average(axis: AxisNames | None) -> Transform:
    """Average as `average` does, and have no other phase: for optimizers that do not compress."""
    owner = "an optimizer that always averages exactly"
    compressed, local = missing(Phase.COMPRESSED, owner), missing(Phase.LOCAL, owner)
    exact = average(axis)
    return exact._replace(compressed_update=compressed, local_update=local, facts=Facts(facts_of(exact).axes))


def compressed_average(
    axis: AxisNames,
    codec: Codecs,
    feedback: Feedbacks | None = None,
    *,
    gather_feedback: Feedbacks | None = None,
    layout: str = "flat",
    servers: bool = True,
) -> Transform:
    """Average the updates over the ranks of an axis in codes: an all-reduce of quantized values, with error feedback.

        shard = mean_r C(x_r + worker error_r),   y = C(shard + server error)

    Rank i is the server of shard i: it averages what all ranks send of it, and sends the mean, in codes again, to all.
    What a code leaves out is an error, which is added to what is sent in the next step; errors are the state.

        >>> import torch, fn
        >>> tx = fn.compressed_average("data", fn.sign())
        >>> x = torch.tensor([[1.0, 2.0, -3.0, 4.0], [3.0, -2.0, -1.0, 0.0]])         # a row for each rank
        >>> def steps(x):
        ...     state, means = tx.init(x), []
        ...     for _ in range(50):
        ...         y, state = tx.update(fn.Phase.COMPRESSED)(x, state, x)
        ...         means.append(y)
        ...     return torch.stack(means)
        >>> means = fn.simulate(steps, "data", 2)(x)[0]
        >>> [[round(y, 2) for y in row.tolist()] for row in (means[0], means.mean(0))]   # the mean is [2, 0, -2, 2]
        [[2.01, 2.01, -2.01, 2.01], [1.93, -0.0, -2.0, 1.99]]

    The warm-up and the local phase leave the updates and the errors alone, and so does every phase on one rank. Where
    the feedback is `differences()`, the warm-up is the mean in full precision, so that no `average` belongs in front;
    there is no local phase; and on one rank everything is delivered.

    Args:
        axis: the axis' name; or several from the fastest network to the slowest, such as ("local", "node"): the mean
            is then in full precision within a node and in codes across nodes, unless codec says something else. With a
            single node it is encoded all the same, although nothing travels.
        codec: what travels, in both halves; or one for each axis.
        feedback: None is `classic()`. For several axes see `fn.collectives.hierarchy.hops`.
        gather_feedback: the feedback of the servers' codes. None is `feedback`, and `classic()` where that is
            `differences()`.
        layout: "flat" exchanges one vector per device (float64 by itself), "per_tensor" one per tensor. Scales and
            blocks of the codec belong to single tensors in both, so these differ in messages, not in meaning. "fused"
            lays the tensors end to end and treats them as one, with one scale for all where a scale is per tensor.
        servers: whether each rank averages a shard, as above. False: every rank sends its codes to all others and
            averages what it gets. That is one message instead of two that wait for each other, and the mean is not
            encoded again:

                y = mean_r C(x_r + worker error_r)

            Each rank sends its codes W - 1 times, instead of 2 (W - 1) / W times: as many bytes for two ranks, or two
            nodes, where it is faster; twice as many for four. With several axes it is about the last.
    Returns: a transform with an `ErrorFeedbackState`: for each vector a worker error (n,) and a server error (n / W,),
        or () where there are no servers.
    Raises: ValueError if the layout is unknown, if there is a gather_feedback but no server, or it is `differences()`,
        or if that is the feedback for several axes; TypeError if servers is no bool; from the update, if the axis is
        not bound or has another size than at init, and a TypeError as from `average`.

    Paper: Tang et al., 1-bit Adam (arXiv 2102.02888), algorithm 1, lines 5-10.
    Differs: DeepSpeed exchanges tensor by tensor, four collectives each.
    """
    feedback = classic() if feedback is None else feedback
    gather_feedback = _gather_feedback(axis, feedback, gather_feedback, servers)
    return _in_codes(axis, codec, feedback, layout, gather_feedback, servers=servers)


def _gather_feedback(axis: AxisNames, feedback: Feedbacks, given: Feedbacks | None, servers: bool) -> Feedbacks | None:
    """Return the feedback of the second half, None where it is that of the first. Raises: as `compressed_average`."""
    if given is not None and servers is False:
        raise ValueError("gather_feedback: is given with servers=False, where there is no second half; leave it out")
    if any(one.delivered is not None for one in _feedbacks_in(given)):
        raise ValueError(expected("gather_feedback", "one for what is sent once, such as fn.classic()", f"{given!r}"))
    if all(one.delivered is None for one in _feedbacks_in(feedback)):
        return None if _same(given, feedback) else given
    if not isinstance(axis, str):
        raise ValueError(expected("feedback", "fn.differences() to have a single axis", f"{axis!r}"))
    return classic() if given is None and servers else given


def _same(given: Feedbacks | None, feedback: Feedbacks) -> bool:
    """Return whether two are equal. Only feedbacks are compared: `==` of a NumPy number, say, may raise."""
    several: Any = given if type(given) in (tuple, list) else (given,)
    return len(_feedbacks_in(given)) == len(several) and given == feedback


def _feedbacks_in(feedback: Feedbacks | None) -> list[Feedback]:
    """Return the feedbacks in an argument; `hops` refuses an argument that holds anything else."""
    several: Any = feedback if type(feedback) in (tuple, list) else (feedback,)
    return [one for one in several if isinstance(one, Feedback)]


def _in_codes(
    axis: AxisNames, codec: Codecs, feedback: Feedbacks, layout: str, gather_feedback: Feedbacks | None = None, *,
    servers: bool = True,
) -> Transform:  # fmt: skip
    """Return the transform that `compressed_average` describes. gather_feedback: None is `feedback`."""
    layouts.check_layout(layout)
    check_flag("servers", servers)
    align = math.lcm(*(hop.codec.align for hop in hops(axis, codec, feedback)))  # a row must suit the codec of each hop
    server_feedback = feedback if gather_feedback is None else gather_feedback
    hops(axis, codec, server_feedback, ("codec", "gather_feedback"))
    worker_feedback = _feedbacks_in(feedback)[0]
    # Only `differences()` has one: its error is the sum of all that has arrived, which exact steps change, too.
    delivered = worker_feedback.delivered if isinstance(axis, str) else None

    def arrange(leaves: Sequence[Tensor], rows: int | None = None) -> list[layouts.Bucket]:
        # Half precision beside float32: momenta of bfloat16 params are float32, and have to find the errors that init
        # made for the params.
        rows = row_count(axis, servers=servers) if rows is None else rows
        return layouts.buckets(leaves, rows, align, layout, half_with_float32=True)

    def errors_of(x: Tensor, segments: Segments, feedback: Feedbacks) -> Errors:
        return initial_errors(x, axis, codec, feedback, segments=segments, servers=servers)

    def init(params: Tree) -> ErrorFeedbackState:
        tree.check_real(params, "params")
        rules = (codec, feedback) if gather_feedback is None else (codec, feedback, gather_feedback)
        fields = {**describe(rules), **describe_leaves(params), "layout": layout, "servers": servers}
        check_agreement(axis, fields, device_of(params))
        leaves = [leaf.detach() for leaf in tree.leaves(params)]
        worker, server = [], []
        for bucket in arrange(leaves):
            segments = bucket.segments
            zeros = leaves[bucket.leaf_indices[0]].new_zeros(segments.valid.shape[0] * segments.row_length)
            # zeros (n,) -> a worker error (n,) and a server error (n / W,), or what the feedback makes of them
            worker.append(errors_of(zeros, segments, feedback)[0])
            server.append(errors_of(zeros, segments, server_feedback)[1])
        state = ErrorFeedbackState(tuple(worker), tuple(server))
        way, way_back = hops(axis, codec, feedback), hops(axis, codec, server_feedback)
        residuals.add(Residuals(state, leaves, arrange, axis, way, way_back, servers))
        if isinstance(axis, str):  # for checkpoints that are loaded on another number of ranks
            (hop,), (return_hop,) = way, way_back

            # Without servers every rank has the whole vector, one row whatever the number of ranks.
            def plan(world: int) -> list[layouts.Bucket]:
                return arrange(leaves, world if servers else 1)

            reshapes.add((state, errors_reshape(leaves, axis, plan, hop, return_hop)))
        return state

    def in_codes(x: Tensor, errors: Errors, segments: Segments, consume: bool) -> tuple[Tensor, Errors]:
        """Average a vector (n,) in codes: through servers, or straight to all ranks."""
        if delivered is not None and axis_size(axis) == 1:  # what is handed on is a difference on one rank, too
            whole: Tensor = primitives.pmean(worker_feedback.compensate(x, errors[0]).to(x.dtype), axis)
            return whole, after_exact(x, errors, segments)
        if gather_feedback is None:
            rule = axis, codec, feedback
            return compressed_all_reduce(x, errors, *rule, segments=segments, consume=consume, servers=servers)
        # Two calls, for one call knows one feedback for both halves: (n,) -> (n / W,) -> (n,).
        shard, worker = reduce_scatter_mean(x, errors[0], axis, codec, feedback, segments=segments)
        whole, server = all_gather_shards(shard, errors[1], axis, codec, gather_feedback, segments=segments)
        return whole, (worker, server)

    def exactly(x: Tensor, errors: Errors, segments: Segments, consume: bool) -> tuple[Tensor, Errors]:
        return exact_mean(x, axis), after_exact(x, errors, segments)

    def after_exact(x: Tensor, errors: Errors, segments: Segments) -> Errors:
        """Return the errors after x has arrived exactly."""
        assert delivered is not None
        return delivered(x, errors[0]), errors_of(x, segments, server_feedback)[1]

    def averaging(mean_of: Callable[[Tensor, Errors, Segments, bool], tuple[Tensor, Errors]]) -> UpdateFn:
        def update(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
            check_state(state, ErrorFeedbackState)
            tree.check_real(updates, "updates")
            # On one rank nothing is lost, so errors stay; `differences()` have to add up even there.
            if axis_size(axis) == 1 and delivered is None:
                return primitives.pmean(updates, axis), state
            leaves, structure = tree.flatten(_in_order(updates, params))
            means: dict[int, Tensor] = {}
            worker, server = [], []
            vectors = arrange(leaves)
            dtypes, leaves = [leaf.dtype for leaf in leaves], _in_one_dtype(leaves, vectors)
            if lengths := {len(errors) for errors in state} - {len(vectors)}:
                wanted, got = f"errors of the {len(vectors)} vectors that the updates make", f"{lengths.pop()}"
                raise ValueError(expected("state", wanted, got, "a state belongs to the params that init got"))
            for bucket, worker_error, server_error in zip(vectors, *state, strict=True):
                # (n_i,) of the leaves -> (n,), W rows end to end
                x = layouts.join(leaves, bucket)
                consume = layouts.is_fresh(x, leaves, bucket)  # else x is the caller's memory
                mean, errors = mean_of(x, (worker_error, server_error), bucket.segments, consume)
                del x  # as large as what is split
                parts = zip(bucket.leaf_indices, layouts.split(mean, bucket), strict=True)
                means.update((i, part.to(dtypes[i])) for i, part in parts)
                worker.append(errors[0])
                server.append(errors[1])
            return layouts.restore(structure, means), ErrorFeedbackState(tuple(worker), tuple(server))

        return update

    compressed, facts = averaging(in_codes), _facts(axis, warmup=delivered is not None, compressed=True)
    if delivered is not None:
        local = missing(Phase.LOCAL, "an average of differences")
        return Transform(init, averaging(exactly), compressed, local, facts=facts)
    if gather_feedback is not None:
        return Transform(init, unchanged, compressed, unchanged, facts=facts)
    rule = CompressedAverage(axis, codec, feedback, layout, servers, arrange, compressed)
    return Transform(init, unchanged, rule, unchanged, facts=facts)


def _in_one_dtype(leaves: list[Tensor], vectors: list[layouts.Bucket]) -> list[Tensor]:
    """Return leaves in one dtype for each vector, the widest of its leaves."""
    if len({leaf.dtype for leaf in leaves}) == 1:
        return leaves
    wide = [*leaves]
    for bucket in vectors:
        dtype = reduce(torch.promote_types, (leaves[i].dtype for i in bucket.leaf_indices))
        for i in bucket.leaf_indices:
            wide[i] = leaves[i].to(dtype)
    return wide


def _in_order(updates: Tree, params: Tree) -> Tree:
    """Return updates with the keys of dicts in the order of the params: errors are vectors, and have no keys."""
    try:
        return tree.in_order(updates, params, "updates")
    except ValueError:  # they are not of the params' structure, such as the scales that a user's link averages
        return updates


def agreed(inner: Transform, axis: AxisNames | None) -> Transform:
    """Compare shapes, dtypes, hyper-parameters and codec over the ranks of an axis when a state is made.

    Every named optimizer is wrapped in it. It leaves the updates as they are.

    Args: inner: the transform. axis: the axis' name, or None for no comparison.
    Raises: ValueError from `init`, on every rank, that names the first rank and field that differ.
    """
    if axis is None:
        return inner

    def init(params: Tree) -> Tree:
        if not all(isinstance(leaf, Tensor) for leaf in tree.leaves(params)):
            tree.check_real(params, "params")  # raises: params are a model or a generator, say
        check_agreement(axis, {**describe_leaves(params), **describe(inner)}, device_of(params))
        return inner.init(params)

    return inner._replace(init=init)
