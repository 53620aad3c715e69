"""The roles of a state's fields: its class declares them, and `find` finds fields by them, whatever their names.

A class declares up to three things, each a property: `rank_local` names the fields that differ between ranks;
`local_params` says that the params differ, too: True, or a function that returns those that all ranks agree on; `roles`
says which fields hold what an optimizer or a combinator looks for:

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

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from fn import tree
from fn.errors import expected

Tree = Any
C = TypeVar("C", bound=type)


class Roles(NamedTuple):
    """Which fields of a state hold what, by their names; its class returns this from a property `roles`.

    skips: counts of skipped steps, 0-d int64; where one grows, the whole step is skipped.
    dropped: counts of local steps that this rank left out, 0-d int64.
    left_out: counts of exchanges that all ranks left out, 0-d int64.
    copies: copies of the params, which init makes; they stay as they are where a param does.
    first_moment, second_moment: averages of the gradients, and of their squares; `fn.freeze_when_stable` and
        `from_adamw` look for them.
    watched: what all ranks hold alike after an exchange, although params or updates differ between them; where a state
        has such fields, `fn.skip_nonfinite` checks only them.
    place: which part of the tensors a rank has. Named in `rank_local`, too: the number of its shard and the number of
        shards, (2,) int64; all other rank-local fields are of that shard. The same on all ranks: the owner of each
        tensor, (n,) int64; of rank-local fields an owner has whole tensors, and the others tensors without elements.
    errors: residual errors, which a warm-up does not read: what codes, or factors, have not delivered yet; also the sum
        of all that they have delivered.
    warmup_errors: residual errors that a warm-up reads, because it averages the gradients in codes.
    ages: how many updates the first moment and the second one have had, 0-d int64 each, () where moments are not
        bias-corrected.
    rested: how many updates, of those that ages count, each tensor sat out: a tree like the first moment of 0-d int64.
    difference: the difference to the anchor, which a weight multiplies before it is sent; in the state of an average,
        0-d numbers that are 1 where it is noted, and are multiplied with it. One of 0 behind the mean says that this
        rank's difference was left out, so that it goes on from the anchor.
    taken: gradients that a local step has kept for a mean, which may be on its way in the next one: an adapter gives
        those of the next one other memory.
    mean: the mean of such gradients over the ranks, exactly, as it has arrived.
    missing: whether what a mean brought was not finite, so that nothing of it stays, 0-d bool.
    """

    skips: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    copies: tuple[str, ...] = ()
    first_moment: tuple[str, ...] = ()
    second_moment: tuple[str, ...] = ()
    watched: tuple[str, ...] = ()
    place: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()
    difference: tuple[str, ...] = ()
    ages: tuple[str, ...] = ()
    rested: tuple[str, ...] = ()
    warmup_errors: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()
    mean: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


def find(state: Tree, role: str) -> list[Tree]:
    """Return the values of all fields with a role, such as "second_moment", in the states of a tree, outermost first.

    Raises: AttributeError if there is no such role.
    """
    return [getattr(node, name) for node in tree.named_tuples(state) for name in getattr(roles_of(node), role)]


def replace(state: Tree, role: str, f: Callable[[Tree], Tree]) -> Tree:
    """Return a tree of states with f of each field with a role, such as "second_moment", in the order of `find`.

    Fields inside of those are f's.
    """
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        named = getattr(roles_of(state), role)
        values = {name: f(getattr(state, name)) for name in named}
        deeper = {
            name: replace(value, role, f)
            for name, value in zip(state._fields, state, strict=True)
            if name not in values
        }
        return type(state)(**values, **deeper)
    return tree.rebuilt(state, lambda value: replace(value, role, f)) if tree.children(state) else state


def roles_of(state: Tree) -> Roles:
    """Return the roles that the class of a state, a NamedTuple, declares."""
    declared: Roles = _declared(state, "roles", Roles())
    return declared


def rank_local(state: Tree) -> frozenset[str]:
    """Return the fields of a state, a NamedTuple, that its class declares to differ between ranks.

    Raises: TypeError if that is a plain string; ValueError if it names no field.
    """
    named = _declared(state, "rank_local", ())
    _check_names(state, "rank_local", named)
    return frozenset(named)


def has_local_params(state: Tree) -> bool:
    """Tell whether the class of a state, a NamedTuple, declares that the params differ between ranks."""
    return bool(_declared(state, "local_params", False))


def check_same_params(state: Tree, where: str = "") -> None:
    """Refuse an inner optimizer whose state says that the ranks go to params of their own, with a ValueError.

    Args: state: of the inner optimizer. where: of which ranks, in the message.
    """
    if any(map(has_local_params, tree.named_tuples(state))):
        raise ValueError(expected("inner", f"params that are the same on all ranks{where}", "each rank's own"))


def agreed_of(state: Tree) -> Callable[[Tree, list[Tensor]], list[Tensor] | None] | None:
    """Return the function that the class of a state, a NamedTuple, declares as `local_params`; None if it is none.

    It is (state, params) -> the params that all ranks agree on, or None where that is what they have.
    """
    found: Any = _declared(state, "local_params", False)
    return found if callable(found) else None


def is_shard(state: Tree) -> bool:
    """Tell whether a state, a NamedTuple, has a shard of all tensors: its place differs between ranks."""
    return bool(rank_local(state).intersection(roles_of(state).place))


SAME, OWN, ERROR, SHARD, OWNED, PLAN = "same", "own", "error", "shard", "owned", "plan"
"""A leaf is the same on all ranks, or one rank's own: an error, a shard, or what goes with params of its own. Or it is
owned: whole on one rank, and without elements on the others; a plan says on which."""

OF_EACH_RANK = frozenset((OWN, ERROR, SHARD))
"""Leaves that differ on every rank, under one path."""


def kinds(states: Tree, mark: str = SAME) -> Tree:
    """Return a tree like the states with SAME, OWN, ERROR, SHARD, OWNED or PLAN at every leaf.

    What a class names in `rank_local` are errors, unless it says `local_params`: that each rank goes to params of its
    own. Args: mark: of what no class names.
    """
    if isinstance(states, tuple) and hasattr(states, "_fields"):
        declared, own = roles_of(states), ERROR
        if declared.place and not is_shard(states):
            own = OWNED
        elif mark == SHARD or declared.place:
            # A field inside of a shard's state belongs to the shard, whatever the inner class says of itself.
            own = SHARD
        elif has_local_params(states):
            own = OWN
        # Errors of owned tensors are owned as well.
        marks = {name: ERROR if name in declared.errors and own != OWNED else own for name in rank_local(states)}
        marks |= dict.fromkeys(declared.place, PLAN) if own == OWNED else {}
        fields = zip(states._fields, states, strict=True)
        return type(states)(*(kinds(value, marks.get(name, mark)) for name, value in fields))
    if isinstance(states, tuple | list | dict):
        return tree.rebuilt(states, lambda value: kinds(value, mark))
    return tree.map(lambda _: mark, states)


def check(state: Tree) -> None:
    """Refuse a tree with a state whose class declares roles of fields that it does not have.

    Raises: TypeError for what is no declaration; ValueError for a name that is no field.
    """
    for node in tree.named_tuples(state):
        rank_local(node)
        roles, kind = roles_of(node), type(node).__name__
        if not isinstance(roles, Roles):
            cure = "write fn.Roles(second_moment=('nu',))"
            raise TypeError(expected(f"{kind}.roles", "an fn.Roles", type(roles).__name__, cure))
        for role, named in roles._asdict().items():
            _check_names(node, f"roles.{role}", named)


def declare(
    *,
    rank_local: Iterable[str] = (),
    local_params: bool | Callable[[Any, list[Tensor]], list[Tensor] | None] = False,
    **fields_by_role: tuple[str, ...],
) -> Callable[[C], C]:
    """Return a decorator that declares what the fields of a state's class are, as properties of it.

    >>> from typing import NamedTuple
    >>> import torch, fn
    >>> @fn.roles.declare(rank_local=("mu",), first_moment=("mu",))
    ... class LocalState(NamedTuple):
    ...     mu: torch.Tensor
    >>> LocalState(torch.zeros(2)).roles.first_moment, fn.roles.rank_local(LocalState(torch.zeros(2)))
    (('mu',), frozenset({'mu'}))

    What is not given is left to the class, which may inherit it, or have a property for it.

    Raises: from the decorator, ValueError for a class that has a field of the name of what it declares.
    """
    given = {
        "rank_local": rank_local if isinstance(rank_local, str) else frozenset(rank_local),  # `check` refuses a string
        "local_params": local_params,
        "roles": Roles(**fields_by_role) if fields_by_role else None,
    }
    declared = {name: value for name, value in given.items() if value}

    def decorate(kind: C) -> C:
        for name, value in declared.items():
            if name in kind._fields:  # type: ignore[attr-defined]
                wanted = f"to have no field {name!r}, which the declaration of that name would hide"
                raise ValueError(expected(kind.__name__, wanted, f"the fields {kind._fields}"))  # type: ignore[attr-defined]
            # `value=value`: without it every property would return the last value of this loop.
            setattr(kind, name, property(lambda state, value=value: value))  # type: ignore[misc]
        return kind

    return decorate


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
