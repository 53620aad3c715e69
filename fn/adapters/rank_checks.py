"""What an optimizer compares with the other ranks at construction, so that nobody waits for one that refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.collectives.agreement import check_agreement


def device_among(params: Any) -> torch.device:
    """Return the device of the first tensor in a tree of params or param groups; the CPU if there is none."""
    return next((p.device for p in tree.leaves(params) if isinstance(p, Tensor)), torch.device("cpu"))


def check_listed(axes: Sequence[str], params: list[Any], others: Mapping[str, object]) -> None:
    """Compare what transforms do not know: ranks with other phases, groups or names would wait for one another.

    Args: params: what a `torch.optim.Optimizer` was given, as a list. others: more that must agree.
    Raises: `RanksDisagree`, on every rank.
    """
    groups = params if params and isinstance(params[0], dict) else [{"params": params}]
    listed = [list(p) if not isinstance(p, Tensor) else [p] for p in (g.get("params", ()) for g in groups)]
    fields: dict[str, object] = {"number of param groups": len(groups)}
    for g, members in enumerate(listed):
        fields[f"number of parameters in group {g}"] = len(members)
        names = [p[0] for p in members if isinstance(p, tuple)]
        fields.update({f"name of parameter {i} in group {g}": name for i, name in enumerate(names)})
    for axis in axes:
        check_agreement(axis, {**fields, **others}, device_among(params))


def check_accepted(axes: Sequence[str], group: int, problem: BaseException | None, device: torch.device) -> None:
    """Tell the other ranks whether a param group was accepted here, and hear it from them.

    Raises: `problem` if there is one and the ranks agree on it; else `RanksDisagree`, on every rank.
    """
    verdict = "accepted" if problem is None else f"refused ({type(problem).__name__}: {problem})"
    for axis in axes:
        check_agreement(axis, {f"param group {group}": verdict}, device)
    if problem is not None:
        raise problem


def refuse_sharded(params: Iterable[Tensor]) -> None:
    """Refuse the parameters of FSDP2 with a TypeError that says what to do instead."""
    for i, p in enumerate(params):
        if hasattr(p, "device_mesh"):
            raise TypeError(
                f"params: parameter {i} is a DTensor, whose gradients FSDP2 reduces before an optimizer sees them; "
                "compress these with fn.adapters.fsdp.compress(module), and give the parameters to torch.optim"
            )
