"""What fastText's `predict` computes for a line of text, to the bit: words -> rows -> their mean.

fastText (Joulin et al. 2017; release 0.9.2) looks up a row of its input matrix for each known word, each character
n-gram of `<word>` and each word n-gram, takes the mean, and scores labels with it (`fasttext_labels`). Hashes, the
order of the sums and the places where a float is rounded are those of its C++ code, because a limit is crossed by the
last bit too. `fasttext_file` reads the models.

    words           cut at space, tab, newline, \\r, \\v, \\f and NUL; `</s>` ends a line; what begins with `__label__`
                    is a label, and no word unless the model lists it as one
    n-grams         of code points, hashed by FNV-1a over bytes taken as signed; bucket = hash mod buckets
    pruned buckets  a bit for each bucket says whether it has a row. Rows are in the order of the buckets, so that the
                    row is the number of bits before: 0.5 MB instead of 8 for a table of 2,000,000 buckets

A model goes to kernels as its *plan*: addresses and sizes, one int64 each (`Network.plan`), because a tuple of a dozen
arrays takes numba most of a minute to compile. Inner functions take addresses (see `memory`). Nothing is read outside
the text that is given.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int32, int64, njit, types, uint64
from numba.core import cgutils
from numba.extending import intrinsic

from gristmill.stages.kernels.memory import count_bits, equal_bytes, inner, peek8, peek16, peek32, peek64, poke8, poke32

TREE, SAMPLED, SOFTMAX, EACH = 1, 2, 3, 4  # fastText's hs, ns, softmax, ova
PIECES = 4  # of a sample: the start of a page is often a menu
_SEED, _PRIME = 2166136261, 16777619  # FNV-1a, 32 bits
_LOW32 = 0xFFFFFFFF
_OPEN, _CLOSE = 0x3C, 0x3E  # < and >
_END = 0x3E732F3C  # </s>, little-endian
_LABEL = uint64(0x6562616C5F5F)  # __label__: its first six bytes, then the last three
_LABEL_TAIL = 0x5F5F6C
_WORD_PRIME = uint64(116049371)  # of word n-grams
_BLOCK = 4_096  # rows collected before they are summed


@dataclass(frozen=True)
class Network:
    """A supervised model. All arrays are contiguous; rows of `inputs`: words, then buckets."""

    words: np.ndarray  # (bytes,) uint8, the words and labels one behind the other
    word_ends: np.ndarray  # (entries + 1,) int64
    slots: np.ndarray  # (power of two, 2) int32: open addressing by hash; entry or -1, and its hash
    pruned: np.ndarray  # (ceil(buckets / 64), 2) uint64: bits that have rows, bits before; (0, 2): no bucket is pruned
    inputs: np.ndarray  # (rows, dim) float32
    outputs: np.ndarray  # (labels, or nodes of the tree, dim) float32
    scale: np.ndarray  # (rows of outputs,) float32: what a row's dot product is multiplied by
    children: np.ndarray  # (nodes of the tree, 2) int32: left, right; leaves are 0 to labels - 1
    paths: np.ndarray  # (steps,) int64: for each label, from the root: 2 * node + (1 where it goes right)
    path_ends: np.ndarray  # (labels + 1,) int64
    sigmoids: np.ndarray  # (513,) float32, fastText's table
    word_rows: int
    labels: int
    min_letters: int  # of character n-grams
    max_letters: int  # 0: none
    word_ngrams: int
    buckets: int
    kind: int  # TREE, SAMPLED, SOFTMAX, EACH

    def plan(self) -> np.ndarray:
        """(fields,) int64: `PLAN` says what is where. The arrays must outlive it."""
        named: dict[str, int] = {field.name: self._number(getattr(self, field.name)) for field in fields(self)}
        named |= {"dim": self.inputs.shape[1], "mask": len(self.slots) - 1}
        named["magic"] = -(-(1 << 64) // self.buckets) % (1 << 64) if self.buckets else 0
        return np.array([named[name] for name in PLAN], np.uint64).view(np.int64)

    @staticmethod
    def _number(value: Any) -> int:
        """The address of an array, 0 of an empty one; a number is itself."""
        if isinstance(value, np.ndarray):
            return int(value.ctypes.data) if value.size else 0
        return int(value)


PLAN = (*(field.name for field in fields(Network)), "dim", "mask", "magic")
_WORDS, _WORD_ENDS, _SLOTS, _MASK = (PLAN.index(name) for name in ("words", "word_ends", "slots", "mask"))
_PRUNED, _INPUTS, _DIM, _WORD_ROWS = (PLAN.index(name) for name in ("pruned", "inputs", "dim", "word_rows"))
_MIN, _MAX, _BUCKETS, _MAGIC = (PLAN.index(name) for name in ("min_letters", "max_letters", "buckets", "magic"))
_WORD_NGRAMS = PLAN.index("word_ngrams")


def _sum_of(width: int) -> Any:
    vector = ir.VectorType(ir.FloatType(), width)

    @intrinsic
    def add_rows(typing_context: Any, ids: Any, count: Any, rows: Any, stride: Any, sums: Any) -> Any:
        """Adds to `width` floats at `sums` those of each row, one row after the other. All arguments are int64;
        ids: address of `count` int32; stride: bytes from row to row."""

        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            first, count, rows, stride, sums = arguments
            total = cgutils.alloca_once(builder, vector)
            kept = builder.inttoptr(sums, vector.as_pointer())
            builder.store(builder.load(kept, align=1), total)
            with cgutils.for_range(builder, count, intp=ir.IntType(64)) as loop:
                at = builder.add(first, builder.shl(loop.index, ir.Constant(ir.IntType(64), 2)))
                row = builder.zext(
                    builder.load(builder.inttoptr(at, ir.IntType(32).as_pointer()), align=1), ir.IntType(64)
                )
                place = builder.inttoptr(builder.add(rows, builder.mul(row, stride)), vector.as_pointer())
                builder.store(builder.fadd(builder.load(total), builder.load(place, align=1)), total)
            builder.store(builder.load(total), kept, align=1)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), generate

    return add_rows


_add_rows16, _add_rows4, _add_rows1 = _sum_of(16), _sum_of(4), _sum_of(1)


@intrinsic
def _remainder(typing_context: Any, value: Any, divisor: Any, magic: Any) -> Any:
    """value mod divisor of numbers below 2^32, without a division: Lemire et al. 2019, "Faster remainder by direct
    computation", section 3.1. int64, int64, uint64 = ceil(2^64 / divisor) -> int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        wide = ir.IntType(128)
        fraction = builder.mul(arguments[2], arguments[0])
        product = builder.mul(builder.zext(fraction, wide), builder.zext(arguments[1], wide))
        return builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), ir.IntType(64))

    return types.int64(types.int64, types.int64, types.uint64), generate


