"""DeepSpeed's LoCo and qgZ reductions as pure functions, number for number, on any device.

    >>> gradient = torch.linspace(-1, 1, 64).view(8, 8)
    >>> (mean,), errors = loco_quant_reduce([gradient], local_axis="local", node_axis="node")
    >>> round(float((mean.view(8, 8) - gradient).abs().max()), 3)           # what two times 4 bits lose, on one rank
    0.234
    >>> (mean,), errors = loco_quant_reduce([gradient], errors, local_axis="local", node_axis="node")

Each gradient is quantized twice to 4 bits: before the exchange within the node, and again before the exchange across
nodes. This is for those who compare; `fn.reduce_scatter_mean` over ("local", "node") and `fn.loco_adamw` are this
library's own, which return the mean, take any size, and keep an error's age with the error.

Source: DeepSpeed 0.19.6, runtime/comm/coalesced_collectives.py and csrc/quantization, by behaviour.
Paper: Xie et al., LoCo (arXiv 2407.04480); Wang et al., ZeRO++ (arXiv 2306.10209), section 4.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fn.arguments import check_interval, check_whole, checked
from fn.collectives import messages
from fn.collectives.agreement import check_agreement, describe_leaves, device_of
from fn.collectives.axis import axis_size
from fn.collectives.codecs.codec import identity
from fn.collectives.compressed import reduce_scatter_wide
from fn.collectives.feedback import StoredError, off
from fn.errors import expected


class LocoErrors(NamedTuple):
    """The errors that `loco_quant_reduce` keeps of each tensor, empty for an exact one, and the counter of all.

    intra: of the stage within the node, (numel,) in the tensor's own order. inter: of the stage across nodes, (numel /
    L,), parts n L + l for n = 0 .. N - 1. counter: reductions since the last reset, 0-d int64, the same on every rank.
    """

    intra: tuple[StoredError, ...]
    inter: tuple[StoredError, ...]
    counter: Tensor

    @property
    def rank_local(self) -> frozenset[str]:
        """Return the fields that belong to one rank."""
        return frozenset({"intra", "inter"})


class Stage(NamedTuple):
    """The message of one rank in a stage, in the order of sending, and the error that it keeps.

    codes: uint8, two to a byte. scales: float32, of each group. kept: the error before it is stored in 8 bits, in the
    dtype of the tensor. stored: the same in 8 bits.
    """

    codes: Tensor
    scales: Tensor
    kept: Tensor
    stored: StoredError


class Reduction(NamedTuple):
    """All of one tensor's reduction: this rank's part of the result, and both stages."""

    out: Tensor
    intra: Stage
    inter: Stage


@checked("tensors", "errors", "local_axis", "node_axis")
def loco_quant_reduce(
    tensors: Sequence[Tensor],
    errors: LocoErrors | None = None,
    *,
    local_axis: str,
    node_axis: str,
    err_beta: float = 0.8,
    reset_T: int = 1024,
) -> tuple[list[Tensor], LocoErrors]:
    """Reduce gradients in two stages of 4 bits with LoCo's error feedback, as DeepSpeed's ZeRO-3 does.

        h = g + e1,   q = Q_4(h),   e1 <- Q_8(b e1 + (1 - b) (h - D(q)))           within the node
        h = sum_l D(q_l) + e2,   q = Q_4(h),   e2 <- Q_8(b e2 + (1 - b) (h - D(q)))    across nodes
        out = (sum_n D(q_n)) / N                                 L times the mean, as DeepSpeed's

    Args:
        tensors: this rank's gradients. Sums and errors are rounded to their dtype; there only float16 is meant.
        errors: what the last call returned; None starts.
        local_axis: the L ranks of a node. node_axis: the N nodes.
        err_beta: weight of the old error. reset_T: all tensors share a counter, which a tensor that finds it above
            reset_T sets back to 0 and then takes its own errors as zero.
    Returns: part n L + l of each reduced tensor (numel / W,) on rank (n, l), and the next errors. As there, the groups
        are G = max(shape[0], shape[1], W), and tensors of one dimension, or whose numel 2 W does not divide, are not
        quantised: of these it is part n L + l of the exact *mean*, (ceil(numel / W),), zeros behind the end.
    Raises: ValueError if a tensor cannot be divided into G groups of a multiple of 8 elements, G a multiple of W, which
        is not checked there; if an argument is out of range; or if the errors are of other tensors.
    """
    check_interval("err_beta", err_beta, "[0, 1)")
    check_whole("reset_T", reset_T, 0)
    plans = [_groups(t, i, local_axis, node_axis) for i, t in enumerate(tensors)]
    start = errors is None
    if start:
        fields = {**describe_leaves(list(tensors)), "err_beta": err_beta, "reset_T": reset_T}
        check_agreement((local_axis, node_axis), fields, device_of(list(tensors)))
    errors = _start(tensors, plans, local_axis) if errors is None else errors
    _check(errors, tensors, plans, local_axis)
    counter, outputs, intra, inter = errors.counter, [], [], []
    for tensor, groups, e1, e2 in zip(tensors, plans, errors.intra, errors.inter, strict=True):
        if groups:
            reset = torch.ones_like(counter, dtype=torch.bool) if start else counter > reset_T
            # By `where`, on the device: a branch would wait for it in each reduction.
            counter = torch.where(reset, 0, counter) + 1
            e1, e2 = (e._replace(scales=torch.where(reset, 0.0, e.scales)) for e in (e1, e2))
            done = reduce_tensor(tensor, groups, (e1, e2), err_beta, local_axis, node_axis)
            outputs.append(done.out)
            e1, e2 = done.intra.stored, done.inter.stored
        else:
            outputs.append(_exact_part(tensor, local_axis, node_axis))
        intra.append(e1)
        inter.append(e2)
    return outputs, LocoErrors(tuple(intra), tuple(inter), counter)


@checked("tensors", "local_axis", "node_axis")
def quant_reduce(tensors: Sequence[Tensor], *, local_axis: str, node_axis: str) -> list[Tensor]:
    """Reduce gradients in two stages of 4 bits without feedback: ZeRO++'s qgZ, as DeepSpeed's ZeRO-3 does.

    Args, Returns and Raises: as for `loco_quant_reduce`, without errors.
    """
    outputs = []
    for i, tensor in enumerate(tensors):
        groups = _groups(tensor, i, local_axis, node_axis)
        if groups:
            outputs.append(reduce_tensor(tensor, groups, None, 0.0, local_axis, node_axis).out)
        else:
            outputs.append(_exact_part(tensor, local_axis, node_axis))
    return outputs


def reduce_tensor(
    tensor: Tensor,
    groups: int,
    errors: tuple[StoredError, StoredError] | None,
    beta: float,
    local_axis: str,
    node_axis: str,
) -> Reduction:
    """Reduce one tensor in two stages, and return all that is sent and kept.

    Args: tensor: (numel elements). groups: G. errors: of the two stages, or None for none. The rest as for
        `loco_quant_reduce`.
    """
    ranks, nodes = axis_size(local_axis), axis_size(node_axis)
    e1, e2 = errors if errors is not None else (None, None)
    first = _stage(tensor.reshape(-1), groups, e1, beta)
    codes, scales = (_by_receiver(x, nodes, ranks) for x in (first.codes, first.scales))
    # (L, N part) codes, a row for each rank of the node -> (L, n / L) numbers, a row from each.
    rows = _decode(messages.exchange((codes, scales), local_axis), tensor.dtype)
    second = _stage(_add(rows), groups // ranks, e2, beta)
    # Codes (n / L / 2,) -> (N, n / W / 2), scales (G / L,) -> (N, G / W): a row for each node.
    parts = (second.codes.view(nodes, -1), second.scales.view(nodes, -1))
    # (N, n / W) -> (n / W,)
    total = _add(_decode(messages.exchange(parts, node_axis), tensor.dtype))
    out = (total.float() * (1.0 / nodes)).to(tensor.dtype)
    return Reduction(out, first._replace(codes=codes.flatten(), scales=scales.flatten()), second)


def _stage(x: Tensor, groups: int, error: StoredError | None, beta: float) -> Stage:
    """Compensate x (n,), quantise it, and keep what was lost; the arithmetic is in float32 unless it says otherwise."""
    valid, runs = _place(x.shape[0], groups, x.device)
    if error is not None:
        # Rounded to the dtype of the tensor, as there.
        old = _decoded(error.codes[None], error.scales[None], valid, runs, 8)[0].to(x.dtype)
        x = x + old
    codes, scales = torch.ops.fn.quantize(x[None], valid, runs, 4)  # (1, n / 2), (1, G)
    if error is None:
        return Stage(codes[0], scales[0], x[:0], _zero_error(0, 0, x.device))
    sent = _decoded(codes, scales, valid, runs, 4)[0].to(x.dtype)
    beta = float(torch.tensor(beta, dtype=torch.float32, device="cpu"))  # DeepSpeed's kernels take 1 - beta of that
    kept = (beta * old.float() + (1.0 - beta) * (x.float() - sent.float())).to(x.dtype)
    stored = torch.ops.fn.quantize(kept[None], valid, runs, 8)
    return Stage(codes[0], scales[0], kept, StoredError(stored[0][0], stored[1][0]))


def _by_receiver(x: Tensor, nodes: int, ranks: int) -> Tensor:
    """Return parts n L + l as rows l of parts n, what goes to local rank l: (L, N * part)."""
    # (n,) -> (N, L, part) -> (L, N, part) -> (L, N part)
    return x.view(nodes, ranks, -1).transpose(0, 1).reshape(ranks, -1)


def _decode(received: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """Return rows of codes (R, n / 2) and scales (R, groups) as numbers (R, n), rounded to the dtype."""
    codes, scales = received
    valid, runs = _place(2 * codes.shape[1], scales.shape[1], codes.device)
    # valid (1, groups) -> (R, groups), without memory.
    return _decoded(codes, scales, valid.expand(codes.shape[0], -1), runs, 4).to(dtype)


def _decoded(codes: Tensor, scales: Tensor, valid: Tensor, runs: Sequence[int], width: int) -> Tensor:
    # (R, ...) -> (R, 1, ...): a mean of one message
    rows: Tensor = torch.ops.fn.dequantize_mean(codes[:, None], scales[:, None], valid, runs, width)
    return rows


def _add(rows: Tensor) -> Tensor:
    """Add rows in their order, each sum rounded to the rows' dtype."""
    # One by one: `sum` of half precision would add in float32, and round once.
    total = rows[0]
    for row in rows[1:].unbind(0):
        total = total + row
    return total


