"""A log that is damaged, foreign or out of reach: errors name file, step and cure, and nothing is written."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import sys
import tempfile
import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from logs import HEADER, check, records, served, write
from ranks import LIMIT, python

from fn.adapters.follow.log_format import LogDamaged
from fn.adapters.follow.log_reader import LogReader
from fn.adapters.follow.log_writer import LogWriter

STEPS = range(8)
SEGMENT, NEXT, OPEN = (f"0000-{step:012d}.log" for step in (0, 3, 6))


def left_open(folder, copy, steps):
    """Write the first steps, and return a copy of the log before it is closed, as a killed trainer leaves it."""
    log = LogWriter(folder, HEADER, steps_per_segment=3)
    for step in steps:
        if step in (1, 5):
            log.snapshot(step, {"x": torch.arange(step, step + 4)})
        log.frame(step, "compressed", {"lr": step / 8}, records(step), f"{step:x}" if step % 5 == 0 else None)
    reader = LogReader(folder)
    while reader.last_step < steps[-1]:
        reader.refresh()
    shutil.copytree(folder, copy)
    log.close()
    return copy


@pytest.fixture(scope="module")
def left(tmp_path_factory):
    """Two closed segments, two frames in an open one, two snapshots."""
    return left_open(tmp_path_factory.mktemp("log"), tmp_path_factory.mktemp("copies") / "left", STEPS)


def files(folder):
    return {p.name: p.read_bytes() for p in folder.iterdir()}


def laid(folder, contents):
    """Lay files into a folder, in place of those that are there."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return folder


def read_all(folder):
    reader = LogReader(folder)
    check(reader, range(reader.last_step + 1))
    for step in reader.snapshots():
        reader.snapshot(step)
    return reader


def test_what_a_killed_trainer_left_is_read(left):
    reader = read_all(left)
    assert (reader.last_step, reader.snapshots()) == (7, [1, 5])
    assert (left / OPEN).exists()
    assert not (left / "0000-000000000009.log").exists()


def test_a_last_frame_that_is_torn_anywhere_is_no_frame_yet(left, tmp_path):
    """For a reader, which goes on once it is whole, and for the trainer that is restarted."""
    whole = (left / OPEN).read_bytes()
    start = (left_open(tmp_path / "shorter", tmp_path / "copy", STEPS[:-1]) / OPEN).stat().st_size
    assert 100 < start < len(whole) - 50
    folder = laid(tmp_path / "torn", files(left))
    for end in range(start, len(whole)):
        (folder / OPEN).write_bytes(whole[:end])
        reader = read_all(folder)
        assert reader.last_step == 6
        length_is_known = end == start or end >= start + 8
        (folder / OPEN).write_bytes(whole[:end] + bytes(len(whole) - end) * length_is_known)  # a size before the bytes
        assert reader.refresh() is None
        assert reader.last_step == 6
        (folder / OPEN).write_bytes(whole)
        assert reader.refresh() is None
        check(reader, STEPS)
    for end in range(start, len(whole), 7):
        tail = bytes(end % 3 * 1000)  # what a machine that lost its power may leave
        folder = laid(tmp_path / "torn", {**files(left), OPEN: whole[:end] + tail})
        write(folder, range(7, 10), 1)
        check(LogReader(folder), range(7))
        check(LogReader(folder), range(7, 10), life=1)
        assert (folder / OPEN).read_bytes() == whole[:end] + tail


def test_a_machine_that_loses_power_may_lose_frames_that_were_followed(left, tmp_path):
    start = (left_open(tmp_path / "shorter", tmp_path / "copy", STEPS[:-1]) / OPEN).stat().st_size
    folder = laid(tmp_path / "log", files(left))
    reader = read_all(folder)
    check(reader, STEPS)
    os.truncate(folder / OPEN, start)
    write(folder, range(7, 9), 1)
    assert reader.refresh() == 7
    check(reader, (6, *range(6)))
    check(reader, range(7, 9), life=1)


