"""Islands that come and go, over gloo and torchft's lighthouse: kills at every point of a round, and returns.

`make torchft-test` runs these in an environment that has torchft. What needs no other island is in `test_islands.py`.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import pickle
import signal
import time
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import chains
import pytest
import ranks
import torch
import torch.distributed as dist
from sea import Sea
from torch import Tensor

import fn
from fn import tree
from fn.adapters.optim.core import stage_exchange
from fn.adapters.torchft.islands import weight_of
from fn.adapters.torchft.pace import Goodput

pytestmark = [
    pytest.mark.torchft,
    pytest.mark.skipif(not importlib.util.find_spec("torchft"), reason="torchft is not installed: make torchft-test"),
]

H = 4
SHAPES = [(5, 7), (7,), ()]
LOST_IN = 2
"""The round in which something happens, counted by the manager's steps; 0 is the one in which all meet."""

EXACT = fn.diloco
CODES = partial(fn.diloco, codec=fn.int8(), servers=False)


class Job(NamedTuple):
    """What an island does. at: where it is killed, or its exchange fails. full: how many it waits to be in the end.

    pace: seconds of a step by the clock of its machine. stalls: the round in which a step takes 100 s more. rest:
    seconds that it does rest in each step.
    """

    number: int
    lighthouse: str
    full: int
    make: Any = EXACT
    at: str | int | None = None
    fails: bool = False
    tokens: int | None = None
    fragments: int = 1
    start: int = 0
    delay: int = 0
    pace: float = 0
    stalls: int = -1
    rest: float = 0
    schedule: Any = None
    init_sync: bool = True
    least: int = LOST_IN + 2


class Told(NamedTuple):
    """What an island tells in the end. anchors: by round. exchanges: (round, islands, whether written, seconds)."""

    anchors: dict[int, str]
    last: list[list[float]]
    same: bool
    exchanges: list[tuple[int, int, bool, float]]
    steps: int
    lengths: list[int]
    progress: float
    goodput: tuple[float, ...]
    moved: list[bool]


def start(seed: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def fill(params: list[torch.nn.Parameter], step: int, island: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + island)
    for p in params:
        p.grad = 0.5 * p.detach() + torch.randn(p.shape, generator=generator)


def island(job: Job, end: Any) -> None:
    import torchft

    import fn.adapters.torchft.islands as adapter

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    limit = timedelta(seconds=60)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=20)), load_state_dict=None, state_dict=None,
        min_replica_size=1, use_async_quorum=False, timeout=limit, quorum_timeout=limit, rank=0, world_size=1,
        store_addr="localhost", store_port=store.port, lighthouse_addr=job.lighthouse, hostname="localhost",
        replica_id=f"island_{job.number}", init_sync=job.init_sync,
    )  # fmt: skip
    params = start(job.number if job.init_sync else 0)
    tokens = None if job.tokens is None else (lambda: job.tokens)
    schedule: Any = fn.every(H, fragments=job.fragments, start=job.start, delay=job.delay)
    schedule = job.schedule or (fn.every_seconds(1.0) if job.pace else schedule)
    opt = adapter.optimizer(params, job.make, manager, schedule=schedule, lr=0.02, tokens=tokens)
    exchanges: list[tuple[int, int, bool, float]] = []
    ask, begin, began = manager.should_commit, manager.start_quorum, [0.0]

    def here(point: str | int) -> None:
        if job.at != point or manager.current_step() != LOST_IN or (job.fails and exchanges[-1][0] == LOST_IN):
            return
        if job.fails:
            raise RuntimeError("a cable was cut")
        end.send_bytes(pickle.dumps(None))
        os.kill(os.getpid(), signal.SIGKILL)

    def start_quorum() -> None:
        began[0] = time.monotonic()
        here("quorum")
        begin()

    def should_commit() -> bool:
        here("commit")
        number, found = manager.current_step(), ask()
        exchanges.append((number, manager.num_participants(), found, time.monotonic() - began[0]))
        here("written")
        return found

    def staged(*args: Any) -> Any:
        here("counted")
        found = stage_exchange(*args)
        here("staged")
        return found

    anchors: dict[int, str] = {}
    lengths, clock, moved = [0], [0.0], list[bool]()
    end.send_bytes(b"")
    end.recv_bytes()  # now all have their libraries
    with (
        mock.patch.object(manager, "should_commit", should_commit),
        mock.patch.object(manager, "start_quorum", start_quorum),
        mock.patch.object(adapter, "stage_exchange", staged),
        mock.patch("fn.adapters.torchft.pace.now", lambda _: time.monotonic() if job.rest else clock[0]),  # noqa: PT008
    ):
        while True:
            full = [written and count == job.full for _, count, written, _ in exchanges[-2:]]
            ended = lengths[-1] == 0 if job.pace or job.rest else opt.steps % H == 0
            if full == [True, True] and manager.current_step() >= job.least and ended:
                break
            here(opt.steps % H)
            fill(params, opt.steps, job.number)
            stalls = job.stalls == manager.current_step() and lengths[-1] == 1
            time.sleep(job.rest)
            clock[0] += job.pace + 100 * stalls
            kept = [x.clone() for x in tree.fields(opt.states, "anchor")[0]]
            before, lengths[-1] = len(exchanges), lengths[-1] + 1
            opt.step()
            lengths += [0] if len(exchanges) > before else []
            (anchor,) = tree.fields(opt.states, "anchor")
            if stalls:
                moved = [not all(map(torch.equal, xs, anchor)) for xs in (params, kept)]
            anchors[manager.current_step()] = digest(anchor)
    same = all(torch.equal(p, x) for p, x in zip(params, anchor, strict=True))
    last, goodput = [x.tolist() for x in anchor], tuple(opt.goodput)
    told = Told(anchors, last, same, exchanges, opt.steps, lengths[:-1], opt.progress, goodput, moved)
    end.send_bytes(pickle.dumps(told))
    end.recv_bytes()  # the others may still talk to this one
    os._exit(0)


