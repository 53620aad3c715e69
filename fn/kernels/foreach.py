"""The row "torch": whole optimizer steps by torch's functions of lists, for any device, where nothing faster is.

On an accelerator a function of a list is one launch, or a few; the references take a dozen for each tensor, which is
most of the time of a step of many small ones. The tensors are taken in chunks, so that temporaries stay small whatever
the size of the model, and on a CPU stay in the cache.

Formulas of `rules` stand here a second time, in place: a product and a sum are one function of lists, and no operator.
With operators for lists, in place wherever that can be, `rules.adamw` took 1.2 to 1.4 times as long.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fn.kernels import memory_pool, ops, reference, rules
from fn.kernels.layout import clear_padding, paired_views, plain, widths_of
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

Tensors: TypeAlias = "list[Tensor] | tuple[Tensor, ...]"


def chunks(*lists: Sequence[Tensor], whole: bool = False) -> Iterator[list[list[Tensor]]]:
    """Cut lists of contiguous tensors, alike in sizes, into lists of flat pieces that hold a chunk together.

    Args: whole: tensors are not cut, for kernels that need sums over a tensor; chunks are then those of accelerators.
    """
    size = CHUNK_OF_CPU if not whole and lists[0] and lists[0][0].device.type == "cpu" else CHUNK
    chunk: list[list[Tensor]] = [[] for _ in lists]
    count = 0
    for tensors in (t for t in zip(*lists, strict=True) if t[0].numel()):
        for pieces in zip(*(t.view(-1).split(t.numel() if whole else size) for t in tensors), strict=True):
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
    runs: Sequence[int],
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
    return (x, *ops.direct("sign_encode_feedback_", x, buffer, sent, valid, runs))


def quantize_feedback(
    x: Tensor, error: Tensor, error_scales: Tensor, beta: float, valid: Tensor, runs: Sequence[int], width: int
) -> Any:
    """See `reference.codes.quantize_feedback`, for half precision above all, which fused kernels leave to this row.

    The device's own `quantize` and `dequantize` do most of it. What the reference rounds to the dtype of x on the way
    is rounded here by copies into memory of the pool: fresh memory would take longer than the arithmetic.
    """

    def rounded(wide: Tensor) -> Tensor:
        return memory_pool.empty(x.shape, x.dtype, x.device).copy_(wide)

    wide = ops.direct("dequantize", error, error_scales, valid, runs, 8)
    e = rounded(wide)
    h = torch.add(x, e, out=memory_pool.empty(x.shape, x.dtype, x.device))
    codes, scales = ops.direct("quantize", h, valid, runs, width)
    lost = ops.direct("dequantize", codes, scales, valid, runs, width)
    lost.copy_(rounded(lost)).neg_().add_(h)
    kept = wide.copy_(e).mul_(beta).add_(lost.mul_(1.0 - beta))
    return (codes, scales, *ops.direct("quantize", rounded(kept), valid, runs, 8))


def drift(
    params: Sequence[Tensor], anchors: Sequence[Tensor], mu: Sequence[Tensor], grads: Sequence[Tensor],
    nu: Sequence[Tensor], decay: float, eps: float, lr: float, rows: int, runs: Sequence[int],
) -> Any:  # fmt: skip
    """See `reference.steps.drift`. Gradients may not be finite yet, so that zeros are selected, not multiplied."""
    if not _fit(params, anchors, mu, grads, nu):
        return NotImplemented
    drifts: list[Tensor] = []
    for chunk in chunks(params, anchors, mu, grads, nu, whole=True):
        p, a, m, g, v = map(torch.cat, chunk)
        m = rules.kept_at_zero(rules.lerp(g, m, decay), v, 0.0, 0.0)
        drifts.extend(rules.drift(p, a, m, v, eps, lr).split([t.numel() for t in chunk[0]]))
    widths = widths_of(runs)
    out = drifts[0].new_zeros((rows, sum(widths)))
    flats, places = paired_views(drifts, out, widths)
    torch._foreach_copy_(places, flats)
    return out


# Adam and 1-bit Adam


def onebit_adam_(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], bits: Tensor, scales: Tensor, valid: Tensor,
    runs: Sequence[int], eps: float, weight_decay: float, lr: float, mu_weight: float, nu_weight: float,
    max_step: float, max_momentum: float, keep_zeros: bool, copies: Sequence[Tensor],
) -> Any:  # fmt: skip
    """See `reference.steps.onebit_adam_`. The device's own `sign_decode_mean` decodes."""
    if not plain(params, mu, nu, (scales,), copies):
        return NotImplemented
    mean = ops.direct("sign_decode_mean", bits, scales, valid, runs)
    flats, pieces = paired_views([m.view(-1) for m in mu], mean, widths_of(runs))
    if flats:
        torch._foreach_copy_(flats, pieces)
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
    """See `reference.steps.adamw_`."""
    if not plain(params, grads, mu, nu):
        return NotImplemented
    if not frozen and max_step == math.inf and params and params[0].device.type in FUSED:
        return _fused_adamw_(params, grads, mu, nu, b1, b2, eps, weight_decay, lr, mu_weight, nu_weight)
    for p, g, m, v in chunks(params, grads, mu, nu):
        if frozen:
            torch._foreach_lerp_(m, g, 1 - b1)
            _clear(m, v)
            _hold(m, v, eps, max_momentum)
        else:
            _move_moments(g, m, v, b1, b2)
        _descend(p, m, v, eps, weight_decay, lr, mu_weight, nu_weight, max_step)
    return None


