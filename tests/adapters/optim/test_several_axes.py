"""A state of several axes with codes within the node, too: the nodes stay together when it is saved and loaded.

Each node has a server of a piece of its own, with an error of its own. Parameters are the same on all ranks as long as
these errors are the same in all nodes.
"""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, tree
from fn.adapters import checkpoint
from fn.adapters.drift import check_drift

AXES = ("local", "node")
PHASES = [Phase.WARMUP] * 2 + [Phase.COMPRESSED] * 10
CODES = (fn.int8(), fn.sign())
MAKES = {
    "both hops": partial(fn.onebit_adam, axis=AXES, codec=CODES),
    "no servers at the last": partial(fn.onebit_adam, axis=AXES, codec=CODES, servers=False),
    "warm-up": partial(fn.onebit_adam, axis=AXES, warmup=(fn.int8(), fn.int8())),
    "zero_one_adam": partial(fn.zero_one_adam, axis=AXES, codec=CODES),
    "off within": partial(fn.onebit_adam, axis=AXES, codec=CODES, feedback=(fn.off(), fn.classic())),
    "exact within": partial(fn.onebit_adam, axis=AXES),
}
REFUSED = [*MAKES][:4]


def build(name: str) -> tuple[list[torch.nn.Parameter], fn.Optimizer]:
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(40, 15), (7,)]]
    nodes = 2 if dist.get_world_size() == 4 else 1
    with fn.bind(init_device_mesh("cpu", (nodes, dist.get_world_size() // nodes), mesh_dim_names=("node", "local"))):
        return params, fn.Optimizer(params, MAKES[name], schedule=PHASES.__getitem__, lr=0.01)


def train(params: list[torch.nn.Parameter], opt: fn.Optimizer, steps: int) -> None:
    for _ in range(steps):
        generator = torch.Generator().manual_seed(1000 * opt.steps + dist.get_rank())
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()


def copies(t: Any) -> list[torch.Tensor]:
    return [x.detach().clone() for x in tree.leaves(t)]


def on_the_same_world(folder: str) -> dict[str, dict[str, Any]]:
    return {name: one(folder, name) for name in MAKES}


def one(folder: str, name: str) -> dict[str, Any]:
    params, opt = build(name)
    train(params, opt, 6)
    path = f"{folder}/{name}"
    checkpoint.save(path, opt)
    box = [opt.state_dict()]
    dist.broadcast_object_list(box, src=0)
    again_params, again = build(name)
    before, text = copies((again_params, again.states)), ""
    if dist.get_rank() == 3:
        try:
            again.load_state_dict(box[0])
        except ValueError as error:
            text = str(error)
    loaded = not all(map(torch.equal, copies((again_params, again.states)), before))
    checkpoint.load(path, again)
    train(params, opt, 3)
    train(again_params, again, 3)
    return {"text": text, "loaded": loaded, "whole": copies((params, opt.states)), "params": copies(params),
            "resumed": copies((again_params, again.states))}  # fmt: skip


@functools.cache
def answers(folder: str) -> list[dict[str, dict[str, Any]]]:
    return ranks.run(4, on_the_same_world, folder)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    found: Path = tmp_path_factory.getbasetemp() / "several axes"
    return str(found)


@pytest.mark.slow
@pytest.mark.parametrize("name", MAKES)
def test_a_checkpoint_keeps_the_nodes_together_bit_for_bit(name, folder):
    found = [rank[name] for rank in answers(folder)]
    for rank in found:
        assert all(map(torch.equal, rank["whole"], rank["resumed"]))
        if name != "zero_one_adam":
            assert all(map(torch.equal, rank["params"], found[0]["params"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_another_ranks_errors_of_a_server_within_a_node_are_refused_and_nothing_is_loaded(name, folder):
    last = answers(folder)[3][name]
    assert "is of rank 0 of 4, but this is rank 3 of 4" in last["text"]
    assert "fn.adapters.checkpoint" in last["text"]
    assert "feedback=(fn.off(), fn.classic())" in last["text"]
    assert not last["loaded"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(MAKES) - set(REFUSED)))
def test_where_servers_within_a_node_have_none_it_is_loaded(name, folder):
    last = answers(folder)[3][name]
    assert (last["text"], last["loaded"]) == ("", True)


def elsewhere(folder: str, name: str) -> str:
    params, opt = build(name)
    before = copies((params, opt.states))
    try:
        checkpoint.load(f"{folder}/{name}", opt)
    except ValueError as error:
        assert all(map(torch.equal, copies((params, opt.states)), before))
        return str(error)
    return "loaded"


@pytest.mark.slow
def test_another_world_is_refused(folder):
    answers(folder)
    for text in ranks.run(2, elsewhere, folder, "both hops"):
        assert "is of another world, and its errors of the axes ['node', 'local'] belong to that one" in text


def started_apart() -> str:
    """Build an optimizer over two axes where rank 3 starts from another number; return what is raised."""
    p = torch.nn.Parameter(torch.full((4,), float(dist.get_rank() == 3)))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    with fn.bind(mesh), pytest.raises(fn.RanksDisagree) as raised:
        fn.Optimizer([p], MAKES["exact within"], schedule=fn.freeze_after(2))
    return str(raised.value)


def drifted_apart() -> tuple[int, str, int]:
    """Flip a number on rank 3 of two axes between two steps; return what `check_drift` raises."""
    p = torch.nn.Parameter(torch.ones(4))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    with fn.bind(mesh):
        opt = fn.Optimizer([p], MAKES["exact within"], schedule=fn.freeze_after(9))
    check_drift(opt, 1)
    p.grad = torch.ones(4)
    opt.step()
    with torch.no_grad():
        p[dist.get_rank()] += float(dist.get_rank() == 3)
    with pytest.raises(fn.RanksDrifted) as raised:
        opt.step()
    return raised.value.rank, raised.value.field, raised.value.step


def test_drift_of_a_rank_is_heard_by_those_that_share_no_axis_with_it() -> None:
    assert ranks.run(4, drifted_apart) == [(1, "params[0].0", 1)] * 4


def test_ranks_that_share_an_axis_with_none_that_differs_hear_of_it_too():
    """They waited on the second axis for those that had raised on the first one, until the time-out."""
    for text in ranks.run(4, started_apart):
        assert "the numbers of parameter 0 in group 0 are others on rank 1 of axis" in text
