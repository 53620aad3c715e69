"""Local steps follow the recorded runs of DiLoCo, Streaming DiLoCo and local SGD, in simulated ranks and real ones."""

from __future__ import annotations

import hashlib
import json
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

    @property
    def count(self) -> int:
        return len(self.hyper["shapes"])

    @property
    def fragments(self) -> list[list[int]]:
        return self.hyper.get("fragments") or [[*range(self.count)]]

    def each(self, name: str) -> list[Tensor]:
        return [torch.from_numpy(self.arrays[f"p{i}.{name}"].copy()) for i in range(self.count)]

    def round_of(self, step: int) -> Phase | Round:
        """Return what happened in a step, as it was recorded."""
        if step < self.hyper.get("warmup", 0):
            return Phase.WARMUP
        ended = int(self.arrays["applied"][step])
        begun = int(self.arrays["prepared"][step]) if "prepared" in self.arrays else ended
        return Round(begun if begun >= 0 else None, ended if ended >= 0 else None)


def load() -> list[Case]:
    rows = json.loads((FOLDER / "index.json").read_text())["cases"]
    return [Case(row, dict(np.load(FOLDER / row["file"]))) for row in rows]


CASES = load()
each_case = pytest.mark.parametrize("case", CASES, ids=[case.row["name"] for case in CASES])


def inner_of(hyper: dict[str, Any]) -> fn.Transform:
    lr, decay = hyper["lr"], fn.add_decayed_weights(hyper.get("weight_decay", 0.0))
    if hyper["kind"] == "adamw":
        moments = fn.scale_by_adam(*hyper.get("betas", (0.9, 0.999)))
        return fn.chain(moments, decay, fn.scale_by_learning_rate(lr))
    return fn.chain(fn.trace(hyper.get("momentum", 0.0)), decay, fn.scale_by_learning_rate(lr))


def outer_of(hyper: dict[str, Any], lr: Tensor) -> fn.Transform:
    """Return the outer optimizer; the mean of the params, where there is none."""
    if not hyper.get("momentum"):
        return fn.scale_by_learning_rate(lr)
    return fn.chain(fn.trace(hyper["momentum"], hyper["nesterov"]), fn.scale_by_learning_rate(lr))


def transforms(case: Case, lr: Tensor) -> tuple[fn.Transform, fn.Transform]:
    """Return the transform, and one whose exchanges fail."""
    number = {i: f for f, places in enumerate(case.fragments) for i in places}

    def make(factor: float) -> fn.Transform:
        spoiled = fn.stateless(lambda u, p: tree.map(lambda x: x * factor, u))
        tx = fn.outer(
            inner_of(case.hyper["inner"]),
            outer_of(case.hyper.get("outer", {}), lr),
            fn.chain(fn.compressed_average("data", fn.identity(), fn.off()), spoiled),
            fragments=lambda params: [number[i] for i in range(len(params))],
            alpha=case.hyper.get("alpha", 0.0),
            on_skip="anchor",
        )
        return fn.skip_nonfinite(fn.chain(fn.average("data"), tx))

    return make(1.0), make(float("nan"))


def step_of(tx: fn.Transform, when: Phase | Round, g: Any, s: Any, p: Any) -> tuple[Any, Any]:
    updates, s = tx.update(when)(g, s, p)
    return fn.apply_updates(p, updates), s


def close(case: Case, ours: Tensor, name: str, row: int, rank: int | None) -> float:
    """Hold an array against the recorded one; return how far it is off, in units of the tolerance."""
    recorded = case.arrays[name][row]
    recorded = recorded if rank is None else recorded[rank]
    allowed = case.row["tolerance"] * max(1.0, float(np.abs(case.arrays[name]).max()))
    off = float(np.abs(ours.numpy().astype(np.float64) - recorded).max())
    assert off <= allowed, f"{case.row['name']} {name} row {row}: off by {off}, allowed {allowed}"
    return off / allowed


