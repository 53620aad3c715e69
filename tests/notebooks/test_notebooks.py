"""The notebooks run from top to bottom, and what they claim, which they assert, is true."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from ranks import LIMIT, python

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[nbformat.NotebookNode]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


@pytest.mark.reliability
@pytest.mark.filterwarnings("ignore")
@each_notebook
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setenv("MPLBACKEND", "agg")
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(ROOT)}}
    NotebookClient(notebook, timeout=int(LIMIT), kernel_name="python3", resources=resources).execute()


def test_the_cells_of_a_quick_notebook_run_in_order() -> None:
    """It stands for all; `make notebooks` and `make reliability-test` run each, and with Jupyter."""
    (path,) = (path for path in NOTEBOOKS if path.stem == "5_your_own_accelerator")
    ended = python("-c", "\n".join(cell.source for cell in code_cells(path)), cwd=ROOT, MPLBACKEND="agg")
    assert ended.returncode == 0, ended.stderr


@each_notebook
def test_a_notebook_claims_something_and_is_kept_light_with_its_outputs(path: Path) -> None:
    cells = code_cells(path)
    assert any("assert" in cell.source for cell in cells)
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    assert path.stat().st_size < 150_000, "smaller pictures: figure.dpi"


def test_there_are_notebooks() -> None:
    assert [path.name[0] for path in NOTEBOOKS] == ["1", "2", "3", "4", "5", "6", "7", "8", "9"]
