"""A step late: the ranks' messages travel behind the whole next step, in place of a part of one backward pass.

step t      gradients at x_t
  | begin     the ranks make a direction of them: it travels while step t + 1 computes gradients
  | end       the direction of step t - 1 has come: decay, rate and correction with the params of now
"""

from __future__ import annotations

import inspect
from functools import update_wrapper
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fn import tree
from fn.arguments import check_interval, check_is_transform
from fn.base import (
    Chained,
    Exchange,
    Guarded,
    Phase,
    Round,
    Transform,
    UpdateFn,
    apply_updates,
    chain,
    check_arguments,
    check_state,
    facts_of,
    has_phase,
    links_of,
    name_of,
    rules_in,
    update_in,
)
from fn.collectives.agreement import device_of, true_on_all
from fn.compiling import original
from fn.errors import expected
from fn.facts import Averages
from fn.kernels import rules
from fn.kernels.flags import is_true
from fn.roles import declare
from fn.schedules import Every, Schedule, always_warm_up, phases_of
from fn.transforms.adam import zeros_like_moment
from fn.transforms.average import Average, agreed
from fn.transforms.decay_and_lr import Rate, Rounding
from fn.transforms.leafwise import apply
from fn.transforms.skip_nonfinite import is_fine, select, skip_nonfinite

Tree = Any


@declare(rank_local=("gradients",), taken=("gradients",), missing=("missing",), left_out=("left_out",))
class LateState(NamedTuple):
    """State of `late`.

    inner: the states of the chain's links. gradients: this rank's own, of the last step, like the params.
    arrived: the direction that the ranks made of the gradients of the step before. last: the update that was applied
    last, for the correction; () without one. there: whether a direction has arrived, and missing: whether it was not
    finite, 0-d bools. follows: whether an update was applied, 0-d bool. left_out: directions that were not finite, so
    that nothing moved, 0-d int64.
    """

    inner: tuple[Tree, ...]
    gradients: Tree
    arrived: Tree
    last: Tree
    there: Tensor
    missing: Tensor
    follows: Tensor
    left_out: Tensor


@declare(taken=("gradients",), missing=("missing",), left_out=("left_out",), mean=("arrived",))
class LateMeanState(LateState):
    """As `LateState`, where the direction is the exact mean of the gradients and nothing else."""


class LateWarmup(NamedTuple):
    """The rule of a step of the warm-up, which is in time. inner: the update of the whole chain."""

    inner: UpdateFn
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the updates and the next state."""
        return self.run(updates, state, params)


class LateLocal(NamedTuple):
    """The rule of a step that keeps its gradients. direction, then: what the exchange takes; ranks compare them."""

    direction: UpdateFn
    then: UpdateFn
    correction: float
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return updates that move nothing, and the state with the gradients."""
        return self.run(updates, state, params)


