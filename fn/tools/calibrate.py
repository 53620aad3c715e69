"""Alpha and beta of a running job's links, and the seconds that coding takes, measured."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fn.collectives import primitives, transports
from fn.collectives.axis import Axis, Binding, axis_size, bind
from fn.collectives.codecs.codec import Codec
from fn.collectives.codecs.fp8 import fp8
from fn.collectives.codecs.integer import int4, int8
from fn.collectives.compressed import compressed_all_reduce
from fn.collectives.feedback import Feedback, classic, damped, off
from fn.collectives.hierarchy import initial_errors
from fn.collectives.ledger import ledger
from fn.errors import expected
from fn.planner.methods import BLOCKS, SIGN
from fn.planner.network import Cost, Link, Network
from fn.planner.units import show_rate, show_seconds

SIZES = tuple(4**k for k in range(5, 13))
"""Bytes that a rank holds when a collective is timed: 1 KiB to 16 MiB."""

REPEAT = 7
CODED = 2**22
"""Elements on which coding is timed."""

_RUNS: dict[str, Callable[[Tensor, str], Tensor]] = {
    "all_reduce": primitives.psum,
    "all_to_all": primitives.all_to_all,
    "all_gather": primitives.all_gather,
}


class Job(NamedTuple):
    """A running job: which rank this is, of how many, how many share a node, and on which device they talk."""

    rank: int
    world: int
    per_node: int
    device: torch.device


@contextmanager
def join_job(device: torch.device | None = None) -> Iterator[Job]:
    """Join the job that a launcher started, with the axes "node" and "local", or "data" if there is one node.

    Args: device: what the ranks talk on; None is the accelerator, or the CPU if there is none.
    Raises: ValueError if no launcher says which rank this is.
    """
    if not {"RANK", "WORLD_SIZE"} <= set(os.environ):
        raise ValueError("--calibrate: no job is running; start it with torchrun ... -m fn plan --calibrate ...")
    if device is None:
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        if device.type != "cpu":
            device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", 0)))
            torch.accelerator.set_device_index(device.index)
    joined = not dist.is_initialized()
    if joined:
        dist.init_process_group()
    try:
        world = dist.get_world_size()
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        shape, names = (
            ((world,), ("data",)) if per_node == world else ((world // per_node, per_node), ("node", "local"))
        )
        with bind(init_device_mesh(device.type, shape, mesh_dim_names=names)):
            yield Job(dist.get_rank(), world, per_node, device)
    finally:
        if joined:  # else it is somebody else's
            dist.destroy_process_group()


def measure(job: Job, sizes: Sequence[int] = SIZES, repeat: int = REPEAT) -> dict[str, Link]:
    """Return the link behind each bound axis that has more than one rank; every rank calls it and gets the same."""
    axes = ("data",) if job.per_node == job.world else ("node", "local")
    links = {}
    for axis in axes:
        if axis_size(axis) > 1:
            shared = job.per_node if axis == "node" else 1  # that many groups were measured side by side
            costs = {name: _cost(name, axis, job.device, sizes, repeat, shared) for name in _RUNS}
            links[axis] = Link(costs["all_to_all"], costs)
    return links


def _cost(name: str, axis: str, device: torch.device, sizes: Sequence[int], repeat: int, shared: int) -> Cost:
    sent, times = [], []
    for size in sizes:
        # (W, n): an all-to-all needs a row for each rank; four bytes an element.
        x = torch.zeros(axis_size(axis), max(1, size // (4 * axis_size(axis))), dtype=torch.float32, device=device)
        with ledger() as book:
            _RUNS[name](x, axis)
        sent.append(book.total)
        times.append(_slowest(statistics.median(_time(partial(_RUNS[name], x, axis), repeat, axis)), axis, device))
    # The time of no bytes is that of all messages, one after the other; latency is one message's.
    rounds = (2 if name == "all_reduce" else 1) * (axis_size(axis) - 1)
    latency, byte_time = fit(sent, times)
    return Cost(latency / rounds, 8 * shared / byte_time)


def _slowest(time: float, axis: str, device: torch.device) -> float:
    return float(primitives.all_gather(torch.tensor(time, dtype=torch.float64, device=device), axis).max())


def _time(run: Callable[[], object], repeat: int, axis: str | None = None) -> list[float]:
    times = []
    for turn in range(repeat + 1):
        if axis is not None:
            dist.barrier()  # else a rank that is late would be timed as if the link were slow
        start = time.perf_counter()
        run()
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        if turn:  # the first one compiles and connects
            times.append(time.perf_counter() - start)
    return times


def fit(sizes: Sequence[float], times: Sequence[float]) -> tuple[float, float]:
    """Return (a, b) >= 0 of t = a + b s: b from least squares, where large messages count, then a from the small half.

    Raises: ValueError with fewer than two different sizes or a time that is not above 0.
    """
    if len(set(sizes)) < 2 or min(times) <= 0:
        wanted = "two different sizes or more, and times above 0"
        raise ValueError(expected("sizes, times", wanted, f"{list(sizes)}, {list(times)}"))
    slope, _ = statistics.linear_regression(sizes, times)
    if slope <= 0:  # no size costs more than another: the link is too fast to be seen
        return statistics.median(times), 1e-15
    # The intercept of least squares is the noise of the large messages. What a message costs at least, small ones show.
    small = sorted(zip(sizes, times, strict=True))[: -(-len(sizes) // 2)]
    return max(0.0, statistics.median(time - slope * size for size, time in small)), slope


def coding(params: int, device: torch.device, repeat: int = REPEAT) -> Callable[[Network], dict[str, float]]:
    """Measure the seconds that encoding, serving and decoding `params` elements take.

    A collective runs whose messages go nowhere: each rank receives what it sent itself. Two ranks stand for any number,
    but not without servers, where a rank decodes the codes of all: there it is a line through two and four.

    Returns: network -> seconds by the `fn.planner.methods.Method.label`.
    """
    one_bit, signs = (_coding(codec, classic(), device, repeat) for codec in (SIGN, BLOCKS))
    two, four = (_coding(BLOCKS, classic(), device, repeat, ranks=w, servers=False) for w in (2, 4))
    floats = _coding(fp8(), off(), device, repeat)
    bytes_, nibbles = _coding(int8(), off(), device, repeat), _coding(int4(), damped(), device, repeat)
    named = ("onebit_adam", "zero_one_adam", "sharded_onebit_adam")
    seconds = {
        **dict.fromkeys((*named, "onebit_adam, overlapped", "onebit_adam, late"), signs),
        **dict.fromkeys((*(f"{name}, 1 bit" for name in named), "onebit_adam, 1 bit, overlapped"), one_bit),
        "onebit_lamb": one_bit,
        **dict.fromkeys(("onebit_adam, int8", "adamw, int8 gradients"), bytes_),
        "adamw, fp8 gradients": floats,
        **dict.fromkeys(("loco_adamw, int4", "loco_adamw, int4, int8 back", "adamw, int4 gradients"), nibbles),
        "adamw, int4 gradients, late": nibbles,
    }

    def among(ranks: int, elements: float) -> dict[str, float]:
        direct = two + max(0.0, four - two) / 2 * max(0, ranks - 2)
        names = [f"{name}, servers=False" for name in ("onebit_adam", "zero_one_adam")]
        names.append("onebit_adam, servers=False, overlapped")
        return {name: elements * time for name, time in (seconds | dict.fromkeys(names, direct)).items()}

    def on(net: Network) -> dict[str, float]:
        shards = among(net.nodes, params / net.per_node)
        return among(net.world, params) | {f"{name} (two-level)": time for name, time in shards.items()}

    return on


def _coding(
    codec: Codec, feedback: Feedback, device: torch.device, repeat: int, *, ranks: int = 2, servers: bool = True
) -> float:
    """Return the seconds an element."""
    with nowhere("data", ranks):
        x, rule = torch.randn(CODED, dtype=torch.float32, device=device), ("data", codec, feedback)
        errors = initial_errors(x, *rule, servers=servers)
        taken = _time(lambda: compressed_all_reduce(x, errors, *rule, servers=servers), repeat)
    return statistics.median(taken) / CODED


def memory(device: torch.device, repeat: int = REPEAT) -> float:
    """Return the bit/s at which the device's memory is read and written, by a copy."""
    x = torch.ones(4 * CODED, dtype=torch.float32, device=device)
    out = torch.empty_like(x)
    # Bits: 8 to a byte, each byte read once and written once.
    return 16 * 4 * x.numel() / statistics.median(_time(lambda: out.copy_(x), repeat))


