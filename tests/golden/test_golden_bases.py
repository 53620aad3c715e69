"""Recorded runs of DeMo, EF21, majority votes and SDP4Bit, in simulated ranks and real ones.

`tests/golden/README_codecs.md` says what the arrays are. What no name of `fn` stands for is made here of public pieces:
random positions, a second momentum, ties that move nothing, SDP4Bit's quantiser. On one rank an average is the
identity; such cases are replayed by the codec and the feedback.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import ranks
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import fn
from fn import Phase, tree
from fn.collectives.codecs.codec import Segments, segmented
from fn.collectives.compressed import encode

FOLDER = Path(__file__).parent / "compressors"
Tree = Any
Found = dict[str, list[Tensor]]
"""By the name of a recorded array, what is to be held against it after each step."""


class Case(NamedTuple):
    """A recording: its row of the index, and its arrays by name."""

    row: dict[str, Any]
    arrays: dict[str, np.ndarray]

    @property
    def hyper(self) -> dict[str, Any]:
        return self.row["hyper"]

    @property
    def world(self) -> int:
        return int(self.row["world"])

    @property
    def shapes(self) -> list[torch.Size]:
        return [*map(torch.Size, self.row["shapes"])]

    def each(self, name: str) -> list[Tensor]:
        return [torch.from_numpy(self.arrays[f"p{i}.{name}"].copy()) for i in range(len(self.shapes))]

    def off(self, found: Found, rank: int | None = None) -> float:
        """Return how far the first steps are off, in units of the tolerance. rank: whose they are; None: of all."""
        worst, clear = 0.0, {}
        for name, steps in found.items():
            ours, theirs = (x.astype(np.float64) for x in (torch.stack(steps).numpy(), self.arrays[name][: len(steps)]))
            if rank is not None and theirs.ndim > ours.ndim:
                theirs = theirs[:, rank]
            off = np.abs(ours.reshape(theirs.shape) - theirs)
            if name.endswith(".param") and self.row["method"] == "demo":
                mean = np.abs(self.arrays[name.replace("param", "mean")][: len(steps)])
                sure = mean > 2e-6 * mean.max(axis=tuple(range(1, mean.ndim)), keepdims=True)
                clear[name] = np.logical_and.accumulate(sure, axis=0)
                off = off[clear[name]]
            rows = np.abs(theirs).reshape(len(theirs), -1).max(1)
            allowed = self.row["tolerance"] * max(1.0, float(rows.min()))
            worst = max(worst, float(off.max(initial=0.0)) / allowed)
        assert all(sure.mean() > 0.5 for sure in clear.values())
        return worst


def load() -> list[Case]:
    found = [json.loads((FOLDER / f"index_{name}.json").read_text())["cases"] for name in ("bases", "lion")]
    return [Case(row, dict(np.load(FOLDER / row["file"]))) for rows in found for row in rows]


CASES = load()
each_case = pytest.mark.parametrize("case", CASES, ids=[case.row["name"] for case in CASES])


def run(
    case: Case, tx: fn.Transform, look: Callable[[Tree, Tree, list[Tensor]], Any], begin: Any, grads: list[Tensor]
) -> Found:
    """Take a step for each gradient. begin: (state, first gradients) -> state, for a start in the warm-up; or None."""
    params, found = case.each("init"), dict[str, list[Tensor]]()
    state = tx.init(params)
    state = begin(state, [g[0] for g in grads]) if begin else state
    for t in range(len(grads[0])):
        g = [each[t] for each in grads]
        before = state
        updates, state = tx.update(Phase.WARMUP if begin and t == 0 else Phase.COMPRESSED)(g, state, params)
        params = fn.apply_updates(params, updates)
        for name, values in {"param": params, **look(before, state, g)}.items():
            for i, value in enumerate(values):
                found.setdefault(f"p{i}.{name}", []).append(value)
    return found


def largest_divisor(most: int, n: int) -> int:
    return max(d for d in range(1, most + 1) if n % d == 0)


def demo(case: Case) -> tuple[fn.Transform, Any, Any]:
    h = case.hyper
    side = partial(largest_divisor, h["compression_chunk"])
    b, k, basis = h["compression_decay"], h["compression_topk"], fn.dct(side)
    tx = fn.contrib.demo(h["lr"], h["weight_decay"], axis="data", k=k, tile=side, keep=b)

    def momenta(state: Tree) -> list[Tensor]:
        """Return the errors, which lie in the basis chunk length by chunk length, as tensors."""
        parts = [basis.into(p) for p in case.each("init")]
        flat = [part for each in parts for part in each]
        rests = dict(zip(sorted({p.shape[1] for p in flat}), [s.worker[0] for s in state.inner[2]], strict=True))
        found = []
        for each, shape in zip(parts, case.shapes, strict=True):
            mine = []
            for part in each:
                rest, count = rests[part.shape[1]], part.numel()
                mine.append(rest[:count].view(part.shape))
                rests[part.shape[1]] = rest[count:]
            found.append(basis.back(mine, shape))
        return found

    def look(before: Tree, after: Tree, g: list[Tensor]) -> dict[str, list[Tensor]]:
        old, new = momenta(before), momenta(after)
        return {"delta": new, "sent": [b * m + h["lr"] * x - n for m, x, n in zip(old, g, new, strict=True)]}

    return tx, look, None


def ef21(case: Case) -> tuple[fn.Transform, Any, Any]:
    h = case.hyper
    k, block, count = h.get("k", h.get("density")), h.get("block"), ["ef21", "ef21_sgdm", "ef21_sgd2m"].index(h["rule"])
    if count == 1:
        tx = fn.contrib.ef21_sgdm(h["lr"], h["eta"], axis="data", k=k, block=block)
    else:
        mean = fn.compressed_average("data", fn.top_k(k, block), fn.differences(), servers=False)
        momenta = [fn.local_momentum(h.get("eta", 1.0))] * count
        tx = fn.skip_nonfinite(fn.chain(*momenta, mean, fn.running_sum(), fn.scale_by_learning_rate(h["lr"])))

    def look(before: Tree, after: Tree, g: list[Tensor]) -> dict[str, list[Tensor]]:
        links = after.inner
        vector = links[count].worker[0].split([s.numel() for s in case.shapes])
        estimates = [v.view(s) for v, s in zip(vector, case.shapes, strict=True)]
        return {"out": links[count + 1].total, "estimate": estimates} | {"vu"[i]: links[i].mu for i in range(count)}

    def begin(state: Tree, g: list[Tensor]) -> Tree:
        return state._replace(inner=(*(link._replace(mu=g) for link in state.inner[:count]), *state.inner[count:]))

    return tx, look, begin if h["start"] == "gradient" else None


def votes(case: Case) -> tuple[fn.Transform, Any, Any]:
    h = case.hyper
    lr, decay, ties, mean = h["lr"], h["weight_decay"], h.get("ties", "even"), h.get("aggregate") == "mean"
    if h.get("rule", "lion") == "lion":
        tx = fn.lion_vote(lr, *h["betas"], decay, axis="data", ties="plus" if mean else ties, servers=not mean)
    elif ties == "plus":
        tx = fn.contrib.signum_vote(lr, h["betas"][0], decay, axis="data", ties=ties)
    else:  # the mean of the ballots is 0 at a tie, and so is its sign
        vote = fn.compressed_average("data", fn.ballots("plus"), fn.off(), servers=False)
        links = fn.local_momentum(1 - h["betas"][0]), vote, fn.scale_by_sign(), fn.add_decayed_weights(decay)
        tx = fn.skip_nonfinite(fn.chain(*links, fn.scale_by_learning_rate(lr)))
    return tx, lambda before, after, g: {"mu": after.inner[0].mu}, None


def random_k(case: Case) -> tuple[fn.Transform, Any, Any]:
    """Keep positions that change from step to step: an average of its own for each."""

    def codec(kept: Tensor, n: int) -> fn.Codec:
        def decode(payload: Tensor) -> Tensor:
            return payload.new_zeros(len(payload), n).index_copy(1, kept, payload)

        return fn.Codec(lambda x: x[:, kept], decode, 1, 32.0)

    averages = [
        [fn.compressed_average("data", codec(at, size.numel()), servers=False) for at in kept.long()]
        for kept, size in zip(case.each("indices"), case.shapes, strict=True)
    ]

    def init(params: list[Tensor]) -> Tree:
        return 0, tuple(steps[0].init(p) for steps, p in zip(averages, params, strict=True))

    def update(g: list[Tensor], state: Tree, params: list[Tensor]) -> tuple[Tree, Tree]:
        t, errors = state
        found = [each[t].compressed_update(x, e, x) for each, x, e in zip(averages, g, errors, strict=True)]
        return [mean for mean, _ in found], (t + 1, tuple(e for _, e in found))

    def look(before: Tree, after: Tree, g: list[Tensor]) -> dict[str, list[Tensor]]:
        return {"error": [e.worker[0][: s.numel()].view(s) for e, s in zip(after[0][1], case.shapes, strict=True)]}

    mean = fn.lift(init, update)
    return fn.chain(mean, fn.scale_by_learning_rate(case.hyper["lr"])), look, None


def symmetric(bits: int, group: int) -> fn.Codec:
    """Return SDP4Bit's quantiser, which rounds to whole numbers up to 2^(bits - 1) - 1; the codes travel as int8."""
    most = 2 ** (bits - 1) - 1

    def encode(x: Tensor) -> tuple[Tensor, Tensor]:
        groups = x.view(x.shape[0], -1, group)
        largest = groups.abs().amax(2, keepdim=True)
        scale = torch.where(largest == 0, 1.0, most / largest)
        return (groups * scale).round().to(torch.int8), scale

    return fn.Codec(encode, lambda payload: (payload[0] / payload[1]).flatten(1), group, bits + 32 / group)


