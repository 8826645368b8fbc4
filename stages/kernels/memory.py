"""Reading memory by address, for kernels made of many small functions.

An array handed to a compiled function is seven numbers and a reference count; one handed on through ten functions for
every word costs ten times more than the work (measured: 1,000 ns instead of 60 for "quick,"). An address is one
integer. The rules that keep this safe:

- addresses are taken (`array.ctypes.data`) by the outermost kernel, from arrays that its caller holds;
- every function that reads takes the end as well, and never reads at or behind it;
- tests run every kernel on buffers with guard bytes on both sides.

All loads give int64, except `peek64`, which gives uint64.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic


def _peek(bits: int) -> Any:
    @intrinsic
    def peek(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = builder.load(pointer, align=1)
            return value if bits == 64 else builder.zext(value, ir.IntType(64))

        return (types.uint64 if bits == 64 else types.int64)(types.int64), generate

    return peek


def _poke(bits: int) -> Any:
    @intrinsic
    def poke(typing_context: Any, address: Any, value: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(bits).as_pointer())
            value = arguments[1] if bits == 64 else builder.trunc(arguments[1], ir.IntType(bits))
            builder.store(value, pointer, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.uint64 if bits == 64 else types.int64), generate

    return poke


# For functions that only kernels call: without the wrappers for Python and C, which take a fifth of compile time.
_INNER: dict[str, Any] = {"nogil": True, "cache": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
inner: Any = njit(**_INNER)

peek8 = _peek(8)
peek16 = _peek(16)
peek32 = _peek(32)
peek64 = _peek(64)
poke8 = _poke(8)  # poke8(address, value): writes the low 8 bits
poke32 = _poke(32)  # the low 32 bits
poke64 = _poke(64)  # poke64(address, value): writes a uint64


@inner
def point_at(p, end):  # type: ignore[no-untyped-def]
    """The code point at p of valid UTF-8 that ends at `end` -> (code point, bytes), both int64."""
    b = peek8(p)
    if b < 0x80:
        return b, 1
    if b < 0xE0:
        if p + 1 < end:
            return (b & 0x1F) << 6 | (peek8(p + 1) & 0x3F), 2
    elif b < 0xF0:
        if p + 2 < end:
            return (b & 0xF) << 12 | (peek8(p + 1) & 0x3F) << 6 | (peek8(p + 2) & 0x3F), 3
    elif p + 3 < end:
        low = (peek8(p + 2) & 0x3F) << 6 | (peek8(p + 3) & 0x3F)
        return (b & 7) << 18 | (peek8(p + 1) & 0x3F) << 12 | low, 4
    return 0xFFFD, 1


@inner
def before(start, p):  # type: ignore[no-untyped-def]
    """Where the character begins that ends before p, p > start."""
    p -= 1
    while p > start and peek8(p) & 0xC0 == 0x80:
        p -= 1
    return p


@inner
def flags_of(page, table, point):  # type: ignore[no-untyped-def]
    """Flags of a code point in two-level tables of uint16 (`unicode.py`), given their addresses; int64."""
    return peek16(table + 2 * (peek16(page + 2 * (point >> 8)) * 256 + (point & 255)))


@inner
def count_points(start, end):  # type: ignore[no-untyped-def]
    """Code points in [start, end)."""
    n = 0
    for p in range(start, end):
        n += peek8(p) & 0xC0 != 0x80
    return n
