"""What the atlas compares: every named optimizer of `fn`, and averages in codes in front of AdamW."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch

import fn

Schedule = Callable[[int], Any]

ADAM = {"b2": 0.98, "eps": 1e-5, "weight_decay": 0.1}
"""As in the demo: with the usual values a second moment that is frozen early makes large steps."""

LAMB = {**ADAM, "eps": 1e-3}

H = 16
"""Steps of a round; the models are small, and hundreds of steps are few rounds."""


SHORT = ("language model", "fine-tuning", "digits")
TEXT = SHORT[:2]
ALL = (*SHORT, "own packages")
"""Tasks."""


class Method(NamedTuple):
    """A row of the atlas.

    family: its colour. make: (lr, axis) -> transform. schedule: steps of the run -> schedule.
    rate: the learning rate that the search begins at.
    settings: what a reader has to know to do it again. row: its name in the planner. alike: all ranks have the same
    params in every step. warm_up: the planner's name of what its warm-up sends; more: times so many bytes.
    accumulate: batches whose gradient is one step's. alone: one worker trains on its own batches, and sends nothing.
    ends_apart: ranks differ after the last step, so one exact average of the params belongs to the run.
    tasks: on which it runs.
    """

    family: str
    make: Callable[..., fn.Transform]
    schedule: Callable[[int], Schedule]
    rate: float
    settings: str
    row: str
    alike: bool = True
    warm_up: str = "adamw"
    more: float = 1.0
    accumulate: int = 1
    alone: bool = False
    ends_apart: bool = False
    tasks: tuple[str, ...] = SHORT


def never(steps: int) -> Schedule:
    """Stay in the warm-up, which is exact."""
    return lambda step: fn.Phase.WARMUP


def freeze(share: float) -> Callable[[int], Schedule]:
    """Freeze after a share of the steps."""
    return lambda steps: fn.freeze_after(round(share * steps))


def first(n: int) -> Callable[[int], Schedule]:
    """Compress after n steps."""
    return lambda steps: fn.freeze_after(n)


def rounds(share: float = 0.08, h: int = H) -> Callable[[int], Schedule]:
    """Train alone for h steps at a time, after about a share of the steps, so that the last step is an exchange."""

    def schedule(steps: int) -> Schedule:
        start = round(share * steps)
        return fn.every(h, start=start + (steps - start) % h)

    return schedule


def of_moments(steps: int) -> Schedule:
    """Average params every H steps, first moments every 3 H, second moments every 11 H, after 8 % of the steps."""
    start = round(0.08 * steps)
    return fn.contrib.periods(H, 3 * H, 11 * H, start=start + (steps - start) % H)


def often(steps: int) -> Schedule:
    """Take one step in five in the warm-up's way."""
    return fn.periodic(5)


def always(steps: int) -> Schedule:
    """Average a share of the params in every step, after 8 % of the steps."""
    return fn.every(1, start=round(0.08 * steps))


