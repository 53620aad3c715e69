"""What docstrings and pages say of the learning rate is what the atlas measured."""

from __future__ import annotations

import re

import pytest

import fn
from benchmarks.atlas import choices, runs
from benchmarks.atlas.methods import METHODS

MADE = {name: getattr(fn, name, None) or getattr(fn.contrib, name, None) for name in METHODS}
NAMED = {name: name for name, method in METHODS.items() if MADE[name] and name != "adamw" and method.tasks}
NAMED |= {"muloco": "muloco, 2 bits"}
MADE["muloco"] = fn.muloco
"""By the name of an optimizer: its row of the atlas, of those that have run."""


@pytest.mark.parametrize("name", NAMED)
def test_a_docstring_says_which_learning_rate_to_start_with(name: str) -> None:
    said = re.search(r"start with AdamW's rate(?: times (\d+(?:\.\d+)?))?", " ".join(MADE[name].__doc__.split()))
    assert said is not None
    assert float(said[1] or 1) == choices.start(runs.read(runs.FULL), NAMED[name])


def test_every_optimizer_has_a_factor() -> None:
    assert len(NAMED) >= 16