def late(tx: Any, *, correction: float = 1.0) -> Any:
    """Let the direction of a step arrive in the next one, so that its message has a whole step's time to travel.

    Take it where a message is about as long as a step, or shorter: a step then takes the longer of the two, in place of
    their sum. For Muon it costs next to nothing in loss, for AdamW little; see docs/late.md, and for links on which a
    message is longer than a step take fewer bits, or `fn.diloco`.

        u_t = lr_t (dir(mean_r grad_r(x_{t-1})) + wd x_t);    x_{t+1} = x_t - u_t - correction (u_t - u_{t-1})

    The chain is split behind its last link that communicates in any phase. All up to there is the direction, whatever
    moments, codes and Newton-Schulz iterations it has: it travels. All behind it is taken where the direction arrives,
    with the params and the rate of then. The schedule is `fn.every(1, delay=1, start=n)`, with a warm-up of n steps
    that are not late. The first step behind it applies nothing, and the correction begins with the second update.

        >>> import torch, fn
        >>> tx, schedule = fn.late(fn.adamw, correction=0.0)(0.1, weight_decay=0.0, axis="data"), fn.every(1, delay=1)
        >>> def train(target):                # of each rank; their mean is [2, -1, 1]
        ...     p, path = torch.zeros(3), []
        ...     state = tx.init(p)
        ...     for step in range(4):
        ...         updates, state = tx.update(schedule(step))(p - target, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...         path.append(p)
        ...     return torch.stack(path)[:, 0]
        >>> fn.simulate(train, "data", 2)(torch.tensor([[1.5, -1.5, 0.5], [2.5, -0.5, 1.5]]))[0]
        tensor([0.0000, 0.1000, 0.2000, 0.2998])

    With correction 1 each step also takes back the update before, and takes the present one in its place: gradients are
    then taken where x + u_{t-1} predicts the params to be. Where every rate is 0, an update has no correction. A rate
    that jumps from a to b is followed by an update of 2 b - a, so let it rise over some steps, as schedulers do.

    Args:
        tx: a transform that communicates, or a function that makes one, such as `fn.muon`.
        correction: in [0, 1], the coefficient of the correction; 0 is plain lateness.
    Returns: a transform with a warm-up and rounds, which guards itself: of a direction that is not finite the ranks
        keep nothing, and in the step in which it would arrive nothing moves, which counts as skipped. Of a function, a
        function with the same arguments.
    Raises: TypeError or ValueError that names the argument: also for a rate or a decay in front of, or inside of, the
        last link that communicates; for `sharded`, 1-bit LAMB and 0/1 Adam, which have such inside; for what has rounds
        itself; and if nothing communicates.

    Paper: arXiv 2606.30634 (2026); the correction is of whole updates, as lodestone-rock/RamTorch reads its algorithms
        1 and 2.
    Differs: the paper's text was not at hand; that decay and rate are part of the corrected update is that reading.
    """
    check_interval("correction", correction, "[0, 1]")
    if hasattr(tx, "warmup_update"):
        return _late(tx, float(correction))
    if not callable(tx):
        check_is_transform("tx", tx)
    if hasattr(tx, "late_correction"):
        raise ValueError(_TWICE)

    def make(*args: Any, **kwargs: Any) -> Transform:
        return cast(Transform, late(tx(*args, **kwargs), correction=correction))

    update_wrapper(make, tx)
    made: Any = make
    made.__signature__, made.late_correction = inspect.signature(tx), correction
    return made


_TWICE = expected("tx", "a transform that is in time", "one with fn.late inside", "leave out one of the two fn.late")


