"""The contract that every named optimizer keeps in each phase that it has. Optimizers are listed in `registry`."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

import pytest
import torch
from registry import (
    OPTIMIZERS,
    QUICK,
    each_missing_phase,
    each_phase,
    each_with_an_exact_warmup,
    in_time,
)
from simulated import bits, same_bits

import fn
from fn import Phase, tree
from fn.transforms.flat_layout import buckets, split

SHAPES = {"matrix": (6, 5), "vector": (7,), "scalar": ()}
COLLECTIVE = (Phase.WARMUP, Phase.COMPRESSED)


class World:
    """An optimizer on simulated ranks: `state` and `params` as the ranks hold them."""

    def __init__(self, optimizer, world: int = 2, dtype: torch.dtype = torch.float32, params: Any = None, **hyper):
        self.world = world
        self.tx = optimizer.make(**{"lr": optimizer.lr, "axis": "data", **hyper})
        params = params or {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
        self.dims = fn.rank_dims(self.tx.init(params))
        self.state = fn.simulate(self.tx.init, "data", world, in_dims=None, out_dims=self.dims)(params)
        self.place = None if optimizer.replicated else 0
        self.params = params if optimizer.replicated else tree.map(lambda p: p.expand(world, *p.shape).clone(), params)

    def gradients(self) -> Any:
        lead = () if self.place is None else (self.world,)
        shapes = tree.map(lambda p: (self.world, *p.shape[len(lead) :]), self.params)
        leaves = [
            torch.randn(shape).to(p.dtype) for shape, p in zip(shapes.values(), tree.leaves(self.params), strict=True)
        ]
        return dict(zip(self.params, leaves, strict=True))

    def step_of(self, phase: Phase):
        """Return (gradients, state, params) -> (params, state) on all ranks."""

        def step(g, s, p):
            u, s = self.tx.update(phase)(g, s, p)
            return fn.apply_updates(p, u), s

        dims = {"in_dims": (0, self.dims, self.place), "out_dims": (self.place, self.dims)}
        return fn.simulate(step, "data", self.world, **dims)

    def step(self, phase: Phase, gradients: Any = None) -> World:
        g = self.gradients() if gradients is None else gradients
        self.params, self.state = self.step_of(phase)(g, self.state, self.params)
        return self

    def warmed_up(self) -> World:
        """Take a few steps in the warm-up, and one in codes if there is one, so that nothing is zero."""
        for _ in range(3):
            self.step(Phase.WARMUP)
        return self.step(Phase.COMPRESSED) if fn.base.has_phase(self.tx, Phase.COMPRESSED) else self


def form(t: Any) -> tuple:
    return tree.flatten(t)[1], [(leaf.dtype, tuple(leaf.shape)) for leaf in tree.leaves(t)]


@each_phase
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_params_and_state_keep_structure_shape_and_dtype_across_phases(optimizer, phase, dtype):
    w = World(optimizer, dtype=dtype)
    start = form((w.params, w.state))
    w.step(phase)
    assert form((w.params, w.state)) == start
    for other in reversed(optimizer.phases):  # no variance step behind a local one
        w.step(other)
        assert form((w.params, w.state)) == start


@each_phase
def test_params_and_replicated_state_are_the_same_on_every_rank(optimizer, phase):
    """`World` promises `out_dims=None`, which refuses what depends on the rank; else they agree in value."""
    w = World(optimizer, 4).warmed_up()
    if phase is Phase.LOCAL:
        w.step(Phase.LOCAL).step(Phase.COMPRESSED)
    w.step(phase)
    if not optimizer.replicated and phase is not Phase.LOCAL:
        for leaf in tree.leaves(w.params):
            torch.testing.assert_close(leaf, leaf[:1].expand_as(leaf), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("optimizer", "phase", "hyper"),
    [(o, phase, hyper) for o in OPTIMIZERS for phase, hyper in o.adamw.items()],
    ids=[f"{o.name}-{phase.value}" for o in OPTIMIZERS for phase in o.adamw],
)
@pytest.mark.parametrize(("dtype", "weight_decay"), [(torch.float32, 0.0), (torch.float64, 0.1)])
def test_one_rank_is_torchs_adamw(optimizer, phase, hyper, dtype, weight_decay):
    params = {name: torch.randn(shape, dtype=dtype) for name, shape in SHAPES.items()}
    theirs = [torch.nn.Parameter(p.clone()) for p in params.values()]
    reference = torch.optim.AdamW(theirs, lr=0.03, betas=(0.8, 0.95), eps=1e-7, weight_decay=weight_decay)
    hyper = {"lr": 0.03, "b1": 0.8, "b2": 0.95, "eps": 1e-7, "weight_decay": weight_decay, **hyper}
    w = World(optimizer, 1, params=params, **hyper)
    for _ in range(20):
        g = w.gradients()
        for p, leaf in zip(theirs, g.values(), strict=True):
            p.grad = leaf[0].clone()
        reference.step()
        w.step(phase, g)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for p, q in zip(w.params.values(), theirs, strict=True):
        torch.testing.assert_close(p, q.detach(), rtol=tolerance, atol=tolerance)


@each_with_an_exact_warmup
def test_a_warm_up_step_is_the_step_on_the_mean_gradient(optimizer):
    """Four ranks in the warm-up are one rank with the mean."""
    params = {name: torch.randn(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    four, one = World(optimizer, 4, params=params), World(optimizer, 1, params=params)
    for _ in range(5):
        g = four.gradients()
        four.step(Phase.WARMUP, g)
        one.step(Phase.WARMUP, tree.map(lambda x: x.mean(0, keepdim=True), g))
    for a, b in zip(tree.leaves(four.params), tree.leaves(one.params), strict=True):
        torch.testing.assert_close(a, b if optimizer.replicated else b.expand_as(a), rtol=1e-9, atol=1e-9)


def build(optimizer, params, **hyper) -> fn.Optimizer:
    make = partial(optimizer.make, axis="data", **hyper)
    return fn.Optimizer(params, make, schedule=optimizer.schedule, lr=optimizer.lr)


def set_gradients(params, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


@each_phase
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_state_dict_continues_bit_for_bit(optimizer, phase, dtype):
    """Saved just before a step of the phase, through a file that loads with weights_only=True."""
    until = next(t for t in range(1, 100) if optimizer.schedule(t) is phase)
    params = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES.values()]
    opt = build(optimizer, params)
    for t in range(until):
        set_gradients(params, t)
        opt.step()
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    copies = [torch.nn.Parameter(p.detach().clone()) for p in params]
    resumed = build(optimizer, copies)
    resumed.load_state_dict(torch.load(file, weights_only=True))
    assert same_bits(resumed.states, opt.states)
    assert resumed.phase is opt.phase is phase
    for t in range(until, until + 6):
        for own in (params, copies):
            set_gradients(own, t)
        opt.step()
        resumed.step()
        assert same_bits(copies, params)
        assert same_bits(resumed.states, opt.states)


def train(optimizer, loss, params, batches, world: int) -> Any:
    """Train with a learning rate that falls to zero; return the params."""
    lr = torch.tensor(0.0)
    w = World(optimizer, world, params=params, lr=lr)
    gradient = torch.func.vmap(torch.func.grad(loss), in_dims=(w.place, 0))
    for t, batch in enumerate(batches):
        lr.fill_(optimizer.lr * (1 - t / len(batches)))
        w.step(optimizer.schedule(t), gradient(w.params, batch))
    return w.params if optimizer.replicated else tree.map(lambda p: p[0], w.params)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [
    pytest.param(o, id=o.name, marks=[pytest.mark.reliability] * (", " in o.name and o.name != "muon, int8"))
    for o in OPTIMIZERS
])  # fmt: skip
def test_it_converges_on_a_quadratic_whose_ranks_pull_apart(optimizer):
    """Each rank has a minimum of its own; only together do they find the common one."""
    world, n = 4, 20
    centers = 1 + 3 * torch.randn(world, n)
    goal = centers.mean(0)

    def loss(params, center):
        return ((params["x"] - center) ** 2).sum() / 2

    start = {"x": goal + 1.0}
    found = train(optimizer, loss, start, [centers] * 150, world)
    assert (found["x"] - goal).norm() < 0.25 * (start["x"] - goal).norm()


@each_phase
@pytest.mark.parametrize(("bad", "rank"), [(float("nan"), 0), (float("inf"), 1)])
def test_a_bad_gradient_on_any_rank_moves_nothing(optimizer, phase, bad, rank):
    """In a phase in which ranks speak, all of them skip; in one in which they do not, the rank leaves it out alone."""
    w = World(optimizer).warmed_up()
    g = w.gradients()
    g["vector"][rank, 3] = bad
    params, state = w.params, w.state
    w.step(phase, g)
    if phase in COLLECTIVE:
        assert same_bits(w.params, params)
        assert same_bits(w.state.inner, state.inner)
        assert w.state.skipped == state.skipped + 1
    else:
        assert same_bits(tree.map(lambda p: p[rank], w.params), tree.map(lambda p: p[rank], params))
        assert all(torch.isfinite(x).all() for x in tree.leaves(w.state) if x.is_floating_point())
    w.step(phase)
    assert not same_bits(w.params, params)


def whole(moments: list, params: dict, world: int) -> list[dict]:
    """Return moments like the params; those of `sharded` are the rows of a vector, one on each rank.

    Of a partition each label has a list with a tensor, which is told by its shape.
    Owned tensors are zeros on all simulated ranks but one.
    """
    found = []
    if len(moments) == len(params) and all(type(m) is list and len(m) == 1 for m in moments):
        of = {name: next(m[0] for m in moments if m[0].shape[-p.ndim :] == p.shape) for name, p in params.items()}
        return [{name: m.sum(0) if m.ndim > params[name].ndim else m for name, m in of.items()}]
    for m in moments:
        if not isinstance(m, dict):
            plans = (buckets(list(params.values()), world, align, "flat")[0] for align in (2, 8))
            bucket = next(plan for plan in plans if plan.segments.row_length == m[0].shape[-1])
            m = dict(zip(params, split(m[0].flatten(), bucket), strict=True))
        found.append(m)
    return found


@each_phase
def test_rows_that_never_received_a_gradient_stay_exactly_zero(optimizer, phase):
    params = {"embedding": torch.randn(8, 6), "other": torch.randn(3)}
    w = World(optimizer, params=params, weight_decay=0.0)
    used = torch.arange(8)[:, None] % 2 == 0

    def gradients():
        g = w.gradients()
        return {**g, "embedding": g["embedding"] * used}

    for each in [Phase.WARMUP] * 3 + [p for p in COLLECTIVE if p in optimizer.phases] * 3 + [phase] * 3:
        w.step(each, gradients())
    for mu in whole(tree.fields(w.state, "mu"), params, w.world):
        rows = mu["embedding"][..., 1::2, :]
        assert not rows.any()
        assert mu["embedding"][..., 0::2, :].all()
    unused = w.params["embedding"][..., 1::2, :]
    start = params["embedding"][1::2]
    if optimizer.replicated:
        assert torch.equal(unused, start)
    else:
        torch.testing.assert_close(unused, start.expand_as(unused), rtol=1e-6, atol=1e-7)


@each_missing_phase
def test_a_phase_that_it_lacks_is_refused_by_name_and_nothing_moves(optimizer, phase):
    tx = optimizer.make(lr=0.1, axis="data")
    with pytest.raises(ValueError, match=rf"phase: .*{phase.name}"):
        tx.update(phase)
    params = [torch.nn.Parameter(torch.randn(4, 3))]
    asked = []
    make = partial(optimizer.make, axis="data")
    opt = fn.Optimizer(params, make, schedule=lambda step: asked[-1] if asked else Phase.WARMUP, lr=0.1)
    set_gradients(params, 0)
    opt.step()
    before = bits((params, opt.states))
    asked.append(phase)
    with pytest.raises(ValueError, match=rf"phase: .*{phase.name}"):
        opt.step()
    assert all(map(torch.equal, bits((params, opt.states)), before))
    assert opt.steps == 1


@pytest.mark.slow
@in_time(QUICK)
def test_compiled_in_one_graph_it_agrees_with_eager_and_is_never_compiled_again(optimizer, phase, graphs):
    """Not for a second step, not for another learning rate in the same tensor.

    One step goes through AOTAutograd, which all of torch's compilers share.
    """
    graphs.backend = "aot_eager" if optimizer.name == "onebit_adam" else "eager"
    lr = torch.tensor(optimizer.lr)
    w = World(optimizer, lr=lr).warmed_up()
    eager = w.step_of(phase)
    compiled = torch.compile(eager, fullgraph=True, backend=graphs)
    state, params = w.state, w.params
    for value in (optimizer.lr, optimizer.lr, 2 * optimizer.lr, 0.0):
        lr.fill_(value)
        g = w.gradients()
        expected = eager(g, state, params)
        with torch._dynamo.config.patch(specialize_float=True):  # else a trace is thrown away and taken again
            found = compiled(g, state, params)
        for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
        params, state = found
    assert graphs.count == 1


@pytest.mark.reliability
@each_phase
def test_through_inductor_it_agrees_with_eager(optimizer, phase, graphs):
    """It takes 25 s of a processor."""
    w = World(optimizer, dtype=torch.float64).warmed_up()
    inputs = (w.gradients(), w.state, w.params)
    expected = w.step_of(phase)(*inputs)
    with torch._dynamo.config.patch(specialize_float=True):  # else the trace is thrown away at the end and taken again
        found = torch.compile(w.step_of(phase), fullgraph=True)(*inputs)
    for a, b in zip(tree.leaves(found), tree.leaves(expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
