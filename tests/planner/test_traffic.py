"""The planner's bytes are the ledger's: for every method that runs here, counted while it runs."""

from __future__ import annotations

from collections import Counter
from functools import partial
from itertools import product

import chains
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import Cases
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fn
import fn.adapters.fsdp
from fn.planner import traffic
from fn.planner.gpt import COMMON, gpt
from fn.planner.methods import method as method_of
from fn.planner.methods import methods, rows
from fn.planner.network import Cost, Message, network

SHAPES = ((5,), (3, 7), (16, 16), (300,), (1,), (40, 9))
MODEL = traffic.Model(SHAPES)
CODECS = {
    "sign": fn.sign, "sign(block=16)": partial(fn.sign, block=16), "int4": fn.int4, "int8": fn.int8, "fp8": fn.fp8
}  # fmt: skip


def counted(book: fn.Ledger) -> dict[str, int]:
    return {collective: size for (_, collective), size in book.sent.items()}


def planned(messages: list[Message]) -> dict[str, int]:
    found: dict[str, int] = {}
    for message in messages:
        if message.size:
            found[message.collective] = found.get(message.collective, 0) + message.size
    return found


def counted_of(messages: list[Message]) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for message in messages:
        found[message[:2]] += message.size
    return +found


def step(
    tx: fn.Transform, phase: fn.Phase | fn.Round, ranks: traffic.Ranks, shapes: tuple[traffic.Shape, ...] = SHAPES
) -> fn.Ledger:
    """Count a step over tensors of these shapes on simulated ranks."""
    params = [torch.ones(shape) for shape in shapes]

    def run(x):
        state = tx.init(params)
        with fn.ledger() as book:
            tx.update(phase)([x * p for p in params], state, params)
        books.append(book)
        return x

    books: list[fn.Ledger] = []
    if isinstance(ranks, int):
        fn.simulate(run, "data", ranks)(torch.rand(ranks))
    else:
        fn.simulate(fn.simulate(run, "local", ranks[0]), "node", ranks[1])(torch.rand(ranks[1], ranks[0]))
    return books[0]


def in_codes(codec, *, axis):
    """Return AdamW whose gradients are averaged as `average_gradients` does it."""
    return fn.chain(fn.average(axis), fn.compressed_average(axis, codec, fn.off()), fn.scale_by_adam())


def sdp4bit(*, axis):
    back = {"gather": fn.int4(2048), "gather_feedback": fn.classic(), "master": False}
    return fn.sharded(fn.scale_by_adam(), axis, fn.rotated(fn.int4(128)), fn.off(), **back)


RECIPES = {
    "SDP4Bit": [sdp4bit],
    "adamw, int8 gradients": [partial(in_codes, fn.int8())],
    "adamw, int4 gradients": [partial(in_codes, fn.int4())],
    "adamw, fp8 gradients": [partial(in_codes, fn.fp8())],
    "adamw, int4 gradients, late": [fn.late(partial(in_codes, fn.int4()))],
}
"""Rows of what is no named optimizer, but something that a user writes."""

