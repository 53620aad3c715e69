"""The mean of matrices as a product of two thin factors, which the network can add up: `low_rank_average`."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fn import tree
from fn.arguments import check_flag, check_is_transform, check_number, check_whole
from fn.base import Phase, Transform, UpdateFn, check_params, check_state, declare_rule, facts_of, missing, unchanged
from fn.collectives import primitives
from fn.collectives.agreement import check_agreement, describe, describe_leaves, device_of
from fn.collectives.axis import AxisNames, axis_size, names
from fn.collectives.codecs.codec import identity
from fn.collectives.compressed import ErrorFeedbackState
from fn.collectives.feedback import Classic, Decayed, Feedback, classic, off
from fn.collectives.hierarchy import Hop
from fn.errors import expected
from fn.facts import Averages, Facts, merged
from fn.kernels import memory_pool, rules
from fn.kernels.layout import scale_dtype
from fn.kernels.lists import elementwise
from fn.kernels.orthonormal import orthonormalized
from fn.kernels.tracing import cached_plan, is_concrete, is_recorded, pooled
from fn.roles import declare
from fn.transforms import flat_layout as layouts
from fn.transforms.average import average
from fn.transforms.resharding import Reshape, errors_reshape, reshapes

Tree = Any

EPS = 1e-8
"""Keeps columns of zeros at zero where columns are normalised."""


@declare(rank_local=("errors",), errors=("errors",))
class LowRankState(NamedTuple):
    """The state of `low_rank_average`: tuples with an entry per tensor, () for those that travel as they are.

    errors: (n,), residual errors. q: (m, r), the basis that the next power iteration starts from, the same
    on all ranks. mean: the states of `mean` for both factors, which hold no numbers.
    """

    errors: tuple[Tree, ...]
    q: tuple[Tree, ...]
    mean: tuple[Tree, Tree]


@declare(rank_local=("errors",), errors=("errors",), warmup_errors=("errors",))
class OrthonormalState(LowRankState):
    """The state of `low_rank_average(orthonormal=True)`, whose warm-up also reads the errors."""

    __slots__ = ()


@declare_rule(name="low_rank_average")
class LowRankAverage(NamedTuple):
    """The rule of `low_rank_average`. axis: its argument."""

    axis: AxisNames
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the mean of the updates, and the next state."""
        return self.run(updates, state, params)


class _Plan(NamedTuple):
    """How a tensor travels.

    rows, columns: of the matrix that it counts as. rank: of the factors; 0: it is not iterated, and travels as it is.
    in_factors: whether it travels in factors. transposed: whether its transpose is iterated.
    """

    rows: int
    columns: int
    rank: int
    in_factors: bool
    transposed: bool


class _Stack(NamedTuple):
    """Tensors that go through all products together. places: theirs among the leaves. plan: how each of them travels.

    In the names below B is their number, (B, n, r) the stack of their P, and (B, m, r) that of their Q.
    """

    places: tuple[int, ...]
    plan: _Plan


