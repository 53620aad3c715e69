"""The fused CPU cells, beside what the conformance kit asks of them in `test_rows`."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fn
from fn.kernels import reference
from fn.kernels.cpu import blocks

pytest.importorskip("numba", reason="the extra `cpu` is not installed")
from fn.kernels.cpu import ints, numba, steps
from fn.kernels.cpu import signs as fused


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("mantissa", [2, 3])
def test_every_8_bit_float_is_written_and_read(mantissa):
    """And every number halfway between two of them, which goes to the even one."""
    numbers = torch.arange(124, dtype=torch.uint8).view(reference.codes.FP8[mantissa]).float()
    largest = torch.finfo(reference.codes.FP8[mantissa]).max  # beside which numbers are multiplied by 1
    x = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2, torch.tensor([largest])])
    x = torch.stack([x, -x])
    valid, runs = torch.tensor([[x.shape[1]]] * 2), [1, x.shape[1]]
    codes, scales = ints.quantize_fp8(x, valid, runs, mantissa)
    same([codes, scales], [x.to(reference.codes.FP8[mantissa]).view(torch.uint8), torch.ones(2, 1)])
    found = ints.dequantize_fp8(codes[:, None], scales[:, None], valid, runs, mantissa)
    same([found[:, :124]], [torch.stack([numbers, -numbers])])


def test_several_threads_give_the_same_result(monkeypatch):
    monkeypatch.setattr(blocks, "THREADED", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert fn.testing.conformance(numba.row("cpu"), ops=("sign_encode_feedback",), sizes=(1023, 20000))


def test_float64_is_left_to_the_reference():
    x = torch.randn(1, 8, dtype=torch.float64)
    assert fused.sign_encode(x, torch.tensor([[8]]), [1, 8], 0) is NotImplemented


def test_threads_of_torch_are_left_alone():
    before = torch.get_num_threads()
    n = blocks.THREADED
    torch.ops.fn.sign_encode(torch.ones(1, n), torch.tensor([[n]]), [1, n], 0)
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("n", [3, 8, 29])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_momentum_below_the_normal_numbers_comes_to_rest_at_zero(n, frozen):
    """Rounding alone would keep it at 5.6e-45 for ever, where some processors take many times as long."""
    tiny = torch.finfo(torch.float32).tiny
    start = torch.tensor([4 * 1.4e-45, -1e-39, tiny * 1.2, -tiny * 1.2, tiny, 1e-3, -2.0, float("nan")])
    mu, nu = start.repeat(4)[:n].clone(), torch.full((n,), 1e-4)
    lists = [torch.zeros(n)], [torch.zeros(n)], [mu], [nu]
    steps.adamw_(*lists, 0.9, 0.99, 1e-8, 0.0, 1e-3, math.inf, frozen)
    decayed = 0.9 * start.repeat(4)[:n]
    expected = torch.where(decayed.abs() < tiny, 0.0, decayed)
    torch.testing.assert_close(mu, expected, rtol=1e-6, atol=0, equal_nan=True)
    new, old = [torch.zeros(n) for _ in range(3 - frozen)], [torch.zeros(n), start.repeat(4)[:n].clone(), nu]
    steps.adamw_into_(new, [torch.zeros(n)], old, 0.9, 0.99, 1e-8, 0.0, 1e-3, math.inf, frozen)
    torch.testing.assert_close(new[1], expected, rtol=1e-6, atol=0, equal_nan=True)


LOOP = """
import numpy as np
from fn.kernels import rules
from fn.kernels.cpu.loops import compiled

@compiled()
def step(p, u, decay, lr):
    return rules.descended(p, u, decay, lr)

print(step(*map(np.float32, (1, 2, 0, 0.5))))
"""


@pytest.mark.reliability
def test_a_rule_that_changes_is_compiled_again(tmp_path):
    """Numba's cache looks at the file of a loop, and the rules are in another."""
    shutil.copytree(Path(fn.__file__).parent, tmp_path / "fn", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "loop.py").write_text(LOOP)

    def step() -> float:
        env = {**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
        code = [sys.executable, "-c", "import loop"]
        run = subprocess.run(code, env=env, cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == 0, run.stderr
        return float(run.stdout)

    file = tmp_path / "fn" / "kernels" / "rules.py"
    assert step() == 0.0
    assert [*(tmp_path / "cache").rglob("loop.step*.nbi")]
    text = file.read_text()
    assert text.count("return p - lr * decayed") == 1
    file.write_text(text.replace("return p - lr * decayed", "return p + lr * decayed"))
    assert step() == 2.0


def test_all_loops_are_compiled_so():
    sources = {path.name: path.read_text() for path in Path(blocks.__file__).parent.glob("*.py")}
    assert [name for name, text in sources.items() if "njit" in text] == ["loops.py"]
    assert sources["loops.py"].count("njit(") == 1


def test_a_frozen_step_from_the_momentum_that_is_there_is_that_from_a_copy_of_it():
    generator = torch.Generator().manual_seed(0)
    p, m, v = ([torch.randn(n, generator=generator) for n in (5, 1000)] for _ in range(3))
    v = [x.abs() for x in v]
    v[1][::7] = 0.0
    taken = []
    for aliased in (True, False):
        params, mu, nu = ([x.clone() for x in each] for each in (p, m, v))
        grads = mu if aliased else [x.clone() for x in mu]
        steps.adamw_(params, grads, mu, nu, 0.0, 0.0, 1e-8, 0.01, 1e-3, math.inf, True)
        taken.append([*params, *mu, *nu])
    assert all(map(torch.equal, *taken))
    assert not taken[0][3][::7].any()
