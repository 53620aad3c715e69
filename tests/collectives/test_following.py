"""A run is a log: what all ranks got alike, whatever carried it, gives a process without ranks the same params."""

from __future__ import annotations

import functools
from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist

import fn
from fn.collectives import owners
from fn.collectives.axis import Axis, Binding
from fn.collectives.carriers import Carrier
from fn.collectives.transports.registry import Transport, register

STEPS = 12
CARRIERS = ("tcp", "gloo", "registered", "device")


def on(make, **more):
    return partial(make, axis="data", **more)


def int4_adamw(lr, axis):
    mean = fn.compressed_average(axis, fn.int4(), fn.damped())
    return fn.chain(mean, fn.scale_by_adam(), fn.scale_by_learning_rate(lr))


def late_adamw(lr, axis):
    return fn.late(fn.chain(fn.average(axis), fn.scale_by_adam(), fn.scale_by_learning_rate(lr)))


CASES = {
    "adamw": (on(fn.adamw), None, 1e-2),
    "onebit_adam": (on(fn.onebit_adam), fn.freeze_after(4), 1e-2),
    "onebit_lamb": (on(fn.onebit_lamb), fn.freeze_after(4), 1e-2),
    "int4": (on(int4_adamw), fn.freeze_after(0), 1e-2),
    "sign_muon": (on(fn.sign_muon), fn.freeze_after(0), 2e-2),
    "lion_vote": (on(fn.lion_vote), fn.freeze_after(0), 1e-3),
    "loco": (on(fn.loco_adamw), fn.freeze_after(2), 1e-2),
    "loco, codes back": (on(fn.loco_adamw, gather=fn.int8()), fn.freeze_after(2), 1e-2),
    "sharded": (on(fn.sharded_onebit_adam), fn.freeze_after(4), 1e-2),
    "owned muon": (on(fn.muon), fn.freeze_after(0), 2e-2),
    "owned normuon": (on(fn.normuon), fn.freeze_after(0), 2e-2),
    "powersgd": (on(fn.powersgd_adamw), fn.freeze_after(3), 1e-2),
    "dion": (on(fn.dion), fn.freeze_after(2), 1e-2),
    "diloco": (on(fn.diloco, codec=fn.int8()), fn.every(3), 1e-2),
    "muloco": (on(fn.muloco, codec=fn.int8()), fn.every(3), 1e-2),
    "zero_one_adam": (on(fn.zero_one_adam), fn.zero_one_schedule(), 1e-2),
}
AGREED_BEHIND_EXCHANGES = {"diloco", "muloco", "zero_one_adam"}


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 32), torch.nn.Linear(32, 4))


def registered_axis():
    group, size = dist.group.WORLD, dist.get_world_size()

    def gather(x):
        out = x.new_empty((size, *x.shape))
        dist.all_gather_into_tensor(out.view(-1), x.reshape(-1), group=group)
        return out

    def swap(x):
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        return out

    def add(x):
        dist.all_reduce(x, group=group)
        return x

    name = register("a table", Transport(swap, gather, add))
    return Binding({"data": Axis(size, torch.tensor(dist.get_rank()), name)})


def bound(carrier):
    if carrier == "registered":
        return registered_axis()
    if carrier == "device":  # its library sends each tensor from where it lies
        vars(owners)["carrier_of"] = lambda transport, tensors: Carrier(transport, sends_parts=True)
        vars(owners)["LARGE"] = 256
    return fn.bind({"data": dist.group.WORLD}, tcp=carrier == "tcp")


def trained(binding, each, name, batch):
    """Take steps, each inside of `each`; return the params behind every step, as bytes, and the optimizer's count."""
    make, schedule, lr = CASES[name]
    net = model()
    with binding:
        opt = fn.Optimizer(net.parameters(), make, schedule=schedule, lr=lr, refuse_averaged=False)
    history = []
    for step in range(STEPS):
        opt.zero_grad()
        batch(net, step)
        with each:
            opt.step()
        history.append(torch.cat([p.detach().reshape(-1) for p in net.parameters()]))
    return history


def data_of(rank):
    generator = torch.Generator().manual_seed(100 + rank)

    def batch(net, step):
        x = torch.randn(16, 8, generator=generator)
        (net(x) - x[:, :4].sin()).square().mean().backward()

    return batch


def record(carrier):
    torch.set_num_threads(1)
    binding, found = bound(carrier), {}
    for name in CASES:
        log = []
        each = fn.recorded(binding, lambda step, records, log=log: log.append(records))
        found[name] = trained(binding, each if dist.get_rank() == 0 else binding, name, data_of(dist.get_rank())), log
    return found


@functools.cache
def run(carrier):
    return ranks.run(2, record, carrier)[0]


def zeros(net, step):
    for p in net.parameters():
        p.grad = torch.zeros_like(p)


def noise(net, step):
    for p in net.parameters():
        p.grad = torch.randn_like(p)


def followed(name, log, batch):
    start, each = fn.replayed({"data": 2}, lambda step: ()), fn.replayed({"data": 2}, lambda step: log[step])
    return trained(start, each, name, batch)


def agreed(name, history):
    schedule = CASES[name][1]
    if name not in AGREED_BEHIND_EXCHANGES:
        return history
    phases = [schedule(step) for step in range(STEPS)]
    kept = [getattr(phase, "end", phase) not in (None, fn.Phase.LOCAL) for phase in phases]
    return [x for x, keep in zip(history, kept, strict=True) if keep]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batch", [zeros, noise])
def test_a_replay_has_the_params_of_the_run(name, batch):
    history, log = run("tcp")[name]
    torch.manual_seed(3)
    mine = followed(name, log, batch)
    assert sum(leaf.numel() for records in log for _, leaves in records for leaf in leaves) > 0
    for step, (a, b) in enumerate(zip(agreed(name, mine), agreed(name, history), strict=True)):
        assert torch.equal(a, b), step


@pytest.mark.parametrize("carrier", CARRIERS[1:])
@pytest.mark.parametrize("name", CASES)
def test_every_carrier_writes_the_same_log(name, carrier):
    (history, log), (other_history, other) = run("tcp")[name], run(carrier)[name]
    for records, found in zip(log, other, strict=True):
        assert [key for key, _ in found] == [key for key, _ in records]
        assert all(map(torch.equal, *([x for _, leaves in each for x in leaves] for each in (records, found))))
    assert all(map(torch.equal, history, other_history))
