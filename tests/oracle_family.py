"""1-bit LAMB and 0/1 Adam as their papers say, in float64 NumPy, rank by rank. Imports nothing of `fn`."""

from __future__ import annotations

import numpy as np
from oracle import CompressedMean, Vector, mean

LAMB_DEFAULTS = {
    "max_coeff": 10.0,
    "min_coeff": 0.01,
    "coeff_beta": 0.9,
    "factor_max": 4.0,
    "factor_min": 0.5,
    "factor_threshold": 0.1,
}


def norm(x: Vector) -> float:
    return float(np.sqrt(np.sum(x**2)))


class OnebitLamb:
    """1-bit LAMB (arXiv 2104.06069), algorithm 1, one message and one scale for all tensors."""

    def __init__(self, params, world, lr, b1, b2, eps, weight_decay=0.0, max_step=np.inf, **bounds):
        self.params = [p.astype(np.float64) for p in params]
        self.lr, self.b1, self.b2, self.eps, self.weight_decay = lr, b1, b2, eps, weight_decay
        self.bounds, self.max_step = {**LAMB_DEFAULTS, **bounds}, max_step
        self.mu, self.nu = ([np.zeros_like(p) for p in self.params] for _ in range(2))
        self.fresh: list[Vector] | None = None
        self.scaling: list[float] = []
        self.coefficient = [0.0] * len(self.params)
        self.factor = [1.0] * len(self.params)
        self.mean = CompressedMean(sum(p.size for p in self.params), world)

    def step(self, gradients: list[list[Vector]], compressed: bool) -> None:
        if compressed:
            self._compressed(gradients)
        else:
            self._warm(gradients)

    def _warm(self, gradients: list[list[Vector]]) -> None:
        for i, p in enumerate(self.params):
            g = mean([rank[i] for rank in gradients])
            self.mu[i] = self.b1 * self.mu[i] + (1 - self.b1) * g
            self.nu[i] = self.b2 * self.nu[i] + (1 - self.b2) * g**2
            u = self.mu[i] / (np.sqrt(self.nu[i]) + self.eps) + self.weight_decay * p
            c = 1.0
            if norm(p) > 0 and norm(u) > 0:
                c = min(max(norm(p) / norm(u), self.bounds["min_coeff"]), self.bounds["max_coeff"])
            if c != 1.0:
                beta = self.bounds["coeff_beta"]
                self.coefficient[i] = beta * self.coefficient[i] + (1 - beta) * c
            self.params[i] = p - self.lr * c * u

    def _compressed(self, gradients: list[list[Vector]]) -> None:
        if self.fresh is None:  # the switch
            self.fresh = [v.copy() for v in self.nu]
            rms = [norm(m) / np.sqrt(max(m.size, 1)) for m in self.mu]
            alive = [r for r in rms if r > 0]
            self.scaling = [np.mean(alive) / r if r > 0 else 1.0 for r in rms]
        candidates = []
        for rank in gradients:
            own = zip(self.mu, rank, self.scaling, strict=True)
            candidates.append(np.concatenate([(self.b1 * m + (1 - self.b1) * g) * s for m, g, s in own]))
        agreed = np.split(self.mean(candidates), np.cumsum([p.size for p in self.params])[:-1])
        for i, p in enumerate(self.params):
            last, v = self.mu[i], self.nu[i]
            self.mu[i] = np.where(v > 0, agreed[i] / self.scaling[i], 0.0)
            gradient = (self.mu[i] - self.b1 * last) / (1 - self.b1)
            self.fresh[i] = self.b2 * self.fresh[i] + (1 - self.b2) * gradient**2
            q = np.clip(self.mu[i] / (np.sqrt(v) + self.eps), -self.max_step, self.max_step)
            u = q + self.weight_decay * p
            self.factor[i] = self._bounded(i, v, q, u)
            self.params[i] = p - self.lr * (self.coefficient[i] or 1.0) * self.factor[i] * u

    def _bounded(self, i: int, v: Vector, q: Vector, u: Vector) -> float:
        if not v.size:
            return self.factor[i]
        f = np.max((np.sqrt(v) + self.eps) / (np.sqrt(self.fresh[i]) + self.eps))
        if self.weight_decay > 0:
            share = min(1.0, norm(q) / norm(u)) if norm(u) else 0.0
            f = share * f + 1 - share
        f = min(max(f, self.bounds["factor_min"]), self.bounds["factor_max"])
        threshold = self.bounds["factor_threshold"]
        f = min(f, self.factor[i] * (1 + threshold))
        return max(f, self.factor[i] * (1 - threshold))


