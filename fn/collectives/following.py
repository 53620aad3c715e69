"""What all ranks get alike, recorded and replayed: a follower has the params of a run, and is no rank of it.

All ranks apply the same decoded mean. So whoever starts from the same params, takes the same steps and is handed what
the collectives returned has the same params after each of them, bit for bit. What a rank computes from its own
gradients (codes, residual errors, momenta of its own) touches nothing that ranks agree on.

    shared(kind, axis, like, make)      what gives all ranks the same calls `make` through this
      nobody follows                      make()
      recorded                            make(), and a copy of its leaves in the host's memory, as bytes
      replayed                            the leaves from the log; `make` is not called, and nothing is sent

Recorded is the outermost result that is alike on all ranks of all axes that matter, and what an owner or a server gets
is not: a follower's own, from what it sends itself, is as good. The leaves stand in the order of their tree, so any
carrier writes the same bytes. A key says where in a step a result belongs, not when it came: threads have no order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from types import TracebackType
from typing import Any, TypeVar

import torch
from torch import Tensor

from fn import tree
from fn.arguments import check_kind
from fn.collectives import axis as axes
from fn.collectives.axis import Axis, AxisNames, Binding, current_binding
from fn.collectives.transports.registry import Transport, register
from fn.errors import expected
from fn.kernels import memory_pool

Tree = Any
Kept = TypeVar("Kept")
Key = tuple[str | int, ...]
"""Where in a step a result belongs: (unit, phase or part and number of an exchange, kind, index), of a mean that landed
behind "flight"; of a step by hand (kind, index)."""

Record = tuple[Key, Sequence[Tensor]]
"""A key, and the leaves as bytes: vectors of uint8 in the host's memory."""

FLIGHT: Key = ("flight",)
"""What the keys of a mean begin with that travelled while local steps went on."""

Job = Callable[[], Any]


class Log:
    """What all ranks get alike in one step. reads: whether it is replayed. prefix: of its keys."""

    def __init__(self, *, reads: bool = False, prefix: Key = ()):
        self.reads, self.prefix = reads, prefix
        self._places: dict[Key, list[Record]] = {}  # recorded since the last `take`
        self._unread: dict[Key, Sequence[Tensor]] = {}  # replayed, and not asked for yet
        self.unheard: dict[Key, Tree] = {}  # what `unheard` made once

    def open(self, place: Key) -> None:
        """Begin a place; what was recorded there before is dropped, as when a unit is staged again."""
        self._places[place] = []

    def write(self, place: Key, site: Key, leaves: Iterable[Tensor]) -> None:
        """Note the leaves of a result, in copies: its memory is used again."""
        self._places.setdefault(place, []).append(((*self.prefix, *place, *site), [*map(_bytes, leaves)]))

    def take(self) -> list[Record]:
        """Return what was recorded, in the order of keys, and forget it."""
        found = sorted((r for records in self._places.values() for r in records), key=lambda r: [*map(_sortable, r[0])])
        self._places.clear()
        return found

    def of_flight(self) -> Log:
        """Return a log for a mean on its way: what it records belongs to the step in which it lands."""
        other = Log(reads=self.reads, prefix=FLIGHT)
        other._unread = self._unread
        return other

    def land(self, other: Log) -> None:
        """Take over what a mean has recorded on its way."""
        self._places.update({(*other.prefix, *place): records for place, records in other._places.items()})

    def fill(self, records: Iterable[Record]) -> None:
        """Take what a step replays. What landed early on the recorded ranks may land, and be asked for, later here."""
        for key in [*self._unread]:
            if key[:1] != FLIGHT:
                del self._unread[key]
        self._unread.update(records)

    def read(self, key: Key, like: Tree) -> Tree:
        """Return a tree like another one, with the numbers of a record."""
        forms, structure = tree.flatten(like)
        key = (*self.prefix, *key)
        found, sizes = self._unread.pop(key, None), [x.numel() * x.element_size() for x in forms]
        if found is None or [x.numel() for x in found] != sizes:
            got = "none" if found is None else f"{[x.numel() for x in found]}"
            wanted = f"a record {key!r} of {sizes} bytes"
            raise ValueError(expected("source", wanted, got, SAME_RUN))
        return tree.unflatten(structure, [_tensor(leaf, form) for leaf, form in zip(found, forms, strict=True)])

    def check_read(self) -> None:
        """Refuse a step that did not ask for all that was recorded of it. Raises: ValueError."""
        left = [key for key in self._unread if key[:1] != FLIGHT]
        if left:
            got = f"{len(left)} more, such as {left[0]!r}"
            raise ValueError(expected("source", "the records that the step asks for", got, SAME_RUN))


SAME_RUN = "take the same steps as the recorded run, with the same model, make, schedule and axes"


def _sortable(part: str | int) -> tuple[bool, int, str]:
    return (False, part, "") if isinstance(part, int) else (True, 0, part)


