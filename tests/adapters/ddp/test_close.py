"""The process groups and threads of overlapped optimizers, given back for the next ones."""

from __future__ import annotations

import gc
import os
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_cases import Net, arrays, backward, build, same, train, wrapped
from ranks import Cases

import fn
from fn.adapters.ddp import average_gradients, close, keep_local, optimizer, overlap

case = Cases(2)


def held() -> tuple[int, int, int]:
    """Return how many descriptors, threads and process groups there are."""
    gc.collect()
    dist.barrier()
    groups = len(dist.distributed_c10d._world.pg_names)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), groups


def used(in_ddp: bool, until: int = 5) -> Any:
    model = wrapped() if in_ddp else Net()
    opt = build(model)
    overlap(model, opt, least_wire_seconds=0.0)
    train(model, opt, range(until))
    return model, opt


@case
def descriptors() -> list[tuple[tuple[int, int, int], ...]]:
    """Return what is held after one optimizer and after three, and by how much more while two were there."""
    found: list[tuple[tuple[int, int, int], ...]] = []
    for in_ddp in (False, True):
        for i in range(3):
            model, opt = used(in_ddp)
            close(opt)
            close(opt)
            del model, opt
            if i == 0:
                before = held()
        after = held()
        kept = [used(in_ddp), used(in_ddp)]
        found.append((before, after, held()))
        for _, opt in kept:
            close(opt)
    return found


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
@pytest.mark.parametrize("in_ddp", [False, True])
def test_optimizers_one_after_the_other_take_no_more_than_one(in_ddp):
    """torch keeps a process group until all are ended: each optimizer came with three more."""
    for found in case.answer("descriptors"):
        before, after, with_two_open = found[in_ddp]
        assert after == before
        if not in_ddp:  # the first time that two are open at once
            assert all(more > less for more, less in zip(with_two_open, before, strict=True))


@case
def going_on() -> list[bool]:
    """Close after a step, and between backward and step; training goes on as in serial steps."""
    found = []
    for in_ddp in (False, True):
        serial = keep_local(wrapped()) if in_ddp else Net()
        first = build(serial)
        train(serial, first, range(8))
        model, opt = used(in_ddp)
        backward(model, 5)
        close(opt)
        opt.step()
        opt.zero_grad()
        train(model, opt, range(6, 8))
        close(opt)
        there = [arrays(list(m.parameters()), o.states) for m, o in ((serial, first), (model, opt))]
        alive = [t.name for t in threading.enumerate() if t.name == "fn-communication"]
        found.append(same(*there) and alive == [] and opt.ahead is None)
    return found


def test_training_goes_on_with_the_numbers_of_serial_steps():
    assert case.answer("going_on") == [[True, True]] * 2


@case
def without_overlap() -> int:
    model = Net()
    opt = build(model)
    close(opt)
    train(model, opt, range(2))
    model = wrapped()
    opt = optimizer(model, fn.onebit_adam, schedule=fn.freeze_after(3), max_norm=1.0)
    close(opt)
    train(model, opt, range(2))
    return opt.steps


def test_without_overlap_there_is_nothing_to_close():
    assert case.answer("without_overlap") == [2, 2]


def averaged() -> tuple[Any, Any]:
    model = wrapped()
    mean = average_gradients(model, fn.int8())
    train(model, torch.optim.SGD(model.parameters(), 0.1), range(2))
    return model, mean


@case
def averaging() -> tuple[tuple[int, int, int], tuple[int, int, int], str]:
    """Return what is held after one `average_gradients` and after three, and what a closed one says."""
    for i in range(3):
        model, mean = averaged()
        close(mean)
        close(mean)
        with pytest.raises(ValueError, match="closed") as raised:
            backward(model, 2)
        text = str(raised.value)
        del model, mean, raised
        if i == 0:
            before = held()
    return before, held(), text


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs /proc")
def test_averages_of_gradients_give_their_group_back_too():
    """Each kept a process group and a thread; and without them `backward` must not wait for what nobody does."""
    for before, after, text in case.answer("averaging"):
        assert after == before
        assert text.startswith("gradients: nobody averages them any more")