@inner
def _hashed(h, byte):  # type: ignore[no-untyped-def]
    """FNV-1a with the byte as a signed one: its sign fills the upper bits."""
    return ((h ^ (byte | (0xFFFFFF00 if byte >= 0x80 else 0))) * _PRIME) & _LOW32


@inner
def _is_space(byte):  # type: ignore[no-untyped-def]
    return byte == 0x20 or (byte >= 9 and byte <= 13) or byte == 0


@inner
def _put(ids, n, bucket, word_rows, pruned):  # type: ignore[no-untyped-def]
    """Writes the row of a bucket at place n -> the next place, n itself where the bucket has no row.
    pruned: address of the table, 0 where no bucket is pruned."""
    if pruned == 0:
        poke32(ids + 4 * n, word_rows + bucket)
        return n + 1
    place = pruned + 16 * (bucket >> 6)
    bits, before = int64(peek64(place)), int64(peek64(place + 8))
    below = bits & ((int64(1) << (bucket & 63)) - 1)
    poke32(ids + 4 * n, word_rows + before + count_bits(below))
    return n + ((bits >> (bucket & 63)) & 1)


@inner
def _ngrams(ids, n, p, end, start, minn, maxn, buckets, magic, word_rows, pruned):  # type: ignore[no-untyped-def]
    """Rows of the n-grams that begin at p of the word [start, end), its `<` and `>` included -> n."""
    h, size, q = _SEED, 1, p
    while size <= maxn and q < end:
        h = _hashed(h, peek8(q))
        q += 1
        while q < end and peek8(q) & 0xC0 == 0x80:
            h = _hashed(h, peek8(q))
            q += 1
        if size >= minn and not (size == 1 and (p == start or q == end)):
            n = _put(ids, n, _remainder(h, buckets, magic), word_rows, pruned)
        size += 1
    return n


