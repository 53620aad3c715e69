"""A new user's first hour: each core method with its defaults, beside AdamW at its best learning rate.

    python -m benchmarks.first_hour --json benchmarks/results/first_hour.json

Four tasks on four simulated workers. Two the atlas does not have: a transformer learns the names of Unicode characters,
and a convolutional network learns digits that are moved and noisy. Two are the atlas's, with its splits: its language
model, and plain digits of 8 x 8. Where a method is chosen on "three tasks", they are both texts and plain digits; moved
digits are looked at once, at the end.

AdamW's learning rate is tuned on a split and a seed that the table does not show. Each method then trains with its
default rate, and with the rate that the docstring recommends ("start with ..."), all other arguments as they come. The
table has differences to AdamW of the same seed with their 95 % intervals (Student's t): in nats for texts, in points of
accuracy for digits. About half an hour on two cores; runs that the file has are not repeated, so take a method's rows
out after it changed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from inspect import signature
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from tqdm import tqdm
from train_lm import Transformer

import fn
from benchmarks.atlas import tasks as atlas
from benchmarks.atlas.methods import Method, first, freeze, never, rounds, seldom
from benchmarks.atlas.paired import Difference, difference, rate_at, search
from benchmarks.atlas.summary import by_seed
from benchmarks.atlas.summary import runs as runs_of
from benchmarks.atlas.tasks import SMALL, Batch, Digits, Params, Score, Task
from benchmarks.atlas.train import Run, train
from benchmarks.measure import about, markdown

WORKERS, STEPS, TUNED_ON = 4, 200, 0
"""Simulated workers, steps of a run, and the seed that chooses AdamW's rate."""

CONTEXT = 32
"""Letters that the transformer sees."""


class Names(nn.Module):
    """A transformer with learned positions and biases, as GPT-2 has them."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.letter, self.position = nn.Embedding(128, width), nn.Embedding(CONTEXT, width)
        for table in (self.letter, self.position):
            nn.init.normal_(table.weight, std=0.02)
        layer = partial(nn.TransformerEncoderLayer, width, 4, 4 * width, 0.0, F.gelu, norm_first=True, batch_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 128)
        self.register_buffer("mask", torch.full((CONTEXT, CONTEXT), -math.inf).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """(B, 32) letters -> logits (B, 32, 128)."""
        x = self.letter(x) + self.position.weight
        for layer in self.layers:
            x = layer(x, src_mask=self.mask)
        return self.head(self.norm(x))


MOVED = partial(Digits, side=12)
"""The atlas's network, for the larger images of moved digits."""


def task_of(make: Callable[[], nn.Module], batch: int, samples: Callable[[str, int, torch.Generator], Batch]) -> Task:
    """Return a task of a model. samples: (split, number, generator) -> inputs and targets."""
    model = make()

    def params(seed: int) -> Params:
        torch.manual_seed(seed)
        return {name: p.detach() for name, p in make().named_parameters()}

    def loss(params: Params, batch: Batch) -> Tensor:
        logits = functional_call(model, params, (batch[0],))
        return F.cross_entropy(logits.flatten(0, -2), batch[1].flatten())

    def batches(seed: int, workers: int) -> Callable[[], Batch]:
        generator = torch.Generator().manual_seed(seed)

        def draw() -> Batch:
            x, y = samples("train", batch, generator)
            return x.unflatten(0, (workers, -1)), y.unflatten(0, (workers, -1))

        return draw

    def score(params: Params) -> Score:
        with torch.no_grad():
            tuning, (x, y) = (samples(split, 1024, torch.Generator().manual_seed(0)) for split in ("tuning", "test"))
            right = functional_call(model, params, (x,)).argmax(-1) == y
            losses = (float(loss(params, split)) for split in (tuning, (x, y)))
            return Score(*losses, accuracy=float(right.float().mean()))

    return Task(params, loss, batches, score)


