"""Averages in another basis: `in_basis`, and two bases, `tiles` and `dct`, the cosines of tiles.

>>> import torch, fn
>>> [part.tolist() for part in fn.tiles(2).into(torch.arange(6).view(2, 3))]
[[[0, 1, 3, 4]], [[2, 5]]]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.arguments import check_is_transform, check_whole
from fn.base import Phase, Transform, UpdateFn, check_params, check_state, combine, facts_of, links_of, unchanged
from fn.collectives.agreement import check_order
from fn.collectives.axis import AxisNames, names
from fn.collectives.codecs.pickling import invalidates
from fn.compiling import memoized
from fn.errors import expected
from fn.facts import Facts, merged
from fn.kernels.layout import scale_dtype
from fn.kernels.tracing import cached_plan, is_concrete, is_recorded, new_empty
from fn.transforms.average import CompressedAverage

Tree = Any


@invalidates({"into", "back"}, {"all_into", "all_back"})
class Basis(NamedTuple):
    """How a tensor is written in other coordinates, chunk by chunk.

    into: x of any shape -> a list of parts (chunks, length), at least one; a part may have no chunks. The number of
        parts and their shapes depend on the shape of x only.
    back: (parts, shape) -> the tensor of this shape whose parts they are.
    all_into, all_back: the same for lists of tensors, of their parts and of their shapes, in fewer operations: the
        numbers are those of `into` and `back`. None: tensor by tensor.

    `_replace` of into or back also sets the last two to None, unless they are given: they belong to the old pair.
    """

    into: Callable[[Tensor], list[Tensor]]
    back: Callable[[Sequence[Tensor], torch.Size], Tensor]
    all_into: Callable[[Sequence[Tensor]], list[list[Tensor]]] | None = None
    all_back: Callable[[Sequence[Sequence[Tensor]], Sequence[torch.Size]], list[Tensor]] | None = None

    def parts_of(self, tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        """Return the parts of each tensor."""
        return [self.into(x) for x in tensors] if self.all_into is None else self.all_into(tensors)

    def tensors_of(self, parts: Sequence[Sequence[Tensor]], shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Return the tensors of given shapes whose parts these are."""
        if self.all_back is None:
            return [self.back(of_one, shape) for of_one, shape in zip(parts, shapes, strict=True)]
        return self.all_back(parts, shapes)


