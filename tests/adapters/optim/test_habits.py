"""What people do with torch's optimizers besides stepping them: settings of the process, empty groups, copies."""

from __future__ import annotations

import copy
import pickle
import warnings
from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from registry import OPTIMIZERS, each_optimizer
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, tree


def run(optimizer, groups, steps: int = 30) -> fn.Optimizer:
    """Take steps through all phases of an optimizer."""
    schedule = optimizer.schedule if len(optimizer.phases) > 1 else None
    opt = fn.Optimizer(groups, partial(optimizer.make, axis="data"), schedule=schedule, lr=optimizer.lr)
    go_on(opt, 0, steps)
    return opt


def go_on(opt: fn.Optimizer, first: int, last: int) -> None:
    for t in range(first, last):
        generator = torch.Generator().manual_seed(t)
        for group in opt.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p.dtype)
        opt.step()


two = ranks.Cases(2)


@two
def built_from_other_numbers() -> list[str]:
    """Build optimizers over parameters of which one differs between the ranks; return what each said."""
    rank, found = dist.get_rank(), []
    alike, unlike = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.tensor([1.0, 1.0 + rank]))
    hidden = lambda lr: fn.adamw(lr, axis="data")  # noqa: E731  # the axis can be seen in its transform only
    averaging = (*(o.make for o in OPTIMIZERS), fn.diloco)
    for make in [*(partial(make, axis="data") for make in averaging), hidden, fn.adamw]:
        with fn.bind({"data": dist.group.WORLD}):
            opt = fn.Optimizer([("alike", alike)], make)
            try:
                opt.add_param_group({"params": [("unlike", unlike)]})
            except fn.RanksDisagree as error:
                found.append(f"{error.field}, rank {error.rank}; {len(opt.states)} group stays")
            else:
                found.append("accepted")
    with fn.bind(init_device_mesh("cpu", (2, 1), mesh_dim_names=("model", "data"))):
        fn.Optimizer([unlike], hidden)  # these ranks hold different parts of a model
    return found


def test_ranks_that_start_from_other_numbers_are_refused():
    """Nothing else would say so: the updates are the same, so the parameters stay apart for ever."""
    refused = "parameter unlike in group 1, rank 1; 1 group stays"
    for found in two.answer("built_from_other_numbers"):
        assert found == [*(refused for _ in OPTIMIZERS), refused, refused, "accepted"]


@each_optimizer
def test_a_group_without_parameters_takes_part_in_every_phase(optimizer):
    """As models leave behind whose norms, say, were to get a group of their own and that have none."""
    alone, beside = (torch.nn.Parameter(torch.linspace(-1, 1, 9)) for _ in range(2))
    run(optimizer, [{"params": [alone]}])
    opt = run(optimizer, [{"params": []}, {"params": [beside]}])
    torch.testing.assert_close(beside, alone)
    assert opt.skipped == 0


