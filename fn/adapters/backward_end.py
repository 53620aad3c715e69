"""Raise at the end of a backward pass under DDP what failed behind it, as the type that it is.

Of an exception in a bucket's future DDP makes a RuntimeError. A callback of autograd may raise any type.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch.autograd import Variable

from fn.errors import PeerLost


def raise_at_end(finished: Future[None], buckets: Sequence[torch.futures.Future[torch.Tensor]]) -> None:
    """Raise what a future holds at the end of the running backward pass. For a communication hook, at the last bucket.

    DDP has to end its pass first, or it takes no other one. It queues its end after the last bucket: behind what is
    queued here, before what that queues in turn. Not so after the loss of a rank: DDP's own messages, those about
    unused parameters, fail as well, in its end, which would hide what was lost; and there is no other pass. Nor where
    a bucket was left open, for which DDP would wait for ever.

    Args: finished: done when the buckets are, or when something failed. buckets: what DDP was given.
    """
    is_in_pass = torch._C._current_graph_task_id() != -1
    queue = Variable._execution_engine.queue_callback

    def before_ddp_ends() -> None:
        lost = isinstance(finished.exception(), PeerLost)  # waits
        if not is_in_pass or lost or not all(bucket.done() for bucket in buckets):
            finished.result()
        else:
            queue(finished.result)

    # No node runs while a static graph sends the buckets of its first pass, or a rank that has joined sends zeros.
    if torch._C._current_autograd_node() is None:
        before_ddp_ends()
    else:
        queue(before_ddp_ends)
