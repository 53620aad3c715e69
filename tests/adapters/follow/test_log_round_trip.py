"""What is written into a log is read from it: from a folder and over HTTP, while it grows, over restarts."""

from __future__ import annotations

import logging
import shutil
import threading

import pytest
import torch
from logs import HEADER, check, records, served, tensors, write

from fn.adapters.follow.log_reader import LogReader
from fn.adapters.follow.log_writer import LogWriter

WAYS = ["folder", "http", "http with ranges"]


@pytest.fixture(params=WAYS)
def source(request, tmp_path):
    """Where readers find what is written into tmp_path / "log"."""
    if request.param == "folder":
        yield tmp_path / "log"
    else:
        with served(tmp_path, ranges="ranges" in request.param) as (url, _):
            yield f"{url}/log"


def until(reader, last):
    """Refresh until a step is there; what writes it is a thread of this process."""
    for _ in range(100_000):
        if reader.last_step >= last:
            return
        assert reader.refresh() is None
    raise AssertionError(f"step {last} is not there")


def test_all_that_was_written_is_read(source, tmp_path):
    write(tmp_path / "log", range(3, 40), steps_per_segment=7, snapshots=(3, 21))
    reader = LogReader(source)
    assert (reader.first_step, reader.last_step, reader.incarnation, reader.header) == (3, 39, 0, HEADER)
    check(reader, range(3, 40))
    check(reader, (39, 3, 20))  # in any order
    assert reader.snapshots() == [3, 21]
    for step in (3, 21):
        found = reader.snapshot(step)
        assert found.keys() == tensors(step).keys()
        assert all(torch.equal(found[name], x) and found[name].dtype == x.dtype for name, x in tensors(step).items())


def test_each_step_can_be_followed_as_it_is_written(source, tmp_path):
    log = LogWriter(tmp_path / "log", HEADER, steps_per_segment=4)
    reader = LogReader(source)
    assert (reader.first_step, reader.last_step) == (0, -1)
    for step in range(11):
        log.frame(step, "compressed", {"lr": step / 8}, records(step), f"{step:x}" if step % 5 == 0 else None)
        until(reader, step)
        check(reader, range(step + 1))
    log.close()
    reader.refresh()
    check(reader, range(11))


def test_a_server_with_ranges_sends_what_is_new_alone(tmp_path):
    write(tmp_path, range(1), steps_per_segment=50)
    log = LogWriter(tmp_path, HEADER, first_step=1)
    with served(tmp_path, ranges=True) as (url, parts):
        reader = LogReader(url)
        log.frame(1, "compressed", {}, [(("psum",), [bytes(10_000)])])
        until(reader, 1)
        log.frame(2, "compressed", {}, [(("psum",), [bytes(100)])])
        until(reader, 2)
        assert parts
        assert max(parts) < 400
    log.close()


def test_a_restarted_trainer_replaces_what_comes_behind_its_step_and_changes_no_file(source, tmp_path):
    folder = tmp_path / "log"
    write(folder, range(30), steps_per_segment=7, snapshots=(0, 10, 20))
    reader, before = LogReader(source), {p.name: p.read_bytes() for p in folder.glob("0000-*")}
    check(reader, range(30))
    log = LogWriter(folder, HEADER, first_step=20, steps_per_segment=7)
    assert reader.refresh() == 20
    assert (reader.incarnation, reader.last_step, reader.snapshots()) == (1, 19, [0, 10])
    with pytest.raises(LookupError, match=r"step: expected one of the log .*, which has 0 to 19, but got 20"):
        reader.frame(20)
    log.snapshot(20, tensors(20, 1))
    for step in range(20, 25):
        log.frame(step, "compressed", {"lr": step / 8}, records(step, 1), f"{step:x}" if step % 5 == 0 else None)
    log.close()
    assert reader.refresh() is None
    check(reader, range(20))
    check(reader, range(20, 25), life=1)
    assert reader.snapshots() == [0, 10, 20]
    assert torch.equal(reader.snapshot(20)["weight"], tensors(20, 1)["weight"])
    assert reader.steps() == {0: range(20), 1: range(20, 25)}
    assert {p.name: p.read_bytes() for p in folder.glob("0000-*")} == before


def test_restarts_between_two_looks_report_the_earliest_step(tmp_path):
    write(tmp_path, range(30), steps_per_segment=7)
    reader = LogReader(tmp_path)
    write(tmp_path, range(12, 18), 1, steps_per_segment=4)
    write(tmp_path, range(16, 20), 2, steps_per_segment=4)
    assert reader.refresh() == 12
    check(reader, range(12))
    check(reader, range(12, 16), life=1)
    check(reader, range(16, 20), life=2)
    assert reader.steps() == {0: range(12), 1: range(12, 16), 2: range(16, 20)}


def test_a_gap_between_incarnations_is_told(tmp_path):
    """A trainer was killed behind its checkpoint of step 20, before its thread had written so far."""
    write(tmp_path, range(17))
    write(tmp_path, range(20, 22), 1, snapshots=(20,))
    reader = LogReader(tmp_path)
    assert reader.steps() == {0: range(17), 1: range(20, 22)}
    with pytest.raises(LookupError, match="has 0 to 16, 20 to 21, but got 18; go on from the snapshot of step 20"):
        reader.frame(18)


