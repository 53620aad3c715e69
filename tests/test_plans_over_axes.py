"""Plans over several axes are made once: as many tensors live after step 300 as after step 12."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from registry import OPTIMIZERS, Named
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase
from fn.collectives import transports
from fn.collectives.axis import Axis, Binding

AXES = ("local", "node")
SHAPES = [(6, 5), (7,), (), (0,), (40, 15)]
CODES_WITHIN = {"codec": (fn.int8(), fn.sign())}
CODES_BACK = {"codec": (fn.int8(block=8), fn.int4(block=8)), "gather": (fn.int8(block=8), fn.int8(block=8))}
MAKES: dict[str, tuple[Named, dict[str, Any]]] = {
    **{o.name: (o, {}) for o in OPTIMIZERS},
    **{f"{o.name}, codes within": (o, CODES_WITHIN) for o in OPTIMIZERS if o.name.startswith(("onebit", "zero"))},
    **{f"{o.name}, codes back": (o, CODES_BACK) for o in OPTIMIZERS if o.name.startswith(("loco", "sharded"))},
}
EARLY, SOON, LATE = 12, 36, 300
"""Steps after which tensors are counted: multiples of the numbers of phases, so that all follow the same phase."""


def tensors() -> int:
    """Return how many tensors live."""
    gc.collect()
    return sum(type(o) in (torch.Tensor, torch.nn.Parameter) for o in gc.get_objects())


def phase_of(optimizer: Named, t: int) -> Phase:
    """Return the phases in turn, in an order that 0/1 Adam allows."""
    first, *others = optimizer.phases
    return [first, *reversed(others)][t % len(optimizer.phases)]


def gradients(t: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * t + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def in_place(name: str, binding: Any, rank: int, last: int) -> list[int]:
    """Train with `fn.Optimizer`."""
    optimizer, hyper = MAKES[name]
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    make, schedule = partial(optimizer.make, axis=AXES, **hyper), partial(phase_of, optimizer)
    with binding:
        opt = fn.Optimizer(params, make, schedule=schedule, lr=0.01, refuse_averaged=False)
    found = []
    for t in range(last):
        for p, g in zip(params, gradients(t, rank), strict=True):
            p.grad = g
        opt.step()
        if t + 1 in (EARLY, last):
            found.append(tensors())
    return found


def pure(name: str, binding: Any, rank: int, last: int) -> list[int]:
    """Train with pure updates."""
    optimizer, hyper = MAKES[name]
    tx, params = optimizer.make(lr=0.01, axis=AXES, **hyper), [torch.ones(shape) for shape in SHAPES]
    found = []
    with binding:
        state = tx.init(params)
        for t in range(last):
            updates, state = tx.update(phase_of(optimizer, t))(gradients(t, rank), state, params)
            params = fn.apply_updates(params, updates)
            if t + 1 in (EARLY, last):
                found.append(tensors())
    return found


def among_equals(rank: int, size: int, stride: int) -> transports.Transport:
    """Return a transport that needs no other process, for ranks that would all send what this one sends.

    Only messages of 16 bytes differ: ranks of a grid tell each other apart by as many random ones. stride: of the axis,
    by which the ranks of a grid are numbered.
    """

    def all_gather(x: torch.Tensor) -> torch.Tensor:
        random = x.dtype == torch.uint8 and x.shape[-1:] == (16,)
        return torch.stack([x ^ (stride * i) if random else x for i in range(size)])

    return transports.Transport(
        all_to_all=lambda x: torch.stack([x[rank]] * size),
        all_gather=all_gather,
        psum=lambda x: x * size,
    )


@pytest.fixture(scope="module", autouse=True)
def _frozen():
    """Leave what was there before out of the collections and counts: most of their time is the modules of torch."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


LONG = [pytest.param(LATE, train, marks=pytest.mark.reliability) for train in (in_place, pure)]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(eps|gradients):")
@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize(("last", "train"), [(SOON, in_place), *LONG])
def test_as_many_tensors_live_at_the_end_as_early_on(last, train, name):
    ways = [transports.register(f"{axis} among equals", among_equals(1, 2, 2**i)) for i, axis in enumerate(AXES)]
    binding = Binding({axis: Axis(2, torch.tensor(1), way) for axis, way in zip(AXES, ways, strict=True)})
    early, late = train(name, binding, 0, last)
    assert late == early


ON_GLOO = ["onebit_adam", "onebit_lamb, codes within", "zero_one_adam, codes within", "loco_adamw, codes back"]
CASES: list[tuple[Callable[..., list[int]], str]] = [*((in_place, name) for name in ON_GLOO), (pure, ON_GLOO[-1])]


def on_gloo() -> list[list[int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    return [train(name, fn.bind(mesh), dist.get_rank(), LATE) for train, name in CASES]


@functools.cache
def answers() -> list[list[list[int]]]:
    return ranks.run(4, on_gloo, timeout=1200)


@pytest.mark.reliability
@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{train.__name__}, {name}" for train, name in CASES])
def test_on_four_processes_too(case):
    for rank in answers():
        early, late = rank[case]
        assert late == early
