"""Data-parallel steps to compare over a link: forward, backward, communication and update, each with its own model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as power_sgd
from textbook import AllReduce
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

import fn
from fn.adapters import ddp
from fn.collectives.axis import Binding
from fn.collectives.codecs.codec import identity
from fn.collectives.codecs.integer import int4, int8
from fn.collectives.codecs.sign import sign
from fn.planner import traffic
from fn.planner.methods import Method, kept_of_demo, kept_of_sparse_loco, parts_of
from fn.planner.traffic import Model

sys.path.append(str(Path(__file__).parents[1] / "examples"))
from train_lm import Transformer, loss_of

INTERVAL = 16
"""Steps of 0/1 Adam between two synchronisations, which its paper and DeepSpeed allow at most; a period of it."""

ROUND = 32
"""Steps of a round of DiLoCo, a period of it."""

WARM_UP = 2
LR = 3e-4
"""Of a run whose loss is shown."""

LITTLE = 1e-6
"""Of steps that are only timed. After a warm-up of two steps larger ones make a model diverge, until numbers below the
smallest normal one slow the backward pass of some contenders: by 60 of 90 ms on an Intel Xeon."""

EPS = 1e-5
"""As in the demo: after a second moment is frozen, tiny ones make large steps."""

Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], Tensor]


class World(NamedTuple):
    """Where a contender runs: the process group of DDP, and the binding of fn's axis "data"."""

    group: dist.ProcessGroup
    binding: Binding


class Contender(NamedTuple):
    """make: (world, model, lr) -> step. method: what the planner is told about it, from the model's shapes."""

    make: Callable[[World, nn.Module, float], Step]
    method: Callable[[Model, int], Method]
    steps: int = 1


def build(size: tuple[int, int, int], device: torch.device) -> nn.Module:
    """Return the demo's transformer of (layers, width, heads), the same on every rank."""
    torch.manual_seed(0)
    return Transformer(*size).to(device)


def _stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Batch) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _wrap(world: World, model: nn.Module, bucket_mb: int | None) -> DistributedDataParallel:
    """Wrap a model; gradients are views of the buckets, which saves everybody a copy."""
    return DistributedDataParallel(
        model, process_group=world.group, bucket_cap_mb=bucket_mb, gradient_as_bucket_view=True
    )


def alone(world: World, model: nn.Module, lr: float) -> Step:
    """Step without any communication: what no method can beat."""
    return _stepper(model, torch.optim.AdamW(model.parameters(), lr=lr, eps=EPS, fused=True))


def exact(
    world: World, model: nn.Module, lr: float, hook: Any = None, state: Any = None, bucket_mb: int | None = None
) -> Step:
    """Step with DDP, with a communication hook or without, and fused AdamW."""
    wrapped = _wrap(world, model, bucket_mb)
    if hook is not None:
        wrapped.register_comm_hook(world.group if state is None else state, hook)
    return _stepper(wrapped, torch.optim.AdamW(model.parameters(), lr=lr, eps=EPS, fused=True))


def half_precision(state, bucket):  # DDP looks at annotations, and these would be strings
    """Run torch's hook. DDP refuses it by its name where the device is no GPU, but gloo can carry bf16."""
    return bf16_compress_hook(state, bucket)


def low_rank(rank: int, world: World, model: nn.Module, lr: float) -> Step:
    """Step with DDP and PowerSGD, in one bucket: with several its all-reduces get out of order over gloo."""
    state = power_sgd.PowerSGDState(world.group, matrix_approximation_rank=rank, start_powerSGD_iter=2)
    return exact(world, model, lr, power_sgd.powerSGD_hook, state, bucket_mb=1 << 10)


def textbook(world: World, model: nn.Module, lr: float) -> Step:
    """Step with 1-bit Adam as DeepSpeed's compressed backend does it: tensor by tensor, in eager operations."""
    params = list(model.parameters())
    means = [AllReduce(p.numel(), world.group, p.device) for p in params]
    moments = [(torch.zeros_like(p), torch.ones_like(p)) for p in params]

    def step(batch: Batch) -> Tensor:
        loss = loss_of(model, batch)
        loss.backward()
        with torch.no_grad():
            for p, mean, (mu, nu) in zip(params, means, moments, strict=True):
                mu.mul_(0.9).add_(p.grad, alpha=0.1)
                mu.copy_(mean(mu.view(-1)).view_as(mu))
                p.add_(mu / (nu.sqrt() + 1e-8), alpha=-lr)
                p.grad = None
        return loss.detach()

    return step


