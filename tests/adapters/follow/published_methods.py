"""Runs of every method that are published while they train, on real ranks, for followers that are none of them.

A run meets what a run may meet: a NaN on one rank, other learning rates, a group more, and a checkpoint that it goes
back to. `CASES` has each named optimizer of the registry, and what else is said to be followed; `NOT_FOLLOWED` has the
others, each with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import registry
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fn
import fn.adapters.ddp
from fn.adapters.follow import Follower, publish

NOTHING: Mapping[str, Any] = MappingProxyType({})
GRID = ("local", "node")
FEW, SHORT, LONG = 12, 24, 100
SNAPSHOTS, NAN, ADDED, SAVED, RESUMED = 8, 9, 11, 14, 17


class Case(NamedTuple):
    """A run.

    make: takes lr, and what `axis` names. options: of `fn.Optimizer`. axes: over which it communicates. scaled: whether
    a GradScaler scales the loss. average: makes what averages the gradients behind the backward pass of DDP; mean: what
    `average_gradients` is given for that.
    """

    make: Any
    schedule: Any = None
    lr: float = 1e-2
    options: Mapping[str, Any] = NOTHING
    dtype: torch.dtype = torch.float32
    axes: tuple[str, ...] = ("data",)
    scaled: bool = False
    average: Any = None
    mean: Mapping[str, Any] = NOTHING


def int4_adamw(lr, axis, codec=None):
    codec = codec or fn.int4()
    return fn.chain(fn.compressed_average(axis, codec, fn.damped()), fn.scale_by_adam(), fn.scale_by_learning_rate(lr))


def islands(lr, axis):
    inner = fn.chain(fn.compressed_average("local", fn.int8()), fn.scale_by_adam(), fn.scale_by_learning_rate(lr))
    outer_tx = fn.chain(fn.trace(0.9, nesterov=True), fn.scale_by_learning_rate(0.7))
    return fn.chain(fn.average(axis), fn.outer(inner, outer_tx, fn.compressed_average("node", fn.int8())))


def of_registry(method):
    # Those that warm up for 20 steps would do little else in a short run.
    schedules = {"zero_one_adam": fn.zero_one_schedule(4, 4, 8, 4)}
    schedule = schedules.get(method.name, method.schedule)
    return Case(method.make, fn.freeze_after(5) if schedule == fn.freeze_after(20) else schedule, method.lr)


LOW_RANK = partial(fn.low_rank_average, rank=2)


def averaged(average, mean, **more):
    return Case(fn.adamw, axes=(), average=average, mean=mean, **more)


NO_AGREEMENT = r"expected a transform whose state has what all ranks agree on, .* which has local_params"
NOT_FOLLOWED = {
    "muon, of shards": "expected whole parameters on rank 0, but got pieces",
    "des_loc": NO_AGREEMENT,
    "no_loco": NO_AGREEMENT,
    "sparta": NO_AGREEMENT,
}
"""Methods of the registry, and why: between exchanges, or at all, the ranks agree on no parameters, or have pieces."""

INT8 = partial(fn.diloco, codec=fn.int8())
CASES = {method.name: of_registry(method) for method in registry.EVERY} | {
    "int4": Case(int4_adamw, fn.freeze_after(0)),
    "loco_adamw, codes back": Case(partial(fn.loco_adamw, gather=fn.int8()), fn.freeze_after(2)),
    "sharded_onebit_adam, codes back": Case(partial(fn.sharded_onebit_adam, gather=fn.int8()), fn.freeze_after(5)),
    "normuon, replicated": Case(partial(fn.normuon, owned=False), None, 2e-2),
    "diloco, a late mean": Case(INT8, fn.every(4, delay=2)),
    "diloco, streaming": Case(partial(INT8, fragments=2), fn.every(4, fragments=2, delay=1)),
    "adamw, late and clipped": Case(fn.late(fn.adamw), fn.every(1, delay=1, start=2), options={"max_norm": 0.1}),
    "adamw, clipped": Case(fn.adamw, options={"max_norm": 0.1}),
    "onebit_adam, clipped": Case(fn.onebit_adam, fn.freeze_after(5), options={"max_norm": 0.1}),
    "adamw, scaled": Case(fn.adamw, scaled=True),
    "onebit_adam, scaled": Case(fn.onebit_adam, fn.freeze_after(5), scaled=True),
    "adamw in bfloat16": Case(fn.adamw, dtype=torch.bfloat16),
    "onebit_adam in bfloat16": Case(fn.onebit_adam, fn.freeze_after(5), dtype=torch.bfloat16),
    "loco_adamw in bfloat16": Case(fn.loco_adamw, fn.freeze_after(2), dtype=torch.bfloat16),
    "sign_muon in bfloat16": Case(fn.sign_muon, fn.freeze_after(2), dtype=torch.bfloat16),
    "mean in int4": averaged(
        partial(fn.compressed_average, codec=fn.int4(), feedback=fn.damped()),
        {"codec": fn.int4(), "feedback": fn.damped(), "schedule": fn.freeze_after(4), "elements": 200},
    ),
    "mean in int8, without servers": averaged(
        partial(fn.compressed_average, codec=fn.int8(), servers=False), {"codec": fn.int8(), "servers": False}
    ),
    "mean in int8, bfloat16": averaged(
        partial(fn.compressed_average, codec=fn.int8()), {"codec": fn.int8()}, dtype=torch.bfloat16
    ),
    "mean of low rank": averaged(
        LOW_RANK, {"average": LOW_RANK, "schedule": fn.freeze_after(4)}, options={"max_norm": 0.1}
    ),
    "mean in int8, scaled": averaged(
        partial(fn.compressed_average, codec=fn.int8()), {"codec": fn.int8()}, scaled=True, options={"max_norm": 0.1}
    ),
}
OVER_AXES = {
    "adamw over axes": Case(fn.adamw, axes=GRID),
    "onebit_adam over axes": Case(fn.onebit_adam, fn.freeze_after(5), axes=GRID),
    "int4 at both hops": Case(partial(int4_adamw, codec=(fn.int4(), fn.int4())), fn.freeze_after(0), axes=GRID),
    "owned muon over axes": Case(fn.muon, fn.freeze_after(0), 2e-2, axes=GRID),
    "powersgd_adamw over axes": Case(fn.powersgd_adamw, fn.freeze_after(3), axes=GRID),
    "loco_adamw over axes": Case(fn.loco_adamw, fn.freeze_after(2), axes=GRID),
    "islands": Case(islands, fn.every(3, start=2), axes=GRID),
}
ALL = CASES | OVER_AXES


def model(seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 16), torch.nn.Linear(16, 4)
    return torch.nn.Sequential(*layers).to(dtype)


def make_of(case):
    return partial(case.make, axis=case.axes[0] if len(case.axes) == 1 else case.axes) if case.axes else case.make


def optimizer(net, case):
    first = [*net.named_parameters()][:4]
    options = {"schedule": case.schedule, "lr": case.lr, **case.options}
    return fn.Optimizer(first, make_of(case), refuse_averaged=False, **options)


def agreed(opt):
    """Return what ranks agree on, of the layers that are trained."""
    with fn.adapters.agreed_params(opt, ()):
        return torch.cat([p.detach().reshape(-1) for group in opt.param_groups for p in group["params"]])


def copied(state):
    return {name: x.clone() for name, x in state.items()}


def trained(case, folder, steps, binding):
    """Take steps, and publish them; return the agreed params behind each."""
    net, found, running, scaler = model(dtype=case.dtype), {}, None, None
    last = net[3].requires_grad_(case.average is not None)  # what DDP does not know at first it never averages
    with binding if case.axes else nullcontext():
        opt = optimizer(net, case)
    if case.scaled:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    run = net
    if case.average is not None:
        run = DistributedDataParallel(net)
        running = fn.adapters.ddp.average_gradients(run, scaler=scaler, **case.mean)
    published = publish(opt, folder, mean=running, snapshot_every=SNAPSHOTS, digest_every=4)
    generator = torch.Generator().manual_seed(dist.get_rank())

    def train(span):
        for step in span:
            opt.zero_grad()
            if step == ADDED:
                last.requires_grad_(True)
                opt.add_param_group({"params": [*last.named_parameters("3")], "lr": case.lr / 2})
            opt.param_groups[0]["lr"] = case.lr / (1 + step // 6)
            x = torch.randn(16, 8, generator=generator).to(case.dtype)
            if step % 50 == NAN and dist.get_rank() == 1:
                x[0, 0] = torch.nan
            loss = (run(x) - x[:, :4].sin()).square().mean()
            if case.average is not None and step in (4, 5):  # a pass more, that counts or not
                (loss if scaler is None else scaler.scale(loss)).backward()
                if step == 5:
                    opt.zero_grad()
                loss = run(x.flip(0)).square().mean()
            if scaler is None:
                loss.backward()
                if case.average is not None and step in (6, 7):
                    opt.zero_grad() if step == 6 else net[0].zero_grad()  # what has no gradient stays as it is
                opt.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(opt)
                scaler.update()
            found[step] = agreed(opt)

    train(range(SAVED))
    saved = copied(opt.state_dict()), copied(net.state_dict())
    train(range(SAVED, RESUMED))
    opt.load_state_dict(saved[0])
    net.load_state_dict(saved[1])
    train(range(SAVED, steps))
    if published is not None:
        published.close()
    if running is not None:
        fn.adapters.ddp.close(running)
    return found


def refused(case, folder, binding):
    """Return what `publish` says to a method that nobody can follow."""
    with binding:
        opt = optimizer(model(), case)
    try:
        publish(opt, folder)
    except ValueError as error:
        return str(error)
    return None


MANY = ("adamw", "onebit_adam", "lion_vote", "muon, int8", "powersgd_adamw", "diloco, int8")


def many_tensors():
    torch.manual_seed(2)
    shapes = [(16, 8)] * 20 + [(8,), (64,), (32,), (40,)] * 70
    return [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]


def of_many_tensors(case, folder, steps, binding):
    """Publish steps of three hundred tensors; return what they all are behind the last one."""
    params = many_tensors()
    with binding:
        opt = fn.Optimizer(params, make_of(case), schedule=case.schedule, lr=case.lr, refuse_averaged=False)
    published = publish(opt, folder)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()
    if published is not None:
        published.close()
    return agreed(opt)


def all_trained(names, folder, steps):
    """Train cases one after the other, in a folder for each; return what each found, or the exception's text."""
    torch.set_num_threads(1)
    if dist.get_world_size() == 4:
        binding = fn.bind(init_device_mesh("cpu", (2, 2), mesh_dim_names=GRID[::-1]))
    else:
        binding = fn.bind({"data": dist.group.WORLD})
    found = {name: trained(ALL[name], f"{folder}/{name}", steps, binding) for name in names if name not in NOT_FOLLOWED}
    no = {name: refused(ALL[name], f"{folder}/{name}", binding) for name in names if name in NOT_FOLLOWED}
    if dist.get_world_size() == 2:
        for name in MANY:
            found[f"{name} of many"] = of_many_tensors(ALL[name], f"{folder}/{name} of many", FEW, binding)
    return found | no


def follower(source, case, **options):
    """Return a model that knows nothing of the run, and its follower."""
    net = model(seed=1, dtype=case.dtype)
    net[3].requires_grad_(False)
    return net, Follower(source, net, make_of(case), average=case.average, **options)
