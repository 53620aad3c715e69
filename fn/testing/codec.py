"""The codec kit: whether a codec keeps what the collectives and the optimizers rely on."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fn import tree
from fn.collectives.axis import axis_size
from fn.collectives.codecs.codec import Codec, Segments, mean_of_rows, segmented, segments_of
from fn.collectives.compressed import compressed_all_reduce, encode
from fn.collectives.feedback import Classic, Feedback, classic, damped, off, plain_error
from fn.collectives.hierarchy import Hop, initial_errors
from fn.collectives.ledger import ledger
from fn.collectives.simulation import simulate
from fn.errors import expected
from fn.testing.kernels import Check, run_checks

Tree = Any

CPU = torch.device("cpu")

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

ROUNDS = 32
"""Encodings in a check: within them a number that is added each time must come back, and errors must stop growing."""


class Report(NamedTuple):
    """The outcome: how many checks, and what was wrong."""

    checks: int
    faults: tuple[str, ...]

    def __bool__(self) -> bool:
        return not self.faults

    def __repr__(self) -> str:
        head = f"{'conforming' if self else 'NOT conforming'}: {self.checks} checks"
        return "\n".join([head, *(f"  {fault}" for fault in self.faults)])


def check_codec(codec: Codec) -> Report:
    """Hold a codec to what is asked of every codec, on the CPU and on simulated ranks.

    Shapes and dtypes of what comes back; rows that are decoded alone; inputs left alone; zero stays zero, or without
    magnitudes is + as often as -, and a number among zeros comes back; a NaN or Inf arrives; with classic feedback the
    sum of what was delivered plus the error is the sum of what was sent, and the error does not grow; several tensors
    in a row do not touch one another; vmap and fullgraph compilation; the ledger's bytes are `bits`; `fused`,
    `decode_mean` and `segmented` compute the algebra.

    >>> import fn
    >>> fn.testing.check_codec(fn.int8())
    conforming: 26 checks
    >>> print(fn.testing.check_codec(fn.sign()._replace(bits=0.5)).faults[0])
    bits on the wire: are 1 per element in the ledger, but `bits` says 0.5

    Args: codec: any codec; `fused`, `segmented` and `decode_mean` are looked at where it has them.
    Returns: a report, true if nothing was wrong.
    Raises: TypeError if it is no codec, such as the function `fn.sign` in place of `fn.sign()`.
    """
    if not isinstance(codec, Codec):
        raise TypeError(expected("codec", "a Codec, such as fn.sign()", f"{codec!r}"))
    checks, faults = run_checks(_checks(codec))
    return Report(checks, tuple(faults))


def _checks(codec: Codec) -> Iterator[Check]:
    for dtype, rows, units in itertools.product(DTYPES, (1, 3), (1, 5)):
        yield f"{dtype}, {rows} rows of {units} x align", partial(_round_trip, codec, dtype, rows, units)
    yield "the same inputs", lambda: _pure(codec)
    yield "zeros", lambda: _zeros(codec)
    yield "NaN and Inf", lambda: _nonfinite(codec)
    yield "classic feedback", lambda: _telescopes(codec, None)
    yield "classic feedback, several tensors", lambda: _telescopes(codec, _segments(codec))
    yield "several tensors", lambda: _apart(codec)
    yield "vmap", lambda: _vmap(codec)
    yield "fullgraph", lambda: _fullgraph(codec)
    yield "bits on the wire", lambda: _bits(codec)
    yield "kernels", lambda: _kernels(codec)


def _length(codec: Codec) -> int:
    return -(-600 // codec.align) * codec.align


def _numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64, device=CPU).to(dtype)


def _segments(codec: Codec) -> Segments:
    """Return two rows of four tensors: a whole one, one that ends early, an empty one, one that row 1 lacks."""
    widths = (5 * codec.align, 3 * codec.align, 0, codec.align)
    lengths = [[*widths], [widths[0], 2 * codec.align, 0, 0]]
    return Segments(widths, torch.tensor(lengths, dtype=torch.int64, device=CPU))


def _unequal(a: Tree, b: Tree) -> bool:
    first, second = tree.leaves(a), tree.leaves(b)
    if len(first) != len(second):
        return True
    pairs = [(_comparable(x), _comparable(y)) for x, y in zip(first, second, strict=True)]
    return not all(x.shape == y.shape and torch.allclose(x, y, 1e-6, 1e-7, equal_nan=True) for x, y in pairs)


def _comparable(x: Tensor) -> Tensor:
    """Return floats of a byte as bytes: that is how they travel, and torch compares no float8."""
    return x.view(torch.uint8) if x.is_floating_point() and x.element_size() == 1 else x


def _round_trip(codec: Codec, dtype: torch.dtype, rows: int, units: int) -> str | None:
    x = _numbers(rows, units * codec.align, dtype=dtype)
    payload = codec.encode(x)
    for leaf in tree.leaves(payload):
        if not isinstance(leaf, Tensor) or leaf.ndim < 1 or leaf.shape[0] != rows:
            shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else type(leaf).__name__
            return f"the payload has a leaf {shape}; its first dimension must be the {rows} rows"
    back = codec.decode(payload)
    if back.shape != x.shape or not back.is_floating_point():
        return f"decode gives {tuple(back.shape)} {back.dtype}; it must be floating of shape {tuple(x.shape)}"
    if not back.isfinite().all():
        return "finite numbers come back as NaN or Inf"
    # A row of a payload is what one rank gets, so it must decode without the others.
    alone = torch.cat([codec.decode(tree.map(lambda leaf, r=r: leaf[r : r + 1], payload)) for r in range(rows)])
    return "a row decodes to something else when it is alone" if _unequal(alone, back) else None


def _pure(codec: Codec) -> str | None:
    x = _numbers(2, _length(codec))
    # Clones are compared: a codec that wrote into x would have changed both sides.
    kept, payload = x.clone(), codec.encode(x)
    bytes_sent, again = tree.map(torch.clone, payload), codec.encode(x)
    codec.decode(payload)
    if _unequal(x, kept) or _unequal(payload, bytes_sent):
        return "encode or decode wrote into its argument"
    return "give another payload" if _unequal(payload, again) else None


def _zeros(codec: Codec) -> str | None:
    n = _length(codec)
    still = codec.decode(codec.encode(torch.zeros(2, n, dtype=torch.float32, device=CPU)))
    if still.any() and (still.sum(1).any() or still.abs().unique().numel() > 1):  # a vote says + as often as -
        return "moved"
    for place in (0, n // 2, n - 1):
        x = torch.zeros(1, n, dtype=torch.float32, device=CPU)
        x[0, place] = -1.0
        sums = x.clone()
        for _ in range(ROUNDS):  # with what was not delivered: a threshold may hold it back for a while
            delivered = codec.decode(codec.encode(sums))
            sums = sums + x - delivered
            if delivered[0, place] < 0:
                break
        else:
            return f"-1 among zeros does not come back at {place} of {n}, so no error makes up for it"
    return None


def _nonfinite(codec: Codec) -> str | None:
    for bad, place in itertools.product((math.nan, math.inf, -math.inf), (3, _length(codec) - 1)):
        x = _numbers(1, _length(codec))
        x[0, place] = bad
        if codec.decode(codec.encode(x)).isfinite().all():
            return f"{bad} comes back finite, so no rank would skip the step and the error keeps it for good"
    return None


def _telescopes(codec: Codec, segments: Segments | None) -> str | None:
    half, row = segmented(codec, segments), segments_of(segments, 2, _length(codec), CPU)
    n = row.row_length
    error: Tree = classic().init(torch.zeros(2 * n, dtype=torch.float32, device=CPU))
    # In float64: what is looked at is the codec's rounding, and not that of these sums.
    sent = delivered = torch.zeros(2, n, dtype=torch.float64, device=CPU)
    sizes = []
    for step in range(ROUNDS):
        x = row.clear(_numbers(2, n, seed=step))
        payload, error = encode(half, classic(), x, error)
        sent, delivered = sent + x, delivered + half.decode(payload)
        sizes.append(float(error.norm()))
    early, late = max(sizes[: ROUNDS // 2]), max(sizes[ROUNDS // 2 :])
    if not late <= 2 * early + 1e-3:
        return f"the error grows without end: {early:.3g}, later {late:.3g}"
    same = torch.allclose(delivered + error.view(2, -1), sent, rtol=0, atol=1e-5 * ROUNDS)
    return None if same else "what was delivered plus the error is not what was sent"


def _apart(codec: Codec) -> str | None:
    y = _numbers(2, _length(codec))
    only = segmented(codec, segments_of(None, 2, y.shape[1], CPU))
    if _unequal(only.decode(only.encode(y)), codec.decode(codec.encode(y))):
        return "`segmented` is another codec: the only tensor of a row comes back as something else"
    segments = _segments(codec)
    half, first = segmented(codec, segments), segments.widths[0]
    x = segments.clear(_numbers(2, segments.row_length))
    # (2, first) and (2, n - first) -> (2, n)
    louder = torch.cat([1000 * x[:, :first], x[:, first:]], 1)
    one, two = (half.decode(half.encode(y))[:, first:] for y in (x, louder))
    return "a tensor's size changes what comes back of its neighbour" if _unequal(one, two) else None


def _vmap(codec: Codec) -> str | None:
    x = _numbers(3, 2, _length(codec))
    # (batch, R, n) -> leaves (batch, R, ...)
    payload = torch.func.vmap(codec.encode)(x)
    back = torch.func.vmap(codec.decode)(payload)
    single = [codec.encode(row) for row in x]
    same = not _unequal(back, torch.stack([codec.decode(p) for p in single]))
    return None if same else "over a batch differs from one by one"


def _fullgraph(codec: Codec) -> str | None:
    x = _numbers(2, _length(codec))
    # All checks compile this one lambda: without a reset dynamo gives up at the ninth.
    torch._dynamo.reset()
    # "aot_eager" traces as Inductor does, and compiles nothing
    compiled = torch.compile(lambda y: codec.decode(codec.encode(y)), fullgraph=True, backend="aot_eager")
    return "compiled it differs from eager" if _unequal(compiled(x), codec.decode(codec.encode(x))) else None


def _bits(codec: Codec) -> str | None:
    if math.isnan(codec.bits):  # it depends on the length
        return None
    lengths = [2**14 * codec.align * k for k in (2, 4)]
    totals = []
    for n in lengths:
        with ledger() as sent:
            _all_reduce(codec, off(), n)(_numbers(2, n))
        totals.append(sent.total)
    bits = 8 * (totals[1] - totals[0]) / (lengths[1] - lengths[0])  # each half sends half a vector; constants drop out
    if math.isclose(bits, codec.bits, rel_tol=1e-3):  # blocks need not divide the lengths
        return None
    return f"are {bits:g} per element in the ledger, but `bits` says {codec.bits:g}"


def _all_reduce(codec: Codec, feedback: Feedback, n: int, rounds: int = 1) -> Callable[[Tensor], Tree]:
    def on_rank(x: Tensor) -> Tree:
        errors = initial_errors(x, "data", codec, feedback)
        for k in range(rounds):
            y, errors = compressed_all_reduce(x * (1 + k), errors, "data", codec, feedback)
        return y, settle_errors(x, errors, "data", codec, feedback) if rounds > 1 else ()

    return simulate(on_rank, "data", 2, out_dims=(None, 0))


def settle_errors(
    x: Tensor, errors: tuple[Tree, Tree], axis: str, codec: Codec, feedback: Feedback, segments: Segments | None = None
) -> tuple[Tensor, Tensor]:
    """Return a worker's and a server's error as the plain vectors (n,) and (n / W,) that they stand for; x as sent."""
    hop, rows = Hop(axis, codec, feedback), x.view(axis_size(axis), -1)
    worker = plain_error(hop.for_rows(segments), feedback, errors[0], rows)
    return worker, plain_error(hop.for_own_row(segments), feedback, errors[1], rows[:1])


def _kernels(codec: Codec) -> str | None:
    payload = codec.encode(_numbers(3, _length(codec)))
    if not _is_mean(mean_of_rows(codec, payload), codec.decode(payload)):
        return "decode_mean is not the mean of the decoded rows, nor of those that hold the element"
    n = 2 * 256 * codec.align  # rows of whole blocks, which `damped` cuts alike with and without the codec
    for feedback in (classic(), classic(lazy=True), damped()):
        if codec.fused is None or codec.fused(feedback.rule) is None:
            continue
        plain = classic() if isinstance(feedback.rule, Classic) else feedback  # lazy errors are the kernels' own
        in_one = _all_reduce(codec, feedback, n, rounds=3)(_numbers(2, n))
        in_two = _all_reduce(codec._replace(fused=None), plain, n, rounds=3)(_numbers(2, n))
        if _unequal(in_one[0], in_two[0]):
            return f"the kernel for {feedback.rule} is not the codec and the feedback one after the other"
    return _averages(codec)


def _is_mean(mean: Tensor, rows: Tensor) -> bool:
    """Return whether a vector (n,) is the mean of rows (R, n), or of those that are not zero, element by element."""
    # (R, n) -> (n,): how many rows hold an element
    held = (rows != 0).sum(0)
    close = torch.zeros(rows.shape[1], dtype=torch.bool, device=CPU)
    for count in range(1, rows.shape[0] + 1):  # a row may hold a zero
        same = torch.isclose(mean, rows.sum(0) / count, 1e-6, 1e-7, equal_nan=True)
        close = close | (same & (count >= held))
    return bool(close.all())


def _averages(codec: Codec) -> str | None:
    segments = _segments(codec)
    half = segmented(codec, segments)
    fused = half.fused(classic().rule) if half.fused is not None else None
    if fused is None or fused.averages is None:
        return None
    lengths: list[int] = segments.valid.sum(0).tolist()
    mu, grads = ([_numbers(n, seed=10 * k + s) for s, n in enumerate(lengths)] for k in range(2))
    error = segments.clear(_numbers(2, segments.row_length)).reshape(-1)
    formed = [torch.lerp(g, m, 0.9) for m, g in zip(mu, grads, strict=True)]
    # (numel,) -> (2 w,) -> (2, w)
    padded = [F.pad(t, (0, 2 * w - len(t))).view(2, w) for t, w in zip(formed, segments.widths, strict=True)]
    encoded = encode(half._replace(fused=None), classic(), torch.cat(padded, 1), error)
    in_one = fused.averages(mu, grads, 0.9, error=error, rows=2)
    return "the kernel `averages` is not encode of the moving averages" if _unequal(in_one, encoded) else None
