"""An island of one rank that takes rounds beside another whose processor computes otherwise; it tells its anchors.

    ATEN_CPU_CAPABILITY=default python unlike_island.py --island 0 --lighthouse URL --method diloco --rounds 50

`tests/adapters/test_torchft_unlike.py` starts these.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
import torchft
from torch import nn

import fn
import fn.adapters.torchft.islands as adapter

METHODS = {
    "diloco, int8": partial(fn.diloco, codec=fn.int8(), servers=False),
    "muloco, bins": partial(fn.muloco, codec=fn.bins(4, 6), servers=False),
    "sparse_loco": partial(fn.sparse_loco, k=8, tile=8),
    "local_sgd": partial(fn.local_sgd, momentum=0.9),
}
H = 2


def main() -> None:
    """Take the rounds, and print a digest of anchors and outer states behind each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--island", type=int, required=True)
    parser.add_argument("--lighthouse", required=True)
    parser.add_argument("--method", choices=METHODS, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--dtype", default="float32", help="of the params")
    parser.add_argument("--delay", type=int, default=0)
    parser.add_argument("--own-row", action="store_true", help="compute as if islands were alike")
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    limit = timedelta(seconds=60)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False, timeout=limit)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=limit), load_state_dict=None, state_dict=None, min_replica_size=2,
        use_async_quorum=False, timeout=limit, quorum_timeout=limit, rank=0, world_size=1, store_addr="localhost",
        store_port=store.port, lighthouse_addr=args.lighthouse, hostname="localhost",
        replica_id=f"island_{args.island}",
    )  # fmt: skip
    torch.manual_seed(args.island)  # they start apart, and become alike in the first quorum
    model = nn.Sequential(nn.Linear(31, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 3))
    model = model.to(getattr(torch, args.dtype))
    if args.own_row:
        adapter.Islands.are_unlike = lambda self, words: False  # type: ignore[method-assign]
    schedule = fn.every(H, delay=args.delay)
    opt = adapter.optimizer(model.named_parameters(), METHODS[args.method], manager, schedule=schedule, lr=0.02)
    anchors: dict[int, str] = {}
    while manager.current_step() < args.rounds or opt.steps % H:
        draw = torch.Generator().manual_seed(1000 * opt.steps + args.island)
        x = torch.randn(16, 31, generator=draw)
        (model(x.to(model[0].weight.dtype)).float() - x[:, :3].sin()).square().mean().backward()
        opt.step()
        opt.zero_grad()
        alike = fn.tree.leaves([fn.roles.find(opt.states, "copies"), fn.tree.fields(opt.states, "outer")])
        anchors[manager.current_step()] = hashlib.sha256(b"".join(x.numpy().tobytes() for x in alike)).hexdigest()
    print(json.dumps({"anchors": anchors, "row": opt.row, "unlike": opt.unlike}), flush=True)
    manager.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
