"""What a checkpoint keeps once, where it is the same on all ranks, and what it keeps for each of them.

Steps, parameters and replicated state are compared, and refused where they differ. What the user adds, `extra`, may
differ: a model's running statistics do where ranks see other batches, and so do the states of random generators.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from fn.collectives.agreement import KERNELS, Difference, describe_numbers, differences, kernels_here
from fn.transforms.resharding import Rows, mean_of_rows

SAME, EACH = "extra.", "extra of each rank."
"""How the keys of leaves of `extra` begin: of those with one value, and of those with a row (W, ...) of all ranks'."""

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
    same = {k: x for k, x in state.items() if not isinstance(x, DTensor) and not k.startswith(SAME)}
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


def split_extra(
    state: Mapping[str, Tensor],
    as_row: Callable[[Tensor], Tensor],
    gather: Callable[[Callable[[], Any]], list[Any]],
) -> dict[str, Tensor]:
    """Return what to save, with a row of this rank's for each leaf of `extra` that is not the same on all ranks.

    Args: as_row: a tensor -> its row. gather: a function -> what it returns on each rank.
    Raises: `RanksDisagree`, on every rank, if a leaf's shape or dtype differs, or not all ranks have it.
    """
    mine: dict[str, list[str]] = {}
    gather(lambda: mine.update({key: [_form(x), _digest(x)] for key, x in state.items() if key.startswith(SAME)}))
    differing = differences(mine, lambda value: gather(lambda: value))
    for key, values in differing:
        leaf = key.removeprefix(SAME)
        forms = Difference(leaf, [x if x == "missing" else x[0] for x in values])
        if len(set(forms.values)) > 1:
            cure = "numbers may differ, but give all ranks the same leaves"
            raise forms.error(f"leaf {leaf!r} of extra {forms.where}; {cure}; nothing was saved")
    of_each = {key for key, _ in differing}
    once = {key: x for key, x in state.items() if key not in of_each}
    return once | {EACH + key.removeprefix(SAME): as_row(state[key]) for key in state if key in of_each}


X = TypeVar("X")


def join_extra(saved: Mapping[str, X]) -> dict[str, X]:
    """Return what was saved under the keys that `split_extra` was given."""
    return {SAME + key.removeprefix(EACH) if key.startswith(EACH) else key: x for key, x in saved.items()}


def mean_extra(read: Mapping[str, Any], old: int, size: int) -> dict[str, Any]:
    """Return what all of `size` ranks are given of the rows (old, ...) of `extra` that each rank has read in full.

    Floating-point numbers become their mean over the ranks that saved, as parameters of each rank's own do, so that a
    model's state dict agrees with what the optimizer loads. Others, such as a random generator's state, have no mean:
    all are given rank 0's, with a warning.
    """
    rows = {key: x for key, x in read.items() if key.startswith(EACH) and isinstance(x, Tensor)}
    firsts = sorted(key.removeprefix(EACH) for key, x in rows.items() if not x.is_floating_point())
    if firsts:
        warnings.warn(
            f"extra: {', '.join(map(repr, firsts[:3]))}{f' and {len(firsts) - 3} more' if len(firsts) > 3 else ''} "
            f"differed between the {old} ranks that saved; on {size} ranks all load what rank 0 had",
            stacklevel=3,
        )

    def one_for_all(x: Tensor) -> Tensor:
        return mean_of_rows(Rows(x, 0, old), lambda total: total) if x.is_floating_point() else x[0]

    return {**read, **{key: one_for_all(x) for key, x in rows.items()}}


def _form(x: Tensor) -> str:
    return f"{x.dtype} {tuple(x.shape)}"


def _digest(x: Tensor) -> str:
    # Not a sum of words, as for parameters: two generators' states may hold the same words in another order.
    numbers = x.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(numbers.data, digest_size=16).hexdigest()
