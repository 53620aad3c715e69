"""What a log says of a run, and both sides know: the numbers of its groups, its phases, its agreed tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.agreed_params import agreed_pairs
from fn.adapters.follow.log_format import JSON
from fn.adapters.optim.groups import names_of
from fn.adapters.optim.optimizer import Optimizer
from fn.adapters.optim.resting import knows_gradients
from fn.base import Phase, Round, Transform
from fn.collectives.agreement import describe
from fn.roles import PLAN, SAME

Tree = Any

DIGESTS = ("digests",)
"""The key of the record that has a digest of each parameter, in the frames that have one of all."""

DIGEST_BYTES = 8

ADDED = "added"
"""What the keys of records begin with that have the parameters of a group, by its number, as it was added."""

LISTS = ("params", "frozen", "rests")
"""What is said of the parameters of a group: which they are, and which do not train, or had no gradient in a step."""


def settings_of(make: Callable[..., Transform]) -> dict[str, JSON]:
    """Return what `make` makes, as text by name."""
    return dict(sorted(describe(make).items()))


def text_of(phase: Phase | Round) -> str:
    """Return the name of a phase, or of a round, as frames have it."""
    if isinstance(phase, Phase):
        return phase.value
    return " ".join(["round", *("-" if number is None else str(number) for number in phase)])


def phase_from(text: str) -> Phase | Round:
    """Return the phase of a name."""
    kind, *numbers = text.split(" ")
    return Round(*(None if number == "-" else int(number) for number in numbers)) if kind == "round" else Phase(text)


def numbers_of(optimizer: Optimizer) -> dict[str, JSON]:
    """Return what a step reads of the groups: their parameters, by name or number, and the rest that JSON can say."""
    found: dict[str, JSON] = {}
    with optimizer.binding:
        knows = knows_gradients(optimizer)
    for g, group in enumerate(optimizer.param_groups):
        found[f"groups.{g}.params"] = [*names_of(group)] if "param_names" in group else len(group["params"])
        for name, x in group.items():
            value = x.item() if isinstance(x, Tensor) and x.numel() == 1 else x
            if name not in ("params", "param_names") and _is_json(value):
                found[f"groups.{g}.{name}"] = [*value] if isinstance(value, tuple) else value
        if frozen := [i for i, p in enumerate(group["params"]) if not p.requires_grad]:
            found[f"groups.{g}.frozen"] = [*frozen]
        rests = [i for i, p in enumerate(group["params"]) if p.grad is None]
        if rests and knows:
            found[f"groups.{g}.rests"] = [*rests]
    return found


def _is_json(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_json, value))
    return value is None or isinstance(value, bool | int | float | str)


def groups_from(numbers: Mapping[str, JSON]) -> list[dict[str, Any]]:
    """Return the entries of each group, and what `LISTS` names."""
    found: dict[int, dict[str, Any]] = {}
    for path, value in numbers.items():
        _, g, name = path.split(".", 2)
        pair = isinstance(value, list) and name not in LISTS
        found.setdefault(int(g), {})[name] = tuple(value) if pair and isinstance(value, list) else value
    return [found[g] for g in sorted(found)]


def params_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the parameters by group and name."""
    return {
        f"params.{g}.{name}": p.detach()
        for g, group in enumerate(optimizer.param_groups)
        for name, p in zip(names_of(group), group["params"], strict=True)
    }


def agreed_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """Return the parameters by name; for those of a rank's own what all ranks agree on."""
    if not any(map(roles.has_local_params, tree.named_tuples([unit.state for unit in optimizer.units]))):
        return params_of(optimizer)
    instead = {p.data_ptr(): agreed for p, agreed in agreed_pairs(optimizer)}
    return {name: instead.get(p.data_ptr(), p) for name, p in params_of(optimizer).items()}


def state_of(states: Tree, prefix: str) -> dict[str, Tensor]:
    """Return what all ranks agree on in states, by path: live buffers.

    Counts in a rank's own state, such as the ages of moments in a shard, are alike on all of them, and are no room.
    """
    marks = tree.by_path(roles.kinds(states), prefix)
    return {
        path: x
        for path, x in tree.by_path(states, prefix).items()
        if marks[path] in (SAME, PLAN) or not (x.ndim or x.is_floating_point())
    }


def bytes_of(x: Tensor) -> bytes:
    """Return a copy of the bytes of a tensor."""
    return bytes(_in_memory(x))


def digests_of(tensors: Sequence[Tensor]) -> bytes:
    """Return a digest of each tensor, one behind the other."""
    return b"".join(hashlib.blake2b(_in_memory(x), digest_size=DIGEST_BYTES).digest() for x in tensors)


def _in_memory(x: Tensor) -> memoryview:
    # (...) -> (bytes,); NumPy has no bfloat16
    data: memoryview = x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
    return data