def freeze(step: int) -> fn.Phase:
    """Warm up for the steps that open connections and compile kernels."""
    return fn.Phase.WARMUP if step < WARM_UP else fn.Phase.COMPRESSED


def rarely(step: int) -> fn.Phase:
    """Synchronise in one of `INTERVAL` steps."""
    return fn.Phase.LOCAL if step >= WARM_UP and step % INTERVAL else freeze(step)


def ours(make: Any, world: World, model: nn.Module, lr: float, schedule: Any = freeze) -> Step:
    """Step with one of ours: backward, then everything else."""
    make = partial(make, axis="data")
    check = world.group.size() > 1  # where messages come back all ranks seem to have the same gradients
    with world.binding:
        optimizer = fn.Optimizer(model.parameters(), make, schedule=schedule, lr=lr, eps=EPS, refuse_averaged=check)
    return _stepper(model, optimizer)


def overlapped(make: Any, world: World, model: nn.Module, lr: float, schedule: Any = freeze) -> Step:
    """Step with one of ours behind the backward pass, however fast the wire is."""
    with world.binding:
        groups = ddp.bucketed(model.parameters())
        optimizer = fn.Optimizer(groups, partial(make, axis="data"), schedule=schedule, lr=lr, eps=EPS)
        ddp.overlap(model, optimizer, least_wire_seconds=0.0)
    return _stepper(model, optimizer)


def _method(send: Any, bucket: int | None = None, interval: int = 1) -> Callable[[Model, int], Method]:
    """Return how the planner sees it. bucket: bytes that leave together behind the backward pass, None for none."""

    def made(model: Model, ranks: int) -> Method:
        first = min(traffic.FIRST_BUCKET, bucket or 0)
        parts = parts_of(model, partial(send, ranks=ranks), bucket, first)
        return Method("", "flat", True, parts, bucket is not None, interval=interval)

    return made


def rounds(optimizer: Any, send: Any, delay: int = 0) -> Contender:
    """Return local steps. send: what the planner counts. delay: steps that go on while a mean travels."""
    schedule = fn.every(ROUND, delay=delay, start=WARM_UP)
    planned = _method(send, interval=ROUND)
    return Contender(
        partial(ours, optimizer, schedule=schedule),
        lambda model, ranks: planned(model, ranks)._replace(delay=delay),
        ROUND,
    )


def diloco(codec: Any, delay: int = 0) -> Contender:
    """Return DiLoCo in a codec."""
    return rounds(partial(fn.diloco, codec=codec), partial(traffic.codes, codec=codec), delay)


def without_eps(optimizer: Any) -> Any:
    """Return an optimizer that has no second moment, and so no use for `EPS`."""
    return lambda *args, eps, **settings: optimizer(*args, **settings)


_signs = partial(traffic.codes, codec=sign())
_direct = partial(_signs, servers=False)
_lazy = partial(fn.onebit_adam, feedback=fn.classic(lazy=True))
_serverless = partial(_lazy, servers=False)
_rare = partial(fn.zero_one_adam, feedback=fn.classic(lazy=True))
_rare_serverless = partial(_rare, servers=False)
_int8 = partial(fn.onebit_adam, codec=fn.int8(), feedback=fn.damped())
_loco = partial(traffic.sharded, codec=int4())