def call(device: torch.device, repeat: int = REPEAT) -> float:
    """Return the seconds of a small operation that is called from Python."""
    x, count = torch.zeros(4, dtype=torch.float32, device=device), 1000

    def run() -> None:
        for _ in range(count):
            x.add_(1.0)

    return statistics.median(_time(run, repeat)) / count


def factors(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the factors of the matrix product that is timed."""
    x, w = (torch.ones(n, 256, dtype=torch.float32, device=device) for n in (2**14, 256))
    return x, w


def flops(device: torch.device, repeat: int = REPEAT) -> float:
    """Return the operations a second of a product of float32 matrices."""
    x, w = factors(device)
    out = torch.empty_like(x)
    return 2 * x.numel() * len(w) / statistics.median(_time(lambda: torch.mm(x, w, out=out), repeat))


def nowhere(axis: str, ranks: int) -> Binding:
    """Return a binding in which an axis has `ranks` ranks, and its messages cost nothing and come back."""
    transport = transports.Transport(
        all_to_all=lambda x: x,
        # (...) -> (W, ...), copied: rows that a transport returns have memory of their own.
        all_gather=lambda x: x.expand(ranks, *x.shape).contiguous(),
        psum=lambda x: x * ranks,
    )
    name = transports.register(f"nowhere, {ranks} ranks", transport)
    return Binding({axis: Axis(ranks, torch.tensor(0, dtype=torch.int64, device="cpu"), name)})


def show(links: Mapping[str, Link]) -> str:
    """Return a line per axis and collective."""
    lines = [
        f"measured on {axis!r}: {name:10}  {show_seconds(cost.latency)} a message, {show_rate(cost.bandwidth)}"
        for axis, link in links.items()
        for name, cost in link.measured.items()
    ]
    return "\n".join(lines)
