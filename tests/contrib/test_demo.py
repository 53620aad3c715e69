"""What `fn.contrib.demo` promises beside the recorded runs and the common contract."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from recorded_codes import Case, Found, Made, Tree, alone, in_simulation, load
from simulated import one_step
from torch import Tensor

import fn
from fn import Phase

RECORDED = load(Path(__file__).parent / "golden/demo", "index.json")


def test_demo_is_sign_sgd_in_the_warm_up_and_alone_and_a_rounding_error_moves_nothing() -> None:
    """Of the cosine with q = 1 on three points the middle is zero; the recorded parameters move there.

    Differs: fn.contrib._demo.demo: in the warm-up, and on one rank, it is signSGD without the momentum. A mean below
        1e-6 of the tensor's largest counts as 0; in the authors' code the sign of a rounding error moves the parameter.
    """
    g = torch.randn(2, 9)
    assert torch.equal(
        one_step(fn.contrib.demo(0.5, axis="data", k=1, tile=3), g, Phase.WARMUP), -0.5 * g.mean(0).sign()
    )
    assert torch.equal(one_step(fn.contrib.demo(0.5, axis="data", k=1, tile=3), g[:1]), -0.5 * g[0].sign())
    waves = torch.tensor([1.0, 0.0, -1.0]).repeat(2, 3)
    assert one_step(fn.contrib.demo(0.5, axis="data", k=1, tile=3), waves).tolist() == [-0.5, 0.0, 0.5] * 3
    moved = 0
    for case in RECORDED:
        for mean, param in zip(case.each("mean"), case.each("param"), strict=True):
            still = mean[1:].abs().flatten(1) < 1e-6 * mean[1:].abs().flatten(1).amax(1, keepdim=True)
            moved += int((still & (param.diff(dim=0).abs().flatten(1) > 0.5 * case.hyper["lr"])).sum())
    assert moved


@pytest.mark.parametrize(
    ("hyper", "text"),
    [
        ({"k": 0}, "k: expected a whole number of at least 1"),
        ({"k": 17, "tile": 4}, "k: expected a whole number .* at most 16"),
        ({"tile": 0}, "tile: expected a whole number of at least 1, but got 0"),
        ({"values": fn.ballots()}, "values: expected a codec that keeps magn"),
    ],
)
def test_bad_input_is_refused_by_name(hyper: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        fn.contrib.demo(axis="data", **hyper)


def settled(case: Case) -> dict[str, np.ndarray]:
    """Return where params are compared: until a mean is so small that rounding decides its sign."""
    found = {}
    for i in range(len(case.shapes)):
        mean = np.abs(case.arrays[f"p{i}.mean"])
        sure = mean > 2e-6 * mean.max(axis=tuple(range(1, mean.ndim)), keepdims=True)
        found[f"p{i}.param"] = np.logical_and.accumulate(sure, axis=0)
        assert found[f"p{i}.param"].mean() > 0.5
    return found


def largest_divisor(most: int, n: int) -> int:
    return max(d for d in range(1, most + 1) if n % d == 0)


def recorded(case: Case) -> Made:
    h = case.hyper
    side = partial(largest_divisor, h["compression_chunk"])
    b, k, basis = h["compression_decay"], h["compression_topk"], fn.dct(side)
    tx = fn.contrib.demo(h["lr"], h["weight_decay"], axis="data", k=k, tile=side, keep=b)

    def momenta(state: Tree) -> list[Tensor]:
        """Return the errors, which lie in the basis chunk length by chunk length, as tensors."""
        parts = [basis.into(p) for p in case.each("init")]
        flat = [part for each in parts for part in each]
        rests = dict(zip(sorted({p.shape[1] for p in flat}), [s.worker[0] for s in state.inner[2]], strict=True))
        found = []
        for each, shape in zip(parts, case.shapes, strict=True):
            mine = []
            for part in each:
                rest, count = rests[part.shape[1]], part.numel()
                mine.append(rest[:count].view(part.shape))
                rests[part.shape[1]] = rest[count:]
            found.append(basis.back(mine, shape))
        return found

    def look(before: Tree, after: Tree, g: list[Tensor]) -> dict[str, list[Tensor]]:
        old, new = momenta(before), momenta(after)
        return {"delta": new, "sent": [b * m + h["lr"] * x - n for m, x, n in zip(old, g, new, strict=True)]}

    return tx, look, None


def recorded_alone(case: Case) -> Found:
    h, found = case.hyper, dict[str, list[Tensor]]()
    basis = fn.dct(partial(largest_divisor, h["compression_chunk"]))
    for i, (p, grads) in enumerate(zip(case.each("init"), case.each("grad"), strict=True)):
        feedback, errors = fn.decayed(h["compression_decay"]), [part.flatten() * 0 for part in basis.into(p)]
        for g in grads[:, 0]:
            parts, sent = basis.into(h["lr"] * g), []
            for j, part in enumerate(parts):
                codec = fn.top_k(min(h["compression_topk"], part.shape[1]), part.shape[1], over="senders")
                arrived, errors[j] = alone(part.flatten(), codec, feedback, errors[j])
                sent.append(arrived.view_as(part))
            delta = basis.back([e.view_as(part) for e, part in zip(errors, parts, strict=True)], p.shape)
            mean = basis.back(sent, p.shape)
            (signs,) = fn.scale_by_sign(noise=1e-6).compressed_update([mean], (), None)[0]
            p = p - h["lr"] * signs
            for name, value in (("sent", mean), ("mean", mean), ("delta", delta), ("param", p)):
                found.setdefault(f"p{i}.{name}", []).append(value)
    return found


@pytest.mark.parametrize("case", RECORDED, ids=[case.row["name"] for case in RECORDED])
def test_the_recorded_run_is_replayed_in_simulated_ranks(case: Case) -> None:
    """On one rank an average is the identity; such a case is replayed by the codec and the feedback."""
    found = recorded_alone(case) if case.world == 1 else in_simulation(case, recorded(case))
    assert 0 < case.off(found, where=settled(case)) <= 1
