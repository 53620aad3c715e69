"""The exact collectives `all_to_all`, `all_gather`, `permute`, `psum` and `pmean`, on trees, by axis name.

Each is an op `fn::name(x, rank, size, transport)`; `permute` has the permutation in place of the size. The rank is a
tensor operand: the vmap level that batches it is the axis itself, where the exchange is a transposition; any other vmap
level is passed by. Below all levels the op decomposes into torch's functional collectives, so `torch.compile` sees
them, or is carried by a registered transport.
This is the only module that names the functional collectives: they are private and their names move.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fn import tree
from fn.collectives import axis as axes
from fn.collectives.carriers import Carrier, carrier_of
from fn.collectives.differentiation import refuse_to_differentiate
from fn.collectives.following import shared
from fn.collectives.ledger import record
from fn.collectives.profiling import step_range, watchers
from fn.collectives.transports.failure_detection import abort_connections, is_loss, peer_lost
from fn.collectives.transports.registry import carry, carry_sum
from fn.errors import expected
from fn.kernels import memory_pool
from fn.kernels.tracing import is_concrete, is_recorded, pooled, runs_as_written

Tree = Any

LOOK = timedelta(seconds=0.1)
"""How long a signal may have to wait for its handler, in a collective of torch.distributed."""

PATIENCE = timedelta(seconds=1)
"""How long a collective that was broken off may take to end."""

_library = torch.library.Library("fn", "FRAGMENT")
_Batched = tuple[Tensor, int | None]


def all_to_all(x: Tree, axis: str) -> Tree:
    """Exchange rows: row r of the result is the row that rank r held for this rank.

    >>> import torch, fn
    >>> fn.simulate(lambda x: fn.all_to_all(x, "data"), "data", 2)(torch.tensor([[1, 2], [3, 4]]))
    tensor([[1, 3],
            [2, 4]])

    Args: x: tree of tensors (W, ...). axis: the axis' name.
    Returns: the same shapes.
    Raises: TypeError for a leaf that is no tensor; ValueError if a leaf's first dimension is not the axis size, or the
        axis is not bound although others are, or although there are other processes (without any an axis has one rank);
        `PeerLost` if a rank ends or does not answer in time.

    Not differentiable: ValueError for an x that is being differentiated, wherever ranks exchange, real or simulated.
    """
    _check_tensors(x)
    size = axes.resolve(axis).size

    def exchange(leaf: Tensor) -> Tensor:
        if leaf.ndim == 0 or leaf.shape[0] != size:
            shape = tuple(leaf.shape)
            raise ValueError(f"x: has shape {shape}; its first dimension must be {size}, the size of {axis!r}")
        return _sent(leaf, axis, "all_to_all", size - 1, size)

    return tree.map(exchange, x)


def all_gather(x: Tree, axis: axes.AxisNames) -> Tree:
    """Give every rank the values of all: row r of the result is rank r's value.

    >>> import torch, fn
    >>> fn.simulate(lambda x: fn.all_gather(x, "data"), "data", 2, out_dims=None)(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])

    Args: x: tree of tensors of any shape. axis: the axis' name, or several, which are gathered from the last to the
        first; r is then their `axis_index`.
    Returns: a tree of tensors (W, ...), the same on every rank.
    Raises: TypeError for a leaf that is no tensor; ValueError if the axis is not bound although others are, or although
        there are other processes (without any an axis has one rank); `PeerLost` if a rank ends or does not answer in
        time.

    Not differentiable: ValueError for an x that is being differentiated, wherever ranks exchange, real or simulated.
    """
    _check_tensors(x)
    over = axes.names(axis)
    return shared("gather", over, lambda: rows_like(x, axes.axis_size(over)), lambda: _all_gather(x, over))


def rows_like(x: Tree, size: int) -> Tree:
    """Return a tree of so many rows of each leaf, for their shape and dtype alone: they take no memory."""
    return tree.map(lambda leaf: leaf.new_empty(()).expand(size, *leaf.shape), x)


def _all_gather(x: Tree, over: Sequence[str]) -> Tree:
    axis, *rest = over
    if rest:
        # (A, B, ...) -> (A B, ...)
        return tree.map(lambda rows: rows.flatten(0, 1), _all_gather(_all_gather(x, rest), [axis]))
    size, _, transport = axes.resolve(axis)

    def gather(leaf: Tensor) -> Tensor:
        if _stays(leaf, size, transport):
            return leaf.unsqueeze(0).expand(size, *leaf.shape)  # (...) -> (W, ...), a view
        return _sent(leaf, axis, "all_gather", size - 1, 1)

    return tree.map(gather, x)


def permute(x: Tree, axis: str, perm: Sequence[int]) -> Tree:
    """Send to one rank: rank r's value goes to rank perm[r], and each rank gets the value of the one that sends to it.

    Rings, pairs and gossip need it. Over connections of our own a rank waits only for the rank that it sends to and the
    rank that sends to it.

    >>> import torch, fn
    >>> fn.simulate(lambda x: fn.permute(x, "data", [1, 2, 0]), "data", 3)(torch.tensor([10, 20, 30]))
    tensor([30, 10, 20])

    Args: x: tree of tensors of any shape. axis: the axis' name. perm: for each rank the one that it sends to, known on
        the host and the same on all ranks. A rank that is its own destination keeps its value.
    Returns: the same shapes and dtypes.
    Raises: TypeError for a leaf that is no tensor, or a perm of other than whole numbers; ValueError if perm is no
        permutation of the ranks, or the axis is not bound although others are, or although there are other processes
        (without any an axis has one rank); `PeerLost` if one of the two ranks ends or does not answer in time.

    Not differentiable: ValueError for an x that is being differentiated, wherever ranks exchange, real or simulated.
    """
    _check_tensors(x)
    size, rank, transport = axes.resolve(axis)
    try:
        to = [operator.index(r) for r in perm]
    except TypeError:
        raise TypeError(expected("perm", "a whole number for each rank", f"{perm!r}")) from None
    if sorted(to) != [*range(size)]:
        raise ValueError(expected("perm", f"each of the {size} ranks of {axis!r} once", f"{to}"))
    simulated = transport == axes.SIMULATED or torch.compiler.is_compiling()  # no rank in particular
    sends = to != [*range(size)] if simulated else to[int(rank)] != int(rank)
    return tree.map(lambda leaf: _sent(leaf, axis, "permute", int(sends), 1, to), x)


def psum(x: Tree, axis: axes.AxisNames) -> Tree:
    """Sum over the ranks of an axis, as an all-reduce does. Args, Returns and Raises as for `pmean`.

    Integers are summed, too.

    >>> import torch, fn
    >>> fn.simulate(lambda x: fn.psum(x, "data"), "data", 2, out_dims=None)(torch.tensor([1, 2]))
    tensor(3)

    Raises: TypeError for truth values among several ranks, whose sum would be another one.

    Not differentiable, as `pmean`.
    """
    _check_tensors(x)
    over = axes.names(axis)
    return shared("sum", over, lambda: x, lambda: _psum(x, over))


def _psum(x: Tree, over: Sequence[str]) -> Tree:
    axis, *rest = over
    if rest:
        return _psum(_psum(x, [axis]), rest)
    size, _, transport = axes.resolve(axis)
    if any(leaf.dtype == torch.bool and not _stays(leaf, size, transport) for leaf in tree.leaves(x)):
        raise TypeError(expected("x", "numbers", "torch.bool", "convert it, such as by x.int()"))
    return tree.map(lambda leaf: _sent(leaf, axis, "psum", 2 * (size - 1), size), x)


def pmean(x: Tree, axis: axes.AxisNames) -> Tree:
    """Average over the ranks of an axis in full precision, as an all-reduce does.

    Args: x: tree of floating tensors. axis: the axis' name, or several, over which it is done one after the other.
    Returns: the same shapes and dtypes, the same values on every rank.
    Raises: TypeError for a leaf that is no tensor, or integers among several ranks; ValueError if the axis is not bound
        although others are, or although there are other processes (without any an axis has one rank); `PeerLost` if a
        rank ends or does not answer in time.

    Not differentiable: ValueError for an x that is being differentiated, wherever ranks exchange, real or simulated.
    Differentiate the loss of each rank, and average the gradient:

        >>> import torch, fn
        >>> step = lambda w, x: fn.pmean(torch.func.grad(lambda w: (w * x).sum())(w), "data")
        >>> fn.simulate(step, "data", 2, in_dims=(None, 0), out_dims=None)(torch.ones(()), torch.tensor([1.0, 3.0]))
        tensor(2.)
    """
    _check_tensors(x)
    size = axes.axis_size(axis)
    if size == 1:
        return psum(x, axis)
    for leaf in tree.leaves(x):
        if not (leaf.is_floating_point() or leaf.is_complex()):
            wanted = "floating-point or complex numbers, since a mean of integers is no integer"
            cure = "add integers with fn.psum, or hand over x.float()"
            raise TypeError(expected("x", wanted, f"{leaf.dtype}", cure))
    # Before `psum` is called, which would refuse it in its own name.
    refuse_to_differentiate(x, "pmean", axis)
    # Sums of half precision numbers overflow where their mean does not.
    parts = tree.map(lambda leaf: leaf / size if leaf.element_size() < 4 else leaf, x)
    with step_range("average"):
        total = psum(parts, axis)

    def divide(leaf: Tensor) -> Tensor:
        return leaf if leaf.element_size() < 4 else torch.div(leaf, size, out=pooled(leaf).get("out"))

    return tree.map(divide, total)


def mean_in_place(x: Tensor, axis: str) -> Tensor:
    """Return what `pmean` returns, in the memory of x where that holds numbers. No caller may need x afterwards.

    Args: x: a contiguous floating tensor. axis: one axis. Raises: as `pmean`; x is lost then.
    """
    size, _, transport = axes.resolve(axis)
    if size == 1 or not is_concrete(x) or is_recorded([x]):
        mean: Tensor = pmean(x, axis)
        return mean

    def add_up() -> Tensor:
        count(x, axis, "all_reduce", 2 * (size - 1) * x.nbytes, size)
        try:
            carrier = carrier_of(transport, [x])
            return carry_sum(x, transport) if carrier.is_registered else _add_up(x, carrier)
        except RuntimeError as error:
            raise_if_lost(error, "psum", transport)
            raise

    with step_range("average"):
        # Half precision is divided first, as in `pmean`: its sum may overflow.
        x = x.div_(size) if x.element_size() < 4 else x
        # The sum, as `psum` records it: what is divided once here would be divided twice where it is replayed.
        x = shared("sum", axis, lambda: x, add_up)
    return x if x.element_size() < 4 else x.div_(size)


def exchange_ragged(
    rows: Sequence[Tensor], lengths: Sequence[int], longest: int, axis: str, collective: str
) -> list[Tensor]:
    """Send row r to rank r, and return what came from each rank: as `all_to_all`, with rows of any length.

    Not among simulated ranks. Transports that are registered carry rows of one length, the longest.

    Args: rows: W vectors of one dtype and device. lengths: of what comes from each rank. longest: of all rows of all
        ranks. collective: the name under which ledgers count it.
    Raises: as `all_to_all`.
    """
    size, _, transport = axes.resolve(axis)
    for row in rows:
        refuse_to_differentiate(row, collective, axis)
    like = next((row for row in rows if row.numel()), rows[0])
    carrier = carrier_of(transport, [like])
    if carrier.is_registered:
        # (n_r,) of each rank -> (W, longest), zeros behind the ends
        table = torch.stack([torch.cat([row.to(like.device), like.new_zeros(longest - row.shape[0])]) for row in rows])
        count(table, axis, collective, (size - 1) * table.nbytes, size)
        return [row[:n] for row, n in zip(carry(table, size, "all_to_all", transport), lengths, strict=True)]
    # (n_r,) of each rank -> (sum of n_r,)
    message, sent = torch.cat([row.to(like.device) for row in rows]), [row.shape[0] for row in rows]
    others = message.shape[0] - sent[axes.own_rank(axis)]
    count(message, axis, collective, others * message.element_size(), 1)
    try:
        if is_concrete(message):
            # (sum of lengths,), which is split by rank below
            out = memory_pool.empty((sum(lengths),), message.dtype, message.device)
            splits = list(lengths), sent
            _finish(dist.all_to_all_single(out, message, *splits, group=carrier.group, async_op=True), out, transport)
        else:
            ragged = torch.ops._c10d_functional.all_to_all_single(message, list(lengths), sent, transport)
            out = _wait(ragged)
    except RuntimeError as error:
        raise_if_lost(error, collective, transport)
        raise
    return [*out.split(list(lengths))]


def pass_parts(
    sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]], axis: str, collective: str
) -> None:
    """Send tensors to other ranks and fill tensors from them, as one call of the device's library.

    Args: sends, receives: rank -> contiguous tensors, in the order in which that rank receives, or sends, them; empty
        ones are left out. All ranks of the axis have to call it. collective: the name under which ledgers count it.
    Raises: as `all_to_all`.
    """
    transport = axes.resolve(axis).transport
    record(axis, collective, sum([x.nbytes for parts in sends.values() for x in parts]))
    group, calls = Carrier(transport).group, []
    for call, of_ranks in ((dist.isend, sends), (dist.irecv, receives)):
        for rank, parts in of_ranks.items():
            peer = dist.get_global_rank(group, rank)
            # In one call below: two ranks that both send before they receive could wait for each other for ever.
            calls += [dist.P2POp(call, x, peer, group) for x in parts if x.numel()]
    try:
        for work in dist.batch_isend_irecv(calls) if calls else ():
            _finish(work, calls[0].tensor, transport)
    except RuntimeError as error:
        raise_if_lost(error, collective, transport)
        raise


def among_simulated(x: Tensor, axis: str, name: str, collective: str, length: int, among: int = 1) -> Tensor:
    """Return what `all_gather` or `all_to_all`, by its name, makes of a tensor on simulated ranks.

    Args: collective: the name under which one message is counted. length: the bytes of all that the ranks own together,
        of which a rank sends (W - 1) / W in the mean; 0 to count nothing. among: of how many groups of ranks one sends
        them.
    """
    size, rank, transport = axes.resolve(axis)
    refuse_to_differentiate(x, collective, axis)
    count(x, axis, collective, length * (size - 1), size * among)
    received: Tensor = getattr(torch.ops.fn, name)(x.contiguous(), rank, size, transport)
    return received


def _check_tensors(x: Tree) -> None:
    for leaf in tree.leaves(x):
        if not isinstance(leaf, Tensor):
            cure = "the number of ranks is fn.axis_size(axis)"
            raise TypeError(expected("x", "tensors", f"a leaf {leaf!r}", cure))


def _stays(x: Tensor, size: int, transport: str) -> bool:
    """Tell whether there is nothing to exchange. Simulated ranks always exchange: their vmap level must end there."""
    return transport != axes.SIMULATED and (size == 1 or x.numel() == 0)


def _sent(x: Tensor, axis: str, name: str, times: int, per: int, last: Any = None) -> Tensor:
    """Return what the op of a name makes of x, with times / per of its bytes counted. last: of it; None: the size."""
    size, rank, transport = axes.resolve(axis)
    if _stays(x, size, transport):
        return x
    refuse_to_differentiate(x, name, axis)
    sent = x.numel() * x.element_size() * times
    count(x, axis, "all_reduce" if name == "psum" else name, sent, per)
    received: Tensor = getattr(torch.ops.fn, name)(x.contiguous(), rank, size if last is None else last, transport)
    return received


def count(x: Tensor, axis: str, collective: str, size: int, per: int) -> None:
    """Enter size / per bytes, rounded up, in the ledgers. x: what is sent.

    Where code is traced an op counts, so that a compiled graph counts in every run of it and does not look at the
    ledgers when it is traced. It is said to mutate a tensor, so that no compiler removes it.
    """
    if size and runs_as_written():  # the quick way: the op below costs a dispatch for each message
        record(axis, collective, -(-size // per))
    elif size and (torch.compiler.is_compiling() or watchers().ledgers):
        torch.ops.fn.count(x, axes.all_ranks(), _tally, axis, collective, size, per)


_tally = torch.zeros((), dtype=torch.int64, device="cpu")
"""What `fn::count` is said to mutate. Nothing is written into it."""


def _run_count(x: Tensor, ranks: Tensor, tally: Tensor, axis: str, collective: str, size: int, per: int) -> None:
    record(axis, collective, -(-size // per))


def _vmap_count(
    info: Any, dims: Any, x: Tensor, ranks: Tensor, tally: Tensor, axis: str, collective: str, size: int, per: int
) -> tuple[None, None]:
    # Nobody reads the numbers of x: one slice of it is enough to leave this level.
    x = x if dims[0] is None else x.select(dims[0], 0)
    if dims[1] is not None:  # a level of ranks: every one of them sends its own
        ranks = ranks.select(dims[1], 0)
    else:  # a batch that passes by is as many times the bytes
        size *= info.batch_size
    torch.ops.fn.count(x, ranks, tally, axis, collective, size, per)
    return None, None


def _run_all_to_all(x: Tensor, size: int, carrier: Carrier) -> Tensor:
    if is_concrete(x):
        out = memory_pool.empty(x.shape, x.dtype, x.device)
        run = partial(dist.all_to_all_single, out, x, async_op=True)
        return _fill(out, x, run, carrier)
    rows = [1] * size
    return _wait(torch.ops._c10d_functional.all_to_all_single(x, rows, rows, carrier.transport))


def _run_all_gather(x: Tensor, size: int, carrier: Carrier) -> Tensor:
    if is_concrete(x):
        out = memory_pool.empty((size, *x.shape), x.dtype, x.device)  # (W, ...)
        # (...) -> (n,): a 0-d tensor cannot be gathered as it is
        run = partial(dist.all_gather_into_tensor, out.view(-1), x.view(-1), async_op=True)
        return _fill(out, [x] * size, run, carrier)
    flat = _wait(torch.ops._c10d_functional.all_gather_into_tensor(x.reshape(-1), size, carrier.transport))
    return flat.view(size, *x.shape)


def _fill(out: Tensor, rows: Sequence[Tensor] | Tensor, run: Callable[..., Any], carrier: Carrier) -> Tensor:
    """Fill row r of `out` from rank r, to which rows[r] goes: over connections of our own, else `run` does it."""
    peers, group = carrier.connections, carrier.group
    if peers is None:
        _finish(run(group=group), out, carrier.transport)
    else:
        out[group.rank()].copy_(rows[group.rank()])
        peers.pass_rows(rows, out)
    return out


def _run_permute(x: Tensor, perm: list[int], carrier: Carrier) -> Tensor:
    group, transport = carrier.group, carrier.transport
    me, size = group.rank(), len(perm)
    to, source = perm[me], perm.index(me)
    # An all-to-all in which all rows but one are empty: send and receive of torch.distributed would need a first call
    # by all ranks over NCCL, and over gloo a rank that waits for a message hears no Ctrl-C.
    sends, gets = ([x.numel() if r == peer else 0 for r in range(size)] for peer in (to, source))
    if not is_concrete(x):
        flat = torch.ops._c10d_functional.all_to_all_single(x.reshape(-1), gets, sends, transport)
        return _wait(flat).view(x.shape)
    out, peers = memory_pool.empty(x.shape, x.dtype, x.device), carrier.connections
    if peers is None:
        _finish(dist.all_to_all_single(out.view(-1), x.view(-1), gets, sends, group=group, async_op=True), x, transport)
    elif to == me:
        peers.exchange({}, {})
        out.copy_(x)
    else:
        peers.exchange({to: [x]}, {source: [out]})
    return out


def _run_psum(x: Tensor, size: int, carrier: Carrier) -> Tensor:
    if is_concrete(x):  # torch's all-reduce works in place; x is the caller's
        return _add_up(memory_pool.empty(x.shape, x.dtype, x.device).copy_(x), carrier)
    return _wait(torch.ops._c10d_functional.all_reduce(x, "sum", carrier.transport))


def _add_up(x: Tensor, carrier: Carrier) -> Tensor:
    _finish(dist.all_reduce(x, group=carrier.group, async_op=True), x, carrier.transport)
    return x


def _finish(work: Any, x: Tensor, transport: str) -> None:
    """Wait for a collective of torch.distributed with x.

    Python calls the handlers of signals in the main thread, between two lines of Python. While that thread waits in C++
    for a peer that stopped, there is no such line, and Ctrl-C does nothing until the group's timeout. So it waits for
    a `LOOK` at a time.
    """
    if x.device.type == "cpu" and threading.current_thread() is threading.main_thread():
        try:
            while not _is_over(work, LOOK):
                pass
        except BaseException:  # raised by a handler
            abort_connections(transport)  # the peers wait for this rank, which will not come: they fail at once, too
            _is_over(work, PATIENCE)  # gloo's thread may still write into x; a process that ends meanwhile is aborted
            raise
    work.wait()


def _is_over(work: Any, limit: timedelta) -> bool:
    """Return whether a collective ends or fails within a time."""
    with suppress(RuntimeError):
        work.wait(limit)
    return bool(work.is_completed())


def _wait(x: Tensor) -> Tensor:
    waited: Tensor = torch.ops._c10d_functional.wait_tensor(x)
    return waited


def _batched(x: Tensor, dim: int | None, batch: int) -> Tensor:
    return x.unsqueeze(0).expand(batch, *x.shape) if dim is None else x.movedim(dim, 0)


def _vmap_all_to_all(info: Any, dims: Any, x: Tensor, rank: Tensor, size: int, transport: str) -> _Batched:
    # (B, W, ...); where the level is the axis, B is the sending rank and W the receiving one
    x = _batched(x, dims[0], info.batch_size)
    if dims[1] is not None:
        return x.transpose(0, 1), 0
    # (B, W, ...) -> (W, B, ...): rows come first, so the batch is exchanged with them
    return torch.ops.fn.all_to_all(x.movedim(0, 1).contiguous(), rank, size, transport), 1


def _vmap_all_gather(info: Any, dims: Any, x: Tensor, rank: Tensor, size: int, transport: str) -> _Batched:
    x = _batched(x, dims[0], info.batch_size)
    if dims[1] is not None:
        # (W, ...) is what each rank gets. It is the same for all, so the level ends here.
        return x, None
    # (B, ...) -> (W, B, ...)
    return torch.ops.fn.all_gather(x.contiguous(), rank, size, transport), 1


def _vmap_psum(info: Any, dims: Any, x: Tensor, rank: Tensor, size: int, transport: str) -> _Batched:
    x = _batched(x, dims[0], info.batch_size)
    if dims[1] is not None:
        # (W, ...) -> (...)
        return x.sum(0, dtype=x.dtype), None  # of small integers torch's sum would be int64, which no real rank gets
    return torch.ops.fn.psum(x.contiguous(), rank, size, transport), 0


def _vmap_permute(info: Any, dims: Any, x: Tensor, rank: Tensor, perm: list[int], transport: str) -> _Batched:
    if dims[1] is None:
        return torch.ops.fn.permute(x.contiguous(), rank, perm, transport), dims[0]
    if dims[0] is None:
        return x, None  # all ranks send the same
    # (...) of the rank that sends to r, for each r -> (W, ...)
    return torch.stack([x.select(dims[0], perm.index(r)) for r in range(len(perm))]), 0


def raise_if_lost(error: RuntimeError, collective: str, transport: str) -> None:
    """Raise `PeerLost` if a collective failed for a rank that ended or does not answer."""
    if is_loss(error):
        raise peer_lost(error, collective, axes.carried_by(transport), transport) from error


def _define(name: str, run: Callable[..., Tensor], rule: Callable[..., _Batched], last: str = "int size") -> None:
    def run_or_carry(x: Tensor, rank: Tensor, last: Any, transport: str) -> Tensor:
        carrier = carrier_of(transport, [x])
        if carrier.is_registered:
            return carry(x, last, name, transport) if name != "permute" else _carry_permute(x, rank, last, transport)
        try:
            return run(x, last, carrier)
        except RuntimeError as error:
            raise_if_lost(error, name, transport)
            raise

    # Composite: a compiler looks into the op and sees torch's functional collectives, which it can overlap.
    _library.define(f"{name}(Tensor x, Tensor rank, {last}, str transport) -> Tensor")
    _library.impl(name, run_or_carry, "CompositeImplicitAutograd")
    torch.library.register_vmap(f"fn::{name}", rule, lib=_library)


def _carry_permute(x: Tensor, rank: Tensor, perm: list[int], transport: str) -> Tensor:
    to, source = perm[int(rank)], perm.index(int(rank))
    # (...) -> (W, ...), a row for each rank: a registered transport has no call for one receiver alone
    rows = x.new_zeros((len(perm), *x.shape))
    rows[to] = x
    return carry(rows, len(perm), "all_to_all", transport)[source]


_define("all_to_all", _run_all_to_all, _vmap_all_to_all)
_define("all_gather", _run_all_gather, _vmap_all_gather)
_define("psum", _run_psum, _vmap_psum)
_define("permute", _run_permute, _vmap_permute, "int[] perm")

_library.define("count(Tensor x, Tensor ranks, Tensor(a!) tally, str axis, str collective, int size, int per) -> ()")
_library.impl("count", _run_count, "CompositeExplicitAutograd")
torch.library.register_fake("fn::count", lambda *args: None, lib=_library)
torch.library.register_vmap("fn::count", _vmap_count, lib=_library)
