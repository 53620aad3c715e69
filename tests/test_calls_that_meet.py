"""Ranks that are in different calls: each pair of calls meets on two ranks, and both say who is in which."""

from __future__ import annotations

import itertools
import tempfile
import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist

import fn
from fn.adapters import checkpoint
from fn.adapters.drift import check_drift

CALLS = {
    "construction": "the construction of an optimizer",
    "add_param_group": "add_param_group",
    "first step": "the first step",
    "exchange": "the exchange of a round",
    "later exchange": "the exchange of a round",
    "save": "checkpoint.save",
    "load": "checkpoint.load",
    "gather": "checkpoint.gather",
    "check_drift": "check_drift",
}
"""The calls that compare something, or whose messages have a header, and how errors name them."""

STEPS = {"warm-up": 1, "compressed": 3, "first compressed": 2}
"""Steps that send no header, and how many were taken before: means that gloo adds up, codes, and a look at gradients.

Over gloo alone the last one is left out: gloo ends a process to which another one gathers more than it expects.
"""


def build(group: dist.ProcessGroup, tcp: bool) -> fn.Optimizer:
    model = [torch.nn.Parameter(torch.arange(7.0)), torch.nn.Parameter(torch.ones(3, 2))]
    with fn.bind({"data": group}, tcp=tcp):
        return fn.Optimizer(model, partial(fn.diloco, axis="data"), schedule=fn.every(2), lr=0.1)


def set_gradients(opt: fn.Optimizer) -> None:
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p) * (1.0 + dist.get_rank())


def prepare(name: str, group: dist.ProcessGroup, folder: str, tcp: bool) -> tuple[fn.Optimizer, Callable]:
    """Return a call, and with it the optimizer, ready to begin; all ranks do it together."""
    opt = build(group, tcp)
    for _ in range({"exchange": 1, "later exchange": 3}.get(name, 0)):
        set_gradients(opt)
        opt.step()
    if name == "load":
        checkpoint.save(folder, opt)
    set_gradients(opt)
    return opt, {
        "construction": lambda: build(group, tcp),
        "add_param_group": lambda: opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(4))]}),
        "first step": opt.step,
        "exchange": opt.step,
        "later exchange": opt.step,
        "save": lambda: checkpoint.save(folder, opt),
        "load": lambda: checkpoint.load(folder, opt),
        "gather": lambda: checkpoint.gather(opt),
        "check_drift": lambda: check_drift(opt, 1),
    }[name]


def state_of(opt: fn.Optimizer) -> list[Any]:
    params = [p.detach().clone() for group in opt.param_groups for p in group["params"]]
    return [opt.steps, len(opt.param_groups), params, [x.clone() for x in fn.tree.leaves(opt.states)]]


def tried(call: Callable) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def all_pairs(tcp: bool) -> dict[tuple[str, str], tuple[str, str, bool]]:
    """Let two calls meet, rank by rank; then take the same one on both, which has to go well."""
    warnings.simplefilter("ignore")
    group, found = dist.new_group(), {}
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    for pair in itertools.combinations(CALLS, 2):
        if pair == ("exchange", "later exchange"):  # one call
            continue
        ready = [prepare(name, group, str(Path(folder[0], name)), tcp) for name in pair]
        opt, call = ready[dist.get_rank()]
        before = state_of(opt)
        kind, text = tried(call)
        after = state_of(opt)
        if "exchange" in pair[dist.get_rank()]:  # its local step counts
            before[0], before[2:], after[2:] = before[0] + 1, [], []
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        # Nothing of it is on its way: a call that both make goes well. A second step would be no exchange.
        _, again = ready["exchange" in pair[0]]
        found[pair] = kind, text, tried(again) == ("nothing", "")
    return found


@cache
def met(tcp: bool) -> list[dict]:
    return ranks.run(2, all_pairs, tcp)


@pytest.mark.parametrize("tcp", [True, False])
def test_any_two_calls_that_meet_are_both_named_on_both_ranks(tcp):
    for found in met(tcp):
        assert len(found) == 35
        for (first, second), (kind, text, goes_on) in found.items():
            assert kind == "RanksDisagree", (first, second, kind, text)
            assert f"rank 1 of 'data' is in {CALLS[second]}, and rank 0 in {CALLS[first]};" in text
            assert goes_on


