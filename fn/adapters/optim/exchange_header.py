"""The header of an exchange: ranks tell each other which one follows, and refuse to meet in different ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b

import torch

from fn.adapters.optim.units import Units
from fn.collectives.agreement import EXCHANGE, Difference, check_calls, device_of, differences, gather_values, header
from fn.collectives.axis import axis_size, current_binding
from fn.collectives.profiling import Watchers, watched_by
from fn.errors import RanksDisagree
from fn.kernels import flags

LOCAL_STEP_TAKEN = "the exchange is left out; parameters and state are as after the local step, which counts"


def announce(core: Units, number: int, steps: int, resting: Sequence[str]) -> Callable[[], None]:
    """Tell the other ranks which exchange follows; return a function that waits for theirs, and compares.

    A message does not name its content: if a rank's schedule ran a fragment ahead, or one had left out an exchange,
    a mean of two fragments of one size would be taken for one of each. What rests on one rank only would drift there.

    Inside of `fn.kernels.flags.assumed` an accelerator is not waited for: whether all say the same is one of these
    flags.

    Args: number: of the exchange. steps, resting: as they were when it began; unequal steps are not compared.
    """
    axes, device = core.exchange_axes, device_of(core.param_groups)
    if not axes or axis_size(axes) == 1:
        return lambda: None
    steps = 0 if hasattr(core.schedule, "progress") else steps
    word, here = mark_of(resting) << 32 | steps, current_binding()
    rows = header(EXCHANGE, axes, device, number, word)

    def compare() -> None:
        # (W, 2) against the (1, 2) of rank 0.
        if flags.is_true((rows == rows[:1]).all()):
            return
        heard = rows.tolist()
        check_calls(heard, axes, LOCAL_STEP_TAKEN)
        first, *others = [(head >> 8 & 0xFFFFFFFF, told & 0xFFFFFFFF) for head, told in heard]
        for rank, row in enumerate(others, 1):
            if row != first:
                raise RanksDisagree(
                    f"ranks disagree: an exchange is of fragment {row[0]} after {row[1]} steps on rank {rank} of "
                    f"{' x '.join(map(repr, axes))}, and of fragment {first[0]} after {first[1]} steps on rank 0; "
                    f"a schedule may depend on the step only, and a checkpoint is loaded on all ranks; "
                    f"{LOCAL_STEP_TAKEN}",
                    rank=rank,
                    field="step" if row[0] == first[0] else "fragment",
                )
        with here:  # whoever reads states waits for a mean with other axes bound
            refuse_resting(axes, resting, device, LOCAL_STEP_TAKEN)

    return compare


def mark_of(resting: Sequence[str]) -> int:
    """Return a number of 31 bits for the names of parameters that rest; 0 for none."""
    return int.from_bytes(blake2b(repr(resting).encode(), digest_size=4).digest(), "big") >> 1 if resting else 0


def refuse_resting(axes: tuple[str, ...], resting: Sequence[str], device: torch.device, left: str) -> None:
    """Name the first parameter that rests on some ranks of axes only, with a `RanksDisagree`. All ranks must call it.

    Args: resting: names of those that rest on this rank. left: how parameters and state are.
    """
    with watched_by(Watchers()):  # which no ledger counts
        found = differences(dict.fromkeys(resting, "off"), partial(gather_values, axis=axes, device=device))
    for name, values in found[:1]:
        difference = Difference(f"requires_grad of {name}", [value != "off" for value in values])
        raise difference.error(f"{difference}; switch it on all ranks alike, in front of the same step; {left}")
