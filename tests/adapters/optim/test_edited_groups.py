"""Param groups that a script edits itself: refused by name at the next step, and what is no other parameter goes on."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist

import fn
from fn.adapters import checkpoint, ddp
from fn.adapters.deepspeed import OnebitAdam, OnebitLamb


def parameter(n: int) -> torch.nn.Parameter:
    p = torch.nn.Parameter(torch.ones(n))
    p.grad = torch.ones(n)
    return p


def groups() -> list[dict]:
    return [{"params": [("a", parameter(3)), ("b", parameter(3))]}, {"params": [("c", parameter(2))]}]


def members(opt: torch.optim.Optimizer, g: int = 0) -> list:
    return opt.param_groups[g]["params"]


def append_named(opt: torch.optim.Optimizer) -> None:
    members(opt).append(parameter(4))
    opt.param_groups[0]["param_names"].append("d")


def pop_named(opt: torch.optim.Optimizer) -> None:
    members(opt).pop()
    opt.param_groups[0]["param_names"].pop()


MOVED = "parameter a of param group 0 replaced or moved"
EDITS = {
    "a group more": (
        lambda opt: opt.param_groups.append({**opt.param_groups[0], "params": [parameter(4)], "param_names": ["d"]}),
        "parameter d of param group 2 added",
    ),
    "a group of none more": (lambda opt: opt.param_groups.append({"params": []}), "param group 2 added"),
    "a group in front": (
        lambda opt: opt.param_groups.insert(0, {**opt.param_groups[0], "params": [parameter(3)]}), MOVED,
    ),
    "the last group less": (lambda opt: opt.param_groups.pop(), "parameter c of param group 1 taken out"),
    "the first group less": (lambda opt: opt.param_groups.pop(0), MOVED),
    "no groups": (lambda opt: opt.param_groups.clear(), "parameter a of param group 0 taken out"),
    "groups turned": (lambda opt: opt.param_groups.reverse(), MOVED),
    "another list of groups": (lambda opt: setattr(opt, "param_groups", opt.param_groups[:1]), "c of param group 1"),
    "other groups": (lambda opt: opt.param_groups.__setitem__(slice(None), opt.param_groups[1:]), MOVED),
    "a parameter more": (append_named, "parameter d of param group 0 added"),
    "a parameter without a name more": (lambda opt: members(opt).append(parameter(4)), "of param group 0 added"),
    "a parameter of another group": (lambda opt: members(opt, 1).append(members(opt)[0]), "param group 1 added"),
    "a parameter less": (pop_named, "parameter b of param group 0 taken out"),
    "no parameters": (lambda opt: members(opt, 1).clear(), "parameter c of param group 1 taken out"),
    "no key": (lambda opt: opt.param_groups[1].pop("params"), "parameter c of param group 1 taken out"),
    "another parameter": (lambda opt: members(opt).__setitem__(1, parameter(3)), "parameter b of param group 0 repl"),
    "parameters turned": (lambda opt: members(opt).reverse(), MOVED),
    "a name less": (lambda opt: opt.param_groups[0]["param_names"].pop(), "a name for each of the 2 parameters"),
}  # fmt: skip
OF_EACH_CLASS = ("a group more", "groups turned", "another parameter")
"""What all classes of optimizers are asked; the rest of `fn.Optimizer`, whose look at groups is theirs."""

MAKES = {
    "fn.Optimizer": lambda: fn.Optimizer(groups(), fn.adamw, lr=0.1),
    "OnebitAdam": lambda: OnebitAdam(groups(), lr=0.1),
    "OnebitLamb": lambda: OnebitLamb(groups(), lr=0.1),  # all of its groups are one unit
}


def numbers(opt: fn.Optimizer) -> list[torch.Tensor]:
    return [x.clone() for x in fn.tree.leaves((opt.states, [unit.params for unit in opt.units]))]


def acts(folder: str) -> dict:
    return {
        "step": lambda opt: opt.step(),
        "add_param_group": lambda opt: opt.add_param_group({"params": [("x", parameter(2))]}),
        "state_dict": lambda opt: opt.state_dict(),
        "save": lambda opt: checkpoint.save(folder, opt),
        "load": lambda opt: checkpoint.load(folder, opt),
        "step of a copy": lambda opt: copy.deepcopy(opt).step(),
    }


@pytest.mark.parametrize(
    ("make", "edit"),
    [(make, edit) for make in MAKES for edit in EDITS if make == "fn.Optimizer" or edit in OF_EACH_CLASS],
)
def test_an_edit_is_refused_by_name_and_nothing_changes(make, edit, tmp_path):
    change, named = EDITS[edit]
    opt = MAKES[make]()
    opt.step()
    checkpoint.save(tmp_path, opt)
    before, steps, own = numbers(opt), opt.steps, [{**g, "params": [*g["params"]]} for g in opt.param_groups]
    names = [[*g["param_names"]] for g in own]
    change(opt)
    for act, run in acts(str(tmp_path)).items():
        if (act, make) == ("add_param_group", "OnebitLamb"):
            continue  # which refuses any
        with pytest.raises(ValueError, match=r"param_(groups|names): expected .*" + named) as error:
            run(opt)
        assert edit == "a name less" or "add_param_group" in str(error.value)
        assert "requires_grad_(False)" in str(error.value) or edit == "a name less"
    assert opt.steps == steps
    assert all(map(torch.equal, before, numbers(opt)))
    opt.param_groups = [{**g, "param_names": n} for g, n in zip(own, names, strict=True)]
    opt.step()
    assert opt.steps == steps + 1
    assert not torch.equal(before[-1], numbers(opt)[-1])


OF_NO_KIND = {
    "groups that are None": (lambda opt: setattr(opt, "param_groups", None), "parameter a of param group 0"),
    "a group that is None": (lambda opt: opt.param_groups.__setitem__(1, None), "parameter c of param group 1"),
    "a group that is a list": (
        lambda opt: opt.param_groups.__setitem__(0, members(opt)),
        "parameter a of param group 0",
    ),
    "params that are None": (lambda opt: opt.param_groups[1].update(params=None), "parameter c of param group 1"),
    "params that are a tensor": (
        lambda opt: opt.param_groups[1].update(params=members(opt, 1)[0]),
        "c of param group 1",
    ),
    "None in place of no parameters": (lambda opt: opt.param_groups.__setitem__(2, None), "param group 2"),
}


@pytest.mark.parametrize("make", [partial(fn.Optimizer, make=fn.adamw), OnebitAdam], ids=["fn.Optimizer", "OnebitAdam"])
@pytest.mark.parametrize("edit", OF_NO_KIND)
def test_what_holds_no_parameters_at_all_is_refused_like_what_lost_them(edit, make):
    change, named = OF_NO_KIND[edit]
    opt = make([*groups(), {"params": [], "param_names": []}], lr=0.1)
    before = numbers(opt)
    change(opt)
    with pytest.raises(ValueError, match=rf"param_groups: expected .*{named} .*taken out .*add_param_group"):
        opt.step()
    assert all(map(torch.equal, before, numbers(opt)))


def lists(opt: torch.optim.Optimizer) -> None:
    for group in opt.param_groups:
        group["params"] = [*group["params"]]


def tuples(opt: torch.optim.Optimizer) -> None:
    for group in opt.param_groups:
        group["params"] = (*group["params"],)


def dicts(opt: torch.optim.Optimizer) -> None:
    opt.param_groups = [dict(group) for group in opt.param_groups]


def dicts_in_place(opt: torch.optim.Optimizer) -> None:
    opt.param_groups[:] = [{**group, "lr": 0.5} for group in opt.param_groups]


def numbers_of_groups(opt: torch.optim.Optimizer) -> None:
    for group in opt.param_groups:
        group.update(lr=0.3, eps=0.1, weight_decay=0.1)


def another_group(opt: torch.optim.Optimizer) -> None:
    opt.add_param_group({"params": [("d", parameter(4))]})


def loaded(opt: torch.optim.Optimizer) -> None:
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def numbers_written(opt: torch.optim.Optimizer) -> None:
    members(opt)[0].data = torch.full((3,), 2.0)


@pytest.mark.parametrize(
    "change", [lists, tuples, dicts, dicts_in_place, numbers_of_groups, another_group, loaded, numbers_written]
)
@pytest.mark.parametrize("copied", [False, True])
def test_what_leaves_the_parameters_as_they_are_is_stepped_as_in_torch(change, copied):
    numbers = {"lr": 0.1, "weight_decay": 0.01}
    ours, theirs = fn.Optimizer(groups(), fn.adamw, **numbers), torch.optim.AdamW(groups(), **numbers)
    for opt in (ours, theirs):
        opt.step()
        change(opt)
    ours, theirs = copy.deepcopy((ours, theirs)) if copied else (ours, theirs)
    for opt in (ours, theirs):
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.full_like(p, -0.5)
        opt.step()
    for one, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        for p, q in zip(one["params"], other["params"], strict=True):
            torch.testing.assert_close(p, q)
            assert not torch.equal(p, torch.ones_like(p))


@pytest.mark.parametrize("make", [OnebitAdam, OnebitLamb])
def test_copies_in_float32_take_the_place_of_half_precision_before_the_first_step_as_in_deepspeed(make):
    half = [torch.nn.Parameter(torch.ones(n, dtype=torch.bfloat16)) for n in (3, 2)]
    opt = make([{"params": [p]} for p in half], lr=0.1)
    masters = [parameter(n) for n in (3, 2)]
    for group, p in zip(opt.param_groups, masters, strict=True):
        group["params"] = [p]
    opt.step()
    assert all(bool((p < 1).all()) for p in masters)
    members(opt)[0] = parameter(3)
    with pytest.raises(ValueError, match="parameter 0 of param group 0 replaced or moved by hand"):
        opt.step()


def test_a_copy_has_parameters_of_its_own():
    opt = fn.Optimizer(groups(), fn.adamw, lr=0.1)
    other = copy.deepcopy(opt)
    members(other)[0] = members(opt)[0]
    with pytest.raises(ValueError, match="parameter a of param group 0 replaced"):
        other.step()
    opt.step()


def on_ranks() -> dict[str, tuple[str, int]]:
    """Edit on both ranks; return what the next backward pass or step says, and the bytes that it has sent."""
    warnings.simplefilter("ignore")
    found = {}
    for way in ("serial", "overlap", "overlap of DDP"):
        group = dist.new_group()
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        with fn.bind({"data": group}):
            params = [{"params": layer.parameters()} for layer in model]
            opt = fn.Optimizer(params, partial(fn.onebit_adam, axis="data"), schedule=fn.freeze_after(1), lr=0.1)
        if way == "overlap of DDP":
            model = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
        if way != "serial":
            ddp.overlap(model, opt, least_wire_seconds=0.0)
        for step in range(4):
            before = numbers(opt)
            if step == 3:
                members(opt).append(parameter(4))
            try:
                with fn.ledger() as sent:
                    model(torch.ones(4, 3) * (1.0 + dist.get_rank())).sum().backward()
                    opt.step()
            except ValueError as error:
                same = all(map(torch.equal, before, numbers(opt)))
                found[way] = str(error), sent.total, opt.steps, same
        dist.barrier()
    return found


def test_on_ranks_nothing_is_sent_before_the_refusal():
    for found in ranks.run(2, on_ranks):
        assert [*found] == ["serial", "overlap", "overlap of DDP"]
        for text, sent, steps, same in found.values():
            assert "parameter 2 of param group 0 added by hand" in text
            assert "add_param_group" in text
            assert (sent, steps, same) == (0, 3, True)
