"""Data-parallel steps to compare over a link: forward, backward, communication and update, each with its own model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook as power_sgd
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from train_lm import Transformer, loss_of

import fn
from benchmarks.steps.textbook import AllReduce
from fn.adapters import ddp
from fn.collectives.axis import Binding
from fn.collectives.codecs.integer import int4, int8
from fn.collectives.codecs.sign import sign
from fn.planner import traffic
from fn.planner.methods import Method, parts_of
from fn.planner.network import Message
from fn.planner.traffic import Model

INTERVAL = 16
"""Steps of 0/1 Adam between two synchronisations, which its paper and DeepSpeed allow at most; a period of it."""

ROUND = 32
"""Steps of a round of DiLoCo, a period of it."""

WARM_UP = 2
LR = 1e-6
"""Steps are only timed. After a warm-up of two steps larger ones make a model diverge, until numbers below the smallest
normal one slow the backward pass of some contenders: by 60 of 90 ms on an Intel Xeon."""

EPS = 1e-5
"""As in the demo: after a second moment is frozen, tiny ones make large steps."""

Batch = tuple[Tensor, Tensor]
Step = Callable[[Batch], Tensor]


class World(NamedTuple):
    """Where a contender runs: the process group of DDP, the binding of fn's axis "data", and what makes the loss."""

    group: dist.ProcessGroup
    binding: Binding
    loss: Callable[[nn.Module, Batch], Tensor] = loss_of


class Contender(NamedTuple):
    """make: (world, model, lr) -> step. method: what the planner is told about it, from the model's shapes."""

    make: Callable[[World, nn.Module, float], Step]
    method: Callable[[Model, int], Method]
    steps: int = 1


def build(size: tuple[int, int, int], device: torch.device) -> nn.Module:
    """Return the demo's transformer of (layers, width, heads), the same on every rank."""
    torch.manual_seed(0)
    return Transformer(*size).to(device)


def _stepper(world: World, model: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(batch: Batch) -> Tensor:
        loss = world.loss(model, batch)
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
    return _stepper(world, model, torch.optim.AdamW(model.parameters(), lr=lr, eps=EPS, fused=True))


def exact(
    world: World, model: nn.Module, lr: float, hook: Any = None, state: Any = None, bucket_mb: int | None = None
) -> Step:
    """Step with DDP, with a communication hook or without, and fused AdamW."""
    wrapped = _wrap(world, model, bucket_mb)
    if hook is not None:
        wrapped.register_comm_hook(world.group if state is None else state, hook)
    return _stepper(world, wrapped, torch.optim.AdamW(model.parameters(), lr=lr, eps=EPS, fused=True))


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
        loss = world.loss(model, batch)
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
    return _stepper(world, model, optimizer)


def overlapped(make: Any, world: World, model: nn.Module, lr: float, schedule: Any = freeze) -> Step:
    """Step with one of ours behind the backward pass, however fast the wire is."""
    with world.binding:
        groups = ddp.bucketed(model.parameters())
        optimizer = fn.Optimizer(groups, partial(make, axis="data"), schedule=schedule, lr=lr, eps=EPS)
        ddp.overlap(model, optimizer, least_wire_seconds=0.0)
    return _stepper(world, model, optimizer)


def _method(send: Any, bucket: int | None = None, interval: int = 1) -> Callable[[Model, int], Method]:
    """Return how the planner sees it. bucket: bytes that leave together behind the backward pass, None for none."""

    def made(model: Model, ranks: int) -> Method:
        first = min(traffic.FIRST_BUCKET, bucket or 0)
        parts = parts_of(model, partial(send, ranks=ranks), bucket, first)
        return Method("", "flat", True, parts, bucket is not None, interval=interval)

    return made


def rounds(optimizer: Any, send: Any) -> Contender:
    """Return local steps. send: what the planner counts."""
    make = partial(ours, optimizer, schedule=fn.every(ROUND, start=WARM_UP))
    return Contender(make, _method(send, interval=ROUND), ROUND)


def without_eps(optimizer: Any) -> Any:
    """Return an optimizer that has no second moment, and so no use for `EPS`."""
    return lambda *args, eps, **settings: optimizer(*args, **settings)


def textbook_messages(shapes: Model, ranks: int) -> list[Message]:
    """Return the messages of DeepSpeed: tensor by tensor, bits and scales apart, four collectives each."""
    messages = []
    for n in shapes.lengths.elements():
        bits = (ranks - 1) * -(-n // (ranks * 8))
        scale = (ranks - 1) * 4
        messages += [Message("data", "all_to_all", bits), Message("data", "all_gather", scale)]
        messages += [Message("data", "all_gather", bits), Message("data", "all_gather", scale)]
    return messages if ranks > 1 else []


# One scale a tensor, as the other implementation of 1-bit Adam has it.
_signs = partial(traffic.codes, codec=sign())
_lazy, _rare = (
    partial(make, codec=sign(), feedback=fn.classic(lazy=True)) for make in (fn.onebit_adam, fn.zero_one_adam)
)

NONE = "no communication"
DDP = "DDP fp32"
ONEBIT = "fn 1-bit Adam"
OVERLAPPED = ", overlapped"
CONTENDERS: Mapping[str, Contender] = {
    NONE: Contender(alone, _method(lambda model, ranks: [])),
    DDP: Contender(exact, _method(traffic.exact, traffic.BUCKET)),
    "DDP bf16": Contender(
        partial(exact, hook=half_precision), _method(partial(traffic.exact, width=2), traffic.BUCKET)
    ),
    "DDP PowerSGD 1": Contender(partial(low_rank, 1), _method(partial(traffic.power_sgd, rank=1))),
    "1-bit Adam, tensor by tensor": Contender(textbook, _method(textbook_messages)),
    ONEBIT: Contender(partial(ours, _lazy), _method(_signs)),
    f"{ONEBIT}{OVERLAPPED}": Contender(partial(overlapped, _lazy), _method(_signs, 4 * ddp.BUCKET)),
    "fn 0/1 Adam": Contender(partial(ours, _rare, schedule=rarely), _method(_signs, interval=INTERVAL), INTERVAL),
    "fn LoCo int4, int8 back": Contender(
        partial(ours, partial(fn.loco_adamw, gather=fn.int8(), master=True)),
        _method(partial(traffic.sharded, codec=int4(), gather=int8())),
    ),
    "fn DiLoCo, int8": rounds(partial(fn.diloco, codec=int8()), partial(traffic.codes, codec=int8())),
    "fn PowerSGD 4": Contender(partial(ours, fn.powersgd_adamw), _method(partial(traffic.low_rank, rank=4))),
    "fn Lion, votes": Contender(
        partial(ours, without_eps(fn.lion_vote)), _method(partial(traffic.codes, codec=fn.ballots()))
    ),
}
"""What is compared, in the order in which it runs."""
