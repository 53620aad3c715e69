"""The recorded runs in `tests/golden/outer` and `tests/golden/rounds`: what they hold, how ours are run beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, Round

FOLDER = Path(__file__).parent / "golden" / "outer"
ROUNDS = Path(__file__).parent / "golden" / "rounds"


class Case(NamedTuple):
    """A recording: its row of the index, and its arrays by name."""

    row: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def hyper(self) -> dict[str, Any]:
        return self.row["hyper"]

    @property
    def world(self) -> int:
        return int(self.hyper["world"])

    @property
    def count(self) -> int:
        return len(self.hyper["shapes"])

    def each(self, name: str) -> list[Tensor]:
        return [torch.from_numpy(self.arrays[f"p{i}.{name}"].copy()) for i in range(self.count)]

    def gradients(self, rank: int | None) -> Callable[[int, list[Tensor]], list[Tensor]]:
        """Return (step, params) -> the gradients of a rank; None: of all ranks."""
        a, c, noise = self.each("a"), self.each("c"), self.each("noise")

        def at(t: int, params: list[Tensor]) -> list[Tensor]:
            mine = [(x[t], y) if rank is None else (x[t, rank], y[rank]) for x, y in zip(noise, c, strict=True)]
            return [x * (p - y) + n for x, p, (n, y) in zip(a, params, mine, strict=True)]

        return at

    def off(self, ours: Tensor, name: str, row: int, rank: int | None) -> float:
        """Hold an array against the recorded one; return how far it is off, in units of the tolerance."""
        recorded = self.arrays[name][row]
        recorded = recorded if rank is None else recorded[rank]
        allowed = self.row["tolerance"] * max(1.0, float(np.abs(self.arrays[name]).max()))
        off = float(np.abs(ours.numpy().astype(np.float64) - recorded).max())
        assert off <= allowed, f"{self.row['name']} {name} row {row}: off by {off}, allowed {allowed}"
        return off / allowed


def load(index: str, folder: Path = FOLDER) -> list[Case]:
    rows = json.loads((folder / index).read_text())["cases"]
    return [Case(row, dict(np.load(folder / row["file"]))) for row in rows]


def step_of(tx: fn.Transform, when: Phase | Round, g: Any, s: Any, p: Any) -> tuple[Any, Any]:
    updates, s = tx.update(when)(g, s, p)
    return fn.apply_updates(p, updates), s


def in_simulation(
    case: Case, tx: fn.Transform, of_rank: Callable[..., tuple[Any, Any]] = step_of
) -> tuple[Callable[..., tuple[Any, Any]], Any, list[Tensor]]:
    """Return a step as `step_of` of all ranks together, and the state and the params that they start with.

    Args: of_rank: what takes the step of a rank, with the arguments of `step_of`.
    """
    start = case.each("init")
    dims = fn.rank_dims(tx.init(start))
    state = fn.simulate(tx.init, "data", case.world, in_dims=None, out_dims=dims)(start)

    def step(tx: fn.Transform, when: Phase | Round, *args: Any) -> tuple[Any, Any]:
        run = partial(of_rank, tx, when)
        return fn.simulate(run, "data", case.world, in_dims=(0, dims, 0), out_dims=(0, dims))(*args)

    return step, state, [p.expand(case.world, *p.shape).clone() for p in start]


def on_this_rank(replay: Callable[[Case, int], float], cases: list[Case]) -> list[float]:
    """Return what a replay on this rank of a real group finds for each case."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    with fn.bind(mesh):
        return [replay(case, dist.get_rank()) for case in cases]
