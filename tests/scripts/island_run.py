"""A rank of an island that trains the demo's model until a file says after how many steps all islands stop.

    python -m fn island --ranks 2 tests/scripts/island_run.py --island 0 --islands 3 --folder DIR

Its batches depend on island, rank, step and seed only. `tests/adapters/test_torchft_long.py` starts and kills these.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fn
import fn.adapters.torchft
from fn import tree

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from faults import FAULTS
from train_lm import Transformer, cut, loss_of, read_standard_library

EVERY = 10
CONTEXT, BATCH = 64, 4
REST = float(os.environ.get("REST", 0.2))
"""Seconds that a rank rests in each step."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--island", type=int, required=True)
    parser.add_argument("--islands", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, folder = dist.get_rank(), args.folder
    text, held_out = read_standard_library()
    torch.manual_seed(10 * args.seed + args.island)
    model = Transformer(layers=4, width=96, heads=4)
    ranks = DistributedDataParallel(model)
    schedule = fn.every(EVERY)
    manager = fn.adapters.torchft.connect(schedule, name=f"island_{args.island}")
    make = partial(fn.diloco, codec=fn.int8(), servers=False, outer_lr=0.7, outer_momentum=0.6)
    opt = fn.adapters.torchft.optimizer(model.parameters(), make, manager, schedule=schedule, lr=2e-3)

    def write(name: str, value: object) -> None:
        """Whoever reads the file sees all of it."""
        part = folder / f".{name}-{os.getpid()}"
        part.write_text(json.dumps(value))
        part.rename(folder / name)

    written, taken = 0, False
    while True:
        full = taken and opt.steps % EVERY == 0 and manager.num_participants() == args.islands
        if full and (folder / "stop").exists() and opt.steps >= int((folder / "stop").read_text()):
            break
        fault = folder / f"fault-{args.island}-{rank}"
        if fault.exists():
            name = fault.read_text()
            fault.unlink()  # first: who returns is not to fail again
            FAULTS[name]()
            torch.save(opt.state_dict(), folder / f"state-{args.island}-{rank}.pt")
        place = 1000 * opt.steps + 10 * args.island + rank
        draw = torch.Generator().manual_seed((args.seed << 32) + place)
        loss_of(ranks, cut(text, torch.randint(len(text) - CONTEXT, (BATCH,), generator=draw), CONTEXT)).backward()
        opt.step()
        opt.zero_grad()
        time.sleep(REST)  # or the islands that are left would take most of the steps, with the processor for themselves
        taken, written = manager.current_step() > written, manager.current_step()
        here = {"pid": os.getpid(), "steps": opt.steps, "round": written, "islands": manager.num_participants()}
        write(f"rank-{args.island}-{rank}", here)
    (anchor,) = tree.fields(opt.states, "anchor")
    digest = hashlib.sha256(b"".join(x.numpy().tobytes() for x in anchor)).hexdigest()
    with torch.no_grad(), fn.adapters.agreed_params(opt):
        starts = torch.linspace(0, len(held_out) - CONTEXT - 1, 256).long()
        loss = torch.stack([loss_of(model, cut(held_out, s, CONTEXT)) for s in starts.split(32)]).mean().item()
    write(f"end-{args.island}-{rank}", {
        "steps": opt.steps, "anchor": digest, "loss": loss, "island": args.island, "goodput": str(opt.goodput),
        "parts": opt.goodput,
    })  # fmt: skip
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
