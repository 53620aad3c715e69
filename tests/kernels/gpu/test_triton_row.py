"""The Triton row without a GPU: conforming in Triton's interpreter, and compiled ahead of time for three targets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[3]

CONFORMS = """
import fn
from fn.kernels.gpu import triton
report = fn.kernels.conformance(triton.row("cpu"), ops=({ops}), sizes=(0, 7, 1023))
assert report, report
"""

TYPES = {
    "x": "*fp32", "buffer": "*fp32", "sent": "*fp32", "out": "*fp32", "scales": "*fp32", "b": "*fp32",
    "error_scales": "*fp32", "kept_scales": "*fp32", "bits": "*u8", "received": "*u8", "codes": "*u8", "kept": "*i8",
    "error": "*i8", "squares": "*fp64", "table": "*i64", "valid": "*i64",
    "beta": "fp32", "rest": "fp32", "share": "fp32",
}  # fmt: skip
CONSTANTS = {"BLOCK": 4096, "FEEDBACK": True, "WIDTH": 4}
KERNELS = ("encode", "decode", "serve", "residual", "quantize", "quantize_feedback", "dequantize")



def version(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


interpreted = pytest.mark.skipif(
    version(triton.__version__) < (3, 7) and version(np.__version__) >= (2, 4),
    reason="Triton 3.6's interpreter makes numbers of arrays with one element, which NumPy 2.4 refuses",
)


def compile_ahead(name: str, target: tuple[str, int, int]) -> Any:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fn.kernels.gpu import triton_kernels

    kernel = getattr(triton_kernels, name)
    constants = {k: v for k, v in CONSTANTS.items() if k in kernel.arg_names}
    signature = {a: "constexpr" if a in constants else TYPES.get(a, "i32") for a in kernel.arg_names}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    return triton.compile(source, target=GPUTarget(*target), options={"num_warps": 8, "enable_fp_fusion": False})


@pytest.mark.slow
@interpreted
@pytest.mark.parametrize("ops", ["'sign_encode', 'sign_encode_feedback', 'sign_residual', 'sign_serve'",
                                 "'sign_encode_feedback_', 'sign_residual_'",
                                 "'pack_bits', 'unpack_bits', 'sign_decode', 'sign_decode_mean'",
                                 "'quantize', 'quantize_feedback', 'dequantize', 'dequantize_mean'"])  # fmt: skip
def test_the_row_conforms_in_the_interpreter(ops):
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    code = [sys.executable, "-W", "ignore::RuntimeWarning", "-c", CONFORMS.format(ops=ops)]
    found = subprocess.run(code, env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not compiled")
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("target", [("cuda", 80, 32), ("cuda", 90, 32), ("hip", "gfx942", 64)], ids=str)
def test_the_kernels_compile_ahead_of_time(name, target):
    compiled = compile_ahead(name, target)
    assert compiled.asm["cubin" if target[0] == "cuda" else "hsaco"]


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not compiled")
@pytest.mark.parametrize("name", KERNELS)
def test_no_offset_is_multiplied_in_32_bits(name):
    """The messages of all ranks together are more than 2**31 bytes for 2**31 numbers in eight bits."""
    products = [line for line in compile_ahead(name, ("cuda", 90, 32)).asm["ttir"].splitlines() if "arith.muli" in line]
    assert products
    assert not [line for line in products if line.split(" loc(")[0].endswith(": i32")]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU that Triton compiles for")
def test_the_row_conforms_on_the_gpu():
    import fn
    from fn.kernels.gpu import triton

    assert fn.kernels.conformance(triton.row("cuda"))
