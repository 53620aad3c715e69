"""Checks of what is given to `outer`, and to other transforms that take local steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.arguments import check_interval, check_is_transform
from fn.base import Phase, Transform, facts_of, has_phase, links_of, name_of
from fn.errors import expected
from fn.facts import Averages
from fn.kernels.tracing import is_concrete
from fn.schedules import Every, Schedule
from fn.transforms.decay_and_lr import Rate
from fn.transforms.fragments import check_fragments


def check_outer(inner: Any, outer_tx: Any, sync: Any, fragments: Any, alpha: Any, store: Any, on_skip: Any) -> None:
    """Refuse what `outer` cannot take, with a TypeError or ValueError that names the argument."""
    check_inner(inner, sync)
    check_outer_tx(outer_tx)
    check_sync(sync)
    if facts_of(sync).unequal:  # the anchor is taken to be the same on all ranks, and they would drift apart in silence
        raise ValueError(expected("sync", "an average that is the same on all ranks", "one that differs"))
    check_fragments(fragments)
    check_interval("alpha", alpha, "[0, 1]")
    check_store(store)
    if on_skip not in ("keep", "anchor"):
        raise ValueError(expected("on_skip", "'keep' or 'anchor'", f"{on_skip!r}"))
    if (names := facts_of(sync).tree) and (inside := facts_of(inner).axes):
        got = f"{_named(names)} beside an inner optimizer that communicates over {_named(inside)}"
        raise ValueError(expected("sync", "an average of each tensor by itself", got, "give inner no axis"))


def check_schedule(fragments: Any, schedule: Schedule) -> None:
    """Refuse an `fn.every` of another number of fragments, or one that begins an exchange before the last one ends."""
    counted = 1 if fragments is None else fragments  # how many a function makes depends on the params
    if isinstance(counted, int) and (made := getattr(schedule, "fragments", counted)) != counted:
        wanted, got = f"{counted} fragments, as fn.outer has", f"fn.every.fragments={made}"
        raise ValueError(expected("schedule", wanted, got, "give both the same number"))
    if isinstance(schedule, Every) and schedule.delay >= schedule.h:
        wanted = f"a delay of less than h={schedule.h}"
        raise ValueError(expected("schedule", wanted, f"delay={schedule.delay}", "use delay = h - 1"))


def check_inner(inner: Any, sync: Any = None) -> None:
    """Refuse an inner optimizer that communicates with other islands, as far as its facts say, or has rounds itself.

    Over another axis than `sync` it may communicate: its ranks are an island, and take local steps together. So what
    would lead them apart is refused. Args: sync: what averages over islands; None: it may not communicate at all.
    """
    check_is_transform("inner", inner)
    if inner.exchange is not None:
        raise ValueError(expected("inner", "an optimizer that takes steps", "one with rounds, such as fn.outer"))
    facts = facts_of(inner)
    if not facts.axes:
        return
    cure = "local steps send nothing; put fn.average(axis) in front of fn.outer for the warm-up"
    if sync is None:
        raise ValueError(expected("inner", "no communication over an axis", f"one over {_named(facts.axes)}", cure))
    check_is_transform("sync", sync)
    across = facts_of(sync).axes
    if not across or {*across} & {*facts.axes}:
        whose = f"of sync, {_named(across)}" if across else "beside a sync without one"
        wanted = f"no communication over an axis {whose}"
        cure = cure.replace("nothing", "nothing to other islands") + "; within an island give it an axis of its own"
        raise ValueError(expected("inner", wanted, f"one over {_named(facts.axes)}", cure))
    if facts.unequal:
        wanted = f"params that are the same on all ranks of {_named(facts.axes)}, which are an island"
        raise ValueError(expected("inner", wanted, "each rank's own"))
    # Its ranks would take steps along gradients of their own, and an island would come apart unnoticed.
    if local_phase(inner) is Phase.COMPRESSED and {*facts.averaged.warmup} - {*facts.averaged.compressed}:
        wanted = f"an average over {_named(facts.axes)} in the compressed phase, which local steps take"
        cure = "put fn.compressed_average(axis, fn.identity(), fn.off()) behind fn.average(axis)"
        raise ValueError(expected("inner", wanted, "one in the warm-up only", cure))


def local_phase(inner: Transform) -> Phase:
    """Return the phase of an inner optimizer whose steps are local steps.

    One that communicates within an island does so in them, as its local phase does not.
    """
    if facts_of(inner).axes:
        return Phase.COMPRESSED if has_phase(inner, Phase.COMPRESSED) else Phase.WARMUP
    return Phase.LOCAL if has_phase(inner, Phase.LOCAL) else Phase.WARMUP


def averages_of_rounds(inner: Transform, local: Phase, sync: Transform) -> Averages:
    """Return what is averaged where an inner optimizer takes local steps, and `sync` averages what they have done."""
    of_inner = facts_of(inner).averaged
    rounds = (*getattr(of_inner, local.value), *facts_of(sync).averaged.compressed)
    return Averages(of_inner.warmup, rounds, rounds)


def check_outer_tx(outer_tx: Any) -> None:
    """Refuse an outer optimizer that communicates or does not end in a learning rate: it would climb, not descend."""
    check_is_transform("outer_tx", outer_tx)
    if axes := facts_of(outer_tx).axes:
        cure = "all ranks take the outer step alike; sync is what communicates"
        raise ValueError(expected("outer_tx", "no communication over an axis", f"one over {_named(axes)}", cure))
    last = links_of(outer_tx.local_update)[-1:] if has_phase(outer_tx, Phase.LOCAL) else []
    if not last or not isinstance(last[0].update, Rate):
        got = name_of(last[0].update) if last else "none in its local phase"
        cure = "write fn.chain(fn.trace(0.9, nesterov=True), fn.scale_by_learning_rate(0.7))"
        raise ValueError(expected("outer_tx", "scale_by_learning_rate as the last link", got, cure))


def check_sync(sync: Any) -> None:
    """Refuse a transform that averages in the warm-up only. `fn.chain()`, which never averages, is for one rank."""
    check_is_transform("sync", sync)
    if not has_phase(sync, Phase.COMPRESSED):
        raise ValueError(expected("sync", "an average with a compressed phase", "one without"))
    # `fn.average(axis)` is this: its compressed phase passes what it gets, and ranks would never agree.
    if links_of(sync.warmup_update) and not links_of(sync.compressed_update):
        cure = "for the exact mean write fn.compressed_average(axis, fn.identity(), fn.off())"
        raise ValueError(expected("sync", "an average in the compressed phase", "one in the warm-up only", cure))


def check_store(store: Any) -> None:
    """Refuse what is neither "cpu" nor a floating dtype of 16 bits or more."""
    if store is None or store == "cpu":
        return
    if not isinstance(store, torch.dtype):
        raise TypeError(expected("store", "a dtype, 'cpu' or None", f"{store!r}"))
    if not store.is_floating_point or store.itemsize < 2:
        raise ValueError(expected("store", "a floating dtype of 16 bits or more", f"{store}"))


def check_holds(store: torch.dtype | None, params: Any) -> None:
    """Refuse params that overflow in the dtype of their anchor: no exchange of them would ever be finite."""
    for path, p in zip(tree.paths(params), tree.leaves(params), strict=True):
        # The numbers are looked at once, from `init`: a wait for the device costs no step. Fake and "meta" params have
        # none.
        if narrows(store, p.dtype) and is_concrete(p) and not p.is_meta and (p.isfinite() & p.to(store).isinf()).any():
            got = f"{store}, in which leaf {path!r} overflows"
            raise ValueError(expected("store", "a dtype that holds the params", got, "use torch.bfloat16, or None"))


def narrows(store: torch.dtype | None, dtype: torch.dtype) -> bool:
    """Tell whether a dtype has a smaller range than that of the params."""
    return store is not None and torch.finfo(store).max < torch.finfo(dtype).max


def check_alike(alone: Tensor) -> None:
    """Refuse a warm-up step behind local ones, where the host can tell: the ranks' inner states differ then."""
    # A count on a device is not read: each step of the warm-up would wait for it.
    if alone.device.type == "cpu" and is_concrete(alone) and alone > 0:
        got = f"WARMUP after {int(alone)} steps of rounds"
        cure = "no exchange brings the inner states of the ranks together; begin with the warm-up, as fn.every does"
        raise ValueError(expected("phase", "LOCAL or a round", got, cure))


def _named(axes: Sequence[str]) -> str:
    return ", ".join(map(repr, axes))
