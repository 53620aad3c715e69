"""The methods that the planner compares, in one table: what each sends in a step, and what it costs locally."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import cache, partial
from importlib import import_module
from typing import Any, NamedTuple

from fn.collectives.codecs.ballots import ballots
from fn.collectives.codecs.bins import bins
from fn.collectives.codecs.codec import Codec
from fn.collectives.codecs.e3m0 import e3m0
from fn.collectives.codecs.fp8 import fp8
from fn.collectives.codecs.integer import int4, int8
from fn.collectives.codecs.rotated import rotated
from fn.collectives.codecs.sign import sign
from fn.collectives.codecs.top_k import top_k
from fn.planner import traffic
from fn.planner.network import Message, Network
from fn.planner.traffic import Model, Ranks

Send = Callable[..., list[Message]]
"""(model, ranks=...) -> messages."""

Sends = Callable[[Model], list[Message]]
Parts = tuple[tuple[float, tuple[Message, ...]], ...]

INTERVAL = 16
"""Steps of 0/1 Adam between two that synchronise, once the interval has grown to its default limit."""

LOCAL_STEPS = 30
"""Steps of a round of DiLoCo's family, as in its published runs. With a delay, a quarter go on while a mean travels."""

EXCHANGE = 44.0
"""Bytes per parameter of an exchange: anchor and params are read for the difference, which is written, then mean,
momentum and anchor are read and written, params written."""

LATE = 28.0
"""Bytes per parameter of the step along a direction that has arrived late: that is read, the last update is read and
written, and so are the new one and params."""

TILE = 64
"""The side of the tiles of `fn.sparse_loco`."""

SIGN, BLOCKS, INT4, INT8, FP8, BINS, E3M0 = sign(), sign(block=64), int4(), int8(), fp8(), bins(4, 6), e3m0()
BALLOTS, ROTATED, COARSE = ballots(), rotated(int4(128)), int4(2048)
"""The codecs, each made once: what is known of one is found again by the object."""

CALLS = {
    "adamw": (220, 2), "bf16 gradients": (220, 2), "adamw, int8 gradients": (1050, 18),
    "adamw, fp8 gradients": (1050, 18), "adamw, int4 gradients": (1050, 18), "onebit_adam": (600, 0),
    "onebit_lamb": (800, 6), "zero_one_adam": (600, 0), "sharded_onebit_adam": (850, 2), "loco_adamw": (600, 0),
    "SDP4Bit": (600, 0), "powersgd_adamw": (500, 6), "dion": (1350, 38), "muon": (1100, 46), "sign_muon": (2400, 36),
    "lion_vote": (1100, 20), "muloco": (650, 26), "diloco": (100, 0),
}  # fmt: skip
"""By the name of a row or what it begins with: what a step takes by itself and for each tensor, in Python and launches.

The unit is a small operation of torch that is called from Python. `benchmarks.own_time` measures them, on a CPU, where
1-bit Adam in one flat vector takes less for each tensor than torch's AdamW.
"""

ITERATIONS = 5
"""Of Newton-Schulz."""

LONGEST = 2**31 - 1
"""Elements of a tensor among which torch finds the largest."""


