"""Methods that `fn` does not name follow their recorded runs, by codecs, means and schedules of a user's own.

`tests/own_pieces.py` has those. Whole runs are replayed, from gradients at our own params.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import chains
import pytest
import torch
from own_pieces import (
    WHOLE,
    encoded_again,
    linear,
    ring,
    times,
    whole,
)
from recorded_rounds import (
    Case,
    Method,
    fragments,
    in_simulation,
    inner_of,
    load,
    outer_step,
    replay,
    step_of,
)
from torch import Tensor

import fn
from fn import tree
from fn.collectives.codecs.codec import unpack

QUANTISERS: dict[str, Callable[[dict[str, Any], int], fn.Codec]] = {
    "statistical": lambda outer, n: fn.bins(outer["quantization_bins"], outer["quantization_range"]),
    "linear": lambda outer, n: linear(outer["quantization_bins"]),
    "topk": lambda outer, n: fn.top_k(max(1, int(n * outer["topk_sparsity_ratio"]))),
}


def muloco(case: Case, *, rate_twice: bool = True) -> Method:
    """Quantised MuLoCo. Its authors multiply differences by the outer rate, too, where errors are fed back."""
    outer = case.hyper["outer"]
    kind, fed_back = outer["compressor_type"], outer["use_ef"]
    feedback = fn.decayed(outer["error_decay"], outer["error_feedback_alpha"]) if fed_back else fn.off()

    def mean(n: int) -> fn.Transform:
        codec = QUANTISERS[kind](outer, n)
        average = fn.compressed_average("data", codec, feedback, servers=False)
        again = outer["simulate_quantization_after_reduce"] and kind != "topk"
        return fn.chain(average, encoded_again(codec)) if again else average

    sync = fn.in_basis(WHOLE, mean)
    if fed_back and rate_twice:
        sync = fn.chain(times(outer["lr"]), sync)
    rounds = fn.outer(inner_of(case.hyper["inner"]), outer_step(case.hyper["outer"]), sync)
    return Method(rounds, fn.every(case.hyper["H"]))


CODES: dict[str, Callable[[dict[str, Any]], fn.Transform]] = {
    "e3m0": lambda hyper: fn.compressed_average("data", fn.e3m0(None), fn.off(), servers=False),
    "ring_bins": lambda hyper: ring("data", fn.bins(hyper["bins"], hyper["sigmas"])),
}


def coded(case: Case) -> Method:
    """DiLoCo, streaming or not, with differences in codes and without error feedback."""
    hyper, parts = case.hyper, fragments(case)
    number = {i: f for f, places in enumerate(parts) for i in places}
    tx = fn.outer(
        inner_of(case.hyper["inner"]),
        outer_step(case.hyper["outer"]),
        CODES[hyper["code"]](hyper),
        fragments=lambda params: [number[i] for i in range(len(params))],
        alpha=hyper.get("alpha", 0.0),
    )
    return Method(tx, fn.every(hyper["H"], fragments=len(parts), delay=hyper.get("tau", 0)))


METHODS: dict[str, Callable[[Case], Method]] = {
    "muloco_quantized": muloco,
    "streaming_coded": coded,
    "diloco_coded": coded,
}

CASES = [c for name in ("codecs", "methods") for c in load(f"index_{name}.json") if c.row["method"] in METHODS]
each_case = pytest.mark.parametrize("case", CASES, ids=[case.row["name"] for case in CASES])


@each_case
def test_the_recorded_run_is_replayed_in_simulated_ranks(case: Case) -> None:
    method = METHODS[case.row["method"]](case)
    assert 0 < replay(case, method, *in_simulation(case, method.tx)) <= 1


def test_every_method_is_there() -> None:
    assert {case.row["method"] for case in CASES} == {*METHODS}


def test_the_linear_codec_is_one() -> None:
    assert fn.testing.check_codec(linear(4))


def of_muloco(what: str) -> pytest.MarkDecorator:
    found = [c for c in CASES if c.row["method"] == "muloco_quantized" and c.hyper["outer"]["use_ef"]]
    found = [c for c in found if what == "all" or c.arrays["p0.payload"].dtype.name == what]
    assert found
    return pytest.mark.parametrize("case", found, ids=[case.row["name"] for case in found])


@of_muloco("uint8")
def test_mu_locos_codes_are_the_recorded_ones(case: Case) -> None:
    outer = case.hyper["outer"]
    width = outer["quantization_bins"].bit_length() - 1
    for i, (went, errors, packed) in enumerate(zip(*map(case.each, ("pseudo", "error", "payload")), strict=True)):
        before = torch.cat([torch.zeros_like(errors[:1]), errors[:-1]])
        told = outer["error_decay"] * before + outer["lr"] * went
        for x, theirs in zip(told.flatten(0, 1), packed.flatten(0, 1), strict=True):
            found, _ = whole(QUANTISERS[outer["compressor_type"]](outer, x.numel()), x)
            (codes,) = tree.fields(found, "codes")
            codes, theirs = (unpack(each.view(1, -1), width, x.numel()) for each in (codes, theirs))
            assert torch.equal(codes, theirs), f"tensor {i}"


@of_muloco("all")
def test_the_outer_rate_counts_once_here(case: Case) -> None:
    """The first outer step of the recorded run is the rate times ours, which is the rate times what the codes say.

    Differs: fn.local_optimizers.muloco: `outer_lr` counts once; in the authors' code for several ranks it multiplies
        the differences, too, where errors are fed back.
    """
    method, start = muloco(case, rate_twice=False), case.each("init")
    (step, state, params), gradients = in_simulation(case, method.tx), case.gradients()
    for t in range(case.hyper["H"]):
        params, state = step(method.tx, method.schedule(t), gradients(t, params), state, params)
    for p, ours, theirs in zip(start, state.anchor, case.each("anchor"), strict=True):
        torch.testing.assert_close(theirs[0, 0] - p, case.hyper["outer"]["lr"] * (ours - p), rtol=0, atol=2e-6)
        assert (theirs[0, 0] - ours).abs().max() > 1e-3


SHAPES = [(6, 10), (7,), (4, 3)]


def by_hand(feedback: fn.Feedback) -> fn.Transform:
    decay, rate = fn.add_decayed_weights(0.01), fn.scale_by_learning_rate(0.02)
    kinds = {
        "muon": fn.chain(fn.scale_by_muon(0.95), decay, rate),
        "adamw": fn.chain(fn.scale_by_adam(0.9, 0.95), decay, rate),
    }
    inner = fn.partition(kinds, lambda params: tree.map(lambda p: "muon" if p.ndim == 2 else "adamw", params))
    outer_tx = fn.chain(fn.trace(0.6, nesterov=True), fn.scale_by_learning_rate(0.8))
    return fn.outer(inner, outer_tx, fn.compressed_average("data", linear(4), feedback, servers=False))


def named(feedback: fn.Feedback) -> fn.Transform:
    inner = {"momentum": 0.95, "b2": 0.95}
    outer = {"outer_lr": 0.8, "outer_momentum": 0.6}
    return chains.muloco(axis="data", **inner, **outer, codec=linear(4), feedback=feedback, servers=False)


def two_rounds(make: Callable[[fn.Feedback], fn.Transform], gradients: list[Tensor]) -> list[Tensor]:
    """Return the params of a rank after two rounds from its gradients (6, *shape)."""
    tx = make(fn.decayed(0.9))
    params = [torch.ones(shape) for shape in SHAPES]
    state = tx.init(params)
    for t in range(6):
        params, state = step_of(tx, fn.every(3)(t), [g[t] for g in gradients], state, params)
    return params


def test_the_named_method_takes_a_codec_of_ones_own() -> None:
    """Bitwise, with Muon inside."""
    gradients = [torch.randn(6, 3, *shape, generator=torch.Generator().manual_seed(len(shape))) for shape in SHAPES]
    run = fn.simulate(partial(two_rounds, named), "data", 3, in_dims=1, out_dims=None)
    found = run(gradients)
    others = fn.simulate(partial(two_rounds, by_hand), "data", 3, in_dims=1, out_dims=None)(gradients)
    for x, y in zip(found, others, strict=True):
        assert torch.equal(x, y)
        assert not torch.equal(x, torch.ones_like(x))
