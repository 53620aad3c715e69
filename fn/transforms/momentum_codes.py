"""A momentum that is kept as codes: after a compressed step of 1-bit Adam it is scale * sign, zero where nu is.

What all ranks have received is the new momentum: a bit per element, and a scale for each server's piece of a tensor. So
it need not be written in float32, and the next step need not read it. A second bit says where the second moment is
above zero: elsewhere the momentum is zero, which one bit cannot say.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn import tree
from fn.collectives.codecs.codec import Segments
from fn.collectives.compressed import ErrorFeedbackState
from fn.errors import expected
from fn.kernels.layout import per_run, rows_of, tensors_of
from fn.kernels.reference.codes import momentum_of_codes
from fn.kernels.tracing import cached_plan, is_concrete
from fn.transforms import flat_layout as layouts
from fn.transforms.flat_layout import Bucket

Tree = Any

BYTE = 8
"""Elements of a byte: what pieces of `fn.sign` are a multiple of."""


class MomentumCodes(NamedTuple):
    """A momentum as codes, with an entry for each vector that travels, of R rows of n elements in S tensors.

    scales: (R, S). bits: (R, n / 8) uint8, signs as `fn.sign` packs them. seen: (R, n / 8) uint8, whether the second
    moment is above zero.
    """

    scales: tuple[Tensor, ...]
    bits: tuple[Tensor, ...]
    seen: tuple[Tensor, ...]


def encoded(mu: Tree, nu: Tree, vectors: Sequence[Bucket]) -> MomentumCodes:
    """Return a momentum of scale * sign as codes. Args: vectors: as which it travels."""
    leaves, squares = tree.lists(mu, nu)
    scales, bits, seen = [], [], []
    for bucket in vectors:
        rows, runs = bucket.segments.valid.shape[0], bucket.segments.runs
        moments, below = ([tensors[i] for i in bucket.leaf_indices] for tensors in (leaves, squares))
        peaks = per_run(rows_of(moments, rows, runs), runs, _largest)
        scales.append(torch.cat(peaks, -1))
        bits.append(_packed([~torch.signbit(m) for m in moments], moments, rows, runs))
        seen.append(_packed([v > 0 for v in below], moments, rows, runs))
    return MomentumCodes(tuple(scales), tuple(bits), tuple(seen))


def _largest(part: Tensor, first: int, end: int) -> Tensor:
    return part.abs().amax(-1) if part.numel() else part.new_zeros(part.shape[:2])


def _packed(flags: Sequence[Tensor], like: Sequence[Tensor], rows: int, runs: Sequence[int]) -> Tensor:
    """Return flags as bits, 0 in the padding."""
    ones = rows_of([flag.to(x.dtype) for flag, x in zip(flags, like, strict=True)], rows, runs)
    packed: Tensor = torch.ops.fn.pack_bits(ones - 0.5)
    return packed


def decoded(codes: MomentumCodes, nu: Tree) -> Tree:
    """Return the momentum. Args: nu: the second moment, whose shapes and structure are those of the momentum."""
    squares, structure = tree.flatten(nu)
    leaf_at: dict[int, Tensor] = {}
    for bucket, *codes_of in zip(vectors_of(codes, squares), *codes, strict=True):
        scales, bits, seen = codes_of
        place = _valid_on(bucket.segments, scales.device), bucket.segments.runs
        rows = momentum_of_codes(bits, seen, scales, *place)
        means = tensors_of(rows, [squares[i] for i in bucket.leaf_indices], bucket.segments.runs)
        leaf_at.update(zip(bucket.leaf_indices, means, strict=True))
    return layouts.restore(structure, leaf_at)


@cached_plan
def _valid_on(segments: Segments, device: torch.device) -> Tensor:
    return segments.valid.to(device)


def vectors_of(codes: MomentumCodes, leaves: Sequence[Tensor]) -> list[Bucket]:
    """Return the vectors that codes are of. Args: leaves: of the momentum, or tensors of the same shapes.

    Raises: ValueError if the codes are of tensors of other shapes.
    """
    sizes = [(len(bits), BYTE * bits.shape[1]) for bits in codes.bits]
    vectors = _vectors(leaves, sizes)
    if vectors is None:
        got = f"codes of vectors of (rows, elements) {sizes}"
        raise ValueError(expected("state", f"codes of tensors of {[*map(Tensor.numel, leaves)]} elements", got))
    return vectors


def vectors_between(sync: Tree, leaves: Sequence[Tensor]) -> list[Bucket] | None:
    """Return the vectors as which a momentum travels through servers; None if the state of its average says nothing.

    Args: sync: the state of `compressed_average` over one axis. leaves: of the momentum.
    """
    if not isinstance(sync, ErrorFeedbackState):
        return None
    lengths = [[_length(error) for error in errors] for errors in sync]
    if len(lengths[0]) != len(lengths[1]) or None in (*lengths[0], *lengths[1]):
        return None
    sizes = [(whole // max(1, piece), piece) for whole, piece in zip(*lengths, strict=True)]
    return _vectors(leaves, sizes)


def _length(error: Tree) -> int | None:
    """Return how many elements an error is of: a vector, or a NamedTuple that begins with one."""
    first = error[0] if isinstance(error, tuple) and hasattr(error, "_fields") else error
    return first.shape[0] if isinstance(first, Tensor) and first.ndim == 1 else None


def _vectors(leaves: Sequence[Tensor], sizes: Sequence[tuple[int, int]]) -> list[Bucket] | None:
    """Return how leaves are laid out in vectors of R rows of n elements each. Args: sizes: (R, n) of each."""
    rows = max([1, *(count for count, _ in sizes)])
    for layout in ("flat", "per_tensor"):
        vectors = layouts.buckets(leaves, rows, BYTE, layout)
        lengths = [vector.segments.row_length for vector in vectors]
        if lengths == [n for _, n in sizes] and all(count == rows or not n for count, n in sizes):
            return vectors
    return None


def check_is_of_codes(mu: Tree, codes: MomentumCodes, nu: Tree) -> None:
    """Refuse codes that are not the same as the momentum, with a ValueError; a device is waited for."""
    pairs = [*zip(tree.leaves(mu), tree.leaves(decoded(codes, nu)), strict=True)]
    if not is_concrete(*(m for m, _ in pairs)):
        return
    same = [m.eq(x).all() for m, x in pairs if m.numel()]
    if same and not bool(torch.stack([flag.to(same[0].device) for flag in same]).all()):
        wanted = "a momentum of scale * sign, zero where the second moment is"
        cure = "call it behind a compressed step with fn.sign() over one axis of two ranks or more"
        raise ValueError(expected("state", wanted, "another one, as a warm-up leaves it", cure))
