"""Recorded runs of EF21, majority votes and SDP4Bit.

`tests/golden/README_codecs.md` says what the arrays are. What no name of `fn` stands for is made here of public pieces:
random positions, a second momentum, ties that move nothing, SDP4Bit's quantiser. On one rank an average is the
identity; such cases are replayed by the codec and the feedback.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from recorded_codes import FOLDER, Case, Found, Made, Tree, alone, in_simulation, load, run
from torch import Tensor

import fn
from fn import tree

CASES = load(FOLDER, "index_bases.json", "index_lion.json")
each_case = pytest.mark.parametrize("case", CASES, ids=[case.row["name"] for case in CASES])


def ef21(case: Case) -> Made:
    h = case.hyper
    k, block, count = h.get("k", h.get("density")), h.get("block"), {"ef21": 0, "ef21_sgd2m": 2}[h["rule"]]
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


def votes(case: Case) -> Made:
    h = case.hyper
    lr, decay, ties, mean = h["lr"], h["weight_decay"], h.get("ties", "even"), h.get("aggregate") == "mean"
    if h.get("rule", "lion") == "lion":
        tx = fn.lion_vote(lr, *h["betas"], decay, axis="data", ties="plus" if mean else ties, servers=not mean)
    else:  # the mean of the ballots is 0 at a tie, and so is its sign
        vote = fn.compressed_average("data", fn.ballots("plus"), fn.off(), servers=False)
        links = fn.local_momentum(1 - h["betas"][0]), vote, fn.scale_by_sign(), fn.add_decayed_weights(decay)
        tx = fn.skip_nonfinite(fn.chain(*links, fn.scale_by_learning_rate(lr)))
    return tx, lambda before, after, g: {"mu": after.inner[0].mu}, None


def random_k(case: Case) -> Made:
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


def sdp4bit(case: Case) -> Made:
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


def made(case: Case) -> Made:
    method, hyper = case.row["method"], case.hyper
    if method == "sparse":
        return random_k(case) if hyper.get("random") else ef21(case)
    return {"sdp4bit": sdp4bit, "votes": votes, "distributed_lion": votes}[method](case)


def named_alike(case: Case) -> bool:
    """Return whether our rule is the recorded one: in Distributed Lion's code ties are -1, which is shown below."""
    return case.row["method"] != "distributed_lion" or case.world % 2 == 1


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
    if case.world == 1 and case.row["method"] == "sdp4bit":
        assert 0 < case.off(sdp4bit_alone(case)) <= 1
        return
    if case.row["method"] == "sdp4bit":
        nodes, local = case.hyper["mesh"]
        f = fn.simulate(fn.simulate(partial(run, case, made(case)), "local", local), "node", nodes)
        each = f([g.unflatten(1, (nodes, local)).movedim((1, 2), (0, 1)) for g in case.each("grad")])
        assert all(torch.equal(x[n, k], x[0, 0]) for x in each["p0.param"] for n in range(nodes) for k in range(local))
        found = {name: [x[0, 0] for x in steps] for name, steps in each.items()}
    else:
        found = in_simulation(case, made(case))
    if named_alike(case):
        assert 0 < case.off(found) <= 1
    else:
        assert case.off({name: x for name, x in found.items() if name.endswith(".mu")}) <= 1
        assert case.off(found) > 1


def test_every_method_is_there() -> None:
    assert {case.row["method"] for case in CASES} == {"votes", "distributed_lion", "sparse", "sdp4bit"}
