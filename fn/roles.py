"""What the fields of a state are: a state's class declares it, and `find` finds fields by it, whatever their names.

`rank_local` names the fields that are one rank's own, `local_params` says that the params are, too, `added` says what
fields are in states that were saved before the class had them, and `roles` says which fields hold what an optimizer or
a combinator looks for:

    >>> from typing import NamedTuple
    >>> import torch, fn
    >>> class CountedState(NamedTuple):
    ...     skipped: torch.Tensor        # tokens: the name of a field means nothing
    ...     squares: torch.Tensor
    ...
    ...     @property
    ...     def roles(self):
    ...         return fn.Roles(second_moment=("squares",))
    >>> state = CountedState(torch.tensor(512), torch.tensor([0.5]))
    >>> fn.roles.find({"a": state}, "second_moment"), fn.roles.find(state, "skips")
    ([tensor([0.5000])], [])
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.errors import expected

Tree = Any
_TENSORS = {Tensor, torch.nn.Parameter}


class Roles(NamedTuple):
    """Which fields of a state hold what, by their names; its class returns this from a property `roles`.

    skips: counts of skipped steps, 0-d int64; where one grows, the whole step is skipped.
    dropped: counts of local steps that this rank left out, 0-d int64. left_out: of exchanges that all ranks left out.
    copies: copies of the params, which init makes; they stay as they are where a param has no gradient.
    first_moment, second_moment: averages of what came in, and of its square; `fn.freeze_when_stable` and
        `from_adamw` look for them.
    watched: what all ranks hold alike after an exchange, although params or updates differ between them; where a state
        has such fields, `fn.skip_nonfinite` looks at them only.
    shard: which shard this rank has, and of how many, (2,) int64.
    others: states of other links, in which tensors are theirs to look at.
    """

    skips: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    first_moment: tuple[str, ...] = ()
    second_moment: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    shard: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def find(state: Tree, role: str) -> list[Tree]:
    """Return the values of all fields with a role, such as "second_moment", in the states of a tree, outermost first.

    Raises: AttributeError if there is no such role.
    """
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        own = [getattr(state, name) for name in getattr(roles_of(state), role)]
        return own + [found for value in state for found in find(value, role)]
    if not isinstance(state, tuple | list | dict):
        return []
    inside = state.values() if isinstance(state, dict) else state
    if {*map(type, inside)} <= _TENSORS:
        return []  # without a look at each: states hold long lists
    return [found for value in inside if not isinstance(value, Tensor) for found in find(value, role)]


def roles_of(state: Tree) -> Roles:
    """Return what the class of a state, a NamedTuple, says of its fields."""
    found: Roles = _declared(state, "roles", Roles())
    return found


def rank_local(state: Tree) -> frozenset[str]:
    """Return the fields of a state, a NamedTuple, that are one rank's own: those that `rank_local` of its class names.

    Raises: TypeError if that is a plain string; ValueError if it names no field.
    """
    named = _declared(state, "rank_local", ())
    _check_names(state, "rank_local", named)
    return frozenset(named)


def has_local_params(state: Tree) -> bool:
    """Tell whether the class of a state, a NamedTuple, says that each rank goes to params of its own."""
    return bool(_declared(state, "local_params", False))


def added(state: Tree, saved: Container[str], prefix: str = "") -> dict[str, Tensor]:
    """Return {path: tensor} of what a state has that one saved by an earlier version lacks, as the classes say.

    A class that gets a new field says in a property `added` which number all elements of it are in states that were
    saved before: `{"left_out": 0, "begun": True}`. A field of which something was saved is left alone.

    Args: state: of this version, such as a fresh one. saved: the paths of the other one, as `fn.tree.paths` spells
        them. prefix: of all paths in `saved`.

    >>> from typing import NamedTuple
    >>> import torch, fn
    >>> class CountedState(NamedTuple):
    ...     mu: torch.Tensor
    ...     tokens: torch.Tensor         # new in this version
    ...
    ...     @property
    ...     def added(self):
    ...         return {"tokens": 0}
    >>> fresh = CountedState(torch.zeros(2), torch.tensor(0))
    >>> saved = {"mu": torch.ones(2)}    # by the version before
    >>> saved | fn.roles.added(fresh, saved)
    {'mu': tensor([1., 1.]), 'tokens': tensor(0)}
    """
    names: Iterable[Any]
    values: Iterable[Any]
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        names, values, new = state._fields, state, _declared(state, "added", {})
    elif isinstance(state, tuple | list | dict):
        names = state if isinstance(state, dict) else range(len(state))
        values, new = state.values() if isinstance(state, dict) else state, {}
    else:
        return {}
    found: dict[str, Tensor] = {}
    for name, value in zip(names, values, strict=True):
        path = f"{prefix}{name}"
        if name not in new:
            found.update(added(value, saved, f"{path}."))
            continue
        places = [f"{path}.{inside}".removesuffix(".") for inside in tree.paths(value)]
        if not any(place in saved for place in places):
            fills = [torch.full_like(x, new[name]) for x in tree.leaves(value)]
            found.update(zip(places, fills, strict=True))
    return found


def check(state: Tree) -> None:
    """Refuse states in a tree whose classes declare what is no field of theirs.

    Raises: TypeError, or ValueError for a name that is no field.
    """
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        rank_local(state)
        _check_names(state, "added", _declared(state, "added", {}))
        roles, kind = roles_of(state), type(state).__name__
        if not isinstance(roles, Roles):
            cure = "write fn.Roles(second_moment=('nu',))"
            raise TypeError(expected(f"{kind}.roles", "an fn.Roles", type(roles).__name__, cure))
        for role, named in roles._asdict().items():
            _check_names(state, f"roles.{role}", named)
    if isinstance(state, tuple | list | dict):
        for value in state.values() if isinstance(state, dict) else state:
            if not isinstance(value, Tensor):
                check(value)


def _declared(state: Tree, name: str, default: Any) -> Any:
    """Return what the class of a state declares; a field of that name is no declaration."""
    return default if name in state._fields else getattr(state, name, default)


def _check_names(state: Tree, attribute: str, named: Any) -> None:
    kind, fields = type(state).__name__, ", ".join(state._fields)
    if isinstance(named, str):
        text = f"expected {kind}.{attribute} to be a set or tuple of names, but got the string {named!r}"
        raise TypeError(f"{text}; write {kind}.{attribute} = ({named!r},)")
    for name in named:
        if name not in state._fields:
            raise ValueError(f"expected {kind}.{attribute} to name fields of {kind} ({fields}), but got {name!r}")
