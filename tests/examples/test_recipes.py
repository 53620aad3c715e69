"""The plain DDP recipe, the examples of FSDP2, on two gloo ranks, and that of followers, as a process."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from as_torchrun import execute
from ranks import python, run

ROOT = Path(__file__).parents[2]
TRAINERS = ROOT / "examples" / "trainers"


def plain_ddp(folder: str) -> list[Any]:
    for out, arguments in (("once", []), ("two", ["--stop-after", "5"]), ("two", ["--resume"])):
        os.makedirs(f"{folder}/{out}", exist_ok=True)
        dist.barrier()
        execute(TRAINERS / "plain_ddp.py", "--out", f"{folder}/{out}", *arguments)
    return [torch.load(f"{folder}/{out}/end-{dist.get_rank()}.pt") for out in ("once", "two")]


def test_plain_ddp_trains_through_both_phases_and_resumes_bit_for_bit(tmp_path):
    """With a scheduler and accumulation; the restart is in the compressed phase."""
    ends = [end for rank in run(2, plain_ddp, str(tmp_path)) for end in rank]
    for end in ends:
        assert (end["steps"], end["lr"]) == (8, pytest.approx(1e-3))
        assert all(map(torch.equal, end["params"], ends[0]["params"]))
    sys.path.insert(0, str(TRAINERS))
    start = importlib.import_module("data").network()
    assert not torch.equal(start[0].weight, ends[0]["params"][0])


def fsdp2(script: str, folder: str, *arguments: str) -> tuple[bool, bool, int, str]:
    """Run an example at once, and in two parts; return whether both end alike, and what it wrote."""
    warnings.filterwarnings("error", "axis: is None")  # FSDP2 averages
    ends = []
    for out, steps in (("once", 6), ("two", 4), ("two", 6)):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            given = ["--steps", f"{steps}", "--save-every", "6", "--device", "cpu", "--out", f"{folder}/{out}"]
            found = execute(ROOT / "examples" / script, *given, *arguments)
        local = [p.to_local().clone() for p in found["model"].parameters()]
        ends.append((local, {k: getattr(x, "to_local", lambda x=x: x)() for k, x in found["opt"].state_dict().items()}))
    (once, state), (before, _), (two, state_of_two) = ends
    alike = all(map(torch.equal, once, two)) and all(torch.equal(x, state_of_two[k]) for k, x in state.items())
    return alike, all(map(torch.equal, once, before)), int(state["steps"]), printed.getvalue()


@pytest.mark.parametrize(
    ("ranks", "script", "arguments"),
    [
        (2, "fsdp2_muon.py", ()),
        (2, "fsdp2_diloco.py", ("--every", "3")),
        pytest.param(4, "fsdp2_diloco.py", ("--every", "3"), marks=pytest.mark.reliability),
    ],
)
def test_an_example_of_fsdp2_resumes_bit_for_bit_from_its_own_checkpoint(ranks, script, arguments, tmp_path):
    """The restart is in the middle of a round."""
    for rank, (alike, stood, steps, printed) in enumerate(run(ranks, fsdp2, script, str(tmp_path), *arguments)):
        assert (alike, stood, steps) == (True, False, 6)
        assert ("loss" in printed) == (rank == 0 and "diloco" in script)  # the other prints every tenth step


@pytest.mark.slow
def test_the_follower_of_the_example_ends_with_the_parameters_of_trainers_that_were_killed(tmp_path):
    given = ["--steps", "40", "--save-every", "16", "--every", "4", "--out", str(tmp_path / "out")]
    ended = python(str(ROOT / "examples" / "follow.py"), *given, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "bit for bit" in ended.stdout
    assert (tmp_path / "out" / "follow.png").stat().st_size > 10_000
    log = python("-m", "fn", "log", str(tmp_path / "out" / "log"))
    assert "incarnation 1" in log.stdout  # they were started again, and went on in the same log


def with_and_without_tensor_parallelism(folder: str) -> dict[str, Any]:
    """Train on FSDP2 x TP, load it on FSDP2 alone, and go on there."""
    warnings.filterwarnings("error", "axis: is None")
    found = dict[str, Any]()
    for name, steps, tensor in (("mesh", 4, 2), ("loaded", 4, 1), ("further", 6, 1)):
        given = ["--steps", f"{steps}", "--device", "cpu", "--out", folder, "--tensor", f"{tensor}"]
        with contextlib.redirect_stdout(io.StringIO()):
            run_of = execute(ROOT / "examples" / "fsdp2_muon.py", *given)
        state = run_of["model"].state_dict() | run_of["opt"].state_dict()
        found[name] = {k: x.full_tensor() for k, x in state.items() if hasattr(x, "full_tensor")}
        found[name, "axes"] = {p.device_mesh.mesh_dim_names for p in run_of["model"].parameters()}
        found[name, "steps"] = run_of["opt"].steps
    return found


def test_the_example_of_muon_goes_from_fsdp2_and_tensor_parallelism_to_fsdp2_alone(tmp_path):
    for found in run(4, with_and_without_tensor_parallelism, str(tmp_path)):
        assert ("shard", "tensor") in found["mesh", "axes"]
        assert found["loaded", "axes"] == {("shard",)}
        assert found["mesh"].keys() == found["loaded"].keys()
        assert all(torch.equal(x, found["loaded"][k]) for k, x in found["mesh"].items())
        assert (found["loaded", "steps"], found["further", "steps"]) == (4, 6)
        assert not all(torch.equal(x, found["further"][k]) for k, x in found["loaded"].items())
