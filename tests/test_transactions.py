"""A step happens or it does not: whatever fails inside of it, parameters and state keep every bit.

`Interrupt` stops a step before each of its exchanges in turn; then the step is taken again, and the training must end
where an undisturbed one ends. Then real processes are killed inside of real exchanges.
"""

from __future__ import annotations

import functools
import hashlib
import os
import signal
import time
from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from registry import OPTIMIZERS, each_phase
from simulated import bits
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fn
from fn import Phase
from fn.adapters.optim import core
from fn.collectives.transports import failure_detection as peers
from fn.collectives.transports.tcp import Connections

SHAPES = [(6, 5), (7,), (), (0,), (300, 500)]  # the last one is large enough for kernels and buffers of their own
BY_NAME = {optimizer.name: optimizer for optimizer in OPTIMIZERS}
BROKEN = "[gloo/transport/tcp/pair.cc:553] Connection closed by peer"


class Interrupt(TorchDispatchMode):
    """Count the exchanges inside, of torch.distributed and of our connections, and call `act` before number `at`.

    Args: waits: call it in the middle of exchanges, too.
    """

    def __init__(self, at: int | None = None, act: Any = None, waits: bool = False):
        super().__init__()
        self.at, self.act, self.waits, self.seen = at, act, waits, 0

    def event(self) -> None:
        if self.seen == self.at:
            self.act()
        self.seen += 1

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if "c10d" in op.namespace and (self.waits or "wait" not in str(op)):
            self.event()
        return op(*args, **(kwargs or {}))

    def __enter__(self):
        self.patches = pytest.MonkeyPatch()
        for name in ("exchange", "_wait_for") if self.waits else ("exchange",):
            self.patches.setattr(Connections, name, self.before(getattr(Connections, name)))
        return super().__enter__()

    def __exit__(self, *error):
        self.patches.undo()
        return super().__exit__(*error)

    def before(self, method):
        def run(connections, *args):
            self.event()
            return method(connections, *args)

        return run


def fail() -> None:
    peers.abort_connections = core.abort_connections = lambda transport: None  # they are to be used again
    raise RuntimeError(BROKEN)


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def build(name: str, groups: int, schedule: Any) -> tuple[list[torch.nn.Parameter], fn.Optimizer]:
    generator = torch.Generator().manual_seed(1)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    split = [params] if groups == 1 else [params[:2], params[2:]]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    with fn.bind(mesh):
        make = partial(BY_NAME[name].make, axis="data")
        return params, fn.Optimizer([{"params": p} for p in split], make, schedule=schedule, lr=0.01)