MAKES = {
    **RECIPES,
    "adamw": [fn.adamw, fn.lamb],
    "onebit_adam": [fn.onebit_adam],
    "onebit_adam, overlapped": [fn.onebit_adam],
    "onebit_adam, servers=False": [partial(fn.onebit_adam, servers=False)],
    "onebit_adam, servers=False, overlapped": [partial(fn.onebit_adam, servers=False)],
    "onebit_adam, 1 bit": [partial(fn.onebit_adam, codec=fn.sign())],
    "onebit_adam, 1 bit, overlapped": [partial(fn.onebit_adam, codec=fn.sign())],
    "onebit_adam, int8": [partial(fn.onebit_adam, codec=fn.int8(), feedback=fn.off())],
    "onebit_lamb": [fn.onebit_lamb],
    "zero_one_adam": [fn.zero_one_adam],
    "zero_one_adam, servers=False": [partial(fn.zero_one_adam, servers=False)],
    "zero_one_adam, 1 bit": [partial(fn.zero_one_adam, codec=fn.sign())],
    "sharded_onebit_adam": [fn.sharded_onebit_adam],
    "sharded_onebit_adam, 1 bit": [partial(fn.sharded_onebit_adam, codec=fn.sign())],
    "loco_adamw, int4": [fn.loco_adamw],
    "loco_adamw, int4, int8 back": [partial(fn.loco_adamw, gather=fn.int8(), master=True)],
    "powersgd_adamw, rank 4": [fn.powersgd_adamw],
    "dion, rank 1/4": [fn.dion],
    "muon, DDP": [partial(fn.muon, owned=False)],
    "muon": [fn.muon, fn.normuon],
    "muon, int8": [partial(fn.muon, codec=fn.int8())],
    "sign_muon": [fn.sign_muon],
    "lion_vote": [fn.lion_vote],
    "diloco": [fn.diloco, fn.local_sgd],
    "muloco": [fn.muloco],
    "muloco, int8": [partial(fn.muloco, codec=fn.int8())],
    "diloco, int8": [partial(fn.diloco, codec=fn.int8())],
    "diloco, int8, delayed": [partial(fn.diloco, codec=fn.int8())],
    "diloco, int8, late": [partial(fn.diloco, codec=fn.int8())],
    "diloco, e3m0, 4 fragments, delayed": [partial(fn.diloco, codec=fn.e3m0(), fragments=4)],
    "diloco, 2 bits": [partial(fn.diloco, codec=fn.bins(4, 6))],
    "diloco, 1 bit": [partial(fn.diloco, codec=fn.sign())],
    "sparse_loco": [fn.sparse_loco],
    "adamw, late": [fn.late(fn.adamw)],
    "onebit_adam, late": [fn.late(fn.onebit_adam)],
    "muon, late": [fn.late(fn.muon)],
    "muon, int8, late": [fn.late(partial(fn.muon, codec=fn.int8()))],
    "sign_muon, late": [fn.late(fn.sign_muon)],
}
ON_SHARDS = {"muon, FSDP2": [fn.muon, fn.normuon], "muon, FSDP2, int8": [partial(fn.muon, codec=fn.int8())]}
"""Rows of params that FSDP2 divides."""

CONTRIB = rows(contrib=True)[len(rows()) :]
MAKES |= {row.name: [getattr(fn.contrib, row.name.partition(",")[0])] for row in CONTRIB}
"""What each method of fn in the plan is made with."""


def test_every_named_optimizer_of_fn_has_a_row():
    table = [row for row in rows(contrib=True) if row.name != "bf16 gradients"]
    named = {name for row in table for name in (row.name.partition(",")[0], *row.alike)}
    public = {name for name in fn.__all__ if getattr(getattr(fn, name), "__module__", "").endswith("optimizers")}
    public |= {row.name.partition(",")[0] for row in CONTRIB}
    assert named - {"SDP4Bit"} == public >= {"adamw", "diloco", "dion"}
    every = MAKES | ON_SHARDS
    assert {row.name for row in table} == set(every)
    for row in (row for row in table if row.name not in RECIPES):
        made = {getattr(original(make), "func", original(make)).__name__ for make in every[row.name]}
        assert made == {row.name.partition(",")[0], *row.alike}


def original(make):
    """Return what `fn.late` was given, and others as they are."""
    return getattr(make, "__wrapped__", make)


def exchanges(row):
    """Return the rounds of a period in which something begins or ends, once as much is on its way as ever will be."""
    h = 20 if row.interval > 1 else 1
    schedule = fn.every(h, fragments=row.cut if isinstance(row.cut, int) else 1, delay=row.delay_of(h))
    return [schedule(t) for t in range(2 * h, 3 * h) if schedule(t).phase is fn.Phase.COMPRESSED]


