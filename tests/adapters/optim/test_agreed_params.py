"""`agreed_params`: what all ranks agree on, in the place of a rank's own params, for as long as a context lasts."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import chains
import own_pieces
import pytest
import ranks
import registry
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fn
import fn.adapters
from fn import tree
from fn.adapters import agreed_params, checkpoint, deepspeed

STEPS = 14
SHAPES = [(5, 7), (5, 7), (7,), (5, 7), (), (0, 3)]

two = ranks.Cases(2)


def in_parts(lr: Any, axis: str) -> fn.Transform:
    """Return local steps with another outer optimizer for every second param; all matrices have one shape."""
    each = {"a": fn.diloco(lr, axis=axis), "b": fn.diloco(lr, axis=axis, outer_lr=0.3)}
    return fn.partition(each, lambda params: ["ab"[i % 2] for i in range(len(params))])


METHODS: dict[str, tuple[Any, Any, torch.dtype]] = {
    "diloco": (fn.diloco, fn.every(4, start=2), torch.float32),
    "store in float16": (partial(chains.diloco, store=torch.float16), fn.every(4, start=2), torch.float32),
    "fragments": (partial(chains.diloco, fragments=2, alpha=0.5), fn.every(6, fragments=2, delay=2), torch.float32),
    "partition": (in_parts, fn.every(4), torch.float32),
    "0/1 Adam": (fn.zero_one_adam, fn.zero_one_schedule(3, 2, 2, 4), torch.float32),
    "1-bit Adam": (fn.onebit_adam, fn.freeze_after(2), torch.float32),
}


def params_of(opt: fn.Optimizer) -> list[Tensor]:
    return [p.detach().clone() for group in opt.param_groups for p in group["params"]]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def everyones(params: list[Tensor]) -> list[list[Tensor]]:
    flat = torch.cat([p.flatten() for p in params])
    rows = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, flat)
    pieces = [row.split([p.numel() for p in params]) for row in rows]
    return [[x.view_as(p) for x, p in zip(of_rank, params, strict=True)] for of_rank in pieces]


def build(make: Any, schedule: Any, dtype: torch.dtype) -> fn.Optimizer:
    generator = torch.Generator().manual_seed(7)
    params = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]
    params[2].requires_grad_(False)
    groups = [{"params": params[:5]}, {"params": params[5:], "lr": 0.01}]
    with fn.bind({"data": dist.group.WORLD}):
        return fn.Optimizer(groups, partial(make, axis="data"), schedule=schedule, lr=0.02)


def take(opt: fn.Optimizer, step: int) -> None:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    for group in opt.param_groups:
        for p in group["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) if p.requires_grad else None
    opt.step()


@two
def in_all_steps() -> dict[str, dict[str, Any]]:
    found = {}
    for name, (make, schedule, dtype) in METHODS.items():
        opt, twin = build(make, schedule, dtype), build(make, schedule, dtype)
        alike, as_exchanged, back, apart = [], [], [], 0
        agreed = params_of(opt)
        for step in range(STEPS):
            take(opt, step)
            take(twin, step)
            before = params_of(opt)
            if all(same(before, other) for other in everyones(before)):
                agreed = before  # an exchange has brought the ranks together
            with agreed_params(opt):
                inside = params_of(opt)
            apart += not same(inside, before)
            alike.append(all(same(inside, other) for other in everyones(inside)))
            as_exchanged.append(same(inside, agreed))
            back.append(same(params_of(opt), before))
        found[name] = {
            "alike": all(alike),
            "as exchanged": all(as_exchanged),
            "back": all(back),
            "apart": apart,
            "training": same(params_of(opt), params_of(twin)),
        }
    return found


@pytest.mark.parametrize("name", METHODS)
def test_inside_all_ranks_have_the_params_of_the_last_exchange_and_outside_their_own(name):
    for every in two.answer("in_all_steps"):
        found = every[name]
        assert found["alike"]
        if name not in ("fragments", "store in float16"):  # whose exchanges leave the ranks apart, or round
            assert found["as exchanged"]
        assert found["back"]
        assert (found["apart"] > 0) == (name != "1-bit Adam")
        assert found["training"]


@two
def without_anchor() -> tuple[bool, float]:
    """0/1 Adam as DeepSpeed has it: the sum of the steps since is taken back."""
    params = [nn.Parameter(torch.ones(6))]
    with fn.bind({"data": dist.group.WORLD}):
        opt = deepspeed.ZeroOneAdam(params, lr=0.02, var_freeze_step=2, local_step_scaler=2, local_step_clipper=4)
    far, apart = 0.0, False
    for step in range(STEPS):
        take(opt, step)
        with agreed_params(opt):
            inside = everyones(params_of(opt))
        apart = apart or not same(*everyones(params_of(opt)))
        far = max(far, float((inside[0][0] - inside[1][0]).abs().max()))
    return apart, far


def test_without_an_anchor_the_steps_since_are_taken_back():
    for apart, far in two.answer("without_anchor"):
        assert apart
        assert far <= 1e-6


@two
def on_one_rank() -> bool:
    """Enter on rank 0 alone, while a mean travels."""
    opt = build(fn.diloco, fn.every(4, delay=3), torch.float32)
    twin = build(fn.diloco, fn.every(4, delay=3), torch.float32)
    for step in range(STEPS):
        take(opt, step)
        take(twin, step)
        if dist.get_rank() == 0:
            with agreed_params(opt):
                pass
    return same(params_of(opt), params_of(twin))


def test_a_rank_may_enter_alone_while_a_mean_travels():
    assert all(two.answer("on_one_rank"))


@two
def of_shards() -> dict[str, bool]:
    """Islands of FSDP2."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("island", "shard"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["shard"])
    with fn.bind(mesh["island"]):
        opt = fn.Optimizer(model.parameters(), partial(fn.diloco, axis="island"), schedule=fn.every(4), lr=0.02)
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(1))

    def answer() -> Tensor:
        with torch.no_grad():
            found = model(x).clone()
        model.reshard()
        return found

    first = answer()
    for step in range(3):
        noise = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(noise).square().mean().backward()
        opt.step()
        opt.zero_grad()
    before = answer()
    with agreed_params(opt):
        inside = answer()
    return {"agreed": torch.equal(inside, first), "apart": not torch.equal(before, first),
            "back": torch.equal(answer(), before)}  # fmt: skip


