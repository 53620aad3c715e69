"""`python -m fn log`: steps, phases, bytes, skips, digests and restarts of a log, and errors in a line."""

from __future__ import annotations

import pytest
import torch

from fn.__main__ import main
from fn.adapters.follow.log_writer import LogWriter

HEADER = {"method": "sign_muon", "shapes": [[8]], "dtypes": ["float32"]}


@pytest.fixture
def folder(tmp_path):
    log = LogWriter(tmp_path, HEADER, steps_per_segment=2)
    log.snapshot(0, {"x": torch.zeros(8)})
    for step in range(5):
        changed = {0: {"lr": 0.02}, 3: {"skipped": 1}}.get(step, {})
        log.frame(step, "warmup" if step < 2 else "compressed", changed, [(("gather",), [bytes(1200), bytes(step)])])
    log.close()
    log = LogWriter(tmp_path, HEADER, steps_per_segment=2, first_step=4)
    log.frame(4, "compressed", {"lr": 0.01}, [(("gather",), [bytes(7)])], digest="abc")
    log.close()
    return tmp_path


def test_a_line_for_each_step(folder, capsys):
    main(["log", str(folder)])
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["step", "bytes", "phase", "digest", "changed"],
        ["incarnation", "0,", "which", "began", "from", "step", "0"],
        ["0", "1,200", "warmup", "lr=0.02"],
        ["1", "1,201", "warmup"],
        ["2", "1,202", "compressed"],
        ["3", "1,203", "compressed", "skipped=1"],
        ["incarnation", "1,", "which", "began", "from", "step", "4"],
        ["4", "7", "compressed", "abc", "lr=0.01"],
        ["sign_muon:", "5", "steps,", "4,813", "bytes,", "1", "skipped,", "1", "restarts"],
        ["snapshots:", "0"],
    ]


def test_what_cannot_be_read_is_a_line(folder, tmp_path, capsys):
    (folder / "0000-000000000002.log").unlink()
    for source, said in (
        (folder, "step 2: "),
        (tmp_path / "none", "holds no log"),
        ("http://127.0.0.1:1/log", "cannot read http://127.0.0.1:1/log/head.json"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["log", str(source)])
        text = capsys.readouterr().err
        assert "Traceback" not in text
        assert said in text.splitlines()[-1]
