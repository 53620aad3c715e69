"""A chain that a user composes takes its step in place, as the named optimizer of the same links does."""

from __future__ import annotations

from functools import partial, wraps
from typing import Any

import chains
import in_place_steps
import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, tree
from fn.collectives import hierarchy
from fn.inplace.match import explain, in_place
from fn.inplace.protocol import InPlace

SHAPES = [(37, 5), (7,), (), (0,), (4097,)]


def adamw_by_hand(lr: Any, *, axis: Any = None, front: tuple[fn.Transform, ...] = ()) -> fn.Transform:
    return fn.chain(
        fn.average(axis), *front, fn.scale_by_adam(), fn.add_decayed_weights(1e-2), fn.scale_by_learning_rate(lr)
    )


def onebit_adam_by_hand(lr: Any, *, axis: Any, front: tuple[fn.Transform, ...] = ()) -> fn.Transform:
    sync = fn.compressed_average(axis, fn.sign(block=64))
    return fn.chain(
        fn.average(axis),
        *front,
        fn.scale_by_onebit_adam(0.9, 0.95, 1e-8, sync=sync, bias_correction=True, max_step=3.0),
        fn.add_decayed_weights(0.01),
        fn.scale_by_learning_rate(lr),
    )


def gradient(step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    grads = [torch.randn(shape, generator=generator) for shape in SHAPES]
    if step == 5 and rank == 0:
        grads[1][2] = float("nan")
    return grads


def staged_steps(opt: fn.Optimizer, steps: int) -> int:
    """Take steps; return how many of them were taken in place."""
    with in_place_steps.listed() as in_place:
        for step in range(steps):
            rank = dist.get_rank() if dist.is_initialized() else 0
            for p, g in zip(opt.param_groups[0]["params"], gradient(step, rank), strict=True):
                p.grad = g
            opt.step()
    return sum(in_place)


def train(make: Any, axes: dict[str, int]) -> tuple[int, list[torch.Tensor], int]:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    params = [torch.nn.Parameter(torch.full(shape, 0.5)) for shape in SHAPES]
    with fn.bind(mesh):
        opt = fn.Optimizer(params, make, schedule=fn.freeze_after(3), lr=1e-2)
    taken = staged_steps(opt, 8)
    return taken, [p.detach() for p in params], opt.skipped


two = ranks.Cases(2)


@two
def by_hand_and_by_name() -> list[Any]:
    by_hand = partial(onebit_adam_by_hand, axis="data")
    by_name = partial(fn.onebit_adam, axis="data", weight_decay=0.01)
    return [train(make, {"data": dist.get_world_size()}) for make in (by_hand, by_name)]


def test_a_chain_by_hand_is_the_named_optimizer_bit_for_bit_and_in_place():
    for by_hand, by_name in two.answer("by_hand_and_by_name"):
        assert by_hand[0] == by_name[0] >= 7
        assert by_hand[2] == by_name[2] == 1
        assert all(map(torch.equal, by_hand[1], by_name[1]))


@two
def name_and_tuple_of_it() -> dict[bool, list[Any]]:
    axes = {"data": dist.get_world_size()}
    return {
        servers: [train(partial(chains.onebit_adam, axis=axis, servers=servers), axes) for axis in ("data", ("data",))]
        for servers in (True, False)
    }


@pytest.mark.parametrize("servers", [True, False])
def test_an_axis_in_a_tuple_is_taken_in_place_as_the_same_axis_by_its_name(servers):
    for found in two.answer("name_and_tuple_of_it"):
        (taken, by_name, _), (taken_too, in_tuple, _) = found[servers]
        assert taken == taken_too >= 7
        assert all(map(torch.equal, by_name, in_tuple))


TWO_AXES: dict[str, dict[str, Any]] = {
    "": {},
    "without servers": {"servers": False},
    "blocks": {"codec": fn.int8(), "feedback": fn.damped()},
    "end to end": {"layout": "fused"},
}


def swapped(sent: fn.Ledger) -> dict[str, int]:
    """Return the bytes of exchanges that only steps make, by axis."""
    return {axis: size for (axis, collective), size in sent.sent.items() if collective == "all_to_all"}


def over_two_axes(piece: int) -> dict[str, list[Any]]:
    hierarchy.PIECE = piece
    axes, found = {"local": 2, "node": 2}, {}
    for name, hyper in TWO_AXES.items():
        make = partial(chains.onebit_adam, axis=("local", "node"), **hyper)
        with fn.ledger() as sent:
            ours = train(make, axes)
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        with fn.bind(mesh), fn.ledger() as sent_purely:
            tx, schedule = fn.skip_nonfinite(make(lr=1e-2)), fn.freeze_after(3)
            params = [torch.full(shape, 0.5) for shape in SHAPES]
            state = tx.init(params)
            for step in range(8):
                updates, state = tx.update(schedule(step))(gradient(step, dist.get_rank()), state, params)
                params = fn.apply_updates(params, updates)
        found[name] = [ours, params, [swapped(sent), swapped(sent_purely)]]
    return found


@pytest.mark.parametrize("piece", [1 << 27, 1 << 7])
def test_two_axes_are_taken_in_place_and_send_what_the_pure_step_sends(piece):
    for rank in ranks.run(4, over_two_axes, piece):
        for (taken, params, skipped), expected, (codes, purely) in rank.values():
            assert taken >= 7
            assert skipped == 1
            assert codes == purely
            assert codes["local"]
            for ours, pure in zip(params, expected, strict=True):
                torch.testing.assert_close(ours, pure, rtol=3e-6, atol=3e-6)


def counter() -> fn.Transform:
    """Count updates: a link of a user's own, with a state."""

    def update(updates: Any, state: Any, params: Any) -> Any:
        return tree.map(lambda u: 2 * u, updates), state + 1

    return fn.lift(lambda params: torch.zeros((), dtype=torch.int64), update)


def test_what_stands_in_front_of_the_moments_runs_as_it_is():
    params = [torch.nn.Parameter(torch.full(shape, 0.5)) for shape in SHAPES]
    front = (counter(), fn.clip_by_global_norm(1.0))
    opt = fn.Optimizer(params, partial(adamw_by_hand, front=front), lr=1e-2)
    assert staged_steps(opt, 8) >= 7
    assert int(opt.states[0].inner[1]) == 7  # all but the step that was skipped
    tx = fn.skip_nonfinite(adamw_by_hand(1e-2, front=front))
    plain = [torch.full(shape, 0.5) for shape in SHAPES]
    state = tx.init(plain)
    for step in range(8):
        updates, state = tx.update(Phase.WARMUP)(gradient(step, 0), state, plain)
        plain = fn.apply_updates(plain, updates)
    for ours, pure in zip(params, plain, strict=True):
        torch.testing.assert_close(ours.detach(), pure, rtol=3e-6, atol=3e-6)


def test_decays_add_up_and_rates_multiply():
    tx = fn.chain(
        fn.scale_by_adam(), fn.add_decayed_weights(0.1), fn.add_decayed_weights(0.2),
        fn.scale_by_learning_rate(0.5), fn.scale_by_learning_rate(torch.tensor(-0.1)),
    )  # fmt: skip
    tx = fn.skip_nonfinite(tx)
    ours, plain = [torch.ones(9)], [torch.ones(9)]
    state = tx.init(ours)
    found = in_place(tx.update(Phase.WARMUP))
    assert isinstance(found, InPlace)
    grads = [torch.linspace(-1, 1, 9)]
    updates, _ = tx.update(Phase.WARMUP)(grads, state, plain)
    found.stage(grads, state, ours).commit()
    torch.testing.assert_close(ours[0], fn.apply_updates(plain, updates)[0])


def test_explain_says_which_phase_is_fast_and_which_link_is_in_the_way():
    assert explain(fn.onebit_adam(axis="data")) == "warmup      in place\ncompressed  in place"
    words = explain(fn.lamb())
    assert "warmup      link by link: expected weight decays, then rates, behind scale_by_adam, but got scale" in words
    assert words.endswith("learning rates follow each other")


def test_explain_is_a_command(tmp_path):
    (tmp_path / "train.py").write_text("import fn\ndef make(axis=None):\n    return fn.adamw(axis=axis)\n")
    found = ranks.python("-m", "fn", "explain", "train:make", "--axis", "data", cwd=tmp_path)
    assert found.stdout == "warmup      in place\n", found.stderr
    wrong = ranks.python("-m", "fn", "explain", "train.make", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "make: expected module:function, such as train:make_optimizer, but got 'train.make'" in wrong.stderr


def halved(tx: fn.Transform) -> fn.Transform:
    """Return a transform whose updates somebody has wrapped, as `functools.wraps` does."""

    def wrapped(update: fn.UpdateFn) -> fn.UpdateFn:
        @wraps(update)
        def half(updates: Any, state: Any, params: Any) -> Any:
            moves, after = update(updates, state, params)
            return tree.map(lambda x: x / 2, moves), after

        return half

    return fn.Transform(tx.init, *map(wrapped, (tx.warmup_update, tx.compressed_update, tx.local_update)))


WRAPPED = {
    "a link": lambda lr: fn.chain(fn.scale(1.0), halved(fn.scale_by_learning_rate(lr))),
    "a link with kernels": lambda lr: fn.chain(halved(fn.scale_by_adam()), fn.scale_by_learning_rate(lr)),
    "a chain": lambda lr: halved(fn.chain(fn.scale(1.0), fn.scale_by_learning_rate(lr))),
}


@pytest.mark.parametrize("make", WRAPPED.values(), ids=WRAPPED)
def test_what_somebody_wraps_around_an_update_takes_part_in_the_step(make):
    p = torch.nn.Parameter(torch.zeros(2))
    p.grad = torch.ones(2)
    fn.Optimizer([p], lambda lr: fn.skip_nonfinite(make(lr)), lr=1.0).step()
    torch.testing.assert_close(p.detach(), torch.full((2,), -0.5))
