"""Steps that are late and in time, over throttled links, with a wait in place of a GPU's computation, and beside it.

    python -m benchmarks.late --json benchmarks/results/late.json          # root, iproute2, two quiet cores; minutes
    python -m benchmarks.late --png docs/late.png                          # two timelines, as the planner predicts them

Two ranks in network namespaces, one core each, joined by a link of 100 Mbit/s or 1 Gbit/s. A step waits 300 ms, of
which the backward pass is two thirds, as `grid.py` does it. Three other measurements say what a late step should take:

    alone = its step without a wait             coding + communication + outer step
    local = the same where messages go nowhere  coding + outer step
    late  = at most 1.1 max(wait + local, alone)

With --compute the wait is a product of matrices on the same core instead, which coding then slows down.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tqdm import tqdm

import fn
from benchmarks.links import grid_methods, namespaces
from benchmarks.links.grid_rank import Model, Rank, joined
from benchmarks.measure import about, write
from fn.planner import traffic
from fn.planner.methods import methods
from fn.planner.network import Cost, network
from fn.planner.predict import plan
from fn.tools import calibrate

RATES = {"100 Mbit/s": 1e8, "1 Gbit/s": 1e9}
SIZE = (2, 256)
"""Layers and width of GPT-2's shapes: 1.6 million parameters beside the embeddings."""

WORDS = {"words": 2048, "context": 256}
WAIT, STEPS = 0.3, 10
MEMORY = 8e12
"""Bit/s of the memory of the device in the picture: an accelerator's."""



def labels(params: list[torch.Tensor]) -> list[str]:
    """Return which tensors are Muon's: matrices but the two embeddings, which come first."""
    return ["hidden" if p.ndim == 2 and i > 1 else "other" for i, p in enumerate(params)]


METHODS: dict[str, Any] = {
    "adamw": fn.adamw,
    "adamw, int4": partial(grid_methods.int4_gradients, eps=1e-8),
    "onebit_adam": partial(fn.onebit_adam, codec=fn.sign()),
    "muon, int8": partial(fn.muon, codec=fn.int8(), scale="rms_norm", labels=labels),
    "sign_muon": partial(fn.sign_muon, labels=labels),
}
PARTS = ("in time", "late", "alone", "local")


class Late(Rank):
    """A rank: one method, late or in time."""

    def measure(self, part: str, rate: float | None) -> dict[str, Any]:
        """Return the seconds of each step, of the slowest rank."""
        measured, model = self.throttle(rate), Model(self.rank, grid_methods.shapes(*SIZE, **WORDS))
        late, make = part != "in time", METHODS[self.settings["method"]]
        schedule = fn.every(1, delay=1, start=2) if late else fn.freeze_after(2)
        binding = calibrate.nowhere("data", self.world) if part == "local" else self.binding
        exact = self.settings["method"] == "adamw"
        if exact and not late:
            schedule = lambda step: fn.Phase.WARMUP  # noqa: E731
        with binding:
            made = partial(fn.late(make) if late else make, axis="data")
            opt = fn.Optimizer(model.parameters(), made, schedule=schedule, lr=1e-4, refuse_averaged=False)
        wait = WAIT if part in ("in time", "late") else 0.0
        model.seconds = 0.0 if self.settings["compute"] else wait
        product = torch.randn(512, 512)
        seconds = []
        for step in range(4 + STEPS):
            dist.barrier() if step == 4 else None
            begin = time.perf_counter()
            while self.settings["compute"] and wait and time.process_time() < self.until(wait, step):
                product @ product
            model(None).backward()
            opt.step()
            opt.zero_grad()
            seconds.append(time.perf_counter() - begin)
        opt.states  # noqa: B018  # what is on its way lands before the next part
        return {"measured": measured, "seconds": [self.slowest(x) for x in seconds[4:]]}

    def until(self, wait: float, step: int) -> float:
        """Return the processor time at which the computation of a step ends."""
        if getattr(self, "step", None) != step:
            self.step, self.end = step, time.process_time() + wait
        return self.end


def rank_main() -> None:
    """Measure all parts of a method."""
    with joined() as (number, settings):
        rank, found = Late(number, settings), {}
        for name, rate in settings["rates"].items():
            for part in PARTS:
                found[f"{name}, {part}"] = rank.measure(part, rate)
        if number == 0:
            Path(settings["folder"], "found.json").write_text(json.dumps(found))


