"""Measure a few steps of a user's own script: its parameters, and the seconds of a step without communication.

The script is run as it stands. torch calls hooks before and behind every step of every optimizer, so nothing is guessed
from names: what has a gradient when an optimizer steps is a parameter, and a step lasts from the end of one step of the
first optimizer to the end of its next. In half of the steps `DistributedDataParallel` is told not to average, as in its
`no_sync`. The ranks' models drift apart then, which harms nobody: the script is stopped behind these steps.
"""

from __future__ import annotations

import runpy
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile

from fn.collectives.ledger import ledger
from fn.errors import expected
from fn.planner.traffic import Model, of_shapes
from fn.planner.units import show_seconds
from fn.tools.hidden import WIDEST, hidden_of

STEPS = 10
"""Steps of the script."""

FEWEST = 6
"""The fewest: one to begin with, two as they are, one that is looked at, two without communication."""

SYNCHRONISES = "require_backward_grad_sync"
"""The attribute of DistributedDataParallel that its `no_sync` sets, and scripts that accumulate gradients."""

WIDTHS = {torch.float64: 8, torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


class Probed(NamedTuple):
    """The findings about a script's steps.

    model: the shapes of its parameters, which of them are hidden matrices, and the bytes of an element of most of their
    gradients. by_shape: how many tensors no module holds, so that shapes say whether they are. dtypes: of the
    gradients. optimizers: the names of their classes. device: of the parameters. whole: seconds of each step as it is.
    alone: of each one in which DistributedDataParallel does not average, if there is one. others: collectives that run
    without it.
    """

    model: Model
    by_shape: int
    dtypes: tuple[torch.dtype, ...]
    optimizers: tuple[str, ...]
    device: torch.device
    whole: list[float]
    alone: list[float]
    others: tuple[str, ...]

    @property
    def step(self) -> float:
        """Return the seconds of a step as it is."""
        return statistics.median(self.whole)

    @property
    def compute(self) -> float:
        """Return the seconds of a step without communication, as far as they could be measured."""
        return statistics.median(self.alone or self.whole)


class _Stop(BaseException):
    """Ends the script, as `KeyboardInterrupt` would; no `except Exception` of its own keeps it."""


def probe(
    script: str, arguments: Sequence[str], steps: int, measure: Callable[[Probed, Sequence[Tensor]], Any]
) -> tuple[Probed, Any]:
    """Run a script until its first optimizer has stepped `steps` times, and return what was seen of it.

    Args: measure: is called behind the last step, before the script ends, on all ranks, with what was seen and with the
        parameters: its process group is there.
    Returns: what the steps need, and what `measure` returned.
    Raises: ValueError if there is no such script, it ends before, or none of its optimizers steps. What it raises
        itself is printed, and ends the process.
    """
    if steps < FEWEST:
        raise ValueError(expected("--steps", f"at least {FEWEST}", f"{steps}"))
    if not Path(script).is_file():
        raise ValueError(f"--probe: {script!r} is no file; give the script behind it, then its arguments")
    seen = _Seen(steps, measure)
    handles = [register_optimizer_step_pre_hook(seen.before), register_optimizer_step_post_hook(seen.behind)]
    argv, path = sys.argv, [*sys.path]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).resolve().parent))  # where `python script` looks first
    try:
        runpy.run_path(script, run_name="__main__")
    except _Stop:
        pass
    except SystemExit as ended:
        if ended.code:
            raise
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        sys.argv, sys.path[:] = argv, path
        for handle in handles:
            handle.remove()
        seen.end()
    if seen.error is not None:
        raise seen.error
    if seen.result is None:
        raise ValueError(_too_short(script, len(seen.ends), steps))
    return seen.result


def _too_short(script: str, count: int, steps: int) -> str:
    if count == 0:
        cure = "give a script that trains with one, or --params and --compute in place of --probe"
        return f"--probe: {script} ended, and no optimizer of torch.optim stepped in it; {cure}"
    cure = f", or give --steps {count}" if count >= FEWEST else ""
    needed = f"{steps} are needed; let it train longer{cure}"
    return f"--probe: {script} ended after {count} steps of its optimizer, and {needed}"


