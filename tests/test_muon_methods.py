"""What methods on Muon promise beside the recorded runs; the contract of `registry` asks that zeros stay zero, which a
vote cannot say, so they keep one of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, tree

W, C = Phase.WARMUP, Phase.COMPRESSED
SHAPES = {"matrix": (6, 5), "vector": (7,), "wide": (4, 9), "kernel": (2, 3, 3), "scalar": (), "empty": (0, 3)}
MAKES = {
    "lion_muon": fn.lion_muon,
    "lion_muon, no servers": partial(fn.lion_muon, servers=False),
    "lion_muon, exact, adamw": partial(fn.lion_muon, votes=False, other=fn.scale_by_adam()),
    "sign_muon": fn.sign_muon,
    "sign_muon, directions, no servers": partial(fn.sign_muon, votes="directions", servers=False),
    "ef21_muon": partial(fn.ef21_muon, codec=fn.top_k(0.2)),
    "ef21_muon, directions": partial(fn.ef21_muon, codec=fn.int8(), sends="directions"),
    "dion2": fn.dion2,
    "dion2, half of the rows in blocks": partial(fn.dion2, fraction=0.5, side="rows", blocks=2),
    "dion2, columns of kernels": partial(fn.dion2, fraction=0.5, side="columns", flatten=True),
    "muon_bp": fn.muon_bp,
    "muon_bp, columns": partial(fn.muon_bp, dim=1, blocks=3, flatten=True),
    "lion_muon, kernels": partial(fn.lion_muon, flatten=True),
}
each = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
Tree = Any


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class World:
    """An optimizer on simulated ranks, whose params `simulate` shows to be the same on all."""

    def __init__(self, tx: fn.Transform, params: Tree, world: int = 2):
        self.tx, self.world, self.params, self.taken = tx, world, params, 0
        self.dims = fn.rank_dims(tx.init(params))
        self.state = fn.simulate(tx.init, "data", world, in_dims=None, out_dims=self.dims)(params)

    def gradients(self) -> Tree:
        self.taken += 1
        leaves, structure = tree.flatten(self.params)
        made = [normal(self.world, *p.shape, seed=100 * self.taken + i).to(p.dtype) for i, p in enumerate(leaves)]
        return tree.unflatten(structure, made)

    def step(self, phase: Phase, g: Tree = None) -> World:
        def on_rank(g: Tree, s: Tree, p: Tree) -> tuple[Tree, Tree]:
            u, s = self.tx.update(phase)(g, s, p)
            return fn.apply_updates(p, u), s

        run = fn.simulate(on_rank, "data", self.world, in_dims=(0, self.dims, None), out_dims=(None, self.dims))
        self.params, self.state = run(self.gradients() if g is None else g, self.state, self.params)
        return self


def some_params(dtype: torch.dtype = torch.float32) -> Tree:
    return {name: normal(*shape, seed=i).to(dtype) for i, (name, shape) in enumerate(SHAPES.items())}


def same(a: Tree, b: Tree) -> bool:
    return all(map(torch.equal, tree.leaves(a), tree.leaves(b)))


def form(t: Tree) -> list[Any]:
    return [(x.dtype, x.shape) for x in tree.leaves(t)]


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("world", [1, 3])
def test_phases_come_in_any_order_and_params_stay_alike_on_all_ranks(make: Any, dtype: torch.dtype, world: int) -> None:
    w = World(make(0.02, axis="data", weight_decay=0.1), some_params(dtype), world)
    start = form((w.params, w.state))
    for phase in (C, W, C, W):
        before = w.params
        w.step(phase)
        assert form((w.params, w.state)) == start
        assert all(torch.isfinite(p).all() for p in w.params.values())
        assert not same(w.params, before)
    with pytest.raises(ValueError, match="has only WARMUP, COMPRESSED"):
        w.tx.update(Phase.LOCAL)


@each
@pytest.mark.parametrize("phase", [W, C])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["matrix", "vector"])
def test_a_bad_gradient_on_any_rank_moves_nothing(make: Any, phase: Phase, bad: float, name: str) -> None:
    w = World(make(0.02, axis="data"), some_params()).step(W).step(C)
    g, params, inner = w.gradients(), w.params, w.state.inner
    g[name][1, 3] = bad
    w.step(phase, g)
    assert same(w.params, params)
    assert same(w.state.inner, inner)
    assert w.state.skipped == 1
    assert not same(w.step(phase).params, params)


@each
def test_it_finds_the_common_minimum_of_ranks_that_pull_apart(make: Any) -> None:
    """By little: a majority finds the median of their minima."""
    lr, centers = torch.tensor(0.0), normal(6, 5) + 0.2 * normal(3, 6, 5)
    goal = centers.mean(0)
    w = World(make(lr, axis="data", weight_decay=0.0), {"matrix": goal + 1.0}, 3)
    schedule = fn.periodic(4)
    for t in range(120):
        lr.fill_(0.5 * (1 - t / 120))
        w.step(schedule(t), {"matrix": w.params["matrix"] - centers})
    assert (w.params["matrix"] - goal).square().mean() < 0.05


def test_lion_votes_between_the_steps_of_muon() -> None:
    """Of momenta that are alike on all ranks the majority is the sign, so that votes change nothing."""
    params = [normal(6, 5), normal(4, seed=1)]
    votes, exact = (World(fn.lion_muon(0.1, axis="data", votes=votes), params, 3) for votes in (True, False))
    for t in range(6):
        g = [normal(*p.shape, seed=t).expand(3, *p.shape) for p in params]
        for w in (votes, exact):
            w.step(fn.periodic(3)(t), g)
    torch.testing.assert_close(votes.params, exact.params)
    before = exact.params
    after = exact.step(C).params
    moved = [(a - b * (1 - 0.1 * 0.2 * 0.1)).abs() for a, b in zip(after, before, strict=True)]
    for x in moved:
        torch.testing.assert_close(x, torch.full_like(x, 0.1 * 0.2))


def test_votes_are_on_momenta_whose_mean_is_that_of_mean_gradients() -> None:
    votes, exact = (World(fn.lion_muon(0.1, axis="data", votes=votes), [normal(6, 5)], 3) for votes in (True, False))
    for t in range(4):
        g = [normal(3, 6, 5, seed=t)]
        for w in (votes, exact):
            w.step(fn.periodic(4)(t), g)
    means = [fn.roles.find(w.state, "first_moment")[0][0].mean(0) for w in (votes, exact)]
    torch.testing.assert_close(*means)
    assert not torch.equal(votes.params[0], exact.params[0])


def test_bytes_between_are_a_bit_a_number() -> None:
    params = [torch.zeros(64, 64), torch.zeros(512)]
    tx, sent = fn.lion_muon(axis="data"), {}
    for phase in (W, C):
        with fn.ledger() as book:
            fn.simulate(lambda g: tx.update(phase)(g, tx.init(params), params)[0], "data", 2)(  # noqa: B023
                [torch.ones(2, *p.shape) for p in params]
            )
        sent[phase] = book.total
    assert 31 < sent[W] / sent[C] <= 32


def on_real_ranks() -> list[list[Tensor]]:
    """Return the params after steps of all methods on this rank of a real group."""
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",)), []
    with fn.bind(mesh):
        for make in MAKES.values():
            tx, params = make(0.02, axis="data"), some_params(torch.float64)
            state = tx.init(params)
            for t, phase in enumerate((W, C, C, W, C)):
                g = gradients_of(params, dist.get_world_size(), t)
                own = tree.map(lambda x: x[dist.get_rank()], g)
                updates, state = tx.update(phase)(own, state, params)
                params = fn.apply_updates(params, updates)
            found.append([*params.values()])
    return found


def gradients_of(params: Tree, world: int, step: int) -> Tree:
    names = [*params]
    return {k: normal(world, *params[k].shape, seed=50 * step + names.index(k)).to(params[k].dtype) for k in names}


def test_real_ranks_take_the_steps_of_simulated_ones() -> None:
    answers = ranks.run(2, on_real_ranks)
    for place, (name, make) in enumerate(MAKES.items()):
        w = World(make(0.02, axis="data"), some_params(torch.float64))
        for t, phase in enumerate((W, C, C, W, C)):
            w.step(phase, gradients_of(w.params, 2, t))
        for found in answers:
            torch.testing.assert_close(found[place], [*w.params.values()], rtol=0, atol=1e-9, msg=f"{name}")


def clipped_steps_between_compressed_ones() -> dict[str, list[Tensor]]:
    """Return the params after steps that are clipped; a warm-up step comes behind momenta that differ."""
    found = {}
    with fn.bind({"data": dist.group.WORLD}):
        for name, make in {**MAKES, "lion_vote": fn.lion_vote}.items():
            params = [torch.nn.Parameter(p) for p in some_params().values()]
            make_clipped = partial(make, axis="data")
            opt = fn.Optimizer(params, make_clipped, schedule=(W, C, C, W, C).__getitem__, lr=0.02, max_norm=0.5)
            for t in range(5):
                g = gradients_of(some_params(), dist.get_world_size(), t)
                for p, of_ranks in zip(params, g.values(), strict=True):
                    p.grad = of_ranks[dist.get_rank()]
                opt.step()
            found[name] = [p.detach() for p in params]
    return found


def test_ranks_stay_alike_where_a_clipped_warm_up_step_follows_compressed_ones() -> None:
    """Momenta of each rank's own are averaged in it, as without clipping; mean gradients alone leave them apart."""
    first, *others = ranks.run(2, clipped_steps_between_compressed_ones)
    for found in others:
        assert [name for name in first if not same(first[name], found[name])] == []


