"""Two trainers that publish, and a follower without ranks: the same parameters after every step."""

from __future__ import annotations

import copy
import functools
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from logs import served

import fn
import fn.adapters.ddp
from fn.adapters.follow import Diverged, Follower, publish
from fn.adapters.follow.log_format import decoded_head, encoded_head
from fn.adapters.follow.log_reader import LogReader

STEPS, SNAPSHOTS, RESUMED = 24, 8, 17
CASES: dict[str, Any] = {
    "adamw": (fn.adamw, None),
    "onebit_adam": (fn.onebit_adam, fn.freeze_after(5)),
    "sign_muon": (fn.sign_muon, fn.freeze_after(0)),
}
"""What is asked here is asked of one method; `test_published_methods.py` follows every one of them."""


def make_of(name):
    return partial(CASES[name][0], axis="data")


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16), torch.nn.Linear(16, 4))


def optimizer(net, name, group=None):
    first = [*net.named_parameters()][:4]
    with fn.bind({"data": group or dist.group.WORLD}):
        return fn.Optimizer(first, make_of(name), schedule=CASES[name][1], lr=1e-2, refuse_averaged=False)


def agreed(net, opt):
    """Return what ranks agree on, of the layers that are trained."""
    with fn.adapters.agreed_params(opt):
        return torch.cat([p.detach().reshape(-1) for group in opt.param_groups for p in group["params"]])


