"""Optimizers of whole matrices on meshes of several axes: the params of one process, whatever piece a rank has."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import Cases, run
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import fn
from fn import tree
from fn.contrib import lion_muon
from fn.planner import traffic

STEPS = 5
ROWS, COLUMNS, WHOLE = Shard(0), Shard(1), Replicate()
SHAPES = [(7, 6), (5, 9), (8, 8), (6, 7), (3, 5), (4, 10), (9, 5), (11, 6), (5,), (6,), (7,)]
"""Matrices, the last of which is an embedding, and vectors; their sides are not divided by a mesh."""

PLACEMENTS: dict[str, list[tuple[Any, Any]]] = {
    "FSDP2 x TP": [(_StridedShard(0, split_factor=2), ROWS), (ROWS, COLUMNS), (ROWS, ROWS), (COLUMNS, ROWS),
                   (ROWS, WHOLE), (WHOLE, COLUMNS), (WHOLE, WHOLE), (ROWS, ROWS),
                   (ROWS, WHOLE), (_StridedShard(0, split_factor=2), ROWS), (WHOLE, WHOLE)],
    "HSDP": [(WHOLE, ROWS)] * len(SHAPES),
    "TP alone": [(WHOLE, COLUMNS), (WHOLE, ROWS)] * 4 + [(WHOLE, WHOLE)] * 3,
}  # fmt: skip
"""Of each tensor, over two axes."""

STACKS = [(5, 4, 6), (3, 7, 5), (2, 5, 6), (3, 4, 5), (1, 6, 4), (4, 3, 3), (6, 7), (3, 4, 3)]
"""Experts of a layer, as stacks of matrices, and a matrix and a vector's worth of others beside them."""
OF_STACKS: list[Any] = [(ROWS, COLUMNS), (ROWS, Shard(2)), (COLUMNS, Shard(2)), (ROWS, ROWS), (ROWS, COLUMNS),
                        (_StridedShard(1, split_factor=2), COLUMNS), (ROWS, COLUMNS), (WHOLE, Shard(2))]  # fmt: skip
"""Experts over the first axis and their matrices over the second, and others; some ranks have none."""

METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "muon": (fn.muon, {}),
    "normuon": (fn.normuon, {}),
    "muon with lion": (partial(fn.muon, other="lion"), {}),
}


case = Cases(4)


