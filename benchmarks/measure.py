"""What the benchmarks share: interleaved timing, what figures depend on, tables, and a malloc that keeps its pages."""

from __future__ import annotations

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
STARTED = time.monotonic()

KEEP_PAGES = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 62), "MALLOC_TOP_PAD_": str(1 << 26)}
"""glibc: large blocks come from the heap, and the heap is never given back."""


def interleaved(
    contenders: Mapping[str, Callable[[], Any]],
    rounds: int,
    before: Callable[[], Any] = lambda: None,
    device: torch.device | None = None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Time each contender once a round, after two rounds that are not counted.

    Args: device: what is waited for before a clock is read; None: nothing runs beside the host.
    Returns: medians in seconds, of the time that passed and of this process' processor time. Where other work shares
    the cores, only the second says what a contender costs.
    """
    clocks = (time.perf_counter, time.process_time)
    times: list[dict[str, list[float]]] = [{name: [] for name in contenders} for _ in clocks]
    for k in range(rounds + 2):
        for name, run in contenders.items():
            before()
            synchronise(device)
            starts = [clock() for clock in clocks]
            run()
            synchronise(device)
            for found, clock, start in zip(times, clocks, starts, strict=True):
                found[name] += [clock() - start] * (k >= 2)
    passed, spent = ({name: statistics.median(t) for name, t in found.items()} for found in times)
    return passed, spent


def synchronise(device: torch.device | None) -> None:
    """Wait until a device has done all that was queued; a host has nothing to wait for."""
    if device is not None and device.type != "cpu":
        torch.accelerator.synchronize(device)


def on_device(
    contenders: Mapping[str, Callable[[], Any]], rounds: int, device: torch.device, flush: int = 1 << 28
) -> dict[str, float]:
    """Return medians in seconds of contenders that take turns, by the device's own events, two rounds not counted.

    Args: flush: bytes that are written before each, so that nobody finds what another one left in the cache.
    """
    if device.type == "cpu":
        return interleaved(contenders, rounds)[0]
    room = torch.empty(flush, dtype=torch.uint8, device=device)
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for k in range(rounds + 2):
        for name, run in contenders.items():
            room.zero_()
            start, end = (torch.Event(device=device, enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times[name] += [start.elapsed_time(end) / 1e3] * (k >= 2)
    return {name: statistics.median(found) for name, found in times.items()}


def machine() -> dict[str, Any]:
    """Return what a figure depends on."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        lines = dict(line.split(":", 1) for line in info.read_text().split("\n\n")[0].splitlines() if ":" in line)
        found = {k.strip(): v.strip() for k, v in lines.items()}
        cpu = f"{found.get('model name', cpu)} (family {found.get('cpu family')}, model {found.get('model')})"
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def commit(name: str = "HEAD") -> str:
    """Return the short name of a commit; of the one that is checked out it says whether a Python file was changed."""
    git = partial(subprocess.check_output, cwd=ROOT, text=True)
    short = git(["git", "rev-parse", "--short", name]).strip()
    changed = name == "HEAD" and git(["git", "status", "--porcelain", "--untracked-files=no", "--", "*.py"])
    return f"{short} with changes" if changed else short


def about() -> dict[str, Any]:
    """Return what a figure depends on: the machine, the commit, and the command that measured it, with its minutes."""
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    as_file = len(script.parts) == 2 and "-m" not in sys.orig_argv
    name = [str(script)] if as_file else ["-m", ".".join(script.with_suffix("").parts)]
    command = shlex.join(["python", *name, *sys.argv[1:]])
    minutes = round((time.monotonic() - STARTED) / 60, 1)
    return {**machine(), "commit": commit(), "command": command, "minutes": minutes}


def measured_on(abouts: Iterable[Mapping[str, Any]]) -> str:
    """Return as Markdown which machines and commits measured the parts of a result, each with their number."""
    named = "commit {commit}; {cpu}, {cores} cores; torch {torch}, Python {python}"
    facts = Counter(named.format(**about) for about in abouts)
    return "; ".join(f"*{count} points: {fact}*" for fact, count in facts.items())


def with_both_mallocs(module: str, arguments: list[str]) -> dict[str, Any]:
    """Run a module with --child under the default malloc and under one that keeps its pages; return what it prints."""
    found = {}
    for name, env in {"default": {}, "keeps pages": KEEP_PAGES}.items():
        command = [sys.executable, "-m", module, "--child", *arguments]
        done = subprocess.run(command, env={**os.environ, **env}, stdout=subprocess.PIPE, text=True, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
    return found


def markdown(head: str, rows: Iterable[Iterable[str]]) -> str:
    """Return a Markdown table. head: the names of its columns, between bars."""
    names = [name.strip() for name in head.strip("| ").split("|")]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (names, ["---"] * len(names), *rows))


def write(path: str | None, result: Any) -> None:
    """Write a result as JSON, if a path is given."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(json.dumps(result, indent=1) + "\n")
