"""Train the demo's language model under FSDP2, with full gradients and with gradients in 4 bits, and compare.

    torchrun --standalone --nproc-per-node 2 examples/train_fsdp.py

Every run starts from the same parameters and sees the same batches. `fsdp2` is PyTorch alone; `identity` sends full
gradients through `fn` and must be the same to the last bit; `qgz` sends int4 without feedback, `loco` with damped
feedback in 8 bits, `classic` with all of the error in float32, and `loco+qwz` sends parameters in int8 as well. The
gradient's bytes are counted twice: by the ledger, and by the loopback interface during the backward passes, in which
parameters do not travel because they are kept after the forward pass. The interface counts what other programs send,
too, and nothing of what a backend other than gloo sends.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from train_lm import (
    Transformer,
    cut,
    finish,
    join,
    learning_rate_factor,
    loss_of,
    read_standard_library,
    readable,
    training_flags,
    validate,
)

import fn
from fn.adapters.fsdp import Compressed, compress

COMMAND = "torchrun --standalone --nproc-per-node 2 examples/train_fsdp.py"
COUNTERS = Path("/proc/net/dev")

METHODS: dict[str, Callable[[Transformer], Compressed] | None] = {
    "fsdp2": None,
    "identity": lambda model: compress(model, fn.identity(), fn.off()),
    "qgz": lambda model: compress(model, fn.int4(), fn.off()),
    "loco": lambda model: compress(model, fn.int4(), fn.damped()),
    "classic": lambda model: compress(model, fn.int4(), fn.classic()),
    "loco+qwz": lambda model: compress(model, fn.int4(), fn.damped(), gather=fn.int8()),
}


class Run(NamedTuple):
    """What one method did.

    validation: loss in nats per byte, after so many steps. ledger: bytes of gradient that a rank sent in a step; None
    without us. interface: the same as the loopback interface counted it, headers included; None where it cannot be
    read. seconds: of the median step.
    """

    method: str
    validation: dict[int, float]
    ledger: int | None
    interface: int | None
    seconds: float

    @property
    def val_loss(self) -> float:
        """The validation loss at the end."""
        return self.validation[max(self.validation)]


def loopback() -> int:
    """Return the bytes that this machine has sent to itself, 0 where that is not known."""
    lines = COUNTERS.read_text().splitlines() if COUNTERS.exists() else []
    return next((int(line.split()[9]) for line in lines if line.strip().startswith("lo:")), 0)


def train(method: str, args: argparse.Namespace, mesh: DeviceMesh, text: Tensor, held_out: Tensor) -> Run:
    """Train a fresh model with one method."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = Transformer(args.layers, args.width, args.heads).to(text.device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    install = METHODS[method]
    compressed = install(model) if install else None
    betas, eps = (args.b1, args.b2), args.eps
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=betas, eps=eps, weight_decay=args.weight_decay)
    lr = LambdaLR(opt, partial(learning_rate_factor, steps=args.steps))
    draw = torch.Generator().manual_seed(args.seed * world + rank)
    validation, seconds, interface = {}, [], 0
    for step in tqdm(range(1, args.steps + 1), desc=f"{method:>9}", disable=rank != 0 or args.quiet):
        batch = cut(text, torch.randint(len(text) - args.context, (args.batch,), generator=draw), args.context)
        start = time.perf_counter()
        loss = loss_of(model, batch)
        finish(text.device)
        waited = time.perf_counter()
        dist.barrier()
        before = loopback()
        dist.barrier()
        start += time.perf_counter() - waited
        loss.backward()
        finish(text.device)
        waited = time.perf_counter()
        dist.barrier()
        interface += loopback() - before
        start += time.perf_counter() - waited
        opt.step()
        opt.zero_grad()
        lr.step()
        finish(text.device)
        seconds.append(time.perf_counter() - start)
        if step % max(1, args.steps // 10) == 0 or step == args.steps:
            validation[step] = validate(model, held_out, args)
    sent = None
    if compressed is not None:
        counts = compressed.sent.sent.items()
        sent = sum(count for (_, kind), count in counts if kind == "all_to_all") // args.steps
    measured = interface // world // args.steps if COUNTERS.exists() else None
    return Run(method, validation, sent, measured, statistics.median(seconds))


def table(runs: list[Run]) -> str:
    """Return one line for each method, compared with the first."""
    head = ("method", "validation loss", "against the first", "gradient, ledger", "gradient, interface", "s per step")
    exact = runs[0]
    rows = [head, tuple("-" * len(name) for name in head)]
    for run in runs:
        difference = f"{100 * (run.val_loss / exact.val_loss - 1):+.2f} %"
        interface = readable(run.interface)
        if run.interface and exact.interface:
            interface += f" (1/{exact.interface / run.interface:.2f})"
        row = (run.method, f"{run.val_loss:.4f}", difference, readable(run.ledger), interface, f"{run.seconds:.3f}")
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in rows)


def parse_arguments(given: list[str] | None = None) -> argparse.Namespace:
    """Read the flags."""
    parser = training_flags(__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--methods", default=",".join(METHODS), help=f"names with commas, of {', '.join(METHODS)}")
    add("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(given)
    args.methods = args.methods.split(",")
    unknown = [name for name in args.methods if name not in METHODS]
    if unknown:
        parser.error(f"--methods must name some of {', '.join(METHODS)}; got {','.join(unknown)}")
    return args


def main() -> None:
    """Train with one method after the other, then report from rank 0."""
    args = parse_arguments()
    if "RANK" not in os.environ:
        sys.exit(f"train_fsdp: this needs several processes; start it with\n    {COMMAND}")
    text, held_out = read_standard_library()
    device = join(args)
    text, held_out = text.to(device), held_out.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))
    runs = [train(method, args, mesh, text, held_out) for method in args.methods]
    if dist.get_rank() == 0:
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps([run._asdict() for run in runs], indent=2) + "\n")
        print("", table(runs), sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
