"""Put the params that all ranks agree on in the place of a rank's own, to evaluate and to export them.

Between exchanges the ranks of local steps stand at params of their own. Which rank's loss is printed, or whose model is
saved, would then be chance. What they agree on is in the state: the anchor of `fn.outer`, or that of 0/1 Adam.

A model is more than its params: BatchNorm's running statistics are of each rank's own data in every method. Buffers are
in no state, so their mean is taken when the context is entered.
"""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fn import roles, tree
from fn.adapters.holders import roots_of
from fn.adapters.optim.core import Core, device_of, versions_of
from fn.adapters.optim.hooks.agree import compare_on_axes
from fn.adapters.optim.shards import pieces
from fn.adapters.optim.units import Unit
from fn.collectives.agreement import check_agreement, checksum, gather_values
from fn.collectives.axis import bind_alone
from fn.collectives.primitives import pmean
from fn.collectives.profiling import Watchers, watched_by
from fn.errors import expected

Tree = Any
Modules = nn.Module | Iterable[nn.Module] | None
"""Whose buffers are averaged; None: those of the modules that hold the optimizer's params."""


@contextmanager
def agreed_params(optimizer: Core, model: Modules = None) -> Iterator[None]:
    """Put the params that all ranks agree on in the place of this rank's own, for as long as the context lasts.

        with fn.adapters.agreed_params(opt):
            evaluate(model)
            torch.save(model.state_dict(), "model.pt")

    These are the anchor of `fn.diloco` and its relatives, and the params after the last synchronisation of 0/1 Adam,
    rounded to the params' dtype. In a warm-up, and for all other methods, the params themselves are agreed on, and
    nothing is copied. Floating buffers that differ between ranks, such as BatchNorm's running statistics, become their
    mean over the ranks, in every method; whole numbers, such as counts of batches, stay this rank's. At the end params
    and buffers are bitwise what they were, also if the body raises.

    Enter it between a step and the next backward pass. Where the model has floating buffers all ranks enter it
    together. Else nothing is sent, and a rank may enter alone. Contexts may be nested. Parameters of FSDP2 are
    exchanged shard by shard. What FSDP2 gathered from them stays gathered: call `model.reshard()` at the end of the
    body.

    To go on training from, save outside of it: a checkpoint of a rank has its own params.

    Args:
        optimizer: an `fn.Optimizer`. While the context lasts it refuses to step or to load, with a RuntimeError.
        model: the module, or several, whose buffers are averaged, alike on all ranks. None: those that hold the
            optimizer's params, with the modules that these are parts of. (): none; a rank may then enter alone, and
            has its own buffers.
    Raises: TypeError for another optimizer or model; ValueError where states hold nothing that all ranks agree on, as
        those of `fn.average_params` and of a transform of one's own whose class of states says `local_params`;
        `RanksDisagree`, on all ranks, for models with other buffers; `PeerLost` if a rank does not enter.

    >>> import torch, fn
    >>> from functools import partial
    >>> p = torch.nn.Parameter(torch.zeros(1))
    >>> opt = fn.Optimizer([p], partial(fn.diloco, axis="data"), schedule=fn.every(4), lr=0.1)
    >>> p.grad = torch.ones(1)
    >>> opt.step()                                       # a local step
    >>> with fn.adapters.agreed_params(opt):
    ...     inside = p.item()
    >>> inside, round(p.item(), 4)
    (0.0, -0.1)
    """
    if not isinstance(optimizer, Core):
        cure = "the optimizer inside of a trainer's wrapper is its .optimizer"
        raise TypeError(expected("optimizer", "an fn.Optimizer", type(optimizer).__name__, cure))
    modules = _listed(model)
    if optimizer.refused != LENT:
        optimizer.check_free("agreed_params")
    with torch.no_grad():
        pairs = agreed_pairs(optimizer)
        pairs += agreed_buffers(optimizer, modules)
    with in_place_of_own(optimizer, pairs):
        yield


