"""Alpha and beta from timings, and coding without a wire."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fn
from fn.planner import traffic
from fn.planner.methods import methods
from fn.planner.network import Cost, network
from fn.tools.calibrate import SIZES, call, coding, fit, flops, memory, nowhere


@given(st.floats(1e-6, 1e-2), st.floats(1e-12, 1e-6))
def test_exact_timings_give_back_their_line(latency, byte_time):
    a, b = fit(SIZES, [latency + byte_time * size for size in SIZES])
    assert b == pytest.approx(byte_time, rel=1e-3)
    assert a == pytest.approx(latency, rel=1e-3, abs=1e-6 * byte_time * SIZES[-1])


def test_timings_without_latency_and_without_slope():
    assert fit([1, 2, 4], [0.5, 2.0, 6.0])[0] == 0.0
    assert fit([1, 2, 1000], [1.0, 1.0, 1e3]) == pytest.approx((0.0, 1.0), abs=2e-3)  # the large message counts
    a, b = fit([1, 1000], [2.0, 2.0])
    assert a == pytest.approx(2.0)
    assert b < 1e-9


@pytest.mark.parametrize(("sizes", "times"), [([4, 4], [1.0, 1.0]), ([1, 2], [0.0, 1.0])])
def test_what_cannot_be_fitted(sizes, times):
    with pytest.raises(ValueError, match="two different sizes or more, and times above 0"):
        fit(sizes, times)


def test_messages_to_nowhere_come_back():
    with nowhere("data", 3):
        x = torch.arange(6.0).view(3, 2)
        assert fn.all_to_all(x, "data").equal(x)
        assert fn.all_gather(x, "data").equal(x.expand(3, 3, 2))
        assert fn.pmean(x, "data").allclose(x)


CODED = ("onebit", "zero_one", "loco", "sharded_onebit", "adamw, int", "adamw, fp8")


def test_coding_is_measured_for_the_methods_that_code():
    net = network(8, 4, Cost(0, 1), Cost(0, 1))
    found = coding(10**6, torch.device("cpu"), repeat=1)(net)
    assert min(found.values()) > 0
    coded = {m.name for m in methods(traffic.model(10**6), net) if m.name.startswith(CODED)}
    assert coded | {f"{name} (two-level)" for name in coded} == set(found)
    for name in ("onebit_adam", "onebit_adam, int8"):
        assert found[f"{name} (two-level)"] == pytest.approx(found[name] / 4)  # of shards
    direct = "onebit_adam, servers=False"
    assert found[f"{direct} (two-level)"] <= found[direct] / 4  # of shards, and the codes of two ranks, not of eight
    assert memory(torch.device("cpu"), repeat=1) > 1e8
    assert call(torch.device("cpu"), repeat=1) > 0
    assert flops(torch.device("cpu"), repeat=1) > 1e6
