"""How states move to another number of ranks.

Residual errors are cut by rank, so those of 4 ranks do not fit 2. What must not be lost is the undelivered mean,

    (1 / W) sum_r worker error_r  +  the server errors, end to end,

tensor by tensor. A `Reshape` says for a state how to add that up over the old ranks (`addends`) and how to start from
it on the new ones (`adopt`): every rank's worker error is then the mean of the old ones, and its server error is its
own piece. A `Move` takes saved states of the old ranks, as `Rows`, and returns the states of the ranks that are bound
now.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from fn import roles, tree
from fn.collectives.axis import AxisNames, axis_index, axis_size
from fn.collectives.codecs.codec import Segments
from fn.collectives.compressed import ErrorFeedbackState
from fn.collectives.feedback import Counted, DampedError, from_plain, to_plain
from fn.collectives.hierarchy import Hop
from fn.kernels.flags import temporarily
from fn.transforms import flat_layout as layouts

Tree = Any
Note = TypeVar("Note")
Addends = list[Tensor]
"""Of one part of a state; those of a state in parts are a list of these."""


class Reshape(NamedTuple):
    """How a state moves to another number of ranks.

    addends: (state of a rank, W, its rank) -> float64 tensors; added up over the ranks they do not depend on W.
    adopt: (the sum of all addends, a fresh state) -> the state of this rank on the axes that are bound now.
    """

    addends: Callable[[Tree, int, int], Tree]
    adopt: Callable[[Tree, Tree], Tree]


class Notes(threading.local, Generic[Note]):
    """Notes that an init leaves beside the state that it returns, by thread; dropped where nobody collects them."""

    _notes: list[Note] | None = None

    def collected(self) -> AbstractContextManager[list[Note]]:
        """Collect the notes of the inits that run inside of this context."""
        return temporarily(self, "_notes", list[Note]())

    def add(self, note: Note) -> None:
        """Add a note to the list that is being collected, if there is one."""
        if self._notes is not None:
            self._notes.append(note)


reshapes: Notes[tuple[Tree, Reshape]] = Notes()
"""(a state that was just made, how it moves), from each init whose state does not fit another world as it is."""

Plan = Callable[[int], list[layouts.Bucket]]
"""W -> how leaves travel among W ranks."""


def errors_reshape(leaves: Sequence[Tensor], axis: AxisNames, plan: Plan, worker: Hop, server: Hop) -> Reshape:
    """Return how an `ErrorFeedbackState` over leaves moves. worker, server: how the halves of an exchange travel.

    Where only some ranks send a tensor, and keep errors of it, its mean is over these. What others saved is NaN; on
    ranks that do not send it now errors have no elements.
    """

    def addends(state: ErrorFeedbackState, world: int, rank: int) -> Tree:
        sums: Addends = []
        for bucket, e, d in zip(plan(world), state.worker, state.server, strict=True):
            dtype, segments = leaves[bucket.leaf_indices[0]].dtype, bucket.segments
            worker_error = to_plain(e, worker.codec, worker.feedback, segments, dtype)
            sends = worker_error is None or not bool(worker_error.isnan().any())
            sums += parts_of(worker_error if sends else None, bucket)
            sums += [_age(e) * sends, torch.tensor(float(sends), dtype=torch.float64, device="cpu")]
            # A mean over W ranks lacks all of the server's error of a shard.
            server_error = to_plain(d, server.codec, server.feedback, _row_of(segments, rank), dtype)
            sums += parts_of(None if server_error is None else in_row(server_error, bucket, rank), bucket)
            sums += [_age(d) / world]
        return sums

    def adopt(total: Tree, fresh: ErrorFeedbackState) -> ErrorFeedbackState:
        world, rank, rest = axis_size(axis), int(axis_index(axis)), iter(total)
        workers, servers = [], []
        for bucket, e, d in zip(plan(world), fresh.worker, fresh.server, strict=True):
            segments = bucket.segments
            # (n,) each. Every new rank gets the mean of the old worker errors as its own, so that the new mean lacks
            # the same.
            errors, age, count = take_parts(rest, bucket), next(rest), next(rest).clamp(min=1)
            whole, server_age = take_parts(rest, bucket), next(rest).round().long()
            mean, age = errors / count.to(errors.device), (age / count).round().long()
            keeps = bool(tree.leaves(e)) and all(x.numel() for x in tree.leaves(e))
            workers.append(from_plain(mean, e, segments, worker.feedback, age) if keeps else e)
            if isinstance(d, tuple) and not d:
                servers.append(d)
            else:
                # (n,) -> (W, n / W) -> (n / W,), the shard that this rank serves now
                piece, row = whole.view(world, -1)[rank], _row_of(segments, rank)
                servers.append(from_plain(piece, d, row, server.feedback, server_age))
        return ErrorFeedbackState(tuple(workers), tuple(servers))

    return Reshape(addends, adopt)


def _row_of(segments: Segments, rank: int) -> Segments:
    return segments.row(torch.tensor(rank, dtype=torch.int64, device="cpu"))


def _age(error: Tree) -> Tensor:
    """Return the age of an error, which all ranks share; 0 for one without."""
    age = error.age.double().cpu() if isinstance(error, DampedError | Counted) else None
    # Zeros, not nothing: all ranks have to add tensors of the same shapes.
    return torch.zeros((), dtype=torch.float64, device="cpu") if age is None else age


def in_row(piece: Tensor, bucket: layouts.Bucket, rank: int) -> Tensor:
    """Return a bucket's vector (n,) in float64 with this piece as row `rank` and zeros elsewhere."""
    rows = bucket.segments.valid.shape[0]
    # (W, n / W), in float64: sums over the ranks lose no digit of a float32
    full = torch.zeros(rows, bucket.segments.row_length, dtype=torch.float64, device=piece.device)
    full[rank] = piece
    return full.view(-1)


