"""Flags that are taken to be true until all are read: with tensors of the CPU in the place of a device's."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import fn
from fn import tree
from fn.kernels import flags

AS_ON_A_DEVICE = partial(mock.patch.object, flags, "is_on_host", lambda flag: False)


def trained(make: Any, params: list[torch.Tensor], schedule: Any, bad: dict[int, str]) -> tuple[Any, Any, int, int]:
    """Train, with a NaN in the gradients or in the state before some steps; return what is left."""
    groups = [{"params": [torch.nn.Parameter(p.clone())]} for p in params]
    opt = fn.Optimizer(groups, partial(make, axis="data"), schedule=schedule, lr=0.1)
    random = torch.Generator().manual_seed(0)
    for step in range(9):
        for g in groups:
            g["params"][0].grad = torch.randn(g["params"][0].shape, generator=random)
        if bad.get(step) == "gradient":
            groups[1]["params"][0].grad[0] = torch.nan
        if bad.get(step) == "params":
            groups[1]["params"][0].data[0] = torch.nan
        opt.step()
    return [g["params"][0].detach() for g in groups], opt.states, opt.skipped, opt.dropped


@pytest.mark.parametrize("make", [fn.local_sgd, partial(fn.local_sgd, momentum=0.9, on_skip="anchor"), fn.diloco,
                                  partial(fn.muloco, codec=fn.int8())])  # fmt: skip
@pytest.mark.parametrize("bad", [{}, {1: "gradient"}, {2: "params"}, {4: "params"}, {2: "gradient", 5: "params"}])
def test_steps_and_exchanges_are_those_of_a_device_whose_flags_are_read_one_by_one(make, bad):
    """Whatever was assumed and does not hold is taken again, and leaves out what it leaves out elsewhere."""
    torch.manual_seed(0)
    params, schedule = [torch.randn(4, 3), torch.randn(5)], fn.every(3)
    expected = trained(make, params, schedule, bad)
    with AS_ON_A_DEVICE(), mock.patch.object(flags, "assumed", wraps=flags.assumed) as assumed:
        found = trained(make, params, schedule, bad)
    assert assumed.called
    assert found[2:] == expected[2:]
    assert any(expected[2:]) == bool(bad)
    for a, b in zip(tree.leaves(found[:2]), tree.leaves(expected[:2]), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
