"""What the log of a run consists of: the layout of its files, and their bytes from values and back.

A log is a folder. `K` is an incarnation of the trainer, in four digits, and `S` a step, in twelve; steps count from 0,
and the frame of step S leads from the state after S steps to the state after S + 1.

    head.json             what is closed; replaced in one stroke
    K-S.log               a segment: the frames of incarnation K from step S on; never changed once head.json lists it
    K-S.safetensors       a snapshot: what a follower starts from before the frame of step S
    lock                  held by the process that writes; empty, and no part of the log

**A segment** is the eight bytes `fn log 1`, then its frames, one step after the other without a gap.

**A frame** is, in little endian,

    u64                   the length of what follows these sixteen bytes
    u32                   the length of the description
    u32                   CRC-32 of the twelve bytes before and of all that follows
    description           JSON, deflated (zlib): [step, phase, changed, [[key, lengths], ...], digest]
    payload               the bytes of each record, one after the other, as `lengths` cuts them

`changed` holds the numbers that are others than in the frame before, `skipped` among them: how many steps all ranks
have skipped so far. `digest` is that of the parameters behind the step, or null.

**head.json** is one line, {"digest": D, "head": {...}}, as compact JSON with sorted keys; D is the blake2b digest, of
sixteen bytes, of the JSON of "head":

    format                1
    incarnations          [{"first": S, "header": {...}}, ...]: the step that each began from, and what it is a run of
    segments              [{"incarnation": K, "first": S, "last": S, "bytes": N, "digest": D}, ...]: those closed
    snapshots             [{"incarnation": K, "step": S, "bytes": N, "digest": D}, ...]
    open                  the first step of the segment that is being written, of the newest incarnation

A segment's digest is over the first sixteen bytes of each of its frames, which hold the checksums of all else; a
snapshot's is over the file. Of a segment only the first `bytes` count: what a killed trainer left unfinished may follow
there. A segment that is still open may end in the middle of a frame, and need not be there before its first one.

What a later incarnation began from replaces what older ones wrote from that step on. No file of those is changed.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from fn.errors import expected

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
Key: TypeAlias = tuple[str | int, ...]
Record: TypeAlias = tuple[Key, Sequence[bytes]]

FORMAT = 1
MAGIC = b"fn log 1"
HEAD = "head.json"
RUN = ("method", "shapes", "dtypes")
"""What headers of all incarnations must have alike: they are of one run."""

_START = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
START_BYTES = _START.size + _CHECKSUM.size


class LogDamaged(ValueError):
    """A file of a log is missing, or is not what was written; nothing of it was used.

    file: its name. step: the first step that cannot be read; None if the file is of no step.
    """

    def __init__(self, message: str, *, file: str = "", step: int | None = None):
        super().__init__(message)
        self.file = file
        self.step = step


class Frame(NamedTuple):
    """What all ranks heard in one step.

    step: its number, from 0. phase: its name. changed: numbers that are others than in the frame before. records: key
    and bytes of each. digest: of the parameters behind the step, where it was taken.
    """

    step: int
    phase: str
    changed: dict[str, JSON]
    records: list[tuple[Key, list[bytes]]]
    digest: str | None


class Segment(NamedTuple):
    """A closed segment. bytes: how many of its file count. digest: of its frames."""

    incarnation: int
    first: int
    last: int
    bytes: int
    digest: str

    @property
    def name(self) -> str:
        """Return the name of its file."""
        return segment_name(self.incarnation, self.first)


class Snapshot(NamedTuple):
    """A snapshot, of what comes before the frame of its step. bytes, digest: of its file."""

    incarnation: int
    step: int
    bytes: int
    digest: str

    @property
    def name(self) -> str:
        """Return the name of its file."""
        return f"{self.incarnation:04d}-{self.step:012d}.safetensors"


class Incarnation(NamedTuple):
    """A trainer between its start and its end. first: the step that it began from. header: what it is a run of."""

    first: int
    header: dict[str, JSON]


class Head(NamedTuple):
    """What head.json holds. open: the first step of the segment that is being written, of the newest incarnation."""

    incarnations: list[Incarnation]
    segments: list[Segment]
    snapshots: list[Snapshot]
    open: int

    @property
    def open_name(self) -> str:
        """Return the name of the file of the segment that is being written."""
        return segment_name(len(self.incarnations) - 1, self.open)

    def end_of(self, incarnation: int) -> float:
        """Return the step from which on later incarnations have replaced what this one wrote."""
        return min((later.first for later in self.incarnations[incarnation + 1 :]), default=float("inf"))


def segment_name(incarnation: int, first: int) -> str:
    """Return the name of a segment's file."""
    return f"{incarnation:04d}-{first:012d}.log"


