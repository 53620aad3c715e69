"""Warn about what runs but does not do what was meant: configurations, jumps, and steps that are skipped in a row.

The ranks skip together and know how many times, so that they can tell each other what they see when it is time for a
warning. Steps that are taken, and the first that are skipped, send nothing for it.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.optim.consistency import device_among, worker_errors
from fn.adapters.optim.param_groups import names_of
from fn.adapters.optim.state_dict import place_of
from fn.adapters.optim.training import Training
from fn.base import Part, Phase, Round, facts_of
from fn.collectives.agreement import gather_values
from fn.collectives.primitives import psum
from fn.inplace.match import slow_tensors
from fn.kernels.reference.steps import over_root
from fn.kernels.table import cells
from fn.schedules import FreezeAfter, FreezeWhenStable, ZeroOneSchedule, phase_of
from fn.transforms.adam import OnebitAdamState
from fn.transforms.outer import OuterState
from fn.transforms.sharded import ShardedState, divisions
from fn.transforms.skip_nonfinite import SkipState, all_finite
from fn.transforms.zero_one_adam import ZeroOneAdamState

logger = logging.getLogger("fn")

LARGE = 1 << 20
"""Elements from which it matters whether kernels are fused."""

FAR = 1000.0
"""Learning rates that an element moves in a step; Adam's own steps are of one to ten."""

ORDINARY = 100.0
"""Learning rates that the step had been at most with the `eps` that is named; later ones are a little more."""

KINDS = OnebitAdamState, ZeroOneAdamState

_warned: WeakSet[Any] = WeakSet()

_SHRINKS = "weight decay, if there is any, shrinks them all the same"


def warn_at_start(training: Training, given: bool) -> None:
    """Warn of a schedule without a warm-up, and, where there are other ranks, of what does not compress or send.

    Args: given: whether there is a schedule.
    """
    several = any(training.binding.axes[axis].size > 1 for axis in training.axes)
    if several:
        _warn_of_no_axis(training)
        if tree.leaves(worker_errors(training.states)):
            _warn_of_plain_torch([p for group in training.groups for p in group["params"]])
    in_rounds = any(transform.rounds is not None for transform in training.transforms)
    no_rounds = not given or isinstance(training.schedule, FreezeAfter | FreezeWhenStable | ZeroOneSchedule)
    if several and in_rounds and no_rounds:
        got = type(training.schedule).__name__ if given else "None, so every step averages whole gradients"
        text = f"schedule: is {got}, but this optimizer takes local steps; pass fn.every(h) to exchange every h steps"
        warnings.warn(text, stacklevel=3)
    elif not given and several and tree.leaves(roles.find(training.states, "errors")):
        text = "schedule: is None, so every step is a warm-up step; pass fn.freeze_after(n) for the compressed phase"
        warnings.warn(text, stacklevel=3)
    phase = phase_of(training.schedule, 0).phase
    if training.needs_warmup(phase):
        text = f"schedule: has no warm-up; the first step is one, for {phase} of this optimizer needs one before it"
        warnings.warn(text, stacklevel=3)


def _warn_of_no_axis(training: Training) -> None:
    argument = inspect.signature(training.make).parameters.get("axis")
    is_open = argument is not None and argument.default is None
    if is_open and any(group.get("axis") is None for group in training.groups):
        bound = " or ".join(repr(axis) for axis in training.axes)
        text = f"axis: is None, so gradients are not averaged; pass partial(make, axis=...) with {bound}"
        hint = "or build the optimizer outside of fn.bind if something else averages them, such as DDP"
        warnings.warn(f"{text}, {hint}", stacklevel=4)


def _warn_of_plain_torch(params: list[Tensor]) -> None:
    for device in sorted({p.device.type for p in params}):
        count = sum(p.numel() for p in params if p.device.type == device)
        fused = [cell for op in ("sign_encode_feedback", "quantize_feedback") for cell in cells(op, device)]
        if count >= LARGE and all(cell.provider == "torch" for cell in fused):
            text = "are fused, so codes are made in plain torch, which takes several times as long and more memory"
            hint = "`python -m fn` says what can be installed"
            warnings.warn(f"kernels: none for {device!r} {text}; {hint}", stacklevel=4)


