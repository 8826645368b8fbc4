"""Models that filter text, side by side with their peers: `python benchmarks/models.py --corpus DIR [--json]`.

DIR holds *.jsonl.gz with {text, id, metadata}. Everything runs on one core, in CPU seconds of the process (of the
child, for lmplz); the peers take turns, round after round, and the medians are printed with the ratio to ours.

    models.kenlm_train   MB/s of UTF-8 from text to ARPA file: our estimator, with normalisation and our table; lmplz
                         on the pieces (where it is on the PATH or given by --lmplz), same order and pruning
    models.perplexity    MB/s of documents: the stage; plain kenlm from Python, line by line, on the pieces that the
                         stage scores, and on the raw text, whose words are fewer and mostly unknown to the model
    models.classifier    MB/s of documents: the stage; datatrove's filter on the same fastText model (where `fasteners`
                         is installed, which it needs)

To expect on one core of a busy server of 2024 (30 November 2026, 12 MB of Python sources, order 3, prune 0 0 1):
training at 13 MB/s, 1.5 times lmplz; perplexity at 29 MB/s, 1.3 times plain kenlm on the same pieces and as fast as on
raw text; the classifier at 21 MB/s, 1.1 times datatrove's filter.
"""

from __future__ import annotations

import argparse
import gzip
import importlib.util
import json
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from gristmill.stages.classifier import POSITIVE, Classifier
from gristmill.stages.kernels import counting, normalise
from gristmill.stages.kernels.normalise import Pieces
from gristmill.stages.kneser_ney import TokenFile, load_arpa
from gristmill.stages.models import FastText, KenLM, Selection
from gristmill.stages.perplexity import ARPA_FILE, Perplexity

BATCH = 1_000  # documents


def documents(folder: Path, limit_bytes: float) -> list[str]:
    """Texts from DIR in the order of names, up to limit_bytes of UTF-8."""
    texts: list[str] = []
    total = 0
    for path in sorted(folder.rglob("*.jsonl.gz")):
        with gzip.open(path, "rb") as lines:
            for line in lines:
                text = orjson.loads(line)["text"]
                total += len(text.encode())
                texts.append(text)
                if total >= limit_bytes:
                    return texts
    if not texts:
        raise SystemExit(f"{folder} holds no *.jsonl.gz. Name a folder with documents: {{text, id, metadata}}.")
    return texts


def batches(texts: list[str]) -> list[pa.RecordBatch]:
    parts = [texts[i : i + BATCH] for i in range(0, len(texts), BATCH)]
    return [pa.RecordBatch.from_pydict({"doc_id": [str(i) for i in range(len(p))], "text": p}) for p in parts]


def rounds(megabytes: float, jobs: dict[str, Callable[[], float]], repeats: int) -> dict[str, dict[str, float]]:
    """jobs: name -> work that returns its CPU seconds -> name -> median MB/s, median ratio of the first job to it."""
    speeds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, work in jobs.items():
            speeds[name].append(megabytes / work())
    first = speeds[next(iter(jobs))]
    return {
        name: {
            "mb_per_s": round(statistics.median(values), 2),
            "ours_is_times_faster": round(statistics.median(a / b for a, b in zip(first, values, strict=True)), 2),
        }
        for name, values in speeds.items()
    }


def timed(work: Callable[[], object]) -> Callable[[], float]:
    def run() -> float:
        before = time.process_time()
        work()
        return time.process_time() - before

    return run


def kenlm_train(
    texts: list[str], order: int, prune: tuple[int, ...], lmplz: str | None
) -> dict[str, Callable[[], float]]:
    arrays = [b["text"] for b in batches(texts)]
    scratch = Path(tempfile.mkdtemp())
    counting.warm()
    normalise.warm()

    def ours() -> None:
        with TokenFile(scratch) as tokens:
            for array in arrays:
                tokens.add(Pieces(array).data)
            tokens.estimate(scratch / "lm.arpa", order=order, prune=prune, table=scratch / "lm.npy")

    pieces = scratch / "pieces.txt"
    with pieces.open("wb") as file:
        for array in arrays:
            file.write(Pieces(array).data.data)

    def theirs() -> float:
        command = [lmplz or "", "-o", str(order), "--discount_fallback", "-S", "1G", "-T", str(scratch / "t")]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with pieces.open("rb") as text, (scratch / "lmplz.arpa").open("wb") as arpa:
            thresholds = [str(x) for x in prune or (0,)]
            subprocess.run(
                [*command, "--prune", *thresholds], stdin=text, stdout=arpa, stderr=subprocess.PIPE, check=True
            )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    return {"gristmill": timed(ours)} | ({"lmplz": theirs} if lmplz else {})


