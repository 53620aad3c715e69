"""What `fn.contrib.ef21_sgdm` promises beside the recorded runs and the common contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from recorded_codes import Case, Made, in_simulation, load
from simulated import normal, one_step

import fn
from fn import tree
from fn.adapters import checkpoint


def test_ef21_makes_its_step_with_the_new_gradient() -> None:
    """
    Differs: fn.contrib._ef21_sgdm.ef21_sgdm: the step is made with the new gradient; in the paper it is made before
        that.
    """
    g = torch.randn(2, 8)
    torch.testing.assert_close(one_step(fn.contrib.ef21_sgdm(0.5, 1.0, axis="data", k=8), g), -0.5 * g.mean(0))


def saved(folder: Path) -> str:
    """Save a state behind some steps; return how ranks with another k are refused."""
    with fn.bind({"data": dist.group.WORLD}):
        opt = built()
        for t in range(4):
            step(opt, t)
        checkpoint.save(folder, opt)
        try:
            fn.contrib.ef21_sgdm(0.1, axis="data", k=2 + dist.get_rank()).init([torch.zeros(4)])
        except fn.RanksDisagree as error:
            return str(error)
    return ""


def built() -> fn.Optimizer:
    p = torch.nn.Parameter(normal(6, 5))
    return fn.Optimizer(
        [p], lambda lr: fn.contrib.ef21_sgdm(lr, axis="data", k=0.2), schedule=fn.freeze_after(2), lr=0.1
    )


def step(opt: fn.Optimizer, t: int) -> None:
    (p,) = opt.param_groups[0]["params"]
    p.grad = normal(6, 5, seed=10 * t + dist.get_rank())
    opt.step()


def loaded(folder: Path) -> float:
    """Return how far the mean of the ranks' h is off what arrived, as a part of that."""
    with fn.bind({"data": dist.group.WORLD}):
        opt = built()
        checkpoint.load(folder, opt)
        h = fn.pmean(tree.fields(opt.states, "worker")[0][0], "data")
        total = torch.cat([x.flatten() for x in tree.leaves(tree.fields(opt.states, "total")[0])])
        return float((h - total).abs().max() / total.abs().max())


def test_on_another_number_of_ranks_the_mean_of_what_was_sent_is_still_what_arrived(tmp_path: Path) -> None:
    assert all("codec" in said or "top_k" in said for said in ranks.run(2, saved, tmp_path))
    assert max(ranks.run(3, loaded, tmp_path)) < 1e-5


@pytest.mark.parametrize(
    ("hyper", "text"),
    [
        ({"k": 9, "block": 8}, "k: expected a whole number .* at most 8"),
        ({"eta": 0.0}, r"eta: expected a number in \(0, 1\], but got 0.0"),
        ({"axis": ("local", "node")}, "feedback: expected .* to have a single axis"),
    ],
)
def test_bad_input_is_refused_by_name(hyper: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fn.contrib.ef21_sgdm(**{"axis": "data", **hyper})


def recorded(case: Case) -> Made:
    h = case.hyper
    k, block = h.get("k", h.get("density")), h.get("block")
    tx = fn.contrib.ef21_sgdm(h["lr"], h["eta"], axis="data", k=k, block=block)

    def look(before: Any, after: Any, g: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        momentum, mean, total, *_ = after.inner
        vector = mean.worker[0].split([s.numel() for s in case.shapes])
        estimates = [v.view(s) for v, s in zip(vector, case.shapes, strict=True)]
        return {"out": total.total, "estimate": estimates, "v": momentum.mu}

    def begin(state: Any, g: list[torch.Tensor]) -> Any:
        momentum, *rest = state.inner
        return state._replace(inner=(momentum._replace(mu=g), *rest))

    return tx, look, begin if h["start"] == "gradient" else None


RECORDED = load(Path(__file__).parent / "golden/ef21_sgdm", "index.json")


@pytest.mark.parametrize("case", RECORDED, ids=[case.row["name"] for case in RECORDED])
def test_the_recorded_run_is_replayed_in_simulated_ranks(case: Case) -> None:
    assert 0 < case.off(in_simulation(case, recorded(case))) <= 1
