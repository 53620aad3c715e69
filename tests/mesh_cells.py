"""Methods of whole matrices on meshes of several axes, each exactly and in codes: what runs, and what is refused.

`tests/adapters/fsdp/test_methods_on_meshes.py` runs each cell; `tests/scripts/mesh_table.py` makes the table of
docs/fsdp.md of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import fn

ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()
MATRICES, STACKS = [(7, 6), (5, 9), (8, 8), (3, 5)], [(5, 4, 6), (3, 7, 5), (2, 5, 6), (3, 4, 5)]
"""Sides that the meshes do not divide; the last matrix is smaller than the mesh in one of them."""


class Mesh(NamedTuple):
    """Tensors on a mesh of 2 x 2. shapes: of hidden tensors. placements: of each, over both axes."""

    shapes: list[tuple[int, ...]]
    placements: list[tuple[Any, Any]]


MESHES = {
    "FSDP2 × TP": Mesh(MATRICES, [(_StridedShard(0, split_factor=2), ROWS), (ROWS, COLUMNS), (ROWS, ROWS),
                                  (COLUMNS, ROWS)]),
    "HSDP": Mesh(MATRICES, [(WHOLE, ROWS)] * 4),
    "replicas × TP": Mesh(MATRICES, [(WHOLE, COLUMNS), (WHOLE, ROWS)] * 2),
    "experts: EP × TP": Mesh(STACKS, [(ROWS, COLUMNS), (ROWS, Shard(2)), (ROWS, COLUMNS), (ROWS, ROWS)]),
    "experts: FSDP2 × TP": Mesh(STACKS, [(COLUMNS, Shard(2)), (_StridedShard(1, split_factor=2), COLUMNS),
                                         (COLUMNS, Shard(2)), (WHOLE, COLUMNS)]),
}  # fmt: skip


class Method(NamedTuple):
    """A method in its two forms. Each is arguments of `make` and of `fn.Optimizer`, or why there is none.

    refused: what the message says. across: whether it takes an axis, that of islands of such meshes.
    """

    make: Any
    exact: dict[str, Any] | str
    int8: dict[str, Any] | str
    more: dict[str, Any] = {}  # noqa: RUF012
    across: bool = False


ONE = {"schedule": fn.freeze_after(1)}
OWN = "refused¹"
METHODS = {
    "muon": Method(fn.muon, {}, {"codec": fn.int8()}, ONE),
    "normuon": Method(fn.normuon, {}, {"codec": fn.int8()}, ONE),
    "sign_muon": Method(fn.sign_muon, {}, "votes, no codec", ONE, True),
    "muloco": Method(fn.muloco, {"codec": None}, {"codec": fn.int8()}, {"schedule": fn.every(2, start=0)}, True),
    "dion2": Method(fn.contrib.dion2, OWN, OWN),
    # Without the decay, which begins or ends where codes change a sign.
    "nanochat": Method(fn.contrib.nanochat, {}, {"codec": fn.int8(), "weight_decay": 0.0}, ONE),
}


def made(method: Method, form: dict[str, Any], labels: list[str]) -> Any:
    """Return what `fn.Optimizer` takes."""
    return partial(method.make, labels=labels, **{"axis": "island"} if method.across else {}, **form)
