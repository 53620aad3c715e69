"""A variant of Muon on shards beside itself on whole matrices, in simulated ranks."""

from __future__ import annotations

from typing import Any

import torch
from simulated import normal

import fn
from fn import Phase, tree

PERIOD = 3


def take_the_steps_of_whole_matrices(whole: fn.Transform, own: fn.Transform) -> None:
    """Compare both in simulated ranks; on shards nothing is sent between the steps of whole matrices."""
    params = [normal(6, 5), normal(4, seed=1)]
    state, p = whole.init(params), params
    rows = [x.view(2, -1, *x.shape[1:]) for x in params]
    dims = tree.map(lambda x: 0, own.init(params))  # also of a momentum, of which each rank has rows
    of_ranks = fn.simulate(own.init, "shard", 2, out_dims=dims)(rows)
    for t in range(5):
        phase, g = fn.periodic(PERIOD)(t), [normal(*x.shape, seed=t) for x in params]
        updates, state = whole.update(phase)(g, state, p)
        p = fn.apply_updates(p, updates)

        def step(g: Any, s: Any, x: Any, phase: Phase = phase) -> Any:
            u, s = own.update(phase)(g, s, x)
            return fn.apply_updates(x, u), s

        with fn.ledger() as book:
            run = fn.simulate(step, "shard", 2, in_dims=(0, dims, 0), out_dims=(0, dims))
            rows, of_ranks = run([x.view(2, -1, *x.shape[1:]) for x in g], of_ranks, rows)
        assert bool(book.sent.get(("shard", "all_to_all"))) == (phase is Phase.WARMUP)
        for x, y in zip(rows, p, strict=True):
            torch.testing.assert_close(x.reshape(y.shape), y, rtol=1e-4, atol=1e-5)
