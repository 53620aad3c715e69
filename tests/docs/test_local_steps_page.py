"""docs/local_steps.md: what a round sends, by the ledger."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import fn

PAGE = Path(__file__).parents[2] / "docs" / "local_steps.md"
WORKERS, STEPS = 4, 16


def sent(tx: fn.Transform, when: Any) -> int:
    """Return the bytes of a rank with ten million parameters, a tenth of which are sent here."""
    params, books = [torch.zeros(1000, 1000)], []

    def run(x: torch.Tensor) -> torch.Tensor:
        with fn.ledger() as book:
            tx.update(when)([x * p for p in params], tx.init(params), params)
        books.append(book.total)
        return x

    fn.simulate(run, "data", WORKERS)(torch.rand(WORKERS))
    return 10 * books[0]


def test_the_bytes_of_a_round_are_those_of_the_page() -> None:
    text = " ".join(PAGE.read_text().split())
    exact = STEPS * sent(fn.adamw(1e-3, axis="data"), fn.Phase.WARMUP)
    codecs = {"exactly": None, "in 8 bits": fn.int8(), "in 2 bits": fn.bins(4, 6), "in signs": fn.sign()}
    sizes = {name: sent(fn.diloco(1e-3, axis="data", codec=codec), fn.Round(0, 0)) for name, codec in codecs.items()}
    sizes["with `sparse_loco`"] = sent(fn.sparse_loco(1e-3, axis="data"), fn.Round(0, 0))
    parts = ", ".join(f"{size / 1e6:.3g} MB {name}" for name, size in sizes.items())
    adamw = f"With ten million parameters on 4 ranks, AdamW sends {exact / 1e6:.3g} MB per rank in 16 steps."
    assert f"{adamw} A round sends {parts}." in text
