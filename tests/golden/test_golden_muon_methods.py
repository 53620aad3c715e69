"""Methods on Muon follow their recorded runs: `tests/golden/README_muon.md`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import chains
import numpy as np
import pytest
from golden.test_golden_muon import FOLDER, Case, case_of
from golden_cases import recorded_form
from torch import Tensor

import fn
from fn import Phase, roles, tree

METHODS = ("lion_muon", "sign_muon", "ef21_muon", "dion2", "muon_bp", "gpa")
ROWS = {method: json.loads((FOLDER / f"index_{method}.json").read_text())["cases"] for method in METHODS}


def loaded(row: dict[str, Any]) -> Case:
    """Return a recording in the precision in which it ran; its problem is written down in float32."""
    case = case_of(row)
    if case.hyper.get("precision") != "float64":
        return case
    return case._replace(arrays={name: x.astype(np.float64) for name, x in case.arrays.items()})


def each_of(method: str) -> Any:
    return pytest.mark.parametrize("row", ROWS[method], ids=[row["name"] for row in ROWS[method]])


def replayed(
    case: Case, tx: fn.Transform, schedule: Callable[[int], Phase]
) -> Iterator[tuple[int, list[Tensor], Any]]:
    """Take all steps in simulated ranks, from gradients at our own params; yield each with params and state after it.

    That `simulate` returns one copy of the params shows that they are the same on all ranks.
    """
    params = case.each("init")
    dims = fn.rank_dims(tx.init(params))
    state = fn.simulate(tx.init, "data", case.world, in_dims=None, out_dims=dims)(params)

    def step(phase: Phase, g: Any, s: Any, p: Any) -> Any:
        updates, s = tx.update(phase)(g, s, p)
        return fn.apply_updates(p, updates), s

    for t in range(int(case.hyper["steps"])):
        on_rank = partial(step, schedule(t))
        run = fn.simulate(on_rank, "data", case.world, in_dims=(0, dims, None), out_dims=(None, dims))
        params, state = run(case.gradients(params, t), state, params)
        yield t, params, state


def labels(case: Case) -> list[str]:
    return ["hidden" if kind == "matrix" else "other" for kind in case.hyper["kinds"]]


@each_of("lion_muon")
def test_lion_muon_follows_its_authors_code(row: dict[str, Any]) -> None:
    """Whose ranks average gradients; a momentum of each rank has the same mean.

    Differs: fn.contrib._lion_muon.lion_muon: ranks vote between; in the authors' code they average gradients
        exactly in every step. Every rank takes Muon's step of all matrices; there owners take it, and an all-reduce
        adds up their updates.
    """
    case = loaded(row)
    hyper, others = case.hyper, case.places("adamw")
    lr = hyper["lr"]
    tx = fn.contrib.lion_muon(
        lr, hyper["beta1"], hyper["beta2"], hyper["weight_decay"], axis="data", labels=labels(case),
        lion_rate=hyper["lion_lr"] / lr, votes=False, other=fn.scale_by_adam(*hyper["betas"], hyper["eps"]),
        other_rate=hyper["scalar_lr"] / lr,
    )  # fmt: skip
    for t, params, state in replayed(case, tx, fn.periodic(hyper["period"])):
        for i, p in enumerate(params):
            case.hold(p, f"p{i}.param", t)
        for i, v in zip(others, recorded_form(state, "nu", hyper["betas"]), strict=True):
            case.hold(v, f"p{i}.variance", t)


def replayed_at(
    case: Case, tx: fn.Transform, codec: fn.Codec | None
) -> Iterator[tuple[int, list[Tensor], list[Tensor], Any]]:
    """Take compressed steps from gradients at the clients' model w; yield each with that w, params and state after it.

    codec: of what a server sends back, w <- w + C(p - w). Ranks of ours have no server: they take its step themselves,
    and w is made here. None: w is p.
    """
    params = w = case.each("init")
    dims = fn.rank_dims(tx.init(params))
    state = fn.simulate(tx.init, "data", case.world, in_dims=None, out_dims=dims)(params)

    def step(g: Any, s: Any, p: Any) -> Any:
        updates, s = tx.update(Phase.COMPRESSED)(g, s, p)
        return fn.apply_updates(p, updates), s

    run = fn.simulate(step, "data", case.world, in_dims=(0, dims, None), out_dims=(None, dims))
    for t in range(int(case.hyper["steps"])):
        params, state = run(case.gradients(w, t), state, params)
        yield t, w, params, state
        w = params if codec is None else [x + coded(codec, p - x) for x, p in zip(w, params, strict=True)]


def coded(codec: fn.Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x.reshape(1, -1))).view(x.shape)


def mean_sign() -> fn.Codec:
    """Return C(x) = mean |x| sign x of a tensor, as numbers."""
    return fn.Codec(lambda x: x.abs().mean(1, keepdim=True) * x.sign(), lambda sent: sent, 1, 1.0)


@each_of("sign_muon")
def test_signs_of_muon_follow_their_authors_code(row: dict[str, Any]) -> None:
    """Where ties are 0, without servers; with an odd number of ranks there are none.

    Differs: fn.contrib._ef21_muon.ef21_muon: ranks add up what all send and take the step themselves; in the paper
        a server takes it and sends the model back, in codes as well.
    """
    case = loaded(row)
    hyper, variant = case.hyper, case.hyper["variant"]
    sent = "directions" if variant.endswith("signmuon") else "momenta"
    same: dict[str, Any] = {"axis": "data", "scale": None, "flatten": True}
    if variant.startswith("ef21"):
        beta = 1 - hyper["mu"]
        tx = fn.contrib.ef21_muon(hyper["lr"], beta, hyper["weight_decay"], codec=mean_sign(), sends=sent, **same)
    else:
        servers = case.world % 2 == 1
        tx = chains.sign_muon(hyper["lr"], hyper["mu"], hyper["weight_decay"], votes=sent, servers=servers, **same)
    for t, w, params, _ in replayed_at(case, tx, mean_sign() if variant == "ef21muonsign" else None):
        for i, (x, p) in enumerate(zip(w, params, strict=True)):
            case.hold(p, f"p{i}.param", t)
            case.hold(x, f"p{i}.at", t)


@each_of("ef21_muon")
def test_ef21_muon_follows_the_equations_of_its_paper(row: dict[str, Any]) -> None:
    """Both ways: params, clients' models, momenta, what was sent of them, and its sum."""
    case = loaded(row)
    hyper = case.hyper
    tx = fn.contrib.ef21_muon(
        hyper["lr"], hyper["beta"], hyper["weight_decay"], axis="data", codec=fn.top_k(hyper["density"]),
        scale=None,
    )  # fmt: skip
    back = None if hyper["down"] == 1 else fn.top_k(hyper["down"])
    for t, w, params, state in replayed_at(case, tx, back):
        momentum, (mean, total), *_ = state.inner
        sizes, shapes = [p.numel() for p in params], [p.shape for p in params]
        sent = [x.view(-1, *shape) for x, shape in zip(mean.worker[0].split(sizes, 1), shapes, strict=True)]
        for name, leaves in {
            "param": params, "at": w, "estimate": total.total, "client_momentum": momentum.mu, "client_estimate": sent,
        }.items():  # fmt: skip
            for i, x in enumerate(leaves):
                case.hold(x, f"p{i}.{name}", t)


