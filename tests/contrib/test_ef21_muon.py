"""What `fn.contrib.ef21_muon` promises beside the recorded runs and the common contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated import normal, one_step

import fn
from fn import Phase

W, C = Phase.WARMUP, Phase.COMPRESSED


def test_other_tensors_step_along_signs() -> None:
    """A rate of 0.2 makes them as long as Muon's steps."""
    assert one_step(fn.contrib.ef21_muon(0.1, axis="data"), normal(3, 7)).abs().max() == pytest.approx(0.02)


def test_ranks_may_send_directions_that_each_has_orthogonalised() -> None:
    g = normal(2, 6, 5)
    tx = fn.contrib.ef21_muon(0.1, 1.0, axis="data", codec=fn.identity(), sends="directions")
    each = [fn.orthogonalize(eps=1e-7, scale="rms_norm", coefficients="jordan").local_update(x, (), x)[0] for x in g]
    torch.testing.assert_close(one_step(tx, g), -0.1 * torch.stack(each).mean(0))


@pytest.mark.parametrize(
    ("make", "kind", "match"),
    [
        (lambda: fn.contrib.ef21_muon(axis="data", sends=1), ValueError, "sends: expected .momenta. or .directions."),
        (lambda: fn.contrib.ef21_muon(axis="data", eta=0.0), ValueError, "eta: expected"),
        (
            lambda: fn.contrib.ef21_muon(axis=("local", "node")),
            ValueError,
            "feedback: expected .* to have a single axis",
        ),
    ],
)
def test_what_is_wrong_is_named(make: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        make()
