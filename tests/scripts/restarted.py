"""What torchrun runs and restarts: train, save every other step, and on the first attempt let a fault happen to rank 1.

The second time rank 0 comes late: in a store that is left from the first time the others would find its old address.
"""

import os
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn.adapters import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from faults import FAULTS


def train(folder: Path, fault: str | None = None) -> list[torch.Tensor]:
    """Train in the group that is there, from the checkpoint if there is one; return the weights."""
    params = [torch.nn.Parameter(torch.linspace(-1.0, 1.0, n)) for n in (300, 7)]
    with fn.bind(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))):
        opt = fn.Optimizer(params, partial(fn.onebit_adam, axis="data"), schedule=fn.freeze_after(4), lr=0.01)
    if (folder / "latest").exists():
        checkpoint.load(folder, opt)
        sys.stdout.write(f"resumed from step {opt.steps}\n")  # at once: two ranks write to one terminal
        sys.stdout.flush()
    while opt.steps < 12:
        generator = torch.Generator().manual_seed(1000 * opt.steps + dist.get_rank())
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        if fault is not None and opt.steps == 9 and dist.get_rank() == 1:
            time.sleep(0.5)  # the other rank begins its step meanwhile
            FAULTS[fault]()
        opt.step()
        if opt.steps % 2 == 0:
            checkpoint.save(folder, opt)
    return [p.detach() for p in params]


def main() -> None:
    folder, first = Path(sys.argv[1]), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    torch.set_num_threads(1)
    time.sleep(1.0 if os.environ["RANK"] == "0" and not first else 0.0)
    dist.init_process_group("gloo")
    weights = train(folder, sys.argv[2] if first else None)
    if dist.get_rank() == 0:
        torch.save(weights, folder / "weights.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
