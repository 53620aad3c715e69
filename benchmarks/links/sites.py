"""Rounds between two sites that are far apart: 20 Mbit/s each way, and a round trip of 80 ms.

    python -m benchmarks.links.sites --json benchmarks/results/sites.json

DiLoCo in int8, whole or streaming in four fragments, its means at once or late, beside DDP in float32. As in `grid.py`,
tensors, codecs and links are real, and a GPU's computation is a wait: here of 10 million parameters, and 300 ms. `tc`
shapes what a site sends; a switch of taps holds each frame for half a round trip (`far_apart.py`). Needs root, iproute2
and /dev/net/tun; 10 minutes.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from typing import Any

from tqdm import tqdm

from benchmarks.links import far_apart, grid, grid_report
from benchmarks.links.contenders import ROUND
from benchmarks.links.grid_methods import SITES
from benchmarks.measure import about, markdown, write

RATE = "20 Mbit/s"
ROUND_TRIP = 0.08
SIZE = (8, 320)
WORDS = {"words": 256, "context": 64}


def parse() -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--compute", type=float, default=0.3, metavar="SECONDS", help="of the wait in a step (default: 0.3)")
    add("--only", nargs="+", default=list(SITES), choices=list(SITES), metavar="METHOD", help="names of methods (all)")
    add("--tiny", action="store_true", help="one layer of width 32; tries the script")
    add("--loopback", action="store_true", help="neither rate nor distance; tries the script")
    add("--json", metavar="FILE")
    return parser.parse_args()


def tasks(options: argparse.Namespace) -> Iterator[grid.Task]:
    """Yield what is measured: the link, then each method, its coding first."""
    yield grid.Task(2, None, SIZE, (RATE,))
    for method in options.only:
        yield from (grid.Task(2, method, SIZE, (part,)) for part in ("coding", RATE))


def table(result: dict[str, Any]) -> str:
    """Return Markdown: seconds of a round, what of it is not computation, and the planner's prediction."""
    rows = []
    for cell in grid_report.cells(result):
        seen = cell.step
        spread = f"{ROUND * seen.fastest:.1f} – {ROUND * seen.slowest:.1f}" if seen.repeats > 1 else "once"
        predicted = ROUND * (cell.predicted or 0.0)
        ratio = f"{predicted:.1f} ({predicted / (ROUND * seen.seconds):.2f})" if predicted else ""
        lost = ROUND * (seen.seconds - cell.alone.seconds)
        cells = f"{ROUND * seen.seconds:.1f} ({spread})", f"{lost:.1f}", f"{ROUND * cell.planned / 1e6:.1f}", ratio
        rows.append([seen.method, *cells])
    where = "over loopback, unthrottled" if not result["throttled"] else f"{RATE} each way, a round trip of 80 ms"
    first = f"two ranks, {where}, a wait of {1e3 * result['compute']:.0f} ms as computation"
    return markdown(f"{first} | s for {ROUND} steps (range) | of it waiting | MB sent | planner, s", rows)


def main() -> None:
    """Measure, print the table, write the file."""
    options = parse()
    options.words = tuple(WORDS.values())
    if not options.loopback and (reason := far_apart.missing()):
        sys.exit(f"sites: there is no link to shape here ({reason}); --loopback tries the script without one")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("sites: terminated"))  # and nothing is left behind
    result: dict[str, Any] = {"compute": options.compute, "throttled": not options.loopback, "words": WORDS}
    result["points"], delay = {}, 0.0 if options.loopback else ROUND_TRIP / 2
    todo = list(tasks(options))
    with tqdm(todo, unit="point") as bar:
        for task in bar:
            bar.set_postfix_str(f"{task.method or 'link'}, {task.parts[0]}")
            found = grid.measure(task, options, delay)
            if not found:
                sys.exit(f"sites: {task.method or 'the link'} failed")
            result["points"] |= found
    result["about"] = about()
    print(table(result))
    write(options.json, result)


if __name__ == "__main__":
    main()
