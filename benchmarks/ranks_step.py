"""A whole optimizer step on real ranks: 1-bit Adam against what people run today, interleaved in one run.

    python benchmarks/ranks_step.py --json ranks_step.json

Every rank has one thread, or a device (`--device`, `--backend`). The peers: a flat fp32 all-reduce and
`torch.optim.Adam` (foreach), and the sequence that DeepSpeed's 1-bit Adam runs in its compressed phase, tensor by
tensor, as `textbook.py` has it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from devices import add_device, backend_of, device_of, of_rank, threads
from measure import synchronise
from textbook import pack, unpack

import fn

Step = Callable[[], None]


def make_parameters(count: int, total: int, device: torch.device) -> list[torch.nn.Parameter]:
    """Return parameters of equal size, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(total // count, generator=generator).to(device)) for _ in range(count)]


def fill_gradients(params: list[torch.nn.Parameter], rank: int) -> None:
    """Give every parameter a gradient of the rank's own."""
    generator = torch.Generator().manual_seed(1 + rank)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device)


def onebit_adam(params: list[torch.nn.Parameter], compile: bool, lazy: bool = False) -> Step:
    """Return our step; its compressed phase starts at the third."""
    make = partial(fn.onebit_adam, axis="data", feedback=fn.classic(lazy=lazy))
    return fn.Optimizer(params, make, schedule=fn.freeze_after(2), lr=1e-4, compile=compile).step


def exact_adam(params: list[torch.nn.Parameter]) -> Step:
    """Return a flat fp32 all-reduce and torch's Adam."""
    optimizer = torch.optim.Adam(params, lr=1e-4)

    def step() -> None:
        flat = torch.cat([p.grad.view(-1) for p in params])
        dist.all_reduce(flat)
        flat /= dist.get_world_size()
        for p, g in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad.copy_(g.view_as(p))
        optimizer.step()

    return step


def textbook_onebit_adam(params: list[torch.nn.Parameter]) -> Step:
    """Run what DeepSpeed runs, per tensor: compensate, norm, sign, pack, two exchanges, unpack, errors, update."""
    world = dist.get_world_size()
    states = []
    for p in params:
        n = -(-p.numel() // (world * 8)) * world * 8
        states.append([torch.zeros_like(p), torch.ones_like(p), p.new_zeros(n), p.new_zeros(n // world)])

    def step() -> None:
        with torch.no_grad():
            for p, (mu, nu, worker, server) in zip(params, states, strict=True):
                mu.mul_(0.9).add_(p.grad, alpha=0.1)
                mu.copy_(textbook_all_reduce(mu, worker, server).view_as(mu))
                p.add_(mu / (nu.sqrt() + 1e-8), alpha=-1e-4)

    return step


def textbook_all_reduce(x: torch.Tensor, worker: torch.Tensor, server: torch.Tensor) -> torch.Tensor:
    """Average one tensor in codes, as DeepSpeed's backend does."""
    world, n = dist.get_world_size(), worker.numel()
    buffer = torch.cat([x.view(-1), x.new_zeros(n - x.numel())]) + worker
    scale = buffer.norm() / n**0.5
    worker.copy_(buffer - scale * buffer.sign().add(1).bool().float().add(-0.5).mul(2.0))
    bits = pack(buffer)
    received, scales = torch.empty_like(bits), [x.new_empty(1) for _ in range(world)]
    dist.all_to_all_single(received, bits)
    dist.all_gather(scales, scale.view(1))
    mean = unpack(received).view(world, -1).mul(torch.stack(scales) / world).sum(0)
    mean.add_(server)
    scale = mean.norm() / mean.numel() ** 0.5
    server.copy_(mean - scale * mean.sign().add(1).bool().float().add(-0.5).mul(2.0))
    bits = pack(mean)
    gathered = [torch.empty_like(bits) for _ in range(world)]
    dist.all_gather(gathered, bits)
    dist.all_gather(scales, scale.view(1))
    return unpack(torch.cat(gathered)).view(world, -1).mul(torch.stack(scales)).view(-1)[: x.numel()]


def work(rank: int, arguments: argparse.Namespace, store: str, results: Any) -> None:
    """Time all contenders in turns, on one rank."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    device, backend = of_rank(device_of(arguments), rank), backend_of(arguments, arguments.ranks)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=arguments.ranks)
    mesh = dist.device_mesh.init_device_mesh(device.type, (arguments.ranks,), mesh_dim_names=("data",))
    contenders: dict[str, Step] = {}
    with fn.bind(mesh):
        for name, make in {
            "1-bit Adam (fn)": partial(onebit_adam, compile=False),
            "1-bit Adam (fn), lazy error": partial(onebit_adam, compile=False, lazy=True),
            "all-reduce + torch.optim.Adam": exact_adam,
            "textbook 1-bit Adam": textbook_onebit_adam,
            **({"1-bit Adam (fn, compiled)": partial(onebit_adam, compile=True)} if arguments.compile else {}),
        }.items():
            params = make_parameters(arguments.tensors, arguments.parameters, device)
            fill_gradients(params, rank)
            contenders[name] = make(params)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(arguments.repeat + 4):
        for name, step in contenders.items():
            dist.barrier()
            synchronise(device)
            start = time.perf_counter()
            step()
            synchronise(device)
            if turn >= 4:  # two warm-up steps, and two for the first use of the compressed phase
                times[name].append(time.perf_counter() - start)
    if rank == 0:
        for name, t in times.items():
            results[name] = {"median_ms": 1e3 * statistics.median(t), "min_ms": 1e3 * min(t)}
    dist.destroy_process_group()


def main() -> None:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--compile", action="store_true", help="also time the compiled step (compiles for minutes)")
    add_device(parser, backend=True)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        results = manager.dict()
        mp.spawn(work, (arguments, f"{folder}/store", results), arguments.ranks)
        rows = dict(results)
    where = threads(device_of(arguments))
    ours = rows["1-bit Adam (fn)"]["median_ms"]
    print(f"{arguments.parameters:,} parameters in {arguments.tensors} tensors, {arguments.ranks} ranks, {where} each")
    for name, row in rows.items():
        print(f"{name:32s} {row['median_ms']:8.1f} ms   {row['median_ms'] / ours:6.2f}x")
    if arguments.json:
        about = {"machine": platform.machine(), "cores": os.cpu_count(), "torch": torch.__version__, **vars(arguments)}
        with open(arguments.json, "w") as file:
            json.dump({"about": about, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
