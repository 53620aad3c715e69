"""How tensors lie in memory changes no number: every named optimizer and every adapter, beside row-major copies."""

from __future__ import annotations

import functools
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import ranks
import registry
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import fn
import fn.adapters.ddp
from fn.adapters import checkpoint, deepspeed, from_adamw
from fn.adapters.deepspeed import loco
from fn.adapters.fsdp import compress

Numbers = dict[str, Tensor]
Lay = Callable[[str, Tensor], Tensor]

SHAPES = {
    "row-major": (3, 5),
    "channels_last": (4, 3, 2, 2),
    "channels_last_3d": (3, 2, 2, 3, 2),
    "transposed": (6, 6),
    "permuted": (2, 3, 4),
    "slice of columns": (5, 4),
    "slice of rows": (6,),
    "every other one": (7,),
    "expanded": (4, 5),
}
"""A tensor of each memory format."""

FORMATS: dict[str, Callable[[Tensor], Tensor]] = {
    "row-major": Tensor.clone,
    "channels_last": lambda x: x.clone(memory_format=torch.channels_last),
    "channels_last_3d": lambda x: x.clone(memory_format=torch.channels_last_3d),
    "transposed": lambda x: x.t().contiguous().t(),
    "permuted": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "slice of columns": lambda x: torch.cat([x + 1, x, x + 1], 1)[:, 4:8],
    "slice of rows": lambda x: torch.cat([x + 1, x, x + 1])[6:12],
    "every other one": lambda x: torch.stack([x, x + 1], 1)[:, 0],
    "expanded": lambda x: x[:1].clone().expand_as(x) if bool((x == x[:1]).all()) else x.clone(),
}
"""How a row-major tensor is laid out; "expanded" is of gradients only, whose rows are all the same."""


def strided(name: str, x: Tensor) -> Tensor:
    return FORMATS[name](x)


def row_major(name: str, x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)


LAYS = (row_major, strided)


def numbers(seed: int, rank: int = 0) -> Numbers:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def gradients(step: int, rank: int = 0) -> Numbers:
    found = numbers(step, rank)
    found["expanded"] = found["expanded"][:1].repeat(4, 1)
    return found


def parameters(lay: Lay, rank: int = 0) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(lay(name, x)) for name, x in numbers(99, rank).items()}


def give(params: Mapping[str, Tensor], lay: Lay, step: int) -> None:
    for name, g in gradients(step, dist.get_rank()).items():
        params[name].grad = lay(name, g)


def copies(params: Mapping[str, Any]) -> Numbers:
    return {name: row_major(name, p.detach()) for name, p in params.items()}


