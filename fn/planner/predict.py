"""Step times: messages that overlap with the backward pass as far as they can, and methods ranked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fn.errors import expected
from fn.planner.methods import Method, Parts, method, rows
from fn.planner.network import Network, duration
from fn.planner.traffic import Model

FORWARD = 1 / 3
"""The part of the computation before the first gradient is ready."""

CALL, FLOPS = 2e-6, 2e14
"""Seconds of a small operation that is called from Python, and an accelerator's matrix products a second.

The first is a server's core's; the second, like the default bandwidth of memory, is for half precision or TF32. Where a
device is at hand, both are measured.
"""

WORTH = 0.05
"""The part of the best uncompressed step that a compressed method must save to pay."""


class Rates(NamedTuple):
    """What a device takes. memory: bit/s. coding: network -> seconds by the `label` of a method, where measured.

    call, flops: seconds of a small operation that is called from Python, and matrix products a second.
    """

    memory: float
    coding: Callable[[Network], Mapping[str, float]] = lambda net: {}
    call: float = CALL
    flops: float = FLOPS

    def own(self, method: Method) -> float:
        """Return the seconds of a method's own time."""
        return method.calls * self.call + method.flops / self.flops


class Prediction(NamedTuple):
    """A method's step, in seconds; means over an interval where not all steps communicate.

    communication: what the messages take by themselves. exposed: what of it the backward pass does not hide. coding:
    encoding, decoding and error feedback. own: Python, launches and matrix products of the method's own; where its
    steps were measured, all that they take beyond the rest, and predicted is the step without that. step: all of it
    with the computation. limit: the larger of computation and communication, below which no overlap leads.
    """

    method: Method
    compute: float
    communication: float
    exposed: float
    coding: float
    own: float = 0.0
    predicted: float | None = None

    @property
    def measured(self) -> bool:
        """Return whether the step was."""
        return self.predicted is not None

    @property
    def step(self) -> float:
        """Return the step."""
        return self.compute + self.exposed + self.coding + self.own

    @property
    def beyond(self) -> float:
        """Return what a step takes beyond its computation."""
        return self.step - self.compute

    @property
    def limit(self) -> float:
        """Return the step of perfect overlap and free coding."""
        return max(self.compute, self.communication)


class Plan(NamedTuple):
    """Predictions, the fastest first; net, params: what they are for. `recommend` says what to take of them."""

    predictions: tuple[Prediction, ...]
    net: Network
    params: int

    def replicas(self, topology: str) -> int:
        """Return how many models there are where ranks train alone: one in each rank, or in each node."""
        return self.net.world if topology == "flat" else self.net.nodes

    @property
    def base(self) -> Prediction:
        """Return AdamW under DDP, as it was measured, or else the fastest."""
        exact = [p for p in self.predictions if p.method.name == "adamw"]
        return next((p for p in exact if p.measured), exact[0])

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


def predict(method: Method, net: Network, compute: float, coding: float, own: float = 0.0) -> Prediction:
    """Predict a method's step.

    Parts become ready in the backward pass in proportion to their gradients, and leave one after the other. Of a
    method that does not overlap everything is sent after the backward pass, and each part waited for, but for the steps
    of its delay; and however long that is, an interval lasts as long as the link is busy with its parts.

    Args: compute: seconds of a step without communication. coding: seconds of it in a step that communicates. own: of
        the method's own, in every step. A method that sends nothing, as on one rank, has neither.
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
        own if method.size else 0.0,
    )


def with_step(prediction: Prediction, step: float) -> Prediction:
    """Return a prediction with a step that was measured."""
    return prediction._replace(own=prediction.own + step - prediction.step, predicted=prediction.step)


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
        slowest = link._replace(efficiency=link.efficiency.with_buckets(part))
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
    rates: Rates | None = None,
    own: Mapping[str, float] | None = None,
    steps: Mapping[str, float] | None = None,
) -> Plan:
    """Predict all methods, and rank them.

    Args:
        compute: seconds of a step without communication. params: the number of parameters.
        memory: bit/s of the device's memory, from which coding is estimated.
        coding: seconds by the `label` of a method, where they were measured.
        rates: of which own times are estimated, in place of a usual device's.
        own: seconds by the `label` of a method, where its own time was measured. steps: of steps that were measured.
    Raises: ValueError if compute is not above 0.
    """
    if not compute > 0:
        raise ValueError(expected("compute", "a number above 0", f"{compute}"))
    coding, own, steps, rates = coding or {}, own or {}, steps or {}, rates or Rates(memory)
    predictions = [
        predict(
            m, net, compute,
            coding.get(m.label, 8 * m.passes * params / memory),
            own.get(m.label, rates.own(m)),
        )
        for m in methods
    ]  # fmt: skip
    predictions = [with_step(p, steps[p.method.label]) if p.method.label in steps else p for p in predictions]
    ranked = tuple(sorted(predictions, key=lambda prediction: prediction.step))
    return Plan(ranked, net, params)