def one_step(tx: fn.Transform, g: Tensor, phase: Phase = C) -> Tensor:
    """Return the update of the first step from zero params."""
    p = torch.zeros(g.shape[1:])
    return fn.simulate(lambda g: tx.update(phase)(g, tx.init(p), p)[0], "data", len(g), out_dims=None)(g)


def test_a_tie_votes_by_its_index_where_there_are_servers() -> None:
    """Of two ranks that disagree everywhere nothing is left without servers.

    Differs: fn.muon_optimizers.sign_muon: with servers, ties and zeros vote by their index; there they are 0.
    """
    x = normal(6, 5)
    g = torch.stack([x, -x])
    assert not one_step(fn.sign_muon(0.1, axis="data", servers=False), g).any()
    assert one_step(fn.sign_muon(0.1, axis="data", votes="directions"), g).abs().eq(0.1).all()


def test_votes_on_directions_are_signs_of_orthogonal_momenta() -> None:
    g = normal(3, 6, 5)
    each = [fn.orthogonalize(eps=1e-7, coefficients="jordan").local_update(0.1 * x, (), x)[0].sign() for x in g]
    found = one_step(fn.sign_muon(0.1, axis="data", votes="directions"), g)
    torch.testing.assert_close(found, -0.1 * sum(each).sign())


