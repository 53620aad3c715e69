"""Updates are added to params: `apply_updates`, the end of every step."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fn import tree
from fn.base import NewParams
from fn.errors import expected

Tree = Any


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Return params + updates, leaf by leaf, in the dtype of the params.

    The sum is taken in the wider of the two dtypes and rounded once. It is differentiable: hand in params that do not
    require grad, `{k: p.detach() for ...}`, unless you differentiate through the step; a loop would otherwise keep the
    graph of all its steps. Of `NewParams` it is a copy in the dtype of the params.

    Raises: ValueError if an update has another shape than its parameter, or the trees another structure; TypeError for
        a leaf that is no tensor, or one of 8 bits.
    """

    new = isinstance(updates, NewParams)
    updates = updates.params if isinstance(updates, NewParams) else updates
    try:
        updates = tree.in_order(updates, params, "updates")
    except ValueError as error:
        raise ValueError(f"{error}; give what an update returned first, of (updates, state)") from None

    def add(p: Tensor, u: Tensor) -> Tensor:
        if not (isinstance(p, Tensor) and isinstance(u, Tensor)) or 1 in (p.dtype.itemsize, u.dtype.itemsize):
            tree.check_real(params, "params")
            tree.check_real(updates, "updates")
        if u.shape != p.shape:
            raise ValueError(_misfit(params, updates))
        return u.to(p.dtype, copy=True) if new else (p + u).to(p.dtype)

    return tree.map(add, params, updates)


def _misfit(params: Tree, updates: Tree) -> str:
    pairs = zip(tree.paths(params), tree.leaves(params), tree.leaves(updates), strict=True)
    path, p, u = next(found for found in pairs if found[1].shape != found[2].shape)
    wanted = f"leaf {path or 'the root'!r} to have the shape of its parameter, {tuple(p.shape)}"
    return expected("updates", wanted, f"{tuple(u.shape)}")
