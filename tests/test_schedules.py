"""Schedules are host functions int -> Phase."""

from __future__ import annotations

import math
import pickle
import warnings
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fn
from fn import Phase, tree
from fn.collectives.agreement import describe


@given(st.integers(0, 50), st.integers(0, 100))
def test_freeze_after_warms_up_for_exactly_that_many_steps(steps, step):
    assert fn.freeze_after(steps)(step) is (Phase.WARMUP if step < steps else Phase.COMPRESSED)


@pytest.mark.parametrize("value", [-1, 0.2, "10"])
@pytest.mark.parametrize("name", ["var_freeze_step", "var_update_scaler", "local_step_scaler", "local_step_clipper"])
def test_zero_one_schedule_refuses_what_is_no_number_of_steps(name, value):
    with pytest.raises(ValueError, match=rf"{name}: expected a whole number of at least .*, but got {value!r}"):
        fn.zero_one_schedule(**{name: value})


@pytest.mark.parametrize("steps", [-1, 0.2, "10"])
def test_freeze_after_refuses_what_is_no_number_of_steps(steps):
    """A fraction of the run, for one: it would freeze before the second step."""
    with pytest.raises(ValueError, match=rf"steps: expected a whole number of at least 0, such .* got {steps!r}"):
        fn.freeze_after(steps)
    assert fn.freeze_after(1e3) == fn.freeze_after(1000)


@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_every_exchanges_each_fragment_once_in_h_steps(fragments, length, data):
    delay, start = data.draw(st.integers(0, length - 1)), data.draw(st.integers(0, 3))
    h = fragments * length
    schedule = fn.every(h, fragments=fragments, delay=delay, start=start)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert [schedule(t) for t in range(start)] == [Phase.WARMUP] * start
    for again in range(2):
        first = start + again * h
        found = [schedule(first + t) for t in range(h)]
        begun = {r.begin: t for t, r in enumerate(found) if r.begin is not None}
        ended = {r.end: t for t, r in enumerate(found) if r.end is not None}
        assert begun == {f: (f + 1) * length - 1 - delay for f in range(fragments)}
        assert ended == {f: (f + 1) * length - 1 for f in range(fragments)}
        assert sum(r.phase is Phase.LOCAL for r in found) == h - len({*begun.values(), *ended.values()})


@given(st.integers(1, 9), st.integers(0, 100))
def test_periodic_is_exact_in_one_step_of_so_many(period, step):
    schedule = fn.periodic(period)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert schedule(step) is (Phase.COMPRESSED if step % period else Phase.WARMUP)


@pytest.mark.parametrize("period", [0, -1, 2.5, "3"])
def test_periodic_refuses_what_is_no_number_of_steps(period):
    with pytest.raises(ValueError, match=rf"period: expected a whole number of at least 1, .* got {period!r}"):
        fn.periodic(period)


@given(st.integers(1, 4), st.integers(1, 5), st.data())
def test_every_exchange_ends_a_delay_after_it_began_in_order_and_alone_under_its_number(fragments, length, data):
    h = fragments * length
    delay = data.draw(st.integers(0, h))
    schedule, on_their_way, ended = fn.every(h, fragments=fragments, delay=delay), {}, 0
    numbers = 2 if delay == h else 1  # of a fragment
    for t in range(4 * (h + delay)):
        begin, end = schedule(t)
        if begin is not None:
            assert begin not in on_their_way
            assert begin // numbers == t // length % fragments
            on_their_way[begin] = t
        if end is not None:
            assert end == next(iter(on_their_way))  # the oldest
            assert on_their_way.pop(end) == t - delay
            ended += 1
    assert ended >= 2


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("h: expected a whole number of at least 1", {"h": 0}),
        ("h: expected a whole number of at least 1", {"h": 2.5}),
        ("delay: expected at most h=4, but got 5", {"h": 4, "delay": 5}),
        ("h: expected a multiple of the 3 fragments, but got 4", {"h": 4, "fragments": 3}),
        ("fragments: expected a whole number of at least 1", {"h": 4, "fragments": 0}),
        ("delay: expected a whole number of at least 0", {"h": 4, "delay": -1}),
        ("start: expected a whole number of at least 0", {"h": 4, "start": -1}),
    ],
)
def test_every_refuses_what_is_no_schedule_by_name(text, arguments):
    with pytest.raises(ValueError, match=f"^{text}"):
        fn.every(**arguments)


