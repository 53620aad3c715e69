"""Axes by name: what a name stands for in a simulation, on process groups, and with neither."""

from __future__ import annotations

import threading

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import tree
from fn.collectives.axis import ALONE, Axis, Binding, current_binding
from fn.collectives.carriers import group_of


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ((torch.ones(2), torch.ones(3)), r"leaf 'the root' of argument 1, but got shape \(3,\)"),
        (({"b": torch.ones(())}, torch.ones(2)), r"leaf 'b' of argument 0, but got shape \(\)"),
    ],
)
def test_an_argument_without_a_slice_for_each_rank_is_refused_by_leaf(args, text):
    """A state, for one, of which some leaves are the same on all ranks."""
    with pytest.raises(ValueError, match="in_dims: .*2 slices, .*, in dimension 0 of " + text + r"; .* fn\.rank"):
        fn.simulate(lambda x, y: y, "data", 2)(*args)


@pytest.mark.parametrize("in_dims", [(0,), (0, None, None)])
def test_in_dims_for_another_number_of_arguments_are_refused(in_dims):
    run = fn.simulate(lambda x, y: x + y, "data", 2, in_dims=in_dims)
    with pytest.raises(ValueError, match=rf"in_dims: .* each of the 2 arguments, but got {len(in_dims)}"):
        run(torch.ones(2), torch.ones(2))


def test_without_any_binding_an_axis_has_one_rank():
    assert fn.axis_size("data") == 1
    assert fn.axis_index("data") == 0


@pytest.mark.parametrize("size", [1, 2, 5])
def test_simulate_gives_every_rank_its_index_and_the_size(size):
    index = fn.simulate(lambda x: (fn.axis_index("data"), x * fn.axis_size("data")), "data", size)
    ranks_, scaled = index(torch.ones(size))
    assert ranks_.tolist() == list(range(size))
    assert scaled.tolist() == [size] * size


def test_simulate_hands_out_by_in_dims_and_collects_by_out_dims():
    f = fn.simulate(
        lambda same, mine: (same + mine, fn.psum(mine, "data")), "data", 3, in_dims=(None, 1), out_dims=(1, None)
    )
    mine = torch.arange(6.0).view(2, 3)
    shifted, total = f(torch.tensor(10.0), mine)
    assert torch.equal(shifted, mine + 10)
    assert torch.equal(total, mine.sum(1))


def test_the_leaf_that_depends_on_the_rank_is_named():
    text = r"^out_dims: expected .* for leaf '{}', which depends on the rank, but got None; .*fn.rank_dims"
    dims = {"a": None, "b": (0, None)}
    with pytest.raises(ValueError, match=text.format(r"b\.1")):
        fn.simulate(lambda x: {"a": fn.psum(x, "data"), "b": (x, x)}, "data", 2, out_dims=dims)(torch.ones(2))
    with pytest.raises(ValueError, match=text.format("the root")):
        fn.simulate(lambda x: x + 1, "data", 2, out_dims=None)(torch.ones(2))


def test_out_dims_none_looks_at_its_own_axis_only():
    """The same on all locals of a node, and different from node to node: replicated over one axis of two."""
    x = torch.arange(6.0).view(2, 3)
    over_locals = fn.simulate(lambda x: fn.pmean(x, "local"), "local", 3, out_dims=None)
    assert torch.equal(fn.simulate(over_locals, "node", 2)(x), x.mean(1))
    with pytest.raises(ValueError, match="out_dim"):
        fn.simulate(over_locals, "node", 2, out_dims=None)(x)


def test_out_dims_that_do_not_fit_the_result_are_refused_by_name():
    with pytest.raises(ValueError, match="out_dims"):
        fn.simulate(lambda x: x, "data", 2, out_dims=(0, 0))(torch.ones(2))


@pytest.mark.parametrize("size", [0, -1, 2.0, "2"])
def test_simulate_refuses_less_than_one_rank_by_name(size):
    with pytest.raises(ValueError, match="size"):
        fn.simulate(lambda x: x, "data", size)


def test_random_numbers_of_a_simulation_are_each_ranks_own_the_same_or_refused():
    """As in a model with dropout."""
    x = torch.ones(3, 64)
    with pytest.raises(RuntimeError, match="randomness"):
        fn.simulate(torch.nn.functional.dropout, "data", 3)(x)
    own, same = (fn.simulate(torch.nn.functional.dropout, "data", 3, randomness=r)(x) for r in ("different", "same"))
    assert not torch.equal(own[0], own[1])
    assert torch.equal(same[0], same[1])
    with pytest.raises(ValueError, match=r"^randomness: .*'different'.* got True"):
        fn.simulate(torch.relu, "data", 3, randomness=True)


def test_an_unknown_axis_inside_a_simulation_is_refused_and_the_known_ones_named():
    def f(x):
        return fn.pmean(x, "dat")

    with pytest.raises(ValueError, match=r"axis.*'dat'.*'data'"):
        fn.simulate(f, "data", 2)(torch.ones(2))


