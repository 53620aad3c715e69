"""`python -m fn plan`: the flags, and what is printed: a plan as a table, as JSON and as a picture."""

from __future__ import annotations

import argparse
import json
import os
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fn.errors import expected
from fn.planner import calibrate, page, probe, traffic, units
from fn.planner.methods import INTERVAL, LOCAL_STEPS, methods, rows
from fn.planner.network import Cost, Link, Network, leaving, network
from fn.planner.predict import Plan, Prediction, fastest_by_ranks, numbers_of_ranks, one_topology_each, plan, sentence
from fn.planner.units import show_bytes, show_rate, show_seconds

MEMORY = 1.6e13
"""Bit/s of a current accelerator's memory, of which coding is estimated where nothing is measured."""

INTRA_LATENCY, INTER_LATENCY = 5e-6, 30e-6
"""Seconds a message takes inside a node and between nodes, where no flag says it."""

TENSORS = 150

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}

EXAMPLE = """example:
  python -m fn plan --params 1.3e9 --world 64 --per-node 8 --intra 900gbit --inter 10gbit --compute 350ms

On a running cluster, which then measures its own links, and a few steps of a script:
  torchrun ... -m fn plan --calibrate --params 1.3e9 --compute 350ms
  torchrun ... -m fn plan --probe train.py --its --arguments"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "What each method costs on a given network, and whether it pays."
    parser.epilog = EXAMPLE

    def add(flag: str, parse: Callable[[str], Any], metavar: str, text: str, **rest: Any) -> None:
        parser.add_argument(flag, type=_as(parse), metavar=metavar, help=text, **rest)

    add("--params", units.count, "N", "number of parameters, such as 1.3e9")
    add("--compute", units.seconds, "TIME", "time of a step without communication, such as 350ms")
    add("--world", units.count, "RANKS", "number of ranks")
    add("--per-node", units.count, "RANKS", "ranks in a node; all of them if --inter is not given")
    add("--intra", units.bits_per_second, "RATE", "each rank's bandwidth inside a node, such as 900gbit")
    add("--inter", units.bits_per_second, "RATE", "each node's bandwidth to the other nodes, such as 10gbit")
    add("--intra-latency", units.seconds, "TIME", "latency of a message inside a node (default: 5us)")
    add("--inter-latency", units.seconds, "TIME", "latency of a message between nodes (default: 30us)")
    add("--memory", units.bits_per_second, "RATE", "bandwidth of the device's memory (default: 2tbyte, or measured)")
    add("--tensors", units.count, "N", "number of parameter tensors (default: 150)")
    add("--bucket", units.count, "BYTES", "bytes that overlapped methods send together (default: 25 MiB)",
        default=traffic.BUCKET)  # fmt: skip
    add("--interval", units.count, "STEPS", f"steps between 0/1 Adam's synchronisations (default: {INTERVAL})",
        default=INTERVAL)  # fmt: skip
    add("--local-steps", units.count, "STEPS", f"steps of a round of DiLoCo and its family (default: {LOCAL_STEPS})",
        default=LOCAL_STEPS)  # fmt: skip
    add("--rank", units.rank, "R", "rank of factors, such as 4, or 1/4 of the smaller side (default: 4 for "
        "powersgd_adamw, 1/4 for dion)")  # fmt: skip
    add("--density", units.part, "PART", "part of the numbers that methods send which send few of them, such as 1/100 "
        "(default: each method's own, 1/32 for sparse_loco)")  # fmt: skip
    add("--steps", units.count, "N", f"optimizer's steps after which --probe stops (default: {probe.STEPS})",
        default=probe.STEPS)  # fmt: skip
    parser.add_argument("--dtype", choices=sorted(WIDTHS), help="of the gradients (default: fp32)")
    parser.add_argument("--calibrate", action="store_true",
        help="measure the running job's links, instead of flags; under torchrun")  # fmt: skip
    parser.add_argument("--contrib", action="store_true", help="compare the methods of fn.contrib, too")
    parser.add_argument("--all", action="store_true", help="show methods on every topology, not on the fastest only")
    parser.add_argument("--png", metavar="FILE", help="draw the steps as a bar chart")
    parser.add_argument("--json", metavar="FILE", help="write the table's numbers")
    parser.add_argument("--html", metavar="FILE",
        help="write a page with sliders, which plans in a browser")  # fmt: skip
    parser.add_argument("--probe", metavar="SCRIPT", nargs=argparse.REMAINDER,
        help="run a script that trains, with the arguments behind it, for a few steps, and measure these and the "
        "links; the last flag, under torchrun")  # fmt: skip


def _as(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Let argparse print what a parser says."""

    def checked(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Plan and print; with --calibrate on the links that are measured first, and from rank 0 only."""
    try:
        on_all = arguments.calibrate or arguments.probe is not None
        if os.environ.get("RANK", "0") == "0" or not on_all:  # where the files are written
            check_paths(arguments.json, arguments.png, arguments.html)
        if arguments.probe is not None:
            _probe(arguments)
            return
        model, compute = _model(arguments), _compute(arguments)
        if arguments.calibrate:
            with calibrate.join_job() as job:
                links = _measured(arguments, job)
                if job.rank == 0:
                    _show_measured(arguments, model, compute, job, links)
        else:
            _show(arguments, model, compute, _given(arguments), arguments.memory or MEMORY, lambda net: {})
    except BrokenPipeError:
        raise  # nobody reads any more, which is no fault of the arguments
    except (ValueError, ImportError, OSError) as error:
        parser.error(str(error))


def _model(arguments: argparse.Namespace) -> traffic.Model:
    """Return the model of the flags."""
    if arguments.params is None:
        raise ValueError("--params: missing; give the number of parameters, or --probe under torchrun")
    return traffic.model(
        arguments.params, min(arguments.tensors or TENSORS, arguments.params), WIDTHS[arguments.dtype or "fp32"]
    )


def _compute(arguments: argparse.Namespace) -> float:
    if arguments.compute is None:
        raise ValueError("--compute: missing; give the time of a step, or --probe under torchrun")
    seconds: float = arguments.compute
    return seconds


def _probe(arguments: argparse.Namespace) -> None:
    """Run the script behind --probe, and plan for what it needs, on the links that are measured or on those of flags.

    The links are measured behind the script's last step, in its own process group.
    """
    if not arguments.probe:
        raise ValueError("--probe: give a script that trains, then its arguments")
    for name in ("params", "tensors", "dtype"):
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name}: --probe takes it from the script; leave it out")
    alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
    if alone and arguments.world is None:
        cure = "start several by torchrun --nproc-per-node 2 -m fn plan ..., or give --world and --intra or --inter"
        raise ValueError(f"--probe: one rank has no links to measure; {cure}")
    given = _given(arguments) if alone else None
    script = arguments.probe[0]

    def measure(device: torch.device) -> tuple[calibrate.Job, Mapping[str, Link]]:
        if alone:
            return calibrate.Job(0, 1, 1, device), {}
        with calibrate.join_job(device) as job:
            return job, _measured(arguments, job)

    probed, (job, links) = probe.probe(script, arguments.probe[1:], arguments.steps, measure)
    if job.rank == 0:
        print(probe.show(probed, script, arguments.compute))
        _show_measured(arguments, probed.model, arguments.compute or probed.compute, job, links, given)
    if dist.is_initialized():
        dist.destroy_process_group()


def _show_measured(
    arguments: argparse.Namespace, model: traffic.Model, compute: float, job: calibrate.Job,
    links: Mapping[str, Link], given: Network | None = None,
) -> None:  # fmt: skip
    """Print the links, and the plan of a model on them; given: the network, where no link was measured."""
    print(*([calibrate.show(links)] if links else []), "", sep="\n")
    memory = arguments.memory or calibrate.memory(job.device)
    coding = calibrate.coding(model.params, job.device)
    _show(arguments, model, compute, given or _network(arguments, job, links), memory, coding)


def _given(arguments: argparse.Namespace) -> Network:
    """Return the network of the flags: nodes with two kinds of links, one node, or nodes of one rank."""
    if arguments.world is None:
        raise ValueError("--world: missing; give it, or --calibrate under torchrun")
    if arguments.inter is None:
        if arguments.intra is None:
            raise ValueError("--intra: missing; give the bandwidth between ranks, or --calibrate under torchrun")
        if arguments.inter_latency is not None:
            raise ValueError("--inter-latency: is of no use without --inter; give --inter, or --intra-latency")
        return network(arguments.world, arguments.per_node or arguments.world, _intra(arguments))
    inter = _inter(arguments)
    if arguments.intra is None:
        if arguments.per_node not in (None, 1):
            raise ValueError(f"--intra: missing, but a node has {arguments.per_node} ranks")
        if arguments.intra_latency is not None:
            raise ValueError("--intra-latency: is of no use without --intra; give --intra, or --inter-latency")
        return network(arguments.world, 1, inter, inter)
    if arguments.per_node is None:
        raise ValueError("--per-node: missing; --inter is a node's bandwidth, which the ranks of a node share")
    return network(arguments.world, arguments.per_node, _intra(arguments), inter)


def _intra(arguments: argparse.Namespace) -> Cost:
    return Cost(arguments.intra_latency or INTRA_LATENCY, arguments.intra)


def _inter(arguments: argparse.Namespace) -> Cost:
    return Cost(arguments.inter_latency or INTER_LATENCY, arguments.inter)


def _measured(arguments: argparse.Namespace, job: calibrate.Job) -> dict[str, Link]:
    """Return the links of a job, on every rank."""
    measured = {"intra": job.per_node > 1, "inter": job.world > job.per_node}
    for name in ("intra", "intra_latency", "inter", "inter_latency"):
        if measured[name[:5]] and getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')}: is measured by --calibrate; leave it out")
    links = calibrate.measure(job)
    if not links:
        raise ValueError("--calibrate: a job of one rank has no links to measure")
    return links


def _network(arguments: argparse.Namespace, job: calibrate.Job, links: Mapping[str, Link]) -> Network:
    """Return a network of the links that are measured, and of the flags' where this job has none."""
    between = links.get("node") or (arguments.inter and _inter(arguments))
    inside = links.get("local") or links.get("data") or (_intra(arguments) if arguments.intra else links["node"])
    return network(arguments.world or job.world, arguments.per_node or job.per_node, inside, between)


def _show(
    arguments: argparse.Namespace, model: traffic.Model, compute: float, net: Network, memory: float,
    coding: Callable[[Network], Mapping[str, float]],
) -> None:  # fmt: skip
    more = {key: getattr(arguments, key) for key in ("bucket", "interval", "local_steps", "rank", "density", "contrib")}

    def plan_on(net: Network) -> Plan:
        compared = methods(model, net, **more)
        return plan(compared, net, compute, model.params, memory=memory, coding=coding(net))

    made = plan_on(net)
    shown = made if arguments.all else one_topology_each(made)
    title = f"{model.params:,} parameter{'s' * (model.params > 1)}; {describe_network(net)}"
    print(title, "", as_table(shown, net), "", made.verdict, sep="\n")
    if made.pays:
        print(about_warm_up(made))
    if net.world > 1:
        print(sentence(fastest_by_ranks(plan_on, net), numbers_of_ranks(net)[-1]))
    if arguments.png:
        draw(shown, arguments.png, title)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(as_json(made), indent=1) + "\n")
    if arguments.html:
        # What has an interval above 1 and trains alone in between follows the slider of rounds, even from 1 on.
        given = arguments.interval, max(2, arguments.local_steps), arguments.rank, arguments.density
        table = rows(*given, contrib=arguments.contrib)
        tensors = model.tensors if arguments.params is None else arguments.tensors or TENSORS
        html = page.write(
            table, net, model=model, tensors=tensors, compute=compute, local_steps=arguments.local_steps,
            memory=memory, bucket=arguments.bucket, coding=coding,
        )  # fmt: skip
        Path(arguments.html).write_text(html, encoding="utf-8")


