"""Which parameters of a module are matrices of hidden layers, the ones that Muon and Dion are for: `labels_of`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from torch import Tensor, nn

from fn import tree
from fn.arguments import check_kind
from fn.errors import expected
from fn.transforms.mask_and_partition import Label


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


def labels_of(
    model: nn.Module,
    heads: Iterable[nn.Module] | None = None,
    *,
    splits: Mapping[str, Sequence[int]] | None = None,
    num_heads: Mapping[str, int] | None = None,
) -> Labels:
    """Label the parameters of a module: matrices of hidden layers "hidden", everything else "other".

    "other" are tensors of less than two dimensions, embeddings, also of positions, routers of experts, and heads, also
    where a weight is tied to one. Muon and Dion orthogonalise what they are given, which suits a map from activations
    to activations; the rows of an embedding or a head belong to single tokens, so their authors give these to AdamW.

    Of tensors with more dimensions only stacks of experts are "hidden": the matrices of a module, or a parameter, with
    "expert" in its name. Where a gate_up_proj of transformers has two matrices in the rows of one, both are taken by
    themselves. Convolutions are "other"; `labels["conv.weight"] = "hidden"` makes one a stack of its kernels.

        >>> import torch, fn
        >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 12), torch.nn.Linear(12, 9))
        >>> fn.labels_of(model)
        {'0.weight': 'other', '1.weight': 'hidden', '1.bias': 'other', '2.weight': 'other', '2.bias': 'other'}
        >>> labels = fn.labels_of(model, splits={"1.weight": (4, 4, 4)})        # queries, keys and values in one matrix
        >>> tx = fn.muloco(0.02, axis="data", labels=labels)                    # or fn.Optimizer(..., labels=...)

    Args:
        model: the module that is trained; one that is wrapped, in DistributedDataParallel say, has the names of the
            wrapper.
        heads: the modules that make its outputs. None: `model.get_output_embeddings()` where there is such a method, as
            in transformers, else the linear layer that is registered last. Pass [] if it has none.
        splits: the name of a parameter -> the sizes of the blocks of rows that are matrices of their own, in order; of
            a stack, of the rows of each matrix. num_heads: the name of a matrix -> how many attention heads of equal
            rows it has, each a matrix of its own. What is named is "hidden", whatever it is.
    Returns: a dict from names to labels. Look at it, and change what it does not know: `labels["probe"] = "other"`.
    Raises: TypeError if model is no module; ValueError for a name that is no parameter, or sizes that do not fit it.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(expected("model", "a torch.nn.Module", type(model).__name__))
    for argument, given in (("splits", splits), ("num_heads", num_heads)):
        if given is not None:
            check_kind(argument, given, Mapping, "a mapping from names of parameters, or None")
    embeddings = [part for part in model.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    heads = _heads(model) if heads is None else _checked(heads)
    other = {id(p) for part in [*embeddings, *heads] for p in part.parameters()}
    params = dict(model.named_parameters())
    labels = _by_name(model) | {name: "other" for name, p in params.items() if id(p) in other}
    for name, sizes in (splits or {}).items():
        labels[name] = Label("hidden", splits=_checked_splits(params, name, sizes))
    for name, count in (num_heads or {}).items():
        if name in (splits or {}):
            cure = "heads of equal rows need no splits"
            raise ValueError(expected("num_heads", "no parameter that splits names as well", repr(name), cure))
        labels[name] = Label("hidden", heads=_checked_heads(params, name, count))
    return Labels(params.items(), labels.values())


def _checked(heads: Any) -> list[nn.Module]:
    wanted = "modules in an iterable, or None"
    check_kind("heads", heads, Iterable, wanted)
    listed: list[nn.Module] = [*heads]
    for head in listed:
        check_kind("heads", head, nn.Module, wanted)
    return listed


def _heads(model: nn.Module) -> list[nn.Module]:
    """Return the modules that make a model's outputs, as far as it tells."""
    inside: Any = next((part for part in model.modules() if hasattr(part, "get_output_embeddings")), None)
    if inside is not None:
        return [head for head in [inside.get_output_embeddings()] if head is not None]
    linear: list[nn.Module] = [part for part in model.modules() if isinstance(part, nn.Linear)]
    return linear[-1:]


_EXPERTS = re.compile("expert|moe$", re.IGNORECASE)
"""In the name of a parameter or of its module, or in that of the module's class."""
_ROUTER = re.compile(r"(^|_)router$|^gate$|(expert|router)s?_gate$")
"""In the name of a module that a parameter lies in; that of a gated layer, gate_proj, is none."""
_ROUTER_CLASS = re.compile("(Router|Gate)$")
_EMBEDDING = re.compile(r"(^|_)(pos|positions?|positional|emb|embeds?|embeddings?|tokens?)(_|$)")
"""In the own name of a parameter, such as pos_embed or relative_position_bias_table."""


def _by_name(model: nn.Module) -> dict[str, str]:
    """Return the label of each parameter by its name, its shape, and the modules that it lies in."""
    modules, params = dict(model.named_modules(remove_duplicate=False)), dict(model.named_parameters())
    stacks = {name: p for name, p in params.items() if p.ndim > 2 and _is_stack(name, modules)}
    counts = dict[str, set[int]]()  # the module of a router -> the numbers of experts beside it
    for name, p in stacks.items():
        inside, _, own = name.rpartition(".")
        # Beside a module of experts lies its router; a parameter `experts` lies beside that itself.
        around = inside if _EXPERTS.search(own) else inside.rpartition(".")[0]
        for module in modules:
            if module in (inside, around) or module.rpartition(".")[0] == around:
                counts.setdefault(module, set()).add(p.shape[0])

    def label(name: str, p: Tensor) -> str:
        inside, _, own = name.rpartition(".")
        if name in stacks:
            return _of_stack(own, p, params.get(f"{inside}.down_proj".lstrip(".")))
        above = [*accumulate(inside.split("."), "{}.{}".format)] if inside else []
        routes = any(
            _ROUTER.search(module.rpartition(".")[2]) or _ROUTER_CLASS.search(type(modules[module]).__name__)
            for module in above
        )
        embeds = _EMBEDDING.search(own) or (p.ndim > 1 and "Embed" in type(modules[inside]).__name__)
        return "other" if p.ndim != 2 or routes or embeds or p.shape[0] in counts.get(inside, ()) else "hidden"

    return {name: label(name, p) for name, p in params.items()}


def _is_stack(name: str, modules: Mapping[str, nn.Module]) -> bool:
    inside, _, own = name.rpartition(".")
    names = own, inside.rpartition(".")[2], type(modules[inside]).__name__
    return own == "gate_up_proj" or any(map(_EXPERTS.search, names))


def _of_stack(own: str, p: Tensor, down: Tensor | None) -> str:
    """Return the label of a stack of experts. Args: down: the stack down_proj of the same module, if there is one."""
    rows = p.shape[-2]
    # (E, H, 2 I) beside (E, I, H): columns, in which blocks of rows have no meaning, as in Llama 4 and GPT-OSS
    in_columns = down is not None and (rows, p.shape[-1]) == (down.shape[-1], 2 * down.shape[-2])
    is_fused = own == "gate_up_proj" and p.ndim == 3 and rows % 2 == 0 and not in_columns
    return Label("hidden", splits=(rows // 2, rows // 2)) if is_fused else "hidden"


def _matrix(argument: str, params: Mapping[str, Tensor], name: str) -> Tensor:
    """Return a parameter by its name. Raises: ValueError if there is none, or it is no matrix."""
    if name not in params:
        raise ValueError(expected(argument, "names of parameters, as named_parameters has them", f"{name!r}"))
    if params[name].ndim < 2:
        got = f"the shape {tuple(params[name].shape)}"
        raise ValueError(expected(argument, f"parameter {name!r} to be a matrix", got))
    return params[name]


def _checked_splits(params: Mapping[str, Tensor], name: str, given: Any) -> tuple[int, ...]:
    p = _matrix("splits", params, name)
    sizes: tuple[Any, ...] = tuple(given) if isinstance(given, Sequence) else ()
    are_sizes = all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in sizes)
    if not are_sizes or sum(sizes) != p.shape[-2]:
        raise ValueError(expected("splits", f"sizes that add up to the {p.shape[-2]} rows of {name!r}", f"{given!r}"))
    return sizes


def _checked_heads(params: Mapping[str, Tensor], name: str, count: Any) -> int:
    p = _matrix("num_heads", params, name)
    if not isinstance(count, int) or isinstance(count, bool) or count < 1 or p.shape[-2] % count:
        raise ValueError(expected("num_heads", f"a divisor of the {p.shape[-2]} rows of {name!r}", f"{count!r}"))
    return count