def test_other_tensors_step_along_signs() -> None:
    """A rate of 0.2 makes them as long as Muon's steps where scale="rms_norm"."""
    g = normal(3, 7)
    for make in (fn.sign_muon, fn.ef21_muon):
        assert one_step(make(0.1, axis="data"), g).abs().max() == pytest.approx(0.02)
    long = one_step(fn.sign_muon(0.1, axis="data"), normal(3, 40, 40))
    assert long.square().mean().sqrt() == pytest.approx(0.02, rel=0.2)


def test_all_ranks_choose_the_rows_whose_mean_size_is_largest() -> None:
    """Row 0 cancels in the mean, where its size does not.

    Differs: fn.transforms.dion2.scale_by_dion2: ranks send chosen rows of momenta of their own, and choose by the mean
        of their sizes; in the authors' code they average all gradients first.
    """
    g = torch.tensor([[[9.0, 0.0], [1.0, 0.0], [0.0, 2.0]], [[-9.0, 0.0], [1.0, 0.0], [0.0, 2.0]]])
    tx = fn.scale_by_dion2("data", 0.6, side="rows", scale=None)
    for phase, rows in ((C, [0, 2]), (W, [1, 2])):
        def on_rank(g: Tensor, phase: Phase = phase) -> tuple[Tensor, Any]:
            return tx.update(phase)(g, tx.init(g), g)

        u, state = fn.simulate(on_rank, "data", 2, out_dims=(None, 0))(g)
        assert [i for i in range(3) if (state.mu[0, i] != (g if phase is C else g.mean(0, True))[0, i]).any()] == rows
        assert u[rows[1], 1] == pytest.approx(1.0, abs=0.15)
        torch.testing.assert_close(state.mu[:, 2], 0.95 * g[:, 2])


