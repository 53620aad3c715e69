"""The conformance kit: whether a row computes what the reference computes.

In a test suite the plugin `fn.testing.pytest_plugin` makes a test of every kernel of a row:

    pytest -p fn.testing.pytest_plugin --fn-row my_package.kernels:row
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn.arguments import checked
from fn.kernels import known_answers
from fn.kernels.layout import bytes_for, count_scales
from fn.kernels.reference import REFERENCES
from fn.kernels.schemas import ARGUMENTS, ON_LISTS
from fn.kernels.table import Accelerator, check_row, register, unregister

SIZES = (0, 1, 7, 8, 9, 1023, 2**20 + 3)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_WIDE = (torch.float32, torch.float64)
_OF_ANY_DTYPE = (
    "pack_bits", "unpack_bits", "sign_encode", "sign_encode_feedback", "quantize", "quantize_feedback", "quantize_fp8",
)  # fmt: skip
"""Kernels that take vectors in any dtype. Kernels on lists take params and gradients in any dtype; all else is float32,
or float64, whatever the dtype of a model."""

_SPECIAL = (0.0, -0.0, 1e-45, -1e-40, float("inf"), -float("inf"), float("nan"))


class Report(NamedTuple):
    """The outcome: the device type, how many checks of how many kernels, and what differed."""

    device_type: str
    checks: int
    kernels: int
    faults: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.faults

    def __repr__(self) -> str:
        word = "conforming" if self else "NOT conforming"
        return "\n".join([f"{word}: {self.device_type}, {self.checks} checks of {self.kernels} kernels", *self.faults])


@checked("ops", "sizes")
def conformance(row: Accelerator, *, ops: Sequence[str] | None = None, sizes: Sequence[int] = SIZES) -> Report:
    """Compare every kernel of a row with the reference, and the ops around it with torch's rules for ops.

    >>> import fn
    >>> row = fn.kernels.Accelerator("cpu", {"pack_bits": fn.kernels.reference.codes.pack_bits})
    >>> fn.testing.conformance(row, sizes=(0, 9))
    conforming: cpu, 21 checks of 1 kernels

    Args:
        row: the row; it need not be registered, and its device must be here.
        ops: kernels to look at. None: all that the row brings.
        sizes: lengths of rows.
    Returns: a report, true if nothing differed. Integers must be equal, floats to 1e-5 (float64: 1e-12).
    Raises: TypeError or ValueError if row is not a row of this table.
    """
    check_row(row)
    device = torch.device(row.device_type)
    names = [op for op in REFERENCES if op in row.kernels and (ops is None or op in ops)]
    outcomes = [(op, run_checks(_kernel_checks(op, row.kernels[op], device, sizes))) for op in names]
    register(row)  # once for all ops, for a table that changes asks for all known answers
    try:
        outcomes += [(op, run_checks(_op_checks(op, device))) for op in names]
    finally:
        unregister(row)
    faults = tuple(f"  {op}, {fault}" for op, (_, faults) in outcomes for fault in faults)
    return Report(row.device_type, sum(count for _, (count, _) in outcomes), len(names), faults)


Check = tuple[str, Callable[[], str | None]]
"""A check: its name, and a function that returns the fault that it finds, or None."""


def run_checks(checks: Iterable[Check]) -> tuple[int, list[str]]:
    """Run checks; return how many there were, and what was wrong, exceptions included."""
    faults, count = [], 0
    for what, run in checks:
        count += 1
        try:
            fault = run()
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        if fault is not None:
            faults.append(f"{what}: {fault}")
    return count, faults


def _kernel_checks(
    op: str, kernel: Callable[..., Any], device: torch.device, sizes: Sequence[int]
) -> Iterator[Check]:
    """Yield what is looked at in a kernel by itself."""
    yield "known answer", lambda: known_answers.complaint(op, kernel, device)
    widths, dtypes = widths_of(op), DTYPES if op in _OF_ANY_DTYPE + ON_LISTS else _WIDE
    for n, dtype, strided, width in itertools.product(sizes, dtypes, (False, True), widths):
        # The longest rows show sizes of grids, to which gaps add nothing but time.
        if not (strided and n >= 2**20):
            case = partial(arguments, op, n, dtype, width=width, strided=strided)
            what = f"n={n} {dtype} width={width}{' strided' * strided}"
            yield what, partial(_compare, op, kernel, case, device)
    for width in widths:
        case = partial(arguments, op, 1023, torch.float32, width=width, special=True)
        yield f"special values width={width}", partial(_compare, op, kernel, case, device)


def _op_checks(op: str, device: torch.device) -> Iterator[Check]:
    """Yield what is looked at in an op while the table has the row."""
    yield "opcheck", lambda: _opcheck(op, device)
    if op not in ON_LISTS and not op.endswith("_"):
        yield "vmap", lambda: _vmap(op, device)
    yield "fullgraph", lambda: _fullgraph(op, device)


def _compare(op: str, kernel: Callable[..., Any], case: Callable[[], Any], device: torch.device) -> str | None:
    args = case()
    actual = known_answers.outcome(op, kernel, args, device)
    if actual is NotImplemented:  # the table asks the next row
        return None
    given = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
    wide = any(t.dtype == torch.float64 for t in given)
    expected = known_answers.outcome(op, REFERENCES[op], args, torch.device("cpu"))
    return known_answers.difference(actual, expected, 1e-12 if wide else 1e-5, sums=known_answers.of_sums(op))


def widths_of(op: str) -> tuple[int, ...]:
    """Return how many bits its codes may take."""
    return (4, 8) if "width" in ARGUMENTS[op] else (8,)


def _op(op: str) -> Any:
    return getattr(torch.ops.fn, op)


def small_arguments(op: str) -> list[tuple[Any, ...]]:
    """Return arguments on the CPU that show how an op is called: each width, each option, and more than one of all.

    What kernels make of longer ones is looked at without the op.
    """
    examples = [
        arguments(op, 16, torch.float32, width=width, strided=strided, runs=(2, 8))
        for width in widths_of(op)
        for strided in (False, True)
    ]
    return [tuple(a.contiguous() if isinstance(a, Tensor) else a for a in args) for args in examples]


def _opcheck(op: str, device: torch.device) -> str | None:
    """Check what depends on the row; that an op can be traced with dynamic shapes is the same for all of them."""
    parts = ("test_schema", "test_autograd_registration", "test_faketensor")
    for args in small_arguments(op):
        torch.library.opcheck(_op(op).default, tuple(known_answers.on_device(device, args)), test_utils=parts)
    return None


def _vmap(op: str, device: torch.device) -> str | None:
    args = known_answers.on_device(device, small_arguments(op)[0])
    dims = tuple(0 if isinstance(a, Tensor) else None for a in args)
    # (R, ...) -> (2, R, ...)
    pair = [torch.stack([a, a.flip(0)]) if isinstance(a, Tensor) else a for a in args]
    batched = known_answers.as_tuple(torch.func.vmap(_op(op), in_dims=dims)(*pair))
    flipped = [a.flip(0) if isinstance(a, Tensor) else a for a in args]
    for i, expected in enumerate((_op(op)(*args), _op(op)(*flipped))):
        expected = [e.cpu() for e in known_answers.as_tuple(expected)]
        reason = known_answers.difference([result[i] for result in batched], expected)
        if reason is not None:
            return reason
    return None


def _fullgraph(op: str, device: torch.device) -> str | None:
    args = known_answers.on_device(device, small_arguments(op)[0])
    # All checks compile this one lambda: without a reset dynamo gives up at the ninth.
    torch._dynamo.reset()
    # "aot_eager" traces as Inductor does, and compiles nothing
    compiled = torch.compile(lambda *a: _op(op)(*a), fullgraph=True, backend="aot_eager")
    expected = tuple(e.cpu() for e in known_answers.as_tuple(known_answers.outcome(op, _op(op), args, device)))
    return known_answers.difference(known_answers.outcome(op, compiled, args, device), expected)


def arguments(
    op: str,
    n: int,
    dtype: torch.dtype,
    *,
    width: int = 8,
    strided: bool = False,
    special: bool = False,
    runs: Sequence[int] = (),
) -> tuple[Any, ...]:
    """Return arguments for a kernel on the CPU: two rows of n elements, n made even for codes of 4 bits.

    Args: strided: with other options, and with gaps in vectors. special: with zeros, infinities and NaN. runs: of the
        rows; (): runs that n elements fill.
    """
    # Two codes of 4 bits share a byte, so a row has an even number of them.
    n -= n % 2 if width == 4 else 0
    # A generator of its own leaves torch's random state to the suite that runs this.
    g = torch.Generator().manual_seed(n + 1)
    runs = [*runs] or ([1, n] if n < 1000 else [2, 96, 1, 8, 1, n - 200])
    segments = sum(runs[::2])
    block = (24 if n < 1000 else 64) if strided else 0
    per_row = count_scales(runs, block)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    widths = torch.tensor(
        [w for c, w in zip(runs[::2], runs[1::2], strict=True) for _ in range(c)], dtype=torch.int64, device="cpu"
    )
    # (S,) twice -> (2, S): a row without padding and one with
    valid = torch.stack([widths, (widths * 7) // 8])

    def numbers(kind: torch.dtype, *shape: int) -> Tensor:
        # (..., 2) -> (...): every second number, so that elements lie two apart
        x = torch.randn((*shape, 2) if strided else shape, generator=g, dtype=torch.float64, device="cpu")
        x = (x[..., 0] if strided else x).to(kind)
        if special:
            x[..., : len(_SPECIAL)] = torch.tensor(_SPECIAL, dtype=torch.float64, device="cpu").to(kind)
        return x

    def integers(kind: torch.dtype, *shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=g, dtype=torch.int64, device="cpu").to(torch.uint8).view(kind)

    def scales(*shape: int) -> Tensor:
        return torch.rand(shape, generator=g, dtype=torch.float64, device="cpu").to(wide)

    def tensors(**kind: float) -> list[Tensor]:
        return [numbers(wide, int(k)).clamp(**kind) if kind else numbers(wide, int(k)) for k in valid.sum(0)]

    def leaves() -> list[Tensor]:
        """Return what has the dtype of a model."""
        return [x.to(dtype) for x in tensors()]

    segmented = valid, runs
    signs = valid, runs, block
    of_tensors = valid, [x for width in widths.tolist() for x in (1, width)], block  # every segment is one tensor's
    limit = 0.5 if strided else math.inf
    descent = (1e-6, 0.01, 1e-2, limit / 2)
    frozen = strided  # kernels get copies of the lists, without gaps: so their other options stand for strides
    coded = integers(torch.uint8, 2, 3, n // 2) if width == 4 else integers(torch.int8, 2, 3, n)
    cases: dict[str, Callable[[], tuple[Any, ...]]] = {
        "pack_bits": lambda: (numbers(dtype, 2, n),),
        "unpack_bits": lambda: (integers(torch.uint8, 2, bytes_for(n)), n, dtype),
        "sign_encode": lambda: (numbers(dtype, 2, n), *signs),
        "sign_encode_feedback": lambda: (numbers(dtype, 2, n), numbers(wide, 2, n), scales(2, per_row), *signs),
        "sign_encode_feedback_": lambda: (numbers(wide, 2, n), numbers(wide, 2, n), scales(2, per_row), *signs),
        "sign_residual": lambda: (numbers(wide, 2, n), scales(2, per_row), *signs),
        "sign_residual_": lambda: (numbers(wide, 2, n), scales(2, per_row), *signs),
        "sign_serve": lambda: (
            integers(torch.uint8, 2, 3, bytes_for(n)), scales(2, 3, per_row), numbers(wide, 2, n),
            scales(2, per_row), *signs,
        ),
        "sign_decode_mean": lambda: (integers(torch.uint8, 2, 3, bytes_for(n)), scales(2, 3, per_row), *signs),
        "quantize": lambda: (numbers(dtype, 2, n), *segmented, width),
        "quantize_feedback": lambda: (
            numbers(dtype, 2, n), integers(torch.int8, 2, n), scales(2, segments) / 99, 0.75, *segmented, width,
        ),
        "quantize_fp8": lambda: (numbers(dtype, 2, n), *segmented, 2 if strided else 3),
        "dequantize_fp8": lambda: (
            known_answers.finite_fp8(integers(torch.uint8, 2, 3, n)), scales(2, 3, segments), *segmented,
            2 if strided else 3,
        ),
        "momentum_encode": lambda: (
            tensors(), leaves(), 0.9, numbers(wide, 2, n).contiguous(), scales(2, per_row), *of_tensors,
        ),
        "momentum_rows": lambda: (
            tensors(), leaves(), 0.9, scales(segments) if strided else None, 2, of_tensors[1],
        ),
        "drift": lambda: (
            leaves(), tensors(), tensors(), leaves(), tensors(min=0.0), 0.9, 1e-6, 1e-2, 2, of_tensors[1],
        ),
        "onebit_adam_": lambda: (
            leaves(), tensors(), tensors(min=0.0), integers(torch.uint8, 2, 1 + 2 * frozen, bytes_for(n)),
            scales(2, 1 + 2 * frozen, per_row), *of_tensors, *descent, True, leaves() if strided else [],
        ),
        "adamw_": lambda: (leaves(), leaves(), tensors(), tensors(min=0.0), 0.9, 0.99, *descent, frozen),
        "onebit_lamb_moments_": lambda: (
            leaves(), tensors(), scales(segments) + 0.1, tensors(), tensors(min=0.0), tensors(min=0.0), 0.9, 0.99,
            1e-6, 0.01, limit,
        ),
        "lamb_step_": lambda: (leaves(), tensors(), tensors(min=0.0), scales(segments), 1e-6, 0.01, limit),
        "adamw_into_": lambda: (
            [numbers(wide, n) for _ in range(3 - frozen)], [numbers(wide, n) for _ in range(2 + strided)],
            [numbers(wide, n), numbers(wide, n), numbers(wide, n).clamp(min=0.0)], 0.9, 0.99, *descent, frozen,
        ),
        "elementwise_": lambda: (
            ("lion", [*leaves(), *tensors()], [*tensors(), *leaves()], [scales(segments)], [1], [0.9, 0.0])
            if strided
            else ("adamw", leaves(), [*leaves(), *tensors(), *tensors(min=0.0)], [], [],
                  [1e-6, 0.01, 1e-2, limit])
        ),
        "sums_of_squares": lambda: (leaves(),),
        "largest_magnitude": lambda: ([-x.abs().sort().values for x in leaves()],),
        "dequantize_mean": lambda: (coded, scales(2, 3, segments), *segmented, width),
    }  # fmt: skip
    return cases[op]()
