"""Print what the house weighs: lines of files, words of pages, and the way of one compressed step.

    .venv/bin/python tests/house_report.py

CI prints it behind the tests. These are figures to look at and no limits: a test of them would stop every change that
moves them, for better as for worse.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Callable, Iterable
from functools import partial
from inspect import ismodule
from pathlib import Path
from typing import Any, NamedTuple

import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase

ROOT = Path(__file__).parent.parent
HOUSE = Path(fn.__file__).parent
LONG = 600
"""Lines beyond which a file is worth a look."""

APART = (
    "fn/contrib/", "fn/planner/", "fn/testing/", "fn/tools/", "fn/adapters/deepspeed/", "fn/adapters/follow/",
    "fn/adapters/torchft/", "fn/adapters/trainers/", "fn/__main__.py",
)  # fmt: skip
"""What is not of the core."""


def code_lines(source: str) -> int:
    """Count lines without those that have only docstrings, comments or nothing."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    without = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return len({n for t in tokens if t.type not in without for n in range(t.start[0], t.end[0] + 1)} - lines)


def comment_lines(source: str) -> int:
    """Count lines that are a comment; one behind code is none."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(t.type == tokenize.COMMENT and t.line.lstrip().startswith("#") for t in tokens)


def is_core(name: str) -> bool:
    """Return whether a file, by its path from the root, is of the core."""
    return not name.startswith(APART)


def contrib_imports(source: str) -> int:
    """Count the imports of `fn.contrib` or of one of its modules."""
    found = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += sum(f"{alias.name}.".startswith("fn.contrib.") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}." for alias in node.names]
            found += any(name.startswith("fn.contrib.") for name in names)
    return found


class Way(NamedTuple):
    """The files that a call enters, in order, an entry for each change of file."""

    entered: list[str]
    without_leaves: list[str]
    """Leaf helpers left out, functions that call no other function of fn: their name is enough to read on."""

    def __str__(self) -> str:
        return ", ".join(
            f"{len(set(files))} files and {len(files)} changes of file {which}"
            for which, files in (("in all", self.entered), ("without leaf helpers", self.without_leaves))
        )


def way(f: Callable[[], Any]) -> Way:
    """Return the way of a call through fn."""
    calls: list[Any] = []
    callers: set[Any] = set()

    def on_event(frame: Any, event: str, arg: Any) -> None:
        if event != "call" or not is_function(frame.f_code):
            return
        calls.append(frame.f_code)
        above = frame.f_back
        while above is not None:
            if is_function(above.f_code):
                callers.add(above.f_code)
                return
            above = above.f_back

    sys.setprofile(on_event)
    try:
        f()
    finally:
        sys.setprofile(None)
    return Way(changes(calls), changes(code for code in calls if code in callers))


def is_function(code: Any) -> bool:
    """Return whether code is a function of fn; a comprehension, which older Pythons call, is part of one."""
    return code.co_filename.startswith(str(HOUSE)) and not code.co_name.endswith(("comp>", "<genexpr>"))


def changes(calls: Iterable[Any]) -> list[str]:
    files = [str(Path(code.co_filename).relative_to(HOUSE)) for code in calls]
    return [file for before, file in zip(["", *files], files, strict=False) if file != before]


SHAPES = [(37, 5), (7,), (4097,)]


def behind_the_optimizer() -> dict[str, Way]:
    """Return the ways of steady steps of `fn.Optimizer`, on a rank, by what they are."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    found = {}
    for name, make, schedule, last in (
        ("a compressed step of 1-bit Adam", fn.onebit_adam, fn.freeze_after(3), 8),
        ("a local step of DiLoCo", fn.diloco, fn.every(4), 8),
        ("an exchange of DiLoCo", fn.diloco, fn.every(4), 11),
    ):
        params = [torch.nn.Parameter(torch.ones(shape)) for shape in SHAPES]
        with fn.bind(mesh):
            opt = fn.Optimizer(params, partial(make, axis="data"), schedule=schedule, lr=1e-2)

        def step(seed: int, opt: fn.Optimizer = opt, params: list[torch.nn.Parameter] = params) -> None:
            generator = torch.Generator().manual_seed(10 * seed + dist.get_rank())
            for p in params:
                p.grad = torch.randn(p.shape, generator=generator)
            opt.step()

        for seed in range(last):
            step(seed)
        found[name] = way(partial(step, last))
    return found


def pure() -> Way:
    """Return the way of a pure compressed step on two simulated ranks."""
    tx = fn.onebit_adam(1e-2, axis="data")
    params = {str(i): torch.ones(shape) for i, shape in enumerate(SHAPES)}

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(Phase.COMPRESSED)(grads, state, params)
        return fn.apply_updates(params, updates), state

    dims = fn.rank_dims(tx.init(params))
    state = fn.simulate(tx.init, "data", 2, in_dims=None, out_dims=dims)(params)
    two = fn.simulate(step, "data", 2, in_dims=(None, dims, 0), out_dims=(None, dims))
    grads = {k: torch.randn(2, *p.shape) for k, p in params.items()}
    for _ in range(3):
        params, state = two(params, state, grads)
    return way(lambda: two(params, state, grads))


def main() -> None:
    files = {str(path.relative_to(ROOT)): path.read_text() for path in sorted(HOUSE.rglob("*.py"))}
    lines = {name: len(text.splitlines()) for name, text in files.items()}
    code = {name: code_lines(text) for name, text in files.items()}
    core = [name for name in files if is_core(name)]
    counts = sum(code.values()), sum(map(comment_lines, files.values()))
    print(f"fn/: {len(files)} files, {sum(lines.values())} lines, {counts[0]} of them code, {counts[1]} a comment")
    imports = sum(contrib_imports(files[name]) for name in core)
    print(f"core: {sum(code[name] for name in core)} code, {imports} imports of a contrib method")
    print(f"public names of fn, modules left out: {sum(not ismodule(getattr(fn, name)) for name in fn.__all__)}")
    for folder in sorted(path.parent for path in HOUSE.glob("*/__init__.py")):
        inside = [name for name in files if name.startswith(f"fn/{folder.name}/")]
        code_inside = sum(code[name] for name in inside)
        print(f"  {folder.name}/: {len(inside)} files, {sum(lines[name] for name in inside)} lines, {code_inside} code")
    for place in ("adapters/optim", "adapters/checkpoint", "adapters/deepspeed", "adapters/torchft"):
        inside = [name for name in files if name.startswith(f"fn/{place}/")]
        print(f"  {place}/: {sum(code[name] for name in inside)} code")
    tests = sum(len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py"))
    print(f"tests/: {tests} lines")
    longest = sorted(lines, key=lambda name: -lines[name])
    print("longest:", ", ".join(f"{name} {lines[name]}" for name in longest[:5]))
    print(f"longer than {LONG} lines:", ", ".join(name for name in longest if lines[name] > LONG) or "none")
    pages = {page.name: page.read_text() for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
    words = {name: len(text.split()) for name, text in pages.items()}
    print(f"README and docs/: {sum(words.values())} words;", ", ".join(f"{name} {n}" for name, n in words.items()))
    cells = [
        (len(cell.split()), name)
        for name, text in pages.items()
        for row in re.findall(r"^\|.*", text, re.MULTILINE)
        for cell in row.split("|")
    ]
    print("longest cells of tables:", ", ".join(f"{name} {n} words" for n, name in sorted(cells, reverse=True)[:3]))
    for name, found in ranks.run(2, behind_the_optimizer)[0].items():
        print(f"{name}, behind fn.Optimizer: {found}")
    print("a pure compressed step:", pure())


if __name__ == "__main__":
    main()
