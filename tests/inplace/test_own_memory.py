"""Links that write into memory of the step's own change no number, and nothing that somebody else may keep."""

from __future__ import annotations

from typing import Any

import chains
import pytest
import torch
from torch import Tensor

import fn
from fn import Phase, tree
from fn.adapters.optim.core import stage_purely
from fn.inplace.own_memory import in_own_memory
from fn.kernels import flags

SHAPES = [(12, 8), (8, 12), (12, 8), (5,), (6, 3, 3, 3), (0, 4), ()]


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [normal(*shape, seed=seed + i).to(dtype) for i, shape in enumerate(SHAPES)]


def low_rank() -> fn.Transform:
    return fn.low_rank_average("data", 0.5, feedback=fn.decayed(1, 0.1), orthonormal=True)


TAIL = (fn.scale_by_shape(), fn.add_decayed_weights(0.1), fn.scale_by_learning_rate(torch.tensor(0.1)))


def kept() -> fn.Transform:
    """Return a link that keeps in its state what it hands on."""
    zeros = lambda params: tree.map(torch.zeros_like, params)  # noqa: E731
    return fn.lift(zeros, lambda updates, state, params: (updates, updates))


MAKES: dict[str, Any] = {
    "dion": lambda: fn.dion(0.1, axis="data"),
    "a chain": lambda: fn.skip_nonfinite(fn.chain(low_rank(), *TAIL)),
    "chains in a chain": lambda: fn.skip_nonfinite(fn.chain(fn.chain(low_rank(), TAIL[0]), fn.chain(*TAIL))),
    "without low rank": lambda: fn.skip_nonfinite(fn.chain(*TAIL)),
    "a link that keeps them": lambda: fn.skip_nonfinite(fn.chain(low_rank(), kept(), *TAIL)),
    "labels that keep them": lambda: fn.skip_nonfinite(
        fn.chain(
            low_rank(),
            fn.partition(
                {"a": fn.chain(kept(), *TAIL), "b": fn.chain(*TAIL)},
                lambda params: tree.map(lambda p: "a" if p.ndim == 2 else "b", params),
            ),
        )
    ),
    "a mask": lambda: fn.skip_nonfinite(
        fn.chain(low_rank(), fn.mask(TAIL[1], lambda params: [p.ndim > 1 for p in params]), TAIL[2])
    ),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_no_number_changes_and_nobody_else_is_written_over(make, dtype):
    """Not the gradients, the params, the old state or the new one, over three steps."""
    tx, params = make(), tensors(0, dtype)
    update, state = tx.update(Phase.COMPRESSED), tx.init(params)
    for t in range(3):
        grads = tensors(100 * (t + 1), dtype)
        given = tree.map(torch.clone, (grads, state, params))
        wanted = update(*given)
        found = in_own_memory(update)(grads, state, params)
        for got, want in ((found, wanted), ((grads, state, params), given)):
            assert all(map(torch.equal, tree.leaves(got), tree.leaves(want)))
        state = found[1]


def muon(**hyper: Any) -> fn.Transform:
    labels = lambda params: ["hidden" if p.ndim == 2 else "other" for p in params]  # noqa: E731
    return chains.muon(0.1, owned=False, labels=labels, **hyper)


LOCAL, WARMUP = Phase.LOCAL, Phase.WARMUP
LATE: dict[str, tuple[Any, Any]] = {
    "muon": (muon, WARMUP),
    "muon without nesterov": (lambda: muon(nesterov=False), WARMUP),
    "momentum": (lambda: fn.skip_nonfinite(fn.chain(fn.trace(0.9), fn.trace(0.5, True), TAIL[2])), WARMUP),
    "muloco": (lambda: fn.muloco(0.1, axis="data"), LOCAL),
    "local steps": (lambda: fn.skip_nonfinite(outer(fn.chain(fn.trace(0.9), fn.scale_by_learning_rate(1e5)))), LOCAL),
}
"""What makes them, and the phase: momenta of these are written late."""


def outer(inner: fn.Transform) -> fn.Transform:
    return fn.outer(inner, fn.scale_by_learning_rate(0.7), fn.compressed_average("data", fn.identity()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("make", "phase"), LATE.values(), ids=LATE)
def test_a_momentum_that_is_written_late_is_the_pure_one(make: Any, phase: Any, dtype: torch.dtype) -> None:
    """Also behind steps that are skipped, or left out by this rank alone: of NaN, and of updates that are too large."""
    tx, params = make(), tensors(0, dtype)
    update, state = tx.composed(phase), tx.init(params)
    staged, live = [p.clone() for p in params], tree.map(torch.clone, state)
    for t in range(5):
        grads = tensors(100 * (t + 1), dtype)
        if t == 2:
            grads[0][0, 0] = torch.nan
        if t == 3:
            grads = [1e30 * g for g in grads]
        late: list[Any] = []
        with flags.assumed():
            in_own_memory(update, late)(grads, live, staged)
        assert late or t in (2, 3)
        assert not late or t != 2
        step = stage_purely(update, grads, live, staged)
        if step.ok:
            step.commit()
        else:
            live.skipped.add_(1)
        moves, state = update(grads, state, params)
        params = fn.apply_updates(params, moves)
        for got, want in ((staged, params), (tree.leaves(live), tree.leaves(state))):
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