def _fused_adamw_(
    params: Sequence[Tensor], grads: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], b1: float,
    b2: float, eps: float, weight_decay: float, lr: float, mu_weight: float, nu_weight: float,
) -> None:  # fmt: skip
    """Take AdamW's step in one pass.

    Torch divides moments by weights of its own, from a count of steps. The count here is so large that these are 1, and
    our weights multiply the numbers which they would divide. On CUDA a second moment that overflows is NaN, and not
    Inf, as in torch's own step.
    """
    root = nu_weight**0.5
    steps = [_endless(params[0].device)] * len(params)
    torch._fused_adamw_(
        list(params), list(grads), list(mu), list(nu), [], steps,
        lr=lr * root / mu_weight, beta1=b1, beta2=b2, weight_decay=weight_decay * mu_weight / root, eps=eps * root,
        amsgrad=False, maximize=False,
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


class Many:
    """A list of tensors as a number of a rule: what a rule does with it is a function of torch's for lists."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = [*tensors]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Many:
        on_lists = LISTED.get(func) if isinstance(args[0], Many) else None
        if on_lists is not None and (func in WITH_TENSORS or not any(isinstance(x, Tensor) for x in args)):
            return cls(on_lists(*(x.tensors if isinstance(x, Many) else x for x in args), **(kwargs or {})))
        size = max(len(x.tensors) for x in args if isinstance(x, Many))
        columns = [x.tensors if isinstance(x, Many) else [x] * size for x in args]
        return cls([func(*row, **(kwargs or {})) for row in zip(*columns, strict=True)])

    def __add__(self, other: Any) -> Any:
        return torch.add(self, other)  # type: ignore[call-overload]

    def __sub__(self, other: Any) -> Any:
        return torch.sub(self, other)  # type: ignore[call-overload]

    def __rsub__(self, other: Any) -> Any:
        return torch.add(-self, other)

    def __mul__(self, other: Any) -> Any:
        return torch.mul(self, other)  # type: ignore[arg-type]

    def __truediv__(self, other: Any) -> Any:
        return torch.div(self, other)  # type: ignore[arg-type]

    def __neg__(self) -> Any:
        return torch.neg(self)  # type: ignore[arg-type]

    def __gt__(self, other: Any) -> Any:
        return torch.gt(self, other)  # type: ignore[call-overload]

    def __lt__(self, other: Any) -> Any:
        return torch.lt(self, other)  # type: ignore[call-overload]

    def __ge__(self, other: Any) -> Any:
        return torch.ge(self, other)  # type: ignore[call-overload]

    def __eq__(self, other: object) -> Any:
        return torch.eq(self, other)  # type: ignore[call-overload]

    def sqrt(self) -> Any:
        """Return the square roots."""
        return torch.sqrt(self)  # type: ignore[arg-type]

    __radd__, __rmul__ = __add__, __mul__


LISTED: dict[Any, Callable[..., Any]] = {
    torch.add: torch._foreach_add, torch.sub: torch._foreach_sub, torch.mul: torch._foreach_mul,
    torch.div: torch._foreach_div, torch.neg: torch._foreach_neg, torch.sqrt: torch._foreach_sqrt,
    torch.sign: torch._foreach_sign, torch.lerp: torch._foreach_lerp,
}  # fmt: skip
"""torch's functions of lists, by those of a tensor; all others are called tensor by tensor."""

WITH_TENSORS = (torch.mul, torch.div)
"""Those that take a 0-d tensor in place of a list."""


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
        given[place] = Many(scalar.unbind()) if scalar.numel() > 1 else scalar.reshape(())
    found = reference.lists.rule_of(rule)(*map(Many, columns), *given)
    flat = [x for many in (found if count > 1 else (found,)) for x in many.tensors]
    torch._foreach_copy_([*results], flat)
    return None


def sums_of_squares(tensors: Sequence[Tensor]) -> Any:
    """See `reference.lists.sums_of_squares`."""
    return _squares([*tensors]) if _fit(tensors) else NotImplemented


# LAMB and 1-bit LAMB, on whole tensors


def lamb_moments_(
    params: Sequence[Tensor], grads: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], b1: float,
    b2: float, eps: float, weight_decay: float,
) -> Any:  # fmt: skip
    """See `reference.steps.lamb_moments_`."""
    if not _fit(params, grads, mu, nu):
        return NotImplemented
    sums = []
    for p, g, m, v in chunks(params, grads, mu, nu, whole=True):
        _move_moments(g, m, v, b1, b2)
        u = torch._foreach_div(m, _denominators(v, eps))
        _add_decay(u, p, weight_decay)
        sums.append(torch.stack([_squares(p), _squares(u), _squares(m)], 1))
    return torch.cat(sums)


