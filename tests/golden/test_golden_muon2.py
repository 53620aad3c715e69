"""Muon and its relatives on stacks, shards and ranks follow recorded runs: `tests/golden/README_muon2.md`."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import recorded_muon
import torch
import torch.distributed as dist
from golden_cases import recorded_weight
from ranks import run
from torch import Tensor

import fn
from fn import Phase, roles, tree
from fn.transforms.mask_and_partition import Label, hidden_and_other
from fn.transforms.muon import COEFFICIENTS, FACTORS, NeuronNormState
from fn.transforms.unsharded import labelled

FOLDER = Path(__file__).parent / "muon2"

Step = dict[str, Tensor]
"""Arrays after a step, by the names that they have in a recording."""


class Case(recorded_muon.Case):
    """A recording, in the precision in which it ran, whose tensors may be stacks, or lie over ranks."""

    __slots__ = ()

    @property
    def dims(self) -> list[int | None] | None:
        """Return in which dimension each tensor lies over the ranks; None for a recording without shards."""
        shard = self.hyper.get("shard")
        return None if shard is None else [shard if shard < len(shape) else None for shape in self.hyper["shapes"]]

    @property
    def groups(self) -> dict[int, dict[str, Any]]:
        """Return the options of each matrix, by its place among the tensors."""
        places, given = self.places("matrix"), self.hyper.get("groups")
        if given and len(given) == len(self.hyper["shapes"]):  # those of other tensors say nothing
            return {i: given[i] for i in places}
        return dict(zip(places, given or [{}] * len(places), strict=True))

    def hold_all(self, found: Sequence[Step], recorded: Sequence[Step] | None = None) -> None:
        """Compare every array of every step with the recorded one, or with another run's."""
        names = {name for name in self.arrays if name.split(".")[-1] not in ("init", "a", "c", "noise", "bytes")}
        assert len(found) == self.hyper["steps"]
        for step, arrays in enumerate(found):
            assert arrays.keys() == names
            for name in names:
                wanted = torch.from_numpy(self.arrays[name])[step] if recorded is None else recorded[step][name]
                limit = self.row["tolerance"] * max(1.0, float(wanted.abs().max()))
                torch.testing.assert_close(
                    arrays[name].double(), wanted.double(), rtol=0, atol=limit,
                    msg=lambda text, where=f"{name} after step {step}": f"{where}: {text}",
                )  # fmt: skip


def case_of(row: dict[str, Any]) -> Case:
    assert hashlib.sha256((FOLDER / row["file"]).read_bytes()).hexdigest() == row["sha256"]
    dtype = np.float64 if row["hyper"]["precision"] == "float64" else np.float32
    return Case(row, {name: x.astype(dtype) for name, x in np.load(FOLDER / row["file"]).items()})


