"""A cold start on a GPU: what construction, the first step and the freeze take where no kernel is compiled yet.

Kernels are to be compiled when the optimizer is built, so that no step in the middle of a run does it: above all not
the first one in codes, for which every rank would wait.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Checks, Options, Row, at_most

MOST_SECONDS = 60.0
CASES = {
    "onebit_adam": "float32", "onebit_adam in bf16": "bfloat16", "zero_one_adam": "float32", "onebit_lamb": "float32",
}  # fmt: skip
"""The dtype of the params by the optimizer's name, and what follows it."""


def checks(options: Options) -> Checks:
    """Return the checks by name: each optimizer in a process whose cache is empty, then in one that has it."""
    names = tuple(CASES)[:1] if options.quick else tuple(CASES)
    return {f"cold start of {name}": partial(of_start, options, name) for name in names}


def of_start(options: Options, name: str) -> Iterator[Row]:
    """Start twice."""
    with tempfile.TemporaryDirectory() as folder:
        for when in ("cold", "warm"):
            found = started(options, name, folder)
            for what in ("construction", "first step", "second step", "first step in codes", "next step in codes"):
                title = f"{what} of {name}, {when}"
                if what == "construction" and when == "cold":
                    yield at_most(options, title, found[what], MOST_SECONDS, "s")
                else:
                    yield Row(title, found[what], "s")
            note = f"{found['compiled']:.0f} files are in the cache"
            yield at_most(options, f"files compiled in steps of {name}, {when}", found["compiled later"], 0, "", note)


def started(options: Options, name: str, cache: str) -> dict[str, float]:
    """Return what a process says that starts with a cache of kernels."""
    environment = {**os.environ, "TRITON_CACHE_DIR": cache}
    command = [sys.executable, "-m", "benchmarks.gpu.cold", json.dumps([options._asdict(), name, cache])]
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def start(options: Options, name: str, cache: str) -> dict[str, float]:
    """Build an optimizer and take steps; return the seconds of each, and how many files the cache has."""
    import torch

    import fn
    from benchmarks.gpu.step import parameters
    from benchmarks.measure import synchronise
    from benchmarks.steps.step import echo

    torch.set_num_threads(1)
    dtype = getattr(torch, CASES[name])
    params = [torch.nn.Parameter(p.detach().to(dtype)) for p in parameters(options._replace(layers=2))]
    for p in params:
        p.grad = torch.randn_like(p)
    found: dict[str, float] = {}

    def timed(what: str, run: Any) -> Any:
        synchronise(options.torch_device)
        begun = time.perf_counter()
        result = run()
        synchronise(options.torch_device)
        found[what] = time.perf_counter() - begun
        return result

    def build() -> Any:
        with echo():
            make = partial(getattr(fn, name.split()[0]), axis="data")
            phase = fn.Phase.COMPRESSED
            return fn.Optimizer(params, make, lr=1e-4, refuse_averaged=False,
                                schedule=lambda t: fn.Phase.WARMUP if t < 2 else phase)  # fmt: skip

    opt = timed("construction", build)
    before = files_in(cache)
    for what in ("first step", "second step", "first step in codes", "next step in codes"):
        timed(what, opt.step)
    return {**found, "compiled": files_in(cache), "compiled later": files_in(cache) - before}


def files_in(folder: str) -> int:
    """Return how many files a folder holds."""
    return sum(path.is_file() for path in Path(folder).rglob("*"))


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")  # of steps from random gradients, which train nothing
    told, wanted, where = json.loads(sys.argv[1])
    print(json.dumps(start(Options(**told), wanted, where)))
