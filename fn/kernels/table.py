"""The accelerator table: which function runs which kernel on which device, and who brought it.

    device x op -> the first of: a registered row, an entry point's row, a row of this package, the reference

A row with only `pack_bits` and `unpack_bits` is complete, because the references of all other ops are written in
terms of these two. Every further kernel only makes a device faster. A kernel is believed when it gives the known
answers (`known_answers`), on its first use, never because something could be imported. A kernel may return
NotImplemented for arguments that it does not handle; then the next one is asked.
"""

from __future__ import annotations

import html
import logging
import textwrap
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn.arguments import checked
from fn.errors import expected
from fn.kernels import known_answers
from fn.kernels.flags import temporarily
from fn.kernels.reference import REFERENCES
from fn.kernels.schemas import ARGUMENTS, DECODING, ON_LISTS, SCHEMAS, WRITTEN

logger = logging.getLogger("fn")

Kernel = Callable[..., Any]

GROUP = "fn.accelerators"
"""The entry-point group; an entry point is named after its device type and is a row, or a function returning one."""

BUILT_IN: Mapping[str, Mapping[str, str]] = {
    "cpu": {"numba": "fn.kernels.cpu.numba:row", "numpy": "fn.kernels.bits:numpy", "torch": "fn.kernels.foreach:row"},
    "cuda": {
        "triton": "fn.kernels.gpu.triton:row", "cupy": "fn.kernels.bits:cupy", "torch": "fn.kernels.foreach:row",
    },
    "xpu": {"triton": "fn.kernels.gpu.triton:row", "torch": "fn.kernels.foreach:row"},
    "npu": {"torch_npu": "fn.kernels.bits:npu", "torch": "fn.kernels.foreach:row"},
}  # fmt: skip
"""The rows of this package by device type and provider, the fastest first: functions of the device type."""

REFERENCE = "reference"
COLUMNS = 100
LEFT = 'style="text-align: left"'  # notebooks set cells to the right, as numbers
HALVES = (torch.float16, torch.bfloat16)


class Accelerator(NamedTuple):
    """A row of the table: what one kind of device brings.

    >>> import fn
    >>> row = fn.kernels.Accelerator("cpu", {"pack_bits": fn.kernels.reference.codes.pack_bits}, provider="mine")
    >>> row.name, row.device_type, sorted(row.kernels)
    ('mine', 'cpu', ['pack_bits'])

    device_type: torch's name of the device type ("cpu", "cuda", "npu", ...).
    kernels: kernel name -> function with the signature and the meaning of the reference of that name.
    communication_backend: the backend of its process groups. None: torch's default for the device.
    compressed_transport: the backend that carries its codes. None: the communication backend.
    provider: what the table calls the row. "": the package that its kernels come from.
    """

    device_type: str
    kernels: Mapping[str, Kernel]
    communication_backend: str | None = None
    compressed_transport: str | None = None
    provider: str = ""

    @property
    def name(self) -> str:
        """Return the provider, or the top-level package of the kernels."""
        modules = [getattr(k, "__module__", None) or "unknown" for k in self.kernels.values()]
        return self.provider or (modules[0].split(".")[0] if modules else "nothing")


class Cell(NamedTuple):
    """One kernel of one row: who brings it, and the function."""

    provider: str
    kernel: Kernel


class _Thread(threading.local):
    only_references = False
    agreed = False


_lock = threading.RLock()
_registered: dict[str, list[Accelerator]] = {}  # device type -> rows, the newest first
_loaded: dict[str, list[Accelerator]] = {}  # rows of entry points and of this package
_refused: dict[tuple[str, str, str], str] = {}  # (device type, provider, op or "") -> reason
_accepted: dict[tuple[str, str], tuple[Cell, ...]] = {}
_thread = _Thread()
_asked: set[tuple[str, str]] = set()  # (op, device type) whose kernels are asked for known answers now


# rows


def register(row: Accelerator) -> None:
    """Put a row in front of the table; ops that it does not bring stay with the rows behind it.

    >>> import fn
    >>> row = fn.kernels.Accelerator("cpu", {"pack_bits": fn.kernels.reference.codes.pack_bits}, provider="mine")
    >>> fn.kernels.register(row)
    >>> fn.kernels.table().providers["cpu"]["pack_bits"]
    'mine'
    >>> fn.kernels.unregister(row)
    >>> fn.kernels.table().providers["cpu"]["pack_bits"] == "mine"
    False

    Raises: TypeError if row is not an Accelerator or its kernels no mapping; ValueError if a kernel's name is not in
        the table, or the device type no name of one, as "cuda:0" is none.
    """
    check_row(row)
    with _lock:
        _registered.setdefault(row.device_type, []).insert(0, row)
        _forget(row.device_type)


