"""What a slow link costs at the size of GPT-2, with and without codes: bandwidths x ranks x methods.

    python -m benchmarks.links.grid --json benchmarks/results/grid.json --png docs/grid.png
    python -m benchmarks.links.grid --json benchmarks/results/grid.json --minutes 30        # goes on where it stopped

Tensors, codecs, error feedback and links are real: ranks are processes in network namespaces, whose veth pairs `tc`
shapes in both directions, verified before each point. **A GPU's computation is a wait** of `--compute` seconds, behind
which gradients of GPT-2's shapes become ready one after the other. The ranks share this machine's cores, so what `fn`
spends on coding is an upper limit for a machine that trains on a GPU.

A point is one method on one link. The points of a method on as many ranks are measured one after the other by the same
processes, then written; what is written is not measured again (but by `--again`). Needs root, iproute2, two quiet cores
and, for four ranks, 20 GB of memory.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks.links import far_apart, grid_report, namespaces
from benchmarks.links.grid_methods import GPT2, NONE, WAYS, size_of
from benchmarks.measure import about, write

RANK = "benchmarks.links.grid_rank"
RATES = {"50 Mbit/s": 5e7, "200 Mbit/s": 2e8, "1 Gbit/s": 1e9}
FAR = {"20 Mbit/s": 2e7}
"""What `sites.py` measures at."""

LIMIT = 1200
"""Seconds after which a task is given up."""

WORDS = ("words", "context")


class Task(NamedTuple):
    """What processes are started for: points of a method on so many ranks; without a method, the links' own.

    parts: what they measure: "coding", in which messages go nowhere, and the names of rates.
    """

    ranks: int
    method: str | None
    size: tuple[int, int]
    parts: tuple[str, ...]

    def name(self, part: str) -> str:
        """Return the key of a point's result."""
        size = None if self.size == GPT2 else "half the size"
        return ", ".join(word for word in (self.method or "link", size, f"{self.ranks} ranks", part) if word)


def tasks(options: argparse.Namespace, known: Container[str]) -> Iterator[Task]:
    """Yield what is not known yet, in the order in which it is measured: the links, then each method."""
    rates = {2: tuple(options.rates), 4: tuple(options.four)}
    rates = {ranks: some for ranks, some in rates.items() if some}
    every = [Task(ranks, None, GPT2, some) for ranks, some in rates.items()]
    for method in options.only:
        for ranks, some in rates.items():
            # What methods at half the size are compared with has that size, too.
            sizes = {size_of(way, ranks) for way in WAYS.values()} if method == NONE else {size_of(WAYS[method], ranks)}
            # Each in processes of its own: two models with their states would be too much memory.
            every += [Task(ranks, method, size, parts) for size in sorted(sizes) for parts in (("coding",), some)]
    for task in every:
        missing = tuple(part for part in task.parts if task.name(part) not in known)
        if missing:
            yield task._replace(parts=missing)


def parse() -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rates", nargs="+", default=list(RATES), choices=list(RATES), help="of two ranks")
    add("--four", nargs="*", default=["200 Mbit/s"], choices=list(RATES), help="rates of four ranks")
    add("--only", nargs="+", default=list(WAYS), choices=list(WAYS), metavar="METHOD", help="names of methods (all)")
    add("--compute", type=float, default=0.3, metavar="SECONDS", help="of the wait in a step (default: 0.3)")
    add("--minutes", type=float, help="start nothing after so many")
    add("--again", action="store_true", help="measure points that are there, too")
    add("--loopback", action="store_true", help="do not throttle; tries the script")
    add("--words", type=int, nargs=2, default=(50257, 1024), metavar=("WORDS", "CONTEXT"), help="of the embeddings")
    add("--tiny", action="store_true", help="one layer of width 32; tries the script")
    add("--json", metavar="FILE")
    add("--png", metavar="FILE")
    return parser.parse_args()


def measure(task: Task, options: argparse.Namespace, delay: float = 0.0) -> dict[str, Any]:
    """Start the ranks of a task; return the points that they measured before they ended, however they ended.

    Args: delay: seconds that a message is on its way.
    """
    begin, words = time.monotonic(), dict(zip(WORDS, options.words, strict=True))
    size = (1, 32) if options.tiny else task.size
    rates = {part: None if options.loopback else {**RATES, **FAR}.get(part) for part in task.parts}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        name = f"fn-{os.getpid()}"
        spaces = None
        if not options.loopback:
            far = far_apart.star(name, task.ranks, delay) if delay else namespaces.star(name, task.ranks)
            spaces = stack.enter_context(far)
        settings = {
            **task._asdict(), "folder": str(folder), "switch": None if delay else name, "parts": rates, "size": size,
            "compute": options.compute, "words": words, "delay": delay,
        }  # fmt: skip
        processes = []
        for rank in range(task.ranks):
            log = stack.enter_context(open(folder / f"{rank}.log", "w+"))
            space = spaces[rank] if spaces else None
            processes.append((namespaces.start(RANK, rank, settings, space, log), log))
            stack.callback(processes[-1][0].kill)
        for process, _ in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(1.0, LIMIT - (time.monotonic() - begin)))
        for rank, (process, log) in enumerate(processes):
            if process.poll() != 0:
                log.seek(0)
                ended = f"ended with {process.poll()}" if process.poll() is not None else f"takes more than {LIMIT} s"
                tqdm.write(f"rank {rank} {ended}: {log.read()[-2000:]}", file=sys.stderr)
        found = {}
        for place, part in enumerate(task.parts):
            files = [folder / f"{rank}-{place}.json" for rank in range(task.ranks)]
            if all(file.exists() for file in files):
                seen = [json.loads(file.read_text()) for file in files]
                what = {"ranks": task.ranks, "method": task.method, "size": size, "part": part}
                found[task.name(part)] = {**what, "about": about(), "seen": seen}
    return found


def main() -> None:
    """Measure what is missing, print the tables, write the files."""
    options = parse()
    reason = None if options.loopback else namespaces.missing()
    if reason:
        sys.exit(f"grid: there is no throttled link here ({reason}); --loopback tries the script without one")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("grid: terminated"))  # and nothing is left behind
    path = Path(options.json) if options.json else None
    result = json.loads(path.read_text()) if path and path.exists() else {"points": {}}
    words = dict(zip(WORDS, options.words, strict=True))
    wanted = {"compute": options.compute, "throttled": not options.loopback, "words": words}
    if result["points"] and any(result[key] != value for key, value in wanted.items()):
        sys.exit(f"grid: {path} was measured with other settings; give another file to --json")
    result |= wanted
    todo = list(tasks(options, () if options.again else result["points"]))
    failed = []
    with tqdm(total=sum(len(task.parts) for task in todo), unit="point") as bar:
        for task in todo:
            if options.minutes is not None and bar.format_dict["elapsed"] > 60 * options.minutes:
                tqdm.write(f"--minutes: {bar.total - bar.n} points are left", file=sys.stderr)
                break
            bar.set_postfix_str(f"{task.method or 'links'}, {task.ranks} ranks")
            found = measure(task, options)
            result["points"] |= found
            failed += [name for name in map(task.name, task.parts) if name not in found]
            bar.update(len(task.parts))
            write(options.json, result)
    print(grid_report.table(result))
    if options.png:
        grid_report.draw(result, options.png)
    if failed:
        sys.exit(f"grid: {'; '.join(failed)} failed")


if __name__ == "__main__":
    main()
