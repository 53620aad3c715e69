"""One page that plans in the browser: a table of messages, and `page.html`, which evaluates it.

The page knows no method and no formula of a method's traffic. It is given, for every method and each number of
parameters and of ranks that it offers, what `fn.planner.methods.method` says is sent, byte for byte, and for every
network the `ways` of a message of one byte. A message's seconds are linear in both, so what is left to the page are
sums, the least of a few ways, and what the backward pass hides.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from importlib.resources import files
from itertools import groupby
from typing import Any

from fn.planner.evidence import SMALL, evidence, given, measured, most_local_steps, most_replicas
from fn.planner.methods import Method, Parts, Row, label, method
from fn.planner.network import AXES, Cost, Link, Message, Network, Way, network, ways
from fn.planner.predict import FORWARD, WORTH, Plan, Rates
from fn.planner.recommend import EXACT_MUON, FRONT, PICKS, Pick
from fn.planner.traffic import Model, Ranks

PARAMS = (*(digits * 10**power for power in range(6, 12) for digits in (1, 2, 5)), 10**12)
"""Numbers of parameters that the page offers."""

WORLDS = tuple(2**k for k in range(1, 13))
NODES = (1, 2, 4, 8)
"""Ranks, and ranks of a node."""

COLLECTIVES = ("all_reduce", "all_to_all", "all_gather", "reduce_scatter", "permute")

LEAST = 1e-7
"""Seconds of the least latency that a slider has."""


def write(
    table: list[Row],
    net: Network,
    *,
    model: Model,
    sizes: Callable[[int], Model],
    assumed: Callable[[Model], str],
    compute: float,
    local_steps: int,
    rates: Rates,
    bucket: int,
    steps_ratio: float | None = None,
    opens: Plan | None = None,
) -> str:
    """Return the page, one file of HTML that opens with this plan.

    Args: table: what `fn.planner.methods.rows` returned. model, compute, local_steps: where the sliders are at first,
        as is net.
        sizes: a number of parameters -> the model with another one than that. assumed: what is said of each model.
        rates: of the device; where coding was measured, coding this model. bucket: as for `fn.planner.methods.methods`.
        steps_ratio: of the picks, in place of what is known. opens: the plan that is shown before anything is slid,
        where own times or steps of it were measured.
    """

    def passes(label: str, net: Network) -> float | None:
        seconds = rates.coding(net).get(label)
        return None if seconds is None else seconds * rates.memory / (8 * model.params)

    models = {n: model if n == model.params else sizes(n) for n in sorted({*PARAMS, model.params})}
    filled = coefficients(table, net, [*models.values()], bucket, passes, rates.own)
    filled["assumed"] = [assumed(each) for each in models.values()]
    filled["memory"] = rates.memory
    opening = {(p.method.name, p.method.topology): (p.own, p.predicted) for p in opens.predictions} if opens else {}
    for row in filled["rows"]:
        row["opens"] = opening.get((row["name"], row["topology"]))
    filled["start"] = {
        "params": model.params, "world": net.world, "node": net.per_node,
        "intra": net.intra.cost.bandwidth, "intraLatency": max(LEAST, net.intra.cost.latency),
        "inter": net.inter.cost.bandwidth, "interLatency": max(LEAST, net.inter.cost.latency),
        "compute": compute, "round": local_steps,
    }  # fmt: skip
    links = {"intra": net.intra, "inter": net.inter}
    filled["links"] = {name: _times_the_link(link) for name, link in links.items()}
    filled["efficiency"] = {name: link.efficiency._asdict() for name, link in links.items()}
    filled["base"] = "adamw"
    filled["front"], filled["small"] = FRONT, SMALL
    filled["picks"] = [_known(pick, filled["params"], list(filled["nets"]), steps_ratio) for pick in PICKS]
    filled["exact"] = _known(EXACT_MUON, filled["params"], list(filled["nets"]), None)
    template = files("fn.tools").joinpath("page.html").read_text(encoding="utf-8")
    text = json.dumps(filled, separators=(",", ":")).replace("</", "<\\/")  # "</script>" in a name would end the script
    return template.replace('"COEFFICIENTS"', text)


def _known(pick: Pick, grid: list[int], nets: list[str], ratio: float | None) -> dict[str, Any]:
    """Return a pick with what is known of it, by numbers of parameters, and by replicas where ranks train alone.

    replicas: those numbers of them for which there is more to know than `beyond`, in rounds of at most `rounds` steps.
    """
    own = measured()["methods"].get(pick.name, {"warm_up": 0.0, "warm_up_as": pick.row})
    rounds = most_local_steps(pick.name)

    def found(params: int, replicas: int, local_steps: int) -> dict[str, Any]:
        counted = {"replicas": replicas, "local_steps": local_steps}
        known = evidence(pick.name, params, **counted) if ratio is None else given(ratio)
        return {"grade": known.grade, "steps": known.steps, "own": known.own, "words": known.words}

    pairs = [(int(world), int(node)) for world, node in (key.split("/") for key in nets)]
    counts = sorted({count for world, node in pairs for count in (world, world // node)}) if rounds else [1]
    replicas = [k for k in counts if rounds == 0 or k <= most_replicas(pick.name)]
    return {
        "name": pick.name, "row": pick.row, "warm_up": own["warm_up"], "warm_up_as": own["warm_up_as"],
        "rounds": rounds, "replicas": replicas, "at": [[found(n, k, rounds) for k in replicas] for n in grid],
        "beyond": found(grid[0], 1, rounds + 1),
    }  # fmt: skip


def _times_the_link(link: Link) -> dict[str, tuple[float, float]]:
    """Return the latency and the bandwidth of each collective as multiples of the link's, which the sliders say."""
    least = max(LEAST, link.cost.latency)
    costs = {name: link.measured.get(name, link.cost) for name in COLLECTIVES}
    return {name: (cost.latency / least, cost.bandwidth / link.cost.bandwidth) for name, cost in costs.items()}


