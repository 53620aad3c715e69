"""Is a step as fast as it was? Processor time of `fn.Optimizer`'s steps, divided by that of an older commit.

    python benchmarks/against.py 405f67f0 --json benchmarks/results/against.json

Ten times a process of either commit is started, both on one core. They take turns, step by step, and the median of the
steps' ratios is the figure of these two processes: where memory lies, and so what it costs, is another in every one.
The interval is that of the ten figures (95 %, Student's t, of their logarithms). The steps are those of `step.py`, of
one rank of two, communication apart: of ten million parameters in 150 tensors, and exchanges of DiLoCo, each with its
local step, of ten million parameters in ten tensors, and of 150 tensors of 16 elements. Those of Muon's family are of
one million parameters in 16 matrices, of which a rank owns a half. The last is a whole step of two ranks over gloo,
forward and backward pass of a batch of 16 included, in which Muon communicates behind the backward pass.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
STEPS = (
    "AdamW",
    "1-bit Adam compressed",
    "1-bit Adam compressed, lazy errors",
    "DiLoCo, an exchange of 10 tensors",
    "DiLoCo, an exchange of 150 tiny tensors",
    "AdamW on a mean in int4",
    "LoCo on shards",
    "1-bit Adam on shards",
    "Muon",
    "NorMuon",
    "sign_muon",
    "Muon behind a backward pass, two ranks",
)


def behind_a_backward_pass(rank: int, store: str) -> Callable[[], Any]:
    """Return a step of one of two ranks whose optimizer communicates behind the backward pass."""
    import torch
    import torch.distributed as dist

    import fn.adapters.ddp

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(16)))
    model = torch.nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(1 + rank)
    x = torch.randn(16, 256)
    opt = fn.adapters.ddp.optimizer(model, fn.muon, lr=1e-4, elements=1 << 18, least_wire_seconds=0.0)

    def whole_step() -> None:
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()

    return whole_step


def serve() -> None:
    """Build the optimizers of the checkout that is on the path, with its own `step.py`; take a step for each line."""
    sys.path.pop(0)  # where this file lies: `step` is to be that of the other checkout
    store = tempfile.mktemp()  # made by torch
    other_reads, wakes_other = os.pipe()
    if os.fork() == 0:  # before torch has threads: the other of the two ranks, which takes a step for each byte
        os.close(wakes_other)
        whole_step = behind_a_backward_pass(1, store)
        while os.read(other_reads, 1):
            whole_step()
        os._exit(0)
    os.close(other_reads)
    import step
    import torch

    import fn

    torch.set_num_threads(1)
    many, few, tiny = [(316, 316)] * 100 + [(316,)] * 50, [(1000, 1000)] * 10, [(16,)] * 150
    diloco, signs = partial(fn.diloco, axis="data"), {"axis": "data", "codec": fn.sign()}
    onebit, shards = (partial(make, **signs) for make in (fn.onebit_adam, fn.sharded_onebit_adam))  # alike in both
    lazy = partial(onebit, feedback=fn.classic(lazy=True))
    warm_up, compressed, exchange = fn.Phase.WARMUP, fn.Phase.COMPRESSED, fn.Round(0, 0)
    square = [(256, 256)] * 16
    loco, muon, normuon, votes = (
        partial(make, axis="data") for make in (fn.loco_adamw, fn.muon, fn.normuon, fn.sign_muon)
    )

    def int4(lr: Any) -> fn.Transform:
        mean = fn.average("data"), fn.compressed_average("data", fn.int4(), fn.damped())
        return fn.chain(*mean, fn.scale_by_adam(), fn.scale_by_learning_rate(lr))

    cases = [(many, fn.adamw, warm_up), (many, onebit, compressed), (many, lazy, compressed), (few, diloco, exchange),
             (tiny, diloco, exchange), (many, int4, compressed), (many, loco, compressed), (many, shards, compressed),
             (square, muon, warm_up), (square, normuon, warm_up), (square, votes, compressed)]  # fmt: skip
    steps = {}
    for name, (shapes, make, phase) in zip(STEPS[:-1], cases, strict=True):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
        for p in params:
            p.grad = torch.randn(p.shape)
        steps[name] = step.adapter(params, make, phase)
        for _ in range(3):
            steps[name]()
    whole_step = behind_a_backward_pass(0, store)

    def both_ranks() -> None:
        os.write(wakes_other, b"s")
        whole_step()

    steps[STEPS[-1]] = both_ranks
    for _ in range(3):
        both_ranks()
    print("ready", flush=True)
    for line in sys.stdin:
        start = time.process_time_ns()
        steps[line.strip()]()
        print(time.process_time_ns() - start, flush=True)


def start(root: Path) -> subprocess.Popen[str]:
    """Start a process that serves the steps of a checkout."""
    folder = root / "benchmarks" / "steps"
    path = f"{root}{os.pathsep}{folder if folder.exists() else folder.parent}"  # before 0.4.0 `step.py` lay there
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, __file__, "--serve"]
    process = subprocess.Popen(command, env=env, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        sys.exit(f"against: the steps of {root} did not start; what is wrong stands above")
    return process


def ask(process: subprocess.Popen[str], step: str) -> int:
    """Return the nanoseconds of processor time that a step took."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(step, file=process.stdin, flush=True)
    return int(process.stdout.readline())


