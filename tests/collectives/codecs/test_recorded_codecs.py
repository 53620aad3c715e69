"""Recorded messages of SparseLoCo, MuLoCo and others: what is sent, kept and received, exchange by exchange.

`tests/golden/README_codecs.md` says what the arrays are. Cases of several ranks are replayed by `compressed_average`,
those of one rank, where that is the identity, by the codec and the feedback themselves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import fn
from fn.collectives.codecs.codec import Segments, segmented, unpack
from fn.collectives.compressed import encode

FOLDER = Path(__file__).parents[2] / "golden"


class Case(NamedTuple):
    """A row of an index, and the arrays of its file."""

    row: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self.arrays[name])

    def close(self, found: Tensor, name: str) -> None:
        recorded = self.arrays[name]
        limit = self.row["tolerance"] * max(1.0, float(np.abs(recorded).max(initial=0.0)))
        np.testing.assert_allclose(found.numpy().reshape(recorded.shape), recorded, rtol=0, atol=limit, err_msg=name)


def cases(folder: str, *methods: str) -> list[Any]:
    rows = json.loads((FOLDER / folder / "index_codecs.json").read_text())["cases"]
    found = [Case(row, dict(np.load(FOLDER / folder / row["file"]))) for row in rows if row["method"] in methods]
    assert found
    return [pytest.param(case, id=case.row["name"]) for case in found]


def alone(x: Tensor, codec: fn.Codec, feedback: fn.Feedback) -> tuple[Tensor, Tensor, list[Any]]:
    """Send x (S, n) of one rank: what its messages decode to, its errors (S, n), and the payloads."""
    n, pad = x.shape[1], -x.shape[1] % codec.align
    row, x = segmented(codec, Segments((n + pad,), torch.tensor([[n]]))), torch.nn.functional.pad(x, (0, pad))
    error, sent, errors, payloads = feedback.init(x[0]), [], [], []
    for each in x:
        payload, error = encode(row, feedback, each[None], error)
        payloads.append(payload[0])
        sent.append(row.decode(payload)[0])
        errors.append(error if isinstance(error, Tensor) else torch.zeros_like(each))
    return torch.stack(sent)[:, :n], torch.stack(errors)[:, :n], payloads


def exchanged(x: Tensor, codec: fn.Codec, feedback: fn.Feedback) -> tuple[Tensor, Tensor, Tensor, list[Any]]:
    """Average x (S, W, n) in S exchanges: means (S, n); what each rank sent and its errors (S, W, n); payloads."""
    sent, errors, payloads = zip(*(alone(own, codec, feedback) for own in x.unbind(1)), strict=True)
    tx = fn.compressed_average("data", codec, feedback, servers=False)

    def on_rank(x: Tensor) -> tuple[Tensor, Tensor]:
        state, means, kept = tx.init(x[0]), [], []
        for each in x:
            mean, state = tx.compressed_update(each, state, x[0])
            means.append(mean)
            kept.append(state.worker[0] if isinstance(state.worker[0], Tensor) else torch.zeros_like(each))
        return torch.stack(means), torch.stack(kept)[:, : x.shape[1]]

    means, kept = fn.simulate(on_rank, "data", x.shape[1], in_dims=1, out_dims=(None, 1))(x)
    torch.testing.assert_close(kept, torch.stack(errors, 1), rtol=0, atol=1e-6)
    return means, torch.stack(sent, 1), torch.stack(errors, 1), list(payloads)


@pytest.mark.parametrize("case", cases("compressors", "sparse"))
def test_top_k_with_error_feedback_is_replayed(case):
    hyper, lr = case.row["hyper"], case.row["hyper"]["lr"]
    codec = fn.top_k(hyper.get("k", hyper.get("density")), hyper.get("block"))
    feedback = fn.decayed(hyper["decay"]) if "decay" in hyper else fn.classic()
    for i in range(len(case.row["shapes"])):
        x = case[f"p{i}.grad"].flatten(2)
        if case.row["world"] == 1:
            sent, errors, _ = alone(x[:, 0], codec, feedback)
            means, errors = sent, errors[:, None]
        else:
            means, _, errors, _ = exchanged(x, codec, feedback)
        case.close(means, f"p{i}.out")
        case.close(errors, f"p{i}.error")
        case.close(case[f"p{i}.init"].flatten() - lr * means.cumsum(0), f"p{i}.param")


def largest_divisor(n: int, most: int) -> int:
    return max(d for d in range(1, most + 1) if n % d == 0)


def chunked(x: Tensor, size: int, cls: str) -> tuple[Tensor, int]:
    """Return x (S, W, *shape) with its chunks one behind the other (S, W, n), and their length."""
    shape = x.shape[2:]
    if len(shape) == 1:
        return x, largest_divisor(shape[0], size)
    if cls == "CCLoco":  # whole rows
        return x.flatten(2), shape[1]
    rows, columns = (largest_divisor(n, size) for n in shape)
    x = x.unflatten(3, (shape[1] // columns, columns)).unflatten(2, (shape[0] // rows, rows))
    return x.transpose(3, 4).flatten(2), rows * columns


def how_many(length: int, outer: dict[str, Any], method: str, cls: str | None) -> int:
    if method == "templar":
        return max(2, min(outer["top_k"], length)) // 2 * 2
    if cls == "CCLoco":
        return max(1, min(outer["top_k"], length))
    return min(length, max(1, round(length * outer["top_k"] / outer["chunk_size"] ** 2)))


@pytest.mark.parametrize("case", cases("outer", "sparseloco", "templar"))
def test_sparse_locos_messages_are_replayed(case):
    """What is sent, kept and averaged over those that sent it; indices and codes exactly. Templar's mean is another.

    Differs: fn.collectives.codecs.bins.bins: the wire carries the mean of each bin; the authors send these means less
        m, and m: one number more.
    """
    hyper, method, outer = case.row["hyper"], case.row["method"], case.row["hyper"]["outer"]
    coded = outer.get("use_quantization", outer.get("bins", 0) > 0)
    levels = outer.get("quantization_bins", outer.get("bins"))
    values = fn.bins(levels, outer.get("quantization_range", outer.get("sigmas"))) if coded else None
    rate = outer.get("lr", 1.0) if method == "sparseloco" else 1.0
    for i in range(len(hyper["shapes"])):
        x, length = chunked(rate * case[f"p{i}.pseudo"], outer["chunk_size"], hyper.get("cls", "SparseLoCo"))
        k = how_many(length, outer, method, hyper.get("cls"))
        codec = fn.top_k(k, length, over="senders", values=values)
        means, sent, errors, payloads = exchanged(x, codec, fn.decayed(outer["error_decay"]))
        recorded = {name: chunked(case[f"p{i}.{name}"], outer["chunk_size"], hyper.get("cls", "SparseLoCo"))[0]
                    for name in ("sent", "error")}  # fmt: skip
        limit = case.row["tolerance"] * max(1.0, float(x.abs().max()))
        torch.testing.assert_close(sent, recorded["sent"], rtol=0, atol=limit)
        torch.testing.assert_close(errors, recorded["error"], rtol=0, atol=limit)
        if method == "sparseloco":
            theirs = chunked(case[f"p{i}.mean"], outer["chunk_size"], hyper["cls"])[0]
            torch.testing.assert_close(means[:, None].expand_as(theirs), theirs, rtol=0, atol=limit)
        same_wire(case, i, payloads, k, length, levels if coded else None)


def same_wire(case: Case, i: int, payloads: list[Any], k: int, length: int, levels: int | None) -> None:
    """Hold indices, codes and what the codes stand for against the recorded ones, which are in no order in a chunk."""
    recorded = case[f"p{i}.indices"]
    steps, world, kept = *recorded.shape[:2], recorded.shape[-1]
    assert kept == k
    indices, order = recorded.reshape(steps, world, -1, kept).sort(-1)
    for step in range(steps):
        for rank in range(world):
            payload, theirs = payloads[rank][step], indices[step, rank]
            if k < length:
                found = unpack(payload.indices[:, 0], (length - 1).bit_length(), theirs.numel())
                assert torch.equal(found.view_as(theirs), theirs)
            if levels is None:
                continue
            codes = case[f"p{i}.codes"].reshape(indices.shape)[step, rank].gather(-1, order[step, rank]).flatten()
            width = levels.bit_length() - 1
            found = unpack(payload.values[0].codes[:, 0], width, codes.numel())[0]
            assert torch.equal(found, codes.long())
            stands_for = case[f"p{i}.lookup"][step, rank] + case[f"p{i}.shift"][step, rank]
            torch.testing.assert_close(payload.values[0].lookup[0, 0], stands_for, rtol=0, atol=2e-6)


@pytest.mark.parametrize("case", cases("outer", "muloco_quantized"))
def test_mu_locos_messages_are_replayed(case):
    """Bins over whole tensors, also after the mean; the packed codes byte for byte. Top-k over whole tensors."""
    hyper, outer = case.row["hyper"], case.row["hyper"]["outer"]
    sparse = outer["compressor_type"] == "topk"
    feedback = fn.decayed(outer["error_decay"], outer["error_feedback_alpha"]) if outer["use_ef"] else fn.off()
    rate = outer["lr"] if outer["use_ef"] else 1.0
    for i, shape in enumerate(hyper["shapes"]):
        n = int(np.prod(shape))
        bins = fn.bins(outer["quantization_bins"], outer["quantization_range"])
        codec = fn.top_k(max(1, int(n * outer["topk_sparsity_ratio"]))) if sparse else bins
        means, sent, errors, payloads = exchanged(rate * case[f"p{i}.pseudo"].flatten(2), codec, feedback)
        if outer["simulate_quantization_after_reduce"] and not sparse:
            means = alone(means, codec, fn.off())[0]
        case.close(sent, f"p{i}.sent")
        case.close(means[:, None].expand(sent.shape), f"p{i}.mean")
        if outer["use_ef"]:
            case.close(errors, f"p{i}.error")
        if not sparse:
            found = torch.stack([torch.stack([p.codes[0, 0] for p in each]) for each in payloads], 1)
            width, theirs = bins.bits, case[f"p{i}.payload"]
            codes = [unpack(each.flatten(0, 1), int(width), n) for each in (found, theirs)]
            assert torch.equal(*codes)


@pytest.mark.parametrize("case", cases("outer", "streaming_coded"))
def test_streaming_dilocos_messages_are_replayed(case):
    for i in range(len(case.row["hyper"]["shapes"])):
        means, sent, _, _ = exchanged(case[f"p{i}.pseudo"].flatten(2), fn.e3m0(None), fn.off())
        case.close(sent, f"p{i}.sent")
        case.close(means[:, None].expand(sent.shape), f"p{i}.mean")