@inner
def _entry(slots, mask, words, ends, word, size, h):  # type: ignore[no-untyped-def]
    """The number of a word among the model's, or -1."""
    slot = h & mask
    while True:
        found = peek32(slots + 8 * slot)
        if found == _LOW32:
            return int64(-1)
        if peek32(slots + 8 * slot + 4) == h:
            first = int64(peek64(ends + 8 * found))
            if int64(peek64(ends + 8 * found + 8)) - first == size and equal_bytes(words + first, word, size):
                return found
        slot = (slot + 1) & mask


@njit(inline="always")
def at(array):  # type: ignore[no-untyped-def]
    """Its address; int64, because numba makes a float of the sum of a signed and an unsigned number."""
    return int64(array.ctypes.data)


@inner
def field(plan, index):  # type: ignore[no-untyped-def]
    """A field of the plan at the address `plan`, int64."""
    return int64(peek64(plan + 8 * index))


@inner
def _add(ids, n, rows, dim, sums):  # type: ignore[no-untyped-def]
    """Adds n rows to `sums`, each column in the order of the rows."""
    column = int64(0)
    while column + 16 <= dim:
        _add_rows16(ids, n, rows + 4 * column, 4 * dim, sums + 4 * column)
        column += 16
    while column + 4 <= dim:
        _add_rows4(ids, n, rows + 4 * column, 4 * dim, sums + 4 * column)
        column += 4
    while column < dim:
        _add_rows1(ids, n, rows + 4 * column, 4 * dim, sums + 4 * column)
        column += 1


@inner
def _full(ids, n, more, plan, sums):  # type: ignore[no-untyped-def]
    """Sums the rows collected where there is no room for `more` -> rows summed: n or 0."""
    if n + more <= _BLOCK:
        return int64(0)
    _add(ids, n, field(plan, _INPUTS), field(plan, _DIM), sums)
    return n


@inner
def _letters(ids, n, summed, start, end, plan, sums):  # type: ignore[no-untyped-def]
    """Rows of all character n-grams of the word [start, end), its `<` and `>` included -> (n, summed)."""
    minn, maxn = field(plan, _MIN), field(plan, _MAX)
    buckets, magic = field(plan, _BUCKETS), peek64(plan + 8 * _MAGIC)
    word_rows, pruned = field(plan, _WORD_ROWS), field(plan, _PRUNED)
    for p in range(start, end):
        if peek8(p) & 0xC0 == 0x80:
            continue
        done = _full(ids, n, maxn, plan, sums)
        summed, n = summed + done, n - done
        n = _ngrams(ids, n, p, end, start, minn, maxn, buckets, magic, word_rows, pruned)
    return n, summed


@inner
def _is_label(word, size):  # type: ignore[no-untyped-def]
    """Whether a word that the model does not know begins with `__label__`."""
    if size < 9:
        return False
    low = peek32(word) | peek16(word + 4) << 32
    return uint64(low) == _LABEL and peek32(word + 5) >> 8 == _LABEL_TAIL


@inner
def _words(p, end, buffer, ids, n, summed, hashes, count, plan, sums):  # type: ignore[no-untyped-def]
    """Takes in the words of the text [p, end).

    buffer: address of room for the longest word and 2 bytes; ids: of `_BLOCK` int32, the first n of which are rows not
    yet summed; hashes: of the hashes of words so far, 0 where no word n-grams are asked for
    -> (n, rows summed, hashes written, whether `</s>` came).
    """
    letters = field(plan, _MAX) > 0 and field(plan, _BUCKETS) > 0
    poke8(buffer, _OPEN)
    while True:
        while p < end and _is_space(peek8(p)):
            p += 1
        if p == end:
            return n, summed, count, False
        h, size = int64(_SEED), int64(0)
        while p < end:
            byte = peek8(p)
            if _is_space(byte):
                break
            h = _hashed(h, byte)
            size += 1
            poke8(buffer + size, byte)
            p += 1
        poke8(buffer + size + 1, _CLOSE)
        entry = _entry(
            field(plan, _SLOTS), field(plan, _MASK), field(plan, _WORDS), field(plan, _WORD_ENDS), buffer + 1, size, h
        )
        is_end = size == 4 and peek32(buffer + 1) == _END
        if entry < field(plan, _WORD_ROWS) and (entry >= 0 or not _is_label(buffer + 1, size)):
            if entry >= 0:
                done = _full(ids, n, 1, plan, sums)
                summed, n = summed + done, n - done
                poke32(ids + 4 * n, entry)
                n += 1
            if letters and not is_end:
                n, summed = _letters(ids, n, summed, buffer, buffer + size + 2, plan, sums)
            if hashes:
                poke32(hashes + 4 * count, h)
                count += 1
        if is_end:
            return n, summed, count, True


