"""What `demo`, `ef21_sgdm`, `lion_vote` and `signum_vote` promise beside the recorded runs; the contract of `registry`
asks that zeros stay zero, which a vote cannot say, so they keep one of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from golden.test_golden_bases import CASES
from torch import Tensor

import fn
from fn import Phase, tree
from fn.adapters import checkpoint

SHAPES = {"matrix": (6, 5), "vector": (7,), "kernel": (2, 3, 3), "scalar": ()}
MAKES = {
    "demo": partial(fn.demo, k=3, tile=4),
    "demo over ranks": partial(fn.demo, k=3, tile=4, over="ranks", values=fn.identity(torch.bfloat16)),
    "ef21_sgdm": partial(fn.ef21_sgdm, k=0.2),
    "lion_vote": fn.lion_vote,
    "signum_vote": fn.signum_vote,
    "signum_vote, no servers": partial(fn.signum_vote, servers=False),
}
each = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
Tree = Any


class World:
    """An optimizer on simulated ranks, whose params `simulate` proves to be the same on all."""

    def __init__(self, make: Any, world: int = 2, dtype: torch.dtype = torch.float32, **hyper: Any):
        self.tx, self.world = make(0.02, axis="data", **hyper), world
        self.params = {name: torch.randn(shape).to(dtype) for name, shape in SHAPES.items()}
        self.dims = fn.rank_dims(self.tx.init(self.params))
        self.state = fn.simulate(self.tx.init, "data", world, in_dims=None, out_dims=self.dims)(self.params)

    def gradients(self) -> Tree:
        return {name: torch.randn(self.world, *p.shape).to(p.dtype) for name, p in self.params.items()}

    def step(self, phase: Phase, g: Tree = None) -> World:
        def on_rank(g: Tree, s: Tree, p: Tree) -> tuple[Tree, Tree]:
            u, s = self.tx.update(phase)(g, s, p)
            return fn.apply_updates(p, u), s

        f = fn.simulate(on_rank, "data", self.world, in_dims=(0, self.dims, None), out_dims=(None, self.dims))
        self.params, self.state = f(self.gradients() if g is None else g, self.state, self.params)
        return self


def same(a: Tree, b: Tree) -> bool:
    return all(map(torch.equal, tree.leaves(a), tree.leaves(b)))


def form(t: Tree) -> list[Any]:
    return [(x.dtype, x.shape) for x in tree.leaves(t)]


@each
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("world", [1, 3])
def test_phases_come_in_any_order_and_params_stay_alike_on_all_ranks(make: Any, dtype: torch.dtype, world: int) -> None:
    w = World(make, world, dtype, weight_decay=0.1)
    start = form((w.params, w.state))
    for phase in (Phase.COMPRESSED, Phase.WARMUP, Phase.COMPRESSED, Phase.WARMUP):
        w.step(phase)
        assert form((w.params, w.state)) == start
        assert all(torch.isfinite(p).all() for p in w.params.values())
    with pytest.raises(ValueError, match=r"phase: .*LOCAL"):
        w.tx.update(Phase.LOCAL)


@each
@pytest.mark.parametrize("phase", [Phase.WARMUP, Phase.COMPRESSED])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_gradient_on_any_rank_moves_nothing(make: Any, phase: Phase, bad: float) -> None:
    w = World(make).step(Phase.WARMUP).step(Phase.COMPRESSED)
    g, params, inner = w.gradients(), w.params, w.state.inner
    g["matrix"][1, 3, 2] = bad
    w.step(phase, g)
    assert same(w.params, params)
    assert same(w.state.inner, inner)
    assert w.state.skipped == 1
    assert not same(w.step(phase).params, params)


@each
def test_it_finds_the_common_minimum_of_ranks_that_pull_apart(make: Any) -> None:
    world, lr = 3, torch.tensor(0.0)
    centers = 1 + 3 * torch.randn(world, 6, 5)
    goal = centers.mean(0)
    p, tx = {"matrix": goal + 1.0}, make(lr, axis="data")
    dims = fn.rank_dims(tx.init(p))
    s = fn.simulate(tx.init, "data", world, in_dims=None, out_dims=dims)(p)
    for t in range(80):
        lr.fill_(0.1 * (1 - t / 80))
        f = fn.simulate(tx.update(Phase.COMPRESSED if t else Phase.WARMUP), "data", world, in_dims=(0, dims, None),
                        out_dims=(None, dims))  # fmt: skip
        u, s = f({"matrix": p["matrix"] - centers}, s, p)
        p = fn.apply_updates(p, u)
    left = float((p["matrix"] - goal).norm() / goal.numel() ** 0.5)
    name = next(name for name, made in MAKES.items() if made is make)
    assert left < (3.0 if "vote" in name else 0.5)  # a majority finds the median of the ranks' minima


def one_step(tx: fn.Transform, g: Tensor, phase: Phase = Phase.COMPRESSED, p: Tensor | None = None) -> Tensor:
    """Return the update of the first step from zero params."""
    p = torch.zeros(g.shape[1:]) if p is None else p

    def on_rank(g: Tensor) -> Tensor:
        return tx.update(phase)(g, tx.init(p), p)[0]

    return fn.simulate(on_rank, "data", len(g), in_dims=0, out_dims=None)(g)


def test_demo_is_sign_sgd_in_the_warm_up_and_alone_and_a_rounding_error_moves_nothing() -> None:
    """Of the cosine with q = 1 on three points the middle is zero; the recorded parameters move there.

    Differs: fn.vote_optimizers.demo: in the warm-up, and on one rank, it is signSGD without the momentum. A mean below
        1e-6 of the tensor's largest counts as 0; in the authors' code the sign of a rounding error moves the parameter.
    """
    g = torch.randn(2, 9)
    assert torch.equal(one_step(fn.demo(0.5, axis="data", k=1, tile=3), g, Phase.WARMUP), -0.5 * g.mean(0).sign())
    assert torch.equal(one_step(fn.demo(0.5, axis="data", k=1, tile=3), g[:1]), -0.5 * g[0].sign())
    waves = torch.tensor([1.0, 0.0, -1.0]).repeat(2, 3)
    assert one_step(fn.demo(0.5, axis="data", k=1, tile=3), waves).tolist() == [-0.5, 0.0, 0.5] * 3
    moved = 0
    for case in CASES:
        if case.row["method"] == "demo":
            for mean, param in zip(case.each("mean"), case.each("param"), strict=True):
                still = mean[1:].abs().flatten(1) < 1e-6 * mean[1:].abs().flatten(1).amax(1, keepdim=True)
                moved += int((still & (param.diff(dim=0).abs().flatten(1) > 0.5 * case.hyper["lr"])).sum())
    assert moved


def test_ef21_makes_its_step_with_the_new_gradient() -> None:
    """
    Differs: fn.vote_optimizers.ef21_sgdm: the step is made with the new gradient; in the paper it is made before that.
    """
    g = torch.randn(2, 8)
    torch.testing.assert_close(one_step(fn.ef21_sgdm(0.5, 1.0, axis="data", k=8), g), -0.5 * g.mean(0))


def test_distributed_lions_ties_and_bits_are_others() -> None:
    """
    Differs: fn.vote_optimizers.lion_vote: ties and zeros vote by their index; in the authors' code always -1, so that
        with two ranks params drift wherever the ranks disagree. One bit travels for an element; theirs are added up as
        64 bit numbers.
    """
    case = next(case for case in CASES if case.row["method"] == "distributed_lion" and case.world == 2)
    g, lr = case.each("grad")[0][0], case.hyper["lr"]
    divided = g[0].sign() != g[1].sign()
    theirs = case.each("param")[0][0] - case.each("init")[0] * (1 - lr * case.hyper["weight_decay"])
    torch.testing.assert_close(theirs[divided], torch.full_like(theirs[divided], lr), rtol=1e-3, atol=0)
    with fn.ledger() as sent:
        ours = one_step(fn.lion_vote(lr, axis="data"), g)
    index = torch.arange(g[0].numel()).view(g[0].shape)
    torch.testing.assert_close(ours[divided], torch.where(index % 2 == 0, -lr, lr)[divided])
    assert sent.total == 2 * 24 // 8 + 2  # 35 elements in two pieces of 24, there and back, a byte for each row
    assert case.arrays["bytes"][0] > 8 * sent.total


def test_a_side_is_cut_by_the_tile_and_not_by_its_divisors() -> None:
    """
    Differs: fn.transforms.bases.dct: a tile is as long as it is said to be, and the last one shorter; theirs are as
        long as the largest divisor of a side, which of a prime is 1.
    """
    assert [part.shape for part in fn.dct(64).into(torch.zeros(67))] == [(1, 64), (1, 3)]
    shapes = [part.shape for part in fn.dct(4).into(torch.zeros(6, 3, 9))]
    assert shapes == [(2, 48), (1, 12), (2, 24), (1, 6)]
    x = torch.randn(6, 3, 9)
    torch.testing.assert_close(fn.dct(4).back(fn.dct(4).into(x), x.shape), x)
    torch.testing.assert_close(fn.dct(8).into(torch.ones(8))[0][0], torch.tensor([8**0.5, *[0.0] * 7]))


@pytest.mark.parametrize("gather_feedback", [None, fn.classic(), fn.off()], ids=repr)
@pytest.mark.parametrize("servers", [False, True])
def test_after_a_warm_up_step_differences_have_nothing_to_catch_up(servers: bool, gather_feedback: Any) -> None:
    """And what arrived is the mean of the ranks' h, but for what the servers keep."""
    extra = {"gather_feedback": gather_feedback} if servers else {}
    mean = fn.compressed_average("data", fn.int4(8), fn.differences(), servers=servers, **extra)
    tx, p = fn.chain(mean, fn.running_sum()), torch.zeros(40)
    x = torch.randn(3, 40)

    def on_rank(x: Tensor) -> tuple[Tensor, ...]:
        s, out = tx.init(p), []
        for t, g in enumerate((2 * x, x, x, x + 1)):
            u, s = tx.update(Phase.WARMUP if t == 1 else Phase.COMPRESSED)(g, s, p)
            out.append(u)
        h = fn.pmean(s[0].worker[0], "data")[:40]
        kept = fn.all_gather(s[0].server[0], "data").flatten()[:40] if s[0].server[0] != () else torch.zeros(40)
        return torch.stack(out), h, kept

    found, h, kept = fn.simulate(on_rank, "data", 3, in_dims=0, out_dims=None)(x)
    torch.testing.assert_close(found[1], x.mean(0))
    torch.testing.assert_close(found[2], x.mean(0))
    torch.testing.assert_close(found[3], (x + 1).mean(0), rtol=0, atol=0.3)
    if gather_feedback is None or gather_feedback.rule == fn.classic().rule or not servers:
        torch.testing.assert_close(found[3] + kept, h)


