"""Orthonormal bases of the columns of matrices, stack by stack: QR, or on accelerators products and Cholesky's factor.

QR goes column by column, and an accelerator is at its slowest there. Cholesky's way is products of whole stacks, but it
fails where columns are nearly dependent. Whether it did is known on the device only, and nobody waits for that: the
basis of a matrix that it fails on is zero. Who projects on it sends nothing of this matrix, and keeps all of it as a
residual error. NaN in what is projected stays NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fn import tree
from fn.kernels.tracing import is_concrete

BY_QR = frozenset({"cpu"})
"""Types of devices on which QR is as fast."""

SHIFT = 8.0
"""What is added to the products of columns with themselves, in units of r eps: more than rounding takes from them."""

FAR = 0.5
"""How far from orthonormal columns may be before the last pass, in the Frobenius norm; below 1 it repairs them."""


def orthonormalized(stacks: Sequence[Tensor]) -> list[Tensor]:
    """Return orthonormal bases of the columns of matrices; of columns of zeros, some unit vectors.

    Args: stacks: (b, n, r) each, of b matrices with n >= r.
    Returns: as many stacks of the same shapes; zeros where `by_cholesky` fails.
    """
    if stacks and is_concrete(*stacks) and not any(x.device.type in BY_QR or x.requires_grad for x in stacks):
        return by_cholesky(stacks)
    return [torch.linalg.qr(x).Q for x in stacks]


def by_cholesky(stacks: Sequence[Tensor]) -> list[Tensor]:
    """Return the same by products of matrices: shifted CholeskyQR3. What it fails on is zero, a matrix at a time.

        >>> import torch
        >>> a = torch.tensor([[[3.0, 1.0], [4.0, 2.0], [0.0, 2.0]], [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0]]])
        >>> (q,) = by_cholesky([a])                      # the columns of the second matrix are dependent
        >>> (q[0].mT @ q[0] - torch.eye(2)).abs().max() < 1e-6, q[1].any()
        (tensor(True), tensor(False))

    All stacks with as many columns go through the factorisation together.

    Paper: Fukaya et al., Shifted Cholesky QR (arXiv 1809.11085), algorithm 4.2, on columns of length 1.
    """
    return tree.in_groups(_by_cholesky, [(x.shape[2], x.dtype, x.device) for x in stacks], stacks)


def _by_cholesky(stacks: list[Tensor]) -> list[Tensor]:
    """Do it for stacks (b, n, r) of one r. G is A^T A of every matrix, (B, r, r), and L its Cholesky factor."""
    r, like = stacks[0].shape[2], stacks[0]
    one, counts = torch.eye(r, dtype=like.dtype, device=like.device), [len(x) for x in stacks]

    # Columns of length 1. Zeros become unit vectors: a step without a gradient would fail, and the next ones with it.
    # (b, n, r) of each stack -> (B, 1, r)
    lengths = torch.cat([x.norm(dim=1, keepdim=True) for x in stacks])
    zero = (lengths == 0).to(like.dtype)
    inverses = (lengths + zero).reciprocal_()
    stacks = [x * inverse for x, inverse in zip(stacks, inverses.split(counts), strict=True)]
    for x, is_zero in zip(stacks, zero.squeeze(1).split(counts), strict=True):
        x.diagonal(dim1=1, dim2=2).add_(is_zero)

    # With the shift G is positive definite, however dependent the columns are, and A L^-T is nearer to orthonormal.
    gram = _gram(stacks)
    gram.diagonal(dim1=1, dim2=2).add_(SHIFT * r * torch.finfo(like.dtype).eps)
    stacks = _times(stacks, _inverse(gram, one))
    stacks = _times(stacks, _inverse(_gram(stacks), one))

    # The last pass squares how far the columns are from orthonormal, if that is not too far: so this is the only check.
    gram = _gram(stacks)
    off = (gram - one).flatten(1).norm(dim=1)  # NaN, if a factorisation has failed, is not below anything
    # (B,) -> (B, 1, 1) -> (b, 1, 1) of each stack
    holds = (off < FAR)[:, None, None].split(counts)
    bases = _times(stacks, _inverse(gram, one))
    return [torch.where(ok, x, 0.0) for ok, x in zip(holds, bases, strict=True)]


def _gram(stacks: list[Tensor]) -> Tensor:
    """Return A^T A of all matrices, (B, r, r)."""
    # (b, r, n) @ (b, n, r) of each stack -> (B, r, r)
    return torch.cat([torch.bmm(x.mT, x) for x in stacks])


def _inverse(gram: Tensor, one: Tensor) -> Tensor:
    """Return L^-1, (B, r, r); not finite, or of no use, where there is no L."""
    # `cholesky` would raise where there is no factor, for which the host would wait for the device.
    lower = torch.linalg.cholesky_ex(gram).L
    inverse: Tensor = torch.linalg.solve_triangular(lower, one.expand_as(lower), upper=False)
    return inverse


def _times(stacks: list[Tensor], inverse: Tensor) -> list[Tensor]:
    """Return A L^-T of all matrices."""
    parts = inverse.split([len(x) for x in stacks])
    # (b, n, r) @ (b, r, r)
    return [torch.bmm(x, part.mT) for x, part in zip(stacks, parts, strict=True)]
