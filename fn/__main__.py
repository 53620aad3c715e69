"""`python -m fn`: what is here, what is missing, who computes what on which device.

`python -m fn plan` says what pays on a network; `python -m fn explain` says which steps of an optimizer are fast.
`python -m fn lighthouse` and `python -m fn island` start what islands need that come and go; `python -m fn doctor`
checks the machines and the way between them.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter
from typing import cast

import torch

import fn
from fn.adapters.torchft import command as islands
from fn.adapters.torchft import doctor
from fn.arguments import check_is_transform
from fn.base import Transform
from fn.inplace.match import explain
from fn.kernels import devices
from fn.kernels.table import devices as device_types
from fn.kernels.table import table
from fn.planner import command as plan

OPTIONAL = {
    "numba": ("fused kernels on the CPU", "pip install numba"),
    "triton": ("fused kernels on CUDA, ROCm and XPU", "pip install triton"),
    "cupy-cuda12x": ("kernels on CUDA 12", "pip install cupy-cuda12x"),
    "cupy-cuda13x": ("kernels on CUDA 13", "pip install cupy-cuda13x"),
    "intel-extension-for-pytorch": ("XPU with torch 2.8; not needed later", "see the vendor's instructions"),
    "torch_npu": ("sign packing on Ascend NPUs", "see the vendor's instructions"),
    "mpi4py": ("ranks started by MPI", "pip install mpi4py"),
}
"""Distributions that fn uses where they are installed: what for, and how to get them.

They are named themselves, not as extras of `fn-optim`, which a registry need not know.
"""

TRITON_WHEELS = ("triton", "pytorch-triton", "triton-rocm", "pytorch-triton-xpu")


def main(arguments: list[str] | None = None) -> None:
    """Run a subcommand; without one, print what is here. Where nobody reads on, as behind `| head`, just end."""
    try:
        _run(arguments)
        if sys.stdout is not None:  # closed by the caller, as by `>&-`
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is flushed at exit goes nowhere
        sys.exit(1)


def _run(arguments: list[str] | None) -> None:
    parser = argparse.ArgumentParser(prog="python -m fn", description=fn.__doc__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("table", help="the versions found and the accelerator table (this is the default)")
    planning = commands.add_parser("plan", help="what each method costs on a given network, and whether it pays")
    plan.add_arguments(planning)
    explaining = commands.add_parser("explain", help="which steps of an optimizer are taken in place, and why not")
    explaining.add_argument("make", help="module:function that returns a transform, such as train:make_optimizer")
    explaining.add_argument("--axis", help="handed to the function as axis=, where it takes one")
    lighthouse = commands.add_parser("lighthouse", help="where islands of torchft find each other")
    islands.add_lighthouse(lighthouse)
    island = commands.add_parser("island", help="run a script as an island, which is started again if it fails")
    islands.add_island(island)
    doctoring = commands.add_parser("doctor", help="whether this machine, and another one, are fit for ranks")
    doctor.add_arguments(doctoring)
    flags = parser.parse_args(arguments)
    if flags.command == "plan":
        plan.run(planning, flags)
        return
    if flags.command == "lighthouse":
        islands.run_lighthouse(lighthouse, flags)
        return
    if flags.command == "island":
        islands.run_island(island, flags)
        return
    if flags.command == "doctor":
        sys.exit(0 if doctor.run(doctoring, flags) else 1)
    if flags.command == "explain":
        print(explain(_made(explaining, flags.make, {} if flags.axis is None else {"axis": flags.axis})))
        return
    print("\n".join([*_versions(), "", *_backends(), ""]), flush=True)
    print("\n".join([repr(table(_progress)), "", *_missing()]))


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


def _backends() -> list[str]:
    lines = [f"accelerator                  {devices.device_name()}"]
    for device in device_types():
        lines.append(f"{device + ' backend':28} {devices.communication_backend(device)}")
        lines.append(f"{device + ' transport of codes':28} {devices.compressed_transport(device)}")
    return lines


if __name__ == "__main__":
    main()
