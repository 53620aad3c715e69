"""Muon follows torch's, and the recorded runs of MuLoCo on one rank; what it makes is nearly orthogonal."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import chains
import numpy as np
import pytest
import torch
from torch import Tensor

import fn
from fn import Phase, Round, tree

FOLDER = Path(__file__).parents[1] / "golden" / "outer"
ROWS = json.loads((FOLDER / "index_muloco.json").read_text())["cases"]
MULOCO_1 = {"momentum": 0.95, "b2": 0.95, "outer_lr": 0.7, "outer_momentum": 0.6}
"""The defaults of the recorded program, which is for one worker."""


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("row", ROWS, ids=[row["name"] for row in ROWS])
def test_the_recorded_run_is_replayed(row: dict[str, Any]) -> None:
    """From gradients at our own params, on one rank: params, momenta, anchor and outer momentum.

    Differs: fn.transforms.muon.scale_by_muon: both iterate in bfloat16, as dtype=torch.bfloat16 does.

    Differs: fn.local_optimizers.muloco: Matrices' steps are scaled for a rate of AdamW's; the authors' are scaled by
        sqrt(n / k), and have a rate of their own. The authors' program for one worker has momentum 0.95, b2 0.95 and an
        outer step of 0.7 and 0.6.
    """
    assert hashlib.sha256((FOLDER / row["file"]).read_bytes()).hexdigest() == row["sha256"]
    arrays, hyper = dict(np.load(FOLDER / row["file"])), row["hyper"]
    own, count = hyper["muloco"], len(hyper["shapes"])
    names = {"inner_lr": "lr", "nesterov": "inner_nesterov"}
    given = {**MULOCO_1, **{names.get(k, k): v for k, v in own.items()}}
    tx = chains.muloco(axis="data", dtype=getattr(torch, hyper["ns"]), **given)

    def each(name: str) -> list[Tensor]:
        return [torch.from_numpy(arrays[f"p{i}.{name}"].copy()) for i in range(count)]

    def close(ours: Tensor, name: str, row_: int) -> None:
        recorded = arrays[name]
        limit = row["tolerance"] * max(1.0, float(np.abs(recorded).max()))
        np.testing.assert_allclose(ours.numpy(), recorded[row_][0], rtol=0, atol=limit, err_msg=f"{name} {row_}")

    params, a, c, noise = each("init"), each("a"), each("c"), each("noise")
    matrices = [i for i in range(count) if params[i].ndim == 2]
    state, schedule, exchange = tx.init(params), fn.every(hyper["H"]), 0
    for t in range(hyper["steps"]):
        grads = [x * (p - y[0]) + n[t, 0] for x, p, y, n in zip(a, params, c, noise, strict=True)]
        updates, state = tx.update(schedule(t))(grads, state, params)
        params = fn.apply_updates(params, updates)
        for i, p in enumerate(params):
            close(p, f"p{i}.param", t)
        outer = state.inner[1]
        (momenta,) = tree.fields(outer.inner["muon"], "mu")
        for i, mu in zip(matrices, momenta, strict=True):
            close(mu, f"p{i}.muon_momentum", t)
        if schedule(t) == Round(0, 0):
            (sums,) = tree.fields(outer.outer, "mu")
            for i in range(count):
                close(outer.anchor[i], f"p{i}.anchor", exchange)
                close(own["outer_lr"] * sums[i], f"p{i}.outer_u", exchange)
            exchange += 1
    assert exchange == arrays["p0.anchor"].shape[0]


@pytest.mark.parametrize("nesterov", [False, True])
def test_it_is_torchs_in_bfloat16(nesterov: bool) -> None:
    """Torch's momentum is an average of gradients, which the division by the norm makes the same."""
    start = [numbers(8, 5), numbers(5, 8, seed=1), numbers(6, 6, seed=2)]
    theirs = [p.clone().requires_grad_() for p in start]
    made = torch.optim.Muon(
        theirs, lr=0.1, weight_decay=0.1, momentum=0.9, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
    )
    triple = (3.4445, -4.7750, 2.0315)
    link = fn.scale_by_muon(0.9, nesterov, scale="rms_norm", coefficients=[triple] * 5, dtype=torch.bfloat16)
    tx = fn.chain(link, fn.add_decayed_weights(0.1), fn.scale_by_learning_rate(0.1))
    params, state = start, tx.init(start)
    for t in range(5):
        grads = [numbers(*p.shape, seed=10 * t + i) for i, p in enumerate(params)]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g
        made.step()
        updates, state = tx.local_update(grads, state, params)
        params = fn.apply_updates(params, updates)
    for ours, p in zip(params, theirs, strict=True):
        torch.testing.assert_close(ours, p.detach(), rtol=0, atol=5e-3)


