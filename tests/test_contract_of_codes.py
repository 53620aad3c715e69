"""The contract of methods that send codes of momenta: votes, differences, rows, cosines.

That of `test_contract` asks that zeros stay zero, which a vote cannot say.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import ranks
import torch
import torch.distributed as dist
from registry import CODES, Named
from simulated import World, form, gradients_of, normal, same, some_params
from torch import Tensor

import fn
from fn import Phase, tree
from fn.adapters import checkpoint

W, C = Phase.WARMUP, Phase.COMPRESSED
each = pytest.mark.parametrize("method", CODES, ids=[method.name for method in CODES])


@each
@pytest.mark.parametrize(("dtype", "world"), [(torch.bfloat16, 3), (torch.float32, 3), (torch.float64, 1)])
def test_phases_come_in_any_order_and_params_stay_alike_on_all_ranks(
    method: Named, dtype: torch.dtype, world: int
) -> None:
    w = World(method.make(0.02, axis="data", weight_decay=0.1), some_params(dtype), world)
    start = form((w.params, w.state))
    for phase in (C, W, C, W):
        before = w.params
        w.step(phase)
        assert form((w.params, w.state)) == start
        assert all(torch.isfinite(p).all() for p in w.params.values())
        assert not same(w.params, before)
    with pytest.raises(ValueError, match="has only WARMUP, COMPRESSED"):
        w.tx.update(Phase.LOCAL)


@each
@pytest.mark.parametrize("phase", [W, C])
@pytest.mark.parametrize(("bad", "name"), [(float("nan"), "matrix"), (float("inf"), "vector")])
def test_a_bad_gradient_on_any_rank_moves_nothing(method: Named, phase: Phase, bad: float, name: str) -> None:
    w = World(method.make(0.02, axis="data"), some_params()).step(W).step(C)
    g, params, inner = w.gradients(), w.params, w.state.inner
    g[name][1, 3] = bad
    w.step(phase, g)
    assert same(w.params, params)
    assert same(w.state.inner, inner)
    assert w.state.skipped == 1
    assert not same(w.step(phase).params, params)


QUICK = ("sign_muon", "powersgd_adamw", "dion", "lion_vote", "demo", "ef21_sgdm")
"""One of each kind of codes; the others find it in `make reliability-test`."""


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, id=m.name, marks=[pytest.mark.reliability] * (m.name not in QUICK)) for m in CODES],
)
def test_it_finds_the_common_minimum_of_ranks_that_pull_apart(method: Named) -> None:
    """By little: a majority finds the median of their minima."""
    lr, centers = torch.tensor(0.0), normal(6, 5) + 0.2 * normal(3, 6, 5)
    goal = centers.mean(0)
    w = World(method.make(lr, axis="data", weight_decay=0.0), {"matrix": goal + 1.0}, 3)
    schedule = fn.periodic(4)
    for t in range(80):
        lr.fill_(0.5 * (1 - t / 80))
        w.step(schedule(t), {"matrix": w.params["matrix"] - centers})
    assert (w.params["matrix"] - goal).square().mean() < 0.05


def on_real_ranks() -> dict[str, list[Tensor]]:
    """Return the params after steps of all methods on this rank of a real group."""
    found = {}
    with fn.bind({"data": dist.group.WORLD}):
        for method in CODES:
            tx, params = method.make(0.02, axis="data"), some_params(torch.float64)
            state = tx.init(params)
            for t, phase in enumerate((W, C, C, W, C)):
                g = gradients_of(params, dist.get_world_size(), t)
                own = tree.map(lambda x: x[dist.get_rank()], g)
                updates, state = tx.update(phase)(own, state, params)
                params = fn.apply_updates(params, updates)
            found[method.name] = [*params.values()]
    return found


def test_real_ranks_take_the_steps_of_simulated_ones() -> None:
    answers = ranks.run(3, on_real_ranks)
    for method in CODES:
        w = World(method.make(0.02, axis="data"), some_params(torch.float64), 3)
        for t, phase in enumerate((W, C, C, W, C)):
            w.step(phase, gradients_of(w.params, 3, t))
        for found in answers:
            torch.testing.assert_close(found[method.name], [*w.params.values()], rtol=0, atol=1e-9, msg=method.name)


def clipped_steps_between_compressed_ones() -> dict[str, list[Tensor]]:
    """Return the params after steps that are clipped; a warm-up step comes behind momenta that differ."""
    found = {}
    with fn.bind({"data": dist.group.WORLD}):
        for method in CODES:
            params = [torch.nn.Parameter(p) for p in some_params().values()]
            make_clipped = partial(method.make, axis="data")
            opt = fn.Optimizer(params, make_clipped, schedule=(W, C, C, W, C).__getitem__, lr=0.02, max_norm=0.5)
            for t in range(5):
                g = gradients_of(some_params(), dist.get_world_size(), t)
                for p, of_ranks in zip(params, g.values(), strict=True):
                    p.grad = of_ranks[dist.get_rank()]
                opt.step()
            found[method.name] = [p.detach() for p in params]
    return found


def test_ranks_stay_alike_where_a_clipped_warm_up_step_follows_compressed_ones() -> None:
    """Momenta of each rank's own are averaged in it, as without clipping; mean gradients alone leave them apart."""
    first, *others = ranks.run(2, clipped_steps_between_compressed_ones)
    for found in others:
        assert [name for name in first if not same(first[name], found[name])] == []


