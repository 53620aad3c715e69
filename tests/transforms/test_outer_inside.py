"""`fn.outer` around an inner optimizer that communicates within an island, over an axis of its own."""

from __future__ import annotations

import copy
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, Round, tree
from fn.adapters import checkpoint
from fn.adapters.optim import exchange_header

SHAPES = {"a": (4, 3), "b": (4, 3), "c": (3, 5)}
ISLANDS, RANKS, STEPS, LR, OUTER_LR, MU = 2, 2, 12, 0.05, 0.7, 0.9
TRIPLES = [(3.4445, -4.7750, 2.0315)] * 5
LATE = [fn.every(3, start=2), fn.every(3, delay=1, start=2), fn.every(4, fragments=2, delay=1)]


def mean(axis: str) -> fn.Transform:
    return fn.compressed_average(axis, fn.identity(), fn.off())


def muon(lr: Any, axis: str = "data") -> fn.Transform:
    return fn.owned(
        fn.chain(
            fn.trace(MU), fn.orthogonalize(coefficients=TRIPLES, scale=None), fn.scale_by_learning_rate(lr)
        ),
        axis,
    )  # fmt: skip


def adam(lr: Any, axis: str = "data") -> fn.Transform:
    """Return a chain whose gradients travel in codes within an island; a link in front averages those of a warm-up."""
    codes = fn.compressed_average(axis, fn.int8())
    return fn.chain(codes, fn.scale_by_adam(), fn.add_decayed_weights(0.1), fn.scale_by_learning_rate(lr))


def make(lr: Any = LR, inner: Any = muon, fragments: int = 1, codec: fn.Codec | None = None) -> fn.Transform:
    outer_tx = fn.chain(fn.trace(MU, nesterov=True), fn.scale_by_learning_rate(OUTER_LR))
    sync = mean("islands") if codec is None else fn.compressed_average("islands", codec)
    front = fn.average("islands" if inner is muon else ("data", "islands"))
    return fn.chain(front, fn.outer(inner(lr), outer_tx, sync, fragments=fragments))


INNER: dict[str, Any] = {
    "owned": make,
    "in codes": partial(make, inner=adam),
    "in codes, signs across": partial(make, inner=adam, codec=fn.sign()),
}


