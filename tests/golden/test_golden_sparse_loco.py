"""Local steps follow the recorded runs of SparseLoCo: whole runs, from gradients at our own params.

Of the deployed compressor only exchanges were recorded, one after the other. They are those of rounds of two steps.
`tests/golden/README_codecs.md` says what the arrays are, and how the authors cut tensors into chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from golden_cases import recorded_form
from own_pieces import held_to_median
from recorded_rounds import Case, in_simulation, load, step_of
from torch import Tensor

import fn
from fn import Round, tree
from fn.transforms.bases import Basis

LOADED = load("index_codecs.json")
CASES = [case for case in LOADED if case.row["method"] == "sparseloco"]
DEPLOYED = [case for case in LOADED if case.row["method"] == "templar"]
each_case = pytest.mark.parametrize("case", CASES, ids=[case.row["name"] for case in CASES])


def largest_divisor(n: int, most: int) -> int:
    return max(d for d in range(1, most + 1) if n % d == 0)


def authors_chunks(size: int, cls: str) -> Basis:
    """Return the basis of the authors: pieces of sides as long as their largest divisor; in CCLoco whole rows."""

    def block(shape: Sequence[int]) -> tuple[int, int]:
        if len(shape) == 2 and cls == "CCLoco":
            return 1, shape[1]
        height = largest_divisor(shape[0], size) if len(shape) == 2 else 1
        return height, largest_divisor(shape[-1], size)

    def into(x: Tensor) -> list[Tensor]:
        (height, width), matrix = block(x.shape), x.reshape(-1, x.shape[-1])
        split = matrix.reshape(matrix.shape[0] // height, height, matrix.shape[1] // width, width)
        return [split.transpose(1, 2).reshape(-1, height * width)]

    def back(parts: Sequence[Tensor], shape: torch.Size) -> Tensor:
        height, width = block(shape)
        split = parts[0].reshape(-1, shape[-1] // width, height, width)
        return split.transpose(1, 2).reshape(shape)

    return Basis(into, back)


def transform(case: Case) -> fn.Transform:
    """Return what ran: `fn.sparse_loco`, but for the authors' chunks, their second rate, and an outer momentum."""
    inner, outer, cls = case.hyper["inner"], case.hyper["outer"], case.hyper["cls"]
    size, most = outer["chunk_size"], outer["top_k"]
    coded = outer["use_quantization"]
    values = fn.bins(outer["quantization_bins"], outer["quantization_range"]) if coded else None

    def mean(n: int) -> fn.Transform:
        kept = min(most, n) if cls == "CCLoco" else round(n * most / size**2)
        codec = fn.top_k(min(n, max(1, kept)), n, over="senders", values=values)
        return fn.compressed_average("data", codec, fn.decayed(outer["error_decay"]), servers=False)

    assert inner["kind"] == "adamw"
    lr, decay = inner["lr"], fn.add_decayed_weights(inner["weight_decay"])
    rate = fn.stateless(lambda u, p: tree.map(lambda x: outer["lr"] * x, u))
    momentum = [fn.trace(outer["momentum"], outer["nesterov"])] if outer.get("momentum") else []
    shrink = fn.add_decayed_weights(outer.get("weight_decay", 0.0))
    return fn.outer(
        fn.chain(fn.scale_by_adam(), decay, fn.scale_by_learning_rate(lr)),
        fn.chain(*momentum, shrink, fn.scale_by_learning_rate(outer["lr"])),
        fn.chain(rate, fn.in_basis(authors_chunks(size, cls), mean)),
    )


def replay(case: Case, tx: fn.Transform, step: Any, state: Any, params: list[Tensor]) -> float:
    """Take all steps; return how far off anything was, in units of the tolerance."""
    gradients = case.gradients()
    schedule, exchange, worst = fn.every(case.hyper["H"]), 0, 0.0
    for t in range(int(case.hyper["steps"])):
        when = schedule(t)
        assert (when == Round(0, 0)) == (case.arrays["applied"][t] >= 0)
        params, state = step(tx, when, gradients(t, params), state, params)
        found = {"param": params, **{name: recorded_form(state.inner, field) for name, field in MOMENTS.items()}}
        for name, each in found.items():
            worst = max([worst, *(case.off(x, f"p{i}.{name}", t) for i, x in enumerate(each))])
        if when == Round(0, 0):
            replicated = {"anchor": state.anchor}
            if "p0.outer_momentum" in case.arrays:
                (replicated["outer_momentum"],) = tree.fields(state.outer, "mu")
            for name, each in replicated.items():
                worst = max([worst, *(case.off(x, f"p{i}.{name}", exchange, 0) for i, x in enumerate(each))])
            exchange += 1
    assert exchange == case.arrays["p0.anchor"].shape[0]
    return worst


MOMENTS = {"exp_avg": "mu", "exp_avg_sq": "nu"}


