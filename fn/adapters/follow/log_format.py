"""What the log of a run consists of: the layout of its files, and their bytes from values and back.

A log is a folder. `K` is an incarnation of the trainer, in four digits, and `S` a step, in twelve; steps count from 0,
and the frame of step S leads from the state after S steps to the state after S + 1.

    head.json             what is closed; replaced in one stroke
    K-S.log               a segment: the frames of incarnation K from step S on; never changed once head.json lists it
    K-S.safetensors       a snapshot: what a follower starts from before the frame of step S
    lock                  held by the process that writes; empty, and no part of the log

**A segment** is frames, one step after the other without a gap. **A frame** is, in little endian,

    u64                   the length of what follows these sixteen bytes
    u32                   the length of the description
    u32                   CRC-32 of the twelve bytes before and of all that follows
    description           JSON, deflated (zlib): [[step, phase, changed, digest], index]
    payload               the bytes of each record, one after the other, as `lengths` cuts them

The index is [[key, lengths], ...] of the records; or an earlier step of the segment, which has the same one: what is
recorded repeats, and keys of hundreds of tensors would be longer than their codes.

`changed` holds the numbers that are others than in the frame before, null for those that ended, and `skipped`: true for
a step that all ranks skipped. `digest` is that of the parameters behind the step, or null.

**head.json** is one line, {"digest": D, "head": {...}}, as compact JSON with sorted keys; D is the blake2b digest, of
sixteen bytes, of the JSON of "head":

    format                1
    incarnations          [{"first": S, "header": {...}}, ...]: the step that each began from, and what it is a run of
    segments              [{"incarnation": K, "first": S, "last": S, "bytes": N, "digest": D}, ...]: those closed
    snapshots             [{"incarnation": K, "step": S, "bytes": N, "digest": D}, ...]
    open                  the first step of the segment that is being written, of the newest incarnation

A segment's digest is over the first sixteen bytes of each of its frames, which hold the checksums of all else; a
snapshot's is over the file. Of a segment only the first `bytes` count: what a killed trainer left unfinished may follow
there. A segment that is still open may end in the middle of a frame, and is not there before its first one.

What a later incarnation began from replaces what older ones wrote from that step on. No file of those is changed.
"""

from __future__ import annotations

import hashlib
import json
import operator
import struct
import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from fn.errors import expected

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"
Key: TypeAlias = tuple[str | int, ...]

FORMAT = 1
HEAD = "head.json"
RUN = ("method", "shapes", "dtypes")
"""What headers of all incarnations must have alike: they are of one run."""

_LENGTHS = struct.Struct("<QI")
_CHECKSUM = struct.Struct("<I")
START_BYTES = _LENGTHS.size + _CHECKSUM.size
_MALFORMED = (
    zlib.error,
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    RecursionError,
)  # of what JSON else may hold


class LogDamaged(ValueError):
    """A file of a log is missing, or is not what was written; nothing of it was used.

    file: its name. step: the first step that cannot be read; None if the file is of no step.
    """

    def __init__(self, message: str, *, file: str = "", step: int | None = None):
        super().__init__(message)
        self.file = file
        self.step = step


Data = bytes | memoryview
"""The bytes of a leaf; to write them no copy is needed."""


class Frame(NamedTuple):
    """What all ranks heard in one step.

    step: its number, from 0. phase: its name. changed: numbers that are others than in the frame before. records: key
    and bytes of each. digest: of the parameters behind the step, where it was taken.
    """

    step: int
    phase: str
    changed: dict[str, JSON]
    records: list[tuple[Key, list[Data]]]
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
        return f"{self.incarnation:04d}-{self.first:012d}.log"


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


_LISTS = {"incarnations": Incarnation, "segments": Segment, "snapshots": Snapshot}


class Head(NamedTuple):
    """What head.json holds. open: the first step of the segment that is being written, of the newest incarnation."""

    incarnations: list[Incarnation]
    segments: list[Segment]
    snapshots: list[Snapshot]
    open: int

    @property
    def open_name(self) -> str:
        """Return the name of the file of the segment that is being written."""
        return Segment(len(self.incarnations) - 1, self.open, 0, 0, "").name

    def end_of(self, incarnation: int) -> float:
        """Return the step from which on later incarnations have replaced what this one wrote."""
        return min((later.first for later in self.incarnations[incarnation + 1 :]), default=float("inf"))


def compact(value: JSON) -> bytes:
    """Return the JSON of a value, without spaces and with sorted keys."""
    return json.dumps(value, separators=(",", ":"), sort_keys=True).encode()


