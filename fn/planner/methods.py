"""The methods that the planner compares: what each sends in a step, when it may start, what it costs locally."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from fn.collectives.codecs.ballots import ballots
from fn.collectives.codecs.bins import bins
from fn.collectives.codecs.codec import Codec, identity
from fn.collectives.codecs.integer import int4, int8
from fn.collectives.codecs.sign import sign
from fn.collectives.codecs.top_k import top_k
from fn.planner import traffic
from fn.planner.network import Message, Network
from fn.planner.traffic import Model
from fn.transforms.bases import tiles
from fn.transforms.cosines import dct

Sends = Callable[[Model], list[Message]]

INTERVAL = 16
"""Steps of 0/1 Adam between two that synchronise, once the interval has grown to its default limit."""


LOCAL_STEPS = 100
"""Steps of a round of DiLoCo's family. With a delay, a quarter of them go on while a mean travels."""

EXCHANGE = 44.0
"""Bytes per parameter of an exchange: anchor and params are read for the difference, which is written, then mean,
momentum and anchor are read and written, params written."""


class Method(NamedTuple):
    """How a step communicates.

    name, topology: "flat" runs over all ranks; "two-level" averages exactly inside the nodes, where each rank keeps
        a shard, and runs the method on the shards between the nodes.
    compressed: it is one of the methods whose paying is the question.
    parts: (fraction of the gradients, messages) in the order in which gradients become ready.
    overlapped: a part's messages may leave while the backward pass goes on.
    passes: bytes of device memory that are read and written per parameter, on top of an exact optimizer's.
    interval: it communicates in one of so many steps.
    ours: fn has it; the others are there to compare.
    local: ranks train alone in between, which changes what is learned. delay: steps that go on while messages travel.
    """

    name: str
    topology: str
    compressed: bool
    parts: tuple[tuple[float, tuple[Message, ...]], ...]
    overlapped: bool
    passes: float = 0.0
    interval: int = 1
    ours: bool = True
    local: bool = False
    delay: int = 0

    @property
    def messages(self) -> list[Message]:
        """Return all messages of a step that communicates."""
        return [message for _, part in self.parts for message in part]

    @property
    def size(self) -> float:
        """Return the bytes that a rank sends per step, in the mean over an interval."""
        return sum(message.size for message in self.messages) / self.interval


def kept_of_demo(n: int) -> Codec:
    """Return what `fn.demo` sends by default of a chunk of n cosines."""
    return top_k(min(32, n), n)


def kept_of_sparse_loco(n: int) -> Codec:
    """Return what `fn.sparse_loco` sends by default of a chunk of n differences."""
    return top_k(max(1, round(n / 32)), n, values=bins(4, 6))


def label(name: str, topology: str) -> str:
    """Return what a method on a topology is called in a sentence."""
    return name if topology == "flat" else f"{name} ({topology})"


def methods(
    model: Model,
    net: Network,
    *,
    bucket: int = traffic.BUCKET,
    interval: int = INTERVAL,
    local_steps: int = LOCAL_STEPS,
) -> list[Method]:
    """Return all methods on all topologies that the network has.

    Args: bucket: bytes of gradients in a part of an overlapped method. interval: of 0/1 Adam. local_steps: of a round.
    """
    found = _flat(model, net.world, bucket, interval) + _rounds(model, net.world, local_steps)
    if net.nodes > 1 and net.per_node > 1:
        found += _two_level(model, net, bucket, interval)
    return [method for method in found if model.width > 2 or method.name != "bf16 gradients"]


def _flat(model: Model, ranks: int, bucket: int, interval: int) -> list[Method]:
    exact, top, basis = (partial(f, ranks=ranks) for f in (traffic.exact, traffic.codes, traffic.in_basis))
    signs = partial(traffic.codes, ranks=ranks, codec=sign())
    direct, direct_passes = partial(signs, servers=False), passes_without_servers(ranks)
    loco = partial(traffic.sharded, ranks=ranks, codec=int4(), gather=identity())
    made = partial(_method, model, "flat", bucket)
    whole = []  # of a whole tensor the largest are sought: torch cannot count those of larger ones
    if max(model.lengths) < 2**31:
        send = partial(top, codec=top_k(0.01), servers=False)
        whole = [made("ef21_sgdm", send, overlapped=False, passes=80)]
    return [
        made("adamw", exact, compressed=False),
        made("bf16 gradients", partial(exact, width=2), compressed=False, passes=12),
        made("PowerSGD 1", partial(traffic.power_sgd, ranks=ranks, rank=1), passes=48, ours=False),
        made("PowerSGD 2", partial(traffic.power_sgd, ranks=ranks, rank=2), passes=48, ours=False),
        made(
            "1-bit, tensor by tensor",
            partial(traffic.textbook_onebit, ranks=ranks),
            overlapped=False,
            passes=200,
            ours=False,
        ),
        made("onebit_adam", signs, overlapped=False, passes=32),
        made("onebit_adam, overlapped", signs, passes=32),
        made("onebit_adam, servers=False", direct, overlapped=False, passes=direct_passes),
        made("onebit_adam, servers=False, overlapped", direct, passes=direct_passes),
        made("onebit_lamb", partial(signs, layout="fused"), overlapped=False, passes=40),
        made("zero_one_adam", signs, overlapped=False, passes=32, interval=interval),
        made("zero_one_adam, servers=False", direct, overlapped=False, passes=direct_passes, interval=interval),
        made("powersgd_adamw, rank 4", partial(traffic.low_rank, ranks=ranks, rank=4), overlapped=False, passes=60),
        made("lion_vote", partial(traffic.codes, ranks=ranks, codec=ballots()), overlapped=False, passes=24),
        made("demo", partial(basis, basis=dct(64), codec_of=kept_of_demo), overlapped=False, passes=120),
        *whole,
        made("loco_adamw, int4", loco, overlapped=False, passes=28),
        made("onebit_adam, int8", partial(traffic.codes, ranks=ranks, codec=int8()), overlapped=False, passes=36),
    ]