def perplexity(texts: list[str], held: list[str], order: int, prune: tuple[int, ...]) -> dict[str, Callable[[], float]]:
    folder = tempfile.mkdtemp()
    KenLM(text=Selection(), order=order, prune=prune).train({"text": [b["text"] for b in batches(texts)]}, folder)
    stage, parts = Perplexity(model=folder), batches(held)
    model = load_arpa(Path(folder) / ARPA_FILE)
    in_pieces = [Pieces(b["text"]) for b in parts]
    of_pieces = [p.document(i).decode() for p in in_pieces for i in range(len(p))]

    def plain(documents: list[str]) -> None:
        for text in documents:
            total, length = 0.0, 0
            for line in text.split("\n"):
                total += model.score(line)
                length += len(line.split()) + 1
            10.0 ** (-total / length)

    return {
        "gristmill": timed(lambda: [stage(b) for b in parts]),
        "kenlm, pieces": timed(lambda: plain(of_pieces)),
        "kenlm, raw text": timed(lambda: plain(held)),
    }


def classifier(texts: list[str], held: list[str]) -> dict[str, Callable[[], float]]:
    """Tells documents from the same documents with their words in the order of the alphabet: what it learns is no
    matter here."""
    folder = tempfile.mkdtemp()
    some = texts[:4_000]
    other = [" ".join(sorted(t.split())) for t in some]
    settings = FastText(positive=Selection(), negative=Selection(), word_ngrams=2)
    settings.train({"positive": [pa.array(some)], "negative": [pa.array(other)]}, folder)
    stage, parts = Classifier(model=folder), batches(held)
    model = str(Path(folder) / "model.bin")
    jobs = {"gristmill": timed(lambda: [stage(b) for b in parts])}
    if importlib.util.find_spec("fasteners") is None:
        print("datatrove's filter is left out: it needs the package fasteners", file=sys.stderr)
        return jobs
    from datatrove.data import Document
    from datatrove.pipeline.filters import FastTextClassifierFilter

    label = POSITIVE.removeprefix("__label__")
    theirs = FastTextClassifierFilter(model, keep_labels=[(label, 0.5)], newline_replacement=" ")
    jobs["datatrove"] = timed(lambda: [theirs.filter(Document(text=t, id=str(i))) for i, t in enumerate(held)])
    return jobs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="folder of *.jsonl.gz")
    parser.add_argument("--mb", type=float, default=20, help="of text to train on, and as much to score")
    parser.add_argument("--order", type=int, default=3)
    parser.add_argument("--prune", type=int, nargs="*", default=[0, 0, 1])
    parser.add_argument("--lmplz", default=shutil.which("lmplz"), help="path of the program")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    both = documents(options.corpus, 2e6 * options.mb)
    texts, held = both[::2], both[1::2]
    size, held_size = (sum(len(t.encode()) for t in part) / 1e6 for part in (texts, held))
    prune = tuple(options.prune)
    figures: dict[str, Callable[[], dict[str, dict[str, float]]]] = {
        "models.kenlm_train": lambda: rounds(
            size, kenlm_train(texts, options.order, prune, options.lmplz), options.repeats
        ),
        "models.perplexity": lambda: rounds(held_size, perplexity(texts, held, options.order, prune), options.repeats),
        "models.classifier": lambda: rounds(held_size, classifier(texts, held), options.repeats),
    }
    report: dict[str, Any] = {}
    for name, measure in figures.items():
        report[name] = measure()
        if not options.json:
            for peer, found in report[name].items():
                print(
                    f"{name:20} {peer:16} {found['mb_per_s']:8.2f} MB/s   {found['ours_is_times_faster']:6.2f}",
                    flush=True,
                )
    if options.json:
        print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