def _late(tx: Transform, correction: float) -> Transform:
    direction, then = _halves(tx)
    whole = chain(*direction.links, *then.links)
    facts, cut = facts_of(whole), len(direction.links)
    averaged = facts.averaged
    # A chain that averages in its warm-up only, and exactly, stays in it: else the ranks would never agree.
    coded = has_phase(whole, Phase.COMPRESSED) and {*averaged.warmup} <= {*averaged.compressed}
    phase = Phase.COMPRESSED if coded else Phase.WARMUP
    towards = update_in(direction, phase)
    # What rounding drops is of the update that is added, so the correction comes in front of it.
    end = len(whole.links) - (bool(then.links) and any(isinstance(rule, Rounding) for rule in _all_rules(then)))
    step = update_in(chain(*whole.links[cut:end]), phase)
    finish = update_in(chain(*whole.links[end:]), phase)
    rates = [rule.lr for rule in rules_in(step) if isinstance(rule, Rate)]

    exact = all(isinstance(rule, Average) and rule.codec is None for rule, _ in links_of(towards))
    kind = LateMeanState if exact else LateState

    def init(params: Tree) -> LateState:
        tree.check_real(params, "params")
        inner = whole.init(params)
        gradients = tree.map(lambda p: torch.zeros_like(p.detach()), params)
        arrived = tree.map(zeros_like_moment, params)
        last = tree.map(zeros_like_moment, params) if correction else ()
        device = device_of(params)
        left_out = torch.zeros((), dtype=torch.int64, device=device)
        there, missing, follows = [torch.zeros((), dtype=torch.bool, device=device) for _ in range(3)]
        return kind(inner, gradients, arrived, last, there, missing, follows, left_out)

    def warmup(updates: Tree, state: LateState, params: Tree, /) -> tuple[Tree, LateState]:
        check_state(state, LateState)
        moves, inner = whole.warmup_update(updates, state.inner, params)
        return moves, state._replace(inner=inner)

    def keep(updates: Tree, state: LateState, params: Tree, /) -> tuple[Tree, LateState]:
        updates, params = check_arguments(updates, state, params, LateState, "gradients")
        kept = tree.map(lambda g, old: g.to(old.dtype), updates, state.gradients)
        # -0.0 changes no param, not even one of -0.0. () -> the shape of p, without memory.
        still = tree.map(lambda p: p.new_full((), -0.0).expand_as(p), params)
        return still, state._replace(gradients=kept)

    def difference(number: int, state: LateState, params: Tree) -> tuple[Tree, LateState]:
        check_state(state, LateState)
        return params, state

    def mean(number: int, state: LateState, params: Tree) -> tuple[Tree, LateState]:
        """Make the ranks' direction of the gradients that were kept; of one that is not finite nothing stays."""
        before = state.inner[:cut]
        out, after = towards(state.gradients, before, params)
        ok = true_on_all(is_fine(out, after, before), facts.shards, device_of(out))
        after = select(ok, after, before)
        out = tree.map(lambda u, old: u.to(old.dtype), tree.in_order(out, state.arrived, "updates"), state.arrived)
        there = ok.to(state.there.device)
        return params, state._replace(inner=(*after, *state.inner[cut:]), arrived=out, there=there, missing=~there)

    def outer(number: int, state: LateState, params: Tree) -> tuple[Tree, LateState]:
        """Step along the direction that has arrived, with the params and the rate of now."""
        check_state(state, LateState)
        no = torch.zeros_like(state.there)
        is_there = is_true(state.there, wait=True)
        left_out = state.left_out if is_there else state.left_out + state.missing.to(state.left_out)
        left = state._replace(there=no, missing=no, left_out=left_out)
        if is_there is False:
            return params, left
        moves, rest = step(state.arrived, state.inner[cut:end], params)
        moves = last = tree.map(lambda u, old: u.to(old.dtype), moves, state.arrived)
        if correction:
            extra = apply(rules.plus, (moves, state.last), -1.0)  # u_t - u_{t-1}
            corrects = state.follows & _moves(rates).to(state.follows.device)
            # In a pass of its own: as a factor of `plus`, a number that lies on a device would be waited for.
            extra = apply(rules.scaled, (extra,), correction * corrects.to(torch.float32), wide=True)
            moves = apply(rules.plus, (moves, extra), 1.0, wide=True)
        moves, tail = finish(moves, state.inner[end:], params)
        new = apply_updates(params, moves)
        taken = left._replace(
            inner=(*state.inner[:cut], *rest, *tail), last=last if correction else (), follows=torch.ones_like(no)
        )
        if is_there:
            return new, taken
        result: tuple[Tree, LateState] = select(state.there, (new, taken), (params, left))
        return result

    exchange = Exchange(difference, mean, outer, check_schedule)
    keeps = LateLocal(towards, step, correction, keep)
    needs = frozenset({Phase.COMPRESSED, Phase.LOCAL}) if phase in whole.needs_warmup else frozenset[Phase]()
    rounds = getattr(averaged, phase.value)
    facts = facts._replace(averages=Averages(averaged.warmup, rounds, rounds))
    warm, at_once = LateWarmup(whole.warmup_update, warmup), exchange.after(keeps, Round(0, 0))
    made = Transform(init, warm, at_once, keeps, needs, exchange, facts)
    axis = facts.axes[0] if len(facts.axes) == 1 else facts.axes or None
    return agreed(skip_nonfinite(made), axis)


