"""A transformer with experts on three mesh axes of two ranks each: FSDP2, expert and tensor parallelism; and HSDP."""

from __future__ import annotations

import contextlib
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from adapters.fsdp.test_muon_on_meshes import everything, far
from mesh_cells import METHODS, OWN, Method
from ranks import run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fn

STEPS = 5
TOKENS, LENGTH, WIDTH, HEADS, INNER, EXPERTS = 11, 12, 8, 2, 5, 5
"""Of what a rank sees: two numbers are odd, so ranks have different parts of experts, and different numbers of them."""


class Attention(nn.Module):
    """Whole heads, of which tensor parallelism gives each rank some."""

    def __init__(self) -> None:
        super().__init__()
        self.queries, self.keys, self.values, self.mix = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # (T, width of these heads) -> (heads, T, width of one)
        q, k, v = (
            f(x).view(len(x), -1, WIDTH // HEADS).transpose(0, 1) for f in (self.queries, self.keys, self.values)
        )
        found = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.mix(found.transpose(0, 1).flatten(1))


class Experts(nn.Module):
    """Experts as stacks of matrices; on a mesh each token goes to the ranks of all of them, and its sum comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) / 3)
        self.mesh: DeviceMesh | None = None

    def divide(self, mesh: DeviceMesh) -> None:
        """Give each rank of the first axis some experts, and each of the second some numbers inside of them."""
        self.mesh = mesh
        for name, dim in (("up", 2), ("down", 1)):
            placed = distribute_tensor(getattr(self, name).data, mesh, (Shard(0), Shard(dim)))
            setattr(self, name, nn.Parameter(placed))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        if self.mesh is not None:
            x, weights = (self._from_all(y) for y in (x, weights))
        inside = torch.tanh(torch.bmm(x.unsqueeze(0).expand(EXPERTS, -1, -1), self.up))
        found = torch.bmm(inside * weights.t().unsqueeze(-1), self.down).sum(0)
        # of each rank of the first axis the sums of its own tokens
        return found.redistribute(placements=(Shard(0), Replicate())).to_local() if self.mesh is not None else found

    def _from_all(self, x: Tensor) -> Tensor:
        every = DTensor.from_local(x, self.mesh, (Shard(0), Replicate()), run_check=False)
        return every.redistribute(placements=(Replicate(), Replicate()))


class Net(nn.Module):
    """An embedding, attention, experts and the router before them, a matrix beside, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.attention, self.norm = nn.Embedding(TOKENS, WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * INNER), nn.Linear(2 * INNER, WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts()
        self.head = nn.Linear(WIDTH, TOKENS)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.attention(x)
        x = x + self.down(torch.tanh(self.up(x)))
        x = x + self.experts(x, self.router(x).softmax(-1))
        return self.head(self.norm(x))


def over_tensors(model: Net, mesh: DeviceMesh) -> None:
    heads = {f"attention.{name}": ColwiseParallel() for name in ("queries", "keys", "values")}
    rows = {"attention.mix": RowwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh, {**heads, **rows, "up": ColwiseParallel()})


def with_experts(mesh: DeviceMesh) -> Net:
    """Return the model as trainers divide it: experts over one axis, and all else over it as over that of FSDP2."""
    model = Net()
    over_tensors(model, mesh["tp"])
    model.experts.divide(mesh["ep", "tp"])
    fully_shard(model.experts, mesh=mesh["fsdp"])
    # The losses of all ranks are a mean, and those of the tokens that come from another rank are here already.
    model.experts.set_gradient_divide_factor(float(mesh["fsdp", "ep"].size()))
    fully_shard(model, mesh=mesh["fsdp", "ep"]._flatten("data"))
    return model


def with_replicas(mesh: DeviceMesh) -> Net:
    """Return the model over tensors and over shards, and replicas of these; experts are divided by FSDP2 alone."""
    model = Net()
    over_tensors(model, mesh["tp"])
    fully_shard(model, mesh=mesh["replica", "fsdp"])
    return model


MODELS: dict[str, tuple[Any, tuple[str, str, str]]] = {
    "FSDP2 x EP x TP": (with_experts, ("fsdp", "ep", "tp")),
    "HSDP x TP": (with_replicas, ("replica", "fsdp", "tp")),
}


def loss(model: Net, step: int, of: int) -> Tensor:
    tokens = torch.randint(TOKENS, (2, LENGTH), generator=torch.Generator().manual_seed(10 * step + of))
    return nn.functional.cross_entropy(model(tokens[0]), tokens[1])


def train(model: Net, opt: fn.Optimizer, steps: range, seen: list[int]) -> list[Tensor]:
    """Train on the texts that this rank sees; return the params."""
    for step in steps:
        sum(loss(model, step, of) / len(seen) for of in seen).backward()  # type: ignore[union-attr]
        opt.step()
        opt.zero_grad()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def optimizer(model: Net, method: Method, form: dict[str, Any]) -> fn.Optimizer:
    make = partial(method.make, **{"axis": "island"} if method.across else {}, **form)
    more = method.more if method.across else {}
    return fn.Optimizer(model.named_parameters(), make, labels=fn.labels_of(model), lr=0.05, max_norm=1.0, **more)


def on_three_axes(folder: str) -> dict[Any, Any]:
    """Return how far the params are from those of one process, and what refuses to run."""
    found = dict[Any, Any]()
    for where, (divided, names) in MODELS.items():
        mesh = init_device_mesh("cpu", (1, 2, 2, 2), mesh_dim_names=("island", *names))
        mine = seen_by(mesh[names])
        found[where, "kinds"] = {str(p.placements) for p in divided(mesh[names]).parameters()}
        for name, method in METHODS.items():
            form = {} if method.exact == OWN else method.exact
            with fn.bind(mesh["island"]) if method.across else contextlib.nullcontext():
                model, alone = divided(mesh[names]), Net()
                try:
                    opt, other = (optimizer(x, method, form) for x in (model, alone))
                except ValueError as error:
                    found[where, name] = str(error)
                    continue
                params = train(model, opt, range(STEPS), mine)
                found[where, name] = far(params, train(alone, other, range(STEPS), [*range(4)]))
                if name == "normuon":
                    found[where, "goes on"] = loaded(model, opt, mine, f"{folder}/{where}")
                    found[where, "skips"] = skipped(model, opt, mine)
    return found


def seen_by(mesh: DeviceMesh) -> list[int]:
    """Return the number of the text that this rank sees, of four; it is one for the ranks of the last axis."""
    names: Any = mesh.mesh_dim_names
    return [2 * mesh.get_local_rank(names[0]) + mesh.get_local_rank(names[1])]


def loaded(model: Net, opt: fn.Optimizer, mine: list[int], folder: str) -> tuple[list[str], float]:
    """Save, and load on eight ranks of FSDP2 alone; return what differs, and how far both are apart later."""
    again = Net()
    fully_shard(again, mesh=init_device_mesh("cpu", (8,), mesh_dim_names=("fsdp",)))
    other = optimizer(again, METHODS["normuon"], {})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict(), "opt": opt.state_dict()}, checkpoint_id=folder)
        saved, state = everything(model, opt), {"model": again.state_dict(), "opt": other.state_dict()}
        dcp.load(state, checkpoint_id=folder)
    again.load_state_dict(state["model"])
    other.load_state_dict(state["opt"])
    read = everything(again, other)
    assert any("experts" not in name and name.endswith("mu.0") for name in saved)
    differ = [name for name, x in saved.items() if name not in read or not torch.equal(read[name], x)]
    later = range(STEPS, 2 * STEPS)
    return differ, far(train(model, opt, later, mine), train(again, other, later, [dist.get_rank() // 2]))


def skipped(model: Net, opt: fn.Optimizer, mine: list[int]) -> tuple[bool, int]:
    """Return whether a NaN in one number of one rank left all params as they were, and how many steps were skipped."""
    before = [p.to_local().clone() for p in model.parameters()]
    loss(model, 0, *mine).backward()
    if dist.get_rank() == 3:
        model.experts.up.grad.to_local().view(-1)[0] = torch.nan
    opt.step()
    opt.zero_grad()
    return all(map(torch.equal, before, (p.to_local() for p in model.parameters()))), opt.skipped


@pytest.mark.reliability
def test_steps_on_three_axes_are_those_of_one_process(tmp_path: Path) -> None:
    """Also those of a run that goes on without two of the axes; a NaN on one rank skips on all."""
    for found in run(8, on_three_axes, str(tmp_path)):
        for where, axes in (("FSDP2 x EP x TP", 3), ("HSDP x TP", 3)):
            assert any("_StridedShard" in kind and kind.count("dim=") >= axes - 1 for kind in found[where, "kinds"])
            for name, method in METHODS.items():
                if method.exact == OWN:
                    assert "put fn.unsharded(link, shards) around" in found[where, name], (where, name)
                else:
                    assert found[where, name] <= 1e-6, (where, name)
            differ, apart = found[where, "goes on"]
            assert differ == []
            assert apart <= 1e-6
            assert found[where, "skips"] == (True, 1)