def splits_of(n: int) -> dict[str, tuple[int, int]]:
    """Return where splits begin and end: 60 % are trained on, 20 % choose rates, 20 % are in the table."""
    return {"train": (0, n * 6 // 10), "tuning": (n * 6 // 10, n * 8 // 10), "test": (n * 8 // 10, n)}


@cache
def names(batch: int = 32) -> Task:
    """Learn the names of Unicode's characters, letter by letter, ideographs left out."""
    found = [unicodedata.name(chr(code), "") for code in range(0x20000)]
    found = [name for name in found if name and "IDEOGRAPH" not in name and "HANGUL SYLLABLE" not in name]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0)).tolist()
    text = torch.frombuffer(bytearray("\n".join(found[k] for k in order).encode()), dtype=torch.uint8).long()
    parts = splits_of(len(text))

    def samples(split: str, number: int, generator: torch.Generator) -> Batch:
        start, end = parts[split]
        places = torch.randint(start, end - CONTEXT, (number, 1), generator=generator) + torch.arange(CONTEXT + 1)
        return text[places[:, :-1]], text[places[:, 1:]]

    return task_of(Names, batch, samples)


@cache
def digits(batch: int = 64) -> Task:
    """Classify scikit-learn's handwritten digits of 8 x 8 at a random place of 12 x 12, under noise."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(1))
    images = F.pad(torch.tensor(found.images, dtype=torch.float32)[order] / 16, (4, 4, 4, 4))  # (n, 16, 16)
    targets, parts = torch.tensor(found.target)[order], splits_of(len(order))

    def samples(split: str, number: int, generator: torch.Generator) -> Batch:
        which = torch.randint(*parts[split], (number, 1, 1), generator=generator)
        rows, columns = torch.randint(5, (2, number, 1), generator=generator) + torch.arange(12)  # (number, 12) each
        x = images[which, rows[:, :, None], columns[:, None, :]]  # (number, 12, 12)
        return (x + 0.2 * torch.randn(x.shape, generator=generator))[:, None], targets[which.flatten()]

    return task_of(MOVED, batch, samples)


def language_model(sequences: int = 8) -> Task:
    """Train the atlas's language model from scratch on the source code of Python's standard library."""
    return atlas.language_model(SMALL._replace(sequences=sequences))


class Setting(NamedTuple):
    """How a task is run. batches: samples in a step of all workers. score: what the table shows. bound: what is bad."""

    make: Callable[[int], Task]
    model: Callable[[], nn.Module]
    batches: tuple[int, ...]
    score: str
    bound: float


TASKS = {
    "names": Setting(names, Names, (32, 96), "loss", 0.05),
    "moved digits": Setting(digits, MOVED, (64, 192), "accuracy", -0.02),
    "language model": Setting(language_model, partial(Transformer, *SMALL[:3]), (8, 24), "loss", 0.05),
    "digits": Setting(atlas.digits, Digits, (64, 192), "accuracy", -0.02),
}

BASE = "adamw"


def int4_gradients(lr: Any, axis: str) -> fn.Transform:
    """Return AdamW behind gradients in int4, as `average_gradients` sends them."""
    codes = fn.compressed_average(axis, fn.int4(), fn.damped())
    return fn.chain(codes, fn.scale_by_adam(), fn.add_decayed_weights(0.01), fn.scale_by_learning_rate(lr))


_row = partial(Method, "as it comes", rate=0.0, settings="", row="")

METHODS = {
    BASE: _row(fn.adamw, never),
    "adamw, int4": _row(int4_gradients, first(0)),
    "loco_adamw": _row(fn.loco_adamw, first(0)),
    "powersgd_adamw": _row(fn.powersgd_adamw, first(10)),
    "onebit_adam": _row(fn.onebit_adam, freeze(0.2)),
    "sharded_onebit_adam": _row(fn.sharded_onebit_adam, freeze(0.2)),
    "zero_one_adam": _row(fn.zero_one_adam, lambda steps: fn.zero_one_schedule(), alike=False),
    "zero_one_adam, a short run": _row(fn.zero_one_adam, seldom, alike=False),
    "muon": _row(fn.muon, never),
    "sign_muon": _row(fn.sign_muon, first(0)),
    "dion": _row(fn.dion, never),
    "lion_vote": _row(fn.lion_vote, first(0)),
    "lamb": _row(fn.lamb, never),
    "onebit_lamb": _row(fn.onebit_lamb, freeze(0.5)),
    "local_sgd": _row(fn.local_sgd, rounds(), alike=False),
    "diloco": _row(fn.diloco, rounds(), alike=False),
    "sparse_loco": _row(fn.sparse_loco, rounds(), alike=False),
    "muloco": _row(fn.muloco, rounds(), alike=False),
}
"""Core methods with their defaults; rates come from their signatures and docstrings."""

LIKE_ADAM = tuple(METHODS)[1:8]
"""Methods that have AdamW's default rate, at which they are compared with AdamW."""

