"""Measures how many steps AdamW needs for a method's loss, by whole runs, on seeds that the atlas does not show.

    OMP_NUM_THREADS=1 python -m benchmarks.atlas.same_loss --json benchmarks/results/same_loss.json

AdamW trains the atlas's language model for 0.5, 0.7, 1, 1.4 and 2 times the atlas's steps; each run has its own
schedule of the learning rate, and no run is looked into. That gives, for each seed, AdamW's loss over steps. A method's
ratio is the steps of its own whole run over the steps in which AdamW has its final loss, paired by seed. A method that
might end below AdamW's longest run is compared by a run of half the steps. Rates are the atlas's, tuned on other seeds.
Between sites no step is exact: there rounds begin with the first step, unlike those of the atlas.

Runs that the file holds are not taken again, so the script may be stopped and started. `--package` writes the ratios to
where `python -m fn plan` finds them; those of methods that `longer` has measured are of its longest runs.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from scipy.stats import t as student
from tqdm import tqdm

import fn
from benchmarks.atlas import runs as atlas
from benchmarks.atlas.methods import METHODS, Method, rounds
from benchmarks.atlas.summary import BASE, MAIN, Row, chosen_rate
from benchmarks.atlas.tasks import TASKS
from benchmarks.atlas.train import Run, train
from benchmarks.measure import ROOT, about, commit, markdown
from fn.errors import expected

STEPS, WORKERS = TASKS[MAIN].steps, TASKS[MAIN].workers
SEEDS = (21, 22, 23, 24, 25)
LENGTHS = tuple(round(share * STEPS) for share in (0.5, 0.7, 1, 1.4, 2))
"""Steps of AdamW's runs."""

PACKAGE, LONGER = ROOT / "fn" / "planner" / "same_loss.json", ROOT / "benchmarks" / "results" / "longer.json"

