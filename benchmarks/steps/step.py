"""The optimizer step itself, on one thread or on a device: every way to run ours against every way to run AdamW.

    python -m benchmarks.steps.step --json benchmarks/results/step.json       # 10 million parameters, 150 tensors
    python -m benchmarks.steps.step --parameters 100000000
    python -m benchmarks.steps.step --device cuda                             # the limits of a GPU are in gpu.py

TorchOpt and optax are timed where they are installed (`pip install torchopt` and `pip install optax`). The compressed
phase is that of one of two ranks; the other rank's messages are its own, sent back, so no time goes into waiting.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1")

import torch

import fn
from benchmarks.devices import add_device, device_of
from benchmarks.measure import about, interleaved, markdown, write
from fn.collectives import transports
from fn.collectives.axis import Axis, Binding
from fn.kernels import memory_pool

Step = Callable[[], Any]


def echo() -> Binding:
    """Bind the axis "data" to two ranks, of which the other one says whatever this one says."""
    pair = transports.Transport(
        all_to_all=lambda x: x, all_gather=lambda x: x.expand(2, *x.shape), psum=lambda x: x.mul_(2)
    )
    return Binding({"data": Axis(2, torch.tensor(0), transports.register("echo", pair))})


def make_parameters(total: int, device: torch.device) -> list[torch.nn.Parameter]:
    """Return 100 matrices and 50 vectors."""
    side = int((total / 100) ** 0.5)
    shapes = [(side, side)] * 100 + [(side,)] * 50
    return [torch.nn.Parameter(torch.randn(shape).to(device)) for shape in shapes]


class Contenders:
    """Steps by name, each with parameters of its own and the same gradients; what a step must at least move.

    Args: total: parameters. device: where they are. only: the name of the one contender that is made; "" for all.
    """

    def __init__(self, total: int, device: torch.device, only: str = ""):
        torch.manual_seed(0)
        self.total, self.device, self.only, self.steps, self.bytes = total, device, only, {}, {}
        self.grads = [torch.randn(p.shape).to(device) for p in make_parameters(total, device)]

    def add(self, name: str, make: Callable[[list[torch.nn.Parameter]], Step], streams: float) -> None:
        """Add a step. streams: how often it must at least read or write a number per parameter."""
        if self.only not in ("", name):
            return
        params = make_parameters(self.total, self.device)
        for p, g in zip(params, self.grads, strict=True):
            p.grad = g
        self.steps[name] = make(params)
        self.bytes[name] = 4 * streams * sum(p.numel() for p in params)


def torchs(params: list[torch.nn.Parameter], **how: bool) -> Step:
    """Return the step of torch's AdamW."""
    return torch.optim.AdamW(params, lr=1e-4, **how).step


def adapter(params: list[torch.nn.Parameter], make: Any, phase: fn.Phase | fn.Round) -> Step:
    """Return the step of `fn.Optimizer` in a phase or a round, after two steps of warm-up."""
    with echo():
        opt = fn.Optimizer(params, make, schedule=lambda t: fn.Phase.WARMUP if t < 2 else phase, lr=1e-4,
                           refuse_averaged=False)  # fmt: skip
    for _ in range(2):
        opt.step()
    return opt.step


def adamw_by_hand(lr: Any) -> fn.Transform:
    """Return the links of `fn.adamw` as a user writes them."""
    return fn.chain(fn.scale_by_adam(), fn.add_decayed_weights(1e-2), fn.scale_by_learning_rate(lr))


def onebit_adam_by_hand(lr: Any) -> fn.Transform:
    """Return the four links of `fn.onebit_adam`."""
    sync = fn.compressed_average("data", fn.sign(block=64))
    moments = fn.scale_by_onebit_adam(0.9, 0.95, 1e-8, sync=sync, bias_correction=True, max_step=3.0)
    return fn.chain(fn.average("data"), moments, fn.add_decayed_weights(1e-2), fn.scale_by_learning_rate(lr))


