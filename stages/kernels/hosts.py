"""URLs against lists of hosts, domains and addresses: 64-bit hashes, no strings.

A list is a sorted array of hashes, 8 bytes an entry, whatever the length of the entries; a list file is hashed while
it is read. Two different strings with one hash are expected once in 10^12 look-ups of a list of 10 million.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numba import njit, uint64

from gristmill.stages.kernels.buffers import load8, mix64

_SEED = uint64(0x9E3779B97F4A7C15)
_BUCKET_BITS = 16


@dataclass(frozen=True)
class HashSet:
    """Sorted hashes, and where those of each leading 16 bits begin: a look-up touches two cache lines or so."""

    hashes: np.ndarray  # (n,) uint64, ascending, each once
    starts: np.ndarray  # (65537,) int64

    @classmethod
    def of(cls, hashes: np.ndarray) -> HashSet:
        ordered = np.sort(hashes)  # np.unique makes a hash table of integers: four times the memory, 20 times as long
        ordered = ordered[np.append(True, ordered[1:] != ordered[:-1])[: len(ordered)]]
        edges = np.arange((1 << _BUCKET_BITS) + 1, dtype=np.uint64) << np.uint64(64 - _BUCKET_BITS)
        starts = np.searchsorted(ordered, edges[:-1]).astype(np.int64)
        return cls(ordered, np.append(starts, len(ordered)))

    def __len__(self) -> int:
        return len(self.hashes)


@njit(nogil=True, cache=True)
def _lower(byte):  # type: ignore[no-untyped-def]
    return byte + np.uint8(32) if 65 <= byte <= 90 else byte


@njit(nogil=True, cache=True)
def hash_span(data, start, stop):  # type: ignore[no-untyped-def]
    """Hash of bytes start:stop, ASCII letters lowered."""
    h = _SEED
    for p in range(start, stop):
        h = (h ^ uint64(_lower(load8(data, p)))) * uint64(0x100000001B3)  # FNV-1a, finished by mix64
    return mix64(h ^ (uint64(stop - start) << uint64(48)))


@njit(nogil=True, cache=True)
def _contains(hashes, starts, h):  # type: ignore[no-untyped-def]
    bucket = h >> uint64(64 - _BUCKET_BITS)
    low, high = starts[bucket], starts[bucket + uint64(1)]
    while low < high:
        middle = (low + high) >> 1
        if hashes[middle] < h:
            low = middle + 1
        else:
            high = middle
    return low < starts[bucket + uint64(1)] and hashes[low] == h


@njit(nogil=True, cache=True)
def split_url(data, start, stop):  # type: ignore[no-untyped-def]
    """A URL's parts -> (first byte of the host, byte after it, first byte of the path, byte after the query).

    Without scheme, user, port, the host's last dots, fragment, and white space around. A URL without "//" begins with
    its host. A port need not be a number, and "\\" ends a host as "/" does: so browsers read URLs (WHATWG, 4.4).
    """
    while start < stop and load8(data, start) <= 32:
        start += 1
    while stop > start and load8(data, stop - 1) <= 32:
        stop -= 1
    p = start
    while p + 2 < stop and not (load8(data, p) == 58 and load8(data, p + 1) == 47 and load8(data, p + 2) == 47):
        byte = load8(data, p)
        if not (97 <= _lower(byte) <= 122 or 48 <= byte <= 57 or byte == 43 or byte == 45 or byte == 46):  # noqa: PLR1714
            p = stop  # no scheme: a path, port or user came first
            break
        p += 1
    host = p + 3 if p + 2 < stop else start
    if host == start and start + 1 < stop and load8(data, start) == 47 and load8(data, start + 1) == 47:
        host = start + 2
    path = host
    while path < stop and load8(data, path) not in (47, 63, 35, 92):  # "/", "?", "#", "\\"
        if load8(data, path) == 64:  # "@": what stood before is a user
            host = path + 1
        path += 1
    closing = 93 if host < path and load8(data, host) == 91 else 58  # "[" to "]", else up to ":"
    host_stop = host
    while host_stop < path and load8(data, host_stop) != closing:
        host_stop += 1
    if closing == 93 and host_stop < path:
        host_stop += 1
    while host < host_stop and load8(data, host) <= 32:
        host += 1
    while host_stop > host and (load8(data, host_stop - 1) == 46 or load8(data, host_stop - 1) <= 32):
        host_stop -= 1
    end = path
    while end < stop and load8(data, end) != 35:
        end += 1
    return host, host_stop, path, end


@njit(nogil=True, cache=True)
def _without_www(data, host, host_stop):  # type: ignore[no-untyped-def]
    if host_stop - host > 4 and load8(data, host + 3) == 46:
        w = (load8(data, host) | 32) == 119 and (load8(data, host + 1) | 32) == 119
        if w and (load8(data, host + 2) | 32) == 119:
            return host + 4
    return host


@njit(nogil=True, cache=True)
def _hash_address(data, start, stop):  # type: ignore[no-untyped-def]
    """Hash of a page's address as lists write it: host without "www.", path and query without the last "/"."""
    host, host_stop, path, end = split_url(data, start, stop)
    if end > path and load8(data, end - 1) == 47:
        end -= 1
    return hash_span(data, _without_www(data, host, host_stop), host_stop) ^ (
        hash_span(data, path, end) * uint64(0x9E3779B97F4A7C15)
    )