def test_a_fraction_of_one_is_muon() -> None:
    """Whose momentum then fades after it was used, not before."""
    p = [normal(6, 5), normal(5, 8, seed=1)]
    ours, theirs = fn.scale_by_dion2(None, 1.0), fn.scale_by_muon(coefficients="polar_express")
    states = [ours.init(p), theirs.init(p)]
    for t in range(3):
        g = [normal(*x.shape, seed=t) for x in p]
        found = []
        for k, tx in enumerate((ours, theirs)):
            u, states[k] = tx.local_update(g, states[k], p) if tx is theirs else tx.update(W)(g, states[k], p)
            found.append(u)
        torch.testing.assert_close(*found)


def test_of_equal_rows_the_first_are_chosen_and_a_fraction_is_rounded_up() -> None:
    tx, g = fn.scale_by_dion2(None, 0.3, side="rows"), torch.ones(4, 6)
    u, _ = tx.update(W)(g, tx.init(g), g)
    assert [bool(row.any()) for row in u] == [True, True, False, False]


def test_all_ranks_take_the_steps_of_all_blocks() -> None:
    """Which are those of blocks alone, each by its own shape; blocks are as many as ranks.

    Differs: fn.muon_variant_optimizers.muon_bp: where params are whole every rank takes the steps of all blocks; in the
        paper they lie in shards.
    """
    g = normal(3, 7, 4)
    found = one_step(fn.muon_bp(0.1, axis="data", nesterov=False), g)
    rule = {"eps": 1e-7, "scale": "rms_norm", "coefficients": "jordan"}
    each = [fn.orthogonalize(**rule).local_update(x, (), x)[0] for x in g.mean(0).split([3, 3, 1])]
    torch.testing.assert_close(found, -0.05 * torch.cat(each))


@pytest.mark.parametrize("name", ["muon_bp", "lion_muon"])
def test_on_shards_it_is_what_it_is_on_whole_matrices(name: str) -> None:
    """And sends nothing between the steps of whole ones."""
    makes = {"muon_bp": (fn.muon_bp, {"blocks": 2}), "lion_muon": (fn.lion_muon, {})}
    make, more = makes[name]
    whole, own = make(0.1, **more), make(0.1, shards="shard")
    params = [normal(6, 5), normal(4, seed=1)]
    state, p = whole.init(params), params
    rows = [x.view(2, -1, *x.shape[1:]) for x in params]
    dims = tree.map(lambda x: 0, own.init(params))  # also of a momentum, of which each rank has rows
    of_ranks = fn.simulate(own.init, "shard", 2, out_dims=dims)(rows)
    for t in range(5):
        phase, g = fn.periodic(3)(t), [normal(*x.shape, seed=t) for x in params]
        updates, state = whole.update(phase)(g, state, p)
        p = fn.apply_updates(p, updates)

        def step(g: Any, s: Any, x: Any, phase: Phase = phase) -> Any:
            u, s = own.update(phase)(g, s, x)
            return fn.apply_updates(x, u), s

        with fn.ledger() as book:
            run = fn.simulate(step, "shard", 2, in_dims=(0, dims, 0), out_dims=(0, dims))
            rows, of_ranks = run([x.view(2, -1, *x.shape[1:]) for x in g], of_ranks, rows)
        assert bool(book.sent.get(("shard", "all_to_all"))) == (phase is W)
        for x, y in zip(rows, p, strict=True):
            torch.testing.assert_close(x.reshape(y.shape), y, rtol=1e-4, atol=1e-5)


