"""Run notebooks from top to bottom and keep what they show: `make notebooks`, or with paths for some of them.

    python notebooks/execute.py [notebooks/1_error_feedback.ipynb ...]

Progress bars, run times and widths that change from run to run are left out, so that a difference in git is one.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent


def execute(path: Path) -> None:
    """Run one notebook in the repository's root and write it back with its outputs; a cell that fails raises."""
    notebook = nbformat.read(path, as_version=4)
    begin = time.perf_counter()
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": str(HERE.parent)}}
    ).execute()
    for place, cell in enumerate(notebook.cells):
        cell.id = f"cell-{place}"
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    nbformat.write(notebook, path)
    print(f"{path.name}: {time.perf_counter() - begin:.0f} s, {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    for found in [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        execute(found)
