"""Steps of the picks on a script's own shapes: their code, as it is printed, around a stand-in for the script's model.

The stand-in's gradients become ready one after the other, as the script's do, while matrix products take the time of
its computation. So what a pick hides behind the backward pass is hidden here, too, and what it takes beside its
messages, in Python and on the device, is in its steps.
"""

from __future__ import annotations

import gc
import logging
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from fn.planner.methods import label
from fn.planner.predict import FORWARD, Plan
from fn.planner.recommend import ALONE, BASE, DDP, IMPORTS, PICKS, Pick
from fn.planner.units import show_bytes, show_seconds
from fn.schedules import every
from fn.tools import calibrate
from fn.tools.hidden import hidden_of
from fn.tools.probe import slowest

WARM = 3
"""Steps of each pick that are not timed: kernels are compiled in them, buckets formed and connections opened."""

FEWEST, MOST, SECONDS = 5, 30, 1.0
"""Timed steps of each: as many as take about so many seconds in the script, within limits."""

EVERY = 2
"""Steps of a round here. One is local and one exchanges: both kinds are timed by themselves."""

ROOM = 64
"""Bytes for each parameter that steps take at most: parameters, gradients and moments twice, buckets, errors, codes."""


class Trials(NamedTuple):
    """steps: seconds by the name of a pick, and of `BASE`, AdamW under DDP. ranks: that took them. skipped: why others
    were not tried.
    """

    steps: Mapping[str, float]
    ranks: int
    skipped: Mapping[str, str]


def tries(params: Sequence[Tensor], compute: float, local_steps: int) -> Trials:
    """Take some steps of each pick that a model under DDP, or ranks that train alone, can take; all ranks call it.

    A step is the script's computation, and what the slowest rank takes beyond a step of AdamW without messages. These
    take turns with the pick's, so that other work on the machine slows both. On one rank, which has nobody to talk to,
    the difference is the method's own time.

    Args: params: whose shapes, dtypes and device are taken; they are not written. compute: seconds of the script's step
        without communication. local_steps: of a round.
    """
    if why := _no_room(params):
        return none(why)
    steps: dict[str, float] = {}
    skipped = {pick.name: "takes more changes of a script than a probe makes" for pick in PICKS if not pick.model}
    count = min(MOST, max(FEWEST, int(SECONDS / compute)))
    with _group(), _quiet(), torch.enable_grad():
        (each,) = slowest([1 / calibrate.flops(params[0].device)])
        work = Work(params[0].device, 1 / each)
        flags = hidden_of(params).flags
        plain = _Loop(StandIn(params, flags, compute, work))
        for pick in (BASE, *(pick for pick in PICKS if pick.model)):
            try:
                beyond = _beyond(plain, pick, StandIn(params, flags, compute, work), count, local_steps)
            except (TypeError, ValueError) as refused:  # by all ranks
                skipped[pick.name] = str(refused)
            else:
                steps[pick.name] = compute + max(0.0, beyond)
            gc.collect()  # hooks and what they hold are cycles
            if torch.accelerator.is_available():
                torch.accelerator.memory.empty_cache()
        return Trials(steps, dist.get_world_size(), skipped)


def none(why: str) -> Trials:
    """Return that nothing was tried."""
    return Trials({}, 1, {pick.name: why for pick in PICKS})


Seconds = dict[str, float]


def measured(tried: Trials, compute: float) -> tuple[Seconds, Seconds]:
    """Return what `plan` takes: own times, of one rank, in any topology; or steps, of several ranks."""
    found = {pick.row: tried.steps[pick.name] for pick in (BASE, *PICKS) if pick.name in tried.steps}
    if tried.ranks > 1:
        return {}, found
    return {label(row, kind): step - compute for row, step in found.items() for kind in ("flat", "two-level")}, {}


def show(tried: Trials, predicted: Plan) -> str:
    """Return lines with the steps that were tried, beside predictions, and with why others were not."""
    lines = []
    for pick in (BASE, *PICKS):
        if pick.name in tried.steps:
            p, step = predicted.of(pick.row, "flat"), tried.steps[pick.name]
            said, found = ("", p.step) if tried.ranks > 1 else (" on top of the computation", p.own)
            took = step if tried.ranks > 1 else step - p.compute
            lines.append(f"{pick.name}: predicted {show_seconds(found)}, measured {show_seconds(took)}{said}")
    for why in dict.fromkeys(tried.skipped.values()):
        names = "; ".join(name for name, reason in tried.skipped.items() if reason == why)
        lines.append(f"not tried: {names}: {why}")
    where = ", on one rank, which sends nothing" if tried.steps and tried.ranks == 1 else ""
    return "\n".join([f"steps on the script's shapes{where}:", *(f"  {line}" for line in lines)])


class _Loop:
    """A script that trains a model by an optimizer, AdamW if none is given."""

    def __init__(self, model: nn.Module, optimizer: Any = None) -> None:
        self.model = model
        self.optimizer: Any = optimizer or torch.optim.AdamW(model.parameters())

    def seconds(self) -> float:
        """Take a step, and return its seconds."""
        start = time.perf_counter()
        self.model().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        return time.perf_counter() - start


