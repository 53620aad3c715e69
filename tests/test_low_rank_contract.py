"""What is asked of the named optimizers of low rank: a short form of `test_contract.py`, which takes minutes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fn
from fn import Phase, tree

MAKES = {"powersgd_adamw": fn.powersgd_adamw, "dion": fn.dion}
each_make = pytest.mark.parametrize("name", list(MAKES))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


PARAMS = [normal(12, 8), normal(5, seed=1)]


def ranked(tx: fn.Transform, phase: Phase) -> tuple[Any, Any]:
    """Return a step of two simulated ranks, and its first state."""
    dims = fn.rank_dims(tx.init(PARAMS))

    def step(g: Any, s: Any, p: Any) -> Any:
        run = fn.simulate(tx.update(phase), "data", 2, in_dims=(0, dims, None), out_dims=(None, dims))
        return run(g, s, p)

    return step, fn.simulate(tx.init, "data", 2, in_dims=None, out_dims=dims)(PARAMS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["powersgd_adamw", pytest.param("dion", marks=pytest.mark.reliability)])
def test_compiled_in_one_graph_it_agrees_with_eager(name):
    step, state = ranked(MAKES[name](axis="data"), Phase.COMPRESSED)
    g = [normal(2, *p.shape, seed=7) for p in PARAMS]
    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(g, state, PARAMS)
    for x, y in zip(tree.leaves(compiled), tree.leaves(step(g, state, PARAMS)), strict=True):
        torch.testing.assert_close(x, y)


@pytest.mark.parametrize("phase", [Phase.WARMUP, Phase.COMPRESSED])
def test_powersgd_on_one_rank_is_adamw(phase):
    ours, theirs = fn.powersgd_adamw(axis="data"), fn.adamw()
    states, params = [ours.init(PARAMS), theirs.init(PARAMS)], [PARAMS, PARAMS]
    for t in range(3):
        g = [normal(*p.shape, seed=t) for p in PARAMS]
        for k, (tx, when) in enumerate(((ours, phase), (theirs, Phase.WARMUP))):
            updates, states[k] = tx.update(when)(g, states[k], params[k])
            params[k] = fn.apply_updates(params[k], updates)
    assert all(map(torch.equal, *params))


@each_make
@pytest.mark.parametrize("phase", [Phase.WARMUP, Phase.COMPRESSED])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_on_any_rank_moves_nothing(name, phase, bad):
    step, state = ranked(MAKES[name](axis="data"), phase)
    g = [normal(2, *p.shape, seed=7) for p in PARAMS]
    g[0][1, 3, 2] = bad
    updates, after = step(g, state, PARAMS)
    assert all(torch.equal(p + u, p) for p, u in zip(PARAMS, updates, strict=True))
    assert int(after.skipped) == 1
    assert all(map(torch.equal, tree.leaves(after.inner), tree.leaves(state.inner)))


@each_make
def test_it_converges_on_a_quadratic_whose_ranks_pull_apart(name):
    step, state = ranked(MAKES[name](0.1, weight_decay=0.0, axis="data"), Phase.COMPRESSED)
    params, pull = PARAMS, [normal(2, *p.shape, seed=11) for p in PARAMS]
    for _ in range(150):
        g = [p - x for p, x in zip(params, pull, strict=True)]
        updates, state = step(g, state, params)
        params = fn.apply_updates(params, updates)
    before, after = (
        sum(float((p - x.mean(0)).square().sum()) for p, x in zip(at, pull, strict=True)) for at in (PARAMS, params)
    )
    assert after < 0.1 * before
