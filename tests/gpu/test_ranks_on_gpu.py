"""Two processes on one device, over gloo or FN_TEST_BACKEND: overlap, DDP, plain modules, averaged gradients, FSDP2."""

from __future__ import annotations

import functools

import pytest
from gpu_device import device
from rank_checks import CHECKS, on_two_ranks

HERE = device()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(HERE is None, reason="no accelerator is here; FN_TEST_DEVICE=cpu proves the tests themselves"),
]


@functools.cache
def answer(name: str) -> str | None:
    """Return what is wrong. All checks share two processes; behind the first fault each has its own."""
    found = all_together().get(name, "")
    return found if found is None else on_two_ranks([name], HERE)[name]


@functools.cache
def all_together() -> dict[str, str | None]:
    return on_two_ranks(list(CHECKS), HERE)


@pytest.mark.parametrize("name", CHECKS)
def test_two_ranks_on_one_device(name):
    assert answer(name) is None
