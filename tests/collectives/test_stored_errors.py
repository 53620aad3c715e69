"""Errors kept in fewer bytes: what they cost, what they lose, and that nothing else is lost."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from registry import OPTIMIZERS

import fn
from fn import tree
from fn.collectives.compressed import encode
from fn.collectives.feedback import store_of
from fn.collectives.hierarchy import initial_errors
from fn.testing.codec import settle_errors

CODECS = {
    "sign": fn.sign,
    "sign(8)": partial(fn.sign, 8),
    "int4": partial(fn.int4, 8),
    "int8": partial(fn.int8, 8),
    "fp8": partial(fn.fp8, 8),
    "bf16": partial(fn.identity, torch.bfloat16),
}
STORES = (None, torch.bfloat16, torch.int8)
each_store = pytest.mark.parametrize("store", STORES, ids=["whole", "bf16", "int8"])


def resolution(e: torch.Tensor, store: Any, block: int) -> torch.Tensor:
    """Return what saving may lose of each element: nothing, |e| / 256, or a 128th of the block's largest."""
    if store is None:
        return torch.zeros_like(e)
    if store is torch.bfloat16:
        return e.abs() / 256
    padded = torch.nn.functional.pad(e.abs(), (0, -e.shape[0] % block)).view(-1, block)
    return (padded.amax(1, keepdim=True) / 128).expand(padded.shape).reshape(-1)[: e.shape[0]]


@each_store
@given(
    st.sampled_from(sorted(CODECS)), st.integers(1, 20), st.sampled_from([1, 8, 64]), st.integers(0, 2**31),
    st.floats(-6, 6), st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_delivered_plus_kept_plus_what_saving_lost_is_what_was_sent(store, name, eights, block, seed, magnitude, dtype):
    """The invariant of classic feedback; each step loses at most the store's resolution, and nothing else is lost."""
    codec, feedback = CODECS[name](), fn.classic(store=store, block=block)
    n = 8 * eights
    generator = torch.Generator().manual_seed(seed)
    error = feedback.init(torch.zeros(n, dtype=dtype))
    sent, delivered, lost = (torch.zeros(n, dtype=torch.float64) for _ in range(3))
    for _ in range(5):
        x = (torch.randn(n, generator=generator, dtype=torch.float64) * 10**magnitude).to(dtype)
        compensated = feedback.compensate(x, error)
        payload, error = encode(codec, feedback, x[None], error)
        decoded = codec.decode(payload)[0]
        whole = (compensated - decoded).double()
        kept = feedback.compensate(torch.zeros_like(x), error).double()
        assert ((whole - kept).abs() <= resolution(whole, store, block) * (1 + 1e-4)).all()
        lost += whole - kept
        sent += x.double()
        delivered += decoded.double()
    tolerance = 10**magnitude * 1e-4 if dtype == torch.float32 or name == "bf16" else 10**magnitude * 1e-12
    torch.testing.assert_close(delivered + kept + lost, sent, rtol=0, atol=tolerance)


@given(st.integers(0, 300), st.sampled_from([1, 7, 64]), st.integers(0, 2**31))
def test_a_store_gives_back_what_it_was_given_to_its_resolution(n, block, seed):
    e = torch.randn(n, generator=torch.Generator().manual_seed(seed))
    for store in STORES:
        save, load = store_of(store, block)
        assert ((load(save(e)) - e).abs() <= resolution(e, store, block) * (1 + 1e-4)).all()


def bytes_of(t: Any) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(t))


@pytest.mark.parametrize(
    ("feedback", "bound"),
    [(fn.classic(), 4.0), (fn.classic(store=torch.bfloat16), 2.0), (fn.classic(store=torch.int8), 1.1),
     (fn.damped(), 1.1)],
    ids=["whole", "bf16", "int8", "damped"],
)  # fmt: skip
@pytest.mark.parametrize("codec", [fn.sign(), fn.int4()], ids=["sign", "int4"])
def test_what_an_error_costs_per_element(codec, feedback, bound):
    """In the state of an optimizer, on a model whose biases are short, for worker and server together."""
    shapes = [(256, 512), (512,), (512, 256), (256,), (1000, 256)]
    params = [torch.zeros(shape) for shape in shapes]
    tx = fn.compressed_average("data", codec, feedback)
    dims = fn.rank_dims(tx.init(params))
    state = fn.simulate(tx.init, "data", 4, in_dims=None, out_dims=dims)(params)
    n = sum(p.numel() for p in params)
    assert bytes_of(state.worker) / 4 <= bound * n
    assert bytes_of(state.server) / 4 <= bound * n / 4