def functional(params: list[torch.nn.Parameter], donated: bool, flat: bool = False, compiled: bool = False) -> Step:
    """Return the pure update of AdamW, over a list of tensors or one flat vector."""
    tx = fn.adamw(1e-4)
    tensors = [p.detach() for p in params]
    grads = [p.grad for p in params]
    if flat:
        tensors, grads = [torch.cat([t.view(-1) for t in x]) for x in (tensors, grads)]
    held = {"params": tensors, "state": tx.init(tensors)}
    update = fn.donate(tx.warmup_update) if donated else tx.warmup_update

    def apply(params: Any, state: Any) -> Any:
        updates, state = update(grads, state, params)
        if donated:
            torch._foreach_add_(fn.tree.leaves(params), fn.tree.leaves(updates))
            return params, state
        return fn.apply_updates(params, updates), state

    run = torch.compile(apply, fullgraph=True) if compiled else apply

    def step() -> None:
        with torch.no_grad():
            held["params"], held["state"] = run(held["params"], held["state"])

    return step


def torchopt_step(params: list[torch.nn.Parameter]) -> Step:
    """Return TorchOpt's functional AdamW."""
    import torchopt

    optimizer = torchopt.adamw(1e-4)
    tensors, grads = [p.detach() for p in params], [p.grad for p in params]
    held = {"params": tensors, "state": optimizer.init(tensors)}

    def step() -> None:
        updates, held["state"] = optimizer.update(grads, held["state"], params=held["params"], inplace=False)
        held["params"] = torchopt.apply_updates(held["params"], updates, inplace=False)

    return step


def optax_step(params: list[torch.nn.Parameter]) -> Step:
    """Return optax's AdamW under jit, its buffers donated."""
    import jax
    import optax

    optimizer = optax.adamw(1e-4, weight_decay=1e-2)
    tensors, grads = ([jax.numpy.asarray(t.detach().numpy()) for t in x] for x in (params, [p.grad for p in params]))
    held = {"params": tensors, "state": optimizer.init(tensors)}

    @partial(jax.jit, donate_argnums=(0, 1))
    def run(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step() -> None:
        held["params"], held["state"] = run(held["params"], held["state"], grads)
        jax.block_until_ready(held["params"])

    return step


def all_contenders(total: int, compiled: bool, device: torch.device, only: str = "") -> Contenders:
    """Return every contender that can run here, or one."""
    found = Contenders(total, device, only)
    found.add("AdamW fused, torch", partial(torchs, fused=True), 7)
    found.add("AdamW foreach, torch", partial(torchs, foreach=True), 7)
    found.add("AdamW for-loop, torch", partial(torchs, foreach=False), 7)
    found.add("AdamW, fn.Optimizer", partial(adapter, make=fn.adamw, phase=fn.Phase.WARMUP), 7)
    found.add("AdamW, a chain by hand, fn.Optimizer", partial(adapter, make=adamw_by_hand, phase=fn.Phase.WARMUP), 7)
    found.add("AdamW, fn functional", partial(functional, donated=False), 7)
    found.add("AdamW, fn functional, donated", partial(functional, donated=True), 7)
    if compiled:
        found.add("AdamW, fn compiled, donated, flat", partial(functional, donated=True, flat=True, compiled=True), 7)
    for name, lazy, streams in (("", False, 11), (", lazy error", True, 8)):
        onebit = partial(fn.onebit_adam, axis="data", feedback=fn.classic(lazy=lazy))
        make = partial(adapter, make=onebit, phase=fn.Phase.COMPRESSED)
        found.add(f"1-bit Adam compressed, fn.Optimizer{name}", make, streams + 1)
    by_hand = partial(adapter, make=onebit_adam_by_hand, phase=fn.Phase.COMPRESSED)
    found.add("1-bit Adam, a chain by hand, fn.Optimizer", by_hand, 12)
    ints = partial(fn.onebit_adam, axis="data", codec=fn.int8(), feedback=fn.damped())
    found.add("1-bit Adam in int8, fn.Optimizer", partial(adapter, make=ints, phase=fn.Phase.COMPRESSED), 9)
    coded = partial(fn.onebit_adam, axis="data", warmup=fn.int8())
    found.add("1-bit Adam warm-up in int8, fn.Optimizer", partial(adapter, make=coded, phase=fn.Phase.WARMUP), 9)
    zero_one = partial(fn.zero_one_adam, axis="data")
    found.add("0/1 Adam local, fn.Optimizer", partial(adapter, make=zero_one, phase=fn.Phase.LOCAL), 6)
    found.add("0/1 Adam synchronisation, fn.Optimizer", partial(adapter, make=zero_one, phase=fn.Phase.COMPRESSED), 15)
    onebit_lamb = partial(fn.onebit_lamb, axis="data")
    for phase, streams in ((fn.Phase.WARMUP, 8), (fn.Phase.COMPRESSED, 14)):
        make = partial(adapter, make=onebit_lamb, phase=phase)
        found.add(f"1-bit LAMB {phase.value}, fn.Optimizer", make, streams)
    others = [("torchopt", "AdamW functional, TorchOpt", torchopt_step)]
    if device.type == "cpu":  # where optax shares the tensors
        others.append(("optax", "AdamW under jit, donated, optax", optax_step))
    for package, name, make in others:
        try:
            found.add(f"{name} {version(package)}", make, 7)
        except ImportError as error:
            print(f"{name}: not timed ({error})", file=sys.stderr)
    return found


def peak_bytes(step: Step, device: torch.device) -> int:
    """Return by how much steps raise the memory of this process, or device, above parameters, gradients and state."""
    step()  # some make their state in the first one
    if device.type != "cpu":
        before = torch.accelerator.memory_allocated()
        torch.accelerator.reset_peak_memory_stats()
        for _ in range(3):
            step()
        return int(torch.accelerator.max_memory_allocated() - before)
    memory_pool.clear()  # what ours keeps for the next step counts
    try:
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    except OSError:
        return -1
    before = _status("VmRSS")
    for _ in range(3):
        step()
    return max(_status("VmHWM") - before, 0)


def peak_alone(name: str, options: argparse.Namespace) -> float:
    """Return the peak of a contender per parameter, measured in a process of its own that keeps no freed memory."""
    command = [sys.executable, "-m", "benchmarks.steps.step", "--peak", name, "--parameters", str(options.parameters)]
    command += ["--device", device_of(options).type]
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.split()[-1]) / options.parameters


