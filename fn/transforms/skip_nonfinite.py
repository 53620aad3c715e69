"""Skip steps that are not finite, on all ranks together: `skip_nonfinite`, the guard around every named optimizer."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import roles, tree
from fn.arguments import check_is_transform
from fn.base import Guarded, NewParams, Phase, Transform, UpdateFn, check_state, combine, facts_of
from fn.collectives.agreement import device_of, true_on_all
from fn.kernels.flags import is_true
from fn.kernels.table import direct
from fn.kernels.tracing import is_concrete
from fn.roles import declare

Tree = Any


@declare(skips=("skipped",))
class SkipState(NamedTuple):
    """inner: the state of the guarded transform. skipped: how many steps were skipped, 0-d int64."""

    inner: Tree
    skipped: Tensor


@declare(skips=("skipped",))
class _InsideState(NamedTuple):
    """A `SkipState` as a guard hands it to another guard inside, which then returns NaN where it skips."""

    inner: Tree
    skipped: Tensor


def skip_nonfinite(inner: Transform) -> Transform:
    """Leave params and state bitwise as they are in a step whose result is not finite, and count it.

    What is looked at are the updates alone; of transforms that lead params which differ between ranks to common ones,
    what all ranks hold alike after it (`Roles.watched`). Finite numbers that overflow are as in torch: a gradient of
    1e25 makes a second moment infinite, with which an element moves no more, and no step is skipped for it.

    A NaN or Inf on one rank reaches every rank, in the exact mean or in the scales of the codes, and so makes the
    replicated results of all ranks non-finite. Looking at these needs no message, and all ranks skip together. In a
    skipped step the updates are -0.0: p + -0.0 is p, bitwise, also for p = -0.0.

        >>> import torch, fn
        >>> tx = fn.skip_nonfinite(fn.scale_by_learning_rate(0.1))
        >>> params, state = torch.tensor([1.0]), tx.init(torch.tensor([1.0]))
        >>> for g in (1.0, torch.nan, 1.0):
        ...     updates, state = tx.update(fn.Phase.WARMUP)(torch.tensor([g]), state, params)
        ...     params = fn.apply_updates(params, updates)
        >>> params, state.skipped
        (tensor([0.8000]), tensor(1))

    So it belongs around a whole chain. Around links in front of an exchange only, it would leave out one rank's
    updates, and no other rank would know: the mean takes zeros from that rank. With a second guard around the whole, as
    `fn.Optimizer` has one, such a rank sends NaN instead, and all ranks skip.

    Where the tensors are divided over the ranks of an axis (`Facts.shards`), these tell each other, in four bytes.

    The local phase is not guarded, because no rank can know there what another saw. Transforms with local steps, such
    as 0/1 Adam, leave out non-finite ones themselves.

    Beside a transform with something watched in a partition each label needs a guard of its own.

    Args: inner: the transform to guard.
    Returns: a transform with the phases of `inner`.
    """

    check_is_transform("inner", inner)
    shards = facts_of(inner).shards  # whose ranks have other elements of one model each, and cannot see those of others

    def init(params: Tree) -> SkipState:
        tree.check_real(params, "params")
        return SkipState(inner.init(params), torch.zeros((), dtype=torch.int64, device=device_of(params)))

    def guarded(phase: Phase, guards: UpdateFn) -> UpdateFn:
        def local(inner_update: UpdateFn, updates: Tree, state: SkipState, params: Tree, /) -> tuple[Tree, SkipState]:
            check_state(state, SkipState)
            out, after = inner_update(updates, state.inner, params)
            return out, state._replace(inner=after)

        def update(
            inner_update: UpdateFn, updates: Tree, state: SkipState | _InsideState, params: Tree, /
        ) -> tuple[Tree, SkipState]:
            is_inside = isinstance(state, _InsideState)
            state = SkipState(*state) if isinstance(state, _InsideState) else state
            check_state(state, SkipState)
            if phase is not Phase.WARMUP and _guards_itself(state.inner):
                return local(inner_update, updates, state, params)
            before = state.inner
            if roles.find(before, "skips"):
                # A guard inside returns NaN where it skips: one rank's -0.0 would be averaged with the moves of others.
                before = tree.replace(before, SkipState, lambda s: _InsideState(*s))
                out, after = inner_update(updates, before, params)
                after = tree.replace(after, _InsideState, lambda s: SkipState(*s))
            else:
                out, after = inner_update(updates, before, params)
            tree.check_tensors(after, "state")  # a step that is skipped could not put a number back
            ok = true_on_all(is_fine(out, after, state.inner), shards, device_of(out))
            return _keep_or_skip(ok, out, after, state, params, math.nan if is_inside else None)

        looks = phase is not Phase.LOCAL
        return Guarded(guards, looks, update if looks else local)

    exchange = inner.exchange and inner.exchange.at(0)  # 0: `inner` of the guard's state
    return combine([inner], init, lambda phase, of: guarded(phase, *of), exchange=exchange, links=inner.links)


def _guards_itself(state: Tree) -> bool:
    """Tell whether what is watched is each rank's own behind the warm-up, so that ranks would skip apart."""
    return any(roles.rank_local(x).intersection(roles.roles_of(x).watched) for x in tree.named_tuples(state))


