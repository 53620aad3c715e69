"""Checks of whole steps on a device: against the CPU, in place against pure, compiled against eager, with an Inf.

A check returns what is wrong, or None. The axis "data" has two ranks, of which the other one says whatever this one
says, so that a single process takes every step of every optimizer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

import fn
from fn import Phase, tree
from fn.collectives import transports
from fn.collectives.axis import Axis, Binding

SHAPES = [(37, 5), (7,), (), (0,), (4097,), (64, 16)]
FEW = [(37, 5), (4097,)]
"""Those of steps that are compiled, which takes a time for every tensor."""

NUMBERS = sum(torch.Size(shape).numel() for shape in SHAPES)
STEPS = 20
WARM_UP = 8
LR = 1e-3
INTEGERS = 2e-4
"""What parameters may differ by where integer codes travel: 1 % of how far they go in all steps."""


LEFT_OUT = ("skipped", "dropped")
"""Fields of states that count the steps that were left out: by all ranks, and by one rank alone in a local step."""


class Case(NamedTuple):
    """An optimizer to check.

    bits: of a code on the wire; 0 where nothing travels in codes. echoes: its steps in place may be compared beside an
    echo. What keeps a shard of the parameters may not: in place it gathers parameters, and in the pure step updates.
    close: what parameters may differ by, which move by up to 0.02 in all. Integer codes take more: a number between two
    of them may be rounded either way, which is worth a code.
    """

    make: Callable[..., fn.Transform]
    phases: tuple[Phase, ...]
    bits: int = 1
    echoes: bool = True
    close: float = 1e-5


_TWO = (Phase.WARMUP, Phase.COMPRESSED)

CASES: dict[str, Case] = {
    "adamw": Case(fn.adamw, (Phase.WARMUP,), 0),
    "lamb": Case(fn.lamb, (Phase.WARMUP,), 0),
    "onebit_adam": Case(fn.onebit_adam, _TWO),
    "onebit_adam, lazy errors": Case(partial(fn.onebit_adam, feedback=fn.classic(lazy=True)), _TWO),
    "onebit_adam, no servers": Case(partial(fn.onebit_adam, servers=False), _TWO),
    "onebit_adam, int8": Case(partial(fn.onebit_adam, codec=fn.int8(), feedback=fn.damped()), _TWO, 8, close=INTEGERS),
    "onebit_adam, warm-up in int8": Case(partial(fn.onebit_adam, warmup=fn.int8()), _TWO, close=INTEGERS),
    "onebit_lamb": Case(fn.onebit_lamb, _TWO),
    "zero_one_adam": Case(fn.zero_one_adam, (Phase.WARMUP, Phase.COMPRESSED, Phase.LOCAL)),
    "loco_adamw": Case(fn.loco_adamw, _TWO, 4, echoes=False, close=INTEGERS),
    "sharded_onebit_adam": Case(fn.sharded_onebit_adam, _TWO, echoes=False),
}


def schedule(case: Case, step: int) -> Phase:
    """Warm up, then let the other phases take turns."""
    later = case.phases[1:]
    return Phase.WARMUP if step < WARM_UP or not later else later[step % len(later)]


def echo(heard: list[Tensor] | None = None) -> Binding:
    """Bind the axis "data" to two ranks, of which the other one says what this one says. heard: gets the messages."""

    def keep(x: Tensor) -> Tensor:
        if heard is not None:
            heard.append(x.detach().cpu().clone())
        return x.clone()

    way = transports.Transport(
        all_to_all=keep, all_gather=lambda x: torch.stack([x, x]), psum=lambda x: x.add_(x.clone())
    )
    name = transports.register(f"echo {next(_count)}", way)
    return Binding({"data": Axis(2, torch.tensor(0), name)})


_count = itertools.count()


def numbers(seed: int, device: torch.device, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    """Return a list of tensors, the same on every device; one row never receives a gradient."""
    generator = torch.Generator().manual_seed(seed)
    found = [torch.randn(shape, generator=generator) for shape in shapes]
    found[0][3] = 0.0
    return [x.to(device) for x in found]


class Training:
    """An optimizer over parameters of a device. phase: of all steps behind the warm-up; None: they take turns."""

    def __init__(self, case: Case, device: torch.device, phase: Phase | None = None):
        self.case, self.device, self.messages = case, device, list[Tensor]()
        self.params = [torch.nn.Parameter(x) for x in numbers(0, device)]
        with echo(self.messages):
            self.opt = fn.Optimizer(
                self.params, partial(case.make, axis="data"), lr=LR, refuse_averaged=False,
                schedule=lambda step: phase if phase and step >= WARM_UP else schedule(case, step),
            )  # fmt: skip

    def step(self, t: int) -> None:
        """Take step t."""
        for p, g in zip(self.params, numbers(1 + t, self.device), strict=True):
            p.grad = g
        self.opt.step()

    def all(self, phase: Phase) -> list[Tensor]:
        """Return parameters and states, without the counts of steps; a local step that is left out still passes."""
        names = (*LEFT_OUT, "step", "ages", "elapsed") if phase is Phase.LOCAL else LEFT_OUT
        counts = {id(x) for name in names for x in tree.leaves(tree.fields(self.opt.states, name))}
        return [*(p.detach() for p in self.params), *(x for x in tree.leaves(self.opt.states) if id(x) not in counts)]


def like_the_cpu(name: str, device: torch.device) -> str | None:
    """Compare 20 steps of a device with those of the CPU, and the codes of the first compressed step."""
    here, there = (Training(CASES[name], d) for d in (device, torch.device("cpu")))
    for t in range(STEPS):
        for training in (here, there):
            training.messages.clear()
            training.step(t)
        if t == WARM_UP and (fault := _codes_differ(CASES[name].bits, here.messages, there.messages)):
            return fault
    for i, (a, b) in enumerate(zip(here.params, there.params, strict=True)):
        if not torch.allclose(a.cpu(), b, 1e-5, CASES[name].close):
            return f"parameter {i} differs by {float((a.cpu() - b).abs().max()):.2g} after {STEPS} steps"
    return None


def _codes_differ(bits: int, here: list[Tensor], there: list[Tensor]) -> str | None:
    """Compare messages: signs bit by bit, integers but for 1 in 1000; scales, in front, may be rounded otherwise."""
    if [x.shape for x in here] != [x.shape for x in there]:
        return f"messages of shapes {[tuple(x.shape) for x in here]} instead of {[tuple(x.shape) for x in there]}"
    for a, b in zip(here, there, strict=True):
        if a.dtype == torch.uint8 and bits:
            tail = max(1, NUMBERS * bits // 8 // a.shape[0])
            wrong = int((a[:, -tail:] != b[:, -tail:]).sum())
            if wrong > (a.numel() // 1000 if bits > 1 else 0):
                return f"{wrong} of {a.shape[0] * tail} bytes of codes differ in the first compressed step"
    return None


def in_place_like_pure(name: str, device: torch.device) -> str | None:
    """Compare steps behind `fn.Optimizer` with the pure update, on the same device."""
    case = CASES[name]
    training = Training(case, device)
    with echo():
        tx = case.make(lr=LR, axis="data")
        params = numbers(0, device)
        state = tx.init(params)
    for t in range(STEPS):
        training.step(t)
        with echo():
            updates, state = tx.update(schedule(case, t))(numbers(1 + t, device), state, params)
            params = fn.apply_updates(params, updates)
    for i, (a, b) in enumerate(zip(training.params, params, strict=True)):
        if not torch.allclose(a, b, 1e-5, case.close):
            return f"parameter {i} differs by {float((a - b).abs().max()):.2g} after {STEPS} steps"
    return None


def compiled_like_eager(name: str, device: torch.device, backend: str = "inductor") -> str | None:
    """Compare the compiled update of every phase with the same update as it is."""
    case = CASES[name]
    for phase in case.phases:
        with echo():
            tx = case.make(lr=LR, axis="data")
            params = numbers(0, device, FEW)
            state = tx.init(params)
            for t in range(3):  # so that nothing is zero
                updates, state = tx.warmup_update(numbers(1 + t, device, FEW), state, params)
                params = fn.apply_updates(params, updates)
            torch._dynamo.reset()
            compiled = torch.compile(tx.update(phase), fullgraph=True, backend=backend)
            eager = tx.update(phase)(numbers(9, device, FEW), state, params)
            found = compiled(numbers(9, device, FEW), state, params)
        for i, (a, b) in enumerate(zip(tree.leaves(found), tree.leaves(eager), strict=True)):
            wrong = ~a.isclose(b, rtol=1e-5, atol=case.close, equal_nan=True) if a.is_floating_point() else a != b
            if int(wrong.sum()) > (a.numel() // 1000 if case.close == INTEGERS else 0):
                return f"{phase.value}: leaf {i} differs in {int(wrong.sum())} of {a.numel()} places"
    return None


def inf_changes_nothing(name: str, device: torch.device) -> str | None:
    """Take a step under `GradScaler` whose gradient holds an Inf, in every phase: it leaves every bit as it was."""
    for phase in CASES[name].phases:
        training = Training(CASES[name], device, phase)
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
        for t in range(WARM_UP + 3):
            before = [x.clone() for x in training.all(phase)] if t == WARM_UP + 2 else []
            for i, (p, g) in enumerate(zip(training.params, numbers(1 + t, device), strict=True)):
                p.grad = scaler.scale(torch.ones((), device=device)) * g
                if before and i == 1:
                    p.grad[2] = float("inf")
            scaler.step(training.opt)
            scaler.update()
        left_out = [int(x) for name in LEFT_OUT for x in tree.leaves(tree.fields(training.opt.states, name))]
        if sum(left_out) != 1:
            return f"{phase.value}: {sum(left_out)} steps were left out, and not 1"
        for i, (a, b) in enumerate(zip(training.all(phase), before, strict=True)):
            if a.flatten().view(torch.uint8).tolist() != b.flatten().view(torch.uint8).tolist():
                return f"{phase.value}: leaf {i} of parameters and states was changed"
    return None


def pairs() -> list[tuple[str, str]]:
    """Return what is checked of which optimizer."""
    return [(what, name) for what in CHECKS for name, case in CASES.items() if case.echoes or "pure" not in what]


CHECKS: dict[str, Callable[..., str | None]] = {
    "device equals CPU": like_the_cpu,
    "in place equals pure": in_place_like_pure,
    "compiled equals eager": compiled_like_eager,
    "an Inf changes nothing": inf_changes_nothing,
}