NONE = "no communication"
DDP = "DDP fp32"
CONTENDERS: Mapping[str, Contender] = {
    NONE: Contender(alone, _method(lambda model, ranks: [])),
    DDP: Contender(exact, _method(traffic.exact, traffic.BUCKET)),
    "DDP bf16": Contender(
        lambda world, model, lr: exact(world, model, lr, half_precision),
        _method(partial(traffic.exact, width=2), traffic.BUCKET),
    ),
    "DDP PowerSGD 1": Contender(partial(low_rank, 1), _method(partial(traffic.power_sgd, rank=1))),
    "DDP PowerSGD 2": Contender(partial(low_rank, 2), _method(partial(traffic.power_sgd, rank=2))),
    "1-bit, tensor by tensor": Contender(textbook, _method(traffic.textbook_onebit)),
    "fn 1-bit Adam": Contender(partial(ours, _lazy), _method(_signs)),
    "fn 1-bit Adam, overlapped": Contender(partial(overlapped, _lazy), _method(_signs, 4 * ddp.BUCKET)),
    "fn 1-bit Adam, no servers": Contender(partial(ours, _serverless), _method(_direct)),
    "fn 1-bit Adam, no servers, overlapped": Contender(
        partial(overlapped, _serverless), _method(_direct, 4 * ddp.BUCKET)
    ),
    "fn 1-bit LAMB": Contender(
        partial(ours, partial(fn.onebit_lamb, feedback=fn.classic(lazy=True))),
        _method(partial(_signs, layout="fused")),
    ),
    "fn 0/1 Adam": Contender(partial(ours, _rare, schedule=rarely), _method(_signs, interval=INTERVAL), INTERVAL),
    "fn 0/1 Adam, overlapped": Contender(
        partial(overlapped, _rare, schedule=rarely), _method(_signs, 4 * ddp.BUCKET, interval=INTERVAL), INTERVAL
    ),
    "fn 0/1 Adam, no servers": Contender(
        partial(ours, _rare_serverless, schedule=rarely), _method(_direct, interval=INTERVAL), INTERVAL
    ),
    "fn 0/1 Adam, no servers, overlapped": Contender(
        partial(overlapped, _rare_serverless, schedule=rarely),
        _method(_direct, 4 * ddp.BUCKET, interval=INTERVAL),
        INTERVAL,
    ),
    "fn LoCo int4": Contender(partial(ours, fn.loco_adamw), _method(partial(_loco, gather=identity()))),
    "fn LoCo int4, int8 back": Contender(
        partial(ours, partial(fn.loco_adamw, gather=fn.int8(), master=True)), _method(partial(_loco, gather=int8()))
    ),
    "fn int8": Contender(partial(ours, _int8), _method(partial(traffic.codes, codec=int8()))),
    "fn int8, overlapped": Contender(
        partial(overlapped, _int8), _method(partial(traffic.codes, codec=int8()), 4 * ddp.BUCKET)
    ),
    "fn DiLoCo, int8": diloco(int8()),
    "fn DiLoCo, int8, late": diloco(int8(), delay=ROUND // 2),
    "fn DiLoCo, 2 bits": diloco(fn.bins(4, 6)),
    "fn DiLoCo, 1 bit": diloco(sign()),
    "fn SparseLoCo": rounds(
        fn.sparse_loco, partial(traffic.in_basis, basis=fn.tiles(64), codec_of=kept_of_sparse_loco)
    ),
    "fn PowerSGD 4": Contender(partial(ours, fn.powersgd_adamw), _method(partial(traffic.low_rank, rank=4))),
    "fn Lion, votes": Contender(
        partial(ours, without_eps(fn.lion_vote)), _method(partial(traffic.codes, codec=fn.ballots()))
    ),
    "fn DeMo": Contender(
        partial(ours, without_eps(fn.demo)), _method(partial(traffic.in_basis, basis=fn.dct(64), codec_of=kept_of_demo))
    ),
    "fn EF21": Contender(
        partial(ours, without_eps(fn.ef21_sgdm)),
        _method(partial(traffic.codes, codec=fn.top_k(0.01), servers=False)),
    ),
}
"""What is compared, in the order in which it runs."""


IN_PHASES = {
    "fn 1-bit Adam": partial(_lazy, bias_correction=True),
    "fn 1-bit Adam, warm-up in int8": partial(_lazy, bias_correction=True, warmup=fn.int8()),
}
"""What trains in a warm-up and a compressed phase, where steps alone say little."""


def for_training(name: str, warm_up: int) -> Callable[[World, nn.Module], Step]:
    """Return how a contender trains, not only steps: 1-bit Adam with a warm-up of so many steps."""
    if name not in IN_PHASES:
        return partial(CONTENDERS[name].make, lr=LR)
    return partial(ours, IN_PHASES[name], lr=LR, schedule=fn.freeze_after(warm_up))
