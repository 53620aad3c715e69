"""One atlas of all methods: what each costs and what it loses, on the same models, data, seeds and tokens.

    python benchmarks/atlas.py --quick                                 # 4 workers, one seed; or `make atlas`
    python benchmarks/atlas.py --full --json benchmarks/atlas.json --out docs

Every named optimizer of `fn`, and averages in codes in front of AdamW, train a language model, fine-tune it on another
kind of text, and train on digits, with simulated workers. Every method is given the same tuning: three learning rates
on seed 0 with 4 workers. The best one runs on all seeds, and on 8 workers for the language model. Runs that the JSON
file holds are not taken again, so it may be stopped and started; after a change of a method start with a new file.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import active_children, get_context
from pathlib import Path

import atlas_picture
from atlas_methods import METHODS
from atlas_summary import MAIN, TUNED_ON, Row, best, summary, table
from atlas_tasks import TASKS
from atlas_train import Run, train
from measure import machine
from tqdm import tqdm

FULL = Path(__file__).with_name("atlas.json")
"""The committed run, in which the quick one looks up learning rates."""

SEEDS = (0, 1, 2)
QUICK_STEPS = 152
"""Of which 8 % and a number of rounds are all."""


def read(path: Path) -> list[Row]:
    """Return the rows of a file, none if there is none."""
    return json.loads(path.read_text())["rows"] if path.exists() else []


def wanted(rows: list[Row], task: str, method: str, seeds: list[int]) -> Iterator[Run]:
    """Yield what a full atlas has of a method on a task, as far as that is known: first the tuning, then the rest."""
    steps = TASKS[task][1]
    for rate in METHODS[method].rates:
        yield Run(task, method, TUNED_ON, 0, steps, rate)
    lr = best(rows, task, method, steps)
    if lr is not None:
        for workers in (4, 8) if task == MAIN else (4,):
            yield from (Run(task, method, workers, seed, steps, lr) for seed in seeds)


def quick(rows: list[Row], method: str) -> Run:
    """Return the one run of a quick atlas, with the learning rate of the committed one."""
    lr = best(rows, MAIN, method, TASKS[MAIN][1]) or METHODS[method].rates[1]
    return Run(MAIN, method, 4, 0, QUICK_STEPS, lr)


def take(args: argparse.Namespace, path: Path) -> list[Row]:
    """Take the runs that are missing, and write each to the file as soon as it is there."""
    rows, committed = read(path), read(FULL)
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        while True:  # the second time round the learning rates are known
            done = {Run(*(row[name] for name in Run._fields)) for row in rows}
            pairs = [(task, method) for task in args.tasks for method in args.only]
            runs = [run for pair in pairs for run in wanted(rows, *pair, args.seeds)]
            missing = dict.fromkeys(runs if args.full else [quick(committed, method) for method in args.only])
            missing = [run for run in missing if run not in done]
            if not missing:
                return rows
            bar = tqdm(as_completed([pool.submit(train, run) for run in missing]), total=len(missing), desc="runs")
            try:
                for found in bar:
                    rows.append(found.result())
                    bar.set_postfix_str(f"{rows[-1]['task']}, {rows[-1]['method']}")
                    write(path, rows)
            except BaseException:  # else whoever stops it waits for runs that nobody writes down
                pool.shutdown(wait=False, cancel_futures=True)
                for process in active_children():
                    process.terminate()
                raise


def write(path: Path, rows: list[Row]) -> None:
    """Write all rows, one a line, so that the file is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    part = path.with_suffix(".part")
    part.write_text(f'{{"about": {json.dumps(machine())},\n"rows": [\n{lines}\n]}}\n')
    part.replace(path)


def main() -> None:
    """Take the runs, print the tables, draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help=f"{MAIN}, {QUICK_STEPS} steps, one seed (default)")
    size.add_argument("--full", action="store_true", help="all tasks, tuning and seeds")
    add("--json", type=Path, metavar="FILE", help="where rows are kept (out/atlas_quick.json or out/atlas.json)")
    add("--out", type=Path, default=Path("out"), metavar="FOLDER", help="where the pictures go")
    add("--only", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD", help="some methods")
    add("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK", help="of --full")
    add("--seeds", nargs="+", type=int, default=list(SEEDS), help="of --full")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, each on one core")
    args = parser.parse_args()
    if args.full and "digits" in args.tasks:
        importlib.import_module("sklearn")  # now, and not after an hour: pip install 'fn-optim[notebooks]'
    path = args.json or args.out / ("atlas.json" if args.full else "atlas_quick.json")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("atlas: terminated; start it again to go on"))
    rows = take(args, path)
    for of in dict.fromkeys((row["task"], row["workers"], row["steps"]) for row in rows):
        print("", "{}, {} workers, {} steps".format(*of), "", table(summary(rows, *of)), sep="\n")
    print("", *atlas_picture.draw(rows, args.out), sep="\n")


if __name__ == "__main__":
    main()
