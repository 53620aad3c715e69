"""Differences that weigh as much as the tokens behind them: the formula, on two real ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

import fn
from fn import Round, tree
from fn.adapters.optim.core import stage_exchange
from fn.adapters.torchft.islands import weight_of

H = 3

TOKENS: dict[str, tuple[float, float]] = {"apart": (300, 100), "none on one": (0, 7), "none at all": (0, 0)}

METHODS: dict[str, Any] = {
    "exact": fn.diloco,
    "fragments": partial(fn.diloco, fragments=2),
    "in codes": partial(fn.diloco, codec=fn.int8()),
}

two = ranks.Cases(2)


def weighed(make: Any, tokens: tuple[float, float]) -> tuple[list[Any], list[Any], list[Any]]:
    """Return how far this rank went from the anchor, where the anchor was, and where it is after an exchange."""
    generator = torch.Generator().manual_seed(7)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(5, 7), (7,), ()]]
    with fn.bind({"data": dist.group.WORLD}):
        nesterov = partial(make, axis="data", outer_momentum=0.9)
        opt = fn.Optimizer(params, nesterov, schedule=lambda step: Round(), lr=0.02)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(H):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()
    (anchor,) = tree.fields(opt.states, "anchor")
    before = [x.clone() for x in anchor]
    went = [x - p.detach() for x, p in zip(anchor, params, strict=True)]
    rank = dist.get_rank()
    with torch.no_grad(), opt.binding:
        for fragment in range(len(tree.fields(opt.states, "outer")[0])):
            stage_exchange(opt, Round(fragment, fragment), weight_of(tokens, rank)).commit()
    (after,) = tree.fields(opt.states, "anchor")
    return [w.tolist() for w in went], [x.tolist() for x in before], [x.tolist() for x in after]


@two
def all_cases() -> dict[tuple[str, str], Any]:
    return {(m, t): weighed(make, tokens) for m, make in METHODS.items() for t, tokens in TOKENS.items()}


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("method", METHODS)
def test_the_anchor_moves_by_the_mean_weighed_by_tokens(method, tokens):
    first, second = (answer[method, tokens] for answer in two.answer("all_cases"))
    assert first[2] == second[2]
    counts = TOKENS[tokens] if any(TOKENS[tokens]) else (1, 1)
    for ours, theirs, before, after in zip(first[0], second[0], first[1], first[2], strict=True):
        each = [torch.tensor(went, dtype=torch.float64) for went in (ours, theirs)]
        mean = (counts[0] * each[0] + counts[1] * each[1]) / sum(counts)
        wanted = torch.tensor(before, dtype=torch.float64) - 0.7 * 1.9 * mean  # the first Nesterov step
        off = float((torch.tensor(after, dtype=torch.float64) - wanted).abs().max())
        largest = max(float(n / sum(counts) * 2 * x.abs().max()) for n, x in zip(counts, each, strict=True))
        assert off <= (2e-2 * largest if method == "in codes" else 1e-6)


def test_a_weight_is_the_share_of_the_mean():
    assert [weight_of([300, 100], rank) for rank in range(2)] == [1.5, 0.5]
    assert weight_of([0.0, 0.0], 1) == 1.0
    assert weight_of([1.0, 1.0, 1.0], 2) == 1.0