@each_of("dion2")
def test_dion2_follows_its_authors_code(row: dict[str, Any]) -> None:
    """In the warm-up, in which rows are chosen as there; cut into shards, of which as many are chosen each, too.

    Differs: fn.contrib._dion2.scale_by_dion2: ranks send chosen rows of momenta of their own, and choose by the mean
        of their sizes; in the authors' code they average all gradients first.
    """
    case = loaded(row)
    hyper, others, lr = case.hyper, case.places("adamw"), case.hyper["lr"]
    in_shards = hyper["shard"] is not None
    tx = fn.contrib.dion2(
        lr, hyper["ef_decay"], hyper["weight_decay"], axis="data", labels=labels(case),
        fraction=hyper["fraction"], side="rows" if in_shards else "smaller",
        blocks=case.world if in_shards and hyper["scope"] == "local" else 1,
        other=fn.scale_by_adam(*hyper["betas"], hyper["eps"]), other_rate=hyper["scalar_lr"] / lr,
        scale=hyper["adjust_lr"],
    )  # fmt: skip
    for t, params, state in replayed(case, tx, lambda step: Phase.WARMUP):
        rows = roles.find(state.inner["muon"], "first_moment")[0]
        for i, p in enumerate(params):
            case.hold(p, f"p{i}.param", t)
        for i, m in zip(case.places("matrix"), rows, strict=True):
            for of_rank in m:
                case.hold(of_rank, f"p{i}.momentum", t)
        for i, v in zip(others, recorded_form(state, "nu", hyper["betas"]), strict=True):
            case.hold(v, f"p{i}.variance", t)


@each_of("muon_bp")
def test_muon_bp_follows_the_equations_of_its_paper(row: dict[str, Any]) -> None:
    case = loaded(row)
    hyper = case.hyper
    tx = fn.contrib.muon_bp(
        hyper["lr"], hyper["mu"], hyper["weight_decay"], axis="data", dim=hyper["shard"],
        block_rate=hyper["block_lr"] / hyper["lr"],
    )  # fmt: skip
    for t, params, state in replayed(case, tx, fn.periodic(hyper["period"])):
        for i, (p, m) in enumerate(zip(params, roles.find(state, "first_moment")[0], strict=True)):
            case.hold(p, f"p{i}.param", t)
            case.hold(m, f"p{i}.momentum", t)


@each_of("gpa")
def test_averages_along_the_way_are_the_recorded_ones(row: dict[str, Any]) -> None:
    case = loaded(row)
    hyper, rate = case.hyper, fn.scale_by_learning_rate(case.hyper["lr"])
    average = fn.contrib.primal_average(
        fn.chain(fn.scale_by_adam(*hyper["betas"], hyper["eps"]), rate),
        interpolation=hyper["mu_y"],
        averaging=hyper["mu_x"],
        decay=fn.chain(fn.add_decayed_weights(hyper["weight_decay"]), rate),
        decays="params" if hyper["wd_on_y"] else "fast",
    )
    tx = fn.skip_nonfinite(fn.chain(fn.average("data"), average))
    for t, params, state in replayed(case, tx, lambda step: Phase.WARMUP):
        found = {"param": params, "x": fn.contrib.primal_params(state, params), "z": tree.fields(state, "fast")[0]}
        found |= {"momentum": recorded_form(state, "mu", hyper["betas"])}
        found |= {"variance": recorded_form(state, "nu", hyper["betas"])}
        for name, leaves in found.items():
            for i, x in enumerate(leaves):
                case.hold(x, f"p{i}.{name}", t)


def test_every_recording_is_replayed() -> None:
    files = {row["file"] for rows in ROWS.values() for row in rows}
    assert files == {path.name for path in FOLDER.glob("*.npz") if not path.name.startswith("muon_")} | {
        row["file"] for method in ("sign_muon", "muon_bp") for row in ROWS[method]
    }
