"""What an exchange costs where islands compute otherwise: the agreed row beside this machine's own kernels.

    python benchmarks/unlike_islands.py --json benchmarks/results/unlike_islands.json

One of two ranks of DiLoCo, ten million parameters in ten tensors, on one thread, communication apart: encode, decode,
mean and outer step, each with its local step, which takes the machine's own kernels in both. They take turns.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch

import fn
from benchmarks.measure import about, interleaved, markdown, write
from benchmarks.steps.step import echo
from fn.adapters.optim.core import stage_exchange
from fn.kernels.table import agreed_row

CODECS = {"exact": None, "int8": fn.int8(), "2-bit bins": fn.bins(4, 6), "signs": fn.sign()}


def exchange(codec: Any, side: int, agreed: bool) -> Any:
    """Return what takes an exchange."""
    params = [torch.nn.Parameter(torch.randn(side, side)) for _ in range(10)]
    for p in params:
        p.grad = torch.randn(p.shape)
    with echo():
        make = partial(fn.diloco, axis="data", codec=codec)
        opt = fn.Optimizer(params, make, schedule=fn.every(1), lr=1e-4, refuse_averaged=False)

    def run() -> None:
        with torch.no_grad(), opt.binding, agreed_row(agreed):
            stage_exchange(opt, fn.Round(0, 0)).commit()

    opt.step()
    return run


def table(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = [
        (name, f"{row['own']:.0f}", f"{row['agreed']:.0f}", f"{row['agreed'] / row['own']:.1f}")
        for name, row in result["rows"].items()
    ]
    return markdown("| codes | own kernels, ms | agreed row, ms | ratio |", rows)


def main() -> None:
    """Time them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--side", type=int, default=1000, help="of each of the ten matrices")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = {}
    for name, codec in CODECS.items():
        contenders = {which: exchange(codec, args.side, which == "agreed") for which in ("own", "agreed")}
        _, times = interleaved(contenders, args.rounds)
        rows[name] = {which: 1e3 * seconds for which, seconds in times.items()}
    result = {"about": about(), "rows": rows}
    write(args.json, result)
    print(table(result))


if __name__ == "__main__":
    main()
