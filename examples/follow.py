"""Follow a training from outside: two trainers, and a process that draws their validation loss as it goes.

    python examples/follow.py

The trainers learn the text of `train_lm.py` by 1-bit Adam, and publish what all ranks get: `publish` is one line. This
process is no rank of theirs, and they send it nothing. It reads the folder of the log, has their parameters behind each
step, and evaluates them. In the middle both trainers are killed; started again, they go on from their last checkpoint,
and the follower goes back with them. At the end it compares its parameters with theirs, bit for bit.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import threading
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from tqdm import tqdm
from train_lm import Transformer, cut, loss_of, read_standard_library, readable

import fn
from fn.adapters import checkpoint
from fn.adapters.follow import Follower, publish

RANKS, CONTEXT = 2, 64
make = partial(fn.onebit_adam, axis="data", b2=0.98, eps=1e-5)


def model_of() -> Transformer:
    """Return a small model; the follower's starts from whatever numbers."""
    return Transformer(layers=2, width=64, heads=2)


# ---------------------------------------------------------------------------------------------------- a trainer


def train(rank: int, start: int, args: argparse.Namespace) -> None:
    """Train as one of the ranks, from the last checkpoint, if there is one. start: how often they were started."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{args.out}/meet-{start}", rank=rank, world_size=RANKS)
    torch.manual_seed(args.seed)
    model, (text, _) = model_of(), read_standard_library()
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(model.named_parameters(), make, schedule=fn.freeze_after(args.steps // 5), lr=args.lr)
    if (args.out / "checkpoints").exists():
        checkpoint.load(args.out / "checkpoints", opt)
    publication = publish(opt, args.out / "log", snapshot_every=args.save_every, digest_every=10)

    for step in range(opt.steps, args.steps):
        draw = torch.Generator().manual_seed(step * RANKS + rank)
        loss_of(model, cut(text, torch.randint(len(text) - CONTEXT, (8,), generator=draw), CONTEXT)).backward()
        opt.step()
        opt.zero_grad()
        if opt.steps % args.save_every == 0:
            checkpoint.save(args.out / "checkpoints", opt)
        if opt.steps == args.steps // 2 and start == 0:
            os.kill(os.getpid(), signal.SIGKILL)  # as when the power fails: nothing is closed, no goodbye is said
    if publication is not None:
        publication.close()
        torch.save(model.state_dict(), args.out / "trained.pt")
    dist.barrier()
    dist.destroy_process_group()


def supervise(args: argparse.Namespace) -> None:
    """Start the trainers, and start them again once if they die."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["train_lm", "fn.adapters.checkpoint", "fn.adapters.follow"])
    for start in range(2):
        ranks = [context.Process(target=train, args=(rank, start, args), daemon=True) for rank in range(RANKS)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if not any(process.exitcode for process in ranks):
            return


# -------------------------------------------------------------------------------------------------- the follower


@torch.no_grad()
def validate(model: Transformer, text: Tensor) -> float:
    """Return the loss on windows spread evenly over the text that is held out."""
    starts = torch.linspace(0, len(text) - CONTEXT - 1, 64).long()
    return loss_of(model, cut(text, starts, CONTEXT)).item()


def draw_picture(lines: list[list[tuple[int, float]]], args: argparse.Namespace) -> None:
    """Write the loss over steps as a PNG, a line for each start of the trainers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for start, line in enumerate(lines):
        label = "as it was first heard" if start == 0 else "after the trainers' restart"
        axes.plot(*zip(*line, strict=True), "o-", markersize=4, linewidth=4 - 2 * start, label=label)
    axes.axvline(args.steps // 5, color="grey", linestyle="--", linewidth=1, label="codes of 1.25 bits from here")
    axes.axvline(args.steps // 2, color="C3", linestyle=":", label="both trainers are killed")
    axes.set(xlabel="step", ylabel="validation loss (nats per byte)", xlim=(0, args.steps))
    axes.set_title("drawn by a process that was sent no weights")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(args.out / "follow.png", dpi=120)
    plt.close(figure)


def follow(args: argparse.Namespace) -> Follower:
    """Evaluate each so many steps, and draw; return the follower behind the last one."""
    _, held_out = read_standard_library()
    follower = Follower(args.out / "log", model := model_of(), make, patience=120)  # it waits for the trainers
    lines, before = [list[tuple[int, float]]()], -1
    with tqdm(total=args.steps, desc="follower", dynamic_ncols=True) as bar:
        for step in follower:
            if step <= before:
                bar.write(f"the trainers were killed: back from step {before + 1} to step {step}")
                lines.append([])
            before = step
            bar.update(step + 1 - bar.n)
            if (step + 1) % args.every == 0:
                lines[-1].append((step + 1, validate(model, held_out)))
                bar.set_postfix(loss=f"{lines[-1][-1][1]:.3f}")
                if (step + 1) % (5 * args.every) == 0 or step + 1 == args.steps:
                    draw_picture([line for line in lines if line], args)
            if step + 1 == args.steps:
                return follower
    sys.exit(f"follow: the log ends behind step {follower.steps}; what is wrong with the trainers stands above")


def main() -> None:
    """Start the trainers, follow them, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--steps", type=int, default=200, help="of the trainers")
    add("--every", type=int, default=10, help="steps from one evaluation to the next")
    add("--save-every", type=int, default=40, help="steps from one checkpoint, and one snapshot, to the next")
    add("--lr", type=float, default=3e-3, help="learning rate")
    add("--seed", type=int, default=0, help="of the parameters")
    add("--out", type=Path, default=Path("out/follow"), help="folder for the log, checkpoints and the picture; emptied")
    args = parser.parse_args()
    args.out = args.out.absolute()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)

    torch.set_num_threads(1)
    trainers = threading.Thread(target=supervise, args=(args,))
    trainers.start()
    follower = follow(args)
    trainers.join()
    trained = torch.load(args.out / "trained.pt")
    same = all(torch.equal(x, trained[name]) for name, x in follower.model.state_dict().items())
    numbers = sum(x.numel() for x in trained.values())
    size = sum(path.stat().st_size for path in (args.out / "log").glob("*.log"))
    print(
        f"{numbers:,} parameters, {args.steps} steps, a fifth of them a warm-up in float32: a log of {readable(size)};"
    )
    print(f"the parameters behind each of these steps would have {readable(4 * numbers * args.steps)}")
    print(f"picture: {args.out / 'follow.png'}")
    if not same:
        sys.exit("follow: the follower's parameters are others than the trainers'")
    print("the follower's parameters are the trainers', bit for bit")


if __name__ == "__main__":
    main()
