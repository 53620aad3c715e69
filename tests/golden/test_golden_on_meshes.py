"""Recorded runs of the Muon family whose numbers are those of whole matrices are replayed on a mesh of 2 x 2 ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import recorded_muon
import test_golden_muon
import test_golden_muon2
import torch
from ranks import Cases
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fn

case = Cases(4)

FIRST = {one.row["name"]: one for one in test_golden_muon.CASES}
SECOND = {
    name: test_golden_muon2.case_of(row)
    for name, row in test_golden_muon2.ROWS.items()
    if row["method"] in ("muon", "normuon", "nanochat", "dion2")
}

BY_SHARDS = "the norms of a matrix are those of each rank's rows"
ELSEWHERE: dict[str, str] = {
    **{name: BY_SHARDS for name, one in SECOND.items() if one.row["method"] == "normuon"
       and test_golden_muon2.norms_are_of_shards(one)},
    **{name: "dion2 is refused on shards" for name, one in SECOND.items() if one.row["method"] == "dion2"},
    "sign_muon_w3, muon_usign_w3, muon_sign_w4_ties": "three or four voters, each of which would be a mesh",
}  # fmt: skip
"""Why a recording is not replayed on a mesh."""


def placed(x: Tensor, mesh: DeviceMesh, i: int) -> DTensor:
    """Return a tensor that is divided over both axes, a matrix, or each of a stack, in both of its dimensions."""
    dims = [max(0, x.ndim - 2), x.ndim - 1]
    # All ranks know the tensor: nothing is sent.
    return distribute_tensor(x, mesh, [Shard(dim) for dim in (dims if i % 2 else dims[::-1])], src_data_rank=None)


def nanochat(one: test_golden_muon2.Case) -> tuple[Any, dict[str, Any]]:
    """Return what makes nanochat's optimizer, and the numbers of its param group."""
    hyper = one.hyper
    other = fn.scale_by_adam(*hyper["betas"], hyper["eps"]), fn.add_decayed_weights(hyper["scalar_weight_decay"])
    make = partial(
        fn.contrib.nanochat, b2=hyper["beta2"], labels=test_golden_muon2.labels_of(one), other=fn.chain(*other),
        other_rate=hyper["scalar_lr"] / hyper["lr"], ns_steps=hyper["ns_steps"],
        dtype=getattr(torch, hyper["precision"]),
    )  # fmt: skip
    return make, {"lr": hyper["lr"], "momentum": hyper["mu"], "weight_decay": hyper["weight_decay"]}


def farthest(
    one: recorded_muon.Case, make: Any, mesh: DeviceMesh, numbers: dict[str, Any], places: list[int]
) -> float:
    """Return how far the pieces of some params were from those of recorded ones after any step, 1 at its tolerance.

    Gradients are those at the recorded params, which all ranks know.
    """
    params = [torch.nn.Parameter(placed(x, mesh, i)) for i, x in enumerate(one.each("init"))]
    opt, whole, worst = fn.Optimizer(params, make, **numbers), one.each("init"), 0.0
    for t in range(int(one.hyper["steps"])):
        for i, (p, g) in enumerate(zip(params, one.gradients(whole, t), strict=True)):
            p.grad = placed(g.mean(0), mesh, i)
        if one.hyper.get("schedule") == "nanochat":
            now = test_golden_muon2.nanochat_numbers(one, t)
            opt.param_groups[0].update(zip(("lr", "momentum", "weight_decay"), now, strict=True))
        opt.step()
        whole = [torch.from_numpy(one.arrays[f"p{i}.param"][t]) for i in range(len(params))]
        for i in places:
            away = (params[i].to_local() - placed(whole[i], mesh, i).to_local()).detach().abs()
            limit = one.row["tolerance"] * max(1.0, float(whole[i].abs().max()))
            assert bool(away.isfinite().all())
            worst = max([worst, *(away / limit).flatten().tolist()])
    return worst


def second(one: test_golden_muon2.Case) -> Any:
    """Return what makes Muon or NorMuon; the rate is the recording's."""
    return lambda lr, shards=None: test_golden_muon2.muon(one, shards)


def first_of(one: recorded_muon.Case, kind: str) -> Any:
    return lambda lr, shards=None: test_golden_muon.muon(one, kind, shards=shards)


@case
def replayed() -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("data", "fsdp", "tp")), dict[str, Any]()
    inside = mesh["fsdp", "tp"]
    for name, one in SECOND.items():
        if name not in ELSEWHERE:
            make, numbers = nanochat(one) if one.row["method"] == "nanochat" else (second(one), {"lr": 1.0})
            found[name] = farthest(one, make, inside, numbers, [*range(len(one.hyper["shapes"]))])
    with fn.bind(mesh["data"]):
        for name, first in FIRST.items():
            for kind in sorted({*first.hyper["kinds"]}):
                found[name, kind] = farthest(first, first_of(first, kind), inside, {"lr": 1.0}, first.places(kind))
    return found


def test_the_recorded_run_is_replayed_on_a_mesh() -> None:
    for rank in case.answer("replayed"):
        assert {name: away for name, away in rank.items() if away > 1} == {}
        assert {name if isinstance(name, str) else name[0] for name in rank} == {*FIRST, *SECOND} - {*ELSEWHERE}


@pytest.mark.parametrize("name", [name for name in ELSEWHERE if name in SECOND])
def test_what_is_not_replayed_is_defined_by_shards_or_refused(name: str) -> None:
    one = SECOND[name]
    assert one.row["method"] == "dion2" or test_golden_muon2.norms_are_of_shards(one)
