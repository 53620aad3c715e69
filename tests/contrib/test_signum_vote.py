"""What `fn.contrib.signum_vote` promises beside the recorded runs and the common contract."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from recorded_codes import Case, Made, in_simulation, load
from simulated import normal, one_step

import fn


def test_without_servers_the_step_goes_along_the_mean_of_the_signs() -> None:
    g = normal(3, 7)
    tx = fn.contrib.signum_vote(0.1, axis="data", servers=False)
    torch.testing.assert_close(one_step(tx, g), -0.1 * g.sign().mean(0))


def test_bad_input_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"b: expected a number in \[0, 1\)"):
        fn.contrib.signum_vote(axis="data", b=1.0)


def recorded(case: Case) -> Made:
    h = case.hyper
    tx = fn.contrib.signum_vote(h["lr"], h["betas"][0], h["weight_decay"], axis="data", ties=h["ties"])
    return tx, lambda before, after, g: {"mu": after.inner[0].mu}, None


RECORDED = load(Path(__file__).parent / "golden/signum_vote", "index.json")


@pytest.mark.parametrize("case", RECORDED, ids=[case.row["name"] for case in RECORDED])
def test_the_recorded_run_is_replayed_in_simulated_ranks(case: Case) -> None:
    assert 0 < case.off(in_simulation(case, recorded(case))) <= 1
