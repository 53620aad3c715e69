"""1-bit Adam's first hour, cell by cell: decay of the second moment, blocks of signs, freeze, and clamp of the step.

    OMP_NUM_THREADS=1 python -m benchmarks.first_hour_grid --json benchmarks/results/first_hour_grid.json

A cell is `fn.onebit_adam` with a b2, a `sign(block=)`, a share of the run before the freeze, and a `max_step`, which
is 1.0 where no other is named. b2 "rule" needs no schedule: b2_t = min(0.999, 1 - 2 / (t + 1)) in the t-th step of the
warm-up. The rival is `fn.adamw` as it
comes, at the same rate and seed, at 0.001 and at AdamW's best rate; its runs are `first_hour`'s. Three tasks: both
texts and plain digits, each with two batches.

The worst case of a cell is the largest of its 12 mean gaps (task, batch, rate), in parts of the bound that the first
hour has for the task: 0.05 nats, or 0.02 of accuracy. All cells have two seeds. The four with the smallest worst case
on these have five, and are tried in the other methods that freeze a second moment. Runs go to the file as they come,
the most telling cells first, so one that is stopped goes on where it was, and `--hours` of a core end it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

import fn
from benchmarks import first_hour
from benchmarks.atlas import runs as atlas
from benchmarks.atlas.methods import Method, Schedule, freeze
from benchmarks.atlas.paired import Difference, difference
from benchmarks.atlas.summary import by_seed
from benchmarks.atlas.summary import runs as runs_of
from benchmarks.atlas.train import Run
from benchmarks.first_hour import BASE, STEPS, TASKS, WORKERS, Rows
from benchmarks.measure import about, markdown

THREE = ("names", "language model", "digits")
OF_SIZE = [[(task, TASKS[task].batches[size]) for task in THREE] for size in (0, 1)]
TABLES = [table for tables in OF_SIZE for table in tables]
"""Tasks and their batches, the smaller ones first."""

RULE = "rule"
CHOOSING, SEEDS, BEST = (1, 2), (1, 2, 3, 4, 5), 4
"""Seeds of all cells, seeds of the best, and how many these are."""


class Cell(NamedTuple):
    """A cell of the grid. block: None for a scale a tensor. share: of the run, before the freeze; None: as it comes."""

    b2: float | str
    block: int | None
    share: float | None
    max_step: float = 1.0

    def of(self, method: str) -> str:
        """Return the name of a method with this cell's settings."""
        settings = f"{method}, b2 {self.b2}, block {str(self.block).lower()}"
        settings += "" if self.share is None else f", frozen at {self.share}"
        return settings if self.max_step == 1.0 else f"{settings}, max_step {self.max_step}"


B2S: tuple[float | str, ...] = (RULE, 0.95, 0.98, 0.999)
BLOCKS = (64, None, 128, 256)
SHARES = (0.2, 0.1, 0.5)
LOOSE = 3.0
ALL = [Cell(*cell) for cell in product(B2S, BLOCKS, SHARES)]
ALL += [Cell(*cell, LOOSE) for cell in product((0.95, 0.999), (64, None), SHARES)]


def late(cell: Cell) -> int:
    """Return how late a cell's turn is: those with more of what lists begin with are first."""
    if cell.max_step == LOOSE and cell.block == BLOCKS[0]:
        return 0
    return B2S.index(cell.b2) // 2 + BLOCKS.index(cell.block) // 2 + int(cell.share != SHARES[0])


CELLS = sorted(ALL, key=late)


def of_age(t: int) -> float:
    """Return the rule's b2 in the t-th step of the warm-up, from 1 on."""
    return min(0.999, 1 - 2 / (t + 1))


def with_same_share(b2: float, t: int) -> float:
    """Return the decay with which the t-th square counts 1 - b2 in a second moment that is bias-corrected.

    Those moments count it (1 - b) / (1 - b^t), and the rule needs no correction: its first b2 is 0.

    >>> round(with_same_share(of_age(2), 2), 6), round((1 - 0.9) / (1 - 0.9**3), 6)
    (0.5, 0.369004)
    >>> round(with_same_share(1 - 0.369004, 3), 4)
    0.9
    """
    low, high = 0.0, 1.0 - 1e-9
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if (1 - middle) / (1 - middle**t) > 1 - b2 else (low, middle)
    return low


