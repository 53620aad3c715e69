"""Compile the kernels of the Triton row ahead of time, for devices that are not here."""

from __future__ import annotations

import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from fn.kernels.gpu.triton import blocks, ints, lamb, lists, rules, signs, steps

POINTERS = {
    "table": "*i64", "valid": "*i64", "firsts": "*i64", "addresses": "*i64", "ends": "*i64", "bits": "*u8",
    "received": "*u8", "codes": "*u8", "seen": "*u8", "kept": "*i8", "error": "*i8", "squares": "*fp64",
    "sums": "*fp64", "parts": "*fp64",
    "x": "*fp32", "buffer": "*fp32", "sent": "*fp32", "out": "*fp32", "scales": "*fp32", "b": "*fp32",
    "error_scales": "*fp32", "kept_scales": "*fp32", "peaks": "*fp32", "rates": "*fp32", "scaling": "*fp32",
    "factors": "*fp32",
}  # fmt: skip
NUMBERS = ("n", "blocks", "segments", "per_row", "width", "ranks", "total", "rows", "down", "right")
CONSTANTS = {
    "BLOCK": 4096, "COUNT": 1, "FEEDBACK": True, "ALIGNED": True, "WIDTH": 8, "PEAKS": True, "KEEP_ZEROS": True,
    "FROZEN": False, "COPIES": True, "GROUP": 0,
    "RULE": rules.RULES["lion"], "RESULTS": (tl.float32, tl.float32), "OPERANDS": (tl.float32, tl.float32),
    "KINDS": ("number", "one"), "BARRIER": False, "P": tl.float32, "G": tl.float32, "C": tl.bfloat16, "A": tl.float32,
}  # fmt: skip
MODULES = (signs, ints, steps, lamb, lists, blocks)
KERNELS = {
    name.removesuffix("_kernel"): f
    for module in MODULES
    for name, f in vars(module).items()
    if getattr(f, "do_not_specialize", None) and f.__module__ == module.__name__
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in KERNELS},
    "small blocks": ("quantize", {"BLOCK": 64, "COUNT": 32}),
    "pairs of codes": ("quantize_feedback", {"BLOCK": 256, "COUNT": 8, "WIDTH": 4}),
    "means of pairs": ("dequantize", {"WIDTH": 4}),
    "e4m3": ("quantize", {"WIDTH": 43, "BLOCK": 256, "COUNT": 8}),
    "e5m2": ("quantize", {"WIDTH": 52}),
    "means of e4m3": ("dequantize", {"WIDTH": 43, "BLOCK": 256, "COUNT": 8}),
    "means of e5m2": ("dequantize", {"WIDTH": 52}),
    "signs of averages": ("encode_averages", {"G": tl.bfloat16}),
    **{f"{name}, groups": (name, {"GROUP": 64}) for name in KERNELS if "GROUP" in KERNELS[name].arg_names},
    "half precision": ("adamw", {"P": tl.bfloat16, "G": tl.float16, "FROZEN": True}),
    "anywhere": ("adamw", {"ALIGNED": False}),
    "a rule of half precision, in place": (
        "elementwise",
        {
            "RULE": rules.RULES["descended"],
            "RESULTS": (tl.bfloat16,),
            "OPERANDS": (tl.bfloat16, tl.float32),
            "KINDS": ("each", "number"),
            "BARRIER": True,
        },
    ),
}
"""What is compiled: a kernel, and constants that are not the usual ones."""

TARGETS = {"sm_80": ("cuda", 80, 32), "sm_90": ("cuda", 90, 32), "gfx942": ("hip", "gfx942", 64)}


class Memory(NamedTuple):
    """What a kernel of CUDA needs: registers of a thread, bytes of its stack, and of local memory."""

    registers: int
    stack: int
    local: int


@cache
def compile_ahead(case: str, target: str) -> Any:
    """Compile a case for a target."""
    name, changed = CASES[case]
    kernel = KERNELS[name]
    constants = {k: v for k, v in {**CONSTANTS, **changed}.items() if k in kernel.arg_names}
    kinds = dict.fromkeys(NUMBERS, "i32") | POINTERS | dict.fromkeys(constants, "constexpr")
    signature = {a: kinds.get(a, "fp32") for a in kernel.arg_names}
    if "numbers" in signature:
        signature["numbers"] = tuple("fp32" if kind == "number" else "*fp32" for kind in constants["KINDS"])
    pointers = [i for i, name in enumerate(signature) if name in POINTERS and name not in kernel.do_not_specialize]
    attrs = {(i,): [["tt.divisibility", 16]] for i in pointers}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    options = blocks.options_of(kernel, constants, bounded=target.startswith("sm_"))
    return triton.compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def memory_of(cubin: bytes) -> Memory:
    """Return what a compiled kernel of CUDA needs, as NVIDIA's own tool says."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        found = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    parts = dict(part.split(":") for part in found.split() if part.count(":") == 1 and part.split(":")[1])
    return Memory(int(parts["REG"]), int(parts["STACK"]), int(parts["LOCAL"]))
