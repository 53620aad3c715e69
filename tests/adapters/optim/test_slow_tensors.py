"""What keeps tensors from kernels is said once, with what would help."""

from __future__ import annotations

import logging
import re

import pytest
import torch

import fn
from fn.inplace.match import slow_tensors

CASES = {
    "a layout": ([torch.ones(4, 6)[:, ::2]], r"param 0 .*strides \(6, 2\); make it contiguous"),
    "a dtype": ([torch.ones(3, dtype=torch.float64)], r"expected params in one of .*, but got torch.float64"),
    "dtypes": ([torch.ones(3), torch.ones(3).half()], r"but got torch.float16, torch.float32; give each dtype a param"),
}


@pytest.mark.parametrize(("tensors", "text"), CASES.values(), ids=CASES)
def test_it_is_said_once_in_the_log(tensors, text, caplog):
    params = [torch.nn.Parameter(x) for x in tensors]
    opt = fn.Optimizer(params, fn.adamw, lr=1e-2)
    with caplog.at_level(logging.INFO, "fn"):
        for _ in range(3):
            for p in params:
                p.grad = torch.ones_like(p)
            opt.step()
    (said,) = [r.getMessage() for r in caplog.records if "link by link" in r.getMessage()]
    assert re.search(text, said)


def test_a_gradient_that_is_not_contiguous_is_named():
    params, grads = [torch.ones(2), torch.ones(2, 3)], [torch.ones(2), torch.ones(3, 2).t()]
    assert "gradient of param 1" in slow_tensors(params, grads)


def test_of_ordinary_tensors_nothing_is_said():
    assert not slow_tensors([torch.ones(2).bfloat16()], [torch.ones(2).bfloat16()])
