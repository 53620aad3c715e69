"""GPA: the average of the params along the way, around any optimizer."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

import fn
from fn import tree
from fn.arguments import check_interval, check_is_transform
from fn.base import as_updates, check_arguments, combine
from fn.errors import expected
from fn.roles import declare

__all__ = ["primal_average", "primal_params"]

Tree = Any


@declare(copies=("fast",))
class PrimalAverageState(NamedTuple):
    """State of `primal_average`.

    inner, decay: states of the two transforms. fast: z, in float32 for half precision. step: updates made, 0-d int64.
    interpolation: as the argument, 0-d, so that `primal_params` can tell x.
    """

    inner: Tree
    decay: Tree
    fast: Tree
    step: Tensor
    interpolation: Tensor


def primal_average(
    inner: fn.Transform,
    *,
    interpolation: float = 0.7,
    averaging: float | None = 0.9,
    decay: fn.Transform | None = None,
    decays: Literal["fast", "params"] = "fast",
) -> fn.Transform:
    """Let an optimizer move z, average z into x, and take gradients between the two, at the params y.

    Take it on one machine, or where every step is averaged, in place of a decay of the learning rate.

        z <- z + u;    x <- c x + (1 - c) z;    y = mu x + (1 - mu) z        u: the update of `inner`

    It is DiLoCo on one machine without its rounds: what the outer optimizer does now and then is done in every step.
    The state holds z, and `primal_params` returns x, which one evaluates:

        >>> import torch, fn
        >>> tx = fn.contrib.primal_average(fn.scale_by_learning_rate(0.5), interpolation=0.5, averaging=0.5)
        >>> y, state = torch.zeros(1), tx.init(torch.zeros(1))
        >>> for _ in range(2):
        ...     updates, state = tx.update(fn.Phase.WARMUP)(torch.tensor([-2.0]), state, y)
        ...     y = fn.apply_updates(y, updates)
        >>> state.fast, fn.contrib.primal_params(state, y), y                      # z: 1, 2; x: 1/2, 5/4; y is between
        (tensor([2.]), tensor([1.2500]), tensor([1.6250]))

    Args:
        inner: the optimizer of z, a chain that ends in a learning rate. Links that communicate stand in front of this.
        interpolation: mu in (0, 1], the part of x in y.
        averaging: c in [0, 1), the part of the old x; None: 1 - 1/k in step k, the mean of all z.
        decay: weight decay, which is taken before the step: a transform that makes an update of zeros and a param,
            such as chain(add_decayed_weights(0.1), scale_by_learning_rate(lr)).
        decays: what it shrinks: z, or the params y. The other one stays, so that x jumps along.
    Returns: a transform with the phases of `inner`, which works element by element where that does.
    Raises: TypeError or ValueError that names the argument.

    Paper: Defazio et al., generalized primal averaging (arXiv 2512.17131); with averaging=None, schedule-free learning
        (arXiv 2405.15682).
    Differs: averaging=None weighs all steps alike; the authors' code weighs them by the square of the largest learning
        rate so far, which is the same where the rate is constant.
    """
    check_is_transform("inner", inner)
    if inner.exchange is not None:
        raise ValueError(expected("inner", "a transform with phases only", "one with rounds, such as fn.outer"))
    check_interval("interpolation", interpolation, "(0, 1]")
    if averaging is not None:
        check_interval("averaging", averaging, "[0, 1)")
    decay = fn.chain() if decay is None else decay
    check_is_transform("decay", decay)
    if decays not in ("fast", "params"):
        raise ValueError(expected("decays", "'fast' or 'params'", f"{decays!r}"))

    def init(params: Tree) -> PrimalAverageState:
        tree.check_real(params, "params")
        # A copy: z in the memory of the params would be y.
        fast = tree.map(lambda p: p.detach().to(_wide(p), copy=True), params)
        device = next((p.device for p in tree.leaves(params)), torch.device("cpu"))
        step = torch.zeros((), dtype=torch.int64, device=device)
        mu = torch.full((), float(interpolation), dtype=torch.float64, device=device)
        return PrimalAverageState(inner.init(fast), decay.init(fast), fast, step, mu)

    def compose(phase: fn.Phase, updates_of: list[fn.UpdateFn]) -> fn.UpdateFn:
        move, shrink = updates_of

        def update(updates: Tree, state: PrimalAverageState, params: Tree, /) -> tuple[Tree, PrimalAverageState]:
            updates, params = check_arguments(updates, state, params, PrimalAverageState, "fast")
            y = tree.map(lambda p: p.to(_wide(p)), params)
            moves, inner_state = move(updates, state.inner, y)
            moves = as_updates(moves, y)
            zeros = tree.map(torch.zeros_like, y)
            # Updates of zeros, so that what comes back is the shrinkage alone.
            shrinks, decay_state = shrink(zeros, state.decay, state.fast if decays == "fast" else y)
            z = tree.map(torch.add, state.fast, shrinks) if decays == "fast" else state.fast
            start = tree.map(torch.add, y, shrinks) if decays == "params" else y
            a = (state.step + 1).double().reciprocal() if averaging is None else 1.0 - averaging  # 1 - c
            weight = 1.0 - interpolation * (1.0 - a)
            steps = tree.map(lambda s, p, z, u: (s - p) + a * (z - s) + weight * u, start, y, z, moves)
            fast = tree.map(torch.add, z, moves)
            return steps, PrimalAverageState(inner_state, decay_state, fast, state.step + 1, state.interpolation)

        return update

    return combine([inner, decay], init, compose)


def primal_params(state: Tree, params: Tree) -> Tree:
    """Return the averages x of `primal_average`, to evaluate and to export: x = y + (1 - 1/mu) (z - y).

    Args: state: of a transform with one `primal_average` over all params; of an `fn.Optimizer`, `opt.states[0]` with
        the list of the first group's params. params: y, where it stands.
    Raises: ValueError if there is none, or several, or one of other shapes, such as that of owned tensors.
    """
    found = tree.instances(state, PrimalAverageState)
    if len(found) != 1:
        raise ValueError(expected("state", "that of one fn.contrib.primal_average", f"{len(found)} of them"))
    factor = 1 - 1 / float(found[0].interpolation)

    def averaged(p: Tensor, z: Tensor) -> Tensor:
        if p.shape != z.shape:
            wanted = f"z in the shapes of params, {tuple(p.shape)}"
            cure = "put fn.contrib.primal_average around fn.owned, not inside"
            raise ValueError(expected("state", wanted, f"{tuple(z.shape)}", cure))
        y = p.to(z.dtype)
        return (y + factor * (z - y)).to(p.dtype)

    return tree.map(averaged, params, tree.in_order(found[0].fast, params, "state"))


def _wide(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)
