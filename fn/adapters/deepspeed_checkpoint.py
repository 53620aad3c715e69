"""Loading an optimizer state dict that DeepSpeed's 1-bit optimizers saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters import deepspeed_numerics as numerics
from fn.adapters.donate import write_back

if TYPE_CHECKING:
    from fn.adapters.deepspeed_base import DeepSpeedOptimizer

NAMES = {
    "exp_avg": "mu",
    "exp_avg_sq": "nu",
    "exp_avg_sq_fresh": "nu_fresh",
    "scaling_coeff": "scaling",
    "lamb_coeff_freeze": "coefficient",
    "last_factor": "factor",
    "momentum_accumulator": "went",
}
"""DeepSpeed's names of what a parameter's state holds, and ours."""


def load_checkpoint(optimizer: DeepSpeedOptimizer, checkpoint: Mapping[str, Any]) -> None:
    """Copy steps, moments, coefficients and learning rates of {"state": ..., "param_groups": ...}; zero the errors.

    Raises: ValueError that names the parameter that is missing or of another shape; nothing is loaded then.
    """
    rows = [checkpoint["state"].get(i) for group in checkpoint["param_groups"] for i in group["params"]]
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if len(rows) != len(params) or any(row is None for row in rows):
        raise ValueError(f"checkpoint: holds the state of {len(rows)} parameters; this optimizer has {len(params)}")
    for i, (row, p) in enumerate(zip(rows, params, strict=True)):
        if row["exp_avg"].shape != p.shape:
            raise ValueError(f"checkpoint: parameter {i} is {tuple(row['exp_avg'].shape)}, here {tuple(p.shape)}")
    state = numerics.reset_errors(optimizer.states)
    for theirs, ours in NAMES.items():
        if tree.fields(state, ours) and all(theirs in row for row in rows):
            state = _with_field(state, ours, iter([row[theirs] for row in rows]))
    steps = int(rows[0]["step"]) if rows else 0
    state = _with_steps(state, steps - 1)
    with torch.no_grad():
        write_back(optimizer.states, state)
        for lr, group in zip(optimizer._lrs, checkpoint["param_groups"], strict=True):
            lr.fill_(float(group["lr"]))
    optimizer.steps = max(steps - 1, 0)


def _with_field(state: Any, name: str, values: Any) -> Any:
    """Return the state with the leaves of every field of that name replaced, in the order of the parameters."""

    def convert(leaf: Tensor) -> Tensor:
        return torch.as_tensor(next(values)).to(leaf).reshape(leaf.shape)

    return _map_fields(state, name, lambda value: tree.map(convert, value))


def _with_steps(state: Any, steps: int) -> Any:
    return _map_fields(state, "step", lambda value: torch.full_like(value, max(steps, 0)))


def _map_fields(state: Any, name: str, f: Callable[[Any], Any]) -> Any:
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        pairs = zip(state._fields, state, strict=True)
        return type(state)(*(f(v) if k == name else _map_fields(v, name, f) for k, v in pairs))
    if isinstance(state, tuple | list):
        return type(state)(_map_fields(v, name, f) for v in state)
    return state