def _rounds(model: Model, ranks: int, local_steps: int) -> list[Method]:
    """Return the methods of local steps. What they send are differences in float32, whatever the gradients are."""
    whole = model._replace(width=4)
    codes, late = partial(traffic.codes, ranks=ranks), local_steps // 4
    largest = partial(traffic.in_basis, ranks=ranks, basis=tiles(64), codec_of=kept_of_sparse_loco)

    def made(name: str, send: Sends, passes: float, delay: int = 0) -> Method:
        parts = parts_of(whole, send, None)
        return Method(name, "flat", True, parts, False, passes, local_steps, local=True, delay=delay)

    return [
        made("diloco", partial(codes, codec=identity()), EXCHANGE),
        made("diloco, int8", partial(codes, codec=int8()), EXCHANGE + 36),
        made("diloco, int8, delayed", partial(codes, codec=int8()), EXCHANGE + 36, late),
        made("diloco, 2 bits", partial(codes, codec=bins(4, 6)), EXCHANGE + 60),
        made("diloco, 1 bit", partial(codes, codec=sign()), EXCHANGE + 32),
        made("sparse_loco", largest, EXCHANGE + 100),
    ]


def _two_level(model: Model, net: Network, bucket: int, interval: int) -> list[Method]:
    """Shards of the mean inside the node are what travels between nodes, as on the replica axis of HSDP."""

    def between(send: Callable[..., list[Message]], *, coded: bool = False) -> Sends:
        def sends(part: Model) -> list[Message]:
            shard = Model(tuple((-(-n // net.per_node),) for n in part.lengths), part.width)
            scatter, gather = traffic.halves(part, net.per_node)
            sent = send(shard, net.nodes, axis="node")
            if coded:  # the codes of the mean go on within the node as they came
                gather = gather._replace(size=(net.per_node - 1) * sent[-1].size * net.nodes // (net.nodes - 1))
            return [scatter, *sent, gather]

        return sends

    signs = between(partial(traffic.codes, codec=sign()), coded=True)
    direct = between(partial(traffic.codes, codec=sign(), servers=False), coded=True)
    direct_passes = passes_without_servers(net.nodes) / net.per_node
    made = partial(_method, model, "two-level", bucket)
    return [
        made("adamw", between(traffic.exact), compressed=False),
        made("bf16 gradients", between(partial(traffic.exact, width=2)), compressed=False, passes=12),
        made("onebit_adam", signs, overlapped=False, passes=32 / net.per_node),
        made("onebit_adam, overlapped", signs, passes=32 / net.per_node),
        made("onebit_adam, servers=False", direct, overlapped=False, passes=direct_passes),
        made("onebit_adam, servers=False, overlapped", direct, passes=direct_passes),
        made("zero_one_adam", signs, overlapped=False, passes=32 / net.per_node, interval=interval),
        made("zero_one_adam, servers=False", direct, overlapped=False, passes=direct_passes, interval=interval),
        made(
            "onebit_adam, int8",
            between(partial(traffic.codes, codec=int8()), coded=True),
            overlapped=False,
            passes=36 / net.per_node,
        ),
    ]


def passes_without_servers(ranks: int) -> float:
    """Return 1-bit Adam's passes where every rank decodes the codes of all.

    Of the 32 bytes with servers 8 are, at two ranks, a server's: for half the elements it reads an error, writes the
    mean that it encodes, reads that again and writes the next error, 16 bytes of float32. What decoding costs instead
    was measured on a CPU, in bytes that take as long: one for every rank, and four where there are more than two,
    whose mean is formed aside.
    """
    return 24 + ranks + (4 if ranks > 2 else 0)


def _method(
    model: Model,
    topology: str,
    bucket: int,
    name: str,
    send: Sends,
    *,
    compressed: bool = True,
    overlapped: bool = True,
    passes: float = 0.0,
    interval: int = 1,
    ours: bool = True,
) -> Method:
    parts = parts_of(model, send, bucket if overlapped else None)
    return Method(name, topology, compressed, parts, overlapped, passes, interval, ours)


def parts_of(
    model: Model, send: Sends, bucket: int | None, first: int = traffic.FIRST_BUCKET
) -> tuple[tuple[float, tuple[Message, ...]], ...]:
    """Return the parts of a method that sends `send(part)` for each bucket of so many bytes; None is one part."""
    pieces = [model] if bucket is None else traffic.buckets(model, bucket, first)
    params = model.params
    return tuple((piece.params / params, tuple(send(piece))) for piece in pieces)
