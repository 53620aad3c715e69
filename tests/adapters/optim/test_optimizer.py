"""`fn.Optimizer` is a `torch.optim.Optimizer`: everything around torch's optimizers works with it."""

from __future__ import annotations

import io
from functools import partial

import pytest
import torch
from simulated import bits, same_bits

import fn
from fn import Phase, tree

SHAPES = [(4, 3), (5,), ()]
onebit = partial(fn.onebit_adam, axis="data")


def parameters(dtype=torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def set_gradients(params, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


def steps(opt, params, count: int, first: int = 0) -> None:
    for t in range(first, first + count):
        set_gradients(params, t)
        opt.step()


def twins(**options) -> tuple:
    """Return ours and torch's AdamW over equal parameters."""
    ours, theirs = parameters(), parameters()
    reference = torch.optim.AdamW(theirs, weight_decay=0.1, foreach=False, **options)
    return ours, fn.Optimizer(ours, fn.adamw, weight_decay=0.1, **options), theirs, reference


def assert_close(a, b) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x.detach(), y.detach(), rtol=1e-5, atol=1e-6)


def test_it_is_a_torch_optimizer_and_steps_like_torchs_adamw():
    ours, opt, theirs, reference = twins(lr=0.03)
    assert isinstance(opt, torch.optim.Optimizer)
    for t in range(10):
        for params, o in ((ours, opt), (theirs, reference)):
            set_gradients(params, t)
            o.step()
    assert_close(ours, theirs)
    assert opt.steps == 10


# Param groups.


def test_each_group_has_its_own_hyperparameters_and_learning_rate():
    ours, theirs = parameters(), parameters()

    def split(p, b1, eps):
        return [{"params": p[:1], "lr": 0.1, **b1}, {"params": p[1:], "weight_decay": 0.5, **eps}]

    opt = fn.Optimizer(split(ours, {"b1": 0.5}, {"eps": 1e-3}), fn.adamw, lr=0.01, weight_decay=0.0)
    reference = torch.optim.AdamW(
        split(theirs, {"betas": (0.5, 0.999)}, {"eps": 1e-3}), lr=0.01, weight_decay=0.0, foreach=False
    )
    for t in range(5):
        for params, o in ((ours, opt), (theirs, reference)):
            set_gradients(params, t)
            o.step()
    assert_close(ours, theirs)


def test_a_group_can_be_added_later_and_starts_from_zero():
    ours, opt, theirs, reference = twins(lr=0.03)
    more, same = parameters(), parameters()
    for t in range(6):
        if t == 3:
            opt.add_param_group({"params": more, "lr": 0.2})
            reference.add_param_group({"params": same, "lr": 0.2})
        for params, o in ((ours + more, opt), (theirs + same, reference)):
            set_gradients(params, t)
            o.step()
    assert_close(ours + more, theirs + same)


@pytest.mark.parametrize(
    "group", [{"momentum": 0.9}, {"b1": 2.0}, {"lr": -1.0}, {"params": [torch.ones(2, dtype=torch.cfloat)]}]
)
def test_a_group_that_is_refused_leaves_the_optimizer_as_it_was(group):
    p = parameters()
    opt = fn.Optimizer(p, fn.adamw, lr=0.1)
    steps(opt, p, 2)
    before, groups = bits(opt.states), len(opt.param_groups)
    with pytest.raises((TypeError, ValueError), match=r"momentum|b1|lr|params"):
        opt.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))], **group})
    assert len(opt.param_groups) == groups
    assert all(map(torch.equal, bits(opt.states), before))
    steps(opt, p, 1)


def test_generators_of_parameters_are_accepted_in_param_groups_too():
    model = torch.nn.Linear(3, 2)
    groups = [{"params": model.parameters(), "lr": 0.1}]
    named = [{"params": model.named_parameters()}]
    one = [{"params": model.weight}, {"params": [model.bias]}]
    for params, sizes in ((model.parameters(), [2]), (groups, [2]), (named, [2]), (one, [1, 1])):
        opt = fn.Optimizer(params, fn.adamw)
        assert [len(group["params"]) for group in opt.param_groups] == sizes


