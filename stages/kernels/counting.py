"""Counting n-grams: words to ids, n-grams to sorted groups, sums over groups, and the text of an ARPA file.

An n-gram of order k is a pair (id of its first k - 1 words among the (k-1)-grams, id of its last word), and its own id
is its rank in the order of such pairs. So ids of every order are in the order of their words, the extensions of a
context are neighbours, and n-grams that begin with <s> come first.

Word ids: 0 <unk>, 1 <s>, 2 </s>, then words in the order in which they first appear.
"""

from __future__ import annotations

import math

import numpy as np
from numba import float64, int64, njit, uint8, uint64

from gristmill.stages.kernels.buffers import load8, mix64

UNK, BOS, EOS, FIRST_WORD = 0, 1, 2, 3
MAX_ORDER = 6  # what the kenlm package is compiled for
_RADIX_BITS = 11


@njit(inline="always")
def piece_key(data, p, end):  # type: ignore[no-untyped-def]
    """The piece at data[p:], up to a space, a newline or `end` -> (64 bits of hash, never 0; the index after it)."""
    q = p
    h = uint64(0)
    while q < end:
        b = load8(data, q)
        if b == uint8(32) or b == uint8(10):
            break
        h = (h ^ uint64(b)) * uint64(0x100000001B3)
        q += 1
    h = mix64(h ^ (uint64(q - p) << uint64(56)))
    return (uint64(1) if h == uint64(0) else h), q


@njit(inline="always")
def _slot(hashes, key):  # type: ignore[no-untyped-def]
    """Where `key` is in the open-addressed table, or the empty slot where it belongs."""
    mask = hashes.shape[0] - 1
    s = int64(key & uint64(mask))
    while hashes[s] != uint64(0) and hashes[s] != key:
        s = (s + 1) & mask
    return s


@njit(nogil=True, cache=True)
def rehash(hashes, ids, new_hashes, new_ids):  # type: ignore[no-untyped-def]
    """Moves the entries of a word table to a larger one. Sizes are powers of two; an empty slot has hash 0."""
    for s in range(hashes.shape[0]):
        if hashes[s] != uint64(0):
            t = _slot(new_hashes, hashes[s])
            new_hashes[t] = hashes[s]
            new_ids[t] = ids[s]


@njit(nogil=True, cache=True)
def encode_lines(data, start, end, hashes, table_ids, n_words, word_bytes, word_ends, out):  # type: ignore[no-untyped-def]
    """Pieces data[start:end] (spaces between, newline after each line) -> ids in `out`, as <s> w1 ... wn </s>.

    Enters new words into the table (hashes (m,) uint64, table_ids (m,) int32), their text into word_bytes, its end
    into word_ends. Returns (ids written, words known). Words are told apart by 64 bits of hash: ten million words
    share one with a probability of 3 in a million.
    """
    o = 0
    p = start
    while p < end:
        if load8(data, p) == uint8(10):
            p += 1
            continue
        out[o] = BOS
        o += 1
        while p < end and load8(data, p) != uint8(10):
            key, q = piece_key(data, p, end)
            if q > p:
                s = _slot(hashes, key)
                if hashes[s] == uint64(0):
                    hashes[s] = key
                    table_ids[s] = n_words
                    at = word_ends[n_words - 1]
                    for i in range(q - p):
                        word_bytes[at + i] = load8(data, p + i)
                    word_ends[n_words] = at + q - p
                    n_words += 1
                out[o] = table_ids[s]
                o += 1
            p = q
            if p < end and load8(data, p) == uint8(32):
                p += 1
        out[o] = EOS
        o += 1
    return o, n_words


@njit(nogil=True, cache=True)
def line_end(data, at):  # type: ignore[no-untyped-def]
    """The index after the first newline of data[at:], or the length of data."""
    while at < data.shape[0] and load8(data, at) != uint8(10):
        at += 1
    return min(at + 1, data.shape[0])


@njit(nogil=True, cache=True)
def ranges(raw, room):  # type: ignore[no-untyped-def]
    """Cuts n-grams into ranges of at most `room` occurrences, one n-gram at least -> (bounds, largest range)."""
    bounds = [0]
    total = largest = 0
    for i in range(raw.shape[0]):
        if total > 0 and total + raw[i] > room:
            bounds.append(i)
            total = 0
        total += raw[i]
        largest = max(largest, total)
    bounds.append(raw.shape[0])
    return np.array(bounds), largest


@njit(nogil=True, cache=True)
def count_words(tokens, raw):  # type: ignore[no-untyped-def]
    """raw[w] += 1 for each token w."""
    for i in range(tokens.shape[0]):
        raw[tokens[i]] += 1


