"""Say which phases of a transform are taken in place, and what is in the way in the others."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fn.base import Guarded, Phase, Transform, has_phase
from fn.inplace.match import in_place
from fn.inplace.protocol import KINDS
from fn.transforms.skip_nonfinite import skip_nonfinite

CURE = (
    "such a step is correct, and reads and writes every tensor once per link; it is as fast as a named optimizer where "
    "links in front of the moments, then moments, weight decays and learning rates follow each other"
)


def explain(transform: Transform) -> str:
    """Return a line per phase: whether `fn.Optimizer` takes its step in place, and if not, which link is in the way.

    Args: transform: a chain, or what a named optimizer returns. The kernels of the device, dtypes and layouts of the
        tensors are looked at when the step is taken.
    """
    guarded = any(isinstance(update, Guarded) for update in transform[1:])
    transform = transform if guarded else skip_nonfinite(transform)  # as `fn.Optimizer` does
    lines = []
    for phase in (phase for phase in Phase if has_phase(transform, phase)):
        if transform.rounds is not None and phase is Phase.COMPRESSED:
            lines.append(f"{phase.value:10}  as the local step; then the exchange, which is rare, tensor by tensor")
            continue
        found = in_place(transform.composed(phase))
        lines.append(f"{phase.value:10}  {f'link by link: {found}' if isinstance(found, str) else 'in place'}")
    if any("link by link" in line for line in lines):
        lines.append(CURE)
    return "\n".join(lines)


def slow_tensors(params: Sequence[Tensor], grads: Sequence[Tensor]) -> str:
    """Return what about the tensors of a param group keeps its steps from kernels, and what would help; "" if nothing.

    Args: params, grads: as many.
    """
    devices, kinds = {str(p.device) for p in params}, {p.dtype for p in params}
    if len(devices) > 1:
        return f"params are on the devices {sorted(devices)}; give each device a param group of its own"
    if len(kinds) > 1 or not kinds <= {*KINDS}:
        wanted = f"expected params in one of {', '.join(map(str, KINDS))}"
        return f"{wanted}, but got {', '.join(sorted(map(str, kinds)))}; give each dtype a param group of its own"
    for name, tensors in (("param", params), ("gradient of param", grads)):
        for i, x in enumerate(tensors):
            if not x.is_contiguous():
                got = f"{name} {i} has the shape {tuple(x.shape)} and the strides {x.stride()}"
                return f"{got}; make it contiguous, which channels_last is not"
    return ""
