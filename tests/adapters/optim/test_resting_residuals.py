"""What codes have not delivered yet of a tensor that rests, they still owe it when it goes on."""

from __future__ import annotations

import copy
import functools
import itertools
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Cases, run

import fn

SHAPES = ((3, 2), (5,), (4, 3))
OFF = {3, 4, 8, 9, 10, 14, 17}
"""The steps in which the second tensor rests; behind the warm-up of those that have one."""
STEPS = 22


def gradient(t: int, i: int, rank: int) -> torch.Tensor:
    """Return small whole numbers, whose sums are exact."""
    seeded = torch.Generator().manual_seed(100 * t + 10 * i + rank)
    return torch.randint(-8, 9, SHAPES[i], generator=seeded).double()


@functools.cache
def mesh_of(*axes: tuple[str, int]) -> Any:
    """Return one mesh for all optimizers over these axes: new groups take longer than the steps over them."""
    names, sizes = zip(*axes, strict=True)
    return dist.device_mesh.init_device_mesh("cpu", sizes, mesh_dim_names=names)


def optimizer(make: Callable[..., fn.Transform], axes: dict[str, int], dtype: torch.dtype, warmup: int) -> fn.Optimizer:
    params = [torch.nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in SHAPES]
    with fn.bind(mesh_of(*axes.items())):
        lr, schedule = 0.01 if warmup else 1.0, fn.freeze_after(warmup)
        return fn.Optimizer(params, make, lr=lr, schedule=schedule, refuse_averaged=False)


def sgd(lr: Any, axis: Any, codec: Any, feedback: Any, **how: Any) -> fn.Transform:
    return fn.chain(fn.compressed_average(axis, codec, feedback, **how), fn.scale_by_learning_rate(lr))


def steps_of(opt: fn.Optimizer, steps: Sequence[int], off: set[int], copied: Callable[[Any], Any] | None = None) -> Any:
    """Return the second tensor after each step in which it does not rest, and the others in the end.

    Args: copied: what copies the optimizer half way.
    """
    found = []
    for t in steps:
        params = [p for group in opt.param_groups for p in group["params"]]
        for i, p in enumerate(params):
            p.requires_grad_(i != 1 or t not in off)
            p.grad = gradient(t, i, dist.get_rank()).to(p.dtype) if t >= 0 else torch.zeros_like(p)
        opt.step()
        if t not in off:
            found.append(params[1].detach().clone())
        if copied is not None and t == STEPS // 2:
            opt = copied(opt)
    return found, [p.detach().clone() for p in params]


def among(axes: dict[str, int], make: Any, dtype: torch.dtype, warmup: int, copied: Any = None) -> Any:
    """Return what `steps_of` returns with rests, without the steps of rest, and with no rest in any step."""
    resting = steps_of(optimizer(make, axes, dtype, warmup), range(STEPS), OFF, copied)
    without = steps_of(optimizer(make, axes, dtype, warmup), [t for t in range(STEPS) if t not in OFF], set())
    always = steps_of(optimizer(make, axes, dtype, warmup), range(STEPS), set())
    return resting, without, always


DATA = {"data": 2}
NODES = {"local": 2, "node": 2}
sgd_of = partial(partial, sgd)
BY_TENSOR: dict[str, tuple[dict[str, int], Callable[..., fn.Transform], int]] = {
    "top_k": (DATA, sgd_of(axis="data", codec=fn.top_k(1), feedback=fn.classic()), 0),
    "top_k, by tensor": (DATA, sgd_of(axis="data", codec=fn.top_k(1), feedback=fn.classic(), layout="per_tensor"), 0),
    "top_k, no servers": (DATA, sgd_of(axis="data", codec=fn.top_k(1), feedback=fn.classic(), servers=False), 0),
    "top_k, two axes": (NODES, sgd_of(axis=("local", "node"), codec=fn.top_k(1), feedback=fn.classic()), 0),
    "decayed": (DATA, sgd_of(axis="data", codec=fn.top_k(1), feedback=fn.decayed(0.9)), 0),
    "signs, a lazy error": (DATA, sgd_of(axis="data", codec=fn.sign(), feedback=fn.classic(lazy=True)), 0),
    "int4, a damped error": (DATA, sgd_of(axis="data", codec=fn.int4(), feedback=fn.damped()), 0),
    "int4, two hops": (
        NODES, sgd_of(axis=("local", "node"), codec=(fn.int4(), fn.int4()), feedback=fn.damped()), 0,
    ),
    "onebit_adam": (DATA, partial(fn.onebit_adam, axis="data", b1=0.01), 3),
    "loco_adamw": (DATA, partial(fn.loco_adamw, axis="data"), 3),
    "sharded_onebit_adam": (DATA, partial(fn.sharded_onebit_adam, axis="data", b1=0.01), 3),
    "ef21_sgdm": (DATA, partial(fn.contrib.ef21_sgdm, axis="data", k=0.5), 3),
}  # fmt: skip
"""Codes of these know where tensors end, so tensors do not change each other.

In 1-bit Adam the age of a momentum goes on while the second moment is frozen, so its correction is made small here.
"""


