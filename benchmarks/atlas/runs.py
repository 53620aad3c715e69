"""What `atlas.py` runs: the search of each method's learning rate, then its runs with the seeds that tables show.

Every named optimizer of `fn`, averages in codes in front of AdamW, and the baselines that they have to beat train a
language model, fine-tune it on another kind of text, and train on digits, with simulated workers. Every method is given
the same tuning: learning rates a factor of 1.8 apart, until the best one is at no edge, on a split and a seed that no
table shows. The best one runs on the other seeds, and their losses on a third split are compared with AdamW's seed by
seed. Runs that the file holds are not taken again, so it may be stopped and started; after a change of a method take
its rows out.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import active_children, get_context
from pathlib import Path

from tqdm import tqdm

from benchmarks.atlas import picture as atlas_picture
from benchmarks.atlas.methods import CORE, METHODS, Method
from benchmarks.atlas.summary import MAIN, TUNED_ON, Row, chosen_rate, missing_runs, rates_to_try, summary, table
from benchmarks.atlas.tasks import TASKS
from benchmarks.atlas.train import Run, train
from benchmarks.measure import ROOT, machine

FULL = ROOT / "benchmarks" / "results" / "atlas.json"
"""The committed run, in which the quick one looks up learning rates."""

QUICK_STEPS = 152
"""Of which 8 % and a number of rounds are all."""


def read(path: Path) -> list[Row]:
    """Return the rows of a file; none if there is none."""
    return json.loads(path.read_text())["rows"] if path.exists() else []


def write(path: Path, rows: list[Row]) -> None:
    """Write all rows, one a line. The file is whole at any time."""
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(f'{{"about": {json.dumps(machine())},\n"rows": [\n{lines}\n]}}\n')
    part.replace(path)


def wanted(rows: list[Row], task: str, method: str) -> Iterator[Run]:
    """Yield what a full atlas lacks of a method on a task, as far as that is known: first the search of its rate."""
    setting = TASKS[task]
    if task not in METHODS[method].tasks:
        return
    for lr in rates_to_try(rows, task, method):
        yield from (Run(task, method, TUNED_ON, seed, setting.steps, lr) for seed in setting.choosing)
    if (lr := chosen_rate(rows, task, method)) is not None:
        yield from (Run(task, method, setting.workers, seed, setting.steps, lr) for seed in setting.seeds)


def quick(rows: list[Row], method: str) -> Run:
    """Return the one run of a quick atlas, with the learning rate of the committed one."""
    setting = TASKS[MAIN]
    lr = chosen_rate(rows, MAIN, method) or METHODS[method].rate
    return Run(MAIN, method, setting.workers, setting.seeds[0], QUICK_STEPS, lr)


def take(args: argparse.Namespace, path: Path) -> list[Row]:
    """Take the runs that are missing, and write each as soon as it is there."""
    rows, committed = read(path), read(FULL)
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool, tqdm(desc="runs") as bar:
        going: dict[Future[Row], Run] = {}
        try:
            while True:
                done = {Run(*(row[name] for name in Run._fields)) for row in rows} | set(going.values())
                pairs = [(task, method) for task in args.tasks for method in args.only]
                runs = [run for pair in pairs for run in wanted(rows, *pair)]
                if args.quick:
                    runs = [quick(committed, method) for method in args.only]
                missing = [run for run in dict.fromkeys(runs) if run not in done]
                bar.total = len(rows) + len(going) + len(missing)  # that are known; a search may want more
                for run in missing[: args.jobs - len(going)]:
                    going[pool.submit(train, run)] = run
                if not going:
                    return rows
                for ended in wait(going, return_when=FIRST_COMPLETED).done:
                    del going[ended]
                    rows.append(ended.result())
                    write(path, rows)
                    bar.set_postfix_str(f"{rows[-1]['task']}, {rows[-1]['method']}")
                bar.update(len(rows) - bar.n)
        except BaseException:  # else whoever stops it waits for runs that nobody writes down
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()
            raise


def fill(description: str, path: Path, pairs: Iterable[tuple[Run, Method]]) -> list[Row]:
    """Take the runs that a file lacks, one after the other; return its rows. The command line has the file's name.

    Args: description: of the script. path: of the file, if none is named. pairs: the runs, and what makes each.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", type=Path, default=path)
    parser.add_argument("--show", action="store_true", help="take no runs")
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK", help="of runs")
    args = parser.parse_args()
    rows = read(args.json)
    done = {tuple(row[name] for name in Run._fields) for row in rows}
    missing = [(run, method) for run, method in pairs if run not in done and run.task in args.tasks]
    for run, method in tqdm([] if args.show else missing, desc="runs"):
        rows.append(train(run, method=method))
        write(args.json, rows)
    return rows


def main() -> None:
    """Take the runs, print the tables, draw the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help=f"{MAIN}, {QUICK_STEPS} steps, one seed (default)")
    size.add_argument("--full", action="store_true", help="all tasks, all rates and seeds")
    add("--json", type=Path, metavar="FILE", help="where rows are kept, in --out by default")
    add("--out", type=Path, default=Path("out"), metavar="FOLDER", help="where the pictures go")
    add("--only", nargs="+", choices=list(METHODS), metavar="METHOD", help="some methods")
    add("--contrib", action="store_true", help="the methods of fn.contrib, too")
    add("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK", help="of --full")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, each on one core")
    args = parser.parse_args()
    args.quick = not args.full
    args.only = args.only or list(METHODS if args.contrib else CORE)
    if args.full and "digits" in args.tasks:
        importlib.import_module("sklearn")  # now, and not after an hour: pip install 'fn-optim[notebooks]'
    path = args.json or args.out / ("atlas.json" if args.full else "atlas_quick.json")
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("atlas: terminated; start it again to go on"))
    rows = take(args, path)
    own = [row for row in rows if row["method"] in args.only]
    reported = [row for row in own if row["seed"] in TASKS[row["task"]].seeds]
    shown = dict.fromkeys((row["task"], row["workers"], row["steps"]) for row in reported)
    for task, workers, steps in shown:
        print("", f"{task}, {workers} workers, {steps} steps", "", table(summary(own, task, workers, steps)), sep="\n")
        if not args.quick and (missing := missing_runs(rows, task)):
            print(f"\n{missing} runs are missing")
    print("", *atlas_picture.draw(own, args.out), sep="\n")


if __name__ == "__main__":
    main()
