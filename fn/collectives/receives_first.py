"""An all-to-all over gloo in which both directions of a link are busy at the same time.

In gloo's own a rank that is late finds its peer ready, starts to send, and only behind these bytes says on the same
connection that it is ready to receive: the link then carries one direction after the other. Here every rank posts its
receives before it sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch.distributed as dist
from torch import Tensor

LARGE = 1 << 16
"""Bytes of a row from which on it matters; below, one collective costs less than several messages."""

TAG = 0x666E
"""Of these messages, so that they meet no others of the same group."""


def wants_receives_first(row: Tensor, group: dist.ProcessGroup) -> bool:
    """Tell whether rows like this one on the CPU are better exchanged by `pass_rows`. All ranks answer alike."""
    if row.numel() * row.element_size() < LARGE:
        return False
    return bool(group._get_backend(row.device).name() == "gloo")


def exchange_rows(out: Tensor, x: Tensor, group: dist.ProcessGroup) -> None:
    """Write into row r of out (W, ...) the row of x that rank r holds for this rank."""
    me = group.rank()
    out[me].copy_(x[me])
    pass_rows(out, x, group)


def pass_rows(receive: Sequence[Tensor] | Tensor, send: Sequence[Tensor] | Tensor, group: dist.ProcessGroup) -> None:
    """Send row r of `send` to rank r and receive into row r of `receive` what it sends; this rank's own are left."""
    me, size = group.rank(), group.size()
    others = [(me + i) % size for i in range(1, size)]
    receives = [dist.irecv(receive[peer], group=group, group_src=peer, tag=TAG) for peer in reversed(others)]
    sends = [dist.isend(send[peer], group=group, group_dst=peer, tag=TAG) for peer in others]
    for work in chain(receives, sends):
        if work is not None:
            work.wait()
