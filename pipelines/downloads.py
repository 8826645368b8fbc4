"""Downloads of a run, or alone: which files, where they lie, who fetches them, and what is written of them.

Files of a source lie under `download/<source>` of the run, or where `to` says, with `_download.json` beside them: the
settings that chose them, and for each its address, size, etag, xxh3-128 and what was verified. The choice is frozen
with the first start: a listing that changes meanwhile changes nothing until `--refresh-inputs`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from threading import Event, Lock
from typing import Any

import orjson
import xxhash
from pydantic import ValidationError

from gristmill.pipelines.cluster_file import ClusterSettings
from gristmill.pipelines.engine import Care, Engine, Failure, open_engine
from gristmill.pipelines.progress import Display, Phase
from gristmill.pipelines.recipe import Recipe, load
from gristmill.stages.download import Card, Policy, Tools, Wanted, fetch, found_card
from gristmill.stages.download_http import DownloadError, close_clients
from gristmill.stages.download_listing import Download, choose
from gristmill.stages.settings_file import SettingsError, build, read
from gristmill.stages.shards import exists, join, publish_bytes, read_bytes
from gristmill.stages.stores import MANIFEST_NAME, check_writable

CHOICE_NAME = ".download/.choice.json"
_POLL_S = 0.2  # of the display


class InputError(ValueError):
    """The input of a run is not there, or not what it was."""


@dataclass(frozen=True)
class FetchOrder:
    """One file, for a worker."""

    wanted: Wanted
    folder: str
    policy: Policy


def run_fetch(order: FetchOrder) -> Card:
    """What a worker does with an order."""
    return fetch(order.wanted, order.folder, order.policy)


def folder_of(source: str, settings: Download, out: str) -> str:
    """Where the files of a source lie."""
    return settings.to.rstrip("/") if settings.to is not None else join(out, "download", source)


@dataclass(frozen=True)
class Job:
    """A download and where it goes."""

    name: str
    settings: Download
    folder: str


def jobs(spec: str | None, out: str | None, options: Mapping[str, Any]) -> list[Job]:
    """What `gristmill download` is asked for. Raises SettingsError where that is not clear.

    spec: a recipe, or a file with the keys of a `download`. options: keys of a `download`, where there is no recipe;
    they win over those of the file.
    """
    if spec is not None and "sources" in read(spec).values:
        if options:
            raise SettingsError(f"{spec} is a recipe, whose sources say what to fetch: leave out {', '.join(options)}.")
        recipe = load(spec)
        folder = (out or recipe.out or f"out/{recipe.name}").rstrip("/")
        found = [Job(name, d, folder_of(name, d, folder)) for name, d in _downloads(recipe) if not d.stream]
        if not found:
            raise SettingsError(f"{spec} is a recipe without a `download` that is kept: there is nothing to fetch.")
        return found
    if spec is not None:
        file = read(spec)
        settings = build(Download, {**file.values, **options}, file)
    else:
        try:
            settings = Download.model_validate(options)
        except ValidationError as error:
            raise SettingsError(
                "; ".join(str(e["msg"]).removeprefix("Value error, ") for e in error.errors())
            ) from None
    where = out or settings.to
    if where is None:
        raise SettingsError("Say where the files go: --out FOLDER.")
    return [Job("download", settings, where.rstrip("/"))]


def fetch_job(
    job: Job,
    wanted: Sequence[Wanted],
    display: Display,
    scheduler: str | None = None,
    cluster: ClusterSettings | None = None,
) -> list[Card]:
    """Fetches the files of a job: from the workers of a cluster, else from here."""
    check_writable(job.folder)
    if scheduler is None and cluster is None:
        return download(job.settings, wanted, job.folder, display, job.name)
    with open_engine(scheduler=scheduler, cluster=cluster) as engine:
        return download(job.settings, wanted, job.folder, display, job.name, engine)


def chosen(settings: Download, folder: str, *, refresh: bool = False, keep: bool = True) -> list[Wanted]:
    """The files wanted: as they were chosen at the first start, where the settings that choose are the same.

    keep: write the choice down.
    """
    path = join(folder, CHOICE_NAME)
    choosing = settings.model_dump(mode="json", exclude={"policy", "stream", "to"})
    key = xxhash.xxh3_128_hexdigest(orjson.dumps(choosing, option=orjson.OPT_SORT_KEYS))
    if not refresh and exists(path):
        before = orjson.loads(read_bytes(path))
        if before["key"] == key:
            return [Wanted(**entry) for entry in before["wanted"]]
    found = choose(settings)
    if not keep:
        return found
    body = {"key": key, "wanted": [replace(w, checksums=dict(w.checksums)).__dict__ for w in found]}
    publish_bytes(path, orjson.dumps(body))
    return found


def fetch_sources(
    recipe: Recipe,
    out: str,
    display: Display,
    *,
    scheduler: str | None = None,
    cluster: ClusterSettings | None = None,
    refresh: bool = False,
) -> None:
    """Fetches what the sources of a recipe still need: from the workers of a cluster, else from here.

    Raises DownloadError with the list of what could not be fetched.
    """
    for source, settings in _downloads(recipe):
        folder = folder_of(source, settings, out)
        check_writable(folder)
        wanted = chosen(settings, folder, refresh=refresh)
        if not settings.stream:
            fetch_job(Job(f"download {source}", settings, folder), wanted, display, scheduler, cluster)


def _downloads(recipe: Recipe) -> list[tuple[str, Download]]:
    return [(name, source.download) for name, source in recipe.sources.items() if source.download is not None]


def missing(recipe: Recipe, out: str) -> dict[str, int]:
    """source -> files that are not there yet, where there are such."""
    counts = {}
    for source, settings in _downloads(recipe):
        folder = folder_of(source, settings, out)
        if not settings.stream:
            counts[source] = sum(found_card(wanted, folder) is None for wanted in chosen(settings, folder))
    return {source: count for source, count in counts.items() if count}


def downloaded(source: str, settings: Download, out: str) -> list[tuple[str, str]]:
    """(path, name) of the files of a source, by name: local ones, or addresses with `stream`. Raises InputError."""
    folder = folder_of(source, settings, out)
    wanted = chosen(settings, folder)
    if settings.stream:
        return [(w.url, w.name) for w in wanted]
    absent = [w.url for w in wanted if found_card(w, folder) is None]
    if absent:
        raise InputError(
            f"Source `{source}`: {len(absent):,} of {len(wanted):,} files are not downloaded, the first is {absent[0]}."
            " `gristmill run` fetches them, and `gristmill download` does so alone."
        )
    return [(join(folder, w.name), w.name) for w in wanted]


def download(
    settings: Download,
    wanted: Sequence[Wanted],
    folder: str,
    display: Display,
    name: str,
    engine: Engine | None = None,
) -> list[Card]:
    """Fetches files with at most `policy.connections` at a time -> their cards, in order; writes the manifest.

    On an engine each file is a piece of work; without one, threads of this process do it. Raises DownloadError when
    some were given up: the others are there.
    """
    cards: dict[int, Card] = {}
    orders = [FetchOrder(w, folder, settings.policy) for w in wanted]
    with display.phase(name, len(orders)) as phase:
        if engine is not None:

            def done(position: int, card: Card) -> None:
                cards[position] = card
                phase.advance(bytes_=0 if card.found else card.size)

            failures = engine.run(run_fetch, orders, done, Care(at_once=settings.policy.connections))
        else:
            failures = _threads(orders, settings.policy.connections, phase, cards)
    if failures:
        listed = [f.error for f in sorted(failures, key=lambda f: f.position)]
        raise DownloadError(
            f"{len(failures):,} of {len(orders):,} files were not fetched; the others are in {folder}:\n  "
            + "\n  ".join(listed[:20])
            + "\nRun the same command again; only what is missing is fetched."
        )
    found = [cards[i] for i in range(len(orders))]
    body = {"settings": settings.model_dump(mode="json"), "files": [card.dump() for card in found]}
    manifest = orjson.dumps(body, option=orjson.OPT_INDENT_2)
    path = join(folder, MANIFEST_NAME)
    if not exists(path) or read_bytes(path) != manifest:
        publish_bytes(path, manifest)
    return found


@dataclass
class _Meter:
    """Bytes so far, of all threads, and whether they are to stop."""

    bytes: int = 0
    stopped: Event = field(default_factory=Event)
    _lock: Lock = field(default_factory=Lock)

    def hear(self, count: int) -> None:
        if self.stopped.is_set():
            raise DownloadError("stopped")
        with self._lock:
            self.bytes += count

    def sleep(self, seconds: float) -> None:
        self.stopped.wait(seconds)


def progress_text(received: int, seconds: float, whole_bytes: int, files: int, of_files: int) -> str:
    """Bytes a second, and the time left by the mean size of the files that are there."""
    rate = received / max(seconds, 1e-9)
    text = f"{rate / 1e6:,.1f} MB/s"
    if not files or not rate:
        return text
    left = max(0.0, whole_bytes / files * of_files - received) / rate
    return f"{text}  {int(left // 3600)}:{int(left % 3600 // 60):02d}:{int(left % 60):02d} left"


def _threads(orders: Sequence[FetchOrder], connections: int, phase: Phase, cards: dict[int, Card]) -> list[Failure]:
    meter, begun, failures, sizes = _Meter(), time.monotonic(), [], 0
    found = [(i, card) for i, o in enumerate(orders) if (card := found_card(o.wanted, o.folder)) is not None]
    cards.update(found)
    todo = iter([i for i in range(len(orders)) if i not in cards])
    tools = Tools(sleep=meter.sleep, heard=meter.hear)
    pool = ThreadPoolExecutor(connections, "download")
    flying: dict[Future[Any], int] = {}
    try:
        while True:
            while len(flying) < connections and (position := next(todo, None)) is not None:
                o = orders[position]
                flying[pool.submit(fetch, o.wanted, o.folder, o.policy, tools)] = position
            if not flying:
                break
            ended = wait(flying, _POLL_S, FIRST_COMPLETED).done
            for future in ended:
                position = flying.pop(future)
                error = future.exception()
                if isinstance(error, DownloadError | OSError):
                    failures.append(Failure(position, str(error)))
                    continue
                cards[position] = future.result()
                sizes += cards[position].size
            fresh = len(cards) - len(found)
            text = progress_text(meter.bytes, time.monotonic() - begun, sizes, fresh, len(orders) - len(found))
            phase.to(len(cards), len(orders), text)
    finally:
        meter.stopped.set()  # Ctrl-C: the threads end with their next block, and what they have is kept
        pool.shutdown(wait=True, cancel_futures=True)
        close_clients()
    phase.bytes = meter.bytes
    phase.to(len(cards), len(orders), "")
    return failures
