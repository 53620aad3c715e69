"""What the atlas trains: a language model from scratch, the same one on another kind of text, and digits.

All tasks have as many samples in a step whatever the number of workers, so all runs of a task have equal tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import fn

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from train_lm import Transformer, cut, loss_of, read_standard_library

Params = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]

CONTEXT, SEQUENCES = 64, 8
MODEL = (2, 64, 4)
"""Layers, width, heads."""


class Task(NamedTuple):
    """params: of a seed. loss: a scalar of one rank's batch. batches: (seed, workers) -> draw of the next batch, whose
    leading dimension is the ranks. score: the loss on what is held out.
    """

    params: Callable[[int], Params]
    loss: Callable[[Params, Batch], Tensor]
    batches: Callable[[int, int], Callable[[], Batch]]
    score: Callable[[Params], float]


def _text_task(params: Callable[[int], Params], text: Tensor, held_out: Tensor) -> Task:
    model = Transformer(*MODEL)

    def loss(params: Params, batch: Batch) -> Tensor:
        return loss_of(lambda tokens: functional_call(model, params, (tokens,)), batch)

    def batches(seed: int, workers: int) -> Callable[[], Batch]:
        generator = torch.Generator().manual_seed(seed)

        def draw() -> Batch:
            x, y = cut(text, torch.randint(len(text) - CONTEXT, (SEQUENCES,), generator=generator), CONTEXT)
            return x.unflatten(0, (workers, -1)), y.unflatten(0, (workers, -1))

        return draw

    def score(params: Params) -> float:
        starts = torch.arange(256) * ((len(held_out) - CONTEXT - 1) // 256)
        with torch.no_grad():
            return float(loss(params, cut(held_out, starts, CONTEXT)))

    return Task(params, loss, batches, score)


def fresh(seed: int) -> Params:
    """Return the language model's params before training."""
    torch.manual_seed(seed)
    return {name: p.detach() for name, p in Transformer(*MODEL).named_parameters()}


@cache
def language_model() -> Task:
    """Train on the source code of Python's standard library, from scratch."""
    return _text_task(fresh, *read_standard_library(without={PROSE}))


PROSE = "pydoc_data"
"""The standard library's reference manual: English with markup, in no file that the language model saw before."""


@cache
def fine_tuning() -> Task:
    """Train the trained language model on another kind of text: the reference manual, the last eighth held out."""
    from pydoc_data.topics import topics

    prose = "\n".join(topics[name] for name in sorted(topics)).encode()
    text = torch.frombuffer(bytearray(prose), dtype=torch.uint8)
    end = 7 * len(text) // 8
    return _text_task(trained, text[:end], text[end:])


@cache
def trained(seed: int, steps: int = 1000) -> Params:
    """Return the params of the language model after exact steps of AdamW, on one rank."""
    task, params, lr = language_model(), fresh(seed), torch.tensor(3e-3)
    tx = fn.chain(fn.scale_by_adam(0.9, 0.98, 1e-5), fn.add_decayed_weights(0.1), fn.scale_by_learning_rate(lr))
    state, draw = tx.init(params), task.batches(seed, 1)
    for step in range(steps):
        lr.fill_(3e-3 * (1 - 0.9 * step / steps))
        x, y = draw()
        grads = torch.func.grad(task.loss)(params, (x[0], y[0]))
        updates, state = tx.warmup_update(grads, state, params)
        params = fn.apply_updates(params, updates)
    return params


class Digits(nn.Module):
    """A small convolutional network for images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(32 * 2 * 2, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, 8, 8) -> logits (B, 10)."""
        x = F.max_pool2d(self.first(x).relu(), 2)
        return self.head(F.max_pool2d(self.second(x).relu(), 2).flatten(1))


@cache
def digits() -> Task:
    """Train a convolutional network on scikit-learn's handwritten digits, a quarter held out."""
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(found.images, dtype=torch.float32)[order, None] / 16
    y = torch.tensor(found.target)[order]
    end, model = 3 * len(y) // 4, Digits()

    def params(seed: int) -> Params:
        torch.manual_seed(seed)
        return {name: p.detach() for name, p in Digits().named_parameters()}

    def loss(params: Params, batch: Batch) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (batch[0],)), batch[1])

    def batches(seed: int, workers: int) -> Callable[[], Batch]:
        generator = torch.Generator().manual_seed(seed)

        def draw() -> Batch:
            places = torch.randint(end, (workers, 64 // workers), generator=generator)
            return x[places], y[places]

        return draw

    def score(params: Params) -> float:
        with torch.no_grad():
            return float(loss(params, (x[end:], y[end:])))

    return Task(params, loss, batches, score)


TASKS: dict[str, tuple[Callable[[], Task], int, str]] = {
    "language model": (language_model, 400, "nats per byte"),
    "fine-tuning": (fine_tuning, 300, "nats per byte"),
    "digits": (digits, 300, "nats per image"),
}
"""By name: the task, its steps, and the unit of its loss."""


def rate(step: int, steps: int, rise: int = 10) -> float:
    """Return the part of the peak learning rate: a short rise, then a line to a tenth."""
    return min((step + 1) / rise, 1.0) * (1 - 0.9 * step / steps)


def tree_mean(params: dict[str, Any]) -> Params:
    """Return the mean over ranks, the leading dimension."""
    return {name: p.mean(0) for name, p in params.items()}
