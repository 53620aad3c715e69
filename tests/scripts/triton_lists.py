"""Take the steps of the Triton row in its interpreter, beside the reference: layouts, dtypes, sizes, places in memory.

A program takes milliseconds here, so that tensors are few, and small but for one that fills a block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import fn  # noqa: F401  it defines the ops that references use
from fn.kernels import known_answers
from fn.kernels.gpu import triton
from fn.kernels.gpu.triton import blocks
from fn.kernels.reference import REFERENCES
from fn.kernels.schemas import SCHEMAS
from fn.testing.kernels import small_arguments

KERNELS = triton.row("cpu").kernels
SHAPES = [(1023,), (), (0,), (7, 1), (5, 3, 2, 2)]
DESCENT = (1e-3, 0.1, 1e-2, 0.7)
SPECIAL = (0.0, -0.0, 1e-45, float("inf"), -float("inf"), float("nan"))

draw = torch.Generator().manual_seed(0)
Place = Callable[[Tensor], Tensor]
Shapes = Sequence[tuple[int, ...]]


def as_it_is(x: Tensor) -> Tensor:
    return x


def misaligned(x: Tensor) -> Tensor:
    """Return a copy that begins at an odd element."""
    room = torch.zeros(x.numel() + 3, dtype=x.dtype)
    return room[1 : 1 + x.numel()].view(x.shape).copy_(x)


def channels_last(x: Tensor) -> Tensor:
    return x.to(memory_format=torch.channels_last) if x.dim() == 4 else x


def tensors(dtype: torch.dtype = torch.float32, shapes: Shapes = SHAPES, **low: float) -> list[Tensor]:
    made = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    return [x.clamp(**low) for x in made] if low else made


def rows(ranks: int, shapes: Shapes = SHAPES) -> tuple[Tensor, list[int]]:
    """Return how much is valid in rows for `ranks` ranks, and runs, a segment a tensor, widths of whole bytes."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    widths = [8 * -(-size // (8 * ranks)) for size in sizes]
    valid = torch.tensor([[min(max(size - r * w, 0), w) for size, w in zip(sizes, widths, strict=True)]
                          for r in range(ranks)])  # fmt: skip
    return valid, [x for w in widths for x in (1, w)]


