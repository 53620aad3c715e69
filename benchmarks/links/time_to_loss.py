"""Time to loss over a slow link: four ranks train a language model of 0.85 million parameters.

    run="python -m benchmarks.links.time_to_loss --json benchmarks/results/time_to_loss.json"
    $run --tune                                # learning rates
    $run                                       # the clock: 50 minutes
    $run --no-clock                            # more seeds, no clock
    $run --draw --png docs/time_to_loss.png

Ranks are processes in network namespaces on one switch. `tc` shapes both directions of every link, which is verified.
At 100 Mbit/s each method trains in full, and every so many steps rank 0 looks at the loss of what all ranks agree on
while the clock stands still. On other links steps are only timed, and the curve is computed: the losses by step from
100 Mbit/s, the seconds from the timed steps.

Learning rates are a factor of 1.8 apart, until the best is at no edge, on a split and a seed that are not shown. These
shorter runs, and those of further seeds, are the same processes over loopback, unthrottled, and no clock counts.

What the file holds is not repeated, so it may be stopped and started. Needs root, iproute2 and two quiet cores, all but
for --tune, --no-clock and --draw.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks.atlas.methods import ADAM_RATE
from benchmarks.atlas.paired import rate_at, search
from benchmarks.atlas.tasks import fresh
from benchmarks.links import namespaces
from benchmarks.links import time_to_loss_report as report
from benchmarks.links.grid_methods import WAYS
from benchmarks.links.time_to_loss_rank import EXACT, METHODS, SIZE, TINY, Part
from benchmarks.links.time_to_loss_report import FULL, RATES, chosen, key
from benchmarks.measure import about, write
from fn.planner.traffic import Model

RANK = "benchmarks.links.time_to_loss_rank"
LIMIT = 3600
"""Seconds after which a method is given up."""

COMPUTE = 0.2
"""Seconds of a step that are no communication, for the estimate alone."""

PERIODS = 2
"""Rounds that are timed."""

STOP = threading.Event()
"""Set when the script is told to end: ranks are killed, and what they have written is kept."""


class Task(NamedTuple):
    """What processes are started for."""

    method: str
    parts: tuple[Part, ...]


def parse() -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, what = parser.add_argument, parser.add_mutually_exclusive_group()
    what.add_argument("--tune", action="store_true", help="search learning rates; no clock, no throttle")
    what.add_argument("--no-clock", action="store_true", help="train with further seeds; no clock, no throttle")
    what.add_argument("--draw", action="store_true", help="run nothing")
    add("--only", nargs="+", default=list(METHODS), choices=list(METHODS), metavar="METHOD", help="names of methods")
    add("--rates", nargs="+", default=list(RATES), choices=list(RATES), metavar="RATE", help="of links")
    add("--seeds", nargs="+", type=int, default=[2, 3], metavar="SEED", help="of --no-clock; the clock's is 1")
    add("--steps", type=int, default=1500, help="of a run in full")
    add("--tune-steps", type=int, default=250, help="of a run that chooses a rate")
    add("--looks", type=int, default=50, help="steps from one look at the loss to the next")
    add("--short", type=int, default=50, help="steps of a run that is only timed; of rounds: two rounds")
    add("--ranks", type=int, default=4)
    add("--jobs", type=int, default=1, help="runs at a time of --tune and --no-clock, each of so many processes")
    add("--untuned", action="store_true", help="train with the rate at which a search begins; tries the script")
    add("--minutes", type=float, default=math.inf, help="start nothing after so many")
    add("--loopback", action="store_true", help="do not throttle; tries the script")
    add("--tiny", action="store_true", help="one layer of width 32; tries the script")
    add("--json", metavar="FILE")
    add("--png", metavar="FILE")
    return parser.parse_args()


def tasks(options: argparse.Namespace, result: dict[str, Any], method: str) -> list[Task]:
    """Return what is missing of a method, as far as it is known: a search may want more."""
    own = METHODS[method]
    if options.tune:
        tried = result["tuned"].get(method, {})
        losses = {float(lr): math.inf if loss is None else loss for lr, loss in tried.items()}
        rates = [rate_at(ADAM_RATE, place) for place in search(ADAM_RATE, losses).missing]
        steps = own.times * options.tune_steps
        return [Task(method, (Part(f"rate {lr}", None, steps, steps, lr, 0),)) for lr in rates]
    lr = ADAM_RATE if options.untuned else chosen(result, method)
    if lr is None:
        sys.exit(f"time_to_loss: {method} has no learning rate yet; run --tune first, with the same --json")
    in_full = own.times * options.steps
    if options.no_clock:
        parts = [Part(f"seed {seed}", None, in_full, in_full, lr, seed) for seed in options.seeds]
        return [Task(method, (part,)) for part in parts if key(method, part.name) not in result["seeds"]]
    parts = []
    short = max(options.short, EXACT + PERIODS * own.steps) if own.steps > 1 else options.short
    for name in options.rates:
        rate = None if options.loopback else RATES[name]
        steps, looks = (in_full, options.looks) if name == FULL else (short, None)
        parts.append(Part(name, rate, steps, looks, lr, 1))
    missing = tuple(part for part in parts if key(method, part.name) not in result["runs"])
    return [Task(method, missing)] if missing else []


def seconds(task: Task, ranks: int) -> float:
    """Return about how many seconds a task takes, by the bytes that the planner knows of."""
    model = Model(tuple(tuple(p.shape) for p in fresh(0, SIZE).values()))

    def step(way: str, rate: float | None) -> float:
        planned = WAYS[way].method(model, ranks)
        assert planned is not None
        return COMPUTE + (8 * planned.size / rate if rate else 0.0)

    total, method = 10.0, METHODS[task.method]
    for part in task.parts:
        exact = method.exact(part.steps) if part.looks else 0 if method.make is None else EXACT
        total += exact * step("DDP float32", part.rate) + (part.steps - exact) * step(method.way, part.rate)
        total += 3.0 * part.steps / part.looks if part.looks else 0.0
    return total


class Progress:
    """Steps of all tasks, for the bar, told from several threads."""

    def __init__(self, bar: Any):
        self.bar, self.lock = bar, threading.Lock()

    def add(self, steps: int) -> None:
        """Count further steps."""
        with self.lock:
            if steps:
                self.bar.update(steps)


def run(task: Task, options: argparse.Namespace, progress: Progress) -> dict[str, Any]:
    """Start the ranks of a task; return by their names the parts that all ranks wrote, however they ended."""
    begin, throttled = time.monotonic(), any(part.rate for part in task.parts)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        name = f"fn-{os.getpid()}"
        spaces = stack.enter_context(namespaces.star(name, options.ranks)) if throttled else None
        settings = {
            "folder": str(folder), "switch": name, "ranks": options.ranks, "tiny": options.tiny,
            "method": task.method, "parts": task.parts, "rehearse": not (options.tune or options.no_clock),
        }  # fmt: skip
        processes = []
        for rank in range(options.ranks):
            log = stack.enter_context(open(folder / f"{rank}.log", "w+"))
            space = spaces[rank] if spaces else None
            processes.append((namespaces.start(RANK, rank, settings, space, log), log))
            stack.callback(processes[-1][0].wait)
            stack.callback(processes[-1][0].kill)
        told = 0
        codes: list[int | None] = [None] * options.ranks
        while None in codes and not any(codes) and time.monotonic() < begin + LIMIT and not STOP.wait(0.2):
            codes = [process.poll() for process, _ in processes]
            text = (folder / "steps").read_text() if (folder / "steps").exists() else ""
            progress.add(int(text or told) - told)  # it may be empty while it is written
            told = int(text or told)
        time.sleep(1.0 if any(codes) else 0.0)  # the others say what they saw
        for rank, (process, log) in enumerate(processes):
            if (code := process.poll()) != 0 and not STOP.is_set():
                log.seek(0)
                ended = "had not ended" if code is None else f"ended with {code}"
                tqdm.write(f"{task.method}, rank {rank} {ended}: {log.read()[-2000:]}", file=sys.stderr)
        found = {}
        for place, part in enumerate(task.parts):
            files = [folder / f"{rank}-{place}.json" for rank in range(options.ranks)]
            if all(file.exists() for file in files):
                found[part.name] = report.together(part, [json.loads(file.read_text()) for file in files])
        progress.add(sum(part.steps for part in task.parts) - told)
    return found


def keep(result: dict[str, Any], options: argparse.Namespace, task: Task, found: dict[str, Any]) -> list[str]:
    """Put what a task found into the result; return the names of what it did not find."""
    for part in task.parts:
        if part.name not in found:
            continue
        point = found[part.name]
        if options.tune:
            result["tuned"].setdefault(task.method, {})[str(part.lr)] = point["looks"][-1]["tuning"]
        elif options.no_clock:
            result["seeds"][key(task.method, part.name)] = {**point, "about": about()}
        else:
            result["runs"][key(task.method, part.name)] = {**point, "about": about()}
    write(options.json, result)
    return [key(task.method, part.name) for part in task.parts if part.name not in found]


def take(options: argparse.Namespace, result: dict[str, Any]) -> list[str]:
    """Run what is missing, the clock's runs one after the other; return the names of what failed."""
    jobs = options.jobs if options.tune or options.no_clock else 1
    failed: list[str] = []
    tried: set[Task] = set()
    end = time.monotonic() + 60 * options.minutes
    with ThreadPoolExecutor(jobs) as pool, tqdm(unit="step") as bar:
        progress, going = Progress(bar), dict[Future[dict[str, Any]], Task]()
        while True:
            todo = [task for method in options.only for task in tasks(options, result, method) if task not in tried]
            if not bar.n and not going:
                about_minutes = sum(seconds(task, options.ranks) for task in todo) / 60 / jobs
                tqdm.write(f"{len(todo)} tasks, about {about_minutes:.0f} minutes", file=sys.stderr)
            running = [part for task in going.values() for part in task.parts]
            waiting = [part for task in todo for part in task.parts]
            bar.total = max(bar.n, sum(part.steps for part in (*running, *waiting)) + bar.n)
            if time.monotonic() > end and todo:
                tqdm.write(f"--minutes: {len(todo)} tasks are left, as far as is known", file=sys.stderr)
                todo = []
            for task in todo[: jobs - len(going)]:
                tried.add(task)
                going[pool.submit(run, task, options, progress)] = task
                bar.set_postfix_str(f"{task.method}, {', '.join(part.name for part in task.parts)}")
            if not going:
                return failed
            try:
                ended = wait(going, return_when=FIRST_COMPLETED).done
            except BaseException:
                STOP.set()
                for future, task in going.items():
                    keep(result, options, task, future.result())
                raise
            for future in ended:
                failed += keep(result, options, going.pop(future), future.result())