def seldom(steps: int) -> Schedule:
    """Return 0/1 Adam's schedule: a variance that is frozen after a fifth, then a message in up to four steps.

    Steps are numbers that four divides, so that the last one sends.
    """
    return fn.zero_one_schedule(
        steps // 5, var_update_scaler=16, local_step_scaler=max(1, steps // 12), local_step_clipper=4
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


def bf16(lr: Any, axis: str) -> fn.Transform:
    """Return AdamW whose gradients travel in bfloat16, as DDP's hook sends them."""
    return adamw_behind(lambda: fn.compressed_average(axis, fn.identity(torch.bfloat16), fn.off()), lr, axis)


def labels(params: Any) -> Any:
    """Return what `fn.labels_of` says of the atlas' models: embedding, head and vectors are not hidden."""
    ends = {"byte.weight", "head.weight"}
    return {name: "other" if name in ends or p.ndim < 2 else "hidden" for name, p in params.items()}


def lion(lr: Any, axis: str) -> fn.Transform:
    """Return Lion over exact means."""
    ends = fn.add_decayed_weights(LION["weight_decay"]), fn.scale_by_learning_rate(lr)
    return fn.chain(fn.average(axis), fn.scale_by_lion(0.9, 0.99), *ends)


def muon(
    lr: Any, axis: str, *, owned: bool = True, codec: fn.Codec | None = None, b2: float | None = None
) -> fn.Transform:
    """Return Muon, with the atlas' AdamW for all other tensors; NorMuon with b2."""
    ends = fn.add_decayed_weights(ADAM["weight_decay"]), fn.scale_by_learning_rate(lr)
    rule = fn.scale_by_muon(0.95, nesterov=True, eps=ADAM["eps"], scale="rms_norm", coefficients="polar_express")
    adam = fn.scale_by_adam(0.9, ADAM["b2"], ADAM["eps"])
    norm = [] if b2 is None else [fn.scale_by_neuron_norm(b2)]
    inner = fn.partition({"hidden": fn.chain(rule, *norm, *ends), "other": fn.chain(adam, *ends)}, labels)
    if not owned:
        return fn.chain(fn.average(axis), inner)
    return fn.owned(inner, axis, codec=codec, gather=codec)


def diloco(**settings: Any) -> Callable[..., fn.Transform]:
    """Return DiLoCo for a run of few rounds on eight workers."""
    return partial(fn.diloco, **ADAM, outer_lr=0.9, outer_momentum=0.6, **settings)


def contrib(name: str, **settings: Any) -> fn.Transform:
    """Return a method of `fn.contrib` by its name."""
    made: fn.Transform = getattr(fn.contrib, name)(**settings)
    return made


ADAM_RATE, LAMB_RATE, LION_RATE = 3e-3, 3e-2, 1e-3
LION = {"weight_decay": 0.3}
"""Its steps are of one size, about three times Adam's, so its rate is lower and its decay higher."""

ONE_SCALE = {**ADAM, "codec": fn.sign(), "max_step": 1.0}
"""Of methods that freeze a second moment, as their rows were measured: one scale a tensor, not one a block of 64."""

_onebit = partial(fn.onebit_adam, **ONE_SCALE)
_muloco = partial(fn.muloco, labels=labels, weight_decay=0.1, outer_lr=0.9, outer_momentum=0.8)
_int8_muon = partial(muon, codec=fn.int8())
_clamped = "one scale a tensor, max_step 1.0"
_fifth = f"{_clamped}, a warm-up of 20 %"
_round = f"H = {H}, a warm-up of 8 %"
_half = "a warm-up of 50 %"

CORE = {
    "adamw": Method("exact", partial(fn.adamw, **ADAM), never, ADAM_RATE, "float32", "adamw", tasks=ALL),
    "adamw, one worker": Method(
        "baseline", partial(fn.adamw, **ADAM), never, ADAM_RATE, "a worker's batch, nothing sent", "adamw", alone=True,
    ),
    f"adamw, a step in {H}": Method(
        "baseline", partial(fn.adamw, **ADAM), never, ADAM_RATE, f"{H} times the batch, steps / {H}", "adamw",
        accumulate=H,
    ),
    "adamw, bf16": Method("exact", bf16, first(0), ADAM_RATE, "bfloat16", "bf16 gradients"),
    "muon": Method(
        "exact", partial(muon, owned=False), never, ADAM_RATE, "float32, blocks only", "adamw", tasks=TEXT
    ),
    "normuon": Method(
        "exact", partial(muon, owned=False, b2=0.95), never, ADAM_RATE, "float32, blocks only", "adamw", tasks=TEXT
    ),
    "muon, int8": Method(
        "4 or 8 bits", _int8_muon, first(10), ADAM_RATE, "owned, int8 both ways", "muon, int8", warm_up="muon",
        tasks=TEXT,
    ),
    "sign_muon": Method(
        "votes", partial(fn.sign_muon, labels=labels, weight_decay=0.1), first(0), 3e-2, "votes on momenta",
        "sign_muon", tasks=TEXT,
    ),
    "lion": Method("exact", lion, never, LION_RATE, "float32", "adamw"),
    "lamb": Method("exact", partial(fn.lamb, **LAMB), never, LAMB_RATE, "float32", "adamw"),
    "adamw, int8": Method(
        "4 or 8 bits", coded(fn.int8, fn.damped), first(10), ADAM_RATE, "average_gradients(int8)",
        "adamw, int8 gradients",
    ),
    "adamw, fp8": Method(
        "4 or 8 bits", coded(fn.fp8, fn.off), first(10), ADAM_RATE, "average_gradients(fp8), no feedback",
        "adamw, fp8 gradients",
    ),
    "adamw, int4": Method(
        "4 or 8 bits", coded(fn.int4, fn.damped), first(10), ADAM_RATE, "average_gradients(int4)",
        "adamw, int4 gradients",
    ),
    "loco_adamw": Method(
        "4 or 8 bits", partial(fn.loco_adamw, **ADAM), first(10), ADAM_RATE, "int4, params in float32",
        "loco_adamw, int4",
    ),
    "loco_adamw, int8 back": Method(
        "4 or 8 bits", partial(fn.loco_adamw, gather=fn.int8(), master=True, **ADAM), first(10), ADAM_RATE,
        "int4, params in int8", "loco_adamw, int4, int8 back",
    ),
    "SDP4Bit": Method("4 or 8 bits", sdp4bit, first(10), ADAM_RATE, "int4 both ways, rotated", "SDP4Bit"),
    "onebit_adam": Method("signs", _onebit, freeze(0.2), ADAM_RATE, _fifth, "onebit_adam, 1 bit", tasks=ALL),
    "onebit_adam, int8 first": Method(
        "signs", partial(_onebit, warmup=fn.int8()), freeze(0.2), ADAM_RATE, f"{_fifth} in int8", "onebit_adam, 1 bit",
        warm_up="onebit_adam, int8",
    ),
    "onebit_lamb": Method(
        "signs", partial(fn.onebit_lamb, **LAMB), freeze(0.5), LAMB_RATE, _half, "onebit_lamb"
    ),
    "zero_one_adam": Method(
        "signs", partial(fn.zero_one_adam, **ONE_SCALE), seldom, ADAM_RATE,
        f"{_clamped}, frozen after 20 %, up to 4 steps alone", "zero_one_adam, 1 bit", alike=False,
    ),
    "sharded_onebit_adam": Method(
        "signs", partial(fn.sharded_onebit_adam, **ONE_SCALE), freeze(0.2), ADAM_RATE, _fifth,
        "sharded_onebit_adam, 1 bit", more=1.5,
    ),
    "local_sgd": Method(
        "local steps", partial(fn.local_sgd, momentum=0.9), rounds(), 0.1, f"momentum 0.9, {_round}",
        "diloco", alike=False,
    ),
    "diloco": Method(
        "local steps", diloco(), rounds(), ADAM_RATE, _round, "diloco", alike=False, tasks=(*SHORT, "own packages")
    ),
    "diloco, int8": Method(
        "local steps", diloco(codec=fn.int8()), rounds(), ADAM_RATE, _round, "diloco, int8", alike=False
    ),
    "diloco, 2 bits": Method(
        "local steps", diloco(codec=fn.bins(4, 6)), rounds(), ADAM_RATE, _round, "diloco, 2 bits", alike=False
    ),
    "sparse_loco": Method(
        "local steps", partial(fn.sparse_loco, **ADAM), rounds(), ADAM_RATE, f"1/32 in 2 bits, {_round}",
        "sparse_loco", alike=False,
    ),
    "muloco, 2 bits": Method(
        "local steps", partial(_muloco, codec=fn.bins(4, 6)), rounds(), ADAM_RATE, _round, "diloco, 2 bits",
        alike=False,
    ),
    "powersgd_adamw": Method(
        "low rank", partial(fn.powersgd_adamw, rank=4, **ADAM), first(10), ADAM_RATE, "rank 4",
        "powersgd_adamw, rank 4",
    ),
    "dion": Method(
        "low rank", partial(fn.dion, labels=labels, rank=0.25, weight_decay=0.1), first(0), 3e-2, "rank 1/4",
        "dion, rank 1/4",
    ),
    "lion_vote": Method(
        "votes", partial(fn.lion_vote, **LION), first(0), LION_RATE, "majority", "lion_vote"
    ),
}  # fmt: skip
"""In the order in which tables show them."""

_OF_CONTRIB = {
    "lion_muon": Method(
        "votes", partial(contrib, "lion_muon", labels=labels), often, 3e-2, "Muon one step in 5, votes between",
        "lion_muon", tasks=TEXT,
    ),
    "ef21_muon": Method(
        "sparse", partial(contrib, "ef21_muon", labels=labels, weight_decay=0.1), first(1), 3e-2, "k = 1/20",
        "ef21_muon", tasks=TEXT,
    ),
    "dion2": Method(
        "low rank",
        partial(
            contrib, "dion2", labels=labels, scale="rms_norm", weight_decay=0.1, other=fn.scale_by_adam(0.9, 0.98, 1e-5)
        ),
        first(0), ADAM_RATE, "1/4 of the rows", "dion2, rows 1/4", tasks=TEXT,
    ),
    "muon_bp": Method(
        "exact",
        partial(contrib, "muon_bp", labels=labels, weight_decay=0.1, other=fn.scale_by_adam(0.9, 0.98, 1e-7)), often,
        ADAM_RATE, "float32, blocks between", "muon_bp", tasks=TEXT,
    ),
    "des_loc": Method(
        "local steps", partial(contrib, "des_loc", **ADAM), of_moments, ADAM_RATE,
        f"params, moments every {H}, {3 * H}, {11 * H} steps, a warm-up of 8 %", "des_loc, without its moments",
        alike=False,
    ),
    "no_loco": Method(
        "local steps", partial(contrib, "no_loco", **ADAM), rounds(), ADAM_RATE, f"pairs, {_round}", "no_loco",
        alike=False, ends_apart=True,
    ),
    "sparta": Method(
        "local steps", partial(contrib, "sparta", **ADAM), always, ADAM_RATE, "1/200 in a step, a warm-up of 8 %",
        "sparta", alike=False, ends_apart=True,
    ),
    "demo": Method(
        "sparse", partial(contrib, "demo", weight_decay=0.1), first(0), 1e-2, "32 cosines of a tile", "demo"
    ),
    "ef21_sgdm": Method("sparse", partial(contrib, "ef21_sgdm", k=0.01), first(1), 1.0, "k = 1/100", "ef21_sgdm"),
    "signum_vote": Method(
        "votes", partial(contrib, "signum_vote", weight_decay=0.1), first(0), 1e-3, "majority", "lion_vote"
    ),
}  # fmt: skip

METHODS = CORE | {name: method for name, method in _OF_CONTRIB.items() if name in dir(fn.contrib)}
"""With the methods of `fn.contrib` that are there: a file of it can be deleted."""
