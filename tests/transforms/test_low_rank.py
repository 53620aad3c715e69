"""`low_rank_average`: what it sends, what it keeps, and where it is right although the originals are not."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, tree
from fn.adapters import checkpoint
from fn.kernels import orthonormal
from fn.transforms.low_rank import LowRankState

SHAPES = [(12, 8), (12,), (5, 17), (6, 3, 3, 3), (), (0, 4), (3, 2), (4, 0)]
FOLDER = Path(__file__).parents[1] / "golden" / "compressors"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def run(tx: fn.Transform, grads: list[Tensor], phase: Phase = Phase.COMPRESSED) -> tuple[list[Tensor], Any]:
    """Take a step in simulated ranks for each row of gradients (S, W, shape); return all updates and the last state."""
    like = [torch.zeros_like(g[0, 0]) for g in grads]

    def on_rank(grads: list[Tensor]) -> tuple[list[Tensor], Any]:
        state, outs = tx.init(like), []
        for t in range(grads[0].shape[0]):
            out, state = tx.update(phase)([g[t] for g in grads], state, like)
            outs.append(out)
        return [torch.stack(each) for each in zip(*outs, strict=True)], state

    dims = (None, fn.rank_dims(tx.init(like)))
    return fn.simulate(on_rank, "data", grads[0].shape[1], in_dims=1, out_dims=dims)(grads)


def test_a_matrix_of_its_rank_arrives_in_two_steps_and_vectors_and_small_ones_at_once():
    left, right = normal(12, 2), normal(8, 2, seed=1)
    grads = [(left @ right.T).expand(2, 3, 12, 8), normal(2, 3, 12, seed=2), normal(2, 3, 3, 2, seed=3)]
    out, state = run(fn.low_rank_average("data", 2), grads)
    torch.testing.assert_close(out[0], grads[0][:, 0], rtol=1e-4, atol=1e-4)
    for x, g in zip(out[1:], grads[1:], strict=True):
        torch.testing.assert_close(x, g.mean(1))
    assert [isinstance(e, Tensor) for e in state.errors] == [True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_sent_and_what_is_kept_add_up_to_what_was_given(dtype):
    """For every shape, in every dtype; in half precision updates are rounded, errors are not."""
    grads = [normal(5, 2, *shape, seed=i).to(dtype) for i, shape in enumerate(SHAPES)]
    out, state = run(fn.low_rank_average("data", 2), grads)
    for x, g, e in zip(out, grads, state.errors, strict=True):
        assert (x.dtype, x.shape[1:]) == (dtype, g.shape[2:])
        kept = e.double().mean(0).view(x.shape[1:]) if isinstance(e, Tensor) else 0.0
        atol = 0.1 if dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(x.double().sum(0) + kept, g.double().mean(1).sum(0), rtol=0, atol=atol)
        assert not isinstance(e, Tensor) or e.dtype == (torch.float32 if dtype is torch.bfloat16 else dtype)


def test_the_warm_up_the_local_phase_and_a_rank_alone_leave_all_as_it_is():
    tx, p = fn.low_rank_average("data", 2), [normal(12, 8)]
    state = tx.init(p)
    for phase in Phase:
        out, after = tx.update(phase)(p, state, p)
        assert torch.equal(out[0], p[0])
        assert after is state


def naive(g: Tensor, e: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Take a step of both papers: all ranks subtract the mean. g, e (W, n, m)."""
    c = g + e
    p = torch.linalg.qr((c @ q).mean(0)).Q
    q = (c.mT @ p).mean(0)
    return p @ q.T, c - p @ q.T, q


