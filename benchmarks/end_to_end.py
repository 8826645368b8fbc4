"""From WARC to token shards, beside datatrove: `python benchmarks/end_to_end.py --corpus DIR [--json]`.

    end_to_end.whole          MB/s of WARC as it lies on disk, one core: FineWeb's recipe from WARC files to kept
                              documents to token shards, beside the same recipe in datatrove, each with its default
                              extractor (`peer_end_to_end.py` says what each does)
    end_to_end.after_extract  MB/s of text, one core: the same behind the extraction, both on the text that we extracted
    end_to_end.after_extract_english  the same on the English pages alone, which every stage sees: of a corpus in many
                              languages most of the time of after_extract is reading and telling the language
    end_to_end.two_workers    how many times as fast two workers are as one, by the clock, on all of the WARC files
    end_to_end.eight_workers  how many times as fast eight workers would be as one, simulated: the one scheduler works
                              on each piece first, as long as driver and scheduler do on a piece that does nothing,
                              then a worker, as long as on a shard of 1 GB at the speed of `whole`

DIR/warc holds *.warc.gz; --files takes the first so many, and --mb of them go to both sides in whole records, four
times as much behind the extraction. Both run in a process of their own on one core, in turns; imports, kernels and
models are loaded before on a small file. Speeds are by CPU seconds of the process and its children, because other work
on the machine does not count then. Workers are there and warm before the clock starts; `two_workers` wants two free
cores. Each URL filter has the lists of its own package, and the network's model of languages is the one that the
packages bring along.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import orjson
from common import OURS, Figure, arguments, compared, note, on_one_core, peer, show

NEEDS = ("warcio", "faust-cchardet", "python-magic", "trafilatura", "spacy", "tldextract", "fasttext-numpy2-wheel")
PARTS = ("whole", "after_extract", "two_workers")
SHARD_MB = 1_000  # a WARC file of Common Crawl
WARM_BYTES = 400_000
PIECES = 2_000


def run_side(side: str, start: str, source: Path, scratch: Path, *, warm: Path, workers: int = 0) -> dict[str, float]:
    """What peer_end_to_end.py says of one side. workers: of a cluster; 0 does all in one process."""
    spec = {"side": side, "from": start, "input": str(source), "out": str(scratch / "out"), "workers": workers}
    spec |= {"tokenizer": str(scratch / "tokenizer.json"), "warm": str(warm)}
    command = [sys.executable, str(Path(__file__).parent / "peer_end_to_end.py"), json.dumps(spec)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{side} did not end well on {source}:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    note(f"{side}, {workers} workers, from {start}: {found}")
    return found


def extracted(files: list[Path], folder: Path, *, english: bool = False) -> int:
    """Writes the text that Gristmill extracts, a JSON line a page, a file for each -> bytes of text. english: of pages
    that the stage `language` takes for English."""
    from gristmill.stages.extract import Extract
    from gristmill.stages.language import Language
    from gristmill.stages.ledger import StageLedger
    from gristmill.stages.readers import read_batches
    from gristmill.stages.shards import Shard

    stage, language, total = Extract(), Language(keep=("en",)), 0
    for file in files:
        shard = Shard(index=0, source="web", path=str(file), name=file.name, format="warc", size=1, stamp="")
        with (folder / f"{file.name.split('.')[0]}.jsonl").open("wb") as out:
            for batch in read_batches(shard, StageLedger(stage="read"), [], 10_000_000):
                kept = stage(batch).kept
                if english:
                    kept = language(kept).kept
                rows = zip(*(kept[name].to_pylist() for name in ("doc_id", "url", "text")), strict=True)
                for doc_id, url, text in rows:
                    total += len(text.encode())
                    out.write(orjson.dumps({"id": doc_id, "text": text, "metadata": {"url": url}}) + b"\n")
    return total


def part(file: Path, target: Path, size: int) -> None:
    """About the first `size` bytes of a WARC file, in whole records, each of which is a member of its gzip."""
    if file.stat().st_size <= size:
        target.symlink_to(file.resolve())
        return
    with file.open("rb") as opened:
        data = opened.read(size)
    at = data.rfind(b"\x1f\x8b\x08")
    target.write_bytes(data[:at] if at > 0 else data)


def tokenizer(folder: Path, target: Path) -> None:
    """A tokenizer of 8,192 tokens of the extracted text."""
    import pyarrow as pa

    from gristmill.tokenize.train import TokenizerSettings, tokenizer_bytes, train

    lines = [orjson.loads(line)["text"] for path in sorted(folder.iterdir()) for line in path.open("rb")][:5_000]
    settings = TokenizerSettings(vocab_size=8_192, max_bytes=20_000_000)
    target.write_bytes(tokenizer_bytes(train({"web": iter([pa.array(lines)])}, settings)))


def nothing(order: int) -> int:
    return order


def scheduler_share() -> float:
    """Seconds that driver and scheduler work on a piece: CPU of this process, which holds both."""
    from gristmill.pipelines.engine import open_engine

    with open_engine(workers=2) as engine:
        engine.run(nothing, range(100), lambda *_: None)
        before = time.process_time()
        engine.run(nothing, range(PIECES), lambda *_: None)
        return (time.process_time() - before) / PIECES


def scaling(piece_s: float, workers: int = 8) -> float:
    """How many times as fast so many workers are as one, where each piece is first worked on by the one scheduler, then
    by a worker: simulated, piece by piece, as many pieces for each worker."""
    scheduler_s, pieces = scheduler_share(), 100 * workers
    note(f"Driver and scheduler: {scheduler_s * 1e3:.2f} ms a piece; a worker {piece_s:.0f} s.")
    free, scheduler = [0.0] * workers, 0.0
    for _ in range(pieces):
        scheduler += scheduler_s
        first = min(range(workers), key=free.__getitem__)
        free[first] = max(free[first], scheduler) + piece_s
    return pieces * (piece_s + scheduler_s) / max(free)


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    files = sorted((options.corpus / "warc").glob("*.warc.gz"))[: options.files or None]
    if not files:
        raise SystemExit(f"{options.corpus}/warc holds no *.warc.gz.")
    with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as folder:
        scratch = Path(folder)
        for name in ("all", "warc", "more", "text", "english", "warm-warc", "warm-text"):
            (scratch / name).mkdir()
        for file in files:
            (scratch / "all" / file.name).symlink_to(file.resolve())
            part(file, scratch / "warc" / file.name, int(options.mb * 1e6 / len(files)))
            part(file, scratch / "more" / file.name, int(4 * options.mb * 1e6 / len(files)))
        part(files[0], scratch / "warm-warc/a.warc.gz", WARM_BYTES)
        more = sorted((scratch / "more").iterdir())
        megabytes = {"warc": sum(file.stat().st_size for file in (scratch / "warc").iterdir()) / 1e6}
        megabytes["text"] = extracted(more, scratch / "text") / 1e6
        megabytes["english"] = extracted(more, scratch / "english", english=True) / 1e6
        extracted([scratch / "warm-warc/a.warc.gz"], scratch / "warm-text")
        tokenizer(scratch / "text", scratch / "tokenizer.json")
        note(f"{len(files)} files, MB: " + ", ".join(f"{value:.1f} of {name}" for name, value in megabytes.items()))
        if "whole" in options.only:
            found = beside(options, "warc", "warc", megabytes, scratch)
            yield from compared("end_to_end.whole", "MB/s", found)
            yield Figure("end_to_end.eight_workers", scaling(SHARD_MB / statistics.median(found[OURS])), "times")
        for name in ("text", "english") if "after_extract" in options.only else ():
            bench = "end_to_end.after_extract" + ("_english" if name == "english" else "")
            yield from compared(bench, "MB/s", beside(options, "text", name, megabytes, scratch))
        if "two_workers" in options.only:
            yield Figure("end_to_end.two_workers", two_workers(options.rounds, scratch), "times")


def beside(
    options: argparse.Namespace, start: str, name: str, megabytes: Mapping[str, float], scratch: Path
) -> dict[str, list[float]]:
    """MB/s of each round, ours and datatrove's."""
    datatrove = peer("datatrove", options.skip, needs=NEEDS)
    found: dict[str, list[float]] = {OURS: [], **({datatrove: []} if datatrove else {})}
    for _ in range(options.rounds):
        for who, values in found.items():
            side = "gristmill" if who == OURS else "datatrove"
            with on_one_core():
                took = run_side(side, start, scratch / name, scratch, warm=scratch / f"warm-{start}")
            values.append(megabytes[name] / took["cpu_s"])
    return found


def two_workers(count: int, scratch: Path) -> float:
    times = []
    for _ in range(count):
        one, two = (
            run_side("gristmill", "warc", scratch / "all", scratch, warm=scratch / "all", workers=workers)["wall_s"]
            for workers in (1, 2)
        )
        times.append(one / two)
    return statistics.median(times)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--files", type=int, default=0, help="WARC files to take; 0 takes all (default)")
    parser.add_argument("--mb", type=float, default=8.0, help="of WARC for both sides; default 8")
    parser.add_argument("--only", nargs="*", default=list(PARTS), choices=PARTS, metavar="FIGURE", help="some of them")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    show(figures(options), options.json)


if __name__ == "__main__":
    main()