def in_basis(basis: Basis, sync: Transform | Callable[[int], Transform], *, axis: AxisNames | None = None) -> Transform:
    """Average the updates in another basis, tensor by tensor; the errors live there as well.

        u = B^-1 sync(B u_r)

        >>> import torch, fn
        >>> one_number = lambda n: fn.compressed_average("data", fn.top_k(1, n), fn.off(), servers=False)
        >>> tx = fn.in_basis(fn.dct(4), one_number)
        >>> step = lambda g: tx.update(fn.Phase.COMPRESSED)(g, tx.init(g), g)[0]
        >>> g = torch.tensor([[1.0, 2.0, 3.0, 4.0], [3.0, 4.0, 5.0, 6.0]])                       # of two ranks
        >>> fn.simulate(step, "data", 2)(g)[0]                    # of four cosines each sent the largest, its mean
        tensor([3.5000, 3.5000, 3.5000, 3.5000])

    Args:
        basis: such as `tiles(64)`. What it makes of a tensor are parts (chunks, length), which `sync` sees as leaves.
        sync: what averages them, such as `compressed_average(axis, codec)`. Or a function: length -> transform, which
            then averages the parts whose chunks are that long, so that a codec can have blocks of a chunk each:
            `lambda n: compressed_average(axis, top_k(1 / 32, n))`. There is an exchange for each length.
        axis: what the transforms that a function returns communicate over, for combinators that have to know (see
            `fn.Facts`); what a transform says itself need not be repeated.
    Returns: a transform with the phases and the state of `sync`; where that is a function, the state is a tuple of its
        transforms' states, the shortest chunks first, and a phase that one of them lacks raises when it is run.
    Raises: TypeError if basis is no basis, or sync neither a transform nor a function that returns one, the latter from
        `init`.

    Paper: Peng et al., DeMo (arXiv 2411.19870); Sarfi et al., SparseLoCo (arXiv 2508.15706), whose basis is `tiles`.
    """
    if not isinstance(basis, Basis):
        raise TypeError(expected("basis", "a basis, such as fn.tiles(64)", f"{basis!r}"))
    of_length = _of_length(sync) if callable(sync) else None
    inner: Any = sync if of_length is None else _by_length(of_length)
    check_is_transform("sync", inner)

    def reads_params(phase: Phase, parts: list[list[Tensor]]) -> bool:
        """Tell whether it may look at the numbers of params, and so needs them in the basis."""
        if of_length is None:
            return _reads_params(inner.composed(phase))
        return any(_reads_params(of_length(n).composed(phase)) for n in _places(tree.leaves(parts)))

    def init(params: Tree) -> Tree:
        tree.check_real(params, "params")
        # parts (chunks, length) as leaves; detached, so that no state holds the graph of the params
        parts = basis.parts_of([p.detach() for p in tree.leaves(params)])
        shown = [inner] if of_length is None else [of_length(n) for n in _places(tree.leaves(parts))]
        check_order(merged(*map(facts_of, shown)).axes, params)
        return inner.init(parts)

    def compose(phase: Phase, updates_of: list[UpdateFn]) -> UpdateFn:
        (average,) = updates_of

        def update(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
            check_params(params)
            tree.check_updates(updates, params)
            leaves, structure = tree.flatten(tree.in_order(updates, params, "updates"))
            shapes, parts = [u.shape for u in leaves], basis.parts_of(leaves)
            params_parts = basis.parts_of(tree.leaves(params)) if reads_params(phase, parts) else parts
            held = [parts, params_parts]  # handed over by pop: a name here would keep them through the average
            del updates, leaves, parts, params_parts  # so that nobody holds them while the mean needs memory
            mean, state = average(held.pop(0), state, held.pop())  # lists of parts (chunks, length), a list per tensor
            return tree.unflatten(structure, basis.tensors_of(mean, shapes)), state

        return update

    facts = Facts(() if axis is None else names(axis), ("in_basis",), silent=axis is None and inner is not sync)
    tx = combine([inner], init, compose, facts)
    for name in ("warmup_update", "compressed_update", "local_update"):
        if getattr(inner, name) is unchanged:  # then there is nothing to transform there and back for
            tx = tx._replace(**{name: unchanged})
    return tx


def _reads_params(update: UpdateFn) -> bool:
    return not all(isinstance(link.update, CompressedAverage) for link in links_of(update))


def _of_length(sync: Callable[[int], Transform]) -> Callable[[int], Transform]:
    """Return a function that asks once for the transform of a length, and refuses what is none."""

    @memoized
    def made(length: int) -> Transform:
        transform = sync(length)
        check_is_transform(f"sync({length})", transform)
        return transform

    return made


def _places(parts: Sequence[Tensor]) -> dict[int, list[int]]:
    """Return where the parts of each length are, the shortest first."""
    # 0 for a part without chunks, which takes part in no exchange
    lengths = [part.shape[1] if part.numel() else 0 for part in parts]
    return {n: [i for i, length in enumerate(lengths) if length == n] for n in sorted({*lengths} - {0})}


def _by_length(made: Callable[[int], Transform]) -> Transform:
    """Return a transform of lists of parts (chunks, length), which gives those of each length to one of its own."""

    def init(params: Tree) -> Tree:
        leaves = tree.leaves(params)
        return tuple(made(length).init([leaves[i] for i in chosen]) for length, chosen in _places(leaves).items())

    def update_in(phase: Phase) -> UpdateFn:
        def update(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
            check_state(state, tuple)
            (leaves, structure), params_leaves, after = tree.flatten(updates), tree.leaves(params), []
            # Those without numbers are in no exchange, and are returned as new tensors.
            out = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) if not x.numel() else x for x in leaves]
            for (length, chosen), part_state in zip(_places(leaves).items(), state, strict=True):
                parts = [leaves[i] for i in chosen], part_state, [params_leaves[i] for i in chosen]
                means, part_state = made(length).composed(phase)(*parts)
                for i, mean in zip(chosen, means, strict=True):
                    out[i] = mean
                after.append(part_state)
            return tree.unflatten(structure, out), tuple(after)

        return update

    warmup, compressed, local = map(update_in, Phase)
    return Transform(init, warmup, compressed, local, facts=Facts())