@njit(nogil=True, cache=True)
def select(prefix_at, words, low, high, n_words, positions, keys, suffixes):  # type: ignore[no-untyped-def]
    """The positions whose n-gram of order k has a prefix in [low, high).

    prefix_at (t,) int32: id of the (k-1)-gram that ends at each position, -1 for none; words (t,) int32.
    Fills positions, keys = (prefix - low) * n_words + word, suffixes: the (k-1)-gram at the position itself.
    Returns how many.
    """
    n = 0
    for i in range(1, words.shape[0]):
        prefix = prefix_at[i - 1]
        if prefix >= low and prefix < high and words[i] != BOS:
            positions[n] = i
            keys[n] = int64(prefix - low) * n_words + int64(words[i])
            suffixes[n] = prefix_at[i]
            n += 1
    return n


@njit(nogil=True, cache=True)
def sort_keys(keys, order, keys_2, order_2, n, bits):  # type: ignore[no-untyped-def]
    """Stable radix sort of keys[:n], of at most `bits` bits -> True where the result is in keys_2 and order_2.

    `order` receives the index that each sorted key had.
    """
    buckets = 1 << _RADIX_BITS
    mask = int64(buckets - 1)
    for i in range(n):
        order[i] = i
    a_keys, a_order, b_keys, b_order = keys, order, keys_2, order_2
    swapped = False
    shift = 0
    while shift < bits:
        starts = np.zeros(buckets + 1, np.int64)
        for i in range(n):
            starts[((a_keys[i] >> shift) & mask) + 1] += 1
        for i in range(buckets):
            starts[i + 1] += starts[i]
        for i in range(n):
            digit = (a_keys[i] >> shift) & mask
            j = starts[digit]
            starts[digit] = j + 1
            b_keys[j] = a_keys[i]
            b_order[j] = a_order[i]
        a_keys, b_keys = b_keys, a_keys
        a_order, b_order = b_order, a_order
        swapped = not swapped
        shift += _RADIX_BITS
    return swapped


@njit(nogil=True, cache=True)
def count_groups(keys, n):  # type: ignore[no-untyped-def]
    """How many distinct keys there are in sorted keys[:n]."""
    groups = 0
    for i in range(n):
        if i == 0 or keys[i] != keys[i - 1]:
            groups += 1
    return groups


@njit(nogil=True, cache=True)
def group(keys, order, n, low, n_words, first_id, suffix_of, prefix, word, suffix, raw, id_of):  # type: ignore[no-untyped-def]
    """Sorted keys[:n] -> one row for each distinct key: prefix, word, suffix, raw count; id_of[order[i]] its id."""
    u = -1
    for i in range(n):
        key = keys[i]
        if i == 0 or key != keys[i - 1]:
            u += 1
            prefix[u] = low + key // n_words
            word[u] = key % n_words
            suffix[u] = suffix_of[order[i]]
            raw[u] = 0
        raw[u] += 1
        id_of[order[i]] = first_id + u


@njit(nogil=True, cache=True)
def scatter(positions, n, values, out):  # type: ignore[no-untyped-def]
    """out[positions[i]] = values[i] for i < n."""
    for i in range(n):
        out[positions[i]] = values[i]


@njit(nogil=True, cache=True)
def count_left(suffix, contexts):  # type: ignore[no-untyped-def]
    """contexts[s] += 1 for each n-gram's suffix: in how many different contexts to the left the suffix was seen."""
    for i in range(suffix.shape[0]):
        contexts[suffix[i]] += 1


@njit(nogil=True, cache=True)
def counts_of_counts(adjusted):  # type: ignore[no-untyped-def]
    """How many adjusted counts are 1, 2, 3 and 4 -> (5,) int64; entry 0 is unused."""
    n = np.zeros(5, np.int64)
    for i in range(adjusted.shape[0]):
        a = adjusted[i]
        if 0 < a < 5:
            n[a] += 1
    return n


@njit(nogil=True, cache=True)
def interpolate(prefix, suffix, adjusted, raw, prune, discounts, lower, backoff, prob):  # type: ignore[no-untyped-def]
    """Probabilities of one order and back-off weights of the order below (Chen and Goodman 1998, section 3).

    prefix, suffix, adjusted, raw (u,), sorted by prefix; lower (l,) float32: probabilities of the order below.
    An n-gram with a raw count of at most `prune` gets probability 0, its mass goes to the back-off of its context.
    Fills prob (u,) and backoff (l,) float32. Returns how many n-grams stay.
    """
    kept = 0
    i = 0
    n = prefix.shape[0]
    while i < n:
        j = i
        total = left = 0.0
        while j < n and prefix[j] == prefix[i]:
            a = adjusted[j]
            total += a
            left += discounts[min(a, 3)] if raw[j] > prune else a
            j += 1
        gamma = left / total
        backoff[prefix[i]] = gamma
        while i < j:
            if raw[i] > prune:
                a = adjusted[i]
                prob[i] = (a - discounts[min(a, 3)]) / total + gamma * lower[suffix[i]]
                kept += 1
            else:
                prob[i] = 0.0
            i += 1
    return kept


