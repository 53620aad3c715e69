"""One run of the atlas: a method trains a task on simulated workers; what it lost, and what it sent."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.func import grad_and_value
from torch.nn.attention import SDPBackend, sdpa_kernel

import fn
from benchmarks.atlas.methods import METHODS, Method
from benchmarks.atlas.tasks import TASKS, Score, Task, rate, tree_mean


class Run(NamedTuple):
    """What a run is, and so its key among those that are done."""

    task: str
    method: str
    workers: int
    seed: int
    steps: int
    lr: float


def train(run: Run, task: Task | None = None, method: Method | None = None) -> dict[str, Any]:
    """Train afresh; return the run with its `Score`, the bytes that a rank sent, and its seconds.

    Losses are None where they are not finite.

    Args: task, method: those of the atlas that have the run's names, if None.
    """
    torch.set_num_threads(1)
    method, task = method or METHODS[run.method], task or TASKS[run.task].make()
    workers = 1 if method.alone else run.workers
    params, lr = task.params(run.seed), torch.tensor(0.0)
    tx, schedule = method.make(lr=lr, axis="data"), method.schedule(run.steps)
    draw = task.batches(run.seed, run.workers)
    dims = fn.rank_dims(tx.init(params))
    state = fn.simulate(tx.init, "data", workers, in_dims=None, out_dims=dims)(params)
    own = None if method.alike else 0
    if not method.alike:
        params = {name: p.expand(workers, *p.shape).clone() for name, p in params.items()}

    def step(when: Any, params: Any, state: Any, batch: Any) -> Any:
        grads, value = grad_and_value(task.loss)(params, batch)
        updates, state = tx.update(when)(grads, state, params)
        return fn.apply_updates(params, updates), state, value

    def score() -> Score:
        return task.score(params if method.alike else tree_mean(params))

    places, start = (own, dims, 0), time.perf_counter()
    with fn.ledger() as sent, sdpa_kernel(SDPBackend.MATH):  # the fused attention cannot be batched over workers
        for t in range(0, run.steps, method.accumulate):
            lr.fill_(run.lr * rate(t, run.steps))
            draws = [draw() for _ in range(min(method.accumulate, run.steps - t))]
            batch = tuple(torch.cat([part[:workers] for part in parts], dim=1) for parts in zip(*draws, strict=True))
            turn = fn.simulate(partial(step, schedule(t)), "data", workers, in_dims=places, out_dims=places)
            params, state, _ = turn(params, state, batch)
        if method.ends_apart:
            params = fn.simulate(partial(fn.pmean, axis="data"), "data", workers, in_dims=0, out_dims=0)(params)
    seconds = round(time.perf_counter() - start, 1)
    row = {**run._asdict(), **{name: finite(x) for name, x in score()._asdict().items()}}
    return {**row, "bytes": sent.total, "seconds": seconds}


def finite(x: float | None) -> float | None:
    """Return a number that JSON has."""
    return x if x is not None and math.isfinite(x) else None
