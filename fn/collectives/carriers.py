"""What carries tensors between the ranks of an axis. It is chosen here, and nowhere else.

    registered     a transport that somebody registered, such as MPI: rows of one length
    connections    connections of our own, TCP: numbers in the host's memory, each tensor from where it lies
    parts          the device's library, in one call of many sends and receives: each tensor from where it lies
    otherwise      a collective of torch.distributed; of what is traced a functional one, which a compiler sees

Simulated ranks are above all that: `vmap` exchanges them before anything is carried.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]

from fn.collectives import axis as axes
from fn.collectives.transports.registry import registered
from fn.collectives.transports.tcp import Connections, connections
from fn.kernels.tracing import is_concrete


class Carrier(NamedTuple):
    """What carries some tensors.

    transport: the name of a registered transport, or of a process group. is_registered: which of the two.
    may_connect: whether connections of our own can carry them, if this group has some. sends_parts: whether the
    device's library sends each tensor from where it lies.
    """

    transport: str
    is_registered: bool = False
    may_connect: bool = False
    sends_parts: bool = False

    @property
    def connections(self) -> Connections | None:
        """Return our own connections, None where there are none for these tensors.

        The first call opens them, so all ranks of the group have to ask.
        """
        return connections(self.group) if self.may_connect else None

    @property
    def group(self) -> dist.ProcessGroup:
        """Return the process group. Raises: RuntimeError if it was destroyed."""
        return group_of(self.transport)


def carrier_of(transport: str, tensors: Sequence[Tensor]) -> Carrier:
    """Return what carries tensors over a transport that is not simulated; all ranks choose alike.

    Args: tensors: like those that all ranks send, in devices and in whether there are elements. A rank that chose by
        its own tensors could wait for a message of another kind than the others send.
    """
    if transport in registered:
        return Carrier(transport, is_registered=True)
    if not is_concrete(*tensors):  # there are no numbers to send now; a compiler needs an op that it knows
        return Carrier(transport)
    if any(x.device.type != "cpu" for x in tensors):
        return Carrier(transport, sends_parts=True)
    return Carrier(transport, may_connect=any(x.numel() for x in tensors))


def group_of(transport: str) -> dist.ProcessGroup:
    """Return the process group of a name. Raises: RuntimeError if it was destroyed."""
    try:
        group: dist.ProcessGroup = _resolve_process_group(transport)  # type: ignore[arg-type]
    except (RuntimeError, ValueError) as error:
        axis = axes.carried_by(transport)
        raise RuntimeError(
            f"the process group {transport!r} of axis {axis!r} is gone, ended by dist.destroy_process_group() perhaps; "
            f"bind the axis to a new one, and make what was bound to it anew: load_state_dict goes on from its state"
        ) from error
    return group
