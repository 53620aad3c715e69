"""Known answers: a kernel of the table is believed when it gives them, never because it could be imported.

There are small fixed inputs for every op. They have two rows, several segments, a segment with padding and ends that
are no multiple of anything; for bits there is a documented vector. The answers are those of the reference, on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fn.kernels.reference import REFERENCES
from fn.kernels.schemas import WRITTEN

RUNS = (2, 64, 1, 4104, 1, 22)
"""Runs of the examples: two short segments, one longer than a block of norms, one that ends within a byte."""

KNOWN_SIGNS = (5.0, 4.0, 3.0, 2.0, 0.0, -1.0, -2.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0, -2.0)
"""torch_npu's documented vector for its sign packing, [159, 15]."""

GUARD = 16
"""Elements behind a tensor that a kernel works on in place, which stay as they are: a vector of the widest kind."""

LONG = (1 << 16) + 3
"""Elements of the largest examples of packing. The references of all other ops pack: if packing were wrong for long
rows only, every other kernel would be blamed."""

_DESCENT = (0.9, 0.99, 3e-2, 0.1, 1e-2, 0.7)
_WIDTHS = (64, 64, 4104, 22)


def examples(op: str) -> list[tuple[Any, ...]]:
    """Return lists of arguments for an op, on the CPU."""
    return _EXAMPLES[op]()


def _wave(*shape: int, seed: float = 1.0) -> Tensor:
    """Return numbers of both signs and many magnitudes, none of them zero; no random state is touched."""
    count = torch.Size(shape).numel()
    x = torch.sin(torch.arange(1.0, count + 1, dtype=torch.float64, device="cpu") * (0.7 + seed)) * 3
    return (x * torch.linspace(0.2, 2.0, count, dtype=torch.float64, device="cpu")).float().view(shape)


def _bytes(*shape: int, seed: int = 1) -> Tensor:
    # 251 is prime: all bytes below it come up before one comes up again.
    count = torch.Size(shape).numel()
    numbers = torch.arange(count, dtype=torch.int64, device="cpu")
    return ((numbers * (37 + 2 * seed) + seed) % 251).to(torch.uint8).view(shape)


_N = sum(_WIDTHS)
_WHOLE = _N + 2
"""Elements of rows in which even the last segment is a multiple of 8: kernels may then read in wider vectors."""

_BOTH = (None, _WHOLE)
"""Rows whose last segment ends anywhere, and rows of a model: kernels that read those in wider vectors are compiled
here, and not when a run goes over to codes."""

_S = len(_WIDTHS)
_BLOCKS = {0: _S, 64: 1 + 1 + 65 + 1}
"""Scales of a row, by the size of blocks."""

_BITS = (_N + 7) // 8  # and those of `_WHOLE`


def _rows(n: int | None = None) -> tuple[Tensor, list[int]]:
    """Return valid and runs of rows: `RUNS`, or for n, `_N` or `_WHOLE`, runs in which every segment is one."""
    valid = torch.tensor([_WIDTHS, (64, 40, 4099, 0)], dtype=torch.int64, device="cpu")
    return valid, [*RUNS] if n is None else [x for width in (*_WIDTHS[:-1], _WIDTHS[-1] + n - _N) for x in (1, width)]


