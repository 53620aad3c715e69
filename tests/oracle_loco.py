"""LoCo over ZeRO as the papers' loops, in NumPy float64: one tensor, ranks and blocks one after the other."""

from __future__ import annotations

import numpy as np


def quantize(x: np.ndarray, width: int, block: int) -> np.ndarray:
    """Return what blocks of x decode to."""
    out = np.zeros_like(x)
    top = 2 ** (width - 1)
    for start in range(0, len(x), block):
        part = x[start : start + block]
        peak = np.abs(part).max() if len(part) else 0.0
        scale = top / peak if peak > 0 else 1.0
        out[start : start + block] = np.clip(np.rint(part * scale), -top, top - 1) * (1.0 / scale)
    return out


class Loco:
    """W ranks with gradients of one tensor. `mean` returns what the compressed reduce-scatter gives, end to end."""

    def __init__(self, n: int, world: int, block: int, beta: float, every: int, width: int = 4):
        self.world, self.block, self.every, self.width = world, block, every, width
        self.beta = float(np.float32(beta))
        self.piece = -(-n // (2 * world)) * 2
        self.n, self.step = n, 0
        self.errors = np.zeros((world, world, self.piece))  # of rank r, for the piece of rank k

    def mean(self, gradients: np.ndarray) -> np.ndarray:
        """Average gradients (W, n); return (n,)."""
        if self.step % self.every == 0:
            self.errors[:] = 0.0
        total = np.zeros((self.world, self.piece))
        for r in range(self.world):
            padded = np.zeros(self.world * self.piece)
            padded[: self.n] = gradients[r]
            for k in range(self.world):
                h = padded[k * self.piece : (k + 1) * self.piece] + self.errors[r, k]
                sent = quantize(h, self.width, self.block)
                kept = self.beta * self.errors[r, k] + (1.0 - self.beta) * (h - sent)
                self.errors[r, k] = quantize(kept, 8, self.block)
                total[k] += sent
        self.step += 1
        return (total / self.world).reshape(-1)[: self.n]


class AdamW:
    """Decoupled weight decay, bias correction; one vector."""

    b1, b2, eps = 0.9, 0.999, 1e-8

    def __init__(self, p: np.ndarray, lr: float, wd: float = 0.01):
        self.p, self.mu, self.nu, self.t = p.copy(), np.zeros_like(p), np.zeros_like(p), 0
        self.lr, self.wd = lr, wd

    def step(self, g: np.ndarray) -> np.ndarray:
        """Return the params after a step."""
        self.t += 1
        self.mu = self.b1 * self.mu + (1 - self.b1) * g
        self.nu = self.b2 * self.nu + (1 - self.b2) * g * g
        u = (self.mu / (1 - self.b1**self.t)) / (np.sqrt(self.nu / (1 - self.b2**self.t)) + self.eps)
        self.p = self.p - self.lr * (u + self.wd * self.p)
        return self.p
