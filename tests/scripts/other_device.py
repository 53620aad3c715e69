"""Take optimizers' steps with tensors of a device that is not there, and say where one of the CPU is mixed in.

Optimizers are those of the registry, or of them those whose names are given.

torch's fake tensors have a device and a shape, but no numbers, and refuse to be combined across devices. What a step
decides by a number is given here: all is finite.
"""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

sys.path.insert(0, str(Path(__file__).parents[1]))

import registry

import fn
from fn import tree
from fn.collectives import axis, messages, primitives, transports
from fn.collectives.axis import Axis, Binding
from fn.collectives.codecs.codec import Segments
from fn.inplace import outer as in_place_outer
from fn.inplace import sharded, zero_one_adam
from fn.inplace.match import in_place
from fn.inplace.protocol import InPlace
from fn.kernels import flags, foreach, known_answers, tracing
from fn.kernels.table import agreed_row
from fn.transforms import outer, skip_nonfinite
from fn.transforms import sharded as pure_sharded

NAME = "elsewhere"
SHAPES = [(37, 5), (), (0,), (4097,)]
HYPERS: dict[str, list[dict[str, Any]]] = {
    "onebit_adam": [
        {},
        {"feedback": fn.classic(lazy=True), "weight_decay": 0.1},
        {"codec": fn.int8(), "feedback": fn.damped()},
    ],
    "loco_adamw": [{}, {"gather": fn.int8()}],
}


def echo(*names: str, size: int = 2) -> Binding:
    """Bind axes, "data" if none is named, to so many ranks each, of which the others say what this one says."""

    def carried(name: str) -> str:
        return transports.register(f"echo {name}", transports.Transport(
            all_to_all=lambda x: x.clone(), all_gather=lambda x: torch.stack([x] * size), psum=lambda x: x.mul_(size)
        ))  # fmt: skip

    return Binding({name: Axis(size, torch.tensor(0), carried(name)) for name in names or ("data",)})


def pretend(device: torch.device) -> None:
    """Let fake tensors pass for real ones where no number is asked for, and answer where one is."""
    vars(known_answers)["complaint"] = lambda op, kernel, device: None  # there are no numbers to compare
    fn.kernels.register(foreach.row(NAME))
    tracing._PLAIN.add(FakeTensor)
    Segments.row = lambda self, index: Segments(self.widths, self.valid[:1])
    for module in (pure_sharded, sharded, messages, primitives):
        vars(module)["int"] = lambda index: 0  # of a rank, which is a real tensor
    vars(sharded)["has_kernel"] = lambda *args: True  # the reference stands in for that of a shard
    Segments.mask = lambda self, device: torch.empty(
        (len(self.valid), self.row_length), dtype=torch.bool, device=device
    )
    FakeTensor.__bool__, FakeTensor.__int__, FakeTensor.__float__ = lambda x: True, lambda x: 0, lambda x: 1e-3
    FakeTensor.item = lambda x: True if x.dtype == torch.bool else 1e-3 if x.is_floating_point() else 0
    vars(fake_tensor)["CONSTANT_NUMEL_LIMIT"] = 0  # a tensor of one number would be copied there for good
    # Counts of a state are numbers, too.
    vars(zero_one_adam)["check_synchronised"] = vars(in_place_outer)["check_alike"] = lambda count: None
    made = torch.tensor

    def tensor(data: Any, *, dtype: Any = None, device: Any = None) -> torch.Tensor:
        found = made(data, dtype=dtype)
        there = device is not None and torch.device(device).type == NAME
        return torch.empty(found.shape, dtype=found.dtype, device=device) if there else found

    torch.tensor = tensor


def step(update: Any, staged: bool, grads: list[Any], state: Any, params: list[Any]) -> None:
    if staged and (found := in_place(update).stage(grads, state, params)) is not None:
        assert found.ok if isinstance(found.ok, bool) else found.ok.device == params[0].device
        found.commit()
        return
    updates, after = update(grads, state, params)
    fn.apply_updates(params, updates)
    for old, new in zip(tree.leaves(state), tree.leaves(after), strict=True):
        assert new.device == old.device, (old.device, new.device)


def rounds(device: torch.device) -> tuple[int, int]:
    """Take rounds, also in the agreed row and with an anchor in the memory of the host.

    Returns: how many steps took place, and how many did not.
    """
    for module in (flags, outer, skip_nonfinite):  # no number is asked for: this is the longer way
        vars(module)["is_concrete"] = lambda *tensors: False
    whens = (fn.Phase.WARMUP, fn.Round(), fn.Round(0, 0))
    cases = [(store, when, agreed) for store in (None, "cpu") for when in whens for agreed in (False, True)]

    def moved(state: Any, store: str | None) -> Any:
        def at(place: Any) -> Any:
            return lambda t: tree.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device=place), t)

        def own(s: Any) -> Any:
            host = at("cpu" if store == "cpu" else device)
            rest = at(device)(s)
            return rest._replace(anchor=host(s.anchor), pending=host(s.pending), outer=host(s.outer))

        guard = at(device)(state)
        return tree.replace(guard, fn.OuterState, own)

    steps = 0
    for store, when, agreed in cases:
        with echo(), agreed_row(agreed):
            inner = fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(1e-3))
            outer_tx = fn.chain(fn.trace(0.9, nesterov=True), fn.scale_by_learning_rate(0.7))
            link = fn.outer(inner, outer_tx, fn.compressed_average("data", fn.int8()), alpha=0.5, store=store)
            tx = fn.skip_nonfinite(fn.chain(fn.average("data"), link))
            state = tx.init([torch.zeros(shape) for shape in SHAPES])
            with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                params = [torch.empty(shape, device=device) for shape in SHAPES]
                try:
                    step(tx.update(when), False, [torch.empty_like(p) for p in params], moved(state, store), params)
                    steps += 1
                except Exception:
                    print("diloco", store, when, agreed)
                    traceback.print_exc(limit=-8, file=sys.stdout)
    return steps, len(cases) - steps


def main() -> None:
    _setup_privateuseone_for_python_backend(NAME)
    device = torch.device(NAME, 0)
    pretend(device)
    vars(axis)["own_rank"] = lambda name: 0  # among fake tensors no number can be read
    steps, wrong = 0, 0
    for optimizer in [o for o in registry.EVERY if o.name in sys.argv[1:]] or registry.EVERY:
        for hyper in HYPERS.get(optimizer.name, [{}]):
            with echo():
                tx = optimizer.make(lr=1e-3, axis="data", **hyper)
                state = tx.init([torch.zeros(shape) for shape in SHAPES])
                for phase in optimizer.phases:
                    update = tx.update(phase)
                    for staged in (False, True) if isinstance(in_place(update), InPlace) else (False,):
                        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
                            params = [torch.empty(shape, device=device) for shape in SHAPES]
                            there = tree.map(lambda x: torch.empty(x.shape, dtype=x.dtype, device=device), state)
                            try:
                                step(update, staged, [torch.empty_like(p) for p in params], there, params)
                                steps += 1
                            except Exception:
                                wrong += 1
                                print(optimizer.name, hyper, phase, "in place" if staged else "pure")
                                traceback.print_exc(limit=-8, file=sys.stdout)
    taken, failed = rounds(device)
    steps, wrong = steps + taken, wrong + failed
    print(f"{steps} steps took place elsewhere, {wrong} did not")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
