"""Parameters in channels_last, and others without gaps, take their steps as they lie in memory."""

from __future__ import annotations

from functools import partial
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn.adapters import checkpoint
from fn.adapters.optim import step
from fn.inplace.element_order import as_shaped, in_order, order_of, read_in_order
from fn.inplace.match import takes_any_order

LAST = torch.channels_last
BFLOAT16 = torch.bfloat16
PHASES = [fn.Phase.WARMUP] * 3 + [fn.Phase.COMPRESSED] * 3
MAKES = {
    "adamw": partial(fn.adamw, weight_decay=0.01),
    "1-bit Adam": partial(fn.onebit_adam, weight_decay=0.01),
    "1-bit Adam, bias correction": partial(fn.onebit_adam, bias_correction=True),
    "1-bit LAMB": partial(fn.onebit_lamb, weight_decay=0.01),
    "0/1 Adam": fn.zero_one_adam,
    "sharded": fn.loco_adamw,
}


@given(st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=4, max_size=4))
@settings(deadline=None, max_examples=100)
def test_an_order_makes_a_contiguous_view_and_is_taken_back(dims, sizes):
    x = torch.arange(float(torch.tensor(sizes).prod())).view(sizes).permute(dims)
    order = order_of(x)
    (view,) = in_order([x], [order])
    assert view.is_contiguous()
    assert view.data_ptr() == x.data_ptr()
    (back,) = as_shaped([view], [order])
    assert (back.shape, back.stride()) == (x.shape, x.stride())
    (read,) = read_in_order([view.reshape(-1).view(x.shape)], [order])
    assert torch.equal(read, x)


def test_what_has_gaps_or_lies_upon_itself_has_no_order():
    assert order_of(torch.ones(4, 6)[:, ::2]) == ()
    assert order_of(torch.ones(1, 3).expand(2, 3)) == ()
    assert order_of(torch.ones(3, 2).t()) == (1, 0)


def test_a_link_of_ones_own_may_see_shapes():
    own = fn.Transform(lambda p: (), *[lambda u, s, p: (u, s)] * 3)
    behind = fn.scale_by_adam(), fn.scale_by_learning_rate(0.1)
    assert takes_any_order(fn.chain(fn.clip_by_global_norm(1.0), *behind))
    assert not takes_any_order(fn.chain(own, *behind))
    assert not takes_any_order(fn.skip_nonfinite(fn.scale_by_muon()))
    for make in MAKES.values():
        assert takes_any_order(make(0.1, axis="data"))


def tensors() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 3, 3, 3), (8,), (4, 8, 2, 2), (7, 5)]
    return [torch.randn(shape, generator=generator) for shape in shapes]


def laid(x: Tensor, form: str) -> Tensor:
    """Return a tensor as it lies: by channels or columns; as a contiguous twin of that, of another shape; as it was."""
    order = {4: (0, 2, 3, 1), 2: (1, 0)}.get(x.dim(), (0,))
    twin = x.permute(order).contiguous()
    return {"strided": as_shaped([twin], [order])[0], "twin": twin, "plain": x.clone()}[form]


