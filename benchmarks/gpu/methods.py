"""Other methods on a GPU: exchanges of local steps, low rank and votes, at two sizes of a GPT.

As in `gpu_step`, the axis has two ranks, of which the other one says what this one says. Limits are those that
`tests/scripts/gpu_counts.py` holds for 8 ranks; time and memory are shown.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import fn
from benchmarks.gpu.rows import Check, Checks, Options, Row, at_most
from benchmarks.gpu.step import counted, parameters, peak_of
from benchmarks.measure import on_device
from benchmarks.steps.step import adapter
from fn import Phase, Round

C = Phase.COMPRESSED
LOCAL_STEP, EXCHANGE = Round(), Round(0, 0)
SIZES = {"124 million": (12, 768), "1.3 billion": (24, 2048)}
"""Layers and width."""


class Method(NamedTuple):
    """What is measured. launches, waits: the most at 1.3 billion parameters."""

    make: Callable[..., fn.Transform]
    phase: Phase | Round
    launches: float
    waits: float


METHODS = {
    "diloco, exchange": Method(fn.diloco, EXCHANGE, 1500, 2),
    "local_sgd, exchange": Method(fn.local_sgd, EXCHANGE, 1500, 2),
    "muloco, exchange": Method(fn.muloco, EXCHANGE, 1500, 2),
    "muloco, local step": Method(fn.muloco, LOCAL_STEP, 600, 1),
    "sparse_loco, exchange": Method(fn.sparse_loco, EXCHANGE, 5000, 2),
    "powersgd_adamw": Method(fn.powersgd_adamw, C, 300, 1),
    "dion": Method(fn.dion, C, 600, 1),
    "lion_vote": Method(fn.lion_vote, C, 300, 1),
    "lamb": Method(fn.lamb, Phase.WARMUP, 300, 1),
}
QUICK = ("diloco, exchange", "powersgd_adamw")


def checks(options: Options) -> Checks:
    """Return the checks by name: all methods at the small size, then at the large one."""
    names = QUICK if options.quick else tuple(METHODS)
    sizes = {"tiny": (1, 8)} if options.quick else SIZES
    found: dict[str, Check] = {}
    for size, (layers, width) in sizes.items():
        for name in names:
            told = options._replace(layers=layers, width=width)
            found[f"{name}, {size}"] = partial(of_method, told, name, size)
    return found


def of_method(options: Options, name: str, size: str) -> Iterator[Row]:
    """Count, then time a step, and measure what it holds."""
    warnings.simplefilter("ignore")  # of steps from random gradients, which train nothing
    gc.collect()
    method, device = METHODS[name], options.torch_device
    params = parameters(options)
    step = adapter(params, partial(method.make, axis="data"), method.phase)
    for _ in range(2):
        step()
    counts, title = counted(step, device), f"{name}, {size}"
    seconds = on_device({name: step}, max(1, options.rounds // 3), device)[name]
    numbers = sum(p.numel() for p in params)
    yield Row(f"time of {title}", 1e3 * seconds, "ms", note=f"{numbers / 1e6:.0f} million parameters")
    yield Row(f"peak of {title}", peak_of(step, device) / numbers, "B/param")
    yield at_most(options, f"launches of {title}", counts["launches"], method.launches, "")
    yield at_most(options, f"waits of {title}", counts["waits"], method.waits, "", f"{counts['reads']} copies")
