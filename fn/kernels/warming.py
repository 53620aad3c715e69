"""Have kernels compiled before a run needs them, for the dtypes that its tensors have.

Known answers are asked in float32. A kernel on lists of tensors is compiled once more where params or gradients are in
half precision, which takes seconds in the middle of a run. So it takes the same examples in these dtypes once. What it
finds is not looked at: the arithmetic is that of float32, which was.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fn.kernels.known_answers import examples, outcome
from fn.kernels.schemas import SCHEMAS
from fn.kernels.table import cells

logger = logging.getLogger("fn")

HALVES = (torch.float16, torch.bfloat16)


def warm_halves(ops: Iterable[str], device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
    """Run the kernels of ops on examples whose params are of each of `dtypes`, as far as these are half precision.

    Gradients are of the same dtype, and of float32, as they come out of a mean.
    """
    kinds = [dtype for dtype in HALVES if dtype in {*dtypes}]
    for op in ops:
        for args in [args for dtype in kinds for args in in_halves(op, dtype)]:
            for cell in cells(op, device.type):
                try:
                    if outcome(op, cell.kernel, args, device) is not NotImplemented:
                        break
                except Exception as error:  # a step that needs it raises it again
                    logger.warning("kernel %r of %r fails in half precision: %s", op, cell.provider, error)


def in_halves(op: str, dtype: torch.dtype) -> list[tuple[Any, ...]]:
    """Return the examples of an op with params or gradients in half precision; none for an op that takes neither."""
    schema = SCHEMAS[op]
    names, found = [each.split()[-1] for each in schema[1 : schema.rindex(") ->")].split(", ")], []
    for args in examples(op):
        given = dict(zip(names, args, strict=True))
        written = {"copies"} if given.get("copies") else {"params"}  # what is copied is an anchor, in float32
        for cast in (written, {*written, "grads"}) if "grads" in names else (written,):
            if cast & {*names}:
                found.append(tuple(_cast(x, dtype) if name in cast else x for name, x in given.items()))
    return found


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [x.to(dtype) for x in tensors]