def ratios(old: Path, new: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Return for each step the median of new / old, and both medians in milliseconds, of one pair of processes."""
    processes = [start(old), start(new)]
    times: dict[str, list[tuple[int, int]]] = {step: [] for step in STEPS}
    for k in range(rounds):
        for step in STEPS:
            order = processes[:: -1 if k % 2 else 1]
            taken = {id(process): ask(process, step) for process in order}
            times[step].append((taken[id(processes[0])], taken[id(processes[1])]))
    for process in processes:
        process.communicate()
    return {
        step: {
            "ratio": statistics.median(after / before for before, after in pairs),
            "old ms": statistics.median(before for before, _ in pairs) / 1e6,
            "new ms": statistics.median(after for _, after in pairs) / 1e6,
        }
        for step, pairs in times.items()
    }


def table(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    from scipy.stats import t as student

    from benchmarks.measure import markdown

    rows = []
    for step in result["pairs"][0]:
        pairs = [pair[step] for pair in result["pairs"]]
        logs = [math.log(pair["ratio"]) for pair in pairs]
        middle, half = statistics.fmean(logs), 0.0
        if len(logs) > 1:
            half = float(student.ppf(0.975, len(logs) - 1)) * statistics.stdev(logs) / math.sqrt(len(logs))
        low, high = math.exp(middle - half), math.exp(middle + half)
        old, new = (statistics.median(pair[which] for pair in pairs) for which in ("old ms", "new ms"))
        rows.append((step, f"{old:.1f}", f"{new:.1f}", f"{math.exp(middle):.2f} ({low:.2f} – {high:.2f})"))
    return markdown(f"| step | {result['old']}, ms | {result['about']['commit']}, ms | ratio (95 %) |", rows)


def main() -> None:
    """Time this checkout against a commit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit", nargs="?", help="what to compare this checkout with")
    parser.add_argument("--pairs", type=int, default=10, help="of processes")
    parser.add_argument("--rounds", type=int, default=15, help="steps of each kind in a process")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve()
        return
    if args.commit is None:
        parser.error("name the commit to compare with, such as 405f67f0")
    from tqdm import trange

    from benchmarks.measure import about, commit, write

    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # of the processes, too, which take turns
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", str(old), args.commit], cwd=ROOT, check=True)
        try:
            pairs = [ratios(old, ROOT, args.rounds) for _ in trange(args.pairs, desc="pairs of processes")]
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(old)], cwd=ROOT, check=True)
    result = {"about": about(), "old": commit(args.commit), "pairs": pairs}
    write(args.json, result)
    print(table(result))


if __name__ == "__main__":
    main()