def test_the_halves_of_an_average_may_have_feedbacks_of_their_own() -> None:
    """With the same one in both it is the average without the word for it."""
    x = torch.randn(6, 4, 50)

    def last(**extra: Any) -> Tensor:
        tx = fn.compressed_average("data", fn.int4(8), fn.classic(), **extra)

        def on_rank(x: Tensor) -> Tensor:
            s = tx.init(x[0])
            for g in x:
                u, s = tx.compressed_update(g, s, g)
            return u

        return fn.simulate(on_rank, "data", 4, in_dims=1, out_dims=None)(x)

    assert torch.equal(last(gather_feedback=fn.classic()), last())
    assert not torch.equal(last(gather_feedback=fn.off()), last())


def optimizers() -> dict[str, fn.Optimizer]:
    found = {}
    for name, make in MAKES.items():
        generator = torch.Generator().manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES.values()]
        found[name] = fn.Optimizer(params, partial(make, axis="data"), schedule=fn.freeze_after(2), lr=0.01)
    return found


def take(opt: fn.Optimizer, steps: int) -> None:
    for t in range(opt.steps, opt.steps + steps):
        generator = torch.Generator().manual_seed(100 * t + dist.get_rank())
        for p in opt.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=generator)
        opt.step()


def leaves(opt: fn.Optimizer) -> list[Tensor]:
    return [x.detach().clone() for x in (*opt.param_groups[0]["params"], *tree.leaves(opt.states))]


