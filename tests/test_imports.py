"""The house stands in one direction: no module imports from a floor above its own, and no imports form a circle.

Imports inside functions and under TYPE_CHECKING count: they make a circle run, and it is still one to read.
"""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

from ranks import LIMIT

import fn
from fn.inplace.match import registered

ROOT = Path(fn.__file__).parent
FLOORS = {
    "fn.tree": 0,
    "fn.errors": 0,
    "fn.arguments": 0,
    "fn.compiling": 0,
    "fn.version": 0,
    "fn.roles": 0,
    "fn.facts": 0,
    "fn.base": 1,
    "fn.schedules": 1,
    "fn.kernels": 2,
    "fn.collectives": 3,
    "fn.transforms": 4,
    "fn.inplace": 5,
    "fn.optimizers": 5,
    "fn.local_optimizers": 5,
    "fn.vote_optimizers": 5,
    "fn.low_rank_optimizers": 5,
    "fn.lamb_optimizers": 5,
    "fn.zero_one_optimizers": 5,
    "fn.muon_optimizers": 5,
    "fn.adapters": 6,
    "fn.planner": 6,
    "fn.testing": 6,
    "fn.testing.world": 7,
    "fn.tools": 7,
    "fn.__main__": 7,
    "fn": 7,
    "fn.contrib": 8,
}
APART = (
    "fn.contrib", "fn.planner", "fn.testing", "fn.tools", "fn.adapters.deepspeed", "fn.adapters.follow",
    "fn.adapters.torchft", "fn.adapters.trainers",
)  # fmt: skip
"""Packages that may be deleted: nothing outside of them imports them, but the command line, which has commands of some;
`fn.tools` is part of it. The planner finds `fn.contrib` by its name, where it is asked to."""

OPTIONAL = (
    "numba",
    "triton",
    "cupy",
    "mpi4py",
    "matplotlib",
    "tqdm",
    "deepspeed",
    "torch_npu",
    "torchft",
    "transformers",
    "accelerate",
    "lightning",
    "intel_extension_for_pytorch",
    "safetensors",
)


def modules() -> dict[str, Path]:
    """Return every module of fn by its dotted name."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("fn", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def floor(module: str) -> int:
    """Return the floor of a module, that of its package if it has none of its own."""
    name = module
    while name not in FLOORS or (name == "fn" and module != "fn"):
        assert "." in name, f"{module} is on no floor: add it to FLOORS, and to README's source layout"
        name = name.rpartition(".")[0]
    return FLOORS[name]


@functools.cache
def imports(path: Path) -> list[tuple[str, bool]]:
    """Return the modules that a file imports, for a type checker too, and whether it does so at its top."""
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, top: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            full = [(f"{node.module}.{alias.name}", top) for alias in node.names]
            found.extend((name if name in MODULES else str(node.module), top) for name, top in full)
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.expr):  # which holds no import
                visit(child, top and not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef))

    visit(ast.parse(path.read_text()), True)
    return found


@functools.cache
def edges() -> dict[str, list[tuple[str, bool]]]:
    """Return what each module imports of fn. Not a constant: every process that collects tests would read all files."""
    return {
        module: [(name, top) for name, top in imports(path) if name == "fn" or name.startswith("fn.")]
        for module, path in MODULES.items()
    }


def test_the_walk_sees_the_house():
    """If it saw nothing, it would pass."""
    assert len(MODULES) > 20
    assert ("fn.tree", True) in edges()["fn.base"]
    assert ("fn.kernels", True) in edges()["fn"]
    assert sum(map(len, edges().values())) > 50
    assert floor("fn.collectives.axis") == 3
    assert floor("fn.schedules") == floor("fn.base")


def test_imports_point_down():
    pairs = [(module, name) for module in MODULES for name, _ in edges()[module]]
    assert [f"{module} imports {name} from above" for module, name in pairs if floor(name) > floor(module)] == []
    above = ("fn", "fn.__main__", "fn.contrib", "fn.testing")  # contrib is written as a user's own module
    inside = ("fn.contrib.", "fn.testing.")
    of_all = [m for m, name in pairs if name == "fn" and m not in above and not m.startswith(inside)]
    assert of_all == [], "these import the package that imports them"


def test_nothing_imports_what_may_be_deleted():
    def within(module: str, package: str) -> bool:
        return module == package or module.startswith(f"{package}.")

    seen = ("fn", "fn.__main__")  # the first shows type checkers what it finds when it is used, see the next test
    others = [module for module in MODULES if module not in seen and not within(module, "fn.tools")]
    pairs = [(module, name) for module in others for name, _ in edges()[module]]
    assert [
        f"{module} imports {name}"
        for module, name in pairs
        for package in APART
        if within(name, package) and not within(module, package)
        and not (package == "fn.adapters.torchft" and within(module, "fn.testing.world"))  # it tests this one only
    ] == []  # fmt: skip
    methods = [(m, name) for m, name in pairs if m.startswith("fn.contrib.") and name.startswith("fn.contrib")]
    assert methods == [], "one method of contrib stands without the others"


def test_there_is_no_cycle():
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path, module])
        if module not in done:
            for name, _ in edges()[module]:
                visit(name, (*path, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())


def test_optional_packages_are_imported_by_nobody_at_the_top():
    """Kernels may have a module of their own for one; then nothing imports that module at the top, see below."""
    for module, path in MODULES.items():
        tops = {name.partition(".")[0] for name, top in imports(path) if top}
        assert not tops & set(OPTIONAL) or module.startswith(("fn.kernels.", "fn.adapters.")), module


def in_a_new_process(code: str) -> str:
    """Return what code prints in an interpreter of its own."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, timeout=LIMIT)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


