"""A step of Muon on real ranks: replicated, owned, owned in 8 bits, and as Dion's authors run theirs beside DDP.

    python -m benchmarks.steps.muon --json benchmarks/results/muon.json

The shapes are those of GPT-2's layers, 10.6 million numbers; matrices are Muon's, vectors AdamW's. Every rank has one
thread. All take turns in one run, with a barrier before each. Processor time is that of all ranks together: each has
cores of its own where it matters, and shares two of them here. Bytes are what a rank sends, in the mean over the ranks,
by the ledger; of the peer, whose collectives are torch's, by the ledger's rules.

The peer is the sequence of microsoft/dion's Muon (MIT) where DDP averages the gradients: every rank keeps the momenta
of all matrices, takes the Newton-Schulz iterations of its share of each shape, and gathers the updates shape by shape.
The iterations are ours here, in float32, so that what differs is who computes what and what is sent.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

import fn
from benchmarks.measure import about, interleaved, markdown, write
from fn.transforms.muon import COEFFICIENTS, NewtonSchulz, orthogonal

RANKS = (2, 4)
REPLICATED, OWNED, CODED, PEER = "replicated", "owned", "owned, int8 both ways", "as microsoft/dion beside DDP"
RULE = NewtonSchulz(COEFFICIENTS["polar_express"], 1e-8, "spectral_norm", None, flatten=False)


def shapes(layers: int, width: int) -> list[tuple[int, ...]]:
    """Return those of a transformer without its embeddings."""
    of_layer = [(3 * width, width), (3 * width,), (width, width), (width,), (4 * width, width), (4 * width,)]
    return [*of_layer, (width, 4 * width), (width,), (width,), (width,)] * layers


def parameters(layers: int, width: int, rank: int) -> list[torch.nn.Parameter]:
    """Return parameters, the same on every rank, with gradients of the rank's own."""
    ours, theirs = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1 + rank)
    params = []
    for shape in shapes(layers, width):
        params.append(torch.nn.Parameter(0.02 * torch.randn(shape, generator=ours)))
        params[-1].grad = torch.randn(shape, generator=theirs)
    return params


def ours(params: list[torch.nn.Parameter], phase: fn.Phase, **hyper: Any) -> Callable[[], Any]:
    """Return a step of `fn.muon`."""
    make = partial(fn.muon, axis="data", **hyper)
    return fn.Optimizer(params, make, schedule=lambda step: phase, lr=1e-3).step


