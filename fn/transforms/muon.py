"""Muon: the momentum of a matrix, made orthogonal. `scale_by_muon`, `orthogonalize` without a momentum, and NorMuon's
`scale_by_neuron_norm`.

Matrices of a shape make one batch, so that a step is a few products whatever their number. A batch is a copy, and the
products need two more; so no more matrices are stacked than `BATCH` numbers hold.

A tensor of three or more dimensions is a stack of matrices, its last two dimensions: the experts of a layer, say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.arguments import check_flag, check_interval, check_number
from fn.base import Transform, chain, check_state, declare_rule, lift
from fn.errors import expected
from fn.facts import Facts
from fn.kernels import rules
from fn.kernels.tracing import is_concrete, is_recorded
from fn.transforms.adam import zero_moments
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
            (shape[0], all others). False: as a stack of matrices, such as the experts of a layer, each with a norm and
            a factor s of its own.
    Raises: TypeError or ValueError that names the argument; from `init`, a ValueError that names a leaf of less than
        two dimensions. Give these to another optimizer, with `partition`.

    Paper: Jordan et al., Muon: an optimizer for hidden layers in neural networks (2024); coefficients and scales as in
        Therien et al., MuLoCo (arXiv 2505.23725).
    Differs: both iterate in bfloat16, as dtype=torch.bfloat16 does.
    """
    link = orthogonalize(eps=eps, scale=scale, coefficients=coefficients, dtype=dtype, flatten=flatten)
    return chain(trace(decay, nesterov), link._replace(facts=Facts(whole=("scale_by_muon",), batched=not flatten)))


def orthogonalize(
    *,
    eps: float = 1e-8,
    scale: Scale = "spectral_norm",
    coefficients: str | Sequence[Triple] = "dion",
    dtype: torch.dtype | None = None,
    flatten: bool = False,
) -> Transform:
    """Make each matrix of the updates nearly orthogonal by Newton-Schulz iterations: `scale_by_muon` without momentum.

    A tensor of more dimensions is a stack of matrices, unless flatten=True.

        X = z / (|z|_F + eps);    X <- a X + (b A + c A^2) X,  A = X X^T,  for each (a, b, c);    u = s X

    It follows a momentum of another kind, such as one that ranks have voted on.

        >>> import torch, fn
        >>> votes = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
        >>> fn.orthogonalize(scale=None).update(fn.Phase.WARMUP)(votes, (), votes)[0]
        tensor([[ 0.7252,  0.7252],
                [ 0.7252, -0.7252]])

    Args: as for `scale_by_muon`. Raises: as it.
    """
    rule = newton_schulz(eps, scale, coefficients, dtype, flatten)

    def init(params: Tree) -> Tree:
        check_matrices(params)
        return ()

    return lift(init, rule)._replace(facts=Facts(whole=("orthogonalize",), batched=not flatten))


