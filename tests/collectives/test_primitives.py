"""The exact collectives: one meaning at every vmap level, in both worlds, eager and compiled."""

from __future__ import annotations

from functools import partial

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn.collectives.messages import exchange, gather

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8]


def world(f, size, **dims):
    return fn.simulate(f, "data", size, **dims)


def test_all_to_all_hands_row_r_to_rank_r():
    x = torch.arange(3 * 3 * 2).view(3, 3, 2)  # x[sender, receiver]
    assert torch.equal(world(lambda x: fn.all_to_all(x, "data"), 3)(x), x.transpose(0, 1))


def test_all_gather_gives_everyone_the_rows_in_the_order_of_the_ranks():
    x = torch.randn(3, 4, 2)
    assert torch.equal(world(lambda x: fn.all_gather(x, "data"), 3, out_dims=None)(x), x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_psum_and_the_exchanges_keep_the_dtype(dtype):
    x = torch.arange(4).view(2, 2).to(dtype)
    total = world(lambda x: fn.psum(x, "data"), 2, out_dims=None)(x)
    assert total.dtype == dtype
    assert torch.equal(total, (x[0] + x[1]))
    assert world(lambda x: fn.all_to_all(x, "data"), 2)(x).dtype == dtype
    assert world(lambda x: fn.all_gather(x, "data"), 2, out_dims=None)(x).dtype == dtype


def test_collectives_take_trees():
    t = {"a": torch.randn(2, 3), "b": (torch.randn(2), torch.randn(2, 0))}
    mean = world(lambda t: fn.pmean(t, "data"), 2, out_dims=None)(t)
    assert torch.equal(mean["a"], t["a"].sum(0) / 2)
    assert torch.equal(mean["b"][0], t["b"][0].sum(0) / 2)
    assert mean["b"][1].shape == (0,)


def test_a_replicated_operand_counts_once_per_rank():
    """The value does not depend on the rank, and yet every rank contributes it."""
    x = torch.tensor([1.0, 2.0])
    run = lambda f: world(f, 4, in_dims=None, out_dims=None)(x)  # noqa: E731
    assert torch.equal(run(lambda x: fn.psum(x, "data")), 4 * x)
    assert torch.equal(run(lambda x: fn.pmean(x, "data")), x)
    assert torch.equal(run(lambda x: fn.all_gather(x, "data")), x.expand(4, 2))
    rows = torch.arange(4.0)  # everyone holds the same rows: rank r receives row r from each
    received = world(lambda x: fn.all_to_all(x, "data"), 4, in_dims=None)(rows)
    assert torch.equal(received, rows[:, None].expand(4, 4))


@pytest.mark.parametrize("collective", [fn.psum, fn.pmean, fn.all_gather])
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("dim", [0, 1])
def test_an_unrelated_vmap_inside_or_outside_passes_by(collective, inside, dim):
    """Seeds outside of the ranks, samples inside: neither may be taken for the axis, also of equal size."""
    x = torch.randn(3, 3, 3, dtype=torch.float64)  # (other, rank, n)

    def f(x):
        return collective(x, "data")

    expected = torch.stack([world(f, 3, out_dims=None)(row) for row in x])
    if inside:  # a rank holds (other, n), or (n, other)
        mine = x.movedim(1, 0) if dim == 0 else x.permute(1, 2, 0)
        found = world(torch.func.vmap(f, in_dims=dim), 3, out_dims=None)(mine)
    else:
        found = torch.func.vmap(world(f, 3, out_dims=None), in_dims=dim)(x.movedim(0, dim))
    assert torch.allclose(found, expected, rtol=1e-14)


@pytest.mark.parametrize("inside", [True, False])
def test_all_to_all_lets_an_unrelated_vmap_pass_by(inside):
    x = torch.randn(3, 3, 3, 2)  # (other, rank, receiver, n)

    def f(x):
        return fn.all_to_all(x, "data")

    found = world(torch.func.vmap(f), 3, in_dims=1, out_dims=1)(x) if inside else torch.func.vmap(world(f, 3))(x)
    assert torch.equal(found, x.transpose(1, 2))


def test_per_sample_gradients_are_averaged_over_ranks_sample_by_sample():
    w, data = torch.randn(4, dtype=torch.float64), torch.randn(3, 5, 4, dtype=torch.float64)  # (rank, sample, n)

    def loss(w, x):
        return (w @ x).square()

    def on_rank(w, xs):
        per_sample = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(w, xs)
        return torch.func.vmap(lambda g: fn.pmean(g, "data"))(per_sample)

    found = world(on_rank, 3, in_dims=(None, 0), out_dims=None)(w, data)
    expected = torch.stack([2 * (w @ x) * x for x in data.view(-1, 4)]).view(3, 5, 4).mean(0)
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("order", [("node", "local"), ("local", "node")])
def test_nested_axes_of_equal_size_exchange_along_their_own(order):
    x = torch.randn(2, 2, 2, 3)  # (first, second, row, n)

    def f(x):
        return fn.all_to_all(x, order[0]), fn.all_to_all(x, order[1]), fn.all_gather(x, order[1])

    first, second, gathered = fn.simulate(fn.simulate(f, order[1], 2), order[0], 2)(x)
    assert torch.equal(first, x.transpose(0, 2))
    assert torch.equal(second, x.transpose(1, 2))
    for a in range(2):
        for b in range(2):
            assert torch.equal(gathered[a, b], x[a])


@pytest.mark.parametrize("shape", [(3,), (), (1, 4)])
def test_all_to_all_refuses_a_first_dimension_that_is_not_the_axis_size(shape):
    with pytest.raises(ValueError, match=r"x: has shape.*2.*'data'"):
        world(lambda x: fn.all_to_all(x, "data"), 2, in_dims=None)(torch.ones(shape))


def test_one_rank_is_the_identity():
    x = torch.randn(1, 5)
    assert torch.equal(fn.all_to_all(x, "data"), x)
    assert torch.equal(fn.pmean(x, "data"), x)
    assert torch.equal(fn.all_gather(x, "data"), x[None])


def test_non_contiguous_operands_travel_as_they_look():
    x = torch.randn(2, 3, 2).transpose(1, 2)
    assert torch.equal(world(lambda x: fn.all_to_all(x, "data"), 2)(x), x.transpose(0, 1))
    assert torch.equal(world(lambda x: fn.all_gather(x.T, "data"), 2, out_dims=None)(x), x.transpose(1, 2))


def payload() -> dict:
    """Leaves of every width, each row another, so that a slip of a byte shows."""
    torch.manual_seed(5)
    return {
        "bits": torch.randint(0, 256, (2, 2, 5), dtype=torch.uint8),
        "half": torch.randn(2, 2, 3, 1).half(),
        "scales": torch.randn(2, 2, 1, dtype=torch.float64),
        "single": torch.randn(2, 2, 2),
    }


def test_a_payload_of_mixed_dtypes_comes_through_one_uint8_message_bit_for_bit():
    sent = payload()
    with fn.ledger() as book:
        received = world(lambda t: exchange(t, "data"), 2)(sent)
    assert book.messages == {("data", "all_to_all"): 1}
    for name, leaf in sent.items():
        assert received[name].dtype == leaf.dtype
        assert torch.equal(received[name], leaf.transpose(0, 1))
    shards = fn.tree.map(lambda leaf: leaf[:, :1], sent)
    with fn.ledger() as book:
        gathered = world(lambda t: gather(t, "data"), 2, out_dims=None)(shards)
    assert book.messages == {("data", "all_gather"): 1}
    assert all(torch.equal(gathered[name], leaf[:, 0]) for name, leaf in shards.items())


def all_of_them(x: torch.Tensor):
    rows = x.view(fn.axis_size("data"), -1)
    return fn.all_to_all(rows, "data"), fn.all_gather(x, "data"), fn.pmean(x, "data"), fn.axis_index("data") + rows


def test_simulated_collectives_compile_to_one_graph_and_agree_with_eager(graphs):
    f = world(all_of_them, 2)
    x = torch.randn(2, 6)
    compiled = torch.compile(f, fullgraph=True, backend=graphs)
    for a, b in zip(compiled(x), f(x), strict=True):
        assert torch.equal(a, b)
    compiled(torch.randn(2, 6))
    assert graphs.count == 1


two = ranks.Cases(2)


@two
def on_both_ways():
    return [on_processes(compile) for compile in (False, True)]


def on_processes(compile: bool):
    with fn.bind(init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(dist.get_rank())).view(-1)
        f = torch.compile(all_of_them, fullgraph=True, backend="aot_eager") if compile else all_of_them
        return x, f(x), torch.func.vmap(lambda y: fn.pmean(y, "data"))(x.view(2, 4))


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
def test_processes_exchange_what_the_simulation_exchanges(compile):
    found = [ways[compile] for ways in two.answer("on_both_ways")]
    simulated = world(all_of_them, 2)(torch.stack([x for x, _, _ in found]))
    for rank, (_, (swapped, gathered, mean, index), passed_by) in enumerate(found):
        assert torch.equal(swapped, simulated[0][rank])
        assert torch.equal(gathered, simulated[1][rank])
        assert torch.allclose(mean, simulated[2][rank], rtol=1e-6)
        assert torch.equal(index, simulated[3][rank])
        assert torch.allclose(passed_by.view(-1), mean, rtol=1e-6)


@two
def every_dtype() -> list:
    with fn.bind({"data": dist.group.WORLD}):
        x = torch.arange(4).view(2, 2) + 10 * dist.get_rank()
        return [
            (fn.psum(x.to(d), "data"), fn.all_to_all(x.to(d), "data"), fn.all_gather(x.to(d), "data")) for d in DTYPES
        ]


def test_processes_take_every_dtype_that_the_simulation_takes():
    x = torch.stack([torch.arange(4).view(2, 2), torch.arange(4).view(2, 2) + 10])
    for rank, found in enumerate(two.answer("every_dtype")):
        for dtype, (total, swapped, gathered) in zip(DTYPES, found, strict=True):
            assert total.dtype == swapped.dtype == gathered.dtype == dtype
            assert torch.equal(total, x.sum(0).to(dtype))
            assert torch.equal(swapped, x.transpose(0, 1)[rank].to(dtype))
            assert torch.equal(gathered, x.to(dtype))


def permute(x, axis):
    return fn.permute(x, axis, [*range(1, fn.axis_size(axis)), 0])


COLLECTIVES = [fn.psum, fn.pmean, fn.all_gather, fn.all_to_all, permute]


def in_forward_mode(f, x):
    return torch.func.jvp(f, (x,), (torch.ones_like(x),))[1]


def through_backward(f, x):
    return torch.autograd.grad(f(x.requires_grad_()), x)[0]


DIFFERENTIATIONS = [torch.func.grad, in_forward_mode, through_backward]


def differentiated(differentiate, collective, x):
    def loss(x):
        return collective(x * x, "data").sum()

    return torch.func.grad(loss)(x) if differentiate is torch.func.grad else differentiate(loss, x)


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("differentiate", DIFFERENTIATIONS)
@pytest.mark.parametrize("inside", [True, False])
def test_a_simulated_collective_refuses_to_be_differentiated(collective, differentiate, inside):
    """At whatever level: of the function of one rank, or of the simulation as a whole."""
    text = rf"{collective.__name__} is not differentiable.*fn\.pmean\(grad, 'data'\).*x\.detach\(\)"
    run, x = world(lambda x: collective(x, "data"), 2), torch.ones(2, 2)
    if not inside:
        differentiated_run = partial(differentiated, differentiate, lambda x, axis: run(x))
    elif differentiate is through_backward:
        differentiated_run, x = run, x.requires_grad_()
    else:
        differentiated_run = world(partial(differentiated, differentiate, collective), 2)
    with pytest.raises(ValueError, match=text):
        differentiated_run(x)


def test_a_simulated_collective_refuses_to_stand_in_a_differentiated_function():
    """Also of what is not differentiated itself; outside of that function it is taken."""

    def loss(x, inside):
        value = x.detach().mean()
        return (x * x).sum(), fn.pmean(value, "data") if inside else value

    def on_rank(x, inside):
        _, value = torch.func.grad(loss, has_aux=True)(x, inside)
        return fn.pmean(value, "data")

    x = torch.tensor([[1.0], [3.0]])
    assert world(lambda x: on_rank(x, False), 2, out_dims=None)(x) == 2
    with pytest.raises(ValueError, match=r"pmean over the simulated axis 'data'.*has_aux=True"):
        world(lambda x: on_rank(x, True), 2, out_dims=None)(x)


def test_what_is_not_differentiated_is_taken():
    x = torch.tensor([1.0, 3.0], requires_grad=True)
    mean = world(lambda x: fn.pmean(x, "data"), 2, out_dims=None)
    with torch.no_grad():
        assert mean(x) == 2
        assert torch.compile(mean, fullgraph=True, backend="aot_eager")(x) == 2
    assert mean(x.detach()) == 2
    assert torch.func.grad(lambda x: (x * mean(torch.ones(2))).sum())(torch.ones(2)).tolist() == [1, 1]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("differentiate", DIFFERENTIATIONS)
def test_one_rank_is_differentiated(collective, differentiate):
    found = differentiated(differentiate, collective, torch.ones(1))
    assert found.tolist() == ([2] if differentiate is not in_forward_mode else 2)


@two
def differentiated_on_processes() -> dict:
    found = {}
    with fn.bind({"data": dist.group.WORLD}):
        for differentiate in DIFFERENTIATIONS:
            for collective in COLLECTIVES:
                try:
                    answer = differentiated(differentiate, collective, torch.ones(2, 2))
                except ValueError as error:
                    answer = str(error)
                found[differentiate.__name__, collective.__name__] = answer
        x = torch.tensor([1.0, 3.0], requires_grad=True)
        with torch.no_grad():
            found["no_grad"] = fn.pmean(x, "data")
        found["detached"] = fn.pmean(x.detach(), "data")
        found["aux"] = torch.func.grad(lambda x: (x.sum(), fn.pmean(x.detach(), "data")), has_aux=True)(x.detach())[1]
    return found


def test_processes_refuse_to_differentiate_a_collective():
    """torch gives zeros there, from torch.func without a word."""
    for found in two.answer("differentiated_on_processes"):
        for name in ("no_grad", "detached", "aux"):
            assert found.pop(name).tolist() == [1, 3]
        assert len(found) == 15
        for (_, name), answer in found.items():
            assert isinstance(answer, str)
            assert f"{name} is not differentiable" in answer


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_a_mean_of_integers_is_refused(dtype):
    with pytest.raises(TypeError, match=rf"x: expected floating.*, but got {dtype}; .*fn\.psum"):
        world(lambda x: fn.pmean(x, "data"), 2, out_dims=None)(torch.ones(2, 3, dtype=dtype))


def test_truth_values_are_not_summed():
    right = torch.tensor([[True, True], [True, False]])
    with pytest.raises(TypeError, match=r"^x: .* got torch\.bool; .*x\.int\(\)"):
        world(lambda x: fn.psum(x, "data"), 2, out_dims=None)(right)
    assert world(lambda x: fn.psum(x.int(), "data"), 2, out_dims=None)(right).tolist() == [2, 1]


@pytest.mark.parametrize("collective", COLLECTIVES)
@pytest.mark.parametrize("size", [1, 2])
def test_a_number_of_python_is_refused(collective, size):
    run = fn.simulate(lambda x: collective({"x": x, "one": 1}, "data"), "data", size)
    with pytest.raises(TypeError, match=r"^x: .* got a leaf 1; .*fn\.axis_size"):
        run(torch.ones(size, size))
