"""Error feedback: what was not delivered is kept and sent later.

A feedback is three pure functions over an explicit error, the residual of the quantized values. `classic` keeps the
whole difference, `decayed` a part of it, `damped` a moving average of it in 8 bits, `off` none. `differences` keeps
what was delivered instead. Below them stand the forms in which errors are kept, and the vectors that errors stand for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fn.arguments import check_flag, check_interval, check_number, check_whole
from fn.collectives.codecs.codec import Codec, Fused, Segments, segmented, segments_of
from fn.collectives.codecs.pickling import invalidates
from fn.errors import expected
from fn.kernels.layout import scale_dtype, tile

Tree = Any


@invalidates({"init", "compensate", "residual", "delivered"}, {"rule", "make"})
class Feedback(NamedTuple):
    """How the error of one rank enters the next message.

    init: x (n,) -> error, for vectors like x.
    compensate: (x, error) -> (n,), what is encoded.
    residual: (compensated, decoded, error) -> the next error.
    rule: the kind of these three functions and their arguments, for codecs that have a kernel for it. None: unknown.
    delivered: (x, error) -> the next error after x was delivered exactly. With it an average averages in the warm-up,
        too, so that the first step in codes has nothing to catch up on. None: an exact step leaves errors alone.
    make: a function without arguments that makes this feedback again, which is what is pickled. None: no pickle.

    `_replace` of one of the functions also sets rule and make to None, unless they are given: they belong to the old.
    Of any other field it sets `make` to None.
    """

    init: Callable[[Tensor], Tree]
    compensate: Callable[[Tensor, Tree], Tensor]
    residual: Callable[[Tensor, Tensor, Tree], Tree]
    rule: Any = None
    delivered: Callable[[Tensor, Tree], Tree] | None = None
    make: Callable[[], Feedback] | None = None


class Classic(NamedTuple):
    """The rule of `classic`. lazy: whether the codec may choose the form of the error."""

    lazy: bool


class StoredClassic(NamedTuple):
    """The rule of `classic` with a store, its arguments."""

    store: Any
    block: int


class Damped(NamedTuple):
    """The rule of `damped`, its arguments."""

    beta: float
    every: int
    block: int


class Decayed(NamedTuple):
    """The rule of `decayed`, its arguments."""

    keep: float
    deliver: float


class Differences(NamedTuple):
    """The rule of `differences`."""


class Off(NamedTuple):
    """The rule of `off`."""


class LazyError(NamedTuple):
    """An error that is formed when it is needed: buffer - scale * sgn(buffer). The sum is the same, memory is saved.

    buffer: (n,), what was encoded last. scale: the scales it was sent with, in the shape that the codec's kernels use.
    """

    buffer: Tensor
    scale: Tensor


class StoredError(NamedTuple):
    """An error in blocks of 8 bits. codes: (n,) int8. scales: (ceil(n / block),) float32, float64 for float64."""

    codes: Tensor
    scales: Tensor


class DampedError(NamedTuple):
    """An error kept in 8 bits, and its age.

    codes: (n,) int8. scales: (n / block,), or (R, S) where a codec's blocks are the error's. age: 0-d int64, steps.
    """

    codes: Tensor
    scales: Tensor
    age: Tensor


class Counted(NamedTuple):
    """No error but a count: of a codec whose codes of the same numbers differ from step to step. age: as there."""

    age: Tensor


def classic(*, lazy: bool = False, store: torch.dtype | str | None = None, block: int = 64) -> Feedback:
    """Keep the whole difference: c = x + e, send C(c), e <- c - C(c).

    The sum of all that was delivered plus the last error is the sum of all that was to be sent, up to rounding; with
    a store, up to the sum of what saving lost in each step, at most abs(e) / 256 in bf16 and a 128th of the block's
    largest magnitude in int8. Errors are float64 for float64 vectors and float32 for all others, unless stored.

    A number that the codec rounds to 0 is sent as soon as it has added up:

    >>> import torch, fn
    >>> codec, feedback = fn.top_k(1), fn.classic()
    >>> x, error = torch.tensor([3.0, 2.0]), feedback.init(torch.zeros(2))
    >>> for _ in range(3):
    ...     message = feedback.compensate(x, error)
    ...     delivered = codec.decode(codec.encode(message[None]))[0]
    ...     error = feedback.residual(message, delivered, error)
    ...     print(delivered.tolist(), error.tolist())
    [3.0, 0.0] [0.0, 2.0]
    [0.0, 4.0] [3.0, 0.0]
    [6.0, 0.0] [0.0, 2.0]

    Args:
        lazy: let `initial_errors` choose the form in which the codec's kernels are fastest (`LazyError` for signs).
            The numbers are the same; False keeps errors as vectors that can be looked at.
        store: what the error is kept as between steps: None as it is, `torch.bfloat16` in 2 bytes per element,
            `torch.int8` in 1 + 4 / block bytes. Choose one where memory is short; the price is a few passes over
            temporary vectors, and differences below the store's resolution are forgotten.
        block: elements that share a scale in int8. Larger saves little memory; smaller helps where neighbours in the
            flat vector differ much. Blocks do not know where tensors end.
    Raises: ValueError for another store, a block that is not positive, or lazy together with a store.

    Paper: Seide et al., 1-bit SGD (Interspeech 2014); Karimireddy et al., Error feedback fixes SignSGD (ICML 2019),
        algorithm 1.
    """
    check_flag("lazy", lazy)
    if lazy and store is not None:
        raise ValueError("lazy: is True together with a store; a lazy error is kept as the vector that was sent")
    kept = store_of(store, block)

    def init(x: Tensor) -> Tree:
        return kept.save(_zeros(x))

    def compensate(x: Tensor, error: Tree) -> Tensor:
        if isinstance(error, LazyError):
            raise TypeError("error: is lazy, but this codec has no kernel for it; make the state with the codec in use")
        compensated: Tensor = x + kept.load(error)
        return compensated

    def residual(compensated: Tensor, decoded: Tensor, error: Tree) -> Tree:
        return kept.save((compensated - decoded).to(compensated.dtype))  # a codec may decode to float64

    rule = Classic(lazy) if store is None else StoredClassic(str(store), block)
    make = partial(classic, lazy=lazy, store=store, block=block)
    return Feedback(init, compensate, residual, rule, make=make)


def damped(beta: float = 0.8, every: int = 1024, *, block: int = 256) -> Feedback:
    """Keep a moving average of the difference in 8 bits, and forget it every so often.

        h = x + e,   send C(h),   e <- Q_8(beta e + (1 - beta) (h - C(h)))

    In steps 0, `every`, 2 `every`, ... e counts as zero. h and the average are rounded to the dtype of x. The error
    takes 1 + 4 / block bytes per element. Unlike `classic` it does not promise that everything arrives in the end: of
    a difference, 1 - beta enters the error, and the error is sent again and again while it fades.

    >>> import torch, fn
    >>> feedback = fn.damped(beta=0.75)
    >>> message = torch.tensor([1.0, -2.0])
    >>> feedback.residual(message, torch.zeros(2), feedback.init(message))   # nothing arrived: a quarter of it is kept
    DampedError(codes=tensor([  64, -128], dtype=torch.int8), scales=tensor([0.0039]), age=tensor(1))

    Args:
        beta: weight of the old error, 0 <= beta < 1, rounded to float32. The error is an average over about
            1 / (1 - beta) steps. Raise it where single differences are mostly noise, as with small batches; lower it
            where more of each has to arrive; 0 is `classic` in 8 bits.
        every: steps between resets. A reset drops what has become stale, after the learning rate or the data changed.
            Lower it if the loss drifts apart from exact training's in a long run; a number above the length of the
            training resets at its start only.
        block: elements that share a scale of the stored error. Leave it at the codec's block: then encoding and
            feedback are one kernel, and blocks end where tensors end.
    Raises: ValueError if an argument is out of range.

    Paper: Xie et al., LoCo (arXiv 2407.04480), algorithm 1.
    Differs: beta weights the old error, as in DeepSpeed; the scale of the stored error is taken from each block's
        maximum, not given. DeepSpeed resets one parameter at a time by a shared counter, here each error has its own.
    """
    check_interval("beta", beta, "[0, 1)")
    check_whole("every", every, 1)
    check_whole("block", block, 1)
    beta = float(torch.tensor(beta, dtype=torch.float32, device="cpu"))  # 1 - beta is taken of what the kernels see

    def init(x: Tensor) -> DampedError:
        scales = torch.ones(-(-x.shape[0] // block), dtype=scale_dtype(x), device=x.device)
        age = torch.zeros((), dtype=torch.int64, device=x.device)
        return DampedError(torch.zeros_like(x, dtype=torch.int8), scales, age)

    def vector_of(error: DampedError) -> Tensor:
        # Scales (R, S) are of a codec's blocks, which end where tensors end. The blocks here do not.
        if error.scales.ndim != 1:
            raise TypeError("error: is laid out for another codec; make the state with the codec in use")
        return from_blocks(error.codes, since_reset(error, every), block)

    def compensate(x: Tensor, error: DampedError) -> Tensor:
        return x + vector_of(error).to(x.dtype)

    def residual(compensated: Tensor, decoded: Tensor, error: DampedError) -> DampedError:
        wide = decoded.dtype
        # Where x is in half precision, h, what arrives of it and the average are rounded to it. The difference is not:
        # what a code leaves out of a large number would vanish in its rounding.
        lost = compensated.to(wide) - decoded.to(compensated.dtype).to(wide)
        kept = beta * vector_of(error).to(compensated.dtype).to(wide) + (1.0 - beta) * lost
        return DampedError(*to_blocks(kept.to(compensated.dtype), block), error.age + 1)

    make = partial(damped, beta, every, block=block)
    return Feedback(init, compensate, residual, Damped(beta, every, block), make=make)


def decayed(keep: float, deliver: float = 1.0) -> Feedback:
    """Let the error fade, or take from it only a part of what was delivered.

        c = x + keep e,   send C(c),   e <- c - deliver C(c)

    `decayed(1, 1)` is `classic`; `decayed(b)` is the feedback of DeMo and SparseLoCo, where the error is a momentum
    that loses what was sent; `decayed(1, 1 - mu)` is Dion's, where the momentum fades only as far as it was delivered.

    >>> import torch, fn
    >>> feedback = fn.decayed(keep=0.9)
    >>> feedback.compensate(torch.tensor([1.0, 1.0]), torch.tensor([10.0, 0.0]))
    tensor([10.,  1.])

    Errors are vectors, float64 for float64 and float32 for all others.

    Args:
        keep: weight of the old error, 0 < keep <= 1. Below 1 not everything arrives: what waits for s steps counts
            keep^s. Lower it where old differences mislead, as after many local steps; 1 where nothing may be lost.
        deliver: which part of what was delivered the error loses, 0 < deliver <= 1. Below 1 the rest of it is sent
            again, in all 1 / deliver times where keep is 1: the feedback is the momentum, and needs no other.
    Raises: TypeError if an argument is no number; ValueError if it is out of range.

    Paper: Peng et al., DeMo (arXiv 2411.19870); Sarfi et al., SparseLoCo (arXiv 2508.15706); Ahn et al., Dion (arXiv
        2504.05295).
    """
    for name, value in (("keep", keep), ("deliver", deliver)):
        check_number(name, value)
        if not 0 < value <= 1:
            raise ValueError(expected(name, "a number in (0, 1]", f"{value}"))
    keep, deliver = float(keep), float(deliver)

    def compensate(x: Tensor, error: Tensor) -> Tensor:
        return x + keep * error

    def residual(compensated: Tensor, decoded: Tensor, error: Tensor) -> Tensor:
        return (compensated - deliver * decoded).to(compensated.dtype)  # a codec may decode to float64

    return Feedback(_zeros, compensate, residual, Decayed(keep, deliver), make=partial(decayed, keep, deliver))


def differences() -> Feedback:
    """Send how far x is from what was delivered of it so far: EF21.

        c = x - h,   send C(c),   h <- h + C(c)

    h, which stands where other feedbacks have their error, is this rank's part of a sum that the ranks know, so that
    what arrives is a difference, too; `running_sum` behind the average adds the differences up. Where x converges, the
    differences become small and so does what is lost. In a warm-up step x arrives exactly, and h becomes x.
    Vectors are float64 for float64 and float32 for all others.

    >>> import torch, fn
    >>> feedback = fn.differences()
    >>> delivered = feedback.residual(torch.zeros(2), torch.tensor([3.0, 0.0]), torch.tensor([1.0, 1.0]))
    >>> delivered, feedback.compensate(torch.tensor([4.0, 4.0]), delivered)
    (tensor([4., 1.]), tensor([0., 3.]))

    Returns: a feedback for the workers of one axis; their servers have another one, see `compressed_average`.

    Paper: Richtarik, Sokolov and Fatkhullin, EF21 (arXiv 2106.05203), algorithm 2.
    """

    def compensate(x: Tensor, error: Tensor) -> Tensor:
        return x - error

    def residual(compensated: Tensor, decoded: Tensor, error: Tensor) -> Tensor:
        return error + decoded.to(error.dtype)

    def delivered(x: Tensor, error: Tensor) -> Tensor:
        # Without a copy the error would be x itself, over which its owner writes in the next step.
        return x.to(error.dtype, copy=True)

    return Feedback(_zeros, compensate, residual, Differences(), delivered, differences)


def off() -> Feedback:
    """Forget what was not delivered. The error is the empty tree.

    >>> import torch, fn
    >>> fn.off().init(torch.ones(4))
    ()
    """
    return Feedback(lambda x: (), lambda x, error: x, lambda compensated, decoded, error: (), Off(), make=off)


def _zeros(x: Tensor) -> Tensor:
    return torch.zeros_like(x, dtype=scale_dtype(x))


BY_NAME = {"float32": None, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16, "int8": torch.int8}


class Store(NamedTuple):
    """How errors are kept from step to step. save: vector (n,) -> what is kept. load: what is kept -> (n,).

    | store | bytes per element | what saving e loses, at most |
    |---|---|---|
    | None | 4 | nothing |
    | `torch.bfloat16` | 2 | abs(e) / 256 |
    | `torch.int8` | 1 + 4 / block | M / 128, M the largest magnitude in the block |
    """

    save: Callable[[Tensor], Tree]
    load: Callable[[Tree], Tensor]


def store_of(kind: torch.dtype | str | None, block: int) -> Store:
    """Return the store of a kind.

    Args: kind: None, `torch.bfloat16` or `torch.int8`, or their names. block: elements that share a scale in int8.
    Raises: ValueError for another kind, or if block is not positive.
    """
    kind = BY_NAME.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in (None, torch.bfloat16, torch.int8):
        wanted = f"None, torch.bfloat16, torch.int8 or one of {sorted(BY_NAME)}"
        raise ValueError(expected("store", wanted, f"{kind!r}"))
    check_whole("block", block, 1)
    if kind is torch.int8:
        return _in_blocks(block)
    if kind is torch.bfloat16:
        # Widened again, because what is compensated with it is a sum in float32.
        return Store(lambda e: e.to(torch.bfloat16), lambda kept: kept.float())
    return Store(lambda e: e, lambda kept: kept)


def _in_blocks(block: int) -> Store:
    def load(kept: StoredError) -> Tensor:
        if not isinstance(kept, StoredError):
            raise TypeError("error: is not what this feedback keeps, 8-bit blocks; a state belongs to its store")
        return from_blocks(*kept, block)

    return Store(lambda e: StoredError(*to_blocks(e, block)), load)


def to_blocks(vector: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return a vector (n,) as codes (n,) int8 and scales (ceil(n / block),)."""
    # (n,) -> (1, n)
    codes, scales = torch.ops.fn.quantize(vector[None], *_tiled(vector, block), 8)
    return codes[0], scales[0]


