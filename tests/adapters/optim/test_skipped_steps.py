"""Steps that are skipped one after the other: a warning that names the rank and the leaf."""

from __future__ import annotations

import math
import warnings
from functools import partial
from typing import Any

import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn


def step(opt: Any, params: list[Any], bad: bool = False) -> list[str]:
    """Take a step, with a NaN in the last gradient if so wanted; return the warnings."""
    for p in params:
        p.grad = torch.ones_like(p)
    if bad:
        params[-1].grad[1] = math.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        opt.step()
    return [str(w.message) for w in caught]


def named() -> tuple[Any, Any]:
    params = [("first", torch.nn.Parameter(torch.ones(3))), ("last", torch.nn.Parameter(torch.ones(4)))]
    return params, [p for _, p in params]


def test_a_gradient_that_is_never_finite_is_named_now_and_then():
    pairs, params = named()
    opt = fn.Optimizer(pairs, fn.adamw)
    found = [(n, *texts) for n in range(1, 33) if (texts := step(opt, params, bad=True))]
    assert [n for n, *_ in found] == [5, 16, 32]
    assert found[0][1] == (
        "steps: the last 5 were skipped, and nothing moves until one is not; not finite: the gradient of parameter "
        "last of group 0, on rank 0"
    )


def test_a_step_that_is_taken_begins_the_count_anew():
    pairs, params = named()
    opt = fn.Optimizer(pairs, fn.adamw)
    for _ in range(3):
        assert not any(step(opt, params, bad=True) for _ in range(4))
        assert not step(opt, params)
    assert opt.skipped == 12


def bad_on_rank_1() -> list[Any]:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("node", "data"))
    pairs, params = named()
    make = partial(fn.onebit_adam, axis="data")
    with fn.bind(mesh):
        opt = fn.Optimizer(pairs, make, schedule=fn.freeze_after(2), refuse_averaged=False)
    texts, sent = [], []
    for n in range(10):
        with fn.ledger() as bytes_sent:
            texts.append(step(opt, params, bad=dist.get_rank() == 1 and n > 3))
        sent.append(bytes_sent.total)
    return [texts, sent, opt.skipped]


def test_rank_0_says_that_the_gradient_of_rank_1_is_not_finite_and_only_then_more_is_sent():
    one, two = ranks.run(2, bad_on_rank_1)
    assert one[2] == two[2] == 6
    assert two[0][4:] == [[]] * 6
    assert [bool(texts) for texts in one[0][4:]] == [False] * 4 + [True, False]
    assert one[0][8][0].endswith("not finite: the gradient of parameter last of group 0, on rank 1")
    assert one[1][4] == one[1][5] == one[1][7] == one[1][9]
    assert one[1][8] > one[1][7]
