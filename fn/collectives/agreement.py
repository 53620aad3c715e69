"""Do the ranks mean the same thing? A fingerprint of shapes, dtypes and hyper-parameters, compared at init.

A mismatch that is found later is a hang or, with gloo, a wrong number. Digests travel first, texts only where the
digests differ, to name the first rank and the field.
"""

from __future__ import annotations

import enum
import hashlib
import inspect
import itertools
import json
import os
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.base import name_of
from fn.collectives.axis import SIMULATED, AxisNames, axis_size, current_binding, names, ranks_around, resolve
from fn.collectives.codecs.codec import Codec
from fn.collectives.feedback import Feedback
from fn.collectives.following import aside, is_replayed, shared
from fn.collectives.primitives import all_gather, psum
from fn.collectives.profiling import Watchers, watched_by
from fn.collectives.transports.failure_detection import abort_connections
from fn.compiling import original
from fn.errors import SAME_CALL, PeerLost, RanksDisagree
from fn.kernels.table import rows
from fn.kernels.tracing import is_concrete
from fn.version import __version__

Tree = Any

_PLAIN = (int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, type(None))

SHORT = 56
"""Bytes of a text that travel with its length: a digest fits in."""

EXCHANGE, CONSTRUCTION, FIRST_STEP = "the exchange of a round", "the construction of an optimizer", "the first step"

CALLS = (
    EXCHANGE, CONSTRUCTION, "add_param_group", FIRST_STEP, "checkpoint.save", "checkpoint.load",
    "checkpoint.gather", "check_drift",
)  # fmt: skip
"""What ranks may be in when they meet. In a header a call is its number here."""

UNMOVED = "nothing has moved"
"""How parameters and state are where ranks do not agree."""

MARK = 0x666E << 40
"""The beginning of a header. Of a rank that is in a step, which sends none, numbers may arrive in its place."""


class _Here(threading.local):
    """The call that this thread is in, and that the other ranks have heard of; None in no such call."""

    call: str | None = None


_here = _Here()


class Difference(NamedTuple):
    """What ranks do not have alike: a name, and its value on every rank."""

    name: str
    values: list[Any]

    @property
    def rank(self) -> int:
        """The first rank whose value differs from rank 0's."""
        return next(rank for rank, value in enumerate(self.values) if value != self.values[0])

    def error(self, text: str) -> RanksDisagree:
        """Return an error with a text, whose attributes name the rank and what differs."""
        return RanksDisagree(f"ranks disagree: {text}", rank=self.rank, field=self.name)

    @property
    def where(self) -> str:
        """Its values, such as "is 16 on rank 1 and 8 on rank 0"."""
        return f"is {self.values[self.rank]} on rank {self.rank} and {self.values[0]} on rank 0"

    def __str__(self) -> str:
        return f"{self.name} {self.where}"


def differences(named: Mapping[str, Any], gather: Callable[[Any], list[Any]]) -> list[Difference]:
    """Return what differs between ranks: first what differs on the lowest rank, in the order of the names there.

    Every rank must call it. A digest of all values travels, and the values themselves only where the digests differ.

        >>> each = [{"b1": "0.9", "eps": "1e-8"}, {"b1": "0.9", "eps": "1e-6"}]
        >>> [str(d) for d in differences(each[0], lambda x: each if x is each[0] else ["one digest", "another"])]
        ['eps is 1e-6 on rank 1 and 1e-8 on rank 0']

    Args:
        named: name -> value. A name that a rank does not have has the value "missing" there.
        gather: a value -> the values of all ranks, such as `gather_values` of an axis, or `all_gather_object`.
    """
    # Sorted: another order of the same names is no difference.
    if len(set(gather(digest(sorted(named.items()), 24).hex()))) == 1:
        return []
    of_ranks: list[Mapping[str, Any]] = gather(named)
    names = dict.fromkeys(name for values in of_ranks for name in values)
    rows = [Difference(name, [values.get(name, "missing") for values in of_ranks]) for name in names]
    differing = [row for row in rows if any(value != row.values[0] for value in row.values)]
    # A stable sort: within a rank the names keep their order.
    return sorted(differing, key=lambda row: row.rank)


