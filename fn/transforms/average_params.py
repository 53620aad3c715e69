"""Local steps without an anchor: `average_params` averages what the ranks hold, the params and the moments.

params p_r               each rank's own
  | local steps          rank r goes its own way; nothing is sent
  | p_r <- C(p_r)        all params or a share of them; m_r and v_r too, where a round says so
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import roles, tree
from fn.base import Exchange, Phase, Round, Transform, check_params, check_state, facts_of, has_phase
from fn.collectives.agreement import device_of
from fn.collectives.axis import current_binding
from fn.collectives.simulation import replicated_if_equal
from fn.errors import expected
from fn.facts import merged
from fn.roles import declare
from fn.schedules import Every, Schedule
from fn.transforms.outer import PlainWarmup, local_steps
from fn.transforms.outer_checks import averages_of_rounds, check_alike, check_inner, check_sync
from fn.transforms.skip_nonfinite import all_finite, select

Tree = Any

AVERAGED = tuple(
    tuple(kind for bit, kind in enumerate(("params", "first_moment", "second_moment")) if number >> bit & 1)
    for number in range(1, 8)
)
"""What the exchange with a number averages: 0 the params, 1 first moments, 2 both, 3 second moments, ..., 6 all."""


@declare(
    rank_local=("inner", "dropped"),
    local_params=True,
    dropped=("dropped",),
    left_out=("left_out",),
    watched=("fine",),
)
class AverageParamsState(NamedTuple):
    """State of `average_params`.

    inner: the state of the inner optimizer, each rank's own. sync: the states of the transform that averages: of the
    params, and of first and second moments where there are any. alone: local steps since the warm-up, 0-d int64.
    dropped: local steps that this rank left out because they were not finite, 0-d int64. left_out: averages that all
    ranks left out because they were not finite, 0-d int64. fine: 0, or NaN in a warm-up
    step that is not finite, 0-d.
    """

    inner: Tree
    sync: Tree
    alone: Tensor
    dropped: Tensor
    left_out: Tensor
    fine: Tensor


def average_params(inner: Transform, sync: Transform) -> Transform:
    """Take local steps, and average params, moments or both where a `Round` says so: without an anchor.

    `Round(n, n)` averages what the bits of n + 1 say: 1 the params, 2 the first moments, 4 the second moments of the
    inner optimizer. So `Round(0, 0)`, as `fn.every` has it, averages the params.

        >>> import torch, fn
        >>> sgd = fn.scale_by_learning_rate(0.5)
        >>> tx = fn.average_params(sgd, fn.compressed_average("data", fn.identity(), fn.off()))
        >>> def train(g):                                     # of each rank
        ...     p, state = torch.zeros(1), tx.init(torch.zeros(1))
        ...     for step in range(4):
        ...         updates, state = tx.update(fn.every(2)(step))(g, state, p)
        ...         p = fn.apply_updates(p, updates)
        ...     return p
        >>> fn.simulate(train, "data", 2)(torch.tensor([[1.0], [3.0]]))          # 4 steps of 0.5 times 2
        tensor([[-4.],
                [-4.]])

    The warm-up is the inner optimizer's, on gradients that a link in front averages. A rank leaves out a local step
    that is not finite alone, and counts it. An average that is not finite is left out by all, and counted. An average
    has no delay. Half precision is averaged in float32.

    Args:
        inner: the optimizer of the local steps, a chain that ends in a learning rate and does not communicate.
        sync: the transform whose compressed phase averages. One whose ranks get other numbers (`Facts.unequal`), as of
            an average of a share, leaves out by itself what is not finite: one rank could not tell.
    Returns: a transform with a warm-up, rounds, and as phases the local one and the average of the params.
    Raises: TypeError or ValueError that names the argument; from the update of a round, ValueError if the inner
        optimizer has no moments of the kind that is to be averaged.

    Paper: McMahan et al., Communication-efficient learning of deep networks from decentralized data (arXiv
        1602.05629): the average of params; Iacob et al., DES-LoC (arXiv 2505.22549): that of moments.
    """
    check_inner(inner)
    check_sync(sync)
    inner_update = inner.local_update if has_phase(inner, Phase.LOCAL) else inner.warmup_update
    unequal = facts_of(sync).unequal

    def init(params: Tree) -> AverageParamsState:
        tree.check_real(params, "params")
        inner_state = inner.init(params)
        device = device_of(params)
        alone, dropped, left_out = [torch.zeros((), dtype=torch.int64, device=device) for _ in range(3)]
        kinds = params, *(roles.find(inner_state, kind) for kind in ("first_moment", "second_moment"))
        # A state for each kind: errors of params must not enter the next mean of moments.
        syncs = tuple(sync.init(_wide(kind)) if tree.leaves(kind) else () for kind in kinds)
        fine = torch.zeros((), dtype=torch.float32, device=device)
        return AverageParamsState(inner_state, syncs, alone, dropped, left_out, fine)

    def warmup(updates: Tree, state: AverageParamsState, params: Tree, /) -> tuple[Tree, AverageParamsState]:
        check_state(state, AverageParamsState)
        check_params(params)
        check_alike(state.alone)
        moves, inner_state = inner.warmup_update(updates, state.inner, params)
        ok = all_finite(tree.leaves(moves))
        # a guard around it looks at `fine` only, since the rest differs between ranks in rounds
        fine = torch.where(ok.to(state.fine.device), state.fine, torch.nan)
        axes = tuple(current_binding().axes)  # of averaged gradients all ranks make the same, which vmap cannot know
        fine = replicated_if_equal(fine, axes) if axes else fine
        return moves, state._replace(inner=inner_state, fine=fine)

    def checked(updates: Tree, state: AverageParamsState, params: Tree) -> tuple[Tree, Tree]:
        check_state(state, AverageParamsState)
        check_params(params)
        return updates, params

    def averaged(number: int, params: Tree, state: AverageParamsState) -> tuple[Tree, AverageParamsState]:
        # Refused before anything is sent.
        if number >= len(AVERAGED):
            raise ValueError(expected("phase.begin", f"a number below {len(AVERAGED)}", f"{number}"))
        inner_state, syncs, left_out = state.inner, [*state.sync], state.left_out
        for kind in AVERAGED[number]:
            place = ("params", "first_moment", "second_moment").index(kind)
            before = params if kind == "params" else roles.find(inner_state, kind)
            if kind != "params" and not before and tree.leaves(params):
                wanted = f"one whose average has what the inner optimizer has, which has no {kind.replace('_', ' ')}"
                raise ValueError(expected("phase", wanted, f"Round({number}, {number})"))
            if not tree.leaves(before):
                continue
            wide = _wide(before)
            after, of_sync = sync.compressed_update(wide, syncs[place], wide)
            # One mean on all ranks is finite on all of them or on none. Of unequal means a rank sees its own only, and
            # would leave out what the others keep.
            if not unequal:
                ok = all_finite(tree.leaves(after))
                # The errors, too: with a NaN in them every later mean would be NaN.
                after, of_sync = select(ok, after, wide), select(ok, of_sync, syncs[place])
                left_out = left_out + (~ok).to(left_out)
            after, syncs[place] = tree.map(lambda new, old: new.to(old.dtype), after, before), of_sync
            if kind == "params":
                params = after
            else:
                # `find` and `replace` walk a state in one order, so each mean returns to where its moment was.
                inner_state = roles.replace(inner_state, kind, partial(_next, iter(after)))
        return params, state._replace(inner=inner_state, sync=tuple(syncs), left_out=left_out)

    def begin(number: int, state: AverageParamsState, params: Tree) -> tuple[Tree, AverageParamsState]:
        check_state(state, AverageParamsState)
        return params, state

    def mean(number: int, state: AverageParamsState, params: Tree) -> tuple[Tree, AverageParamsState]:
        check_state(state, AverageParamsState)
        return averaged(number, params, state)

    exchange = Exchange(begin, mean, begin, _check_at_once)

    alone = local_steps(inner_update, checked, facts_of(inner).shards, (), {"sync": sync})
    needs = frozenset({Phase.COMPRESSED, Phase.LOCAL}) if Phase.LOCAL in inner.needs_warmup else frozenset[Phase]()
    facts = merged(facts_of(inner), facts_of(sync))
    facts = facts._replace(averages=averages_of_rounds(inner, Phase.LOCAL, sync))
    together = PlainWarmup(inner.warmup_update, warmup)
    return Transform(init, together, exchange.after(alone, Round(0, 0)), alone, needs, exchange, facts)


def _wide(values: Tree) -> Tree:
    """Return tensors of half precision in float32, and others as they are."""
    return tree.map(lambda x: x.to(torch.promote_types(x.dtype, torch.float32)), values)


def _next(values: Iterator[Tree], old: Tree) -> Tree:
    return next(values)


def _check_at_once(schedule: Schedule) -> None:
    if isinstance(schedule, Every) and schedule.delay:
        wanted = "an average that begins and ends in one step, for it moves the params themselves"
        raise ValueError(expected("schedule", wanted, f"delay={schedule.delay}", "leave out delay= of fn.every"))