@each_optimizer
def test_a_pickled_optimizer_goes_on_bit_for_bit(optimizer):
    """With its schedule, its parameters and its errors, as what a trainer sends to another process."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 9))
    opt = run(optimizer, [p], steps=10)
    copy = pickle.loads(pickle.dumps(opt))
    assert copy.param_groups[0]["params"][0] is not p
    for o in (opt, copy):
        go_on(o, 10, 30)
    assert torch.equal(copy.param_groups[0]["params"][0], p)
    assert copy.steps == opt.steps == 30
    assert all(map(torch.equal, tree.leaves(copy.states), tree.leaves(opt.states)))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))])
def test_a_copy_beside_a_scheduler_steps_itself_and_not_the_original(copied):
    """A scheduler puts a `step` of its own into an optimizer, which goes on with that one."""
    p = torch.nn.Parameter(torch.ones(3))
    opt = fn.Optimizer([p], fn.adamw, lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(opt, 0.5)
    go_on(opt, 0, 2)
    scheduler.step()
    before = p.detach().clone()
    other, its_scheduler = copied((opt, scheduler))
    assert its_scheduler.optimizer is other
    go_on(other, 2, 3)
    its_scheduler.step()
    assert (opt.steps, other.steps) == (2, 3)
    assert (opt.param_groups[0]["lr"], other.param_groups[0]["lr"]) == (0.05, 0.025)
    assert torch.equal(p, before)
    go_on(opt, 2, 3)
    assert torch.equal(p, other.param_groups[0]["params"][0])  # taken at the same rate


@each_optimizer
def test_weights_that_are_loaded_after_the_optimizer_was_made_are_those_that_are_trained(optimizer):
    """Master params in the state lead back to where they were, unless they follow."""
    p = torch.nn.Parameter(torch.linspace(-1, 1, 9).bfloat16())
    opt = run(optimizer, [p], steps=0)
    for first in (0, 1):
        with torch.no_grad():
            p.copy_(torch.linspace(3, 7, 9) + first)
        before = p.detach().clone()
        go_on(opt, first, first + 1)
        assert (p - before).abs().max() < 0.5


def test_a_param_group_shows_every_number_that_its_transform_was_made_of():
    """What people print, and what they write into."""
    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    groups = [{"params": [p], "name": "head"}, {"params": [q], "betas": (0.8, 0.99), "weight_decay": 0.5}]
    opt = fn.Optimizer(groups, partial(fn.onebit_adam, axis="data", eps=1e-5), lr=0.1)
    flags = {"servers": True, "max_step": 3.0}
    found = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in opt.param_groups]
    assert found[0] == {"name": "head", "betas": (0.9, 0.95), "eps": 1e-5, "weight_decay": 0.0, **flags}
    assert found[1] == {"betas": (0.8, 0.99), "eps": 1e-5, "weight_decay": 0.5, **flags}
    assert "weight_decay: 0.5" in repr(opt)


def test_betas_are_another_spelling_of_b1_and_b2():
    ends = []
    for given in ({"betas": (0.5, 0.9)}, {"b1": 0.5, "b2": 0.9}):
        p = torch.nn.Parameter(torch.ones(3))
        opt = fn.Optimizer([p], fn.adamw, lr=0.1, **given)
        go_on(opt, 0, 3)
        assert opt.param_groups[0]["betas"] == (0.5, 0.9)
        opt.param_groups[0]["betas"] = (0.7, 0.9)
        go_on(opt, 3, 6)
        ends.append(p.detach())
    assert torch.equal(*ends)
    with pytest.raises(TypeError, match=r"betas: expected one of the two spellings .*, but got betas and b1"):
        fn.Optimizer([p], fn.adamw, betas=(0.5, 0.9), b1=0.5)
    with pytest.raises(ValueError, match=r"betas: expected a pair, \(b1, b2\), but got 0\.9"):
        fn.Optimizer([p], fn.adamw, betas=0.9)


def test_a_groups_own_b1_stands_before_the_betas_of_the_others():
    p, q, r = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
    opt = fn.Optimizer([{"params": [p], "b1": 0.5}, {"params": [q]}], partial(fn.adamw, b2=0.99), b1=0.8)
    opt.add_param_group({"params": [r], "b2": 0.9})
    assert [group["betas"] for group in opt.param_groups] == [(0.5, 0.99), (0.8, 0.99), (0.8, 0.9)]
    assert not any({"b1", "b2"} & group.keys() for group in opt.param_groups)


@pytest.mark.parametrize("given", [{}, {"betas": (0.9, 0.999)}, {"b1": 0.9}], ids=["by default", "betas", "b1"])
@pytest.mark.parametrize("scheduler", ["OneCycleLR", "CyclicLR"])
def test_schedulers_that_cycle_the_momentum_cycle_the_first_of_the_betas(scheduler, given):
    """As with torch's Adam: the values that were written are those of the step, through the freeze, too."""
    made = []

    def make(lr, b1=0.9, b2=0.999):
        made.append(b1)
        return fn.onebit_adam(lr, b1, b2, axis="data")

    p, q = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    opt = fn.Optimizer([p], make, schedule=fn.freeze_after(4), lr=0.01, **given)
    theirs = torch.optim.Adam([q], lr=0.01, betas=(0.9, 0.999))
    options = {"total_steps": 10} if scheduler == "OneCycleLR" else {"step_size_up": 4}
    rates = {"max_lr": 0.1} if scheduler == "OneCycleLR" else {"base_lr": 0.01, "max_lr": 0.1}
    schedulers = [getattr(torch.optim.lr_scheduler, scheduler)(o, **rates, **options) for o in (opt, theirs)]
    for t in range(8):
        go_on(opt, t, t + 1)
        theirs.step()
        assert made[-1] == theirs.param_groups[0]["betas"][0]
        for s in schedulers:
            s.step()
    assert len(set(made)) > 4
    assert torch.isfinite(p).all()


@two
def compresses_without_a_schedule() -> list[str]:
    """Return what building each optimizer without a schedule warned of."""
    found = []
    for make in [*(o.make for o in OPTIMIZERS), fn.powersgd_adamw]:
        with warnings.catch_warnings(record=True) as caught, fn.bind({"data": dist.group.WORLD}):
            warnings.simplefilter("always")
            fn.Optimizer([torch.nn.Parameter(torch.ones(32, 32))], partial(make, axis="data"))
        found.append(" ".join(str(w.message) for w in caught))
    return found


def test_without_a_schedule_several_ranks_are_warned_that_nothing_is_compressed():
    text = "schedule: is None, so every step is a warm-up step; pass fn.freeze_after(n) for the compressed phase"
    for found in two.answer("compresses_without_a_schedule"):
        assert found == [*(text if Phase.COMPRESSED in o.phases else "" for o in OPTIMIZERS), text]


@two
def warned_of_no_axis() -> list[bool]:
    """Return whether building an optimizer warned that nothing is averaged, without an axis and with one."""
    found = []
    for make, options in ((fn.adamw, {}), (fn.adamw, {"axis": "data"}), (partial(fn.adamw, axis="data"), {})):
        with warnings.catch_warnings(record=True) as caught, fn.bind({"data": dist.group.WORLD}):
            warnings.simplefilter("always")
            fn.Optimizer([torch.nn.Parameter(torch.ones(3))], make, **options)
        found.append(any("axis: is None, so gradients are not averaged" in str(w.message) for w in caught))
    return found


