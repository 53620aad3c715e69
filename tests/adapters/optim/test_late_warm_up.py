"""Parameters and steps that come when the warm-up should be over: nothing stops, and nothing is divided by zero."""

from __future__ import annotations

from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist

import fn
from fn import Phase, tree

COMPRESSING = [fn.onebit_adam, fn.onebit_lamb, fn.sharded_onebit_adam]


two = ranks.Cases(2)


@two
def goes_on_with_a_late_group() -> list[tuple[int, float, float, bool]]:
    """A group joins after the freeze: return skipped steps, how far both groups moved, whether all is finite."""
    found = []
    for make in COMPRESSING:
        torch.manual_seed(dist.get_rank())
        params = [torch.nn.Parameter(torch.ones(9)) for _ in range(2)]
        with fn.bind({"data": dist.group.WORLD}):
            opt = fn.Optimizer(params[:1], partial(make, axis="data"), schedule=fn.freeze_after(3), lr=0.01)
            for step in range(8):
                if step == 5:
                    before = params[0].detach().clone()
                    with pytest.warns(UserWarning, match="params: come after the warm-up"):
                        opt.add_param_group({"params": params[1:]})
                for p in params[: len(opt.param_groups)]:
                    p.grad = 1 + torch.randn(9)
                opt.step()
        moved = [float((p.detach() - start).abs().max()) for p, start in ((params[0], before), (params[1], 1.0))]
        found.append((opt.skipped, *moved, all(bool(x.isfinite().all()) for x in tree.leaves(opt.states))))
    return found


def test_a_group_that_comes_after_the_freeze_does_not_stop_the_others():
    for answers in two.answer("goes_on_with_a_late_group"):
        for skipped, first, late, finite in answers:
            assert skipped == 0
            assert first > 0.001
            assert late == 0
            assert finite


@pytest.mark.parametrize("make", COMPRESSING)
def test_a_group_that_comes_after_the_freeze_trains_after_another_warm_up(make):
    asked = [Phase.WARMUP] * 3 + [Phase.COMPRESSED] * 2 + [Phase.WARMUP] * 2 + [Phase.COMPRESSED] * 2
    params, moved = [torch.nn.Parameter(torch.ones(9)) for _ in range(2)], []
    opt = fn.Optimizer(params[:1], partial(make, axis="data"), schedule=asked.__getitem__, lr=0.01)
    for step in range(len(asked)):
        if step == 5:
            opt.add_param_group({"params": params[1:]})
        before = [p.detach().clone() for p in params]
        for p in params[: len(opt.param_groups)]:
            p.grad = torch.linspace(0.5, 1.5, 9)
        opt.step()
        moved.append([not torch.equal(p, old) for p, old in zip(params, before, strict=True)])
    assert moved == [[True, False]] * 5 + [[True, True]] * 4


@two
def warm_up_after_overflows() -> list[tuple[int, list[Phase], bool]]:
    found = []
    for make in (fn.onebit_adam, fn.zero_one_adam):
        p = torch.nn.Parameter(torch.ones(9))
        schedule, phases = (lambda t: Phase.WARMUP if t < 2 else Phase.COMPRESSED), []
        with fn.bind({"data": dist.group.WORLD}):
            opt = fn.Optimizer([p], partial(make, axis="data"), schedule=schedule, refuse_averaged=False)
        for step in range(6):
            p.grad = torch.full((9,), float("inf") if step < 4 and dist.get_rank() == 1 else 0.5)
            phases.append(opt.phase)
            opt.step()
        found.append((opt.skipped, phases, bool((p != 1).all() and p.isfinite().all())))
    return found


def test_a_warm_up_lasts_until_a_step_was_taken():
    """A loss scale that starts too high overflows in the first steps, in all of a short warm-up."""
    for answers in two.answer("warm_up_after_overflows"):
        for skipped, phases, moved in answers:
            assert skipped == 4
            assert phases == [Phase.WARMUP] * 5 + [Phase.COMPRESSED]
            assert moved
