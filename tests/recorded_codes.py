"""Recorded runs of compressors: what they hold, how ours are run beside them; `tests/golden/README_codecs.md`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from golden_cases import Recording, recordings
from torch import Tensor

import fn
from fn import Phase
from fn.collectives.codecs.codec import Segments, segmented
from fn.collectives.compressed import encode

FOLDER = Path(__file__).parent / "golden" / "compressors"
Tree = Any
Found = dict[str, list[Tensor]]
"""By the name of a recorded array, what is to be held against it after each step."""

Made = tuple[fn.Transform, Callable[[Tree, Tree, list[Tensor]], dict[str, list[Tensor]]], Any]
"""What runs; (state before, state after, gradients) -> what is recorded of a step beside the params; and `begin`."""

ALL: Mapping[str, np.ndarray] = MappingProxyType({})


class Case(Recording):
    """A recording of a compressor."""

    @property
    def shapes(self) -> list[torch.Size]:
        return [*map(torch.Size, self.row["shapes"])]

    def off(self, found: Found, where: Mapping[str, np.ndarray] = ALL) -> float:
        """Return how far the first steps are off, in units of the tolerance.

        Args: where: by name, elements (steps, *shape) that alone are compared.
        """
        worst = 0.0
        for name, steps in found.items():
            ours, theirs = (x.astype(np.float64) for x in (torch.stack(steps).numpy(), self.arrays[name][: len(steps)]))
            off = np.abs(ours.reshape(theirs.shape) - theirs)
            if name in where:
                off = off[where[name][: len(steps)]]
            rows = np.abs(theirs).reshape(len(theirs), -1).max(1)
            allowed = self.row["tolerance"] * max(1.0, float(rows.min()))
            worst = max(worst, float(off.max(initial=0.0)) / allowed)
        return worst


def load(folder: Path, *indices: str) -> list[Case]:
    """Return the recordings that index files of a folder list."""
    return [Case(*recording) for recording in recordings(folder, *indices)]


def run(case: Case, made: Made, grads: list[Tensor]) -> Found:
    """Take a step for each gradient. begin: (state, first gradients) -> state, for a start in the warm-up; or None."""
    tx, look, begin = made
    params, found = case.each("init"), dict[str, list[Tensor]]()
    state = tx.init(params)
    state = begin(state, [g[0] for g in grads]) if begin else state
    for t in range(len(grads[0])):
        g = [each[t] for each in grads]
        before = state
        updates, state = tx.update(Phase.WARMUP if begin and t == 0 else Phase.COMPRESSED)(g, state, params)
        params = fn.apply_updates(params, updates)
        for name, values in {"param": params, **look(before, state, g)}.items():
            for i, value in enumerate(values):
                found.setdefault(f"p{i}.{name}", []).append(value)
    return found


def in_simulation(case: Case, made: Made) -> Found:
    """Return what simulated ranks find; of what is recorded once, what the first of them has."""
    f = fn.simulate(partial(run, case, made), "data", case.world, in_dims=1)
    own = {name: a.ndim for name, a in case.arrays.items()}
    return {name: [x if own[name] > x.ndim else x[0] for x in xs] for name, xs in f(case.each("grad")).items()}


def alone(x: Tensor, codec: fn.Codec, feedback: fn.Feedback, error: Tensor) -> tuple[Tensor, Tensor]:
    """Return what arrives of a vector (n,) from one rank, and the next error."""
    row = segmented(codec, Segments((len(x),), torch.tensor([[len(x)]])))
    payload, error = encode(row, feedback, x[None], error)
    return row.decode(payload)[0], error
