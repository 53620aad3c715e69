"""ZeRO as a combinator: the layout changes no number, codes follow the papers' loops, and ranks skip together."""

from __future__ import annotations

from functools import partial

import chains
import numpy as np
import oracle_loco
import pytest
import torch
from simulated import World

import fn
from fn import Phase, tree
from fn.transforms.flat_layout import LAYOUTS

SHAPES = {"matrix": (6, 5), "vector": (7,), "scalar": (), "empty": (0,), "odd": (3, 1, 3)}


def adam(lr=0.03):
    return fn.chain(fn.scale_by_adam(), fn.add_decayed_weights(0.1), fn.scale_by_learning_rate(lr))


def start(dtype=torch.float32):
    return {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}


def gradients(world, params):
    return {name: torch.randn(world, *p.shape).to(p.dtype) for name, p in params.items()}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("world", "phase"), [(1, Phase.WARMUP), (3, Phase.COMPRESSED), (4, Phase.WARMUP)])
def test_sharded_adamw_is_adamw(layout, world, phase):
    """To the bit where the mean is rounded alike, that is, where 1 / W is a power of two."""
    params = start()
    whole = World(fn.chain(fn.average("data"), adam()), params, world)
    shards = World(fn.sharded(adam(), "data", layout=layout), params, world)
    for _ in range(5):
        g = gradients(world, params)
        expected = whole.step(Phase.WARMUP, g).params
        found = shards.step(phase, g).params
    for name in params:
        exactly = {} if world == 3 else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(found[name], expected[name], **exactly)


def test_a_rank_keeps_its_share_of_moments_and_master_and_no_more():
    params = {"w": torch.randn(1000, dtype=torch.bfloat16), "b": torch.randn(24, dtype=torch.bfloat16)}
    state = World(fn.sharded(adam(), "data"), params, 4).state
    for leaf in [*state.inner[0].mu, *state.inner[0].nu, *state.master]:
        assert leaf.shape == (4, 256)
        assert leaf.dtype == torch.float32
    assert tree.leaves(state.errors) == []
    assert state.place.tolist() == [[r, 4] for r in range(4)]


def test_params_are_whole_on_every_rank():
    """Stage 3 would keep 256 of 1024 elements between steps; here that is so for the moments alone.

    Differs: fn.transforms.sharded.sharded: params stay whole on every rank, so this is not stage 3;
        `fn.adapters.fsdp` is for that.
    """
    kept, tx = [], fn.sharded(adam(), "data")

    def on_rank(g, p):
        state = tx.init(p)
        u, state = tx.compressed_update(g, state, p)
        kept.append([x.numel() for x in (*fn.apply_updates(p, u), *state.inner[0].mu, *state.inner[0].nu)])
        return u

    fn.simulate(on_rank, "data", 4, in_dims=(0, None))([torch.randn(4, 1024)], [torch.randn(1024)])
    assert kept == [[1024, 256, 256]]


def test_a_shard_that_is_not_finite_is_nan_for_all_ranks_to_see():
    """A guard inside makes the update zero. All ranks gather NaN in its place, in that shard alone.

    Differs: fn.transforms.sharded.sharded: Where a guard inside of inner skips, the shard's updates are NaN, for all
        ranks to see and skip.
    """
    g, p = torch.ones(2, 64), torch.zeros(64)
    g[:, 60] = torch.inf
    inner = fn.skip_nonfinite(fn.scale_by_adam())
    assert inner.warmup_update([g[0]], inner.init([p]), [p])[0][0].isfinite().all()
    tx = fn.sharded(inner, "data")
    found = fn.simulate(lambda g: tx.compressed_update([g], tx.init([p]), [p])[0][0], "data", 2)(g)
    assert found.isnan().tolist() == [[i >= 32 for i in range(64)]] * 2


def test_half_precision_params_are_the_rounded_master_which_follows_float32_adamw():
    params = start(torch.bfloat16)
    shards = World(fn.sharded(adam(), "data", layout="per_tensor"), params, 2)
    precise = World(fn.chain(fn.average("data"), adam()), tree.map(torch.Tensor.float, params), 2)
    for _ in range(20):
        g = gradients(2, params)
        shards.step(Phase.WARMUP, g)
        precise.step(Phase.WARMUP, tree.map(torch.Tensor.float, g))
    for name, master in zip(params, shards.state.master, strict=True):
        n = params[name].numel()
        assert torch.equal(master.flatten()[:n], precise.params[name].flatten())
        assert torch.equal(shards.params[name], precise.params[name].bfloat16())