@pytest.mark.reliability
def test_errors_stay_bounded_over_two_thousand_small_steps():
    """Two ranks whose data differ: by the papers' rule what differs is added up for ever.

    Differs: fn.transforms.low_rank.low_rank_average: a rank's error is what its own factor leaves, c - P P^T c, where
        both papers subtract the mean over the ranks; the mean of the errors is the same, and they stay bounded.
    """
    tx, like = fn.low_rank_average("data", 1), [torch.zeros(6, 5)]
    apart = normal(2, 6, 5)
    noise = 0.3 * normal(2000, 2, 6, 5, seed=1)

    def on_rank(apart: Tensor, noise: Tensor) -> list[Tensor]:
        state, norms = tx.init(like), []
        for t, x in enumerate(noise):
            _, state = tx.update(Phase.COMPRESSED)([apart + x], state, like)
            if t in (20, 499, 1999):
                norms.append(state.errors[0])
        return norms

    ours = fn.simulate(on_rank, "data", 2, in_dims=(0, 1))(apart, noise)
    e, q, theirs = torch.zeros(2, 6, 5), tx.init(like).q[0], []
    for t, x in enumerate(noise):
        _, e, q = naive(apart + x, e, torch.linalg.qr(q).Q)
        if t in (20, 499, 1999):
            theirs.append(e)
    torch.testing.assert_close(ours[0].mean(0).view(6, 5), theirs[0].mean(0), rtol=1e-2, atol=1e-2)
    assert ours[2].norm() < 2 * ours[1].norm()
    assert theirs[2].norm() > 3 * theirs[1].norm()
    assert theirs[2].norm() > 20 * ours[2].norm()


def test_zero_gradients_stay_zero_and_the_iteration_goes_on_after_them():
    """On all ranks, in the first steps; the recorded hook has NaN there.

    Differs: fn.transforms.low_rank.low_rank_average: A matrix of zeros stays zero; PyTorch's hook makes it NaN.
    """
    g = normal(6, 2, 12, 8)
    g[:3] = 0
    out, _ = run(fn.low_rank_average("data", 1), [g])
    assert not out[0][:3].any()
    assert all(x.any() and x.isfinite().all() for x in out[0][3:])
    start = fn.low_rank_average("data", 1).init([g[0, 0]])
    _, still = run(fn.low_rank_average("data", 1), [g[:3]])
    assert torch.equal(still.q[0], start.q[0])
    p = torch.zeros(12, 1)
    p /= p.norm() + 0  # what the hook does to a column, with its default epsilon
    assert p.isnan().all()


def test_ranks_without_a_gradient_move_with_the_others():
    """In Dion, too, in which a rank asks its own momentum whether it is all zero; updates leave `run` only if alike.

    Differs: fn.transforms.low_rank.low_rank_average: Whether a matrix is all zero is asked of the mean, and not of a
        rank's own.
    """
    g = normal(4, 2, 12, 8)
    g[:, 0] = 0
    for tx in (
        fn.low_rank_average("data", 2),
        fn.low_rank_average("data", 2, feedback=fn.decayed(1, 0.05), orthonormal=True),
    ):
        out, _ = run(tx, [g])
        assert all(x.any() for x in out[0])


def test_the_first_step_of_dion_sends_no_more_than_the_others():
    """In the recorded run the first step sends the gradients as well.

    Differs: fn.low_rank_optimizers.dion: the first step sends no more than the others; the authors' code averages the
        gradient in it, too.
    """
    rows = json.loads((FOLDER / "index_low_rank.json").read_text())["cases"]
    (row,) = (row for row in rows if row["method"] == "dion" and row["hyper"]["scalar"]["algorithm"] == "adamw")
    theirs = np.load(FOLDER / row["file"])["bytes"]
    p = [torch.zeros(shape) for shape in row["shapes"]]
    tx, ours = fn.dion(axis="data"), []

    def on_rank(g: list[Tensor]) -> list[Tensor]:
        state = tx.init(p)
        for _ in range(3):
            with fn.ledger() as sent:
                out, state = tx.update(Phase.COMPRESSED)(g, state, p)
            ours.append(sent.total)
        return out

    fn.simulate(on_rank, "data", 2, out_dims=None)([normal(2, *x.shape) for x in p])
    assert theirs[0] > theirs[1] == theirs[2]
    assert ours == [theirs[1]] * 3


def test_factors_in_codes_still_bring_the_mean():
    grads = [normal(1, 2, 12, 8).expand(60, 2, 12, 8), normal(60, 2, 9, seed=1)]
    out, state = run(fn.low_rank_average("data", 2, mean=fn.compressed_average("data", fn.int8(), fn.off())), grads)
    torch.testing.assert_close(out[0].mean(0), grads[0][0].mean(0), rtol=0, atol=0.15)
    torch.testing.assert_close(out[1], grads[1].mean(1))
    assert tree.leaves(state.mean) == []


