"""Momentum that is no average: `trace`, as outer optimizers use it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fn import tree
from fn.base import Transform, check_number, check_state, lift
from fn.errors import expected
from fn.transforms.adam import zeros_like_moment

Tree = Any


class TraceState(NamedTuple):
    """State of `trace`. mu: the sum of the updates, those of the past decayed; float32 for half precision."""

    mu: Tree


def trace(decay: float, nesterov: bool = False) -> Transform:
    """Add up the updates, those of the past decayed.

        b <- decay b + d;    u = d + decay b with nesterov, else b

    The learning rate comes behind it, so a rate that changes acts at once, on the past, too.

    Raises: ValueError if decay is outside [0, 1); TypeError if nesterov is no bool.

    Paper: Polyak, Some methods of speeding up the convergence of iteration methods (1964); the form of
        `torch.optim.SGD` without dampening.
    """
    check_number("decay", decay)
    if not 0 <= decay < 1:
        raise ValueError(expected("decay", "a number in [0, 1)", f"{decay}"))
    if not isinstance(nesterov, bool):
        raise TypeError(expected("nesterov", "True or False", f"{nesterov!r}"))

    def init(params: Tree) -> TraceState:
        tree.check_real(params, "params")
        return TraceState(tree.map(zeros_like_moment, params))

    def update(updates: Tree, state: TraceState, params: Tree, /) -> tuple[Tree, TraceState]:
        check_state(state, TraceState)
        tree.check_updates(updates, state.mu)
        mu = tree.map(lambda b, d: torch.add(d.to(b.dtype), b, alpha=decay), state.mu, updates)
        out = tree.map(lambda b, d: torch.add(d.to(b.dtype), b, alpha=decay), mu, updates) if nesterov else mu
        return out, TraceState(mu)

    return lift(init, update)
