"""What a state says whatever the number of ranks, and how it is put into the layout of another number.

Errors are cut by rank, so a checkpoint of 4 ranks does not fit 2. What must not be lost is the undelivered mean,

    (1 / W) sum_r worker error_r  +  the server errors, end to end,

tensor by tensor. A `Reshape` says for a state how to add that up over the old ranks (`addends`) and how to start from
it on the new ones (`adopt`): every rank's worker error is then the mean of the old ones, its server error its own
piece.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fn import tree
from fn.collectives.axis import axis_index, axis_size
from fn.collectives.compressed import ErrorFeedbackState
from fn.collectives.feedback import age_of, from_plain, to_plain
from fn.collectives.hierarchy import Hop
from fn.transforms import flat_layout as layouts

Tree = Any
Note = TypeVar("Note")
Orders = Sequence[tuple[int, ...]]
Addends = list[Tensor]
"""Of one part of a state; those of a state in parts are a list of these."""


class Reshape(NamedTuple):
    """How a state moves to another number of ranks.

    addends: (state of a rank, W, its rank, orders) -> float64 tensors; added up over the ranks they do not depend on W.
        orders: the dimensions of each leaf, the slowest first, where vectors hold its elements in another order than
        that of its shape, as version 0.2.0 saved them; () elsewhere.
    adopt: (the sum of all addends, a fresh state) -> the state of this rank on the axes that are bound now.
    """

    addends: Callable[[Tree, int, int, Orders], Tree]
    adopt: Callable[[Tree, Tree], Tree]


class Notes(threading.local, Generic[Note]):
    """What an init has to say beside the state that it returns, collected by thread; dropped if nobody listens."""

    _found: list[Note] | None = None

    @contextmanager
    def collected(self) -> Iterator[list[Note]]:
        """Collect what is said inside."""
        before, self._found = self._found, []
        try:
            yield self._found
        finally:
            self._found = before

    def say(self, note: Note) -> None:
        """Tell whoever listens."""
        if self._found is not None:
            self._found.append(note)



reshapes: Notes[tuple[Tree, Reshape]] = Notes()
"""(a state that was just made, how it moves), from each init whose state does not fit another world as it is."""


Plan = Callable[[int], list[layouts.Bucket]]
"""W -> how leaves travel among W ranks."""


def errors_reshape(
    leaves: Sequence[Tensor], axis: str, plan: Plan, worker: Hop, server: Hop
) -> Reshape:
    """Return how an `ErrorFeedbackState` over leaves moves. worker, server: how the halves of an exchange travel."""

    def addends(state: ErrorFeedbackState, world: int, rank: int, orders: Orders) -> Tree:
        found: Addends = []
        for bucket, e, d in zip(plan(world), state.worker, state.server, strict=True):
            dtype, at = leaves[bucket.leaf_indices[0]].dtype, bucket.segments
            sent = to_plain(e, worker.codec, worker.feedback, at, dtype)
            found += parts_of(None if sent is None else sent.double() / world, bucket, orders)
            own = to_plain(
                d, server.codec, server.feedback, at.row(torch.tensor(rank, dtype=torch.int64, device="cpu")), dtype
            )
            found += parts_of(None if own is None else in_row(own, bucket, rank), bucket, orders)
            found += [_age(e, rank), _age(d, rank)]
        return found

    def adopt(total: Tree, fresh: ErrorFeedbackState) -> ErrorFeedbackState:
        world, rank, rest = axis_size(axis), int(axis_index(axis)), iter(total)
        workers, servers = [], []
        for bucket, e, d in zip(plan(world), fresh.worker, fresh.server, strict=True):
            at = bucket.segments
            sent, own = take_parts(rest, bucket), take_parts(rest, bucket)
            ages = [next(rest).long() for _ in range(2)]
            workers.append(e if isinstance(e, tuple) and not e else from_plain(sent, e, at, worker.feedback, ages[0]))
            if isinstance(d, tuple) and not d:
                servers.append(d)
            else:
                row, mine = at.row(torch.tensor(rank, dtype=torch.int64, device="cpu")), own.view(world, -1)[rank]
                servers.append(from_plain(mine, d, row, server.feedback, ages[1]))
        return ErrorFeedbackState(tuple(workers), tuple(servers))

    return Reshape(addends, adopt)


def _age(error: Tree, rank: int) -> Tensor:
    """Return an error's age as rank 0 adds it, and nothing as the others do."""
    age = age_of(error) if rank == 0 else None
    return torch.zeros((), dtype=torch.float64, device="cpu") if age is None else age.double().cpu()


def in_row(piece: Tensor, bucket: layouts.Bucket, rank: int) -> Tensor:
    """Return a bucket's vector (n,) in float64 with this piece as row `rank` and zeros elsewhere."""
    rows = bucket.segments.valid.shape[0]
    full = torch.zeros(rows, bucket.segments.row_length, dtype=torch.float64, device=piece.device)
    full[rank] = piece
    return full.view(-1)


