# mypy: disable-error-code="no-untyped-call"
"""Six instructions that Numba does not make of a loop by itself, and pointers from addresses.

Everything else is a plain loop, which LLVM turns into vectors. Measured, one thread, 8 M elements: without the signs
of eight at a time codes take 1.5 to 4 times as long, without `prefetch` and `stream` 1.3 times.

Imported only by the Numba kernels: `import fn` does not import Numba.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

_F32, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_FLOATS, _BOOLS = ir.VectorType(_F32, 8), ir.VectorType(ir.IntType(1), 8)

F32, I64 = types.float32, types.int64
Floats, Bytes, Ints = types.CPointer(F32), types.CPointer(types.int8), types.CPointer(I64)
Doubles = types.CPointer(types.float64)


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


def _pointer(name: str, result: Any, kind: Any) -> Any:
    def emit(builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, kind.as_pointer())

    emit.__name__, emit.__doc__ = name, f"Return an address as a pointer to {result.dtype}."
    return _define(result, I64)(emit)


floats = _pointer("floats", Floats, _F32)
octets = _pointer("octets", Bytes, _I8)
ints = _pointer("ints", Ints, _I64)
doubles = _pointer("doubles", Doubles, ir.DoubleType())


def _at(builder: Any, pointer: Any, i: Any, kind: Any) -> Any:
    return builder.bitcast(builder.gep(pointer, [i]), kind.as_pointer())


@_define(types.none, Bytes, I64, Floats, I64)
def put_sign_byte(builder: Any, bits: Any, k: Any, x: Any, i: Any) -> None:
    """Write into byte k the signs of elements i .. i + 8."""
    zero = ir.Constant(_FLOATS, [0.0] * 8)
    # An ordered comparison is false of NaN, as `x >= 0` is. A piece may begin at any float: align is 4.
    signs = builder.fcmp_ordered(">=", builder.load(_at(builder, x, i, _FLOATS), align=4), zero)
    builder.store(builder.bitcast(signs, _I8), _at(builder, bits, k, _I8))


def _signed(builder: Any, bits: Any, k: Any, scale: Any) -> Any:
    single = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), scale, _I32(0))
    lanes = ir.Constant(ir.VectorType(_I32, 8), [0] * 8)
    # One scale -> eight lanes
    up = builder.shuffle_vector(single, ir.Constant(_FLOATS, ir.Undefined), lanes)
    ones = builder.bitcast(builder.load(_at(builder, bits, k, _I8)), _BOOLS)
    # -0.0 - scale is -scale for zeros, too; 0.0 - 0.0 would be 0.0, where the reference has -0.0.
    return builder.select(ones, up, builder.fsub(ir.Constant(_FLOATS, [-0.0] * 8), up))


@_define(types.none, Floats, I64, Bytes, I64, F32)
def put_signed(builder: Any, x: Any, i: Any, bits: Any, k: Any, scale: Any) -> None:
    """Write scale times the signs in byte k into elements i .. i + 8."""
    builder.store(_signed(builder, bits, k, scale), _at(builder, x, i, _FLOATS), align=4)


@_define(types.none, Floats, I64, Bytes, I64, F32)
def add_signed(builder: Any, x: Any, i: Any, bits: Any, k: Any, scale: Any) -> None:
    """Add scale times the signs in byte k to elements i .. i + 8."""
    place = _at(builder, x, i, _FLOATS)
    total = builder.fadd(builder.load(place, align=4), _signed(builder, bits, k, scale))
    builder.store(total, place, align=4)


@_define(types.none, Floats, I64)
def prefetch(builder: Any, x: Any, i: Any) -> None:
    """Ask for the cache line of element i, which may lie behind an end."""
    pointer = _I8.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32])
    read, keep, data = _I32(0), _I32(3), _I32(1)
    called = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
    builder.call(called, [_at(builder, x, i, _I8), read, keep, data])


@_define(types.none, Floats, I64, Floats, I64)
def stream(builder: Any, to: Any, i: Any, x: Any, j: Any) -> None:
    """Copy elements j .. j + 8 to i .. i + 8 past the cache, which does not read memory first; 32-byte aligned."""
    value = builder.load(_at(builder, x, j, _FLOATS), align=4)
    written = builder.store(value, _at(builder, to, i, _FLOATS), align=32)
    written.set_metadata("nontemporal", builder.module.add_metadata([_I32(1)]))


@_define(types.int32, F32)
def magnitude(builder: Any, x: Any) -> Any:
    """Return the bits of |x| as an integer: these are ordered like the numbers, with NaN above Inf."""
    return builder.and_(builder.bitcast(x, _I32), _I32(0x7FFFFFFF))


@_define(types.int32, F32)
def bits_of(builder: Any, x: Any) -> Any:
    """Return the bits of x as an integer."""
    return builder.bitcast(x, _I32)


@_define(F32, types.int32)
def of_magnitude(builder: Any, bits: Any) -> Any:
    """Return the number whose bits these are."""
    return builder.bitcast(bits, _F32)