# Learning rates.


@pytest.mark.parametrize("name", ["momentum", "foreach"])
def test_what_the_optimizer_does_not_take_is_refused_with_what_it_takes(name):
    text = f"{name}: is not an argument of adamw, which takes b1, b2, eps"
    with pytest.raises(TypeError, match=text):
        fn.Optimizer([torch.nn.Parameter(torch.ones(2))], partial(fn.adamw), **{name: 0.5})
    with pytest.raises(TypeError, match=text):
        fn.Optimizer([torch.nn.Parameter(torch.ones(2))], partial(fn.adamw, **{name: 0.5}))


def test_groups_of_torchs_adamw_are_refused_with_all_the_flags_in_the_order_that_they_have():
    theirs = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))]).param_groups
    with pytest.raises(TypeError, match=r"amsgrad, maximize, foreach, .* are no arguments of adamw, .* leave out"):
        fn.Optimizer(theirs, fn.adamw, lr=0.1)


def test_a_learning_rate_that_make_holds_would_be_overruled_and_is_refused():
    with pytest.raises(ValueError, match=r"lr: .*but got 5\.0; pass it to fn\.Optimizer\(\.\.\., lr="):
        fn.Optimizer([torch.nn.Parameter(torch.ones(2))], partial(fn.adamw, lr=5.0))


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (torch.ones(2), "a tensor; put it into a list"),
        ([{"params": torch.nn.Linear(2, 2)}], "a module; pass"),
        (torch.nn.Linear(2, 2), r"a module; pass model\.parameters\(\)"),
        ({torch.nn.Parameter(torch.ones(2))}, "a set, whose order"),
    ],
)
def test_params_without_an_order_and_single_tensors_are_refused(params, text):
    with pytest.raises(TypeError, match=rf"params: expected .*, but got {text}"):
        fn.Optimizer(params, fn.adamw)


def test_a_learning_rate_that_is_a_tensor_is_filled_in_place():
    p = parameters()
    opt = fn.Optimizer(p, fn.adamw, lr=torch.tensor(0.5))
    buffer = opt.param_groups[0]["lr"]
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    steps(opt, p, 1)
    scheduler.step()
    steps(opt, p, 1)
    assert opt.param_groups[0]["lr"] is buffer
    assert float(buffer) == 0.25


WRONG_RATES = [
    "0.1", None, [0.1], -1.0, torch.tensor(-1.0), torch.ones(1), torch.tensor(0.1, dtype=torch.complex64), float("nan"),
    torch.tensor(float("nan")),
]  # fmt: skip


@pytest.mark.parametrize("lr", WRONG_RATES, ids=repr)
def test_a_learning_rate_that_becomes_negative_or_no_number_is_refused_before_anything_moves(lr):
    params = parameters()
    opt = fn.Optimizer(params, fn.adamw, lr=0.1)
    steps(opt, params, 1)
    before = [p.detach().clone() for p in (*params, *tree.leaves(opt.states))]
    opt.param_groups[0]["lr"] = lr
    with pytest.raises(ValueError, match=r"^lr: .*at least 0.* got "):
        opt.step()
    assert all(map(torch.equal, before, (*params, *tree.leaves(opt.states))))
    opt.param_groups[0]["lr"] = torch.tensor(0.1)
    opt.step()
    opt.param_groups[0]["lr"].fill_(-0.1)
    with pytest.raises(ValueError, match=r"lr: .*got -0\.1"):
        opt.step()
    assert opt.steps == 2


