"""Record the codes of rounds of local steps, or replay them and print what anchors and outer states they lead to.

    python agreed_rounds.py record FILE
    python agreed_rounds.py replay FILE

Replays in processes whose machines compute otherwise must lead to the same bits, within the agreed row. What the row
that this machine takes by itself leads to is printed behind that.
"""

from __future__ import annotations

import hashlib
import json
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

import fn
from fn.collectives.axis import Axis, Binding
from fn.collectives.transports.registry import Transport, register
from fn.kernels.table import agreed_row

sys.path.insert(0, str(Path(__file__).parents[1]))
from own_pieces import guarded_diloco

ROUNDS = 4
SHAPES = ((37, 29), (1000,), (64, 3, 3, 2))
METHODS = {
    "diloco": fn.diloco,
    "diloco, bf16": partial(fn.diloco, codec=fn.identity(torch.bfloat16)),
    "diloco, int4": partial(fn.diloco, codec=fn.int4()),
    "diloco, int8": partial(fn.diloco, codec=fn.int8()),
    "diloco, signs": partial(fn.diloco, codec=fn.sign()),
    "diloco, signs of blocks": partial(fn.diloco, codec=fn.sign(64)),
    "diloco, fp8": partial(fn.diloco, codec=fn.fp8()),
    "diloco, bins": partial(fn.diloco, codec=fn.bins(4, 6)),
    "diloco, the paper's outer step": partial(fn.diloco, outer_lr=0.7, outer_momentum=0.9),
    "local_sgd": partial(fn.local_sgd, momentum=0.9),
    "muloco": fn.muloco,
    "muloco, bins": partial(fn.muloco, codec=fn.bins(4, 6)),
    "sparse_loco": partial(fn.sparse_loco, k=8, tile=8),
    "des_loc": fn.contrib.des_loc,
    "norm_guard": guarded_diloco,
    "sparta": partial(fn.contrib.sparta, density=0.5),
}


def pattern(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Return numbers in [-1, 1] that every machine makes alike: of integers, divided once."""
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    return (((numbers * 7919 + seed * 104729) % 2003 - 1001).float() / 1001).view(shape)


def exchanges(name: str, binding: Binding, row: Any) -> list[str]:
    """Take the rounds of a method; return a digest of its anchors and outer states behind each."""
    tx = METHODS[name](1e-2, axis="islands")
    params, found = [pattern(shape, i) for i, shape in enumerate(SHAPES)], []
    with binding, row():
        state = tx.init(params)
    for number in range(ROUNDS):
        params = [
            p + 0.01 * pattern(shape, 10 * number + i) for i, (p, shape) in enumerate(zip(params, SHAPES, strict=True))
        ]
        with binding, row():
            for part in (tx.exchange.difference, tx.exchange.mean, tx.exchange.outer):
                params, state = part(0, state, params)
        alike = fn.tree.leaves([fn.roles.find(state, "copies"), fn.tree.fields(state, "outer"), params])
        data = b"".join(x.contiguous().view(-1).view(torch.uint8).numpy().tobytes() for x in alike if x.numel())
        found.append(hashlib.blake2b(data, digest_size=8).hexdigest())
    return found


def main(what: str, path: str) -> None:
    """Do what the command says."""
    if what == "record":
        pair = register("a pair", Transport(torch.clone, lambda x: torch.stack([x, x]), lambda x: x * 2))
        axis, logs = Axis(2, torch.tensor(0), pair), dict[str, Any]()
        for name in METHODS:
            steps: list[Any] = []
            recording = fn.recorded(Binding({"islands": axis}), lambda _, records, steps=steps: steps.append(records))
            exchanges(name, recording, agreed_row)
            logs[name] = steps
        torch.save(logs, path)
        return
    logs = torch.load(path)
    found = {
        kind: {
            name: exchanges(name, fn.replayed({"islands": 2}, steps.__getitem__), row) for name, steps in logs.items()
        }
        for kind, row in (("agreed", agreed_row), ("own", nullcontext))
    }
    print(json.dumps({"torch": torch.__version__, **found}))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main(*sys.argv[1:])
