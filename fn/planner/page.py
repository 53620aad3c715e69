"""One page that plans in the browser: a table of coefficients, and `page.html`, which evaluates it.

The page knows no method and no formula of a method's traffic. It is given, for every method and number of ranks, the
bytes per parameter and the number of messages of each collective, as they were counted here, and for every network
the `ways` of a message of one byte. A message's seconds are linear in both, so what is left to the page are sums, the
least of a few ways, and what the backward pass hides.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from itertools import groupby
from typing import Any

from fn.planner import traffic
from fn.planner.methods import Row, Send, label, within
from fn.planner.network import Cost, Link, Message, Network, network, ways
from fn.planner.predict import FORWARD, WORTH
from fn.planner.traffic import Model, Ranks

PARAMS = (*(digits * 10**power for power in range(6, 12) for digits in (1, 2, 5)), 10**12)
"""Numbers of parameters that the page offers."""

WORLDS = tuple(2**k for k in range(1, 13))
NODES = (1, 2, 4, 8)
"""Ranks, and ranks of a node."""

EXACT_WITHIN = 0.005
"""How far bytes may be off between two numbers of parameters that are exact, as a part of them."""

COLLECTIVES = ("all_reduce", "all_to_all", "all_gather", "permute")

LEAST = 1e-7
"""Seconds of the least latency that a slider has."""

Times = tuple[float, float]
"""Messages of the first part, in which odd tensors lie, and of each other one in the mean."""

Counts = dict[tuple[str, str], tuple[Times, int]]
"""(axis, collective): (messages of a part, bytes of all parts)."""

Curve = tuple[str, str, float, int]
"""Axis, collective, bytes per parameter, and the number of the curve that says where they are more or less."""


def write(
    table: list[Row],
    net: Network,
    *,
    params: int,
    compute: float,
    local_steps: int,
    memory: float,
    tensors: int,
    width: int,
    bucket: int,
    coding: Callable[[Network], Mapping[str, float]] = lambda net: {},
) -> str:
    """Return the page, one file of HTML that opens with this plan.

    Args: table: what `methods.rows` returned. params, compute, local_steps: where the sliders are at first, as is net.
        memory: bit/s, of which coding is estimated. tensors, width, bucket: of the model, as for `traffic.model`.
        coding: network -> seconds that coding `params` elements takes, by a method's label, where they were measured.
    """

    def passes(label: str, net: Network) -> float | None:
        seconds = coding(net).get(label)
        return None if seconds is None else seconds * memory / (8 * params)

    filled = coefficients(table, net, params, passes, tensors=tensors, width=width, bucket=bucket)
    filled["memory"] = memory
    filled["start"] = {
        "params": params, "world": net.world, "node": net.per_node,
        "intra": net.intra.cost.bandwidth, "intraLatency": max(LEAST, net.intra.cost.latency),
        "inter": net.inter.cost.bandwidth, "interLatency": max(LEAST, net.inter.cost.latency),
        "compute": compute, "round": local_steps,
    }  # fmt: skip
    filled["links"] = {"intra": _times_the_link(net.intra), "inter": _times_the_link(net.inter)}
    template = files("fn.planner").joinpath("page.html").read_text(encoding="utf-8")
    text = json.dumps(filled, separators=(",", ":")).replace("</", "<\\/")  # "</script>" in a name would end the script
    return template.replace('"COEFFICIENTS"', text)


def _times_the_link(link: Link) -> dict[str, tuple[float, float]]:
    """Return the latency and the bandwidth of each collective as multiples of the link's, which the sliders say."""
    least = max(LEAST, link.cost.latency)
    costs = {name: link.of(name) for name in COLLECTIVES}
    return {
        name: (_short(cost.latency / least), _short(cost.bandwidth / link.cost.bandwidth))
        for name, cost in costs.items()
    }