@checked("row")
def unregister(row: Accelerator) -> None:
    """Take a registered row out again. Raises: ValueError if it is not there."""
    with _lock:
        if row not in _registered.get(row.device_type, []):
            got = f"{row.name!r} for {row.device_type!r}, which is not registered"
            raise ValueError(expected("row", "one that register was given", got))
        _registered[row.device_type].remove(row)
        _forget(row.device_type)


def check_row(row: Accelerator) -> None:
    """Refuse what is not a row. Raises: as `register`."""
    if not isinstance(row, Accelerator):
        raise TypeError(expected("row", "an fn.kernels.Accelerator", type(row).__name__))
    if not isinstance(row.device_type, str) or ":" in row.device_type:
        raise ValueError(expected("device_type", "the name of a device type, such as 'cuda'", f"{row.device_type!r}"))
    if not isinstance(row.kernels, Mapping):
        raise TypeError(expected("kernels", "a mapping from names to functions", type(row.kernels).__name__))
    unknown = sorted(set(row.kernels) - set(SCHEMAS))
    if unknown:
        raise ValueError(expected("kernels", f"names in the table, {sorted(SCHEMAS)}", f"{unknown}"))


def rows(device_type: str) -> list[Accelerator]:
    """Return all rows of a device, in the order in which they are asked."""
    with _lock:
        if device_type not in _loaded:
            _loaded[device_type] = []  # a row whose loading uses a kernel finds the reference
            # Rows of others come first: who installs one wants it used.
            _loaded[device_type] = [*_plugged_in(device_type), *_built_in(device_type)]
            _forget(device_type)
        return [*_registered.get(device_type, []), *_loaded[device_type]]


def _forget(device_type: str) -> None:
    for key in [key for key in _accepted if key[1] == device_type]:
        del _accepted[key]


def _plugged_in(device_type: str) -> Iterator[Accelerator]:
    for point in entry_points(group=GROUP, name=device_type):
        try:
            yield _row_of(point)
        except Exception as error:
            _refuse(device_type, point.value, "", error)


def as_row(target: Any) -> Accelerator:
    """Return a row, which `target` is, or returns as a function. Raises: as `register`."""
    row: Accelerator = target if isinstance(target, Accelerator) else target()
    check_row(row)
    return row


def _row_of(point: EntryPoint) -> Accelerator:
    row = as_row(point.load())
    if row.device_type != point.name:
        raise ValueError(f"device_type: is {row.device_type!r}, but the entry point is named {point.name!r}")
    return row if row.provider else row._replace(provider=point.value.partition(":")[0])


def _built_in(device_type: str) -> Iterator[Accelerator]:
    for provider, function in BUILT_IN.get(device_type, {}).items():
        module, _, name = function.partition(":")
        try:
            yield getattr(import_module(module), name)(device_type)
        except ImportError as error:  # an extra that is not installed is no fault
            _refused[device_type, provider, ""] = str(error)
        except Exception as error:
            _refuse(device_type, provider, "", error)


def _refuse(device_type: str, provider: str, op: str, error: object) -> None:
    reason = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)
    _refused[device_type, provider, op] = reason
    what = f"kernel {op!r} of {provider!r}" if op else f"the row of {provider!r}"
    warnings.warn(f"{what} for {device_type!r} is not used ({reason}); what comes next in the table runs", stacklevel=2)


def refusals() -> dict[tuple[str, str, str], str]:
    """Return why rows and kernels are not used: (device type, provider, op or "") -> reason."""
    return dict(_refused)


# cells


def cells(op: str, device_type: str) -> tuple[Cell, ...]:
    """Return the accepted kernels of an op on a device, in the order in which they are asked."""
    if _thread.only_references or (_thread.agreed and op in DECODING):
        return ()
    accepted = _accepted.get((op, device_type))
    return accepted if accepted is not None else _accept(op, device_type)


