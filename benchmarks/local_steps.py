"""Local steps: the loss after equal tokens, and the bytes of a round, against AdamW with exact gradients.

    OMP_NUM_THREADS=2 python benchmarks/local_steps.py --json out/local_steps.json [--seeds 0 1 2] [--rounds 100]
    python benchmarks/local_steps.py --bytes

The first trains the demo's language model on simulated workers, each with batches of its own, behind a warm-up of exact
averages. Runs that the JSON file holds are not taken again, so it may be stopped and started. The second counts what a
rank sends in a round of ten million parameters, by `fn.ledger`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import machine
from torch import Tensor
from torch.func import functional_call, grad_and_value
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

import fn

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from train_lm import Transformer, cut, learning_rate_factor, loss_of, read_standard_library

WARM_UP = 0.08
"""The part of the steps that averages gradients exactly."""

LR, MOMENTUM = 3e-3, 0.6
"""Of the local steps; of the outer optimizer, for which some hundred rounds are few."""


class Contender(NamedTuple):
    """make: (lr, axis) -> transform. h: steps of a round; None: no rounds."""

    make: Callable[..., fn.Transform]
    h: int | None


def diloco(h: int, codec: Any = None) -> Contender:
    """Return DiLoCo with an exchange in h steps."""
    return Contender(partial(fn.diloco, outer_momentum=MOMENTUM, codec=codec), h)


CONTENDERS = {
    "adamw": Contender(fn.adamw, None),
    "diloco, H = 16": diloco(16),
    "diloco, H = 32": diloco(32),
    "diloco, H = 64": diloco(64),
    "diloco, H = 16, int8": diloco(16, fn.int8()),
    "diloco, H = 16, 2 bits": diloco(16, fn.bins(4, 6)),
    "diloco, H = 16, 1 bit": diloco(16, fn.sign()),
    "sparse_loco, H = 16": Contender(fn.sparse_loco, 16),
}


def train(name: str, seed: int, workers: int, steps: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train afresh; return the loss on held-out text and the bytes that a rank sent."""
    contender, (text, held_out) = CONTENDERS[name], read_standard_library()
    torch.manual_seed(seed)
    model = Transformer(*args.model)
    params = {k: p.detach() for k, p in model.named_parameters()}
    lr, start = torch.tensor(LR), int(WARM_UP * steps)
    tx = contender.make(lr=lr, axis="data")
    schedule = fn.every(contender.h, start=start) if contender.h else (lambda step: fn.Phase.WARMUP)
    state = tx.init(params)
    dims = fn.rank_dims(state)
    state = fn.simulate(tx.init, "data", workers, in_dims=None, out_dims=dims)(params)
    own = 0 if contender.h else None  # without rounds all workers have the same params
    if contender.h:
        params = {k: p.expand(workers, *p.shape).clone() for k, p in params.items()}
    draw = torch.Generator().manual_seed(seed)

    def loss(params: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        return loss_of(lambda tokens: functional_call(model, params, (tokens,)), batch)

    def step(when: Any, params: Any, state: Any, batch: Any) -> Any:
        grads, value = grad_and_value(loss)(params, batch)
        updates, state = tx.update(when)(grads, state, params)
        return fn.apply_updates(params, updates), state, value

    with fn.ledger() as sent, sdpa_kernel(SDPBackend.MATH):  # the fused attention cannot be batched over workers
        for t in tqdm(range(steps), desc=f"{name}, seed {seed}", leave=False, mininterval=2):
            lr.fill_(LR * learning_rate_factor(t, steps))
            starts = torch.randint(len(text) - args.context, (workers, args.batch), generator=draw)
            pairs = [cut(text, each, args.context) for each in starts]
            batch = tuple(torch.stack(each) for each in zip(*pairs, strict=True))
            turn, places = partial(step, schedule(t)), (own, dims, 0)
            params, state, _ = fn.simulate(turn, "data", workers, in_dims=places, out_dims=places)(params, state, batch)
    mean = {k: p.mean(0) for k, p in params.items()} if contender.h else params
    starts = torch.arange(0, 256) * (len(held_out) // 257)
    with torch.no_grad():
        found = float(loss(mean, cut(held_out, starts, args.context)))
    return {"name": name, "seed": seed, "workers": workers, "steps": steps, "loss": found, "bytes": sent.total}


def bytes_of_a_round(params: int = 10_000_000, workers: int = 4, h: int = 16) -> list[tuple[str, int, float]]:
    """Return by contender the bytes per rank of h steps, and how often they fit into AdamW's."""
    shapes = [(1000, 1000)] * (params // 1_000_000)
    like, found = [torch.zeros(shape) for shape in shapes], []

    def sent(tx: fn.Transform, when: Any) -> int:
        def run(x: Tensor) -> Tensor:
            with fn.ledger() as book:
                tx.update(when)([x * torch.ones_like(p) for p in like], tx.init(like), like)
            books.append(book.total)
            return x

        books: list[int] = []
        fn.simulate(run, "data", workers)(torch.rand(workers))
        return books[0]

    exact = h * sent(fn.adamw(LR, axis="data"), fn.Phase.WARMUP)
    codecs = {"exact": None, "int8": fn.int8(), "2 bits": fn.bins(4, 6), "1 bit": fn.sign()}
    for name, codec in codecs.items():
        size = sent(fn.diloco(LR, axis="data", codec=codec), fn.Round(0, 0))
        found.append((f"diloco, {name}", size, exact / size))
    size = sent(fn.sparse_loco(LR, axis="data"), fn.Round(0, 0))
    return [*found, ("sparse_loco", size, exact / size)]


def table(rows: list[dict[str, Any]]) -> str:
    """Return a row for each contender: the mean loss of its seeds, and what it is against AdamW's."""
    lines = ["| method | loss, mean of seeds (range) | against AdamW | MB per rank |", "|---|---|---|---|"]
    base = statistics.mean([r["loss"] for r in rows if r["name"] == "adamw"] or [float("nan")])
    for name in CONTENDERS:
        own = [r for r in rows if r["name"] == name]
        if own:
            losses = [r["loss"] for r in own]
            mean, spread = statistics.mean(losses), f"{min(losses):.4f} – {max(losses):.4f}"
            lines.append(f"| {name} | {mean:.4f} ({spread}) | {mean / base - 1:+.2%} | {own[0]['bytes'] / 1e6:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Train what is missing, and print the table; or count bytes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--bytes", action="store_true", help="count the bytes of a round instead")
    add("--json", metavar="FILE", default="out/local_steps.json")
    add("--seeds", type=int, nargs="+", default=[0, 1, 2])
    add("--rounds", type=int, default=100, help="of 16 steps each, behind the warm-up")
    add("--workers", type=int, default=4)
    add("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    add("--model", type=int, nargs=3, default=(2, 64, 4), metavar=("LAYERS", "WIDTH", "HEADS"))
    add("--batch", type=int, default=4, help="sequences of a worker's batch")
    add("--context", type=int, default=64, help="bytes of a sequence")
    args = parser.parse_args()
    if args.bytes:
        for name, size, times in bytes_of_a_round():
            print(f"{name:16} {size:12,d} bytes a round, {times:7.1f} times fewer than AdamW")
        return
    path, steps = Path(args.json), round(16 * args.rounds / (1 - WARM_UP) / 64) * 64
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    done = {(r["name"], r["seed"], r["workers"], r["steps"]) for r in rows}
    for seed in args.seeds:
        for name in args.only:
            if (name, seed, args.workers, steps) not in done:
                rows.append(train(name, seed, args.workers, steps, args))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps({"about": {**machine(), **vars(args)}, "rows": rows}, indent=1) + "\n")
    print(table([r for r in rows if r["steps"] == steps and r["workers"] == args.workers]))


if __name__ == "__main__":
    main()