@pytest.mark.parametrize("ranks", [3, (2, 3)])
@pytest.mark.parametrize("name", MAKES)
def test_a_row_of_the_plan_is_what_the_ledger_counts(name, ranks):
    """In two levels a local step is made with the gradients' mean in the node, and only exchanges run over both."""
    (row,) = [row for row in rows(contrib=True) if row.name == name]
    if not row.two_level and isinstance(ranks, tuple):
        with pytest.raises((TypeError, ValueError), match=r"single axis|the name of one axis"):
            MAKES[name][0](axis=("local", "node"))
        return
    method = method_of(row, MODEL, ranks)
    axis = "data" if isinstance(ranks, int) else ("local", "node")
    for make in MAKES[name]:
        tx, phase = make(axis=axis), fn.Phase.COMPRESSED if row.compressed else fn.Phase.WARMUP
        books = [step(tx, each, ranks) for each in (exchanges(row) if row.local else [phase])]
        sent = sum((Counter(book.sent) for book in books), Counter())
        assert sent == counted_of(method.messages)
        if row.local:
            assert not step(tx, fn.Round(), ranks).total
        if row.period:
            assert Counter(step(tx, fn.Phase.WARMUP, ranks).sent) == counted_of([*method.exact])
    if row.local and isinstance(ranks, tuple):
        each = [message for _, part in method.each_step for message in part]
        assert counted_of(each) == Counter(step(fn.average("local"), fn.Phase.WARMUP, ranks).sent)


case = Cases(4)


def of_uneven_rows() -> torch.nn.Module:
    """Return layers whose rows four ranks do not share evenly, behind an embedding."""
    return torch.nn.Sequential(
        torch.nn.Embedding(11, 6), torch.nn.Linear(6, 10), torch.nn.Linear(10, 7, bias=False), torch.nn.Linear(7, 9)
    )


@case
def steps_on_shards() -> dict[tuple[str, int, str], tuple[dict[str, int], dict[str, int]]]:
    """Return what a rank sends of FSDP2's own in a step, and of Muon's, by row, ranks of a node, and method."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local")), {}
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
    for (name, makes), local in product(ON_SHARDS.items(), (4, 2)):
        for make in makes:
            net = of_uneven_rows()
            labels = [*fn.labels_of(net).values()]
            fully_shard(net, mesh=flat if local == 4 else mesh, reshard_after_forward=False)
            exact = fn.adapters.fsdp.compress(net, fn.identity(), fn.off(), gather=fn.identity())
            coded = {"schedule": fn.freeze_after(0)} if "int8" in name else {}
            opt = fn.Optimizer(net.parameters(), make, labels=labels, lr=0.01, **coded)
            net(torch.arange(8)).square().mean().backward()
            with fn.ledger() as book:
                opt.step()
            assert sum(book.messages.values()) == 3
            found[name, local, getattr(make, "func", make).__name__] = counted(exact.sent), counted(book)
    return found


def test_rows_of_shards_are_what_ranks_of_fsdp2_count():
    """In the mean over ranks, for owners send less. Replicas of shards send nothing but what FSDP2 averages itself."""
    net = of_uneven_rows()
    shapes, hidden = [tuple(p.shape) for p in net.parameters()], [x == "hidden" for x in fn.labels_of(net).values()]
    answers = case.answer("steps_on_shards")
    for name, local, method in answers[0]:
        (row,) = [row for row in rows() if row.name == name]
        ranks = 4 if local == 4 else (local, 4 // local)
        plan = method_of(row, traffic.of_shapes(shapes, 4, hidden), ranks, bucket=2**30)
        own, muon = (sum((Counter(answer[name, local, method][k]) for answer in answers), Counter()) for k in (0, 1))
        ((_, behind),) = plan.each_step
        assert [4 * m.size for m in behind if m.axis != "node"] == [own["all_to_all"], own["all_gather"]]
        assert [m.size for m in behind if m.axis == "node"] == [behind[0].size] * (local == 2)  # half of two, twice
        there_and_back = planned(plan.messages)
        assert 4 * there_and_back["all_reduce"] == muon["all_reduce"]
        assert 0 <= 4 * there_and_back["all_to_all"] - muon["all_to_all"] < 8  # each of two messages is rounded up


def test_experts_stay_on_their_ranks_and_one_rank_sends_nothing():
    experts = traffic.Model(((8, 16, 32), (7,)), hidden=(True, False))
    assert traffic.unsharded(experts, 4) == traffic.unsharded(traffic.Model(((16, 32),)), 1) == []
    assert traffic.of_fsdp(experts, (1, 1)) == traffic.of_fsdp(experts, 1) == []


class Block(torch.nn.Module):
    """Part of a language model: with experts, a router and a convolution, too."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.attention, self.output = torch.nn.Linear(wide, 3 * wide), torch.nn.Linear(wide, wide, bias=False)
        self.norm, self.mixing = torch.nn.LayerNorm(wide), torch.nn.Conv1d(wide, wide, 3)
        self.router, self.experts = torch.nn.Linear(wide, 4), torch.nn.Parameter(torch.ones(4, wide, 2 * wide))


