"""Axes by name: the same function runs on simulated ranks and on process groups.

`simulate` maps a function over an axis of ranks inside one process, with `torch.func.vmap`; `bind` gives the
axes of a `DeviceMesh` to the process groups behind them. With neither, an axis has size 1 in a process that
belongs to no group; a process that does belong to one must say which axis is which.

    >>> import torch, fn
    >>> mean = fn.simulate(lambda x: fn.pmean(x, "data"), "data", 4, out_dims=None)
    >>> mean(torch.arange(4.0))
    tensor(1.5000)
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fn import tree
from fn.collectives.mpi import Communicator, is_communicator, register_communicator
from fn.collectives.peers import remember
from fn.kernels.eager import is_eager

SIMULATED = ""
ALONE = "alone"

AxisNames = str | tuple[str, ...]
"""An axis, or several that are taken together, from the fastest network to the slowest: `("local", "node")`."""


class Axis(NamedTuple):
    """What a name stands for here: how many ranks, which of them this is, and how they are reached.

    rank: 0-d int64; under `simulate` it is batched by that simulation's vmap level, which is how a collective
        recognises its own level.
    transport: the name of a process group or a registered transport, or `SIMULATED`, or `ALONE` for an unbound axis
        of size 1.
    """

    size: int
    rank: Tensor
    transport: str


class _Bound(threading.local):
    def __init__(self) -> None:
        self.axes: Mapping[str, Axis] = {}  # replaced, never mutated
        self.before: list[Mapping[str, Axis]] = []  # what the bindings that this thread is in replaced


_bound = _Bound()


class Binding:
    """A context in which axis names have a meaning; entering it twice, again later, or in several threads is fine."""

    def __init__(self, axes: Mapping[str, Axis]):
        self.axes = axes

    def __enter__(self) -> Binding:
        _bound.before.append(_bound.axes)
        _bound.axes = {**_bound.axes, **self.axes}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        _bound.axes = _bound.before.pop()


def bind(mesh: DeviceMesh | Mapping[str, dist.ProcessGroup | Communicator]) -> Binding:
    """Give axis names to process groups, as a context.

    Args:
        mesh: a `DeviceMesh` with `mesh_dim_names`, or a mapping from names to process groups of torch.distributed or
            communicators of mpi4py: `{"data": MPI.COMM_WORLD}`.
    Returns: a context manager. `fn.Optimizer` keeps the binding it was built in.
    Raises: ValueError if the mesh has no dimension names, a communicator is null, or this rank is not in a group;
        TypeError for anything else.

    Differs: nothing is process-wide; the binding belongs to the thread that enters it.
    """
    if isinstance(mesh, DeviceMesh):
        if mesh.mesh_dim_names is None:
            raise ValueError("mesh: has no mesh_dim_names; pass mesh_dim_names=('data',) to init_device_mesh")
        groups = {name: mesh.get_group(name) for name in mesh.mesh_dim_names}
    elif isinstance(mesh, Mapping):
        groups = dict(mesh)
    else:
        raise TypeError(f"mesh: is {type(mesh).__name__}; allowed are a DeviceMesh or a mapping of names to groups")
    return Binding({name: _group_axis(name, group) for name, group in groups.items()})


def _group_axis(name: str, group: Any) -> Axis:
    if isinstance(group, dist.ProcessGroup):
        return Axis(group.size(), torch.tensor(group.rank()), remember(group))
    if is_communicator(group):
        transport = register_communicator(group)
        return Axis(group.Get_size(), torch.tensor(group.Get_rank()), transport)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"mesh: {name!r} is a process group without this rank; allowed are groups that it is in")
    raise TypeError(
        f"mesh: {name!r} is {type(group).__name__}; allowed are process groups and communicators of mpi4py"
    )


def current_binding() -> Binding:
    """Return the binding that is in force, to be entered again later."""
    return Binding(_bound.axes)


def simulate(
    f: Callable[..., Any], axis: str, size: int, *, in_dims: Any = 0, out_dims: Any = 0, randomness: str = "error"
) -> Callable[..., Any]:
    """Run f on `size` simulated ranks of an axis, in this process.

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
        raise TypeError(f"f: is {type(f).__name__}; allowed is a function of trees of tensors")
    if not isinstance(axis, str):
        raise ValueError(f"axis: is {axis!r}; allowed is a name")
    if not isinstance(size, int) or size < 1:
        raise ValueError(f"size: is {size!r}; allowed are whole numbers of at least 1")
    if randomness not in ("error", "different", "same"):
        raise ValueError(f"randomness: is {randomness!r}; allowed are 'error', 'different' and 'same'")

    def run(*args: Any) -> Any:
        kept: list[Any] = []

        def on_rank(rank: Tensor, *local: Any) -> tuple[Any, ...]:
            with Binding({axis: Axis(size, rank, SIMULATED)}):
                result = f(*local)
            leaves, structure = tree.flatten(result)
            dims = tree.broadcast(out_dims, structure)
            if dims is None:
                raise ValueError(f"out_dims: {out_dims} does not fit a result of the structure {structure}")
            pairs = list(zip(leaves, dims, strict=True))
            named = zip(tree.paths(result), leaves, dims, strict=True)
            kept.extend((structure, dims, [_replicated(x, rank, path) if d is None else None for path, x, d in named]))
            return tuple(x for x, d in pairs if d is not None)

        dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(args)
        if len(dims) != len(args):
            raise ValueError(f"in_dims: has {len(dims)} entries for {len(args)} arguments; allowed is one for each")
        for number, (arg, dim) in enumerate(zip(args, dims, strict=False)):
            _check_slices(number, arg, dim, size)
        each = torch.func.vmap(on_rank, in_dims=(0, *dims), randomness=randomness)
        mapped = iter(each(torch.arange(size), *args))
        structure, dims, same = kept
        pairs = zip(dims, same, strict=True)
        leaves = [x if d is None else next(mapped).movedim(0, d).contiguous() for d, x in pairs]
        return tree.unflatten(structure, leaves)

    return run


