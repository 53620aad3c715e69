"""Find how a chain can take its step in place, by its links.

Only the link that keeps the moments decides which kernels there are. What stands in front of it runs as it is, purely,
and its new states are kept aside until the step is written: averages of any kind, clipping, a link of the user's own.
Behind it any number of weight decays may stand, then any number of learning rates.

    average, clip, ...        scale_by_onebit_adam        decay, decay, rate
    run purely                one kernel from codes, moments and params to moments and params

Where the last link is `fn.outer`, its inner optimizer's links stand in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fn import roles, tree
from fn.base import Guarded, Link, Phase, Step, Transform, UpdateFn, has_phase, links_of, name_of
from fn.collectives.agreement import device_of, true_on_all
from fn.compiling import original
from fn.inplace import adam, lamb, sharded, zero_one_adam
from fn.inplace.links import Head, MatchedChain, descent_of
from fn.inplace.protocol import PARAM_DTYPES, InPlace, Staged, on_host
from fn.transforms.adam import Adam, OnebitAdam
from fn.transforms.lamb import LambHyper, OnebitLamb
from fn.transforms.outer import OuterLocal, OuterState, OuterWarmup, PlainWarmup
from fn.transforms.round_arguments import narrows
from fn.transforms.sharded import Sharded
from fn.transforms.skip_nonfinite import skip_nonfinite
from fn.transforms.zero_one_adam import LocalStep, SynchronisingStep, VarianceStep

Tree = Any

STAGES: dict[type, tuple[Callable[..., InPlace | str], bool]] = {
    Adam: (adam.warmup, True),
    OnebitAdam: (adam.compressed, True),
    LambHyper: (lamb.warmup, True),
    OnebitLamb: (lamb.compressed, True),
    VarianceStep: (zero_one_adam.variance, True),
    SynchronisingStep: (zero_one_adam.synchronise, True),
    LocalStep: (zero_one_adam.local, False),
    Sharded: (sharded.stage_shards, True),
}
"""By the rule's type of the link that keeps the moments: how its step is staged, and whether a guard looks at it."""


def in_place(update: UpdateFn) -> InPlace | str:
    """Return how an update is staged, or the reason why it cannot be: a phrase that names the link in the way.

    Args: update: of a transform that `skip_nonfinite` made, in one phase.
    """
    update = original(update)
    if not isinstance(update, Guarded):
        return "it is not guarded by fn.skip_nonfinite"
    links = links_of(update.inner, (0,))  # 0: `inner` of the guard's state
    last = links[-1].update if links else None
    if isinstance(last, Step) and isinstance(last.rule, OuterWarmup | PlainWarmup | OuterLocal):
        if update.looks == isinstance(last.rule, OuterLocal):
            return _refused_for_guard(update, last)
        inner = links_of(last.rule.inner, (*links[-1].path, 0))  # 0: `inner` of their states
        staged = _match(update, [*links[:-1], *inner], True)
        staged = staged if isinstance(staged, str) else _around(last.rule, links[-1], staged)
    else:
        staged = _match(update, links, update.looks)
    return staged if isinstance(staged, str) else staged._replace(stage=refusing(update, staged.stage))


def refusing(update: UpdateFn, run: Callable[[Tree, Tree, Tree], Any]) -> Callable[[Tree, Tree, Tree], Any]:
    """Let the steps of an update that are taken in place refuse the states that its links refuse.

    They say so in `Step.check`. Nothing is communicated before.
    """
    steps = [(link, link.update) for link in _links_in(update) if isinstance(link.update, Step)]
    checks = [(link, step.check) for link, step in steps if step.check is not None]

    def checked(updates: Tree, state: Tree, params: Tree) -> Any:
        for link, check in checks:
            check(link.state(state), on_host)
        return run(updates, state, params)

    return checked if checks else run


def _links_in(update: UpdateFn, path: tuple[int, ...] = ()) -> list[Link]:
    """Return the links of an update, those inside of guards, too."""
    update = original(update)
    if isinstance(update, Guarded):
        return _links_in(update.inner, (*path, 0))  # 0: `inner` of the guard's state
    links = links_of(update, path)
    inside = [link for link in links if isinstance(original(link.update), Guarded)]
    return [link for link in links if link not in inside] + [x for link in inside for x in _links_in(*link)]


def _match(update: Guarded, links: list[Link], looks: bool) -> InPlace | str:
    for i, link in enumerate(links):
        rule = link.update.rule if isinstance(link.update, Step) else None
        if type(rule) not in STAGES:
            continue
        stage, is_looked_at = STAGES[type(rule)]
        if looks != is_looked_at:
            return _refused_for_guard(update, link.update)
        descent = descent_of(links[i + 1 :])
        if isinstance(descent, Link):
            got = name_of(descent.update)
            return f"expected weight decays, then rates, behind {name_of(link.update)}, but got {got}"
        chain = MatchedChain(update, link, Head(links[:i]), descent)
        return without_guards(chain.head, stage(rule, chain))
    return f"none of its links has kernels: {', '.join(name_of(link.update) for link in links) or 'it has none'}"


def _refused_for_guard(guard: Guarded, update: UpdateFn) -> str:
    verb = "looks" if guard.looks else "does not look"
    return f"in this phase its guard {verb} at what {name_of(update)} returns"


