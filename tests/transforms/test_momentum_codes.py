"""The momentum of 1-bit Adam as codes: the same numbers, step by step, and a structure that changes only when asked."""

from __future__ import annotations

import pytest
import torch

import fn
from fn import Phase, tree
from fn.transforms.adam import OnebitAdamState
from fn.transforms.momentum_codes import MomentumCodes

SHAPES = [(7, 5), (3,), (), (0,), (33,)]
CASES = [
    {},
    {"feedback": fn.classic(lazy=True), "weight_decay": 0.1},
    {"layout": "per_tensor", "bias_correction": True},
    {"codec": fn.sign(padding_counts=True)},
    {"feedback": fn.classic(store=torch.int8)},
]


def gradients(ranks, dtype=torch.float32, seed=0):
    """Return gradients of ranks, a row of a tensor without any."""
    draw = torch.Generator().manual_seed(seed)
    grads = [torch.randn((ranks, *shape), generator=draw).to(dtype) for shape in SHAPES]
    grads[0][:, 2] = 0.0
    return grads


def run(tx, steps, as_codes):
    """Return a function of a rank: (gradients of each step) -> params and state after each compressed step."""

    def rank(*grads_of):
        params = [torch.full_like(g, 0.5) for g in grads_of[0]]
        state, found = tx.init(params), []
        for phase, grads in zip(steps, grads_of, strict=True):
            if phase is Phase.WARMUP:
                state = fn.momentum_as_floats(state)
            updates, state = tx.update(phase)(grads, state, params)
            params = fn.apply_updates(params, updates)
            if as_codes and phase is Phase.COMPRESSED:
                state = fn.momentum_as_codes(state)
            found.append((params, fn.momentum_as_floats(state)))
        return found

    return rank


STEPS = [Phase.WARMUP, Phase.WARMUP, *[Phase.COMPRESSED] * 4, Phase.WARMUP, *[Phase.COMPRESSED] * 3]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("case", range(len(CASES)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_steps_are_the_same_bit_for_bit(case, ranks, dtype):
    tx = fn.onebit_adam(1e-2, axis="data", **CASES[case])
    grads_of = [gradients(ranks, dtype, seed) for seed in range(len(STEPS))]
    floats, codes = (fn.simulate(run(tx, STEPS, how), "data", ranks)(*grads_of) for how in (False, True))
    for a, b in zip(tree.leaves(floats), tree.leaves(codes), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def test_the_structure_stays_from_one_compressed_step_to_the_next_and_takes_two_bits():
    tx = fn.onebit_adam(1e-2, axis="data")

    def steps(g):
        params = torch.zeros_like(g)
        state = tx.init(params)
        for phase in (Phase.WARMUP, Phase.COMPRESSED):
            _, state = tx.update(phase)(g, state, params)
        state = fn.momentum_as_codes(state)
        _, after = tx.update(Phase.COMPRESSED)(g, state, params)
        assert tree.flatten(after)[1] == tree.flatten(state)[1]
        codes = tree.instances(after, MomentumCodes)[0]
        assert sum(x.numel() for x in (*codes.bits, *codes.seen)) == 2 * 64 // 8
        return tree.leaves(after)

    fn.simulate(steps, "data", 2)(torch.randn(2, 64))


def refused(text, f):
    with pytest.raises(ValueError, match=text):
        f()


def test_what_is_not_scale_times_sign_is_refused():
    params = [torch.ones(40), torch.ones(3)]
    state = fn.onebit_adam(1e-2, axis="data").init(params)
    momentum = [torch.linspace(-1, 1, 40), torch.ones(3)]
    adam = tree.instances(state, OnebitAdamState)[0]
    state = tree.replace(state, OnebitAdamState, lambda _: adam._replace(mu=momentum))
    text = r"state: expected a momentum of scale \* sign, .* behind a compressed step"
    refused(text, lambda: fn.momentum_as_codes(state))


@pytest.mark.parametrize(
    "hyper", [{"servers": False}, {"feedback": fn.off()}, {"axis": ("local", "node")}], ids=str
)
def test_averages_that_do_not_say_how_it_travels_are_refused(hyper):
    axes = {"axis": "data", **hyper}
    state = fn.onebit_adam(1e-2, **axes).init([torch.ones(40), torch.ones(3)])
    refused("state: expected the state of fn.compressed_average over one axis", lambda: fn.momentum_as_codes(state))


def coded(keep_zeros=True):
    """Return a transform for one rank, and a state of two ranks whose momentum is kept as codes."""
    tx = fn.onebit_adam(1e-2, axis="data", keep_zeros=keep_zeros)

    def steps(g):
        state = tx.init(g)
        for phase in (Phase.WARMUP, Phase.COMPRESSED):
            _, state = tx.update(phase)(g, state, g)
        return tree.leaves(fn.momentum_as_codes(state)), tree.leaves(state)

    kept, plain = fn.simulate(steps, "data", 2)(torch.randn(2, 64))
    shapes = tx.init(torch.zeros(64))
    state = tree.unflatten(tree.flatten(shapes)[1], [x[0] for x in plain])
    adam = tree.instances(state, OnebitAdamState)[0]
    assert len(kept) == len(plain) + 2
    return tx, tree.replace(state, OnebitAdamState, lambda _: adam), fn.momentum_as_codes(state)


def test_a_state_turns_into_codes_and_back_bit_for_bit():
    _, state, codes = coded()
    assert len(tree.instances(codes, MomentumCodes)) == 1
    assert fn.momentum_as_codes(codes) is not None
    back = fn.momentum_as_floats(codes)
    assert all(map(torch.equal, tree.leaves(state), tree.leaves(back)))
    assert tree.flatten(back)[1] == tree.flatten(state)[1]


def test_a_warm_up_step_and_another_number_of_ranks_refuse_codes():
    tx, _, codes = coded()
    g = torch.ones(64)
    refused(
        r"state: expected a momentum in floating point in a warm-up step, but got one as codes; call fn.momentum_as_fl",
        lambda: tx.update(Phase.WARMUP)(g, codes, g),
    )
    text = "state: expected codes made by 1 ranks, as many as there are, but got codes of another number; call fn.mom"
    refused(text, lambda: tx.update(Phase.COMPRESSED)(g, codes, g))


def test_a_momentum_that_need_not_stay_zero_has_no_codes():
    tx = fn.onebit_adam(1e-2, axis="data", keep_zeros=False)

    def steps(g):
        state = tx.init(g)
        for phase in (Phase.WARMUP, Phase.COMPRESSED):
            _, state = tx.update(phase)(g, state, g)
        return tx.update(Phase.COMPRESSED)(g, fn.momentum_as_codes(state), g)[0]

    with pytest.raises(ValueError, match="state: expected a momentum in floating point where keep_zeros is False"):
        fn.simulate(steps, "data", 2)(torch.randn(2, 64))
