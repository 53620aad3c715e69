"""Muon: the momentum of a matrix, made orthogonal. `scale_by_muon`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fn import tree
from fn.base import Facts, Transform, chain, check_number, lift
from fn.errors import expected
from fn.transforms.momentum import trace

Tree = Any

COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Those of the code of MuLoCo, one triple for each iteration."""


def scale_by_muon(
    decay: float = 0.95,
    nesterov: bool = False,
    *,
    eps: float = 1e-8,
    scale: Literal["spectral_norm", "rms_norm"] = "spectral_norm",
    coefficients: Sequence[tuple[float, float, float]] = COEFFICIENTS,
    dtype: torch.dtype | None = None,
) -> Transform:
    """Make the momentum of each matrix nearly orthogonal: all its singular values become about 1.

        m <- decay m + g;    z = g + decay m with nesterov, else m
        X = z / (|z|_F + eps);    X <- a X + (b A + c A^2) X,  A = X X^T,  for each (a, b, c);    u = s X

        >>> import torch, fn
        >>> tx = fn.scale_by_muon()
        >>> g = torch.tensor([[3.0, 0.0], [0.0, 0.1]])
        >>> tx.update(fn.Phase.WARMUP)(g, tx.init(g), g)[0]          # singular values 3 and 0.1 become about 1
        tensor([[0.9792, 0.0000],
                [0.0000, 1.0106]])

    Args:
        decay, nesterov: as for `trace`, whose state this has. eps: keeps a matrix of zeros at zero.
        scale: s for n rows and k columns. "spectral_norm": sqrt(n / k). "rms_norm": 0.2 sqrt(max(n, k)), so that a
            learning rate of AdamW fits.
        coefficients: a triple for each iteration. dtype: in what the iterations are done, such as bfloat16, which is
            faster on accelerators; None: as the momentum is, float32 for half precision.
    Raises: TypeError or ValueError that names the argument; from `init`, a ValueError that names a leaf that is no
        matrix. Give these to another optimizer, with `partition`.

    Paper: Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024); coefficients and scales as in
        Therien et al., MuLoCo (arXiv 2505.23725).
    Differs: both iterate in bfloat16, as dtype=torch.bfloat16 does.
    """
    check_number("eps", eps)
    if not 0 < eps < math.inf:
        raise ValueError(expected("eps", "a positive number", f"{eps}"))
    if scale not in ("spectral_norm", "rms_norm"):
        raise ValueError(expected("scale", "'spectral_norm' or 'rms_norm'", f"{scale!r}"))
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(expected("dtype", "a floating dtype, or None", f"{dtype}"))
    triples = tuple(tuple(map(float, each)) for each in coefficients)
    if not triples or any(len(each) != 3 for each in triples):
        raise ValueError(expected("coefficients", "three numbers for each iteration", f"{coefficients}"))

    def init(params: Tree) -> Tree:
        for path, p in zip(tree.paths(params), tree.leaves(params), strict=True):
            if p.ndim != 2:
                wanted, got = f"leaf {path or 'the root'!r} to be a matrix", f"shape {tuple(p.shape)}"
                raise ValueError(expected("params", wanted, got, "give it to another optimizer, with fn.partition"))
        return ()

    def orthogonal(z: Tensor) -> Tensor:
        rows, columns = z.shape
        x = (z.T if rows > columns else z).to(dtype or z.dtype)
        x = x / (x.norm() + eps)
        for a, b, c in triples:
            gram = x @ x.T
            x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        spectral = math.sqrt(rows / max(1, columns))
        factor = spectral if scale == "spectral_norm" else 0.2 * math.sqrt(max(rows, columns))
        return (x.T if rows > columns else x).to(z.dtype) * factor

    def update(updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        return tree.map(orthogonal, updates), state

    return chain(trace(decay, nesterov), lift(init, update)._replace(facts=Facts(whole=("scale_by_muon",))))
