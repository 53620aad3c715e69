"""The gradients of a step: which there are, what the others say of missing ones, how they are clipped and compared.

A parameter may have no gradient, or one of a kind that is refused; a hyper-parameter that was written into a group may
be out of range. None of this is compared while nothing changes. A rank on which something changed puts a NaN among its
gradients: the step is then skipped on all ranks, as any step with a NaN is, and all of them meet in
`Gradients.agree_on_missing`. That keeps the comparison off the steady path, and no rank waits for a message that
another never sends.

Scaled losses: `torch.amp.GradScaler` tells an optimizer with `_step_supports_amp_scaling` the scale and whether it saw
an Inf on this rank, and calls its step in any case. So every rank takes part in the step, a rank that saw an Inf
contributes NaN, and all ranks skip together. The scalers themselves need not agree: what is sent has no scale.

Parameters without a gradient stay as they are, and so do the copies of them that a state keeps. The master shards of
`fn.sharded` and the anchor of 0/1 Adam take every step, as by a gradient of zero: the momentum goes on for a while, and
weight decay for good. Unless they are held, too, a parameter jumps to them when its gradients return.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.optim.consistency import LOCAL_STEP_TAKEN, compare_on_axes, device_among
from fn.base import Phase, Round, Transform, chain, check_number
from fn.collectives.agreement import check_agreement, gather_values
from fn.collectives.axis import ALONE, Axis, Binding, axis_index, axis_size
from fn.collectives.primitives import all_gather, psum
from fn.collectives.profiling import Watchers, watched_by
from fn.errors import RanksDisagree, expected
from fn.kernels import rules
from fn.kernels.layout import scale_dtype
from fn.kernels.lists import elementwise
from fn.transforms.average import CodedAverageState, average
from fn.transforms.clip import clip_by_global_norm
from fn.transforms.zero_one_adam import ZeroOneAdamState

Tree = Any
Place = tuple[int, int]
"""A parameter: its param group and its number there."""

Grads = tuple[list[Tensor], ...]


class Kept(NamedTuple):
    """Numbers that a step is to leave as they are. where: which of the tensor's; None: all of them."""

    tensor: Tensor
    numbers: Tensor
    where: Tensor | None

    def put_back(self) -> None:
        """Write them again, behind the step."""
        x, old, where = self
        x.copy_(old if where is None else torch.where(where, old, x))


