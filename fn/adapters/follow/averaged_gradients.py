"""Gradients that `fn.adapters.ddp.average_gradients` averaged: a follower decodes them from the codes of the log."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fn.adapters.ddp.gradient_averaging import GradientAverage
from fn.adapters.follow.log_format import JSON
from fn.base import Phase, Transform, chain
from fn.collectives import following
from fn.collectives.agreement import describe
from fn.collectives.following import Log, Record, echoing
from fn.errors import expected
from fn.transforms.average import average as exact_average

MEAN = ("mean",)
"""What the keys of records begin with that have gradients, by bucket."""

Make = Callable[..., Transform]


def header_of(mean: GradientAverage) -> JSON:
    """Return what a follower compares, and reads the codes by."""
    axes = {name: axis.size for name, axis in mean.binding.axes.items()}
    return {"axes": axes, "settings": describe(mean.transform), "buckets": mean.names}


def transform_of(header: Mapping[str, Any] | None, average: Make | None) -> Transform | None:
    """Return what averages the gradients of a bucket; None where each rank's own go into the optimizer.

    Raises: ValueError for another one than the run's.
    """
    if header is None and average is None:
        return None
    if header is None or average is None:
        given = "None" if average is None else "a function"
        cure = "give partial(fn.compressed_average, codec=fn.int4()) for a run of average_gradients(model, fn.int4())"
        raise ValueError(expected("average", "what averaged the gradients of the run, if anything did", given, cure))
    (axis,) = header["axes"]
    made = chain(exact_average(axis), average(axis=axis))
    theirs, own = header["settings"], describe(made)
    if theirs != own:
        name = next(k for k in sorted({**theirs, **own}) if theirs.get(k) != own.get(k))
        wanted = f"that of the run, whose {name} is {theirs.get(name)!r}"
        raise ValueError(expected("average", wanted, f"{own.get(name)!r}"))
    return made


class AveragedGradients:
    """The gradients of a follower, which has none of its own. states: as of `GradientAverage`."""

    def __init__(self, header: Mapping[str, Any], transform: Transform, model: nn.Module):
        named, self._transform = dict(model.named_parameters()), transform
        for name in (name for names in header["buckets"] for name in names if name not in named):
            raise ValueError(expected("model", f"a parameter {name!r}, as the run has", "none"))
        self._buckets = [[named[name] for name in names] for names in header["buckets"]]
        self._binding, self._log = echoing(header["axes"]), Log(reads=True, prefix=MEAN)
        with self._binding, torch.no_grad():
            self.states = tuple(transform.init([p.detach() for p in bucket]) for bucket in self._buckets)

    @torch.no_grad()
    def fill(self, records: Iterable[Record], phase: Phase) -> None:
        """Write the mean of a step into p.grad; None where there was no backward pass."""
        self._log.fill(records := [*records])
        update, states = self._transform.update(phase), []
        for i, (bucket, state) in enumerate(zip(self._buckets, self.states, strict=True)):
            means: list[Tensor | None] = [None for _ in bucket]
            if records:
                own = [torch.zeros_like(p) for p in bucket]
                with self._binding, following.at(self._log, (i,), lambda: self._binding.axes):
                    means, state = update(own, state, [p.detach() for p in bucket])
            for p, mean in zip(bucket, means, strict=True):
                p.grad = None if mean is None else mean.to(p.dtype)
            states.append(state)
        self.states = tuple(states)
        self._log.check_read()
