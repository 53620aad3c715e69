"""Feedback and codecs of one's own behind `fn.Optimizer` on real ranks: their errors are taken, refused, or moved."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import chains
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor

import fn
from fn import tree
from fn.adapters import checkpoint

SHAPES = [(30, 5), (7,), (130,)]
OPTIMIZERS = [fn.onebit_adam, fn.onebit_lamb, fn.zero_one_adam, fn.sharded_onebit_adam, fn.loco_adamw]
REFUSING = [fn.onebit_adam, fn.sharded_onebit_adam]
SCHEDULE = fn.freeze_after(2)


class Aged(NamedTuple):
    """An error with a counter in front of the vector."""

    age: Tensor
    error: Tensor


def counting(every=3):
    """Forget the error in every third step."""

    def residual(compensated, decoded, state):
        return Aged(state.age + 1, compensated - decoded)

    return fn.Feedback(
        lambda x: Aged(torch.zeros((), dtype=torch.int64), torch.zeros_like(x)),
        lambda x, state: x + torch.where(state.age % every == 0, 0.0, state.error),
        residual,
    )


def in_units(unit=1 / 1024):
    """Keep the error in units of its own."""
    return fn.Feedback(torch.zeros_like, lambda x, e: x + e * unit, lambda c, decoded, e: (c - decoded) / unit)


def changing(change):
    """Keep an error whose form is another one after the first step."""
    return fn.Feedback(torch.zeros_like, lambda x, e: x + e, lambda c, decoded, e: change(c - decoded))


CHANGES = {
    "float64": lambda e: e.double(),
    "a row": lambda e: e.view(1, -1),
    "a tuple": lambda e: (e, e.sum()),
}


def to_float64():
    """Send int8 and decode to float64."""
    plain = fn.int8()
    return plain._replace(decode=lambda payload: plain.decode(payload).double())


def optimizer(make, codec, feedback):
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    return fn.Optimizer(params, partial(make, axis="data", codec=codec, feedback=feedback), schedule=SCHEDULE, lr=0.01)


def gradients(step):
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def take(opt, steps):
    for step in range(opt.steps, opt.steps + steps):
        for p, g in zip(opt.param_groups[0]["params"], gradients(step), strict=True):
            p.grad = g
        opt.step()
    return [*opt.param_groups[0]["params"], *tree.leaves(opt.states)]


def pure(make, codec, feedback, steps):
    generator = torch.Generator().manual_seed(0)
    params, tx = [torch.randn(shape, generator=generator) for shape in SHAPES], None
    tx = make(0.01, axis="data", codec=codec, feedback=feedback)
    state = tx.init(params)
    for step in range(steps):
        updates, state = tx.update(SCHEDULE(step))(gradients(step), state, params)
        params = fn.apply_updates(params, updates)
    return [*params, *tree.leaves(state)]


def bound():
    return fn.bind({"data": dist.group.WORLD})


case = ranks.Cases(2)


@case
def refused():
    found = {}
    for make in REFUSING:
        for name, change in CHANGES.items():
            with fn.bind({"data": dist.new_group()}):  # whose connections an error closes
                opt = optimizer(make, fn.int8(), changing(change))
                before = [x.detach().clone() for x in take(opt, 2)]
                try:
                    take(opt, 1)
                    message = ""
                except ValueError as error:
                    message = str(error)
                after = [*opt.param_groups[0]["params"], *tree.leaves(opt.states)]
                found[make.__name__, name] = message, all(map(torch.equal, before, after)), opt.steps
    return found


@case
def taken():
    found = {}
    with bound():
        for make in OPTIMIZERS:
            for name, rule in (
                ("counting", (fn.int8(), counting())),
                ("float64", (to_float64(), fn.classic())),
                ("changed", (fn.sign(), fn.classic()._replace(compensate=lambda x, e: x + 0.5 * e))),
            ):
                ours, theirs = take(optimizer(make, *rule), 6), pure(make, *rule, 6)
                found[make.__name__, name] = [x.detach().clone() for x in ours], theirs
    return found


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("make", REFUSING, ids=lambda make: make.__name__)
def test_an_error_of_another_form_is_refused_before_anything_is_written(make, name):
    for answer in case.answer("refused"):
        message, still, steps = answer[make.__name__, name]
        assert message
        assert still
        assert steps == 2


@pytest.mark.parametrize("name", ["counting", "float64", "changed"])
@pytest.mark.parametrize("make", OPTIMIZERS, ids=lambda make: make.__name__)
def test_feedback_and_codecs_of_ones_own_take_the_pure_steps(make, name):
    for answer in case.answer("taken"):
        ours, theirs = answer[make.__name__, name]
        pairs = list(zip(ours, theirs, strict=True))
        far = sum(int((~torch.isclose(a.double(), b.double(), rtol=1e-4, atol=1e-4)).sum()) for a, b in pairs)
        assert far == 0


def undelivered(opt, feedback):
    """Return what is sent later of a vector of all tensors, in the layout of one rank."""
    sync, (world, rank) = tree.fields(opt.states, "sync")[0], (dist.get_world_size(), dist.get_rank())
    worker, server = (feedback.compensate(torch.zeros_like(e), e).double() for e in (*sync.worker, *sync.server))
    total = worker / world
    total.view(world, -1)[rank] += server
    dist.all_reduce(total)
    return total[: sum(torch.Size(shape).numel() for shape in SHAPES)]


def saved(folder, make_feedback):
    with bound():
        opt = optimizer(partial(chains.onebit_adam, layout="fused", axis="data"), fn.int8(), make_feedback())
        take(opt, 5)
        checkpoint.save(folder, opt)
        return undelivered(opt, make_feedback()) if make_feedback is in_units else None


def loaded(folder, make_feedback):
    with bound():
        opt = optimizer(partial(chains.onebit_adam, layout="fused", axis="data"), fn.int8(), make_feedback())
        checkpoint.load(folder, opt)
        return undelivered(opt, make_feedback())


def test_an_error_in_units_of_its_own_stays_what_it_is_on_another_number_of_ranks(tmp_path):
    before = ranks.run(2, saved, str(tmp_path), in_units)[0]
    after = ranks.run(3, loaded, str(tmp_path), in_units)[0]
    assert float(before.norm()) > 0
    torch.testing.assert_close(after, before, rtol=1e-5, atol=1e-7)


def test_an_error_that_is_no_vector_is_refused_on_another_number_of_ranks(tmp_path):
    ranks.run(2, saved, str(tmp_path), counting)
    for outcome in ranks.outcomes(3, loaded, str(tmp_path), counting):
        assert outcome.kind == "TypeError"
        assert "feedback: is one of your own, and its error is Aged" in outcome.text
