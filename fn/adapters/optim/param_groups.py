"""What a param group of torch holds for a transform: parameters, a learning rate, and hyper-parameters.

`make(lr=..., **hyper_parameters)` is called once per group. The numbers that it is called with stand in the group, as
with torch's optimizers, b1 and b2 as the pair `betas`. What somebody writes there takes effect in the next step: see
`training.Training.follow_groups`.
"""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch
from torch import Tensor

from fn.base import Transform, check_is_transform
from fn.errors import expected
from fn.inplace.memory import is_folded, overlaps
from fn.schedules import Schedule, phase_of, phases_of


def as_list(params: Any) -> list[Any]:
    """Return what an optimizer was given as a list, and generators in param groups as lists: all is read twice.

    Raises: TypeError if it is no iterable, or has no order.
    """
    if isinstance(params, Tensor | torch.nn.Module):
        wanted = "an iterable of tensors, of (name, tensor) pairs or of param groups"
        if isinstance(params, Tensor):
            raise TypeError(expected("params", wanted, "a tensor", "put it into a list"))
        raise TypeError(expected("params", wanted, "a module", "pass model.parameters()"))
    if isinstance(params, set | frozenset):
        got = "a set, whose order differs from rank to rank"
        raise TypeError(expected("params", "a list, or another iterable with an order", got))
    return [_listed(entry) if isinstance(entry, dict) else entry for entry in params]


def groups_of(listed: list[Any]) -> list[dict[str, Any]]:
    """Return what `as_list` returned as param groups, of which each has a list of parameters."""
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    members = [group.get("params", ()) for group in groups]
    lists = [[params] if isinstance(params, Tensor) else [*params] for params in members]
    return [{**group, "params": params} for group, params in zip(groups, lists, strict=True)]


def names_of(group: Mapping[str, Any]) -> list[str]:
    """Return the names of a group's parameters; their numbers, where they have none."""
    return group.get("param_names") or [str(i) for i in range(len(group["params"]))]


def _listed(group: dict[str, Any]) -> dict[str, Any]:
    params = group.get("params", ())
    return group if isinstance(params, Tensor) or "params" not in group else {**group, "params": as_list(params)}


def check_schedule(schedule: Schedule) -> Schedule:
    """Return a schedule as it is. Raises TypeError if it is no function, ValueError if it gives no phase."""
    _check_callable("schedule", schedule, "fn.freeze_after(1000)")
    phase_of(schedule, 0)
    return schedule


def _check_callable(argument: str, value: Callable[..., Any], example: str) -> None:
    if not callable(value):
        raise TypeError(expected(argument, f"a function, such as {example}", type(value).__name__))


def check_made(made: Transform, schedule: Schedule) -> Transform:
    """Return what `make` made as it is. Raises TypeError if it is no transform, ValueError if it lacks a phase.

    A schedule of this library says now what it comes to; a step would say so after thousands of others.
    """
    check_is_transform("make's result", made)
    for phase in phases_of(schedule):
        try:
            made.composed(phase)
        except ValueError as error:
            kind = type(schedule).__name__
            raise ValueError(f"schedule: is {kind}, which does not fit this optimizer; {error}") from error
    return made


