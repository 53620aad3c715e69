"""Skip steps that are not finite, on all ranks together: `skip_nonfinite`, the guard around every named optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import roles, tree
from fn.base import (
    Guarded,
    NewParams,
    Phase,
    SideBySide,
    Transform,
    UpdateFn,
    apply_updates,
    check_is_transform,
    check_state,
    combine,
    facts_of,
    merged,
)
from fn.collectives.agreement import device_of, true_on_all
from fn.collectives.axis import rank_dims
from fn.errors import expected
from fn.kernels import ops
from fn.kernels.flags import known
from fn.kernels.tracing import is_concrete
from fn.roles import declare

Tree = Any


@declare(skips=("skipped",), others=("inner",))
class SkipState(NamedTuple):
    """inner: the state of the guarded transform. skipped: how many steps were skipped, 0-d int64."""

    inner: Tree
    skipped: Tensor


@declare(skips=("skipped",), others=("inner",))
class _InsideState(NamedTuple):
    """A `SkipState` as a guard hands it to another guard inside, which then returns NaN where it skips."""

    inner: Tree
    skipped: Tensor


def skip_nonfinite(inner: Transform) -> Transform:
    """Leave params and state bitwise as they are in a step whose result is not finite, and count it.

    A step is also skipped if a param could overflow: for an update of at least 2^103, 1e31, in float32 or 2^970 in
    float64, and for one that makes a param of float16 overflow, for which 16 can be enough.

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

    Some transforms lead params that differ between ranks to common ones. The classes of their states declare which
    fields all ranks hold alike after an exchange (`Roles.watched`), and only these are checked then. So beside such a
    transform in a partition each label needs a guard of its own.

    Args: inner: the transform to guard.
    Returns: a transform with the phases of `inner`.
    """

    check_is_transform("inner", inner)
    shards = facts_of(inner).shards  # whose ranks have other elements of one model each, and cannot see those of others

    def init(params: Tree) -> SkipState:
        tree.check_real(params, "params")
        leaves = tree.leaves(params)
        device = leaves[0].device if leaves else torch.device("cpu")
        return SkipState(inner.init(params), torch.zeros((), dtype=torch.int64, device=device))

    def guarded(phase: Phase, inner_update: UpdateFn) -> UpdateFn:
        def local(updates: Tree, state: SkipState, params: Tree, /) -> tuple[Tree, SkipState]:
            check_state(state, SkipState)
            out, after = inner_update(updates, state.inner, params)
            return out, state._replace(inner=after)

        def update(updates: Tree, state: SkipState | _InsideState, params: Tree, /) -> tuple[Tree, SkipState]:
            is_inside = isinstance(state, _InsideState)
            state = SkipState(*state) if isinstance(state, _InsideState) else state
            check_state(state, SkipState)
            if phase is not Phase.WARMUP and _guards_itself(state.inner):
                return local(updates, state, params)
            before = state.inner
            if roles.find(before, "skips"):
                before = tree.replace(before, SkipState, lambda s: _InsideState(*s))
                out, after = inner_update(updates, before, params)
                after = tree.replace(after, _InsideState, lambda s: SkipState(*s))
            else:
                out, after = inner_update(updates, before, params)
            ok = true_on_all(_is_fine(out, after, state.inner, params), shards, device_of(out))
            return _keep_or_skip(ok, out, after, state, params, math.nan if is_inside else None)

        looks = phase is not Phase.LOCAL
        return Guarded(inner_update, looks, update if looks else local, partial(guarded, phase))

    return combine([inner], init, lambda phase, updates_of: guarded(phase, *updates_of))


def together(transforms: Sequence[Transform]) -> Transform:
    """Apply one transform to each of several trees; a step that one of them skips, all skip.

    Args: transforms: for the param groups of an optimizer. Those that skip are made by `skip_nonfinite`.
    Returns: a transform of tuples, one entry per tree, with the phases that all of them have.
    """

    shards = merged(*map(facts_of, transforms)).shards

    def init(params: tuple[Tree, ...]) -> tuple[Tree, ...]:
        return tuple(t.init(p) for t, p in zip(transforms, params, strict=True))

    def compose(phase: Phase, updates_of: list[UpdateFn]) -> UpdateFn:
        def update(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
            results = [f(*args) for f, args in zip(updates_of, zip(updates, state, params, strict=True), strict=True)]
            guards = [(new, old) for (_, new), old in zip(results, state, strict=True) if isinstance(old, SkipState)]
            counts = [(new.skipped, old.skipped) for new, old in guards if new.skipped is not old.skipped]
            if len(results) > 1 and (counts or shards):
                flags = [new == old for new, old in counts] or [torch.tensor(True, dtype=torch.bool, device="cpu")]
                ok = true_on_all(torch.stack(flags).all(), shards, device_of(params))
                results = [
                    _keep_or_skip(ok, out, new.inner, old, p) if isinstance(old, SkipState) else (out, new)
                    for (out, new), old, p in zip(results, state, params, strict=True)
                ]
            outs, after = zip(*results, strict=True) if results else ((), ())
            if any(isinstance(out, NewParams) for out in outs):  # then all trees have them
                pairs_of = zip(outs, params, strict=True)
                new = [out.params if isinstance(out, NewParams) else apply_updates(p, out) for out, p in pairs_of]
                return NewParams(tuple(new)), after
            return outs, after

        return SideBySide(tuple(updates_of), update)

    return combine(transforms, init, compose)


def _guards_itself(state: Tree) -> bool:
    """Tell whether what is watched is each rank's own behind the warm-up, so that ranks would skip apart."""
    classes = [x for x in tree.instances(state, tuple) if hasattr(x, "_fields")]
    return any(roles.rank_local(x).intersection(roles.roles_of(x).watched) for x in classes)