class Method(NamedTuple):
    """How a step communicates.

    name: what it is called, an optimizer of fn first. alike: other optimizers that send just the same.
    topology: "flat" runs over all ranks; "two-level" averages exactly inside the nodes, where each rank keeps a shard,
        and runs the method on the shards between the nodes.
    compressed: it is one of the methods whose paying is the question.
    parts: (fraction of the gradients, messages) in the order in which gradients become ready.
    overlapped: a part's messages may leave while the backward pass goes on.
    passes: bytes of device memory that are read and written per parameter, on top of an exact optimizer's.
    interval: it communicates in one of so many steps.
    local: ranks train alone in between. delay: steps that go on while a part travels.
    each_step: parts that are averaged in every step, behind the backward pass, whatever the interval.
    exact: what is sent in place of the parts in one step of so many, the period.
    calls: small operations, called from Python, on top of an exact optimizer's. flops: of matrix products.
    """

    name: str
    topology: str
    compressed: bool
    parts: Parts
    overlapped: bool
    passes: float = 0.0
    interval: int = 1
    local: bool = False
    delay: int = 0
    each_step: Parts = ()
    alike: tuple[str, ...] = ()
    exact: tuple[Message, ...] = ()
    period: int = 0
    calls: float = 0.0
    flops: float = 0.0

    @property
    def in_every_step(self) -> bool:
        """Return whether the ranks synchronise in every step, in time; if not, what is learned changes."""
        return not self.local and self.interval == 1 and not self.delay

    @property
    def messages(self) -> list[Message]:
        """Return the messages of what is sent once in an interval."""
        return [message for _, part in self.parts for message in part]

    @property
    def often(self) -> float:
        """Return in which part of the steps that communicate the parts are sent, and not what is exact."""
        return 1 - 1 / self.period if self.period else 1.0

    @property
    def sent(self) -> list[tuple[Message, float]]:
        """Return all messages, each with the steps from one such message to the next, in the mean."""
        in_each_step = [(message, 1.0) for _, part in self.each_step for message in part]
        seldom = [(message, float(self.period)) for message in self.exact]
        return in_each_step + seldom + [(message, self.interval / self.often) for message in self.messages]

    @property
    def size(self) -> float:
        """Return the bytes that a rank sends per step, in the mean over an interval."""
        return sum(message.size / steps for message, steps in self.sent)

    @property
    def label(self) -> str:
        """The name of the method in a sentence."""
        return label(self.name, self.topology)

    @property
    def title(self) -> str:
        """The name with those of the optimizers that send just the same."""
        return " / ".join((self.name, *self.alike))


def label(name: str, topology: str) -> str:
    """Return the name of a method in a sentence."""
    return name if topology == "flat" else f"{name} ({topology})"


@cache
def kept_of_sparse_loco(n: int, kept: int = 128) -> Codec:
    """Return the codec with which `fn.sparse_loco` by default sends a chunk of n differences."""
    return top_k(max(1, round(n * kept / TILE**2)), n, values=BINS)


def passes_without_servers(ranks: int) -> float:
    """Return 1-bit Adam's passes where every rank decodes the codes of all.

    Of the 32 bytes with servers 8 are, at two ranks, a server's: for half the elements it reads an error, writes the
    mean that it encodes, reads that again and writes the next error, 16 bytes of float32. What decoding costs instead
    was measured on a CPU, in bytes that take as long: one for every rank, and four where there are more than two,
    whose mean is formed aside.
    """
    return 24 + ranks + (4 if ranks > 2 else 0)


class Row(NamedTuple):
    """A method before it is known on how many ranks it runs; the fields that are not explained are those of `Method`.

    send: (model, ranks) -> messages.
    each_step: (model, ranks) -> what is sent behind the backward pass of every step besides, such as FSDP2's own.
    passes: bytes of memory for each parameter. iterated: the same for each parameter of hidden matrices, on top; or a
        function of the ranks.
    coded: the same for what a rank encodes, which in two levels is a shard; or a function of the ranks among which
        codes travel. coded_other: for each parameter that is in no hidden matrix, where that is another number.
    cut: what leaves together: "whole" is everything, "bucket" are buckets behind the backward pass, a number so many
        fragments, each a part of its own.
    delay: the part of an interval that goes on while a part travels; of local steps at most all of it but a step.
    two_level: fn runs it over two axes. fits: whether it can take a model.
    exact: (model, ranks) -> messages of one step of so many, the period, in place of those of `send`.
    calls: of a step, and for each tensor. flops: (model, ranks) -> a step's.
    """

    name: str
    send: Send
    passes: float = 0.0
    coded: float | Callable[[int], float] = 0.0
    iterated: float | Callable[[Ranks], float] = 0.0
    coded_other: float | None = None
    cut: str | int = "whole"
    compressed: bool = True
    interval: int = 1
    local: bool = False
    delay: float = 0.0
    alike: tuple[str, ...] = ()
    two_level: bool = True
    fits: Callable[[Model], bool] = lambda model: True
    exact: Send | None = None
    period: int = 0
    calls: tuple[float, float] = (0.0, 0.0)
    flops: Callable[[Model, Ranks], float] = lambda model, ranks: 0.0
    each_step: Send | None = None

    def passes_on(self, model: Model, ranks: Ranks) -> float:
        """Return the bytes of memory for each parameter of a model, in the mean."""
        local, outer = (1, ranks) if isinstance(ranks, int) else ranks
        hidden = model.hidden_share
        coded = self.coded(outer) if callable(self.coded) else self.coded
        if self.coded_other is not None:
            coded = hidden * coded + (1 - hidden) * self.coded_other
        iterated = self.iterated(ranks) if callable(self.iterated) else self.iterated
        return self.passes + hidden * iterated + coded / local

    def delay_of(self, interval: int) -> int:
        """Return the steps that go on while a part travels."""
        return min(int(self.delay * interval), interval - self.local)


