"""Warn of steps that are skipped one after the other, and say on which rank what is not finite.

The ranks skip together and know how many times, so that they can tell each other what they see when it is time for a
warning. Steps that are taken, and the first that are skipped, send nothing for it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator

from torch import Tensor

from fn import tree
from fn.adapters.optim.consistency import device_among
from fn.adapters.optim.param_groups import names_of
from fn.adapters.optim.state_dict import place_of
from fn.adapters.optim.training import Training
from fn.base import Phase, Round
from fn.collectives.agreement import gather_values
from fn.transforms.skip_nonfinite import all_finite

FIRST = 5
"""Skipped steps in a row after which a warning comes. The next ones come at powers of two from 16 on."""

LOOK = 16
"""Local steps between two looks at how many of them were left out, at most."""

NAMED = 4
"""Ranks that a warning names."""


def is_due(count: int) -> bool:
    """Return whether a warning is due after this many skipped steps in a row."""
    return count == FIRST or (count >= 16 and count & (count - 1) == 0)


def warn_of_skips(training: Training) -> None:
    """Warn, on rank 0, of the steps that were skipped. All ranks call it together, with the axes bound."""
    _warn(training, f"steps: the last {training.skipped_in_a_row} were skipped, and nothing moves until one is not")


def watch_exchange(training: Training, round_: Round, left_out: int) -> None:
    """Count an exchange of a round that was left out, and warn as of skipped steps if many were in a row.

    Args: left_out: how many had been before it. All ranks call it together, with the axes bound.
    """
    if round_.end is None:
        return
    row = training.missed_in_a_row.get(round_.end, 0)
    count = training.missed_in_a_row[round_.end] = row + 1 if training.left_out > left_out else 0
    if is_due(count):
        which = f"the last {count} of fragment {round_.end}"
        _warn(training, f"exchanges: {which} were left out, and its anchor rests until one is not")


def watch_local_steps(training: Training, phase: Phase | Round) -> None:
    """Count a local step, and warn if many in a row were left out; this rank does so alone, for no other knows.

    How many were is a number on the device, which the host would wait for. So it is looked at where something is
    exchanged, and after `LOOK` steps. Args: phase: of the step.
    """
    training.unseen_local_steps += 1
    if phase.phase is Phase.LOCAL and training.unseen_local_steps < LOOK:
        return
    taken, training.unseen_local_steps = training.unseen_local_steps, 0
    before, training.seen_dropped = training.seen_dropped, training.dropped
    row = training.missed_in_a_row.get("local", 0)
    now = training.missed_in_a_row["local"] = row + taken if training.seen_dropped - before == taken else 0
    if any(map(is_due, range(row + 1, now + 1))):
        rank, _ = place_of(training)
        what = next(_not_finite(training), "an update")
        text = f"local steps: the last {now} were left out by rank {rank}, which moves in exchanges only"
        warnings.warn(f"{text}; not finite: {what}", stacklevel=6)


def _warn(training: Training, text: str) -> None:
    rank, _ = place_of(training)
    leaf = next(_not_finite(training), None)
    texts = [] if leaf is None else [f"{leaf}, on rank {rank}"]
    for axis in training.axes:
        gathered = gather_values(texts, axis, device_among(training.groups))
        texts = [text for of_rank in gathered for text in of_rank]
    if rank:
        return
    more = f"; and something on {len(texts) - NAMED} more ranks" if len(texts) > NAMED else ""
    what = f"not finite: {'; '.join(texts[:NAMED])}{more}"
    if not texts:
        what = "gradients, parameters and state are finite, but what follows from them is not: lower lr or weight_decay"
    warnings.warn(f"{text}; {what}", stacklevel=7)


def _not_finite(training: Training) -> Iterator[str]:
    """Yield what is not finite on this rank: gradients, else parameters, else leaves of the state."""
    for g, group in enumerate(training.groups):
        for name, p in zip(names_of(group), group["params"], strict=True):
            if p.grad is not None and not all_finite([p.grad]):
                yield f"the gradient of parameter {name} of group {g}"
    for g, group in enumerate(training.groups):
        for name, p in zip(names_of(group), group["params"], strict=True):
            if not all_finite([p.detach()]):
                yield f"parameter {name} of group {g}"
    for path, leaf in zip(tree.paths(training.states), tree.leaves(training.states), strict=True):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and not all_finite([leaf]):
            yield f"state.{path}"
