"""An axis bound to an MPI communicator. `mpi_checks.py` runs under `mpiexec -n 4`, once; each check is a test here."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fn
from fn.collectives import axis

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
CHECKS = [
    line.split("(")[0].removeprefix("def ")
    for line in (HERE / "mpi_checks.py").read_text().splitlines()
    if line.startswith("def check_")
]
BESIDE_PYTHON = str(Path(sys.executable).parent)
MPIEXEC = shutil.which("mpiexec", path=BESIDE_PYTHON) or shutil.which("mpiexec")
needs_mpi = [
    pytest.mark.skipif(importlib.util.find_spec("mpi4py") is None, reason="mpi4py is not installed (extra mpi)"),
    pytest.mark.skipif(MPIEXEC is None, reason="there is no mpiexec (the mpich wheel has one)"),
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, list[str | None]]:
    """Return, for each check, what became of it on every rank: None, or a trace."""
    command = [str(MPIEXEC), "-n", "4", sys.executable, "-m", "mpi4py", str(HERE / "mpi_checks.py")]
    yields = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "MPIR_CVAR_POLLS_BEFORE_YIELD": "0"}  # MPICH spins
    surroundings = {**os.environ, **yields, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, env=surroundings, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return dict(json.loads(ended.stdout.splitlines()[-1]))


@pytest.mark.reliability
@pytest.mark.parametrize("check", [pytest.param(check, marks=needs_mpi) for check in CHECKS])
def test_four_mpi_ranks(check: str, outcomes: dict[str, list[str | None]]) -> None:
    for rank, trace in enumerate(outcomes[check]):
        assert trace is None, f"rank {rank}:\n{trace}"


class Lonely:
    """A communicator of one rank, with what is used of mpi4py's."""

    inter = False

    def Get_size(self):
        return 1

    def Get_rank(self):
        return 0

    def Is_inter(self):
        return self.inter

    def py2f(self):
        return -7

    def Allreduce(self, sent, found):
        found[...] = sent

    Alltoall = Allgather = Allreduce


def test_a_communicator_is_known_by_its_methods():
    with fn.bind({"data": Lonely()}):
        assert fn.axis_size("data") == 1
        assert fn.axis_index("data") == 0


def test_an_intercommunicator_is_refused():
    between = Lonely()
    between.inter = True
    with pytest.raises(ValueError, match="intercommunicator"):
        fn.bind({"data": between})


def test_what_is_no_group_is_refused_by_the_name_of_its_axis():
    with pytest.raises(TypeError, match=r"mesh: expected 'data' to be a process group .* but got int"):
        fn.bind({"data": 3})


@pytest.mark.parametrize("name", axis.WORLD_SIZES)
def test_every_launcher_is_noticed(name, monkeypatch):
    monkeypatch.setenv(name, "3")
    try:
        with pytest.raises(ValueError, match="one of 3 processes"):
            fn.axis_size("data")
        with fn.bind({"data": Lonely()}):
            assert fn.axis_size("data") == 1
    finally:
        monkeypatch.delenv(name)  # before the check that no test leaves it behind


@pytest.mark.parametrize("collective", ["all_to_all", "all_gather", "psum"])
def test_the_op_that_carries_is_a_proper_op(collective):
    with fn.bind({"data": Lonely()}):
        arguments = (torch.rand(1, 3), 1, collective, "mpi:-7")
        torch.library.opcheck(torch.ops.fn.carry.default, arguments)


class Marked(Lonely):
    """One of two ranks, which hears a number of its own from the other; MPI uses the handle of a freed one again."""

    def __init__(self, number: int):
        self.number = number

    def Get_size(self):
        return 2

    def Allreduce(self, sent, found):
        found[...] = sent + self.number


def test_what_was_bound_to_a_freed_communicator_does_not_travel_over_the_next_one_with_its_handle():
    first, second = Marked(1), Marked(2)
    bindings = [fn.bind({"data": comm}) for comm in (first, second, first)]
    found = []
    for binding in bindings:
        with binding:
            found.append(fn.psum(torch.zeros(1), "data").item())
    assert found == [1.0, 2.0, 1.0]
    assert bindings[0].axes["data"].transport == bindings[2].axes["data"].transport  # its compiled steps stay
