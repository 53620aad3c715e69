"""Whole tensors where every rank has rows of them, as FSDP2 keeps them: `unsharded`, a combinator.

    this rank's piece of every tensor
      | to its owner, exactly or in codes with feedback         -> whole tensors, on one rank each
      | inner's update of the own tensors
      | to the rank that has the piece, exactly or in codes     -> this rank's piece of every update

It is for links that need whole matrices, such as Muon's iterations. Momentum, weight decay and all else that goes
element by element stays on the pieces, in front of it and behind it:

    chain(trace(0.95), unsharded(orthogonalize(), "shard"), scale_by_learning_rate(0.02))

Of a stack of matrices, such as the experts of a layer, owners have slices where `inner` takes each matrix by itself.
What lies on the ranks by slices already, as FSDP2 divides it, stays there.

Pieces are those of `torch.chunk`: each rank has ceil(n / W) of n rows, the last ones have what is left, or none. They
travel padded to the same rows, as FSDP2 sends its own, and pieces of simulated ranks are padded, too, with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import roles, tree
from fn.arguments import check_kind
from fn.base import Phase, Transform, UpdateFn, as_updates, check_state, facts_of, has_phase, missing, update_in
from fn.collectives import axis as axes
from fn.collectives.agreement import check_agreement, describe, device_of
from fn.collectives.axis import axis_size
from fn.collectives.codecs.codec import Codec, Segments, segmented
from fn.collectives.compressed import ErrorFeedbackState, check_vector, encode
from fn.collectives.feedback import Feedback
from fn.collectives.hierarchy import Hop
from fn.collectives.owners import rows_from_owners, to_owners
from fn.compiling import own_code
from fn.errors import expected
from fn.facts import Facts, merged
from fn.kernels import flags
from fn.kernels.tracing import cached_plan, new_empty
from fn.transforms.mask_and_partition import Label, Labels, in_parts
from fn.transforms.owned import EVERY, Costs, OwnedState, both_ways, check_by_tensor, check_owners, form_of, mine, plan
from fn.transforms.sharded import show_failures

Tree = Any


class Boxes(NamedTuple):
    """The boxes that each rank has of a tensor that is divided in several dimensions; they do not overlap.

    starts, sizes: of each rank a number for each dimension.
    """

    starts: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]


class Shards(NamedTuple):
    """How tensors are divided over the ranks of an axis. `fn.Optimizer` makes it from DTensors.

    axis: the name of the axis; or a tuple with that of each leaf, where they are divided over different ranks.
    shapes: of the whole tensors, in the order of the leaves of the params; None: W times the rows of each piece.
    dims: the dimension in which each is cut, or its `Boxes`, None for a tensor that every rank has whole; None in place
        of the tuple: rows of all that have dimensions.
    labels: of the whole tensors, which say in which parts the inner transform sees them; None: as they are.
    beside: axes whose ranks skip a step together, where these are more than those of the axis, such as a whole mesh.
    """

    axis: str | tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...] | None = None
    dims: tuple[int | Boxes | None, ...] | None = None
    labels: tuple[str, ...] | None = None
    beside: tuple[str, ...] = ()

    def subset(self, places: Sequence[int]) -> Shards:
        """Return those of some leaves; over one axis by its name."""
        shapes, dims, labels = (
            None if x is None else tuple(x[i] for i in places) for x in (self.shapes, self.dims, self.labels)
        )
        axis = self.axis if isinstance(self.axis, str) else tuple(self.axis[i] for i in places)
        axis = axis[0] if len({*axis}) == 1 and not isinstance(axis, str) else axis
        return Shards(axis, shapes, dims, labels, self.beside)  # type: ignore[arg-type]


class Unsharded(NamedTuple):
    """The rule of a step of `unsharded`. axes: over which the tensors are divided. inner: the inner update."""

    axes: tuple[str, ...]
    inner: UpdateFn
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return this rank's pieces of the updates, and the next state."""
        return self.run(updates, state, params)