def measure(method: str, compute: bool, loopback: bool, rates: list[str]) -> dict[str, Any]:
    """Start two ranks; return what the first one found."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        spaces = (None, None) if loopback else stack.enter_context(namespaces.pair(f"fn-late-{time.time_ns() % 10**6}"))
        settings = {
            "ranks": 2, "folder": str(folder), "switch": None, "delay": 0.0, "method": method, "compute": compute,
            "rates": {name: None if loopback else RATES[name] for name in rates},
        }  # fmt: skip
        started = []
        for rank, space in enumerate(spaces):
            log = stack.enter_context(open(folder / f"{rank}.log", "w+"))
            started.append((namespaces.start("benchmarks.late", rank, settings, space, log), log))
            stack.callback(started[-1][0].kill)
        for process, log in started:
            if process.wait(600):
                log.seek(0)
                tqdm.write(log.read()[-2000:], file=sys.stderr)
        path = folder / "found.json"
        return json.loads(path.read_text()) if path.exists() else {}


def table(points: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each method and rate: medians in seconds, and how long a late step is beside its formula."""
    rows = []
    for name, point in points.items():
        for rate in sorted({key.rpartition(", ")[0] for key in point["found"]}):
            median = {part: statistics.median(point["found"][f"{rate}, {part}"]["seconds"]) for part in PARTS}
            formula = max(WAIT + median["local"], median["alone"])
            rows.append({"method": name, "rate": rate, **median, "formula": formula, "ratio": median["late"] / formula})
    return rows


def predicted() -> dict[str, Any]:
    """Return what the planner says of `sign_muon` at the size of GPT-2 between two ranks, over 2 Gbit/s."""
    net, shapes = network(2, 1, Cost(0.0, 1e12), Cost(3e-5, 2e9)), grid_methods.shapes(12, 768)
    model = traffic.of_shapes(shapes, 4, [len(shape) == 2 and i > 1 for i, shape in enumerate(shapes)])
    made = plan(methods(model, net), net, WAIT, model.params, memory=MEMORY).of("sign_muon, late")
    return {"message": made.communication, "local": made.coding}


def draw(path: str) -> None:
    """Draw the two timelines of one method as the planner predicts them: three steps in time, and late."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    row = predicted()
    message, local = row["message"], row["local"]
    figure, axes = plt.subplots(figsize=(8, 2.6), layout="constrained")
    colours = {"computation": "#8da0cb", "message": "#fc8d62", "coding, step": "#66c2a5"}

    def bar(y: float, begin: float, length: float, what: str) -> None:
        axes.barh(y, length, left=begin, height=0.35, color=colours[what], edgecolor="white")

    for k in range(3):
        begin = k * (WAIT + message + local)
        for what, length in (("computation", WAIT), ("message", message), ("coding, step", local)):
            bar(3, begin, length, what)
            begin += length
        length = max(WAIT, message) + local
        bar(1.4, k * length, WAIT, "computation")
        bar(1.4, (k + 1) * length - local, local, "coding, step")
        bar(1, (k + 1) * length, message, "message")
    axes.set_yticks([3, 1.2], ["in time", "late"])
    axes.set_xlabel(f"seconds, predicted: sign_muon, GPT-2, 2 Gbit/s, two ranks, {WAIT} s of computation")
    handles = [mpl.patches.Patch(color=colour, label=what) for what, colour in colours.items()]
    axes.legend(handles=handles, loc="center right", frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=110)


def main() -> None:
    """Measure what is not known yet, and show it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--only", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD")
    add("--rates", nargs="+", default=list(RATES), choices=list(RATES))
    add("--compute", action="store_true", help="compute on the same core in place of the wait")
    add("--loopback", action="store_true", help="do not throttle; tries the script")
    add("--json", metavar="FILE")
    add("--png", metavar="FILE", help="draw the timelines that the planner predicts, and measure nothing")
    options = parser.parse_args()
    if options.png:
        draw(options.png)
        return
    path = Path(options.json) if options.json else None
    known = json.loads(path.read_text()) if path and path.exists() else {}
    kind = "compute" if options.compute else "wait"
    points = known.get(kind, {})
    for method in tqdm([name for name in options.only if name not in points]):
        if found := measure(method, options.compute, options.loopback, options.rates):
            points[method] = {"about": about(), "found": found}
            known[kind] = points
            if options.json:
                write(options.json, known)
    for row in table(points):
        numbers = "  ".join(f"{part} {row[part]:.3f}" for part in (*PARTS, "formula", "ratio"))
        print(f"{row['method']:12} {row['rate']:10}  {numbers}")


if __name__ == "__main__":
    rank_main() if len(sys.argv) == 3 and sys.argv[1].isdecimal() else main()