def give(params: list[nn.Parameter], form: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
    for p, x in zip(params, tensors(), strict=True):
        p.grad = laid(torch.randn(x.shape, generator=generator), form).to(p.dtype)


def optimizer(make, form: str, dtype: torch.dtype = torch.float32) -> tuple[fn.Optimizer, list[nn.Parameter]]:
    params = [nn.Parameter(laid(x, form).to(dtype)) for x in tensors()]
    schedule = None if make is MAKES["adamw"] else PHASES.__getitem__
    return fn.Optimizer(params, partial(make, axis="data"), schedule=schedule, lr=1e-2), params


def trained(make, form: str, dtype: torch.dtype, *, pure: bool = False):
    """Return the params on this rank after a few steps, how many of them were in place, and how many were skipped."""
    opt, params = optimizer(make, form, dtype)
    strides, here = [p.stride() for p in params], 0
    for t in range(len(PHASES)):
        give(params, form, t)
        if pure:
            opt.training.updates[opt.phase] = step.update_of(opt.training, opt.phase)._replace(in_place=None)
        with mock.patch.object(step, "commit", wraps=step.commit) as written:
            opt.step()
        here += written.call_count
    assert strides == [p.stride() for p in params]
    assert [x.stride() for x in opt.training.states[0].inner[1].mu] == strides if make is MAKES["adamw"] else True
    return [p.detach().clone() for p in params], here, opt.skipped


def axis(size: int):
    return fn.bind(init_device_mesh("cpu", (size,), mesh_dim_names=("data",)))


def each() -> dict:
    with axis(2):
        return {
            (name, dtype): (
                trained(make, "strided", dtype),
                trained(make, "twin", dtype),
                trained(make, "strided", dtype, pure=True),
            )
            for name, make in MAKES.items()
            for dtype in (torch.float32, BFLOAT16)
        }


@pytest.fixture(scope="module")
def answers():
    return ranks.run(2, each)


@pytest.mark.parametrize("dtype", [torch.float32, BFLOAT16], ids=str)
@pytest.mark.parametrize("name", MAKES)
def test_steps_as_tensors_lie_are_those_of_a_contiguous_twin_and_the_pure_ones(answers, name, dtype):
    (place, *counts), (twin, *_), (pure, *others) = answers[0][name, dtype]
    assert (counts, others) == ([len(PHASES), 0], [0, 0])
    for mine, other, theirs in zip(place, twin, answers[1][name, dtype][0][0], strict=True):
        assert torch.equal(laid(mine, "twin"), other)
        assert torch.equal(mine, theirs)
    if (name, dtype) != ("0/1 Adam", BFLOAT16):  # rounded params of local steps are sent, and signs of rounding differ
        bound = 2e-2 if dtype is BFLOAT16 else 2e-6
        torch.testing.assert_close(place, pure, rtol=bound, atol=bound)


def continued() -> list:
    """Save before the last step and continue in another layout; return the params, and those of the one that was saved.

    There and back: the order of the errors stays the one they were saved in.
    """
    found = []
    with axis(2):
        for before, after in (("strided", "plain"), ("plain", "strided"), ("strided", "strided")):
            for make in (MAKES["1-bit Adam"], MAKES["sharded"]):
                opt, params = optimizer(make, before)
                other, others = optimizer(make, after)
                for t in range(len(PHASES)):
                    if t == len(PHASES) - 1:
                        other.load_state_dict(opt.state_dict())
                        with torch.no_grad():
                            for p, q in zip(others, params, strict=True):
                                p.copy_(q)
                    give(params, before, t)
                    opt.step()
                give(others, after, len(PHASES) - 1)
                other.step()
                pairs = zip(opt.state_dict().items(), other.state_dict().items(), strict=True)
                states = [(a, x, y) for (a, x), (_, y) in pairs]
                found.append(([p.detach() for p in params], [p.detach() for p in others], states))
    return found


def test_a_state_continues_in_another_layout():
    for params, others, states in ranks.run(2, continued)[1]:
        torch.testing.assert_close(others, params, rtol=2e-6, atol=2e-6)
        for path, x, y in states:
            torch.testing.assert_close(y, x, rtol=2e-5, atol=2e-5, msg=lambda text, path=path: f"{path}: {text}")


def in_8_bits(lr: float, axis: str):
    links = fn.scale_by_adam(), fn.scale_by_learning_rate(lr)
    return fn.chain(fn.average(axis, fn.int4(), fn.damped()), *links)


def saved(folder: str) -> None:
    with axis(2):
        for form in ("strided", "twin"):
            for name, make in {"signs": MAKES["1-bit Adam"], "8 bits": in_8_bits}.items():
                opt, params = optimizer(make, form)
                for t in range(5 if name == "signs" else 3):
                    give(params, form, t)
                    opt.step()
                checkpoint.save(f"{folder}/{name} {form}", opt)


def loaded(folder: str) -> dict:
    found = {}
    with axis(3):
        for form in ("strided", "twin"):
            for name, make in {"signs": MAKES["1-bit Adam"], "8 bits": in_8_bits}.items():
                opt, params = optimizer(make, form)
                checkpoint.load(f"{folder}/{name} {form}", opt)
                give(params, form, 5)
                rests = [x.clone() for each in opt.residual_gradients for x in each]
                opt.step()
                found[name, form] = [p.detach() for p in params], rests
    return found


def test_a_checkpoint_of_another_world_moves_errors_in_their_order(tmp_path):
    ranks.run(2, saved, str(tmp_path))
    found = ranks.run(3, loaded, str(tmp_path))[2]
    assert any(bool(x.any()) for x in found["8 bits", "strided"][1])
    for name in ("signs", "8 bits"):
        for mine, twins in zip(found[name, "strided"], found[name, "twin"], strict=True):
            for x, twin in zip(mine, twins, strict=True):
                assert torch.equal(laid(x, "twin"), twin)


def differing() -> str:
    form = "strided" if dist.get_rank() else "plain"
    with axis(2), pytest.raises(fn.RanksDisagree) as told:
        optimizer(MAKES["1-bit Adam"], form)
    return str(told.value)


def test_ranks_whose_parameters_lie_otherwise_are_refused_by_name():
    for text in ranks.run(2, differing):
        assert "order in memory of the dimensions of parameter 0 in group 0" in text
        assert "(0, 2, 3, 1)" in text
