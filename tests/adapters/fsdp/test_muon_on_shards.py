"""Muon on FSDP2's shards: the params of Muon under DDP, whatever rows a rank has, and its checkpoints."""

from __future__ import annotations

import copy
import io
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import chains
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import run
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import fn
from fn.adapters import checkpoint

STEPS = 4


class Net(nn.Module):
    """An embedding, matrices of 7 and 3 rows, of which four ranks have uneven ones or none, a norm and a head.

    In float64, for the iterations make more of small singular values than of large ones, and so of rounding.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.up, self.same, self.few = nn.Linear(6, 7), nn.Linear(7, 7), nn.Linear(7, 3)
        self.norm, self.head = nn.LayerNorm(3), nn.Linear(3, 11)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.same(torch.tanh(self.up(self.embedding(tokens)))))
        return self.head(self.norm(self.few(x)))


def loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(11, (2, 9), generator=generator)
    return nn.functional.cross_entropy(model(tokens[0]), tokens[1])


def sharded(mesh: Any, **policy: Any) -> Net:
    model = Net()
    for part in (model.up, model.same, model):
        fully_shard(part, mesh=mesh, **policy)
    return model


def train(model: nn.Module, opt: Any, steps: range) -> None:
    for step in steps:
        loss(model, step, dist.get_rank()).backward()
        opt.step()
        opt.zero_grad()


def whole(model: nn.Module) -> list[Tensor]:
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def optimizer(model: nn.Module, make: Any = fn.muon, hidden: str = "", **more: Any) -> fn.Optimizer:
    """Return an optimizer. Args: hidden: the name of the only matrix that is; "": all that `labels_of` says."""
    labels = fn.labels_of(model)
    labels.update({name: "hidden" if name == hidden else "other" for name in labels} if hidden else {})
    return fn.Optimizer(model.parameters(), make, labels=labels, lr=0.05, **more)


def under_ddp(steps: int = STEPS, **hyper: Any) -> list[Tensor]:
    """Train with gradients that are averaged here, and replicated Muon."""
    model = Net()
    with fn.bind({"data": dist.group.WORLD}):
        opt = optimizer(model, partial(fn.muon, axis="data", owned=False, **hyper))
        train(model, opt, range(steps))
    return whole(model)


def far(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def on_shards() -> dict[str, Any]:
    world = dist.get_world_size()
    mesh, found = init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)), {}
    for name, hyper in {"plain": {}, "lion": {"scale": "max", "other": "lion"}}.items():
        model = sharded(mesh)
        opt = optimizer(model, partial(fn.muon, **hyper))
        with fn.ledger() as sent:
            train(model, opt, range(STEPS))
        found[name] = far(whole(model), under_ddp(**hyper))
        found[f"{name} is divided"] = all(isinstance(p, DTensor) for p in model.parameters())
        found[f"{name} sent"] = sent.sent
    columns = Net()
    for part in (columns.up, columns):
        fully_shard(part, mesh=mesh, shard_placement_fn=lambda p: None if p.shape[-1] % world else Shard(p.ndim - 1))
    train(columns, optimizer(columns), range(STEPS))
    found["columns"] = far(whole(columns), under_ddp())
    model = sharded(mesh)
    groups = [{"params": [p for p in model.parameters() if (p.ndim > 1) == matrix]} for matrix in (True, False)]
    with fn.bind(mesh):  # an axis that FSDP2 averages over already; the optimizer communicates over none
        opt = fn.Optimizer(groups, fn.muon, labels=fn.labels_of(model), lr=0.05)
    train(model, opt, range(STEPS))
    found["groups"] = far(whole(model), under_ddp())
    before, skipped = whole(model), opt.skipped
    loss(model, 9, dist.get_rank()).backward()
    if dist.get_rank() == 0:  # of a vector that AdamW moves, and of which the other ranks have other rows
        model.up.bias.grad.to_local()[0] = torch.nan
    opt.step()
    found["a NaN"] = opt.skipped - skipped, far(whole(model), before)
    opt.zero_grad()
    model, twin = (sharded(mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)) for _ in range(2))
    coded = {"codec": fn.int8()}
    opt = optimizer(model, partial(fn.muon, **coded), schedule=fn.freeze_after(1))
    with fn.ledger() as sent:
        train(model, opt, range(STEPS))
    train(twin, optimizer(twin), range(STEPS))
    found["int8"] = far(whole(model), whole(twin))
    found["int8 moved"] = far(whole(model), whole(Net()))
    found["int8 sent"] = sent.total
    return found


@pytest.mark.parametrize("world", [4])
def test_it_has_the_params_of_replicated_muon(world: int) -> None:
    """Of uneven rows, of a matrix with fewer rows than ranks, of columns, and of vectors and embeddings by AdamW."""
    answers = run(world, on_shards)
    for found in answers:
        for name in ("plain", "lion", "columns", "groups"):
            assert found[name] <= 1e-10, (name, found[name])
        assert found["plain is divided"]
        assert found["a NaN"] == (1, 0.0)
        assert 0 < found["int8"] < 0.4 * found["int8 moved"]
    padded = sum(-(-rows // world) * columns for rows, columns in ((7, 6), (7, 7), (3, 7)))  # of a rank's pieces
    exact = [sum(n for (axis, kind), n in found["plain sent"].items() if kind == "all_to_all") for found in answers]
    assert sum(exact) == STEPS * 2 * (world - 1) * padded * 8
    assert all(found["plain sent"].keys() == {("shard", "all_to_all"), ("shard", "all_reduce")} for found in answers)
    assert sum(found["int8 sent"] for found in answers) < sum(sum(f["plain sent"].values()) for f in answers)


def hybrid() -> dict[str, Any]:
    """FSDP2's own hybrid sharding; islands of shards whose exact mean is ours; Muon and Dion over these."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")), {}
    model = sharded(mesh)
    train(model, optimizer(model), range(STEPS))
    found["by FSDP2"] = far(whole(model), under_ddp())
    model = sharded(mesh["shard"])
    with fn.bind(mesh["replica"]):
        train(model, optimizer(model, partial(fn.muon, axis="replica")), range(STEPS))
    found["by us"] = far(whole(model), under_ddp())
    model, twin = sharded(mesh["shard"]), Net()
    dion = {"make": partial(fn.dion, axis="replica", rank=2), "hidden": "same.weight"}  # one, whose first Q is alike
    with fn.bind(mesh["replica"]):
        train(model, optimizer(model, **dion), range(STEPS))
        opt = optimizer(twin, **dion)
        for step in range(STEPS):
            loss(twin, step, dist.get_rank()).backward()
            for p in twin.parameters():
                dist.all_reduce(p.grad, group=mesh["shard"].get_group())
                p.grad /= 2
            opt.step()
            opt.zero_grad()
    found["dion"] = far(whole(model), whole(twin))
    return found


