"""Train the same small language model with data-parallel AdamW and with 1-bit Adam, and compare what they send.

    torchrun --standalone --nproc-per-node 2 examples/train_lm.py

The model is a byte-level transformer, the text is the source code of the Python standard library as the running
interpreter has it, and some of its files are held out for validation. Every optimizer starts from the same
parameters and sees the same batches. Every byte that a rank puts on the wire in `opt.step()` is counted. At the end
there is a table, and in `--out` a picture. The ranks are processes on accelerators, where this machine has them, and
else on the CPU, where they talk through gloo; `--device` and `--backend` choose.

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
from collections.abc import Callable, Collection
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


def read_standard_library(without: Collection[str] = ()) -> tuple[Tensor, Tensor]:
    """Return the training and the validation text, both (n,) uint8; one file in 16 is held out.

    Args: without: names of folders that are left out, beside those of tests and of installed packages.
    """
    root = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", *without}
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


def rotate(x: Tensor) -> Tensor:
    """Turn pairs of channels of x (B, H, T, D) by an angle that grows with the position, each pair at its own pace."""
    first, second = x.chunk(2, dim=-1)  # (B, H, T, D/2)
    pace = 1000.0 ** -torch.linspace(0, 1, first.shape[-1], device=x.device)
    angle = torch.arange(x.shape[-2], device=x.device)[:, None] * pace  # (T, D/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)


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
        seen = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.mix(seen.transpose(1, 2).flatten(2))
        return x + self.down(F.relu(self.up(norm(x))).square())


class Transformer(nn.Module):
    """A decoder over bytes, with rotary positions; every block starts as the identity."""

    def __init__(self, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.byte = nn.Embedding(BYTES, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, BYTES, bias=False)
        nn.init.normal_(self.byte.weight, std=0.3)
        nn.init.zeros_(self.head.weight)
        for block in self.blocks:
            for layer in (block.qkv, block.up):
                nn.init.normal_(layer.weight, std=width**-0.5)
            for layer in (block.mix, block.down):
                nn.init.zeros_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Bytes (B, T) -> logits (B, T, L)."""
        return self.head(norm(self.blocks(self.byte(x))))


