"""Measures what benchmarks/README.md reports, and writes its tables anew from JSON. Everything around them stays.

    python benchmarks/report.py                            # the tables, from the JSON that is there
    python benchmarks/report.py --measure                  # what has no JSON yet, then the tables
    python benchmarks/report.py --measure --again          # all of it; about 25 minutes on two quiet cores
    python benchmarks/report.py --measure --again --only step kernels
    python benchmarks/report.py --measure --quick out/quick          # tries the scripts: small sizes, the page stays

A table stands between two comments, `<!-- table: NAME -->` and `<!-- end -->`. What `--measure` runs is `MEASUREMENTS`,
one script after the other; the JSON of each is in `results/`, with its command, machine and commit, which stand above
the table. A slow link needs root and iproute2. TorchOpt and optax are timed if they are installed. The runs of the
atlas, `max_step`, the grid and the time to a loss, which take long, have commands of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks import against, bytes_of_logs, first_hour, first_hour_grid, follow, published, unlike_islands
from benchmarks.atlas import (
    as_it_comes,
    choices,
    downstream,
    late,
    local_rates,
    longer,
    lost,
    max_step,
    same_loss,
    scale,
)
from benchmarks.atlas import rounds as outer_steps
from benchmarks.atlas import runs as atlas
from benchmarks.atlas import summary as atlas_summary
from benchmarks.links import grid_report, playbook, sites, slow_link_report, time_to_loss_report
from benchmarks.measure import ROOT
from benchmarks.steps import convergence, kernels, mesh, muon, ranks_step, sharded, step

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGES = (
    HERE / "README.md", ROOT / "README.md", *(
        ROOT / "docs" / f"{name}.md"
        for name in ("choosing", "follow", "fsdp", "late", "local_steps", "methods", "muon")
    ),
)  # fmt: skip

NOT_YET = "not measured yet"

BLOCK = re.compile(r"(<!-- table: ([^\n]+?) -->(?:\n\n| )).*?((?:\n\n| )<!-- end -->)", re.DOTALL)
"""A block of its own, or a part of a line."""


class Measurement(NamedTuple):
    """A table of the page.

    command: what follows `python`. table: makes Markdown of its JSON. quick: arguments that make it short.
    """

    command: str
    table: Callable[[dict[str, Any]], str]
    quick: str


OPTIMIZERS = "adamw,onebit_adam,onebit_adam_int8,loco_adamw,zero_one_adam"
FSDP = "fsdp2,identity,qgz,loco"
TRAIN_LESS = "--layers 1 --width 32 --steps 12"
STEPS, LINKS, ATLAS = "-m benchmarks.steps.", "-m benchmarks.links.", "-m benchmarks.atlas."
MEASUREMENTS: Mapping[str, Measurement] = {
    "first_hour": Measurement(
        "-m benchmarks.first_hour", first_hour.table, "--only muon lion_vote --tasks 'moved digits' --seeds 2"
    ),
    "step": Measurement(f"{STEPS}step --rounds 9", step.table, "--parameters 200000 --rounds 1 --no-compile"),
    "against": Measurement(
        "benchmarks/against.py 405f67f0 --pairs 6 --rounds 9", against.table, "--pairs 1 --rounds 1"
    ),
    "unlike_islands": Measurement("benchmarks/unlike_islands.py", unlike_islands.table, "--side 32 --rounds 1"),
    "follow": Measurement(
        "-m benchmarks.follow --numbers 1000000 10000000 --pairs 3", follow.table, "--numbers 100000 --pairs 1"
    ),
    "bytes_of_logs": Measurement("benchmarks/bytes_of_logs.py", bytes_of_logs.table, "--only lion_vote"),
    "ranks_step": Measurement(f"{STEPS}ranks_step", ranks_step.table, "--parameters 200000 --tensors 10 --repeat 1"),
    "sharded": Measurement(f"{STEPS}sharded", sharded.table, "--parameters 65536 --tensors 10 --rounds 1"),
    "kernels": Measurement(f"{STEPS}kernels", kernels.table, "--n 65536 --rounds 1 --no-inductor"),
    "muon": Measurement(f"{STEPS}muon --rounds 7", muon.table, "--layers 1 --width 32 --rounds 1"),
    "mesh": Measurement(f"{STEPS}mesh", mesh.table, "--layers 1 --width 32 --rounds 1"),
    "slow_link": Measurement(
        f"{LINKS}slow_link --png docs/slow_link.png",
        slow_link_report.table,
        "--png out/slow_link.png --loopback --rounds 1 --model 1 32 2 --batch 1 --context 8",
    ),
    "sites": Measurement(
        f"{LINKS}sites",
        sites.table,
        "--loopback --tiny --compute 0.002 --only 'no communication' 'DDP float32' 'DiLoCo, int8' 'DiLoCo, int8, late'",
    ),
    "train_lm": Measurement(
        f"{STEPS}convergence train_lm --optimizers {OPTIMIZERS} --png docs/demo.png",
        convergence.table_of_train_lm,
        f"--png out/demo.png {TRAIN_LESS} --freeze-step 4",
    ),
    "train_fsdp": Measurement(
        f"{STEPS}convergence train_fsdp --methods {FSDP} --steps 500", convergence.table_of_train_fsdp, TRAIN_LESS
    ),
}
"""What `--measure` runs, in this order, by the name of its table and its file in `results/`."""


def result(name: str) -> dict[str, Any] | None:
    """Return what a measurement found; None if it was not run yet."""
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def described(about: dict[str, Any]) -> str:
    """Return the command, the machine and the commit of a result as Markdown."""
    machine = f"{about['cpu']}, {about['cores']} cores, {about['capability']}"
    software = f"torch {about['torch']}, Python {about['python']}"
    facts = f"Commit {about['commit']}; {machine}; {software}; {about['minutes']:.1f} minutes."
    return f"    {about['command']}\n\n*{facts}*"


def measured(name: str) -> str:
    """Return what stands on the page for a measurement: where its figures come from, and its table."""
    if (found := result(name)) is None:
        return f"{NOT_YET}: `python benchmarks/report.py --measure --only {name}`"
    return f"{described(found['about'])}\n\n{MEASUREMENTS[name].table(found)}"


def of_file(name: str, table: Callable[[dict[str, Any]], str], folder: str = LINKS) -> str:
    """Return a table of a result that has a command of its own."""
    found = result(name)
    return f"{NOT_YET}: `python {folder}{name}`" if found is None else table(found)


def cells_of_first_hour(found: dict[str, Any]) -> str:
    """Return where the figures of the first hour's grid come from, and its table."""
    base = atlas.read(RESULTS / "first_hour.json")
    return f"{described(found['about'])}\n\n{first_hour_grid.table(first_hour_grid.Found(found['rows'], base))}"