TIMES = ("communication", "not hidden", "coding", "step", "x adamw")
HEAD = ("method", "topology", "rank sends", "inside a node", "node sends", "messages", *TIMES)


def describe_network(net: Network) -> str:
    """Return a line about a network."""
    if net.world == 1:
        return "1 rank, which has nobody to talk to"
    ranks = f"{net.world:,} ranks in {net.nodes:,} nodes of {net.per_node}" if net.nodes > 1 else f"{net.world} ranks"
    links = {"inside a node" if net.nodes > 1 else "between ranks": net.intra} if net.per_node > 1 else {}
    if net.nodes > 1:
        links["between nodes"] = net.inter
    costs = {where: link.cost for where, link in links.items()}
    texts = [f"{show_rate(cost.bandwidth)}, {show_seconds(cost.latency)} {where}" for where, cost in costs.items()]
    return f"{ranks}; {'; '.join(texts)}"


def as_table(plan: Plan, net: Network) -> str:
    """Return one line a prediction, the fastest first. Bytes and messages are of a step, in the mean."""
    base = plan.of("adamw").step
    rows = [HEAD, *(_row(prediction, base, net) for prediction in plan.predictions)]
    left_out = (3, 4) if net.nodes == 1 else (2,) if net.per_node > 1 else (2, 3)
    rows = [tuple(cell for place, cell in enumerate(row) if place not in left_out) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join([lines[0], "  ".join("-" * w for w in widths), *lines[1:], *([_COLUMNS] if net.nodes > 1 else [])])


_COLUMNS = """
Bytes and messages are of one step; of methods that exchange in few steps they are the mean. "inside a node" is what a
rank sends to others of its node, "node sends" what all ranks of a node send to other nodes."""


def _row(prediction: Prediction, base: float, net: Network) -> tuple[str, ...]:
    method = prediction.method
    out = sum(leaving(message, net) / steps for message, steps in method.sent)
    times = (prediction.communication, prediction.exposed, prediction.coding, prediction.step)
    return (
        method.title,
        method.topology,
        show_bytes(method.size),
        show_bytes(method.size - out / net.per_node),
        show_bytes(out),
        f"{sum(1 / steps for _, steps in method.sent):.3g}",
        *map(show_seconds, times),
        f"{base / prediction.step:.2f}",
    )


WARM_UP = 0.2
"""The part of a run that is taken for 1-bit Adam's warm-up."""


def about_warm_up(plan: Plan) -> str:
    """Say what 1-bit Adam's warm-up leaves of its gain, exact or in 8 bits: the table is of later steps."""
    base, in_bytes, after = (plan.of(name).step for name in ("adamw", "onebit_adam, int8", "onebit_adam"))

    def over_the_run(warm_up: float) -> str:
        return f"{base / (WARM_UP * warm_up + (1 - WARM_UP) * after):.2f}x"

    return (
        f"Steps are those after a warm-up, in which 1-bit methods send what adamw sends: onebit_adam is "
        f"{base / after:.2f}x as fast as adamw after it, {over_the_run(base)} over a run that it is "
        f"{100 * WARM_UP:.0f} % of, and {over_the_run(in_bytes)} with warmup=fn.int8()."
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """Return the plan's numbers: bytes, and seconds."""
    rows = [
        {
            "method": p.method.name,
            "alike": p.method.alike,
            "topology": p.method.topology,
            "bytes": p.method.size,
            "messages": sum(1 / steps for _, steps in p.method.sent),
            "communication": p.communication,
            "exposed": p.exposed,
            "coding": p.coding,
            "step": p.step,
            "limit": p.limit,
        }
        for p in plan.predictions
    ]
    return {"pays": plan.pays, "verdict": plan.verdict, "predictions": rows}


def check_paths(json_: str | None, png: str | None, html: str | None = None) -> None:
    """Refuse files that could not be written, before there is anything to write.

    Raises: OSError or ValueError that names the flag; ImportError if a picture is wanted and matplotlib not installed.
    """
    for flag, name in (("--json", json_), ("--png", png), ("--html", html)):
        if name is None:
            continue
        path = Path(name)
        if path.is_dir():
            raise IsADirectoryError(f"{flag}: {str(name)!r}: Is a directory")
        if not path.parent.is_dir():
            raise FileNotFoundError(f"{flag}: {str(name)!r}: No such file or directory")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise PermissionError(f"{flag}: {str(name)!r}: Permission denied")
    if png is not None:
        _matplotlib()
        from matplotlib.backend_bases import FigureCanvasBase

        known = FigureCanvasBase.get_supported_filetypes()
        if Path(png).suffix[1:].lower() not in known:
            raise ValueError(expected("--png", f"a name that ends in {', '.join(known)}", f"{str(png)!r}"))


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("--png needs matplotlib: pip install matplotlib") from error
    return matplotlib


BARS = ("compute", "computation", "0.75"), ("coding", "coding", "C1"), ("exposed", "communication, not hidden", "C3")
"""What a step consists of in the picture: a field of `Prediction`, its text, its colour."""


def draw(plan: Plan, path: str | Path, title: str = "") -> None:
    """Write the steps as bars of computation, coding and exposed communication to a PNG.

    Raises: ImportError if matplotlib is not installed.
    """
    _matplotlib().use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(10, 1.2 + 0.3 * len(plan.predictions)), layout="constrained")
    slowest_first = plan.predictions[::-1]
    names = [f"{p.method.title} ({p.method.topology})" for p in slowest_first]
    left = [0.0] * len(names)
    for field, text, color in BARS:
        values = [getattr(p, field) for p in slowest_first]
        axes.barh(names, values, left=left, label=text, color=color)
        left = [a + b for a, b in zip(left, values, strict=True)]
    figure.suptitle(textwrap.fill(title, 130), fontsize="medium")
    axes.set(xlabel="seconds a step, predicted")
    axes.margins(y=0.02)
    axes.legend(loc="upper right")  # the fastest are at the top, and short
    axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=150)
    plt.close(figure)
