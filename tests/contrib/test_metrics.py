"""The metrics of a step, against what can be computed from states and vectors, and beside a profiler's ranges."""

from __future__ import annotations

from functools import partial
from typing import Any

import chains
import ddp_cases
import pytest
import ranks
import torch
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, tree
from fn.adapters.ddp import overlap
from fn.adapters.drift import check_drift
from fn.collectives import transports
from fn.collectives.axis import Axis, Binding
from fn.contrib.metrics import StepMetrics, watch

SHAPES = [(5, 3), (7,), (40, 8)]
WARM = 2


def echo() -> Binding:
    """Bind "data" to two ranks, of which the other one says whatever this one says."""
    pair = transports.Transport(
        all_to_all=lambda x: x, all_gather=lambda x: x.expand(2, *x.shape), psum=lambda x: x.mul_(2)
    )
    return Binding({"data": Axis(2, torch.tensor(0), transports.register("echo of metrics", pair))})


def build(make: Any, binding: Any, **options: Any) -> tuple[list[torch.nn.Parameter], fn.Optimizer]:
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s)) for s in SHAPES]
    schedule = options.pop("schedule", fn.freeze_after(WARM))
    with binding:
        opt = fn.Optimizer(params, make, schedule=schedule, lr=1e-2, refuse_averaged=False, **options)
    return params, opt


def set_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def train(params: list[torch.nn.Parameter], opt: fn.Optimizer, steps: int) -> None:
    for _ in range(steps):
        set_gradients(params, opt.steps)
        opt.step()


def ranges(params: list[torch.nn.Parameter], opt: fn.Optimizer) -> dict[str, int]:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        train(params, opt, 1)
    return {e.key: e.count for e in profile.key_averages() if e.key.startswith("fn: ")}


def profiled() -> tuple[dict[str, int], dict[str, int], list[StepMetrics]]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    params, opt = build(partial(fn.onebit_adam, axis="data"), fn.bind(mesh))
    found: list[StepMetrics] = []
    watch(opt, found.append)
    warm = ranges(params, opt)
    train(params, opt, 1)
    return warm, ranges(params, opt), found


@pytest.mark.slow
def test_a_profiler_and_a_callback_see_the_steps_of_real_ranks() -> None:
    for warm, compressed, found in ranks.run(2, profiled):
        assert warm.keys() == {"fn: average", "fn: apply"}
        assert {"fn: encode", "fn: exchange", "fn: gather"} <= compressed.keys()
        assert compressed.keys() & {"fn: decode", "fn: decode and apply"}
        assert [m.phase for m in found] == [Phase.WARMUP, Phase.WARMUP, Phase.COMPRESSED]
        n = sum(torch.Size(s).numel() for s in SHAPES)
        assert found[0].bytes >= 4 * n > 8 * found[2].bytes > 0
        assert min(found[2].wire_seconds, found[2].encode_seconds, found[2].decode_seconds) > 0


MAKES = {
    "onebit_adam": (partial(fn.onebit_adam, axis="data"), {}),
    "onebit_adam in two steps": (partial(fn.onebit_adam, axis="data", codec=fn.int8(), feedback=fn.classic()), {}),
    "loco_adamw": (partial(fn.loco_adamw, axis="data"), {}),
}