def digest(leaves: list[Tensor]) -> str:
    return hashlib.sha256(b"".join(x.numpy().tobytes() for x in leaves)).hexdigest()


class Islands(Sea):
    """Islands of one rank, by number."""

    def start(self, jobs: dict[int, dict[str, Any]]) -> None:
        """Let islands begin together, number -> what they do."""
        self.begin(island, {number: Job(number, self.lighthouse.address(), **job) for number, job in jobs.items()})


def check_alike(found: dict[int, Told], same: bool = True) -> None:
    """Hold the anchors of all rounds that two islands have seen against each other, bit for bit."""
    every = [told.anchors for told in found.values()]
    for number in {n for anchors in every for n in anchors}:
        assert len({anchors[number] for anchors in every if number in anchors}) == 1, f"round {number}"
    last = {max(anchors) for anchors in every}
    assert len(last) == 1
    assert not same or all(told.same for told in found.values())
    assert len({told.progress for told in found.values()}) == 1


POINTS = [*range(H), "quorum", "counted", "staged", "commit", "written"]
"""Before each local step of a round, and through its exchange."""


@pytest.mark.parametrize("point", POINTS)
def test_the_others_go_on_when_an_island_is_killed(point):
    victim = POINTS.index(point) % 3
    with Islands() as sea:
        sea.start({number: {"full": 2, "at": point if number == victim else None} for number in range(3)})
        sea.lost(victim)
        found = sea.end()
    check_alike(found)
    waits = [seconds for told in found.values() for n, _, _, seconds in told.exchanges if n == LOST_IN]
    print(f"killed at {point!r}: exchanges of that round took {', '.join(f'{x:.2f}' for x in waits)} s")
    for told in found.values():
        counts = {n: count for n, count, written, _ in told.exchanges if written}
        assert counts[1] == 3
        assert counts[max(counts)] == 2
        assert sum(not written for *_, written, _ in told.exchanges) <= 1


RETURNS: dict[str, dict[str, Any]] = {
    "exact": {},
    "codes": {"make": CODES},
    "fragments": {"make": partial(CODES, fragments=2), "fragments": 2},
    "late": {"make": CODES, "delay": 2},
    "late fragments": {
        "make": partial(chains.diloco, **CODES.keywords, fragments=2, alpha=0.5),
        "fragments": 2,
        "delay": 1,
    },
    "warm-up": {"start": 3 * H, "least": 3 * H + 3},
    "warm-up that ends meanwhile": {"start": H, "least": H + 4},
}


@pytest.mark.parametrize("method", RETURNS)
def test_an_island_that_returns_is_healed_and_agrees_with_the_others(method):
    job = {"full": 3, "least": LOST_IN + 3, **RETURNS[method]}
    with Islands() as sea:
        sea.start({number: {**job, "at": "quorum" if number == 1 else None} for number in range(3)})
        sea.lost(1)
        sea.start({1: job})
        found = sea.end()
    check_alike(found, same="fragments" not in job)
    assert all(len(told.anchors) >= 2 for told in found.values())
    assert min(found[1].anchors) > 1  # it began where the others were
    assert [told.exchanges[-1][1] for told in found.values()] == [3, 3, 3]


def test_islands_of_unequal_speed_take_as_many_steps_as_each_can():
    """Where an island is killed and returns, too; progress is the mean of what entered the exchanges."""
    with Islands() as sea:
        pace = (0.125, 0.25, 0.5)
        sea.start({n: {"full": 3, "pace": pace[n], "least": 5, "at": "quorum" if n == 2 else None} for n in range(3)})
        sea.lost(2)
        sea.start({2: {"full": 3, "pace": pace[2], "least": 5}})
        found = sea.end()
    check_alike(found)
    # A join may end with the first step; a round of two steps measures.
    assert set(found[0].lengths[2:]) == {8}
    assert set(found[1].lengths[2:]) == {4}
    assert found[2].lengths[-1] == 2