def coefficients(
    table: list[Row], net: Network, params: int, passes: Callable[[str, Network], float | None], *,
    tensors: int = 150, width: int = 4, bucket: int = traffic.BUCKET,
) -> dict[str, Any]:  # fmt: skip
    """Return what the page evaluates, for its numbers of parameters and ranks and for those that are given.

    Args: passes: a method's label and a network -> bytes of memory for each parameter, None for what its row says.
    """
    grid = sorted({*PARAMS, params})
    models = [traffic.model(n, min(tensors, n), width) for n in grid]
    nets = {
        (world, node): network(world, node, Cost(1, 1), Cost(1, 1))
        for world in sorted({*WORLDS, net.world})
        for node in sorted({*NODES, net.per_node})
        if world % node == 0
    }
    curves: dict[str, int] = {}

    @cache
    def pieces(i: int, width: int, cut: str) -> list[tuple[Model, int]]:
        """Return what leaves together, the first of it, and of the others, most of which are equal, how many."""
        model = models[i]._replace(width=width)
        first, *others = traffic.buckets(model, bucket) if cut == "bucket" else [model]
        return [(first, 1), *Counter(others).items()]

    @cache
    def known(send: Send, width: int, cut: str, ranks: Ranks, last: int) -> list[Curve]:
        """Return what is sent; rows that send alike, the same object, are counted once."""

        @cache
        def counts(i: int) -> Counts:
            return _counts([(send(piece, ranks=ranks), times) for piece, times in pieces(i, width, cut)])

        return [
            (*key, size, curves.setdefault(json.dumps(curve), len(curves)))
            for key, size, curve in knots(counts, grid, last, grid.index(params))
        ]

    rows = []
    for row in table:
        last = max((i for i, model in enumerate(models) if row.fits(model)), default=-1)
        for topology in ("flat", "two-level") if row.two_level else ("flat",):
            on_ranks = {}
            for world, node in nets if last >= 0 else ():
                ranks: Ranks = world if topology == "flat" else (node, world // node)
                if topology == "two-level" and not 1 < node < world:
                    continue
                in_node = row.local and topology == "two-level"
                each_step = known(within, width, "bucket", node, last) if in_node else []
                cut = row.cut if isinstance(row.cut, str) else "whole"  # fragments are equal parts of all of it
                sent = known(row.send, 4 if row.local else width, cut, ranks, last)  # differences are in float32
                exact = known(row.exact, width, "whole", ranks, last) if row.exact is not None else []
                own = passes(label(row.name, topology), nets[world, node])
                own = row.passes_on(ranks) if own is None else _short(own)
                on_ranks[_key(ranks)] = [own, sent, each_step, exact]
            if on_ranks:
                rows.append(
                    {
                        "name": row.name, "alike": row.alike, "topology": topology, "compressed": row.compressed,
                        "local": row.local, "every": row.interval, "delay": row.delay, "period": row.period,
                        "cut": row.cut, "last": last, "at": on_ranks,
                    }
                )  # fmt: skip
    return {
        "params": grid,
        "nets": {f"{world}/{node}": _ways(of) for (world, node), of in nets.items()},
        "buckets": [_run_lengths(model, bucket) for model in models],
        "curves": [json.loads(text) for text in curves],
        "rows": rows,
        "forward": FORWARD,
        "worth": WORTH,
    }


def _key(ranks: Ranks) -> str:
    return str(ranks) if isinstance(ranks, int) else f"{ranks[0]}x{ranks[1]}"


def _counts(parts: list[tuple[list[Message], int]]) -> Counts:
    """Return what is sent in parts (messages, how many parts are like this), of which there is one first one."""
    counts: dict[tuple[str, str], list[int]] = {}
    for k, (messages, times) in enumerate(parts):
        for message in messages:
            sums = counts.setdefault(message[:2], [0, 0, 0])
            sums[k > 0] += times
            sums[2] += times * message.size
    others = max(1, sum(times for _, times in parts[1:]))
    return {key: ((first, _short(rest / others)), size) for key, (first, rest, size) in counts.items()}


def _ways(net: Network) -> dict[str, dict[str, list[list[float]]]]:
    """Return, by axis and collective, the ways of a message of one byte."""
    return {
        axis: {name: [[_short(x) for x in way] for way in ways(Message(axis, name, 1), net)] for name in COLLECTIVES}
        for axis in ("data", "local", "node")
    }


def _run_lengths(model: Model, bucket: int) -> list[tuple[int, float]]:
    """Return the buckets that leave behind the backward pass, as (so many, each of this part of the gradients)."""
    sizes = [piece.params / model.params for piece in traffic.buckets(model, bucket)]
    return [(len(list(same)), size) for size, same in groupby(sizes)]


def knots(
    counts: Callable[[int], Counts], grid: list[int], last: int, also: int
) -> list[tuple[tuple[str, str], float, list[tuple[int, float, float, float]]]]:
    """Return, for each axis and collective, at which numbers of parameters to know its bytes.

    Between two of them bytes per parameter are a power of the number of parameters; where that is not right within
    `EXACT_WITHIN`, or the number of messages changes, there is another one in the middle.

    Args: counts: place in the grid -> what is sent. last: the largest place. also: a place that shall be exact.
    Returns: ((axis, collective), bytes per parameter at `also`, [(place, bytes per parameter as a part of those,
        messages of the first part, of each other one)]); a single point if it is the same everywhere.
    """
    also = min(also, last)
    curves = []
    for key in dict.fromkeys(key for i in (0, also, last) for key in counts(i)):

        def point(i: int, key: tuple[str, str] = key) -> Point:
            count, size = counts(i).get(key, ((0, 0), 0))
            return grid[i], count, size / grid[i]

        places, gaps = {0, also, last}, [(0, also), (also, last)]
        while gaps:
            low, high = gaps.pop()
            middle = (low + high) // 2
            if high - low > 1 and not _follows(point(low), point(middle), point(high)):
                places.add(middle)
                gaps += [(low, middle), (middle, high)]
        unit = next(size for i in (also, *sorted(places)) for _, _, size in [point(i)] if size)
        curve = [(i, _short(point(i)[2] / unit), *point(i)[1]) for i in sorted(places)]
        alike = all(abs(part - 1) <= EXACT_WITHIN and tuple(times) == curve[0][2:] for _, part, *times in curve)
        curves.append((key, _short(unit), [(0, 1.0, *point(0)[1])] if alike else curve))
    return curves


Point = tuple[int, Times, float]
"""Parameters, messages, bytes per parameter."""


def _follows(low: Point, middle: Point, high: Point) -> bool:
    """Return whether the power law through two points goes through the one between."""
    if not low[1] == middle[1] == high[1] or not low[2] * middle[2] * high[2]:
        return False
    part = math.log(middle[0] / low[0]) / math.log(high[0] / low[0])
    guess = math.exp((1 - part) * math.log(low[2]) + part * math.log(high[2]))
    return abs(guess / middle[2] - 1) <= EXACT_WITHIN


def _short(number: float) -> float:
    """Return a number with five digits, which are enough and take less room."""
    return float(f"{number:.5g}")