def loss_of(model: Transformer, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the mean cross-entropy in nats per byte, a scalar."""
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


# ------------------------------------------------------------------------------------------------ the optimizers


class Recipe(NamedTuple):
    """What `fn.Optimizer` is built from, and what it is compared with.

    make takes the hyper-parameters, schedule the freeze step. exact: the optimizer that sends everything.
    lr, eps: factors on the flags' values; LAMB's learning rate is relative to the size of the weights.
    """

    make: Callable[..., fn.Transform]
    schedule: Callable[[int], Callable[[int], fn.Phase]]
    exact: str
    lr: float = 1.0
    eps: float = 1.0


def never_freeze(freeze_step: int) -> Callable[[int], fn.Phase]:
    """Return the schedule that stays in full precision."""
    return lambda step: fn.Phase.WARMUP


def rarely_agree(freeze_step: int) -> Callable[[int], fn.Phase]:
    """Return 0/1 Adam's schedule: ever fewer variance steps until the freeze, then one agreement in two steps."""
    return fn.zero_one_schedule(freeze_step, var_update_scaler=64, local_step_scaler=200, local_step_clipper=2)


RECIPES = {
    "adamw": Recipe(fn.adamw, never_freeze, "adamw"),
    "onebit_adam": Recipe(fn.onebit_adam, fn.freeze_after, "adamw"),
    "onebit_adam_int8": Recipe(  # the warm-up in 8 bits
        partial(fn.onebit_adam, warmup=fn.int8()), fn.freeze_after, "adamw"
    ),
    "onebit_adam_direct": Recipe(  # for two ranks: codes go straight to the other one
        partial(fn.onebit_adam, servers=False), fn.freeze_after, "adamw"
    ),
    "loco_adamw": Recipe(fn.loco_adamw, fn.freeze_after, "adamw"),
    "zero_one_adam": Recipe(fn.zero_one_adam, rarely_agree, "adamw"),
    "lamb": Recipe(fn.lamb, never_freeze, "lamb", lr=10.0, eps=100.0),
    "onebit_lamb": Recipe(partial(fn.onebit_lamb, factor_max=1.0), fn.freeze_after, "lamb", lr=10.0, eps=100.0),
}


def make_optimizer(model: Transformer, name: str, args: argparse.Namespace, mesh: DeviceMesh) -> fn.Optimizer:
    """Return the optimizer of that name over the model's parameters, bound to the axis "data"."""
    recipe = RECIPES[name]
    eps = recipe.eps * args.eps
    make = partial(recipe.make, axis="data", b1=args.b1, b2=args.b2, eps=eps, weight_decay=args.weight_decay)
    with fn.bind(mesh):
        schedule = recipe.schedule(args.freeze_step)
        return fn.Optimizer(model.parameters(), make, schedule=schedule, lr=recipe.lr * args.lr)


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

        An optimizer that never compresses sends full precision where others compress, too.
        """
        if RECIPES[self.optimizer].schedule is never_freeze:
            phase = "warmup"
        sent = [s for s, p in zip(self.sent, self.phases, strict=True) if p == phase]
        return statistics.mean(sent) if sent else None

    def summary(self) -> dict[str, object]:
        """Return what `--json` writes of this run."""
        return {
            "optimizer": self.optimizer,
            "val_loss": self.val_loss,
            "bytes_per_step": {phase: self.bytes_per_step(phase) for phase in ("warmup", "compressed")},
            "bytes_total": sum(self.sent),
            "seconds_per_step": statistics.median(self.seconds),
        }


def join(args: argparse.Namespace) -> torch.device:
    """Join the process group that torchrun has set up; return this rank's device.

    By default that is an accelerator of its own, and the backend is the accelerator's. Ranks that have to share one
    talk through gloo, since NCCL refuses them.
    """
    if args.device:
        fn.kernels.set_accelerator(args.device)
    device, backend = fn.kernels.get_accelerator(), args.backend or fn.kernels.communication_backend()
    if device.type != "cpu":
        here, ranks = torch.accelerator.device_count(), int(os.environ["LOCAL_WORLD_SIZE"])
        backend = args.backend or ("gloo" if ranks > here else backend)
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]) % here)
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(backend)
    return device


def finish(device: torch.device) -> None:
    """Wait until a device has done what was queued, before a clock is read."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def mean_over_ranks(x: Tensor) -> float:
    """Return the mean of a scalar over all ranks. It is for the log: the ledger does not see it."""
    total = x.clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


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
    model = Transformer(args.layers, args.width, args.heads).to(text.device)
    opt = make_optimizer(model, name, args, mesh)
    lr = LambdaLR(opt, partial(learning_rate_factor, steps=args.steps))
    draw = torch.Generator().manual_seed(args.seed * dist.get_world_size() + rank)
    run = Run(name, [], [], [], [], {})
    bar = tqdm(range(1, args.steps + 1), desc=f"{name:>16}", disable=rank != 0, dynamic_ncols=True)
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
        finish(text.device)
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
    """Compare every optimizer with its exact counterpart, if that was run too."""
    by_name = {run.optimizer: run for run in runs}
    lines = []
    for run in runs:
        base = by_name.get(RECIPES[run.optimizer].exact)
        if base is None or run is base:
            continue
        name, ratio = base.optimizer, run.val_loss / base.val_loss
        lines.append(f"{run.optimizer}: validation loss {ratio:.4f}x {name}'s ({100 * (ratio - 1):+.2f} %)")
        full, compressed = base.bytes_per_step("warmup"), run.bytes_per_step("compressed")
        if full and compressed:
            lines.append(f"{run.optimizer}: {full / compressed:.1f}x fewer bytes than {name} in the compressed phase")
        if sum(run.sent):
            fewer = sum(base.sent) / sum(run.sent)
            lines.append(f"{run.optimizer}: {fewer:.1f}x fewer bytes than {name} in the whole run")
    return lines


def draw_picture(runs: list[Run], path: Path, freeze_step: int) -> None:
    """Write loss over steps and loss over bytes as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (over_steps, over_bytes) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True, layout="constrained")
    for place, run in enumerate(runs):
        steps = list(range(1, len(run.sent) + 1))
        total = torch.tensor(run.sent).cumsum(0).tolist()
        measured = sorted(run.validation)
        for axes, x in ((over_steps, steps), (over_bytes, total)):
            axes.plot(x, run.losses, color=f"C{place}", alpha=0.25, linewidth=0.8)
            axes.plot(
                [x[step - 1] for step in measured],
                [run.validation[step] for step in measured],
                marker="o",
                markersize=3,
                color=f"C{place}",
                linewidth=max(1.5, 5 - 1.5 * place),  # curves that coincide can be seen one inside the other
                label=run.optimizer,
            )
    if any("compressed" in run.phases for run in runs):
        over_steps.axvline(freeze_step, color="grey", linestyle=":", label="freeze step")
    over_steps.set(xlabel="step", ylabel="loss (nats per byte)", title="validation (bold) and training loss (faint)")
    over_bytes.set(xlabel="bytes sent by one rank", title="the same over what was sent")
    if any(sum(run.sent) for run in runs):  # a single rank sends nothing
        over_bytes.set_xscale("log")
    over_steps.legend()
    for axes in (over_steps, over_bytes):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=150)


# ------------------------------------------------------------------------------------------------------ the flags


def training_flags(description: str) -> argparse.ArgumentParser:
    """Return a parser of the flags that every script which trains this model has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--layers", type=int, default=4, help="transformer blocks")
    add("--width", type=int, default=96, help="size of the residual stream")
    add("--heads", type=int, default=4, help="attention heads")
    add("--context", type=int, default=64, help="bytes of a sequence")
    add("--batch", type=int, default=8, help="sequences of a rank's batch")
    add("--steps", type=int, default=1000, help="optimizer steps of each run")
    add("--lr", type=float, default=3e-3, help="peak learning rate")
    add("--b1", type=float, default=0.9, help="decay of the momentum")
    add("--b2", type=float, default=0.98, help="decay of the second moment")
    add("--eps", type=float, default=1e-5, help="added to the root of the second moment")
    add("--weight-decay", type=float, default=0.1, help="decoupled weight decay")
    add("--seed", type=int, default=0, help="of the parameters and of the batches")
    add("--device", metavar="TYPE", help="cpu, cuda, xpu, ...; None is the accelerator, else the CPU")
    add("--backend", metavar="NAME", help="of the process group; None is the device's own")
    add("--json", type=Path, metavar="FILE", help="write the table's numbers to this file")
    return parser


def parse_arguments() -> argparse.Namespace:
    """Read the flags, and refuse those that do not fit together."""
    parser = training_flags(__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--freeze-step", type=int, default=200, help="steps of warm-up before compression starts")
    names = f"names with commas, of {', '.join(RECIPES)}"
    add("--optimizers", default="adamw,onebit_adam,onebit_adam_int8", help=names)
    add("--out", type=Path, default=Path("out"), help="folder for the picture")
    args = parser.parse_args()
    args.optimizers = args.optimizers.split(",")
    for flag in ("layers", "width", "heads", "context", "batch", "steps", "freeze_step"):
        if getattr(args, flag) < 1:
            parser.error(f"--{flag.replace('_', '-')} is {getattr(args, flag)}, but must be at least 1")
    if args.lr <= 0:
        parser.error(f"--lr is {args.lr}, but must be above 0")
    if args.freeze_step > args.steps:
        parser.error(f"--freeze-step {args.freeze_step} is behind the last step, --steps {args.steps}")
    if args.width % (2 * args.heads):
        parser.error(f"--width {args.width} must be a multiple of 2 * --heads, {2 * args.heads}")
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
    device = join(args)
    text, held_out = text.to(device), held_out.to(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("data",))
    if dist.get_rank() == 0:
        model = Transformer(args.layers, args.width, args.heads)
        parameters = sum(p.numel() for p in model.parameters())
        size = f"{len(text):,} bytes to train on, {len(held_out):,} held out"
        print(f"{parameters:,} parameters, {size}, {dist.get_world_size()} ranks", flush=True)
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
