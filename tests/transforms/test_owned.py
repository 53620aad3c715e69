"""Owned tensors: the layout changes no number, real ranks are simulated ones, and shares of the work are equal."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
import torch.distributed as dist
from simulated import World
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, tree
from fn.collectives import messages
from fn.collectives import owners as collectives_owners
from fn.collectives.carriers import Carrier
from fn.transforms import owned as transforms_owned
from fn.transforms.owned import OwnedState, plan

SHAPES = {
    "a": (6, 5),
    "b": (6, 5),
    "vector": (7,),
    "c": (6, 5),
    "wide": (3, 8),
    "scalar": (),
    "empty": (0,),
    "d": (6, 5),
    "stack": (5, 6, 5),
}
W, C = Phase.WARMUP, Phase.COMPRESSED


def start(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def gradients(world: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(world, *shape, generator=generator).to(dtype) for name, shape in SHAPES.items()}


def inner() -> fn.Transform:
    """Muon for matrices and a stack of them, AdamW for the rest."""
    rest = fn.add_decayed_weights(0.1), fn.scale_by_learning_rate(0.05)
    kinds = {"muon": fn.chain(fn.scale_by_muon(), *rest), "adam": fn.chain(fn.scale_by_adam(), *rest)}
    return fn.partition(kinds, lambda params: tree.map(lambda p: "muon" if p.ndim > 1 else "adam", params))


CODED = {"codec": fn.int8(), "gather": fn.int8()}
MAKES = {
    "exact": lambda: fn.owned(inner(), "data"),
    "int8 both ways": lambda: fn.owned(inner(), "data", **CODED),
    "signs": lambda: fn.owned(inner(), "data", codec=fn.sign()),
    "int4 damped": lambda: fn.owned(inner(), "data", codec=fn.int4(), gather=fn.int8(), feedback=fn.damped()),
    "few": lambda: fn.owned(inner(), "data", codec=fn.top_k(0.5), gather=fn.e3m0()),
    "no moments": lambda: fn.owned(fn.scale_by_learning_rate(0.05), "data"),
}


WAYS = ("tcp", "gloo", "device")
"""Over connections of our own; over gloo; tensor by tensor and with codes that are joined, as on a device."""


@pytest.mark.parametrize("world", [1, 2, 3, 8])
@pytest.mark.parametrize("phase", [W, C])
def test_an_exact_step_is_that_of_all_ranks(world: int, phase: Phase) -> None:
    whole, owned = (World(tx, start(), world) for tx in (fn.chain(fn.average("data"), inner()), MAKES["exact"]()))
    for t in range(4):
        g = gradients(world, t)
        expected, found = whole.step(W, g).params, owned.step(phase, g).params
    for name in SHAPES:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


def test_what_is_not_delivered_is_kept_for_the_next_step() -> None:
    """Of an inner that hands on what it is given, all that is delivered and the errors add up to all means."""
    tx = fn.owned(fn.scale(1.0), "data", codec=fn.sign(), gather=fn.int4())
    world, total, given = (
        World(tx, start(), 3),
        tree.map(torch.zeros_like, start()),
        tree.map(torch.zeros_like, start()),
    )
    before = start()
    for t in range(5):
        g = gradients(3, t)
        world.step(C, g)
        given = tree.map(lambda a, x: a + x.mean(0), given, g)
    total = tree.map(lambda p, b: p - b, world.params, before)
    state = world.state
    for i, name in enumerate(SHAPES):
        worker, back, n = state.errors.worker[i], state.back[i], given[name].numel()
        owner = int(state.owners[i])
        kept = (worker.mean(0)[:n] + back[owner][:n]).view(given[name].shape)
        torch.testing.assert_close(total[name] + kept, given[name], rtol=1e-4, atol=1e-4)


def on_real_ranks(mesh: Any, name: str, way: str, dtype: torch.dtype) -> tuple[list[Any], Any, dict[Any, int], int]:
    world, rank = dist.get_world_size(), dist.get_rank()
    as_device = mock.patch.multiple(transforms_owned, _is_launched=lambda x: True) if way == "device" else nullcontext()
    parts = {"carrier_of": lambda transport, tensors: Carrier(transport, sends_parts=True)}
    in_parts = mock.patch.multiple(collectives_owners, **parts) if way == "device" else nullcontext()
    large = mock.patch.multiple(collectives_owners, LARGE=60)  # bytes: vectors are small, matrices large
    with fn.bind(mesh, tcp=way == "tcp"), as_device, in_parts, large, fn.ledger() as sent:
        tx, params, found = MAKES[name](), start(dtype), []
        state = tx.init(params)
        before = dict(sent.sent)
        for t, phase in enumerate([W, C, C, C]):
            g = tree.map(lambda x: x[rank], gradients(world, t, dtype))
            updates, state = tx.update(phase)(g, state, params)
            params = fn.apply_updates(params, updates)
            found.append(params)
    return found, state, {key: n - before.get(key, 0) for key, n in sent.sent.items()}, rank


def all_ways(world: int) -> dict[Any, Any]:
    """Return what `on_real_ranks` returns in each way."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    ways = [(name, way, torch.float32) for name in MAKES for way in ("tcp", "device")]
    ways += [(name, "gloo", torch.float32) for name in ("exact", "int8 both ways")]
    ways += [("int8 both ways", "device", torch.bfloat16)]
    ways += [("no moments", way, torch.bfloat16) for way in WAYS]
    return {way: on_real_ranks(mesh, *way) for way in ways}