@each_store
@pytest.mark.parametrize("name", sorted(CODECS))
def test_both_halves_take_every_store_and_their_errors_settle_to_vectors(name, store):
    codec, feedback = CODECS[name](), fn.classic(store=store)

    def on_rank(x):
        errors = initial_errors(x, "data", codec, feedback)
        shard, worker = fn.reduce_scatter_mean(x, errors[0], "data", codec, feedback)
        y, server = fn.all_gather_shards(shard, errors[1], "data", codec, feedback)
        return shard, y, settle_errors(x, (worker, server), "data", codec, feedback)

    x = torch.randn(2, 256)
    shard, y, (worker, server) = fn.simulate(on_rank, "data", 2, out_dims=(0, None, 0))(x)
    assert worker.dtype == server.dtype == torch.float32
    lost = x.abs().max() / 32  # of a whole error
    torch.testing.assert_close(shard.flatten() + worker.mean(0), x.mean(0), rtol=0, atol=float(lost))
    torch.testing.assert_close(y + server.flatten(), shard.flatten(), rtol=0, atol=float(lost))


ONEBIT_ADAM = next(o for o in OPTIMIZERS if o.name == "onebit_adam")
LATER = [o for o in OPTIMIZERS if o.name in ("sharded_onebit_adam", "zero_one_adam")]


@pytest.mark.slow
@pytest.mark.parametrize("store", [pytest.param(STORES[1], marks=pytest.mark.reliability, id="bf16"), STORES[2]])
@pytest.mark.parametrize(
    "optimizer", [pytest.param(o, marks=pytest.mark.reliability, id=o.name) for o in LATER] + [ONEBIT_ADAM]
)
def test_every_optimizer_trains_with_stored_errors_and_saves_them(optimizer, store):
    """Ranks pull apart, each to a minimum of its own: without the errors they would not find the common one."""
    world, n = 4, 20
    centers = 1 + 3 * torch.randn(world, n)
    goal, lr = centers.mean(0), torch.tensor(optimizer.lr)
    tx = optimizer.make(lr=lr, axis="data", feedback=fn.classic(store=store))
    params = {"x": goal + 1.0}
    dims = fn.rank_dims(tx.init(params))
    state = fn.simulate(tx.init, "data", world, in_dims=None, out_dims=dims)(params)
    place = None if optimizer.replicated else 0
    params = params if optimizer.replicated else {"x": params["x"].expand(world, n).clone()}

    def step(phase, center, state, params):
        updates, state = tx.update(phase)({"x": params["x"] - center}, state, params)
        return fn.apply_updates(params, updates), state

    steps = 150 if optimizer.replicated else 300  # 0/1 Adam is slower to settle
    for t in range(steps):
        lr.fill_(optimizer.lr * (1 - t / steps))
        f = partial(step, optimizer.schedule(t))
        run = fn.simulate(f, "data", world, in_dims=(0, dims, place), out_dims=(place, dims))
        params, state = run(centers, state, params)
    assert (params["x"] - goal).norm(dim=-1).max() < 0.25 * n**0.5
    kept = [leaf for worker in tree.fields(state, "worker") for leaf in tree.leaves(worker)]
    assert kept[0].dtype == store
    assert kept[0].any()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"store": torch.float16}, r"^store: .*got torch.float16"),
        ({"store": "int5"}, r"^store: .*got 'int5'"),
        ({"store": torch.int8, "block": 0}, r"^block: .*got 0"),
        ({"store": torch.int8, "lazy": True}, r"^lazy: "),
    ],
)
def test_what_is_no_store_is_refused_by_name(arguments, text):
    with pytest.raises(ValueError, match=text):
        fn.classic(**arguments)


def test_a_dtype_that_no_codec_represents_is_refused_by_name():
    with pytest.raises(TypeError, match=r"^dtype: .*got torch.float8_e4m3fn"):
        fn.identity(torch.float8_e4m3fn)
    x = torch.ones(2, 16).to(torch.float8_e4m3fn)
    f = fn.simulate(lambda x: fn.reduce_scatter_mean(x, (), "data", fn.int4(), fn.off()), "data", 2)
    with pytest.raises(TypeError, match=r"^x: .*got torch.float8_e4m3fn"):
        f(x)


def test_a_state_of_another_store_is_refused():
    x = torch.ones(2, 16)
    f = lambda x, e: fn.reduce_scatter_mean(x, e, "data", fn.int4(), fn.classic(store="int8"))  # noqa: E731
    with pytest.raises(TypeError, match=r"^error: is not what this feedback keeps"):
        fn.simulate(f, "data", 2)(x, x)