def compact(value: JSON) -> bytes:
    """Return the JSON of a value, without spaces and with sorted keys."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def digest_of(data: bytes) -> str:
    """Return the digest that head.json has of a file or a text."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def encoded_head(head: Head) -> bytes:
    """Return the bytes of head.json."""
    lists = {
        name: [entry._asdict() for entry in getattr(head, name)] for name in ("incarnations", "segments", "snapshots")
    }
    value: dict[str, JSON] = {"format": FORMAT, **lists, "open": head.open}
    return compact({"digest": digest_of(compact(value)), "head": value})


def decoded_head(data: bytes, where: str) -> Head:
    """Return what is in a head.json. where: its path or URL, for errors.

    Raises: ValueError for the format of another version; LogDamaged if the bytes are not what was written.
    """
    try:
        value = json.loads(data)["head"]
        form = value["format"]
        if type(form) is int and form != FORMAT:
            cure = "read it with the version of fn that wrote it, or let this one write into a folder of its own"
            raise _OtherVersion(expected("folder", f"a log of format {FORMAT}", f"format {form} in {where}", cure))
        head = Head(
            [_entry(Incarnation, entry) for entry in value["incarnations"]],
            [_entry(Segment, entry) for entry in value["segments"]],
            [_entry(Snapshot, entry) for entry in value["snapshots"]],
            value["open"],
        )
        is_whole = type(head.open) is int and len(head.incarnations) > 0 and encoded_head(head) == data
    except _OtherVersion as error:
        raise ValueError(str(error)) from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):  # what JSON else may hold
        is_whole = False
    if not is_whole:
        cure = "copy it again from where it was written; followers can start at any snapshot of another copy"
        raise LogDamaged(f"folder: {where} is not what was written; {cure}", file=HEAD)
    return head


class _OtherVersion(Exception):
    """The format of another version, which is no damage."""


