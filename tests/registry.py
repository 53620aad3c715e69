"""Every named optimizer, and what may be asked of it.

`test_contract.py` holds each of `OPTIMIZERS` to the same contract. `OTHERS` promise less, or something else, in tests
of their own; so do `CONTRIB`, of which those that send codes are held to `test_contract_of_codes.py`. What is asked of
`EVERY` one of them: steps that are the same under any default device and dtype, and that stay on the device of their
tensors. `test_optimizers.py` refuses a named optimizer that is in none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import own_pieces
import pytest

import fn
from fn import Phase, Round
from fn.base import facts_of

NOTHING: Mapping[str, Any] = MappingProxyType({})


class Named(NamedTuple):
    """A named optimizer.

    make: (lr=..., axis=..., **hyper-parameters) -> Transform.
    phases: those it has, and the rounds of local steps.
    schedule: one that visits all of them within 30 steps.
    lr: a learning rate at which it trains the problems of the contract.
    replicated: params stay the same on all ranks, and provably so. False: they differ between synchronisations.
    adamw: phase -> the hyper-parameters under which it is torch's AdamW on one rank.
    coded_warmup: its warm-up is not exact.
    divided: its params, and so all of its state, are divided over the ranks.
    links: of a method of `fn.contrib`: its links by their names, (axis) -> Transform.
    """

    name: str
    make: Callable[..., fn.Transform]
    phases: tuple[Any, ...]
    schedule: Callable[[int], Any]
    lr: float = 0.02
    replicated: bool = True
    adamw: Mapping[Phase, Mapping[str, Any]] = NOTHING
    coded_warmup: bool = False
    divided: bool = False
    links: Mapping[str, Callable[[str], fn.Transform]] = NOTHING


OPTIMIZERS = (
    Named("adamw", fn.adamw, (Phase.WARMUP,), lambda step: Phase.WARMUP, adamw={Phase.WARMUP: NOTHING}),
    Named(
        "onebit_adam",
        fn.onebit_adam,
        (Phase.WARMUP, Phase.COMPRESSED),
        fn.freeze_after(20),
        adamw={Phase.WARMUP: NOTHING},
    ),
    Named(
        "onebit_adam, no servers",
        partial(fn.onebit_adam, servers=False),
        (Phase.WARMUP, Phase.COMPRESSED),
        fn.freeze_after(20),
        adamw={Phase.WARMUP: NOTHING},
    ),
    Named(
        "onebit_adam, warm-up in codes",
        partial(fn.onebit_adam, warmup=fn.int8()),
        (Phase.WARMUP, Phase.COMPRESSED),
        fn.freeze_after(20),
        adamw={Phase.WARMUP: NOTHING},
        coded_warmup=True,
    ),
    Named(
        "muon, int8",
        partial(fn.muon, codec=fn.int8()),
        (Phase.WARMUP, Phase.COMPRESSED),
        fn.freeze_after(20),
    ),
    Named("lamb", fn.lamb, (Phase.WARMUP,), lambda step: Phase.WARMUP),
    Named("onebit_lamb", fn.onebit_lamb, (Phase.WARMUP, Phase.COMPRESSED), fn.freeze_after(20)),
    Named(
        "zero_one_adam",
        fn.zero_one_adam,
        (Phase.WARMUP, Phase.COMPRESSED, Phase.LOCAL),
        fn.zero_one_schedule(20, 4, 8, 4),
        replicated=False,
    ),
    Named(
        "loco_adamw",
        fn.loco_adamw,
        (Phase.WARMUP, Phase.COMPRESSED),
        fn.freeze_after(2),
        adamw={Phase.WARMUP: NOTHING, Phase.COMPRESSED: NOTHING},
    ),
    Named("sharded_onebit_adam", fn.sharded_onebit_adam, (Phase.WARMUP, Phase.COMPRESSED), fn.freeze_after(20)),
)


def muon_of_shards(lr: Any = 0.02, *, axis: str, **hyper: Any) -> fn.Transform:
    """Return Muon for params that are divided over the axis."""
    return fn.muon(lr, shards=axis, codec=fn.int8(), **hyper)


CODED = Phase.WARMUP, Phase.COMPRESSED
ROUNDS = Phase.WARMUP, Round(), Round(0, 0)
LATE = Phase.WARMUP, Round(0, None), Round(1, 0)

OTHERS = (
    Named("muon", fn.muon, CODED, fn.freeze_after(2)),
    Named("muon, of shards", muon_of_shards, CODED, fn.freeze_after(2), replicated=False, divided=True),
    Named("normuon", fn.normuon, CODED, fn.freeze_after(2)),
    Named("normuon, int8", partial(fn.normuon, codec=fn.int8()), CODED, fn.freeze_after(2)),
    Named("muon, replicated", partial(fn.muon, owned=False), (Phase.WARMUP,), lambda step: Phase.WARMUP),
    Named("sign_muon", fn.sign_muon, CODED, fn.freeze_after(2)),
    Named("diloco", fn.diloco, ROUNDS, fn.every(3, start=2), replicated=False),
    Named("diloco, int8", partial(fn.diloco, codec=fn.int8()), ROUNDS, fn.every(3, start=2), replicated=False),
    Named("local_sgd", partial(fn.local_sgd, momentum=0.9), ROUNDS, fn.every(3, start=2), replicated=False),
    Named("sparse_loco", partial(fn.sparse_loco, k=4, tile=4), ROUNDS, fn.every(3, start=2), replicated=False),
    Named("muloco", partial(fn.muloco, codec=fn.bins(4, 6)), ROUNDS, fn.every(3, start=2), replicated=False),
    Named("onebit_adam, fp8", partial(fn.onebit_adam, codec=fn.fp8()), CODED, fn.freeze_after(2)),
    Named("powersgd_adamw", fn.powersgd_adamw, CODED, fn.freeze_after(2)),
    Named("dion", fn.dion, CODED, fn.freeze_after(2)),
    Named("lion_vote", fn.lion_vote, CODED, fn.freeze_after(2)),
    Named("adamw, late", fn.late(fn.adamw), LATE, fn.every(1, delay=1, start=2)),
    Named("onebit_adam, late", fn.late(fn.onebit_adam), LATE, fn.every(1, delay=1, start=2)),
    Named("muon, int8, late", fn.late(partial(fn.muon, codec=fn.int8())), LATE, fn.every(1, delay=1, start=2)),
    Named("sign_muon, late", fn.late(fn.sign_muon), LATE, fn.every(1, delay=1, start=2)),
)

CONTRIB = (
    Named("demo", partial(fn.contrib.demo, k=3, tile=4), CODED, fn.freeze_after(2)),
    Named(
        "des_loc", fn.contrib.des_loc, (*ROUNDS, Round(6, 6)), fn.contrib.periods(3, 3, 6, start=2), replicated=False
    ),
    Named("dion2", fn.contrib.dion2, CODED, fn.freeze_after(2), links={
        "scale_by_dion2": lambda axis: fn.mask(
            fn.contrib.scale_by_dion2(axis), lambda params: fn.tree.map(lambda p: p.ndim > 1, params)
        ),
    }),
    Named("ef21_muon", partial(fn.contrib.ef21_muon, codec=fn.top_k(0.2)), CODED, fn.freeze_after(2)),
    Named("ef21_sgdm", partial(fn.contrib.ef21_sgdm, k=0.2), CODED, fn.freeze_after(2)),
    Named("lion_muon", fn.contrib.lion_muon, CODED, fn.periodic(3)),
    Named("muon_bp", fn.contrib.muon_bp, CODED, fn.periodic(3), links={
        "in_blocks": lambda axis: fn.contrib.in_blocks(fn.trace(0.9), 2),
    }),
    Named("nanochat, int8", partial(fn.contrib.nanochat, codec=fn.int8()), CODED, fn.freeze_after(2), links={
        "scale_by_nanochat": lambda axis: fn.mask(
            fn.contrib.scale_by_nanochat(), lambda params: fn.tree.map(lambda p: p.ndim > 1, params)
        ),
    }),
    Named("no_loco", fn.contrib.no_loco, ROUNDS, fn.every(3, start=2), replicated=False, links={
        "own_anchors": lambda axis: fn.contrib.own_anchors(
            fn.average(axis), fn.scale_by_learning_rate(0.1), fn.scale_by_learning_rate(0.1),
            fn.contrib.pair_average(axis),
        ),
        "pair_average": lambda axis: fn.contrib.pair_average(axis),
    }),
    Named("norm_guard", own_pieces.guarded_diloco, ROUNDS, fn.every(3, start=2), replicated=False),
    Named("primal_average", own_pieces.averaged_along_the_way, (Phase.WARMUP,), lambda step: Phase.WARMUP, links={
        "primal_average": lambda axis: fn.contrib.primal_average(fn.scale_by_learning_rate(0.1)),
    }),
    Named("signum_vote", fn.contrib.signum_vote, CODED, fn.freeze_after(2)),
    Named("sparta", partial(fn.contrib.sparta, density=0.5), ROUNDS, fn.every(3, start=2), replicated=False, links={
        "sparse_average": lambda axis: fn.contrib.sparse_average(axis, 1 / 3),
    }),
)  # fmt: skip
"""The methods of `fn.contrib`: whoever deletes one deletes its line here."""

CONTRIB_ROUNDS = tuple(method for method in CONTRIB if Round() in method.phases)

APART = tuple(method for method in CONTRIB_ROUNDS if facts_of(method.make(axis="data")).unequal)
"""Methods whose ranks agree on nothing."""

CONTRIB_LINKS = {name: make for method in CONTRIB for name, make in method.links.items()}
"""The links of `fn.contrib`, over an axis, for `test_facts.py`."""

EVERY = (*OPTIMIZERS, *OTHERS, *CONTRIB)

CODES = (
    *(optimizer for optimizer in OTHERS if optimizer.name in ("sign_muon", "powersgd_adamw", "dion", "lion_vote")),
    Named("sign_muon, directions", partial(fn.sign_muon, votes="directions"), CODED, fn.freeze_after(2)),
    *(optimizer for optimizer in CONTRIB if optimizer.phases == CODED),
)
"""What `test_contract_of_codes.py` holds to its contract: all ranks have the same params behind codes of any kind."""

each_of_all = pytest.mark.parametrize("optimizer", EVERY, ids=[optimizer.name for optimizer in EVERY])

ADAMS = tuple(optimizer for optimizer in OPTIMIZERS if not optimizer.name.startswith("muon"))
"""Those that take Adam's hyper-parameters."""

