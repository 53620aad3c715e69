"""`fn.late`: directions that arrive one step late, against a loop by hand and real ranks."""

from __future__ import annotations

import inspect
import itertools
import json
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor

import fn
from fn import Phase, Round, roles, tree

FOLDER = Path(__file__).parents[1] / "golden"
sys.path.insert(0, str(FOLDER))


ROWS = json.loads((FOLDER / "muon2" / "index_late.json").read_text())["cases"]


def int4_adamw(lr: Any = 1e-3, *, axis: str) -> fn.Transform:
    return coded_adamw(fn.int4(), lr, axis=axis)


def coded_adamw(codec: fn.Codec, lr: Any = 1e-3, *, axis: str) -> fn.Transform:
    mean = fn.average(axis), fn.compressed_average(axis, codec, fn.damped())
    return fn.chain(*mean, fn.scale_by_adam(), fn.add_decayed_weights(0.01), fn.scale_by_learning_rate(lr))


METHODS: dict[str, Any] = {
    "adamw": fn.adamw,
    "adamw, int4": int4_adamw,
    "adamw, int8": partial(coded_adamw, fn.int8()),
    "onebit_adam": fn.onebit_adam,
    "powersgd_adamw": fn.powersgd_adamw,
    "dion": fn.dion,
    "lion_vote": fn.lion_vote,
    "sign_muon": fn.sign_muon,
    "muon": fn.muon,
    "muon, replicated": partial(fn.muon, owned=False),
    "muon, int8": partial(fn.muon, codec=fn.int8()),
    "lamb": fn.lamb,
}
SHAPES = [(6, 4), (5,), (4, 6), (6, 4)]
SCHEDULE = fn.every(1, delay=1, start=2)
two = ranks.Cases(2)


def start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def gradients(t: int, rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 * t + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def by_optimizer(make: Any, steps: int, **more: Any) -> fn.Optimizer:
    params = [torch.nn.Parameter(p) for p in start()]
    opt = fn.Optimizer(params, partial(make, axis="data"), schedule=SCHEDULE, lr=0.01, **more)
    for t in range(steps):
        take(opt, gradients(t, dist.get_rank()))
    return opt


def take(opt: fn.Optimizer, grads: list[Tensor]) -> None:
    members = [p for group in opt.param_groups for p in group["params"]]
    for p, g in zip(members, grads, strict=True):
        p.grad = g
    opt.step()


@two
def pure_and_flying() -> dict[str, list[bool]]:
    """Go on from a warm-up, whose steps in place round otherwise, by the optimizer and by the pure function."""
    found = {}
    for name, make in METHODS.items():
        with fn.bind({"data": dist.group.WORLD}):
            opt = by_optimizer(fn.late(make), 2)
            params = [p.detach().clone() for p in opt.param_groups[0]["params"]]
            first, state = params, tree.map(torch.clone, opt.states[0])
            tx = fn.late(make)(torch.tensor(0.01), axis="data")
            for t in range(2, 9):
                grads = gradients(t, dist.get_rank())
                moves, state = tx.update(SCHEDULE(t))(grads, state, params)
                params = fn.apply_updates(params, moves)
                take(opt, [g.clone() for g in grads])
        pairs = zip(params, opt.param_groups[0]["params"], strict=True)
        states = zip(tree.leaves(state), tree.leaves(opt.states[0]), strict=True)
        alike = [torch.equal(x, y.detach()) for x, y in (*pairs, *states)]
        found[name] = [*alike, not any(map(torch.equal, params, first))]
    return found


@pytest.mark.parametrize("name", METHODS)
def test_real_ranks_agree_with_the_pure_loop_bit_for_bit(name: str) -> None:
    """Their messages fly behind the next step, and the pure function takes each at once."""
    for of_rank in two.answer("pure_and_flying"):
        assert all(of_rank[name]), of_rank[name]


def behind_a_link(lr: Any, axis: str) -> fn.Transform:
    """Return AdamW a step late behind a link that changes nothing, so that no kernel takes its local step."""
    return fn.chain(fn.stateless(lambda u, params: u), fn.late(fn.adamw)(lr, axis=axis))


@two
def with_and_without_the_link() -> tuple[list[Tensor], ...]:
    with fn.bind({"data": dist.group.WORLD}):
        both = [by_optimizer(make, 8) for make in (behind_a_link, fn.late(fn.adamw))]
        [opt.states for opt in both]  # lands what is on its way
    found, right = ([p.detach() for p in opt.param_groups[0]["params"]] for opt in both)
    return found, right


def test_a_local_step_that_goes_link_by_link_leaves_what_is_on_its_way_as_it_was() -> None:
    for found, right in two.answer("with_and_without_the_link"):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-7)


