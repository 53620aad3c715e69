"""The ledger counts what a rank puts on the wire: exactly, for any codec and axis, in both worlds."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

import fn

CODECS = {
    "sign": fn.sign,
    "sign(block=16)": partial(fn.sign, block=16),
    "identity": fn.identity,
    "identity(bf16)": partial(fn.identity, torch.bfloat16),
    "identity(f64)": partial(fn.identity, torch.float64),
}


def row_bytes(codec: str, width: int) -> int:
    """Return the bytes of a row of one tensor: the format, written out."""
    if codec == "sign":
        return width // 8 + 4
    if codec == "sign(block=16)":
        return width // 8 + 2 * math.ceil(width / 16)
    return width * {"identity": 4, "identity(bf16)": 2, "identity(f64)": 8}[codec]


def one_mean(x: torch.Tensor, codec: fn.Codec, axis: str = "data") -> torch.Tensor:
    tx = fn.compressed_average(axis, codec, fn.off())
    (y,), _ = tx.compressed_update([x], fn.ErrorFeedbackState(((),), ((),)), [x])
    return y


@given(st.sampled_from(sorted(CODECS)), st.integers(1, 5), st.integers(1, 200))
def test_a_compressed_mean_costs_its_rows_to_the_others_and_its_shard_to_the_others(name, world, n):
    codec = CODECS[name]()
    width = math.ceil(n / (world * codec.align)) * codec.align
    with fn.ledger() as book:
        fn.simulate(lambda x: one_mean(x, codec), "data", world)(torch.randn(world, n))
    each = (world - 1) * row_bytes(name, width)
    expected = {("data", "all_to_all"): each, ("data", "all_gather"): each} if world > 1 else {}
    assert book.sent == expected
    assert book.messages == dict.fromkeys(expected, 1)
    assert book.total == book.on("data") == sum(expected.values())


@given(st.integers(1, 6), st.integers(0, 50), st.sampled_from([torch.float16, torch.float32, torch.float64]))
def test_exact_collectives_cost_what_the_least_algorithm_moves(world, n, dtype):
    x = torch.ones(world, n, dtype=dtype)
    size = n * dtype.itemsize
    with fn.ledger() as book:
        fn.simulate(lambda x: (fn.pmean(x, "a"), fn.all_gather(x, "a")), "a", world, out_dims=None)(x)
        fn.simulate(lambda x: fn.all_to_all(x, "a"), "a", world, in_dims=None)(x)
    expected = {
        ("a", "all_reduce"): math.ceil(size * 2 * (world - 1) / world),
        ("a", "all_gather"): size * (world - 1),
        ("a", "all_to_all"): size * (world - 1),
    }
    assert book.sent == {key: count for key, count in expected.items() if count}


def test_axes_are_counted_apart():
    x = torch.ones(2, 3, 30)
    with fn.ledger() as book:
        inner = fn.simulate(lambda x: fn.pmean(fn.all_gather(x, "node"), "local"), "local", 3)
        fn.simulate(inner, "node", 2)(x)
    assert book.on("node") == 120
    assert book.on("local") == 2 * 120 * 2 * 2 // 3
    assert book.on("data") == 0
    assert book.total == book.on("node") + book.on("local")


@pytest.mark.parametrize("inside", [True, False])
def test_a_batch_that_passes_by_is_as_many_times_the_bytes(inside):
    def f(x):
        return fn.pmean(x, "data")

    run = (
        fn.simulate(torch.func.vmap(f), "data", 2, in_dims=1) if inside else torch.func.vmap(fn.simulate(f, "data", 2))
    )
    with fn.ledger() as book:
        run(torch.ones(5, 2, 100))
    assert book.total == 5 * 400


def test_ledgers_nest_and_each_counts_its_own_time():
    f = fn.simulate(lambda x: fn.pmean(x, "data"), "data", 2)
    with fn.ledger() as outer:
        f(torch.ones(2, 10))
        with fn.ledger() as inner:
            f(torch.ones(2, 100))
        f(torch.ones(2, 10))
    f(torch.ones(2, 1000))
    assert (outer.total, inner.total) == (480, 400)
    with inner:
        f(torch.ones(2, 1))
    assert inner.total == 404
    assert "404 bytes" in repr(inner)


def test_other_threads_are_not_counted_and_have_ledgers_of_their_own():
    f = fn.simulate(lambda x: fn.pmean(x, "data"), "data", 2)

    def elsewhere() -> int:
        f(torch.ones(2, 10))
        with fn.ledger() as own:
            f(torch.ones(2, 100))
        return own.total

    with fn.ledger() as book, ThreadPoolExecutor() as pool:
        assert pool.submit(elsewhere).result() == 400
        f(torch.ones(2, 1))
    assert book.total == 4


def test_a_failing_step_closes_its_ledger():
    with pytest.raises(RuntimeError, match="inside"), fn.ledger():
        raise RuntimeError("inside")


@pytest.mark.slow
def test_a_compiled_step_counts_in_every_run_and_is_not_traced_again(graphs):
    f = fn.simulate(lambda x: one_mean(x, fn.sign()), "data", 2)
    compiled = torch.compile(f, fullgraph=True, backend=graphs)
    x = torch.randn(2, 48)
    with fn.ledger() as book:
        f(x)
    expected = book.sent
    compiled(x)
    for _ in range(2):
        with fn.ledger() as book:
            compiled(x)
        assert book.sent == expected
    with fn.ledger() as book:
        for _ in range(3):
            compiled(x)
    assert book.sent == {key: 3 * count for key, count in expected.items()}
    assert graphs.count == 1


STEP = {"w": (33, 7), "b": (5,)}


def step_bytes(phase: fn.Phase, params, grads) -> dict:
    tx = fn.onebit_adam(axis="data")
    state = tx.init(params)
    with fn.ledger() as book:
        updates, _ = tx.update(phase)(grads, state, params)
    assert updates["w"].shape == STEP["w"]
    return book.sent


def test_one_bit_adam_sends_the_bytes_its_docstring_promises():
    """231 and 5 elements on 2 ranks: rows of 120 and 8 elements, 16 bytes of signs and three scales of blocks."""
    params = {name: torch.ones(shape) for name, shape in STEP.items()}
    grads = {name: torch.ones(2, *shape) for name, shape in STEP.items()}
    found = {}

    def on_rank(phase, g):
        found[phase] = step_bytes(phase, params, g)
        return fn.pmean(g["b"], "data")

    for phase in (fn.Phase.WARMUP, fn.Phase.COMPRESSED):
        fn.simulate(partial(on_rank, phase), "data", 2)(grads)
    assert found[fn.Phase.WARMUP] == {("data", "all_reduce"): (231 + 5) * 4}
    assert found[fn.Phase.COMPRESSED] == {("data", "all_to_all"): 22, ("data", "all_gather"): 22}


COMPILED = ["sign(block=16)"]
"""A graph takes seconds, and what is counted is told from its messages."""


def on_processes(compile: bool) -> list:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
    found = []
    with fn.bind(mesh):
        for name in COMPILED if compile else sorted(CODECS):
            torch._dynamo.reset()
            codec = CODECS[name]()

            def f(x, codec=codec):
                return one_mean(x, codec), fn.pmean(x, "data")

            if compile:
                f = torch.compile(f, fullgraph=True, backend="aot_eager")
                f(torch.randn(100))
            with fn.ledger() as book:
                f(torch.randn(100))
            found.append((name, book.sent, book.messages))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("compile", [False, pytest.param(True, marks=pytest.mark.reliability)])
def test_processes_count_what_the_simulation_counts(compile):
    outcomes = ranks.run(2, on_processes, compile)
    for name, sent, messages in outcomes[0]:
        codec = CODECS[name]()
        with fn.ledger() as book:
            fn.simulate(lambda x: (one_mean(x, codec), fn.pmean(x, "data")), "data", 2)(torch.randn(2, 100))  # noqa: B023
        assert sent == book.sent
        assert messages == book.messages
    assert outcomes[0] == outcomes[1]
