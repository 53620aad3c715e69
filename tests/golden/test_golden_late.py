"""Recorded runs of directions that arrive a step late are followed in simulated ranks."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import recorded_weight
from torch import Tensor

import fn
from fn import roles, tree

FOLDER = Path(__file__).parent / "muon2"
ROWS = json.loads((FOLDER / "index_late.json").read_text())["cases"]

Step = dict[str, Tensor]
"""Arrays after a step, by the names that they have in a recording."""


def optimizer(hyper: Mapping[str, Any], lr: Tensor) -> fn.Transform:
    """Return the late optimizer of a recording, over the axis "data"."""
    b1, b2 = hyper["betas"]
    kinds = {
        "lion": fn.scale_by_lion(b1, b2),
        "adamw": fn.scale_by_adam(b1, b2, hyper["eps"]),
        "matrix": fn.scale_by_muon(
            hyper["mu"], hyper["nesterov"], eps=hyper["eps"], scale=hyper["adjust_lr"],
            coefficients=hyper["newton_schulz"], dtype=getattr(torch, hyper["precision"]),
        ),
    }  # fmt: skip
    direction = fn.partition(kinds, kinds_of(hyper))
    tx = fn.chain(
        fn.average("data"), direction, fn.add_decayed_weights(hyper["weight_decay"]), fn.scale_by_learning_rate(lr)
    )
    return fn.late(tx, correction=hyper["correction"])


def kinds_of(hyper: Mapping[str, Any]) -> list[str]:
    """Return the kind of each tensor; all are Lion's where that is the inner optimizer."""
    return ["lion" if hyper["inner"] == "lion" else kind for kind in hyper["kinds"]]


def rate(hyper: Mapping[str, Any], t: int) -> float:
    cosine = (1 + math.cos(math.pi * t / hyper["steps"])) / 2
    return float(hyper["lr"] * {None: 1.0, "cosine": cosine}[hyper["schedule"]])


def replay(row: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> list[Step]:
    """Take all steps of a recording from gradients at our own params; return the recorded arrays after each.

    Args: row: of an index. arrays: of its file, by name.
    """
    hyper = row["hyper"]
    dtype = torch.float64 if hyper["precision"] == "float64" else torch.float32
    of = {name: torch.from_numpy(np.asarray(x)).to(dtype) for name, x in arrays.items()}
    count = range(len(hyper["shapes"]))
    start, a, c = ([of[f"p{i}.{name}"] for i in count] for name in ("init", "a", "c"))  # c: (W, shape)
    noise = [of[f"p{i}.noise"].transpose(0, 1) for i in count]  # (T, W, shape) -> (W, T, shape)
    with_updates, lr = "p0.update" in arrays, torch.zeros((), dtype=torch.float64)
    tx, schedule = optimizer(hyper, lr), fn.every(1, delay=1)

    def run(c: list[Tensor], noise: list[Tensor]) -> list[Step]:
        params, state = [*start], tx.init(start)
        found = []
        for t in range(hyper["steps"]):
            lr.fill_(rate(hyper, t))
            grads = [x * (p - y) + n[t] for x, p, y, n in zip(a, params, c, noise, strict=True)]
            for j, first, end in hyper.get("zero", ()):
                grads[j] = torch.zeros_like(grads[j]) if first <= t < end else grads[j]
            before = params
            moves, state = tx.update(schedule(t))(grads, state, params)
            params = fn.apply_updates(params, moves)
            # Without a correction nothing keeps the update, and it is how far the params have come.
            updates = [-u for u in state.inner.last] or [x - y for x, y in zip(before, params, strict=True)]
            step = {f"p{i}.param": p for i, p in enumerate(params)} | moments(hyper, state)
            found.append(step | ({f"p{i}.update": u for i, u in enumerate(updates)} if with_updates else {}))
        return found

    steps = fn.simulate(run, "data", hyper["world"], out_dims=0)(c, noise)
    for x in tree.leaves(steps):
        assert all(torch.equal(x[0], other) for other in x)
    return only(arrays, tree.map(lambda x: x[0], steps))


def only(arrays: Mapping[str, Any], steps: list[Step]) -> list[Step]:
    """Return steps with the arrays that a recording has: those of originals have params alone."""
    return [{name: x for name, x in step.items() if name in arrays} for step in steps]


def moments(hyper: Mapping[str, Any], state: Any) -> Step:
    """Return momenta and variances by the names that a recording gives them."""
    (partitioned,) = [x for x in state.inner.inner if isinstance(x, dict)]
    found = {}
    for kind, own in partitioned.items():
        places = [i for i, of_tensor in enumerate(kinds_of(hyper)) if of_tensor == kind]
        for which, (name, role) in enumerate({"momentum": "first_moment", "variance": "second_moment"}.items()):
            weight = recorded_weight(own, which, hyper["betas"]) if kind == "adamw" else 1.0
            leaves = tree.leaves(roles.find(own, role))
            # Muon's matrices have no variance, and 0 is what is recorded of it.
            leaves = leaves or [torch.zeros_like(x) for x in tree.leaves(roles.find(own, "first_moment"))]
            found |= {f"p{i}.{name}": weight * x for i, x in zip(places, leaves, strict=True)}
    return found


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_the_recorded_run_is_replayed_in_simulated_ranks(row: dict[str, Any]) -> None:
    """Each array in each step.

    Differs: fn.transforms.late.late: the paper's text was not at hand; that decay and rate are part of the corrected
        update is that reading.
    """
    file = FOLDER / row["file"]
    assert hashlib.sha256(file.read_bytes()).hexdigest() == row["sha256"]
    arrays = dict(np.load(file))
    names = {name for name in arrays if name.split(".")[-1] not in ("init", "a", "c", "noise")}
    for t, step in enumerate(replay(row, arrays)):
        assert step.keys() == names
        for name, found in step.items():
            wanted = torch.from_numpy(arrays[name][t]).double()
            limit = row["tolerance"] * max(1.0, float(wanted.abs().max()))
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=limit, msg=f"{name} after step {t}")
