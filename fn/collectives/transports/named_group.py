"""A process group under a name that its ranks have agreed on.

torch names a group that only its own ranks make by these ranks, and by how many groups this process has. Where one rank
has a group that another lacks, each waits in the store for the name that it made itself, until the group's timeout.
`torch.distributed.new_group` takes no name. So this answers in the place of torch's private function that makes one,
for the length of one call of that public function.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from fn.kernels.flags import temporarily

_ANSWERS = "_process_group_name"
"""torch's function that names a group: private, the same from 2.11 on."""

_turn = threading.Lock()
"""Held until torch has asked for a name."""


def new_named_group(name: str, ranks: Sequence[int], **options: Any) -> dist.ProcessGroup:
    """Make a process group of some ranks, which all of them call, and nobody else.

    Under a torch that does not ask for a name any more it has the name that torch gives it, and a warning says so.

    Args: name: the same on these ranks, and of no other group. options: of `torch.distributed.new_group`.
    """
    own, torchs = threading.get_ident(), getattr(distributed_c10d, _ANSWERS, None)
    with ExitStack() as until_asked:

        def answer(*asked: Any, **more: Any) -> Any:
            if threading.get_ident() != own:  # another thread makes a group of the user's
                return torchs(*asked, **more)  # type: ignore[misc]
            # Before the ranks meet: one that keeps its turn until then may wait for one that waits for its turn.
            until_asked.close()
            return name

        if torchs is not None:
            until_asked.enter_context(_turn)
            until_asked.enter_context(temporarily(distributed_c10d, _ANSWERS, answer))
        group: dist.ProcessGroup = dist.new_group([*ranks], use_local_synchronization=True, **options)
    if str(group.group_name) != name:
        text = "this torch names a group by how many a process has, and ranks with other numbers wait for each other"
        warnings.warn(f"{text}; make the same groups on all ranks", stacklevel=2)
    return group