def _halves(tx: Transform) -> tuple[Transform, Transform]:
    """Return the chain of the links up to the last one that communicates, and that of those behind it."""
    if tx.exchange is not None:
        if any(isinstance(rule, LateLocal) for rule in rules_in(tx.local_update)):
            raise ValueError(_TWICE)
        cure = "a round with a delay travels behind local steps already: fn.every(h, delay=h - 1)"
        raise ValueError(expected("tx", "a transform that is taken in phases", "one with rounds", cure))
    links = _links(tx)
    sends = [bool(facts_of(link).axes or facts_of(link).shards) for link in links]
    if not any(sends):
        cure = "pass axis=...; what averages gradients in the backward pass, such as DDP or FSDP2, cannot be late"
        raise ValueError(expected("tx", "a link that communicates", "none", cure))
    cut = len(links) - sends[::-1].index(True)
    direction = chain(*links[:cut])
    now = dict.fromkeys(name_of(rule) for rule in _all_rules(direction) if getattr(rule, "now", False))
    if now:
        last = _name(links[cut - 1])
        wanted = f"no rate and no decay in front of or inside of its last link that communicates, {last}"
        cure = "put it behind that link, or the message would read a rate that a scheduler is writing; a method with "
        cure += "one inside cannot be late"
        raise ValueError(expected("tx", wanted, ", ".join(now), cure))
    return direction, chain(*links[cut:])


def _links(tx: Transform) -> tuple[Transform, ...]:
    """Return the links of a chain, chains and guards inside of it opened; anything else is its only link."""
    if not tx.links or not all(_is_chain_of(tx, phase) for phase in Phase if has_phase(tx, phase)):
        return (tx,)
    return tuple(x for link in tx.links for x in _links(link))


def _is_chain_of(tx: Transform, phase: Phase) -> bool:
    """Tell whether a phase applies the links, and somebody did not replace its update."""
    update = original(update_in(tx, phase))
    update = original(update.inner) if isinstance(update, Guarded) else update
    return isinstance(update, Chained) and [*map(id, update.inner)] == [id(update_in(link, phase)) for link in tx.links]


def _all_rules(tx: Transform) -> list[UpdateFn]:
    return [rule for phase in Phase if has_phase(tx, phase) for rule in rules_in(update_in(tx, phase))]


def _name(link: Transform) -> str:
    """Return the name of a link, by the first of its updates that does something."""
    updates = [original(update_in(link, phase)) for phase in Phase if has_phase(link, phase)]
    names = [name_of(update.inner if isinstance(update, Guarded) else update) for update in updates]
    return next((name for name in names if name != "unchanged"), names[0])


def _moves(rates: list[float | Tensor]) -> Tensor:
    """Return whether a rate is not 0, 0-d bool; True without any."""
    flag = torch.tensor(not rates, dtype=torch.bool, device="cpu")
    for lr in rates:
        flag = torch.logical_or(flag, lr if isinstance(lr, Tensor) else torch.full_like(flag, lr != 0))
    return flag


def check_schedule(schedule: Schedule) -> None:
    """Refuse a schedule of this library in which directions are in time, or later than a step, with a ValueError."""
    late_by_one = isinstance(schedule, Every) and (schedule.h, schedule.delay, schedule.fragments) == (1, 1, 1)
    if not late_by_one and (isinstance(schedule, Every) or schedule is always_warm_up or phases_of(schedule)):
        got = f"fn.every({schedule.h}, delay={schedule.delay})" if isinstance(schedule, Every) else _kind(schedule)
        raise ValueError(expected("schedule", "fn.every(1, delay=1, start=n)", got, "fn.late is a step late, not more"))


def _kind(schedule: Schedule) -> str:
    return getattr(schedule, "__name__", type(schedule).__name__)