def scales(runs: Sequence[int], block: int, *rows: int) -> Tensor:
    """Return scales of as many rows: one for every block of a segment, or for 0 one for the segment."""
    count = sum(-(-width // block) for width in runs[1::2]) if block else len(runs) // 2
    return torch.rand((*rows, count), generator=draw)


def codes(count: int, messages: int, runs: Sequence[int], block: int) -> tuple[Tensor, Tensor]:
    bits = torch.randint(0, 256, (count, messages, sum(runs[1::2]) // 8 + 5), generator=draw).to(torch.uint8)
    return bits[:, :, 5:], scales(runs, block, count, messages)


def cases(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield ops and arguments; params and gradients are of a dtype."""
    for count, messages in ((2, 1), (1, 3)):
        valid, runs = rows(count)
        step = tensors(dtype), tensors(), tensors(min=0.0)
        copies = tensors(torch.float16 if dtype == torch.float32 else dtype) if count > 1 else []
        for block in (0, 64):
            place, error = (valid, runs, block), torch.randn((count, sum(runs[1::2])), generator=draw)
            yield "momentum_encode", (tensors(), tensors(dtype), 0.9, error, scales(runs, block, count), *place)
            yield "onebit_adam_", (*step, *codes(count, messages, runs, block), *place, *DESCENT, True, copies)
        factors = scales(runs, 0) if count > 1 else None
        yield "momentum_rows", (tensors(), tensors(dtype), 0.2, factors, count, runs)
        yield "drift", (step[0], tensors(), tensors(), tensors(dtype), step[2], 0.9, 1e-3, 1e-2, count, runs)
    yield from anywhere(dtype)


def anywhere(dtype: torch.dtype) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield those that do not depend on the order of elements in memory."""
    moments = tensors(), tensors(min=0.0)
    for frozen in (False, True):
        yield "adamw_", (tensors(dtype), tensors(dtype), *moments, 0.9, 0.99, *DESCENT, frozen)
    yield "largest_magnitude", (tensors(dtype),)
    yield "sums_of_squares", (tensors(dtype),)
    lion = [*tensors(), *tensors(dtype)], [*tensors(), *tensors(dtype)]
    yield "elementwise_", ("lion", *lion, (torch.rand((), generator=draw),), [1], [0.9, 0.0])
    steps = tensors(dtype), [*tensors(dtype), *tensors(min=0.0)]
    yield "elementwise_", ("descended", *steps, (torch.rand(len(SHAPES), generator=draw),), [0], [0.0, 0.7])
    scaling = torch.rand(len(SHAPES), generator=draw) + 0.1
    args = scaling, *moments, tensors(min=0.0), 0.9, 0.99, 1e-3, 0.1, 0.7
    yield "onebit_lamb_moments_", (tensors(dtype), tensors(), *args)
    yield "lamb_step_", (tensors(dtype), *moments, scaling, 1e-3, 0.1, 0.7)


def placed(args: Sequence[Any], place: Place) -> list[Any]:
    """Return copies of arguments, tensors of lists as a place has them."""
    return [[place(x.clone()) for x in a] if isinstance(a, list) and a and isinstance(a[0], Tensor)
            else a.clone() if isinstance(a, Tensor) else a for a in args]  # fmt: skip


def compare(op: str, args: Sequence[Any], place: Place = as_it_is) -> None:
    """Compare what a kernel returns and leaves behind with what the reference does."""
    mine, theirs = placed(args, place), placed(args, empty if place is empty else as_it_is)
    found, expected = KERNELS[op](*mine), REFERENCES[op](*theirs)
    assert found is not NotImplemented, op
    left = [[x for a in each if isinstance(a, (list, Tensor)) for x in (a if isinstance(a, list) else [a])
             if isinstance(x, Tensor)] for each in (mine, theirs)]  # fmt: skip
    for mixed, out in zip(left, (found, expected), strict=True):
        mixed += [] if out is None else known_answers.as_tuple(out)
    reason = known_answers.difference(*left, 1e-5, sums=True)
    assert reason is None, f"{op}, {place.__name__}: {reason}"


def refused(op: str, args: Sequence[Any], place: Place = as_it_is) -> None:
    assert KERNELS[op](*placed(args, place)) is NotImplemented, f"{op} {place.__name__}"


def mixed(x: Tensor) -> Tensor:
    return x.half() if x.dim() == 0 else x


def empty(x: Tensor) -> Tensor:
    return x.new_zeros(0)


def check_lists() -> None:
    for dtype, place in ((torch.float32, as_it_is), (torch.bfloat16, as_it_is), (torch.float16, misaligned)):
        for op, args in cases(dtype):
            compare(op, args, place)
    in_order = {op for op, _ in cases(torch.float32)} - {op for op, _ in anywhere(torch.float32)}
    for op, args in cases(torch.float32):
        refused(op, args, mixed)
        (refused if op in in_order else compare)(op, args, channels_last)
    assert blocks.addresses(tensors()).aligned
    assert not blocks.addresses([*map(misaligned, tensors())]).aligned


def check_one_layout_is_not_the_other() -> None:
    """A gradient in another order of elements than its param is left to the next row."""
    p, m, v = ([torch.zeros(2, 3, 4, 4)] for _ in range(3))
    refused("adamw_", (p, [channels_last(p[0])], m, v, 0.9, 0.99, *DESCENT, False))
    for make in (lambda: torch.zeros(4, 4)[:, ::2], lambda: torch.zeros(1).expand(4)):
        lists = ([make()] for _ in range(4))
        assert KERNELS["adamw_"](*lists, 0.9, 0.99, *DESCENT, False) is NotImplemented


def check_special_numbers() -> None:
    special = torch.tensor(SPECIAL)
    for name, x in (("nan", special), ("inf", special[:-1])):
        found = KERNELS["largest_magnitude"]([torch.ones(9), -x])
        assert torch.equal(found.isnan(), torch.tensor(name == "nan")), name
        assert found.isnan() or found == torch.inf
    params, mu, nu = [torch.ones(6)], [torch.ones(6)], [torch.rand(6)]
    compare("adamw_", (params, [special], mu, nu, 0.9, 0.99, *DESCENT, False))
    compare("adamw_", (params, [special], mu, [torch.zeros(6)], 0.9, 0.99, *DESCENT, True))
    lists = params, [special], torch.ones(1), mu, nu, [torch.rand(6)]
    compare("onebit_lamb_moments_", (*lists, 0.9, 0.99, 1e-3, 0.1, 0.7))
    valid, runs = rows(1, [(6,)])
    compare("momentum_encode", (mu, [special], 0.0, torch.zeros(1, 8), torch.zeros(1, 1), valid, runs, 0))
    (valid, runs), long = rows(1, [(150,)]), torch.ones(150)
    long[:6] = special
    sent, error = torch.zeros(1, 3), torch.zeros(1, 152)
    compare("momentum_encode", ([torch.ones(150)], [long], 0.0, error, sent, valid, runs, 64))
    _, _, sums = KERNELS["momentum_encode"]([torch.ones(150)], [long], 0.0, error, sent, valid, runs, 64)
    assert sums[0, 1:].tolist() == [64.0, 22.0], "a block has what is special in another one"


def check_whole_blocks() -> None:
    """Blocks without an end, in two dtypes, and several of them in a segment; scales of what a block has many of."""
    shapes = [(2 * blocks.BLOCK + 24,)]
    for dtype in (torch.float32, torch.bfloat16):
        lists = tensors(dtype, shapes), tensors(dtype, shapes), tensors(shapes=shapes), tensors(shapes=shapes, min=0.0)
        compare("adamw_", (*lists, 0.9, 0.99, *DESCENT, False))
    valid, runs = rows(2, shapes)
    error = torch.randn((2, sum(runs[1::2])), generator=draw)
    for group in (0, 8, 64, blocks.BLOCK):
        place = valid, runs, group
        compare("momentum_encode", (lists[2], lists[1], 0.9, error, scales(runs, group, 2), *place))
        compare("onebit_adam_", (lists[0], *lists[2:], *codes(2, 3, runs, group), *place, *DESCENT, True, []))
        compare("sign_encode", (error, *place))
        compare("sign_encode_feedback", (error, error.flip(1), scales(runs, group, 2), *place))
        compare("sign_residual", (error, scales(runs, group, 2), *place))
        compare("sign_decode_mean", (*codes(2, 3, runs, group), *place))
        compare("sign_serve", (*codes(2, 3, runs, group), error, scales(runs, group, 2), *place))
    for group in (24, 2 * blocks.BLOCK):
        refused("momentum_encode", (lists[2], lists[1], 0.9, error, scales(runs, group, 2), valid, runs, group))
        compare("sign_serve", (*codes(2, 3, runs, group), error, scales(runs, group, 2), valid, runs, group))
    half = [[x.view(2, 2, -1).transpose(0, 1)] for (x,) in lists]  # dense, and in no usual order
    compare("adamw_", (*half, 0.9, 0.99, *DESCENT, False), torch.clone)


def check_addresses() -> None:
    """A table is sent once, and again when an address or a width is another."""
    lists = tensors(), tensors()
    first, again = blocks.addresses(*lists), blocks.addresses(*lists)
    assert first is again
    assert blocks.addresses(*lists, widths=[8] * len(SHAPES)) is not first
    assert blocks.addresses(lists[0], [x.clone() for x in lists[1]]) is not first
    columns = [[x.data_ptr() for x in each] for each in lists]
    sizes = [x.numel() for x in lists[0]]
    assert first.table.t().tolist() == [*columns, sizes, sizes]


def check_no_elements() -> None:
    assert KERNELS["adamw_"]([], [], [], [], 0.9, 0.99, *DESCENT, False) is NotImplemented
    for op, args in anywhere(torch.float32):
        compare(op, args, empty)


def check_known_answers() -> None:
    assert set(KERNELS) == {*SCHEMAS}
    for op in KERNELS:
        assert known_answers.complaint(op, KERNELS[op], torch.device("cpu")) is None, op
        args, again = (small_arguments(op)[0] for _ in range(2))
        answers = (known_answers.as_tuple(f(*a)) for f, a in ((KERNELS[op], args), (REFERENCES[op], again)))
        assert all(x is y is None or x.stride() == y.stride() for x, y in zip(*answers, strict=True)), f"{op}: strides"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        vars()[f"check_{name}"]()
        print(name, flush=True)