def tensors(seed: int, shapes: Sequence[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def labels() -> list[str]:
    return ["hidden"] * 7 + ["other"] * 4


def placed(x: Tensor, mesh: DeviceMesh, placements: Any) -> DTensor:
    """Return a DTensor, an interleaved one as FSDP2 makes it: cut by the second axis, then by the first."""
    first, second = placements
    if not isinstance(first, _StridedShard):
        return distribute_tensor(x, mesh, placements)
    piece = distribute_tensor(x, mesh["tp"], (second,)).to_local()
    piece = distribute_tensor(piece, mesh["fsdp"], (Shard(first.dim),)).to_local()
    return DTensor.from_local(piece, mesh, placements, run_check=False, shape=x.shape, stride=x.stride())


def trained(make: Any, place: Any, shapes: Any = SHAPES, **more: Any) -> fn.Optimizer:
    """Train by given gradients. Args: place: makes a DTensor of each."""
    params = [torch.nn.Parameter(place(i, x)) for i, x in enumerate(tensors(0, shapes))]
    kinds = labels() if shapes is SHAPES else ["hidden"] * len(shapes)
    opt = fn.Optimizer(params, partial(make, labels=kinds), lr=0.05, **more)
    for step in range(STEPS):
        for i, (p, g) in enumerate(zip(params, tensors(step + 1, shapes), strict=True)):
            p.grad = place(i, g)
        opt.step()
    return opt


def whole(opt: fn.Optimizer) -> list[Tensor]:
    params = opt.param_groups[0]["params"]
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in params]


@case
def on_meshes() -> dict[Any, float]:
    mesh: DeviceMesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    found = {}
    for name, (make, more) in METHODS.items():
        alone = whole(trained(make, lambda i, x: x, **more))
        for where, placements in PLACEMENTS.items():
            opt = trained(make, lambda i, x, of=placements: placed(x, mesh, of[i]), **more)
            pairs = zip(whole(opt), alone, strict=True)
            found[where, name] = max(float((a - b).abs().max()) for a, b in pairs)
        found["stacks", name] = 0.0
        for shapes in (STACKS, STACKS[:2]):
            opt = trained(make, lambda i, x: placed(x, mesh, OF_STACKS[i]), shapes, **more)
            away = far(whole(opt), whole(trained(make, lambda i, x: x, shapes, **more)))
            found["stacks", name] = max(away, found["stacks", name])
    return found


def test_steps_on_a_mesh_are_those_of_one_process() -> None:
    for found in case.answer("on_meshes"):
        assert found == dict.fromkeys(found, pytest.approx(0, abs=1e-6))


@case
def clipped_norms() -> dict[str, Any]:
    """Clip by `max_norm`, of AdamW's elements and Muon's matrices, and by torch's function of whole tensors."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp")), {}
    for name, make in {"adamw": fn.adamw, "muon": partial(fn.muon, labels=labels())}.items():
        for where, placements in PLACEMENTS.items():
            ends = []
            for place in (lambda x, q: x, lambda x, q: placed(x, mesh, q)):
                params = [torch.nn.Parameter(place(x, q)) for x, q in zip(tensors(0), placements, strict=True)]
                clips = not isinstance(params[0], DTensor)
                opt = fn.Optimizer(params, make, lr=0.05, **{} if clips else {"max_norm": 0.7})
                for step in range(STEPS):
                    for p, g, q in zip(params, tensors(step + 1), placements, strict=True):
                        p.grad = place(g, q)
                    if clips:
                        torch.nn.utils.clip_grad_norm_(params, 0.7)
                    opt.step()
                ends.append(whole(opt))
            before = [p.to_local().clone() for p in params]
            params[0].grad = placed(tensors(9)[0], mesh, placements[0])
            if dist.get_rank() == 1:
                params[0].grad.to_local().fill_(torch.nan)
            opt.step()
            still = all(torch.equal(p.to_local(), old) for p, old in zip(params, before, strict=True))
            found[name, where] = max(float((a - b).abs().max()) for a, b in zip(*ends, strict=True)), still, opt.skipped
    return found


def test_max_norm_on_a_mesh_is_that_of_whole_tensors_and_a_nan_on_one_rank_skips_on_all() -> None:
    for found in case.answer("clipped_norms"):
        for (name, where), (apart, still, skipped) in found.items():
            assert apart <= 1e-6
            # of AdamW's elements whoever shares the norm hears of it; replicas have one gradient, and ask nobody
            if name == "muon" or where == "FSDP2 x TP":
                assert (still, skipped) == (True, 1)


TWICE = [(9,), (5,), (2,), (1,), (10,), (9, 3), (6, 5), (10, 4), (3, 2), (1, 4), (13, 2, 3)]
"""Vectors, matrices and a stack whose first dimension both axes cut, in pieces of unlike sizes, or of none."""


def stepped_twice_divided(make: Any, mesh: DeviceMesh | None, steps: int) -> fn.Optimizer:
    """Train tensors of which every rank of a mesh has rows, or without a mesh one process all."""

    def place(x: Tensor) -> Tensor:
        return x if mesh is None else distribute_tensor(x, mesh, (ROWS,) * mesh.ndim)

    opt = fn.Optimizer([nn.Parameter(place(x)) for x in tensors(0, TWICE)], make, lr=0.05)
    go_on(opt, place, range(steps))
    return opt


def go_on(opt: fn.Optimizer, place: Any, steps: range) -> None:
    for step in steps:
        for p, g in zip(opt.param_groups[0]["params"], tensors(step + 1, TWICE), strict=True):
            p.grad = place(g)
        opt.step()


@case
def divided_twice() -> dict[Any, Any]:
    """Save and load what two axes cut in the same dimension, on the same mesh and on one of a single axis."""
    mesh, line = (init_device_mesh("cpu", shape, mesh_dim_names=names)
                  for shape, names in (((2, 2), ("fsdp", "tp")), ((4,), ("fsdp",))))  # fmt: skip
    kinds, found = ["other"] * 5 + ["hidden"] * 6, {}
    for name, make in {"adamw": fn.adamw, "normuon": partial(fn.normuon, labels=kinds)}.items():
        opt, alone = stepped_twice_divided(make, mesh, 3), stepped_twice_divided(make, None, 3)
        found[name, "as one process"] = far(whole(opt), whole(alone))
        found[name, "momenta"] = far(momenta(opt), momenta(alone))
        with tempfile.TemporaryDirectory() as own, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            folders = [own]
            dist.broadcast_object_list(folders)
            dcp.save({"params": opt.param_groups[0]["params"], "opt": opt.state_dict()}, checkpoint_id=folders[0])
            for where, other in (("the same", mesh), ("another", line)):
                again = stepped_twice_divided(make, other, 0)
                read = {"params": again.param_groups[0]["params"], "opt": again.state_dict()}
                dcp.load(read, checkpoint_id=folders[0])
                again.load_state_dict(read["opt"])
                pairs = zip([*whole(opt), *momenta(opt)], [*whole(again), *momenta(again)], strict=True)
                found[name, where] = [i for i, (x, y) in enumerate(pairs) if not torch.equal(x, y)]
                go_on(again, lambda x, of=other: distribute_tensor(x, of, (ROWS,) * of.ndim), range(3, 8))
                found[name, where, "behind it"] = far(whole(again), whole(stepped_twice_divided(make, None, 8)))
            dist.barrier()
    return found


def momenta(opt: fn.Optimizer) -> list[Tensor]:
    """Return the moments in the shapes of the params as whole tensors, in the order of their names."""
    flat = sorted((name, x) for name, x in opt.state_dict().items() if tuple(x.shape) in TWICE)
    return [(x.full_tensor() if isinstance(x, DTensor) else x).clone() for _, x in flat]


def test_rows_that_two_axes_cut_unevenly_are_saved_and_loaded_bit_for_bit() -> None:
    """`full_tensor` finds them, too: of a mesh that knows a group of both axes torch takes pieces to be even."""
    for found in case.answer("divided_twice"):
        for (name, where, *more), result in found.items():
            if where in ("the same", "another") and not more:
                assert result == [], (name, where)
            else:
                assert result <= 1e-6, (name, where, *more)


class Sent:
    """What codes deliver of pieces, each with a residual error of its own."""

    def __init__(self) -> None:
        self.errors: dict[Any, Tensor] = {}

    def __call__(self, key: Any, x: Tensor) -> Tensor:
        codec = fn.int8()
        v = x.reshape(-1) + self.errors.get(key, 0)
        padded = nn.functional.pad(v, (0, -v.numel() % codec.align))
        got = codec.decode(codec.encode(padded[None]))[0, : v.numel()] if v.numel() else v
        self.errors[key] = v - got
        return got.reshape(x.shape)


Box = tuple[slice, ...]


def in_pieces(shapes: Sequence[tuple[int, ...]], boxes: list[list[Box]], steps: int) -> list[Tensor]:
    """Return Muon's matrices after steps whose momenta and updates travel piece by piece, but for the first step."""
    params, momenta, sent = tensors(0, shapes), [torch.zeros(x, dtype=torch.float64) for x in shapes], Sent()
    iterations = fn.orthogonalize(coefficients="polar_express")
    for step in range(steps):
        for i, g in enumerate(tensors(step + 1, shapes)):
            momenta[i] = 0.95 * momenta[i] + g
            direction = g + 0.95 * momenta[i]
            arrived = direction.clone()
            for r, box in enumerate(boxes[i] if step else ()):
                arrived[box] = sent(("there", i, r), direction[box])
            u = iterations.warmup_update([arrived], (), [params[i]])[0][0]
            back = u.clone()
            for r, box in enumerate(boxes[i] if step else ()):
                back[box] = sent(("back", i, r), u[box])
            params[i] = params[i] - 0.05 * back
    return params


def travelling(mesh: DeviceMesh, shape: tuple[int, ...], q: Any) -> list[Box]:
    """Return the pieces that travel: of each matrix, also of a stack, those of the ranks, where several have some."""
    mine = placed(torch.arange(torch.Size(shape).numel()).view(shape), mesh, q).to_local().flatten()
    of_ranks: list[Any] = [None] * 4
    dist.all_gather_object(of_ranks, [(int(x.min()), int(x.max()) + 1) for x in torch.unravel_index(mine, shape)]
                           if mine.numel() else None)  # fmt: skip
    distinct = dict.fromkeys(tuple(ends) for ends in of_ranks if ends)
    of_matrices: dict[Any, list[Box]] = {}
    for *first, rows, columns in distinct:
        for k in range(*first[0]) if first else (None,):
            inside = [slice(*rows), slice(*columns)]
            of_matrices.setdefault(k, []).append(tuple(inside if k is None else [slice(k, k + 1), *inside]))
    return [box for pieces in of_matrices.values() if len(pieces) > 1 for box in pieces]


@case
def muon_in_int8() -> dict[str, tuple[float, float]]:
    """Return how far matrices, and stacks of them, are from the reference, and from exact steps."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp")), {}
    for where, shapes, placements in (("matrices", SHAPES[:7], PLACEMENTS["FSDP2 x TP"][:7]),
                                      ("stacks", STACKS, OF_STACKS)):  # fmt: skip
        boxes = [travelling(mesh, shape, q) for shape, q in zip(shapes, placements, strict=True)]
        params = [nn.Parameter(placed(x, mesh, q)) for x, q in zip(tensors(0, shapes), placements, strict=True)]
        make = partial(fn.muon, codec=fn.int8(), labels=["hidden"] * len(shapes), weight_decay=0.0)
        opt = fn.Optimizer(params, make, lr=0.05, schedule=fn.freeze_after(1))
        for step in range(STEPS):
            for p, g, q in zip(params, tensors(step + 1, shapes), placements, strict=True):
                p.grad = placed(g, mesh, q)
            opt.step()
        exact = in_pieces(shapes, [[]] * len(shapes), STEPS)
        found[where] = far(whole(opt), in_pieces(shapes, boxes, STEPS)), far(whole(opt), exact)
    return found


def test_in_int8_the_steps_are_those_of_whole_tensors_whose_pieces_are_encoded_alike() -> None:
    for found in case.answer("muon_in_int8"):
        for where, (away, from_exact) in found.items():
            assert away <= 1e-6 < 1e-4 < from_exact, where


EVEN: dict[str, tuple[int, tuple[int, ...], Any]] = {
    "matrices": (4, (16, 32), (ROWS, COLUMNS)),
    "experts, each over two ranks": (2, (4, 16, 32), (ROWS, Shard(2))),
    "experts, each over four ranks": (2, (4, 16, 32), (COLUMNS, Shard(2))),
    "experts over all ranks": (2, (8, 16, 32), (ROWS, ROWS)),
}
"""How many tensors, their shape, and how they are divided."""


@case
def bytes_of_a_step() -> dict[Any, Any]:
    """Return what a rank sends in a step, in how many messages, and the bytes of its pieces as they travel."""
    mesh, found = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp")), {}
    for where, (count, shape, placements) in EVEN.items():
        for name, codec in {"exact": None, "int8": fn.int8()}.items():
            params = [nn.Parameter(placed(x.float(), mesh, placements)) for x in tensors(0, [shape] * count)]
            more = {"schedule": fn.freeze_after(0)} if codec else {}
            opt = fn.Optimizer(params, partial(fn.muon, codec=codec, labels=["hidden"] * count), lr=0.05, **more)
            for p, g in zip(params, tensors(1, [shape] * count), strict=True):
                p.grad = placed(g.float(), mesh, placements)
            with fn.ledger() as book:
                opt.step()
            over, pieces = ("fsdp_tp", "all_to_all"), [x for p in params for x in slices_of(p.to_local())]
            wide = sum(width(codec, x.numel()) for x in pieces)
            found[where, name] = book.sent.get(over, 0), book.messages.get(over, 0), wide
    return found


def slices_of(piece: Tensor) -> list[Tensor]:
    return [piece] if piece.ndim == 2 else [*piece]


def width(codec: fn.Codec | None, numel: int) -> int:
    """Return the bytes of numbers, padded to whole blocks of a codec, that travel by themselves."""
    if codec is None:
        return 4 * numel
    return sum(x.nbytes for x in tree.leaves(codec.encode(torch.zeros(1, -(-numel // codec.align) * codec.align))))


def test_a_rank_sends_the_bytes_of_its_pieces_there_and_back_in_a_message_each() -> None:
    """Of R ranks that share a matrix each sends (1 - 1/R) of them each way; a matrix of one rank is not sent.

    The planner says the same of R ranks with matrices that they share.
    """
    ranks = {"matrices": 4, "experts, each over two ranks": 2, "experts, each over four ranks": 4}
    for found in case.answer("bytes_of_a_step"):
        for (where, name), (sent, messages, pieces) in found.items():
            share = 1 - 1 / ranks.get(where, 1)
            assert sent == pytest.approx(2 * share * pieces, rel=0.05), (where, name)
            assert messages == 2 or not share
            count, shape, _ = EVEN[where]
            shared, codec = ranks.get(where, 1), fn.int8() if name == "int8" else fn.identity()
            matrices = count * (shape[0] if len(shape) > 2 else 1) * shared // 4  # that the same ranks share
            plan = traffic.unsharded(traffic.Model((shape[-2:],) * matrices), shared, codec, codec)
            assert sum(m.size for m in plan if m.collective == "all_to_all") == sent


class Net(nn.Module):
    """Two pairs of matrices, of uneven sides, one that tensor parallelism leaves whole, an embedding and norms."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        pair = lambda: nn.ModuleDict({"up": nn.Linear(6, 10), "down": nn.Linear(10, 6)})  # noqa: E731
        self.pairs = nn.ModuleList([pair(), pair()])
        self.mix, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(6), nn.Linear(6, 11)
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for pair in self.pairs:
            x = x + pair["down"](torch.tanh(pair["up"](x)))
        return self.head(self.norm(self.mix(x)))


def on(shape: tuple[int, ...]) -> tuple[Net, fn.Optimizer]:
    """Return a model on a mesh, FSDP2 of as many ranks as the first number says times tensor parallelism."""
    model = Net()
    if shape:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "tp")[: len(shape)])
        for pair in model.pairs if len(shape) > 1 else ():
            parallelize_module(pair, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["fsdp"])
    return model, fn.Optimizer(model.named_parameters(), fn.normuon, labels=fn.labels_of(model), lr=0.05,
                               max_norm=1.0)  # fmt: skip


