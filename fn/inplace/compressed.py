"""The compressed mean for steps in place: errors stay as they are until the step is written.

What is returned beside a payload writes the next error over the old one. Where the kernels can form an error once more
(see `two_passes`) nothing is kept until then, else the next error is.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.collectives import messages
from fn.collectives.codecs.codec import Codec, PendingError
from fn.collectives.codecs.segments import Segments
from fn.collectives.compressed import for_own_row, for_rows, fused_with, through_servers
from fn.collectives.feedback import Feedback
from fn.collectives.profiling import observe_kept, observe_loss, observed, step_range
from fn.errors import expected
from fn.kernels.tracing import cached_plan

Tree = Any


Serve = Callable[[Tree], tuple[Tree, Callable[[], None]]]
"""A payload of W rows -> the payload of the mean, and what writes the server's next error over its error."""


def through_servers_later(
    server: Tree, axis: str, codec: Codec, feedback: Feedback, *, segments: Segments | None = None
) -> Serve:
    """Return what does as `through_servers` does, and leaves the server's error as it is.

    Where the codec and the error are made for that, the next error is not kept until it is written, but formed once
    more from what was received.
    """
    fused = fused_with(for_own_row(codec, segments, axis), feedback)
    later = None if fused is None or fused.later is None or not fused.later.accepts(server) else fused.later

    def serve(payload: Tree) -> tuple[Tree, Callable[[], None]]:
        if later is None or observed():
            gathered, after = through_servers(payload, server, axis, codec, feedback, segments=segments)
            return gathered, successor(server, after)
        received = messages.exchange(payload, axis)
        with step_range("serve"):
            mean = later.serve(received, server)
        return messages.gather(mean, axis), partial(later.keep, received, server, mean)

    return serve


EncodeAverages = Callable[[list[Tensor], list[Tensor], float], tuple[Tree, Callable[[], None], PendingError | None]]
"""(mu, grads, decay) -> the payload of the moving averages, which are not formed, and what writes the next error: a
function, or the kernel that takes the step, from what was sent."""


def encode_averages(
    codec: Codec, feedback: Feedback, segments: Segments, worker: Tree, server: Tree, *, servers: bool = True
) -> EncodeAverages | None:
    """Return how moving averages are encoded with a worker's error.

    None where the codec has no kernels for that and, unless there are no servers, for theirs, or not for errors like
    these.
    """
    half = for_rows(codec, segments)
    fused = fused_with(half, feedback)
    if fused is None or fused.averages is None:
        return None
    rows, length = segments.valid.shape[0], segments.row_length
    like = _like((rows, length))
    if not fused.accepts(like, worker):
        return None
    if servers and (fused.serve is None or not fused.accepts(like[:1], server)):
        return None
    in_one_pass, settle = fused.averages, fused.settle
    later = None if fused.later is None or not fused.later.accepts(worker) else fused.later

    def encode(
        mu: list[Tensor], grads: list[Tensor], decay: float
    ) -> tuple[Tree, Callable[[], None], PendingError | None]:
        looked_at = observed()
        with step_range("encode"):
            if later is not None and not looked_at:
                payload, sent = later.averages(mu, grads, decay, error=worker, rows=rows)
                return payload, nothing, sent
            payload, after = in_one_pass(mu, grads, decay, error=worker, rows=rows)
        if looked_at:  # the whole difference is the error, so what was encoded is the sum of the two
            kept, decoded = settle(after, rows), half.decode(payload).reshape(-1)
            observe_kept(kept)
            observe_loss(decoded.add_(kept), kept)
        return payload, successor(worker, after), None

    return encode


@cached_plan
def _like(shape: tuple[int, int]) -> Tensor:
    return torch.empty(shape, device="meta")


def successor(old: Tree, new: Tree) -> Callable[[], None]:
    """Return what lets a state be the next one, by giving its tensors the memory of the new ones.

    Raises: ValueError now, before anything is written, if structure, a shape or a dtype differs.
    """
    olds, structure = tree.flatten(old)
    news, found = tree.flatten(new)
    if structure != found:
        wanted = f"an update to keep the trees of init, with the leaves {tree.paths(old)}"
        raise ValueError(expected("state", wanted, f"{tree.paths(new)}"))
    for o, n in zip(olds, news, strict=True):
        if o.shape != n.shape or o.dtype != n.dtype:
            wanted = f"an update to keep the dtype and the shape of init, {o.dtype} {tuple(o.shape)}"
            raise ValueError(expected("state", wanted, f"{n.dtype} {tuple(n.shape)}"))

    def write() -> None:
        for o, n in zip(olds, news, strict=True):
            if o is not n:
                o.set_(n)

    return write


def nothing() -> None:
    """Write nothing."""