@pytest.mark.parametrize("world", [3])
def test_real_ranks_take_the_steps_of_simulated_ones(world: int) -> None:
    """By each of `WAYS`: params to the bit, states of own tensors, and bytes in the mean."""
    of_ranks = ranks.run(world, all_ways, world)
    for way in of_ranks[0]:
        name, _, dtype = way
        simulated = World(MAKES[name](), start(dtype), world)
        with fn.ledger() as sent:
            expected = [simulated.step(p, gradients(world, t, dtype)).params for t, p in enumerate([W, C, C, C])]
        books = []
        for found in of_ranks:
            steps, state, counted, rank = found[way]
            books.append(counted)
            for params, simulated_params in zip(steps, expected, strict=True):
                assert all(torch.equal(params[k], simulated_params[k]) for k in SHAPES), way
            hold_own(state, simulated.state, rank)
        for key, total in sent.sent.items():  # a rank that owns little receives little, and sends more
            assert sum(book[key] for book in books) == pytest.approx(world * total, abs=world * 4 * 4), (way, key)


def with_few_tensors() -> list[Any]:
    found = []
    for tcp in (True, False):
        with fn.bind({"data": dist.group.WORLD}, tcp=tcp):
            for name in ("no moments", "int8 both ways"):
                for start in ({"a": torch.zeros(3, 2)}, {"a": torch.zeros(3, 2), "empty": torch.zeros(0, 2)}):
                    tx, g = MAKES[name](), {k: torch.full_like(x, 1.0 + dist.get_rank()) for k, x in start.items()}
                    state = tx.init(start)
                    for phase in (W, C):
                        updates, state = tx.update(phase)(g, state, start)
                    found.append(updates["a"])
    return found


def test_ranks_that_own_nothing_or_no_elements_take_part() -> None:
    """They send no update, and receive those of the others on the same way, TCP or gloo."""
    first, *rest = ranks.run(3, with_few_tensors)
    assert len(first) == 8
    assert all(x.abs().min() > 0 for x in first)
    for found in rest:
        assert all(map(torch.equal, first, found))


def test_a_message_of_no_tensors_lies_where_those_of_others_do() -> None:
    """NCCL carries none that lies in the host's memory."""
    empty = messages.joined([], torch.float32, torch.device("meta"))
    assert (empty.shape, empty.dtype, empty.device.type) == ((0,), torch.float32, "meta")


