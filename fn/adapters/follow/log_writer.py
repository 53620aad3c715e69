"""Write the log of a run: on a thread of its own, behind a bounded buffer, so that training waits for no disk.

What a follower reads of the open segment was handed to the operating system, so it outlives a trainer that is killed,
but not a machine that loses power. What head.json lists outlives that, too.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from torch import Tensor

from fn.adapters.follow.log_format import (
    HEAD,
    JSON,
    RUN,
    Data,
    Described,
    Frame,
    Frames,
    Head,
    Incarnation,
    Key,
    Segment,
    Snapshot,
    compact,
    decoded_head,
    described,
    digest_of,
    encoded_frame,
    encoded_head,
    read_file,
    tensors_module,
)
from fn.arguments import check_whole
from fn.errors import expected

logger = logging.getLogger("fn")

LOCK = "lock"
SEGMENT_BYTES = 1 << 28
"""A segment that has become this large is closed before its last step: readers without ranges fetch whole ones."""


class LogWriter:
    """Write what all ranks hear into a folder, step after step; take one on one rank.

        >>> import tempfile
        >>> from fn.adapters.follow.log_reader import LogReader
        >>> folder = tempfile.mkdtemp()
        >>> log = LogWriter(folder, {"method": "lion_vote", "shapes": [[8]], "dtypes": ["float32"]})
        >>> log.frame(0, "compressed", {"lr": 0.1}, [(("gather", 0), [b"codes"])])
        >>> log.close()
        >>> LogReader(folder).frame(0).records
        [(('gather', 0), [b'codes'])]

    In a folder that has a log of the same run, it opens the next incarnation: what older ones wrote from `first_step`
    on is replaced for readers, and stays in their files. A write that fails later than here, as on a full disk, ends
    the log with a warning, and the run goes on.

    Args:
        folder: where to write; made if need be.
        header: what this is a log of, for readers; "method", "shapes" and "dtypes" must stay alike in a folder.
        steps_per_segment: after how many steps a segment is closed, at the latest.
        first_step: the step that this incarnation begins with.
        put: also called with the name and the bytes of each closed segment, each snapshot and each head.json, in this
            order, on the thread that writes; for object stores. A name may come twice, with the same bytes.
        buffer: how many bytes may wait to be written before training waits.

    Raises: ValueError for a folder of another run, LogDamaged for a damaged head.json, BlockingIOError if another
        process writes there, OSError if this one cannot. Then nothing is written but an empty `lock`.
    """

    def __init__(
        self,
        folder: str | Path,
        header: Mapping[str, JSON],
        *,
        steps_per_segment: int = 100,
        first_step: int = 0,
        put: Callable[[str, bytes], object] | None = None,
        buffer: int = 1 << 28,
    ):
        check_whole("steps_per_segment", steps_per_segment, 1)
        check_whole("first_step", first_step, 0)
        check_whole("buffer", buffer, 1)
        self._folder, self._put = Path(folder), put
        self._steps_per_segment, self._buffer = steps_per_segment, buffer
        self._next = self._written = first_step  # of the frames that were handed over, and those that were written
        self._file: int | None = None  # of the open segment; its bytes, the first ones of its frames, and their indexes
        self._bytes, self._starts, self._indexes = 0, list[bytes](), dict[bytes, int]()
        try:
            self._lock = _locked(self._folder)
            try:
                self._open_incarnation(json.loads(compact(header)), first_step)
            except BaseException:
                os.close(self._lock)
                raise
        except BlockingIOError as error:
            cure = "let one rank write, and give each run a folder of its own"
            raise BlockingIOError(f"folder: another process writes the log in {folder}; {cure}") from error
        except OSError as error:
            cure = "give a folder that this user may write to, on a disk with free space"
            raise type(error)(f"folder: cannot write a log in {folder}: {error}; {cure}") from error
        self._jobs = deque[tuple[Callable[[], object], int]]()
        self._pending = 0  # bytes of jobs that were not done
        self._ended = self._closing = self._has_waited = False
        self._moved = threading.Condition()
        self._thread = threading.Thread(target=self._write, name="fn log", daemon=True)
        self._thread.start()
        _open.add(self)
        atexit.register(self.close)

    def frame(
        self,
        step: int,
        phase: str,
        changed: dict[str, JSON],
        records: Sequence[tuple[Key, Sequence[Data]]],
        digest: str | None = None,
    ) -> None:
        """Hand over the frame of the next step; wait only while the buffer is full.

        Args: step: of this frame, one more than the last. phase: its name. changed: numbers that are others than in
            the frame before. records: key and bytes of each. digest: of the parameters behind the step, if taken.
        Raises: ValueError for another step, TypeError for what JSON cannot say.
        """
        self._check_next(step)
        frame = described(Frame(step, phase, changed, [(key, list(leaves)) for key, leaves in records], digest))
        self._next += 1
        self._hand_over(partial(self._write_frame, frame), sum(map(len, [frame.about, frame.keys, *frame.leaves])))

    def snapshot(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Hand over a copy of what a follower starts from before the frame of a step; wait as `frame` does.

        Raises: ValueError for another step than that of the next frame; ImportError without safetensors.
        """
        save = tensors_module().save
        self._check_next(step)
        copies = {name: x.detach().to("cpu", copy=True).contiguous() for name, x in tensors.items()}
        size = sum(x.nbytes for x in copies.values())
        self._hand_over(lambda: self._write_snapshot(step, save(copies)), size)

    def close(self) -> None:
        """Write what was handed over, and close the segment. Also called as the interpreter ends."""
        with self._moved:
            self._closing = True
            self._moved.notify_all()
        self._thread.join()
        atexit.unregister(self.close)
        if self in _open:
            _open.remove(self)
            os.close(self._lock)

    def _open_incarnation(self, header: dict[str, JSON], first_step: int) -> None:
        """List what the last incarnation left open, and this one, in one stroke."""
        path = self._folder / HEAD
        try:
            old = decoded_head(read_file(path), str(path))
        except FileNotFoundError:
            if any(self._folder.glob("*.log")):
                cure = "give this run a folder of its own, or bring the file back"
                raise ValueError(f"folder: {self._folder} holds segments of a log, but no {HEAD}; {cure}") from None
            old = Head([], [], [], first_step)
        for field in RUN if old.incarnations else ():
            was, now = old.incarnations[-1].header.get(field), header.get(field)
            if was != now:
                got, cure = f"{field} {now!r}", "give this run a folder of its own"
                raise ValueError(expected("folder", f"the run logged in {self._folder}, of {field} {was!r}", got, cure))
        self._incarnation = len(old.incarnations)
        left = Frames(old.open)
        with suppress(FileNotFoundError):
            left.take(read_file(self._folder / old.open_name))  # up to the first that is not whole
        segments = [*old.segments]
        if left.ends:
            end = left.next - 1
            segments.append(Segment(self._incarnation - 1, old.open, end, len(left.data), left.digest))
            _sync(self._folder / old.open_name)
            self._send(old.open_name, bytes(left.data))
        self._head = Head([*old.incarnations, Incarnation(first_step, header)], segments, old.snapshots, first_step)
        self._write_head()

    def _check_next(self, step: int) -> None:
        if step != self._next:
            raise ValueError(expected("step", f"{self._next}, the next one of this log", f"{step}"))

    def _hand_over(self, job: Callable[[], object], size: int) -> None:
        """Let the thread do a job that holds so many bytes; wait while that would be too many."""
        with self._moved:
            if self._closing:
                raise ValueError(f"folder: the log in {self._folder} was closed; open another incarnation")
            if self._is_full(size) and not self._has_waited:
                self._has_waited = True
                cure = "give a faster disk, or a larger buffer; said once"
                logger.warning(
                    f"the log in {self._folder}: training waits for {self._pending} bytes to be written; {cure}"
                )
            self._moved.wait_for(lambda: not self._is_full(size))
            if not self._ended:
                self._jobs.append((job, size))
                self._pending += size
                self._moved.notify_all()

    def _is_full(self, size: int) -> bool:
        return self._pending > 0 and self._pending + size > self._buffer  # what is larger goes alone

    def _write(self) -> None:
        """Do the jobs, on the thread, until the log is closed or a write fails."""
        try:
            while self._wait_for_job():
                job, size = self._jobs[0]
                job()
                with self._moved:
                    self._jobs.popleft()
                    self._pending -= size
                    self._moved.notify_all()
            self._close_segment()
        except Exception as error:  # whatever a full disk, or somebody's `put`, raises; the run goes on
            where, what = (
                f"the log in {self._folder} ends before step {self._written}",
                f"{type(error).__name__}: {error}",
            )
            cure = "training goes on without it; make room, and restart the run to go on with the log"
            logger.warning(f"{where}: {what}; {cure}")
            with self._moved:
                self._ended, self._pending = True, 0
                self._jobs.clear()
                self._moved.notify_all()
            if self._file is not None:
                os.close(self._file)

    def _wait_for_job(self) -> bool:
        with self._moved:
            self._moved.wait_for(lambda: self._jobs or self._closing)
            return len(self._jobs) > 0

    def _write_frame(self, frame: Described) -> None:
        pieces = encoded_frame(frame, self._indexes)
        if self._file is None:
            self._file = os.open(self._folder / self._head.open_name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        for piece in pieces:
            rest = memoryview(piece)
            while rest:  # a disk that is nearly full takes a part
                rest = rest[os.write(self._file, rest) :]
        self._bytes += sum(map(len, pieces))
        self._starts.append(bytes(pieces[0]))
        self._written = frame.step + 1
        if len(self._starts) == self._steps_per_segment or self._bytes >= SEGMENT_BYTES:
            self._close_segment()

    def _close_segment(self) -> None:
        if self._file is None:
            return
        os.fsync(self._file)
        os.close(self._file)
        digest, last = digest_of(b"".join(self._starts)), self._written - 1
        segment = Segment(self._incarnation, self._head.open, last, self._bytes, digest)
        self._file, self._bytes, self._starts, self._indexes = None, 0, [], {}
        # Before head.json is: a process that is killed between them finds the segment open, and puts it again.
        self._send(segment.name)
        self._head = self._head._replace(segments=[*self._head.segments, segment], open=self._written)
        self._write_head()

    def _write_snapshot(self, step: int, data: bytes) -> None:
        snapshot = Snapshot(self._incarnation, step, len(data), digest_of(data))
        path = self._folder / snapshot.name
        path.write_bytes(data)
        _sync(path)
        self._send(snapshot.name, data)
        self._head = self._head._replace(snapshots=[*self._head.snapshots, snapshot])
        self._write_head()

    def _write_head(self) -> None:
        data = encoded_head(self._head)
        new = self._folder / f".{HEAD}.new"  # a process that is killed while it writes leaves the old file whole
        new.write_bytes(data)
        _sync(new)
        _sync(self._folder)  # the names of the files that it lists, before its own
        new.replace(self._folder / HEAD)
        _sync(self._folder)
        self._send(HEAD, data)

    def _send(self, name: str, data: bytes | None = None) -> None:
        """Give a file to `put`, if there is one. data: its bytes; None to read them."""
        if self._put is not None:
            self._put(name, read_file(self._folder / name) if data is None else data)


_open = set[LogWriter]()


def _in_child() -> None:
    """Let go of all folders in a process that was forked: no thread is in it."""
    # Else workers that load data, and outlive a killed trainer for seconds, would keep its restart from the folder.
    for writer in _open:
        writer._closing = True
        atexit.unregister(writer.close)
        os.close(writer._lock)
    _open.clear()


os.register_at_fork(after_in_child=_in_child)


def _locked(folder: Path) -> int:
    """Return a handle that keeps other writers from a folder until it is closed, or the process ends in any way."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        raise
    return handle


def _sync(path: Path) -> None:
    """Let what was written into a file, or the names in a folder, outlive a machine that loses power."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