@each_case
def test_the_recorded_run_is_replayed_in_simulated_ranks(case: Case) -> None:
    """The differences are multiplied by the outer rate here, which `fn.sparse_loco` leaves out.

    Differs: fn.local_optimizers.sparse_loco: `outer_lr` counts once; in the code it multiplies the differences, too,
        and counts twice.
    """
    tx = transform(case)
    assert 0 < replay(case, tx, *in_simulation(case, tx)) <= 1


def test_the_named_method_is_what_was_replayed_where_tiles_divide_the_sides():
    """Bitwise, in two rounds of three ranks; tests/transforms/test_bases.py holds other sides against their tiles."""
    outer = {"lr": 1.0, "error_decay": 0.95, "top_k": 3, "chunk_size": 4, "use_quantization": True}
    outer |= {"quantization_bins": 4, "quantization_range": 6}
    inner = {"kind": "adamw", "lr": 0.02, "weight_decay": 0.1}
    ours = fn.sparse_loco(0.02, weight_decay=0.1, axis="data", k=3, tile=4)
    theirs = transform(Case({"hyper": {"inner": inner, "outer": outer, "cls": "SparseLoCo"}}, {}))
    start = [torch.randn(shape, generator=torch.Generator().manual_seed(i)) for i, shape in enumerate([(8, 12), (16,)])]
    gradients = [torch.randn(6, 3, *p.shape, generator=torch.Generator().manual_seed(9)) for p in start]

    def on_rank(tx: fn.Transform, gradients: list[Tensor]) -> list[Tensor]:
        params, state = start, tx.init(start)
        for t in range(6):
            params, state = step_of(tx, fn.every(3)(t), [g[t] for g in gradients], state, params)
        return params

    found = [fn.simulate(partial(on_rank, tx), "data", 3, in_dims=1, out_dims=None)(gradients) for tx in (ours, theirs)]
    for p, x, y in zip(start, *found, strict=True):
        assert torch.equal(x, y)
        assert not torch.equal(x, p)


def deployed(case: Case) -> fn.Transform:
    """Return rounds of the deployed compressor, whose local step is the recorded difference itself."""
    outer = case.hyper["outer"]
    values = fn.bins(outer["bins"], outer["sigmas"]) if outer["bins"] else None

    def mean(n: int) -> fn.Transform:
        even = max(2, min(outer["top_k"], n)) // 2 * 2
        codec = held_to_median(fn.top_k(even, n, over="senders", values=values))
        return fn.compressed_average(
            "data", codec, fn.decayed(outer["error_decay"]), layout="per_tensor", servers=False
        )

    basis = authors_chunks(outer["chunk_size"], "SparseLoCo")
    return fn.outer(fn.scale_by_learning_rate(1.0), fn.scale_by_learning_rate(1.0), fn.in_basis(basis, mean))


def replay_deployed(case: Case, step: Any, state: Any, params: list[Tensor]) -> float:
    tx, schedule, worst = deployed(case), fn.every(2, delay=1), [0.0]
    went = case.each("pseudo")
    basis = authors_chunks(case.hyper["outer"]["chunk_size"], "SparseLoCo")
    sizes = [x.numel() for x in case.each("init")]
    for exchange in range(int(case.hyper["steps"])):
        params, state = step(tx, schedule(0), [x[exchange] for x in went], state, params)
        errors = {x.shape[-1]: x for each in tree.fields(state.sync, "worker") for x in each}
        assert {*errors} == {*sizes}
        for i, (n, mean) in enumerate(zip(sizes, state.pending, strict=True)):
            worst.append(case.off(mean, f"p{i}.mean", exchange))
            recorded = torch.from_numpy(case.arrays[f"p{i}.error"][exchange])
            theirs = torch.stack([basis.into(x)[0].flatten() for x in recorded])
            allowed = case.row["tolerance"] * max(1.0, float(recorded.abs().max()))
            off = float((errors[n] - theirs).abs().max()) / allowed
            assert off <= 1, f"{case.row['name']} p{i}.error row {exchange}: off by {off} tolerances"
            worst.append(off)
        params, state = step(tx, schedule(1), [torch.zeros_like(p) for p in params], state, params)
        for p, x in zip(params, state.anchor, strict=True):
            assert torch.equal(p, x.expand_as(p))
    return max(worst)


@pytest.mark.parametrize("case", DEPLOYED, ids=[case.row["name"] for case in DEPLOYED])
def test_the_deployed_exchanges_are_replayed_in_simulated_ranks(case: Case) -> None:
    """By a codec of the test's own: messages above the median norm weigh less. An even number of each chunk is sent."""
    assert 0 < replay_deployed(case, *in_simulation(case, deployed(case))) <= 1


def test_every_method_of_the_index_is_replayed_here_or_beside() -> None:
    beside = {"muloco_quantized", "streaming_coded"}
    assert {case.row["method"] for case in LOADED} == {"sparseloco", "templar", *beside}
