"""Run a backward pass on a device that is not there: autograd has a thread for it. What is sent there is counted."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import fn
from fn.collectives import transports
from fn.collectives.axis import Axis, Binding
from fn.collectives.comm_thread import CommunicationThread
from fn.collectives.profiling import Observer

NAME = "elsewhere"
_setup_privateuseone_for_python_backend(NAME)
_library = torch.library.Library("aten", "IMPL", "PrivateUse1")
_library.impl("empty.memory_format", lambda size, **_: torch._C._acc.create_empty_tensor(tuple(size), torch.float32))

SIZE = 2 * (2 - 1) * 4 * 100 // 2
"""Bytes of an all-reduce of 100 numbers among two ranks."""


class Moved(torch.autograd.Function):
    """From the device to the host, where a loss can have a number; backward there and back calls a hook."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, hook: Any) -> Tensor:
        ctx.hook, ctx.device = hook, x.device
        return torch.empty(3, device=x.device) if hook else torch.ones(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.hook:
            ctx.hook()
        return torch.empty(3, device=ctx.device), None


def main() -> None:
    way = transports.Transport(all_to_all=torch.clone, all_gather=lambda x: torch.stack([x, x]), psum=lambda x: x + x)
    binding = Binding({"data": Axis(2, torch.tensor(0), transports.register("echo", way))})
    sender, jobs, threads = CommunicationThread(binding, torch.device("cpu")), [], set()

    def send() -> None:
        fn.pmean(torch.ones(100), "data")
        threads.add(threading.get_ident())

    def hook() -> None:
        with binding:
            send()
        jobs.append(sender.submit(send))

    def backward() -> None:
        x = torch.empty(3, device=torch.device(NAME, 0)).requires_grad_()
        Moved.apply(Moved.apply(x, hook), None).backward()
        jobs[-1].result()

    backward()  # nobody counts
    seen = Observer().start()
    with fn.ledger() as outer:
        with fn.ledger() as inner:
            backward()
        backward()
    seen.stop()
    backward()
    assert len(threads) == 2, "the backward pass ran in this thread"
    assert threading.get_ident() not in threads, "the backward pass ran in this thread"
    print(inner.total // SIZE, outer.total // SIZE, sorted(seen.seconds))
    sys.stdout.flush()
    os._exit(0)  # autograd's thread cannot be ended


if __name__ == "__main__":
    main()