def parts_of(vector: Tensor | None, bucket: layouts.Bucket, orders: Orders) -> Addends:
    """Return the bucket's tensors of a vector, on the CPU; zeros for None. orders: see `Reshape`."""
    if vector is None:
        return [torch.zeros(shape, dtype=torch.float64, device="cpu") for shape in bucket.shapes]
    parts = [part.double().cpu() for part in layouts.split(vector, bucket)]
    return [read_in_order(x, orders[i]) for i, x in zip(bucket.leaf_indices, parts, strict=True)] if orders else parts


def read_in_order(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Return a tensor of the shape of x, contiguous, whose elements lie in x in another order of dimensions.

        >>> x = torch.tensor([[1, 2, 3], [4, 5, 6]])    # columns, one after the other
        >>> read_in_order(x, (1, 0))
        tensor([[1, 3, 5],
                [2, 4, 6]])
    """
    if not order:
        return x
    inverse = sorted(range(len(order)), key=order.__getitem__)
    return x.reshape([x.shape[d] for d in order]).permute(inverse).contiguous()


def take_parts(rest: Iterator[Tensor], bucket: layouts.Bucket) -> Tensor:
    """Return the next tensors of an iterator, as many as a bucket has, as its vector (n,)."""
    leaves = {i: next(rest) for i in bucket.leaf_indices}
    none = torch.empty(0, dtype=torch.float32, device="cpu")
    return layouts.join([leaves.get(i, none) for i in range(max(bucket.leaf_indices) + 1)], bucket)


def shards_reshape(axis: str, plan: Plan, suffixes: Sequence[str]) -> Reshape:
    """Return how a state of shards moves: vectors that belong to a bucket are pieces, all else is the same everywhere.

    Args: suffixes: how the paths of the pieces of each bucket end.
    """

    def bucket_of(path: str, leaf: Tensor, buckets: list[layouts.Bucket]) -> layouts.Bucket | None:
        for suffix, bucket in zip(suffixes, buckets, strict=True):
            fits = leaf.ndim == 1 and leaf.shape[0] == bucket.segments.row_length
            if fits and (path == suffix or path.endswith(f".{suffix}")):
                return bucket
        return None

    def addends(state: Tree, world: int, rank: int, orders: Orders) -> Tree:
        buckets, found = plan(world), list[Tensor]()
        for path, leaf in zip(tree.paths(state), tree.leaves(state), strict=True):
            bucket = bucket_of(path, leaf, buckets)
            if bucket is None:
                zeros = torch.zeros(leaf.shape, dtype=torch.float64, device="cpu")
                found.append(leaf.double().cpu() if rank == 0 else zeros)
            else:
                found += parts_of(in_row(leaf, bucket, rank), bucket, orders)
        return found

    def adopt(total: Tree, fresh: Tree) -> Tree:
        world, rank, rest = axis_size(axis), int(axis_index(axis)), iter(total)
        buckets, found = plan(world), []
        leaves, structure = tree.flatten(fresh)
        for path, leaf in zip(tree.paths(fresh), leaves, strict=True):
            bucket = bucket_of(path, leaf, buckets)
            value = next(rest) if bucket is None else take_parts(rest, bucket).view(world, -1)[rank]
            found.append(value.to(leaf))
        return tree.unflatten(structure, found)

    return Reshape(addends, adopt)


def vectors_reshape(axis: str, plan: Plan) -> Reshape:
    """Return how a tuple moves that has for each bucket a vector (n,) which all ranks hold alike, or ()."""

    def addends(state: Tree, world: int, rank: int, orders: Orders) -> Tree:
        pairs = zip(state, plan(world), strict=True)
        return [parts_of(v if rank == 0 else None, b, orders) if isinstance(v, Tensor) else [] for v, b in pairs]

    def adopt(total: Tree, fresh: Tree) -> Tree:
        triples = zip(total, fresh, plan(axis_size(axis)), strict=True)
        return tuple(take_parts(iter(t), b).to(f) if isinstance(f, Tensor) else f for t, f, b in triples)

    return Reshape(addends, adopt)


def in_parts(
    parts: Sequence[tuple[Callable[[Tree], Tree], Reshape]], join: Callable[[Tree, list[Tree]], Tree]
) -> Reshape:
    """Return how a state moves whose parts move each in its way.

    Args: parts: (what takes a part out of a state, how it moves). join: (a fresh state, the parts) -> the state.
    """

    def addends(state: Tree, world: int, rank: int, orders: Orders) -> Tree:
        return [reshape.addends(pick(state), world, rank, orders) for pick, reshape in parts]

    def adopt(total: Tree, fresh: Tree) -> Tree:
        moved = [reshape.adopt(each, pick(fresh)) for each, (pick, reshape) in zip(total, parts, strict=True)]
        return join(fresh, moved)

    return Reshape(addends, adopt)
