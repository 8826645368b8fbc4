"""Models that filter text, side by side with their peers: `python benchmarks/models.py --corpus DIR [--json]`.

DIR holds *.jsonl.gz with {text, id, metadata}. Everything runs on one core, in CPU seconds of the process (of the
child, for lmplz); the peers take turns with us, round after round. Half of the documents train, half are scored.

    models.kenlm_train   MB/s from text to ARPA file: our estimator, with normalisation and our table; lmplz
                         on the pieces (where it is on the PATH or given by --lmplz), same order and pruning
    models.perplexity    MB/s of documents: the stage; plain kenlm from Python, line by line, on the pieces that the
                         stage scores, and on the raw text, whose words are fewer and mostly unknown to the model
    models.classifier    MB/s of documents: the stage; datatrove's filter on the same fastText model (where `fasteners`
                         is installed, which it needs)
    models.language      MB/s of documents: the stage, which sees 1,000 bytes of each; fastText's own `predict` on the
                         same bytes, once they are cut
    models.language_full  the same on the full text of each

To expect on one core of a busy server of 2024 (30 November 2026, 12 MB of Python sources, order 3, prune 0 0 1):
training at 13 MB/s, 1.5 times lmplz; perplexity at 29 MB/s, 1.3 times plain kenlm on the same pieces and as fast as on
raw text; the classifier at 21 MB/s, 1.1 times datatrove's filter. On 40 MB of documentation in 30 languages, order 5
with the same pruning, on a machine under load: training at 5.6 MB/s, 1.7 times lmplz; perplexity at 17 MB/s, 1.2 times
plain kenlm on the same pieces and 0.8 times on raw text; the classifier at 18 MB/s, 1.2 times datatrove's filter.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import random
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from common import OURS, Figure, arguments, batches, compared, documents, megabytes_of, note, peer, rounds, show, speed

from gristmill.stages.classifier import POSITIVE, Classifier
from gristmill.stages.kernels import counting, normalise
from gristmill.stages.kernels.normalise import Pieces
from gristmill.stages.kneser_ney import TokenFile, load_arpa
from gristmill.stages.language import Language, bundled_model, sample
from gristmill.stages.models import FastText, KenLM, Selection
from gristmill.stages.perplexity import ARPA_FILE, Perplexity

Jobs = dict[str, Callable[[], float]]  # MB/s of one round


cpu = functools.partial(speed, clock=time.process_time)


def kenlm_train(texts: list[str], scratch: Path, options: argparse.Namespace) -> Jobs:
    arrays = [b["text"] for b in batches(texts)]
    order, prune = options.order, tuple(options.prune)
    size = megabytes_of(texts)
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
        command = [options.lmplz, "-o", str(order), "--discount_fallback", "-S", "1G", "-T", str(scratch / "t")]
        command += ["--prune", *(str(x) for x in prune or (0,))]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with pieces.open("rb") as text, (scratch / "lmplz.arpa").open("wb") as arpa:
            subprocess.run(command, stdin=text, stdout=arpa, stderr=subprocess.PIPE, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return size / (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    jobs = {OURS: cpu(size, ours)}
    if "lmplz" in options.skip:
        note("lmplz is skipped, as --skip asks.")
    elif options.lmplz is None:
        note("lmplz is skipped: it is not on the PATH, and --lmplz does not name it.")
    else:
        jobs["lmplz"] = theirs
    return jobs


def perplexity(texts: list[str], held: list[str], scratch: Path, options: argparse.Namespace) -> Jobs:
    settings = KenLM(text=Selection(), order=options.order, prune=tuple(options.prune))
    settings.train({"text": [b["text"] for b in batches(texts)]}, str(scratch))
    stage, parts, size = Perplexity(model=str(scratch)), batches(held), megabytes_of(held)
    stage(parts[0].slice(0, 1))  # compile, load
    jobs = {OURS: cpu(size, lambda: [stage(b) for b in parts])}
    kenlm = peer("kenlm", options.skip)
    if not kenlm:
        return jobs
    model = load_arpa(scratch / ARPA_FILE)
    in_pieces = [Pieces(b["text"]) for b in parts]
    of_pieces = [p.document(i).decode() for p in in_pieces for i in range(len(p))]

    def plain(documents: list[str]) -> None:
        for text in documents:
            total, length = 0.0, 0
            for line in text.split("\n"):
                total += model.score(line)
                length += len(line.split()) + 1
            10.0 ** (-total / length)

    jobs[f"{kenlm}, pieces"] = cpu(size, lambda: plain(of_pieces))
    jobs[f"{kenlm}, raw text"] = cpu(size, lambda: plain(held))
    return jobs


def classifier(texts: list[str], held: list[str], scratch: Path, options: argparse.Namespace) -> Jobs:
    """Tells documents from the same documents with their words in the order of the alphabet: what it learns is no
    matter here."""
    some = texts[:4_000]
    other = [" ".join(sorted(t.split())) for t in some]
    settings = FastText(positive=Selection(), negative=Selection(), word_ngrams=2, buckets=options.buckets)
    settings.train({"positive": [pa.array(some)], "negative": [pa.array(other)]}, str(scratch))
    stage, parts, size = Classifier(model=str(scratch)), batches(held), megabytes_of(held)
    stage(parts[0].slice(0, 1))  # compile, load
    jobs = {OURS: cpu(size, lambda: [stage(b) for b in parts])}
    if datatrove := peer("datatrove", options.skip, needs=["fasteners"]):
        from datatrove.data import Document
        from datatrove.pipeline.filters import FastTextClassifierFilter

        keep = [(POSITIVE.removeprefix("__label__"), 0.5)]
        model = str(scratch / "model.bin")
        theirs = FastTextClassifierFilter(model, keep_labels=keep, newline_replacement=" ")
        jobs[datatrove] = cpu(size, lambda: [theirs.filter(Document(text=t, id=str(i))) for i, t in enumerate(held)])
    return jobs


def language(held: list[str], sample_bytes: int | None, skip: Iterable[str]) -> Jobs:
    stage, parts, size = Language(min_score=0, sample_bytes=sample_bytes), batches(held), megabytes_of(held)
    stage(parts[0].slice(0, 1))  # compile, load
    jobs = {OURS: cpu(size, lambda: [stage(b) for b in parts])}
    if fasttext := peer("fasttext-numpy2-wheel", skip):
        from fasttext import load_model

        model = load_model(str(bundled_model())).f
        seen = (sample(np.frombuffer(text.encode(), np.uint8), sample_bytes) for text in held)
        lines = [text.replace("\n", " ") + "\n" for text in seen]
        jobs[fasttext] = cpu(size, lambda: [model.predict(line, 1, 0.0, "strict") for line in lines])
    return jobs


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    both = documents(options.corpus, 2e6 * options.mb)
    random.Random(0).shuffle(both)  # texts of every file in either half
    texts, held = both[::2], both[1::2]
    with contextlib.ExitStack() as stack:
        scratch = [Path(stack.enter_context(tempfile.TemporaryDirectory())) for _ in range(3)]
        jobs = kenlm_train(texts, scratch[0], options)
        yield from compared("models.kenlm_train", "MB/s", rounds(jobs, options.rounds))
        jobs = perplexity(texts, held, scratch[1], options)
        yield from compared("models.perplexity", "MB/s", rounds(jobs, options.rounds))
        jobs = classifier(texts, held, scratch[2], options)
        yield from compared("models.classifier", "MB/s", rounds(jobs, options.rounds))
        for name, sample_bytes in (("language", 1_000), ("language_full", None)):
            jobs = language(held, sample_bytes, options.skip)
            yield from compared(f"models.{name}", "MB/s", rounds(jobs, options.rounds))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--mb", type=float, default=20, help="of text to train on, and as much to score")
    parser.add_argument("--order", type=int, default=3)
    parser.add_argument("--prune", type=int, nargs="*", default=[0, 0, 1])
    parser.add_argument("--buckets", type=int, default=FastText.model_fields["buckets"].default, help="of fastText")
    parser.add_argument("--lmplz", default=shutil.which("lmplz"), help="path of the program")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    show(figures(options), options.json)


if __name__ == "__main__":
    main()
