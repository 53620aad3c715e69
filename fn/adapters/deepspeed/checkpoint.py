"""Loading an optimizer state dict that DeepSpeed's 1-bit optimizers saved."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters.deepspeed import transforms as numerics
from fn.errors import expected

Tree = Any
Groups = Sequence[Mapping[str, Any]]

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


def load_checkpoint(states: Tree, groups: Groups, checkpoint: Mapping[str, Any]) -> tuple[int, Tree, list[float]]:
    """Return steps, states and learning rates of {"state": ..., "param_groups": ...}; errors are zero.

    Args: states, groups: of the optimizer that is to go on from there.
    Raises: ValueError that names what is missing or of another shape.
    """
    for wrapper in ("optimizer", "optimizer_state_dict"):  # of the engine, and of its fp16 wrapper
        checkpoint = checkpoint.get(wrapper, checkpoint)
    by_group = _rows(groups, checkpoint)
    rows = [row for group in by_group for row in group]
    states = numerics.reset_errors(states)
    for theirs, ours in NAMES.items():
        if all(theirs in row for row in rows):
            states = _with_field(states, ours, iter([row[theirs] for row in rows]))
    states = _with_field(states, "elapsed", iter([group[0].get("lrs", 0.0) if group else 0.0 for group in by_group]))
    steps = max(int(rows[0]["step"]) - 1, 0) if rows else 0  # theirs counts the initialising call
    states = _with_field(states, "step", itertools.repeat(steps))
    return steps, states, [float(saved["lr"]) for saved in checkpoint["param_groups"]]


def _rows(groups: Groups, checkpoint: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """Return the saved state of every parameter, a list per group; raise as `load_checkpoint` does."""
    saved = checkpoint["param_groups"]
    if len(groups) != len(saved):
        raise ValueError(f"checkpoint: has {len(saved)} param groups; this optimizer has {len(groups)}")
    by_group: list[list[Mapping[str, Any]]] = []
    for g, (group, theirs) in enumerate(zip(groups, saved, strict=True)):
        rows: list[Mapping[str, Any]] = [checkpoint["state"].get(i, {}) for i in theirs["params"]]
        if len(rows) == 1 < len(group["params"]):
            rows = _split(rows[0], group["params"])
        shapes = [tuple(row["exp_avg"].shape) if "exp_avg" in row else None for row in rows]
        ours = [tuple(p.shape) for p in group["params"]]
        if shapes != ours:
            wanted = f"the momentum of param group {g} to have the shapes {ours}"
            raise ValueError(expected("checkpoint", wanted, f"{shapes}"))
        by_group.append(rows)
    return by_group


def _split(row: Mapping[str, Any], params: list[Tensor]) -> list[Mapping[str, Any]]:
    """Split the state of a group that was flattened into one tensor; what belongs to it as a whole goes to each."""
    sizes = [p.numel() for p in params]
    parts: list[dict[str, Any]] = [{} for _ in params]
    for name, value in row.items():
        # (n,) of the whole group -> (n_i,) -> the shape of each parameter; anything else belongs to all of them.
        flat = isinstance(value, Tensor) and value.shape == (sum(sizes),)
        values = value.split(sizes) if flat else [value] * len(params)
        for part, p, piece in zip(parts, params, values, strict=True):
            part[name] = piece.reshape(p.shape) if flat else piece
    return list(parts)


def _with_field(states: Tree, name: str, values: Iterator[Any]) -> Tree:
    """Return states with every field of a name replaced, leaf by leaf, in the order of the params."""

    def convert(leaf: Tensor) -> Tensor:
        return torch.as_tensor(next(values), dtype=leaf.dtype, device=leaf.device).reshape(leaf.shape)

    return numerics.with_field(states, name, lambda value: tree.map(convert, value))