@pytest.mark.parametrize("name", MAKES)
def test_watching_changes_nothing(name: str) -> None:
    results = []
    for watched in (True, False):
        params, opt = build(MAKES[name][0], echo())
        found: list[StepMetrics] = []
        if watched:
            watch(opt, found.append)
        train(params, opt, 6)
        results.append([*params, *tree.leaves(opt.states)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    params, opt = build(MAKES[name][0], echo())
    watch(opt, found.append)
    train(params, opt, 6)
    for m in found:
        if m.phase is Phase.COMPRESSED:
            assert 0 < m.compression_error < 1
            assert m.error_norm > 0
        else:
            assert (m.compression_error, m.error_norm) == (None, None)


def test_the_errors_are_those_of_the_state_and_of_the_momentum() -> None:
    """With plain errors: error_norm is the state's, and c is the momentum plus the old error."""
    make = partial(chains.onebit_adam, axis="data", b1=0.9, feedback=fn.classic(), layout="per_tensor")
    params, opt = build(make, echo())
    found: list[StepMetrics] = []
    watch(opt, found.append)
    train(params, opt, 4)
    old = [e.clone() for e in tree.leaves(tree.fields(opt.states, "worker"))]
    mu = [m.clone() for m in tree.leaves(tree.fields(opt.states, "mu"))]
    train(params, opt, 1)
    new = tree.leaves(tree.fields(opt.states, "worker"))
    own = tree.leaves(tree.fields(opt.states, "server"))
    norm = torch.cat([e.double() for e in [*new, *own]]).norm()
    assert found[-1].error_norm == pytest.approx(float(norm), rel=1e-5)
    encoded, share = 0.0, 0.1 / (1 - 0.9**5)  # of the fifth gradient in a momentum that is bias-corrected
    for m, p, e in zip(mu, params, old, strict=True):
        x = torch.zeros(e.shape)
        x[: m.numel()] = (m + share * (p.grad - m)).flatten()
        encoded += float((x.double() + e.double()).square().sum())
    lost = torch.cat([e.double() for e in new]).norm()
    assert found[-1].compression_error == pytest.approx(float(lost) / encoded**0.5, rel=1e-4)


def test_every_skips_and_removal() -> None:
    params, opt = build(partial(fn.onebit_adam, axis="data"), echo())
    found: list[StepMetrics] = []
    handle = watch(opt, found.append, every=2)
    train(params, opt, 4)
    set_gradients(params, 4)
    params[0].grad[0] = float("nan")
    opt.step()
    assert [(m.step, m.skipped) for m in found] == [(0, 0), (2, 0), (4, 1)]
    assert (found[-1].compression_error, found[-1].error_norm) == (None, None)
    assert found[-1].bytes > 0
    handle.remove()
    train(params, opt, 2)
    assert len(found) == 3
    with pytest.raises(ValueError, match=r"every: .*got 0"):
        watch(opt, found.append, every=0)
    with pytest.raises(TypeError, match=r"optimizer: .*got SGD"):
        watch(torch.optim.SGD([torch.ones(2)]), found.append)


def test_local_steps_that_are_dropped_are_told() -> None:
    params = [torch.nn.Parameter(torch.ones(3))]
    opt = fn.Optimizer(params, partial(fn.diloco, axis="data"), schedule=fn.every(4), lr=0.01)
    found: list[StepMetrics] = []
    watch(opt, found.append)
    for value in (1.0, float("nan"), float("nan")):
        params[0].grad = torch.full((3,), value)
        opt.step()
    assert [(m.skipped, m.dropped) for m in found] == [(0, 0), (0, 1), (0, 2)]


def test_a_step_that_raises_leaves_nothing_open() -> None:
    params, opt = build(partial(fn.onebit_adam, axis="data"), echo())
    found: list[StepMetrics] = []
    watch(opt, found.append)
    train(params, opt, 1)
    with fn.ledger() as sent:
        params[0].grad = torch.zeros(5, 3).to_sparse()
        with pytest.raises((TypeError, fn.RanksDisagree)):
            opt.step()
    before = sent.total
    train(params, opt, 2)
    assert sent.total == before  # the ledger that was left is the one that was entered
    assert [m.step for m in found] == [0, 1, 2]


def overlapped(checked: bool) -> list[StepMetrics]:
    model = ddp_cases.wrapped()
    opt = ddp_cases.build(model)
    overlap(model, opt, least_wire_seconds=0.0)
    found: list[StepMetrics] = []
    watch(opt, found.append)
    if checked:
        check_drift(opt, every=2)
    for step in range(5):
        opt.zero_grad()
        model(ddp_cases.batch(step)).square().mean().backward()
        opt.step()
    return found


@pytest.mark.parametrize("checked", [False, True])
def test_what_happens_behind_the_backward_pass_is_not_made_up(checked: bool) -> None:
    """The bytes of a drift check, which this thread sends, are not taken for those of the step."""
    for found in ranks.run(2, overlapped, checked):
        assert [m.step for m in found] == [0, 1, 2, 3, 4]
        assert {m[2:3] + m[5:] for m in found} == {(None,) * 6}
