"""Named optimizers of local steps: each is a chain under its docstring, in the wrappers of `fn.optimizers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from torch import Tensor

from fn.arguments import check_interval, check_whole
from fn.base import Transform, chain
from fn.collectives.axis import AxisNames, names
from fn.collectives.codecs.bins import bins
from fn.collectives.codecs.codec import Codec, identity
from fn.collectives.codecs.top_k import top_k
from fn.collectives.feedback import classic, decayed, off
from fn.collectives.hierarchy import Codecs, Feedbacks
from fn.errors import expected
from fn.transforms.adam import scale_by_adam
from fn.transforms.average import agreed, average, compressed_average
from fn.transforms.bases import in_basis, tiles
from fn.transforms.decay_and_lr import add_decayed_weights, check_rate, scale_by_learning_rate
from fn.transforms.fragments import Fragments
from fn.transforms.mask_and_partition import Labels, hidden_and_other, partition
from fn.transforms.momentum import trace
from fn.transforms.muon import orthogonalize, scale_by_muon
from fn.transforms.outer import Store, outer
from fn.transforms.skip_nonfinite import skip_nonfinite
from fn.transforms.unsharded import Shards, labelled, unsharded

Tree = Any


class OuterStep(NamedTuple):
    """The outer rate and momentum that fit a number of rounds.

        momentum = min(most, max(least, 1 - parts / rounds));    rate = 1 - max(0, momentum - least) / 2

        >>> [f"{rate:.2f}, {momentum:.2f}" for rate, momentum in map(OF_DILOCO, (25, 2500, 10_000))]
        ['1.00, 0.30', '0.85, 0.60', '0.70, 0.90']

    least: the momentum of short runs, and where rounds are not known. most: that of long runs. parts: between the two
    the momentum remembers one of so many parts of the run, since it remembers 1 / (1 - momentum) rounds.
    """

    least: float
    most: float
    parts: int

    def rate(self, momentum: float) -> float:
        """Return the rate that fits a momentum."""
        return round(1 - max(0.0, momentum - self.least) / 2, 9)  # or 0.9 would be 0.8999999999999999

    def __call__(self, rounds: int) -> tuple[float, float]:
        """Return the rate and the momentum. Raises: ValueError if rounds is no whole number of at least 1."""
        if not isinstance(rounds, int) or isinstance(rounds, bool) or rounds < 1:
            raise ValueError(expected("rounds", "a whole number of at least 1", f"{rounds!r}"))
        momentum = min(self.most, max(self.least, 1 - self.parts / rounds))
        return self.rate(momentum), momentum


OF_DILOCO, OF_MULOCO = OuterStep(least=0.3, most=0.9, parts=1000), OuterStep(least=0.6, most=0.8, parts=100)


def diloco(
    lr: float | Tensor = 1e-2,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    *,
    axis: AxisNames,
    rounds: int | None = None,
    outer_lr: float | Tensor | None = None,
    outer_momentum: float | None = None,
    codec: Codecs | None = None,
    servers: bool = True,
    fragments: Fragments = None,
) -> Transform:
    """Train with DiLoCo: many local AdamW steps, then a Nesterov step along the ranks' mean pseudo-gradient.

    Take it between sites, with codec=int8() and the number of rounds; `muloco` where Muon may train. Its loss is higher
    than that of AdamW which averages gradients in every step.

        p_r after H local steps from x;    d = mean_r C(x - p_r);    b <- outer_momentum b + d
        x <- x - outer_lr (d + outer_momentum b);    p_r <- x

        >>> import fn
        >>> fn.testing.train(fn.diloco(0.1, axis="data", rounds=6), fn.every(5))
        Loss(before=0.944, after=0.018)

    With another outer optimizer, feedback, anchors on the host, or a part of each rank's own way kept, as Streaming
    DiLoCo keeps it, it is this chain:

        >>> adamw = fn.chain(fn.scale_by_adam(), fn.add_decayed_weights(0.1), fn.scale_by_learning_rate(4e-4))
        >>> outer_tx = fn.chain(fn.trace(0.9), fn.scale_by_learning_rate(0.7))             # heavy ball
        >>> mean = fn.compressed_average("data", fn.int4(), fn.damped())
        >>> rounds = fn.outer(adamw, outer_tx, mean, fragments=4, alpha=0.5, store="cpu", on_skip="anchor")
        >>> tx = fn.chain(fn.average("data"), rounds)

    Args:
        lr: of the local steps, a float or a 0-d tensor; start with AdamW's rate times 0.6. The default is for small
            models. b1, b2, eps, weight_decay: of AdamW.
        axis: the ranks that train together.
        rounds: how many exchanges the whole run has. It chooses the outer step: the momentum is 0.3 up to 1428
            rounds, the paper's 0.9 from 10,000 on, and 1 - 1000 / rounds between. It is not measured above 1000 rounds.
        outer_lr, outer_momentum: the outer step by hand, in place of rounds. The default momentum is 0.3, the default
            rate 1 - (outer_momentum - 0.3) / 2, at most 1; so the paper's momentum has the paper's rate of 0.7.
        codec: how the pseudo-gradients (differences to the anchor) are quantized, with `classic()` feedback; None is
            full precision. servers: as for `compressed_average`.
        fragments: as for `outer`; their schedule is `every(h, fragments=P, delay=d)`.
    Returns: a transform with a warm-up, exact, and rounds; `every(500)` is its schedule.
    Raises: ValueError or TypeError that names the argument; ValueError for rounds beside an outer rate or momentum.

    Paper: Douillard et al., DiLoCo (arXiv 2311.08105), algorithm 1.
    Differs: if an exchange is not finite, the ranks keep their params; torchft takes all of them back to the anchor, as
        `outer` does with on_skip="anchor". Without `rounds` the outer rate is 1.0 and the momentum 0.3; on the atlas's
        language model the paper's 0.7 and 0.9 ended 0.09 to 0.37 nats higher in 11 of 12 kinds of runs of 8 to 100
        rounds, and as high in the 12th; in three of 300 and 1000 rounds, on one or two seeds, 0.04 to 0.29 higher. The
        default rate of local steps is 0.01, for small models; the paper's is 0.0004.
    """
    adamw = chain(scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay), scale_by_learning_rate(lr))
    outer_tx = _outer_nesterov(OF_DILOCO, rounds, outer_lr, outer_momentum)
    tx = outer(adamw, outer_tx, _mean(axis, codec, None, servers), fragments=fragments)
    return agreed(skip_nonfinite(chain(average(axis), tx)), axis)


def local_sgd(
    lr: float | Tensor = 0.5,
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
    """Train with local SGD: local steps, then the mean of the params; post-local SGD with a warm-up.

    Take it where SGD trains the model, such as a convolutional network; `diloco` where Adam does.

        H times  m_r <- momentum m_r + g_r;  p_r <- p_r - lr (m_r + weight_decay p_r);    then  p_r <- mean_r p_r

        >>> import fn
        >>> fn.testing.train(fn.local_sgd(0.1, axis="data"), fn.every(5))
        Loss(before=0.944, after=0.002)

    Args:
        lr: of the local steps, a float or a 0-d tensor; start with AdamW's rate times 20. With a momentum of 0.9 take a
            tenth of that, and of the default. momentum: of the local steps, each rank's own. weight_decay: decoupled.
        axis, codec, servers: as for `diloco`. feedback: what becomes of the residual errors; None is `classic()`, where
            there is a codec. store, on_skip: as for `outer`.
    Returns: a transform with a warm-up, exact, and rounds; `every(h)` is its schedule, `every(h, start=n)` that of
        post-local SGD.
    Raises: ValueError or TypeError that names the argument.

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
    lr: float | Tensor = 1e-2,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.1,
    *,
    axis: AxisNames,
    outer_lr: float | Tensor = 1.0,
    k: int = 128,
    tile: int = 64,
    values: Codec | None = None,
    keep: float = 0.95,
    fragments: Fragments = None,
) -> Transform:
    """Train with SparseLoCo: DiLoCo that sends a few numbers of each tile in 2 bits, and keeps the rest as errors.

    Take it for few workers over very slow links, where the 2 bits of `diloco(codec=bins(4, 6))` are too many.

        h_r = keep e_r + (x - p_r);    q_r = Q(top_k(h_r));    e_r <- h_r - q_r;    x <- x - outer_lr mean_r q_r

        >>> import fn
        >>> fn.testing.train(fn.sparse_loco(0.1, axis="data", k=2, tile=2), fn.every(5))
        Loss(before=0.944, after=0.065)

    With means over all ranks it is this chain:

        >>> adamw = fn.chain(fn.scale_by_adam(), fn.add_decayed_weights(0.1), fn.scale_by_learning_rate(1e-3))
        >>> codec = lambda n: fn.top_k(max(1, round(n / 32)), n, over="ranks", values=fn.bins(4, 6))
        >>> mean = lambda n: fn.compressed_average("data", codec(n), fn.decayed(0.95), servers=False)
        >>> rounds = fn.outer(adamw, fn.scale_by_learning_rate(1.0), fn.in_basis(fn.tiles(64), mean))
        >>> tx = fn.chain(fn.average("data"), rounds)

    Args:
        lr, b1, b2, eps, weight_decay, axis: as for `diloco`. lr: start with AdamW's rate times 0.6. outer_lr: of the
            outer step.
        k: how many numbers of a whole tile are sent; of n numbers round(n k / tile^2), and at least one.
        tile: the side of a tile, as for `tiles`.
        values: how these numbers are quantized. None: `bins(4, 6)`; `identity()`: full precision.
        keep: weight of the old residual errors.
        fragments: as for `outer`.
    Returns: a transform with a warm-up, exact, and rounds; `every(15)` is its schedule. All ranks send to all others,
        so it is for few of them.
    Raises: ValueError or TypeError that names the argument.

    Paper: Sarfi et al., SparseLoCo (arXiv 2508.15706), algorithm 1; numbers as in its code and for 512 M parameters.
    Differs: the mean of an element is over those ranks that sent it, as in the authors' code; the paper divides by all,
        as `top_k` does with over="ranks". `outer_lr` counts once; in the code it multiplies the differences, too, and
        counts twice.
    """
    values, basis = bins(4, 6) if values is None else values, tiles(tile)
    names(axis)
    check_whole("k", k)
    top_k(k, tile * tile, over="senders", values=values)  # refuses what does not fit, before there are params
    decayed(keep)

    def mean(n: int) -> Transform:
        codec = top_k(max(1, round(n * k / tile**2)), n, over="senders", values=values)
        return compressed_average(axis, codec, decayed(keep), servers=False)

    adamw = chain(scale_by_adam(b1, b2, eps), add_decayed_weights(weight_decay), scale_by_learning_rate(lr))
    sync = in_basis(basis, mean, axis=axis)
    check_rate(outer_lr, "outer_lr")
    tx = outer(adamw, scale_by_learning_rate(outer_lr), sync, fragments=fragments)
    return agreed(skip_nonfinite(chain(average(axis), tx)), axis)


