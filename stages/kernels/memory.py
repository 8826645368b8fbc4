"""Reading memory by address, for kernels made of many small functions.

An array handed to a compiled function is seven numbers and a reference count; one handed on through ten functions for
every word costs ten times more than the work (measured: 1,000 ns instead of 60 for "quick,"). An address is one
integer. The rules that keep this safe:

- addresses are taken (`array.ctypes.data`) by the outermost kernel, from arrays that its caller holds;
- every function that reads takes the end as well, and never reads at or behind it;
- tests run every kernel on buffers with guard bytes on both sides.

All loads give int64, except `peek64`, which gives uint64.

A *block* is 32 or 64 bytes looked at at once: `byte_class(...)` makes a function that gives a bit for each of them, the
first byte lowest. It reads the whole block, so it is only called where all of it lies before the end; what is left is
walked byte by byte.
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


def byte_class(width: int, *ranges: tuple[int, int], ignore_case: bool = False) -> Any:
    """A function (address) -> int64 with bit i set where byte i of the block of `width` bytes lies in one of the
    ranges, both ends included. ignore_case: of "a" to "z" either case counts (and "@" for "`" and the like)."""
    vector = ir.VectorType(ir.IntType(8), width)

    def splat(value: int) -> Any:
        return ir.Constant(vector, [ir.Constant(ir.IntType(8), value)] * width)

    @intrinsic
    def block(typing_context: Any, address: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = builder.load(builder.inttoptr(arguments[0], vector.as_pointer()), align=1)
            if ignore_case:
                data = builder.or_(data, splat(32))
            found = None
            for low, high in ranges:
                if low == high:
                    inside = builder.icmp_unsigned("==", data, splat(low))
                else:
                    inside = builder.icmp_unsigned("<=", builder.sub(data, splat(low)), splat(high - low))
                found = inside if found is None else builder.or_(found, inside)
            bits = builder.bitcast(found, ir.IntType(width))
            return bits if width == 64 else builder.zext(bits, ir.IntType(64))

        return types.int64(types.int64), generate

    return block


@intrinsic
def lowest_bit(typing_context: Any, mask: Any) -> Any:
    """The place of the lowest bit that is set in an int64; 64 where there is none."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.int64), generate


@intrinsic
def count_bits(typing_context: Any, mask: Any) -> Any:
    """How many bits of an int64 are set."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.int64), generate


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


_behind_first64 = byte_class(64, (0x80, 0xBF))  # second and later bytes of a character
_newline64 = byte_class(64, (10, 10))


@inner
def count_points(start, end):  # type: ignore[no-untyped-def]
    """Code points in [start, end)."""
    n, p = end - start, start
    while p + 64 <= end:
        n -= count_bits(_behind_first64(p))
        p += 64
    while p < end:
        n -= peek8(p) & 0xC0 == 0x80
        p += 1
    return n


@inner
def newline_at(p, end):  # type: ignore[no-untyped-def]
    """Where the first "\\n" in [p, end) is, or `end`."""
    while p + 64 <= end:
        found = _newline64(p)
        if found:
            return p + lowest_bit(found)
        p += 64
    while p < end and peek8(p) != 10:
        p += 1
    return p


@inner
def equal_bytes(p, q, size):  # type: ignore[no-untyped-def]
    """Whether `size` bytes at p and at q are the same."""
    while size >= 8:
        if peek64(p) != peek64(q):
            return False
        p, q, size = p + 8, q + 8, size - 8
    for i in range(size):  # noqa: SIM110  in compiled code a loop is faster than all()
        if peek8(p + i) != peek8(q + i):
            return False
    return True
