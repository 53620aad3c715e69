"""Train the same small language model with data-parallel AdamW and with 1-bit Adam, and compare what they send.

    torchrun --standalone --nproc-per-node 2 examples/train_lm.py

The model is a byte-level transformer, the text is the source code of the Python standard library as the running
interpreter has it, and some of its files are held out for validation. Every optimizer starts from the same
parameters and sees the same batches. The ranks are processes on the CPU that talk through gloo, and every byte that
a rank puts on the wire in `opt.step()` is counted. At the end there is a table, and in `--out` a picture.

Shapes: B sequences of a rank's batch, T context, C width, H heads, L logits (one for each of the 256 bytes).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import sysconfig
import time
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import fn

BYTES = 256
COMMAND = "torchrun --standalone --nproc-per-node 2 examples/train_lm.py"

# ------------------------------------------------------------------------------------------------------ the text


def read_standard_library() -> tuple[Tensor, Tensor]:
    """Return the training and the validation text, both (n,) uint8; one file in 16 is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests"}
    texts: dict[bool, list[bytes]] = {False: [], True: []}
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if skipped.isdisjoint(name.parts):
            held_out = zlib.crc32(name.as_posix().encode()) % 16 == 0
            texts[held_out].append(path.read_bytes())
    if min(map(len, texts.values())) == 0:
        sys.exit(f"train_lm: {root} does not hold the standard library's source files")
    train, validation = (torch.frombuffer(bytearray(b"".join(texts[h])), dtype=torch.uint8) for h in (False, True))
    return train, validation


def cut(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (B, T) int64: the bytes from each start (B,), and those one further."""
    windows = text[starts[:, None] + torch.arange(context + 1)].long()  # (B, T + 1)
    return windows[:, :-1], windows[:, 1:]


# ----------------------------------------------------------------------------------------------------- the model


def norm(x: Tensor) -> Tensor:
    """Scale the last dimension to a mean square of 1; there is nothing to learn in it."""
    return F.rms_norm(x, (x.shape[-1],))


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each added to the residual stream."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.mix = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (B, T, C)."""
        q, k, v = self.qkv(norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, C/H)
        seen = F.scaled_dot_product_attention(norm(q), norm(k), v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(norm(x))).square())


class Transformer(nn.Module):
    """A decoder over bytes, with learned positions."""

    def __init__(self, layers: int, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, BYTES, bias=False)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
        for block in self.blocks:
            nn.init.zeros_(block.mix.weight)
            nn.init.zeros_(block.down.weight)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Bytes (B, T) -> logits (B, T, L)."""
        h = self.byte(x) + self.position.weight[: x.shape[1]]  # (B, T, C)
        return self.head(norm(self.blocks(norm(h))))


def loss_of(model: Transformer, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy in nats per byte, a scalar."""
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


# ------------------------------------------------------------------------------------------------ the optimizers


class Recipe(NamedTuple):
    """What `fn.Optimizer` is built from: `make` takes the hyper-parameters, `schedule` the freeze step."""

    make: Callable[..., fn.Transform]
    schedule: Callable[[int], Callable[[int], fn.Phase]]


def never_freeze(freeze_step: int) -> Callable[[int], fn.Phase]:
    """Return the schedule that stays in full precision."""
    return lambda step: fn.Phase.WARMUP


RECIPES = {
    "adamw": Recipe(fn.adamw, never_freeze),
    "onebit_adam": Recipe(fn.onebit_adam, fn.freeze_after),
}


def make_optimizer(model: Transformer, name: str, args: argparse.Namespace, mesh: DeviceMesh) -> fn.Optimizer:
    """Return the optimizer of that name over the model's parameters, bound to the axis "data"."""
    recipe = RECIPES[name]
    make = partial(recipe.make, axis="data", b1=args.b1, b2=args.b2, eps=args.eps, weight_decay=args.weight_decay)
    with fn.bind(mesh):
        return fn.Optimizer(model.parameters(), make, schedule=recipe.schedule(args.freeze_step), lr=args.lr)


