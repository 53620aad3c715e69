"""Steps on a device other than the CPU, without one: no tensor of the CPU is mixed in."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import python
from torch.utils import backend_registration

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent
OF_EACH_KIND = ("adamw", "onebit_adam", "zero_one_adam", "sharded_onebit_adam", "muon, int8", "diloco, int8")
QUICK = ("adamw, warmup, clipped", "1-bit Adam, compressed, bias_correction=True", "0/1 Adam, local")


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot pretend to have a device",
)
@pytest.mark.parametrize(
    "names", [OF_EACH_KIND, pytest.param((), marks=pytest.mark.reliability)], ids=["of each kind", "every one"]
)
def test_steps_of_every_optimizer_stay_on_the_device_of_their_tensors(names):
    """For the others `test_default_device` shows what most faults are: a tensor that is made where it happens to be."""
    found = python(str(TESTS / "scripts" / "other_device.py"), *names)
    assert found.returncode == 0, found.stdout + found.stderr
    assert ", 0 did not" in found.stdout


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot pretend to have a device",
)
@pytest.mark.parametrize(
    "cases", [QUICK, pytest.param((), marks=pytest.mark.reliability, id="all")], ids=["quick", "all"]
)
def test_a_step_on_a_gpu_launches_and_waits_as_rarely_as_the_limits_say(cases):
    """Most warm-ups take a subset of what AdamW and steps in codes take, and sharded steps take long: reliability."""
    pytest.importorskip("triton", reason="triton is not installed")
    found = python("-W", "ignore", str(TESTS / "scripts" / "gpu_counts.py"), *cases)
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout.endswith("\n0 cost more than they may\n")


@pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot pretend to have a device",
)
def test_ledgers_and_observers_follow_a_backward_pass_into_the_thread_of_a_device_and_from_there_into_ours():
    found = python(str(TESTS / "scripts" / "device_thread.py"))
    assert found.returncode == 0, found.stdout + found.stderr
    assert found.stdout == "2 4 ['average']\n"