def moved(g: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Return a step that half precision does not show, or for a gradient beyond 1 one to next to zero."""
    return torch.where(g.abs() < 1.0, g * p * 2.0**-9, g * p * 2.0**-24 - p)


def descent():
    return fn.stateless(lambda updates, params: tree.map(moved, updates, params), elementwise=True)


def params_and_gradients(dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return powers of two, and gradients of steps: to just below them, beyond zero, and a small one."""
    p = 2.0 ** torch.arange(512).remainder(12)
    shift = torch.rand(512, generator=torch.Generator().manual_seed(0))
    return p.to(dtype), [(-shift / 2).to(dtype), (-1.0 - shift).to(dtype), (shift / 2).to(dtype)]


WAYS = {
    "alone": lambda tx: tx,
    "of some leaves": lambda tx: fn.partition({"half": tx, "whole": fn.adamw(0.1)}, {"w": "half", "b": "whole"}),
    "masked": lambda tx: fn.mask(tx, {"w": True, "b": False}),
    "guarded": lambda tx: fn.skip_nonfinite(fn.chain(fn.scale(1.0), tx)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_param_is_the_rounded_master_also_where_a_step_ends_next_to_zero(way, dtype):
    """p + (p' - p) misses p' there. The next step took that for a write by hand, and the master lost its digits."""
    p, grads = params_and_gradients(dtype)
    params = {"w": p, "b": torch.ones(5)}
    shards = World(fn.chain(fn.average("data"), WAYS[way](fn.sharded(descent(), "data"))), params, 2)
    precise = p.float()
    for g in grads:
        shards.step(Phase.WARMUP, {"w": g.expand(2, 512), "b": torch.ones(2, 5)})
        precise += moved(g.float(), precise)
        assert torch.equal(shards.params["w"], precise.to(dtype))
    masters = [x.flatten() for x in tree.leaves(tree.fields(shards.state, "master"))]
    assert torch.equal(masters[-1], precise)
    assert shards.params["b"].dtype == torch.float32
    assert (shards.params["b"] != 1.0).all()


def test_a_param_of_an_optimizer_that_steps_link_by_link_is_the_rounded_master():
    p, grads = params_and_gradients(torch.bfloat16)
    precise, p = p.float(), torch.nn.Parameter(p)
    opt = fn.Optimizer([p], lambda lr: fn.sharded(descent(), "data"))
    for g in grads:
        p.grad = g
        precise += moved(g.float(), precise)
        opt.step()
        assert torch.equal(p, precise.bfloat16())
    assert torch.equal(tree.fields(opt.states, "master")[0][0], precise)


def test_a_local_step_of_new_params_that_is_not_finite_moves_nothing():
    mean = fn.compressed_average("data", fn.identity(), fn.off())
    step = fn.scale_by_learning_rate(1.0)
    tx = fn.outer(fn.sharded(step, "node"), step, mean)
    p, path = [torch.tensor([1.0, -0.0, 3.0], dtype=torch.bfloat16)], []
    state = tx.init(p)
    for g in (float("nan"), 0.5, float("inf"), 0.25):
        updates, state = tx.update(Phase.LOCAL)([torch.full_like(p[0], g)], state, p)
        p = fn.apply_updates(p, updates)
        path.append((p[0].tolist(), int(state.dropped)))
    first, second, third = [1.0, -0.0, 3.0], [0.5, -0.5, 2.5], [0.25, -0.75, 2.25]
    assert path == [(first, 1), (second, 1), (second, 2), (third, 2)]


def test_a_shard_inside_of_owned_tensors_and_a_link_behind_it():
    """Owned tensors add up updates, so they get the difference; what stands behind new params is refused by name."""
    p = [torch.ones(4, 4, dtype=torch.bfloat16)]
    step = fn.scale_by_learning_rate(1.0)
    tx = fn.owned(fn.sharded(step, "other"), "data")
    found, _ = tx.update(Phase.WARMUP)([torch.full_like(p[0], 0.25)], tx.init(p), p)
    assert torch.equal(fn.apply_updates(p, found)[0], torch.full_like(p[0], 0.75))
    tx = fn.chain(fn.sharded(step, "data"), fn.scale(2.0))
    with pytest.raises(ValueError, match=r"links: expected what returns new params.*to be the last link, but got scal"):
        tx.update(Phase.WARMUP)(p, tx.init(p), p)


@pytest.mark.parametrize("phase", [Phase.WARMUP, Phase.COMPRESSED])
def test_the_master_follows_what_is_written_into_params_and_keeps_the_rest(phase):
    """It does not lead a clamp, or weights that are loaded, back; what is left alone keeps every bit below its own."""
    params = start(torch.bfloat16)
    touched, untouched = (World(fn.sharded(adam(), "data"), params, 2) for _ in range(2))
    for t in range(6):
        g = gradients(2, params)
        touched.step(phase, g)
        untouched.step(phase, g)
        if t == 2:
            touched.params["matrix"][0] = 8.0
    for name, p in touched.params.items():
        same = p == untouched.params[name]
        assert same[1:].all() and not same[0].any() if name == "matrix" else same.all()
    assert (touched.params["matrix"][0] - 8.0).abs().max() < 0.5


def test_qwz_sends_params_in_8_bits_and_loses_nothing_of_the_master():
    codec = fn.int8(block=8)
    params = {"w": torch.randn(2, 32)}
    exact = World(fn.sharded(adam(), "data"), params, 2)
    coded = World(fn.sharded(adam(), "data", gather=codec, master=True), params, 2)
    for _ in range(4):
        g = gradients(2, params)
        exact.step(Phase.COMPRESSED, g)
        coded.step(Phase.COMPRESSED, g)
        master = coded.state.master[0]
        torch.testing.assert_close(master.flatten(), exact.params["w"].flatten(), rtol=0, atol=1e-6)
        decoded = codec.decode(codec.encode(master)).view(2, 32)
        torch.testing.assert_close(coded.params["w"], decoded, rtol=0, atol=1e-6)
    assert not torch.equal(coded.params["w"], exact.params["w"])
    coded.step(Phase.WARMUP, g)
    assert torch.equal(coded.params["w"].flatten(), coded.state.master[0].flatten())


def test_updates_in_codes_with_feedback_arrive_in_the_end():
    params = {"w": torch.zeros(64)}
    inner = fn.scale_by_learning_rate(1.0)
    tx = fn.sharded(inner, "data", gather=fn.int4(block=8), gather_feedback=fn.classic())
    w, total = World(tx, params, 2), torch.zeros(64)
    for _ in range(12):
        g = gradients(2, params)
        total -= g["w"].mean(0)
        w.step(Phase.COMPRESSED, g)
        torch.testing.assert_close(w.params["w"] + w.state.errors.server[0].flatten(), total, rtol=0, atol=1e-5)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_loco_adamw_follows_the_papers_loop_in_float64(world):
    n, block, every = 50, 8, 4
    params = {"w": torch.randn(n, dtype=torch.float64)}
    codec, feedback = fn.int4(block=block), fn.damped(beta=0.7, every=every, block=block)
    w = World(fn.loco_adamw(0.03, axis="data", codec=codec, feedback=feedback), params, world)
    loop = oracle_loco.Loco(n, world, block, beta=0.7, every=every)
    adamw = oracle_loco.AdamW(params["w"].numpy(), lr=0.03)
    for _ in range(10):
        g = gradients(world, params)
        expected = adamw.step(loop.mean(g["w"].numpy()))
        found = w.step(Phase.COMPRESSED, g).params
        np.testing.assert_allclose(found["w"], expected, rtol=0, atol=1e-12)


def test_labels_reach_the_inner_of_a_per_tensor_layout():
    params = start()
    labels = {name: "decay" if name == "matrix" else "plain" for name in params}
    inner = fn.partition({"decay": adam(), "plain": fn.scale_by_learning_rate(1.0)}, labels)
    w = World(fn.sharded(inner, "data", layout="per_tensor"), params, 2)
    g = gradients(2, params)
    w.step(Phase.WARMUP, g)
    torch.testing.assert_close(w.params["vector"], params["vector"] - g["vector"].mean(0))
    assert not torch.allclose(w.params["matrix"], params["matrix"] - g["matrix"].mean(0))


def test_a_layout_that_does_not_exist_is_refused_by_name():
    with pytest.raises(ValueError, match=r"^layout: .*got 'rows'"):
        fn.sharded(adam(), "data", layout="rows")


def test_a_state_of_another_world_is_refused_and_nothing_moves():
    params = {"w": torch.randn(64)}
    tx = fn.sharded(adam(), "data", master=True)
    state = World(tx, params, 4).state
    dims = fn.rank_dims(state)
    mine = tree.map(lambda leaf: leaf[:2] if leaf.ndim else leaf, state)  # what all ranks hold alike is 0-d
    update = partial(tx.compressed_update, gradients(2, params))
    f = fn.simulate(lambda s: update(s, params), "data", 2, in_dims=(dims,), out_dims=(None, dims))
    with pytest.raises(ValueError, match=r"state: has master shards of \[16\].*the params give \[32\]"):
        f(mine)


def test_a_sharded_second_moment_does_not_decide_when_to_freeze():
    """Ranks would decide differently."""
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=r"schedule: expected .* all ranks hold, .* divided among ranks, in shards"):
        fn.Optimizer([p], partial(fn.loco_adamw, axis="data"), schedule=fn.freeze_when_stable())


@pytest.mark.parametrize(("layout", "world"), [*((layout, 3) for layout in LAYOUTS), ("flat", 1), ("flat", 2)])
def test_onebit_adam_over_shards_is_onebit_adam(layout, world):
    """In float64 to rounding: the layout changes who updates what, not what the update is."""
    params, hyper = start(torch.float64), {"axis": "data", "layout": layout, "weight_decay": 0.1}
    defaults = {"b2": 0.95, "codec": fn.sign(block=64), "max_step": 3.0}
    whole = World(chains.onebit_adam(0.03, **defaults, **hyper), params, world)
    shards = World(fn.sharded_onebit_adam(0.03, **hyper), params, world)
    for t in range(12):
        phase, g = fn.freeze_after(4)(t), gradients(world, params)
        expected, found = whole.step(phase, g).params, shards.step(phase, g).params
        for name in params:
            torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-10)


def test_onebit_adam_over_shards_divides_the_second_moment_and_sends_codes_and_the_updates():
    n, world = 4096, 4
    params = {"w": torch.randn(n, dtype=torch.bfloat16)}
    w, share = World(fn.sharded_onebit_adam(axis="data", gather=fn.int8()), params, world), (world - 1) / world
    w.step(Phase.WARMUP, gradients(world, params))
    with fn.ledger() as sent:
        w.step(Phase.COMPRESSED, gradients(world, params))
    assert sent.on("data") == 2 * n * share * (1 + 16 / 64) / 8 + n * share * (8 + 32 / 256) / 8
    inner = w.state.inner
    assert [leaf.shape for leaf in tree.leaves((inner.inner[0].nu, inner.master))] == [(world, n // world)] * 2
    assert [leaf.shape for leaf in tree.leaves(inner.momentum)] == [(n,)]  # the same on every rank
    assert [leaf.dtype for leaf in tree.leaves(inner.momentum)] == [torch.float32]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"momentum": 1.0}, r"^momentum: .*got 1.0"),
        ({"momentum": 0.9, "gather_feedback": fn.classic()}, r"^gather_feedback: is given together with momentum"),
    ],
)
def test_a_momentum_exchange_that_cannot_be_is_refused_by_name(arguments, text):
    with pytest.raises(ValueError, match=text):
        fn.sharded(adam(), "data", fn.sign(), **arguments)


