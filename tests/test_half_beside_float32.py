"""A bfloat16 model whose norms are float32, in one param group: every named optimizer takes all of its phases."""

from __future__ import annotations

from typing import Any

import pytest
import ranks
import torch
from registry import EVERY, Named, each_of_all
from test_contract import World, form
from test_ranks import bound

import fn


def model() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(8, 8, generator=generator).bfloat16()
    return {"norm": torch.ones(8), "weight": weight, "bias": torch.zeros(8, dtype=torch.bfloat16)}


@each_of_all
def test_in_simulated_ranks(optimizer: Named) -> None:
    if optimizer.divided:
        pytest.skip("its params are shards of real ranks")
    w = World(optimizer, params=model())
    start = form((w.params, w.state))
    for phase in (*optimizer.phases, *optimizer.phases[1:]):
        w.step(phase)
        assert form((w.params, w.state)) == start
        assert all(p.isfinite().all() for p in w.params.values())
    assert all((p.float() != model()[name].float()).any() for name, p in w.params.items())


def each_in_turn() -> dict[str, Any]:
    """Return the params of every optimizer after a few steps on two processes."""
    found = {}
    with bound():
        for optimizer in EVERY:
            if optimizer.divided:
                continue
            params = [torch.nn.Parameter(p) for p in model().values()]
            make = lambda o=optimizer, **k: o.make(axis="data", **k)  # noqa: E731
            phases = [*optimizer.phases[:1] * 2, *optimizer.phases[1:] * 2]
            opt = fn.Optimizer(params, make, schedule=phases.__getitem__, lr=optimizer.lr)
            for step in range(len(phases)):
                generator = torch.Generator().manual_seed(step + 100 * torch.distributed.get_rank())
                for p in params:
                    p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
                opt.step()
            found[optimizer.name] = [p.detach().float() for p in params]
    return found


def test_behind_the_adapter_on_two_processes() -> None:
    first, second = ranks.run(2, each_in_turn)
    for optimizer in EVERY:
        if optimizer.divided:
            continue
        ours, theirs = first[optimizer.name], second[optimizer.name]
        assert all(p.isfinite().all() for p in ours), optimizer.name
        if optimizer.replicated:
            assert all(map(torch.equal, ours, theirs)), optimizer.name


AT_ONCE, LATE = fn.freeze_after(0), fn.every(1, delay=1)


@pytest.mark.parametrize(
    ("make", "schedule"), [(fn.muon, AT_ONCE), (fn.sign_muon, AT_ONCE), (fn.late(fn.sign_muon), LATE)]
)
def test_steps_below_the_spacing_of_bfloat16_add_up(make: Any, schedule: Any) -> None:
    """What rounding drops comes with the next update, and goes where another hand writes smaller params.

    Differs: fn.muon_optimizers.muon: Of params in half precision, what rounding drops is added to the next step;
        `torch.optim.Muon` loses it.
    """
    lr = torch.tensor(0.01)
    tx, found = make(lr, axis="data", weight_decay=0.0), {}
    for dtype in (torch.float32, torch.bfloat16):
        p = {"weight": torch.ones(8, 8, dtype=dtype), "norm": torch.ones(8)}
        state = tx.init(p)
        for t in range(30):
            updates, state = tx.update(schedule(t))({name: torch.ones_like(x) for name, x in p.items()}, state, p)
            p = fn.apply_updates(p, updates)
        found[dtype] = p
    wide, half = found.values()
    assert (wide["weight"] < 0.991).all()
    assert torch.equal(wide["norm"], half["norm"])
    torch.testing.assert_close(half["weight"].float(), wide["weight"], rtol=0, atol=0.003)
    small = {"weight": torch.full((8, 8), 2.0**-20).bfloat16(), "norm": torch.ones(8)}
    lr.fill_(0.0)
    updates, _ = tx.update(schedule(30))(small, state, small)
    assert torch.equal(fn.apply_updates(small, updates)["weight"], small["weight"])

    theirs = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    opt = torch.optim.Muon([theirs], lr=0.01, weight_decay=0.0)
    for _ in range(30):
        theirs.grad = torch.ones_like(theirs)
        opt.step()
    assert torch.equal(theirs, torch.ones_like(theirs))
