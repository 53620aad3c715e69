"""Weight decay and the learning rate."""

from __future__ import annotations

import pytest
import torch

import fn
from fn import Phase


@pytest.mark.parametrize("phase", list(Phase))
def test_decay_adds_the_weights_as_they_are_before_the_step(phase):
    p, u = [torch.tensor([2.0, -4.0])], [torch.tensor([1.0, 1.0])]
    found, _ = fn.add_decayed_weights(0.5).update(phase)(u, (), p)
    assert torch.equal(found[0], torch.tensor([2.0, -1.0]))
    found, _ = fn.add_decayed_weights(0.0).update(phase)(u, (), p)
    assert found[0] is u[0]


@pytest.mark.parametrize("lr", [0.25, torch.tensor(0.25)])
def test_the_learning_rate_descends(lr):
    u = [torch.tensor([1.0, -2.0])]
    found, _ = fn.scale_by_learning_rate(lr).warmup_update(u, (), u)
    assert torch.equal(found[0], torch.tensor([-0.25, 0.5]))


def test_a_tensor_that_is_filled_in_place_takes_effect_in_the_next_update():
    lr = torch.tensor(1.0)
    tx = fn.scale_by_learning_rate(lr)
    u = [torch.ones(2)]
    lr.fill_(3.0)
    assert torch.equal(tx.warmup_update(u, (), u)[0][0], torch.full((2,), -3.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_learning_rate_tensor_does_not_change_the_dtype_of_updates(dtype):
    u = [torch.ones(2, dtype=dtype)]
    for lr in (torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64)):
        assert fn.scale_by_learning_rate(lr).warmup_update(u, (), u)[0][0].dtype == dtype


def test_learning_rates_may_be_vmapped_one_per_seed():
    u = torch.ones(3)
    found = torch.func.vmap(lambda lr: fn.scale_by_learning_rate(lr).warmup_update([u], (), [u])[0][0])(
        torch.arange(4.0)
    )
    assert torch.equal(found, -torch.arange(4.0)[:, None].expand(4, 3))


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: fn.scale_by_learning_rate(-0.1), "lr: .*got -0.1"),
        (lambda: fn.scale_by_learning_rate(torch.ones(1)), r"lr: .*shape \(1,\)"),
        (lambda: fn.scale_by_learning_rate(torch.ones(2)), r"lr: .*shape \(2,\)"),
        (lambda: fn.add_decayed_weights(-0.1), "weight_decay: .*got -0.1"),
        (lambda: fn.adamw(lr=-1.0), "lr: .*got -1.0"),
        (lambda: fn.onebit_adam(axis="data", weight_decay=-1.0), "weight_decay: .*got -1.0"),
    ],
)
def test_arguments_out_of_range_are_refused_by_name(make, name):
    with pytest.raises(ValueError, match=name):
        make()


def test_cautious_decay_rests_where_the_update_leads_away_from_zero() -> None:
    """u + wd p where u p >= 0, also where one of them is 0; a NaN stays one."""
    p = torch.tensor([1.0, 1.0, -1.0, -1.0, 2.0, 0.0, 3.0])
    u = torch.tensor([0.5, -0.5, 0.5, -0.5, 0.0, 1.0, torch.nan])
    out, _ = fn.add_decayed_weights(0.1, cautious=True).local_update(u, (), p)
    expected = torch.tensor([0.6, -0.5, 0.5, -0.6, 0.2, 1.0, torch.nan])
    torch.testing.assert_close(out, expected, equal_nan=True)