Runs = list[tuple[Run, int]]
Rows = list[dict[str, Any]]


def named(method: str) -> Callable[..., fn.Transform]:
    """Return the named optimizer of a row."""
    return getattr(fn, method.partition(",")[0])


def default_rate(method: str) -> float:
    """Return the learning rate that a method has if none is given."""
    return signature(named(method)).parameters["lr"].default


ADVICE = re.compile(r"start with (AdamW's rate)?(?: times )?([\d.]*\d)?(?:, at most ([\d.]*\d))?")


def advice(docstring: str) -> tuple[str, Callable[[float], float]]:
    """Return what a docstring says of the rate to start with, and that rate as a function of AdamW's best rate.

    >>> said, rate = advice("lr: a number; start with AdamW's rate times 3, at most 0.02. b1: another one.")
    >>> said, rate(0.003), rate(0.01)
    ("AdamW's rate times 3, at most 0.02", 0.009, 0.02)
    """
    if (found := ADVICE.search(" ".join(docstring.split()))) is None:
        raise LookupError("expected a docstring that says 'start with ...'")
    of_base, number, most = found[1] is not None, float(found[2] or 1), float(found[3] or math.inf)
    said = found[0].removeprefix("start with ")
    return said, lambda base: min(float(f"{number * base if of_base else number:.3g}"), most)


def recommended_rate(method: str, base: float) -> float:
    """Return the rate that a docstring recommends where AdamW's best rate is `base`."""
    return base if method.partition(",")[0] == BASE else advice(named(method).__doc__ or "")[1](base)


def take(run: Run, batch: int, method: Method | None = None) -> dict[str, Any]:
    """Train; return the row of a run. method: the one that has the run's name, if None."""
    setting, method = TASKS[run.task], method or METHODS[run.method]
    if "labels" in signature(method.make).parameters:
        method = method._replace(make=partial(method.make, labels=fn.labels_of(setting.model())))
    return {**train(run, setting.make(batch), method), "batch": batch}


def tuned_rate(rows: Rows, task: str, batch: int, start: float = 0.01) -> tuple[float | None, Runs]:
    """Return AdamW's best rate, or None and the runs that its search lacks."""
    own = runs_of(rows, task=task, method=BASE, seed=TUNED_ON, batch=batch)
    found = search(start, {row["lr"]: math.inf if row["tuning"] is None else row["tuning"] for row in own})
    if found.chosen is not None:
        return rate_at(start, found.chosen), []
    return None, [(Run(task, BASE, WORKERS, TUNED_ON, STEPS, rate_at(start, k)), batch) for k in found.missing]


def missing(rows: Rows, tables: Sequence[tuple[str, int]], methods: Sequence[str], seeds: int) -> Runs:
    """Return the runs that tables lack, as far as they are known: those of AdamW's search first."""
    wanted: Runs = []
    for task, batch in tables:
        base, search_runs = tuned_rate(rows, task, batch)
        wanted += search_runs
        if base is not None:
            for method in methods:
                for lr in dict.fromkeys([default_rate(method), recommended_rate(method, base)]):
                    wanted += [(Run(task, method, WORKERS, seed, STEPS, lr), batch) for seed in range(1, seeds + 1)]
    done = {(Run(*(row[name] for name in Run._fields)), row["batch"]) for row in rows}
    return [run for run in wanted if run not in done]


