"""Overlap of a plain module, without DDP: two gloo ranks, results compared bit for bit with the serial steps."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ddp_cases import Net, Plain, arrays, backward, batch, build, same, train
from ranks import Cases
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import fn
from fn.adapters.ddp import overlap
from fn.adapters.ddp.overlapped import Overlap

pytestmark = pytest.mark.slow

case = Cases(2)


def both(name: str = "onebit_adam", **more: Any) -> tuple[list[tuple[Net, fn.Optimizer]], Overlap]:
    """Return a model and its optimizer twice; the second one overlaps."""
    pairs = [(model, build(model, name, **more)) for model in (Net(), Net())]
    return pairs, overlap(*pairs[1], least_wire_seconds=0.0)


def ends(pairs: list[tuple[Net, fn.Optimizer]]) -> bool:
    first, second = (arrays(list(model.parameters()), opt.states) for model, opt in pairs)
    return same(first, second)


@case
def all_phases() -> dict[str, tuple[bool, int]]:
    found = {}
    for name in ("onebit_adam", "zero_one_adam"):
        pairs, running = both(name)
        for model, opt in pairs:
            train(model, opt, range(9))
        found[name] = ends(pairs), running.bytes[fn.Phase.COMPRESSED]
    return found


@pytest.mark.parametrize("name", ["onebit_adam", "zero_one_adam"])
def test_overlapped_steps_are_bitwise_the_serial_ones_through_all_phases(name):
    for equal, sent in (found[name] for found in case.answer("all_phases")):
        assert equal
        assert sent > 0


@case
def accumulated() -> tuple[bool, list[int]]:
    """Two parts without communication and a third one with; the serial ranks just add up."""
    pairs, running = both()
    counts = []
    for step in range(6):
        for part in range(3):
            for model, _ in pairs:
                loss = model(batch(step, part)).square().mean()
                if model is pairs[1][0] and part < 2:
                    with running.no_sync(), fn.ledger() as sent:
                        loss.backward()
                    counts.append(sent.total)
                else:
                    loss.backward()
        for _, opt in pairs:
            opt.step()
            opt.zero_grad()
    return ends(pairs), counts


def test_gradients_are_added_up_in_no_sync_and_sent_once():
    for equal, counts in case.answer("accumulated"):
        assert equal
        assert set(counts) == {0}


@case
def in_two_passes() -> bool:
    """Two losses, each with a backward pass of its own, of which one leaves out the last layer."""
    pairs, _ = both()
    for step in range(6):
        for model, opt in pairs:
            model.skip_last = True
            backward(model, step)
            model.skip_last = False
            backward(model, step + 100)
            opt.step()
            opt.zero_grad()
    return ends(pairs)


def test_gradients_of_several_passes_count_together():
    assert case.answer("in_two_passes") == [True, True]


@case
def unused() -> list[bool]:
    """A layer that has no part on any rank until step 4, by when the second moment is frozen."""
    pairs, _ = both()
    found = []
    for steps in (range(4), range(4, 8)):
        for model, opt in pairs:
            model.skip_last = steps.start == 0
            train(model, opt, steps)
        found.append(ends(pairs))
    return found


def test_a_layer_without_a_part_stays_and_can_join():
    assert case.answer("unused") == [[True, True]] * 2


@case
def missing_on_one_rank() -> tuple[bool, list]:
    """A layer that has no part on rank 1 in every other step, and that rank 0 takes its part of."""
    pairs, _ = both()
    for step in range(8):
        for model, opt in pairs:
            model.skip_last = dist.get_rank() == 1 and step % 2 == 1
            train(model, opt, range(step, step + 1))
    return ends(pairs), arrays(list(pairs[1][0].parameters()))


def test_a_gradient_that_one_rank_has_not_counts_as_zero_there():
    (first, one), (second, other) = case.answer("missing_on_one_rank")
    assert first
    assert second
    assert same(one, other)


@case
def without_a_pass() -> bool:
    """Rank 1 has no batch in step 5; where a step of rank 0 is sent behind backward, its is sent in `step`."""
    pairs, _ = both()
    for step in range(8):
        for model, opt in pairs:
            if step != 5 or dist.get_rank() == 0:
                backward(model, step)
            opt.step()
            opt.zero_grad()
    return ends(pairs)


def test_a_rank_without_a_backward_pass_sends_zeros():
    assert case.answer("without_a_pass") == [True, True]


@case
def not_finite() -> tuple[int, bool]:
    pairs, _ = both()
    for model, opt in pairs:
        train(model, opt, range(5))
        backward(model, 5, scale=float("inf") if dist.get_rank() == 1 else 1.0)
        opt.step()
        opt.zero_grad()
        train(model, opt, range(6, 8))
    return pairs[1][1].skipped, ends(pairs)


def test_a_step_that_is_not_finite_on_one_rank_is_skipped_on_all():
    assert case.answer("not_finite") == [(1, True)] * 2


@case
def broken_off() -> list[bool]:
    """One group has been sent when the pass breaks off, and there are gradients of all parameters."""
    pairs = [(model, build(model)) for model in (Plain(), Plain())]
    overlap(*pairs[1], least_wire_seconds=0.0)
    found = []
    for then in ("zero_grad", "step", "backward"):
        for model, opt in pairs:
            train(model, opt, range(5))
            backward(model, 5)
            opt.zero_grad(set_to_none=False)
            model.break_off(partial(backward, model, 6))
            if then == "step":
                opt.step()
            if then != "backward":
                opt.zero_grad()
            train(model, opt, range(7, 9))
        found.append(ends(pairs))
    return found


def test_a_pass_that_breaks_off_on_all_ranks_is_forgotten_or_counts_as_far_as_it_came():
    assert case.answer("broken_off") == [[True, True, True]] * 2


class InParts(Net):
    """The same net, whose layers are computed a second time in the backward pass, as autograd passes of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


