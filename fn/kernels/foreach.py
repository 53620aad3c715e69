"""The row "torch": whole optimizer steps by torch's functions of lists, for any device, where nothing faster is.

On an accelerator a function of a list is one launch, or a few; the references take a dozen for each tensor, which is
most of the time of a step of many small ones. The tensors are taken in chunks, so that temporaries stay small whatever
the size of the model, and on a CPU stay in the cache.

The arithmetic is `rules`, where a list stands in place of a number (`Many`). Written by hand, in place and with a
product and a sum in one function, a step is faster; but it was a second home of every formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from fn.kernels import memory_pool, reference, rules
from fn.kernels.layout import clear_padding, paired_views, plain, widths_of
from fn.kernels.table import Accelerator, direct
from fn.kernels.tracing import cached_plan

CHUNK = 1 << 25
"""Elements that are taken together on an accelerator: 128 MiB a temporary list, so that a step has few chunks."""

CHUNK_OF_CPU = 1 << 16
"""Elements that are taken together on a CPU: its second-level cache holds a chunk of every list."""

FUSED = ("cpu", "cuda", "xpu")
"""Devices for which torch has AdamW's step in one pass."""

ENDLESS = 1e12
"""A number of steps t at which 1 - b**t is 1 for all b in [0, 1)."""


def chunks(*lists: Sequence[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Cut lists of contiguous tensors, alike in sizes, into lists of flat pieces that hold a chunk together."""
    size = CHUNK_OF_CPU if lists[0] and lists[0][0].device.type == "cpu" else CHUNK
    chunk: list[list[Tensor]] = [[] for _ in lists]
    count = 0
    for tensors in (t for t in zip(*lists, strict=True) if t[0].numel()):
        # (...) -> (numel,) -> pieces, in the same places of all lists
        for pieces in zip(*(t.view(-1).split(size) for t in tensors), strict=True):
            for role, piece in zip(chunk, pieces, strict=True):
                role.append(piece)
            count += pieces[0].numel()
            if count >= size:
                yield chunk
                chunk, count = [[] for _ in lists], 0
    if count:
        yield chunk


# codes


def momentum_rows(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, factors: Tensor | None, rows: int, runs: Sequence[int]
) -> Any:
    """See `reference.steps.momentum_rows`. Without temporaries, in memory of the pool."""
    if not plain(mu, grads, () if factors is None else (factors,)) or not mu:
        return NotImplemented
    widths = widths_of(runs)
    out = memory_pool.empty((rows, sum(widths)), mu[0].dtype, mu[0].device)
    # Memory of the pool holds old numbers, and nobody writes into padding below.
    clear_padding(out, [*map(Tensor.numel, mu)], widths)
    for i, (m, g, columns) in enumerate(zip(mu, grads, out.split(widths, 1), strict=True)):
        (moments, places), (fresh, _) = (paired_views([t.view(-1)], columns, [columns.shape[1]]) for t in (m, g))
        for x, new, place in zip(moments, fresh, places, strict=True):
            torch.lerp(new, x, decay, out=place)
            if factors is not None:
                place.mul_(factors[i])
    return out


def momentum_encode(
    mu: Sequence[Tensor], grads: Sequence[Tensor], decay: float, buffer: Tensor, sent: Tensor, valid: Tensor,
    runs: Sequence[int], block: int,
) -> Any:  # fmt: skip
    """See `reference.steps.momentum_encode`. The device's own `sign_encode_feedback_` encodes."""
    if not plain(mu, grads, (buffer, sent)):
        return NotImplemented
    x, widths = memory_pool.empty(buffer.shape, buffer.dtype, buffer.device).zero_(), widths_of(runs)
    fresh, places = paired_views([g.view(-1) for g in grads], x, widths)
    moments, _ = paired_views([m.view(-1) for m in mu], x, widths)
    if places:
        torch._foreach_copy_(places, fresh)
        torch._foreach_lerp_(places, moments, decay)
    return (x, *direct("sign_encode_feedback_", x, buffer, sent, valid, runs, block))


def quantize_feedback(
    x: Tensor, error: Tensor, error_scales: Tensor, beta: float, valid: Tensor, runs: Sequence[int], width: int
) -> Any:
    """See `reference.codes.quantize_feedback`, for half precision above all, which fused kernels leave to this row.

    The device's own `quantize` and `dequantize_mean` do most of it. What the reference rounds to the dtype of x on the
    way is rounded here by copies into memory of the pool: fresh memory would take longer than the arithmetic.
    """

    def rounded(wide: Tensor) -> Tensor:
        return memory_pool.empty(x.shape, x.dtype, x.device).copy_(wide)

    # (R, ...) -> (R, 1, ...): a mean of one message
    wide = direct("dequantize_mean", error[:, None], error_scales[:, None], valid, runs, 8)
    e = rounded(wide)
    h = torch.add(x, e, out=memory_pool.empty(x.shape, x.dtype, x.device))
    codes, scales = direct("quantize", h, valid, runs, width)
    lost = direct("dequantize_mean", codes[:, None], scales[:, None], valid, runs, width)
    # In place on what was decoded: h - D(q), of which D(q) is rounded first, as the reference rounds it.
    lost.copy_(rounded(lost)).neg_().add_(h)
    kept = wide.copy_(e).mul_(beta).add_(lost.mul_(1.0 - beta))
    return (codes, scales, *direct("quantize", rounded(kept), valid, runs, 8))


# Adam and 1-bit Adam


def onebit_adam_(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], bits: Tensor, scales: Tensor, valid: Tensor,
    runs: Sequence[int], block: int, eps: float, weight_decay: float, lr: float, max_step: float, keep_zeros: bool,
    copies: Sequence[Tensor],
) -> Any:  # fmt: skip
    """See `reference.steps.onebit_adam_`. The device's own `sign_decode_mean` decodes."""
    if not plain(params, mu, nu, (scales,), copies):
        return NotImplemented
    mean = direct("sign_decode_mean", bits, scales, valid, runs, block)
    flats, pieces = paired_views([m.view(-1) for m in mu], mean, widths_of(runs))
    if flats:
        torch._foreach_copy_(flats, pieces)
    descent = eps, weight_decay, lr, max_step
    for p_chunk, m_chunk, v_chunk in chunks(params, mu, nu):
        p, m, v = map(Many, (p_chunk, m_chunk, v_chunk))
        if keep_zeros:
            m = ON_LISTS["kept_at_zero"](m, v, 0.0, 0.0)
            torch._foreach_copy_(m_chunk, m.tensors)
        torch._foreach_copy_(p_chunk, ON_LISTS["adamw"](p, m, v, *descent).tensors)
    if copies:
        torch._foreach_copy_([*copies], [*params])
    return None


def adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], b1: float,
    b2: float, eps: float, weight_decay: float, lr: float, max_step: float, frozen: bool,
) -> Any:  # fmt: skip
    """See `reference.steps.adamw_`."""
    if not plain(params, grads, mu, nu):
        return NotImplemented
    if not frozen and max_step == math.inf and params and params[0].device.type in FUSED:
        return _fused_adamw_(params, grads, mu, nu, b1, b2, eps, weight_decay, lr)
    descent = eps, weight_decay, lr, max_step
    for p_chunk, g_chunk, m_chunk, v_chunk in chunks(params, grads, mu, nu):
        p, g, m, v = map(Many, (p_chunk, g_chunk, m_chunk, v_chunk))
        m = ON_LISTS["lerp"](g, m, b1)
        if frozen:
            m = ON_LISTS["kept_at_zero"](m, v, 0.0, 0.0)
        else:
            v = ON_LISTS["second_moment"](v, g, b2, 1 - b2)
            torch._foreach_copy_(v_chunk, v.tensors)
        torch._foreach_copy_(m_chunk, m.tensors)
        torch._foreach_copy_(p_chunk, ON_LISTS["adamw"](p, m, v, *descent).tensors)
    return None


