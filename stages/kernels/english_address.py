# ruff: noqa: PLR1714 - in compiled code a chain of comparisons is faster than a set
"""Web addresses as spaCy knows them: words that match URL_PATTERN of `spacy/lang/tokenizer_exceptions.py` stay whole.

    (scheme://)? (user@)? (public IPv4 address | host.name.lower) (:port)? (/path | ?query | #part)?

Positions are addresses in memory (`memory.py`).
"""

from __future__ import annotations

from numba import int64

from gristmill.stages.kernels.english import AT_PAGE, AT_TABLE, IN_WORD, LOWER
from gristmill.stages.kernels.memory import flags_of, inner, peek8, point_at


@inner
def english_flags(english, point):  # type: ignore[no-untyped-def]
    """spaCy's classes of a code point."""
    return flags_of(english + AT_PAGE, english + AT_TABLE, point)


@inner
def is_digit(byte):  # type: ignore[no-untyped-def]
    return 48 <= byte <= 57


@inner
def _host_byte(byte):  # type: ignore[no-untyped-def]
    """Whether the byte can be in a label of a host name, apart from _ and -."""
    return is_digit(byte) or 97 <= (byte | 32) <= 122 or byte >= 128


@inner
def _address_ends(p, end):  # type: ignore[no-untyped-def]
    """Whether an optional port and path, `(:\\d{2,5})?([/?#].*)?`, reach from p to the end."""
    if p < end and peek8(p) == 58:
        n = 1
        while p + n < end and is_digit(peek8(p + n)):
            n += 1
        if n < 3 or n > 6:
            return False
        p += n
    if p == end:
        return True
    b = peek8(p)
    return b == 47 or b == 63 or b == 35


@inner
def _is_host(start, end, english):  # type: ignore[no-untyped-def]
    """Whether [start, end) is a host name with optional port and path: labels, then a lower-case last label."""
    p = start
    while p < end:
        if p > start:  # a last label of 2 to 63 lower-case letters
            q, letters = p, 0
            while q < end:
                point, n = point_at(q, end)
                if not english_flags(english, point) & LOWER:
                    break
                q += n
                letters += 1
            if 2 <= letters <= 63 and _address_ends(q, end):
                return True
        q, chars = p, 0
        while q < end:
            b = peek8(q)
            if not (_host_byte(b) or b == 95 or b == 45):
                break
            point, n = point_at(q, end)
            if point > 0xFFFF or 0x80 <= point < 0xA1:  # the expression knows U+00A1 to U+FFFF
                break
            q += n
            chars += 1
        if q >= end or peek8(q) != 46 or chars == 0 or chars > 64:
            return False
        if not _host_byte(peek8(p)) or not _host_byte(peek8(q - 1)):
            return False
        p = q + 1
    return False


@inner
def _is_ip(start, end):  # type: ignore[no-untyped-def]
    """Whether [start, end) is a public IPv4 address with optional port and path, by spaCy's expression."""
    p = start
    first = second = 0
    for i in range(4):
        if i:
            if p >= end or peek8(p) != 46:
                return False
            p += 1
        octet = n = 0
        while p + n < end and n < 3 and is_digit(peek8(p + n)):
            octet = octet * 10 + peek8(p + n) - 48
            n += 1
        if n == 0 or (peek8(p) == 48 and (n == 3 or i == 0 or i == 3)):
            return False
        if octet > 255 or (i == 0 and octet > 223) or (i == 3 and octet > 254):
            return False
        first = octet if i == 0 else first
        second = octet if i == 1 else second
        p += n
    if first == 10 or first == 127 or (first == 169 and second == 254):
        return False
    if (first == 192 and second == 168) or (first == 172 and 16 <= second <= 31):
        return False
    return _address_ends(p, end)


@inner
def is_address(start, end, english):  # type: ignore[no-untyped-def]
    """Whether spaCy's URL_PATTERN matches [start, end): scheme://user@host:port/path, all but the host optional.

    The host may begin at the front, behind a scheme, or behind any "@".
    """
    stops = False
    for p in range(start, end):
        if peek8(p) == 46:
            stops = True
            break
    if not stops:
        return False
    scheme = True  # what came so far may be a scheme
    p = start
    while p < end:
        b = peek8(p)
        host = int64(0)
        if p == start:
            host = p
        elif b == 64:
            host = p + 1
        elif b == 58 and scheme and p - start >= 2 and p + 2 < end and peek8(p + 1) == 47 and peek8(p + 2) == 47:
            host = p + 3
        if host and (_is_ip(host, end) or _is_host(host, end, english)):
            return True
        point, size = point_at(p, end)
        scheme = scheme and (point == 43 or point == 45 or point == 46 or english_flags(english, point) & IN_WORD != 0)
        p += size
    return False