def test_a_log_that_is_put_elsewhere_can_be_read_there(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    names = []

    def put(name, data):
        names.append(name)
        (there / name).write_bytes(data)

    write(here, range(9), steps_per_segment=4, snapshots=(0,), put=put)
    write(here, range(6, 12), 1, steps_per_segment=4, put=put)
    assert names[-2:] == ["0001-000000000010.log", "head.json"]
    shutil.rmtree(here)
    reader = LogReader(there)
    check(reader, range(6))
    check(reader, range(6, 12), life=1)
    assert torch.equal(reader.snapshot(0)["weight"], tensors(0)["weight"])


def test_what_a_killed_trainer_had_not_put_is_put_by_the_next_one(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    log = LogWriter(here, HEADER)
    for step in range(3):
        log.frame(step, "compressed", {"lr": step / 8}, records(step), f"{step:x}" if step % 5 == 0 else None)
    reader = LogReader(here)
    until(reader, 2)
    copy = shutil.copytree(here, tmp_path / "copy")  # as a kill leaves it: the segment is open
    log.close()
    write(copy, range(3, 5), put=lambda name, data: (there / name).write_bytes(data))
    check(LogReader(there), range(5))


@pytest.mark.parametrize(("size", "leaves", "is_fused"), [
    (0, 300, True), (1_000, 40, False), (1_000, 300, True), (1_250_000, 1, True), (1_250_000, 300, False),
])  # fmt: skip
def test_frames_cost_two_percent_and_256_bytes_at_most(tmp_path, size, leaves, is_fused):
    """1-bit codes of 10 million parameters, of 8000 and of none, gathered at once or leaf by leaf."""
    each, steps = [bytes(size * (1 + n % 3) // (2 * leaves)) for n in range(leaves)], 20
    heard = [(("trunk", "all_gather", n), [x]) for n, x in enumerate(each)]
    heard = [(("trunk", "all_gather", 0), each)] if is_fused else heard
    heard.append((("trunk", "psum", 1), [bytes(4)]))
    log = LogWriter(tmp_path, HEADER, steps_per_segment=8)
    for step in range(steps):
        log.frame(step, "compressed", {"lr": 1e-3 / (step + 1)}, heard, "0123456789abcdef" * 2)
    log.close()
    payload = steps * (sum(map(len, each)) + 4)
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) <= 1.02 * payload + 256 * steps


def test_training_waits_for_a_full_buffer_and_says_so_once(tmp_path, caplog):
    """A slow disk: closing the first segment lasts until the main thread has met a full buffer."""
    waits = threading.Event()

    class Heard(logging.Handler):
        def emit(self, record):
            waits.set()

    handler = Heard()
    logging.getLogger("fn").addHandler(handler)

    def put(name, data):
        assert name == "head.json" or waits.wait(60)

    log = LogWriter(tmp_path, HEADER, steps_per_segment=1, put=put, buffer=5000)
    for step in range(40):
        log.frame(step, "compressed", {}, [(("psum",), [bytes(1000)])])
    log.frame(40, "compressed", {}, [(("psum",), [bytes(20_000)])])  # larger than the buffer: goes alone
    log.close()
    logging.getLogger("fn").removeHandler(handler)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert "training waits" in said[0]
    assert "larger buffer" in said[0]
    assert LogReader(tmp_path).steps() == {0: range(41)}


def test_a_snapshot_is_a_copy(tmp_path):
    """What is written later than it is taken holds what was there when it was taken."""
    may_go_on = threading.Event()
    log = LogWriter(
        tmp_path, HEADER, steps_per_segment=1, put=lambda name, _: name == "head.json" or may_go_on.wait(60)
    )
    log.frame(0, "compressed", {}, [])
    x = torch.arange(6.0).view(2, 3)
    log.snapshot(1, {"x": x, "transposed": x.T})
    expected = x.clone()
    x.zero_()
    may_go_on.set()
    log.close()
    found = LogReader(tmp_path).snapshot(1)
    assert torch.equal(found["x"], expected)
    assert torch.equal(found["transposed"], expected.T)


def test_keys_of_hundreds_of_records_are_in_a_segment_once(tmp_path):
    def heard(step):
        digests = [(("digests",), [bytes(8)])] if step % 2 else []  # frames of two kinds, in turn
        return digests + [((i // 4, "compressed", "gather", i % 4), [bytes([step]) * 20]) for i in range(300)]

    log = LogWriter(tmp_path, HEADER, steps_per_segment=10)
    for step in range(25):
        log.frame(step, "compressed", {}, heard(step))
    log.close()
    reader = LogReader(tmp_path)
    for step in (3, 19, 0, 24, *range(25)):
        assert reader.frame(step).records == heard(step)
    codes = sum(len(leaf) for step in range(25) for _, leaves in heard(step) for leaf in leaves)
    sizes = [p.stat().st_size for p in sorted(tmp_path.glob("*.log"))]
    assert len(sizes) == 3
    assert codes < sum(sizes) < codes + 3 * 2 * 1000 + 25 * 64
