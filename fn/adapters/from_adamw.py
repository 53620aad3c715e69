"""Take over what a `torch.optim.AdamW` has gathered, so that a run can change its optimizer in the middle.

    opt = fn.Optimizer(model.parameters(), partial(fn.onebit_adam, axis="data"),
                       schedule=fn.freeze_after(1000), lr=1e-3, b2=0.999, weight_decay=0.01)
    fn.adapters.from_adamw(adamw, opt)          # the next step is AdamW's next, or the first in codes

Moments are stored bias-corrected here, and are divided by 1 - b^t on the way. A state has one count where torch counts
the steps of each parameter: it becomes that of the most, and the others have sat out the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.optim.optimizer import Optimizer
from fn.arguments import checked

Tree = Any
Writes = list[tuple[Tensor, Tensor]]
"""Pairs, (tensor of a param group's state, its new numbers)."""


class Moments(NamedTuple):
    """The state of a parameter in AdamW: steps, first and second moment, and the decay rates of its group."""

    step: float
    mu: Tensor
    nu: Tensor
    b1: float
    b2: float


@checked("adamw", "optimizer")
def from_adamw(adamw: torch.optim.Optimizer, optimizer: Optimizer) -> None:
    """Copy moments and step counts of a `torch.optim.AdamW` into an optimizer over the same parameters.

    `steps`, which schedules count, become AdamW's, and moments and their ages are what they would be after as many
    warm-up steps with the same averaged gradients. Learning rates and other hyper-parameters stay the optimizer's own.
    On several ranks all call it, each with its AdamW of the same numbers, as under DDP.

    Args: adamw: `torch.optim.AdamW` or `Adam`; parameters are found by identity, whatever their groups. A parameter
        without state there, one that never had a gradient, has moments of zero. optimizer: between two steps; of
        `fn.adamw`, `fn.lamb` or `fn.onebit_adam`, or a chain with one such link.
    Raises: TypeError if `adamw` is another optimizer; ValueError if it was made with `amsgrad` or `maximize`, has taken
        no step, has parameters that the optimizer does not have, or several `betas` where that has one, or if the
        optimizer's state keeps its moments otherwise, as shards do; nothing is changed then.

    >>> import torch, fn
    >>> p = torch.nn.Parameter(torch.zeros(2))
    >>> adamw = torch.optim.AdamW([p], lr=0.1)
    >>> for _ in range(2):
    ...     p.grad = torch.tensor([1.0, -2.0])
    ...     adamw.step()
    >>> opt = fn.Optimizer([p], fn.adamw, lr=0.1)
    >>> fn.adapters.from_adamw(adamw, opt)
    >>> opt.steps, fn.roles.find(opt.states, "first_moment")[0][0]         # the average of the gradients
    (2, tensor([ 1., -2.]))
    """
    of_params = moments_of(adamw)
    known = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = sum(1 for key in of_params if key not in known)
    if missing:
        raise ValueError(
            f"expected adamw to have the parameters of the optimizer, but {missing} of its {len(of_params)} with "
            f"moments are no parameters of it; make both over the same model"
        )
    steps = max(moments.step for moments in of_params.values())
    writes: Writes = []
    for g, (group, state) in enumerate(zip(optimizer.param_groups, optimizer.states, strict=True)):
        writes += writes_of_moments(g, group["params"], state, of_params, steps)
    # All groups have been checked by now: nothing is changed where a later one is refused.
    write(writes)
    optimizer.steps = int(steps)


def write(writes: Writes) -> None:
    """Copy the second tensor of each pair into the first."""
    with torch.no_grad():
        for into, value in writes:
            into.copy_(value)


def moments_of(adamw: Any) -> dict[int, Moments]:
    """Return the moments in AdamW by the identity of parameters. Raises: as `from_adamw`."""
    if not isinstance(adamw, torch.optim.AdamW | torch.optim.Adam):
        raise TypeError(f"expected adamw to be a torch.optim.AdamW, but got {type(adamw).__name__}")
    moments = {}
    for group in adamw.param_groups:
        for flag in ("amsgrad", "maximize"):
            if group.get(flag):
                raise ValueError(f"expected adamw without {flag}, which no optimizer of fn has, but got {flag}=True")
        b1, b2 = (float(b) for b in group["betas"])
        for p in group["params"]:
            if (kept := adamw.state.get(p)) and float(kept["step"]):
                moments[id(p)] = Moments(float(kept["step"]), kept["exp_avg"], kept["exp_avg_sq"], b1, b2)
    if not moments:
        raise ValueError("expected adamw to have taken a step, but its state is empty; there is nothing to take over")
    return moments


def writes_of_moments(
    g: int, params: list[Tensor], state: Tree, moments_of: Mapping[int, Moments], steps: float
) -> Writes:
    """Return what takes over the moments of these parameters of param group g. Raises: as `from_adamw`."""
    firsts, seconds = (roles.find(state, f"{which}_moment") for which in ("first", "second"))
    ages = roles.find(state, "ages")
    # Each rank's own first moment belongs to params of its own, as in 0/1 Adam.
    nodes = tree.named_tuples(state)
    is_own = any(roles.rank_local(node).intersection(roles.roles_of(node).first_moment) for node in nodes)
    fits = not is_own and [*map(len, (firsts, seconds, ages))] == [1, 1, 1]
    pairs = [tree.leaves(moments) for moments in (*firsts, *seconds)] if fits else []
    if not fits or any([x.shape for x in leaves] != [p.shape for p in params] for leaves in pairs):
        raise ValueError(
            f"expected the state of param group {g} to hold one mu, nu and age of each over all parameters, as that "
            f"of fn.adamw, fn.lamb and fn.onebit_adam do, but it holds {len(firsts)} first moments and {len(ages)} "
            f"pairs of ages, or parts of tensors, or each rank's own; run a warm-up instead, in which its "
            f"moments build up"
        )
    some = [moments_of[id(p)] for p in params if id(p) in moments_of]
    if not some:
        return []
    if len({(of_param.b1, of_param.b2) for of_param in some}) > 1:
        raise ValueError(f"expected adamw to have the same betas for all of param group {g}, but got several")

    def whole(number: float) -> Tensor:
        return torch.tensor(int(number), dtype=torch.int64, device="cpu")

    writes: Writes = [(x, whole(steps)) for x in ages[0]]
    taken = [moments_of[id(p)].step if id(p) in moments_of else 0.0 for p in params]
    rested = tree.leaves(roles.find(state, "rested"))
    writes += [(x, whole(steps - own).expand(x.shape)) for x, own in zip(rested, taken, strict=bool(rested))]
    for p, mu, nu in zip(params, *pairs, strict=True):
        of_param = moments_of.get(id(p))
        if of_param is None:
            writes += [(x, torch.zeros_like(x)) for x in (mu, nu)]
            continue
        for into, x, b in zip((mu, nu), of_param[1:3], of_param[3:], strict=True):
            writes.append((into, x.to(into.dtype) / (1 - b**of_param.step) if ages[0] else x))
    return writes
