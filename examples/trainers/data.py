"""What the recipes train: a small network, on numbers that every process computes for itself."""

import argparse
import os

import torch

import fn

ACCUMULATE = 2  # batches per step
STEPS = 8
FREEZE = 3  # warm-up steps; then the momentum travels as signs


def arguments() -> argparse.Namespace:
    """Return where to write, whether to resume, and after how many of the `STEPS` steps to stop."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="out")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--stop-after", type=int, default=STEPS)
    parser.add_argument("--device", default=fn.kernels.get_accelerator().type, help="cpu, cuda, xpu, ...")
    parser.add_argument("--backend", help="of the process group; default: the device's own")
    args = parser.parse_args()
    args.backend = args.backend or fn.kernels.communication_backend(args.device)
    return args


def own_device(kind: str) -> torch.device:
    """Return this rank's device of a kind, and make it the current one."""
    if kind == "cpu":
        return torch.device(kind)
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    return torch.device(kind, int(os.environ["LOCAL_RANK"]))


def network() -> torch.nn.Module:
    """Return the same network in every process."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


class Examples(torch.utils.data.Dataset):
    """Examples by number."""

    def __len__(self) -> int:
        """Return as many as two ranks see in `STEPS` steps with batches of 4."""
        return 2 * 4 * ACCUMULATE * STEPS

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        """Return one example."""
        x = torch.randn(8, generator=torch.Generator().manual_seed(number))
        return {"x": x, "labels": x.sum().view(1)}


def own_file(out: str) -> str:
    """Return where this rank keeps its optimizer: errors differ between ranks, so each saves its own."""
    return os.path.join(out, f"optimizer-{os.environ['RANK']}.pt")


def report(out: str, model: torch.nn.Module, optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Write down where this rank ended."""
    end = {"params": [p.detach() for p in model.parameters()], "steps": optimizer.steps, "lr": float(lr)}
    torch.save(end, os.path.join(out, f"end-{os.environ['RANK']}.pt"))
