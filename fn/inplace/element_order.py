"""Steps on tensors as they lie in memory, such as those in channels_last.

Kernels go through memory from its beginning to its end. A tensor whose dimensions lie in another order, without gaps,
is handed to a step with its dimensions in that order: a view, which is contiguous. So moments lie like their
parameter, and what travels needs no copy. Errors are vectors in the same order. It is that which a parameter had when
the state was made, all ranks have it alike, and it is saved with the errors.

It is for chains whose links do not mind the order: see `match.takes_any_order`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn.errors import expected

Tree = Any
Order = tuple[int, ...]
"""The dimensions of a tensor from the slowest to the fastest in memory; () if they are so already."""

PREFIX = "element order."
"""How the keys of orders begin in a saved state."""


def order_of(x: Tensor) -> Order:
    """Return the order of the dimensions in memory; () if it is that of the shape, or if there are gaps."""
    if x.is_contiguous():
        return ()
    sizes, strides = x.shape, x.stride()
    order = tuple(sorted(range(x.dim()), key=lambda d: (sizes[d] > 1, -strides[d], d)))
    return order if x.permute(order).is_contiguous() else ()


def in_order(tensors: Sequence[Tensor], orders: Sequence[Order]) -> list[Tensor]:
    """Return tensors with their dimensions in these orders: views, or the tensors themselves."""
    return [x.permute(order) if order else x for x, order in zip(tensors, orders, strict=True)]


def as_shaped(tensors: Sequence[Tensor], orders: Sequence[Order]) -> list[Tensor]:
    """Return what `in_order` made of tensors as they were."""
    inverse = [tuple(sorted(range(len(order)), key=order.__getitem__)) for order in orders]
    return in_order(tensors, inverse)


def read_in_order(tensors: Sequence[Tensor], orders: Sequence[Order]) -> list[Tensor]:
    """Return what vectors in these orders say, which were cut into the shapes of tensors as if they were in theirs."""
    pairs = zip(tensors, orders, strict=True)
    return as_shaped([x.reshape([x.shape[d] for d in order]) if order else x for x, order in pairs], orders)


Reorder = Callable[[Sequence[Tensor], Sequence[Order]], list[Tensor]]


def reordered(state: Tree, shapes: Sequence[Any], orders: Sequence[Order], how: Reorder) -> Tree:
    """Return a state with its lists of tensors like the params, such as moments, put in order or back.

    Args: shapes: of those tensors in the state, one per param. how: `in_order` or `as_shaped`.
    """
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        return type(state)(*(reordered(value, shapes, orders, how) for value in state))
    if isinstance(state, tuple | list):
        if [getattr(x, "shape", None) for x in state] == [*shapes]:
            return type(state)(how(state, orders))
        return type(state)(reordered(value, shapes, orders, how) for value in state)
    if isinstance(state, dict):
        return {key: reordered(value, shapes, orders, how) for key, value in state.items()}
    return state


class InOrder(NamedTuple):
    """The states and the params of all groups in order, and what they are views of.

    known: the states and the orders they were made for. places: where each param was, and its strides, at that time.
    """

    states: Tree
    params: tuple[list[Tensor], ...]
    known: tuple[Tree, Sequence[Sequence[Order]]]
    places: list[Any]

    def fits(self, states: Tree, params: Sequence[Sequence[Tensor]], orders: Sequence[Sequence[Order]]) -> bool:
        """Return whether these are still views of the states and of the params."""
        same = self.known[0] is states and self.known[1] == orders
        return same and places_of(params, orders) == self.places


def places_of(params: Sequence[Sequence[Tensor]], orders: Sequence[Sequence[Order]]) -> list[Any]:
    """Return which params are there, and where those are that are put in order."""
    found: list[Any] = []
    for each, group in zip(params, orders, strict=True):
        found += [(id(p), p.data_ptr(), p.stride()) if order else id(p) for p, order in zip(each, group, strict=True)]
    return found


def all_in_order(states: Tree, params: Sequence[Sequence[Tensor]], orders: Sequence[Sequence[Order]]) -> InOrder:
    """Return views of the states and the params of all groups."""
    views, found = [], []
    for state, each, group in zip(states, params, orders, strict=True):
        here = any(group)
        views.append(reordered(state, [p.shape for p in each], group, in_order) if here else state)
        found.append([p.detach().permute(order) if order else p for p, order in zip(each, group, strict=True)])
    return InOrder(tuple(views), tuple(found), (states, [*orders]), places_of(params, orders))


def flat(orders: Sequence[Sequence[Order]]) -> dict[str, Tensor]:
    """Return {key: order}, int64, of those that are not as in the shape."""
    return {
        f"{PREFIX}{g}.{i}": torch.tensor(order, dtype=torch.int64, device="cpu")
        for g, each in enumerate(orders)
        for i, order in enumerate(each)
        if order
    }


def restored(saved: Mapping[str, Any], groups: Sequence[Sequence[Tensor]]) -> list[tuple[Order, ...]]:
    """Return the orders that a saved state holds, for the params of these groups.

    Raises: ValueError that names the first that fits no param.
    """
    strange = {key for key in saved if key.startswith(PREFIX)}
    found: list[tuple[Order, ...]] = []
    for g, params in enumerate(groups):
        orders = []
        for i, p in enumerate(params):
            key = f"{PREFIX}{g}.{i}"
            order = tuple(saved[key].tolist()) if key in saved else ()
            if order and sorted(order) != [*range(p.dim())]:
                wanted = f"{key!r} to be an order of {p.dim()} dimensions"
                raise ValueError(expected("state_dict", wanted, f"{order}"))
            strange.discard(key)
            orders.append(order)
        found.append(tuple(orders))
    if strange:
        raise ValueError(f"state_dict: {min(strange)!r} is unexpected; it belongs to no parameter of this optimizer")
    return found
