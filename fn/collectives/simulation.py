"""Many ranks in one process: a function is mapped over an axis of ranks with `torch.func.vmap`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.collectives.axis import SIMULATED, Axis, AxisNames, Binding, names, resolve
from fn.compiling import own_code
from fn.errors import expected
from fn.kernels.tracing import is_concrete


def simulate(
    f: Callable[..., Any], axis: str, size: int, *, in_dims: Any = 0, out_dims: Any = 0, randomness: str = "error"
) -> Callable[..., Any]:
    """Run f on `size` simulated ranks of an axis, in this process.

    >>> import torch, fn
    >>> mean = fn.simulate(lambda x: fn.pmean(x, "data"), "data", 4, out_dims=None)
    >>> mean(torch.arange(4.0))
    tensor(1.5000)

    Args:
        f: any function of trees of tensors; collectives over `axis` inside it exchange between the ranks.
        axis, size: the axis' name and its number of ranks.
        in_dims, out_dims: as for `torch.func.vmap`: where the ranks' dimension is in each argument and result.
            None in `in_dims` hands every rank the same value. None in `out_dims` says that the result is the same
            on every rank, and is checked: a result that depends on the rank is refused by its path.
        randomness: as for `torch.func.vmap`: "different" numbers on each rank, for dropout say, the "same" on all, or
            "error". Simulations around this one must be given it, too.
    Returns: a function of the same positional arguments. Simulations of different axes may be nested.
    Raises: TypeError if f is no function; ValueError if size is no whole number of at least 1 or randomness none of the
        three, or from the returned function if out_dims promises a replication that is not there.
    """
    if not callable(f):
        raise TypeError(expected("f", "a function of trees of tensors", type(f).__name__))
    if not isinstance(axis, str):
        raise ValueError(expected("axis", "a name", f"{axis!r}"))
    if not isinstance(size, int) or size < 1:
        raise ValueError(expected("size", "a whole number of at least 1", f"{size!r}"))
    if randomness not in ("error", "different", "same"):
        raise ValueError(expected("randomness", "'error', 'different' or 'same'", f"{randomness!r}"))

    def run(*args: Any) -> Any:
        from_inside: list[Any] = []  # what on_rank returns past vmap, which would give it the ranks' dimension

        def on_rank(rank: Tensor, *local: Any) -> tuple[Any, ...]:
            with Binding({axis: Axis(size, rank, SIMULATED)}):
                result = f(*local)
            leaves, structure = tree.flatten(result)
            dims = tree.broadcast(out_dims, structure)
            if dims is None:
                raise ValueError(f"out_dims: {out_dims} does not fit a result of the structure {structure}")
            named = zip(tree.paths(result), leaves, dims, strict=True)
            replicated = [_replicated(x, rank, path) if d is None else None for path, x, d in named]
            from_inside.extend((structure, dims, replicated))
            return tuple(x for x, d in zip(leaves, dims, strict=True) if d is not None)

        dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(args)
        if len(dims) != len(args):
            wanted = f"one entry for each of the {len(args)} arguments"
            raise ValueError(expected("in_dims", wanted, f"{len(dims)}"))
        for number, (arg, dim) in enumerate(zip(args, dims, strict=True)):
            _check_slices(number, arg, dim, size)
        # The rank is an argument: the level that batches it is how a collective knows its axis.
        on_all = torch.func.vmap(on_rank, in_dims=(0, *dims), randomness=randomness)
        mapped = iter(on_all(torch.arange(size, dtype=torch.int64, device="cpu"), *args))
        structure, dims, replicated = from_inside
        pairs = zip(dims, replicated, strict=True)
        # (W, ...) -> the ranks at dimension d
        leaves = [x if d is None else next(mapped).movedim(0, d).contiguous() for d, x in pairs]
        return tree.unflatten(structure, leaves)

    return own_code(run)  # else torch.compile gives up at the ninth simulation: they would share one code object


def _check_slices(number: int, arg: Any, dims: Any, size: int) -> None:
    """Refuse an argument of a simulation that has no slice for each rank where `dims` says so."""
    leaves, structure = tree.flatten(arg)
    for i, (leaf, dim) in enumerate(zip(leaves, tree.broadcast(dims, structure) or (), strict=False)):
        if not isinstance(leaf, Tensor) or dim is None:
            continue
        if not -leaf.ndim <= dim < leaf.ndim or leaf.shape[dim] != size:
            leaf_of = f"leaf {tree.paths(arg)[i] or 'the root'!r} of argument {number}"
            wanted = f"{size} slices, one for each rank, in dimension {dim} of {leaf_of}"
            cure = "give None for what all ranks share, and fn.rank_dims(state) for a state"
            raise ValueError(expected("in_dims", wanted, f"shape {tuple(leaf.shape)}", cure))


def _replicated(x: Any, rank: Tensor, path: str) -> Any:
    return torch.ops.fn.replicated(x, rank, path) if isinstance(x, Tensor) else x


def _vmap_replicated(info: Any, dims: Any, x: Tensor, rank: Tensor, path: str) -> tuple[Tensor, int | None]:
    """Take x out of the level of its ranks. vmap's own check of out_dims=None would also refuse outer levels."""
    if dims[1] is None:
        return torch.ops.fn.replicated(x, rank, path), dims[0]
    if dims[0] is not None:
        wanted = f"the ranks' dimension for leaf {path or 'the root'!r}, which depends on the rank"
        cure = "give None only for what is the same on every rank, and fn.rank_dims(state) for a state"
        raise ValueError(expected("out_dims", wanted, "None", cure))
    return x, None


def replicated_if_equal(x: Tensor, axis: AxisNames) -> Tensor:
    """Return a tensor without the levels of simulated axes, if all of their ranks computed the same numbers.

    It is for numbers that each rank makes from values of its own, and that are equal by construction. vmap cannot know
    that. Where the numbers differ, or are not known, as under torch.compile, x still depends on the rank. Real ranks
    keep theirs.
    """
    for name in names(axis):
        bound = resolve(name)
        if bound.transport == SIMULATED:
            x = torch.ops.fn.replicated_if_equal(x, bound.rank)
    return x


def _vmap_replicated_if_equal(info: Any, dims: Any, x: Tensor, rank: Tensor) -> tuple[Tensor, int | None]:
    if dims[1] is None or dims[0] is None:
        return (x, None) if dims[1] is not None else (torch.ops.fn.replicated_if_equal(x, rank), dims[0])
    # (W, ...)
    rows = x.movedim(dims[0], 0)
    first = rows[:1]
    same = (rows == first) | ((rows != rows) & (first != first))  # NaN beside NaN is no difference
    while torch._C._functorch.is_batchedtensor(same):  # the levels of other axes: all of their ranks have to agree
        same = torch._C._functorch.get_unwrapped(same)
    return (rows[0], None) if is_concrete(same) and bool(same.all()) else (x, dims[0])


_library = torch.library.Library("fn", "FRAGMENT")
_library.define("replicated(Tensor x, Tensor rank, str path) -> Tensor")
_library.impl("replicated", lambda x, rank, path: x.contiguous(), "CompositeImplicitAutograd")
torch.library.register_vmap("fn::replicated", _vmap_replicated, lib=_library)
_library.define("replicated_if_equal(Tensor x, Tensor rank) -> Tensor")
_library.impl("replicated_if_equal", lambda x, rank: x.contiguous(), "CompositeImplicitAutograd")
torch.library.register_vmap("fn::replicated_if_equal", _vmap_replicated_if_equal, lib=_library)
