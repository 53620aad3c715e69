"""A checkpoint that a follower writes: a new world, of as many ranks or others, goes on from the log of the old one."""

from __future__ import annotations

import tempfile
import warnings
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

import fn
from fn.adapters import checkpoint
from fn.adapters.follow import Follower, publish

SAVED, LOST, MORE = 24, 40, 40
CASES: dict[str, Any] = {
    "onebit_adam": (fn.onebit_adam, fn.freeze_after(10), 1e-2),
    "owned muon": (fn.muon, fn.freeze_after(0), 2e-2),
    "loco_adamw": (fn.loco_adamw, fn.freeze_after(4), 1e-2),
    "diloco": (partial(fn.diloco, codec=fn.int8(), rounds=20), fn.every(4), 1e-2),
}


def make_of(name):
    return partial(CASES[name][0], axis="data")


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16), torch.nn.Linear(16, 8)
    )


def optimizer(net, name):
    with fn.bind({"data": dist.group.WORLD}):
        return fn.Optimizer(net.named_parameters(), make_of(name), schedule=CASES[name][1], lr=CASES[name][2])


def batch(step, rank):
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
    return x, x[:, :8].sin()


def train(net, opt, steps):
    for step in steps:
        x, y = batch(step, dist.get_rank())
        opt.zero_grad()
        (net(x) - y).square().mean().backward()
        opt.step()


@torch.no_grad()
def loss_of(net, opt):
    with fn.adapters.agreed_params(opt):
        return sum((net(x) - y).square().mean().item() for x, y in (batch(10_000 + i, 0) for i in range(8))) / 8


def agreed(net, opt):
    with fn.adapters.agreed_params(opt):
        return [p.detach().clone() for p in net.parameters()]


def agreed_state(opt):
    """Return what all ranks have alike in the state, by path."""
    marks = fn.tree.by_path(fn.roles.kinds(opt.states))
    return {path: x.clone() for path, x in fn.tree.by_path(opt.states).items() if marks[path] == fn.roles.SAME}


def whole(folder):
    """Train without a loss of anything; return what ranks agreed on behind `LOST` steps, and losses there and then."""
    torch.set_num_threads(1)
    found = {}
    for name in CASES:
        net = model()
        opt = optimizer(net, name)
        published = publish(opt, f"{folder}/{name}/log", snapshot_every=16, digest_every=4)
        train(net, opt, range(SAVED))
        checkpoint.save(f"{folder}/{name}/checkpoints", opt)
        train(net, opt, range(SAVED, LOST))
        if published is not None:
            published.close()
        there = agreed(net, opt), agreed_state(opt), loss_of(net, opt)
        train(net, opt, range(LOST, LOST + MORE))
        found[name] = *there, loss_of(net, opt)
    return found


@cache
def runs():
    folder = tempfile.mkdtemp()
    return ranks.run(2, whole, folder)[0], folder


def gone_on(name, folder):
    """Load a checkpoint into other parameters, and train on; return what was loaded, and losses then and at the end."""
    torch.set_num_threads(1)
    net = model(seed=1)
    opt = optimizer(net, name)
    checkpoint.load(folder, opt)
    found = opt.steps, agreed(net, opt), agreed_state(opt), loss_of(net, opt)
    train(net, opt, range(LOST, LOST + MORE))
    return *found, loss_of(net, opt)


@pytest.mark.parametrize("with_checkpoint", [True, False], ids=["an old checkpoint", "none"])
@pytest.mark.parametrize("name", CASES)
def test_a_new_world_goes_on_from_what_a_follower_heard(name, with_checkpoint, tmp_path):
    runs_found, folder = runs()
    params, state, before, at_the_end = runs_found[name]
    follower = Follower(f"{folder}/{name}/log", model(seed=2), make_of(name))
    follower.to(LOST - 1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        written = follower.checkpoint(tmp_path, f"{folder}/{name}/checkpoints" if with_checkpoint else None)
    assert written.parent == tmp_path
    text = " ".join(str(w.message) for w in said)
    assert ("16 steps old" in text) == (with_checkpoint and name != "onebit_adam"), text
    for world in (2, 3):
        steps, loaded, loaded_state, after, end = ranks.run(world, gone_on, name, str(tmp_path))[0]
        assert steps == LOST
        assert all(map(torch.equal, loaded, params))
        assert loaded_state.keys() == state.keys()
        assert {path for path, x in state.items() if not torch.equal(x, loaded_state[path])} == set()
        assert after == pytest.approx(before, rel=1e-5)
        # What a rank's own moments lacked is made up for within as many steps as were taken before.
        assert end < before
        assert end < 1.3 * at_the_end, (end, at_the_end)


def test_what_cannot_be_written_is_refused_before_anything_is(tmp_path):
    _, folder = runs()
    follower = Follower(f"{folder}/loco_adamw/log", model(), make_of("loco_adamw"))
    with pytest.raises(
        ValueError, match=r"follower: expected at a step of the run, but got one that took none; call to"
    ):
        follower.checkpoint(tmp_path)
    follower.to(LOST - 1)
    with pytest.raises(ValueError, match=r"load_from: expected .* as in this run, but got none"):
        follower.checkpoint(tmp_path, Path(folder, "onebit_adam", "checkpoints"))
    with pytest.raises(FileNotFoundError, match="holds no finished checkpoint"):
        follower.checkpoint(tmp_path, tmp_path)
    assert [*tmp_path.iterdir()] == []
