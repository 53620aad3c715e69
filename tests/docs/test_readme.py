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


def blocks() -> list[str]:
    """Return the README's ```python blocks, one after the other."""
    return re.findall(r"^```python\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def test_the_readme_shows_python_and_all_of_it_runs_in_order(tmp_path):
    """All blocks in one file, as a reader goes through them, in two processes with what torchrun tells them."""
    assert len(blocks()) >= 2
    script = tmp_path / "readme.py"
    script.write_text("\n".join(f"# block {number + 1}\n{block}" for number, block in enumerate(blocks())))
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = str(found.getsockname()[1])
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    with ThreadPoolExecutor(2) as pool:
        run, other = pool.map(
            lambda rank: python(str(script), cwd=README.parent, RANK=rank, LOCAL_RANK=rank, **told), "01"
        )
    assert run.returncode == other.returncode == 0, run.stderr + other.stderr
    shown = re.findall(r"^step (\d+), (\w+): (\d+) bytes sent, loss (\d+)$", run.stdout, re.MULTILINE)
    assert [(step, phase, sent) for step, phase, sent, _ in shown] == [
        ("20", "warmup", "4000"), ("40", "compressed", "134"), ("60", "compressed", "134"),
    ]  # fmt: skip
    losses = [int(loss) for *_, loss in shown]
    assert losses == sorted(losses, reverse=True)
    said = re.search(r"4000 bytes, loss (\d+); 134 bytes, loss (\d+); (\d+)$", README.read_text(), re.MULTILINE)
    assert said
    assert losses == pytest.approx(list(map(int, said.groups())), rel=0.05)


def diffs() -> list[str]:
    """Return the README's changes of the script that is its first block."""
    return re.findall(r"^```diff\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)


def changed(script: str, diff: str) -> str:
    """Return the script with a change, whose lines stand there once, one behind the other."""
    lines = diff.splitlines()
    old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in f" {sign}") for sign in "-+")
    assert script.count(old) == 1, old
    return script.replace(old, new)


def test_the_picks_are_short_changes_of_a_short_script():
    assert len(blocks()[0].splitlines()) <= 25
    assert len(diffs()) >= 5
    assert max(len(diff.splitlines()) for diff in diffs()) <= 6
    calls = ("average_gradients", "fn.sign_muon", "fn.muloco", "fsdp.compress", "OnebitAdam")
    assert all(call in diff and call in pick.code for call, diff, pick in zip(calls, diffs(), PICKS, strict=False))


@pytest.mark.slow
@pytest.mark.parametrize("diff", ["", *diffs()], ids=lambda diff: (re.findall(r"fn\.\w+(?=[,(])", diff) or ["ddp"])[-1])
def test_each_pick_trains_the_script_under_torchrun(diff, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(changed(blocks()[0], diff) if diff else blocks()[0])
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    ended = python(*launch, PYTHONPATH=str(README.parent))
    assert ended.returncode == 0, ended.stderr
    shown = re.findall(r"^step (\d+): loss ([\d.]+)$", ended.stdout, re.MULTILINE)
    assert [int(step) for step, _ in shown] == [50, 100, 150, 200]
    assert float(shown[-1][1]) < 0.9 * float(shown[0][1])


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