@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (6, 6), (1, 7)])
def test_what_it_makes_is_nearly_orthogonal(shape: tuple[int, int]) -> None:
    g = numbers(*shape).double()
    for scale, factor in (("spectral_norm", (shape[0] / shape[1]) ** 0.5), ("rms_norm", 0.2 * max(shape) ** 0.5)):
        tx = fn.scale_by_muon(scale=scale)
        u, _ = tx.local_update(g, tx.init(g), g)
        u_, _, v = torch.linalg.svd(g, full_matrices=False)
        torch.testing.assert_close(u / factor, u_ @ v, rtol=0, atol=0.1)


def test_scales_are_those_of_the_shape() -> None:
    g = numbers(9, 4)
    plain, by_max, rms, spectral = (
        fn.scale_by_muon(scale=scale).local_update(g, fn.scale_by_muon().init(g), g)[0]
        for scale in (None, "max", "rms_norm", "spectral_norm")
    )
    torch.testing.assert_close(by_max, plain * 1.5)
    torch.testing.assert_close(spectral, plain * 1.5)
    torch.testing.assert_close(rms, plain * 0.6)
    wide = fn.scale_by_muon(scale="max").local_update(g.T, fn.scale_by_muon().init(g.T), g.T)[0]
    torch.testing.assert_close(wide, plain.T)


def test_the_weight_of_a_convolution_is_a_matrix_if_it_is_told_so() -> None:
    g = [numbers(6, 3, 2, 2), numbers(6, 3, 2, 2, seed=1), numbers(6, 12, seed=2)]
    tx = fn.scale_by_muon(flatten=True)
    flat = [x.flatten(1) for x in g]
    made, _ = tx.local_update(g, tx.init(g), g)
    expected, _ = tx.local_update(flat, tx.init(flat), flat)
    for a, b, x in zip(made, expected, g, strict=True):
        assert a.shape == x.shape
        torch.testing.assert_close(a, b.view(x.shape), rtol=0, atol=2e-6)


