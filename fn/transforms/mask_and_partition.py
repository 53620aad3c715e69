"""Transforms for some leaves of a tree only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.arguments import check_is_transform, check_kind
from fn.base import (
    Exchange,
    NewParams,
    Phase,
    Transform,
    UpdateFn,
    apply_updates,
    check_params,
    check_state,
    combine,
    declare_rule,
    facts_of,
)
from fn.collectives.agreement import check_order
from fn.compiling import own_code
from fn.errors import expected
from fn.facts import Averages, Facts, merged, of_branches

Tree = Any
Chosen = Mapping[int, str]
"""The numbers of some leaves, and the label of each."""


class Label(str):
    """A label that also says in which parts `partition` shows a tensor to the transform of the label.

    It compares as its text does. splits: the sizes of blocks of rows, each a tensor of its own. heads: into how many
    matrices of equal rows a matrix is divided, which become a stack, (H d, k) -> (H, d, k). Rows are the last dimension
    but one.

    >>> import torch
    >>> rows = torch.arange(6.0).view(3, 2)
    >>> Label("hidden", splits=(1, 2)).parts(rows)
    (tensor([[0., 1.]]), tensor([[2., 3.],
            [4., 5.]]))
    """

    splits: tuple[int, ...]
    heads: int

    def __new__(cls, text: str, splits: Iterable[int] = (), heads: int = 0) -> Label:
        """Return the label with this text."""
        label = super().__new__(cls, text)
        label.splits, label.heads = tuple(splits), heads
        return label

    def __repr__(self) -> str:
        parts = f"splits={self.splits}" if self.splits else f"heads={self.heads}"
        return f"Label({str(self)!r}, {parts})"

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the parts of a tensor; those of one without rows, which another rank owns, have none either."""
        *batch, rows, columns = x.shape
        if self.heads:
            return (x.reshape(*batch, self.heads, rows // self.heads, columns),)  # (..., H d, k) -> (..., H, d, k)
        # (..., n, k) -> blocks (..., n_i, k)
        return tuple(x.split([*self.splits] if rows else [0] * len(self.splits), -2))

    def whole(self, parts: Iterable[Tensor]) -> Tensor:
        """Return the tensor that has these parts, taken off their iterator."""
        if self.heads:
            return next(iter(parts)).flatten(-3, -2)  # (..., H, d, k) -> (..., H d, k)
        # blocks (..., n_i, k) -> (..., n, k)
        return torch.cat([x for _, x in zip(self.splits, parts, strict=False)], -2)


def relabelled(label: str, name: str) -> str:
    """Return another label with the parts of this one."""
    return Label(name, label.splits, label.heads) if isinstance(label, Label) else name


def mask(inner: Transform, mask: Tree | Callable[[Tree], Tree]) -> Transform:
    """Apply a transform to the leaves where the mask is true, and pass the others on unchanged.

        >>> import torch, fn
        >>> tx = fn.mask(fn.add_decayed_weights(0.1), lambda params: fn.tree.map(lambda p: p.ndim > 1, params))
        >>> params = {"weight": torch.ones(1, 2), "bias": torch.ones(2)}
        >>> zeros = fn.tree.map(torch.zeros_like, params)
        >>> tx.update(fn.Phase.WARMUP)(zeros, tx.init(params), params)[0]
        {'weight': tensor([[0.1000, 0.1000]]), 'bias': tensor([0., 0.])}

    Args:
        inner: the transform; it sees the list of the chosen leaves.
        mask: a tree of bools like the params, or a function from params to such a tree.
    Returns: a transform with the phases and the state of `inner`.
    Raises: TypeError if a leaf of the mask is not a bool; ValueError if it, or the updates, have another structure than
        the params.

    Example, no weight decay on vectors: `mask(add_decayed_weights(0.1), lambda p: tree.map(lambda x: x.ndim > 1, p))`.
    """

    check_is_transform("inner", inner)

    def places(params: Tree) -> Chosen:
        check_params(params)
        flags = tree.spread(mask, params, "mask")
        # True and False only: to ask a tensor in each step would wait for its device.
        if not {*map(type, flags)} <= {bool}:
            i = next(i for i, leaf in enumerate(flags) if type(leaf) is not bool)
            wanted = f"leaf {tree.paths(params)[i]!r} to be True or False"
            raise TypeError(expected("mask", wanted, type(flags[i]).__name__))
        return {i: "" for i, keep in enumerate(flags) if keep}

    def init(params: Tree) -> Tree:
        chosen = places(params)
        check_order(facts_of(inner).axes, params, {"the mask": chosen})
        return inner.init(_pick(params, chosen))

    def compose(phase: Phase, updates_of: list[UpdateFn]) -> UpdateFn:
        def update(inner_update: UpdateFn, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
            chosen, updates = places(params), tree.in_order(updates, params, "updates")
            new, state = inner_update(_pick(updates, chosen), state, _pick(params, chosen))
            # New params of some leaves: those of the others come from their updates, for a step returns only one of
            # both.
            if isinstance(new, NewParams):
                others = apply_updates(params, updates)
                return NewParams(tree.with_leaves(others, _wholes(new.params, chosen))), state
            return tree.with_leaves(updates, _wholes(new, chosen)), state

        return Masked(updates_of[0], places, own_code(update))

    facts = Facts(whole=("mask by a function",) if callable(mask) else ())
    exchange = inner.exchange and _on_some(inner.exchange, places)
    tx = combine([inner], init, compose, facts, exchange=exchange)
    facts = of_branches(facts_of(tx), [facts_of(inner), Facts()])
    return tx._replace(facts=_batched(facts, [facts_of(inner)], lambda params: [places(params)]))


def _batched(facts: Facts, branches: Sequence[Facts], places: Callable[[Tree], Iterable[Chosen]]) -> Facts:
    """Return facts that say of each leaf whether it is a batch. places: params -> the leaves of each branch."""

    def batched(params: Tree) -> list[bool]:
        leaves = tree.leaves(params)
        flags = [False] * len(leaves)
        for one, places_of_one in zip(branches, places(params), strict=True):
            some = [leaves[i] for i in places_of_one]
            of_some = one.batched(some) if callable(one.batched) else [one.batched] * len(some)
            for i, flag in zip(places_of_one, of_some, strict=True):
                flags[i] = flag
        return flags

    is_refused = not facts.whole or any(one.whole and not one.batched for one in branches)
    return facts._replace(batched=False if is_refused else batched)


class Branch(NamedTuple):
    """The leaves that one of several updates takes. chosen: their numbers and labels. state: the update's own."""

    update: UpdateFn
    state: Tree
    chosen: Chosen

    def shown(self, leaves: Sequence[Tensor] | Mapping[int, Tensor], places: Iterable[int]) -> list[Tensor]:
        """Return the leaves in some places, in the parts that their labels say."""
        return _shown(leaves, {i: self.chosen[i] for i in places})

    def whole(self, parts: Iterable[Tensor], places: Iterable[int]) -> dict[int, Tensor]:
        """Return leaves by their places, made of their parts."""
        return _wholes(parts, {i: self.chosen[i] for i in places})


@declare_rule(tensorwise=True)
class Masked(NamedTuple):
    """The rule of `mask`. inner: the update of the chosen leaves. places: params -> these.

    run: (that update, updates, state, params) -> updates and the next state.
    """

    inner: UpdateFn
    places: Callable[[Tree], Chosen]
    run: Callable[[UpdateFn, Tree, Tree, Tree], tuple[Tree, Tree]]

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the updates, those of the chosen leaves by `inner`, and the next state."""
        return self.run(self.inner, updates, state, params)

    def branches(self, state: Tree, params: Tree) -> list[Branch]:
        """Return the leaves that the update inside takes."""
        return [Branch(self.inner, state, self.places(params))]


Exchanging = Callable[[int, Tree, Tree], tuple[Tree, Tree]]


def _on_some(exchange: Exchange, places: Callable[[Tree], Chosen]) -> Exchange:
    """Return an exchange of all params that passes on those in some places only."""

    def on(f: Exchanging) -> Exchanging:
        def run(number: int, state: Tree, params: Tree) -> tuple[Tree, Tree]:
            chosen = places(params)
            new, state = f(number, state, _pick(params, chosen))
            return tree.with_leaves(params, _wholes(new, chosen)), state

        return run

    return Exchange(on(exchange.difference), on(exchange.mean), on(exchange.outer), exchange.check)


def _pick(t: Tree, chosen: Chosen) -> list[Any]:
    """Return the chosen leaves, in the parts that their labels say."""
    return _shown(tree.leaves(t), chosen)


def _shown(leaves: Sequence[Any] | Mapping[int, Any], chosen: Chosen) -> list[Any]:
    shown = [label.parts(leaves[i]) if isinstance(label, Label) else (leaves[i],) for i, label in chosen.items()]
    return [x for parts in shown for x in parts]


def _wholes(new: Iterable[Any], chosen: Chosen) -> dict[int, Any]:
    """Return the chosen leaves by their numbers, made of what `_pick` showed."""
    rest = iter(new)
    return {i: label.whole(rest) if isinstance(label, Label) else next(rest) for i, label in chosen.items()}


def partition(transforms: Mapping[str, Transform], labels: Tree | Callable[[Tree], Tree]) -> Transform:
    """Apply a different transform to the leaves of each label.

        >>> import torch, fn
        >>> sgd = {"fast": fn.scale_by_learning_rate(1.0), "slow": fn.scale_by_learning_rate(0.1)}
        >>> tx = fn.partition(sgd, {"head": "fast", "body": "slow"})
        >>> grads = {"head": torch.tensor([1.0]), "body": torch.tensor([1.0])}
        >>> tx.update(fn.Phase.WARMUP)(grads, tx.init(grads), grads)[0]
        {'head': tensor([-1.]), 'body': tensor([-0.1000])}

    Args:
        transforms: label -> transform; each sees the list of its leaves, in the parts that labels of `fn.labels_of`
            say where it needs whole tensors.
        labels: a tree of labels like the params, or a function from params to such a tree.
    Returns: a transform whose state is {label: state}, with the phases that all of them have.
    Raises: ValueError if the labels, or the updates, have another structure than the params, if a label names no
        transform, or if a state has other labels.

    Example, norms and biases in full precision:

        full = unfrozen(onebit_adam(axis="data"))
        partition({"codes": onebit_adam(axis="data"), "full": full},
                  lambda params: tree.map(lambda p: "full" if p.ndim < 2 else "codes", params))
    """

    # Ranks meet label by label: those that spelled the mapping in another order would wait for each other without end.
    check_kind("transforms", transforms, Mapping, "a mapping from labels to transforms")
    transforms = dict(sorted(transforms.items()))
    for label, transform in transforms.items():
        check_is_transform(f"transforms[{label!r}]", transform)

    # Element by element it is the same in parts, which would only cost copies.
    shows_parts = {label: bool(facts_of(tx).whole) for label, tx in transforms.items()}

    def places(params: Tree) -> dict[str, Chosen]:
        check_params(params)
        flat = tree.spread(labels, params, "labels")
        unknown = sorted({str(label) for label in flat} - set(transforms))
        if unknown:
            raise ValueError(expected("labels", f"names of transforms, of {sorted(transforms)}", f"{unknown}"))
        return {
            label: {i: name if shows_parts[label] else "" for i, name in enumerate(flat) if name == label}
            for label in transforms
        }

    def init(params: Tree) -> dict[str, Tree]:
        chosen_of = places(params)
        check_order(merged(*map(facts_of, transforms.values())).axes, params, _by_name(chosen_of))
        return {label: transforms[label].init(_pick(params, chosen)) for label, chosen in chosen_of.items()}

    def compose(phase: Phase, updates_of: list[UpdateFn]) -> UpdateFn:
        def update(update_of: Mapping[str, UpdateFn], updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
            _check_labels(state, update_of)
            moves: dict[int, Any] = {}
            new_params: dict[int, Any] = {}  # of labels whose update returns `NewParams`
            after = {}
            chosen_of, updates = places(params), tree.in_order(updates, params, "updates")
            for label, chosen in chosen_of.items():
                new, after[label] = update_of[label](_pick(updates, chosen), state[label], _pick(params, chosen))
                if isinstance(new, NewParams):
                    new_params.update(_wholes(new.params, chosen))
                else:
                    moves.update(_wholes(new, chosen))
            # One label returned new params, so all others become params as well: a step returns only one of both.
            if new_params:
                leaves = tree.leaves(params)
                new_params.update((i, *apply_updates([leaves[i]], [u])) for i, u in moves.items())
                return NewParams(tree.with_leaves(params, new_params)), after
            return tree.with_leaves(updates, moves), after

        return Partitioned(dict(zip(transforms, updates_of, strict=True)), places, own_code(update))

    facts = Facts(whole=("partition by a function",) if callable(labels) else ())
    if not callable(labels) and any(isinstance(label, Label) for label in tree.leaves(labels)):
        facts = Facts(whole=("partition into parts",))
    exchanges = [_of_label(label, tx.exchange, places) for label, tx in transforms.items() if tx.exchange is not None]
    exchange = _one_after_the_other(exchanges) if exchanges else None
    tx = combine([*transforms.values()], init, compose, facts, exchange=exchange)
    branches = [*map(facts_of, transforms.values())]
    facts = of_branches(facts_of(tx), branches)
    return tx._replace(facts=_batched(facts, branches, lambda params: places(params).values()))


def _by_name(chosen_of: Mapping[str, Chosen]) -> dict[str, Chosen]:
    return {f"label {label!r}": chosen for label, chosen in chosen_of.items()}


def in_slices(inner: Transform, cut: Callable[[Tree], list[bool]]) -> Transform:
    """Return a transform that sees some stacks in slices. Args: cut: params -> whether each leaf is one of them."""

    def init(params: Tree) -> Tree:
        return inner.init(tree.sliced(params, cut(params)))

    def compose(phase: Phase, updates_of: list[UpdateFn]) -> UpdateFn:
        def update(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
            flags, updates = cut(params), tree.in_order(updates, params, "updates")
            new, state = updates_of[0](tree.sliced(updates, flags), state, tree.sliced(params, flags))
            return tree.stacked(tree.leaves(new), params, flags), state

        return update

    return combine([inner], init, compose)


def in_parts(inner: Transform, labels: Sequence[str]) -> Transform:
    """Return a transform that sees each leaf in the parts that its label says."""
    named = [relabelled(label, "all") for label in labels]
    return partition({"all": inner}, lambda params: tree.unflatten(tree.flatten(params)[1], named))


def _of_label(label: str, exchange: Exchange, places: Callable[[Tree], dict[str, Chosen]]) -> Exchange:
    """Return the exchange of a label's params as one of all of them, in the state of a partition."""
    # In a function of its own: lambdas made in a loop would all see the last label.
    return _on_some(exchange, lambda params: places(params)[label]).at(label)


def _one_after_the_other(exchanges: list[Exchange]) -> Exchange:
    def all_of(steps: Sequence[Exchanging]) -> Exchanging:
        def run(number: int, state: Tree, params: Tree) -> tuple[Tree, Tree]:
            for step in steps:
                params, state = step(number, state, params)
            return params, state

        return run

    def check(schedule: Callable[[int], Any]) -> None:
        for exchange in exchanges:
            exchange.check(schedule)

    difference, mean, outer = (all_of(steps) for steps in zip(*(exchange[:3] for exchange in exchanges), strict=True))
    return Exchange(difference, mean, outer, check)


def _check_labels(state: Tree, labels: Iterable[str]) -> None:
    check_state(state, dict)
    if set(state) != set(labels):
        wanted = f"the labels of the transforms, {sorted(labels)}, as init of the same partition returned"
        raise ValueError(expected("state", wanted, f"{sorted(map(str, state))}"))


@declare_rule(tensorwise=True)
class Partitioned(NamedTuple):
    """The rule of `partition`. inner: the update of each label. places: params -> the leaves of each label.

    run: (the updates by their labels, updates, state, params) -> updates and the next state.
    """

    inner: Mapping[str, UpdateFn]
    places: Callable[[Tree], Mapping[str, Chosen]]
    run: Callable[[Mapping[str, UpdateFn], Tree, Tree, Tree], tuple[Tree, Tree]]

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return what the updates of the labels return, and their states."""
        return self.run(self.inner, updates, state, params)

    def branches(self, state: Tree, params: Tree) -> list[Branch]:
        """Return the leaves that the update of each label takes."""
        return [Branch(self.inner[label], state[label], chosen) for label, chosen in self.places(params).items()]


Labels = Tree | Callable[[Tree], Tree] | None
"""Which tensors are matrices of hidden layers, "hidden", and which are "other": a tree like the params, or a function
of them. None: a function of the shapes."""


def hidden_and_other(
    labels: Labels,
    names: Mapping[str, str],
    is_hidden: Callable[[Tensor], bool] | None = None,
    *,
    takes_parts: bool = True,
) -> Callable[[Tree], Tree]:
    """Return labels for `partition` from those of `fn.labels_of`, hidden only where `is_hidden` agrees.

    Args: labels: "hidden" and "other"; None: by `is_hidden` alone. names: the label of `partition` for each of both.
        is_hidden: of a tensor, whether the optimizer of hidden matrices can take it. None: matrices, and stacks of them
            where a label says so, for without labels they may be convolutions. takes_parts: whether it takes the blocks
            and heads that labels say.
    Raises: from the function that is returned, ValueError for other labels.
    """

    if is_hidden is None:
        is_hidden = (lambda p: p.ndim == 2) if labels is None else (lambda p: p.ndim >= 2)

    def name_of(label: str) -> str:
        return relabelled(label, names[label])

    def named(params: Tree) -> Tree:
        shapes = tree.map(lambda p: "hidden" if is_hidden(p) else "other", params)
        given = shapes if labels is None else labels(params) if callable(labels) else labels
        if {type(given), type(params)} <= {list, tuple}:  # a list of labels fits a tuple of params, and vice versa
            given = type(params)(given)
        given = tree.in_order(given, params, "labels")
        if unknown := {*map(str, tree.leaves(given))} - set(names):
            raise ValueError(expected("labels", "'hidden' or 'other' for each tensor", f"{sorted(unknown)}"))
        if not takes_parts and (parts := [label for label in tree.leaves(given) if isinstance(label, Label)]):
            cure = "write labels[name] = 'hidden' to take the tensor whole, or 'other'"
            raise ValueError(expected("labels", "tensors that are taken whole", f"{parts[0]!r}", cure))
        # What the shape rules out is "other" whatever the label says: Muon would refuse it.
        return tree.map(lambda label, shape: name_of(label) if shape == "hidden" else names["other"], given, shapes)

    return named


def unfrozen(inner: Transform) -> Transform:
    """Stay in the warm-up in every phase: full precision for what compression would harm, norms and biases.

    >>> import torch, fn
    >>> full = fn.unfrozen(fn.onebit_adam(0.1, axis="data"))
    >>> params, state = torch.zeros(2), full.init(torch.zeros(2))
    >>> for phase in (fn.Phase.WARMUP, fn.Phase.COMPRESSED):
    ...     u, state = full.update(phase)(torch.tensor([1.0, -2.0]), state, params)
    >>> [int(age) for age in fn.roles.find(state, "ages")[0]]        # nu moves in the compressed phase, too
    [2, 2]
    """
    check_is_transform("inner", inner)
    update = inner.warmup_update
    warmup, facts = facts_of(inner).averaged.warmup, facts_of(inner)
    return inner._replace(
        compressed_update=update, local_update=update, needs_warmup=frozenset(), exchange=None,
        links=tuple(map(unfrozen, inner.links)),
        facts=inner.facts and facts._replace(averages=Averages(warmup, warmup, warmup)),
    )  # fmt: skip