def learning_rate_factor(step: int, steps: int) -> float:
    """Rise linearly over the first twentieth of the run, then fall to a tenth along a cosine."""
    rise = max(1, steps // 20)
    if step < rise:
        return (step + 1) / rise
    return 0.55 + 0.45 * math.cos(math.pi * (step - rise) / max(1, steps - rise))


# -------------------------------------------------------------------------------------------------- the training


class Run(NamedTuple):
    """What one optimizer did. `losses`, `sent` and `phases` have an entry for every step."""

    optimizer: str
    losses: list[float]  # training loss, mean over ranks
    sent: list[int]  # bytes that this rank put on the wire
    phases: list[str]
    seconds: list[float]
    validation: dict[int, float]  # after so many steps

    @property
    def val_loss(self) -> float:
        """The validation loss at the end."""
        return self.validation[len(self.sent)]

    def bytes_per_step(self, phase: str) -> float | None:
        """Return the mean bytes per rank and step in a phase, None if the run never was in it.

        An optimizer that never compresses has no compressed phase: it sends full precision in every step.
        """
        if set(self.phases) == {"warmup"} and RECIPES[self.optimizer].schedule is never_freeze:
            phase = "warmup"
        sent = [s for s, p in zip(self.sent, self.phases, strict=True) if p == phase]
        return statistics.fmean(sent) if sent else None

    def summary(self) -> dict[str, object]:
        """Return what `--json` writes of this run."""
        return {
            "optimizer": self.optimizer,
            "val_loss": self.val_loss,
            "bytes_per_step": {phase: self.bytes_per_step(phase) for phase in ("warmup", "compressed")},
            "bytes_total": sum(self.sent),
            "seconds_per_step": statistics.median(self.seconds),
        }


def mean_over_ranks(x: Tensor) -> float:
    """Return the mean of a scalar over all ranks. It is for the log: the ledger does not see it."""
    dist.all_reduce(x)
    return x.item() / dist.get_world_size()


@torch.no_grad()
def validate(model: Transformer, text: Tensor, args: argparse.Namespace) -> float:
    """Return the loss on windows spread evenly over the validation text, each rank taking its share of them."""
    rank, world = dist.get_rank(), dist.get_world_size()
    starts = torch.linspace(0, len(text) - args.context - 1, 128 * world).long()[rank::world]
    return mean_over_ranks(torch.stack([loss_of(model, cut(text, s, args.context)) for s in starts.split(32)]).mean())


def train(name: str, args: argparse.Namespace, mesh: DeviceMesh, text: Tensor, held_out: Tensor) -> Run:
    """Train a fresh model with one optimizer."""
    rank = dist.get_rank()
    torch.manual_seed(args.seed)
    model = Transformer(args.layers, args.width, args.heads, args.context)
    opt = make_optimizer(model, name, args, mesh)
    lr = LambdaLR(opt, partial(learning_rate_factor, steps=args.steps))
    draw = torch.Generator().manual_seed(args.seed * dist.get_world_size() + rank)
    run = Run(name, [], [], [], [], {})
    bar = tqdm(range(1, args.steps + 1), desc=f"{name:>12}", disable=rank != 0, dynamic_ncols=True)
    for step in bar:
        start = time.perf_counter()
        batch = cut(text, torch.randint(len(text) - args.context, (args.batch,), generator=draw), args.context)
        phase = opt.phase.value
        loss = loss_of(model, batch)
        loss.backward()  # the gradient of this rank's batch: the optimizer alone talks to the other ranks
        with fn.ledger() as sent:
            opt.step()
        opt.zero_grad()
        lr.step()
        run.seconds.append(time.perf_counter() - start)
        run.losses.append(mean_over_ranks(loss.detach()))
        run.sent.append(sent.total)
        run.phases.append(phase)
        if step % max(1, args.steps // 20) == 0 or step == args.steps:
            run.validation[step] = validate(model, held_out, args)
        bar.set_postfix(loss=f"{run.losses[-1]:.3f}", phase=phase, sent=readable(sum(run.sent)))
    return run


# ---------------------------------------------------------------------------------------------------- the report


def readable(count: float | None) -> str:
    """Spell a number of bytes."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"


def table(runs: list[Run]) -> str:
    """Return one line for each optimizer."""
    head = ("optimizer", "validation loss", "warm-up, per step", "compressed, per step", "bytes in total", "s per step")
    rows = [
        (
            run.optimizer,
            f"{run.val_loss:.4f}",
            readable(run.bytes_per_step("warmup")),
            readable(run.bytes_per_step("compressed")),
            readable(sum(run.sent)),
            f"{statistics.median(run.seconds):.3f}",
        )
        for run in runs
    ]
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = ["  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in (head, *rows)]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:]])


def claims(runs: list[Run]) -> list[str]:
    """Compare every other optimizer with AdamW, if that was run too."""
    base = next((run for run in runs if run.optimizer == "adamw"), None)
    lines = []
    for run in runs:
        if base is None or run is base:
            continue
        ratio = run.val_loss / base.val_loss
        lines.append(f"{run.optimizer}: validation loss {ratio:.4f}x adamw's ({100 * (ratio - 1):+.2f} %)")
        full, compressed = base.bytes_per_step("warmup"), run.bytes_per_step("compressed")
        if full and compressed:
            lines.append(f"{run.optimizer}: {full / compressed:.1f}x fewer bytes than adamw in the compressed phase")
        if sum(run.sent):
            lines.append(f"{run.optimizer}: {sum(base.sent) / sum(run.sent):.1f}x fewer bytes in the whole run")
    return lines


def draw_picture(runs: list[Run], path: Path, freeze_step: int) -> None:
    """Write loss over steps and loss over bytes as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (over_steps, over_bytes) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for colour, run in zip(plt.rcParams["axes.prop_cycle"].by_key()["color"], runs, strict=False):
        steps = list(range(1, len(run.sent) + 1))
        total = torch.tensor(run.sent).cumsum(0).tolist()
        measured = sorted(run.validation)
        for axes, x in ((over_steps, steps), (over_bytes, total)):
            axes.plot(x, run.losses, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot([x[s - 1] for s in measured], [run.validation[s] for s in measured], "o-", color=colour,
                      markersize=3, label=run.optimizer)  # fmt: skip
    over_steps.axvline(freeze_step, color="grey", linestyle=":", label="freeze step")
    over_steps.set(xlabel="step", ylabel="loss (nats per byte)", title="validation (dots) and training loss")
    over_bytes.set(xlabel="bytes sent by one rank", xscale="log", title="the same over what was sent")
    over_steps.legend()
    for axes in (over_steps, over_bytes):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


# ------------------------------------------------------------------------------------------------------ the flags


def parse_arguments() -> argparse.Namespace:
    """Read the flags, and refuse those that do not fit together."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--layers", type=int, default=4, help="transformer blocks")
    add("--width", type=int, default=96, help="size of the residual stream")
    add("--heads", type=int, default=4, help="attention heads")
    add("--context", type=int, default=128, help="bytes of a sequence")
    add("--batch", type=int, default=8, help="sequences of a rank's batch")
    add("--steps", type=int, default=600, help="optimizer steps of each run")
    add("--freeze-step", type=int, default=120, help="steps in full precision before compression starts")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--b1", type=float, default=0.9, help="decay of the momentum")
    add("--b2", type=float, default=0.95, help="decay of the second moment")
    add("--eps", type=float, default=1e-8, help="added to the root of the second moment")
    add("--weight-decay", type=float, default=0.1, help="decoupled weight decay")
    add("--seed", type=int, default=0, help="of the parameters and of the batches")
    add("--optimizers", default="adamw,onebit_adam", help=f"names with commas, of {', '.join(RECIPES)}")
    add("--out", type=Path, default=Path("out"), help="folder for the picture")
    add("--json", type=Path, metavar="FILE", help="write the table's numbers to this file")
    args = parser.parse_args()
    args.optimizers = args.optimizers.split(",")
    for flag in ("layers", "width", "heads", "context", "batch", "steps", "freeze_step"):
        if getattr(args, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} is {getattr(args, flag)}, but must be at least 1")
    if args.freeze_step > args.steps:
        parser.error(f"--freeze-step {args.freeze_step} is behind the last step, --steps {args.steps}")
    if args.width % args.heads:
        parser.error(f"--heads {args.heads} does not divide --width {args.width}")
    unknown = [name for name in args.optimizers if name not in RECIPES]
    if unknown or len(set(args.optimizers)) < len(args.optimizers):
        parser.error(f"--optimizers must name some of {', '.join(RECIPES)}, each once; got {','.join(args.optimizers)}")
    return args


def main() -> None:
    """Train with one optimizer after the other, then report from rank 0."""
    args = parse_arguments()
    if "RANK" not in os.environ:
        sys.exit(f"train_lm: this needs several processes; start it with\n    {COMMAND}")
    text, held_out = read_standard_library()
    if args.context >= len(held_out):
        sys.exit(f"train_lm: --context {args.context} is longer than the validation text")
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    if dist.get_rank() == 0:
        model = Transformer(args.layers, args.width, args.heads, args.context)
        parameters = sum(p.numel() for p in model.parameters())
        print(f"{parameters:,} parameters, {len(text):,} bytes to train on, {len(held_out):,} held out, "
              f"{dist.get_world_size()} ranks", flush=True)  # fmt: skip
    runs = [train(name, args, mesh, text, held_out) for name in args.optimizers]
    if dist.get_rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        draw_picture(runs, args.out / "train_lm.png", args.freeze_step)
        if args.json:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            args.json.write_text(json.dumps({"runs": [run.summary() for run in runs]}, indent=2) + "\n")
        print("", table(runs), "", *claims(runs), f"picture: {args.out / 'train_lm.png'}", sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