def check_make(make: Any, example: str = "partial(fn.onebit_adam, axis='data')") -> Callable[..., Transform]:
    """Return what makes transforms as it is. example: one that would do.

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
    _check_callable("make", make, example)
    if isinstance(make, partial):
        _refuse_unknown(make.keywords, make.func)
        if "lr" in make.keywords:
            cure = "pass it to fn.Optimizer(..., lr=...) or in a param group, where schedulers change it"
            raise ValueError(expected("lr", "make to leave it open", f"{make.keywords['lr']}", cure))
    checked: Callable[..., Transform] = make
    return checked


def shown(group: dict[str, Any], make: Callable[..., Any]) -> dict[str, Any]:
    """Write the numbers that `make` is called with into a param group, those that were not given, too; return them.

    Raises: as `hyper_parameters`; TypeError if `make` takes no learning rate.
    """
    names, takes_any = _arguments(make)
    if "lr" not in names and not takes_any:
        got = f"{_name_of(make)}, which takes {', '.join(names) or 'nothing'}"
        cure = "give one that does: lambda lr: fn.chain(..., fn.scale_by_learning_rate(lr))"
        raise TypeError(expected("make", "a function that takes lr", got, cure))
    given = hyper_parameters(group, make)
    for name, argument in inspect.signature(make).parameters.items():
        if isinstance(argument.default, int | float) and name not in {*_NO_HYPER_PARAMETERS, *given}:
            group[name] = given[name] = argument.default
    return given


def hyper_parameters(group: Mapping[str, Any], make: Callable[..., Any]) -> dict[str, Any]:
    """Return the entries of a param group that its transform is made from, the learning rate aside.

    Raises: TypeError if `make` does not take one of them; ValueError for betas that are no pair.
    """
    given = _without_betas({name: x for name, x in group.items() if name not in _NO_HYPER_PARAMETERS}, make)
    _refuse_unknown(given, make)
    return given


def leaves_open(make: Callable[..., Any], name: str) -> bool:
    """Tell whether a function takes an argument that is None unless it is given."""
    argument = inspect.signature(make).parameters.get(name)
    return argument is not None and argument.default is None


def _refuse_unknown(given: Mapping[str, Any], make: Callable[..., Any]) -> None:
    names, takes_any = _arguments(make)
    for name in () if takes_any else given.keys() - set(names):
        called = _name_of(make)
        taken = ", ".join(n for n in names if n != "lr")
        raise TypeError(f"{name}: is not an argument of {called}, which takes {taken}")


def _name_of(make: Any) -> str:
    return str(getattr(getattr(make, "func", make), "__name__", "make"))


def _without_betas(given: dict[str, Any], make: Callable[..., Any]) -> dict[str, Any]:
    """Return hyper-parameters with torch's `betas` as b1 and b2, where `make` takes these."""
    names = _arguments(make)[0]
    if "betas" not in given or "betas" in names or not _BETAS.issubset(names):
        return given
    betas = given.pop("betas")
    twice = ", ".join(sorted(given.keys() & _BETAS))
    if twice:
        raise TypeError(expected("betas", "one of the two spellings in a param group", f"betas and {twice}"))
    b1, b2 = _pair(betas)
    return {**given, "b1": b1, "b2": b2}


def _pair(betas: Any) -> Any:
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ValueError(expected("betas", "a pair, (b1, b2)", f"{betas!r}"))
    return betas


def spell_betas(given: dict[str, Any], make: Callable[..., Any], defaults: Mapping[str, Any]) -> None:
    """Write b1 and b2 as torch's `betas`, which its schedulers look for, where `make` takes the one or the other.

    Args: given: hyper-parameters; they stay as they are if they have betas. defaults: whose betas stand for what is not
        given, before the defaults of `make`.
    """
    arguments = inspect.signature(make).parameters
    if "betas" in given:
        return
    if "betas" in arguments:
        if isinstance(arguments["betas"].default, tuple):
            given["betas"] = defaults.get("betas", arguments["betas"].default)
    elif _BETAS.issubset(arguments):
        pair = _pair(defaults["betas"]) if "betas" in defaults else [arguments[name].default for name in ("b1", "b2")]
        betas = tuple(given.get(name, other) for name, other in zip(("b1", "b2"), pair, strict=True))
        if inspect.Parameter.empty not in betas:
            given["betas"] = betas
            for name in _BETAS & given.keys():
                del given[name]


def fold_betas(group: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Take what was written into a group as b1 or b2 into its `betas`. Args: before: its hyper-parameters."""
    if _BETAS & group.keys() and "betas" in group and "betas" not in before:
        group["betas"] = tuple(group.pop(name, x) for name, x in _betas_by_name(group).items())


def _arguments(make: Callable[..., Any]) -> tuple[list[str], bool]:
    """Return the names of a function's arguments, and whether it takes any others, too."""
    known = inspect.signature(make).parameters.values()
    return [p.name for p in known], any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known)


_BETAS = {"b1", "b2"}