class LanguageModel(torch.nn.Module):
    """As much of one as has parameters; the head shares the embedding."""

    def __init__(self, words: int = 203, wide: int = 24) -> None:
        super().__init__()
        self.words, self.positions = torch.nn.Embedding(words, wide), torch.nn.Embedding(17, wide)
        self.blocks, self.head = torch.nn.ModuleList(Block(wide) for _ in range(2)), torch.nn.Linear(wide, words)
        self.head.weight = self.words.weight


TOLD_BY_LABELS = ("muon, int8", "sign_muon", "dion, rank 1/4", "dion2, rows 1/4")
"""Of the others the labels change what ranks calculate, not what they send."""

LABELLED = [name for name in MAKES if name.split(",")[0] in (
    "muon", "normuon", "sign_muon", "dion", "dion2", "lion_muon", "nanochat", "muon_bp", "ef21_muon"
) and ", late" not in name]  # fmt: skip


@pytest.mark.parametrize("ranks", [3, (2, 3)])
@pytest.mark.parametrize("name", LABELLED)
def test_what_labels_say_of_a_model_is_what_the_ledger_counts(name, ranks):
    """Votes, owners and choices are of hidden matrices, and of stacks by slices; others travel as AdamW's."""
    model = LanguageModel()
    shapes, labels = tuple(tuple(p.shape) for p in model.parameters()), fn.labels_of(model)
    planned_for = traffic.of_shapes(shapes, 4, [label == "hidden" for label in labels.values()])
    assert {*labels.values()} == {"hidden", "other"}
    (row,) = [row for row in rows(contrib=True) if row.name == name]
    if not row.two_level and isinstance(ranks, tuple):
        return
    axis = "data" if isinstance(ranks, int) else ("local", "node")
    phase = fn.Phase.COMPRESSED if row.compressed else fn.Phase.WARMUP
    for make in MAKES[name]:
        book = step(make(axis=axis, labels=[*labels.values()]), phase, ranks, shapes)
        assert Counter(book.sent) == counted_of(method_of(row, planned_for, ranks).messages)
        without = counted_of(method_of(row, traffic.of_shapes(shapes, 4), ranks).messages)
        assert (without != Counter(book.sent)) == (name in TOLD_BY_LABELS)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("layout", ["flat", "per_tensor", "fused"])
def test_without_servers_every_rank_gathers_the_codes_of_all(ranks, layout):
    book = step(chains.onebit_adam(axis="data", layout=layout, servers=False), fn.Phase.COMPRESSED, ranks)
    found = traffic.codes(MODEL, ranks, fn.sign(), layout=layout, servers=False)
    assert counted(book) == planned(found)
    assert {message.collective for message in found} <= {"all_gather"}
    assert sum(book.messages.values()) == len(found) == (ranks > 1) * (len(SHAPES) if layout == "per_tensor" else 1)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(sorted(CODECS)), st.integers(1, 6), st.lists(st.integers(1, 700), min_size=1, max_size=4))
