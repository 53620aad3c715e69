"""What is wrong is refused by name, before anything moves. Ranks that disagree are in `test_ranks`."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from registry import ADAMS, OPTIMIZERS, each_optimizer, each_phase

import fn
from fn import Phase, tree
from fn.base import has_phase, unchanged
from fn.collectives.agreement import describe


@each_optimizer
def test_an_axis_that_is_not_bound_is_refused_at_construction_by_name(optimizer):
    """Inside of a simulation of another axis, where a silent local step would train every rank alone."""
    tx = optimizer.make(lr=0.1, axis="dta")
    with pytest.raises(ValueError, match=r"axis: 'dta' is not bound; bound are \['data'\]"):
        fn.simulate(lambda p: tx.init([p]), "data", 2)(torch.ones(2, 3))


@each_optimizer
def test_several_processes_without_a_group_are_refused_at_construction(optimizer, monkeypatch):
    p = torch.nn.Parameter(torch.ones(3))
    with monkeypatch.context() as m:
        m.setenv("WORLD_SIZE", "4")
        with pytest.raises(ValueError, match=r"axis: 'data' is not bound, but this is one of 4 processes.*fn\.bind"):
            fn.Optimizer([p], partial(optimizer.make, axis="data"), lr=0.1)
        with pytest.raises(ValueError, match="axis: 'data' is not bound"):
            optimizer.make(lr=0.1, axis="data").init([p.detach()])


@each_phase
@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (torch.ones(3, dtype=torch.complex64), "complex64"),
        (torch.ones(3, dtype=torch.int32), "int32"),
        (torch.ones(3).to_sparse(), "sparse"),
    ],
    ids=["complex", "integer", "sparse"],
)
def test_gradients_of_a_kind_that_no_optimizer_can_use_are_refused_by_leaf_in_every_phase(optimizer, phase, bad, found):
    tx = optimizer.make(lr=0.1, axis="data")
    p = {"a": torch.ones(3), "b": torch.ones(3)}
    state = tx.init(p)
    before = [x.clone() for x in tree.leaves(state)]
    with pytest.raises(TypeError, match=rf"updates: expected leaf 'b' to be a dense .* got .*{found}"):
        tx.update(phase)({"a": torch.ones(3), "b": bad}, state, p)
    assert all(map(torch.equal, tree.leaves(state), before))


@each_optimizer
@pytest.mark.parametrize("dtype", [torch.complex64, torch.int64])
def test_params_of_such_a_kind_are_refused_at_init(optimizer, dtype):
    with pytest.raises(TypeError, match=r"params: expected leaf 'b'"):
        optimizer.make(lr=0.1, axis="data").init({"a": torch.ones(3), "b": torch.ones(3, dtype=dtype)})


@pytest.mark.parametrize("phase", [Phase.WARMUP, Phase.COMPRESSED])
def test_gradients_of_another_structure_than_the_state_are_refused(phase):
    tx = fn.onebit_adam(axis="data")
    p = {"a": torch.ones(3), "b": torch.ones(3)}
    with pytest.raises(ValueError, match=r"updates: expected the leaves at init, \['a', 'b'\], but got \['a'\]"):
        tx.update(phase)({"a": torch.ones(3)}, tx.init(p), p)


@each_phase
def test_gradients_of_another_shape_are_refused_by_leaf_instead_of_being_broadcast(optimizer, phase):
    tx = optimizer.make(lr=0.1, axis="data")
    p = {"a": torch.ones(3, 1), "b": torch.ones(3)}
    state = tx.init(p)
    text = r"updates: expected leaf 'a' to have its shape at init, \(3, 1\), but got \(1, 3\)"
    with pytest.raises(ValueError, match=text):
        tx.update(phase)({"a": torch.ones(1, 3), "b": torch.ones(3)}, state, p)


@each_phase
@pytest.mark.parametrize("params", [[torch.ones(3)], {"a": torch.ones(3)}])
def test_params_in_the_place_of_the_state_are_refused_by_name(optimizer, phase, params):
    tx = optimizer.make(lr=0.1, axis="data")
    state, text = tx.init(params), rf"state: expected .* got {type(params).__name__}; .* \(updates, state, params\)"
    for update in (tx.update(phase), fn.chain(tx).update(phase)):
        with pytest.raises(TypeError, match=text):
            update(params, params, state)


def test_a_schedule_that_returns_no_phase_is_refused_and_nothing_moves():
    p = torch.nn.Parameter(torch.ones(2))
    for wrong, found in ((lambda step: step > 10, "False"), (fn.freeze_after, r"FreezeAfter\(steps=0\)")):
        text = f"schedule: expected a phase for step 0, such as fn.Phase.WARMUP, but got {found}"
        with pytest.raises(ValueError, match=text):
            fn.Optimizer([p], fn.adamw, schedule=wrong)
    asked = []
    opt = fn.Optimizer([p], fn.adamw, schedule=lambda step: Phase.WARMUP if len(asked) < 2 else "frozen")
    asked += [0, 0]
    p.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"schedule: expected a phase for step 0, .*, but got frozen"):
        opt.step()
    assert torch.equal(p, torch.ones(2))
    assert opt.steps == 0


def test_an_optimizer_without_parameters_is_refused():
    with pytest.raises(ValueError, match="empty"):
        fn.Optimizer([], fn.adamw)


def flipped(signs):
    base = fn.int8()
    made = fn.Codec(lambda x: base.encode(x * signs), lambda p: base.decode(p) * signs, align=8, bits=8.125)
    return made._replace(make=partial(flipped, signs))


def test_descriptions_tell_the_numbers_apart_that_make_a_codec():
    """Random signs of one's own, say: a rank with others would decode nonsense."""
    one, two = torch.ones(8), torch.ones(8)
    two[3] = -1
    a, b, c = (describe(fn.compressed_average("data", flipped(x), fn.off())) for x in (one, two, one.clone()))
    assert a == c != b