def train(model: nn.Module, opt: fn.Optimizer, steps: range) -> list[Tensor]:
    """Train on data that is the same on all ranks; return the params."""
    for step in steps:
        tokens = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(step))
        nn.functional.cross_entropy(model(tokens[0]), tokens[1]).backward()
        opt.step()
        opt.zero_grad()
    return [(p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for p in model.parameters()]


def everything(model: nn.Module, opt: fn.Optimizer) -> dict[str, Tensor]:
    """Return the numbers of a run, of all ranks, as whole tensors: on another mesh they are the same."""
    found = {**model.state_dict(), **opt.state_dict()}
    whole = {k: x.full_tensor() if isinstance(x, DTensor) else x for k, x in found.items() if isinstance(x, Tensor)}
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, {k: x for k, x in whole.items() if "owners" not in k})
    return {k: x for of_rank in of_ranks for k, x in of_rank.items()}


@case
def trained_on_fsdp_and_tp() -> dict[str, Any]:
    """Train on 2 x 2, as one process does; save, go on, and load on 4 ranks of FSDP2 alone."""
    with tempfile.TemporaryDirectory() as own:
        folders = [own]
        dist.broadcast_object_list(folders)
        found = saved_and_loaded(folders[0])
        dist.barrier()
    return found


def saved_and_loaded(folder: str) -> dict[str, Any]:
    model, opt = on((2, 2))
    kinds = {str(p.placements) for p in model.parameters()}
    found: dict[str, Any] = {"interleaved": any("Strided" in kind for kind in kinds)}
    first = train(model, opt, range(3))
    found["from one process"] = far(first, train(*on(()), range(3)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": model.state_dict(), "opt": opt.state_dict()}, checkpoint_id=folder)
        saved = everything(model, opt)
        again, other = on((4,))
        state = {"model": again.state_dict(), "opt": other.state_dict()}
        dcp.load(state, checkpoint_id=folder)
    again.load_state_dict(state["model"])
    other.load_state_dict(state["opt"])
    loaded = everything(again, other)
    found["loaded otherwise"] = [k for k, x in saved.items() if k not in loaded or not torch.equal(loaded[k], x)]
    found["behind it"] = far(train(model, opt, range(3, 8)), train(again, other, range(3, 8)))
    return found


def far(a: list[Tensor], b: list[Tensor]) -> float:
    return max(float((x - y).abs().max()) for x, y in zip(a, b, strict=True))


def test_a_model_on_fsdp2_and_tensor_parallelism_trains_as_in_one_process_and_goes_on_without_it() -> None:
    for found in case.answer("trained_on_fsdp_and_tp"):
        assert found["interleaved"]
        assert found["from one process"] <= 1e-6
        assert found["loaded otherwise"] == []
        assert found["behind it"] <= 1e-6


ISLANDS: dict[str, tuple[Any, Any]] = {
    "muloco": (fn.muloco, fn.every(2, start=0)),
    "sign_muon": (fn.sign_muon, fn.freeze_after(0)),
    "lion_muon": (lion_muon, fn.freeze_after(0)),
}
"""Not Dion: its factors start from a random matrix for each place in the list that an owner has."""
MATRICES = PLACEMENTS["FSDP2 x TP"][:7]


def islands_of_meshes() -> dict[str, float]:
    """Train hidden matrices on two islands of 2 x 2 ranks, and on two ranks that have whole ones."""
    mesh, found = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("island", "fsdp", "tp")), {}
    inside = mesh["fsdp", "tp"]
    for name, (make, schedule) in ISLANDS.items():
        ends = []
        for place in (lambda x, q: x, lambda x, q: placed(x, inside, q)):
            pairs = [*zip(tensors(0), MATRICES, strict=False)]
            params = [torch.nn.Parameter(place(x, q)) for x, q in pairs]
            with fn.bind(mesh["island"]):
                hyper = {"labels": ["hidden"] * len(params)}
                opt = fn.Optimizer(params, partial(make, axis="island", **hyper), schedule=schedule, lr=0.05)
            for step in range(6):
                # Votes of two voters that differ are ties, which are broken by an element's place in what a rank has.
                island = mesh.get_local_rank("island")
                seed, longer = 10 * step + island * (name == "muloco"), 1 + island
                for p, g, q in zip(params, tensors(seed), MATRICES, strict=False):
                    p.grad = place(longer * g, q)
                opt.step()
            ends.append(whole(opt))
        found[name] = far(*ends)
    return found


@pytest.mark.reliability
def test_islands_of_fsdp2_and_tensor_parallelism_take_the_steps_of_whole_matrices() -> None:
    for found in run(8, islands_of_meshes):
        assert found == dict.fromkeys(ISLANDS, pytest.approx(0, abs=1e-6))