def test_a_scheduler_that_ends_below_zero_by_rounding_is_followed():
    """`LinearLR` multiplies what is there, and so misses 0 by a little."""
    params = parameters()
    opt = fn.Optimizer(params, fn.adamw, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LinearLR(opt, 1 / 3, 0.0, 56)
    for t in range(58):
        set_gradients(params, t)
        opt.step()
        scheduler.step()
    assert -1e-16 < opt.param_groups[0]["lr"] < 0


# What surrounds a step.


def test_a_closure_is_run_once_with_gradients_enabled_and_its_loss_returned():
    p = torch.nn.Parameter(torch.tensor([1.0, -2.0]))
    opt = fn.Optimizer([p], fn.adamw, lr=0.1, weight_decay=0.0)
    calls = []

    def closure():
        opt.zero_grad()
        loss = (p**2).sum()
        loss.backward()
        calls.append(loss)
        return loss

    assert opt.step(closure) is calls[0]
    assert len(calls) == 1
    torch.testing.assert_close(p.detach(), torch.tensor([0.9, -1.9]))


def test_hooks_around_steps_and_state_dicts_run_and_can_be_removed():
    p = parameters()
    opt = fn.Optimizer(p, fn.adamw)
    seen = []
    handles = [
        opt.register_step_pre_hook(lambda o, args, kwargs: seen.append("before")),
        opt.register_step_post_hook(lambda o, args, kwargs: seen.append("after")),
        opt.register_state_dict_pre_hook(lambda o: seen.append("saving")),
        opt.register_state_dict_post_hook(lambda o, found: {**found, "mine": torch.tensor(1)}),
        opt.register_load_state_dict_pre_hook(lambda o, d: {k: v for k, v in d.items() if k != "mine"}),
        opt.register_load_state_dict_post_hook(lambda o: seen.append("loaded")),
    ]
    steps(opt, p, 1)
    saved = opt.state_dict()
    assert saved["mine"] == 1
    opt.load_state_dict(saved)
    assert seen == ["before", "after", "saving", "loaded"]
    for handle in handles:
        handle.remove()
    steps(opt, p, 1)
    assert "mine" not in opt.state_dict()
    assert len(seen) == 4


def test_parameters_state_and_learning_rate_keep_their_buffers():
    p = parameters()
    opt = fn.Optimizer(p, onebit, schedule=fn.freeze_after(2), lr=torch.tensor(0.1))
    live = [*p, *tree.leaves(opt.states), opt.param_groups[0]["lr"]]
    before = [x.data_ptr() for x in live]
    states = opt.states
    steps(opt, p, 5)
    opt.load_state_dict({k: v.clone() for k, v in opt.state_dict().items()})
    steps(opt, p, 1)
    assert [x.data_ptr() for x in live] == before
    assert all(a is b for a, b in zip(tree.leaves(states), tree.leaves(opt.states), strict=True))


def test_freeze_when_stable_is_fed_by_the_second_moment():
    """Differs: fn.schedules.FreezeWhenStable: That of named optimizers is bias-corrected, and stable sooner."""
    p = [torch.nn.Parameter(torch.ones(3))]
    schedule = fn.freeze_when_stable(b2=0.5, threshold=0.9)
    opt = fn.Optimizer(p, partial(onebit, b2=0.5), schedule=schedule, lr=0.01)
    phases = []
    for _ in range(10):
        phases.append(opt.phase)
        p[0].grad = torch.ones(3)
        opt.step()
    # nu is bias-corrected, so that it is 1 at once: it is stable when there is one of 1 / (1 - b2) = 2 steps before
    assert phases == [Phase.WARMUP] * 3 + [Phase.COMPRESSED] * 7


@pytest.mark.filterwarnings("ignore:steps. the last")
def test_skipped_steps_do_not_freeze_a_second_moment_that_rests_because_of_them():
    p = torch.nn.Parameter(torch.ones(3))
    opt = fn.Optimizer([p], partial(fn.onebit_adam, axis="data"), schedule=fn.freeze_when_stable(b2=0.5), lr=0.01)
    for gradient in (1.0, *[float("inf")] * 20, 2.0):
        p.grad = torch.full((3,), gradient)
        opt.step()
    assert opt.skipped == 20
    assert opt.schedule.frozen_at is None
    assert len(opt.schedule.norms) == 2


def test_freeze_when_stable_refuses_a_transform_without_a_second_moment_at_construction():
    with pytest.raises(ValueError, match=r"schedule.*second moment"):
        fn.Optimizer(parameters(), fn.scale_by_learning_rate, schedule=fn.freeze_when_stable())


# Gradients that are missing, bad, or of a kind that is refused.


def test_a_parameter_without_a_gradient_is_not_moved_and_the_others_are():
    p = parameters()
    opt = fn.Optimizer(p, fn.adamw, lr=0.1, weight_decay=0.1)
    set_gradients(p, 0)
    p[1].grad = None
    before = p[0].detach().clone(), p[1].detach().clone()
    opt.step()
    assert not torch.equal(p[0], before[0])
    assert torch.equal(p[1], before[1])
    assert (opt.skipped, opt.steps) == (0, 1)
    assert tree.fields(opt.states, "step")[0] == 1
    steps(opt, p, 1, 1)
    assert not torch.equal(p[1], before[1])
    assert opt.skipped == 0


@pytest.mark.parametrize("make", [lambda lr: fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(lr)), fn.adamw])
def test_any_chain_survives_missing_and_bad_gradients(make):
    """Also one that its author did not guard: the adapter promises it for every transform."""
    p = parameters()
    opt = fn.Optimizer(p, make, lr=0.1)
    set_gradients(p, 0)
    p[2].grad = None
    opt.step()
    assert all(torch.isfinite(x).all() for x in p)
    before = bits((p, tree.fields(opt.states, "inner")))
    set_gradients(p, 1)
    p[0].grad[0, 0] = float("nan")
    opt.step()
    assert all(map(torch.equal, bits((p, tree.fields(opt.states, "inner"))), before))
    assert opt.skipped == 1