NUMBERS = [(o, name) for o in OPTIMIZERS for name in ("lr", "eps", "weight_decay") if name != "eps" or o in ADAMS]


@pytest.mark.parametrize(("optimizer", "name"), NUMBERS, ids=[f"{o.name}-{name}" for o, name in NUMBERS])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0])
def test_a_hyper_parameter_that_is_no_finite_number_is_refused_by_name(optimizer, name, value):
    """In a step it would write NaN into the parameters: the guard looks at gradients, not at what it is given."""
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match=f"{name}: expected .*, but got {value}"):
        fn.Optimizer([p], partial(optimizer.make, axis="data"), **{"lr": 0.1, name: value})


def test_whole_numbers_of_numpy_and_tensors_of_one_number_are_numbers():
    x = torch.tensor([[1.0, -3.0, 2.0, 0.5]])
    blocks = [fn.top_k(1, block).encode(x) for block in (2, np.int64(2))]
    assert all(map(torch.equal, *map(tree.leaves, blocks)))
    assert fn.freeze_when_stable(torch.tensor(0.5)).distance == fn.freeze_when_stable(0.5).distance


def test_a_norm_to_clip_by_that_is_nan_is_refused():
    with pytest.raises(ValueError, match=r"max_norm: expected .*, but got nan"):
        fn.clip_by_global_norm(float("nan"))
    with pytest.raises(ValueError, match=r"max_norm: expected .*, but got nan"):
        fn.Optimizer([torch.nn.Parameter(torch.ones(3))], fn.adamw, max_norm=float("nan"))


SYNC = partial(fn.compressed_average, "data", fn.sign())
LINKS = {
    "adam": fn.scale_by_adam,
    "1-bit Adam": lambda: fn.scale_by_onebit_adam(sync=SYNC()),
    "1-bit LAMB": lambda: fn.scale_by_onebit_lamb(sync=SYNC(layout="fused")),
    "0/1 Adam": lambda: fn.scale_by_zero_one_adam(0.1, sync=SYNC()),
    "average in codes": lambda: fn.average("data", fn.int8()),
    "compressed average": SYNC,
    "sharded": lambda: fn.sharded(fn.scale_by_adam(), "data"),
}
PHASES = [(name, phase) for name, make in LINKS.items() for phase in Phase if has_phase(make(), phase)]
SPEAKS = [(name, phase) for name, phase in PHASES if getattr(LINKS[name](), f"{phase.value}_update") is not unchanged]