class Gradients:
    """Which gradients the ranks agreed to be absent, and what stays as it is for want of one."""

    def __init__(self) -> None:
        self.absent: frozenset[Place] = frozenset()
        self._absent_here: frozenset[Place] = frozenset()
        self._problem: Exception | None = None
        self._held_alone: frozenset[Place] = frozenset()  # in all local steps since the ranks agreed last
        self._masks: tuple[frozenset[Place], list[Tensor]] = frozenset(), []

    def collect(
        self,
        groups: Sequence[Sequence[Tensor]],
        phase: Phase | Round,
        problem: Exception | None = None,
        inside: Sequence[str] = (),
    ) -> Grads:
        """Return a gradient per parameter, zeros where there is none; NaN to ask the others, if something changed.

        In the local phase and in rounds nobody is asked. In rounds, what is absent is this rank's own affair; but where
        the ranks of an island take local steps together, in each of them a gradient is absent that none of them has.

        Args: groups: the parameters of each param group. problem: why this rank cannot take the step at all. inside:
            the axes within an island.
        Raises: the problem, or a TypeError for a sparse or complex gradient, where nobody needs to be asked;
            `RanksDisagree` on the other ranks of the island.
        """
        grads = [[p.grad for p in params] for params in groups]
        here = [(g, i) for g, group in enumerate(grads) for i, grad in enumerate(group) if grad is None]
        self._absent_here = frozenset(here)
        self._problem = problem or _refused(groups, grads)
        if isinstance(phase, Round):
            self.absent = self._absent_within(grads, inside, device_among(groups)) if inside else self._absent_here
        asks = isinstance(phase, Phase) and phase is not Phase.LOCAL
        if self._problem is not None and not (asks and any(p.numel() for params in groups for p in params)):
            raise self._problem
        if self._problem is not None or (asks and self.absent != self._absent_here):
            return tuple([torch.full_like(p, float("nan")) for p in params] for params in groups)
        pairs = [zip(*lists, strict=True) for lists in zip(groups, grads, strict=True)]
        return tuple([torch.zeros_like(p) if g is None else g for p, g in pair] for pair in pairs)

    def _absent_within(
        self, grads: Sequence[Sequence[Tensor | None]], axes: Sequence[str], device: torch.device
    ) -> frozenset[Place]:
        """Return which gradients no rank of some axes has. Raises: `RanksDisagree` if another one has a problem."""
        places = [(g, i) for g, group in enumerate(grads) for i in range(len(group))]
        said = [self._problem is not None, *(place not in self._absent_here for place in places)]
        counts = torch.tensor(said, dtype=torch.int32, device=device)
        with watched_by(Watchers()):  # what no ledger counts
            for axis in axes:
                counts = psum(counts, axis)
            problems, *present = counts.tolist()
            _, error = _told(self._problem, axes if problems else (), device)
        if error is not None and self._problem is None:
            raise error
        return frozenset(place for place, count in zip(places, present, strict=True) if not count)

    def are_others_absent(self, g: int, params: Sequence[Tensor]) -> bool:
        """Tell whether other gradients of a param group are absent here than those that the ranks agreed on."""
        return any((p.grad is None) != ((g, i) in self.absent) for i, p in enumerate(params))

    def agree_on_missing(
        self, axes: Sequence[str], groups: Sequence[Sequence[Tensor]], names: Sequence[Sequence[str]]
    ) -> bool:
        """After a skipped step: compare with the other ranks; tell whether the step should be taken again.

        Raises: `RanksDisagree`, on every rank, that names a rank and a parameter, if the ranks differ; the problem
            of this rank if all of them have it.
        """
        device = device_among(groups)
        all_have, error = _told(self._problem, axes, device)
        if self._problem is not None and all_have:
            raise self._problem
        if error is not None:
            raise error
        here = {
            f"the gradient of param group {g}, parameter {name}": "absent" if (g, i) in self._absent_here else "present"
            for g, group in enumerate(names)
            for i, name in enumerate(group)
        }
        compare_on_axes(axes, lambda axis: check_agreement(axis, here, device), device)
        changed = self.absent != self._absent_here
        self.absent = self._absent_here
        return changed

    def hold(
        self, phase: Phase, groups: Sequence[Sequence[Tensor]], states: Tree, transforms: Sequence[Transform]
    ) -> list[Kept]:
        """Return what a step is to leave as it is for want of gradients; empty where all are there. The axes are bound.

        0/1 Adam leads the ranks together in its synchronising steps. A parameter that moved in local steps, elsewhere
        on each rank, takes part in the next of them even if its gradients ended in between; from then on it is held.

        Args: groups: the parameters of each param group. states, transforms: of each.
        """
        held = self.absent
        if held and _are_apart(states):
            held = held & self._held_alone
        if phase is Phase.LOCAL:
            self._held_alone, copies, held = held, [], self.absent
        elif held:
            copies = [leaf for g in sorted({g for g, _ in held}) for leaf in _copies(states[g])]
        else:
            return []
        masks = self._masks_of(held, groups, states, transforms) if copies else []
        kept = [Kept(leaf, leaf.clone(), mask) for leaf, mask in zip(copies, masks, strict=True)]
        return [*kept, *(Kept(p, p.detach().clone(), None) for g, i in held for p in [groups[g][i]])]

    def _masks_of(
        self,
        held: frozenset[Place],
        groups: Sequence[Sequence[Tensor]],
        states: Tree,
        transforms: Sequence[Transform],
    ) -> list[Tensor]:
        """Return where the copies are of parameters that stay, which an init of ones for those tells."""
        if self._masks[0] != held:
            masks = []
            for g in sorted({g for g, _ in held}):
                ones = [torch.full_like(p.detach(), float((g, i) in held)) for i, p in enumerate(groups[g])]
                if _copies(states[g]):
                    masks += [leaf != 0 for leaf in _copies(transforms[g].init(ones))]
            self._masks = held, masks
        return self._masks[1]


