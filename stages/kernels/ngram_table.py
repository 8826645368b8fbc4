"""A language model as one hash table, and the scoring of text with it.

KenLM's "probing" structure (Heafield 2011) on our side of Python: an n-gram is looked up by 64 bits of hash of its
words, the last word first, so that a longer match extends the key of a shorter one. A file of it is mapped by every
process, where an ARPA file would be parsed by each.

The table is (slots, 2) uint64, slots a power of two, little-endian: the key, 0 for an empty slot; then two float32,
log10 of the probability and of the back-off weight. Two n-grams of a model of a hundred million share a key with a
probability of 1 in 4,000, and then the first one's figures serve both.
"""

from __future__ import annotations

import math

import numpy as np
from numba import float32, float64, int64, njit, uint8, uint64

from gristmill.stages.kernels.buffers import load8, mix64
from gristmill.stages.kernels.counting import BOS, EOS, UNK, piece_key

RESERVED = np.frombuffer(b"<unk> <s> </s>", np.uint8).copy()  # the words of UNK, BOS, EOS, as text never has them


def slots(ngrams: int) -> int:
    """How many slots hold so many n-grams: a power of two, at most two thirds full."""
    return 1 << max(4, (3 * ngrams // 2).bit_length())


@njit(inline="always")
def _left(key, word):  # type: ignore[no-untyped-def]
    """Key of an n-gram with one more word on its left."""
    return mix64(key * uint64(0x9E3779B97F4A7C15) + word)


@njit(inline="always")
def _find(table, key):  # type: ignore[no-untyped-def]
    """Slot of a key, or -1."""
    mask = table.shape[0] - 1
    s = int64(key & uint64(mask))
    while table[s, 0] != uint64(0):
        if table[s, 0] == key:
            return s
        s = (s + 1) & mask
    return int64(-1)


@njit(nogil=True, cache=True)
def word_keys(word_bytes, word_ends, n_words):  # type: ignore[no-untyped-def]
    """Key of each word -> (n_words,) uint64."""
    keys = np.empty(n_words, np.uint64)
    start = 0
    for word in range(n_words):
        keys[word] = piece_key(word_bytes, start, word_ends[word])[0]
        start = word_ends[word]
    return keys


@njit(nogil=True, cache=True)
def enter(order, prefixes, words, prob, backoff, keys, table, values):  # type: ignore[no-untyped-def]
    """Enters the n-grams of one order. prefixes, words, prob, backoff as for `counting.write_ngrams`.

    keys: of words; values: `table` seen as (slots, 4) float32.
    """
    mask = table.shape[0] - 1
    for i in range(prob.shape[0]):
        is_bos = order == 1 and i == BOS
        if prob[i] == 0.0 and not is_bos:
            continue
        key = keys[words[order - 1][i]]
        j = int64(i)
        for k in range(order - 2, -1, -1):
            j = int64(prefixes[k + 1][j])
            key = _left(key, keys[words[k][j]])
        s = int64(key & uint64(mask))
        while table[s, 0] != uint64(0) and table[s, 0] != key:
            s = (s + 1) & mask
        if table[s, 0] == uint64(0):
            table[s, 0] = key
            values[s, 2] = float32(-99.0) if is_bos else float32(math.log10(min(float64(prob[i]), 1.0)))
            values[s, 3] = float32(math.log10(float64(backoff[i]))) if backoff.shape[0] > 0 else float32(0.0)


@njit(nogil=True, cache=True)
def score(data, ends, reserved, order, table, values, out):  # type: ignore[no-untyped-def]
    """log10 probability of the lines of each document -> out (n,) float64.

    data, ends: as `normalise.Pieces` has them. A line is scored as <s> w1 ... wn </s>, <s> being context only.
    """
    keys = np.empty(3, np.uint64)  # of <unk>, <s>, </s>
    at = 0
    for word in range(3):
        keys[word], at = piece_key(reserved, at, reserved.shape[0])
        at += 1
    unknown, begin = _find(table, keys[UNK]), _find(table, keys[BOS])
    words = np.zeros(order, np.uint64)  # of the context, the nearest first
    weights = np.zeros(order, np.float64)  # log10 back-off of contexts of 1, 2, ... words
    fresh = np.zeros(order, np.float64)
    for doc in range(out.shape[0]):
        total = 0.0
        p, end = ends[doc], ends[doc + 1]
        while p < end:
            words[0] = keys[BOS]
            weights[0] = values[begin, 3]
            context = 1
            in_line = True
            while in_line:
                if p >= end or load8(data, p) == uint8(10):
                    key = keys[EOS]
                    in_line = False
                else:
                    key, p = piece_key(data, p, end)
                    if p < end and load8(data, p) == uint8(32):
                        p += 1
                s = _find(table, key)
                if s < 0:
                    s = unknown
                    key = keys[UNK]
                found = values[s, 2]
                fresh[0] = values[s, 3]
                matched = 1
                longer = key
                while matched <= context:
                    longer = _left(longer, words[matched - 1])
                    s = _find(table, longer)
                    if s < 0:
                        break
                    found = values[s, 2]
                    if matched < order - 1:
                        fresh[matched] = values[s, 3]
                    matched += 1
                total += found
                for j in range(matched - 1, context):
                    total += weights[j]
                context = min(matched, order - 1)
                for j in range(context - 1, 0, -1):
                    words[j] = words[j - 1]
                words[0] = key
                for j in range(context):
                    weights[j] = fresh[j]
            p += 1
        out[doc] = total


def warm() -> None:
    """Compiles every kernel for the types of production."""
    table = np.zeros((slots(3), 2), np.uint64)
    values = table.view(np.float32)
    nothing = np.zeros(0, np.int32)
    columns = (np.arange(3, dtype=np.int32), nothing, nothing, nothing, nothing, nothing)
    keys = word_keys(np.frombuffer(b"<unk><s></s>", np.uint8).copy(), np.array([5, 8, 12], np.int64), 3)
    prob, backoff = np.full(3, 0.1, np.float32), np.ones(3, np.float32)
    enter(1, columns, columns, prob, backoff, keys, table, values)
    table.flags.writeable = values.flags.writeable = False  # as a mapped file is
    score(RESERVED, np.array([0, 5], np.int64), RESERVED, 2, table, values, np.zeros(1))