@pytest.mark.parametrize("missing", [False, True])
def test_a_guard_inside_of_a_callers_chain_stops_all_groups_too(missing):
    p = parameters()
    make = lambda lr: fn.chain(fn.clip_by_global_norm(1.0), onebit(lr))  # noqa: E731
    opt = fn.Optimizer([{"params": p[:1]}, {"params": p[1:]}], make, lr=0.1)
    steps(opt, p, 1)
    set_gradients(p, 1)
    if missing:  # the adapter asks the other ranks by a bad number, and steps again
        p[0].grad = None
    else:
        p[0].grad[0, 0] = float("nan")
    before = bits(p)
    opt.step()
    moved = [not torch.equal(a, b) for a, b in zip(bits(p), before, strict=True)]
    assert moved == ([False, True, True] if missing else [False] * 3)
    assert opt.skipped == (0 if missing else 1)
    assert all(count in (0, opt.skipped) for count in tree.fields(opt.states, "skipped"))


def test_a_sparse_gradient_is_refused_by_name_and_nothing_moves():
    table = torch.nn.Embedding(5, 3, sparse=True)
    opt = fn.Optimizer(table.parameters(), fn.adamw)
    table(torch.tensor([1])).sum().backward()
    before = bits((list(table.parameters()), opt.states))
    with pytest.raises(TypeError, match=r"gradients of param group 0: expected leaf '0'.*sparse"):
        opt.step()
    assert all(map(torch.equal, bits((list(table.parameters()), opt.states)), before))
    assert opt.steps == 0


# Saving and loading.


def roundtrip(state: dict) -> dict:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def grouped(params, **options):
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.05}]
    return fn.Optimizer(groups, onebit, schedule=fn.freeze_after(3), lr=0.1, **options)


