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

import enum
import numbers
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fn import tree

Tree = Any


class Phase(enum.Enum):
    """What the ranks send to each other in a step. A host value, never a tensor condition."""

    WARMUP = "warmup"
    COMPRESSED = "compressed"
    LOCAL = "local"

    @classmethod
    def _missing_(cls, value: object) -> Phase:
        raise ValueError(f"phase: is {value!r}; allowed are {', '.join(map(str, cls))}")


class UpdateFn(Protocol):
    """(updates, state, params) -> (updates, state), without side effects."""

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
    """

    init: Callable[[Tree], Tree]
    warmup_update: UpdateFn
    compressed_update: UpdateFn
    local_update: UpdateFn

    def update(self, phase: Phase) -> UpdateFn:
        """Return the update of a phase.

        Raises: ValueError if the transform does not have that phase, so that a schedule that does not fit
            is refused before anything moves.
        """
        found: UpdateFn = getattr(self, f"{Phase(phase).value}_update")
        if isinstance(found, _Missing):
            has = [p.name for p in Phase if has_phase(self, p)]
            raise ValueError(f"phase: {phase} was asked for, but {found.owner} has only {', '.join(has)}")
        return found


class _Missing(NamedTuple):
    phase: Phase
    owner: str

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        raise ValueError(f"phase: {self.owner} has no {self.phase.name} phase")


def missing(phase: Phase, owner: str) -> UpdateFn:
    """Return the update of a phase that `owner` does not have: it raises ValueError when called."""
    return _Missing(phase, owner)


def has_phase(transform: Transform, phase: Phase) -> bool:
    """Tell whether a transform has a phase."""
    return not isinstance(getattr(transform, f"{phase.value}_update"), _Missing)


def check_transform(argument: str, value: Any) -> None:
    """Raise a TypeError that names the argument unless a value is a transform; a function that makes one is not."""
    if not hasattr(value, "warmup_update"):
        found = getattr(value, "__name__", type(value).__name__)
        raise TypeError(f"{argument} is {found}; allowed are transforms, such as fn.scale_by_adam()")


def check_number(argument: str, value: Any) -> None:
    """Raise a TypeError that names the argument unless a value is a number; text from a configuration file is not.

    Nor is one that `torch.func.vmap` batches, for it is several.
    """
    if not isinstance(value, numbers.Real | Tensor):
        raise TypeError(f"{argument}: is {value!r}; allowed are numbers")
    if isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value):
        raise TypeError(f"{argument}: is a tensor that vmap batches; allowed are numbers; only lr may be batched")


def check_whole(argument: str, value: Any) -> None:
    """Raise a TypeError that names the argument unless a value is a whole number, and none like 8.0."""
    check_number(argument, value)
    if not isinstance(value, numbers.Integral):
        raise TypeError(f"{argument}: is {value!r}; allowed are whole numbers")


def check_state(state: Tree, kind: type) -> None:
    """Raise a TypeError that gives the order of the arguments if a state is not one; often it is the params.

    Also if one of its fields holds a number of Python's in place of a tensor, as one that was put together by hand may;
    but not for the states of other links in it, which are theirs to look at.
    """
    if not isinstance(state, kind):
        raise TypeError(
            f"state: is {type(state).__name__}; allowed is what init returned; the arguments of an update are "
            f"(updates, state, params)"
        )
    for name in getattr(state, "_fields", ()):
        if name not in _OF_OTHER_LINKS:
            tree.check_tensors(getattr(state, name), f"state: its {name}")


_OF_OTHER_LINKS = frozenset({"inner", "sync"})


def check_params(params: Tree) -> None:
    """Raise a TypeError that gives the order of the arguments where a link needs the params and gets None."""
    if params is None:
        raise TypeError(
            "params: is None; allowed are the params that init was given, which this link needs; the arguments of an "
            "update are (updates, state, params)"
        )


def lift(init: Callable[[Tree], Tree], update: UpdateFn) -> Transform:
    """Make a link that does not communicate: the same update in every phase."""
    return Transform(init, update, update, update)


def stateless(f: Callable[[Tree, Tree], Tree]) -> Transform:
    """Make a link without state from `f(updates, params) -> updates`."""

    def update(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        return f(updates, params), state

    return lift(lambda params: (), update)


def unchanged(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
    """Return updates and state as they are: the update of a phase in which a link does nothing."""
    return updates, state


def combine(
    inner: Sequence[Transform], init: Callable[[Tree], Tree], compose: Callable[[Phase, list[UpdateFn]], UpdateFn]
) -> Transform:
    """Make a transform of others: in each phase `compose(phase, their updates)`. A phase that one lacks, it lacks."""

    def update(phase: Phase) -> UpdateFn:
        found: list[UpdateFn] = [getattr(transform, f"{phase.value}_update") for transform in inner]
        return next((f for f in found if isinstance(f, _Missing)), None) or compose(phase, found)

    return Transform(init, *map(update, Phase))


def chain(*links: Transform) -> Transform:
    """Apply links one after the other; the state is the tuple of their states.

    A phase that one link lacks, the chain lacks.

    Raises: TypeError if a link is not a transform.
    """
    for place, link in enumerate(links):
        check_transform(f"links: number {place}", link)

    def init(params: Tree) -> Tree:
        return tuple(link.init(params) for link in links)

    def compose(phase: Phase, updates_of: list[UpdateFn]) -> UpdateFn:
        def update(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
            check_state(state, tuple)
            if len(state) != len(updates_of):
                found = f"{len(state)} entries, but the chain {len(updates_of)} links"
                raise ValueError(f"state: has {found}; allowed is what init of the same chain returned")
            after = []
            for link, link_state in zip(updates_of, state, strict=True):
                updates, link_state = link(updates, link_state, params)
                after.append(link_state)
            return updates, tuple(after)

        return update

    return combine(links, init, compose)


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Return params + updates, leaf by leaf, in the dtype of the params.

    The sum is taken in the wider of the two dtypes and rounded once. It is differentiable: hand in params that do not
    require grad, `{k: p.detach() for ...}`, unless you differentiate through the step; a loop would otherwise keep the
    graph of all its steps.

    Raises: ValueError if an update has another shape than its parameter, or the trees another structure; TypeError for
        a leaf that is no tensor.
    """

    def add(p: Tensor, u: Tensor) -> Tensor:
        if not (isinstance(p, Tensor) and isinstance(u, Tensor)):
            tree.check_real(params, "params")
            tree.check_real(updates, "updates")
        if u.shape != p.shape:
            raise ValueError(_misfit(params, updates))
        return (p + u).to(p.dtype)

    return tree.map(add, params, updates)


def _misfit(params: Tree, updates: Tree) -> str:
    pairs = zip(tree.paths(params), tree.leaves(params), tree.leaves(updates), strict=True)
    path, p, u = next(found for found in pairs if found[1].shape != found[2].shape)
    return (
        f"updates: leaf {path or 'the root'!r} has the shape {tuple(u.shape)}; allowed is that of its parameter, "
        f"{tuple(p.shape)}"
    )
