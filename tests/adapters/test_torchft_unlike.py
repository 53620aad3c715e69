"""Islands whose processors compute otherwise: what they exchange stays alike, bit for bit.

`make torchft-test` runs these in an environment that has torchft.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from sea import Sea

SCRIPT = Path(__file__).parents[1] / "scripts" / "unlike_island.py"
ROUNDS = 50
FEWER = ("--rounds", "20")
OTHER = ["default", torch.backends.cpu.get_cpu_capability().lower()]

pytestmark = [
    pytest.mark.torchft,
    pytest.mark.skipif(not importlib.util.find_spec("torchft"), reason="torchft is not installed: make torchft-test"),
    pytest.mark.skipif(OTHER[0] == OTHER[1], reason="this processor has one set of instructions only"),
]


def islands(method: str, *more: str, dtypes: tuple[str, str] = ("float32", "float32")) -> list[dict[str, Any]]:
    """Return what two islands tell, of which one has no vector instructions."""
    with Sea() as sea:
        started = []
        for island, (capability, dtype) in enumerate(zip(OTHER, dtypes, strict=True)):
            command = [sys.executable, str(SCRIPT), "--island", str(island), "--lighthouse", sea.lighthouse.address()]
            command += ["--method", method, "--rounds", str(ROUNDS), "--dtype", dtype, *more]
            env = {**os.environ, "ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": str(1 + island)}
            started.append(
                subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        ended = [process.communicate(timeout=ranks.LIMIT) for process in started]
    assert [process.returncode for process in started] == [0, 0], ended
    found = [json.loads(out) | {"log": err} for out, err in ended]
    assert found[0]["row"] != found[1]["row"]
    return found


def rounds_alike(found: list[dict[str, Any]]) -> list[bool]:
    first, other = (told["anchors"] for told in found)
    assert first.keys() == other.keys()
    assert len(first) >= int(FEWER[1])
    return [first[number] == other[number] for number in first]


@pytest.mark.parametrize(
    ("method", "more", "dtypes"),
    [
        ("diloco, int8", (), ("float32", "float32")),
        ("diloco, int8", FEWER, ("bfloat16", "float32")),
        ("diloco, int8", ("--delay", "1", *FEWER), ("float32", "float32")),
        ("muloco, bins", FEWER, ("float32", "float32")),
        ("sparse_loco", FEWER, ("float32", "float32")),
        ("local_sgd", FEWER, ("float32", "float32")),
    ],
)
def test_islands_that_compute_otherwise_have_the_same_anchors_behind_each_exchange(method, more, dtypes):
    found = islands(method, *more, dtypes=dtypes)
    assert all(rounds_alike(found))
    for told in found:
        assert told["unlike"]
        assert told["log"].count("plain arithmetic that is alike on all of them") == 1  # said once


def test_with_rows_of_their_own_they_would_drift_in_silence():
    assert not all(rounds_alike(islands("diloco, int8", "--own-row", *FEWER)))
