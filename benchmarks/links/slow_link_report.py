"""What `slow_link.py` says and draws: medians, limits, and the planner's predictions beside them."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.links.contenders import CONTENDERS, DDP, NONE, ONEBIT, OVERLAPPED
from benchmarks.links.slow_link_rank import RATES
from benchmarks.measure import markdown
from fn.planner.network import Cost, Link, Network, network
from fn.planner.predict import predict
from fn.planner.traffic import Model

Row = dict[str, Any]


def rates(ranks: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return for each rate how it was calibrated, and a row per contender: seconds, bytes, limit and prediction."""
    model = Model(tuple(tuple(shape) for shape in ranks[0]["shapes"]))
    free = {name: max(rank["without wire"][name] for rank in ranks) for name in ranks[0]["without wire"]}
    found = {}
    for rate, seen in ranks[0]["rates"].items():
        turns = {name: _together([rank["rates"][rate]["turns"][name] for rank in ranks]) for name in seen["turns"]}
        net = link(seen["calibrated"])
        idle, alone = turns[NONE]["payload"], turns[NONE]["seconds"]  # idle: the barriers' bytes
        rows = []
        for name, turn in turns.items():
            planned = CONTENDERS[name].method(model, 2)
            wire = 8 * planned.size / RATES[rate] if RATES[rate] else 0.0
            sizes = {"payload": turn["payload"] - idle / CONTENDERS[name].steps, "planned": planned.size}
            times = {"limit": max(alone, wire), "predicted": prediction(name, planned, net, alone, free)}
            rows.append({"name": name, **turn, **sizes, **times})
        found[rate] = {"calibrated": seen["calibrated"], "rows": rows}
    return found


def _together(turns: list[dict[str, list[float]]]) -> dict[str, float]:
    """Return the medians over turns of the slower rank's seconds and of the bytes of rank 0."""
    seconds = statistics.median(max(pair) for pair in zip(*(turn["seconds"] for turn in turns), strict=True))
    return {"seconds": seconds, **{key: statistics.median(turns[0][key]) for key in ("payload", "headers", "ledger")}}


def link(calibrated: dict[str, dict[str, float]]) -> Network:
    """Return the network of two ranks that was calibrated."""
    costs = {name: Cost(**cost) for name, cost in calibrated.items()}
    return network(2, 2, Link(costs["all_to_all"], costs))


def prediction(name: str, method: Any, net: Network, compute: float, free: dict[str, float]) -> float:
    """Return the step from the computation, the coding measured without a wire, and the calibrated link.

    A method that overlaps codes as much as the same one that does not. A turn of several steps codes in one.
    """
    coding = max(0.0, free.get(name.removesuffix(OVERLAPPED), free[NONE]) - free[NONE]) * method.interval
    return predict(method, net, compute, coding).step


def table(result: dict[str, Any]) -> str:
    """Return a Markdown table with a column for each rate, and below it what follows from the figures."""
    seen = {rate: {row["name"]: row for row in found["rows"]} for rate, found in result["rates"].items()}
    first = next(iter(seen.values()))
    rows = []
    for name, row in first.items():
        part = f"{row['payload'] / row['planned']:.3f}" if row["planned"] and row["payload"] > 0 else ""
        cells = [name, f"{row['planned'] / 1e6:.3f}", part]
        for here in seen.values():
            cells.append(f"{here[name]['seconds']:.3f} ({here[DDP]['seconds'] / here[name]['seconds']:.2f})")
        rows.append(cells)
    columns = " | ".join(f"{rate}: s (times as fast)" for rate in seen)
    ratios = [row["predicted"] / row["seconds"] for here in seen.values() for row in here.values()]
    lines = [] if result["throttled"] else ["- No link was throttled: both ranks ran over loopback."]
    lines += [f"- The planner's predictions are {min(ratios):.2f} to {max(ratios):.2f} of these {len(ratios)} times."]
    lines += [f"- {line}" for line in _hidden(seen)]
    return "\n".join([markdown(f"| step | MB planned | sent / planned | {columns} |", rows), "", *lines])


def _hidden(seen: dict[str, dict[str, Row]]) -> list[str]:
    """Return how much of the communication an overlapped step hides: (serial - it) / (serial - no communication)."""
    lines = []
    for name in (name for name in CONTENDERS if name.endswith(OVERLAPPED)):
        shares = []
        for rate, here in seen.items():
            serial = here.get(name.removesuffix(OVERLAPPED))
            if name in here and serial and serial["seconds"] > here[NONE]["seconds"]:
                gained, whole = (serial["seconds"] - here[other]["seconds"] for other in (name, NONE))
                shares.append(f"{gained / whole:.0%} at {rate}" if gained > 0 else f"nothing at {rate}")
        if shares:
            lines.append(f"{name}: of its communication it hides {', '.join(shares)}.")
    return lines


def headline(result: dict[str, Any]) -> str:
    """Return the sentence of the README."""
    parts = []
    for rate, found in result["rates"].items():
        seconds = {row["name"]: row["seconds"] for row in found["rows"]}
        as_fast = " as fast as a float32 step of DDP" if not parts else ""
        parts.append(f"{seconds[DDP] / seconds[ONEBIT]:.1f} times{as_fast} at {rate}")
    times = f"{', '.join(parts[:-1])}{' and ' * (len(parts) > 1)}{parts[-1]}"
    return f"1-bit Adam's compressed step, with one scale a tensor, was {times}."


def draw(result: dict[str, Any], path: str) -> None:
    """Write the steps as bars, a panel per rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    count = len(result["rates"])
    figure, panels = plt.subplots(1, count, figsize=(3.4 * count + 1.5, 4.2), layout="constrained", squeeze=False)
    for axes, (rate, found) in zip(panels[0], result["rates"].items(), strict=True):
        rows = found["rows"][::-1]
        colors = ["C0" if row["name"].startswith("fn") else "0.6" for row in rows]
        axes.barh([row["name"] for row in rows], [row["seconds"] for row in rows], color=colors)
        for place, row in enumerate(rows):
            axes.plot([row["limit"]] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.5)
            axes.plot(row["predicted"], place, "x", color="C3", markersize=4)
        axes.set(title=rate, xlabel="seconds a step")
        axes.tick_params(labelleft=axes is panels[0][0])
        axes.grid(axis="x", alpha=0.3)
    panels[0][0].plot([], [], color="black", label="limit: computation, bytes / bandwidth")
    panels[0][0].plot([], [], "x", color="C3", label="the planner's prediction")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    figure.savefig(path, dpi=130)