@pytest.mark.parametrize("end", range(9))
def test_an_open_segment_without_a_whole_frame_holds_none(left, tmp_path, end):
    folder = laid(tmp_path / "torn", {**files(left), OPEN: (left / OPEN).read_bytes()[:end]})
    assert read_all(folder).last_step == 5
    write(folder, range(6, 9), 1)
    check(LogReader(folder), range(6, 9), life=1)


@given(data=st.data())
def test_a_flipped_bit_is_an_error_with_file_and_step_or_a_torn_tail(left, tmp_path_factory, data):
    contents = files(left)
    names = [name for name in sorted(contents) if contents[name]]
    assert len(names) == 6
    name = data.draw(st.sampled_from(names))
    place = data.draw(st.integers(0, len(contents[name]) - 1))
    changed = bytearray(contents[name])
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    folder = laid(tmp_path_factory.getbasetemp() / "flipped", {**contents, name: bytes(changed)})
    try:
        reader, error = read_all(folder), None
    except ValueError as raised:
        reader, error = None, raised
    if reader is not None:
        assert name == OPEN  # its tail looks torn, as long as it is the tail
        assert reader.last_step in (5, 6)
        with pytest.raises(LookupError, match=f"but got {reader.last_step + 1}; refresh"):
            reader.frame(reader.last_step + 1)
    elif isinstance(error, LogDamaged):
        assert error.file == name
        assert f"/{name} " in str(error)
        assert "; copy it again" in str(error)
        assert name == "head.json" or f"step {error.step}: " in str(error)
    else:
        assert name == "head.json"
        assert re.search(r"expected a log of format 1, but got format \d in .*/head\.json; read it with", str(error))


def test_a_damaged_frame_names_its_step_and_the_next_snapshot(left, tmp_path):
    contents = files(left)
    segment = contents[SEGMENT]
    place = segment.index(records(2)[0][1][0])
    folder = laid(tmp_path / "log", {**contents, SEGMENT: segment[:place] + b"!" + segment[place + 1 :]})
    with pytest.raises(LogDamaged, match=f"step 2: .*/{SEGMENT} .*; copy it again .* snapshot of step 5") as raised:
        LogReader(folder).frame(2)
    assert (raised.value.file, raised.value.step) == (SEGMENT, 2)
    check(LogReader(folder), range(3, 8))  # the other segments are read


def test_a_damaged_frame_that_is_not_the_last_of_the_open_segment_is_an_error(left, tmp_path):
    contents = files(left)
    place = contents[OPEN].index(records(6)[0][1][0])
    data = contents[OPEN][:place] + b"!" + contents[OPEN][place + 1 :]
    with pytest.raises(LogDamaged, match=f"step 6: .*/{OPEN}"):
        LogReader(laid(tmp_path / "log", {**contents, OPEN: data}))


@pytest.mark.parametrize("over_http", [False, True])
def test_a_missing_segment_or_snapshot_is_named(left, tmp_path, over_http):
    contents = files(left)
    folder = laid(
        tmp_path / "log", {n: x for n, x in contents.items() if n not in (NEXT, "0000-000000000005.safetensors")}
    )
    with served(folder) as (url, _):
        reader = LogReader(url if over_http else folder)
        check(reader, (0, 1, 2, 6, 7))
        with pytest.raises(LogDamaged, match=f"step 3: .*/{NEXT} is missing; copy it again .* snapshot of step 5"):
            reader.frame(4)
        with pytest.raises(LogDamaged, match=r"step 5: .*/0000-000000000005.safetensors is missing; copy it again"):
            reader.snapshot(5)


def test_the_segment_of_another_run_is_refused(left, tmp_path):
    write(tmp_path / "other", range(3), 1)
    shutil.copytree(left, tmp_path / "log")
    shutil.copy(tmp_path / "other" / SEGMENT, tmp_path / "log" / SEGMENT)
    with pytest.raises(LogDamaged, match=f"step 0: .*/{SEGMENT} is another file than the one"):
        LogReader(tmp_path / "log").frame(1)


def test_a_step_or_a_snapshot_that_is_not_in_the_log(left):
    reader = LogReader(left)
    for step in (-1, 8):
        with pytest.raises(
            LookupError, match=f"step: expected one of the log {left}, which has 0 to 7, but got {step}"
        ):
            reader.frame(step)
    with pytest.raises(LookupError, match=f"step: expected one of the snapshots in {left}, 1, 5, but got 2"):
        reader.snapshot(2)