def _place(n: int, groups: int, device: torch.device) -> tuple[Tensor, list[int]]:
    return torch.full((1, groups), n // groups, dtype=torch.int64, device=device), [groups, n // groups]


def _groups(tensor: Tensor, index: int, local_axis: str, node_axis: str) -> int:
    """Return the number of groups, 0 for a tensor that is not quantised."""
    if not tensor.is_floating_point():
        raise TypeError(expected(f"tensors[{index}]", "a floating dtype", f"{tensor.dtype}"))
    world = axis_size((local_axis, node_axis))
    if tensor.ndim < 2 or tensor.numel() % (2 * world) or not tensor.numel():
        return 0
    groups = max(tensor.shape[0], tensor.shape[1], world)
    if groups % world or tensor.numel() % groups or tensor.numel() // groups % 8:
        wanted = f"a multiple of {world} groups of a multiple of 8 elements"
        got = f"{groups} groups of {tensor.numel() / groups:g} elements, of shape {tuple(tensor.shape)}"
        raise ValueError(expected(f"tensors[{index}]", wanted, got))
    return groups


def _exact_part(tensor: Tensor, local_axis: str, node_axis: str) -> Tensor:
    """Return part n L + l of the mean, exactly: the exchange over ("node", "local") puts it on rank (n, l)."""
    flat, axes = tensor.reshape(-1), (node_axis, local_axis)
    # (n,) -> (W ceil(n / W),)
    flat = F.pad(flat, (0, -flat.shape[0] % axis_size(axes)))
    shard, _ = reduce_scatter_wide(flat, (), axes, (identity(), identity()), off())
    return shard.to(tensor.dtype)


def _zero_error(numel: int, groups: int, device: torch.device) -> StoredError:
    codes = torch.zeros(numel, dtype=torch.int8, device=device)
    return StoredError(codes, torch.zeros(groups, dtype=torch.float32, device=device))


def _start(tensors: Sequence[Tensor], plans: Sequence[int], local_axis: str) -> LocoErrors:
    def zeros(share: int) -> tuple[StoredError, ...]:
        pairs = zip(tensors, plans, strict=True)
        return tuple([_zero_error(bool(g) * t.numel() // share, g // share, t.device) for t, g in pairs])

    counter = torch.zeros((), dtype=torch.int64, device=device_of(list(tensors)))
    return LocoErrors(zeros(1), zeros(axis_size(local_axis)), counter)


def _check(errors: LocoErrors, tensors: Sequence[Tensor], plans: Sequence[int], local_axis: str) -> None:
    # On the meta device: only shapes are compared, and errors are as large as the model.
    like = _start([t.new_empty(t.shape, device="meta") for t in tensors], plans, local_axis)
    for name in ("intra", "inter"):
        ours, theirs = getattr(like, name), getattr(errors, name)
        if [(e.codes.shape, e.scales.shape) for e in ours] != [(e.codes.shape, e.scales.shape) for e in theirs]:
            raise ValueError(
                f"errors: {name} has codes of {[e.codes.shape[0] for e in theirs]} elements, but these tensors on "
                f"these axes need {[e.codes.shape[0] for e in ours]}"
            )
