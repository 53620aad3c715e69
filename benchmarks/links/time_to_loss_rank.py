"""One rank of `time_to_loss.py`: it trains a real model, over a link that may be throttled, and looks at the loss.

Started by `time_to_loss.py`, once for the parts of a method.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LambdaLR
from train_lm import Transformer, loss_of

import fn
from benchmarks.atlas import methods as atlas_methods
from benchmarks.atlas.methods import ADAM, Schedule
from benchmarks.atlas.tasks import Size, Task, language_model
from benchmarks.links import namespaces
from benchmarks.links.contenders import LR, ROUND
from benchmarks.links.grid_methods import LATE, WAYS
from benchmarks.links.grid_rank import Rank, joined

CLIP = 1.0
"""The norm to which gradients are clipped."""

SIZE = Size(4, 128, 4, context=128, sequences=16)
TINY = Size(1, 32, 2, context=16, sequences=8)
EXACT = 5
"""Steps of the warm-up in a run that is only timed."""

BASE = "AdamW"


class Method(NamedTuple):
    """What is compared.

    way: the row of the grid that sends as much. make: (lr, axis) -> transform; None is torch's AdamW under DDP.
    schedule: steps of the run -> schedule. timed: the same for a run that is only timed. steps: of a period. times: how
    many times as many steps a run has as the others': what sends little may take more of them in the same time.
    """

    way: str
    make: Callable[..., fn.Transform] | None
    schedule: Callable[[int], Schedule | None]
    timed: Schedule | None
    steps: int = 1
    times: int = 1

    def exact(self, steps: int) -> int:
        """Return how many steps of a run are the warm-up, which sends float32."""
        schedule = self.schedule(steps)
        return 0 if schedule is None else sum(schedule(step) is fn.Phase.WARMUP for step in range(steps))


def late(steps: int) -> Schedule:
    """Return rounds whose means arrive half a round later, so that one arrives in the last step."""
    return fn.every(ROUND, delay=LATE, start=steps % ROUND)


def of_atlas(name: str, way: str) -> Method:
    """Return a method as the atlas has it."""
    method = atlas_methods.METHODS[name]
    return Method(way, method.make, method.schedule, fn.freeze_after(EXACT))


LATE_ROUNDS = Method(
    "DiLoCo, int8, late",
    atlas_methods.METHODS["diloco, int8"].make,
    late,
    fn.every(ROUND, delay=LATE, start=EXACT),
    ROUND,
)

METHODS = {
    BASE: Method("DDP float32", None, lambda steps: None, None),
    "int4 gradients": of_atlas("adamw, int4", "int4 gradients"),
    "1-bit Adam": of_atlas("onebit_adam", "1-bit Adam"),
    "DiLoCo, int8, late": LATE_ROUNDS,
    "DiLoCo, 3 x the steps": LATE_ROUNDS._replace(times=3),
}
"""What is compared, in the order in which tables show it."""

assert {method.way for method in METHODS.values()} <= set(WAYS)


def cosine(step: int, steps: int) -> float:
    """Return the part of the peak learning rate: a rise over 2 % of the steps, then half a cosine to a tenth."""
    done = step / steps
    return min((step + 1) / (0.02 * steps), 1.0) * (0.55 + 0.45 * math.cos(math.pi * done))


class Part(NamedTuple):
    """What one run is.

    rate: bit/s of the link, None for no throttle. looks: steps from one look at the loss to the next; None: nothing is
    learned, and steps are only timed.
    """

    name: str
    rate: float | None
    steps: int
    looks: int | None
    lr: float
    seed: int


class Run:
    """A model and its optimizer on one rank."""

    def __init__(self, method: Method, part: Part, task: Task, size: Size, world: Rank):
        self.method, self.part, self.task, self.rank = method, part, task, world.rank
        self.model = Transformer(size.layers, size.width, size.heads)
        self.model.load_state_dict(task.params(part.seed))
        timed, params = part.looks is None, self.model.parameters()
        lr = LR if timed else part.lr
        self.schedule = method.timed if timed else method.schedule(part.steps)
        self.agreed: Callable[[], AbstractContextManager[None]] = nullcontext
        if method.make is None:
            self.forward: nn.Module = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
            self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(
                params, lr, (0.9, ADAM["b2"]), ADAM["eps"], ADAM["weight_decay"], fused=True
            )
        else:
            self.forward = self.model
            with world.binding:
                made = partial(method.make, axis="data")
                own = fn.Optimizer(params, made, schedule=self.schedule, lr=lr, max_norm=CLIP)
            self.optimizer, self.agreed = own, partial(fn.adapters.agreed_params, own)
        self.lr = LambdaLR(self.optimizer, lambda t: 1.0 if timed else cosine(t, part.steps))
        self.draw = task.batches(part.seed, world.world)

    def step(self) -> None:
        """Take a step on this rank's part of the next batch. DDP's mean is clipped here, ours by `max_norm`."""
        x, y = self.draw()
        loss_of(self.forward, (x[self.rank], y[self.rank])).backward()
        if self.method.make is None:
            clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.lr.step()

    def look(self) -> tuple[float | None, float | None]:
        """Return the losses on the split that rates are chosen on, and on the one that is shown."""
        score = self.task.score({name: p.detach() for name, p in self.model.named_parameters()})
        tuning, loss = (x if math.isfinite(x) else None for x in (score.tuning, score.loss))
        return tuning, loss

    def train(self, looks: int, say: Callable[[int], None]) -> list[dict[str, Any]]:
        """Train; return what rank 0 saw on the way. The clock stands still while it looks.

        Where a mean travels, the wait for it is on the clock: the params that all ranks agree on need it.
        """
        seen, seconds, payload = [], 0.0, 0
        with fn.ledger() as book:
            sent, start = namespaces.sent().payload, self.together()
            for taken in range(1, self.part.steps + 1):
                self.step()
                if taken % looks and taken < self.part.steps:
                    continue
                with self.agreed():
                    seconds += self.together() - start
                    payload += namespaces.sent().payload - sent
                    tuning, loss = self.look() if self.rank == 0 else (None, None)
                    found = {"step": taken, "seconds": seconds, "tuning": tuning, "loss": loss}
                    seen.append({**found, "payload": payload, "ledger": book.total})
                    say(taken)
                    self.together()
                sent, start = namespaces.sent().payload, self.together()
        return seen

    def time(self, say: Callable[[int], None]) -> dict[str, Any]:
        """Return the seconds of each step, the first ones of a warm-up, and the bytes of a period after it."""
        seconds = []
        self.together()
        for taken in range(self.part.steps):
            if taken == self.part.steps - self.method.steps:
                sent = namespaces.sent().payload
            start = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - start)
            say(taken)
        return {"seconds": seconds, "payload": (namespaces.sent().payload - sent) / self.method.steps}

    def together(self) -> float:
        """Wait for all ranks; return the time."""
        dist.barrier()
        return time.perf_counter()


def measure(settings: dict[str, Any], world: Rank) -> None:
    """Take the parts one after the other, and write each into a file of its own."""
    size = TINY if settings["tiny"] else SIZE
    task, folder = language_model(size), Path(settings["folder"])
    method, done = METHODS[settings["method"]], 0
    if settings["rehearse"]:  # connections open and kernels compile before the clock, on a link that is not shaped yet
        Run(method, Part("", None, EXACT + 2 * method.steps, None, LR, 0), task, size, world).time(lambda steps: None)

    def say(steps: int) -> None:
        if world.rank == 0:
            (folder / "steps").write_text(str(done + steps))

    for place, part in enumerate(Part(*values) for values in settings["parts"]):
        run = Run(method, part, task, size, world)
        measured = world.throttle(part.rate)
        found = run.time(say) if part.looks is None else {"looks": run.train(part.looks, say)}
        (folder / f"{world.rank}-{place}.json").write_text(json.dumps({"measured": measured, **found}))
        done += part.steps


def main() -> None:
    """Join the group, measure, write."""
    with joined() as (rank, settings):
        measure(settings, Rank(rank, {"switch": settings["switch"], "delay": 0.0}))


if __name__ == "__main__":
    main()
