"""Recorded runs of Muon and of methods on it: what they hold, how ours are run beside them; `golden/README_muon.md`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Recording, recordings
from torch import Tensor

import fn
from fn import Phase

FOLDER = Path(__file__).parent / "golden" / "muon"


class Case(Recording):
    """A recording of Muon."""

    def places(self, kind: str) -> list[int]:
        return [i for i, given in enumerate(self.hyper["kinds"]) if given == kind]

    def gradients(self, params: list[Tensor], step: int, piece: Callable[..., Tensor] | None = None) -> list[Tensor]:
        """Return those of all ranks, (W, shape). piece: (numbers, place of a tensor) -> this rank's, as params are."""
        piece = piece or (lambda x, i: x)
        a, c, noise = ([piece(x, i) for i, x in enumerate(self.each(name))] for name in ("a", "c", "noise"))
        grads = [x * (p - y) + n[step] for x, p, y, n in zip(a, params, c, noise, strict=True)]
        for j, first, end in self.hyper.get("zero", ()):
            grads[j] = torch.zeros_like(grads[j]) if first <= step < end else grads[j]
        return grads

    def hold(self, ours: Tensor, name: str, step: int) -> None:
        recorded = self.arrays[name][step].astype(np.float64)
        limit = self.row["tolerance"] * max(1.0, float(np.abs(recorded).max()))
        np.testing.assert_allclose(ours.double().numpy(), recorded, rtol=0, atol=limit, err_msg=f"{name} {step}")


def load(folder: Path, index: str) -> list[Case]:
    """Return the recordings that an index lists, each in the precision in which it ran."""
    found = []
    for row, arrays in recordings(folder, index):
        if row["hyper"].get("precision") == "float64":  # its problem is written down in float32
            arrays = {name: x.astype(np.float64) for name, x in arrays.items()}
        found.append(Case(row, arrays))
    return found


def each_of(folder: Path, index: str = "index.json") -> Any:
    cases = load(folder, index)
    assert {case.row["file"] for case in cases} <= {path.name for path in folder.glob("*.npz")}
    return pytest.mark.parametrize("case", cases, ids=[case.row["name"] for case in cases])


def replayed(case: Case, tx: fn.Transform, schedule: Callable[[int], Phase]) -> Iterator[tuple[int, list[Tensor], Any]]:
    """Take all steps in simulated ranks, from gradients at our own params; yield each with params and state after it.

    That `simulate` returns one copy of the params shows that they are the same on all ranks.
    """
    for t, _, params, state in replayed_at(case, tx, schedule, None):
        yield t, params, state


def replayed_at(
    case: Case, tx: fn.Transform, schedule: Callable[[int], Phase], codec: fn.Codec | None
) -> Iterator[tuple[int, list[Tensor], list[Tensor], Any]]:
    """Take steps from gradients at the clients' model w; yield each with that w, params and state after it.

    codec: of what a server sends back, w <- w + C(p - w). Ranks of ours have no server: they take its step themselves,
    and w is made here. None: w is p.
    """
    params = w = case.each("init")
    dims = fn.rank_dims(tx.init(params))
    state = fn.simulate(tx.init, "data", case.world, in_dims=None, out_dims=dims)(params)

    def step(phase: Phase, g: Any, s: Any, p: Any) -> Any:
        updates, s = tx.update(phase)(g, s, p)
        return fn.apply_updates(p, updates), s

    for t in range(int(case.hyper["steps"])):
        on_rank = partial(step, schedule(t))
        run = fn.simulate(on_rank, "data", case.world, in_dims=(0, dims, None), out_dims=(None, dims))
        params, state = run(case.gradients(w, t), state, params)
        yield t, w, params, state
        w = params if codec is None else [x + _coded(codec, p - x) for x, p in zip(w, params, strict=True)]


def _coded(codec: fn.Codec, x: Tensor) -> Tensor:
    return codec.decode(codec.encode(x.reshape(1, -1))).view(x.shape)


def mean_sign() -> fn.Codec:
    """Return C(x) = mean |x| sign x of a tensor, as numbers."""
    return fn.Codec(lambda x: x.abs().mean(1, keepdim=True) * x.sign(), lambda sent: sent, 1, 1.0)


def labels(case: Case) -> list[str]:
    return ["hidden" if kind == "matrix" else "other" for kind in case.hyper["kinds"]]
