"""The known answer of a run: what its steps make of made-up numbers, on this machine and at its own shapes.

The bits behind a matrix product depend on the machine, on torch and on its settings. Followers step on made-up numbers
first, and so does rank 0: a follower whose answer is another one would leave the run sooner or later.
"""

from __future__ import annotations

import platform
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fn.adapters.follow.log_format import JSON, digest_of
from fn.adapters.follow.run import digests_of, groups_from, params_of
from fn.adapters.optim.optimizer import Optimizer
from fn.base import Phase, Transform, has_phase
from fn.collectives.following import echoing
from fn.errors import expected
from fn.kernels.table import rows

CYCLE = 65521
"""After how many elements numbers come again: a prime, so that no matrix has two rows alike."""

RATE = 0.1


def machine_of(device: torch.device) -> dict[str, JSON]:
    """Return what bits may depend on, by name."""
    backend: Any = getattr(torch, device.type, None)
    name = platform.machine() if device.type == "cpu" else backend.get_device_name(device)
    return {
        "torch": torch.__version__,
        "device": f"{device.type} {name}",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        # The older ways to ask for these raise an error where a script has set them in the newer way.
        "matmul precision on CUDA": torch.backends.cuda.matmul.fp32_precision,
        "matmul precision on the CPU": torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        "kernels": [row.name for row in rows(device.type)],
    }


def known_answer(header: Mapping[str, Any], make: Callable[..., Transform], device: torch.device) -> str:
    """Return a digest of what a step makes of made-up params and gradients; with a warm-up before, where it needs one.

    It takes the memory and the time of such a step of an optimizer, which is gone behind it.

    Args: header: of the log: "shapes" and "dtypes" of the params, "groups", "axes", "max_norm".
    """
    forms = [(shape, getattr(torch, dtype)) for shape, dtype in zip(header["shapes"], header["dtypes"], strict=True)]
    made = [_numbers(i, shape, dtype, device) for i, (shape, dtype) in enumerate(forms)]
    params = [torch.nn.Parameter(x) for x in made]
    members, groups = iter(params), list[dict[str, Any]]()
    for group in groups_from(header["groups"]):
        listed = group.pop("params")
        of_group = [(str(name), next(members)) for name in (range(listed) if isinstance(listed, int) else listed)]
        # A list says which of the params rest. A rate may begin with 0, and then nothing would move.
        settings = {name: x for name, x in group.items() if not isinstance(x, list)}
        groups.append({**settings, "lr": RATE, "params": of_group})
    # The ranks are this one several times: two are enough.
    axes, compressed = {name: min(size, 2) for name, size in header["axes"].items()}, False
    with echoing(axes), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run says it
        optimizer = Optimizer(
            groups,
            make,
            schedule=lambda step: Phase.COMPRESSED if compressed else Phase.WARMUP,
            max_norm=header["max_norm"],
            refuse_averaged=False,
        )
    transforms = [unit.transform for unit in optimizer.units]
    compressed = all(has_phase(transform, Phase.COMPRESSED) for transform in transforms)
    for i, p in enumerate(params):
        p.grad = _numbers(len(params) + i, p.shape, p.dtype, device)
    for _ in range(1 + any(Phase.COMPRESSED in transform.needs_warmup for transform in transforms)):
        optimizer.step()
    return digest_of(digests_of([*params_of(optimizer).values()]))


def check_known_answer(
    header: Mapping[str, Any], make: Callable[..., Transform], device: torch.device, where: str
) -> None:
    """Refuse a machine on which steps come to other bits. where: the path of head.json. Raises: ValueError."""
    if known_answer(header, make, device) == header["known_answer"]:
        return
    theirs, own = header["machine"], machine_of(device)
    apart = [f"{name} {x!r} in place of {theirs.get(name)!r}" for name, x in own.items() if theirs.get(name) != x]
    got = f"another one from {apart[0] if apart else 'a machine that is alike in ' + ', '.join(own)}"
    cure = "follow on a machine like the trainers', or let them publish(..., what='params')"
    raise ValueError(expected("source", f"a machine whose steps give the known answer in {where}", got, cure))


def _numbers(seed: int, shape: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers of both signs below a half that depend on the seed alone."""
    k = torch.arange(CYCLE, dtype=torch.int64, device="cpu") + 977 * seed
    cycle = (((k % CYCLE) ** 2 * 40503 + k) % CYCLE).to(torch.float64) / CYCLE - 0.5
    count = torch.Size(shape).numel()
    return cycle.to(dtype).to(device).repeat(-(-count // CYCLE))[:count].reshape(shape)