class Options(NamedTuple):
    """The options that rows are made with.

    interval: of 0/1 Adam. local_steps: of a round. rank: of factors; None is each method's default. density: the part
    of the numbers that is sent where few of them are; None is each method's default.
    """

    interval: int = INTERVAL
    local_steps: int = LOCAL_STEPS
    rank: int | float | None = None
    density: float | None = None


def rows(*, contrib: bool = False, **options: Any) -> list[Row]:
    """Return the table of all methods.

    Args: contrib: whether the methods of `fn.contrib` are in it, whose files make their rows of this module and the
        options, in a function `plan_rows`. options: those of `Options`.
    """
    made = Options(**options)
    files = import_module("fn.contrib").modules() if contrib else []
    here = sys.modules[__name__]
    return _core_rows(*made) + [r for file in files if hasattr(file, "plan_rows") for r in file.plan_rows(here, made)]


def _core_rows(interval: int, local_steps: int, rank: int | float | None, density: float | None) -> list[Row]:
    codes, low_rank = traffic.codes, traffic.low_rank
    one_bit, signs, direct = (
        partial(codes, codec=codec, servers=servers)
        for codec, servers in ((SIGN, True), (BLOCKS, True), (BLOCKS, False))
    )
    in_bytes = partial(codes, codec=INT8)
    thin, thick = (default if rank is None else rank for default in (4, 0.25))
    of_squares = partial(kept_of_sparse_loco, kept=128 if density is None else max(1, round(density * TILE**2)))
    largest = partial(traffic.in_tiles, tile=TILE, codec_of=of_squares, squares=True)
    rare = partial(Row, interval=interval)
    round_ = partial(Row, interval=local_steps, local=True, passes=EXCHANGE)
    without = passes_without_servers
    votes = partial(codes, codec=BALLOTS)

    def in_slices(model: Model, ranks: Ranks) -> list[Message]:
        return votes(traffic.in_slices(model), ranks)

    made = [
        Row("adamw", traffic.exact, cut="bucket", compressed=False, alike=("lamb",)),
        Row("bf16 gradients", partial(traffic.exact, width=2), 12, cut="bucket", compressed=False, fits=_is_wide),
        Row("adamw, int8 gradients", in_bytes, coded=36, cut="bucket"),
        Row("adamw, fp8 gradients", partial(codes, codec=FP8), coded=36, cut="bucket"),
        Row("adamw, int4 gradients", partial(codes, codec=INT4), coded=36, cut="bucket"),
        Row("onebit_adam", signs, coded=32),
        Row("onebit_adam, overlapped", signs, coded=32, cut="bucket"),
        Row("onebit_adam, servers=False", direct, coded=without),
        Row("onebit_adam, servers=False, overlapped", direct, coded=without, cut="bucket"),
        Row("onebit_adam, 1 bit", one_bit, coded=32),
        Row("onebit_adam, 1 bit, overlapped", one_bit, coded=32, cut="bucket"),
        Row("onebit_adam, int8", in_bytes, coded=36),
        Row("onebit_lamb", partial(one_bit, layout="fused"), coded=40),
        rare("zero_one_adam", signs, coded=32),
        rare("zero_one_adam, servers=False", direct, coded=without),
        rare("zero_one_adam, 1 bit", one_bit, coded=32),
        Row("sharded_onebit_adam", partial(traffic.sharded_momentum, codec=BLOCKS), coded=32),
        Row("sharded_onebit_adam, 1 bit", partial(traffic.sharded_momentum, codec=SIGN), coded=32),
        Row("loco_adamw, int4", partial(traffic.sharded, codec=INT4, gather=traffic.EXACTLY), coded=28),
        Row("loco_adamw, int4, int8 back", partial(traffic.sharded, codec=INT4, gather=INT8), coded=40),
        Row("SDP4Bit", partial(traffic.sharded, codec=ROTATED, gather=COARSE), coded=60),
        Row(f"powersgd_adamw, rank {show_part(thin)}", partial(low_rank, rank=thin), 60),
        Row(f"dion, rank {show_part(thick)}", partial(low_rank, rank=thick, orthonormal=True, labels=True),
            iterated=100),
        Row("muon, DDP", traffic.exact, cut="bucket", iterated=16, compressed=False, flops=newton_schulz),
        Row("muon", traffic.owned, iterated=16, compressed=False, alike=("normuon",), flops=owned_newton_schulz),
        Row("muon, int8", partial(traffic.owned, codec=INT8, gather=INT8), coded=36, iterated=16,
            flops=owned_newton_schulz),
        Row("muon, FSDP2", traffic.unsharded, iterated=partial(on_shards, 16), compressed=False, alike=("normuon",),
            flops=sharded_newton_schulz, each_step=traffic.of_fsdp),
        Row("muon, FSDP2, int8", partial(traffic.unsharded, codec=INT8, gather=INT8), iterated=partial(on_shards, 52),
            flops=sharded_newton_schulz, each_step=traffic.of_fsdp),
        Row("sign_muon", partial(traffic.apart, hidden=in_slices, other=in_bytes), coded=24, iterated=16,
            coded_other=36, flops=newton_schulz),
        Row("lion_vote", votes, coded=24),
        round_("diloco", partial(codes, codec=traffic.EXACTLY), alike=("local_sgd",)),
        round_("muloco", partial(codes, codec=traffic.EXACTLY), flops=newton_schulz),
        round_("muloco, int8", in_bytes, coded=36, flops=newton_schulz),
        round_("diloco, int8", in_bytes, coded=36),
        round_("diloco, int8, delayed", in_bytes, coded=36, delay=0.25),
        round_("diloco, int8, late", in_bytes, coded=36, delay=1.0),
        round_("diloco, e3m0, 4 fragments, delayed", partial(codes, codec=E3M0), coded=36, cut=4, delay=0.05),
        round_("diloco, 2 bits", partial(codes, codec=BINS), coded=60),
        round_("diloco, 1 bit", one_bit, coded=32),
        round_("sparse_loco", largest, passes=EXCHANGE + 100),
    ]  # fmt: skip
    made = [row._replace(calls=CALLS.get(row.name, CALLS.get(row.name.partition(",")[0], (0, 0)))) for row in made]
    # The message of a step travels behind the whole next one, as `fn.late` lets it.
    late = ("adamw", "adamw, int4 gradients", "onebit_adam", "muon", "muon, int8", "sign_muon")
    whole = [row._replace(cut="whole", alike=()) for row in made if row.name in late]
    return made + [row._replace(name=f"{row.name}, late", passes=row.passes + LATE, delay=1.0) for row in whole]