@pytest.mark.parametrize(("name", "phase"), SPEAKS)
def test_a_link_that_is_given_params_for_its_state_names_the_order_of_the_arguments(name, phase):
    tx, params = LINKS[name](), {"w": torch.ones(8)}
    state = tx.init(params)
    with pytest.raises(TypeError, match=r"state: expected what .*, but got dict; .*\(updates, state, params\)"):
        tx.update(phase)(params, params, state)
    tx.update(phase)(params, state, params)


PARAMS = {"a": torch.ones(3), "b": torch.ones(2)}
SENDS = {
    "average": (partial(fn.average, "data"), Phase.WARMUP),
    "average in codes": (partial(fn.average, "data", fn.int8()), Phase.WARMUP),
    "compressed average": (SYNC, Phase.COMPRESSED),
    "learning rate": (partial(fn.scale_by_learning_rate, 0.1), Phase.WARMUP),
    "decay": (partial(fn.add_decayed_weights, 0.1), Phase.WARMUP),
    "clip": (partial(fn.clip_by_global_norm, 1.0), Phase.WARMUP),
    "clip together": (partial(fn.clip_by_global_norm, 1.0, axis="data"), Phase.COMPRESSED),
    "trust ratio": (fn.scale_by_trust_ratio, Phase.WARMUP),
}


@pytest.mark.parametrize("name", SENDS)
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("bad", "found"), [(None, "NoneType"), (1.0, "float"), (3, "int")])
def test_a_link_alone_refuses_updates_that_are_no_tensors_by_leaf(name, world, bad, found):
    make, phase = SENDS[name]
    tx, g = make(), {"a": torch.ones(3), "b": bad}

    def step(_):
        return tx.update(phase)(g, tx.init(PARAMS), PARAMS)[0]["a"]

    with pytest.raises(TypeError, match=f"updates: expected leaf 'b' to be a dense tensor of real .*, but got {found}"):
        fn.simulate(step, "data", world)(torch.ones(world))


@pytest.mark.parametrize("bad", [None, 1.0])
def test_updates_or_params_that_are_no_tensors_cannot_be_applied(bad):
    with pytest.raises(TypeError, match=r"updates: expected leaf 'b' to be a dense tensor of real"):
        fn.apply_updates(PARAMS, {**PARAMS, "b": bad})
    with pytest.raises(TypeError, match=r"params: expected leaf 'b' to be a dense tensor of real"):
        fn.apply_updates({**PARAMS, "b": bad}, PARAMS)


@pytest.mark.parametrize(("entries", "found"), [(0, "0"), (1, "1"), (3, "3")])
def test_a_state_of_a_chain_of_another_length_is_refused(entries, found):
    tx = fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(0.1))
    state = (*tx.init(PARAMS), ())[:entries]
    with pytest.raises(ValueError, match=f"state: expected an entry for each of the 2 links, .* got {found}"):
        tx.warmup_update(PARAMS, state, PARAMS)


def test_a_foreign_state_of_a_partition_is_refused_by_its_labels():
    tx = fn.partition({"x": fn.scale_by_adam(), "y": fn.scale_by_learning_rate(0.1)}, {"a": "x", "b": "y"})
    state = tx.init(PARAMS)
    for bad in ((), None, state["x"]):
        with pytest.raises(TypeError, match=r"state: expected what init returned, but got .*; .*\(updates, state, par"):
            tx.warmup_update(PARAMS, bad, PARAMS)
    for bad, labels in (({}, r"\[\]"), ({"x": state["x"]}, r"\['x'\]"), ({**state, "z": ()}, r"\['x', 'y', 'z'\]")):
        with pytest.raises(ValueError, match=rf"state: expected the labels .*, \['x', 'y'\], .*, but got {labels}"):
            tx.warmup_update(PARAMS, bad, PARAMS)
    tx.warmup_update(PARAMS, dict(reversed(state.items())), PARAMS)


