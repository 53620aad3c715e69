"""The profiler's ranges, and a ledger and an observer around what other threads do."""

from __future__ import annotations

import ddp_cases
import ranks
import torch

import fn
from fn.adapters.ddp import overlap
from fn.collectives.profiling import Observer, step_range


def test_ranges_are_eager_only() -> None:
    """Nothing of the ranges is traced, though a profiler is on while it is."""

    def f(x: torch.Tensor) -> torch.Tensor:
        with step_range("encode"):
            return x + 1

    observer = Observer().start()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as profile:
        torch.compile(f, fullgraph=True, backend="eager")(torch.ones(2))
        torch.func.vmap(f)(torch.ones(2, 2))
        graph = torch.fx.experimental.proxy_tensor.make_fx(f)(torch.ones(2))
        assert observer.seconds == {}
        f(torch.ones(2))
    observer.stop()
    assert "record_function" not in graph.code
    assert [e.count for e in profile.key_averages() if e.key == "fn: encode"] == [1]
    assert observer.seconds.keys() == {"encode"}


def watched_backward() -> list[tuple[int, int, list[str]]]:
    """Return what a ledger and an observer around each backward pass saw, beside what the step sent."""
    model = ddp_cases.wrapped()
    opt = ddp_cases.build(model)
    running, found = overlap(model, opt, least_wire_seconds=0.0), []
    for step in range(6):
        opt.zero_grad()
        loss, phase = model(ddp_cases.batch(step)).square().mean(), opt.phase
        seen = Observer().start()
        with fn.ledger() as sent:
            loss.backward()
        seen.stop()
        opt.step()
        found.append((sent.total, running.bytes[phase], sorted(seen.seconds)))
    return found


def test_a_ledger_and_an_observer_around_a_backward_pass_see_what_other_threads_send_behind_it() -> None:
    for found in ranks.run(2, watched_backward):
        assert all(counted == sent > 0 for counted, sent, _ in found)
        assert found[0][2] == ["average"]
        assert found[-1][2] == ["encode", "exchange", "gather", "serve"]
