"""Cholesky's way to an orthonormal basis is QR's, but for what it says it fails on, and is taken where that is seen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fn.kernels import orthonormal
from fn.kernels.orthonormal import by_cholesky, orthonormalized

SHAPES = [(3, 12, 4), (1, 30, 4), (2, 5, 5), (4, 9, 1), (1, 64, 16)]


def stacks(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in SHAPES]


def projections(bases: list[Tensor]) -> list[Tensor]:
    return [q.double() @ q.double().mT for q in bases]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("graded", [False, True])
def test_it_is_a_basis_of_what_qr_is_one_of(dtype, graded):
    """Also where columns are a thousand times as long as others."""
    given = [x * torch.logspace(0, -3, x.shape[2], dtype=dtype) if graded else x for x in stacks(dtype)]
    found, tolerance = by_cholesky(given), 50 * torch.finfo(dtype).eps
    for q, x in zip(found, given, strict=True):
        assert (q.shape, q.dtype) == (x.shape, dtype)
        one = torch.eye(x.shape[2], dtype=dtype).expand(len(x), -1, -1)
        torch.testing.assert_close(q.mT @ q, one, rtol=0, atol=tolerance)
    wanted = projections([torch.linalg.qr(x.double()).Q for x in given])
    torch.testing.assert_close(projections(found), wanted, rtol=0, atol=1e3 * tolerance)


def test_zeros_have_unit_vectors_and_a_matrix_of_too_small_a_rank_alone_is_zero():
    x = stacks()[0]
    x[0], x[1, 1:] = 0, 0  # in the second matrix only one row is not zero
    (q,) = by_cholesky([x])
    torch.testing.assert_close(q[0], torch.eye(12, 4))
    assert not q[1].any()
    assert q[2].any()
    assert q[2].isfinite().all()
    assert not by_cholesky([torch.full((1, 3, 2), torch.nan)])[0].any()


def test_a_column_of_zeros_is_one_that_is_free():
    x = stacks()[0]
    x[:, :, 2] = 0
    (q,) = by_cholesky([x])
    torch.testing.assert_close(q.mT @ q, torch.eye(4).expand(3, -1, -1), rtol=0, atol=1e-5)
    torch.testing.assert_close(q @ (q.mT @ x), x, rtol=1e-5, atol=1e-5)


def test_it_is_taken_on_accelerators(monkeypatch):
    x = stacks()
    assert all(map(torch.equal, orthonormalized(x), [torch.linalg.qr(one).Q for one in x]))  # on the CPU
    monkeypatch.setattr(orthonormal, "BY_QR", frozenset())
    assert all(map(torch.equal, orthonormalized(x), by_cholesky(x)))
    assert orthonormalized([]) == []
    assert orthonormalized([x[0].clone().requires_grad_()])[0].requires_grad
