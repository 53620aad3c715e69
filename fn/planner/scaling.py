"""From how many ranks on another method is the fastest, the links and the ranks of a node being what they are."""

from __future__ import annotations

from collections.abc import Callable

from fn.planner.methods import label
from fn.planner.network import Network
from fn.planner.predict import WORTH, Plan, Prediction

MOST = 4096
"""Ranks up to which it is asked."""


def worlds(net: Network, most: int = MOST) -> list[int]:
    """Return numbers of ranks, each twice the one before it as far as nodes allow: parts of a node, or whole ones.

    Of links between nodes nothing is known where there is one node, so nothing is asked of more.
    """
    inside = [2**k for k in range(1, net.per_node.bit_length()) if 2**k < net.per_node]
    last = net.per_node if net.nodes == 1 else max(most, net.per_node)
    between = [net.per_node * 2**k for k in range((last // net.per_node).bit_length())]
    return [world for world in inside + between if 1 < world <= last]


def on(net: Network, world: int) -> Network:
    """Return the network with so many ranks; fewer than a node has are part of a node."""
    return net._replace(world=world, per_node=min(net.per_node, world))


def fastest(plan_on: Callable[[Network], Plan], net: Network, most: int = MOST) -> list[tuple[int, Prediction]]:
    """Return, from the fewest ranks to the most, from how many of them on which method is the fastest.

    Candidates are the methods that synchronise in every step: to leave steps out changes what is learned. A method
    stays until another one needs `WORTH` less of a step, so that not every tie is an event.
    """
    found: list[tuple[int, Prediction]] = []
    for world in worlds(net, most):
        here = [p for p in plan_on(on(net, world)).predictions if p.method.in_every_step]
        if found:
            before = next((p for p in here if name_of(p) == name_of(found[-1][1])), None)
            if before is not None and here[0].step > (1 - WORTH) * before.step:
                continue
        found.append((world, here[0]))
    return found


def name_of(found: Prediction) -> str:
    """Return what a prediction's method is called."""
    return label(found.method.name, found.method.topology)


_START = "Fastest with these links, synchronising in every step: "


def sentence(found: list[tuple[int, Prediction]], most: int) -> str:
    """Say which method is the fastest from how many ranks on. Args: most: ranks up to which it was asked."""
    (_, first), *others = found
    if not others:
        return f"{_START}{name_of(first)} on 2 to {most:,} ranks."
    later = "; ".join(f"{name_of(p)} from {world:,} on" for world, p in others)
    return f"{_START}{name_of(first)} below {others[0][0]:,} ranks; {later}."
