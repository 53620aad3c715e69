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
from typing import cast

from torch import Tensor

from fn.adapters.follow.log_format import (
    HEAD,
    JSON,
    MAGIC,
    RUN,
    Frames,
    Head,
    Incarnation,
    Record,
    Segment,
    Snapshot,
    compact,
    decoded_head,
    digest_of,
    encoded_frame,
    encoded_head,
    read_file,
    sealed,
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
        process writes there, OSError if this one cannot. Nothing is written then.
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
        self._next = self._written = self._begun = first_step  # of frames that were handed over, written, and closed
        self._bytes, self._starts = 0, list[bytes]()  # of the open segment
        self._file: int | None = None
        try:
            self._lock = _locked(self._folder)
            try:
                self._open_incarnation(cast(dict[str, JSON], json.loads(compact(header))), first_step)
            except BaseException:
                os.close(self._lock)
                raise
        except BlockingIOError:
            raise
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
        self, step: int, phase: str, changed: Mapping[str, JSON], records: Sequence[Record], digest: str | None = None
    ) -> None:
        """Hand over the frame of the next step; wait only while the buffer is full.

        Args: step: of this frame, one more than the last. phase: its name. changed: numbers that are others than in
            the frame before. records: key and bytes of each. digest: of the parameters behind the step, if taken.
        Raises: ValueError for another step, TypeError for what JSON cannot say.
        """
        if step != self._next:
            raise ValueError(expected("step", f"{self._next}, the next one of this log", f"{step}"))
        pieces = encoded_frame(step, phase, changed, records, digest)
        self._next += 1
        self._hand_over(partial(self._write_frame, step, pieces), sum(map(len, pieces)))

    def snapshot(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Hand over a copy of what a follower starts from before the frame of a step; wait as `frame` does.

        Raises: ValueError for another step than that of the next frame; ImportError without safetensors.
        """
        save = tensors_module().save
        if step != self._next:
            raise ValueError(expected("step", f"{self._next}, that of the next frame", f"{step}"))
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
        left = self._left_open(old) if old.incarnations else None
        segments = [*old.segments, left] if left else old.segments
        if left and self._put is not None:
            self._put(left.name, read_file(self._folder / left.name)[: left.bytes])
        self._incarnation = len(old.incarnations)
        self._head = Head([*old.incarnations, Incarnation(first_step, header)], segments, old.snapshots, first_step)
        self._write_head()

    def _left_open(self, head: Head) -> Segment | None:
        """Return the frames of a killed trainer that were written whole, as a segment; None if there are none."""
        frames = Frames(head.open)
        with suppress(FileNotFoundError):
            frames.take(read_file(self._folder / head.open_name))  # up to the first that is not whole
        if not frames.ends:
            return None
        with (self._folder / head.open_name).open("rb") as file:
            os.fsync(file.fileno())
        incarnation = len(head.incarnations) - 1
        return Segment(incarnation, head.open, frames.next - 1, len(frames.data), frames.digest)

    def _hand_over(self, job: Callable[[], object], size: int) -> None:
        with self._moved:
            if self._closing:
                raise ValueError(f"folder: the log in {self._folder} was closed; open another incarnation")
            if self._ended:
                return
            if self._is_full(size):
                if not self._has_waited:
                    self._has_waited = True
                    logger.warning(
                        "the log in %s: training waits until some of %d bytes are written; give a faster disk, or a "
                        "larger buffer; said once",
                        self._folder,
                        self._pending,
                    )
                self._moved.wait_for(lambda: self._ended or not self._is_full(size))
            self._jobs.append((job, size))
            self._pending += size
            self._moved.notify_all()

    def _is_full(self, size: int) -> bool:
        return self._pending > 0 and self._pending + size > self._buffer  # one that is larger goes alone

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
            logger.warning(
                "the log in %s ends before step %d: %s: %s; training goes on without it; make room, and restart "
                "the run to go on with the log",
                self._folder,
                self._written,
                type(error).__name__,
                error,
            )
            with self._moved:
                self._ended = True
                self._jobs.clear()
                self._moved.notify_all()
            if self._file is not None:
                os.close(self._file)

    def _wait_for_job(self) -> bool:
        with self._moved:
            self._moved.wait_for(lambda: self._jobs or self._closing)
            return len(self._jobs) > 0

    def _write_frame(self, step: int, pieces: list[bytes]) -> None:
        if self._file is None:
            self._file = os.open(self._folder / self._head.open_name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
            self._bytes = _write_all(self._file, [MAGIC])
        pieces = sealed(pieces)
        self._bytes += _write_all(self._file, pieces)
        self._starts.append(pieces[0])
        self._written = step + 1
        if len(self._starts) == self._steps_per_segment or self._bytes >= SEGMENT_BYTES:
            self._close_segment()

    def _close_segment(self) -> None:
        if self._file is None:
            return
        os.fsync(self._file)
        os.close(self._file)
        self._file = None
        digest = digest_of(b"".join(self._starts))
        segment = Segment(self._incarnation, self._head.open, self._written - 1, self._bytes, digest)
        self._starts.clear()
        # Before head.json is: a process that is killed between them finds the segment open, and puts it again.
        if self._put is not None:
            self._put(segment.name, read_file(self._folder / segment.name))
        self._head = self._head._replace(segments=[*self._head.segments, segment], open=self._written)
        self._write_head()

    def _write_snapshot(self, step: int, data: bytes) -> None:
        snapshot = Snapshot(self._incarnation, step, len(data), digest_of(data))
        _write_synced(self._folder / snapshot.name, data)
        if self._put is not None:
            self._put(snapshot.name, data)
        self._head = self._head._replace(snapshots=[*self._head.snapshots, snapshot])
        self._write_head()

    def _write_head(self) -> None:
        data = encoded_head(self._head)
        new = self._folder / f".{HEAD}.new"  # a process that is killed while it writes leaves the old file whole
        _write_synced(new, data)
        _sync(self._folder)  # the names of the files that it lists, before its own
        new.replace(self._folder / HEAD)
        _sync(self._folder)
        if self._put is not None:
            self._put(HEAD, data)

    def _leave_to_parent(self) -> None:
        """Let go of the folder in a process that was forked: the thread is not in it."""
        self._ended = self._closing = True
        atexit.unregister(self.close)
        os.close(self._lock)


_open = set[LogWriter]()


def _in_child() -> None:
    # Else workers that load data, and outlive a killed trainer for seconds, would keep its restart from the folder.
    for writer in _open:
        writer._leave_to_parent()
    _open.clear()


os.register_at_fork(after_in_child=_in_child)


def _locked(folder: Path) -> int:
    """Return a handle that keeps other writers from a folder until it is closed, or the process ends in any way."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        cure = "let one rank write, and give each run a folder of its own"
        raise BlockingIOError(f"folder: another process writes the log in {folder}; {cure}") from None
    except OSError:
        os.close(handle)
        raise
    return handle


def _write_all(file: int, pieces: Sequence[bytes]) -> int:
    """Write all of some pieces, and return how many bytes these are."""
    for piece in pieces:
        with memoryview(piece) as rest:
            done = 0
            while done < len(rest):  # a disk that is nearly full takes a part
                done += os.write(file, rest[done:])
    return sum(map(len, pieces))


def _write_synced(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