def _copies(state: Tree) -> list[Tensor]:
    return tree.leaves(roles.find(state, "copies"))


def _are_apart(states: Tree) -> bool:
    """Tell whether ranks took local steps since they agreed; it is replicated."""
    return any(float(state.elapsed) > 0 for state in tree.instances(states, ZeroOneAdamState))


def _refused(groups: Sequence[Sequence[Tensor]], grads: Sequence[Sequence[Tensor | None]]) -> TypeError | None:
    for g, lists in enumerate(zip(groups, grads, strict=True)):
        try:
            tree.check_real(
                [p if x is None else x for p, x in zip(*lists, strict=True)], f"gradients of param group {g}"
            )
        except TypeError as error:
            return error
    return None


def _told(problem: Exception | None, axes: Sequence[str], device: torch.device) -> tuple[bool, RanksDisagree | None]:
    """Tell the ranks of all axes of a problem; return whether all have one, and an error with the first one's text."""
    all_have, rank, text = problem is not None, -1, ""
    if problem is not None and axes:
        here = ", ".join(f"rank {int(axis_index(axis))} of axis {axis!r}" for axis in axes)
        rank, text = int(axis_index(axes[0])), f"{here}: {type(problem).__name__}: {problem}"
    for axis in axes:
        answers = gather_values((all_have, rank, text), axis, device)
        all_have = all(has_one for has_one, _, _ in answers)
        rank, text = next(((r, t) for _, r, t in answers if t), (-1, ""))
    if not text:
        return all_have, None
    message = f"this step cannot be taken on {text}; nothing has moved"
    return all_have, RanksDisagree(message, rank=rank, field="this step")


def unscaled(grads: Grads, scale: Tensor | float | None, found_inf: Tensor | None) -> Grads:
    """Divide gradients by the scale of the loss; make them NaN where an Inf was found.

    Args:
        grads: per param group.
        scale: of the loss; None if the gradients are unscaled already.
        found_inf: more than 0 if the scaler found an Inf or a NaN on this rank; None if it did not look.
    Returns: the gradients, half precision widened to float32 where a scale is taken out, or as they are.
    """
    device = next((g.device for group in grads for g in group), torch.device("cpu"))
    if scale is None and (found_inf is None or (found_inf.device.type == "cpu" and not float(found_inf))):
        return grads
    factor = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64, device=device).reciprocal()
    if found_inf is not None:
        factor = torch.where(found_inf.to(device).reshape(()) > 0, float("nan"), factor.reshape(()))
    factor = factor.float()
    return tuple(_scaled(group, factor) for group in grads)


def _scaled(grads: list[Tensor], factor: Tensor) -> list[Tensor]:
    """Return gradients times a 0-d factor, in float32 or wider, without a round to half precision in between."""
    widened = any(g.element_size() < 4 for g in grads)
    out = [[torch.empty_like(g, dtype=scale_dtype(g)) for g in grads]] if widened else None
    devices = {g.device for g in grads}
    factors = {device: factor.to(device) for device in devices}
    each = [factors[g.device] for g in grads] if len(devices) > 1 else next(iter(factors.values()), factor)
    found: list[Tensor] = elementwise(rules.scaled, (grads,), each, wide=True, out=out)
    return found


CLOSE = 1e-5
"""Relative difference of norms that clipping to one norm leaves, by its rounding; norms of two ranks differ by more."""


def in_doubt(refuse_averaged: bool, compresses: bool) -> frozenset[Phase]:
    """Return the phases whose first step looks at its gradients. Args: compresses: whether there is a schedule."""
    phases = (Phase.WARMUP, Phase.COMPRESSED) if compresses else (Phase.COMPRESSED,)
    return frozenset(phases if refuse_averaged else ())


