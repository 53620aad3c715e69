"""What `gpu.py` runs: checks in a process of their own, part by part; a fault is a row, and does not stop the rest."""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.rows import Checks, Options, Row, table
from benchmarks.measure import machine, write

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]
PARTS = ("alike", "overlap", "step", "sweep", "deep", "kernels", "methods", "cold", "curve")
SECONDS_OF_A_PART = 520.0
SECONDS_OF_A_CHECK = 240.0
MARK = "@gpu "
"""In front of the lines in which a child tells its parent what it does."""


def checks_of(part: str, options: Options) -> Checks:
    """Return the checks of a part, by name. part: one of `PARTS`, or a module that has checks."""
    found: Checks = importlib.import_module(f"benchmarks.gpu.{part}" if part in PARTS else part).checks(options)
    return found


def child(part: str, names: Sequence[str], options: Options) -> None:
    """Run checks and say what they found, line by line; end behind the first one that raises.

    A fault on a GPU leaves nothing that can be relied on in its process.
    """
    import torch

    if options.torch_device.type == "cpu":
        torch.set_num_threads(1)
    checks = checks_of(part, options)
    for name in names:
        tell(begin=name)
        try:
            rows = [*checks[name]()]
        except BaseException as error:
            note = f"{traceback.format_exc(limit=-6)}\n{type(error).__name__}: {error}"
            tell(end=name, rows=[Row(name, wanted="an answer", ok=False, note=note)._asdict()])
            sys.exit(3)
        tell(end=name, rows=[row._asdict() for row in rows])
        del rows
        gc.collect()
        if options.torch_device.type != "cpu":
            torch.get_device_module(options.torch_device).empty_cache()  # what this check held, the next one may need


def tell(**what: Any) -> None:
    """Say something to the parent."""
    print(MARK + json.dumps(what), flush=True)


def heard(command: list[str], until: float) -> Iterator[dict[str, Any]]:
    """Run a child and yield what it tells; kill it, with its own children, when a check or the part takes too long."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    timer: threading.Timer | None = None

    def restart(limit: float) -> None:
        nonlocal timer
        if timer is not None:
            timer.cancel()
        left = max(1.0, min(limit, until - time.monotonic()))
        timer = threading.Timer(left, lambda: os.killpg(process.pid, signal.SIGKILL))
        timer.daemon = True
        timer.start()

    try:
        restart(SECONDS_OF_A_PART)  # imports are no check
        for line in process.stdout:
            if line.startswith(MARK):
                restart(SECONDS_OF_A_CHECK)
                yield json.loads(line[len(MARK) :])
        yield {"code": process.wait()}
    finally:
        if timer is not None:
            timer.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def run_part(
    part: str, options: Options, keep: Callable[[list[dict[str, Any]]], None] = lambda rows: None
) -> list[dict[str, Any]]:
    """Run all checks of a part; return their rows. keep: is given those that there are, after every check."""
    names, found, begun = [*checks_of(part, options)], list[dict[str, Any]](), time.monotonic()
    until, total, pending = begun + SECONDS_OF_A_PART, len(names), list(names)

    def add(name: str, rows: list[dict[str, Any]], start: float) -> None:
        seconds = time.monotonic() - start
        found.extend({"part": part, "check": name, "seconds": seconds, **row} for row in rows)
        keep(found)
        bad = [row for row in rows if row["ok"] is False]
        word = f"{len(bad)} NOT met" if bad else "ok"
        progress(f"[{part} {total - len(pending)}/{total}] {name}: {word}, {seconds:.1f} s")
        for row in bad:
            progress(f"    {row['name']}: {row['value']} {row['wanted']} {row['note'].strip()[-400:]}")

    while pending:
        if time.monotonic() > until:
            note = f"not run: the part's {SECONDS_OF_A_PART:.0f} seconds are over"
            rest = [{"check": name, **Row(name, ok=False, note=note)._asdict()} for name in pending]
            found += [{"part": part, "seconds": 0.0, **row} for row in rest]
            progress(f"[{part}] {len(pending)} checks {note}")
            break
        running, start = "", time.monotonic()
        wanted = json.dumps([pending, options._asdict()])
        command = [sys.executable, "-m", "benchmarks.gpu.parts", part, "--child", wanted]
        for said in heard(command, until):
            if "begin" in said:
                running, start = said["begin"], time.monotonic()
            elif "end" in said:
                pending.remove(running)
                add(running, said["rows"], start)
                running = ""
            elif said["code"] and (running or said["code"] != 3):
                running = running or pending[0]  # it died before its first check
                pending.remove(running)
                note = f"the process ended with {said['code']}" + " (it took too long)" * (said["code"] == -9)
                add(running, [Row(running, wanted="an answer", ok=False, note=note)._asdict()], start)
    return found


def progress(text: str) -> None:
    """Say on stderr where the run stands."""
    print(text, file=sys.stderr, flush=True)


def options_of(arguments: argparse.Namespace) -> Options:
    """Return what the checks are told."""
    import torch

    device = arguments.device
    if device is None:
        here = torch.accelerator.current_accelerator(check_available=True)
        if here is None:
            sys.exit("gpu: there is no accelerator here; --device cpu --quick only tries the script itself")
        device = here.type
    given = {name: getattr(arguments, name) for name in ("elements", "layers", "width", "vocabulary", "rounds")}
    small = {"elements": 1 << 14, "layers": 24, "width": 8, "vocabulary": 32, "rounds": 2} if arguments.quick else {}
    chosen = {**small, **{name: value for name, value in given.items() if value is not None}}
    return Options(device=device, quick=arguments.quick, write=arguments.write, **chosen)


def about(options: Options) -> dict[str, Any]:
    """Return what the figures depend on."""
    import torch

    found = {**machine(), **options._asdict()}
    if options.torch_device.type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    return found


def main(description: str | None = None) -> None:
    """Run the parts, print the table, write the JSON; exit with 1 if something was not met."""
    sys.path[:0] = [folder for folder in FOLDERS if folder not in sys.path]  # where the checks are, and fn
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", metavar="PART", help=f"{', '.join(PARTS)} or all")
    parser.add_argument("--device", help="default: the accelerator")
    parser.add_argument("--quick", action="store_true", help="small sizes and few cases, to try the script itself")
    parser.add_argument("--elements", type=int, help="of the vectors of `kernels`; 2**28")
    parser.add_argument("--layers", type=int, help="of the model of `step`; 24, which makes 292 tensors")
    parser.add_argument("--width", type=int, help="of that model; 2048, which makes 1.3 billion parameters")
    parser.add_argument("--write", action="store_true", help="let `sweep` write the fastest launches into the table")
    parser.add_argument("--vocabulary", type=int, help="of that model; 50257")
    parser.add_argument("--rounds", type=int, help="of interleaved timing; 15")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        names, told = json.loads(arguments.child)
        child(arguments.part, names, Options(**told))
        return
    if arguments.part not in (*PARTS, "all"):
        parser.error(f"PART: expected one of {', '.join(PARTS)} or all, but got {arguments.part}")
    options = options_of(arguments)
    rows: list[dict[str, Any]] = []
    whereof = about(options)
    for part in PARTS if arguments.part == "all" else (arguments.part,):
        before = [*rows]

        def keep(found: list[dict[str, Any]], before: list[dict[str, Any]] = before) -> None:
            write(arguments.json, {"about": whereof, "rows": [*before, *found]})  # it stays, whatever comes next

        rows += run_part(part, options, keep)
        keep(rows[len(before) :])
    print(table(rows))
    failed = [row for row in rows if row["ok"] is False]
    print(f"\n{len(rows)} rows, {len(failed)} not met")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
