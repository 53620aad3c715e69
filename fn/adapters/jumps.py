"""A warning of elements that one bit throws about, although next to no gradient moves them.

A code gives every element of a tensor a momentum of plus or minus its scale, and the frozen second moment divides it.
Where that comes from rounding alone, the quotient is thousands of steps of Adam. The biases of keys are such elements,
because a softmax does not see them: a third of `MultiheadAttention.in_proj_bias`, and of GPT-2's `c_attn.bias`.
"""

from __future__ import annotations

import warnings
from typing import Any
from weakref import WeakSet

from torch import Tensor

from fn import tree
from fn.adapters.param_groups import names_of
from fn.adapters.training import Training
from fn.base import Phase
from fn.kernels.reference import over_root
from fn.schedules import phase_of
from fn.transforms.moments import OnebitAdamState
from fn.transforms.zero_one import ZeroOneAdamState

FAR = 1000.0
"""Learning rates that an element moves in a step; Adam's own steps are of one to ten."""

ORDINARY = 100.0
"""Learning rates that the step had been at most with the `eps` that is named; later ones are a little more."""


KINDS = OnebitAdamState, ZeroOneAdamState

_warned: WeakSet[Any] = WeakSet()


def warn_of_jumps(training: Training, phase: Phase) -> None:
    """Warn, once, if a first step in codes after a warm-up step moved elements by more than `FAR` learning rates.

    Rank 0 says so; of shards each rank that holds such elements. 0/1 Adam has such steps after each of its variance
    steps, which are ever rarer. Call it when the step is written and counted; other steps cost nothing.
    """
    if phase is not Phase.COMPRESSED or phase_of(training.schedule, max(training.steps - 2, 0)) is not Phase.WARMUP:
        return
    if training in _warned:
        return
    is_first = not any(int(bound.rank) for bound in training.binding.axes.values())
    far = [
        (*seen, name)
        for g, hypers in enumerate(training.hypers)
        for state in _states(training.states[g])
        for name, seen in _each(training.groups[g], state, hypers, is_first)
        if seen[0] > FAR
    ]
    if far:
        _warned.add(training)
        most, count, size, _, name = max(far)
        eps = max(found[3] for found in far)
        others = f", and {len(far) - 1} other parameters" if len(far) > 1 else ""
        what = f"{count} of {size} elements of {name}{others}, moved by up to {most:.0f} times lr"
        why = "codes give them the scale of the others, but next to no gradient, that of a key's bias say, froze theirs"
        hint = f"eps={eps:.0e}, from the start or written into the param groups now, leaves some {ORDINARY:.0f}"
        warnings.warn(f"eps: too small for the second moment of {what}: {why}; {hint}", stacklevel=6)


def _states(state: Any) -> list[Any]:
    found: list[Any] = []

    def note(one: Any) -> Any:
        found.append(one)
        return one

    for kind in KINDS:
        tree.replace(state, kind, note)
    return found


def _each(group: dict[str, Any], state: Any, hypers: dict[str, Any], is_first: bool) -> list[tuple[str, Any]]:
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
