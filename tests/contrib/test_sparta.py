"""A share of the numbers is averaged in turn: which one follows from seed and turn, on all ranks alike."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from golden_cases import recorded_form
from recorded_rounds import Case, exact, in_simulation, inner_of, load, outer_step, step_of
from torch import Tensor

import fn
from fn import Round


def places(sizes: Sequence[int], density: float, turn: int, seed: int = 0) -> list[list[int]]:
    """Return the numbers of vectors of these sizes that ranks average in a turn: those of 0 and 2 that become 1."""
    tx = fn.contrib.sparse_average("data", density, seed=seed)

    def on_rank(x: list[Tensor]) -> Any:
        return tx.compressed_update(x, tx.init(x)._replace(turn=torch.tensor(turn)), x)[0]

    found = fn.simulate(on_rank, "data", 2)([torch.stack([torch.zeros(n), torch.full((n,), 2.0)]) for n in sizes])
    return [(x[0] == 1).nonzero().flatten().tolist() for x in found]


def test_one_number_of_each_piece_is_chosen() -> None:
    for turn in range(5):
        for found in places([23] * 10, 1 / 5, turn):
            assert [i // 5 for i in found] == [0, 1, 2, 3, 4]
            assert max(found) < 23


def test_turns_tensors_and_seeds_have_other_shares() -> None:
    first, of_other_tensor = places([2000, 2000], 1 / 10, 7)
    for other in (places([2000], 1 / 10, 8)[0], of_other_tensor, places([2000], 1 / 10, 7, seed=1)[0]):
        alike = sum(a == b for a, b in zip(first, other, strict=True))
        assert 5 <= alike <= 40  # of 200 pieces a tenth by chance: 20, give or take 4.2


def test_each_number_has_the_same_chance() -> None:
    """Of a shorter last piece the chance is greater.

    Differs: fn.contrib._sparta.sparse_average: the number of elements is the same in every turn; the
        authors' code draws each element by itself, and broadcasts a mask of a byte per element.
    """
    counts = torch.zeros(23)
    for turn in range(40):
        for found in places([23] * 100, 1 / 5, turn):
            counts[found] += 1
    assert counts.sum() == 5 * 4000
    assert (counts[:20] - 800).abs().max() < 110  # 4.3 standard deviations of 25.3
    assert (counts[20:] - 4000 / 3).abs().max() < 130


def two_turns(density: float, x: Any) -> tuple[Any, Any]:
    tx = fn.contrib.sparse_average("data", density, seed=3)
    state = tx.init(x)
    for _ in range(2):
        x, state = tx.compressed_update(x, state, x)
    return x, state


SHAPES = ((7, 3), (), (0, 4), (50,))
DTYPES = (torch.float32, torch.bfloat16, torch.float32, torch.float16)


def of_rank(rank: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    found = [torch.randn(s, generator=generator).to(d) for s, d in zip(SHAPES, DTYPES, strict=True)]
    return [*found, torch.randn(4, 6, generator=generator).t()]


def by_hand(density: float, world: int, rank: int) -> list[Tensor]:
    """Return what a rank has after two turns, from positions."""
    held = [of_rank(r) for r in range(world)]
    for turn in range(2):
        chosen = places([x.numel() for x in held[0]], density, turn, seed=3)
        for number, rows in enumerate(zip(*held, strict=True)):
            flat = torch.stack([x.reshape(-1) for x in rows])
            at = chosen[number]
            wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
            flat[:, at] = (wide.sum(0) / world)[at].to(flat.dtype)
            for r, x in enumerate(rows):
                held[r][number] = flat[r].view(x.shape)
    return held[rank]


@pytest.mark.parametrize("density", [0.2, 1.0])
def test_simulated_ranks_average_the_chosen_numbers_and_keep_the_others(density: float) -> None:
    x = [torch.stack(rows) for rows in zip(*map(of_rank, range(3)), strict=True)]
    state = fn.contrib.sparse_average("data", density).init(of_rank(0))
    dims = fn.rank_dims(state)
    with fn.ledger() as sent:
        found, state = fn.simulate(lambda x: two_turns(density, x), "data", 3, out_dims=(0, dims))(x)
    for rank in range(3):
        for ours, theirs in zip(found, by_hand(density, 3, rank), strict=True):
            torch.testing.assert_close(ours[rank], theirs, rtol=0, atol=0 if theirs.dtype.itemsize < 4 else 1e-6)
    assert int(state.turn) == 2
    sizes = (21, 1, 0, 50, 24) if density == 1 else (5, 1, 0, 10, 5)
    numbers = 4 * sum(sizes)  # bytes: half precision is sent in float32
    assert sent.total == 2 * -(-numbers * 4 // 3)  # two turns, each 2 (W - 1) / W of the bytes


def test_other_phases_pass_and_count_no_turn() -> None:
    tx, x = fn.contrib.sparse_average("data", 0.5), torch.ones(3)
    for phase in (fn.Phase.WARMUP, fn.Phase.LOCAL):
        found, state = tx.update(phase)(x, tx.init(x), x)
        assert found is x
        assert state.turn == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"density": 0.0}, r"density: expected a number in \(0, 1\]"),
        ({"density": 1.5}, r"density: expected a number in \(0, 1\]"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(arguments: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        fn.contrib.sparse_average("data", **arguments)


def test_a_turn_compiles_to_one_graph_for_all_turns(graphs: Any) -> None:
    tx, x = fn.contrib.sparse_average("data", 0.25), torch.randn(2, 12)
    dims = fn.rank_dims(tx.init(x[0]))
    run = fn.simulate(lambda x, s: tx.compressed_update(x, s, x), "data", 2, in_dims=(0, dims), out_dims=(0, dims))
    compiled = torch.compile(run, fullgraph=True, backend=graphs)
    state = tx.init(x[0])
    for turn in range(4):
        moved, after = compiled(x, state)
        plain, state = run(x, state)
        assert torch.equal(moved, plain)
        assert int(after.turn) == int(state.turn) == turn + 1
    assert graphs.count == 1


def test_a_density_is_rounded_to_one_over_a_whole_number() -> None:
    totals = {}
    for density in (1.0, 0.7, 0.6, 0.4, 0.25):
        tx = fn.contrib.sparse_average("data", density)
        with fn.ledger() as sent:
            fn.simulate(lambda x, tx=tx: tx.compressed_update(x, tx.init(x), x)[0], "data", 2)(torch.ones(2, 120))
        totals[density] = sent.total
    whole = totals[1.0]
    assert totals == {1.0: whole, 0.7: whole, 0.6: whole / 2, 0.4: whole / 2, 0.25: whole / 4}


def test_sparta_sends_no_mask() -> None:
    """In every step each rank sends a number of each piece, and nothing else.

    Differs: fn.contrib._sparta.sparta: as `sparse_average`: as many numbers in each step, of which no mask is sent.
    """
    tx = fn.contrib.sparta(0.1, axis="data", density=0.1)
    g = torch.randn(4, 1, 1000)
    dims = fn.rank_dims(tx.init(g[0, 0]))

    def step(g: Tensor) -> Any:
        updates, state = tx.update(Round(0, 0))(g, tx.init(g), torch.zeros_like(g))
        return fn.apply_updates(torch.zeros_like(g), updates), state

    with fn.ledger() as sent:
        params, _ = fn.simulate(step, "data", 4, out_dims=(0, dims))(g[:, 0])
    assert sent.sent == {("data", "all_reduce"): 2 * 3 * 100 * 4 // 4}
    assert int((params == params[:1]).all(0).sum()) >= 100


def test_params_that_are_not_finite_stop_no_other_turn() -> None:
    """The turn counts on all ranks, or later shares of theirs would be other ones."""
    tx = fn.average_params(fn.scale_by_learning_rate(0.1), fn.contrib.sparse_average("data", 0.25))
    dims = fn.rank_dims(tx.init(torch.zeros(8)))
    state = fn.simulate(tx.init, "data", 2, in_dims=None, out_dims=dims)(torch.zeros(8))
    p = torch.zeros(2, 8)
    p[1, 3] = torch.inf

    def step(s: Any, p: Tensor) -> Any:
        updates, s = tx.update(Round(0, 0))(torch.zeros(8), s, p)
        return fn.apply_updates(p, updates), s

    for _ in range(12):
        p, state = fn.simulate(step, "data", 2, in_dims=(dims, 0), out_dims=(0, dims))(state, p)
    assert int(state.sync[0].turn) == 12
    assert 0 < int(state.sync[0].left_out) < 12
    assert p[0].isfinite().all()


RECORDED = load("index.json", Path(__file__).parent / "golden/sparta")


def recorded(case: Case, t: int) -> fn.Transform:
    """Average what the recorded mask of a step says: the originals draw it in three ways, and broadcast it."""
    masks = [mask[t, 0].bool() for mask in case.each("mask")]

    def share(updates: list[Tensor], params: list[Tensor]) -> list[Tensor]:
        pairs = zip(masks, updates, fn.pmean(updates, "data"), strict=True)
        return [torch.where(mask, mean, own) for mask, own, mean in pairs]

    sync = fn.stateless(share)._replace(facts=fn.Facts(axes=("data",), unequal=True))
    return fn.average_params(inner_of(case.hyper["inner"]), sync)


class TwiceState(NamedTuple):
    """States of `average_params` and of `outer`, whose own inner optimizer rests."""

    shared: Any
    rounds: Any


def sparta_diloco(case: Case) -> fn.Transform:
    return fn.outer(fn.scale_by_learning_rate(0.0), outer_step(case.hyper["outer"]), exact())


def init_both(case: Case) -> fn.Transform:
    """Return a transform that only has an init: of both states."""
    first, second = recorded(case, 0), sparta_diloco(case)
    return first._replace(init=lambda params: TwiceState(first.init(params), second.init(params)))


def both(tx: tuple[fn.Transform, fn.Transform], when: Round, g: Any, s: TwiceState, p: Any) -> tuple[Any, Any]:
    """Take a step of SPARTA, and behind it the exchange of a round of DiLoCo, if there is one."""
    shared, rounds = tx
    p, of_shared = step_of(shared, Round(0, 0), g, s.shared, p)
    p, of_rounds = rounds.exchange.take(when, s.rounds, p)
    return p, TwiceState(of_shared, of_rounds)


def replayed(case: Case, step: Any, state: Any, params: list[Tensor]) -> float:
    """Take all steps, from gradients at our own params; return how far off anything was, in units of the tolerance."""
    gradients, worst, twice = case.gradients(), [0.0], case.row["method"] == "sparta_diloco"
    for t in range(int(case.hyper["steps"])):
        tx, when = recorded(case, t), Round(0, 0)
        if twice:
            tx, when = (tx, sparta_diloco(case)), Round(0, 0) if case.arrays["applied"][t] >= 0 else Round()
        params, state = step(tx, when, gradients(t, params), state, params)
        worst += [case.off(p, f"p{i}.param", t) for i, p in enumerate(params)]
        for name, field in (("exp_avg", "mu"), ("exp_avg_sq", "nu")):
            if twice or f"p0.{name}" in case.arrays:
                inner = (state.shared if twice else state).inner
                leaves = recorded_form(inner, field, case.hyper["inner"].get("betas"))
                worst += [case.off(x, f"p{i}.{name}", t) for i, x in enumerate(leaves)]
    return max(worst)


def how(case: Case) -> tuple[fn.Transform, Any]:
    """Return what makes the state, and what takes a rank's step."""
    return (init_both(case), both) if case.row["method"] == "sparta_diloco" else (recorded(case, 0), step_of)


@pytest.mark.parametrize("case", RECORDED, ids=[case.row["name"] for case in RECORDED])
def test_the_recorded_run_is_replayed_in_simulated_ranks(case: Case) -> None:
    assert 0 < replayed(case, *in_simulation(case, *how(case))) <= 1