def _bytes(x: Tensor) -> Tensor:
    # A copy in any case, in memory that comes back once it is written: (...) -> (n,) -> (bytes,)
    copy = memory_pool.empty(x.shape, x.dtype, torch.device("cpu")).copy_(x.detach())
    return copy.view(-1).view(torch.uint8)


def _tensor(leaf: Tensor, form: Tensor) -> Tensor:
    out = memory_pool.empty(form.shape, form.dtype, form.device)
    # As bytes: a leaf out of a file may begin where no float may.
    out.view(-1).view(torch.uint8).copy_(leaf)
    return out


class _Place:
    """Where in a step this thread is. axes: those over which a result must be alike; of one rank each they are not."""

    def __init__(self, log: Log, key: Key, axes: Collection[str]):
        self.log, self.key, self.axes = log, key, axes
        self.averaged = set[str]()  # over which something was alike before
        self.counts: dict[str, count[int]] = {}


class _Here(threading.local):
    """log: that of this thread. place: where results are recorded, or replayed; None for nowhere."""

    log: Log | None = None
    place: _Place | None = None


_here = _Here()


def shared(kind: str, axis: AxisNames, like: Callable[[], Tree], make: Callable[[], Tree]) -> Tree:
    """Return what `make` returns, or what it returned on the ranks that are followed.

    Args: kind: what it is, whatever carries it. axis: over which the result is alike on all ranks. like: returns a tree
        of the result's shapes, dtypes and devices.
    Raises: RuntimeError for traced code and simulated ranks while somebody follows; ValueError where the log has
        another result.
    """
    place = _here.place
    if place is None:
        return make()
    over = axes.names(axis)
    if axes.axis_size(over) == 1:
        return make()
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        what = "simulated ranks" if axes.is_simulated(over) else "code that torch.compile or torch.func traces"
        cure = "publish(..., what='params') of fn.adapters.follow takes what is compiled"
        raise RuntimeError(expected("step", "real ranks and eager code, to be recorded or replayed", what, cure))
    # A mean over one axis and then over another one is alike on both. What is alike on fewer is not for a follower.
    place.averaged.update(over)
    if any(name not in place.averaged and axes.axis_size(name) > 1 for name in place.axes):
        return make()
    site: Key = kind, next(place.counts.setdefault(kind, count()))
    if place.log.reads:
        return place.log.read((*place.key, *site), like())
    with _within(None):  # of what is nested only the outermost result counts
        made = make()
    place.log.write(place.key, site, tree.leaves(made))
    return made


_NOWHERE: AbstractContextManager[None] = nullcontext()


def unheard(make: Callable[[], tuple[Tree, Kept]], kept: Kept) -> tuple[Tree, Kept]:
    """Return the codes that this rank sends, and what it keeps of them.

    In a replay nobody hears them. Then those of the first step stand for all later ones, and what is kept stays.

    Args: make: returns both. kept: by now.
    """
    place = _here.place
    if place is None or not place.log.reads:
        return make()
    key: Key = *place.key, next(place.counts.setdefault("unheard", count()))
    if key not in place.log.unheard:
        place.log.unheard[key] = make()[0]
    return place.log.unheard[key], kept


def at(log: Log | None, key: Key, axes: Callable[[], Collection[str]]) -> AbstractContextManager[None]:
    """Return a context in which results that are alike belong to a place of this thread's log, or else of another one.

    Args: log: None for none. axes: returns those over which the ranks agree on this place's results.
    """
    log = _here.log or log
    if log is None:
        return _NOWHERE
    log.open(key)
    return _within(_Place(log, key, axes()))


def aside() -> AbstractContextManager[None]:
    """Record nothing in this context but at the places that are named in it: headers and probes belong to no step."""
    return _NOWHERE if _here.place is None else _within(None)


@contextmanager
def _within(place: _Place | None) -> Iterator[None]:
    before, _here.place = _here.place, place
    try:
        yield
    finally:
        _here.place = before


def flight(log: Log | None, job: Job, begin: Callable[[Job], Job]) -> Job:
    """Begin a job whose results belong to the step in which it lands; return what lands it.

    Args: log: as for `at`. begin: begins it, such as on a thread, and returns what waits for its result. Where it is
        replayed it begins when it lands: until then the log does not have what it reads.
    """
    log = _here.log or log
    if log is None:
        return begin(job)
    own, bound = log.of_flight(), current_binding()

    def followed() -> Any:
        before, _here.log, _here.place = (_here.log, _here.place), own, None
        try:
            return job()
        finally:
            _here.log, _here.place = before

    if log.reads:

        def replay() -> Any:
            with bound:
                return followed()

        return replay
    wait = begin(followed)

    def land() -> Any:
        result = wait()
        log.land(own)
        return result

    return land