def fed(norms, **options) -> int | None:
    """Return the first compressed step of a schedule that is fed these norms, or None."""
    schedule = fn.freeze_when_stable(**options)
    for step, norm in enumerate(norms):
        if schedule(step) is Phase.COMPRESSED:
            return step
        schedule.observe(step, norm)
    return len(norms) if schedule(len(norms)) is Phase.COMPRESSED else None


def first_stable(norms, distance: int, threshold: float) -> int | None:
    """Return the rule's answer, read off the whole sequence: stable means a ratio of at least the threshold."""
    for t in range(distance, len(norms)):
        low, high = sorted((norms[t], norms[t - distance]))
        if high > 0 and low >= threshold * high:
            return t + 1
    return None


@given(st.lists(st.floats(0.1, 10.0), max_size=40), st.sampled_from([0.0, 0.5, 0.75, 0.9]), st.floats(0.5, 1.0))
def test_freeze_when_stable_compares_with_the_norm_one_over_one_minus_b2_steps_ago(norms, b2, threshold):
    distance = max(1, round(1 / (1 - b2)))
    expected = first_stable(norms, distance, threshold)
    # A ratio that meets the threshold only in rounding may fall on either side.
    for t in range(distance, len(norms)):
        low, high = sorted((norms[t], norms[t - distance]))
        if abs(low / high - threshold) < 1e-12:
            return
    assert fed(norms, b2=b2, threshold=threshold) == expected


def test_the_papers_rule_freezes_once_the_second_moment_stands_still():
    """v_t of a stationary gradient, b2 = 0.999: the ratio over 1000 steps reaches 0.96 where 1 - b2^t has.

    Differs: fn.schedules.FreezeWhenStable: the smaller norm is divided by the larger. The paper's v starts at zero and
        grows, so that the plain ratio is above 1 from the first comparison on.
    """
    norms = [1 - 0.999 ** (t + 1) for t in range(5000)]
    plain = next(t for t in range(1000, 5000) if norms[t] / norms[t - 1000] >= 0.96)
    assert plain == 1000  # the first comparison
    assert norms[1000] / norms[0] > 600
    frozen = fed(norms)
    assert frozen > 2 * plain
    assert norms[frozen - 1001] / norms[frozen - 1] >= 0.96
    assert norms[frozen - 1002] / norms[frozen - 2] < 0.96


def test_a_growing_second_moment_is_not_stable():
    assert fed([2.0**t for t in range(60)], b2=0.9) is None


def test_a_vanished_second_moment_never_freezes():
    assert fed([0.0] * 60, b2=0.9) is None


def loop(schedule, steps):
    """Train on a constant gradient, as a pure loop, until the schedule freezes."""
    tx = fn.onebit_adam(1e-2, b2=0.9, axis="data")
    params = {"w": torch.ones(4), "b": torch.ones(2)}
    state = tx.init(params)
    for step in range(steps):
        if schedule(step) is Phase.COMPRESSED:
            return
        updates, state = tx.update(schedule(step))(fn.tree.map(torch.ones_like, params), state, params)
        params = fn.apply_updates(params, updates)
        # the lines of the docstring
        norm = sum(nu.abs().sum() for leaf in fn.tree.fields(state, "nu") for nu in fn.tree.leaves(leaf))
        schedule.observe(step, float(norm))


def test_a_pure_loop_that_feeds_the_schedule_freezes_as_the_optimizer_does():
    schedule = fn.freeze_when_stable(b2=0.9, min_steps=5)
    loop(schedule, 100)
    params = [torch.nn.Parameter(torch.ones(n)) for n in (4, 2)]
    opt = fn.Optimizer(
        params,
        lambda **k: fn.onebit_adam(axis="data", b2=0.9, **k),
        schedule=fn.freeze_when_stable(b2=0.9, min_steps=5),
        lr=1e-2,
    )
    while opt.phase is Phase.WARMUP:
        for p in params:
            p.grad = torch.ones_like(p)
        opt.step()
    assert schedule.frozen_at == opt.steps > 10


def test_ranks_that_asked_for_other_steps_hold_the_same_schedule():
    asked, fresh = fn.freeze_when_stable(), fn.freeze_when_stable()
    asked(7)
    assert describe(asked) == describe(fresh) != describe(fn.freeze_when_stable(min_steps=1))


def test_min_steps_delays_the_freeze_and_no_more():
    norms = [1.0] * 50
    assert fed(norms, b2=0.9) == 11
    assert fed(norms, b2=0.9, min_steps=30) == 30


