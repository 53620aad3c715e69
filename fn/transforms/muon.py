"""Muon: the momentum of a matrix, made orthogonal. `scale_by_muon`, and `orthogonalize` without a momentum.

Matrices of a shape make one batch, so that a step is a few products whatever their number. A batch is a copy, and the
products need two more; so no more matrices are stacked than `BATCH` numbers hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.arguments import check_number
from fn.base import Transform, chain, lift, says
from fn.errors import expected
from fn.facts import Facts
from fn.kernels import rules
from fn.kernels.lists import elementwise
from fn.kernels.tracing import is_concrete, is_recorded
from fn.transforms.momentum import trace

Tree = Any
Triple = tuple[float, float, float]
Scale = Literal["spectral_norm", "rms_norm", "max"] | None

BATCH = 1 << 26
"""Numbers of a batch, at most; a matrix that is larger is a batch of its own. 256 MiB in float32."""

_SAFETY = 1.02
_POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


def _of_smaller(triple: Triple, factor: float) -> Triple:
    """Return the triple that does to x what this one does to x / factor."""
    a, b, c = triple
    return a / factor, b / factor**3, c / factor**5


COEFFICIENTS: Mapping[str, tuple[Triple, ...]] = MappingProxyType(
    {
        "dion": (
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        "jordan": ((3.4445, -4.7750, 2.0315),) * 5,
        # its authors divide the matrix by 1.02, so that rounding cannot take a singular value above 1
        "polar_express": (_of_smaller(_POLAR_EXPRESS[0], _SAFETY), *_POLAR_EXPRESS[1:]),
    }
)
"""Coefficients by name, a triple for each iteration: those of the code of Dion and MuLoCo; Keller Jordan's; those of
Amsel et al., The Polar Express (arXiv 2505.16932)."""


def scale_by_muon(
    decay: float = 0.95,
    nesterov: bool = False,
    *,
    eps: float = 1e-8,
    scale: Scale = "spectral_norm",
    coefficients: str | Sequence[Triple] = "dion",
    dtype: torch.dtype | None = None,
    flatten: bool = False,
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
            learning rate of AdamW fits. "max": sqrt(max(1, n / k)), which is Keller Jordan's. None: 1.
        coefficients: "dion", "jordan", "polar_express", or a triple for each iteration.
        dtype: in what the iterations are done, such as bfloat16, which is faster on accelerators; None: as the momentum
            is, float32 for half precision.
        flatten: take a tensor of three or more dimensions, such as the weight of a convolution, as the matrix
            (shape[0], all others). A stack of matrices, such as the experts of a layer, is none; make it a list.
    Raises: TypeError or ValueError that names the argument; from `init`, a ValueError that names a leaf that is no
        matrix. Give these to another optimizer, with `partition`.

    Paper: Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024); coefficients and scales as in
        Therien et al., MuLoCo (arXiv 2505.23725).
    Differs: both iterate in bfloat16, as dtype=torch.bfloat16 does.
    """
    link = orthogonalize(eps=eps, scale=scale, coefficients=coefficients, dtype=dtype, flatten=flatten)
    return chain(trace(decay, nesterov), link._replace(facts=Facts(whole=("scale_by_muon",))))


def orthogonalize(
    *,
    eps: float = 1e-8,
    scale: Scale = "spectral_norm",
    coefficients: str | Sequence[Triple] = "dion",
    dtype: torch.dtype | None = None,
    flatten: bool = False,
) -> Transform:
    """Make each matrix of the updates nearly orthogonal, by Newton-Schulz iterations: `scale_by_muon`, no momentum.

        X = z / (|z|_F + eps);    X <- a X + (b A + c A^2) X,  A = X X^T,  for each (a, b, c);    u = s X

    It follows a momentum of another kind, such as one that ranks have voted on.

        >>> import torch, fn
        >>> votes = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> fn.orthogonalize(scale=None).update(fn.Phase.WARMUP)(votes, (), votes)[0]
        tensor([[ 0.7252,  0.7252],
                [ 0.7252, -0.7252]])

    Args: as for `scale_by_muon`. Raises: as it.
    """
    rule = newton_schulz(eps, scale, coefficients, dtype)
    if not isinstance(flatten, bool):
        raise TypeError(expected("flatten", "True or False", f"{flatten!r}"))

    def init(params: Tree) -> Tree:
        check_matrices(params, flatten)
        return ()

    return lift(init, rule)._replace(facts=Facts(whole=("orthogonalize",)))