def still_in_doubt(doubts: frozenset[Phase], phase: Phase, grads: Grads, axes: Sequence[str]) -> frozenset[Phase]:
    """Look at the gradients of a step; return the phases that are still to be looked at.

    If they are the same on all ranks of an axis, something has averaged them, DDP perhaps, and has sent what the
    optimizer was to save: in a warm-up that is warned of, in the compressed phase refused. If they differ but have one
    norm, each rank has clipped by a norm of its own: that is warned of. Gradients that are zero or not finite tell
    nothing. All ranks must call it; three numbers per parameter travel.

    Raises: ValueError, on all ranks, with what to do.
    """
    sums, tells = _sums([g for group in grads for g in group if g.numel()]), True
    if not len(sums):
        return doubts
    for axis in axes:
        rows = all_gather(sums, axis)  # (W, n, 3)
        tells = tells and _tell(rows)
        if not tells or axis_size(axis) == 1:
            continue
        norms = rows[..., 2].sum(1).sqrt()
        if bool((rows == rows[:1]).all()):
            text = (
                f"gradients: are the same on all ranks of {axis!r}, so they were averaged already and the compressed "
                f"phase would save nothing; call fn.adapters.ddp.keep_local(model) if the model is wrapped in DDP, or "
                f"pass refuse_averaged=False if the ranks see the same data on purpose"
            )
            if phase is Phase.COMPRESSED:
                raise ValueError(text)
            warnings.warn(f"{text}; the first compressed step refuses them", stacklevel=7)
        elif bool(((norms - norms[0]).abs() <= CLOSE * norms[0]).all()):
            text = f"gradients: have the norm {float(norms[0]):.4g} on all ranks of {axis!r}, although they differ"
            hint = "which is not that of their mean; leave that out, and give the optimizer max_norm in its place"
            text = f"{text}, as if each rank had clipped by a norm of its own, {hint}"
            warnings.warn(text, stacklevel=7)
    return doubts - {phase} if tells else doubts


def shared_in_doubt(
    doubts: frozenset[Phase], params: Sequence[Sequence[Tensor]], axes: Sequence[str]
) -> frozenset[Phase]:
    """Look at the gradients behind the first exchange of rounds; return the phases that are still to be looked at.

    Between exchanges each place on an axis trains alone, so no two may have the same gradients. DDP may average within
    an island, whose ranks have one place, and nowhere else. Gradients that are zero or not finite tell nothing. All
    ranks must call it; three numbers per parameter travel, which no ledger counts.

    Raises: ValueError, on all ranks, with what to do.
    """
    sums = _sums([p.new_zeros(1) if p.grad is None else p.grad for group in params for p in group])
    tells = bool(len(sums))
    for axis in axes:
        with watched_by(Watchers()):
            rows = all_gather(sums, axis)
        tells = tells and _tell(rows)
        if not tells:
            continue
        kinds = torch.unique(rows.flatten(1), dim=0, return_inverse=True)[1].tolist()  # of each rank's gradients
        second = next((rank for rank, kind in enumerate(kinds) if kind in kinds[:rank]), None)
        if second is not None:
            first = kinds.index(kinds[second])
            raise ValueError(
                f"gradients: are the same on ranks {first} and {second} of {axis!r}, which train alone between "
                f"exchanges, so something averages them, such as DDP; call fn.adapters.ddp.keep_local(model), give "
                f"DDP the process_group of one island, or pass refuse_averaged=False if these ranks see the same data "
                f"on purpose; {LOCAL_STEP_TAKEN}"
            )
    return doubts - {Phase.COMPRESSED} if tells else doubts


def _sums(grads: Sequence[Tensor]) -> Tensor:
    """Return of each gradient the sums of its elements, of their magnitudes and of their squares, (n, 3) float64."""
    rows = []
    for g in grads:
        wide = g.detach().double()  # one at a time: it takes twice the memory of the gradient
        rows.append(torch.stack([wide.sum(), wide.abs().sum(), wide.square().sum()]))
    return torch.stack(rows) if rows else torch.zeros(0, 3, dtype=torch.float64, device="cpu")


