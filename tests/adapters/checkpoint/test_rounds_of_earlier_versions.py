"""Version 0.2.0 saved rounds without the fields `left_out` and `begun`: they go on, in the middle of a round, too.

`saved_by_0.2.0/diloco` is what `saving` wrote on commit a10a622.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor

import fn
from fn import tree
from fn.adapters import checkpoint

SAVED = Path(__file__).parent / "saved_by_0.2.0" / "diloco"
STEPS, END = (9, 11), 18
"""Steps before which is saved: while the mean of fragment 0 waits for its end, and between two rounds."""

MAKE = partial(fn.diloco, axis="data", fragments=2, alpha=0.5)
SCHEDULE = fn.every(6, fragments=2, delay=2, start=2)
NEW = ("left_out", "begun")


def start() -> list[Tensor]:
    return [torch.linspace(-1, 1, n, dtype=torch.float32) for n in (5, 3)]


def gradients(step: int, params: list[Tensor]) -> list[Tensor]:
    return [p.detach() + torch.sin(3.0 * step + dist.get_rank() + torch.arange(len(p))) for p in params]


def optimizer() -> fn.Optimizer:
    with fn.bind({"data": dist.group.WORLD}):
        return fn.Optimizer([torch.nn.Parameter(p) for p in start()], MAKE, schedule=SCHEDULE, lr=0.02)


def params_of(opt: fn.Optimizer) -> list[Tensor]:
    return opt.param_groups[0]["params"]


def train(opt: fn.Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        for p, g in zip(params_of(opt), gradients(step, params_of(opt)), strict=True):
            p.grad = g
        opt.step()
    return [p.detach().clone() for p in params_of(opt)]


def loop(params: list[Tensor], state: Any, steps: range) -> tuple[list[Tensor], Any]:
    """Take the steps of a loop of one's own."""
    with fn.bind({"data": dist.group.WORLD}):
        for step in steps:
            updates, state = MAKE(lr=0.02).update(SCHEDULE(step))(gradients(step, params), state, params)
            params = fn.apply_updates(params, updates)
    return params, state


def fresh() -> Any:
    with fn.bind({"data": dist.group.WORLD}):
        return MAKE(lr=0.02).init(start())


def saving(folder: str) -> None:
    """Save before each of `STEPS` by each way there is, and note where the training ended."""
    opt, found = optimizer(), dict[str, Any]()
    params, state = start(), fresh()
    for first, last in zip((0, *STEPS), (*STEPS, END), strict=True):
        if first:
            checkpoint.save(folder, opt)
            leaves = [x.clone() for x in tree.leaves(state)]
            found[f"leaves {first}"] = params, dict(zip(tree.paths(state), leaves, strict=True))
            found[f"dict {first}"] = opt.state_dict(), [p.detach() for p in params_of(opt)]
            found = {key: copied(value) for key, value in found.items()}
        train(opt, range(first, last))
        params, state = loop(params, state, range(first, last))
    found["end"], found["end of leaves"] = [p.detach() for p in params_of(opt)], params
    torch.save(found, Path(folder) / f"rank-{dist.get_rank()}.pt")


def copied(value: Any) -> Any:
    return tree.map(torch.clone, value)


def going_on(folder: str, step: int, way: str) -> tuple[list[Tensor], list[Tensor], list[int]]:
    """Go on from what was saved; return the params at the end, those there, and how much of the new fields was left."""
    saved = torch.load(Path(folder) / f"rank-{dist.get_rank()}.pt", weights_only=True)
    if way == "leaves":
        params, leaves = saved[f"leaves {step}"]
        state = fresh()
        new = [key for key in leaves if not {*key.split(".")[-2:]}.isdisjoint(NEW)]
        leaves |= fn.roles.added(state, leaves)
        state = tree.unflatten(tree.flatten(state)[1], [leaves[path] for path in tree.paths(state)])
        return loop(params, state, range(step, END))[0], saved["end of leaves"], [len(new)]
    opt = optimizer()
    flat, params = saved[f"dict {step}"]
    if way == "folder":
        checkpoint.load(folder, opt, name=f"step-{step:012d}-0")
    else:
        opt.load_state_dict(flat)
        with torch.no_grad():
            for p, x in zip(params_of(opt), params, strict=True):
                p.copy_(x)
    new = [key for key in flat if any(f".{name}" in key for name in NEW)]
    return train(opt, range(step, END)), saved["end"], [len(new)]


