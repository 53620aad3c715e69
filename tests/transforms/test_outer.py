"""`fn.outer`: local steps, exchanges of differences, and what is not finite."""

from __future__ import annotations

from functools import partial
from typing import Any

import chains
import pytest
import torch
from simulated import same_bits
from torch import Tensor

import fn
from fn import Phase, Round, tree

SHAPES = {"a": (5,), "b": (4, 3), "c": (), "d": (7,)}
BOTH = Round(0, 0)
DTYPES = (torch.bfloat16, torch.float64)


def start(dtype: torch.dtype = torch.float32, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(shape, generator=generator).to(dtype) for k, shape in SHAPES.items()}


def gradients(world: int, step: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1000 + step)
    return {k: torch.randn((world, *shape), generator=generator).to(dtype) for k, shape in SHAPES.items()}


def exact(**options: Any) -> fn.Transform:
    return fn.compressed_average("data", fn.identity(), fn.off(), **options)


def sgd(lr: float = 0.1) -> fn.Transform:
    return fn.scale_by_learning_rate(lr)


class World:
    """A transform on simulated ranks. params: with the ranks' dimension."""

    def __init__(self, tx: fn.Transform, world: int = 2, params: Any = None, dtype: torch.dtype = torch.float32):
        self.tx, self.world = tx, world
        params = start(dtype) if params is None else params
        self.dims = fn.rank_dims(tx.init(params))
        self.state = fn.simulate(tx.init, "data", world, in_dims=None, out_dims=self.dims)(params)
        self.params = tree.map(lambda p: p.expand(world, *p.shape).clone(), params)

    def step(self, when: Phase | Round, grads: Any) -> int:
        """Take a step; return the bytes that a rank sent."""

        def run(g: Any, s: Any, p: Any) -> Any:
            updates, s = self.tx.update(when)(g, s, p)
            return fn.apply_updates(p, updates), s

        run_all = fn.simulate(run, "data", self.world, in_dims=(0, self.dims, 0), out_dims=(0, self.dims))
        with fn.ledger() as sent:
            self.params, self.state = run_all(grads, self.state, self.params)
        return sent.total

    @property
    def own(self) -> Any:
        """Return the state of `outer`."""
        (own,) = tree.instances(self.state, fn.OuterState)
        return own


LATE = [(2, 6, 0.5), (4, 7, 0.25)]
"""Fragments, delay, alpha: an exchange of one fragment begins before that of another has ended."""


