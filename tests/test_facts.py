"""Every link, in everything that cuts what it works on into pieces: equal to the link on the whole, or refused by name.

A link is refused for what it says of itself (`fn.Facts`), and one that says nothing needs whole tensors.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import ranks
import registry
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fn
from fn import Phase, tree
from fn.base import facts_of

Make = Callable[[str], fn.Transform]


def mean(axis: str) -> fn.Transform:
    return fn.compressed_average(axis, fn.identity(), fn.off())


def sgd(axis: str) -> fn.Transform:
    return fn.chain(fn.trace(0.9), fn.scale_by_learning_rate(0.1))


def matrices(params: Any) -> Any:
    return tree.map(lambda p: p.ndim > 1, params)


def labels(params: Any) -> Any:
    return tree.map(lambda p: "matrix" if p.ndim > 1 else "vector", params)


LINKS: dict[str, Make] = {
    "add_decayed_weights": lambda axis: fn.add_decayed_weights(0.1),
    "average": fn.average,
    "average_params": lambda axis: fn.average_params(sgd(axis), mean(axis)),
    "clip_by_global_norm": lambda axis: fn.clip_by_global_norm(0.1),
    "compressed_average": mean,
    "in_basis": lambda axis: fn.in_basis(fn.tiles(2), fn.chain()),
    "local_momentum": lambda axis: fn.local_momentum(0.5),
    "low_rank_average": lambda axis: fn.low_rank_average(axis, 1),
    "mask": lambda axis: fn.mask(fn.trace(0.9), matrices),
    "orthogonalize": lambda axis: fn.mask(fn.orthogonalize(), [True, False]),
    "outer": lambda axis: fn.outer(sgd(axis), sgd(axis), mean(axis)),
    "owned": lambda axis: fn.owned(fn.adamw(0.1), axis),
    "partition": lambda axis: fn.partition({"matrix": fn.trace(0.9), "vector": fn.scale(2.0)}, labels),
    "running_sum": lambda axis: fn.running_sum(),
    "scale": lambda axis: fn.scale(0.5),
    "scale_by_adam": lambda axis: fn.scale_by_adam(),
    "scale_by_learning_rate": lambda axis: fn.scale_by_learning_rate(0.1),
    "scale_by_lion": lambda axis: fn.scale_by_lion(),
    "scale_by_muon": lambda axis: fn.mask(fn.scale_by_muon(), [True, False]),
    "scale_by_neuron_norm": lambda axis: fn.mask(fn.scale_by_neuron_norm(), [True, False]),
    "scale_by_onebit_adam": lambda axis: fn.scale_by_onebit_adam(sync=fn.chain()),
    "scale_by_onebit_lamb": lambda axis: fn.scale_by_onebit_lamb(sync=fn.chain()),
    "scale_by_shape": lambda axis: fn.scale_by_shape(),
    "scale_by_sign": lambda axis: fn.scale_by_sign(),
    "scale_by_sign with noise": lambda axis: fn.scale_by_sign(noise=0.5),
    "scale_by_trust_ratio": lambda axis: fn.scale_by_trust_ratio(),
    "scale_by_zero_one_adam": lambda axis: fn.scale_by_zero_one_adam(0.1, sync=fn.chain()),
    "sharded": lambda axis: fn.sharded(fn.adamw(0.1), axis),
    "skip_nonfinite": lambda axis: fn.skip_nonfinite(fn.trace(0.9)),
    "trace": lambda axis: fn.trace(0.9),
    "unfrozen": lambda axis: fn.unfrozen(fn.scale_by_adam()),
    "unsharded": lambda axis: fn.unsharded(fn.scale(2.0), axis),
    "a link that says nothing": lambda axis: fn.lift(lambda params: (), lambda u, state, params: (u, state)),
    "one that is element-wise": lambda axis: fn.stateless(lambda u, p: tree.map(torch.neg, u), elementwise=True),
    **registry.CONTRIB_LINKS,
}
"""Each link of `fn`, over an axis."""

WHOLE = {
    "clip_by_global_norm", "in_basis", "low_rank_average", "mask", "orthogonalize", "owned",
    "partition", "scale_by_muon", "scale_by_neuron_norm", "scale_by_onebit_lamb", "scale_by_shape",
    "scale_by_sign with noise", "scale_by_trust_ratio", "a link that says nothing",
}  # fmt: skip
"""Those that need whole tensors."""

OVER_THE_AXIS = {
    "average", "average_params", "compressed_average", "low_rank_average", "outer", "owned",
    "sharded",
}  # fmt: skip

ROUNDS = {"average_params", "outer"}
LOCAL = {"scale_by_zero_one_adam"}
"""Whose ranks go to params of their own, which a state says."""
"""Those that take rounds."""

each_link = pytest.mark.parametrize("name", LINKS)


def test_every_link_is_listed():
    public = {name: getattr(fn, name) for name in fn.__all__}
    made = {
        name
        for name, f in public.items()
        if inspect.isfunction(f)
        and f.__module__.startswith("fn.transforms.")
        and inspect.signature(f).return_annotation in ("Transform", fn.Transform)
    }
    assert made - set(LINKS) == set(), "expected a line in LINKS for every link"


@each_link
def test_a_link_says_what_it_is(name):
    facts = facts_of(LINKS[name]("data"))
    if name not in registry.CONTRIB_LINKS:
        assert bool(facts.whole) == (name in WHOLE)
        assert facts.axes == (("data",) if name in OVER_THE_AXIS else ())
        assert facts.shards == (("data",) if name == "unsharded" else ())
    assert facts_of(fn.chain(fn.average("node"), fn.skip_nonfinite(LINKS[name]("data")))).whole == facts.whole


def test_an_optimizer_whose_ranks_go_to_params_of_their_own_is_refused_in_pieces():
    local = fn.zero_one_adam(axis="node")
    for whole in (fn.owned(local, "data"), fn.sharded(local, "data"), fn.unsharded(local, fn.Shards("data"))):
        with pytest.raises(ValueError, match="inner: expected params that are the same on all ranks, but got each"):
            whole.init(PARAMS)


PARAMS = [torch.tensor([[1.0, -2.0], [0.5, 3.0], [-1.5, 0.25]]), torch.tensor([1.0, -3.0, 2.0])]
GRADS = [[torch.sin(p * (step + 2)) for p in PARAMS] for step in range(2)]


def updates_of(tx: fn.Transform, params: Any, grads: list[Any]) -> list[torch.Tensor]:
    """Return the updates of two warm-up steps of a transform."""
    state, found = tx.init(params), []
    for g in grads:
        updates, state = tx.update(Phase.WARMUP)(g, state, params)
        found += tree.leaves(updates)
    return found


TREE = {"clip_by_global_norm", "a link that says nothing"}
"""Those that need all tensors."""


@each_link
def test_on_owned_tensors_it_is_what_it_is_on_all_or_is_refused(name):
    link = LINKS[name]("data")
    facts = facts_of(link)
    assert bool(facts.tree) == (name in TREE)
    if facts.tree or facts.axes or facts.shards or link.exchange or name in LOCAL:
        named = "|".join(["over the axis 'data'", "each rank's own", "with rounds", *facts.tree])
        with pytest.raises(ValueError, match=f"inner: expected .*({named})"):
            fn.owned(link, "data").init(PARAMS)
        return
    owned = fn.owned(link, "data")
    found = fn.simulate(lambda g: updates_of(owned, PARAMS, g), "data", 2, in_dims=None, out_dims=None)(GRADS)
    for a, b in zip(found, updates_of(link, PARAMS, GRADS), strict=True):
        torch.testing.assert_close(a, b)


@each_link
def test_in_shards_it_is_what_it_is_on_the_whole_or_is_refused(name):
    link = LINKS[name]("data")
    facts = facts_of(link)
    if facts.whole or facts.axes or facts.shards or link.exchange or name in LOCAL:
        named = "|".join(["over the axis 'data'", "each rank's own", "with rounds", *facts.whole])
        with pytest.raises(ValueError, match=f"inner: expected .*({named})"):
            fn.sharded(link, "data").init(PARAMS)
        return
    wanted = updates_of(link, PARAMS, GRADS)
    for layout in ("flat", "per_tensor"):
        run = functools.partial(updates_of, fn.sharded(LINKS[name]("data"), "data", layout=layout), PARAMS)
        found = fn.simulate(run, "data", 2, in_dims=None, out_dims=None)(GRADS)
        torch.testing.assert_close(found, wanted, msg=lambda text: f"{name}: {text}")


@each_link
def test_in_a_mask_or_a_partition_it_is_what_it_is_on_these_leaves_alone(name):
    one = lambda: LINKS[name]("data")  # noqa: E731
    grads = [[g[0]] for g in GRADS]
    if name in ("orthogonalize", "scale_by_muon", "scale_by_neuron_norm"):
        one = getattr(fn, name)
    with fn.collectives.axis.Binding({"data": fn.collectives.axis.Axis(1, torch.tensor(0), "alone")}):
        wanted = updates_of(one(), [PARAMS[0]], grads)
        masked = updates_of(fn.mask(one(), [True, False]), PARAMS, GRADS)
        parted = updates_of(fn.partition({"a": one(), "b": fn.scale(1.0)}, ["a", "b"]), PARAMS, GRADS)
    for found in (masked, parted):
        assert all(map(torch.equal, found[::2], wanted))
        assert all(map(torch.equal, found[1::2], [g[1] for g in GRADS]))


@each_link
def test_in_outer_it_is_what_it_is_alone_or_is_refused(name):
    link = LINKS[name]("data")
    make = lambda: fn.outer(fn.chain(link, fn.scale_by_learning_rate(0.1)), sgd("data"), fn.chain())  # noqa: E731
    if facts_of(link).axes or link.exchange is not None:
        with pytest.raises(ValueError, match=r"inner: expected .*(over an axis|rounds)|to be the last link"):
            make()
        return
    wanted = [-0.1 * u for u in updates_of(link, PARAMS, GRADS[:1])]
    torch.testing.assert_close(updates_of(make(), PARAMS, GRADS[:1]), wanted)


def on_shards() -> dict[str, tuple[str, float]]:
    """Train on FSDP2's shards by each link; return the refusal, or how far the model is from one that is whole."""
    found = {}
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "shard"))
    for name, make in LINKS.items():
        model, whole = torch.nn.Linear(2, 3), torch.nn.Linear(2, 3)
        for module in (model, whole):
            with torch.no_grad():
                for p, start in zip(module.parameters(), PARAMS, strict=True):
                    p.copy_(start)
        fully_shard(model, mesh=mesh["shard"])
        in_rounds = make("data").exchange is not None
        schedule = fn.every(2) if in_rounds else None
        made = functools.partial(lambda lr, link: fn.chain(link("data"), fn.scale(lr)), link=make)
        made = (lambda lr, link=make: link("data")) if in_rounds else made
        with fn.bind(mesh["data"]):
            twin = fn.Optimizer(whole.parameters(), made, schedule=schedule, lr=0.1)
            try:
                opt = fn.Optimizer(model.parameters(), made, schedule=schedule, lr=0.1)
            except ValueError as error:
                found[name] = str(error), 0.0
                continue
            for _ in range(2):
                for module, optimizer in ((model, opt), (whole, twin)):
                    module(torch.tensor([[1.0, 2.0], [-3.0, 0.5]])).square().mean().backward()
                    optimizer.step()
                    optimizer.zero_grad()
        pairs = zip(model.parameters(), whole.parameters(), strict=True)
        found[name] = "", max(float((p.full_tensor() - q).abs().max()) for p, q in pairs)
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_on_fsdp2_shards_it_is_what_it_is_on_the_whole_or_is_refused():
    for found in ranks.run(2, on_shards):
        whole = {name for name in registry.CONTRIB_LINKS if facts_of(LINKS[name]("data")).whole}
        assert {name for name, (text, _) in found.items() if text} == WHOLE | whole | {"unsharded"}
        for name, (text, far) in found.items():
            assert far < 1e-5, name
            facts = facts_of(LINKS[name]("data"))
            assert not text or (facts.whole + facts.shards)[0] in text


