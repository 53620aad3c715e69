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
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fn
import fn.adapters
import fn.adapters.checkpoint
import fn.adapters.ddp
import fn.contrib
import fn.kernels
import fn.testing
from fn import Transform, tree

SGD = fn.scale_by_learning_rate(0.1)
ADAM = fn.scale_by_adam()
MEAN = fn.compressed_average("data", fn.identity(), fn.off())
NO_CALL = "no arguments of its own"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def optimizer() -> fn.Optimizer:
    return fn.Optimizer(net().parameters(), fn.adamw, lr=0.1)


def linear(updates: Any, state: Any, params: Any) -> Any:
    return updates, state


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


def cases() -> Iterator[tuple[str, str, Any]]:
    for name, valid in VALID.items():
        f = eval(name, {"fn": fn})
        hints = typing.get_type_hints(f.__init__ if isinstance(f, type) else f)
        for argument, parameter in inspect.signature(f).parameters.items():
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or argument not in hints:
                continue
            for value in wrong(kinds_of(hints[argument])):
                yield name, argument, value


def fault(name: str, argument: str, value: Any) -> str:
    f = eval(name, {"fn": fn})
    try:
        f(**{**VALID[name](), argument: value})
    except (TypeError, ValueError) as error:
        text = str(error)
        return "" if argument in text.split(":")[0] else f"{type(error).__name__}: {text[:90]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:90]}"
    return "taken"


if __name__ == "__main__":
    import collections as c, warnings
    warnings.simplefilter("ignore")
    count = c.Counter(); n = 0
    for name, valid in VALID.items():
        try: eval(name)(**valid())
        except Exception as e: print("INVALID", name, type(e), e)
    for name, argument, value in cases():
        n += 1
        if what := fault(name, argument, value):
            count[name] += 1
            print(name, argument, repr(value)[:30].replace("\n"," "), "->", what)
    print(n, sum(count.values()))
