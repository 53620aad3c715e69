"""What the atlas compares: every named optimizer of `fn`, and averages in codes in front of AdamW."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import fn

Schedule = Callable[[int], Any]

ADAM = {"b2": 0.98, "eps": 1e-5, "weight_decay": 0.1}
"""As in the demo: with the usual values a second moment that is frozen early makes large steps."""

LAMB = {**ADAM, "eps": 1e-3}

H = 16
"""Steps of a round; the models are small, and hundreds of steps are few rounds."""


class Method(NamedTuple):
    """A row of the atlas.

    family: its colour. make: (lr, axis) -> transform. schedule: steps of the run -> schedule.
    rates: the learning rates that are tried, about a factor of three apart.
    settings: what a reader has to know to do it again. row: its name in the planner. alike: all ranks have the same
    params in every step. warm_up: the planner's name of what its warm-up sends; more: times so many bytes.
    """

    family: str
    make: Callable[..., fn.Transform]
    schedule: Callable[[int], Schedule]
    rates: tuple[float, ...]
    settings: str
    row: str
    alike: bool = True
    warm_up: str = "adamw"
    more: float = 1.0


def never(steps: int) -> Schedule:
    """Stay in the warm-up, which is exact."""
    return lambda step: fn.Phase.WARMUP


def freeze(share: float) -> Callable[[int], Schedule]:
    """Freeze after a share of the steps."""
    return lambda steps: fn.freeze_after(round(share * steps))


def first(n: int) -> Callable[[int], Schedule]:
    """Compress after n steps."""
    return lambda steps: fn.freeze_after(n)


def rounds(share: float = 0.08) -> Callable[[int], Schedule]:
    """Train alone for H steps at a time, after about a share of the steps, so that the last step is an exchange."""

    def schedule(steps: int) -> Schedule:
        start = round(share * steps)
        return fn.every(H, start=start + (steps - start) % H)

    return schedule


def seldom(steps: int) -> Schedule:
    """Return 0/1 Adam's schedule: a variance that is frozen half-way, then a message in up to four steps.

    Steps are numbers that four divides, so that the last one sends.
    """
    return fn.zero_one_schedule(
        steps // 2, var_update_scaler=16, local_step_scaler=max(1, steps // 12), local_step_clipper=4
    )


def adamw_behind(average: Callable[[], fn.Transform], lr: Any, axis: str) -> fn.Transform:
    """Return AdamW behind an average in codes."""
    links = fn.scale_by_adam(0.9, ADAM["b2"], ADAM["eps"]), fn.add_decayed_weights(ADAM["weight_decay"])
    return fn.chain(fn.average(axis), average(), *links, fn.scale_by_learning_rate(lr))


def sdp4bit(lr: Any, axis: str) -> fn.Transform:
    """Return the recipe of SDP4Bit on one axis: rotated 4-bit gradients, and 4-bit differences of params."""
    inner = fn.chain(
        fn.scale_by_adam(0.9, ADAM["b2"], ADAM["eps"]),
        fn.add_decayed_weights(ADAM["weight_decay"]),
        fn.scale_by_learning_rate(lr),
    )
    back = {"gather": fn.int4(2048), "gather_feedback": fn.classic(), "master": False}
    return fn.sharded(inner, axis, fn.rotated(fn.int4(128)), fn.off(), **back)


def coded(codec: Callable[[], Any], feedback: Callable[[], Any]) -> Callable[..., fn.Transform]:
    """Return AdamW whose gradients travel in codes."""
    return lambda lr, axis: adamw_behind(lambda: fn.compressed_average(axis, codec(), feedback()), lr, axis)


def diloco(**settings: Any) -> Callable[..., fn.Transform]:
    """Return DiLoCo for a run of few rounds."""
    return partial(fn.diloco, **ADAM, outer_momentum=0.6, **settings)


ADAM_RATES, LAMB_RATES, HIGH_RATES = (1e-3, 3e-3, 1e-2), (1e-2, 3e-2, 1e-1), (3e-3, 1e-2, 3e-2)

_onebit = partial(fn.onebit_adam, bias_correction=True, **ADAM)
_fifth = "a warm-up of 20 %"
_round = f"H = {H}, a warm-up of 8 %"

METHODS = {
    "adamw": Method("exact", partial(fn.adamw, **ADAM), never, ADAM_RATES, "float32", "adamw"),
    "lamb": Method("exact", partial(fn.lamb, **LAMB), never, LAMB_RATES, "float32", "adamw"),
    "adamw, int8": Method(
        "integers", coded(fn.int8, fn.damped), first(10), ADAM_RATES, "average_gradients(int8)",
        "adamw, int8 gradients",
    ),
    "adamw, int4": Method(
        "integers", coded(fn.int4, fn.damped), first(10), ADAM_RATES, "average_gradients(int4)",
        "adamw, int4 gradients",
    ),
    "loco_adamw": Method(
        "integers", partial(fn.loco_adamw, **ADAM), first(10), ADAM_RATES, "int4, params in float32", "loco_adamw, int4"
    ),
    "loco_adamw, int8 back": Method(
        "integers", partial(fn.loco_adamw, gather=fn.int8(), master=True, **ADAM), first(10), ADAM_RATES,
        "int4, params in int8", "loco_adamw, int4, int8 back",
    ),
    "SDP4Bit": Method("integers", sdp4bit, first(10), ADAM_RATES, "int4 both ways, rotated", "SDP4Bit"),
    "onebit_adam": Method("signs", _onebit, freeze(0.2), ADAM_RATES, _fifth, "onebit_adam"),
    "onebit_adam, int8 first": Method(
        "signs", partial(_onebit, warmup=fn.int8()), freeze(0.2), ADAM_RATES, f"{_fifth} in int8", "onebit_adam",
        warm_up="onebit_adam, int8",
    ),
    "onebit_lamb": Method(
        "signs", partial(fn.onebit_lamb, factor_max=1.0, **LAMB), freeze(0.2), LAMB_RATES, _fifth, "onebit_lamb"
    ),
    "zero_one_adam": Method(
        "signs", partial(fn.zero_one_adam, **ADAM), seldom, ADAM_RATES, "frozen half-way, up to 4 steps alone",
        "zero_one_adam", alike=False,
    ),
    "sharded_onebit_adam": Method(
        "signs", partial(fn.sharded_onebit_adam, **ADAM), freeze(0.2), ADAM_RATES, _fifth, "sharded_onebit_adam",
        more=1.5,
    ),
    "local_sgd": Method(
        "local steps", partial(fn.local_sgd, momentum=0.9), rounds(), (0.03, 0.1, 0.3), f"momentum 0.9, {_round}",
        "diloco", alike=False,
    ),
    "diloco": Method("local steps", diloco(), rounds(), ADAM_RATES, _round, "diloco", alike=False),
    "diloco, int8": Method(
        "local steps", diloco(codec=fn.int8()), rounds(), ADAM_RATES, _round, "diloco, int8", alike=False
    ),
    "diloco, 2 bits": Method(
        "local steps", diloco(codec=fn.bins(4, 6)), rounds(), ADAM_RATES, _round, "diloco, 2 bits", alike=False
    ),
    "sparse_loco": Method(
        "local steps", partial(fn.sparse_loco, **ADAM), rounds(), ADAM_RATES, f"1/32 in 2 bits, {_round}",
        "sparse_loco", alike=False,
    ),
    "muloco, 2 bits": Method(
        "local steps", partial(fn.muloco, weight_decay=0.1, codec=fn.bins(4, 6)), rounds(), HIGH_RATES, _round,
        "diloco, 2 bits", alike=False,
    ),
    "powersgd_adamw": Method(
        "low rank", partial(fn.powersgd_adamw, rank=4, **ADAM), first(10), ADAM_RATES, "rank 4",
        "powersgd_adamw, rank 4",
    ),
    "dion": Method(
        "low rank", partial(fn.dion, rank=0.25, weight_decay=0.1), first(0), (1e-2, 3e-2, 1e-1), "rank 1/4",
        "dion, rank 1/4",
    ),
    "demo": Method("sparse", partial(fn.demo, weight_decay=0.1), first(0), HIGH_RATES, "32 cosines of a tile", "demo"),
    "ef21_sgdm": Method("sparse", partial(fn.ef21_sgdm, k=0.01), first(1), (0.3, 1.0, 3.0), "k = 1/100", "ef21_sgdm"),
    "lion_vote": Method(
        "votes", partial(fn.lion_vote, weight_decay=0.1), first(0), ADAM_RATES, "majority", "lion_vote"
    ),
    "signum_vote": Method(
        "votes", partial(fn.signum_vote, weight_decay=0.1), first(0), (3e-4, 1e-3, 3e-3), "majority", "lion_vote"
    ),
}  # fmt: skip
"""In the order in which tables show them."""