def _is_fine(out: Tree, after: Tree, before: Tree, params: Tree) -> Tensor:
    """Return whether a step may be taken, 0-d bool, the same on all ranks. out: its updates. before, after: states."""
    if watched := tree.leaves(roles.find(after, "watched")):
        olds = tree.leaves(roles.find(before, "watched"))
        return all_finite([new for new, old in zip(watched, olds, strict=True) if new is not old])
    if isinstance(out, NewParams):
        ok = all_finite(tree.leaves(out))
    else:
        ok = all_addable(tree.leaves(out), tree.leaves(params))
    ok = ok & all_finite(_changed_and_replicated(before, after))
    for new, old in zip(roles.find(after, "skips"), roles.find(before, "skips"), strict=True):
        ok = ok if new is old else ok & (new == old)  # where a guard inside skips, the whole step is skipped
    return ok


def _keep_or_skip(
    ok: Tensor, updates: Tree, after: Tree, state: SkipState, params: Tree, instead: float | None = None
) -> tuple[Tree, SkipState]:
    """Return updates and `after` where ok; elsewhere updates that move nothing, or `instead`, and the old state."""
    if known(ok):  # a branch costs nothing here, a selection a pass
        return updates, SkipState(after, state.skipped)
    skipped = state.skipped + (~ok).to(state.skipped)
    if isinstance(updates, NewParams):
        old = params if instead is None else tree.map(lambda p: torch.full_like(p, instead), params)
        updates = NewParams(tree.map(lambda new, p: torch.where(ok.to(p.device), new, p.to(new)), updates.params, old))
    else:
        still = -0.0 if instead is None else instead
        updates = tree.map(lambda u: torch.where(ok.to(u.device), u, still), updates)

    def chosen(new: Tensor, old: Tensor) -> Tensor:
        return new if new is old else torch.where(ok.to(new.device), new, old)

    return updates, SkipState(tree.map(chosen, after, state.inner), skipped)


def _changed_and_replicated(before: Tree, after: Tree) -> list[Tensor]:
    leaves = zip(tree.leaves(before), tree.leaves(after), tree.leaves(rank_dims(after)), strict=True)
    # what did not change was finite before; what is rank-local may not decide, or ranks would skip apart
    changed = [(place, new) for place, (old, new, dim) in enumerate(leaves) if dim is None and new is not old]
    for place, new in changed:
        if not isinstance(new, Tensor):
            wanted = f"leaf {tree.paths(after)[place] or 'the root'!r}, which changes, to be a tensor"
            cure = "use torch.zeros((), dtype=torch.int64) for a counter"
            raise TypeError(expected("state", wanted, type(new).__name__, cure))
    return [new for _, new in changed if new.is_floating_point()]


