"""An inner of `fn.sharded` may communicate with ranks that have the same shard, and with no others."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import fn
from fn import Phase
from fn.collectives.axis import names


def averaging(axis):
    """A link that somebody else wrote, and that says what it is."""

    def update(updates, state, params):
        return fn.pmean(updates, axis), state

    return fn.lift(lambda params: (), update)._replace(facts=fn.Facts(axes=names(axis)))


INNERS = {
    "adamw": partial(fn.adamw, 0.01),
    "onebit_adam": partial(fn.onebit_adam, 0.01),
    "zero_one_adam": partial(fn.zero_one_adam, 0.01),
    "loco_adamw": partial(fn.loco_adamw, 0.01),
    "average": lambda axis: fn.chain(fn.average(axis), fn.scale_by_adam()),
    "coded average": lambda axis: fn.chain(fn.average(axis, fn.int8()), fn.scale_by_adam()),
    "compressed": lambda axis: fn.scale_by_onebit_adam(sync=fn.compressed_average(axis, fn.sign())),
    "sharded": lambda axis: fn.sharded(fn.adamw(0.01), axis),
    "masked": lambda axis: fn.mask(fn.average(axis), lambda params: params),
    "its own": averaging,
}


@pytest.mark.parametrize("make", INNERS.values(), ids=INNERS)
@pytest.mark.parametrize(
    ("axis", "inner"),
    [("data", "data"), (("local", "node"), "node"), ("local", ("local", "node"))],
    ids=["one", "one of two", "both for one"],
)
def test_an_inner_that_averages_shards_with_each_other_is_refused(make, axis, inner):
    with pytest.raises(ValueError, match=r"^inner: .* over the axis '(data|node|local)', .*without an axis"):
        fn.sharded(make(axis=inner), axis)


def grid(f, in_dims, out_dims):
    inner = fn.simulate(f, "local", 2, in_dims=in_dims, out_dims=out_dims)
    return fn.simulate(inner, "node", 2, in_dims=in_dims, out_dims=out_dims)


def test_one_that_averages_over_another_axis_is_adamw_with_a_whole_state_in_every_node():
    def train(tx):
        generator = torch.Generator().manual_seed(0)
        p, s = {"w": torch.ones(2, 2, 6)}, grid(tx.init, None, 0)({"w": torch.ones(6)})

        def step(g, s, p):
            u, s = tx.update(Phase.WARMUP)(g, s, p)
            return fn.apply_updates(p, u), s

        for _ in range(3):
            p, s = grid(step, 0, 0)({"w": torch.randn(2, 2, 6, generator=generator)}, s, p)
        return p["w"]

    found = train(fn.sharded(fn.adamw(0.01, axis="node"), "local"))
    assert torch.equal(found, found[:1, :1].expand_as(found))
    torch.testing.assert_close(found, train(fn.adamw(0.01, axis=("local", "node"))), rtol=1e-6, atol=1e-7)