@pytest.mark.parametrize("schedule", [None, fn.every(4)], ids=["every_seconds", "every"])
def test_an_island_that_is_late_takes_the_outer_step_and_its_difference_counts_in_the_next_round(schedule):
    with Islands(least=3) as sea:
        job = {"full": 3, "init_sync": False, "pace": 0.25, "least": 8, "schedule": schedule}
        sea.start({n: {**job, "stalls": 5 if n == 1 else -1} for n in range(3)})
        found = sea.end()
    check_alike(found, same=False)
    late, other = found[1], found[0]
    assert late.lengths.count(2) == other.lengths.count(2) + 1  # the first round, and the one that was cut short
    assert max(other.lengths) == max(late.lengths) == 4
    assert late.moved == [True, True]  # the anchor has moved, and the params are still apart from it
    assert other.progress == pytest.approx(sum(told.steps for told in found.values()) / 3)  # nothing is lost


@pytest.mark.parametrize(("schedule", "least", "most"), [(fn.every_seconds(3.0), 0.9, 1.0), (fn.every(60), 0.6, 0.7)])
def test_an_island_at_half_the_speed_costs_less_where_steps_are_unequal(schedule, least, most):
    """The only one with a clock: these are the figures that `every_seconds` is for."""
    with Islands() as sea:
        sea.start({n: {"full": 2, "schedule": schedule, "rest": (0.025, 0.05)[n], "least": 6} for n in range(2)})
        found = sea.end()
    goodput = Goodput(*found[0].goodput)
    print(f"{type(schedule).__name__}: goodput {goodput}")
    assert least <= goodput.share <= most


TOKENS = (300, 100, 200)


@pytest.mark.parametrize("point", [2, 3, "commit", "written"])
def test_the_others_go_on_when_an_island_is_killed_while_a_mean_travels(point):
    """It is sent after step 1 of a round, and taken over after step 3."""
    with Islands() as sea:
        sea.start({number: {"full": 2, "delay": 2, "at": point if number == 1 else None} for number in range(3)})
        sea.lost(1)
        found = sea.end()
    check_alike(found)
    assert all(sum(not written for *_, written, _ in told.exchanges) <= 1 for told in found.values())


@pytest.mark.parametrize("delay", [0, 2])
def test_islands_do_what_ranks_do(delay):
    """With a warm-up, in which gradients are averaged, and means that come late."""
    with Islands(least=3) as sea:
        job = {"full": 3, "init_sync": False, "start": H, "delay": delay, "least": H + 4}
        sea.start(dict.fromkeys(range(3), job))
        found = sea.end()
    check_alike(found)
    for wanted in ranks.run(3, like_ranks, found[0].steps, delay):
        for x, y in zip(found[0].last, wanted, strict=True):
            assert torch.allclose(torch.tensor(x), torch.tensor(y), rtol=0, atol=2e-6)


def like_ranks(steps: int, delay: int) -> list[list[float]]:
    """Return the anchor of three ranks."""
    params = start(0)
    with fn.bind({"data": dist.group.WORLD}):
        schedule = fn.every(H, start=H, delay=delay)
        opt = fn.Optimizer(params, partial(EXACT, axis="data"), schedule=schedule, lr=0.02)
    for step in range(steps):
        fill(params, step, dist.get_rank())
        opt.step()
    return [x.tolist() for x in tree.fields(opt.states, "anchor")[0]]


FAILURES = [("counted", 0, EXACT), ("staged", 0, CODES), ("staged", 2, CODES)]


@pytest.mark.parametrize(("point", "delay", "make"), FAILURES)
def test_an_exchange_that_fails_is_dropped_and_nothing_is_lost(point, delay, make):
    with Islands(least=3) as sea:
        job = {"full": 3, "init_sync": False, "delay": delay, "make": make}
        fails = {"at": point, "fails": True}
        sea.start({n: {**job, "tokens": TOKENS[n], **(fails if n == 1 else {})} for n in range(3)})
        found = sea.end()
    check_alike(found)
    for told in found.values():
        assert [written for *_, written, _ in told.exchanges].count(False) == 1
        assert [count for _, count, _, _ in told.exchanges] == [3] * len(told.exchanges)
    steps = found[0].steps
    for wanted in ranks.run(3, of_ranks, steps, delay, make):
        for x, y in zip(found[0].last, wanted, strict=True):
            assert torch.allclose(torch.tensor(x), torch.tensor(y), rtol=0, atol=2e-6)


def of_ranks(steps: int, delay: int, make: Any) -> list[list[float]]:
    """Return the anchor of three ranks that leave out the exchange that the islands drop."""
    params, rank = start(0), dist.get_rank()

    class Weighed(fn.Optimizer):
        def exchange(self, round_: fn.Round) -> None:
            if self.steps != H * LOST_IN - delay:
                stage_exchange(self, round_, weight_of(TOKENS, rank)).commit()

    with fn.bind({"data": dist.group.WORLD}):
        opt = Weighed(params, partial(make, axis="data"), schedule=fn.every(H, delay=delay), lr=0.02)
    for step in range(steps):
        fill(params, step, rank)
        opt.step()
    return [x.tolist() for x in tree.fields(opt.states, "anchor")[0]]