def _is_wide(model: Model) -> bool:
    return model.width > 2


def can_be_searched(model: Model) -> bool:
    """Return whether torch finds the largest elements of the longest tensor."""
    return max(model.lengths) <= LONGEST


def show_part(rank: int | float) -> str:
    """Spell a rank: 4, 1/4 or 0.3."""
    if isinstance(rank, int):
        return str(rank)
    return f"1/{round(1 / rank)}" if round(1 / rank) * rank == 1 else f"{rank:g}"


def methods(model: Model, net: Network, *, bucket: int = traffic.BUCKET, **options: Any) -> list[Method]:
    """Return all methods on all topologies that the network has.

    Args: bucket: bytes of gradients in a part of an overlapped method. options: as for `rows`.
    """
    table = [row for row in rows(**options) if row.fits(model)]
    on_all = [method(row, model, net.world, bucket) for row in table]
    if net.nodes == 1 or net.per_node == 1:
        return on_all
    return on_all + [method(row, model, (net.per_node, net.nodes), bucket) for row in table if row.two_level]


def method(row: Row, model: Model, ranks: Ranks, bucket: int = traffic.BUCKET) -> Method:
    """Return a row of the table on so many ranks."""
    topology, step, each_step = ("flat" if isinstance(ranks, int) else "two-level"), _NONE, row.each_step
    if row.local and not isinstance(ranks, int):  # in a node all train on one mean gradient
        each_step = node_average
    if each_step is not None:
        step = parts_of(model, partial(each_step, ranks=ranks), bucket)
    if row.local:  # differences are in float32, whatever the gradients are
        model = model._replace(width=4)
    sends: Sends = partial(row.send, ranks=ranks)
    if isinstance(row.cut, int):
        pieces = traffic.fragments(model, row.cut)
        parts = tuple((piece.params / model.params, tuple(sends(piece))) for piece in pieces)
    else:
        parts = parts_of(model, sends, bucket if row.cut == "bucket" else None)
    overlapped, delay = row.cut == "bucket", row.delay_of(row.interval)
    exact = () if row.exact is None else tuple(row.exact(model, ranks=ranks))
    return Method(
        row.name, topology, row.compressed, parts, overlapped, row.passes_on(model, ranks), row.interval, row.local,
        delay, step, row.alike, exact, row.period, row.calls[0] + row.calls[1] * model.tensors, row.flops(model, ranks),
    )  # fmt: skip


