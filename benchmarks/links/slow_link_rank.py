"""One rank of `slow_link.py`: it measures every contender on every rate, and writes what it saw to a JSON file.

Started by `slow_link.py`, inside a network namespace.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from train_lm import cut, read_standard_library

import fn
from benchmarks.devices import of_rank
from benchmarks.links import namespaces
from benchmarks.links.contenders import CONTENDERS, DDP, LR, NONE, OVERLAPPED, Batch, Step, World, build
from benchmarks.measure import synchronise
from fn.tools import calibrate

RATES: Mapping[str, float | None] = {
    "10 Mbit/s": 1e7, "100 Mbit/s": 1e8, "1 Gbit/s": 1e9, "10 Gbit/s": 1e10, "unthrottled": None,
}  # fmt: skip
COUNTED = 3
"""Steps of a turn that count; of a method with several kinds of steps one period."""

KEYS = ("seconds", "payload", "headers", "ledger")
SLOW = 2e8
"""Below this rate calibration sends nothing above 4 MiB."""


class Bench:
    """What a rank keeps while it measures. settings: the flags of `slow_link.py`."""

    def __init__(self, rank: int, settings: dict[str, Any], device: torch.device):
        self.rank, self.settings, self.device = rank, settings, device
        self.size = tuple(settings["model"])
        self.names = settings["only"] or list(CONTENDERS)
        self.text = read_standard_library()[0].to(device)
        self.draw = torch.Generator().manual_seed(rank)
        self.job = calibrate.Job(rank, dist.get_world_size(), dist.get_world_size(), device)
        mesh = dist.device_mesh.init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))
        self.together = World(dist.group.WORLD, fn.bind(mesh))

    def batch(self) -> Batch:
        """Return the rank's next batch."""
        count, context = self.settings["batch"], self.settings["context"]
        starts = torch.randint(len(self.text) - context, (count,), generator=self.draw)
        return cut(self.text, starts, context)

    def start(self, world: World, names: list[str]) -> dict[str, Step]:
        """Build contenders and let them take the steps in which connections open and kernels compile."""
        steps = {}
        for name in names:
            steps[name] = CONTENDERS[name].make(world, build(self.size, self.device), lr=LR)
            for _ in range(4):
                steps[name](self.batch())
        return steps

    def take(self, name: str, step: Step) -> tuple[float, ...]:
        """Take a step, or a period of a method with several kinds.

        Returns: per step its seconds, what left the interface, its headers, and the ledger's bytes.
        """
        count = CONTENDERS[name].steps
        batches = [self.batch() for _ in range(count)]
        dist.barrier()
        before = namespaces.sent()
        with fn.ledger() as book:
            synchronise(self.device)
            start = time.perf_counter()
            for batch in batches:
                step(batch)
            synchronise(self.device)
            seconds = time.perf_counter() - start
        dist.barrier()
        payload, headers = (after - b for after, b in zip(namespaces.sent(), before, strict=True))
        return seconds / count, payload / count, headers / count, book.total / count

    def measure(self, steps: dict[str, Step], rounds: int) -> dict[str, dict[str, list[float]]]:
        """Let all contenders take turns.

        What a turn begins with does not count: another contender had the caches and the link before, which in a
        training run nobody has.
        """
        found: dict[str, dict[str, list[float]]] = {name: {key: [] for key in KEYS} for name in steps}
        for _ in range(rounds):
            for name, step in steps.items():
                self.take(name, step)
                for values in [self.take(name, step) for _ in range(max(1, COUNTED // CONTENDERS[name].steps))]:
                    for key, value in zip(found[name], values, strict=True):
                        found[name][key].append(value)
        return found

    def without_wire(self) -> dict[str, float]:
        """Return the step of every contender when its messages go nowhere, which shows what coding costs."""
        groups = [dist.new_group([r]) for r in range(self.job.world)]
        nowhere = World(groups[self.rank], calibrate.nowhere("data", self.job.world))
        names = [name for name in self.names if not name.endswith(OVERLAPPED)]
        steps = self.start(nowhere, names)
        seconds = self.measure(steps, 2)
        return {name: statistics.median(found["seconds"]) for name, found in seconds.items()}

    def calibrated(self, rate: float | None) -> dict[str, dict[str, float]]:
        """Return alpha and beta of the collectives, as the planner measures them on a running job."""
        sizes = calibrate.SIZES if rate is None or rate > SLOW else calibrate.SIZES[:7]
        with self.together.binding:
            link = calibrate.measure(self.job, sizes, repeat=5)["data"]
        return {name: cost._asdict() for name, cost in link.measured.items()}

    def run(self) -> dict[str, Any]:
        """Measure everything."""
        throttled = self.settings["throttled"]
        result: dict[str, Any] = {"without wire": self.without_wire(), "rates": {}}
        gc.collect()
        steps = self.start(self.together, self.names)
        for name, rate in RATES.items():
            if name not in self.settings["rates"]:
                continue
            if throttled:
                namespaces.throttle(rate)
            calibrated, turns = self.calibrated(rate), self.measure(steps, self.settings["rounds"])
            result["rates"][name] = {"calibrated": calibrated, "turns": turns}
            self.say(f"{name}: done")
        model = build(self.size, self.device)
        result["shapes"] = [list(p.shape) for p in model.parameters()]
        return result

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.rank == 0:
            print(text, file=sys.stderr, flush=True)


def keep_to_one_core(rank: int) -> None:
    """Let a rank have a core of its own, as if it were another machine, where there are enough of them."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if rank < len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def main() -> None:
    """Join the group, measure, write."""
    rank, settings = int(sys.argv[1]), json.loads(sys.argv[2])
    keep_to_one_core(rank)
    torch.set_num_threads(1)
    device = of_rank(torch.device(settings["device"]), rank)
    store = f"file://{settings['folder']}/store"
    dist.init_process_group(settings["backend"], init_method=store, rank=rank, world_size=2)
    assert {NONE, DDP} <= set(settings["only"] or CONTENDERS)
    result = Bench(rank, settings, device).run()
    (Path(settings["folder"]) / f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