def test_shards_of_fsdp2_are_exchanged_and_come_back():
    for found in two.answer("of_shards"):
        assert found == {"agreed": True, "apart": True, "back": True}


def alone(make: Any = None, schedule: Any = None) -> tuple[nn.Parameter, fn.Optimizer]:
    """Return a parameter of ones and its optimizer, behind a local step."""
    p = nn.Parameter(torch.ones(3))
    opt = fn.Optimizer([p], make or partial(fn.diloco, axis="data"), schedule=schedule or fn.every(4), lr=0.1)
    p.grad = torch.ones(3)
    opt.step()
    return p, opt


def test_params_come_back_where_the_body_raises():
    p, opt = alone()
    before = p.detach().clone()

    def evaluate() -> None:
        with agreed_params(opt):
            assert torch.equal(p, torch.ones(3))
            raise KeyError

    with pytest.raises(KeyError):
        evaluate()
    assert torch.equal(p, before)
    assert not torch.equal(p, torch.ones(3))
    opt.step()


def test_contexts_may_be_nested():
    p, opt = alone()
    before = p.detach().clone()
    with agreed_params(opt):
        with agreed_params(opt):
            assert torch.equal(p, torch.ones(3))
        assert torch.equal(p, torch.ones(3))
        with pytest.raises(RuntimeError):
            opt.step()
    assert torch.equal(p, before)


@pytest.mark.parametrize("what", ["step", "load_state_dict", "add_param_group", "checkpoint"])
def test_what_would_be_lost_at_the_end_is_refused_by_name(what, tmp_path):
    p, opt = alone()
    calls = {
        "step": opt.step,
        "load_state_dict": lambda: opt.load_state_dict(opt.state_dict()),
        "add_param_group": lambda: opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        "checkpoint": lambda: checkpoint.save(tmp_path, opt, {"model": p.detach()}),
    }
    before, steps = p.detach().clone(), opt.steps
    with (
        agreed_params(opt),
        pytest.raises(RuntimeError, match=rf"^{what}: refused, for fn.adapters.agreed_params .* leave that context"),
    ):
        calls[what]()
    assert torch.equal(p, before)
    assert opt.steps == steps
    calls[what]()


def test_a_backward_pass_over_the_swap_is_refused_by_torch():
    p, opt = alone()
    loss = (p * p).sum()
    with agreed_params(opt):
        pass
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_params_of_which_nobody_knows_what_is_agreed_on_are_refused():
    inner = fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(0.1))
    _, opt = alone(lambda lr: own_pieces.meeting(inner, "data", ["outer"]))
    text = "but got MetState, which has local_params; evaluate behind"
    with pytest.raises(ValueError, match=text), fn.adapters.agreed_params(opt):
        pass


@pytest.mark.parametrize("make", [method.make for method in registry.APART])
def test_methods_whose_ranks_never_agree_are_refused_with_what_to_evaluate(make):
    _, opt = alone(partial(make, axis="data"), fn.every(4))
    text = "optimizer: expected a transform whose state has .* evaluate behind an exchange of all params, or .* mean"
    with pytest.raises(ValueError, match=text), agreed_params(opt):
        pass


def test_a_copy_of_an_optimizer_made_inside_may_step():
    p, opt = alone()
    with agreed_params(opt):
        twin = copy.deepcopy(opt)
    (q,) = twin.param_groups[0]["params"]
    assert torch.equal(q, torch.ones(3))
    q.grad = torch.ones(3)
    twin.step()
    assert int(tree.fields(twin.states, "alone")[0]) == 2
    assert p.grad is not None
