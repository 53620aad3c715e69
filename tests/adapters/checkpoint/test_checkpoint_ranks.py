"""What ranks must have in common to save one checkpoint, and what each may have of its own."""

from __future__ import annotations

import os
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import ranks
import torch
import torch.distributed as dist
from test_save_load import alone
from test_transactions import bits, build, same, set_gradients

import fn
from fn import tree
from fn.adapters import checkpoint


def in_a_folder_of_its_own(folder: str) -> tuple[str, bool, list[str]]:
    params, opt = build("onebit_adam", 1, fn.freeze_after(2))
    set_gradients(params, 0)
    opt.step()
    before, mine = bits((params, opt.states)), f"{folder}/{dist.get_rank()}"
    try:
        checkpoint.save(mine, opt)
    except OSError as error:
        dist.barrier()
        return str(error), same(bits((params, opt.states)), before), os.listdir(mine) if os.path.exists(mine) else []
    return "saved", False, []


def test_a_folder_of_each_machines_own_is_refused_on_all_ranks_before_anything_is_written_there(tmp_path):
    first, second = ranks.run(2, in_a_folder_of_its_own, str(tmp_path))
    for text, unchanged, _ in (first, second):
        assert text.startswith(f"folder: {tmp_path}/1 on rank 1 of ")
        assert "is not the folder of rank 0" in text
        assert text.endswith(
            "give all ranks one folder, on a file system that all their machines see; nothing was saved"
        )
        assert unchanged
    assert second[2] == []
    assert not any(name.startswith(("step-", "latest")) for name in first[2])


def test_a_single_process_needs_no_other_part(tmp_path):
    assert isinstance(checkpoint.save(tmp_path, alone(0)[1]), Path)


def disagreement(act: Any) -> tuple[str, int, str]:
    try:
        act()
    except fn.RanksDisagree as error:
        return str(error), error.rank, error.field
    return "saved", -1, ""


def apart(folder: str) -> dict[str, Any]:
    """Save what ranks do not have in common, and load what they may have each."""
    rank = dist.get_rank()
    params, opt = build("zero_one_adam", 1, fn.freeze_after(2))
    own = {"rng": torch.tensor([rank, 3, 1 - rank]), "deep": [torch.full((2, 3), rank + 0.5), torch.tensor(rank > 0)]}
    whole = {**own, "same": torch.arange(3.0)}
    checkpoint.save(f"{folder}/own", opt, whole)
    found = checkpoint.load(f"{folder}/own", opt, tree.map(torch.zeros_like, whole))
    checkpoint.load(f"{folder}/own", opt)  # without them
    before = bits((params, opt.states))
    answers: dict[str, Any] = {"exact": same(bits(found), bits(whole))}
    for name, mine in {
        "shape": {"a": torch.ones(3 + rank)},
        "dtype": {"a": torch.ones(3, dtype=(torch.float32, torch.float64)[rank])},
        "leaf": {"a": torch.ones(1), **({"b": torch.ones(1)} if rank else {})},
    }.items():
        answers[name] = disagreement(partial(checkpoint.save, f"{folder}/{name}", opt, mine))
    group = dist.new_group(backend="gloo")
    opt.steps += rank
    answers["steps"] = disagreement(partial(checkpoint.save, f"{folder}/steps", opt))
    answers["async"] = disagreement(lambda: checkpoint.save_async(f"{folder}/steps", opt, group=group).result(60))
    answers["unchanged"] = same(bits((params, opt.states)), before)
    return answers


def on_another_world(folder: str) -> tuple[bool, list[str]]:
    opt = build("zero_one_adam", 1, fn.freeze_after(2))[1]
    like = {"rng": torch.zeros(3), "deep": [torch.zeros(2, 3), torch.zeros(())], "same": torch.zeros(3)}
    given = {"rng": torch.tensor([0, 3, 1]), "deep": [torch.full((2, 3), 1.0), torch.tensor(False)]}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        found = checkpoint.load(f"{folder}/own", opt, like)
    said = [str(w.message) for w in heard if str(w.message).startswith("extra: ")]
    return same(bits(found), bits({**given, "same": torch.arange(3.0)})), said


def test_extra_that_differs_between_ranks_is_kept_for_each_and_other_steps_or_leaves_are_refused(tmp_path):
    """0/1 Adam between synchronisations, saved one step apart, would be restored as the other rank's."""
    first, second = ranks.run(2, apart, str(tmp_path))
    for found in (first, second):
        assert found["exact"]
        assert found["unchanged"]
    assert {name: first[name] for name in first} == {name: second[name] for name in second}
    once = "; numbers may differ, but give all ranks the same leaves; nothing was saved"
    leaf = "ranks disagree: leaf {} of extra is {} on rank 1 and {} on rank 0" + once
    assert first["shape"] == (leaf.format("'a'", "torch.float32 (4,)", "torch.float32 (3,)"), 1, "a")
    assert first["dtype"] == (leaf.format("'a'", "torch.float64 (3,)", "torch.float32 (3,)"), 1, "a")
    assert first["leaf"] == (leaf.format("'b'", "torch.float32 (1,)", "missing"), 1, "b")
    assert first["steps"] == first["async"]
    text, rank, field = first["steps"]
    assert text.startswith("ranks disagree: steps is torch.int64 () with checksum 0000000000000001 on rank 1 and")
    assert text.endswith("; call it on all ranks after the same step; nothing was saved")
    assert (rank, field) == (1, "steps")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["own"]
    for world in (1, 3):
        for right, (text,) in ranks.run(world, on_another_world, str(tmp_path)):
            assert right
            assert text == (
                f"extra: 'deep.1', 'rng' differed between the 2 ranks that saved; on {world} ranks all load what rank "
                f"0 had"
            )
