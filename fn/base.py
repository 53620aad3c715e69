"""The types that everything is made of: `Phase`, `Transform`, and how transforms compose.

A `Transform` is a NamedTuple of pure functions. `init` makes a state from parameters; each of the three
updates maps (updates, state, params) to (updates, state). They differ in what the ranks send to each
other: full precision in the warm-up, codes in the compressed phase, nothing in the local one.

    >>> import torch, fn
    >>> tx = fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(0.1))
    >>> params = {"w": torch.ones(2)}
    >>> state = tx.init(params)
    >>> updates, state = tx.update(fn.Phase.WARMUP)({"w": torch.tensor([1.0, -2.0])}, state, params)
    >>> fn.apply_updates(params, updates)["w"]
    tensor([0.9000, 1.1000])
"""

from __future__ import annotations

import numbers
from collections.abc import Callable, Sequence
from functools import reduce
from inspect import unwrap
from operator import getitem
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fn import roles, tree
from fn.compiling import compilable, memoized, own_code
from fn.errors import expected
from fn.phases import NewParams as NewParams
from fn.phases import Part as Part
from fn.phases import Phase as Phase
from fn.phases import Round as Round
from fn.phases import check_round

Tree = Any


class UpdateFn(Protocol):
    """(updates, state, params) -> (updates, state), without side effects."""

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the next updates and the next state."""
        ...


class Step(NamedTuple):
    """An update that says what it computes, so that an adapter can find kernels for a chain that holds it.

    rule: a NamedTuple of hyper-parameters; its type is the kind, such as `fn.transforms.adam.Adam`. run: the update.
    check: what `run` refuses of its state, for whoever takes the step by kernels: (state, read) -> None, where `read`
        returns a 0-d tensor where its number can be read. A step by kernels that forgot it would be taken in silence.
    """

    rule: Any
    run: UpdateFn
    check: Callable[[Tree, Callable[[Tensor], Tensor]], None] | None = None

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return what the update returns."""
        return self.run(updates, state, params)

    def __deepcopy__(self, memo: dict[int, Any]) -> Step:
        """Return the step itself: a copied lr in `rule` would no longer be the one that `run` closes over."""
        return self


class Chained(NamedTuple):
    """The update of a chain: those of its links, one after the other."""

    links: tuple[UpdateFn, ...]

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the updates of the last link, and the states of all."""
        check_state(state, tuple)
        if len(state) != len(self.links):
            wanted = f"an entry for each of the {len(self.links)} links, as init of the same chain returned"
            raise ValueError(expected("state", wanted, f"{len(state)}"))
        after = []
        for link, link_state in zip(self.links, state, strict=True):
            if isinstance(updates, NewParams) and not _hands_on(link):
                wanted = "what returns new params, such as fn.outer, to be the last link"
                raise ValueError(expected("links", wanted, f"{name_of(link)} behind it"))
            updates, link_state = link(updates, link_state, params)
            after.append(link_state)
        return updates, tuple(after)


class Guarded(NamedTuple):
    """The update of `skip_nonfinite`, whose state has that of `inner` in its first field.

    inner: the update that is guarded. looks: whether what it returns is looked at; in local steps nothing is. run: the
    guarded update.
    """

    inner: UpdateFn
    looks: bool
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return what the guarded update returns."""
        return self.run(updates, state, params)