def islands() -> dict[str, Any]:
    """MuLoCo of islands that are shards, and of whole models; a NaN in an island, which leaves out its local step."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard")), {}
    schedule, make = fn.every(3, delay=1, start=1), partial(fn.muloco, axis="island")
    model, twin = sharded(mesh["shard"]), Net()
    with fn.bind(mesh["island"]):
        opts = [optimizer(m, make, schedule=schedule) for m in (model, twin)]
    steps = next(n for n in range(9, 20) if schedule(n) == fn.Round())
    for step in range(steps):
        loss(model, step, dist.get_rank()).backward()
        loss(twin, step, dist.get_rank()).backward()
        for p in twin.parameters():
            dist.all_reduce(p.grad, group=mesh["shard"].get_group())
            p.grad /= 2
        for opt in opts:
            opt.step()
            opt.zero_grad()
    found["apart"] = far(whole(model), whole(twin))
    saved = opts[0].state_dict()
    before = whole(model)
    loss(model, steps, dist.get_rank()).backward()
    if dist.get_rank() == 3:
        model.same.weight.grad.to_local()[0] = torch.nan
    opts[0].step()
    found["dropped"] = opts[0].dropped, far(whole(model), before) == 0
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    buffer.seek(0)
    opts[0].load_state_dict(torch.load(buffer, weights_only=True))
    found["loaded"] = opts[0].steps - steps
    return found


def test_it_trains_in_hybrid_sharding_and_in_islands() -> None:
    for found in run(4, hybrid):
        assert found["by FSDP2"] <= 1e-10
        assert found["by us"] <= 1e-10
        assert found["dion"] <= 1e-10
    for rank, found in enumerate(run(4, islands)):
        assert found["apart"] <= 1e-10
        assert found["dropped"] == ((0, False) if rank < 2 else (1, True))
        assert found["loaded"] == 0


def saving(folder: str) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = sharded(mesh)
    opt = optimizer(model)
    train_the_same(model, opt, range(3))
    state = {"model": model.state_dict(), "opt": opt.state_dict()}
    assert sum(isinstance(x, DTensor) for x in state["opt"].values()) >= 3 + 2 * 8  # momenta, and AdamW's of the others
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)
    again, fresh = sharded(mesh), None
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    fresh = optimizer(again)
    fresh.load_state_dict(copy.deepcopy(opt.state_dict()))
    train_the_same(model, opt, range(3, 6))
    train_the_same(again, fresh, range(3, 6))
    assert far(whole(model), whole(again)) == 0
    with pytest.raises(ValueError, match=r"save opt\.state_dict\(\) with torch.distributed.checkpoint"):
        checkpoint.save(folder, opt)
    return whole(model)


def train_the_same(model: nn.Module, opt: Any, steps: range) -> None:
    """Train on data that does not depend on the number of ranks."""
    for step in steps:
        loss(model, step, 0).backward()
        opt.step()
        opt.zero_grad()


def loading(folder: str) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model = sharded(mesh)
    opt = optimizer(model)
    state = {"model": model.state_dict(), "opt": opt.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    opt.load_state_dict(state["opt"])
    train_the_same(model, opt, range(3, 6))
    return whole(model)


@pytest.mark.parametrize(("old", "new"), [(4, 2), (1, 4)])
def test_its_checkpoints_are_loaded_on_any_number_of_ranks(old: int, new: int, tmp_path: Path) -> None:
    saved, loaded = run(old, saving, str(tmp_path)), run(new, loading, str(tmp_path))
    for found in loaded:
        assert far(found, saved[0]) <= (0 if old == new else 1e-10)


def in_codes(folder: str) -> dict[str, Any]:
    """Save what codes left out, each rank its own, and go on from it: by state dicts and by files."""
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), {}
    make, schedule = partial(chains.muon, codec=fn.int4(), gather=fn.int8(), feedback=fn.damped()), fn.freeze_after(1)

    def build() -> tuple[Net, fn.Optimizer]:
        model = sharded(mesh)
        return model, optimizer(model, make, schedule=schedule)

    model, opt = build()
    train_the_same(model, opt, range(3))
    state = {"model": model.state_dict(), "opt": opt.state_dict()}
    found["own"] = sorted(key for key in state["opt"] if key.startswith(f"rank {dist.get_rank()} of 2."))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder)
    kept = copy.deepcopy(state)
    train_the_same(model, opt, range(3, 6))
    again, fresh = build()
    again.load_state_dict(kept["model"])
    fresh.load_state_dict(kept["opt"])
    read, of_files = build()
    state = {"model": read.state_dict(), "opt": of_files.state_dict()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder)
    read.load_state_dict(state["model"])
    of_files.load_state_dict(state["opt"])
    for m, o in ((again, fresh), (read, of_files)):
        train_the_same(m, o, range(3, 6))
    found["apart"] = far(whole(model), whole(again)), far(whole(model), whole(read))
    if dist.get_rank() == 1:  # another rank's continues without its errors, as that of any optimizer in codes does
        theirs = {key.replace("rank 1 of 2.", "rank 0 of 2."): x for key, x in kept["opt"].items()}
        with pytest.warns(UserWarning, match="errors"):
            fresh.load_state_dict(theirs)
    return found


def test_what_codes_left_out_is_saved_by_each_rank(tmp_path: Path) -> None:
    for found in run(2, in_codes, str(tmp_path)):
        assert found["own"]
        assert found["apart"] == (0, 0)


class Awkward(nn.Module):
    """A convolution, a stack of matrices, a weight that is tied to an embedding, and one that gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.conv = nn.Embedding(11, 6), nn.Conv1d(6, 5, 3)
        self.experts = nn.Parameter(torch.randn(3, 5, 6) / 4)
        self.head, self.large, self.unused = nn.Linear(6, 11, bias=False), nn.Linear(6, 40), nn.Linear(6, 5)
        self.back = nn.Linear(40, 6)
        self.head.weight = self.embedding.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.relu(self.conv(self.embedding(tokens).T)).T @ self.experts[0] @ self.experts[1].T @ self.experts[2]
        x = self.back(torch.tanh(self.large(x)))
        return self.head(torch.cat([x, x[-2:]]))


