"""One rank of `grid.py`: real tensors, codecs and links, and a wait in place of a GPU's computation.

Started by `grid.py`, inside a network namespace, once for the points of a method.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import fn
from benchmarks.links import grid_methods, namespaces
from benchmarks.links.contenders import WARM_UP, Batch, World
from benchmarks.links.grid_methods import SITES, WAYS
from fn.planner.predict import FORWARD
from fn.tools import calibrate

EVERY = {**WAYS, **SITES}
REPEATS = 3
LONGEST = 100.0
"""Seconds after which a point begins no further repeat."""

CHECKED = 0.4
"""Seconds of sending by which a shaped rate is verified."""

FAR = 100
"""Or so many times as long as a message is on its way."""

TOLERANCE, TOLERANCE_FAR = 0.08, 0.12
"""By how much what was verified may differ from the rate, for which headers count, too; far apart a message finds its
pace over several round trips."""

TRIES = 4
"""How often a rate is measured before it counts as wrong: another process that wakes up looks like a slower link."""

SLOW, SMALL = 5e8, 7
"""Bit/s below which a link is calibrated by so many sizes, up to 4 MiB."""

CODING = "coding"
"""The part in which messages go nowhere."""


class Paced(torch.autograd.Function):
    """Give a parameter its gradient at a given time, as a backward pass on another device would."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, p: Tensor, grad: Tensor, until: float) -> Tensor:
        """Pass the loss on."""
        ctx.grad, ctx.until = grad, until
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *along: Tensor) -> Any:
        """Wait, then hand the gradient over."""
        wait(ctx.until)
        return along[0], ctx.grad, None, None


def wait(until: float) -> None:
    """Sleep until a time of `time.perf_counter`."""
    time.sleep(max(0.0, until - time.perf_counter()))


class Model(nn.Module):
    """Parameters of GPT-2's shapes, and what stands in for a GPU.

    After a third of `seconds` the backward pass begins, and gradients follow evenly. They are views of noise that is
    drawn once per rank; a step begins at another place of it.
    """

    def __init__(self, rank: int, shapes: list[tuple[int, ...]]):
        super().__init__()
        torch.manual_seed(0)  # the same parameters on every rank
        self.weights = nn.ParameterList(nn.Parameter(0.02 * torch.randn(shape)) for shape in shapes)
        self.elements = sum(p.numel() for p in self.weights)
        draw = torch.Generator().manual_seed(rank)
        self.noise = 1e-3 * torch.randn(max(p.numel() for p in self.weights) + (1 << 16), generator=draw)
        self.seconds, self.steps = 0.0, 0

    def forward(self, batch: Batch) -> Tensor:
        """Return a loss whose backward pass takes the rest of `seconds`."""
        begin, loss, ahead = time.perf_counter(), torch.zeros(()), self.elements
        self.steps += 1
        for k, p in enumerate(self.weights):
            place = (7919 * self.steps + 104729 * k) % (1 << 16)
            grad = self.noise[place : place + p.numel()].view_as(p)
            # The last parameter's gradient is there first.
            until = FORWARD + (1 - FORWARD) * ahead / self.elements
            loss = Paced.apply(loss, p, grad, begin + until * self.seconds)
            ahead -= p.numel()
        wait(begin + FORWARD * self.seconds)
        return loss


