"""`python -m fn plan`: the flags, and what is printed or written: a plan as a table, as JSON and as a page."""

from __future__ import annotations

import argparse
import errno
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fn.planner import traffic, units
from fn.planner.efficiency import NCCL, over_tcp, share_of_buckets, share_words, transports
from fn.planner.evidence import show_parts
from fn.planner.gpt import gpt
from fn.planner.methods import INTERVAL, LOCAL_STEPS, methods, rows
from fn.planner.network import Cost, Link, Network, leaving, network
from fn.planner.predict import Plan, Prediction, Rates, efficiency_of_buckets, one_topology_each, plan
from fn.planner.recommend import EXACT_MUON, PICKS, Candidate, Recommendation, candidate, recommend
from fn.planner.units import show_bytes, show_rate, show_seconds
from fn.tools import calibrate, page, probe, trials

MEMORY = 1.6e13
"""Bit/s of a current accelerator's memory, from which coding is estimated where nothing is measured."""

INTRA_LATENCY, INTER_LATENCY = 5e-6, 30e-6
"""Seconds a message takes inside a node and between nodes, where no flag says it."""


WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2}

LINE = "python -m fn plan --params 1.3e9 --world 64 --per-node 8 --intra 900gbit --inter 10gbit --compute 350ms"

EXAMPLE = f"""example:
  {LINE}

On a running cluster, which then measures its own links, and a few steps of a script:
  torchrun ... -m fn plan --calibrate --params 1.3e9 --compute 350ms
  torchrun ... -m fn plan --probe train.py --its --arguments"""


