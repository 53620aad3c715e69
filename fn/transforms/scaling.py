"""Links without state: `scale`, `scale_by_sign`, `scale_by_shape`."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.arguments import check_interval, check_number
from fn.base import Transform, declare_rule, lift, stateless
from fn.errors import expected
from fn.facts import Facts
from fn.kernels import rules
from fn.kernels.lists import elementwise, peaks
from fn.transforms.leafwise import apply

Tree = Any


@declare_rule(name="scale_by_shape", tensorwise=True)
class ByShape(NamedTuple):
    """The rule of `scale_by_shape`."""

    def __call__(self, updates: Tree, state: Tree, params: Tree, /) -> tuple[Tree, Tree]:
        """Return the scaled updates, and the state."""
        tree.check_real(updates, "updates")
        leaves, structure = tree.flatten(updates)
        alike: dict[float, list[int]] = {}  # a call for each factor, which then is a number that is on the host
        for i, x in enumerate(leaves):
            if x.ndim > 1 and x.numel():
                alike.setdefault(math.sqrt(x.shape[0] / math.prod(x.shape[1:])), []).append(i)
        for factor, places in alike.items():
            some = [leaves[i] for i in places]
            scaled = elementwise(rules.scaled, (some,), factor)
            for i, x in zip(places, scaled, strict=True):
                leaves[i] = x
        return tree.unflatten(structure, leaves), state


def scale(x: float | Tensor) -> Transform:
    """Multiply the updates by x, such as a learning rate that belongs in front of a momentum.

        u = x g

        >>> import torch, fn
        >>> fn.scale(0.5).update(fn.Phase.WARMUP)(torch.tensor([1.0, -2.0]), (), None)[0]
        tensor([ 0.5000, -1.0000])

    Args: x: a float, or a 0-d tensor, which a scheduler may fill in place between steps without a recompile.
    Raises: TypeError if x is no number; ValueError if it is not finite, or a tensor with a dimension.
    """
    if isinstance(x, Tensor):
        if x.ndim:
            raise ValueError(expected("x", "a float or a 0-d tensor", f"a tensor of shape {tuple(x.shape)}"))
    else:
        check_number("x", x)
        if not math.isfinite(x):
            raise ValueError(expected("x", "a finite number", f"{x}"))

    def scaled(updates: Tree, params: Tree) -> Tree:
        tree.check_real(updates, "updates")
        return apply(rules.scaled, (updates,), x)

    return stateless(scaled, elementwise=True)


def scale_by_sign(noise: float = 0.0) -> Transform:
    """Return the sign of the updates: 0 for 0, and NaN where they are not finite.

        u = sgn(g) where |g| > noise max |g|, else 0

        >>> import torch, fn
        >>> fn.scale_by_sign(noise=0.1).update(fn.Phase.WARMUP)(torch.tensor([3.0, -2.0, 0.1, 0.0]), (), None)[0]
        tensor([ 1., -1.,  0.,  0.])

    Args: noise: what counts as 0, as a fraction of the largest magnitude of the tensor, in [0, 1). Behind a change of
        basis a zero is a rounding error, whose sign means nothing; 1e-6 leaves those of float32 out.
    Raises: TypeError if noise is no number; ValueError if it is out of range.

    Paper: Bernstein et al., signSGD (arXiv 1802.04434), algorithm 1.
    """

    check_interval("noise", noise, "[0, 1)")

    def signs(updates: Tree, params: Tree) -> Tree:
        tree.check_real(updates, "updates")
        if not noise:
            return apply(rules.sign_of, (updates,))
        tops = peaks(tree.leaves(updates))
        alike = len({(x.dtype, x.device) for x in tops}) == 1  # then a few operations do for all of them
        # S maxima () -> (S,)
        each = [torch.stack(tops)] if alike else tops
        # Where the maximum is not finite, everything counts: the sign of NaN is NaN, and the step is skipped.
        least = [torch.where(x.isfinite(), x, -1.0) for x in (noise * top for top in each)]
        return apply(rules.sign_above, (updates,), least[0] if alike else least)

    facts = Facts(whole=("scale_by_sign with noise",) if noise else ())
    return stateless(signs)._replace(facts=facts)


def scale_by_shape() -> Transform:
    """Multiply the updates of a matrix of n rows and m columns by sqrt(n / m), so that one rate fits all shapes.

    A tensor of more dimensions is the matrix of its first dimension and the rest. Others pass as they are.

        >>> import torch, fn
        >>> fn.scale_by_shape().update(fn.Phase.WARMUP)([torch.ones(4, 1), torch.ones(2)], (), None)[0]
        [tensor([[2.],
                [2.],
                [2.],
                [2.]]), tensor([1., 1.])]

    Paper: Ahn et al., Dion (arXiv 2504.05295), section 3.2; n / m is fan-out / fan-in of a linear layer's weight.
    """
    return lift(lambda params: (), ByShape())._replace(facts=Facts(whole=("scale_by_shape",)))
