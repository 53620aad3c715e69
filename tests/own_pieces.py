"""What a user writes beside `fn`: codecs, means and schedules of methods that `fn` does not name.

Nothing here is an option of `fn`. All of it goes where `fn`'s own pieces go: a codec into `compressed_average`, a mean
into `outer` as its `sync`, a schedule's rounds into `Transform.update`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import fn
from fn import Round, tree
from fn.base import missing
from fn.collectives.codecs.codec import Segments, pack, segmented, unpack
from fn.transforms.bases import Basis

Tree = Any

WHOLE = Basis(lambda x: [x.reshape(1, -1)], lambda parts, shape: parts[0].reshape(shape))
"""A tensor as one chunk: `in_basis(WHOLE, f)` asks f for a mean of tensors of each length."""


class LinearPayload(NamedTuple):
    """low, step: (R, 1). codes: (R, bytes) uint8. length: (R, n, 0) uint8, no bytes: only its shape says something."""

    low: Tensor
    step: Tensor
    codes: Tensor
    length: Tensor


def linear(levels: int) -> fn.Codec:
    """Send the nearest of `levels` numbers at equal distances from the least to the largest element of a tensor."""
    width = levels.bit_length() - 1

    def encode(x: Tensor) -> LinearPayload:
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        low = x.amin(1, keepdim=True)
        step = (x.amax(1, keepdim=True) - low) / (levels - 1)
        step = torch.where(step == 0, 1.0, step)
        codes = torch.nan_to_num(((x - low) / step).round()).clamp(0, levels - 1)
        length = torch.empty((*x.shape, 0), dtype=torch.uint8, device=x.device)
        return LinearPayload(low, step, pack(codes.to(torch.uint8), width), length)

    def decode(payload: LinearPayload) -> Tensor:
        return unpack(payload.codes, width, payload.length.shape[1]) * payload.step + payload.low

    return fn.Codec(encode, decode, 1, float(width))


def whole(codec: fn.Codec, x: Tensor) -> tuple[Tree, Tensor]:
    """Return what is sent of x as one tensor, and what is decoded of it."""
    n, more = x.numel(), -x.numel() % codec.align
    row = segmented(codec, Segments((n + more,), torch.tensor([[n]])))
    payload = row.encode(pad(x.reshape(1, -1), (0, more)))
    return payload, row.decode(payload)[0, :n].view_as(x)


def encoded_again(codec: fn.Codec) -> fn.Transform:
    """Return a link that gives every tensor what is decoded of it; behind a mean, all ranks find the same."""
    return fn.stateless(lambda updates, params: tree.map(lambda x: whole(codec, x)[1], updates))


def times(factor: float) -> fn.Transform:
    return fn.stateless(lambda updates, params: tree.map(lambda x: factor * x, updates))


def held_to_median(codec: fn.Codec) -> fn.Codec:
    """Let no rank's message weigh more than the median one, by the norms of what is decoded; else the codec's mean.

    For codecs that decode to a multiple of what they send as floating numbers.
    """
    mean = codec.decode_mean
    assert mean is not None

    def decode_mean(payload: Tree) -> Tensor:
        norms = codec.decode(payload).norm(dim=1)  # of W rows
        weights = (norms.median() / (norms + 1e-8)).clamp(max=1.0)

        def weighed(x: Tensor) -> Tensor:
            return x * weights.view(-1, *(1,) * (x.ndim - 1)) if x.is_floating_point() else x

        return mean(tree.map(weighed, payload))

    return codec._replace(decode_mean=decode_mean, segmented=None, make=None)


def row_of(x: Tensor, index: Tensor) -> Tensor:
    """Return row `index` of x, which may be another one on each rank, as (1, ...)."""
    return x.index_select(0, index.view(1))


def ring(axis: str, codec: fn.Codec) -> fn.Transform:
    """Average the updates in a ring: each of W parts goes from rank to rank, and every hop encodes the sum so far.

    `fn` has no message to a single neighbour. Here a message goes to all, and one rank reads it.
    """

    def mean(x: Tensor, _: Tensor) -> Tensor:
        size, rank = fn.axis_size(axis), fn.axis_index(axis)
        lengths = [len(part) for part in torch.arange(x.numel()).tensor_split(size)]  # the first ones are one longer
        cut = Segments((max(lengths),), torch.tensor(lengths)[:, None])
        own = torch.stack([pad(part, (0, max(lengths) - len(part))) for part in x.flatten().split(lengths)])
        part = row_of(own, rank)
        for hop in range(size - 1):
            sent = segmented(codec, cut.row((rank - hop) % size)).encode(part)
            found = tree.map(lambda rows: row_of(rows, (rank - 1) % size)[0], fn.all_gather(sent, axis))
            here = (rank - 1 - hop) % size
            part = segmented(codec, cut.row(here)).decode(found) + row_of(own, here)
        sent = segmented(codec, cut.row((rank + 1) % size)).encode(part / size)
        found = tree.map(lambda rows: rows.flatten(0, 1), fn.all_gather(sent, axis))  # row r is part r + 1
        rows = segmented(codec, cut._replace(valid=cut.valid.roll(-1, 0))).decode(found).roll(1, 0)
        return torch.cat([row[:n] for row, n in zip(rows, lengths, strict=True)]).view_as(x)

    return fn.stateless(lambda updates, params: tree.map(mean, updates, params))


def guarded_diloco(
    lr: float | Tensor = 4e-4, *, axis: str, guard: dict[str, Any] | None = None, outer_lr: float = 0.7,
    outer_momentum: float = 0.9, weight_decay: float = 0.1, **settings: Any,
) -> fn.Transform:  # fmt: skip
    """Return DiLoCo's chain with a guard around its average. guard: of `norm_guard`. settings: of `outer`."""
    mean = fn.compressed_average(axis, fn.identity(), fn.off())
    adamw = fn.chain(fn.scale_by_adam(), fn.add_decayed_weights(weight_decay), fn.scale_by_learning_rate(lr))
    outer_tx = fn.chain(fn.trace(outer_momentum, nesterov=True), fn.scale_by_learning_rate(outer_lr))
    tx = fn.outer(adamw, outer_tx, fn.contrib.norm_guard(mean, **(guard or {})), **settings)
    return fn.skip_nonfinite(fn.chain(fn.average(axis), tx))