def digest(values: Any, size: int) -> bytes:
    """Return a digest of values' text, in so many bytes."""
    return hashlib.blake2b(repr(values).encode(), digest_size=size).digest()


def header(call: str, axes: Sequence[str], device: torch.device | str, number: int, word: int) -> Tensor:
    """Send a call and two numbers, 16 bytes, to all ranks of some axes; return what they sent, (W, 2).

    Calls that compare begin with it, and so do exchanges. Without it one would read the other's message as its own; of
    messages of two lengths gloo would end the process.

    Args: call: one of `CALLS`. number: less than 2^32. word: an int64.
    """
    first = MARK | number << 8 | CALLS.index(call)
    # Numbers that are filled in are queued; a copy from the host would wait for what was queued before it.
    mine = torch.stack([torch.full((), n, dtype=torch.int64, device=device) for n in (first, word)])  # (2,)
    return _gathered(mine, axes) if axes else mine[None]


def _gathered(x: Tensor, axes: Sequence[str]) -> Tensor:
    """Return the numbers (..., 2) of all ranks, (W, ..., 2), sent as bytes as texts are."""
    with watched_by(Watchers()), aside():  # which no ledger counts, and no log has
        rows: Tensor = all_gather(x.view(torch.uint8), tuple(axes)).view(torch.int64)
    return rows


def check_calls(rows: list[list[int]], axes: Sequence[str], left: str = UNMOVED) -> None:
    """Refuse to go on where the ranks of some axes are in different calls.

    Args: rows: of each rank's `header`. left: how parameters and state are.
    Raises: `RanksDisagree`, on every rank, that names two of them and their calls; `PeerLost` where a rank sent no
        header: it is in a step, which begins with its own messages.
    """
    where = " x ".join(map(repr, axes))
    known = {MARK >> 8 | number: call for number, call in enumerate(CALLS)}
    calls = [known.get(first >> 40 << 32 | first & 0xFF) for first, _ in rows]
    for rank, call in enumerate(calls):
        if call is None:
            text = f"rank {rank} of {where} sent no header, but numbers of something else, of a step perhaps"
            raise PeerLost(f"{text}; {SAME_CALL}; {left}", axis=axes[0])
        if call != calls[0]:
            text = f"rank {rank} of {where} is in {call}, and rank 0 in {calls[0]}"
            raise RanksDisagree(f"ranks disagree: {text}; {SAME_CALL}; {left}", rank=rank, field="call")


@contextmanager
def calling(
    call: str, axes: Sequence[str], device: torch.device | str, word: int = 0, left: str = UNMOVED
) -> Iterator[list[int]]:
    """Tell the other ranks of some axes, which must be bound, what this rank is in, and go on if they are in it.

    Inside of another call nothing is sent: the ranks are together already.

    Args: call: one of `CALLS`. axes: from the last on their ranks hear of it: in front are those within islands, over
        which an exchange sends no header. word: a number for all ranks. left: as for `check_calls`.
    Yields: the words of all ranks.
    Raises: as `check_calls`; a `PeerLost` from inside names the call.
    """
    if _here.call is not None:
        yield [word]
        return
    _here.call, axes = call, [axis for axis in axes if axis_size(axis) > 1]
    try:
        yield _met(call, axes, device, word, left)
    except PeerLost as error:
        for axis in axes:
            abort_connections(resolve(axis).transport)
        error.args = (f"{error}; noticed in {call}",)
        raise
    finally:
        _here.call = None


def _met(call: str, axes: Sequence[str], device: torch.device | str, word: int, left: str) -> list[int]:
    rows: list[list[int]] = header(call, axes[-1:], device, 0, word).tolist()
    for i in range(len(axes) - 1, 0, -1):
        # An exchange goes no further, so nobody else would answer there.
        if any(first & 0xFF == CALLS.index(EXCHANGE) for first, _ in rows):
            check_calls(rows, axes[i:], left)
        # (W, 2) -> (V, W, 2) -> (V W, 2)
        rows = _gathered(torch.tensor(rows, dtype=torch.int64, device=device), axes[i - 1 : i]).flatten(0, 1).tolist()
    if axes:
        check_calls(rows, axes, left)
    return [word for _, word in rows]


