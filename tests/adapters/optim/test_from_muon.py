"""A run that begins with a Muon of a project's own, or torch's, and goes on with `fn.muon`, from its momentum."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import ranks
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import tree
from fn.adapters import from_muon

SHAPES = {"embedding": (7, 4), "wide": (4, 6), "tall": (9, 4), "bias": (6,)}
LABELS = ["other", "hidden", "hidden", "other"]
HYPER = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.1}


def network() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES.values()]


def give_gradients(params: list[nn.Parameter], t: int) -> None:
    generator = torch.Generator().manual_seed(100 + t)
    for p in params:
        p.grad = torch.randn(p.shape, generator=generator)


def train(params: list[nn.Parameter], opts: Any, first: int, last: int) -> None:
    for t in range(first, last):
        give_gradients(params, t)
        for opt in opts:
            opt.step()


class Copied(torch.optim.Optimizer):
    """A Muon as projects have it, in float32. average: keep one, as Keller Jordan's does, or a sum, as Moonlight's."""

    def __init__(self, params: Any, lr: float, momentum: float, weight_decay: float, average: bool) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "average": average})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            b = group["momentum"]
            for p in group["params"]:
                m = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                m.mul_(b).add_(p.grad, alpha=1 - b if group["average"] else 1.0)
                z = p.grad.lerp(m, b) if group["average"] else p.grad + b * m
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * max(1, p.shape[0] / p.shape[1]) ** 0.5 * newton_schulz(z))


def newton_schulz(z: Tensor) -> Tensor:
    x = z / (z.norm() + 1e-7)
    for a, b, c in [(3.4445, -4.7750, 2.0315)] * 5:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def jordan(lr: Any, momentum: float, weight_decay: float, labels: Any) -> fn.Transform:
    """Return `fn.muon` with Keller Jordan's coefficients."""
    kinds = {
        "hidden": fn.scale_by_muon(momentum, nesterov=True, scale="max", coefficients="jordan"),
        "other": fn.scale_by_adam(0.9, 0.95),
    }
    ends = fn.add_decayed_weights(weight_decay), fn.scale_by_learning_rate(lr)
    return fn.chain(fn.partition(kinds, [*labels]), *ends)


def two(params: list[nn.Parameter], muon: Any) -> tuple[Any, torch.optim.AdamW]:
    hidden = [p for p, label in zip(params, LABELS, strict=True) if label == "hidden"]
    others = [p for p, label in zip(params, LABELS, strict=True) if label == "other"]
    return muon(hidden, **HYPER), torch.optim.AdamW(others, lr=0.02, betas=(0.9, 0.95), weight_decay=0.1)


def assert_equal_params(ours: list[nn.Parameter], theirs: list[nn.Parameter], far: float = 1e-5) -> None:
    for x, y, start in zip(ours, theirs, network(), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=far)
        assert float((x - start).detach().abs().max()) > 0.02


@pytest.mark.parametrize("split", [False, True], ids=["one group", "other groups"])
@pytest.mark.parametrize("buffer", ["average", "sum"])
def test_the_next_steps_are_those_of_a_copy_and_its_adamw(buffer, split):
    make = partial(Copied, average=buffer == "average")
    theirs, ours = network(), network()
    alone, before = two(theirs, make), two(ours, make)
    train(theirs, alone, 0, 9)
    train(ours, before, 0, 4)
    groups: Any = ours
    hyper: Any = {**HYPER, "labels": LABELS}
    if split:
        kinds = [([2, 0], ["hidden", "other"]), ([3, 1], ["other", "hidden"])]
        groups = [{"params": [ours[i] for i in places], "labels": labels} for places, labels in kinds]
        hyper = HYPER
    opt = fn.Optimizer(groups, jordan, **hyper)
    from_muon(before[0], opt, buffer=buffer, adamw=before[1])
    assert opt.steps == 4
    train(ours, [opt], 4, 9)
    assert_equal_params(ours, theirs)


@pytest.mark.parametrize("make", [fn.muon, fn.normuon])
def test_the_buffer_of_torchs_muon_is_an_average(make):
    """Its next buffer is ours times 1 - b; its updates are in bfloat16, see the next test."""
    params = network()
    muon, adamw = two(params, torch.optim.Muon)
    train(params, [muon, adamw], 0, 4)
    opt = fn.Optimizer(params, make, labels=LABELS, **HYPER)
    from_muon(muon, opt)
    assert opt.steps == 0
    train(params, [muon, opt], 4, 5)
    (momentum,) = [x for x in fn.roles.find(opt.states, "first_moment") if x[0].shape == (4, 6)]
    for p, m in zip(params[1:3], momentum, strict=True):
        torch.testing.assert_close(m * (1 - 0.9), muon.state[p]["momentum_buffer"], rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(128, 128), (256, 64)])
