"""Each row of docs/muon.md, "Replace your own copy": a copy's step, written out, and what takes its place in `fn`.

Iterations are in float32. `torch.optim.Muon` iterates in bfloat16, so that its row compares momenta, and one step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fn

STEPS, LR, B, DECAY = 20, 0.02, 0.95, 0.1
JORDAN = (3.4445, -4.7750, 2.0315)
POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]
Step = Callable[[nn.Parameter, dict[str, Tensor]], None]


class Model(nn.Module):
    """An embedding, queries, keys and values in one weight, a wide matrix, a convolution, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.qkv = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6, bias=False)
        self.conv = nn.Conv1d(6, 5, 3, bias=False)
        self.head = nn.Linear(6, 11)


def newton_schulz(z: Tensor, triples: Sequence[tuple[float, float, float]], safety: float = 1.0) -> Tensor:
    x = z / (safety * z.norm() + 1e-7)
    x = x.T if z.shape[0] > z.shape[1] else x
    for a, b, c in triples:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if z.shape[0] > z.shape[1] else x


def keller_jordans(p: nn.Parameter, state: dict[str, Tensor]) -> None:
    g = p.grad
    m = state.setdefault("momentum_buffer", torch.zeros_like(g))
    m.lerp_(g, 1 - B)
    u = newton_schulz(g.lerp(m, B), [JORDAN] * 5)
    p.mul_(1 - LR * DECAY)
    p.add_(u, alpha=-LR * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def kimis(p: nn.Parameter, state: dict[str, Tensor]) -> None:
    g = p.grad
    m = state.setdefault("momentum_buffer", torch.zeros_like(g))
    m.mul_(B).add_(g)
    u = newton_schulz(g.add(m, alpha=B), [JORDAN] * 5)
    p.mul_(1 - LR * DECAY)
    p.add_(u, alpha=-LR * 0.2 * math.sqrt(max(p.shape)))


def with_polar_express(p: nn.Parameter, state: dict[str, Tensor]) -> None:
    g = p.grad
    m = state.setdefault("momentum_buffer", torch.zeros_like(g))
    m.mul_(B).add_(g)
    u = newton_schulz(g.add(m, alpha=B), POLAR_EXPRESS, safety=1.02)
    p.mul_(1 - LR * DECAY)
    p.add_(u, alpha=-LR * 0.2 * math.sqrt(max(p.shape)))


def with_polar_express_and_jordans_factor(p: nn.Parameter, state: dict[str, Tensor]) -> None:
    g = p.grad
    m = state.setdefault("momentum_buffer", torch.zeros_like(g))
    m.mul_(B).add_(g)
    u = newton_schulz(g.add(m, alpha=B), POLAR_EXPRESS, safety=1.02)
    p.mul_(1 - LR * DECAY)
    p.add_(u, alpha=-LR * max(1, p.shape[0] / p.shape[1]) ** 0.5)


def without_nesterov(p: nn.Parameter, state: dict[str, Tensor]) -> None:
    m = state.setdefault("momentum_buffer", torch.zeros_like(p.grad))
    m.mul_(B).add_(p.grad)
    u = newton_schulz(m, [JORDAN] * 5)
    p.mul_(1 - LR * DECAY)
    p.add_(u, alpha=-LR * 0.2 * math.sqrt(max(p.shape)))


def with_seven_iterations(p: nn.Parameter, state: dict[str, Tensor]) -> None:
    m = state.setdefault("momentum_buffer", torch.zeros_like(p.grad))
    m.mul_(B).add_(p.grad)
    u = newton_schulz(p.grad + B * m, [(2.0, -1.5, 0.5)] * 7)
    p.mul_(1 - LR * DECAY)
    p.add_(u, alpha=-LR * 0.2 * math.sqrt(max(p.shape)))


def cautious(p: nn.Parameter, state: dict[str, Tensor]) -> None:
    m = state.setdefault("momentum_buffer", torch.zeros_like(p.grad))
    m.mul_(B).add_(p.grad)
    u = 0.2 * math.sqrt(max(p.shape)) * newton_schulz(p.grad + B * m, [JORDAN] * 5)
    p.sub_(LR * (u + DECAY * p * (u * p >= 0)))


def of_blocks(p: nn.Parameter, state: dict[str, Tensor]) -> None:
    m = state.setdefault("momentum_buffer", torch.zeros_like(p.grad))
    m.mul_(B).add_(p.grad)
    z = p.grad + B * m
    p.mul_(1 - LR * DECAY)
    for rows, x in zip(p.split((6, 3, 3)), z.split((6, 3, 3)), strict=True) if len(p) == 12 else [(p, z)]:
        rows.sub_(LR * 0.2 * math.sqrt(max(x.shape)) * newton_schulz(x, POLAR_EXPRESS, safety=1.02))


def of_flattened_convolutions(p: nn.Parameter, state: dict[str, Tensor]) -> None:
    m = state.setdefault("momentum_buffer", torch.zeros_like(p.grad))
    m.mul_(B).add_(p.grad)
    z = (p.grad + B * m).flatten(1)
    u = newton_schulz(z, [JORDAN] * 5) * max(1, z.shape[0] / z.shape[1]) ** 0.5
    p.mul_(1 - LR * DECAY)
    p.sub_(LR * u.view_as(p))


def of_links(b: tuple[float, float] = (0.9, 0.95), careful: bool = False, nesterov: bool = True, **link: Any) -> Any:
    """Return the chain of the page."""

    def make(lr: Any, weight_decay: float, labels: Any) -> fn.Transform:
        kinds = {"hidden": fn.scale_by_muon(B, nesterov, **link), "other": fn.scale_by_adam(*b)}
        directions = fn.partition(kinds, [*labels])
        return fn.chain(directions, fn.add_decayed_weights(weight_decay, careful), fn.scale_by_learning_rate(lr))

    return make


def muon(**more: Any) -> Any:
    return lambda lr, weight_decay, labels: fn.muon(lr, B, weight_decay, labels=labels, **more)


KIMIS = {"scale": "rms_norm", "coefficients": "jordan"}
ROWS: dict[str, tuple[Step, Any]] = {
    "0.2 sqrt(max(n, k))": (with_polar_express, muon(scale="rms_norm")),
    "sqrt(max(1, n / k))": (with_polar_express_and_jordans_factor, muon(scale="max")),
    "fused": (of_blocks, muon(scale="rms_norm")),
    "Moonlight": (kimis, of_links(**KIMIS)),
    "Keller Jordan": (keller_jordans, of_links(scale="max", coefficients="jordan")),
    "no Nesterov": (without_nesterov, of_links(nesterov=False, **KIMIS)),
    "iterations": (with_seven_iterations, of_links(scale="rms_norm", coefficients=[(2.0, -1.5, 0.5)] * 7)),
    "cautious": (cautious, of_links(careful=True, **KIMIS)),
    "convolutions": (of_flattened_convolutions, of_links(scale="max", coefficients="jordan", flatten=True)),
}


def give_gradients(model: Model, t: int) -> None:
    generator = torch.Generator().manual_seed(100 + t)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)


