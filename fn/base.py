"""The types that everything is made of: `Phase`, `Transform`, how transforms compose, and `apply_updates`.

A `Transform` is a NamedTuple of pure functions. `init` makes a state from parameters; each of the three
updates maps (updates, state, params) to (updates, state). They differ in what the ranks send to each
other: full precision in the warm-up, codes (quantized values) in the compressed phase, nothing in the local one.

    >>> import torch, fn
    >>> tx = fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(0.1))
    >>> params = {"w": torch.ones(2)}
    >>> state = tx.init(params)
    >>> updates, state = tx.update(fn.Phase.WARMUP)({"w": torch.tensor([1.0, -2.0])}, state, params)
    >>> fn.apply_updates(params, updates)["w"]
    tensor([0.9000, 1.1000])
"""

from __future__ import annotations

import enum
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from operator import getitem
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from fn import roles, tree
from fn.arguments import check_flag, check_function, check_is_transform
from fn.compiling import compilable, original, own_code
from fn.errors import expected
from fn.facts import ELEMENTWISE, Facts, merged

Tree = Any
C = TypeVar("C", bound=type)


class Phase(enum.Enum):
    """What the ranks send to each other in a step. A host value, which a schedule returns; never a tensor condition."""

    WARMUP = "warmup"
    COMPRESSED = "compressed"
    LOCAL = "local"

    def __init__(self, value: Any) -> None:
        self.phase = self
        """The phase itself, as a `Round` has one."""

    @classmethod
    def _missing_(cls, value: object) -> Phase:
        raise ValueError(expected("phase", f"one of {', '.join(map(str, cls))}", f"{value!r}"))


class Round(NamedTuple):
    """What happens after the local step of `fn.outer`: a host value, as `Phase` is. A fragment is a part of the params.

    begin: the number of the fragment whose exchange begins after this step; None for none.
    end: the number of the fragment whose exchange ends, so that its outer step is taken; None for none. The same
        number as `begin`: the exchange begins and ends after this step. A plain `Phase.COMPRESSED` is `Round(0, 0)`.
    """

    begin: int | None = None
    end: int | None = None

    @property
    def phase(self) -> Phase:
        """Return LOCAL where nothing begins or ends, else COMPRESSED."""
        return Phase.LOCAL if self.begin is None and self.end is None else Phase.COMPRESSED