def coefficients(
    table: list[Row], net: Network, models: list[Model], bucket: int,
    passes: Callable[[str, Network], float | None], own_time: Callable[[Method], float],
) -> dict[str, Any]:  # fmt: skip
    """Return the data that the page evaluates, for these models, and for its numbers of ranks and for those of the net.

    What comes often is in lists, and named by its place there: cuts (of parts that are alike one behind the other, how
    many, and the fraction of the gradients that each is), kinds (of all that have the same bytes axis, collective and
    number of messages), series (for each model a cut, and for each run in it a kind and its bytes, another kind and its
    bytes ...), passes (bytes of memory for each parameter of each model), and owns (for each model the seconds of a
    method's own).

    Args: passes: a method's label and a network -> bytes of memory for each parameter, None for what its row says.
        own_time: the seconds of a method's own.
    """
    nets = {
        (world, node): network(world, node, Cost(1, 1), Cost(1, 1))
        for world in sorted({*WORLDS, net.world})
        for node in sorted({*NODES, net.per_node})
        if world % node == 0
    }
    cuts, kinds, series, each_passes, owns = _Places(), _Places(), _Places(), _Places(), _Places()

    def packed(parts: Parts) -> tuple[Any, ...]:
        runs = [(part, len(list(alike))) for part, alike in groupby(parts)]
        sent = [[(kinds[alike], size) for size, alike in _sums(messages).items()] for (_, messages), _ in runs]
        return cuts[tuple((times, fraction) for (fraction, _), times in runs)], *(sum(pairs, ()) for pairs in sent)

    rows = []
    for row in table:
        for topology in ("flat", "two-level") if row.two_level else ("flat",):
            on_ranks = {}
            for (world, node), of in nets.items():
                ranks: Ranks = world if topology == "flat" else (node, world // node)
                if _key(ranks) in on_ranks or (topology == "two-level" and not 1 < node < world):
                    continue
                made = [method(row, each, ranks, bucket) if row.fits(each) else None for each in models]
                own = passes(label(row.name, topology), of)
                on_ranks[_key(ranks)] = [
                    each_passes[tuple(row.passes_on(each, ranks) if own is None else own for each in models)],
                    series[tuple(m and packed(m.parts) for m in made)],
                    series[tuple(m and packed(m.each_step) for m in made)],
                    series[tuple(m and packed(((1.0, m.exact),)) for m in made)],
                    owns[tuple(m and own_time(m) for m in made)],
                ]
            rows.append(
                {
                    "name": row.name, "alike": row.alike, "topology": topology, "compressed": row.compressed,
                    "local": row.local, "every": row.interval, "delay": row.delay, "period": row.period,
                    "overlapped": row.cut == "bucket", "at": on_ranks,
                }
            )  # fmt: skip
    return {
        "params": [each.params for each in models],
        "nets": {f"{world}/{node}": _ways(of) for (world, node), of in nets.items()},
        "cuts": list(cuts),
        "kinds": list(kinds),
        "series": list(series),
        "passes": list(each_passes),
        "owns": list(owns),
        "rows": rows,
        "forward": FORWARD,
        "worth": WORTH,
    }


class _Places(dict[Hashable, int]):
    """Where things are in a list of all that were asked for, each once."""

    def __missing__(self, thing: Hashable) -> int:
        self[thing] = len(self)
        return self[thing]


def _key(ranks: Ranks) -> str:
    return str(ranks) if isinstance(ranks, int) else f"{ranks[0]}x{ranks[1]}"


def _sums(messages: tuple[Message, ...]) -> dict[int, tuple[tuple[str, str, int], ...]]:
    """Return bytes, and for these each (axis, collective, how many messages) that has so many in all.

    Seconds are linear in both, but of an all-reduce the bytes of each message say which way is the quickest.
    """
    sizes: dict[tuple[str, str, int], list[int]] = {}
    for message in messages:
        alone = message.size if message.collective == "all_reduce" else 0
        sizes.setdefault((message.axis, message.collective, alone), []).append(message.size)
    alike: dict[int, tuple[tuple[str, str, int], ...]] = {}
    for (axis, collective, _), found in sizes.items():
        alike[sum(found)] = (*alike.get(sum(found), ()), (axis, collective, len(found)))
    return alike


def _ways(net: Network) -> dict[str, dict[str, list[Way]]]:
    """Return, by axis and collective, the ways of a message of one byte."""
    return {axis: {name: ways(Message(axis, name, 1), net) for name in COLLECTIVES} for axis in AXES}