def _status(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes per second of a large copy, read and written."""
    x, y = (torch.ones(1 << (24 if device.type == "cpu" else 28), device=device) for _ in range(2))
    seconds, _ = interleaved({"copy": lambda: y.copy_(x)}, 11, device=device)
    return 2 * 4 * x.numel() / seconds["copy"]


def table(result: dict[str, Any]) -> str:
    """Return the figures as Markdown."""
    head = "| step | ms | of torch's fused AdamW | peak, bytes per parameter |"
    rows = []
    for name, row in result["rows"].items():
        rows.append((name, f"{row['ms']:.1f}", f"{row['of_fused']:.2f}", f"{row['peak_bytes_per_parameter']:.1f}"))
    return markdown(head, rows)


def main() -> None:
    """Run, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--no-compile", action="store_true", help="leave the compiled step out")
    parser.add_argument("--peak", metavar="STEP", help="print the peak memory of one step in bytes, and end")
    add_device(parser)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # of steps from random gradients, which train nothing
    torch.set_num_threads(1)
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # one core for all, whatever their thread pools think
    device = device_of(options)
    found = all_contenders(options.parameters, not options.no_compile, device, options.peak or "")
    if options.peak:
        print(peak_bytes(found.steps[options.peak], device))
        return
    seconds, _ = interleaved(found.steps, options.rounds, device=device)
    bandwidth, base = copy_bandwidth(device), seconds["AdamW fused, torch"]
    rows = {}
    for name in found.steps:
        share = found.bytes[name] / seconds[name] / bandwidth
        rows[name] = {
            "ms": 1e3 * seconds[name],
            "of_fused": seconds[name] / base,
            "of_copy_bandwidth": share,
            "floor_bytes": found.bytes[name],
            "peak_bytes_per_parameter": peak_alone(name, options),
        }
    result = {"about": about(), "parameters": options.parameters, "copy": bandwidth, "rows": rows}
    print(table(result))
    write(options.json, result)


if __name__ == "__main__":
    main()
