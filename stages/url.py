"""`url`: drops documents by where they come from.

    url:
      domains: [example.com]
      folders: [lists/adult, lists/malware]      # as the UT1 list has them: files `domains` and `urls` in each
      words: [casino]

    hosts       a document's host is exactly this one
    domains     the host is this one or below it: `example.com` lists `a.b.example.com`, not `notexample.com`
    urls        host and path, as lists write them: without scheme and "www.", "example.com/a"
    words       a run of letters and digits in host, path or query is this word
    soft_words  a document with more than `max_soft_words` different ones goes

Case does not matter, nor do port, user, and the dot at a host's end; hosts beyond ASCII are compared as punycode.
A list file has an entry a line; blank lines and those that begin with "#" are ignored; it may be gzip or zstd. Lists
are held as hashes, 8 bytes an entry.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar
from urllib.parse import urlsplit

import numpy as np
import pyarrow as pa

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
    version: ClassVar = 1
    needs: ClassVar = ("url",)
    adds: ClassVar[Mapping[str, pa.DataType]] = {"url.soft_words": pa.float64()}
    measures: ClassVar = (Measure("url.soft_words", "words", linear_edges(0, 10, 10)),)

    hosts: tuple[str, ...] = ()
    domains: tuple[str, ...] = ()
    urls: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    soft_words: tuple[str, ...] = ()
    host_files: tuple[str, ...] = ()
    domain_files: tuple[str, ...] = ()
    url_files: tuple[str, ...] = ()
    word_files: tuple[str, ...] = ()
    soft_word_files: tuple[str, ...] = ()
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
        named = (self.host_files, self.domain_files, self.url_files, self.word_files, self.soft_word_files)
        return [path for path in [*(path for paths in named for path in paths), *from_folders] if exists(path)]

    def __call__(self, batch: Batch) -> Result:
        url = _ascii_hosts(batch["url"].fill_null(""))
        ends, data = string_views(url)
        sets = [(one.hashes, one.starts) for one in _lists(self)]
        listed, soft_words = kernel.match_urls(data, ends, *sets)
        missing = np.diff(ends) == 0
        counted = with_columns(batch, {"url.soft_words": pa.array(soft_words.astype(np.float64))})
        fails = {
            "no_url": missing & self.require_url,
            "listed_host": listed[:, kernel.HOST_LISTED],
            "listed_domain": listed[:, kernel.DOMAIN_LISTED],
            "listed_url": listed[:, kernel.ADDRESS_LISTED],
            "listed_word": listed[:, kernel.WORD_LISTED],
        }
        fails.update({rule.reason: rule.fails(column(counted, rule.column)) for rule in self.rules()})
        return cut(counted, fails, {"without_url": int(missing.sum())})


_loaded: dict[Url, tuple[HashSet, ...]] = {}
_loading = threading.Lock()


def _lists(settings: Url) -> tuple[HashSet, ...]:
    """The five lists, loaded once in a process."""
    with _loading:
        if settings not in _loaded:
            _loaded.clear()  # one recipe, one set of lists; they may be large
            _loaded[settings] = _load(settings)
        return _loaded[settings]


def _load(settings: Url) -> tuple[HashSet, ...]:
    domain_files, url_files = list(settings.domain_files), list(settings.url_files)
    for folder in settings.folders:
        found = [name for name in ("domains", "urls") if exists(join(folder, name))]
        if not found:
            raise ListError(f"{folder}: a folder of lists has a file `domains` or `urls`; there is neither.")
        if "domains" in found:
            domain_files.append(join(folder, "domains"))
        if "urls" in found:
            url_files.append(join(folder, "urls"))
    return (
        _hash_set(settings.hosts, settings.host_files, kernel.HOSTS),
        _hash_set(settings.domains, domain_files, kernel.HOSTS),
        _hash_set(settings.urls, url_files, kernel.ADDRESSES),
        _hash_set(settings.words, settings.word_files, kernel.WORDS),
        _hash_set(settings.soft_words, settings.soft_word_files, kernel.WORDS),
    )


def _hash_set(entries: Iterable[str], files: Iterable[str], kind: int) -> HashSet:
    """Entries given in the recipe, and those of files, as one set. Raises ListError."""
    parts = [_hashes("\n".join(entries).encode(), kind)]
    for path in files:
        count = sum(len(part) for part in parts)
        parts.extend(_hashes(lines, kind) for lines in _whole_lines(path))
        if sum(len(part) for part in parts) == count:
            raise ListError(f"{path}: the list has no entry. Take it out of the recipe, or give it lines.")
    return HashSet.of(np.concatenate(parts))


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
    """URLs whose hosts have letters beyond ASCII get punycode for them."""
    ends, data = string_views(url)
    rows = np.flatnonzero(kernel.hosts_beyond_ascii(data, ends))
    if not len(rows):
        return url
    values = url.to_pylist()
    for row in rows:
        values[row] = _ascii_host(values[row].encode()).decode("utf-8", "replace")
    return pa.array(values, pa.string())


def _ascii_host(line: bytes) -> bytes:
    """A URL or host with its host in punycode (IDNA 2003, as Python has it); as it is where that cannot be."""
    text = line.decode("utf-8", "replace").strip()
    scheme, found, rest = text.partition("://")
    try:
        host = urlsplit(f"//{rest if found else text}").hostname
        if not host:
            return line
        ascii_host = host.encode("idna").decode("ascii")
    except ValueError:  # UnicodeError is one
        return line
    lowered = text.lower()
    at = lowered.find(host, len(scheme) + 3 if found else 0)
    if at < 0 or len(lowered) != len(text):
        return line
    return (text[:at] + ascii_host + text[at + len(host) :]).encode()
