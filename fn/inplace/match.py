"""Find how a chain can take its step in place, by its links.

Only the link that keeps the moments decides which kernels there are. What stands in front of it runs as it is, purely,
and its new states are kept aside until the step is written: averages of any kind, clipping, a link of the user's own.
Behind it any number of weight decays may stand, then any number of learning rates.

    average, clip, ...        scale_by_onebit_adam        decay, decay, rate
    run purely                one kernel from codes, moments and params to moments and params

Which kernels a rule has is a row of a table, which the method's own module fills: `register`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fn import roles
from fn.base import Guarded, Link, Phase, Transform, UpdateFn, has_phase, links_of, name_of
from fn.compiling import original
from fn.errors import expected
from fn.inplace.links import Descent, Head, MatchedChain, descent_of
from fn.inplace.protocol import PARAM_DTYPES, InPlace, Staged
from fn.transforms.skip_nonfinite import skip_nonfinite

Tree = Any


class Row(NamedTuple):
    """How steps of a kind are staged.

    stage: (rule, chain) -> how, or the reason why not. looks: whether a guard looks at what such a step returns.
    last: why no weight decay and no rate may stand behind the link; "" where they may.
    """

    stage: Callable[..., InPlace | str]
    looks: bool
    last: str


_rows: dict[type, Row] = {}


def register(rule: type, stage: Callable[..., InPlace | str], *, looks: bool = True, last: str = "") -> None:
    """Take steps whose link of moments has a rule of this type in place.

    A method's own module calls it when it is imported, so that nothing here knows of the method.

    Args:
        rule: a NamedTuple that is the link's update, such as `fn.transforms.adam.Adam`.
        stage: (rule, chain) -> how its step is staged, or a phrase that says why it cannot be. chain: a `MatchedChain`.
        looks: whether a guard looks at what the step returns, as it does in all but local steps.
        last: why no weight decay and no rate may stand behind the link; "" where they may.
    Raises: ValueError if the type has a row: two modules would decide which one by the order of imports.
    """
    if rule in _rows and _rows[rule].stage is not stage:
        raise ValueError(expected("rule", "a type without a row", f"{rule.__name__}, which has one"))
    _rows[rule] = Row(stage, looks, last)


def registered() -> tuple[str, ...]:
    """Return the names of the rules with a row, sorted. What a step sends may depend on it, so ranks compare it."""
    return tuple(sorted(rule.__name__ for rule in _rows))


def in_place(update: UpdateFn) -> InPlace | str:
    """Return how an update is staged, or the reason why it cannot be: a phrase that names the link in the way.

    Args: update: of a transform that `skip_nonfinite` made, in one phase.
    """
    update = original(update)
    if not isinstance(update, Guarded):
        return "it is not guarded by fn.skip_nonfinite"
    links = links_of(update.inner, (0,))  # 0: `inner` of the guard's state
    return matched(update, links, update.looks)


def matched(update: Guarded, links: list[Link], looks: bool) -> InPlace | str:
    """Return how a chain of links is staged, or the reason why it cannot be.

    Args: update: the pure one. links: their paths begin in its state. looks: whether its guard looks at the result.
    """
    for i, link in enumerate(links):
        row = _rows.get(type(link.update))
        if row is None:
            continue
        # Whether all ranks skip a step, or this rank drops it alone, is part of how it is staged.
        if looks != row.looks:
            verb = "looks" if update.looks else "does not look"
            return f"in this phase its guard {verb} at what {name_of(link.update)} returns"
        descent = descent_of(links[i + 1 :])
        if isinstance(descent, Link):
            got = name_of(descent.update)
            return f"expected weight decays, then rates, behind {name_of(link.update)}, but got {got}"
        if row.last and descent != Descent(0.0, ()):
            return row.last
        chain = MatchedChain(update, link, Head(links[:i]), descent)
        # The first link with kernels decides: a second one, no decay and no rate, was refused above.
        return without_guards(chain.head, row.stage(link.update, chain))
    return f"none of its links has kernels: {', '.join(name_of(link.update) for link in links) or 'it has none'}"


def without_guards(head: Head, staged: InPlace | str) -> InPlace | str:
    """Refuse `skip_nonfinite` before the moments: only the pure path tells other ranks about its skips."""
    if isinstance(staged, str) or not head.links:
        return staged
    for link in head.links:
        if isinstance(link.update, Guarded):
            return f"{name_of(link.update)} stands in front of the moments inside of another guard"

    def stage(updates: Tree, state: Tree, params: Tree) -> Staged | None:
        hidden = any(roles.find(link.state(state), "skips") for link in head.links)  # in a link of the user's own
        return None if hidden else staged.stage(updates, state, params)

    return staged._replace(stage=stage)


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
    """Return why kernels do not take the tensors of a param group, and the cure; "" if they take them.

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
