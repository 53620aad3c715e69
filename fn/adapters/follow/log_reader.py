"""Read the log of a run, from a folder or from a plain file server, while it is written or afterwards."""

from __future__ import annotations

import http.client
import itertools
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import cast

from torch import Tensor

from fn.adapters.follow.log_format import (
    HEAD,
    JSON,
    Frame,
    Frames,
    Head,
    LogDamaged,
    Segment,
    Snapshot,
    decoded_head,
    digest_of,
    read_file,
    tensors_module,
)
from fn.errors import expected

TIMEOUT = 60.0
"""Seconds in which a file server must say something."""


class LogReader:
    """Read frames and snapshots of a log, as far as they are there; `refresh` looks for more.

        reader = LogReader("https://example.org/run")
        again = reader.refresh()          # a step before yours: start again from a snapshot at or before it
        for step in range(mine, reader.last_step + 1):
            apply(reader.frame(step))

    Args: source: the folder of the log, or the http or https address where a file server shows it.
    Raises: FileNotFoundError if there is no log, LogDamaged if its head.json is not what was written, ValueError for
        that of another version.
    """

    def __init__(self, source: str | Path):
        self._source = str(source).rstrip("/")
        is_url = urllib.parse.urlsplit(self._source).scheme in ("http", "https")
        self._read: Callable[[str, int], bytes] = self._read_url if is_url else self._read_local
        self._head = Head([], [], [], 0)
        self._open = Frames(0)  # the newest frames, of the segment that is still written
        self._closed: tuple[Segment, Frames] | None = None  # the one that was read last
        self.refresh()

    @property
    def header(self) -> dict[str, JSON]:
        """Return what the newest incarnation is a run of."""
        return self._head.incarnations[-1].header

    @property
    def head(self) -> str:
        """Return the path of head.json, for errors."""
        return self._path(HEAD)

    @property
    def incarnation(self) -> int:
        """Return how many times the trainer was restarted."""
        return len(self._head.incarnations) - 1

    @property
    def first_step(self) -> int:
        """Return the first step of the log."""
        return min(incarnation.first for incarnation in self._head.incarnations)

    @property
    def last_step(self) -> int:
        """Return the last step whose frame is there: one before the newest incarnation's first if it has none yet."""
        return self._open.next - 1

    def refresh(self) -> int | None:
        """Look for new frames, snapshots and incarnations.

        Returns: the first step that a restarted trainer takes again since the last look; a follower that is beyond it
            goes back to a snapshot at or before it. None if the trainer was not restarted.
        Raises: LogDamaged, also if what is there now is another log; OSError if it cannot be read, as when a server is
            away: try again later.
        """
        try:
            data = self._read(HEAD, 0)
        except FileNotFoundError as error:
            text = f"source: {self._source} holds no log, for there is no {HEAD}; give the folder that the run writes"
            raise FileNotFoundError(text) from error
        old, head = self._head, decoded_head(data, self._path(HEAD))
        if head.incarnations[: len(old.incarnations)] != old.incarnations:
            cure = "make another reader, and start from a snapshot"
            raise LogDamaged(f"source: {self._source} holds another log than before; {cure}", file=HEAD)
        newest, closed = self._open, self._closed
        if not old.incarnations or head.open_name != old.open_name:
            closed = next(((s, newest) for s in head.segments if s.name == old.open_name), None)  # to go on with
            newest = Frames(head.open)
        with suppress(FileNotFoundError):  # it is there from its first frame on
            self._extend(newest, head.open_name)
        self._head, self._open, self._closed = head, newest, closed
        again = [incarnation.first for incarnation in head.incarnations[len(old.incarnations) :]]
        return min(again, default=None) if old.incarnations else None

    def steps(self) -> dict[int, range]:
        """Return the steps that are there, by the incarnation whose frames count, in order."""
        stops = {segment.incarnation: segment.last + 1 for segment in self._head.segments}
        stops[self.incarnation] = self._open.next
        ends = {k: int(min(stop, self._head.end_of(k))) for k, stop in stops.items()}
        steps = {k: range(self._head.incarnations[k].first, end) for k, end in ends.items()}
        return {k: there for k, there in steps.items() if there}

    def frame(self, step: int) -> Frame:
        """Return the frame of a step.

        Raises: LookupError if it is not in the log; LogDamaged, which names the file and the step, if it is not what
            was written; OSError if it cannot be read.
        """
        segment = self._segment_of(step)
        frames, name = (self._open, self._head.open_name) if segment is None else (self._frames(segment), segment.name)
        frame = frames.frame(step)
        if frame is None:
            raise self._damaged(name, step, "holds something else as its frame")
        return frame

    def snapshots(self) -> list[int]:
        """Return the steps of the snapshots that later incarnations have not replaced, in order."""
        return sorted(self._snapshots())

    def snapshot(self, step: int) -> dict[str, Tensor]:
        """Return the tensors of a snapshot, which come before the frame of its step.

        Raises: LookupError if there is none of this step; LogDamaged if it is not what was written; ImportError without
            safetensors.
        """
        snapshot = self._snapshots().get(step)
        if snapshot is None:
            has = ", ".join(map(str, self.snapshots())) or "none"
            raise LookupError(expected("step", f"one of the snapshots in {self._source}, {has}", f"{step}"))
        try:
            data = self._read(snapshot.name, 0)
        except FileNotFoundError as error:
            raise self._damaged(snapshot.name, step, "is missing") from error
        if len(data) != snapshot.bytes or digest_of(data) != snapshot.digest:
            raise self._damaged(snapshot.name, step, "is not what was written: its digest differs")
        return cast(dict[str, Tensor], tensors_module().load(data))

    def _snapshots(self) -> dict[int, Snapshot]:
        """Return the snapshots by step."""
        # At the step that an incarnation began from, only its own: it may be the very first, with other parameters.
        return {s.step: s for s in self._head.snapshots if s.step < self._head.end_of(s.incarnation)}

    def _segment_of(self, step: int) -> Segment | None:
        """Return the segment in which the frame of a step is; None for the one that is still written."""
        if self._open.first <= step < self._open.next:
            return None
        last = [self._closed[0]] if self._closed else []
        for segment in itertools.chain(last, reversed(self._head.segments)):
            if segment.first <= step <= segment.last and step < self._head.end_of(segment.incarnation):
                return segment
        has = ", ".join(f"{span.start} to {span.stop - 1}" for span in self.steps().values()) or "none yet"
        later = [s for s in self.snapshots() if s >= step]
        cure = f"go on from the snapshot of step {later[0]}" if later else "refresh() until the trainer has taken it"
        raise LookupError(expected("step", f"one of the log {self._source}, which has {has}", f"{step}", cure))

    def _frames(self, segment: Segment) -> Frames:
        """Return the frames of a closed segment, which it reads unless it was the last that was asked for."""
        known, frames = self._closed or (None, Frames(segment.first))
        if known != segment or len(frames.data) > segment.bytes:  # or else what a machine lost with its power
            frames = Frames(segment.first)
        if len(frames.data) < segment.bytes:
            self._extend(frames, segment.name, segment.bytes)
        if len(frames.data) < segment.bytes:
            raise self._damaged(segment.name, frames.next, "is cut short, or its last frame is not what was written")
        if frames.next - 1 != segment.last or frames.digest != segment.digest:
            raise self._damaged(segment.name, segment.first, "is another file than the one that was written")
        self._closed = segment, frames
        return frames

    def _extend(self, frames: Frames, name: str, end: int | None = None) -> None:
        """Read more of a segment. end: where it ends; None if it is still written."""
        try:
            data = self._read(name, len(frames.data))
        except FileNotFoundError as error:
            if end is None:
                raise
            raise self._damaged(name, frames.first, "is missing") from error
        bad = frames.take(data if end is None else data[: end - len(frames.data)])
        if bad is not None:
            raise self._damaged(name, bad, "is not what was written: a checksum differs")

    def _damaged(self, name: str, step: int, what: str) -> LogDamaged:
        later = [s for s in self.snapshots() if s > step]
        instead = f", or go on from the snapshot of step {later[0]}" if later else ""
        text = f"source: step {step}: {self._path(name)} {what}; copy it again from where it was written{instead}"
        return LogDamaged(text, file=name, step=step)

    def _path(self, name: str) -> str:
        return f"{self._source}/{name}"

    def _read_local(self, name: str, start: int) -> bytes:
        return read_file(Path(self._source, name), start)

    def _read_url(self, name: str, start: int) -> bytes:
        """Return the bytes of a file from a place on: those alone from a server that knows ranges, else out of all."""
        url = self._path(name)
        request = urllib.request.Request(url, headers={"Range": f"bytes={start}-"} if start else {})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT) as reply:
                skip = 0 if reply.status == http.HTTPStatus.PARTIAL_CONTENT else start
                if skip and int(reply.headers.get("Content-Length") or skip + 1) <= skip:
                    return b""  # nothing new: leave the rest of the reply unread
                return bytes(reply.read()[skip:])
        except urllib.error.HTTPError as error:
            with error:
                if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                    return b""  # it has not grown
                kind = FileNotFoundError if error.code == http.HTTPStatus.NOT_FOUND else OSError
                raise kind(f"source: cannot read {url}: {error}; look at the server") from error
        except (OSError, http.client.HTTPException) as error:
            raise OSError(f"source: cannot read {url}: {error}; look at the server, then try again") from error
