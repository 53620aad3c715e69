"""Measurements of fn, a script each: `python -m benchmarks.steps.step`. `benchmarks/README.md` reports them."""

import sys
from pathlib import Path

# Some train the model of an example. Here, because what is imported from there may stand in front of all else.
sys.path.append(str(Path(__file__).parents[1] / "examples"))
