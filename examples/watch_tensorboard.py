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
from fn.contrib.metrics import StepMetrics, watch

MEASURES = (
    "bytes", "skipped", "dropped", "compression_error", "error_norm", "encode_seconds", "wire_seconds", "decode_seconds"
)  # fmt: skip


def train(steps: int, out: Path, device: torch.device) -> None:
    """Fit a small network to a teacher, each rank on batches of its own."""
    torch.manual_seed(0)
    teacher, model = (nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1)).to(device) for _ in range(2))
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
            x = torch.randn(64, 32, device=device)
            loss = (model(x) - teacher(x).detach()).square().mean()
            opt.zero_grad()
            loss.backward()
            opt.step()
            board.add_scalar("loss", loss.item(), step)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs"))
    parser.add_argument("--device", help="cpu, cuda, cuda:0, ...; default: an accelerator of this rank's own, else cpu")
    parser.add_argument("--backend", help="of the process group; default: the device's own")
    args = parser.parse_args()
    where = torch.device(args.device or fn.kernels.device_name(dist.get_node_local_rank(0)))
    if where.type != "cpu":
        torch.accelerator.set_device_index(where.index or 0)
    dist.init_process_group(args.backend or fn.kernels.communication_backend(where.type))
    train(args.steps, args.out, where)
    dist.destroy_process_group()
