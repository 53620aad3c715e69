"""Muon follows the recorded runs of its authors' code, and of Dion's: `tests/golden/README_muon.md`."""

from __future__ import annotations

from typing import Any

import chains
import pytest
import torch
from golden_cases import recorded_weight
from recorded_muon import FOLDER, Case, each_of, load, replayed, replayed_at
from torch import Tensor

import fn
from fn import Phase, roles

CASES = [case for case in load(FOLDER, "index_muon.json") if case.row["name"] != "muon_w2_flatten"]  # a defect there
each_case = pytest.mark.parametrize("case", CASES, ids=[case.row["name"] for case in CASES])


def muon(case: Case, kind: str, **more: Any) -> fn.Transform:
    """Return what ran. kind: of the tensors that are compared; of "kj" matrices have an eps of their own."""
    hyper = case.hyper
    eps = 1e-7 / (1 - hyper["mu"]) if (hyper["source"], kind) == ("kj", "matrix") else hyper["eps"]
    other = "adamw" if kind == "matrix" else kind
    others = case.places("adamw") + case.places("lion")
    hidden = ["other" if i in others else "hidden" for i in range(len(hyper["shapes"]))]
    return chains.muon(
        hyper["lr"], hyper["mu"], hyper["weight_decay"], *hyper["betas"], eps, axis="data", labels=hidden,
        nesterov=hyper["nesterov"], scale=hyper["adjust_lr"], coefficients=hyper["newton_schulz"],
        dtype=getattr(torch, hyper["precision"]), cautious=hyper["cautious_wd"], other=other,
        other_rate=hyper["scalar_lr"] / hyper["lr"], **more,
    )  # fmt: skip


def replay(case: Case, tx: fn.Transform, kind: str) -> None:
    """Take all steps in simulated ranks, and hold params, momenta and variances of a kind to the recorded ones.

    Kinds are replayed one by one, because a run may have both AdamW and Lion; tensors do not see each other.
    """
    for t, params, state in replayed(case, tx, lambda step: Phase.WARMUP):
        for i in case.places(kind):
            case.hold(params[i], f"p{i}.param", t)
        for name, role in (("momentum", "first_moment"), ("variance", "second_moment")):
            if case.hyper["source"] != "kj" or name == "variance":
                hold_moments(case, state, kind, name, role, t)


def hold_moments(case: Case, state: Any, kind: str, name: str, role: str, step: int) -> None:
    label = "muon" if kind == "matrix" else kind
    places = [i for i, k in enumerate(case.hyper["kinds"]) if (k == "matrix") == (kind == "matrix")]
    is_owned = hasattr(state.inner, "owners")  # simulated ranks have zeros for what others own
    own = (state.inner.inner if is_owned else state.inner[1])[label]
    weight = recorded_weight(own, int(role == "second_moment"), case.hyper["betas"])
    for values in roles.find(own, role):
        for i, moment in zip(places, values, strict=True):
            if i in case.places(kind):
                case.hold(weight * (moment.sum(0) if is_owned else moment), f"p{i}.{name}", step)


@pytest.mark.parametrize("owned", [False, True], ids=["replicated", "owned"])
@each_case
def test_the_recorded_run_is_replayed(case: Case, owned: bool) -> None:
    """From gradients at our own params.

    Differs: fn.muon_optimizers.muon: the iterations are in float32 unless dtype=torch.bfloat16 is given, which all
        originals use.
    """
    for kind in sorted({*case.hyper["kinds"]}):
        replay(case, muon(case, kind, owned=owned), kind)


def test_the_run_of_shards_is_replayed_on_shards() -> None:
    """Each of four ranks has its rows of params and momenta; of the vector of 11 elements the last one has two."""
    (case,) = [case for case in CASES if case.hyper.get("shard") is not None]
    assert case.hyper["shard"] == 0
    tx = muon(case, "matrix", shards=fn.Shards("shard", *shapes_and_dims(case)))
    params, shapes = case.each("init"), [tuple(shape) for shape in case.hyper["shapes"]]
    pieces = [in_rows(p, case.world) for p in params]
    with fn.collectives.axis.Binding({"data": fn.collectives.axis.Axis(1, torch.tensor(0), "alone")}):
        state = fn.simulate(tx.init, "shard", case.world)(pieces)

        def step(g: Any, s: Any, p: Any) -> Any:
            updates, s = tx.update(Phase.WARMUP)(g, s, p)
            return fn.apply_updates(p, updates), s

        for t in range(int(case.hyper["steps"])):
            grads = [in_rows(g.mean(0), case.world) for g in case.gradients(params, t)]
            pieces, state = fn.simulate(step, "shard", case.world)(grads, state, pieces)
            params = [p.flatten(0, 1)[: shape[0]] for p, shape in zip(pieces, shapes, strict=True)]
            for i, p in enumerate(params):
                case.hold(p, f"p{i}.param", t)
            (momenta,) = roles.find(state.inner[1]["muon"], "first_moment")
            for i, mu in zip(case.places("matrix"), momenta, strict=True):
                case.hold(mu.flatten(0, 1)[: shapes[i][0]], f"p{i}.momentum", t)


def shapes_and_dims(case: Case) -> tuple[Any, Any]:
    shapes = tuple(tuple(shape) for shape in case.hyper["shapes"])
    return shapes, tuple(0 for _ in shapes)


def in_rows(x: Tensor, world: int) -> Tensor:
    """Return the rows of each rank, (W, n / W, ...), zeros behind the last."""
    rows = -(-x.shape[0] // world)
    padding = x.new_zeros((world * rows - x.shape[0], *x.shape[1:]))
    return torch.cat([x, padding]).view(world, rows, *x.shape[1:])


@each_of(FOLDER, "index_sign_muon.json")
def test_signs_of_muon_follow_their_authors_code(case: Case) -> None:
    """Where ties are 0, without servers; with an odd number of ranks there are none."""
    hyper = case.hyper
    sent = "directions" if hyper["variant"].endswith("signmuon") else "momenta"
    tx = chains.sign_muon(
        hyper["lr"], hyper["mu"], hyper["weight_decay"], votes=sent, servers=case.world % 2 == 1,
        axis="data", scale=None, flatten=True,
    )  # fmt: skip
    for t, w, params, _ in replayed_at(case, tx, lambda step: Phase.COMPRESSED, None):
        for i, (x, p) in enumerate(zip(w, params, strict=True)):
            case.hold(p, f"p{i}.param", t)
            case.hold(x, f"p{i}.at", t)


def test_every_recording_is_replayed() -> None:
    files = {case.row["file"] for index in ("index_muon.json", "index_sign_muon.json") for case in load(FOLDER, index)}
    assert files == {path.name for path in FOLDER.glob("*.npz")}