def _check_slices(number: int, arg: Any, dims: Any, size: int) -> None:
    """Refuse an argument of a simulation that has no slice for each rank where `dims` says so."""
    leaves, structure = tree.flatten(arg)
    for place, (leaf, dim) in enumerate(zip(leaves, tree.broadcast(dims, structure) or (), strict=False)):
        if not isinstance(leaf, Tensor) or dim is None:
            continue
        if not -leaf.ndim <= dim < leaf.ndim or leaf.shape[dim] != size:
            raise ValueError(
                f"in_dims: is {dim} for leaf {tree.paths(arg)[place] or 'the root'!r} of argument {number}, which has "
                f"the shape {tuple(leaf.shape)}; allowed are {size} slices there, one for each rank; None is for what "
                f"all ranks share, fn.rank_dims(state) for a state"
            )


def _replicated(x: Any, rank: Tensor, path: str) -> Any:
    return torch.ops.fn.replicated(x, rank, path) if isinstance(x, Tensor) else x


def _vmap_replicated(info: Any, dims: Any, x: Tensor, rank: Tensor, path: str) -> tuple[Tensor, int | None]:
    """Take x out of the level of its ranks. vmap's own check of out_dims=None would also refuse outer levels."""
    if dims[1] is None:
        return torch.ops.fn.replicated(x, rank, path), dims[0]
    if dims[0] is not None:
        raise ValueError(
            f"out_dims: is None for leaf {path or 'the root'!r} of a result that depends on the rank; allowed are None "
            f"for what is the same on every rank, where the ranks' dimension is, and fn.rank_dims(state) for a state"
        )
    return x, None


def found_alike(x: Tensor, axis: AxisNames) -> Tensor:
    """Take what the ranks of simulated axes computed each for itself out of their levels, where it is the same.

    For numbers that are made from what is one rank's own, and yet are equal by construction, of which vmap cannot know.
    Where they differ, or are not known, as under torch.compile, x still depends on the rank. Real ranks keep theirs.
    """
    for name in names(axis):
        bound = resolve(name)
        if bound.transport == SIMULATED:
            x = torch.ops.fn.found_alike(x, bound.rank)
    return x


def _vmap_found_alike(info: Any, dims: Any, x: Tensor, rank: Tensor) -> tuple[Tensor, int | None]:
    if dims[1] is None or dims[0] is None:
        return (x, None) if dims[1] is not None else (torch.ops.fn.found_alike(x, rank), dims[0])
    rows = x.movedim(dims[0], 0)
    first = rows[:1]
    same = (rows == first) | ((rows != rows) & (first != first))  # NaN beside NaN is no difference
    while torch._C._functorch.is_batchedtensor(same):  # the levels of other axes: all of their ranks have to agree
        same = torch._C._functorch.get_unwrapped(same)
    return (rows[0], None) if is_eager(same) and bool(same.all()) else (x, dims[0])


