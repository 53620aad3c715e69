"""Small whole numbers in the bits that they need: `pack` and `unpack`. The first one lies in the lowest bits."""

from __future__ import annotations

import torch
from torch import Tensor


def pack(numbers: Tensor, width: int) -> Tensor:
    """Return numbers (R, n) of `width` bits each as bytes (R, ceil(n width / 8)) uint8."""
    rows, n = numbers.shape
    if width == 8:
        return numbers.to(torch.uint8)
    per_byte, apart = (8 // width, width) if 8 % width == 0 else (8, 1)  # whole numbers in a byte, or single bits
    if apart == 1 and width > 1:
        numbers = (numbers[:, :, None] >> torch.arange(width, dtype=torch.int64, device=numbers.device)) & 1
        numbers = numbers.reshape(rows, n * width)
    numbers = torch.nn.functional.pad(numbers.to(torch.uint8), (0, -numbers.shape[1] % per_byte))
    at = apart * torch.arange(per_byte, device=numbers.device, dtype=torch.uint8)
    in_bytes = numbers.reshape(rows, numbers.shape[1] // per_byte, per_byte)
    return (in_bytes << at).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, width: int, n: int) -> Tensor:
    """Return the n numbers (R, n) int64 of `width` bits that `pack` made bytes (R, ceil(n width / 8)) of."""
    rows = packed.shape[0]
    if width == 8:
        return packed.long()
    per_byte, apart = (8 // width, width) if 8 % width == 0 else (8, 1)
    at = apart * torch.arange(per_byte, device=packed.device, dtype=torch.uint8)
    found: Tensor = (packed[:, :, None] >> at) & (2**apart - 1)
    found = found.reshape(rows, packed.shape[1] * per_byte)
    if apart < width:
        bits = found[:, : n * width].reshape(rows, n, width).long()
        found = (bits << torch.arange(width, dtype=torch.int64, device=packed.device)).sum(-1)
    return found[:, :n].to(torch.int64)
