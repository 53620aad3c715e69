"""What does a published run cost, and what a follower? Processor time of steps of one of two ranks, and bytes.

    python -m benchmarks.follow --json benchmarks/results/follow.json

The same `fn.Optimizer` takes blocks of steps, in turn alone, published, published with a digest in each step, and with
a snapshot in each: what those take beyond the frames is spread over the 100 and 1000 steps from one to the next that
`publish` has as defaults. The other rank says what this one says, so messages cost nothing. A percentage is of the
optimizer's step, or, with 64 examples, of that and the passes through its matrices. Processor time is that of all
threads, the writer's too, and ratios are medians of those of blocks that stand beside each other. A follower takes the
steps of such a block.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

import fn
from benchmarks.measure import about, markdown, write
from benchmarks.steps.step import echo, make_parameters
from fn.adapters.follow import Follower, publish
from fn.adapters.follow.log_format import HEAD, decoded_head, read_file
from fn.adapters.follow.log_reader import LogReader

NEVER, DIGESTS, SNAPSHOTS, EXAMPLES = 10**9, 100, 1000, 64
COLUMNS = (
    "| parameters | step | step, ms | with its writer | without digests and snapshots | with 64 examples "
    "| frame beyond codes | bits per parameter | follower / step | checkpoint, ms | its bytes per parameter |"
)


def int8_mean(lr: Any, *, axis: str) -> fn.Transform:
    """Return AdamW on a mean in 8 bits."""
    mean = fn.average(axis), fn.compressed_average(axis, fn.int8(), fn.damped())
    return fn.chain(*mean, fn.scale_by_adam(), fn.scale_by_learning_rate(lr))


CASES: dict[str, tuple[Callable[..., fn.Transform], fn.Phase]] = {
    "1-bit Adam compressed": (partial(fn.onebit_adam, axis="data"), fn.Phase.COMPRESSED),
    "AdamW on a mean in int8": (partial(int8_mean, axis="data"), fn.Phase.COMPRESSED),
    "AdamW on an exact mean": (partial(fn.adamw, axis="data"), fn.Phase.WARMUP),
}


def model_of(numbers: int) -> torch.nn.Module:
    """Return a hundred matrices and fifty vectors."""
    return torch.nn.ParameterList(make_parameters(numbers, torch.device("cpu")))


def optimizer(model: torch.nn.Module, name: str) -> fn.Optimizer:
    """Return the optimizer of a case, in its phase, after two steps of warm-up."""
    make, phase = CASES[name]
    for p in model.parameters():
        p.grad = torch.randn(p.shape)
    with echo():
        opt = fn.Optimizer(
            model.parameters(), make, schedule=lambda t: fn.Phase.WARMUP if t < 2 else phase, lr=1e-4,
            refuse_averaged=False,
        )  # fmt: skip
    for _ in range(4):
        opt.step()
    return opt


def wait_for_writer(folder: Path, snapshots: int) -> None:
    """Wait until so many snapshots are there, and nothing was written for a while."""
    while len(decoded_head(read_file(folder / HEAD), HEAD).snapshots) < snapshots:
        time.sleep(0.1)
    sizes = [-1]
    while len(sizes) < 4 or len({*sizes[-4:]}) > 1:
        time.sleep(0.1)
        sizes.append(sum(path.stat().st_size for path in folder.iterdir()))


def block(opt: fn.Optimizer, steps: int, folder: Path | None = None, **how: int) -> float:
    """Return the processor time of a step, published into a folder if there is one."""
    publication = None
    if folder is not None:
        publication = publish(opt, folder, **{"digest_every": NEVER, "snapshot_every": NEVER, **how})
        wait_for_writer(folder, 1)
    start = time.process_time()
    for _ in range(steps):
        opt.step()
    if folder is not None:
        wait_for_writer(folder, 1 + steps // how.get("snapshot_every", NEVER))
    spent = time.process_time() - start
    if publication is not None:
        publication.close()
    return spent / steps


def follow(folder: Path, model: torch.nn.Module, name: str) -> float:
    """Return the processor time of a step that is followed, behind two that are not counted."""
    follower = Follower(folder, model, CASES[name][0])
    first = min(LogReader(folder).snapshots())
    follower.to(first + 1)
    start = time.process_time()
    steps = len([*follower])
    return (time.process_time() - start) / steps


def bytes_of(folder: Path) -> tuple[float, float]:
    """Return the bytes of the codes of a frame, and those of a frame beyond them."""
    reader = LogReader(folder)
    sizes = [
        sum(len(leaf) for _, leaves in reader.frame(step).records for leaf in leaves)
        for steps in reader.steps().values()
        for step in steps
    ]
    total = sum(path.stat().st_size for path in folder.glob("*.log"))
    return sum(sizes) / len(sizes), (total - sum(sizes)) / len(sizes)


def backward(model: torch.nn.Module) -> float:
    """Return the processor time of a forward and a backward pass through the matrices, one behind the other."""
    x, start = torch.randn(EXAMPLES, next(model.parameters()).shape[1]), time.process_time()
    for p in model.parameters():
        x = torch.relu(x @ p) if p.ndim > 1 else x + p
    torch.autograd.grad(x.square().mean(), [*model.parameters()])
    return time.process_time() - start


def checkpointed(opt: fn.Optimizer, model: torch.nn.Module) -> tuple[float, int]:
    """Return the processor time of a checkpoint into memory, and its bytes."""
    start, file = time.process_time(), io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    return time.process_time() - start, file.tell()


def measure(numbers: int, name: str, pairs: int) -> dict[str, Any]:
    """Return the figures of a case at a size."""
    torch.manual_seed(0)
    model, followed = model_of(numbers), model_of(numbers)
    opt = optimizer(model, name)
    steps = max(6, min(20, 200_000_000 // numbers))
    each = 3  # with a digest or a snapshot
    rows: list[dict[str, float]] = []
    for k in range(pairs):
        with tempfile.TemporaryDirectory() as root:
            runs: list[Callable[[], float]] = [
                partial(block, opt, steps),
                partial(block, opt, steps, Path(root, "frames")),
                partial(block, opt, each, Path(root, "digests"), digest_every=1),
                partial(block, opt, each, Path(root, "snapshots"), snapshot_every=1),
            ]
            found = [run() for run in (runs[::-1] if k % 2 else runs)]
            row = dict(zip(("alone", "frames", "digests", "snapshots"), found[::-1] if k % 2 else found, strict=True))
            row["follower"] = follow(Path(root, "frames"), followed, name)
            row["backward"] = backward(model)
            row["codes"], row["beyond"] = bytes_of(Path(root, "frames"))
            row["checkpoint"], row["checkpoint bytes"] = checkpointed(opt, model)
        digest, snapshot = row["digests"] - row["frames"], row["snapshots"] - row["frames"]
        row["published"] = row["frames"] + digest / DIGESTS + snapshot / SNAPSHOTS
        rows.append(row)
    total = sum(p.numel() for p in model.parameters())
    middle = {kind: statistics.median(row[kind] for row in rows) for kind in rows[0]}
    return {
        "numbers": total,
        "step": name,
        "pairs": rows,
        "medians": middle,
        "writer": statistics.median(row["published"] / row["alone"] for row in rows),
        "training": statistics.median(
            (row["published"] + row["backward"]) / (row["alone"] + row["backward"]) for row in rows
        ),
        "frames": statistics.median(row["frames"] / row["alone"] for row in rows),
        "follower": statistics.median(row["follower"] / row["alone"] for row in rows),
    }


def table(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = []
    for case in result["cases"]:
        middle, numbers = case["medians"], case["numbers"]
        rows.append((
            f"{numbers / 1e6:.3g} M", case["step"], f"{1e3 * middle['alone']:.1f}",
            *(f"{100 * (case[what] - 1):+.1f} %" for what in ("writer", "frames", "training")),
            f"{middle['beyond']:.0f} bytes", f"{8 * middle['codes'] / numbers:.2f}", f"{case['follower']:.2f}",
            f"{1e3 * middle['checkpoint']:.0f}", f"{middle['checkpoint bytes'] / numbers:.1f}",
        ))  # fmt: skip
    return markdown(COLUMNS, rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numbers", type=int, nargs="+", default=[1_000_000, 10_000_000, 100_000_000])
    parser.add_argument("--pairs", type=int, default=9, help="of blocks")
    parser.add_argument("--only", nargs="+", choices=CASES, default=[*CASES], help="steps to measure")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    todo = [(numbers, name) for numbers in args.numbers for name in args.only]
    cases = [measure(numbers, name, args.pairs) for numbers, name in tqdm(todo)]
    result = {"about": about(), "cases": cases}
    write(args.json, result)
    print(table(result))


if __name__ == "__main__":
    main()
