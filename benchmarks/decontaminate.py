"""How fast evaluation items are looked for: `python benchmarks/decontaminate.py --corpus DIR [--json]`.

DIR holds *.jsonl.gz with {text, id, metadata}. Everything runs on one core, in CPU seconds of the thread; the peer
takes turns with us, round after round. The items are 25 random words of the corpus each, so that nothing is found:
what is measured is what clean documents cost.

    decontaminate.lookup      MB/s: 13-gram look-ups against --ngrams n-grams, beside datatrove's NGramsDecontFilter
                              with 13 words and as many random hashes, on the documents of --peer-mb
    decontaminate.lookup_all  the same without the peer, on those of --mb
    decontaminate.all         MB/s of the stage as it is by default: 13-grams, the share of 8-grams, and the search for
                              containment

To expect on one core of a server of 2024: over 40 MB/s for all three, over 100 times datatrove.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
from common import OURS, Figure, arguments, batches, compared, documents, megabytes_of, note, peer, rounds, show, speed

from gristmill.stages.decontaminate import Decontaminate
from gristmill.stages.kernels import contamination

ITEM_WORDS = 25
NGRAM = 13


def write_items(texts: list[str], ngrams: int, path: Path) -> None:
    """Items of random words of the texts, together `ngrams` 13-grams or a few more."""
    rng = random.Random(1)
    words = sorted({word for text in texts[:2000] for word in text.split() if word.isascii() and word.isalpha()})
    count = -(-ngrams // (ITEM_WORDS - NGRAM + 1))
    lines = (orjson.dumps({"question": " ".join(rng.choices(words, k=ITEM_WORDS))}) for _ in range(count))
    path.write_bytes(b"\n".join(lines))


def look(stage: Decontaminate, parts: list[pa.RecordBatch]) -> int:
    """Documents dropped."""
    return sum(stage(batch).dropped.num_rows for batch in parts)


def datatrove_filter(folder: Path, ngrams: int) -> Any:
    from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter

    np.random.default_rng(1).integers(0, 2**64, ngrams, np.uint64).tofile(folder / "random.index.hashes")
    return NGramsDecontFilter(str(folder), NGramsDecontConfig(n_grams=NGRAM))


def datatrove_look(step: Any, texts: list[str]) -> int:
    from datatrove.data import Document

    return sum(step.filter(Document(text=text, id="0")) is not True for text in texts)


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    texts = documents(options.corpus, options.mb * 1e6)
    few = documents(options.corpus, options.peer_mb * 1e6)
    every, some = batches(texts), batches(few)
    contamination.warm()
    with tempfile.TemporaryDirectory() as folder:
        items = Path(folder) / "items.jsonl"
        write_items(texts, options.ngrams, items)
        settings: dict[str, Any] = {"sets": {"random": str(items)}, "ngram": NGRAM}
        hits = Decontaminate(max_overlap=None, max_containment=None, **settings)
        note(f"{hits.index().ngrams:,} n-grams; {look(hits, every)} of {len(texts):,} documents hold one.")
        jobs = {OURS: speed(megabytes_of(few), lambda: look(hits, some))}
        if datatrove := peer("datatrove", options.skip, needs=["spacy"]):
            index = Path(folder) / "datatrove"
            index.mkdir()
            step = datatrove_filter(index, options.ngrams)
            datatrove_look(step, few[:1])  # it loads its index with the first document
            jobs[datatrove] = speed(megabytes_of(few), lambda: datatrove_look(step, few))
        beside = rounds(jobs, options.rounds)
        ours = rounds({OURS: speed(megabytes_of(texts), lambda: look(hits, every))}, options.rounds)
        yield from compared("decontaminate.lookup", "MB/s", beside)
        yield from compared("decontaminate.lookup_all", "MB/s", ours)
        full = Decontaminate(**settings)
        look(full, every[:1])
        everything = rounds({OURS: speed(megabytes_of(texts), lambda: look(full, every))}, options.rounds)
        yield from compared("decontaminate.all", "MB/s", everything)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mb", type=float, default=60, help="of text for us")
    parser.add_argument("--peer-mb", type=float, default=2, help="of text for datatrove, and for us beside it")
    parser.add_argument("--ngrams", type=int, default=1_000_000, help="13-grams of evaluation items")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    show(figures(options), options.json)


if __name__ == "__main__":
    main()
