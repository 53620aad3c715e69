"""Warnings of runs that do not do what was meant: by configurations, missing gradients, skips in a row.

The ranks skip together and know how many times, so that they can tell each other what they see when it is time for a
warning. Steps that are taken, and the first that are skipped, send nothing for it.
"""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.optim.core import Core, count_of, updates_of
from fn.adapters.optim.groups import names_of
from fn.adapters.optim.shards import pieces
from fn.adapters.optim.state_dict import place_of
from fn.adapters.optim.units import Unit
from fn.base import Phase, Round
from fn.collectives.agreement import gather_values
from fn.collectives.axis import rank_dims
from fn.errors import expected
from fn.inplace.match import slow_tensors
from fn.kernels.table import cells
from fn.schedules import FreezeAfter, FreezeWhenStable, ZeroOneSchedule, phase_of
from fn.transforms.skip_nonfinite import all_finite

logger = logging.getLogger("fn")

LARGE = 1 << 20
"""Elements from which it matters whether kernels are fused."""

FIRST = 5
"""Skipped steps in a row after which a warning comes. The next ones come at powers of two from 16 on."""

LOOK = 16
"""Local steps between two looks at how many of them were left out, at most."""

SHRINKS = "weight decay, if there is any, shrinks them all the same"
"""How parameters move whose second moment is 0 and frozen."""

NAMED = 4
"""Ranks, or parameters, that a warning names."""


def at_start(core: Any, given: bool) -> None:
    """Warn of settings that do not compress, send or warm up, and watch the steps from now on.

    Args: given: whether there is a schedule.
    """
    states = [unit.state for unit in core.units]
    has_errors = bool(tree.leaves(roles.find(states, "errors")))
    if core.wires:
        _warn_of_no_axis(core)
        if has_errors:
            _warn_of_plain_torch([p for group in core.param_groups for p in group["params"]])
    in_rounds = any(unit.transform.exchange is not None for unit in core.units)
    no_rounds = not given or isinstance(core.schedule, FreezeAfter | FreezeWhenStable | ZeroOneSchedule)
    if core.wires and in_rounds and no_rounds:
        got = type(core.schedule).__name__ if given else "None, so every step averages whole gradients"
        text = f"schedule: is {got}, but this optimizer takes local steps; pass fn.every(h) to exchange every h steps"
        warnings.warn(text, stacklevel=3)
    elif not given and core.wires and has_errors:
        text = "schedule: is None, so every step is a warm-up step; pass fn.freeze_after(n) for the compressed phase"
        warnings.warn(text, stacklevel=3)
    phase = phase_of(core.schedule, 0).phase
    if any(phase in unit.transform.needs_warmup for unit in core.units):
        text = f"schedule: has no warm-up; the first step is one, for {phase} of this optimizer needs one before it"
        warnings.warn(text, stacklevel=3)
    if isinstance(core.schedule, FreezeWhenStable):
        second_moment_norm(core)
    register(core)


def register(core: Core) -> None:
    """Register the hooks that watch steps; a copy of an optimizer gets its own."""
    watch = _Watch()
    core.register_step_post_hook(lambda opt, args, kwargs: watch.after(opt))
    core.register_load_state_dict_post_hook(lambda opt: watch.start_anew(core))


