"""`benchmarks/report.py`: every table of benchmarks/README.md that has a file is what the command writes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import report


def test_the_page_is_what_the_command_writes() -> None:
    page = report.PAGE.read_text()
    assert report.renewed(page) == page


def test_every_table_stands_on_the_page_once() -> None:
    named = [name for _, name, _ in report.BLOCK.findall(report.PAGE.read_text())]
    assert sorted(named) == sorted(name for name, _ in report.tables())


def test_a_table_that_somebody_changed_is_written_anew() -> None:
    page = report.PAGE.read_text()
    figure = "| adamw | float32 | 0.003 | 2.2512"
    assert figure in page
    assert report.renewed(page.replace(figure, "| adamw | float32 | 0.003 | 2.0000")) == page


def test_a_table_without_a_file_is_an_error() -> None:
    with pytest.raises(KeyError, match="guessed"):
        report.renewed("<!-- table: guessed -->\n\n| a |\n\n<!-- end -->")
