"""One run of the atlas: a method trains a task on simulated workers; what it lost, and what it sent."""

from __future__ import annotations

import math
import time
from functools import partial
from typing import Any, NamedTuple

import torch
from atlas_methods import METHODS
from atlas_tasks import TASKS, rate, tree_mean
from torch.func import grad_and_value
from torch.nn.attention import SDPBackend, sdpa_kernel

import fn


class Run(NamedTuple):
    """What a run is, and so its key among those that are done."""

    task: str
    method: str
    workers: int
    seed: int
    steps: int
    lr: float


def train(run: Run) -> dict[str, Any]:
    """Train afresh; return the run with its loss on held-out data, the bytes that a rank sent, and its seconds.

    The loss is None where it is not finite.
    """
    torch.set_num_threads(1)
    method, task = METHODS[run.method], TASKS[run.task][0]()
    params, lr = task.params(run.seed), torch.tensor(0.0)
    tx, schedule = method.make(lr=lr, axis="data"), method.schedule(run.steps)
    draw = task.batches(run.seed, run.workers)
    dims = fn.rank_dims(tx.init(params))
    state = fn.simulate(tx.init, "data", run.workers, in_dims=None, out_dims=dims)(params)
    own = None if method.alike else 0
    if not method.alike:
        params = {name: p.expand(run.workers, *p.shape).clone() for name, p in params.items()}

    def step(when: Any, params: Any, state: Any, batch: Any) -> Any:
        grads, value = grad_and_value(task.loss)(params, batch)
        updates, state = tx.update(when)(grads, state, params)
        return fn.apply_updates(params, updates), state, value

    places, start = (own, dims, 0), time.perf_counter()
    with fn.ledger() as sent, sdpa_kernel(SDPBackend.MATH):  # the fused attention cannot be batched over workers
        for t in range(run.steps):
            lr.fill_(run.lr * rate(t, run.steps))
            turn = fn.simulate(partial(step, schedule(t)), "data", run.workers, in_dims=places, out_dims=places)
            params, state, _ = turn(params, state, draw())
    loss = task.score(params if method.alike else tree_mean(params))
    seconds = round(time.perf_counter() - start, 1)
    return {**run._asdict(), "loss": loss if math.isfinite(loss) else None, "bytes": sent.total, "seconds": seconds}
