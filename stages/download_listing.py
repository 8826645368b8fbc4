"""Which files a download wants: Common Crawl by crawl id, lists of addresses, datasets, buckets, globs.

    web: {download: {crawl: CC-MAIN-2024-10, kind: wet, files: 10, seed: 1}}
    hub: {download: {urls: "hf://datasets/allenai/c4/en/*.json.gz", share: 0.01}}
    own: {download: {url_list: addresses.txt}}        # an address a line; after a space sha256:HEX or md5:HEX

The sample is the files with the lowest hashes of (seed, name): it depends on nothing else, and a larger one holds the
smaller.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

import xxhash
from pydantic import Field, model_validator

from gristmill.stages.documents import Settings
from gristmill.stages.download import Policy, Tools, Wanted, wait_s
from gristmill.stages.download_http import DownloadError, Passing, ask
from gristmill.stages.shards import filesystem
from gristmill.stages.stores import MAGIC, explained, matching

COMMON_CRAWL = "https://data.commoncrawl.org/"  # terms and etiquette: https://commoncrawl.org/terms-of-use
MAX_LISTING = 1 << 28  # bytes of a list, decompressed; Common Crawl's have 100,000 lines of 140 bytes
_CHECKSUM = {"sha256": 64, "md5": 32}  # hex digits
_UNSAFE = re.compile(r"[^A-Za-z0-9._=,+-]+")


class Download(Settings):
    """What to fetch for a source, and how. Exactly one of `crawl`, `urls` and `url_list`."""

    crawl: str | None = Field(None, pattern=r"^CC-MAIN-\d{4}(-\d{2}(-\d{4}-\d{2})?)?$|^CC-NEWS-\d{4}-\d{2}$")
    kind: Literal["warc", "wet", "wat"] = "warc"  # of a crawl; no stage reads wat
    base_url: str = COMMON_CRAWL  # a mirror of a crawl: http(s)://, s3://commoncrawl/, a folder
    urls: str | list[str] | None = None  # http(s)://, hf://, s3://, gs://, local; globs where the store can list
    url_list: str | None = None  # a file or address with an address a line
    files: int | None = Field(None, ge=1)  # how many; all where neither this nor `share` is given
    share: float | None = Field(None, gt=0, le=1)  # of the files, rounded up
    seed: int = Field(0, ge=0)
    stream: bool = False  # read from the store at each run, without a local copy
    to: str | None = None  # folder; `download/<source>` in the run where not given
    policy: Policy = Policy.model_validate({})

    @model_validator(mode="after")
    def _check(self) -> Download:
        given = [name for name in ("crawl", "urls", "url_list") if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"exactly one of `crawl`, `urls` and `url_list` is needed; given: {given or 'none'}.")
        if self.files is not None and self.share is not None:
            raise ValueError("`files` and `share` are two ways to say how many: give one.")
        return self


def choose(settings: Download, tools: Tools | None = None) -> list[Wanted]:
    """Asks the listing -> the files wanted, sorted by name. Raises DownloadError when there are none, or none so
    called."""
    if settings.crawl is not None:
        found = _crawl(settings, tools)
    elif settings.url_list is not None:
        text = _read(settings.url_list, settings.policy, tools).decode("utf-8", "replace")
        found = [wanted for line in text.splitlines() for wanted in _line(line, settings.url_list)]
    else:
        patterns = [settings.urls] if isinstance(settings.urls, str) else settings.urls or []
        found = [wanted for pattern in patterns for wanted in _named(pattern)]
    found = list({wanted.url: wanted for wanted in found}.values())
    if not found:
        raise DownloadError(f"{settings.url_list or settings.urls}: no file to download. Mend the path or the list.")
    names: dict[str, str] = {}
    for wanted in found:
        if names.setdefault(wanted.name, wanted.url) != wanted.url:
            raise DownloadError(
                f"{wanted.url} and {names[wanted.name]} would both be called {wanted.name}. Put them into two sources."
            )
    return sample(found, settings.files, settings.share, settings.seed)


def sample(found: Sequence[Wanted], files: int | None, share: float | None, seed: int) -> list[Wanted]:
    """`files` of them, or a share rounded up: those with the lowest hashes of (seed, name); sorted by name."""
    count = len(found) if files is None else files
    if share is not None:
        count = math.ceil(share * len(found))
    ranked = sorted(found, key=lambda wanted: (xxhash.xxh3_128_intdigest(f"{seed}\0{wanted.name}"), wanted.name))
    return sorted(ranked[:count], key=lambda wanted: wanted.name)


def _crawl(settings: Download, tools: Tools | None) -> list[Wanted]:
    base = settings.base_url.rstrip("/")
    address = f"{base}/crawl-data/{settings.crawl}/{settings.kind}.paths.gz"
    try:
        lines = _read(address, settings.policy, tools).decode("ascii").split()
    except DownloadError as error:
        raise DownloadError(
            f"The list of the crawl {settings.crawl} cannot be read. {error} Crawls are named at "
            "https://index.commoncrawl.org/."
        ) from error
    except UnicodeDecodeError as error:
        raise DownloadError(f"{address} is not a list of paths: {error}. Look at `base_url`.") from error
    return [Wanted(f"{base}/{line}", _safe(line.removeprefix("crawl-data/"))) for line in lines]


def _read(address: str, policy: Policy, tools: Tools | None) -> bytes:
    """A small file, decompressed where it is gzip. Raises DownloadError."""
    tools = tools or Tools()
    for attempt in range(1, policy.attempts + 1):
        data = bytearray()
        try:
            with ask(address, 0, "", connections=policy.connections, timeout_s=policy.timeout_s) as answer:
                for block in answer.blocks:
                    data += block
                    if len(data) > MAX_LISTING:
                        raise DownloadError(f"{address} has more than {MAX_LISTING:,} bytes: that is no list.")
            if answer.total is not None and len(data) != answer.total:
                raise Passing(f"{len(data):,} of {answer.total:,} bytes came")
            return _unpacked(bytes(data), address)
        except Passing as error:
            if attempt == policy.attempts or (error.asked_s or 0) > policy.max_asked_s:
                raise DownloadError(f"{address}: given up after {attempt} attempts, the last: {error}.") from error
            tools.sleep(wait_s(attempt, error.asked_s, policy, tools.chance()))
    raise AssertionError("unreachable: the last attempt returns or raises")


def _unpacked(data: bytes, address: str) -> bytes:
    if not data.startswith(b"\x1f\x8b"):
        return data
    try:
        out = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise DownloadError(f"{address} is not a sound gzip file: {error}.") from error
    return out


def _line(line: str, where: str) -> Iterable[Wanted]:
    words = line.split()
    if not words or words[0].startswith("#"):
        return
    checksums = {}
    for word in words[1:]:
        kind, _, value = word.partition(":")
        if len(value) != _CHECKSUM.get(kind) or set(value.lower()) - set("0123456789abcdef"):
            raise DownloadError(
                f"{where}: {word!r} is no checksum: sha256:HEX or md5:HEX is expected after an address."
            )
        checksums[kind] = value.lower()
    yield Wanted(words[0], _name_of(words[0]), checksums=checksums)


def _named(pattern: str) -> Iterable[Wanted]:
    """The files of an address, a folder or a glob."""
    scheme = pattern.split("://", 1)[0] if "://" in pattern else ""
    if scheme in ("http", "https"):
        if any(char in urlsplit(pattern).path for char in "*["):
            raise DownloadError(f"{pattern}: a web server cannot list what matches. Name the files in a `url_list`.")
        yield Wanted(pattern, _name_of(pattern))
        return
    try:
        with explained(pattern, "listed"):
            found = matching(pattern)
            fs = filesystem(pattern)[0]
            infos = {path: fs.info(fs._strip_protocol(path)) for path in found}
    except (OSError, ValueError) as error:
        raise DownloadError(str(error)) from error
    if not found:
        there = "matches" if any(char in pattern for char in MAGIC) else "is at"
        raise DownloadError(f"No file {there} {pattern}. Mend the path.")
    for path, name in found.items():
        yield Wanted(path, _safe(name), int(infos[path]["size"]), _stated(infos[path]))


def _stated(info: dict[str, Any]) -> dict[str, str]:
    """The hub knows the sha256 of large files."""
    lfs = info.get("lfs")
    digest = lfs.get("sha256") if isinstance(lfs, dict) else getattr(lfs, "sha256", None)
    return {"sha256": str(digest)} if digest else {}


def _name_of(address: str) -> str:
    """A file name for an address: host and path, and a hash of a query, so that two addresses have two names."""
    parts = urlsplit(address)
    name = _safe(f"{parts.netloc}/{unquote(parts.path)}")
    if not parts.query:
        return name
    folder, _, last = name.rpartition("/")
    return f"{folder}/{xxhash.xxh3_64_hexdigest(parts.query)}-{last}"


def _safe(name: str) -> str:
    """A path below a folder, whatever the listing says: no `..`, nothing hidden, no odd characters."""
    parts = [_UNSAFE.sub("_", part).lstrip(".") for part in name.split("/")]
    return "/".join(part for part in parts if part) or "file"