def headline() -> str:
    """Return what the README says of slow links."""
    found = result("slow_link")
    return NOT_YET if found is None else slow_link_report.headline(found)


def tables() -> Iterator[tuple[str, Callable[[], str]]]:
    """Yield the name of each table, and what makes it."""
    rows = atlas.read(atlas.FULL)
    yield "atlas", partial(atlas_summary.report, rows)
    yield "same_loss", same_loss.table
    yield "longer", partial(longer.table, atlas.read(RESULTS / "longer.json"))
    yield "published", published.table
    yield "published losses", published.losses
    yield "published headline", published.headline
    yield "counterparts", partial(choices.counterparts, rows)
    yield "rates", partial(choices.rates, rows)
    rounds = atlas.read(RESULTS / "rounds.json")
    yield "rounds", partial(outer_steps.table, rounds)
    yield "rounds, tried", partial(outer_steps.tried, rounds)
    yield "rounds, muloco", partial(outer_steps.beside_exact, rounds)
    for name, table in {"scale": scale, "downstream": downstream, "local_rates": local_rates}.items():
        yield name, partial(of_file, name, lambda found, table=table: table.table(found["rows"]), ATLAS)
    yield "as_it_comes", partial(of_file, "as_it_comes", lambda found: as_it_comes.table(found["rows"]), ATLAS)
    yield "lost", partial(of_file, "lost", lambda found: f"{described(found['about'])}\n\n{lost.table(found)}", ATLAS)
    yield "first_hour_grid", partial(of_file, "first_hour_grid", cells_of_first_hour, "-m benchmarks.")
    yield "late_losses", late.report
    yield "max_step", partial(max_step.table, json.loads((RESULTS / "max_step.json").read_text()))
    for name in MEASUREMENTS:
        yield name, partial(measured, name)
    yield "grid", partial(of_file, "grid", grid_report.table)
    yield "playbook", playbook.table
    yield "grid headline", partial(of_file, "grid", playbook.headline)
    yield "time_to_loss", partial(of_file, "time_to_loss", time_to_loss_report.table)
    yield "headline", headline


def renewed(page: str) -> str:
    """Return the page with its tables made anew. Raises: KeyError for a table that is not known."""
    makers = dict(tables())
    return BLOCK.sub(lambda block: block[1] + makers[block[2]]() + block[3], page)


def measure(names: list[str], folder: Path, quick: bool) -> list[str]:
    """Run the scripts, each with a log in `out/`; return the names of those that failed."""
    failed, logs = [], ROOT / "out"
    logs.mkdir(exist_ok=True)
    with tqdm(names, unit="measurement") as bar:
        for name in bar:
            bar.set_postfix_str(name)
            own, file = MEASUREMENTS[name], os.path.relpath(folder / f"{name}.json", ROOT)
            command = [*shlex.split(f"{own.command} {own.quick * quick}"), "--json", file]
            path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
            with open(logs / f"{name}.log", "w") as log:
                env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
                ended = subprocess.run(
                    [sys.executable, *command], cwd=ROOT, env=env, stdout=log, stderr=log, check=False
                )
            if ended.returncode:
                failed.append(name)
                tqdm.write(f"{name} failed: see {logs / name}.log")
    return failed


def main() -> None:
    """Measure what was asked for, and write the pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="run what has no JSON yet")
    parser.add_argument("--again", action="store_true", help="run what has JSON, too")
    parser.add_argument("--only", nargs="+", choices=list(MEASUREMENTS), default=list(MEASUREMENTS))
    parser.add_argument("--quick", metavar="FOLDER", type=Path, help="run with small sizes; the JSON goes there")
    options = parser.parse_args()
    folder, failed = (options.quick or RESULTS).resolve(), []
    if options.measure:
        names = [name for name in options.only if options.again or not (folder / f"{name}.json").exists()]
        failed = measure(names, folder, options.quick is not None)
    if options.quick is None:
        for page in PAGES:
            page.write_text(renewed(page.read_text()))
    if failed:
        sys.exit(f"report: {', '.join(failed)} failed")


if __name__ == "__main__":
    main()
