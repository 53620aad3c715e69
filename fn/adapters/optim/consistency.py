"""Compare with the other ranks what must agree: params at construction, gradients in the first step of a phase."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.adapters.optim.param_groups import names_of
from fn.adapters.optim.state_kinds import SAME, by_path, kinds
from fn.base import Phase, Transform, facts_of
from fn.collectives.agreement import check_agreement, describe_numbers, differences, gather_values
from fn.collectives.axis import axis_size
from fn.collectives.primitives import all_gather
from fn.collectives.profiling import Watchers, watched_by
from fn.errors import expected
from fn.schedules import Every
from fn.transforms.outer import OuterState

Grads = tuple[list[Tensor], ...]

LOCAL_STEP_TAKEN = "the exchange is left out; parameters and state are as after the local step, which counts"
"""What an exchange of a round leaves that fails."""

CLOSE = 1e-5
"""Relative difference of norms that clipping to one norm leaves, by its rounding; norms of two ranks differ by more."""


def device_among(params: Any) -> torch.device:
    """Return the device of the first tensor in a tree of params or param groups; the CPU if there is none."""
    return next((p.device for p in tree.leaves(params) if isinstance(p, Tensor)), torch.device("cpu"))


def check_listed(axes: Sequence[str], params: list[Any], others: Mapping[str, object]) -> None:
    """Compare what transforms do not know: ranks with other phases, groups or names would wait for one another.

    Args: params: what a `torch.optim.Optimizer` was given, as a list. others: more that must agree.
    Raises: `RanksDisagree`, on every rank.
    """
    groups = params if params and isinstance(params[0], dict) else [{"params": params}]
    listed = [list(p) if not isinstance(p, Tensor) else [p] for p in (g.get("params", ()) for g in groups)]
    fields: dict[str, object] = {"number of param groups": len(groups)}
    for g, members in enumerate(listed):
        fields[f"number of parameters in group {g}"] = len(members)
        names = [p[0] for p in members if isinstance(p, tuple)]
        fields.update({f"name of parameter {i} in group {g}": name for i, name in enumerate(names)})
    for axis in axes:
        check_agreement(axis, {**fields, **others}, device_among(params))


def check_fragments(schedule: Any, states: Any) -> None:
    """Refuse a schedule of rounds that exchanges other fragments than `fn.outer` has, some of them never.

    Raises: ValueError with both numbers. Schedules of the user's own are not looked at.
    """
    counts = [len(state.outer) for state in tree.instances(states, OuterState)]
    if counts and isinstance(schedule, Every) and schedule.fragments != max(counts):
        wanted = f"{max(counts)} fragments, as fn.outer makes of these params"
        got = f"fn.every.fragments={schedule.fragments}"
        raise ValueError(expected("schedule", wanted, got, "give both the same number, at most that of the params"))


def check_accepted(
    axes: Sequence[str], group: int, problem: BaseException | None, device: torch.device, strided: Sequence[str] = ()
) -> None:
    """Tell the other ranks whether a param group was accepted here, and hear it from them.

    Args: strided: the names of its parameters that are not contiguous. Kernels of whole steps do not take these, and a
        sharded step sends other messages without them, so ranks that differ would mix up updates and params.
    Raises: `problem` if there is one and the ranks agree on it; else `RanksDisagree`, on every rank.
    """
    verdict = "accepted" if problem is None else f"refused ({type(problem).__name__}: {problem})"
    fields: dict[str, object] = {f"param group {group}": verdict}
    fields |= {f"layout of parameter {name} in group {group}": "not contiguous" for name in strided}
    for axis in axes:
        check_agreement(axis, fields, device)
    if problem is not None:
        raise problem


def check_start(axes: Sequence[str], transform: Transform, state: Any, group: Mapping[str, Any], place: int) -> None:
    """Refuse a param group whose numbers differ between ranks that are to train one model.

    Updates are the same on all ranks, so parameters that start apart stay apart, and nothing would say so; likewise
    what no class of the state names in `rank_local`. Not looked at are axes that the transform does not communicate
    over. All ranks must call it; one pass over parameters and state, and a digest of them on the wire.

    Args: state: of the transform. group, place: the param group and its number.
    Raises: `RanksDisagree`, on every rank.
    """
    params = group["params"]
    facts = facts_of(transform)
    axes = [axis for axis in axes if facts.silent or axis in facts.axes]
    marks = by_path(kinds(state), "")
    replicated = describe_numbers({path: leaf for path, leaf in by_path(state, "").items() if marks[path] == SAME})
    fields = {f"{path} of the state, which rank_local does not name,": text for path, text in replicated.items()}
    for axis in axes:
        check_agreement(axis, fields, device_among(params))
    pairs = zip(names_of(group), params, strict=True)
    numbers = describe_numbers({f"parameter {name} in group {place}": p for name, p in pairs})
    for axis in axes:
        for difference in differences(numbers, partial(gather_values, axis=axis, device=device_among(params))):
            raise difference.error(
                f"the numbers of {difference.name} are others on rank {difference.rank} of axis {axis!r} than on rank "
                f"0; start from the same ones: the same seed before the model is made, torch.distributed.broadcast, "
                f"or DistributedDataParallel, which does that"
            )


def refuse_elsewhere(params: Iterable[Tensor]) -> None:
    """Refuse parameters on the meta device with a ValueError that says what to do instead."""
    for i, p in enumerate(params):
        if p.is_meta:
            raise ValueError(
                f"params: parameter {i} is on the meta device, which holds no numbers, and module.to_empty(device=...) "
                "makes other parameters of it; make the optimizer after that"
            )


def in_doubt(refuse_averaged: bool, compresses: bool) -> frozenset[Phase]:
    """Return the phases whose first step looks at its gradients."""
    phases = (Phase.WARMUP, Phase.COMPRESSED) if compresses else (Phase.COMPRESSED,)
    return frozenset(phases if refuse_averaged else ())


def still_in_doubt(doubts: frozenset[Phase], phase: Phase, grads: Grads, axes: Sequence[str]) -> frozenset[Phase]:
    """Look at the gradients of a step; return the phases that are still to be looked at.

    If they are the same on all ranks of an axis, something has averaged them, DDP perhaps, and has sent what the
    optimizer was to save: in a warm-up that is warned of, in the compressed phase refused. If they differ but have one
    norm, each rank has clipped by a norm of its own: that is warned of. Gradients that are zero or not finite tell
    nothing. All ranks must call it; three numbers per parameter travel.

    Raises: ValueError, on all ranks, with what to do.
    """
    marks = [_mark(g) for group in grads for g in group if g.numel()]
    if not marks:
        return doubts
    told = True
    for axis in axes:
        rows = all_gather(torch.stack(marks), axis)
        told = told and bool(torch.isfinite(rows).all()) and bool(rows.any())
        if not told or axis_size(axis) == 1:
            continue
        norms = rows[..., 2].sum(1).sqrt()
        if bool((rows == rows[:1]).all()):
            text = (
                f"gradients: are the same on all ranks of {axis!r}, so they were averaged already and the compressed "
                f"phase would save nothing; call fn.adapters.ddp.keep_local(model) if the model is wrapped in DDP, or "
                f"pass refuse_averaged=False if the ranks see the same data on purpose"
            )
            if phase is Phase.COMPRESSED:
                raise ValueError(text)
            warnings.warn(f"{text}; the first compressed step refuses them", stacklevel=7)
        elif bool(((norms - norms[0]).abs() <= CLOSE * norms[0]).all()):
            text = f"gradients: have the norm {float(norms[0]):.4g} on all ranks of {axis!r}, although they differ"
            hint = "which is not that of their mean; leave that out, and give the optimizer max_norm in its place"
            text = f"{text}, as if each rank had clipped by a norm of its own, {hint}"
            warnings.warn(text, stacklevel=7)
    return doubts - {phase} if told else doubts


def shared_in_doubt(
    doubts: frozenset[Phase], params: Sequence[Sequence[Tensor]], axes: Sequence[str]
) -> frozenset[Phase]:
    """Look at the gradients behind the first exchange of rounds; return the phases that are still to be looked at.

    Between exchanges each place on an axis trains alone, so no two may have the same gradients. DDP may average within
    an island, whose ranks have one place, and nowhere else. Gradients that are zero or not finite tell nothing. All
    ranks must call it; three numbers per parameter travel, which no ledger counts.

    Raises: ValueError, on all ranks, with what to do.
    """
    grads = [x if x is not None else p.new_zeros(1) for group in params for p in group for x in [p.grad]]
    none = torch.zeros(0, 3, dtype=torch.float64, device="cpu")
    marks, told = torch.stack([_mark(g) for g in grads]) if grads else none, bool(grads)
    for axis in axes:
        with watched_by(Watchers()):
            rows = all_gather(marks, axis)
        told = told and bool(torch.isfinite(rows).all()) and bool(rows.any())
        if not told:
            continue
        which = torch.unique(rows.flatten(1), dim=0, return_inverse=True)[1].tolist()
        b = next((rank for rank, one in enumerate(which) if one in which[:rank]), None)
        if b is not None:
            a = which.index(which[b])
            raise ValueError(
                f"gradients: are the same on ranks {a} and {b} of {axis!r}, which train alone between exchanges, so "
                f"something averages them, such as DDP; call fn.adapters.ddp.keep_local(model), give DDP the "
                f"process_group of one island, or pass refuse_averaged=False if these ranks see the same data on "
                f"purpose; {LOCAL_STEP_TAKEN}"
            )
    return doubts - {Phase.COMPRESSED} if told else doubts


def _mark(g: Tensor) -> Tensor:
    wide = g.detach().double()
    return torch.stack([wide.sum(), wide.abs().sum(), wide.square().sum()])
