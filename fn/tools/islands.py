"""`python -m fn lighthouse` and `python -m fn island`: torchft's lighthouse and torchrun, with fitting flags.

Each prints the command line that it runs; the first one also the line for the other machines.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from fn.adapters.torchft.connect import LIGHTHOUSE, PORT, address_of, address_towards
from fn.adapters.torchft.handing_over import ALLOWED
from fn.collectives.transports.tcp import interface_of

ELSEWHERE = "192.0.2.1"
"""An address that is reserved for examples: the way to it is the way to other machines."""

SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
"""A variable for torchrun. Without it, a restart meets in the store of the last start, and waits for ranks of that."""

HEARTBEAT = 10.0
"""Seconds of silence after which an island counts as lost, if nothing else is said: its machine may be busy."""


def add_lighthouse(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of the lighthouse."""
    parser.description = "Run torchft's lighthouse, by which islands find each other. One is enough for all of them."
    parser.add_argument("--port", type=int, default=PORT, help=f"where it listens (default: {PORT})")
    parser.add_argument("--islands", type=int, default=1, metavar="N",
        help="exchange only while at least so many are there (default: 1)")  # fmt: skip
    parser.add_argument("--wait", type=float, default=60.0, metavar="SECONDS",
        help="how long islands wait for one that is alive, but late (default: 60)")  # fmt: skip
    parser.add_argument("--heartbeat", type=float, default=HEARTBEAT, metavar="SECONDS",
        help=f"after how long a silence an island counts as lost (default: {HEARTBEAT:.0f})")  # fmt: skip


def run_lighthouse(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Print the command for the other machines, and become the lighthouse."""
    program = shutil.which("torchft_lighthouse", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        parser.error("torchft_lighthouse: expected an installed torchft, but got none; pip install torchft")
    command = [program, "--bind", f"[::]:{flags.port}", "--min_replicas", str(flags.islands)]
    command += ["--join_timeout_ms", str(round(1000 * flags.wait)), "--heartbeat_timeout_ms"]
    command += [str(round(1000 * flags.heartbeat))]
    print(f"on each machine:  python -m fn island --lighthouse {_own_address()}:{flags.port} train.py")
    _become(command, _quiet())


def add_island(parser: argparse.ArgumentParser) -> None:
    """Declare the flags of an island."""
    parser.description = "Run a script as an island on this machine, by torchrun, which starts it again if a rank dies."
    parser.add_argument("--lighthouse", metavar="HOST:PORT", default=os.environ.get(LIGHTHOUSE),
        help=f"where it is (default: what {LIGHTHOUSE} says, else this machine)")  # fmt: skip
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks of this island (default: its accelerators, or 1)")
    parser.add_argument("--allow", choices=["lr"],
        help="let this island have a learning rate of its own; give it to all islands")  # fmt: skip
    parser.add_argument("--restarts", type=int, default=100, metavar="N",
        help="how often it is started again (default: 100)")  # fmt: skip
    parser.add_argument("script", nargs=argparse.REMAINDER, help="a script that calls fn.adapters.torchft.connect")


def run_island(parser: argparse.ArgumentParser, flags: argparse.Namespace) -> None:
    """Become torchrun with the script."""
    if not flags.script:
        parser.error("script: expected a script, such as train.py, but got none")
    try:
        host, port = address_of(flags.lighthouse or f"{_own_address()}:{PORT}")
        own = address_towards(host, port)
    except (ValueError, OSError) as error:
        parser.error(f"--{error}")
    if find_spec("torchft") is None:  # the script would fail, and be started again each time
        parser.error("torchft: expected an installed one, which islands need, but got none; pip install torchft")
    ranks = flags.ranks or max(1, torch.accelerator.device_count() if torch.accelerator.is_available() else 1)
    variables = {LIGHTHOUSE: f"http://{host}:{port}", SHARED_STORE: "1", **_quiet()}
    variables |= {ALLOWED: flags.allow} if flags.allow else {}
    # gloo takes the address of the machine's name, which is that of the loopback interface on many.
    if "GLOO_SOCKET_IFNAME" not in os.environ and (interface := interface_of(own)) is not None:
        variables["GLOO_SOCKET_IFNAME"] = interface
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    _become([*command, "--max-restarts", str(flags.restarts), *flags.script], variables)


def _quiet() -> dict[str, str]:
    """Return the variables without which torchft reports each message."""
    return {} if "RUST_LOG" in os.environ else {"RUST_LOG": "error"}


def _become(command: list[str], variables: dict[str, str]) -> None:
    """Print a command line and run it in the place of this process."""
    texts = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    print(" ".join([*texts, shlex.join(command)]), flush=True)
    os.execvpe(command[0], command, {**os.environ, **variables})


def _own_address() -> str:
    """Return the address of this machine under which others may reach it."""
    try:
        return address_towards(ELSEWHERE, PORT)
    except OSError:  # no way out
        return "127.0.0.1"
