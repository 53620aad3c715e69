"""Compare the tensors that a checkpoint keeps once for all ranks.

Steps, parameters and replicated state are refused where they differ. The user's own tensors, `extra`, may differ: a
model's running statistics do where ranks see other batches, and so do the states of random generators.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fn.collectives.agreement import Difference, describe_numbers, differences

EXTRA = "extra."
"""The beginning of the keys of the leaves of `extra`."""

HINTS = {
    "steps": "call it on all ranks after the same step",
    "state.": "if it is meant to differ, name its field in rank_local of the state's class",
    "params.": "if they are meant to differ, say local_params = True in the state's class",
}
"""The cure for a key that differs, by the beginning of the key."""


def compare(
    tensors: Mapping[str, Tensor], gather: Callable[[Any], list[Any]], hints: Mapping[str, str] = HINTS
) -> set[str]:
    """Compare the tensors that are saved once; return the keys of those leaves of `extra` that differ.

    Args: gather: an object -> those of all ranks. hints: see `HINTS`.
    Raises: `RanksDisagree`, on every rank, that names the first rank and key that differ from rank 0; for `extra` if a
        leaf's shape or dtype differs, or not all ranks have it.
    """
    extra = {key: _described(x) for key, x in tensors.items() if key.startswith(EXTRA)}
    same = {key: x for key, x in tensors.items() if key not in extra}
    found = differences({**describe_numbers(same), **extra}, gather)
    for name, values in found:
        leaf = name.removeprefix(EXTRA)
        forms = Difference(leaf, [x.partition(" with ")[0] for x in values])
        if leaf != name and len(set(forms.values)) > 1:
            cure = "numbers may differ, but give all ranks the same leaves; nothing was saved"
            raise forms.error(f"leaf {leaf!r} of extra {forms.where}; {cure}")
    for first in (difference for difference in found if difference.name not in extra):
        text = f"{first}, but is saved once for all ranks"
        text += "".join(f"; {hint}" for prefix, hint in hints.items() if first.name.startswith(prefix))
        raise first.error(f"{text}; nothing was saved")
    return {difference.name for difference in found}


def _described(x: Tensor) -> str:
    # Not a sum of words, as for parameters: two generators' states may hold the same words in another order.
    # (...) -> (n,) -> (bytes,): numpy has no bfloat16, so the digest is of bytes.
    numbers = x.detach().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{x.dtype} {tuple(x.shape)} with {hashlib.blake2b(numbers.data, digest_size=16).hexdigest()}"
