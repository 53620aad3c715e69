"""Count what steady steps of `fn.Optimizer` ask of a device, and what they launch there, without one.

Every read by the host waits for what was queued on the device; so does a copy to it from memory that is not pinned.
Tensors are torch's fake ones, as in `other_device`; what is read of them is made up.
"""

from __future__ import annotations

import collections
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

sys.path.insert(0, str(Path(__file__).parent))

from other_device import NAME, echo

import fn
from fn.adapters.optim import optimizer as torch_optim
from fn.adapters.optim import training
from fn.inplace import zero_one_adam
from fn.kernels import ops, tracing
from fn.kernels.eager import foreach
from fn.kernels.gpu import launching, triton
from fn.transforms import agreed, average

_setup_privateuseone_for_python_backend(NAME)
DEVICE = torch.device(NAME, 0)
GROUPS, TENSORS = 3, 60

CASES: list[tuple[str, Any, fn.Phase, dict[str, Any], int]] = [  # and the most launches: not one more a tensor
    ("adamw", fn.adamw, fn.Phase.WARMUP, {}, 100),
    ("1-bit Adam", fn.onebit_adam, fn.Phase.WARMUP, {}, 100),
    ("1-bit Adam", fn.onebit_adam, fn.Phase.COMPRESSED, {}, 200),
    ("1-bit Adam", fn.onebit_adam, fn.Phase.COMPRESSED, {"bias_correction": True}, 200),
    ("1-bit LAMB", fn.onebit_lamb, fn.Phase.WARMUP, {}, 250),
    ("1-bit LAMB", fn.onebit_lamb, fn.Phase.COMPRESSED, {}, 440),
    ("0/1 Adam", fn.zero_one_adam, fn.Phase.WARMUP, {}, 100),
    ("0/1 Adam", fn.zero_one_adam, fn.Phase.COMPRESSED, {}, 250),
    ("0/1 Adam", fn.zero_one_adam, fn.Phase.LOCAL, {}, 100),
]

launched = [0]


def place() -> str:
    """Return the line of this library that is running."""
    frames = [f for f in traceback.extract_stack() if "/fn/" in f.filename]
    return f"fn/{frames[-1].filename.split('/fn/')[-1]}:{frames[-1].lineno}" if frames else "?"


class Watch(TorchDispatchMode):
    """Count reads and copies by where they come from."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = func._schema.name, kwargs or {}
        if name.startswith("fn::") and name[4:] in ops.REFERENCES:
            with self:
                return ops.direct(name[4:], *args)
        tensors = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        there = any(x.device == DEVICE for x in tensors)
        if name == "aten::_local_scalar_dense":
            return self.read(func, args[0])
        if name in ("aten::_to_copy", "aten::copy_"):
            to = args[0].device if name == "aten::copy_" else torch.device(kwargs.get("device") or args[0].device)
            if to.type != args[-1].device.type:
                self.waits[place()] += 1
        launched[0] += there and name.startswith("aten::") and not func.is_view and "empty" not in name
        return func(*args, **kwargs)

    def read(self, func: Any, x: Any) -> Any:
        if x.device == DEVICE:
            self.waits[place()] += 1
        elif not isinstance(x, FakeTensor) or x.constant is not None:
            with _disable_current_modes():
                return func(x.constant if isinstance(x, FakeTensor) else x)
        return True if x.dtype == torch.bool else 0.5 if x.is_floating_point() else 1


def pretend() -> None:
    """Let fake tensors pass for real ones, with the rows of Triton and torch; a kernel of Triton's is one launch."""
    table = sys.modules["fn.kernels.table"]

    def launch(kernel: Any, x: Any, programs: int, *args: Any, **constants: Any) -> None:
        launched[0] += 1

    vars(launching)["launch"] = launch
    rows = [triton.row(NAME), foreach.row(NAME)]
    for op in ops.REFERENCES:
        table._accepted[op, NAME] = tuple(table.Cell(row.name, row.kernels[op]) for row in rows if op in row.kernels)
    tracing._PLAIN.add(FakeTensor)
    vars(tracing)["runs_as_written"] = lambda: True  # plans are kept, as without this watch
    for module, check in ((training, "check_start"), (torch_optim, "check_listed"), (torch_optim, "check_accepted"),
                          (agreed, "check_agreement"), (average, "check_agreement")):  # fmt: skip
        vars(module)[check] = lambda *args, **kwargs: None
    vars(zero_one_adam)["check_synchronised"] = lambda elapsed: None  # a number that is not there reads as 0.5
    made = torch.tensor

    def tensor(data: Any, *, dtype: Any = None, device: Any = None) -> torch.Tensor:
        found = made(data, dtype=dtype)
        if device is None or torch.device(device).type != NAME:
            return found
        for watch in watches:
            watch.waits[place()] += 1
        return torch.empty(found.shape, dtype=found.dtype, device=device)

    torch.tensor = tensor


watches: list[Watch] = []


def steady(make: Any, phase: fn.Phase, hyper: dict[str, Any]) -> dict[str, int]:
    """Return what the third step waits for, by place."""
    shapes = [(64 + i % 7, 48) if i % 2 else (48 + i % 5,) for i in range(TENSORS)]
    params = [torch.nn.Parameter(torch.empty(shape, device=DEVICE)) for shape in shapes]
    groups = [{"params": params[g::GROUPS]} for g in range(GROUPS)]
    with Watch():
        opt = fn.Optimizer(groups, partial(make, axis="data", **hyper), schedule=lambda step: phase, lr=1e-3,
                           refuse_averaged=False)  # fmt: skip
    opt.steps = 100
    for p in params:
        p.grad = torch.empty_like(p)
    for _ in range(3):
        launched[0] = 0
        with Watch() as watch:
            watches[:] = [watch]
            opt.step()
    return dict(watch.waits)


def main() -> None:
    pretend()
    wrong = 0
    with echo(), FakeTensorMode(allow_non_fake_inputs=True):
        for name, make, phase, hyper, most in CASES:
            waits = steady(make, phase, hyper)
            allowed = GROUPS if phase is fn.Phase.LOCAL else 1  # alone, each group looks whether its own are finite
            wrong += sum(waits.values()) > allowed or launched[0] > most
            print(f"{name}, {phase.value}, {hyper}: {launched[0]} of {most} launches; waits, of {allowed}: {waits}")
    print(f"{wrong} of {len(CASES)} wait or launch too often")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