def parts_of(vector: Tensor | None, bucket: layouts.Bucket) -> Addends:
    """Return the bucket's tensors of a vector, on the CPU; zeros for None."""
    if vector is None:
        return [torch.zeros(shape, dtype=torch.float64, device="cpu") for shape in bucket.shapes]
    return [part.double().cpu() for part in layouts.split(vector, bucket)]


def take_parts(rest: Iterator[Tensor], bucket: layouts.Bucket) -> Tensor:
    """Take the bucket's tensors from an iterator, and return its vector (n,)."""
    # `join` looks leaves up by their places among all: those of other buckets are empty here.
    leaves = {i: next(rest) for i in bucket.leaf_indices}
    none = torch.empty(0, dtype=torch.float32, device="cpu")
    return layouts.join([leaves.get(i, none) for i in range(max(bucket.leaf_indices) + 1)], bucket)


def bucket_of(
    path: str, leaf: Tensor, suffixes: Sequence[str], buckets: Sequence[layouts.Bucket]
) -> layouts.Bucket | None:
    """Return the bucket of whose vector a leaf of a state is a piece, or all; None of what is no such vector.

    Args: suffixes: how the paths of the pieces of each bucket end.
    """
    for suffix, bucket in zip(suffixes, buckets, strict=True):
        row, rows = bucket.segments.row_length, bucket.segments.valid.shape[0]
        fits = leaf.ndim == 1 and leaf.shape[0] in (row, rows * row)
        if fits and (path == suffix or path.endswith(f".{suffix}")):
            return bucket
    return None


def shards_reshape(axis: str, plan: Plan, suffixes: Sequence[str]) -> Reshape:
    """Return how a state of shards moves: pieces of the buckets' vectors, whole ones, and leaves that all ranks share.

    Args: suffixes: as for `bucket_of`.
    """

    def addends(state: Tree, world: int, rank: int) -> Tree:
        buckets, sums = plan(world), list[Tensor]()
        for path, leaf in zip(tree.paths(state), tree.leaves(state), strict=True):
            bucket = bucket_of(path, leaf, suffixes, buckets)
            # What all ranks hold alike rank 0 adds, and the others zeros, so that the sum is what they hold.
            if bucket is None:
                zeros = torch.zeros(leaf.shape, dtype=torch.float64, device="cpu")
                sums.append(leaf.double().cpu() if rank == 0 else zeros)
            elif leaf.shape[0] == bucket.segments.row_length:
                sums += parts_of(in_row(leaf, bucket, rank), bucket)
            else:
                sums += parts_of(leaf if rank == 0 else None, bucket)
        return sums

    def adopt(total: Tree, fresh: Tree) -> Tree:
        world, rank, rest = axis_size(axis), int(axis_index(axis)), iter(total)
        buckets, moved = plan(world), []
        leaves, structure = tree.flatten(fresh)
        for path, leaf in zip(tree.paths(fresh), leaves, strict=True):
            bucket = bucket_of(path, leaf, suffixes, buckets)
            value = next(rest) if bucket is None else take_parts(rest, bucket)
            if value.shape != leaf.shape:
                value = value.view(world, -1)[rank]  # (n,) -> (W, n / W) -> (n / W,), this rank's row
            moved.append(value.to(leaf))
        return tree.unflatten(structure, moved)

    return Reshape(addends, adopt)


