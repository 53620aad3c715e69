"""`python -m fn plan`: the issue's line as written, the files, the refusals, and a job that measures its own links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from ranks import LIMIT, python

from fn.__main__ import main
from fn.planner.evidence import AT_SIZE, SMALL, measured, show_parts
from fn.planner.network import Cost, Link
from fn.planner.recommend import PICKS
from fn.planner.units import show_seconds
from fn.tools import calibrate

LINE = "plan --params 1.3e9 --world 64 --per-node 8 --intra 900gbit --inter 10gbit --compute 350ms"
NVLINK = "plan --params 1.3e9 --world 8 --intra 7.2tbit --compute 350ms"
ETHERNET = "plan --params 1e7 --world 2 --inter 100mbit --compute 170ms --dtype bf16"


def blocks(capsys):
    """Return what was printed, in the parts between empty lines."""
    return [part.splitlines() for part in capsys.readouterr().out.strip().split("\n\n")]


def test_what_to_take_stands_in_three_lines_at_most_that_hold_against_the_table(capsys, tmp_path):
    main([*LINE.split(), "--json", str(tmp_path / "plan.json")])
    said, title, picks, *_ = blocks(capsys)
    found = json.loads((tmp_path / "plan.json").read_text())
    made = found["recommendation"]
    assert len(said) <= 3
    assert said == made["lines"]
    assert title == [
        "1,300,000,000 parameters; 64 ranks in 8 nodes of 8; 900 Gbit/s, 5 us inside a node; 10 Gbit/s, 30 us between "
        "nodes",
        "assumed: a GPT of width 2,048 with 24 layers; 91.9 % of the parameters in hidden matrices; --hidden-share "
        "gives your own",
        found["links"]["words"],
    ]
    assert len(picks) == 2 + 2 + len(PICKS)
    assert [line.partition(", ")[0] for line in picks if line.startswith("muon, DDP")] == ["muon"]
    adamw = min(row["step"] for row in found["predictions"] if row["method"] == "adamw")
    assert f"AdamW under DDP takes {show_seconds(adamw)}." in said[0]
    taken = next(pick for pick in made["picks"] if pick["name"] == made["take"])
    assert (taken["name"], taken["grade"], taken["steps"], taken["time"]) == (PICKS[0].name, SMALL, None, None)
    rows = {(row["method"], row["topology"]): row["step"] for row in found["predictions"]}
    assert rows[PICKS[0].row, made["topology"]] == taken["step"] < 0.2 * adamw
    share = show_parts((taken["step"] / adamw,))
    assert said[1] == f"{share} of the time of a step, on your network; {taken['words']}."
    other = next(pick for pick in made["picks"] if said[2].startswith(f"Or {pick['name']}"))
    assert other["time"] == [pytest.approx(x * other["step"] / adamw) for x in other["steps"]]
    assert other["sources"]
    assert all(source in said[2] for source in other["sources"][:1])


def test_what_is_published_at_this_size_stands_in_front_where_it_is_sooner(capsys, tmp_path):
    line = LINE.replace("1.3e9", "914e6").split()
    main([*line, "--json", str(tmp_path / "plan.json")])
    said = blocks(capsys)[0]
    made = json.loads((tmp_path / "plan.json").read_text())["recommendation"]
    taken = next(pick for pick in made["picks"] if pick["name"] == made["take"])
    assert (taken["grade"], made["take"]) == (AT_SIZE, "muloco, int8")
    assert said[1].startswith(f"Time to AdamW's loss: {show_parts(taken['time'])} of AdamW's: ")
    assert said[2].startswith("Or keep your optimizer, with adamw, int4 gradients (two-level): ")
    main([*line, "--local-steps", "100", "--json", str(tmp_path / "plan.json")])  # longer rounds are not published
    assert blocks(capsys)[0][0].startswith("Take adamw, int4 gradients")


@pytest.mark.parametrize(("compute", "front"), [("1s", "adamw, int4 gradients"), ("100ms", "muloco, int8")])
def test_what_may_be_later_at_the_far_end_of_its_range_does_not_stand_in_front(compute, front, capsys, tmp_path):
    line = f"plan --params 130e6 --world 16 --per-node 1 --inter 1gbit --compute {compute}"
    main([*line.split(), "--json", str(tmp_path / "plan.json")])
    picks = {p["name"]: p for p in json.loads((tmp_path / "plan.json").read_text())["recommendation"]["picks"]}
    int4, muloco = picks["adamw, int4 gradients"], picks["muloco, int8"]
    assert muloco["grade"] == AT_SIZE
    assert muloco["time"][0] < int4["share"] * int4["own"][0]  # sooner, but for its range
    assert (muloco["time"][2] < int4["share"] * int4["own"][2]) == (front == "muloco, int8")
    assert blocks(capsys)[0][0].startswith(f"Take {front}: ")


def test_a_ratio_of_the_user_is_the_second_factor(capsys, tmp_path):
    main([*LINE.split(), "--steps-ratio", "1.1", "--json", str(tmp_path / "plan.json")])
    said, _, table, *_ = blocks(capsys)
    assert [" to " in line for line in table if line.endswith("given")] == [False] * len(PICKS)  # no range
    picks = json.loads((tmp_path / "plan.json").read_text())["recommendation"]["picks"]
    assert all(pick["steps"] == [1.1] * 3 and pick["time"][0] == pytest.approx(1.1 * pick["share"]) for pick in picks)
    assert said[0].startswith("Take muloco, int8")  # the shortest step
    assert "steps: 110 %, as given" in said[1]


def test_where_nothing_pays_it_says_to_stay_with_ddp(capsys, tmp_path):
    main([*NVLINK.split(), "--json", str(tmp_path / "plan.json")])
    said, *_ = blocks(capsys)
    assert said[0].startswith("Stay with DDP: adamw takes ")
    assert len(said) <= 3
    assert json.loads((tmp_path / "plan.json").read_text())["recommendation"]["take"] is None


def test_the_time_of_a_step_counts_the_warm_up_of_the_runs(tmp_path, capsys):
    main([*LINE.split(), "--json", str(tmp_path / "plan.json")])
    found = json.loads((tmp_path / "plan.json").read_text())
    step = {row["method"]: row["step"] for row in reversed(found["predictions"])}  # of the fastest topology
    picks = {pick["name"]: pick for pick in found["recommendation"]["picks"]}
    name = "onebit_adam, 1 bit"
    data, pick = measured()["methods"][name], picks[name]
    whole = data["warm_up"] * step[data["warm_up_as"]] + (1 - data["warm_up"]) * step[name]
    assert data["warm_up"] > 0
    assert pick["share"] == pytest.approx(whole / step["adamw"])


def bytes_of(path, *line):
    """Return what a rank sends on one axis, by method."""
    main([*ETHERNET.split(), *line, "--dtype", "fp32", "--json", str(path)])
    return {row["method"]: row["bytes"] for row in json.loads(path.read_text())["predictions"]}


def test_the_share_of_hidden_matrices_is_the_share_of_votes(capsys, tmp_path):
    """Of the others each number is a byte, of hidden ones a bit, and AdamW's gradients are four."""
    path = tmp_path / "plan.json"
    for share in ("0", "1/4", "1", None):
        found = bytes_of(path, *([] if share is None else ["--hidden-share", share]))
        part = json.loads(path.read_text())["hidden_share"]
        text = " ".join(capsys.readouterr().out.split())
        said = "--hidden-share gives your own" if share is None else "as --hidden-share says"
        assert part == pytest.approx(0.683 if share is None else float(Fraction(share)), abs=1e-3)
        assert f"{100 * part:.3g} % of the parameters in hidden matrices; {said}" in text
        assert found["sign_muon"] / found["adamw"] == pytest.approx(part / 32 + (1 - part) / 4, rel=0.02)
        assert found["adamw"] == found["muon"] == 1e7 * 4