@pytest.mark.parametrize("feedback", [fn.classic(store=torch.bfloat16), fn.damped(), fn.decayed(0.9), fn.off()])
def test_other_feedbacks_are_followed(feedback):
    """A constant gradient comes through within the feedback's resolution; without one, its largest part does."""
    grads = [normal(1, 2, 12, 8).expand(60, 2, 12, 8)]
    out, _ = run(fn.low_rank_average("data", 2, feedback=feedback), grads)
    lost = (out[0][30:].mean(0) - grads[0][0].mean(0)).norm() / grads[0][0].mean(0).norm()
    assert lost < {"Off": 0.8, "StoredClassic": 0.1}.get(type(feedback.rule).__name__, 0.5)


REFUSED = [
    ({"rank": 0}, ValueError, "rank: expected a whole number of at least 1, but got 0"),
    ({"rank": 1.5}, ValueError, "rank: expected"),
    ({"min_rate": 0}, ValueError, "min_rate: expected"),
    ({"iterations": 0}, ValueError, "iterations: expected"),
    ({"multiple_of": 0}, ValueError, "multiple_of: expected"),
]


@pytest.mark.parametrize(("options", "kind", "text"), REFUSED, ids=[next(iter(row[0])) for row in REFUSED])
def test_what_does_not_fit_is_refused_by_name(options, kind, text):
    with pytest.raises(kind, match=f"^{text}"):
        fn.low_rank_average("data", **{"rank": 1, **options})


def test_a_mean_that_keeps_errors_is_refused():
    mean = fn.compressed_average("data", fn.int8())
    with pytest.raises(ValueError, match=r"mean.*keeps nothing.*fn\.off"):
        fn.low_rank_average("data", 2, mean=mean).init([normal(12, 8)])


# Behind an optimizer: where columns are dependent, and on another world.

MAKES = {
    "powersgd": partial(fn.powersgd_adamw, axis="data", rank=2),
    "damped": partial(fn.powersgd_adamw, axis="data", rank=2, feedback=fn.damped()),
    "dion": partial(fn.dion, axis="data"),
}


def make(name: str) -> tuple[list[Tensor], fn.Optimizer]:
    params = [torch.nn.Parameter(normal(*shape, seed=i)) for i, shape in enumerate(SHAPES)]
    with fn.bind(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))):
        return params, fn.Optimizer(params, MAKES[name], schedule=fn.freeze_after(1), lr=0.01)


def step(params: list[Tensor], opt: fn.Optimizer, t: int) -> None:
    for i, p in enumerate(params):
        p.grad = normal(*p.shape, seed=100 * t + 10 * i + dist.get_rank())
    opt.step()


def left_out(bad: bool) -> tuple[bool, int, list[Tensor]]:
    """Take a step in which Cholesky's way, as on an accelerator, finds no basis near enough, then one that it takes.

    Args: bad: whether the second rank's gradient is not finite in the first step.
    Returns: whether the first one moved the matrix; skipped steps; the gradients, the error and the moves of this rank.
    """
    orthonormal.BY_QR = frozenset()
    far, rank = orthonormal.FAR, dist.get_rank()
    tx = fn.skip_nonfinite(fn.chain(fn.low_rank_average("data", 2), fn.scale_by_learning_rate(1.0)))
    params, first, second = ({"w": normal(8, 6, seed=10 * seed + rank)} for seed in range(3))
    first["w"][0] = math.nan if bad and rank else first["w"][0]
    with fn.bind(init_device_mesh("cpu", (2,), mesh_dim_names=("data",))):
        update, state = tx.update(Phase.COMPRESSED), tx.init(params)
        orthonormal.FAR = -1.0
        still, state = update(first, state, params)
        orthonormal.FAR = far
        moves, after = update(second, state, params)
    (low,) = tree.instances(after, LowRankState)
    error = torch.stack([x.view(8, 6) for x in tree.leaves(low.errors)]).sum(0)
    return bool(still["w"].any()), int(state.skipped), [first["w"], second["w"], error, moves["w"]]