@contextmanager
def in_place_of_own(optimizer: Core, pairs: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Put others in the place of some of this rank's own tensors, for as long as the context lasts."""
    before, kept = optimizer.refused, list[tuple[Tensor, Tensor]]()
    clean = [unit for unit in optimizer.units if unit.versions and unit.versions == versions_of(unit)]
    try:
        with torch.no_grad():
            # Kept before the first write, so that `finally` has all of them, whenever an exception comes.
            kept = [(p, p.clone()) for p, _ in pairs]
            with optimizer.writing():
                for p, x in pairs:
                    p.copy_(x)
        optimizer.refused = LENT
        yield
    finally:
        with torch.no_grad(), optimizer.writing():
            for p, x in kept:
                p.copy_(x)
        for unit in clean:  # what is put back is no other hand's
            unit.versions = versions_of(unit)
        optimizer.refused = before


LENT = "fn.adapters.agreed_params puts this rank's own params back at its end; leave that context first"


def _listed(model: Modules) -> list[nn.Module] | None:
    listed = [model] if isinstance(model, nn.Module) else model
    if listed is None:
        return None
    if not isinstance(listed, Iterable) or isinstance(listed, Tensor):  # one of no dimensions cannot be gone through
        raise TypeError(expected("model", "a module, several, or None", type(model).__name__))
    listed = [*listed]
    for module in listed:
        if not isinstance(module, nn.Module):
            raise TypeError(expected("model", "a module, several, or None", f"one with a {type(module).__name__}"))
    return listed


def agreed_buffers(core: Core, modules: Sequence[nn.Module] | None = None) -> list[tuple[Tensor, Tensor]]:
    """Return the buffers of a model, floating ones that differ between ranks with their mean, others with themselves.

    All ranks must call it. A body in train mode writes into buffers, also into counts, so all are to be put back.

    Args: modules: that have them; None: those that hold the params.
    Raises: RanksDisagree, on all ranks, before any buffer travels, if they have other buffers; PeerLost.
    """
    axes = [*core.wires]
    if not axes and not core.islands:
        return []
    everything = _buffers(_roots(core) if modules is None else modules)
    buffers = {name: x for name, x in everything.items() if x.is_floating_point() or x.is_complex()}
    if not axes and buffers:
        hint = "average them behind an exchange, or call agreed_params(optimizer, ()) where they need not agree"
        text = f"are not averaged over {core.islands!r}, whose ranks meet in exchanges only"
        warnings.warn(f"model: its {len(buffers)} floating buffers {text}; {hint}", stacklevel=5)
    if not axes or not buffers:
        return []
    left = (
        "params and buffers are as before; where a model has floating buffers all ranks enter agreed_params together: "
        "agreed_params(optimizer, ()) leaves them as they are, and a rank may enter it alone"
    )
    device, means = device_of(core), dict(buffers)
    forms = {f"buffer {name}": f"{x.dtype} {tuple(x.shape)}" for name, x in buffers.items()}
    with core.communicating(left), watched_by(Watchers()):  # which no ledger counts
        compare_on_axes(axes, lambda axis: check_agreement(axis, forms, device), device)
        for axis in axes:
            # Most buffers are constants, alike on all ranks: they stay bitwise, and do not travel.
            sums = gather_values([int(checksum(x)) for x in means.values()], axis, device)
            differing = [name for name, each in zip(means, zip(*sums, strict=True), strict=True) if len({*each}) > 1]
            wide = {name: means[name].to(torch.promote_types(means[name].dtype, torch.float32)) for name in differing}
            means |= {name: pmean(x.to(device), axis).to(means[name]) for name, x in wide.items()}
    return [(x, means.get(name, x)) for name, x in everything.items()]


def _buffers(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """Return the buffers of modules by name, each once, of a DTensor this rank's piece."""
    found, seen = dict[str, Tensor](), set[int]()
    for i, module in enumerate(modules):
        for name, x in module.named_buffers():
            if not is_lazy(x) and x.numel() and x.device.type != "meta" and id(x) not in seen:
                seen.add(id(x))
                found[name if len(modules) == 1 else f"{i}.{name}"] = pieces([x.detach()])[0]
    return found


def _roots(core: Core) -> list[nn.Module]:
    """Return the modules that hold params of an optimizer and are part of no other, in one order on all ranks."""
    members = [p for unit in core.units for p in unit.members]
    roots, held = roots_of(members)
    # What `gc.freeze` has hidden is not found; a module may also be called with other params than its own.
    if not held or (held < len(members) and gc.get_freeze_count()):
        text = f"no module is found that holds {len(members) - held} of its params"
        hint = "call agreed_params(optimizer, model), or agreed_params(optimizer, ()) if there are no buffers"
        warnings.warn(f"optimizer: {text}, so buffers stay each rank's own; {hint}", stacklevel=6)
    return _in_order(roots)


def _in_order(roots: list[tuple[nn.Module, int]]) -> list[nn.Module]:
    """Sort modules by the first param that they hold and what buffers they have: memory has no order."""
    first = {id(x): place for x, place in roots}
    buffers = {id(x): _buffers([x]) for x, _ in roots}
    text = {i: repr([(name, x.shape, x.dtype) for name, x in of_one.items()]) for i, of_one in buffers.items()}
    ordered = sorted((x for x, _ in roots), key=lambda x: (first[id(x)], text[id(x)]))
    for a, b in itertools.pairwise(ordered):
        if (first[id(a)], text[id(a)]) == (first[id(b)], text[id(b)]):
            lie = [[x.data_ptr() for x in buffers[id(root)].values()] for root in (a, b)]
            if lie[0] != lie[1]:
                wanted, got = "one model around the params", f"two with other buffers, of {type(a).__name__}"
                raise ValueError(expected("optimizer", wanted, got, "call agreed_params(optimizer, model)"))
    return ordered


def agreed_pairs(core: Core) -> list[tuple[Tensor, Tensor]]:
    """Return the params of this rank's own, each with what all ranks agree on in its place."""
    pairs = []
    for unit in core.units:  # a mean that is on its way changes nothing that is agreed on before its outer step
        members = [p.detach() for p in tree.leaves(unit.params)]
        apart = [*_apart(unit.state)]
        if not apart:
            continue
        for own, places in zip(apart, _places(core, unit, members, apart), strict=True):
            chosen = [members[i] for i in places]
            says: Any = roles.agreed_of(own)  # `_apart` yields only states that say it
            agreed = says(own, chosen)
            pairs += [] if agreed is None else [*zip(chosen, agreed, strict=True)]
    return pairs


def _apart(state: Tree, own: bool = False) -> Iterator[Tree]:
    """Yield the states in a state whose ranks stand at params of their own.

    Args: own: whether this is one rank's own. Raises: ValueError for one of which it is not known what ranks agree on.
    """
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        says = roles.agreed_of(state)
        if says is not None and not own:
            yield state
            return
        if roles.has_local_params(state):
            wanted = "a transform whose state has what all ranks agree on, as that of fn.outer"
            cure = "evaluate behind an exchange of all params, or the ranks' mean, fn.pmean(params, axis) in fn.bind"
            raise ValueError(expected("optimizer", wanted, f"{type(state).__name__}, which has local_params", cure))
        local = roles.rank_local(state)
        for name, value in zip(state._fields, state, strict=True):
            yield from _apart(value, own or name in local)
    else:
        for value in tree.children(state):
            yield from _apart(value, own)


def _places(core: Core, unit: Unit, members: Sequence[Tensor], apart: Sequence[Tree]) -> list[list[int]]:
    """Return the params of a unit, by number, that each of the states belongs to.

    One state of them all has them in their order. Several, or one of some of them, as in a partition: an init of
    params that hold their numbers tells, on a rank that is alone, for nothing is to be sent.
    """
    counts = [len(_copies(state)) for state in apart]
    if counts in ([len(members)], [0]):
        return [[*range(len(members))]]
    places = [[0] * count for count in counts]
    for power in range(len(members).bit_length()):  # a bit at a time, which a copy of any dtype can hold
        # Parameter i is filled with one bit of i; the copies in the state that init makes then spell its number.
        marked = iter([torch.full_like(p, float(i >> power & 1)) for i, p in enumerate(members)])
        with bind_alone(core.binding.axes):
            marked_states = [*_apart(unit.transform.init(tree.map(lambda _: next(marked), unit.params)))]  # noqa: B023
        for of_state, state in zip(places, marked_states, strict=True):
            bits = [int(x.flatten()[0]) if x.numel() else 0 for x in _copies(state)]
            of_state[:] = [place | bit << power for place, bit in zip(of_state, bits, strict=True)]
    return places


def _copies(state: Tree) -> list[Tensor]:
    return [leaf for name in roles.roles_of(state).copies[:1] for leaf in tree.leaves(getattr(state, name))]
