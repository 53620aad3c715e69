"""`average` and `compressed_average`: trees in, the same trees out, on every rank the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fn
from fn import Phase, tree

SHAPES = {"matrix": (5, 7), "vector": (9,), "scalar": (), "empty": (0, 3), "cube": (2, 3, 4)}


def updates(world: int, dtype=torch.float64, shapes=SHAPES):
    return {name: torch.randn(world, *shape, dtype=torch.float64).to(dtype) for name, shape in shapes.items()}


def run(tx, phase, world, u, state=None, out=None):
    """Return the updates, which must be the same on every rank, and the state of all ranks."""
    if state is None:
        state = fn.simulate(tx.init, "data", world)(u)
    return fn.simulate(lambda u, s: tx.update(phase)(u, s, u), "data", world, out_dims=(out, 0))(u, state)


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_average_is_the_mean_in_the_warm_up_and_the_identity_afterwards(world):
    u = updates(world)
    found, state = run(fn.average("data"), Phase.WARMUP, world, u)
    assert state == ()
    for name, leaf in u.items():
        torch.testing.assert_close(found[name], leaf.mean(0), rtol=1e-13, atol=1e-15)
    for phase in (Phase.COMPRESSED, Phase.LOCAL):
        found, _ = run(fn.average("data"), phase, world, u, out=0)
        assert all(torch.equal(found[name], leaf) for name, leaf in u.items())


def test_average_without_an_axis_averages_nothing():
    u = updates(1)
    found, _ = fn.average(None).warmup_update(u, (), u)
    assert all(found[name] is leaf for name, leaf in u.items())


@pytest.mark.parametrize(("codec", "share"), [(fn.int8(), 1 / 4), (fn.int4(), 1 / 8), (fn.sign(), 1 / 32)])
def test_average_in_codes_is_the_compressed_mean_in_the_warm_up_and_the_identity_afterwards(codec, share):
    world, u = 4, {"matrix": torch.randn(4, 64, 64), "vector": torch.randn(4, 100)}
    tx, same = fn.average("data", codec), fn.compressed_average("data", codec, fn.damped())
    state = other = None
    for _ in range(3):
        with fn.ledger() as book:
            found, state = run(tx, Phase.WARMUP, world, u, state)
        expected, other = run(same, Phase.COMPRESSED, world, u, other)
        assert all(map(torch.equal, tree.leaves((found, state)), tree.leaves((expected, other))))
    with fn.ledger() as exact:
        run(fn.average("data"), Phase.WARMUP, world, u)
    assert share < book.total / exact.total < 1.1 * share
    assert fn.rank_dims(state) == tree.map(lambda _: 0, state)
    for phase in (Phase.COMPRESSED, Phase.LOCAL):
        found, after = run(tx, phase, world, u, state, out=0)
        assert all(map(torch.equal, tree.leaves((found, after)), tree.leaves((u, state))))


def test_what_average_in_codes_does_not_deliver_is_kept():
    """With a feedback that forgets nothing, all that is sent arrives or is an error."""
    tx, state, sent, delivered = fn.average("data", fn.int4(16), fn.classic()), None, 0.0, 0.0
    for _ in range(5):
        u = {"x": torch.randn(3, 96, dtype=torch.float64)}
        found, state = run(tx, Phase.WARMUP, 3, u, state)
        sent, delivered = sent + u["x"].mean(0), delivered + found["x"]
    kept = state.gradient_errors.worker[0].mean(0) + state.gradient_errors.server[0].flatten()
    assert kept.norm() > 1e-3
    torch.testing.assert_close(delivered + kept, sent, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"axis": "data", "feedback": fn.classic()}, "feedback: is given without a codec"),
        ({"axis": None, "codec": fn.int8()}, "codec: is given without an axis"),
        ({"axis": "data", "codec": fn.int8(), "layout": "flt"}, "layout: .*got 'flt'"),
    ],
)
def test_average_refuses_what_has_no_meaning(arguments, text):
    with pytest.raises(ValueError, match=text):
        fn.average(**arguments)


def test_average_sends_one_message_per_dtype():
    u = {"a": torch.ones(2, 3), "b": torch.ones(2, 4), "c": torch.ones(2, 5).double()}
    with fn.ledger() as book:
        found, _ = run(fn.average("data"), Phase.WARMUP, 2, u)
    assert book.messages == {("data", "all_reduce"): 2}
    assert book.total == 7 * 4 + 5 * 8
    assert tree.map(lambda x: x.dtype, found) == {"a": torch.float32, "b": torch.float32, "c": torch.float64}


@given(
    st.integers(2, 5),
    st.lists(st.integers(0, 40), min_size=1, max_size=4),
    st.sampled_from([None, 8, 16]),
    st.integers(0, 2**31),
)
def test_padding_never_dilutes_a_scale_and_never_keeps_an_error(world, lengths, block, seed):
    """Whatever the lengths, all that was to be sent is delivered or kept by real elements; padding holds zeros."""
    generator = torch.Generator().manual_seed(seed)
    tx = fn.compressed_average("data", fn.sign(block=block), layout="per_tensor")
    state = None
    sent = [torch.zeros(n, dtype=torch.float64) for n in lengths]
    delivered = [torch.zeros(n, dtype=torch.float64) for n in lengths]
    for _ in range(3):
        u = [torch.randn(world, n, generator=generator, dtype=torch.float64) for n in lengths]
        found, state = run(tx, Phase.COMPRESSED, world, u, state)
        for i, leaf in enumerate(u):
            sent[i] += leaf.mean(0)
            delivered[i] += found[i]
    for i, n in enumerate(lengths):
        worker, server = state.worker[i], state.server[i].flatten()
        assert not worker[:, n:].any()
        assert not server[n:].any()
        kept = worker[:, :n].mean(0) + server[:n]
        torch.testing.assert_close(delivered[i] + kept, sent[i], rtol=0, atol=1e-11)


@pytest.mark.parametrize("codec", [fn.sign(), fn.sign(block=16), fn.identity()], ids=["sign", "blocks", "identity"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_layouts_differ_in_messages_and_not_in_meaning(codec, dtype):
    flat = fn.compressed_average("data", codec)
    apart = fn.compressed_average("data", codec, layout="per_tensor")
    states = [None, None]
    shapes = {name: shape for name, shape in SHAPES.items() if name != "empty"}
    for _ in range(4):
        u = updates(3, dtype, shapes)
        books = [fn.ledger(), fn.ledger()]
        results = []
        for i, tx in enumerate((flat, apart)):
            with books[i]:
                found, states[i] = run(tx, Phase.COMPRESSED, 3, u, states[i])
            results.append(found)
        rounding = 1e-5 if dtype == torch.float32 else 1e-13
        for a, b in zip(*map(tree.leaves, results), strict=True):
            torch.testing.assert_close(a, b, rtol=rounding, atol=rounding)
        assert books[0].total == books[1].total
        assert set(books[0].messages.values()) == {1}
        assert set(books[1].messages.values()) == {len(shapes)}


def test_the_model_is_one_exchange_where_deepspeeds_is_four_collectives_for_each_tensor():
    """5 tensors: 2 messages, tensor by tensor 10; with bits and scales apart, in both halves, DeepSpeed's 20.

    Differs: fn.transforms.average.compressed_average: DeepSpeed exchanges tensor by tensor, four collectives each.
    """
    u = {name: torch.randn(2, 3 + i) for i, name in enumerate("abcde")}
    found = {}
    for layout in ("flat", "per_tensor"):
        with fn.ledger() as sent:
            run(fn.compressed_average("data", fn.sign(), layout=layout), Phase.COMPRESSED, 2, u)
        found[layout] = sum(sent.messages.values())
    parts = len(tree.leaves(fn.sign().encode(torch.ones(2, 8))))
    assert (found["flat"], found["per_tensor"], found["per_tensor"] * parts) == (2, 10, 20)


@pytest.mark.parametrize("phase", [Phase.WARMUP, Phase.LOCAL])
def test_outside_of_the_compressed_phase_updates_and_errors_rest(phase):
    u = updates(2)
    tx = fn.compressed_average("data", fn.sign())
    _, state = run(tx, Phase.COMPRESSED, 2, u)
    with fn.ledger() as book:
        found, after = run(tx, phase, 2, u, state, out=0)
    assert all(torch.equal(found[name], leaf) for name, leaf in u.items())
    assert all(map(torch.equal, tree.leaves(state), tree.leaves(after)))
    assert book.total == 0


def test_on_one_rank_nothing_is_quantised():
    u = updates(1)
    found, _ = run(fn.compressed_average("data", fn.sign()), Phase.COMPRESSED, 1, u)
    assert all(torch.equal(found[name], leaf[0]) for name, leaf in u.items())


def test_half_precision_travels_with_float32_and_all_come_back_in_place():
    u = {"a": torch.full((2, 3), 2.0), "b": torch.full((2, 5), -3.0).double(), "c": torch.full((2, 4), 5.0).bfloat16()}
    with fn.ledger() as book:
        found, state = run(fn.compressed_average("data", fn.sign()), Phase.COMPRESSED, 2, u)
    assert book.messages == {("data", "all_to_all"): 2, ("data", "all_gather"): 2}
    assert len(state.worker) == len(state.server) == 2
    for name, leaf in u.items():
        torch.testing.assert_close(found[name], leaf[0])


def test_an_unknown_layout_is_refused_by_name():
    with pytest.raises(ValueError, match=r"layout: .*flat.*per_tensor.*got 'tree'"):
        fn.compressed_average("data", fn.sign(), layout="tree")


def test_a_state_of_another_world_size_is_refused_not_reinterpreted():
    u = updates(2)
    tx = fn.compressed_average("data", fn.sign())
    _, state = run(tx, Phase.COMPRESSED, 2, u)
    bigger = tree.map(lambda e: torch.cat([e, e]), state)
    with pytest.raises(ValueError, match=r"error: has shape.*world size"):
        run(tx, Phase.COMPRESSED, 4, updates(4), bigger)


def test_a_state_of_params_of_another_number_is_refused_by_name():
    tx = fn.compressed_average("data", fn.sign(), layout="per_tensor")

    def step(x):
        return tx.update(Phase.COMPRESSED)([x, x], tx.init([x]), [x, x])

    with pytest.raises(ValueError, match=r"^state: .*2 vectors.*got 1; .*init"):
        fn.simulate(step, "data", 2)(torch.ones(2, 3))