def sdp4bit(case: Case) -> tuple[fn.Transform, Any, Any]:
    h = case.hyper
    there = symmetric(h["bits_intra"], h["group_intra"]), symmetric(h["bits_inter"], h["group_inter"])
    if h["hadamard"]:
        there = tuple(fn.rotated(codec, h["hadamard"]) for codec in there)
    back = symmetric(h["bits_weight"], h["group_weight"])

    def update(g: Tree, main: Tree, params: Tree) -> tuple[Tree, Tree]:
        """Decay the shard's own precise copy: what ranks have was rounded."""
        moves = tree.map(lambda x, m: -h["lr"] * (x + h["weight_decay"] * m), g, main)
        return moves, tree.map(torch.add, main, moves)

    inner = fn.lift(lambda params: tree.map(torch.clone, params), update, elementwise=True)
    tx = fn.sharded(inner, ("local", "node"), there, fn.off(), gather=back, gather_feedback=fn.classic())
    return tx, lambda before, after, g: {}, None


def made(case: Case) -> tuple[fn.Transform, Any, Any]:
    method, hyper = case.row["method"], case.hyper
    if method == "sparse":
        return random_k(case) if hyper.get("random") else ef21(case)
    return {"demo": demo, "sdp4bit": sdp4bit, "votes": votes, "distributed_lion": votes}[method](case)


