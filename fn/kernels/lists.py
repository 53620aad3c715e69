"""A rule of `fn.kernels.rules` on lists of tensors in one go: what is element-wise in a link is one call.

On a CPU, under `torch.func`, in traces, for DTensor and wherever tensors hold no numbers, the rule is applied tensor by
tensor, as it stands. On a device with kernels it is one launch for each list: Triton compiles the rule itself, the
row "torch" runs it by torch's functions of lists.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.kernels import memory_pool
from fn.kernels.layout import alike_in_memory, contiguous, scale_dtype
from fn.kernels.reference.lists import RESULTS
from fn.kernels.table import cells, direct, is_agreed
from fn.kernels.tracing import is_concrete, is_recorded, pooled

Number = float | Tensor | Sequence[Tensor]


def _lion(m: Tensor, g: Tensor, b1: float, b2: float) -> tuple[Tensor, ...]:
    lerp = _into_pool(torch.lerp)
    return lerp(g, m, b1), lerp(g, m, b2)


def _second_moment(v: Tensor, g: Tensor, b2: float | Tensor, rest2: float | Tensor) -> Tensor:
    if isinstance(rest2, Tensor):
        return torch.addcmul(v * b2, g * rest2, g)
    return torch.addcmul(v * b2, g, g, value=rest2)


def _lerp(start: Tensor, end: Tensor, weight: float | Tensor, **room: Tensor) -> Tensor:
    return torch.lerp(start, end, weight.to(start.dtype) if isinstance(weight, Tensor) else weight, **room)


BY_TORCH: dict[str, Callable[..., Any]] = {"lion": _lion, "second_moment": _second_moment}
"""Rules that functions of torch follow in fewer passes, or into memory that is used again."""

INTO_POOL: dict[str, Callable[..., Tensor]] = {
    "lerp": _lerp,
    "scaled": torch.mul,
    "plus": lambda a, b, weight, **room: torch.add(a, b, alpha=weight, **room),
}
"""Rules that are one function of torch, whose result can lie in memory that is used again, or where it is wanted."""

ROUNDED_EACH: dict[str, Callable[..., Any]] = {
    "lerp": lambda start, end, weight: start + weight * (end - start),
    "plus": lambda a, b, weight: a + weight * b,
    "lion": lambda m, g, b1, b2: (g + b1 * (m - g), g + b2 * (m - g)),
}
"""Rules in which torch rounds otherwise from CPU to CPU, in operations that it rounds alike everywhere."""


def elementwise(
    rule: Callable[..., Any],
    lists: Sequence[Sequence[Tensor]],
    *numbers: Number,
    like: int = 0,
    wide: bool = False,
    out: Sequence[Sequence[Tensor]] | None = None,
) -> Any:
    """Apply a rule to the tensors of lists, element by element.

        >>> import torch
        >>> from fn.kernels import lists, rules
        >>> mu, grads = [torch.zeros(2), torch.ones(1)], [torch.tensor([1.0, -2.0]), torch.ones(1)]
        >>> lists.elementwise(rules.lerp, (grads, mu), 0.75, like=1)          # a moving average
        [tensor([ 0.2500, -0.5000]), tensor([1.])]
        >>> direction, mu = lists.elementwise(rules.lion, (mu, grads), 0.5, 0.75)   # a rule with two results
        >>> mu
        [tensor([ 0.2500, -0.5000]), tensor([1.])]
        >>> _ = lists.elementwise(rules.scaled, (mu,), torch.tensor([2.0, 3.0]), out=[mu])     # a number a tensor
        >>> mu
        [tensor([ 0.5000, -1.0000]), tensor([3.])]

    Args:
        rule: a function of `fn.kernels.rules` that takes lists first, then numbers.
        lists: its lists, with as many tensors each; the tensors in a place have the same shape.
        numbers: floats; 0-d tensors, which the host need not read; tensors (S,), or lists of S 0-d tensors, a
            number for each tensor. None of them compiles anything anew.
        like: the list whose dtypes are those of the results. The others are brought to them before they are used.
        wide: calculate in float32 where the results are of half precision, and round once. Kernels always do.
        out: lists to write into, in place of new tensors; they may be among `lists`. None: new ones.
    Returns: the list of results, or a tuple of lists for a rule that returns several.
    """
    count = RESULTS[rule.__name__]
    if not lists[0]:
        made: list[list[Tensor]] = [[] for _ in range(count)]
        return made[0] if count == 1 else tuple(made)
    found = None
    if has_kernels([x for column in (*lists, *(out or ())) for x in column]):
        found = _by_kernel(rule, count, lists, numbers, like, out)
    if found is None:
        found = _by_tensor(rule, count, lists, numbers, like, wide, out)
    return found[0] if count == 1 else tuple(found)


def has_kernels(tensors: Sequence[Tensor], op: str = "elementwise_") -> bool:
    """Return whether an op has kernels for tensors: floats of one device that is no CPU, that hold numbers now."""
    device = tensors[0].device
    if device.type in ("cpu", "meta"):
        return False
    if not is_concrete(*tensors) or is_recorded(tensors):
        return False
    if not cells(op, device.type) or {x.device for x in tensors} != {device}:
        return False
    return all(map(Tensor.is_floating_point, tensors))


def _by_tensor(
    rule: Callable[..., Any], count: int, lists: Sequence[Sequence[Tensor]], numbers: Sequence[Number], like: int,
    wide: bool, out: Sequence[Sequence[Tensor]] | None,
) -> list[list[Tensor]]:  # fmt: skip
    """Apply the rule tensor by tensor, as it stands."""
    name, dtypes = rule.__name__, [x.dtype for x in lists[like]]
    inside = [*map(scale_dtype, lists[like])] if wide else dtypes
    if {x.dtype for tensors in lists for x in tensors} != {*inside[:1]}:
        lists = [[x.to(dtype) for x, dtype in zip(tensors, inside, strict=True)] for tensors in lists]
    into_pool, instead = ({}, ROUNDED_EACH) if is_agreed() else (INTO_POOL, BY_TORCH)
    call = _into_pool(into_pool[name]) if name in into_pool else instead.get(name, rule)
    rows: Any = zip(*lists, strict=True)
    if any(isinstance(x, Sequence) or (isinstance(x, Tensor) and x.ndim) for x in numbers):
        each = [x if isinstance(x, Sequence) else x.unbind() if isinstance(x, Tensor) and x.ndim else [x] * len(dtypes)
                for x in numbers]  # fmt: skip
        # Numbers that differ between tensors come as further operands of each row.
        rows, numbers = zip(*lists, *each, strict=True), ()
    if out is not None:
        for row, *to in zip(rows, *out, strict=True):
            if name in into_pool and to[0].dtype == row[0].dtype and _room(*row, *numbers):
                into_pool[name](*row, *numbers, out=to[0])
                continue
            found = call(*row, *numbers)
            for x, y in zip(to, found if count > 1 else (found,), strict=True):
                x.copy_(y)
        return [[*to] for to in out]
    found = [call(*row, *numbers) for row in rows]
    columns = [[row[k] for row in found] for k in range(count)] if count > 1 else [found]
    if all([x.dtype for x in column] == dtypes for column in columns):
        return columns
    return [[x.to(dtype) for x, dtype in zip(column, dtypes, strict=True)] for column in columns]


def _into_pool(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def call(*args: Any) -> Tensor:
        if args[0].numel() * args[0].element_size() < memory_pool.SMALLEST:
            return function(*args)  # the pool has none so small, and to ask takes longer than the arithmetic
        return function(*args, **_room(*args))

    return call


def _room(*args: Any) -> dict[str, Tensor]:
    return pooled(*(x for x in args if isinstance(x, Tensor)))


def _by_kernel(
    rule: Callable[..., Any], count: int, lists: Sequence[Sequence[Tensor]], numbers: Sequence[Number], like: int,
    out: Sequence[Sequence[Tensor]] | None,
) -> list[list[Tensor]] | None:  # fmt: skip
    """Apply the rule by one call of a kernel for each kind of place: the dtypes of its tensors."""
    if any([x.shape for x in tensors] != [x.shape for x in lists[0]] for tensors in (*lists, *(out or ()))):
        return None  # some are broadcast
    results = [[*map(torch.empty_like, lists[like])] for _ in range(count)] if out is None else [[*to] for to in out]
    # S tensors 0-d -> (S,)
    values = [torch.stack([*x]) if isinstance(x, Sequence) else x for x in numbers]
    columns = [*results, *lists]
    if {len({x.dtype for x in column}) for column in columns} == {1} and alike_in_memory(*columns):
        _call(rule, results, lists, values)
        return results
    # A kernel goes through memory: only tensors that lie in the same order have their elements in the same places.
    rows = [*zip(*columns, strict=True)]
    kinds = [(contiguous(row) or alike_in_memory(*([x] for x in row)), *(x.dtype for x in row)) for row in rows]
    for places in tree.places_by(kinds).values():
        some = [_at(x, places) if isinstance(x, Tensor) and x.numel() > 1 else x for x in values]
        to, given = ([[column[s] for s in places] for column in side] for side in (results, lists))
        _call(rule, to, given, some)
    return results


def _at(number: Tensor, places: list[int]) -> Tensor:
    each = number.unbind()
    return torch.stack([each[s] for s in places])


def _call(
    rule: Callable[..., Any], results: Sequence[Sequence[Tensor]], lists: Sequence[Sequence[Tensor]],
    numbers: Sequence[float | Tensor],
) -> None:  # fmt: skip
    device, values, scalars, places = lists[0][0].device, [], [], []
    for place, x in enumerate(numbers):
        # A number on the device is handed over where it lies: to read it, the host would wait for the device.
        on_device = isinstance(x, Tensor) and (x.device == device or x.numel() > 1)
        values.append(math.nan if on_device else float(x))
        if isinstance(x, Tensor) and on_device:
            places.append(place)
            scalars.append(x.to(device))
    flat = ([x for column in side for x in column] for side in (results, lists))
    # As `direct` asks. Nobody differentiates this: `has_kernels` has looked.
    with torch.no_grad():
        direct("elementwise_", rule.__name__, *flat, scalars, places, values)


def squared_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of each tensor, (S,), in float32 or the wider of the dtypes, on the first one's device.

    Where one overflows it is infinite.
    """
    if not tensors:
        return torch.zeros(0, dtype=torch.float32, device="cpu")
    if not has_kernels(tensors, "sums_of_squares"):
        # In float32 at least: the square of a norm of 256 overflows float16.
        norms = [torch.linalg.vector_norm(x.to(scale_dtype(x))).square() for x in tensors]
        return torch.stack([x.to(norms[0].device) for x in norms])
    dtypes = [x.dtype for x in tensors]
    wide = torch.float64 if torch.float64 in dtypes else torch.float32
    if len({*dtypes}) == 1:
        sums: Tensor = direct("sums_of_squares", [*tensors])
        return sums.to(wide)
    return torch.stack(tree.in_groups(lambda some: direct("sums_of_squares", some).unbind(), dtypes, tensors)).to(wide)


def peaks(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the largest magnitude of each tensor, 0-d, in its dtype; NaN where one is, 0 of no elements."""
    if tensors and has_kernels(tensors) and all(x.numel() for x in tensors):
        return [*torch._foreach_norm([*tensors], math.inf)]
    return [x.abs().amax() if x.numel() else x.new_zeros(()) for x in tensors]
