"""`fn.adapters.torch_optimizer` in containers that build optimizers and save them by torch's state dict functions."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from adapters.fsdp.test_muon_on_shards import Net, sharded, train
from ranks import run
from test_transactions import bits, same
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import fn
from fn.adapters import checkpoint

FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
METHODS: dict[str, tuple[Callable[..., Any], Any]] = {
    "adamw": (partial(fn.adamw, axis="data"), None),
    "onebit_adam": (partial(fn.onebit_adam, axis="data"), fn.freeze_after(2)),
    "muon": (partial(fn.muon, axis="data"), None),
    "normuon": (partial(fn.normuon, axis="data"), None),
    "sign_muon": (partial(fn.sign_muon, axis="data"), fn.freeze_after(2)),
    "muloco": (partial(fn.muloco, axis="data"), fn.every(3)),
}


class Container(torch.optim.Optimizer, Stateful):
    """As torchtitan's `OptimizersContainer` before 0.3: an optimizer for each part, and one flat state dict of all.

    It is written anew from what that one does: it asks torch for the state dict of each part with its optimizer.
    """

    def __init__(self, model_parts: list[nn.Module], optimizer_cls: Any, optimizer_kwargs: dict[str, Any]):
        self.model_parts = model_parts
        trained = [[p for p in part.parameters() if p.requires_grad] for part in model_parts]
        self.optimizers = [optimizer_cls(params, **optimizer_kwargs) for params in trained]
        super().__init__([p for params in trained for p in params], optimizer_kwargs)

    def step(self, closure: Any = None) -> None:
        for opt in self.optimizers:
            opt.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for opt in self.optimizers:
            opt.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for part, opt in zip(self.model_parts, self.optimizers, strict=True):
            found |= get_optimizer_state_dict(part, opt, options=FLAT)
        return found

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, opt in zip(self.model_parts, self.optimizers, strict=True):
            set_optimizer_state_dict(part, opt, state_dict, options=FLAT)


def contained(model: Net, name: str, lr: float = 0.05) -> Container:
    """Return a container over the two parts of a model, as stages of a pipeline are: the head is in the second."""
    make, schedule = METHODS[name]
    cls = fn.adapters.torch_optimizer(make, model=model)
    first = nn.ModuleDict({name: getattr(model, name) for name in ("embedding", "up")})
    second = nn.ModuleDict({name: getattr(model, name) for name in ("same", "few", "norm", "head")})
    with fn.bind({"data": dist.group.WORLD}):
        return Container([first, second], cls, {"lr": lr, "schedule": schedule})


def params_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the params; with the rank in their names, for those of local steps differ."""
    return {f"{dist.get_rank()} {name}": p.detach() for name, p in model.named_parameters()}


def continued(folder: str, name: str) -> list[str]:
    """Train, save, load into another container, and train both; return what differs, or should not have happened."""
    model, other, wrong = Net(), Net(), []
    torch.manual_seed(1)
    with torch.no_grad():
        for p in other.parameters():
            p.copy_(torch.randn_like(p))
    opt, again = contained(model, name), contained(other, name, lr=0.5)
    for one in (*opt.optimizers, *again.optimizers):
        torch.optim.lr_scheduler.LambdaLR(one, lambda step: 1.0)  # which writes into the groups, as trainers' do
    train(model, opt, range(4))
    with fn.ledger() as book:
        dcp.save({"opt": opt, **params_of(model)}, checkpoint_id=f"{folder}/{name}")
        begun = again.state_dict()
        if any(one.steps for one in again.optimizers):
            wrong.append("a step was taken to fill the state")
        dcp.load({"opt": again, **params_of(other)}, checkpoint_id=f"{folder}/{name}")
    if book.sent or not any(key.startswith("state.") for key in begun):
        wrong.append(f"messages {book.sent} for {len(begun)} entries")
    for t in range(4, 8):
        for a, b in zip(opt.optimizers, again.optimizers, strict=True):
            if not same(bits(a.states), bits(b.states)) or a.steps != b.steps or a.param_groups[0]["lr"] != 0.05:
                wrong.append(f"the state differs before step {t}")
        train(model, opt, range(t, t + 1))
        train(other, again, range(t, t + 1))
        if not all(map(torch.equal, model.parameters(), other.parameters())):
            wrong.append(f"params differ behind step {t}")
    return wrong


def all_continued(folder: str) -> dict[str, list[str]]:
    return {name: continued(folder, name) for name in METHODS}


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_a_container_continues_bit_for_bit_and_torch_takes_no_step(world, tmp_path):
    for found in run(world, all_continued, str(tmp_path)):
        assert found == {name: [] for name in METHODS}


