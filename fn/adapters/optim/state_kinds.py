"""Which leaves of a state all ranks hold alike, and which are one rank's own."""

from __future__ import annotations

from collections import Counter
from typing import Any

from fn import roles, tree
from fn.collectives.compressed import ErrorFeedbackState
from fn.errors import expected
from fn.roles import has_local_params, rank_local
from fn.transforms.sharded import ShardedState

Tree = Any

SAME, OWN, ERROR, SHARD = "same", "own", "error", "shard"
"""A leaf is the same on all ranks, or one rank's own: an error, a shard, or what goes with params of its own."""


def kinds(states: Tree, mark: str = SAME) -> Tree:
    """Return a tree like the states with SAME, OWN, ERROR or SHARD at every leaf.

    What a class names in `rank_local` are errors, unless it says `local_params`: that each rank goes to params of its
    own. Args: mark: of what no class names.
    """
    if isinstance(states, tuple) and hasattr(states, "_fields"):
        local, own = rank_local(states), ERROR
        if mark == SHARD or isinstance(states, ShardedState):
            own = ERROR if isinstance(states, ErrorFeedbackState) else SHARD
        elif has_local_params(states):
            own = OWN
        fields = zip(states._fields, states, strict=True)
        return type(states)(*(kinds(value, own if name in local else mark) for name, value in fields))
    if isinstance(states, tuple | list):
        return type(states)(kinds(value, mark) for value in states)
    if isinstance(states, dict):
        return {key: kinds(value, mark) for key, value in states.items()}
    return tree.map(lambda _: mark, states)


def worker_errors(states: Tree) -> list[Tree]:
    """Return what was not delivered yet by averages in codes; empty if there are none."""
    return [errors.worker for errors in tree.instances(states, ErrorFeedbackState)]


def by_path(states: Tree, prefix: str = "state.") -> dict[str, Any]:
    """Return the leaves of a tree by their paths."""
    return {f"{prefix}{path}": leaf for path, leaf in zip(tree.paths(states), tree.leaves(states), strict=True)}


def paths_of(states: Tree, role: str) -> set[str]:
    """Return the paths of the leaves that have a role, see `fn.Roles`."""
    chosen = {id(leaf) for leaf in tree.leaves(roles.find(states, role))}
    return {path for path, leaf in by_path(states).items() if id(leaf) in chosen}


def check_paths(tree_: Tree, name: str = "state", of: str = "let init return dicts") -> None:
    """Refuse a tree of which two leaves have one path with a ValueError: one would be saved for both.

    Args: name: of the argument. of: how its cure begins.
    """
    for path in [path for path, count in Counter(tree.paths(tree_)).items() if count > 1]:
        cure = f"{of} with strings without dots as keys"
        raise ValueError(expected(name, "a path of its own for every leaf", f"two leaves at {path!r}", cure))
