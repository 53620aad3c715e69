"""The arithmetic of every step, once: on tensors, batches under `vmap`, in traces, and on numbers in compiled loops.

The reference calls these functions with tensors, the loops of `cpu` with single float32 numbers: Numba compiles the
same source, and so does Triton. Seven words are no operators: `where`, `root`, `sign`, `power`, `quotient`, `lerp` and
`plus`. The first three are named otherwise in torch and in NumPy; `power` looks at bits. `/` is not rounded correctly
everywhere. `lerp` and `plus` are torch's, because they round once. Numbers come in as arguments, `zero` among them: a
literal would be float64 in a compiled loop.

Symbols: p params, g gradient, m momentum, v second moment, u direction, b what is encoded; decay: of weights.
"""

from __future__ import annotations

from typing import Any

import torch

Number = Any
"""A tensor, or a float32 in a compiled loop."""


def where(condition: Number, a: Number, b: Number) -> Number:
    """Return a where the condition is true, else b."""
    return torch.where(condition, a, b)


def root(x: Number) -> Number:
    """Return the square root."""
    return x.sqrt()


def sign(x: Number) -> Number:
    """Return 1, 0 or -1; 0 for NaN."""
    return torch.sign(x)


def power(x: Number) -> Number:
    """Return the largest power of two that is at most |x|; 0 below the normal numbers. x is float32."""
    return (x.view(torch.int32) & 0x7F800000).view(torch.float32)


def quotient(a: Number, b: Number) -> Number:
    """Return a / b, rounded correctly."""
    return a / b


def lerp(start: Number, end: Number, weight: Number) -> Number:
    """Return start + weight (end - start), from the nearer end, rounded once: moving averages are lerp(new, old, b)."""
    if isinstance(start, torch.Tensor) and isinstance(weight, torch.Tensor):
        weight = weight.to(start.dtype)  # torch takes no other; lists do so themselves
    return torch.lerp(start, end, weight)


def plus(a: Number, b: Number, weight: Number) -> Number:
    """Return a + weight b, rounded once where a device can."""
    return torch.add(a, b, alpha=weight)


# moments


def second_moment(v: Number, g: Number, b2: Number, rest2: Number) -> Number:
    """Return b2 v + (1 - b2) g^2. rest2: 1 - b2, which float32 would round otherwise."""
    return v * b2 + (g * g) * rest2


def kept_at_zero(m: Number, v: Number, instead: Number, zero: Number) -> Number:
    """Return m, and `instead` where v is zero, which never had a gradient.

    As `instead`, m - m is zero, but NaN if m is not finite.
    """
    return where(v > zero, m, instead)


def kept_unseen(m: Number, v: Number, zero: Number) -> Number:
    """Return m, but zero where v is zero, and NaN where m is not finite there, so that the step is skipped."""
    return kept_at_zero(m, v, m - m, zero)


# directions and steps


def scaled(u: Number, factor: Number) -> Number:
    """Return factor u."""
    return u * factor


def added(a: Number, b: Number) -> Number:
    """Return a + b."""
    return a + b


def same(x: Number) -> Number:
    """Return x: to copy it."""
    return x


def sign_of(x: Number) -> Number:
    """Return the sign; of NaN and infinity it is NaN, so that the step is skipped."""
    return sign(x) + (x - x)


def sign_above(x: Number, least: Number) -> Number:
    """Return the sign, but 0 where a magnitude is at most `least`, which is below 0 if there is no such limit."""
    return where(x > least, sign_of(x), where(x < -least, sign_of(x), x - x))


def lion(m: Number, g: Number, b1: Number, b2: Number) -> tuple[Number, Number]:
    """Return Lion's direction, whose sign is taken, and the momentum that is kept."""
    return lerp(g, m, b1), lerp(g, m, b2)


def denominator(v: Number, eps: Number) -> Number:
    """Return sqrt(v) + eps."""
    return root(v) + eps


def decayed(u: Number, p: Number, decay: Number) -> Number:
    """Return a direction with decoupled weight decay."""
    return u + decay * p


def direction(m: Number, v: Number, eps: Number) -> Number:
    """Return Adam's direction."""
    return quotient(m, denominator(v, eps))


def clamped(u: Number, limit: Number) -> Number:
    """Return a direction within +-limit, where one that overflowed is at the limit, and NaN stays NaN."""
    return where(u > limit, limit, where(u < -limit, -limit, u))


def descended(p: Number, u: Number, decay: Number, lr: Number) -> Number:
    """Return params after a step along a direction."""
    return p - lr * decayed(u, p, decay)


def adamw(p: Number, m: Number, v: Number, eps: Number, decay: Number, lr: Number, limit: Number) -> Number:
    """Return params after AdamW's step with moments that have moved; 1-bit Adam takes the same, within its limit."""
    return descended(p, clamped(direction(m, v, eps), limit), decay, lr)


def drift(p: Number, anchor: Number, m: Number, v: Number, eps: Number, lr: Number) -> Number:
    """Return what 0/1 Adam sends: how far params are from the anchor after a step, in units of the momentum."""
    return (p - anchor) * denominator(v, eps) - lr * m


def implied_gradient(m: Number, before: Number, b1: Number, rest1: Number) -> Number:
    """Return the gradient that took the momentum from `before` to m: 1-bit LAMB."""
    return quotient(m - b1 * before, rest1)


# codes and errors


def signed(b: Number, scale: Number, zero: Number) -> Number:
    """Return scale sgn(b), which is what a sign bit decodes to; sgn(0) is 1."""
    return where(b >= zero, scale, -scale)


def residual(b: Number, scale: Number, zero: Number) -> Number:
    """Return b - scale sgn(b), the residual error: what was not delivered."""
    return b - signed(b, scale, zero)


def compensated(x: Number, buffer: Number, sent: Number, zero: Number) -> Number:
    """Return x plus the residual error of the last buffer, which is formed only here: lazy error feedback."""
    return x + residual(buffer, sent, zero)


def code_scale(peak: Number, top: Number, one: Number, infinity: Number) -> Number:
    """Return what numbers are multiplied by to become codes: top / peak, and 1 where that overflows."""
    scale = quotient(top, peak)
    return where(scale == infinity, one, scale)


def shortened(x: Number, least: Number, anchor: Number) -> Number:
    """Return x rounded half to even to a few bits behind the first, and below `least` to the steps that `least` has.

    anchor: 1.5 * 2**(23 - bits). Times a power of two it is a number whose neighbours are so many steps away, and the
    sum of it and x is rounded to them.
    """
    size = power(x)
    far = where(size > least, size, least) * anchor
    return (x + far) - far


def damped(error: Number, lost: Number, beta: Number, rest: Number) -> Number:
    """Return the moving average of what was lost: LoCo's feedback. rest: 1 - beta."""
    return beta * error + rest * lost