def test_a_failed_simulation_leaves_no_binding_behind():
    def f(x):
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fn.simulate(f, "data", 2)(torch.ones(2))
    assert fn.axis_size("data") == 1


def test_world_size_in_the_environment_without_a_group_is_an_error_not_a_local_step(monkeypatch):
    with monkeypatch.context() as m:
        m.setenv("WORLD_SIZE", "2")
        for call in (
            lambda: fn.axis_size("data"),
            lambda: fn.axis_index("data"),
            lambda: fn.pmean(torch.ones(1), "data"),
        ):
            with pytest.raises(ValueError, match=r"axis: 'data' is not bound.*fn\.bind"):
                call()
        m.setenv("WORLD_SIZE", "1")
        assert fn.axis_size("data") == 1


def test_bind_refuses_a_group_without_this_rank():
    with pytest.raises(ValueError, match=r"mesh: expected 'data' .*, but got one without this rank"):
        fn.bind({"data": dist.GroupMember.NON_GROUP_MEMBER})


def test_a_group_that_was_destroyed_is_said_to_be_gone():
    with pytest.raises(RuntimeError, match=r"'no such group' of axis None is gone, ended by dist\.destroy"):
        group_of("no such group")


def test_bind_refuses_what_is_no_mesh_by_name():
    with pytest.raises(TypeError, match=r"mesh.*str"):
        fn.bind("data")


def test_rank_dims_marks_errors_as_one_ranks_own_and_the_rest_as_replicated():
    tx = fn.onebit_adam(axis="data")
    state = tx.init({"w": torch.ones(3), "b": torch.ones(2)})
    dims = fn.rank_dims(state)
    found = dict(zip(tree.paths(dims), tree.leaves(dims), strict=True))
    assert {path for path, dim in found.items() if dim == 0} == {
        path for path in tree.paths(state) if "worker" in path or "server" in path
    }
    assert sorted(found) == sorted(tree.paths(state))


two = ranks.Cases(2)


@two
def in_a_group_without_bind() -> str:
    try:
        fn.axis_size("data")
    except ValueError as error:
        return str(error)
    return "no error"


def with_a_mesh() -> tuple:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    with fn.bind(mesh):
        x = torch.tensor(float(dist.get_rank()))
        sizes = fn.axis_size("node"), fn.axis_size("local"), int(fn.axis_index("node")), int(fn.axis_index("local"))
        means = float(fn.pmean(x, "node")), float(fn.pmean(x, "local"))
        try:
            fn.axis_size("data")
            unknown = "no error"
        except ValueError as error:
            unknown = str(error)
    return sizes, means, unknown


@two
def seen_by_another_thread() -> tuple:
    """Return what a thread sees of the process group, and of a binding that this thread has entered."""
    found = []

    def look():
        found.append(dist.get_world_size())
        try:
            found.append(fn.axis_size("data"))
        except ValueError as error:
            found.append(str(error))

    with fn.bind({"data": dist.group.WORLD}):
        here = fn.axis_size("data")
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    return here, *found


@two
def without_names() -> str:
    try:
        fn.bind(init_device_mesh("cpu", (2,)))
    except ValueError as error:
        return str(error)
    return "no error"


def test_in_a_group_an_unbound_axis_is_an_error_that_says_what_to_do():
    for text in two.answer("in_a_group_without_bind"):
        assert "axis: 'data' is not bound" in text
        assert "fn.bind(mesh)" in text


def test_bind_gives_both_axes_of_a_mesh_to_their_groups():
    for rank, (sizes, means, unknown) in enumerate(ranks.run(4, with_a_mesh)):
        node, local = divmod(rank, 2)
        assert sizes == (2, 2, node, local)
        assert means == (1.0 + local, 0.5 + 2 * node)
        assert "'data' is not bound; bound are ['local', 'node']" in unknown


def test_a_process_group_is_process_wide_and_its_binding_is_a_threads_own():
    """Differs: fn.collectives.axis.bind: nothing is process-wide; the binding belongs to the thread that enters it."""
    for here, group, axis in two.answer("seen_by_another_thread"):
        assert (here, group) == (2, 2)
        assert "axis: 'data' is not bound" in axis


def test_bind_refuses_a_mesh_without_names_and_says_which_argument_is_missing():
    assert all("mesh_dim_names" in text for text in two.answer("without_names"))


def test_threads_that_enter_one_binding_leave_it_each_for_itself():
    """One that came later once left the other's axes behind, and the other was in no axis any more."""
    shared = Binding({"data": Axis(1, torch.tensor(0), ALONE)})
    inside, left = threading.Event(), threading.Event()
    found: dict[str, list[str]] = {}

    def first() -> None:
        with Binding({"node": Axis(1, torch.tensor(0), ALONE)}):
            with shared:
                inside.set()
                assert left.wait(30)
            found["first"] = [*current_binding().axes]

    def second() -> None:
        assert inside.wait(30)
        shared.__enter__()
        left.set()
        threads[0].join(30)
        found["inside"] = [*current_binding().axes]
        shared.__exit__(None, None, None)
        found["second"] = [*current_binding().axes]

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {"first": ["node"], "inside": ["data"], "second": []}