class _Watch:
    """The counts and flags that warnings need from step to step."""

    def __init__(self) -> None:
        self.is_first = True
        self.without: list[tuple[int, int]] = []  # (unit, parameter) that had no gradient up to now
        self.looked_at: set[Phase] = set()  # phases whose tensors were compared with what their kernels take
        self.skipped_in_a_row = 0
        self.left_out_in_a_row: dict[int, int] = {}
        self.left_out = self.unseen = self.dropped = self.dropped_in_a_row = 0

    def after(self, core: Core) -> None:
        """Look for reasons to warn behind a step."""
        phase, moved = core.now, core.moved
        if self.is_first or self.without:
            self.watch_missing(core)
        if phase.phase not in self.looked_at:
            self.looked_at.add(phase.phase)
            _say_slow(core, phase)
        if phase.phase is not Phase.LOCAL:
            self.skipped_in_a_row = 0 if moved else self.skipped_in_a_row + 1
            # All ranks have skipped as many, so they all come here together, and may communicate in `_warn`.
            if is_due(self.skipped_in_a_row):
                _warn(core, f"steps: the last {self.skipped_in_a_row} were skipped, and nothing moves until one is not")
        if isinstance(phase, Round) and phase.end is not None:
            self.count_exchange(core, phase.end)
        if phase is Phase.LOCAL or isinstance(phase, Round):
            self.count_local_step(core, phase)
        if phase is Phase.WARMUP and isinstance(core.schedule, FreezeWhenStable):
            core.schedule.observe(core.steps - 1, second_moment_norm(core) if moved else None)

    def start_anew(self, core: Core) -> None:
        """Go on from a state that was loaded."""
        self.unseen, self.dropped, self.left_out = 0, count_of(core, "dropped"), count_of(core, "left_out")

    def watch_missing(self, core: Core) -> None:
        """Name the parameters that have no gradient in the first step, and those whose first one comes too late."""
        if self.is_first:
            members = [(u, i, p) for u, unit in enumerate(core.units) for i, p in enumerate(unit.members)]
            self.without = [(u, i) for u, i, p in members if p.grad is None]
            missing = [_name(core, u, i) for u, i, p in members if p.requires_grad and p.grad is None]
            if missing and core.wires:
                more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
                text = f"params: {', '.join(missing[:NAMED])}{more} had no gradient in the first step: it counts as 0"
                why = "moments decay, and methods that normalise (Muon, votes, 1-bit codes) move it at full speed"
                cure = "call requires_grad_(False) on all ranks while they are not used"
                warnings.warn(f"{text}; {why}; {cure}", stacklevel=5)
            self.is_first = False
            return
        came = [(u, i) for u, i in self.without if core.units[u].members[i].grad is not None]
        self.without = [place for place in self.without if place not in came]
        if stuck := [_name(core, u, i) for u, i in came if _is_stuck(core.units[u], i, core.now.phase)]:
            text = f"params: {', '.join(stuck)}: get first gradients after the warm-up"
            why = "their second moment is 0 and frozen, so no gradient moves them until the schedule returns to one"
            warnings.warn(f"{text}; {why}; {SHRINKS}", stacklevel=5)

    def count_exchange(self, core: Core, fragment: int) -> None:
        """Count an exchange that was left out, and warn if many were in a row; rank 0 says so."""
        before, self.left_out = self.left_out, count_of(core, "left_out")
        is_left_out = self.left_out > before
        count = self.left_out_in_a_row[fragment] = self.left_out_in_a_row.get(fragment, 0) + 1 if is_left_out else 0
        # Ranks leave out exchanges together, so they all come here together.
        if is_due(count):
            which = f"the last {count} of fragment {fragment}"
            _warn(core, f"exchanges: {which} were left out, and its anchor rests until one is not")

    def count_local_step(self, core: Core, phase: Phase | Round) -> None:
        """Count a local step, and warn if many in a row were left out; this rank does so alone, for no other knows.

        How many were is a number on the device, which the host would wait for. So it is looked at where something is
        exchanged, and after `LOOK` steps.
        """
        self.unseen += 1
        if phase.phase is Phase.LOCAL and self.unseen < LOOK:
            return
        taken, self.unseen = self.unseen, 0
        before, self.dropped = self.dropped, count_of(core, "dropped")
        row = self.dropped_in_a_row
        self.dropped_in_a_row = row + taken if self.dropped - before == taken else 0
        # Several steps are looked at together, so a count at which a warning is due may lie between two looks.
        if any(map(is_due, range(row + 1, self.dropped_in_a_row + 1))):
            rank, _ = place_of(core)
            what = next(_not_finite(core), "an update")
            text = f"local steps: the last {self.dropped_in_a_row} were left out by rank {rank}"
            warnings.warn(f"{text}, which moves in exchanges only; not finite: {what}", stacklevel=5)


def _name(core: Core, u: int, i: int) -> str:
    """Return the name of a parameter of a unit, with its param group."""
    groups = {id(group): g for g, group in enumerate(core.param_groups)}
    named = [(name, groups[id(group)]) for group in core.units[u].groups for name in names_of(group)]
    return "{} of group {}".format(*named[i])


def _is_stuck(unit: Unit, i: int, phase: Phase) -> bool:
    """Tell whether the second moment of a parameter is zero in a phase that leaves it so; of shards it is not known."""
    members = unit.members
    moments = [tree.leaves(nu) for nu in roles.find(unit.state, "second_moment")]
    alike = [nus[i] for nus in moments if len(nus) == len(members) and nus[i].shape == pieces(members)[i].shape]
    return phase in unit.transform.needs_warmup and bool(alike) and not any(bool(nu.any()) for nu in alike)


