"""Which parameters of a module are matrices of hidden layers, the ones that Muon and Dion are for: `labels_of`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from fn import tree
from fn.errors import expected


class Labels(dict[str, str]):
    """The label of each parameter of a module by its name, which may be changed: what `labels_of` returns.

    As a function it labels a tree with these names as paths, such as `dict(model.named_parameters())` in a pure loop.
    `fn.Optimizer` looks up the parameters of its groups in it, whatever their order.
    """

    def __init__(self, parameters: Iterable[tuple[str, Tensor]], labels: Iterable[str]) -> None:
        self._names = [(p, name) for name, p in parameters]
        super().__init__(zip((name for _, name in self._names), labels, strict=True))

    def __call__(self, params: Any) -> Any:
        """Return the labels of a tree whose paths are names of parameters.

        Raises: ValueError if it has other paths.
        """
        paths = tree.paths(params)
        if unknown := [path for path in paths if path not in self]:
            wanted = "a tree like dict(model.named_parameters())"
            cure = "give fn.Optimizer labels=fn.labels_of(model) beside its make, not inside of it"
            raise ValueError(expected("params", wanted, f"one with the path {unknown[0]!r}", cure))
        return tree.unflatten(tree.flatten(params)[1], [self[path] for path in paths])

    def of(self, params: Iterable[Tensor]) -> tuple[str, ...]:
        """Return the label of each of these parameters of the module.

        Raises: ValueError for a tensor that is none of its parameters.
        """
        names = {id(p): name for p, name in self._names}
        return tuple(self[self._name_of(p, names)] for p in params)

    def _name_of(self, p: Tensor, names: dict[int, str]) -> str:
        if id(p) not in names:
            got = f"a tensor of shape {tuple(p.shape)} that is none of them"
            cure = "call fn.labels_of on the model whose parameters are trained, after its last change"
            raise ValueError(expected("labels", "labels of all parameters", got, cure))
        return names[id(p)]


def labels_of(model: nn.Module, heads: Iterable[nn.Module] | None = None) -> Labels:
    """Label the parameters of a module: matrices of hidden layers "hidden", everything else "other".

    "other" are tensors of less than two dimensions, embeddings, and heads, also where a weight is tied to one. Muon and
    Dion orthogonalise what they are given, which suits a map from activations to activations; the rows of an embedding
    or a head belong to single tokens, so their authors give these to AdamW.

        >>> import torch, fn
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 9))
        >>> fn.labels_of(model)
        {'0.weight': 'other', '1.weight': 'hidden', '1.bias': 'other', '2.weight': 'other', '2.bias': 'other'}
        >>> tx = fn.muloco(0.02, axis="data", labels=fn.labels_of(model))       # or fn.Optimizer(..., labels=...)

    Args:
        model: the module that is trained; one that is wrapped, in DistributedDataParallel say, has the names of the
            wrapper.
        heads: the modules that make its outputs. None: `model.get_output_embeddings()` where there is such a method, as
            in transformers, else the linear layer that is registered last. Pass [] if it has none.
    Returns: a dict from names to labels. Look at it, and change what it does not know: `labels["probe"] = "other"`.
    Raises: TypeError if model is no module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(expected("model", "a torch.nn.Module", type(model).__name__))
    embeddings = [part for part in model.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    heads = _heads(model) if heads is None else list(heads)
    other = {id(p) for part in [*embeddings, *heads] for p in part.parameters()}
    pairs = [*model.named_parameters()]
    return Labels(pairs, ["other" if p.ndim < 2 or id(p) in other else "hidden" for _, p in pairs])


def _heads(model: nn.Module) -> list[nn.Module]:
    """Return the modules that make a model's outputs, as far as it tells."""
    inside: Any = next((part for part in model.modules() if hasattr(part, "get_output_embeddings")), None)
    if inside is not None:
        return [head for head in [inside.get_output_embeddings()] if head is not None]
    linear: list[nn.Module] = [part for part in model.modules() if isinstance(part, nn.Linear)]
    return linear[-1:]
