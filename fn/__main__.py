"""`python -m fn`: what is installed here, what is missing, and what to take.

`python -m fn table` says which kernels run here; `python -m fn plan` what to take on a network; `python -m fn explain`
which steps of an optimizer are fast. `python -m fn lighthouse` and `python -m fn island` start what islands need that
come and go; `python -m fn doctor` checks the machines and the way between them. `python -m fn log` shows the log of a
run.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import platform
import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import Any, TextIO, cast

import torch

import fn
from fn.arguments import check_is_transform
from fn.base import Transform
from fn.kernels import devices
from fn.kernels.table import devices as device_types
from fn.kernels.table import table

OPTIONAL = {
    "numba": ("fused kernels on the CPU", "pip install numba"),
    "triton": ("fused kernels on CUDA, ROCm and XPU", "pip install triton"),
    "cupy-cuda12x": ("sign packing on CUDA 12", "pip install cupy-cuda12x"),
    "cupy-cuda13x": ("sign packing on CUDA 13", "pip install cupy-cuda13x"),
    "intel-extension-for-pytorch": ("XPU with torch 2.8; not needed later", "see the vendor's instructions"),
    "torch_npu": ("sign packing on Ascend NPUs", "see the vendor's instructions"),
    "mpi4py": ("ranks started by MPI", "pip install mpi4py"),
    "safetensors": ("snapshots in the log of a run", "pip install safetensors"),
}
"""Distributions that fn uses where they are installed: what for, and how to get them.

