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
from fn.planner.efficiency import FULL, Efficiency

AXES = ("data", "local", "node")


class Cost(NamedTuple):
    """latency: seconds a message, alpha. bandwidth: bits a second, 1 / beta."""

    latency: float
    bandwidth: float


class Link(NamedTuple):
    """The costs of a link: `cost` in general, `measured` for the collectives that were measured on it.

    efficiency: the parts of the bandwidth that whole messages reach, and those that leave in buckets.
    """

    cost: Cost
    measured: Mapping[str, Cost] = MappingProxyType({})
    efficiency: Efficiency = FULL

    def of(self, collective: str, in_buckets: bool = False) -> Cost:
        """Return the cost of a collective's messages."""
        latency, bandwidth = self.measured.get(collective, self.cost)
        return Cost(latency, bandwidth * self.efficiency.at(self.cost.bandwidth)[in_buckets])


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


class Way(NamedTuple):
    """One way to do a collective: messages one after the other, and bytes that go through both kinds of links at once.

    inner_hops, outer_hops: messages inside a node and between nodes that wait for each other. inner_bytes,
    outer_bytes: what the busiest link of each kind carries. All that a collective costs is linear in links and bytes.
    """

    inner_hops: int
    outer_hops: int
    inner_bytes: float
    outer_bytes: float


def duration(message: Message, net: Network, in_buckets: bool = False) -> float:
    """Return the seconds that a collective takes when nothing else uses the links: the quickest way's."""
    inner, outer = (link.of(message.collective, in_buckets) for link in (net.intra, net.inter))
    return min(
        (
            way.inner_hops * inner.latency
            + way.outer_hops * outer.latency
            + 8 * max(way.inner_bytes / inner.bandwidth, way.outer_bytes / outer.bandwidth)
            for way in ways(message, net)
        ),
        default=0.0,
    )


def ways(message: Message, net: Network) -> list[Way]:
    """Return the ways to do a collective, none where there is nobody to talk to; an all-reduce has two.

    They are a ring and a double tree, which has fewer messages and some more bytes.
    """
    ranks = ranks_on(net, message.axis)
    if ranks == 1:
        return []
    if message.axis == "node" or net.per_node == 1:  # nothing stays inside a node of one rank
        return [
            Way(0, hops, 0.0, float(size * net.per_node))
            for hops, size in _alternatives(message, ranks, math.ceil(math.log2(ranks)))
        ]
    if message.axis == "local" or net.nodes == 1:
        return [
            Way(hops, 0, float(size), 0.0) for hops, size in _alternatives(message, ranks, math.ceil(math.log2(ranks)))
        ]
    return _across(message, net)


def leaving(message: Message, net: Network) -> float:
    """Return the bytes that a node sends to the others in a collective."""
    if net.nodes == 1 or message.axis == "local":
        return 0.0
    if message.axis == "node":
        return float(net.per_node * message.size)
    if message.collective in ("all_to_all", "permute"):  # to every other rank, or one by chance: most leaves the node
        return net.per_node * message.size * (net.world - net.per_node) / (net.world - 1)
    return float(message.size)  # a ring enters and leaves every node once


def _alternatives(message: Message, ranks: int, depth: int) -> list[tuple[int, float]]:
    """Return (hops, bytes) of a ring, and for an all-reduce of a double tree that is so deep."""
    if message.collective == "permute":
        return [(1, message.size)]
    if message.collective != "all_reduce":
        return [(ranks - 1, message.size)]
    # A ring sends 2 (W - 1) / W of the vector, which is `size`; up and down a tree it is twice the whole vector.
    return [(2 * (ranks - 1), message.size), (2 * depth, message.size * ranks / (ranks - 1))]


def _across(message: Message, net: Network) -> list[Way]:
    """All ranks, over both kinds of links at once: the slower of the two decides."""
    out = leaving(message, net)
    if message.collective == "all_to_all":
        # What does not leave the node goes to its other ranks.
        inside = message.size - out / net.per_node
        return [Way(net.per_node - 1, net.world - net.per_node, inside, out)]
    if message.collective == "permute":
        return [Way(0, 1, float(message.size), out)]
    # A tree goes through each node, then between nodes: hops of both kinds, up and down.
    inner, outer = (math.ceil(math.log2(ranks)) for ranks in (net.per_node, net.nodes))
    (hops, _), *tree = _alternatives(message, net.world, 0)
    return [Way(0, hops, out, out), *(Way(2 * inner, 2 * outer, size, size) for _, size in tree)]