def in_parts(
    parts: Sequence[tuple[Callable[[Tree], Tree], Reshape]], join: Callable[[Tree, list[Tree]], Tree]
) -> Reshape:
    """Return how a state moves whose parts move in different ways.

    Args: parts: (a function that takes a part out of a state, how that moves). join: (a fresh state, the moved parts)
        -> the state.
    """

    def addends(state: Tree, world: int, rank: int) -> Tree:
        return [reshape.addends(pick(state), world, rank) for pick, reshape in parts]

    def adopt(total: Tree, fresh: Tree) -> Tree:
        moved = [reshape.adopt(sums, pick(fresh)) for sums, (pick, reshape) in zip(total, parts, strict=True)]
        return join(fresh, moved)

    return Reshape(addends, adopt)


class Rows(NamedTuple):
    """What some of the `world` old ranks saved of a tensor: rows (k, ...), those of the ranks from `first` on."""

    rows: Tensor
    first: int
    world: int


class Move(NamedTuple):
    """How saved states of another number of ranks move to this one.

    notes: (a fresh state, how it moves), as `reshapes` collected them. rows: those that this rank has read. add: sums
    over the ranks that are bound now. axes: these, for messages.
    """

    notes: Sequence[tuple[Tree, Reshape]]
    rows: Rows
    add: Callable[[Tree], Tree]
    axes: Sequence[str] = ()

    def walk(self, fresh: Tree, saved: Tree) -> Tree:
        """Return a fresh state with what was saved. saved: a tree like it, with `Rows` for what is rank-local."""
        for state, reshape in self.notes:
            # By identity: an equal state elsewhere in the tree may move in another way.
            if state is fresh:
                return reshape.adopt(self._total(reshape, fresh, saved), fresh)
        has_errors = isinstance(fresh, ErrorFeedbackState) and tree.leaves(fresh)
        if has_errors or (hasattr(fresh, "_fields") and roles.is_shard(fresh)):
            text = f"its errors of the axes {[*self.axes]} belong to that one"
            raise ValueError(f"checkpoint: is of another world, and {text}")
        if isinstance(saved, Rows):
            return mean_of_rows(saved, self.add).to(fresh)
        if isinstance(fresh, Tensor):
            return saved
        keys = fresh if isinstance(fresh, dict) else range(len(fresh))
        below = [self.walk(fresh[k], saved[k]) for k in keys]
        if isinstance(fresh, dict):
            return dict(zip(keys, below, strict=True))
        return type(fresh)(*below) if hasattr(fresh, "_fields") else type(fresh)(below)

    def _total(self, reshape: Reshape, fresh: Tree, saved: Tree) -> Tree:
        def of_rank(take: Callable[[Tensor], Tensor]) -> Tree:
            return tree.map(lambda _, x: take(x.rows) if isinstance(x, Rows) else x, fresh, saved)

        rows, first, world = self.rows
        try:
            # Zeros in the shapes of the sum: a rank that has read no rows adds them, or the others would wait for it.
            nothing = of_rank(lambda rows: rows.new_zeros(rows.shape[1:]))
            total = tree.map(torch.zeros_like, reshape.addends(nothing, world, 0))
            for j in range(rows.shape[0]):
                # (k, ...) -> (...), what old rank first + j had
                of_old_rank = of_rank(lambda rows, j=j: rows[j])  # type: ignore[misc]
                share = reshape.addends(of_old_rank, world, first + j)
                total = tree.map(torch.add, total, share)
        except (RuntimeError, ValueError, AttributeError) as error:
            raise ValueError(f"state: its errors do not fit these parameters on {world} ranks: {error}") from error
        return self.add(total)


def rounds_off(saved: Iterable[Any]) -> bool:
    """Return whether some of the saved errors are stored in few bits, so that the move rounds them once more."""
    return any(isinstance(x, Rows) and x.rows.dtype in (torch.int8, torch.bfloat16) for x in saved)


def mean_of_rows(x: Rows, add: Callable[[Tree], Tree]) -> Tensor:
    """Return the mean of all old ranks' rows, in their dtype. add: sums over the ranks, which have some rows each."""
    # (k, ...) -> (...), added over the ranks; counts are rounded, for they are whole numbers
    mean: Tensor = add(x.rows.double().sum(0)) / x.world
    return mean.to(x.rows.dtype) if x.rows.is_floating_point() else mean.round().to(x.rows.dtype)