@pytest.mark.parametrize(("parts", "delay", "alpha"), [(1, 0, 0.0), (2, 0, 0.0), (2, 1, 0.5), (4, 0, 0.25), *LATE])
def test_a_run_is_that_of_a_loop_in_float64(parts: int, delay: int, alpha: float) -> None:
    world, h, lr, mu, inner_lr = 3, 8, 0.4, 0.9, 0.05
    outer_tx = fn.chain(fn.trace(mu, nesterov=True), fn.scale_by_learning_rate(lr))
    w = World(
        fn.outer(sgd(inner_lr), outer_tx, exact(), fragments=parts, alpha=alpha),
        world,
        dtype=torch.float64,
    )
    schedule = fn.every(h, fragments=parts, delay=delay)
    names = list(SHAPES)
    here = [{k: p.clone() for k, p in start(torch.float64).items()} for _ in range(world)]
    anchor = {k: p.clone() for k, p in start(torch.float64).items()}
    buffer = {k: torch.zeros_like(p) for k, p in anchor.items()}
    pending: dict[int, dict[str, Any]] = {}
    for t in range(3 * h + 2 * delay):
        g = gradients(world, t, torch.float64)
        w.step(schedule(t), g)
        for r, p in enumerate(here):
            for k in names:
                p[k] = p[k] - inner_lr * g[k][r]
        number, place = divmod(t + 1 + delay % (h // parts), h // parts)
        if place == 0:
            begun = number - 1
            mine = [k for i, k in enumerate(names) if i % parts == begun % parts]
            pending[begun] = {k: sum(anchor[k] - p[k] for p in here) / world for k in mine}
        number, place = divmod(t, h // parts)
        if place == h // parts - 1:
            ended = number - delay // (h // parts)
            mine = [k for i, k in enumerate(names) if i % parts == ended % parts]
            mean = pending.pop(ended, None)
            for k in mine if mean else ():
                buffer[k] = mu * buffer[k] + mean[k]
                anchor[k] = anchor[k] - lr * (mean[k] + mu * buffer[k])
            if mean or (delay >= h and number >= ended % parts):
                for k, p in ((k, p) for k in mine for p in here):
                    p[k] = anchor[k] + alpha * (p[k] - anchor[k])
        for k in names:
            torch.testing.assert_close(w.params[k], torch.stack([p[k] for p in here]), rtol=0, atol=1e-12)
            torch.testing.assert_close(w.own.anchor[k], anchor[k], rtol=0, atol=1e-12)


def test_an_exchange_in_each_step_at_rate_one_is_the_mean_of_the_params() -> None:
    """It is so up to rounding, and not bitwise.

    Differs: fn.local_optimizers.local_sgd: what is averaged is the difference to the last mean, so that codes are of
        small numbers, and the mean of the params is off by rounding.
    """
    w = World(fn.local_sgd(0.1, axis="data"), 4)
    schedule = fn.every(1)
    off = 0.0
    for t in range(5):
        g = gradients(4, t)
        went = tree.map(lambda p, x: p - 0.1 * x, w.params, g)
        w.step(schedule(t), g)
        for k, p in w.params.items():
            torch.testing.assert_close(p, went[k].mean(0).expand_as(p), rtol=0, atol=1e-6)
            off = max(off, float((p - went[k].mean(0)).abs().max()))
    assert off > 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("store", [None, torch.bfloat16])
@pytest.mark.parametrize("codec", [None, fn.sign(), fn.int8()], ids=["exact", "sign", "int8"])
def test_after_an_exchange_all_params_are_bitwise_the_anchor(dtype: Any, store: Any, codec: Any) -> None:
    w = World(chains.diloco(0.02, axis="data", codec=codec, store=store), 3, dtype=dtype)
    schedule = fn.every(2, start=1)
    for t in range(5):
        w.step(schedule(t), gradients(3, t, dtype))
        apart = any(not torch.equal(p[0], p[1]) for p in w.params.values())
        assert apart == (t in (1, 3))
        if t in (2, 4):  # the warm-up leaves params alone, which a narrow anchor then follows in its dtype
            rounded = tree.map(lambda x: x.to(dtype).expand(3, *x.shape), w.own.anchor)
            assert same_bits(w.params, rounded)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {x.dtype for x in w.own.anchor.values()} == {store or wide}


def test_the_warm_up_is_the_inner_optimizer_on_averaged_gradients_and_the_anchor_follows() -> None:
    w, params = World(fn.diloco(0.02, weight_decay=0.1, axis="data"), 2), start()
    plain = fn.adamw(0.02, weight_decay=0.1)
    state = plain.init(params)
    for t in range(3):
        w.step(Phase.WARMUP, gradients(2, t))
        mean = tree.map(lambda g: g.mean(0), gradients(2, t))
        updates, state = plain.update(Phase.WARMUP)(mean, state, params)
        params = fn.apply_updates(params, updates)
        assert same_bits(w.params, tree.map(lambda p: p.expand(2, *p.shape), params))
        assert same_bits(tree.map(lambda x: x.expand(2, *x.shape), w.own.anchor), w.params)


def test_what_did_not_move_is_no_difference_under_half_precision() -> None:
    """The float32 anchor lies between the params' numbers; rounded it is one of them."""
    w = World(fn.outer(sgd(), sgd(0.7), exact()), 2, dtype=torch.bfloat16)
    for t in range(3):
        w.step(BOTH, gradients(2, t, torch.bfloat16))
    before = w.own.anchor
    assert any(not torch.equal(x, x.bfloat16().float()) for x in before.values())
    w.step(BOTH, tree.map(torch.zeros_like, gradients(2, 0, torch.bfloat16)))
    assert same_bits(w.own.anchor, before)


SHORT, HALFWAY, OF_DILOCO, OF_MULOCO = (1.0, 0.3), (0.9, 0.5), (0.7, 0.9), (0.9, 0.8)
CHOSEN = [
    (fn.diloco, {}, SHORT), (fn.diloco, {"rounds": 1000}, SHORT), (fn.diloco, {"rounds": 2000}, HALFWAY),
    (fn.diloco, {"rounds": 10_000}, OF_DILOCO), (fn.diloco, {"outer_momentum": 0.9}, OF_DILOCO),
    (fn.diloco, {"outer_momentum": 0.0}, (1.0, 0.0)), (fn.muloco, {"outer_momentum": 0.8}, OF_MULOCO),
    (fn.muloco, {}, (1.0, 0.6)), (fn.muloco, {"rounds": 8}, (1.0, 0.6)), (fn.muloco, {"rounds": 500}, OF_MULOCO),
]  # fmt: skip


@pytest.mark.parametrize(("make", "given", "pair"), CHOSEN)
def test_the_outer_step_fits_the_rounds(make: Any, given: Any, pair: tuple[float, float]) -> None:
    """
    Differs: fn.local_optimizers.muloco: without `rounds` the outer rate is 1.0 and the momentum 0.6; the paper has 0.9
        and 0.8 for several workers.
    """

    def ends(**given: Any) -> Any:
        w = World(make(0.02, axis="data", **given))
        for t in range(2):
            w.step(BOTH, gradients(2, t))
        return w.params

    torch.testing.assert_close(ends(**given), ends(outer_lr=pair[0], outer_momentum=pair[1]))


def test_one_rank_looks_ahead() -> None:
    tx = fn.diloco(0.02, axis="data", outer_momentum=0.0, outer_lr=0.5)
    first, ends = start(), []
    for schedule in (fn.every(2), lambda t: Round()):
        params, state = first, tx.init(first)
        for t in range(2):
            g = tree.map(lambda x: x[0], gradients(1, t))
            updates, state = tx.update(schedule(t))(g, state, params)
            params = fn.apply_updates(params, updates)
        ends.append(params)
    for k, p in ends[0].items():
        torch.testing.assert_close(p, first[k] + 0.5 * (ends[1][k] - first[k]))


@pytest.mark.parametrize("guard", [lambda tx: tx, fn.skip_nonfinite], ids=["plain", "guarded"])
def test_a_named_optimizer_may_take_the_local_steps_and_its_guard_counts_as_dropped(guard: Any) -> None:
    w = World(guard(fn.chain(fn.average("data"), fn.outer(fn.adamw(0.02), sgd(1.0), exact()))), 2)
    for t, when in enumerate((Phase.WARMUP, Round(), BOTH, Round())):
        g = gradients(2, t)
        if t in (1, 2):
            g["a"][1, 0] = float("inf")
        w.step(when, g)
    assert [int(x) for x in w.own.dropped] == [0, 2]
    assert [int(x) for x in w.own.inner.skipped] == [0, 0]
    assert [int(x) for x in tree.fields(w.own.inner, "step")[0]] == [4, 2]


def test_other_labels_of_a_partition_and_other_leaves_of_a_mask_move_beside_it() -> None:
    local, params = fn.outer(sgd(), sgd(1.0), exact()), start()
    g = tree.map(lambda x: x[0], gradients(1, 0))
    labels = {"a": "far", "b": "near", "c": "near", "d": "far"}
    tx = fn.partition({"far": local, "near": sgd(0.5)}, labels)
    whole, _ = tx.update(BOTH)(g, tx.init(params), params)
    new = fn.apply_updates(params, whole)
    for k, rate in {"a": 0.1, "b": 0.5, "c": 0.5, "d": 0.1}.items():
        torch.testing.assert_close(new[k], params[k] - rate * g[k])
    masked = fn.mask(local, {"a": True, "b": False, "c": False, "d": True})
    whole, _ = masked.update(BOTH)(g, masked.init(params), params)
    new = fn.apply_updates(params, whole)
    for k, rate in {"a": -0.1, "b": 1.0, "c": 1.0, "d": -0.1}.items():
        torch.testing.assert_close(new[k], params[k] + rate * g[k])


@pytest.mark.parametrize("codec", [None, fn.sign()], ids=["exact", "sign"])
def test_a_fragment_may_be_empty(codec: Any) -> None:
    w = World(fn.diloco(0.02, axis="data", fragments=6, codec=codec), 2)
    schedule = fn.every(6, fragments=6)
    sent = [w.step(schedule(t), gradients(2, t)) for t in range(6)]
    assert [x > 0 for x in sent] == [True] * 4 + [False] * 2
    alone = fn.diloco(0.02, axis="data", fragments=6, codec=codec)
    state, params = alone.init(start()), start()
    for t in range(6):
        updates, state = alone.update(schedule(t))(params, state, params)
        params = fn.apply_updates(params, updates)


@pytest.mark.parametrize(
    "fragments", [20_000, lambda params: {k: 10**12 * (k == "d") for k in params}], ids=["number", "function"]
)
def test_a_fragment_without_params_has_no_state_and_asks_nothing_of_the_other_ranks(fragments: Any) -> None:
    calls: list[str] = []

    def counted(tx: fn.Transform, name: str) -> fn.Transform:
        return tx._replace(init=lambda params: calls.append(name) or tx.init(params))

    momentum = fn.chain(fn.trace(0.9), RATE)
    tx = fn.outer(sgd(), counted(momentum, "outer"), counted(exact(), "sync"), fragments=fragments)
    state, params = tx.init(start()), start()
    assert max(calls.count("outer"), calls.count("sync")) <= len(params)
    assert len(tree.leaves(state)) < 10 * len(params)
    for when in (Round(9_999, 9_999), Round(0, 0)):
        updates, state = tx.update(when)(start(), state, params)
        params = fn.apply_updates(params, updates)
    assert all(p.isfinite().all() for p in tree.leaves(params))


def test_fragments_are_exchanged_by_the_numbers_that_a_function_gives_them() -> None:
    numbers = {"a": 7, "b": 3, "c": 10**9, "d": 3}
    w = World(fn.outer(sgd(), sgd(1.0), exact(), fragments=lambda params: numbers), 2)
    for number in (5, 10**9, 3, 7):
        w.step(Round(number, number), gradients(2, 0))
        alike = {k for k, p in w.params.items() if torch.equal(p[0], p[1])}
        assert alike == {k for k, of_leaf in numbers.items() if of_leaf == number}


def params_of(n: int) -> list[Any]:
    return [torch.nn.Parameter(torch.ones(n))]


RATE = sgd(0.7)
BAD = {
    "inner: expected no communication over an axis": lambda: fn.outer(fn.adamw(0.1, axis="data"), RATE, exact()),
    "inner: expected an optimizer that takes steps": lambda: fn.outer(fn.outer(sgd(), RATE, exact()), RATE, exact()),
    "outer_tx: expected scale_by_learning_rate as the last link, but got trace": lambda: fn.outer(
        sgd(), fn.chain(RATE, fn.trace(0.9)), exact()
    ),
    "outer_tx: expected scale_by_learning_rate as the last link, but got none": lambda: fn.outer(
        sgd(), fn.chain(), exact()
    ),
    "outer_tx: expected no communication": lambda: fn.outer(sgd(), fn.adamw(0.1, axis="data"), exact()),
    "sync: expected an average in the compressed phase": lambda: fn.outer(sgd(), RATE, fn.average("data")),
    "sync: expected an average with a compressed phase": lambda: fn.outer(sgd(), RATE, fn.adamw(0.1)),
    "fragments: expected a number of at least 1": lambda: fn.outer(sgd(), RATE, exact(), fragments=0),
    r"alpha: expected a number in \[0, 1\]": lambda: fn.outer(sgd(), RATE, exact(), alpha=1.5),
    "store: expected a floating dtype of 16 bits": lambda: fn.outer(sgd(), RATE, exact(), store=torch.int64),
    "fragments: has another structure": lambda: fn.outer(sgd(), RATE, exact(), fragments=lambda p: {"a": 0}).init(
        start()
    ),
    "fragments: expected leaf 'b' to be a whole number": lambda: fn.outer(
        sgd(), RATE, exact(), fragments=lambda p: {**dict.fromkeys(p, 0), "b": 0.5}
    ).init(start()),
    "fragments: expected leaf 'b' to be a number from 0": lambda: fn.outer(
        sgd(), RATE, exact(), fragments=lambda p: {**dict.fromkeys(p, 0), "b": -1}
    ).init(start()),
    r"schedule: expected a delay of less than h=2, but got delay=2; use delay = h - 1": (
        lambda: fn.Optimizer(params_of(2), partial(fn.diloco, axis="data"), schedule=fn.every(2, delay=2))
    ),
    "feedback: is given without a codec": lambda: fn.local_sgd(axis="data", feedback=fn.classic()),
    "decay: expected": lambda: fn.trace(1.0),
    r"outer_momentum: expected a number in \[0, 1\)": lambda: fn.diloco(axis="data", outer_momentum=1.0),
    "outer_lr: expected a finite number": lambda: fn.diloco(axis="data", outer_lr=-1.0),
    "rounds: expected a whole number of at least 1, but got 0": lambda: fn.diloco(axis="data", rounds=0),
    "rounds, outer_lr: rounds chooses": lambda: fn.diloco(axis="data", rounds=8, outer_lr=0.7),
    "rounds, outer_lr, outer_momentum: rounds chooses": lambda: fn.muloco(
        axis="data", rounds=8, outer_lr=0.9, outer_momentum=0.8
    ),
    "outer_lr: expected a finite": lambda: fn.sparse_loco(axis="data", outer_lr=float("inf")),
    r"momentum: expected a number in \[0, 1\)": lambda: fn.local_sgd(axis="data", momentum=1.0),
    "inner: expected a transform with phases only": lambda: fn.sharded(fn.outer(sgd(), RATE, exact()), "data"),
    "schedule: is Every, which does not fit this optimizer; phase: .* has only WARMUP": lambda: fn.Optimizer(
        [torch.nn.Parameter(torch.ones(2))], fn.adamw, schedule=fn.every(2)
    ),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_arguments_are_refused_by_name(text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{text}"):
        BAD[text]()


def test_a_round_of_a_fragment_that_is_none_is_refused() -> None:
    tx, params = fn.outer(sgd(), RATE, exact(), fragments=2), start()
    state = tx.init(params)
    with pytest.raises(ValueError, match=r"phase\.begin: expected one of 2 fragments.*got 2.*same number"):
        tx.update(Round(2, None))(params, state, params)


def test_a_round_is_one_graph() -> None:
    when, tx, params = Round(1, 1), fn.diloco(0.02, axis="data", fragments=2), start()
    g = tree.map(lambda x: x[0], gradients(1, 0))
    found = torch.compile(tx.update(when), backend="eager", fullgraph=True)(g, tx.init(params), params)
    wanted = tx.update(when)(g, tx.init(params), params)
    for x, y in zip(tree.leaves(found), tree.leaves(wanted), strict=True):
        torch.testing.assert_close(x, y)


def test_trace_is_the_momentum_of_torch() -> None:
    for nesterov in (False, True):
        p = torch.nn.Parameter(torch.ones(3))
        theirs = torch.optim.SGD([p], lr=0.1, momentum=0.9, nesterov=nesterov)
        tx = fn.chain(fn.trace(0.9, nesterov=nesterov), fn.scale_by_learning_rate(0.1))
        ours = {"p": torch.ones(3)}
        state = tx.init(ours)
        for t in range(4):
            g = torch.randn(3, generator=torch.Generator().manual_seed(t))
            p.grad = g.clone()
            theirs.step()
            updates, state = tx.update(Phase.LOCAL)({"p": g}, state, ours)
            ours = fn.apply_updates(ours, updates)
            torch.testing.assert_close(ours["p"], p.detach())


def hides_what_is_not_finite() -> fn.Transform:
    """Return an average that takes what is not finite for 0: it tells nobody which rank was broken."""

    def mean(updates: Any, params: Any) -> Any:
        return tree.map(lambda x: fn.pmean(torch.nan_to_num(x, 0.0, 0.0, 0.0), "data"), updates)

    return fn.stateless(mean)._replace(facts=fn.Facts(("data",)))


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_rank_that_is_not_finite_takes_the_anchor_also_where_the_average_hides_it(alpha: float) -> None:
    inner = fn.chain(fn.trace(0.9), sgd(1.0))
    w = World(fn.outer(inner, sgd(1.0), hides_what_is_not_finite(), alpha=alpha), params={"a": torch.zeros(3)})
    w.step(Round(), {"a": torch.ones(2, 3)})
    w.params["a"][1, 2] = torch.nan
    w.step(Round(0, 0), {"a": torch.zeros(2, 3)})
    torch.testing.assert_close(w.own.anchor["a"], torch.tensor([-1.9, -1.9, -0.95]))  # both went 1.9
    assert torch.equal(w.params["a"][1], w.own.anchor["a"])
    assert w.own.sound[0].tolist() == [True, False]
    (momentum,) = tree.fields(w.state, "mu")
    assert not momentum["a"][1].any()
    assert momentum["a"][0].all()
