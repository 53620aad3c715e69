"""Faults that users meet: restarts under torchrun, ranks that do not match, bad numbers. Kills: `test_transactions`."""

from __future__ import annotations

import functools
import math
import os
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from registry import OPTIMIZERS, each_phase
from scripts import restarted
from test_transactions import build, phases_until, set_gradients

import fn
from fn import Phase, tree
from fn.collectives import agreement
from fn.inplace import match

ROOT = Path(__file__).parent.parent


def torchrun(folder: Path) -> tuple[list[torch.Tensor], str]:
    """Train under torchrun with a kill and restarts; return the final weights, and what was printed."""
    folder.mkdir()
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [sys.executable, *launch, "--monitor-interval", "0.2", "tests/scripts/restarted.py", str(folder)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    run = subprocess.run(command, capture_output=True, text=True, timeout=ranks.LIMIT, cwd=ROOT, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    return torch.load(folder / "weights.pt"), run.stdout


@pytest.mark.reliability
def test_a_rank_killed_under_torchrun_resumes_and_ends_with_the_weights_of_an_undisturbed_run(tmp_path):
    calm, _ = ranks.run(2, restarted.train, tmp_path / "calm")
    found, text = torchrun(tmp_path / "killed")
    assert "resumed from step 8" in text
    assert all(map(torch.equal, calm, found))


# Ranks that do not mean the same.

MISMATCHES = {
    "nothing": "",
    "shape": r"params\[1\] is \(6,\)",
    "dtype": r"params\[1\] is .*bfloat16",
    "order": "name of parameter 0 in group 0 is second",
    "hyper-parameter": "b1 is 0.8",
    "world": "size of axis 'other' is 1",
    "version": "version of fn is 9.9.9",
    "codec": "block is 64",
    "steps in place": r"steps taken in place is \(\)",
}


def mismatched(kind: str) -> tuple[float, str, int, str]:
    """Return the seconds that the ranks take to refuse, or to make an optimizer: the best of five tries."""
    rank, best, text, culprit, field = dist.get_rank(), math.inf, "", -1, ""
    alone = dist.new_group([rank], use_local_synchronization=True)
    second = rank == 1
    shapes = [(4, 3), (6,) if kind == "shape" and second else (5,)]
    params = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    if kind == "dtype" and second:
        params[1] = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
    named = list(zip(["first", "second"], params, strict=True))
    named = named[::-1] if kind == "order" and second else named
    hyper = {"b1": 0.8} if kind == "hyper-parameter" and second else {}
    hyper |= {"codec": fn.sign(block=64)} if kind == "codec" and second else {}
    agreement.__version__ = "9.9.9" if kind == "version" and second else fn.__version__
    groups = {"data": dist.group.WORLD, "other": alone if kind == "world" and second else dist.group.WORLD}
    for _ in range(5):
        rows = {} if kind == "steps in place" and second else match._rows  # a method's module is not imported there
        bound = fn.bind(groups if kind == "world" else {"data": dist.group.WORLD})
        with mock.patch.object(match, "_rows", rows), bound:
            dist.barrier()
            began = time.monotonic()
            try:
                fn.Optimizer(named, partial(fn.onebit_adam, axis="data", **hyper), lr=0.1)
            except fn.RanksDisagree as error:
                text, culprit, field = str(error), error.rank, error.field
            best = min(best, time.monotonic() - began)
    return best, text, culprit, field


def all_mismatched() -> dict[str, tuple]:
    return {kind: mismatched(kind) for kind in MISMATCHES}


@functools.cache
def mismatches() -> list[dict[str, tuple]]:
    return ranks.run(2, all_mismatched)


@pytest.mark.parametrize("kind", [kind for kind in MISMATCHES if kind != "nothing"])
def test_ranks_that_do_not_match_are_refused_on_all_by_rank_and_field_about_as_fast_as_others_are_accepted(kind):
    for (seconds, text, rank, field), (accepted, *_) in ((found[kind], found["nothing"]) for found in mismatches()):
        assert re.search(MISMATCHES[kind], text), text
        assert rank == 1
        assert field
        assert "nothing has moved" in text
        assert seconds <= 10 * accepted
        print(f"{kind}: refused after {1000 * seconds:.0f} ms")


# Numbers that are not finite.


def poisoned(name: str, phase: Phase, bad: float) -> tuple[bool, list[int], int]:
    """Give rank 1 one bad number in a step of a phase; return whether all is finite, the skip counts, the steps."""
    asked = [*phases_until(phase), *phases_until(phase)[-1:] * 2]
    params, opt = build(name, 2, asked.__getitem__)
    finite = True
    for t in range(len(asked)):
        set_gradients(params, t)
        if t == 3 and dist.get_rank() == 1:
            params[0].grad[0, 0] = bad
        opt.step()
        leaves = [x for x in (*params, *tree.leaves(opt.states)) if x.is_floating_point()]
        finite = finite and all(bool(torch.isfinite(x).all()) for x in leaves)
    return finite, [int(x) for x in tree.fields(opt.states, "skipped")], opt.steps


BAD = tuple((o.name, phase, x) for o in OPTIMIZERS for phase in o.phases for x in (math.nan, math.inf, -math.inf))


def all_poisoned() -> list[tuple]:
    return [poisoned(*case) for case in BAD]


@functools.cache
def poisonings() -> list[list[tuple]]:
    return ranks.run(2, all_poisoned)


@pytest.mark.slow
@each_phase
@pytest.mark.parametrize("bad", [0, 1, 2], ids=["nan", "inf", "-inf"])
def test_a_number_that_is_not_finite_on_one_rank_poisons_nothing_and_is_counted_alike(optimizer, phase, bad):
    place = [case[:2] for case in BAD].index((optimizer.name, phase)) + bad
    one, two = (found[place] for found in poisonings())
    assert one == two
    finite, skipped, steps = one
    assert finite
    assert set(skipped) == {0 if phase is Phase.LOCAL else 1}
    assert steps == 7
