"""nanochat's Muon: rows of equal length before the iterations, a second moment by the longer side behind them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import fn
from fn import tree
from fn.arguments import check_interval, check_is_transform, check_kind, check_whole
from fn.base import check_state, missing
from fn.collectives.axis import AxisNames
from fn.errors import expected
from fn.roles import declare
from fn.transforms.adam import zero_moments
from fn.transforms.average import agreed
from fn.transforms.mask_and_partition import Labels, hidden_and_other
from fn.transforms.muon import COEFFICIENTS, FACTORS
from fn.transforms.owned import newton_schulz_costs
from fn.transforms.unsharded import labelled

__all__ = ["nanochat", "scale_by_nanochat"]

Tree = Any

LEAST = 1e-6
"""The least norm of a row, or of a matrix, that is divided by."""


def equal_rows(z: Tensor) -> Tensor:
    """Return a matrix, or each of a stack, with rows of equal length, and its own Frobenius norm: MuonEq."""
    whole = torch.linalg.matrix_norm(z, keepdim=True) / max(1, z.shape[-2]) ** 0.5  # (..., 1, 1)
    rows: Tensor = torch.linalg.vector_norm(z, dim=-1, keepdim=True).clamp(min=LEAST)  # (..., n, 1)
    evened: Tensor = z * (whole / rows)
    return evened


def averaged_side(u: Tensor) -> int:
    """Return the dimension that V is averaged over: V has a number for each line of the longer side.

    Of a tensor without rows, which another rank owns, V has none either.
    """
    rows, columns = u.shape[-2:]
    return -1 if rows >= columns or not rows else -2


def by_second_moment(x: Tensor, v: Tensor, b2: float) -> tuple[Tensor, Tensor]:
    """Return what the iterations made, divided by the root of V at the norm of an orthogonal matrix, and the next V."""
    side, rank = averaged_side(x), min(x.shape[-2:])
    u = x * (rank**0.5 / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=LEAST))  # Muon+
    q = u.square().mean(side, keepdim=True)  # (..., n, k) -> (..., n, 1) or (..., 1, k)
    v = torch.lerp(q, v, b2)
    s = v.clamp(min=1e-10).rsqrt()
    before, after = (y.sum((-2, -1), keepdim=True).sqrt() for y in (q, q * s.square()))
    # Both norms lack the root of the length that is averaged, and so does the least of them.
    return u * s * (before / after.clamp(min=1e-10 / max(1, x.shape[side]) ** 0.5)), v


@declare(second_moment=("nu",))
class SecondMomentState(NamedTuple):
    """The last state of `scale_by_nanochat`. nu: V, (..., n, 1) or (..., 1, k); float32 for half precision."""

    nu: Tree


def scale_by_nanochat(
    decay: float = 0.95, b2: float = 0.9, *, ns_steps: int = 5, dtype: torch.dtype | None = None
) -> fn.Transform:
    """Make the momentum of each matrix orthogonal as nanochat does: from equal rows, and with a second moment.

        m <- decay m + (1 - decay) g;    z = (1 - decay) g + decay m, its n rows made |z|_F / sqrt(n) long
        u = NS(z) sqrt(min(n, k)) / |NS(z)|_F;    V <- b2 V + (1 - b2) mean_shorter_side u^2
        u <- u / sqrt(V), made as long as it was

    A tensor of more dimensions is a stack of matrices.

        >>> import torch, fn
        >>> tx = fn.contrib.scale_by_nanochat()
        >>> g = torch.tensor([[3.0, 0.0], [0.0, 0.1]])
        >>> tx.update(fn.Phase.WARMUP)(g, tx.init(g), g)[0]
        tensor([[1.0000, 0.0000],
                [0.0000, 1.0000]])

    Args:
        decay: mu. b2: how much of V a step keeps; it starts at 0 and is not bias-corrected, for its scale cancels.
        ns_steps: how many of the five iterations of Polar Express are done, from the first. dtype: as for
            `scale_by_muon`.
    Raises: TypeError or ValueError that names the argument; from `init`, for a leaf of less than two dimensions.

    Paper: class MuonAdamW of github karpathy/nanochat; Li et al., NorMuon (arXiv 2510.05491), for V.
    """
    check_interval("decay", decay, "[0, 1)")
    return fn.chain(*_momentum(decay), _orthogonal(b2, ns_steps, dtype))


def _momentum(decay: float) -> tuple[fn.Transform, fn.Transform]:
    return fn.scale(1.0 - decay), fn.trace(decay, nesterov=True)


def _orthogonal(b2: float, ns_steps: int, dtype: torch.dtype | None) -> fn.Transform:
    """Return what is behind the momentum, which needs whole matrices."""
    check_interval("b2", b2, "[0, 1)")
    check_whole("ns_steps", ns_steps, 1)
    (a, b, c), *rest = COEFFICIENTS["polar_express"]
    safety = 1.02 / 1.01  # nanochat divides by 1.01 times the norm, and these coefficients are made for 1.02 times
    triples = [(a * safety, b * safety**3, c * safety**5), *rest]
    if ns_steps > len(triples):
        raise ValueError(expected("ns_steps", f"at most {len(triples)}", f"{ns_steps}"))
    iterations = fn.orthogonalize(eps=LEAST / 1.01, scale=None, coefficients=triples[:ns_steps], dtype=dtype)

    def init(params: Tree) -> SecondMomentState:
        like = tree.map(lambda p: p.detach().narrow(averaged_side(p), 0, min(1, p.shape[averaged_side(p)])), params)
        return SecondMomentState(zero_moments(like))

    def update(updates: Tree, state: SecondMomentState, params: Tree, /) -> tuple[Tree, SecondMomentState]:
        check_state(state, SecondMomentState)
        leaves, structure = tree.flatten(updates)
        pairs = [by_second_moment(x, v, b2) for x, v in zip(leaves, tree.leaves(state.nu), strict=True)]
        moved, nu = ([pair[i] for pair in pairs] for i in (0, 1))
        return tree.unflatten(structure, moved), SecondMomentState(tree.unflatten(tree.flatten(state.nu)[1], nu))

    whole = fn.Facts(whole=("scale_by_nanochat",), batched=True)
    rows = fn.stateless(lambda z, params: tree.map(equal_rows, z))._replace(facts=whole)
    return fn.chain(rows, iterations, fn.lift(init, update)._replace(facts=whole))


def _by_factor(
    kind_of: Tree, matrices: fn.Shards, shards: fn.Shards, weight_decay: float
) -> tuple[dict[str, fn.Transform], Tree]:
    """Return the decay of matrices that lie in pieces, by a label for each factor of the wholes, and the labels.

    Raises: ValueError if shapes are not known, or of parts of matrices, each of which has a factor of its own.
    """
    if shards.shapes is None or matrices.labels is not None:
        wanted, got = "fn.Shards with the shapes of whole matrices", "matrices in parts, or no shapes"
        raise ValueError(expected("shards", wanted, got, "give labels without splits and num_heads"))
    names, structure = tree.flatten(kind_of)
    pairs = zip(names, shards.shapes, strict=True)
    factors = [FACTORS["max"](*shape[-2:]) if name == "muon" else 0 for name, shape in pairs]
    decay = fn.add_decayed_weights(weight_decay, cautious=True)
    kinds = {f"muon, {f!r}": fn.chain(decay, fn.scale(f)) for f in {*factors} - {0}}
    return kinds, tree.unflatten(structure, [f"muon, {f!r}" if f else "other" for f in factors])


def nanochat(
    lr: float | Tensor = 0.02,
    momentum: float = 0.95,
    b2: float = 0.9,
    weight_decay: float = 0.2,
    *,
    axis: AxisNames | None = None,
    labels: Labels = None,
    shards: fn.Shards | None = None,
    codec: fn.Codec | None = None,
    other: fn.Transform | None = None,
    other_rate: float = 1.0,
    ns_steps: int = 5,
    dtype: torch.dtype | None = None,
) -> fn.Transform:
    """Train as nanochat does, matrices by its Muon and all else by AdamW; each tensor's step is its owner's.

    Take it for nanochat's models and their numbers; in 8 bits over slow links, with `codec=fn.int8()`.

        p <- p - lr sqrt(max(1, n / k)) (u + weight_decay p [u p >= 0]),  u of `scale_by_nanochat`

        >>> import fn
        >>> fn.testing.train(fn.contrib.nanochat(0.07, axis="data"))
        Loss(before=0.944, after=0.102)

    Args:
        lr: of matrices, a float or a 0-d tensor. other_rate: the rate of the others, as a multiple of it.
        momentum, b2, ns_steps, dtype: as for `scale_by_nanochat`, of which momentum is the decay.
        weight_decay: of matrices, where the update leads towards zero, too. nanochat lets it fall to 0.
        axis: the ranks that train together, as for `muon`; None for none.
        labels: which tensors are "hidden", Muon's, and which "other", as for `muon`.
        shards: how the params are divided, as for `muon`; `fn.Optimizer` gives it for DTensors. Momentum stays on the
            shards, and matrices are brought together behind it.
        codec: how gradients, or the momenta of shards, travel to the owners, and updates back, in the compressed phase;
            None is exactly.
        other: what gives the direction of the others, a decay of theirs included; None: `scale_by_adam(0.8, 0.95,
            1e-10)`.
    Returns: a transform with a warm-up; with an axis also with a compressed phase, which is exact, too, if there is no
        codec. `freeze_after(n)` is its schedule then, and n may be small.
    Raises: TypeError or ValueError that names the argument.

    Paper: class MuonAdamW of github karpathy/nanochat; Chen et al., Cautious weight decay (arXiv 2510.12402).
    Differs: tensors of a shape are dealt to the ranks one by one; there each rank has consecutive ones, the last ranks
        may have none, and AdamW's large tensors are cut by rows.
    """
    check_interval("momentum", momentum, "[0, 1)")
    check_interval("other_rate", other_rate, "[0, inf)")
    other = fn.scale_by_adam(0.8, 0.95, 1e-10, await_gradient=axis is not None) if other is None else other
    check_is_transform("other", other)
    if codec is not None and axis is None and shards is None:
        raise ValueError("codec: is given where no tensors are owned; pass an axis")
    named = hidden_and_other(labels, {"hidden": "muon", "other": "other"})
    if shards is not None:
        check_kind("shards", shards, fn.Shards, "fn.Shards or None")
        kind_of, shards_of = labelled(shards, named, labels)
        iterated = fn.unsharded(_orthogonal(b2, ns_steps, dtype), shards_of("muon"), codec=codec, gather=codec)
        links = {"muon": fn.chain(*_momentum(momentum), iterated), "other": other}
        decays, rates = _by_factor(kind_of, shards_of("muon"), shards, weight_decay), fn.scale(other_rate)
        ends = fn.partition({**decays[0], "other": rates}, decays[1]), fn.scale_by_learning_rate(lr)
        tx = fn.chain(fn.unfrozen(fn.average(axis)), fn.partition(links, kind_of), *ends)
        return agreed(fn.skip_nonfinite(tx._replace(local_update=missing(fn.Phase.LOCAL, "nanochat"))), axis)
    matrices = scale_by_nanochat(momentum, b2, ns_steps=ns_steps, dtype=dtype)
    directions: fn.Transform = fn.partition({"muon": matrices, "other": other}, named)

    def costs(params: Tree) -> Tree:
        pairs = named(params), newton_schulz_costs(params, flatten=False), params
        return tree.map(lambda label, cost, p: cost if label == "muon" else p.numel(), *pairs)

    def by_shape(updates: Tree, params: Tree) -> Tree:
        return tree.map(lambda u: FACTORS["max"](*u.shape[-2:]) * u, updates)

    factor = fn.stateless(by_shape)._replace(facts=fn.Facts(whole=("nanochat",), batched=True))
    # Behind the exchange, for all ranks have all params: what travels is directions.
    decay = fn.chain(fn.add_decayed_weights(weight_decay, cautious=True), factor)
    ends = fn.partition({"muon": decay, "other": fn.scale(other_rate)}, named), fn.scale_by_learning_rate(lr)
    if axis is None:
        return fn.skip_nonfinite(fn.chain(directions, *ends))
    owned = fn.owned(directions, axis, codec=codec, gather=codec, cost=costs)
    tx = fn.chain(owned, *ends)
    return agreed(fn.skip_nonfinite(tx), axis)


def plan_rows(planner: Any, options: Any) -> list[Any]:
    """Return the row of `python -m fn plan --contrib`. planner: `fn.planner.methods`. options: of its tables."""
    return [planner.Row("nanochat", planner.traffic.owned, iterated=16, compressed=False)]
