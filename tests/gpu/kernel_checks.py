"""Checks of a device's kernels: large vectors, NaN, and memory that is misaligned or strided.

A check returns what is wrong, or None. Expected answers come from the reference. For large vectors it runs on the
device itself, piece by piece: the reference is plain torch, and a CPU would take minutes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_device import PLACES
from torch import Tensor

from fn.kernels.known_answers import difference, of_sums
from fn.kernels.reference import REFERENCES
from fn.kernels.schemas import ARGUMENTS, WRITTEN
from fn.kernels.table import cells
from fn.testing.kernels import arguments

LARGE = (1 << 26) + 3
HUGE = (1 << 31) + 4096 + 3
PIECE = 1 << 24
"""Elements of a huge vector that are looked at together; a multiple of every block of codes."""

BLOCK = 256


def against_the_reference(
    op: str, device: torch.device, n: int, place: str = "aligned", special: bool = False, on_device: bool = False
) -> str | None:
    """Compare the kernels of an op with the reference. place: of `PLACES`; lists of tensors are never strided.

    Args: special: zeros of both signs, subnormal numbers, Inf and NaN among the numbers. on_device: run the reference
        there, and not on the CPU.
    """
    for width in (4, 8) if "width" in ARGUMENTS[op] else (8,):
        args = arguments(op, n, torch.float32, width=width, special=special)
        expected = _run(REFERENCES[op], op, args, device if on_device else torch.device("cpu"), "aligned")
        for cell in cells(op, device.type):
            found = _run(cell.kernel, op, args, device, place)
            if found is None:  # it leaves such arguments to the next row
                continue
            if _alike(found, expected):
                continue
            fault = difference(found, [x.cpu() for x in expected], 1e-5, sums=of_sums(op))
            if fault is not None:
                return f"{cell.provider}, n={n}, width={width}, {place}{', special values' * special}: {fault}"
    return None


def _alike(found: list[Tensor], expected: list[Tensor]) -> bool:
    """Tell, where both are on one device, whether all is equal, but for a rounding of floats; quicker than on a CPU."""
    return all(
        a.device == b.device and a.dtype == b.dtype and a.shape == b.shape
        and (torch.allclose(a, b, 1e-5, 0.0, equal_nan=True) if a.is_floating_point() else torch.equal(a, b))
        for a, b in zip(found, expected, strict=True)
    )  # fmt: skip


def _run(kernel: Callable[..., Any], op: str, args: Any, device: torch.device, place: str) -> list[Tensor] | None:
    """Run a kernel on copies; return what it wrote, and its results; None if it does not handle them."""
    listed = PLACES["aligned" if place == "strided" else place]
    copies = [
        [listed(x, device) for x in a] if isinstance(a, list) and a and isinstance(a[0], Tensor)
        else _put(a, i in WRITTEN[op], device, place) for i, a in enumerate(args)
    ]  # fmt: skip
    with torch.no_grad():
        found = kernel(*copies)
    if found is NotImplemented:
        return None
    written = [x for i in WRITTEN[op] for x in (copies[i] if isinstance(copies[i], list) else [copies[i]])]
    results = [] if found is None else list(found) if isinstance(found, (tuple, list)) else [found]
    return [*written, *results]


def _put(a: Any, is_written: bool, device: torch.device, place: str) -> Any:
    if not isinstance(a, Tensor):
        return a
    return PLACES["aligned" if is_written and place == "strided" else place](a, device)


def huge_needs(device: torch.device, n: int) -> str | None:
    """Return why a device cannot hold what `huge` works on, or None."""
    needed = 6 * 4 * n
    if device.type == "cpu":
        return "would take the memory of a GPU" if n > LARGE else None
    torch.accelerator.empty_cache()
    free, _ = torch.get_device_module(device).mem_get_info()
    return None if free >= needed else f"{needed / 2**30:.0f} GiB are needed, {free / 2**30:.0f} GiB are free"


def huge_signs(device: torch.device, n: int = HUGE, block: int = 0) -> str | None:
    """Encode and decode n signs, and compare them with x itself, piece by piece."""
    x = _numbers(n, device)
    segments = torch.tensor([[n]], device=device), [1, n], block
    bits, squares = torch.ops.fn.sign_encode(x, *segments)
    scales = torch.full((1, *squares.shape), 0.5, device=device)
    signs = torch.ops.fn.sign_decode_mean(bits[:, None], scales, *segments)
    total = sum(float(x[0, piece].double().square().sum()) for piece in _pieces(n))
    if abs(float(squares.sum()) / total - 1) > 1e-6:
        return f"the sum of squares is {float(squares.sum())}, but {total} was expected"
    if block and not torch.allclose(squares[0, -1], x[0, (n - 1) // block * block :].double().square().sum()):
        return "the sum of squares of the last block is another one's"
    for piece in _pieces(n):
        if not torch.equal(signs[0, piece], torch.where(x[0, piece] >= 0, 0.5, -0.5)):
            return f"signs differ from element {piece.start} on"
    return None


def huge_integers(device: torch.device, n: int = HUGE, width: int = 8) -> str | None:
    """Quantise n numbers and back, and compare with the reference on each piece alone."""
    n -= n % (2 * BLOCK)
    x = _numbers(n, device)
    segments = n // BLOCK
    valid, runs = torch.full((1, segments), BLOCK, device=device), [segments, BLOCK]
    codes, scales = torch.ops.fn.quantize(x, valid, runs, width)
    back = torch.ops.fn.dequantize_mean(codes[:, None], scales[:, None], valid, runs, width)
    for piece in _pieces(n):
        few = slice(piece.start // BLOCK, piece.stop // BLOCK)
        part = (valid[:, few], [few.stop - few.start, BLOCK])
        q, s = REFERENCES["quantize"](x[:, piece], *part, width)
        where = slice(piece.start * width // 8, piece.stop * width // 8)
        if not (torch.equal(codes[:, where], q) and torch.allclose(scales[:, few], s, 1e-6, 0.0)):
            return f"codes or scales differ from element {piece.start} on"
        wanted = REFERENCES["dequantize_mean"](q[:, None], s[:, None], *part, width)
        if not torch.allclose(back[:, piece], wanted, 1e-5, 1e-6):
            return f"what codes mean differs from element {piece.start} on"
    return None


def huge_adamw(device: torch.device, n: int = HUGE) -> str | None:
    """Take AdamW's step of one tensor of n elements, and compare it with the reference on each piece alone."""
    descent = (0.9, 0.99, 1e-6, 0.01, 1e-2, 0.7)
    tensors = [_numbers(n, device)[0] for _ in range(3)]
    tensors.append(tensors[2].abs())  # params, grads, mu, nu
    before = [[t[piece].clone() for t in tensors] for piece in _ends(n)]
    torch.ops.fn.adamw_(*[[t] for t in tensors], *descent, False)
    for piece, old in zip(_ends(n), before, strict=True):
        REFERENCES["adamw_"](*[[t] for t in old], *descent, False)
        for name, found, expected in zip(("params", "grads", "mu", "nu"), tensors, old, strict=True):
            if not torch.allclose(found[piece], expected, 1e-5, 1e-6):
                return f"{name} differ from element {piece.start} on"
    return None


def _numbers(n: int, device: torch.device) -> Tensor:
    """Return (1, n) numbers that are the same in every run."""
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(1, n, generator=generator, device=device)


def _pieces(n: int) -> Iterator[slice]:
    return (slice(start, min(start + PIECE, n)) for start in range(0, n, PIECE))


def _ends(n: int) -> list[slice]:
    """Return the first piece, one in the middle, and the last one."""
    found = [*_pieces(n)]
    return [found[i] for i in sorted({0, len(found) // 2, len(found) - 1})]
