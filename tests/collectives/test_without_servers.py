"""Codes without servers: the mean of what was decoded, the same on every rank, and nothing gets lost."""

from __future__ import annotations

from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import tree
from fn.adapters.deepspeed import transforms as deepspeed
from fn.collectives import compressed
from fn.collectives.compressed import compressed_all_reduce
from fn.collectives.hierarchy import initial_errors

CODECS = {
    "sign": fn.sign,
    "sign(block=8)": partial(fn.sign, block=8),
    "sign, DeepSpeed's": partial(deepspeed.codec, 1),
    "int8": partial(fn.int8, 16),
    "int4": partial(fn.int4, 16),
    "fp8": partial(fn.fp8, 16),
    "identity(bf16)": partial(fn.identity, torch.bfloat16),
}
SHAPES = {"matrix": (5, 3), "vector": (9,), "scalar": (), "empty": (0,)}
LAYOUTS = st.sampled_from(["flat", "per_tensor", "fused"])


def simulated(world, codec, feedback, rounds=1):
    """Return x (W, n) -> means (rounds, n) and the worker errors (W, ...), of x, 2 x, 3 x and so on."""

    def run(x):
        errors, means = initial_errors(x, "data", codec, feedback, servers=False), []
        assert errors[1] == ()
        for k in range(rounds):
            y, errors = compressed.compressed_all_reduce(x * (1 + k), errors, "data", codec, feedback, servers=False)
            means.append(y)
        return torch.stack(means), errors[0]

    return fn.simulate(run, "data", world, out_dims=(None, 0))


@given(st.sampled_from(sorted(CODECS)), st.integers(1, 5), st.integers(0, 12), st.integers(0, 2**31))
def test_it_is_the_mean_of_what_each_rank_would_decode(name, world, eighths, seed):
    codec = CODECS[name]()
    x = torch.randn(world, 8 * eighths, generator=torch.Generator().manual_seed(seed))
    (y,), error = simulated(world, codec, fn.classic())(x)
    decoded = torch.stack([codec.decode(codec.encode(row[None]))[0] for row in x])
    torch.testing.assert_close(y, decoded.double().mean(0).float())
    torch.testing.assert_close(error, x - decoded)


@given(st.lists(st.lists(st.integers(0, 4), max_size=3), min_size=1, max_size=4), st.integers(1, 4), LAYOUTS)
def test_any_shapes_average_exactly_with_an_exact_codec(shapes, world, layout):
    params = [torch.zeros(shape, dtype=torch.float64) for shape in shapes]
    g = [torch.randn(world, *shape, dtype=torch.float64) for shape in shapes]
    tx = fn.compressed_average("data", fn.identity(), fn.off(), layout=layout, servers=False)
    run = fn.simulate(lambda g: tx.compressed_update(g, tx.init(params), params)[0], "data", world, out_dims=None)
    for found, x in zip(run(g), g, strict=True):
        torch.testing.assert_close(found, x.mean(0))


