"""`python -m fn plan --probe`: a script's own steps say what it needs; it is stopped, and torch is as before."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import LIMIT
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as torch_optimizer

import fn
from fn.__main__ import main
from fn.planner.recommend import BASE, PICKS
from fn.planner.units import show_seconds
from fn.tools import calibrate, probe, trials

LINKS = "--world 8 --intra 1gbit"

DDP = """
import sys, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
torch.manual_seed(dist.get_rank())
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(6, 9), torch.nn.Linear(9, 1)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with open(f"{sys.argv[1]}/{dist.get_rank()}", "w") as seen:
    while True:
        for last in (False, True):  # accumulates as nanoGPT does, without `no_sync`
            model.require_backward_grad_sync = last
            model(torch.randn(4, 6)).square().mean().backward()
        print(sum(float(p.grad.double().sum()) for p in model.parameters()), file=seen, flush=True)
        try:
            optimizer.step()
        except Exception:
            pass
        optimizer.zero_grad()
"""

LONELY = """
import torch
frozen = torch.nn.Parameter(torch.ones(50))
matrix, vector = torch.nn.Parameter(torch.ones(4, 3)), torch.nn.Parameter(torch.ones(7, dtype=torch.bfloat16))
one, other = torch.optim.AdamW([matrix, frozen]), torch.optim.SGD([vector], lr=0.1)
for step in range({steps}):
    matrix.sum().backward()
    vector.sum().backward()
    one.step()
    other.step()
    {more}
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a function that writes a script; what is measured of the machine is given, not measured."""
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(calibrate, "coding", lambda params, device: lambda net: {})
    monkeypatch.setattr(calibrate, "memory", lambda device: 1e12)
    monkeypatch.setattr(calibrate, "flops", lambda device: 1e11)
    monkeypatch.setattr(trials, "tries", lambda *given: trials.none("not now"))

    def write(text):
        path = tmp_path / "train.py"
        path.write_text(text)
        return str(path)

    return write


def run(*line):
    main(["plan", *LINKS.split(), *line])


def refused(capsys, *line):
    """Return what is said of a line that is refused."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", *line])
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def test_what_has_a_gradient_is_planned_for(script, capsys, tmp_path):
    run("--json", str(tmp_path / "plan.json"), "--probe", script(LONELY.format(steps=1000, more="")))
    text = capsys.readouterr().out
    assert "19 parameters; 8 ranks; 1 Gbit/s, 5 us between ranks" in text
    assert "parameters: 19 in 2 tensors, which had a gradient when AdamW or SGD stepped" in text
    assert "gradients: float32, bfloat16, 4 bytes each, as most are" in text
    assert "as it is, the median of 4" in text
    assert "that of the step as it is" in text
    assert "own communication" not in text
    rows = {row["method"]: row for row in json.loads((tmp_path / "plan.json").read_text())["predictions"]}
    assert rows["adamw"]["bytes"] == 2 * 7 * 19 * 4 / 8


MODEL = """
import torch
from torch.nn import Embedding, LayerNorm, Linear, Sequential
torch.manual_seed(0)
model = Sequential(Embedding(211, 16), Linear(16, 48), Linear(48, 16), LayerNorm(16), Linear(16, 211, bias=False))
model[-1].weight = model[0].weight
"""

TRAINS = """
matrices = [p for p in model.parameters() if p.ndim == 2]
vectors = [p for p in model.parameters() if p.ndim == 1]
wrapped, optimizer = Sequential(model), torch.optim.AdamW([{"params": vectors}, {"params": matrices}])
while True:
    optimizer.zero_grad()
    wrapped(torch.arange(9)).square().mean().backward()
    optimizer.step()
"""


