"""What a mesh of 2 x 2 costs Muon over one of 4: the exchange of matrices, with a copy for the iterations; whole steps.

    python -m benchmarks.steps.mesh --json benchmarks/results/mesh.json

The shapes are the matrices of GPT-2's layers, 10.6 million numbers, by rows over four ranks, and by rows and columns
over 2 x 2. Every rank has one thread. Both take turns in one run, with a barrier before each.
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
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fn
from benchmarks.measure import about, interleaved, markdown, write
from benchmarks.steps.muon import shapes
from fn import tree

MESHES = {"4": ((4,), [Shard(0)]), "2 × 2": ((2, 2), [Shard(0), Shard(1)])}


def copied(updates: Any, params: Any) -> Any:
    """Return copies, in the place of the iterations."""
    return tree.map(Tensor.clone, updates)


def without_iterations(lr: float, shards: fn.Shards | None = None) -> fn.Transform:
    """Return Muon that copies matrices where it would iterate."""
    copy = fn.stateless(copied)._replace(facts=fn.Facts(whole=("copied",), batched=True))
    assert shards is not None
    return fn.chain(fn.trace(0.95), fn.unsharded(copy, shards), fn.scale_by_learning_rate(lr))


STEPS = {"exchange": without_iterations, "whole step": fn.muon}
CONTENDERS = {f"{step}, {mesh}": (step, mesh) for step in STEPS for mesh in MESHES}


def step_on(name: str, arguments: argparse.Namespace) -> Callable[[], Any]:
    """Return a step of the matrices on a mesh."""
    step, on = CONTENDERS[name]
    sizes, placements = MESHES[on]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("fsdp", "tp")[: len(sizes)])
    place = partial(distribute_tensor, device_mesh=mesh, placements=placements, src_data_rank=None)
    generator, params = torch.Generator().manual_seed(0), []
    for shape in shapes(arguments.layers, arguments.width):
        if len(shape) == 2:
            params.append(torch.nn.Parameter(place(torch.randn(shape, generator=generator))))
            params[-1].grad = place(torch.randn(shape, generator=generator))
    return fn.Optimizer(params, STEPS[step], lr=1e-3).step


def work(rank: int, arguments: argparse.Namespace, store: str, results: Any) -> None:
    """Time all in turns, on one rank."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=4)
    passed, spent = interleaved({n: step_on(n, arguments) for n in CONTENDERS}, arguments.rounds, dist.barrier)
    results[rank] = {"passed": passed, "spent": spent}
    dist.destroy_process_group()


def measured(arguments: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return seconds of the slowest rank, and processor seconds of all ranks, by step and mesh."""
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        results = manager.dict()
        mp.spawn(work, (arguments, f"{folder}/store", results), 4)
        of_ranks = [results[rank] for rank in range(4)]
    return {
        name: {"seconds": max(own["passed"][name] for own in of_ranks),
               "processor": sum(own["spent"][name] for own in of_ranks)}
        for name in CONTENDERS
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = []
    for name, row in result["steps"].items():
        base = result["steps"][f"{CONTENDERS[name][0]}, 4"]
        times = [[f"{1e3 * row[kind]:.1f}", f"{row[kind] / base[kind]:.2f}"] for kind in ("seconds", "processor")]
        rows.append([name, *times[0], *times[1]])
    return markdown("| step, mesh | ms | of that on 4 | of all processors, ms | of that on 4 |", rows)


def main() -> None:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    result = {"layers": arguments.layers, "width": arguments.width, "steps": measured(arguments)}
    result = {"about": about(), **result}
    print(table(result))
    write(arguments.json, result)


if __name__ == "__main__":
    main()