def warn_of_late_group(training: Training) -> None:
    """Warn of a param group, the last one, that comes after the warm-up."""
    last = len(training.groups) - 1
    if training.steps and training.needs_warmup(training.phase.phase, last):
        text = "come after the warm-up; where it freezes the second moment, theirs is 0 and no gradient moves them"
        warnings.warn(f"params: {text}; {_SHRINKS}", stacklevel=3)


def warn_of_thawed(training: Training, places: Iterable[tuple[int, int]]) -> None:
    """Warn of parameters that get their first gradients after the warm-up.

    Args: places: (group, parameter) by index, of those that had no gradient up to now.
    """
    places = [(g, i) for g, i in places if training.needs_warmup(training.phase.phase, g)]
    still, shards = [], {g: _seen_in_shards(training, g) for g in sorted({g for g, _ in places})}
    for g, i in sorted(places):
        params, moments = training.groups[g]["params"], roles.find(training.states[g], "second_moment")
        alike = [nu[i] for nu in moments if len(nu) == len(params) and nu[i].shape == params[i].shape]
        seen = shards[g] or {i: not alike or any(bool(nu.any()) for nu in alike)}
        if not seen[i]:
            still.append(f"{names_of(training.groups[g])[i]} of group {g}")
    if still:
        text = "their second moment is 0 and frozen, so no gradient moves them until the schedule returns to a warm-up"
        text = f"get first gradients after the warm-up; {text}; {_SHRINKS}"
        warnings.warn(f"params: {', '.join(still)}: {text}", stacklevel=8)


def _seen_in_shards(training: Training, g: int) -> dict[int, bool]:
    """Return whether each parameter of a group whose second moment rests has one on any rank, in shards.

    Empty where there are none. All ranks must call it; one number per parameter on the wire, and the memory of a state.
    """
    state, params = training.states[g], [p.detach() for p in training.groups[g]["params"]]
    if not isinstance(state, SkipState) or not isinstance(state.inner, ShardedState):
        return {}
    with divisions.collected() as notes:  # how the group's tensors lie in shards
        training.transforms[g].init(params)
    seen = torch.zeros(len(params), dtype=torch.float32, device=params[0].device)
    for nu in roles.find(state, "second_moment"):
        for bucket, shard in zip(notes[0].plan, tree.leaves(nu), strict=True):
            for i, is_seen in zip(bucket.leaf_indices, notes[0].placed(bucket, shard != 0), strict=True):
                seen[i] += is_seen.any()
    for axis in training.axes:
        seen = psum(seen, axis)
    return {i: bool(x) for i, x in enumerate(seen)}


def warn_of_jumps(training: Training, phase: Phase | Round) -> None:
    """Warn, once, if a first compressed step after a warm-up step moved elements by more than `FAR` learning rates.

    A code gives every element of a tensor a momentum of plus or minus its scale, and the frozen second moment divides
    it. Where that comes from rounding alone, the quotient is thousands of steps of Adam. The biases of keys are such
    elements, because a softmax does not see them: a third of in_proj_bias in torch's attention, and of GPT-2's
    c_attn.bias. Where steps are clamped to a `max_step` no element jumps.

    Rank 0 says so; of shards each rank that holds such elements. 0/1 Adam has such steps after each of its variance
    steps, which are ever rarer. Call it when the step is written and counted; other steps cost nothing.
    """
    if phase is not Phase.COMPRESSED or phase_of(training.schedule, max(training.steps - 2, 0)) is not Phase.WARMUP:
        return
    if training in _warned or not any(facts_of(transform).unclamped for transform in training.transforms):
        return
    is_first = not any(int(bound.rank) for bound in training.binding.axes.values())
    jumps = [
        (*jump, name)
        for g, hypers in enumerate(training.hypers)
        for state in tree.instances(training.states[g], KINDS)
        for name, jump in _jumps(training.groups[g], state, hypers, is_first)
        if jump[0] > FAR
    ]
    if jumps:
        _warned.add(training)
        most, count, size, _, name = max(jumps)
        eps = max(jump[3] for jump in jumps)
        others = f", and {len(jumps) - 1} other parameters" if len(jumps) > 1 else ""
        what = f"{count} of {size} elements of {name}{others}, moved by up to {most:.0f} times lr"
        why = "codes give them the scale of the others, but next to no gradient, that of a key's bias say, froze theirs"
        hint = f"pass max_step=1.0; or eps={eps:.0e}, from the start or written into the param groups now"
        warnings.warn(f"eps: too small for the second moment of {what}: {why}; {hint}", stacklevel=6)