def _entry(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Return an entry of head.json. Raises: TypeError if it is none."""
    entry = kind(**fields)
    kinds = {"digest": str, "header": dict}
    if not all(type(value) is kinds.get(name, int) for name, value in entry._asdict().items()):
        raise TypeError(kind.__name__)
    return entry


def encoded_frame(
    step: int, phase: str, changed: Mapping[str, JSON], records: Sequence[Record], digest: str | None
) -> list[bytes]:
    """Return the bytes of a frame, in pieces: those of the records are not copied."""
    keys: JSON = [[list(key), [len(leaf) for leaf in leaves]] for key, leaves in records]
    description = zlib.compress(compact([step, phase, dict(changed), keys, digest]))
    pieces = [description, *(leaf for _, leaves in records for leaf in leaves)]
    start = _START.pack(sum(map(len, pieces)), len(description))
    return [start, *pieces]


def sealed(pieces: Sequence[bytes]) -> list[bytes]:
    """Return the pieces of a frame with their checksum. It takes time in proportion to the bytes, without the GIL."""
    start, *rest = pieces
    checksum = zlib.crc32(start)
    for piece in rest:
        checksum = zlib.crc32(piece, checksum)
    return [start + _CHECKSUM.pack(checksum), *rest]


def frame_end(data: bytes | bytearray, begin: int) -> int | None:
    """Return where the frame that begins in these bytes ends; None if they end before."""
    # Zeros alone are no frame: over a network, or where power was lost, a file may have its size before its bytes.
    if len(data) - begin < START_BYTES or not any(data[begin : begin + START_BYTES]):
        return None
    end = begin + START_BYTES + int(_START.unpack_from(data, begin)[0])
    return end if end <= len(data) else None


def is_intact(data: bytes | bytearray, begin: int, end: int) -> bool:
    """Tell whether the checksum of a frame is that of its bytes."""
    with memoryview(data) as view, view[begin : begin + _START.size] as start, view[begin + START_BYTES : end] as rest:
        return (zlib.crc32(rest, zlib.crc32(start)),) == _CHECKSUM.unpack_from(data, begin + _START.size)


def decoded_frame(data: bytes | bytearray, begin: int, end: int) -> Frame | None:
    """Return the frame between two places; None if its checksum is right, but it is no frame."""
    at = begin + START_BYTES
    described = at + _START.unpack_from(data, begin)[1]
    try:
        step, phase, changed, keys, digest = json.loads(zlib.decompress(data[at:described]))
        records, at = [], described
        for key, lengths in keys:
            leaves = []
            for length in lengths:
                leaves.append(bytes(data[at : at + length]))
                at += length
            records.append((tuple(key), leaves))
    except (zlib.error, ValueError, TypeError, LookupError, RecursionError):  # what else may have the right checksum
        return None
    is_frame = at == end and type(step) is int and isinstance(phase, str) and isinstance(changed, dict)
    return Frame(step, phase, changed, records, digest) if is_frame else None


class Frames:
    """The frames in a segment whose bytes come little by little.

    data: what is known to be whole. first: the step of the first frame. ends: where each one ends.
    """

    def __init__(self, first: int) -> None:
        self.data = bytearray()
        self.first = first
        self.ends: list[int] = []

    @property
    def next(self) -> int:
        """Return the step that comes behind the last frame."""
        return self.first + len(self.ends)

    @property
    def digest(self) -> str:
        """Return the digest that head.json has of a segment with these frames."""
        return digest_of(b"".join(bytes(self.data[begin : begin + START_BYTES]) for begin in self._begins()))

    def take(self, data: bytes) -> int | None:
        """Take the bytes behind `data`, up to the last whole frame.

        Returns: the step of a frame that is whole and not what was written; None if all are, but for a last one that
            is torn.
        """
        at = len(self.data)
        self.data += data
        if at < len(MAGIC):
            at = len(MAGIC)
            if self.data[:at] != MAGIC[: len(self.data)]:
                self.data.clear()
                return self.first
            if len(self.data) < at:
                self.data.clear()
                return None
        bad = None
        while (end := frame_end(self.data, at)) is not None:
            if not is_intact(self.data, at, end):
                bad = self.next if end < len(self.data) else None  # the last one may be on its way
                break
            self.ends.append(end)
            at = end
        del self.data[at:]
        return bad

    def frame(self, step: int) -> Frame | None:
        """Return the frame of a step; None if its checksum is right, but it is no frame of that step."""
        place = step - self.first
        begin = self.ends[place - 1] if place else len(MAGIC)
        frame = decoded_frame(self.data, begin, self.ends[place])
        return frame if frame is not None and frame.step == step else None

    def _begins(self) -> list[int]:
        return [len(MAGIC), *self.ends][: len(self.ends)]


def read_file(path: Path, start: int = 0) -> bytes:
    """Return the bytes of a file from a place on. Raises: FileNotFoundError if there is none; OSError."""
    if not path.is_file():  # a pipe would be waited for, and a device may never end
        raise FileNotFoundError(f"folder: there is no file {path}")
    with path.open("rb") as file:
        file.seek(start)
        return file.read()


def tensors_module() -> Any:
    """Return safetensors' functions for torch. Raises: ImportError that says how to get them."""
    try:
        import safetensors.torch
    except ImportError as error:
        text = "snapshots of a log are in safetensors' format, which is not installed here; pip install safetensors"
        raise ImportError(text) from error
    return safetensors.torch