They are named themselves, not as extras of `fn-optim`, which a registry need not know.
"""

TRITON_WHEELS = ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-xpu")


def main(arguments: list[str] | None = None) -> None:
    """Run a subcommand; without one, print what is installed here and what to take.

    Where nobody reads on, as behind `| head`, just end; where a disk is full, say so in a line.
    """
    out = sys.stdout
    given = sys.argv[1:] if arguments is None else arguments
    if out is None:  # closed by the caller, as by `>&-`
        _run(given)
        return
    try:
        with redirect_stdout(cast(TextIO, _Output(out))):
            try:
                _run(given)
            finally:
                sys.stdout.flush()
    except _OutputLostError as lost:
        os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())  # what is flushed at exit goes nowhere
        sys.exit(1 if isinstance(lost.__cause__, BrokenPipeError) else f"python -m fn: error: output: {lost.__cause__}")


class _OutputLostError(Exception):
    """What is printed cannot be written. No OSError, which argparse drops and a subcommand takes for one of its own."""


class _Output:
    """Standard output that raises `_OutputLostError`."""

    def __init__(self, out: TextIO):
        self._out = out

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)

    def write(self, text: str) -> int:
        return cast(int, self._raising(self._out.write, text))

    def flush(self) -> None:
        self._raising(self._out.flush)

    def _raising(self, f: Callable[..., Any], *args: str) -> Any:
        try:
            return f(*args)
        except OSError as error:
            raise _OutputLostError from error


def _run(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m fn", description=fn.__doc__)
    parser.set_defaults(run=_show_all)
    commands = parser.add_subparsers(dest="command")
    for name, (text, declare, run) in COMMANDS.items():
        command = commands.add_parser(name, help=text)
        if name in arguments:  # the others need not be imported
            declare(command)
        command.set_defaults(run=partial(run, command))
    flags = parser.parse_args(arguments)
    flags.run(flags)


def _show_table(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    print("\n".join([*_versions(), "", *_backends(), ""]), flush=True)
    print("\n".join([repr(table(_progress)), "", *_missing()]))


def _show_all(flags: argparse.Namespace) -> None:
    """Print what is known without the kernels: to import and to try them takes seconds."""
    kernels = f"{'kernels':28} python -m fn table"
    print("\n".join([*_versions(), "", _accelerator(), kernels, "", *_missing(), "", *_picks()]))


def _declare_explain(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("make", help="module:function that returns a transform, such as train:make_optimizer")
    parser.add_argument("--axis", help="handed to the function as axis=, where it takes one")


def _explain(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    from fn.inplace.match import explain

    print(explain(_made(parser, flags.make, {} if flags.axis is None else {"axis": flags.axis})))


def _later(where: str) -> Callable[..., object]:
    """Return a function that imports the one that it calls."""
    module, _, name = where.partition(":")
    return lambda *given: getattr(importlib.import_module(module), name)(*given)


COMMANDS: dict[str, tuple[str, Callable[..., object], Callable[..., object]]] = {
    "table": ("the versions found and the accelerator table", lambda parser: None, _show_table),
    "plan": ("what to take on a given network, and what each method costs there",
             _later("fn.tools.plan:add_arguments"), _later("fn.tools.plan:run")),
    "explain": ("which steps of an optimizer are taken in place, and why not", _declare_explain, _explain),
    "lighthouse": ("where islands of torchft find each other",
                   _later("fn.tools.islands:add_lighthouse"),
                   _later("fn.tools.islands:run_lighthouse")),
    "island": ("run a script as an island, started again if it fails",
               _later("fn.tools.islands:add_island"), _later("fn.tools.islands:run_island")),
    "doctor": ("whether this machine, and another one, are fit for ranks",
               _later("fn.tools.doctor:add_arguments"),
               lambda *given: sys.exit(0 if _later("fn.tools.doctor:run")(*given) else 1)),
    "log": ("what is in the log of a run", _later("fn.tools.log:add_arguments"), _later("fn.tools.log:run")),
}  # fmt: skip
"""Name -> help, what declares the arguments, and what runs with the parser and the flags."""


def _picks() -> list[str]:
    from fn.planner.recommend import IMPORTS, PICKS
    from fn.tools.plan import LINE

    lines = [line for pick in PICKS for line in (f"  {pick.name}: {pick.when}", f"      {pick.code}")]
    head = ["what to take, and when, after", f"      {IMPORTS}"]
    tail = ["", "next, for your network:", f"  {LINE}"]
    return [*head, *lines, *tail]


def _progress(op: str, done: int, of: int) -> None:
    """Show on a terminal which kernel is tried: the first time, when all are compiled, this takes 20 seconds."""
    if sys.stderr is not None and sys.stderr.isatty():
        text = f"trying kernels: {op} ({done} of {of})" if done < of else ""
        sys.stderr.write(f"\r{text:60}" + "\r" * (done == of))
        sys.stderr.flush()


def _made(parser: argparse.ArgumentParser, where: str, arguments: dict[str, str]) -> Transform:
    module, _, name = where.partition(":")
    sys.path.insert(0, os.getcwd())  # as `python -m` finds the modules of the folder that it is called in
    try:
        make = attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        parser.error(f"make: expected module:function, such as train:make_optimizer, but got {where!r}: {error}")
    _check_call(parser, where, make, arguments)
    made = make(**arguments)
    try:
        check_is_transform(where, made)
    except TypeError as error:
        parser.error(f"make: {error}")
    return cast(Transform, made)


def _check_call(parser: argparse.ArgumentParser, where: str, make: object, arguments: dict[str, str]) -> None:
    """End with a message unless a function can be called with these arguments."""
    if not callable(make):
        parser.error(f"make: expected {where} to be a function, but got {type(make).__name__}")
    try:
        takes = inspect.signature(make).parameters.values()
    except ValueError:  # a function in C: calling it says what it needs
        return
    if arguments and not any(p.name == "axis" or p.kind is p.VAR_KEYWORD for p in takes):
        parser.error(f"--axis: {where} takes no axis; leave the flag out")
    needs = [p.name for p in takes if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    needs = [name for name in needs if name not in arguments]
    if needs == ["axis"]:
        parser.error(f"make: {where} needs an axis; add --axis data")
    if needs:
        cure = "give module:function of one without them, such as functools.partial makes"
        parser.error(f"make: expected {where} to need no arguments but axis, but got {', '.join(needs)}; {cure}")


def _installed(name: str) -> str | None:
    for wheel in TRITON_WHEELS if name == "triton" else (name,):
        try:
            return version(wheel)
        except PackageNotFoundError:
            pass
    return None


def _versions() -> list[str]:
    versions = {"fn": fn.__version__, "python": platform.python_version(), "torch": torch.__version__}
    versions |= {name: _installed(name) or "" for name in ("numpy", *OPTIONAL)}
    return [f"{name:28} {text}" for name, text in versions.items() if text]


def _missing() -> list[str]:
    lines = [f"  {name:28} {what}: {how}" for name, (what, how) in OPTIONAL.items() if not _installed(name)]
    return ["not installed:", *lines] if lines else []


def _accelerator() -> str:
    return f"{'accelerator':28} {devices.device_name()}"


def _backends() -> list[str]:
    lines = [_accelerator()]
    for device in device_types():
        lines.append(f"{device + ' backend':28} {devices.communication_backend(device)}")
        lines.append(f"{device + ' transport of codes':28} {devices.compressed_transport(device)}")
    return lines


if __name__ == "__main__":
    main()