def saved(folder: str) -> dict[str, Any]:
    """Return for each optimizer whether it goes on bit for bit from a state dict, and what a mean of h is off a sum."""
    found = {}
    with fn.bind({"data": dist.group.WORLD}):
        again = optimizers()
        for number, (name, opt) in enumerate(optimizers().items()):
            take(opt, 5)
            again[name].load_state_dict(opt.state_dict())
            with torch.no_grad():
                for p, q in zip(again[name].param_groups[0]["params"], opt.param_groups[0]["params"], strict=True):
                    p.copy_(q)
            checkpoint.save(f"{folder}/{number}", opt)
            take(opt, 2)
            take(again[name], 2)
            found[name] = all(map(torch.equal, leaves(opt), leaves(again[name])))
        rank = dist.get_rank()
        try:
            fn.ef21_sgdm(0.1, axis="data", k=2 + rank).init([torch.zeros(4)])
        except fn.RanksDisagree as error:
            found["disagreed"] = "top_k" in str(error) or "codec" in str(error) or str(error)
    return found


def loaded(folder: str) -> dict[str, Any]:
    """Return how far the mean of the ranks' h is off what arrived, and that a step can be made."""
    found = {}
    with fn.bind({"data": dist.group.WORLD}):
        for number, (name, opt) in enumerate(optimizers().items()):
            checkpoint.load(f"{folder}/{number}", opt)
            if name == "ef21_sgdm":
                h = fn.pmean(tree.fields(opt.states, "worker")[0][0], "data")
                total = torch.cat([x.flatten() for x in tree.leaves(tree.fields(opt.states, "total")[0])])
                found["off"] = float((h - total).abs().max())
                found["size"] = float(total.abs().max())
            take(opt, 1)
            first = fn.all_gather(torch.cat([p.detach().flatten() for p in opt.param_groups[0]["params"]]), "data")
            found[name] = bool((first == first[:1]).all())
    return found