def test_what_a_sharded_link_takes_for_a_tensor_is_refused_where_it_is_made():
    """The updates of this chain were 2.0 times too large on two ranks."""
    with pytest.raises(ValueError, match=r"^inner: .*element-wise.* got scale_by_shape"):
        fn.sharded(fn.chain(fn.scale_by_shape(), fn.scale_by_learning_rate(0.1)), "data")


def test_which_leaves_are_batches():
    """Of a partition those whose transform takes each matrix of a stack by itself; none, if one needs whole stacks."""
    params = [torch.zeros(3, 2, 2), torch.zeros(3, 2, 2), torch.zeros(2, 2), torch.zeros(1, 2, 2)]
    kinds, labels = {"a": fn.chain(fn.scale_by_muon(), fn.scale(0.1)), "b": fn.scale_by_adam()}, ["a", "b", "a", "a"]
    of_labels = [fn.partition(kinds, labels), fn.partition(kinds, lambda params: labels)]
    nothing = fn.partition(dict.fromkeys("ab", fn.chain()), lambda params: labels)
    of_labels += [fn.chain(fn.trace(0.9), tx, nothing) for tx in of_labels]
    for tx in of_labels:
        assert facts_of(tx).in_slices(params) == [True, False, False, False]
    masked = fn.mask(fn.orthogonalize(), [False, True, True, True])
    assert facts_of(masked).in_slices(params) == [False, True, False, False]
    silent = LINKS["a link that says nothing"]("data")
    for link in (fn.scale_by_muon(flatten=True), fn.scale_by_trust_ratio(), fn.scale_by_adam(), silent):
        assert facts_of(fn.chain(link, fn.scale(0.1))).in_slices(params) == [False] * 4
        whole = fn.partition({**kinds, "b": fn.chain(link, fn.scale_by_shape())}, labels)
        assert facts_of(whole).in_slices(params) == [False] * 4


def test_axes_in_a_string_are_refused():
    link = fn.scale(1.0)._replace(facts=fn.Facts(axes="data"))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"facts.axes: .* got 'data'; .*\('data',\)"):
        fn.chain(link)
