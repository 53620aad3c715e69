"""Do the ranks mean the same thing? A fingerprint of shapes, dtypes and hyper-parameters, compared at init.

A mismatch that is found later is a hang or, with gloo, a wrong number. Digests travel first, texts only where the
digests differ, to name the first rank and the field.
"""

from __future__ import annotations

import enum
import hashlib
import json
import os
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fn import tree
from fn.base import Step
from fn.collectives.axis import (  # fmt: skip
    SIMULATED,
    AxisNames,
    axis_index,
    axis_size,
    current_binding,
    names,
    ranks_around,
    resolve,
)
from fn.collectives.codecs.codec import Codec
from fn.collectives.feedback import Feedback
from fn.collectives.primitives import all_gather
from fn.errors import RanksDisagree
from fn.kernels.table import rows
from fn.kernels.tracing import is_concrete
from fn.version import __version__

Tree = Any

_PLAIN = (int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device, type(None))

_said: set[str] = set()



def check_agreement(axis: AxisNames, fields: Mapping[str, object], device: torch.device | str = "cpu") -> None:
    """Compare fields over the ranks of an axis, or of several; every rank must call it.

    Simulated ranks run the same call and always agree. Kernels may differ, with a warning on rank 0: ranks with other
    devices can train together, but round differently.

    Args:
        axis: the axis' name, or several names; these must reach as many ranks as their sizes' product.
        fields: name -> value; values are compared as text.
        device: where the exchange takes place (NCCL needs the accelerator).
    Raises: `RanksDisagree`, on every rank, that names the first rank and field that differ from rank 0.
    """
    if axis_size(axis) == 1 or any(resolve(name).transport == SIMULATED for name in names(axis)):
        return
    if not isinstance(axis, str):
        _check_grid(names(axis), device)
    mine = {**_surroundings(), **{name: str(value) for name, value in fields.items()}}
    text = json.dumps(mine).encode()  # in the order of the fields, so that the first that differs is the first named
    kernels = rows_here(device).encode()
    digest = _digest(json.dumps(mine, sort_keys=True).encode()) + len(text).to_bytes(8, "little")
    digests = _gather_bytes(digest + _digest(kernels) + len(kernels).to_bytes(8, "little"), axis, device)
    if any(d[:32] != digests[0][:32] for d in digests):
        _refuse([json.loads(t) for t in _gather_texts(text, [d[24:32] for d in digests], axis, device)])
    if any(d[32:] != digests[0][32:] for d in digests):
        found = _gather_texts(kernels, [d[56:] for d in digests], axis, device)
        if not axis_index(axis):
            warn_of_other_kernels([t.decode() for t in found], axis)


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


def _digest(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=24).digest()


def gather_texts(text: str, axis: AxisNames, device: torch.device | str = "cpu") -> list[str]:
    """Return the texts of all ranks of an axis; every rank must call it. device: where the exchange takes place."""
    data = text.encode()
    lengths = _gather_bytes(len(data).to_bytes(8, "little"), axis, device)
    return [found.decode() for found in _gather_texts(data, lengths, axis, device)]


def _gather_texts(
    text: bytes, lengths: list[bytes], axis: AxisNames, device: torch.device | str
) -> list[bytes]:
    """Return the text of every rank, of which the lengths are known."""
    longest = max(int.from_bytes(n, "little") for n in lengths)
    return [t.rstrip(b" ") for t in _gather_bytes(text.ljust(longest), axis, device)]


def _gather_bytes(data: bytes, axis: AxisNames, device: torch.device | str) -> list[bytes]:
    rows = all_gather(torch.tensor(list(data), dtype=torch.uint8, device=device), axis)
    return [bytes(row) for row in rows.cpu().tolist()]


def _refuse(texts: list[dict[str, str]]) -> None:
    first = texts[0]
    for rank, found in enumerate(texts):
        for name in [*first, *sorted(set(found) - set(first))]:
            theirs, ours = found.get(name, "nothing"), first.get(name, "nothing")
            if theirs != ours:
                message = (
                    f"ranks disagree: {name} is {theirs} on rank {rank} and {ours} on rank 0; make it the same on "
                    f"all ranks; nothing has moved"
                )
                raise RanksDisagree(message, rank=rank, field=name)


def device_of(params: Tree) -> torch.device:
    """Return the device of the first leaf, where `check_agreement` can exchange; the CPU without leaves."""
    return next((p.device for p in tree.leaves(params)), torch.device("cpu"))


def describe_leaves(params: Tree) -> dict[str, str]:
    """Return the path, shape and dtype of every leaf, and their order, for `check_agreement`."""
    paths = tree.paths(params)
    leaves = zip(paths, tree.leaves(params), strict=True)
    order = {f"leaf {i} of the params": path for i, path in enumerate(paths) if not path.isdecimal()}
    return {**{f"params[{path}]": f"{tuple(p.shape)} {p.dtype}" for path, p in leaves}, **order}


