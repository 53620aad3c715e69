"""`python -m fn plan`: the flags, and what is printed."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fn.planner import calibrate, page, report, scaling, traffic, units
from fn.planner.methods import INTERVAL, LOCAL_STEPS, methods, rows
from fn.planner.network import Cost, Network, network
from fn.planner.predict import Plan, one_topology_each, plan

MEMORY = 1.6e13
"""Bit/s of a current accelerator's memory, of which coding is estimated where nothing is measured."""

INTRA_LATENCY, INTER_LATENCY = 5e-6, 30e-6
"""Seconds a message takes inside a node and between nodes, where no flag says it."""

WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}

EXAMPLE = """example:
  python -m fn plan --params 1.3e9 --world 64 --per-node 8 --intra 900gbit --inter 10gbit --compute 350ms

On a running cluster, which then measures its own links:
  torchrun ... -m fn plan --calibrate --params 1.3e9 --compute 350ms"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "What each method costs on a given network, and whether it pays."
    parser.epilog = EXAMPLE

    def add(flag: str, parse: Callable[[str], Any], metavar: str, text: str, **rest: Any) -> None:
        parser.add_argument(flag, type=_as(parse), metavar=metavar, help=text, **rest)

    add("--params", units.count, "N", "number of parameters, such as 1.3e9", required=True)
    add("--compute", units.seconds, "TIME", "time of a step without communication, such as 350ms", required=True)
    add("--world", units.count, "RANKS", "number of ranks")
    add("--per-node", units.count, "RANKS", "ranks in a node; all of them if --inter is not given")
    add("--intra", units.bits_per_second, "RATE", "each rank's bandwidth inside a node, such as 900gbit")
    add("--inter", units.bits_per_second, "RATE", "each node's bandwidth to the other nodes, such as 10gbit")
    add("--intra-latency", units.seconds, "TIME", "latency of a message inside a node (default: 5us)")
    add("--inter-latency", units.seconds, "TIME", "latency of a message between nodes (default: 30us)")
    add("--memory", units.bits_per_second, "RATE", "bandwidth of the device's memory (default: 2tbyte, or measured)")
    add("--tensors", units.count, "N", "number of parameter tensors (default: 150)", default=150)
    add("--bucket", units.count, "BYTES", "bytes that overlapped methods send together (default: 25 MiB)",
        default=traffic.BUCKET)  # fmt: skip
    add("--interval", units.count, "STEPS", f"steps between 0/1 Adam's synchronisations (default: {INTERVAL})",
        default=INTERVAL)  # fmt: skip
    add("--local-steps", units.count, "STEPS", f"steps of a round of DiLoCo and its family (default: {LOCAL_STEPS})",
        default=LOCAL_STEPS)  # fmt: skip
    add("--rank", units.rank, "R", "rank of factors, such as 4, or 1/4 of the smaller side (default: 4 for "
        "powersgd_adamw, 1/4 for dion)")  # fmt: skip
    add("--density", units.part, "PART", "part of the numbers that ef21_sgdm, demo and sparse_loco send, such as 1/100 "
        "(default: 1/100, 1/128 and 1/32)")  # fmt: skip
    parser.add_argument("--dtype", choices=sorted(WIDTHS), default="fp32", help="of the gradients (default: fp32)")
    parser.add_argument("--calibrate", action="store_true",
        help="measure the running job's links, instead of flags; under torchrun")  # fmt: skip
    parser.add_argument("--all", action="store_true", help="show methods on every topology, not on the fastest only")
    parser.add_argument("--png", metavar="FILE", help="draw the steps as a bar chart")
    parser.add_argument("--json", metavar="FILE", help="write the table's numbers")
    parser.add_argument("--html", metavar="FILE",
        help="write a page with sliders, which plans in a browser; some seconds")  # fmt: skip


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
        if os.environ.get("RANK", "0") == "0" or not arguments.calibrate:  # where the files are written
            report.check_paths(arguments.json, arguments.png, arguments.html)
        if arguments.calibrate and arguments.html:
            wanted = "the page takes one cost for a link, and --calibrate measures one for each collective"
            raise ValueError(f"--html: {wanted}; give the links as flags, or leave --html out")
        if arguments.calibrate:
            with calibrate.job() as job:
                net = _calibrated(arguments, job)
                if job.rank == 0:
                    memory = arguments.memory or calibrate.memory(job.device)
                    _show(arguments, net, memory, calibrate.coding(arguments.params, job.device))
        else:
            _show(arguments, _given(arguments), arguments.memory or MEMORY, lambda net: {})
    except BrokenPipeError:
        raise  # nobody reads any more, which is no fault of the arguments
    except (ValueError, ImportError, OSError) as error:
        parser.error(str(error))


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


def _calibrated(arguments: argparse.Namespace, job: calibrate.Job) -> Network:
    """Return a network of the links that are measured, and of the flags' where this job has none."""
    measured = {"intra": job.per_node > 1, "inter": job.world > job.per_node}
    for name in ("intra", "intra_latency", "inter", "inter_latency"):
        if measured[name[:5]] and getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')}: is measured by --calibrate; leave it out")
    links = calibrate.measure(job)
    if not links:
        raise ValueError("--calibrate: a job of one rank has no links to measure")
    if job.rank == 0:
        print(calibrate.show(links), "", sep="\n")
    between = links.get("node") or (arguments.inter and _inter(arguments))
    inside = links.get("local") or links.get("data") or (_intra(arguments) if arguments.intra else links["node"])
    return network(arguments.world or job.world, arguments.per_node or job.per_node, inside, between)


def _show(
    arguments: argparse.Namespace, net: Network, memory: float, coding: Callable[[Network], Mapping[str, float]]
) -> None:
    model = traffic.model(arguments.params, min(arguments.tensors, arguments.params), WIDTHS[arguments.dtype])
    more = {key: getattr(arguments, key) for key in ("bucket", "interval", "local_steps", "rank", "density")}

    def plan_on(net: Network) -> Plan:
        found = methods(model, net, **more)
        return plan(found, net, arguments.compute, model.params, memory=memory, coding=coding(net))

    made = plan_on(net)
    shown = made if arguments.all else one_topology_each(made)
    title = f"{model.params:,} parameter{'s' * (model.params > 1)}; {report.describe(net)}"
    print(title, "", report.table(shown, net), "", made.verdict, sep="\n")
    if made.pays:
        print(report.about_warm_up(made))
    if net.world > 1:
        print(scaling.sentence(scaling.fastest(plan_on, net), scaling.worlds(net)[-1]))
    if arguments.png:
        report.draw(shown, arguments.png, title)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report.as_json(made), indent=1) + "\n")
    if arguments.html:
        table = rows(arguments.interval, arguments.local_steps, arguments.rank, arguments.density)
        found = page.write(
            table, net, params=model.params, compute=arguments.compute, local_steps=arguments.local_steps,
            memory=memory, tensors=arguments.tensors, width=model.width, bucket=arguments.bucket,
        )  # fmt: skip
        Path(arguments.html).write_text(found, encoding="utf-8")