def test_no_log_at_all(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"source: {tmp_path}/no holds no log"):
        LogReader(tmp_path / "no")
    with served(tmp_path) as (url, _), pytest.raises(FileNotFoundError, match=f"source: {url}/no holds no log"):
        LogReader(f"{url}/no")
    with pytest.raises(OSError, match=f"source: cannot read {url}/no/head.json: .*; look at the server"):
        LogReader(f"{url}/no")


def test_the_format_of_another_version_is_refused_by_both(left, tmp_path):
    head = (left / "head.json").read_bytes()
    folder = laid(tmp_path / "log", {**files(left), "head.json": head.replace(b'"format":1,', b'"format":2,')})
    before = files(folder)
    for use in (LogReader, lambda folder: LogWriter(folder, HEADER, first_step=8)):
        with pytest.raises(
            ValueError, match=r"expected a log of format 1, but got format 2 in .*/head.json; read it with"
        ):
            use(folder)
    assert files(folder) == before


@pytest.mark.parametrize("text", ["", "[]", "null", '{"head":' * 5000, '{"head":{"format":1,"incarnations":7}}', "{}"])
def test_what_is_no_head_is_refused_by_both(left, tmp_path, text):
    folder = laid(tmp_path / "log", {**files(left), "head.json": text.encode()})
    before = files(folder)
    for use in (LogReader, lambda folder: LogWriter(folder, HEADER, first_step=8)):
        with pytest.raises(LogDamaged, match=f"{folder}/head.json is not what was written; copy it again"):
            use(folder)
    assert files(folder) == before


@pytest.mark.parametrize("field", ["method", "shapes", "dtypes"])
def test_a_folder_of_another_run_is_refused(left, tmp_path, field):
    shutil.copytree(left, tmp_path / "log")
    before = files(tmp_path / "log")
    other = {**HEADER, field: "other"}
    with pytest.raises(
        ValueError, match=f"expected the run logged in .*, of {field} .*, but got {field} 'other'; give this"
    ):
        LogWriter(tmp_path / "log", other, first_step=8)
    assert files(tmp_path / "log") == before
    LogWriter(tmp_path / "log", {**HEADER, "torch": "2.14"}, first_step=8).close()  # which may differ
    assert LogReader(tmp_path / "log").header["torch"] == "2.14"


def test_a_follower_sees_that_the_folder_was_given_to_another_log(left, tmp_path):
    shutil.copytree(left, tmp_path / "log")
    reader = LogReader(tmp_path / "log")
    shutil.rmtree(tmp_path / "log")
    LogWriter(tmp_path / "log", {**HEADER, "method": "sign_muon"}).close()
    with pytest.raises(LogDamaged, match=r"holds another log than before; make another reader"):
        reader.refresh()


def test_segments_without_a_head_are_not_written_over(left, tmp_path):
    folder = laid(tmp_path / "log", {name: x for name, x in files(left).items() if name != "head.json"})
    before = files(folder)
    with pytest.raises(ValueError, match=f"folder: {folder} holds segments of a log, but no head.json; give this run"):
        LogWriter(folder, HEADER)
    assert files(folder) == before


def test_one_writer_at_a_time(tmp_path):
    log = LogWriter(tmp_path, HEADER)
    log.frame(0, "compressed", {}, records(0))
    before = (tmp_path / "head.json").read_bytes()
    with pytest.raises(
        BlockingIOError, match=f"folder: another process writes the log in {tmp_path}; let one rank write"
    ):
        LogWriter(tmp_path, HEADER)
    code = f"from fn.adapters.follow.log_writer import LogWriter; LogWriter({str(tmp_path)!r}, {{}})"
    ended = python("-c", code)
    assert (ended.returncode, ended.stderr.count("BlockingIOError: folder: another process writes")) == (1, 1)
    assert (tmp_path / "head.json").read_bytes() == before
    log.close()
    write(tmp_path, range(1, 3))
    assert LogReader(tmp_path).incarnation == 1


