"""Kernels on a GPU: none refused, all conforming, and how near to the bandwidth of a copy they come.

Bytes are counted once each: what must be read and what must be written. The copy is one on the device, in the same run.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

import fn
from benchmarks.gpu.rows import Check, Checks, Options, Row, at_least, outcome, skipped
from benchmarks.measure import on_device
from benchmarks.steps import textbook
from fn.kernels.reference import REFERENCES
from fn.kernels.table import Accelerator, cells, refusals, rows
from fn.testing.kernels import SIZES

BLOCK = 256
SIGNS = 64
"""Elements of a block of signs."""

BETA = 0.8
RANKS = 2
QUICK = ("pack_bits", "sign_encode", "quantize")

LEAST = 85.0

OF_COPY: dict[str, tuple[float, float | None]] = {
    "sign encode": (4 + 1 / 8, LEAST),
    "sign encode with feedback": (12 + 1 / 8, LEAST),
    "sign encode with feedback, blocks of 64": (12 + 1 / 8 + (4 + 8) / SIGNS, None),
    "sign encode with feedback, in place": (12 + 1 / 8, LEAST),
    "sign server half, W = 2": ((RANKS / 8 + 8 + 1 / 8) / RANKS, None),
    "sign server half, W = 2, blocks of 64": ((RANKS / 8 + 8 + 1 / 8 + (4 * RANKS + 4 + 8) / SIGNS) / RANKS, None),
    "sign decode": (4 + 1 / 8, LEAST),
    "sign decode, mean of W = 2": (4 + RANKS / 8, None),
    "sign decode, mean of W = 2, blocks of 64": (4 + RANKS / 8 + 4 * RANKS / SIGNS, None),
    "int8 encode": (5 + 4 / BLOCK, LEAST),
    "int8 decode": (5 + 4 / BLOCK, LEAST),
    "int4 encode": (4.5 + 4 / BLOCK, LEAST),
    "int4 decode": (4.5 + 4 / BLOCK, LEAST),
    "int4 encode with 8-bit errors": (6.5 + 12 / BLOCK, None),
}
"""Bytes that must move for an element, and the least percentage of the copy's bandwidth.

