"""Launches of the hottest kernels of Triton on a GPU: blocks, elements of a warp, registers; the best into the table.

The table is `fn/kernels/gpu/triton/launches.py`; with --write its lines are those of the fastest here. Sums of norms
depend on the size of a block, and ranks have to agree on them: blocks of kernels that add up stay as they are.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import fn
from benchmarks.gpu.rows import Checks, Options, Row, at_most, skipped
from benchmarks.gpu.step import shapes
from benchmarks.measure import on_device
from fn.kernels.table import direct

TABLE = Path(fn.__file__).parent / "kernels" / "gpu" / "triton" / "launches.py"
BLOCKS, PER_WARP, REGISTERS = (1024, 2048, 4096), (128, 256, 512), (None, 48, 64)
DESCENT = (1e-8, 0.01, 1e-3)
SIGNS = 64
"""Elements of a block of signs, as 1-bit Adam has them."""

WORTH = 0.98
"""The share of the time of today's launch below which another one is taken."""


def checks(options: Options) -> Checks:
    """Return the checks by name."""
    names = [*CALLS][:1] if options.quick else [*CALLS]
    return {f"launches of {name}": partial(of_kernel, options, name) for name in names}


def lists(options: Options) -> list[list[Tensor]]:
    """Return params, gradients, mu and nu of a GPT, on the device."""
    device = options.torch_device
    made = [[torch.randn(shape, device=device) for shape in shapes(options)] for _ in range(4)]
    return [*made[:3], [x.abs_() for x in made[3]]]


def adamw(options: Options) -> Callable[[], Any]:
    """Return AdamW's step."""
    p, g, m, v = lists(options)
    return lambda: direct("adamw_", p, g, m, v, 0.9, 0.99, *DESCENT, math.inf, False)


def rows(options: Options) -> tuple[Tensor, list[int]]:
    """Return valid and runs of the model's tensors in one row, a segment each, widths of whole bytes."""
    sizes = [math.prod(shape) for shape in shapes(options)]
    valid = torch.tensor([sizes], device=options.torch_device)
    return valid, [x for size in sizes for x in (1, 8 * -(-size // 8))]


def scales_of(runs: Sequence[int]) -> int:
    """Return how many scales a row has."""
    return sum(-(-width // SIGNS) for width in runs[1::2])


def onebit(options: Options) -> Callable[[], Any]:
    """Return 1-bit Adam's step from codes."""
    p, _, m, v = lists(options)
    valid, runs = rows(options)
    bits = torch.randint(0, 256, (1, 1, sum(runs[1::2]) // 8), dtype=torch.uint8, device=options.torch_device)
    scales = torch.rand(1, 1, scales_of(runs), device=options.torch_device)
    return lambda: direct("onebit_adam_", p, m, v, bits, scales, valid, runs, SIGNS, *DESCENT, 1.0, True, [])


def encode_averages(options: Options) -> Callable[[], Any]:
    """Return the encoder of averages with their errors."""
    _, g, m, _ = lists(options)
    valid, runs = rows(options)
    buffer = torch.randn(1, sum(runs[1::2]), device=options.torch_device)
    sent = torch.rand(1, scales_of(runs), device=options.torch_device)
    return lambda: direct("momentum_encode", m, g, 0.9, buffer, sent, valid, runs, SIGNS)


CALLS: Mapping[str, Callable[[Options], Callable[[], Any]]] = {
    "adamw_kernel": adamw,
    "onebit_kernel": onebit,
    "encode_averages_kernel": encode_averages,
}
FIXED = ("encode_averages_kernel",)
"""Kernels whose blocks are those of all encoders, which are not swept."""


def of_kernel(options: Options, name: str) -> Iterator[Row]:
    """Time a kernel under every launch, in turns with today's; write the fastest if that was asked for."""
    run = CALLS[name](options)
    if importlib.util.find_spec("triton") is None:
        yield skipped(f"launches of {name}", "triton is not installed")
        return
    from fn.kernels.gpu.triton import launches

    today = launches.LAUNCHES.get(name, launches.Launch())
    blocks = (today.block,) if name in FIXED else BLOCKS
    others = [launch for launch in fitting(blocks) if launch != today]
    best, share = today, 1.0
    try:
        for other in others[: 1 if options.quick else None]:
            seconds = on_device({"today": under(name, today, run), "other": under(name, other, run)},
                                max(2, options.rounds // 3), options.torch_device)  # fmt: skip
            ratio = seconds["other"] / seconds["today"]
            yield Row(f"{name}, {shown(other)}", ratio, "x today's", note=f"{1e3 * seconds['other']:.3f} ms")
            if ratio < min(share, WORTH):
                best, share = other, ratio
    finally:
        launches.LAUNCHES[name] = today
    note = f"today's is {shown(today)}, the fastest {shown(best)}"
    yield at_most(options, f"{name}: today's launch / the fastest", 1 / share, 1 / WORTH, "x", note)
    if options.write and options.judges_speed and best != today:
        TABLE.write_text(written(TABLE.read_text(), name, shown(best)))


def fitting(blocks: Sequence[int]) -> Iterator[Any]:
    """Yield the launches of programs of at most 16 warps."""
    from fn.kernels.gpu.triton import launches

    for block, per_warp, registers in product(blocks, PER_WARP, REGISTERS):
        if 1 <= block // per_warp <= 16:
            yield launches.Launch(block, per_warp, registers)


def under(name: str, launch: Any, run: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call under another launch."""
    from fn.kernels.gpu.triton import launches

    def call() -> Any:
        launches.LAUNCHES[name] = launch
        return run()

    return call


def shown(launch: Any) -> str:
    """Return a launch as the table has it."""
    defaults = type(launch)()
    fields = [f"{k}={v}" for k, v in launch._asdict().items() if v != getattr(defaults, k)]
    return f"Launch({', '.join(fields)})"


def written(text: str, name: str, launch: str) -> str:
    """Return the text of the table with another launch of a kernel."""
    line = re.compile(rf'^    "{name}": Launch\([^)]*\),$', re.MULTILINE)
    assert line.search(text), f"{name} has no line in the table"
    return line.sub(f'    "{name}": {launch},', text)
