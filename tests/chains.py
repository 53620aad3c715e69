"""Chains for arguments that the named optimizers do not have: what their docstrings show, for recordings and tests."""

from __future__ import annotations

from typing import Any

import torch

import fn
from fn.transforms.average import agreed
from fn.transforms.mask_and_partition import hidden_and_other
from fn.transforms.unsharded import labelled

Rate = float | torch.Tensor


def wrapped(tx: fn.Transform, axis: Any) -> fn.Transform:
    """Return a chain in the wrappers of the named optimizers."""
    return agreed(fn.skip_nonfinite(tx), axis)


def coded(
    axis: Any, codec: Any = None, feedback: Any = None, layout: str = "flat", servers: bool = True
) -> fn.Transform:
    """Return an average in signs, if there is no other codec."""
    return fn.compressed_average(axis, codec or fn.sign(), feedback, layout=layout, servers=servers)


def onebit_adam(
    lr: Rate = 1e-3, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0, *, axis: Any,
    warmup: Any = None, bias_correction: bool = True, max_step: float | None = 1.0, **mean: Any,
) -> fn.Transform:  # fmt: skip
    """Return 1-bit Adam in any layout, with the paper's b2 and codec, or all in its form. mean: as for `coded`."""
    link = fn.scale_by_onebit_adam(
        b1, b2, eps, sync=coded(axis, **mean), bias_correction=bias_correction, max_step=max_step
    )
    last = fn.add_decayed_weights(weight_decay), fn.scale_by_learning_rate(lr)
    return wrapped(fn.chain(fn.average(axis, warmup), link, *last), axis)


def onebit_lamb(
    lr: Rate = 1e-3, *, axis: Any, codec: Any = None, feedback: Any = None, layout: str = "fused", servers: bool = True,
    warmup: Any = None, **hyper: Any,
) -> fn.Transform:  # fmt: skip
    """Return `fn.onebit_lamb` with all arguments of its link, in any layout."""
    link = fn.scale_by_onebit_lamb(sync=coded(axis, codec, feedback, layout, servers), **hyper)
    return wrapped(fn.chain(fn.average(axis, warmup), link, fn.scale_by_learning_rate(lr)), axis)


def zero_one_adam(
    lr: Rate = 1e-3, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.0, *, axis: Any,
    max_step: float | None = 1.0, warmup: Any = None, bias_correction: bool = True, **mean: Any,
) -> fn.Transform:  # fmt: skip
    """Return 0/1 Adam in any layout, with the paper's b2 and codec, or all in its form. mean: as for `coded`."""
    link = fn.scale_by_zero_one_adam(
        lr, b1, b2, eps, weight_decay, sync=coded(axis, **mean), bias_correction=bias_correction, max_step=max_step
    )
    return wrapped(fn.chain(fn.average(axis, warmup), link), axis)


def diloco(
    lr: Rate = 4e-4, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.1, *, axis: Any,
    outer_lr: Rate = 0.7, outer_momentum: float = 0.9, nesterov: bool = True, codec: Any = None, feedback: Any = None,
    servers: bool = True, **of_outer: Any,
) -> fn.Transform:  # fmt: skip
    """Return `fn.diloco` with all arguments of `fn.outer`, and with any feedback."""
    last = fn.add_decayed_weights(weight_decay), fn.scale_by_learning_rate(lr)
    inner = fn.chain(fn.scale_by_adam(b1, b2, eps), *last)
    outer_tx = fn.chain(fn.trace(outer_momentum, nesterov), fn.scale_by_learning_rate(outer_lr))
    return rounds(inner, outer_tx, exact_or_coded(axis, codec, feedback, servers), axis, **of_outer)


def exact_or_coded(axis: Any, codec: Any, feedback: Any = None, servers: bool = True) -> fn.Transform:
    if codec is None:
        return fn.compressed_average(axis, fn.identity(), fn.off(), servers=servers)
    return fn.compressed_average(axis, codec, feedback, servers=servers)


def rounds(inner: fn.Transform, outer_tx: fn.Transform, sync: fn.Transform, axis: Any, **more: Any) -> fn.Transform:
    """Return local steps of `inner` behind an exact warm-up."""
    return wrapped(fn.chain(fn.average(axis), fn.outer(inner, outer_tx, sync, **more)), axis)


def sparse_loco(
    lr: Rate = 1e-3, weight_decay: float = 0.1, *, axis: Any, outer_lr: Rate = 1.0, k: int = 128, tile: int = 64,
    over: str = "senders", values: Any = None, keep: float = 0.95, **of_outer: Any,
) -> fn.Transform:  # fmt: skip
    """Return `fn.sparse_loco` with all arguments of `fn.outer`, and with means over any ranks."""
    values = fn.bins(4, 6) if values is None else values

    def mean(n: int) -> fn.Transform:
        codec = fn.top_k(max(1, round(n * k / tile**2)), n, over=over, values=values)
        return fn.compressed_average(axis, codec, fn.decayed(keep), servers=False)

    last = fn.add_decayed_weights(weight_decay), fn.scale_by_learning_rate(lr)
    sync, outer_tx = fn.in_basis(fn.tiles(tile), mean), fn.scale_by_learning_rate(outer_lr)
    return rounds(fn.chain(fn.scale_by_adam(), *last), outer_tx, sync, axis, **of_outer)


