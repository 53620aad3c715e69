"""The grid: every dtype, layout and size against the float64 loop over ranks, on two of gloo.

Every pair of a size, a dtype and a layout occurs. Two compressed steps follow a warm-up step, so that both errors of
the compressed mean have been sent once.
"""

from __future__ import annotations

import functools
from functools import partial

import oracle
import pytest
import ranks
import torch
import torch.distributed as dist
from pairs import pairwise
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase

pytestmark = pytest.mark.slow

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
LAYOUTS = ("contiguous", "strided", "expanded")
SIZES = (0, 1, 7, 8, 9, 1023)
LARGE = 2**20 + 3
PHASES = (Phase.WARMUP, Phase.COMPRESSED, Phase.COMPRESSED)
HYPER = {"b1": 0.5, "b2": 0.9, "eps": 1e-3, "weight_decay": 0.01}
LR = 0.05
TOLERANCE = {torch.float64: 1e-14, torch.float32: 5e-7, torch.float16: 1e-3, torch.bfloat16: 6e-3}
"""Allowed difference of a parameter, of magnitude below 1: roundings of three steps."""


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return x (..., n), or for `expanded` its first number n times, in memory of its own."""
    if layout == "strided":
        return torch.stack([x, torch.full_like(x, float("nan"))], -1)[..., 0]
    if layout == "expanded":
        one = x[..., :1] if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)
        return one.expand(x.shape).clone()
    return x.clone()


def start(n: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n)
    return laid_out((0.3 * torch.rand(n, generator=generator) - 0.15).to(dtype), layout)


def gradients(t: int, world: int, n: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    """Return (W, n) numbers away from zero, whose ranks agree on the sign in the warm-up: no second moment is tiny.

    The ranks' magnitudes differ, so that their codes do not cancel.
    """
    generator = torch.Generator().manual_seed(1000 * n + 10 * t + world)
    magnitude = (0.5 + torch.rand(world, n, generator=generator)) * 1.3 ** torch.arange(world)[:, None]
    sign = torch.where(torch.rand(world if t else 1, n, generator=generator) < 0.5, -1.0, 1.0)
    return laid_out((magnitude * sign).to(dtype), layout)


def expected(world: int, n: int, dtype: torch.dtype, layout: str) -> torch.Tensor:
    named = {"block": 64, "max_step": 3.0, "bias_correction": True}
    loop = oracle.OnebitAdam([start(n, dtype, layout).double().numpy()], world, LR, **HYPER, **named)
    for t, phase in enumerate(PHASES):
        g = gradients(t, world, n, dtype, layout).double().numpy()
        loop.step([[each] for each in g], phase is Phase.COMPRESSED)
    return torch.from_numpy(loop.params[0])


def distance(found: torch.Tensor, loop: torch.Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Return the largest difference, and the share of the numbers that differ by more than roundings."""
    if not loop.numel():
        return 0.0, 0.0
    gap = (found.double() - loop).abs()
    return float(gap.max()), float((gap > TOLERANCE[dtype]).double().mean())


def check(found: torch.Tensor, case: tuple) -> None:
    """Allow roundings, and in long vectors a few sums that round to the other side of zero: the other code is sent."""
    _, n, dtype, layout = case
    assert found.dtype == dtype
    assert found.shape == (n,)
    assert bool(torch.isfinite(found).all())
    loop = expected(*case)
    worst, share = distance(found, loop, dtype)
    flips = 3e-3 if dtype.itemsize == 2 else 1e-5
    assert share <= (flips if n > 9 else 0.0), f"{share:.2%} differ, by up to {worst}"
    if n > 1 and layout != "expanded":
        assert float((loop - start(n, dtype, layout).double()).abs().max()) > 10 * TOLERANCE[dtype]


def trained(n: int, dtype: torch.dtype, layout: str) -> tuple[torch.Tensor, bool, int]:
    """Return the parameter after the steps on this rank, whether it kept its memory, and the skipped steps."""
    p = torch.nn.Parameter(start(n, dtype, layout))
    place, stride = p.data_ptr(), p.stride()
    make = partial(fn.onebit_adam, axis="data", **HYPER)
    opt = fn.Optimizer([p], make, schedule=PHASES.__getitem__, lr=LR)
    for t in range(len(PHASES)):
        g = gradients(t, 2, n, dtype, layout)[dist.get_rank()]
        p.grad = g[:1].expand(n) if layout == "expanded" and n else g  # of stride 0
        opt.step()
    return p.detach().contiguous(), (place, stride) == (p.data_ptr(), p.stride()), opt.skipped


REAL = (*pairwise(SIZES, DTYPES, LAYOUTS), *((LARGE, d, LAYOUTS[i % 3]) for i, d in enumerate(DTYPES)))


def all_trained() -> list[tuple]:
    with fn.bind(init_device_mesh("cpu", (2,), mesh_dim_names=("data",))):
        return [trained(*case) for case in REAL]


@functools.cache
def answers() -> list[list[tuple]]:
    return ranks.run(2, all_trained)


@pytest.mark.parametrize("i", range(len(REAL)), ids=["-".join(map(str, case)) for case in REAL])
def test_two_processes_follow_the_loop_bitwise_alike_and_in_place(i):
    (first, kept, skipped), (second, also, missed) = (found[i] for found in answers())
    assert torch.equal(first, second)
    assert (kept, also, skipped, missed) == (True, True, 0, 0)
    check(first, (2, *REAL[i]))
