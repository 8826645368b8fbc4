"""The stages `language` and `url` beside datatrove's filters, for `rules.py`.

Nothing of ours is imported before it is used: the memory of a peer is measured in a process without it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import OURS, Figure, batches, compared, in_own_process, megabytes_of, note, peak_mb, peer, rounds, speed

URLS_SHARE = 30  # one list entry in so many is a URL, the others are domains
LISTED_SHARE = 50  # one URL in so many is on a list


def language(texts: list[str], count: int, skip: list[str]) -> Iterator[Figure]:
    """rules.language: the stage with its settings, and datatrove's filter with the same model on the full text."""
    from gristmill.stages.language import Language, bundled_model

    megabytes, parts, stage = megabytes_of(texts), batches(texts), Language()
    jobs = {OURS: speed(megabytes, lambda: [stage(batch) for batch in parts])}
    stage(parts[0])
    if datatrove := peer("datatrove", skip, needs=["fasttext-numpy2-wheel"]):
        from datatrove.data import Document
        from datatrove.pipeline.filters import LanguageFilter
        from fasttext.FastText import _FastText

        step = LanguageFilter(backend="ft176")
        step.model._model = _FastText(str(bundled_model()))  # in place of the one that it would download
        documents = [Document(text=text, id="0") for text in texts]
        jobs[datatrove] = speed(megabytes, lambda: [step.filter(document) for document in documents])
        note(f"rules.language: {datatrove} has the same model, and reads each document in full.")
    yield from compared("rules.language", "MB/s", rounds(jobs, count))


def write_lists(folder: Path, entries: int) -> tuple[Path, Path]:
    """Files of domains and of URLs with so many different lines together."""
    domains, urls = folder / "domains", folder / "urls"
    with domains.open("w") as of_domains, urls.open("w") as of_urls:
        for i in range(entries):
            host = _host(i)
            if i % URLS_SHARE:
                of_domains.write(f"{host}\n")
            else:
                of_urls.write(f"{host}/page/{i}.html\n")
    return domains, urls


def _host(i: int) -> str:
    words = ("shop", "news", "play", "video", "best", "online", "casino", "free", "my", "web")
    return f"{words[i % 10]}{words[i // 10 % 10]}-{i:x}.{('com', 'net', 'org', 'info')[i % 4]}"


def query_urls(count: int, entries: int) -> list[str]:
    """URLs of other hosts, and some that are listed."""
    rng = random.Random(1)
    urls = []
    for i in range(count):
        listed = i % LISTED_SHARE == 0
        number = rng.randrange(entries) if listed else entries + rng.randrange(10 * entries)
        path = "/".join(f"{rng.getrandbits(24):x}" for _ in range(rng.randint(1, 4)))
        url = (
            f"{_host(number)}/page/{number}.html" if listed and number % URLS_SHARE == 0 else f"{_host(number)}/{path}"
        )
        urls.append(f"https://{'www.' if rng.random() < 0.4 else ''}{url}")
    return urls


def our_url_filter(lists: tuple[Path, Path], urls: list[str]) -> Callable[[], int]:
    """A function that gives how many of the URLs are dropped."""
    import pyarrow as pa

    from gristmill.stages.url import Url

    stage = Url(domain_files=(str(lists[0]),), url_files=(str(lists[1]),))
    batch = pa.RecordBatch.from_pydict({"url": pa.array(urls, pa.string())})
    stage(batch)  # loads the lists
    return lambda: stage(batch).dropped.num_rows


def datatrove_url_filter(lists: tuple[Path, Path], urls: list[str]) -> Callable[[], int]:
    from datatrove.data import Document
    from datatrove.pipeline.filters import URLFilter
    from tldextract import TLDExtract

    with lists[0].open() as of_domains, lists[1].open() as of_urls:
        step = URLFilter(
            extra_domains=of_domains,
            extra_urls=(f"https://{line}" for line in of_urls),
            use_integrated_lists=False,
        )
    step.tldextractor = TLDExtract(suffix_list_urls=())  # the list that comes with it, not one from the network
    documents = [Document(text="", id="0", metadata={"url": url}) for url in urls]
    step.filter(documents[0])
    return lambda: sum(step.filter(document) is not True for document in documents)


def _peak_of(load: Callable[[tuple[Path, Path], list[str]], Callable[[], int]], lists: Any, urls: list[str]) -> float:
    load(lists, urls)()
    return peak_mb()


def url(folder: Path, entries: int, urls: int, peer_urls: int, count: int, skip: list[str]) -> Iterator[Figure]:
    """rules.url, rules.url_memory."""
    lists = write_lists(folder, entries)
    asked = query_urls(urls, entries)
    few = asked[:peer_urls]
    loaders = {OURS: (our_url_filter, asked)}
    if datatrove := peer("datatrove", skip, needs=["tldextract", "pyahocorasick"]):
        loaders[datatrove] = (datatrove_url_filter, few)
    peaks = {name: [float(in_own_process(_peak_of, load, lists, few))] for name, (load, _) in loaders.items()}
    jobs = {}
    for name, (load, of) in loaders.items():
        work = load(lists, of)
        note(f"rules.url: {name} drops {work():,} of {len(of):,} URLs.")
        jobs[name] = speed(len(of), work)
    yield from compared("rules.url", "URLs/s", rounds(jobs, count))
    yield from compared("rules.url_memory", "MB", peaks, smaller_is_better=True)
