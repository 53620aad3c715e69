"""Whole steps of every optimizer on the device: like the CPU's, in place like pure, compiled like eager, or skipped."""

from __future__ import annotations

import pytest
from gpu_device import device
from step_checks import CASES, CHECKS, compiled_like_eager, pairs

HERE = device()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(HERE is None, reason="no accelerator is here; FN_TEST_DEVICE=cpu proves the tests themselves"),
    pytest.mark.filterwarnings("ignore:(eps|gradients|params):"),
]


@pytest.mark.parametrize(("what", "name"), [pair for pair in pairs() if "compiled" not in pair[0]])
def test_steps_are_what_they_should_be(what, name):
    assert CHECKS[what](name, HERE) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_compiled_steps_are_the_eager_ones(name):
    backend = "aot_eager" if HERE.type == "cpu" else "inductor"  # on a CPU only the test itself is in question
    assert compiled_like_eager(name, HERE, backend) is None
