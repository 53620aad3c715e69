"""A device of somebody else's: it brings the two functions that make a device, and counts their calls."""

import torch

from fn.kernels import Accelerator

calls = []


def pack(x):
    """Pack the signs of x (R, n), bit by bit."""
    calls.append("pack")
    packed = torch.zeros(x.shape[0], -(-x.shape[1] // 8), dtype=torch.uint8)
    for i in range(x.shape[1]):
        packed[:, i // 8] |= (x[:, i] >= 0).to(torch.uint8) << (i % 8)
    return packed


def unpack(bits, n, dtype):
    """Unpack n signs of each row."""
    calls.append("unpack")
    signs = [(bits[:, i // 8] >> (i % 8)) & 1 for i in range(n)]
    return torch.stack([*signs, *[bits.new_zeros(bits.shape[0])] * (not n)], 1)[:, :n].to(dtype) * 2 - 1


def row():
    """Return the row, as the entry point is asked for it."""
    return Accelerator("cpu", {"pack_bits": pack, "unpack_bits": unpack}, communication_backend="gloo")