NAMES = [optimizer.name for optimizer in OPTIMIZERS]

each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=NAMES)

EXACT_AT_FIRST = tuple(optimizer for optimizer in OPTIMIZERS if not optimizer.coded_warmup)

each_with_an_exact_warmup = pytest.mark.parametrize(
    "optimizer", EXACT_AT_FIRST, ids=[optimizer.name for optimizer in EXACT_AT_FIRST]
)

PHASES = {
    f"{optimizer.name}-{phase.value}": (optimizer, phase) for optimizer in OPTIMIZERS for phase in optimizer.phases
}
"""Every phase of every optimizer, by a name for both."""

each_phase = pytest.mark.parametrize(("optimizer", "phase"), PHASES.values(), ids=PHASES)

QUICK = ("onebit_adam-compressed",)
"""What stands for all phases in tests that compile each; the others are part of `make reliability-test`."""


def in_time(quick: Sequence[str]) -> pytest.MarkDecorator:
    """Return every phase of every optimizer, of which only some are not part of `make reliability-test`."""
    cases = [
        pytest.param(*case, id=name, marks=[] if name in quick else [pytest.mark.reliability])
        for name, case in PHASES.items()
    ]
    return pytest.mark.parametrize(("optimizer", "phase"), cases)


_LACKING = [(optimizer, phase) for optimizer in OPTIMIZERS for phase in Phase if phase not in optimizer.phases]

each_missing_phase = pytest.mark.parametrize(
    ("optimizer", "phase"), _LACKING, ids=[f"{optimizer.name}-{phase.value}" for optimizer, phase in _LACKING]
)