A scale that is read has 4 bytes, a sum of squares that is written 8.
"""


def checks(options: Options) -> Checks:
    """Return the checks by name: the table, the speed of groups of kernels, then every kernel of every row."""
    found: dict[str, Check] = {
        "the table": partial(of_table, options),
        "speed of signs": partial(bandwidth, options, signs),
        "speed of integers": partial(bandwidth, options, integers),
        "sign packing against CuPy": partial(against_cupy, options),
        "sign encode against torch.compile": partial(against_a_compiler, options),
    }
    for row in rows(options.torch_device.type):
        for op in row.kernels:
            if not options.quick or (op in QUICK and row.name != "torch"):
                found[f"conformance of {op}, {row.name}"] = partial(of_kernel, options, row, op)
    return found


def of_table(options: Options) -> Iterator[Row]:
    """Say who provides the kernels; a refused one is a fault, a package that is not installed is none."""
    kind = options.torch_device.type
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the refusals follow
        own = [op for op in REFERENCES if cells(op, kind)]
    others = sorted(set(REFERENCES) - set(own))
    yield Row("kernels with a row of their own", len(own), f"of {len(REFERENCES)}", note=", ".join(others))
    mine = {key: reason for key, reason in refusals().items() if key[0] == kind}
    for (_, provider, op), reason in mine.items():
        if not op and reason.startswith("No module named"):
            yield skipped(f"the row of {provider}", reason)
        else:
            yield outcome(f"{op or 'the row'} of {provider} is used", reason)
    if not mine:
        yield outcome("no kernel is refused", None)


def of_kernel(options: Options, row: Accelerator, op: str) -> Iterator[Row]:
    """Compare a kernel with the reference."""
    sizes = (0, 9, 1023) if options.quick else SIZES
    report = fn.testing.conformance(row, ops=[op], sizes=sizes)
    yield outcome(f"{op} of {row.name} conforms", None if report else "; ".join(report.faults))


def bandwidth(options: Options, make: Callable[[int, torch.device], dict[str, Any]]) -> Iterator[Row]:
    """Time kernels beside a copy."""
    n, device = options.elements, options.torch_device
    x = torch.randn(n, device=device)
    y = torch.empty_like(x)
    with torch.no_grad():
        seconds = on_device({"copy": lambda: y.copy_(x), **make(n, device)}, options.rounds, device)
    copied = 8 * n / seconds.pop("copy")
    yield Row("copy", copied / 1e9, "GB/s", note=f"{n} float32, read and written")
    for name, passed in seconds.items():
        size, least = OF_COPY[name]
        share = 100 * size * n / passed / copied
        note = f"{1e3 * passed:.3f} ms"
        yield Row(name, share, "% of copy", note=note) if least is None else at_least(
            options, name, share, least, "% of copy", note
        )


def signs(n: int, device: torch.device) -> dict[str, Any]:
    """Return the kernels of signs over n numbers."""
    ops, half = torch.ops.fn, n // RANKS
    x, buffer, over, error = (torch.randn(1, n, device=device) for _ in range(4))
    one, each = torch.ones(1, 1, device=device), torch.rand(1, RANKS, 1, device=device)
    valid, part = torch.tensor([[n]], device=device), torch.tensor([[half]], device=device)
    bits = torch.randint(0, 256, (1, RANKS, half // 8), dtype=torch.uint8, device=device)
    whole = torch.randint(0, 256, (1, RANKS, n // 8), dtype=torch.uint8, device=device)
    sent, many = (torch.rand(*rows, -(-n // SIGNS), device=device) for rows in ((1,), (1, RANKS)))
    served, parts = (torch.rand(*rows, -(-half // SIGNS), device=device) for rows in ((1,), (1, RANKS)))
    shard, row, piece = error[:, :half], (valid, [1, n]), (part, [1, half])
    return {
        "sign encode": lambda: ops.sign_encode(x, *row, 0),
        "sign encode with feedback": lambda: ops.sign_encode_feedback(x, buffer, one, *row, 0),
        "sign encode with feedback, blocks of 64": lambda: ops.sign_encode_feedback(x, buffer, sent, *row, SIGNS),
        "sign encode with feedback, in place": lambda: ops.sign_encode_feedback_(over, buffer, one, *row, 0),
        "sign server half, W = 2": lambda: ops.sign_serve(bits, each, shard, one, *piece, 0),
        "sign server half, W = 2, blocks of 64": lambda: ops.sign_serve(bits, parts, shard, served, *piece, SIGNS),
        "sign decode": lambda: ops.sign_decode_mean(whole[:, :1], one[:, None], *row, 0),
        "sign decode, mean of W = 2": lambda: ops.sign_decode_mean(whole, each, *row, 0),
        "sign decode, mean of W = 2, blocks of 64": lambda: ops.sign_decode_mean(whole, many, *row, SIGNS),
    }


def integers(n: int, device: torch.device) -> dict[str, Any]:
    """Return the kernels of integers over n numbers."""
    ops, x = torch.ops.fn, torch.randn(1, n, device=device)
    place = torch.full((1, n // BLOCK), BLOCK, device=device), [n // BLOCK, BLOCK]
    found: dict[str, Any] = {}
    for width in (8, 4):
        codes, scales = ops.quantize(x, *place, width)
        found[f"int{width} encode"] = partial(ops.quantize, x, *place, width)
        found[f"int{width} decode"] = partial(ops.dequantize_mean, codes[:, None], scales[:, None], *place, width)
    error, factors = ops.quantize(x, *place, 8)
    found["int4 encode with 8-bit errors"] = partial(ops.quantize_feedback, x, error, factors, BETA, *place, 4)
    return found


def against_cupy(options: Options) -> Iterator[Row]:
    """Time the packing of signs against the sequence of DeepSpeed's CuPy backend."""
    name = "sign packing against CuPy's packbits"
    if importlib.util.find_spec("cupy") is None:
        yield skipped(name, "cupy is not installed")
        return
    if options.torch_device.type != "cuda":
        yield skipped(name, f"CuPy packs on cuda, and this is {options.device}")
        return
    import cupy

    n, device = options.elements, options.torch_device
    x = torch.randn(1, n, device=device)

    def theirs() -> Any:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            return cupy.packbits(cupy.from_dlpack(x[0].sign().add_(1).bool().view(torch.uint8)), bitorder="little")

    ours = torch.ops.fn.pack_bits(x)
    same = torch.equal(torch.from_dlpack(theirs()), ours[0])
    yield outcome("the bits are CuPy's", None if same else "they differ")
    seconds = on_device({"ours": lambda: torch.ops.fn.pack_bits(x), "theirs": theirs}, options.rounds, device)
    note = f"{1e3 * seconds['ours']:.3f} ms against {1e3 * seconds['theirs']:.3f}"
    yield at_least(options, name, seconds["theirs"] / seconds["ours"], 5.0, "x", note)


def against_a_compiler(options: Options) -> Iterator[Row]:
    """Time the encoder with feedback against the textbook sequence, compiled and as it is."""
    n, device = options.elements, options.torch_device
    x, buffer = torch.randn(n, device=device), torch.randn(n, device=device)
    one, valid = torch.ones(1, 1, device=device), torch.tensor([[n]], device=device)
    compiled = torch.compile(textbook.encode_for_a_compiler, backend="aot_eager" if options.quick else "inductor")

    def ours() -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = torch.ops.fn.sign_encode_feedback(x[None], buffer[None], one, valid, [1, n], 0)
        return found

    with torch.no_grad():
        their_bits = compiled(x, buffer, one[0, 0])[1]
        same = torch.equal(ours()[1][0], their_bits)
        yield outcome("the bits are the compiled textbook's", None if same else "they differ")
        contenders = {"ours": ours, "compiled": lambda: compiled(x, buffer, one[0, 0]),
                      "eager": lambda: textbook.encode_for_a_compiler(x, buffer, one[0, 0])}  # fmt: skip
        seconds = on_device(contenders, options.rounds, device)
    for name, least in (("compiled", 1.2), ("eager", None)):
        note = f"{1e3 * seconds['ours']:.3f} ms against {1e3 * seconds[name]:.3f}"
        title, ratio = f"sign encode with feedback against the {name} textbook", seconds[name] / seconds["ours"]
        yield Row(title, ratio, "x", note=note) if least is None else at_least(options, title, ratio, least, "x", note)
