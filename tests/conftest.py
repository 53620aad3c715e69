"""Strict surroundings: fixed seeds, one thread, warnings are errors, and no test leaves a binding behind."""

from __future__ import annotations

import gc
import os
import random

import hypothesis
import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from fn.collectives import axis, profiling

hypothesis.settings.register_profile(
    "fn", deadline=None, max_examples=25, derandomize=True, database=None, print_blob=False
)
hypothesis.settings.load_profile("fn")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
torch.set_num_threads(1)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("filterwarnings", "error")
    # Raised inside the compilers of torch and Triton and inside torch's profiler, which are not ours to mend.
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:torch.*")
    config.addinivalue_line("filterwarnings", "ignore::FutureWarning:torch.*")
    config.addinivalue_line("filterwarnings", "ignore::DeprecationWarning:triton.*")
    config.addinivalue_line("filterwarnings", "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Leave out what collection makes from the rounds of the garbage collector: each would take half a second."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("reliability"):
            item.add_marker("slow")
    # Files with slow tests come first, so that no core waits for a long one at the end. Files stay whole: their tests
    # share what is costly.
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.fixture(autouse=True)
def seeds() -> None:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Every test starts and ends with no axis bound and no ledger or observer open, outside of any group."""
    assert "WORLD_SIZE" not in os.environ
    yield
    assert axis._bound.axes == {}
    assert not profiling._watching
    assert not torch.distributed.is_initialized()


class Graphs:
    """A compiler that runs graphs as they are and counts them: `torch.compile(f, backend=graphs)`.

    backend: of torch, which the graphs go through.
    """

    def __init__(self) -> None:
        self.count, self.backend = 0, "eager"

    def __call__(self, graph: torch.fx.GraphModule, example_inputs: list[torch.Tensor]):
        self.count += 1
        return torch._dynamo.lookup_backend(self.backend)(graph, example_inputs)


@pytest.fixture
def graphs():
    """A counting compiler in a fresh dynamo: closures of one factory share a code object and its cache."""
    torch._dynamo.reset()
    counters.clear()
    yield Graphs()
    torch._dynamo.reset()
    gc.collect()
