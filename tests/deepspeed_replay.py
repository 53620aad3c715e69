"""Replaying a recording of DeepSpeed with a drop-in: one rank of it, over whatever transport."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from golden_cases import Case, assert_close, record
from torch import Tensor

from fn.adapters.deepspeed import OnebitAdam, OnebitLamb, ZeroOneAdam
from fn.adapters.deepspeed.optimizers import DeepSpeedOptimizer

KINDS = {"onebit_adam": OnebitAdam, "onebit_lamb": OnebitLamb, "zero_one_adam": ZeroOneAdam}


def build(case: Case, params: tuple[list[Tensor], ...], **more: Any) -> DeepSpeedOptimizer:
    groups = []
    for j, (group, tensors) in enumerate(zip(case.row["groups"], params, strict=True)):
        own = {k: v for k, v in group.items() if k not in ("shapes", "mask_from")}
        if f"g{j}.exp_avg_mask" in case.arrays:
            own["exp_avg_mask"] = torch.from_numpy(case.arrays[f"g{j}.exp_avg_mask"])
        groups.append({"params": [p.requires_grad_() for p in tensors], **own})
    return KINDS[case.row["optimizer"]](groups, initialising_call=True, **case.row["hyper"], **more)


def replay(case: Case, rank: int, **more: Any) -> None:
    """Run one recording on this rank and hold every array against it after every call."""
    params = case.params()
    optimizer = build(case, params, **more)
    for call in range(case.row["calls"]):
        if call == case.row.get("resume_at"):
            saved = {k: v.clone() for k, v in optimizer.state_dict().items()}
            optimizer = build(case, params, **more)
            optimizer.load_state_dict(saved)
            optimizer.reset_errors()
        for j, group in enumerate(optimizer.param_groups):
            group["lr"] = float(case.arrays["lr"][call, j])
        for group, grads in zip(params, case.gradients(call, rank), strict=True):
            for p, g in zip(group, grads, strict=True):
                p.grad = g
        optimizer.step()
        assert optimizer.frozen == case.arrays["frozen"][call], f"call {call}: frozen is {optimizer.frozen}"
        compare(case, call, rank, record(optimizer.states, params, case.row["optimizer"], case.world))


def compare(case: Case, call: int, rank: int, found: dict[str, Tensor]) -> None:
    not_yet = call < case.row["hyper"].get("freeze_step", 0) - 1
    for name, ours in found.items():
        want = case.arrays[name][call]
        if name.endswith("exp_avg_sq_fresh") and not_yet:
            continue  # ours follows nu from the start; theirs is zero until the switch
        if np.isnan(want).all():
            continue  # a number that DeepSpeed has not made yet
        per_rank = want.ndim > 0 and want.shape[0] == case.world and want.ndim == ours.ndim + 1
        what = f"{case.row['name']} call {call} rank {rank} {name}"
        assert_close(ours.detach(), want[rank] if per_rank else want, what)