def test_labels_are_those_of_the_modules_that_hold_the_params(script, capsys, tmp_path):
    """Whatever the optimizer's groups are; so bytes are those of a step of an optimizer that is given the labels."""
    run("--json", str(tmp_path / "plan.json"), "--probe", script(MODEL + TRAINS))
    found = json.loads((tmp_path / "plan.json").read_text())
    rows = {row["method"]: row["bytes"] for row in found["predictions"]}
    space: dict = {}
    exec(MODEL, space)
    params, labels = [p.detach() for p in space["model"].parameters()], fn.labels_of(space["model"])
    assert found["hidden_share"] == 2 * 48 * 16 / sum(p.numel() for p in params)
    text = " ".join(capsys.readouterr().out.split())
    assert f"hidden matrices: {100 * found['hidden_share']:.3g} % of the parameters, as fn.labels_of says of" in text
    assert "assumed" not in text
    phases = {"muon": fn.Phase.WARMUP, "sign_muon": fn.Phase.COMPRESSED}
    for name, phase in phases.items():
        tx, books = getattr(fn, name)(axis="data", labels=[*labels.values()]), []

        def step(x, tx=tx, books=books, phase=phase):
            with fn.ledger() as book:
                tx.update(phase)([x * p for p in params], tx.init(params), params)
            books.append(book.total)
            return x

        fn.simulate(step, "data", 8)(torch.rand(8))
        assert rows[name] == books[0]


def test_without_modules_shapes_say_what_is_an_embedding(script, capsys):
    made = "words, inner = (torch.nn.Parameter(torch.ones(n, 8)) for n in (33, 32))"
    steps = "(words.sum() + inner.sum()).backward()\n    third.step()"
    text = LONELY.format(steps=1000, more=steps)
    run("--probe", script(text.replace("for step", f"{made}\nthird = torch.optim.SGD([words, inner])\nfor step")))
    said = " ".join(capsys.readouterr().out.split())
    share = (4 * 3 + 32 * 8) / (19 + 65 * 8)
    assert f"hidden matrices: {100 * share:.3g} % of the parameters, as shapes say, for no module holds the" in said
    assert "if one side is more than 4 times the other" in said


def test_the_script_is_stopped_behind_the_step_and_torch_is_as_before(script, capsys, tmp_path):
    hooks = [{**vars(torch_optimizer)[f"_global_optimizer_{when}_hooks"]} for when in ("pre", "post")]
    argv, path = [*sys.argv], [*sys.path]
    counts = tmp_path / "steps"
    more = f"__import__('pathlib').Path({str(counts)!r}).write_text('.' * (step + 1))"
    run("--steps", "8", "--compute", "7ms", "--probe", script(LONELY.format(steps=1000, more=more)), "--its", "own")
    assert "computation: 7 ms, as --compute says" in capsys.readouterr().out
    assert counts.read_text() == "." * 7
    assert [vars(torch_optimizer)[f"_global_optimizer_{when}_hooks"] for when in ("pre", "post")] == hooks
    assert (sys.argv, sys.path) == (argv, path)
    assert probe.SYNCHRONISES not in vars(DistributedDataParallel)


def test_a_script_sees_its_own_arguments_and_its_own_folder(script, capsys, tmp_path):
    (tmp_path / "beside_it.py").write_text("import sys\nassert sys.argv[1:] == ['--lr', '1', '--world', '3']\n")
    run("--probe", script("import beside_it" + LONELY.format(steps=1000, more="")), "--lr", "1", "--world", "3")
    assert "19 parameters; 8 ranks" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('nothing')", "no optimizer of torch.optim stepped in it; give a script that trains with one"),
        (LONELY.format(steps=3, more=""), "ended after 3 steps of its optimizer, and 10 are needed; let it train"),
        (LONELY.format(steps=7, more=""), "let it train longer, or give --steps 7"),
        (LONELY.format(steps=99, more="").replace(".sum()", ".detach().requires_grad_().sum()"),
         "nothing had a gradient when the optimizer stepped"),
        ("import sys; sys.exit()", "no optimizer of torch.optim stepped"),
    ],
)  # fmt: skip
def test_a_script_that_says_too_little(text, said, script, capsys):
    assert said in refused(capsys, *LINKS.split(), "--probe", script(text))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--world 8 --intra 1gbit --probe", "--probe: give a script that trains"),
        ("--world 8 --intra 1gbit --probe nowhere.py", "--probe: 'nowhere.py' is no file"),
        ("--world 8 --intra 1gbit --steps 5 --probe train.py", "--steps: expected at least 6, but got 5"),
        ("--world 8 --intra 1gbit --hidden-share 1 --probe train.py", "--hidden-share: --probe takes it from"),
        ("--world 8 --intra 1gbit --params 7 --probe train.py", "--params: --probe takes it from the script"),
        ("--world 8 --intra 1gbit --dtype bf16 --probe train.py", "--dtype: --probe takes it from the script"),
        ("--world 8 --probe train.py", "--intra: missing"),
        ("--probe train.py", "--probe: one rank has no links to measure; start several by torchrun"),
    ],
)
def test_refusals(line, said, capsys, script):
    assert said in refused(capsys, *line.split())