def test_codes_of_any_tensors_on_any_number_of_ranks(name, ranks, lengths):
    codec = CODECS[name]()
    params = [torch.ones(n) for n in lengths]
    tx = fn.compressed_average("data", codec, fn.off())

    def run(x):
        tx.compressed_update([x * p for p in params], tx.init(params), params)
        return x

    with fn.ledger() as book:
        fn.simulate(run, "data", ranks)(torch.rand(ranks))
    model = traffic.Model(tuple((n,) for n in lengths))
    assert counted(book) == planned(traffic.codes(model, ranks, codec))


@pytest.mark.parametrize("nodes", [2, 4])
@pytest.mark.parametrize("servers", [True, False])
def test_between_nodes_codes_are_of_shards(nodes, servers):
    model = traffic.Model(((64, 32), (128,), (256, 16)))
    params = [torch.ones(shape) for shape in model.shapes]
    rule = (fn.identity(), fn.sign()), (fn.off(), fn.off())
    tx = fn.compressed_average(("local", "node"), *rule, servers=servers)

    def run(x):
        tx.compressed_update([x * p for p in params], tx.init(params), params)
        return x

    with fn.ledger() as book:
        fn.simulate(fn.simulate(run, "local", 2), "node", nodes)(torch.rand(nodes, 2))
    assert counted_of(traffic.codes(model, (2, nodes), fn.sign(), servers=servers)) == Counter(book.sent)


def test_power_sgd_compresses_the_matrices_that_are_worth_it():
    assert traffic.power_sgd(traffic.Model(((16, 16),)), 2, 1) == [Message("data", "all_reduce", 16 * 4)] * 2
    assert traffic.power_sgd(traffic.Model(((4, 4),)), 2, 1) == [Message("data", "all_reduce", 16 * 4)]
    assert traffic.power_sgd(traffic.Model(((100,),)), 2, 1) == [Message("data", "all_reduce", 400)]
    (left, right) = traffic.power_sgd(traffic.Model(((64, 4, 32),)), 2, 2)
    assert (left.size, right.size) == (64 * 2 * 4, 128 * 2 * 4)


@given(st.integers(1, 10**10), st.integers(1, 300))
def test_a_model_has_as_many_parameters_as_it_says(params, tensors):
    if tensors > params:
        with pytest.raises(ValueError, match=r"tensors: .*got "):
            traffic.model(params, tensors)
    else:
        assert traffic.model(params, tensors).params == params


def test_buckets_are_filled_from_the_last_parameter_and_hold_everything():
    model = traffic.Model(((100, 100),) * 5)
    found = traffic.buckets(model, limit=80_000, first=1000)
    assert [bucket.tensors for bucket in found] == [1, 2, 2]
    assert sum(bucket.params for bucket in found) == model.params


SIDES = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=6)


@given(st.integers(1, 10**12), st.one_of(st.none(), st.floats(0, 1)), st.one_of(st.none(), st.integers(1, 300)))
def test_a_model_that_is_assumed_has_the_share_of_hidden_matrices_that_is_said(params, share, tensors):
    made = traffic.model(params, tensors and min(tensors, params), share=share)
    assumed = gpt(params, share)
    assert made.params == params
    assert made.of_kind(hidden=True).params == assumed.hidden
    assert made.hidden_share == assumed.share
    assert all(len(run.shape) == 2 for run in made.runs if run.hidden)
    if share is not None:
        assert assumed.share == pytest.approx(share, abs=0.5 / params)
    if tensors is not None:
        assert made.tensors == pytest.approx(min(tensors, params), abs=6)