_library = torch.library.Library("fn", "FRAGMENT")
_library.define("replicated(Tensor x, Tensor rank, str path) -> Tensor")
_library.impl("replicated", lambda x, rank, path: x.contiguous(), "CompositeImplicitAutograd")
torch.library.register_vmap("fn::replicated", _vmap_replicated, lib=_library)
_library.define("found_alike(Tensor x, Tensor rank) -> Tensor")
_library.impl("found_alike", lambda x, rank: x.contiguous(), "CompositeImplicitAutograd")
torch.library.register_vmap("fn::found_alike", _vmap_found_alike, lib=_library)


def resolve(axis: str) -> Axis:
    """Return what a name stands for here.

    Raises: ValueError if the name is not bound although other names are, or although this process belongs to a
        group of several ranks: a silent local step would train W different models.
    """
    if not isinstance(axis, str):
        raise ValueError(f"axis: is {axis!r}; allowed is a name")
    if axis in _bound.axes:
        return _bound.axes[axis]
    if _bound.axes:
        raise ValueError(f"axis: {axis!r} is not bound; bound are {sorted(_bound.axes)}")
    if ranks_around() > 1:
        raise ValueError(
            f"axis: {axis!r} is not bound, but this is one of {ranks_around()} processes; build and run the "
            f"optimizer inside `with fn.bind(mesh)`, mesh = init_device_mesh(device, ({ranks_around()},), "
            f"mesh_dim_names=({axis!r},)), or over MPI mesh = {{{axis!r}: MPI.COMM_WORLD}}"
        )
    return Axis(1, torch.tensor(0), ALONE)


WORLD_SIZES = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
"""Where launchers say how many processes there are: torchrun, MPICH and its relatives, Open MPI, MVAPICH."""


def ranks_around() -> int:
    """Return how many ranks there are, bound or not, as far as torch.distributed or the launcher says."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return max(int(os.environ.get(name) or 1) for name in WORLD_SIZES)


def carried_by(transport: str) -> str | None:
    """Return the name of the axis that a transport carries here."""
    return next((name for name, bound in _bound.axes.items() if bound.transport == transport), None)


def names(axis: AxisNames) -> tuple[str, ...]:
    """Return the names of one axis or several as a tuple.

    Raises: ValueError if there is none, or one of them twice.
    """
    found = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, tuple | list) else ()
    if not found or not all(isinstance(name, str) for name in found) or len(set(found)) != len(found):
        raise ValueError(f"axis: is {axis!r}; allowed are a name, or a tuple of different names")
    return found


def axis_size(axis: AxisNames) -> int:
    """Return the number of ranks of an axis, of several their product. Raises ValueError as `resolve` does."""
    size = 1
    for name in names(axis):
        size *= resolve(name).size
    return size


def axis_index(axis: AxisNames) -> Tensor:
    """Return this rank's index on an axis, 0-d int64; on several, the last of them counts fastest.

    Raises: ValueError as `resolve` does.
    """
    first, *rest = names(axis)
    index = resolve(first).rank
    for name in rest:
        index = index * resolve(name).size + resolve(name).rank
    return index


def all_ranks() -> Tensor:
    """Return a 0-d tensor that is batched at the levels of all simulated axes in force, and at no other."""
    total = torch.tensor(0)
    for bound in _bound.axes.values():
        total = total + bound.rank
    return total


def rank_dims(state: Any) -> Any:
    """Return a tree like `state` with 0 at leaves that belong to one rank and None at replicated ones.

    These are the in_dims and out_dims of a state under `simulate`. A state class says which of its fields
    belong to one rank by a property `rank_local`, as `ErrorFeedbackState` does. Params are no part of a state: they are
    None, the same on all ranks, for every named optimizer but `zero_one_adam`, whose ranks differ between
    synchronisations and whose params are 0 in every phase.
    """
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        local = getattr(state, "rank_local", ())
        fields = zip(state._fields, state, strict=True)
        return type(state)(*(tree.map(lambda _: 0, v) if k in local else rank_dims(v) for k, v in fields))
    if isinstance(state, (tuple, list)):
        return type(state)(rank_dims(v) for v in state)
    if isinstance(state, dict):
        return {k: rank_dims(v) for k, v in state.items()}
    return None
