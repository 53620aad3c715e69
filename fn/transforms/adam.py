"""Adam's moments, and 1-bit Adam's: the second moment frozen, the first averaged in codes (quantized values).

Moments are float32 for half-precision updates, and in the updates' dtype otherwise. They are stored bias-corrected: the
k-th gradient counts (1 - b) / (1 - b^k) in a moment, which is all of it at first and 1 - b in the end. So nothing is
divided where a moment is used, and one that is frozen early is right as it stands. `share` is the one place of this.

`Adam` and `OnebitAdam` are rules, see `fn.base.UpdateFn`: by their types `fn.inplace` finds kernels for a step. What
calling them computes is the specification.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.arguments import check_flag, check_interval, check_is_transform, check_number
from fn.base import Phase, Transform, UpdateFn, check_state, declare_rule, facts_of, lift, links_of, missing
from fn.collectives.agreement import device_of
from fn.errors import expected
from fn.kernels import reference, rules
from fn.kernels.flags import Answers
from fn.kernels.lists import peaks
from fn.kernels.tracing import is_concrete
from fn.roles import declare
from fn.transforms.leafwise import apply
from fn.transforms.skip_nonfinite import nan_unless_finite

Tree = Any


@declare_rule(name="scale_by_adam", tensorwise=True)
class Adam(NamedTuple):
    """The rule of `scale_by_adam`, and of a warm-up step of `scale_by_onebit_adam`.

    corrected: whether moments are stored bias-corrected. awaits: as `await_gradient` of `scale_by_adam`.
    """

    b1: float
    b2: float
    eps: float
    corrected: bool = True
    awaits: bool = False

    def __call__(self, updates: Tree, state: Moments, params: Tree, /) -> tuple[Tree, Moments]:
        """Return Adam's directions, and the next state."""
        check_state(state, OnebitAdamState if isinstance(state, OnebitAdamState) else AdamState)
        tree.check_updates(updates, state.mu)
        state = started(state) if self.awaits else state
        ages = older(state.ages, self.corrected)
        of_mu, of_nu = by_tensor(ages, state.rested)
        mu = moving_average(state.mu, updates, self.b1, of_mu)
        nu = moving_average_of_squares(state.nu, updates, self.b2, of_nu)
        after = state._replace(step=state.step + 1, mu=mu, nu=nu, ages=ages)
        return adam_direction(mu, nu, self.eps), after