@declare_rule(name="orthogonalize", tensorwise=True)
class NewtonSchulz(NamedTuple):
    """The rule of `orthogonalize`. triples: (a, b, c) of each iteration. Others: as for `scale_by_muon`."""

    triples: tuple[Triple, ...]
    eps: float
    scale: Scale
    dtype: torch.dtype | None
    flatten: bool

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the updates, made nearly orthogonal, and the state."""
        leaves, structure = tree.flatten(updates)
        return tree.unflatten(structure, orthogonal(leaves, self)), state


def newton_schulz(
    eps: float, scale: Scale, coefficients: str | Sequence[Triple], dtype: torch.dtype | None, flatten: bool = False
) -> NewtonSchulz:
    """Return the rule of `orthogonalize`. Args, Raises: as for `scale_by_muon`."""
    check_number("eps", eps)
    if not 0 < eps < math.inf:
        raise ValueError(expected("eps", "a positive number", f"{eps}"))
    if scale not in tuple(FACTORS):
        raise ValueError(expected("scale", f"one of {', '.join(map(repr, FACTORS))}", f"{scale!r}"))
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(expected("dtype", "a floating dtype, or None", f"{dtype}"))
    check_flag("flatten", flatten)
    return NewtonSchulz(_triples(coefficients), eps, scale, dtype, flatten)


def check_matrices(params: Tree) -> None:
    """Refuse params that are neither matrices nor stacks of them, with a ValueError that names the leaf."""
    for path, p in zip(tree.paths(params), tree.leaves(params), strict=True):
        if p.ndim < 2:
            wanted, got = f"leaf {path or 'the root'!r} to be a matrix", f"shape {tuple(p.shape)}"
            raise ValueError(expected("params", wanted, got, "give it to another optimizer, with fn.partition"))


FACTORS: Mapping[Scale, Callable[[int, int], float]] = MappingProxyType(
    {
        "spectral_norm": lambda rows, columns: math.sqrt(rows / max(1, columns)),
        "rms_norm": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
        "max": lambda rows, columns: math.sqrt(max(1.0, rows / max(1, columns))),
        None: lambda rows, columns: 1.0,
    }
)
"""Scale -> the factor of a matrix, from its rows and columns."""


def orthogonal(leaves: Sequence[Tensor], rule: NewtonSchulz) -> list[Tensor]:
    """Return matrices made nearly orthogonal, and stacks of them, each in its own shape and dtype."""
    # (e, ...) -> views (k, ...) of what is longer than a batch
    pieces = [z.split(max(1, BATCH // z[0].numel())) if _is_long(z, rule) else (z,) for z in leaves]
    flat = [x for some in pieces for x in some]
    results = [*flat]
    for places in batches(flat, rule.flatten):
        some = [flat[i] for i in places]
        for i, x in zip(places, _of_a_shape(some, rule), strict=True):
            results[i] = x
    made = iter(results)
    parts = [[next(made) for _ in some] for some in pieces]
    return [x[0] if len(x) == 1 else torch.cat(x) for x in parts]  # k views (e / k, ...) -> (e, ...)


def _is_long(z: Tensor, rule: NewtonSchulz) -> bool:
    return z.ndim > 2 and not rule.flatten and z.numel() > BATCH


def batches(leaves: Sequence[Tensor], flatten: bool = False) -> list[list[int]]:
    """Return the places of leaves that make a batch each: matrices of a shape, and no more than `BATCH` numbers.

    Leaves without elements, such as those that other ranks own, are in none.

    >>> batches([torch.zeros(4, 2), torch.zeros(3, 3), torch.zeros(5, 4, 2), torch.zeros(0, 4, 2)])
    [[0, 2], [1]]
    """
    places: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):
        if x.numel():
            shape = (x.shape[0], x.shape[1:].numel()) if flatten else x.shape[-2:]
            places.setdefault((shape, x.dtype, x.device), []).append(i)
    made: list[list[int]] = []  # and not list[int]() below, which no torch.compile knows
    for of_kind in places.values():
        room = 0
        for i in of_kind:
            room -= leaves[i].numel()
            if room < 0:
                made.append([])
                room = BATCH - leaves[i].numel()
            made[-1].append(i)
    return made


def as_batch(leaves: Sequence[Tensor], flatten: bool = False) -> Tensor:
    """Return matrices of a shape, and stacks of them, as one batch (b, m, n), a copy."""
    # (m, ...) -> (1, m, n); (..., m, n) -> (e, m, n)
    return torch.cat([x.flatten(1)[None] if flatten or x.ndim == 2 else x.flatten(0, -3) for x in leaves])


def apart(batch: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return what `as_batch` joined, as views in the shapes of the leaves."""
    matrix = batch.shape[1] * batch.shape[2]
    parts = batch.split([x.numel() // matrix for x in like])
    return [part.reshape(x.shape) for part, x in zip(parts, like, strict=True)]


def _of_a_shape(leaves: Sequence[Tensor], rule: NewtonSchulz) -> list[Tensor]:
    dtype = leaves[0].dtype
    inside = rule.dtype or torch.promote_types(dtype, torch.float32)
    x = as_batch(leaves, rule.flatten)  # (b, m, n)
    # a norm may be above 65504, and eps is 0 in float16
    x = x.to(torch.float32 if inside == torch.float16 else inside)
    rows, columns = x.shape[1:]
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + rule.eps  # (b, 1, 1); eps keeps zeros zero
    # `x` is the batch's own memory, or a copy of it, so it may be written; a graph needs the old numbers.
    x = (x.div_(norms) if is_concrete(x) and not is_recorded([x]) else x / norms).to(inside)
    for a, b, c in rule.triples:  # X X^T of the smaller side: p(X X^T) X is X p(X^T X)
        gram = torch.bmm(*((x, x.mT) if rows <= columns else (x.mT, x)))  # (b, k, k), k = min(m, n)
        powers = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # b A + c A^2
        # a X + (b A + c A^2) X, (b, m, n)
        x = torch.baddbmm(x, *((powers, x) if rows <= columns else (x, powers)), beta=a)
    factor = FACTORS[rule.scale](rows, columns)
    # the factor comes first, so that the product is rounded once
    return apart((x * factor).to(dtype), leaves)


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


class NeuronNormState(NamedTuple):
    """State of `scale_by_neuron_norm`. nu: of each row the mean square of its updates; float32 for half precision."""

    nu: Tree


@declare_rule(name="scale_by_neuron_norm", tensorwise=True)
class NeuronNorm(NamedTuple):
    """The rule of `scale_by_neuron_norm`, with its arguments."""

    b2: float

    def __call__(self, updates: Tree, state: NeuronNormState, params: Tree, /) -> tuple[Tree, NeuronNormState]:
        """Return the updates, their rows of equal length, and the next state."""
        check_state(state, NeuronNormState)
        tree.check_real(updates, "updates")
        (leaves, old), structure = tree.flatten_alike([updates, state.nu])
        results, after = [*leaves], [*old]
        for places in batches(leaves):
            us, nus = ([tensors[i] for i in places] for tensors in (leaves, old))
            u = as_batch(us)  # (b, m, n)
            u = u.to(torch.promote_types(u.dtype, torch.float32))
            # (b, m, 1)
            nu = rules.lerp(u.square().mean(2, keepdim=True), as_batch(nus), self.b2)
            y = u / (nu.sqrt() + TINY)
            # (b, 1, 1): |u|_F, so that the steps of all rows together stay as long as they were
            lengths = [torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) for x in (u, y)]
            y = y * (lengths[0] / lengths[1].clamp(min=TINY))
            for i, u_i, nu_i in zip(places, apart(y.to(us[0].dtype), us), apart(nu, nus), strict=True):
                results[i], after[i] = u_i, nu_i
        return tree.unflatten(structure, results), NeuronNormState(tree.unflatten(structure, after))


TINY = 1e-8
"""What keeps rows, and matrices, of zeros at zero."""


def scale_by_neuron_norm(b2: float = 0.95) -> Transform:
    """Divide each row of a matrix by its root mean square over time, and keep the matrix's Frobenius norm: NorMuon.

    Behind `orthogonalize`, whose rows differ in length, all neurons then move about as fast.

        v <- b2 v + (1 - b2) mean_columns u^2;    y = u / (sqrt(v) + 1e-8);    u <- y |u|_F / max(|y|_F, 1e-8)

        >>> import torch, fn
        >>> tx = fn.scale_by_neuron_norm()
        >>> u = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
        >>> tx.update(fn.Phase.WARMUP)(u, tx.init(u), u)[0]
        tensor([[2.1319, 2.8425],
                [2.1319, 2.8425]])

    Args: b2: how much of v a step keeps, in [0, 1). v is not bias-corrected, for its scale cancels. Of a stack of
        matrices each has rows and a norm of its own.
    Raises: TypeError or ValueError that names the argument; from `init`, as `orthogonalize`.

    Paper: Li et al., NorMuon: making Muon more efficient and scalable (arXiv 2510.05491).
    Differs: where ranks have rows of a matrix, as FSDP2's, `unsharded` brings whole matrices here, on any number of
        ranks; in the code of Dion, norms are those of each shard.
    """
    check_interval("b2", b2, "[0, 1)")

    def init(params: Tree) -> NeuronNormState:
        check_matrices(params)
        # (..., m, n) -> (..., m, 1)
        return NeuronNormState(zero_moments(tree.map(lambda p: p.detach().new_empty((*p.shape[:-1], 1)), params)))

    return lift(init, NeuronNorm(b2))._replace(facts=Facts(whole=("scale_by_neuron_norm",), batched=True))
