"""Bounds of what a step in place writes, carried from step to step, so that nobody has to look at the result.

The pure step looks at its result, and is skipped where a number is not finite (`skip_nonfinite`). A step in place has
written over the old numbers by then. So it is taken only where bounds rule out beforehand that a new number overflows.

**What is bounded.** With g what enters the momentum, a gradient or a mean, and L the `Reach.limit`:

    m' = b1 m + (1 - b1) g,  or g           v' = b2 v + (1 - b2) g^2,  or v
    u  = m' / (w (sqrt(v') + eps))          p' = p - rate r^2 (u + decay p)

w is the weight of the momentum (1 without correction of biases), r a trust ratio (1 but for LAMB). A clamp of u or m'
(`max_step`) makes both smaller, so it needs no bound of its own. A step is in place if the `size` of g, its largest
magnitude, is at most L, and if `_rules_out` holds for the bounds M, V, P of |m|, v, |p|. Each line of the proof has a
letter, and the code that relies on a line names it.

(a) Momentum. m' lies between m and g, so |m'| <= max(M, L). If M <= L, then |m'| <= L; so it is where g replaces m.
(b) Direction. v' >= 0, so |u| <= |m'| / (w eps) <= L / (w eps), which is at most A/4 by the choice of L. A is
    `largest`: 2^102 in general, 2^57 where 4096 squares are added up, for 4096 (2^55)^2 = 2^122 < 2^128.
(c) Move. rate r^2 |u| <= A / (4 HEADROOM), by the choice of L, too. So P takes 2^11 steps from 0 to A/4.
(d) Param. |p'| <= |1 - rate r^2 decay| P + rate r^2 |u|; 2^-20 of it is more than some roundings of 2^-24 each.
    If P, decay P and rate r^2 decay P are at most A/4, then all sums on the way are at most A <= 2^102, and half a unit
    in the last place of the largest float32 is 2^103: nothing is rounded to Inf. A bfloat16 may leave P behind, since
    it stays where a small decay should shrink it, and its rounding may double a move; by (c) that is 2^90 a step at
    most, and 2^37 such steps would be needed to overflow.
(e) Second moment. v' lies between v and g^2, so v' <= max(V, (f L)^2), where f is `gradient_factor`: a gradient that is
    formed from momenta, (m' - b1 m) / (1 - b1), is at most 2 / (1 - b1) L. L <= 2^62 / f, so (f L)^2 <= 2^124; V may be
    2^126 from a look. LAMB's ratio of denominators is at most (sqrt(V) + eps) / eps, so sqrt(V) / eps is bounded, too.
(f) eps and w are at least 2^-120: products with them and their inverses are normal numbers, which keep their digits.

**Params of float16** overflow from 65520 on (`FLOAT16_LIMIT`), and the L of (c) says nothing about moves of that size.

(g) There |m| <= slope sqrt(v) + `UNSEEN`. A gradient moves both moments: sqrt(v') >= sqrt(b2) sqrt(v) and
    sqrt(v') >= sqrt(1 - b2) |g|, so |m'| <= slope' sqrt(v') + UNSEEN with slope' = a slope + b, a = b1 / sqrt(b2),
    b = (1 - b1) / sqrt(1 - b2); 2^-10 of it for roundings. UNSEEN is what squares are too small to show: v is coarse
    below 2^-126, so a momentum of 2^-63 may stand beside v = 0, and one of `STEEPEST` 2^-63 = 2^-53 beside that v.
    Hence |u| <= slope' / w + UNSEEN / (w eps), whatever v is.
(h) Where the second moment rests, no slope follows. There L is what moves no param by more than `FLOAT16_MOVE`.

**Where bounds come from.** A look, one pass over params and moments: in the first step, after somebody else wrote into
one of the tensors, and when the bounds have grown so far that they rule out nothing any more, which by (c) takes
hundreds of steps. Where a fresh look rules out nothing either, the pure step is taken, and decides. A fixed limit for g
without bounds that follow was tried: of 208 attacks it let 20 through.

**All ranks decide alike.** L follows from hyper-parameters and counts of steps alone. A rank whose moments are not
finite sends NaN in place of its gradients: all ranks skip the step, not this one alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain as joined
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.base import Link, UpdateFn
from fn.inplace.links import Descent, Head
from fn.inplace.protocol import InPlace, Staged, are_same
from fn.kernels import ops
from fn.transforms.adam import AdamState, OnebitAdamState
from fn.transforms.lamb import OnebitLambState
from fn.transforms.zero_one_adam import ZeroOneAdamState

Tree = Any

MOVE = 2.0**102
"""A in (b) to (d): what a param, a decay and a move of a param stay below."""

SUMMED = 2.0**57
"""A where kernels add up 4096 squares."""

SQUARE = 2.0**62
"""The largest gradient whose square the second moment can take (e)."""

HEADROOM = 2.0**11
"""Steps for which bounds that start at 0 rule out an overflow (c)."""

SMALLEST = 2.0**-120
"""Numbers from here on keep their digits in the products that kernels form with them (f)."""

FLOAT16_LIMIT = 65520.0
"""From here on a float32 is rounded to an Inf of float16."""

FLOAT16_MOVE = 2.0**13
"""What a step may move a param of float16 by, whose second moment rests (h)."""

UNSEEN, STEEPEST = 2.0**-39, 2.0**10
"""The part of a momentum that its second moment may not show, and the largest slope up to which (g) was derived."""


class Bounded(NamedTuple):
    """Which fields of a state enter bounds: copies of params, moments, what a step is multiplied by, and others."""

    copies: tuple[str, ...] = ()
    momenta: tuple[str, ...] = ("mu",)
    squares: tuple[str, ...] = ("nu",)
    ratios: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


BOUNDED = {
    AdamState: Bounded(others=("mu_weight", "nu_weight")),
    OnebitAdamState: Bounded(others=("mu_weight", "nu_weight")),
    OnebitLambState: Bounded(squares=("nu", "nu_fresh"), ratios=("coefficient", "factor"), others=("scaling",)),
    ZeroOneAdamState: Bounded(copies=("anchor",)),
}


class Reach(NamedTuple):
    """How far a step goes: p <- p - rate trust_ratio^2 (m / (mu_weight (sqrt(v) + eps)) + weight_decay p).

    mu_weight: of the momentum after the step. trust_ratio: the largest one in range, where its state has some.
    momentum_enters: whether the old momentum enters the new one; else a mean replaces it. gradient_factor: f in (e).
    largest: A in (b) to (d). param_limit: what a param has to stay below, where its dtype has a smaller range.
    slope_growth: (a, b) in (g); None: the second moment rests.
    """

    rate: float
    eps: float
    weight_decay: float
    mu_weight: float = 1.0
    trust_ratio: float = 1.0
    momentum_enters: bool = True
    gradient_factor: float = 1.0
    largest: float = MOVE
    param_limit: float = math.inf
    slope_growth: tuple[float, float] | None = None

    @property
    def limit(self) -> float:
        """Return L, what `size` may be; 0 where that is below 1.

        A power of 16: L is to change rarely, since a momentum within the old L need not be within the new one. A power
        of 2 where params are of float16 and the second moment rests: there 16 times less would be too little.
        """
        rate = abs(self.rate)
        if not (self.eps >= SMALLEST and SMALLEST <= self.mu_weight <= 2 and rate < MOVE):  # (f); NaN fails, too
            return 0.0
        scaled_rate = max(rate * self.trust_ratio**2, SMALLEST)
        most = self.largest * self.mu_weight * self.eps / 4
        limit = min(SQUARE / self.gradient_factor, most, most / HEADROOM / scaled_rate)  # (e), (b), (c)
        if self.param_limit < math.inf and self.slope_growth is None:
            limit = min(limit, FLOAT16_MOVE * self.mu_weight * self.eps / scaled_rate)  # (h)
            return 2.0 ** math.floor(math.log2(limit))
        return 16.0 ** math.floor(math.log(limit, 16)) if limit >= 1 else 0.0


class Sized(NamedTuple):
    """A step that waits to be written. size: of what enters the momentum, 0-d; NaN or Inf where that is not finite.

    otherwise: what to write if it is not, in a step of which no other rank hears. None: all ranks skip the step.
    """

    size: Tensor
    commit: Callable[[], None]
    otherwise: Callable[[], None] | None = None


NOWHERE = Reach(0.0, 1.0, 0.0)


class Bounds:
    """Bounds of the params of a chain and of the link that keeps its moments, for all phases of it."""

    def __init__(self) -> None:
        self._tensors: list[Tensor] = []
        self._addresses: list[int] = []
        self._watched: list[Tensor] = []  # those, and what else of the link's state bounds depend on
        self._version_seen: int | None = None  # when they were written last
        self.param = self.momentum = self.square = self.ratio = self.slope = math.inf  # none is larger
        self.finite = True
        """Whether the moments were, at the last look."""
        self.link: Tree = None
        self.lists: list[list[Tensor]] = []
        self.reach = NOWHERE
        """What `hold` was asked about last."""

    def hold(self, reach: Reach, link: Tree, lists: list[list[Tensor]]) -> bool:
        """Return whether nothing overflows in a step whose size is within the limit.

        Args: link: the state of the link. lists: params and the lists that the kernels write.
        """
        known = self.link is link and self.lists is lists
        reach = reach._replace(param_limit=FLOAT16_LIMIT) if lists[0][0].dtype == torch.float16 else reach
        self.link, self.lists, self.reach = link, lists, reach
        if not reach.limit:
            self.finite = True  # for the pure step to find out
            return False
        if not known:  # another phase's lists of the same tensors, or others
            tensors = [*joined(*lists)]
            addresses, same = [*map(Tensor.data_ptr, tensors)], are_same(tensors, self._tensors)
            self._version_seen = self._version_seen if same and addresses == self._addresses else None
            self._tensors, self._addresses = tensors, addresses
            entering = BOUNDED[type(link)]
            self._watched = [*tensors, *_fields(link, (*entering.ratios, *entering.others))]
        if self._version_seen is None or self._version_seen != self._version() or not self._rules_out(reach):
            self._look(reach, link, lists[0])
        return self._rules_out(reach)

    def follow(self, reach: Reach, link: Tree) -> None:
        """Follow a step that was written."""
        if self.link is not link:  # one transform steps for several groups
            self._version_seen = None
            return
        self.param = self._moved(reach)  # first: it needs the old slope
        self.slope = self._next_slope(reach)
        self.momentum = max(reach.limit, self.momentum) if reach.momentum_enters else reach.limit  # (a)
        self.square = max(self.square, (reach.gradient_factor * reach.limit) ** 2)  # (e)
        self.ratio = max(self.ratio, reach.trust_ratio)
        self._version_seen = self._version()

    def _next_slope(self, reach: Reach) -> float:
        """Return slope' in (g)."""
        if reach.slope_growth is None:
            return math.inf
        a, b = reach.slope_growth
        return (a * self.slope + b) * (1 + 2.0**-10)

    def _moved(self, reach: Reach) -> float:
        """Return P after a step (d)."""
        rate, slope = self._rate(reach), self._next_slope(reach)
        direction, rounding = reach.limit / (reach.mu_weight * reach.eps), 2.0**-20  # (b)
        if reach.param_limit < math.inf:
            rounding = 2.0**-10  # that of float16 is half of it
            if slope <= STEEPEST:
                direction = min(direction, slope / reach.mu_weight + UNSEEN / (reach.mu_weight * reach.eps))  # (g)
        return (abs(1 - rate * reach.weight_decay) * self.param + rate * direction) * (1 + rounding)

    def _rules_out(self, reach: Reach) -> bool:
        """Return whether the bounds rule out that a step overflows whose size is within the limit."""
        limit, rate, decay = reach.limit, self._rate(reach), reach.weight_decay * self.param
        move = rate * limit / (reach.mu_weight * reach.eps)  # beyond (c) where a loaded trust ratio is out of range
        ratio = math.sqrt(self.square) / reach.eps if reach.gradient_factor > 1 else 0.0
        is_wide = self.square > 4 * SQUARE**2 or ratio > MOVE  # (e); NaN is not: `finite` says that, without more looks
        return (
            self._moved(reach) < reach.param_limit
            and max(self.param, decay, rate * decay, move) <= reach.largest / 4  # (d)
            and not is_wide
            and (not reach.momentum_enters or self.momentum <= limit)  # (a)
        )

    def _rate(self, reach: Reach) -> float:
        return abs(reach.rate) * max(self.ratio, reach.trust_ratio) ** 2

    def _version(self) -> int:
        """Return a number that grows whenever somebody writes into one of the tensors, as torch counts it."""
        return sum(map(_VERSION, self._watched))

    def _look(self, reach: Reach, link: Tree, params: list[Tensor]) -> None:
        copies, momenta, squares, ratios, others = (_fields(link, names) for names in BOUNDED[type(link)])
        zero = params[0].new_zeros(())
        lists = [[*params, *copies], momenta, squares, ratios, others]
        sizes = [largest_of(tensors, zero) for tensors in lists]
        lowest = torch.stack([zero, *(x.amin() for x in (*squares, *others) if x.numel())]).amin()
        slopes = [zero + math.inf]
        if reach.param_limit < math.inf and reach.slope_growth is not None:
            slopes = [zero, *map(_slope, momenta, tree.leaves(link.nu))]
        numbers = torch.stack([*sizes, lowest, torch.stack(slopes).amax()]).cpu().tolist()  # one wait for the device
        self.param, self.momentum, self.square, self.ratio, other, least, self.slope = numbers
        self.finite = all(map(math.isfinite, (self.momentum, self.square, other)))
        if least < 0:  # no root of it, so (b) does not hold
            self.square = math.inf
        self._version_seen = self._version()