class OnebitAdam(NamedTuple):
    """The rule of a compressed step of `scale_by_onebit_adam`.

    keep_zeros: whether the momentum stays zero where nu is; False is DeepSpeed's. average: the update that averages the
    momentum. max_step: infinity for no clamp. Others: as for `Adam`.
    """

    b1: float
    eps: float
    corrected: bool
    keep_zeros: bool
    average: UpdateFn
    max_step: float
    run: UpdateFn

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the update and the next state."""
        return self.run(updates, state, params)


@declare(first_moment=("mu",), second_moment=("nu",), ages=("ages",), rested=("rested",))
class AdamState(NamedTuple):
    """step: updates that this link made, 0-d int64. mu, nu: moments, like the params.

    ages: how many updates mu and nu have had, 0-d int64 each; () without bias correction.
    rested: how many of these a tensor sat out, a tree like the params of 0-d int64; () where no tensor did, and without
        bias correction.
    """

    step: Tensor
    mu: Tree
    nu: Tree
    ages: tuple[Tensor, ...]
    rested: Tree = ()


@declare(first_moment=("mu",), second_moment=("nu",), ages=("ages",), rested=("rested",))
class OnebitAdamState(NamedTuple):
    """As `AdamState`; nu and its age stay as they are after the warm-up. sync: the state of `sync`."""

    step: Tensor
    mu: Tree
    nu: Tree
    ages: tuple[Tensor, ...]
    sync: Tree
    rested: Tree = ()


Moments = AdamState | OnebitAdamState
Ages = Tensor | list[Tensor] | None
"""Of moments: of all tensors, of each, or of their elements; see `by_tensor`."""


def scale_by_adam(b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, *, await_gradient: bool = False) -> Transform:
    """Divide the averaged gradient by the root of the averaged square.

        mu <- mu + (1 - b1) / (1 - b1^t) (g - mu)        nu <- nu + (1 - b2) / (1 - b2^t) (g^2 - nu)
        u = mu / (sqrt(nu) + eps)

        >>> import torch, fn
        >>> tx = fn.scale_by_adam(b1=0.5, b2=0.5)
        >>> params, state = torch.tensor([1.0, 2.0]), tx.init(torch.tensor([1.0, 2.0]))
        >>> for g in ([1.0, -1.0], [2.0, 4.0]):
        ...     u, state = tx.update(fn.Phase.WARMUP)(torch.tensor(g), state, params)
        >>> u
        tensor([0.9623, 0.7035])

    Args:
        b1, b2, eps: as in the paper.
        await_gradient: let t begin, for each tensor, with the first update that is not zero throughout. Take it behind
            an average over ranks, where a tensor without a gradient has one of zero. It is for whole tensors: of pieces
            each would have an age of its own.
    Raises: ValueError if b1 or b2 is outside [0, 1), or eps is negative or not finite.

    Paper: Kingma and Ba, Adam (arXiv 1412.6980), algorithm 1.
    """
    check_betas(b1, b2, eps)
    check_flag("await_gradient", await_gradient)

    def init(params: Tree) -> AdamState:
        step, mu, nu = start_moments(params)
        return AdamState(step, mu, nu, start_ages(step, True), start_rested(mu, True))

    return lift(init, Adam(b1, b2, eps, awaits=await_gradient), elementwise=True)


def scale_by_onebit_adam(
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    *,
    sync: Transform,
    bias_correction: bool = False,
    max_step: float | None = None,
) -> Transform:
    """Run Adam in the warm-up; then freeze the second moment and average the momentum in codes.

        warm-up:     mu <- b1 mu + (1 - b1) g          nu <- b2 nu + (1 - b2) g^2
        compressed:  mu <- C(b1 mu + (1 - b1) g_r)     nu stays
        u = mu / (sqrt(nu) + eps)

    In the warm-up g is the averaged gradient. In the compressed phase g_r is each rank's own, and C is the average in
    codes, `sync`: what all ranks receive is the new momentum. It stays zero where nu is zero, where no gradient ever
    came: one bit cannot say zero, so such an element would drift by +-scale / eps in each step.

        >>> import torch, fn
        >>> link = fn.scale_by_onebit_adam(b1=0.5, b2=0.5, sync=fn.compressed_average("data", fn.sign()))
        >>> tx = fn.chain(fn.average("data"), link)
        >>> def three_steps(g):                          # a rank's gradient, the same in each step
        ...     state = tx.init(g)
        ...     for phase in (fn.Phase.WARMUP, fn.Phase.COMPRESSED, fn.Phase.COMPRESSED):
        ...         u, state = tx.update(phase)(g, state, g)
        ...     return u
        >>> fn.simulate(three_steps, "data", 2)(torch.tensor([[1.0, 4.0], [2.0, -2.0]]))
        tensor([[ 1.4115, -2.1172],
                [ 1.4115, -2.1172]])

    Args:
        b1, b2, eps: as for Adam.
        sync: the transform that averages the momentum, such as `compressed_average(axis, sign())`.
        bias_correction: let the k-th update of mu count (1 - b1) / (1 - b1^k) in place of 1 - b1, and of nu alike, as
            `scale_by_adam` does. False is the paper's form, in which a nu that is frozen before b2 has filled it makes
            all later steps too large: by 3 after 100 steps with b2 = 0.999. Where `sync` communicates, k begins for
            each tensor with the first update that is not zero throughout, as with `await_gradient` there.
        max_step: clamp each element of u to +-max_step in the compressed phase; None for no clamp. Adam's own u stays
            near 1. A sign code moves an element by the scale of its tensor or block: if its second moment froze near
            zero, hundreds of times as far. A step whose m is not finite is skipped, not clamped. The momentum and the
            residual errors are not changed.
    Raises: ValueError if b1 or b2 is outside [0, 1), eps is negative or not finite, or max_step is not above zero.

    Paper: Tang et al., 1-bit Adam (arXiv 2102.02888), algorithm 1.
    Differs: `bias_correction` is not in the paper, and a momentum without a second moment is not kept at zero there;
        DeepSpeed needs a hand-written mask. The step of the compressed phase is clamped to `max_step`.
    """
    check_is_transform("sync", sync)
    check_betas(b1, b2, eps)
    check_flag("bias_correction", bias_correction)
    limit = limit_of(max_step)
    # Behind an average a tensor without a gradient has one of zero; where `sync` sends nothing, this sees pieces.
    awaits = bias_correction and bool(facts_of(sync).axes)

    def init(params: Tree) -> OnebitAdamState:
        step, mu, nu = start_moments(params)
        ages, rested = start_ages(step, bias_correction), start_rested(mu, bias_correction)
        return OnebitAdamState(step, mu, nu, ages, sync.init(mu), rested)

    def next_momentum(
        updates: Tree, state: OnebitAdamState, params: Tree, average: UpdateFn, *, frozen: bool
    ) -> OnebitAdamState:
        """Return the state with the next momentum, averaged over the ranks by `average`, and the next ages."""
        check_state(state, OnebitAdamState)
        tree.check_updates(updates, state.nu)
        params = params if params is None else tree.in_order(params, state.nu, "params")
        ages = older(state.ages, bias_correction, frozen=frozen)
        of_mu, _ = by_tensor(ages, state.rested)
        mu, sync_state = average(moving_average(state.mu, updates, b1, of_mu), state.sync, params)
        return state._replace(step=state.step + 1, mu=mu, ages=ages, sync=sync_state)

    def warmup(updates: Tree, state: OnebitAdamState, params: Tree, /) -> tuple[Tree, OnebitAdamState]:
        state = next_momentum(updates, started(state) if awaits else state, params, sync.warmup_update, frozen=False)
        _, of_nu = by_tensor(state.ages, state.rested)
        state = state._replace(nu=moving_average_of_squares(state.nu, updates, b2, of_nu))
        return adam_direction(state.mu, state.nu, eps), state

    def compressed(updates: Tree, state: OnebitAdamState, params: Tree, /) -> tuple[Tree, OnebitAdamState]:
        state = next_momentum(updates, state, params, sync.compressed_update, frozen=True)
        mu = keep_unseen_at_zero(state.mu, state.nu)
        out = adam_direction(mu, state.nu, eps, limit)
        # A clamp would make a finite step of an infinite momentum, and no guard would skip it.
        return (nan_unless_finite(out, mu) if limit < math.inf else out), state._replace(mu=mu)

    frozen_step = OnebitAdam(b1, eps, bias_correction, True, sync.compressed_update, limit, compressed)
    # a sync that also communicates in the warm-up has no kernels: the rule Adam knows of no average
    exact = warmup if links_of(sync.warmup_update) else Adam(b1, b2, eps, bias_correction, awaits)
    local, frozen = missing(Phase.LOCAL, "1-bit Adam"), frozenset({Phase.COMPRESSED})  # where nu is frozen
    return Transform(init, exact, frozen_step, local, needs_warmup=frozen, facts=facts_of(sync))


def check_betas(b1: float, b2: float, eps: float) -> None:
    """Refuse decay rates outside [0, 1) and an eps that is negative or not finite with a ValueError."""
    check_interval("b1", b1, "[0, 1)")
    check_interval("b2", b2, "[0, 1)")
    check_number("eps", eps)
    if not 0.0 <= eps < math.inf:
        raise ValueError(expected("eps", "a finite number of at least 0", f"{eps}"))


def limit_of(max_step: float | None) -> float:
    """Return `max_step` as a float, infinity for None; refuse what is not above zero with a ValueError."""
    if max_step is None:
        return math.inf
    check_number("max_step", max_step)
    # Asked like this, NaN is refused, too.
    if not max_step > 0.0:
        raise ValueError(expected("max_step", "a number above 0, or None for no clamp", f"{max_step}"))
    return float(max_step)


def start_moments(params: Tree) -> tuple[Tensor, Tree, Tree]:
    """Return step, mu and nu before the first update."""
    mu, nu = zero_moments(params), zero_moments(params)
    return torch.zeros((), dtype=torch.int64, device=device_of(params)), mu, nu


def start_ages(step: Tensor, corrected: bool) -> tuple[Tensor, ...]:
    """Return the ages of mu and nu before the first update; () without bias correction."""
    return (torch.zeros_like(step), torch.zeros_like(step)) if corrected else ()


def start_rested(mu: Tree, corrected: bool) -> Tree:
    """Return that no tensor sat out an update; () without bias correction."""
    return tree.map(lambda m: m.new_zeros((), dtype=torch.int64), mu) if corrected else ()


_begun, _never_rested = Answers(), Answers()


def started(state: Any) -> Any:
    """Return the state before an update, in which tensors that never had a gradient have sat out all before it.

    Such a tensor has a second moment of zero throughout. Only tensors that had none before the latest update are asked.
    """
    leaves, nus = tree.leaves(state.rested), tree.leaves(state.nu)
    places = [i for i, v in enumerate(nus) if v.numel()] if leaves else []  # others are elsewhere, on their owner say
    if not places:
        return state
    age, counts = state.ages[-1], [leaves[i] for i in places]
    if any(x.ndim for x in counts):  # of elements, see `by_tensor`
        waits = {i: ~nus[i].any() & (leaves[i] == age - 1) for i in places}
        new = {i: torch.where(waits[i], age, leaves[i]) for i in places}
    elif are_on_host(age, *counts, *nus):
        latest = int(age) - 1
        late = [i for i in places if int(leaves[i]) == latest and not nus[i].any()] if latest >= 0 else []
        new = {i: torch.full_like(age, latest + 1) for i in late}
    elif _begun.known(counts[0]):
        return state
    else:  # nobody waits for a device: it chooses, and tells later whether it has to go on choosing
        sizes = peaks([nus[i] for i in places])
        wide = torch.float64 if len({x.dtype for x in sizes}) > 1 else sizes[0].dtype
        without = torch.stack([x.to(wide) for x in sizes]) == 0  # (S,)
        before = torch.stack(counts)  # (S,)
        chosen = torch.where(without & (before == age - 1), age, before)
        _begun.ask(counts[0], lambda: ~without.any())
        new = dict(zip(places, chosen.unbind(), strict=True))
    if not new:
        return state
    rested = [new.get(i, x) for i, x in enumerate(leaves)]
    return state._replace(rested=tree.unflatten(tree.flatten(state.rested)[1], rested))


def by_tensor(ages: tuple[Tensor, ...], rested: Tree) -> tuple[Ages, Ages]:
    """Return the ages of mu and nu of each tensor, (S,), or 0-d where all tensors have the same; None without ages.

    Where a count is that of the elements of a vector, as `sharded` hands them down, a list, with an age for each tensor
    or each of its elements.
    """
    if not ages:
        return None, None
    leaves = tree.leaves(rested)
    count = common(leaves)
    if count is not None:
        return (ages[0] - count, ages[1] - count) if count else (ages[0], ages[1])
    if any(x.ndim for x in leaves):
        return [ages[0] - x for x in leaves], [ages[1] - x for x in leaves]
    counts = torch.stack(leaves)  # (S,)
    return ages[0] - counts, ages[1] - counts


def common(counts: Sequence[Tensor]) -> int | None:
    """Return the number that all counts are, 0 of none, if the host knows it without a wait for a device; else None."""
    if not counts:
        return 0
    if any(x.ndim for x in counts):
        return None
    if are_on_host(*counts):
        found = {int(x) for x in counts}
        return found.pop() if len(found) == 1 else None
    if _never_rested.known(counts[0]):
        return 0
    _never_rested.ask(counts[0], lambda: ~torch.stack([*counts]).any())
    return None


def are_on_host(*tensors: Tensor) -> bool:
    """Return whether the host reads all these without a wait for a device."""
    return all(x.device.type == "cpu" for x in tensors) and is_concrete(*tensors)


FILLED = 1 << 31
"""The age of a moment that was set, not gathered: of its next value it takes 1 - b."""


def older(ages: tuple[Tensor, ...], corrected: bool, *, frozen: bool = False) -> tuple[Tensor, ...]:
    """Return the ages after an update. frozen: of mu alone. Raises: ValueError for a state in the other form."""
    check_ages(ages, corrected)
    return tuple(age if frozen and i else age + 1 for i, age in enumerate(ages))


def check_ages(ages: tuple[Tensor, ...], corrected: bool) -> None:
    """Refuse a state whose moments are bias-corrected where those here are not, or the other way round."""
    if (len(ages) > 0) != corrected:  # torch 2.11 compiles no bool of a tuple
        forms = ("as the papers have them", "bias-corrected, with their ages")
        cure = "make the optimizer as it was when the state was saved, or start anew"
        raise ValueError(expected("state", f"moments {forms[corrected]}", f"some {forms[not corrected]}", cure))


def share(b: float, age: Any) -> Any:
    """Return (1 - b) / (1 - b^age): what the latest of so many values counts in a bias-corrected average.

    Args: age: a number, or a tensor, which the host need not read; the result is then one of float64.
    """
    if not isinstance(age, Tensor):
        return (1 - b) / (1 - b**age)
    # Not 1 - b**age: where a device knows float32 only, that leaves four digits of 1 - 0.999.
    wide = torch.float32 if age.device.type == "mps" else torch.float64
    return (b - 1) / torch.expm1(age.to(wide) * (math.log(b) if b else -math.inf))


def zero_moments(params: Tree) -> Tree:
    """Return zeros like the params, in the dtype that moments of them have. Raises: TypeError as `tree.check_real`."""
    tree.check_real(params, "params")
    return tree.map(zeros_like_moment, params)


def zeros_like_moment(p: Tensor) -> Tensor:
    """Return zeros in the dtype that moments of p have: float32 for half precision, else p's own."""
    # In bfloat16 a second moment would stand still: a step of a thousandth of its size is less than half a unit in its
    # last place.
    dtype = torch.float32 if p.dtype in (torch.float16, torch.bfloat16) else p.dtype
    return torch.zeros(p.shape, dtype=dtype, device=p.device)