@inner
def _word_ngrams(ids, n, summed, hashes, count, plan, sums):  # type: ignore[no-untyped-def]
    """Rows of the n-grams of two words and more -> (n, summed). Hashes are taken as signed 32-bit numbers."""
    longest, buckets = field(plan, _WORD_NGRAMS), uint64(field(plan, _BUCKETS))
    for i in range(count):
        h = uint64(int32(peek32(hashes + 4 * i)))
        for j in range(i + 1, min(count, i + longest)):
            h = h * _WORD_PRIME + uint64(int32(peek32(hashes + 4 * j)))
            done = _full(ids, n, 1, plan, sums)
            summed, n = summed + done, n - done
            n = _put(ids, n, int64(h % buckets), field(plan, _WORD_ROWS), field(plan, _PRUNED))
    return n, summed


@inner
def _cut(data, start, size, piece, width):  # type: ignore[no-untyped-def]
    """A piece of the `size` bytes from `start` on -> [p, q) without half words and half characters at its ends."""
    p = start + (size - width) * piece // (PIECES - 1)
    q = p + width
    if p > start:
        for i in range(p, p + width // 4):
            if peek8(data + i) == 0x20:
                p = i + 1
                break
    for i in range(q - 1, p + 3 * (q - p) // 4 - 1, -1):
        if peek8(data + i) == 0x20:
            q = i
            break
    while p < q and peek8(data + p) & 0xC0 == 0x80:
        p += 1
    last = q - 1  # where the last character begins
    while last > p and peek8(data + last) & 0xC0 == 0x80:
        last -= 1
    if last >= p:
        b = peek8(data + last)
        if last + 1 + (b >= 0xC0) + (b >= 0xE0) + (b >= 0xF0) > q:
            q = last
    return p, q


@njit(nogil=True, cache=True)
def hidden(plan, data, offsets, sample_bytes, scratch, out, seen):  # type: ignore[no-untyped-def]
    """The mean row of each text.

    plan: of a `Network`; data: (m,) uint8; offsets: (n + 1,) int64; sample_bytes: what is seen of a text, in PIECES
    pieces evenly spread, cut at spaces where there are any; 0 for all of it; scratch: `scratch_bytes` of uint8; out:
    (n, dim) float32 of zeros, filled; seen: (n,) int64 out, rows of each mean: where 0, the model knows no word of the
    text.
    """
    net, text_at, end_at = at(plan), at(data), at(scratch)
    dim, many = field(net, _DIM), field(net, _WORD_NGRAMS) > 1 and field(net, _BUCKETS) > 0
    poke32(end_at, _END)
    ids = end_at + 8
    longest = int64(0)
    for text in range(len(seen)):
        longest = max(longest, offsets[text + 1] - offsets[text])
    hashes = ids + 4 * _BLOCK if many else int64(0)
    buffer = ids + 4 * _BLOCK + (4 * (longest // 2 + PIECES + 2) if many else 0)
    for text in range(len(seen)):
        start, end = int64(offsets[text]), int64(offsets[text + 1])
        sums = at(out) + 4 * dim * text
        n, summed, count, ended = int64(0), int64(0), int64(0), False
        sampled = sample_bytes > 0 and end - start > sample_bytes
        for piece in range(PIECES if sampled else 1):
            p, q = start, end
            if sampled:
                p, q = _cut(text_at, start, end - start, piece, sample_bytes // PIECES)
            n, summed, count, ended = _words(text_at + p, text_at + q, buffer, ids, n, summed, hashes, count, net, sums)
            if ended:
                break
        if not ended:  # the end of the line is a word, as it was in training
            n, summed, count, ended = _words(end_at, end_at + 4, buffer, ids, n, summed, hashes, count, net, sums)
        if many:
            n, summed = _word_ngrams(ids, n, summed, hashes, count, net, sums)
        _add(ids, n, field(net, _INPUTS), dim, sums)
        seen[text] = summed + n
        if seen[text]:
            share = float32(1.0 / seen[text])
            for i in range(dim):
                out[text, i] *= share


def scratch_bytes(offsets: np.ndarray, word_ngrams: int) -> int:
    """What `hidden` needs for texts of these offsets."""
    longest = int(np.diff(offsets).max(initial=0))
    hashes = 4 * (longest // 2 + PIECES + 2) if word_ngrams > 1 else 0
    return 8 + 4 * _BLOCK + hashes + longest + 16


@njit(nogil=True, cache=True)
def read_entries(data, entries):  # type: ignore[no-untyped-def]
    """The words of a model's file -> (where each ends (entries,) int64, counts (entries,) int64, kinds (entries,) int8:
    0 a word and 1 a label, bytes read; -1 where the file ends before).

    An entry is the word, a NUL, its count as 8 bytes, its kind as one.
    """
    ends, counts, kinds = np.empty(entries, np.int64), np.empty(entries, np.int64), np.empty(entries, np.int8)
    p, size = int64(0), int64(len(data))
    for i in range(entries):
        while p < size and data[p] != 0:
            p += 1
        if p + 10 > size:
            return ends, counts, kinds, int64(-1)
        ends[i] = p
        counts[i], kinds[i] = int64(peek64(at(data) + p + 1)), data[p + 9]
        p += 10
    return ends, counts, kinds, p


@njit(nogil=True, cache=True)
def dictionary(data, ends, entries):  # type: ignore[no-untyped-def]
    """data and ends as of `read_entries` -> words, word_ends, slots of a `Network`."""
    word_ends = np.zeros(entries + 1, np.int64)
    start = int64(0)
    for i in range(entries):
        word_ends[i + 1] = word_ends[i] + ends[i] - start
        start = ends[i] + 10
    words = np.empty(word_ends[entries], np.uint8)
    room = 16
    while room < 2 * entries:
        room *= 2
    slots = np.full((room, 2), -1, np.int32)
    start = int64(0)
    for i in range(entries):
        h = int64(_SEED)
        for p in range(start, ends[i]):
            words[word_ends[i] + p - start] = data[p]
            h = _hashed(h, int64(data[p]))
        start = ends[i] + 10
        slot = h & (room - 1)
        while slots[slot, 0] != -1:
            slot = (slot + 1) & (room - 1)
        slots[slot, 0], slots[slot, 1] = i, h
    return words, word_ends, slots


def tiny() -> Network:
    """A model of one word and one label, for `warm`."""
    data = np.frombuffer(b"a\0" + bytes(9) + b"__label__x\0" + bytes(8) + b"\1", np.uint8)
    ends = read_entries(data, 2)[0]
    words, word_ends, slots = dictionary(data, ends, 2)
    return Network(
        words=words, word_ends=word_ends, slots=slots, pruned=np.zeros((1, 2), np.uint64),
        inputs=np.ones((2, 1), np.float32), outputs=np.ones((1, 1), np.float32), scale=np.ones(1, np.float32),
        children=np.zeros((0, 2), np.int32), paths=np.zeros(0, np.int64), path_ends=np.zeros(2, np.int64),
        sigmoids=np.zeros(513, np.float32), word_rows=1, labels=1, min_letters=2, max_letters=3, word_ngrams=2,
        buckets=64, kind=SOFTMAX,
    )  # fmt: skip


def warm() -> None:
    net, offsets = tiny(), np.array([0, 3])
    scratch = np.empty(scratch_bytes(offsets, net.word_ngrams), np.uint8)
    data = np.frombuffer(b"a b", np.uint8)
    hidden(net.plan(), data, offsets, 0, scratch, np.zeros((1, 1), np.float32), np.zeros(1, np.int64))
