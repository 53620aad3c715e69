"""The accelerator table: which function runs which kernel on which device.

    device x op -> the first of: a registered row, an entry point's row, a row of this package, the reference

A row with only `pack_bits` and `unpack_bits` is complete, because the references of all other ops are written in
terms of these two. Every further cell only makes a device faster. A cell is believed when it gives the known answer
(`known_answers`), on its first use, never because something could be imported. A cell may return NotImplemented for
arguments that it does not handle; then the next one is asked.

    >>> import fn
    >>> fn.kernels.register(fn.kernels.Accelerator("npu", {"pack_bits": pack, "unpack_bits": unpack}))  # doctest: +SKIP
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NamedTuple

import torch

from fn.errors import expected
from fn.kernels.schemas import SCHEMAS

Kernel = Callable[..., Any]

GROUP = "fn.accelerators"
"""The entry-point group; an entry point is named after its device type and is a row, or a function returning one."""

BUILT_IN: Mapping[str, tuple[str, ...]] = {
    "cpu": ("fn.kernels.cpu.numba", "fn.kernels.numpy_bits", "fn.kernels.eager.foreach"),
    "cuda": ("fn.kernels.gpu.triton", "fn.kernels.gpu.cupy", "fn.kernels.eager.foreach"),
    "xpu": ("fn.kernels.gpu.triton", "fn.kernels.xpu", "fn.kernels.eager.foreach"),
    "npu": ("fn.kernels.npu", "fn.kernels.eager.foreach"),
}
"""The rows of this package by device type, the fastest first. Each module has a function `row(device_type)`."""


class Accelerator(NamedTuple):
    """A row of the table: what one kind of device brings.

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


_lock = threading.RLock()
_registered: dict[str, list[Accelerator]] = {}  # device type -> rows, the newest first
_loaded: dict[str, list[Accelerator]] = {}  # rows of entry points and of this package
_refused: dict[tuple[str, str, str], str] = {}  # (device type, provider, op or "") -> reason
_accepted: dict[tuple[str, str], tuple[Cell, ...]] = {}
_asked: set[tuple[str, str]] = set()  # (op, device type) whose kernels are asked for known answers now


def register(row: Accelerator) -> None:
    """Put a row in front of the table; ops that it does not bring stay with the rows behind it.

    Raises: TypeError if row is not an Accelerator or its kernels no mapping; ValueError if a kernel's name is not in
        the table, or the device type no name of one, as "cuda:0" is none.
    """
    check_row(row)
    with _lock:
        _registered.setdefault(row.device_type, []).insert(0, row)
        _forget(row.device_type)


def unregister(row: Accelerator) -> None:
    """Take a registered row out again. Raises: ValueError if it is not there."""
    with _lock:
        if row not in _registered.get(row.device_type, []):
            found = f"{row.name!r} for {row.device_type!r}, which is not registered"
            raise ValueError(expected("row", "one that register was given", found))
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


def _forget(device_type: str) -> None:
    for key in [key for key in _accepted if key[1] == device_type]:
        del _accepted[key]


def rows(device_type: str) -> list[Accelerator]:
    """Return all rows of a device, in the order in which they are asked."""
    with _lock:
        if device_type not in _loaded:
            _loaded[device_type] = []  # a row whose loading uses a kernel finds the reference
            _loaded[device_type] = [*_plugged_in(device_type), *_built_in(device_type)]
            _forget(device_type)
        return [*_registered.get(device_type, []), *_loaded[device_type]]


def _plugged_in(device_type: str) -> list[Accelerator]:
    found = []
    for point in entry_points(group=GROUP, name=device_type):
        try:
            found.append(_row_of(point))
        except Exception as error:
            _refuse(device_type, point.value, "", error)
    return found


def _row_of(point: EntryPoint) -> Accelerator:
    found: Any = point.load()
    row: Accelerator = found if isinstance(found, Accelerator) else found()
    check_row(row)
    if row.device_type != point.name:
        raise ValueError(f"device_type: is {row.device_type!r}, but the entry point is named {point.name!r}")
    return row if row.provider else row._replace(provider=point.value.partition(":")[0])


def _built_in(device_type: str) -> list[Accelerator]:
    found = []
    for module in BUILT_IN.get(device_type, ()):
        try:
            found.append(import_module(module).row(device_type))
        except ImportError as error:  # an extra that is not installed is no fault
            _refused[device_type, module.rpartition(".")[2], ""] = str(error)
        except Exception as error:
            _refuse(device_type, module.rpartition(".")[2], "", error)
    return found


def _refuse(device_type: str, provider: str, op: str, error: object) -> None:
    reason = f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else str(error)
    _refused[device_type, provider, op] = reason
    what = f"kernel {op!r} of {provider!r}" if op else f"the row of {provider!r}"
    warnings.warn(f"{what} for {device_type!r} is not used ({reason}); what comes next in the table runs", stacklevel=2)


def cells(op: str, device_type: str) -> tuple[Cell, ...]:
    """Return the accepted kernels of an op on a device, in the order in which they are asked."""
    found = _accepted.get((op, device_type))
    return found if found is not None else _accept(op, device_type)


def warm(ops: Iterable[str], device_type: str) -> None:
    """Have the kernels of ops compiled and asked for known answers now, and not in the first step that needs them."""
    for op in ops:
        cells(op, device_type)


def _accept(op: str, device_type: str) -> tuple[Cell, ...]:
    key = op, device_type
    with _lock:  # a thread that comes second must not go on with the reference: its rank would round otherwise
        if key in _accepted:
            return _accepted[key]
        if key in _asked:
            return ()  # the reference, for what the kernels that are asked need themselves
        _asked.add(key)
        try:
            _accepted[key] = tuple(_believed(op, device_type))
        finally:
            _asked.remove(key)
        return _accepted[key]


def _believed(op: str, device_type: str) -> Iterator[Cell]:
    from fn.kernels import known_answers  # it uses the ops, which use the table

    for row in rows(device_type):
        if op not in row.kernels:
            continue
        reason = known_answers.complaint(op, row.kernels[op], torch.device(device_type))
        if reason is None:
            yield Cell(row.name, row.kernels[op])
        else:
            _refuse(device_type, row.name, op, reason)


def registered_devices() -> list[str]:
    """Return the device types that somebody registered a row for, or has an entry point for."""
    return sorted({*(d for d, found in _registered.items() if found), *(p.name for p in entry_points(group=GROUP))})


def refusals() -> dict[tuple[str, str, str], str]:
    """Return why rows and cells are not used: (device type, provider, op or "") -> reason."""
    return dict(_refused)
