"""`python -m fn` and its subcommands, as somebody types them: a line that says what is wrong, never a traceback."""

from __future__ import annotations

import os
import re
import sys

import pytest
from ranks import python

import fn
from fn.__main__ import OPTIONAL, main
from fn.planner.recommend import PICKS

number = 7


def needs_more(lr, axis):
    return fn.onebit_adam(lr, axis=axis)


def returns_a_number():
    return 7


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("fn:onebit_adam", "add --axis data"),
        ("fn:scale_by_learning_rate", "lr"),
        (f"{__name__}:needs_more --axis data", "but got lr"),
        (f"{__name__}:returns_a_number --axis data", "leave the flag out"),
        (f"{__name__}:returns_a_number", "a transform"),
        (f"{__name__}:number", "to be a function"),
        ("fn", "module:function"),
        (":adamw", "module:function"),
        (".fn:adamw", "module:function"),
        ("no_such_module:adamw", "module:function"),
        ("fn:no_such_name", "module:function"),
    ],
)
def test_explain_refuses_a_bad_target_in_a_line(line, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["explain", *line.split()])
    text = capsys.readouterr().err
    assert "Traceback" not in text
    assert said in text.splitlines()[-1]


def test_explain_takes_what_needs_no_more_than_an_axis(capsys):
    main(["explain", "fn:onebit_adam", "--axis", "data"])
    assert capsys.readouterr().out.count("in place") == 2


@pytest.mark.parametrize("count", ["1e300", "1e19", "1e16"])
def test_a_count_that_no_machine_has_is_refused(count, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--params", count, "--world", "2", "--intra", "1gbit", "--compute", "1s"])
    assert f"argument --params: '{count}' is too large" in capsys.readouterr().err


def test_a_closed_output_is_no_error():
    """As a shell does with `>&-`: there is no sys.stdout then."""
    code = "import os, runpy, sys; os.close(1); sys.stdout = None; sys.argv = ['fn', 'plan', *sys.argv[1:]]; "
    flags = ["--params", "1e6", "--world", "2", "--intra", "1gbit", "--compute", "1s"]
    ended = python("-c", f"{code}runpy.run_module('fn', run_name='__main__')", *flags)
    assert (ended.returncode, ended.stderr) == (0, "")


NETWORK = ["--params", "1e6", "--world", "2", "--intra", "1gbit", "--compute", "1s"]


@pytest.mark.parametrize("value", ["1e-300bit", "1e-13bit", "1e300bit", "1e400bit"])
@pytest.mark.parametrize("flag", ["--memory", "--intra"])
def test_a_bandwidth_that_no_machine_has_is_refused_by_its_flag(flag, value, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["plan", *NETWORK, flag, value])
    assert f"argument {flag}: '{value}' is out of range" in capsys.readouterr().err


@pytest.mark.parametrize("memory", ["1e-12bit", "1e24bit"])
def test_the_ends_of_what_is_taken_overflow_nowhere(memory, capsys):
    huge = {"--params": "1e15", "--world": "1e12", "--intra": memory, "--intra-latency": "1e24s", "--compute": "1e-12s"}
    main(["plan", *(x for pair in huge.items() for x in pair), "--memory", memory, "--all"])
    assert "a step" in capsys.readouterr().out


@pytest.mark.parametrize("line", [[], ["table"], ["plan", *NETWORK], ["plan", "--help"], ["doctor"]])
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is full")
def test_on_a_full_disk_it_ends_with_a_line_and_fails(line):
    code = (
        "import os, runpy, sys; os.dup2(os.open('/dev/full', os.O_WRONLY), 1); "
        "sys.argv = ['fn', *sys.argv[1:]]; runpy.run_module('fn', run_name='__main__')"
    )
    ended = python("-c", code, *line)
    assert ended.returncode == 1
    assert ended.stderr == "python -m fn: error: output: [Errno 28] No space left on device\n"


def test_the_cure_for_what_is_missing_names_packages_that_a_registry_has():
    cures = [cure for _, cure in OPTIONAL.values()]
    assert not [cure for cure in cures if "fn-optim" in cure]
    assert all(re.fullmatch(r"pip install [\w-]+|see the vendor's instructions", cure) for cure in cures)


def test_alone_it_says_what_runs_here_what_to_take_and_what_to_try_next(capsys):
    main([])
    text = capsys.readouterr().out
    main(["table"])
    table = capsys.readouterr().out
    assert text.startswith(table.partition("cpu backend")[0])
    assert "python -m fn table" in text
    assert "sign_encode" in table
    assert all(f"  {pick.name}: {pick.when}\n      {pick.code}\n" in text for pick in PICKS)
    assert len(PICKS) == 5
    *_, line = text.strip().splitlines()
    main(line.split()[3:])  # the next command, as it is printed
    assert "same loss" in capsys.readouterr().out


def test_progress_is_shown_on_a_terminal_alone(capsys, monkeypatch):
    main(["table"])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    main(["table"])
    shown = capsys.readouterr().err
    assert "sign_encode (" in shown
    assert shown.rpartition("\r")[2].strip("\x1b[K ") == ""  # the line is cleared


def test_the_table_says_which_kernel_is_tried():
    told = []
    table = fn.kernels.table(lambda *said: told.append(said))
    assert {op for op, *_ in told} == {*table.providers["cpu"]}
    assert [done for _, done, _ in told] == list(range(len(told)))