class SideBySide(NamedTuple):
    """The update of several trees, each by an update of its own. run: all of them, as one step."""

    updates: tuple[UpdateFn, ...]
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the updates and the states of all trees."""
        return self.run(updates, state, params)


class Facts(NamedTuple):
    """What a transform says of itself, for combinators and adapters that cut what it works on into pieces.

    axes: the names of the axes that it communicates over.
    whole: the names of its links that need whole tensors: their norms, shapes, rows or tiles. (): it works element by
        element, so that it can be given pieces. An average in codes counts as such: each piece has its own scales.
    local_params: whether the ranks go to params of their own between exchanges.
    silent: whether one of its links says nothing, so that it may communicate over any axis.
    unclamped: whether a frozen second moment divides codes without a `max_step`, so that a step may be of any size.

    >>> import fn
    >>> fn.chain(fn.average("data"), fn.scale_by_adam(), fn.scale_by_shape()).facts
    Facts(axes=('data',), whole=('scale_by_shape',), local_params=False, silent=False, unclamped=False)
    """

    axes: tuple[str, ...] = ()
    whole: tuple[str, ...] = ()
    local_params: bool = False
    silent: bool = False
    unclamped: bool = False


class Transform(NamedTuple):
    """A pure state-transition: how a state starts, and how it moves in each phase.

    init: params -> state. Params is any tree of tensors. The keys of its dicts keep the order that they have here,
        because what travels as one vector has no keys; those of updates need not.
    warmup_update, compressed_update, local_update: (updates, state, params) -> (updates, state). The state
        has the same structure, shapes and dtypes in every phase. A phase that a transform does not have is
        `missing(...)`.
    needs_warmup: the phases that a warm-up step must come before, because they use what it leaves in the state, such
        as a second moment that is frozen. `fn.Optimizer` begins with one then, whatever its schedule says.
    rounds: the update of a `Round`, or of a `Part` of one, where params are exchanged. None: a round is its phase.
    facts: what it says of itself. None: nothing, so that it counts as one that needs whole tensors.
    """

    init: Callable[[Tree], Tree]
    warmup_update: UpdateFn
    compressed_update: UpdateFn
    local_update: UpdateFn
    needs_warmup: frozenset[Phase] = frozenset()
    rounds: Callable[[Round | Part], UpdateFn] | None = None
    facts: Facts | None = None

    def update(self, phase: Phase | Round) -> UpdateFn:
        """Return the update of a phase or a round, as a function of which `torch.compile` counts compilations apart.

        Raises: ValueError if the transform does not have that phase, so that a schedule that does not fit
            is refused before anything moves; TypeError or ValueError for a round of what are no fragments.
        """
        return compilable(self.composed(phase))

    def composed(self, phase: Phase | Round | Part) -> UpdateFn:
        """Return the update of a phase, a round or a part of one as it is composed. Raises: as `update`."""
        found = _found(self, phase)
        if isinstance(found, _Missing):
            has = [p.name for p in Phase if has_phase(self, p)]
            raise ValueError(f"phase: {phase} was asked for, but {found.owner} has only {', '.join(has)}")
        return found


def _found(transform: Transform, phase: Phase | Round | Part) -> UpdateFn:
    """Return the update of a phase, a round or a part of one, also one that is missing."""
    if isinstance(phase, Round):
        check_round(phase)
    if not isinstance(phase, Phase) and transform.rounds is not None:
        return transform.rounds(phase)
    if isinstance(phase, Part):
        return _found(transform, phase.of) if phase.kind == "local" else unchanged
    found: UpdateFn = getattr(transform, f"{Phase(getattr(phase, 'phase', phase)).value}_update")
    return found


class _Missing(NamedTuple):
    phase: Phase
    owner: str

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        raise ValueError(f"phase: {self.owner} has no {self.phase.name} phase")


def missing(phase: Phase, owner: str) -> UpdateFn:
    """Return the update of a phase that `owner` does not have: it raises ValueError when called.

    Raises: TypeError if the arguments are not a phase and the name of its owner, in this order.
    """
    if not isinstance(phase, Phase) or not isinstance(owner, str):
        got = f"missing({phase!r}, {owner!r})"
        raise TypeError(expected("phase, owner", "a phase and a name", got, "write missing(Phase.LOCAL, 'my method')"))
    return _Missing(phase, owner)


def has_phase(transform: Transform, phase: Phase) -> bool:
    """Tell whether a transform has a phase."""
    return not isinstance(getattr(transform, f"{phase.value}_update"), _Missing)


def check_is_transform(argument: str, value: Any) -> None:
    """Raise a TypeError that names the argument unless a value is a transform; a function that makes one is not."""
    if not hasattr(value, "warmup_update"):
        found = getattr(value, "__name__", type(value).__name__)
        raise TypeError(expected(argument, "a transform, such as fn.scale_by_adam()", found))


def check_number(argument: str, value: Any) -> None:
    """Raise a TypeError that names the argument unless a value is a number; text from a configuration file is not.

    Nor is one that `torch.func.vmap` batches, for it is several.
    """
    if not isinstance(value, numbers.Real | Tensor):
        raise TypeError(expected(argument, "a number", f"{value!r}"))
    if isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value):
        raise TypeError(expected(argument, "a number", "a tensor that vmap batches", "only lr may be batched"))


def check_whole(argument: str, value: Any) -> None:
    """Raise a TypeError that names the argument unless a value is a whole number, and none like 8.0."""
    check_number(argument, value)
    if not isinstance(value, numbers.Integral):
        raise TypeError(expected(argument, "a whole number", f"{value!r}"))


def check_state(state: Tree, kind: type) -> None:
    """Raise a TypeError that gives the order of the arguments if a state is not one; often it is the params.

    Also if one of its fields holds a number of Python's in place of a tensor, as one that was put together by hand may;
    but not for the states of other links in it, which are theirs to look at.
    """
    if not isinstance(state, kind):
        raise TypeError(expected("state", "what init returned", type(state).__name__, _ORDER))
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        others = roles.roles_of(state).others
        for name, value in zip(state._fields, state, strict=True):
            if name not in others:
                tree.check_tensors(value, f"state.{name}")


_ORDER = "the arguments of an update are (updates, state, params)"


def check_params(params: Tree) -> None:
    """Raise a TypeError that gives the order of the arguments where a link needs the params and gets None."""
    if params is None:
        raise TypeError(expected("params", "those that init was given, which this link needs", "None", _ORDER))


ELEMENTWISE = Facts()
"""Those of a link that communicates with nobody and takes every element by itself."""


def facts_of(transform: Transform) -> Facts:
    """Return what a transform says of itself; one that says nothing needs whole tensors."""
    if transform.facts is None:
        return Facts(whole=(name_of(transform.warmup_update),), silent=True)
    return transform.facts


def merged(*facts: Facts) -> Facts:
    """Return what is true of a transform that is made of several.

    Raises: TypeError if axes, or links, are a plain string and no tuple.
    """
    for name in ("axes", "whole"):
        for value in [getattr(each, name) for each in facts]:
            if isinstance(value, str):
                raise TypeError(expected(f"facts.{name}", "a tuple of names", f"{value!r}", f"write ({value!r},)"))
    axes = dict.fromkeys(axis for each in facts for axis in each.axes)
    whole = dict.fromkeys(link for each in facts for link in each.whole)
    local, silent, unclamped = (
        any(getattr(each, name) for each in facts) for name in ("local_params", "silent", "unclamped")
    )
    return Facts((*axes,), (*whole,), local, silent, unclamped)


def lift(init: Callable[[Tree], Tree], update: UpdateFn, *, elementwise: bool = False) -> Transform:
    """Make a link that does not communicate: the same update in every phase.

    Args: elementwise: whether each element of its updates depends on the same element of what it is given, and on
        numbers such as a learning rate, only. If not, it is refused where tensors are cut into pieces, as in
        `fn.sharded` and with FSDP2.
    """
    return Transform(init, update, update, update, facts=ELEMENTWISE if elementwise else None)


def stateless(f: Callable[[Tree, Tree], Tree], *, elementwise: bool = False) -> Transform:
    """Make a link without state from `f(updates, params) -> updates`. Args: elementwise: as for `lift`."""

    def update(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        return f(updates, params), state

    update.__qualname__ = getattr(f, "__qualname__", type(f).__name__)  # by which messages name the link
    return lift(lambda params: (), own_code(update), elementwise=elementwise)


def unchanged(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
    """Return updates and state as they are: the update of a phase in which a link does nothing."""
    return updates, state


class Link(NamedTuple):
    """An update inside of another one. path: to its state in the state of the whole."""

    update: UpdateFn
    path: tuple[int, ...]

    def state(self, whole: Tree) -> Tree:
        """Return the link's own state."""
        return reduce(getitem, self.path, whole)