@pytest.mark.parametrize("params", ["1", "2", "10", "1000"])
def test_a_plan_for_a_handful_of_parameters(params, capsys):
    for more in ([], ["--hidden-share", "0"], ["--hidden-share", "1"], ["--tensors", "3"]):
        main([*ETHERNET.replace("1e7", params).split(), "--all", "--contrib", *more])
        assert f"{int(params):,} parameter" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "name", "said"),
    [
        ("--json", "nowhere/plan.json", "No such file"),
        ("--json", ".", "Is a directory"),
        ("--html", "nowhere/plan.html", "No such file"),
    ],
)
def test_a_file_that_cannot_be_written_is_refused_before_the_work(flag, name, said, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([*LINE.split(), flag, str(tmp_path / name)])
    answer = capsys.readouterr()
    assert f"{flag}: " in answer.err
    assert f"'{tmp_path / name}'" in answer.err
    assert said in answer.err
    assert answer.out == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--compute 350ms", "--params"),
        ("--params 1e9 --compute 350", "argument --compute: '350' has no unit"),
        ("--params 1e9 --compute 350ms --intra 10gb", "argument --intra: '10gb' has the unknown unit 'gb'"),
        ("--params 1e9 --compute 350ms", "--world: missing"),
        ("--params 1e9 --compute 350ms --world 8", "--intra: missing"),
        ("--params 1e9 --compute 1s --world 8 --intra 1tbit --inter 1gbit", "--per-node: missing"),
        ("--params 1e9 --compute 1s --world 8 --per-node 4 --inter 1gbit", "--intra: missing"),
        ("--params 1e9 --compute 1s --world 9 --per-node 4 --inter 1gbit --intra 1tbit", "whole nodes"),
        ("--params 1e9 --compute 1s --world 2 --intra 1gbit --inter-latency 50ms", "--inter-latency: is of no use"),
        ("--params 1e9 --compute 1s --world 2 --inter 1gbit --intra-latency 50ms", "--intra-latency: is of no use"),
        ("--params 1e9 --compute 1s --world 2 --intra 1gbit --bucket-efficiency 1/2", "--bucket-efficiency: is of no"),
        ("--params 1e9 --compute 1s --world 2 --inter 1gbit --whole-efficiency 1.2", "'1.2' is not a part"),
        ("--params 1e9 --compute 1s --world 2 --inter 1gbit --hidden-share 1.2", "'1.2' is not a part such as 9/10"),
        ("--params 1e9 --compute 1s --world 2 --intra 1gbit --transport gloo", "--transport: is of no use"),
        ("--params 1e9 --compute 1s --world 2 --inter 1gbit --transport tcp", "argument --transport: invalid choice"),
        ("--params 1e9 --compute 1s --calibrate", "no job is running"),
    ],
)
def test_refusals(line, said, capsys, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["plan", *line.split()])
    assert ended.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


