"""The plain DDP recipe, and the README's diffs of a plain DDP script, on two gloo ranks."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from as_torchrun import execute
from ranks import run

import fn

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


SCRIPT = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Linear(8, 1)
model = DistributedDataParallel(model)
opt = torch.optim.AdamW(model.parameters(), lr=2e-2)

torch.manual_seed(dist.get_rank())
losses = []
for step in range(200):
    x = torch.randn(64, 8)
    loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
    loss.backward()
    opt.step()
    opt.zero_grad()
    losses.append(loss.detach())
"""


def diffs() -> list[list[str]]:
    """Return the lines of the README's diffs of a plain DDP script."""
    blocks = re.findall(r"^```diff\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [block.splitlines() for block in blocks]


def patched(diff: list[str]) -> str:
    """Return the plain script after a diff; what the diff says was there must be there, in this order."""
    lines, at = SCRIPT.splitlines(), 0
    for line in diff:
        if line.startswith("+"):
            lines.insert(at, line[1:])
        else:
            at = lines.index(line[1:], at)
            if line.startswith("-"):
                del lines[at]
                continue
        at += 1
    return "\n".join(lines)


def before_and_after(folder: str) -> list[Any]:
    found = []
    for name, script in (("plain", SCRIPT), *((f"changed{i}", patched(diff)) for i, diff in enumerate(diffs()))):
        path = Path(folder) / f"{name}-{dist.get_rank()}.py"
        path.write_text(script)
        with fn.ledger() as sent:
            names = execute(path)
        params = [p.detach().flatten().tolist() for p in names["model"].parameters()]
        found.append((names["opt"], [x.item() for x in names["losses"]], sent.total, params))
    return [(type(opt).__module__, *rest) for opt, *rest in found]


def test_the_readmes_diffs_change_a_plain_ddp_script_by_few_lines():
    """Two lines more, or three lines in the place of one."""
    assert [[sum(line.startswith(sign) for line in diff) for sign in "-+"] for diff in diffs()] == [[0, 2], [1, 3]]


@pytest.mark.slow
def test_a_plain_ddp_script_trains_with_either_diff_of_the_readme(tmp_path):
    """And the warm-up of the second one takes AdamW's steps, weight decay and bias correction included."""
    ranks = run(2, before_and_after, str(tmp_path))
    for plain, averaged, ours in ranks:
        assert (plain[0], averaged[0]) == ("torch.optim.adamw", "torch.optim.adamw")
        assert ours[0].startswith("fn.adapters.")
        assert plain[2] == 0 < min(averaged[2], ours[2])
        assert ours[1][:101] == pytest.approx(plain[1][:101], rel=1e-3, abs=1e-6)
        for _, losses, _, _ in (plain, averaged, ours):
            assert losses[-1] < losses[0] / 4
    assert [found[3] for found in ranks[0]] == [found[3] for found in ranks[1]]
