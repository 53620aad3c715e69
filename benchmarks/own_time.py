"""What a step of each method takes beside its messages and its passes over memory, in small operations of torch.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m benchmarks.own_time --json benchmarks/results/own_time.json

Models of tiny tensors, half of them matrices, are stepped on by two ranks over gloo. A step's processor time beyond
that of AdamW without messages, over the time of one addition to a tiny tensor that is called from Python, is a count
that holds where other work shares the cores. Two numbers of tensors give a line, which `fn.planner.methods.CALLS` has.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measure import about, markdown, write
from fn.planner.recommend import BASE, DDP, IMPORTS, PICKS
from fn.tools.trials import StandIn, Work

BOUND = "with fn.bind(mesh): opt = fn.Optimizer(model.parameters(), partial({}), labels=fn.labels_of(model), "
IN_CODES = "schedule=fn.freeze_after(0))"
UNLABELLED = "with fn.bind(mesh): opt = fn.Optimizer(model.parameters(), partial({}), " + IN_CODES
HOOK = "fn.adapters.ddp.average_gradients(model, fn.{})"

CODES = {
    **{pick.row: (pick.model == DDP, pick.code) for pick in (BASE, *PICKS) if pick.model},
    "adamw, int8 gradients": (True, HOOK.format("int8(), fn.damped()")),
    "onebit_adam": (False, UNLABELLED.format('fn.onebit_adam, axis="data"')),
    "onebit_lamb": (False, UNLABELLED.format('fn.onebit_lamb, axis="data"')),
    "sharded_onebit_adam": (False, UNLABELLED.format('fn.sharded_onebit_adam, axis="data"')),
    "loco_adamw, int4": (False, UNLABELLED.format('fn.loco_adamw, axis="data"')),
    "powersgd_adamw": (False, UNLABELLED.format('fn.powersgd_adamw, axis="data", rank=4')),
    "dion": (False, BOUND.format('fn.dion, axis="data"') + IN_CODES),
    "muon": (False, BOUND.format('fn.muon, axis="data"') + IN_CODES),
    "lion_vote": (False, UNLABELLED.format('fn.lion_vote, axis="data"')),
    "diloco": (False, 'with fn.bind(mesh): opt = fn.Optimizer(model.parameters(), partial(fn.diloco, axis="data"), '
               "schedule=fn.every(30))"),
}  # fmt: skip
"""Row -> whether its model is under DDP, and its code, that of the picks as it is printed."""

SIDE, TENSORS, WARM = 4, (8, 72), 5


def step(name: str | None, tensors: int, work: Work) -> Callable[[], None]:
    """Return a step of a method, None for AdamW alone."""
    pairs = tensors // 2
    model: Any = StandIn([torch.zeros(SIDE, SIDE), torch.zeros(SIDE)] * pairs, [True, False] * pairs, 1e-9, work)
    under_ddp, code = CODES[name] if name else (False, "")
    if under_ddp:
        model = DistributedDataParallel(model)
    names: dict[str, Any] = {"model": model, "mesh": dist.init_device_mesh("cpu", (2,), mesh_dim_names=("data",))}
    exec(f"{IMPORTS}\n{code}", names)
    opt = names.get("opt") or torch.optim.AdamW(model.parameters())

    def run() -> None:
        model().backward()
        opt.step()
        opt.zero_grad()

    return run


def calls(rounds: int) -> dict[str, tuple[float, float]]:
    """Return, by method, the count of a step and that of each tensor."""
    tiny, work = torch.zeros(SIDE), Work(torch.device("cpu"), flops=1e11)

    def add() -> None:
        for _ in range(1000):
            tiny.add_(1.0)

    found: dict[tuple[str, int], float] = {}
    for tensors in TENSORS:
        runs = {"": step(None, tensors, work), **{name: step(name, tensors, work) for name in CODES}}
        taken: dict[str, list[float]] = {name: [] for name in runs}
        for turn in range(rounds + WARM):
            start = time.process_time()
            add()
            call = (time.process_time() - start) / 1000
            for name, run in runs.items():
                start = time.process_time()
                run()
                if turn >= WARM:
                    taken[name].append((time.process_time() - start) / call)
        alone = statistics.median(taken.pop(""))
        found |= {(name, tensors): statistics.median(some) - alone for name, some in taken.items()}
    few, many = TENSORS
    each = {name: (found[name, many] - found[name, few]) / (many - few) for name in CODES}
    return {name: (found[name, few] - few * each[name], each[name]) for name in CODES}


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json")
    flags = parser.parse_args()
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    found = calls(flags.rounds)
    if dist.get_rank() == 0:
        write(flags.json, {"about": about(), "calls": found})
        lines = ([name, f"{step:.0f}", f"{each:.1f}"] for name, (step, each) in found.items())
        print(markdown("method | of a step | of each tensor", lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
