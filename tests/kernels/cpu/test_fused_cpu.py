"""The fused CPU cells against the reference: not close, equal; but for sums, which make scales to their last bit."""

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
from fn.kernels import foreach, known_answers, layout, reference
from fn.kernels.cpu import blocks

numba = pytest.importorskip("numba", reason="the extra `cpu` is not installed")
from fn.kernels.cpu import ints, steps  # noqa: E402
from fn.kernels.cpu import signs as fused  # noqa: E402

RUNS = [
    [1, 8], [1, 1], [1, 7], [1, 9], [1, 4096], [1, 4097], [1, 12296], [3, 8, 1, 40, 2, 4104, 1, 13], [5, 64, 1, 24],
    [1, 0], [0, 8], [1, 8, 1, 0, 1, 8],
]  # fmt: skip

SPECIAL = [0.0, -0.0, 1e-45, 1e-39, 3e38, float("inf"), -float("inf"), float("nan")]


def same(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def same_codes(found, expected):
    """Compare results that end with sums of squares: scales are their roots, to one unit in the last place."""
    *found, sums = found
    *expected, expected_sums = expected
    same(found, expected)
    scales, expected_scales = sums.sqrt().float(), expected_sums.sqrt().float()
    torch.testing.assert_close(scales, expected_scales, rtol=2**-23, atol=0, equal_nan=True)


def inputs(runs, rows, seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    n, segments = layout.row_length(runs), sum(runs[::2])
    widths = torch.tensor([w for c, w in zip(runs[::2], runs[1::2], strict=True) for _ in range(c)], dtype=torch.int64)
    valid = (torch.rand((rows, segments), generator=g) * 1.5).clamp(max=1).mul(widths).long()
    scale = 10.0 ** torch.randint(-20, 8, (rows, 1), generator=g)
    x = (torch.randn((rows, n), generator=g) * scale).to(dtype)
    return x, valid, segments, g


@pytest.mark.parametrize("runs", RUNS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sign_cells_equal_the_reference(runs, dtype):
    for seed in range(3):
        x, valid, segments, g = inputs(runs, 3, seed, dtype)
        buffer, sent = torch.randn(x.shape, generator=g), torch.rand((3, segments), generator=g)
        same_codes(fused.sign_encode(x, valid, runs), reference.codes.sign_encode(x, valid, runs))
        args = (x, buffer, sent, valid, runs)
        same_codes(fused.sign_encode_feedback(*args), reference.codes.sign_encode_feedback(*args))
        same([fused.sign_residual(*args[1:])], [reference.codes.sign_residual(*args[1:])])


@pytest.mark.parametrize("runs", RUNS, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_sign_messages_equal_the_reference(runs, ranks):
    x, valid, segments, g = inputs(runs, 2, 0)
    bits = torch.randint(0, 256, (2, ranks, layout.bytes_for(x.shape[1])), dtype=torch.uint8, generator=g)
    scales = torch.rand((2, ranks, segments), generator=g)
    sent = torch.rand((2, segments), generator=g)
    args = (bits[:, 0], scales[:, 0], valid, runs)
    same([fused.sign_decode(*args)], [reference.codes.sign_decode(*args)])
    args = (bits, scales, valid, runs)
    same([fused.sign_decode_mean(*args)], [reference.codes.sign_decode_mean(*args)])
    args = (bits, scales, x, sent, valid, runs)
    same_codes(fused.sign_serve(*args), reference.codes.sign_serve(*args))


@pytest.mark.parametrize("runs", RUNS, ids=str)
@pytest.mark.parametrize("width", [4, 8])
def test_integer_cells_equal_the_reference(runs, width):
    n = layout.row_length(runs)
    if width == 4 and any(w % 2 for w in runs[1::2]):
        assert ints.quantize(torch.zeros(1, n), torch.zeros(1, sum(runs[::2])).long(), runs, 4) is NotImplemented
        return
    for seed in range(3):
        x, valid, segments, g = inputs(runs, 3, seed)
        same(ints.quantize(x, valid, runs, width), reference.codes.quantize(x, valid, runs, width))
        error = torch.randint(-128, 128, x.shape, generator=g, dtype=torch.int8)
        scales = torch.rand((3, segments), generator=g) * (x.abs().max(1, keepdim=True).values if n else 1) / 100
        args = (x, error, scales, 0.8, valid, runs, width)
        same(ints.quantize_feedback(*args), reference.codes.quantize_feedback(*args))
        for half in (torch.bfloat16, torch.float16):  # rounded on the way, where the fused kernel is not
            args = (x.to(half), *args[1:])
            assert ints.quantize_feedback(*args) is NotImplemented
            same(foreach.quantize_feedback(*args), reference.codes.quantize_feedback(*args))
        codes = torch.randint(-128, 128, (3, 2, n * width // 8), generator=g, dtype=torch.int8)
        codes = codes.view(torch.uint8) if width == 4 else codes
        args = (codes, torch.rand((3, 2, segments), generator=g), valid, runs, width)
        same([ints.dequantize_mean(*args)], [reference.codes.dequantize_mean(*args)])
        args = (codes[:, 1], args[1][:, 1], *args[2:])
        same([ints.dequantize(*args)], [reference.codes.dequantize(*args)])


@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("width", [4, 8])
def test_special_values_in_integers(value, width):
    x = torch.randn(2, 40)
    x[0, [0, 9, 33, 38]] = value
    x[1] = value
    valid, runs = torch.tensor([[8, 31], [8, 32]]), [1, 8, 1, 32]
    same(ints.quantize(x, valid, runs, width), reference.codes.quantize(x, valid, runs, width))
    args = (x, torch.ones(2, 40, dtype=torch.int8), torch.ones(2, 2), 0.5, valid, runs, width)
    same(ints.quantize_feedback(*args), reference.codes.quantize_feedback(*args))


@pytest.mark.parametrize("runs", RUNS, ids=str)
@pytest.mark.parametrize("mantissa", [2, 3])
def test_cells_of_8_bit_floats_equal_the_reference(runs, mantissa):
    for seed in range(3):
        x, valid, segments, g = inputs(runs, 3, seed)
        x = x * 10.0 ** torch.randint(-8, 1, x.shape, generator=g)
        for given in (x, x.bfloat16(), x.half()):
            args = (given, valid, runs, mantissa)
            same(ints.quantize_fp8(*args), reference.codes.quantize_fp8(*args))
        assert ints.quantize_fp8(x.double(), valid, runs, mantissa) is NotImplemented
        bytes_ = torch.randint(0, 256, (3, 2, x.shape[1]), generator=g).to(torch.uint8)
        args = (known_answers.finite_fp8(bytes_), torch.rand((3, 2, segments), generator=g), valid, runs, mantissa)
        same([ints.dequantize_fp8(*args)], [reference.codes.dequantize_fp8(*args)])


@pytest.mark.parametrize("value", SPECIAL)
@pytest.mark.parametrize("mantissa", [2, 3])
def test_special_values_in_8_bit_floats(value, mantissa):
    x = torch.randn(2, 40)
    x[0, [0, 9, 33, 38]] = value
    x[1] = value
    valid, runs = torch.tensor([[8, 31], [8, 32]]), [1, 8, 1, 32]
    codes, scales = reference.codes.quantize_fp8(x, valid, runs, mantissa)
    same(ints.quantize_fp8(x, valid, runs, mantissa), (codes, scales))
    args = (codes[:, None], scales[:, None], valid, runs, mantissa)
    same([ints.dequantize_fp8(*args)], [reference.codes.dequantize_fp8(*args)])


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


@pytest.mark.parametrize("value", SPECIAL)
def test_special_values(value):
    x = torch.randn(1, 40)
    x[0, [0, 9, 33, 39]] = value
    valid, runs = torch.tensor([[39]]), [1, 40]
    buffer, sent = x.flip(1).contiguous(), torch.tensor([[0.5]])
    args = (x, buffer, sent, valid, runs)
    same_codes(fused.sign_encode_feedback(*args), reference.codes.sign_encode_feedback(*args))


def test_several_threads_give_the_same_result(monkeypatch):
    monkeypatch.setattr(blocks, "THREADED", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    x, valid, _, g = inputs([3, 4104, 1, 20000], 2, 0)
    buffer, sent = torch.randn(x.shape, generator=g), torch.rand((2, 4), generator=g)
    args = (x, buffer, sent, valid, [3, 4104, 1, 20000])
    same_codes(fused.sign_encode_feedback(*args), reference.codes.sign_encode_feedback(*args))


def test_past_the_cache_gives_the_same_result(monkeypatch):
    monkeypatch.setattr(blocks, "LARGER_THAN_CACHE", 1)
    for runs in ([3, 4104, 1, 20000], [1, 13]):
        x, valid, segments, g = inputs(runs, 3, 1)
        args = (x, torch.randn(x.shape, generator=g), torch.rand((3, segments), generator=g), valid, runs)
        same_codes(fused.sign_encode_feedback(*args), reference.codes.sign_encode_feedback(*args))
        same([fused.sign_residual(*args[1:])], [reference.codes.sign_residual(*args[1:])])


def test_float64_is_left_to_the_reference():
    x = torch.randn(1, 8, dtype=torch.float64)
    assert fused.sign_encode(x, torch.tensor([[8]]), [1, 8]) is NotImplemented


def test_threads_of_torch_are_left_alone():
    before = torch.get_num_threads()
    n = blocks.THREADED
    torch.ops.fn.sign_encode(torch.ones(1, n), torch.tensor([[n]]), [1, n])
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
