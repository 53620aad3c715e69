"""Owned over two axes: exact within a node, codes between nodes, all ranks equal bit for bit."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import ranks
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, roles, tree
from fn.adapters import checkpoint
from fn.collectives.compressed import ErrorFeedbackState
from fn.transforms import owned as transforms_owned

AXES = ("local", "node")
SHAPES = [(6, 5), (6, 5), (7,), (6, 5), (3, 8), (), (0,), (6, 5)]
W, C = Phase.WARMUP, Phase.COMPRESSED
CODES: dict[str, dict[str, Any]] = {
    "exact": {},
    "int8 both ways": {"codec": fn.int8(), "gather": fn.int8()},
    "signs": {"codec": fn.sign()},
    "int4 damped": {"codec": fn.int4(), "gather": fn.int8(), "feedback": fn.damped()},
}


def start(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def gradients(nodes: int, local: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(nodes, local, *shape, generator=generator).to(dtype) for shape in SHAPES]


def inner() -> fn.Transform:
    kinds = {"muon": fn.scale_by_muon(), "adam": fn.scale_by_adam()}
    step = fn.partition(kinds, lambda params: tree.map(lambda p: "muon" if p.ndim == 2 else "adam", params))
    return fn.chain(step, fn.scale_by_learning_rate(0.05))


def over_two(f: Any, nodes: int, local: int, in_dims: Any, out_dims: Any) -> Any:
    dims = {"in_dims": in_dims, "out_dims": out_dims}
    return fn.simulate(fn.simulate(f, "local", local, **dims), "node", nodes, **dims)


def simulated(tx: fn.Transform, nodes: int, local: int, steps: int, dtype: Any = torch.float32) -> tuple[Any, Any, Any]:
    """Return the params after each step, the same on all ranks as `simulate` proves, the state, and the ledger."""
    params, dims, found = start(dtype), fn.rank_dims(tx.init(start(dtype))), []
    state = over_two(tx.init, nodes, local, None, dims)(params)
    with fn.ledger() as sent:
        for t in range(steps):

            def on_rank(g: Any, s: Any, p: Any, phase: Phase = C if t else W) -> Any:
                u, s = tx.update(phase)(g, s, p)
                return fn.apply_updates(p, u), s

            run = over_two(on_rank, nodes, local, (0, dims, None), (None, dims))
            params, state = run(gradients(nodes, local, t, dtype), state, params)
            found.append(params)
    return found, state, sent


@pytest.mark.parametrize(("nodes", "local"), [(2, 2), (3, 2), (1, 3), (4, 1)])
def test_an_exact_step_is_that_of_all_ranks(nodes: int, local: int) -> None:
    found = simulated(fn.owned(inner(), AXES), nodes, local, 3)[0]
    tx, params = inner(), start()
    state = tx.init(params)
    for t in range(3):
        u, state = tx.update(W)([g.mean((0, 1)) for g in gradients(nodes, local, t)], state, params)
        params = fn.apply_updates(params, u)
    for x, y in zip(found[-1], params, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_a_node_sends_what_one_rank_would() -> None:
    """Within the node what a rank sends hardly depends on the nodes; between nodes all ranks send 1 / local each."""
    make = partial(fn.owned, inner(), **CODES["int8 both ways"])
    flat, tx = make("data"), make(AXES)
    dims = fn.rank_dims(flat.init(start()))
    state = fn.simulate(flat.init, "data", 3, in_dims=None, out_dims=dims)(start())
    with fn.ledger() as one:
        run = fn.simulate(flat.update(C), "data", 3, in_dims=(0, dims, None), out_dims=(None, dims))
        run([g[:, 0] for g in gradients(3, 1, 1)], state, start())
    books = [simulated(tx, 3, 4, steps)[2] for steps in (1, 2)]
    sent = {key: books[1].sent[key] - books[0].sent[key] for key in books[1].sent}
    for collective in ("all_to_all", "all_gather"):
        assert sent["node", collective] == -(-one.sent["data", collective] // 4)


def test_what_is_not_delivered_is_kept_by_those_who_send() -> None:
    tx = fn.owned(fn.scale(1.0), AXES, codec=fn.sign(), gather=fn.int4())
    found, state, _ = simulated(tx, 3, 2, 5)
    given = [sum(g.mean((0, 1)) for g in each) for each in zip(*(gradients(3, 2, t) for t in range(5)), strict=True)]
    for i, (before, after, total) in enumerate(zip(start(), found[-1], given, strict=True)):
        worker, back, n = state.errors.worker[i], state.back[i], total.numel()
        in_node, node = divmod(int(state.owners[i]), 3)
        assert not worker[:, 1 - in_node].any()  # of the ranks with the other index
        kept = (worker[:, in_node].mean(0)[:n] + back[node, in_node][:n]).view(total.shape)
        torch.testing.assert_close(after - before + kept, total, rtol=1e-4, atol=1e-4)


def on_real_ranks(dtype: torch.dtype, joins_codes: bool) -> dict[str, Any]:
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local")), {}
    node, local = mesh.get_coordinate() or (0, 0)
    for name, codes in CODES.items():
        as_device = mock.patch.object(transforms_owned, "_is_launched", return_value=joins_codes)
        with fn.bind(mesh), as_device, fn.ledger() as sent:
            tx, params, each = fn.owned(inner(), AXES, **codes), start(dtype), []
            state, before = tx.init(params), dict(sent.sent)
            for t in range(3):
                g = [x[node, local] for x in gradients(2, 2, t, dtype)]
                u, state = tx.update(C if t else W)(g, state, params)
                params = fn.apply_updates(params, u)
                each.append(params)
        book = {key: n - before.get(key, 0) for key, n in sent.sent.items()}
        sizes = [sum(x.numel() for x in tree.leaves(e) if x.ndim) for e in state.errors.worker]
        found[name] = each, book, sizes, state.owners, int(local)
    return found


@pytest.mark.parametrize(("dtype", "joins_codes"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_two_by_two_real_ranks_are_simulated_ones_and_equal_bit_for_bit(dtype: torch.dtype, joins_codes: bool) -> None:
    """Also where the codes of an owner's tensors are joined, as on a device."""
    answers = ranks.run(4, on_real_ranks, dtype, joins_codes)
    for name, codes in CODES.items():
        expected, _, book = simulated(fn.owned(inner(), AXES, **codes), 2, 2, 3, dtype)
        first = answers[0][name][0]
        for each, _, sizes, owners, local in (answer[name] for answer in answers):
            for t in range(3):
                assert all(map(torch.equal, each[t], first[t])), name
                for x, y in zip(each[t], expected[t], strict=True):
                    torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5, msg=name)
            if "codec" in codes:  # only who sends a tensor has an error of it
                assert [bool(n) for n in sizes] == [bool(p.numel()) and int(o) // 2 == local
                                                    for p, o in zip(start(), owners, strict=True)]  # fmt: skip
        for key, n in book.sent.items():  # a simulation counts the mean
            assert n == pytest.approx(sum(answer[name][1].get(key, 0) for answer in answers) / 4, abs=len(SHAPES))