def onebit_lamb_moments_(
    params: Sequence[Tensor], averages: Sequence[Tensor], scaling: Tensor, mu: Sequence[Tensor], nu: Sequence[Tensor],
    fresh: Sequence[Tensor], b1: float, b2: float, eps: float, weight_decay: float, max_step: float,
    keep_zeros: bool,
) -> Any:  # fmt: skip
    """See `reference.steps.onebit_lamb_moments_`."""
    if not _fit(params, averages, mu, nu, fresh):
        return NotImplemented
    sums, done = [], 0
    for p, x, m, v, f in chunks(params, averages, mu, nu, fresh, whole=True):
        x = [*torch._foreach_div(x, _spread(scaling[done : done + len(x)], x))]
        done += len(x)
        if keep_zeros:
            clear_by_signs(x, v)
        g = torch._foreach_sub(x, torch._foreach_mul(m, b1))  # one function for both would round once, as nobody else
        torch._foreach_div_(g, 1 - b1)
        torch._foreach_copy_(m, x)
        torch._foreach_mul_(f, b2)
        torch._foreach_addcmul_(f, g, g, 1 - b2)
        below = _denominators(v, eps)
        largest = torch._foreach_norm(torch._foreach_div(below, _denominators(f, eps)), float("inf"))
        u = clamped(torch._foreach_div(m, below), max_step)
        undecayed = _squares(u)
        _add_decay(u, p, weight_decay)
        sums.append(torch.stack([torch.stack(largest).double(), undecayed, _squares(u)], 1))
    return torch.cat(sums)


def lamb_step_(
    params: Sequence[Tensor], mu: Sequence[Tensor], nu: Sequence[Tensor], rates: Tensor, eps: float,
    weight_decay: float, max_step: float,
) -> Any:  # fmt: skip
    """See `reference.steps.lamb_step_`."""
    if not _fit(params, mu, nu):
        return NotImplemented
    done = 0
    for p, m, v in chunks(params, mu, nu, whole=True):
        u = clamped(torch._foreach_div(m, _denominators(v, eps)), max_step)
        _add_decay(u, p, weight_decay)
        torch._foreach_mul_(u, _spread(rates[done : done + len(p)], p))
        torch._foreach_sub_(p, u)
        done += len(p)
    return None


def _fit(*lists: Sequence[Tensor]) -> bool:
    """Return whether there are tensors, contiguous float32, none without elements, of which no norm is the largest."""
    return bool(lists[0]) and plain(*lists) and all(t.numel() for t in lists[0])


