"""One state dict of all ranks, which rank 0 alone writes, and of which each rank finds its own again."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from test_transactions import bits, build, phases_until, same, set_gradients

import fn
from fn import Phase, tree
from fn.adapters import checkpoint
from fn.adapters.optim.state_dict import OF_RANK

NAMES = ("onebit_adam", "onebit_lamb", "loco_adamw", "sharded_onebit_adam", "zero_one_adam")


def phases_of(name: str) -> list[Phase]:
    return [*phases_until(Phase.COMPRESSED)[:2], *[Phase.COMPRESSED] * 4]


def gathered(folder: str) -> dict[str, Any]:
    """Save on rank 0 alone, go on; load on each rank into another optimizer, go on; say what differs."""
    found: dict[str, Any] = {}
    for name in NAMES:
        params, opt = build(name, 2, phases_of(name).__getitem__)
        for t in range(4):
            set_gradients(params, t)
            opt.step()
        whole = checkpoint.gather(opt)
        if dist.get_rank() == 0:
            torch.save({"params": [p.detach() for p in params], "opt": whole}, f"{folder}/{name}.pt")
        dist.barrier()
        others, again = build(name, 2, phases_of(name).__getitem__)
        set_gradients(others, 50)
        again.step()  # a state that is nowhere near
        saved = torch.load(f"{folder}/{name}.pt", map_location="cpu", weights_only=True)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            again.load_state_dict(saved["opt"])
        with torch.no_grad():
            for p, x in zip(others, saved["params"], strict=True):
                p.copy_(x)
        exact = [same(bits((params, opt.states)), bits((others, again.states)))]
        for t in (4, 5):
            for own, each in ((params, opt), (others, again)):
                set_gradients(own, t)
                each.step()
            exact.append(same(bits((params, opt.states)), bits((others, again.states))))
        owners = sorted({m[1] for m in map(OF_RANK.match, whole or ()) if m})
        found[name] = exact, whole is None, owners
    return found


def elsewhere(folder: str) -> dict[str, Any]:
    """Load on another number of ranks."""
    _, opt = build("onebit_adam", 2, fn.freeze_after(2))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        opt.load_state_dict(torch.load(f"{folder}/onebit_adam.pt", weights_only=True)["opt"])
    errors = [bool(x.any()) for s in tree.fields(opt.states, "sync") for x in tree.leaves(s)]
    moments = [bool(x.any()) for s in tree.fields(opt.states, "nu") for x in tree.leaves(s)]
    _, sharded = build("loco_adamw", 2, fn.freeze_after(2))
    with pytest.raises(ValueError, match="holds shards of that rank only") as caught:
        sharded.load_state_dict(torch.load(f"{folder}/loco_adamw.pt", weights_only=True)["opt"])
    assert "is of rank 0 of 2, but this is rank 0 of 1, and it holds shards of that rank only" in str(caught.value)
    return {"heard": [str(w.message) for w in heard], "errors": errors, "moments": moments}


def test_what_rank_0_alone_saved_continues_bit_for_bit_on_every_rank(tmp_path):
    first, second = ranks.run(2, gathered, str(tmp_path))
    for name in NAMES:
        assert first[name] == ([True] * 3, False, ["0", "1"]), name
        assert second[name] == ([True] * 3, True, []), name
    for found in ranks.run(1, elsewhere, str(tmp_path)):
        (text,) = found["heard"]
        assert "is of rank 0 of 2, but this is rank 0 of 1: its own errors" in text
        assert not any(found["errors"])
        assert any(found["moments"])


def differing() -> str:
    _, opt = build("onebit_adam", 1, fn.freeze_after(2))
    opt.steps = dist.get_rank()
    try:
        checkpoint.gather(opt)
    except fn.RanksDisagree as error:
        return str(error)
    return ""


def test_ranks_at_different_steps_are_refused_on_all():
    first, second = ranks.run(2, differing)
    assert first == second
    assert first.startswith("ranks disagree: steps is torch.int64 () with checksum 0000000000000001 on rank 1 and")


def test_a_process_that_is_alone_gathers_its_own_copies(tmp_path: Path):
    p = torch.nn.Parameter(torch.ones(4))
    opt = fn.Optimizer([p], partial(fn.onebit_adam, axis="data"), schedule=fn.freeze_after(1), lr=0.1)
    for t in range(3):
        p.grad = torch.linspace(-1, 1, 4) + t
        opt.step()
    whole = checkpoint.gather(opt)
    assert whole is not None
    assert whole.keys() == opt.state_dict().keys()
    kept = {k: x.clone() for k, x in whole.items()}
    opt.step()
    assert same(bits(kept), bits(whole))
    opt.load_state_dict(whole)
    assert opt.steps == 3
