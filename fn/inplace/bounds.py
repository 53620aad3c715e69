"""Bounds of what a step in place writes, carried from step to step, so that nobody has to look at the result.

The pure step looks at its result, and is skipped where a number is not finite (`finite`). A step in place has written
over the old numbers by then. So it is taken only where bounds rule out that one of the new numbers overflows. With
`size`, the largest magnitude of what enters the momentum,

    |m'| <= max(|m|, size)            |p'| <= (1 - rate weight_decay) |p| + rate |m'| / (weight eps)

A param of float16 has to stay below `EDGE`. There the first moment is bounded by the second, which a gradient moves
with it: |m| <= slope sqrt(v) + `TINY`, which includes what squares are too small to say. Where the second moment rests,
the limit of `size` is what moves no param by more than `STRIDE`.

The bounds come from a look at params and moments, and then follow step by step. The look is a pass over memory. It is
taken in the first step, after somebody else wrote into one of the tensors, and when the bounds have grown so far that
they rule out nothing any more, which takes hundreds of steps. Where a fresh look rules out nothing either, the pure
step is taken, and decides.

The limit of `size` follows from hyper-parameters alone, so that all ranks decide alike. A rank whose moments are not
finite sends NaN in place of its gradients: all ranks skip the step, not this one alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.base import Link, UpdateFn
from fn.inplace.links import Head
from fn.inplace.protocol import InPlace, Staged
from fn.kernels import ops
from fn.transforms.adam import AdamState, OnebitAdamState
from fn.transforms.lamb import OnebitLambState
from fn.transforms.zero_one_adam import ZeroOneAdamState

Tree = Any

MOVE = 2.0**102
"""What a step moves a param by is less; from half a unit in the last place of the largest float32 on, sums overflow."""

SUMMED = 2.0**57
"""The largest number of which kernels can add up 4096 squares."""

SQUARE = 2.0**62
"""The largest gradient of which the second moment can add up squares."""

PART = 2.0**11
"""A step moves a param by at most this part of what a param may be, so that bounds hold for hundreds of steps."""

SMALLEST = 2.0**-120
"""Numbers from here on keep their digits in the products that kernels form with them."""

EDGE = 65520.0
"""From here on a float32 is rounded to an Inf of float16."""

STRIDE = 2.0**13
"""What a step may move a param of float16 by, whose second moment rests."""

TINY, STEEP = 2.0**-39, 2.0**10
"""The part of a momentum that its second moment may not show, and the largest slope for which it is no larger."""


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
    """How far a step goes: p <- p - rate ratio^2 (m / (weight (sqrt(v) + eps)) + weight_decay p).

    weight: of the momentum after the step. ratio: the largest one in range, where its state has some. keeps: whether
    the old momentum enters the new one. gain: how much larger a gradient can be that is formed from momenta.
    most: what a param, a decay or a direction may be. edge: what a param has to stay below, where that is less.
    growth: (a, b) if the next slope, see above, is at most a slope + b. None: the second moment rests.
    """

    rate: float
    eps: float
    weight_decay: float
    weight: float = 1.0
    ratio: float = 1.0
    keeps: bool = True
    gain: float = 1.0
    most: float = MOVE
    edge: float = math.inf
    growth: tuple[float, float] | None = None

    @property
    def limit(self) -> float:
        """Return what `size` may be: a power of 16, so that it changes rarely; 0 instead of what is below 1.

        A power of 2 where the params are of float16 and the second moment rests.
        """
        rate = abs(self.rate)
        if not (self.eps >= SMALLEST and SMALLEST <= self.weight <= 2 and rate < MOVE):
            return 0.0
        unit = self.most * self.weight * self.eps / 4
        found = min(SQUARE / self.gain, unit, unit / PART / max(rate * self.ratio**2, SMALLEST))
        if self.edge < math.inf and self.growth is None:
            stride = STRIDE * self.weight * self.eps / max(rate * self.ratio**2, SMALLEST)
            return 2.0 ** math.floor(math.log2(min(found, stride)))
        return 16.0 ** math.floor(math.log(found, 16)) if found >= 1 else 0.0


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
        self._seen: int | None = None  # when they were written last
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
        reach = reach._replace(edge=EDGE) if lists[0][0].dtype == torch.float16 else reach
        self.link, self.lists, self.reach = link, lists, reach
        if not reach.limit:
            self.finite = True  # for the pure step to find out
            return False
        if not known:  # another phase's lists of the same tensors, or others
            tensors = [*chain(*lists)]
            addresses, same = [*map(Tensor.data_ptr, tensors)], _are_same(tensors, self._tensors)
            self._seen = self._seen if same and addresses == self._addresses else None
            self._tensors, self._addresses = tensors, addresses
            entering = BOUNDED[type(link)]
            self._watched = [*tensors, *_fields(link, (*entering.ratios, *entering.others))]
        if self._seen is None or self._seen != self._version() or not self._rules_out(reach):
            self._look(reach, link, lists[0])
        return self._rules_out(reach)

    def follow(self, reach: Reach, link: Tree) -> None:
        """Follow a step that was written."""
        if self.link is not link:  # one transform steps for several groups
            self._seen = None
            return
        size, self.param = reach.limit, self._moved(reach)
        self.slope = self._next_slope(reach)
        self.momentum = max(size, self.momentum) if reach.keeps else size
        self.square = max(self.square, (reach.gain * size) ** 2)
        self.ratio = max(self.ratio, reach.ratio)
        self._seen = self._version()

    def _next_slope(self, reach: Reach) -> float:
        if reach.growth is None:
            return math.inf
        a, b = reach.growth
        return (a * self.slope + b) * (1 + 2.0**-10)

    def _moved(self, reach: Reach) -> float:
        """Return the bound of params after a step."""
        rate, slope = self._rate(reach), self._next_slope(reach)
        direction, rounding = reach.limit / (reach.weight * reach.eps), 2.0**-20
        if reach.edge < math.inf:
            rounding = 2.0**-10
            if slope <= STEEP:
                direction = min(direction, slope / reach.weight + TINY / (reach.weight * reach.eps))
        return (abs(1 - rate * reach.weight_decay) * self.param + rate * direction) * (1 + rounding)

    def _rules_out(self, reach: Reach) -> bool:
        if not self._moved(reach) < reach.edge:
            return False
        limit, rate, decay = reach.limit, self._rate(reach), reach.weight_decay * self.param
        if not max(self.param, decay, rate * decay) <= reach.most / 4:
            return False
        far = rate * limit / (reach.weight * reach.eps) > reach.most / 4
        wide = self.square > 4 * SQUARE**2 or (reach.gain > 1 and math.sqrt(self.square) / reach.eps > MOVE)
        return not (far or wide) and (not reach.keeps or self.momentum <= limit)

    def _rate(self, reach: Reach) -> float:
        return abs(reach.rate) * max(self.ratio, reach.ratio) ** 2

    def _version(self) -> int:
        """Return a number that grows whenever somebody writes into one of the tensors."""
        return sum(map(_VERSION, self._watched))

    def _look(self, reach: Reach, link: Tree, params: list[Tensor]) -> None:
        copies, momenta, squares, ratios, others = (_fields(link, names) for names in BOUNDED[type(link)])
        lists = [[*params, *copies], momenta, squares, ratios, others]
        zero = lists[0][0].new_zeros(())
        sizes = [ops.direct("largest_magnitude", each) if each else zero for each in lists]
        lowest = torch.stack([zero, *(x.amin() for x in (*squares, *others) if x.numel())]).amin()
        slopes = [zero + math.inf]
        if reach.edge < math.inf and reach.growth is not None:
            slopes = [zero, *map(_slope, momenta, tree.leaves(link.nu))]
        *found, least, self.slope = torch.stack([*sizes, lowest, torch.stack(slopes).amax()]).cpu().tolist()
        self.param, self.momentum, self.square, self.ratio, other = found
        self.finite = all(map(math.isfinite, (self.momentum, self.square, other)))
        if least < 0:
            self.square = math.inf
        self._seen = self._version()


def bounded(
    update: UpdateFn,
    link: Link,
    head: Head,
    bounds: Bounds,
    fits: Callable[[Tree, Tree, Tree], list[list[Tensor]] | None],
    reach: Callable[[Any], Reach],
    stage: Callable[[list[Tensor], list[list[Tensor]], Any, Reach], Sized],
) -> InPlace:
    """Return how an update is staged where no number can overflow.

    Args: link: the one that keeps the moments. head: what stands in front of it.
        fits: (updates, the link's state, params) -> the lists that the kernels write, params first; None without any.
        reach: of a step, from the link's state.
        stage: (gradients, those lists, the link's state, reach) -> all of a step but to write it.
    """

    def is_safe(updates: Tree, state: Tree, params: Tree) -> bool:
        own = link.state(state)
        lists = fits(updates, own, params)
        return lists is not None and (bounds.hold(reach(own), own, lists) or not bounds.finite)

    def staged(updates: Tree, state: Tree, params: Tree) -> Staged:
        own = link.state(state)
        if bounds.link is not own and not is_safe(updates, state, params):
            return Staged(True, lambda: None, safe=False)
        if not bounds.finite:
            updates = tree.map(lambda g: torch.full_like(g, math.nan), updates)  # for all ranks to see
        step, lists = bounds.reach, bounds.lists
        grads, keep = head.gradients(updates, state, params, own.mu)
        size, write, otherwise = stage(grads, lists, own, step)

        def commit() -> None:
            write()
            keep()
            bounds.follow(step, own)

        finite, within = _judged(size, step.limit)
        if otherwise is None:
            return Staged(finite, commit, within)

        def drop() -> None:
            otherwise()
            keep()

        inside = bool(within)
        finite = inside or bool(finite)
        return Staged(True, commit if finite else drop, inside or not finite)

    return InPlace(update, is_safe, staged)


def _slope(m: Tensor, v: Tensor) -> Tensor:
    """Return the largest (|m| - TINY) / sqrt(v), 0-d; Inf where the second moment is 0."""
    slopes = (m.abs() - TINY).clamp_(min=0.0).div_(v.sqrt())
    return slopes.nan_to_num_(0.0, posinf=math.inf).amax() if m.numel() else m.new_zeros(())


def _are_same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(is_, a, b))


def _judged(size: Tensor, limit: float) -> tuple[bool | Tensor, bool | Tensor]:
    """Return whether a magnitude is finite, and within a limit; on its device, if nobody has to wait there."""
    if size.device.type != "cpu":
        return size < math.inf, size <= limit
    number = float(size)
    return math.isfinite(number), number <= limit


def _fields(link: Tree, names: Sequence[str]) -> list[Tensor]:
    return [leaf for name in names for leaf in tree.leaves(getattr(link, name))]


_VERSION = attrgetter("_version")
