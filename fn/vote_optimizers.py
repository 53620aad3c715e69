"""Named optimizers that vote, send cosines, or send differences: each is a chain under its docstring."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fn.base import Phase, Transform, chain, check_interval, check_whole, missing, unchanged
from fn.collectives.axis import AxisNames
from fn.collectives.codecs.ballots import ballots
from fn.collectives.codecs.codec import Codec
from fn.collectives.codecs.top_k import top_k
from fn.collectives.feedback import decayed, differences, off
from fn.transforms.average import agreed, average, compressed_average
from fn.transforms.bases import dct, in_basis
from fn.transforms.decay_and_lr import add_decayed_weights, scale_by_learning_rate
from fn.transforms.lion import lion_direction
from fn.transforms.momentum import local_momentum, running_sum
from fn.transforms.scaling import scale, scale_by_sign
from fn.transforms.skip_nonfinite import skip_nonfinite


def demo(
    lr: float | Tensor = 3e-4,
    weight_decay: float = 0.0,
    *,
    axis: AxisNames,
    k: int = 32,
    tile: int | Callable[[int], int] = 64,
    keep: float = 0.999,
    over: str = "senders",
    values: Codec | None = None,
) -> Transform:
    """DeMo: each rank keeps a momentum and sends its largest cosines; all step along the sign of their mean.

        delta_r <- b delta_r + lr g_r;   q_r = top_k(DCT delta_r);   delta_r <- delta_r - DCT^-1 q_r
        p <- p - lr (sgn(DCT^-1 mean_r q_r) + weight_decay p)

        >>> import torch, fn
        >>> tx, schedule = fn.demo(0.05, axis="data", k=2, tile=4), fn.freeze_after(0)
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
        0.450 -> 0.030

    Args:
        lr: a float or a 0-d tensor; start with AdamW's rate. weight_decay: decoupled.
        axis: the ranks that train together. All send to all others, so it is for few of them.
        k: how many coefficients of a tile are sent; of a smaller one all. tile: the side of a tile, as for `dct`.
        keep: b, weight of the old momentum.
        over: what the mean of a coefficient is taken over, the ranks that sent it or all ranks, as for `top_k`.
        values: how the coefficients are quantized; None is full precision.
    Returns: a transform with a warm-up and a compressed phase; `freeze_after(0)` is its schedule.
    Raises: as `dct`, `top_k` and `decayed`; ValueError if k is more than tile^2.

    Paper: Peng et al., DeMo (arXiv 2411.19870), algorithm 1.
    Differs: in the warm-up, and on one rank, it is signSGD without the momentum. A mean below 1e-6 of the tensor's
        largest counts as 0; in the authors' code the sign of a rounding error moves the parameter.
    """
    basis = dct(tile)
    check_whole("k", k)
    top_k(k, None if callable(tile) else tile * tile, over=over, values=values)  # refuses before there are params

    def mean(n: int) -> Transform:
        codec = top_k(min(k, n), n, over=over, values=values)
        return compressed_average(axis, codec, decayed(keep), servers=False)

    cosines = in_basis(basis, mean)._replace(warmup_update=unchanged)
    links = average(axis), scale(lr), cosines, scale_by_sign(noise=1e-6)
    return _named(links, weight_decay, lr, axis, "demo")


def ef21_sgdm(
    lr: float | Tensor = 1e-2,
    eta: float = 0.1,
    weight_decay: float = 0.0,
    *,
    axis: str,
    k: int | float = 0.01,
    block: int | None = None,
    values: Codec | None = None,
) -> Transform:
    """EF21-SGDM: momentum SGD whose ranks send the difference between their momentum and what they have sent of it.

        v_r <- (1 - eta) v_r + eta g_r;   c_r = top_k(v_r - h_r);   h_r <- h_r + c_r;   s <- s + mean_r c_r
        p <- p - lr (s + weight_decay p)

        >>> import torch, fn
        >>> tx, schedule = fn.ef21_sgdm(0.2, 0.5, axis="data", k=1), fn.freeze_after(1)
        >>> def train(target):                # of each rank; their mean is [2, -1, 1]
        ...     p = torch.zeros(3)
        ...     state = tx.init(p)
        ...     for step in range(40):
        ...         updates, state = tx.update(schedule(step))(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> fn.simulate(train, "data", 2)(torch.tensor([[1.5, -1.5, 0.5], [2.5, -0.5, 1.5]]))[0]
        tensor([ 2.0001, -1.0001,  1.0001])

    Args:
        lr: a float or a 0-d tensor; start with AdamW's rate times 100. eta: weight of the new gradient in the momentum.
            weight_decay: decoupled.
        axis: the ranks that train together, one name. All send to all others.
        k, block, values: as for `top_k`; by default a hundredth of each tensor is sent.
    Returns: a transform with a warm-up, exact, and a compressed phase; `freeze_after(1)` starts at the gradient.

    Paper: Fatkhullin, Tyurin and Richtarik, Momentum provably improves error feedback (arXiv 2305.15155), algorithm 1.
    Differs: the step is made with the new gradient; in the paper it is made before that.
    """
    mean = compressed_average(axis, top_k(k, block, values=values), differences(), servers=False)
    return _named((local_momentum(eta), mean, running_sum()), weight_decay, lr, axis, "ef21_sgdm")


def lion_vote(
    lr: float | Tensor = 1e-4,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    *,
    axis: AxisNames,
    ties: str = "even",
    servers: bool = True,
) -> Transform:
    """Train with Distributed Lion: keep Lion's momentum on each rank, and vote on the sign of the step with one bit.

    Take it over slow links where Lion trains, with a low rate and a high decay; for transformers `sign_muon` is better.

        u_r = b1 m_r + (1 - b1) g_r;   m_r <- b2 m_r + (1 - b2) g_r;   s = majority_r sgn(u_r)
        p <- p - lr (s + weight_decay p)

        >>> import torch, fn
        >>> tx, schedule = fn.lion_vote(0.1, axis="data"), fn.freeze_after(0)
        >>> def train(target):                # of each rank; their mean is [2, -1, 1]
        ...     p = torch.zeros(3)
        ...     state = tx.init(p)
        ...     for step in range(25):
        ...         updates, state = tx.update(schedule(step))(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> fn.simulate(train, "data", 3)(torch.tensor([[1.5, -1.5, 0.5], [2.5, -0.5, 1.5], [2.0, -1.0, 1.0]]))[0]
        tensor([ 2.5000, -1.1000,  1.1000])

    Args:
        lr: a float or a 0-d tensor; start with AdamW's rate times 0.3. b1, b2: as for `scale_by_lion`. weight_decay:
            decoupled.
        axis: the ranks that train together. ties: as for `ballots`.
        servers: True is the majority, in one bit both ways. False is the mean of the votes, which each rank sends to
            all others.
    Returns: a transform with a warm-up, the sign of the exact mean of u_r, and a compressed phase; `freeze_after(n)` is
        its schedule, and n may be 0.
    Raises: TypeError or ValueError that names the argument.

    Paper: Liu et al., Distributed Lion (arXiv 2404.00438), algorithm 1, with majority vote or averaging.
    Differs: ties and zeros vote by their index; in the authors' code always -1, so that with two ranks params drift
        wherever the ranks disagree. One bit travels for an element; theirs are added up as 64 bit numbers.
    """
    return _named((lion_direction(b1, b2), *_vote(axis, ties, servers)), weight_decay, lr, axis, "lion_vote")


def signum_vote(
    lr: float | Tensor = 1e-4,
    b: float = 0.9,
    weight_decay: float = 0.0,
    *,
    axis: AxisNames,
    ties: str = "even",
    servers: bool = True,
) -> Transform:
    """Signum with majority vote: each rank keeps a momentum, and votes on the sign of the step with one bit.

        m_r <- b m_r + (1 - b) g_r;   s = majority_r sgn(m_r);   p <- p - lr (s + weight_decay p)

        >>> import torch, fn
        >>> tx, schedule = fn.signum_vote(0.1, axis="data"), fn.freeze_after(0)
        >>> def train(target):                # of each rank; their mean is [2, -1, 1]
        ...     p = torch.zeros(3)
        ...     state = tx.init(p)
        ...     for step in range(25):
        ...         updates, state = tx.update(schedule(step))(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> fn.simulate(train, "data", 3)(torch.tensor([[1.5, -1.5, 0.5], [2.5, -0.5, 1.5], [2.0, -1.0, 1.0]]))[0]
        tensor([ 2.5000, -0.7000,  0.7000])

    Args: lr: start with AdamW's rate times 0.2. b: weight of the old momentum, in [0, 1); 0 is signSGD. lr,
        weight_decay, axis, ties, servers: as for `lion_vote`.
    Returns: a transform with the phases of `lion_vote`.
    Raises: ValueError if b is out of range.

    Paper: Bernstein et al., signSGD with majority vote (arXiv 1810.05291), algorithm 1.
    """
    check_interval("b", b, "[0, 1)")
    return _named((local_momentum(1 - b), *_vote(axis, ties, servers)), weight_decay, lr, axis, "signum_vote")


def _vote(axis: AxisNames, ties: str, servers: bool) -> tuple[Transform, ...]:
    """Return the links behind a rank's own direction: the sign of the exact mean in the warm-up, then the vote.

    A sign in front of the vote changes no ballot, and is all of it on one rank.
    """
    return average(axis), scale_by_sign(), compressed_average(axis, ballots(ties), off(), servers=servers)


def _named(
    links: tuple[Transform, ...], weight_decay: float, lr: float | Tensor, axis: AxisNames, name: str
) -> Transform:
    """Return the chain of links, weight decay and learning rate, in the usual wrappers and without a local phase."""
    tx = chain(*links, add_decayed_weights(weight_decay), scale_by_learning_rate(lr))
    tx = tx._replace(local_update=missing(Phase.LOCAL, name))
    return agreed(skip_nonfinite(tx), axis)