def of_kinds(labels: Any, hidden: fn.Transform, other: fn.Transform, flatten: bool = False) -> fn.Transform:
    """Return two optimizers, of tensors whose labels are "hidden" and "other", or of matrices and all else."""
    names = {"hidden": "muon", "other": "other"}
    named = hidden_and_other(labels, names, lambda p: p.ndim == 2 or (flatten and p.ndim > 2))
    return fn.partition({"muon": hidden, "other": other}, named)


def muon(
    lr: Rate = 0.02, momentum: float = 0.95, weight_decay: float = 0.01, b1: float = 0.9, b2: float = 0.95,
    eps: float = 1e-8, *, axis: Any = None, labels: Any = None, owned: bool = True, shards: Any = None,
    nesterov: bool = True, cautious: bool = False, other: str = "adamw", other_rate: float = 1.0, codec: Any = None,
    feedback: Any = None, gather: Any = None, **rule: Any,
) -> fn.Transform:  # fmt: skip
    """Return `fn.muon` with all arguments of its links, and codes that may differ there and back. rule: Muon's."""
    rule = {"eps": eps, "coefficients": "polar_express", **rule}
    travels = {"codec": codec, "feedback": feedback, "gather": gather}
    flatten = rule.get("flatten", False)
    named = hidden_and_other(
        labels, {"hidden": "muon", "other": other}, lambda p: p.ndim == 2 or (flatten and p.ndim > 2)
    )
    kind_of: Any = named
    iterations = fn.scale_by_muon(momentum, nesterov, **rule)
    if shards is not None:
        kind_of, shards_of = labelled(shards, named, labels)
        whole = fn.unsharded(fn.orthogonalize(**rule), shards_of("muon"), **travels)
        iterations = fn.chain(fn.trace(momentum, nesterov), whole)
    decay, rate = fn.add_decayed_weights(weight_decay, cautious), fn.scale_by_learning_rate(lr)
    direction = fn.scale_by_adam(b1, b2, eps) if other == "adamw" else fn.scale_by_lion(b1, b2)
    others = fn.chain(direction, decay, fn.scale(other_rate), rate)
    inner = fn.partition({"muon": fn.chain(iterations, decay, rate), other: others}, kind_of)
    if shards is None and owned and axis is not None:
        return wrapped(fn.owned(inner, axis, **travels), axis)
    mean = fn.average(axis)
    return wrapped(fn.chain(fn.unfrozen(mean) if codec or gather else mean, inner), axis)


def muloco(
    lr: Rate = 0.02, momentum: float = 0.9, b1: float = 0.9, b2: float = 0.99, weight_decay: float = 0.01, *,
    axis: Any, outer_lr: Rate = 0.9, outer_momentum: float = 0.8, codec: Any = None, feedback: Any = None,
    servers: bool = True, inner_nesterov: bool = False, eps: float = 1e-8, labels: Any = None, on_skip: Any = "keep",
    **rule: Any,
) -> fn.Transform:  # fmt: skip
    """Return `fn.muloco` with the authors' scale, and with all arguments of its links. rule: Muon's."""
    last = fn.add_decayed_weights(weight_decay), fn.scale_by_learning_rate(lr)
    hidden = fn.chain(fn.scale_by_muon(momentum, inner_nesterov, eps=eps, **rule), *last)
    inner = of_kinds(labels, hidden, fn.chain(fn.scale_by_adam(b1, b2, eps), *last))
    outer_tx = fn.chain(fn.trace(outer_momentum, True), fn.scale_by_learning_rate(outer_lr))
    return rounds(inner, outer_tx, exact_or_coded(axis, codec, feedback, servers), axis, on_skip=on_skip)


def sign_muon(
    lr: Rate, momentum: float, weight_decay: float, *, axis: Any, votes: str, servers: bool, **rule: Any
) -> fn.Transform:
    """Return `fn.sign_muon` with all arguments of its links. rule: Muon's."""
    sign = fn.scale_by_sign()
    mean = fn.compressed_average(axis, fn.ballots(), fn.off(), servers=servers)
    vote = fn.chain(fn.average(axis), sign, mean, sign)
    iterations = fn.orthogonalize(**{"eps": 1e-7, "coefficients": "jordan", **rule})
    step = of_kinds(None, iterations, sign, rule.get("flatten", False))
    links = (vote, step) if votes == "momenta" else (step, vote)
    rates = of_kinds(None, fn.chain(), fn.scale(0.2), rule.get("flatten", False))
    last = fn.add_decayed_weights(weight_decay), fn.scale_by_learning_rate(lr)
    return wrapped(fn.chain(fn.local_momentum(1 - momentum), *links, rates, *last), axis)
