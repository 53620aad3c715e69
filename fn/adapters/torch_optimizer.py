"""A class of optimizers for containers of trainers, which build one for each part of a model, and for torch's DCP.

    get_optimizer_state_dict(model, opt, options=StateDictOptions(flatten_optimizer_state_dict=True))

reads `opt.state[p]` and `opt.param_groups`, and returns names of the form "state.layers.0.weight.inner.1.mu", which
`torch.distributed.checkpoint` saves and loads on any mesh. Torch keeps only entries of `opt.state[p]`, so everything
lies there: a parameter's own leaves, counts of the optimizer with each, and vectors of several with the first.

`full_state_dict=True` brings DTensors together, on every rank or on the first, and leaves out what single ranks have,
which no torch optimizer has any of: residual errors, and what lies at the owners of matrices. Then it is refused.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from fn import tree
from fn.adapters.labels import Labels, labels_of
from fn.adapters.optim import groups
from fn.adapters.optim.core import Core
from fn.adapters.optim.optimizer import Optimizer, Params
from fn.adapters.optim.resting import counted, places_of
from fn.adapters.optim.state_dict import FORMAT, OF_RANK, check_format, marks_of, numbers_of, of_rank
from fn.arguments import check_kind
from fn.base import Transform
from fn.errors import expected
from fn.roles import OF_EACH_RANK, OWNED, PLAN

Homes = dict[str, list[tuple[int, str]]]
"""The path of each leaf of a flat state -> the numbers of the parameters that it lies with, and its name there."""


def torch_optimizer(make: Callable[..., Transform], *, model: nn.Module | Labels | None = None) -> type[Optimizer]:
    """Return a class that is constructed as those of `torch.optim` are, and whose state torch's DCP can read.

    Take it for a container of a trainer that builds the optimizers itself, as torchtitan's does, and where
    `get_optimizer_state_dict` and `set_optimizer_state_dict` save and load. Otherwise take `fn.Optimizer`.

        cls(params, lr=..., ...)    =    fn.Optimizer(params, make, labels=labels_of(model), lr=..., ...)

    `state[p]` has the leaves of p by name from the start, so torch takes no step to fill it: a count lies with each
    parameter, a vector of several, such as residual errors, with the first. The name of what is this rank's own begins
    with the rank. Only the plan of who owns which tensor is left out, for it is that of the ranks that load.

    Args: make: as for `fn.Optimizer`. model: whose parameters `labels_of` labels where `make` takes labels, as
        `fn.muon` does; read when an optimizer is constructed, behind FSDP2 say. Of several parts it is
        `torch.nn.ModuleList(parts)`. Or what `labels_of` returned, for a part without a head say. None: `make` takes
        none, or each param group has a "label", such as "hidden", for all that is in it; a group's own label counts.
    Returns: a subclass of `fn.Optimizer`, named as `make` is, for trainers log rates by it. Its constructor takes the
        other arguments of `fn.Optimizer` by name, `schedule` say.
    Raises: TypeError and ValueError as `fn.Optimizer` for `make`. The class raises a ValueError for params without a
        label where `make` takes labels.

    >>> import torch, fn
    >>> from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    >>> cls = fn.adapters.torch_optimizer(fn.muon, model=model)
    >>> opt = cls(model.parameters(), lr=0.02)
    >>> saved = get_optimizer_state_dict(model, opt)
    >>> opt.steps, [name for name in saved["state"]["0.weight"] if name.endswith("mu")]
    (0, ['inner.1.muon.0.mu'])
    """
    make = groups.check_make(make)
    check_kind(
        "model", model, (nn.Module, Labels, type(None)), "a torch.nn.Module, what fn.labels_of returned, or None"
    )

    def labelled(given: list[dict[str, Any]], first: int) -> list[dict[str, Any]]:
        if "labels" not in groups.arguments_of(make):
            return given
        labels = labels_of(model) if isinstance(model, nn.Module) else model
        return [_labelled(group, g, labels) for g, group in enumerate(given, first)]

    class TorchOptimizer(_ByParameter):
        def __init__(self, params: Params, lr: float | Tensor = 1e-3, **kwargs: Any):
            given = groups.groups_of(groups.as_list(params))
            given = given if "labels" in kwargs else labelled(given, 0)
            super().__init__(given, make, lr=lr, **kwargs)
            self.state = _Leaves(self)  # type: ignore[assignment]

        def add_param_group(self, param_group: dict[str, Any]) -> None:
            if "labels" not in self.defaults:
                given = groups.groups_of(groups.as_list([param_group]))
                (param_group,) = labelled(given, len(self.param_groups))
            super().add_param_group(param_group)

    TorchOptimizer.__name__ = getattr(getattr(make, "func", make), "__name__", TorchOptimizer.__name__)
    return TorchOptimizer


class _ByParameter(Optimizer):
    def state_dict(self) -> dict[str, Any]:
        """Return the state as those of `torch.optim` do: the leaves of each parameter, and the numbers of the groups.

        A load takes back the numbers of the groups, and leaves their labels, which are None here, as they are.

        Raises: NotImplementedError where torch asks with options that lose what single ranks have, or cannot be loaded.
        """
        _check_options(self)
        flat = super().state_dict()
        saved, numbers = _split(self, flat), iter(range(len(self.state)))
        listed = []
        for group in self.param_groups:
            # There is one for each parameter, and torch's flat names repeat them with each.
            entries = {k: None if k == "labels" else x for k, x in group.items()}
            entries |= {k: x.clone() for k, x in entries.items() if isinstance(x, Tensor)}
            listed.append({**entries, "params": [next(numbers) for _ in group["params"]]})
        return {"state": dict(enumerate(saved)), "param_groups": listed}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` or `fn.adapters.checkpoint.gather` returned, bit for bit.

        Raises: as that of `fn.Optimizer`; ValueError for other param groups. Nothing is loaded then.
        """
        is_flat = not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys()
        super().load_state_dict(state_dict if is_flat else _join(self, state_dict))
        self.state = _Leaves(self)  # type: ignore[assignment]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.state = _Leaves(self)  # type: ignore[assignment]


