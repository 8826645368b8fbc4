"""How a download asks: one open answer, from a byte on, over HTTP or from a store through fsspec.

What another attempt may mend is `Passing`, with the wait that the server asked for; everything else is DownloadError.
`hf://` is the Hugging Face hub: its own package lists and resolves names, the bytes come over HTTP like others.
"""

from __future__ import annotations

import email.utils
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any
from urllib.parse import urlsplit

import httpx

from gristmill.stages.shards import ShardError, filesystem
from gristmill.stages.stores import RETRIED, explained, passing, stamp_of

USER_AGENT = "gristmill/0.1 (corpus builder; polite: few connections, backs off)"
_BLOCK = 4 << 20
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)$")


class DownloadError(ShardError):
    """A download that another attempt would not mend, or that was given up; the message says which and why."""


class Passing(Exception):
    """An attempt failed in a way that another may not."""

    def __init__(self, why: str, asked_s: float | None = None, *, anew: bool = False) -> None:
        super().__init__(why)
        self.asked_s = asked_s  # the server's Retry-After
        self.anew = anew  # what was received so far is of no use


@dataclass
class Answer:
    """A body on its way."""

    start: int  # the byte of the file that it begins with
    total: int | None  # bytes of the whole file, where the server says
    etag: str  # strong etag or modification time; empty where there is neither
    blocks: Iterator[bytes]
    checksums: dict[str, str] = field(default_factory=dict)  # kind -> hex digest of the whole file, as the server says


class Gate:
    """Hosts that asked to be left alone: nobody of this process asks them before the time is over."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}
        self._lock = Lock()

    def hold(self, host: str, until: float) -> None:
        with self._lock:
            self._until[host] = max(until, self._until.get(host, 0.0))

    def left(self, host: str, now: float) -> float:
        """Seconds until the host may be asked again."""
        with self._lock:
            return max(0.0, self._until.get(host, 0.0) - now)


GATE = Gate()


_CLIENTS: dict[tuple[int, float], httpx.Client] = {}
_MAKING = Lock()


def client(connections: int, timeout_s: float) -> httpx.Client:
    """One client a process: connections are kept and used again, and there are never more of them."""
    with _MAKING:
        if (connections, timeout_s) not in _CLIENTS:
            _CLIENTS[connections, timeout_s] = _client(connections, timeout_s)
        return _CLIENTS[connections, timeout_s]


def close_clients() -> None:
    """Closes the connections that are kept; the next request opens new ones."""
    with _MAKING:
        while _CLIENTS:
            _CLIENTS.popitem()[1].close()


def _client(connections: int, timeout_s: float) -> httpx.Client:
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    timeout = httpx.Timeout(timeout_s, pool=None)
    return httpx.Client(limits=limits, timeout=timeout, headers=headers, follow_redirects=True)


def host_of(url: str) -> str:
    return urlsplit(url).netloc


def retry_after(value: str | None, now: float) -> float | None:
    """Retry-After, seconds or a date (RFC 9110, section 10.2.3) -> seconds from now; None for none or nonsense."""
    if not value:
        return None
    if value.strip().isdigit():
        return float(value.strip())
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - now)
    except (TypeError, ValueError):
        return None


@contextmanager
def ask(url: str, offset: int, etag: str, *, connections: int, timeout_s: float) -> Iterator[Answer]:
    """Opens a file from `offset` on, if it still has the `etag`. Raises Passing and DownloadError, also while read."""
    scheme = url.split("://", 1)[0]
    if scheme in ("http", "https"):
        with _http(url, offset, etag, client(connections, timeout_s), {}) as answer:
            yield answer
    elif scheme == "hf":
        address, headers = _hub(url)
        with _http(address, offset, etag, client(connections, timeout_s), headers) as answer:
            yield answer
    else:
        with _store(url, offset) as answer:
            yield answer


def _hub(url: str) -> tuple[str, dict[str, str]]:
    from huggingface_hub.utils._headers import build_hf_headers

    try:
        with explained(url, "read"):
            fs, inner = filesystem(url)
            headers = build_hf_headers(token=fs.token, user_agent=USER_AGENT)
            return str(fs.url(inner)), {k: v for k, v in headers.items() if k.lower() != "user-agent"}
    except ShardError as error:
        raise DownloadError(str(error)) from error


@contextmanager
def _http(url: str, offset: int, etag: str, using: httpx.Client, headers: Mapping[str, str]) -> Iterator[Answer]:
    sent = dict(headers)
    if offset:
        sent["Range"] = f"bytes={offset}-"
        if etag:
            sent["If-Range"] = etag
    try:
        with using.stream("GET", url, headers=sent) as response:
            yield _answer(response, url, offset)
    except (httpx.UnsupportedProtocol, httpx.InvalidURL, httpx.TooManyRedirects) as error:
        raise DownloadError(f"{url}: {error}. Mend the address.") from error
    except httpx.TransportError as error:
        raise Passing(f"{type(error).__name__}: {error}") from error


def _answer(response: httpx.Response, url: str, offset: int) -> Answer:
    status = response.status_code
    if status in RETRIED or status >= 500:
        asked = retry_after(response.headers.get("Retry-After"), time.time())
        raise Passing(f"HTTP {status} {response.reason_phrase}", asked)
    if status == 416:
        raise Passing("HTTP 416: the file is shorter than what was received of it", anew=True)
    if status not in (200, 206):
        raise DownloadError(f"{url}: HTTP {status} {response.reason_phrase}. Look at the address, or at who may read.")
    length = response.headers.get("Content-Length", "")
    total = int(length) if length.isdigit() else None
    start = 0
    if status == 206:
        found = _RANGE.match(response.headers.get("Content-Range", ""))
        if found is None or int(found[1]) != offset:
            raise Passing(f"asked from byte {offset:,}, got {response.headers.get('Content-Range')!r}", anew=True)
        start, total = offset, None if found[3] == "*" else int(found[3])
    etag = response.headers.get("ETag", "")
    if not etag or etag.startswith("W/"):
        etag = response.headers.get("Last-Modified", "")
    return Answer(start, total, etag, response.iter_raw(), _checksums(response.headers))


def _checksums(headers: httpx.Headers) -> dict[str, str]:
    """Digests of the whole file: Repr-Digest (RFC 9530) and Google's x-goog-hash, base64 -> hex."""
    import base64
    import binascii

    found = {}
    for header, name, kind in (("Repr-Digest", "sha-256", "sha256"), ("x-goog-hash", "md5", "md5")):
        for part in headers.get(header, "").split(","):
            key, _, value = part.strip().partition("=")
            if key.lower() == name:
                try:
                    found[kind] = base64.b64decode(value.strip(":"), validate=True).hex()
                except binascii.Error:
                    continue
    return found


@contextmanager
def _store(url: str, offset: int) -> Iterator[Answer]:
    try:
        with explained(url, "read"):
            fs, inner = filesystem(url)
            info = fs.info(inner)
            with fs.open(inner, "rb") as file:
                if offset > int(info["size"]):
                    raise Passing("the file is shorter than what was received of it", anew=True)
                file.seek(offset)
                yield Answer(offset, int(info["size"]), stamp_of(info), _blocks(file))
    except (Passing, DownloadError):
        raise
    except Exception as error:
        cause = error.__cause__ if isinstance(error, ShardError) else error
        if passing(cause):
            raise Passing(f"{type(cause).__name__}: {cause}") from error
        if isinstance(error, ShardError | OSError):
            raise DownloadError(f"{url}: {error}") from error
        raise


def _blocks(file: Any) -> Iterator[bytes]:
    return iter(lambda: file.read(_BLOCK), b"")