@says(name="orthogonalize", is_fresh=True)
class NewtonSchulz(NamedTuple):
    """The rule of `orthogonalize`. triples: (a, b, c) of each iteration. Others: as for `scale_by_muon`."""

    triples: tuple[Triple, ...]
    eps: float
    scale: Scale
    dtype: torch.dtype | None

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the updates, made nearly orthogonal, and the state."""
        leaves, structure = tree.flatten(updates)
        return tree.unflatten(structure, orthogonal(leaves, self)), state

    def over(self, updates: Tree, state: Tree, params: Tree) -> tuple[Tree, Tree]:
        """Take the step in the memory of the updates."""
        leaves, structure = tree.flatten(updates)
        return tree.unflatten(structure, orthogonal(leaves, self, in_place=True)), state


def newton_schulz(
    eps: float, scale: Scale, coefficients: str | Sequence[Triple], dtype: torch.dtype | None
) -> NewtonSchulz:
    """Return the rule of `orthogonalize`. Args, Raises: as for `scale_by_muon`."""
    check_number("eps", eps)
    if not 0 < eps < math.inf:
        raise ValueError(expected("eps", "a positive number", f"{eps}"))
    if scale not in tuple(FACTORS):
        raise ValueError(expected("scale", f"one of {', '.join(map(repr, FACTORS))}", f"{scale!r}"))
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(expected("dtype", "a floating dtype, or None", f"{dtype}"))
    return NewtonSchulz(_triples(coefficients), eps, scale, dtype)


def check_matrices(params: Tree, flatten: bool) -> None:
    """Refuse params that are no matrices, or cannot be taken as such, with a ValueError that names the leaf."""
    for path, p in zip(tree.paths(params), tree.leaves(params), strict=True):
        if p.ndim != 2 and not (flatten and p.ndim > 2):
            wanted, got = f"leaf {path or 'the root'!r} to be a matrix", f"shape {tuple(p.shape)}"
            cure = "give it to another optimizer, with fn.partition"
            cure += "; or pass flatten=True, if it maps all its dimensions but the first" if p.ndim > 2 else ""
            raise ValueError(expected("params", wanted, got, cure))


FACTORS: Mapping[Scale, Callable[[int, int], float]] = MappingProxyType(
    {
        "spectral_norm": lambda rows, columns: math.sqrt(rows / max(1, columns)),
        "rms_norm": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
        "max": lambda rows, columns: math.sqrt(max(1.0, rows / max(1, columns))),
        None: lambda rows, columns: 1.0,
    }
)
"""Scale -> the factor of a matrix, from its rows and columns."""


def orthogonal(matrices: Sequence[Tensor], rule: NewtonSchulz, *, in_place: bool = False) -> list[Tensor]:
    """Return matrices made nearly orthogonal, each in its own shape and dtype. Equal shapes make one batch.

    Args: in_place: write over the matrices, in place of new memory.
    """
    # Those without elements are made anew, too: results that are fresh share no memory with what came in.
    results = [z if in_place or z.numel() else z.new_empty(z.shape) for z in matrices]
    full = [i for i, z in enumerate(matrices) if z.numel()]  # those that other ranks own have no elements
    for places in batches([(matrices[i].shape, matrices[i].dtype, matrices[i].device) for i in full]):
        batch = [matrices[full[k]] for k in places]
        # (b, m, n) as a batch, each matrix back in its own place
        for k, x in zip(places, _of_a_shape(batch, rule, batch if in_place else None), strict=True):
            results[full[k]] = x
    return results


def batches(kinds: Iterable[tuple[torch.Size, torch.dtype, torch.device]]) -> list[list[int]]:
    """Return the places of tensors that make a batch each: equal in kind, and no more than `BATCH` numbers.

    >>> pairs = [(torch.Size([4, 2]), torch.float32, torch.device("cpu")), (torch.Size([3]), torch.float32, None)]
    >>> batches([pairs[0], pairs[1], pairs[0]])
    [[0, 2], [1]]
    """
    places: dict[Any, list[int]] = {}
    for i, kind in enumerate(kinds):
        places.setdefault(kind, []).append(i)
    made = []
    for (shape, *_), of_kind in places.items():
        most = max(1, BATCH // max(1, shape.numel()))
        made += [of_kind[first : first + most] for first in range(0, len(of_kind), most)]
    return made


def _of_a_shape(matrices: Sequence[Tensor], rule: NewtonSchulz, out: Sequence[Tensor] | None) -> Sequence[Tensor]:
    shape, dtype = matrices[0].shape, matrices[0].dtype
    inside = rule.dtype or torch.promote_types(dtype, torch.float32)
    x = torch.stack([*matrices]).flatten(2)  # (b, m, n)
    # a norm may be above 65504, and eps is 0 in float16
    x = x.to(torch.float32 if inside == torch.float16 else inside)
    rows, columns = x.shape[1:]
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + rule.eps  # (b, 1, 1); eps keeps zeros zero
    # `x` is the stack's own memory, or a copy of it, so it may be written; a graph needs the old numbers.
    x = (x.div_(norms) if is_concrete(x) and not is_recorded([x]) else x / norms).to(inside)
    for a, b, c in rule.triples:  # X X^T of the smaller side: p(X X^T) X is X p(X^T X)
        gram = torch.bmm(*((x, x.mT) if rows <= columns else (x.mT, x)))  # (b, k, k), k = min(m, n)
        powers = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b A + c A^2
        # a X + (b A + c A^2) X, (b, m, n)
        x = torch.baddbmm(x, *((powers, x) if rows <= columns else (x, powers)), beta=a)
    factor = FACTORS[rule.scale](rows, columns)
    if out is not None:
        # (b, m, n) -> b times the shape of a tensor
        made: list[Tensor] = elementwise(rules.scaled, (x.view(len(matrices), *shape).unbind(),), factor, out=[out])
        return made
    # (b, m, n) -> b times the shape of a tensor; the factor comes first, so that the product is rounded once
    return (x * factor).to(dtype).view(len(matrices), *shape).unbind()


def _triples(coefficients: str | Sequence[Triple]) -> tuple[Triple, ...]:
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENTS:
            wanted = f"one of {', '.join(map(repr, COEFFICIENTS))}, or three numbers for each iteration"
            raise ValueError(expected("coefficients", wanted, f"{coefficients!r}"))
        return COEFFICIENTS[coefficients]
    try:
        triples = tuple((float(a), float(b), float(c)) for a, b, c in coefficients)
    except (TypeError, ValueError):
        triples = ()
    if not triples or not all(math.isfinite(x) for triple in triples for x in triple):
        raise ValueError(expected("coefficients", "three numbers for each iteration", f"{coefficients}"))
    return triples
