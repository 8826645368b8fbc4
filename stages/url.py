"""`url`: drops documents by where they come from.

    url:
      domains: [example.com]
      folders: [lists/adult, lists/malware]      # as the UT1 list has them: files `domains` and `urls` in each
      words: [casino]

    hosts       a document's host is exactly this one
    domains     the host is this one or below it: `example.com` lists `a.b.example.com`, not `notexample.com`
    urls        host and path, as lists write them: without scheme and "www.", "example.com/a"
    words       a run of letters and digits of the URL is this word
    soft_words  a document with more than `max_soft_words` different ones goes
    subwords    the URL has this word inside, when all but letters and digits is taken out of both
    a missing URL is a rule of its own, `require_url`

Case does not matter, nor do port, user, and the dot at a host's end; hosts beyond ASCII are compared as punycode.

What datatrove's URLFilter drops by the same lists goes here too, by the rule of the same name ("\\" in a host apart,
which ends it here, as in browsers). It keeps more, since it
    - compares words and hosts with their case, and a URL with the lists' as it stands, scheme and all
    - knows registered domains and whole hosts only: no parent between them, no public suffix, no IP address
    - takes letters beyond ASCII for separators, and for nothing in lists
The lists that it carries (UT1's, and FineWeb's words) are good for `folders`, `word_files` and so on.

A list file has an entry a line; blank lines and those that begin with "#" are ignored; it may be gzip or zstd. Lists
are held as hashes, 8 bytes an entry.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.stages.documents import Batch, Measure, Result, Rule, Settings, column, cut, linear_edges, with_columns
from gristmill.stages.kernels import hosts as kernel
from gristmill.stages.kernels.buffers import string_views
from gristmill.stages.kernels.hosts import HashSet
from gristmill.stages.readers_common import DamagedStream, blocks
from gristmill.stages.shards import exists, filesystem, join


class ListError(ValueError):
    """A list of hosts, URLs or words cannot be read."""


class Url(Settings):
    """Drops documents whose URL is listed. A document without a URL is kept unless `require_url`."""

    name: ClassVar = "url"
    version: ClassVar = 2
    needs: ClassVar = ("url",)
    adds: ClassVar[Mapping[str, pa.DataType]] = {"url.soft_words": pa.float64()}
    measures: ClassVar = (Measure("url.soft_words", "words", linear_edges(0, 10, 10)),)

    hosts: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    soft_words: tuple[str, ...] = ()
    subwords: tuple[str, ...] = ()
    host_files: tuple[str, ...] = ()
    domain_files: tuple[str, ...] = ()
    url_files: tuple[str, ...] = ()
    word_files: tuple[str, ...] = ()
    soft_word_files: tuple[str, ...] = ()
    subword_files: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    max_soft_words: int = 1  # datatrove's URLFilter drops from 2 on
    require_url: bool = False

    def rules(self) -> tuple[Rule, ...]:
        return (
            Rule(
                "too_many_soft_words",
                "url.soft_words",
                at_most=self.max_soft_words,
                published="datatrove URLFilter, soft_word_threshold=2",
            ),
        )

    def files(self) -> list[str]:
        """The list files that the stage reads; those that are missing are found out when they are loaded."""
        from_folders = [join(folder, name) for folder in self.folders for name in ("domains", "urls")]
        words = (self.word_files, self.soft_word_files, self.subword_files)
        named = (self.host_files, self.domain_files, self.url_files, *words)
        return [path for path in [*(path for paths in named for path in paths), *from_folders] if exists(path)]

    def __call__(self, batch: Batch) -> Result:
        url, lists = batch["url"].fill_null(""), _lists(self)
        sets = [(one.hashes, one.starts) for one in lists.sets]
        listed, soft_words = kernel.match_urls(*string_views(url)[::-1], *sets)
        foreign = pa.array(kernel.hosts_beyond_ascii(*string_views(url)[::-1]))
        if pc.any(foreign).as_py():  # their hosts in punycode; their words are looked for as they were written, too
            rows = foreign.to_numpy(zero_copy_only=False)
            in_ascii, soft_in_ascii = kernel.match_urls(*string_views(_ascii_hosts(url.filter(foreign)))[::-1], *sets)
            listed[rows] |= in_ascii
            soft_words[rows] = np.maximum(soft_words[rows], soft_in_ascii)
        missing = (pc.binary_length(url).to_numpy(zero_copy_only=False)) == 0
        counted = with_columns(batch, {"url.soft_words": pa.array(soft_words.astype(np.float64))})
        fails = {
            "no_url": missing & self.require_url,
            "listed_host": listed[:, kernel.HOST_LISTED],
            "listed_domain": listed[:, kernel.DOMAIN_LISTED],
            "listed_url": listed[:, kernel.ADDRESS_LISTED],
            "listed_word": listed[:, kernel.WORD_LISTED],
            "listed_subword": _holds(url, lists.subwords),
        }
        fails.update({rule.reason: rule.fails(column(counted, rule.column)) for rule in self.rules()})
        return cut(counted, fails, {"without_url": int(missing.sum())})


@dataclass(frozen=True)
class _Lists:
    sets: tuple[HashSet, ...]  # hosts, domains, urls, words, soft words
    subwords: tuple[str, ...]  # patterns of RE2, each for some of them


_loaded: dict[Url, _Lists] = {}
_loading = threading.Lock()


def _lists(settings: Url) -> _Lists:
    """The lists, loaded once in a process."""
    with _loading:
        if settings not in _loaded:
            _loaded.clear()  # one recipe, one set of lists; they may be large
            _loaded[settings] = _load(settings)
        return _loaded[settings]


def _load(settings: Url) -> _Lists:
    domain_files, url_files = list(settings.domain_files), list(settings.url_files)
    for folder in settings.folders:
        found = [name for name in ("domains", "urls") if exists(join(folder, name))]
        if not found:
            raise ListError(f"{folder}: a folder of lists has a file `domains` or `urls`; there is neither.")
        if "domains" in found:
            domain_files.append(join(folder, "domains"))
        if "urls" in found:
            url_files.append(join(folder, "urls"))
    sets = (
        _hash_set(settings.hosts, settings.host_files, kernel.HOSTS),
        _hash_set(settings.domains, domain_files, kernel.HOSTS),
        _hash_set(settings.urls, url_files, kernel.ADDRESSES),
        _hash_set(settings.words, settings.word_files, kernel.WORDS),
        _hash_set(settings.soft_words, settings.soft_word_files, kernel.WORDS),
    )
    return _Lists(sets, _subwords(settings.subwords, settings.subword_files))


def _hash_set(entries: Iterable[str], files: Iterable[str], kind: int) -> HashSet:
    """Entries given in the recipe, and those of files, as one set. Raises ListError."""
    parts = [_hashes("\n".join(entries).encode(), kind)]
    for path in files:
        count = sum(len(part) for part in parts)
        parts.extend(_hashes(lines, kind) for lines in _whole_lines(path))
        if sum(len(part) for part in parts) == count:
            raise ListError(f"{path}: the list has no entry. Take it out of the recipe, or give it lines.")
    return HashSet.of(np.concatenate(parts))


_SUBWORDS_PER_PATTERN = 500  # RE2 has a limit for the size of one


def _subwords(entries: Iterable[str], files: Iterable[str]) -> tuple[str, ...]:
    """Patterns that find any of the entries in a URL without separators. Raises ListError."""
    words = _letters(pa.array(entries, pa.string())).to_pylist()
    for path in files:
        lines = [line.strip() for part in _whole_lines(path) for line in part.decode("utf-8", "replace").split("\n")]
        found = _letters(pa.array([line for line in lines if not line.startswith("#")], pa.string())).to_pylist()
        if not any(found):
            raise ListError(f"{path}: the list has no entry. Take it out of the recipe, or give it lines.")
        words += found
    ordered = sorted({*words} - {""})
    pieces = [ordered[i : i + _SUBWORDS_PER_PATTERN] for i in range(0, len(ordered), _SUBWORDS_PER_PATTERN)]
    return tuple("|".join(map(re.escape, piece)) for piece in pieces)


def _letters(text: pa.Array, ascii_only: bool = False) -> pa.Array:
    """(n,) strings -> (n,) strings, their letters and digits in lower case."""
    out, offsets = kernel.letters(*string_views(text)[::-1], ascii_only)
    found = pa.StringArray.from_buffers(len(text), pa.py_buffer(offsets), pa.py_buffer(out))
    return found if ascii_only else pc.utf8_lower(found)


def _holds(url: pa.Array, patterns: Sequence[str]) -> np.ndarray:
    """Whether any pattern is in a URL's letters and digits, or in those of ASCII alone -> (n,) bool."""
    found = np.zeros(len(url), bool)
    if not patterns:
        return found
    beyond = np.flatnonzero(pc.invert(pc.string_is_ascii(url)).to_numpy(zero_copy_only=False))
    for rows, ascii_only in ((np.arange(len(url)), False), (beyond, True)):
        inside = _letters(url.take(pa.array(rows)), ascii_only)
        for pattern in patterns:
            found[rows] |= pc.match_substring_regex(inside, pattern).to_numpy(zero_copy_only=False)
    return found


