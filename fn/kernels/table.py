"""The accelerator table: one `torch.library` op per kernel, one row of implementations per device.

Every op has a schema, a fake, a vmap rule, and a reference in plain torch that runs wherever a device's row has
no cell of its own. `register` fills cells in. A row with only `pack_bits` and `unpack_bits` is complete, because
the other references are written in terms of these two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn.kernels import cpu, reference

Kernel = Callable[..., Any]

SCHEMAS: Mapping[str, str] = MappingProxyType(
    {
        "pack_bits": "(Tensor x) -> Tensor",
        "unpack_bits": "(Tensor bits, int n, ScalarType dtype) -> Tensor",
        "sign_encode": "(Tensor x, Tensor valid, int[] runs) -> (Tensor, Tensor)",
        "sign_decode": "(Tensor bits, Tensor scales, Tensor valid, int[] runs) -> Tensor",
        "sign_decode_mean": "(Tensor bits, Tensor scales, Tensor valid, int[] runs) -> Tensor",
    }
)
"""Every kernel by name, with its schema."""


class Accelerator(NamedTuple):
    """A row of the table: what one kind of device brings.

    device_type: torch's name of the device type ("cpu", "cuda", "npu", ...).
    kernels: kernel name -> function with the signature and the meaning of the reference of that name.
    """

    device_type: str
    kernels: Mapping[str, Kernel]


_cells: dict[tuple[str, str], Kernel] = {}


def register(row: Accelerator) -> None:
    """Fill a device's cells in; cells that the row does not bring stay as they are.

    Raises: ValueError if a kernel's name is not in the table.
    """
    unknown = sorted(set(row.kernels) - set(SCHEMAS))
    if unknown:
        raise ValueError(f"kernels: {unknown} are not in the table; allowed are {sorted(SCHEMAS)}")
    for name, kernel in row.kernels.items():
        _cells[name, row.device_type] = kernel


def _define(library: torch.library.Library, name: str, schema: str) -> None:
    plain: Kernel = getattr(reference, name)

    def run(*args: Any) -> Any:
        return _cells.get((name, args[0].device.type), plain)(*args)

    def fold(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        return _fold_batch_into_rows(getattr(torch.ops.fn, name), info.batch_size, in_dims, args)

    library.define(name + schema)
    library.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"fn::{name}", plain, lib=library)
    torch.library.register_vmap(f"fn::{name}", fold, lib=library)


def _fold_batch_into_rows(
    op: Kernel, batch: int, in_dims: tuple[int | None, ...], args: tuple[Any, ...]
) -> tuple[Any, Any]:
    """Run a row-wise op over a batch by making the batch part of the rows."""

    def fold(x: Any, dim: int | None) -> Any:
        if not isinstance(x, Tensor):
            return x
        x = x.unsqueeze(0).expand(batch, *x.shape) if dim is None else x.movedim(dim, 0)
        return x.flatten(0, 1)

    folded = [fold(x, dim) for x, dim in zip(args, in_dims, strict=True)]
    out = op(*folded)
    rows = folded[0].shape[0] // batch
    if isinstance(out, Tensor):
        return out.unflatten(0, (batch, rows)), 0
    return tuple(o.unflatten(0, (batch, rows)) for o in out), (0,) * len(out)


_library = torch.library.Library("fn", "FRAGMENT")
for _name, _schema in SCHEMAS.items():
    _define(_library, _name, _schema)
register(Accelerator("cpu", cpu.KERNELS))
