"""How errors are kept from step to step: whole, in bf16, or in blocks of 8 bits.

| store | bytes per element | what saving e loses, at most |
|---|---|---|
| None | 4 | nothing |
| `torch.bfloat16` | 2 | abs(e) / 256 |
| `torch.int8` | 1 + 4 / block | M / 128, M the largest magnitude in the block |
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn.base import check_whole
from fn.collectives.codecs.segments import tile
from fn.errors import expected

Tree = Any

BY_NAME = {"float32": None, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "int8": torch.int8}


class StoredError(NamedTuple):
    """An error in blocks of 8 bits. codes: (n,) int8. scales: (ceil(n / block),) float32, float64 for float64."""

    codes: Tensor
    scales: Tensor


class Store(NamedTuple):
    """save: vector (n,) -> what is kept. load: what is kept -> (n,)."""

    save: Callable[[Tensor], Tree]
    load: Callable[[Tree], Tensor]


def store_of(kind: torch.dtype | str | None, block: int) -> Store:
    """Return the store of a kind.

    Args: kind: None, `torch.bfloat16` or `torch.int8`, or their names. block: elements that share a scale in int8.
    Raises: ValueError for another kind, or if block is not positive.
    """
    kind = BY_NAME.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in (None, torch.bfloat16, torch.int8):
        wanted = f"None, torch.bfloat16, torch.int8 or one of {sorted(BY_NAME)}"
        raise ValueError(expected("store", wanted, f"{kind!r}"))
    check_whole("block", block)
    if block < 1:
        raise ValueError(expected("block", "a whole number of at least 1", f"{block}"))
    if kind is torch.int8:
        return _in_blocks(block)
    if kind is torch.bfloat16:
        return Store(lambda e: e.to(torch.bfloat16), lambda kept: kept.float())
    return Store(lambda e: e, lambda kept: kept)


def _in_blocks(block: int) -> Store:
    def load(kept: StoredError) -> Tensor:
        if not isinstance(kept, StoredError):
            raise TypeError("error: is not what this feedback keeps, 8-bit blocks; a state belongs to its store")
        return from_blocks(*kept, block)

    return Store(lambda e: StoredError(*to_blocks(e, block)), load)


def to_blocks(vector: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return a vector (n,) as codes (n,) int8 and scales (ceil(n / block),)."""
    codes, scales = torch.ops.fn.quantize(vector[None], *_place(vector, block), 8)
    return codes[0], scales[0]


def from_blocks(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return the vector (n,) of codes and scales, in the dtype of the scales."""
    vector: Tensor = torch.ops.fn.dequantize(codes[None], scales[None], *_place(codes, block), 8)
    return vector[0]


def _place(vector: Tensor, block: int) -> tuple[Tensor, list[int]]:
    n = vector.shape[0]
    return tile((n,), torch.full((1, 1), n, dtype=torch.int64, device=vector.device), block)