@pytest.mark.parametrize("link", [fn.orthogonalize, fn.scale_by_muon, fn.scale_by_neuron_norm])
def test_a_stack_is_as_many_matrices(link: Any) -> None:
    """Of any number of dimensions, beside matrices of the same shape and those without elements; longer than a batch,
    too."""
    g = [numbers(3, 6, 4), numbers(2, 2, 6, 4, seed=1), numbers(6, 4, seed=2), numbers(5, 4, 6, seed=3)]
    g += [torch.zeros(0, 6, 4), torch.zeros(2, 0, 4)]
    each, tx = [x for z in g if z.numel() for x in z.reshape(-1, *z.shape[-2:])], link()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fn.transforms.muon.BATCH", 60)
        made, _ = tx.local_update(g, tx.init(g), g)
    apart, _ = tx.local_update(each, tx.init(each), each)
    assert [x.shape for x in made] == [x.shape for x in g]
    for ours, theirs in zip([x for z in made if z.numel() for x in z.reshape(-1, *z.shape[-2:])], apart, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_rows_of_neuron_norm_are_equally_long_and_the_norm_stays() -> None:
    """With each step's rows alone, b2 = 0; a row, and a matrix, of zeros stays zero; half precision has a float32 v."""
    u, tx = numbers(4, 6), fn.scale_by_neuron_norm(0.0)
    u[2] = 0
    made, _ = tx.local_update([u, torch.zeros(3, 2)], tx.init([u, torch.zeros(3, 2)]), None)
    lengths = made[0].norm(dim=1)
    torch.testing.assert_close(lengths[[0, 1, 3]], lengths[:1].expand(3))
    torch.testing.assert_close(made[0].norm(), u.norm())
    assert not made[0][2].any()
    assert not made[1].any()
    half = u.bfloat16()
    out, state = tx.local_update(half, tx.init(half), None)
    assert (out.dtype, state.nu.dtype) == (torch.bfloat16, torch.float32)


def test_what_muon_moves_and_what_adamw_does() -> None:
    """By default the tensors with two dimensions are Muon's, with labels those that are hidden; the rate of the others
    is a multiple of its own."""
    params = [torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(3)]
    grads = [numbers(*p.shape, seed=i) for i, p in enumerate(params)]
    tx = fn.muon(0.1, labels=["hidden", "other", "other"], other_rate=0.5, weight_decay=0.0)
    updates, _ = tx.warmup_update(grads, tx.init(params), params)
    assert torch.linalg.svdvals(updates[0].double()).sub(0.1 * (4 / 3) ** 0.5).abs().max() < 0.02
    for u, g in zip(updates[1:], grads[1:], strict=True):
        torch.testing.assert_close(u, -0.05 * g.sign(), rtol=0, atol=1e-5)
    lion = fn.muon(0.1, other="lion", weight_decay=0.0)
    updates, _ = lion.warmup_update(grads, lion.init(params), params)
    torch.testing.assert_close(updates[2], -0.1 * grads[2].sign())


def test_zeros_stay_zeros_and_a_matrix_may_be_empty():
    tx, params = fn.scale_by_muon(), [torch.zeros(3, 2), torch.zeros(0, 4), torch.zeros(4, 0)]
    updates, _ = tx.local_update(params, tx.init(params), params)
    assert all(torch.equal(u, p) for u, p in zip(updates, params, strict=True))


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: fn.scale_by_muon(1.0), ValueError, "decay: expected"),
        (lambda: fn.scale_by_muon(eps=0.0), ValueError, "eps: expected a positive number, but got 0.0"),
        (lambda: fn.scale_by_muon(scale="rms"), ValueError, "scale: expected"),
        (lambda: fn.scale_by_muon(coefficients=[]), ValueError, "coefficients: expected"),
        (lambda: fn.scale_by_muon(coefficients=5), ValueError, "coefficients: expected three numbers"),
        (lambda: fn.scale_by_muon(coefficients=[1, 2, 3]), ValueError, "coefficients: expected three numbers"),
        (lambda: fn.scale_by_muon(coefficients=[(1, 2, torch.nan)]), ValueError, "coefficients: expected three"),
        (lambda: fn.scale_by_muon(scale=["max"]), ValueError, "scale: expected one of"),
        (lambda: fn.muon(other_rate=torch.inf), ValueError, "other_rate: expected a number in"),
        (lambda: fn.scale_by_muon(coefficients="keller"), ValueError, "coefficients: expected one of 'dion', 'jordan'"),
        (lambda: fn.muon(other="sgd"), ValueError, "other: expected 'adamw' or 'lion', but got 'sgd'"),
        (lambda: fn.muon(labels=["hid"]).init([torch.ones(2, 2)]), ValueError, "labels: expected 'hidden' or 'other'"),
        (lambda: fn.scale_by_muon().init({"b": torch.ones(3)}), ValueError, "params: expected leaf 'b' to be a matrix"),
    ],
)
def test_bad_input_is_refused_by_name(make: Any, kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        make()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_updates_in_half_precision_are_iterated_on_in_float32(dtype: torch.dtype) -> None:
    """A norm above what float16 holds is none of a matrix of zeros."""
    g = (300 * numbers(300, 300)).to(dtype)
    u = fn.orthogonalize().update(Phase.WARMUP)(g, (), g)[0]
    assert torch.equal(u, fn.orthogonalize().update(Phase.WARMUP)(g.float(), (), g)[0].to(dtype))
    assert u.float().norm() > 15


def test_iterations_in_float16_have_the_norm_and_eps_of_float32() -> None:
    large, zeros = 300 * numbers(300, 300), torch.zeros(3, 2)
    tx = fn.orthogonalize(dtype=torch.float16)
    u, nothing = tx.update(Phase.WARMUP)([large, zeros], (), [large, zeros])[0]
    torch.testing.assert_close(u, fn.orthogonalize().update(Phase.WARMUP)(large, (), large)[0], rtol=0, atol=0.05)
    assert torch.equal(nothing, zeros)


def test_an_optimizer_writes_over_a_mean_in_half_precision() -> None:
    g = numbers(5, 4).bfloat16()
    p = torch.nn.Parameter(torch.zeros(5, 4, dtype=torch.bfloat16))
    opt = fn.Optimizer([p], lambda lr: fn.chain(fn.average(None), fn.orthogonalize(), fn.scale_by_learning_rate(lr)))
    p.grad = g.clone()
    opt.step()
    u = fn.orthogonalize().update(Phase.WARMUP)(g, (), g)[0]
    torch.testing.assert_close(p.detach(), -1e-3 * u, rtol=0.02, atol=0)