def _beyond(plain: _Loop, pick: Pick, model: nn.Module, count: int, local_steps: int) -> float:
    """Return the seconds that a pick takes beyond plain steps, in the mean over a round where ranks train alone."""
    from fn.adapters.ddp import close  # here, as a plan without a probe needs no adapter, which takes a while to import
    from fn.adapters.optim.optimizer import Optimizer

    wrapped = DistributedDataParallel(model) if pick.model == DDP else model
    kind = next(model.parameters()).device.type
    mesh = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("data",))
    names: dict[str, Any] = {"model": wrapped, "mesh": mesh}
    exec(f"{IMPORTS}\n{pick.code}", names)  # what is printed is what is timed
    loop = _Loop(wrapped, names.get("opt"))
    if pick.model == ALONE:
        loop.optimizer.schedule = every(EVERY)
    phases, alone, taken = [], [], []
    for _ in range(WARM + count):
        alone.append(plain.seconds())
        phases.append(getattr(loop.optimizer, "phase", None))
        taken.append(loop.seconds())
    if isinstance(loop.optimizer, Optimizer):
        close(loop.optimizer)
    pairs = [*zip(phases, slowest(taken), slowest(alone), strict=True)][WARM:]
    beyond = [statistics.median(t - a for of, t, a in pairs if of == phase) for phase in {phase for phase, *_ in pairs}]
    exchange, local = max(beyond), min(beyond)
    return local + (exchange - local) / (local_steps if pick.model == ALONE else 1)


class Work:
    """Matrix products, which take as long as a computation. flops: so many a second."""

    def __init__(self, device: torch.device, flops: float) -> None:
        self.x, self.w = calibrate.factors(device)
        self.out, self.each = torch.empty_like(self.x), 2 * self.w.numel() / flops  # seconds of a row

    def rows(self, count: int) -> None:
        """Multiply so many rows."""
        while count > 0:
            part = min(count, len(self.x))
            torch.mm(self.x[:part], self.w, out=self.out[:part])
            count -= part


class StandIn(nn.Module):
    """A model of parameters like those given, alike on all ranks, whose gradients are not."""

    def __init__(self, params: Sequence[Tensor], hidden: Sequence[bool], compute: float, work: Work) -> None:
        super().__init__()
        seeded = torch.Generator(params[0].device).manual_seed(0)
        new = [torch.empty(p.shape, dtype=p.dtype, device=p.device).normal_(0, 0.02, generator=seeded) for p in params]
        self.held, self.work = nn.ModuleList(map(_held, new, hidden)), work
        self.weights = [*self.parameters()]
        whole, total = sum(p.numel() for p in params), compute / work.each
        self.forward_rows = round(FORWARD * total)
        self.backward_rows = [(1 - FORWARD) * total * p.numel() / whole for p in params]
        self.scale = 1.0 + dist.get_rank()

    def forward(self) -> Tensor:
        """Return a number whose backward pass goes from the last parameter to the first."""
        with torch.no_grad():
            self.work.rows(self.forward_rows)
        x = torch.zeros((), device=self.weights[0].device, dtype=torch.float32)
        for p, rows in zip(self.weights, self.backward_rows, strict=True):
            x = _Layer.apply(x, p, rows, self)  # type: ignore[no-untyped-call]
        return x


def _held(x: Tensor, hidden: bool) -> nn.Module:
    """Return a module with a parameter that `fn.labels_of` labels as the script's."""
    if x.ndim == 2 and not hidden:
        return nn.Embedding(x.shape[0], x.shape[1], _weight=x)
    return nn.ParameterDict({"experts" if hidden and x.ndim > 2 else "weight": x})


class _Layer(torch.autograd.Function):
    """Gives its parameter a gradient, after a part of the computation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: Tensor, rows: float, model: StandIn) -> Tensor:
        ctx.p, ctx.rows, ctx.model = p.detach(), rows, model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.model.work.rows(round(ctx.rows))
        return grad, ctx.p * ctx.model.scale, None, None


@contextmanager
def _group() -> Iterator[None]:
    """Run among the ranks that there are; a process without a group is the one rank of a new one."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group(store=HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _quiet() -> Iterator[None]:
    """Run without advice on options of the picks, which the user does not see."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def _no_room(params: Sequence[Tensor]) -> str:
    """Return why no steps are tried, the same on all ranks, or nothing."""
    from fn.adapters.optim.shards import has_dtensors

    if has_dtensors(params):
        return "the script's parameters are shards"
    if len({p.device for p in params}) > 1:
        return "the script's parameters are on several devices"
    device, size = params[0].device, sum(p.numel() for p in params)
    if device.type == "cpu":  # whose memory the ranks of a machine share
        shared = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        free = _host_memory() // shared
    else:
        free, _ = torch.accelerator.get_memory_info(device)
    (left,) = slowest([float(size * ROOM - free)])
    return f"{show_bytes(size * ROOM)} are needed beside the script, {show_bytes(left)} more than are free" * (left > 0)


def _host_memory() -> int:
    """Return the bytes that are free, with what the system would give up; all where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return sys.maxsize
    return 1024 * int(next(line for line in lines if line.startswith("MemAvailable")).split()[1])