def named_alike(case: Case) -> bool:
    """Return whether our rule is the recorded one: in Distributed Lion's code ties are -1, which is shown below."""
    return case.row["method"] != "distributed_lion" or case.world % 2 == 1


def alone(x: Tensor, codec: fn.Codec, feedback: fn.Feedback, error: Tensor) -> tuple[Tensor, Tensor]:
    """Return what arrives of a vector (n,) from one rank, and the next error."""
    row = segmented(codec, Segments((len(x),), torch.tensor([[len(x)]])))
    payload, error = encode(row, feedback, x[None], error)
    return row.decode(payload)[0], error


def demo_alone(case: Case) -> Found:
    h, found = case.hyper, dict[str, list[Tensor]]()
    basis = fn.dct(partial(largest_divisor, h["compression_chunk"]))
    for i, (p, grads) in enumerate(zip(case.each("init"), case.each("grad"), strict=True)):
        feedback, errors = fn.decayed(h["compression_decay"]), [part.flatten() * 0 for part in basis.into(p)]
        for g in grads[:, 0]:
            parts, sent = basis.into(h["lr"] * g), []
            for j, part in enumerate(parts):
                codec = fn.top_k(min(h["compression_topk"], part.shape[1]), part.shape[1], over="senders")
                arrived, errors[j] = alone(part.flatten(), codec, feedback, errors[j])
                sent.append(arrived.view_as(part))
            delta = basis.back([e.view_as(part) for e, part in zip(errors, parts, strict=True)], p.shape)
            mean = basis.back(sent, p.shape)
            (signs,) = fn.scale_by_sign(noise=1e-6).compressed_update([mean], (), None)[0]
            p = p - h["lr"] * signs
            for name, value in (("sent", mean), ("mean", mean), ("delta", delta), ("param", p)):
                found.setdefault(f"p{i}.{name}", []).append(value)
    return found


