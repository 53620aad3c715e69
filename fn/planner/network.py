"""The cost model: a collective's seconds are messages times alpha plus bytes times beta, on the slowest link it uses.

    t = alpha k + s / beta        k messages one after the other, s bytes through a link of beta bytes a second

Ranks sit in nodes. Inside a node each rank has a link of its own; the ranks of a node share the node's link to the
others. Collectives run over one of three axes: "data", all ranks; "local", the ranks of a node; "node", the ranks with
the same place in every node, of which as many groups as a node has ranks run at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from fn.errors import expected

AXES = ("data", "local", "node")


class Cost(NamedTuple):
    """latency: seconds a message, alpha. bandwidth: bits a second, 1 / beta."""

    latency: float
    bandwidth: float


class Link(NamedTuple):
    """What a link costs: `cost` in general, `measured` for the collectives that were measured on it."""

    cost: Cost
    measured: Mapping[str, Cost] = MappingProxyType({})

    def of(self, collective: str) -> Cost:
        """Return the cost of a collective's messages."""
        return self.measured.get(collective, self.cost)


class Network(NamedTuple):
    """world ranks in nodes of per_node. intra: each rank's link inside a node; inter: each node's to the others."""

    world: int
    per_node: int
    intra: Link
    inter: Link

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return self.world // self.per_node


class Message(NamedTuple):
    """One collective. size: the bytes that a rank sends in it, as the ledger counts them."""

    axis: str
    collective: str
    size: int


def network(world: int, per_node: int, intra: Cost | Link, inter: Cost | Link | None = None) -> Network:
    """Return a network, checked.

    Args: world: ranks. per_node: of them in a node. intra, inter: the links; inter may be left out for one node.
    Raises: ValueError if the ranks do not fill the nodes or a link between nodes is missing.
    """
    if world < 1 or per_node < 1 or world % per_node:
        raise ValueError(expected("world, per_node", "whole nodes of at least one rank", f"{world}, {per_node}"))
    if world > per_node and inter is None:
        raise ValueError(f"inter: is missing, but {world} ranks are {world // per_node} nodes of {per_node}")
    inner = intra if isinstance(intra, Link) else Link(intra)
    outer = inner if inter is None else inter if isinstance(inter, Link) else Link(inter)
    return Network(world, per_node, inner, outer)


def ranks_on(net: Network, axis: str) -> int:
    """Return the number of ranks on an axis. Raises: ValueError if there is no such axis."""
    if axis not in AXES:
        raise ValueError(expected("axis", f"one of {AXES}", f"{axis!r}"))
    return {"data": net.world, "local": net.per_node, "node": net.nodes}[axis]


def duration(message: Message, net: Network) -> float:
    """Return the seconds that a collective takes when nothing else uses the links."""
    ranks = ranks_on(net, message.axis)
    if ranks == 1:
        return 0.0
    if message.axis == "node":
        return _time(message, net.inter.of(message.collective), ranks, shared=net.per_node)
    if message.axis == "local" or net.nodes == 1:
        return _time(message, net.intra.of(message.collective), ranks)
    return _across(message, net)


def leaving(message: Message, net: Network) -> float:
    """Return the bytes that a node sends to the others in a collective."""
    if net.nodes == 1 or message.axis == "local":
        return 0.0
    if message.axis == "node":
        return float(net.per_node * message.size)
    if message.collective == "all_to_all":  # every rank to every other: most of it leaves the node
        return net.per_node * message.size * (net.world - net.per_node) / (net.world - 1)
    return float(message.size)  # a ring enters and leaves every node once


def _time(message: Message, cost: Cost, ranks: int, shared: int = 1) -> float:
    """One link class. An all-reduce takes the better of a ring and a double tree: fewer messages, some more bytes."""
    wire = 8.0 * message.size * shared / cost.bandwidth
    if message.collective == "all_reduce":
        tree = 2 * math.ceil(math.log2(ranks)) * cost.latency + wire * ranks / (ranks - 1)
        return min(2 * (ranks - 1) * cost.latency + wire, tree)
    return (ranks - 1) * cost.latency + wire


def _across(message: Message, net: Network) -> float:
    """All ranks, over both link classes at once: the slower of the two decides."""
    inner, outer = net.intra.of(message.collective), net.inter.of(message.collective)
    out = 8.0 * leaving(message, net)
    if message.collective == "all_to_all":
        inside = 8.0 * message.size - out / net.per_node
        messages = (net.per_node - 1) * inner.latency + (net.world - net.per_node) * outer.latency
        return messages + max(inside / inner.bandwidth, out / outer.bandwidth)
    ring = out / min(inner.bandwidth, outer.bandwidth)
    if message.collective == "all_reduce":
        hops = math.ceil(math.log2(net.nodes)) * outer.latency + math.ceil(math.log2(net.per_node)) * inner.latency
        return min(2 * (net.world - 1) * outer.latency + ring, 2 * hops + ring * net.world / (net.world - 1))
    return (net.world - 1) * outer.latency + ring
