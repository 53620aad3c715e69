"""What `fn.contrib.signum_vote` promises beside the recorded runs and the common contract."""

from __future__ import annotations

import pytest
import torch
from simulated import normal, one_step

import fn


def test_without_servers_the_step_goes_along_the_mean_of_the_signs() -> None:
    g = normal(3, 7)
    tx = fn.contrib.signum_vote(0.1, axis="data", servers=False)
    torch.testing.assert_close(one_step(tx, g), -0.1 * g.sign().mean(0))


def test_bad_input_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"b: expected a number in \[0, 1\)"):
        fn.contrib.signum_vote(axis="data", b=1.0)
