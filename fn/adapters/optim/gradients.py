"""The gradients of a step: how they are unscaled, clipped, and looked at in the first step of a phase.

`torch.amp.GradScaler` tells an optimizer with `_step_supports_amp_scaling` the scale of the loss and whether it saw an
Inf on this rank, and calls its step in any case. So every rank takes part in the step, a rank that saw an Inf
contributes NaN, and all ranks skip together. The scalers need not agree: what is sent has no scale.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.arguments import check_number
from fn.base import Phase, Transform, facts_of
from fn.collectives.axis import axis_size
from fn.collectives.primitives import all_gather
from fn.collectives.profiling import Watchers, watched_by
from fn.errors import RefusedByAll, expected
from fn.kernels import rules
from fn.kernels.layout import scale_dtype
from fn.kernels.lists import elementwise

Tree = Any
Grads = list[list[Tensor]]


def check_kinds(grads: Grads, names: Sequence[Sequence[str]]) -> None:
    """Refuse gradients that cannot be stepped, sparse or complex ones, with a TypeError that names the parameter."""
    for i, (group, of_group) in enumerate(zip(grads, names, strict=True)):
        for g, name in zip(group, of_group, strict=True):
            if g.layout is not torch.strided or not g.is_floating_point():
                tree.check_real({name: g}, f"gradients of param group {i}")


def unscaled(grads: Grads, scale: Tensor | float | None, found_inf: Tensor | None) -> Grads:
    """Divide gradients by the scale of the loss; make them NaN where an Inf was found.

    Args: scale: of the loss; None if the gradients are unscaled already. found_inf: more than 0 if the scaler found an
        Inf or a NaN on this rank; None if it did not look.
    Returns: the gradients, half precision widened to float32 where a scale is taken out, or as they are.
    """
    device = next((g.device for group in grads for g in group), torch.device("cpu"))
    # On the CPU the flag is read. On a device that would be a wait, so the factor is always applied there.
    if scale is None and (found_inf is None or (found_inf.device.type == "cpu" and not float(found_inf))):
        return grads
    # The reciprocal is rounded once, to float32; scales are powers of two, so most often not at all.
    factor = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64, device=device).reciprocal()
    if found_inf is not None:
        # Any shape of one element -> (): the factor is a 0-d tensor for kernels of lists.
        factor = torch.where(found_inf.to(device).reshape(()) > 0, float("nan"), factor.reshape(()))
    return [_scaled(group, factor.float()) for group in grads]


def _scaled(grads: list[Tensor], factor: Tensor) -> list[Tensor]:
    """Return gradients times a 0-d factor, in float32 or wider, without a round to half precision in between."""
    widened = any(g.element_size() < 4 for g in grads)
    out = [[torch.empty_like(g, dtype=scale_dtype(g)) for g in grads]] if widened else None
    factors = {device: factor.to(device) for device in {g.device for g in grads}}
    each = [factors[g.device] for g in grads] if len(factors) > 1 else next(iter(factors.values()), factor)
    found: list[Tensor] = elementwise(rules.scaled, (grads,), each, wide=True, out=out)
    return found


def check_max_norm(max_norm: float | None) -> None:
    """Refuse a norm that gradients cannot be clipped by. Raises: TypeError if it is no number; ValueError."""
    if max_norm is None:
        return
    check_number("max_norm", max_norm)
    if not max_norm > 0:
        raise ValueError(expected("max_norm", "a number above 0", f"{max_norm}"))


CLOSE = 1e-5
"""Relative difference of norms that clipping to one norm leaves, by its rounding; norms of two ranks differ by more."""


class ClippedBefore:
    """Warns, once, where a script clips the gradients that the optimizer clips by `max_norm`.

    Whoever clips writes into gradients and leaves them at one norm, step after step. That is told from chance by three
    steps of one norm, or by two of `max_norm` itself, or by that in the first step. It costs a pass over gradients that
    something has written into since they were made, and no wait: on a device the norm of the last step is read.
    """

    def __init__(self) -> None:
        self.is_first, self.is_told = True, False
        self.at_bound, self.alike = 0, 0  # steps in a row whose norm is max_norm, or that of the step before
        self.last: list[list[float]] | None = None
        self.coming: Tensor | None = None  # of a device, which is read when the next step comes

    def look(self, params: Sequence[Tensor], grads: Grads, max_norm: float) -> None:
        """Look at the gradients of a step. Args: grads: unscaled, and not clipped by the optimizer yet."""
        if self.is_told or not any(p.grad is not None and p.grad._version for p in params):
            self.is_first, self.at_bound, self.alike, self.last, self.coming = False, 0, 0, None, None
            return
        each = [g for group in grads for g in group if g.numel()]
        device = each[0].device
        wide = [(g, torch.promote_types(g.dtype, torch.float32)) for g in each]
        # (2, n): sums of magnitudes, and norms. Gradients that are signs have one norm without being clipped, and keep
        # the former, too.
        found = [[torch.linalg.vector_norm(g, k, dtype=t).to(device, torch.float32) for g, t in wide] for k in (1, 2)]
        now = torch.stack([*map(torch.stack, found)])
        ready, self.coming = (now, None) if device.type == "cpu" else (self.coming, now)
        if ready is not None:
            self._judge(ready.tolist(), max_norm)
            self.is_first = False

    def _judge(self, now: list[list[float]], max_norm: float) -> None:
        norm = math.hypot(*now[1])
        before, sums = (math.nan, now[0]) if self.last is None else (math.hypot(*self.last[1]), self.last[0])
        changed = any(abs(a - b) > 1e-3 * b for a, b in zip(now[0], sums, strict=False))
        self.at_bound = self.at_bound + 1 if abs(norm - max_norm) <= CLOSE * max_norm else 0
        self.alike = self.alike + 1 if changed and abs(norm - before) <= 2e-6 * norm else 0
        self.last = now
        if self.at_bound > (not self.is_first) or self.alike > 1:
            self.is_told = True
            text = f"max_norm: gradients come clipped to a norm of {norm:.4g}, and the optimizer clips by {max_norm:g}"
            hint = "leave clip_grad_norm_, or a trainer's own clipping, out, or give the optimizer no max_norm"
            warnings.warn(f"{text} once more; {hint}", stacklevel=8)


def averaged_in(transform: Transform, phase: Phase) -> tuple[str, ...]:
    """Return the axes over which a phase averages the updates of all parameters, as far as facts tell."""
    axes: tuple[str, ...] = getattr(facts_of(transform).averaged, phase.value)
    return axes


def apart_in(transform: Transform, phases: Collection[Phase]) -> str:
    """Return what is wrong with a transform that averages over an axis in some of these phases only; "" for nothing.

    Ranks would go apart in the others. A link of a user's own that has no facts may average there.
    """
    in_order = [phase for phase in Phase if phase in phases]  # a set has another order on each rank
    for phase in () if facts_of(transform).silent else in_order:
        for other in in_order:
            for axis in averaged_in(transform, other):
                if axis not in averaged_in(transform, phase):
                    wanted = f"an average over {axis!r} of all parameters in every phase of the schedule, as in {other}"
                    cure = f"put fn.unfrozen(fn.average({axis!r})) in front, which averages in every phase"
                    return expected("make's result", wanted, f"none in {phase}, where ranks would go apart", cure)
    return ""


def look_at_first(grads: Grads, phase: Phase, axes: Sequence[str], *, compresses: bool) -> bool:
    """Look whether the gradients of a phase's first step are each rank's own; return whether they told anything.

    If they are the same on all ranks of an axis, something has averaged them, DDP perhaps, and has sent what the
    optimizer was to save: in a warm-up that is warned of, in the compressed phase refused. If they differ but have one
    norm, each rank has clipped by a norm of its own: that is warned of. Gradients that are zero or not finite tell
    nothing. All ranks must call it; three numbers per parameter travel.

    Args: axes: those that the phase averages over. compresses: whether there is a schedule, and phases to come.
    Raises: RefusedByAll, on all ranks, with what to do.
    """
    found = _sums_by_axis(grads, axes)
    for axis, rows in found.items():
        if axis_size(axis) == 1:
            continue
        # (W, n, 3) against the (1, n, 3) of rank 0.
        if bool((rows == rows[:1]).all()):
            text = (
                f"gradients: are the same on all ranks of {axis!r}, so they were averaged already, and this optimizer "
                f"averages them once more, which costs its bytes and saves nothing; call "
                f"fn.adapters.ddp.keep_local(model) if the model is wrapped in DDP, or pass refuse_averaged=False if "
                f"the ranks see the same data on purpose"
            )
            if phase is Phase.COMPRESSED:
                raise RefusedByAll(text)
            later = "the first compressed step refuses them" if compresses else "or give the optimizer no axis"
            warnings.warn(f"{text}; {later}", stacklevel=8)
        else:
            _warn_of_equal_norms(rows, axis)
    return bool(found) or not axes


def look_at_shared(grads: Grads, axes: Sequence[str], left: str, *, is_late: bool) -> bool:
    """Look behind the first exchange of rounds whether two ranks have the same gradients, as `look_at_first`.

    Between exchanges each place on an axis trains alone. DDP may average within an island, whose ranks have one place,
    and nowhere else. Args: left: how parameters and state are. is_late: whether rounds average gradients, a step late.
    """
    with watched_by(Watchers()):  # which no ledger counts
        found = _sums_by_axis(grads, axes)
    for axis, rows in found.items():
        # (W, n, 3) -> (W, 3 n) -> (W,): the number of the kind of each rank's row; ranks with equal rows have one kind.
        kinds = torch.unique(rows.flatten(1), dim=0, return_inverse=True)[1].tolist()
        second = next((rank for rank, kind in enumerate(kinds) if kind in kinds[:rank]), None)
        if second is not None:
            first = kinds.index(kinds[second])
            raise RefusedByAll(
                f"gradients: are the same on ranks {first} and {second} of {axis!r}, which train alone between "
                f"exchanges, so something averages them, such as DDP; call fn.adapters.ddp.keep_local(model), give "
                f"DDP the process_group of one island, or pass refuse_averaged=False if these ranks see the same data "
                f"on purpose; {left}"
            )
        if is_late and axis_size(axis) > 1:
            _warn_of_equal_norms(rows, axis)
    return bool(found) or not axes


def _warn_of_equal_norms(rows: Tensor, axis: str) -> None:
    """Warn if the gradients of all ranks, which differ, have one norm. Args: rows: (W, n, 3), sums by rank."""
    norms = rows[..., 2].sum(1).sqrt()  # (W, n) -> (W,): squares summed over all tensors of a rank
    if bool(((norms - norms[0]).abs() <= CLOSE * norms[0]).all()):
        text = f"gradients: have the norm {float(norms[0]):.4g} on all ranks of {axis!r}, although they differ"
        hint = "which is not that of their mean; leave that out, and give the optimizer max_norm in its place"
        warnings.warn(f"{text}, as if each rank had clipped by a norm of its own, {hint}", stacklevel=9)


def _sums_by_axis(grads: Grads, axes: Sequence[str]) -> dict[str, Tensor]:
    """Return of each gradient the sums of its elements, of their magnitudes and of their squares, on all ranks.

    Returns: (W, n, 3) float64, by axis; {} where these tell nothing, for some are not finite, or all are zero.
    """
    rows = []
    for g in [g for group in grads for g in group if g.numel()] if axes else ():
        wide = g.detach().double()  # one at a time: it takes twice the memory of the gradient
        rows.append(torch.stack([wide.sum(), wide.abs().sum(), wide.square().sum()]))  # (3,)
    sums = torch.stack(rows) if rows else torch.zeros(0, 3, dtype=torch.float64, device="cpu")  # (n, 3)
    # On every axis, also where this rank has nothing to tell: others may know more, and wait for it.
    found = {axis: all_gather(sums, axis) for axis in axes}
    return found if all(bool(x.isfinite().all()) and bool(x.any()) for x in found.values()) else {}