def direct(name: str, *args: Any) -> Any:
    """Run a kernel without the dispatcher, which takes time for every tensor of a list, and without the checks.

    Args: name: of the op. args: its own; tensors that hold numbers now (`tracing.is_concrete`), without grad mode,
        checked by the caller.
    """
    for cell in cells(name, device_of(args).type):
        results = cell.kernel(*args)
        if results is not NotImplemented:
            for position in WRITTEN[name]:  # so that autograd refuses a backward pass through what was overwritten
                torch.autograd.graph.increment_version(args[position])
            return results
    return REFERENCES[name](*args)


def device_of(args: Sequence[Any]) -> torch.device:
    """Return the device of the first tensor of the arguments."""
    for value in args:
        for tensor in value if isinstance(value, list | tuple) else (value,):
            if isinstance(tensor, Tensor):
                return tensor.device
    return torch.device("cpu")


def only_references() -> AbstractContextManager[bool]:
    """In this context the references run in this thread, so that no kernel is compiled and asked for known answers."""
    return temporarily(_thread, "only_references", True)


def agreed_row(on: bool = True) -> AbstractContextManager[bool]:
    """In this context every machine computes the same bits from the same codes, in this thread.

    What decodes is the reference, and rules of lists are sums, products, quotients and roots of single tensors, rounded
    once each, as IEEE 754 has it: `lerp`, `addcmul` and `add(alpha=)` of torch round otherwise from CPU to CPU. What
    encodes keeps its kernels, for its sums are the sender's own.
    """
    return temporarily(_thread, "agreed", on)


def is_agreed() -> bool:
    """Return whether `agreed_row` is in force in this thread."""
    return _thread.agreed


def _accept(op: str, device_type: str) -> tuple[Cell, ...]:
    key = op, device_type
    with _lock:  # a thread that comes second must not go on with the reference: its rank would round otherwise
        if key in _accepted:
            return _accepted[key]
        # A kernel's known answers may need the op themselves: without this they would be asked without end.
        if key in _asked:
            return ()  # the reference, for what the kernels that are asked need themselves
        _asked.add(key)
        try:
            _accepted[key] = tuple(_believed(op, device_type))
        finally:
            _asked.remove(key)
        return _accepted[key]


def _believed(op: str, device_type: str) -> Iterator[Cell]:
    for row in rows(device_type):
        if op not in row.kernels:
            continue
        # Asked on the device itself: a kernel that is right elsewhere may be compiled wrongly here.
        reason = known_answers.complaint(op, row.kernels[op], torch.device(device_type))
        if reason is None:
            yield Cell(row.name, row.kernels[op])
        else:
            _refuse(device_type, row.name, op, reason)


def warm_kernels(groups: Iterable[Mapping[str, Any]], compress: bool) -> None:
    """Have the kernels of an accelerator compiled now, at construction, where steps in codes come later.

    The first step of the compressed phase would otherwise wait for a compiler in the middle of a run.

    Args: groups: param groups. compress: whether there will be codes.
    """
    dtypes: dict[torch.device, set[torch.dtype]] = {}
    for p in (p for group in groups for p in group["params"]):
        dtypes.setdefault(p.device, set()).add(p.dtype)
    for device, kinds in dtypes.items() if compress else ():
        if device.type != "cpu":
            logger.info("kernels for %r are compiled, unless they are kept from before", device.type)
            with torch.accelerator.device_index(device.index or 0):
                warm(SCHEMAS, device.type)
                warm_halves(ON_LISTS, device, kinds)


def warm(ops: Iterable[str], device_type: str) -> None:
    """Have the kernels of ops compiled and asked for known answers now, and not in the first step that needs them."""
    for op in ops:
        cells(op, device_type)


def warm_halves(ops: Iterable[str], device: torch.device, dtypes: Iterable[torch.dtype]) -> None:
    """Run the kernels of ops on examples whose params are of each of `dtypes`, as far as these are half precision.

    Known answers are asked in float32. A kernel on lists of tensors is compiled once more where params or gradients are
    in half precision, which would take seconds in the middle of a run. What it returns here is not looked at: the
    arithmetic is that of float32, which was.
    """
    kinds = [dtype for dtype in HALVES if dtype in {*dtypes}]
    for op in ops:
        for args in [args for dtype in kinds for args in _in_halves(op, dtype)]:
            for cell in cells(op, device.type):
                try:
                    # The first kernel that takes them is the one that a step will run: the others need no compiling.
                    if known_answers.outcome(op, cell.kernel, args, device) is not NotImplemented:
                        break
                except Exception as error:  # a step that needs it raises it again
                    logger.warning("kernel %r of %r fails in half precision: %s", op, cell.provider, error)


