"""Dion2: of each momentum the rows that are largest, made orthonormal; only they fade, and travel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

import fn
from fn import tree
from fn.arguments import check_interval, check_is_transform, check_whole
from fn.base import check_state, facts_of, missing
from fn.collectives.agreement import check_agreement, device_of
from fn.collectives.axis import AxisNames
from fn.errors import expected
from fn.kernels import rules
from fn.transforms.adam import zero_moments
from fn.transforms.average import agreed
from fn.transforms.leafwise import apply
from fn.transforms.mask_and_partition import Labels, hidden_and_other
from fn.transforms.momentum import LocalMomentumState
from fn.transforms.muon import (  # fmt: skip
    FACTORS,
    Scale,
    Triple,
    apart,
    as_batch,
    batches,
    check_matrices,
    newton_schulz,
    orthogonal,
)

__all__ = ["dion2", "scale_by_dion2"]

Tree = Any
Side = Literal["smaller", "rows", "columns"]


def _columns_are_chosen(x: Tensor, side: Side) -> bool:
    return side == "columns" or (side == "smaller" and x.shape[2] < x.shape[1])


def _largest(sizes: Tensor, fraction: float, blocks: int) -> Tensor:
    """Return the places of the largest sizes (b, n) in each of so many blocks, ascending (b, k); of equal the first."""
    length = max(1, -(-sizes.shape[1] // blocks))
    k = math.ceil(round(fraction * length, 6))  # 0.07 * 100 > 7
    pieces = sizes.split(length, dim=1)
    # Stable: of equal sizes another sort may choose other rows on another device, and ranks would average different
    # rows.
    found = [x.sort(dim=1, descending=True, stable=True).indices[:, :k] + j * length for j, x in enumerate(pieces)]
    # (b, k) of each block -> (b, blocks k)
    return torch.cat(found, dim=1).sort(dim=1).values


def scale_by_dion2(
    axis: AxisNames | None,
    fraction: float = 0.25,
    decay: float = 0.95,
    *,
    side: Side = "smaller",
    blocks: int = 1,
    eps: float = 1e-8,
    scale: Scale = "spectral_norm",
    coefficients: str | Sequence[Triple] = "polar_express",
    dtype: torch.dtype | None = None,
    flatten: bool = False,
) -> fn.Transform:
    """Make a fraction of the rows of each momentum orthonormal, the largest ones; only these fade, and travel.

        m_r <- m_r + g_r;    K: the k rows of the largest mean_r sum |m_r|;    u_K = s NS(mean_r m_r,K), else 0
        m_r,K <- decay m_r,K

    What is not chosen stays in the momentum, which so is the error that is fed back. In the compressed phase ranks send
    the sizes of all rows and the chosen rows, in two messages. In the warm-up they average momenta exactly, and choose
    by the sizes of the mean.

        >>> import torch, fn
        >>> tx = fn.contrib.scale_by_dion2(None, 0.5)
        >>> g = torch.tensor([[0.1, 0.0], [0.0, -3.0]])
        >>> u, state = tx.update(fn.Phase.WARMUP)(g, tx.init(g), g)
        >>> u, state.mu                                 # the second row is used, and fades; the first one waits
        (tensor([[ 0.0000,  0.0000],
                [ 0.0000, -0.9035]]), tensor([[ 0.1000,  0.0000],
                [ 0.0000, -2.8500]]))

    Args:
        axis: the axis' name, or several; None for none.
        fraction: of the rows, in (0, 1], rounded up.
        decay: what remains of the momentum of a chosen row, in [0, 1).
        side: whether rows are chosen or columns; "smaller": those of which there are fewer.
        blocks: the number of parts of the rows. As many rows are chosen of each part, as if the parts were shards.
        eps, scale, coefficients, dtype, flatten: as for `scale_by_muon`; s is that of the whole matrix. Of a stack of
            matrices rows are chosen in each.
    Returns: a transform with a warm-up and a compressed phase, whose momentum is each rank's own.
    Raises: TypeError or ValueError that names the argument; from `init` as `scale_by_muon`, and if ranks disagree.

    Paper: Dion2: a simple method to shrink matrix in Muon (arXiv 2512.16928).
    Differs: ranks send chosen rows of momenta of their own, and choose by the mean of their sizes; in the authors' code
        they average all gradients first.
    """
    check_interval("fraction", fraction, "(0, 1]")
    check_interval("decay", decay, "[0, 1)")
    check_whole("blocks", blocks, 1)
    if side not in ("smaller", "rows", "columns"):
        raise ValueError(expected("side", "'smaller', 'rows' or 'columns'", f"{side!r}"))
    rule, exact = newton_schulz(eps, scale, coefficients, dtype, flatten), fn.average(axis)

    def mean(xs: list[Tensor]) -> list[Tensor]:
        found: list[Tensor] = exact.warmup_update(xs, (), xs)[0]
        return found

    def init(params: Tree) -> LocalMomentumState:
        tree.check_real(params, "params")
        check_matrices(params)
        if axis is not None:
            settings = {"fraction": float(fraction), "decay": float(decay), "side": side, "blocks": blocks}
            check_agreement(axis, settings, device_of(params))
        return LocalMomentumState(zero_moments(params))

    def update_of(phase: fn.Phase) -> fn.UpdateFn:
        def update(updates: Tree, state: LocalMomentumState, params: Tree, /) -> tuple[Tree, LocalMomentumState]:
            check_state(state, LocalMomentumState)
            tree.check_updates(updates, state.mu)
            momenta, structure = tree.flatten(apply(rules.added, (updates, state.mu), like=1))
            places = batches(momenta, flatten)
            m = [as_batch([momenta[i] for i in some], flatten) for some in places]  # (b, rows, columns)
            m = mean(m) if phase is fn.Phase.WARMUP else m
            flipped = [_columns_are_chosen(x, side) for x in m]
            m = [x.mT if flip else x for x, flip in zip(m, flipped, strict=True)]  # now rows are chosen
            # (b, rows, columns) -> (b, rows)
            sizes = [x.abs().sum(2) for x in m]
            # By the mean of the sizes all ranks choose the same rows: by sizes of their own they would average
            # different rows.
            sizes = sizes if phase is fn.Phase.WARMUP else mean(sizes)  # (b, rows)
            chosen = [_largest(size, fraction, blocks) for size in sizes]  # (b, k)
            # (b, k) -> (b, k, columns), with a stride of 0 along the columns
            index = [c[:, :, None].expand(-1, -1, x.shape[2]) for c, x in zip(chosen, m, strict=True)]
            # (b, rows, columns) -> (b, k, columns)
            own = [x.gather(1, i) for x, i in zip(m, index, strict=True)]
            rows = own if phase is fn.Phase.WARMUP else mean(own)  # (b, k, columns)
            # Stacks (b, k, columns); without a scale, for theirs is that of the whole matrix, below.
            made = orthogonal(rows, rule._replace(scale=None, flatten=False))
            # Those without elements are in no batch, and no rank's own.
            out = [torch.zeros(mu.shape, dtype=mu.dtype, device=mu.device) if not mu.numel() else mu for mu in momenta]
            after = [*momenta]
            for some, x, i, used, flip, u in zip(places, m, index, own, flipped, made, strict=True):
                whole = x.mT if flip else x
                u = u * FACTORS[scale](*whole.shape[1:])
                # (b, k, columns) -> (b, rows, columns). In the compressed phase this rank's own rows fade, not their
                # mean.
                steps, rest = u.new_zeros(x.shape).scatter(1, i, u), x.scatter(1, i, decay * used)
                # (b, rows, columns) -> (b, columns, rows) where columns were chosen -> the shapes of the leaves
                parts = [apart(z.mT if flip else z, [momenta[p] for p in some]) for z in (steps, rest)]
                for place, step, left in zip(some, *parts, strict=True):
                    out[place], after[place] = step, left.contiguous()
            return tree.unflatten(structure, out), LocalMomentumState(tree.unflatten(structure, after))

        return update

    local = missing(fn.Phase.LOCAL, "a momentum whose rows are averaged")
    facts = fn.Facts(facts_of(exact).axes, ("scale_by_dion2",))
    return fn.Transform(init, update_of(fn.Phase.WARMUP), update_of(fn.Phase.COMPRESSED), local, facts=facts)


def dion2(
    lr: float | Tensor = 0.02,
    decay: float = 0.95,
    weight_decay: float = 0.01,
    *,
    axis: AxisNames | None = None,
    labels: Labels = None,
    fraction: float = 0.25,
    side: Side = "smaller",
    blocks: int = 1,
    other: fn.Transform | None = None,
    other_rate: float = 1.0,
    scale: Scale = "spectral_norm",
    dtype: torch.dtype | None = None,
) -> fn.Transform:
    """Dion2: Muon of the largest rows of each momentum, a fraction of them; only these travel. AdamW for other tensors.

    Take it for any number of ranks: it sends a quarter of the numbers, and iterates on these rows only.

        m_r <- m_r + g_r;    K: the k rows of the largest mean_r sum |m_r|;    m_r,K <- decay m_r,K behind the step
        p_K <- p_K - lr s NS(mean_r m_r,K);    p <- p - lr weight_decay p

        >>> import fn
        >>> fn.testing.train(fn.contrib.dion2(0.06, axis="data", fraction=0.5), fn.freeze_after(0))
        Loss(before=0.944, after=0.073)

    Args:
        lr: of matrices, a float or a 0-d tensor; with scale="rms_norm" start with AdamW's rate times 3.
        decay, fraction, side, blocks: as for `scale_by_dion2`, whose equations these are. A fraction of 1 is Muon.
        weight_decay: of all tensors, decoupled.
        axis: the ranks that train together; None for none.
        labels: which tensors are "hidden", Dion2's, and which "other", as for `muon`. Others are averaged exactly.
        other: what gives the direction of the others; None: `scale_by_adam(0.9, 0.95)`. other_rate: their rate, as a
            multiple of lr.
        scale, dtype: as for `scale_by_muon`.
    Returns: a transform with a warm-up, in which all rows arrive exactly, and a compressed phase; `freeze_after(n)` is
        its schedule, and n may be 0.
    Raises: TypeError or ValueError that names the argument.

    Paper: Dion2: a simple method to shrink matrix in Muon (arXiv 2512.16928).
    """
    check_interval("other_rate", other_rate, "[0, inf)")
    other = fn.scale_by_adam(0.9, 0.95, await_gradient=axis is not None) if other is None else other
    check_is_transform("other", other)
    named = hidden_and_other(labels, {"hidden": "muon", "other": "other"})
    rows = scale_by_dion2(axis, fraction, decay, side=side, blocks=blocks, scale=scale, dtype=dtype)
    shrink, rate = fn.add_decayed_weights(weight_decay), fn.scale_by_learning_rate(lr)
    exact = fn.unfrozen(fn.average(axis))
    kinds = {
        "muon": fn.chain(rows, shrink, rate),
        "other": fn.chain(exact, other, shrink, fn.scale(other_rate), rate),
    }
    tx = fn.partition(kinds, named)._replace(local_update=missing(fn.Phase.LOCAL, "dion2"))
    return agreed(fn.skip_nonfinite(tx), axis)


def plan_rows(planner: Any, options: Any) -> list[Any]:
    """Return the row of `python -m fn plan --contrib`. planner: `fn.planner.methods`. options: of its tables."""

    def quarter(model: Any, ranks: Any) -> list[Any]:
        """Return the sizes of all rows of the smaller side, and a quarter of the rows."""
        sizes, chosen = 0, 0
        for shape, times, _ in model.runs:
            rows, length = sorted(shape)
            sizes, chosen = sizes + rows * times, chosen + math.ceil(rows / 4) * length * times
        width = max(4, model.width)  # momenta of half precision are float32
        traffic = planner.traffic
        return [m for n in (sizes, chosen) if n for m in traffic.exact(traffic.Model(((n,),), width), ranks)]

    def send(model: Any, ranks: Any) -> list[Any]:
        kinds = {"hidden": quarter, "other": planner.traffic.exact}
        messages: list[Any] = planner.traffic.apart(planner.traffic.in_slices(model), ranks, **kinds)
        return messages

    return [planner.Row("dion2, rows 1/4", send, iterated=48)]