def two_models() -> tuple[Model, Model]:
    torch.manual_seed(3)
    theirs, ours = Model(), Model()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


@pytest.mark.parametrize("row", ROWS)
def test_twenty_steps_are_those_of_the_copy_beside_adamw(row):
    step, make = ROWS[row]
    theirs, ours = two_models()
    labels = fn.labels_of(ours, splits={"qkv.weight": (6, 3, 3)} if row == "fused" else None)
    if row == "convolutions":
        labels["conv.weight"] = "hidden"
    hidden = [p for name, p in theirs.named_parameters() if labels[name] == "hidden"]
    assert len(hidden) == 2 + (row == "convolutions")
    others = [p for name, p in theirs.named_parameters() if labels[name] == "other"]
    betas = (0.9, 0.95)
    adamw = torch.optim.AdamW(others, lr=LR, betas=betas, weight_decay=0.0 if row == "cautious" else DECAY)
    opt = fn.Optimizer(ours.parameters(), make, labels=labels, lr=LR, weight_decay=DECAY)
    states: list[dict[str, Tensor]] = [{} for _ in hidden]
    for t in range(STEPS):
        give_gradients(theirs, t)
        give_gradients(ours, t)
        with torch.no_grad():
            for p, state in zip(hidden, states, strict=True):
                step(p, state)
        adamw.step()
        opt.step()
    for (name, x), y in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if row != "cautious" or labels[name] == "hidden":  # of AdamW's tensors the chain decays cautiously, too
            torch.testing.assert_close(x, y, rtol=0, atol=1e-5)