@pytest.mark.parametrize(("wide", "layers"), COMMON)
def test_of_a_common_size_the_common_model_is_assumed(wide, layers):
    params = (50257 + 1024) * wide + layers * 12 * wide**2
    for near in (params, int(params * 1.003)):  # numbers are rounded
        assert f"{gpt(near)}" == f"a GPT of width {wide:,} with {layers} layers"
    found = {run.shape: run.times for run in traffic.model(params).runs}
    matrices = {(50257 + 1024 - 2 * layers - 1, wide): 1, (wide, wide): 4 * layers, (4 * wide, wide): 2 * layers}
    assert found == matrices | {(wide,): 2 * layers + 1}


@given(SIDES, st.lists(st.integers(1, 5), min_size=6, max_size=6), st.integers(1, 7), st.integers(1, 4))
def test_equal_tensors_in_a_row_cost_what_each_of_them_costs(shapes, times, kilobytes, count):
    """A model of runs is the model of all tensors: in every method's bytes, in buckets and in fragments."""
    each = [shape for shape, often in zip(shapes, times, strict=False) for _ in range(often)]
    plain, runs = traffic.Model(tuple(each)), traffic.of_shapes(each, 4)
    assert (runs.params, runs.tensors, runs.lengths) == (plain.params, plain.tensors, plain.lengths)
    if not plain.params:
        return

    def expanded(models):
        return [[run.shape for run in model.runs for _ in range(run.times)] for model in models]

    limits = 1000 * kilobytes, 500
    assert expanded(traffic.buckets(runs, *limits)) == expanded(traffic.buckets(plain, *limits))
    assert expanded(traffic.fragments(runs, count)) == [each[i::count] for i in range(count) if each[i::count]]
    for row in rows(contrib=True):
        if row.fits(plain):
            assert planned(row.send(runs, ranks=3)) == planned(row.send(plain, ranks=3)), row.name


@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=4).filter(any),
    st.one_of(st.floats(1e-4, 1), st.just(1.0)), st.sampled_from([2, 4, 8]),
)  # fmt: skip
def test_the_largest_numbers_are_what_top_k_sends(lengths, fraction, width):
    model = traffic.Model(tuple((n,) for n in lengths), width)
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}[width]
    size = traffic.payload_bytes(fn.top_k(fraction), tuple(n for n in lengths if n), dtype)
    assert traffic.largest(model, 3, fraction) == [Message("data", "all_gather", 2 * size)]


@given(st.lists(st.integers(0, 11), max_size=3), st.integers(1, 5))
def test_chunks_are_those_that_the_bases_cut(shape, tile):
    x = torch.empty(shape)
    sides = (1, x.numel()) if x.ndim < 2 else (shape[0], x[0].numel() if shape[0] else 0)
    for basis, cut in ((fn.dct(tile), tuple(shape) or (1,)), (fn.tiles(tile), sides)):
        parts = [(part.shape[1], part.numel()) for part in basis.into(x) if part.numel()]
        assert sorted(traffic.chunks(cut, tile)) == sorted(parts)


def test_parts_send_what_the_whole_sends_up_to_padding():
    net = network(8, 8, Cost(1e-6, 1e9))
    found = {m.name: m for m in methods(traffic.model(30_000_000, tensors=150), net)}
    for name, bits in {"onebit_adam": 1.25, "onebit_adam, 1 bit": 1.0}.items():
        serial, overlapped = found[name], found[f"{name}, overlapped"]
        assert len(overlapped.parts) == 6
        assert sum(f for f, _ in overlapped.parts) == pytest.approx(1)
        assert overlapped.size == serial.size
        assert serial.size == pytest.approx(2 * 7 / 8 * 30e6 * bits / 8, rel=0.01)


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("width", [2, 4])
def test_pieces_of_one_row_cost_what_each_of_them_costs(name, width):
    """The planner adds up a piece at a time what the collective makes of all pieces together."""
    codec = CODECS[name]()
    lengths = (5 * 64, 300 * 64, 64, 300 * 64, 7777 * 64, 64)
    dtype = {2: torch.bfloat16, 4: torch.float32}[width]
    assert traffic.row_bytes(codec, lengths, 1, width=width) == traffic.payload_bytes(codec, lengths, dtype)