def _jumps(group: dict[str, Any], state: Any, hypers: dict[str, Any], is_first: bool) -> list[tuple[str, Any]]:
    """Return by name for each parameter: the largest step, how many are far, of how many, and the eps they would need.

    The moments of shards are vectors of this rank's. What all ranks hold is for the first one to look at.
    """
    mus, nus = tree.leaves(state.mu), tree.leaves(state.nu)
    names = [f"parameter {name}" for name in names_of(group)]
    if [mu.shape for mu in mus] != [p.shape for p in group["params"]]:
        names = [f"shard {i} of this rank" for i in range(len(mus))]
    elif not is_first:
        return []
    eps, weights = float(hypers.get("eps", 0.0)), (1.0, 1.0)
    if hypers.get("bias_correction"):
        weights = float(state.mu_weight), float(state.nu_weight)
    rows = zip(names, mus, nus, strict=True)
    return [(name, _measure(mu / weights[0], nu / weights[1], eps)) for name, mu, nu in rows if mu.numel()]


def _measure(mu: Tensor, nu: Tensor, eps: float) -> tuple[float, int, int, float]:
    size = mu.abs()
    steps = over_root(size, nu, eps).nan_to_num_(0.0)
    far = steps > FAR
    return float(steps.max()), int(far.sum()), mu.numel(), float((size * far).max()) / ORDINARY


def say_slow(training: Training, phase: Phase | Part, grads: Sequence[Sequence[Tensor]], first: int = 0) -> None:
    """Say once in the log why steps that could be in place are taken link by link.

    Args: grads: of the param groups from `first` on.
    """
    for group, updates in enumerate(grads, first):
        params = training.params[group]
        reason = slow_tensors(params, updates) if params else ""
        if reason and ("slow", reason) not in training.said:
            training.said.add(("slow", reason))
            text = "the %s step is taken link by link, in several times the memory traffic: in param group %d %s"
            logger.warning(text, phase.phase.value, group, reason)


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
    _warn_of_outliers(training, round_.end)


def _warn_of_outliers(training: Training, fragment: int) -> None:
    """Name, on rank 0, the ranks whose differences a guard left out of a mean: the first time, and if many in a row."""
    rounds = [(g, state) for g, states in enumerate(training.states) for state in tree.instances(states, OuterState)]
    guards = {g: guard for g, state in rounds for guard in state.guard[fragment : fragment + 1] if guard}
    if not guards:
        return
    device = device_among(training.groups)
    told = torch.stack([x.to(device) for guard in guards.values() for x in (guard.number, guard.first)]).cpu()
    for g, (number, first) in zip(guards, told.view(-1, 2).tolist(), strict=True):
        row = f"outliers of fragment {fragment} in group {g}"
        count = training.missed_in_a_row[row] = training.missed_in_a_row.get(row, 0) + 1 if number else 0
        if (count == 1 or is_due(count)) and place_of(training)[0] == 0:
            more = f" and of {number - 1} more" if number > 1 else ""
            times = f" the last {count} times" if count > 1 else ""
            text = f"the difference of rank {first}{more} was left out of fragment {fragment}'s mean{times}"
            why = "its norm is an outlier of its history, or far above the others', or not finite"
            warnings.warn(f"exchanges: {text}: {why}; the rank goes on from the anchor", stacklevel=4)


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
    rank, _ = place_of(training, training.all_axes)
    leaf = next(_not_finite(training), None)
    texts = [] if leaf is None else [f"{leaf}, on rank {rank}"]
    for axis in training.all_axes:
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
    params = [
        (f"parameter {name} of group {g}", p.detach(), p.grad)
        for g, group in enumerate(training.groups)
        for name, p in zip(names_of(group), group["params"], strict=True)
    ]
    leaves = zip(tree.paths(training.states), tree.leaves(training.states), strict=True)
    named = [(f"the gradient of {name}", grad) for name, _, grad in params]
    named += [(name, p) for name, p, _ in params] + [(f"state.{path}", leaf) for path, leaf in leaves]
    for name, x in named:
        if isinstance(x, Tensor) and x.is_floating_point() and not all_finite([x]):
            yield name
