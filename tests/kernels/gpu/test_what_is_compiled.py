"""What known answers have compiled is what steps in codes run: no rank waits for a compiler in the middle of a run."""

from __future__ import annotations

import os
from functools import partial
from importlib import import_module

import pytest
import torch

import fn
from fn.collectives import transports
from fn.collectives.axis import Axis, Binding

triton = pytest.importorskip("triton", reason="triton is not installed")
known_answers, lists = (import_module(f"fn.kernels.{name}") for name in ("known_answers", "lists"))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="kernels are interpreted, not compiled")
@pytest.mark.filterwarnings("ignore")  # of steps from numbers that nobody has calculated
def test_steps_launch_nothing_that_known_answers_have_not_compiled(monkeypatch, request):
    """Kernels do not run here. What Triton would compile for is asked of Triton itself."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    from fn.kernels.gpu.triton import row

    backend, launched = make_backend(GPUTarget("cuda", 90, 32)), set()

    def launch(kernel, _):
        bind = create_function_from_signature(kernel.signature, kernel.params, backend)
        return lambda *args, **named: launched.add((kernel.__name__, str(bind(*args, **named)[1:])))

    monkeypatch.setattr(triton.JITFunction, "__getitem__", launch)
    empty = torch.empty  # what is not calculated is finite, so that steps are taken
    monkeypatch.setattr(torch, "empty", lambda *args, **named: empty(*args, **named).zero_())
    monkeypatch.setattr(lists, "has_kernels", lambda *_: True)
    monkeypatch.setattr(known_answers, "complaint", lambda *_: None)  # which are not calculated, either
    ours = row("cpu")
    fn.kernels.register(ours)
    request.addfinalizer(lambda: fn.kernels.unregister(ours))
    for op, kernel in ours.kernels.items():
        for args in known_answers.examples(op):
            known_answers.outcome(op, kernel, args, torch.device("cpu"))
    compiled = launched.copy()
    echo = transports.register("says the same", transports.Transport(
        all_to_all=lambda x: x, all_gather=lambda x: x.expand(2, *x.shape), psum=lambda x: x.mul_(2)
    ))  # fmt: skip
    of_lamb = "onebit_lamb_moments"
    for make, kernel in ((fn.onebit_adam, "onebit"), (fn.zero_one_adam, "drift"), (fn.onebit_lamb, of_lamb)):
        launched.clear()
        params = [torch.nn.Parameter(torch.ones(n)) for n in (64, 4104, 640, 4, 28)]
        with Binding({"data": Axis(2, torch.tensor(0), echo)}):
            opt = fn.Optimizer(params, partial(make, axis="data"), refuse_averaged=False,
                               schedule=fn.freeze_after(1), lr=1e-4)  # fmt: skip
        for _ in range(2):
            for p in params:
                p.grad = torch.ones_like(p)
            opt.step()
        assert f"{kernel}_kernel" in dict(launched)
        assert launched <= compiled
