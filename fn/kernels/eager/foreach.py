"""The row "torch": whole optimizer steps by torch's functions of lists, for any device, where nothing faster is.

On an accelerator a function of a list is one launch, or a few. The tensors are taken in chunks, so that temporaries
stay small whatever the size of the model, and on a CPU stay in the cache.

Formulas of `rules` stand here a second time, in place: a product and a sum are one function of lists, and no operator.
With operators for lists, in place wherever that can be, `rules.adamw` took 1.2 to 1.4 times as long.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fn.kernels import memory_pool, ops
from fn.kernels.eager import foreach_lamb
from fn.kernels.eager.foreach_lamb import clear_by_signs
from fn.kernels.reference.adam import drift
from fn.kernels.reference.lamb import lamb_moments_, lamb_step_, onebit_lamb_moments_
from fn.kernels.reference.layout import clear_padding, paired_views, plain, widths_of
from fn.kernels.table import Accelerator
from fn.kernels.tracing import cached_plan

CHUNK = 1 << 25
"""Elements that are taken together on an accelerator: 128 MiB a temporary list, so that a step has few chunks."""

CHUNK_OF_CPU = 1 << 15
"""And on a CPU, whose second-level cache holds a chunk of every list."""

FUSED = ("cpu", "cuda", "xpu")
"""Devices for which torch has AdamW's step in one pass."""

ENDLESS = 1e12
"""Steps after which 1 - b**t is 1 for all b in [0, 1)."""


def chunks(*lists: Sequence[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Cut lists of contiguous tensors, alike in shapes, into lists of flat pieces that hold a chunk together."""
    size = CHUNK_OF_CPU if lists[0] and lists[0][0].device.type == "cpu" else CHUNK
    found: list[list[Tensor]] = [[] for _ in lists]
    count = 0
    for tensors in (t for t in zip(*lists, strict=True) if t[0].numel()):
        for pieces in zip(*(t.view(-1).split(size) for t in tensors), strict=True):
            for part, piece in zip(found, pieces, strict=True):
                part.append(piece)
            count += pieces[0].numel()
            if count >= size:
                yield found
                found, count = [[] for _ in lists], 0
    if count:
        yield found


def momentum_rows(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, factors: Tensor | None, rows: int, runs: Sequence[int]
) -> Any:
    """See `reference.momentum_rows`. Without temporaries, in memory of the pool."""
    if not plain(mu, grads, () if factors is None else (factors,)) or not mu:
        return NotImplemented
    widths = widths_of(runs)
    out = memory_pool.empty((rows, sum(widths)), mu[0].dtype, mu[0].device)
    clear_padding(out, [*map(Tensor.numel, mu)], widths)
    averages, start = [], 0
    for i, (m, g, width) in enumerate(zip(mu, grads, widths, strict=True)):
        here = out[:, start : start + width]
        (moments, places), (fresh, _) = (paired_views([t.view(-1)], here, [width]) for t in (m, g))
        for x, new, place in zip(moments, fresh, places, strict=True):
            torch.lerp(new, x, decay, out=place)
            averages.append((place, i))
        start += width
    if factors is not None:
        for place, i in averages:
            place.mul_(factors[i])
    return out


def momentum_encode(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, sent: Tensor, valid: Tensor,
    runs: Sequence[int],
) -> Any:  # fmt: skip
    """See `reference.momentum_encode`. The device's own `sign_encode_feedback_` encodes."""
    if not plain(mu, grads, (buffer, sent)):
        return NotImplemented
    x, widths = memory_pool.empty(buffer.shape, buffer.dtype, buffer.device).zero_(), widths_of(runs)
    fresh, places = paired_views([g.view(-1) for g in grads], x, widths)
    moments, _ = paired_views([m.view(-1) for m in mu], x, widths)
    if places:
        torch._foreach_copy_(places, fresh)
        torch._foreach_lerp_(places, moments, decay)
    return (x, *ops.direct("sign_encode_feedback_", x, buffer, sent, valid, runs))


def onebit_adam_(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], bits: Tensor, scales: Tensor, valid: Tensor,
    runs: Sequence[int], eps: float, weight_decay: float, lr: float, mu_weight: float, nu_weight: float,
    max_step: float, max_momentum: float, keep_zeros: bool, copies: Sequence[Tensor],
) -> Any:  # fmt: skip
    """See `reference.onebit_adam_`. The device's own `sign_decode_mean` decodes."""
    if not plain(params, mu, nu, (scales,), copies):
        return NotImplemented
    _decode_into(mu, bits, scales, valid, runs)
    for p, m, v in chunks(params, mu, nu):
        if keep_zeros:
            _clear(m, v)
        _hold(m, v, eps, max_momentum)
        _descend(p, m, v, eps, weight_decay, lr, mu_weight, nu_weight, max_step)
    if copies:
        torch._foreach_copy_([*copies], [*params])
    return None


def adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], b1: float,
    b2: float, eps: float, weight_decay: float, lr: float, mu_weight: float, nu_weight: float, max_step: float,
    max_momentum: float, frozen: bool,
) -> Any:  # fmt: skip
    """See `reference.adamw_`."""
    if not plain(params, grads, mu, nu):
        return NotImplemented
    if not frozen and max_step == math.inf and params and params[0].device.type in FUSED:
        return _fused_adamw_(params, grads, mu, nu, b1, b2, eps, weight_decay, lr, mu_weight, nu_weight)
    for p, g, m, v in chunks(params, grads, mu, nu):
        torch._foreach_lerp_(m, g, 1 - b1)
        if frozen:
            _clear(m, v)
            _hold(m, v, eps, max_momentum)
        else:
            torch._foreach_mul_(v, b2)
            torch._foreach_addcmul_(v, g, g, 1 - b2)
        _descend(p, m, v, eps, weight_decay, lr, mu_weight, nu_weight, max_step)
    return None


