"""Run seeds of the world: `python -m fn.testing.world --seed N --count M`."""

from __future__ import annotations

import argparse
import gc
import sys
import time

import torch

from fn.testing.world import Result, drawn, run, shrunk


def main() -> int:
    """Run seeds, a line each, and a line of their sum; tell those that fail. Returns: 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m fn.testing.world", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1, help="how many, one after the other")
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()  # what is here now stays, and need not be looked at again and again
    began, results = time.process_time(), list[Result]()
    for seed in range(args.seed, args.seed + args.count):
        result = run(drawn(seed))
        print(result if not result.failure else shrunk(result).told(), flush=True)
        results.append(result._replace(story=[]))
    failed = [result.plan.seed for result in results if result.failure]
    counted, *sums = (sum(getattr(r, name) for r in results) for name in ("counts", "exchanges", "faults", "healings"))
    print(
        "{} seeds, {} of which count: {} exchanges, {} faults, {} healings; ".format(len(results), counted, *sums)
        + f"failed: {failed or 'none'}; {(time.process_time() - began) / len(results):.2f} s of a core each"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