HOSTS, ADDRESSES, WORDS = 0, 1, 2  # what the lines of a list are


@njit(nogil=True, cache=True)
def hash_lines(data, start, stop, kind):  # type: ignore[no-untyped-def]
    """Lines of a list in bytes start:stop -> (entries,) uint64. White space around, blank lines and "#" lines go."""
    hashes = np.empty(16 + (stop - start) // 4, np.uint64)
    count = 0
    p = start
    while p < stop:
        end = p
        while end < stop and load8(data, end) != 10:
            end += 1
        first, last = p, end
        p = end + 1
        while first < last and load8(data, first) <= 32:
            first += 1
        while last > first and load8(data, last - 1) <= 32:
            last -= 1
        if first == last or load8(data, first) == 35:  # "#"
            continue
        if kind == HOSTS:
            while first < last and (load8(data, first) == 42 or load8(data, first) == 46):  # "*.example.com"
                first += 1
            host, host_stop, _, _ = split_url(data, first, last)
            if host == host_stop:
                continue
            value = hash_span(data, host, host_stop)
        elif kind == ADDRESSES:
            value = _hash_address(data, first, last)
        else:
            value = hash_span(data, first, last)
        if count == len(hashes):
            grown = np.empty(2 * count, np.uint64)
            grown[:count] = hashes
            hashes = grown
        hashes[count] = value
        count += 1
    return hashes[:count].copy()  # a view would hold the whole buffer


HOST_LISTED, DOMAIN_LISTED, ADDRESS_LISTED, WORD_LISTED = 0, 1, 2, 3


@njit(nogil=True, cache=True)
def _is_word(byte):  # type: ignore[no-untyped-def]
    return 97 <= _lower(byte) <= 122 or 48 <= byte <= 57 or byte >= 128


@njit(nogil=True, cache=True)
def _match_word(data, first, stop, words, soft, seen, count):  # type: ignore[no-untyped-def]
    """Whether the word is listed, and how many different soft words there are with it; `seen` has those before."""
    if first == stop:
        return False, count
    value = hash_span(data, first, stop)
    if count < len(seen) and _contains(soft[0], soft[1], value):
        for i in range(count):
            if seen[i] == value:
                break
        else:
            seen[count] = value
            count += 1
    return _contains(words[0], words[1], value), count


@njit(nogil=True, cache=True)
def match_urls(data, ends, hosts, domains, addresses, words, soft):  # type: ignore[no-untyped-def]
    """hosts, ...: (hashes, starts) of a HashSet each -> (listed (n, 4) bool, distinct soft words (n,) int64).

    A domain is listed when the host or a parent domain of it with at least one dot is. Words are the runs of letters
    and digits of the whole URL, its scheme too.
    """
    listed = np.zeros((len(ends) - 1, 4), np.bool_)
    soft_words = np.zeros(len(ends) - 1, np.int64)
    seen = np.empty(64, np.uint64)
    for row in range(len(ends) - 1):
        if ends[row] == ends[row + 1]:
            continue
        end = ends[row + 1]
        host, host_stop, _, _ = split_url(data, ends[row], end)
        whole = hash_span(data, host, host_stop)
        if host < host_stop:
            listed[row, HOST_LISTED] = _contains(hosts[0], hosts[1], whole)
        if host < host_stop and len(domains[0]):
            found = _contains(domains[0], domains[1], whole)
            dot = host_stop - 1  # the last dot of the host: what is behind it is never looked up
            while dot > host and load8(data, dot) != 46:
                dot -= 1
            p = host
            while p < dot and not found:
                if load8(data, p) == 46:
                    found = _contains(domains[0], domains[1], hash_span(data, p + 1, host_stop))
                p += 1
            listed[row, DOMAIN_LISTED] = found
        if len(addresses[0]):
            listed[row, ADDRESS_LISTED] = _contains(
                addresses[0], addresses[1], _hash_address(data, ends[row], ends[row + 1])
            )
        if len(words[0]) or len(soft[0]):
            count = 0
            p = ends[row]
            while p < end:
                if not _is_word(load8(data, p)):
                    p += 1
                    continue
                first, mixed = p, False
                while p < end and _is_word(load8(data, p)):
                    mixed |= load8(data, p) >= 128
                    p += 1
                hard, count = _match_word(data, first, p, words, soft, seen, count)
                listed[row, WORD_LISTED] |= hard
                part = first if mixed else p
                while part < p:  # the words of ASCII in a word of other letters too, as datatrove takes them
                    first = part
                    while part < p and load8(data, part) < 128:
                        part += 1
                    hard, count = _match_word(data, first, part, words, soft, seen, count)
                    listed[row, WORD_LISTED] |= hard
                    part += 1
            soft_words[row] = count
    return listed, soft_words


@njit(nogil=True, cache=True)
def letters(data, ends, ascii_only):  # type: ignore[no-untyped-def]
    """The letters and digits of each row, those of ASCII lowered -> (bytes (m,) uint8, offsets (n + 1,) int32).

    Bytes over 127 count as letters, unless `ascii_only`.
    """
    out = np.empty(ends[-1] - ends[0] + 1, np.uint8)
    offsets = np.zeros(len(ends), np.int32)
    q = 0
    for row in range(len(ends) - 1):
        for p in range(ends[row], ends[row + 1]):
            byte = load8(data, p)
            if _is_word(byte) and (byte < 128 or not ascii_only):
                out[q] = _lower(byte)
                q += 1
        offsets[row + 1] = q
    return out[:q], offsets


@njit(nogil=True, cache=True)
def hosts_beyond_ascii(data, ends):  # type: ignore[no-untyped-def]
    """Rows whose host has a byte over 127 -> (n,) bool."""
    beyond = np.zeros(len(ends) - 1, np.bool_)
    for row in range(len(ends) - 1):
        host, host_stop, _, _ = split_url(data, ends[row], ends[row + 1])
        for p in range(host, host_stop):
            beyond[row] |= load8(data, p) >= 128
    return beyond


def warm() -> None:
    """Compiles every kernel of this module for the types that the stage uses."""
    data, ends = np.frombuffer(b"http://a.b/c", np.uint8), np.array([0, 12])
    empty = HashSet.of(hash_lines(data, 0, 12, HOSTS))
    match_urls(data, ends, *[(empty.hashes, empty.starts)] * 5)
    hosts_beyond_ascii(data, ends)
    letters(data, ends, False)