class _Entries(Binding):
    """A binding each of whose entries is a step of a log. begin, end: called with the number of the step."""

    def __init__(
        self, axes: Mapping[str, Axis], log: Log, begin: Callable[[int], None], end: Callable[[int], None]
    ) -> None:
        super().__init__(axes)
        self.step = 0
        self._log, self._begin, self._end = log, begin, end
        self._before: list[tuple[Log | None, _Place | None]] = []  # one for each time that it is entered and not left

    def __enter__(self) -> _Entries:
        if not self._before:
            self._begin(self.step)
            self._place = _Place(self._log, (), self.axes)
        self._before.append((_here.log, _here.place))
        _here.log, _here.place = self._log, self._place
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        _here.log, _here.place = self._before.pop()
        if not self._before and kind is None:  # what raises is no step: the next entry takes its number
            self._end(self.step)
            self.step += 1


def recorded(binding: Binding, sink: Callable[[int, list[Record]], Any]) -> Binding:
    """Return a binding that records what all ranks get alike: each time that it is entered and left is a step.

    Take it where a follower, an audit or a replay is to have the params of this run without being a rank of it: see
    `replayed`. One rank records, mostly the first; the others enter the binding as it is.

    >>> import torch, fn
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    >>> steps = []
    >>> binding = fn.recorded(fn.bind({"data": dist.group.WORLD}), lambda step, records: steps.append(records))
    >>> for _ in range(2):
    ...     with binding:
    ...         mean = fn.pmean(torch.ones(2), "data")
    >>> steps                                   # among several ranks each has one record, of 8 bytes
    [[], []]
    >>> dist.destroy_process_group()

    Args:
        binding: what `fn.bind` returned.
        sink: (step, records) -> anything, called when an entry ends without an exception. A record is a key and the
            leaves of one result, as vectors of bytes in memory of their own.
    Returns: a context manager; entries of the same one inside of it are the same step.
    Raises: TypeError if the binding is none, or sink is no function. In an entry RuntimeError for `torch.compile` and
        `fn.simulate`, which have no results to keep.

    Recorded is what is alike over all axes of the binding that have several ranks; results of fewer axes are not.
    """
    check_kind("binding", binding, Binding, "what fn.bind returns")
    _check_callable("sink", sink)
    log = Log()
    # Begun with nothing: what an entry that raised has recorded is of no step. What landed in between stays.
    return _Entries(binding.axes, log, lambda step: log.open(()), lambda step: sink(step, log.take()))


def replayed(axes: Mapping[str, int], source: Callable[[int], Iterable[Record]]) -> Binding:
    """Return a binding in which nothing is sent: what all ranks get alike comes from a log, in a process of its own.

    The same steps inside it, with any gradients, leave the params that the recorded ranks had:

    >>> import torch, fn
    >>> log = [[(("sum", 0), [torch.tensor([3.0, 5.0]).view(torch.uint8)])]]                # what two ranks recorded
    >>> with fn.replayed({"data": 2}, lambda step: log[step]):
    ...     print(fn.pmean(torch.zeros(2), "data"))
    tensor([1.5000, 2.5000])

    Args:
        axes: name of an axis -> its number of ranks in the run that was recorded. This process counts as rank 0.
        source: step -> the records that `recorded` handed to its sink.
    Returns: a context manager; as for `recorded` an entry is a step.
    Raises: TypeError or ValueError for axes that are none. In an entry ValueError for a step that asks for other
        records than those of the log, RuntimeError for `torch.compile` and `fn.simulate`.

    What ranks tell each other besides, such as what differs between them, is here as if all said what this one says.
    """
    check_kind("axes", axes, Mapping, "a mapping from names of axes to numbers of ranks, such as {'data': 2}")
    _check_callable("source", source)
    log = Log(reads=True)
    return _Entries(echoing(axes).axes, log, lambda step: log.fill(source(step)), lambda step: log.check_read())


def _check_callable(name: str, f: Any) -> None:
    if not callable(f):
        raise TypeError(expected(name, "a function", type(f).__name__))


_numbers = count()
REPLAYED = "replayed "
"""What the names of the transports of `replayed` begin with."""


def is_replayed(axis: AxisNames) -> bool:
    """Tell whether the ranks of an axis, or of one of several, are those of a log."""
    return any(axes.resolve(name).transport.startswith(REPLAYED) for name in axes.names(axis))


def echoing(sizes: Mapping[str, int]) -> Binding:
    """Return a binding of so many ranks each. This is the first, and the others say what it says."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise ValueError(expected("axes", f"a number of ranks of {name!r}, at least 1", f"{size!r}"))
    # Names of its own: threads that follow two runs do not wait for each other's messages.
    names = {name: f"{REPLAYED}{name} {next(_numbers)}" for name in sizes}
    return Binding(
        {
            name: Axis(size, torch.tensor(0, dtype=torch.int64, device="cpu"), register(names[name], _echo(size)))
            for name, size in sizes.items()
        }
    )


def _echo(size: int) -> Transport:
    def gather(x: Tensor) -> Tensor:
        return x.expand(size, *x.shape).contiguous()

    return Transport(torch.clone, gather, lambda x: x * size)