def test_torchs_next_step_is_ours_to_two_percent(shape):
    def bfloat16(lr: Any, momentum: float, weight_decay: float) -> fn.Transform:
        link = fn.scale_by_muon(momentum, True, scale="max", coefficients="jordan", dtype=torch.bfloat16)
        return fn.chain(link, fn.add_decayed_weights(weight_decay), fn.scale_by_learning_rate(lr))

    theirs, ours = [nn.Parameter(torch.zeros(shape))], [nn.Parameter(torch.zeros(shape))]
    alone, before = torch.optim.Muon(theirs, **HYPER), torch.optim.Muon(ours, **HYPER)
    train(theirs, [alone], 0, 4)
    train(ours, [before], 0, 4)
    (start,) = [p.detach().clone() for p in ours]
    opt = fn.Optimizer(ours, bfloat16, **HYPER)
    from_muon(before, opt)
    train(theirs, [alone], 4, 5)
    train(ours, [opt], 4, 5)
    far, way = (ours[0] - theirs[0]).detach().norm(), (theirs[0] - start).detach().norm()
    assert 0 < float(far) <= 0.02 * float(way)


def test_blocks_of_rows_and_a_matrix_that_never_had_a_gradient():
    labels = [fn.labels_of(nn.Linear(4, 9), splits={"weight": (2, 7)})["weight"], "hidden"]
    params = [network()[2], network()[1]]
    muon = Copied(params, **HYPER, average=False)
    muon.state[params[0]]["momentum_buffer"] = torch.arange(36.0).view(9, 4)
    opt = fn.Optimizer(params, fn.muon, labels=labels, **HYPER)
    from_muon(muon, opt, buffer="sum")
    (momentum,) = [x for x in fn.roles.find(opt.states, "first_moment") if x]
    assert [x.shape[0] for x in momentum] == [2, 7, 4]
    torch.testing.assert_close(torch.cat(momentum[:2]), torch.arange(36.0).view(9, 4))
    assert not momentum[2].any()


# What is refused.


def refused(muon_of: Any = torch.optim.Muon, opt_of: Any = None, steps: int = 1, with_adamw: bool = True, **more: Any):
    params = network()
    muon, adamw = two(params, muon_of)
    train(params, [muon, adamw], 0, steps)
    opt = (opt_of or (lambda ps: fn.Optimizer(ps, fn.muon, labels=LABELS)))(params)
    before = [x.clone() for x in tree.leaves(opt.states)]
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        from_muon(muon, opt, **{"adamw": adamw if with_adamw else None, **more})
    assert all(map(torch.equal, before, tree.leaves(opt.states)))
    assert opt.steps == 0
    return str(caught.value)


def test_what_does_not_fit_is_refused_and_nothing_is_changed():
    average = partial(Copied, average=True)
    text = refused(average)
    assert text.startswith("buffer: expected 'average' or 'sum', what Copied keeps as its momentum_buffer, but got")
    assert refused(buffer="sum").startswith("buffer: expected 'average' for a torch.optim.Muon, or None, but got 'sum'")
    text = refused(steps=0, with_adamw=False)
    assert text == "muon: expected a step taken, but got no momentum_buffer; there is nothing to take over"
    cure = "make both over the same model, and give fn.Optimizer labels= of what was divided by hand"
    text = refused(opt_of=lambda ps: fn.Optimizer(ps, fn.muon))  # the embedding is a matrix, too
    wanted = "the hidden matrices of param group 0 of the optimizer"
    assert text == f"muon: expected {wanted}, but got none of those of shapes [(7, 4)]; {cure}"
    text = refused(opt_of=lambda ps: fn.Optimizer(ps, fn.muon, labels=["other", "other", "hidden", "other"]))
    assert text == f"muon: expected hidden matrices of the optimizer only, but got 1 of 2 that are none; {cure}"
    text = refused(opt_of=lambda ps: fn.Optimizer(ps[:3], fn.muon, labels=LABELS[:3]))
    assert text == f"adamw: expected other tensors of the optimizer only, but got 1 of 2 that are none; {cure}"
    text = refused(opt_of=lambda ps: fn.Optimizer(ps, partial(fn.muon, other="lion"), labels=LABELS))
    assert text.startswith("expected the state of param group 0 to hold one momentum over all hidden matrices, as that")


def test_a_buffer_of_another_shape_and_a_class_without_momentum_in_its_groups_are_refused():
    params = network()[1:2]
    muon, opt = Copied(params, **HYPER, average=True), fn.Optimizer(params, fn.muon)
    muon.state[params[0]]["momentum_buffer"] = torch.ones(6, 4)
    with pytest.raises(ValueError, match=r"of the shape of its parameter, \(4, 6\), but got \(6, 4\); reshape it"):
        from_muon(muon, opt, buffer="average")
    del muon.param_groups[0]["momentum"]
    with pytest.raises(ValueError, match="expected a 'momentum' in each param group, by which an average is made a"):
        from_muon(muon, opt, buffer="average")
    assert not any(x.any() for x in tree.leaves(opt.states))


def on_two_ranks() -> list[str]:
    found = []
    for owned in (False, True):
        params = network()
        muon, adamw = two(params, torch.optim.Muon)
        train(params, [muon, adamw], 0, 2)
        with fn.bind(init_device_mesh("cpu", (2,), mesh_dim_names=("data",))):
            opt = fn.Optimizer(params, partial(fn.muon, axis="data", owned=owned), labels=LABELS)
        try:
            from_muon(muon, opt, adamw=adamw)
            found.append("taken over")
        except ValueError as error:
            found.append(str(error))
    return found


def test_two_ranks_take_it_over_unless_momenta_have_owners():
    for whole, owned in ranks.run(2, on_two_ranks):
        assert whole == "taken over"
        assert owned.endswith("or parts of tensors, as owners and shards do; give fn.muon owned=False, or begin anew")
