"""A variant of Muon on FSDP2's shards beside itself on whole matrices, on a rank of a real group."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from adapters.fsdp.test_muon_on_shards import Net, far, optimizer, sharded, train, whole
from torch.distributed.device_mesh import init_device_mesh

import fn

PERIOD = 3


def beside_whole_matrices(make: Any, **exact: Any) -> tuple[float, float, int, int]:
    """Train on shards and on whole matrices, of uneven rows, and of vectors and embeddings.

    Args: exact: what makes the averages of whole matrices exact.
    Returns: how far the params are apart; how far they went; bytes of a step of whole matrices; of the steps between.
    """
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    model, twin, more = sharded(mesh), Net(), {"schedule": fn.periodic(PERIOD)}
    opt = optimizer(model, make, **more)
    with fn.ledger() as sent:
        train(model, opt, range(1))
    with fn.ledger() as between:
        train(model, opt, range(1, PERIOD))
    train(model, opt, range(PERIOD, 2 * PERIOD))
    with fn.bind({"data": dist.group.WORLD}):
        train(twin, optimizer(twin, partial(make, axis="data", **exact), **more), range(2 * PERIOD))
    counted = [book.sent.get(("shard", "all_to_all"), 0) for book in (sent, between)]
    return far(whole(model), whole(twin)), far(whole(model), whole(Net())), counted[0], counted[1]
