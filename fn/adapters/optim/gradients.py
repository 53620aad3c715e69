"""Agree across ranks on missing or invalid gradients, or raise on every rank.

A parameter may have no gradient, or one of a kind that is refused; a hyper-parameter that was written into a group may
be out of range. None of this is compared while nothing changes. A rank on which something changed puts a NaN among its
gradients: the step is then skipped on all ranks, as any step with a NaN is, and all of them meet in
`agree_on_missing`. That keeps the comparison off the steady path, and no rank waits for a message that another never
sends.

Scaled losses: `torch.amp.GradScaler` tells an optimizer with `_step_supports_amp_scaling` the scale and whether it saw
an Inf on this rank, and calls its step in any case. So every rank takes part in the step, a rank that saw an Inf
contributes NaN, and all ranks skip together. The scalers themselves need not agree: what is sent has no scale.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fn import tree
from fn.adapters.optim.consistency import device_among
from fn.collectives.agreement import check_agreement, gather_values
from fn.collectives.axis import axis_index
from fn.errors import RanksDisagree

Place = tuple[int, int]
Grads = tuple[list[Tensor], ...]


class Gradients:
    """The gradients of all param groups, and which of them the ranks agreed to be absent."""

    def __init__(self) -> None:
        self.absent: frozenset[Place] = frozenset()
        self._now: frozenset[Place] = frozenset()
        self._problem: Exception | None = None

    def collect(
        self,
        groups: Sequence[Sequence[Tensor]],
        ask: bool = True,
        problem: Exception | None = None,
        *,
        own: bool = False,
    ) -> tuple[list[Tensor], ...]:
        """Return a gradient per parameter, zeros where there is none; NaN to ask, if something changed.

        Args: groups: the parameters of each param group. ask: False in a step in which nothing is sent.
            problem: why this rank cannot take the step at all. own: what is absent is this rank's own affair.
        Raises: the problem, or a TypeError for a sparse or complex gradient, where nobody needs to be asked.
        """
        found = [[p.grad for p in params] for params in groups]
        self._now = _absent(found)
        self.absent = self._now if own else self.absent
        self._problem = problem or _refused(groups, found)
        if self._problem is not None and not (ask and any(p.numel() for params in groups for p in params)):
            raise self._problem
        if self._problem is not None or (ask and self.absent != self._now):
            return tuple([torch.full_like(p, float("nan")) for p in params] for params in groups)
        pairs = zip(groups, found, strict=True)
        return tuple(
            [torch.zeros_like(p) if g is None else g for p, g in zip(params, grads, strict=True)]
            for params, grads in pairs
        )

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
        all_have, found_elsewhere = _told(self._problem, axes, device)
        if self._problem is not None and all_have:
            raise self._problem
        if found_elsewhere is not None:
            raise found_elsewhere
        found = {
            f"the gradient of param group {g}, parameter {name}": "absent" if (g, i) in self._now else "present"
            for g, group in enumerate(names)
            for i, name in enumerate(group)
        }
        differs: RanksDisagree | None = None
        for axis in axes:
            try:
                check_agreement(axis, found, device)
            except RanksDisagree as error:  # not raised here, where others may wait on the next axis
                differs = differs or error
        _, found_elsewhere = _told(differs, axes if len(axes) > 1 else (), device)
        if differs is not None:
            raise differs
        if found_elsewhere is not None:
            raise found_elsewhere
        changed = self.absent != self._now
        self.absent = self._now
        return changed


def _told(
    problem: Exception | None, axes: Sequence[str], device: torch.device
) -> tuple[bool, RanksDisagree | None]:
    """Tell the ranks of all axes of a problem; return whether all have one, and an error with the first one's text."""
    all_have, rank, text = problem is not None, -1, ""
    if problem is not None and axes:
        here = ", ".join(f"rank {int(axis_index(axis))} of axis {axis!r}" for axis in axes)
        rank, text = int(axis_index(axes[0])), f"{here}: {type(problem).__name__}: {problem}"
    for axis in axes:
        each = gather_values((all_have, rank, text), axis, device)
        all_have = all(found for found, _, _ in each)
        rank, text = next(((r, t) for _, r, t in each if t), (-1, ""))
    if not text:
        return all_have, None
    message = f"this step cannot be taken on {text}; nothing has moved"
    return all_have, RanksDisagree(message, rank=rank, field="this step")


def _absent(found: Sequence[Sequence[Tensor | None]]) -> frozenset[Place]:
    return frozenset([(g, i) for g, grads in enumerate(found) for i, grad in enumerate(grads) if grad is None])


def _refused(groups: Sequence[Sequence[Tensor]], found: Sequence[Sequence[Tensor | None]]) -> TypeError | None:
    for g, (params, grads) in enumerate(zip(groups, found, strict=True)):
        there = [p if grad is None else grad for p, grad in zip(params, grads, strict=True)]
        try:
            tree.check_real(there, f"gradients of param group {g}")
        except TypeError as error:
            return error
    return None


def unscaled(grads: Grads, scale: Tensor | float | None, found_inf: Tensor | None) -> Grads:
    """Divide gradients by the scale of the loss; make them NaN where an Inf was found.

    Args:
        grads: per param group.
        scale: of the loss; None if the gradients are unscaled already.
        found_inf: more than 0 if the scaler found an Inf or a NaN on this rank; None if it did not look.
    Returns: the gradients, half precision widened to float32 where a scale is taken out, or as they are.
    """
    if scale is None and (found_inf is None or not float(found_inf)):
        return grads
    device = next((g.device for group in grads for g in group), torch.device("cpu"))
    factor = torch.as_tensor(1.0 if scale is None else scale, dtype=torch.float64, device=device).reciprocal()
    if found_inf is not None:
        factor = torch.where(found_inf.to(device).reshape(()) > 0, float("nan"), factor.reshape(()))
    factor = factor.float()
    return tuple([(g.float() if g.element_size() < 4 else g) * factor.to(g.device) for g in group] for group in grads)
