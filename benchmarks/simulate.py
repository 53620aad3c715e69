"""Ranks in one process against ranks that are processes: the same step of the same model, on the same cores.

    python benchmarks/simulate.py --json benchmarks/results/simulate.json

A classifier of 100 k parameters, 1-bit Adam in the compressed phase, a batch of its own on every rank. "simulated"
is `fn.simulate` over that step, eager and compiled, on one thread; "processes" are gloo ranks on loopback, one thread
each, on all cores. With `--device` both worlds run there, the processes over `--backend`. Both are medians over the
steps. Memory is what tensors hold between steps, counted from their storages.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from devices import add_device, backend_of, device_of, of_rank
from measure import about, markdown, synchronise, write
from torch import Tensor

import fn
from fn import tree

SIZES = (64, 256, 256, 64)
BATCH = 8
WARMUP_STEPS = 3

Step = Callable[..., tuple[Any, Any, Tensor]]


def start(device: torch.device) -> dict[str, Tensor]:
    """Return the parameters of a multi-layer perceptron: 99,136 in six tensors."""
    g = torch.Generator().manual_seed(0)
    params = {}
    for i, (n, m) in enumerate(pairwise(SIZES)):
        params |= {f"w{i}": (torch.randn(n, m, generator=g) / n**0.5).to(device), f"b{i}": torch.zeros(m).to(device)}
    return params


def loss(params: dict[str, Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy of a batch (B, features), (B,)."""
    x, y = batch
    for i in range(len(SIZES) - 1):
        x = (torch.relu(x) if i else x) @ params[f"w{i}"] + params[f"b{i}"]
    return torch.nn.functional.cross_entropy(x, y)


def batches(ranks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return a batch for every rank: (W, B, features) and (W, B)."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(ranks, BATCH, SIZES[0], generator=g)
    return x.to(device), x.argmax(-1).to(device)


def step(tx: fn.Transform, phase: fn.Phase, params: Any, state: Any, batch: Any) -> tuple[Any, Any, Tensor]:
    """Take one step on this rank's batch. Both worlds run this function."""
    grads, value = torch.func.grad_and_value(loss)(params, batch)
    updates, state = tx.update(phase)(grads, state, params)
    return fn.apply_updates(params, updates), state, value


def optimizer() -> fn.Transform:
    """Return the optimizer."""
    return fn.onebit_adam(1e-3, eps=1e-4, axis="data")


def run(warm: Step, compressed: Step, params: Any, state: Any, batch: Any, steps: int) -> dict[str, Any]:
    """Warm up, then time compressed steps; the first two are not counted."""
    for _ in range(WARMUP_STEPS):
        params, state, _ = warm(params, state, batch)
    times, held, device = [], 0, batch[0].device
    for t in range(steps + 2):
        if t == 2:
            held, before = tensor_bytes((params, state)), resident()
            norm = sum(float(p.double().square().sum()) for p in tree.leaves(params)) ** 0.5
        synchronise(device)
        begin = time.perf_counter()
        params, state, value = compressed(params, state, batch)
        synchronise(device)
        times.append(time.perf_counter() - begin)
    found = {"seconds": statistics.median(times[2:]), "held": held, "peak": resident() - before}
    return {**found, "loss": float(value.mean()), "norm": norm}


def tensor_bytes(t: Any) -> int:
    """Return the bytes of the storages behind a tree, each storage once."""
    stores = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tree.leaves(t)}
    return sum(stores.values())


def resident() -> int:
    """Return this process' largest resident size so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def simulated(ranks: int, steps: int, compile: bool, device: torch.device) -> dict[str, Any]:
    """Measure `fn.simulate` in this process."""
    torch.set_num_threads(1)
    tx, params = optimizer(), start(device)
    dims = fn.rank_dims(tx.init(params))
    state = fn.simulate(tx.init, "data", ranks, in_dims=None, out_dims=dims)(params)
    warm, compressed = (
        fn.simulate(partial(step, tx, phase), "data", ranks, in_dims=(None, dims, 0), out_dims=(None, dims, 0))
        for phase in (fn.Phase.WARMUP, fn.Phase.COMPRESSED)
    )
    if compile:
        compressed = torch.compile(compressed, fullgraph=True)
    found = run(warm, compressed, params, state, batches(ranks, device), steps)
    pairs = list(zip(tree.leaves(state), tree.leaves(dims), strict=True))
    replicated, errors = ([x for x, d in pairs if (d is None) == same] for same in (True, False))
    return {**found, "one copy": tensor_bytes([params, replicated]), "errors": tensor_bytes(errors)}


def process(rank: int, ranks: int, options: argparse.Namespace, folder: str) -> None:
    """Measure one rank that is a process."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store", ranks)
    device, backend = of_rank(device_of(options), rank), backend_of(options, ranks)
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=3))
    tx, params = optimizer(), start(device)
    batch = tuple(x[rank] for x in batches(ranks, device))
    with fn.bind({"data": dist.group.WORLD}):
        state = tx.init(params)
        dist.barrier()
        warm, compressed = (partial(step, tx, phase) for phase in (fn.Phase.WARMUP, fn.Phase.COMPRESSED))
        found = run(warm, compressed, params, state, batch, options.steps)
    found["resident"] = unshared()
    Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def unshared() -> int:
    """Return what this process occupies, pages that it shares counted in part, in bytes; 0 where that is not told."""
    rollup = Path("/proc/self/smaps_rollup")
    lines = rollup.read_text().splitlines() if rollup.exists() else []
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def processes(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure ranks that are processes; the time is the slowest rank's median, the memory that of all."""
    multiprocessing.set_forkserver_preload(["torch.distributed", "torch.func", "fn.kernels.cpu.numba"])
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(process, (ranks, options, folder), ranks, start_method="forkserver")
        found = [json.loads(Path(f"{folder}/{r}.json").read_text()) for r in range(ranks)]
    total = {key: sum(f[key] for f in found) for key in ("held", "resident")}
    mean = sum(f["loss"] for f in found) / ranks
    return {"seconds": max(f["seconds"] for f in found), **total, "loss": mean, "norm": found[0]["norm"]}


def measure(ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return all rows for one number of ranks."""
    device = device_of(options)
    found = {
        "simulated, eager": simulated(ranks, options.steps, False, device),
        "simulated, compiled": simulated(ranks, options.steps, True, device),
        "processes": processes(ranks, options),
    }
    for row in found.values():  # the same training, but for the order in which batched products add up
        torch.testing.assert_close(row["norm"], found["processes"]["norm"], rtol=1e-3, atol=0)
    return found


def table(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = []
    for ranks, found in result["ranks"].items():
        for name, row in found.items():
            parts = f"{row['one copy'] / 1e6:.2f} + {row['errors'] / 1e6:.1f}" if "errors" in row else ""
            share = row["seconds"] / found["processes"]["seconds"]
            rows.append((ranks, name, f"{1e3 * row['seconds']:.1f}", f"{share:.3f}", f"{row['held'] / 1e6:.1f}", parts))
    head = "| ranks | world | ms a step | of the processes' | MB held by tensors | one copy + errors, MB |"
    return markdown(head, rows)


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", default="16,64", help="numbers of ranks, with commas")
    parser.add_argument("--steps", type=int, default=20)
    add_device(parser, backend=True)
    parser.add_argument("--json")
    options = parser.parse_args()
    ranks = {ranks: measure(int(ranks), options) for ranks in options.ranks.split(",")}
    result = {"about": about(), "steps": options.steps, "ranks": ranks}
    print(table(result))
    write(options.json, result)


if __name__ == "__main__":
    main()
