"""What the grid compares at the size of GPT-2: how each steps, and what the planner is told about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from torch import nn

import fn
from benchmarks.links.contenders import (
    LR,
    ROUND,
    WARM_UP,
    Step,
    World,
    alone,
    exact,
    half_precision,
    ours,
    overlapped,
)
from fn.planner.methods import Method, method, rows
from fn.planner.traffic import Model

LATE = ROUND // 2
"""Steps that go on while a mean travels."""


class Way(NamedTuple):
    """A row of the grid.

    make: (world, model, lr) -> step. planned: the planner's name of it; None: it sends nothing. coded: the same step
    with nothing behind the backward pass, for the measurement of what coding costs; None: make, or nothing is coded.
    delay: steps that go on while a mean travels. fragments: of the params, which are exchanged one after the other.
    steps: of a period. state: bytes per parameter that a rank holds, gradients and message included.
    """

    make: Callable[..., Step]
    planned: str | None
    coded: Callable[..., Step] | None = None
    delay: int = 0
    fragments: int = 1
    steps: int = 1
    state: int = 24

    def method(self, model: Model, ranks: int) -> Method | None:
        """Return how the planner sees it."""
        if self.planned is None:
            return None
        row = next(row for row in rows(local_steps=ROUND) if row.name == self.planned)
        cut = row.cut if self.fragments == 1 else self.fragments
        return method(row._replace(delay=self.delay / ROUND, cut=cut), model, ranks)


def int4_gradients(lr: Any, axis: str, eps: float) -> fn.Transform:
    """Return AdamW whose gradients travel in 4 bits, with LoCo's error feedback."""
    links = fn.scale_by_adam(eps=eps), fn.add_decayed_weights(1e-2), fn.scale_by_learning_rate(lr)
    return fn.chain(fn.average(axis), fn.compressed_average(axis, fn.int4(), fn.damped()), *links)


def fp8_gradients(lr: Any, axis: str, eps: float) -> fn.Transform:
    """Return AdamW whose gradients travel as blocks of 8-bit floating numbers, without error feedback."""
    links = fn.scale_by_adam(eps=eps), fn.add_decayed_weights(1e-2), fn.scale_by_learning_rate(lr)
    return fn.chain(fn.average(axis), fn.compressed_average(axis, fn.fp8(), fn.off()), *links)


def sdp4bit(lr: Any, axis: str, eps: float) -> fn.Transform:
    """Return the recipe of SDP4Bit on one axis: rotated 4-bit gradients, and 4-bit differences of params."""
    inner = fn.chain(fn.scale_by_adam(eps=eps), fn.add_decayed_weights(1e-2), fn.scale_by_learning_rate(lr))
    back = {"gather": fn.int4(2048), "gather_feedback": fn.classic(), "master": False}
    return fn.sharded(inner, axis, fn.rotated(fn.int4(128)), fn.off(), **back)


def rounds(optimizer: Any, planned: str, delay: int = 0, fragments: int = 1) -> Way:
    """Return rounds of `ROUND` local steps."""
    if fragments > 1:
        optimizer = partial(optimizer, fragments=fragments, alpha=0.5)
    make = partial(ours, optimizer, schedule=fn.every(ROUND, fragments=fragments, start=WARM_UP, delay=delay))
    return Way(make, planned, delay=delay, fragments=fragments, steps=ROUND, state=36)


_lazy = partial(fn.onebit_adam, codec=fn.sign(), feedback=fn.classic(lazy=True))
NONE, DDP = "no communication", "DDP float32"
WAYS: Mapping[str, Way] = {
    NONE: Way(alone, None),
    DDP: Way(exact, "adamw"),
    "DDP bf16": Way(partial(exact, hook=half_precision), "bf16 gradients"),
    "int4 gradients": Way(partial(overlapped, int4_gradients), "adamw, int4 gradients", partial(ours, int4_gradients)),
    "fp8 gradients": Way(partial(overlapped, fp8_gradients), "adamw, fp8 gradients", partial(ours, fp8_gradients)),
    "1-bit Adam": Way(partial(ours, _lazy), "onebit_adam, 1 bit"),
    "1-bit Adam, overlapped": Way(
        partial(overlapped, _lazy), "onebit_adam, 1 bit, overlapped", partial(ours, _lazy)
    ),
    "SDP4Bit": Way(partial(ours, sdp4bit), "SDP4Bit"),
    "PowerSGD, rank 4": Way(partial(ours, fn.powersgd_adamw), "powersgd_adamw, rank 4", state=28),
    "DiLoCo, float32": rounds(fn.diloco, "diloco"),
    "DiLoCo, int8": rounds(partial(fn.diloco, codec=fn.int8()), "diloco, int8"),
    "DiLoCo, 2 bits": rounds(partial(fn.diloco, codec=fn.bins(4, 6)), "diloco, 2 bits"),
    "DiLoCo, signs": rounds(partial(fn.diloco, codec=fn.sign()), "diloco, 1 bit"),
    "DiLoCo, int8, late": rounds(partial(fn.diloco, codec=fn.int8()), "diloco, int8, delayed", LATE),
    "SparseLoCo": rounds(fn.sparse_loco, "sparse_loco"),
}
"""What is compared, in the order in which tables show it."""

SITES: Mapping[str, Way] = {
    NONE: WAYS[NONE],
    DDP: WAYS[DDP],
    "DiLoCo, int8": WAYS["DiLoCo, int8"],
    "DiLoCo, int8, late": WAYS["DiLoCo, int8, late"],
    "Streaming DiLoCo, int8": rounds(partial(fn.diloco, codec=fn.int8()), "diloco, int8", 0, 4),
    "Streaming DiLoCo, int8, late": rounds(partial(fn.diloco, codec=fn.int8()), "diloco, int8, delayed", 6, 4),
}
"""What is compared between sites that are far apart: rounds whole, or in four fragments, each at once or late."""

GPT2 = (12, 768)
"""Layers and width of GPT-2: 124 million parameters."""

HALF = (11, 512)
"""Layers and width of 61 million parameters, for methods whose state would not fit the machine four times."""

FITS = 24
"""Bytes per parameter up to which four ranks hold GPT-2."""


def shapes(layers: int, width: int, words: int = 50257, context: int = 1024) -> list[tuple[int, ...]]:
    """Return the shapes of GPT-2's parameters, in the order of its layers."""

    def linear(outputs: int, inputs: int) -> list[tuple[int, ...]]:
        return [(outputs, inputs), (outputs,)]

    norm: list[tuple[int, ...]] = [(width,), (width,)]
    block = norm + linear(3 * width, width) + linear(width, width)
    block += norm + linear(4 * width, width) + linear(width, 4 * width)
    return [(words, width), (context, width), *block * layers, *norm]


def size_of(way: Way, ranks: int) -> tuple[int, int]:
    """Return the layers and the width that a method is measured at."""
    return HALF if ranks > 2 and way.state > FITS else GPT2


def start(world: World, way: Way, model: nn.Module, coded: bool = False) -> Step:
    """Return the step. coded: nothing behind the backward pass."""
    return (way.coded or way.make if coded else way.make)(world, model, lr=LR)
