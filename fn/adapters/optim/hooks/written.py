"""Params that something else wrote between two steps, such as a checkpoint that the model loads behind the optimizer.

A state may hold copies of the params, such as the anchor of rounds. Where something else writes the params, an exchange
takes the distance to what was written for steps of this rank. torch counts the versions of a tensor, which are cheap to
read; what is written through `p.data` is not counted.
"""

from __future__ import annotations

import warnings

from torch import Tensor

from fn import roles, tree
from fn.adapters.optim.core import Core, device_of, record_versions, versions_of
from fn.adapters.optim.exchange_header import mark_of
from fn.adapters.optim.hooks.agree import axes_of_calls, check_same_params, compare_resting
from fn.adapters.optim.units import Unit
from fn.base import Phase
from fn.collectives.agreement import FIRST_STEP, calling
from fn.collectives.profiling import Watchers, watched_by


def follow_params(core: Core) -> None:
    """Make copies of the params anew if these were written before the first step; warn if they were written later.

    Before the first step the ranks tell each other, and compare the params; also which of these rest. Later they would
    need a message in each step, and a rank that made its copies anew alone would drift from the others for good. A step
    of the warm-up keeps copies current itself, so it needs no warning. The axes must be bound.

    Raises: `RanksDisagree`, on all ranks, where the first step would start from params that differ, or some rest on
        some ranks only.
    """
    written = [written_params(unit) for unit in core.units]
    if core.steps == 0 and not core.has_begun:
        # The header of the first step says so, too, and what rests.
        axes, word = axes_of_calls(core), mark_of(core.resting) << 1 | any(written)
        with calling(FIRST_STEP, axes, device_of(core), word) as words:
            wrote = any(of_rank & 1 for of_rank in words)
            if len({of_rank >> 1 for of_rank in words}) > 1:
                compare_resting(core)
            if wrote:
                with watched_by(Watchers()):  # which no ledger counts
                    check_same_params(core)
        for unit in core.units if wrote else ():
            copy_anew(unit)
        record_versions(core)
        core.has_begun = True  # an overlap comes here from the backward pass, and the step once more
    elif not core.warned and any(written) and core.next_phase is not Phase.WARMUP:
        core.warned = True
        warn(next(unit.names[places[0]] for places, unit in zip(written, core.units, strict=True) if places))


def written_params(unit: Unit) -> list[int]:
    """Return which params of a unit have other versions than fn left them with; none if it is not known."""
    now = versions_of(unit) if unit.versions else []
    return [i for i, version in enumerate(now) if version != unit.versions[i]]


def copy_anew(unit: Unit) -> None:
    """Fill the copies in a state with those that its init makes of the present params."""
    old = roles.find(unit.state, "copies")
    if tree.leaves(old):
        new = roles.find(unit.transform.init(tree.map(Tensor.detach, unit.params)), "copies")
        for x, fresh in zip(tree.leaves(old), tree.leaves(new), strict=True):
            x.copy_(fresh)


def warn(name: str) -> None:
    """Warn of a param that something else wrote."""
    text = f"params: something else than this optimizer wrote parameter {name} after the first step, and the next "
    text += "exchange takes what was written for steps of this rank"
    cure = "load a checkpoint before the first step, or together with the optimizer's state; what changes params in "
    cure += "every step belongs in the chain, as a link made by fn.stateless"
    warnings.warn(f"{text}; {cure}", stacklevel=6)
