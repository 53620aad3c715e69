"""What the report of the house counts."""

from __future__ import annotations

import house_report
import torch

import fn


def test_leaf_helpers_are_left_out_of_a_way():
    params = {"w": torch.ones(3)}
    assert house_report.way(lambda: fn.tree.leaves(params)) == (["tree.py"], [])
    assert house_report.way(lambda: fn.apply_updates(params, params)).without_leaves[0] == "base.py"


def test_a_pure_step_enters_none_of_the_steps_in_place():
    entered = house_report.pure().entered
    assert "base.py" in entered
    assert not any(name.startswith("inplace") for name in entered)