def low_rank_average(
    axis: AxisNames,
    rank: int | float,
    *,
    feedback: Feedback | None = None,
    mean: Transform | None = None,
    orthonormal: bool = False,
    exactly: Tree | Callable[[Tree], Tree] | None = None,
    min_rate: float = 1.0,
    multiple_of: int = 1,
    iterations: int = 1,
    seed: int = 0,
) -> Transform:
    """Average matrices over the ranks of an axis as products of two thin factors, found by power iteration.

        c_r = g_r + e_r;    P = qr(mean_r c_r qr(Q));    R_r = c_r^T P;    Q <- mean_r R_r;    u = P Q^T
        e_r <- c_r - P R_r^T

    A tensor is the matrix of its first dimension and the rest. Vectors, and matrices whose factors would be no smaller,
    are averaged exactly, in the message of the first factors; there are two messages whatever the number of tensors. A
    Q that comes out as zero is not kept, so the iteration outlives steps without a gradient. The warm-up and the local
    phase leave updates and state alone, and so does every phase on one rank.

        >>> import torch, fn
        >>> tx = fn.low_rank_average("data", rank=1)
        >>> g = torch.outer(torch.arange(1.0, 4.0), torch.arange(1.0, 5.0)) * torch.tensor([1.0, 3.0]).view(2, 1, 1)
        >>> step = lambda g: tx.update(fn.Phase.COMPRESSED)(g, tx.init(g), g)[0]
        >>> fn.simulate(step, "data", 2)(g)[0]               # of rank 1, so the mean is exact; 7 numbers instead of 12
        tensor([[ 2.0000,  4.0000,  6.0000,  8.0000],
                [ 4.0000,  8.0000, 12.0000, 16.0000],
                [ 6.0000, 12.0000, 18.0000, 24.0000]])

    Args:
        axis: the axis' name, or several, as for `average`.
        rank: r, a whole number; or which fraction of the smaller side, a float in (0, 1], rounded up. A matrix whose
            own rank is no larger travels exactly. Raise it where the loss lags behind exact averages: bytes grow with
            it, and time a little.
        feedback: how errors are kept; None is `classic()`. With `off()` the directions that the factors miss are lost.
        mean: what averages the factors, such as `compressed_average(axis, int8(), off())`; None: exactly. It must keep
            no errors: the basis changes in each step, so an error would mean nothing in the next one. What travels
            exactly is then a message of its own. What codes lose of the factors is in no error.
        orthonormal: divide the columns of Q by their norms in u, so that all directions count alike, as Dion does. The
            transpose is taken of matrices with more columns than rows. With `decayed(1, 1 - mu)` the errors are the
            momentum of such an optimizer; so all matrices are iterated, also on one rank, and in the warm-up, with
            factors that are averaged exactly. There is no local phase.
        exactly: which tensors are averaged exactly whatever their shape, embeddings say: a tree like the params with
            True at these, or a function of the params. None: no others than those named above.
        min_rate: factors are sent where they are smaller than the matrix by more than this.
        multiple_of: a rank is rounded up to a multiple of it.
        iterations: of the power iteration in a step, two messages each.
        seed: of the first Q, normal numbers, which are drawn on the CPU and alike on all ranks.
    Returns: a transform with a `LowRankState`. In half precision factors and errors are float32.
    Raises: TypeError or ValueError that names the argument; from `init` a ValueError for a `mean` that keeps errors.

    Paper: Vogels et al., PowerSGD (arXiv 1905.13727), algorithms 1 and 2; Ahn et al., Dion (arXiv 2504.05295),
        algorithm 3, with orthonormal=True.
    Differs: a rank's error is what its own factor leaves, c - P P^T c, where both papers subtract the mean over the
        ranks; the mean of the errors is the same, and they stay bounded. A matrix of zeros stays zero; PyTorch's hook
        makes it NaN. Whether a matrix is all zero is asked of the mean, and not of a rank's own.
    """
    feedback = classic() if feedback is None else feedback
    names(axis)
    _check(rank, feedback, min_rate, orthonormal)
    for name, value in (("multiple_of", multiple_of), ("iterations", iterations)):
        check_whole(name, value, 1)
    check_whole("seed", seed)
    if mean is not None:
        check_is_transform("mean", mean)
    exact = average(axis)

    def plan_of(shape: torch.Size, exact: bool) -> _Plan:
        # a tensor (n, ...) counts as a matrix (n, all others)
        rows = shape[0] if shape else 1
        columns = math.prod(shape[1:])
        least = min(rows, columns)
        r = max(1, math.ceil(round(rank * least, 6))) if isinstance(rank, float) else int(rank)  # 0.07 * 100 > 7
        r = min(-(-r // multiple_of) * multiple_of, least)
        # both factors, (rows, r) and (columns, r), against the matrix
        shrinks = r < least and (rows + columns) * r * min_rate < rows * columns
        iterated = not exact and len(shape) > 1 and least > 0 and (shrinks or orthonormal)
        return _Plan(rows, columns, r if iterated else 0, iterated and shrinks, orthonormal and rows < columns)

    def init(params: Tree) -> LowRankState:
        tree.check_real(params, "params")
        settings: dict[str, object] = {"rank": rank, "multiple_of": multiple_of, "min_rate": min_rate, "seed": seed}
        settings |= {"orthonormal": orthonormal, "iterations": iterations, **describe((feedback, mean))}
        leaves = [leaf.detach() for leaf in tree.leaves(params)]
        chosen = exactly(params) if callable(exactly) else exactly
        marks = [False] * len(leaves) if chosen is None else tree.leaves(tree.in_order(chosen, params, "exactly"))
        settings["exactly"] = [i for i, mark in enumerate(marks) if mark]
        check_agreement(axis, {**settings, **describe_leaves(params)}, device_of(params))
        plans = [plan_of(p.shape, bool(mark)) for p, mark in zip(leaves, marks, strict=True)]
        generator = np.random.default_rng(seed)
        pairs = list(zip(leaves, plans, strict=True))
        # errors (n,), as vectors; Q (m, r); () for what travels as it is
        errors = tuple(feedback.init(p.new_zeros(p.numel())) if plan.rank else () for p, plan in pairs)
        q = tuple(_drawn(p, plan, generator) if plan.rank else () for p, plan in pairs)
        states: tuple[Tree, Tree] = ((), ())
        if mean is not None:
            # of each matrix (n, r) and (m, r), with which `mean` is made
            factors = [[p.new_zeros(rows, plan.rank, dtype=scale_dtype(p)) for rows in _sides(plan)]
                       for p, plan in pairs if plan.in_factors]  # fmt: skip
            states = (mean.init([left for left, _ in factors]), mean.init([right for _, right in factors]))
            if tree.leaves(states):
                cure = "give it fn.off(): the basis of the factors changes, so errors of them mean nothing"
                raise ValueError(expected("mean", "a transform that keeps nothing", "one with a state", cure))
        state = (OrthonormalState if orthonormal else LowRankState)(errors, q, states)
        if isinstance(axis, str):
            reshapes.add((errors, _reshape(leaves, axis, feedback)))  # Q is the same everywhere
        return state

    @cached_plan
    def stacks_of(kinds: tuple[tuple[torch.Size, torch.dtype, torch.device, bool], ...]) -> list[_Stack]:
        """Return the stacks of what is iterated, of what is sent in factors first.

        Args: kinds: of each tensor its shape, dtype and device, and whether it is averaged exactly.
        """
        alike = tree.places_by((plan_of(shape, exact), dtype, device) for shape, dtype, device, exact in kinds)
        stacks = [_Stack(tuple(places), plan) for (plan, _, _), places in alike.items() if plan.rank]
        # Those in factors first, so that `[:sent]` are they; the sort is stable, and keeps the order of the leaves.
        return sorted(stacks, key=lambda stack: not stack.plan.in_factors)

    def with_mean(mean: Transform | None) -> UpdateFn:
        def exchange(
            stacks: list[_Stack], factors: list[Tensor], whole: list[Tensor], state: Tree, *, flipped: bool = False
        ) -> tuple[list[Tensor], list[Tensor]]:
            """Return the means of factors, and of what travels whole. flipped: these are the transposes of factors."""
            if mean is None:
                together = [*factors, *whole]
                means, _ = exact.warmup_update(together, (), together)
                return means[: len(factors)], means[len(factors) :]
            # (B, r, m) -> (B, m, r), as `mean` was made for them
            pairs = zip(stacks, [x.mT for x in factors] if flipped else factors, strict=True)
            # (B, n, r) -> B factors (n, r), each at the place of its leaf
            each = dict(sorted(pair for stack, x in pairs for pair in zip(stack.places, x.unbind(), strict=True)))
            # Matrix by matrix, in the order of the leaves, so that no codec's scale is that of a whole stack.
            coded, _ = mean.compressed_update([*each.values()], state, [*each.values()])
            mean_of = dict(zip(each, coded, strict=True))
            # B factors (n, r) -> (B, n, r)
            means = [torch.stack([mean_of[i] for i in stack.places]) for stack in stacks]
            return [x.mT for x in means] if flipped else means, exact.warmup_update(whole, (), whole)[0]

        def update(updates: Tree, state: LowRankState, params: Tree, /) -> tuple[Tree, LowRankState]:
            check_state(state, LowRankState)
            tree.check_real(updates, "updates")
            if axis_size(axis) == 1 and not orthonormal:
                return primitives.pmean(updates, axis), state
            check_params(params)
            leaves, structure = tree.flatten(tree.in_order(updates, params, "updates"))
            if len(leaves) != len(state.q):
                cure = "a state belongs to the params that it was made for"
                raise ValueError(expected("state", f"one for {len(leaves)} tensors", f"{len(state.q)}", cure))
            pairs = zip(leaves, state.q, strict=True)
            # () in place of a basis says that init found a tensor not to be iterated.
            stacks = stacks_of(tuple((g.shape, g.dtype, g.device, isinstance(basis, tuple)) for g, basis in pairs))
            sent = sum(stack.plan.in_factors for stack in stacks)  # these are the first ones
            iterated = {i for stack in stacks for i in stack.places}
            whole = [i for i in range(len(leaves)) if i not in iterated]

            # Of a stack of B tensors, with n = rows and m = columns of what is iterated, and r = its rank:
            c = _compensated(leaves, state.errors, stacks, feedback)  # (B, rows, columns)
            means_of_whole = [leaves[i].to(scale_dtype(leaves[i])) for i in whole]  # as they are, until step 0 is over
            bases = [torch.stack([state.q[i] for i in stack.places]) for stack in stacks]  # (B, m, r)
            q, errors = bases, list(state.errors)
            for step in range(iterations):
                q = orthonormalized(q)  # (B, m, r)
                # this rank's P, (B, n, m) (B, m, r) -> (B, n, r)
                p = [torch.bmm(_matrix(x, s.plan), right) for x, s, right in zip(c[:sent], stacks, q, strict=False)]
                # What does not travel in factors goes along with the first ones: another message would cost a latency.
                exactly = [*c[sent:], *means_of_whole] if step == 0 else []
                p, means = exchange(stacks[:sent], p, exactly, state.mean[0])
                if step == 0:
                    # From here on they are means, and their products need no exchange.
                    c[sent:], means_of_whole = means[: len(c) - sent], means[len(c) - sent :]
                rest = zip(c[sent:], stacks[sent:], q[sent:], strict=True)
                p += [torch.bmm(_matrix(x, s.plan), right) for x, s, right in rest]
                p = orthonormalized(p)  # (B, n, r), the same on all ranks
                # R_r^T of this rank, (B, r, m); its transpose would take three times as long on a CPU.
                r = [torch.bmm(left.mT, _matrix(x, s.plan)) for left, x, s in zip(p, c, stacks, strict=True)]
                if step + 1 == iterations:  # before the exchange: the error is what this rank's own factor leaves
                    for x, left, right, stack in zip(c, p, r, stacks, strict=True):
                        after = _errors(x, left, right.mT, stack, errors, feedback)
                        for i, error in zip(stack.places, after, strict=True):
                            errors[i] = error
                r[:sent], _ = exchange(stacks[:sent], r[:sent], [], state.mean[1], flipped=True)
                q = [x.mT for x in r]  # (B, m, r)
            # Lists that would hold matrices as large as the gradients while the products below take memory.
            del exactly, means, r

            outs, q_after = list(leaves), list(state.q)
            for i, x in zip(whole, means_of_whole, strict=True):
                # averaged wide, and rounded once
                outs[i] = x.to(leaves[i].dtype).view(leaves[i].shape)
            for x, left, right, basis, stack in zip(c, p, q, bases, stacks, strict=True):
                # A Q of zeros, from a step without a gradient, would stay zero for good: the last one is kept.
                is_zero = torch.linalg.vector_norm(right, math.inf, (1, 2), keepdim=True) == 0  # (B, 1, 1)
                basis = torch.where(is_zero, basis, right).contiguous()
                # each column by its norm, (B, m, r) / (B, 1, r)
                right = right / (right.norm(dim=1, keepdim=True) + EPS) if orthonormal else right
                product = _product(left, right, stack.plan, x).to(leaves[stack.places[0]].dtype)
                # (B, m, r) -> B bases (m, r); (B, rows, columns) -> B updates in the shapes of the leaves
                for i, next_q, out in zip(stack.places, basis.unbind(), product.unbind(), strict=True):
                    q_after[i], outs[i] = next_q, out.view(leaves[i].shape)
            return tree.unflatten(structure, outs), state._replace(errors=tuple(errors), q=tuple(q_after))

        return LowRankAverage(axis, update)

    of_mean = Facts() if mean is None else facts_of(mean)
    facts = merged(facts_of(exact), of_mean, Facts(whole=("low_rank_average",)))
    axes = facts_of(exact).axes
    facts = facts._replace(averages=Averages(axes if orthonormal else (), axes))
    if orthonormal:
        local = missing(Phase.LOCAL, "an average that is an orthonormal momentum")
        return Transform(init, with_mean(None), with_mean(mean), local, facts=facts)
    return Transform(init, unchanged, with_mean(mean), unchanged, facts=facts)


def _check(rank: int | float, feedback: Feedback, min_rate: float, orthonormal: bool) -> None:
    check_number("rank", rank)
    if isinstance(rank, numbers.Integral):
        check_whole("rank", rank, 1)
    elif not 0 < rank <= 1:
        raise ValueError(expected("rank", "a whole number, or a fraction of the smaller side in (0, 1]", f"{rank}"))
    if not isinstance(feedback, Feedback):
        raise TypeError(expected("feedback", "a Feedback, such as fn.classic()", f"{feedback!r}"))
    check_number("min_rate", min_rate)
    if not 0 < min_rate < math.inf:
        raise ValueError(expected("min_rate", "a positive number", f"{min_rate}"))
    check_flag("orthonormal", orthonormal)


def _sides(plan: _Plan) -> tuple[int, int]:
    """Return how many rows P and Q have."""
    return (plan.columns, plan.rows) if plan.transposed else (plan.rows, plan.columns)


def _drawn(p: Tensor, plan: _Plan, generator: np.random.Generator) -> Tensor:
    """Return the first Q of a tensor; NumPy draws it, which vmap does not watch."""
    numbers = torch.from_numpy(generator.standard_normal((_sides(plan)[1], plan.rank)))
    return numbers.to(p.device, scale_dtype(p))


def _matrix(x: Tensor, plan: _Plan) -> Tensor:
    """Return the matrices that are iterated, of a stack (B, rows, columns); a view."""
    return x.mT if plan.transposed else x


def _keep_and_deliver(feedback: Feedback) -> tuple[float, float] | None:
    """Return the two numbers of a feedback c = x + keep e, e <- c - deliver C(c); None for another."""
    rule = feedback.rule
    if isinstance(rule, Classic):
        return 1.0, 1.0
    return (rule.keep, rule.deliver) if isinstance(rule, Decayed) else None


def _compensated(
    leaves: Sequence[Tensor], errors: Sequence[Tree], stacks: Sequence[_Stack], feedback: Feedback
) -> list[Tensor]:
    """Return c of stacks, (B, rows, columns) each, float32 at least, in memory of their own."""
    places = [i for stack in stacks for i in stack.places]
    # (n,) each, as the errors lie
    grads, before = [leaves[i].reshape(-1) for i in places], [errors[i] for i in places]
    rule = _keep_and_deliver(feedback)
    if rule is None:
        compensated = [feedback.compensate(g, e).to(scale_dtype(g)) for g, e in zip(grads, before, strict=True)]
    elif is_concrete(*grads, *before) and not is_recorded([*grads, *before]):
        likes = [leaves[stack.places[0]] for stack in stacks]
        shapes = [(len(stack.places), stack.plan.rows, stack.plan.columns) for stack in stacks]
        pairs = zip(shapes, likes, strict=True)
        # Sums are written where the stack lies: to stack them afterwards would copy all gradients.
        c = [memory_pool.empty(shape, scale_dtype(like), like.device) for shape, like in pairs]
        out = [flat for x in c for flat in x.flatten(1).unbind()]  # (B, rows, columns) -> B times (rows columns,)
        elementwise(rules.plus, (grads, before), rule[0], like=1, out=[out])
        return c
    else:
        compensated = elementwise(rules.plus, (grads, before), rule[0], like=1)
    each = iter(compensated)
    # (n,) each -> (B, rows, columns)
    return [torch.stack([next(each).view(s.plan.rows, s.plan.columns) for _ in s.places]) for s in stacks]


def _product(p: Tensor, q: Tensor, plan: _Plan, like: Tensor) -> Tensor:
    """Return P Q^T as it lies in the tensors, (B, rows, columns). like: a tensor of that shape and dtype."""
    left, right = (q, p) if plan.transposed else (p, q)
    product: Tensor = torch.bmm(left, right.mT, **pooled(like, left, right))
    return product


def _errors(
    c: Tensor, p: Tensor, r: Tensor, stack: _Stack, before: Sequence[Tree], feedback: Feedback
) -> Sequence[Tree]:
    """Return the next errors of a stack, written into the memory of c where nobody else has that."""
    rule = _keep_and_deliver(feedback)
    if rule is None:
        # (B, rows, columns) -> B vectors (n,), as the errors lie
        delivered = _product(p, r, stack.plan, c).flatten(1).unbind()
        triples = zip(c.flatten(1).unbind(), delivered, stack.places, strict=True)
        return [feedback.residual(x, sent, before[i]) for x, sent, i in triples]
    left, right = (r, p) if stack.plan.transposed else (p, r)
    # c is read for the last time here, so errors may take its memory; a graph or a trace may need it.
    out = c if is_concrete(c, left, right) and not is_recorded([c]) else None
    # c - deliver P R^T, (B, rows, columns) -> B vectors (n,)
    return torch.baddbmm(c, left, right.mT, alpha=-rule[1], out=out).flatten(1).unbind()


def _reshape(leaves: Sequence[Tensor], axis: str, feedback: Feedback) -> Reshape:
    """Return how the errors of a `LowRankState` move: as those of workers without servers."""
    rows = layouts.buckets(leaves, 1, 1, "per_tensor")
    hops = Hop(axis, identity(), feedback), Hop(axis, identity(), off())
    move = errors_reshape(leaves, axis, lambda world: rows, *hops)

    def as_state(errors: tuple[Tree, ...]) -> ErrorFeedbackState:
        return ErrorFeedbackState(errors, ((),) * len(errors))

    return Reshape(
        lambda errors, world, rank: move.addends(as_state(errors), world, rank),
        lambda total, fresh: move.adopt(total, as_state(fresh)).worker,
    )
