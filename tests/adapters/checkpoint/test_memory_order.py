"""Version 0.2.0 laid errors of channels_last tensors in the order of memory: loaded, they are in that of the shapes.

`saved_by_0.2.0` was saved by commit a10a622 on two ranks, after two warm-up steps and two in codes; `rank-*.pt` hold
what `state_dict` returned there.
"""

from __future__ import annotations

import math
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn.adapters import checkpoint
from fn.adapters.checkpoint.resharding import moved

SAVED = Path(__file__).parent / "saved_by_0.2.0"
SHAPES = [(4, 3, 2, 2), (5,), (6, 4)]
IN_MEMORY = [(0, 2, 3, 1), (0,), (1, 0)]
ALIGN = {"onebit_adam": 8, "loco_adamw": 2}
PHASES = [fn.Phase.WARMUP] * 2 + [fn.Phase.COMPRESSED] * 9


def build(name: str, size: int) -> tuple[list[nn.Parameter], fn.Optimizer]:
    params = [nn.Parameter(torch.ones([s[d] for d in order]).permute([order.index(d) for d in range(len(s))]))
              for s, order in zip(SHAPES, IN_MEMORY, strict=True)]  # fmt: skip
    assert params[0].is_contiguous(memory_format=torch.channels_last)
    with fn.bind(init_device_mesh("cpu", (size,), mesh_dim_names=("data",))):
        make = partial(getattr(fn, name), axis="data")
        return params, fn.Optimizer(params, make, schedule=PHASES.__getitem__, lr=1e-2)


def taken(params: list[nn.Parameter], opt: fn.Optimizer) -> None:
    for p in params:
        p.grad = torch.full_like(p, 0.5 + torch.distributed.get_rank())
    opt.step()


def loading(name: str, size: int) -> tuple[dict[str, Tensor], list[Tensor]]:
    params, opt = build(name, size)
    checkpoint.load(SAVED / name, opt)
    found = {key.partition(".state.")[2] or key: x.clone() for key, x in opt.state_dict().items()}
    taken(params, opt)
    return found, [p.detach() for p in params]


def apart(vectors: Tensor, name: str, orders: list[tuple[int, ...]] | None = None) -> list[Tensor]:
    """Return the tensors of rows (W, n / W), which lie there in the order of their shapes or in another one."""
    world, found = vectors.shape[0], []
    widths = [-(-math.prod(s) // (world * ALIGN[name])) * ALIGN[name] for s in SHAPES]
    for i, (piece, shape) in enumerate(zip(vectors.split(widths, dim=1), SHAPES, strict=True)):
        order = orders[i] if orders else (*range(len(shape)),)
        whole = piece.reshape(-1)[: math.prod(shape)].view([shape[d] for d in order])
        found.append(whole.permute([order.index(d) for d in range(len(shape))]))
    return found


def of(found: list[dict[str, Tensor]], name: str, orders: Any = None) -> dict[str, list[Tensor]]:
    """Return what was not delivered, and the momentum, tensor by tensor."""
    world = len(found)

    def rows(key: str) -> Tensor:
        return torch.cat([next(v for k, v in x.items() if k.endswith(key)).double()[None] for x in found])

    if name == "onebit_adam":
        errors = rows("sync.worker.0").mean(0).view(world, -1) + rows("sync.server.0")
        momentum = [next(v for k, v in found[0].items() if k.endswith(f"mu.{i}")) for i in range(len(SHAPES))]
        return {"errors": apart(errors, name, orders), "momentum": momentum}
    widths = torch.tensor([-(-math.prod(s) // (world * 2)) * 2 for s in SHAPES])
    steps = rows("errors.worker.0.scales").repeat_interleave(widths, dim=2)
    errors = (rows("errors.worker.0.codes").view(world, world, -1) * steps).mean(0)
    return {"errors": apart(errors, name, orders), "momentum": apart(rows("mu.0"), name, orders)}


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", ALIGN)
def test_errors_of_channels_last_are_put_into_the_order_of_the_shapes(name, world):
    saved = [torch.load(SAVED / f"rank-{rank}.pt", weights_only=True)[name] for rank in range(2)]
    answers = ranks.run(world, loading, name, world)
    was, now = of(saved, name, IN_MEMORY), of([found for found, _ in answers], name)
    assert max(float(x.abs().max()) for x in was["errors"]) > 1e-3
    step = 1e-6 if name == "onebit_adam" else max(float(x["scales"].max()) for x in scales_of(answers))
    torch.testing.assert_close(now["errors"], was["errors"], rtol=0, atol=1.01 * step)
    torch.testing.assert_close(now["momentum"], was["momentum"], rtol=0, atol=0)
    for _, params in answers[1:]:
        torch.testing.assert_close(params, answers[0][1], rtol=0, atol=0)


def scales_of(answers: list[Any]) -> list[dict[str, Tensor]]:
    return [{"scales": v} for found, _ in answers for k, v in found.items() if k.endswith("scales")]


def loading_dicts() -> list[str]:
    """Load each rank's own dict; return what is said."""
    params, opt = build("onebit_adam", 2)
    rank = torch.distributed.get_rank()
    saved = torch.load(SAVED / f"rank-{rank}.pt", weights_only=True)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        opt.load_state_dict(saved["onebit_adam"])
    texts = [str(w.message) for w in heard if "state_dict" in str(w.message)]
    assert not any(x.any() for k, x in opt.state_dict().items() if "sync" in k)
    taken(params, opt)
    _, opt = build("loco_adamw", 2)
    with pytest.raises(ValueError, match=r"holds its shards only.* load a folder that fn\.adapters\.checkpoint saved"):
        opt.load_state_dict(saved["loco_adamw"])
    return texts


def test_one_ranks_dict_continues_with_errors_of_zero_and_says_so():
    for texts in ranks.run(2, loading_dicts):
        text, clamp = texts
        assert "with elements in the order of memory" in text
        assert "start from zero" in text
        assert "was saved without max_step=1" in clamp


def test_an_order_that_is_none_is_refused_by_name():
    params = [nn.Parameter(torch.ones(2, 3))]
    opt = fn.Optimizer(params, fn.adamw, lr=1e-2)
    with pytest.raises(ValueError, match=r"'element order\.0\.0' .*2 dimensions.* got \(0, 2\)"):
        moved(opt.training, {"element order.0.0": torch.tensor([0, 2])})


def test_what_8_bit_errors_had_rounded_off_is_warned_of_with_its_norm():
    params = [nn.Parameter(torch.ones(3))]
    opt = fn.Optimizer(params, fn.adamw, lr=1e-2)
    with pytest.warns(UserWarning, match="norm 5 .*8-bit errors.* not carried on"):
        opt.load_state_dict({**opt.state_dict(), "carried.0.0": torch.tensor([3.0, 0.0, 4.0])})
