"""Two processes on one GPU, over gloo: the overlapped step is the serial one, and what it adds to the backward pass.

gloo carries tensors of a device through the host, so nothing here says how fast a network is. What is timed is the
backward pass alone, until the stream of the model has done it; what still runs on other streams is not waited for.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import rank_checks
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from devices import of_rank
from gpu_rows import Check, Checks, Options, Row, at_most, outcome
from measure import synchronise
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fn
from fn.adapters import ddp

LIMIT = 1.05


def checks(options: Options) -> Checks:
    """Return the checks by name: each check of two ranks, and the time that overlap adds to a backward pass."""
    names = list(rank_checks.CHECKS)[: 1 if options.quick else None]
    found: dict[str, Check] = {name: partial(of_ranks, options, name) for name in names}
    found["overlap's price in the backward pass"] = partial(price, options)
    return found


def of_ranks(options: Options, name: str) -> Iterator[Row]:
    """Run a check of `tests/gpu/rank_checks.py`."""
    yield outcome(name, rank_checks.on_two_ranks([name], options.torch_device)[name])


def price(options: Options) -> Iterator[Row]:
    """Compare the backward pass with and without what is sent behind it."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (options, folder), 2)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in (0, 1)]
    alone, behind = (max(times[way] for times in found) for way in ("alone", "overlapped"))
    note = f"{1e3 * behind:.2f} ms against {1e3 * alone:.2f}; the slower of two ranks that share the device"
    yield Row("backward alone", 1e3 * alone, "ms")
    yield at_most(options, "backward with overlap / backward alone", behind / alone, LIMIT, "x", note)


def _rank(rank: int, options: Options, folder: str) -> None:
    torch.set_num_threads(1)
    device = of_rank(options.torch_device, 0)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    width, count = (32, 4) if options.quick else (2048, 12)  # 50 million parameters
    x = torch.randn(8 * width, width, device=device)
    ways = {name: _model(name, width, count, device) for name in ("alone", "overlapped")}
    times: dict[str, list[float]] = {name: [] for name in ways}
    for k in range(options.rounds + 4):
        for name, (model, opt) in ways.items():
            loss = model(x).square().mean()
            dist.barrier()
            synchronise(device)
            start = time.perf_counter()
            loss.backward()
            if device.type != "cpu":
                torch.accelerator.current_stream(device).synchronize()
            times[name] += [time.perf_counter() - start] * (k >= 4)
            opt.step()
            opt.zero_grad()
    Path(folder, f"{rank}.json").write_text(json.dumps({name: statistics.median(t) for name, t in times.items()}))
    dist.barrier()
    dist.destroy_process_group()


def _model(name: str, width: int, count: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model in DDP whose gradients stay local, and its optimizer, with overlap or without."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(m for _ in range(count) for m in (nn.Linear(width, width), nn.ReLU()))).to(device)
    model = DistributedDataParallel(layers, gradient_as_bucket_view=True)
    schedule, lr = fn.freeze_after(2), 1e-6
    if name == "overlapped":
        how = {"schedule": schedule, "lr": lr, "least_wire_seconds": 0.0}
        elements = width * width * 3
        return model, ddp.optimizer(model, fn.onebit_adam, elements=elements, eps=1e-4, **how)
    ddp.keep_local(model)
    with fn.bind({"data": dist.group.WORLD}):
        make = partial(fn.onebit_adam, axis="data")
        return model, fn.Optimizer(model.parameters(), make, schedule=schedule, lr=lr, eps=1e-4)
