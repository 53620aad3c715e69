"""PyTorch's own descriptions of optimizers, `OptimizerInfo`, with `fn.Optimizer` as the optimizer they describe.

They bring constructor arguments, errors that a constructor must raise, and schedulers to run with.
"""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch

import fn

pytest.importorskip("expecttest", reason="torch.testing._internal needs expecttest")
from torch.testing._internal import common_optimizers as suite

ADAMW = next(info for info in suite.optim_db if info.optim_cls is torch.optim.AdamW)
TAKEN = {"lr", "betas", "eps", "weight_decay"}


class AdamW(fn.Optimizer):
    """`fn.adamw` with torch's arguments."""

    transform = staticmethod(fn.adamw)

    def __init__(self, params: Any, lr: Any = 1e-3, betas: Any = (0.9, 0.999), **more: Any):
        hyper = {"weight_decay": 1e-2, **more}
        super().__init__(params, self.transform, lr=lr, b1=betas[0], b2=betas[1], **hyper)


class Onebit(AdamW):
    """1-bit Adam on one rank, through its freeze."""

    @staticmethod
    def transform(**hyper: Any) -> fn.Transform:
        return fn.onebit_adam(axis="data", bias_correction=True, **hyper)

    def __init__(self, params: Any, **more: Any):
        super().__init__(params, **more)
        self.schedule = fn.freeze_after(5)


INFOS = [
    suite.OptimizerInfo(
        kind,
        optim_inputs_func=ADAMW.optim_inputs_func,
        optim_error_inputs_func=ADAMW.optim_error_inputs_func,
        scheduler_inputs=ADAMW.scheduler_inputs,
        supported_impls=(),
        supports_complex=False,
    )
    for kind in (AdamW, Onebit)
]
INPUTS = ADAMW.optim_inputs_func(device="cpu")
MIXED = "betas must be either both floats or both Tensors"  # a rule of torch's; here b1 and b2 are two arguments
ALL_ERRORS = ADAMW.optim_error_inputs_func("cpu", torch.float32)
ERRORS = [e for e in ALL_ERRORS if e.optimizer_error_input.desc != MIXED]

each_info = pytest.mark.parametrize("info", INFOS, ids=[info.name for info in INFOS])
USED = [given for given in INPUTS if set(given.kwargs) <= TAKEN]
each_used_input = pytest.mark.parametrize("given", USED, ids=[given.desc for given in USED])
each_input = pytest.mark.parametrize("given", INPUTS, ids=[given.desc for given in INPUTS])


def model(dtype: torch.dtype = torch.float64) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).to(dtype)


def descend(net: torch.nn.Module, opt: torch.optim.Optimizer, steps: int, schedulers: Any = ()) -> list[float]:
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(1)).to(next(net.parameters()).dtype)
    losses = []
    for _ in range(steps):

        def closure() -> torch.Tensor:
            opt.zero_grad()
            loss = (net(x) - x.sum(1, keepdim=True)).square().mean()
            loss.backward()
            return loss.detach()

        losses.append(float(opt.step(closure)))
        for scheduler in schedulers:
            plateau = isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)
            scheduler.step(losses[-1]) if plateau else scheduler.step()
    return losses


def supported(given: Any) -> bool:
    return set(given.kwargs) <= TAKEN


def test_the_suite_describes_something():
    assert len(USED) >= 3
    assert len(ERRORS) >= 8


@each_input
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_configuration_is_torchs_adamw_or_refused_by_name(given, dtype):
    ours, theirs = model(dtype), model(dtype)
    if not supported(given):
        with pytest.raises(TypeError, match="|".join(set(given.kwargs) - TAKEN)):
            AdamW(ours.parameters(), **given.kwargs)
        return
    descend(ours, AdamW(ours.parameters(), **given.kwargs), 20)
    descend(theirs, torch.optim.AdamW(theirs.parameters(), foreach=False, **given.kwargs), 20)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-11
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@each_info
@pytest.mark.parametrize("error", ERRORS, ids=[e.optimizer_error_input.desc for e in ERRORS])
def test_every_error_of_the_suite_is_an_error_here(info, error):
    given = error.optimizer_error_input
    params = given.params or [torch.nn.Parameter(torch.randn(2, 3))]
    if isinstance(params, list):  # groups take the defaults of the first optimizer that they are given to
        params = [{**entry} if isinstance(entry, dict) else entry for entry in params]
    kind = error.error_type if supported(given) else (TypeError, ValueError)
    with pytest.raises((kind, TypeError) if kind is FutureWarning else kind):  # of what torch will refuse one day
        info.optim_cls(params, **given.kwargs)


@pytest.mark.parametrize("error", [e for e in ALL_ERRORS if e not in ERRORS])
def test_what_only_torch_refuses_trains_like_plain_numbers(error):
    given = error.optimizer_error_input.kwargs
    first, second = model(), model()
    found = descend(first, AdamW(first.parameters(), **given), 5)
    numbers = {**given, "betas": [float(b) for b in given["betas"]]}
    torch.testing.assert_close(found, descend(second, AdamW(second.parameters(), **numbers), 5))


@each_info
@each_used_input
def test_it_goes_in_the_right_direction_with_every_scheduler(info, given):
    for schedulers in [(), *info.scheduler_inputs]:
        net = model()
        opt = info.optim_cls(net.parameters(), **{**given.kwargs, "lr": 0.02})
        losses = descend(net, opt, 60, [make(opt) for make in schedulers])
        assert losses[-1] < losses[0] / 2


@each_info
@each_used_input
def test_a_state_dict_goes_through_a_file_that_loads_with_weights_only(info, given):
    net = model()
    opt = info.optim_cls(net.parameters(), **given.kwargs)
    descend(net, opt, 8)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(net)
    resumed = info.optim_cls(other.parameters(), **given.kwargs)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert descend(net, opt, 8) == descend(other, resumed, 8)


@each_info
@each_used_input
def test_a_deep_copy_goes_on_alone_and_alike(info, given):
    net = model()
    opt = info.optim_cls(net.parameters(), **given.kwargs)
    descend(net, opt, 4)
    other, copied = copy.deepcopy((net, opt))
    assert copied.param_groups[0]["params"][0] is next(other.parameters())
    assert vars(copied).keys() == vars(opt).keys()
    for p, q in zip(net.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)
    for group in copied.param_groups:
        group["lr"] *= 1.0
    assert descend(net, opt, 8) == descend(other, copied, 8)
    before = [p.clone() for p in net.parameters()]
    copied.param_groups[0]["lr"] = 0.5
    descend(other, copied, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # for 1-bit Adam it comes after the warm-up
        copied.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert all(map(torch.equal, before, net.parameters()))
    assert opt.param_groups[0]["lr"] != 0.5
    assert len(opt.param_groups) == 1


@each_info
def test_a_step_without_gradients_changes_nothing(info):
    net = model()
    opt = info.optim_cls(net.parameters(), lr=0.1)
    before = [p.clone() for p in net.parameters()]
    opt.step()
    assert all(map(torch.equal, before, net.parameters()))


@each_info
def test_groups_with_weight_decay_decay_and_the_others_do_not(info):
    kept, decayed = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    opt = info.optim_cls([{"params": [kept], "weight_decay": 0.0}, {"params": [decayed], "weight_decay": 0.9}], lr=0.1)
    for _ in range(7):
        for p in (kept, decayed):
            p.grad = torch.zeros(3)
        opt.step()
    assert torch.equal(kept, torch.ones(3))
    torch.testing.assert_close(decayed, torch.full((3,), (1 - 0.1 * 0.9) ** 7))