def hold_own(state: OwnedState, simulated: OwnedState, rank: int) -> None:
    """Hold a real rank's state to its row of the simulated one: own tensors are whole, others have no elements."""
    dims = tree.leaves(fn.rank_dims(simulated))
    for path, ours, theirs, dim in zip(
        tree.paths(state), tree.leaves(state), tree.leaves(simulated), dims, strict=True
    ):
        elsewhere = not ours.numel() or path.endswith(".age")  # of an error that another rank has
        assert elsewhere or torch.equal(ours, theirs if dim is None else theirs[rank]), path
    # of a stack each slice has an owner
    each = [(name, len(shape)) for name, shape in SHAPES.items() for _ in range(shape[0] if len(shape) == 3 else 1)]
    owners = state.owners.tolist()
    if not tree.fields(state.inner, "mu"):
        return
    for label in ("muon", "adam"):
        (moments,) = tree.fields(state.inner[label], "mu")
        of_label = [owner for owner, (_, ndim) in zip(owners, each, strict=True) if (ndim > 1) == (label == "muon")]
        numbers = [name for name, ndim in each if (ndim > 1) == (label == "muon")]
        for name, owner, moment in zip(numbers, of_label, moments, strict=True):
            assert (moment.numel() > 0) == (owner == rank and name != "empty")