def test_a_folder_without_rights(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(
        NotADirectoryError, match=f"folder: cannot write a log in {file}/log: .*; give a folder that this"
    ):
        LogWriter(file / "log", HEADER)
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        nobody = "import os; os.geteuid() or os.setuid(65534)"
        code = f"{nobody}; from fn.adapters.follow.log_writer import LogWriter; LogWriter({folder!r}, {{}})"
        ended = python("-c", code)
        assert f"PermissionError: folder: cannot write a log in {folder}: " in ended.stderr
        assert ended.returncode == 1
        assert os.listdir(folder) == []


def test_wrong_arguments(tmp_path):
    for wrong in ({"steps_per_segment": 0}, {"first_step": -1}, {"buffer": 0}):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}: expected a whole number of at least"):
            LogWriter(tmp_path / "none", HEADER, **wrong)
    assert not (tmp_path / "none").exists()
    log = LogWriter(tmp_path, HEADER, first_step=3)
    for step in (2, 4):
        with pytest.raises(ValueError, match=f"step: expected 3, the next one of this log, but got {step}"):
            log.frame(step, "compressed", {}, [])
        with pytest.raises(ValueError, match=f"step: expected 3, the next one of this log, but got {step}"):
            log.snapshot(step, {})
    with pytest.raises(TypeError, match="not JSON serializable"):
        log.frame(3, "compressed", {"lr": object()}, [])
    log.frame(3, "compressed", {}, [])  # what was refused has taken no step
    log.close()
    with pytest.raises(ValueError, match=f"folder: the log in {tmp_path} was closed; open another incarnation"):
        log.frame(4, "compressed", {}, [])
    log.close()
    assert LogReader(tmp_path).steps() == {0: range(3, 4)}


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")
@pytest.mark.parametrize("full", [NEXT, ".head.json.new", "0000-000000000005.safetensors"])
def test_a_full_disk_ends_the_log_with_a_warning_and_not_the_run(tmp_path, caplog, full):
    log = LogWriter(tmp_path, HEADER, steps_per_segment=3)
    (tmp_path / full).symlink_to("/dev/full")
    for step in range(20):
        if step == 5:
            log.snapshot(5, {"x": torch.zeros(9)})
        log.frame(step, "compressed", {"lr": step / 8}, records(step), f"{step:x}" if step % 5 == 0 else None)
    log.close()
    last = {NEXT: 2, ".head.json.new": 2, "0000-000000000005.safetensors": 4}[full]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert f"the log in {tmp_path} ends before step {last + 1}: OSError: [Errno 28] No space left on device" in said[0]
    check(LogReader(tmp_path), range(last + 1))
    (tmp_path / full).unlink()
    write(tmp_path, range(last + 1, 12), 1)
    check(LogReader(tmp_path), range(last + 1, 12), life=1)


def test_a_put_that_fails_ends_the_log_with_a_warning_and_not_the_run(tmp_path, caplog):
    def put(name, data):
        if name == NEXT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write(tmp_path, range(20), steps_per_segment=3, put=put)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "ends before step 6: OSError: [Errno 28]" in said
    assert "restart the run" in said
    check(LogReader(tmp_path), range(6))  # what could not be put is still here


def test_training_that_waits_goes_on_when_the_log_ends(tmp_path, caplog):
    """The first segment cannot be put, which is known once the main thread has met a full buffer."""
    waits = threading.Event()

    class Heard(logging.Handler):
        def emit(self, record):
            waits.set()

    def put(name, data):
        if name == SEGMENT and waits.wait(LIMIT):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    handler = Heard()
    logging.getLogger("fn").addHandler(handler)
    write(tmp_path, range(20), steps_per_segment=1, put=put, buffer=300)
    logging.getLogger("fn").removeHandler(handler)
    assert [re.search("training waits|ends before step 1", record.getMessage())[0] for record in caplog.records] == [
        "training waits",
        "ends before step 1",
    ]


def test_snapshots_without_safetensors_say_how_to_get_it(left, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    log = LogWriter(tmp_path, HEADER)
    for use in (lambda: LogReader(left).snapshot(1), lambda: log.snapshot(0, {})):
        with pytest.raises(ImportError, match="pip install safetensors"):
            use()
    log.close()
