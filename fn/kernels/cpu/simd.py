# mypy: disable-error-code="no-untyped-call"
"""Vectors of LANES float32 as values inside Numba functions, addressed by raw pointers.

Numba vectorises loops when it pleases; packing bits, summing squares in a fixed order, and stores that bypass the
cache do not please it. With vectors as values each of these is one line, the same on every processor: LLVM splits
vectors that the hardware does not have.

Imported only by the Numba kernels: `import fn` does not import Numba.

    load(address, i)            elements i .. i + LANES of the float32 array at an address
    store(address, i, v)        write them; `stream` does it past the cache, for 32-byte aligned places
    get, put                    one element
    a + b * c / d, a > b, a & b lane by lane; a number becomes a vector by `splat`
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.datamodel import models
from numba.core.datamodel.registry import register_default
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin

LANES = 8

PREFETCH_NEAR, PREFETCH_FAR = 1 << 9, 1 << 11
"""Elements that are asked for ahead, measured: where several tensors are read, and one. Processors do not look beyond
a page of memory by themselves, and a core reads as fast as it has lines under way."""

_F32 = ir.FloatType()
_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FLOATS, _INTS = ir.VectorType(_F32, LANES), ir.VectorType(_I32, LANES)
_BOOLS = ir.VectorType(ir.IntType(1), LANES)


class Vector(types.Type):
    """The Numba type of LANES float32, int32 or booleans."""

    def __init__(self, element: str) -> None:
        self.element = element
        super().__init__(name=f"Vector({element}, {LANES})")


@register_default(Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, {"f": _FLOATS, "i": _INTS, "b": _BOOLS}[kind.element])


floats, ints, bools = Vector("f"), Vector("i"), Vector("b")


def _define(result: Any, *arguments: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make an intrinsic of a function (builder, *values) -> value; numbers are converted to `arguments`."""

    def decorate(emit: Callable[..., Any]) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            found = emit(builder, *values)
            return context.get_dummy_value() if result is types.none else found

        names = ", ".join(f"a{i}" for i in range(len(arguments)))
        scope: dict[str, Any] = {"typed": lambda: (result(*arguments), generate)}
        exec(f"def {emit.__name__}(typingcontext, {names}):\n    return typed()", scope)  # intrinsics need an arity
        made = scope[emit.__name__]
        made.__doc__, made.__module__ = emit.__doc__, __name__
        return intrinsic(made)

    return decorate


def _place(builder: Any, address: Any, i: Any, kind: Any, shift: int) -> Any:
    """Return a pointer to `kind`, 2**shift bytes times i after the address."""
    offset = builder.shl(i, _I64(shift)) if shift >= 0 else builder.ashr(i, _I64(-shift))
    return builder.inttoptr(builder.add(address, offset), kind.as_pointer())


def _splat(builder: Any, scalar: Any, kind: Any) -> Any:
    single = builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(single, ir.Constant(kind, ir.Undefined), ir.Constant(_INTS, [0] * LANES))


def _let(symbol: Any, emit: Callable[..., Any], result: Any, kind: Any) -> None:
    """Let an operator of Python work on two vectors of a kind."""

    class _Typing(ConcreteTemplate):
        cases = (signature(result, kind, kind),)

    infer_global(symbol)(_Typing)
    lower_builtin(symbol, kind, kind)(lambda context, builder, typing, values: emit(builder, *values))


_let(operator.add, ir.IRBuilder.fadd, floats, floats)
_let(operator.sub, ir.IRBuilder.fsub, floats, floats)
_let(operator.mul, ir.IRBuilder.fmul, floats, floats)
_let(operator.truediv, ir.IRBuilder.fdiv, floats, floats)
_let(operator.gt, lambda builder, a, b: builder.fcmp_ordered(">", a, b), bools, floats)  # false for NaN, as the next
_let(operator.ge, lambda builder, a, b: builder.fcmp_ordered(">=", a, b), bools, floats)
_let(operator.and_, ir.IRBuilder.and_, bools, bools)


_i64, _f32 = types.int64, types.float32


def _reader(name: str, what: str, result: Any, kind: Any, align: int, shift: int) -> Any:
    """Make an intrinsic (address, i) -> value of what lies 2**shift bytes times i after an address."""

    def emit(builder: Any, address: Any, i: Any) -> Any:
        return builder.load(_place(builder, address, i, kind, shift), align=align)

    emit.__name__, emit.__doc__ = name, f"Return {what}."
    return _define(result, _i64, _i64)(emit)


