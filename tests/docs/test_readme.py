"""What the documentation shows runs: the README's python blocks, and the examples in docstrings."""

from __future__ import annotations

import doctest
import importlib
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ranks import python

import fn
from fn.planner.recommend import PICKS

README = Path(__file__).parents[2] / "README.md"
OPTIONAL = {"cupy", "deepspeed", "numba", "triton", "torch_npu", "intel_extension_for_pytorch", "mpi4py"}


ABORTED = "terminate called without an active exception"
"""What gloo prints where `destroy_process_group` ends a process whose threads still run, now and then, with plain DDP,
too (pytorch #179291, #190489). By then the script has trained and printed; what it printed is looked at."""


def blocks() -> list[str]:
    """Return the README's ```python blocks: the script, and the pure loop."""
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def printed(block: str, folder: Path) -> str:
    """Run a block as a script of its own, in two processes with what torchrun tells them; return what rank 0 prints."""
    script = folder / "readme.py"
    script.write_text(block)
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = str(found.getsockname()[1])
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with ThreadPoolExecutor(2) as pool:
        run, other = pool.map(
            lambda rank: python(str(script), cwd=README.parent, RANK=rank, LOCAL_RANK=rank, **told), "01"
        )
    assert all(ended.returncode == 0 or ABORTED in ended.stderr for ended in (run, other)), run.stderr + other.stderr
    return run.stdout


def test_the_pure_loop_sends_and_learns_what_its_comment_says(tmp_path):
    _, loop = blocks()
    output = printed(loop, tmp_path)
    shown = re.findall(r"^step (\d+), (\w+): (\d+) bytes sent, loss (\d+)$", output, re.MULTILINE)
    assert [(step, phase, sent) for step, phase, sent, _ in shown] == [
        ("20", "warmup", "4000"), ("40", "compressed", "158"), ("60", "compressed", "158"),
    ]  # fmt: skip
    losses = [int(loss) for *_, loss in shown]
    assert losses == sorted(losses, reverse=True)
    said = re.search(r"4000 bytes, loss (\d+); 158 bytes, loss (\d+); (\d+)$", README.read_text(), re.MULTILINE)
    assert said
    assert losses == pytest.approx(list(map(int, said.groups())), rel=0.05)


def diffs() -> list[str]:
    """Return the README's changes of the script that is its first block."""
    return re.findall(r"^```diff\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def scripts() -> dict[str, str]:
    """Return the script and what the changes make of it, by their names; a change may be of what the last one made."""
    found = {"as it is": blocks()[0]}
    for diff in diffs():
        lines = diff.splitlines()
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in f" {sign}") for sign in "-+")
        script = next(script for script in (blocks()[0], [*found.values()][-1]) if script.count(old) == 1)
        found[f"change {len(found)}"] = script.replace(old, new)
    return found


def test_the_picks_are_short_changes_of_a_short_script():
    assert len(blocks()[0].splitlines()) <= 25
    assert len(diffs()) >= 5
    assert max(len(diff.splitlines()) for diff in diffs()) <= 6
    calls = ("average_gradients", "fn.sign_muon", "fn.muloco", "fsdp.compress", "OnebitAdam")
    assert all(any(call in diff for diff in diffs()) for call in calls)
    assert all(call in pick.code for call, pick in zip(calls, PICKS, strict=True))


@pytest.mark.slow
def test_the_script_runs_under_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(blocks()[0])
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ended = python(*launch, PYTHONPATH=str(README.parent))
    assert ended.returncode == 0 or ABORTED in ended.stderr, ended.stderr
    assert re.findall(r"^step (\d+): loss [\d.]+$", ended.stdout, re.MULTILINE) == ["50", "100", "150", "200"]


@pytest.mark.parametrize("name", scripts())
def test_each_pick_trains_the_script(name, tmp_path):
    shown = re.findall(r"^step (\d+): loss ([\d.]+)$", printed(scripts()[name], tmp_path), re.MULTILINE)
    assert [int(step) for step, _ in shown] == [50, 100, 150, 200]
    said = re.findall(r"(\d\.\d+) ± \d\.\d+ and \d\.\d+ ± \d\.\d+", README.read_text())
    expected = dict(zip(scripts(), map(float, said), strict=True))[name]
    assert float(shown[-1][1]) == pytest.approx(expected, rel=0.35)  # of one batch and seed, beside the mean over seeds


def with_examples() -> list[str]:
    """Return the modules of fn that show examples, read and not imported: some need an optional package."""
    root = Path(fn.__file__).parent
    files = [path for path in sorted(root.rglob("*.py")) if re.search(r"^ *>>> ", path.read_text(), re.MULTILINE)]
    names = [".".join(["fn", *path.relative_to(root).with_suffix("").parts]) for path in files]
    return [name.removesuffix(".__init__") for name in names]


def load(name: str):
    """Import a module; one that is for an optional package which is not installed may refuse."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in OPTIONAL:
            raise
        pytest.skip(f"{name} is for {error.name}, which is not installed")


@pytest.mark.parametrize("name", with_examples())
def test_the_examples_in_docstrings_hold(name):
    result = doctest.testmod(load(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
    assert result.attempted > 0


def test_the_doctests_of_the_core_are_found():
    """If the examples were lost, the test above would pass."""
    core = ("base", "schedules", "collectives.simulation", "collectives.ledger", "collectives.codecs.codec")
    assert {f"fn.{name}" for name in core} <= set(with_examples())
