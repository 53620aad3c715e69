"""Messages between all ranks and the owners of tensors: `to_owners`, `from_owners` and `rows_from_owners`.

Every tensor has one owner. What is sent of it is an item, a tree of tensors (1, ...): numbers, or codes of them.

    to_owners          each rank has an item of every tensor       -> its owner has the items of all ranks, W rows
    from_owners        the owner of a tensor has an item of it     -> every rank has it
    rows_from_owners   the owner of a tensor has W items, as rows  -> every rank has its own row

Each is one message from each rank to each other one, as long as the tensors that the receiver owns, or the sender. The
messages differ in length: rows of equal length would all be as long as the longest. Only registered transports, such as
MPI, carry rows of one length. On a device each large tensor is sent from where it lies and received where it stays:
messages of all of them would take the memory of the params, twice. Simulated ranks exchange all items, because vmap
knows no lengths that depend on the rank.

Ledgers count what a rank sends. Simulated ranks, which have one ledger, count the mean over the ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fn import tree
from fn.collectives import axis as axes
from fn.collectives import messages, primitives
from fn.collectives.axis import AxisNames
from fn.collectives.carriers import carrier_of
from fn.collectives.following import shared
from fn.collectives.profiling import RangeName, step_range
from fn.kernels import memory_pool

Tree = Any
Collective = Literal["all_to_all", "all_gather"]
Holders = Sequence[Sequence[int]] | None

LARGE = 1 << 16
"""Bytes from which on a device sends a tensor from where it lies, as a message of its own; smaller ones are joined."""


def to_owners(
    items: Sequence[Tree], owners: Sequence[int], axis: str, among: int = 1, holders: Holders = None
) -> list[Tree]:
    """Send each item to its owner; return the items of own tensors with a row from each rank, (W, ...).

        >>> import torch, fn
        >>> from fn.collectives.owners import to_owners
        >>> def on_rank(a, b):                      # rank 0 owns a, rank 1 owns b; here all see all
        ...     return to_owners([a[None], b[None]], [0, 1], "data")
        >>> a, b = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0], [6.0]])     # a row for each rank
        >>> fn.simulate(on_rank, "data", 2, out_dims=None)(a, b)[1]
        tensor([[5.],
                [6.]])

    Args: items: of all tensors. owners: the rank of each. axis: the axis' name. among: of how many such groups of ranks
        one has these tensors, where simulated ranks of all have them. holders: the ranks that have an item of each, its
        owner among them, where not all do; of the items of others only shapes and dtypes matter.
    Returns: an entry for each tensor: None for those of others, but under `simulate`, where ranks get all of them.
    Raises: as `all_to_all`.
    """
    size, _, transport = axes.resolve(axis)
    if transport == axes.SIMULATED:
        return _simulated(items, axis, "all_to_all", among)
    if size == 1:
        return [*items]
    flat = [tree.flatten(item) for item in items]
    of_leaves = [owner for (leaves, _), owner in zip(flat, owners, strict=True) for _ in leaves]
    of_holders = holders and [ranks for (leaves, _), ranks in zip(flat, holders, strict=True) for _ in leaves]
    columns = iter(columns_to_owners([leaf for leaves, _ in flat for leaf in leaves], of_leaves, axis, of_holders))
    rank, found = axes.own_rank(axis), []
    for (leaves, structure), owner in zip(flat, owners, strict=True):
        rows = [next(columns) for _ in leaves]
        # R tensors (1, ...) -> (R, ...); None stands for the columns of other owners
        found.append(tree.unflatten(structure, [torch.cat([*r]) for r in rows if r]) if owner == rank else None)
    return found


def columns_to_owners(
    tensors: Sequence[Tensor], owners: Sequence[int], axis: str, holders: Holders = None
) -> list[Sequence[Tensor] | None]:
    """Send each tensor to its owner; return for own tensors those of all ranks, W, which lie where they were received.

    Args: tensors: of any shape. owners, axis, holders, Returns and Raises: as for `to_owners`.
    """
    size, _, transport = axes.resolve(axis)
    if transport == axes.SIMULATED:
        # (...) -> (1, ...) -> (W, ...) -> W tensors (...)
        return [rows.unbind() for rows in _simulated([x[None] for x in tensors], axis, "all_to_all")]
    if size == 1:
        return [[x] for x in tensors]
    rank, of_owner = axes.own_rank(axis), _by_owner(tensors, owners, size)
    each = [*zip(tensors, owners, holders or [range(size)] * len(tensors), strict=True)]
    held, own = [x for x in each if rank in x[2]], [x for x in each if x[1] == rank]
    sent = _by_owner([x for x, _, _ in held], [owner for _, owner, _ in held], size)
    forms = [[x for x, _, some in own if r in some] for r in range(size)]
    rest = [iter(leaves) for leaves in _exchange(sent, forms, of_owner, axis, "all_to_all", "exchange")]
    return [[next(rest[r]) for r in some] if owner == rank else None for _, owner, some in each]


def from_owners(items: Sequence[Tree], owners: Sequence[int], axis: AxisNames, among: int = 1) -> list[Tree]:
    """Send the items of own tensors to all ranks; return those of all tensors, the same on every rank.

    Over ("local", "node") they go to the rank of the owner's local index in every node, and on within the node as they
    came.

        >>> import torch, fn
        >>> from fn.collectives.owners import from_owners
        >>> on_rank = lambda x: from_owners([x[None, :1], x[None, 1:]], [0, 1], "data")     # rank 1 owns the rest
        >>> fn.simulate(on_rank, "data", 2, out_dims=None)(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
        [tensor([[1.]]), tensor([[5., 6.]])]

    Args: items: of all tensors; of those of others only shapes and dtypes matter. owners: the rank of each, over
        several axes its index. axis: the axis' name, or two. among: as for `to_owners`.
    Raises: as `all_gather`.
    """
    every = [*items]
    found: list[Tree] = shared("owners", axis, lambda: every, lambda: _from_owners(every, owners, axis, among))
    return found


def _from_owners(items: Sequence[Tree], owners: Sequence[int], axis: AxisNames, among: int) -> list[Tree]:
    if not isinstance(axis, str):
        return _from_owners_over(items, owners, axes.names(axis))
    size, _, transport = axes.resolve(axis)
    if transport == axes.SIMULATED:
        return _of_owners(_simulated(items, axis, "all_gather", among), owners)
    if size == 1:
        return [*items]
    flat = [tree.flatten(item) for item in items]
    of_leaves = [owner for (leaves, _), owner in zip(flat, owners, strict=True) for _ in leaves]
    of_owner = _by_owner([leaf for leaves, _ in flat for leaf in leaves], of_leaves, size)
    sent = [of_owner[axes.own_rank(axis)]] * size
    return _by_item(_exchange(sent, of_owner, of_owner, axis, "all_gather", "gather"), flat, owners)


def _from_owners_over(items: Sequence[Tree], owners: Sequence[int], names: Sequence[str]) -> list[Tree]:
    *inner, outer = names
    if not inner:
        return from_owners(items, owners, outer)
    (local,) = inner
    found, in_node = [*items], [owner // axes.axis_size(outer) for owner in owners]
    here = served_here(in_node, local)
    across = [owners[i] % axes.axis_size(outer) for i in here]
    came = from_owners([items[i] for i in here], across, outer, axes.axis_size(local)) if here else []
    for i, item in zip(here, came, strict=True):
        found[i] = item
    return from_owners(found, in_node, local)


def served_here(in_node: Sequence[int], local: str) -> list[int]:
    """Return the numbers of the tensors whose owner has this rank's index in its node; simulated ranks serve all.

    Args: in_node: the owners' indices in their nodes.
    """
    if axes.is_simulated(local):
        return [*range(len(in_node))]
    rank = axes.own_rank(local)
    return [i for i, index in enumerate(in_node) if index == rank]


def rows_from_owners(items: Sequence[Tree], owners: Sequence[int], axis: str, holders: Holders = None) -> list[Tree]:
    """Send row r of the items of own tensors to rank r; return this rank's row of all tensors, (1, ...).

        >>> import torch, fn
        >>> from fn.collectives.owners import rows_from_owners
        >>> on_rank = lambda x: rows_from_owners([x, 10 * x], [0, 1], "data")       # rank 1 owns the second tensor
        >>> fn.simulate(on_rank, "data", 2)(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        [tensor([[1.],
                [2.]]), tensor([[30.],
                [40.]])]

    Args: items: of all tensors, trees of tensors (W, ...); of those of others only shapes and dtypes matter. owners,
        axis: as for `to_owners`. holders: the ranks that get a row of each, in the order of the rows, where not all do.
    Returns: an entry for each tensor; None where this rank gets no row.
    Raises: as `all_to_all`.
    """
    size, _, transport = axes.resolve(axis)
    if transport == axes.SIMULATED:
        return _of_owners(_simulated(items, axis, "all_to_all", rows=True), owners)
    if size == 1:
        return [*items]
    flat, rank = [tree.flatten(item) for item in items], axes.own_rank(axis)
    each = [*zip(flat, owners, holders or [range(size)] * len(items), strict=True)]
    held = [(leaf[:1], owner) for (leaves, _), owner, some in each if rank in some for leaf in leaves]
    # Forms of what arrives, and of all that are sent: (R, ...) -> (1, ...)
    forms = _by_owner([leaf for leaf, _ in held], [owner for _, owner in held], size)
    of_leaves = [(leaf[:1], owner) for (leaves, _), owner, _ in each for leaf in leaves]
    every = _by_owner([leaf for leaf, _ in of_leaves], [owner for _, owner in of_leaves], size)
    own = [(leaf, some) for (leaves, _), owner, some in each if owner == rank for leaf in leaves]
    # (R, ...) -> (1, ...) for each rank that gets a row
    places = [[(leaf, some.index(r)) for leaf, some in own if r in some] for r in range(size)]
    sent = [[leaf[k : k + 1] for leaf, k in of_rank] for of_rank in places]
    rest = [iter(leaves) for leaves in _exchange(sent, forms, every, axis, "all_to_all", "exchange")]
    return [
        tree.unflatten(structure, [next(rest[owner]) for _ in leaves]) if rank in some else None
        for (leaves, structure), owner, some in each
    ]


def _by_owner(tensors: Sequence[Tensor], owners: Sequence[int], size: int) -> list[list[Tensor]]:
    of_owner: list[list[Tensor]] = [[] for _ in range(size)]
    for x, owner in zip(tensors, owners, strict=True):
        of_owner[owner].append(x)
    return of_owner


def _bytes(leaves: Sequence[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in leaves)


def _exchange(
    sent: Sequence[Sequence[Tensor]], forms: Sequence[Sequence[Tensor]], every: Sequence[Sequence[Tensor]], axis: str,
    collective: Collective, name: RangeName,
) -> list[list[Tensor]]:  # fmt: skip
    """Send tensors to each rank; return what came from each.

    Args: sent: for each rank. forms: what comes from each, in shape, dtype and device. every: what each rank owns, from
        which all ranks tell the dtype of the messages and the longest of them.
    """
    size, rank = axes.axis_size(axis), axes.own_rank(axis)
    with step_range(name):
        leaves = [x for leaves in every for x in leaves]
        # by what all ranks own: one that owns nothing, and sends nothing, has to take the way of the others
        way = messages.direct(leaves, axis)
        if way is not None:
            received = [
                [*sent[r]] if r == rank else [memory_pool.empty(x.shape, x.dtype, x.device) for x in forms[r]]
                for r in range(size)
            ]
            contiguous = {p: [x.contiguous() for x in sent[p]] for p in way.peers}
            way.pass_rows(collective, contiguous, {p: received[p] for p in way.peers})
            return received
        dtypes = {x.dtype for x in leaves}
        dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
        device = next((x.device for x in leaves if x.numel()), torch.device("cpu"))
        if carrier_of(axes.resolve(axis).transport, leaves).sends_parts:
            return _in_parts(sent, forms, dtype, device, axis, collective)
        lengths = [_bytes(leaves) // dtype.itemsize for leaves in forms]
        longest = max(map(_bytes, every)) // dtype.itemsize
        rows = [messages.joined(leaves, dtype, device) for leaves in sent]
        arrived = primitives.exchange_ragged(rows, lengths, longest, axis, collective)
        return [messages.apart(row, leaves) for row, leaves in zip(arrived, forms, strict=True)]


def _in_parts(
    sent: Sequence[Sequence[Tensor]], forms: Sequence[Sequence[Tensor]], dtype: torch.dtype, device: torch.device,
    axis: str, collective: Collective,
) -> list[list[Tensor]]:  # fmt: skip
    """Do what `_exchange` does, without a message as long as all tensors together: large ones stay where they lie.

    Args: dtype: of the messages that small ones are joined in.
    """
    rank, received = axes.own_rank(axis), [[*leaves] for leaves in forms]
    received[rank] = [*sent[rank]]
    peers = [r for r in range(len(sent)) if r != rank]
    joined: dict[int, Tensor] = {}
    for leaves in (sent[p] for p in peers):
        if id(leaves) not in joined:  # mostly, all ranks get the same
            joined[id(leaves)] = messages.joined(_small(leaves), dtype, device)
    sends = {p: [joined[id(sent[p])], *(x.contiguous() for x in sent[p] if _is_large(x))] for p in peers}
    receives = {}
    for p in peers:
        # Also where nothing small comes: `pass_parts` leaves out what is empty, on both sides.
        message = torch.empty(_bytes(_small(forms[p])) // dtype.itemsize, dtype=dtype, device=device)
        large = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in forms[p] if _is_large(x)]
        receives[p] = [message, *large]
    primitives.pass_parts(sends, receives, axis, collective)
    for p, (message, *large_ones) in receives.items():
        of_large, of_small = iter(large_ones), iter(messages.apart(message, _small(forms[p])))
        received[p] = [next(of_large if _is_large(x) else of_small) for x in forms[p]]
    return received


def _is_large(x: Tensor) -> bool:
    return x.numel() * x.element_size() >= LARGE


def _small(leaves: Sequence[Tensor]) -> list[Tensor]:
    return [x for x in leaves if not _is_large(x)]


def _simulated(
    items: Sequence[Tree], axis: str, collective: Collective, among: int = 1, *, rows: bool = False
) -> list[Tree]:
    """Return all items of all simulated ranks, W rows each, and count what real ranks would send in the mean.

    Args: rows: whether items have W rows, of which each rank gets one.
    """
    size = axes.axis_size(axis)
    leaves, structure = tree.flatten([*items])
    uncounted = [_bytes(leaves) // (size if rows else 1)]  # one message on real ranks, so it is counted once

    def exchanged(some: Sequence[Tensor]) -> list[Tensor]:
        # (1, ...) or (W, ...) of each item -> (1, n) or (W, n)
        message = torch.cat([x.reshape(x.shape[0], -1) for x in some], dim=1)
        length, name = uncounted.pop() if uncounted else 0, "all_to_all" if rows else "all_gather"
        # (W, n), or (W, 1, n) where each rank sends one row to all
        received = primitives.among_simulated(message, axis, name, collective, length, among).view(size, -1)
        # (W, n) -> (W, n_i) -> (W, ...)
        parts = received.split([x.shape[1:].numel() for x in some], dim=1)
        return [part.reshape(size, *x.shape[1:]) for x, part in zip(some, parts, strict=True)]

    made: list[Tree] = tree.unflatten(structure, tree.in_groups(exchanged, [x.dtype for x in leaves], leaves))
    return made


def _of_owners(of_ranks: Sequence[Tree], owners: Sequence[int]) -> list[Tree]:
    """Return of the rows of all ranks (W, ...) those that the owners sent, (1, ...)."""
    return [tree.map(lambda x, o=o: x[o : o + 1], rows) for rows, o in zip(of_ranks, owners, strict=True)]


def _by_item(
    received: Sequence[Sequence[Tensor]], items: Sequence[tuple[Sequence[Tensor], Any]], owners: Sequence[int]
) -> list[Tree]:
    """Return the item of each owner from what came of each rank. items: their leaves and structures."""
    rest = [iter(leaves) for leaves in received]
    return [
        tree.unflatten(structure, [next(rest[owner]) for _ in leaves])
        for (leaves, structure), owner in zip(items, owners, strict=True)
    ]