def _writer(name: str, what: str, value: Any, kind: Any, align: int, shift: int) -> Any:
    """Make an intrinsic (address, i, value) that writes what `_reader` reads."""

    def emit(builder: Any, address: Any, i: Any, v: Any) -> None:
        builder.store(v, _place(builder, address, i, kind, shift), align=align)

    emit.__name__, emit.__doc__ = name, f"Write {what}."
    return _define(types.none, _i64, _i64, value)(emit)


load = _reader("load", "elements i .. i + LANES", floats, _FLOATS, 4, 2)
store = _writer("store", "elements i .. i + LANES", floats, _FLOATS, 4, 2)
get = _reader("get", "element i", _f32, _F32, 4, 2)
put = _writer("put", "element i", _f32, _F32, 4, 2)
get_double = _reader("get_double", "element i of a float64 array", types.float64, ir.DoubleType(), 8, 3)
put_double = _writer("put_double", "element i of a float64 array", types.float64, ir.DoubleType(), 8, 3)
get_int = _reader("get_int", "element i of an int64 array", _i64, _I64, 8, 3)


@_define(types.none, _i64, _i64, floats)
def stream(builder: Any, address: Any, i: Any, v: Any) -> None:
    """Write elements i .. i + LANES past the cache: memory is not read first. The place must be 32-byte aligned."""
    written = builder.store(v, _place(builder, address, i, _FLOATS, 2), align=4 * LANES)
    written.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))


@_define(types.none, _i64, _i64)
def prefetch(builder: Any, address: Any, i: Any) -> None:
    """Ask for the cache line of element i, which may lie behind an end."""
    pointer = _I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    read, keep, data = _I32(0), _I32(3), _I32(1)
    called = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
    builder.call(called, [_place(builder, address, i, _I8, 2), read, keep, data])


@_define(floats, _f32)
def splat(builder: Any, value: Any) -> Any:
    """Return a vector of one value."""
    return _splat(builder, value, _FLOATS)


@_define(floats, floats, floats, floats)
def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    return builder.call(builder.module.declare_intrinsic(f"llvm.fma.v{LANES}f32", (), kind), [a, b, c])


@_define(floats, floats)
def square_root(builder: Any, v: Any) -> Any:
    """Return the square roots."""
    kind = ir.FunctionType(_FLOATS, [_FLOATS])
    return builder.call(builder.module.declare_intrinsic(f"llvm.sqrt.v{LANES}f32", (), kind), [v])


