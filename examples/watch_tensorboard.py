"""Write what every step sends, loses and takes to TensorBoard, a run per rank.

    pip install tensorboard
    torchrun --standalone --nproc-per-node 2 examples/watch_tensorboard.py --steps 200 --out runs
    tensorboard --logdir runs

Look first at `compression_error`, which for the signs of a momentum stays between 0.5 and 0.7; at `error_norm`, which
should level off and not grow; and at `bytes`, which falls when the compressed phase begins.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.tensorboard import SummaryWriter

import fn
from fn.adapters.metrics import StepMetrics, watch

MEASURES = ("bytes", "skipped", "compression_error", "error_norm", "encode_seconds", "wire_seconds", "decode_seconds")


def train(steps: int, out: Path) -> None:
    """Fit a small network to a teacher, each rank on batches of its own."""
    torch.manual_seed(0)
    teacher, model = (nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)) for _ in range(2))
    with fn.bind({"data": dist.group.WORLD}):
        make, schedule = partial(fn.onebit_adam, axis="data"), fn.freeze_after(steps // 2)
        opt = fn.Optimizer(model.parameters(), make, schedule=schedule, lr=3e-3)

    def write(m: StepMetrics) -> None:
        for name in MEASURES:
            value = getattr(m, name)
            if value is not None:  # the warm-up encodes nothing
                board.add_scalar(f"step/{name}", value, m.step)

    torch.manual_seed(1 + dist.get_rank())
    with SummaryWriter(str(out / f"rank{dist.get_rank()}")) as board:
        watch(opt, write, every=5)
        for step in range(steps):
            x = torch.randn(64, 32)
            loss = (model(x) - teacher(x).detach()).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            board.add_scalar("loss", loss.item(), step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    args = parser.parse_args()
    dist.init_process_group("gloo")
    train(args.steps, args.out)
    dist.destroy_process_group()