def without_guards(head: Head, staged: InPlace | str) -> InPlace | str:
    """Refuse a guard among the links in front: what it skips on one rank, only the pure step makes others see."""
    if isinstance(staged, str) or not head.links:
        return staged
    for link in head.links:
        if isinstance(link.update, Guarded):
            return f"{name_of(link.update)} stands in front of the moments inside of another guard"

    def stage(updates: Tree, state: Tree, params: Tree) -> Staged | None:
        hidden = any(roles.find(link.state(state), "skips") for link in head.links)  # in a link of the user's own
        return None if hidden else staged.stage(updates, state, params)

    return staged._replace(stage=stage)


def _around(rule: OuterWarmup | PlainWarmup | OuterLocal, link: Link, inner: InPlace) -> InPlace:
    """Return how a step of `outer` is staged, or of `average_params`.

    Args: inner: how that of its inner optimizer is, in the state of the whole.
    """
    if isinstance(rule, PlainWarmup):
        return inner
    is_warmup = isinstance(rule, OuterWarmup)

    def stage(updates: Tree, state: Tree, params: Tree) -> Staged | None:
        is_narrow = is_warmup and _anchor_is_narrower(link.state(state), params)
        step = None if is_narrow else inner.stage(updates, state, params)
        if step is None:
            return None
        if isinstance(rule, OuterLocal) and rule.inside:  # as the pure step does, which others of the island may take
            own = step.ok if isinstance(step.ok, Tensor) else torch.tensor(step.ok, dtype=torch.bool, device="cpu")
            step = step._replace(ok=true_on_all(own, rule.inside, device_of(params)))
        return (_with_anchor if is_warmup else _alone)(step, link.state(state), params)

    return inner._replace(stage=stage)


def _anchor_is_narrower(state: OuterState, params: Tree) -> bool:
    """Return whether the anchor may overflow where the params do not, which only the pure step sees."""
    pairs = zip(tree.leaves(state.anchor), tree.leaves(params), strict=True)
    return any(narrows(anchor.dtype, p.dtype) for anchor, p in pairs)


def _with_anchor(step: Staged, state: OuterState, params: Tree) -> Staged:
    """Let the anchor follow the params."""

    def commit() -> None:
        step.commit()
        torch._foreach_copy_(tree.leaves(state.anchor), [p.detach() for p in tree.leaves(params)])

    return step._replace(commit=commit)


def _alone(step: Staged, state: OuterState, params: Tree) -> Staged:
    """Leave out what is not finite, on this rank alone, and count it: no message tells the others."""

    def commit() -> None:
        state.alone.add_(1)
        step.commit()

    def drop() -> None:
        state.alone.add_(1)
        if step.otherwise is None:
            state.dropped.add_(1)
        else:
            step.otherwise()

    return step._replace(commit=commit, otherwise=drop)


CURE = (
    "such a step is correct, and reads and writes every tensor once per link; it is as fast as a named optimizer where "
    "links in front of the moments, then moments, weight decays and learning rates follow each other"
)


def explain(transform: Transform) -> str:
    """Return a line per phase: whether `fn.Optimizer` takes its step in place, and if not, which link is in the way.

    Args: transform: a chain, or what a named optimizer returns. The kernels of the device, dtypes and layouts of the
        tensors are looked at when the step is taken.

    >>> import fn
    >>> print(explain(fn.onebit_adam(1e-3, axis="data")))
    warmup      in place
    compressed  in place
    """
    guarded = any(isinstance(update, Guarded) for update in transform[1:])
    transform = transform if guarded else skip_nonfinite(transform)  # as `fn.Optimizer` does
    lines = []
    for phase in (phase for phase in Phase if has_phase(transform, phase)):
        if transform.exchange is not None and phase is Phase.COMPRESSED:
            lines.append(f"{phase.value:10}  as the local step; then the exchange, which is rare, tensor by tensor")
            continue
        staged = in_place(transform.composed(phase))
        lines.append(f"{phase.value:10}  {f'link by link: {staged}' if isinstance(staged, str) else 'in place'}")
    if any("link by link" in line for line in lines):
        lines.append(CURE)
    return "\n".join(lines)


def slow_tensors(params: Sequence[Tensor], grads: Sequence[Tensor]) -> str:
    """Return what about the tensors of a param group keeps its steps from kernels, and what would help; "" if nothing.

    Args: params, grads: as many.
    """
    devices, dtypes = {str(p.device) for p in params}, {p.dtype for p in params}
    if len(devices) > 1:
        return f"params are on the devices {sorted(devices)}; give each device a param group of its own"
    if len(dtypes) > 1 or not dtypes <= {*PARAM_DTYPES}:
        wanted = f"expected params in one of {', '.join(map(str, PARAM_DTYPES))}"
        return f"{wanted}, but got {', '.join(sorted(map(str, dtypes)))}; give each dtype a param group of its own"
    for name, tensors in (("param", params), ("gradient of param", grads)):
        for i, x in enumerate(tensors):
            if not x.is_contiguous():
                got = f"{name} {i} has the shape {tuple(x.shape)} and the strides {x.stride()}"
                return f"{got}; make it contiguous, which channels_last is not"
    return ""
