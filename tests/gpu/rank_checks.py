"""Checks of two processes on one device, over gloo or NCCL: overlap, DDP, a plain module, averaged gradients, FSDP2.

Each rank has a process that is spawned, not forked, since a fork cannot go on with a GPU. A check returns what is
wrong, or None.
"""

from __future__ import annotations

import json
import os
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_device import BACKEND, dawdle, join, poison, synchronise
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import fn
from fn import tree
from fn.adapters import ddp
from fn.adapters.ddp import overlapped as behind
from fn.adapters.fsdp import compress

STEPS = 50
FEW = 12
LIMIT = timedelta(minutes=2)
ELEMENTS = 3000
"""That a param group may have: the small models here have a few."""

MAKES: dict[str, Callable[..., fn.Transform]] = {
    "onebit_adam": fn.onebit_adam,
    "lazy errors": partial(fn.onebit_adam, feedback=fn.classic(lazy=True)),
    "onebit_lamb": fn.onebit_lamb,
    "zero_one_adam": fn.zero_one_adam,
}


def network(device: torch.device) -> nn.Sequential:
    """Return the same network on every rank."""
    torch.manual_seed(0)
    layers = [m for n, k in ((24, 96), (96, 96), (96, 48)) for m in (nn.Linear(n, k), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(48, 5)).to(device)


def batch(step: int, device: torch.device) -> Tensor:
    """Return this rank's own batch."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(16, 24, generator=generator).to(device)


def schedule(name: str) -> Callable[[int], fn.Phase]:
    """Return ten steps of warm-up, then all other phases."""
    return fn.zero_one_schedule(10, 4, 8, 4) if name == "zero_one_adam" else fn.freeze_after(10)


def options(name: str) -> dict[str, Any]:
    """Return what both ways of making an optimizer are given."""
    return {"schedule": schedule(name), "lr": 1e-2, "eps": 1e-4}


def on_rough_streams(opt: fn.Optimizer, device: torch.device) -> None:
    """Keep every stream that communicates busy before and after a job, and poison what is freed there."""
    stage = behind.stage_group
    sizes = [sum(p.numel() for p in group["params"]) for group in opt.param_groups]

    def slow(core: Any, *args: Any) -> Any:
        if core is not opt:
            return stage(core, *args)
        dawdle(device)
        found = stage(core, *args)
        poison(device, sizes)
        dawdle(device)
        return found

    behind.stage_group = slow


def differ(a: Any, b: Any) -> bool:
    """Tell whether two trees of tensors differ in a bit."""
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return not all(torch.equal(x.flatten().view(torch.uint8), y.flatten().view(torch.uint8)) for x, y in pairs)


def overlapped(device: torch.device, name: str = "onebit_adam", plain: bool = False) -> str | None:
    """Compare the overlapped steps with the serial ones, bit by bit. plain: over a module without DDP."""
    serial, other = network(device), network(device)
    whole = serial if plain else DistributedDataParallel(serial)
    wrapped = other if plain else DistributedDataParallel(other, bucket_cap_mb=0.02)
    make = partial(MAKES[name], axis="data")
    with fn.bind({"data": dist.group.WORLD}):
        first = fn.Optimizer(ddp.bucketed(serial.parameters(), ELEMENTS), make, **options(name))
        second = fn.Optimizer(ddp.bucketed(other.parameters(), ELEMENTS), make, **options(name))
    if not plain:
        ddp.keep_local(whole)
    running = ddp.overlap(wrapped, second, least_wire_seconds=0.0)
    on_rough_streams(second, device)
    sizes = [p.numel() for p in serial.parameters()]
    for t in range(STEPS):
        for model, opt in ((whole, first), (wrapped, second)):
            model(batch(t, device)).square().mean().backward()
            poison(device, sizes)
            opt.step()
            opt.zero_grad()
        if differ([[p.detach() for p in serial.parameters()], first.states],
                  [[p.detach() for p in other.parameters()], second.states]):  # fmt: skip
            return f"step {t} differs from the serial one"
    ddp.close(second)
    return None if running.bytes else "no step was taken behind the backward pass"


def averaged(device: torch.device) -> str | None:
    """Compare gradients that `average_gradients` averages in 4 bits on a device with the same on the CPU."""
    ends = []
    for where in (device, torch.device("cpu")):
        model = DistributedDataParallel(network(where))
        mean = ddp.average_gradients(model, fn.int4(), fn.damped(), schedule=fn.freeze_after(3), elements=ELEMENTS)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
        sizes = [p.numel() for p in model.parameters()]
        for t in range(FEW):
            model(batch(t, where)).square().mean().backward()
            poison(where, sizes)
            opt.step()
            opt.zero_grad()
        ends.append([p.detach().cpu() for p in model.parameters()])
        ddp.close(mean)
    return _apart(*ends)


def sharded(device: torch.device, codec: str = "int4") -> str | None:
    """Train under FSDP2 with gradients in codes, and compare with the same on the CPU."""
    ends = []
    for where in (device, torch.device("cpu")):
        model = network(where)
        mesh = init_device_mesh(where.type, (dist.get_world_size(),), mesh_dim_names=("data",))
        for layer in model[:-1:2]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        found = compress(model, *((fn.int4(), fn.damped()) if codec == "int4" else (fn.sign(), fn.classic())))
        opt = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
        for t in range(FEW):
            model(batch(t, where)).square().mean().backward()
            opt.step()
            opt.zero_grad()
        if not found.sent.total:
            return "nothing was sent in codes"
        shards = [p.detach() for p in model.parameters()]
        ends.append([(p.to_local() if isinstance(p, DTensor) else p).cpu() for p in shards])
    return _apart(*ends)


def _apart(here: list[Tensor], there: list[Tensor]) -> str | None:
    """Compare parameters of a device with those of the CPU; in all steps they move by 0.01.

    A number between two codes may be rounded either way.
    """
    most = max(float((a - b).abs().max()) for a, b in zip(here, there, strict=True) if a.numel())
    return None if most < 2e-3 else f"parameters differ by {most:.2g} from those of the CPU"


CHECKS: dict[str, Callable[[torch.device], str | None]] = {
    **{f"DDP, overlapped {name} equals serial": partial(overlapped, name=name) for name in MAKES},
    "a plain module, overlapped equals serial": partial(overlapped, plain=True),
    "average_gradients in 4 bits equals the CPU": averaged,
    "FSDP2 in 4 bits equals the CPU": sharded,
    "FSDP2 in signs equals the CPU": partial(sharded, codec="signs"),
}


def on_two_ranks(names: Sequence[str], device: torch.device, backend: str = BACKEND) -> dict[str, str | None]:
    """Run checks in two processes on one device; return what is wrong with each. A fault leaves out those behind it."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else its sums may differ from stream to stream
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_rank, (list(names), str(device), folder, backend), 2)
            died = "no answer"
        except Exception as error:
            died = str(error)
        answers = [json.loads(file.read_text()) if (file := Path(folder, f"{r}.json")).exists() else {} for r in (0, 1)]
    return {name: next((f for a in answers if (f := a.get(name, died)) is not None), None) for name in names}


def _rank(rank: int, names: list[str], where: str, folder: str, backend: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    device = join(rank, torch.device(where), store, backend, timeout=LIMIT)
    found: dict[str, str | None] = {}
    for name in names:
        try:
            found[name] = CHECKS[name](device)
            synchronise(device)
        except Exception:
            found[name] = traceback.format_exc(limit=-4)
        Path(f"{folder}/{rank}.json").write_text(json.dumps(found))
        if found[name] is not None:  # the other rank may wait for this one
            os._exit(1)
    dist.barrier()
    dist.destroy_process_group()