def digest_of(data: bytes) -> str:
    """Return the digest that head.json has of a file or a text."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def encoded_head(head: Head) -> bytes:
    """Return the bytes of head.json."""
    lists: dict[str, JSON] = {name: [entry._asdict() for entry in getattr(head, name)] for name in _LISTS}
    value: JSON = {"format": FORMAT, "open": head.open, **lists}
    return compact({"digest": digest_of(compact(value)), "head": value})


def decoded_head(data: bytes, where: str) -> Head:
    """Return what is in a head.json. where: its path or URL, for errors.

    Raises: ValueError for the format of another version; LogDamaged if the bytes are not what was written.
    """
    form = head = None
    with suppress(*_MALFORMED):
        value = json.loads(data)["head"]
        form = value["format"]
        lists: Any = [[_entry(kind, fields) for fields in value[name]] for name, kind in _LISTS.items()]
        head = Head(lists[0], lists[1], lists[2], operator.index(value["open"]))
    if type(form) is int and form != FORMAT:
        cure = "read it with the version of fn that wrote it, or let this one write into a folder of its own"
        raise ValueError(expected("folder", f"a log of format {FORMAT}", f"format {form} in {where}", cure))
    if head is None or not head.incarnations or encoded_head(head) != data:
        cure = "copy it again from where it was written; followers can start at any snapshot of another copy"
        raise LogDamaged(f"folder: {where} is not what was written; {cure}", file=HEAD)
    return head


def _entry(kind: Any, fields: Mapping[str, Any]) -> Any:
    """Return an entry of head.json. Raises: TypeError if it is none."""
    kinds = {"digest": str, "header": dict}
    if not all(type(value) is kinds.get(name, int) for name, value in fields.items()):
        raise TypeError(kind.__name__)
    return kind(**fields)


class Described(NamedTuple):
    """A frame whose place in a segment is not known yet. about, keys: its description, as JSON."""

    step: int
    about: bytes
    keys: bytes
    leaves: list[Data]


def described(frame: Frame) -> Described:
    """Return a frame with its description as JSON. Raises: TypeError for what JSON cannot say."""
    step, phase, changed, records, digest = frame
    keys = compact([[key, list(map(len, leaves))] for key, leaves in records])
    about = compact([step, phase, changed, digest])
    return Described(step, about, keys, [leaf for _, leaves in records for leaf in leaves])


def encoded_frame(frame: Described, steps: dict[bytes, int]) -> list[Data]:
    """Return the bytes of a frame in pieces: the first is of `START_BYTES`, and those of the records are no copies.

    Args: steps: the first step of the segment that had an index, by that; this one's is noted.
    """
    first = steps.setdefault(frame.keys, frame.step)
    index = frame.keys if first == frame.step else str(first).encode()
    pieces: list[Data] = [description := zlib.compress(b"[%b,%b]" % (frame.about, index)), *frame.leaves]
    start = _LENGTHS.pack(sum(map(len, pieces)), len(description))
    checksum = zlib.crc32(start)
    for piece in pieces:
        checksum = zlib.crc32(piece, checksum)
    return [start + _CHECKSUM.pack(checksum), *pieces]


class Frames:
    """The frames of a segment whose bytes come little by little.

    data: those of whole frames. first: the step of the first one. ends: where each one ends.
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
        """Return the digest that head.json has of a segment of these frames."""
        return digest_of(b"".join(bytes(self.data[begin : begin + START_BYTES]) for begin in [0, *self.ends][:-1]))

    def take(self, data: bytes) -> int | None:
        """Take the bytes behind `data`, up to the last whole frame.

        Returns: the step of a frame that is whole and not what was written; None if all are, but for a last one that
            is torn.
        """
        at, bad = len(self.data), None
        self.data += data
        # Zeros alone are no frame: over a network, or where power was lost, a file may have its size before its bytes.
        while any(start := self.data[at : at + START_BYTES]) and len(start) == START_BYTES:
            end = at + START_BYTES + _LENGTHS.unpack_from(start)[0]
            if end > len(self.data):
                break
            with memoryview(self.data) as view, view[at + START_BYTES : end] as rest:
                checksum = zlib.crc32(rest, zlib.crc32(start[: _LENGTHS.size]))
            if start[_LENGTHS.size :] != _CHECKSUM.pack(checksum):
                bad = self.next if end < len(self.data) else None  # the last one may be on its way
                break
            self.ends.append(end)
            at = end
        del self.data[at:]
        return bad

    def frame(self, step: int) -> Frame | None:
        """Return the frame of a step; None if its checksum is right, but it is no frame of that step."""
        end, records = self.ends[step - self.first], []
        with suppress(*_MALFORMED):
            at, (found, phase, changed, digest), index = self._description(step)
            if isinstance(index, int):
                index = self._description(index)[2]
            for key, lengths in index:
                leaves = list[Data]()
                for length in lengths:
                    leaves.append(bytes(memoryview(self.data)[at : at + length]))  # one copy; of a slice it were two
                    at += length
                records.append((tuple(key), leaves))
            if at == end and found == step and isinstance(phase, str) and isinstance(changed, dict):
                return Frame(step, phase, changed, records, digest)
        return None

    def _description(self, step: int) -> tuple[int, Any, Any]:
        """Return where the payload of a step begins, and what its description says of it, and of its records."""
        at = [0, *self.ends][step - self.first]
        begin = at + START_BYTES
        end = begin + _LENGTHS.unpack_from(self.data, at)[1]
        about, index = json.loads(zlib.decompress(self.data[begin:end]))
        return end, about, index


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