def made(mesh: Any, params: list[Tensor], **more: Any) -> fn.Optimizer:
    with fn.bind(mesh):
        make, listed = partial(fn.muon, axis=AXES, **more), [torch.nn.Parameter(p.clone()) for p in params]
        return fn.Optimizer(listed, make, schedule=fn.freeze_after(1), lr=0.1)


def train(opt: fn.Optimizer, mesh: Any, steps: range) -> list[Tensor]:
    params, (node, local) = opt.param_groups[0]["params"], mesh.get_coordinate()
    for t in steps:
        for p, g in zip(params, gradients(2, 2, t), strict=True):
            p.grad = g[node, local].clone()
        opt.step()
    return [p.detach() for p in params]


def saved(folder: str) -> Any:
    """Train 4 steps, and 2 steps and 2 more from a state dict of this rank, or from a checkpoint of all ranks.

    Returns: whether these are the same, and what is not delivered of each tensor, as far as this rank sends it.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("node", "local"))
    whole, first = (made(mesh, start(), codec=fn.int8()) for _ in range(2))
    expected, half = train(whole, mesh, range(4)), train(first, mesh, range(2))
    checkpoint.save(folder, first)
    resumed = []
    for load in (lambda opt: opt.load_state_dict(first.state_dict()), lambda opt: checkpoint.load(folder, opt)):
        second = made(mesh, half, codec=fn.int8())
        load(second)
        resumed.append(all(map(torch.equal, train(second, mesh, range(2, 4)), expected)))
    return resumed, undelivered(first)


def undelivered(opt: fn.Optimizer) -> list[Tensor]:
    (errors,) = tree.instances(opt.states, ErrorFeedbackState)
    return [e.clone() for e in errors.worker]


def elsewhere(folder: str, shape: tuple[int, int]) -> list[Tensor]:
    opt = made(init_device_mesh("cpu", shape, mesh_dim_names=("node", "local")), start(), codec=fn.int8())
    checkpoint.load(folder, opt)
    return undelivered(opt)


@pytest.mark.filterwarnings("ignore:(eps|gradients|params):")
def test_muon_over_two_axes_resumes_bit_for_bit_and_keeps_the_undelivered_mean_elsewhere(tmp_path: Path) -> None:
    answers = ranks.run(4, saved, str(tmp_path))
    assert [resumed for resumed, _ in answers] == [[True, True]] * 4
    sent = [[e for _, errors in answers if (e := errors[i]).numel()] for i in range(len(SHAPES))]
    mean = [torch.stack(each).mean(0) for each in sent if each]
    assert [len(each) for each in sent if each] == [2] * len(mean)  # one rank of each node
    for shape in ((2, 1), (1, 2)):
        for i, each in enumerate(zip(*ranks.run(2, elsewhere, str(tmp_path), shape), strict=True)):
            senders = [e for e in each if e.numel()]
            assert len(senders) == shape[0] * bool(sent[i])
            for e in senders:
                torch.testing.assert_close(e, mean[i - sum(not x for x in sent[:i])])


@pytest.mark.parametrize("phase", [W, C])
def test_a_nan_on_one_rank_skips_the_step_on_all(phase: Phase) -> None:
    tx = fn.muon(0.1, axis=AXES, codec=fn.int8())
    dims, grads = fn.rank_dims(tx.init(start())), gradients(2, 2, 0)
    state = over_two(tx.init, 2, 2, None, dims)(start())
    grads[2][1, 0, 3] = torch.nan
    updates, after = over_two(tx.update(phase), 2, 2, (0, dims, None), (None, dims))(grads, state, start())
    assert not any(bool(u.any()) for u in updates)
    assert [int(n) for n in roles.find(after, "skips")] == [1]
    for x, y in zip(roles.find(after, "errors"), roles.find(state, "errors"), strict=True):
        assert all(map(torch.equal, tree.leaves(x), tree.leaves(y)))


def test_links_that_communicate_within_a_node_are_refused() -> None:
    with pytest.raises(ValueError, match="inner: expected no communication over the axis"):
        fn.owned(fn.chain(fn.average("local"), inner()), AXES)
