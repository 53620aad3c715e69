"""Owned Muon on what is awkward: pure, simulated, on process groups, as replicated Muon's step or refused by name."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import chains
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor

import fn
from fn import Phase, tree

W, C = Phase.WARMUP, Phase.COMPRESSED
WORLD = 3
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "more ranks than matrices": {"a": (4, 3)},
    "no matrix": {"vector": (5,), "scalar": ()},
    "one larger than all others": {"large": (40, 30), "a": (2, 3), "b": (2, 3), "vector": (3,)},
    "three and four dimensions": {"conv": (4, 3, 2, 2), "stack": (2, 3, 4), "a": (4, 3), "b": (4, 3)},
    "no elements": {"empty": (0, 3), "a": (4, 3), "none": (0,)},
}
HYPERS = {"exact": {}, "flatten": {"flatten": True}, "int8": {"codec": fn.int8(), "gather": fn.int8()}}


def muon(hyper: str, **others: Any) -> fn.Transform:
    return chains.muon(0.05, axis="data", **HYPERS[hyper], **others)


def tensors(shapes: dict[str, tuple[int, ...]], seed: int, *lead: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn((*lead, *shape), generator=generator) for name, shape in shapes.items()}


def simulated(tx: fn.Transform, params: Any, grads: list[Any], phases: list[Phase]) -> list[Any]:
    """Return the params after each step, the same on all ranks, which simulate proves."""

    def on_rank(*grads: Any) -> Any:
        p, state, found = params, tx.init(params), []
        for phase, g in zip(phases, grads, strict=True):
            u, state = tx.update(phase)(g, state, p)
            p = fn.apply_updates(p, u)
            found.append(p)
        return found

    found: list[Any] = fn.simulate(on_rank, "data", WORLD, out_dims=None)(*grads)
    return found


def all_trees() -> dict[Any, list[Any]]:
    """Return the params after each step on real ranks, of each tree."""
    rank, found = dist.get_rank(), {}
    mesh = init_device_mesh("cpu", (WORLD,), mesh_dim_names=("data",))
    for tcp in (True, False):
        with fn.bind(mesh, tcp=tcp):
            for name, shapes in SHAPES.items():
                for hyper in HYPERS:
                    tx, params = muon(hyper), tensors(shapes, 0)
                    state, steps = tx.init(params), []
                    for t, phase in enumerate([W, C, C]):
                        g = tree.map(lambda x: x[rank], tensors(shapes, 10 + t, WORLD))
                        updates, state = tx.update(phase)(g, state, params)
                        params = fn.apply_updates(params, updates)
                        steps.append(params)
                    found[name, hyper, tcp] = steps
    return found


@pytest.fixture(scope="module")
def of_real_ranks() -> list[Any]:
    return ranks.run(WORLD, all_trees)


@pytest.mark.parametrize("hyper", HYPERS)
@pytest.mark.parametrize("name", SHAPES)
def test_its_step_is_the_replicated_one_in_every_world(name: str, hyper: str, of_real_ranks: list[Any]) -> None:
    """The same bits on all real ranks, over TCP and gloo; as simulated up to rounding, which may turn a code over."""
    grads = [tensors(SHAPES[name], 10 + t, WORLD) for t in range(3)]
    params = tensors(SHAPES[name], 0)
    found = simulated(muon(hyper), params, grads, [W, C, C])
    first = of_real_ranks[0][name, hyper, True]
    for book in of_real_ranks:
        for tcp in (True, False):
            assert all(map(torch.equal, tree.leaves(book[name, hyper, tcp]), tree.leaves(first)))
    tolerances = {"rtol": 1e-5, "atol": 2e-3 if hyper == "int8" else 1e-6}
    for ours, theirs in zip(tree.leaves(first), tree.leaves(found), strict=True):
        torch.testing.assert_close(ours, theirs, **tolerances)
    if hyper != "int8":
        replicated = chains.muon(0.05, axis="data", owned=False, **HYPERS[hyper])
        expected = simulated(replicated, params, grads, [W, W, W])
        for ours, theirs in zip(tree.leaves(found), tree.leaves(expected), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("hyper", ["exact", "int8"])
def test_matrices_of_zeros_stay_where_they_are(hyper: str) -> None:
    """Of gradients of zeros, without a decay: none becomes NaN."""
    params = {"a": torch.ones(4, 3), "b": torch.ones(4, 3), "zeros": torch.zeros(2, 2)}
    grads = {k: torch.zeros(WORLD, *p.shape) for k, p in params.items()}
    grads["b"] += 1.0
    (*_, found) = simulated(muon(hyper, weight_decay=0.0), params, [grads] * 3, [W, C, C])
    assert torch.equal(found["a"], params["a"])
    assert torch.equal(found["zeros"], params["zeros"])
    assert not torch.equal(found["b"], params["b"])


class Tied(torch.nn.Module):
    """A model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 4)
        self.head = torch.nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.hidden(self.embedding(x)))


def with_fn_optimizer() -> dict[str, Any]:
    """Tied weights, DTensors, and a schedule that watches the second moment."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh, found = init_device_mesh("cpu", (world,), mesh_dim_names=("data",)), {}
    torch.manual_seed(0)
    first = Tied()
    with fn.bind(mesh):
        for name, hyper in {"owned": {}, "replicated": {"owned": False}}.items():
            model = copy.deepcopy(first)
            make = partial(fn.muon, axis="data", **hyper)
            opt = fn.Optimizer(model.parameters(), make, labels=fn.labels_of(model), lr=0.05)
            for t in range(3):
                opt.zero_grad()
                x = torch.randint(7, (5,), generator=torch.Generator().manual_seed(10 * t + rank))
                model(x).square().sum().backward()
                opt.step()
            found[name] = [p.detach() for p in model.parameters()]
            assert model.head.weight is model.embedding.weight
        try:
            fn.Optimizer(model.parameters(), partial(fn.muon, axis="data"), schedule=fn.freeze_when_stable(0.9))
        except ValueError as error:
            found["watched"] = str(error)
        try:
            fn.muon(axis="data").init({"w": distribute_tensor(torch.ones(4, 3), mesh, [Replicate()])})
        except TypeError as error:
            found["DTensor"] = str(error)
    return found


def test_tied_weights_move_once_and_what_cannot_be_owned_says_so() -> None:
    for found in ranks.run(2, with_fn_optimizer):
        assert len(found["owned"]) == 3
        for ours, theirs in zip(found["owned"], found["replicated"], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
        assert "one that is divided among ranks, in shards or by owners of tensors" in found["watched"]
        assert "expected leaf 'w' to be a whole tensor, but got a DTensor" in found["DTensor"]
        assert "p.full_tensor()" in found["DTensor"]
