"""The row "torch" of accelerators: LAMB's kernels and 0/1 Adam's drift, by functions of lists.

The references take a dozen launches for each tensor, which is most of the time of a step of many small ones. Here a
function takes all tensors of a chunk, whole ones, for a tensor has sums of its own. Why formulas of `rules` stand here,
too, says `foreach`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fn.kernels import rules
from fn.kernels.reference.layout import paired_views, plain, widths_of
from fn.kernels.tracing import cached_plan

CHUNK = 1 << 25
"""Elements from which a chunk is closed."""

Tensors: TypeAlias = "list[Tensor] | tuple[Tensor, ...]"


def lamb_moments_(
    params: Sequence[Tensor], grads: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], b1: float,
    b2: float, eps: float, weight_decay: float,
) -> Any:  # fmt: skip
    """See `reference.lamb_moments_`."""
    if not _fit(params, grads, mu, nu):
        return NotImplemented
    sums = []
    for p, g, m, v in _chunks(params, grads, mu, nu):
        torch._foreach_lerp_(m, g, 1 - b1)
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, g, g, 1 - b2)
        u = torch._foreach_div(m, _roots(v, eps))
        _add_decay(u, p, weight_decay)
        sums.append(torch.stack([_squares(p), _squares(u), _squares(m)], 1))
    return torch.cat(sums)


def onebit_lamb_moments_(
    params: Sequence[Tensor], averages: Sequence[Tensor], scaling: Tensor, mu: Sequence[Tensor], nu: Sequence[Tensor],
    fresh: Sequence[Tensor], b1: float, b2: float, eps: float, weight_decay: float, max_step: float,
    keep_zeros: bool,
) -> Any:  # fmt: skip
    """See `reference.onebit_lamb_moments_`."""
    if not _fit(params, averages, mu, nu, fresh):
        return NotImplemented
    sums, done = [], 0
    for p, x, m, v, f in _chunks(params, averages, mu, nu, fresh):
        x = [*torch._foreach_div(x, _each(scaling[done : done + len(x)], x))]
        done += len(x)
        if keep_zeros:
            clear_by_signs(x, v)
        g = torch._foreach_sub(x, torch._foreach_mul(m, b1))  # one function for both would round once, as nobody else
        torch._foreach_div_(g, 1 - b1)
        torch._foreach_copy_(m, x)
        torch._foreach_mul_(f, b2)
        torch._foreach_addcmul_(f, g, g, 1 - b2)
        roots = _roots(v, eps)
        largest = torch._foreach_norm(torch._foreach_div(roots, _roots(f, eps)), float("inf"))
        u = clamped(torch._foreach_div(m, roots), max_step)
        undecayed = _squares(u)
        _add_decay(u, p, weight_decay)
        sums.append(torch.stack([torch.stack(largest).double(), undecayed, _squares(u)], 1))
    return torch.cat(sums)


def lamb_step_(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], rates: Tensor, eps: float,
    weight_decay: float, max_step: float,
) -> Any:  # fmt: skip
    """See `reference.lamb_step_`."""
    if not _fit(params, mu, nu):
        return NotImplemented
    done = 0
    for p, m, v in _chunks(params, mu, nu):
        u = clamped(torch._foreach_div(m, _roots(v, eps)), max_step)
        _add_decay(u, p, weight_decay)
        torch._foreach_mul_(u, _each(rates[done : done + len(p)], p))
        torch._foreach_sub_(p, u)
        done += len(p)
    return None


def drift(
    params: Sequence[Tensor], anchors: Sequence[Tensor], mu: Sequence[Tensor], grads: Sequence[Tensor],
    nu: Sequence[Tensor], decay: float, eps: float, lr: float, rows: int, runs: Sequence[int],
) -> Any:  # fmt: skip
    """See `reference.drift`. Gradients may not be finite yet, so that zeros are selected, not multiplied."""
    if not _fit(params, anchors, mu, grads, nu):
        return NotImplemented
    found: list[Tensor] = []
    for lists in _chunks(params, anchors, mu, grads, nu):
        p, a, m, g, v = map(torch.cat, lists)
        m = rules.kept_at_zero(rules.lerp(g, m, decay), v, 0.0, 0.0)
        found.extend(rules.drift(p, a, m, v, eps, lr).split([t.numel() for t in lists[0]]))
    widths = widths_of(runs)
    out = found[0].new_zeros((rows, sum(widths)))
    flats, places = paired_views(found, out, widths)
    torch._foreach_copy_(places, flats)
    return out


def clamped(u: Tensors, max_step: float) -> Tensors:
    """Return `rules.clamped` of each tensor, in place; NaN where a direction is not finite."""
    if max_step == math.inf:
        return u
    lost = torch._foreach_sub(u, u)
    torch._foreach_clamp_min_(u, -max_step)
    torch._foreach_clamp_max_(u, max_step)
    torch._foreach_add_(u, lost)
    return u


def clear_by_signs(m: list[Tensor], v: list[Tensor]) -> None:
    """Write zeros into m where v is zero, in two launches; a zero has the sign of what was there.

    Args: m: finite. v: neither NaN nor below zero.
    """
    torch._foreach_mul_(m, torch._foreach_sign(v))


def _fit(*lists: Sequence[Tensor]) -> bool:
    """Return whether there are tensors, contiguous float32, none without elements, of which no norm is the largest."""
    return bool(lists[0]) and plain(*lists) and all(t.numel() for t in lists[0])


def _chunks(*lists: Sequence[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Return flat views of whole tensors, as many at a time as hold a chunk together."""
    first, count = 0, 0
    for i, t in enumerate(lists[0], 1):
        count += t.numel()
        if count >= CHUNK or i == len(lists[0]):
            yield [[x.view(-1) for x in each[first:i]] for each in lists]
            first, count = i, 0


def _roots(v: list[Tensor], eps: float) -> list[Tensor]:
    found = [*torch._foreach_sqrt(v)]
    torch._foreach_add_(found, eps)
    return found


def _add_decay(u: Tensors, p: list[Tensor], weight_decay: float) -> None:
    if weight_decay:
        torch._foreach_add_(u, p, alpha=weight_decay)


def _squares(tensors: Tensors) -> Tensor:
    """Return the sums of squares, (S,) float64."""
    return torch.stack(torch._foreach_norm(tensors, 2, torch.float64)).square()


def _each(numbers: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each tensor's number as often as it has elements."""
    sizes = tuple(t.numel() for t in tensors)
    wide = numbers.to(tensors[0].dtype).repeat_interleave(_counts(sizes, numbers.device), output_size=sum(sizes))
    return [*wide.split(sizes)]


@cached_plan
def _counts(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int64, device=device)


KERNELS = {f.__name__: f for f in (lamb_moments_, onebit_lamb_moments_, lamb_step_, drift)}
