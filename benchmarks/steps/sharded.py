"""ZeRO-1 as a combinator: a sharded AdamW step against its flat update divided by the ranks, plus communication.

    python -m benchmarks.steps.sharded --json benchmarks/results/sharded.json

Every rank has one thread, or a device (`--device`, `--backend`). Each round times, interleaved: the whole sharded step;
its messages alone, that is, the same bytes between the same ranks, from the memory of the gradient and into that of the
params, nothing added or copied; the public collectives, that is, the shard of the mean gradient and the gathered
params, written where they belong; the same two by `torch.distributed`; AdamW on one rank over all elements, without any
exchange; and LoCo, with gradients in 4 bits. It does so for params in one tensor, for many that are views of one buffer
(`flatten_parameters`, with the layout "fused"), and for many that lie apart. Memory is what torch allocates in a step:
on the CPU by its profiler, where blocks of the pool are not allocations, on a device by its allocator.
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
from torch.profiler import ProfilerActivity, profile

import fn
from benchmarks.devices import add_device, backend_of, device_of, of_rank
from benchmarks.measure import about, interleaved, markdown, write
from fn.collectives.messages import fill_rows, swap_rows

Step = Callable[[], Any]

ONE, BUFFER, APART = "one tensor", "one buffer", "apart"
ROWS = {
    "sharded": "the sharded step",
    "messages": "its messages alone",
    "exchange": "the collectives: the shard of the mean, the gathered params",
    "torch": "the same by torch: `reduce_scatter_tensor`, `all_gather_into_tensor`",
    "flat": "the update of all elements on one rank",
    "loco": "LoCo, gradients in 4 bits",
}


def optimizer(
    make: Callable[..., fn.Transform], sizes: list[int], rank: int, phase: fn.Phase, flat: bool, device: torch.device
) -> Step:
    """Return the step of a transform over parameters with gradients of the rank's own. flat: they are views."""
    params = []
    for i, n in enumerate(sizes):
        p = torch.nn.Parameter(torch.randn(n, generator=torch.Generator().manual_seed(i)).to(device))
        p.grad = torch.randn(n, generator=torch.Generator().manual_seed(1 + rank + 8 * i)).to(device)
        params.append(p)
    if flat:
        fn.flatten_parameters(params, None, gradients=True)
    return fn.Optimizer(params, make, schedule=lambda step: phase, lr=1e-4).step


def messages(n: int, ranks: int, binding: Any, device: torch.device) -> Step:
    """Return what an exact step must send, and nothing else."""
    gradient, params = (torch.randn(ranks, -(-n // ranks), device=device) for _ in range(2))

    def run() -> None:
        with binding:
            swap_rows(gradient.unbind(0), "data")
            fill_rows(params, "data")

    return run


def exchange(n: int, ranks: int, binding: Any, device: torch.device) -> Step:
    """Return what an exact step communicates, and nothing else: the shard of the mean, and the gathered params."""
    whole = -(-n // ranks) * ranks
    gradient, params, none = torch.randn(whole, device=device), torch.randn(whole, device=device), fn.off()

    def run() -> None:
        with binding:
            shard, _ = fn.reduce_scatter_mean(gradient, (), "data", fn.identity(), none)
            whole, _ = fn.all_gather_shards(shard, (), "data", fn.identity(), none)
            params.copy_(whole)

    return run


def of_torch(n: int, ranks: int, device: torch.device) -> Step:
    """Return a reduce-scatter and an all-gather of the same sizes by `torch.distributed` itself."""
    shard, params = (torch.empty(-(-n // ranks) * times, device=device) for times in (1, ranks))
    gradient = torch.randn_like(params)

    def run() -> None:
        dist.reduce_scatter_tensor(shard, gradient)
        dist.all_gather_into_tensor(params, shard)

    return run


def allocated(step: Step, device: torch.device) -> int:
    """Return the bytes that torch allocates in a step, each allocation counted."""
    if device.type != "cpu":
        before = torch.accelerator.memory_stats()["allocated_bytes.all.allocated"]
        step()
        return int(torch.accelerator.memory_stats()["allocated_bytes.all.allocated"] - before)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        step()
    events = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    return sum(e.nbytes() for e in events if e.nbytes() > 0)


def work(rank: int, arguments: argparse.Namespace, lie: str, store: str, results: Any) -> None:
    """Time all contenders in turns, on one rank. lie: how the params do."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    n, ranks, tensors, flat = arguments.parameters, arguments.ranks, arguments.tensors, lie == BUFFER
    sizes = [n] if lie == ONE else [n // tensors + (i < n % tensors) for i in range(tensors)]
    device, backend = of_rank(device_of(arguments), rank), backend_of(arguments, ranks)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks)
    binding = fn.bind(dist.device_mesh.init_device_mesh(device.type, (ranks,), mesh_dim_names=("data",)))
    with binding:
        make = partial(fn.loco_adamw, axis="data", layout="fused" if flat else "flat")
        contenders = {
            "sharded": optimizer(make, sizes, rank, fn.Phase.WARMUP, flat, device),
            "messages": messages(n, ranks, binding, device),
            "exchange": exchange(n, ranks, binding, device),
            "torch": of_torch(n, ranks, device),
            "flat": optimizer(partial(fn.adamw, axis=None), [n], rank, fn.Phase.WARMUP, False, device),
            "loco": optimizer(make, sizes, rank, fn.Phase.COMPRESSED, flat, device),
        }
    passed, spent = interleaved(contenders, arguments.rounds, before=dist.barrier, device=device)
    memory = {name: allocated(step, device) for name, step in contenders.items()}
    if rank == 0:
        results.update(passed=passed, spent=spent, allocated=memory)
    dist.barrier()
    dist.destroy_process_group()


def table(result: dict[str, Any]) -> str:
    """Return the figures as Markdown: milliseconds, then how far the step is from half an update and its messages."""
    layouts = result["layouts"].values()
    rows = [[title, *(f"{1e3 * found['passed'][name]:.1f}" for found in layouts)] for name, title in ROWS.items()]
    for name, title in (("messages", "messages"), ("exchange", "collectives"), ("torch", "torch's collectives")):
        rows.append([f"the step / (update / {result['ranks']} + {title})"])
        for times in (found["passed"] for found in layouts):
            rows[-1].append(f"{times['sharded'] / (times['flat'] / result['ranks'] + times[name]):.2f}")
    allocated = (found["allocated"]["sharded"] / result["parameters"] for found in layouts)
    rows.append(["the step allocates, bytes per parameter", *(f"{size:.1f}" for size in allocated)])
    return markdown(f"| ms | {' | '.join(result['layouts'])} |", rows)


def main() -> None:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1 << 24)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tensors", type=int, default=150)
    parser.add_argument("--rounds", type=int, default=11)
    add_device(parser, backend=True)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    layouts = {}
    for lie in (ONE, BUFFER, APART):
        with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
            shared = manager.dict()
            mp.spawn(work, (arguments, lie, f"{folder}/store", shared), arguments.ranks)
            layouts[lie] = dict(shared)
    sizes = {name: getattr(arguments, name) for name in ("parameters", "ranks", "tensors")}
    result = {"about": about(), **sizes, "layouts": layouts}
    print(table(result))
    write(arguments.json, result)


if __name__ == "__main__":
    main()