def test_steps_that_were_skipped_are_no_sign_of_stability():
    schedule = fn.freeze_when_stable(b2=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step, norm in enumerate([1.0, *[None] * 30, 4.0]):
            assert schedule(step) is Phase.WARMUP
            schedule.observe(step, norm)
    assert schedule.norms == [1.0, 4.0]
    for step, norm in enumerate([4.0, None, 4.0], 32):
        schedule.observe(step, norm)
    assert schedule.frozen_at == 35


def test_a_freeze_is_for_good():
    schedule = fn.freeze_when_stable(b2=0.5)
    for step, norm in enumerate([1.0, 1.0, 1.0, 100.0, 1e4, 1e6]):
        schedule.observe(step, norm)
    assert schedule.frozen_at == 3
    assert [schedule(step) for step in (2, 3, 1000)] == [Phase.WARMUP, Phase.COMPRESSED, Phase.COMPRESSED]


@pytest.mark.parametrize(
    ("name", "value"), [("b2", 1.0), ("b2", -0.1), ("threshold", 0.0), ("threshold", 1.1), ("min_steps", -1)]
)
def test_freeze_when_stable_refuses_arguments_out_of_range_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        fn.freeze_when_stable(**{name: value})


def test_every_seconds_takes_the_steps_that_fit_and_at_least_one():
    schedule, ends = fn.every_seconds(1.0), []
    paces = iter([0.25, 0.0, 3.0, 0.3, 0.1])  # 0: not timed, so as before
    for step in range(16):
        if schedule(step) == fn.Round(0, 0):
            schedule.plan(step + 1, next(paces))
            ends.append(step)
        else:
            assert schedule(step) == fn.Round()
    assert ends == [1, 5, 9, 10, 13]  # the first one, of which nothing is known, has two


def test_progress_of_every_seconds_is_what_entered_exchanges():
    schedule = fn.every_seconds(1.0)
    schedule.plan(2, 0.25)
    schedule.plan(6, entered=0.0, sent=False)  # dropped: its steps count in the next one
    assert (schedule.progress, schedule.begun) == (2.0, 2)
    schedule.plan(10, entered=6.5)
    assert (schedule.progress, schedule.begun) == (8.5, 10)
    assert describe(schedule) == describe(fn.every_seconds(1.0)) != describe(fn.every_seconds(2.0))


@pytest.mark.parametrize("seconds", [0, -1.0, math.inf, math.nan])
def test_every_seconds_refuses_what_is_no_time(seconds):
    with pytest.raises(ValueError, match=r"seconds: expected a number in \(0, inf\)"):
        fn.every_seconds(seconds)


def test_every_seconds_fits_islands_of_methods_with_rounds_only():
    p = [torch.nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match="schedule: is EverySeconds, which does not fit this optimizer"):
        fn.Optimizer(p, partial(fn.onebit_adam, axis="data"), schedule=fn.every_seconds(1.0))
    with pytest.raises(ValueError, match=r"schedule: expected steps .* alike .* use fn\.adapters\.torchft\.optimizer"):
        fn.Optimizer(p, partial(fn.diloco, axis="data"), schedule=fn.every_seconds(1.0))
    with pytest.raises(ValueError, match=r"schedule: expected 2 fragments, as fn.outer has"):
        fn.Optimizer(p, partial(fn.diloco, fragments=2, axis="data"), schedule=fn.every_seconds(1.0))


def test_simulated_islands_take_unequal_steps_by_seconds_that_are_given():
    tx, start = fn.local_sgd(0.5, axis="islands"), torch.ones(3)
    params = start.repeat(2, 1)
    state = fn.simulate(tx.init, "islands", 2)(params)
    ends, states = [], []
    for island, seconds in enumerate([0.25, 0.5]):
        schedule, p, mine = fn.every_seconds(1.0), start, tree.map(lambda x, i=island: x[i], state)
        schedule.plan(0, seconds)
        for step in range(100):
            updates, mine = tx.local_update(torch.full((3,), 0.5 + island), mine, p)
            p = fn.apply_updates(p, updates)
            if schedule(step) != fn.Round():
                break
        assert step + 1 == 1 / seconds
        ends.append(p)
        states.append(mine)
    state, params = tree.map(lambda *xs: torch.stack(xs), *states), torch.stack(ends)

    def exchange(state, params):
        for part in (tx.exchange.difference, tx.exchange.mean, tx.exchange.outer):
            params, state = part(0, state, params)
        return params

    agreed = fn.simulate(exchange, "islands", 2)(state, params)
    assert torch.equal(agreed, params.mean(0).expand(2, 3))
