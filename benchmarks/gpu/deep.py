"""Kernels in depth on a GPU: vectors that are large, hold NaN or lie strided; compiled steps; what a sanitizer says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import kernel_checks
import step_checks
from gpu_device import PLACES

from benchmarks.gpu.alike import of_step
from benchmarks.gpu.rows import Check, Checks, Options, Row, outcome, skipped
from fn.kernels.reference import REFERENCES

SMALL = 4096 * 3 + 5
QUICK_OPS = ("pack_bits", "sign_encode_feedback", "quantize_feedback", "adamw_")
QUICK_CASES = ("adamw",)
SANITIZED = """
import torch, fn
from fn.kernels.gpu import triton
report = fn.testing.conformance(triton.row("cuda"), sizes=(9, 4099))
assert report, report
"""
HUGE = {
    "signs": kernel_checks.huge_signs,
    "signs in blocks of 64": partial(kernel_checks.huge_signs, block=64),
    "integers in 8 bits": kernel_checks.huge_integers,
    "integers in 4 bits": partial(kernel_checks.huge_integers, width=4),
    "AdamW": kernel_checks.huge_adamw,
}


def checks(options: Options) -> Checks:
    """Return the checks by name."""
    ops = QUICK_OPS if options.quick else tuple(REFERENCES)
    found: dict[str, Check] = {}
    for name in HUGE:
        found[f"above 2**31: {name}"] = partial(huge, options, name)
    for op in ops:
        found[f"{op}: NaN, misaligned, strided"] = partial(awkward, options, op)
    found["compute-sanitizer"] = partial(sanitized, options)
    for name in QUICK_CASES if options.quick else step_checks.CASES:
        found[f"compiled equals eager: {name}"] = partial(of_step, options, "compiled equals eager", name)
    for op in ops:
        found[f"{op}: large"] = partial(large, options, op)
    return found


def awkward(options: Options, op: str) -> Iterator[Row]:
    """Compare a kernel with the reference wherever its arguments lie, with NaN and Inf among them, and without."""
    compare = partial(kernel_checks.against_the_reference, op, options.torch_device, SMALL)
    faults = [compare(place, special) for place in PLACES for special in (False, True)]
    yield outcome(f"{op}: NaN, misaligned, strided", "; ".join(filter(None, faults)) or None)


def sanitized(options: Options) -> Iterator[Row]:
    """Let NVIDIA's sanitizer watch the kernels of Triton while they conform."""
    name, tool = "no kernel reads or writes beside its tensors", shutil.which("compute-sanitizer")
    if options.torch_device.type != "cuda" or tool is None:
        yield skipped(name, "compute-sanitizer is not installed" if tool is None else f"this is {options.device}")
        return
    command = [tool, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, "-c", SANITIZED]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    yield outcome(name, None if ended.returncode == 0 else (ended.stdout + ended.stderr)[-2000:])


def large(options: Options, op: str) -> Iterator[Row]:
    """Compare a kernel with the reference on the device, at 2**26 + 3 elements in each of two rows."""
    n = SMALL if options.quick else kernel_checks.LARGE
    fault = kernel_checks.against_the_reference(op, options.torch_device, n, on_device=True)
    yield outcome(f"{op}: {n} elements", fault)


def huge(options: Options, name: str) -> Iterator[Row]:
    """Compare a kernel with the reference piece by piece, above 2**31 elements."""
    n = SMALL if options.quick else kernel_checks.HUGE
    title = f"{name}: {n} elements"
    if reason := kernel_checks.huge_needs(options.torch_device, n):
        yield skipped(title, reason)
    else:
        yield outcome(title, HUGE[name](options.torch_device, n))
