"""The sequences of eager operations that one writes first, as DeepSpeed's compressed backends do: the yardstick."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor


def signs(x: Tensor) -> Tensor:
    """Return +1 where x >= 0 and -1 elsewhere."""
    return x.sign().add_(1).bool().float().add_(-0.5).mul_(2.0)


def pack(x: Tensor) -> Tensor:
    """Return the sign bits; on a device by shifts, since NumPy packs on the host."""
    ones = x.sign().add_(1).bool()
    if x.device.type == "cpu":
        return torch.from_numpy(np.packbits(ones.numpy(), bitorder="little"))
    return (ones.view(-1, 8).to(torch.uint8) << _places(x.device)).sum(1, dtype=torch.uint8)


def unpack(bits: Tensor) -> Tensor:
    """Return +1 and -1."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(bits.numpy(), bitorder="little")).float().add_(-0.5).mul_(2.0)
    return ((bits[:, None] >> _places(bits.device)) & 1).view(-1).float().add_(-0.5).mul_(2.0)


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)


def encode(x: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compensate, take the scale, keep the error, pack."""
    c = x + error
    scale = torch.linalg.vector_norm(c) / math.sqrt(c.numel())
    error = c - scale * signs(c)
    return pack(c), scale, error


def encode_for_a_compiler(x: Tensor, buffer: Tensor, sent: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `sign_encode_feedback` does, written for a compiler."""
    b = x + (buffer - torch.where(buffer >= 0, sent, -sent))
    shifts = torch.arange(8, dtype=torch.int32, device=x.device)
    bits = ((b >= 0).view(-1, 8).to(torch.int32) << shifts).sum(1).to(torch.uint8)
    return b, bits, (b * b).sum()


def serve(bits: Tensor, scales: Tensor, error: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unpack W messages, average them, and encode the mean with feedback."""
    rows = torch.stack([unpack(b) for b in bits])
    return encode(rows.mul_(scales[:, None] / len(bits)).sum(0), error)


def decode(bits: Tensor, scales: Tensor) -> Tensor:
    """Unpack messages, each times its scale."""
    return torch.cat([unpack(b) * s for b, s in zip(bits, scales, strict=True)])


def quantize(x: Tensor, width: int, block: int) -> tuple[Tensor, Tensor]:
    """Return integer codes and what decodes them."""
    groups = x.view(-1, block)
    scale = 2.0 ** (width - 1) / groups.abs().amax(1, keepdim=True)
    codes = (groups * scale).round().clamp(-(2 ** (width - 1)), 2 ** (width - 1) - 1).to(torch.int8)
    return codes, 1.0 / scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Return numbers of integer codes."""
    return (codes.float() * scale).view(-1)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Return two codes a byte."""
    pairs = codes.view(-1, 2).to(torch.uint8)
    return ((pairs[:, 0] & 15) << 4) | (pairs[:, 1] & 15)


def int4_with_8bit_error(
    x: Tensor, error: Tensor, error_scale: Tensor, beta: float, block: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compensate, quantize to 4 bits, and keep a moving average of the error in 8."""
    e = dequantize(error, error_scale)
    h = x + e
    codes, scale = quantize(h, 4, block)
    kept = beta * e + (1 - beta) * (h - dequantize(codes, scale))
    return (pack_nibbles(codes), scale, *quantize(kept, 8, block))


class AllReduce:
    """The mean of one tensor over a group in codes, with four collectives: bits and scales travel apart."""

    def __init__(self, n: int, group: dist.ProcessGroup, device: torch.device | None = None):
        self.n, self.group, self.world = n, group, group.size()
        padded = -(-n // (self.world * 8)) * self.world * 8
        self.worker, self.server = (torch.zeros(size, device=device) for size in (padded, padded // self.world))

    def __call__(self, x: Tensor) -> Tensor:
        """(n,) -> (n,)."""
        padded = torch.cat([x, x.new_zeros(self.worker.numel() - self.n)])
        bits, scale, self.worker = encode(padded, self.worker)
        received = torch.empty_like(bits)
        dist.all_to_all_single(received, bits, group=self.group)
        bits, scale, self.server = serve(received.view(self.world, -1), self._gather(scale.view(1)), self.server)
        gathered = self._gather(bits).view(self.world, -1)
        return decode(gathered, self._gather(scale.view(1)))[: self.n]

    def _gather(self, x: Tensor) -> Tensor:
        found = [torch.empty_like(x) for _ in range(self.world)]
        dist.all_gather(found, x, group=self.group)
        return torch.cat(found)