@njit(inline="always")
def _write_log10(value, out, o):  # type: ignore[no-untyped-def]
    """log10 of a probability or weight as text with six decimals, at out[o:]; returns the end."""
    micro = int64(math.floor(math.log10(value) * 1e6 + 0.5))
    if micro < 0:
        out[o] = 45
        o += 1
        micro = -micro
    whole = micro // 1_000_000
    if whole >= 10:
        out[o] = 48 + whole // 10
        o += 1
    out[o] = 48 + whole % 10
    out[o + 1] = 46
    rest = micro % 1_000_000
    for i in range(6):
        out[o + 7 - i] = 48 + rest % 10
        rest //= 10
    return o + 8


@njit(nogil=True, cache=True)
def write_ngrams(start, end, order, prefixes, words, prob, backoff, word_bytes, word_ends, out):  # type: ignore[no-untyped-def]
    """Lines of an ARPA file for n-grams [start, end) of one order -> (bytes written, index of the next n-gram).

    prefixes, words: MAX_ORDER arrays each, entry k - 1 for order k; an n-gram of probability 0 is left out. backoff
    has length 0 at the highest order. Stops before `out` could overflow. A unigram <s> has log probability -99, for it
    is only a context.
    """
    o = 0
    i = start
    chain = np.empty(order, np.int64)
    while i < end:
        if prob[i] == 0.0 and not (order == 1 and i == BOS):
            i += 1
            continue
        j = i
        size = 64
        for k in range(order - 1, -1, -1):
            word = int64(words[k][j])
            chain[k] = word
            size += word_ends[word] - (word_ends[word - 1] if word > 0 else 0) + 1
            if k > 0:
                j = int64(prefixes[k][j])
        if o + size > out.shape[0]:
            break
        if order == 1 and i == BOS:
            out[o] = 45
            out[o + 1] = 57
            out[o + 2] = 57
            o += 3
        else:
            o = _write_log10(min(float64(prob[i]), 1.0), out, o)
        for k in range(order):
            out[o] = 9 if k == 0 else 32
            o += 1
            word = chain[k]
            for b in range(word_ends[word - 1] if word > 0 else 0, word_ends[word]):
                out[o] = word_bytes[b]
                o += 1
        if backoff.shape[0] > 0:
            out[o] = 9
            o = _write_log10(float64(backoff[i]), out, o + 1)
        out[o] = 10
        o += 1
        i += 1
    return o, i


def warm() -> None:
    """Compiles every kernel for the types of production."""
    text = np.frombuffer(b"a b a\nb a\n", np.uint8).copy()
    hashes, ids, word_bytes = np.zeros(16, np.uint64), np.zeros(16, np.int32), np.zeros(64, np.uint8)
    word_ends, tokens = np.array([5, 8, 12, 0, 0, 0], np.int64), np.zeros(16, np.int32)
    n, n_words = encode_lines(text, 0, line_end(text, 6), hashes, ids, FIRST_WORD, word_bytes, word_ends, tokens)
    rehash(hashes, ids, np.zeros(32, np.uint64), np.zeros(32, np.int32))
    tokens = tokens[:n]
    raw = np.zeros(n_words, np.int32)
    count_words(tokens, raw)
    ranges(raw, 100)
    positions, suffix_of, id_of, index, index_2 = (np.zeros(n, np.int32) for _ in range(5))
    keys, keys_2 = np.zeros(n, np.int64), np.zeros(n, np.int64)
    m = select(tokens, tokens, np.int64(0), np.int64(n_words), n_words, positions, keys, suffix_of)
    sort_keys(keys, index, keys_2, index_2, m, 8)
    prefix, word, suffix, count = (np.zeros(count_groups(keys_2, m), np.int32) for _ in range(4))
    group(keys_2, index_2, m, np.int64(0), n_words, 0, suffix_of, prefix, word, suffix, count, id_of)
    scatter(positions, m, id_of, np.zeros(n, np.int32))
    adjusted = np.zeros(n_words, np.int32)
    count_left(suffix, adjusted)
    counts_of_counts(adjusted)
    lower, backoff, prob = (
        np.full(n_words, 0.1, np.float32),
        np.ones(n_words, np.float32),
        np.zeros(len(word), np.float32),
    )
    interpolate(prefix, suffix, count, count, 0, np.array([0, 0.5, 1.0, 1.5]), lower, backoff, prob)
    nothing = np.zeros(0, np.int32)
    prefixes = (nothing, prefix, nothing, nothing, nothing, nothing)
    words = (np.arange(n_words, dtype=np.int32), word, nothing, nothing, nothing, nothing)
    out = np.zeros(1_000, np.uint8)
    write_ngrams(0, len(word), 2, prefixes, words, prob, np.zeros(0, np.float32), word_bytes, word_ends, out)
