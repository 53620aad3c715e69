"""Which rank was behind, as the next attempt reads it from what the ranks wrote. torchrun itself: `test_faults.py`."""

from __future__ import annotations

import logging
from unittest import mock

import pytest
import torch.distributed as dist

from fn.collectives.transports.progress import RECORD, Progress, folder_of, records_of, who_was_behind

ENV = {"TORCHELASTIC_RUN_ID": "a/b", "TORCHELASTIC_MAX_RESTARTS": "2", "LOCAL_RANK": "0", "GROUP_RANK": "0"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A group of one rank, and a folder for its files."""
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    for name, value in ENV.items():
        monkeypatch.setenv(name, value)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield tmp_path
    dist.destroy_process_group()


def test_a_rank_that_was_behind_is_named():
    records = [(0, 3, 9, 8), (1, 3, 8, 8), (2, 3, 9, 8)]
    wanted = "rank 1 had begun 8 exchanges and ended 8; the others had begun 9 and ended 8"
    assert who_was_behind(records) == wanted


def test_a_rank_whose_machine_is_gone_is_named():
    assert who_was_behind([(0, 4, 9, 8), (1, 4, 9, 8)]).startswith("nothing is known of rank 2, 3, which")


def test_where_all_were_alike_torchrun_is_pointed_to():
    assert "root cause" in who_was_behind([(0, 2, 9, 8), (1, 2, 9, 8)])
    assert who_was_behind([]) == ""


def test_the_next_attempt_reads_what_was_counted_once(here, caplog, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first = Progress()
    for _ in range(5):
        first.begin()
        first.end()
    first.begin()
    folder = folder_of("a/b")
    (folder / "0-1").write_bytes(RECORD.pack(1, 2, 5, 5))
    (folder / "0-2").write_bytes(b"half a rec")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with caplog.at_level(logging.WARNING, "fn"):
        second = Progress()
        for _ in range(3):
            second.begin()
            second.end()
    (said,) = [r.getMessage() for r in caplog.records]
    assert said.endswith("restart: rank 1 had begun 5 exchanges and ended 5; the others had begun 6 and ended 5")
    assert [path.name for path in folder.iterdir()] == ["1-0"]
    assert records_of(folder, 1) == [(0, 1, 3, 3)]


def test_without_restarts_nothing_is_written(here, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    progress = Progress()
    progress.begin()
    progress.end()
    assert [*here.iterdir()] == []


def test_a_folder_of_somebody_else_is_left_alone(here):
    with mock.patch("os.getuid", return_value=12345):
        with pytest.raises(PermissionError, match="belongs to somebody else"):
            folder_of("a/b")
        progress = Progress()
        progress.begin()  # and no step fails for that
        progress.end()
    assert [*folder_of("a/b").iterdir()] == []
