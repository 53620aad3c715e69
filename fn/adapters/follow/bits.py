"""The bits of a model's tensors as they change from step to step: what a log of params has, and buffers beside codes.

    change = bits behind the step XOR bits before, all first bytes of the elements, then all second ones, ...; deflated

Signs, exponents and the upper digits seldom change: their bytes are mostly zero, and lie together.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fn.adapters.follow.log_format import Data, Key
from fn.adapters.holders import roots_of
from fn.adapters.optim.shards import is_dtensor
from fn.errors import expected

BITS: Key = ("bits",)
"""The key of the record of changes, one for each tensor in the order of names; no bytes where nothing changed."""


def models_of(params: Sequence[Tensor]) -> tuple[list[nn.Module], bool]:
    """Return the outermost modules that hold some of the params, without what DDP and `torch.compile` put around them.

    Returns: the modules, in no order, and whether all params are held.
    """
    roots, held = roots_of(params)
    inside = {id(x): x for x in (_unwrapped(root) for root, _ in roots)}
    return [*inside.values()], held == len(params)


def model_of(params: Sequence[Tensor], name: str) -> nn.Module:
    """Return the one module around all params. name: of the argument that asks for it. Raises: ValueError."""
    models, are_all = models_of(params)
    if len(models) != 1 or not are_all:
        got = ", ".join(sorted(type(x).__name__ for x in models)) or "none"
        cure = "hold all in one module, such as an nn.ModuleDict; followers take one like it"
        raise ValueError(expected(name, "one module around all parameters of the optimizer", got, cure))
    return models[0]


def _unwrapped(model: Any) -> nn.Module:
    while True:
        inside = model.module if isinstance(model, DistributedDataParallel) else getattr(model, "_orig_mod", None)
        if inside is None:
            found: nn.Module = model
            return found
        model = inside


def tensors_of(model: nn.Module, *, params: bool, buffers: bool) -> dict[str, Tensor]:
    """Return tensors of a model by the names that snapshots have of them, in the order of these."""
    found: dict[str, Tensor] = {**dict(model.named_parameters())} if params else {}
    found |= dict(model.named_buffers()) if buffers else {}
    return {f"model.{name}": found[name].detach() for name in sorted(found)}


def copies_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies in the host's memory; of DTensors, all ranks that have a piece must call `whole`."""
    return {name: _copy(whole(x)) for name, x in tensors.items()}


def whole(x: Tensor) -> Tensor:
    """Return a tensor, of a DTensor the pieces of all ranks."""
    return x.full_tensor() if is_dtensor(x) else x


def changes(before: Mapping[str, Tensor], behind: Mapping[str, Tensor]) -> list[bytes]:
    """Return the change of each tensor, of copies in the host's memory."""
    return [_change(x, behind[name]) for name, x in before.items()]


@torch.no_grad()
def change(tensors: Iterable[Tensor], by: Iterable[Data]) -> None:
    """Change tensors as a record says."""
    for x, data in zip(tensors, by, strict=True):
        if data:
            own, width = _copy(x), x.element_size()
            planes = torch.frombuffer(bytearray(zlib.decompress(data)), dtype=torch.uint8)
            # (bytes of an element, elements) -> (elements * bytes,)
            _bytes(own).bitwise_xor_(planes.view(width, -1).t().reshape(-1))
            x.copy_(own)


class Buffers:
    """The buffers of a model beside the codes of its params; where they do not travel, a warning when they change."""

    def __init__(self, params: Sequence[Tensor], *, travel: bool):
        models = [model_of(params, "buffers")] if travel else models_of(params)[0]
        self._models, self._travel = models, travel
        self.begin()

    def now(self) -> dict[str, Tensor]:
        """Return those that travel, by the names that snapshots have of them."""
        return tensors_of(self._models[0], params=False, buffers=True) if self._travel else {}

    def begin(self) -> None:
        """Take what there is as what followers begin with."""
        self._copies, self._versions = copies_of(self.now()), self._seen()

    def changed(self) -> list[tuple[Key, list[Data]]]:
        """Return a record of what was changed since the last call, if anything was."""
        if self._travel:
            before, self._copies = self._copies, copies_of(self.now())
            record: list[Data] = [*changes(before, self._copies)]
            return [(BITS, record)] if any(record) else []
        if (seen := self._seen()) != self._versions:
            name = next((name for name, version in seen if (name, version) not in self._versions), "")
            text = f"the model's buffers, such as {name!r}, change and are not in the log"
            warnings.warn(f"publish: {text}; say buffers=True for followers to have rank 0's", stacklevel=2)
            self._models, self._versions = [], []  # said once
        return []

    def _seen(self) -> list[tuple[str, int]]:
        return [(name, x._version) for model in self._models for name, x in model.named_buffers()]


def _change(before: Tensor, behind: Tensor) -> bytes:
    both = _bytes(before) ^ _bytes(behind)
    if not both.any():
        return b""
    # (elements * bytes,) -> (bytes of an element, elements)
    planes = both.view(-1, behind.element_size()).t().contiguous()
    # Runs of zeros and Huffman codes: twice as fast as to look for other repetitions, of which there are none.
    deflate = zlib.compressobj(strategy=zlib.Z_RLE)
    return deflate.compress(planes.numpy().data) + deflate.flush()


def _copy(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="cpu").copy_(x.detach())


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)
