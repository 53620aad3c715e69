"""Step times: messages that overlap with the backward pass as far as they can, methods ranked, and a verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fn.errors import expected
from fn.planner.methods import Method, Parts, method, rows
from fn.planner.network import Network, duration
from fn.planner.traffic import Model
from fn.planner.units import show_seconds

FORWARD = 1 / 3
"""The part of the computation before the first gradient is ready."""

WORTH = 0.05
"""The part of the best uncompressed step that a compressed method must save to pay."""


class Prediction(NamedTuple):
    """A method's step, in seconds; means over an interval where not all steps communicate.

    communication: what the messages take by themselves. exposed: what of it the backward pass does not hide. coding:
    encoding, decoding and error feedback. step: all of it with the computation. limit: the larger of computation and
    communication, below which no overlap leads.
    """

    method: Method
    compute: float
    communication: float
    exposed: float
    coding: float

    @property
    def step(self) -> float:
        """Return the predicted step."""
        return self.compute + self.exposed + self.coding

    @property
    def limit(self) -> float:
        """Return the step of perfect overlap and free coding."""
        return max(self.compute, self.communication)


class Plan(NamedTuple):
    """Predictions, the fastest first, and what they mean; net, params: what they are for."""

    predictions: tuple[Prediction, ...]
    pays: bool
    verdict: str
    net: Network
    params: int

    def replicas(self, topology: str) -> int:
        """Return how many models there are where ranks train alone: one in each rank, or in each node."""
        return self.net.world if topology == "flat" else self.net.nodes

    def of(self, name: str, topology: str | None = None) -> Prediction:
        """Return the fastest prediction of a method, or of an optimizer that has several.

        Raises: ValueError if there is none of that name.
        """
        candidates = [p for p in self.predictions if topology in (None, p.method.topology)]
        exactly = [p for p in candidates if name in (p.method.name, *p.method.alike)]
        variants = [p for p in candidates if p.method.name.startswith(f"{name}, ")]
        if exactly or variants:
            return (exactly or variants)[0]
        known = sorted({name for p in self.predictions for name in (p.method.name, *p.method.alike)})
        raise ValueError(expected("name", f"one of {known}", f"{name!r}"))


def one_topology_each(whole: Plan) -> Plan:
    """Return a plan with each method on the topology on which it is the fastest."""
    first: dict[str, Prediction] = {}
    for prediction in whole.predictions:
        first.setdefault(prediction.method.name, prediction)
    return whole._replace(predictions=tuple(first.values()))


def predict(method: Method, net: Network, compute: float, coding: float) -> Prediction:
    """Predict a method's step.

    Parts become ready in the backward pass in proportion to their gradients, and leave one after the other. Of a
    method that does not overlap everything is sent after the backward pass, and each part waited for, but for the steps
    of its delay; and however long that is, an interval lasts as long as the link is busy with its parts.

    Args: compute: seconds of a step without communication. coding: seconds of it in a step that communicates; a method
        that sends nothing, as on one rank, encodes nothing.
    """
    each_step, sent = _times(method.each_step, net, True), _times(method.parts, net, method.overlapped)
    total, interval = sum(time for _, time in sent), method.interval
    waited = sum(max(0.0, time - method.delay * compute) for _, time in sent)
    waited = max(waited, total - interval * compute)  # a part that is late may wait for the link behind the one before
    exposed = _behind_backward(sent, compute) if method.overlapped else waited
    share = method.often / interval  # of the steps, in which the parts are sent
    exact = sum(duration(message, net) for message in method.exact) * (1 - method.often)
    return Prediction(
        method,
        compute,
        sum(time for _, time in each_step) + total * share + exact,
        _behind_backward(each_step, compute) + exposed * share + exact,
        coding * share if method.size else 0.0,
    )


def _times(parts: Parts, net: Network, in_buckets: bool) -> list[tuple[float, float]]:
    times = {part: sum(duration(m, net, in_buckets) for m in part[1]) for part in set(parts)}  # most are equal
    return [(part[0], times[part]) for part in parts]


def _behind_backward(parts: Sequence[tuple[float, float]], compute: float) -> float:
    """Return the seconds of parts (fraction of the gradients, seconds) that the backward pass does not hide."""
    if not any(time for _, time in parts):  # sums of fractions are not quite 1, by which nothing shall be ranked
        return 0.0
    free, done = FORWARD * compute, 0.0  # free: when the link has sent what came before
    for fraction, time in parts:
        done += fraction
        # A part leaves when its gradients are there and the link is free, whichever is later.
        free = max(free, compute * (FORWARD + (1 - FORWARD) * done)) + time
    return max(0.0, free - compute)


def efficiency_of_buckets(model: Model, net: Network, compute: float, step: float, bucket: int) -> float:
    """Return the part of the slowest link's bandwidth with which DDP's step is predicted as long as it was measured."""
    (exact,) = (row for row in rows() if row.name == "adamw")
    ddp, link = method(exact, model, net.world, bucket), net.inter if net.nodes > 1 else net.intra

    def predicted(part: float) -> float:
        slowest = link._replace(buckets=part)
        on = net._replace(inter=slowest) if net.nodes > 1 else net._replace(intra=slowest)
        return predict(ddp, on, compute, 0.0).step

    return next((percent / 100 for percent in range(1, 100) if predicted(percent / 100) <= step), 1.0)


def plan(
    methods: Sequence[Method],
    net: Network,
    compute: float,
    params: int,
    *,
    memory: float,
    coding: Mapping[str, float] | None = None,
) -> Plan:
    """Predict all methods, rank them, and say whether compression pays.

    Args:
        compute: seconds of a step without communication. params: the number of parameters.
        memory: bit/s of the device's memory, from which coding is estimated.
        coding: seconds by the `label` of a method, where they were measured.
    Raises: ValueError if compute is not above 0.
    """
    if not compute > 0:
        raise ValueError(expected("compute", "a number above 0", f"{compute}"))
    measured = coding or {}
    seconds = [measured.get(m.label, 8 * m.passes * params / memory) for m in methods]
    predictions = [predict(m, net, compute, coding) for m, coding in zip(methods, seconds, strict=True)]
    ranked = tuple(sorted(predictions, key=lambda prediction: prediction.step))
    return Plan(ranked, *_verdict(ranked), net, params)


def _verdict(ranked: Sequence[Prediction]) -> tuple[bool, str]:
    """Return whether compression in every step is worth it, and why; and which of all methods is the fastest."""
    steady = [p for p in ranked if p.method.in_every_step]
    best = next(p for p in steady if p.method.compressed)
    plain = next(p for p in steady if not p.method.compressed)
    exact = next(p for p in steady if p.method.name == "adamw")
    pays = _pays(best, plain)
    if pays:
        text = (
            f"Compression pays: of the methods that synchronise in every step, {best.method.label} is the fastest, "
            f"{show_seconds(best.step)} a step. {plain.method.label} takes {show_seconds(plain.step)} "
            f"({plain.step / best.step:.2f}x), of which {show_seconds(plain.exposed)} is communication that the "
            f"backward pass does not hide."
        )
    else:
        text = f"Compression does not pay here: {_reason(best, plain, exact)}"
    return pays, text + _of_all(ranked[0], best if pays else plain)


def _pays(prediction: Prediction, plain: Prediction) -> bool:
    return prediction.step <= (1 - WORTH) * plain.step


def _of_all(fastest: Prediction, steady: Prediction) -> str:
    """Say which of all methods is the fastest, where that is one that leaves out exchanges."""
    if fastest.method.in_every_step or not _pays(fastest, steady):
        return ""
    how = f"Its ranks exchange in one of {fastest.method.interval} steps, which changes what is learned: see "
    how = f"{how}docs/choosing.md" if fastest.method.local or fastest.method.interval > 1 else LATER
    return (
        f" Of all methods, {fastest.method.label} is the fastest, {show_seconds(fastest.step)} a step "
        f"({steady.step / fastest.step:.2f}x as fast). {how}."
    )


LATER = "Its directions arrive a step late, which changes what is learned: see docs/late.md"


def _reason(best: Prediction, plain: Prediction, exact: Prediction) -> str:
    if exact.communication == 0:
        return "a single rank has nobody to talk to, so every method takes the step of the computation alone."
    if exact.exposed <= WORTH * exact.step:
        return (
            f"adamw's all-reduce takes {show_seconds(exact.communication)}, of which the backward pass hides all but "
            f"{show_seconds(exact.exposed)}; no method can save more than {100 * exact.exposed / exact.step:.1f} % "
            f"of the step of {show_seconds(exact.step)}."
        )
    if best.coding + best.exposed >= plain.exposed + plain.coding:
        return (
            f"{best.method.label} still exposes {show_seconds(best.exposed)} and spends {show_seconds(best.coding)} "
            f"on coding, {plain.method.label} exposes {show_seconds(plain.exposed)} and is done."
        )
    return (
        f"{best.method.label} takes {show_seconds(best.step)} a step, {plain.method.label} "
        f"{show_seconds(plain.step)}: less than {100 * WORTH:.0f} % to win."
    )