def true_on_all(flag: Tensor, axes: Sequence[str], device: torch.device) -> Tensor:
    """Return whether a flag, 0-d bool, is true on all ranks of some axes: four bytes a rank and axis.

        >>> import torch, fn
        >>> from fn.collectives.agreement import true_on_all
        >>> all_true = lambda flag: true_on_all(flag, ["shard"], flag.device)
        >>> fn.simulate(all_true, "shard", 2, out_dims=None)(torch.tensor([True, False]))
        tensor(False)

    Args: device: where the axes' groups exchange; the same kind on all ranks, although a flag may lie on the host.
    """
    over = tuple(axis for axis in axes if axis_size(axis) > 1)

    def asked() -> Tensor:
        found = flag
        for axis in over:
            # Counted is who says no: `psum` has no sum of truth values.
            found = psum((~found).to(device, torch.int32), axis) == 0
        return found

    # The answer alone, which is alike on all of the axes; each sum is on one of them.
    answer: Tensor = shared("true", over, lambda: flag.to(device), asked) if over else flag
    return answer


def gather_values(value: Any, axis: AxisNames, device: torch.device | str = "cpu") -> list[Any]:
    """Return the values of all ranks of an axis, as JSON gives them back; every rank must call it.

    Args: value: what JSON can say. device: where the exchange takes place (NCCL needs the accelerator).
    """
    text = json.dumps(value).encode()
    if axis_size(axis) == 1:
        return [json.loads(text)]
    # Ranks must know how long the longest text is before they exchange it. A short one travels with its length.
    heads = _gather_bytes(len(text).to_bytes(8, "little") + text[:SHORT].ljust(SHORT), axis, device)
    longest = max(int.from_bytes(head[:8], "little") for head in heads)
    tails = [b""] * len(heads)
    if longest > SHORT:
        tails = _gather_bytes(text[SHORT:].ljust(longest - SHORT), axis, device)
    return [json.loads(head[8:] + tail) for head, tail in zip(heads, tails, strict=True)]


def _gather_bytes(data: bytes, axis: AxisNames, device: torch.device | str) -> list[bytes]:
    # (bytes,) -> (W, bytes)
    with aside():
        rows = all_gather(torch.tensor(list(data), dtype=torch.uint8, device=device), axis)
    return [bytes(row) for row in rows.cpu().tolist()]


def check_agreement(axis: AxisNames, fields: Mapping[str, object], device: torch.device | str = "cpu") -> None:
    """Compare fields over the ranks of an axis, or of several; every rank must call it.

    Simulated and replayed ranks run the same call and always agree. Kernels are compared, too: others round
    differently, and send other things.

    Args:
        axis: the axis' name, or several names; these must reach as many ranks as their sizes' product.
        fields: name -> value; values are compared as text.
        device: where the exchange takes place (NCCL needs the accelerator).
    Raises: `RanksDisagree`, on every rank, that names the first rank and field that differ from rank 0.
    """
    if axis_size(axis) == 1 or any(resolve(name).transport == SIMULATED for name in names(axis)) or is_replayed(axis):
        return
    with calling(CONSTRUCTION, names(axis), device):
        if not isinstance(axis, str):
            # First: over axes that are no grid the texts of some ranks would be gathered twice, and of others never.
            _check_grid(names(axis), device)
        mine = {**_surroundings(), **{name: str(value) for name, value in fields.items()}}
        mine["the list of kernels (`python -m fn table`)"] = _kernels_here(device)
        for difference in differences(mine, partial(gather_values, axis=axis, device=device))[:1]:
            raise difference.error(f"{difference}; make it the same on all ranks; {UNMOVED}")