@case
def reentrant() -> bool:
    pairs = [(model, build(model)) for model in (InParts(), InParts())]
    overlap(*pairs[1], least_wire_seconds=0.0)
    for model, opt in pairs:
        train(model, opt, range(7))
    return ends(pairs)


def test_passes_inside_of_a_pass_give_the_serial_numbers():
    assert case.answer("reentrant") == [True, True]


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"model: expected .*, but got list"):
        overlap([], None)


@case
def left_behind() -> list[tuple[int, int, str]]:
    """Make optimizers for one module and for DDP ones, and drop them; return what threads and objects are left."""

    def used(how: str) -> list[weakref.ref[Any]]:
        net = Plain()
        model = DistributedDataParallel(net) if how == "in DDP" else net
        opt = build(model)
        running = overlap(model, opt, least_wire_seconds=0.0)
        train(model, opt, range(5))
        if how == "broken off":
            net.break_off(partial(backward, model, 5))
        return [weakref.ref(opt), weakref.ref(running)]

    found = []
    for how in ("plain", "in DDP", "broken off"):
        before = set(threading.enumerate())
        alive, until = used(how), time.monotonic() + 10.0
        gc.collect()
        while any(r() is not None for r in alive) and time.monotonic() < until:  # a pass that broke off still sends
            time.sleep(0.01)
            gc.collect()
        here = [t for t in threading.enumerate() if t not in before and t.name == "fn-communication"]
        for thread in here:
            thread.join(10.0)
        found.append((sum(t.is_alive() for t in here), sum(r() is not None for r in alive), how))
    return found


def test_an_optimizer_that_is_dropped_leaves_no_thread_and_no_state():
    """A notebook makes many: each left three threads, and beside a plain module all of its state."""
    assert case.answer("left_behind") == [[(0, 0, "plain"), (0, 0, "in DDP"), (0, 0, "broken off")]] * 2