def describe(value: Any) -> dict[str, str]:
    """Return the hyper-parameters that a value holds, by name, looking into closures, tuples and partials.

    Transforms, codecs and feedbacks are NamedTuples of closures, so their hyper-parameters are what these close
    over: `describe(scale_by_adam())["scale_by_adam.b1"]` is "0.9". Of a tensor of several numbers, and of one that
    `torch.func.vmap` batches, it is shape and dtype; in a codec or a feedback, of which every rank reads what others
    wrote, a digest of the numbers, too.
    """
    found: dict[str, str] = {}
    _describe(value, type(value).__name__, found, set())
    return found


def _describe(value: Any, name: str, found: dict[str, str], seen: set[int], shared: bool = False) -> None:
    """Note what `describe` says. shared: of a codec or a feedback."""
    shared = shared or isinstance(value, Codec | Feedback)
    if isinstance(value, Step):
        value = value.run  # which closes over all that its rule says
    if isinstance(value, Tensor):
        _note(name, _describe_tensor(value, shared), found)
    elif isinstance(value, tuple | list):
        names = getattr(value, "_fields", range(len(value)))
        for key, item in zip(names, value, strict=True):
            _describe(item, f"{name}.{key}", found, seen, shared)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            _describe(item, f"{name}.{key}", found, seen, shared)
    elif isinstance(value, partial):
        _describe((value.func, value.args, value.keywords), name, found, seen, shared)
    elif callable(value):
        _describe_function(value, name, found, seen, shared)
    elif isinstance(value, _PLAIN):
        _note(name, repr(value), found)
    else:
        _note(name, type(value).__name__, found)  # its repr may hold an address, which differs between processes


def _is_one_number(x: Tensor) -> bool:
    """Tell whether a tensor is one number; one that `torch.func.vmap` batches is many, which have no text in common."""
    while torch._C._functorch.is_gradtrackingtensor(x):
        x = torch._C._functorch.get_unwrapped(x)
    return x.numel() == 1 and not torch._C._functorch.is_batchedtensor(x)


def _describe_tensor(x: Tensor, shared: bool) -> str:
    if _is_one_number(x):
        return f"{x.item():.9g}"
    form = f"{tuple(x.shape)} {x.dtype}"
    if not shared or x.device.type == "meta" or not is_concrete(x):
        return form
    numbers = x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return f"{form} {hashlib.blake2b(numbers.tobytes(), digest_size=8).hexdigest()}"


def _describe_function(f: Callable[..., Any], name: str, found: dict[str, str], seen: set[int], shared: bool) -> None:
    if id(f) in seen:
        return
    seen.add(id(f))
    owner = getattr(f, "__qualname__", type(f).__name__)
    _note(name, owner, found)
    code, cells = getattr(f, "__code__", None), getattr(f, "__closure__", None) or ()
    for variable, cell in zip(code.co_freevars if code else (), cells, strict=True):
        if cell != types.CellType():  # an empty cell is a name that its function has not bound yet
            _describe(cell.cell_contents, f"{owner.split('.')[0]}.{variable}", found, seen, shared)
    if not isinstance(f, type | types.FunctionType | types.BuiltinFunctionType):  # an object that can be called
        for key, item in getattr(f, "__dict__", {}).items():
            _describe(item, f"{owner.split('.')[0]}.{key}", found, seen, shared)


def _note(name: str, value: str, found: dict[str, str]) -> None:
    """Write a value down; where the name is taken by another one, number it."""
    unique, number = name, 1
    while found.get(unique, value) != value:
        number += 1
        unique = f"{name}#{number}"
    found[unique] = value


def rows_here(device: torch.device | str) -> str:
    """Return the names of the rows that serve a device here, in the order in which they are asked."""
    device_type = torch.device(device).type
    return f"{', '.join(row.name for row in rows(device_type)) or 'the reference'} ({device_type})"


def warn_of_other_kernels(found: Sequence[str], axis: AxisNames) -> None:
    """Warn, once, of ranks whose kernels are not those of rank 0. found: `rows_here` of every rank."""
    others = {rank: rows for rank, rows in enumerate(found) if rows != found[0]}
    first = min(others)
    more = f" and {len(others) - 1} more ranks" if len(others) > 1 else ""
    text = (
        f"kernels: those of rank {first}{more} of axis {axis!r} are {others[first]}, those of rank 0 {found[0]}; they "
        f"round differently, so weights that all ranks should hold alike drift apart, a last bit at a time; install "
        f"the same packages on all ranks (`python -m fn` lists what is there), or, where the devices differ, average "
        f"the params every few hundred steps with fn.pmean"
    )
    if text not in _said:
        _said.add(text)
        warnings.warn(text, stacklevel=2)