def scores(rows: Rows, task: str, batch: int, method: str, lr: float | None) -> dict[int, float]:
    """Return what the table shows of runs, by seed."""
    own = runs_of(rows, task=task, batch=batch, method=method, lr=lr)
    return by_seed([row for row in own if row["seed"] != TUNED_ON], TASKS[task].score)


def gap(rows: Rows, task: str, batch: int, method: str, lr: float | None) -> Difference | None:
    """Return how far a method at a rate is from AdamW; None where fewer than two seeds have both.

    From AdamW at the same rate, where that is the default of both, else at AdamW's best.
    """
    same = method in LIKE_ADAM and lr == default_rate(method)
    rival = default_rate(BASE) if same else tuned_rate(rows, task, batch)[0]
    return difference(scores(rows, task, batch, method, lr), scores(rows, task, batch, BASE, rival))


def table(found: Mapping[str, Any], size: int = 0) -> str:
    """Return each method's distance to AdamW, at both rates. What is beyond a bound is bold.

    Args: size: which of each task's batches; 0 is the smallest.
    """
    rows = found["rows"]
    trained = {row["method"] for row in rows}
    lines = {name: [name, f"{default_rate(name):g}"] for name in METHODS if name in trained}
    head = ["method", "default rate"]
    for task in dict.fromkeys(row["task"] for row in rows):
        bound, batch = TASKS[task].bound, TASKS[task].batches[size]
        base, _ = tuned_rate(rows, task, batch)
        head += [f"{task}, {batch} a step", "recommended rate"]
        for method, cells in lines.items():
            default, recommended = default_rate(method), None if base is None else recommended_rate(method, base)
            for lr, at in ((default, ""), (recommended, f" at {recommended:g}" if recommended is not None else "")):
                if at and recommended == default:
                    cells.append("same")
                    continue
                if method == BASE:
                    own = scores(rows, task, batch, method, lr)
                    cells.append(f"{math.fsum(own.values()) / len(own):.3f}{at}" if own else "")
                    continue
                off = gap(rows, task, batch, method, lr)
                bad = off is not None and not (off.mean - bound) * math.copysign(1, bound) <= 0
                cells.append("" if off is None else f"{'**' * bad}{off:.3f}{'**' * bad}{at}")
    return markdown(" | ".join(head), list(lines.values()))


def main() -> None:
    """Run what is missing, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--json", type=Path, default=Path("out/first_hour.json"), metavar="FILE", help="where rows are kept")
    add("--only", nargs="+", choices=list(METHODS), default=list(METHODS), metavar="METHOD", help="some methods")
    add("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS), metavar="TASK", help="some tasks")
    add("--both-batches", action="store_true", help="the larger batch, too")
    add("--seeds", type=int, default=3, help="seeds of the table")
    add("--jobs", type=int, default=os.cpu_count() or 1, help="runs at a time, each on one core")
    args = parser.parse_args()
    methods = list(dict.fromkeys([BASE, *args.only]))
    tables = [(task, batch) for task in args.tasks for batch in TASKS[task].batches[: 1 + args.both_batches]]
    rows: Rows = json.loads(args.json.read_text())["rows"] if args.json.exists() else []
    args.json.parent.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are started
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool, tqdm(desc="runs") as bar:
        while runs := missing(rows, tables, methods, args.seeds):
            bar.total = bar.n + len(runs)  # that are known; a search may want more
            for ended in as_completed([pool.submit(take, *run) for run in runs]):
                rows.append(ended.result())
                # Minutes of one core, of all runs: the file may have been filled in several goes.
                facts = {**about(), "minutes": round(sum(row["seconds"] for row in rows) / 60, 1)}
                lines = ",\n".join(map(json.dumps, rows))
                args.json.write_text(f'{{"about": {json.dumps(facts)},\n"rows": [\n{lines}\n]}}\n')
                bar.set_postfix_str(f"{rows[-1]['task']}, {rows[-1]['method']}")
                bar.update()
    for size in range(1 + args.both_batches):
        print(table({"rows": rows}, size), end="\n\n")


if __name__ == "__main__":
    main()
