"""The table as text and as HTML: device x op -> who provides it."""

from __future__ import annotations

import html
import textwrap
from collections.abc import Callable
from typing import NamedTuple

import torch

from fn.kernels.schemas import SCHEMAS
from fn.kernels.table import Cell, cells, refusals, registered_devices, rows

REFERENCE = "reference"
COLUMNS = 100
LEFT = 'style="text-align: left"'  # notebooks set cells to the right, as numbers


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


def table(progress: Callable[[str, int, int], None] | None = None) -> Table:
    """Return the accelerator table of this machine: the devices that are here, and those somebody registered.

    The kernels are tried on their known answers, as on their first use.

    Args: progress: is called with the name of an op before it is tried, how many were tried, and how many there are;
        with the last op once more at the end.
    """
    providers: dict[str, dict[str, str]] = {}
    known = [device for device in devices() if is_here(device)]
    pairs = [(device, op) for device in known for op in SCHEMAS]
    tried: dict[str, dict[str, tuple[Cell, ...]]] = {device: {} for device in known}
    for done, (device, op) in enumerate(pairs):
        if progress is not None:
            progress(op, done, len(pairs))
        tried[device][op] = cells(op, device)
    if progress is not None:
        progress(op, len(pairs), len(pairs))
    for device in devices():
        found = tried.get(device, {})
        claimed = {op: row.name for row in reversed(rows(device)) for op in row.kernels}
        providers[device] = {
            op: found[op][0].provider if found.get(op) else claimed.get(op, REFERENCE) if not found else REFERENCE
            for op in SCHEMAS
        }
    return Table(providers, tuple(_note(*key, reason) for key, reason in refusals().items()))


def devices() -> list[str]:
    """Return the device types of this machine, the CPU first, and those with a registered row."""
    here = torch.accelerator.current_accelerator()
    names = ["cpu", *([here.type] if here is not None else []), *registered_devices()]
    return list(dict.fromkeys(names))


def is_here(device_type: str) -> bool:
    """Return whether tensors can be put on a device of this type."""
    try:
        torch.empty(1, dtype=torch.float32, device=device_type)
    except Exception:
        return False
    return device_type != "meta"


def _note(device_type: str, provider: str, op: str, reason: str) -> str:
    return f"{device_type}: {provider}{' ' + op if op else ''} is not used: {reason}"