_EXAMPLES: dict[str, Callable[[], list[tuple[Any, ...]]]] = {
    "pack_bits": lambda: [
        (torch.tensor([KNOWN_SIGNS] * 2, dtype=torch.float32, device="cpu"),), (_wave(2, 77),), (_wave(2, LONG),)
    ],
    "unpack_bits": lambda: [(_bytes(2, (n + 7) // 8), n, torch.float32) for n in (19, LONG)],
    "sign_encode": lambda: [(_wave(2, n or _N), *_rows(n), block) for n in _BOTH for block in _BLOCKS],
    "sign_encode_feedback": lambda: [
        (_wave(2, n or _N), _wave(2, n or _N, seed=2), _wave(2, count).abs(), *_rows(n), block)
        for n in _BOTH for block, count in _BLOCKS.items()
    ],
    "sign_residual": lambda: [
        (_wave(2, n or _N), _wave(2, count).abs(), *_rows(n), block)
        for n in _BOTH for block, count in _BLOCKS.items()
    ],
    "sign_serve": lambda: [
        (
            _bytes(2, 3, _BITS), _wave(2, 3, count).abs(), _wave(2, n or _N), _wave(2, count).abs(), *_rows(n), block,
        )
        for n in _BOTH for block, count in _BLOCKS.items()
    ],
    "sign_decode_mean": lambda: [
        (_bytes(2, ranks, _BITS), _wave(2, ranks, count).abs(), *_rows(n), block)
        for ranks, n in ((3, _N), (3, _WHOLE), (1, None)) for block, count in _BLOCKS.items()
    ],
    "quantize": lambda: [(_wave(2, _N), *_rows(), w) for w in (4, 8)],
    "quantize_feedback": lambda: [
        (_wave(2, _N), _bytes(2, _N).view(torch.int8), _wave(2, _S).abs() / 99, 0.8, *_rows(), w)
        for w in (4, 8)
    ],
    "quantize_fp8": lambda: [(_wave(2, _N), *_rows(), m) for m in (3, 2)],
    "dequantize_fp8": lambda: [
        (finite_fp8(_bytes(2, ranks, _N)), _wave(2, ranks, _S).abs(), *_rows(), m) for m, ranks in ((3, 3), (2, 1))
    ],
    "momentum_encode": lambda: [
        (*_momentum()[:2], 0.9, _wave(2, n, seed=2), _wave(2, count).abs(), *_rows(n), block)
        for n in (_N, _WHOLE) for block, count in _BLOCKS.items()
    ],
    "momentum_rows": lambda: [
        (*_momentum()[:2], decay, factors, 2, _rows(n)[1])
        for decay, factors, n in ((0.9, None, _N), (0.2, _wave(_S), _WHOLE))
    ],
    "drift": lambda: [(*_drift(), decay, 3e-2, 1e-2, 2, _rows(n)[1]) for decay, n in ((0.9, _N), (0.2, _WHOLE))],
    "onebit_adam_": lambda: [
        (
            *_momentum()[:2], _momentum(keep)[2], _bytes(2, ranks, _BITS),
            _wave(2, ranks, _BLOCKS[block]).abs(), *_rows(n), block,
            3e-2, 0.1, 1e-2, 0.7 if keep else math.inf, keep,
            _momentum()[0] if ranks > 1 or not keep else [],
        )
        for keep, ranks, n, block in (
            (True, 1, _N, 0), (True, 1, _WHOLE, 0), (False, 1, _WHOLE, 0), (True, 3, _WHOLE, 0),
            (True, 1, _N, 64), (True, 1, _WHOLE, 64), (True, 3, _WHOLE, 64),
        )
    ],
    "adamw_": lambda: [
        (*_momentum()[:2], *_momentum(frozen)[1:], *_DESCENT[:-1], max_step, frozen)
        for frozen, max_step in ((False, math.inf), (False, 0.7), (True, 0.7))
    ],
    "onebit_lamb_moments_": lambda: [
        (*_drift()[:2], _wave(_S).abs(), *_drift()[3:], _momentum()[2], 0.9, 0.99, 3e-2, 0.1, limit)
        for limit in (0.7, math.inf)
    ],
    "lamb_step_": lambda: [
        (*_momentum(), _wave(_S) / 100, 3e-2, decay, limit) for decay, limit in ((0.1, math.inf), (0.0, 0.7))
    ],
    "adamw_into_": lambda: [
        (
            [torch.zeros_like(_wave(n)) for _ in range(3 - frozen)], [_wave(n, seed=s) for s in range(rows)],
            [_wave(n), _wave(n, seed=2), _wave(n, seed=3).abs()], *_DESCENT[:-1], 0.7 if frozen else math.inf, frozen,
        )
        for n, rows, frozen in ((4099, 1, False), (22, 2, True), (77, 3, False), (4099, 1, True))
    ],
    "elementwise_": lambda: [
        ("descended", _like(2), [*_momentum()[1], *_momentum()[2]], [_wave(_S).abs()], [0], [0.0, 0.7]),
        ("lion", [*_like(1), *_like(1)], [*_momentum()[1], *_momentum()[0]], [_wave(1).abs()], [1], [0.9, 0.0]),
        ("sign_of", _momentum()[0], _momentum()[0], [], [], []),
        ("scaled", _like(0), _momentum()[0], [], [], [0.3]),
        ("plus", _like(0), [*_momentum()[0], *_momentum()[1]], [], [], [0.3]),
    ],
    "sums_of_squares": lambda: [(_momentum()[0],), ([_wave(5)],)],
    "largest_magnitude": lambda: [
        ([_wave(n) for n in (22, 4099, 5)],), ([_wave(77), -9 * _wave(3), _wave(64)],), ([_wave(40), -9 * _wave(40)],)
    ],
    "dequantize_mean": lambda: [
        (_codes(w, 2, ranks), _wave(2, ranks, _S).abs(), *_rows(), w) for w in (4, 8) for ranks in (1, 3)
    ],
}
_EXAMPLES |= {f"{op}_": _EXAMPLES[op] for op in ("sign_encode_feedback", "sign_residual")}


def _momentum(zeros: bool = False) -> tuple[Any, ...]:
    """Return lists of params, mu and nu; nu is above zero, or zero in places, where mu is to stay zero."""
    sizes = [2 * 64, 64 + 40, 4104 + 4099, 22]  # as `_rows` says
    nu = [_wave(n, seed=3) if zeros else _wave(n, seed=3).abs() for n in sizes]
    return [_wave(n) for n in sizes], [_wave(n, seed=2) for n in sizes], [v.clamp(min=0.0) for v in nu]


def _like(role: int) -> list[Tensor]:
    """Return zeros like one of the lists of `_momentum`."""
    return [torch.zeros_like(x) for x in _momentum()[role]]


def _drift() -> tuple[Any, ...]:
    """Return lists of params, anchors, mu, grads and nu, the last zero in places."""
    params, mu, nu = _momentum(zeros=True)
    return params, *([_wave(len(p), seed=s) for p in params] for s in (4, 5)), mu, nu


def _codes(width: int, *rows: int) -> Tensor:
    return _bytes(*rows, _N // 2) if width == 4 else _bytes(*rows, _N).view(torch.int8)


def finite_fp8(codes: Tensor) -> Tensor:
    """Return bytes in which a finite number replaces each NaN and Inf, which no codec sends."""
    return torch.where((codes & 127) > 123, codes - 4, codes)


def complaint(op: str, kernel: Callable[..., Any], device: torch.device) -> str | None:
    """Return why a kernel's answers are not the known ones, or None if they are."""
    try:
        with torch.no_grad():
            for args in examples(op):
                actual = outcome(op, kernel, args, device)
                if actual is NotImplemented:
                    return "it answers NotImplemented to the example"
                expected = outcome(op, REFERENCES[op], args, torch.device("cpu"))
                reason = difference(actual, expected, sums=of_sums(op))
                if reason is not None:
                    return reason
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor on a device, with its strides: `to` makes it contiguous."""
    if x.device == device or x.is_contiguous() or 0 in x.stride():
        return x.to(device)
    # Gaps between elements are what a kernel may stumble over, so they go along.
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def on_device(device: torch.device, args: Sequence[Any]) -> list[Any]:
    """Return arguments on a device; tensors in lists, which may be written, are copied."""
    return [
        _moved(a, device)
        if isinstance(a, Tensor)
        else [_guarded(x, device) for x in a]
        if isinstance(a, list) and a and isinstance(a[0], Tensor)
        else a
        for a in args
    ]


def _guarded(x: Tensor, device: torch.device) -> Tensor:
    """Return a contiguous copy of a tensor, in front of elements that no kernel may write."""
    room = torch.full((x.numel() + GUARD,), 7.0, dtype=x.dtype, device=device)
    return room[: x.numel()].view(x.shape).copy_(x)


def outcome(op: str, kernel: Callable[..., Any], args: Sequence[Any], device: torch.device) -> Any:
    """Run a kernel on copies of its arguments; return the tensors it writes, the guards behind them, its results."""
    args = on_device(device, args)
    written: list[Any] = []
    if op.endswith("_"):
        args = [_guarded(a, device) if i in WRITTEN[op] and isinstance(a, Tensor) else a for i, a in enumerate(args)]
        written = [x for a in args if isinstance(a, list) for x in a if isinstance(x, Tensor)]
        written += [args[i] for i in WRITTEN[op] if isinstance(args[i], Tensor)]
    results = kernel(*args)
    if results is NotImplemented or not written:
        return results
    guards = [x.as_strided((GUARD,), (1,), x.storage_offset() + x.numel()) for x in written]
    return [*written, *guards, *(() if results is None else as_tuple(results))]


def of_sums(op: str) -> bool:
    """Return whether the results of a kernel are sums of terms, whose rounding is not the same in all kernels."""
    return op.endswith("_") or op in ("drift", "momentum_encode", "momentum_rows", "sums_of_squares")


def difference(actual: Any, expected: Any, rtol: float = 1e-6, *, sums: bool = False) -> str | None:
    """Return how a result differs from the expected one, or None: integers exactly, floats up to rounding.

    Args: sums: the results are sums, in which the operands' rounding can outweigh what is left of them. In place of an
        infinite one NaN will do: in a moving average that is formed as g + b (v - g), Inf - Inf comes up.
    """
    actual, expected = as_tuple(actual), as_tuple(expected)
    if len(actual) != len(expected):
        return f"{len(actual)} results instead of {len(expected)}"
    for i, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if not isinstance(a, Tensor) or a.shape != b.shape or a.dtype != b.dtype:
            return f"result {i} is {_kind(a)} instead of {_kind(b)}"
        a = a.detach().cpu()
        a = torch.where(a.isnan() & b.isinf(), b, a) if sums else a
        step = torch.finfo(b.dtype).eps if b.dtype in (torch.bfloat16, torch.float16) else 0.0
        near = max(rtol, step)  # in half precision, what is rounded otherwise before can become the next number
        atol = near * float(torch.where(b.isfinite(), b, 0.0).abs().max()) if sums and b.numel() else 0.0
        same = torch.equal(a, b) or torch.allclose(a.double(), b.double(), near, atol, equal_nan=True)
        if not (torch.equal(a, b) if not b.is_floating_point() else same):
            return f"result {i} differs from the reference in {int((a != b).sum())} of {b.numel()} places"
    return None


def as_tuple(x: Any) -> Sequence[Any]:
    """Return a result as a tuple of results."""
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def _kind(x: Any) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
