"""What an island does alone: how it is healed, and what is refused. torchft is not needed for this."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fn
import fn.adapters.torchft as adapter
from fn import tree
from fn.adapters.torchft import handing_over
from fn.adapters.torchft.handing_over import become, check_made, given_to, nearest
from fn.collectives.axis import ALONE, Axis, Binding, current_binding

H = 4

CODES = partial(fn.diloco, codec=fn.int8(), servers=False)


def start(seed: int) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(5, 7), (7,), ()]]


def made_of(opt: fn.Optimizer) -> dict[str, str]:
    return handing_over.made_of(opt, given_to(opt))


class NoManager:
    """Stands for a manager of which nothing is asked."""

    def register_state_dict_fn(self, name: str, load: Any, save: Any) -> None:
        pass


def trained(seed: int, make: Any = CODES, rank: int = 0) -> tuple[list[torch.nn.Parameter], fn.Optimizer]:
    """Return an island that has taken local steps, and an exchange with itself."""
    params, alone = start(seed), Axis(1, torch.tensor(0), ALONE)
    with Binding({**current_binding().axes, "islands": alone}):
        opt = fn.Optimizer(params, partial(make, axis="islands"), schedule=fn.every(H), lr=0.02)
    for step in range(H + 1):
        for p in params:
            p.grad = torch.full_like(p, 1.0 + step + seed + rank)
        opt.step()
    return params, opt


def test_a_healed_island_is_a_copy_at_its_anchor_with_nothing_undelivered():
    (_, donor), (params, opt) = trained(0), trained(1)
    for x in tree.leaves(fn.roles.find(donor.states, "errors")):
        x.add_(1)
    become(opt, donor.state_dict())
    (anchor,), (wanted,) = (tree.fields(x.states, "anchor") for x in (opt, donor))
    assert all(torch.equal(p, x) and torch.equal(x, y) for p, x, y in zip(params, anchor, wanted, strict=True))
    inner = zip(*(tree.leaves(tree.fields(x.states, "inner")) for x in (opt, donor)), strict=True)
    assert all(torch.equal(x, y) for x, y in list(inner)[:3])
    assert not any(x.any() for x in tree.leaves(tree.fields(opt.states, "worker")))
    assert opt.steps == donor.steps


def test_an_island_that_was_made_otherwise_is_refused_by_name():
    (_, donor), (_, opt) = trained(0), trained(1, partial(CODES, outer_lr=0.5))
    with pytest.raises(ValueError, match=r"make: expected .*outer_lr to be nothing, as on the other .* but got 0.5"):
        check_made(made_of(opt), made_of(donor))


def test_an_island_that_runs_another_version_is_refused_by_name(monkeypatch):
    (_, donor), (_, opt) = trained(0), trained(1)
    theirs = made_of(donor)
    monkeypatch.setattr(handing_over, "__version__", "0.2.0")
    text = r"make: expected the version of fn to be .*, as on the other .* but got 0\.2\.0"
    with pytest.raises(ValueError, match=text):
        check_made(made_of(opt), theirs)


UNKNOWN = float("inf")

# Seconds of a message from islands 0 to 2 to the others, by the island that it comes to.
AWAY = {
    "one is near": ([9, 1, 9, UNKNOWN], [3], 1),
    "the slowest of its ways counts": ([9, 1, 5, UNKNOWN], [3, 4], 2),
    "several are as near": ([4, 4, 4, UNKNOWN], [3], 0),
    "some are known": ([UNKNOWN, 8, UNKNOWN, UNKNOWN], [3], 1),
    "none is known": ([UNKNOWN] * 4, [3], 0),
}


@pytest.mark.parametrize("what", AWAY)
def test_an_island_is_healed_by_the_nearest(what):
    to_third, takers, wanted = AWAY[what]
    to_fourth = [3, 7, 5, UNKNOWN]
    assert nearest([[UNKNOWN] * 5] * 3 + [to_third, to_fourth], [0, 1, 2], takers) == wanted


@pytest.mark.parametrize("tokens", [-1.0, float("nan"), float("inf")])
def test_what_is_no_number_of_tokens_is_refused(tokens):
    opt = adapter.optimizer(start(0), CODES, NoManager(), schedule=fn.every(H), lr=0.02, tokens=lambda: tokens)
    with pytest.raises(ValueError, match="tokens: expected to return a number of at least 0"):
        opt.exchange(fn.Round(0, 0))


@pytest.mark.parametrize(
    ("make", "schedule", "message"),
    [
        (partial(fn.diloco, codec=fn.int8()), fn.every(H), "not depend on the number of islands, .* servers=False"),
        (fn.onebit_adam, fn.every(H), "schedule: .* does not fit this optimizer"),
        (
            partial(fn.diloco, fragments=2),
            fn.every(4, fragments=2, delay=3),
            "schedule: expected one mean on its way at a time",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(make, schedule, message):
    with pytest.raises(ValueError, match=message):
        adapter.optimizer(start(0), make, NoManager(), schedule=schedule, lr=0.02)


def shared(lr: float, axis: str) -> fn.Transform:
    """Return Muon whose steps the ranks of an island share, and a chain in codes within it, with errors of servers."""
    codes = fn.compressed_average("data", fn.int8())
    inner = {"muon": fn.muon(lr, axis="data"), "codes": fn.chain(codes, fn.scale_by_learning_rate(lr))}
    return fn.chain(
        fn.average(axis),
        fn.outer(
            fn.partition(inner, lambda params: tree.map(lambda p: "muon" if p.ndim == 2 else "codes", params)),
            fn.scale_by_learning_rate(0.7),
            fn.compressed_average(axis, fn.int8(), servers=False),
        ),
    )


def shared_in_islands() -> Any:
    """Train two islands of two ranks one after the other; let the second become a copy of the first."""
    with fn.bind(init_device_mesh("cpu", (2,), mesh_dim_names=("data",))):
        (_, donor), (params, opt) = trained(0, shared, dist.get_rank()), trained(1, shared, dist.get_rank())
    apart = [p.detach().clone() for p in params]
    become(opt, donor.state_dict())
    (anchor,) = tree.fields(opt.states, "anchor")
    alike = all(torch.equal(p, x) for p, x in zip(params, anchor, strict=True))
    return apart, [p.detach().clone() for p in params], alike, opt.steps, check_made(made_of(opt), made_of(donor))


def test_the_ranks_of_an_island_may_share_the_inner_optimizer():
    """Errors of servers within an island do not depend on how many islands there are."""
    (apart, params, alike, steps, _), (also, others, _, _, _) = ranks.run(2, shared_in_islands)
    assert alike
    assert steps == H + 1
    assert all(map(torch.equal, apart, also))
    assert all(map(torch.equal, params, others))


def test_a_warm_up_step_needs_gradients_that_are_there():
    opt = adapter.optimizer(start(0), CODES, NoManager(), schedule=fn.every(H, start=2), lr=0.02)
    with pytest.raises(ValueError, match=r"step: expected gradients in p.grad, .* but got a closure"):
        opt.step(lambda: torch.zeros(()))
    opt.grad_scale = torch.ones(())  # as GradScaler leaves it there
    with pytest.raises(ValueError, match=r"step: expected gradients in p.grad, .* but got torch.amp.GradScaler"):
        opt.step()
    assert opt.steps == 0


def test_an_island_goes_on_after_as_many_steps_as_it_had_left():
    first, again = (
        adapter.optimizer(start(0), CODES, NoManager(), schedule=fn.every_seconds(1.0), lr=0.02) for _ in range(2)
    )
    first.schedule.plan(7, 0.125, entered=5.5)
    again.load_state_dict(first.state_dict())
    assert [again.schedule(step) for step in range(16)] == [fn.Round()] * 14 + [fn.Round(0, 0)] * 2
    assert again.progress == first.progress == 5.5
    assert again.schedule.begun == 7


@pytest.mark.parametrize(("steps", "sent"), [(2, 2), (3, 2), (4, 2), (5, 2), (6, 6)])
def test_an_island_that_goes_on_counts_from_where_a_difference_was_taken_and_not_from_where_it_landed(steps, sent):
    first, again = (
        adapter.optimizer(start(0), CODES, NoManager(), schedule=fn.every(H, delay=2), lr=0.02) for _ in range(2)
    )
    first.steps = steps
    again.load_state_dict(first.state_dict())
    assert again.sent == sent