def from_blocks(codes: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return the vector (n,) of codes and scales, in the dtype of the scales."""
    # (n,) -> (1, 1, n) -> (n,)
    vector: Tensor = torch.ops.fn.dequantize_mean(codes[None, None], scales[None, None], *_tiled(codes, block), 8)
    return vector[0]


def _tiled(vector: Tensor, block: int) -> tuple[Tensor, list[int]]:
    return tile(*segments_of(None, 1, vector.shape[0], vector.device), block)


def since_reset(error: DampedError, every: int) -> Tensor:
    """Return the scales with which the error counts in this step: zeros in a step of reset.

    A tensor decides, and no branch, so that one compiled graph serves every step.
    """
    return torch.where(error.age % every == 0, 0.0, error.scales)


def fused_with(codec: Codec, feedback: Feedback) -> Fused | None:
    """Return the codec's kernels for a feedback; None where it has none."""
    return codec.fused(feedback.rule) if codec.fused is not None and feedback.rule is not None else None


def plain_error(codec: Codec, feedback: Feedback, error: Tree, x: Tensor) -> Tensor:
    """Return the plain vector (R * n,) that an error stands for: what it would add to x (R, n) in the next step."""
    fused = fused_with(codec, feedback)
    if fused is not None and fused.to_plain is not None and fused.accepts(x, error):
        return fused.to_plain(error, x.shape[0])
    # What a feedback adds to zeros is what the error stands for.
    return feedback.compensate(torch.zeros_like(x).reshape(-1), error)


def to_plain(error: Tree, codec: Codec, feedback: Feedback, segments: Segments, dtype: torch.dtype) -> Tensor | None:
    """Return the vector that an error stands for; None for a feedback that keeps nothing.

    Args: error: of R rows of `segments`. codec, feedback: with which it was made. dtype: of the vectors that travelled.
    Raises: TypeError for an error of a feedback that does not tell its rule, unless it is such a vector itself.
    """
    if isinstance(feedback.rule, Off) or (isinstance(error, tuple) and not error):
        return None
    if feedback.rule is None or isinstance(feedback.rule, Decayed | Differences):  # it adds something else to a message
        return _as_kept(error, segments)
    device = error.device if isinstance(error, Tensor) else error[0].device
    like = torch.zeros(segments.valid.shape[0], segments.row_length, dtype=dtype, device=device)
    return plain_error(segmented(codec, segments), feedback, error, like)


def _as_kept(error: Tree, segments: Segments) -> Tensor:
    """Return an error itself, for a feedback that may add something else to a message.

    Such errors may be added up wherever the messages are linear in them, such as `x + 0.9 * error`.
    """
    length = segments.valid.shape[0] * segments.row_length
    if isinstance(error, Tensor) and error.shape == (length,) and error.is_floating_point():
        return error
    form = f"{error.dtype} {tuple(error.shape)}" if isinstance(error, Tensor) else type(error).__name__
    raise TypeError(
        f"feedback: is one of your own, and its error is {form}; errors that move to another number of ranks are "
        f"floating vectors like the {length} numbers that are encoded; save and load on the same number, or start anew"
    )


def from_plain(vector: Tensor, like: Tree, segments: Segments, feedback: Feedback, age: Tensor | None) -> Tree:
    """Return an error in the form of `like` that stands for a vector; to 8 bits where that form has 8.

    Args: vector: (R * n,). like: an error of the same rows. age: of the errors that the vector comes from, for a
        feedback that counts steps.
    Raises: TypeError for a form that is not known here.
    """
    if isinstance(like, Tensor):
        return vector.to(like.dtype)
    if isinstance(like, Counted):
        return like if age is None else Counted(age)
    if isinstance(like, LazyError):
        return LazyError(vector.to(like.buffer.dtype), torch.zeros_like(like.scale))  # nothing of it was sent
    if isinstance(like, DampedError):
        rows, block = segments.valid.shape[0], feedback.rule.block
        wide = vector.to(like.scales.dtype)
        if like.scales.ndim == 1:
            codes, scales = to_blocks(wide, block)
        else:
            tiled = tile(segments.widths, segments.valid.to(wide.device), block)
            # (R n,) -> (R, n)
            codes, scales = torch.ops.fn.quantize(wide.view(rows, -1), *tiled, 8)
        return DampedError(codes.reshape(-1), scales.view(like.scales.shape), like.age if age is None else age)
    if isinstance(feedback.rule, StoredClassic):
        # Of the vector nothing was delivered, so all of it is saved, in the form of the store.
        return feedback.residual(vector.float(), torch.zeros_like(vector, dtype=torch.float32), like)
    raise TypeError(expected("error", "a vector, a LazyError or a DampedError", type(like).__name__))


def where_rests(rests: Tensor, before: Tree, after: Tree, codec: Codec, feedback: Feedback, segments: Segments) -> Tree:
    """Return an error with the numbers of `before` where something rests, and those of `after` elsewhere.

    In 8 bits a block in which only some of it rests takes the larger of both scales: what had the smaller one is
    rounded once more. Counts go on, and so do forms of other feedbacks than those of this module.

    Args: rests: (R * n,) bool. before, after: errors of R rows of `segments`, made with the codec and the feedback.
    """
    if isinstance(after, LazyError):
        like = torch.zeros_like(after.buffer).view(segments.valid.shape[0], -1)
        old, new = plain_error(codec, feedback, before, like), plain_error(codec, feedback, after, like)
        return LazyError(torch.where(rests, old, new), torch.zeros_like(after.scale))
    if isinstance(after, DampedError | StoredError):
        valid, device = segments.valid, after.codes.device
        whole = after.scales.ndim == 1  # blocks of the vector, which do not know where tensors end
        valid = valid.new_full((1, 1), rests.shape[0]) if whole else valid
        counts, runs = tile((rests.shape[0],) if whole else segments.widths, valid, feedback.rule.block)
        # Of each run its number and its length -> the length of each block -> of each element its block, (R n,)
        numbers, lengths = torch.tensor(runs, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
        lengths = lengths.repeat_interleave(numbers).repeat(counts.shape[0])
        owners = torch.arange(lengths.shape[0], dtype=torch.int64, device=device).repeat_interleave(lengths)
        flat = after.scales.reshape(-1)
        codes = torch.where(rests, before.codes, after.codes)
        scales = torch.where(rests, before.scales.reshape(-1)[owners], flat[owners])
        # Of numbers that are not 0: the first scales, of zeros, are larger than others ever are.
        largest = torch.zeros_like(flat).scatter_reduce(0, owners, scales * (codes != 0), "amax")
        largest = torch.where(largest > 0, largest, flat)
        rounded = torch.where(codes != 0, codes * (scales / largest[owners]), 0.0).round().to(torch.int8)
        return after._replace(codes=rounded, scales=largest.view_as(after.scales))
    if isinstance(after, Tensor) and after.shape == rests.shape:
        return torch.where(rests, before, after)
    return after
