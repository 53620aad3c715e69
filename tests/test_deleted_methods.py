"""A method that is left out takes nothing else with it: the rest imports, and AdamW trains.

The package is copied without the files of one method and without their re-exports in `fn/__init__.py`.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

from ranks import LIMIT
from test_imports import OPTIONAL

import fn

ROOT = Path(fn.__file__).parent
OF_DEEPSPEED = "adapters/deepspeed"  # drop-ins for these two methods and 1-bit Adam
FILES = {
    "lamb": ["transforms/lamb.py", "inplace/lamb.py", "lamb_optimizers.py", OF_DEEPSPEED],
    "zero_one_adam": [
        "transforms/zero_one_adam.py",
        "inplace/zero_one_adam.py",
        "zero_one_optimizers.py",
        OF_DEEPSPEED,
    ],
    "low_rank": ["transforms/low_rank.py", "low_rank_optimizers.py"],
}
FILES["contrib"] = [f"contrib/{path.name}" for path in (ROOT / "contrib").glob("_[a-z]*.py")]

TRAIN = """
import importlib, os, pkgutil, sys
import torch, torch._dynamo, torch.distributed.checkpoint, torch.distributed.fsdp

OPTIONAL, folders = set(sys.argv[1].split(",")), sys.argv[2:]
for name in OPTIONAL - {"deepspeed"}:
    try:
        importlib.import_module(name)
    except ImportError:
        pass

def train(folder):
    sys.path[0] = folder
    import fn
    from fn.kernels.table import only_references
    for module in pkgutil.walk_packages(fn.__path__, "fn."):
        if module.name == "fn.__main__":
            continue
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in OPTIONAL:
                raise
    with only_references():  # a copy has no compiled kernels yet
        p = torch.nn.Parameter(torch.ones(3))
        opt = fn.Optimizer([p], fn.adamw, lr=0.1)
        for _ in range(3):
            p.grad = torch.ones(3)
            opt.step()
    assert opt.skipped == 0
    torch.testing.assert_close(p.detach(), torch.full((3,), 0.7 - 0.003), atol=1e-3, rtol=0)
    print(fn.__file__, flush=True)

for folder in folders:  # forked: torch is imported once
    if os.fork() == 0:
        train(folder)
        os._exit(0)
    _, status = os.wait()
    assert status == 0, folder
"""


def without(files: list[str], folder: Path) -> str:
    """Copy the package into a folder, without some files and what `fn/__init__.py` imports from them."""
    shutil.copytree(ROOT, folder / "fn", ignore=shutil.ignore_patterns("*.nbi", "*.nbc"))
    for name in files:
        path = folder / "fn" / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    gone = {"fn." + name.removesuffix(".py").replace("/", ".") for name in files}
    init = folder / "fn" / "__init__.py"
    text = init.read_text()
    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and node.module in gone:
            names = {f'    "{alias.asname or alias.name}",\n' for alias in node.names}
            lines[node.lineno - 1 : node.end_lineno] = [""] * (node.end_lineno - node.lineno + 1)
            lines = ["" if line in names else line for line in lines]
    init.write_text("".join(lines))
    return str(folder)


def test_without_a_method_the_rest_imports_and_adamw_trains(tmp_path):
    """One method of the core in turn, and all of contrib, whose modules do not import each other."""
    folders = [without(files, tmp_path / name) for name, files in FILES.items()]
    run = subprocess.run(
        [sys.executable, "-c", TRAIN, ",".join(OPTIONAL), *folders],
        capture_output=True, text=True, cwd=tmp_path, timeout=LIMIT, env={**os.environ, "PYTHONPATH": ""},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [f"{folder}/fn/__init__.py" for folder in folders]  # the copies
