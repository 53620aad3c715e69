"""Take over the momentum of a Muon that a project has of its own, or of `torch.optim.Muon`, in the middle of a run.

Such optimizers keep a `momentum_buffer` for each parameter, an average of the gradients or their sum. Here it is the
sum, which is the average / (1 - b); Muon's directions are the same for both, up to `eps`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from fn import roles, tree
from fn.adapters.from_adamw import Writes, moments_of, write, writes_of_moments
from fn.adapters.optim.optimizer import Optimizer
from fn.arguments import checked
from fn.errors import expected
from fn.transforms.mask_and_partition import Label, hidden_and_other
from fn.transforms.momentum import MomentumState

Tree = Any


@checked("muon", "optimizer", "buffer", "adamw")
def from_muon(
    muon: torch.optim.Optimizer,
    optimizer: Optimizer,
    *,
    buffer: Literal["average", "sum"] | None = None,
    adamw: torch.optim.Optimizer | None = None,
) -> None:
    """Copy the momentum of a Muon, and the moments of the AdamW beside it, into an optimizer over the same parameters.

    Learning rates and other hyper-parameters stay the optimizer's own. On several ranks all call it, each with the same
    numbers, as under DDP.

        average: m <- b m + (1 - b) g,  taken over as m / (1 - b);    sum: m <- b m + g

    Args: muon: `torch.optim.Muon`, or another class with a `momentum_buffer` in the state of each parameter; parameters
        are found by identity. A matrix without one, which never had a gradient, has a momentum of zero. optimizer:
        between two steps; of `fn.muon` or `fn.normuon`, whose rows' second moments begin anew, or a chain with one
        `fn.trace` or `fn.scale_by_muon`. Its hidden matrices, by the `labels` of `fn.Optimizer`, are those of `muon`.
        buffer: what the class keeps; that of `torch.optim.Muon` is an average. adamw: gives moments and step counts of
        the other tensors, and `steps`, as for `from_adamw`. None: these begin anew.
    Raises: ValueError if `buffer` is missing for another class, if `muon` has no momentum, or has not the hidden
        matrices of the optimizer, or if the optimizer keeps its momentum otherwise, as owners and shards do; as
        `from_adamw` for `adamw`. Nothing is changed then.

    >>> import torch, fn
    >>> p = torch.nn.Parameter(torch.zeros(1, 2))
    >>> muon = torch.optim.Muon([p], lr=0.1, momentum=0.5)
    >>> for _ in range(2):
    ...     p.grad = torch.tensor([[1.0, -2.0]])
    ...     muon.step()
    >>> opt = fn.Optimizer([p], fn.muon, momentum=0.5)
    >>> fn.adapters.from_muon(muon, opt)
    >>> fn.roles.find(opt.states, "first_moment")[-1][0]                   # 0.5 g + g
    tensor([[ 1.5000, -3.0000]])
    """
    sums = _sums_of(muon, buffer)
    moments = {} if adamw is None else moments_of(adamw)
    steps = max((of_param.step for of_param in moments.values()), default=0.0)
    theirs = {id(p) for group in muon.param_groups for p in group["params"]}
    hidden_of, others_of = set[int](), set[int]()
    writes: Writes = []
    for g, (group, state) in enumerate(zip(optimizer.param_groups, optimizer.states, strict=True)):
        params = group["params"]
        labels = hidden_and_other(group.get("labels"), {"hidden": "hidden", "other": "other"})([*params])
        hidden = {p: label for p, label in zip(params, labels, strict=True) if label == "hidden"}
        others = [p for p in params if p not in hidden]
        if missing := [tuple(p.shape) for p in hidden if id(p) not in theirs]:
            wanted = f"the hidden matrices of param group {g} of the optimizer"
            raise ValueError(expected("muon", wanted, f"none of those of shapes {missing}", CURE))
        writes += _writes_of_momentum(g, hidden, state, sums)
        if moments and others:
            averages = [node for node in tree.named_tuples(state) if roles.roles_of(node).second_moment]
            writes += writes_of_moments(g, others, averages, moments, steps)
        hidden_of |= {*map(id, hidden)}
        others_of |= {*map(id, others)}
    for name, found, known, kind in (
        ("muon", [*sums], hidden_of, "hidden matrices"),
        ("adamw", [*moments], others_of, "other tensors"),
    ):
        if strange := len({*found} - known):
            wanted, got = f"{kind} of the optimizer only", f"{strange} of {len(found)} that are none"
            raise ValueError(expected(name, wanted, got, CURE))
    # All groups have been checked by now: nothing is changed where a later one is refused.
    write(writes)
    if moments:
        optimizer.steps = int(steps)


CURE = "make both over the same model, and give fn.Optimizer labels= of what was divided by hand"


def _sums_of(muon: torch.optim.Optimizer, buffer: str | None) -> dict[int, Tensor]:
    """Return the momentum in a Muon, as a sum, by the identity of parameters. Raises: as `from_muon`."""
    if isinstance(muon, torch.optim.Muon):
        if buffer == "sum":
            raise ValueError(expected("buffer", "'average' for a torch.optim.Muon, or None", "'sum'"))
        buffer = "average"
    if buffer is None:
        wanted = f"'average' or 'sum', what {type(muon).__name__} keeps as its momentum_buffer"
        cure = "m <- b m + (1 - b) g is an average, m <- b m + g a sum"
        raise ValueError(expected("buffer", wanted, "None", cure))
    sums = {}
    for group in muon.param_groups:
        for p in group["params"]:
            if (kept := muon.state.get(p, {}).get("momentum_buffer")) is None:
                continue
            if buffer == "average" and "momentum" not in group:
                wanted, cure = "a 'momentum' in each param group, by which an average is made a sum", "write it there"
                raise ValueError(expected("muon", wanted, f"one with {', '.join(map(repr, group))}", cure))
            wide = kept.to(torch.promote_types(kept.dtype, torch.float32))
            sums[id(p)] = wide / (1 - float(group["momentum"])) if buffer == "average" else wide
    if not sums:
        raise ValueError(expected("muon", "a step taken", "no momentum_buffer; there is nothing to take over"))
    return sums


def _writes_of_momentum(g: int, hidden: dict[Tensor, str], state: Tree, sums: dict[int, Tensor]) -> Writes:
    """Return what takes over the momentum of the hidden matrices of param group g. Raises: as `from_muon`."""

    def shown(x: Tensor, label: str) -> tuple[Tensor, ...]:
        return label.parts(x) if isinstance(label, Label) else (x,)

    momenta = tree.instances(state, MomentumState)
    leaves = tree.leaves([node.mu for node in momenta])
    shapes = [part.shape for p, label in hidden.items() for part in shown(p, label)]
    if len(momenta) != 1 or [x.shape for x in leaves] != shapes:
        raise ValueError(
            f"expected the state of param group {g} to hold one momentum over all hidden matrices, as that of fn.muon "
            f"and fn.normuon does, but it holds {len(momenta)}, or parts of tensors, as owners and shards do; give "
            f"fn.muon owned=False, or begin anew"
        )
    for p in hidden:
        if id(p) in sums and sums[id(p)].shape != p.shape:
            wanted = f"a momentum_buffer of the shape of its parameter, {tuple(p.shape)}"
            raise ValueError(expected("muon", wanted, f"{tuple(sums[id(p)].shape)}", "reshape it"))
    wholes = [(sums[id(p)] if id(p) in sums else torch.zeros_like(p), label) for p, label in hidden.items()]
    return [*zip(leaves, (part for x, label in wholes for part in shown(x, label)), strict=True)]
