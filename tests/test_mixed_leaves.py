"""Models with a 0-d leaf beside leaves of other dtypes, and rates in another dtype than the params.

Between 0-d tensors the wider dtype wins, where beside a tensor with dimensions it does not count. Not every combination
runs, but every pair of an optimizer's phase, a model, a rate and a number of ranks.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pairs import pairwise
from registry import PHASES, each_phase
from test_contract import World, form

import fn
from fn import Phase, tree
from fn.adapters.deepspeed import transforms as deepspeed

pytestmark = pytest.mark.slow

MODELS = {
    "bfloat16": {"t": torch.bfloat16, "w": torch.bfloat16},
    "float32 beside float64": {"t": torch.float32, "w": torch.float64},
    "float64 beside float32": {"t": torch.float64, "w": torch.float32},
}
RATES = {
    "float": 0.02,
    "float64": torch.tensor(0.02, dtype=torch.float64),
    "bfloat16": torch.tensor(0.02, dtype=torch.bfloat16),
}
SHAPES = {"t": (), "w": (5,)}


def model(dtypes: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
    return {name: torch.randn(SHAPES[name]).to(dtype) for name, dtype in dtypes.items()}


@pytest.mark.parametrize(("of_an_optimizer", "dtypes", "rate", "world"), pairwise(PHASES, MODELS, RATES, (1, 2)))
def test_params_and_state_keep_their_form(of_an_optimizer, dtypes, rate, world):
    optimizer, phase = PHASES[of_an_optimizer]
    w = World(optimizer, world, params=model(MODELS[dtypes]), lr=RATES[rate], weight_decay=0.1)
    start = form((w.params, w.state))
    for each in (phase, *reversed(optimizer.phases), phase):  # no variance step behind a local one
        w.step(each)
        assert form((w.params, w.state)) == start


@pytest.mark.parametrize(("dtypes", "rate", "frozen"), pairwise(MODELS, RATES, (False, True)))
def test_both_compressed_phases_of_deepspeeds_zero_one_adam_do(dtypes, rate, frozen):
    params = model(MODELS[dtypes])
    sync = fn.compressed_average("data", fn.sign())
    hyper = 0.9, 0.999, 1e-8, 0.1
    tx = deepspeed.scale_by_zero_one_adam(RATES[rate], *hyper, sync=sync, frozen=frozen, alone=False)
    state: Any = tx.init(params)
    start = form((params, state))
    for phase in (Phase.WARMUP, Phase.COMPRESSED, Phase.COMPRESSED):
        updates, state = tx.update(phase)(tree.map(torch.ones_like, params), state, params)
        assert form((fn.apply_updates(params, updates), state)) == start


@each_phase
def test_updates_do_not_take_the_dtype_of_the_rate(optimizer, phase):
    """Those of a float and of a 0-d float64 have the same dtypes."""
    params, found = model(MODELS["float32 beside float64"]), []
    for lr in (RATES["float"], RATES["float64"]):
        tx = optimizer.make(lr=lr, axis="data")
        updates, _ = tx.update(phase)(params, tx.init(params), params)
        found.append([u.dtype for u in tree.leaves(updates)])
    assert found[0] == found[1]