def start(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {k: torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for k, shape in SHAPES.items()}


def gradients(step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return those of all islands and ranks, (islands, ranks, ...)."""
    generator = torch.Generator().manual_seed(100 + step)
    lead = (ISLANDS, RANKS)
    found = {k: torch.randn((*lead, *s), generator=generator, dtype=torch.float64) for k, s in SHAPES.items()}
    return tree.map(lambda x: x.to(dtype), found)


def on_islands(f: Any, dims: Any, out: Any) -> Any:
    inside = fn.simulate(f, "data", RANKS, in_dims=dims, out_dims=out)
    return fn.simulate(inside, "islands", ISLANDS, in_dims=dims, out_dims=out)


def simulated(tx: fn.Transform, phases: list[Any], params: Any, grads: list[Any]) -> list[tuple[Any, Any]]:
    """Return params and states of all ranks behind each step."""
    dims = fn.rank_dims(tx.init(params))
    state = on_islands(tx.init, None, dims)(params)
    params, found = tree.map(lambda p: p.expand(ISLANDS, RANKS, *p.shape).clone(), params), []

    def step(phase: Any, g: Any, s: Any, p: Any) -> Any:
        updates, s = tx.update(phase)(g, s, p)
        return fn.apply_updates(p, updates), s

    for phase, g in zip(phases, grads, strict=True):
        params, state = on_islands(partial(step, phase), (0, dims, 0), (0, dims))(g, state, params)
        found.append((params, state))
    return found


def orthogonal(m: Tensor) -> Tensor:
    x = m / (m.norm() + 1e-8)
    for a, b, c in TRIPLES:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@pytest.mark.parametrize("schedule", LATE)
def test_muon_owned_in_islands_is_a_loop_in_float64(schedule: Any) -> None:
    """Momentum of the mean within an island, Nesterov momentum of the mean across, and all ranks of an island alike."""
    wide, names, parts = torch.float64, [*SHAPES], schedule.fragments
    grads = [gradients(t, wide) for t in range(STEPS)]
    phases = [schedule(t) for t in range(STEPS)]
    found = simulated(make(fragments=parts), phases, start(wide), grads)
    here = [start(wide) for _ in range(ISLANDS)]
    momenta = [tree.map(torch.zeros_like, start(wide)) for _ in range(ISLANDS)]
    anchor, buffer, pending = start(wide), tree.map(torch.zeros_like, start(wide)), dict[str, Tensor]()
    exchanges = 0
    for phase, g, (params, state) in zip(phases, grads, found, strict=True):
        for i, (p, m) in enumerate(zip(here, momenta, strict=True)):
            for k in names:
                m[k] = MU * m[k] + (g[k].mean((0, 1)) if phase is Phase.WARMUP else g[k][i].mean(0))
                p[k] = p[k] - LR * orthogonal(m[k])
        if phase is Phase.WARMUP:
            anchor = dict(here[0])
        if isinstance(phase, Round) and phase.begin is not None:
            for k in names[phase.begin :: parts]:
                pending[k] = sum(anchor[k] - p[k] for p in here) / ISLANDS
        if isinstance(phase, Round) and phase.end is not None:
            for k in [k for k in names[phase.end :: parts] if k in pending]:
                d, exchanges = pending.pop(k), exchanges + 1
                buffer[k] = MU * buffer[k] + d
                anchor[k] = anchor[k] - OUTER_LR * (d + MU * buffer[k])
                for p in here:
                    p[k] = anchor[k]
        for k in names:
            wanted = torch.stack([p[k] for p in here])[:, None].expand(-1, RANKS, *SHAPES[k])
            torch.testing.assert_close(params[k], wanted, rtol=0, atol=1e-12)
            torch.testing.assert_close(state[1].anchor[k], anchor[k], rtol=0, atol=1e-12)
    assert exchanges >= 2 * len(names)


def pure(tx: fn.Transform, phases: list[Any]) -> list[Any]:
    """Return params and anchor on this rank behind each step."""
    params, found = start(), []
    state = tx.init(params)
    for t, phase in enumerate(phases):
        g = tree.map(lambda x: x.flatten(0, 1)[dist.get_rank()], gradients(t))
        updates, state = tx.update(phase)(g, state, params)
        params = fn.apply_updates(params, updates)
        found.append((params, state[1].anchor))
    return found


def world() -> Any:
    return init_device_mesh("cpu", (ISLANDS, RANKS), mesh_dim_names=("islands", "data"))


def build(name: str, **more: Any) -> tuple[list[torch.nn.Parameter], fn.Optimizer]:
    params = [torch.nn.Parameter(p.clone()) for p in start().values()]
    with fn.bind(world()):
        return params, fn.Optimizer(params, INNER[name], **{"schedule": LATE[0], "lr": LR, **more})


def give(params: list[torch.nn.Parameter], step: int) -> None:
    for p, g in zip(params, gradients(step).values(), strict=True):
        p.grad = g.flatten(0, 1)[dist.get_rank()].clone()


def train(params: list[torch.nn.Parameter], opt: fn.Optimizer, steps: range) -> list[list[Tensor]]:
    found = []
    for step in steps:
        give(params, step)
        opt.step()
        found.append([p.detach().clone() for p in params])
    return found


four = ranks.Cases(ISLANDS * RANKS)


@four
def of_all_inner() -> dict[str, Any]:
    found = {}
    with fn.bind(world()):
        for name, of in INNER.items():
            for i, schedule in enumerate(LATE):
                found[name, i] = pure(of(fragments=schedule.fragments), [schedule(t) for t in range(STEPS)])
    return found


@pytest.mark.parametrize("late", range(len(LATE)))
@pytest.mark.parametrize("name", INNER)
def test_process_groups_do_what_simulated_ranks_do(name: str, late: int) -> None:
    schedule = LATE[late]
    phases = [schedule(t) for t in range(STEPS)]
    found = simulated(INNER[name](fragments=schedule.fragments), phases, start(), [*map(gradients, range(STEPS))])
    for rank, answers in enumerate(four.answer("of_all_inner")):
        i, j = divmod(rank, RANKS)
        for (params, state), (here, anchor) in zip(found, answers[name, late], strict=True):
            for k in SHAPES:
                assert torch.equal(params[k][i, j], here[k]), (k, (params[k][i, j] - here[k]).abs().max())
                assert torch.equal(state[1].anchor[k], anchor[k])


@four
def of_the_optimizer() -> dict[str, Any]:
    found = {}
    for name in INNER:
        params, opt = build(name)
        books = []
        with mock.patch.object(exchange_header, "header", wraps=exchange_header.header) as gather:
            for step in range(STEPS):
                give(params, step)
                with fn.ledger() as sent:
                    opt.step()
                books.append({axis for axis, _ in sent.sent})
        headers = {call.args[1] for call in gather.call_args_list}
        found[name] = [p.detach().clone() for p in params], headers, books
    return found


@pytest.mark.parametrize("name", INNER)
def test_the_optimizer_trains_so_and_sends_to_other_islands_in_exchanges_only(name: str) -> None:
    for rank, answers in enumerate(four.answer("of_the_optimizer")):
        params, headers, books = answers[name]
        wanted = four.answer("of_all_inner")[rank][name, 0][-1][0]
        for p, x in zip(params, wanted.values(), strict=True):
            torch.testing.assert_close(p, x, rtol=1e-5, atol=1e-6)
        assert headers == {("islands",)}
        for step, axes in enumerate(books):
            phase = LATE[0](step)
            assert axes == ({"data"} if phase == Round() else {"data", "islands"}), (step, phase)


@four
def of_states() -> dict[str, Any]:
    found = {}
    for name in INNER:
        params, opt = build(name, schedule=LATE[1])
        train(params, opt, range(6))  # in the middle of a round
        saved, here = copy.deepcopy(opt.state_dict()), [p.detach().clone() for p in params]
        further = train(params, opt, range(6, STEPS))
        again, other = build(name, schedule=LATE[1])
        other.load_state_dict(saved)
        with torch.no_grad():
            for p, x in zip(again, here, strict=True):
                p.copy_(x)
        found[name] = further, train(again, other, range(6, STEPS))
    return found


@pytest.mark.parametrize("name", INNER)
def test_a_state_dict_of_each_rank_goes_on_bit_for_bit(name: str) -> None:
    for answers in four.answer("of_states"):
        for ours, theirs in zip(*answers[name], strict=True):
            assert all(map(torch.equal, ours, theirs))


def to_a_folder(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in INNER:
        params, opt = build(name)
        train(params, opt, range(6))
        try:
            checkpoint.save(f"{folder}/{name}", opt)
        except ValueError as error:
            found[name] = str(error)
            continue
        further = train(params, opt, range(6, STEPS))
        again, other = build(name)
        checkpoint.load(f"{folder}/{name}", other)
        found[name] = further, train(again, other, range(6, STEPS))
    return found


def test_a_folder_keeps_islands_in_codes_and_refuses_tensors_that_each_island_owns(tmp_path: Path) -> None:
    for found in ranks.run(4, to_a_folder, str(tmp_path)):
        assert "got fn.owned over 'data', once in each island; save each rank's state_dict()" in found.pop("owned")
        for ours, theirs in found.values():
            for a, b in zip(ours, theirs, strict=True):
                assert all(map(torch.equal, a, b))


@four
def of_what_one_rank_lacks() -> dict[str, Any]:
    """Take a local step with a NaN on one rank, and one without a gradient on one rank."""
    found = {}
    for name in INNER:
        params, opt = build(name, schedule=fn.every(20))
        steps, rank = [], dist.get_rank()
        for step in range(3):
            give(params, step)
            if step == 1 and rank == 3:
                params[1].grad[0, 0] = torch.nan
            if step == 2 and rank == 0:
                params[0].grad = None
            opt.step()
            steps.append(([p.detach().clone() for p in params], opt.dropped))
        found[name] = steps
    return found


@pytest.mark.parametrize("name", INNER)
def test_the_ranks_of_an_island_leave_out_a_step_together(name: str) -> None:
    found = [answers[name] for answers in four.answer("of_what_one_rank_lacks")]
    for first, second in (found[:2], found[2:]):
        for (ours, dropped), (theirs, also) in zip(first, second, strict=True):
            assert dropped == also
            assert all(map(torch.equal, ours, theirs))
    for rank, steps in enumerate(found):
        left_out, moved = [all(map(torch.equal, steps[i][0], steps[i - 1][0])) for i in (1, 2)]
        assert (left_out, moved, steps[-1][1]) == (rank > 1, False, int(rank > 1))
        assert not torch.equal(steps[1][0][0], steps[2][0][0])


@four
def of_a_ruined_island() -> dict[str, Any]:
    """Take rounds, before the first of which the params of an island are NaN, and before the third those of a rank."""
    found = {}
    for name in INNER:
        params, opt = build(name, schedule=fn.every(2))
        if dist.get_rank() > 1:
            params[0].data.fill_(torch.nan)
        train(params, opt, range(2))
        first = [p.detach().clone() for p in params]
        train(params, opt, range(2, 4))
        if dist.get_rank() == 3:
            params[0].data.fill_(torch.nan)
        train(params, opt, range(4, 8))
        found[name] = first, [p.detach().clone() for p in params], opt.skipped
    return found


@pytest.mark.parametrize("name", INNER)
def test_an_island_whose_params_are_not_finite_takes_the_anchor_and_a_fresh_inner_state(name: str) -> None:
    found = [answers[name] for answers in four.answer("of_a_ruined_island")]
    for rank, (first, params, skipped) in enumerate(found):
        assert skipped == 2
        assert all(map(torch.equal, first, [*start().values()])) == (rank > 1)
        assert all(bool(p.isfinite().all()) for p in params)
        assert all(map(torch.equal, params, found[0][1]))


def started_to_part() -> str:
    """Take a round in which something leads the ranks of an island apart; return what is said."""
    params, opt = build("owned", schedule=fn.every(2))
    train(params, opt, range(1))
    if dist.get_rank() == 1:
        params[2].data[0, 0] += 1.0
    try:
        train(params, opt, range(1, 2))
    except fn.RanksDisagree as error:
        return str(error)
    return ""


def test_an_island_whose_ranks_went_apart_is_found_in_the_first_exchange() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = ranks.outcomes(4, started_to_part, enough=2)
    for text in said[:2]:
        assert "the numbers of parameter 2 in group 0 are others on rank 1 of axis 'data' than on rank 0" in text
        assert "does the inner optimizer average in the phase of local steps" in text


UNEQUAL = fn.average("data")._replace(facts=fn.Facts(("data",), unequal=True))


def test_the_axis_of_an_inner_is_another_one_or_it_is_refused_by_name() -> None:
    rate = fn.scale_by_learning_rate(0.1)
    for inner, text in [
        (fn.muon(axis="islands"), "no communication over an axis of sync, 'islands', but got one over 'islands'"),
        (fn.adamw(axis=("data", "islands")), "an axis of sync, 'islands', but got one over 'data', 'islands'"),
        (fn.chain(fn.average("data"), fn.scale_by_adam(), rate), "an average over 'data' in the compressed phase"),
        (fn.skip_nonfinite(fn.chain(fn.average("data"), rate)), "an average over 'data' in the compressed phase"),
        (fn.zero_one_adam(axis="data"), "params that are the same on all ranks of 'data'"),
        (fn.chain(UNEQUAL, rate), "params that are the same on all ranks of 'data'"),
    ]:
        with pytest.raises(ValueError, match=f"^inner: expected .*{text}"):
            fn.outer(inner, rate, mean("islands")).init(torch.ones(2))
    of_all = mean("islands")._replace(facts=fn.Facts(("islands",), tree=("norms",)))
    with pytest.raises(ValueError, match=r"sync: expected .* but got 'norms' beside an inner .* over 'data'"):
        fn.outer(fn.muon(axis="data"), rate, of_all)
    facts = fn.outer(fn.muon(axis="data"), rate, mean("islands")).facts
    assert facts is not None
    assert (facts.axes, facts.inside) == (("data", "islands"), ("data",))
