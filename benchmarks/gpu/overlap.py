"""Two processes on one GPU: the overlapped step is the serial one, what it adds to the backward pass, what it costs.

They talk over NCCL, and over gloo only where that fails: the first check says so. Two GPUs are one for each. Ranks that
share a GPU send through the host, so nothing here says how fast a network is. What is timed is the backward pass alone,
until the stream of the model has done it; what still runs on other streams is not waited for.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import rank_checks
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_device import join
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import fn
from benchmarks.gpu.rows import Check, Checks, Options, Row, at_most, outcome
from benchmarks.gpu.step import counted, peak_of
from benchmarks.measure import synchronise
from fn.adapters import ddp

LIMIT = 1.05


def checks(options: Options) -> Checks:
    """Return the checks by name: each check of two ranks, and the time that overlap adds to a backward pass."""
    names = list(rank_checks.CHECKS)[: 1 if options.quick else None]
    found: dict[str, Check] = {name: partial(of_ranks, options, name) for name in names}
    found["overlap's price in the backward pass"] = partial(price, options)
    found["a step of ddp.optimizer"] = partial(whole_step, options)
    return {"the backend of two ranks": partial(of_backend, options), **found}


@cache
def backend(device: str) -> str:
    """Return what two ranks talk over: NCCL, or gloo where two processes cannot add numbers up over it."""
    if torch.device(device).type != "cuda":
        return "gloo"
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(_add, (device, folder), 2)
        except Exception as error:
            print(f"NCCL fails: {error}", file=sys.stderr)
            return "gloo"
    return "nccl"


def _add(rank: int, device: str, folder: str) -> None:
    where = join(rank, torch.device(device), dist.FileStore(f"{folder}/store", 2), "nccl", timeout=timedelta(minutes=1))
    x = torch.full((1 << 20,), rank + 1.0, device=where)
    dist.all_reduce(x)
    assert bool((x == 3).all()), x
    dist.destroy_process_group()


def of_backend(options: Options) -> Iterator[Row]:
    """Say what two ranks talk over; on a GPU of NVIDIA's, gloo is a fault."""
    found = backend(options.device)
    count = 0 if options.torch_device.type == "cpu" else torch.accelerator.device_count()
    fault = f"NCCL failed, so that {found} was used" if options.device == "cuda" and found != "nccl" else None
    yield outcome(f"two ranks on {min(count, 2)} devices talk over {found}", fault)


def of_ranks(options: Options, name: str) -> Iterator[Row]:
    """Run a check of `tests/gpu/rank_checks.py`."""
    yield outcome(name, rank_checks.on_two_ranks([name], options.torch_device, backend(options.device))[name])


def price(options: Options) -> Iterator[Row]:
    """Compare the backward pass with and without what is sent behind it."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, (options, folder, backend(options.device)), 2)
        found = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in (0, 1)]
    alone, behind = (max(times[way] for times in found) for way in ("alone", "overlapped"))
    note = f"{1e3 * behind:.2f} ms against {1e3 * alone:.2f}; the slower of two ranks that share the device"
    yield Row("backward alone", 1e3 * alone, "ms")
    yield at_most(options, "backward with overlap / backward alone", behind / alone, LIMIT, "x", note)


def whole_step(options: Options) -> Iterator[Row]:
    """Take steps of the real `ddp.optimizer` at 1.3 billion parameters: time, launches, waits, peak."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_whole, (options, folder, backend(options.device)), 2)
        found = json.loads(Path(folder, "0.json").read_text())
    note = f"{found['parameters'] / 1e6:.0f} million parameters; forward, backward and step"
    yield Row("a step of ddp.optimizer in codes", 1e3 * found["seconds"], "ms", note=note)
    yield Row("launches in it", found["launches"], note="the model's own among them")
    yield at_most(options, "waits of the host in it", found["waits"], 2, "", f"{found['reads']} copies to the host")
    yield at_most(options, "its peak above what stays", found["peak"] / found["parameters"], 9.0, "B/param")


def _whole(rank: int, options: Options, folder: str, over: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    device = join(rank, options.torch_device, dist.FileStore(f"{folder}/store", 2), over)
    width, count = (16, 4) if options.quick else (4096, 80)
    model, opt = _model("overlapped", width, count, device)
    x = torch.randn(64, width, device=device)

    def step() -> None:
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad(set_to_none=False)

    for _ in range(5):
        step()
    numbers = sum(p.numel() for p in model.parameters())
    found: dict[str, float] = {"parameters": numbers, **counted(step, device)}
    times = []
    for _ in range(2 if options.quick else 5):
        dist.barrier()
        synchronise(device)
        start = time.perf_counter()
        step()
        synchronise(device)
        times.append(time.perf_counter() - start)
    found |= {"seconds": statistics.median(times), "peak": peak_of(step, device)}
    Path(folder, f"{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _rank(rank: int, options: Options, folder: str, over: str) -> None:
    torch.set_num_threads(1)
    device = join(rank, options.torch_device, dist.FileStore(f"{folder}/store", 2), over)
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
