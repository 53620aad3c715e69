"""Several axes: the exchange in hops follows the paper's loop, loses nothing, and lands each piece on its rank."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import oracle_loco
import pytest
import ranks
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, tree
from fn.collectives.compressed import compressed_all_reduce
from fn.collectives.hierarchy import initial_errors

AXES = ("local", "node")
WORLDS = [(1, 4), (2, 2), (2, 4), (3, 2), (4, 1)]  # nodes, ranks of each


def on_grid(f, nodes, local, in_dims: Any = 0, out_dims: Any = 0):
    """Run f on simulated nodes x local ranks; None in in_dims and out_dims means the same on all of them."""
    inner = fn.simulate(f, "local", local, in_dims=in_dims, out_dims=out_dims)
    return fn.simulate(inner, "node", nodes, in_dims=in_dims, out_dims=out_dims)


@pytest.mark.parametrize(("nodes", "local"), WORLDS)
def test_every_rank_gets_the_piece_of_its_index(nodes, local):
    world = nodes * local

    def on_rank(x):
        shard, _ = fn.reduce_scatter_mean(x, (), AXES, fn.identity(), fn.off())
        whole, _ = fn.all_gather_shards(shard, (), AXES, fn.identity(), fn.off())
        return shard, fn.axis_index(AXES), whole

    x = torch.randn(nodes, local, 3 * world, dtype=torch.float64)
    shard, index, whole = on_grid(on_rank, nodes, local, out_dims=(0, 0, None))(x)
    mean = x.mean((0, 1))
    torch.testing.assert_close(whole, mean)
    assert sorted(index.flatten().tolist()) == list(range(world))
    for n in range(nodes):
        for i in range(local):
            assert index[n, i] == i * nodes + n
            torch.testing.assert_close(shard[n, i], mean.view(world, 3)[index[n, i]])


@pytest.mark.parametrize(("nodes", "local"), WORLDS)
def test_two_hops_in_int4_with_damped_errors_follow_the_loop_in_float64(nodes, local):
    """Hop by hop, each with a codec, a beta and a reset of its own."""
    world, width = nodes * local, 12
    n = world * width
    codecs = (fn.int4(block=8), fn.int8(block=16))
    feedbacks = (fn.damped(0.8, 3, block=8), fn.damped(0.5, 2, block=16))
    inside = [oracle_loco.Loco(n, local, 8, beta=0.8, every=3) for _ in range(nodes)]
    across = [oracle_loco.Loco(n // local, nodes, 16, beta=0.5, every=2, width=8) for _ in range(local)]
    step = on_grid(partial(fn.reduce_scatter_mean, axis=AXES, codec=codecs, feedback=feedbacks), nodes, local)
    start = on_grid(lambda x: initial_errors(x, AXES, codecs, feedbacks)[0], nodes, local)
    error = start(torch.zeros(nodes, local, n, dtype=torch.float64))
    for _ in range(5):
        x = torch.randn(nodes, local, n, dtype=torch.float64)
        shard, error = step(x, error)
        halves = np.stack([inside[k].mean(x[k].numpy()) for k in range(nodes)]).reshape(nodes, local, -1)
        for i in range(local):
            expected = across[i].mean(halves[:, i]).reshape(nodes, -1)
            np.testing.assert_allclose(shard[:, i], expected, rtol=0, atol=1e-12)


SHAPES = {"matrix": (6, 5), "vector": (7,), "scalar": (), "empty": (0,)}


@given(
    st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4),
    st.sampled_from(WORLDS),
    st.sampled_from(["flat", "per_tensor", "fused"]),
)
def test_any_shapes_on_any_grid_average_exactly_with_exact_codecs(shapes, world, layout):
    nodes, local = world
    params = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    g = [torch.randn(nodes, local, *shape, dtype=torch.float64) for shape in shapes]
    same = fn.stateless(lambda u, p: u, elementwise=True)
    links = {
        "codes": fn.compressed_average(AXES, fn.identity(), fn.off(), layout=layout).compressed_update,
        "exact": fn.average(AXES).warmup_update,
        "shards": fn.sharded(same, AXES, fn.int4(), fn.off(), layout=layout).warmup_update,
    }
    init = {
        "codes": fn.compressed_average(AXES, fn.identity(), fn.off(), layout=layout).init,
        "exact": fn.average(AXES).init,
        "shards": fn.sharded(same, AXES, fn.int4(), fn.off(), layout=layout).init,
    }
    for name, update in links.items():
        run = lambda g, name=name, update=update: update(g, init[name](params), params)[0]  # noqa: E731
        for found, x in zip(on_grid(run, nodes, local, out_dims=None)(g), g, strict=True):
            torch.testing.assert_close(found, x.mean((0, 1)))


@pytest.mark.parametrize("lazy", [False, True])
def test_the_one_pass_at_the_last_hop_is_its_two_halves(lazy):
    codec, feedback = fn.sign(), fn.classic(lazy=lazy)

    def whole(x):
        errors = initial_errors(x, AXES, codec, feedback)
        for k in range(3):
            y, errors = compressed_all_reduce(x * (1 + k), errors, AXES, codec, feedback)
        return y

    def halves(x):
        worker, server = initial_errors(x, AXES, codec, fn.classic())
        for k in range(3):
            shard, worker = fn.reduce_scatter_mean(x * (1 + k), worker, AXES, codec, fn.classic())
            y, server = fn.all_gather_shards(shard, server, AXES, codec, fn.classic())
        return y

    x = torch.randn(2, 3, 96)
    found, expected = (on_grid(f, 2, 3, out_dims=None)(x) for f in (whole, halves))
    assert torch.equal(found, expected)


def test_the_slow_network_carries_the_codes_of_a_share_only():
    n, nodes, local = 4096, 2, 4
    tx = fn.compressed_average(AXES, fn.int4())
    with fn.ledger() as sent:
        g = torch.randn(nodes, local, n)
        on_grid(lambda g: tx.compressed_update([g], tx.init([g]), [g])[0], nodes, local, out_dims=None)(g)
    assert sent.on("node") == 2 * (n / local) * (4 + 32 / 256) / 8 / 2
    codes = sent.on("node") / 2 * nodes / (nodes - 1)
    assert sent.on("local") == 4 * n * 3 / 4 + (local - 1) * codes  # the mean comes back as the codes that it was
    with fn.ledger() as exact:
        on_grid(lambda g: fn.average(AXES).warmup_update([g], (), [g])[0], nodes, local, out_dims=None)(g)
    assert exact.on("node") == 4 * n / local


@pytest.mark.parametrize(
    ("axis", "codec", "feedback", "text"),
    [
        (AXES, (fn.int4(),), fn.off(), r"^codec: .* entry for each of the axes \('local', 'node'\), but got 1"),
        ("data", (fn.int4(), fn.int4()), fn.off(), r"^codec: .*, but got 2"),
        (AXES, fn.int4(), (fn.off(),) * 3, r"^feedback: .*, but got 3"),
        ((), fn.int4(), fn.off(), r"^axis: .*got \(\)"),
        (("node", "node"), fn.int4(), fn.off(), r"^axis: .*got \('node', 'node'\)"),
    ],
)
def test_hops_that_do_not_fit_the_axes_are_refused_when_made(axis, codec, feedback, text):
    with pytest.raises(ValueError, match=text):
        fn.compressed_average(axis, codec, feedback)
    with pytest.raises(ValueError, match=text):
        fn.sharded(fn.scale_by_adam(), axis, codec, feedback)


def test_errors_of_one_axis_are_refused_by_two():
    x = torch.zeros(2, 2, 32)
    step = on_grid(lambda x: fn.reduce_scatter_mean(x, x, AXES, fn.sign(), fn.classic()), 2, 2)
    with pytest.raises(ValueError, match=r"^error: is not a tuple of 2 errors"):
        step(x)


# Real ranks: 2 nodes of 2.


def gradient(step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def params() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def optimizers():
    codecs, damped = (fn.int4(block=8), fn.int4(block=8)), fn.damped(block=8)
    return {
        "onebit_adam": fn.onebit_adam(0.1, axis=AXES),
        "loco_adamw": fn.loco_adamw(0.1, axis=AXES, codec=codecs, feedback=damped, gather=fn.int8(), master=True),
        "codes on both hops": fn.onebit_adam(0.1, axis=AXES, codec=(fn.int8(), fn.sign())),
        "signs on both, no servers at the last": fn.onebit_lamb(
            0.1, axis=AXES, codec=(fn.sign(), fn.sign()), servers=False
        ),
        "an error of exact numbers": fn.onebit_adam(0.1, axis=AXES, codec=(fn.identity(), fn.sign())),
        "warm-up in codes": fn.onebit_adam(0.1, axis=AXES, warmup=(fn.int8(), fn.int4())),
        "updates back in codes": fn.sharded(
            fn.scale_by_adam(), AXES, codecs, damped, gather=codecs, gather_feedback=fn.classic()
        ),
    }


PHASES = [Phase.WARMUP] * 2 + [Phase.COMPRESSED] * 3


def train_for_real() -> dict[str, Any]:
    with fn.bind(init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))):
        found = {}
        for name, tx in optimizers().items():
            p = params()
            state = tx.init(p)
            for t, phase in enumerate(PHASES):
                u, state = tx.update(phase)(gradient(t, dist.get_rank()), state, p)
                p = fn.apply_updates(p, u)
            found[name] = (p, tree.leaves(state))
        return found


def refusals() -> list[str]:
    def attempt(groups) -> str:
        try:
            with fn.bind(groups):
                fn.sharded(fn.scale_by_adam(), AXES, fn.int4()).init(params())
        except ValueError as error:
            return str(error)
        return "accepted"

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    node, local = mesh.get_group("node"), mesh.get_group("local")
    alone, _ = dist.new_subgroups(1)
    return [attempt({"local": local, "node": local}), attempt({"local": local, "node": alone}),
            attempt({"local": local, "node": node})]  # fmt: skip


def both() -> tuple[Any, Any]:
    return train_for_real(), refusals()


def grid_step(tx, dims, out_dims):
    """Return a step of phase COMPRESSED on a grid of 2 x 2; gradients and state in slices, params the same."""
    return on_grid(tx.compressed_update, 2, 2, in_dims=(0, dims, None), out_dims=out_dims)


def warmed_up() -> tuple[Any, ...]:
    """Return 1-bit Adam with codes on both hops, the dims of its state, gradients, the state and params."""
    tx = fn.onebit_adam(0.1, axis=AXES, codec=(fn.int8(), fn.sign()), max_step=None)
    p, g = {"w": torch.randn(600)}, {"w": torch.randn(2, 2, 600)}
    dims = fn.rank_dims(tx.init(p))
    state = on_grid(tx.init, 2, 2, in_dims=None, out_dims=dims)(p)
    _, state = on_grid(tx.warmup_update, 2, 2, in_dims=(0, dims, None), out_dims=(None, dims))(g, state, p)
    return tx, dims, g, state, p


def test_errors_of_servers_that_differ_between_nodes_are_seen_in_a_simulation():
    """Nothing is said to be the same on all ranks that is not."""
    tx, dims, g, state, p = warmed_up()
    u, state = grid_step(tx, dims, (None, dims))(g, state, p)
    assert u["w"].shape == (600,)
    assert u["w"].any()
    server = tree.fields(state, "server")[0][0][0]
    assert torch.equal(server[0], server[1])
    assert not torch.equal(server[:, 0], server[:, 1])
    server[1, 0] = 0.0  # a node of which one rank was replaced
    with pytest.raises(ValueError, match=r"^out_dims: .* leaf '0.w', which depends on the rank, but got None"):
        grid_step(tx, dims, (None, dims))(g, state, p)
    u, _ = grid_step(tx, dims, 0)(g, state, p)
    assert not torch.equal(u["w"][0], u["w"][1])
    assert torch.equal(u["w"][:, 0], u["w"][:, 1])


def test_two_nodes_of_two_processes_give_bit_for_bit_what_the_simulation_gives():
    answers = ranks.run(4, both)
    for name, tx in optimizers().items():
        p = params()
        dims = fn.rank_dims(tx.init(p))
        state = on_grid(tx.init, 2, 2, in_dims=None, out_dims=dims)(p)
        for t, phase in enumerate(PHASES):
            stacked = [gradient(t, r) for r in range(4)]
            g = {k: torch.stack([each[k] for each in stacked]).unflatten(0, (2, 2)) for k in SHAPES}
            step = on_grid(tx.update(phase), 2, 2, in_dims=(0, dims, None), out_dims=(None, dims))
            u, state = step(g, state, p)
            p = fn.apply_updates(p, u)
        for rank, (trained, _) in enumerate(answers):
            found, leaves = trained[name]
            for key in SHAPES:
                assert torch.equal(found[key], p[key])
            for mine, all_of_them, dim in zip(leaves, tree.leaves(state), tree.leaves(dims), strict=True):
                assert torch.equal(mine, all_of_them if dim is None else all_of_them[rank // 2, rank % 2])
    for _, (twice, apart, fine) in answers:
        assert "2 x 2, do not multiply to the 2 ranks" in twice
        assert "2 x 1, do not multiply to the world of 4" in apart
        assert fine == "accepted"