class MatchedChain(NamedTuple):
    """A chain, cut at the link that keeps the moments.

    update: the pure one. link: that link. head: the links in front of it. descent: what those behind it amount to.
    """

    update: UpdateFn
    link: Link
    head: Head
    descent: Descent
    bounds: Bounds


def bounded(
    chain: MatchedChain,
    fits: Callable[[Tree, Tree, Tree], list[list[Tensor]] | None],
    reach: Callable[[Any], Reach],
    stage: Callable[[list[Tensor], list[list[Tensor]], Any, Reach], Sized],
) -> InPlace:
    """Return how an update is staged where no number can overflow.

    Args: fits: (updates, the link's state, params) -> the lists that the kernels write, params first; None without any.
        reach: of a step, from the link's state.
        stage: (gradients, those lists, the link's state, reach) -> all of a step but to write it.
    """

    update, link, head, _, bounds = chain

    def is_safe(updates: Tree, state: Tree, params: Tree) -> bool:
        moments = link.state(state)
        lists = fits(updates, moments, params)
        return lists is not None and (bounds.hold(reach(moments), moments, lists) or not bounds.finite)

    def staged(updates: Tree, state: Tree, params: Tree) -> Staged:
        moments = link.state(state)
        if bounds.link is not moments and not is_safe(updates, state, params):  # another group was asked about since
            return Staged(True, lambda: None, safe=False)
        if not bounds.finite:
            updates = tree.map(lambda g: torch.full_like(g, math.nan), updates)  # for all ranks to see
        step_reach, lists = bounds.reach, bounds.lists
        grads, keep_front = head.gradients(updates, state, params, moments.nu)
        size, write, otherwise = stage(grads, lists, moments, step_reach)

        def commit() -> None:
            write()
            keep_front()
            bounds.follow(step_reach, moments)

        finite, within = _judged(size, step_reach.limit)
        if otherwise is None:
            return Staged(finite, commit, within)

        def drop() -> None:
            otherwise()
            keep_front()

        return Staged(finite, commit, within, drop)

    return InPlace(update, is_safe, staged)