def apart(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the largest difference of each tensor, of those that differ by more than rounding."""
    far = {name: float((x - wanted[name]).abs().max()) for name, x in found.items()}
    return {name: x for name, x in far.items() if not x <= 2e-6}


def test_the_formats_are_what_they_are_called():
    params, grads = parameters(strided), {name: strided(name, g) for name, g in gradients(0).items()}
    dense = {name for name, p in params.items() if p.is_contiguous()}
    assert dense == {"row-major", "slice of rows", "expanded"}
    assert grads["expanded"].stride() == (0, 1)
    for name, x in numbers(99).items():
        assert torch.equal(params[name], x)


# named optimizers


def strided_on_one_rank(name: str, x: Tensor) -> Tensor:
    return (row_major if dist.get_rank() else strided)(name, x)


def phases_of(optimizer: registry.Named) -> list[Any]:
    first, *others = optimizer.phases
    return [first, first, *[*reversed(others or [first])] * 6]


def pure(optimizer: registry.Named) -> Numbers:
    """Take pure steps of row-major tensors."""
    rank = dist.get_rank()
    params = [*numbers(99, rank * optimizer.divided).values()]
    with fn.bind({"data": dist.group.WORLD}), torch.no_grad():
        tx = optimizer.make(lr=0.01, axis="data")
        state = tx.init(params)
        for t, phase in zip(range(7), phases_of(optimizer), strict=False):
            updates, state = tx.update(phase)([*gradients(t, rank).values()], state, params)
            params = fn.apply_updates(params, updates)
    return dict(zip(SHAPES, params, strict=True))


def named(optimizer: registry.Named) -> Numbers:
    """Take steps in all phases, with gradients that lie otherwise on one rank.

    The last of them takes a copy whose params are row-major, and that loads the state.
    """
    phases, rank = phases_of(optimizer), dist.get_rank()
    params: dict[str, nn.Parameter] = {}
    saved: Any = None
    for steps, laid in ((range(4), strided), (range(4, 7), row_major)):
        before = params
        params = parameters(laid, rank * optimizer.divided)
        with fn.bind({"data": dist.group.WORLD}):
            options = {"schedule": phases.__getitem__, "lr": 0.01}
            opt = fn.Optimizer(params.values(), partial(optimizer.make, axis="data"), **options)
        for name, p in before.items():
            params[name].data.copy_(p.data)
        if saved is not None:
            opt.load_state_dict(saved)
        for t in steps:
            give(params, strided_on_one_rank, t)
            opt.step()
        saved = opt.state_dict()
    return copies(params)


case = ranks.Cases(2)


def quietly(f: Callable[[], Any]) -> Callable[[], Any]:
    """Add a function whose warnings, of slow tensors and of links that are odd on purpose, nobody reads."""

    @functools.wraps(f)
    def run() -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return f()

    return case(run)


@quietly
def named_optimizers() -> dict[str, dict[str, float]]:
    return {optimizer.name: apart(named(optimizer), pure(optimizer)) for optimizer in registry.EVERY}


@registry.each_of_all
def test_a_named_optimizer_takes_the_pure_steps_of_row_major_tensors(optimizer):
    for found in case.answer("named_optimizers"):
        assert found[optimizer.name] == {}


# adapters


class Net(nn.Module):
    """Parameters in all formats, whose gradients are the parameters and a batch of this rank; and two convolutions."""

    def __init__(self, lay: Lay):
        super().__init__()
        self.names = [*SHAPES]
        self.weights = nn.ParameterList(parameters(lay).values())
        generator = torch.Generator().manual_seed(5)
        shapes = {"channels_last": (3, 2, 2, 3), "channels_last_3d": (2, 2, 2, 3, 2)}
        self.flat, self.deep = nn.Conv2d(2, 3, (2, 3), bias=False), nn.Conv3d(2, 2, (2, 3, 2), bias=False)
        for part, (name, shape) in zip((self.flat, self.deep), shapes.items(), strict=True):
            part.weight = nn.Parameter(lay(name, torch.randn(shape, generator=generator)))

    def forward(self, step: int) -> Tensor:
        rank = dist.get_rank()
        pairs = zip(self.weights, numbers(step, rank).values(), strict=True)
        total = sum((p * (p / 2 + x)).sum() for p, x in pairs)
        generator = torch.Generator().manual_seed(100 * step + rank)
        images, films = (torch.randn(shape, generator=generator) for shape in ((2, 2, 4, 5), (2, 2, 3, 4, 3)))
        return total + self.flat(images).square().sum() + self.deep(films).square().sum()


def in_ddp(lay: Lay, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Net(lay), **options)


def trained_in_ddp(make: Callable[..., Any], lay: Lay, way: str, **options: Any) -> Numbers:
    """Take steps in a warm-up and in codes: behind the backward pass, in `step`, or without DDP."""
    model: Any = Net(lay) if way == "no DDP" else in_ddp(lay, **options)
    more: dict[str, Any] = {"schedule": fn.freeze_after(2), "lr": 0.01}
    if way == "overlap":
        opt = fn.adapters.ddp.optimizer(model, make, elements=60, least_wire_seconds=0, **more)
    else:
        if way == "keep_local":
            fn.adapters.ddp.keep_local(model)
        with fn.bind({"data": dist.group.WORLD}):
            opt = fn.Optimizer(fn.adapters.ddp.bucketed(model.parameters(), 60), partial(make, axis="data"), **more)
        if way == "no DDP":
            fn.adapters.ddp.overlap(model, opt, least_wire_seconds=0)
    for step in range(5):
        model(step).backward()
        opt.step()
        opt.zero_grad()
    fn.adapters.ddp.close(opt)
    return copies(dict(getattr(model, "module", model).named_parameters()))


IN_DDP: dict[str, tuple[str, dict[str, Any]]] = {
    "overlap": ("overlap", {}),
    "overlap, small buckets": ("overlap", {"bucket_cap_mb": 0.0002}),
    "overlap, views": ("overlap", {"gradient_as_bucket_view": True}),
    "overlap, static graph": ("overlap", {"static_graph": True}),
    "keep_local": ("keep_local", {}),
    "no DDP": ("no DDP", {}),
}
MAKES = {"onebit_adam": fn.onebit_adam, "muon": partial(fn.muon, codec=fn.int8()), "powersgd": fn.powersgd_adamw}


@quietly
def ddp_optimizer() -> dict[str, dict[str, float]]:
    found = {}
    for name, make in MAKES.items():
        model, wanted = Net(row_major), {}
        with fn.bind({"data": dist.group.WORLD}):
            groups = fn.adapters.ddp.bucketed(model.parameters(), 60)
            opt = fn.Optimizer(groups, partial(make, axis="data"), schedule=fn.freeze_after(2), lr=0.01)
        for step in range(5):
            model(step).backward()
            opt.step()
            opt.zero_grad()
        wanted = copies(dict(model.named_parameters()))
        for way, (how, options) in IN_DDP.items() if name == "onebit_adam" else [("overlap", IN_DDP["overlap"])]:
            found[f"{name}, {way}"] = apart(trained_in_ddp(make, strided, how, **options), wanted)
    return found


def test_a_ddp_optimizer_moves_each_element_along_its_own_gradient():
    for found in case.answer("ddp_optimizer"):
        assert {way: far for way, far in found.items() if far} == {}
        assert len(found) == len(IN_DDP) + len(MAKES) - 1


AVERAGES: dict[str, dict[str, Any]] = {
    "sign": {"codec": fn.sign(), "feedback": fn.classic()},
    "int8": {"codec": fn.int8(block=16), "feedback": fn.damped()},
    "top_k": {"codec": fn.top_k(0.25), "feedback": fn.classic()},
    "low rank": {"average": partial(fn.low_rank_average, rank=1)},
    "identity": {"codec": fn.identity()},
}


def averaged(lay: Lay, name: str, **options: Any) -> list[Numbers]:
    model, found = in_ddp(lay, **options), []
    mean = fn.adapters.ddp.average_gradients(model, **AVERAGES[name], schedule=fn.freeze_after(1), elements=60)
    for step in range(3):
        model(step).backward()
        found.append({name: row_major(name, p.grad) for name, p in model.module.named_parameters()})
        model.zero_grad()
    fn.adapters.ddp.close(mean)
    return found


@quietly
def average_gradients() -> dict[str, list[dict[str, float]]]:
    found = {}
    for name in AVERAGES:
        wanted = averaged(row_major, name)
        for views in (False, True):
            there = averaged(strided, name, gradient_as_bucket_view=views)
            found[f"{name}, {views}"] = [apart(a, b) for a, b in zip(there, wanted, strict=True)]
    return found


def test_averaged_gradients_are_those_of_row_major_parameters():
    for found in case.answer("average_gradients"):
        assert {way: far for way, far in found.items() if any(far)} == {}


@quietly
def laid_out_under_ddp() -> dict[str, str]:
    """Lay a weight out anew between DDP and the first pass, where DDP mixes its elements up, and after that."""

    def keep_local(model: Any) -> Any:
        fn.adapters.ddp.keep_local(model)

    def with_optimizer(model: Any) -> Any:
        return fn.adapters.ddp.optimizer(model, fn.onebit_adam, schedule=fn.freeze_after(9), lr=0.1)

    def average(model: Any) -> Any:
        return fn.adapters.ddp.average_gradients(model, fn.int8(), schedule=fn.freeze_after(9))

    found = {}
    for name, adapt in {"keep_local": keep_local, "optimizer": with_optimizer, "average_gradients": average}.items():
        for when in (0, 1):
            torch.manual_seed(0)
            net = nn.Conv2d(2, 3, 2)
            model = DistributedDataParallel(net)
            kept = adapt(model)
            images = torch.randn(2, 2, 4, 4)
            try:
                for step in range(3):
                    net.to(memory_format=torch.channels_last if step == when else torch.preserve_format)
                    model.zero_grad()
                    model(images).square().sum().backward()
                    (wanted,) = torch.autograd.grad(net(images).square().sum(), [net.weight])
                    found[f"{name} {when}"] = f"{(net.weight.grad - wanted).abs().max() < 1e-5}"
            except ValueError as error:
                found[f"{name} {when}"] = str(error)
            if kept is not None:
                fn.adapters.ddp.close(kept)
    return found


def test_what_is_laid_out_under_ddp_is_right_or_refused():
    for found in case.answer("laid_out_under_ddp"):
        for name, said in found.items():
            if name.endswith("1"):
                assert said == "True", name
            else:
                assert said.startswith("model: expected parameters with the strides with which Distributed"), name
                assert "wrap anew: DistributedDataParallel(model.module)" in said


def plain(params: Mapping[str, Tensor], opt: Any, steps: range, lay: Lay = row_major) -> Numbers:
    for step in steps:
        give(params, lay, step)
        opt.step()
    return copies(params)


def optimizer(params: Mapping[str, Tensor], make: Any = fn.onebit_adam, **options: Any) -> fn.Optimizer:
    with fn.bind({"data": dist.group.WORLD}):
        options = {"schedule": fn.freeze_after(2), "lr": 0.01, **options}
        return fn.Optimizer(params.values(), partial(make, axis="data"), **options)


@quietly
def flatten_parameters() -> dict[str, Any]:
    params = parameters(row_major)
    wanted = plain(params, optimizer(params), range(5))
    params = parameters(strided)
    give(params, strided, 0)
    strides = {name: torch.empty_like(p).stride() for name, p in params.items()}
    grads = copies({name: p.grad for name, p in params.items()})
    flat = fn.flatten_parameters(params.values(), None, gradients=True)
    found = {"gradients": apart({name: p.grad for name, p in params.items()}, grads)}
    opt = optimizer(params)
    for step in range(5):
        for name, g in gradients(step, dist.get_rank()).items():
            params[name].grad.copy_(g)
        opt.step()
    found["flat"] = apart(copies(params), wanted)
    flat.restore()
    found["restored"] = apart(copies(params), wanted)
    # As torch lays out a copy: in the parameter's order, without the gaps of a slice.
    found["strides"] = {n: p.stride() for n, p in params.items()} == strides
    return found


def test_flattened_parameters_and_gradients_keep_their_elements():
    for found in case.answer("flatten_parameters"):
        assert found == {"gradients": {}, "flat": {}, "restored": {}, "strides": True}


SAVED: dict[str, dict[str, Any]] = {
    "onebit_adam": {"make": fn.onebit_adam},
    "zero_one_adam": {"make": fn.zero_one_adam, "schedule": fn.zero_one_schedule(3, 1, 2, 4)},
    "diloco": {"make": partial(fn.diloco, codec=fn.int8()), "schedule": fn.every(3)},
    "muon": {"make": partial(fn.muon, codec=fn.int8())},
    "sharded": {"make": fn.sharded_onebit_adam},
    "powersgd": {"make": fn.powersgd_adamw},
}


def resumed(name: str, lay: Lay, lay_then: Lay, folder: str) -> tuple[Numbers, Numbers]:
    """Save in one format and go on in another; return the params, and the leaves of `extra` as they were loaded."""
    params = parameters(lay)
    opt = optimizer(params, **SAVED[name])
    plain(params, opt, range(5), lay)
    extra = {f"{n} of all": lay(n, x) for n, x in numbers(1).items()}
    extra |= {f"{n} of one": lay(n, x) for n, x in numbers(1, dist.get_rank()).items()}
    checkpoint.save(folder, opt, extra)
    params = parameters(lay_then)
    opt = optimizer(params, **SAVED[name])
    like = {n: lay_then(n.rpartition(" of ")[0], torch.zeros_like(x)) for n, x in extra.items()}
    loaded = checkpoint.load(folder, opt, like)
    return plain(params, opt, range(5, 9), lay_then), {n: row_major(n, x) for n, x in loaded.items()}


@quietly
def checkpoints() -> dict[str, Any]:
    found = {}
    for name in SAVED:
        wanted: Any = None
        for lay, lay_then in ((row_major, row_major), (strided, row_major), (row_major, strided)):
            folder = [tempfile.mkdtemp()]
            dist.broadcast_object_list(folder)
            there = resumed(name, lay, lay_then, folder[0])
            wanted = wanted or there
            way = f"{name}, {lay.__name__} to {lay_then.__name__}"
            found[way] = [apart(a, b) for a, b in zip(there, wanted, strict=True)]
    return found


def test_a_checkpoint_is_loaded_into_another_format():
    for found in case.answer("checkpoints"):
        assert {way: far for way, far in found.items() if any(far)} == {}


@quietly
def agreed() -> dict[str, Any]:
    """Return how far agreed params are from those of row-major ones, and a rank's own from what they were before."""
    inside, back = [], []
    for lay in LAYS:
        params = parameters(lay)
        opt = optimizer(params, fn.diloco, schedule=fn.every(3))
        own = plain(params, opt, range(4), lay)
        with fn.adapters.agreed_params(opt):
            inside.append(copies(params))
        back.append(apart(copies(params), own))
    return {"agreed": apart(*inside), "back": back, "moved": bool(apart(inside[0], own))}


def test_agreed_params_are_those_of_row_major_ones():
    for found in case.answer("agreed"):
        assert found == {"agreed": {}, "back": [{}, {}], "moved": True}


DROP_INS: dict[str, Callable[..., Any]] = {
    "OnebitAdam": partial(deepspeed.OnebitAdam, freeze_step=3),
    "OnebitLamb": partial(deepspeed.OnebitLamb, freeze_step=3),
    "ZeroOneAdam": partial(deepspeed.ZeroOneAdam, var_freeze_step=3, local_step_scaler=2, local_step_clipper=2),
}


def dropped_in(name: str, lay: Lay, lay_then: Lay) -> Numbers:
    params = parameters(lay)
    opt = DROP_INS[name](params.values(), lr=0.01)
    plain(params, opt, range(4), lay)
    before, saved = params, opt.state_dict()
    params = parameters(lay_then)
    opt = DROP_INS[name](params.values(), lr=0.01)
    for p, old in zip(params.values(), before.values(), strict=True):
        p.data.copy_(old.data)
    opt.load_state_dict(saved)
    return plain(params, opt, range(4, 8), lay)


@quietly
def drop_ins() -> dict[str, Any]:
    found = {}
    for name in DROP_INS:
        wanted = dropped_in(name, row_major, row_major)
        for lay, lay_then in ((strided, row_major), (row_major, strided), (strided, strided)):
            found[f"{name}, {lay.__name__}"] = apart(dropped_in(name, lay, lay_then), wanted)
    found["mask"] = apart({"": masked(strided)}, {"": masked(row_major)})
    with fn.bind(init_device_mesh("cpu", (1, 2), mesh_dim_names=("node", "local"))):
        x = torch.randn(16, 16, generator=torch.Generator().manual_seed(dist.get_rank()))
        sums = [loco.loco_quant_reduce([lay("transposed", x)], local_axis="local", node_axis="node") for lay in LAYS]
    found["loco_quant_reduce"] = apart(*({"": there} for (there,), _ in sums))
    return found


def masked(lay: Lay) -> Tensor:
    """Train a matrix with DeepSpeed's `exp_avg_mask`."""
    p, mask = (lay("transposed", x) for x in (numbers(99)["transposed"], (numbers(3)["transposed"] > 0).float()))
    opt = deepspeed.OnebitAdam([{"params": [p.requires_grad_()], "exp_avg_mask": mask}], lr=0.01, freeze_step=3)
    for step in range(6):
        p.grad = lay("transposed", numbers(step, dist.get_rank())["transposed"])
        opt.step()
    return row_major("", p.detach())


def test_deepspeeds_drop_ins_take_the_steps_of_row_major_tensors():
    for found in case.answer("drop_ins"):
        assert {way: far for way, far in found.items() if far} == {}


@quietly
def moments_of_adamw() -> dict[str, float]:
    found = []
    for lay, lay_then in ((row_major, row_major), (strided, row_major), (row_major, strided)):
        params = parameters(lay)
        adamw = torch.optim.AdamW(params.values(), lr=0.01)
        for step in range(3):
            for name, g in gradients(step).items():
                params[name].grad = lay(name, g)
            adamw.step()
        if lay is not lay_then:
            for name, p in params.items():
                p.data = lay_then(name, p.data)
        opt = optimizer(params, schedule=lambda step: fn.Phase.COMPRESSED)
        from_adamw(adamw, opt)
        found.append(plain(params, opt, range(3, 6), lay_then))
    return {f"{i} {name}": x for i, there in enumerate(found[1:]) for name, x in apart(there, found[0]).items()}


def test_moments_of_adamw_are_taken_over_in_any_format():
    assert case.answer("moments_of_adamw") == [{}, {}]


def as_params(lay: Lay, x: Tensor) -> Tensor:
    """Return a leaf of a state, laid out as the parameter of its shape if there is one that can be written."""
    names = (name for name, shape in SHAPES.items() if x.shape == shape and name != "expanded")
    return lay(next(names, "row-major"), x)


@quietly
def donated() -> dict[str, float]:
    found = []
    for lay in (row_major, strided):
        with fn.bind({"data": dist.group.WORLD}), torch.no_grad():
            tx = fn.onebit_adam(0.01, axis="data")
            params = {name: lay(name, x) for name, x in numbers(99).items()}
            state = fn.tree.map(partial(as_params, lay), tx.init(params))
            for step in range(5):
                phase = fn.Phase.WARMUP if step < 2 else fn.Phase.COMPRESSED
                grads = {name: lay(name, g) for name, g in gradients(step, dist.get_rank()).items()}
                updates, state = fn.donate(tx.update(phase))(grads, state, params)
                params = fn.apply_updates(params, updates)
        found.append(copies(params))
    return apart(found[1], found[0])


def test_a_donated_update_writes_into_buffers_of_any_format():
    assert case.answer("donated") == [{}, {}]


def divided(lay: Lay, whole: Numbers, mesh: Any) -> Numbers:
    """Return matrices as DTensors, of which each rank has some rows, laid out; FSDP2 has row-major ones only."""
    found = {}
    for name, x in whole.items():
        if x.ndim > 1:
            rows = lay(name, distribute_tensor(x, mesh, [Shard(0)]).to_local())
            form = {"shape": x.shape, "stride": x.stride(), "run_check": False}
            found[name] = DTensor.from_local(rows, mesh, [Shard(0)], **form)
    return found


def trained_on_shards(make: Any, lay: Lay, mesh: Any) -> Numbers:
    params = {name: nn.Parameter(x) for name, x in divided(lay, numbers(99), mesh).items()}
    opt = fn.Optimizer(params.values(), make, lr=0.01)
    for step in range(3):
        for name, g in divided(lay, gradients(step), mesh).items():
            params[name].grad = g
        opt.step()
    return copies({name: p.full_tensor() for name, p in params.items()})


def compressed_by_fsdp(memory_format: torch.memory_format, mesh: Any) -> Numbers:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 2), nn.Conv2d(4, 3, 2))
    fully_shard(net, mesh=mesh)
    compress(net, fn.int8(), fn.damped())
    images = torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(dist.get_rank()))
    for _ in range(2):
        net.zero_grad()
        net(images.contiguous(memory_format=memory_format)).square().mean().backward()
    return copies({name: p.grad.full_tensor() for name, p in net.named_parameters()})


@quietly
def on_shards() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    found: dict[str, Any] = {
        name: apart(trained_on_shards(make, strided, mesh), trained_on_shards(make, row_major, mesh))
        for name, make in {"adamw": fn.adamw, "muon": fn.muon}.items()
    }
    of_formats = [compressed_by_fsdp(x, mesh) for x in (torch.channels_last, torch.contiguous_format)]
    found["gradients"] = apart(*of_formats)
    with pytest.raises(NotImplementedError, match="FSDP does not support non-contiguous parameters"):
        fully_shard(nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), mesh=mesh)
    return found


def test_shards_of_any_format_take_the_steps_of_row_major_ones():
    for found in case.answer("on_shards"):
        assert found == {"adamw": {}, "muon": {}, "gradients": {}}