LATE = ("torch.distributed.tensor", "torch._dynamo", "sympy", "fn.transforms", "fn.inplace",
        "fn.adapters", "fn.optimizers")  # fmt: skip
"""What takes as long to import as torch itself, and what is imported when one of its names is used."""

NETWORK = ["--params", "1.3e9", "--world", "64", "--per-node", "8", "--intra", "900gbit", "--inter", "10gbit"]


def test_import_fn_and_its_command_line_import_no_more_than_they_need():
    code = f"""
import contextlib, sys
import torch  # which may bring some of them along
before = set(sys.modules)
import fn
print([name for name in {(*OPTIONAL, *APART, *LATE)!r} if name in set(sys.modules) - before])
from fn.__main__ import main
with contextlib.redirect_stdout(None):
    main([])
    main(["plan", *{NETWORK!r}, "--compute", "350ms"])
print([name for name in {(*OPTIONAL, *LATE)!r} if name in set(sys.modules) - before])
"""
    assert in_a_new_process(code).split("\n") == ["[]", "[]"]


def test_names_that_are_found_late_are_those_that_a_type_checker_sees():
    """Such a name is written three times: for type checkers, in `__all__`, and in the table of modules."""
    tree = ast.parse(MODULES["fn"].read_text())
    blocks = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    seen = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom) and node.module != "fn"]
    assert len(seen) > 20
    for node in seen:
        for name in (alias.name for alias in node.names):
            assert getattr(fn, name) is getattr(sys.modules[str(node.module)], name)
            assert name in fn.__all__
    assert all(hasattr(fn, name) for name in fn.__all__)


def test_names_are_there_before_they_are_used():
    code = """
import fn
before = {*dir(fn)}
assert {*fn.__all__} <= before
from fn import *
assert adamw is fn.adamw and Optimizer is fn.Optimizer and {*dir(fn)} >= before
assert fn.adapters.agreed_params and fn.transforms and fn.testing
assert not hasattr(fn, "adamv") and not hasattr(fn, "__wrapped__")
"""
    assert in_a_new_process(code) == ""


def test_steps_of_links_alone_are_taken_in_place():
    """Whoever names no optimizer has imported none; the table of steps in place is full nevertheless."""
    code = """
import sys
import fn
from fn.inplace.match import explain, registered
print(explain(fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(0.1))))
print([name for name in sys.modules if name.endswith("optimizers")])
print(registered())
"""
    warmup, compressed, *_, optimizers, rows = in_a_new_process(code).split("\n")
    assert (warmup.split(), compressed.split()) == (["warmup", "in", "place"], ["compressed", "in", "place"])
    assert optimizers == "[]"
    assert rows == str(registered()), "ranks that have used other names would refuse each other"


def test_every_module_says_what_it_is_for():
    silent = [module for module, path in MODULES.items() if not ast.get_docstring(ast.parse(path.read_text()))]
    assert silent == []


def test_only_the_facade_names_the_pytree_module_and_only_primitives_the_functional_collectives():
    for module, path in MODULES.items():
        text = path.read_text()
        assert ("torch.utils import _pytree" in text) == (module == "fn.tree")
        assert ("_c10d_functional" in text) == (module == "fn.collectives.primitives")
