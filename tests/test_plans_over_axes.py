"""Plans over several axes are made once: as many tensors live after step 36 as after step 12."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import pytest
import torch
from registry import OPTIMIZERS, Named

import fn
from fn import Phase
from fn.collectives import transports
from fn.collectives.agreement import MARK
from fn.collectives.axis import Axis, Binding

AXES = ("local", "node")
SHAPES = [(6, 5), (7,), (), (0,), (40, 15)]
CODES_WITHIN = {"codec": (fn.int8(), fn.sign())}
CODES_BACK = {"codec": (fn.int8(block=8), fn.int4(block=8)), "gather": (fn.int8(block=8), fn.int8(block=8))}
BY_NAME = {optimizer.name: optimizer for optimizer in OPTIMIZERS}
MAKES: dict[str, tuple[Named, dict[str, Any]]] = {
    **{name: (BY_NAME[name], {}) for name in ("onebit_adam", "onebit_lamb", "zero_one_adam", "loco_adamw")},
    "muon, int8": (BY_NAME["muon, int8"], {}),
    "1-bit Adam, codes within": (BY_NAME["onebit_adam"], CODES_WITHIN),
    "0/1 Adam, codes within": (BY_NAME["zero_one_adam"], CODES_WITHIN),
    "LoCo, codes back": (BY_NAME["loco_adamw"], CODES_BACK),
}
EARLY, LATE = 12, 36
"""Steps after which tensors are counted: multiples of the numbers of phases, so that all follow the same phase."""


def tensors() -> int:
    """Return how many tensors live."""
    gc.collect()
    return sum(type(o) in (torch.Tensor, torch.nn.Parameter) for o in gc.get_objects())


def phase_of(optimizer: Named, t: int) -> Phase:
    """Return the phases in turn, in an order that 0/1 Adam allows."""
    first, *others = optimizer.phases
    return [first, *reversed(others)][t % len(optimizer.phases)]


def gradients(t: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * t)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def in_place(name: str, binding: Any) -> list[int]:
    """Train with `fn.Optimizer`."""
    optimizer, hyper = MAKES[name]
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
    make, schedule = partial(optimizer.make, axis=AXES, **hyper), partial(phase_of, optimizer)
    with binding:
        opt = fn.Optimizer(params, make, schedule=schedule, lr=0.01, refuse_averaged=False)
    found = []
    for t in range(LATE):
        for p, g in zip(params, gradients(t), strict=True):
            p.grad = g
        opt.step()
        if t + 1 in (EARLY, LATE):
            found.append(tensors())
    return found


def among_equals(rank: int, size: int, stride: int) -> transports.Transport:
    """Return a transport that needs no other process, for ranks that would all send what this one sends.

    Only messages of 16 bytes differ: ranks of a grid tell each other apart by as many random ones. stride: of the axis,
    by which the ranks of a grid are numbered.
    """

    def all_gather(x: torch.Tensor) -> torch.Tensor:
        # Not a header, which is as long: by its beginning ranks know that it is one.
        random = x.dtype == torch.uint8 and x.shape[-1:] == (16,)
        random = random and int(x.view(torch.int64).flatten()[0]) >> 40 != MARK >> 40
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(eps|gradients):")
@pytest.mark.parametrize("name", MAKES)
def test_as_many_tensors_live_at_the_end_as_early_on(name):
    ways = [transports.register(f"{axis} among equals", among_equals(1, 2, 2**i)) for i, axis in enumerate(AXES)]
    binding = Binding({axis: Axis(2, torch.tensor(1), way) for axis, way in zip(AXES, ways, strict=True)})
    early, late = in_place(name, binding)
    assert late == early