def test_shares_are_equal_and_each_owner_has_a_batch() -> None:
    """As far as whole tensors allow.

    Differs: fn.transforms.owned.owned: an owner has whole tensors, so that shares are as equal as costs of tensors
        allow; a tensor that is larger than all others together is one rank's.
    """
    params = [torch.zeros(8, 8)] * 10 + [torch.zeros(64, 16)] + [torch.zeros(4)] * 3
    owners = plan(params, 4)
    of_shape = [owners[:10].count(r) for r in range(4)]
    assert sorted(of_shape) == [2, 2, 3, 3]
    assert of_shape[owners[10]] == 2  # whoever has the largest has one less of the others
    assert plan(params, 1) == (0,) * 14
    assert len({*plan(params[:3], 8)}) == 3  # more ranks than tensors
    assert plan(params, 4, [1] * 14) != owners
    assert plan(params[:4], 2, lambda params: [5, 1, 1, 1]) == (0, 0, 1, 1)  # equals in turn, what is left to balance
    stacks = [torch.zeros(3, 8, 8), torch.zeros(8, 8), torch.zeros(4, 8, 8)]
    assert plan(stacks, 2, None, [True, False, True]) == (0, 1, 0, 1, 0, 1, 0, 1)
    assert plan(stacks, 2, lambda params: [3, 1, 4], [True, False, False])[:4] == (0, 1, 0, 1)


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: fn.owned(fn.adamw(axis="data"), "data"), ValueError, "inner: expected no communication over the axis"),
        (lambda: fn.owned(fn.clip_by_global_norm(1.0), "data"), ValueError, "inner: expected links that treat each"),
        (lambda: fn.owned(fn.stateless(lambda u, p: u), "data"), ValueError, "a link of your own"),
        (lambda: fn.owned(fn.diloco(axis="data"), "node"), ValueError, "inner: expected a transform with phases only"),
        (lambda: fn.owned(fn.trace(0.9), ("a", "b", "c")), TypeError, "axis: expected the name of one axis, or of two"),
        (
            lambda: fn.owned(fn.trace(0.9), "data", feedback=fn.classic()),
            ValueError,
            "feedback: is given without a codec",
        ),
        (
            lambda: fn.owned(fn.trace(0.9), "data", cost=[-1.0]).init([torch.ones(2)]),
            ValueError,
            "cost: expected leaf '0'",
        ),
        (lambda: fn.owned(fn.trace(0.9), "data", cost=[1, 2]).init([torch.ones(2)]), ValueError, "cost: has another"),
        (lambda: fn.owned(fn.trace(0.9), "data").local_update([], (), []), ValueError, "has no LOCAL phase"),
        (lambda: fn.muon(axis="data", owned=False, codec=fn.int8()), ValueError, "codec: is given where no tensors"),
        (lambda: fn.muon(codec=fn.int8()), ValueError, "codec: is given where no tensors are owned"),
    ],
)
def test_bad_input_is_refused_by_name(make: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()


def test_a_state_of_other_params_is_refused() -> None:
    tx = MAKES["exact"]()
    state, params = tx.init(start()), [torch.zeros(2, 2)]
    with pytest.raises(ValueError, match=r"state.owners: expected 1 tensors, by owner \[1\], but got 13"):
        tx.update(W)(params, state, params)


@pytest.mark.parametrize(
    ("bad", "phase", "name"), [(torch.nan, W, "a"), (torch.inf, C, "vector"), (torch.nan, C, "stack")]
)
def test_a_number_that_is_not_finite_skips_the_step_on_all_ranks(bad: float, phase: Phase, name: str) -> None:
    world = World(fn.skip_nonfinite(MAKES["int8 both ways"]()), start(), 3)
    for t, each in enumerate([W, C]):
        world.step(each, gradients(3, t))
    params, inside = world.params, world.state.inner
    g = gradients(3, 5)
    g[name][1].view(-1)[2] = bad
    world.step(phase, g)
    assert int(world.state.skipped) == 1
    assert all(map(torch.equal, tree.leaves((world.params, world.state.inner)), tree.leaves((params, inside))))


def test_a_guard_inside_that_skips_on_the_owner_skips_on_all() -> None:
    """Its own step alone is not finite: of a momentum that overflows, say, of which no other rank knows."""
    tx = fn.skip_nonfinite(fn.owned(fn.skip_nonfinite(fn.chain(fn.scale(1e38), fn.trace(0.9))), "data"))
    world = World(tx, {"a": torch.zeros(2), "b": torch.zeros(2)}, 2)
    g = {"a": torch.full((2, 2), 1e-38), "b": torch.full((2, 2), 1e3)}
    world.step(W, g)
    assert int(world.state.skipped) == 1
    assert not world.params["a"].any()


def optimizers() -> dict[str, Any]:
    """Replicated and owned Muon on real ranks, also clipped; a gradient that one rank lacks; a NaN on one rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh, found = init_device_mesh("cpu", (world,), mesh_dim_names=("data",)), {}

    def params() -> list[torch.nn.Parameter]:
        return [torch.nn.Parameter(x.clone()) for x in start().values() if x.numel()]

    def set_gradients(ours: Any, t: int) -> None:
        for p, g in zip(ours, (g for g in gradients(world, t).values() if g.numel()), strict=True):
            p.grad = g[rank].clone()

    with fn.bind(mesh):
        for name, hyper in {"replicated": {"owned": False}, "owned": {}}.items():
            ours = params()
            opt = fn.Optimizer(ours, partial(fn.muon, axis="data", **hyper), lr=0.05)
            for t in range(3):
                set_gradients(ours, t)
                opt.step()
            found[name] = [p.detach().clone() for p in ours]
        for name, hyper in {"clipped": {"owned": False}, "owned, clipped": {}}.items():
            clipped = [torch.nn.Parameter(x.detach().clone()) for x in params()]
            groups = [{"params": clipped[:2]}, {"params": clipped[2:]}]
            clips = fn.Optimizer(groups, partial(fn.muon, axis="data", other="lion", **hyper), lr=0.05, max_norm=0.1)
            for t in range(3):
                set_gradients(clipped, t)
                clips.step()
            found[name] = [p.detach().clone() for p in clipped]
        set_gradients(ours, 4)
        if rank == 0:
            ours[0].grad[0, 0] = torch.nan
        opt.step()
        found["skipped"] = opt.skipped, all(map(torch.equal, ours, found["owned"]))
    return found


def test_an_optimizer_of_owned_tensors_is_the_replicated_one() -> None:
    for found in ranks.run(2, optimizers):
        for ours, theirs in (("replicated", "owned"), ("clipped", "owned, clipped")):
            for a, b in zip(found[ours], found[theirs], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        assert found["skipped"] == (1, True)