def awkward() -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), {}
    for flatten in (False, True):
        model, twin = Awkward(), Awkward()
        fully_shard(model, mesh=mesh)
        opts = [optimizer(model, partial(chains.muon, flatten=flatten))]
        with fn.bind({"data": dist.group.WORLD}):
            opts.append(optimizer(twin, partial(chains.muon, axis="data", owned=False, flatten=flatten)))
        for m, opt in zip((model, twin), opts, strict=True):
            for step in range(STEPS):
                loss(m, step, dist.get_rank()).backward()
                if step == 1:  # a matrix of zeros
                    (g.to_local() if isinstance(g := m.back.weight.grad, DTensor) else g).zero_()
                for p in m.unused.parameters():  # in the twin a missing gradient counts as zero; behind FSDP2 p rests
                    p.grad = torch.zeros_like(p)
                opt.step()
                opt.zero_grad()
        found[f"flatten={flatten}"] = far(whole(model), whole(twin))
    return found


def test_awkward_tensors_and_gradients() -> None:
    for found in run(2, awkward):
        assert found["flatten=False"] <= 1e-10
        assert found["flatten=True"] <= 1e-10


def refusals() -> list[str]:
    said, mesh = [], init_device_mesh("cpu", (2, 1), mesh_dim_names=("data", "model"))
    model = sharded(mesh["data"])
    for make, binding in [
        (partial(fn.muon, axis="data"), fn.bind(mesh["data"])),
        (lambda lr: fn.muon(lr), fn.bind(mesh["model"])),
        (fn.muon, fn.bind({"data": dist.new_subgroups(1)[0]})),
        (partial(fn.dion, axis="data"), fn.bind(mesh["data"])),
    ]:
        with binding:
            try:
                fn.Optimizer(model.parameters(), make)
            except (ValueError, fn.RanksDisagree) as error:
                said.append(str(error))
    return said


def test_what_cannot_be_is_refused_by_name() -> None:
    for axis, closed, name, dion in run(2, refusals):
        assert "a DTensor, on mesh axes apart from 'data'" in axis
        assert "leave the axis out, for FSDP2 averages over it" in axis
        assert "scale_by_muon" in closed
        assert "put fn.unsharded(link, shards) around one" in closed
        assert "expected no other ranks to be bound to 'data'" in name
        assert "a DTensor, on mesh axes apart from 'data'" in dion
