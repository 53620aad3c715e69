"""Local steps follow the recorded runs of SparseLoCo: whole runs, from gradients at our own params.

`tests/golden/README_codecs.md` says what the arrays are, and how the authors cut tensors into chunks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, Round, tree
from fn.transforms.bases import Basis

FOLDER = Path(__file__).parent / "golden" / "outer"


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

    def each(self, name: str) -> list[Tensor]:
        return [torch.from_numpy(self.arrays[f"p{i}.{name}"].copy()) for i in range(len(self.hyper["shapes"]))]

    def off(self, ours: Tensor, name: str, row: int, rank: int | None) -> float:
        """Hold an array against the recorded one; return how far it is off, in units of the tolerance."""
        recorded = self.arrays[name][row]
        recorded = recorded if rank is None else recorded[rank]
        allowed = self.row["tolerance"] * max(1.0, float(np.abs(self.arrays[name]).max()))
        off = float(np.abs(ours.numpy().astype(np.float64) - recorded).max())
        assert off <= allowed, f"{self.row['name']} {name} row {row}: off by {off}, allowed {allowed}"
        return off / allowed


def load() -> list[Case]:
    rows = json.loads((FOLDER / "index_codecs.json").read_text())["cases"]
    found = [Case(row, dict(np.load(FOLDER / row["file"]))) for row in rows if row["method"] == "sparseloco"]
    assert len(found) > 3
    return found


CASES = load()
each_case = pytest.mark.parametrize("case", CASES, ids=[case.row["name"] for case in CASES])


def largest_divisor(n: int, most: int) -> int:
    return max(d for d in range(1, most + 1) if n % d == 0)


def authors_chunks(size: int, cls: str) -> Basis:
    """Return the basis of the authors: pieces of sides as long as their largest divisor; in CCLoco whole rows."""

    def block(shape: Sequence[int]) -> tuple[int, int]:
        if len(shape) == 2 and cls == "CCLoco":
            return 1, shape[1]
        height = largest_divisor(shape[0], size) if len(shape) == 2 else 1
        return height, largest_divisor(shape[-1], size)

    def into(x: Tensor) -> list[Tensor]:
        (height, width), matrix = block(x.shape), x.reshape(-1, x.shape[-1])
        split = matrix.reshape(matrix.shape[0] // height, height, matrix.shape[1] // width, width)
        return [split.transpose(1, 2).reshape(-1, height * width)]

    def back(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
        height, width = block(shape)
        split = parts[0].reshape(-1, shape[-1] // width, height, width)
        return split.transpose(1, 2).reshape(shape)

    return Basis(into, back)


def transform(case: Case) -> fn.Transform:
    """Return what ran: `fn.sparse_loco`, but for the authors' chunks, their second rate, and an outer momentum."""
    inner, outer, cls = case.hyper["inner"], case.hyper["outer"], case.hyper["cls"]
    size, most = outer["chunk_size"], outer["top_k"]
    coded = outer["use_quantization"]
    values = fn.bins(outer["quantization_bins"], outer["quantization_range"]) if coded else None

    def mean(n: int) -> fn.Transform:
        kept = min(most, n) if cls == "CCLoco" else round(n * most / size**2)
        codec = fn.top_k(min(n, max(1, kept)), n, over="senders", values=values)
        return fn.compressed_average("data", codec, fn.decayed(outer["error_decay"]), servers=False)

    assert inner["kind"] == "adamw"
    lr, decay = inner["lr"], fn.add_decayed_weights(inner["weight_decay"])
    rate = fn.stateless(lambda u, p: tree.map(lambda x: outer["lr"] * x, u))
    momentum = [fn.trace(outer["momentum"], outer["nesterov"])] if outer.get("momentum") else []
    shrink = fn.add_decayed_weights(outer.get("weight_decay", 0.0))
    return fn.outer(
        fn.chain(fn.scale_by_adam(), decay, fn.scale_by_learning_rate(lr)),
        fn.chain(*momentum, shrink, fn.scale_by_learning_rate(outer["lr"])),
        fn.chain(rate, fn.in_basis(authors_chunks(size, cls), mean)),
    )


def step_of(tx: fn.Transform, when: Phase | Round, g: Any, s: Any, p: Any) -> tuple[Any, Any]:
    updates, s = tx.update(when)(g, s, p)
    return fn.apply_updates(p, updates), s


