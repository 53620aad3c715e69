"""A rank that ends while a delayed mean travels: ending.py WAY RANK STORE."""

from __future__ import annotations

import os
import sys
from functools import partial

import torch
import torch.distributed as dist

import fn

os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def main(way: str, rank: int, store: str) -> None:
    """Begin a mean of 40 million elements, and end in a way while it travels."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    params = [torch.nn.Parameter(torch.ones(1_000_000)) for _ in range(40)]
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(params, partial(fn.diloco, axis="data"), schedule=fn.every(4, delay=3), lr=0.01)
    for _ in range(5):  # the first is the warm-up, the last begins the mean
        for p in params:
            p.grad = torch.full_like(p, 1.0 + rank)
        opt.step()
    if way == "sys.exit":
        sys.exit(3)
    if way == "exception" or (way == "exception on rank 1" and rank == 1):
        raise ValueError("of the script's own")
    if way == "destroy_process_group":
        dist.destroy_process_group()


main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
