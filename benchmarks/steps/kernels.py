"""Every kernel of a device against the textbook sequence, np.packbits, Inductor and the copy bandwidth.

    python -m benchmarks.steps.kernels --json benchmarks/results/kernels.json

Everything is interleaved in one process, once with the default malloc and once with one that keeps its pages. For a GPU
`gpu.py kernels` has the limits and the device's own clock.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

import fn
from benchmarks.devices import add_device, device_of
from benchmarks.measure import about, interleaved, markdown, with_both_mallocs, write
from benchmarks.steps import textbook
from fn.kernels.table import cells

BLOCK = 256
BETA = 0.8
RANKS = 2

# per kernel: the textbook's name, and the bytes that must move for every element of x
CELLS = {
    "encode with feedback, lazy": ("textbook encode", 12.125),
    "encode with feedback, lazy, in place": ("textbook encode", 12.125),
    "encode with feedback, plain": ("textbook encode", 12.125),
    "server half, W = 2, lazy": ("textbook serve", (RANKS / 8 + 8 + 1 / 8) / RANKS),
    "decode": ("textbook decode", 4.125),
    "int4 with 8-bit errors": ("textbook int4", 4 + 1 + 0.5 + 1 + 12 / BLOCK),
    "int8 encode": ("textbook int8", 5 + 4 / BLOCK),
    "int8 decode": ("textbook int8 decode", 5 + 4 / BLOCK),
    "Inductor encode": ("textbook encode", 12.125),
    "np.packbits alone": ("textbook encode", 5.125),
}


class Lazy:
    """A state that goes from call to call, as in training: the last buffer and scale."""

    def __init__(self, run: Callable[..., Any], *state: Tensor) -> None:
        self.run, self.state = run, state

    def __call__(self) -> None:
        """Take one step."""
        self.state = self.run(*self.state)


def contenders(n: int, compiler: bool, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Return what is timed, by name."""
    ops, shard = torch.ops.fn, n // RANKS
    x, error, out = (torch.randn(n, device=device) for _ in range(3))
    valid, part = torch.tensor([[n]], device=device), torch.tensor([[shard]], device=device)
    bits = torch.randint(0, 256, (RANKS, shard // 8), dtype=torch.uint8, device=device)
    scales = torch.rand(RANKS, device=device)
    blocks, runs = torch.full((1, n // BLOCK), BLOCK, device=device), [n // BLOCK, BLOCK]
    codes, factors = ops.quantize(x[None], blocks, runs, 8)
    row = x[None]

    def encode(buffer: Tensor, sent: Tensor) -> tuple[Tensor, Tensor]:
        b, _, sums = ops.sign_encode_feedback(row, buffer, sent, valid, [1, n], 0)
        return b, (sums / n).sqrt().float()

    def encode_over(x: Tensor, buffer: Tensor, sent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        _, sums = ops.sign_encode_feedback_(x, buffer, sent, valid, [1, n], 0)
        return buffer, x, (sums / n).sqrt().float()  # the next x has the memory of the old error

    def encode_plain(e: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
        b, _, sums = ops.sign_encode_feedback(row, e, zero, valid, [1, n], 0)
        return ops.sign_residual(b, (sums / n).sqrt().float(), valid, [1, n], 0), zero

    def serve(buffer: Tensor, sent: Tensor) -> tuple[Tensor, Tensor]:
        b, _, sums = ops.sign_serve(bits[None], scales[None, :, None], buffer, sent, part, [1, shard], 0)
        return b, (sums / shard).sqrt().float()

    def int4(e: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        return ops.quantize_feedback(row, e, s, BETA, blocks, runs, 4)[2:]

    one = torch.ones(1, 1, device=device)
    found: dict[str, Callable[[], Any]] = {
        "copy": lambda: out.copy_(x),
        "textbook encode": Lazy(lambda e: textbook.encode(x, e)[2:], error),
        "encode with feedback, lazy": Lazy(encode, error[None], one),
        "encode with feedback, lazy, in place": Lazy(encode_over, x[None].clone(), error[None].clone(), one),
        "encode with feedback, plain": Lazy(encode_plain, error[None], one * 0),
        "textbook serve": Lazy(lambda e: textbook.serve(bits, scales, e)[2:], error[:shard]),
        "server half, W = 2, lazy": Lazy(serve, error[None, :shard], one),
        "textbook decode": lambda: textbook.decode(bits, scales),
        "decode": lambda: ops.sign_decode_mean(bits[:, None], scales[:, None, None], part.expand(RANKS, 1),
                                               [1, shard], 0),
        "textbook int4": Lazy(lambda e, s: textbook.int4_with_8bit_error(x, e, s, BETA, BLOCK)[2:],
                              codes.view(-1, BLOCK), factors.view(-1, 1)),
        "int4 with 8-bit errors": Lazy(int4, codes, factors),
        "textbook int8": lambda: textbook.quantize(x, 8, BLOCK),
        "int8 encode": lambda: ops.quantize(row, blocks, runs, 8),
        "textbook int8 decode": lambda: textbook.dequantize(codes.view(-1, BLOCK), factors.view(-1, 1)),
        "int8 decode": lambda: ops.dequantize_mean(codes[:, None], factors[:, None], blocks, runs, 8),
    }  # fmt: skip
    if device.type == "cpu":
        found["np.packbits alone"] = lambda: np.packbits((x >= 0).numpy(), bitorder="little")
    if compiler:
        compiled = torch.compile(textbook.encode_for_a_compiler)
        found["Inductor encode"] = Lazy(lambda b, s: (compiled(x, b, s)[0], s), error, one[0, 0])
    return found


def first_use(device: torch.device) -> dict[str, float]:
    """Return seconds of the first call of each op: compiled, or read from the cache."""
    import importlib

    found, compiler = {}, "numba" if device.type == "cpu" else "triton"
    start = time.perf_counter()
    importlib.import_module(compiler)
    found[f"import {compiler}"] = time.perf_counter() - start
    for op in fn.kernels.reference.REFERENCES:
        start = time.perf_counter()
        cells(op, device.type)
        found[op] = time.perf_counter() - start
    return found


def child(options: argparse.Namespace) -> dict[str, Any]:
    """Measure in this process."""
    torch.set_num_threads(options.threads)
    device = device_of(options)
    first = first_use(device)
    before = torch.get_num_threads()
    found = contenders(options.n, not options.no_inductor, device)
    passed, spent = interleaved(found, options.rounds, device=device)
    assert torch.get_num_threads() == before
    return {"first use": first, "seconds": passed, "processor seconds": spent}


def table(result: dict[str, Any]) -> str:
    """Return the processor time of each kernel as Markdown, beside the textbook's with either malloc."""
    default, kept = (result["malloc"][malloc]["processor seconds"] for malloc in ("default", "keeps pages"))
    copy, rows = default["copy"], []
    for name, (book, size) in CELLS.items():
        if name in default:
            cells = [f"{1e3 * default[name]:.2f}"]
            for times in (default, kept):
                cells += [f"{1e3 * times[book]:.1f}", f"{times[book] / times[name]:.1f}"]
            rows.append([name, *cells, f"{size / 8 * copy / default[name]:.0%}"])
    rows.append(["a copy", f"{1e3 * copy:.2f}", "", "", "", "", "100%"])
    head = "| kernel | ms | textbook, ms | times as fast | textbook, pages kept, ms | times as fast | of a copy |"
    return markdown(head, rows)


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--n", type=int, default=1 << 24)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--no-inductor", action="store_true", help="leave out what needs a C++ compiler")
    add_device(parser)
    parser.add_argument("--json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(child(options)))
        return
    arguments = [f"--n={options.n}", f"--rounds={options.rounds}", f"--threads={options.threads}"]
    arguments.append(f"--device={device_of(options).type}")
    malloc = with_both_mallocs("benchmarks.steps.kernels", arguments + ["--no-inductor"] * options.no_inductor)
    result = {"about": about(), "n": options.n, "threads": options.threads, "malloc": malloc}
    print(table(result))
    write(options.json, result)


if __name__ == "__main__":
    main()