class ZeroOneAdam:
    """0/1 Adam (arXiv 2202.06009), algorithm 1; variance steps average everything exactly.

    `step(gradients, kind)`, kind "variance", "sync" or "local". params[rank][tensor]: the ranks' own.
    """

    def __init__(self, params, world, lr, b1, b2, eps, weight_decay=0.0, max_step=np.inf, bias_correction=False):
        self.max_step, self.bias_correction = max_step, bias_correction
        self.mu_age = self.nu_age = 0.0
        self.params = [[p.astype(np.float64) for p in params] for _ in range(world)]
        self.anchor = [p.astype(np.float64) for p in params]
        self.lr, self.b1, self.b2, self.eps, self.weight_decay = lr, b1, b2, eps, weight_decay
        self.mu = [[np.zeros_like(p) for p in self.anchor] for _ in range(world)]
        self.nu = [np.zeros_like(p) for p in self.anchor]
        self.elapsed = 0.0
        self.means = [CompressedMean(p.size, world) for p in self.anchor]

    def step(self, gradients: list[list[Vector]], kind: str) -> None:
        self.mu_age += 1
        if kind == "variance":
            self.nu_age += 1
            for i in range(len(self.anchor)):
                self._variance(i, mean([rank[i] for rank in gradients]))
            return
        self.elapsed += self.lr
        for i in range(len(self.anchor)):
            for r, rank in enumerate(gradients):
                self._alone(r, i, rank[i], np.inf if kind == "sync" else self.max_step)
            if kind == "sync":
                self._agree(i)
        if kind == "sync":
            self.elapsed, self.mu_age = 0.0, np.inf

    def _average(self, average: Vector, new: Vector, b: float, age: float) -> Vector:
        return average + (1 - b) / (1 - b**age if self.bias_correction else 1) * (new - average)

    def _root(self, i: int) -> Vector:
        return np.sqrt(self.nu[i]) + self.eps

    def _variance(self, i: int, g: Vector) -> None:
        m = self._average(self.mu[0][i], g, self.b1, self.mu_age)
        self.nu[i] = self._average(self.nu[i], g**2, self.b2, self.nu_age)
        u = np.clip(m / self._root(i), -self.max_step, self.max_step)
        there = self.anchor[i] - self.lr * (u + self.weight_decay * self.anchor[i])
        self._arrive(i, m, there)

    def _alone(self, r: int, i: int, g: Vector, most: float) -> None:
        m = self._average(self.mu[r][i], g, self.b1, self.mu_age)
        self.mu[r][i] = np.where(self.nu[i] > 0, m, 0.0)
        self.params[r][i] = self.params[r][i] - self.lr * np.clip(self.mu[r][i] / self._root(i), -most, most)

    def _agree(self, i: int) -> None:
        went = [(own[i] - self.anchor[i]) * self._root(i) for own in self.params]
        agreed = np.where(self.nu[i] > 0, self.means[i](went), 0.0)
        most = self.max_step * self.elapsed
        step = np.clip(agreed / self._root(i), -most, most)
        decay = self.elapsed * self.weight_decay * self.anchor[i]
        self._arrive(i, -agreed / self.elapsed, self.anchor[i] - decay + step)

    def _arrive(self, i: int, m: Vector, there: Vector) -> None:
        self.anchor[i] = there
        for r in range(len(self.params)):
            self.params[r][i], self.mu[r][i] = there.copy(), m.copy()