class Exchange(NamedTuple):
    """What follows the local step of a round: three pure functions (number, state, params) -> (params, state).

    number: what a `Round` calls the exchange. difference: notes in the state how far the params have come since the
    last one (the pseudo-gradient). mean: averages that; only this one communicates. outer: takes the outer step.

        begin == end         difference(begin), mean(begin), outer(end)
        others               difference(begin), outer(end), mean(begin), each where there is one

    An adapter may run `mean` on another thread while local steps go on. So where an exchange begins in one step and
    ends in another, `mean` reads no numbers of params, and returns the params that it got.

    check: takes a schedule and raises a ValueError if that does not fit the method. An adapter calls it once, when it
        is made.
    """

    difference: Callable[[int, Tree, Tree], tuple[Tree, Tree]]
    mean: Callable[[int, Tree, Tree], tuple[Tree, Tree]]
    outer: Callable[[int, Tree, Tree], tuple[Tree, Tree]]
    check: Callable[[Callable[[int], Phase | Round]], None] = lambda schedule: None

    def take(self, round_: Round, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """Return params and state after what a round says."""
        steps = [(self.difference, round_.begin), (self.mean, round_.begin), (self.outer, round_.end)]
        if round_.begin != round_.end:
            steps[1:] = reversed(steps[1:])
        for step, number in steps:
            if number is not None:
                params, state = step(number, state, params)
        return params, state

    def after(self, local: UpdateFn, round_: Round) -> UpdateFn:
        """Return the update of a round: the local step, then what the round says."""

        def update(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
            moves, state = local(updates, state, params)
            params, state = self.take(round_, state, apply_updates(params, moves))
            return NewParams(params), state

        return update

    def at(self, place: int | str) -> Exchange:
        """Return the exchange of a larger state, a tuple or a dict that holds this one's at a place."""

        def placed(f: Callable[[int, Tree, Tree], tuple[Tree, Tree]]) -> Callable[[int, Tree, Tree], tuple[Tree, Tree]]:
            def run(number: int, state: Tree, params: Tree) -> tuple[Tree, Tree]:
                params, own = f(number, state[place], params)
                return params, tree.with_part(state, place, own)

            return run

        return Exchange(placed(self.difference), placed(self.mean), placed(self.outer), self.check)


class NewParams(NamedTuple):
    """Whole new params, which an update may return in place of updates. params: a tree like the params.

    `apply_updates` rounds them to the params' dtype. Params that all ranks must hold bitwise alike are returned like
    this, because params + (new - params) is off by rounding, and by another amount on each rank.
    """

    params: Tree


def declare_rule(**facts: Any) -> Callable[[C], C]:
    """Return a decorator that gives the class of a rule what it says of itself: see `UpdateFn`.

    A NamedTuple has fields for what differs between its values; this is for what is the same for all of them.
    """

    def decorate(kind: C) -> C:
        for name, value in facts.items():
            setattr(kind, name, value)
        return kind

    return decorate


def check_round(value: Round) -> None:
    """Raise a TypeError unless the fields of a round are whole numbers or None, a ValueError if one is out of range."""
    for name, fragment in (("begin", value.begin), ("end", value.end)):
        if fragment is None:
            continue
        if not isinstance(fragment, numbers.Integral) or isinstance(fragment, bool):
            raise TypeError(expected(f"phase.{name}", "the number of a fragment, or None", f"{fragment!r}"))
        if fragment < 0:
            raise ValueError(expected(f"phase.{name}", "the number of a fragment, from 0", f"{fragment!r}"))


class UpdateFn(Protocol):
    """(updates, state, params) -> (updates, state), without side effects.

    Any function is one. A *rule* is one that also says what it computes: a NamedTuple of its settings that can be
    called, such as `fn.transforms.adam.Adam`. Its type is the kind of step, by which `fn.inplace` finds kernels, and
    its fields are what ranks compare. Where it keeps a closure, that is its field `run`. A rule may have more:

        name                        in messages; without it they take the name of the factory of `run`
        tensorwise                  whether it takes each tensor by itself, and sends nothing, so that a step can be
                                    written a chunk of tensors at a time: see `fn.inplace.head_and_body`. One with
                                    updates inside of it hands them what it is given, calls those in its field `inner`
                                    only, and adds nothing that is not tensor by tensor
        branches(state, params)     the tensors that each update inside of it takes, where they take some each
        now                         whether it reads the params, or a rate, of the step that it is taken in, so that it
                                    cannot be taken beside the training
        inner                       the updates inside of it: one, a tuple of them, or a dict: see `rules_in`
    """

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the next updates and the next state."""
        ...


class Transform(NamedTuple):
    """A pure state-transition: how a state starts, and how it moves in each phase.

    init: params -> state. Params is any tree of tensors. The keys of its dicts keep the order that they have here,
        because what travels as one vector has no keys; those of updates need not.
    warmup_update, compressed_update, local_update: (updates, state, params) -> (updates, state). The state
        has the same structure, shapes and dtypes in every phase. A phase that a transform does not have is
        `missing(...)`.
    needs_warmup: the phases that a warm-up step must come before, because they use what it leaves in the state, such
        as a second moment that is frozen. `fn.Optimizer` begins with one then, whatever its schedule says.
    exchange: what follows the local step in a `Round`, where params are exchanged. None: a round is its phase.
    facts: what it says of itself. None: nothing, so that it counts as one that needs whole tensors.
    links: of a chain those that it applies, also where a guard is around it; (): it is a link itself.
    """

    init: Callable[[Tree], Tree]
    warmup_update: UpdateFn
    compressed_update: UpdateFn
    local_update: UpdateFn
    needs_warmup: frozenset[Phase] = frozenset()
    exchange: Exchange | None = None
    facts: Facts | None = None
    links: tuple[Transform, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Transform:
        """Return the transform itself, as of a function: a copied lr would not be the one that closures have."""
        return self

    def update(self, phase: Phase | Round) -> UpdateFn:
        """Return the update of a phase or a round, as a function that `torch.compile` counts as one of its own.

        Raises: ValueError if the transform does not have that phase, so that a schedule that does not fit
            is refused before anything moves; TypeError or ValueError for a round whose fields are no fragment numbers.
        """
        return compilable(self.composed(phase))

    def composed(self, phase: Phase | Round) -> UpdateFn:
        """Return the update of a phase or a round as it is composed. Raises: as `update`."""
        if isinstance(phase, Round):
            check_round(phase)
            if self.exchange is not None and phase.phase is not Phase.LOCAL:
                return _round(self.local_update, self.exchange, phase)
        update = update_in(self, Phase(getattr(phase, "phase", phase)))
        if isinstance(update, _Missing):
            has = [p.name for p in Phase if has_phase(self, p)]
            raise ValueError(f"phase: {phase} was asked for, but {update.owner} has only {', '.join(has)}")
        return update


def update_in(transform: Transform, phase: Phase) -> UpdateFn:
    """Return the update of a phase; where a transform lacks that, the `_Missing` in its place."""
    update: UpdateFn = getattr(transform, f"{phase.value}_update")
    return update


_rounds: dict[Any, UpdateFn] = {}
"""The last updates that `_round` made."""


def _round(local: UpdateFn, exchange: Exchange, round_: Round) -> UpdateFn:
    """Return the update of a round, the same one if it is asked for again: torch.compile would compile another one."""
    key = (id(local), *map(id, exchange[:3]), round_)  # what is kept holds them, so no others have their ids
    if key in _rounds or torch.compiler.is_compiling():
        return _rounds.get(key) or exchange.after(local, round_)
    _rounds[key] = own_code(exchange.after(local, round_))
    for oldest in [*_rounds][:-64]:
        _rounds.pop(oldest, None)
    return _rounds[key]


def facts_of(transform: Transform) -> Facts:
    """Return the facts of a transform. One without any is taken to need whole tensors, and may communicate."""
    if transform.facts is None:
        unknown = (name_of(transform.warmup_update),)
        return Facts(whole=unknown, silent=True, tree=unknown)
    return transform.facts


def chain(*links: Transform) -> Transform:
    """Apply links one after the other; the state is the tuple of their states.

    A phase that one link lacks, the chain lacks.

        >>> import torch, fn
        >>> tx = fn.chain(fn.scale(2.0), fn.add_decayed_weights(0.1), fn.scale_by_learning_rate(0.5))
        >>> params = torch.tensor([1.0, -1.0])
        >>> tx.update(fn.Phase.WARMUP)(torch.tensor([1.0, 1.0]), tx.init(params), params)[0]     # -0.5 (2 g + 0.1 p)
        tensor([-1.0500, -0.9500])

    Raises: TypeError if a link is not a transform.
    """
    for place, link in enumerate(links):
        check_is_transform(f"links[{place}]", link)

    def init(params: Tree) -> Tree:
        return tuple(link.init(params) for link in links)

    exchanges = [(place, link.exchange) for place, link in enumerate(links) if link.exchange is not None]
    for link in links[exchanges[0][0] + 1 :] if exchanges else ():
        for f in links_of(link.compressed_update):
            _check_hands_on(f.update)
    exchange = exchanges[0][1].at(exchanges[0][0]) if exchanges else None
    return combine(links, init, lambda phase, updates_of: Chained(tuple(updates_of)), exchange=exchange, links=links)


class Chained(NamedTuple):
    """The update of a chain: those of its links, one after the other."""

    inner: tuple[UpdateFn, ...]

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the updates of the last link, and the states of all."""
        check_state(state, tuple)
        if len(state) != len(self.inner):
            wanted = f"an entry for each of the {len(self.inner)} links, as init of the same chain returned"
            raise ValueError(expected("state", wanted, f"{len(state)}"))
        after = []
        for link, link_state in zip(self.inner, state, strict=True):
            if isinstance(updates, NewParams):
                _check_hands_on(link)
            updates, link_state = link(updates, link_state, params)
            after.append(link_state)
        return updates, tuple(after)


def _check_hands_on(link: UpdateFn) -> None:
    if not _hands_on(link):
        wanted = "what returns new params, such as fn.outer, to be the last link"
        raise ValueError(expected("links", wanted, f"{name_of(link)} behind it"))


def _hands_on(update: UpdateFn) -> bool:
    """Tell whether a link can follow one that returns `NewParams`: it does nothing, guards, or is a chain of such."""
    update = original(update)
    update = update.inner if isinstance(update, Guarded) else update
    return update is unchanged or (isinstance(update, Chained) and all(map(_hands_on, update.inner)))


def combine(
    inner: Sequence[Transform],
    init: Callable[[Tree], Tree],
    compose: Callable[[Phase, list[UpdateFn]], UpdateFn],
    facts: Facts = ELEMENTWISE,
    *,
    exchange: Exchange | None = None,
    links: tuple[Transform, ...] = (),
) -> Transform:
    """Make a transform of others: in each phase, `compose(phase, updates)`.

    It lacks a phase that one of them lacks. It needs a warm-up step in front of a phase where one of them needs it.
    Its facts are theirs, merged with `facts`, which is what the composition adds.
    Its init raises as `roles.check` does, because the class of a link's state is not known before there is a state.
    """

    def update(phase: Phase) -> UpdateFn:
        updates_of = [update_in(transform, phase) for transform in inner]
        lacking = next((f for f in updates_of if isinstance(f, _Missing)), None)
        return lacking or own_code(compose(phase, updates_of))

    def start(params: Tree) -> Tree:
        state = init(params)
        roles.check(state)
        return state

    needs_warmup: frozenset[Phase] = frozenset().union(*(transform.needs_warmup for transform in inner))
    all_facts = merged(facts, *map(facts_of, inner))
    warmup, compressed, local = map(update, Phase)
    return Transform(start, warmup, compressed, local, needs_warmup, exchange, all_facts, links)


def lift(init: Callable[[Tree], Tree], update: UpdateFn, *, elementwise: bool = False) -> Transform:
    """Make a link that does not communicate: the same update in every phase.

        >>> import torch, fn
        >>> def update(updates, count, params):
        ...     return updates / (count + 1), count + 1
        >>> tx = fn.lift(lambda params: torch.tensor(0), update, elementwise=True)
        >>> state = tx.init(torch.zeros(1))
        >>> for _ in range(3):
        ...     u, state = tx.update(fn.Phase.LOCAL)(torch.tensor([6.0]), state, None)
        >>> u, state
        (tensor([2.]), tensor(3))

    Args: elementwise: whether each element of its updates depends on the same element of what it is given, and on
        numbers such as a learning rate, only. If not, it is refused where tensors are cut into pieces, as in
        `fn.sharded` and with FSDP2.
    """
    check_function("init", init, "a function of params that returns a state")
    check_function("update", update, "a function (updates, state, params) -> (updates, state)")
    check_flag("elementwise", elementwise)
    return Transform(init, update, update, update, facts=ELEMENTWISE if elementwise else None)


def stateless(f: Callable[[Tree, Tree], Tree], *, elementwise: bool = False) -> Transform:
    """Make a link without state from `f(updates, params) -> updates`. Args: elementwise: as for `lift`."""
    check_function("f", f, "a function (updates, params) -> updates")

    def update(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        return f(updates, params), state

    update.__qualname__ = getattr(f, "__qualname__", type(f).__name__)  # by which messages name the link
    return lift(lambda params: (), own_code(update), elementwise=elementwise)


def unchanged(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
    """Return updates and state as they are: the update of a phase in which a link does nothing (the identity)."""
    return updates, state


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
    return not isinstance(update_in(transform, phase), _Missing)


@declare_rule(tensorwise=True)
class Guarded(NamedTuple):
    """The update of `skip_nonfinite`, whose state has that of `inner` in its first field.

    inner: the update that is guarded. looks: whether its results are checked, as they are in all but local steps.
    run: (the update inside, updates, state, params) -> what the guarded one returns.
    """

    inner: UpdateFn
    looks: bool
    run: Callable[[UpdateFn, Tree, Tree, Tree], tuple[Tree, Tree]]

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return what the guarded update returns."""
        return self.run(self.inner, updates, state, params)


class Link(NamedTuple):
    """An update inside of another one. path: to its state in the state of the whole."""

    update: UpdateFn
    path: tuple[int, ...]

    def state(self, whole: Tree) -> Tree:
        """Return the link's own state."""
        return reduce(getitem, self.path, whole)


def links_of(update: UpdateFn, path: tuple[int, ...] = ()) -> list[Link]:
    """Return the links of an update: chains inside of chains are flattened, links that do nothing are left out."""
    update = original(update)
    if isinstance(update, Chained):
        return [link for i, inner in enumerate(update.inner) for link in links_of(inner, (*path, i))]
    return [] if update is unchanged else [Link(update, path)]


def rules_in(update: UpdateFn) -> Iterator[UpdateFn]:
    """Yield an update, and all those inside of it: of chains, guards and combinators."""
    update = original(update)
    yield update
    for one in inner_updates(update):
        yield from rules_in(one)


def inner_updates(update: Any) -> list[UpdateFn]:
    """Return the updates inside of another one: of a chain, a guard or a combinator."""
    inner: Any = getattr(update, "inner", ())
    if callable(inner):  # a rule is a tuple, too
        return [inner]
    return [*(inner.values() if isinstance(inner, Mapping) else inner)]


def with_inner_updates(update: Any, f: Callable[[UpdateFn], UpdateFn]) -> UpdateFn:
    """Return the same rule around what f makes of each update inside of it."""
    inner: Any = update.inner
    new = f(inner) if callable(inner) else {key: f(one) for key, one in inner.items()}
    made: UpdateFn = update._replace(inner=new)
    return made


def name_of(update: UpdateFn) -> str:
    """Return the name of the function that made an update, as a description has it: `scale_by_adam`."""
    run = getattr(update, "run", update)
    name: str = getattr(update, "name", getattr(run, "__qualname__", type(run).__name__))
    return name.split(".")[0]


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Return params + updates, leaf by leaf, in the dtype of the params.

    The sum is taken in the wider of the two dtypes and rounded once. It is differentiable: hand in params that do not
    require grad, `{k: p.detach() for ...}`, unless you differentiate through the step; a loop would otherwise keep the
    graph of all its steps. Of `NewParams` it is a copy in the dtype of the params.

        >>> import torch, fn
        >>> fn.apply_updates({"w": torch.tensor([1.0], dtype=torch.bfloat16)}, {"w": torch.tensor([-0.25])})
        {'w': tensor([0.7500], dtype=torch.bfloat16)}

    Raises: ValueError if an update has another shape than its parameter, or the trees another structure; TypeError for
        a leaf that is no tensor, or one of 8 bits.
    """

    new = isinstance(updates, NewParams)
    updates = updates.params if isinstance(updates, NewParams) else updates
    try:
        updates = tree.in_order(updates, params, "updates")
    except ValueError as error:
        raise ValueError(f"{error}; give what an update returned first, of (updates, state)") from None

    def add(p: Tensor, u: Tensor) -> Tensor:
        if not (isinstance(p, Tensor) and isinstance(u, Tensor)) or 1 in (p.dtype.itemsize, u.dtype.itemsize):
            tree.check_real(params, "params")
            tree.check_real(updates, "updates")
        if u.shape != p.shape:
            raise ValueError(_misfit(params, updates))
        return u.to(p.dtype, copy=True) if new else (p + u).to(p.dtype)

    return tree.map(add, params, updates)


def as_updates(moves: Tree, params: Tree) -> Tree:
    """Return updates as they are, and of `NewParams` their difference to the params, for what calculates with it."""
    return tree.map(torch.sub, moves.params, params) if isinstance(moves, NewParams) else moves


def _misfit(params: Tree, updates: Tree) -> str:
    pairs = zip(tree.paths(params), tree.leaves(params), tree.leaves(updates), strict=True)
    path, p, u = next((path, p, u) for path, p, u in pairs if p.shape != u.shape)
    wanted = f"leaf {path or 'the root'!r} to have the shape of its parameter, {tuple(p.shape)}"
    return expected("updates", wanted, f"{tuple(u.shape)}")


_ORDER = "the arguments of an update are (updates, state, params)"


def check_state(state: Tree, kind: type) -> None:
    """Raise a TypeError that gives the order of the arguments if a state is of another class, such as the params.

    Also if a field holds a Python number where a tensor belongs.
    """
    if not isinstance(state, kind):
        raise TypeError(expected("state", "what init returned", type(state).__name__, _ORDER))
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        for name, value in zip(state._fields, state, strict=True):
            tree.check_tensors(value, f"state.{name}")


def check_arguments(updates: Tree, state: Tree, params: Tree, kind: type, like: str) -> tuple[Tree, Tree]:
    """Refuse arguments of an update that do not fit together; return updates and params in the order of the state.

    Args: kind: the state's class. like: its field that is like the params.
    """
    check_state(state, kind)
    check_params(params)
    of_state = getattr(state, like)
    tree.check_updates(updates, of_state)
    return tree.in_order(updates, of_state, "updates"), tree.in_order(params, of_state, "params")


def check_params(params: Tree) -> None:
    """Raise a TypeError that gives the order of the arguments if a link needs the params and gets None."""
    if params is None:
        raise TypeError(expected("params", "those that init was given, which this link needs", "None", _ORDER))
