"""Measures which outer step fits a run of so many rounds, and what a rule and the defaults lose to it.

    OMP_NUM_THREADS=1 python -m benchmarks.atlas.rounds --json benchmarks/results/rounds.json --hours 0.1
    python -m benchmarks.atlas.rounds --json benchmarks/results/rounds.json --device cuda   # a cell in a minute or two
    python -m benchmarks.atlas.rounds --json benchmarks/results/rounds.json --show

DiLoCo, MuLoCo and their kin train the atlas's language model for 8, 25 and 100 rounds of 8 or 32 steps, with 4 and 8
workers, without a warm-up. In each cell of that grid the outer rate and momentum are chosen on one split and seed; what
the rule of `rounds=`, the defaults and the paper's values lose to them is measured on other seeds and another split,
paired by seed. The inner rate is AdamW's of the atlas times 0.6, as docstrings advise.

Runs with one inner rate are trained together: a leading dimension of the params holds them, and `vmap` runs their steps
as one. Runs that the file holds are not taken again, so the script may be stopped and started; `--hours` ends it before
the next group of runs.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map
from tqdm import tqdm

import fn
from benchmarks.atlas import runs as atlas
from benchmarks.atlas.methods import ADAM, labels
from benchmarks.atlas.paired import difference, rate_at, search
from benchmarks.atlas.summary import Row
from benchmarks.atlas.tasks import Params, Task, language_model, rate
from benchmarks.atlas.train import finite
from benchmarks.measure import commit, markdown
from fn.local_optimizers import OF_DILOCO, OF_MULOCO


class Cell(NamedTuple):
    """What a user knows of a run before it starts."""

    method: str
    rounds: int
    h: int
    workers: int


class Run(NamedTuple):
    """What a run is, and so its key among those that are done."""

    method: str
    rounds: int
    h: int
    workers: int
    seed: int
    lr: float
    outer_lr: float
    outer_momentum: float

    @property
    def cell(self) -> Cell:
        """Return what belongs to the cell."""
        return Cell(*self[:4])


def cell_of(row: Row) -> Cell:
    """Return the cell of a row of the file."""
    return Cell(*(row[name] for name in Cell._fields))


_muloco = partial(fn.muloco, labels=labels, weight_decay=0.1)

METHODS: dict[str, Callable[..., fn.Transform]] = {
    "diloco": partial(fn.diloco, **ADAM),
    "muloco": _muloco,
    "muloco, int8": partial(_muloco, codec=fn.int8()),
    "muloco, int4": partial(_muloco, codec=fn.int4()),
    "muloco, 2 bits": partial(_muloco, codec=fn.bins(4, 6)),
}
"""(lr, axis, outer_lr, outer_momentum) -> transform."""


def trained(
    runs: Sequence[Run],
    task: Task,
    schedule: Callable[[int], Any] | None = None,
    steps: int = 0,
    makes: Mapping[str, Callable[..., fn.Transform]] | None = None,
    watch: Callable[[int, Params], None] = lambda step, params: None,
    device: str = "cpu",
) -> Iterator[tuple[Run, Params]]:
    """Train runs that differ in seeds, rates and outer steps only, all at once; yield each with its ranks' mean params.

    Args: schedule, steps: if not those of the runs' rounds. makes: methods other than `METHODS`. watch: is given
            the number of steps and the params (runs, ranks, ...) after each. device: on which they train; the params
            that are yielded are on the CPU.
    """
    torch.set_num_threads(1)
    runs = sorted(runs, key=lambda run: (run.outer_lr, run.outer_momentum))
    method, rounds, h, workers, *_ = runs[0]
    schedule, steps = schedule or fn.every(h), steps or rounds * h
    parts = []  # what makes transforms, and their places among the runs
    for pair in dict.fromkeys(run[-2:] for run in runs):
        places = [k for k, run in enumerate(runs) if run[-2:] == pair]
        make = partial((makes or METHODS)[method], axis="data", outer_lr=pair[0], outer_momentum=pair[1])
        parts.append((make, slice(places[0], places[-1] + 1)))
    seeds = list(dict.fromkeys(run.seed for run in runs))
    own = torch.tensor([seeds.index(run.seed) for run in runs])  # (runs,)
    draws = [task.batches(seed, workers) for seed in seeds]
    params = {name: p.to(device) for name, p in stacked([task.params(run.seed) for run in runs]).items()}  # (runs, ...)
    first = parts[0][0]
    init = first(0.0).init
    dims = fn.rank_dims(init(task.params(runs[0].seed)))
    state = vmap(fn.simulate(init, "data", workers, in_dims=None, out_dims=dims))(params)
    params = {name: p[:, None].repeat(1, workers, *[1] * (p.ndim - 1)) for name, p in params.items()}

    def turn(make: Any, when: Any, lr: Tensor, *trained: Any) -> Any:
        tx, places = make(lr), {"in_dims": (0, dims, 0), "out_dims": (0, dims)}

        def step(params: Any, state: Any, batch: Any) -> Any:
            updates, state = tx.update(when)(grad(task.loss)(params, batch), state, params)
            return fn.apply_updates(params, updates), state

        return fn.simulate(step, "data", workers, **places)(*trained)

    def taken(make: Any, when: Any, *given: Any) -> Any:
        return vmap(partial(turn, make, when))(*given)

    local = Replayed(taken) if device == "cuda" else taken
    # Codes copy the lengths of their segments from the host, which a graph cannot record.
    exchange = local if method in RULES else taken
    with sdpa_kernel(SDPBackend.MATH):  # the fused attention cannot be batched over workers
        for t in range(steps):
            batch = tuple(torch.stack(part)[own].to(device) for part in zip(*(draw() for draw in draws), strict=True))
            lr, when = torch.tensor([run.lr * rate(t, steps) for run in runs]).to(device), schedule(t)
            given = lr, params, state, batch
            if when in (fn.Round(), fn.Phase.LOCAL, fn.Phase.WARMUP):  # which does not look at the outer step
                params, state = local(first, when, *given)
            else:
                ended = [
                    exchange(make, when, *tree_map(lambda x, part=part: x[part], given)) for make, part in parts
                ]
                params, state = tree_map(lambda *x: torch.cat(x), *ended)
            watch(t + 1, params)
    for k, run in enumerate(runs):
        yield run, {name: p[k].mean(0).cpu() for name, p in params.items()}


class Replayed:
    """Call a function of two keys and tensors: for the second time record its kernels, and later replay them.

    Small models spend a step on launching kernels, and a CUDA graph launches them at once. What is returned is
    overwritten by the next call.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.graphs: dict[Any, Any] = {}

    def __call__(self, make: Any, when: Any, *given: Any) -> Any:
        """Return what the function returns."""
        key = make, when
        if key not in self.graphs:  # which compiles kernels
            self.graphs[key] = None
            return self.function(*key, *given)
        if self.graphs[key] is None:
            graph, held = torch.cuda.CUDAGraph(), tree_map(torch.clone, given)
            with torch.cuda.graph(graph):
                result = self.function(*key, *held)
            self.graphs[key] = graph, held, result
        graph, held, result = self.graphs[key]
        tree_map(lambda old, new: old.copy_(new), held, given)
        graph.replay()
        return result