def all_finite(leaves: list[Tensor]) -> Tensor:
    """Return whether all elements of all leaves are finite, 0-d bool."""
    leaves = [x for x in leaves if x.numel()]
    if _is_on_host(leaves):
        sums = [float(x.detach().sum(dtype=x.dtype)) for x in leaves]
        if all(map(math.isfinite, sums)):  # finite sums prove it in half the time; an infinite one proves nothing
            return torch.tensor(True, dtype=torch.bool, device="cpu")
    if _has_numbers(leaves):
        return _all_below(math.inf, leaves)
    return torch.isfinite(ends(leaves)).all()


def all_addable(updates: list[Tensor], params: Sequence[Tensor] = ()) -> Tensor:
    """Return whether updates are finite and make no finite param overflow, 0-d bool.

    An update of less than half a unit in the last place of the dtype's largest number makes no finite param overflow.
    In float16 that is 16, which sound updates can reach, so there the sums are looked at.

    Args: params: of the updates, where some may be of float16.
    """
    halves = [p if p.dtype == torch.float16 else None for p in params if isinstance(p, Tensor)]
    halves = halves if len(halves) == len(updates) else [None] * len(updates)
    pairs = [(x, p) for x, p in zip(updates, halves, strict=True) if x.numel()]
    small = (float(torch.linalg.vector_norm(x.detach())) < _far(x, p) for x, p in pairs)
    if _is_on_host([x for x, _ in pairs]) and all(small):
        return torch.tensor(True, dtype=torch.bool, device="cpu")
    if _has_numbers([x for x, _ in pairs]):
        limits = {_far(x): [y for y, q in pairs if q is None and _far(y) == _far(x)] for x, p in pairs if p is None}
        flags = [_all_below(limit, some) for limit, some in limits.items()]
        pairs = [(x, p) for x, p in pairs if p is not None]
    else:
        flags = []
    flags += [ends([x]).abs() < _far(x) if p is None else (p + x).to(p.dtype).isfinite() for x, p in pairs]
    return torch.stack([flag.all().to(flags[0].device) for flag in flags]).all()


def _all_below(limit: float, leaves: list[Tensor]) -> Tensor:
    """Return whether all magnitudes are below a limit, by a kernel for lists of one dtype on one device; 0-d bool."""
    alike: dict[Any, list[Tensor]] = {}
    for x in leaves:
        alike.setdefault((x.dtype, x.device), []).append(x.detach())
    flags = [ops.direct("largest_magnitude", some) < limit for some in alike.values()]  # NaN is not
    return flags[0] if len(flags) == 1 else torch.stack([flag.to(flags[0].device) for flag in flags]).all()


def _has_numbers(leaves: list[Tensor]) -> bool:
    """Return whether leaves hold numbers that are not on the host alone."""
    return bool(leaves) and is_concrete(*leaves) and not _is_on_host(leaves)


def _far(x: Tensor, half: Tensor | None = None) -> float:
    """Return from which size on an update counts as too large. half: the param, if it is of float16."""
    if half is not None:
        return 2.0**4
    return 2.0**970 if x.dtype == torch.float64 else 2.0**103


def _is_on_host(leaves: list[Tensor]) -> bool:
    return not leaves or (leaves[0].device.type == "cpu" and is_concrete(*leaves))


def ends(leaves: list[Tensor]) -> Tensor:
    """Return the smallest and the largest element of every leaf; NaN or Inf if one is. Without a copy of the leaf."""
    both = torch.aminmax if is_concrete(*leaves) else _amin_and_amax  # along vmap's dimension aminmax is 4 times slower
    return torch.stack([end.double().to(leaves[0].device) for x in leaves for end in both(x)])


def _amin_and_amax(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.amin(), x.amax()