def links_of(update: UpdateFn, path: tuple[int, ...] = ()) -> list[Link]:
    """Return the links of an update, chains inside of chains flattened, those that do nothing left out."""
    update = unwrap(update)
    if isinstance(update, Chained):
        return [link for i, inner in enumerate(update.links) for link in links_of(inner, (*path, i))]
    return [] if update is unchanged else [Link(update, path)]


def name_of(update: UpdateFn) -> str:
    """Return what made an update, as `describe` names it: `scale_by_adam`."""
    run = update.run if isinstance(update, Step | Guarded) else update
    name: str = getattr(run, "__qualname__", type(run).__name__)
    return name.split(".")[0]


def _hands_on(update: UpdateFn) -> bool:
    """Tell whether a link hands on new params: it does nothing, or only guards; a chain asks each of its links."""
    update = unwrap(update)
    update = update.inner if isinstance(update, Guarded) else update
    return update is unchanged or isinstance(update, Chained)


def combine(
    inner: Sequence[Transform],
    init: Callable[[Tree], Tree],
    compose: Callable[[Phase, list[UpdateFn]], UpdateFn],
    facts: Facts = ELEMENTWISE,
) -> Transform:
    """Make a transform of others: in each phase, and in each round that one of them knows, `compose(phase, updates)`.

    A phase that one of them lacks, it lacks; a phase in which one of them needs a warm-up step before, needs it. What
    they say of themselves is merged with facts, what the composition adds to that.
    Its init raises as `roles.check` does: what a link's state class says is not known before there is a state.
    """

    def update(phase: Phase | Round | Part) -> UpdateFn:
        found = [_found(transform, phase) for transform in inner]
        return next((f for f in found if isinstance(f, _Missing)), None) or own_code(compose(phase.phase, found))

    def start(params: Tree) -> Tree:
        state = init(params)
        roles.check(state)
        return state

    needs_warmup: frozenset[Phase] = frozenset().union(*(transform.needs_warmup for transform in inner))
    warmup, compressed, local = map(update, Phase)
    rounds = memoized(update) if any(transform.rounds is not None for transform in inner) else None
    said = merged(facts, *map(facts_of, inner))
    return Transform(start, warmup, compressed, local, needs_warmup, rounds, said)


def chain(*links: Transform) -> Transform:
    """Apply links one after the other; the state is the tuple of their states.

    A phase that one link lacks, the chain lacks.

    Raises: TypeError if a link is not a transform.
    """
    for place, link in enumerate(links):
        check_is_transform(f"links[{place}]", link)

    def init(params: Tree) -> Tree:
        return tuple(link.init(params) for link in links)

    return combine(links, init, lambda phase, updates_of: Chained(tuple(updates_of)))