def trained(name, folder, group=None):
    """Take steps with a NaN, other rates, a group more, and a restart; return the agreed params behind each."""
    torch.set_num_threads(1)
    net, found = model(), {}
    last, opt = net[3].requires_grad_(False), optimizer(net, name, group)
    published = publish(opt, folder, snapshot_every=SNAPSHOTS, digest_every=4)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def train(steps):
        for step in steps:
            opt.zero_grad()
            if step == 11:
                last.requires_grad_(True)
                opt.add_param_group({"params": [*last.named_parameters("3")], "lr": 5e-3})
            opt.param_groups[0]["lr"] = 1e-2 / (1 + step // 6)
            x = torch.randn(16, 8, generator=generator)
            (net(x) - x[:, :4].sin()).square().mean().backward()
            if step == 9 and dist.get_rank() == 1:
                next(net.parameters()).grad.fill_(float("nan"))
            opt.step()
            found[step] = agreed(net, opt)

    train(range(14))
    saved = {k: x.clone() for k, x in opt.state_dict().items()}, {k: x.clone() for k, x in net.state_dict().items()}
    train(range(14, RESUMED))
    opt.load_state_dict(saved[0])
    net.load_state_dict(saved[1])
    train(range(14, STEPS))
    assert (published is not None) == (dist.get_rank() == 0)
    if published is not None:
        published.close()
    return found


def beside(folder):
    """On ranks 0 and 1 train; on rank 2, which is in no group with them, follow while they do."""
    group = dist.new_group([0, 1])
    if dist.get_rank() < 2:
        dist.barrier()
        return trained("onebit_adam", folder, group)
    dist.barrier()
    net, follower = followed(folder, "onebit_adam", patience=10.0)
    found, steps = {}, []
    for step in follower:
        found[step] = agreed(net, follower.optimizer)
        steps.append(step)
        if step == STEPS - 1:
            return found, steps
    raise AssertionError(steps)


def overlapped(folder):
    """Return the params of a run whose ranks communicate on threads, behind the backward pass."""
    torch.set_num_threads(1)
    net, found = model(), []
    # Names as of a model that DDP wraps, which the follower's does not have.
    groups = [{"params": [*layer.named_parameters(f"module.{i}")]} for i, layer in enumerate(net) if i != 1]
    with fn.bind({"data": dist.group.WORLD}):
        opt = fn.Optimizer(groups, make_of("onebit_adam"), schedule=fn.freeze_after(5), lr=1e-2, refuse_averaged=False)
    running = fn.adapters.ddp.overlap(net, opt, least_wire_seconds=0)
    published = publish(opt, folder, digest_every=1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(12):
        opt.zero_grad()
        x = torch.randn(16, 8, generator=generator)
        (net(x) - x[:, :4].sin()).square().mean().backward()
        opt.step()
        found.append(agreed(net, opt))
    assert running.is_on(fn.Phase.COMPRESSED)
    if published is not None:
        published.close()
    fn.adapters.ddp.close(opt)
    return found


def run_all(folder):
    return {name: trained(name, f"{folder}/{name}") for name in ("adamw", "sign_muon")}


@functools.cache
def runs():
    folder = tempfile.mkdtemp()
    return ranks.outcomes(2, run_all, folder, patience=ranks.PATIENCE)[0], Path(folder)


def run(name):
    found, folder = runs()
    assert isinstance(found, dict), found
    return found[name], folder / name


def start(net):
    net[3].requires_grad_(False)
    return net


def followed(source, name, **options):
    torch.manual_seed(1)
    net = start(torch.nn.Sequential(*(layer for layer in model())))
    for p in net.parameters():
        torch.nn.init.normal_(p.data)
    return net, Follower(source, net, make_of(name), **options)


def test_it_follows_while_they_train_and_goes_back_where_they_are_restarted(tmp_path):
    found, _, (mine, steps) = ranks.run(3, beside, str(tmp_path))
    assert {*steps} == {*range(STEPS)}
    for step in range(STEPS):
        assert torch.equal(mine[step], found[step]), step


def test_it_follows_what_travels_behind_the_backward_pass(tmp_path):
    found, _ = ranks.run(2, overlapped, str(tmp_path))
    net = model()
    with torch.no_grad():
        for p in net.parameters():
            p.normal_()
    follower = Follower(tmp_path, net, make_of("onebit_adam"))
    for step in follower:
        assert torch.equal(agreed(net, follower.optimizer), found[step]), step
    assert follower.steps == 12


def test_it_follows_over_http_and_starts_late():
    found, folder = run("sign_muon")
    with served(folder) as (url, _):
        net, follower = followed(url, "sign_muon")
        for step in (20, 21, 3, 15, 23):
            follower.to(step)
            assert torch.equal(agreed(net, follower.optimizer), found[step])


def test_what_is_not_in_the_log_is_refused():
    _, folder = run("adamw")
    net, follower = followed(folder, "adamw")
    with pytest.raises(LookupError, match=r"step: expected one of the log .*, but got 24"):
        follower.to(STEPS)
    with pytest.raises(ValueError, match=r"make: expected that of the run, whose"):
        Follower(folder, net, partial(fn.adamw, axis="data", b1=0.8))
    with pytest.raises(ValueError, match=r"model: expected a parameter float32 \[\d+.*\], as the run has"):
        Follower(folder, torch.nn.Linear(2, 2), make_of("adamw"))
    with pytest.raises(ValueError, match="on_divergence: expected 'raise' or 'snapshot'"):
        Follower(folder, net, make_of("adamw"), on_divergence="ignore")


@pytest.mark.parametrize("on_divergence", ["raise", "snapshot"])
def test_parameters_that_differ_are_noticed(on_divergence):
    found, folder = run("adamw")
    net, follower = followed(folder, "adamw", on_divergence=on_divergence)
    follower.to(0)
    with torch.no_grad():
        net[2].weight[0, 0] += 1
    if on_divergence == "raise":
        with pytest.raises(Diverged, match=r"behind step 3 'params.0.2.weight' .* snapshot of step 8") as error:
            follower.to(5)
        assert (error.value.step, error.value.tensor) == (3, "params.0.2.weight")
        return
    assert [*follower] == [1, 2, *range(8, STEPS)]
    assert torch.equal(agreed(net, follower.optimizer), found[STEPS - 1])


def test_a_run_of_which_nothing_is_heard_is_refused(tmp_path):
    net = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"optimizer: expected one that averages over an axis of several ranks"):
        publish(fn.Optimizer(net.parameters(), fn.adamw), tmp_path)
    with pytest.raises(TypeError, match=r"optimizer: expected an fn\.Optimizer"):
        publish(torch.optim.AdamW(net.parameters()), tmp_path)
    with pytest.raises(TypeError, match=r"mean: expected what fn\.adapters\.ddp\.average_gradients returns"):
        publish(fn.Optimizer(net.parameters(), fn.adamw), tmp_path, mean=net)
    assert [*tmp_path.iterdir()] == []


def test_a_command_writes_the_parameters_behind_a_step(tmp_path):
    from safetensors.torch import load_file

    found, folder = run("sign_muon")
    (tmp_path / "of_run.py").write_text(
        "import functools, torch, fn\n"
        "def made():\n"
        "    layers = [torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16), torch.nn.Linear(16, 4)]\n"
        "    return torch.nn.Sequential(*layers), functools.partial(fn.sign_muon, axis='data')\n"
    )
    command = ("-m", "fn", "log", str(folder), "--make", "of_run:made", "--out", "step13.safetensors", "--replay", "13")
    ended = ranks.python(*command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    written = load_file(tmp_path / "step13.safetensors")
    order = ["0.weight", "0.bias", "2.weight", "2.bias", "3.weight", "3.bias"]
    assert torch.equal(torch.cat([written[name].reshape(-1) for name in order]), found[13])
    again = ranks.python(*command, cwd=tmp_path)
    assert again.returncode == 2
    assert "step13.safetensors" in again.stderr
    wrong = ranks.python(*command[:-1], "99", cwd=tmp_path)
    assert "step: expected one of the log" in wrong.stderr
    assert "go together" in ranks.python(*command[:6], cwd=tmp_path).stderr


def changed_header(folder, to, **fields):
    """Copy a log, with other fields in the header of its trainers."""
    shutil.copytree(folder, to)
    head = decoded_head((to / "head.json").read_bytes(), "")
    changed = [x._replace(header={**x.header, **fields}) for x in head.incarnations]
    (to / "head.json").write_bytes(encoded_head(head._replace(incarnations=changed)))
    return LogReader(to).header


def test_a_machine_that_comes_to_other_bits_is_refused(tmp_path):
    """Before the first step, with what differs of it; a machine of another name that comes to the same is not."""
    _, folder = run("sign_muon")
    unlike = {**LogReader(folder).header["machine"], "threads": 96, "kernels": ["cupy"]}
    assert changed_header(folder, tmp_path / "same", machine=unlike)["machine"]["threads"] == 96
    net, follower = followed(tmp_path / "same", "sign_muon")
    assert next(iter(follower)) == 0
    changed_header(folder, tmp_path / "other", machine=unlike, known_answer="of another machine")
    before = copy.deepcopy(net.state_dict())
    with pytest.raises(ValueError, match=r"threads \d+ in place of 96; follow on a machine like the trainers', or let"):
        Follower(tmp_path / "other", net, make_of("sign_muon"))
    assert all(torch.equal(x, before[name]) for name, x in net.state_dict().items())
    changed_header(folder, tmp_path / "alike", known_answer="of another machine")
    alike = (
        r"source: expected .* answer in .*/alike/head.json, but got another one from a machine that is alike in torch, "
    )
    with pytest.raises(ValueError, match=alike):
        Follower(tmp_path / "alike", net, make_of("sign_muon"))