def loss_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss; through DDP where the model is wrapped."""
    loss: Tensor = model(batch)
    return loss


class Rank:
    """What a rank keeps while it measures. settings: those that `grid.py` starts it with."""

    def __init__(self, rank: int, settings: dict[str, Any]):
        self.rank, self.settings, self.world = rank, settings, dist.get_world_size()
        mesh = dist.device_mesh.init_device_mesh("cpu", (self.world,), mesh_dim_names=("data",))
        self.binding = fn.bind(mesh)

    def throttle(self, rate: float | None) -> float | None:
        """Shape the link, verify it, and return the measured bit/s. Raises: RuntimeError if it is another rate."""
        if rate is None:
            return None
        namespaces.throttle(rate)
        if self.settings["switch"] is not None:
            namespaces.throttle_port(self.settings["switch"], self.rank, rate)
        measured, tolerance = 0.0, TOLERANCE_FAR if self.settings["delay"] else TOLERANCE
        for _ in range(TRIES):
            measured = self.measured(rate)
            if abs(measured / rate - 1) <= tolerance:
                return measured
        raise RuntimeError(
            f"expected a link of {rate:.3g} bit/s, but measured {measured:.3g} at the last of {TRIES} tries"
        )

    def measured(self, rate: float) -> float:
        """Return the bit/s of messages from each rank to the next, one rank after the other."""
        x = torch.zeros(int(rate * max(CHECKED, FAR * self.settings["delay"]) / 8), dtype=torch.uint8)
        begin = 0.0
        for _ in range(2):  # the first time a bucket lets more through at once
            dist.barrier()
            begin = time.perf_counter()
            for sender in range(self.world):  # one after the other: gloo sends and receives in turns, not at once
                if self.rank == sender:
                    dist.send(x, (sender + 1) % self.world)
                elif self.rank == (sender + 1) % self.world:
                    dist.recv(torch.empty_like(x), sender)
        return 8 * x.numel() * self.world / self.slowest(time.perf_counter() - begin)

    def slowest(self, seconds: float) -> float:
        """Return the largest of all ranks' seconds."""
        x = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return float(x)

    def link(self, rate: float | None) -> dict[str, Any]:
        """Return what a shaped link costs, collective by collective, as the planner calibrates it."""
        measured = self.throttle(rate)
        sizes = calibrate.SIZES if rate is None or rate > SLOW else calibrate.SIZES[:SMALL]
        with self.binding:
            link = calibrate.measure(calibrate.Job(self.rank, self.world, self.world, torch.device("cpu")), sizes, 3)
        return {"measured": measured, "costs": {name: cost._asdict() for name, cost in link["data"].measured.items()}}

    def start(self, coded: bool) -> tuple[Any, Model]:
        """Build the model and the optimizer; let connections open and kernels compile."""
        way, settings = EVERY[self.settings["method"]], self.settings
        model = Model(self.rank, grid_methods.shapes(*settings["size"], **settings["words"]))
        world = World(dist.group.WORLD, self.binding, loss_of)
        if coded:
            groups = [dist.new_group([r]) for r in range(self.world)]
            world = World(groups[self.rank], calibrate.nowhere("data", self.world), loss_of)
        step = grid_methods.start(world, way, model, coded)
        for _ in range(WARM_UP + max(2, way.steps)):
            step(None)
        return step, model

    def steps(self, step: Any, model: Model, rate: float | None, compute: float) -> dict[str, Any]:
        """Return what periods of steps took, at a rate."""
        measured, model.seconds = self.throttle(rate), compute
        count = EVERY[self.settings["method"]].steps
        if count == 1:
            self.period(step, 1)  # the connections find their pace
        periods, begin = [], time.perf_counter()
        while len(periods) < REPEATS:
            periods.append(self.period(step, count))
            if self.slowest(time.perf_counter() - begin) > LONGEST:
                break
        return {"measured": measured, "periods": periods}

    def period(self, step: Any, count: int) -> dict[str, Any]:
        """Take the steps of a period; return what they took."""
        dist.barrier()
        before, spent = namespaces.sent(), time.process_time()
        seconds = []
        with fn.ledger() as book:
            for _ in range(count):
                begin = time.perf_counter()
                step(None)
                seconds.append(time.perf_counter() - begin)
        spent = time.process_time() - spent
        payload, headers = (after - b for after, b in zip(namespaces.sent(), before, strict=True))
        return {"seconds": seconds, "processor": spent, "payload": payload, "headers": headers, "ledger": book.total}

    def run(self) -> None:
        """Measure one part after the other, each into a file of its own."""
        parts, method = self.settings["parts"], self.settings["method"]
        if method is not None:
            coded = CODING in parts
            step, model = self.start(coded)
        for name, rate in parts.items():
            if method is None:
                self.write(name, self.link(rate))
            else:
                self.write(name, self.steps(step, model, rate, 0.0 if coded else self.settings["compute"]))

    def write(self, part: str, found: dict[str, Any]) -> None:
        """Write what was measured; `grid.py` takes what all ranks have written."""
        place = list(self.settings["parts"]).index(part)  # a name such as "1 Gbit/s" is no name of a file
        (Path(self.settings["folder"]) / f"{self.rank}-{place}.json").write_text(json.dumps(found))


@contextmanager
def joined() -> Iterator[tuple[int, dict[str, Any]]]:
    """Take a core, and join the group. Yields: the number of this rank, and the settings that it was started with."""
    rank, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(1)
    store = f"file://{settings['folder']}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=settings["ranks"])
    yield rank, settings
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Join the group, measure, write."""
    with joined() as (rank, settings):
        Rank(rank, settings).run()


if __name__ == "__main__":
    main()
