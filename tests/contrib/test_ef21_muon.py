"""What `fn.contrib.ef21_muon` promises beside the recorded runs and the common contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_muon import Case, each_of, mean_sign, replayed_at
from simulated import normal, one_step

import fn
from fn import Phase

W, C = Phase.WARMUP, Phase.COMPRESSED
FOLDER = Path(__file__).parent / "golden/ef21_muon"


def test_other_tensors_step_along_signs() -> None:
    """A rate of 0.2 makes them as long as Muon's steps."""
    assert one_step(fn.contrib.ef21_muon(0.1, axis="data"), normal(3, 7)).abs().max() == pytest.approx(0.02)


def test_ranks_may_send_directions_that_each_has_orthogonalised() -> None:
    g = normal(2, 6, 5)
    tx = fn.contrib.ef21_muon(0.1, 1.0, axis="data", codec=fn.identity(), sends="directions")
    each = [fn.orthogonalize(eps=1e-7, scale="rms_norm", coefficients="jordan").local_update(x, (), x)[0] for x in g]
    torch.testing.assert_close(one_step(tx, g), -0.1 * torch.stack(each).mean(0))


@pytest.mark.parametrize(
    ("make", "kind", "match"),
    [
        (lambda: fn.contrib.ef21_muon(axis="data", sends=1), ValueError, "sends: expected .momenta. or .directions."),
        (lambda: fn.contrib.ef21_muon(axis="data", eta=0.0), ValueError, "eta: expected"),
        (
            lambda: fn.contrib.ef21_muon(axis=("local", "node")),
            ValueError,
            "feedback: expected .* to have a single axis",
        ),
    ],
)
def test_what_is_wrong_is_named(make: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        make()


@each_of(FOLDER, "index_signs.json")
def test_ef21_muon_follows_its_authors_code(case: Case) -> None:
    """
    Differs: fn.contrib._ef21_muon.ef21_muon: ranks add up what all send and take the step themselves; in the paper
        a server takes it and sends the model back, in codes as well.
    """
    hyper, variant = case.hyper, case.hyper["variant"]
    tx = fn.contrib.ef21_muon(
        hyper["lr"], 1 - hyper["mu"], hyper["weight_decay"], axis="data", codec=mean_sign(), scale=None, flatten=True,
        sends="directions" if variant.endswith("signmuon") else "momenta",
    )  # fmt: skip
    back = mean_sign() if variant == "ef21muonsign" else None
    for t, w, params, _ in replayed_at(case, tx, lambda step: C, back):
        for i, (x, p) in enumerate(zip(w, params, strict=True)):
            case.hold(p, f"p{i}.param", t)
            case.hold(x, f"p{i}.at", t)


@each_of(FOLDER)
def test_ef21_muon_follows_the_equations_of_its_paper(case: Case) -> None:
    """Both ways: params, clients' models, momenta, what was sent of them, and its sum."""
    hyper = case.hyper
    tx = fn.contrib.ef21_muon(
        hyper["lr"], hyper["beta"], hyper["weight_decay"], axis="data", codec=fn.top_k(hyper["density"]),
        scale=None,
    )  # fmt: skip
    back = None if hyper["down"] == 1 else fn.top_k(hyper["down"])
    for t, w, params, state in replayed_at(case, tx, lambda step: C, back):
        momentum, (mean, total), *_ = state.inner
        sizes, shapes = [p.numel() for p in params], [p.shape for p in params]
        sent = [x.view(-1, *shape) for x, shape in zip(mean.worker[0].split(sizes, 1), shapes, strict=True)]
        for name, leaves in {
            "param": params, "at": w, "estimate": total.total, "client_momentum": momentum.mu, "client_estimate": sent,
        }.items():  # fmt: skip
            for i, x in enumerate(leaves):
                case.hold(x, f"p{i}.{name}", t)
