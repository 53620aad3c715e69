"""Axes by name: the same function runs on process groups and on simulated ranks.

`bind` gives the axes of a `DeviceMesh` to the process groups behind them; `simulation.simulate` maps a function over an
axis of ranks inside one process. With neither, an axis has size 1 in a process that belongs to no group; a process that
does belong to one must say which axis is which.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from fn import tree
from fn.arguments import checked
from fn.collectives.transports.failure_detection import remember
from fn.collectives.transports.mpi import Communicator, is_communicator, register_communicator
from fn.collectives.transports.tcp import stay_on_gloo
from fn.errors import expected
from fn.roles import rank_local

SIMULATED = ""
"""The transport of an axis under `simulate`."""

ALONE = "alone"
"""The transport of an axis that nobody bound, in a process of its own."""

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
    """What is bound in a thread. Were it the process's, a thread that leaves its context would unbind others' axes."""

    def __init__(self) -> None:
        self.axes: Mapping[str, Axis] = {}  # replaced, never mutated
        self.before: list[Mapping[str, Axis]] = []  # what the bindings that this thread is in replaced


_bound = _Bound()


class Binding:
    """A context in which axis names have a meaning. It may be entered twice, again later, and in several threads."""

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


@checked("tcp")
def bind(mesh: DeviceMesh | Mapping[str, dist.ProcessGroup | Communicator], *, tcp: bool = True) -> Binding:
    """Give axis names to process groups, as a context.

    >>> import torch, fn
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())       # under torchrun: ("gloo")
    >>> mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("data",))
    >>> with fn.bind(mesh):
    ...     print(fn.axis_size("data"), fn.pmean(torch.ones(2), "data"))
    1 tensor([1., 1.])
    >>> dist.destroy_process_group()

    Args:
        mesh: a `DeviceMesh` with `mesh_dim_names`, or a mapping from names to process groups of torch.distributed or
            communicators of mpi4py: `{"data": MPI.COMM_WORLD}`.
        tcp: codes of tensors in host memory travel over TCP connections of their own where the group's backend is gloo,
            which carries one direction after the other. False, on any rank, before the group's first exchange: over
            gloo on all ranks, and no connection is opened.
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
        raise TypeError(expected("mesh", "a DeviceMesh or a mapping from names to groups", type(mesh).__name__))
    if not tcp:
        stay_on_gloo(group for group in groups.values() if isinstance(group, dist.ProcessGroup))
    return Binding({name: _group_axis(name, group) for name, group in groups.items()})


_ranks: dict[str, int] = {}
"""This process' rank by the name of a process group, for `own_rank`."""


def _group_axis(name: str, group: Any) -> Axis:
    if isinstance(group, dist.ProcessGroup):
        transport = remember(group)
        _ranks[transport] = group.rank()
        # On the host, whatever torch's default device is: a step reads it, and would wait for a device.
        return Axis(group.size(), torch.tensor(group.rank(), dtype=torch.int64, device="cpu"), transport)
    if is_communicator(group):
        transport = register_communicator(group)
        return Axis(group.Get_size(), torch.tensor(group.Get_rank(), dtype=torch.int64, device="cpu"), transport)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError(expected("mesh", f"{name!r} to be a process group of this rank's", "one without this rank"))
    wanted = f"{name!r} to be a process group or a communicator of mpi4py"
    raise TypeError(expected("mesh", wanted, type(group).__name__))


def bind_alone(axes: Iterable[str]) -> Binding:
    """Return a binding in which these axes have one rank, so that nothing is sent over them."""
    return Binding({axis: Axis(1, torch.tensor(0, dtype=torch.int64, device="cpu"), ALONE) for axis in axes})


def current_binding() -> Binding:
    """Return the binding that is in force, to be entered again later."""
    return Binding(_bound.axes)


def resolve(axis: str) -> Axis:
    """Return what a name stands for here.

    Raises: ValueError if the name is not bound although other names are, or although this process belongs to a
        group of several ranks: a silent local step would train W different models.
    """
    if not isinstance(axis, str):
        raise ValueError(expected("axis", "a name", f"{axis!r}"))
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
    return bind_alone([axis]).axes[axis]


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
    several = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, tuple | list) else ()
    if not several or not all(isinstance(name, str) for name in several) or len(set(several)) != len(several):
        raise ValueError(expected("axis", "a name or a tuple of different names", f"{axis!r}"))
    return several


def axis_size(axis: AxisNames) -> int:
    """Return the number of ranks of an axis; of several axes, the product. Raises ValueError as `resolve` does.

    >>> import fn
    >>> fn.axis_size("data")                                # in a process that belongs to no group
    1
    """
    size = 1
    for name in names(axis):
        size *= resolve(name).size
    return size


