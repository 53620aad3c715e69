"""What `slow_link.py` prints and draws: medians, ratios, limits, and the planner's predictions beside them."""

from __future__ import annotations

import statistics
from typing import Any

from contenders import CONTENDERS, DDP, NONE
from slow_link_rank import RATES

from fn.planner.network import Cost, Link, Network, network
from fn.planner.predict import predict
from fn.planner.traffic import Model

Row = dict[str, Any]

HEAD = "| step | s | DDP fp32 / it | limit, s | it / limit | sent, MB | / planned | headers, kB | predicted / it |"


def rows(ranks: list[dict[str, Any]]) -> list[Row]:
    """Return a row per rate and contender: seconds, bytes, limit and prediction."""
    found = []
    model = Model(tuple(tuple(shape) for shape in ranks[0]["shapes"]))
    free = quiet(ranks)
    for rate, seen in ranks[0]["rates"].items():
        turns = {name: _together([rank["rates"][rate]["turns"][name] for rank in ranks]) for name in seen["turns"]}
        net = link(seen["calibrated"])
        idle = turns[NONE]["payload"]  # the barriers' bytes
        for name, turn in turns.items():
            planned = CONTENDERS[name].method(model, 2)
            wire = 8 * planned.size / RATES[rate] if RATES[rate] else 0.0
            found.append(
                {
                    "rate": rate,
                    "name": name,
                    "seconds": turn["seconds"],
                    "payload": turn["payload"] - idle / CONTENDERS[name].steps,
                    "headers": turn["headers"],
                    "ledger": turn["ledger"],
                    "planned": planned.size,
                    "limit": max(turns[NONE]["seconds"], wire),
                    "speedup": turns[DDP]["seconds"] / turn["seconds"],
                    "predicted": prediction(name, planned, net, turns[NONE]["seconds"], free),
                }
            )
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
    base = name.removesuffix(", overlapped")
    coding = max(0.0, free.get(base, free[NONE]) - free[NONE]) * method.interval
    return predict(method, net, compute, coding).step


def tables(found: list[Row], rank: dict[str, Any]) -> str:
    """Return a Markdown table per rate."""
    lines = []
    for rate in dict.fromkeys(row["rate"] for row in found):
        costs = ", ".join(
            f"{name} {1e6 * cost['latency']:.0f} us + {cost['bandwidth'] / 1e9:.3g} Gbit/s"
            for name, cost in rank["rates"][rate]["calibrated"].items()
        )
        lines += ["", f"### {rate}", "", f"Calibrated: {costs}.", ""]
        lines += [HEAD, "|" + "---|" * (HEAD.count(" | ") + 1)]
        here = [row for row in found if row["rate"] == rate]
        lines += [*map(_line, here), *_hidden({row["name"]: row["seconds"] for row in here})]
    return "\n".join(lines[1:])


def _hidden(seconds: dict[str, float]) -> list[str]:
    """Return how much of the communication each overlapped step hides: (serial - it) / (serial - no communication)."""
    lines = []
    for name in (name for name in seconds if name.endswith(", overlapped")):
        serial = seconds.get(name.removesuffix(", overlapped"), seconds[NONE])
        if serial > seconds[NONE]:
            share = (serial - seconds[name]) / (serial - seconds[NONE])
            lines += ["", f"{name}: hides {share:.0%} of its communication."]
    return lines


def _line(row: Row) -> str:
    cells = (
        row["name"],
        f"{row['seconds']:.3f}",
        f"{row['speedup']:.2f}",
        f"{row['limit']:.3f}",
        f"{row['seconds'] / row['limit']:.2f}",
        f"{row['payload'] / 1e6:.3f}",
        f"{row['payload'] / row['planned']:.3f}" if row["planned"] and row["payload"] > 0 else "",
        f"{row['headers'] / 1e3:.1f}",
        f"{row['predicted'] / row['seconds']:.2f}",
    )
    return f"| {' | '.join(cells)} |"


def draw(found: list[Row], ranks: list[dict[str, Any]], path: str) -> None:
    """Write the steps as bars, a panel per rate, and the loss over time if it was measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rates = list(dict.fromkeys(row["rate"] for row in found))
    curves = ranks[0].get("loss", {})
    panels = len(rates) + bool(curves)
    figure, all_axes = plt.subplots(1, panels, figsize=(3.4 * panels + 1.5, 4.6), layout="constrained", squeeze=False)
    for axes, rate in zip(all_axes[0], rates, strict=False):
        here = [row for row in found if row["rate"] == rate][::-1]
        colors = ["C0" if row["name"].startswith("fn") else "0.6" for row in here]
        axes.barh([row["name"] for row in here], [row["seconds"] for row in here], color=colors)
        for place, row in enumerate(here):
            axes.plot([row["limit"]] * 2, [place - 0.4, place + 0.4], color="black", linewidth=1.5)
            axes.plot(row["predicted"], place, "x", color="C3", markersize=4)
        axes.set(title=rate, xlabel="seconds a step")
        axes.tick_params(labelleft=axes is all_axes[0][0])
        axes.grid(axis="x", alpha=0.3)
    all_axes[0][0].plot([], [], color="black", label="limit: computation, bytes / bandwidth")
    all_axes[0][0].plot([], [], "x", color="C3", label="the planner's prediction")
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    for name, curve in curves.items():
        all_axes[0][-1].plot(*zip(*smooth(curve), strict=True), label=name)
    if curves:
        all_axes[0][-1].set(title=f"loss over time, {ranks[0]['loss rate']}", xlabel="seconds", ylabel="nats per byte")
        all_axes[0][-1].legend(fontsize="small")
        all_axes[0][-1].grid(alpha=0.3)
    figure.savefig(path, dpi=130)


def compact(ranks: list[dict[str, Any]], found: list[Row]) -> dict[str, Any]:
    """Return what predictions are made from, and what was measured, without the single turns."""
    rates = {
        rate: {
            "calibrated": seen["calibrated"],
            "seconds": {row["name"]: round(row["seconds"], 5) for row in found if row["rate"] == rate},
        }
        for rate, seen in ranks[0]["rates"].items()
    }
    return {"shapes": ranks[0]["shapes"], "without wire": quiet(ranks), "rates": rates}


def quiet(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Return the steps whose messages went nowhere, of the slower rank."""
    return {name: max(rank["without wire"][name] for rank in ranks) for name in ranks[0]["without wire"]}


def smooth(curve: list[list[float]], width: int = 8) -> list[tuple[float, float]]:
    """Return a running mean of the loss."""
    means = []
    for place, (seconds, _) in enumerate(curve):
        window = [loss for _, loss in curve[max(0, place - width + 1) : place + 1]]
        means.append((seconds, statistics.mean(window)))
    return means
