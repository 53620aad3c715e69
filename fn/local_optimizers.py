"""Named optimizers of local steps: each is a chain under its docstring, in the wrappers of `fn.optimizers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

import fn.inplace.outer  # noqa: F401  (fills the table of steps in place)
from fn.base import Transform, chain, check_interval, check_whole
from fn.collectives.axis import AxisNames
from fn.collectives.codecs.bins import bins
from fn.collectives.codecs.codec import Codec, identity
from fn.collectives.codecs.top_k import top_k
from fn.collectives.feedback import classic, decayed, off
from fn.collectives.hierarchy import Codecs, Feedbacks
from fn.transforms.adam import scale_by_adam
from fn.transforms.average import agreed, average, compressed_average
from fn.transforms.average_params import average_params
from fn.transforms.bases import in_basis, tiles
from fn.transforms.decay_and_lr import add_decayed_weights, check_rate, scale_by_learning_rate
from fn.transforms.fragments import Fragments
from fn.transforms.masking import Labels, hidden_and_other, partition
from fn.transforms.momentum import trace
from fn.transforms.muon import orthogonalize, scale_by_muon
from fn.transforms.norm_guard import Guard
from fn.transforms.outer import Store, outer
from fn.transforms.pair_average import own_anchors, pair_average
from fn.transforms.skip_nonfinite import skip_nonfinite
from fn.transforms.sparse_average import sparse_average
from fn.transforms.unsharded import Shards, labelled, unsharded

Tree = Any


def diloco(
    lr: float | Tensor = 4e-4,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    *,
    axis: AxisNames,
    outer_lr: float | Tensor = 0.7,
    outer_momentum: float = 0.9,
    nesterov: bool = True,
    codec: Codecs | None = None,
    feedback: Feedbacks | None = None,
    servers: bool = True,
    fragments: Fragments = None,
    alpha: float = 0.0,
    store: Store = None,
    on_skip: Literal["keep", "anchor"] = "keep",
    guard: Guard | None = None,
) -> Transform:
    """DiLoCo: hundreds of local AdamW steps, then one Nesterov step along the ranks' mean pseudo-gradient.

        >>> import torch, fn
        >>> tx, schedule = fn.diloco(0.1, axis="data", outer_momentum=0.6), fn.every(5)
        >>> def train(target):                # of each rank; their mean is [2, -1, 1]
        ...     p = torch.zeros(3)
        ...     state = tx.init(p)
        ...     for step in range(40):
        ...         updates, state = tx.update(schedule(step))(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> fn.simulate(train, "data", 2)(torch.tensor([[1.5, -1.5, 0.5], [2.5, -0.5, 1.5]]))[0]
        tensor([ 1.8741, -0.6640,  0.6640])

    Args:
        lr: of the local steps, a float or a 0-d tensor; start with AdamW's rate times 0.6. b1, b2, eps, weight_decay:
            of AdamW.
        axis: the ranks that train together. outer_lr, outer_momentum, nesterov: of the outer step; for short runs a
            momentum of 0.6 is better.
        codec: how the pseudo-gradients (differences to the anchor) are quantized; None is full precision. feedback:
            what becomes of the residual errors; None is `classic()` where there is a codec. servers: as for
            `compressed_average`.
        fragments, alpha, store, on_skip, guard: as for `outer`.
    Returns: a transform with a warm-up, exact, and rounds; `every(500)` is its schedule. Streaming DiLoCo is
        `fragments=P, alpha=0.5` and `every(h, fragments=P, delay=d)`; EDiT's penalty
        `guard=norm_guard(temperature=1.0)`.

    Paper: Douillard et al., DiLoCo (arXiv 2311.08105), algorithm 1.
    Differs: if an exchange is not finite, the ranks keep their params; torchft takes all of them back to the anchor, as
        on_skip="anchor" does.
    """
    adamw = chain(scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay), scale_by_learning_rate(lr))
    outer_tx = _outer_sgd(outer_lr, outer_momentum, nesterov)
    sync = _mean(axis, codec, feedback, servers)
    tx = outer(
        adamw, outer_tx, sync, fragments=fragments, alpha=alpha, store=store, on_skip=on_skip, guard=guard
    )
    return agreed(skip_nonfinite(chain(average(axis), tx)), axis)


def local_sgd(
    lr: float | Tensor = 1e-2,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    *,
    axis: AxisNames,
    codec: Codecs | None = None,
    feedback: Feedbacks | None = None,
    servers: bool = True,
    store: Store = None,
    on_skip: Literal["keep", "anchor"] = "keep",
) -> Transform:
    """Local SGD: local steps, then the mean of the params; post-local SGD with a warm-up.

        >>> import torch, fn
        >>> tx, schedule = fn.local_sgd(0.1, axis="data"), fn.every(5)
        >>> def train(target):                # of each rank; their mean is [2, -1, 1]
        ...     p = torch.zeros(3)
        ...     state = tx.init(p)
        ...     for step in range(40):
        ...         updates, state = tx.update(schedule(step))(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> fn.simulate(train, "data", 2)(torch.tensor([[1.5, -1.5, 0.5], [2.5, -0.5, 1.5]]))[0]
        tensor([ 1.9704, -0.9852,  0.9852])

    Args:
        lr: of the local steps, a float or a 0-d tensor; start with AdamW's rate times 20. momentum: of them, each
            rank's own. weight_decay: decoupled.
        axis, codec, feedback, servers: as for `diloco`. store, on_skip: as for `outer`.
    Returns: a transform with a warm-up, exact, and rounds; `every(h)` is its schedule, `every(h, start=n)` that of
        post-local SGD.

    Paper: Stich, Local SGD converges fast and communicates little (arXiv 1805.09767), algorithm 1; Lin et al., Don't
        use large mini-batches, use local SGD (arXiv 1808.07217), section 3.
    Differs: what is averaged is the difference to the last mean, so that codes are of small numbers, and the mean of
        the params is off by rounding.
    """
    check_interval("momentum", momentum, "[0, 1)")
    sgd = chain(trace(momentum), add_decayed_weights(weight_decay), scale_by_learning_rate(lr))
    sync = _mean(axis, codec, feedback, servers)
    tx = outer(sgd, scale_by_learning_rate(1.0), sync, store=store, on_skip=on_skip)
    return agreed(skip_nonfinite(chain(average(axis), tx)), axis)


def sparse_loco(
    lr: float | Tensor = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    *,
    axis: AxisNames,
    outer_lr: float | Tensor = 1.0,
    k: int = 128,
    tile: int = 64,
    over: str = "senders",
    values: Codec | None = None,
    keep: float = 0.95,
    fragments: Fragments = None,
    store: Store = None,
    on_skip: Literal["keep", "anchor"] = "keep",
) -> Transform:
    """SparseLoCo: DiLoCo that sends a few numbers of each tile in 2 bits, with errors in place of an outer momentum.

        >>> import torch, fn
        >>> tx, schedule = fn.sparse_loco(0.1, axis="data", k=1, tile=2), fn.every(5)
        >>> def train(target):                # of each rank; their mean is [2, -1, 1]
        ...     p = torch.zeros(3)
        ...     state = tx.init(p)
        ...     for step in range(60):
        ...         updates, state = tx.update(schedule(step))(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> fn.simulate(train, "data", 2)(torch.tensor([[1.5, -1.5, 0.5], [2.5, -0.5, 1.5]]))[0]
        tensor([ 1.6395, -1.5137,  0.7989])

    Args:
        lr, b1, b2, eps, weight_decay, axis: as for `diloco`. lr: start with AdamW's rate times 0.6. outer_lr: of the
            outer step.
        k: how many numbers of a whole tile are sent; of n numbers round(n k / tile^2), and at least one.
        tile: the side of a tile, as for `tiles`. over: what a mean is taken over, as for `top_k`.
        values: how these numbers are quantized. None: `bins(4, 6)`; `identity()`: full precision.
        keep: weight of the old residual errors.
        fragments, store, on_skip: as for `outer`.
    Returns: a transform with a warm-up, exact, and rounds; `every(15)` is its schedule. All ranks send to all others,
        so it is for few of them.

    Paper: Sarfi et al., SparseLoCo (arXiv 2508.15706), algorithm 1; numbers as in its code and for 512 M parameters.
    Differs: the mean of an element is over those ranks that sent it, as in the authors' code; the paper divides by all,
        as over="ranks" does. `outer_lr` counts once; in the code it multiplies the differences, too, and counts twice.
    """
    values, basis = bins(4, 6) if values is None else values, tiles(tile)
    check_whole("k", k)
    top_k(k, tile * tile, over=over, values=values)  # refuses what does not fit, before there are params
    decayed(keep)

    def mean(n: int) -> Transform:
        codec = top_k(max(1, round(n * k / tile**2)), n, over=over, values=values)
        return compressed_average(axis, codec, decayed(keep), servers=False)

    adamw = chain(scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay), scale_by_learning_rate(lr))
    sync = in_basis(basis, mean)
    check_rate(outer_lr, "outer_lr")
    tx = outer(adamw, scale_by_learning_rate(outer_lr), sync, fragments=fragments, store=store, on_skip=on_skip)
    return agreed(skip_nonfinite(chain(average(axis), tx)), axis)


def muloco(
    lr: float | Tensor = 0.02,
    momentum: float = 0.9,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    *,
    axis: AxisNames,
    labels: Labels = None,
    scale: Literal["spectral_norm", "rms_norm"] = "spectral_norm",
    inner_nesterov: bool = False,
    dtype: torch.dtype | None = None,
    outer_lr: float | Tensor = 0.9,
    outer_momentum: float = 0.8,
    codec: Codecs | None = None,
    feedback: Feedbacks | None = None,
    servers: bool = True,
    fragments: Fragments = None,
    alpha: float = 0.0,
    store: Store = None,
    on_skip: Literal["keep", "anchor"] = "keep",
    shards: Shards | str | None = None,
) -> Transform:
    """MuLoCo: DiLoCo whose local steps are Muon's for matrices of hidden layers, and AdamW's for all other tensors.

        >>> import torch, fn
        >>> tx, schedule = fn.muloco(0.05, axis="data"), fn.every(5)
        >>> def train(target):                # of each rank; the best p is their mean
        ...     p = torch.zeros(4, 3)
        ...     state = tx.init(p)
        ...     for step in range(40):
        ...         updates, state = tx.update(schedule(step))(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> targets = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
        >>> best, p = targets.mean(0), fn.simulate(train, "data", 2)(targets)[0]
        >>> print(f"{best.square().mean():.3f} -> {(p - best).square().mean():.3f}")
        0.450 -> 0.069

    Args:
        lr: of the local steps, of both kinds; start with AdamW's rate times 0.6 where scale="rms_norm".
        labels: which tensors are "hidden", Muon's, and which "other": `fn.labels_of(model)`, which leaves embeddings
            and the head to AdamW. None: all matrices are Muon's, for their shapes do not tell.
        momentum, inner_nesterov, scale, dtype: Muon's, as for `scale_by_muon`; with scale="rms_norm" a rate of AdamW
            fits both kinds.
        b1, b2: AdamW's. eps, weight_decay: of both.
        outer_lr, outer_momentum: of the outer step, which is Nesterov's.
        axis, codec, feedback, servers, fragments, alpha, store, on_skip: as for `diloco`; in 2 bits it is
            `codec=bins(4, 6)`.
        shards: as for `fn.muon`: the axis over which the params of an island are divided. `fn.Optimizer` gives it for
            params of FSDP2.
    Returns: a transform with a warm-up, exact, and rounds; `every(30)` is its schedule.

    Paper: Therien et al., MuLoCo (arXiv 2505.23725), whose values for several workers are the defaults.
    Differs: the authors' program for one worker has momentum 0.95, b2 0.95 and an outer step of 0.7 and 0.6.
        `outer_lr` counts once; in the authors' code for several ranks it multiplies the differences, too, where
        errors are fed back.
    """
    check_interval("momentum", momentum, "[0, 1)")
    decay, rate = add_decayed_weights(weight_decay), scale_by_learning_rate(lr)
    named = hidden_and_other(labels, {"hidden": "muon", "other": "adamw"}, lambda p: p.ndim == 2)
    kind_of: Tree | Callable[[Tree], Tree] = named
    if shards is None:
        iterations = scale_by_muon(momentum, inner_nesterov, eps=eps, scale=scale, dtype=dtype)
    else:
        kind_of, shards_of = labelled(shards, named, labels)
        whole = unsharded(orthogonalize(eps=eps, scale=scale, dtype=dtype), shards_of("muon"))
        iterations = chain(trace(momentum, inner_nesterov), whole)
    kinds = {"muon": chain(iterations, decay, rate), "adamw": chain(scale_by_adam(b1, b2, eps), decay, rate)}
    inner = partition(kinds, kind_of)
    outer_tx = _outer_sgd(outer_lr, outer_momentum, nesterov=True)
    sync = _mean(axis, codec, feedback, servers)
    tx = outer(inner, outer_tx, sync, fragments=fragments, alpha=alpha, store=store, on_skip=on_skip)
    return agreed(skip_nonfinite(chain(average(axis), tx)), axis)


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
) -> Transform:
    """SPARTA: AdamW on each rank, and in every step the average of another small share of the params.

        >>> import torch, fn
        >>> tx, schedule = fn.sparta(0.1, axis="data", density=1 / 3), fn.every(1)
        >>> def train(target):                # of each rank; their mean is [2, -1, 1]
        ...     p = torch.zeros(3)
        ...     state = tx.init(p)
        ...     for step in range(40):
        ...         updates, state = tx.update(schedule(step))(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> fn.simulate(train, "data", 2)(torch.tensor([[1.5, -1.5, 0.5], [2.5, -0.5, 1.5]]))[0]
        tensor([ 1.7536, -0.7125,  0.4447])

    Args:
        lr, b1, b2, eps, weight_decay: of AdamW. lr: start with AdamW's rate times 0.6. axis: the ranks that train
            together.
        density, seed: which share of the params, as for `sparse_average`.
    Returns: a transform with a warm-up, exact, and rounds; `every(1)` is its schedule. The ranks' params differ in what
        was not averaged lately, and nothing in the state is what they agree on.

    Paper: Beton et al., SPARTA: Improving the efficiency of distributed training using sparse parameter averaging
        (2025).
    Differs: as `sparse_average`: as many numbers in each step, of which no mask is sent.
    """
    adamw = chain(scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay), scale_by_learning_rate(lr))
    tx = average_params(adamw, sparse_average(axis, density, seed=seed))
    return agreed(skip_nonfinite(chain(average(axis), tx)), axis)


def des_loc(
    lr: float | Tensor = 4e-4,
    b1: float = 0.95,
    b2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    *,
    axis: AxisNames,
) -> Transform:
    """DES-LoC: AdamW on each rank; params and both moments are averaged, each at a period of its own.

        >>> import torch, fn
        >>> tx, schedule = fn.des_loc(0.1, axis="data"), fn.periods(2, 4, 8)
        >>> def train(target):                # of each rank; their mean is [2, -1, 1]
        ...     p = torch.zeros(3)
        ...     state = tx.init(p)
        ...     for step in range(40):
        ...         updates, state = tx.update(schedule(step))(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> fn.simulate(train, "data", 2)(torch.tensor([[1.5, -1.5, 0.5], [2.5, -0.5, 1.5]]))[0]
        tensor([ 2.2121, -0.9443,  0.9443])

    Args: lr, b1, b2, eps, weight_decay: of AdamW. lr: start with AdamW's rate. axis: the ranks that train together.
    Returns: a transform with a warm-up, exact, and rounds; `periods(64, 192, 692)` is its schedule: the slower a moment
        changes, the more rarely it is averaged.

    Paper: Iacob et al., DES-LoC (arXiv 2505.22549), algorithm 1.
    Differs: a moment is averaged after the step that its period ends with; the paper averages the moment of the last
        step just before it is used, which is one step later.
    """
    adamw = chain(scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay), scale_by_learning_rate(lr))
    return agreed(skip_nonfinite(chain(average(axis), average_params(adamw, sparse_average(axis, 1.0)))), axis)


def no_loco(
    lr: float | Tensor = 4e-4,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    *,
    axis: str,
    outer_lr: float | Tensor = 0.7,
    outer_momentum: float = 0.5,
    pull: float = 0.9,
    seed: int = 0,
) -> Transform:
    """NoLoCo: local AdamW steps, then an exchange with one other rank, another one each time; no global exchange.

        >>> import torch, fn
        >>> tx, schedule = fn.no_loco(0.1, axis="data"), fn.every(5)
        >>> def train(target):                # of each rank; their mean is [2, -1, 1]
        ...     p = torch.zeros(3)
        ...     state = tx.init(p)
        ...     for step in range(40):
        ...         updates, state = tx.update(schedule(step))(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> fn.simulate(train, "data", 2)(torch.tensor([[1.5, -1.5, 0.5], [2.5, -0.5, 1.5]]))[0]
        tensor([ 2.1634, -0.6737,  0.6737])

    Args:
        lr, b1, b2, eps, weight_decay: of AdamW. lr: start with AdamW's rate. axis: the ranks that train together.
        outer_lr, outer_momentum: of the outer step. pull: how strongly the anchors of a pair attract each other, in
            units of the outer rate. seed: of the pairs, which follow from it and from the number of the exchange.
    Returns: a transform with a warm-up, exact, and rounds; `every(50)` is its schedule. The ranks' params and anchors
        differ for good, by less the more they exchange.

    Paper: Kolehmainen et al., NoLoCo (arXiv 2506.10911): b <- mu b + lr d + gamma (x - mean x); x <- x - b.
    Differs: `pull` is gamma / lr, as the outer rate stands behind the momentum here.
    """
    adamw = chain(scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay), scale_by_learning_rate(lr))
    outer_tx = _outer_sgd(outer_lr, outer_momentum, nesterov=False)
    return agreed(own_anchors(average(axis), adamw, outer_tx, pair_average(axis, pull=pull, seed=seed)), axis)


def _outer_sgd(outer_lr: float | Tensor, outer_momentum: float, nesterov: bool) -> Transform:
    """Return the optimizer of the anchor. Raises: TypeError or ValueError that name the arguments of the methods."""
    check_interval("outer_momentum", outer_momentum, "[0, 1)")
    check_rate(outer_lr, "outer_lr")
    return chain(trace(outer_momentum, nesterov), scale_by_learning_rate(outer_lr))


def _mean(axis: AxisNames, codec: Codecs | None, feedback: Feedbacks | None, servers: bool) -> Transform:
    """Return the average of pseudo-gradients, in full precision if there is no codec."""
    if codec is None:
        if feedback is not None:
            raise ValueError("feedback: is given without a codec; an exact mean leaves nothing undelivered")
        return compressed_average(axis, identity(), off(), servers=servers)
    return compressed_average(axis, codec, feedback or classic(), servers=servers)