def _say_slow(core: Core, phase: Phase | Round) -> None:
    """Log why steps that could be in place are taken link by link."""
    for unit, update in zip(core.units, updates_of(core, phase), strict=True):
        members = unit.members
        grads = [p if p.grad is None else p.grad for p in members]
        if update.kernels and (reason := slow_tensors(pieces(members), pieces(grads)) if members else ""):
            text = "the %s step is taken link by link, in several times the memory traffic: in a param group %s"
            logger.warning(text, phase.phase.value, reason)


def second_moment_norm(core: Core) -> float:
    """Return the 1-norm of the second moment, for `fn.freeze_when_stable`.

    Raises: ValueError if there is none, or each rank has a piece of it.
    """
    states = [unit.state for unit in core.units]
    moments = roles.find(states, "second_moment")
    if not moments:
        text = "needs a transform whose state has a second moment; a state of your own names it in its `roles`"
        raise ValueError(f"schedule: freeze_when_stable {text}")
    if any(dim == 0 for dims in roles.find(rank_dims(states), "second_moment") for dim in tree.leaves(dims)):
        wanted = "a second moment that all ranks hold, since freeze_when_stable compares its norm"
        got = "one that is divided among ranks, in shards or by owners of tensors"
        raise ValueError(expected("schedule", wanted, got, "use fn.freeze_after(step)"))
    leaves = [leaf for nu in moments for leaf in tree.leaves(nu)]
    norms = torch._foreach_norm(leaves, 1, dtype=torch.float64) if leaves else []
    # S of () -> (S,) -> (): tensors may lie on several devices.
    return float(torch.stack([norm.to(norms[0].device) for norm in norms]).sum()) if norms else 0.0


def late_group(core: Core) -> None:
    """Warn of a param group, the last one, that comes after the warm-up."""
    if core.steps and core.next_phase.phase in core.units[-1].transform.needs_warmup:
        text = "come after the warm-up; where it freezes the second moment, theirs is 0 and no gradient moves them"
        warnings.warn(f"params: {text}; {SHRINKS}", stacklevel=3)


def is_due(count: int) -> bool:
    """Return whether a warning is due after this many skipped steps in a row."""
    return count == FIRST or (count >= 16 and count & (count - 1) == 0)


def _warn_of_no_axis(core: Any) -> None:
    argument = inspect.signature(core.make).parameters.get("axis")
    is_open = argument is not None and argument.default is None
    # Without axes where FSDP2 averages: only the one over which shards are brought together is bound.
    if is_open and core.axes and any(group.get("axis") is None for group in core.param_groups):
        bound = " or ".join(repr(axis) for axis in core.axes)
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


def _warn(core: Core, text: str) -> None:
    """Warn on rank 0, with what is not finite on which ranks. All ranks call it together."""
    axes = [*core.wires]
    rank, _ = place_of(core, axes)
    leaf = next(_not_finite(core), None)
    texts = [] if leaf is None else [f"{leaf}, on rank {rank}"]
    with core.communicating(""):
        for axis in axes:
            gathered = gather_values(texts, axis, next(iter(core.param_groups))["params"][0].device)
            texts = [text for of_rank in gathered for text in of_rank]
    # Only behind the messages: rank 0 needs what the others have gathered.
    if rank:
        return
    more = f"; and something on {len(texts) - NAMED} more ranks" if len(texts) > NAMED else ""
    what = f"not finite: {'; '.join(texts[:NAMED])}{more}"
    if not texts:
        what = "gradients, parameters and state are finite, but what follows from them is not: lower lr or weight_decay"
    warnings.warn(f"{text}; {what}", stacklevel=5)


def _not_finite(core: Core) -> Iterator[str]:
    """Yield what is not finite on this rank: gradients, else parameters, else leaves of the state."""
    params = [
        (f"parameter {name} of group {g}", p.detach(), p.grad)
        for g, group in enumerate(core.param_groups)
        for name, p in zip(names_of(group), group["params"], strict=True)
    ]
    leaves = tree.by_path([unit.state for unit in core.units], "state.").items()
    named = [(f"the gradient of {name}", grad) for name, _, grad in params]
    named += [(name, p) for name, p, _ in params] + [*leaves]
    for name, x in named:
        if isinstance(x, Tensor) and x.is_floating_point() and not all_finite(pieces([x])):
            yield name