_NO_HYPER_PARAMETERS = frozenset({"params", "lr", "initial_lr", "param_names", "name"})

_SCHEDULERS = frozenset({"max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr"})
"""What torch's schedulers write into a group for themselves."""


def current(group: Mapping[str, Any], before: Mapping[str, Any], make: Callable[..., Any]) -> dict[str, Any]:
    """Return the hyper-parameters that a group holds now: those of `before`, and new ones that `make` knows.

    Raises: ValueError if one of `before` is gone, or for betas that are no pair.
    """
    now = {**group}
    if "betas" in group and "betas" not in before:
        now.update(zip(("b1", "b2"), _pair(now.pop("betas")), strict=True))
    for name in before.keys() - now.keys():
        raise ValueError(expected(name, "a value in its param group", "none", "change it, but do not take it out"))
    added = now.keys() - before.keys() - _NO_HYPER_PARAMETERS - _SCHEDULERS
    if added:
        names, takes_any = _arguments(make)
        added = added if takes_any else added & set(names)
    return {name: now[name] for name in (*before, *sorted(added))}


def learning_rate(group: Mapping[str, Any]) -> Tensor:
    """Return a group's learning rate as a new 0-d tensor. Raises ValueError if it is none."""
    given = group["lr"]
    wide = torch.float64 if any(p.dtype == torch.float64 for p in group["params"]) else torch.float32
    device = given.device if isinstance(given, Tensor) else "cpu"  # where it is compared in every step
    lr = torch.as_tensor(given if _is_number(given) else math.nan, dtype=wide, device=device).detach().clone()
    if not 0 <= lr < math.inf:
        raise _wrong_rate(given)
    return lr


def _is_number(given: Any) -> bool:
    if isinstance(given, Tensor):
        return not given.ndim and not given.is_complex()
    return isinstance(given, numbers.Real)


def _wrong_rate(given: Any) -> ValueError:
    got = f"{given}" if isinstance(given, Tensor) and not given.ndim else repr(given)
    return ValueError(expected("lr", "a finite number or a 0-d tensor, of at least 0", got))


ROUNDED = -1e-10
"""A learning rate from here on counts as 0: torch's `LinearLR` to 0 ends at -1e-20 or so, for it multiplies."""


def show_rate(group: dict[str, Any], lr: Tensor) -> None:
    """Leave a number in a group as its learning rate, and put `lr` in the place of a tensor.

    As with torch's optimizers a number stays a number: scripts keep what they read there, and multiply it in place.
    """
    given = group["lr"]
    group["lr"] = lr if isinstance(given, Tensor) else float(given)


def follow(group: dict[str, Any], lr: Tensor) -> None:
    """Take over what was written into a group as its learning rate; `lr` then takes the place of another tensor.

    Raises: ValueError if it is no number, negative by more than rounding, NaN or Inf, before anything is written: a
        step in place would carry it into the params.
    """
    given = group["lr"]
    if given is lr and lr.device.type != "cpu":  # nobody waits for a device here
        return
    number = checked_rate(given)
    if given is lr:
        return
    rounded = lr.clone().fill_(number)
    if not torch.equal(rounded, lr):  # `fn.adapters.ddp.overlap` takes whatever is written for a change
        lr.copy_(rounded)
    show_rate(group, lr)