def test_without_an_axis_several_ranks_are_warned_that_each_trains_alone():
    assert two.answer("warned_of_no_axis") == [[True, False, False]] * 2
    assert ranks.run(1, warned_of_no_axis) == [[False, False, False]]


def warned_of_kernels(numba: bool, elements: int) -> list[str]:
    """Return what building optimizers warned of where Numba is installed, or is not."""
    ranks.without(*([] if numba else ["numba"]))
    with warnings.catch_warnings(record=True) as caught, fn.bind({"data": dist.group.WORLD}):
        warnings.simplefilter("always")
        for make, schedule in ((fn.onebit_adam, fn.freeze_after(3)), (fn.adamw, None)):
            params = [torch.nn.Parameter(torch.ones(elements))]
            fn.Optimizer(params, partial(make, axis="data"), schedule=schedule)
    return [str(w.message) for w in caught]


@pytest.mark.parametrize(("numba", "elements"), [(True, 1 << 20), (False, 3), (False, 1 << 20)])
def test_where_no_kernel_makes_codes_large_models_are_warned_of(numba, elements):
    for found in ranks.run(2, warned_of_kernels, numba, elements):
        text = "kernels: none for 'cpu' are fused, so codes are made in plain torch"
        assert [text in said for said in found] == [True] * (elements > 3 and not numba)


@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb", "zero_one_adam", "loco_adamw", "sharded_onebit_adam"])
@pytest.mark.parametrize("thaw", [1, 4])
def test_a_parameter_whose_first_gradient_comes_after_the_warm_up_is_warned_of_if_it_cannot_move(name, thaw):
    """A backbone that is thawed: its second moment is zero, and the freeze keeps it there."""
    make = next(o.make for o in OPTIMIZERS if o.name == name)
    body, head = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    schedule = lambda t: Phase.WARMUP if t < 3 else Phase.COMPRESSED  # noqa: E731
    opt = fn.Optimizer([("body", body), ("head", head)], partial(make, axis="data"), schedule=schedule)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(8):
            head.grad = torch.ones(3)
            body.grad = torch.ones(3) if t >= thaw else None
            opt.step()
    stuck = thaw == 4 and name not in ("loco_adamw", "sharded_onebit_adam")  # of shards it is not known
    assert ["params: body of group 0: get first gradients after" in str(w.message) for w in caught] == [True] * stuck
    assert all(w.filename == __file__ for w in caught)  # it names the line that called step


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("name", ["onebit_adam", "onebit_lamb"])
def test_what_comes_after_the_freeze_is_shrunk_by_weight_decay_as_the_warning_says(name, added, decay):
    make = next(o.make for o in OPTIMIZERS if o.name == name)
    body, head = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    given = [head] if added else [body, head]
    make = partial(make, axis="data", weight_decay=decay)
    opt = fn.Optimizer(given, make, schedule=fn.freeze_after(3), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(14):
            if added and t == 4:
                opt.add_param_group({"params": [body]})
            head.grad = torch.ones(3)
            body.grad = torch.ones(3) if t >= 4 else None
            opt.step()
    assert bool((body < 1).all()) == (decay > 0)
    if name == "onebit_adam":
        torch.testing.assert_close(body.detach(), torch.full((3,), (1 - 0.1 * decay) ** 10))
    said = [str(w.message) for w in caught if "after the warm-up" in str(w.message)]
    assert said
    for text in said:
        assert "no gradient moves them" in text
        assert "weight decay, if there is any, shrinks them" in text


def gone_on(lazy: bool) -> tuple[str, tuple[float, float], bool]:
    """Load a state of signs with one scale per tensor; return what load said, b2 and clamp, and whether it stepped."""
    before = {"b2": 0.999, "codec": fn.sign(), "max_step": 1.0}
    with fn.bind({"data": dist.group.WORLD}):
        old, new = (
            fn.Optimizer(
                [torch.nn.Parameter(torch.linspace(-1, 1, 300))],
                partial(fn.onebit_adam, axis="data", feedback=fn.classic(lazy=lazy), **hyper),
                schedule=fn.freeze_after(2), refuse_averaged=False,
            )
            for hyper in (before, {})
        )  # fmt: skip
    go_on(old, 0, 4)
    try:
        new.load_state_dict(old.state_dict())
    except ValueError as error:
        return str(error), (0.0, 0.0), False
    (group,) = new.param_groups
    p = group["params"][0]
    start = p.detach().clone()
    go_on(new, 4, 6)
    return "", (group["betas"][1], group["max_step"]), not torch.equal(p, start)


@two
def goes_on_in_blocks() -> list[tuple[str, tuple[float, float], bool]]:
    return [gone_on(lazy) for lazy in (False, True)]


def test_a_state_of_one_scale_per_tensor_goes_on_in_blocks_and_lazy_errors_are_refused_with_the_cure():
    for loaded, refused in two.answer("goes_on_in_blocks"):
        assert loaded == ("", (0.999, 1.0), True)
        assert "errors belong to the number of ranks, the codec and the feedback that they were made for" in refused[0]