def muloco(
    lr: float | Tensor = 0.013,
    momentum: float = 0.9,
    weight_decay: float = 0.01,
    *,
    axis: AxisNames,
    labels: Labels = None,
    shards: Shards | str | None = None,
    rounds: int | None = None,
    outer_lr: float | Tensor | None = None,
    outer_momentum: float | None = None,
    codec: Codecs | None = None,
    servers: bool = True,
    fragments: Fragments = None,
) -> Transform:
    """Train with MuLoCo: DiLoCo whose local steps are Muon's for matrices of hidden layers, AdamW's for all others.

    Take it for transformers between sites. In 2 bits its loss was lower than `diloco`'s on the atlas's language model,
    and higher in fine-tuning and on digits.

        local step:  m_r <- momentum m_r + g_r;    p_r <- p_r - lr (0.2 sqrt(max(n, k)) NS(m_r) + weight_decay p_r)
        every H:     the exchange of `diloco`

        >>> import torch, fn
        >>> fn.testing.train(fn.muloco(0.1, axis="data"), fn.every(5))
        Loss(before=0.944, after=0.046)

    With the authors' scale and a rate for each kind, Muon in bfloat16, and decayed errors, it is this chain:

        >>> rule = fn.scale_by_muon(0.9, scale="spectral_norm", dtype=torch.bfloat16)
        >>> kinds = {"hidden": fn.chain(rule, fn.scale_by_learning_rate(0.02)), "other": fn.adamw(1e-3)}
        >>> kind_of = lambda params: fn.tree.map(lambda p: "hidden" if p.ndim == 2 else "other", params)
        >>> outer_tx = fn.chain(fn.trace(0.8, nesterov=True), fn.scale_by_learning_rate(0.9))
        >>> mean = fn.compressed_average("data", fn.bins(4, 6), fn.decayed(0.9))
        >>> tx = fn.chain(fn.average("data"), fn.outer(fn.partition(kinds, kind_of), outer_tx, mean))

    Args:
        lr: of the local steps, of both kinds, which scale="rms_norm" of `scale_by_muon` makes equally long; start with
            0.013. Longer runs want less: on the atlas's language model 2400 steps wanted 0.003 to 0.005.
        labels: which tensors are "hidden", Muon's, and which "other": `fn.labels_of(model)`, which leaves embeddings
            and the head to AdamW, with betas 0.9 and 0.99. None: all matrices are Muon's, for their shapes do not tell.
        momentum: Muon's. weight_decay: of both kinds.
        rounds: how many exchanges the whole run has. It chooses the outer step: the momentum is 0.6 up to 250 rounds,
            the paper's 0.8 from 500 on, and 1 - 100 / rounds between.
        outer_lr, outer_momentum: the outer step by hand, in place of rounds. The default momentum is 0.6, the default
            rate 1 - (outer_momentum - 0.6) / 2, at most 1; so the paper's momentum has the paper's rate of 0.9.
        axis, codec, servers, fragments: as for `diloco`; in 2 bits it is `codec=bins(4, 6)`.
        shards: as for `fn.muon`: the axis over which the params of an island are divided. `fn.Optimizer` gives it for
            params of FSDP2.
    Returns: a transform with a warm-up, exact, and rounds; `every(30)` is its schedule.
    Raises: ValueError or TypeError that names the argument.

    Paper: Therien et al., MuLoCo (arXiv 2505.23725).
    Differs: without `rounds` the outer rate is 1.0 and the momentum 0.6; the paper has 0.9 and 0.8 for several workers.
        Matrices' steps are scaled for a rate of AdamW's; the authors' are scaled by sqrt(n / k), and have a rate
        of their own. The authors' program for one worker has momentum 0.95, b2 0.95 and an outer step of 0.7 and 0.6.
        `outer_lr` counts once; in the authors' code for several ranks it multiplies the differences, too, where
        errors are fed back.
    """
    check_interval("momentum", momentum, "[0, 1)")
    decay, rate = add_decayed_weights(weight_decay), scale_by_learning_rate(lr)
    named = hidden_and_other(labels, {"hidden": "muon", "other": "adamw"})
    kind_of: Tree | Callable[[Tree], Tree] = named
    if shards is None:
        iterations = scale_by_muon(momentum, scale="rms_norm")
    else:
        kind_of, shards_of = labelled(shards, named, labels)
        iterations = chain(trace(momentum), unsharded(orthogonalize(scale="rms_norm"), shards_of("muon")))
    kinds = {"muon": chain(iterations, decay, rate), "adamw": chain(scale_by_adam(0.9, 0.99), decay, rate)}
    inner = partition(kinds, kind_of)
    outer_tx = _outer_nesterov(OF_MULOCO, rounds, outer_lr, outer_momentum)
    tx = outer(inner, outer_tx, _mean(axis, codec, None, servers), fragments=fragments)
    return agreed(skip_nonfinite(chain(average(axis), tx)), axis)