def set_gradients(params: list[torch.nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def phases_until(phase: Phase) -> list[Phase]:
    """Two steps that bring the state into motion, then the phase twice, then one in which all ranks speak."""
    last = Phase.COMPRESSED if phase is Phase.LOCAL else phase
    return [Phase.WARMUP, Phase.WARMUP, phase, phase, last]


def interrupted(name: str, phase: Phase, groups: int) -> tuple[int, list[str]]:
    """Fail before every exchange of a step in turn; return how many there were and what was wrong."""
    asked = phases_until(phase)
    wrong = []
    params, opt = build(name, groups, asked.__getitem__)
    calm, undisturbed = build(name, groups, asked.__getitem__)
    for t in range(len(asked)):
        set_gradients(calm, t)
        undisturbed.step()
    exchanges = 0
    for t in range(len(asked)):
        set_gradients(params, t)
        at, again = 0, t >= 3
        while again:
            before, count = bits((params, opt.states)), opt.steps
            with Interrupt(at, fail) as seen:
                try:
                    opt.step()
                    again = False
                except fn.PeerLost as error:
                    wrong += [] if BROKEN in str(error) and "state are as before" in str(error) else [str(error)]
            if again and not (same(bits((params, opt.states)), before) and opt.steps == count):
                wrong.append(f"step {t}, exchange {at}: something moved")
            exchanges, at = max(exchanges, seen.seen), at + 1
        if t < 3:
            opt.step()
    if not same(bits((params, opt.states)), bits((calm, undisturbed.states))):
        wrong.append("after all the failures it is not where the undisturbed training is")
    return exchanges, wrong


CASES = tuple((o.name, phase, 2) for o in OPTIMIZERS for phase in o.phases)


def on_all(cases: tuple[tuple, ...]) -> dict[tuple, Any]:
    return {case: interrupted(*case) for case in cases}


@functools.cache
def answers() -> list[dict[tuple, Any]]:
    return ranks.run(2, on_all, CASES)


@pytest.mark.slow
@each_phase
def test_a_step_that_fails_before_any_of_its_exchanges_moves_nothing_and_can_be_taken_again(optimizer, phase):
    for found in answers():
        exchanges, wrong = found[optimizer.name, phase, 2]
        assert wrong == []
        assert exchanges >= 2  # the last step of every case speaks: it did fail


# Processes that are killed, or stop, inside of an exchange.


def struck(name: str, phase: Phase, groups: int, event: int, how: int) -> tuple[str, float, Any, tuple[int, ...], str]:
    """Send a signal to rank 1 at an event, the start of or the wait for an exchange, of a step of a phase.

    If a step has fewer events, at the last one. The others catch what they get and stay. A rank that is struck in the
    middle of the last exchange may have said all that some of the others need: these take the step.
    """
    asked = phases_until(phase)
    params, opt = build(name, groups, asked.__getitem__)
    for t in range(4):
        set_gradients(params, t)
        with Interrupt(waits=True) as seen:
            opt.step()
    dist.barrier()
    set_gradients(params, 4)
    event = min(event, seen.seen - 1)
    before, began = bits((params, opt.states)), time.monotonic()
    strike = partial(os.kill, os.getpid(), how)
    try:
        with Interrupt(event if dist.get_rank() == 1 else None, strike, waits=True):
            opt.step()
    except Exception as error:
        waited, lost = time.monotonic() - began, getattr(error, "lost", ())
        ranks.stay()
        return type(error).__name__, waited, same(bits((params, opt.states)), before), lost, str(error)
    waited, last = time.monotonic() - began, event == seen.seen - 1
    ranks.stay()
    return "step" if last else "nothing", waited, digest(params), (), ""


def digest(params: list[torch.nn.Parameter]) -> str:
    return hashlib.blake2b(torch.cat(bits(params)).numpy().tobytes()).hexdigest()


def check(outcomes: list[Any]) -> None:
    """Check what the others of rank 1 said. That they did shows that they did not wait for the group's timeout."""
    assert not any(isinstance(found, (ranks.Died, ranks.Raised)) for found in (outcomes[0], *outcomes[2:])), outcomes
    took = [found[2] for found in outcomes if found[0] == "step"]
    assert all(params == took[0] for params in took)
    for rank, found in enumerate(outcomes):
        if rank != 1 and found[0] != "step":
            kind, waited, unchanged, lost, text = found
            assert kind == "PeerLost", text
            assert lost == (1,)
            assert "rank 1 of axis 'data' is gone or stopped" in text
            assert "resume from the last checkpoint" in text
            assert unchanged is True
            print(f"rank {rank}: {waited:.2f} s")


def spoken(optimizer, phase) -> int:
    """Return how many starts and waits a step has at most: an exchange in the warm-up, two in codes."""
    return 2 if phase is Phase.WARMUP else 4


KILLS = [
    (o.name, phase, groups, event)
    for o in OPTIMIZERS
    for phase in o.phases
    if phase is not Phase.LOCAL
    for groups in (1, 2)
    for event in range(groups * spoken(o, phase))
]
QUICK = [k for k in KILLS if k[0] == "onebit_adam" and (k[1:] in [(Phase.WARMUP, 1, 1), (Phase.COMPRESSED, 2, 6)])]


def identify(case: tuple) -> str:
    return "-".join(str(getattr(x, "value", x)) for x in case)


@pytest.mark.parametrize("case", QUICK, ids=identify)
def test_a_rank_killed_inside_of_an_exchange_is_named_and_nothing_moves_without_waiting_for_the_timeout(case):
    outcomes = ranks.outcomes(4, struck, *case, signal.SIGKILL)
    assert outcomes[1] == ranks.Died(-signal.SIGKILL)
    check(outcomes)


@pytest.mark.reliability
@pytest.mark.parametrize("case", KILLS, ids=identify)
def test_so_it_is_in_every_exchange_of_every_phase_of_every_optimizer(case):
    outcomes = ranks.outcomes(4, struck, *case, signal.SIGKILL)
    assert outcomes[1] == ranks.Died(-signal.SIGKILL)
    check(outcomes)


def struck_on_a_grid() -> tuple[str, bool]:
    """Kill rank 1 before it speaks in a step over two axes; ranks 2 and 3 then wait for rank 0, which stays."""
    params = [torch.nn.Parameter(torch.ones(300))]
    with fn.bind(init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))):
        opt = fn.Optimizer(params, partial(fn.onebit_adam, axis=("local", "node")), lr=0.01)
    params[0].grad = torch.full((300,), 1.0 + dist.get_rank())
    opt.step()
    before = bits((params, opt.states))
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        opt.step()
    except fn.PeerLost:
        ranks.stay()
        return "PeerLost", same(bits((params, opt.states)), before)
    return "nothing", False


