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

from fn.kernels.gpu.triton import launches  # noqa: E402

ROOT = Path(__file__).parents[3]

CONFORMS = """
import fn
from fn.kernels.gpu import triton
report = fn.testing.conformance(triton.row("cpu"), ops=({ops}), sizes=(1023,))
assert report, report
"""


def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


interpreted = pytest.mark.skipif(
    version(triton.__version__) < (3, 7) and version(np.__version__) >= (2, 4),
    reason="Triton 3.6's interpreter makes numbers of arrays with one element, which NumPy 2.4 refuses",
)


@pytest.mark.reliability
@interpreted
@pytest.mark.parametrize("ops", ["'sign_encode', 'sign_encode_feedback', 'sign_encode_feedback_', 'sign_residual', "
                                 "'sign_residual_', 'sign_serve'",
                                 "'pack_bits', 'unpack_bits', 'sign_decode_mean', "
                                 "'quantize', 'quantize_feedback', 'dequantize_mean', "
                                 "'quantize_fp8', 'dequantize_fp8'"])  # fmt: skip
def test_the_row_conforms_in_the_interpreter(ops):
    """What is shorter, `test_triton_lists` asks: all known answers."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    code = [sys.executable, "-W", "ignore::RuntimeWarning", "-c", CONFORMS.format(ops=ops)]
    found = subprocess.run(code, env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


compiled = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not compiled")


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("target", ["gfx942", pytest.param("sm_80", marks=pytest.mark.reliability)])
@pytest.mark.parametrize("case", ahead.CASES)
def test_the_kernels_compile_ahead_of_time(case, target):
    """For sm_90 the tests below compile them."""
    assert ahead.compile_ahead(case, target).asm["hsaco" if target.startswith("gfx") else "cubin"]


@compiled
@pytest.mark.slow
@pytest.mark.parametrize("case", ahead.CASES)
def test_nothing_is_spilled(case):
    found = ahead.compile_ahead(case, "sm_90").asm
    needs = ahead.memory_of(found["cubin"])
    assert ".local" not in found["ptx"]
    # Within 64 registers Triton 3.9 has no room for one pair of addresses where copies of params are written, too.
    assert needs.local == 0
    assert needs.stack <= (8 if case == "onebit" else 0)
    assert needs.registers <= 64, "of 512 threads: two programs would not fit on a processor"


@compiled
@pytest.mark.parametrize("case", ["encode", "residual", "encode_averages", "onebit", "adamw", "adamw_into",
                                  "drift", "momentum_rows", "elementwise", "encode, groups", "residual, groups",
                                  "encode_averages, groups", "onebit, groups"])  # fmt: skip
def test_whole_blocks_are_read_in_vectors(case):
    """Each list is read once by fours, in whole blocks, and once one by one, at ends; all else is a few scales."""
    words = ahead.compile_ahead(case, "sm_90").asm["ptx"].split()
    fours, ones = words.count("ld.global.v4.b32"), words.count("ld.global.b32")
    assert fours
    assert 4 * fours <= ones <= 4 * fours + 6
    assert "st.global.v4.b32" in words


@compiled
@pytest.mark.parametrize("case", ["magnitude", "squares", "onebit_lamb_moments"])
def test_norms_of_a_tensor_do_not_depend_on_where_it_lies(case):
    """Ranks would otherwise step by other last digits, and scales of codes would compile one more kernel at a freeze.

    With vectors a thread adds up four elements in a row; without, those that are 512 apart.
    """
    assert "ALIGNED" not in ahead.KERNELS[case].arg_names
    found = ahead.compile_ahead(case, "sm_90").asm
    assert not re.search(r"(ld|st)\.global\.v", found["ptx"])
    assert {*re.findall(r"sizePerThread = \[(\d+)\]", found["ttgir"])} == {"1"}


@compiled
def test_nobody_writes_moments_before_all_have_read_where_a_list_is_of_half_precision():
    for case, barriers in (("adamw", 0), ("half precision", 2)):  # one for whole blocks, one for ends
        lines = ahead.compile_ahead(case, "sm_90").asm["ttir"].splitlines()
        kinds = [kind for line in lines for kind in ("tt.load", "tt.store", "barrier") if f"{kind} " in f"{line} "]
        assert kinds.count("barrier") == barriers
        assert all(kinds[i - 1] == "tt.load" for i, kind in enumerate(kinds) if kind == "barrier")


@pytest.mark.parametrize("name", launches.LAUNCHES)
def test_the_table_of_launches_names_kernels_and_powers_of_two(name):
    launch = launches.LAUNCHES[name]
    assert name.removesuffix("_kernel") in ahead.KERNELS
    assert launch.block.bit_count() == launch.per_warp.bit_count() == 1
    assert launch.per_warp <= launch.block


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
@pytest.mark.parametrize("case", ahead.CASES)
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

    assert fn.testing.conformance(triton.row("cuda"))