def _fused_adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], b1: float,
    b2: float, eps: float, weight_decay: float, lr: float, mu_weight: float, nu_weight: float,
) -> None:  # fmt: skip
    """Take AdamW's step in one pass.

    Torch divides moments by weights of its own, from a count of steps; so many that these are 1, and ours multiply
    the numbers they would divide.
    """
    root = nu_weight**0.5
    steps = [_endless(params[0].device)] * len(params)
    torch._fused_adamw_(
        list(params), list(grads), list(mu), list(nu), [], steps,
        lr=lr * root / mu_weight, beta1=b1, beta2=b2, weight_decay=weight_decay * mu_weight / root, eps=eps * root,
        amsgrad=False, maximize=False,
    )  # fmt: skip


def largest_magnitude(grads: Sequence[Tensor]) -> Any:
    """See `reference.largest_magnitude`."""
    found = [g for g in grads if g.numel()]
    if not found or not plain(grads):
        return NotImplemented
    return torch.stack(torch._foreach_norm(found, float("inf"))).amax()


@cached_plan
def _endless(device: torch.device) -> Tensor:
    return torch.tensor(ENDLESS, dtype=torch.float32, device=device)


def _decode_into(mu: Sequence[Tensor], bits: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int]) -> None:
    found = ops.direct("sign_decode_mean", bits, scales, valid, runs)
    flats, rows = paired_views([m.view(-1) for m in mu], found, widths_of(runs))
    if flats:
        torch._foreach_copy_(flats, rows)


def _clear(m: list[Tensor], v: list[Tensor]) -> None:
    """Write zeros into m where v is zero; m is finite, and v neither NaN nor below zero."""
    if m[0].device.type != "cpu":  # a mask would be three launches for each tensor
        clear_by_signs(m, v)
        return
    for moved, rests in zip(m, v, strict=True):
        moved.masked_fill_(~(rests > 0), 0.0)


def _hold(m: list[Tensor], v: list[Tensor], eps: float, max_step: float) -> None:
    """Clamp a momentum, in place, so that its direction is within +-max_step; NaN where it is not finite."""
    if max_step == math.inf:
        return
    lost, most = torch._foreach_sub(m, m), torch._foreach_sqrt(v)
    torch._foreach_add_(most, eps)
    torch._foreach_mul_(most, max_step)
    torch._foreach_clamp_max_(m, most)
    torch._foreach_clamp_min_(m, torch._foreach_neg(most))
    torch._foreach_add_(m, lost)


def _descend(
    p: list[Tensor], m: list[Tensor], v: list[Tensor], eps: float, weight_decay: float, lr: float, mu_weight: float,
    nu_weight: float, max_step: float,
) -> None:  # fmt: skip
    below = torch._foreach_sqrt(v)
    if nu_weight != 1:
        torch._foreach_div_(below, nu_weight**0.5)
    torch._foreach_add_(below, eps)
    torch._foreach_mul_(below, mu_weight)
    u = foreach_lamb.clamped(torch._foreach_div(m, below), max_step)
    if weight_decay:
        torch._foreach_add_(u, p, alpha=weight_decay)
    torch._foreach_add_(p, u, alpha=-lr)


AS_THEY_ARE = (drift, lamb_moments_, onebit_lamb_moments_, lamb_step_)
"""References that are good enough for a CPU: their temporaries are those of one tensor, and without these LAMB's and
0/1 Adam's steps would be the pure ones."""


def row(device_type: str) -> Accelerator:
    """Return the row."""
    found = (momentum_encode, momentum_rows, onebit_adam_, adamw_, *AS_THEY_ARE)
    kernels: dict[str, Any] = {f.__name__: f for f in found}
    if device_type != "cpu":
        kernels |= {"largest_magnitude": largest_magnitude, **foreach_lamb.KERNELS}
    return Accelerator(device_type, kernels, provider="torch")
