"""Fetches files politely and surely: what a `download:` section asks for, and one file of it.

    fetch(Wanted("https://data.example/a.warc.gz", "a.warc.gz"), "crawl", Policy())      # -> its Card

A file on its way is `.NAME.part`, with `.NAME.part.json` to say of which content; a killed download goes on from its
last byte where the server proves by etag or date that the content is the same. A file is renamed to its name when its
length and every checksum that somebody states are right. Then its card is written: `.download/.HASH.json` has address,
size, etag, xxh3-128 and what was verified. A file that has its card and size is not fetched again.

`download_listing.py` says which files; `download_http.py` asks for them.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import tenacity
import xxhash
from fsspec.implementations.local import LocalFileSystem
from pydantic import Field

from gristmill.stages.documents import Settings
from gristmill.stages.download_http import GATE, Answer, DownloadError, Passing, ask, host_of
from gristmill.stages.shards import exists, filesystem, join, publish, publish_bytes, read_bytes
from gristmill.stages.stores import cache_folder

CARDS = ".download"
_TOTAL = 10  # times `attempts`: the most attempts at one file, however many of them brought something


class Policy(Settings):
    """How to ask. The defaults are those of a guest."""

    connections: int = Field(4, ge=1, le=64)  # at a time, over all workers
    attempts: int = Field(8, ge=1)  # in a row that bring nothing new
    first_wait_s: float = Field(1.0, ge=0)  # after the first failure; doubles with each, half of it by chance
    max_wait_s: float = Field(120.0, ge=0)
    max_asked_s: float = Field(900.0, ge=0)  # a server that asks for a longer wait is left alone
    timeout_s: float = Field(60.0, gt=0)  # to connect, and between two blocks
    stall_s: float = Field(60.0, gt=0)  # over which a body must bring `min_bytes_s`
    min_bytes_s: float = Field(1_000.0, ge=0)


@dataclass(frozen=True)
class Wanted:
    """A file to fetch."""

    url: str
    name: str  # below the folder of the download
    size: int | None = None  # bytes, where the listing says
    checksums: Mapping[str, str] = field(default_factory=dict)  # "sha256" or "md5" -> hex, where the listing says


@dataclass(frozen=True)
class Card:
    """What was fetched."""

    url: str
    name: str
    size: int
    etag: str
    xxh3: str
    verified: tuple[str, ...]  # of "length", "sha256", "md5"
    attempts: int
    seconds: float
    found: bool = False  # it was there already

    def dump(self) -> dict[str, Any]:
        return {k: v for k, v in self.__dict__.items() if k != "found"}


@dataclass
class Tools:
    """Time and progress: tests bring their own."""

    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    chance: Callable[[], float] = random.random
    heard: Callable[[int], None] = lambda _: None  # gets the bytes of each block


def wait_s(fruitless: int, asked_s: float | None, policy: Policy, chance: float) -> float:
    """Seconds before the next attempt: doubling, half of it by chance (0 to 1), and no less than the server asks."""
    backoff = min(policy.max_wait_s, policy.first_wait_s * 2.0 ** min(fruitless - 1, 30))
    jittered = backoff * (0.5 + 0.5 * chance)
    return jittered if asked_s is None else asked_s + jittered * 0.1


def fetch(wanted: Wanted, folder: str, policy: Policy, tools: Tools | None = None) -> Card:
    """Brings a file to `folder`/name, or finds it there. Raises DownloadError."""
    tools = tools or Tools()
    if (card := found_card(wanted, folder)) is not None:
        tools.heard(card.size)
        return card
    begun = tools.clock()
    part = _Part(wanted, folder)
    state = _State()
    _retrying(wanted, policy, tools, state)(_attempt, wanted, part, policy, tools, state)
    digests = part.digests(["xxh3", *state.checksums])
    wrong = [kind for kind, digest in state.checksums.items() if digests[kind] != digest]
    if wrong:
        part.reset()
        raise DownloadError(
            f"{wanted.url}: its {wrong[0]} is {digests[wrong[0]]}, but {state.checksums[wrong[0]]} is stated. What was "
            "received is removed; ask for it again, or mend the checksum."
        )
    verified = (*(("length",) if state.total is not None else ()), *state.checksums)
    size = part.size
    part.finish()
    seconds = round(tools.clock() - begun, 3)
    card = Card(wanted.url, wanted.name, size, part.etag, digests["xxh3"], verified, state.attempts, seconds)
    publish_bytes(_card_path(wanted, folder), orjson.dumps(card.dump(), option=orjson.OPT_INDENT_2))
    return card


def found_card(wanted: Wanted, folder: str) -> Card | None:
    """The card of a file that is there, whole; None where it has to be fetched."""
    path = _card_path(wanted, folder)
    if not exists(path):
        return None
    fields = orjson.loads(read_bytes(path))
    card = Card(**{**fields, "verified": tuple(fields["verified"]), "found": True})
    stated = all(kind in card.verified for kind in wanted.checksums)
    fs, inner = filesystem(join(folder, wanted.name))
    same = card.url == wanted.url and stated and wanted.size in (None, card.size)
    return card if same and fs.exists(inner) and fs.size(inner) == card.size else None


def _card_path(wanted: Wanted, folder: str) -> str:
    stated = orjson.dumps([wanted.name, dict(wanted.checksums)], option=orjson.OPT_SORT_KEYS)
    return join(folder, CARDS, f".{xxhash.xxh3_128_hexdigest(stated)}.json")


@dataclass
class _State:
    """Of the attempts at one file."""

    attempts: int = 0
    fruitless: int = 0  # in a row
    most: int = 0  # bytes of the file that were ever there
    total: int | None = None
    checksums: dict[str, str] = field(default_factory=dict)


def _retrying(wanted: Wanted, policy: Policy, tools: Tools, state: _State) -> tenacity.Retrying:
    def asked(retry: tenacity.RetryCallState) -> float | None:
        error = retry.outcome.exception() if retry.outcome is not None else None
        return error.asked_s if isinstance(error, Passing) else None

    def stop(retry: tenacity.RetryCallState) -> bool:
        too_many = state.fruitless >= policy.attempts or state.attempts >= _TOTAL * policy.attempts
        return too_many or (asked(retry) or 0.0) > policy.max_asked_s

    def wait(retry: tenacity.RetryCallState) -> float:
        seconds = wait_s(max(1, state.fruitless), asked(retry), policy, tools.chance())
        if asked(retry) is not None:
            GATE.hold(host_of(wanted.url), tools.clock() + seconds)
        return seconds

    def give_up(retry: tenacity.RetryCallState) -> Any:
        error = retry.outcome.exception() if retry.outcome is not None else None
        hint = f" The server asks to wait {asked(retry):,.0f} s." if asked(retry) else ""
        raise DownloadError(
            f"{wanted.url}: given up after {state.attempts} attempts, the last: {error}.{hint} What was received is "
            "kept; the same command goes on from there."
        ) from error

    return tenacity.Retrying(
        stop=stop,
        wait=wait,
        retry=tenacity.retry_if_exception_type(Passing),
        sleep=tools.sleep,
        retry_error_callback=give_up,
    )


def _attempt(wanted: Wanted, part: _Part, policy: Policy, tools: Tools, state: _State) -> None:
    """Receives from where the part ends. Raises Passing when the file is not whole afterwards."""
    if (held := GATE.left(host_of(wanted.url), tools.clock())) > 0:
        tools.sleep(held)
    state.attempts += 1
    state.fruitless += 1
    offset = part.begin()
    try:
        with ask(wanted.url, offset, part.etag, connections=policy.connections, timeout_s=policy.timeout_s) as answer:
            _receive(answer, wanted, part, policy, tools, state)
    except Passing as error:
        if error.anew:
            part.reset()
        raise
    finally:
        part.close()
        if part.size > state.most:
            state.most, state.fruitless = part.size, 0


def _receive(answer: Answer, wanted: Wanted, part: _Part, policy: Policy, tools: Tools, state: _State) -> None:
    resumed = answer.start > 0
    if resumed and (answer.etag, answer.total) != (part.etag, part.total):
        raise Passing("the file was changed between two attempts; it is fetched anew", anew=True)
    if wanted.size is not None and answer.total not in (None, wanted.size):
        raise Passing(f"{answer.total:,} bytes are announced, the listing says {wanted.size:,}", anew=True)
    if not resumed:
        part.restart(answer.etag, answer.total if answer.total is not None else wanted.size)
    state.total = part.total
    state.checksums = {**answer.checksums, **wanted.checksums}
    window, received = tools.clock(), 0
    for block in answer.blocks:
        part.write(block)
        tools.heard(len(block))
        received += len(block)
        now = tools.clock()
        if now - window >= policy.stall_s:
            if received < policy.min_bytes_s * (now - window):
                raise Passing(f"only {received:,} bytes in {now - window:.0f} s")
            window, received = now, 0
        if part.total is not None and part.size > part.total:
            raise Passing(f"more than the {part.total:,} bytes that were announced", anew=True)
    if part.total is not None and part.size < part.total:
        raise Passing(f"{part.size:,} of {part.total:,} bytes came")


class _Part:
    """A file on its way, on a local disk, and what is known of its content."""

    def __init__(self, wanted: Wanted, folder: str) -> None:
        fs, inner = filesystem(join(folder, wanted.name))
        self._url, self._local = wanted.url, isinstance(fs, LocalFileSystem)
        self._target = str(inner) if self._local else join(folder, wanted.name)
        key = xxhash.xxh3_128_hexdigest(f"{wanted.url}\0{folder}\0{wanted.name}")
        place = Path(inner) if self._local else cache_folder().parent / "parts" / key / Path(inner).name
        self.path = place.with_name(f".{place.name}.part")
        self._about = place.with_name(f".{place.name}.part.json")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.etag, self.total = "", None if wanted.size is None else wanted.size
        self._checked = bool(wanted.checksums)
        self._file: Any = None
        self._known = self._remembered()

    def _remembered(self) -> bool:
        """Takes up what an earlier process left, where it is of this address and can be proved to be the same."""
        try:
            about = orjson.loads(self._about.read_bytes())
        except (FileNotFoundError, orjson.JSONDecodeError):
            return False
        if about.get("url") != self._url:
            return False
        self.etag, self.total = about["etag"], about["total"]
        return True

    @property
    def size(self) -> int:
        if self._file is not None:
            return int(self._file.tell())
        return self.path.stat().st_size if self.path.exists() else 0

    def begin(self) -> int:
        """The byte to go on from. Without etag, date or checksum nobody could tell that the rest fits: then 0."""
        whole = self.total is not None and self.size >= self.total
        if not self._known or not (self.etag or self._checked) or whole:
            self.reset()
        return self.size

    def restart(self, etag: str, total: int | None) -> None:
        """Begins anew with a content."""
        self.close()
        self.etag, self.total, self._known = etag, total, True
        self.path.write_bytes(b"")
        publish_bytes(str(self._about), orjson.dumps({"url": self._url, "etag": etag, "total": total}))

    def reset(self) -> None:
        """Removes what was received."""
        self.close()
        self.etag, self._known = "", False
        self.path.unlink(missing_ok=True)
        self._about.unlink(missing_ok=True)

    def write(self, block: bytes) -> None:
        if self._file is None:
            self._file = open(self.path, "ab")  # noqa: SIM115  closed by close
        self._file.write(block)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def digests(self, kinds: list[str]) -> dict[str, str]:
        """kind -> hex digest of the bytes on the disk."""
        makers: dict[str, Callable[[], Any]] = {"xxh3": xxhash.xxh3_128, "sha256": hashlib.sha256, "md5": _md5}
        digests = {kind: makers[kind]() for kind in kinds}
        if not self.path.exists():
            self.path.write_bytes(b"")  # a file without bytes
        with open(self.path, "rb") as file:
            while block := file.read(1 << 20):
                for digest in digests.values():
                    digest.update(block)
            os.fsync(file.fileno())
        return {kind: str(digest.hexdigest()) for kind, digest in digests.items()}

    def finish(self) -> None:
        """Gives the file its name."""
        if self._local:
            os.replace(self.path, self._target)
        else:
            with publish(self._target) as out, open(self.path, "rb") as file:
                shutil.copyfileobj(file, out, 1 << 22)
            self.path.unlink()
        self._about.unlink(missing_ok=True)


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)
