"""What README, docs and the picture say of steps and time is what the planner's one function says."""

from __future__ import annotations

import json
import re

import pytest

from benchmarks import published
from benchmarks.measure import ROOT
from fn.__main__ import main
from fn.planner.units import show_seconds

LINE = "plan --params 124e6 --world 8 --inter 1gbit --inter-latency 100us --compute 300ms --memory 4tbit --json {}"


@pytest.fixture
def planned(tmp_path, capsys):
    """Return what the command says for the picture's network."""
    main(LINE.format(tmp_path / "plan.json").split())
    return json.loads((tmp_path / "plan.json").read_text())


def test_the_picture_shows_the_numbers_of_the_command(planned):
    found = {name: (values, mark) for name, values, mark in published.points()}
    said = planned["recommendation"]
    assert found["exact Muon under DDP"] == (pytest.approx(said["exact"]["time"]), "published")
    for pick in said["picks"]:
        values, mark = found[pick["name"]]
        own = pick["steps"] is None
        expected = [x * pick["share"] for x in pick["own"]] if own else pick["time"]
        assert values == pytest.approx(expected)
        assert (mark == "own") == own
    assert {mark for _, mark in found.values()} == set(published.MARKS)


def test_the_sentence_of_the_readme_is_the_command_s(planned):
    steps = {row["method"]: row["step"] for row in planned["predictions"]}
    text = (ROOT / "README.md").read_text()
    said = re.search(r"takes ([\d.]+ \w+) under DDP, [\d.]+ \w+ of it waiting, and ([\d.]+ \w+) with gradients", text)
    assert said
    assert said.groups() == (show_seconds(steps["adamw"]), show_seconds(steps["adamw, int4 gradients"]))