def tiles(tile: int) -> Basis:
    """Cut matrices into tile x tile squares and vectors into runs of `tile` numbers; each is a chunk, row by row.

    Squares stand in the order of their rows, then of their columns. Sides that `tile` does not divide end in shorter
    tiles, so a matrix has up to four parts, and no part is padded:

        whole squares, then those cut short on the right, those cut short at the bottom, and the corner

    A tensor of three or more dimensions counts as the matrix of its first one by all others, a number as a vector. Only
    the order of the numbers changes.

    Args: tile: the side of a square, a whole number of at least 1.
    Returns: a basis for `in_basis`.
    Raises: TypeError if tile is no whole number; ValueError if it is less than 1.

    Paper: Peng et al., DeMo (arXiv 2411.19870); Sarfi et al., SparseLoCo (arXiv 2508.15706).
    Differs: their chunks are as long as the largest divisor of a side up to `tile`, so that of a prime length each
        element is a chunk of its own, and everything is sent.
    """
    tile = _checked(tile)
    return _basis(_sides, lambda side: tile, cosines=False)


def _sides(shape: torch.Size) -> tuple[int, int]:
    """Return rows and columns of the matrix that a tensor counts as; a vector is one row."""
    return (1, shape.numel()) if len(shape) < 2 else (shape[0], shape.numel() // max(1, shape[0]))


def _runs(side: int, tile: int) -> list[tuple[int, int, int]]:
    """Return how a side is cut, as (first element, pieces, length of each): whole ones, then a shorter one."""
    whole, rest = divmod(side, tile)
    return [run for run in ((0, whole, tile), (whole * tile, 1, rest)) if run[1] * run[2]]


def dct(tile: int | Callable[[int], int]) -> Basis:
    """Write tensors as cosines: cut them into tiles, and take the orthonormal DCT-II of each along all its sides.

        z[q] = sqrt(2 / s) sum_j x[j] cos(pi (2 j + 1) q / (2 s)),   z[0] / sqrt(2),   s the side of the tile

    A tensor of any number of dimensions is cut along each of them. A side that `tile` does not divide ends in a shorter
    tile, so that d dimensions give up to 2^d parts. What is smooth has few large coefficients.

    Args: tile: the side of a tile, a whole number of at least 1; or a function: length of a dimension -> side of its
        tiles.
    Returns: a basis for `in_basis`. Coefficients are float64 for float64 and float32 for all others.
    Raises: TypeError if tile is neither a whole number nor a function; ValueError if it is less than 1; what a function
        returns is looked at when a tensor is cut.

    Paper: Peng et al., DeMo (arXiv 2411.19870), section 3.1.
    Differs: a tile is as long as it is said to be, and the last one shorter; theirs are as long as the largest divisor
        of a side, which of a prime is 1.
    """
    if not callable(tile):
        _checked(tile)
    side_of = (lambda side: _checked(tile(side))) if callable(tile) else (lambda side: int(tile))
    return _basis(lambda shape: tuple(shape) or (1,), side_of, cosines=True)


def _checked(tile: int) -> int:
    check_whole("tile", tile, 1)
    return int(tile)


def _basis(frame: Callable[[torch.Size], tuple[int, ...]], side_of: Callable[[int], int], *, cosines: bool) -> Basis:
    """Return a basis of tiles, as they are or as their cosines.

    Equal tiles of all tensors of a dtype and a device are copied into one table, and multiplied together. What is
    traced, batched or differentiated goes tensor by tensor, through the same lines.

    Args: frame: shape -> that of the view which is cut. side_of: length of a dimension -> side of its tiles.
    """

    @cached_plan
    def regions_of(shape: torch.Size) -> list[_Region]:
        cuts = [_runs(side, side_of(side)) for side in frame(shape)] if shape.numel() else [[]]
        return [_Region(*zip(*region, strict=True)) for region in itertools.product(*cuts)]

    def all_into(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        return _by_kind(into_alike, tensors)

    def all_back(parts: Sequence[Sequence[Tensor]], shapes: Sequence[torch.Size]) -> list[Tensor]:
        return _by_kind(back_alike, [of_one[0] for of_one in parts], parts, shapes)

    def into_alike(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
        like, dtype = tensors[0], scale_dtype(tensors[0]) if cosines else tensors[0].dtype
        regions = [regions_of(x.shape) for x in tensors]

        def chunks(some: Sequence[_Region], views: Sequence[Tensor]) -> list[Tensor]:
            table = new_empty(like, (sum(region.chunks for region in some), *some[0].sides), dtype)  # (N, sides...)
            rows = _pieces(table, [region.chunks for region in some])
            _copy([row.view(view.shape) for row, view in zip(rows, views, strict=True)], views)
            if cosines:
                _transform(table, inverse=False)
            return [row.flatten(1) for row in rows]  # (chunks, sides...) -> (chunks, length)

        flat = [region for of_one in regions for region in of_one]
        # the views that are cut: the matrix for tiles, all dimensions for cosines
        views = [r.view(x.reshape(frame(x.shape))) for x, of_one in zip(tensors, regions, strict=True) for r in of_one]
        made = iter(tree.in_groups(chunks, [region.sides for region in flat], flat, views))
        # A basis gives at least one part: of a tensor without elements it has no chunks.
        return [[next(made) for _ in of_one] or [new_empty(like, (0, 1), dtype)] for of_one in regions]

    def back_alike(
        first: Sequence[Tensor], parts: Sequence[Sequence[Tensor]], shapes: Sequence[torch.Size]
    ) -> list[Tensor]:
        like, regions = first[0], [regions_of(shape) for shape in shapes]

        def tiles_of(some: Sequence[_Region], parts: Sequence[Tensor]) -> Sequence[Tensor]:
            if not cosines:
                return parts
            table = new_empty(like, (sum(region.chunks for region in some), *some[0].sides))  # (N, sides...)
            rows = _pieces(table, [region.chunks for region in some])
            _copy(rows, [part.reshape(row.shape) for row, part in zip(rows, parts, strict=True)])
            _transform(table, inverse=True)
            return rows

        flat = [region for of_one in regions for region in of_one]
        # without those that have no chunks
        chunks = [part for of_one, some in zip(parts, regions, strict=True) for part in of_one[: len(some)]]
        made = iter(tree.in_groups(tiles_of, [region.sides for region in flat], flat, chunks))
        numbers = [shape.numel() for shape in shapes]
        vector = new_empty(like, (sum(numbers),))  # all tensors, end to end
        tensors = [x.view(shape) for x, shape in zip(_pieces(vector, numbers), shapes, strict=True)]
        places = [r.view(x.view(frame(x.shape))) for x, of_one in zip(tensors, regions, strict=True) for r in of_one]
        _copy(places, [next(made).reshape(place.shape) for place in places])
        return tensors

    return Basis(lambda x: all_into([x])[0], lambda parts, shape: all_back([parts], [shape])[0], all_into, all_back)


BATCH_OF_CPU, BATCH = 1 << 18, 1 << 26
"""Elements that are multiplied together: on a CPU they stay in a cache, on others the product takes 256 MiB."""


def _pieces(x: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """Cut a tensor along its first dimension; where gradients are taken, nobody may write into what `split` returns."""
    return [x.narrow(0, end - n, n) for n, end in zip(lengths, itertools.accumulate(lengths), strict=True)]


def _copy(to: Sequence[Tensor], of: Sequence[Tensor]) -> None:
    """Write tensors over others; those that lie alike without gaps, such as tiles of vectors, in one launch."""
    gapless: tuple[list[Tensor], list[Tensor]] = [], []
    for x, numbers in zip(to, of, strict=True):
        if is_concrete(x, numbers) and not is_recorded([numbers]) and x.is_contiguous() and numbers.is_contiguous():
            gapless[0].append(x.view(-1))
            gapless[1].append(numbers.view(-1))
        else:
            x.copy_(numbers)
    if gapless[0]:
        torch._foreach_copy_(*gapless)


def _by_kind(f: Callable[..., list[Any]], tensors: Sequence[Tensor], *others: Sequence[Any]) -> list[Any]:
    """Return f(tensors, others) of those that are alike in dtype and device, and of others one by one; in order."""
    together = is_concrete(*tensors) and not is_recorded(tensors)
    keys = [(x.dtype, x.device) if together else i for i, x in enumerate(tensors)]
    return tree.in_groups(f, keys, tensors, *others)


class _Region(NamedTuple):
    """Equal tiles that are neighbours in a tensor: for each dimension the first element, their number and length."""

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    sides: tuple[int, ...]

    @property
    def chunks(self) -> int:
        """Return the number of tiles."""
        return math.prod(self.counts)

    def view(self, x: Tensor) -> Tensor:
        """Return a view of these tiles of the tensor, (counts..., sides...)."""
        for dim, (start, count, side) in enumerate(zip(*self, strict=True)):
            # each dimension becomes two, (count, side)
            x = x.narrow(2 * dim, start, count * side).unflatten(2 * dim, (count, side))
        # (count, side, count, side, ...) -> (count, count, ..., side, side, ...)
        return x.permute([*range(0, x.ndim, 2), *range(1, x.ndim, 2)])


def _transform(table: Tensor, *, inverse: bool) -> None:
    """Write the cosines of tiles (N, sides...) over them; inverse: tiles over their cosines."""
    several = max(1, (BATCH_OF_CPU if table.device.type == "cpu" else BATCH) // table[0].numel())
    for first in range(0, table.shape[0], several):
        tiles = x = table.narrow(0, first, min(several, table.shape[0] - first))
        *inner, last = x.shape[1:]
        for i, side in enumerate(inner):
            matrix = _cosines(side, x.dtype, x.device)
            rows = x.reshape(-1, side, math.prod(x.shape[i + 2 :]))  # this side in the middle: one product for all
            # (side, side) -> (rows, side, side), with a stride of 0 along the rows
            x = torch.bmm((matrix if inverse else matrix.T).expand(rows.shape[0], side, side), rows).view(x.shape)
        matrix = _cosines(last, x.dtype, x.device)
        # The last side is that of rows in memory, so one product does all tiles: (N others, last) (last, last).
        tiles.copy_(torch.mm(x.reshape(-1, last), matrix.T if inverse else matrix).view(x.shape))


@cached_plan
def _cosines(side: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the matrix (side, side) whose columns are the cosines: x @ it is the transform of x, it is orthonormal."""
    # On the host in float64, rounded once: so it is orthonormal to the last digit, and alike for all devices.
    j = torch.arange(side, dtype=torch.float64, device="cpu")
    # (side, 1) by (side,) -> (side, side)
    matrix = torch.cos(math.pi * (2 * j[:, None] + 1) * j / (2 * side)) * math.sqrt(2 / side)
    matrix[:, 0] *= math.sqrt(0.5)
    return matrix.to(device=device, dtype=dtype)