def test_a_loss_on_one_axis_is_noticed_by_those_who_wait_on_another_one():
    found = ranks.outcomes(4, struck_on_a_grid)
    assert found == [("PeerLost", True), ranks.Died(-signal.SIGKILL), ("PeerLost", True), ("PeerLost", True)]


def test_a_rank_that_stops_is_named_after_the_timeout():
    case = ("onebit_adam", Phase.COMPRESSED, 1, 1)
    outcomes = ranks.outcomes(4, struck, *case, signal.SIGSTOP, group_timeout=2.0, enough=3)
    assert outcomes[1] == ranks.Died(None)
    check(outcomes)


# A group, or an optimizer, that one rank alone cannot make: all of them refuse it together, and nobody waits.


def alone(phase: Phase) -> tuple[str, str, bool, bool]:
    asked = phases_until(phase)
    params, opt = build("onebit_adam", 1, asked.__getitem__)
    for t in range(3):
        set_gradients(params, t)
        opt.step()
    set_gradients(params, 3)
    second = dist.get_rank() == 1
    before = bits((params, opt.states))
    kind = text = "nothing"
    try:
        more = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64 if second else torch.float32))
        opt.add_param_group({"params": [more]})
    except (ValueError, TypeError) as error:
        kind, text = type(error).__name__, str(error)
    unchanged = same(bits((params, opt.states)), before) and opt.steps == 3
    opt.step()
    return kind, text, unchanged, opt.steps == 4 and opt.skipped == 0


def construct_alone(what: str) -> tuple[str, str]:
    second = dist.get_rank() == 1
    params = [torch.nn.Parameter(torch.ones(3, dtype=torch.complex64 if second and what == "params" else None))]
    hyper = {"b1": 2.0} if second and what == "hyper-parameter" else {}
    try:
        with fn.bind(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))):
            make = partial(fn.onebit_adam, axis="data")
            fn.Optimizer([] if second and what == "empty" else [{"params": params, **hyper}], make, lr=0.01)
    except (ValueError, TypeError) as error:
        return type(error).__name__, str(error)
    return "nothing", ""


ALONE = (Phase.WARMUP, Phase.COMPRESSED)
BUILDS = {"params": "complex64", "hyper-parameter": "in [0, 1), but got 2.0", "empty": "number of param"}


def all_alone() -> dict[Any, Any]:
    return {phase: alone(phase) for phase in ALONE} | {what: construct_alone(what) for what in BUILDS}


@functools.cache
def alone_answers() -> list[dict[Any, Any]]:
    return ranks.run(2, all_alone)


@pytest.mark.parametrize("phase", ALONE)
def test_a_group_that_one_rank_cannot_take_all_refuse_by_name_and_go_on_afterwards(phase):
    for found in alone_answers():
        kind, text, unchanged, goes_on = found[phase]
        assert kind == "RanksDisagree"
        assert "on rank 1" in text
        assert "complex64" in text
        assert unchanged
        assert goes_on


@pytest.mark.parametrize("what", sorted(BUILDS))
def test_what_one_rank_refuses_at_construction_all_refuse(what):
    for found in alone_answers():
        kind, text = found[what]
        assert kind == "RanksDisagree"
        assert "on rank 1" in text
        assert BUILDS[what] in text