def averaged_along_the_way(lr: float | Tensor = 1e-3, *, axis: str) -> fn.Transform:
    """Return AdamW's chain with the average of its params along the way."""
    inner = fn.chain(fn.scale_by_adam(), fn.scale_by_learning_rate(lr))
    tx = fn.chain(fn.average(axis), fn.contrib.primal_average(inner))
    return fn.skip_nonfinite(tx._replace(compressed_update=missing(fn.Phase.COMPRESSED, "an exact average")))


class MetState(NamedTuple):
    """The state of `meeting`. inner: of the local steps. noted: the params where an exchange began, then their mean."""

    inner: Tree
    noted: Tree

    @property
    def rank_local(self) -> frozenset[str]:
        """Return the fields that are one rank's own."""
        return frozenset({"inner", "noted"})

    @property
    def local_params(self) -> bool:
        """Tell that each rank goes to params of its own."""
        return True


def meeting(inner: fn.Transform, axis: str, parts: Sequence[str]) -> fn.Transform:
    """Take local steps, and move the params in the given parts of a round, the whole round being its parts in turn.

    "difference" halves them, "mean" puts the ranks' mean in their place, "outer" goes half of the way to it.
    """

    def init(params: Tree) -> MetState:
        return MetState(inner.init(params), tree.map(torch.clone, params))

    def local(updates: Tree, state: MetState, params: Tree, /) -> tuple[Tree, MetState]:
        updates, after = inner.local_update(updates, state.inner, params)
        return updates, state._replace(inner=after)

    def difference(number: int, state: MetState, params: Tree) -> tuple[Tree, MetState]:
        found = tree.map(lambda p: 0.5 * p, params) if "difference" in parts else params
        return found, state._replace(noted=tree.map(torch.clone, params))

    def mean(number: int, state: MetState, params: Tree) -> tuple[Tree, MetState]:
        noted = fn.pmean(state.noted, axis)
        return noted if "mean" in parts else params, state._replace(noted=noted)

    def outer(number: int, state: MetState, params: Tree) -> tuple[Tree, MetState]:
        if "outer" not in parts:
            return params, state
        return tree.map(lambda p, x: torch.lerp(p, x, 0.5), params, state.noted), state

    exchange = fn.Exchange(difference, mean, outer)
    return fn.Transform(init, local, exchange.after(local, Round(0, 0)), local, exchange=exchange)