@pytest.mark.parametrize("bad", [False, True])
def test_a_matrix_that_cholesky_fails_on_is_left_out_and_kept_in_its_error(bad):
    found = ranks.run(2, left_out, bad)
    for moved, skipped, _ in found:
        assert not moved
        assert skipped == bad
    firsts, seconds, errors, moves = (torch.stack(x) for x in zip(*(tensors for *_, tensors in found), strict=True))
    assert torch.equal(*moves)
    given = seconds.mean(0) + (0 if bad else firsts.mean(0))  # the mean of what is sent and of what is kept
    torch.testing.assert_close(errors.mean(0) - moves[0], given, rtol=1e-4, atol=1e-4)


def of_state(opt: fn.Optimizer) -> LowRankState:
    """Return what low rank keeps, with errors as vectors."""
    found: list[LowRankState] = []
    tree.replace(opt.states, LowRankState, lambda s: found.append(s) or s)
    (state,) = found
    return state


def errors(state: LowRankState, name: str) -> list[Tensor]:
    load = (fn.damped() if name == "damped" else fn.classic()).compensate
    return [load(torch.zeros(math.prod(s)), e) for s, e in zip(SHAPES, state.errors, strict=True) if e != ()]


def saving(folder: str) -> dict[str, Any]:
    found = {}
    for name in MAKES:
        params, opt = make(name)
        for t in range(5):
            step(params, opt, t)
        checkpoint.save(f"{folder}/{name}", opt)
        q = [x for x in of_state(opt).q if isinstance(x, Tensor)]
        found[name] = [x.numpy() for x in errors(of_state(opt), name)], [x.numpy() for x in q]
    return found


def loading(folder: str) -> dict[str, Any]:
    found = {}
    for name in MAKES:
        params, opt = make(name)
        checkpoint.load(f"{folder}/{name}", opt)
        q = [x for x in of_state(opt).q if isinstance(x, Tensor)]
        kept = [x.numpy() for x in errors(of_state(opt), name)], [x.numpy().copy() for x in q]
        for t in range(5, 8):
            step(params, opt, t)
        found[name] = *kept, all(bool(p.isfinite().all()) for p in params)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("old", "new"), [(2, 2), (3, 2), pytest.param(2, 3, marks=pytest.mark.reliability)])
def test_another_world_keeps_the_mean_of_the_errors_and_the_basis(old, new, tmp_path):
    before = ranks.run(old, saving, str(tmp_path))
    after = ranks.run(new, loading, str(tmp_path))
    for name in MAKES:
        for k in range(len(before[0][name][0])):
            was = sum(found[name][0][k].astype(np.float64) for found in before) / old
            now = sum(found[name][0][k].astype(np.float64) for found in after) / new
            assert np.abs(was).max() > 0
            assert np.abs(was - now).max() <= (2e-2 if name == "damped" else 1e-6) * np.abs(was).max()
            for found in after:
                assert np.array_equal(found[name][1][k], before[0][name][1][k])
        assert all(found[name][2] for found in after)
        if old == new:
            for one, other in zip(before, after, strict=True):
                assert all(map(np.array_equal, one[name][0], other[name][0]))


def test_a_state_of_other_params_is_refused():
    def step(g):
        tx = fn.low_rank_average("data", 1)
        return tx.compressed_update([g], tx.init([g, g]), [g])[0]

    with pytest.raises(ValueError, match=r"^state: expected one for 1 tensors, but got 2; a state belongs"):
        fn.simulate(step, "data", 2)(torch.ones(2, 5, 4))


@pytest.mark.reliability
def test_a_step_of_powersgd_compiles_to_one_graph() -> None:
    tx, params = fn.powersgd_adamw(axis="data"), [normal(12, 8), normal(5, seed=1)]
    dims, g = fn.rank_dims(tx.init(params)), [normal(2, 12, 8), normal(2, 5)]
    state = fn.simulate(tx.init, "data", 2, in_dims=None, out_dims=dims)(params)
    step = fn.simulate(tx.compressed_update, "data", 2, in_dims=(0, dims, None), out_dims=(None, dims))
    torch.compiler.reset()
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)(g, state, params)
    torch.testing.assert_close(tree.leaves(compiled), tree.leaves(step(g, state, params)))
