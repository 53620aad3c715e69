"""What each argument of a public name takes, by its annotation; what is of another kind is refused by its name.

A row of `VALID` has arguments with which the name can be called. Each is replaced in turn by values of other kinds. A
public name without a row fails.
"""

from __future__ import annotations

import collections.abc
import enum
import inspect
import math
import types
import typing
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import fn
import fn.adapters
import fn.adapters.checkpoint
import fn.adapters.ddp
import fn.adapters.deepspeed
import fn.adapters.drift
import fn.adapters.follow
import fn.adapters.fsdp
import fn.adapters.torchft
import fn.adapters.trainers.accelerate
import fn.adapters.trainers.hf
import fn.adapters.trainers.lightning
import fn.contrib
import fn.contrib.metrics
import fn.kernels
import fn.testing
import fn.testing.world

SGD = fn.scale_by_learning_rate(0.1)
ADAM = fn.scale_by_adam()
MEAN = fn.compressed_average("data", fn.identity(), fn.off())


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def optimizer() -> fn.Optimizer:
    return fn.Optimizer(net().parameters(), fn.adamw, lr=0.1)


def linear(updates: Any, state: Any, params: Any) -> Any:
    return updates, state


def wrapped() -> nn.Module:
    """Return a stand-in of a model in DDP: nothing may be done to it before the other arguments are looked at."""
    model = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(model)
    model.module = net()
    return model


def stepped() -> torch.optim.Optimizer:
    model = net()
    model(torch.ones(1, 2)).sum().backward()
    adamw = torch.optim.AdamW(model.parameters())
    adamw.step()
    return adamw