def _fused_adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], b1: float,
    b2: float, eps: float, weight_decay: float, lr: float,
) -> None:  # fmt: skip
    """Take AdamW's step in one pass.

    Torch divides moments by weights of its own, from a count of steps. The count here is so large that these are 1. On
    CUDA a second moment that overflows is NaN, and not Inf, as in torch's own step.
    """
    steps = [_endless(params[0].device)] * len(params)
    torch._fused_adamw_(
        list(params), list(grads), list(mu), list(nu), [], steps,
        lr=lr, beta1=b1, beta2=b2, weight_decay=weight_decay, eps=eps, amsgrad=False, maximize=False,
    )  # fmt: skip


@cached_plan
def _endless(device: torch.device) -> Tensor:
    return torch.tensor(ENDLESS, dtype=torch.float32, device=device)


def largest_magnitude(grads: Sequence[Tensor]) -> Any:
    """See `reference.lists.largest_magnitude`."""
    some = [g for g in grads if g.numel()]
    if not some or not plain(grads):
        return NotImplemented
    return torch.stack(torch._foreach_norm(some, float("inf"))).amax()


# any rule


def _method(function: Callable[..., Any]) -> Any:
    """Return a function of torch as a method."""
    return lambda *args: function(*args)


class Many:
    """A list of tensors as a number of a rule: what a rule does with it is a function of torch's for lists."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [*tensors]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Many:
        # A function of lists takes a list first. Others, and tensors in odd places, go tensor by tensor.
        on_lists = LISTED.get(func) if isinstance(args[0], Many) else None
        if on_lists is not None and (func in WITH_TENSORS or not any(isinstance(x, Tensor) for x in args)):
            return cls(on_lists(*(x.tensors if isinstance(x, Many) else x for x in args), **(kwargs or {})))
        size = max(len(x.tensors) for x in args if isinstance(x, Many))
        columns = [x.tensors if isinstance(x, Many) else [x] * size for x in args]
        return cls([func(*row, **(kwargs or {})) for row in zip(*columns, strict=True)])

    __add__ = __radd__ = _method(torch.add)
    __sub__ = _method(torch.sub)
    __mul__ = __rmul__ = _method(torch.mul)
    __truediv__ = _method(torch.div)
    __neg__ = _method(torch.neg)
    __gt__, __ge__ = _method(torch.gt), _method(torch.ge)
    __lt__, __eq__ = _method(torch.lt), _method(torch.eq)
    sqrt = _method(torch.sqrt)


LISTED: dict[Any, Callable[..., Any]] = {
    torch.add: torch._foreach_add, torch.sub: torch._foreach_sub, torch.mul: torch._foreach_mul,
    torch.div: torch._foreach_div, torch.neg: torch._foreach_neg, torch.sqrt: torch._foreach_sqrt,
    torch.sign: torch._foreach_sign, torch.lerp: lambda start, end, weight: _lerp(start, end, weight),
}  # fmt: skip
"""torch's functions of lists, by those of a tensor; all others are called tensor by tensor."""