def train(runs: Sequence[Run], task: Task | None = None, device: str = "cpu") -> list[Row]:
    """Train as `trained` does; return a row for each run. Losses are None where they are not finite."""
    task, start = task or language_model(), time.perf_counter()
    scores = [(run, task.score(params)) for run, params in trained(runs, task, device=device)]
    facts = {"device": device, "seconds": round((time.perf_counter() - start) / len(runs), 1), "commit": commit()}
    return [
        {**run._asdict(), "tuning": finite(score.tuning), "loss": finite(score.loss), **facts} for run, score in scores
    ]


def stacked(trees: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return dicts of tensors as one with a leading dimension."""
    return {name: torch.stack([tree[name] for tree in trees]) for name in trees[0]}


LR = 0.00324
"""AdamW's rate in the atlas times 0.6."""

RULES = {"diloco": OF_DILOCO, "muloco": OF_MULOCO}

ROUNDS, LENGTHS, WORKERS = (8, 25, 100), (8, 32), (4, 8)

SETTINGS = ((1.0, 0.0), (1.5, 0.0), (1.0, 0.3), (1.0, 0.6), (0.9, 0.6), (0.9, 0.8), (0.7, 0.6), (0.7, 0.9))
"""Outer rates and momenta that are tried."""

CHOOSING, SEEDS = (0,), (31, 32, 33, 34)

EXACT_START = 0.00972
"""The rate that searches begin at for exact Muon, and for MuLoCo beside it; the atlas chose it for Muon."""

LONGER = tuple(Cell("diloco", n, h, 4) for n, h in ((300, 8), (1000, 8), (300, 32)))
"""Cells beyond the grid, with half of the seeds and three outer steps."""

LANES = {"cpu": 64, "cuda": 512}
"""Workers of all runs that are trained at once; more are hardly faster."""


def cells(method: str) -> list[Cell]:
    """Return the grid, the cheapest cells first."""
    grid = [Cell(method, n, h, w) for n in ROUNDS for h in LENGTHS for w in WORKERS]
    return sorted(grid, key=lambda cell: (cell.rounds * cell.h, cell.workers))


def losses(
    rows: Sequence[Row], cell: Cell, setting: tuple[float, float], split: str, lr: float = LR
) -> dict[int, float]:
    """Return the losses of a cell's runs with an outer rate and momentum, by seed; NaN where one diverged."""
    own = [row for row in rows if (*cell, lr, *setting) == tuple(row[k] for k in Run._fields if k != "seed")]
    return {row["seed"]: math.nan if row[split] is None else row[split] for row in own}


def chosen(rows: Sequence[Row], cell: Cell) -> tuple[float, float] | None:
    """Return the outer rate and momentum that are lowest on the split and seeds that choose; None before all ran."""
    found = {}
    for setting in SETTINGS:
        own = losses(rows, cell, setting, "tuning")
        if not set(CHOOSING) <= set(own):
            return None
        mean = statistics.fmean(own[seed] for seed in CHOOSING)
        found[setting] = mean if math.isfinite(mean) else math.inf
    return min(found, key=lambda setting: found[setting])


def contenders(rows: Sequence[Row], cell: Cell) -> dict[str, tuple[float, float]]:
    """Return the outer rates and momenta that a cell compares, by what they are; none before they are chosen."""
    if (best := chosen(rows, cell)) is None:
        return {}
    rule = RULES[cell.method]
    return {"tuned": best, "`rounds=`": rule(cell.rounds), "default": rule(1), "paper": rule(10**4)}


def groups(rows: Sequence[Row], wanted: Sequence[Cell], fresh: bool, device: str = "cpu") -> Iterator[list[Run]]:
    """Yield the groups of runs that cells lack, as far as they are known."""
    done = {tuple(row[name] for name in Run._fields) for row in rows}
    for cell in wanted:
        settings, seeds = (SETTINGS, CHOOSING)
        if fresh:
            settings, seeds = tuple(dict.fromkeys(contenders(rows, cell).values())), SEEDS
        runs = [Run(*cell, seed, LR, *setting) for seed in seeds for setting in settings]
        missing = [run for run in runs if run not in done]
        most = LANES[device] // cell.workers
        yield from (missing[k : k + most] for k in range(0, len(missing), most))


def exact_runs(rows: Sequence[Row], rounds: int, h: int) -> dict[str, list[Run]]:
    """Return the runs of exact Muon, which is the outer average of one worker, and of MuLoCo in codes with 8 workers.

    Args: rows: in which inner rates are chosen, in full precision; before one is, the runs that choose it are returned.
    """
    codes = [name for name in METHODS if name not in RULES]
    runs = {}
    for names, workers, setting in ((["muon"], 1, (1.0, 0.0)), (["muloco", *codes], WORKERS[-1], OF_MULOCO(rounds))):
        cell, seed = Cell("muloco", rounds, h, workers), CHOOSING[0]
        tried = {row["lr"] for row in rows if cell_of(row) == cell}
        tuning = {lr: losses(rows, cell, setting, "tuning", lr) for lr in tried}
        found = search(EXACT_START, {lr: by_seed[seed] for lr, by_seed in tuning.items() if seed in by_seed})
        if found.chosen is None:
            runs[names[0]] = [Run(*cell, seed, rate_at(EXACT_START, place), *setting) for place in found.missing]
            continue
        lr = rate_at(EXACT_START, found.chosen)
        for name in names:
            runs[name] = [Run("muloco" if name == "muon" else name, *cell[1:], seed, lr, *setting) for seed in SEEDS]
    return runs


def beside_exact(rows: Sequence[Row]) -> str:
    """Return how far MuLoCo with 8 workers, in codes too, is from exact Muon."""
    names, lines = [name for name in METHODS if name.startswith("muloco")], []
    for rounds in sorted({row["rounds"] for row in rows if row["workers"] == 1}):
        for h in LENGTHS:
            runs = exact_runs(rows, rounds, h)
            by_name = {
                name: losses(rows, own[0].cell, own[0][-2:], "loss", own[0].lr) for name, own in runs.items()
            }
            base = {seed: loss for seed, loss in by_name["muon"].items() if seed in SEEDS}
            if base:
                gaps = [difference(by_name.get(name, {}), base) for name in names]
                spelt = ["" if gap is None else gap.bold() for gap in gaps]
                lines.append([str(rounds), str(h), f"{statistics.fmean(base.values()):.3f}", *spelt])
    return markdown(" | ".join(["rounds", "H", "exact Muon", *names]), lines)


def table(rows: Sequence[Row]) -> str:
    """Return what each cell chose, and how far the others' losses are from that on fresh seeds.

    In all cells of the grid `rounds=` is the default, so that one column says both.
    """
    lines = []
    on_gpu = {cell_of(row) for row in rows if row.get("device") == "cuda"}
    # Another version of Python there has another text, so that a cell is of one device.
    rows = [row for row in rows if (row.get("device") == "cuda") == (cell_of(row) in on_gpu)]
    for method, n, h in product(RULES, ROUNDS, LENGTHS):
        line = [method, str(n), str(h)]
        for cell in (Cell(method, n, h, workers) for workers in WORKERS):
            if (best := chosen(rows, cell)) is None:
                line += [""] * 3
                continue
            compared = contenders(rows, cell)
            base = losses(rows, cell, best, "loss")
            base = {seed: base[seed] for seed in SEEDS if seed in base}
            line.append(f"{statistics.fmean(base.values()):.3f} at {best[0]:g} / {best[1]:g}" if base else "")
            for setting in (compared["`rounds=`"], compared["paper"]):
                gap = difference(losses(rows, cell, setting, "loss"), base)
                line.append("chosen" if setting == best else "" if gap is None else f"{gap:.3f}")
        lines.append(line)
    of = (x for n in WORKERS for x in (f"{n} workers, tuned", "default", "the paper's"))
    return markdown(" | ".join(["method", "rounds", "H", *of]), lines)


def tried(rows: Sequence[Row]) -> str:
    """Return how far each outer rate and momentum is from the best of its cell, where they are chosen."""
    lines = []
    for setting in SETTINGS:
        line = [f"{setting[0]:g} and {setting[1]:g}"]
        for method in RULES:
            gaps = []
            for cell in cells(method):
                found = {s: losses(rows, cell, s, "tuning") for s in SETTINGS}
                means = {s: statistics.fmean(x[seed] for seed in CHOOSING) for s, x in found.items()}
                gaps.append(means[setting] - min(x for x in means.values() if math.isfinite(x)))
            line += [f"{max(gaps):.3f}", f"{statistics.fmean(gaps):.3f}"]
        lines.append(line)
    head = ["outer rate and momentum", *(f"{name}, {x}" for name in RULES for x in ("at worst", "on average"))]
    return markdown(" | ".join(head), lines)


def longer(rows: Sequence[Row]) -> str:
    """Return how far other outer steps end above the default in runs that are longer than the grid's, by seed."""
    own = [row for row in rows if row["rounds"] > max(ROUNDS) and row["method"] == "diloco"]
    default, lines = RULES["diloco"](1), []
    settings = [s for s in dict.fromkeys((row["outer_lr"], row["outer_momentum"]) for row in own) if s != default]
    for cell in dict.fromkeys(map(cell_of, own)):
        base = losses(own, cell, default, "loss")
        for seed, loss in sorted(base.items()):
            found = [losses(own, cell, setting, "loss").get(seed) for setting in settings]
            gaps = ["" if x is None else f"{x - loss:+.3f}" for x in found]
            lines.append([*map(str, cell), str(seed), f"{loss:.3f}", *gaps])
    names = ["method", "rounds", "H", "workers", "seed", "1 / 0.3", *(f"{s[0]:.3g} / {s[1]:.2g}" for s in settings)]
    return markdown(" | ".join(names), lines)


def main() -> None:
    """Take the runs that are missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=Path, default=Path("benchmarks/results/rounds.json"), metavar="FILE", help="where rows are kept")
    add("--hours", type=float, default=math.inf, metavar="X", help="begin no group of runs after so many hours")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="on which models train")
    add("--show", action="store_true", help="take no runs")
    add("--fresh", action="store_true", help="only the runs of the seeds that the table shows, of cells that chose")
    add("--methods", nargs="+", choices=list(RULES), default=list(RULES), metavar="METHOD")
    add("--exact", action="store_true", help="instead of the grid, MuLoCo in codes beside exact Muon, with 8 workers")
    add("--longer", action="store_true", help="instead of the grid, the longer runs of DiLoCo")
    add("--rounds", nargs="+", type=int, default=list(ROUNDS), metavar="N", help="cells of so many rounds")
    add("--steps", nargs="+", type=int, default=list(LENGTHS), metavar="H", help="cells of so many steps a round")
    add("--workers", nargs="+", type=int, default=list(WORKERS), metavar="W", help="cells of so many workers")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"], end = "1", time.monotonic() + 3600 * args.hours
    rows = atlas.read(args.json)
    wanted = [
        cell for method in args.methods for cell in cells(method)
        if cell.rounds in args.rounds and cell.h in args.steps and cell.workers in args.workers
    ]
    for rounds, h in ((n, h) for n in args.rounds for h in args.steps if args.exact):
        while time.monotonic() < end:
            done = {tuple(row[name] for name in Run._fields) for row in rows}
            groups_of = [[run for run in own if run not in done] for own in exact_runs(rows, rounds, h).values()]
            if not any(groups_of):
                break
            rows += train(next(filter(None, groups_of)), device=args.device)
            atlas.write(args.json, rows)
    for cell in LONGER if args.longer and not args.show else ():
        done = {tuple(row[name] for name in Run._fields) for row in rows}
        pairs = ((1.0, 0.3), (0.85, 0.6), (0.7, 0.9))
        runs = [Run(*cell, seed, LR, *pair) for seed in SEEDS[:2] for pair in pairs]
        if (group := [run for run in runs if run not in done]) and time.monotonic() < end:
            rows += train(group, device=args.device)
            atlas.write(args.json, rows)
    for fresh in (False, True) if not args.exact and not args.longer else ():
        if args.show or (args.fresh and not fresh):
            continue
        for group in tqdm(list(groups(rows, wanted, fresh, args.device))):
            if time.monotonic() > end:
                break
            rows += train(group, device=args.device)
            atlas.write(args.json, rows)
    print(table(rows), longer(rows), beside_exact(rows), sep="\n\n")


if __name__ == "__main__":
    main()