def keep_unseen_at_zero(x: Tree, nu: Tree) -> Tree:
    """Return x, but zero where nu is zero. Where it is not finite there, it is NaN, so that the step is skipped."""
    return apply(rules.kept_unseen, (x, nu), 0.0)


def moving_average(average: Tree, new: Tree, decay: float, age: Ages = None) -> Tree:
    """Return decay * average + (1 - decay) * new, leaf by leaf, in the dtype of the average.

    Args: age: how many values the average has, with the new one; it is then bias-corrected. (S,): of each leaf; a list:
        of each leaf or its elements. None: it is not.
    """
    if isinstance(age, list):
        structure = tree.flatten(average)[1]
        weights = tree.unflatten(structure, [1 - share(decay, x) for x in age])
        return apply(rules.lerp, (new, average, weights), like=1)
    return apply(rules.lerp, (new, average), decay if age is None else 1 - share(decay, age), like=1)


def moving_average_of_squares(average: Tree, new: Tree, decay: float, age: Ages = None) -> Tree:
    """Return decay * average + (1 - decay) * new^2, leaf by leaf, in the dtype of the average. age: as above."""
    if isinstance(age, list):
        structure, shares = tree.flatten(average)[1], [share(decay, x) for x in age]
        weights = (tree.unflatten(structure, part) for part in ([1 - x for x in shares], shares))
        return apply(rules.second_moment, (average, new, *weights))
    latest = 1 - decay if age is None else share(decay, age)
    return apply(rules.second_moment, (average, new), decay if age is None else 1 - latest, latest)


def widest(moments: Tree) -> torch.dtype:
    """Return float64 if a moment is of that dtype, else float32: the dtype of numbers that moments meet."""
    return torch.float64 if any(m.dtype == torch.float64 for m in tree.leaves(moments)) else torch.float32


def adam_direction(mu: Tree, nu: Tree, eps: float, max_step: float = math.inf) -> Tree:
    """Return mu / (sqrt(nu) + eps), clamped to +-max_step; 0 for 0 / 0."""
    # With an eps of 0, or one that rounds to it, sqrt(nu) + eps may be zero, and the kernels have no case for 0 / 0.
    if not all(reference.steps.is_normal(eps, dtype) for dtype in {v.dtype for v in tree.leaves(nu)}):

        def divide(m: Tensor, v: Tensor) -> Tensor:
            return reference.steps.clamped(reference.steps.over_root(m, v, eps), max_step)

        return tree.map(divide, mu, nu)
    u = apply(rules.direction, (mu, nu), eps)
    return u if max_step == math.inf else apply(rules.clamped, (u,), max_step)
