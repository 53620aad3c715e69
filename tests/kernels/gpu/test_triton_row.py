"""The Triton row without a GPU: conforming in Triton's interpreter, and compiled ahead of time for three targets.

Steps on lists are in `test_triton_lists`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

import ahead  # noqa: E402  it needs triton

ROOT = Path(__file__).parents[3]

CONFORMS = """
import fn
from fn.kernels.gpu import triton
report = fn.kernels.conformance(triton.row("cpu"), ops=({ops}), sizes=(0, 7, 1023))
assert report, report
"""


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


interpreted = pytest.mark.skipif(
    version(triton.__version__) < (3, 7) and version(np.__version__) >= (2, 4),
    reason="Triton 3.6's interpreter makes numbers of arrays with one element, which NumPy 2.4 refuses",
)


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("ops", ["'sign_encode', 'sign_encode_feedback', 'sign_encode_feedback_', 'sign_residual', "
                                 "'sign_residual_', 'sign_serve'",
                                 "'pack_bits', 'unpack_bits', 'sign_decode', 'sign_decode_mean', "
                                 "'quantize', 'quantize_feedback', 'dequantize', 'dequantize_mean'"])  # fmt: skip
def test_the_row_conforms_in_the_interpreter(ops):
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    code = [sys.executable, "-W", "ignore::RuntimeWarning", "-c", CONFORMS.format(ops=ops)]
    found = subprocess.run(code, env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


compiled = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not compiled")


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("case", ahead.CASES)
def test_the_kernels_compile_ahead_of_time(case):
    for target in ahead.TARGETS:
        found = ahead.compile_ahead(case, target).asm
        assert found["hsaco" if target.startswith("gfx") else "cubin"]


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("case", ahead.CASES)
def test_nothing_is_spilled(case):
    found = ahead.compile_ahead(case, "sm_90").asm
    needs = ahead.memory_of(found["cubin"])
    assert ".local" not in found["ptx"]
    assert (needs.stack, needs.local) == (0, 0)
    assert needs.registers <= 128, "of 512 threads: no program would fit on a processor"


@compiled
@pytest.mark.parametrize("case", ["encode", "residual", "encode_averages", "onebit", "adamw", "adamw_into",
                                  "magnitude", "lamb_moments", "onebit_lamb_moments", "lamb_step", "drift",
                                  "momentum_rows", "elementwise", "squares"])  # fmt: skip
def test_whole_blocks_are_read_in_vectors(case):
    """Each list is read once by fours, in whole blocks, and once one by one, at ends; all else is a few scales."""
    words = ahead.compile_ahead(case, "sm_90").asm["ptx"].split()
    fours, ones = words.count("ld.global.v4.b32"), words.count("ld.global.b32")
    assert fours
    assert 4 * fours <= ones <= 4 * fours + 6
    assert "st.global.v4.b32" in words or case in ("magnitude", "squares")


@pytest.mark.parametrize("name", ahead.KERNELS)
def test_no_kernel_is_compiled_for_a_size(name):
    kernel = ahead.KERNELS[name]
    assert {a for a in kernel.arg_names if a in ahead.NUMBERS} <= {*kernel.do_not_specialize}


@compiled
def test_half_precision_is_rounded_to_nearest():
    words = ahead.compile_ahead("half precision", "sm_90").asm["ptx"].split()
    assert [w for w in words if w.startswith("cvt.rn.bf16")]
    assert not [w for w in words if w.startswith(("cvt.rz.bf16", "div.full", "sqrt.approx"))]


@compiled
@pytest.mark.parametrize("case", ahead.KERNELS)
def test_no_offset_is_multiplied_in_32_bits(case):
    """The messages of all ranks together are more than 2**31 bytes for 2**31 numbers in eight bits."""
    lines = ahead.compile_ahead(case, "sm_90").asm["ttir"].splitlines()
    products = [line for line in lines if "arith.muli" in line]
    assert products
    assert not [line for line in products if line.split(" loc(")[0].endswith(": i32")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that Triton compiles for")
def test_the_row_conforms_on_the_gpu():
    import fn
    from fn.kernels.gpu import triton

    assert fn.kernels.conformance(triton.row("cuda"))