def sdp4bit_alone(case: Case) -> Found:
    h, feedback = case.hyper, fn.classic()
    there = [fn.rotated(symmetric(h[f"bits_{k}"], h[f"group_{k}"]), h["hadamard"]) for k in ("intra", "inter")]
    (model,), (grads,), found = case.each("init"), case.each("grad"), []
    error = torch.zeros(model.numel())
    for g in grads[:, 0].flatten(1):
        for codec in there:
            g = codec.decode(codec.encode(g[None]))[0]
        step = -h["lr"] * (g + h["weight_decay"] * (model.flatten() + error))
        arrived, error = alone(step, symmetric(h["bits_weight"], h["group_weight"]), feedback, error)
        model = model + arrived.view_as(model)
        found.append(model)
    return {"p0.param": found}


@each_case
def test_the_recorded_run_is_replayed_in_simulated_ranks(case: Case) -> None:
    if case.world == 1 and case.row["method"] in ("demo", "sdp4bit"):
        assert 0 < case.off((demo_alone if case.row["method"] == "demo" else sdp4bit_alone)(case)) <= 1
        return
    tx, look, begin = made(case)
    if case.row["method"] == "sdp4bit":
        nodes, local = case.hyper["mesh"]
        f = fn.simulate(fn.simulate(partial(run, case, tx, look, begin), "local", local), "node", nodes)
        each = f([g.unflatten(1, (nodes, local)).movedim((1, 2), (0, 1)) for g in case.each("grad")])
        assert all(torch.equal(x[n, k], x[0, 0]) for x in each["p0.param"] for n in range(nodes) for k in range(local))
        found = {name: [x[0, 0] for x in steps] for name, steps in each.items()}
    else:
        f = fn.simulate(partial(run, case, tx, look, begin), "data", case.world, in_dims=1)
        own = {name: a.ndim for name, a in case.arrays.items()}
        found = {name: [x if own[name] > x.ndim else x[0] for x in xs] for name, xs in f(case.each("grad")).items()}
    if named_alike(case):
        assert 0 < case.off(found) <= 1
    else:
        assert case.off({name: x for name, x in found.items() if name.endswith(".mu")}) <= 1
        assert case.off(found) > 1


SOME = 6
"""Steps that real ranks take: enough for errors to matter, and messages take their time."""


def replay_here(cases: list[Case]) -> list[float]:
    world, rank, found = dist.get_world_size(), dist.get_rank(), []
    for case in cases:
        shape, names = (tuple(case.hyper["mesh"]), ("node", "local")) if "mesh" in case.hyper else ((world,), ("data",))
        with fn.bind(init_device_mesh("cpu", shape, mesh_dim_names=names)):
            found.append(case.off(run(case, *made(case), [g[:SOME, rank] for g in case.each("grad")]), rank))
    return found


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_recorded_runs_are_replayed_by_real_ranks(world: int) -> None:
    cases = [case for case in CASES if case.world == world and named_alike(case)]
    for found in ranks.run(world, replay_here, cases):
        assert 0 < max(found) <= 1, found


def test_the_recordings_are_what_was_recorded() -> None:
    assert {case.row["method"] for case in CASES} == {"demo", "votes", "distributed_lion", "sparse", "sdp4bit"}
    for case in CASES:
        assert hashlib.sha256((FOLDER / case.row["file"]).read_bytes()).hexdigest() == case.row["sha256"]