@two
def on_shards() -> bool:
    rank, tx = dist.get_rank(), fn.late(fn.muon)(0.01, shards="shard", codec=fn.int8())
    whole = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    piece = whole.chunk(2)[rank].clone()
    with fn.bind({"shard": dist.group.WORLD}):
        params, state = [piece], tx.init([piece])
        p = torch.nn.Parameter(piece.clone())
        make = partial(fn.late(fn.muon), shards="shard", codec=fn.int8())
        opt = fn.Optimizer([p], make, schedule=SCHEDULE, lr=0.01)
        for t in range(8):
            g = torch.randn(8, 4, generator=torch.Generator().manual_seed(t)).chunk(2)[rank].clone()
            moves, state = tx.update(SCHEDULE(t))([g], state, params)
            params = fn.apply_updates(params, moves)
            p.grad = g.clone()
            opt.step()
        opt.states  # noqa: B018  # lands what is on its way
    return torch.equal(params[0], p.detach()) and not torch.equal(p.detach(), piece)


def test_muon_on_shards_is_late_and_agrees_with_the_pure_loop() -> None:
    assert two.answer("on_shards") == [True, True]


def named(make: Any, **more: Any) -> Any:
    return lambda: fn.late(make(axis="data", **more))


REFUSED: dict[str, tuple[Any, str]] = {
    "correction": (lambda: fn.late(fn.adamw, correction=1.5), r"correction: expected a number in \[0, 1\], but"),
    "twice": (lambda: fn.late(fn.late(fn.adamw)), "tx: expected a transform that is in time, but got one with fn.late"),
    "late inside": (lambda: fn.late(fn.late(fn.adamw(axis="data"))), "tx: .* leave out one of the two fn.late"),
    "a rate in front": (
        lambda: fn.late(fn.chain(fn.scale_by_learning_rate(0.1), fn.average("data"))),
        "last link that communicates, average, but got scale_by_learning_rate; put it behind that link, or the",
    ),
    "a decay inside": (
        lambda: fn.late(fn.owned(fn.chain(fn.scale_by_muon(), fn.add_decayed_weights(0.1)), "data")),
        "last link that communicates, owned, but got add_decayed_weights; put it behind",
    ),
    "a cautious decay inside of a mask": (
        lambda: fn.late(fn.chain(fn.mask(fn.add_decayed_weights(0.1, cautious=True), [True]), fn.average("data"))),
        "but got add_decayed_weights",
    ),
    "a rate on shards": (lambda: fn.late(fn.unsharded(fn.scale_by_learning_rate(0.1), "shard")), "unsharded, but got"),
    "loco_adamw": (named(fn.loco_adamw), "but got sharded, add_decayed_weights"),
    "sharded_onebit_adam": (named(fn.sharded_onebit_adam), "but got sharded"),
    "zero_one_adam": (named(fn.zero_one_adam), "but got scale_by_zero_one_adam"),
    "onebit_lamb": (named(fn.onebit_lamb), "but got scale_by_onebit_lamb"),
    "diloco": (named(fn.diloco), "tx: expected a transform that is taken in phases, but got one with rounds"),
    "nothing communicates": (
        lambda: fn.late(fn.adamw()),
        "tx: expected a link that communicates, but got none; pass axis=...; .* such as DDP or FSDP2, cannot be late",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_late_is_refused_by_name_with_the_cure(name: str) -> None:
    make, text = REFUSED[name]
    with pytest.raises(ValueError, match=text):
        make()


def opened(make: Any = fn.adamw, **more: Any) -> tuple[Any, fn.Optimizer]:
    p = torch.nn.Parameter(torch.ones(2, 2))
    late = fn.late(make, **more)
    return p, fn.Optimizer([p], partial(late, axis="data"), schedule=fn.every(1, delay=1), lr=0.5)


@pytest.mark.parametrize(
    "schedule", [None, fn.freeze_after(3), fn.every(2, delay=1), fn.every(1), fn.every(2, fragments=2, delay=1)]
)
def test_a_schedule_that_is_in_time_or_later_is_refused(schedule: Any) -> None:
    p = torch.nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=r"schedule: expected fn.every\(1, delay=1, start=n\), but got"):
        fn.Optimizer([p], partial(fn.late(fn.adamw), axis="data"), schedule=schedule)


def test_the_signature_is_that_of_the_function() -> None:
    assert inspect.signature(fn.late(fn.muon)) == inspect.signature(fn.muon)


@pytest.mark.parametrize("correction", [0.0, 0.5, 1.0])
def test_the_first_step_applies_nothing_and_the_correction_begins_with_the_second_update(correction: float) -> None:
    tx = fn.late(fn.chain(fn.average("data"), fn.scale_by_learning_rate(0.5)), correction=correction)
    schedule, grads, params = fn.every(1, delay=1), [1.0, 2.0, 4.0, 8.0], torch.zeros(1)
    state, path, expected, x, last = tx.init(params), [], [], 0.0, None
    for t, g in enumerate(grads):
        moves, state = tx.update(schedule(t))(torch.tensor([g]), state, params)
        params = fn.apply_updates(params, moves)
        path.append(float(params))
        if t:
            u = 0.5 * grads[t - 1]
            x -= u + (0.0 if last is None else correction * (u - last))
            last = u
        expected.append(x)
    assert path == expected


def test_the_warm_up_is_in_time_and_counts_are_of_updates() -> None:
    tx, schedule = fn.late(fn.adamw)(0.1, axis="data"), fn.every(1, delay=1, start=2)
    params, state = torch.zeros(2), fn.late(fn.adamw)(0.1, axis="data").init(torch.zeros(2))
    ages = []
    for t in range(5):
        before = params
        moves, state = tx.update(schedule(t))(torch.ones(2), state, params)
        params = fn.apply_updates(params, moves)
        ages.append((int(roles.find(state, "ages")[0][0]), not torch.equal(before, params)))
    assert ages == [(1, True), (2, True), (2, False), (3, True), (4, True)]


def test_a_direction_that_is_not_finite_moves_nothing_counts_once_and_leaves_the_round_that_begins_alone() -> None:
    tx = fn.late(fn.chain(fn.average("data"), fn.trace(0.5), fn.scale_by_learning_rate(1.0)))
    schedule, params = fn.every(1, delay=1), torch.zeros(1)
    state, path = tx.init(params), []
    for t, g in enumerate([1.0, float("nan"), 2.0, 4.0]):
        moves, state = tx.update(schedule(t))(torch.tensor([g]), state, params)
        params = fn.apply_updates(params, moves)
        path.append((float(params), int(state.inner.left_out)))
    # Updates: 1; none; 0.5 + 2 = 2.5, corrected against 1, the last that was applied: 2.5 + 1.5.
    assert path == [(0.0, 0), (-1.0, 0), (-1.0, 1), (-5.0, 1)]


@two
def train_two_groups() -> Any:
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    with fn.bind({"data": dist.group.WORLD}):
        make = partial(fn.late(fn.adamw), axis="data")
        opt = fn.Optimizer([{"params": [p]} for p in params], make, schedule=fn.every(1, delay=1), lr=0.1)
    path = []
    for t in range(5):
        grads = [torch.full((3,), 1.0 + dist.get_rank() + t) for _ in params]
        if t == 1 and dist.get_rank() == 1:
            grads[1][0] = float("inf")
        take(opt, grads)
        path.append(([float(p.detach()[0]) for p in params], opt.skipped))
    return path


def test_a_skip_is_seen_by_all_ranks_and_by_all_groups() -> None:
    first, second = two.answer("train_two_groups")
    assert first == second
    assert [skipped for _, skipped in first] == [0, 0, 1, 1, 1]
    assert first[2][0] == first[1][0] != first[3][0]


def test_where_every_rate_is_0_nothing_moves_and_the_next_update_is_corrected_against_0() -> None:
    p, opt = opened(lambda lr, axis: fn.chain(fn.average(axis), fn.scale_by_learning_rate(lr)))
    path = []
    for lr in (0.5, 0.5, 0.0, 0.5, 0.5):
        opt.param_groups[0]["lr"] = lr
        take(opt, [torch.ones(2, 2)])
        path.append(float(p.detach()[0, 0]))
    assert path == [1.0, 0.5, 0.5, -0.5, -1.0]


def test_a_param_group_that_joins_begins_with_its_own_first_update() -> None:
    _, opt = opened(lambda lr, axis: fn.chain(fn.average(axis), fn.scale_by_learning_rate(lr)))
    for _ in range(3):
        take(opt, [torch.ones(2, 2)])
    q = torch.nn.Parameter(torch.ones(2))
    opt.add_param_group({"params": [q]})
    path = []
    for g in (1.0, 2.0, 2.0):
        take(opt, [torch.ones(2, 2), torch.full((2,), g)])
        path.append(float(q.detach()[0]))
    assert path == [1.0, 0.5, -1.0]  # nothing; 0.5; 1.0 + (1.0 - 0.5)


RESUMED = ("adamw", "muon, int8", "sign_muon", "onebit_adam")


@pytest.mark.parametrize("name", RESUMED)
def test_training_goes_on_bit_for_bit_from_a_state_that_was_saved(name: str) -> None:
    assert all(found[name] for found in two.answer("resumed"))


@two
def resumed() -> dict[str, bool]:
    return {name: resume(name) for name in RESUMED}


def resume(name: str) -> bool:
    with fn.bind({"data": dist.group.WORLD}):
        opt = by_optimizer(fn.late(METHODS[name]), 6)
        saved = {path: x.clone() for path, x in opt.state_dict().items()}
        params = [torch.nn.Parameter(p.detach().clone()) for p in opt.param_groups[0]["params"]]
        other = fn.Optimizer(params, partial(fn.late(METHODS[name]), axis="data"), schedule=SCHEDULE, lr=0.5)
    other.load_state_dict(saved)
    for t in range(6, 10):
        for each in (opt, other):
            take(each, gradients(t, dist.get_rank()))
    pairs = zip(opt.param_groups[0]["params"], params, strict=True)
    return all(torch.equal(p, q) for p, q in pairs) and opt.steps == other.steps == 10


def extra_bytes(correction: float) -> float:
    """Return bytes a parameter of the state above those of the method that is in time."""
    params, lr = [torch.zeros(64, 64)], torch.tensor(0.1)
    size = lambda tx: sum(x.numel() * x.element_size() for x in tree.leaves(tx.init(params)))  # noqa: E731
    late = fn.late(fn.adamw, correction=correction)(lr, axis="data")
    return (size(late) - size(fn.adamw(lr, axis="data"))) / (64 * 64)


def test_the_state_takes_at_most_12_bytes_a_parameter_more() -> None:
    assert extra_bytes(1.0) <= 12.01
    assert extra_bytes(0.0) <= 8.01


@pytest.mark.parametrize("kind", ["own", "a view", "transposed"])
def test_a_gradient_is_copied_and_stays_where_it_is(kind: str) -> None:
    p, opt = opened()
    g = {
        "own": torch.full((2, 2), 3.0),
        "a view": torch.arange(8.0)[:4].view(2, 2),
        "transposed": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t(),
    }[kind]
    p.grad, wanted = g, g.clone()
    opt.step()
    kept = roles.find(opt.units[0].state, "taken")[0][0]
    assert p.grad is g
    opt.zero_grad(set_to_none=False)
    assert torch.equal(kept, wanted)


TRAVELS = threading.Event()
"""Set where a mean that is on its way may read what it averages."""


class Slow(fn.Optimizer):
    """An optimizer whose means read their gradients when the local step behind them has been taken."""

    def exchange(self, round_: fn.Round) -> None:
        TRAVELS.set()
        super().exchange(round_)
        TRAVELS.clear()


def waits(updates: Any, params: Any) -> Any:
    if threading.current_thread() is not threading.main_thread():
        assert TRAVELS.wait(ranks.LIMIT)
    return tree.map(torch.clone, updates)


def slow_descent(lr: Any, axis: str) -> fn.Transform:
    step = fn.stateless(waits, elementwise=True), fn.average(axis), fn.scale_by_learning_rate(lr)
    return fn.late(fn.chain(*step), correction=0.0)


def parts_of_slow_descent(lr: Any, axis: str) -> fn.Transform:
    return fn.partition({"x": slow_descent(lr, axis)}, lambda params: ["x"] * len(params))


AROUND = {"alone": slow_descent, "in a partition, link by link": parts_of_slow_descent}
FILLED: dict[str, Any] = {
    "a new tensor": lambda p, buffer, g: setattr(p, "grad", g.clone()),
    "a buffer": lambda p, buffer, g: setattr(p, "grad", buffer.copy_(g)),
    "a buffer that stays in place, as a captured graph's": lambda p, buffer, g: p.grad.copy_(g),
    "by .data": lambda p, buffer, g: p.grad.data.copy_(g),
    "by NumPy": lambda p, buffer, g: np.copyto(p.grad.numpy(), g.numpy()),
    "a view of a buffer": lambda p, buffer, g: setattr(p, "grad", buffer.copy_(g).view(2)),
}


def refilled() -> dict[tuple[str, str], list[float]]:
    found = {}
    for around, how in itertools.product(AROUND, FILLED):
        p, buffer = torch.nn.Parameter(torch.zeros(2)), torch.zeros(2)
        with fn.bind({"data": dist.group.WORLD}):
            opt = Slow([p], partial(AROUND[around], axis="data"), schedule=fn.every(1, delay=1), lr=1.0)
        p.grad, path = buffer, []
        for t in range(5):
            FILLED[how](p, buffer, torch.full((2,), 10.0**t * (0.5 + dist.get_rank())))
            opt.step()
            path.append(float(p.detach()[0]))
        found[around, how] = path
    return found


def test_a_buffer_that_is_filled_anew_while_its_gradient_travels_does_not_change_it() -> None:
    """In a partition also a gradient of its own was overwritten by the next one's, in the memory of the state."""
    for of_rank in ranks.run(2, refilled):
        for case, path in of_rank.items():
            assert path == [0.0, -1.0, -11.0, -111.0, -1111.0], case


def clip_by_hand(correction: float) -> list[float]:
    x, last, path, grads = torch.tensor([1.0, 1.0, 1.0, 1.0]), None, [], []
    for t in range(4):
        if grads:
            g = grads[-1]
            u = 0.5 * g * min(1.0, 1.0 / (float(g.norm()) + 1e-6))
            x = x - u - (0 if last is None else correction * (u - last))
            last = u
        path.append(float(x[0]))
        grads.append(torch.full((4,), 1.0 + t))
    return path


def test_max_norm_clips_the_mean_that_has_arrived_by_the_norm_over_all_groups() -> None:
    params = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]

    def sgd(lr: Any, axis: str) -> fn.Transform:
        return fn.chain(fn.average(axis), fn.scale_by_learning_rate(lr))

    groups = [{"params": [p]} for p in params]
    make = partial(fn.late(sgd), axis="data")
    opt = fn.Optimizer(groups, make, schedule=fn.every(1, delay=1), lr=0.5, max_norm=1.0)
    path = []
    for t in range(4):
        take(opt, [torch.full((2,), 1.0 + t) for _ in params])
        path.append(float(params[1].detach()[0]))
    torch.testing.assert_close(path, clip_by_hand(1.0), rtol=1e-6, atol=1e-6)


@two
def clipped_in_codes() -> Any:
    with fn.bind({"data": dist.group.WORLD}):
        opt = by_optimizer(fn.late(int4_adamw), 8, max_norm=0.5)
        plain = by_optimizer(fn.late(int4_adamw), 8)
    moments = [roles.find(each.states[0], "second_moment")[0][0] for each in (opt, plain)]
    return [p.detach().clone() for p in opt.param_groups[0]["params"]], [float(x.sum()) for x in moments]


def test_max_norm_scales_what_travels_in_codes_alike_on_all_ranks() -> None:
    (first, (clipped, plain)), (second, _) = two.answer("clipped_in_codes")
    assert all(map(torch.equal, first, second))
    assert clipped < 0.1 * plain  # gradients of about 8 in norm


def test_phases_and_rounds() -> None:
    tx = fn.late(fn.onebit_adam)(0.1, axis="data")
    assert tx.needs_warmup == {Phase.COMPRESSED, Phase.LOCAL}
    params = torch.zeros(2)
    moves, _ = tx.update(Round(0, None))(torch.ones(2), tx.init(params), params)
    assert torch.equal(fn.apply_updates(params, moves), params)
