"""SPARTA: in every step the average of another small share of the params.

Which numbers are averaged follows from a seed and from how many turns there were, so that no rank has to say it. A
tensor is cut into pieces of 1/density neighbours. Of each piece one number is chosen by a hash of (seed, turn, tensor,
piece): as many in every turn, in an array of fixed size, and each with the same probability.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import fn
from fn import tree
from fn.arguments import check_interval, check_whole
from fn.base import check_state, unchanged
from fn.collectives.agreement import check_agreement, device_of
from fn.collectives.axis import AxisNames, names
from fn.collectives.compressed import exact_mean
from fn.facts import Averages
from fn.roles import declare
from fn.transforms.average import agreed
from fn.transforms.skip_nonfinite import all_finite

__all__ = ["sparse_average", "sparta"]

Tree = Any


def draw_elements(n: int, piece: int, turn: Tensor, number: int, seed: int, device: torch.device) -> Tensor | None:
    """Return which of the n elements of tensor `number` are averaged in a turn, ascending int64; None for all."""
    if piece == 1 or n == 0:
        return None
    # (n / piece,), rounded up: the last piece may be shorter
    starts = torch.arange(0, n, piece, dtype=torch.int64, device=device)
    lengths = (n - starts).clamp(max=piece)
    key = hashed(hashed(hashed(seed % MASK) + number) + turn)
    places: Tensor = starts + hashed(key.to(device) + starts) % lengths
    return places


MASK = 2**32 - 1


def hashed(x: Any) -> Any:
    """Return 32 bits that look random, as whole numbers; of a number, or of each element. x: below 2^33."""
    for shift, factor in ((16, 0x21F0AAAD), (15, 0x735A2D97)):  # below 2^31, so that no product leaves 64 bits
        x = x & MASK
        x = ((x ^ (x >> shift)) * factor) & MASK
    return x ^ (x >> 15)


def _means(own: list[Tensor], axis: AxisNames) -> list[Tensor]:
    """Average vectors over the ranks, those of one dtype and device in one message."""

    def mean(some: list[Tensor]) -> Any:
        # (n_i,) each -> (n,), in one message
        return exact_mean(torch.cat(some), axis, consume=True).split([x.numel() for x in some])

    return tree.in_groups(mean, ((x.dtype, x.device) for x in own), own)


@declare(left_out=("left_out",))
class SparseAverageState(NamedTuple):
    """State of `sparse_average`. turn: averages so far. left_out: those that were not finite. Both 0-d int64."""

    turn: Tensor
    left_out: Tensor


def sparse_average(axis: AxisNames, density: float, *, seed: int = 0) -> fn.Transform:
    """Average another share of the updates in every compressed step; leave the others as they are.

        u_i <- mean over ranks of u_i    for one i of each 1/density neighbours, by a hash of (seed, turn, place)

        >>> import torch, fn
        >>> tx = fn.contrib.sparse_average("data", 1 / 3)
        >>> def two_turns(x):
        ...     first, state = tx.update(fn.Phase.COMPRESSED)(x, tx.init(x), x)
        ...     return first, tx.update(fn.Phase.COMPRESSED)(first, state, x)[0]
        >>> first, second = fn.simulate(two_turns, "data", 2)(torch.tensor([[0.0] * 6, [2.0] * 6]))
        >>> first[0], second[0]
        (tensor([1., 0., 0., 1., 0., 0.]), tensor([1., 0., 1., 1., 1., 0.]))

    Half precision is sent in float32. A mean that is not finite is left out, on all ranks alike, and counted; the turn
    counts as well. In the warm-up and the local phase the updates pass.

    Args:
        axis: the axis' name, or several.
        density: the share of each tensor, in (0, 1]; 1 averages all. The pieces are of round(1 / density) neighbours,
            the last one of a tensor may be shorter. So a density that is no 1/k is rounded to one: 0.7 averages all,
            0.6 a half.
        seed: of the hash, a whole number.
    Returns: a transform with a `SparseAverageState`.
    Raises: TypeError or ValueError that names the argument; from `init`, if the ranks have other arguments.

    Paper: Beton et al., SPARTA: Improving the efficiency of distributed training using sparse parameter averaging
        (2025).
    Differs: the number of elements is the same in every turn; the authors' code draws each element by itself, and
        broadcasts a mask of a byte per element.
    """
    check_interval("density", density, "(0, 1]")
    check_whole("seed", seed)
    piece = max(1, round(1 / float(density)))

    def init(params: Tree) -> SparseAverageState:
        tree.check_real(params, "params")
        check_agreement(axis, {"density": float(density), "seed": seed}, device_of(params))
        zero = torch.zeros((), dtype=torch.int64, device=device_of(params))
        # A clone: of two numbers in one memory, an adapter that writes states in place would keep the last one for
        # both.
        return SparseAverageState(zero, zero.clone())

    def compressed(updates: Tree, state: SparseAverageState, params: Tree, /) -> tuple[Tree, SparseAverageState]:
        check_state(state, SparseAverageState)
        tree.check_real(updates, "updates")
        leaves, structure = tree.flatten(updates)
        # (...) -> (n,), float32 for half precision
        wide = [x.to(torch.promote_types(x.dtype, torch.float32)).reshape(-1) for x in leaves]
        paths = tree.paths(updates)
        # by name, not by place: keys of dicts come in any order, and all ranks must choose the same elements
        number_of = {path: number for number, path in enumerate(sorted(paths))}
        named = zip(paths, wide, strict=True)
        places = [draw_elements(x.numel(), piece, state.turn, number_of[path], seed, x.device) for path, x in named]
        # of n elements n / piece are sent: (n / piece,)
        own = [x if at is None else x.index_select(0, at) for x, at in zip(wide, places, strict=True)]
        means = _means(own, axis)
        ok = all_finite(means)  # not of what is merged: a rank's own NaN elsewhere would be seen by that rank alone
        means = [torch.where(ok.to(x.device), x, old) for x, old in zip(means, own, strict=True)]
        # (n / piece,) -> (n,), at the places that were chosen
        merged = [new if at is None else x.scatter(0, at, new) for x, at, new in zip(wide, places, means, strict=True)]
        after = SparseAverageState(state.turn + 1, state.left_out + (~ok).to(state.left_out))
        shaped = [x.view(leaf.shape).to(leaf.dtype) for x, leaf in zip(merged, leaves, strict=True)]
        return tree.unflatten(structure, shaped), after

    facts = fn.Facts(names(axis), unequal=True, averages=Averages(compressed=names(axis)))
    return fn.Transform(init, unchanged, compressed, unchanged, facts=facts)


def sparta(
    lr: float | Tensor = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    *,
    axis: AxisNames,
    density: float = 0.005,
    seed: int = 0,
) -> fn.Transform:
    """SPARTA: AdamW on each rank, and in every step the average of another small share of the params.

    Take it where steps may not wait for a whole exchange: each step sends a 200th of what AdamW does.

        p_r <- AdamW(p_r);    p_r,i <- mean_r p_r,i    for one i of each 1/density neighbours, another one in each step

        >>> import fn
        >>> fn.testing.train(fn.contrib.sparta(0.1, axis="data", density=1 / 3), fn.every(1))
        Loss(before=0.944, after=0.009)

    Args:
        lr, b1, b2, eps, weight_decay: of AdamW. lr: start with AdamW's rate times 0.6. axis: the ranks that train
            together.
        density, seed: which share of the params, as for `sparse_average`.
    Returns: a transform with a warm-up, exact, and rounds; `every(1)` is its schedule. The ranks' params differ in what
        was not averaged lately, and nothing in the state is what they agree on.
    Raises: TypeError or ValueError that names the argument.

    Paper: Beton et al., SPARTA: Improving the efficiency of distributed training using sparse parameter averaging
        (2025).
    Differs: as `sparse_average`: as many numbers in each step, of which no mask is sent.
    """
    rate = fn.scale_by_learning_rate(lr)
    adamw = fn.chain(fn.scale_by_adam(b1, b2, eps), fn.add_decayed_weights(weight_decay), rate)
    tx = fn.average_params(adamw, sparse_average(axis, density, seed=seed))
    return agreed(fn.skip_nonfinite(fn.chain(fn.average(axis), tx)), axis)


def plan_rows(planner: Any, options: Any) -> list[Any]:
    """Return the row of `python -m fn plan --contrib`. planner: `fn.planner.methods`. options: of its tables."""
    density = 0.005 if options.density is None else options.density

    def share(model: Any, ranks: Any) -> list[Any]:
        """Return an average of one number of each 1/density, in float32 at least."""
        piece, traffic = max(1, round(1 / density)), planner.traffic
        sent = sum(-(-n // piece) * times for n, times in model.lengths.items())
        return list(traffic.exact(traffic.Model(((sent,),), max(4, model.width)), ranks))

    passes = 16.0  # params are read and written, and once more where that is committed
    return [planner.Row("sparta", share, passes, local=True)]
