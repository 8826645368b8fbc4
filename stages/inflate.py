"""libdeflate's gzip, one member after the other straight into a buffer of ours.

The package `deflate` brings libdeflate along, but its own functions want to know a member's end and size before, and
give each its own memory. The library inside it is called with what it exports itself, by the documented interface of
`libdeflate.h`.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import cache
from typing import Any, NamedTuple

NO_ROOM = 3  # LIBDEFLATE_INSUFFICIENT_SPACE of enum libdeflate_result


class Member(NamedTuple):
    """What became of a member."""

    problem: int  # 0, NO_ROOM, or another number for bad data, also where the bytes end too early
    packed: int  # its bytes
    size: int  # when it is inflated


@cache
def _library() -> Any:
    """None where the package holds no library that can be called."""
    try:
        import deflate._deflate

        library = ctypes.CDLL(deflate._deflate.__file__)
        library.libdeflate_alloc_decompressor.restype = ctypes.c_void_p
        library.libdeflate_alloc_decompressor.argtypes = []
        library.libdeflate_free_decompressor.restype = None
        library.libdeflate_free_decompressor.argtypes = [ctypes.c_void_p]
        size = ctypes.POINTER(ctypes.c_size_t)
        inflate = library.libdeflate_gzip_decompress_ex
        inflate.restype = ctypes.c_int
        address, count = ctypes.c_void_p, ctypes.c_size_t
        inflate.argtypes = [address, address, count, address, count, size, size]
    except (ImportError, OSError, AttributeError):
        return None
    return library


class Inflater:
    """One decompressor; not for two threads at once."""

    def __init__(self) -> None:
        library = _library()
        self._call = library.libdeflate_gzip_decompress_ex
        self._handle = ctypes.c_void_p(library.libdeflate_alloc_decompressor())
        if not self._handle:
            raise MemoryError("libdeflate found no memory for a decompressor.")
        self._packed, self._size = ctypes.c_size_t(), ctypes.c_size_t()
        self._refs = ctypes.byref(self._packed), ctypes.byref(self._size)
        weakref.finalize(self, library.libdeflate_free_decompressor, self._handle)

    @staticmethod
    def is_there() -> bool:
        return _library() is not None

    def member(self, data: int, size: int, out: int, room: int) -> Member:
        """Inflates the member that begins at an address, of at most `size` bytes, to another, with `room` bytes. Where
        there is no problem, its checksum and its size were compared."""
        problem = self._call(self._handle, data, size, out, room, *self._refs)
        return Member(problem, self._packed.value, self._size.value)