def axis_index(axis: AxisNames) -> Tensor:
    """Return this rank's index on an axis, 0-d int64; on several axes, the last one counts fastest.

    >>> import torch, fn
    >>> fn.simulate(lambda x: 10 * fn.axis_index("data") + x, "data", 3)(torch.tensor([7, 8, 9]))
    tensor([ 7, 18, 29])

    Raises: ValueError as `resolve` does.
    """
    first, *rest = names(axis)
    index = resolve(first).rank
    for name in rest:
        # As digits of a number: the last axis counts fastest.
        index = index * resolve(name).size + resolve(name).rank
    return index


def is_simulated(axis: AxisNames) -> bool:
    """Tell whether the ranks of an axis, or of one of several, are simulated."""
    return any(resolve(name).transport == SIMULATED for name in names(axis))


def own_rank(axis: AxisNames) -> int:
    """Return the rank of this process on an axis that is not simulated, or its index on several, as a number.

    >>> own_rank("data")
    0
    """
    if not isinstance(axis, str):
        index = 0
        for name in names(axis):
            index = index * resolve(name).size + own_rank(name)
        return index
    _, rank, transport = resolve(axis)
    if torch.compiler.is_compiling() and transport in _ranks:  # of a tensor the compiler would not know the number
        return _ranks[transport]
    return int(rank)


def all_ranks() -> Tensor:
    """Return a 0-d tensor that is batched at the levels of all simulated axes in force, and at no other."""
    total = torch.tensor(0, dtype=torch.int64, device="cpu")
    for bound in _bound.axes.values():
        total = total + bound.rank  # the sum says nothing; a sum of batched tensors is batched at all of their levels
    return total


def rank_dims(state: Any) -> Any:
    """Return a tree like `state` with 0 at leaves that belong to one rank and None at replicated ones.

    >>> import torch, fn
    >>> fn.rank_dims(fn.compressed_average("data", fn.sign()).init({"w": torch.ones(8)}))
    ErrorFeedbackState(worker=(0,), server=(0,))

    These are the in_dims and out_dims of a state under `simulate`. A state class names those of its fields that
    belong to one rank in `rank_local`, as `ErrorFeedbackState` does. Params are no part of a state: they are
    None, the same on all ranks, for every named optimizer but `zero_one_adam`, whose ranks differ between
    synchronisations and whose params are 0 in every phase.

    Raises: TypeError or ValueError if a class names what is no field of it.
    """
    if isinstance(state, tuple) and hasattr(state, "_fields"):
        local = rank_local(state)
        fields = zip(state._fields, state, strict=True)
        return type(state)(*(tree.map(lambda _: 0, v) if k in local else rank_dims(v) for k, v in fields))
    return tree.rebuilt(state, rank_dims) if isinstance(state, tuple | list | dict) else None


_stepping: dict[str, tuple[threading.Thread, int]] = {}
"""Transport -> the thread that is inside of steps over it, and how many of them."""

_changing = threading.Lock()
"""Held while `_stepping` is looked at or changed."""


@contextmanager
def in_turn(wires: Mapping[str, str]) -> Iterator[None]:
    """Refuse to begin a step while another thread is inside of one over the same transport.

    A message carries no name. Where two threads send over one process group, a rank takes the message of one step for
    that of the other, and gloo returns wrong numbers without an error.

    Args: wires: axis -> transport.
    Raises: RuntimeError that names the threads and the axis. Nothing was sent then.
    """
    thread, transports = threading.current_thread(), {*wires.values()}
    with _changing:
        for axis, transport in wires.items():
            other, _ = _stepping.get(transport, (thread, 0))
            # A thread that is inside of a step may begin another one: its messages stay in their order.
            if other is not thread:
                wanted = f"one step at a time over the process group of axis {axis!r}, so that no messages are mixed up"
                got = f"one in thread {thread.name!r} while thread {other.name!r} is inside of another"
                cure = (
                    f"let the threads take turns, in the same order on all ranks, or give each a group of its own: "
                    f"fn.bind({{{axis!r}: torch.distributed.new_group()}})"
                )
                raise RuntimeError(expected("step", wanted, got, cure))
        for transport in transports:
            _stepping[transport] = thread, _stepping.get(transport, (thread, 0))[1] + 1
    try:
        yield
    finally:
        with _changing:
            for transport in transports:
                _, depth = _stepping.pop(transport)
                if depth > 1:
                    _stepping[transport] = thread, depth - 1
