"""From pages to text: speed of reading and extraction, and how much of the main text is found.

    python benchmarks/extract.py --corpus DIR [--pages 200] [--files 1] [--rounds 3] [--json]

DIR holds *.warc.gz of documentation pages. Figures:
    extract.read         MB/s of HTML from WARC files, beside datatrove's WarcReader, which also decodes the pages
    extract.extract      MB/s of HTML through the stage `extract` with its defaults, limits per page included; beside
                         datatrove's Trafilatura step with its defaults (each page through its sandbox) and trafilatura
                         called bare
    extract.f1           token F1 of the default engine on labelled pages, beside trafilatura with the stage's settings
    extract.f1_recall    the same with trafilatura set to `favour: recall`
    extract.f1_rescue    the default engine with `min_share: 0.1`, beside itself without
    extract.f1_sidebars  the default engine on the pages with menus, lists of sections and footers around the main text
    extract.f1_plain     the whole page's text: what no extraction would reach

Labelled pages: the generators of documentation mark the main text (`rules` of `extract_labels.py`, by host), and put
navigation, tables of contents and footers around it. A page's label is the text of that element. Tokens are words,
and single characters in scripts without spaces; F1 is of the bags of tokens of a page, and the figure is the mean.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from common import OURS, Figure, arguments, compared, note, peer, rounds, show, speed
from extract_labels import Labelled, f1, labelled

MIN_PAGES = 100
RESCUE = 0.1  # `min_share`: the best of 0.05 to 0.4 on the labelled pages


def read(files: list[Path], count: int, skip: list[str]) -> Iterator[Figure]:
    """extract.read: the bodies of HTML pages of the files."""
    import pyarrow.compute as pc

    pages: list[int] = []

    def ours() -> None:
        pages[:] = [n for path in files for b in _shard_batches(path) for n in pc.binary_length(b["html"]).to_pylist()]

    ours()
    megabytes = sum(pages) / 1e6
    jobs = {OURS: speed(megabytes, ours)}
    if datatrove := peer("datatrove", skip, needs=["warcio", "faust-cchardet", "python-magic"]):
        from datatrove.pipeline.readers import WarcReader

        folder, found = files[0].parent, []

        def theirs() -> None:
            found.clear()
            for path in files:
                found.extend(WarcReader(str(folder), glob_pattern=path.name).run())

        jobs[datatrove] = speed(megabytes, theirs)
        theirs()
        note(f"extract.read: {len(pages):,} pages of ours, {len(found):,} of {datatrove}.")
    yield from compared("extract.read", "MB/s", rounds(jobs, count))


def _shard_batches(path: Path) -> Iterator[Any]:
    from gristmill.stages.ledger import StageLedger
    from gristmill.stages.readers import read_batches
    from gristmill.stages.shards import Shard

    state = {"size": path.stat().st_size, "stamp": "", "format": "warc"}
    yield from read_batches(
        Shard(index=0, source="s", path=str(path), name=path.name, **state), StageLedger(stage="read"), []
    )


def extraction(pages: list[Labelled], count: int, skip: list[str]) -> Iterator[Figure]:
    """extract.extract: wall seconds, because both sides work in a helper process."""
    import time

    import pyarrow as pa

    from gristmill.stages.extract import Extract

    megabytes = sum(len(page.html) for page in pages) / 1e6
    batch = pa.record_batch(
        {"doc_id": [str(i) for i in range(len(pages))], "html": pa.array([page.html for page in pages], pa.binary())}
    )
    stage = Extract()
    stage(batch)  # starts the helper
    jobs = {OURS: speed(megabytes, lambda: stage(batch), time.perf_counter)}
    texts = [page.html.decode("utf-8", "replace") for page in pages]
    if datatrove := peer("datatrove", skip, needs=["trafilatura"]):
        from datatrove.data import Document
        from datatrove.pipeline.extractors import Trafilatura

        def theirs() -> None:
            documents = (Document(text=text, id=str(i)) for i, text in enumerate(texts))
            for _ in Trafilatura().run(documents):
                pass

        jobs[datatrove] = speed(megabytes, theirs, time.perf_counter)
    if trafilatura := peer("trafilatura", skip):
        extract = _trafilatura()
        jobs[trafilatura] = speed(megabytes, lambda: [extract(text) for text in texts], time.perf_counter)
    yield from compared("extract.extract", "MB/s", rounds(jobs, count))


def _trafilatura() -> Callable[[str], str | None]:
    import trafilatura

    return lambda html: trafilatura.extract(html, favor_precision=True, include_comments=False)


def quality(pages: list[Labelled], skip: list[str]) -> Iterator[Figure]:
    """extract.f1, extract.f1_recall, extract.f1_plain."""
    engines: dict[str, dict[str, Any]] = {
        "resiliparse": {},
        "rescue": {"min_share": RESCUE},
        "plain": {"engine": "plain"},
    }
    trafilatura = peer("trafilatura", skip)
    if trafilatura:
        engines |= {favour: {"engine": "trafilatura", "favour": favour} for favour in ("precision", "recall")}
    scores = {name: _scores(pages, options) for name, options in engines.items()}
    means = {name: statistics.mean(values) for name, values in scores.items()}
    for host in sorted({page.host for page in pages}):
        of = {n: statistics.mean(v for v, p in zip(s, pages, strict=True) if p.host == host) for n, s in scores.items()}
        note(f"  {host:42}" + "  ".join(f"{name} {value:.3f}" for name, value in of.items()))
    note(f"extract.f1: {len(pages):,} pages of {len({page.host for page in pages}):,} hosts.")
    around = [page.sidebars for page in pages]
    for group, which in (("with sidebars", around), ("without", [not one for one in around])):
        of = {
            n: statistics.mean(v for v, w in zip(s, which, strict=True) if w) for n, s in scores.items() if any(which)
        }
        note(f"  {sum(which):,} pages {group}: " + "  ".join(f"{name} {value:.3f}" for name, value in of.items()))
    ours = means["resiliparse"]
    for bench, favour in (("extract.f1", "precision"), ("extract.f1_recall", "recall")):
        if trafilatura:
            yield Figure(bench, ours, "F1", trafilatura, means[favour], ours / means[favour])
        else:
            yield Figure(bench, ours, "F1")
    yield Figure("extract.f1_rescue", means["rescue"], "F1", OURS, ours, means["rescue"] / ours)
    if any(around):
        yield from _sidebars(scores, around, trafilatura)
    yield Figure("extract.f1_plain", means["plain"], "F1")


def _sidebars(scores: dict[str, list[float]], around: list[bool], trafilatura: str | None) -> Iterator[Figure]:
    mean = {n: statistics.mean(v for v, w in zip(s, around, strict=True) if w) for n, s in scores.items()}
    if trafilatura:
        ratio = mean["resiliparse"] / mean["precision"]
        yield Figure("extract.f1_sidebars", mean["resiliparse"], "F1", trafilatura, mean["precision"], ratio)
    else:
        yield Figure("extract.f1_sidebars", mean["resiliparse"], "F1")


def _scores(pages: list[Labelled], options: dict[str, Any]) -> list[float]:
    from gristmill.stages.extract_pages import Engine, extract_page

    engine = Engine(**options)
    return [f1(extract_page(engine, page.html, None).text, page.text) for page in pages]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--pages", type=int, default=300, help="labelled pages, spread evenly over the hosts")
    parser.add_argument("--min-pages", type=int, default=MIN_PAGES, help="fewer are an error")
    parser.add_argument("--files", type=int, default=1, help="WARC files to read for the speeds")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    files = sorted(options.corpus.rglob("*.warc.gz"))
    if not files:
        raise SystemExit(f"{options.corpus} holds no *.warc.gz. Give --corpus a folder with WARC files.")
    pages = labelled((page for path in files for page in _with_urls(path)), options.pages)
    if len(pages) < options.min_pages:
        raise SystemExit(
            f"{options.corpus}: {len(pages)} pages whose main text is known; {options.min_pages} are needed. "
            "The rules are for hosts of Debian's documentation packages: see extract_labels.py."
        )
    show(_figures(files[: options.files], pages, options), options.json)


def _figures(files: list[Path], pages: list[Labelled], options: Any) -> Iterator[Figure]:
    yield from quality(pages, options.skip)
    yield from extraction(pages, options.rounds, options.skip)
    yield from read(files, options.rounds, options.skip)


def _with_urls(path: Path) -> Iterator[tuple[str, bytes]]:
    for batch in _shard_batches(path):
        yield from zip(batch["url"].to_pylist(), batch["html"].to_pylist(), strict=True)


if __name__ == "__main__":
    main()
