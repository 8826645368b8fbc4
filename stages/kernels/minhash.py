"""Shingles -> MinHash signatures -> band keys.

A signature holds, for each of k permutations, the smallest permuted shingle hash of the document. Two documents agree
in a place with probability J, the Jaccard similarity of their shingle sets (Broder 1997). The permutations are
`a * x + b` modulo 2^32 with a odd: k independent ones. One permutation that is rotated k times costs the same here
and has up to six times the variance on documents of twenty shingles (measured).

A band is `rows` places of the signature, hashed to one 64-bit key. Two documents share a key of at least one of
`bands` bands with probability 1 - (1 - J^rows)^bands (Leskovec, Rajaraman, Ullman, Mining of Massive Datasets, 3.4).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, njit, types, uint32, uint64
from numba.core import cgutils
from numba.extending import intrinsic

from gristmill.stages.kernels.buffers import mix64
from gristmill.stages.kernels.fold import fold
from gristmill.stages.kernels.shingles import distinct, shingle
from gristmill.stages.kernels.word_hashes import GROWTH, PADDING, WORD, word_hashes

_UNROLL = 4  # permutations that share one pass over the shingles
_EMPTY = uint32(0xFFFFFFFF)
_LANES = 16  # shingles that are permuted at once


def permutations(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """-> factors and summands of `count` permutations, each (count rounded up to 4,) uint32; factors are odd.

    SplitMix64 of the seed, so that no library's version decides what a seed means.
    """
    padded = -(-count // _UNROLL) * _UNROLL
    golden = 0x9E3779B97F4A7C15
    words = []
    for i in range(1, 2 * padded + 1):
        z = (seed * 0xD1B54A32D192ED03 + i * golden) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        words.append((z ^ (z >> 31)) >> 32)
    return np.array(words[::2], np.uint32) | np.uint32(1), np.array(words[1::2], np.uint32)


def _vector_loop() -> Any:
    """`_least`: the loop in vectors of 16. The compiler's own has 8, for fear of a slower clock on older machines; on a
    machine without AVX-512 these are two of 8."""
    number, vector = ir.IntType(32), ir.VectorType(ir.IntType(32), _LANES)

    def splat(builder: Any, value: Any) -> Any:
        one = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.Constant(number, 0))
        return builder.shuffle_vector(one, one, ir.Constant(vector, [ir.Constant(number, 0)] * _LANES))

    @intrinsic
    def least(typing_context: Any, address: Any, count: Any, factors: Any, summands: Any) -> Any:
        """The smallest factor * x + summand of `count` uint32, a multiple of 16, for each of four permutations.

        address int64; factors and summands: 4 uint32 each -> 4 uint32."""
        four = types.UniTuple(types.uint32, _UNROLL)

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            at, size, *pairs = arguments
            a, b = ([splat(builder, v) for v in cgutils.unpack_tuple(builder, pair, _UNROLL)] for pair in pairs)
            before = builder.block
            body, after = builder.append_basic_block("permute"), builder.append_basic_block("permuted")
            builder.branch(body)
            builder.position_at_end(body)
            i = builder.phi(size.type)
            i.add_incoming(ir.Constant(size.type, 0), before)
            smallest = [builder.phi(vector) for _ in range(_UNROLL)]
            place = builder.add(at, builder.mul(i, ir.Constant(size.type, 4)))
            x = builder.load(builder.inttoptr(place, vector.as_pointer()), align=4)
            for j, phi in enumerate(smallest):
                value = builder.add(builder.mul(x, a[j]), b[j])
                lower = builder.select(builder.icmp_unsigned("<", value, phi), value, phi)
                phi.add_incoming(ir.Constant(vector, [ir.Constant(number, 0xFFFFFFFF)] * _LANES), before)
                phi.add_incoming(lower, body)
                smallest[j] = lower
            following = builder.add(i, ir.Constant(size.type, _LANES))
            i.add_incoming(following, body)
            builder.cbranch(builder.icmp_signed("<", following, size), body, after)
            builder.position_at_end(after)
            kind = ir.FunctionType(number, [vector])
            reduce = cgutils.get_or_insert_function(builder.module, kind, f"llvm.vector.reduce.umin.v{_LANES}i32")
            return context.make_tuple(builder, four, [builder.call(reduce, [v]) for v in smallest])

        return four(types.int64, types.int64, four, four), generate

    return least


_least = _vector_loop()


@njit(nogil=True, cache=True)
def signature(shingles, count, factors, summands, out):  # type: ignore[no-untyped-def]
    """The smallest permuted hash of shingles[:count] per permutation -> out (k,) uint32; k a multiple of 4.

    count >= 1. Writes copies of the first shingle after the last, up to a multiple of 16.
    """
    padded = (count + _LANES - 1) // _LANES * _LANES
    for i in range(count, padded):
        shingles[i] = shingles[0]
    at = int64(shingles.ctypes.data)
    for j in range(0, factors.shape[0], _UNROLL):
        a = (factors[j], factors[j + 1], factors[j + 2], factors[j + 3])
        b = (summands[j], summands[j + 1], summands[j + 2], summands[j + 3])
        out[j], out[j + 1], out[j + 2], out[j + 3] = _least(at, padded, a, b)


@njit(nogil=True, cache=True)
def band_keys(places, whole, bands, rows, row, keys):  # type: ignore[no-untyped-def]
    """places (k,) uint32 -> keys[:, row] (bands,) uint64.

    whole: 0, or the 64-bit hash of the only shingle. Then the keys come from it: a signature of one shingle is one
    32-bit hash in k disguises, and among ten million such documents thousands of pairs would share it by chance.
    """
    for band in range(bands):
        h = uint64(0x9E3779B97F4A7C15) * uint64(band + 1)
        if whole != 0:
            h = mix64(h ^ whole)
        else:
            for r in range(rows):
                h = mix64(h ^ uint64(places[band * rows + r]))
        keys[band, row] = h


@njit(nogil=True, cache=True)
def sign(  # type: ignore[no-untyped-def]
    offsets, data, ascii_, page, table, sequences, ngram, factors, summands, bands, rows, cap, keys, signatures,
    counts, capped, sets, set_ends,
):  # fmt: skip
    """Signs each document of a column.

    offsets (n + 1,) int64, data uint8 as `string_views` gives them; the four arrays of a Fold.
    keys (bands, n) uint64; 0 for a document without words. counts (n,) uint32: shingles compared, 0 = no word.
    capped (n,) uint8: 1 where the document had more shingles than `cap` and only the `cap` smallest are compared.
    signatures (n, k) uint32, or (0, k) where nobody wants them.
    sets, set_ends: the sorted shingle sets of all documents, one after the other, in an array of at least
    bytes // 2 + n uint32, and (n,) int64 where each ends; or set_ends (0,) where nobody wants them.
    """
    n = offsets.shape[0] - 1
    longest = int64(0)
    for i in range(n):
        longest = max(longest, offsets[i + 1] - offsets[i])
    out = np.empty(GROWTH * longest + PADDING, np.uint8)
    ends = np.empty(longest + 2, np.int64)
    hashes = np.empty(longest + 2, np.uint64)
    weights = np.full(longest + 2, WORD, np.uint8)
    shingles = np.empty(longest // 2 + 2 + _LANES, np.uint32)
    spare = np.empty(longest // 2 + 2, np.uint32)
    begin = np.empty(longest // 2 + 5, np.int32)
    places = np.empty(factors.shape[0], np.uint32)
    filled = 0
    for i in range(n):
        words, total = word_hashes(
            data, offsets[i], offsets[i + 1], ascii_, page, table, sequences, out, ends, hashes, weights
        )
        count, last = shingle(hashes, weights, words, total, ngram, shingles)
        if total != WORD * words:
            weights[:words] = WORD
        capped[i] = count > cap
        whole = last if count == 1 else uint64(0)
        if set_ends.shape[0] or count > cap:
            count = distinct(shingles, count, cap, spare, begin)
        counts[i] = count
        if set_ends.shape[0]:
            sets[filled : filled + count] = shingles[:count]
            filled += count
            set_ends[i] = filled
        if count == 0:
            keys[:, i] = 0
            if signatures.shape[0]:
                signatures[i, :] = _EMPTY
            continue
        signature(shingles, count, factors, summands, places)
        band_keys(places, whole, bands, rows, i, keys)
        if signatures.shape[0]:
            signatures[i, :] = places[: signatures.shape[1]]


def warm() -> None:
    """Compiles each kernel, or reads it from the cache."""
    factors, summands = permutations(4, 1)
    data = np.frombuffer(b"some words", np.uint8)
    for wanted in (0, 1):
        sign(
            np.array([0, 10], np.int64), data, *fold(), 5, factors, summands, 2, 2, 100, np.empty((2, 1), np.uint64),
            np.empty((wanted, 4), np.uint32), np.empty(1, np.uint32), np.empty(1, np.uint8), np.empty(10, np.uint32),
            np.empty(wanted, np.int64),
        )  # fmt: skip
