"""Links that write into memory of the step's own change no number, and nothing that somebody else may keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fn
from fn import Phase, tree
from fn.inplace.memory import memory_of
from fn.inplace.own_memory import in_own_memory
from fn.transforms.decay_and_lr import Decay

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


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("dion", [True, False]),  # AdamW's update is not known to be new
        ("a chain", [True]),
        ("chains in a chain", [True]),
        ("a link that keeps them", [True]),  # behind the scale by shape they are new
        ("labels that keep them", [True, True]),
        ("a mask", [False]),
    ],
)
def test_a_decay_writes_into_what_is_known_to_be_new(name, expected, monkeypatch):
    written, applied = [], Decay.applied

    def noted(rule: Decay, updates: Any, params: Any, out: Any = None) -> Any:
        before = [memory_of(x) for x in tree.leaves(updates)]
        found = applied(rule, updates, params, out)
        written.append(before == [memory_of(x) for x in tree.leaves(found)])
        return found

    monkeypatch.setattr(Decay, "applied", noted)
    tx, params = MAKES[name](), [x for x in tensors(0) if x.ndim > 1 and x.numel()] + tensors(0)[3:4] * (name == "dion")
    in_own_memory(tx.update(Phase.COMPRESSED))(params, tx.init(params), params)
    assert written == expected
