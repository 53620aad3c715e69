"""What the atlas trains: a language model from scratch, the same one on another kind of text, and digits.

All tasks have as many samples in a step whatever the number of workers, so all runs of a task have equal tokens. Each
has three splits: one is trained on, learning rates are chosen on the second, and tables show the third.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from train_lm import Transformer, cut, loss_of, read_standard_library

import fn

Params = dict[str, Tensor]
Batch = tuple[Tensor, Tensor]


class Size(NamedTuple):
    """A language model and its batch. context: bytes of a sequence. sequences: in a step, of all workers."""

    layers: int
    width: int
    heads: int
    context: int
    sequences: int


SMALL = Size(2, 64, 4, context=64, sequences=8)
"""0.13 and 0.85 million parameters."""


class Score(NamedTuple):
    """What trained params are worth on data that they never saw.

    tuning: the loss on the split that learning rates are chosen on. loss: on the split that tables show. accuracy: on
    that split, the part that is right; None where nothing is classified.
    """

    tuning: float
    loss: float
    accuracy: float | None = None


class Task(NamedTuple):
    """What a run trains.

    params: of a seed. loss: a scalar of one rank's batch. batches: (seed, workers) -> draw of the next batch, whose
    leading dimension is the ranks. score: params -> what they are worth.
    """

    params: Callable[[int], Params]
    loss: Callable[[Params, Batch], Tensor]
    batches: Callable[[int, int], Callable[[], Batch]]
    score: Callable[[Params], Score]


def _text_task(
    params: Callable[[int], Params], size: Size, text: Tensor, tuning: Tensor, test: Tensor, *, own_kinds: bool = False
) -> Task:
    """Return a task on text. own_kinds: each worker draws from a part of the text of its own, not from all of it."""
    model, context = Transformer(size.layers, size.width, size.heads), size.context

    def loss(params: Params, batch: Batch) -> Tensor:
        return loss_of(lambda tokens: functional_call(model, params, (tokens,)), batch)

    def batches(seed: int, workers: int) -> Callable[[], Batch]:
        generator = torch.Generator().manual_seed(seed)
        part = len(text) // workers

        def draw() -> Batch:
            end = (part if own_kinds else len(text)) - context
            starts = torch.randint(end, (workers, size.sequences // workers), generator=generator)
            if own_kinds:
                starts += part * torch.arange(workers)[:, None]
            x, y = cut(text, starts.flatten(), context)
            return x.unflatten(0, (workers, -1)), y.unflatten(0, (workers, -1))

        return draw

    def loss_on(params: Params, split: Tensor) -> float:
        starts = torch.arange(256) * ((len(split) - context - 1) // 256)
        with torch.no_grad():
            return float(loss(params, cut(split, starts, context)))

    def score(params: Params) -> Score:
        return Score(loss_on(params, tuning), loss_on(params, test))

    return Task(params, loss, batches, score)


def fresh(seed: int, size: Size = SMALL) -> Params:
    """Return the language model's params before training."""
    torch.manual_seed(seed)
    model = Transformer(size.layers, size.width, size.heads)
    return {name: p.detach() for name, p in model.named_parameters()}


@cache
def language_model(size: Size = SMALL, *, own_kinds: bool = False) -> Task:
    """Train on the source code of Python's standard library, from scratch; halves of the held-out files are splits.

    The text has one package after the other, so that with own_kinds each worker has packages of its own.
    """
    text, held_out = read_standard_library(without={PROSE})
    return _text_task(partial(fresh, size=size), size, text, *held_out.tensor_split(2), own_kinds=own_kinds)


PROSE = "pydoc_data"
"""The standard library's reference manual: English with markup, in no file that the language model saw before."""


@cache
def fine_tuning() -> Task:
    """Train the trained language model on another kind of text: the reference manual, its last quarter held out."""
    from pydoc_data.topics import topics

    prose = "\n".join(topics[name] for name in sorted(topics)).encode()
    text = torch.frombuffer(bytearray(prose), dtype=torch.uint8)
    text, tuning, test = text.split([n := len(text) * 3 // 4, (len(text) - n) // 2, -(-(len(text) - n) // 2)])
    return _text_task(trained, SMALL, text, tuning, test)


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
    """A small convolutional network for square images.

    Args: side: pixels of a side, a multiple of 4.
    """

    def __init__(self, side: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 16, 3, padding=1)
        self.second = nn.Conv2d(16, 32, 3, padding=1)
        self.head = nn.Linear(2 * side * side, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1, side, side) -> logits (B, 10)."""
        x = F.max_pool2d(self.first(x).relu(), 2)
        return self.head(F.max_pool2d(self.second(x).relu(), 2).flatten(1))


@cache
def digits(batch: int = 64) -> Task:
    """Train a convolutional network on scikit-learn's handwritten digits, 15 % held out for rates, 25 % for tables.

    Args: batch: images in a step, of all workers.
    """
    from sklearn.datasets import load_digits

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    x = torch.tensor(found.images, dtype=torch.float32)[order, None] / 16
    y = torch.tensor(found.target)[order]
    end, model = 60 * len(y) // 100, Digits()
    tuning, test = slice(end, end + 15 * len(y) // 100), slice(end + 15 * len(y) // 100, None)

    def params(seed: int) -> Params:
        torch.manual_seed(seed)
        return {name: p.detach() for name, p in Digits().named_parameters()}

    def loss(params: Params, batch: Batch) -> Tensor:
        return F.cross_entropy(functional_call(model, params, (batch[0],)), batch[1])

    def batches(seed: int, workers: int) -> Callable[[], Batch]:
        generator = torch.Generator().manual_seed(seed)

        def draw() -> Batch:
            places = torch.randint(end, (workers, batch // workers), generator=generator)
            return x[places], y[places]

        return draw

    def score(params: Params) -> Score:
        with torch.no_grad():
            right = functional_call(model, params, (x[test],)).argmax(1) == y[test]
            losses = (float(loss(params, (x[split], y[split]))) for split in (tuning, test))
            return Score(*losses, accuracy=float(right.float().mean()))

    return Task(params, loss, batches, score)


class Setting(NamedTuple):
    """How the atlas runs a task.

    make: the task. steps, unit: of a run, of its loss. workers, seeds: of the runs that tables show. choosing: seeds
    that choose learning rates, with `summary.TUNED_ON` workers, and are in no table.
    """

    make: Callable[[], Task]
    steps: int
    unit: str
    workers: int
    seeds: tuple[int, ...]
    choosing: tuple[int, ...] = (0,)


def rate(step: int, steps: int) -> float:
    """Return the part of the peak learning rate: a rise over ten steps, and a line down to a tenth."""
    return min((step + 1) / 10, 1.0) * (1 - 0.9 * step / steps)


TASKS = {
    "language model": Setting(language_model, 400, "nats per byte", 8, (1, 2, 3)),
    "fine-tuning": Setting(fine_tuning, 300, "nats per byte", 4, (1, 2, 3)),
    "digits": Setting(digits, 300, "nats per image", 4, (1, 2, 3, 4, 5), choosing=(0, 6, 7)),
    "own packages": Setting(partial(language_model, own_kinds=True), 400, "nats per byte", 8, (1, 2, 3)),
}
"""In "own packages" each worker of the language model has packages of its own."""


def tree_mean(params: dict[str, Any]) -> Params:
    """Return the mean over ranks, the leading dimension."""
    return {name: p.mean(0) for name, p in params.items()}