def largest_of(tensors: Sequence[Tensor], like: Tensor) -> Tensor:
    """Return the largest magnitude, 0-d; NaN where an element is. like: is on the device where it is zero of none."""
    if not tensors:
        return torch.zeros((), dtype=torch.float32, device=like.device)
    largest: Tensor = ops.direct("largest_magnitude", tensors)
    return largest


def _slope(m: Tensor, v: Tensor) -> Tensor:
    """Return the largest (|m| - UNSEEN) / sqrt(v), 0-d; Inf where the second moment is 0."""
    slopes = (m.abs() - UNSEEN).clamp_(min=0.0).div_(v.sqrt())
    return slopes.nan_to_num_(0.0, posinf=math.inf).amax() if m.numel() else m.new_zeros(())


def _judged(size: Tensor, limit: float) -> tuple[bool | Tensor, bool | Tensor]:
    """Return whether a magnitude is finite, and within a limit; on its device, if nobody has to wait there."""
    if size.device.type != "cpu":
        return size < math.inf, size <= limit
    number = float(size)
    return math.isfinite(number), number <= limit


def _fields(link: Tree, names: Sequence[str]) -> list[Tensor]:
    leaves = [leaf for name in names for leaf in tree.leaves(getattr(link, name))]
    return [leaf for leaf in leaves if leaf.is_floating_point()]  # of a momentum that is kept as codes: their scales


_VERSION = attrgetter("_version")
