"""The planner beside what others measured on GPUs: DiLoCo and DDP on four L40S over shaped TCP links.

`public_grid.json` holds means over whole rounds of the telemetry of github.com/Adnan082/diloco-measured,
experiments/01_cu_grid, whose licence is Apache-2.0.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fn.__main__ import main
from fn.planner import traffic
from fn.planner.efficiency import over_tcp
from fn.planner.network import Cost, Link, network
from fn.planner.predict import efficiency_of_buckets

GRID = json.loads((Path(__file__).parent / "public_grid.json").read_text())
LINE = "plan --params {parameters} --world 4 --per-node 1 --intra {link} --inter {link} --inter-latency 100us"
POINTS = [pytest.param(point, id=f"{point['method']}-{point['link']}-{i}") for i, point in enumerate(GRID["points"])]


def planned(point, path, *more):
    """Return the milliseconds of a step that the command predicts for a point of the grid."""
    line = LINE.format(parameters=GRID["parameters"], link=point["link"])
    rounds = ["--local-steps", str(point.get("local_steps", 100))]
    main([*line.split(), "--compute", f"{GRID['compute_ms']}ms", *rounds, *more, "--json", str(path)])
    rows = {row["method"]: row for row in json.loads(path.read_text())["predictions"]}
    return 1e3 * rows["adamw" if point["method"] == "ddp" else "diloco"]["step"]


@pytest.mark.parametrize("point", POINTS)
def test_every_point_is_within_a_quarter(point, tmp_path, capsys):
    assert planned(point, tmp_path / "plan.json") == pytest.approx(point["measured_ms"], rel=0.25)


def test_links_without_losses_are_the_plan_before_the_efficiencies(tmp_path, capsys):
    whole = ["--bucket-efficiency", "1", "--whole-efficiency", "1"]
    for point in GRID["points"][:4]:  # DiLoCo and DDP at 50 Mbit/s
        found = planned(point, tmp_path / "plan.json", *whole)
        assert found == pytest.approx(point["planned_ms_at_61da050"], rel=0.02)


def test_the_efficiency_of_buckets_is_found_in_a_measured_step():
    """`--probe` asks which part of the bandwidth makes DDP's step as long as it was."""
    model, seconds = traffic.model(GRID["parameters"]), GRID["compute_ms"] / 1e3
    net = network(4, 1, link := Link(Cost(1e-4, 2e8)), link)
    steps = {p["link"]: p["measured_ms"] / 1e3 for p in GRID["points"] if p["method"] == "ddp"}
    found = efficiency_of_buckets(model, net, seconds, steps["200mbit"], traffic.BUCKET)
    assert found == pytest.approx(over_tcp().at(2e8)[1], rel=0.02)
    assert efficiency_of_buckets(model, net, seconds, 0.1, traffic.BUCKET) == 1.0  # faster than the link: nothing lost