def _in_halves(op: str, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Yield the examples of an op with params or gradients in half precision; none for an op that takes neither.

    Gradients are of the dtype of params, and of float32, as they come out of a mean.
    """
    for args in known_answers.examples(op):
        named = dict(zip(ARGUMENTS[op], args, strict=True))
        written = {"copies"} if named.get("copies") else {"params"}  # what is copied is an anchor, in float32
        for cast in (written, {*written, "grads"}) if "grads" in named else (written,):
            if cast & {*named}:
                yield tuple([t.to(dtype) for t in x] if name in cast else x for name, x in named.items())


# the table as text and as HTML


class Table(NamedTuple):
    """Who provides which kernel where. It prints in a terminal and as HTML in a notebook.

    providers: device type -> op -> provider. notes: what is not used, and why.
    """

    providers: dict[str, dict[str, str]]
    notes: tuple[str, ...]

    def __repr__(self) -> str:
        devices = list(self.providers)
        lines = [["kernel", *devices], *([op, *(self.providers[d][op] for d in devices)] for op in SCHEMAS)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        notes = [textwrap.fill(note, COLUMNS, subsequent_indent="  ") for note in self.notes]
        return "\n".join([text[0], "-" * len(text[0]), *text[1:], *notes])

    def _repr_html_(self) -> str:
        def line(tag: str, entries: list[str]) -> str:
            return "<tr>" + "".join(f"<{tag} {LEFT}>{html.escape(e)}</{tag}>" for e in entries) + "</tr>"

        body = [line("td", [op, *(ops[op] for ops in self.providers.values())]) for op in SCHEMAS]
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self.notes)
        return f"<table>{line('th', ['kernel', *self.providers])}{''.join(body)}</table>{notes}"


@checked("progress")
def table(progress: Callable[[str, int, int], None] | None = None) -> Table:
    """Return the accelerator table of this machine: the devices that are here, and those somebody registered.

    The kernels are tried on their known answers, as on their first use.

    >>> import fn
    >>> who = fn.kernels.table().providers["cpu"]
    >>> len(who), who["adamw_"] in ("numba", "torch")
    (25, True)

    Args: progress: is called with the name of an op before it is tried, how many were tried, and how many there are;
        with the last op once more at the end.
    """
    here = [device for device in devices() if is_here(device)]
    pairs = [(device, op) for device in here for op in SCHEMAS]
    accepted: dict[tuple[str, str], tuple[Cell, ...]] = {}
    for done, (device, op) in enumerate(pairs):
        if progress is not None:
            progress(op, done, len(pairs))
        accepted[device, op] = cells(op, device)
    if progress is not None:
        progress(op, len(pairs), len(pairs))
    providers: dict[str, dict[str, str]] = {}
    for device in devices():  # of a device that is not here the table shows what its rows claim
        # Reversed: the row that is asked first is written last.
        claimed = {} if device in here else {op: row.name for row in reversed(rows(device)) for op in row.kernels}
        tried = {op: kernels[0].provider for op in SCHEMAS if (kernels := accepted.get((device, op)))}
        providers[device] = {op: tried.get(op, claimed.get(op, REFERENCE)) for op in SCHEMAS}
    notes = ((device, " ".join(filter(None, (who, op))), reason) for (device, who, op), reason in refusals().items())
    return Table(providers, tuple(f"{device}: {what} is not used: {reason}" for device, what, reason in notes))


def devices() -> list[str]:
    """Return the device types of this machine, the CPU first, and those with a registered row or an entry point."""
    here = torch.accelerator.current_accelerator()
    registered = {*(d for d, rows in _registered.items() if rows), *(p.name for p in entry_points(group=GROUP))}
    return list(dict.fromkeys(["cpu", *([here.type] if here is not None else []), *sorted(registered)]))


def is_here(device_type: str) -> bool:
    """Return whether tensors can be put on a device of this type."""
    try:
        torch.empty(1, dtype=torch.float32, device=device_type)
    except Exception:
        return False
    return device_type != "meta"