def test_a_run_goes_on_bit_for_bit_and_on_another_number_of_ranks(tmp_path: Any) -> None:
    """There every rank has the mean of the momenta, and of the h, which is still what arrived."""
    for found in ranks.run(2, saved, str(tmp_path)):
        assert found.pop("disagreed") is True
        assert all(found.values()), found
    for found in ranks.run(3, loaded, str(tmp_path)):
        assert found.pop("off") < 1e-5 * found.pop("size")
        assert all(found.values()), found


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: fn.demo(axis="data", k=0), ValueError, "k: expected a whole number of at least 1"),
        (lambda: fn.demo(axis="data", k=17, tile=4), ValueError, "k: expected a whole number .* at most 16"),
        (lambda: fn.demo(axis="data", tile=0), ValueError, "tile: expected a whole number of at least 1, but got 0"),
        (lambda: fn.dct(2.5), TypeError, "tile: expected a whole number"),
        (lambda: fn.dct(lambda side: 0).into(torch.zeros(3)), ValueError, "tile: expected a whole number of at least"),
        (lambda: fn.ef21_sgdm(axis="data", k=9, block=8), ValueError, "k: expected a whole number .* at most 8"),
        (lambda: fn.ef21_sgdm(axis="data", eta=0.0), ValueError, r"eta: expected a number in \(0, 1\], but got 0.0"),
        (lambda: fn.ef21_sgdm(axis=("local", "node")), ValueError, "feedback: expected .* to have a single axis"),
        (lambda: fn.demo(axis="data", values=fn.ballots()), ValueError, "values: expected a codec that keeps magn"),
        (lambda: fn.lion_vote(axis="data", values=fn.int8()), TypeError, "values"),
        (lambda: fn.lion_vote(axis="data", ties="zero"), ValueError, "ties: expected 'even' or 'plus'"),
        (lambda: fn.lion_vote(axis="data", b1=1.0), ValueError, "b1: expected"),
        (lambda: fn.signum_vote(axis="data", b=1.0), ValueError, r"b: expected a number in \[0, 1\)"),
        (lambda: fn.scale(float("nan")), ValueError, "x: expected a finite number"),
        (lambda: fn.scale(torch.ones(2)), ValueError, "x: expected a float or a 0-d tensor"),
        (lambda: fn.scale_by_sign(1.0), ValueError, r"noise: expected a number in \[0, 1\)"),
        (
            lambda: fn.compressed_average("data", fn.int4(), gather_feedback=fn.off(), servers=False),
            ValueError,
            "gather_feedback: is given with servers=False",
        ),
        (
            lambda: fn.compressed_average("data", fn.int4(), gather_feedback=fn.differences()),
            ValueError,
            "gather_feedback: expected one for what is sent once",
        ),
        (
            lambda: fn.compressed_average("data", fn.int4(), gather_feedback="off"),
            TypeError,
            "gather_feedback: expected a Feedback",
        ),
    ],
)
def test_bad_input_is_refused_by_name(make: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()
