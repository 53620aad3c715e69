"""A pytest plugin: one test for every kernel of a row.

    pytest -p fn.testing.pytest_plugin --fn-row my_package.kernels:row

The option may be repeated; it names a row, or a function that returns one. --fn-size chooses lengths of rows.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from fn.kernels.table import Accelerator, as_row
from fn.testing.kernels import SIZES, conformance


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --fn-row and --fn-size."""
    text = "module:attribute of a row of fn's accelerator table that is to be tested"
    group = parser.getgroup("fn")
    group.addoption("--fn-row", action="append", default=[], metavar="MODULE:ROW", help=text)
    group.addoption("--fn-size", action="append", type=int, metavar="N", help="length of rows, instead of all")


def pytest_collection_modifyitems(session: pytest.Session, config: pytest.Config, items: list[pytest.Item]) -> None:
    """Add the tests of the rows that were named."""
    sizes = tuple(config.getoption("--fn-size") or SIZES)
    for name in config.getoption("--fn-row"):
        row = _row(name)
        for op in row.kernels:
            items.append(Conformance.from_parent(session, name=f"{name}[{op}]", row=row, op=op, sizes=sizes))


def _row(name: str) -> Accelerator:
    module, _, attribute = name.partition(":")
    return as_row(getattr(import_module(module), attribute or "row"))


class Fault(Exception):
    """What a row does differently from the reference."""


class Conformance(pytest.Item):
    """The conformance of one kernel of a row."""

    def __init__(self, *, row: Accelerator, op: str, sizes: tuple[int, ...], **rest: Any) -> None:
        super().__init__(**rest)
        self.row, self.op, self.sizes = row, op, sizes

    def runtest(self) -> None:
        """Run the checks of the kernel."""
        report = conformance(self.row, ops=(self.op,), sizes=self.sizes)
        if not report:
            raise Fault(repr(report))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        """Show the report alone where that is the failure."""
        return str(excinfo.value) if isinstance(excinfo.value, Fault) else super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        """Return what pytest prints for the test."""
        return self.path, None, self.name
