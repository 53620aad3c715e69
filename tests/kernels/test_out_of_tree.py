"""A device in a package of its own: found by its entry point, tested by the kit, harmless when it is broken."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import ranks
import torch

TOY = Path(__file__).parent / "toy_device"


def install(folder: Path, module: str, target: str, device: str = "cpu") -> None:
    """Write what an installer writes next to a module."""
    info = folder / f"{module}-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(f"[fn.accelerators]\n{device} = {module}:{target}\n")


def pack_beside(folder: str) -> tuple[list[list[int]], list[str]]:
    """Return packed bits and what was warned of, with what is installed in a folder. For a process of its own."""
    sys.path.insert(0, folder)
    ranks.without()
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        packed = torch.ops.fn.pack_bits(torch.tensor([[1.0, -1.0, 1.0]])).tolist()
    return packed, [str(warning.message) for warning in found]


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "fn_toy_device.py").write_text((TOY / "fn_toy_device.py").read_text())
    install(tmp_path, "fn_toy_device", "row")
    return tmp_path


@pytest.mark.slow
def test_an_installed_row_is_used(toy):
    code = """
import sys, torch, fn, ranks
ranks.without()
assert "fn_toy_device" not in sys.modules, "import fn loads no plug-in"
x = torch.randn(4, 2, 48)
mean = fn.simulate(lambda x: fn.reduce_scatter_mean(x, torch.zeros(96), "data", fn.sign(block=8), fn.classic())[0],
                   "data", 4)(x.flatten(1))
import fn_toy_device
fn_toy_device.calls.clear()
assert torch.ops.fn.pack_bits(torch.tensor([[1.0, -1.0]])).tolist() == [[1]]
assert fn_toy_device.calls == ["pack"]
assert fn.kernels.table().providers["cpu"]["unpack_bits"] == "fn_toy_device"
assert fn.testing.conformance(fn_toy_device.row(), sizes=(0, 9)), "conforms"
"""
    found = ranks.python("-W", "error", "-c", code, cwd=toy)
    assert found.returncode == 0, found.stderr


@pytest.mark.slow
@pytest.mark.parametrize(("text", "target", "reason"), [
    ("import no_such_vendor_library", "row", "ModuleNotFoundError: No module named 'no_such_vendor_library'"),
    ("def row(): raise AttributeError('version mismatch')", "row", "AttributeError: version mismatch"),
    ("row = 3", "row", "not callable"),
    ("from fn.kernels import Accelerator\nrow = Accelerator('xpu', {})", "row", "device_type: is 'xpu'"),
    ("from fn.kernels import Accelerator\nrow = Accelerator('cpu', {'pack_bits': lambda x: x})", "row", "result 0 is"),
], ids=["missing", "raises", "no row", "other device", "wrong answer"])  # fmt: skip
def test_a_broken_row_warns_and_the_next_one_runs(tmp_path, text, target, reason):
    (tmp_path / "fn_broken.py").write_text(text)
    install(tmp_path, "fn_broken", target)
    ((packed, warned),) = ranks.run(1, pack_beside, str(tmp_path))
    assert packed == [[5]]
    assert any(reason in text and "is not used" in text for text in warned)


def test_a_row_of_another_device_is_not_loaded(tmp_path):
    (tmp_path / "fn_broken.py").write_text("import no_such_vendor_library")
    install(tmp_path, "fn_broken", "row", "npu")
    assert ranks.run(1, pack_beside, str(tmp_path)) == [([[5]], [])]


@pytest.mark.slow
def test_the_plugin_makes_a_test_of_every_kernel(toy):
    (toy / "conftest.py").write_text("")
    found = ranks.python("-m", "pytest", "-p", "fn.testing.pytest_plugin", "--fn-row", "fn_toy_device:row", "-q", "-rA",
                         "--fn-size", "9", "--fn-size", "64", cwd=toy)  # fmt: skip
    assert found.returncode == 0, found.stdout + found.stderr
    assert "fn_toy_device:row[pack_bits]" in found.stdout
    assert "2 passed" in found.stdout


@pytest.mark.slow
def test_the_plugin_shows_what_differs(tmp_path):
    (tmp_path / "fn_wrong.py").write_text(
        "from fn.kernels import Accelerator, reference\n"
        "row = Accelerator('cpu', {'pack_bits': lambda x: reference.REFERENCES['pack_bits'](-x)})"
    )
    found = ranks.python("-m", "pytest", "-p", "fn.testing.pytest_plugin", "--fn-row", "fn_wrong:row", "--fn-size",
                         "9", cwd=tmp_path)  # fmt: skip
    assert found.returncode == 1
    assert "NOT conforming" in found.stdout
    assert "pack_bits, known answer" in found.stdout