def peer(params: list[torch.nn.Parameter]) -> Callable[[], Any]:
    """Return a step as Dion's authors take it, behind a flat all-reduce in the place of DDP's."""
    rank, world = dist.get_rank(), dist.get_world_size()
    of_shape: dict[torch.Size, list[torch.nn.Parameter]] = {}
    for p in (p for p in params if p.ndim == 2):
        of_shape.setdefault(p.shape, []).append(p)
    momenta = {p: torch.zeros_like(p) for some in of_shape.values() for p in some}
    others = torch.optim.AdamW([p for p in params if p.ndim != 2], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)

    @torch.no_grad()
    def step() -> None:
        flat = torch.cat([p.grad.view(-1) for p in params if p.grad is not None])
        dist.all_reduce(flat)
        flat /= world
        for p, g in zip(params, flat.split([p.numel() for p in params]), strict=True):
            p.grad = g.view_as(p)
        others.step()
        for shape, some in of_shape.items():
            grads, mus = [p.grad for p in some], [momenta[p] for p in some]
            torch._foreach_mul_(mus, 0.95)
            torch._foreach_add_(mus, grads)
            directions = torch._foreach_mul(mus, 0.95)
            torch._foreach_add_(directions, grads)
            share = -(-len(some) // world)
            padded = [*directions, *[torch.zeros(shape)] * (share * world - len(some))]
            own = torch.stack(orthogonal(padded[rank * share : (rank + 1) * share], RULE))
            everyone = [torch.empty_like(own) for _ in range(world)]
            dist.all_gather(everyone, own)
            torch._foreach_mul_(some, 1 - 1e-3 * 0.01)
            torch._foreach_add_(some, [u for part in everyone for u in part][: len(some)], alpha=-1e-3)

    return step


def bytes_of_peer(layers: int, width: int, world: int) -> int:
    """Return what a rank sends in a step of the peer: an all-reduce of all, a share of the updates to each other."""
    sizes = shapes(layers, width)
    reduced = 2 * (world - 1) * sum(map(_numel, sizes)) * 4 // world
    matrices = [shape for shape in sizes if len(shape) == 2]
    shares = [-(-matrices.count(shape) // world) * _numel(shape) for shape in dict.fromkeys(matrices)]
    return reduced + (world - 1) * sum(shares) * 4


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def contenders(layers: int, width: int, rank: int) -> dict[str, Callable[[], Any]]:
    """Return what is compared, by name."""
    W, C = fn.Phase.WARMUP, fn.Phase.COMPRESSED
    made = {
        REPLICATED: lambda params: ours(params, W, owned=False),
        OWNED: lambda params: ours(params, W),
        CODED: lambda params: ours(params, C, codec=fn.int8()),
        PEER: peer,
    }
    return {name: make(parameters(layers, width, rank)) for name, make in made.items()}


def sent_by(steps: Mapping[str, Callable[[], Any]]) -> dict[str, int]:
    """Return the bytes that this rank sends in a step of each of ours."""
    sent = {}
    for name, step in steps.items():
        if name != PEER:
            step()  # the first steps of an optimizer also compare settings
            with fn.ledger() as book:
                step()
            sent[name] = book.total
    return sent


def work(rank: int, arguments: argparse.Namespace, world: int, store: str, results: Any) -> None:
    """Time all contenders in turns, on one rank."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    with fn.bind(init_device_mesh("cpu", (world,), mesh_dim_names=("data",))):
        steps = contenders(arguments.layers, arguments.width, rank)
        sent = sent_by(steps)
        passed, spent = interleaved(steps, arguments.rounds, dist.barrier)
    results[rank] = {"passed": passed, "spent": spent, "sent": sent}
    dist.destroy_process_group()


def measured(arguments: argparse.Namespace, world: int) -> dict[str, dict[str, float]]:
    """Return seconds of the slowest rank, processor seconds of all ranks, and bytes of a rank, by contender."""
    with mp.Manager() as manager, tempfile.TemporaryDirectory() as folder:
        results = manager.dict()
        mp.spawn(work, (arguments, world, f"{folder}/store", results), world)
        of_ranks = [results[rank] for rank in range(world)]
    found = {}
    for name in of_ranks[0]["passed"]:
        sent = [own["sent"].get(name) for own in of_ranks]
        peers = bytes_of_peer(arguments.layers, arguments.width, world)
        found[name] = {
            "seconds": max(own["passed"][name] for own in of_ranks),
            "processor": sum(own["spent"][name] for own in of_ranks),
            "bytes": peers if name == PEER else sum(sent) / world,
        }
    return found


def table(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = []
    for world, found in result["ranks"].items():
        base = found[REPLICATED]
        for name, row in found.items():
            cells = [f"{1e3 * row['processor']:.0f}", f"{row['processor'] / base['processor']:.2f}"]
            cells += [f"{row['bytes'] / 1e6:.1f}"]
            rows.append([world, name, *cells, f"{row['bytes'] / base['bytes']:.2f}"])
    head = "| ranks | step | of all processors, ms | of replicated's | MB that a rank sends | of an all-reduce's |"
    return markdown(head, rows)


def main() -> None:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    found = {str(world): measured(arguments, world) for world in RANKS}
    result = {"about": about(), "layers": arguments.layers, "width": arguments.width, "ranks": found}
    print(table(result))
    write(arguments.json, result)


if __name__ == "__main__":
    main()
