"""Param groups of torch, as transforms read them: parameters, a learning rate, and hyper-parameters.

`make(lr=..., **hyper_parameters)` is called once for a group. The learning rate is a 0-d tensor, which is filled in
place. The other numbers stand in the group, b1 and b2 as torch's `betas`; where one differs from what the transform was
made with, `make` is called anew with the entries that its signature names, and the state is kept.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fn.adapters.optim.shards import pieces
from fn.arguments import check_kind
from fn.base import Transform
from fn.errors import expected
from fn.inplace.memory import is_folded, overlaps

Arguments = Mapping[str, inspect.Parameter]

OF_TORCH = frozenset(
    ["params", "lr", "param_names", "name", "initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"]
)
"""Entries of a group that `make` is not given: those of torch itself and of its schedulers."""


def as_list(params: Any) -> list[Any]:
    """Return the params of an optimizer as a list, and generators in its param groups as lists: all are read twice.

    Raises: TypeError if it is no iterable, or has no order.
    """
    if isinstance(params, Tensor | torch.nn.Module):
        wanted = "an iterable of tensors, of (name, tensor) pairs or of param groups"
        cure = "put it into a list" if isinstance(params, Tensor) else "pass model.parameters()"
        raise TypeError(expected("params", wanted, "a tensor" if isinstance(params, Tensor) else "a module", cure))
    if isinstance(params, set | frozenset):
        got = "a set, whose order differs from rank to rank"
        raise TypeError(expected("params", "a list, or another iterable with an order", got))
    check_kind("params", params, Iterable, "an iterable of tensors, of (name, tensor) pairs or of param groups")
    listed = []
    for entry in params:
        is_group = isinstance(entry, dict) and not isinstance(entry.get("params", ()), Tensor) and "params" in entry
        listed.append({**entry, "params": as_list(entry["params"])} if is_group else entry)
    return listed


def groups_of(listed: list[Any]) -> list[dict[str, Any]]:
    """Return the list of `as_list` as param groups, each with a list of parameters."""
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    members = [group.get("params", ()) for group in groups]
    lists = [[params] if isinstance(params, Tensor) else [*params] for params in members]
    return [{**group, "params": params} for group, params in zip(groups, lists, strict=True)]


def names_of(group: Mapping[str, Any]) -> list[str]:
    """Return the names of a group's parameters; their numbers, where they have none."""
    return group.get("param_names") or [str(i) for i in range(len(group["params"]))]


def check_make(make: Any, example: str = "partial(fn.onebit_adam, axis='data')") -> Callable[..., Transform]:
    """Return `make` unchanged if it can make transforms. example: of one, for the message.

    Raises: TypeError if it is no function, or a partial with arguments that its function does not take; ValueError if
        it holds a learning rate, which nobody would use.
    """
    function, wanted = getattr(make, "func", make), f"a function that makes a transform, such as {example}"
    if isinstance(function, Transform):
        cure = "give the function itself, which is called for each param group with its learning rate"
        raise TypeError(expected("make", wanted, "a transform that is made already", cure))
    kind = function if isinstance(function, type) else type(function)
    if issubclass(kind, torch.optim.Optimizer):
        cure = "any optimizer of torch goes with fn.adapters.ddp.average_gradients, which averages gradients in codes"
        raise TypeError(expected("make", wanted, f"{kind.__name__}, an optimizer of torch", cure))
    if not callable(make):
        raise TypeError(expected("make", wanted, type(make).__name__))
    if isinstance(make, partial):
        check_known(make.keywords, make.func)
        if "lr" in make.keywords:
            cure = "pass it to fn.Optimizer(..., lr=...) or in a param group, where schedulers change it"
            raise ValueError(expected("lr", "make to leave it open", f"{make.keywords['lr']}", cure))
    checked: Callable[..., Transform] = make
    return checked


def check_known(given: Mapping[str, Any], make: Callable[..., Any]) -> None:
    """Refuse entries that `make` does not take, with a TypeError that names them all and what it takes."""
    names = arguments_of(make)
    unknown = [] if takes_any(names) else [name for name in given if name not in names]
    if unknown:
        called = getattr(getattr(make, "func", make), "__name__", "make")
        some = f"is not an argument of {called}" if len(unknown) == 1 else f"are no arguments of {called}"
        raise TypeError(
            f"{', '.join(unknown)}: {some}, which takes {', '.join(n for n in names if n != 'lr')}; leave out what it "
            "does not take, such as the flags in groups of a torch.optim optimizer"
        )


def arguments_of(make: Callable[..., Any]) -> Arguments:
    """Return the arguments of a function by name."""
    return inspect.signature(make).parameters


def takes_any(arguments: Arguments) -> bool:
    """Return whether a function takes arguments by any name."""
    return any(p.kind is inspect.Parameter.VAR_KEYWORD for p in arguments.values())


def spell_betas(given: dict[str, Any], arguments: Arguments, defaults: Mapping[str, Any] | None = None) -> None:
    """Write b1 and b2 as torch's `betas`, which its schedulers look for, where `make` takes the one or the other.

    Args: given: entries of a group, or its defaults. arguments: of `make`. defaults: whose betas stand for what is not
        given.
    """
    if "betas" in arguments and isinstance(arguments["betas"].default, tuple):
        given.setdefault("betas", (defaults or {}).get("betas", arguments["betas"].default))
    elif {"b1", "b2"} <= arguments.keys() and "betas" not in given:
        known = (defaults or {}).get("betas")
        pair = [arguments[name].default for name in ("b1", "b2")] if known is None else _pair(known)
        betas = tuple(given.pop(name, other) for name, other in zip(("b1", "b2"), pair, strict=True))
        if inspect.Parameter.empty not in betas:
            given["betas"] = betas