def optimizers() -> dict[str, fn.Optimizer]:
    found = {}
    for method in CODES:
        params = [torch.nn.Parameter(p) for p in some_params().values()]
        found[method.name] = fn.Optimizer(params, partial(method.make, axis="data"), schedule=method.schedule, lr=0.01)
    return found


def take(opt: fn.Optimizer, steps: int) -> None:
    for t in range(opt.steps, opt.steps + steps):
        generator = torch.Generator().manual_seed(100 * t + dist.get_rank())
        for p in opt.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()


def leaves(opt: fn.Optimizer) -> list[Tensor]:
    return [x.detach().clone() for x in (*opt.param_groups[0]["params"], *tree.leaves(opt.states))]


def momenta(opt: fn.Optimizer) -> list[Tensor]:
    return [x.clone() for moment in fn.roles.find(opt.states, "first_moment") for x in tree.leaves(moment)]


def saved(folder: Path) -> dict[str, tuple[bool, list[Tensor]]]:
    """Return for each method whether it goes on bit for bit from a state dict, and its momenta when it was saved."""
    found = {}
    with fn.bind({"data": dist.group.WORLD}):
        again = optimizers()
        for number, (name, opt) in enumerate(optimizers().items()):
            take(opt, 5)
            again[name].load_state_dict(opt.state_dict())
            with torch.no_grad():
                for p, q in zip(again[name].param_groups[0]["params"], opt.param_groups[0]["params"], strict=True):
                    p.copy_(q)
            checkpoint.save(folder / str(number), opt)
            then = momenta(opt)
            take(opt, 2)
            take(again[name], 2)
            found[name] = all(map(torch.equal, leaves(opt), leaves(again[name]))), then
    return found


def loaded(folder: Path) -> dict[str, tuple[bool, list[Tensor]]]:
    """Return for each method whether all ranks have the same params behind a step, and the momenta that it loaded."""
    found = {}
    with fn.bind({"data": dist.group.WORLD}):
        for number, (name, opt) in enumerate(optimizers().items()):
            checkpoint.load(folder / str(number), opt)
            then = momenta(opt)
            take(opt, 1)
            assert opt.skipped == 0
            first = fn.all_gather(torch.cat([p.detach().flatten() for p in opt.param_groups[0]["params"]]), "data")
            found[name] = bool((first == first[:1]).all()), then
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(2, 3)])
def test_a_run_goes_on_bit_for_bit_and_from_mean_momenta_on_another_number_of_ranks(
    old: int, new: int, tmp_path: Path
) -> None:
    before, after = ranks.run(old, saved, tmp_path), ranks.run(new, loaded, tmp_path)
    for name in (method.name for method in CODES):
        assert all(found[name][0] for found in (*before, *after)), name
        means = [mean_of(m) for m in zip(*(found[name][1] for found in before), strict=True)]
        after_it = [found[name][1] for found in after]
        if any(x.shape != y.shape for x, y in zip(*after_it[:2], strict=True)):  # of owners, on whatever ranks they are
            after_it = [[mean_of(m) for m in zip(*after_it, strict=True)]]
        for found in after_it:
            torch.testing.assert_close(found, means, msg=name)


def mean_of(momenta: Sequence[Tensor]) -> Tensor:
    """Return the mean of the ranks' momenta; of one that has an owner it is the owner's."""
    return torch.stack([m for m in momenta if m.shape == max(momenta, key=Tensor.numel).shape]).mean(0)
