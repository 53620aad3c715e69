"""A warning of elements that one bit throws about, although next to no gradient moves them.

A code gives every element of a tensor a momentum of plus or minus its scale, and the frozen second moment divides it.
Where that comes from rounding alone, the quotient is thousands of steps of Adam. The biases of keys are such elements,
because a softmax does not see them: a third of `MultiheadAttention.in_proj_bias`, and of GPT-2's `c_attn.bias`.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch import Tensor

from fn import tree
from fn.base import Phase
from fn.schedules import phase_of
from fn.transforms.moments import OnebitAdamState

if TYPE_CHECKING:
    from fn.adapters.torch_optim import Optimizer

FAR = 1000.0
"""Learning rates that an element moves in a step; Adam's own steps are of one to ten."""

ORDINARY = 100.0
"""Learning rates that the step had been at most with the `eps` that is named; later ones are a little more."""


def warn_of_jumps(optimizer: Optimizer, phase: Phase) -> None:
    """Warn, on rank 0, if the first step after 1-bit Adam's warm-up moved elements by more than `FAR` learning rates.

    Call it when the step is written and counted; other steps cost nothing.
    """
    if phase is not Phase.COMPRESSED or phase_of(optimizer.schedule, max(optimizer.steps - 2, 0)) is not Phase.WARMUP:
        return
    if any(int(bound.rank) for bound in optimizer._binding.axes.values()):
        return
    far = [
        (*seen, name)
        for g, hypers in enumerate(optimizer._hypers)
        for state in _states(optimizer.states[g])
        for name, seen in _each(optimizer.param_groups[g], state, hypers)
        if seen[0] > FAR
    ]
    if far:
        most, count, size, _, name = max(far)
        eps = max(found[3] for found in far)
        others = f", and {len(far) - 1} other parameters" if len(far) > 1 else ""
        what = f"{count} of {size} elements of parameter {name}{others}, moved by up to {most:.0f} times lr"
        why = "codes give them the scale of the others, but next to no gradient, that of a key's bias say, froze theirs"
        hint = f"eps={eps:.0e}, from the start or written into the param groups now, leaves some {ORDINARY:.0f}"
        warnings.warn(f"eps: too small for the second moment of {what}: {why}; {hint}", stacklevel=6)


def _states(state: Any) -> list[OnebitAdamState]:
    found: list[OnebitAdamState] = []

    def note(one: OnebitAdamState) -> OnebitAdamState:
        found.append(one)
        return one

    tree.replace(state, OnebitAdamState, note)
    return found


def _each(group: dict[str, Any], state: OnebitAdamState, hypers: dict[str, Any]) -> list[tuple[str, tuple[Any, ...]]]:
    """Return by name for each parameter: the largest step, how many are far, of how many, and the eps they would need.

    Empty for moments that are not like the parameters, such as shards.
    """
    moments = list(zip(tree.leaves(state.mu), tree.leaves(state.nu), strict=True))
    if [mu.shape for mu, _ in moments] != [p.shape for p in group["params"]]:
        return []
    names = group.get("param_names") or [str(i) for i in range(len(moments))]
    eps, weights = float(hypers.get("eps", 0.0)), (1.0, 1.0)
    if hypers.get("bias_correction"):
        weights = float(state.mu_weight), float(state.nu_weight)
    pairs = [(name, mu / weights[0], nu / weights[1]) for name, (mu, nu) in zip(names, moments, strict=True)]
    return [(name, _measure(mu, nu, eps)) for name, mu, nu in pairs if mu.numel()]


def _measure(mu: Tensor, nu: Tensor, eps: float) -> tuple[float, int, int, float]:
    size = mu.abs()
    steps = (size / nu.sqrt().add_(eps)).nan_to_num_(0.0)  # 0 / 0 where no gradient ever came
    far = steps > FAR
    return float(steps.max()), int(far.sum()), mu.numel(), float((size * far).max()) / ORDINARY