def unsharded(
    inner: Transform,
    shards: Shards | str,
    *,
    codec: Codec | None = None,
    feedback: Feedback | None = None,
    gather: Codec | None = None,
    cost: Costs = None,
) -> Transform:
    """Run `inner` on whole tensors that lie in pieces: one exchange collects the pieces, one returns them.

    Each tensor is brought to one rank, its owner; owners are balanced as those of `fn.owned` are. For tensors of N
    elements in all, a rank sends N / W elements there and as many back, less what it owns.

        >>> import torch, fn
        >>> tx = fn.unsharded(fn.orthogonalize(), "shard")
        >>> g = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))
        >>> step = lambda rows: tx.update(fn.Phase.WARMUP)([rows], tx.init([rows]), None)[0][0]
        >>> u = fn.simulate(step, "shard", 2)(g.view(2, 2, 2))               # two of the rows on each rank
        >>> alone = fn.orthogonalize().update(fn.Phase.WARMUP)([g], (), None)[0][0]
        >>> torch.equal(u.view(4, 2), alone)
        True

    Args:
        inner: what needs whole tensors. Of the params it sees the shapes, and NaN in place of numbers, so weight decay
            belongs behind it. It may communicate over another axis, with the ranks that own the same tensors there; its
            state is kept once.
        shards: how the tensors are divided. A name: by rows over that axis, evenly.
        codec: how pieces travel to the owners but in the warm-up; None is exactly.
        gather: how updates travel back but in the warm-up; None is exactly.
        feedback: how a rank keeps the errors of what it sends, both ways; None is `classic()`.
        cost: as for `fn.owned`, of the whole tensors.
    Returns: a transform with the phases of `inner` and an `OwnedState`, whose `errors` are those of pieces on their
        way to the owners and of updates on their way back. Under `simulate` all of it is a rank's own. Its facts name
        the axis in `shards`, by which `fn.skip_nonfinite` and `fn.outer` skip a step on all ranks of the axis.
    Raises: TypeError or ValueError that names the argument; ValueError from `init`, if the ranks disagree, or for
        pieces that are not those of the shapes.

    Paper: the exchange is that of the code of Ahn et al., Dion (arXiv 2504.05295), for Muon on FSDP2's shards.
    Differs: that sends no codes, and a message for every W matrices; this is one message for all.
    """
    shards = Shards(shards) if isinstance(shards, str) else shards
    if not isinstance(shards, Shards):
        raise TypeError(expected("shards", "the name of one axis, or fn.Shards", f"{shards!r}"))
    every: Any = (shards.axis,) if isinstance(shards.axis, str) else shards.axis
    if not isinstance(every, tuple) or not all(isinstance(axis, str) for axis in every):
        raise TypeError(expected("shards", "the name of one axis, or fn.Shards with names of axes", f"{shards!r}"))
    names = tuple(sorted({*every}))  # in one order on all ranks, for they send
    check_by_tensor(inner, names, "fn.unsharded")
    inner = inner if shards.labels is None else in_parts(inner, shards.labels)
    ways = [both_ways(axis, codec, feedback, gather) for axis in names]
    _, to_owner, to_pieces = both_ways("", codec, feedback, gather)  # over any axis
    facts = facts_of(inner)

    def layout(pieces: Tree) -> _Layout:
        leaves, structure = tree.flatten(pieces)
        over = every * len(leaves) if isinstance(shards.axis, str) else every
        cuts = _cuts(shards, over, leaves)
        # On "meta", for a plan needs shapes only, and whole tensors would take memory.
        shapes = [x.shape if cut is None else cut.shape for x, cut in zip(leaves, cuts, strict=True)]
        forms = [torch.empty(shape, dtype=torch.float32, device="meta") for shape in shapes]
        made = _layout(structure, cuts, facts.in_slices(tree.unflatten(structure, forms)), over)
        owners = [EVERY] * len(made.cuts)
        for axis in names:
            places = [i for i, cut in enumerate(made.cuts) if cut is not None and made.axes[i] == axis]
            # Owners are among those that have something of a tensor, for the others neither send nor get any of it.
            holders = _holders(made.cuts, places)
            divided = [i for i, cut in enumerate(made.of_leaves) if cut is not None and over[i] == axis]
            stacks = [made.counts[i] > 0 for i in divided]
            planned = plan([forms[i] for i in divided], axis_size(axis), cost, stacks, holders)
            for i, owner in zip(places, planned, strict=True):
                owners[i] = owner
        return made._replace(owners=tuple(owners))

    def own(leaves: Sequence[Tensor], form: _Layout) -> Tree:
        kept = [*leaves]
        for axis in names:
            places = [i for i, name in enumerate(form.axes) if name == axis]
            of_axis = mine([leaves[i] for i in places], [form.owners[i] for i in places], axis)
            for i, x in zip(places, of_axis, strict=True):
                kept[i] = x
        return tree.unflatten(form.inner, kept)

    def init(params: Tree) -> OwnedState:
        tree.check_real(params, "params")
        params = tree.map(Tensor.detach, params)
        form = layout(params)
        wholes = form.slices(params)
        leaves, cuts, owners = [*wholes], form.cuts, form.owners
        for axis, (exact, *_) in zip(names, ways, strict=True):
            places = [i for i, name in enumerate(form.axes) if name == axis]
            shapes = [None if cut is None else (*cut.shape, cut.dim) for cut in (cuts[i] for i in places)]
            fields: dict[str, Any] = {**describe((to_owner, to_pieces, inner)), "shapes of whole tensors": shapes}
            fields |= {"owners": tuple(owners[i] for i in places), "paths of the params": tree.paths(params)}
            check_agreement(axis, fields, device_of(params))
            # pieces (n / W, ...) -> whole params (n, ...) at their owners: init sends them, so all ranks must call it
            wholes, _ = _gathered(wholes, form, exact, ())
        state = inner.init(own(wholes, form))
        roles.check_same_params(state)
        worker, server = [], []
        for leaf, cut, owner, axis in zip(leaves, cuts, owners, form.axes, strict=True):
            here: Any = cut if _travels(cut) else None
            # errors of this rank's piece on its way there: (width,), of a rank that has none (0,)
            wide = _width(here, to_owner) * _holds(here, axis) if here else 0
            worker.append(to_owner.feedback.init(leaf.new_zeros(wide)) if here and not to_owner.exact else ())
            # errors of all R pieces on their way back: (R width,) at the owner, (0,) elsewhere
            wide = len(here.holders) * _width(here, to_pieces) * _is_here(owner, axis) if here else 0
            server.append(to_pieces.feedback.init(leaf.new_zeros(wide)) if here and not to_pieces.exact else ())
        errors = ErrorFeedbackState(() if to_owner.exact else tuple(worker), () if to_pieces.exact else tuple(server))
        return OwnedState(state, errors, (), torch.tensor(owners, dtype=torch.int64, device="cpu"))

    def step(phase: Phase) -> UpdateFn:
        inner_phase = phase if has_phase(inner, phase) else Phase.WARMUP
        move = update_in(inner, inner_phase)

        def update(updates: Tree, state: OwnedState, params: Tree, /) -> tuple[Tree, OwnedState]:
            check_state(state, OwnedState)
            tree.check_real(updates, "updates")
            form = layout(updates)
            wholes, (worker, server) = form.slices(updates), state.errors
            leaves = [*wholes]
            check_owners(state, form.owners)
            coded = [phase is not Phase.WARMUP and axis_size(axis) > 1 for axis in names]
            # pieces (n / W, ...) on each rank -> whole tensors (n, ...) at their owners, (0, ...) elsewhere
            for (exact, there, _), in_codes in zip(ways, coded, strict=True):
                wholes, worker = _gathered(wholes, form, there if in_codes else exact, worker)
            matrices = own(wholes, form)
            # The params are not brought together. NaN in their place shows up in the updates of a link that reads them.
            kinds = {(x.dtype, x.device): x for x in tree.leaves(matrices)}
            nans = {kind: x.new_full((), math.nan) for kind, x in kinds.items()}
            inner_params = tree.map(lambda x: nans[x.dtype, x.device].expand(x.shape), matrices)
            with flags.unassumed():  # own tensors may be finite where another rank's are not
                moves, inside = move(matrices, state.inner, inner_params)
                # A guard inside skips at an owner only; its NaN travels in the pieces, so that all ranks skip.
                moves, inside = show_failures(as_updates(moves, inner_params), state.inner, inside)
            # updates (n, ...) at their owners -> the pieces (n / W, ...) of each rank
            pieces = tree.leaves(moves)
            for (exact, _, back), in_codes in zip(ways, coded, strict=True):
                pieces, server = _divided(pieces, leaves, form, back if in_codes else exact, server)
            errors = ErrorFeedbackState(worker, server)
            return form.joined(pieces, updates), state._replace(inner=inside, errors=errors)

        # torch.compile gives up after 8 compilations of one code object, which all these updates would share.
        return Unsharded(names, move, own_code(update))

    has_local = has_phase(inner, Phase.LOCAL)
    local = step(Phase.LOCAL) if has_local else missing(Phase.LOCAL, "a transform of whole tensors")
    # Inner needs whole tensors and gets them, so links around this need not know.
    outside = merged(facts._replace(whole=()), Facts(shards=shards.beside or names))
    return Transform(init, step(Phase.WARMUP), step(Phase.COMPRESSED), local, inner.needs_warmup, facts=outside)


