"""Compare between ranks what a checkpoint keeps once for all of them."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fn.adapters.optim.consistency import contents
from fn.collectives.agreement import rows_here
from fn.errors import RanksDisagree

HINTS = {
    "state.": "if it is meant to differ, name its field in rank_local of the state's class",
    "params.": "if they are meant to differ, say local_params = True in the state's class",
}
"""What to do about a key that differs, by how it begins."""


def check_replicated(
    state: Mapping[str, Tensor],
    device: torch.device,
    gather: Callable[[Any], list[Any]],
    *,
    hints: Mapping[str, str] = HINTS,
) -> None:
    """Compare steps, parameters and state that are saved once, because they are called the same on all ranks.

    Ranks with other kernels round differently, as a warning at construction said: there a difference is warned of.

    Args: state: {key: tensor}; what is one rank's own as a DTensor. device: of the parameters. gather: an object ->
        those of all ranks. hints: how a key begins -> what to do about one that differs.
    Raises: `RanksDisagree`, on every rank, that names the first rank and key that differ from rank 0.
    """
    mine = contents({k: x for k, x in state.items() if not isinstance(x, DTensor) and not k.startswith("extra.")})
    digest = hashlib.blake2b(repr(sorted(mine.items())).encode()).digest()
    each = gather((digest, rows_here(device)))
    if len({found for found, _ in each}) == 1:
        return
    rank, name, ours, theirs = _first_difference(gather(mine))
    text = f"{name} is {theirs} on rank {rank} and {ours} on rank 0, but is saved once for all ranks"
    text += "".join(f"; {hint}" for prefix, hint in hints.items() if name.startswith(prefix))
    if len({kernels for _, kernels in each}) == 1:
        raise RanksDisagree(f"ranks disagree: {text}; nothing was saved", rank=rank, field=name)
    warnings.warn(f"checkpoint: {text}; these ranks have other kernels, which round differently", stacklevel=2)


def _first_difference(each: list[dict[str, str]]) -> tuple[int, str, str, str]:
    """Return the first rank that differs from rank 0, the key, and what rank 0 and that rank have."""
    first = each[0]
    for rank, found in enumerate(each):
        for name in [*first, *found]:
            if first.get(name) != found.get(name):
                return rank, name, first.get(name, "missing"), found.get(name, "missing")
    raise AssertionError("digests differ, but nothing else does")
