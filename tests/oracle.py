"""What the papers say, in float64 NumPy, rank by rank in plain loops. Imports nothing of `fn`.

Conventions: W ranks; a tensor is a flat vector (n,); `xs[r]` is rank r's; server k serves chunk k of every vector,
[k w, (k + 1) w) cut at n, with w = ceil(n / (W align)) align. There is no padding here at all: chunks are ragged.
"""

from __future__ import annotations

import numpy as np

Vector = np.ndarray


def chunks(n: int, world: int, align: int) -> list[slice]:
    """Return the part of a vector that each server serves."""
    width = -(-n // (world * align)) * align
    return [slice(min(k * width, n), min((k + 1) * width, n)) for k in range(world)]


def scaled_sign(x: Vector, parts: list[slice], digits: int | None) -> Vector:
    """Return rms(x[part]) * sgn(x[part]) for every part, sgn(0) = +1. Tang et al., 1-bit Adam, section 3.

    Args: digits: binary digits that a scale is rounded to, as blocks have it, which is not of the paper.
    """
    out = np.zeros_like(x)
    for part in parts:
        piece = x[part]
        if piece.size:
            scale = np.sqrt(np.mean(piece**2))
            if digits is not None:
                mantissa, exponent = np.frexp(scale)
                scale = np.ldexp(np.rint(np.ldexp(mantissa, digits)), exponent - digits)
            out[part] = scale * np.where(piece >= 0, 1.0, -1.0)
    return out


def blocks(part: slice, block: int | None) -> list[slice]:
    """Cut a part into blocks, which start where the part starts."""
    if block is None:
        return [part]
    return [slice(a, min(a + block, part.stop)) for a in range(part.start, part.stop, block)]


class CompressedMean:
    """Algorithm 1, lines 5-10, of 1-bit Adam for one tensor: both errors are kept from call to call."""

    def __init__(self, n: int, world: int, block: int | None = None, align: int = 8):
        self.parts = chunks(n, world, align)
        self.block = block
        self.digits = None if block is None else 8  # of bfloat16
        self.worker = [np.zeros(n) for _ in range(world)]
        self.server = np.zeros(n)  # server k's error is its chunk

    def __call__(self, xs: list[Vector]) -> Vector:
        world, n = len(xs), xs[0].size
        if world == 1:
            return xs[0]
        whole = [slice(0, n)] if self.block is None else [b for p in self.parts for b in blocks(p, self.block)]
        total = np.zeros(n)
        for r in range(world):
            compensated = xs[r] + self.worker[r]
            sent = scaled_sign(compensated, whole, self.digits)
            self.worker[r] = compensated - sent
            total += sent / world
        compensated = total + self.server
        sent = scaled_sign(compensated, [b for p in self.parts for b in blocks(p, self.block)], self.digits)
        self.server = compensated - sent
        return sent


def mean(xs: list[Vector]) -> Vector:
    """Return the exact mean over the ranks, added in their order."""
    total = np.zeros_like(xs[0])
    for x in xs:
        total = total + x
    return total / len(xs)


class OnebitAdam:
    """1-bit Adam, algorithm 1, on a list of tensors. `step(gradients[rank][tensor], compressed)` moves `params`."""

    def __init__(
        self,
        params: list[Vector],
        world: int,
        lr: float,
        b1: float,
        b2: float,
        eps: float,
        weight_decay: float = 0.0,
        *,
        block: int | None = None,
        bias_correction: bool = False,
        max_step: float = np.inf,
    ):
        self.params = [p.astype(np.float64) for p in params]
        self.lr, self.b1, self.b2, self.eps, self.weight_decay = lr, b1, b2, eps, weight_decay
        self.bias_correction, self.max_step = bias_correction, max_step
        self.mu = [np.zeros_like(p) for p in self.params]
        self.nu = [np.zeros_like(p) for p in self.params]
        self.means = [CompressedMean(p.size, world, block) for p in self.params]
        self.steps = self.warm_steps = 0

    def step(self, gradients: list[list[Vector]], compressed: bool) -> None:
        self.steps += 1
        self.warm_steps += not compressed
        for i in range(len(self.params)):
            gs = [g[i] for g in gradients]
            if compressed:
                candidates = [self._average(self.mu[i], g, self.b1, self.steps) for g in gs]
                self.mu[i] = np.where(self.nu[i] > 0, self.means[i](candidates), 0.0)
            else:
                g = mean(gs)
                self.mu[i] = self._average(self.mu[i], g, self.b1, self.steps)
                self.nu[i] = self._average(self.nu[i], g**2, self.b2, self.warm_steps)
            self._move(i, self.max_step if compressed else np.inf)

    def _average(self, average: Vector, new: Vector, b: float, updates: int) -> Vector:
        share = (1 - b) / (1 - b**updates) if self.bias_correction else 1 - b
        return average + share * (new - average)

    def _move(self, i: int, max_step: float) -> None:
        m, v = self.mu[i], self.nu[i]
        direction = np.clip(m / (np.sqrt(v) + self.eps), -max_step, max_step)
        update = direction + self.weight_decay * self.params[i]
        self.params[i] = self.params[i] - self.lr * update


class AdamW(OnebitAdam):
    """AdamW over exactly averaged gradients: 1-bit Adam that never leaves its warm-up, with bias correction."""

    def __init__(self, params, world, lr, b1, b2, eps, weight_decay=0.0):
        super().__init__(params, world, lr, b1, b2, eps, weight_decay, bias_correction=True)