def replay(case: Case, step: Any, state: Any, params: list[Tensor], rank: int | None = None) -> float:
    """Take all steps; return how far off anything was, in units of the tolerance. rank: None is all of them."""
    a, c, noise = case.each("a"), case.each("c"), case.each("noise")
    schedule, exchange, worst = fn.every(case.hyper["H"]), 0, 0.0
    for t in range(int(case.hyper["steps"])):
        when = schedule(t)
        assert (when == Round(0, 0)) == (case.arrays["applied"][t] >= 0)
        mine = [(x[t], y) if rank is None else (x[t, rank], y[rank]) for x, y in zip(noise, c, strict=True)]
        grads = [x * (p - y) + n for x, p, (n, y) in zip(a, params, mine, strict=True)]
        params, state = step(when, grads, state, params)
        found = {"param": params, **{name: tree.fields(state.inner, field)[0] for name, field in MOMENTS.items()}}
        for name, each in found.items():
            worst = max([worst, *(case.off(x, f"p{i}.{name}", t, rank) for i, x in enumerate(each))])
        if when == Round(0, 0):
            replicated = {"anchor": state.anchor}
            if "p0.outer_momentum" in case.arrays:
                (replicated["outer_momentum"],) = tree.fields(state.outer, "mu")
            for name, each in replicated.items():
                worst = max([worst, *(case.off(x, f"p{i}.{name}", exchange, rank or 0) for i, x in enumerate(each))])
            exchange += 1
    assert exchange == case.arrays["p0.anchor"].shape[0]
    return worst


MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu"}


@each_case
def test_the_recorded_run_is_replayed_in_simulated_ranks(case: Case) -> None:
    """The differences are multiplied by the outer rate here, which `fn.sparse_loco` leaves out.

    Differs: fn.local_optimizers.sparse_loco: `outer_lr` counts once; in the code it multiplies the differences, too,
        and counts twice.
    """
    tx, start = transform(case), case.each("init")
    dims = fn.rank_dims(tx.init(start))
    state = fn.simulate(tx.init, "data", case.world, in_dims=None, out_dims=dims)(start)

    def step(when: Phase | Round, *args: Any) -> tuple[Any, Any]:
        run = partial(step_of, tx, when)
        return fn.simulate(run, "data", case.world, in_dims=(0, dims, 0), out_dims=(0, dims))(*args)

    assert 0 < replay(case, step, state, [p.expand(case.world, *p.shape).clone() for p in start]) <= 1


def test_the_named_method_is_what_was_replayed_where_tiles_divide_the_sides():
    """Bitwise, in two rounds of three ranks; tests/transforms/test_bases.py holds other sides against their tiles."""
    outer = {"lr": 1.0, "error_decay": 0.95, "top_k": 3, "chunk_size": 4, "use_quantization": True}
    outer |= {"quantization_bins": 4, "quantization_range": 6}
    inner = {"kind": "adamw", "lr": 0.02, "weight_decay": 0.1}
    ours = fn.sparse_loco(0.02, weight_decay=0.1, axis="data", k=3, tile=4)
    theirs = transform(Case({"hyper": {"inner": inner, "outer": outer, "cls": "SparseLoCo"}}, {}))
    start = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate([(8, 12), (16,)])]
    gradients = [torch.randn(6, 3, *p.shape, generator=torch.Generator().manual_seed(9)) for p in start]

    def on_rank(tx: fn.Transform, gradients: list[Tensor]) -> list[Tensor]:
        params, state = start, tx.init(start)
        for t in range(6):
            params, state = step_of(tx, fn.every(3)(t), [g[t] for g in gradients], state, params)
        return params

    found = [fn.simulate(partial(on_rank, tx), "data", 3, in_dims=1, out_dims=None)(gradients) for tx in (ours, theirs)]
    for p, x, y in zip(start, *found, strict=True):
        assert torch.equal(x, y)
        assert not torch.equal(x, p)


def replay_here(cases: list[Case]) -> list[float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    found = []
    with fn.bind(mesh):
        for case in cases:
            tx, start = transform(case), case.each("init")
            found.append(replay(case, partial(step_of, tx), tx.init(start), start, dist.get_rank()))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_the_recorded_runs_are_replayed_by_real_ranks(world: int) -> None:
    for found in ranks.run(world, replay_here, [case for case in CASES if case.world == world]):
        assert 0 < max(found) <= 1
