"""Variants of Muon on FSDP2's shards: the params of whole matrices, and no exchange between steps of whole ones."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch.distributed as dist
from ranks import run
from test_muon_on_shards import Net, far, optimizer, sharded, train, whole
from torch.distributed.device_mesh import init_device_mesh

import fn

PERIOD = 3


def on_shards() -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",)), {}
    more = {"schedule": fn.periodic(PERIOD)}
    for name, make, exact in (("muon_bp", fn.muon_bp, {}), ("lion_muon", fn.lion_muon, {"votes": False})):
        model, twin = sharded(mesh), Net()
        opt = optimizer(model, make, **more)
        with fn.ledger() as sent:
            train(model, opt, range(1))
        with fn.ledger() as between:
            train(model, opt, range(1, PERIOD))
        train(model, opt, range(PERIOD, 2 * PERIOD))
        with fn.bind({"data": dist.group.WORLD}):
            train(twin, optimizer(twin, partial(make, axis="data", **exact), **more), range(2 * PERIOD))
        found[name] = far(whole(model), whole(twin)), far(whole(model), whole(Net()))
        found[f"{name} sent"] = [book.sent.get(("shard", "all_to_all"), 0) for book in (sent, between)]
    return found


def test_they_have_the_params_of_whole_matrices_and_send_nothing_between() -> None:
    """Of uneven rows, and of vectors and embeddings."""
    for found in run(2, on_shards):
        for name in ("muon_bp", "lion_muon"):
            off, moved = found[name]
            assert off <= 1e-9 < moved, name
            sent, between = found[f"{name} sent"]
            assert sent > 0 == between
