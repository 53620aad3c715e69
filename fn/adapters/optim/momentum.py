"""A momentum that an optimizer keeps as codes between compressed steps, as `fn.momentum_as_codes` does.

It becomes codes behind the first compressed step that all ranks have taken. A warm-up step needs it in floating point,
and so does whoever reads or saves the states: they have the form that any other optimizer has, and any world.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from fn import tree
from fn.base import Guarded, Step, Transform, links_of
from fn.collectives.codecs.codec import Codec
from fn.collectives.codecs.sign import sign
from fn.compiling import original
from fn.errors import expected
from fn.transforms.adam import OnebitAdam, OnebitAdamState
from fn.transforms.average import CompressedAverage
from fn.transforms.momentum_codes import vectors_between

Tree = Any


def check_has_codes(transform: Transform, state: Tree) -> None:
    """Refuse a transform whose momentum is nothing that codes can hold. Args: state: as its init made it.

    Raises: ValueError that names what is in the way.
    """
    update = original(transform.compressed_update)
    links = links_of(update.inner if isinstance(update, Guarded) else update)
    found = [link.update.rule for link in links if isinstance(link.update, Step)]
    adams = [rule for rule in found if isinstance(rule, OnebitAdam)]
    states = tree.instances(state, OnebitAdamState)
    got = next(filter(None, map(_in_the_way, adams)), "") if adams else "a transform without scale_by_onebit_adam"
    if not got and any(vectors_between(adam.sync, tree.leaves(adam.mu)) is None for adam in states):
        got = "a feedback without errors, or several axes"
    if got:
        wanted = "False, or 1-bit Adam with fn.sign() over one axis, with servers and keep_zeros"
        raise ValueError(expected("momentum_as_codes", wanted, got))


def _in_the_way(rule: OnebitAdam) -> str:
    """Return why the momentum after a compressed step is not scale * sign for each tensor; "" if it is."""
    if not rule.keep_zeros:
        return "keep_zeros=False"
    links = links_of(rule.average)
    average = links[0].update.rule if len(links) == 1 and isinstance(links[0].update, Step) else None
    if not isinstance(average, CompressedAverage):
        return "a momentum that fn.compressed_average does not average"
    if not isinstance(average.axis, str):
        return f"the axes {average.axis}"
    if not average.servers or average.layout == "fused":
        return f"servers={average.servers} and layout={average.layout!r}"
    make = average.codec.make if isinstance(average.codec, Codec) else None
    has_scales = isinstance(make, partial) and make.func is sign and make.args == (None,)
    return "" if has_scales else "a codec without a single scale per tensor"
