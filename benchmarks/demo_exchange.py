"""A step of DeMo on real ranks, against the same in eager operations, tensor by tensor, as its authors' code takes it.

    python benchmarks/demo_exchange.py --json benchmarks/results/demo_exchange.json

Gradients are those of a transformer, 10.6 million numbers, in tiles of 64, of which 32 cosines are sent. All contenders
are interleaved in one run, with a barrier before each; the time is that of the slowest rank.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from low_rank import shapes
from measure import about, interleaved, markdown, write
from torch import Tensor

import fn

EAGER = "eager, tensor by tensor"
TILE, KEPT, DECAY, LR = 64, 32, 0.999, 1e-3


class Eager:
    """DeMo's step as published: indices of 64 bits and numbers of 32 travel apart, for each tensor.

    Tiles divide the sides here, so there are no shorter ones.
    """

    def __init__(self, params: list[Tensor]):
        self.params, self.momenta, self.sent = params, [torch.zeros_like(p) for p in params], 0
        place = torch.arange(TILE)
        basis = torch.cos(math.pi * (2 * place[:, None] + 1) * place / (2 * TILE)) * math.sqrt(2 / TILE)
        basis[:, 0] /= math.sqrt(2)
        self.basis = basis  # (TILE, TILE): a row of numbers times it is their cosines

    def into(self, x: Tensor) -> Tensor:
        """Cut a tensor into tiles (count, numbers), as cosines."""
        if x.ndim == 1:
            return x.view(-1, TILE) @ self.basis
        tiles = x.view(x.shape[0] // TILE, TILE, x.shape[1] // TILE, TILE)
        return torch.einsum("yhxw,hi,wj->yxij", tiles, self.basis, self.basis).reshape(-1, TILE * TILE)

    def back(self, z: Tensor, shape: torch.Size) -> Tensor:
        """Undo `into`."""
        if len(shape) == 1:
            return (z @ self.basis.T).view(shape)
        tiles = z.view(shape[0] // TILE, shape[1] // TILE, TILE, TILE)
        return torch.einsum("yxij,hi,wj->yhxw", tiles, self.basis, self.basis).reshape(shape)

    def gathered(self, x: Tensor) -> Tensor:
        """Return what all ranks have, side by side."""
        found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(found, x)
        self.sent += (len(found) - 1) * x.numel() * x.element_size()
        return torch.cat(found, dim=-1)

    @torch.no_grad()
    def step(self) -> None:
        """Take a step with the gradients of the params."""
        for p, momentum in zip(self.params, self.momenta, strict=True):
            momentum.mul_(DECAY).add_(p.grad, alpha=LR)
            z = self.into(momentum)
            indices = z.abs().topk(min(KEPT, z.shape[1]), dim=-1, sorted=False).indices
            numbers = z.gather(-1, indices)
            momentum.sub_(self.back(torch.zeros_like(z).scatter_(-1, indices, numbers), p.shape))
            all_indices, all_numbers = self.gathered(indices), self.gathered(numbers)
            mean = torch.zeros_like(z).scatter_reduce_(-1, all_indices, all_numbers, "mean", include_self=False)
            p.sub_(self.back(mean, p.shape).sign_(), alpha=LR)


def ours(params: list[Tensor], values: Any) -> fn.Optimizer:
    """Return `fn.contrib.demo` behind `fn.Optimizer`."""
    make = partial(fn.contrib.demo, axis="data", k=KEPT, tile=TILE, keep=DECAY, values=values)
    return fn.Optimizer(params, make, schedule=fn.freeze_after(0), lr=LR, refuse_averaged=False)


def rank(index: int, options: argparse.Namespace, folder: str) -> None:
    """Measure on one rank, and write the medians."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", options.ranks)
    dist.init_process_group("gloo", store=store, rank=index, world_size=options.ranks)

    def fresh() -> list[Tensor]:
        torch.manual_seed(index)
        found = [torch.nn.Parameter(torch.zeros(size)) for size in shapes(options.layers, options.width)]
        for p in found:
            p.grad = torch.randn_like(p)
        return found

    eager = Eager(fresh())
    with fn.bind({"data": dist.group.WORLD}):
        steps: dict[str, Callable[[], Any]] = {
            EAGER: eager.step,
            "fn.contrib.demo": ours(fresh(), None).step,
            "fn.contrib.demo, numbers in int8": ours(fresh(), fn.int8()).step,
        }
        sent = {}
        for name, step in steps.items():
            with fn.ledger() as book:
                step()
            sent[name] = book.total or eager.sent
        passed, spent = interleaved(steps, options.rounds, dist.barrier)
    result = {"seconds": passed, "processor seconds": spent, "bytes": sent}
    Path(f"{folder}/{index}.json").write_text(json.dumps(result))
    dist.destroy_process_group()


def table(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    columns, rows = [result[key] for key in ("bytes", "seconds", "processor seconds")], []
    for name in result["bytes"]:
        cells = [name]
        for column, unit in zip(columns, (1e-3, 1e3, 1e3), strict=True):
            cells += [f"{unit * column[name]:.0f}", f"{column[name] / column[EAGER]:.2f}"]
        rows.append(cells)
    head = "| a step | kB sent | of eager | ms | of eager | of the processor, ms | of eager |"
    return markdown(head, rows)


def main() -> None:
    """Measure, print, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("layers", 6), ("width", 384), ("rounds", 9), ("ranks", 2)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank, (options, folder), options.ranks)
        found = [json.loads(Path(f"{folder}/{r}.json").read_text()) for r in range(options.ranks)]
    clocks = ("seconds", "processor seconds")
    slowest = {clock: {name: max(f[clock][name] for f in found) for name in found[0][clock]} for clock in clocks}
    result = {"about": about(), "ranks": options.ranks, **slowest, "bytes": found[0]["bytes"]}
    print(table(result))
    write(options.json, result)


if __name__ == "__main__":
    main()
