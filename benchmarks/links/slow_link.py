"""Does compression pay on a slow link? Data-parallel steps of two ranks over a veth pair, throttled with `tc tbf`.

    python -m benchmarks.links.slow_link --png docs/slow_link.png --json benchmarks/results/slow_link.json

Needs root, network namespaces and iproute2; without them it says so and runs unthrottled over loopback. Contenders are
interleaved; figures are medians over the counted steps of the slower rank.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.devices import add_device, device_of
from benchmarks.links import namespaces
from benchmarks.links import slow_link_report as report
from benchmarks.links.slow_link_rank import RATES
from benchmarks.measure import about, write

RANK = "benchmarks.links.slow_link_rank"


def parse() -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", type=int, nargs=3, default=(8, 320, 8), metavar=("LAYERS", "WIDTH", "HEADS"))
    add("--batch", type=int, default=4, help="sequences of a rank's batch")
    add("--context", type=int, default=56, help="bytes of a sequence")
    add("--rounds", type=int, default=3, help="turns of each contender, 3 counted steps each")
    add("--rates", nargs="+", default=["100 Mbit/s", "1 Gbit/s", "10 Gbit/s"], choices=list(RATES))
    add("--loopback", action="store_true", help="do not throttle")
    add("--only", nargs="+", help="names of contenders (all); 'no communication' and 'DDP fp32' must be among them")
    add_device(parser)
    add("--backend", default="gloo", help="of the process groups (gloo, whose messages go over the link on any device)")
    add("--json", metavar="FILE")
    add("--png", metavar="FILE")
    arguments = parser.parse_args()
    arguments.device = device_of(arguments).type
    return arguments


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Start the ranks, in namespaces where that is possible; return what they saw."""
    reason = "--loopback" if arguments.loopback else namespaces.missing()
    if reason:
        print(f"no throttled link here ({reason}): both ranks run over loopback, unthrottled", file=sys.stderr)
        arguments.rates = ["unthrottled"]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        spaces = None if reason else stack.enter_context(namespaces.pair(f"fn-{os.getpid()}"))
        settings = {**vars(arguments), "folder": folder, "throttled": reason is None}
        ranks = []
        for rank in range(2):
            prefix = ["ip", "netns", "exec", spaces[rank]] if spaces else []
            device = namespaces.DEVICE if spaces else "lo"
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": device}
            command = [*prefix, sys.executable, "-m", RANK, str(rank), json.dumps(settings)]
            ranks.append(stack.enter_context(subprocess.Popen(command, env=environment)))
            stack.callback(ranks[-1].kill)
        if any(process.wait() for process in ranks):
            sys.exit("slow_link: a rank failed")
        found = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(2)]
    return {"about": about(), "throttled": reason is None, "model": arguments.model, "rates": report.rates(found)}


def main() -> None:
    """Run, print the tables, write the files."""
    arguments = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("slow_link: terminated"))  # and nothing is left behind
    result = run(arguments)
    print(report.table(result))
    write(arguments.json, result)
    if arguments.png:
        report.draw(result, arguments.png)


if __name__ == "__main__":
    main()