def show_defaults(group: dict[str, Any], make: Callable[..., Any]) -> None:
    """Write the numbers that `make` has by default into a group, where one may change them.

    Raises: TypeError if `make` takes no learning rate, or not what the group holds.
    """
    names = arguments_of(make)
    if "lr" not in names and not takes_any(names):
        cure = "give one that does: lambda lr: fn.chain(..., fn.scale_by_learning_rate(lr))"
        called = getattr(getattr(make, "func", make), "__name__", "make")
        got = f"{called}, which takes {', '.join(names) or 'nothing'}"
        raise TypeError(expected("make", "a function that takes lr", got, cure))
    given = hyper_parameters(group, names)
    check_known(given, make)
    for name, argument in names.items():
        if isinstance(argument.default, int | float) and name not in {*given, "lr"}:
            group[name] = argument.default


def hyper_parameters(group: Mapping[str, Any], arguments: Arguments) -> dict[str, Any]:
    """Return the entries of a group that `make`, with these arguments, is called with, the learning rate aside.

    Raises: TypeError for betas in both spellings; ValueError for betas that are no pair.
    """
    given = {name: x for name, x in group.items() if name not in OF_TORCH}
    if "betas" in given and "betas" not in arguments and {"b1", "b2"} <= arguments.keys():
        betas, twice = given.pop("betas"), ", ".join(sorted(given.keys() & {"b1", "b2"}))
        if twice:
            raise TypeError(expected("betas", "one of the two spellings in a param group", f"betas and {twice}"))
        given["b1"], given["b2"] = _pair(betas)
    return given


def _pair(betas: Any) -> Any:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(expected("betas", "a pair, (b1, b2)", f"{betas!r}"))
    return betas


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Tell whether hyper-parameters are the same; tensors only if they are the same object."""

    def equal(x: Any, y: Any) -> bool:
        # Tensors are not compared by value: on a device that would be a wait in each step.
        return x is y or (not isinstance(x, Tensor) and not isinstance(y, Tensor) and bool(x == y))

    return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)


def new_rate(group: dict[str, Any]) -> Tensor:
    """Return a group's learning rate as a new 0-d tensor, which takes the place of a tensor in the group.

    As with torch's optimizers a number stays a number there. Raises: ValueError if it is none, or negative.
    """
    given = group["lr"]
    # A rate of float32 would round what parameters of float64 are stepped by.
    number, wide = checked_rate(given, 0.0), any(p.dtype == torch.float64 for p in group["params"])
    device = given.device if isinstance(given, Tensor) else "cpu"
    rate = torch.tensor(number, dtype=torch.float64 if wide else torch.float32, device=device)
    group["lr"] = rate if isinstance(given, Tensor) else number
    return rate


def follow_rate(group: dict[str, Any], rate: Tensor) -> None:
    """Fill a learning rate with the number in the group.

    Raises: ValueError if that is no rate; nothing is written then.
    """
    given = group.get("lr")
    if given is rate and rate.device.type != "cpu":  # nobody waits for a device here
        return
    number = checked_rate(given)
    if given is not rate:
        # In place: the transform was made with this tensor, so a step reads the new number.
        rate.fill_(number)
        group["lr"] = rate if isinstance(given, Tensor) else given


def checked_rate(given: Any, least: float = -1e-10) -> float:
    """Return a learning rate as a number; by default also one that `LinearLR` has rounded below 0.

    Raises: ValueError if it is no finite number of at least that.
    """
    real = isinstance(given, numbers.Real) or (isinstance(given, Tensor) and not given.ndim and not given.is_complex())
    number = float(given) if real else math.nan
    if not least <= number < math.inf:
        got = f"{given}" if isinstance(given, Tensor) and not given.ndim else repr(given)
        raise ValueError(expected("lr", "a finite number or a 0-d tensor, of at least 0", got))
    return number


def check_params(groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse parameters that a step cannot write, or would write twice, with a ValueError that names them."""
    for g, group in enumerate(groups):
        check_writable(group, g)
    named = [(f"{name} of group {g}", p) for g, group in enumerate(groups) for name, p in _pieces_of(group)]
    shared = next(overlaps([p for _, p in named]), None)
    if shared is not None:
        first, second = (f"parameter {named[i][0]}" for i in shared)
        raise ValueError(
            f"params: expected each parameter to have memory of its own, but {second} shares memory with {first}; "
            f"clone one of them, or make them one torch.nn.Parameter, which modules may share"
        )


def check_writable(group: Mapping[str, Any], g: int) -> None:
    """Refuse parameters of a group that no step can write with a ValueError that names the first. g: its number."""
    params = pieces(group["params"])
    if all(map(Tensor.is_contiguous, params)) and not any(p.is_inference() or p.is_meta for p in params):
        return  # a step looks at many
    for i, (name, p) in enumerate(_pieces_of(group)):
        if p.is_meta:
            raise ValueError(
                f"params: parameter {i} is on the meta device, which holds no numbers, and module.to_empty(device=...) "
                "makes other parameters of it; make the optimizer after that"
            )
        if is_folded(p):
            raise ValueError(
                f"params: expected elements of their own, but those of parameter {name} of group {g}, of the shape "
                f"{tuple(p.shape)} and the strides {p.stride()}, share memory, as expand makes them; clone it"
            )
        if p.is_inference():
            raise ValueError(
                f"params: expected tensors that can be written, but parameter {name} of group {g} was made under "
                f"torch.inference_mode(); make it outside, or clone it there"
            )


def _pieces_of(group: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    return [*zip(names_of(group), pieces(group["params"]), strict=True)]
