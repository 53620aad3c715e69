"""`python -m fn log FOLDER`: what is in the log of a run, a line for each step; or the parameters behind one."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from fn.adapters.follow.follower import Follower
from fn.adapters.follow.log_format import Frame, tensors_module
from fn.adapters.follow.log_reader import LogReader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.description = (
        "Show the steps in the log of a run: phase, bytes, what changed, skips and digests; restarts too."
    )
    parser.add_argument("folder", metavar="FOLDER", help="of the log, or its http or https address")
    parser.add_argument(
        "--make",
        metavar="MODULE:FUNCTION",
        help="a function that returns the run's model and make, None for a log of params, "
        "and what averaged its gradients if `publish` had mean=",
    )
    parser.add_argument("--replay", metavar="STEP", type=int, help="replay the run up to this step; with --make, --out")
    parser.add_argument("--out", metavar="FILE", help="a new file for the model's state dict behind it, of safetensors")


def run(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Print a line for each step, and behind them what they sum up to; or replay the run up to a step."""
    given = [flags.make, flags.replay, flags.out]
    if None in given and given != [None] * 3:
        parser.error("--make, --replay and --out go together")
    try:
        if flags.make is None:
            _show(LogReader(flags.folder))
        else:
            _replay(flags)
    except (ValueError, LookupError, OSError, RuntimeError, ImportError) as error:
        parser.error(str(error))


def _replay(flags: argparse.Namespace) -> None:
    module, _, function = flags.make.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` looks for modules
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ImportError(f"--make: expected MODULE:FUNCTION, but got {flags.make!r}: {error}") from error
    model, make, *average = found()
    follower = Follower(flags.folder, model, make, average=next(iter(average), None))
    follower.to(flags.replay)
    data = tensors_module().save({name: x.contiguous() for name, x in model.state_dict().items()})
    with Path(flags.out).open("xb") as file:  # a file that is there stays as it is
        file.write(data)
    print(f"step {flags.replay}: {len(data):,} bytes in {flags.out}")


def _show(reader: LogReader) -> None:
    print(f"{'step':>9} {'bytes':>15}  {'phase':12} {'digest':32}  changed")
    count = total = skips = 0
    for incarnation, steps in reader.steps().items():
        print(f"incarnation {incarnation}, which began from step {steps.start}")
        for frame in map(reader.frame, steps):
            size = sum(len(leaf) for _, leaves in frame.records for leaf in leaves)
            count, total, skips = count + 1, total + size, skips + ("skipped" in frame.changed)
            print(f"{frame.step:9} {size:15,}  {frame.phase:12} {frame.digest or '':32}  {_changed(frame)}".rstrip())
    snapshots = ", ".join(map(str, reader.snapshots())) or "none"
    method = f"{reader.header['method']}: " if "method" in reader.header else ""
    print(f"{method}{count} steps, {total:,} bytes, {skips} skipped, {reader.incarnation} restarts")
    print(f"snapshots: {snapshots}")


def _changed(frame: Frame) -> str:
    return ", ".join(f"{name}={value}" for name, value in frame.changed.items())
