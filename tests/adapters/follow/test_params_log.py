"""Logs of the bits that changed: params of any optimizer, and buffers beside codes."""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn

import fn
from fn.adapters.follow import Diverged, Follower, publish
from fn.adapters.follow.log_reader import LogReader

STEPS, SAVED, RESUMED = 16, 6, 9


def model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)


def everything(net):
    return {name: x.detach().clone() for name, x in net.state_dict().items()}


def alike(net, of_run):
    return all(torch.equal(x, of_run[name]) for name, x in net.state_dict().items())


def train(net, opt, folder, inner=None, **options):
    """Take steps with a restart from a checkpoint, and parameters that something else writes; return what was there."""
    torch.set_num_threads(1)
    inner, found, saved = inner or net, {}, None
    published = publish(opt, folder, snapshot_every=4, digest_every=3, **options)
    generator = torch.Generator().manual_seed(dist.get_rank() if dist.is_initialized() else 0)
    for step in [*range(RESUMED), *range(SAVED, STEPS)]:
        if step == SAVED and saved is None:
            saved = copy.deepcopy(opt.state_dict()), everything(inner)
        elif step == SAVED:
            opt.load_state_dict(saved[0])
            inner.load_state_dict(saved[1])
        opt.zero_grad()
        x = torch.randn(16, 8, generator=generator).to(next(inner.parameters()).dtype)
        (net(x) - x[:, :4].sin()).square().mean().backward()
        if step == 12 and "what" in options:
            with torch.no_grad():
                inner[0].weight.mul_(0.5)
        opt.step()
        found[step] = everything(inner)
    assert (published is not None) == (not dist.is_initialized() or dist.get_rank() == 0)
    if published is not None:
        published.close()
    return found


def of_torch(folder, compiled):
    net = nn.parallel.DistributedDataParallel(model())
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    run = torch.compile(net, backend="eager") if compiled else net
    return train(run, opt, folder, net.module, what="params", buffers=True)


def of_codes(folder):
    net = model()
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(net.named_parameters(), partial(fn.sign_muon, axis="data"), schedule=fn.freeze_after(0))
    return train(net, opt, folder, buffers=True)


def of_shards(folder):
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    net = nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 4))
    torch.manual_seed(0)
    for p in net.parameters():
        nn.init.normal_(p)
    fully_shard(net)
    opt, found = torch.optim.AdamW(net.parameters(), lr=1e-2), {}
    for refused, error in ((opt, TypeError), (fn.Optimizer(net.parameters(), fn.adamw), ValueError)):
        with pytest.raises(error, match=r"^optimizer: expected .* publish\(\.\.\., what='params'\)$"):
            publish(refused, f"{folder}/none")
    published = publish(opt, folder, snapshot_every=3, what="params")
    for step in range(8):
        opt.zero_grad()
        net(torch.randn(4, 8)).square().mean().backward()
        opt.step()
        found[step] = {name: x.full_tensor().clone() for name, x in net.state_dict().items()}
    if published is not None:
        published.close()
    return found


def check(folder, net, found, **options):
    follower, steps = Follower(folder, net, **options), []
    for step in follower:
        steps.append(step)
        assert alike(net, found[step]), step
    assert steps == [*found]
    follower.to(2)
    assert alike(net, found[2])
    return follower


@pytest.mark.parametrize("compiled", [False, True])
def test_any_optimizer_is_followed_behind_ddp(tmp_path, compiled):
    """Without make; of the steps that were taken twice, those of the restarted trainer."""
    found, _ = ranks.run(2, of_torch, str(tmp_path), compiled)
    check(tmp_path, model(1), found)
    assert LogReader(tmp_path).steps() == {0: range(SAVED), 1: range(SAVED, STEPS)}


def test_pieces_of_fsdp2_are_gathered(tmp_path):
    found, _ = ranks.run(2, of_shards, str(tmp_path))
    assert not (tmp_path / "none").exists()
    check(tmp_path, nn.Sequential(nn.Linear(8, 33), nn.Tanh(), nn.Linear(33, 4)), found)