def test_over_two_networks_only_the_slow_one_has_no_servers():
    axes, nodes, local = ("local", "node"), 2, 3
    params = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    tx = fn.compressed_average(axes, fn.sign(), servers=False)

    def grid(f, **dims):
        return fn.simulate(fn.simulate(f, "local", local, **dims), "node", nodes, **dims)

    dims = fn.rank_dims(grid(lambda x: tx.init(params), out_dims=None)(torch.zeros(nodes, local)))
    state = grid(lambda x: tx.init(params), out_dims=dims)(torch.zeros(nodes, local))
    assert tree.leaves(state.server) == []
    sent, delivered = (dict.fromkeys(SHAPES, torch.zeros(())) for _ in range(2))
    step = grid(lambda g, s: tx.compressed_update(g, s, params), in_dims=(0, dims), out_dims=(None, dims))
    for _ in range(5):
        g = {name: torch.randn(nodes, local, *shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        y, state = step(g, state)
        sent = {name: sent[name] + g[name].mean((0, 1)) for name in SHAPES}
        delivered = {name: delivered[name] + y[name] for name in SHAPES}
    lag = sum(float((sent[name] - delivered[name]).square().sum()) for name in SHAPES)
    kept = sum(float(e.mean(0).square().sum()) for e in tree.leaves(state.worker))  # each rank's is of its node's share
    assert lag == pytest.approx(kept)
    assert lag > 0.1
    with fn.ledger() as book:
        step(g, state)
    whole = fn.compressed_average(axes, fn.sign())
    with fn.ledger() as other:
        grid(lambda g: whole.compressed_update(g, whole.init(params), params)[0], out_dims=None)(g)
    assert book.messages["node", "all_gather"] == 1
    assert ("node", "all_to_all") not in book.messages
    assert book.on("local") > 0
    assert book.on("node") <= other.on("node")


@pytest.mark.parametrize(("world", "ratio"), [(2, 1.0), (3, 1.5), (4, 2.0)])
def test_what_it_sends_beside_servers(world, ratio):
    n, found = 4096 * 3, {}
    for servers in (True, False):
        tx = fn.compressed_average("data", fn.sign(), servers=servers)
        with fn.ledger() as book:
            run = lambda g, tx=tx: tx.compressed_update([g], tx.init([g]), [g])[0]  # noqa: E731
            fn.simulate(run, "data", world, out_dims=None)(torch.randn(world, n))
        found[servers] = book
    bits = [sum(found[servers].sent.values()) - 4 * sum(found[servers].messages.values()) * (world - 1)
            for servers in (True, False)]  # fmt: skip
    assert bits[1] == ratio * bits[0]
    assert sum(found[True].messages.values()) == 2
    assert sum(found[False].messages.values()) == 1


def over_processes() -> list[list[torch.Tensor]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    found = []
    with fn.bind(mesh):
        for name, make in CODECS.items():
            tx = fn.compressed_average("data", make(), fn.classic(), servers=False)
            params = [torch.zeros(shape) for shape in SHAPES.values()]
            state, out = tx.init(params), []
            for t in range(3):
                y, state = tx.compressed_update(gradients(t, dist.get_rank()), state, params)
                out += y
            found.append([x.clone() for x in [*out, *tree.leaves(state)]])
            assert state.server == ((),), name
    return found


def gradients(step: int, rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return [torch.randn(shape, generator=generator) for shape in SHAPES.values()]


@pytest.mark.parametrize("world", [2, 3])
def test_processes_and_simulated_ranks_agree_bit_for_bit(world):
    params = [torch.zeros(shape) for shape in SHAPES.values()]
    real = ranks.run(world, over_processes)
    for k, make in enumerate(CODECS.values()):
        tx = fn.compressed_average("data", make(), fn.classic(), servers=False)

        def run(*grads, tx=tx):
            state, out = tx.init(params), []
            for g in grads:
                y, state = tx.compressed_update(g, state, params)
                out += y
            return [*out, *tree.leaves(state)]

        grads = [[torch.stack(each) for each in zip(*(gradients(t, r) for r in range(world)), strict=True)]
                 for t in range(3)]  # fmt: skip
        found = fn.simulate(run, "data", world)(*grads)
        for rank in range(world):
            assert all(torch.equal(a, b[rank]) for a, b in zip(real[rank][k], found, strict=True))


def test_a_state_with_servers_is_refused_without_and_the_other_way_round():
    x = torch.randn(2, 32)  # whose worker errors have the same length either way

    def given(servers, other):
        def run(x):
            errors = initial_errors(x, "data", fn.sign(), fn.classic(), servers=servers)
            return compressed_all_reduce(x, errors, "data", fn.sign(), fn.classic(), servers=other)[0]

        return fn.simulate(run, "data", 2, out_dims=None)(x)

    assert given(False, False).shape == given(True, True).shape == (32,)
    with pytest.raises(ValueError, match=r"^error: has a server's part"):
        given(True, False)
    with pytest.raises(ValueError, match=r"^error: is empty, but this feedback keeps one"):
        given(False, True)


def changes_its_mind(before: bool) -> str:
    p = torch.nn.Parameter(torch.ones(4, 32))
    with fn.bind(init_device_mesh("cpu", (2,), mesh_dim_names=("data",))):
        make = partial(fn.onebit_adam, axis="data", servers=before)
        opt = fn.Optimizer([p], make, schedule=fn.freeze_after(1), lr=1e-2)
    for t in range(3):
        p.grad = gradients(t, dist.get_rank())[0].sum() + torch.randn(4, 32)
        opt.step()
    opt.param_groups[0]["servers"] = not before
    kept = [x.clone() for x in tree.leaves((opt.states, p))]
    with pytest.raises(ValueError, match=r"^error: ") as error:
        opt.step()
    assert all(map(torch.equal, kept, tree.leaves((opt.states, p))))
    return str(error.value)


def test_an_optimizer_whose_servers_change_refuses_the_step_and_stays_as_it_was():
    for before, said in ((True, "has a server's part"), (False, "is empty")):
        assert all(said in text for text in ranks.run(2, changes_its_mind, before))
