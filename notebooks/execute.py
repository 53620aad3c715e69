"""Run notebooks from top to bottom and keep what they show: `make notebooks`, or with paths for some of them.

    python notebooks/execute.py [notebooks/1_error_feedback.ipynb ...]

Progress bars and run times are left out and pictures get a palette of 128 colours, so that what git keeps is small.
"""

from __future__ import annotations

import base64
import io
import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from PIL import Image

HERE = Path(__file__).resolve().parent


def execute(path: Path) -> None:
    """Run one notebook in the repository's root and write it back with its outputs; a cell that fails raises."""
    notebook = nbformat.read(path, as_version=4)
    begin = time.perf_counter()
    NotebookClient(
        notebook, timeout=240, kernel_name="python3", coalesce_streams=True,
        resources={"metadata": {"path": str(HERE.parent)}},
    ).execute()  # fmt: skip
    for place, cell in enumerate(notebook.cells):
        cell.id = f"cell-{place}"
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    output.data["image/png"] = smaller(output.data["image/png"])
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    nbformat.write(notebook, path)
    print(f"{path.name}: {time.perf_counter() - begin:.0f} s, {path.stat().st_size / 1000:.0f} kB")


def smaller(png: str) -> str:
    """Return a PNG in base64 with a palette of its 128 most frequent colours."""
    out = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(png))).convert("RGB").quantize(128).save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    for found in [Path(name) for name in sys.argv[1:]] or sorted(HERE.glob("*.ipynb")):
        execute(found)