two, four = Cases(2), Cases(4)
DTYPES = {"in place": torch.float32, "pure": torch.float64}
ALSO_PURE = ("top_k", "int4, two hops", "onebit_adam", "sharded_onebit_adam")
"""One of each kind of steps; the rest of them is the same in place and not."""
CASES = [(name, way) for name in BY_TENSOR for way in DTYPES if way == "in place" or name in ALSO_PURE]


def among_all(over: dict[str, int]) -> dict[tuple[str, str], Any]:
    found = {}
    for name, way in CASES:
        axes, make, warmup = BY_TENSOR[name]
        if axes == over:
            found[name, way] = among(axes, make, DTYPES[way], warmup)
    return found


@two
def over_one_axis() -> Any:
    return among_all(DATA)


@four
def over_two_axes() -> Any:
    return among_all(NODES)


@pytest.mark.parametrize(("name", "way"), CASES)
def test_behind_a_rest_a_tensor_goes_on_as_if_the_steps_of_its_rest_had_not_been(name, way):
    of_ranks = four.answer("over_two_axes") if BY_TENSOR[name][0] == NODES else two.answer("over_one_axis")
    for answers in of_ranks:
        (found, (first, _, last)), (right, _), (_, (first_always, _, last_always)) = answers[name, way]
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close((first, last), (first_always, last_always), rtol=1e-4, atol=1e-5)


def pickled(opt: Any) -> Any:
    return pickle.loads(pickle.dumps(opt))


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_a_copy_of_the_optimizer_goes_on_so_too(copied):
    (found, _), (right, _), _ = run(1, alone, copied)[0]
    torch.testing.assert_close(found, right, rtol=0, atol=0)


def alone(copied: Any) -> Any:
    return among({"data": 1}, BY_TENSOR["top_k"][1], torch.float32, 0, copied)


FEEDBACKS = {
    "classic": (fn.classic(), 0.0),
    "bf16": (fn.classic(store="bfloat16"), 2.0),
    "int8": (fn.classic(store="int8"), 4.0),
}
"""With how much may be lost when errors are stored."""


def delivered(make: Callable[..., fn.Transform], dtype: torch.dtype, axes: dict[str, int]) -> Any:
    """Return the tensors after all was delivered, which steps with gradients of zero see to, and what is right."""
    opt = optimizer(make, axes, dtype, 0)
    # More steps than it takes to deliver each number of each rank, and what servers keep of it.
    _, params = steps_of(opt, [*range(STEPS), *[-1] * 60], OFF)
    ranks = range(dist.get_world_size())
    right = [-sum(gradient(t, i, r) for t in range(STEPS) if i != 1 or t not in OFF for r in ranks) / len(ranks)
             for i in range(len(SHAPES))]  # fmt: skip
    return params, right


WAYS = [
    *itertools.product(["classic"], ("flat", "fused", "per_tensor"), ("servers", "no servers")),
    *itertools.product(["bf16"], ("flat", "fused"), ["servers"]),
    *itertools.product(["int8"], ("flat", "per_tensor"), ["no servers"]),
    ("int8", "fused", "servers"),
]


@two
def delivered_in_all_ways() -> Any:
    found = {}
    for feedback, layout, servers in WAYS:
        codes = {"codec": fn.top_k(3), "feedback": FEEDBACKS[feedback][0], "layout": layout}
        make = partial(sgd, axis="data", **codes, servers=servers == "servers")
        found[feedback, layout, servers] = delivered(make, torch.float64, DATA)
    return found


@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_nothing_is_lost_of_what_rests_nor_of_what_lies_beside_it(way):
    for answers in two.answer("delivered_in_all_ways"):
        params, right = answers[way]
        torch.testing.assert_close([*params], [*right], rtol=0, atol=FEEDBACKS[way[0]][1])


@two
def messages() -> list[dict[tuple[str, str], Any]]:
    """Return what each of three steps sends; in the second one a tensor rests."""
    opt, sent = optimizer(BY_TENSOR["int4, a damped error"][1], DATA, torch.float32, 0), []
    for t in range(3):
        with fn.ledger() as ledger:
            steps_of(opt, [t], {1})
        sent.append(dict(ledger.sent))
    return sent


def test_a_rest_sends_nothing_more():
    for first, resting, last in two.answer("messages"):
        assert first
        assert resting == last
