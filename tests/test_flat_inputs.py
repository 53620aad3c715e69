"""An update writes into nothing that it is given, also where the tensors lie end to end in memory, on real ranks.

Simulated ranks cannot show it: there every vector that travels is a new one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, Transform, tree

W, C, L = Phase.WARMUP, Phase.COMPRESSED, Phase.LOCAL
SIGNS = partial(fn.compressed_average, "data", fn.sign())
LOW_RANK = partial(fn.low_rank_average, "data", 1)
CASES: dict[str, tuple[Callable[[], Transform], Sequence[Phase]]] = {
    "average in int8": (lambda: fn.average("data", fn.int8()), [W, W]),
    "average in signs": (lambda: fn.average("data", fn.sign(), fn.classic(lazy=True)), [W, W]),
    "signs": (SIGNS, [C, C]),
    "signs, no servers": (partial(SIGNS, servers=False), [C, C]),
    "signs, lazy, no servers": (partial(SIGNS, fn.classic(lazy=True), servers=False), [C, C]),
    "fused": (partial(SIGNS, layout="fused"), [C, C]),
    "fused, no servers": (partial(SIGNS, layout="fused", servers=False), [C, C]),
    "a tensor each": (partial(SIGNS, layout="per_tensor"), [C, C]),
    "a tensor each, no servers": (partial(SIGNS, layout="per_tensor", servers=False), [C, C]),
    "clipped": (lambda: fn.chain(fn.clip_by_global_norm(1e9, "data"), SIGNS(servers=False)), [C, C]),
    "differences": (lambda: fn.compressed_average("data", fn.int8(), fn.differences()), [W, C, C]),
    "errors of servers are forgotten": (partial(SIGNS, gather_feedback=fn.off()), [C, C]),
    "low rank": (LOW_RANK, [C, C]),
    "low rank without errors": (partial(LOW_RANK, feedback=fn.off()), [C, C]),
    "orthonormal": (partial(LOW_RANK, orthonormal=True, feedback=fn.decayed(1.0, 0.1)), [W, C]),
    "onebit_adam": (partial(fn.onebit_adam, axis="data", servers=False), [W, C, C]),
    "onebit_lamb": (partial(fn.onebit_lamb, axis="data"), [W, C, C]),
    "zero_one_adam": (partial(fn.zero_one_adam, axis="data"), [W, L, C, L, C]),
    "loco_adamw": (partial(fn.loco_adamw, axis="data"), [W, C, C]),
    "diloco": (partial(fn.diloco, axis="data", codec=fn.sign(), servers=False), [W, L, C, C]),
    "in a basis": (lambda: fn.in_basis(fn.dct(4), lambda n: SIGNS(servers=False)), [C, C]),
    "lion_vote": (partial(fn.lion_vote, axis="data"), [C, C]),
}


def several(flat: torch.Tensor) -> list[torch.Tensor]:
    return [flat[:32].view(8, 4), flat[32:].view(4, 4)]


def alone(flat: torch.Tensor) -> list[torch.Tensor]:
    return [flat.view(12, 4)]


def written_over() -> list[str]:
    """Return which updates changed gradients, params or a state that they were given."""
    mesh, guilty = init_device_mesh("cpu", (2,), mesh_dim_names=("data",)), []
    with fn.bind(mesh):
        for name, (make, phases) in CASES.items():
            for cut in (several, alone):
                seeds = torch.Generator().manual_seed(dist.get_rank()), torch.Generator().manual_seed(9)
                grads, params = (cut(torch.randn(48, generator=seed)) for seed in seeds)
                tx = make()
                state: Any = tx.init(params)
                for phase in phases:
                    given = tree.leaves((grads, params, state))
                    before = [x.clone() for x in given]
                    _, state = tx.update(phase)(grads, state, params)
                    if not all(map(torch.equal, before, given)):
                        guilty.append(f"{name}, {cut.__name__}, {phase.name}")
    return guilty


def test_no_update_writes_into_what_it_is_given():
    assert ranks.run(2, written_over) == [[], []]
