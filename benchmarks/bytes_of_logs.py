"""How long logs of a run are for followers: of codes, and of the bits of params that a step changed.

    python benchmarks/bytes_of_logs.py --json benchmarks/results/bytes_of_logs.json

Two ranks train a small character model, 0.46 million parameters, on the standard library, for 100 steps; both logs are
of the same run. Printed are bytes a parameter and step. Bytes do not depend on how fast the machine is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

import fn
from benchmarks.measure import ROOT, about, markdown, write
from fn.adapters.follow import publish

sys.path.insert(0, str(ROOT / "examples"))
from train_lm import read_standard_library

METHODS: dict[str, tuple[Any, Any, float]] = {
    "adamw, exact means": (fn.adamw, None, 1e-3),
    "onebit_adam, 10 steps of warm-up": (fn.onebit_adam, fn.freeze_after(10), 1e-3),
    "sign_muon": (fn.sign_muon, fn.freeze_after(0), 2e-2),
    "lion_vote": (fn.lion_vote, fn.freeze_after(0), 1e-4),
}
DTYPES = ("float32", "bfloat16")
KINDS = ("codes", "params")
STEPS, WIDTH, VOCABULARY, CONTEXT = 100, 128, 256, 8


class Model(nn.Module):
    """Predict a character from the mean of the last ones."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        """Return the logits of the next character, (B, 256), of (B, 8) characters."""
        x = self.embed(characters).mean(1)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def train(rank: int, name: str, dtype: str, folder: str) -> None:
    """Train on a rank, and write both logs."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(0)
    model, (make, schedule, lr) = Model().to(getattr(torch, dtype)), METHODS[name]
    more = {"labels": fn.labels_of(model)} if name == "sign_muon" else {}
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(model.named_parameters(), partial(make, axis="data"), lr=lr, schedule=schedule, **more)
    logs = publish(opt, f"{folder}/codes"), publish(opt, f"{folder}/params", what="params")
    text = read_standard_library()[0].long()
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT - 1, (32,), generator=generator)
        x = torch.stack([text[i : i + CONTEXT] for i in starts])
        opt.zero_grad()
        nn.functional.cross_entropy(model(x).float(), text[starts + CONTEXT]).backward()
        opt.step()
    for log in filter(None, logs):
        log.close()
    dist.barrier()
    dist.destroy_process_group()


def table(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    rows = [
        (name, *(f"{of[dtype][kind]:.2f}" for dtype in DTYPES for kind in KINDS)) for name, of in result["rows"].items()
    ]
    heads = " | ".join(f"{kind}, {dtype}" for dtype in DTYPES for kind in KINDS)
    return markdown(f"| optimizer | {heads} |", rows)


def main() -> None:
    """Measure them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=[*METHODS])
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    numbers, rows = sum(p.numel() for p in Model().parameters()), dict[str, Any]()
    for name in args.only:
        rows[name] = {}
        for dtype in DTYPES:
            with tempfile.TemporaryDirectory() as folder:
                mp.spawn(train, (name, dtype, folder), nprocs=2)
                sizes = {kind: sum(p.stat().st_size for p in Path(folder, kind).glob("*.log")) for kind in KINDS}
            rows[name][dtype] = {kind: size / STEPS / numbers for kind, size in sizes.items()}
    result = {"about": about(), "rows": rows}
    write(args.json, result)
    print(table(result))


if __name__ == "__main__":
    main()