WITH_TENSORS = (torch.mul, torch.div, torch.lerp)
"""Those that take a 0-d tensor in place of a list."""


def _lerp(start: list[Tensor], end: list[Tensor], weight: float | Tensor) -> Any:
    """Return `torch.lerp` of lists; a weight on a device is one number for all, which lists take as one a tensor."""
    if isinstance(weight, Tensor):
        of_dtype = {dtype: weight.to(dtype) for dtype in {x.dtype for x in start}}  # a launch for each dtype only
        return torch._foreach_lerp(start, end, [of_dtype[x.dtype].expand_as(x) for x in start])
    return torch._foreach_lerp(start, end, weight)


def kept_at_zero(m: Many, v: Many, instead: float, zero: float) -> Many:
    """Return `rules.kept_at_zero` of an m that is finite, and a v that is neither NaN nor below zero.

    A zero has the sign of what was there. On a device a mask would be three launches for each tensor.
    """
    if m.tensors[0].device.type == "cpu":
        kept: Many = rules.kept_at_zero(m, v, instead, zero)
        return kept
    # v is not below zero, so its sign is 1, or 0 where it is zero.
    product: Many = m * torch.sign(v)  # type: ignore[arg-type]
    return product


def clamped(u: Many, limit: float) -> Many:
    """Return `rules.clamped`, in two launches for a list."""
    if limit == math.inf:
        return u
    return Many(torch._foreach_clamp_min(torch._foreach_clamp_max(u.tensors, limit), -limit))


def decayed(u: Many, p: Many, decay: float) -> Many:
    """Return `rules.decayed`; without a decay nothing is to be added."""
    return u + decay * p if decay else u


# As for Triton, a rule is copied with other globals: in them are three rules that a list does in fewer launches.
ON_LISTS: dict[str, Any] = {**vars(rules), **{word.__name__: word for word in (kept_at_zero, clamped, decayed)}}
for _name, _rule in vars(rules).items():
    if getattr(_rule, "__module__", "") == rules.__name__ and ON_LISTS[_name] is _rule:
        ON_LISTS[_name] = FunctionType(_rule.__code__, ON_LISTS, _name)


def elementwise_(
    rule: str, results: Sequence[Tensor], operands: Sequence[Tensor], scalars: Sequence[Tensor], places: Sequence[int],
    numbers: Sequence[float],
) -> Any:  # fmt: skip
    """See `reference.lists.elementwise_`."""
    count = reference.lists.RESULTS[rule]
    size = len(results) // count
    if not size or not _fit(results, operands):
        return NotImplemented
    columns = [operands[first : first + size] for first in range(0, len(operands), size)]
    given: list[Any] = [*numbers]
    for place, scalar in zip(places, scalars, strict=True):
        # (S,) -> a 0-d tensor for each tensor
        given[place] = Many(scalar.unbind()) if scalar.numel() > 1 else scalar.reshape(())
    found = reference.lists.rule_of(rule)(*map(Many, columns), *given)
    flat = [x for many in (found if count > 1 else (found,)) for x in many.tensors]
    torch._foreach_copy_([*results], flat)
    return None


def sums_of_squares(tensors: Sequence[Tensor]) -> Any:
    """See `reference.lists.sums_of_squares`."""
    if not _fit(tensors):
        return NotImplemented
    # In float64: squares of float32 norms overflow from 1.8e19 on.
    return torch.stack(torch._foreach_norm([*tensors], 2, torch.float64)).square()


def _fit(*lists: Sequence[Tensor]) -> bool:
    """Return whether there are tensors, all contiguous float32 with elements: no elements have no largest norm."""
    return bool(lists[0]) and plain(*lists) and all(t.numel() for t in lists[0])


EVERYWHERE = (momentum_rows, momentum_encode, quantize_feedback, onebit_adam_, adamw_)
ON_ACCELERATORS = (elementwise_, sums_of_squares, largest_magnitude)


def row(device_type: str) -> Accelerator:
    """Return the row."""
    kernels = EVERYWHERE if device_type == "cpu" else (*EVERYWHERE, *ON_ACCELERATORS)
    return Accelerator(device_type, {f.__name__: f for f in kernels}, provider="torch")
