"""Arrow string columns as the kernels see them: one array of UTF-8 bytes, one array of offsets.

The loads below read without bounds checks and without Python's wrap-around of negative indices, which is what makes
the kernels fast and an offset error fatal. So every kernel is tested on buffers with guard bytes on both sides.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from llvmlite import ir
from numba import njit, types, uint32, uint64
from numba.core import cgutils
from numba.extending import intrinsic


def _unaligned_load(bits: int) -> Any:
    result = {8: types.uint8, 32: types.uint32, 64: types.uint64}[bits]

    @intrinsic
    def load(typing_context: Any, array: Any, index: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            data = cgutils.create_struct_proxy(signature.args[0])(context, builder, value=arguments[0]).data
            base = builder.bitcast(data, ir.IntType(8).as_pointer())
            at = builder.bitcast(builder.gep(base, [arguments[1]]), ir.IntType(bits).as_pointer())
            return builder.load(at, align=1)

        return result(array, types.int64), generate

    return load


load8 = _unaligned_load(8)  # load8(bytes, i): the byte at i
load32 = _unaligned_load(32)  # load32(bytes, i): 4 bytes from i, little-endian
load64 = _unaligned_load(64)  # load64(bytes, i): 8 bytes from i, little-endian


def string_views(array: pa.Array | pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """A string or binary column -> (offsets (n + 1,) int64, bytes (m,) uint8). The bytes are not copied.

    offsets index into bytes and need not start at 0: a slice shares its parent's buffer. Null rows are empty.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks() if array.num_chunks != 1 else array.chunk(0)
    wide = pa.types.is_large_string(array.type) or pa.types.is_large_binary(array.type)
    if not (wide or pa.types.is_string(array.type) or pa.types.is_binary(array.type)):
        raise TypeError(f"A string or binary column is needed, not {array.type}.")
    _, offsets, data = array.buffers()
    if len(array) == 0 or offsets is None:
        return np.zeros(len(array) + 1, np.int64), np.frombuffer(b"", np.uint8)
    kind = np.int64 if wide else np.int32
    ends = np.frombuffer(offsets, kind)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    view = np.frombuffer(data if data is not None else b"", np.uint8)
    view.flags.writeable = False  # Arrow's buffers are now mutable, now not; numba would compile a kernel for either
    return ends, view


@njit(inline="always")
def decode(data, p, end):  # type: ignore[no-untyped-def]
    """The code point at byte p of valid UTF-8 -> (code point uint32, its length in bytes). Never reads at `end`."""
    b = uint32(load8(data, p))
    if b < 0x80:
        return b, 1
    if b < 0xE0 and p + 1 < end:
        return ((b & uint32(0x1F)) << uint32(6)) | (uint32(load8(data, p + 1)) & uint32(0x3F)), 2
    if b < 0xF0 and p + 2 < end:
        high = ((b & uint32(0xF)) << uint32(12)) | ((uint32(load8(data, p + 1)) & uint32(0x3F)) << uint32(6))
        return high | (uint32(load8(data, p + 2)) & uint32(0x3F)), 3
    if p + 3 < end:
        high = ((b & uint32(7)) << uint32(18)) | ((uint32(load8(data, p + 1)) & uint32(0x3F)) << uint32(12))
        low = ((uint32(load8(data, p + 2)) & uint32(0x3F)) << uint32(6)) | (uint32(load8(data, p + 3)) & uint32(0x3F))
        return high | low, 4
    return uint32(0xFFFD), 1


@njit(inline="always")
def mix64(h):  # type: ignore[no-untyped-def]
    """MurmurHash3's 64-bit finaliser: every bit of the input changes every bit of the output."""
    h ^= h >> uint64(33)
    h *= uint64(0xFF51AFD7ED558CCD)
    h ^= h >> uint64(33)
    h *= uint64(0xC4CEB9FE1A85EC53)
    h ^= h >> uint64(33)
    return h
