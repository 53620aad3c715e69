"""Whole steps on a GPU, of one of two ranks: time against torch's fused AdamW, memory, launches and host waits.

A step on one rank alone says nothing to anybody. So the axis has two ranks here, of which the other one's messages are
this one's own, sent back on the device: all kernels of a step run, and no time goes into a wire. It is the compressed
phase of `benchmarks/steps/step.py`, whose contenders these are, over the tensors of a GPT: 24 layers make 292.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import fn
from benchmarks.gpu.rows import ON_CPU, Check, Checks, Options, Row, at_most
from benchmarks.measure import on_device
from benchmarks.steps.step import adapter, echo, torchs
from fn import Phase
from fn.adapters.ddp.buckets import bucketed
from fn.adapters.optim.core import stage_group, take

Step = Callable[[], Any]
FUSED = "AdamW fused, torch"
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "hipLaunchKernel",
            "hipExtModuleLaunchKernel", "hipModuleLaunchKernel")  # fmt: skip
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "hipStreamSynchronize",
         "hipDeviceSynchronize", "hipEventSynchronize")  # fmt: skip


class Contender(NamedTuple):
    """A step to measure. make: from parameters. slower: the most times torch's fused step. peak: the most bytes of
    temporary memory per parameter. launches, waits: the most kernels in a step, and waits of the host for the device.
    None: shown, and not judged.
    """

    make: Callable[[list[torch.nn.Parameter]], Step]
    slower: float | None = None
    peak: float | None = None
    launches: float | None = None
    waits: float | None = None


def _ours(make: Callable[..., fn.Transform], phase: Phase, *limits: float | None, **hyper: Any) -> Contender:
    made = partial(make, axis="data", **hyper)
    return Contender(partial(adapter, make=made, phase=phase), *limits)


def overlapped(params: list[torch.nn.Parameter]) -> Step:
    """Return the compressed step as `fn.adapters.ddp.overlap` takes it: group by group, and written at the end.

    Without a backward pass beside it, and without its thread.
    """
    with echo():
        make = partial(fn.onebit_adam, axis="data")
        opt = fn.Optimizer(bucketed(params), make, schedule=fn.freeze_after(2), lr=1e-4, refuse_averaged=False)
    for _ in range(2):
        opt.step()

    @torch.no_grad()
    def step() -> None:
        phase = Phase.COMPRESSED
        with opt.binding:
            each = enumerate(opt.param_groups)
            opt.staged.update((i, stage_group(opt, i, phase, [p.grad for p in group["params"]])) for i, group in each)
            take(opt, phase)

    return step


_LAZY = fn.classic(lazy=True)

CONTENDERS: dict[str, Contender] = {
    FUSED: Contender(partial(torchs, fused=True)),
    "AdamW, fn.Optimizer": Contender(partial(adapter, make=fn.adamw, phase=Phase.WARMUP), 1.20, 4.1, 100, 1),
    "1-bit Adam warm-up": _ours(fn.onebit_adam, Phase.WARMUP, None, 4.1, 100, 1),
    "1-bit Adam compressed": _ours(fn.onebit_adam, Phase.COMPRESSED, 1.80, 5.0, 200, 1),
    "1-bit Adam compressed, behind the backward pass": Contender(overlapped, None, 5.0, 700, 2),
    "1-bit Adam compressed, lazy errors": _ours(fn.onebit_adam, Phase.COMPRESSED, 1.35, 5.0, 200, 1, feedback=_LAZY),
    "1-bit Adam compressed, int8": _ours(fn.onebit_adam, Phase.COMPRESSED, codec=fn.int8(), feedback=fn.damped()),
    "0/1 Adam local": _ours(fn.zero_one_adam, Phase.LOCAL, None, None, None, 1),
    "0/1 Adam synchronisation": _ours(fn.zero_one_adam, Phase.COMPRESSED, None, None, None, 1),
    "1-bit LAMB compressed": _ours(fn.onebit_lamb, Phase.COMPRESSED, None, None, None, 1),
    "LoCo AdamW compressed": _ours(fn.loco_adamw, Phase.COMPRESSED, None, None, 200, 1),
    "1-bit Adam in shards, compressed": _ours(fn.sharded_onebit_adam, Phase.COMPRESSED, None, None, 400, 2),
}

QUICK = (FUSED, "1-bit Adam compressed")


def checks(options: Options) -> Checks:
    """Return the checks by name: the time of each beside torch's, then memory and launches of each alone."""
    found: dict[str, Check] = {}
    names = QUICK if options.quick else tuple(CONTENDERS)
    for what in (times, launches, memory):
        for name in names:
            if what is not times or name != FUSED:
                found[f"{what.__name__} of {name}"] = partial(what, options, name)
    return found