def test_the_state_dict_is_flat_and_names_every_leaf():
    p = parameters()
    opt = grouped(p)
    steps(opt, p, 4)
    saved = opt.state_dict()
    assert all(isinstance(value, torch.Tensor) for value in saved.values())
    assert any(path.endswith("nu.0") for path in saved)
    assert any("sync.worker" in path for path in saved)
    own = [path for path in saved if path.startswith("rank 0 of 1.state.")]
    assert own == [path for path in saved if ".worker." in path or ".server." in path]
    assert len(own) + sum(path.startswith("state.") for path in saved) == len(tree.leaves(opt.states))


def test_a_fed_schedule_continues_too():
    def fresh(p):
        schedule = fn.freeze_when_stable(b2=0.8)
        return fn.Optimizer(p, partial(onebit, b2=0.8), schedule=schedule, lr=0.1)

    p = parameters()
    opt = fresh(p)
    steps(opt, p, 4)
    q = [torch.nn.Parameter(x.detach().clone()) for x in p]
    again = fresh(q)
    again.load_state_dict(roundtrip(opt.state_dict()))
    for t in range(4, 30):
        assert again.phase is opt.phase
        steps(opt, p, 1, t)
        steps(again, q, 1, t)
    assert opt.schedule.frozen_at is not None
    assert again.schedule.frozen_at == opt.schedule.frozen_at
    assert same_bits(q, p)


def test_a_schedule_that_saved_something_else_is_refused_with_the_way_to_change_it():
    p = parameters()
    fixed = fn.Optimizer(p, onebit, schedule=fn.freeze_after(3), lr=0.1)
    fed = fn.Optimizer(p, onebit, schedule=fn.freeze_when_stable(), lr=0.1)
    with pytest.raises(ValueError, match=r"'schedule\.frozen_at' is missing; .* opt\.state_dict\(\) has it"):
        fed.load_state_dict(fixed.state_dict())
    fed.load_state_dict({**fed.state_dict(), **fixed.state_dict()})
    with pytest.raises(ValueError, match=r"'schedule\.frozen_at' is unexpected; .* leave it out"):
        fixed.load_state_dict(fed.state_dict())


@pytest.mark.parametrize(
    ("make", "schedule", "missing"),
    [
        (fn.adamw, fn.freeze_after(9), "COMPRESSED"),
        (fn.lamb, fn.freeze_when_stable(), "COMPRESSED"),
        (onebit, fn.zero_one_schedule(), "LOCAL"),
    ],
)
def test_a_schedule_with_a_phase_that_the_optimizer_lacks_is_refused_at_once(make, schedule, missing):
    """It was refused in the first step of that phase, after thousands of others."""
    with pytest.raises(ValueError, match=rf"schedule: is \w+, which does not fit.*{missing} was asked for.*has only"):
        fn.Optimizer(parameters(), make, schedule=schedule)
    fn.Optimizer(parameters(), onebit, schedule=fn.zero_one_schedule(local_step_clipper=1))


def test_parameters_on_the_meta_device_are_refused_by_number():
    """What to_empty makes of them are other parameters; the optimizer would train those that are gone."""
    p = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2, device="meta"))]
    with pytest.raises(ValueError, match=r"params: parameter 1 is on the meta device, .* make the optimizer after"):
        fn.Optimizer(p, onebit)


def without_one(d):
    return {k: v for k, v in d.items() if not k.endswith("nu.0")}


def reshaped(d):
    return {k: v.new_zeros(7) if k.endswith("nu.0") else v for k, v in d.items()}