def by_rule(make: Callable[..., fn.Transform], corrected: bool) -> fn.Transform:
    """Return a method whose b2 follows the rule in the warm-up. It counts the steps itself: it is for one run.

    Args: make: b2 -> the method. corrected: whether its second moment is bias-corrected.
    """
    age = 0

    def warmup(updates: Any, state: Any, params: Any, /) -> tuple[Any, Any]:
        nonlocal age
        age += 1
        b2 = with_same_share(of_age(age), age) if corrected else of_age(age)
        after: tuple[Any, Any] = make(b2=b2).update(fn.Phase.WARMUP)(updates, state, params)
        return after

    return make(b2=of_age(STEPS))._replace(warmup_update=warmup)


def make_cell(cell: Cell, make: Callable[..., fn.Transform], lr: Any, axis: str) -> fn.Transform:
    """Return a method of `fn` with a cell's b2, block and clamp."""
    own, adam = partial(make, lr, axis=axis, codec=fn.sign(cell.block)), make is not fn.onebit_lamb
    if adam:  # steps of LAMB have a clamp of their own
        own = partial(own, max_step=cell.max_step)
    return by_rule(own, corrected=adam) if cell.b2 == RULE else own(b2=cell.b2)


def short(share: float) -> Callable[[int], Schedule]:
    """Return 0/1 Adam's schedule of a short run, frozen after a share of it."""
    return lambda steps: fn.zero_one_schedule(round(share * steps), 16, max(1, steps // 12), 4)


MAIN = "onebit_adam"
OTHERS = {
    "zero_one_adam": None,
    "zero_one_adam, a short run": short,
    "sharded_onebit_adam": freeze,
    "onebit_lamb": freeze,
}
"""Methods that freeze a second moment, and their schedules; None: the one that it has if none is given."""


def method_of(name: str, cell: Cell) -> tuple[str, Method]:
    """Return a method with a cell's settings, and its name."""
    cell = cell._replace(max_step=1.0) if name == "onebit_lamb" else cell  # whose name says nothing of a clamp
    own = first_hour.METHODS[name]._replace(make=partial(make_cell, cell, first_hour.named(name)))
    if (schedule := {MAIN: freeze, **OTHERS}[name]) is None or cell.share is None:
        return cell._replace(share=None).of(name), own
    return cell.of(name), own._replace(schedule=schedule(cell.share))


OWN_B2 = {f"{BASE}, b2 {b2}": b2 for b2 in (0.95, 0.98)}
"""AdamW with other decays: what stands beside the gaps, and decides nothing."""

METHODS = {name: first_hour.METHODS[BASE]._replace(make=partial(fn.adamw, b2=b2)) for name, b2 in OWN_B2.items()}
METHODS |= dict(method_of(name, cell) for cell in CELLS for name in (MAIN, *OTHERS))


class Found(NamedTuple):
    """What was run. rows: of the grid. base: of AdamW as it comes, in the first hour's file."""

    rows: Rows
    base: Rows

    def best_rate(self, task: str, batch: int) -> float:
        """Return AdamW's best rate."""
        rate, missing = first_hour.tuned_rate(self.base, task, batch)
        if rate is None:
            raise LookupError(f"expected AdamW's search on {task} in the first hour's file, but it lacks {missing}")
        return rate

    def rates(self, method: str, task: str, batch: int) -> list[tuple[float, float]]:
        """Return the rates of a method, and that of AdamW which each is compared with."""
        best, default = self.best_rate(task, batch), first_hour.default_rate(BASE)
        own = first_hour.default_rate(method), first_hour.recommended_rate(method, best)
        return [(lr, default if lr == default else best) for lr in dict.fromkeys(own)]

    def scores(self, method: str, task: str, batch: int, lr: float, seeds: tuple[int, ...]) -> dict[int, float]:
        """Return what the first hour's table shows of runs, by seed."""
        rows = self.base if method == BASE else self.rows
        own = runs_of(rows, task=task, method=method, batch=batch, lr=lr)
        return by_seed([row for row in own if row["seed"] in seeds], TASKS[task].score)

    def gaps(self, method: str, seeds: tuple[int, ...] = SEEDS, base: str = BASE) -> dict[tuple[str, int], Difference]:
        """Return how far a method is from AdamW on each table, at the worse of its two rates."""
        found = {}
        for task, batch in TABLES:
            pairs = self.rates(method, task, batch)
            own = [
                difference(self.scores(method, task, batch, lr, seeds), self.scores(base, task, batch, rival, seeds))
                for lr, rival in pairs
            ]
            if None not in own:
                found[task, batch] = max((gap for gap in own if gap), key=partial(parts_of_bound, task))
        return found

    def worst(self, method: str, seeds: tuple[int, ...] = SEEDS) -> float:
        """Return the worst case of a method on the tables that it has run on, in parts of the bound."""
        gaps = self.gaps(method, seeds)
        return max((parts_of_bound(task, gap) for (task, _), gap in gaps.items()), default=math.inf)

    def missing(self) -> Iterator[tuple[Run, int]]:
        """Yield the runs that are missing, as far as they are known."""
        done = {(Run(*(row[name] for name in Run._fields)), row["batch"]) for row in self.rows}
        for method, seeds, tables in self.wanted():
            for seed, (task, batch) in product(seeds, tables):
                for lr, _ in self.rates(method, task, batch):
                    if (run := (Run(task, method, WORKERS, seed, STEPS, lr), batch)) not in done:
                        yield run

    def wanted(self) -> Iterator[tuple[str, tuple[int, ...], list[tuple[str, int]]]]:
        """Yield methods, their seeds and tables. The best cells are known when all others have run."""
        for turn in sorted({late(cell) for cell in CELLS}):
            names = [cell.of(MAIN) for cell in CELLS if late(cell) == turn]
            yield from ((name, CHOOSING, tables) for tables in OF_SIZE for name in names)
        yield from ((name, CHOOSING, TABLES) for name in OWN_B2)
        best = sorted(CELLS, key=lambda cell: self.worst(cell.of(MAIN), CHOOSING))[:BEST]
        for cell, name in product(best, (MAIN, *OTHERS)):
            yield method_of(name, cell)[0], SEEDS, TABLES


def parts_of_bound(task: str, gap: Difference) -> float:
    """Return a mean gap in parts of the bound of a task; infinity for one that is not finite."""
    return gap.mean / TASKS[task].bound if math.isfinite(gap.mean) else math.inf


def table(found: Found) -> str:
    """Return the mean gaps of all methods on the tables that they have run on, the smallest worst case first."""
    lines = []
    for method in sorted(dict.fromkeys(row["method"] for row in found.rows), key=found.worst):
        gaps, seeds = found.gaps(method), {row["seed"] for row in runs_of(found.rows, method=method)}
        cells = [f"{gaps[key].mean:+.3f}" if key in gaps else "" for key in TABLES]
        lines.append([method, str(len(seeds)), *cells, f"{found.worst(method):.2f}"])
    head = ["method", "seeds", *(f"{task}, {batch} a step" for task, batch in TABLES), "worst, in bounds"]
    return markdown(" | ".join(head), lines)


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=Path, default=Path("benchmarks/results/first_hour_grid.json"), metavar="FILE")
    add("--base", type=Path, default=Path("benchmarks/results/first_hour.json"), metavar="FILE", help="AdamW's runs")
    add("--hours", type=float, default=6.0, help="of a core, all runs of the file together, at most")
    add("--show", action="store_true", help="take no runs")
    args = parser.parse_args()
    found = Found(atlas.read(args.json), atlas.read(args.base))
    seconds = math.fsum(row["core_seconds"] for row in found.rows)
    with tqdm(desc="runs", disable=args.show) as bar:
        while not args.show and seconds < 3600 * args.hours and (run := next(found.missing(), None)):
            start = time.process_time()
            row = first_hour.take(*run, METHODS[run[0].method])
            found.rows.append({**row, "core_seconds": round(time.process_time() - start, 1)})
            seconds += found.rows[-1]["core_seconds"]
            lines = ",\n".join(map(json.dumps, found.rows))
            facts = json.dumps({**about(), "minutes": round(seconds / 60, 1)})  # of one core, of all runs
            part = args.json.with_suffix(".part")  # so that the file is whole at any time
            part.write_text(f'{{"about": {facts},\n"rows": [\n{lines}\n]}}\n')
            part.replace(args.json)
            bar.set_postfix_str(f"{row['task']}, {row['method']}")
            bar.update()
    print(table(found))


if __name__ == "__main__":
    main()
