"""The deep atlas: a few methods on a longer run of a larger model, where local steps have rounds enough.

    python benchmarks/deep_atlas.py --hours 2.5 --json benchmarks/deep_atlas --out docs

A language model of 0.85 million parameters (4 layers of width 128, contexts of 128 bytes) trains on the source code of
Python's standard library: 4 simulated workers of 4 sequences each, 5,000 steps, which are 10 million tokens. The rate
is a cosine behind a rise over 2 % of the steps, and each worker's gradient is clipped to a norm of 1.

Rates are a factor of 1.8 apart and searched until the best is at no edge: on a seed and half of the held-out files that
no table shows, with runs of 750 steps. Three other seeds are reported, on the other half, as differences to AdamW that
are paired by seed. A run takes about half an hour of one core; each is a file of its own, and what is there is not run
again. Start it at low priority, and stop it when you like.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import atlas_methods
import torch
from measure import machine
from paired import difference, rate_at, search
from torch import Tensor
from torch.func import functional_call, grad_and_value
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import fn

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from train_lm import Transformer, cut, loss_of, read_standard_library

WORKERS, SEQUENCES, CONTEXT, MODEL = 4, 4, 128, (4, 128, 4)
STEPS, SEARCH_STEPS, LOOKS, CLIP = 5000, 750, 250, 1.0
"""Of a run that is reported, of one that chooses a rate, between two looks at the loss; the norm of a gradient."""

SEEDS = (1, 2, 3)
"""Those that are reported; seed 0 chooses rates."""

BASE = "adamw"
H = 32

Row = dict[str, Any]
Params = dict[str, Tensor]


class Method(NamedTuple):
    """What is compared. like: what it is in the atlas. rate: where the search for its learning rate begins.

    alone: one worker trains on its own batches, and sends nothing.
    """

    like: atlas_methods.Method
    rate: float = 3e-3
    alone: bool = False


ATLAS = atlas_methods.METHODS
LONE = ATLAS[BASE]._replace(settings="a worker's batch alone, nothing sent")
DILOCO = ATLAS["diloco"]._replace(
    make=partial(fn.diloco, **atlas_methods.ADAM),
    schedule=lambda steps: fn.every(H, start=steps % H),
    settings=f"H = {H}, outer 0.7 / 0.9, no warm-up",
)
METHODS = {
    BASE: Method(ATLAS[BASE]),
    "adamw, one worker": Method(LONE, alone=True),
    "adamw, int4": Method(ATLAS["adamw, int4"]),
    "onebit_adam": Method(ATLAS["onebit_adam"]),
    "diloco": Method(DILOCO),
    "demo": Method(ATLAS["demo"], 1e-2),
}


class Run(NamedTuple):
    """What a run is, and so its key among those that are done."""

    method: str
    seed: int
    steps: int
    lr: float


@cache
def text() -> tuple[Tensor, Tensor, Tensor]:
    """Return what is trained on, what rates are chosen on, and what is reported."""
    training, held_out = read_standard_library()
    tuning, test = held_out.tensor_split(2)
    return training, tuning, test


def shape_of_rate(step: int, steps: int) -> float:
    """Return the part of the peak learning rate: a rise, then half a cosine to a tenth."""
    return min((step + 1) / (0.02 * steps), 1.0) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def train(run: Run) -> Row:
    """Train afresh; return the run with its losses on both held-out splits, None where one is not finite.

    "curve" has for each look: the steps, the bytes that a rank has sent, and the loss on the split that is reported. Of
    local steps it is that of the ranks' mean params.
    """
    torch.set_num_threads(1)
    method, model = METHODS[run.method], Transformer(*MODEL)
    training, tuning, test = text()
    workers = 1 if method.alone else WORKERS
    torch.manual_seed(run.seed)
    params: Params = {name: p.detach() for name, p in Transformer(*MODEL).named_parameters()}
    lr, batches = torch.tensor(0.0), torch.Generator().manual_seed(run.seed)
    tx, schedule = method.like.make(lr=lr, axis="data"), method.like.schedule(run.steps)
    ranks_of_state = fn.rank_dims(tx.init(params))
    state = fn.simulate(tx.init, "data", workers, in_dims=None, out_dims=ranks_of_state)(params)
    if not method.like.alike:
        params = {name: p.expand(workers, *p.shape).clone() for name, p in params.items()}

    def loss(params: Params, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(lambda tokens: functional_call(model, params, (tokens,)), batch)

    def step(phase: Any, params: Params, state: Any, batch: tuple[Tensor, Tensor]) -> Any:
        grads, value = grad_and_value(loss)(params, batch)
        norm = torch.stack([g.square().sum() for g in grads.values()]).sum().sqrt()
        grads = {name: g * (CLIP / norm.clamp(min=CLIP)) for name, g in grads.items()}
        updates, state = tx.update(phase)(grads, state, params)
        return fn.apply_updates(params, updates), state, value

    def loss_on(split: Tensor) -> float | None:
        mean = params if method.like.alike else {name: p.mean(0) for name, p in params.items()}
        starts = torch.arange(256) * ((len(split) - CONTEXT - 1) // 256)
        with torch.no_grad():
            found = float(loss(mean, cut(split, starts, CONTEXT)))
        return found if math.isfinite(found) else None

    dims = (None if method.like.alike else 0, ranks_of_state, 0)
    curve, start = [], time.perf_counter()
    with fn.ledger() as sent, sdpa_kernel(SDPBackend.MATH):  # the fused attention cannot be batched over workers
        for t in range(run.steps):
            lr.fill_(run.lr * shape_of_rate(t, run.steps))
            starts = torch.randint(len(training) - CONTEXT, (WORKERS * SEQUENCES,), generator=batches)
            batch = tuple(x.unflatten(0, (WORKERS, -1))[:workers] for x in cut(training, starts, CONTEXT))
            take = fn.simulate(partial(step, schedule(t)), "data", workers, in_dims=dims, out_dims=dims)
            params, state, _ = take(params, state, batch)
            if (t + 1) % LOOKS == 0:
                curve.append((t + 1, sent.total, loss_on(test)))
    losses = {"tuning": loss_on(tuning), "loss": loss_on(test)}
    seconds = round(time.perf_counter() - start, 1)
    return {**run._asdict(), **losses, "bytes": sent.total, "seconds": seconds, "curve": curve, "about": machine()}


def read(folder: Path) -> list[Row]:
    """Return the rows of a folder, a file each."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def write(folder: Path, row: Row) -> None:
    """Write a row to a file of its own, which is whole at any time."""
    folder.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^a-z0-9.]+", "-", "_".join(str(row[field]) for field in Run._fields))
    part = folder / f"{name}.part"
    part.write_text(json.dumps(row) + "\n")
    part.replace(folder / f"{name}.json")