def replay(case: Case, step: Any, state: Any, params: list[Tensor], lr: Tensor, rank: int | None = None) -> float:
    """Take all steps, from gradients at our own params; return how far off anything was, in units of the tolerance.

    Args: step: (tx, when, gradients, state, params) -> (params, state). rank: of the arrays; None: all ranks.
    """
    a, c, noise = case.each("a"), case.each("c"), case.each("noise")
    good, failing = transforms(case, lr)
    begun, ended, worst = [0] * case.count, [0] * case.count, 0.0
    attempt, exchange = 0, 0
    failed = set(case.hyper.get("fail", ()))
    for t in range(int(case.hyper["steps"])):
        when = case.round_of(t)
        mine = [(x[t], y) if rank is None else (x[t, rank], y[rank]) for x, y in zip(noise, c, strict=True)]
        grads = [x * (p - y) + n for x, p, (n, y) in zip(a, params, mine, strict=True)]
        ends = isinstance(when, Round) and when.end is not None
        if ends and "outer_lrs" in case.hyper:
            lr.fill_(case.hyper["outer_lrs"][exchange])
        spoil = isinstance(when, Round) and when.begin is not None and attempt in failed
        with fn.ledger() as sent:
            params, state = step(failing if spoil else good, when, grads, state, params)
        if "bytes" in case.arrays and case.world > 1:
            assert (sent.total > 0) == bool(case.arrays["bytes"][t].any()), f"step {t}"
        worst = max([worst, *(close(case, p, f"p{i}.param", t, rank) for i, p in enumerate(params))])
        own = state.inner[1]
        for name, field in (("exp_avg", "mu"), ("exp_avg_sq", "nu")):
            if f"p0.{name}" in case.arrays:
                (leaves,) = tree.fields(own.inner, field)
                worst = max([worst, *(close(case, x, f"p{i}.{name}", t, rank) for i, x in enumerate(leaves))])
        if not isinstance(when, Round) or "p0.anchor" not in case.arrays:
            continue
        if when.begin is not None:
            for i in case.fragments[when.begin]:
                if when.end is None and attempt not in failed:
                    worst = max(worst, close(case, own.pending[i], f"p{i}.mean", begun[i], rank or 0))
                begun[i] += 1
            attempt += 1
        if when.end is not None:
            exchange += 1
            momenta = tree.fields(own.outer[when.end], "mu")
            for place, i in enumerate(case.fragments[when.end]):
                worst = max(worst, close(case, own.anchor[i], f"p{i}.anchor", ended[i], rank or 0))
                if momenta:
                    buffer = momenta[0][place]
                    worst = max(worst, close(case, buffer, f"p{i}.outer_momentum", ended[i], rank or 0))
                ended[i] += 1
    return worst


def replay_simulated(case: Case) -> float:
    lr = torch.tensor(float(case.hyper.get("outer", {}).get("lr", 1.0)))
    tx, _ = transforms(case, lr)
    start = case.each("init")
    dims = fn.rank_dims(tx.init(start))
    state = fn.simulate(tx.init, "data", case.world, in_dims=None, out_dims=dims)(start)
    params = [p.expand(case.world, *p.shape).clone() for p in start]

    def step(tx: fn.Transform, when: Phase | Round, *args: Any) -> tuple[Any, Any]:
        run = partial(step_of, tx, when)
        return fn.simulate(run, "data", case.world, in_dims=(0, dims, 0), out_dims=(0, dims))(*args)

    return replay(case, step, state, params, lr)


@each_case
def test_the_recorded_run_is_replayed_in_simulated_ranks(case: Case) -> None:
    """Anchor, means and outer momentum are replicated, which `simulate` checks.

    Differs: fn.local_optimizers.diloco: if an exchange is not finite, the ranks keep their params; torchft takes all of
        them back to the anchor, as on_skip="anchor" does.
    """
    assert 0 < replay_simulated(case) <= 1


def test_every_is_the_schedule_of_the_recorded_runs() -> None:
    """But of those whose rounds have other lengths, see tests/golden/outer/README.md."""
    others = ("diloco_gym", "post_localsgd")
    alike = [case for case in CASES if case.row["method"] not in others and "fail" not in case.hyper]
    assert len(alike) > 10
    for case in alike:
        check_schedule(case)


def check_schedule(case: Case) -> None:
    steps = range(int(case.hyper["steps"]))
    schedule = fn.every(case.hyper["H"], fragments=len(case.fragments), delay=case.hyper.get("tau", 0))
    assert [schedule(t) for t in steps] == [case.round_of(t) for t in steps]


def test_the_recordings_are_what_was_recorded() -> None:
    for case in CASES:
        assert hashlib.sha256((FOLDER / case.row["file"]).read_bytes()).hexdigest() == case.row["sha256"]


def replay_here(cases: list[Case]) -> list[float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    found = []
    with fn.bind(mesh):
        for case in cases:
            lr = torch.tensor(float(case.hyper.get("outer", {}).get("lr", 1.0)))
            tx, _ = transforms(case, lr)
            start = case.each("init")
            found.append(replay(case, step_of, tx.init(start), start, lr, dist.get_rank()))
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_the_recorded_runs_are_replayed_by_real_ranks(world: int) -> None:
    cases = [case for case in CASES if case.world == world]
    for found in ranks.run(world, replay_here, cases):
        assert 0 < max(found) <= 1