def saved_by_two(folder: str) -> list[dict[str, Tensor]]:
    found = []
    for name in ("muon", "onebit_adam"):
        model = Net()
        opt = contained(model, name)
        train(model, opt, range(2))
        dcp.save({"opt": opt}, checkpoint_id=f"{folder}/{name}")
        found.append({k: x for k, x in opt.state_dict().items() if k.startswith("state.")})
    return found


def loaded_by_three(folder: str) -> tuple[dict[str, Tensor], str]:
    opt = contained(Net(), "muon")
    dcp.load({"opt": opt}, checkpoint_id=f"{folder}/muon")
    errors = contained(Net(), "onebit_adam")
    try:
        dcp.load({"opt": errors}, checkpoint_id=f"{folder}/onebit_adam")
    except BaseException as error:  # torch's is no Exception
        return {k: x for k, x in opt.state_dict().items() if k.startswith("state.")}, str(error)
    return {}, "nothing raised"


@pytest.mark.slow
def test_tensors_move_to_the_owners_of_another_number_of_ranks_and_errors_are_missed_by_name(tmp_path):
    saved, loaded = run(2, saved_by_two, str(tmp_path)), run(3, loaded_by_three, str(tmp_path))
    momenta = {k: x for (muon, _) in saved for k, x in muon.items()}
    there = {k: x for muon, _ in loaded for k, x in muon.items()}
    assert momenta.keys() == there.keys()
    assert all(torch.equal(x, momenta[k]) for k, x in there.items())
    assert sum(k.endswith("muon.0.mu") for k in there) == 3
    for _, text in loaded:
        assert "Missing key in checkpoint state_dict: opt.state." in text
        assert " of 3.inner." in text


ON_SHARDS = {"adamw": fn.adamw, "muon": fn.muon, "normuon": fn.normuon}


def on_shards(name: str) -> tuple[Net, Any]:
    model = sharded(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)))
    return model, fn.adapters.torch_optimizer(ON_SHARDS[name], model=model)(model.parameters(), lr=0.05)


def whole(model: nn.Module, opt: Any) -> dict[str, Tensor]:
    found = {**get_optimizer_state_dict(model, opt, options=FLAT), **dict(model.named_parameters())}
    kept = {k: x for k, x in found.items() if isinstance(x, Tensor) and "rank" not in k}
    return {k: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone() for k, x in kept.items()}


def saved_on_shards(folder: str) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name in ON_SHARDS:
        model, opt = on_shards(name)
        train(model, opt, range(3))
        flat = get_optimizer_state_dict(model, opt, options=FLAT)
        dcp.save({"opt": flat, "model": model.state_dict()}, checkpoint_id=f"{folder}/{name}")
        found[name] = whole(model, opt)
    return found


def loaded_on_shards(folder: str) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name in ON_SHARDS:
        model, opt = on_shards(name)
        read = {"opt": get_optimizer_state_dict(model, opt, options=FLAT), "model": model.state_dict()}
        dcp.load(read, checkpoint_id=f"{folder}/{name}")
        set_optimizer_state_dict(model, opt, read["opt"], options=FLAT)
        assert opt.steps == 3
        found[name] = whole(model, opt)
        train(model, opt, range(3, 4))  # it can go on
    return found


@pytest.mark.slow
def test_shards_are_loaded_on_another_mesh_bit_for_bit(tmp_path):
    saved, loaded = run(2, saved_on_shards, str(tmp_path))[0], run(3, loaded_on_shards, str(tmp_path))[0]
    for name in ON_SHARDS:
        assert saved[name].keys() == loaded[name].keys()
        assert [key for key, x in saved[name].items() if not torch.equal(x, loaded[name][key])] == []
        assert any(key.startswith("state.same.weight") and key.endswith("mu") for key in saved[name])


ON_ISLANDS = {"sign_muon": fn.sign_muon, "onebit_adam": fn.onebit_adam}


def on_islands(mesh: Any, name: str, lr: float = 0.05) -> tuple[Net, Any]:
    """Return a model on FSDP2's shards of two islands, across which one of their optimizers communicates."""
    model = Net()
    fully_shard(model, mesh=mesh["shard"])
    cls = fn.adapters.torch_optimizer(partial(ON_ISLANDS[name], axis="replica"), model=model)
    with fn.bind(mesh["replica"]):
        return model, cls(model.parameters(), lr=lr, schedule=fn.freeze_after(1))


