"""Correctness in depth on a GPU: large and awkward vectors, every optimizer and phase; the checks of tests/gpu.

`benchmarks/gpu.py overlap` has what needs two ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import kernel_checks
import step_checks
from gpu_device import PLACES
from gpu_rows import Check, Checks, Options, Row, outcome, skipped

from fn.kernels.reference import REFERENCES

SMALL = 4096 * 3 + 5
QUICK_OPS = ("pack_bits", "sign_encode_feedback", "quantize_feedback", "adamw_")
QUICK_CASES = ("adamw", "onebit_adam")
HUGE = {
    "signs": kernel_checks.huge_signs,
    "integers in 8 bits": kernel_checks.huge_integers,
    "integers in 4 bits": partial(kernel_checks.huge_integers, width=4),
    "AdamW": kernel_checks.huge_adamw,
}


def checks(options: Options) -> Checks:
    """Return the checks by name."""
    ops = QUICK_OPS if options.quick else tuple(REFERENCES)
    found: dict[str, Check] = {}
    for what, name in step_checks.pairs():
        if "compiled" not in what and (not options.quick or name in QUICK_CASES):
            found[f"{what}: {name}"] = partial(of_step, options, what, name)
    for op in ops:
        found[f"{op}: NaN, misaligned, strided"] = partial(awkward, options, op)
    for name in HUGE:
        found[f"above 2**31: {name}"] = partial(huge, options, name)
    for name in QUICK_CASES[:1] if options.quick else step_checks.CASES:
        found[f"compiled equals eager: {name}"] = partial(of_step, options, "compiled equals eager", name)
    for op in ops:
        found[f"{op}: large"] = partial(large, options, op)
    return found


def of_step(options: Options, what: str, name: str) -> Iterator[Row]:
    """Run a check of `tests/gpu/step_checks.py`."""
    more = {"backend": "aot_eager"} if options.quick and "compiled" in what else {}
    yield outcome(f"{what}: {name}", step_checks.CHECKS[what](name, options.torch_device, **more))


def awkward(options: Options, op: str) -> Iterator[Row]:
    """Compare a kernel with the reference wherever its arguments lie, with NaN and Inf among them, and without."""
    compare = partial(kernel_checks.against_the_reference, op, options.torch_device, SMALL)
    faults = [compare(place, special) for place in PLACES for special in (False, True)]
    yield outcome(f"{op}: NaN, misaligned, strided", "; ".join(filter(None, faults)) or None)


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