def test_what_has_fewer_rows_than_blocks_has_fewer_blocks() -> None:
    seen: list[Any] = []
    link = fn.stateless(lambda u, p: seen.append([x.shape[0] for x in u if x.ndim]) or u)
    params = {"a": torch.ones(2, 3), "b": torch.ones(5), "c": torch.tensor(1.0)}
    tx = fn.in_blocks(link, 3)
    u, _ = tx.update(W)(params, tx.init(params), params)
    assert seen == [[1, 1, 2, 2, 1]]
    assert same(u, params)


@pytest.mark.parametrize(
    ("make", "kind", "match"),
    [
        (lambda: fn.lion_muon(lion_rate=0.0), ValueError, r"lion_rate: expected a number in \(0, inf\), but got 0.0"),
        (lambda: fn.lion_muon(votes=1), TypeError, "votes: expected True or False, but got 1"),
        (lambda: fn.lion_muon(other=fn.scale_by_adam), TypeError, "other: expected a transform"),
        (lambda: fn.lion_muon(other_rate=-1.0), ValueError, "other_rate: expected"),
        (lambda: fn.sign_muon(axis="data", votes="all"), ValueError, "votes: expected .momenta. or .directions."),
        (lambda: fn.sign_muon(axis="data", momentum=1.0), ValueError, "momentum: expected"),
        (lambda: fn.ef21_muon(axis="data", sends=1), ValueError, "sends: expected .momenta. or .directions."),
        (lambda: fn.ef21_muon(axis="data", eta=0.0), ValueError, "eta: expected"),
        (lambda: fn.ef21_muon(axis=("local", "node")), ValueError, "feedback: expected .* to have a single axis"),
        (lambda: fn.dion2(fraction=0.0), ValueError, r"fraction: expected a number in \(0, 1\], but got 0.0"),
        (lambda: fn.dion2(decay=1.0), ValueError, "decay: expected"),
        (lambda: fn.dion2(side="top"), ValueError, "side: expected 'smaller', 'rows' or 'columns', but got 'top'"),
        (lambda: fn.dion2(blocks=0), ValueError, "blocks: expected a whole number of at least 1, but got 0"),
        (lambda: fn.dion2(scale="rms"), ValueError, "scale: expected one of"),
        (lambda: fn.scale_by_dion2(None).init([torch.ones(3)]), ValueError, "params: expected leaf '0' to be a matrix"),
        (lambda: fn.muon_bp(), ValueError, "blocks: expected a whole number, where there is no axis, but got None"),
        (lambda: fn.muon_bp(blocks=2, shards="shard"), ValueError, "blocks: expected None, where blocks are"),
        (lambda: fn.muon_bp(blocks=2, block_rate=0.0), ValueError, "block_rate: expected"),
        (lambda: fn.in_blocks(fn.trace, 2), TypeError, "inner: expected a transform"),
        (lambda: fn.in_blocks(fn.trace(0.9), 0), ValueError, "blocks: expected a whole number of at least 1"),
        (lambda: fn.in_blocks(fn.trace(0.9), 2, -1), ValueError, "dim: expected a whole number of at least 0"),
        (lambda: fn.lion_muon(b1=1.0), ValueError, "b1: expected"),
    ],
)
def test_what_is_wrong_is_named(make: Any, kind: type[Exception], match: str) -> None:
    with pytest.raises(kind, match=match):
        make()