_NONE: Parts = ()


def newton_schulz(model: Model, ranks: Ranks = 1) -> float:
    """Return the operations in which a rank orthogonalizes hidden matrices: A = X X^T and A A, then (b A + c A A) X."""
    flops = 0.0
    for shape, times, hidden in model.runs:
        if hidden:
            *stack, rows, columns = shape
            least = min(rows, columns)
            products = 4 * least * rows * columns + 2 * least**3
            flops += ITERATIONS * products * math.prod(stack) * times
    return flops


def owned_newton_schulz(model: Model, ranks: Ranks) -> float:
    """Return a rank's part of these, where each matrix has an owner."""
    return newton_schulz(model) / (ranks if isinstance(ranks, int) else math.prod(ranks))


def sharded_newton_schulz(model: Model, ranks: Ranks) -> float:
    """Return a rank's part of these, where each matrix has an owner among the ranks that share it."""
    return on_shards(newton_schulz(model), ranks)


def on_shards(whole: float, ranks: Ranks) -> float:
    """Return a rank's part of what is divided as FSDP2's shards are."""
    return whole / traffic.shard_ranks(ranks)[0]


def node_average(model: Model, ranks: tuple[int, int]) -> list[Message]:
    """Return an exact average in a node."""
    return [message._replace(axis="local") for message in traffic.exact(model, ranks[0])]


def parts_of(model: Model, send: Sends, bucket: int | None, first: int = traffic.FIRST_BUCKET) -> Parts:
    """Return the parts of a method that sends `send(part)` for each bucket of so many bytes; None is one part."""
    pieces = [model] if bucket is None else traffic.buckets(model, bucket, first)
    params = model.params
    parts = {piece: (piece.params / params, tuple(send(piece))) for piece in dict.fromkeys(pieces)}  # most are equal
    return tuple(parts[piece] for piece in pieces)