def test_buffers_travel_beside_codes(tmp_path):
    found, _ = ranks.run(2, of_codes, str(tmp_path))
    follower = check(tmp_path, model(1), found, make=partial(fn.sign_muon, axis="data"))
    with pytest.raises(ValueError, match="make: expected that of the run, whose log has codes, but got None"):
        Follower(tmp_path, model(1))
    bare = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Tanh(), nn.Linear(32, 4))
    with pytest.raises(ValueError, match=r"snapshot: expected 'model.1.\w+' on both sides"):
        next(iter(Follower(tmp_path, bare, follower.make)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_bits_of_all_kinds_come_back(tmp_path, dtype):
    """NaN with its bits, zeros with their signs; by an optimizer that counts no steps."""
    net = model(0, dtype)
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    published = publish(opt, tmp_path, what="params", buffers=True, digest_every=1)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[net[0].weight.element_size()]
    for step in range(3):
        opt.zero_grad()
        net(torch.ones(4, 8, dtype=dtype) * step).sum().backward()
        with torch.no_grad():
            net[3].weight[step] = torch.tensor([-0.0, float("nan"), float("-inf"), 1e-38]).repeat(8).to(dtype)
            net[0].weight.view(bits)[step] = -1 - step
        opt.step()
    published.close()
    other = model(1, dtype)
    assert [*Follower(tmp_path, other)] == [0, 1, 2]
    for x, y in zip(other.state_dict().values(), net.state_dict().values(), strict=True):
        assert x.dtype == y.dtype
        assert x.view(-1).view(torch.uint8).tolist() == y.view(-1).view(torch.uint8).tolist()


def test_params_that_differ_are_noticed(tmp_path):
    net = model()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    train(net, opt, tmp_path, what="params")
    other = model(1)
    follower = Follower(tmp_path, other)
    follower.to(0)
    with torch.no_grad():
        other[3].bias[0] += 1
    with pytest.raises(Diverged, match=r"behind step 2 'model.3.bias' is another one than the run's"):
        follower.to(3)
    wrong = model(1)
    wrong[3] = nn.Linear(32, 5)
    before = everything(wrong)
    with pytest.raises(ValueError, match=r"model: expected 'model.3.bias' like the run's, torch.float32 \[4\]"):
        next(iter(Follower(tmp_path, wrong)))
    assert alike(wrong, before)


def test_one_model_has_to_hold_the_parameters(tmp_path):
    one, two = model(), model()
    opt: Any = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    with pytest.raises(
        ValueError, match=r"what: expected one module around .*, but got Sequential, Sequential; hold all"
    ):
        publish(opt, tmp_path, what="params")
    with pytest.raises(ValueError, match=r"what: expected one module around .*, but got none"):
        publish(torch.optim.SGD([nn.Parameter(torch.ones(2))]), tmp_path, what="params")
    assert [*tmp_path.iterdir()] == []
    both = nn.ModuleDict({"one": one, "two": two})
    published = publish(opt, tmp_path, what="params")
    one(torch.ones(2, 8)).sum().backward()
    opt.step()
    published.close()
    other = nn.ModuleDict({"two": model(2), "one": model(3)})  # by name, in any order
    assert [*Follower(tmp_path, other)] == [0]
    assert all(torch.equal(p, dict(both.named_parameters())[name]) for name, p in other.named_parameters())


def test_a_model_with_other_tensors_ends_the_log_and_not_the_run(tmp_path):
    net = model()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    published = publish(opt, tmp_path, what="params")
    opt.step()
    net.append(nn.Linear(4, 4, bias=False))
    with pytest.warns(UserWarning, match=r"the log ends before step 1: .* such as 'model.4.weight'"):
        opt.step()
    opt.step()
    published.close()
    assert LogReader(tmp_path).last_step == 0


def test_the_end_of_a_process_writes_what_is_there(tmp_path):
    from safetensors.torch import load_file

    text = (
        "import torch; from fn.adapters.follow import publish\n"
        "net = torch.nn.Linear(300, 300); opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "publish(opt, 'log', what='params', snapshot_every=2)\n"
        "for step in range(5): net(torch.ones(1, 300)).sum().backward(); opt.step()\n"
        "torch.save(net.state_dict(), 'end.pt')"
    )
    command = [sys.executable, "-c", text]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=ranks.LIMIT, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    net = nn.Linear(300, 300)
    assert [*Follower(tmp_path / "log", net)] == [*range(5)]
    assert alike(net, torch.load(tmp_path / "end.pt"))
    (tmp_path / "of_run.py").write_text("import torch\ndef made():\n    return torch.nn.Linear(300, 300), None\n")
    command = ("-m", "fn", "log", "log", "--make", "of_run:made", "--out", "step4.safetensors", "--replay", "4")
    ended = ranks.python(*command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert alike(net, load_file(tmp_path / "step4.safetensors"))


def warned(folder):
    net = model()
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(net.parameters(), partial(fn.adamw, axis="data"))
    published, said = publish(opt, folder), []
    for step in range(3):
        for p in net.parameters():
            p.grad = torch.full_like(p, dist.get_rank() + 1.0)
        if step:
            net(torch.randn(4, 8))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            opt.step()
        said.append([str(w.message) for w in caught if "buffers" in str(w.message)])
    if published is not None:
        published.close()
    return said


def test_buffers_that_change_and_do_not_travel_are_warned_of_once(tmp_path):
    first, other = ranks.run(2, warned, str(tmp_path))
    assert other == [[], [], []]
    assert (first[0], len(first[1]), first[2]) == ([], 1, [])
    assert "publish: the model's buffers, such as '1.num_batches_tracked', change" in first[1][0]