def remembered(group: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what a group holds, for `is_as_before`; None if it holds what can be written into in place."""
    entries = {name: x for name, x in group.items() if name != "params"}
    lr = entries["lr"]
    writable = isinstance(lr, Tensor) and lr.device.type == "cpu"  # a device is not waited for
    return None if writable or any(isinstance(x, list) for x in entries.values()) else {**group}


def is_as_before(group: Mapping[str, Any], before: Mapping[str, Any] | None) -> bool:
    """Tell whether a group holds the very objects that it held before; asked in every step."""
    if before is None or len(before) != len(group):
        return False
    return all(map(is_, group, before)) and all(map(is_, group.values(), before.values()))


def checked_rate(given: Any) -> float:
    """Return a learning rate that was written into a group as a number. Raises: as `follow`."""
    number = float(given) if _is_number(given) else math.nan
    if not ROUNDED <= number < math.inf:
        raise _wrong_rate(given)
    return number


def host_tensor(value: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return numbers as a tensor of the host, whatever torch's default device is; a tensor stays where it is."""
    return value.to(dtype=dtype) if isinstance(value, Tensor) else torch.tensor(value, dtype=dtype, device="cpu")


def saved_numbers(group: Mapping[str, Any], hypers: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the numbers of a group that a restart takes back, in float64: those of its transform and of schedulers.

    Args: hypers: the hyper-parameters that the group's transform was made of.
    """
    made_of = {*hypers, *_betas_by_name(group)} if "betas" in hypers else hypers.keys()
    kept = {name: x for name, x in _numbers(group).items() if name in made_of or name in _OF_SCHEDULERS}
    kept.update({name: group[name] for name in ("lr", "initial_lr") if name in group})
    return {name: host_tensor(value, torch.float64).detach() for name, value in kept.items()}


def restored_numbers(group: Mapping[str, Any], saved: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the entries that bring what `saved_numbers` returned back into a group; nothing is written."""
    now, always = _numbers(group), {"lr", *_OF_SCHEDULERS}
    entries: dict[str, Any] = {name: float(x) for name, x in saved.items()}
    entries = {name: x for name, x in entries.items() if name in always or now.get(name, x) != x}
    for name, x in entries.items():
        if isinstance(now.get(name), int) and x.is_integer() and name != "lr":
            entries[name] = int(x)
    if betas := _betas_by_name(group):
        entries["betas"] = tuple(entries.pop(name, x) for name, x in betas.items())
    return entries


def write_numbers(group: dict[str, Any], entries: Mapping[str, Any]) -> None:
    """Write what `restored_numbers` returned into its group, as torch's optimizers do; the next step takes it over."""
    lr = group["lr"]
    group.update(entries)
    if isinstance(lr, Tensor):
        group["lr"] = lr.fill_(entries["lr"])


_OF_SCHEDULERS = _SCHEDULERS | {"initial_lr"}
"""What a group has for the schedulers that were made for it: one that is made with a `last_epoch` asks for it."""


def _numbers(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers in a group, with `betas` as b1 and b2; flags say what the state holds, and are none."""
    numbers_of = {**group, **_betas_by_name(group)}
    flags = {name for name, x in numbers_of.items() if isinstance(x, bool) or getattr(x, "dtype", None) == torch.bool}
    return {name: x for name, x in numbers_of.items() if _is_number(x) and name not in flags}


def _betas_by_name(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `betas` of a group by name, b1, b2 and so on."""
    betas = group.get("betas")
    return {f"b{i}": x for i, x in enumerate(betas, 1)} if isinstance(betas, tuple | list) else {}


def same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Tell whether hyper-parameters are the same; tensors only if they are the same object."""

    def equal(x: Any, y: Any) -> bool:
        return x is y or (not isinstance(x, Tensor) and not isinstance(y, Tensor) and bool(x == y))

    return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)


def check_params(groups: Sequence[Mapping[str, Any]]) -> None:
    """Refuse parameters that a step cannot write, or would write twice, with a ValueError that names them."""
    for g in range(len(groups)):
        check_writable(groups, g)
    owners = [f"{name} of group {g}" for g, group in enumerate(groups) for name in names_of(group)]
    shared = next(overlaps([p for group in groups for p in group["params"]]), None)
    if shared is not None:
        first, second = (f"parameter {owners[i]}" for i in shared)
        raise ValueError(
            f"params: expected each parameter to have memory of its own, but {second} shares memory with {first}; "
            f"clone one of them, or make them one torch.nn.Parameter, which modules may share"
        )


def check_writable(groups: Sequence[Mapping[str, Any]], g: int) -> None:
    """Refuse parameters of a group that no step can write with a ValueError that names the first."""
    params = groups[g]["params"]
    if all(map(Tensor.is_contiguous, params)) and not any(map(Tensor.is_inference, params)):
        return  # a step looks at many
    for name, p in zip(names_of(groups[g]), params, strict=True):
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
