"""The recipes of `examples/trainers`, under torchrun, on two gloo ranks; that of accelerate on one, too.

`make trainers-test` runs this in an environment of its own; a trainer that is not installed is skipped.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
RECIPES = {
    "with_accelerate": "accelerate",
    "with_transformers": "transformers",
    "with_lightning": "pytorch_lightning",
}
STEPS = 8

pytestmark = pytest.mark.trainers


def torchrun(recipe: str, out: Path, *arguments: str, ranks: int = 2) -> list[dict]:
    """Run a recipe; return where each rank ended."""
    out.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    found = subprocess.run(
        [*command, str(ROOT / "examples" / "trainers" / f"{recipe}.py"), "--out", str(out), *arguments],
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert found.returncode == 0, found.stderr[-4000:]
    return [torch.load(out / f"end-{rank}.pt") for rank in range(ranks)]


def assert_same(a: dict, b: dict) -> None:
    assert all(map(torch.equal, a["params"], b["params"]))
    assert (a["steps"], a["lr"]) == (b["steps"], b["lr"])


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_recipe_trains_through_both_phases_and_resumes_bit_for_bit(recipe, tmp_path):
    """Eight steps at once; and four steps, a restart in the compressed phase, four more."""
    if importlib.util.find_spec(RECIPES[recipe]) is None:
        pytest.skip(f"{RECIPES[recipe]} is not installed")
    first, second = torchrun(recipe, tmp_path / "at once")
    assert first["steps"] == STEPS
    assert first["lr"] == pytest.approx(1e-3)  # 1e-2, decayed to a tenth
    assert_same(first, second)
    middle, _ = torchrun(recipe, tmp_path / "in two", "--stop-after", "4")
    assert middle["steps"] == 4
    for resumed in torchrun(recipe, tmp_path / "in two", "--resume"):
        assert_same(first, resumed)


def test_the_recipe_of_transformers_resumes_an_older_checkpoint_with_the_optimizer_of_its_step(tmp_path):
    """A run of eight steps saves after the fourth and the eighth; it goes on from the fourth, in the same folder."""
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    out = tmp_path / "out"
    first, _ = torchrun("with_transformers", out)
    kept = {str(p.relative_to(out)) for p in out.glob("checkpoint-*/optimizer-*.pt")}
    assert kept == {f"checkpoint-{step}/optimizer-{rank}.pt" for step in (4, 8) for rank in (0, 1)}
    for resumed in torchrun("with_transformers", out, "--resume"):
        assert_same(first, resumed)


def test_the_recipe_of_accelerate_runs_in_a_single_process(tmp_path):
    """There `prepare` leaves the model without DDP."""
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")
    (only,) = torchrun("with_accelerate", tmp_path / "out", ranks=1)
    assert only["steps"] == STEPS