def _whole_lines(path: str) -> Iterator[bytes]:
    """A file's bytes in pieces that end at the end of a line."""
    fs, inner = filesystem(path)
    try:
        with fs.open(inner, "rb") as file:
            rest = b""
            for block in blocks(file):
                lines, newline, rest_of_block = block.rpartition(b"\n")
                if newline:
                    yield rest + lines
                    rest = rest_of_block
                else:
                    rest += block
            yield rest
    except (OSError, DamagedStream) as error:
        raise ListError(f"{path}: the list cannot be read ({error}).") from error


def _hashes(lines: bytes, kind: int) -> np.ndarray:
    """Lines -> (entries,) uint64."""
    if kind != kernel.WORDS and not lines.isascii():
        lines = b"\n".join(line if line.isascii() else _ascii_host(line) for line in lines.split(b"\n"))
    data = np.frombuffer(lines or b"\n", np.uint8)
    found: np.ndarray = kernel.hash_lines(data, 0, len(data), kind)
    return found


def _ascii_hosts(url: pa.Array) -> pa.Array:
    """URLs with their hosts in punycode."""
    return pa.array([_ascii_host(value.encode()).decode("utf-8", "replace") for value in url.to_pylist()], pa.string())


_DOTS = re.compile("[.\u3002\uff0e\uff61]")  # all that separate the labels of a host (RFC 3490, 3.1)


def _ascii_host(line: bytes) -> bytes:
    """A URL or host with its host in punycode (IDNA 2003, as Python has it); a label that cannot be stays as it is."""
    host, host_stop, _, _ = kernel.split_url(np.frombuffer(line, np.uint8), 0, len(line))
    labels = _DOTS.split(line[host:host_stop].decode("utf-8", "replace"))
    return line[:host] + ".".join(map(_ascii_label, labels)).encode() + line[host_stop:]


def _ascii_label(label: str) -> str:
    try:
        return label if label.isascii() else label.encode("idna").decode("ascii")
    except UnicodeError:
        return label