class _Leaves(Mapping[Tensor, dict[str, Tensor]]):
    """The `state` of an optimizer: the leaves of each parameter by name, live buffers, as they are now."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._read: tuple[Any, dict[Tensor, dict[str, Tensor]]] = (None, {})

    def __getitem__(self, p: Tensor) -> dict[str, Tensor]:
        # Torch asks for each parameter by itself, and all are found together.
        now = self._core.steps, len(self._core.units)
        if self._read[0] != now:
            self._read = now, dict(zip(self, _split(self._core, of_rank(self._core)), strict=True))
        return self._read[1][p]

    def __iter__(self) -> Iterator[Tensor]:
        return iter(p for group in self._core.param_groups for p in group["params"])

    def __len__(self) -> int:
        return sum(len(group["params"]) for group in self._core.param_groups)


def _check_options(core: Core) -> None:
    """Refuse options of torch's functions for state dicts that lose what single ranks have, or cannot be loaded.

    Torch does not hand its options over: they are read in the frames that ask. Those of other callers have none.
    """
    frame, asking, options = sys._getframe(2), list[str](), None
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            asking.append(frame.f_code.co_name)
            options = options or frame.f_locals.get("info")
        frame = frame.f_back  # type: ignore[assignment]
    if options is None:
        return
    # To load whole tensors, torch asks for those that are here, without `full_state_dict` in its options meanwhile.
    loads = "_load_optim_state_dict" in asking
    if loads and options.flatten_optimizer_state_dict:
        got = "both, which torch cannot load into any optimizer"
        cure = "leave flatten_optimizer_state_dict out of both calls; what was saved so is read by "
        cure += "torch.distributed.checkpoint.load into get_optimizer_state_dict(..., flatten_optimizer_state_dict)"
        raise NotImplementedError(expected(asking[-1], "full_state_dict or flatten_optimizer_state_dict", got, cure))
    loses = options.broadcast_from_rank0 if loads else options.full_state_dict
    own = [path for path, mark in marks_of(core).items() if mark in OF_EACH_RANK or mark == OWNED]
    if loses and own and dist.is_initialized() and dist.get_world_size() > 1:
        wanted = "options without full_state_dict, for single ranks have parts of the state"
        cure = "leave it out, and save the state dicts of all ranks with torch.distributed.checkpoint"
        raise NotImplementedError(expected(asking[-1], wanted, f"it, and {own[0]!r}", cure))


def _labelled(group: dict[str, Any], g: int, labels: Labels | None) -> dict[str, Any]:
    """Return a param group with the labels of its parameters. labels: those of a model."""
    if "labels" in group:
        return group
    rest = {name: x for name, x in group.items() if name != "label"}
    members = [p[1] if isinstance(p, tuple) else p for p in group["params"]]
    if "label" in group:
        return {**rest, "labels": (group["label"],) * sum(p.requires_grad for p in members)}
    if labels is None:
        cure = (
            "give torch_optimizer(make, model=model), or each param group a label, {'params': ..., 'label': 'hidden'}"
        )
        wanted = f"a label for param group {g}, by which make tells params apart"
        raise ValueError(expected("params", wanted, "none", cure))
    return {**rest, "labels": labels}


def _homes(core: Core, flat: Mapping[str, Any]) -> Homes:
    """Return where each leaf of a flat state lies; what is in the param groups, and plans, lie nowhere."""
    plans = {path for path, mark in marks_of(core).items() if mark == PLAN}
    owners, members, start = dict[str, int](), list[list[int]](), 0
    for u, unit in enumerate(core.units):
        leaves, places = tree.by_path(unit.state, f"state.{u}."), places_of(core, unit)
        by_id = {id(x): place for x, place in zip(leaves.values(), places, strict=True)}
        # 0-d, so their shapes do not tell, and there is one for each parameter.
        by_id |= {id(n): by_id[id(mu)] for _, mus, ns in counted(unit.state) for mu, n in zip(mus, ns, strict=True)}
        numbers = [*range(start, start := start + len(unit.members))]
        found_in = {path: by_id[id(x)] for path, x in leaves.items()}
        owners |= {path: numbers[i] for path, i in found_in.items() if i is not None}
        members.append(numbers)
    every = [i for numbers in members for i in numbers]
    found: Homes = {}
    for path, x in flat.items():
        match = OF_RANK.fullmatch(path)
        inner = match[3] if match else path
        if inner.startswith("groups.") or inner in plans:
            continue
        rank, within, numbers = path.removesuffix(inner), inner, every
        if inner.startswith("state."):
            _, of_unit, within = inner.split(".", 2)
            numbers = members[int(of_unit)]
        owner, (above, _, last) = owners.get(inner), within.rpartition(".")
        if owner is not None:
            # Without the place in its group, which another stage of a pipeline gives it.
            found[path] = [(owner, rank + (above if last.isdigit() else within))]
        else:
            found[path] = [(i, rank + within) for i in (numbers if x.ndim == 0 else numbers[:1])]
    taken = Counter(home for homes in found.values() for home in homes)
    return {path: [(i, name if taken[i, name] == 1 else path) for i, name in homes] for path, homes in found.items()}


def _split(core: Core, flat: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return a flat state as {name: leaf} of each parameter."""
    split = [dict[str, Tensor]() for group in core.param_groups for _ in group["params"]]
    for path, homes in _homes(core, flat).items():
        for i, name in homes:
            split[i][name] = flat[path]
    return split


def _join(core: Core, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `state_dict` returned as a flat state, whoever has named the parameters since."""
    theirs, here = ([len(group["params"]) for group in of] for of in (saved["param_groups"], core.param_groups))
    if theirs != here:
        raise ValueError(expected("state_dict", f"param groups of {here} parameters", f"of {theirs}"))
    by_number = [saved["state"].get(key, {}) for group in saved["param_groups"] for key in group["params"]]
    if not any(FORMAT in leaves for leaves in by_number):
        check_format(saved)
    live = of_rank(core)
    homes = _homes(core, live)
    flat = {path: x for path, x in live.items() if path not in homes and not path.startswith("groups.")}
    for g, group in enumerate(saved["param_groups"]):
        flat |= {f"groups.{g}.{name}": x for name, x in numbers_of(group).items()}
    for path, places in homes.items():
        # Torch gives an empty dict for what it does not find.
        given = (by_number[i].get(name) for i, name in places)
        if (x := next((x for x in given if isinstance(x, Tensor)), None)) is not None:
            flat[path] = x
    return flat