def labelled(
    shards: Shards | str, named: Callable[[Tree], Tree], labels: Labels
) -> tuple[Tree | Callable[[Tree], Tree], Callable[[str], Shards]]:
    """Return labels for `partition` of pieces, made of whole tensors where their shapes are known; label -> its shards.

    Args: named: what `fn.transforms.mask_and_partition.hidden_and_other` returned for these labels.
    """
    check_kind("shards", shards, (str, Shards), "the name of one axis, fn.Shards or None")
    if isinstance(shards, str) or shards.shapes is None:
        axis = shards if isinstance(shards, str) else shards.axis

        def of_pieces(params: Tree) -> Tree:
            made = named(params)
            if parts := [label for label in tree.leaves(made) if isinstance(label, Label)]:
                wanted, cure = "whole tensors where their shapes are not known", "give fn.Shards with the shapes"
                raise ValueError(expected("labels", wanted, f"{parts[0]!r}", cure))
            return made

        return of_pieces, lambda label: Shards(axis)
    whole: Tree = [torch.empty(shape, dtype=torch.float32, device="meta") for shape in shards.shapes]
    if labels is not None and not callable(labels):
        structure = tree.flatten(labels)[1]
        whole = tree.unflatten(structure, whole) if not isinstance(labels, tuple) else whole
    labels_of_pieces = named(whole)
    flat = tree.leaves(labels_of_pieces)
    # The whole tensors are shown in parts, behind the exchange; what goes element by element sees pieces as they are.
    divided = shards._replace(labels=tuple(flat) if any(isinstance(name, Label) for name in flat) else None)
    pieces = tree.map(str, labels_of_pieces)
    return pieces, lambda label: divided.subset([i for i, name in enumerate(flat) if name == label])