def without_axes() -> dict[tuple[str, str], tuple[str, str]]:
    """Let calls of checkpoints meet whose optimizers have no axis, and one of them and a construction."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    with fn.bind({}):
        opt = fn.Optimizer([torch.nn.Parameter(torch.ones(3))], fn.adamw)
    checkpoint.save(folder[0], opt)
    calls = {
        "save": lambda: checkpoint.save(folder[0], opt),
        "load": lambda: checkpoint.load(folder[0], opt),
        "gather": lambda: checkpoint.gather(opt),
        "first": lambda: build(dist.group.WORLD, tcp=True),
    }
    return {pair: tried(calls[pair[dist.get_rank()]]) for pair in itertools.combinations(calls, 2)}


def test_calls_that_meet_over_the_default_group_are_named_too():
    names = {**CALLS, "first": "the first exchange over a process group"}
    for found in ranks.run(2, without_axes):
        assert len(found) == 6
        for (first, second), (kind, text) in found.items():
            assert kind == "RanksDisagree", (first, second, kind, text)
            assert f"is in {names[second]}, and rank 0 in {names[first]};" in text


def on_a_grid() -> tuple[str, str]:
    """One of four ranks on two axes is in another call."""
    warnings.simplefilter("ignore")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    with fn.bind(mesh):
        opt = fn.Optimizer([torch.nn.Parameter(torch.ones(5))], partial(fn.adamw, axis=("local", "node")))
    set_gradients(opt)
    add = {"params": [torch.nn.Parameter(torch.ones(4))]}
    return tried(partial(opt.add_param_group, add) if dist.get_rank() == 2 else opt.step)


def test_all_ranks_of_a_grid_hear_of_it():
    for kind, text in ranks.run(4, on_a_grid):
        assert kind == "RanksDisagree", text
        assert "is in add_param_group, and rank 0 in the first step;" in text


def among_islands(axes: tuple[str, str]) -> tuple[str, str, int]:
    """One of four ranks is in another call than the exchange that its island begins."""
    warnings.simplefilter("ignore")
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    for axis in axes:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), mesh.get_group(axis))
    inner = lambda lr: fn.chain(fn.unfrozen(fn.average("local")), fn.scale_by_learning_rate(lr))  # noqa: E731
    outer, sync = fn.scale_by_learning_rate(0.7), fn.compressed_average("site", fn.identity(), fn.off())
    with fn.bind(mesh):
        params = [torch.nn.Parameter(torch.ones(5))]
        opt = fn.Optimizer(params, lambda lr: fn.outer(inner(lr), outer, sync), schedule=fn.every(2), lr=0.1)
    for _ in range(3):
        set_gradients(opt)
        opt.step()
    add = {"params": [torch.nn.Parameter(torch.ones(4))]}
    return *tried(partial(opt.add_param_group, add) if dist.get_rank() == 2 else opt.step), opt.steps


@pytest.mark.reliability
@pytest.mark.parametrize(("axes", "partner"), [(("local", "site"), 3), (("site", "local"), 0)])
def test_a_call_against_an_exchange_of_islands_is_named_where_the_two_meet(axes, partner):
    """An exchange sends nothing within its island, so only the rank there that it exchanges with can hear of it."""
    found = ranks.run(4, among_islands, axes)
    for rank in (2, partner):
        kind, text, steps = found[rank]
        assert (kind, steps) == ("RanksDisagree", 3 if rank == 2 else 4)
        assert "of 'site' is in" in text
        assert "add_param_group" in text
        assert "the exchange of a round" in text
        assert text.endswith("nothing has moved" if rank == 2 else "the local step, which counts")


def against_steps(calls: list[str], tcp: bool) -> dict[tuple[str, str], tuple[str, str, int]]:
    """Let calls on rank 0 meet later steps on rank 1, each pair over a group of its own."""
    warnings.simplefilter("ignore")
    found, folder = {}, [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    for name, (step, taken) in itertools.product(calls, [*STEPS.items()][: None if tcp else 2]):
        group = dist.new_group(timeout=timedelta(seconds=2))
        _, call = prepare(name, group, folder[0], tcp)
        with fn.bind({"data": group}, tcp=tcp):
            make, params = partial(fn.onebit_adam, axis="data"), [torch.nn.Parameter(torch.ones(200))]
            opt = fn.Optimizer(params, make, schedule=fn.freeze_after(2), lr=0.1)
        for _ in range(taken):
            set_gradients(opt)
            opt.step()
        before = state_of(opt)
        dist.barrier()
        kind, text = tried(call if dist.get_rank() == 0 else opt.step)
        torch.testing.assert_close(state_of(opt), before, rtol=0, atol=0)
        found[name, step] = kind, text
        dist.barrier()
    return found


@pytest.mark.parametrize(
    ("calls", "tcp"),
    [
        (["add_param_group"], True),
        pytest.param(list(CALLS), True, marks=pytest.mark.reliability),
        pytest.param(list(CALLS), False, marks=pytest.mark.reliability),
    ],
)
def test_a_call_that_meets_a_later_step_loses_its_peer_and_says_what_it_was_in(calls, tcp):
    for rank, found in enumerate(ranks.run(2, against_steps, calls, tcp)):
        assert len(found) == (3 if tcp else 2) * len(calls)
        for (name, step), (kind, text) in found.items():
            assert kind == "PeerLost", (name, step, kind, text)
            assert (f"noticed in {CALLS[name]}" if rank == 0 else "as before the step") in text or (
                "exchange" in name and "as after the local step" in text
            )


def sent() -> list[dict]:
    """Return what the ledger counts in each step: of codes, and of rounds."""
    found = []
    make = partial(fn.onebit_adam, axis="data")
    with fn.bind({"data": dist.group.WORLD}):
        coded = fn.Optimizer([torch.nn.Parameter(torch.ones(8))], make, schedule=fn.freeze_after(1), lr=0.1)
    for opt in (coded, build(dist.group.WORLD, tcp=True)):
        for _ in range(4):
            set_gradients(opt)
            with fn.ledger() as counted:
                opt.step()
            found.append((counted.messages, counted.sent))
    return found


def test_no_step_gains_a_message():
    """Headers are not counted, as transports' are not; what steps send beside them is as before there were any."""
    gathers, reduces, swaps = ("data", "all_gather"), ("data", "all_reduce"), ("data", "all_to_all")
    codes, mean = ({swaps: 1, gathers: 1}, {swaps: 3, gathers: 3}), ({swaps: 1, gathers: 1}, {swaps: 28, gathers: 28})
    # The first step of each phase looks whether something has averaged the gradients: 24 bytes.
    first = {gathers: 1, reduces: 1}, {gathers: 24, reduces: 32}
    compressed = {swaps: 1, gathers: 2}, {swaps: 3, gathers: 27}
    nothing = dict[Any, int](), dict[Any, int]()
    for found in ranks.run(2, sent):
        assert found == [first, compressed, codes, codes, nothing, mean, nothing, mean]
