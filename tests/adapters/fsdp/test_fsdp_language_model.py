"""The demo's language model under FSDP2, small: what `examples/train_fsdp.py` compares, on two gloo ranks."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from ranks import run
from torch.distributed.device_mesh import init_device_mesh

EXAMPLES = Path(__file__).parents[3] / "examples"
METHODS = "fsdp2,identity,qgz,loco"
FLAGS = ["--layers=2", "--width=32", "--context=32", "--steps=60", "--lr=1e-2", "--quiet", f"--methods={METHODS}"]
FILES = ("argparse", "ast", "difflib", "doctest", "inspect", "tarfile", "typing")


def runs_on_a_rank(examples: str):
    sys.path.insert(0, examples)
    import train_fsdp

    root = Path(sysconfig.get_path("stdlib"))
    text = torch.frombuffer(
        bytearray(b"".join((root / f"{name}.py").read_bytes() for name in FILES)), dtype=torch.uint8
    )
    cut = len(text) * 7 // 8
    args = train_fsdp.parse_arguments(FLAGS)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("data",))
    runs = [train_fsdp.train(method, args, mesh, text[:cut], text[cut:]) for method in args.methods]
    return {r.method: r._asdict() | {"val_loss": r.val_loss} for r in runs}, train_fsdp.table(runs)


@pytest.mark.reliability
def test_loco_follows_exact_fsdp2_and_sends_a_seventh():
    pytest.importorskip("tqdm")
    found, table = run(2, runs_on_a_rank, str(EXAMPLES))[0]
    exact = found["fsdp2"]
    assert found["identity"]["validation"] == exact["validation"]  # to the last bit
    assert exact["val_loss"] < 0.8 * exact["validation"][6]  # it learns
    for method in ("qgz", "loco"):
        assert found[method]["val_loss"] != exact["val_loss"]
        assert found[method]["ledger"] * 7 <= found["identity"]["ledger"]
    assert abs(found["loco"]["val_loss"] / exact["val_loss"] - 1) < 0.02
    assert all(method in table for method in found)