class _Cut(NamedTuple):
    """How a tensor is divided. shape: of the whole. dim: in which it is cut. rows: of a piece, at most.

    holders: the ranks, R, that have pieces of it.
    """

    shape: torch.Size
    dim: int
    rows: int
    holders: Sequence[int]

    @property
    def rest(self) -> tuple[int, ...]:
        """Return the shape of a row."""
        return (*self.shape[: self.dim], *self.shape[self.dim + 1 :])

    @property
    def elements(self) -> int:
        """Return how many elements a piece has, at most."""
        return self.rows * math.prod(self.rest)

    def flat(self, x: Tensor, pieces: int, width: int) -> Tensor:
        """Return a tensor as (pieces, width), zeros behind its end; pieces: 1 for a piece, R for the whole."""
        # (..., n, ...) -> (n, ...): the dimension that is divided comes first
        x = x.movedim(self.dim, 0)
        lacking = pieces * self.rows - x.shape[0]
        if lacking:
            # (n, ...) -> (pieces rows, ...): the last pieces have fewer rows, or none
            x = torch.cat([x, x.new_zeros((lacking, *x.shape[1:]))])
        flat = x.reshape(pieces, self.elements)  # (pieces rows, ...) -> (pieces, elements)
        lacking = width - flat.shape[1]
        # (pieces, elements) -> (pieces, width): blocks of a codec are whole
        return torch.cat([flat, flat.new_zeros((pieces, lacking))], dim=1) if lacking else flat

    def tensor(self, flat: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the tensor of a shape that `flat` made (pieces, width) of, without what it padded."""
        table = flat[:, : self.elements].reshape(flat.shape[0] * self.rows, *self.rest)  # (pieces rows, ...)
        # (pieces rows, ...) -> (n, ...) -> (..., n, ...)
        return table[: shape[self.dim]].movedim(0, self.dim)

    def slices(self) -> list[Cut]:
        """Return how the slices of a stack are divided; one that lies on one rank is not cut."""
        if self.dim == 0:
            return [_BoxCut(self.shape[1:], Boxes((), ()), (k // self.rows,), 0) for k in range(self.shape[0])]
        return [_Cut(self.shape[1:], self.dim - 1, self.rows, self.holders)] * self.shape[0]

    def lie(self, rank: int) -> range | None:
        """Return which slices lie on a rank; None where it has a piece of each."""
        ends = (min(r * self.rows, self.shape[0]) for r in (rank, rank + 1))
        return None if self.dim else range(*ends)


class _BoxCut(NamedTuple):
    """How a tensor is divided into boxes. shape: of the whole. dim: the boxes. Methods are those of `_Cut`.

    holders: the ranks whose boxes have elements. elements: how many a piece has, at most.
    """

    shape: torch.Size
    dim: Boxes
    holders: tuple[int, ...]
    elements: int

    def flat(self, x: Tensor, pieces: int, width: int) -> Tensor:
        """Return a tensor as (pieces, width), zeros behind the end of each row; pieces: as for `_Cut`."""
        if pieces == 1 and x.numel() == width:
            return x.reshape(1, width)  # (n_r, m_r) -> (1, width), in its memory
        made = new_empty(x, (pieces, width))  # fresh pages would cost more than the copies
        for row, box in zip(made, [x] if pieces == 1 else self._boxes(x), strict=True):
            row[: box.numel()].view(box.shape).copy_(box)  # (n_r, m_r) -> (width,)
            if box.numel() < width:
                row[box.numel() :].zero_()
        return made

    def tensor(self, flat: Tensor, shape: Sequence[int]) -> Tensor:
        """Return the tensor of a shape that `flat` made (pieces, width) of, without what it padded."""
        if len(flat) == 1:
            return flat[0, : math.prod(shape)].reshape(shape)
        whole = new_empty(flat, self.shape)
        for row, box in zip(flat, self._boxes(whole), strict=True):
            box.copy_(row[: box.numel()].view(box.shape))  # (width,) -> (n_r, m_r)
        return whole

    def _boxes(self, x: Tensor) -> list[Tensor]:
        """Return views of what each rank that has some of it has of a whole tensor."""
        places = ((self.dim.starts[r], self.dim.sizes[r]) for r in self.holders)
        return [x[tuple(slice(i, i + n) for i, n in zip(start, size, strict=True))] for start, size in places]

    def slices(self) -> list[_BoxCut]:
        """Return how the slices of a stack are divided."""
        return _box_slices(self.shape, self.dim)

    def lie(self, rank: int) -> range:
        """Return which slices lie on a rank."""
        start = self.dim.starts[rank][0]
        return range(start, start + self.dim.sizes[rank][0])


Cut = _Cut | _BoxCut


@cached_plan
def _box_cut(shape: torch.Size, boxes: Boxes) -> _BoxCut:
    holders = tuple(r for r, size in enumerate(boxes.sizes) if math.prod(size))
    return _BoxCut(shape, boxes, holders, max(map(math.prod, boxes.sizes)))


@cached_plan
def _box_slices(shape: torch.Size, boxes: Boxes) -> list[_BoxCut]:
    made = []
    for k in range(shape[0]):
        has = [i[0] <= k < i[0] + n[0] for i, n in zip(*boxes, strict=True)]
        sizes = (n[1:] if here else (0, *n[2:]) for here, n in zip(has, boxes.sizes, strict=True))
        made.append(_box_cut(shape[1:], Boxes(tuple(start[1:] for start in boxes.starts), tuple(sizes))))
    return made


def _travels(cut: Cut | None) -> bool:
    """Return whether several ranks have pieces. What one of them has whole stays there, as what all have does."""
    return cut is not None and len(cut.holders) > 1


def _holds(cut: Cut, axis: str) -> bool:
    """Return whether this rank has a piece; all simulated ranks do."""
    return axes.is_simulated(axis) or axes.own_rank(axis) in cut.holders


def _width(cut: Cut, hop: Hop) -> int:
    """Return how many elements of a piece travel."""
    return -(-cut.elements // hop.codec.align) * hop.codec.align


def _codec(cut: Cut, hop: Hop, rows: int) -> Codec:
    """Return the codec for so many pieces, one in each row."""
    return _for_pieces(hop.codec, rows, _width(cut, hop), cut.elements)


class _Layout(NamedTuple):
    """How pieces travel. Of stacks whose slices have owners, cuts and owners have an entry for each slice.

    axes: of each cut, that over which it is divided. of_leaves: how each leaf is divided. counts: of each, how many
    slices it has; 0: it is in none. lie: of each, which slices lie here; None where this rank has a piece of each.
    outer, inner: the structures of the pieces, and of what the inner transform sees.
    """

    cuts: list[Cut | None]
    axes: list[str]
    owners: tuple[int, ...]
    of_leaves: list[Cut | None]
    counts: list[int]
    lie: list[range | None]
    outer: Any
    inner: Any

    def travelling(self, axis: str) -> list[int]:
        """Return the places of what several ranks of an axis have pieces of."""
        return [i for i, cut in enumerate(self.cuts) if self.axes[i] == axis and _travels(cut)]

    def slices(self, pieces: Tree) -> list[Tensor]:
        """Return the pieces, of stacks their slices; those that lie on other ranks have no elements."""
        made: list[Tensor] = []
        for x, count, lie in zip(tree.leaves(pieces), self.counts, self.lie, strict=True):
            # (e / W, m, n) -> e slices, of which e / W lie here; (e, m / W, n) -> e slices (m / W, n)
            none = [] if lie is None else [x.new_empty((0, *x.shape[2:]))]
            made += [x] if not count else x.unbind() if lie is None else none * lie.start + [*x.unbind()]
            made += [] if lie is None else none * (count - lie.stop)
        return made

    def joined(self, slices: Sequence[Tensor], pieces: Tree) -> Tree:
        """Return the tree of pieces, with stacks of slices. pieces: for their shapes."""
        rest, made = iter(slices), []
        for x, count, lie in zip(tree.leaves(pieces), self.counts, self.lie, strict=True):
            parts = [next(rest) for _ in range(max(1, count))]
            here = parts if lie is None else parts[lie.start : lie.stop]
            made.append(parts[0] if not count else torch.stack(here) if here else parts[0].new_empty(x.shape))
        return tree.unflatten(self.outer, made)


def _layout(structure: Any, cuts: Sequence[Cut | None], stacks: Sequence[bool], over: Sequence[str]) -> _Layout:
    """Return how leaves travel, without their owners. Args: stacks: which leaves are stacks. over: the axis of each."""
    made = _Layout([], [], (), [], [], [], structure, None)
    for cut, is_stack, axis in zip(cuts, stacks, over, strict=True):
        of_slices, lie = [cut], None
        if cut is not None and is_stack and not axes.is_simulated(axis):
            of_slices, lie = [*cut.slices()], cut.lie(axes.own_rank(axis))
        elif is_stack and isinstance(cut, _Cut):  # simulated ranks have as many slices each, and none of others
            of_slices = [None] if cut.dim == 0 else [*cut.slices()]
        made.counts.append(len(of_slices) if is_stack and cut is not None and len(of_slices) > 1 else 0)
        made.of_leaves.append(cut if of_slices != [None] else None)
        made.cuts.extend(of_slices)
        made.axes.extend([axis] * len(of_slices))
        made.lie.append(lie)
    seen = tree.unflatten(structure, [tree.Slices((0,) * n) if n else 0 for n in made.counts])
    return made._replace(inner=tree.flatten(seen)[1])


@cached_plan
def _for_pieces(codec: Codec, rows: int, width: int, elements: int) -> Codec:
    return segmented(codec, Segments((width,), torch.full((rows, 1), elements, dtype=torch.int64, device="cpu")))


def _cuts(shards: Shards, over: Sequence[str], leaves: Sequence[Tensor]) -> list[Cut | None]:
    """Return how leaves are divided. Args: over: the axis of each. Raises: ValueError for pieces that do not fit."""
    dims = shards.dims or tuple(0 if leaf.ndim else None for leaf in leaves)
    shapes = shards.shapes or (None,) * len(leaves)
    if not len(leaves) == len(over) == len(dims) == len(shapes):
        wanted, got = f"one for each of {len(leaves)} tensors", f"{len(shapes)} shapes and {len(dims)} dimensions"
        raise ValueError(expected("shards", wanted, got))
    cuts, bound = list[Cut | None](), dict[str, tuple[int, str, int | None]]()
    for axis in dict.fromkeys(over):
        world, _, transport = axes.resolve(axis)
        bound[axis] = world, transport, None if transport == axes.SIMULATED else axes.own_rank(axis)
    for i, (leaf, shape, dim, axis) in enumerate(zip(leaves, shapes, dims, over, strict=True)):
        world, transport, here = bound[axis]
        if shape is None or transport == axes.ALONE:  # whoever is alone has whole tensors
            shape = (leaf.shape[0] * world, *leaf.shape[1:]) if leaf.ndim else ()  # (n / W, ...) -> (n, ...)
        if isinstance(dim, Boxes) and transport == axes.ALONE:
            dim = 0  # the only rank has all of its rows
        if isinstance(dim, Boxes):
            cuts.append(_box_cut(torch.Size(shape), dim))
            if leaf.shape != dim.sizes[here or 0]:
                wanted = f"tensor {i} to be {dim.sizes[here or 0]}, this rank's piece of {tuple(shape)}"
                raise ValueError(expected("updates", wanted, f"{tuple(leaf.shape)}"))
            continue
        cut = None if dim is None else _Cut(torch.Size(shape), dim, -(-shape[dim] // world), range(world))
        piece = list(shape)
        if cut is not None:
            # Simulated ranks have equal shapes, so their last piece is padded; of real ranks it is shorter, or empty.
            piece[cut.dim] = cut.rows if here is None else min(max(shape[cut.dim] - here * cut.rows, 0), cut.rows)
        if list(leaf.shape) != piece:
            wanted = f"tensor {i} to be {tuple(piece)}, this rank's piece of {tuple(shape)}"
            raise ValueError(expected("updates", wanted, f"{tuple(leaf.shape)}"))
        cuts.append(cut)
    return cuts


def _holders(cuts: Sequence[Cut | None], places: Sequence[int]) -> list[Sequence[int]]:
    return [cut.holders for cut in (cuts[i] for i in places) if cut is not None]


def _is_here(owner: int, axis: str) -> bool:
    """Return whether this rank keeps what an owner has; all simulated ranks do."""
    return owner == EVERY or axes.resolve(axis).transport == axes.SIMULATED or owner == axes.own_rank(axis)


def _gathered(
    leaves: Sequence[Tensor], form: _Layout, hop: Hop, errors: tuple[Tree, ...]
) -> tuple[list[Tensor], tuple[Tree, ...]]:
    """Bring whole tensors of an axis to their owners; those of others have no elements. Return the next errors, too."""
    # A tensor that is not divided stays in its place: every rank has it, and takes its step.
    items, after, wholes = [], [*errors], [*leaves]
    places, cuts, owners = form.travelling(hop.axis), form.cuts, form.owners
    for i in places:
        cut: Any = cuts[i]
        width = _width(cut, hop)
        if not _holds(cut, hop.axis):
            codec = None if hop.exact else _codec(cut, hop, 1)
            items.append(form_of(codec, 1, width, leaves[i].dtype, leaves[i].device))  # not sent
            continue
        piece = cut.flat(leaves[i], 1, width)  # (1, width)
        if hop.exact:
            items.append(piece)
            continue
        # (1, width) -> (width,), as the errors lie
        check_vector(piece.view(-1), errors[i], hop.codec.align, "updates")
        payload, after[i] = encode(_codec(cut, hop, 1), hop.feedback, piece, errors[i])
        items.append(payload)
    ends = [owners[i] for i in places], hop.axis
    for i, rows in zip(places, to_owners(items, *ends, holders=_holders(cuts, places)), strict=True):
        cut = cuts[i]
        if rows is None:
            # (n, ...) -> (0, ...): it stays a matrix, as which an inner link may check it
            wholes[i] = leaves[i].new_empty((0, *cut.shape[1:]))
            continue
        flat = rows if hop.exact else _codec(cut, hop, len(cut.holders)).decode(rows)  # (R, width), of R ranks
        # (R, width) -> (n, ...); decoded codes may be wider than what was sent
        wholes[i] = cut.tensor(flat.to(leaves[i].dtype), cut.shape)
    return wholes, tuple(after)


def _divided(
    moves: Sequence[Tensor], leaves: Sequence[Tensor], form: _Layout, hop: Hop, errors: tuple[Tree, ...]
) -> tuple[list[Tensor], tuple[Tree, ...]]:
    """Bring pieces of updates to the ranks of an axis. Return the next errors, too. leaves: for their shapes."""
    items, after, pieces = [], [*errors], [*moves]
    places, cuts, owners = form.travelling(hop.axis), form.cuts, form.owners
    for i, (axis, of_one) in enumerate(zip(form.axes, cuts, strict=True)):
        # of what a rank has nothing of, nothing: of another shape than what the owner's transform made for it
        if axis == hop.axis and of_one is not None and not _holds(of_one, axis):
            pieces[i] = moves[i].new_empty(leaves[i].shape)
    for i in places:
        cut: Any = cuts[i]
        width, ranks = _width(cut, hop), len(cut.holders)
        codec = None if hop.exact else _codec(cut, hop, ranks)
        if not _is_here(owners[i], hop.axis):
            # of another owner's tensor: as long as the row that arrives
            items.append(form_of(codec, ranks, width, moves[i].dtype, moves[i].device))
            continue
        table = cut.flat(moves[i], ranks, width)  # (R, width), a row for each rank that has some of it
        if codec is None:
            items.append(table)
            continue
        # (R, width) -> (R width,), as the errors lie
        check_vector(table.view(-1), errors[i], hop.codec.align, "updates")
        # Not as a worker: these are results that an owner passes on, and profiles count what codes lose of gradients.
        payload, after[i] = encode(codec, hop.feedback, table, errors[i], worker=False)
        items.append(payload)
    ends = [owners[i] for i in places], hop.axis
    for i, row in zip(places, rows_from_owners(items, *ends, holders=_holders(cuts, places)), strict=True):
        cut = cuts[i]
        if row is None:
            continue
        flat = row if hop.exact else _codec(cut, hop, 1).decode(row)  # (1, width)
        # (1, width) -> (n / W, ...), this rank's piece
        pieces[i] = cut.tensor(flat.to(moves[i].dtype), leaves[i].shape)
    return pieces, tuple(after)
