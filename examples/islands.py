"""Train one small language model on islands: machines, or terminals of one, that come and go.

    python -m fn lighthouse                                              # on one machine; it prints what follows
    python -m fn island --lighthouse 10.0.0.5:29510 examples/islands.py  # on each machine, at any time

The model and the text are those of `train_lm.py`. Every island trains on text of its own. After each `--every` steps
the islands that are there take a step together, by DiLoCo with differences in 8 bits, and each of them prints a line.
Kill one and start it again: the others go on, and it is healed at their next exchange. `--ranks 2` behind `island`
gives an island two ranks, whose gradients DDP averages.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from train_lm import Transformer, cut, join, loss_of, read_standard_library, readable

import fn
import fn.adapters.torchft


@torch.no_grad()
def validate(model: nn.Module, text: Tensor, context: int) -> float:
    """Return the loss on windows spread evenly over the text that is held out."""
    starts = torch.linspace(0, len(text) - context - 1, 128).long()
    return torch.stack([loss_of(model, cut(text, s, context)) for s in starts.split(32)]).mean().item()


def parse_arguments() -> argparse.Namespace:
    """Read the flags."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--steps", type=int, default=2000, help="steps of each island")
    add("--every", type=int, default=20, help="steps from one exchange to the next")
    add("--lr", type=float, default=2e-3, help="learning rate of the local steps")
    add("--batch", type=int, default=8, help="sequences of a rank's batch")
    add("--context", type=int, default=64, help="bytes of a sequence")
    add("--layers", type=int, default=4, help="blocks of the transformer")
    add("--width", type=int, default=128, help="channels")
    add("--heads", type=int, default=4, help="attention heads")
    add("--device", metavar="TYPE", help="cpu, cuda, xpu, ...; None is the accelerator, else the CPU")
    add("--backend", metavar="NAME", help="of the island's process group; None is the device's own")
    add("--out", type=Path, default=Path("out/islands.pt"), help="where the model is saved")
    return parser.parse_args()


def main() -> None:
    """Train this island's part."""
    args = parse_arguments()
    device = join(args)
    text, held_out = (x.to(device) for x in read_standard_library())
    model = Transformer(args.layers, args.width, args.heads).to(device)
    ranks = DistributedDataParallel(model) if dist.get_world_size() > 1 else model

    schedule = fn.every(args.every)
    manager = fn.adapters.torchft.connect(schedule, step_seconds=10)
    make = partial(fn.diloco, codec=fn.int8(), servers=False, rounds=max(1, args.steps // args.every))
    opt = fn.adapters.torchft.optimizer(model.parameters(), make, manager, schedule=schedule, lr=args.lr)

    draw = torch.Generator()
    draw.seed()  # every rank of every island sees text of its own
    lead, sent, began = dist.get_rank() == 0, 0, time.perf_counter()
    if lead:
        print(f"{'step':>6} {'islands':>8} {'loss here':>10} {'of all, held out':>17} {'sent here':>10} {'seconds':>8}")
    while opt.steps < args.steps:
        starts = torch.randint(len(text) - args.context, (args.batch,), generator=draw)
        loss = loss_of(ranks, cut(text, starts, args.context))
        loss.backward()
        with fn.ledger() as ledger:
            opt.step()
        opt.zero_grad()
        sent += ledger.total
        if opt.steps % args.every == 0 and lead:
            with fn.adapters.agreed_params(opt):
                shared = validate(model, held_out, args.context)
            row = f"{opt.steps:6} {manager.num_participants():8} {loss:10.3f} {shared:17.3f} {readable(sent):>10}"
            print(f"{row} {time.perf_counter() - began:8.1f}", flush=True)
    if lead:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with fn.adapters.agreed_params(opt):
            torch.save(model.state_dict(), args.out)
        print(f"the model: {args.out}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
