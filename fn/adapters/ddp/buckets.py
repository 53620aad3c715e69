"""How parameters are cut into buckets, whose gradients travel together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fn.adapters.optim.groups import as_list
from fn.arguments import checked
from fn.errors import expected

BUCKET = 3 << 20
"""Elements that travel together: small enough to start early, large enough for few messages, for each has its price."""

BUCKET_OF_ACCELERATOR = 64 << 20
"""The same on an accelerator: a message costs launches, and a fast network carries it before more is ready."""

SHARE = 0.25
"""The part that a bucket takes of what is left: while its codes are on the wire the next bucket is computed."""


def split(params: Sequence[Tensor], elements: int) -> list[list[Tensor]]:
    """Cut a list of parameters, from its end, into buckets of about `elements` elements.

    A bucket is closed as soon as it is large enough. Up to `elements` are one bucket. Of more the first is a third
    of `elements`, because nothing is on the wire before it. Each later one takes `SHARE` of what is left, at most
    `elements` and at least a quarter of that, so that little is on its way when the backward pass ends.
    """
    buckets: list[list[Tensor]] = [[]]
    count, left = 0, sum(p.numel() for p in params)
    first = elements / 3 if left > elements else elements
    for p in reversed(params):
        enough = first if len(buckets) == 1 else min(elements, max(left * SHARE, elements / 4))
        if buckets[-1] and count >= enough and left - count > elements / 8:  # a small rest goes with the one before
            buckets.append([])
            left, count = left - count, 0
        # Taken from the end, but kept in the order of the model.
        buckets[-1].insert(0, p)
        count += p.numel()
    return buckets


def enough(device: torch.device) -> int:
    """Return how many elements travel together on a device, unless somebody says something else."""
    return BUCKET if device.type == "cpu" else BUCKET_OF_ACCELERATOR


@checked("elements")
def bucketed(params: Iterable[Any], elements: int | None = None) -> list[dict[str, Any]]:
    """Split parameters, or param groups, into param groups that `overlap` sends one by one.

    Args: params: as for an optimizer, named ones, too. elements: that a group may have; of larger ones the first
        part and the last ones are smaller, so that the wire begins and ends soon. None: `BUCKET`, and on an
        accelerator `BUCKET_OF_ACCELERATOR`.
    Returns: param groups with the hyper-parameters of those that they are parts of, the last parameters first. A group
        may be given a "name", by which to look its parts up afterwards.
    Raises: ValueError if elements is not positive; TypeError for parameters that are no tensors, or have no order.

    >>> import torch
    >>> from fn.adapters.ddp import bucketed
    >>> groups = bucketed([torch.zeros(n) for n in (60, 30, 20, 10, 5)], elements=30)
    >>> [[p.numel() for p in group["params"]] for group in groups]
    [[10, 5], [30, 20], [60]]
    """
    if elements is not None and elements < 1:
        raise ValueError(expected("elements", "a whole number of at least 1", f"{elements}"))
    listed = as_list(params)
    groups = listed if listed and isinstance(listed[0], dict) else [{"params": listed}]
    return [{**group, "params": bucket} for group in groups for bucket in _buckets(group["params"], elements) if bucket]


def _buckets(params: Any, elements: int | None) -> list[list[Any]]:
    """Return the buckets of `split` for tensors or pairs (name, tensor), with the names."""
    entries = [params] if isinstance(params, Tensor) else list(params)
    tensors: list[Any] = [entry[1] if isinstance(entry, tuple) and len(entry) == 2 else entry for entry in entries]
    for entry, p in zip(entries, tensors, strict=True):
        if not isinstance(p, Tensor):
            raise TypeError(expected("params", "tensors, or pairs of (name, tensor)", type(entry).__name__))
    if elements is None:
        elements = enough(tensors[0].device) if tensors else BUCKET
    given = {id(p): entry for entry, p in zip(entries, tensors, strict=True)}
    return [[given[id(p)] for p in bucket] for bucket in split(tensors, elements)]
