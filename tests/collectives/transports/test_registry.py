"""A transport of one's own, whose ranks are threads: every form of a result but the right one is refused."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fn
from fn.collectives import transports
from fn.collectives.axis import Axis, Binding

PHASES = [fn.Phase.WARMUP] * 2 + [fn.Phase.COMPRESSED] * 3
SHAPES = [(6, 5), (7,), (), (0,)]


class Meeting:
    """Where the threads of an axis hand each other tensors."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=30)
        self.slots: list[Any] = [None] * size

    def everyones(self, rank: int, x: Tensor) -> list[Tensor]:
        self.slots[rank] = x.clone()
        self.barrier.wait()
        found = list(self.slots)
        self.barrier.wait()
        return found

    def transport(self, rank: int) -> transports.Transport:
        return transports.Transport(
            all_to_all=lambda x: torch.stack([rows[rank] for rows in self.everyones(rank, x)]),
            all_gather=lambda x: torch.stack(self.everyones(rank, x)),
            psum=lambda x: torch.stack(self.everyones(rank, x)).sum(0, dtype=x.dtype),
        )


Change = Callable[[transports.Transport], transports.Transport]


def on_threads(sizes: dict[str, int], f: Callable[[int], Any], change: Change = lambda t: t) -> list[Any]:
    """Return what f(rank) returns on each thread, with the axes bound, the last of which counts fastest."""
    places = list(itertools.product(*map(range, sizes.values())))
    meetings: dict[Any, Meeting] = {}

    def run(rank: int) -> Any:
        axes = {}
        for i, (name, size) in enumerate(sizes.items()):
            place = places[rank]
            way = change(meetings[name, place[:i], place[i + 1 :]].transport(place[i]))
            key = transports.register(f"thread {rank} on {name}", way)
            axes[name] = Axis(size, torch.tensor(place[i]), key)
        try:
            with Binding(axes):
                return f(rank)
        except BaseException:
            for meeting in meetings.values():
                meeting.barrier.abort()
            raise

    for place in places:
        for i, (name, size) in enumerate(sizes.items()):
            meetings.setdefault((name, place[:i], place[i + 1 :]), Meeting(size))
    with ThreadPoolExecutor(len(places)) as pool:
        jobs = [pool.submit(run, rank) for rank in range(len(places))]
    problems = [job.exception() for job in jobs]
    for problem in sorted(filter(None, problems), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise problem
    return [job.result() for job in jobs]


def gradients(step: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def params() -> list[Tensor]:
    generator = torch.Generator().manual_seed(99)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def train(make: Callable[..., fn.Transform], rank: int) -> list[Tensor]:
    tx, p = make(), params()
    state = tx.init(p)
    for t, phase in enumerate(PHASES):
        updates, state = tx.update(phase)(gradients(t, rank), state, p)
        p = fn.apply_updates(p, updates)
    return p


def simulated(make: Callable[..., fn.Transform], sizes: dict[str, int]) -> list[Tensor]:
    tx, p = make(), params()
    dims = fn.rank_dims(tx.init(p))

    def on_all(f: Any, in_dims: Any, out_dims: Any) -> Any:
        for name, size in reversed(sizes.items()):
            f = fn.simulate(f, name, size, in_dims=in_dims, out_dims=out_dims)
        return f

    def step(g: Any, s: Any, p: Any, phase: fn.Phase) -> Any:
        updates, s = tx.update(phase)(g, s, p)
        return fn.apply_updates(p, updates), s

    state, world = on_all(tx.init, None, dims)(p), torch.Size(sizes.values())
    for t, phase in enumerate(PHASES):
        each = [gradients(t, rank) for rank in range(world.numel())]
        g = [torch.stack(leaf).unflatten(0, world) for leaf in zip(*each, strict=True)]
        p, state = on_all(partial(step, phase=phase), (0, dims, None), (None, dims))(g, state, p)
    return p


AXES = ("local", "node")
CASES = {
    "1-bit Adam": ({"data": 3}, partial(fn.onebit_adam, 0.1, axis="data")),
    "no servers": ({"data": 3}, partial(fn.onebit_adam, 0.1, axis="data", servers=False)),
    "LoCo": ({"data": 2}, partial(fn.loco_adamw, 0.1, axis="data")),
    "two axes": ({"node": 2, "local": 2}, partial(fn.onebit_adam, 0.1, axis=AXES, codec=(fn.int8(), fn.sign()))),
    "shards on two axes": ({"node": 3, "local": 2}, partial(fn.loco_adamw, 0.1, axis=AXES)),
}


@pytest.mark.parametrize("name", CASES)
def test_threads_train_what_the_simulation_trains(name):
    """Over several axes, too, although no launcher says how many ranks there are."""
    sizes, make = CASES[name]
    expected = simulated(make, sizes)
    for found in on_threads(sizes, partial(train, make)):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def later(x: Tensor) -> Future[Tensor]:
    handle: Future[Tensor] = Future()
    handle.set_result(x)
    return handle


WRONG: dict[str, tuple[str, Callable[[Tensor], Any], str]] = {
    "a handle": ("all_gather", later, "got Future"),
    "a list": ("all_gather", list, "got list"),
    "rows in one": ("all_gather", Tensor.flatten, r"got torch.uint8 \(\d+,\) on cpu"),
    "nothing": ("psum", lambda x: None, "got NoneType"),
    "another dtype": ("psum", Tensor.double, r"to return a tensor, torch.float32 .*got torch.float64"),
    "an array": ("psum", Tensor.numpy, "got ndarray"),
    "numbers for bytes": ("all_to_all", Tensor.float, "got torch.float32"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_result_is_refused_by_name(case):
    collective, spoil, text = WRONG[case]

    def change(way: transports.Transport) -> transports.Transport:
        right = getattr(way, collective)
        return way._replace(**{collective: lambda x: spoil(right(x))})

    with pytest.raises(TypeError, match=rf"^transport: expected {collective} of 'thread \d on data' .*{text}"):
        on_threads({"data": 2}, partial(train, partial(fn.onebit_adam, axis="data")), change)


def test_a_sum_that_is_taken_in_place_leaves_gradients_alone():
    def change(way: transports.Transport) -> transports.Transport:
        return way._replace(psum=lambda x: x.copy_(way.psum(x)))

    def step(rank: int) -> tuple[Tensor, Tensor]:
        g = torch.full((3,), 1.0 + rank)
        (mean,), _ = fn.average("data").warmup_update([g], (), [g])
        return g, mean

    for rank, (g, mean) in enumerate(on_threads({"data": 2}, step, change)):
        assert torch.equal(g, torch.full((3,), 1.0 + rank))
        assert torch.equal(mean, torch.full((3,), 1.5))


def test_rows_that_lie_otherwise_in_memory_are_as_a_compiler_expects_them():
    way = transports.Transport(Tensor.clone, lambda x: x.expand(2, *x.shape), lambda x: 2 * x)
    with Binding({"data": Axis(2, torch.tensor(0), transports.register("expanded", way))}):
        gather = torch.compile(lambda x: fn.all_gather(x, "data") + 1, backend="aot_eager", fullgraph=True)
        assert fn.all_gather(torch.ones(3), "data").is_contiguous()
        assert torch.equal(gather(torch.ones(3)), torch.full((2, 3), 2.0))


def test_a_permutation_goes_through_the_all_to_all() -> None:
    def swapped(rank: int) -> Tensor:
        found: Tensor = fn.permute(torch.arange(2.0) + 10 * rank, "data", [2, 1, 0])
        return found

    for rank, found in enumerate(on_threads({"data": 3}, swapped)):
        assert torch.equal(found, torch.arange(2.0) + 10 * (2 - rank))