def called(f: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Call a function; enter and leave what it returns, where that is a context."""
    made = f(**arguments)
    if isinstance(made, AbstractContextManager):
        with made:
            pass


CPU = fn.kernels.Accelerator("cpu", {"pack_bits": fn.kernels.reference.codes.pack_bits})
ROW = fn.kernels.Accelerator("nothing", {})
RULE = fn.contrib.norm_rule(3.0, 0.1, 2, None, None)
CODES = {"codec": fn.int8(), "feedback": fn.off()}
HOPS = {"local_axis": "local", "node_axis": "node"}
ONEBIT = {"optimizer": {"type": "OneBitAdam", "params": {"lr": 0.1}}}
AXIS: dict[str, Any] = {"axis": "data"}
X = {"x": torch.ones(4)}
VALID: dict[str, Callable[[], dict[str, Any]]] = {
    "fn.Optimizer": lambda: {"params": [nn.Parameter(torch.ones(2))], "make": fn.adamw},
    "fn.adamw": dict,
    "fn.add_decayed_weights": lambda: {"weight_decay": 0.1},
    "fn.all_gather": lambda: {**X, **AXIS},
    "fn.all_to_all": lambda: {"x": torch.ones(1, 2), **AXIS},
    "fn.average": lambda: AXIS,
    "fn.average_params": lambda: {"inner": SGD, "sync": MEAN},
    "fn.axis_index": lambda: AXIS,
    "fn.axis_size": lambda: AXIS,
    "fn.ballots": dict,
    "fn.bins": dict,
    "fn.classic": dict,
    "fn.clip_by_global_norm": lambda: {"max_norm": 1.0},
    "fn.compressed_average": lambda: {**AXIS, "codec": fn.int8()},
    "fn.damped": dict,
    "fn.dct": lambda: {"tile": 4},
    "fn.decayed": lambda: {"keep": 0.9},
    "fn.diloco": lambda: AXIS,
    "fn.dion": lambda: AXIS,
    "fn.donate": lambda: {"update": SGD.warmup_update},
    "fn.e3m0": dict,
    "fn.every": lambda: {"h": 4},
    "fn.every_seconds": lambda: {"seconds": 3.0},
    "fn.flatten_parameters": lambda: {"module_or_params": net()},
    "fn.fp8": dict,
    "fn.freeze_after": lambda: {"steps": 3},
    "fn.freeze_when_stable": dict,
    "fn.identity": dict,
    "fn.in_basis": lambda: {"basis": fn.tiles(4), "sync": MEAN},
    "fn.int4": dict,
    "fn.int8": dict,
    "fn.labels_of": lambda: {"model": net()},
    "fn.lamb": dict,
    "fn.late": lambda: {"tx": fn.chain(fn.average("data"), SGD)},
    "fn.lift": lambda: {"init": lambda params: (), "update": linear},
    "fn.lion_vote": lambda: AXIS,
    "fn.local_momentum": lambda: {"eta": 0.9},
    "fn.local_sgd": lambda: AXIS,
    "fn.loco_adamw": lambda: AXIS,
    "fn.low_rank_average": lambda: {**AXIS, "rank": 4},
    "fn.mask": lambda: {"inner": SGD, "mask": [True]},
    "fn.muloco": lambda: AXIS,
    "fn.muon": dict,
    "fn.normuon": dict,
    "fn.onebit_adam": lambda: AXIS,
    "fn.onebit_lamb": lambda: AXIS,
    "fn.orthogonalize": dict,
    "fn.outer": lambda: {"inner": SGD, "outer_tx": SGD, "sync": MEAN},
    "fn.owned": lambda: {"inner": ADAM, **AXIS},
    "fn.partition": lambda: {"transforms": {"a": SGD}, "labels": ["a"]},
    "fn.periodic": lambda: {"period": 2},
    "fn.permute": lambda: {**X, **AXIS, "perm": [0]},
    "fn.pmean": lambda: {**X, **AXIS},
    "fn.powersgd_adamw": lambda: AXIS,
    "fn.psum": lambda: {**X, **AXIS},
    "fn.rotated": lambda: {"codec": fn.int8()},
    "fn.scale": lambda: {"x": 2.0},
    "fn.scale_by_adam": dict,
    "fn.scale_by_learning_rate": lambda: {"lr": 0.1},
    "fn.scale_by_lion": dict,
    "fn.scale_by_muon": dict,
    "fn.scale_by_neuron_norm": dict,
    "fn.scale_by_onebit_adam": lambda: {"sync": MEAN},
    "fn.scale_by_onebit_lamb": lambda: {"sync": MEAN},
    "fn.scale_by_sign": dict,
    "fn.scale_by_trust_ratio": dict,
    "fn.scale_by_zero_one_adam": lambda: {"lr": 0.1, "sync": MEAN},
    "fn.sharded": lambda: {"inner": fn.adamw(0.1), **AXIS},
    "fn.sharded_onebit_adam": lambda: AXIS,
    "fn.sign": dict,
    "fn.sign_muon": lambda: AXIS,
    "fn.simulate": lambda: {"f": lambda x: x, **AXIS, "size": 2},
    "fn.skip_nonfinite": lambda: {"inner": SGD},
    "fn.sparse_loco": lambda: AXIS,
    "fn.stateless": lambda: {"f": lambda updates, params: updates},
    "fn.tiles": lambda: {"tile": 4},
    "fn.top_k": lambda: {"k": 2},
    "fn.trace": lambda: {"decay": 0.9},
    "fn.unfrozen": lambda: {"inner": fn.average("data")},
    "fn.unsharded": lambda: {"inner": ADAM, "shards": "shard"},
    "fn.zero_one_adam": lambda: AXIS,
    "fn.zero_one_schedule": dict,
    "fn.all_gather_shards": lambda: {"shard": torch.ones(4), "error": (), **AXIS, **CODES},
    "fn.apply_updates": lambda: {"params": torch.ones(2), "updates": torch.ones(2)},
    "fn.bind": lambda: {"mesh": {}},
    "fn.recorded": lambda: {"binding": fn.bind({}), "sink": lambda step, records: None},
    "fn.replayed": lambda: {"axes": {"data": 2}, "source": lambda step: ()},
    "fn.chain": dict,
    "fn.differences": dict,
    "fn.ledger": dict,
    "fn.off": dict,
    "fn.rank_dims": lambda: {"state": ()},
    "fn.reduce_scatter_mean": lambda: {"x": torch.ones(4), "error": (), **AXIS, **CODES},
    "fn.running_sum": dict,
    "fn.scale_by_shape": dict,
    "fn.contrib.demo": lambda: AXIS,
    "fn.contrib.des_loc": lambda: AXIS,
    "fn.contrib.dion2": dict,
    "fn.contrib.ef21_muon": lambda: AXIS,
    "fn.contrib.ef21_sgdm": lambda: AXIS,
    "fn.contrib.guarded": lambda: {"sync": MEAN, "guard": RULE},
    "fn.contrib.in_blocks": lambda: {"inner": ADAM, "blocks": 2},
    "fn.contrib.lion_muon": dict,
    "fn.contrib.metrics.watch": lambda: {"optimizer": optimizer(), "callback": print},
    "fn.contrib.muon_bp": lambda: {"blocks": 2},
    "fn.contrib.nanochat": dict,
    "fn.contrib.no_loco": lambda: AXIS,
    "fn.contrib.norm_guard": lambda: {"sync": MEAN},
    "fn.contrib.norm_rule": lambda: {"threshold": 3.0, "alpha": 0.1, "warmup": 2, "far": None, "temperature": None},
    "fn.contrib.own_anchors": lambda: {
        "average": fn.average("data"),
        "inner": SGD,
        "outer_tx": SGD,
        "sync": fn.contrib.pair_average("data"),
    },
    "fn.contrib.pair_average": lambda: AXIS,
    "fn.contrib.periods": lambda: {"params": 2, "first_moment": 4, "second_moment": 8},
    "fn.contrib.primal_average": lambda: {"inner": fn.chain(ADAM, SGD)},
    "fn.contrib.primal_params": lambda: {"state": (), "params": torch.ones(1)},
    "fn.contrib.random_pairs": lambda: {"turn": 0, "ranks": 4},
    "fn.contrib.scale_by_dion2": lambda: {"axis": None},
    "fn.contrib.scale_by_nanochat": dict,
    "fn.contrib.signum_vote": lambda: AXIS,
    "fn.contrib.sparse_average": lambda: {**AXIS, "density": 0.5},
    "fn.contrib.sparta": lambda: AXIS,
    "fn.adapters.agreed_params": lambda: {"optimizer": optimizer()},
    "fn.adapters.from_adamw": lambda: {"adamw": stepped(), "optimizer": optimizer()},
    "fn.adapters.from_muon": lambda: {"muon": stepped(), "optimizer": optimizer()},
    "fn.adapters.torch_optimizer": lambda: {"make": fn.adamw},
    "fn.adapters.checkpoint.gather": lambda: {"optimizer": optimizer()},
    "fn.adapters.checkpoint.load": lambda: {"folder": "nowhere", "optimizer": optimizer()},
    "fn.adapters.checkpoint.save": lambda: {"folder": "/dev/null/x", "optimizer": optimizer()},
    "fn.adapters.checkpoint.save_async": lambda: {"folder": "/dev/null/x", "optimizer": optimizer()},
    "fn.adapters.ddp.average_gradients": lambda: {"model": wrapped(), "codec": fn.int8()},
    "fn.adapters.ddp.bucketed": lambda: {"params": [*net().parameters()]},
    "fn.adapters.ddp.close": lambda: {"optimizer": optimizer()},
    "fn.adapters.ddp.keep_local": lambda: {"model": wrapped()},
    "fn.adapters.ddp.optimizer": lambda: {"model": net(), "make": fn.onebit_adam},
    "fn.adapters.ddp.overlap": lambda: {"model": net(), "optimizer": optimizer()},
    "fn.adapters.deepspeed.OnebitAdam": lambda: {"params": [nn.Parameter(torch.ones(2))]},
    "fn.adapters.deepspeed.OnebitLamb": lambda: {"params": [nn.Parameter(torch.ones(2))]},
    "fn.adapters.deepspeed.ZeroOneAdam": lambda: {"params": [nn.Parameter(torch.ones(2))]},
    "fn.adapters.deepspeed.from_config": lambda: {"params": [nn.Parameter(torch.ones(2))], "config": ONEBIT},
    "fn.adapters.deepspeed.loco_quant_reduce": lambda: {"tensors": [torch.ones(8)], **HOPS},
    "fn.adapters.deepspeed.quant_reduce": lambda: {"tensors": [torch.ones(8)], **HOPS},
    "fn.adapters.drift.check_drift": lambda: {"optimizer": optimizer(), "every": 2},
    "fn.adapters.follow.Follower": lambda: {"source": "nowhere", "model": net(), "make": fn.adamw},
    "fn.adapters.follow.publish": lambda: {"optimizer": optimizer(), "folder": "/dev/null/x"},
    "fn.adapters.fsdp.compress": lambda: {"module": net()},
    "fn.adapters.torchft.optimizer": lambda: {
        "params": [nn.Parameter(torch.ones(2))],
        "make": fn.diloco,
        "manager": mock.Mock(),
        "schedule": fn.every(2),
    },
    "fn.adapters.torchft.connect": lambda: {"schedule": fn.every(2), "lighthouse": "nowhere:1", "pg": mock.Mock()},
    "fn.adapters.trainers.hf.factory": lambda: {"make": fn.muloco, "lr": 0.1},
    "fn.adapters.trainers.lightning.optimizer": lambda: {"module": net(), "make": fn.muon, "lr": 0.1},
    "fn.kernels.communication_backend": dict,
    "fn.kernels.compressed_transport": dict,
    "fn.kernels.device_name": dict,
    "fn.kernels.get_accelerator": dict,
    "fn.kernels.on_accelerator": lambda: {"x": ()},
    "fn.kernels.pin_memory": lambda: X,
    "fn.kernels.register": lambda: {"row": ROW},
    "fn.kernels.set_accelerator": lambda: {"device": None},
    "fn.kernels.set_communication_backend": lambda: {"device_type": "nothing", "backend": None},
    "fn.kernels.table": dict,
    "fn.kernels.unregister": lambda: {"row": ROW},
    "fn.testing.check_codec": lambda: {"codec": fn.int8()},
    "fn.testing.check_transform": lambda: {"tx": SGD, "params": torch.ones(2), "schedule": fn.freeze_after(1)},
    "fn.testing.conformance": lambda: {"row": CPU, "ops": ("pack_bits",), "sizes": (8,)},
    "fn.testing.world.drawn": lambda: {"seed": 1},
    "fn.testing.world.run": lambda: {"plan": fn.testing.world.drawn(2)._replace(events=())},
    "fn.testing.world.shrunk": lambda: {
        "result": fn.testing.world.Result(fn.testing.world.drawn(2)._replace(events=()), "", [], 0, 0, 0, 0.0, 0.0)
    },
    "fn.testing.train": lambda: {"tx": fn.chain(fn.average("data"), SGD), "schedule": fn.freeze_after(1)},
}


def kinds_of(annotation: Any) -> set[Any]:
    """Return what an annotation allows: "any", or a set of classes, literals and None."""
    if annotation in (Any, inspect.Parameter.empty) or isinstance(annotation, typing.TypeVar | str):
        return {"any"}
    if annotation is None or annotation is type(None):
        return {None}
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return set().union(*map(kinds_of, typing.get_args(annotation)))
    if origin is typing.Literal:
        return {("one of", *typing.get_args(annotation))}
    if origin is not None:
        return {origin}
    return {annotation}


class Stranger:
    """What no argument takes."""

    def __repr__(self) -> str:
        return "a stranger"


def wrong(kinds: set[Any]) -> Iterator[Any]:
    """Yield values of other kinds."""
    if "any" in kinds:
        return
    abstract = {k for k in kinds if isinstance(k, type)}
    numbers = abstract & {int, float}
    literal = any(isinstance(k, tuple) for k in kinds)
    yield Stranger()
    if None not in kinds:
        yield None
    if str not in abstract:
        yield "no such thing"
    if not abstract & {list, collections.abc.Sequence, collections.abc.Iterable}:
        yield [1.5]
    if float not in abstract:
        yield 1.5
    if not numbers:
        yield -1
    if numbers and not literal:
        yield math.nan
    if Tensor not in abstract:
        yield torch.ones(2)
    if bool not in abstract and not numbers:
        yield True
    if bool in abstract:
        yield 1


NOT_CALLED = {
    "fn.Ledger": "made by fn.ledger",
    "fn.adapters.follow.Publication": "made by publish",
    "fn.adapters.fsdp.Compressed": "made by compress",
    "fn.adapters.trainers.accelerate.LocalSGD": "arguments of accelerate's class",
    "fn.adapters.trainers.accelerate.prepare": "arguments of accelerate's",
    "fn.adapters.trainers.hf.Callback": "a Trainer of transformers",
    "fn.adapters.trainers.hf.average_gradients": "a Trainer of transformers",
    "fn.adapters.trainers.lightning.FnStrategy": "arguments of Lightning's class",
    "fn.contrib.metrics.Watch": "made by watch",
}
"""Public names whose arguments other libraries judge."""

FAILS_LATER = {
    "fn.contrib.primal_params": ValueError,  # a state of primal_average
    "fn.adapters.from_adamw": ValueError,  # params of another model
    "fn.adapters.from_muon": ValueError,  # AdamW's state
    "fn.adapters.checkpoint.load": FileNotFoundError,
    "fn.adapters.checkpoint.save": OSError,
    "fn.adapters.ddp.average_gradients": AttributeError,  # a stand-in of DDP
    "fn.adapters.ddp.keep_local": AttributeError,
    "fn.adapters.ddp.overlap": ValueError,  # params of another model
    "fn.adapters.follow.Follower": FileNotFoundError,
    "fn.adapters.follow.publish": ValueError,  # of one rank nothing travels
    "fn.adapters.fsdp.compress": ValueError,  # no FSDPModule
    "fn.adapters.torchft.connect": Exception,  # no lighthouse
}
"""Rows whose arguments are of the right kinds, and go wrong behind that, for there is no job here to call them in."""

MODULES = [
    fn, fn.contrib, fn.contrib.metrics, fn.adapters, fn.adapters.checkpoint, fn.adapters.ddp, fn.adapters.deepspeed,
    fn.adapters.drift, fn.adapters.follow, fn.adapters.fsdp, fn.adapters.torchft, fn.adapters.trainers.accelerate,
    fn.adapters.trainers.hf, fn.adapters.trainers.lightning, fn.kernels, fn.testing,
    fn.testing.world,
]  # fmt: skip


def is_data(x: Any) -> bool:
    """Tell whether a name is a record, or a class that is raised or counted up: what uses it judges its fields."""
    is_record = isinstance(x, type) and (issubclass(x, BaseException | enum.Enum) or hasattr(x, "_fields"))
    return is_record or getattr(x, "_is_protocol", False)


def public() -> dict[str, Any]:
    found = {}
    for module in MODULES:
        own = [n for n, x in vars(module).items() if n[0] != "_" and getattr(x, "__module__", "") == module.__name__]
        for name in getattr(module, "__all__", own):
            if callable(x := getattr(module, name)) and not is_data(x):
                found[f"{module.__name__}.{name}"] = x
    return found


PUBLIC = public()


def arguments_of(name: str) -> Iterator[tuple[str, Any]]:
    """Yield the arguments of a public name with their annotations."""
    f = PUBLIC[name]
    hints = typing.get_type_hints(f.__init__ if isinstance(f, type) else f)
    for argument, parameter in inspect.signature(f).parameters.items():
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) and argument in hints:
            yield argument, hints[argument]


def fault(name: str, argument: str, value: Any) -> str:
    """Return what is wrong with the way in which an argument is refused; "" for nothing."""
    arguments = VALID[name]()
    params = arguments["optimizer"].param_groups[0]["params"] if "optimizer" in arguments else []
    before = [p.detach().clone() for p in params]
    try:
        with fn.ledger() as sent:
            called(PUBLIC[name], {**arguments, argument: value})
    except (TypeError, ValueError) as error:
        text = str(error)
        said = "" if argument in text.partition(":")[0] else f"{type(error).__name__}: {text}"
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    else:
        said = "taken"
    return said or ("" if sent.total == 0 and all(map(torch.equal, params, before)) else "something has changed")


def test_every_public_name_has_a_row():
    assert PUBLIC.keys() == VALID.keys() | NOT_CALLED.keys()


@pytest.mark.parametrize("name", VALID)
@pytest.mark.filterwarnings("ignore")
def test_other_kinds_are_refused_by_the_name_of_the_argument(name):
    with suppress(FAILS_LATER.get(name, ())):  # anything else is raised: these arguments are of the right kinds
        called(PUBLIC[name], VALID[name]())
    tried = [(argument, value) for argument, hint in arguments_of(name) for value in wrong(kinds_of(hint))]
    faults = {f"{argument}={value!r}": said for argument, value in tried if (said := fault(name, argument, value))}
    assert faults == {}


def test_the_kinds_of_annotations_and_what_is_of_another_kind():
    """The table is made from annotations: this is what it makes of some."""
    assert kinds_of(typing.get_type_hints(fn.every)["h"]) == {int}
    assert kinds_of(typing.get_type_hints(fn.muon)["shards"]) == {fn.Shards, str, None}
    tried = {str(value) for value in wrong({int})}
    assert tried == {"a stranger", "None", "no such thing", "[1.5]", "1.5", "nan", "tensor([1., 1.])"}
    assert -1 in [*wrong({str})]
    assert [*wrong({"any"})] == []


@pytest.mark.parametrize(
    "given", [{"splits": {"0.weight": 2}}, {"splits": {3: [1, 1]}}, {"num_heads": {"0.weight": [2]}}, {"heads": [3]}]
)
def test_what_is_inside_of_a_mapping_or_an_iterable_is_looked_at_too(given):
    with pytest.raises((TypeError, ValueError), match=f"^{next(iter(given))}: expected"):
        fn.labels_of(net(), **given)


@pytest.mark.parametrize("value", [True, -1, "engine", torch.ones(()), int])
@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("fn.adapters.deepspeed.OnebitAdam", "deepspeed"),
        ("fn.adapters.torchft.optimizer", "manager"),
        ("fn.adapters.agreed_params", "model"),
    ],
)
def test_what_is_no_object_of_another_library_is_refused_by_name(name, argument, value):
    assert fault(name, argument, value) == ""


@pytest.mark.parametrize("momentum", [-1, 1.0, 2.0, True, torch.tensor(-1.0)])
@pytest.mark.parametrize("make", [fn.muon, fn.contrib.muon_bp, fn.contrib.nanochat])
def test_a_momentum_out_of_range_is_refused_by_the_name_that_it_has_there(make, momentum):
    with pytest.raises(ValueError, match=r"^momentum: expected a number in \[0, 1\)"):
        make(axis="data", momentum=momentum)


@pytest.mark.parametrize("link", [None, 3, "adamw", fn.adamw, [SGD], torch.ones(2)])
def test_what_is_no_link_is_refused_by_its_place(link):
    with pytest.raises(TypeError, match=r"links\[1\]|link 1"):
        fn.chain(SGD, link)
