"""A whole optimizer step on real ranks: 1-bit Adam against what people run today, interleaved in one run.

    python -m benchmarks.steps.ranks_step --json benchmarks/results/ranks_step.json

Every rank has one thread, or a device (`--device`, `--backend`). The peers: a flat fp32 all-reduce and
`torch.optim.Adam` (foreach), and the sequence that DeepSpeed's 1-bit Adam runs in its compressed phase, tensor by
tensor, as `textbook.py` has it.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fn
from benchmarks.devices import add_device, backend_of, device_of, of_rank
from benchmarks.measure import about, interleaved, markdown, write
from benchmarks.steps.textbook import AllReduce

Step = Callable[[], None]

EXACT = "float32 all-reduce, torch.optim.Adam"


def make_parameters(count: int, total: int, device: torch.device) -> list[torch.nn.Parameter]:
    """Return parameters of equal size, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(total // count, generator=generator).to(device)) for _ in range(count)]


def fill_gradients(params: list[torch.nn.Parameter], rank: int) -> None:
    """Give every parameter a gradient of the rank's own."""
    generator = torch.Generator().manual_seed(1 + rank)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.device)


def onebit_adam(params: list[torch.nn.Parameter], lazy: bool = False) -> Step:
    """Return our step, with one scale a tensor as the others have it; its compressed phase starts at the third."""
    make = partial(fn.onebit_adam, axis="data", codec=fn.sign(), feedback=fn.classic(lazy=lazy))
    return fn.Optimizer(params, make, schedule=fn.freeze_after(2), lr=1e-4).step


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
    """Run what DeepSpeed runs, tensor by tensor: the momentum, its average in codes, the update."""
    means = [AllReduce(p.numel(), dist.group.WORLD, p.device) for p in params]
    moments = [(torch.zeros_like(p), torch.ones_like(p)) for p in params]

    def step() -> None:
        with torch.no_grad():
            for p, mean, (mu, nu) in zip(params, means, moments, strict=True):
                mu.mul_(0.9).add_(p.grad, alpha=0.1)
                mu.copy_(mean(mu.view(-1)).view_as(mu))
                p.add_(mu / (nu.sqrt() + 1e-8), alpha=-1e-4)

    return step


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
            EXACT: exact_adam,
            "1-bit Adam, fn": onebit_adam,
            "1-bit Adam, fn, lazy errors": partial(onebit_adam, lazy=True),
            "1-bit Adam, tensor by tensor as DeepSpeed does it": textbook_onebit_adam,
        }.items():
            params = make_parameters(arguments.tensors, arguments.parameters, device)
            fill_gradients(params, rank)
            contenders[name] = make(params)
    for _ in range(2):  # of the warm-up phase
        for step in contenders.values():
            step()
    passed, spent = interleaved(contenders, arguments.repeat, dist.barrier, device)
    if rank == 0:
        results.update(seconds=passed, spent=spent)
    dist.destroy_process_group()


def table(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    seconds, spent = result["seconds"], result["spent"]
    base = seconds[EXACT]
    rows = ((name, f"{1e3 * t:.1f}", f"{t / base:.2f}", f"{1e3 * spent[name]:.1f}") for name, t in seconds.items())
    return markdown("| step | ms | of the exact step's | of the processor, ms |", rows)


def main() -> None:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--tensors", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=15)
    add_device(parser, backend=True)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        results = manager.dict()
        mp.spawn(work, (arguments, f"{folder}/store", results), arguments.ranks)
        result = {"about": about(), "parameters": arguments.parameters, "tensors": arguments.tensors, **results}
    print(table(result))
    write(arguments.json, result)


if __name__ == "__main__":
    main()
