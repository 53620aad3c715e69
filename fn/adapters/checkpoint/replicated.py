"""Compare between ranks what a checkpoint keeps once for all of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fn.collectives.agreement import KERNELS, describe_numbers, differences, kernels_here

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
    same = {k: x for k, x in state.items() if not isinstance(x, DTensor) and not k.startswith("extra.")}
    differing = differences({**describe_numbers(same), KERNELS: kernels_here(device)}, gather)
    other_kernels = any(difference.name == KERNELS for difference in differing)
    for difference in differing:
        if difference.name == KERNELS:
            continue
        text = f"{difference}, but is saved once for all ranks"
        text += "".join(f"; {hint}" for prefix, hint in hints.items() if difference.name.startswith(prefix))
        if not other_kernels:
            raise difference.error(f"{text}; nothing was saved")
        warnings.warn(f"checkpoint: {text}; these ranks have other kernels, which round differently", stacklevel=2)
        return
