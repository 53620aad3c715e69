"""Bias correction: AdamW's steps, with a second moment that is held; and states in the other form."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import chains
import pytest
import torch

import fn
from fn import Phase

STEPS, LR, DECAY = 20, 0.05, 0.1
EXACT = {"axis": "data", "b2": 0.999, "codec": fn.identity(), "max_step": None}
W, C, L = Phase.WARMUP, Phase.COMPRESSED, Phase.LOCAL
MAKES: dict[str, tuple[Callable[..., fn.Transform], Phase, float]] = {
    "onebit_adam": (partial(fn.onebit_adam, **EXACT), C, DECAY),
    "sharded_onebit_adam": (partial(fn.sharded_onebit_adam, **EXACT), C, DECAY),
    # of 0/1 Adam a synchronising step sets the momentum, and the decay of local steps comes with it
    "zero_one_adam": (partial(fn.zero_one_adam, **EXACT), L, 0.0),
}


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def adamws(decay: float, held: Callable[[int], bool]) -> torch.Tensor:
    """Return the params after each step of torch's AdamW, whose second moment is held in some steps."""
    p, found = torch.nn.Parameter(torch.ones(6, dtype=torch.float64)), []
    m, v, refreshed = torch.zeros_like(p), torch.zeros_like(p), 0
    adamw = torch.optim.AdamW([p], lr=LR, weight_decay=decay)
    for t, g in enumerate(gradients()):
        m = 0.9 * m + 0.1 * g
        if not held(t):
            v, refreshed = 0.999 * v + 0.001 * g**2, refreshed + 1
        p.grad = g
        before = p.detach().clone()
        adamw.step()
        if refreshed != t + 1:  # torch holds none
            u = m / (1 - 0.9 ** (t + 1)) / ((v / (1 - 0.999**refreshed)).sqrt() + 1e-8)
            p.data = before - LR * (u + decay * before)
        found.append(p.detach().clone())
    return torch.stack(found)


@pytest.mark.parametrize("warm", [1, 8], ids="a warm-up of {}".format)
@pytest.mark.parametrize("name", MAKES)
def test_the_first_steps_are_adamws_where_ranks_agree_and_codes_are_exact(name: str, warm: int) -> None:
    """Frozen moments are those of the steps before, and as large as they should be.

    Differs: fn.optimizers.onebit_adam: Moments are bias-corrected.
    Differs: fn.optimizers.sharded_onebit_adam: Moments are bias-corrected.
    Differs: fn.zero_one_optimizers.zero_one_adam: Moments are bias-corrected.
    """
    make, behind, decay = MAKES[name]
    tx, grads = make(LR, weight_decay=decay), gradients()

    def train(start: torch.Tensor) -> torch.Tensor:
        p, found = start, []
        state = tx.init(p)
        for t, g in enumerate(grads):
            u, state = tx.update(W if t < warm else behind)(g, state, p)
            p = fn.apply_updates(p, u)
            found.append(p)
        return torch.stack(found)

    ours = fn.simulate(train, "data", 2)(torch.ones(2, 6, dtype=torch.float64))
    torch.testing.assert_close(ours[1], adamws(decay, lambda t: t >= warm), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("make", [chains.onebit_adam, chains.zero_one_adam])
@pytest.mark.parametrize("corrected", [False, True])
def test_a_state_in_the_other_form_is_refused_with_the_cure(make: Any, corrected: bool) -> None:
    p = torch.nn.Parameter(torch.ones(3))
    this, other = (partial(make, axis="data", bias_correction=flag) for flag in (corrected, not corrected))
    tx = this()
    for phase in (W, C):
        with pytest.raises(ValueError, match=r"state: expected moments .*; make the optimizer as it was when"):
            tx.update(phase)(torch.ones(3), other().init(torch.ones(3)), torch.ones(3))
    saved = fn.Optimizer([p], other, schedule=lambda t: W).state_dict()
    with pytest.raises(ValueError, match=r"ages.0' is .*; moments are bias-corrected in one of the two only"):
        fn.Optimizer([p], this, schedule=lambda t: W).load_state_dict(saved)