@pytest.mark.parametrize(("text", "code"), [("raise KeyError('mine')", 1), ("import sys; sys.exit(3)", 3)])
def test_what_a_script_raises_is_its_own(text, code, script, capsys):
    with pytest.raises(SystemExit) as ended:
        run("--probe", script(text))
    assert ended.value.code == code
    assert code != 1 or "KeyError: 'mine'" in capsys.readouterr().err


def test_what_fails_behind_the_last_step_is_raised_where_the_script_cannot_catch_it(script):
    def measure(probed, params):
        raise RuntimeError("no links")

    text = "try:\n" + LONELY.format(steps=99, more="").replace("\n", "\n    ") + "\nexcept Exception:\n    pass\n"
    with pytest.raises(RuntimeError, match="no links"):
        probe.probe(script(text), [], 6, measure)


def under_torchrun(tmp_path, *line):
    """Run the command on two gloo ranks, and return what it printed."""
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 -m fn plan"
    ended = subprocess.run(
        [sys.executable, *launch.split(), *line],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1",
             "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.reliability
def test_two_ranks_are_planned_for_from_their_own_script(tmp_path):
    """Half of the steps are averaged as they were, then none is, and behind the last one the links are measured."""
    train = tmp_path / "train.py"
    train.write_text(DDP)
    out, html = tmp_path / "plan.json", tmp_path / "plan.html"
    text = under_torchrun(tmp_path, "--json", str(out), "--html", str(html), "--probe", str(train), str(tmp_path))
    assert "parameters: 73 in 4 tensors, which had a gradient when SGD stepped" in text
    assert "the median of 4 steps in which DistributedDataParallel did not average" in text
    assert "own communication" not in text
    assert "measured on 'data': all_to_all" in text
    assert re.search(r"^  messages in buckets: \d+ % of the bandwidth of whole ones, as that step", text, re.MULTILINE)
    assert re.search(r"^73 parameters; 2 ranks; ", text, re.MULTILINE)
    rows = {row["method"]: row for row in json.loads(out.read_text())["predictions"]}
    assert rows["adamw"]["bytes"] == 73 * 4
    assert "<script>" in html.read_text()
    both = re.compile(r"^  ([^:\n]+): predicted [\d.]+ [mu]?s, measured [\d.]+ [mu]?s$", re.MULTILINE)
    tried = [BASE, *(pick for pick in PICKS if pick.model)]
    assert both.findall(text) == [pick.name for pick in tried]
    steps = {pick.name: rows[pick.row]["step"] for pick in tried}
    assert all(rows[pick.row]["predicted"] != steps[pick.name] for pick in tried)
    taken = json.loads(out.read_text())["recommendation"]["take"] or BASE.name
    assert steps[taken] == min(steps[name] for name in (BASE.name, taken))
    first, second = ((tmp_path / str(rank)).read_text().split() for rank in range(2))
    assert len(first) == len(second) == probe.STEPS
    assert [a == b for a, b in zip(first, second, strict=True)] == [True] * 5 + [False] * 5


@pytest.mark.reliability
def test_communication_that_cannot_be_left_out_is_named(tmp_path):
    train = tmp_path / "train.py"
    by_hand = "for p in model.parameters(): dist.all_reduce(p.grad)"
    alone = DDP.replace("DistributedDataParallel(torch", "(torch")
    train.write_text(alone.replace("        try:", f"        {by_hand}\n        try:"))
    text = under_torchrun(tmp_path, "--probe", str(train), str(tmp_path))
    assert "that of the step as it is" in text
    assert "The script's own communication is in it (allreduce)" in text


STEPS = {"adamw": 10e-3, "adamw, int4 gradients": 9e-3, "sign_muon": 8e-3, "muloco, int8": 7e-3}


@pytest.mark.parametrize("least", STEPS)
def test_what_takes_the_least_when_it_is_tried_is_recommended(least, script, capsys, tmp_path, monkeypatch):
    """Whatever the model predicts, and whatever it predicts of the picks that were not tried."""
    steps = {**STEPS, least: 2e-3}
    tried = trials.Trials(steps, 2, {"onebit_adam": "not now"})
    monkeypatch.setattr(trials, "tries", lambda *given: tried)
    line = f"--world 2 --intra 1kbit --compute 1ms --steps-ratio 1 --json {tmp_path / 'plan.json'}"
    main(["plan", *line.split(), "--probe", script(LONELY.format(steps=99, more=""))])
    text = capsys.readouterr().out
    for name, step in steps.items():
        assert re.search(rf"^  {name}: predicted [\d.]+ m?s, measured {show_seconds(step)}$", text, re.MULTILINE)
    assert "not tried: onebit_adam: not now" in text
    found = json.loads((tmp_path / "plan.json").read_text())
    assert (found["recommendation"]["take"] or "adamw") == least
    assert re.search(rf"^(Take|Stay with DDP:) {least}.* 2 ms a step, measured \(predicted: ", text, re.MULTILINE)
    if least != "adamw":
        assert "where AdamW under DDP takes 10 ms." in text


def test_a_prediction_is_compared_with_the_prediction_of_adamw_where_that_was_measured(
    script, capsys, tmp_path, monkeypatch
):
    monkeypatch.setattr(trials, "tries", lambda *given: trials.Trials(STEPS, 2, {}))
    line = f"--world 2 --intra 1kbit --compute 1ms --json {tmp_path / 'plan.json'}"
    main(["plan", *line.split(), "--probe", script(LONELY.format(steps=99, more=""))])
    found = json.loads((tmp_path / "plan.json").read_text())
    base = next(row for row in found["predictions"] if row["method"] == "adamw")
    said = found["recommendation"]
    shares = {pick["name"]: (pick["share"], pick["step"]) for pick in (said["exact"], *said["picks"])}
    for name, over in {"muon": base["predicted"], "sign_muon": base["step"]}.items():
        share, step = shares[name]
        assert share == pytest.approx(step / over)
    table = capsys.readouterr().out.partition("\n\ntake ")[2].splitlines()
    assert {line.partition("  ")[0] for line in table if ", measured " in line} == set(STEPS)


def test_own_times_of_one_rank_are_put_beside_predicted_messages(script, capsys, tmp_path, monkeypatch):
    own = {"adamw": 1.5e-3, "sign_muon": 4e-3}
    rows = []
    for steps in ({}, {name: 1e-3 + seconds for name, seconds in own.items()}):
        monkeypatch.setattr(trials, "tries", lambda *given, steps=steps: trials.Trials(steps, 1, {}))
        line = f"--world 2 --intra 1gbit --compute 1ms --json {tmp_path / 'plan.json'}"
        main(["plan", *line.split(), "--probe", script(LONELY.format(steps=99, more=""))])
        rows.append({row["method"]: row for row in json.loads((tmp_path / "plan.json").read_text())["predictions"]})
    text = capsys.readouterr().out
    assert "on one rank, which sends nothing" in text
    assert re.search(r"^  sign_muon: predicted .*, measured 4 ms on top of the computation$", text, re.MULTILINE)
    before, behind = rows
    for name, seconds in own.items():
        assert behind[name]["own"] == pytest.approx(seconds)
        assert behind[name]["step"] - before[name]["step"] == pytest.approx(seconds - before[name]["own"])
        assert behind[name]["predicted"] is None


def test_picks_are_tried_on_one_rank_and_all_is_as_before():
    params = [torch.ones(4, 3), torch.ones(5), torch.ones(6, 3, dtype=torch.bfloat16)]
    disabled = logging.root.manager.disable
    tried = trials.tries(params, 1e-3, 30)
    assert set(tried.steps) == {BASE.name, *(pick.name for pick in PICKS if pick.model)}
    assert set(tried.skipped) == {pick.name for pick in PICKS if not pick.model}
    assert tried.ranks == 1
    assert min(tried.steps.values()) >= 1e-3
    assert all(p.eq(1).all() and p.grad is None for p in params)
    assert not dist.is_initialized()
    assert logging.root.manager.disable == disabled


def test_where_memory_does_not_suffice_nothing_is_tried_and_that_is_said(monkeypatch):
    monkeypatch.setattr(trials, "ROOM", 2**60)
    tried = trials.tries([torch.ones(4)], 1e-3, 30)
    assert not tried.steps
    assert set(tried.skipped) == {pick.name for pick in PICKS}
    assert all("are needed beside the script" in why for why in tried.skipped.values())
