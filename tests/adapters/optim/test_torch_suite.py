"""PyTorch's own descriptions of optimizers, `OptimizerInfo`, with `fn.Optimizer` as the optimizer they describe.

They bring the schedulers to run with.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch

import fn


class AdamW(fn.Optimizer):
    """`fn.adamw` with torch's arguments."""

    transform = staticmethod(fn.adamw)

    def __init__(self, params: Any, lr: Any = 1e-3, betas: Any = (0.9, 0.999), **more: Any):
        hyper = {"weight_decay": 1e-2, **more}
        super().__init__(params, self.transform, lr=lr, b1=betas[0], b2=betas[1], **hyper)


class Onebit(AdamW):
    """1-bit Adam on one rank, through its freeze."""

    @staticmethod
    def transform(**hyper: Any) -> fn.Transform:
        return fn.onebit_adam(axis="data", **hyper)

    def __init__(self, params: Any, **more: Any):
        super().__init__(params, **more)
        self.schedule = fn.freeze_after(5)


each_kind = pytest.mark.parametrize("kind", [AdamW, Onebit])


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).double()


def descend(net: torch.nn.Module, opt: torch.optim.Optimizer, steps: int, schedulers: Any = ()) -> list[float]:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).to(next(net.parameters()).dtype)
    losses = []
    for _ in range(steps):

        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss.detach()

        losses.append(float(opt.step(closure)))
        for scheduler in schedulers:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(losses[-1]) if plateau else scheduler.step()
    return losses


def test_it_goes_in_the_right_direction_with_every_scheduler():
    pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")
    # Not at the top: it takes 2 s, in every process that collects tests.
    from torch.testing._internal.common_optimizers import optim_db

    adamw = next(info for info in optim_db if info.optim_cls is torch.optim.AdamW)
    for schedulers in [(), *adamw.scheduler_inputs]:
        net = model()
        opt = AdamW(net.parameters(), lr=0.02)
        losses = descend(net, opt, 60, [make(opt) for make in schedulers])
        assert losses[-1] < losses[0] / 2


@each_kind
def test_a_deep_copy_goes_on_alone_and_alike(kind):
    net = model()
    opt = kind(net.parameters())
    descend(net, opt, 4)
    other, copied = copy.deepcopy((net, opt))
    assert copied.param_groups[0]["params"][0] is next(other.parameters())
    assert vars(copied).keys() == vars(opt).keys()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    for group in copied.param_groups:
        group["lr"] *= 1.0
    assert descend(net, opt, 8) == descend(other, copied, 8)
    before = [p.clone() for p in net.parameters()]
    copied.param_groups[0]["lr"] = 0.5
    descend(other, copied, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # for 1-bit Adam it comes after the warm-up
        copied.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert all(map(torch.equal, before, net.parameters()))
    assert opt.param_groups[0]["lr"] != 0.5
    assert len(opt.param_groups) == 1
