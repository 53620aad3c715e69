"""The demo's losses: runs a script of `examples/` on two ranks, and keeps its JSON with the machine and the commit.

    python -m benchmarks.steps.convergence train_lm --png docs/demo.png --json benchmarks/results/train_lm.json
    python -m benchmarks.steps.convergence train_fsdp --steps 500 --json benchmarks/results/train_fsdp.json

Other arguments go to the script. Where this process may (root, `unshare` and `ip`), the ranks get a loopback interface
of their own, so that what `train_fsdp.py` reads off its counters are its own bytes; elsewhere they are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.measure import ROOT, about, markdown, write

EXAMPLES = ROOT / "examples"
ALONE = ("unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
"""What a command is started with that shall have a loopback interface of its own."""

UPDATE = {"adamw": "adamw", "lamb": "lamb", "onebit_lamb": "lamb"}
"""The exact optimizer that one is compared with; AdamW unless it is named here."""


def interface_alone() -> bool:
    """Return whether a command may have a loopback interface of its own."""
    tools = os.geteuid() == 0 and shutil.which("unshare") and shutil.which("ip")
    return bool(tools) and subprocess.run([*ALONE, "true"], capture_output=True, check=False).returncode == 0


def trained(script: str, arguments: list[str], png: str | None) -> dict[str, Any]:
    """Run the script on two ranks; return the runs of its JSON, and whether the interface was theirs alone."""
    alone = interface_alone()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        command += [str(EXAMPLES / f"{script}.py"), *arguments, "--json", f"{folder}/runs.json"]
        command += ["--out", folder] * (script == "train_lm")
        env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        subprocess.run([*ALONE, *command] if alone else command, env=env, check=True)
        found = json.loads(Path(folder, "runs.json").read_text())
        if png:
            shutil.copyfile(Path(folder, "train_lm.png"), png)
    return {"runs": found["runs"] if script == "train_lm" else found, "interface": alone}


def table_of_train_lm(result: dict[str, Any]) -> str:
    """Return the runs of `train_lm.py` as Markdown."""
    losses = {run["optimizer"]: run["val_loss"] for run in result["runs"]}
    rows = []
    for run in result["runs"]:
        name, per_step = run["optimizer"], run["bytes_per_step"]["compressed"] or run["bytes_per_step"]["warmup"]
        base = losses[UPDATE.get(name, "adamw")]
        against = f"{run['val_loss'] / base - 1:+.2%}" if name not in UPDATE.values() else ""
        sizes = f"{per_step / 1e3:.1f}", f"{run['bytes_total'] / 1e6:.0f}"
        rows.append((name, f"{run['val_loss']:.4f}", against, *sizes, f"{1e3 * run['seconds_per_step']:.0f}"))
    head = "| optimizer | validation loss | against the exact one | kB a step, frozen | MB in all | ms a step |"
    return markdown(head, rows)


def table_of_train_fsdp(result: dict[str, Any]) -> str:
    """Return the runs of `train_fsdp.py` as Markdown."""
    last = [run["validation"][max(run["validation"], key=int)] for run in result["runs"]]
    rows = []
    for run, loss in zip(result["runs"], last, strict=True):
        counted = run["ledger"], run["interface"] if result["interface"] else None
        cells = ("" if size is None else f"{size / 1e3:.1f}" for size in counted)
        rows.append((run["method"], f"{loss:.4f}", f"{loss / last[0] - 1:+.2%}", *cells, f"{1e3 * run['seconds']:.0f}"))
    head = "| method | validation loss | against fsdp2 | gradient, kB a step: ledger | interface | ms a step |"
    return markdown(head, rows)


TABLES = {"train_lm": table_of_train_lm, "train_fsdp": table_of_train_fsdp}


def main() -> None:
    """Train, print the table, write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", choices=list(TABLES))
    parser.add_argument("--png", metavar="FILE", help="where the picture of train_lm goes")
    parser.add_argument("--json", metavar="FILE")
    options, others = parser.parse_known_args()
    result = trained(options.script, others, options.png)
    result = {"about": about(), **result}
    print(TABLES[options.script](result))
    write(options.json, result)


if __name__ == "__main__":
    main()