FLAGS: tuple[tuple[str, Callable[[str], Any], str, Any, str], ...] = (
    ("--params", units.count, "N", None, "number of parameters, such as 1.3e9"),
    ("--compute", units.seconds, "TIME", None, "time of a step without communication, such as 350ms"),
    ("--world", units.count, "RANKS", None, "number of ranks"),
    ("--per-node", units.count, "RANKS", None, "ranks in a node; all of them if --inter is not given"),
    ("--intra", units.bits_per_second, "RATE", None, "each rank's bandwidth inside a node, such as 900gbit"),
    ("--inter", units.bits_per_second, "RATE", None, "each node's bandwidth to the other nodes, such as 10gbit"),
    ("--intra-latency", units.seconds, "TIME", None, "latency of a message inside a node (default: 5us)"),
    ("--inter-latency", units.seconds, "TIME", None, "latency of a message between nodes (default: 30us)"),
    ("--whole-efficiency", units.part, "PART", None, "part of the bandwidth between nodes that whole messages reach "
     "(default: as published for --transport over TCP at this speed, or measured; over RDMA give your own)"),
    ("--bucket-efficiency", units.part, "PART", None, "the same of messages in buckets, as DDP's (default: their "
     "published share of --whole-efficiency, or measured by --probe)"),
    ("--memory", units.bits_per_second, "RATE", None, "the device's memory bandwidth (default: 2tbyte, or measured)"),
    ("--tensors", units.count, "N", None, "number of parameter tensors, equal squares, in place of a GPT's"),
    ("--hidden-share", units.share, "PART", None, "part of the parameters in hidden matrices, whose messages are "
     "Muon's; the others are AdamW's (default: that of a GPT of this size; --probe counts it)"),
    ("--bucket", units.count, "BYTES", traffic.BUCKET, "bytes that overlapped methods send together (default: 25 MiB)"),
    ("--interval", units.count, "STEPS", INTERVAL, f"steps between 0/1 Adam's synchronisations (default: {INTERVAL})"),
    ("--local-steps", units.count, "STEPS", LOCAL_STEPS, f"steps of a round of DiLoCo (default: {LOCAL_STEPS})"),
    ("--steps-ratio", units.ratio, "RATIO", None, "steps of every pick over AdamW's to the same loss, in place of what "
     "is published for this size"),
    ("--rank", units.rank, "R", None, "rank of factors, or its part of the smaller side (default: 4, and 1/4 of dion)"),
    ("--density", units.part, "PART", None, "part of the numbers that sparse methods send (default: each one's own)"),
    ("--steps", units.count, "N", probe.STEPS, f"optimizer's steps after which --probe stops (default: {probe.STEPS})"),
)  # fmt: skip
"""Flag, parser, what its value is called, default, and help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = "What to take on a given network, what each method costs there, and whether it pays."
    parser.epilog = EXAMPLE
    for flag, parse, metavar, default, text in FLAGS:
        parser.add_argument(flag, type=_as(parse), metavar=metavar, default=default, help=text)
    parser.add_argument("--dtype", choices=sorted(WIDTHS), help="of the gradients (default: fp32)")
    parser.add_argument("--transport", choices=transports(),
        help=f"what sends over TCP between nodes, of which published parts are reached (default: {NCCL})")  # fmt: skip
    parser.add_argument("--calibrate", action="store_true",
        help="measure the running job's links, instead of flags; under torchrun")  # fmt: skip
    parser.add_argument("--all", action="store_true", help="show every core method, on every topology")
    parser.add_argument("--contrib", action="store_true", help="show every method, those of fn.contrib, too")
    parser.add_argument("--json", metavar="FILE", help="write all numbers, and what to take")
    parser.add_argument("--html", metavar="FILE", help="write a page with sliders, which plans in a browser")
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
            check_paths(arguments.json, arguments.html)
        if arguments.probe is not None:
            _probe(arguments)
            return
        model, compute = _model(arguments), _required(arguments, "compute", "the time of a step")
        if arguments.calibrate:
            with calibrate.join_job() as job:
                links = _measured(arguments, job)
                if job.rank == 0:
                    _show_measured(arguments, model, compute, job, links)
        else:
            _show(arguments, model, compute, _given(arguments), Rates(arguments.memory or MEMORY))
    except (ValueError, ImportError, OSError) as error:
        parser.error(str(error))


def _model(arguments: argparse.Namespace) -> traffic.Model:
    """Return the model of the flags."""
    return _sized(arguments, _required(arguments, "params", "the number of parameters"))


def _sized(arguments: argparse.Namespace, params: int, width: int | None = None) -> traffic.Model:
    """Return the model of so many parameters that the flags say. Args: width: None is that of --dtype."""
    tensors = arguments.tensors and min(arguments.tensors, params)
    return traffic.model(params, tensors, width or WIDTHS[arguments.dtype or "fp32"], arguments.hidden_share)


def _assumed(arguments: argparse.Namespace, model: traffic.Model) -> str:
    """Return what is said of a model that is known by its number of parameters alone."""
    found, given = gpt(model.params, arguments.hidden_share), arguments.hidden_share is not None
    shapes = f"{found}" if arguments.tensors is None else f"{arguments.tensors:,} about equal squares"
    like = f", as of {found}" if arguments.tensors is not None and not given else ""
    cure = "as --hidden-share says" if given else "--hidden-share gives your own"
    return f"assumed: {shapes}; {100 * found.share:.3g} % of the parameters in hidden matrices{like}; {cure}"


def _required(arguments: argparse.Namespace, name: str, what: str) -> Any:
    if getattr(arguments, name) is None:
        raise ValueError(f"--{name}: missing; give {what}, or --probe under torchrun")
    return getattr(arguments, name)


def _probe(arguments: argparse.Namespace) -> None:
    """Run the script behind --probe, and plan for what it needs, on the links that are measured or on those of flags.

    The links are measured behind the script's last step, in its own process group.
    """
    if not arguments.probe:
        raise ValueError("--probe: give a script that trains, then its arguments")
    _refuse(arguments, ("params", "tensors", "dtype", "hidden_share"), "--probe takes it from the script; leave it out")
    alone = int(os.environ.get("WORLD_SIZE", 1)) == 1
    if alone and arguments.world is None:
        cure = "start several by torchrun --nproc-per-node 2 -m fn plan ..., or give --world and --intra or --inter"
        raise ValueError(f"--probe: one rank has no links to measure; {cure}")
    given = _given(arguments) if alone else None
    script = arguments.probe[0]

    def measure(
        probed: probe.Probed, params: Sequence[torch.Tensor]
    ) -> tuple[calibrate.Job, Mapping[str, Link], trials.Trials]:
        compute = arguments.compute or probed.compute
        if alone:
            job = calibrate.Job(0, 1, 1, probed.device)
            return job, {}, trials.tries(params, compute, arguments.local_steps)
        with calibrate.join_job(probed.device) as job:
            links = _measured(arguments, job)
            if (arguments.world or job.world, arguments.per_node or job.per_node) != (job.world, job.per_node):
                return job, links, trials.none("the plan is for other ranks than this job's")
            return job, links, trials.tries(params, compute, arguments.local_steps)

    probed, (job, links, tried) = probe.probe(script, arguments.probe[1:], arguments.steps, measure)
    if job.rank == 0:
        compute = arguments.compute or probed.compute
        print(probe.show(probed, script, arguments.compute))
        if probed.alone and links and arguments.bucket_efficiency is None:
            axis = next(iter(links))  # the slowest
            part = efficiency_of_buckets(
                probed.model, _network(arguments, job, links, own=True), compute, probed.step, arguments.bucket
            )
            efficiency = links[axis].efficiency.with_buckets(part, "measured, buckets in a step of the script")
            links = {**links, axis: links[axis]._replace(efficiency=efficiency)}
            print(f"  messages in buckets: {100 * part:.0f} % of the bandwidth of whole ones, as that step says")
        _show_measured(arguments, probed.model, compute, job, links, given, tried)
    if dist.is_initialized():
        dist.destroy_process_group()


def _show_measured(
    arguments: argparse.Namespace, model: traffic.Model, compute: float, job: calibrate.Job,
    links: Mapping[str, Link], given: Network | None = None, tried: trials.Trials | None = None,
) -> None:  # fmt: skip
    """Print the links, and the plan of a model on them; given: the network, where no link was measured."""
    print(*([calibrate.show(links)] if links else []), "", sep="\n")
    memory = arguments.memory or calibrate.memory(job.device)
    rates = Rates(
        memory, calibrate.coding(model.params, job.device), calibrate.call(job.device), calibrate.flops(job.device)
    )
    _show(arguments, model, compute, given or _network(arguments, job, links), rates, tried)


def _given(arguments: argparse.Namespace) -> Network:
    """Return the network of the flags: nodes with two kinds of links, one node, or nodes of one rank."""
    if arguments.world is None:
        raise ValueError("--world: missing; give it, or --calibrate under torchrun")
    if arguments.inter is None:
        if arguments.intra is None:
            raise ValueError("--intra: missing; give the bandwidth between ranks, or --calibrate under torchrun")
        _refuse(arguments, BETWEEN, "is of no use without --inter; give --inter, or leave it out")
        return network(arguments.world, arguments.per_node or arguments.world, _intra(arguments))
    if arguments.intra is None:
        if arguments.per_node not in (None, 1):
            raise ValueError(f"--intra: missing, but a node has {arguments.per_node} ranks")
        _refuse(arguments, ("intra_latency",), "is of no use without --intra; give --intra, or --inter-latency")
        return network(arguments.world, 1, _inter(arguments).cost, _inter(arguments))
    if arguments.per_node is None:
        raise ValueError("--per-node: missing; --inter is a node's bandwidth, which the ranks of a node share")
    return network(arguments.world, arguments.per_node, _intra(arguments), _inter(arguments))


BETWEEN = ("inter_latency", "transport", "bucket_efficiency", "whole_efficiency")
"""Flags of the links between nodes."""


def _refuse(arguments: argparse.Namespace, names: Iterable[str], why: str) -> None:
    for name in names:
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name.replace('_', '-')}: {why}")


def _intra(arguments: argparse.Namespace) -> Link:
    return Link(Cost(arguments.intra_latency or INTRA_LATENCY, arguments.intra))


def _inter(arguments: argparse.Namespace) -> Link:
    efficiency = over_tcp(
        arguments.transport or NCCL, whole=arguments.whole_efficiency, buckets=arguments.bucket_efficiency
    )
    return Link(Cost(arguments.inter_latency or INTER_LATENCY, arguments.inter), efficiency=efficiency)


def _measured(arguments: argparse.Namespace, job: calibrate.Job) -> dict[str, Link]:
    """Return the links of a job, on every rank. Whole messages measure them, which reach all of what is measured."""
    why = "is measured by --calibrate; leave it out"
    if job.per_node > 1:
        _refuse(arguments, ("intra", "intra_latency"), why)
    if job.world > job.per_node:
        _refuse(arguments, ("inter", "inter_latency", "transport", "whole_efficiency"), why)
    elif arguments.inter is None:
        _refuse(arguments, BETWEEN, "is of no use without --inter; leave it out")
    links = calibrate.measure(job)
    if not links:
        raise ValueError("--calibrate: a job of one rank has no links to measure")
    if "node" in links:
        part, how = arguments.bucket_efficiency, "--bucket-efficiency"
        if part is None:
            part, how = share_of_buckets(), share_words()
        efficiency = links["node"].efficiency.with_buckets(part, f"measured; {how}")
        links["node"] = links["node"]._replace(efficiency=efficiency)
    return links


def _network(
    arguments: argparse.Namespace, job: calibrate.Job, links: Mapping[str, Link], own: bool = False
) -> Network:
    """Return a network of the links that are measured, and of the flags' where this job has none; own: the job's."""
    between = links.get("node") or (arguments.inter and _inter(arguments))
    inside = links.get("local") or links.get("data") or (_intra(arguments) if arguments.intra else links["node"])
    world, per_node = (None, None) if own else (arguments.world, arguments.per_node)
    return network(world or job.world, per_node or job.per_node, inside, between)


def _show(
    arguments: argparse.Namespace, model: traffic.Model, compute: float, net: Network, rates: Rates,
    tried: trials.Trials | None = None,
) -> None:  # fmt: skip
    options = {key: getattr(arguments, key) for key in ("interval", "local_steps", "rank", "density", "contrib")}
    compared = methods(model, net, bucket=arguments.bucket, **options)
    planned = partial(
        plan, compared, net, compute, model.params, memory=rates.memory, coding=rates.coding(net), rates=rates
    )
    made = planned()
    if tried is not None:
        print(trials.show(tried, made), "", sep="\n")
        own, steps = trials.measured(tried, compute)
        made = planned(own=own, steps=steps)
    shown, advice = made if arguments.all else one_topology_each(made), recommend(made, arguments.steps_ratio)

    def said_of(each: traffic.Model) -> str:
        return PROBED if arguments.params is None and each is model else _assumed(arguments, each)

    if arguments.json:  # files first: behind `| head` nobody may read on
        found = as_json(made, advice) | {"hidden_share": model.hidden_share}
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n")
    if arguments.html:
        # What has an interval above 1 and trains alone in between follows the slider of rounds, even from 1 on.
        table = rows(**{**options, "local_steps": max(2, arguments.local_steps)})
        html = page.write(
            table, net, model=model, sizes=partial(_sized, arguments, width=model.width), assumed=said_of,
            compute=compute, local_steps=arguments.local_steps, rates=rates, bucket=arguments.bucket,
            steps_ratio=arguments.steps_ratio, opens=made if tried else None,
        )  # fmt: skip
        Path(arguments.html).write_text(html, encoding="utf-8")
    title = f"{model.params:,} parameter{'s' * (model.params > 1)}; {describe_network(net)}"
    print(*advice.lines, "", title, said_of(model), *about_links(net), "", table_of_picks(made, advice), "", sep="\n")
    if arguments.all or arguments.contrib:
        print(as_table(shown, net), "", sep="\n")
    print(advice.why)


PROBED = "shapes and labels: those of the script"

TIMES = ("communication", "not hidden", "coding", "own", "step", "x adamw", "same loss in")
HEAD = ("method", "topology", "rank sends", "inside a node", "node sends", "messages", *TIMES)


def describe_network(net: Network) -> str:
    """Return a line about a network."""
    if net.world == 1:
        return "1 rank, which has nobody to talk to"
    several = net.nodes > 1
    ranks = f"{net.world:,} ranks in {net.nodes:,} nodes of {net.per_node}" if several else f"{net.world} ranks"
    inside = [(net.intra, "inside a node" if several else "between ranks")] if net.per_node > 1 else []
    links = [*inside, *([(net.inter, "between nodes")] if several else [])]
    costs = [f"{show_rate(link.cost.bandwidth)}, {show_seconds(link.cost.latency)} {where}" for link, where in links]
    return "; ".join([ranks, *costs])


def about_links(net: Network) -> list[str]:
    """Return a line about the part of the links between nodes that is reached; none where there is one node."""
    return [net.inter.efficiency.words(net.inter.cost.bandwidth)] if net.nodes > 1 else []


def table_of_picks(plan: Plan, advice: Recommendation) -> str:
    """Return one line a pick, in the order of all pages, below AdamW and exact Muon, and what is known of each."""
    rows = [("take", "when", "step", "steps to the same loss", "time to the same loss", "evidence")]
    rows.append(("adamw", "nothing pays: DDP as it is", _step(plan.base), "100 %", "100 %", ""))
    known = []
    for pick, c in zip((EXACT_MUON, *PICKS), (advice.exact, *advice.picks), strict=True):
        name = f"{c.name}, DDP" if pick is EXACT_MUON else c.label
        steps, time = (show_parts(x) if x else "" for x in (c.evidence.steps, c.time))
        rows.append((name, pick.when, _step(c.prediction), steps, time, c.evidence.grade))
        known.append(f"{name}: {c.evidence.words}")
    lines = [*_columns(rows), "", *known, ABOUT]
    two_level = any(c.prediction.method.topology != "flat" for c in advice.picks)
    return "\n".join([*lines, TWO_LEVEL] if two_level else lines)


def _step(prediction: Prediction) -> str:
    return f"{show_seconds(prediction.step)}{', measured' * prediction.measured}"


ABOUT = """
Steps are over AdamW's to the same loss; docs/choosing.md explains each number. --steps-ratio gives your own.
"python -m fn" shows the code of each pick, --all every method, --contrib those of fn.contrib, too."""

TWO_LEVEL = 'Two-level: exact means inside a node, codes between nodes: axis=("local", "node"), see docs/choosing.md.'


def as_table(plan: Plan, net: Network) -> str:
    """Return one line a prediction, the fastest first. Bytes and messages are of a step, in the mean."""
    left_out = (3, 4) if net.nodes == 1 else (2,) if net.per_node > 1 else (2, 3)
    rows = [HEAD, *(_row(prediction, plan, net) for prediction in plan.predictions)]
    kept = [tuple(cell for place, cell in enumerate(row) if place not in left_out) for row in rows]
    return "\n".join([*_columns(kept), _ALIKE, *([_NODES] if net.nodes > 1 else [])])


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Return lines of columns, the first two to the left, and a rule below the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows = [rows[0], tuple("-" * width for width in widths), *rows[1:]]
    pairs = (enumerate(zip(row, widths, strict=True)) for row in rows)
    return ["  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in row).rstrip() for row in pairs]


_ALIKE = """
Methods in one row send the same. "same loss in" is the time to AdamW's loss over AdamW's own, of the first of them."""

_NODES = """
Bytes and messages are of one step; of methods that exchange in few steps they are the mean. "inside a node" is what a
rank sends to others of its node, "node sends" what all ranks of a node send to other nodes."""


def _row(prediction: Prediction, plan: Plan, net: Network) -> tuple[str, ...]:
    method, compared = prediction.method, candidate(prediction.method.name, prediction, plan)
    out = sum(leaving(message, net) / steps for message, steps in method.sent)
    times = (prediction.communication, prediction.exposed, prediction.coding, prediction.own, prediction.step)
    return (
        method.title,
        method.topology,
        show_bytes(method.size),
        show_bytes(method.size - out / net.per_node),
        show_bytes(out),
        f"{sum(1 / steps for _, steps in method.sent):.3g}",
        *map(show_seconds, times),
        f"{plan.base.step / prediction.step:.2f}",
        show_parts(compared.time[:1]) if compared.time else "",
    )


def as_json(plan: Plan, advice: Recommendation) -> dict[str, Any]:
    """Return the plan's numbers: bytes, and seconds; and what is said of them."""
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
            "own": p.own,
            "step": p.step,
            "predicted": p.predicted,
            "limit": p.limit,
        }
        for p in plan.predictions
    ]
    recommendation = {
        "take": advice.take and advice.take.name, "topology": advice.take and advice.take.prediction.method.topology,
        "lines": advice.lines, "picks": [*map(_as_json, advice.picks)], "exact": _as_json(advice.exact),
    }  # fmt: skip
    return {
        "pays": advice.take is not None, "verdict": advice.why, "predictions": rows, "recommendation": recommendation,
        "links": _links_as_json(plan.net),
    }  # fmt: skip