@_define(_f32, _f32, _f32, _f32)
def fused_multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c of single numbers, rounded once."""
    return builder.fma(a, b, c)


@_define(bools, _i64)
def below(builder: Any, limit: Any) -> Any:
    """Return lane < limit."""
    few = builder.select(builder.icmp_signed("<", limit, _I64(LANES)), limit, _I64(LANES))  # so that 32 bits hold it
    few = builder.select(builder.icmp_signed(">", few, _I64(0)), few, _I64(0))
    lanes = ir.Constant(_INTS, list(range(LANES)))
    return builder.icmp_signed("<", lanes, _splat(builder, builder.trunc(few, _I32), _INTS))


@_define(floats, bools, floats, floats)
def select(builder: Any, mask: Any, a: Any, b: Any) -> Any:
    """Return a where the mask is true, else b."""
    return builder.select(mask, a, b)


@_define(bools, _i64, _i64)
def load_bits(builder: Any, address: Any, i: Any) -> Any:
    """Return bits i .. i + LANES, i a multiple of LANES."""
    return builder.bitcast(builder.load(_place(builder, address, i, _I8, -3), align=1), _BOOLS)


@_define(types.none, _i64, _i64, bools)
def store_bits(builder: Any, address: Any, i: Any, mask: Any) -> None:
    """Write bits i .. i + LANES, i a multiple of LANES."""
    builder.store(builder.bitcast(mask, _I8), _place(builder, address, i, _I8, -3), align=1)


@_define(_f32, floats)
def lane_sum(builder: Any, v: Any) -> Any:
    """Return the sum of the lanes, added in their order."""
    total = builder.extract_element(v, _I32(0))
    for lane in range(1, LANES):
        total = builder.fadd(total, builder.extract_element(v, _I32(lane)))
    return total


@_define(_i64, _i64, _i64)
def get_byte(builder: Any, address: Any, i: Any) -> Any:
    """Return byte i, 0 to 255."""
    return builder.zext(builder.load(_place(builder, address, i, _I8, 0), align=1), _I64)


@_define(types.none, _i64, _i64, _i64)
def put_byte(builder: Any, address: Any, i: Any, value: Any) -> None:
    """Write byte i."""
    builder.store(builder.trunc(value, _I8), _place(builder, address, i, _I8, 0), align=1)


def _magnitude(builder: Any, v: Any) -> Any:
    return builder.and_(builder.bitcast(v, _INTS), ir.Constant(_INTS, [0x7FFFFFFF] * LANES))


@_define(ints, floats)
def magnitude(builder: Any, v: Any) -> Any:
    """Return the bits of |v| as integers: these are ordered like the numbers, with NaN above Inf."""
    return _magnitude(builder, v)


@_define(bools, floats)
def is_normal(builder: Any, v: Any) -> Any:
    """Return |v| >= 2**-126, the smallest normal number; true for Inf and NaN."""
    return builder.icmp_signed(">=", _magnitude(builder, v), ir.Constant(_INTS, [0x00800000] * LANES))


@_define(ints)
def no_magnitude(builder: Any) -> Any:
    """Return a vector of zeros."""
    return ir.Constant(_INTS, [0] * LANES)


@_define(ints, ints, ints)
def larger(builder: Any, a: Any, b: Any) -> Any:
    """Return the larger of two integers, lane by lane."""
    return builder.select(builder.icmp_signed(">", a, b), a, b)


@_define(_f32, ints)
def largest(builder: Any, v: Any) -> Any:
    """Return the largest lane of magnitudes as the number whose bits it is."""
    found = builder.extract_element(v, _I32(0))
    for lane in range(1, LANES):
        other = builder.extract_element(v, _I32(lane))
        found = builder.select(builder.icmp_signed(">", other, found), other, found)
    return builder.bitcast(found, _F32)


@_define(ints, floats, _i64)
def code(builder: Any, v: Any, limit: Any) -> Any:
    """Return v rounded half to even, at most limit - 1. |v| must be at most `limit`, up to rounding."""
    magic = 1.5 * 2**23  # the floats around it are the integers, so adding it rounds
    bits = builder.bitcast(builder.fadd(v, ir.Constant(_FLOATS, [magic] * LANES)), _INTS)
    rounded = builder.sub(bits, ir.Constant(_INTS, [0x4B400000] * LANES))
    high = _splat(builder, builder.sub(builder.trunc(limit, _I32), _I32(1)), _INTS)
    return builder.select(builder.icmp_signed("<", rounded, high), rounded, high)


@_define(floats, ints)
def number(builder: Any, v: Any) -> Any:
    """Return integers as floats."""
    return builder.sitofp(v, _FLOATS)


@_define(ints, _i64, _i64)
def load_bytes(builder: Any, address: Any, i: Any) -> Any:
    """Return int8 elements i .. i + LANES."""
    kind = ir.VectorType(_I8, LANES)
    return builder.sext(builder.load(_place(builder, address, i, kind, 0), align=1), _INTS)


@_define(types.none, _i64, _i64, ints)
def store_bytes(builder: Any, address: Any, i: Any, v: Any) -> None:
    """Write int8 elements i .. i + LANES."""
    kind = ir.VectorType(_I8, LANES)
    builder.store(builder.trunc(v, kind), _place(builder, address, i, kind, 0), align=1)


def _shuffle(builder: Any, a: Any, b: Any, lanes: list[int]) -> Any:
    return builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(lanes)), lanes))


@_define(ints, _i64, _i64)
def load_nibbles(builder: Any, address: Any, i: Any) -> Any:
    """Return 4-bit elements i .. i + LANES, i even; the even element is in the high half of its byte."""
    half = ir.VectorType(_I8, LANES // 2)
    high = builder.load(_place(builder, address, i, half, -1), align=1)
    low = builder.shl(high, ir.Constant(half, [4] * (LANES // 2)))
    mixed = _shuffle(builder, high, low, [k // 2 + LANES // 2 * (k % 2) for k in range(LANES)])
    shifted = builder.ashr(mixed, ir.Constant(ir.VectorType(_I8, LANES), [4] * LANES))
    return builder.sext(shifted, _INTS)


@_define(types.none, _i64, _i64, ints)
def store_nibbles(builder: Any, address: Any, i: Any, v: Any) -> None:
    """Write 4-bit elements i .. i + LANES, i even."""
    half, pair = ir.VectorType(_I8, LANES // 2), ir.VectorType(ir.IntType(16), LANES // 2)
    pairs = builder.bitcast(builder.trunc(v, ir.VectorType(_I8, LANES)), pair)
    constant = {k: ir.Constant(pair, [k] * (LANES // 2)) for k in (4, 8, 15, 240)}
    high = builder.and_(builder.shl(pairs, constant[4]), constant[240])  # a pair holds its even element below
    both = builder.or_(high, builder.and_(builder.lshr(pairs, constant[8]), constant[15]))
    builder.store(builder.trunc(both, half), _place(builder, address, i, half, -1), align=1)