class _Seen:
    """The state of the hooks on the optimizers' steps."""

    def __init__(self, steps: int, measure: Callable[[Probed, Sequence[Tensor]], Any]) -> None:
        self.steps, self.looked_at, self.measure = steps, (steps + 1) // 2, measure
        self.params: dict[int, Tensor] = {}  # by id, in the order of the optimizers
        self.dtypes: dict[torch.dtype, int] = {}
        self.optimizers: dict[str, None] = {}
        self.first: Optimizer | None = None
        self.ends: list[float] = []  # of the first optimizer's steps
        self.silenced = False
        self.looking = ExitStack()
        self.others: tuple[str, ...] = ()
        self.result: tuple[Probed, Any] | None = None
        self.error: Exception | None = None

    def before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Remember what has a gradient."""
        if len(self.ends) >= self.steps:  # an optimizer of `measure`
            return
        self.optimizers[type(optimizer).__name__] = None
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p.grad is not None and id(p) not in self.params:
                self.params[id(p)] = p
                self.dtypes[p.grad.dtype] = self.dtypes.get(p.grad.dtype, 0) + p.numel()

    def behind(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Take the time, and go on to steps without communication, and to the end."""
        self.first = self.first or optimizer
        if optimizer is not self.first:
            return
        # Without this the host's clock would stop before the device has done the step.
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.ends.append(time.perf_counter())
        if len(self.ends) == self.looked_at:
            self.silence()
            self.look()
        elif len(self.ends) == self.looked_at + 1:
            self.looking.close()
        if len(self.ends) == self.steps:
            try:
                self.result = self.probed()
            except Exception as error:  # raised where the script cannot catch it
                self.error = error
            raise _Stop

    def silence(self) -> None:
        """Let no DistributedDataParallel average from now on, not even one whose script says so in every step."""

        def never(module: DistributedDataParallel) -> bool:
            self.silenced = True
            return False

        # A property of the class hides the attribute of each instance, and takes what a script assigns without effect.
        setattr(DistributedDataParallel, SYNCHRONISES, property(never, lambda module, wanted: None))

    def look(self) -> None:
        """Watch, until `looking` is closed, which collectives run; fn's need not be those of a process group."""
        watched, book = profile(activities=[ProfilerActivity.CPU]), ledger()

        def found() -> None:
            names = {e.key.removeprefix("c10d::").strip("_") for e in watched.key_averages() if "c10d::" in e.key}
            self.others = tuple(sorted({*names, *(name for _, name in book.sent)}))

        self.looking.callback(found)
        self.looking.enter_context(watched)
        self.looking.enter_context(book)

    def end(self) -> None:
        """Leave torch as it was."""
        self.looking.close()
        if SYNCHRONISES in vars(DistributedDataParallel):
            delattr(DistributedDataParallel, SYNCHRONISES)

    def probed(self) -> tuple[Probed, Any]:
        """Return the findings; neither the first step counts nor the one that the profiler watched."""
        if not self.params:
            raise ValueError("--probe: nothing had a gradient when the optimizer stepped; give a script that trains")
        # From one end to the next, so that what the script does between steps is in it.
        times = [end - start for start, end in zip(self.ends, self.ends[1:], strict=False)]
        whole, alone = times[: self.looked_at - 1], times[self.looked_at :]
        params = [*self.params.values()]
        width = WIDTHS[max(self.dtypes, key=lambda dtype: self.dtypes[dtype])]
        hidden, by_shape = hidden_of(params)
        model = of_shapes([tuple(p.shape) for p in params], width, hidden)
        made = Probed(
            model, by_shape, tuple(self.dtypes), tuple(self.optimizers), params[0].device, slowest(whole),
            slowest(alone) if self.silenced else [], self.others,
        )  # fmt: skip
        self.end()  # what `measure` runs under DDP averages
        return made, self.measure(made, params)


def slowest(times: list[float]) -> list[float]:
    """Return the times of the slowest rank, where there are several."""
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return times
    each: list[list[float]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(each, times)
    # W lists of (n,) -> (n,): step by step that of the slowest rank, for which all wait.
    return [*map(max, zip(*each, strict=True))]


def show(probed: Probed, script: str, given: float | None = None) -> str:
    """Return lines that say what was found, and how. given: seconds of computation that a flag says."""
    model, count = probed.model, probed.model.tensors
    kinds = ", ".join(f"{str(dtype).removeprefix('torch.')}" for dtype in probed.dtypes)
    lines = [
        f"parameters: {model.params:,} in {count:,} tensor{'s' * (count > 1)}, which had a gradient when "
        f"{' or '.join(probed.optimizers)} stepped",
        f"hidden matrices: {100 * model.hidden_share:.3g} % of the parameters, {_how(probed)}",
        f"gradients: {kinds}, {model.width} bytes each" + (", as most are" if len(probed.dtypes) > 1 else ""),
        f"step: {show_seconds(probed.step)} as it is, the median of {len(probed.whole)}",
    ]
    if given is not None:
        how = f"{show_seconds(given)}, as --compute says"
    elif probed.alone:
        how = f"{show_seconds(probed.compute)}, the median of {len(probed.alone)} steps in which "
        how += "DistributedDataParallel did not average"
    else:
        how = f"{show_seconds(probed.compute)}, that of the step as it is"
    lines.append(f"computation: {how}")
    if probed.others and given is None:
        lines.append(
            f"  The script's own communication is in it ({', '.join(probed.others)}): steps of the table are too long, "
            f"and gains too small. Give --compute if you know better."
        )
    return "\n".join([f"probed {script}, on the slowest rank:", *(f"  {line}" for line in lines)])


def _how(probed: Probed) -> str:
    """Say how it is known which tensors are matrices of hidden layers."""
    if probed.by_shape == 0:
        return "as fn.labels_of says of the modules that hold them"
    some = "the tensors" if probed.by_shape == probed.model.tensors else f"{probed.by_shape} of the tensors"
    return (
        f"as shapes say, for no module holds {some}: a matrix counts as an embedding or a head if one side is more "
        f"than {WIDEST} times the other"
    )
