"""Parameters in channels_last, or transposed: ranks lay them out alike, and a warning says that they are slower."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

import fn


def differing() -> str:
    """Make an optimizer of a matrix that lies in columns on the second rank."""
    x = torch.ones(7, 5)
    param = nn.Parameter(x.t().contiguous().t() if dist.get_rank() == 1 else x)
    with fn.bind({"data": dist.group.WORLD}), pytest.raises(fn.RanksDisagree) as told:
        fn.Optimizer([param], partial(fn.loco_adamw, axis="data"), lr=1e-2)
    return str(told.value)


def test_ranks_whose_parameters_lie_otherwise_are_refused_by_name():
    for text in ranks.run(2, differing):
        assert "layout of parameter 0 in group 0" in text


def test_that_it_is_slower_is_warned_of_once(caplog):
    param = nn.Parameter(torch.ones(4, 3, 2, 2).to(memory_format=torch.channels_last))
    opt = fn.Optimizer([param], fn.adamw, lr=1e-2)
    with caplog.at_level(logging.WARNING, "fn"):
        for _ in range(3):
            param.grad = torch.ones_like(param)
            opt.step()
    (said,) = [r for r in caplog.records if "link by link" in r.getMessage()]
    assert said.levelno == logging.WARNING
    assert "channels_last" in said.getMessage()
