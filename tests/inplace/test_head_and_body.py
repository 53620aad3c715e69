"""Steps whose body is written chunk by chunk: they change no number, and nothing that a user's link may keep."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import chains
import pytest
import torch
from torch import Tensor

import fn
from fn import Phase, Round, tree
from fn.inplace import head_and_body
from fn.transforms.mask_and_partition import Label

SHAPES = [(12, 8), (8, 12), (12, 8), (5,), (6, 3, 3, 3), (0, 4), ()]


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def low_rank() -> fn.Transform:
    return fn.low_rank_average("data", 0.5, feedback=fn.decayed(1, 0.1), orthonormal=True)


TAIL = (fn.scale_by_shape(), fn.add_decayed_weights(0.1), fn.scale_by_learning_rate(torch.tensor(0.1)))


def kept() -> fn.Transform:
    """Return a link that keeps in its state what it hands on."""
    zeros = lambda params: tree.map(torch.zeros_like, params)  # noqa: E731
    return fn.lift(zeros, lambda updates, state, params: (updates, updates))


def kept_by_labels() -> fn.Transform:
    kinds = {"a": fn.chain(kept(), *TAIL), "b": fn.chain(*TAIL)}
    return fn.partition(kinds, lambda params: tree.map(lambda p: "a" if p.ndim == 2 else "b", params))


def muon(**hyper: Any) -> fn.Transform:
    labels = lambda params: ["hidden" if p.ndim == 2 else "other" for p in params]  # noqa: E731
    return chains.muon(0.1, owned=False, labels=labels, **hyper)


def muon_of_parts() -> fn.Transform:
    labels = {0: Label("hidden", splits=(4, 8)), 1: Label("hidden", heads=2), 2: "hidden"}
    return chains.muon(0.1, owned=False, labels=lambda params: [labels.get(i, "other") for i in range(len(params))])


def outer(inner: fn.Transform) -> fn.Transform:
    return fn.outer(inner, fn.scale_by_learning_rate(0.7), fn.compressed_average("data", fn.identity()))


def guarded(*links: fn.Transform) -> fn.Transform:
    return fn.skip_nonfinite(fn.chain(*links))


CODED, WARMUP, LOCAL = Phase.COMPRESSED, Phase.WARMUP, Round()
MAKES: dict[str, tuple[Any, Any]] = {
    "dion": (lambda: fn.dion(0.1, axis="data"), CODED),
    "chains in a chain": (lambda: guarded(fn.chain(low_rank(), TAIL[0]), fn.chain(*TAIL)), CODED),
    "without low rank": (lambda: guarded(*TAIL), CODED),
    "a link that keeps them": (lambda: guarded(low_rank(), kept(), *TAIL), CODED),
    "labels that keep them": (lambda: guarded(low_rank(), kept_by_labels()), CODED),
    "a mask": (
        lambda: guarded(low_rank(), fn.mask(TAIL[1], lambda params: [p.ndim > 1 for p in params]), TAIL[2]), CODED
    ),
    "muon": (muon, WARMUP),
    "muon of blocks and heads": (muon_of_parts, WARMUP),
    "muon without nesterov": (lambda: muon(nesterov=False), WARMUP),
    "momentum": (lambda: guarded(fn.trace(0.9), fn.trace(0.5, True), TAIL[2]), WARMUP),
    "muloco": (lambda: fn.muloco(0.1, axis="data"), LOCAL),
    "local steps": (lambda: guarded(outer(fn.chain(fn.trace(0.9), fn.scale_by_learning_rate(1e5)))), LOCAL),
}  # fmt: skip
"""What makes them, and the phase."""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk", [head_and_body.CHUNK, 100, 1])
@pytest.mark.parametrize(("make", "phase"), MAKES.values(), ids=MAKES)
def test_the_optimizer_takes_the_pure_steps_and_leaves_gradients_alone(
    make: Any, phase: Any, chunk: int, dtype: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also behind steps that are skipped, or left out by this rank alone: of NaN, and of updates that are too large."""
    monkeypatch.setattr(head_and_body, "CHUNK", chunk)
    params = [torch.nn.Parameter(x) for x in tensors(0, dtype)]
    opt = fn.Optimizer(params, lambda lr: make(), schedule=lambda step: phase)
    tx, pure = make(), tensors(0, dtype)
    state = tx.init(pure)
    for t in range(5):
        grads = tensors(100 * (t + 1), dtype)
        if t == 2:
            grads[0][0, 0] = torch.nan
        if t == 3:
            grads = [1e30 * g for g in grads]
        for p, g in zip(params, grads, strict=True):
            p.grad = g.clone()
        opt.step()
        assert all(torch.equal(p.grad.nan_to_num(7), g.nan_to_num(7)) for p, g in zip(params, grads, strict=True))
        moves, state = tx.update(phase)(grads, state, pure)
        pure = fn.apply_updates(pure, moves)
        for got, want in ((params, pure), (tree.leaves(opt.states), tree.leaves(state))):
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a.detach(), b, rtol=1e-6, atol=1e-6)


class Broken(Exception):
    """What a rule raises."""


@fn.base.declare_rule(tensorwise=True)
class BreaksAt(NamedTuple):
    """Return updates as they are; raise once, where the countdown ends."""

    countdown: list[int]

    def __call__(self, updates: Any, state: Any, params: Any, /) -> tuple[Any, Any]:
        self.countdown[0] -= 1
        if self.countdown[0] == 0:
            raise Broken
        return updates, state


@pytest.mark.parametrize("chunk", range(1, 5))
def test_a_chunk_that_raises_tears_the_training_but_for_the_first_behind_which_nothing_is_written(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_and_body, "CHUNK", 1)
    countdown = [0]

    def make(lr: Any) -> fn.Transform:
        return fn.chain(fn.trace(0.9), fn.lift(lambda params: (), BreaksAt(countdown)), fn.scale_by_learning_rate(lr))

    params = [torch.nn.Parameter(torch.ones(n)) for n in (2, 5, 3, 4)]
    opt = fn.Optimizer(params, make, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    saved, kept = copy.deepcopy(opt.state_dict()), [p.detach().clone() for p in params]
    countdown[0] = chunk
    with pytest.raises(Broken):
        opt.step()
    moved = sum(not torch.equal(p, old) for p, old in zip(params, kept, strict=True))
    assert moved == chunk - 1
    with pytest.raises(RuntimeError, match=r"step: refused, for an exception came .*load both from a checkpoint"):
        opt.step()
    with torch.no_grad():
        for p, old in zip(params, kept, strict=True):
            p.copy_(old)
    opt.load_state_dict(saved)
    opt.step()
    assert all(torch.allclose(p, torch.tensor(1 - 0.1 - 0.19)) for p in params)