def check_numbers(axis: str, numbers: Mapping[str, str], device: torch.device, cure: str) -> None:
    """Compare the numbers of tensors over the ranks of an axis; every rank must call it.

    Args: numbers: by name, as `describe_numbers` describes them. cure: what to do if they differ.
    Raises: `RanksDisagree`, on every rank, that names the first rank and tensor that differ from rank 0.
    """
    for difference in differences(numbers, partial(gather_values, axis=axis, device=device))[:1]:
        text = f"the numbers of {difference.name} are others on rank {difference.rank} of axis {axis!r} than on rank 0"
        raise difference.error(f"{text}; {cure}")


def _surroundings() -> dict[str, str]:
    """Return what must be alike whatever is compared: versions, and how large the bound axes are."""
    sizes = {f"size of axis {name!r}": str(bound.size) for name, bound in current_binding().axes.items()}
    return {"version of fn": __version__, "version of torch": torch.__version__, **sizes}


def _check_grid(axis: tuple[str, ...], device: torch.device | str) -> None:
    """Refuse axes that do not make a grid: every rank must be reached once, by a number of its own."""
    sizes = " x ".join(str(axis_size(name)) for name in axis)
    reached = len(set(_gather_bytes(os.urandom(16), axis, device)))
    if reached != axis_size(axis):
        raise ValueError(
            f"axis: the sizes of {axis}, {sizes}, do not multiply to the {reached} ranks that these axes reach"
        )
    around = ranks_around()
    if set(axis) == set(current_binding().axes) and around not in (1, reached):  # 1: nobody says how many there are
        raise ValueError(
            f"axis: the sizes of {axis}, {sizes}, do not multiply to the world of {around} ranks; if the others are "
            f"meant to train apart, bind the axis that tells them apart too"
        )


def device_of(params: Tree) -> torch.device:
    """Return the device of the first tensor, where `check_agreement` can exchange; the CPU without any."""
    return next((p.device for p in tree.leaves(params) if isinstance(p, Tensor)), torch.device("cpu"))


def describe_leaves(params: Tree) -> dict[str, str]:
    """Return the path, shape and dtype of every leaf, and their order, for `check_agreement`."""
    paths = tree.paths(params)
    leaves = zip(paths, tree.leaves(params), strict=True)
    order = {f"leaf {i} of the params": path for i, path in enumerate(paths) if not path.isdecimal()}
    return {**{f"params[{path}]": f"{tuple(p.shape)} {p.dtype}" for path, p in leaves}, **order}


def check_order(axes: Sequence[str], params: Tree, lists: Mapping[str, Iterable[int]] | None = None) -> None:
    """Compare over axes which leaves of the params are in lists, and in which order; every rank must call it.

    What is shown a list knows no keys. Ranks whose dicts have another order, or that chose other leaves of the same
    shape, would average one parameter with another.

    Args: axes: of what is shown the lists. lists: a name -> the numbers of the leaves in it; None: one of all.
    Raises: as `check_agreement`.
    """
    if not axes:
        return
    paths = tree.paths(params)
    lists = {"the params": range(len(paths))} if lists is None else lists
    fields = {f"leaf {n} of {name}": paths[i] for name, chosen in lists.items() for n, i in enumerate(chosen)}
    check_agreement(axes[0] if len(axes) == 1 else tuple(axes), fields, device_of(params))


def describe(value: Any) -> dict[str, str]:
    """Return the settings that a value holds, by name: numbers, names and dtypes, looking into tuples and partials.

    A transform holds the rules of its links, NamedTuples of hyper-parameters; a link without a rule counts by its name.
    A codec or a feedback counts as the call that makes it. Nobody looks into what a function closes over, or into a
    dataclass's field with compare=False.

        >>> import fn
        >>> describe(fn.scale_by_adam(b1=0.8))["scale_by_adam.b1"]
        '0.8'

    A tensor of several numbers, and one that `torch.func.vmap` batches, counts by its shape and dtype. A tensor among
    the arguments of a codec or a feedback also counts by a digest of its numbers: every rank decodes with them what the
    others encoded.
    """
    texts: dict[str, str] = {}
    for name, text in _texts(value, type(value).__name__):
        numbered = (f"{name}#{number}" if number > 1 else name for number in itertools.count(1))
        texts[next(unique for unique in numbered if texts.get(unique, text) == text)] = text
    return texts


