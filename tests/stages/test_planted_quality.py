"""Planted quality: perplexity and classifier tell real text from three kinds of bad text, on documents never seen.

The bad kinds: real documents word by word in another order, machine boilerplate, random characters. Each is held apart,
so that an easy kind cannot hide a failure on a hard one. The text is docstrings of SciPy, English of many hands.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import scipy

from gristmill.stages.classifier import Classifier
from gristmill.stages.models import FastText, KenLM, Selection
from gristmill.stages.perplexity import Perplexity
from gristmill.stages.train_fasttext import auc

KINDS = ("shuffled", "boilerplate", "characters")
MENU = (
    "Home|Log in|Sign up|Cookie settings|Accept all cookies|Share on social media|Read more|Privacy policy|Next page|"
    "Add to cart|All rights reserved|Skip to main content|Terms of service|Subscribe to our newsletter|Page 1 of 9|"
    "Posted in News|Leave a comment|Reply|Sort by price|In stock|Enable JavaScript to view this page|Contact us"
)


def bad(kind: str, text: str, seed: int) -> str:
    """A bad document, about as long as `text`."""
    draw = random.Random(f"{kind} {seed}")
    if kind == "shuffled":
        words = text.split()
        draw.shuffle(words)
        moved = iter(words)
        return "\n".join(" ".join(next(moved) for _ in line.split()) for line in text.split("\n"))
    if kind == "boilerplate":
        return "\n".join(draw.choices(MENU.split("|"), k=len(text) // 15))
    return "".join(draw.choices("abcdefghijklmnopqrstuvwxyz0123456789{}<>=;/ \n", k=len(text)))


@pytest.fixture(scope="module")
def documents() -> dict[str, dict[str, list[str]]]:
    """ "seen" and "unseen" -> kind, "real" among them -> texts. Bad ones of a part are made of the real ones of it."""
    texts: set[str] = set()
    for path in sorted(Path(scipy.__file__).parent.rglob("*.py")):
        if "tests" not in path.parts and sum(map(len, texts)) < 4_000_000:
            texts.update(t for t in re.findall(r'"""(.*?)"""', path.read_text("utf-8"), re.DOTALL) if len(t) > 600)
    every = sorted(texts)
    random.Random(5).shuffle(every)
    parts = {"unseen": every[::5], "seen": [t for i, t in enumerate(every) if i % 5]}
    return {
        part: {"real": found} | {kind: [bad(kind, t, i) for i, t in enumerate(found)] for kind in KINDS}
        for part, found in parts.items()
    }


def batch(texts: list[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict({"doc_id": [str(i) for i in range(len(texts))], "text": pa.array(texts)})


@pytest.mark.parametrize("unit", ["document", "paragraph"])
def test_perplexity_tells_them_apart(
    unit: str, documents: dict[str, dict[str, list[str]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("prose")
    KenLM(text=Selection(), order=3).train({"text": [pa.array(documents["seen"]["real"])]}, folder)
    stage = Perplexity(model=str(folder), unit=unit)

    def values(kind: str) -> np.ndarray:
        return np.array(stage(batch(documents["unseen"][kind])).kept["perplexity.perplexity"].to_pylist(), float)

    real = values("real")
    assert len(real) > 100
    found = {kind: auc(values(kind), real) for kind in KINDS}
    assert min(found.values()) > 0.95, found


def test_a_classifier_tells_them_apart(documents: dict[str, dict[str, list[str]]], tmp_path: Path) -> None:
    roles = {"positive": Selection(sources=("a",)), "negative": Selection(sources=("b",))}
    seen = {kind: texts[::2] for kind, texts in documents["seen"].items()}
    negative = [t for kind in KINDS for t in seen[kind]]
    FastText(**roles, word_ngrams=2, buckets=200_000, dim=16, epoch=5, lr=0.3).train(
        {"positive": [pa.array(seen["real"])], "negative": [pa.array(negative)]}, tmp_path
    )
    stage = Classifier(model=str(tmp_path))

    def values(kind: str) -> np.ndarray:
        return np.array(stage(batch(documents["unseen"][kind])).kept["classifier.score"].to_pylist(), float)

    real = values("real")
    found = {kind: auc(real, values(kind)) for kind in KINDS}
    assert min(found.values()) > 0.95, found
