"""Run seeds of the world: `python -m fn.testing.world --seed N --count M`."""

from __future__ import annotations

import argparse
import gc
import sys
import time

import torch

from fn.testing.world import drawn, run, shrunk


def main() -> int:
    """Run seeds, a line each, and a line of their sum; tell the first failing one. Returns: 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m fn.testing.world", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many, one after the other")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # what is here now stays, and need not be looked at again and again
    began, failed, counted, sums = time.process_time(), list[int](), 0, [0, 0, 0]
    for seed in range(args.seed, args.seed + args.count):
        result = run(drawn(seed))
        print(result, flush=True)
        if result.failure:
            print(shrunk(result).told(), flush=True)
        failed += [seed] * bool(result.failure)
        counted += result.counts
        sums = [x + y for x, y in zip(sums, (result.exchanges, result.faults, result.healings), strict=True)]
    seconds = (time.process_time() - began) / args.count
    which = f": {', '.join(map(str, failed))}" if failed else ""
    print(f"{args.count} seeds, {counted} of which count: {sums[0]} exchanges, {sums[1]} faults, {sums[2]} healings; "
          f"{len(failed)} failed{which}; {seconds:.2f} s of a core each")  # fmt: skip
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