def is_fine(out: Tree, after: Tree, before: Tree) -> Tensor:
    """Return whether a step may be taken, 0-d bool, the same on all ranks. out: its updates. before, after: states."""
    # The updates of ranks that went apart differ, so that ranks would skip apart: what they hold alike is looked at.
    if watched := tree.leaves(roles.find(after, "watched")):
        olds = tree.leaves(roles.find(before, "watched"))
        return all_finite([new for new, old in zip(watched, olds, strict=True) if new is not old])
    ok = all_finite(tree.leaves(out))
    for new, old in zip(roles.find(after, "skips"), roles.find(before, "skips"), strict=True):
        ok = ok if new is old else ok & (new == old)  # where a guard inside skips, the whole step is skipped
    return ok


def _keep_or_skip(
    ok: Tensor, updates: Tree, after: Tree, state: SkipState, params: Tree, instead: float | None = None
) -> tuple[Tree, SkipState]:
    """Return updates and `after` where ok; elsewhere updates that move nothing, or `instead`, and the old state."""
    if is_true(ok):  # a branch costs nothing here, a selection a pass
        return updates, SkipState(after, state.skipped)
    skipped = state.skipped + (~ok).to(state.skipped)
    return only_where(ok, updates, params, instead), SkipState(select(ok, after, state.inner), skipped)


def only_where(ok: Tensor, updates: Tree, params: Tree, instead: float | None = None) -> Tree:
    """Return updates, or `NewParams`, where ok; elsewhere such that move nothing, or `instead`."""
    if isinstance(updates, NewParams):
        old = params if instead is None else tree.map(lambda p: torch.full_like(p, instead), params)
        return NewParams(tree.map(lambda new, p: torch.where(ok.to(p.device), new, p.to(new)), updates.params, old))
    # -0.0 changes no param, not even one of -0.0, of which +0.0 would make 0.0.
    still = -0.0 if instead is None else instead
    return tree.map(lambda u: torch.where(ok.to(u.device), u, still), updates)


def select(ok: Tensor, new: Tree, old: Tree) -> Tree:
    """Return `new` where ok, else `old`; without a pass over them where the host knows, or where both are the same."""
    if is_true(ok):
        return new
    return tree.map(lambda x, y: x if x is y else torch.where(ok.to(x.device), x, y), new, old)


def all_finite(leaves: list[Tensor]) -> Tensor:
    """Return whether all elements of all leaves are finite, 0-d bool."""
    leaves = [x for x in leaves if x.numel()]
    if _is_on_host(leaves):
        sums = [float(x.detach().sum(dtype=x.dtype)) for x in leaves]
        if all(map(math.isfinite, sums)):  # finite sums prove it in half the time; an infinite one proves nothing
            return torch.tensor(True, dtype=torch.bool, device="cpu")
    if is_concrete(*leaves) and not _is_on_host(leaves):
        return _by_kernel(leaves)
    return torch.isfinite(ends(leaves)).all()


def _by_kernel(leaves: list[Tensor]) -> Tensor:
    """Return whether all elements are finite, by a kernel for lists of one dtype on one device; 0-d bool."""
    # a flag () for each dtype and device, for a kernel takes a list of one kind
    alike = tree.places_by((x.dtype, x.device) for x in leaves).values()
    flags = [direct("largest_magnitude", [leaves[i].detach() for i in some]) < math.inf for some in alike]  # NaN is not
    return flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).all()


def nan_unless_finite(updates: Tree, momentum: Tree) -> Tree:
    """Return updates, NaN if the momentum is not finite: a clamp would hide that from the guard, which is to skip."""
    ok = all_finite(tree.leaves(momentum))
    return updates if is_true(ok) else tree.map(lambda u: torch.where(ok.to(u.device), u, torch.nan), updates)


def _is_on_host(leaves: list[Tensor]) -> bool:
    return not leaves or (leaves[0].device.type == "cpu" and is_concrete(*leaves))


def ends(leaves: list[Tensor]) -> Tensor:
    """Return the smallest and the largest element of every leaf; NaN or Inf if one is. Without a copy of the leaf."""
    # Along vmap's dimension aminmax is 4 times slower.
    both = torch.aminmax if is_concrete(*leaves) else lambda x: (x.amin(), x.amax())
    # S leaves -> (2 S,), in float64, in which ends of all dtypes fit
    return torch.stack([end.double().to(leaves[0].device) for x in leaves for end in both(x)])