_muloco = METHODS["muloco, 2 bits"]
COMPARED: dict[str, tuple[Method, str, int]] = {
    "adamw, int4 gradients": (METHODS["adamw, int4"], "adamw, int4", STEPS),
    "sign_muon": (METHODS["sign_muon"], "sign_muon", STEPS // 2),
    "muloco, int8": (
        _muloco._replace(make=partial(_muloco.make, codec=fn.int8()), schedule=rounds(0.0)), "muloco, 2 bits", STEPS
    ),
    "loco_adamw, int4, int8 back": (METHODS["loco_adamw, int8 back"], "loco_adamw, int8 back", STEPS),
    "onebit_adam, 1 bit": (METHODS["onebit_adam, int8 first"], "onebit_adam, int8 first", STEPS),
}  # fmt: skip
"""Name in the planner -> the method, the row of the atlas whose tuned rate it takes, and the steps of its run."""


def wanted() -> Iterator[tuple[Run, Method]]:
    """Yield all runs, seed by seed."""
    rows = atlas.read(atlas.FULL)
    for seed in SEEDS:
        for steps in LENGTHS:
            yield Run(MAIN, BASE, WORKERS, seed, steps, _rate(rows, BASE)), METHODS[BASE]
        for name, (method, tuned, steps) in COMPARED.items():
            yield Run(MAIN, name, WORKERS, seed, steps, _rate(rows, tuned)), method


def _rate(rows: Sequence[Row], method: str) -> float:
    lr = chosen_rate(rows, MAIN, method)
    assert lr is not None, f"the atlas lacks the rate of {method}"
    return lr


def steps_of_adamw(loss: float, curve: Sequence[tuple[int, float]]) -> float:
    """Return the steps in which AdamW reaches a loss, on a line between its runs over the logarithm of steps.

    Returns: infinity below the loss of the longest run, 0 above that of the shortest one.

    >>> steps_of_adamw(2.5, [(100, 3.0), (400, 2.0)])
    200.0
    """
    (shortest, highest), *longer = sorted(curve)
    if loss > highest:
        return 0.0
    for steps, own in longer:
        if own >= highest:  # a longer run that ended higher gives no loss that a shorter one does not give
            continue
        if own <= loss:
            share = (highest - loss) / (highest - own)
            return math.exp(math.log(shortest) * (1 - share) + math.log(steps) * share)
        shortest, highest = steps, own
    return math.inf


def ratios(rows: Sequence[Row], name: str) -> list[float]:
    """Return a method's steps over those that AdamW needs for its loss, for each seed with all runs of both.

    Raises: ValueError where a loss is beyond AdamW's, whose ratio would be a bound and no measurement.
    """
    found = []
    for row in (row for row in rows if row["method"] == name):
        curve = [(r["steps"], r["loss"]) for r in rows if r["method"] == BASE and r["seed"] == row["seed"]]
        if len(curve) == len(LENGTHS):
            steps = steps_of_adamw(row["loss"], curve)
            if not 0 < steps < math.inf:
                losses = sorted(loss for _, loss in curve)
                wanted = f"a loss between {losses[0]} and {losses[-1]}"
                raise ValueError(expected(f"{name}, seed {row['seed']}", wanted, f"{row['loss']}"))
            found.append(row["steps"] / steps)
    return found


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios and its 95 % interval (Student's t over their logarithms).

    >>> [round(x, 3) for x in interval([0.5, 0.5, 0.5])]
    [0.5, 0.5, 0.5]
    """
    logs = [math.log(x) for x in values]
    mean = statistics.fmean(logs)
    half = float(student.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def warm_up(method: Method, steps: int = 10**4) -> float:
    """Return the part of a long run that is a method's warm-up."""
    schedule = method.schedule(steps)
    share = sum(schedule(step) is fn.Phase.WARMUP for step in range(steps)) / steps
    return round(share, 2)  # a warm-up of ten steps is none


def package(rows: Sequence[Row]) -> dict[str, Any]:
    """Return what the planner reads: by method the ratio with its interval, and the warm-up that belongs to its run.

    Seeds count whose runs are all there. A method that `longer` has measured has the ratio of its longest runs there.
    """
    from benchmarks.atlas import longer  # which imports this module

    found, long = {}, atlas.read(LONGER)
    done = {(row["method"], row["seed"], row["steps"]) for row in rows}
    seeds = [s for s in SEEDS if all((run.method, run.seed, run.steps) in done for run, _ in wanted() if run.seed == s)]
    rows = [row for row in rows if row["seed"] in seeds and row["method"] in {BASE, *COMPARED}]
    for name, (method, _, steps) in COMPARED.items():
        values = ratios(rows, name)
        if name in longer.STARTS:
            values, steps = longer.ratios(long, name, longer.LENGTHS[-1]), longer.LENGTHS[-1]
        ratio, low, high = (float(f"{x:.3g}") for x in interval(values))
        found[name] = {
            "ratio": ratio, "interval": [low, high], "steps": steps, "seeds": len(values),
            "warm_up": warm_up(method), "warm_up_as": method.warm_up,
        }  # fmt: skip
    measured = sorted({row["commit"] for row in [*rows, *long]})
    params = sum(p.numel() for p in TASKS[MAIN].make().params(0).values())
    return {
        "commit": ", ".join(measured), "model": f"the atlas's {MAIN}", "params": params, "steps": STEPS,
        "seeds": seeds, "methods": found,
    }  # fmt: skip


def table() -> str:
    """Return the ratios of docs/choosing.md, as the planner has them."""
    found = json.loads(PACKAGE.read_text())
    lines = []
    for name, own in found["methods"].items():
        low, high = own["interval"]
        warm_up = f"{own['warm_up']:.0%}" if own["warm_up"] else ""
        ratio = f"{own['ratio']:.2f}", f"{low:.2f} – {high:.2f}"
        lines.append([name, *ratio, str(own["steps"]), str(own["seeds"]), warm_up])
    head = "method | its steps / AdamW's to the same loss | 95 % | steps of its run | seeds | warm-up"
    facts = f"*Commit {found['commit']}; {found['params']:,} parameters, 8 workers.*"
    return f"{markdown(head, lines)}\n\n{facts}"


def main() -> None:
    """Take what is missing, and write each run as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where runs are kept")
    parser.add_argument("--package", action="store_true", help="write the ratios for the planner, and run nothing")
    args = parser.parse_args()
    rows = atlas.read(args.json)
    if args.package:
        PACKAGE.write_text(json.dumps(package(rows), indent=1) + "\n")
        return
    done = {Run(*(row[name] for name in Run._fields)) for row in rows}
    for run, method in tqdm([pair for pair in wanted() if pair[0] not in done], desc="runs"):
        rows.append({**train(run, method=method), "commit": commit()})
        lines = ",\n".join(json.dumps(row) for row in rows)
        part = args.json.with_suffix(".part")
        part.write_text(f'{{"about": {json.dumps(about())},\n"rows": [\n{lines}\n]}}\n')
        part.replace(args.json)  # the file is whole at any time
    for name in COMPARED:
        if len(values := ratios(rows, name)) > 1:
            print(name, "{:.2f} ({:.2f} to {:.2f})".format(*interval(values)), len(values), "seeds")


if __name__ == "__main__":
    main()