def _tell(rows: Tensor) -> bool:
    """Tell whether sums of all ranks say something of their gradients: they are finite, and not all zero."""
    return bool(torch.isfinite(rows).all()) and bool(rows.any())


def check_max_norm(max_norm: float | None, axes: Sequence[str]) -> None:
    """Refuse a norm that gradients cannot be clipped by. Raises: TypeError if it is no number; ValueError."""
    if max_norm is None:
        return
    check_number("max_norm", max_norm)
    if not max_norm > 0:
        raise ValueError(expected("max_norm", "a number above 0", f"{max_norm}"))
    if len(axes) > 1:
        raise ValueError(expected("max_norm", "None where the axes are two or more", f"{max_norm} on {list(axes)}"))


def check_max_grad_norm(max_grad_norm: float | None) -> None:
    """Refuse the norm that a trainer clips each rank's own gradients by, before anything is trained.

    Args: max_grad_norm: the trainer's setting; None and 0 are not to clip.
    Raises: ValueError that says how to clip.

    >>> import fn
    >>> fn.adapters.check_max_grad_norm(0.0)
    >>> try:
    ...     fn.adapters.check_max_grad_norm(1.0)
    ... except ValueError as error:
    ...     print(error.args[0].partition(", for")[0])
    max_grad_norm: expected 0
    """
    if max_grad_norm:
        cure = f"set it to 0, and clip by the norm of all ranks: fn.Optimizer(..., max_norm={max_grad_norm}) with "
        cure += "keep_local(model) in the place of overlap"
        wanted = "0, for a trainer clips the gradients of each rank by a norm of their own"
        raise ValueError(expected("max_grad_norm", wanted, f"{max_grad_norm}", cure))


class Clipping(NamedTuple):
    """How gradients are clipped.

    gradients: (gradients, params) of all groups -> the gradients clipped; None: they stay. binding: of the update that
    follows.
    """

    gradients: Callable[[Tree, Tree], Tree] | None
    binding: AbstractContextManager[Any]


def clipping(phase: Phase, max_norm: float | None, axis: str | None, state: Tree) -> Clipping:
    """Return how gradients are clipped by their global norm before an update.

    In the warm-up the gradients are averaged first, those of all groups in one message, and their norm is that of the
    averaged gradient. The update is then that of one rank on the mean gradient. Where ranks have pieces of the state,
    tensors that they own or momenta of their own, it needs all ranks, and averages the mean once more, which costs its
    bytes again. In the compressed phase the averaged gradient is not known before it has been sent; all ranks scale by
    one factor, from the root of the mean squared norm, which is an upper bound of the norm of the mean. It is a 4-byte
    message ahead of the others. So it is in a warm-up in codes.

    Args: phase: of the update. max_norm: positive; None: gradients stay as they are. axis: the ranks. state: of the
        transform; it tells whether the warm-up is in codes, and whether ranks have parts of it.
    """
    if max_norm is None:
        return Clipping(None, nullcontext())
    if phase is Phase.WARMUP and tree.instances(state, CodedAverageState):
        phase = Phase.COMPRESSED
    clip = chain(average(axis), clip_by_global_norm(max_norm, axis)).update(phase)
    alone = Binding({})
    if axis is not None and phase is Phase.WARMUP and not _have_their_own(state):
        alone = Binding({axis: Axis(1, torch.tensor(0, dtype=torch.int64, device="cpu"), ALONE)})
    return Clipping(lambda grads, params: clip(grads, ((), ()), params)[0], alone)


def _have_their_own(state: Tree) -> bool:
    """Tell whether ranks have anything of their own that a warm-up step needs, such as momenta of which it is the mean.

    It does not read residual errors, nor does it follow steps in which params came to differ.
    """
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        if roles.has_local_params(state):
            return False
        if roles.rank_local(state).difference(roles.roles_of(state).errors):
            return True
    if not isinstance(state, tuple | list | dict):
        return False
    inside = state.values() if isinstance(state, dict) else state
    return any(_have_their_own(value) for value in inside if not isinstance(value, Tensor))
