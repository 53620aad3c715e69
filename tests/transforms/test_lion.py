"""Lion follows a loop in double precision, and with a sync the recorded runs of Distributed Lion.

`tests/golden/README_codecs.md` says what the arrays are.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import fn
from fn import Phase, tree

FOLDER = Path(__file__).parents[1] / "golden" / "compressors"


class Case(NamedTuple):
    """A recording: its row of the index, and its arrays by name."""

    row: dict[str, Any]
    arrays: dict[str, np.ndarray]


def load() -> list[Case]:
    rows = json.loads((FOLDER / "index_lion.json").read_text())["cases"]
    return [Case(row, dict(np.load(FOLDER / row["file"]))) for row in rows]


CASES = load()


def votes(tie: float) -> fn.Transform:
    """Return the mean of the ranks' signs; where it is 0, a tie or a vote of 0, it is `tie`."""
    ballots = fn.Codec(lambda x: torch.where(x > 0, 1.0, -1.0).to(torch.int8), lambda b: b.float(), 1, 8.0)
    mean = fn.compressed_average("data", ballots, fn.off(), servers=False)
    return fn.chain(mean, fn.stateless(lambda u, p: tree.map(lambda x: torch.where(x == 0, tie, x), u)))


@pytest.mark.parametrize("case", CASES, ids=[case.row["name"] for case in CASES])
def test_recorded_majorities_are_replayed(case: Case) -> None:
    """With a tie that counts as in the recording, which `scale_by_lion` leaves to `sync`.

    Differs: fn.transforms.lion.scale_by_lion: of Distributed Lion's votes `sync` gives the mean, and a tie, whose mean
        is 0, moves nothing; in the authors' code it counts as -1, as does a vote of 0.
    """
    hyper, world, count = case.row["hyper"], case.row["world"], len(case.row["shapes"])
    tie = 1.0 if hyper.get("ties") == "plus" else -1.0
    tx = fn.chain(
        fn.scale_by_lion(*hyper["betas"], sync=votes(tie)),
        fn.add_decayed_weights(hyper["weight_decay"]),
        fn.scale_by_learning_rate(hyper["lr"]),
    )
    start = [torch.from_numpy(case.arrays[f"p{i}.init"]) for i in range(count)]
    gradients = [torch.from_numpy(case.arrays[f"p{i}.grad"]) for i in range(count)]  # steps, ranks, shape

    def on_rank(gradients: list[Tensor]) -> Any:
        params, state, seen, momenta = start, tx.init(start), [], []
        for t in range(case.row["steps"]):
            updates, state = tx.update(Phase.COMPRESSED)([g[t] for g in gradients], state, params)
            params = fn.apply_updates(params, updates)
            seen.append(params)
            momenta.append(state[0].mu)
        return seen, momenta

    seen, momenta = fn.simulate(on_rank, "data", world, in_dims=1, out_dims=(None, 0))(gradients)
    for name, found in (("param", seen), ("mu", momenta)):
        for i in range(count):
            recorded = case.arrays[f"p{i}.{name}"]
            limit = case.row["tolerance"] * max(1.0, float(np.abs(recorded).max()))
            ours = torch.stack([each[i] for each in found]).numpy()
            np.testing.assert_allclose(ours, recorded, rtol=0, atol=limit, err_msg=f"p{i}.{name}")


def test_the_recordings_are_what_was_recorded():
    assert {case.row["world"] for case in CASES} == {1, 2, 3, 4}
    for case in CASES:
        assert hashlib.sha256((FOLDER / case.row["file"]).read_bytes()).hexdigest() == case.row["sha256"]


def test_zero_stays_zero_and_what_is_not_finite_is_seen():
    tx, g = fn.scale_by_lion(), torch.tensor([0.0, -3.0, float("nan"), float("inf")])
    updates, _ = tx.local_update(g, tx.init(g), g)
    assert updates[:2].tolist() == [0.0, -1.0]
    assert updates[2:].isnan().all()


def test_in_the_warm_up_the_sync_rests_and_with_it_momenta_are_a_ranks_own():
    tx, p = fn.scale_by_lion(sync=fn.compressed_average("data", fn.sign())), torch.ones(16)
    dims = fn.rank_dims(tx.init(p))
    assert dims.mu == 0
    assert fn.rank_dims(fn.scale_by_lion().init(p)).mu is None
    updates, _ = tx.warmup_update(-p, tx.init(p), p)
    assert torch.equal(updates, -p)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: fn.scale_by_lion(1.0), ValueError, r"b1: expected a number in \[0, 1\), but got 1.0"),
    ],
)
def test_bad_input_is_refused_by_name(make: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()