def differs(model: nn.Module, opt: Any, other: nn.Module, again: Any) -> list[str]:
    """Return in what a run that was loaded differs from the one that goes on, then and behind each of five steps."""
    wrong = [] if same(bits(opt.states), bits(again.states)) and again.steps == 3 else ["the state"]
    for t in range(3, 8):
        for m, o in ((model, opt), (other, again)):
            train(m, o, range(t, t + 1))
        pairs = zip(model.parameters(), other.parameters(), strict=True)
        if not all(torch.equal(p.to_local(), q.to_local()) for p, q in pairs):
            wrong.append(f"params behind step {t}")
    return wrong


def saved_on_islands(folder: str) -> dict[str, list[str]]:
    """Save and load what two islands of shards have of their own: momenta, and residual errors of 1-bit Adam."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")), {}
    island = mesh.get_local_rank("replica")
    for name in ON_ISLANDS:
        (model, opt), (other, again) = (on_islands(mesh, name, lr) for lr in (0.05, 0.5))
        train(model, opt, range(3))
        # Both islands have params of the same names, which are equal, but for what a local method would do.
        params = lambda x: {f"{island} {k}": p for k, p in x.state_dict().items()}  # noqa: E731
        state = {"opt": get_optimizer_state_dict(model, opt, options=FLAT), "model": params(model)}
        dcp.save(state, checkpoint_id=f"{folder}/{name}")
        read = {"opt": get_optimizer_state_dict(other, again, options=FLAT), "model": params(other)}
        dcp.load(read, checkpoint_id=f"{folder}/{name}")
        set_optimizer_state_dict(other, again, read["opt"], options=FLAT)
        found[name] = differs(model, opt, other, again)
    return found


@pytest.mark.slow
def test_islands_of_shards_are_loaded_bit_for_bit(tmp_path):
    assert run(4, saved_on_islands, str(tmp_path)) == [{name: [] for name in ON_ISLANDS}] * 4


FULL = {"full_state_dict": True, "cpu_offload": True}
LOADS: dict[str, dict[str, bool]] = {
    "on all ranks": {"full_state_dict": True},
    "from the first rank": {**FULL, "broadcast_from_rank0": True},
}


def in_whole_tensors(folder: str) -> dict[Any, Any]:
    """Load what torch gathered; return what differs, and the messages of what it refuses."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")), {}
    flat = {"flatten_optimizer_state_dict": True}

    def built(name: str, lr: float) -> tuple[Net, Any]:
        if name in ON_ISLANDS:
            return on_islands(mesh, name, lr)
        model = sharded(mesh)  # and replicas of the shards
        return model, fn.adapters.torch_optimizer(ON_SHARDS[name], model=model)(model.parameters(), lr=lr)

    for name in ("adamw", "muon", "normuon", "onebit_adam"):
        model, opt = built(name, 0.05)
        train(model, opt, range(3))
        for where, options in LOADS.items():
            asked = StateDictOptions(**{k: x for k, x in options.items() if k != "broadcast_from_rank0"})
            try:
                gathered = get_optimizer_state_dict(model, opt, options=asked)
            except NotImplementedError as error:
                found[name, where] = str(error)
                continue
            twin, still = built(name, 0.05)  # which goes on as the first one would have done
            train(twin, still, range(3))
            other, again = built(name, 0.5)
            other.load_state_dict(copy.deepcopy(model.state_dict()))
            set_optimizer_state_dict(other, again, gathered, options=StateDictOptions(**options))
            found[name, where] = differs(twin, still, other, again)
    model, opt = built("muon", 0.05)
    train(model, opt, range(3))
    gathered = get_optimizer_state_dict(model, opt, options=StateDictOptions(**FULL, **flat))
    found["flat"] = [key for key, x in gathered.items() if isinstance(x, DTensor)], len(gathered)
    if dist.get_rank() == 0:
        dcp.save({"opt": gathered}, checkpoint_id=folder, no_dist=True)
    dist.barrier()
    other, again = built("muon", 0.5)
    other.load_state_dict(copy.deepcopy(model.state_dict()))
    read = {"opt": get_optimizer_state_dict(other, again, options=FLAT)}
    dcp.load(read, checkpoint_id=folder)
    set_optimizer_state_dict(other, again, read["opt"], options=FLAT)
    found["muon", "flat, from a file"] = differs(model, opt, other, again)
    gathered = get_optimizer_state_dict(model, opt, options=StateDictOptions(full_state_dict=True, **flat))
    adamw = torch.optim.AdamW(model.parameters())
    theirs = get_optimizer_state_dict(model, adamw, options=StateDictOptions(full_state_dict=True, **flat))
    for whose, one, state in (("ours", opt, gathered), ("torch's", adamw, theirs)):
        try:
            set_optimizer_state_dict(model, one, state, options=StateDictOptions(full_state_dict=True, **flat))
        except (NotImplementedError, KeyError) as error:
            found["flat", whose] = type(error).__name__, str(error)
    return found


