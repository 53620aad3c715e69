"""Copies on the host of numbers that live on a device, for which the CPU stands in here."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fn.inplace import protocol
from fn.kernels import foreach


class There(torch.Tensor):
    """A tensor that says it is on a device, and counts how often it is read from there."""

    reads = 0
    device = SimpleNamespace(type="cuda")

    def cpu(self) -> torch.Tensor:
        There.reads += 1
        return self.as_subclass(torch.Tensor).clone()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_number_is_read_once_and_again_when_somebody_else_wrote_it(dtype):
    There.reads, x = 0, torch.zeros((), dtype=dtype).as_subclass(There)
    for _ in range(50):
        protocol.write(x, lambda weight: weight.mul_(0.9).add_(1 - 0.9))
        assert float(protocol.on_host(x)) == float(x.as_subclass(torch.Tensor))
    assert There.reads == 1
    x.copy_(torch.tensor(7.0))
    protocol.write(x, lambda weight: weight.mul_(2))
    assert float(protocol.on_host(x)) == 14.0
    assert There.reads == 2


def test_momenta_are_cleared_by_signs_as_by_a_mask():
    torch.manual_seed(0)
    m = [torch.randn(5), torch.randn(3, 4), torch.randn(0)]
    v = [(x * torch.randn_like(x)).clamp(min=0.0) for x in m]
    v[0][0], v[0][1] = 1e-45, float("inf")
    expected = [torch.where(b > 0, a, 0.0) for a, b in zip(m, v, strict=True)]
    signs = torch.sign(foreach.Many(v))
    found = (foreach.Many(m) * signs).tensors  # as `foreach.kept_at_zero` does on a device
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
