# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""What the loops on a CPU have in common: how they are compiled and cached, the rules in them, and blocks of rows.

A loop sees addresses, not arrays: `floats(address)[i]`. It works on the blocks low .. high of all rows of a
`blocks.Grid`, so several threads can share the work, and results do not depend on how. A block is worked through in
pieces of STEP elements: one loop takes codes apart, one of a rule (`fn.kernels.rules`) computes, one packs; what goes
from loop to loop lies in a scratch that stays in the first-level cache. Padding and tails are ends of loops.

One array must not come in by two names: LLVM could not tell that nothing overlaps, and would take number by number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numba.extending import overload, register_jitable

from fn.kernels import rules
from fn.kernels.cpu.blocks import STEP
from fn.kernels.cpu.intrinsics import floats, ints, magnitude, of_magnitude, stream

PREFETCH = STEP
"""Elements that are asked for ahead, measured, where codes are packed. Processors do not look beyond a page of memory
by themselves. Lines are asked for one by one in a loop that is no vector's; many at once keep what is needed now
waiting, and loops that do little else are faster without."""

ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
INFINITY = np.float32(np.inf)
EXPONENT = np.int32(0x7F800000)
SMALLEST = np.finfo(np.float32).smallest_normal


def digest() -> str:
    """Return a digest of the sources of all kernels."""
    found = hashlib.sha256()
    for path in sorted(Path(rules.__file__).parent.rglob("*.py")):
        found.update(path.read_bytes())
    return found.hexdigest()


DIGEST = digest()


def compiled(*fastmath: str) -> Callable[[Any], Any]:
    """Compile a function. Its cache is valid for one state of the kernels' sources.

    Args: fastmath: what LLVM may do with sums and products: "contract" makes one operation of a product and a sum, as
        `torch.lerp` does; "reassoc" changes the order of sums, so that they take all lanes.
    """

    def decorate(f: Any) -> Any:
        made: Any = njit(nogil=True, error_model="numpy", fastmath=set(fastmath))(f)
        made.enable_caching()
        # So a change of a rule compiles the loops anew; without the stamp they would go on with the old arithmetic.
        file = made._cache._cache_file  # Numba looks at the file of f alone, and not at rules in others
        file._source_stamp = (file._source_stamp, DIGEST)
        return made

    return decorate


@overload(rules.where)
def _where(condition, a, b):
    # LLVM makes a select of it, so that the loop still takes vectors.
    return lambda condition, a, b: a if condition else b


@overload(rules.root)
def _root(x):
    return lambda x: np.sqrt(x)


@overload(rules.sign)
def _sign(x):
    return lambda x: ONE if x > ZERO else (-ONE if x < ZERO else ZERO)


@overload(rules.power)
def _power(x):
    # Bits of the exponent alone: the mantissa, which is 0 then, stands for 1.
    return lambda x: of_magnitude(np.int32(magnitude(x) & EXPONENT))


@overload(rules.plus)
def _plus(a, b, weight):
    return lambda a, b, weight: a + weight * b


@overload(rules.quotient)
def _quotient(a, b):
    return lambda a, b: a / b


@overload(rules.lerp)
def _lerp(start, end, weight):
    def lerp(start, end, weight):
        return start + weight * (end - start) if weight < HALF else end + (weight - ONE) * (end - start)

    return lerp


for _name in (name for name, f in vars(rules).items() if getattr(f, "__module__", "") == rules.__name__):
    if _name not in ("where", "root", "sign", "power", "quotient", "lerp", "plus"):
        register_jitable(getattr(rules, _name))


@compiled()
def block_of(grid, k):
    """Return the row of block k of all rows, its first element, its length, its segment and its offset in that."""
    block = ints(grid.table + 32 * (k % grid.blocks))
    return k // grid.blocks, block[0], block[1], block[2], block[3]


@compiled()
def scale_of(grid, s, offset):
    """Return the place in a row of the scale of an element of segment s."""
    return ints(grid.starts)[s] + (offset >> grid.shift)


@compiled()
def limit(count, most):
    """Return a count, at least 0 and at most `most`."""
    return max(min(count, most), 0)


@compiled()
def streams(grid, address):
    """Return whether rows of results at an address go past the cache."""
    return grid.nontemporal != 0 and address % 32 == 0


@compiled()
def write(to, x, count, nontemporal):
    """Copy elements, past the cache if so wanted."""
    out, mine = floats(to), floats(x)
    whole = count - count % 8 if nontemporal else 0
    for j in range(0, whole, 8):
        stream(out, j, mine, j)
    for j in range(whole, count):
        out[j] = mine[j]


@compiled()
def pad(x, count, length):
    """Write zeros behind `count` elements."""
    out = floats(x)
    for j in range(count, length):
        out[j] = ZERO