def calibrated(monkeypatch, job, links, *line):
    """Run the command in a job whose links are not measured but given."""
    monkeypatch.setattr(calibrate, "join_job", lambda: nullcontext(job))
    monkeypatch.setattr(calibrate, "measure", lambda found: links)
    monkeypatch.setattr(calibrate, "coding", lambda params, device: lambda net: {})
    main(["plan", "--calibrate", "--params", "1e7", "--compute", "1s", *line])


ONE_NODE = calibrate.Job(0, 2, 2, torch.device("cpu")), {"data": Link(Cost(1e-5, 5e9))}
ALL_NODES = calibrate.Job(0, 4, 1, torch.device("cpu")), {"node": Link(Cost(1e-4, 1e9))}


@pytest.mark.parametrize(
    ("job", "line", "title"),
    [
        (ONE_NODE, "", "2 ranks; 5 Gbit/s, 10 us between ranks"),
        (
            ONE_NODE,
            "--world 8 --inter 2gbit --inter-latency 50us",
            "8 ranks in 4 nodes of 2; 5 Gbit/s, 10 us inside a node; 2 Gbit/s, 50 us between nodes",
        ),
        (
            ALL_NODES,
            "--world 32 --per-node 8 --intra 900gbit",
            "32 ranks in 4 nodes of 8; 900 Gbit/s, 5 us inside a node; 1 Gbit/s, 100 us between nodes",
        ),
    ],
)
def test_flags_say_what_a_job_cannot_measure(job, line, title, monkeypatch, capsys):
    calibrated(monkeypatch, *job, *line.split())
    assert f"10,000,000 parameters; {title}" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(("speed", "more"), [(1e9, ""), (2.5e10, ""), (2.5e10, "--bucket-efficiency 0.5")])