def _texts(value: Any, name: str, shared: bool = False) -> Iterator[tuple[str, str]]:
    """Yield the settings that `describe` returns. shared: the value is an argument of a codec or a feedback."""
    value = original(value)
    if isinstance(value, Codec | Feedback):
        shared, value = True, value if value.make is None else value.make
    if isinstance(value, partial):
        made_by = getattr(value.func, "__name__", name)
        yield name, made_by  # before its arguments: where ranks have other codecs, that is what the message says
        name = made_by
        value = inspect.signature(value.func).bind_partial(*value.args, **value.keywords).arguments
    if isinstance(value, Tensor):
        yield name, _text_of_tensor(value, shared)
    elif isinstance(value, tuple | list | Mapping):
        keys = value if isinstance(value, Mapping) else getattr(value, "_fields", range(len(value)))
        items = value.values() if isinstance(value, Mapping) else value
        owner = name_of(value) if callable(value) and hasattr(value, "_fields") else name  # of a rule: its link
        for key, item in zip(keys, items, strict=True):
            yield from _texts(item, f"{owner}.{key}".rstrip("."), shared)
    elif callable(value):
        yield name, getattr(value, "__qualname__", type(value).__name__)
        if not isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
            fields = getattr(value, "__dataclass_fields__", {})
            for key, item in getattr(value, "__dict__", {}).items():  # an object that can be called, such as a schedule
                if key not in fields or fields[key].compare:
                    yield from _texts(item, f"{type(value).__name__}.{key}", shared)
    elif isinstance(value, _PLAIN):
        yield name, repr(value)
    else:
        yield name, type(value).__name__  # its repr may hold an address, which differs between processes


def _text_of_tensor(x: Tensor, shared: bool) -> str:
    if _is_one_number(x):
        number = x.item()
        # Nine digits tell all float32 numbers apart; float64 and whole numbers have more.
        return f"{number:.9g}" if isinstance(number, float) and x.element_size() <= 4 else repr(number)
    form = f"{tuple(x.shape)} {x.dtype}"
    if not shared or x.device.type == "meta" or not is_concrete(x):
        return form
    # (...) -> (n,) -> (bytes,): NumPy has no bfloat16
    numbers = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{form} {hashlib.blake2b(numbers.tobytes(), digest_size=8).hexdigest()}"


def _is_one_number(x: Tensor) -> bool:
    """Tell whether a tensor is one number; one that `torch.func.vmap` batches is many, which have no text in common."""
    while torch._C._functorch.is_gradtrackingtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x.numel() == 1 and not torch._C._functorch.is_batchedtensor(x)


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(x: Tensor) -> Tensor:
    """Return the sum of a tensor's words as integers, modulo 2^64, 0-d int64: any single flipped bit changes it."""
    # (...) -> (n,) whole numbers, whose sum does not depend on the order of the additions
    words = x.detach().contiguous().view(-1).view(_WORDS.get(x.element_size(), torch.int64))
    return words.sum(dtype=torch.int64)


def describe_numbers(named: Mapping[str, Tensor]) -> dict[str, str]:
    """Return shape, dtype and checksum of tensors as text, for `differences`; a device is waited for once."""
    if not named:
        return {}
    device = next(iter(named.values())).device
    # 0-d of each tensor -> (tensors,), which the host reads in one go
    sums = torch.stack([checksum(x).to(device) for x in named.values()]).tolist()
    pairs = zip(named.items(), sums, strict=True)
    return {name: f"{x.dtype} {tuple(x.shape)} with checksum {s & (1 << 64) - 1:016x}" for (name, x), s in pairs}


def _kernels_here(device: torch.device | str) -> str:
    """Return the names of the rows that serve a device here, in the order in which they are asked."""
    device_type = torch.device(device).type
    return f"{', '.join(row.name for row in rows(device_type)) or 'the reference'} ({device_type})"