def _links_as_json(net: Network) -> dict[str, Any] | None:
    """Return the part of the links between nodes that is reached; None where there is one node."""
    if net.nodes == 1:
        return None
    link, speed = net.inter.efficiency, net.inter.cost.bandwidth
    whole, buckets = link.at(speed)
    return {"bits_per_second": speed, "whole": whole, "buckets": buckets, "words": link.words(speed)}


def _as_json(c: Candidate) -> dict[str, Any]:
    known = c.evidence
    return {
        "name": c.name, "topology": c.prediction.method.topology, "step": c.prediction.step, "share": c.share,
        "steps": known.steps, "time": c.time, "grade": known.grade, "sources": known.sources, "own": known.own,
        "gap": known.gap and dict(zip(("nats", "part"), known.gap, strict=True)), "words": known.words,
    }  # fmt: skip


def check_paths(json_: str | None, html: str | None) -> None:
    """Refuse files that could not be written, before there is anything to write.

    Raises: OSError that names the flag.
    """
    for flag, name in (("--json", json_), ("--html", html)):
        if name is not None:
            path = Path(name)
            writable = os.access(path if path.exists() else path.parent, os.W_OK)
            problems = {errno.EISDIR: path.is_dir(), errno.ENOENT: not path.parent.is_dir(), errno.EACCES: not writable}
            if any(problems.values()):
                problem = next(number for number, there in problems.items() if there)
                raise OSError(f"{flag}: {name!r}: {os.strerror(problem)}")