def test_links_that_were_measured_stay_as_measured(speed, more, monkeypatch, capsys, tmp_path):
    """Of whole messages all that was measured is reached, at any speed; nothing measures those in buckets."""
    measured = ALL_NODES[0], {"node": Link(Cost(1e-4, speed), {"all_reduce": Cost(2e-4, 0.8 * speed)})}
    calibrated(monkeypatch, *measured, *more.split(), "--json", str(tmp_path / "plan.json"))
    found = json.loads((tmp_path / "plan.json").read_text())["links"]
    assert (found["bits_per_second"], found["whole"]) == (speed, 1)
    assert found["buckets"] == pytest.approx(0.5 if more else 0.65 / 0.85)
    assert "; measured; " + ("--bucket-efficiency." if more else "buckets have 76 % of that, as NCCL") in found["words"]


@pytest.mark.parametrize(
    ("job", "flag", "text"),
    [
        (ONE_NODE, "--intra", "1gbit"),
        (ONE_NODE, "--intra-latency", "1ms"),
        (ALL_NODES, "--inter", "1gbit"),
        (ALL_NODES, "--whole-efficiency", "0.9"),
        (ALL_NODES, "--transport", "gloo"),
    ],
)
def test_a_flag_for_what_is_measured_is_refused(job, flag, text, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="2"):
        calibrated(monkeypatch, *job, flag, text)
    assert f"{flag}: is measured by --calibrate" in capsys.readouterr().err


@pytest.mark.parametrize("line", [LINE, "table"])
def test_a_reader_that_has_seen_enough_is_no_error(line, tmp_path):
    """As behind `| head -0`: the pipe is closed before anything is written, and no line is kept for later."""
    code = "import os, runpy; end, start = os.pipe(); os.close(end); os.dup2(start, 1); os.close(start); "
    file = ["--json", str(tmp_path / "plan.json")] if line == LINE else []
    ended = python("-c", f"{code}runpy.run_module('fn', run_name='__main__')", *line.split(), *file)
    assert (ended.returncode, ended.stderr) == (1, "")
    assert not file or json.loads((tmp_path / "plan.json").read_text())["recommendation"]["lines"]


@pytest.mark.reliability
def test_a_job_measures_its_links(tmp_path):
    """Two gloo processes measure alpha and beta of the axis between them, and plan with that."""
    out = tmp_path / "plan.json"
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 -m fn plan --calibrate --params 1e7 --compute 1s"
    root = str(Path(__file__).parents[2])
    ended = subprocess.run(
        [sys.executable, *launch.split(), "--json", str(out)],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert ended.returncode == 0, ended.stderr
    for collective in ("all_reduce", "all_to_all", "all_gather"):
        assert f"measured on 'data': {collective}" in ended.stdout
    rows = {row["method"]: row for row in json.loads(out.read_text())["predictions"]}
    assert rows["adamw"]["bytes"] == 40_000_000
    assert 0 < rows["onebit_adam"]["coding"] < 10
