"""The kernels as `torch.library` ops in the namespace `fn`: schema, checks, fake, vmap rule, dispatch to the table.

Each op looks up the table's cell for the device of its first argument and runs the reference where there is none.
The fake is the reference itself, run on fake tensors. Under vmap the batch becomes part of the rows, which no kernel
mixes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fn.errors import expected
from fn.kernels.layout import bytes_for, count_scales, row_length
from fn.kernels.reference import REFERENCES
from fn.kernels.reference.lists import RESULTS, rule_of
from fn.kernels.schemas import ARGUMENTS, ON_LISTS, SCHEMAS
from fn.kernels.table import device_of, direct
from fn.kernels.tracing import PLANS

Kernel = Callable[..., Any]

_OF_MOMENTA = ("mu", "nu", "params", "anchors", "grads", "averages", "fresh")
"""Lists whose tensors have as many elements as those of mu."""

_FLOATING = (
    *_OF_MOMENTA, "copies", "x", "b", "buffer", "sent", "scales", "error_scales", "new", "rows", "old", "scaling",
    "rates", "results", "operands", "scalars", "tensors",
)  # fmt: skip
_INTEGERS = {
    "bits": (torch.uint8,),
    "seen": (torch.uint8,),
    "valid": (torch.int64,),
    "error": (torch.int8,),
    "codes": (torch.uint8, torch.int8),
}


def check(name: str, args: Sequence[Any]) -> None:
    """Refuse arguments that no kernel can mean: it would go on behind the end of a tensor.

    Raises: TypeError or ValueError that names the argument: a dtype that is not allowed, another device than that of
        the first argument, a length that is not the one which `runs` describes.
    """
    named = dict(zip(ARGUMENTS[name], args, strict=True))
    device = device_of(args)
    for key, value in named.items():
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, Tensor):
                _check_dtype(key, tensor)
                if tensor.device != device:
                    wanted = f"a tensor on {device}, as {ARGUMENTS[name][0]} is"
                    raise ValueError(expected(key, wanted, f"one on {tensor.device}"))
    if named.get("width", 8) not in (4, 8):
        raise ValueError(expected("width", "4 or 8", f"{named['width']}"))
    if named.get("mantissa", 3) not in (2, 3):
        raise ValueError(expected("mantissa", "2 or 3 bits", f"{named['mantissa']}"))
    if "runs" in named:
        _check_lengths(named)
    if name == "adamw_into_":
        size = named["new"][0].numel() if named["new"] else 0
        for key, count in (("new", 3 - named["frozen"]), ("old", 3), ("rows", max(1, len(named["rows"])))):
            _check_sizes(key, named[key], [size] * count, "new[0]")
    elif name == "elementwise_":
        _check_places(**named)
    elif name in ON_LISTS and "mu" in named:
        like = "nu" if name == "onebit_adam_" and not named["mu"] else "mu"  # which may be left out there
        sizes = [*map(Tensor.numel, named[like])]
        for key in [key for key in _OF_MOMENTA if key in named and (key, like) != ("mu", "nu")]:
            _check_sizes(key, named[key], sizes, like)
        copies, params = ([tuple(t.shape) for t in named.get(key, ())] for key in ("copies", "params"))
        if copies and copies != params:
            raise ValueError(expected("copies", f"no tensors, or the shapes of params, {params}", f"{copies}"))
    for key in ("scaling", "rates"):
        if key in named and named[key].shape != (len(named["mu"]),):
            shape = tuple(named[key].shape)
            raise ValueError(expected(key, f"one number per tensor of mu, {len(named['mu'])}", f"shape {shape}"))


def _check_sizes(key: str, tensors: Sequence[Tensor], sizes: list[int], of: str) -> None:
    if [*map(Tensor.numel, tensors)] != sizes:
        raise ValueError(expected(key, f"tensors of {sizes} elements, as {of}", f"{[t.numel() for t in tensors]}"))


def _check_places(
    rule: str, results: Sequence[Tensor], operands: Sequence[Tensor], scalars: Sequence[Tensor], places: Sequence[int],
    numbers: Sequence[float],
) -> None:  # fmt: skip
    rule_of(rule)
    count = len(results) // RESULTS[rule]
    lists = len(operands) // max(count, 1)
    if len(results) != count * RESULTS[rule] or len(operands) != count * lists:
        got = f"{len(results)} results and {len(operands)} operands"
        raise ValueError(expected("operands", "lists of as many tensors as those of results", got))
    sizes = [*map(Tensor.numel, results[:count])]
    for key, tensors in (("results", results), ("operands", operands)):
        _check_sizes(key, tensors, sizes * (len(tensors) // max(count, 1)), "the first results")
    if len(places) != len(scalars) or any(not 0 <= place < len(numbers) for place in places):
        raise ValueError(expected("places", f"{len(scalars)} places among {len(numbers)} numbers", f"{[*places]}"))
    if any(x.numel() not in (1, count) for x in scalars):
        got = f"shapes {[tuple(x.shape) for x in scalars]}"
        raise ValueError(expected("scalars", f"one number each, or one per tensor, {count}", got))


def _check_dtype(key: str, value: Tensor) -> None:
    if key in _FLOATING and not value.is_floating_point():
        raise TypeError(expected(key, "a floating dtype", f"{value.dtype}"))
    if key in _INTEGERS and value.dtype not in _INTEGERS[key]:
        raise TypeError(expected(key, " or ".join(map(str, _INTEGERS[key])), f"{value.dtype}"))


@lru_cache(maxsize=PLANS)
def _row_of(runs: tuple[int, ...], block: int) -> tuple[int, int, int]:
    """Return the elements, the segments and the scales of a row."""
    return row_length(runs), sum(runs[::2]), count_scales(runs, block)


def _check_lengths(named: dict[str, Any]) -> None:
    width, block = named.get("width", 8), named.get("block", 0)
    if block < 0 or block % 8:
        raise ValueError(expected("block", "0 or a multiple of 8, whole bytes of signs", f"{block}"))
    n, segments, scales = _row_of(tuple(named["runs"]), block)
    if width == 4 and n % 2:
        raise ValueError(expected("runs", "an even number of elements, for codes of 4 bits", f"{n}"))
    lengths = {"x": n, "b": n, "buffer": n, "error": n, "codes": n * width // 8}
    lengths |= dict.fromkeys(("bits", "seen"), bytes_for(n))
    lengths |= dict.fromkeys(("scales", "sent", "error_scales"), scales) | {"valid": segments}
    for key, value in named.items():
        if key in lengths and (value.ndim < 2 or value.shape[-1] != lengths[key]):
            wanted = f"rows of {lengths[key]} for the runs given"
            raise ValueError(expected(key, wanted, f"shape {tuple(value.shape)}"))


def _define(library: torch.library.Library, name: str, schema: str) -> None:
    plain = REFERENCES[name]

    def run(*args: Any) -> Any:
        check(name, args)
        return direct(name, *args)

    def fake(*args: Any) -> Any:
        check(name, args)
        return plain(*args)

    def fold(info: Any, in_dims: tuple[Any, ...], *args: Any) -> tuple[Any, Any]:
        if name in ON_LISTS or name.endswith("_"):
            raise ValueError(f"{name}: works in place for one rank; simulated ranks run the pure updates")
        return _fold_batch_into_rows(getattr(torch.ops.fn, name), info.batch_size, in_dims, args)

    library.define(name + schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fn::{name}", fake, lib=library)
    torch.library.register_vmap(f"fn::{name}", fold, lib=library)


def _fold_batch_into_rows(
    op: Kernel, batch: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Run a row-wise op over a batch by making the batch part of the rows."""

    def fold(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        # (R, ...) or (..., B, ...) -> (B, R, ...) -> (B R, ...)
        x = x.unsqueeze(0).expand(batch, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    folded = [fold(x, dim) for x, dim in zip(args, in_dims, strict=True)]
    out = op(*folded)
    rows = folded[0].shape[0] // batch
    if isinstance(out, Tensor):
        # (B R, ...) -> (B, R, ...)
        return out.unflatten(0, (batch, rows)), 0
    return tuple(o.unflatten(0, (batch, rows)) for o in out), (0,) * len(out)


_library = torch.library.Library("fn", "FRAGMENT")
for _name, _schema in SCHEMAS.items():
    _define(_library, _name, _schema)