def poured(parts: Sequence[Sequence[Tensor]], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Return tensors of these shapes, made of what each rank owns: whole tensors, slices of stacks, blocks of rows."""
    flat = torch.cat([max(of_ranks, key=Tensor.numel).flatten() for of_ranks in zip(*parts, strict=True)])
    sizes = [int(np.prod(shape)) for shape in shapes]
    return [x.view(*shape) for x, shape in zip(flat.split(sizes), shapes, strict=True)]


def joined(parts: Sequence[Sequence[Tensor]], dims: Sequence[int | None]) -> list[Tensor]:
    """Return the whole tensors of which each rank has pieces."""
    of_ranks = zip(*parts, strict=True)
    return [some[0] if dim is None else torch.cat(some, dim) for some, dim in zip(of_ranks, dims, strict=True)]


def others_of(case: Case) -> dict[str, fn.Transform]:
    """Return the optimizers of all that is no matrix, at a rate of their own, by kind."""
    hyper = case.hyper
    wd, cautious = hyper["weight_decay"], hyper.get("cautious_wd", False)
    rate, lion = fn.scale_by_learning_rate(hyper["scalar_lr"]), fn.scale_by_lion(*hyper["betas"])

    def lion_with_decay(updates: Any, state: Any, params: Any) -> Any:
        updates, state = lion.warmup_update(updates, state, params)
        decays = tree.map(lambda m, p: m * p >= 0 if cautious else p == p, state.mu, params)
        return tree.map(lambda u, p, where: u + wd * p * where, updates, params, decays), state

    adam = fn.chain(fn.scale_by_adam(*hyper["betas"], hyper["eps"]), fn.add_decayed_weights(wd, cautious))
    lion_step = fn.lift(lion.init, lion_with_decay, elementwise=True)
    return {"adamw": fn.chain(adam, rate), "lion": fn.chain(lion_step, rate)}


def labels_of(case: Case) -> Any:
    """Return labels of `fn.labels_of`'s kind, with what a recording says of parts of matrices."""
    labels = ["hidden" if kind == "matrix" else "other" for kind in case.hyper["kinds"]]
    for i, group in case.groups.items():
        if group:
            labels[i] = Label("hidden", splits=group.get("split_sizes", ()), heads=group.get("num_heads", 0))
    return labels


def partitioned(case: Case, matrix: fn.Transform, labels: Any) -> fn.Transform:
    """Return the optimizer of all kinds. labels: "matrix" and "other"."""
    pairs = zip(labels, case.hyper["kinds"], strict=True)
    kinds = {"matrix": matrix, **others_of(case)}
    return fn.partition(kinds, [label if kind == "matrix" else kind for label, kind in pairs])


def muon(case: Case, shards: fn.Shards | None = None) -> fn.Transform:
    """Return Muon, or NorMuon, whose tensors have owners; or of shards."""
    hyper, labels = case.hyper, labels_of(case)
    norm = [fn.scale_by_neuron_norm(hyper["beta2"])] if case.row["method"] == "normuon" else []
    rule = fn.chain(
        fn.orthogonalize(
            eps=hyper["eps"], scale=hyper["adjust_lr"], coefficients=hyper["newton_schulz"],
            dtype=getattr(torch, hyper["precision"]), flatten=hyper["flatten"],
        ),
        *norm,
    )  # fmt: skip
    named = hidden_and_other(labels, {"hidden": "matrix", "other": "other"})
    kind_of = named(case.each("init"))
    if shards is not None:
        kind_of, shards_of = labelled(shards, named, labels)
        rule = fn.unsharded(rule, shards_of("matrix"))
    ends = fn.add_decayed_weights(hyper["weight_decay"], hyper["cautious_wd"]), fn.scale_by_learning_rate(hyper["lr"])
    tx = partitioned(case, fn.chain(fn.trace(hyper["mu"], hyper["nesterov"]), rule, *ends), kind_of)
    return tx if shards is not None else fn.owned(tx, "data")


def dion2(case: Case) -> fn.Transform:
    """Return Dion2, which chooses along the dimension that lay over the ranks, in scope "local" in each shard alone."""
    hyper, sides = case.hyper, []
    for shape, dim in zip(hyper["shapes"], case.dims or [None] * len(hyper["shapes"]), strict=True):
        sides.append({-2: "rows", -1: "columns"}.get(0 if dim is None else dim - len(shape), "smaller"))
    ends = fn.add_decayed_weights(hyper["weight_decay"]), fn.scale_by_learning_rate(hyper["lr"])

    def chosen(side: Any) -> fn.Transform:
        blocks = hyper["world"] if side != "smaller" and hyper["scope"] == "local" else 1
        return fn.contrib.scale_by_dion2(
            "data", hyper["fraction"], hyper["ef_decay"], side=side, blocks=blocks, eps=hyper["eps"],
            scale=hyper["adjust_lr"], coefficients=hyper["newton_schulz"], dtype=getattr(torch, hyper["precision"]),
            flatten=hyper["flatten"],
        )  # fmt: skip

    of_sides = [sides[i] for i in case.places("matrix")]
    matrix = fn.chain(fn.partition({side: chosen(side) for side in {*of_sides}}, of_sides), *ends)
    kinds = {"matrix": matrix, **{kind: fn.chain(fn.average("data"), tx) for kind, tx in others_of(case).items()}}
    return fn.partition(kinds, hyper["kinds"])


def nanochat_numbers(case: Case, t: int) -> tuple[float, float, float]:
    """Return the rate, the momentum and the decay of step t."""
    hyper, rate, mu, wd = case.hyper, case.hyper["lr"], case.hyper["mu"], case.hyper["weight_decay"]
    if hyper.get("schedule") == "nanochat":
        done = t / hyper["steps"]
        rate, mu, wd = rate * (1.0 - done), 0.85 + 0.1 * min(1.0, t / 8), 0.5 * (1.0 + math.cos(math.pi * done)) * wd
    return rate, mu, wd


def nanochat(case: Case, t: int) -> fn.Transform:
    """Return nanochat's optimizer with the numbers of step t."""
    hyper, (rate, mu, wd) = case.hyper, nanochat_numbers(case, t)
    other = fn.scale_by_adam(*hyper["betas"], hyper["eps"]), fn.add_decayed_weights(hyper["scalar_weight_decay"])
    return fn.contrib.nanochat(
        rate, mu, hyper["beta2"], wd, axis="data", labels=labels_of(case), other=fn.chain(*other),
        other_rate=hyper["scalar_lr"] / hyper["lr"], ns_steps=hyper["ns_steps"],
        dtype=getattr(torch, hyper["precision"]),
    )  # fmt: skip


def replay_nanochat(case: Case) -> dict[str, list[Step]]:
    """Return the run with owners."""

    def of(state: Any) -> Any:
        own = state.inner[0].inner
        return {"matrix": own["muon"], "adamw": own["other"]}

    return {"owned": stepped(case, lambda t: nanochat(case, t), of)}


def stepped(
    case: Case, made: fn.Transform | Callable[[int], fn.Transform], of: Callable[[Any], Any], dims: Any = None
) -> list[Step]:
    """Take all steps on this rank, from gradients at our own params; return the arrays of all ranks after each.

    Args: made: what is replayed, or a function that makes it for each step. of: a state -> the states by kind. dims: in
        which the ranks have pieces of the tensors; None: of none.
    """
    world, rank, params = dist.get_world_size(), dist.get_rank(), case.each("init")
    in_shards, dims = dims is not None, dims or [None] * len(params)

    def piece(x: Tensor, i: int) -> Tensor:
        if dims[i] is None:
            return x
        dim = dims[i] + x.ndim - params[i].ndim  # behind those of steps and ranks
        pieces = x.chunk(world, dim)  # the last ranks may have none
        return pieces[rank].clone() if rank < len(pieces) else x.narrow(dim, 0, 0)

    own = [piece(p, i) for i, p in enumerate(params)]
    of_step = (lambda t: made) if isinstance(made, fn.Transform) else made
    state, found = of_step(0).init(own), []
    for t in range(case.hyper["steps"]):
        # FSDP2 averages gradients itself. Of a recording of one rank all ranks have the same gradient.
        grads = [g.mean(0) if in_shards else g[rank % len(g)] for g in case.gradients(own, t, piece)]
        updates, state = of_step(t).update(Phase.WARMUP)(grads, state, own)
        own = fn.apply_updates(own, updates)
        found.append((own, moments_of(case, of(state))))
    of_ranks = [found] * world
    dist.all_gather_object(of_ranks, found)
    return [arrays_of(case, some, dims if in_shards else None) for some in zip(*of_ranks, strict=True)]


def moments_of(case: Case, states: Any) -> dict[tuple[str, str], list[Tensor]]:
    """Return the tensors of the recorded moments that lie here, by kind and name."""
    found = {}
    for kind, own in states.items():
        for which, (name, role) in enumerate({"momentum": "first_moment", "variance": "second_moment"}.items()):
            weight = recorded_weight(own, which, case.hyper["betas"]) if kind == "adamw" else 1.0
            found[kind, name] = [weight * x for x in tree.leaves(roles.find(own, role))]
        found[kind, "norm"] = tree.leaves(tree.instances(own, NeuronNormState))
    return {key: leaves for key, leaves in found.items() if leaves}


def arrays_of(case: Case, of_ranks: Sequence[Any], dims: Any) -> Step:
    """Return the whole arrays of a step by their names, of what each rank has. Args: dims: as for `stepped`."""
    params, moments = [[of_rank[i] for of_rank in of_ranks] for i in (0, 1)]
    if dims is None:  # the same bits on all ranks
        assert all(torch.equal(x, y) for other in params for x, y in zip(params[0], other, strict=True))
    found = {f"p{i}.param": p for i, p in enumerate(params[0] if dims is None else joined(params, dims))}
    for kind, name in moments[0]:
        places, parts = case.places(kind), [of_rank[kind, name] for of_rank in moments]
        shapes = [case.arrays[f"p{i}.{'variance' if name == 'norm' else name}"].shape[1:] for i in places]
        if name == "norm":
            # Ours are of what the iterations return, with the factor of the shape; recorded are they without.
            of_rows = poured(parts, shapes)
            found |= {f"p{i}.variance": x / factor(case, i) ** 2 for i, x in zip(places, of_rows, strict=True)}
        else:
            wholes = poured(parts, shapes) if dims is None else joined(parts, [dims[i] for i in places])
            found |= {f"p{i}.{name}": x for i, x in zip(places, wholes, strict=True)}
    return found


def factor(case: Case, i: int) -> float:
    """Return the factor of a matrix, or of each of its heads; blocks of rows have that of the whole here."""
    shape = [*case.hyper["shapes"][i]]
    shape[-2:-1] = [n // case.groups[i].get("num_heads", 1) for n in shape[-2:-1]]
    rows, columns = (shape[0], int(np.prod(shape[1:]))) if case.hyper["flatten"] else shape[-2:]
    return FACTORS[case.hyper["adjust_lr"]](rows, columns)


def replay_muon(case: Case) -> dict[str, list[Step]]:
    """Return the run with owners, and the one on shards where it was recorded on shards."""
    found = {"owned": stepped(case, muon(case), lambda state: state.inner)}
    if case.dims is not None:
        shards = fn.Shards("data", tuple(map(tuple, case.hyper["shapes"])), tuple(case.dims))
        found["on shards"] = stepped(case, muon(case, shards), lambda state: state, case.dims)
    return found


def replay_dion2(case: Case) -> dict[str, list[Step]]:
    return {"replicated": stepped(case, dion2(case), lambda state: state)}


METHODS: dict[str, Callable[[Case], dict[str, list[Step]]]] = {
    "muon": replay_muon,
    "normuon": replay_muon,
    "dion2": replay_dion2,
    "nanochat": replay_nanochat,
}
"""Method -> what replays its recordings on a rank of the axis "data", in one way or several."""

INDEXES = sorted(path for path in FOLDER.glob("index*.json") if path.name != "index_late.json")  # test_golden_late.py
CASES = [case for path in INDEXES for case in json.loads(path.read_text())["cases"]]
ROWS = {row["name"]: row for row in CASES if not (row["method"] == "normuon" and row["hyper"].get("flatten"))}
"""Rows by name. Left out is NorMuon of flattened tensors: the original has norms of the kernels there."""


def worlds_of(row: dict[str, Any]) -> Sequence[int]:
    """Return on how many ranks a recording runs: one of a single rank also where more ranks have its gradient."""
    return (1, 3) if row["hyper"]["world"] == 1 else (row["hyper"]["world"],)


def replay_all(names: Sequence[str]) -> dict[str, Any]:
    """On a rank: return the runs of recordings, or what a replay raised."""
    found: dict[str, Any] = {}
    with fn.bind({"data": dist.group.WORLD}):
        for name in names:
            row = ROWS[name]
            found[name] = METHODS[row["method"]](case_of(row))
    return found


@functools.cache
def of_ranks(world: int) -> dict[str, Any]:
    """Return what the ranks of one process group replayed."""
    found: dict[str, Any] = run(world, replay_all, [name for name, row in ROWS.items() if world in worlds_of(row)])[0]
    return found


@pytest.mark.parametrize(
    ("name", "world"), [(name, world) for name, row in ROWS.items() for world in worlds_of(row)],
    ids=[f"{name}-{world}" for name, row in ROWS.items() for world in worlds_of(row)],
)  # fmt: skip
def test_the_recorded_run_is_replayed_on_real_ranks(name: str, world: int) -> None:
    """Owned, where params are the same bits on all ranks, and on shards where it was recorded on shards.

    Differs: fn.transforms.muon.scale_by_neuron_norm: where ranks have rows of a matrix, as FSDP2's, `unsharded` brings
        whole matrices here, on any number of ranks; in the code of Dion, norms are those of each shard.
    """
    case, whole = case_of(ROWS[name]), None
    if case.row["method"] == "normuon" and norms_are_of_shards(case):
        case.hold_all(by_hand(case, in_shards=True))
        whole = by_hand(case)
    for steps in of_ranks(world)[name].values():
        case.hold_all(steps, whole)


def norms_are_of_shards(case: Case) -> bool:
    """Return whether ranks have rows of a matrix, whose norms the original of NorMuon takes in each shard."""
    shapes = case.hyper["shapes"]
    return any((case.dims or [None] * len(shapes))[i] == len(shapes[i]) - 2 for i in case.places("matrix"))


def by_hand(case: Case, *, in_shards: bool = False) -> list[Step]:
    """Return NorMuon's run by its equations. Args: in_shards: with norms of the rows of each of the recorded ranks."""
    hyper, params = case.hyper, case.each("init")
    lr, mu, b, wd = hyper["lr"], hyper["mu"], hyper["beta2"], hyper["weight_decay"]
    b1, b2 = hyper["betas"]
    m, found = [torch.zeros_like(p) for p in params], []
    v = [torch.zeros_like(p[..., :1] if i in case.places("matrix") else p) for i, p in enumerate(params)]
    for t in range(hyper["steps"]):
        arrays = Step()
        for i, (p, of_ranks) in enumerate(zip(params, case.gradients(params, t), strict=True)):
            g, kind = of_ranks.mean(0), hyper["kinds"][i]
            if kind == "matrix":
                m[i] = mu * m[i] + g
                u = blocks_orthogonal(case, i, g + mu * m[i] if hyper["nesterov"] else m[i])
                v[i] = b * v[i] + (1 - b) * u.square().mean(-1, keepdim=True)
                y = u / (v[i].sqrt() + 1e-8)
                parts = norm_parts(case, i, in_shards)
                ratios = [
                    x.norm(dim=(-2, -1), keepdim=True) / z.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-8)
                    for x, z in zip(u.split(parts, -2), y.split(parts, -2), strict=True)
                ]
                u = torch.cat([z * ratio for z, ratio in zip(y.split(parts, -2), ratios, strict=True)], -2)
                decay = wd * p * (u * p >= 0) if hyper["cautious_wd"] else wd * p
                params[i] = p - lr * decay - lr * factor(case, i) * u
            else:
                u = (b1 * m[i] + (1 - b1) * g).sign()
                k = (b1, b2)[kind == "lion"]
                m[i] = k * m[i] + (1 - k) * g
                if kind == "adamw":
                    v[i] = b2 * v[i] + (1 - b2) * g * g
                    u = m[i] / (1 - b1 ** (t + 1)) / ((v[i] / (1 - b2 ** (t + 1))).sqrt() + hyper["eps"])
                decay = wd * p * (m[i] * p >= 0) if hyper["cautious_wd"] else wd * p
                params[i] = p - hyper["scalar_lr"] * (decay + u)
            arrays |= {f"p{i}.param": params[i], f"p{i}.momentum": m[i]}
            arrays |= {} if kind == "lion" else {f"p{i}.variance": v[i]}
        found.append(arrays)
    return found


def parts_of(case: Case, i: int) -> list[int]:
    """Return the rows of the parts of a matrix that are matrices of their own: blocks, heads, or the whole."""
    rows, group = case.hyper["shapes"][i][-2], case.groups[i]
    heads = group.get("num_heads", 1)
    return [*group.get("split_sizes", [rows // heads] * heads)]


def norm_parts(case: Case, i: int, in_shards: bool) -> list[int]:
    """Return the rows of the parts of a matrix that have norms of their own: in shards a rank's rows, heads as ever."""
    shape = case.hyper["shapes"][i]
    if in_shards and (case.dims or [])[i] == len(shape) - 2 and "num_heads" not in case.groups[i]:
        return [len(x) for x in torch.empty(shape[-2]).chunk(case.hyper["world"])]
    return parts_of(case, i)


def blocks_orthogonal(case: Case, i: int, z: Tensor) -> Tensor:
    """Return what Newton-Schulz makes of each matrix, without a factor; of blocks as parts of that of the whole."""
    parts, whole = z.split(parts_of(case, i), -2), factor(case, i)
    scale = FACTORS[case.hyper["adjust_lr"]]
    ratios = [scale(*x.shape[-2:]) / whole if "split_sizes" in case.groups[i] else 1.0 for x in parts]
    return torch.cat([ratio * orthogonal(case, x) for ratio, x in zip(ratios, parts, strict=True)], -2)


def orthogonal(case: Case, z: Tensor) -> Tensor:
    """Return what Newton-Schulz makes of a matrix, or of each of a stack."""
    hyper = case.hyper
    is_tall = z.shape[-2] > z.shape[-1]
    z = z.mT if is_tall else z
    x = (z / (z.norm(dim=(-2, -1), keepdim=True) + hyper["eps"])).to(getattr(torch, hyper["precision"]))
    for a, b, c in COEFFICIENTS[hyper["newton_schulz"]]:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.mT if is_tall else x).to(z.dtype)