def test_a_state_of_another_shard_is_refused_and_nothing_is_loaded():
    """As on axes in another order, where the shapes fit and the contents do not."""
    p = [torch.nn.Parameter(torch.randn(8))]
    opt = fn.Optimizer(p, partial(fn.loco_adamw, axis="data"), lr=0.1)
    p[0].grad = torch.randn(8)
    opt.step()
    saved = {path: leaf.clone() for path, leaf in opt.state_dict().items()}
    saved["rank 0 of 1.state.0.inner.place"] = torch.tensor([1, 2])
    saved["rank 0 of 1.state.0.inner.inner.0.mu.0"] += 1
    before = [leaf.clone() for leaf in tree.leaves(opt.states)]
    with pytest.raises(ValueError, match=r"'state.0.inner.place' .*shard 1 of 2.*shard 0 of 1"):
        opt.load_state_dict(saved)
    assert all(map(torch.equal, tree.leaves(opt.states), before))
    tx = fn.sharded(adam(), "data")
    params = [torch.randn(8)]
    state = tx.init(params)._replace(place=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"^state: .*shard 1 of 2.*shard 0 of 1"):
        tx.warmup_update(params, state, params)


@pytest.mark.reliability
def test_over_two_axes_it_compiles_to_one_graph_and_agrees_with_eager(graphs):
    codecs, feedbacks = (fn.int4(8), fn.int4(8)), (fn.damped(block=8), fn.classic(store="int8"))
    tx = fn.loco_adamw(0.1, axis=("local", "node"), codec=codecs, feedback=feedbacks, gather=fn.int8(), master=True)
    params = start()
    dims = fn.rank_dims(tx.init(params))

    def on_grid(f, in_dims, out_dims):
        inner = fn.simulate(f, "local", 2, in_dims=in_dims, out_dims=out_dims)
        return fn.simulate(inner, "node", 3, in_dims=in_dims, out_dims=out_dims)

    state = on_grid(tx.init, None, dims)(params)
    step = on_grid(tx.compressed_update, (0, dims, None), (None, dims))
    compiled = torch.compile(step, fullgraph=True, backend=graphs)
    for _ in range(2):
        g = {name: torch.randn(3, 2, *p.shape) for name, p in params.items()}
        expected, found = step(g, state, params), compiled(g, state, params)
        for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        state = expected[1]
    assert graphs.count == 1


@pytest.mark.parametrize(
    "inner",
    [fn.lamb(), fn.chain(fn.clip_by_global_norm(1.0), fn.scale_by_adam()), fn.onebit_lamb(axis="other")],
    ids=["lamb", "clipping", "onebit_lamb"],
)
def test_links_that_take_norms_are_refused_for_a_shard_has_others(inner):
    with pytest.raises(ValueError, match=r"inner: .*element-wise.*max_norm"):
        fn.sharded(inner, "data").init([torch.ones(3)])