def main() -> None:
    """Run what is missing, print the tables, write the files."""
    options = parse()
    clocked = not (options.tune or options.no_clock or options.draw)
    if clocked and not options.loopback and (reason := namespaces.missing()):
        sys.exit(f"time_to_loss: there is no throttled link here ({reason}); --loopback tries the script without one")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("time_to_loss: terminated"))  # and nothing is left behind
    path = Path(options.json) if options.json else None
    result: dict[str, Any] = {"tuned": {}, "runs": {}, "seeds": {}}
    if path and path.exists():
        result = json.loads(path.read_text())
    if not options.draw:
        wanted = {
            "steps": options.steps, "tune_steps": options.tune_steps, "ranks": options.ranks,
            "size": list(TINY if options.tiny else SIZE),
        }  # fmt: skip
        wanted |= {"throttled": not options.loopback} if clocked else {}
        if any(result.get(name, value) != value for name, value in wanted.items()):
            sys.exit(f"time_to_loss: {path} was measured with other settings; give another file to --json")
        result |= wanted
        failed = take(options, result)
    print(report.table(result))
    if options.png:
        report.draw(result, options.png)
    if not options.draw and failed:
        sys.exit(f"time_to_loss: {'; '.join(failed)} failed")


if __name__ == "__main__":
    main()