def recast(d):
    return {k: v.double() if k.endswith("nu.0") else v for k, v in d.items()}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (without_one, r"nu\.0' is missing"),
        (lambda d: {**d, "groups.7.lr": torch.tensor(1.0)}, r"'groups\.7\.lr' is unexpected; .* `elements`"),
        (reshaped, r"nu\.0' is torch\.float32 \(7,\)"),
        (recast, r"nu\.0' is torch\.float64"),
        (lambda d: {"state": {}, "param_groups": []}, "of an optimizer of torch.*start anew"),
        (lambda d: {}, "expected the format 5, but got none, as fn 0.3 and before saved it; go on with the version"),
        (lambda d: {**d, "format": torch.tensor(4)}, "expected the format 5, but got 4"),
        (lambda d: {**d, "steps": 5}, "steps"),
    ],
    ids=["missing", "unexpected", "shape", "dtype", "torch's own", "empty", "a later format", "no tensor"],
)
def test_a_state_dict_that_does_not_fit_is_refused_by_path_and_nothing_is_loaded(change, text):
    p = parameters()
    opt = grouped(p)
    steps(opt, p, 4)
    before, rates = bits(opt.states), [float(g["lr"]) for g in opt.param_groups]
    saved = {k: v if k == "format" else torch.ones_like(v) for k, v in opt.state_dict().items()}
    with pytest.raises((ValueError, TypeError), match=rf"state_dict: .*({text})"):
        opt.load_state_dict(change(saved))
    assert all(map(torch.equal, bits(opt.states), before))
    assert [float(g["lr"]) for g in opt.param_groups] == rates
    assert opt.steps == 4


def test_parameters_of_other_names_or_in_another_order_are_refused_by_name():
    """What is saved of one would go to another one of the same shape."""

    def made(names):
        return fn.Optimizer([(name, torch.nn.Parameter(torch.ones(2))) for name in names], fn.adamw)

    saved = made("ab").state_dict()
    made("ab").load_state_dict(saved)
    fn.Optimizer([torch.nn.Parameter(torch.ones(2)) for _ in "ab"], fn.adamw).load_state_dict(saved)  # has no names
    for names in ("ba", "ac"):
        with pytest.raises(ValueError, match=r"expected . as parameter . of group 0, as it was saved, but got .; give"):
            made(names).load_state_dict(saved)


def test_a_shard_that_a_loader_wrote_into_the_state_dict_is_refused():
    """As torch.distributed.checkpoint does; what the shard is compared with must not be written over, too."""
    opt = fn.Optimizer(parameters(), partial(fn.loco_adamw, axis="data"), lr=0.01)
    saved = opt.state_dict()
    (place,) = [key for key in saved if key.endswith(".place")]
    saved[place].copy_(torch.tensor([1, 2]))
    with pytest.raises(ValueError, match=r"says shard 1 of 2, but this rank has shard 0 of 1"):
        opt.load_state_dict(saved)


@pytest.mark.parametrize("make", [fn.onebit_adam, fn.onebit_lamb, fn.zero_one_adam])
def test_a_schedule_without_a_warm_up_gets_one_step_of_it_and_a_warning(make) -> None:
    """Without a second moment there is nothing to divide by: DeepSpeed divides by eps, a mask would move nothing."""
    p = torch.ones(3, requires_grad=True)
    with pytest.warns(UserWarning, match="schedule: has no warm-up"):
        opt = fn.Optimizer([p], partial(make, axis="data"), schedule=fn.freeze_after(0), lr=0.1)
    before = p.detach().clone()
    for phase in (fn.Phase.WARMUP, fn.Phase.COMPRESSED, fn.Phase.COMPRESSED):
        assert opt.phase is phase
        p.grad = p.detach().clone()
        opt.step()
    assert 0 < float((p.detach() - before).abs().max()) < 10.0


def test_a_hyper_parameter_that_is_taken_out_of_a_group_is_named_and_nothing_moves():
    p = parameters()
    opt = grouped(p)
    steps(opt, p, 1)
    before, eps = [x.detach().clone() for x in p], opt.param_groups[0].pop("eps")
    with pytest.raises(ValueError, match=r"^eps: .*param group.* got none; change it"):
        steps(opt, p, 1)
    assert all(map(torch.equal, p, before))
    opt.param_groups[0]["eps"] = eps
    steps(opt, p, 1)
    assert opt.steps == 2