@each_phase
def test_a_number_of_python_in_the_place_of_a_leaf_of_the_state_is_refused_by_its_path(optimizer, phase):
    """As in a state that was put together from a file by hand."""
    tx = optimizer.make(lr=0.1, axis="data")
    leaves, structure = tree.flatten(tx.init(PARAMS))
    for place, path in enumerate(tree.paths(tx.init(PARAMS))):
        number = 1.0 if leaves[place].is_floating_point() else 1
        state = tree.unflatten(structure, [*leaves[:place], number, *leaves[place + 1 :]])
        exchanged_in = Phase.COMPRESSED if ".sync." in path else Phase.WARMUP if "gradient_errors" in path else phase
        if phase is not exchanged_in:
            continue  # no other phase looks at these errors
        text = rf"state\..*: expected leaf .* to be a tensor, but got {type(number).__name__}; use torch"
        with pytest.raises(TypeError, match=text):
            tx.update(phase)(PARAMS, state, PARAMS)


def optimizer_of(make=fn.adamw, **more):
    return fn.Optimizer([torch.nn.Parameter(torch.ones(3))], make, **more)


@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda: fn.onebit_adam(axis="data", codec=fn.sign), "codec: .*a Codec, such as fn.sign.*got <function sign"),
        (lambda: fn.onebit_adam(axis="data", feedback=fn.classic), "feedback: .*such as fn.classic.*got <function"),
        (lambda: fn.onebit_adam(axis="data", warmup=fn.int8), "warmup: expected a Codec, .*got <function int8"),
        (lambda: fn.sharded(fn.chain(), "d", gather_feedback=np.float64(0)), "gather_feedback: .*got np.float64"),
        (lambda: fn.compressed_average("d", fn.sign(), gather_feedback=np.float64(1)), "gather_feedback: .*got np.f"),
        (lambda: fn.skip_nonfinite(fn.adamw), "inner: expected a transform, .*, but got adamw"),
        (lambda: fn.partition({"a": fn.adamw}, "a"), r"transforms\['a'\]: expected a transform, .*got adamw"),
        (lambda: optimizer_of(lambda lr: fn.adamw), "make's result: expected a transform, .*, but got adamw"),
        (lambda: optimizer_of().load_state_dict(None), "state_dict: .*fn.Optimizer.*got NoneType"),
        (lambda: optimizer_of(weight_decay="0.1"), "weight_decay: expected a number, but got '0.1'"),
    ],
)
def test_what_was_not_called_or_is_of_another_kind_is_refused_by_name(use, text):
    with pytest.raises(TypeError, match=text):
        use()


@each_optimizer
@pytest.mark.parametrize("axis", ["data", None])
def test_a_model_or_a_generator_instead_of_its_parameters_is_refused_at_init(optimizer, axis):
    model = torch.nn.Linear(2, 2)
    if axis is None and optimizer.name not in ("adamw", "lamb"):
        return
    for params, found in ((model, "Linear"), (model.parameters(), "generator"), ({"a": 1.0}, "float")):
        with pytest.raises(TypeError, match=f"params: expected leaf .* to be a dense .*, but got {found}"):
            optimizer.make(lr=0.1, axis=axis).init(params)


@pytest.mark.parametrize("axis", [3, None, (), (1, 2), ("data", 0)])
def test_an_axis_that_is_no_name_is_refused(axis):
    with pytest.raises(ValueError, match=r"axis: expected a name or a tuple of different names, but got"):
        fn.pmean(torch.ones(3), axis)
    with pytest.raises(ValueError, match=r"axis: expected a name, but got"):
        fn.all_to_all(torch.ones(1, 3), axis)
    with pytest.raises(ValueError, match=r"axis: expected a name, but got"):
        fn.simulate(lambda x: x, axis, 2)


def test_an_init_in_a_meta_context_leaves_no_plan_behind():
    tx, params = fn.loco_adamw(axis="data"), {"w": torch.zeros(4111)}
    with torch.device("meta"):
        tx.init(params)
    grads = {"w": torch.ones(4111)}
    updates, _ = tx.warmup_update(grads, tx.init(params), params)
    assert updates["w"].isfinite().all()