def shapes(options: Options) -> list[tuple[int, ...]]:
    """Return the shapes of a GPT's parameters: 12 for a layer, and 4."""
    width = options.width
    matrices = ((3 * width, width), (width, width), (4 * width, width), (width, 4 * width))
    vectors = [(w,) for w in (width, width, width, width, 3 * width, width, 4 * width, width)]
    layer = [*matrices, *vectors]
    return [(options.vocabulary, width), (1024, width), *layer * options.layers, (width,), (width,)]


def parameters(options: Options, grads: list[torch.Tensor] | None = None) -> list[torch.nn.Parameter]:
    """Return the parameters with gradients, of their own or those of others, which no step changes."""
    device = options.torch_device
    params = [torch.nn.Parameter(0.02 * torch.randn(shape, device=device)) for shape in shapes(options)]
    for i, p in enumerate(params):
        p.grad = torch.randn_like(p) if grads is None else grads[i]
    return params


def ready(options: Options, name: str, grads: list[torch.Tensor] | None = None) -> Step:
    """Return a step that has been taken in its phase before."""
    warnings.simplefilter("ignore")  # of steps from random gradients, which train nothing
    step = CONTENDERS[name].make(parameters(options, grads))
    for _ in range(2):
        step()
    return step


def times(options: Options, name: str) -> Iterator[Row]:
    """Time a contender in turns with torch's fused step. More than two at once would not fit into 78 GiB."""
    gc.collect()
    grads = [torch.randn(shape, device=options.torch_device) for shape in shapes(options)]
    steps = {contender: ready(options, contender, grads) for contender in (FUSED, name)}
    seconds = on_device(steps, options.rounds, options.torch_device)
    ratio, limit = seconds[name] / seconds[FUSED], CONTENDERS[name].slower
    title, note = f"time of {name}", f"{1e3 * seconds[name]:.3f} ms against {1e3 * seconds[FUSED]:.3f}"
    yield Row("parameters", sum(g.numel() for g in grads) / 1e6, "million", note=f"in {len(grads)} tensors")
    yield Row(title, ratio, "x fused", note=note) if limit is None else at_most(
        options, title, ratio, limit, "x fused", note
    )


def memory(options: Options, name: str) -> Iterator[Row]:
    """Measure what a step holds at most above parameters, gradients and state, and all else that is there."""
    gc.collect()
    step, title, limit = ready(options, name), f"peak of {name}", CONTENDERS[name].peak
    if not options.judges_speed:
        step()
        yield Row(title, wanted="" if limit is None else f"<= {limit:g}", note=ON_CPU)
        return
    count = sum(torch.Size(shape).numel() for shape in shapes(options))
    peak = peak_of(step, options.torch_device)
    note = f"{peak / 2**20:.1f} MiB"
    yield Row(title, peak / count, "B/param", note=note) if limit is None else at_most(
        options, title, peak / count, limit, "B/param", note
    )


def peak_of(step: Step, device: torch.device) -> float:
    """Return the most bytes that three steps hold on a device above what was there; 0 on a CPU."""
    if device.type == "cpu":
        return 0.0
    torch.accelerator.synchronize()
    before = torch.accelerator.memory_allocated()
    torch.accelerator.reset_peak_memory_stats()
    for _ in range(3):
        step()
    torch.accelerator.synchronize()
    return float(torch.accelerator.max_memory_allocated() - before)


def counted(step: Step, device: torch.device) -> dict[str, int]:
    """Count what a step launches, how often the host waits for the device, and what it reads from there."""
    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * (device.type == "cuda")]
    step()
    with profile(activities=activities) as found, record_function("the step"):
        step()
    events = found.events()
    whole = next(e for e in events if e.name == "the step").time_range
    inside = [e for e in events if whole.start <= e.time_range.start <= whole.end]
    counts = {kind: sum(e.name in names for e in inside) for kind, names in (("launches", LAUNCHES), ("waits", WAITS))}
    if device.type == "cuda" and not counts["launches"]:
        raise RuntimeError("expected the profile to show launches, but got none: CUPTI may be out of reach here")
    return {**counts, "reads": sum(e.name.startswith("Memcpy DtoH") for e in events)}


def launches(options: Options, name: str) -> Iterator[Row]:
    """Count launches and waits of a step."""
    counts = counted(ready(options, name), options.torch_device)
    notes = {"launches": "", "waits": f"{counts['reads']} copies to the host"}
    for kind, what in (("launches", "launches"), ("waits", "host waits")):
        limit, title, note = getattr(CONTENDERS[name], kind), f"{what} of {name}", notes[kind]
        yield Row(title, counts[kind], note=note if options.judges_speed else ON_CPU) if limit is None else at_most(
            options, title, counts[kind], limit, "", note
        )