def all_ways(folder: str) -> dict[tuple[int, str], Any]:
    return {(step, way): going_on(folder, step, way) for step in STEPS for way in ("folder", "dict", "leaves")}


@pytest.mark.parametrize("version", ["0.2.0", "this one"])
def test_rounds_that_were_saved_go_on_where_they_went(version, tmp_path):
    folder = SAVED if version == "0.2.0" else tmp_path
    if version != "0.2.0":
        ranks.run(2, saving, str(folder))
    for answers in ranks.run(2, all_ways, str(folder)):
        assert len(answers) == 6
        for went, wanted, new in answers.values():
            assert (new == [0]) == (version == "0.2.0")
            torch.testing.assert_close(went, wanted, rtol=0, atol=1e-6)


def on_three(folder: str) -> list[Any]:
    """Return the anchors before and after the round ends; of a rank's own params nothing is kept."""
    opt = optimizer()
    checkpoint.load(folder, opt, name="step-000000000009-0")
    found = []
    for steps in (range(0), range(9, 11)):
        train(opt, steps)
        (state,) = tree.instances(opt.states, fn.transforms.outer.OuterState)
        found.append([x.clone() for x in state.anchor])
    return found


def test_a_round_that_0_2_0_began_ends_on_another_number_of_ranks():
    first, *others = ranks.run(3, on_three, str(SAVED))
    assert not torch.equal(first[0][0], first[1][0])
    for found in others:
        torch.testing.assert_close(found, first, rtol=0, atol=0)


class CountedState(NamedTuple):
    """A state whose class got two fields."""

    mu: Tensor
    tokens: Tensor
    seen: Any

    @property
    def added(self) -> dict[str, float]:
        return {"tokens": 7, "seen": True}


class WrongState(NamedTuple):
    """A state whose class names what it does not have."""

    mu: Tensor
    added = {"nu": 0}  # noqa: RUF012


def test_a_class_says_what_its_new_fields_were():
    zero = torch.tensor(0)
    state = ({"a": CountedState(torch.zeros(2), zero, [torch.tensor(False), zero])}, [torch.ones(1)])
    lacking = {path: x for path, x in zip(tree.paths(state), tree.leaves(state), strict=True) if path.endswith("mu")}
    found = fn.roles.added(state, lacking)
    assert {path: x.item() for path, x in found.items()} == {"0.a.tokens": 7, "0.a.seen.0": True, "0.a.seen.1": 1}
    assert found["0.a.seen.0"].dtype == torch.bool
    assert fn.roles.added(state, {*lacking, "0.a.seen.1"}).keys() == {"0.a.tokens"}
    assert fn.roles.added(state, tree.paths(state)) == {}
    assert fn.roles.added(state, [f"state.{path}" for path in tree.paths(state)], "state.") == {}
    with pytest.raises(ValueError, match=r"expected WrongState\.added to name fields .* but got 'nu'"):
        fn.chain(fn.lift(lambda params: WrongState(torch.zeros(1)), lambda u, s, p: (u, s))).init([torch.zeros(1)])


def test_an_optimizer_refuses_what_lacks_half_of_a_new_field():
    opt = fn.Optimizer([torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))], MAKE, schedule=SCHEDULE)
    saved = opt.state_dict()
    (path,) = (key for key in saved if key.endswith("begun.1"))
    with pytest.raises(ValueError, match=r"begun\.1' is missing"):
        opt.load_state_dict({key: x for key, x in saved.items() if key != path})
