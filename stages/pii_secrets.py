"""Secrets in a text, by the shapes that their issuers gave them: what `pii` replaces with `secrets: true`.

The shapes are those of gitleaks (config/gitleaks.toml, as of 2026) and of the plugins of detect-secrets 1.5, which
BigCode ran on The Stack (Li et al. 2023, "StarCoder", section 4). Only shapes that carry a mark of their own are taken:
passwords and random strings, which those tools judge by entropy and by the name of a variable, stay.

    aws_keys        access key ids: AKIA, ASIA, ABIA, ACCA or A3T., then base 32. Those that end in EXAMPLE stay: they
                    are of Amazon's documentation
    github_tokens   ghp_, gho_, ghu_, ghs_, ghr_ and 36 letters and digits or more; github_pat_ and 82 or more
    slack_tokens    xoxb- and its kin; addresses of webhooks
    google_keys     AIza and 35 characters
    openai_keys     sk-, with the mark T3BlbkFJ ("OpenAI" in base 64) inside
    stripe_keys     sk_live_ and rk_live_; test keys stay
    jwts            JSON Web Tokens whose header and claims decode to JSON objects (RFC 7519)
    private_keys    whole blocks of PEM (RFC 7468), OpenSSH, SSH2 and PGP, from BEGIN to END; where the end is cut off,
                    the lines of key that follow. A block without 40 characters of key in a row, "...", stays

All are ASCII, so they are found on UTF-8 bytes. One pass of RE2 says which documents have a mark; only those are
looked at in Python, in time that grows with the text and not faster.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterable, Iterator

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

KINDS = (
    "aws_keys",
    "github_tokens",
    "slack_tokens",
    "google_keys",
    "openai_keys",
    "stripe_keys",
    "jwts",
    "private_keys",
)

# What a document must have to be looked at: a superset of the shapes below, short enough to keep RE2's automaton small.
_MARKS = (
    r"(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)[A-Z2-7]{4}|gh[opsur]_[A-Za-z0-9]{4}|github_pat_|xox[abeoprs]-[0-9]"
    r"|hooks\.slack\.com/|AIza[\w-]{4}|T3BlbkFJ|[rs]k_live_|eyJ[\w-]{4}|BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY"
)

# A shape begins where a run of its characters begins, so that each run is tried once and not at each of its bytes.
_SHAPES = re.compile(
    rb"(?<![A-Za-z0-9_])(?P<aws_keys>(?:A3T[A-Z0-9]|AKIA|ASIA|ABIA|ACCA)(?![A-Z2-7]{9}EXAMPLE)[A-Z2-7]{16})(?![A-Za-z0-9_])"
    rb"|(?<![A-Za-z0-9_])(?P<github_tokens>gh[opsur]_[A-Za-z0-9]{36,251}|github_pat_[A-Za-z0-9_]{82,244})(?![A-Za-z0-9_])"
    rb"|(?<![A-Za-z0-9_-])(?P<slack_tokens>xox[abeoprs]-(?:[0-9]+-)+[A-Za-z0-9]{8,}"
    rb"|https://hooks\.slack\.com/(?:services|workflows|triggers)/[A-Za-z0-9+/]{43,56})"
    rb"|(?<![A-Za-z0-9_-])(?P<google_keys>AIza[A-Za-z0-9_-]{35})(?![A-Za-z0-9_-])"
    rb"|(?<![A-Za-z0-9_-])(?P<openai_keys>sk-[A-Za-z0-9_-]{20,180}?T3BlbkFJ[A-Za-z0-9_-]{20,180})"
    rb"|(?<![A-Za-z0-9_])(?P<stripe_keys>[rs]k_live_[A-Za-z0-9]{24,247})(?![A-Za-z0-9_])"
    rb"|(?<![A-Za-z0-9_-])(?P<jwts>eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*)"
)
_EDGE = re.compile(rb"-{4,5} ?(BEGIN|END) [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)? ?-{4,5}")
_KEY_LINE = re.compile(rb"[A-Za-z0-9+/=]{40}")
_KEY_LINES = re.compile(rb"(?:\s*[A-Za-z0-9+/=]{40,})+")


def find_secrets(text: pa.Array, data: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """text: string (n,); data, ends: its `string_views` -> (found, 4) int64: document, first byte, byte after, index
    in KINDS; in text order, without overlap."""
    marked = pc.fill_null(pc.match_substring_regex(text, _MARKS), False)
    found = []
    for row in np.flatnonzero(marked.to_numpy(zero_copy_only=False)).tolist():
        start = int(ends[row])
        document = data[start : ends[row + 1]].tobytes()
        blocks = _rows(row, start, _private_keys(document))
        found.append(added(blocks, _rows(row, start, _tokens(document))))
    return np.concatenate(found) if found else _rows(0, 0, ())


def added(spans: np.ndarray, others: np.ndarray) -> np.ndarray:
    """(n, 4) and (m, 4), each in order and apart -> both in order, of `others` those that overlap none."""
    at = np.searchsorted(spans[:, 2], others[:, 1], side="right")  # the first that ends behind the other's beginning
    starts = np.append(spans[:, 1], np.iinfo(np.int64).max)
    both = np.concatenate([spans, others[starts[at] >= others[:, 2]]])
    return both[np.argsort(both[:, 1], kind="stable")]


def _rows(row: int, start: int, spans: Iterable[tuple[int, int, int]]) -> np.ndarray:
    return np.array([(row, start + low, start + high, kind) for low, high, kind in spans], np.int64).reshape(-1, 4)


def _tokens(document: bytes) -> Iterator[tuple[int, int, int]]:
    for match in _SHAPES.finditer(document):
        kind = match.lastgroup or ""
        if kind != "jwts" or _is_jwt(match[0]):
            yield match.start(), match.end(), KINDS.index(kind)


def _is_jwt(token: bytes) -> bool:
    """Whether header and claims are JSON objects, as detect-secrets asks too."""
    try:
        parts = [
            orjson.loads(base64.urlsafe_b64decode(part + b"=" * (-len(part) % 4))) for part in token.split(b".")[:2]
        ]
    except (binascii.Error, orjson.JSONDecodeError):
        return False
    return all(isinstance(part, dict) for part in parts)


def _private_keys(document: bytes) -> Iterator[tuple[int, int, int]]:
    kind = KINDS.index("private_keys")
    edges = list(_EDGE.finditer(document))
    for i, edge in enumerate(edges):
        if edge[1] != b"BEGIN":
            continue
        after = edges[i + 1] if i + 1 < len(edges) else None
        if after is not None and after[1] == b"END":
            if _KEY_LINE.search(document, edge.end(), after.start()):
                yield edge.start(), after.end(), kind
        elif lines := _KEY_LINES.match(document, edge.end()):
            yield edge.start(), lines.end(), kind