def _outer_nesterov(
    of_method: OuterStep, rounds: int | None, outer_lr: float | Tensor | None, outer_momentum: float | None
) -> Transform:
    """Return the optimizer of the anchor. Raises: TypeError or ValueError that name the arguments of the methods."""
    if rounds is not None:
        by_hand = {"outer_lr": outer_lr, "outer_momentum": outer_momentum}
        if given := [name for name, value in by_hand.items() if value is not None]:
            raise ValueError(f"rounds, {', '.join(given)}: rounds chooses the outer step; give rounds, or the others")
        outer_lr, outer_momentum = of_method(rounds)
    momentum = of_method.least if outer_momentum is None else outer_momentum
    check_interval("outer_momentum", momentum, "[0, 1)")
    rate = of_method.rate(momentum) if outer_lr is None else outer_lr
    check_rate(rate, "outer_lr")
    return chain(trace(momentum, nesterov=True), scale_by_learning_rate(rate))


def _mean(axis: AxisNames, codec: Codecs | None, feedback: Feedbacks | None, servers: bool) -> Transform:
    """Return the average of pseudo-gradients, in full precision if there is no codec."""
    if codec is None:
        if feedback is not None:
            raise ValueError("feedback: is given without a codec; give one, for an exact mean has no residual errors")
        return compressed_average(axis, identity(), off(), servers=servers)
    return compressed_average(axis, codec, classic() if feedback is None else feedback, servers=servers)
