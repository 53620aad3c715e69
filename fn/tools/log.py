"""`python -m fn log FOLDER`: what is in the log of a run, a line for each step."""

from __future__ import annotations

import argparse

from fn.adapters.follow.log_format import Frame
from fn.adapters.follow.log_reader import LogReader


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.description = (
        "Show the steps in the log of a run: phase, bytes, what changed, skips and digests; restarts too."
    )
    parser.add_argument("folder", metavar="FOLDER", help="of the log, or its http or https address")


def run(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Print a line for each step; behind them what they sum up to."""
    try:
        _show(LogReader(flags.folder))
    except (ValueError, LookupError, OSError) as error:
        parser.error(str(error))


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
