"""Trees of tensors: the one facade over `torch.utils._pytree`.

A tree is a tensor, or a list, tuple, dict or NamedTuple of trees. Nothing else in `fn` names the
pytree module, so a change of it is a change of this file.
"""

from __future__ import annotations

# The `map` of this module hides Python's.
from builtins import map as _map
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from fn.errors import expected

Tree = Any


def map(f: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Apply `f` to the corresponding leaves of one or several trees of the same structure.

    Raises: ValueError where the structures differ.
    """
    if isinstance(tree, Tensor) and not rest:
        return f(tree)
    return pytree.tree_map(f, tree, *rest)


def leaves(tree: Tree) -> list[Any]:
    """Return the leaves of a tree, depth first."""
    if type(tree) is list and {*_map(type, tree)} <= _TENSORS:
        return [*tree]  # what optimizers are given, without a walk
    return pytree.tree_leaves(tree)


_TENSORS = {Tensor, torch.nn.Parameter}


def are_lists(*trees: Tree) -> bool:
    """Tell whether trees are lists of as many tensors each, for which nobody has to walk through trees."""
    flat = all(type(tree) is list and {*_map(type, tree)} <= _TENSORS for tree in trees)
    return flat and len({*_map(len, trees)}) == 1


def flatten(tree: Tree) -> tuple[list[Any], Any]:
    """Return the leaves and the structure that puts them back (`unflatten`)."""
    return pytree.tree_flatten(tree)


def flatten_alike(trees: Sequence[Tree], like: int = 0) -> tuple[list[list[Any]], Any]:
    """Return the leaves of each tree, in the order of those of one of them, and its structure.

    Raises: ValueError where the structures differ.
    """
    first, structure = flatten(trees[like])
    return [first if i == like else structure.flatten_up_to(tree) for i, tree in enumerate(trees)], structure


def map_lists(f: Callable[[list[list[Any]]], Any], trees: Sequence[Tree], like: int = 0) -> Any:
    """Apply f to the leaves of several trees, lists of as many each, and put what it returns in the structure of one.

    Args: f: returns a list of as many leaves, or a tuple of such lists, which becomes a tuple of trees.
    Raises: ValueError where the structures differ.
    """
    if are_lists(*trees):
        return f([*trees])  # what optimizers are given, without a walk
    lists, structure = flatten_alike(trees, like)
    found = f(lists)
    if isinstance(found, tuple):
        return tuple(unflatten(structure, leaves) for leaves in found)
    return unflatten(structure, found)


def unflatten(structure: Any, leaves: Sequence[Any]) -> Tree:
    """Return the tree of this structure with these leaves."""
    return pytree.tree_unflatten(list(leaves), structure)


def broadcast(prefix: Tree, structure: Any) -> list[Any] | None:
    """Return a leaf of `prefix` for every leaf of the structure; None if `prefix` is no prefix of that structure."""
    # Private to pytree; it returns None where the prefix does not fit.
    spread: list[Any] | None = pytree._broadcast_to_and_flatten(prefix, structure)
    return spread


def paths(tree: Tree) -> list[str]:
    """Return a readable path for every leaf, in the order of `leaves`: `inner.1.mu.0`."""
    return [_spell(path) for path, _ in pytree.tree_flatten_with_path(tree)[0]]


def _spell(path: Sequence[Any]) -> str:
    # Keys of NamedTuples have a name, those of dicts a key, those of lists an index.
    names = [str(getattr(k, "name", getattr(k, "key", getattr(k, "idx", k)))) for k in path]
    return ".".join(names)


def in_order(tree: Tree, like: Tree, argument: str) -> Tree:
    """Return a tree with the keys of its dicts in the order of `like`, so that the leaves of both are pairs.

    Raises: ValueError that names `argument` if it has other leaves than `like`.
    """
    if are_lists(tree, like):
        return tree  # the common case, without a walk: a step has many leaves
    wanted = flatten(like)[1]
    if flatten(tree)[1] == wanted:
        return tree
    try:
        # pytree looks values of a dict up by key, so the result has the order of `like`.
        ordered = map(lambda _, leaf: leaf, like, tree)
    except ValueError:
        ordered = None
    if ordered is None or flatten(ordered)[1] != wanted:
        theirs, ours = (f"a {type(t).__name__} with the leaves {paths(t)}" for t in (tree, like))
        raise ValueError(f"{argument}: has another structure, expected {ours}, but got {theirs}")
    return ordered


def check_real(tree: Tree, argument: str) -> None:
    """Refuse what no optimizer here can use: leaves that are not dense, real, floating tensors.

    Raises: TypeError that names `argument` and the leaf's path.
    """
    flat = leaves(tree)
    plain = {*_map(type, flat)} <= _TENSORS and {leaf.layout for leaf in flat} <= {torch.strided}
    if plain and {leaf.dtype for leaf in flat} <= _REAL:
        return  # the common case, by sets of types and dtypes: a step has many leaves
    for place, leaf in enumerate(flat):
        if not isinstance(leaf, Tensor):
            got = type(leaf).__name__
        elif leaf.layout != torch.strided:
            got = f"a tensor of layout {leaf.layout}"
        elif not leaf.is_floating_point():
            got = f"a tensor of dtype {leaf.dtype}"
        elif leaf.dtype not in _REAL:
            path, cure = paths(tree)[place] or "the root", "convert it, with x.to(torch.bfloat16) for one"
            wanted = "numbers of 16 bits or more, with which torch can calculate"
            raise TypeError(expected(argument, wanted, f"{leaf.dtype} at leaf {path!r}", cure))
        else:
            continue
        path = paths(tree)[place] or "the root"
        raise TypeError(expected(argument, f"leaf {path!r} to be a dense tensor of real floating-point numbers", got))


_REAL = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def check_tensors(tree: Tree, argument: str) -> None:
    """Refuse leaves that are no tensors, such as Python's numbers, with a TypeError that names argument and path."""
    if _only_tensors(tree):
        return
    for path, leaf in zip(paths(tree), leaves(tree), strict=True):
        if not isinstance(leaf, Tensor):
            cure = "use torch.zeros((), dtype=torch.int64) for a count"
            wanted = f"leaf {path or 'the root'!r} to be a tensor"
            raise TypeError(expected(argument, wanted, type(leaf).__name__, cure))


def _only_tensors(tree: Tree) -> bool:
    if isinstance(tree, Tensor):
        return True
    if not isinstance(tree, tuple | list | dict):
        return False
    inside = tree.values() if isinstance(tree, dict) else tree
    return {*_map(type, inside)} <= _TENSORS or all(_map(_only_tensors, inside))


def lists(*trees: Tree) -> list[list[Any]]:
    """Return the leaves of each tree."""
    return [leaves(tree) for tree in trees]


def check_updates(updates: Tree, like: Tree) -> None:
    """Refuse updates that are not real tensors of the structure and the shapes of `like`; others would be broadcast.

    Raises: TypeError as `check_real`; ValueError that names what differs.
    """
    check_real(updates, "updates")
    flat = _flat_shapes(updates)
    if flat is not None and type(updates) is type(like) and flat == _flat_shapes(like):
        return
    try:
        misfits = leaves(map(_misfit, like, updates))
    except ValueError as error:
        text = expected("updates", f"the leaves at init, {paths(like)}", f"{paths(updates)}")
        raise ValueError(text) from error
    if any(misfits):
        place = next(i for i, misfit in enumerate(misfits) if misfit)
        path, shape = paths(like)[place] or "the root", tuple(leaves(like)[place].shape)
        raise ValueError(expected("updates", f"leaf {path!r} to have its shape at init, {shape}", misfits[place]))


def _flat_shapes(tree: Tree) -> tuple[list[Any], list[torch.Size]] | None:
    """Return the keys and the shapes of a list or dict of tensors, in their order; None for other trees."""
    if type(tree) is not list and type(tree) is not dict:
        return None
    keys, flat = ([*tree], [*tree.values()]) if type(tree) is dict else ([], tree)
    return (keys, [x.shape for x in flat]) if {*_map(type, flat)} <= _TENSORS else None


def _misfit(like: Tensor, leaf: Any) -> str:
    if isinstance(leaf, Tensor) and leaf.shape == like.shape:
        return ""
    return f"{tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__


def children(tree: Tree) -> Sequence[Any]:
    """Return the trees in a tuple, list or dict; none in a tensor, nor in what holds tensors only."""
    values = [*tree.values()] if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    return () if {*_map(type, values)} <= _TENSORS else values  # without a look at each: states hold long lists


def named_tuples(tree: Tree) -> list[Any]:
    """Return the NamedTuples in a tree, outermost first."""
    deeper = [found for value in children(tree) for found in named_tuples(value)]
    return [tree, *deeper] if isinstance(tree, tuple) and hasattr(tree, "_fields") else deeper


def fields(tree: Tree, name: str) -> list[Tree]:
    """Return the values of every field of that name in the NamedTuples of a tree, outermost first."""
    return [getattr(node, name) for node in named_tuples(tree) if name in node._fields]


def instances(tree: Tree, kind: type | tuple[type, ...]) -> list[Any]:
    """Return the NamedTuples of a type, or of one of several, in a tree, outermost first."""
    return [node for node in named_tuples(tree) if isinstance(node, kind)]


def rebuilt(tree: Tree, f: Callable[[Any], Any]) -> Tree:
    """Return a tuple, list or dict with f of each tree in it; anything else as it is."""
    if isinstance(tree, dict):
        return {key: f(value) for key, value in tree.items()}
    if not isinstance(tree, tuple | list):
        return tree
    return type(tree)(*_map(f, tree)) if hasattr(tree, "_fields") else type(tree)(_map(f, tree))


def replace(tree: Tree, kind: type | tuple[type, ...], f: Callable[[Any], Any]) -> Tree:
    """Return the tree with every NamedTuple of a type, or of one of several, replaced by f of it, outermost first."""
    if isinstance(tree, kind):
        return f(tree)
    return rebuilt(tree, lambda value: replace(value, kind, f)) if children(tree) else tree


def with_leaves(tree: Tree, new: Mapping[int, Any]) -> Tree:
    """Return a tree with other leaves at some places among its leaves."""
    flat, structure = flatten(tree)
    return unflatten(structure, [new.get(place, leaf) for place, leaf in enumerate(flat)])


def with_part(tree: Tree, place: Any, part: Tree) -> Tree:
    """Return a tuple, NamedTuple or dict with another part at a place, an index or a key."""
    if isinstance(tree, dict):
        return {**tree, place: part}
    parts = (*tree[:place], part, *tree[place + 1 :])
    return type(tree)(*parts) if hasattr(tree, "_fields") else parts


class Slices(NamedTuple):
    """A stack in slices along its first dimension, a node in place of the leaf: each may be another rank's."""

    parts: tuple[Any, ...]


def sliced(tree: Tree, cut: Sequence[bool]) -> Tree:
    """Return a tree with `Slices`, views, in place of the leaves that are to be cut."""
    if not any(cut):
        return tree
    flat, structure = flatten(tree)
    return unflatten(structure, [Slices(x.unbind()) if is_cut else x for x, is_cut in zip(flat, cut, strict=True)])


def stacked(parts: list[Tensor], tree: Tree, cut: Sequence[bool]) -> Tree:
    """Return a tree of these leaves, with the stacks of those that `sliced` cut; the list is empty then."""
    flat, structure = flatten(tree)
    parts.reverse()  # what is popped is freed when its stack is made
    pairs = zip(flat, cut, strict=True)
    return unflatten(structure, [torch.stack([parts.pop() for _ in x]) if c else parts.pop() for x, c in pairs])


def spread(of_whole: Tree | Callable[[Tree], Tree], tree: Tree, argument: str) -> list[Any]:
    """Return the leaves of a tree that is like another one, such as labels, for each of its slices that of the stack.

    Args: of_whole: a function, too, which is given stacks; of those of other ranks only the dimensions fit.
    Raises: ValueError as `in_order`.
    """
    counts: dict[int, int] = {}

    def stack(x: Slices) -> Tensor:
        like: Tensor = max(x.parts, key=Tensor.numel)
        whole = like.expand(len(x.parts), *like.shape)
        counts[id(whole)] = len(x.parts)
        return whole

    like = replace(tree, Slices, stack) if instances(tree, Slices) else tree
    found = leaves(in_order(of_whole(like) if callable(of_whole) else of_whole, like, argument))
    if not counts:
        return found
    return [x for p, x in zip(leaves(like), found, strict=True) for _ in range(counts.get(id(p), 1))]


def by_path(t: Tree, prefix: str = "") -> dict[str, Any]:
    """Return the leaves of a tree by their paths.

    >>> by_path({"a": [1, 2]}, "state.")
    {'state.a.0': 1, 'state.a.1': 2}
    """
    return {f"{prefix}{path}": leaf for path, leaf in zip(paths(t), leaves(t), strict=True)}


def places_by(keys: Iterable[Any]) -> dict[Any, list[int]]:
    """Return where each key stands, the keys in the order in which they come first.

    >>> places_by("aba")
    {'a': [0, 2], 'b': [1]}
    """
    groups: dict[Any, list[int]] = {}
    for place, key in enumerate(keys):
        groups.setdefault(key, []).append(place)
    return groups


def in_groups(f: Callable[..., Sequence[Any]], keys: Iterable[Any], *lists: Sequence[Any]) -> list[Any]:
    """Return what f makes of entries of lists, where it is given those of a key together, in the order of the entries.

    >>> in_groups(lambda some: [sum(some)] * len(some), "aba", [1, 2, 3])
    [4, 2, 4]

    Args: f: of as many lists as there are, to a result for each entry. keys: one for each entry.
    """
    results: dict[int, Any] = {}
    for places in places_by(keys).values():
        results.update(zip(places, f(*([entries[i] for i in places] for entries in lists)), strict=True))
    return [results[place] for place in range(len(results))]
