"""Which tensors of optimizers are matrices of hidden layers: what `fn.labels_of` says of the modules that hold them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

WIDEST = 4
"""A matrix whose longer side is more times the other is taken for an embedding, a head or a router, where no module
says what it is. That of an MLP has four times as many rows as columns; vocabularies are longer."""


class Hidden(NamedTuple):
    """flags: of each tensor, whether it is a matrix of a hidden layer, or a stack of them.

    by_shape: how many of the tensors no module holds, so that only shapes tell.
    """

    flags: tuple[bool, ...]
    by_shape: int


def hidden_of(params: Sequence[Tensor]) -> Hidden:
    """Return which of the params are hidden.

    >>> import torch
    >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 12), torch.nn.Linear(12, 9))
    >>> hidden_of([*model.parameters(), torch.ones(5, 20), torch.ones(5, 21)])
    Hidden(flags=(False, True, False, False, False, True, False), by_shape=2)
    """
    # Here, for who plans without a script needs no adapters.
    from fn.adapters.holders import roots_of
    from fn.adapters.labels import labels_of

    labels: dict[int, str] = {}
    for module, _ in sorted(roots_of(params)[0], key=lambda root: root[1]):
        named = labels_of(module)
        for name, p in module.named_parameters():
            labels.setdefault(id(p), named[name])
    flags = tuple(labels[id(p)] == "hidden" if id(p) in labels else _looks_hidden(p) for p in params)
    return Hidden(flags, sum(id(p) not in labels for p in params))


def _looks_hidden(p: Tensor) -> bool:
    return p.ndim == 2 and max(p.shape) <= WIDEST * min(p.shape)
