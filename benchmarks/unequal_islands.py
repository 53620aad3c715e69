"""How differences of islands with unequal numbers of local steps should count: one of two at half the speed.

    python -m benchmarks.unequal_islands --json benchmarks/results/unequal_islands.json        # one core, minutes

Simulated: `fn.every_seconds` is given the seconds, so the fast island takes 40 steps a round, the slow one 20. Rounds
are equally long in all ways, but "equal steps", `fn.every(20)`, lets the fast island wait. On equal data both draw from
the whole text, on own data each from one half. A difference counts

    equal          1
    by tokens      tau_i / mean(tau)                                   batches are equal, so tokens are steps
    by steps       mean(tau) / tau_i                                   FedNova, all islands alike
    fednova        sum(tau^2) / (sum(tau) mean(tau))                   FedNova, islands by their tokens
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from tqdm import tqdm
from train_lm import Transformer, cut, loss_of, read_standard_library

import fn
from benchmarks.measure import about, write
from fn import roles, tree

ROUNDS, SECONDS = 12, 5.0
PACES = (0.125, 0.25)
"""Seconds a step of each island."""

BATCH, CONTEXT, LR = 8, 32, 4e-3

WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "equal steps": torch.ones_like,
    "equal": torch.ones_like,
    "by tokens": lambda steps: steps / steps.mean(),
    "by steps": lambda steps: steps.mean() / steps,
    "fednova": lambda steps: (steps.square().sum() / (steps.sum() * steps.mean())).expand_as(steps),
}


def train(way: str, data: str, seed: int, rounds: int = ROUNDS) -> float:
    """Return the loss on held-out text of what both islands agree on in the end."""
    torch.manual_seed(seed)
    text, held_out = read_standard_library()
    model = Transformer(layers=2, width=32, heads=2)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    tx = fn.diloco(LR, axis="islands", outer_lr=0.7, outer_momentum=0.6)
    params = tree.map(lambda p: torch.stack([p, p]), start)
    state = fn.simulate(tx.init, "islands", 2)(params)
    halves = text.chunk(2) if data == "own" else (text, text)
    draws = [torch.Generator().manual_seed(100 * seed + i) for i in range(2)]
    schedules = [fn.every_seconds(SECONDS) for _ in PACES]
    gradients = grad(lambda p, batch: loss_of(Bound(model, p), batch))
    for i, schedule in enumerate(schedules):
        schedule.plan(0, max(PACES) if way == "equal steps" else PACES[i])
    for _ in range(rounds):
        taken = []
        for i, schedule in enumerate(schedules):
            own, mine = (tree.map(lambda x, i=i: x[i], of) for of in (params, state))
            step = schedule.begun
            while True:
                starts = torch.randint(len(halves[i]) - CONTEXT, (BATCH,), generator=draws[i])
                grads = gradients(own, cut(halves[i], starts, CONTEXT))
                updates, mine = tx.local_update(grads, mine, own)
                own, step = fn.apply_updates(own, updates), step + 1
                if schedule(step - 1) == fn.Round(0, 0):
                    break
            taken.append(step - schedule.begun)
            schedule.plan(step)
            params = tree.map(lambda x, y, i=i: torch.stack([*x[:i], y, *x[i + 1 :]]), params, own)
            state = tree.map(lambda x, y, i=i: torch.stack([*x[:i], y, *x[i + 1 :]]), state, mine)
        weights = WEIGHTS[way](torch.tensor(taken, dtype=torch.float32))
        params, state = fn.simulate(lambda *given: exchange(tx, *given), "islands", 2)(params, state, weights)
    with torch.no_grad():
        starts = torch.linspace(0, len(held_out) - CONTEXT - 1, 1024).long()
        bound = Bound(model, tree.map(lambda x: x[0], params))
        return torch.stack([loss_of(bound, cut(held_out, s, CONTEXT)) for s in starts.split(128)]).mean().item()


class Bound(nn.Module):
    """A model that computes with other parameters."""

    def __init__(self, model: nn.Module, params: dict[str, Tensor]):
        super().__init__()
        self.call = lambda x: functional_call(model, params, x)

    def forward(self, x: Tensor) -> Tensor:
        """Compute with them."""
        return self.call(x)


def exchange(tx: fn.Transform, params: Any, state: Any, weight: Tensor) -> tuple[Any, Any]:
    """Take the exchange of a round, in which this island's difference counts by a weight."""
    assert tx.exchange is not None
    params, state = tx.exchange.difference(0, state, params)
    state = roles.replace(state, "difference", lambda found: tree.map(lambda x: weight * x, found))
    params, state = tx.exchange.mean(0, state, params)
    return tx.exchange.outer(0, state, params)


def main() -> None:
    """Run what the flags ask for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=5, help="runs of each row")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of a run")
    parser.add_argument("--json", type=Path, help="where the losses are written")
    args = parser.parse_args()
    torch.set_num_threads(1)
    losses: dict[str, dict[str, list[float]]] = {data: {way: [] for way in WEIGHTS} for data in ("equal", "own")}
    todo = [(data, way, seed) for seed in range(args.seeds) for data in losses for way in WEIGHTS]
    for data, way, seed in tqdm(todo):
        losses[data][way].append(train(way, data, seed, args.rounds))
    for data, rows in losses.items():
        for way, found in rows.items():
            apart = [x - y for x, y in zip(found, rows["equal"], strict=True)]
            print(f"{data:6} {way:12} {statistics.mean(found):.4f}  {statistics.mean(apart):+.4f} to equal weights")
    if args.json:
        write(args.json, {**about(), "rounds": args.rounds, "losses": losses})


if __name__ == "__main__":
    main()
