"""A step on one rank may be differentiated; where ranks exchange, in codes too, it is refused, never silently zero."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

import fn
from fn import Phase

WARMUP, COMPRESSED, LOCAL = Phase.WARMUP, Phase.COMPRESSED, Phase.LOCAL
ONEBIT = [WARMUP, WARMUP, COMPRESSED, COMPRESSED]
MAKES: dict[str, tuple[Any, list[Phase]]] = {
    "adamw": (fn.adamw, [WARMUP] * 4),
    "lamb": (fn.lamb, [WARMUP] * 4),
    "onebit_adam": (partial(fn.onebit_adam, axis="data"), ONEBIT),
    "onebit_lamb": (partial(fn.onebit_lamb, axis="data"), ONEBIT),
    "zero_one_adam": (partial(fn.zero_one_adam, axis="data"), [WARMUP, COMPRESSED, LOCAL, COMPRESSED]),
    "loco_adamw": (partial(fn.loco_adamw, axis="data"), ONEBIT),
    "loco_adamw, fused": (partial(fn.loco_adamw, axis="data", layout="fused"), ONEBIT),
    "sharded_onebit_adam": (partial(fn.sharded_onebit_adam, axis="data"), ONEBIT),
}


def after_four_steps(name: str, lr: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    make, phases = MAKES[name]
    tx, params = make(lr=lr), {"w": w, "b": w[:3] * 2}
    state = tx.init({key: value.detach() for key, value in params.items()})
    for phase in phases:
        grads = {"w": torch.cos(params["w"]) + params["w"].sum(), "b": params["b"].sin()}
        updates, state = tx.update(phase)(grads, state, params)
        params = fn.apply_updates(params, updates)
    return params["w"].square().sum() + params["b"].pow(3).sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", MAKES)
def test_autograd_goes_through_the_steps_of_one_rank(name: str, dtype: torch.dtype) -> None:
    """As differences in float64 say; what kernels compute is no part of autograd's graph."""
    w = torch.linspace(-1, 2, 9, dtype=torch.float64)
    lr, d = torch.tensor(0.01, dtype=torch.float64), 1e-6
    by_lr = (after_four_steps(name, lr + d, w) - after_four_steps(name, lr - d, w)) / (2 * d)
    by_w = (after_four_steps(name, lr, w + d) - after_four_steps(name, lr, w - d)) / (2 * d)
    rate, start = lr.to(dtype).requires_grad_(), w.to(dtype).requires_grad_()
    found = torch.autograd.grad(after_four_steps(name, rate, start), [rate, start])
    torch.testing.assert_close(found[0].double(), by_lr, rtol=1e-3, atol=0)
    torch.testing.assert_close(found[1].double().sum(), by_w, rtol=1e-3, atol=0)


UPDATES: dict[str, tuple[Any, Phase]] = {
    "average": (lambda axis: fn.average(axis, fn.int8()), WARMUP),
    "signs": (lambda axis: fn.compressed_average(axis, fn.sign()), COMPRESSED),
    "no servers": (lambda axis: fn.compressed_average(axis, fn.sign(), servers=False), COMPRESSED),
    "no codes": (lambda axis: fn.compressed_average(axis, fn.identity()), COMPRESSED),
    "sharded": (lambda axis: fn.loco_adamw(axis=axis), WARMUP),
    "sharded in codes": (lambda axis: fn.loco_adamw(axis=axis), COMPRESSED),
}
REFUSED = "is not differentiable, as no collective is"


@pytest.mark.parametrize("leaves", [1, 2])
@pytest.mark.parametrize("name", UPDATES)
def test_a_simulation_refuses_to_differentiate_a_mean_in_codes(name: str, leaves: int) -> None:
    make, phase = UPDATES[name]
    params = [torch.ones(9) for _ in range(leaves)]

    def step(grads: list[torch.Tensor]) -> list[torch.Tensor]:
        tx = make("data")
        updates: list[torch.Tensor] = tx.update(phase)(grads, tx.init(params), params)[0]
        return updates

    run = fn.simulate(step, "data", 2, out_dims=None)
    grads = [torch.ones(2, 9, requires_grad=True) for _ in params]
    with torch.no_grad():
        run(grads)
    with pytest.raises(ValueError, match=REFUSED):
        run(grads)