@pytest.mark.slow
def test_whole_tensors_are_loaded_bit_for_bit_or_refused_where_ranks_have_parts_of_the_state(tmp_path):
    for rank, found in enumerate(run(4, in_whole_tensors, str(tmp_path))):
        for where in LOADS:
            assert [found[name, where] for name in ("adamw", "muon")] == [[], []], where
            for name, leaf in (("normuon", "nu"), ("onebit_adam", "sync.worker")):
                message = found[name, where]
                assert message.startswith("get_optimizer_state_dict: expected options without full_state_dict"), name
                assert leaf in message
                assert "save the state dicts of all ranks with torch.distributed.checkpoint" in message
        whole, entries = found["flat"]
        assert whole == []
        assert bool(entries) == (rank == 0)
        assert found["muon", "flat, from a file"] == []
        assert found["flat", "ours"][0] == "NotImplementedError"
        assert "leave flatten_optimizer_state_dict out of both calls" in found["flat", "ours"][1]
        assert found["flat", "torch's"][0] == "KeyError"  # where it loads, ours need not refuse any more


def test_a_parameter_has_its_leaves_by_name_from_the_start():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    opt = fn.adapters.torch_optimizer(fn.adamw)(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    moments = {n: x for n, x in opt.state[model[0].weight].items() if x.shape == (4, 3)}
    assert [n.rpartition(".")[2] for n in moments] == ["mu", "nu"]
    opt.step()
    assert all(torch.equal(x, opt.state[model[0].weight][n]) and x.count_nonzero() for n, x in moments.items())
    assert opt.state[model[1].bias]["steps"] == opt.steps == 1
    assert [*opt.state] == [*model.parameters()]
    assert type(opt).__name__ == "adamw"


def test_a_stage_of_another_pipeline_finds_its_layers(tmp_path):
    layers = [nn.Linear(3, 3) for _ in range(4)]
    cls = fn.adapters.torch_optimizer(fn.adamw)
    model = nn.Sequential(*layers)
    opt = cls(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    opt.step()
    saved = get_optimizer_state_dict(model, opt, options=FLAT)
    stage = nn.ModuleDict({"2": copy.deepcopy(layers[2]), "3": copy.deepcopy(layers[3])})
    again = cls(stage.parameters())
    set_optimizer_state_dict(stage, again, saved, options=FLAT)
    assert again.steps == 1
    for p, q in zip([*layers[2].parameters(), *layers[3].parameters()], again.state, strict=True):
        assert opt.state[p].keys() == again.state[q].keys()
        assert all(map(torch.equal, opt.state[p].values(), again.state[q].values()))


def test_a_copy_and_a_late_group_have_states_of_their_own():
    p, q = (nn.Parameter(torch.ones(2)) for _ in range(2))
    opt = fn.adapters.torch_optimizer(fn.adamw)([p], 0.1)
    opt.add_param_group({"params": [q]})
    twin = copy.deepcopy(opt)
    p.grad = q.grad = torch.ones(2)
    opt.step()
    (a, b), (c, d) = opt.state.values(), twin.state.values()
    assert a.keys() == b.keys() == c.keys() == d.keys()
    assert (a["steps"], b["steps"], c["steps"], d["steps"]) == (1, 1, 0, 0)
    twin.load_state_dict(opt.state_dict())
    assert same(bits(opt.states), bits(twin.states))
    assert twin.steps == 1


def test_fns_own_checkpoints_hold_it_too(tmp_path):
    p = nn.Parameter(torch.ones(2))
    opt, gathered, saved = (fn.adapters.torch_optimizer(fn.adamw)([p], lr) for lr in (0.1, 0.2, 0.3))
    p.grad = torch.ones(2)
    opt.step()
    gathered.load_state_dict(checkpoint.gather(opt))
    checkpoint.save(tmp_path, opt)
    checkpoint.load(tmp_path, saved)
    for other in (gathered, saved):
        assert same(bits(opt.states), bits(other.states))
        assert (other.steps, other.state[p]["steps"], other.param_groups[0]["lr"]) == (1, 1, 0.1)


def hidden_of(opt: fn.Optimizer) -> list[tuple[int, ...]]:
    """Return the shapes of what has one moment only, as Muon's matrices have."""
    return [tuple(p.shape) for p, leaves in opt.state.items() if not any(name.endswith("nu") for name in leaves)]


def test_labels_come_from_a_model_its_labels_or_groups():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    matrix, others = model[0].weight, [model[0].bias, *model[1].parameters()]
    groups = [{"params": [matrix], "label": "hidden"}, {"params": others, "label": "other"}]
    for given, params in (
        (model, model.parameters()),
        (fn.labels_of(model), model.named_parameters()),
        (None, groups),
        (model, [groups[0], {"params": others}]),
    ):
        opt = fn.adapters.torch_optimizer(fn.muon, model=given)(params, lr=0.1)
        assert hidden_of(opt) == [(4, 3)]
    opt = fn.adapters.torch_optimizer(fn.muon)(groups[:1])
    opt.add_param_group(groups[1])
    assert hidden_of(opt) == [(4, 3)]


def test_params_without_a_label_are_refused_with_the_cure():
    model = nn.Linear(3, 4)
    cls = fn.adapters.torch_optimizer(fn.muon)
    with pytest.raises(ValueError, match=r"params: expected a label for param group 0.*torch_optimizer\(make, model="):
        cls(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="a label for param group 1"):
        cls([{"params": [model.weight], "label": "hidden"}, {"params": [model.bias]}])


def test_what_does_not_fit_is_refused_and_nothing_is_loaded():
    model = nn.Linear(3, 4)
    opt = fn.adapters.torch_optimizer(fn.adamw)(model.parameters())
    before, saved, adamw = bits(opt.states), opt.state_dict(), torch.optim.AdamW(model.parameters())
    name = next(name for name in saved["state"][0] if name.endswith("mu"))
    missing = {**saved, "state": {**saved["state"], 0: {k: x for k, x in saved["state"][0].items() if k != name}}}
    for wrong, text in (
        (missing, "mu.0' is missing"),
        (
            {**saved, "param_groups": saved["param_groups"] * 2},
            r"param groups of \[2\] parameters, but got of \[2, 2\]",
        ),
        (adamw.state_dict(), "an optimizer of torch"),
    ):
        with pytest.raises(ValueError, match=text):
            opt.load_state_dict(wrong)
        assert same(bits(opt.states), before)


def continued_in_torchtitan(folder: str) -> list[str]:
    """Save and load torchtitan's own container, in which patterns choose the params of Muon and give them a label."""
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    class Muons(OptimizersContainer):
        @staticmethod
        def _build_impl_kwargs(config: Any) -> dict[str, Any]:
            return {}  # fused and foreach are of torch's optimizers

        @staticmethod
        def _resolve_optimizer_factory(name: str) -> Any:
            return fn.adapters.torch_optimizer(getattr(fn, name))

    def built(lr: float) -> tuple[Net, Any]:
        hidden = {"optimizer_name": "muon", "optimizer_kwargs": {"lr": lr, "label": "hidden"}}
        others = {"optimizer_name": "adamw", "optimizer_kwargs": {"lr": lr / 10}}
        groups = [
            ParamGroupConfig(pattern=r"(up|same|few)\.weight", **hidden),
            ParamGroupConfig(pattern=".*", **others),
        ]
        model = Net()
        return model, Muons(Muons.Config(param_groups=groups), model_parts=[model])

    (model, opt), (_, again) = built(0.05), built(0.5)
    train(model, opt, range(3))
    dcp.save({"opt": opt}, checkpoint_id=folder)
    again.state_dict()
    wrong = ["a step was taken"] if any(one.steps for one in again.optimizers) else []
    dcp.load({"opt": again}, checkpoint_id=folder)
    for a, b in zip(opt.optimizers, again.optimizers, strict=True):
        if not same(bits(a.states), bits(b.states)) or b.steps != 3:
            wrong.append(f"{a.make.__name__} differs")
        if [group["lr"] for group in a.param_groups] != [group["lr"] for group in b.param_groups]:
            wrong.append(f"the rate of {a.make.__name__} differs")
    return wrong


@pytest.mark.skipif(importlib.util.find_spec("torchtitan") is None, reason="torchtitan is not installed")
def test_torchtitans_own_container_of_0_3(tmp_path):
    assert run(1, continued_in_torchtitan, str(tmp_path)) == [[]]
