"""Scaled losses and clipping over two gloo ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_cases import MAKES, arrays, backward, build, same, wrapped
from ranks import Cases
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import fn
from fn import tree
from fn.adapters.ddp import average_gradients, keep_local, overlap
from fn.adapters.optim.gradients import unscaled

case = Cases(2)
SCALERS = {
    "GradScaler": partial(torch.amp.GradScaler, "cpu", init_scale=2.0**10, growth_interval=2),
    "ShardedGradScaler": partial(ShardedGradScaler, "cpu", init_scale=2.0**10, growth_interval=2),
}
WAYS = [("serial", "GradScaler"), ("serial", "ShardedGradScaler"), ("overlap", "GradScaler"), ("average", "GradScaler")]


class Setup:
    """A model, its optimizer, and a scaler or none."""

    def __init__(self, way: str, scaler: Any = None):
        self.model, self.scaler = wrapped(), scaler
        if way == "average":
            mean = average_gradients(self.model, fn.sign(), schedule=fn.freeze_after(3), scaler=scaler, elements=300)
            self.opt: Any = torch.optim.AdamW(self.model.parameters(), lr=0.01)
            self.errors = lambda: (mean.states, mean.skipped)
            return
        self.opt = build(self.model)
        self.errors = lambda: (tree.fields(self.opt.states, "sync"), self.opt.skipped)
        if way == "overlap":
            overlap(self.model, self.opt, scaler=scaler, least_wire_seconds=0.0)
        else:
            keep_local(self.model)

    def step(self, t: int, unscale: bool = False, inf: bool = False) -> None:
        scale = 1.0 if self.scaler is None else float(self.scaler.scale(torch.ones(())))
        backward(self.model, t, accumulate=2, scale=float("inf") if inf else scale)
        if self.scaler is None:
            self.opt.step()
        else:
            if unscale:
                self.scaler.unscale_(self.opt)
            self.scaler.step(self.opt)
            self.scaler.update()
        self.opt.zero_grad()

    def end(self) -> list[Any]:
        return arrays(list(self.model.parameters()), self.errors()[0])


@case
def scaled() -> dict[tuple, tuple[bool, float]]:
    """A scale that changes with every second step, against none."""
    found = {}
    for way, name in WAYS:
        plain, with_scale = Setup(way), Setup(way, SCALERS[name]())
        for t in range(7):
            plain.step(t)
            with_scale.step(t, unscale=name == "ShardedGradScaler" or t % 2 == 0)
        found[way, name] = same(plain.end(), with_scale.end()), with_scale.scaler.get_scale()
    return found


@pytest.mark.parametrize(("way", "scaler"), WAYS)
def test_the_scale_leaves_no_trace_in_parameters_and_errors(way, scaler):
    """A power of two divides exactly, so bit for bit; it grows in between, which scaled errors would remember."""
    for found in case.answer("scaled"):
        equal, scale = found[way, scaler]
        assert equal
        assert scale > 2.0**10


@case
def with_inf() -> dict[tuple, Any]:
    """An Inf on rank 1, in the warm-up and in the compressed phase."""
    found = {}
    for way, name in WAYS:
        setup = Setup(way, SCALERS[name]())
        unchanged = []
        for t in range(7):
            before = setup.end()
            setup.step(t, unscale=name == "ShardedGradScaler", inf=t in (2, 5) and dist.get_rank() == 1)
            unchanged.append(same(before, setup.end()))
        found[way, name] = unchanged, setup.errors()[1], setup.end()[: len(list(setup.model.parameters()))]
    return found


@pytest.mark.parametrize(("way", "scaler"), WAYS)
def test_an_inf_on_one_rank_makes_all_skip_together_and_leaves_errors_untouched(way, scaler):
    first, second = (found[way, scaler] for found in case.answer("with_inf"))
    for unchanged, skipped, params in (first, second):
        assert unchanged == [False, False, True, False, False, True, False]
        assert skipped == 2
        assert all(torch.from_numpy(p).isfinite().all() for p in params)
    assert same(first[2], second[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_gradients_are_unscaled_in_full_precision(dtype):
    grads = ([torch.tensor([3.0, 5e-5]).to(dtype)],)
    (found,) = unscaled(grads, torch.tensor(4096.0), torch.zeros(1))[0]
    assert found.dtype == (torch.float32 if dtype == torch.float16 else dtype)
    torch.testing.assert_close(found, (grads[0][0].double() / 4096).to(found.dtype))
    assert unscaled(grads, None, torch.zeros(1)) is grads
    assert unscaled(grads, None, None) is grads
    assert unscaled(grads, None, torch.ones(1))[0][0].isnan().all()


# Clipping.

SHAPES = [(6, 5), (7,), ()]


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [(4.0 if step % 2 else 0.01) * torch.randn(shape, generator=generator) for shape in SHAPES]


def norm(grads: list[torch.Tensor]) -> float:
    return float(torch.cat([g.double().flatten() for g in grads]).norm())


@case
def clips() -> tuple[list, list, list[float]]:
    return against_clipping_by_hand(MAKES["onebit_adam"], exact_steps=4)


@case
def clips_in_codes() -> tuple[list, list, list[float]]:
    return against_clipping_by_hand(partial(MAKES["onebit_adam"], warmup=fn.int8()), exact_steps=0)


@case
def clips_shards() -> tuple[list, list, list[float]]:
    return against_clipping_by_hand(partial(fn.sharded_onebit_adam, axis="data"), exact_steps=4)


@case
def clips_shards_of_gradients() -> tuple[list, list, list[float]]:
    return against_clipping_by_hand(partial(fn.loco_adamw, axis="data"), exact_steps=4)


def against_clipping_by_hand(make: Any, exact_steps: int) -> tuple[list, list, list[float]]:
    """Return where an optimizer ends, where it ends with gradients that were clipped by hand, and by what factors."""
    ends, factors = [], []
    for by_hand in (False, True):
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        with fn.bind({"data": dist.group.WORLD}):
            opt = fn.Optimizer(
                [{"params": params[:1]}, {"params": params[1:]}],
                make,
                schedule=fn.freeze_after(4),
                lr=0.01,
                max_norm=None if by_hand else 1.0,
            )
        for t in range(8):
            ranks = [gradients(t, rank) for rank in range(2)]
            own = ranks[dist.get_rank()]
            if by_hand:
                mean = [(a + b) / 2 for a, b in zip(*ranks, strict=True)]
                bound = norm(mean) if t < exact_steps else ((norm(ranks[0]) ** 2 + norm(ranks[1]) ** 2) / 2) ** 0.5
                factors.append(min(1.0, 1.0 / (bound + 1e-6)))
                own = [g * factors[-1] for g in own]
            for p, g in zip(params, own, strict=True):
                p.grad = g
            opt.step()
        ends.append([p.detach().numpy().copy() for p in params])
    return *ends, factors


@pytest.mark.parametrize("name", ["clips", "clips_in_codes", "clips_shards", "clips_shards_of_gradients"])
def test_the_norm_is_global_over_groups_and_ranks_and_all_clip_by_the_same_factor(name):
    """Of the averaged gradient in an exact warm-up; of the mean square elsewhere, an upper bound of it."""
    for found, expected, factors in case.answer(name):
        assert sorted(f < 1.0 for f in factors) == [False] * 4 + [True] * 4
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(a), torch.from_numpy(b), rtol=1e-5, atol=1e-6)
    first, second = case.answer(name)
    assert same(first[0], second[0])


@case
def clips_inf() -> list[int]:
    params = [torch.nn.Parameter(torch.ones(4))]
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(params, MAKES["onebit_adam"], schedule=fn.freeze_after(2), lr=0.01, max_norm=1.0)
    for t in range(5):
        bad = t in (1, 3) and dist.get_rank() == 0
        params[0].grad = torch.full((4,), float("inf") if bad else 1.0 + dist.get_rank())
        opt.step()
    return [opt.skipped, int(params[0].isfinite().all())]


def test_a_norm_that_is_not_finite_skips_the_step_on_all_ranks():
    assert case.answer("clips_inf") == [[2, 1], [2, 1]]


def test_one_rank_clips_like_torch():
    ours, theirs = ([torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES] for _ in range(2))
    opt = fn.Optimizer(ours, fn.adamw, lr=0.01, max_norm=0.5)
    reference = torch.optim.AdamW(theirs, lr=0.01)
    for t in range(5):
        for params in (ours, theirs):
            for p, g in zip(params, gradients(t, 0), strict=True):
                p.grad = g
        torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        opt.step()
        reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_a_norm_that_is_not_positive_is_refused(bad):
    with pytest.raises(ValueError, match="max_norm: expected a number above 0, but got"):
        fn.Optimizer([torch.nn.Parameter(torch.ones(2))], fn.adamw, max_norm=bad)


@pytest.mark.parametrize("devices", [[["cuda:0"], ["cpu"]], [["cuda:0", "cuda:1"]], [["cuda:0"], ["cuda:1"]]])
def test_gradients_on_several_devices_are_unscaled_where_they_are(devices):
    with FakeTensorMode():
        grads = tuple([torch.ones(3, device=device) for device in group] for group in devices)
        found = unscaled(grads, torch.tensor(2.0, device=devices[0][0]), None)
    assert [[str(x.device) for x in group] for group in found] == devices