def chosen_rate(rows: Sequence[Row], method: str) -> float | None:
    """Return the learning rate with the lowest loss where it was searched; None before the search is over."""
    place = search(METHODS[method].rate, tried(rows, method)).chosen
    return None if place is None else rate_at(METHODS[method].rate, place)


def tried(rows: Sequence[Row], method: str) -> dict[float, float]:
    """Return the losses on the split that chooses, by the rates of the runs that were made for it."""
    own = [row for row in rows if row["method"] == method and row["seed"] == 0 and row["steps"] == SEARCH_STEPS]
    return {row["lr"]: math.inf if row["tuning"] is None else row["tuning"] for row in own}


def missing(rows: Sequence[Row]) -> list[Run]:
    """Return the runs that are not there, as far as they are known: the searches first, then a seed of all methods."""
    done = {Run(*(row[field] for field in Run._fields)) for row in rows}
    searches = [
        Run(name, 0, SEARCH_STEPS, rate_at(method.rate, place))
        for name, method in METHODS.items()
        for place in search(method.rate, tried(rows, name)).missing
    ]
    rates = {name: lr for name in METHODS if (lr := chosen_rate(rows, name)) is not None}
    reported = [Run(name, seed, STEPS, lr) for seed in SEEDS for name, lr in rates.items()]
    return [run for run in (*searches, *reported) if run not in done]


def reported(rows: Sequence[Row], method: str) -> dict[int, Row]:
    """Return the rows of a method that tables show, by their seeds."""
    lr = chosen_rate(rows, method)
    own = [row for row in rows if (row["method"], row["steps"], row["lr"]) == (method, STEPS, lr)]
    return {row["seed"]: row for row in own if row["seed"] in SEEDS}


def table(rows: Sequence[Row]) -> str:
    """Return the losses as Markdown: differences are to AdamW's loss of the same seed, with their 95 % interval."""

    def losses(runs: dict[int, Row]) -> dict[int, float]:
        return {seed: math.nan if row["loss"] is None else row["loss"] for seed, row in runs.items()}

    head = ["method", "settings", "lr", "lr / AdamW's", "loss", "loss - AdamW's", "which is", "MB per rank", "runs"]
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    base, base_lr = reported(rows, BASE), chosen_rate(rows, BASE)
    for name, method in METHODS.items():
        lr, own = chosen_rate(rows, name), reported(rows, name)
        cells = [name, method.like.settings, "searched" if lr is None else f"{lr:.3g}"]
        cells += ["" if lr is None or base_lr is None else f"{lr / base_lr:.2g}"]
        cells += [f"{statistics.fmean(losses(own).values()):.4f}" if own else ""]
        gap = difference(losses(own), losses(base)) if name != BASE else None
        cells += ["", ""] if gap is None else [str(gap), gap.verdict]
        cells += [f"{next(iter(own.values()))['bytes'] / 1e6:.1f}" if own else ""]
        lines.append(f"| {' | '.join([*cells, f'{len(own)} of {len(SEEDS)}'])} |")
    return "\n".join(lines)


def take(folder: Path, hours: float) -> None:
    """Make the runs that are missing, one after the other; start none after so many hours."""
    end = time.monotonic() + 3600 * hours
    with get_context("spawn").Pool(1) as pool, tqdm(desc="runs") as bar:  # a process that a signal can end at any time
        while (runs := missing(read(folder))) and time.monotonic() < end:
            bar.total = bar.n + len(runs)  # that are known; a search may want more
            bar.set_postfix_str("{}, seed {}, {} steps, lr {:g}".format(*runs[0]))
            write(folder, pool.apply(train, (runs[0],)))
            bar.update()


def main() -> None:
    """Make runs, print the table, draw the curves."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=math.inf, help="after which no run is started; 0: only draw")
    parser.add_argument("--json", type=Path, metavar="FOLDER", default=Path("out/deep_atlas"), help="of the runs")
    parser.add_argument("--out", type=Path, metavar="FOLDER", default=Path("out"), help="where the picture goes")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of the process that trains
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("deep_atlas: terminated; start it again to go on"))
    take(args.json, args.hours)
    rows = read(args.json)
    print("", table(rows), f"\n{len(missing(rows))} runs are missing, as far as they are known", sep="\n")
    if any(reported(rows, name) for name in METHODS):
        from deep_atlas_picture import draw

        print(f"picture: {draw(rows, args.out / 'deep_atlas.png')}")


if __name__ == "__main__":
    main()
