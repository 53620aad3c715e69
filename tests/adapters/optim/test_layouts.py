"""Parameters in channels_last, or transposed, are trained link by link, to the numbers of contiguous ones."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fn

MAKES = ("adamw", "onebit_adam", "zero_one_adam", "loco_adamw")
SHAPES = [(8, 3, 3, 3), (8,), (7, 5)]
PHASES = [fn.Phase.WARMUP] * 3 + [fn.Phase.COMPRESSED] * 3


def laid(x: Tensor, strided: bool) -> Tensor:
    """Return a copy in channels_last or columns, or a contiguous one."""
    if not strided:
        return x.contiguous().clone()
    return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x.t().contiguous().t() if x.dim() == 2 else x


def trained(name: str, strided: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(laid(torch.randn(shape, generator=generator), strided)) for shape in SHAPES]
    strides = [p.stride() for p in params]
    with fn.bind(init_device_mesh("cpu", (2,), mesh_dim_names=("data",))):
        schedule = None if name == "adamw" else PHASES.__getitem__
        opt = fn.Optimizer(params, partial(getattr(fn, name), axis="data"), schedule=schedule, lr=1e-2)
    for step in range(len(PHASES)):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        for p in params:
            p.grad = laid(torch.randn(p.shape, generator=generator), strided)
        opt.step()
    assert strides == [p.stride() for p in params]
    return [p.detach().contiguous() for p in params]


def all_layouts() -> dict[str, list[list[Tensor]]]:
    """Return the params of contiguous ranks, and of strided ones."""
    return {name: [trained(name, strided) for strided in (False, True)] for name in MAKES}


@pytest.fixture(scope="module")
def answers():
    return ranks.run(2, all_layouts)


@pytest.mark.parametrize("name", MAKES)
def test_numbers_do_not_depend_on_how_parameters_lie(answers, name):
    contiguous, strided = answers[0][name]
    torch.testing.assert_close(strided, contiguous, rtol=2e-6, atol=2e-6)
    for mine, other in zip(answers[0][name], answers[1][name], strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)


def differing() -> str:
    with pytest.raises(fn.RanksDisagree) as told:
        trained("loco_adamw", dist.get_rank() == 1)
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
