"""A model with experts, tiny, on FSDP2: Muon on two ranks, SignMuon on two by two, resumed, and what a step sends."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from adapters.fsdp.test_muon_on_shards import far, train, whole
from ranks import run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import fn
from fn import roles, tree
from fn.planner import traffic
from fn.transforms.owned import OwnedState

EXPERTS, WIDTH, INNER, TOKENS = 4, 6, 5, 11
STEPS = 3


class Experts(nn.Module):
    """Experts as transformers has Mixtral's: a stack of matrices for each of two layers, the first ones fused."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) / 3)
        self.down_proj = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 3)

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        gate, up = torch.einsum("eik,tk->tei", self.gate_up_proj, x).chunk(2, -1)
        return torch.einsum("tei,eki,te->tk", torch.sigmoid(gate) * up, self.down_proj, weights).clone()


class Net(nn.Module):
    """An embedding, a matrix, a router that never chooses the last expert, experts, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.mix = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()
        self.head = nn.Linear(WIDTH, TOKENS)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.mix(self.embedding(tokens)))
        best = self.router(x)[:, :-1].topk(2).indices
        weights = self.router(x).softmax(-1) * torch.zeros(len(x), EXPERTS).double().scatter(1, best, 1.0)
        return self.head(x + self.experts(x, weights))


def optimizer(model: nn.Module, make: Any, **more: Any) -> fn.Optimizer:
    return fn.Optimizer(model.parameters(), make, labels=fn.labels_of(model), lr=0.05, **more)


def sharded(mesh: Any, dim: int = 0) -> Net:
    """Return the model on FSDP2. dim: of experts, in which they are divided: 0 over the ranks, 1 by rows."""
    model = Net()
    for part in (model.mix, model.experts, model):
        fully_shard(part, mesh=mesh, shard_placement_fn=lambda p: Shard(dim if p.ndim == 3 else 0))
    return model


def under_ddp(make: Any) -> list[Tensor]:
    model = Net()
    with fn.bind({"data": dist.group.WORLD}):
        train(model, optimizer(model, partial(make, axis="data", owned=False)), range(STEPS))
    return whole(model)


def on_two_ranks(folder: str) -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), {}
    for make in (fn.muon, fn.normuon):
        wanted = under_ddp(make)
        found[make.__name__, "owned"] = owned(make, wanted)
        for dim in (0, 1):
            model = sharded(mesh, dim)
            opt = optimizer(model, make)
            with fn.ledger() as book:
                train(model, opt, range(STEPS))
            found[make.__name__, dim] = far(whole(model), wanted)
            found[make.__name__, dim, "sent"] = book.sent["shard", "all_to_all"] / STEPS
            found[make.__name__, dim, "resumed"] = resumed(model, opt, sharded(mesh, dim), make, f"{folder}/{dim}")
    return found


def owned(make: Any, wanted: list[Tensor]) -> tuple[float, list[int]]:
    """Return how far Muon with owners is from the replicated one, and the numbers of momenta that lie here."""
    model = Net()
    with fn.bind({"data": dist.group.WORLD}):
        opt = optimizer(model, partial(make, axis="data"))
        train(model, opt, range(STEPS))
    (state,) = tree.instances(opt.states, OwnedState)
    momenta = roles.find(state.inner["muon"], "first_moment")
    return far(whole(model), wanted), [x.numel() for x in tree.leaves(momenta)]


def resumed(model: nn.Module, opt: Any, fresh: nn.Module, make: Any, folder: str, **more: Any) -> float:
    """Return how far a training that goes on is from one that is read from files, after as many steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict(), "opt": opt.state_dict()}, checkpoint_id=f"{folder}-{make}"[:200])
        again = optimizer(fresh, make, **more)
        state = {"model": fresh.state_dict(), "opt": again.state_dict()}
        dcp.load(state, checkpoint_id=f"{folder}-{make}"[:200])
    fresh.load_state_dict(copy.deepcopy(state["model"]))
    again.load_state_dict(state["opt"])
    for m, o in ((model, opt), (fresh, again)):
        train(m, o, range(STEPS, 2 * STEPS))
    return far(whole(model), whole(fresh))


def test_muon_on_two_real_ranks(tmp_path: Path) -> None:
    """Experts over the ranks send nothing; of rows each rank brings its part of every expert to the expert's owner."""
    mix, experts = WIDTH * WIDTH, EXPERTS * 3 * INNER * WIDTH
    for found in run(2, on_two_ranks, str(tmp_path)):
        for name in ("muon", "normuon"):
            away, momenta = found[name, "owned"]
            assert away <= 1e-10
            # slices of both stacks are dealt evenly, the matrix is one rank's
            assert sum(momenta) - experts // 2 in (0, mix)
            for dim, travels in ((0, mix), (1, mix + experts)):
                assert found[name, dim] <= 1e-10
                # half of it to the owner and half of it back, of what this rank does not own or has not
                assert found[name, dim, "sent"] == travels // 2 * 8
                assert found[name, dim, "resumed"] == 0


def on_two_by_two(folder: str) -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")), {}
    make, more = partial(fn.sign_muon, axis="replica"), {"schedule": fn.freeze_after(1)}
    with fn.bind(mesh["replica"]):
        model, fresh = sharded(mesh["shard"]), sharded(mesh["shard"])
        opt, start = optimizer(model, make, **more), whole(model)
        train(model, opt, range(1))
        train(model, opt, range(1, STEPS - 1))
        with fn.ledger() as book:
            train(model, opt, range(STEPS - 1, STEPS))
        found["sent"] = book.sent
        found["pieces"] = [tuple(p.to_local().shape) for p in model.parameters()]
        names, labels = [name for name, _ in model.named_parameters()], fn.labels_of(model)
        found["labels"] = ["other" if name == "router.weight" else str(labels[name]) for name in names]
        found["params"] = dict(zip(names, whole(model), strict=True))
        found["start"] = dict(zip(names, start, strict=True))
        found["resumed"] = resumed(model, opt, fresh, make, folder, **more)
        found["after"] = whole(model)
    return found


def test_sign_muon_on_two_by_two_real_ranks(tmp_path: Path) -> None:
    """Shards inside, votes across on pieces: an expert that never gets a token stays where it is."""
    first, *others = run(4, on_two_by_two, str(tmp_path))
    for found in (first, *others):
        assert found["resumed"] == 0
        assert far(found["after"], first["after"]) == 0
        for name, p in found["params"].items():
            if name.startswith("experts"):
                assert torch.equal(p[-1], found["start"][name][-1])
                moved = (p - found["start"][name]).abs().amax((1, 2))
                assert (moved[:-1] > 0.01).all(), "expected experts with tokens to move"
            else:
                assert not torch.equal(p, found["start"][name])
        # of an expert's matrices each is a tensor of its own behind the vote; others are averaged in 8 bits
        kinds = {"hidden": list[Any](), "other": list[Any]()}
        for shape, label in zip(found["pieces"], found["labels"], strict=True):
            kinds[label] += [shape[1:]] * shape[0] if len(shape) == 3 else [shape]
        votes = traffic.codes(traffic.of_shapes(kinds["hidden"], 8), 2, fn.ballots())
        means = traffic.codes(traffic.of_shapes(kinds["other"], 8), 2, fn.int8())
        sent = Counter[tuple[str, str]]()
        for message in (*votes, *means):
            sent["replica", message.collective] += message.size
        matrix = {("shard", "all_to_all"): WIDTH * WIDTH // 2 * 8, ("shard", "all_reduce"): 4}
        assert found["sent"] == sent | matrix