# rules, in place on lists


def _move_moments(g: list[Tensor], m: list[Tensor], v: list[Tensor], b1: float, b2: float) -> None:
    torch._foreach_lerp_(m, g, 1 - b1)
    torch._foreach_mul_(v, b2)
    torch._foreach_addcmul_(v, g, g, 1 - b2)


def _clear(m: list[Tensor], v: list[Tensor]) -> None:
    """Write zeros into m where v is zero; m is finite, and v neither NaN nor below zero."""
    if m[0].device.type != "cpu":  # a mask would be three launches for each tensor
        clear_by_signs(m, v)
        return
    for moved, rests in zip(m, v, strict=True):
        moved.masked_fill_(~(rests > 0), 0.0)


def clear_by_signs(m: list[Tensor], v: list[Tensor]) -> None:
    """Write zeros into m where v is zero, in two launches; a zero has the sign of what was there.

    Args: m: finite. v: neither NaN nor below zero.
    """
    torch._foreach_mul_(m, torch._foreach_sign(v))


def clamped(u: Tensors, max_step: float) -> Tensors:
    """Return `rules.clamped` of each tensor, in place."""
    if max_step == math.inf:
        return u
    torch._foreach_clamp_min_(u, -max_step)
    torch._foreach_clamp_max_(u, max_step)
    return u


def _hold(m: list[Tensor], v: list[Tensor], eps: float, max_step: float) -> None:
    """Clamp a momentum, in place, so that its direction is within +-max_step."""
    if max_step == math.inf:
        return
    limit = _denominators(v, eps)
    torch._foreach_mul_(limit, max_step)
    torch._foreach_clamp_max_(m, limit)
    torch._foreach_clamp_min_(m, torch._foreach_neg(limit))


def _descend(
    p: list[Tensor], m: list[Tensor], v: list[Tensor], eps: float, weight_decay: float, lr: float, mu_weight: float,
    nu_weight: float, max_step: float,
) -> None:  # fmt: skip
    below = torch._foreach_sqrt(v)
    if nu_weight != 1:
        torch._foreach_div_(below, nu_weight**0.5)
    torch._foreach_add_(below, eps)
    torch._foreach_mul_(below, mu_weight)
    u = clamped(torch._foreach_div(m, below), max_step)
    _add_decay(u, p, weight_decay)
    torch._foreach_add_(p, u, alpha=-lr)


def _denominators(v: list[Tensor], eps: float) -> list[Tensor]:
    below = [*torch._foreach_sqrt(v)]
    torch._foreach_add_(below, eps)
    return below


def _add_decay(u: Tensors, p: list[Tensor], weight_decay: float) -> None:
    if weight_decay:
        torch._foreach_add_(u, p, alpha=weight_decay)


def _squares(tensors: Tensors) -> Tensor:
    """Return the sums of squares, (S,) float64."""
    return torch.stack(torch._foreach_norm(tensors, 2, torch.float64)).square()


def _spread(numbers: Tensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return each tensor's number as often as it has elements: functions of lists take no tensor of numbers."""
    sizes = tuple(t.numel() for t in tensors)
    wide = numbers.to(tensors[0].dtype).repeat_interleave(_counts(sizes, numbers.device), output_size=sum(sizes))
    return [*wide.split(sizes)]


@cached_plan
def _counts(sizes: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(sizes, dtype=torch.int64, device=device)


EVERYWHERE = (momentum_rows, momentum_encode, quantize_feedback, onebit_adam_, adamw_)
ON_ACCELERATORS = (
    elementwise_, sums_of_squares, drift, largest_magnitude, lamb_moments_, onebit_lamb_moments_, lamb_step_,
)  # fmt: skip
ON_CPU = (
    reference.steps.drift,
    reference.steps.lamb_moments_,
    reference.steps.onebit_lamb_moments_,
    reference.steps.lamb_step_,
)
"""References that are good enough for a CPU: their temporaries are those of one tensor, and without these LAMB's and
0/1 Adam's steps would be the pure ones."""


def row(device_type: str) -> Accelerator:
    """Return the row."""
    kernels = (*EVERYWHERE, *(ON_CPU if device_type == "cpu" else ON_ACCELERATORS))
    return Accelerator(device_type, {f.__name__: f for f in kernels}, provider="torch")
