"""Texts for the tests of rule stages: real English that is on every machine, and text made to break things."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import random
import warnings
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

_MODULES = (
    "argparse asyncio collections datetime decimal email.message http.client inspect json logging pathlib random re "
    "socket statistics string subprocess tarfile typing unittest urllib.request zipfile numpy pyarrow scipy.stats"
)

_WORDS = "the be to and word another_line JavaScript lorem_ipsum uses_cookieS Terms_of_Use e.g. Ph.D. U.S. don't 10am"
_MARKS = (
    """. ! ? ... … # - • -- --- ~ — ’s 's “ ” '' " ` = / ( ): :) 8) [12] [edit] [] [٣] { ^_^ <3 °C. 3.5% $5 5€ 5km"""
)
_ADDRESSES = "foo.bar http://x.com/a-b a@b.co 1.2.3.4/x 192.168.1.1/x"
_SCRIPTS = "日本語 です。 é ß İ \u212a ſ 😀 مرحبا שלום \x00 \u200b \ufffd 1 00 10"
_SPACES = [
    " ",
    "  ",
    "\n",
    "\n\n",
    "\r\n",
    "\r",
    "\t",
    "\v",
    "\f",
    "\x1c",
    "\x85",
    "\u2028",
    "\u2029",
    "\xa0",
    "\u3000",
]
PIECES = [
    *(piece.replace("_", " ") for piece in _WORDS.split(" ")),
    *" ".join((_MARKS, _ADDRESSES, _SCRIPTS)).split(" "),
    *_SPACES,
    " of ",
    "[citation needed]",
    "x" * 31,
]


@pytest.fixture(scope="session", autouse=True)
def _datatrove_splits_each_text_once() -> Iterator[None]:
    """spaCy takes most of the time of these tests; datatrove itself remembers only the last five texts."""
    from datatrove.utils import text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "split_into_parts", functools.cache(text.split_into_parts.__wrapped__))
        yield


@pytest.fixture(scope="session")
def english_documents() -> list[str]:
    """A few hundred README files and docstrings of installed packages, 200 to 2,500 characters each."""
    found = {
        text[:2500]
        for package in importlib.metadata.distributions()
        if isinstance(text := package.metadata.get_payload(), str)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are on their way out
        for name in _MODULES.split():
            module = importlib.import_module(name)
            found.update(
                doc
                for key in sorted(vars(module))
                if not key.startswith("_") and isinstance(doc := inspect.getdoc(vars(module)[key]), str)
            )
    texts = sorted(text.encode(errors="replace").decode() for text in found if len(text) >= 200)
    random.Random(1).shuffle(texts)
    assert len(texts) >= 300
    return texts[:320]


@pytest.fixture(scope="session")
def adversarial_documents() -> list[str]:
    """Random strings of everything that words, lines and rules look at, and the corner cases by hand."""
    rng = random.Random(7)
    soup = ["".join(rng.choices(PIECES, k=rng.choice([1, 2, 5, 30, 120, 300]))) for _ in range(300)]
    return [*soup, *CORNER_CASES]


CORNER_CASES = (
    "",
    " ",
    "\n",
    "\n\n\n",
    " \n \t\r\n",
    "x",
    "。",
    "😀",
    "\x00",
    "这是一个没有空格的句子。" * 30,
    "😀" * 300,
    "مرحبا بالعالم. " * 40,
    "\x00" * 500,
    "\u0301" * 100,
    "a" * 5000,
    "." * 3000,
    "- a\n" * 100,
    "word " * 2000,
)


def _batch(texts: list[str]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"doc_id": [str(i) for i in range(len(texts))], "text": pa.array(texts, pa.string())}
    )


@pytest.fixture(scope="session")
def batch_of():  # type: ignore[no-untyped-def]
    """texts -> a batch with doc_id "0", "1", ... and text."""
    return _batch


@pytest.fixture(scope="session")
def guarded():  # type: ignore[no-untyped-def]
    """texts -> a string column whose buffer has invalid UTF-8 before and behind the texts, to be read by nobody."""

    def make(texts: list[str], guard: bytes = b"\xff" * 64) -> pa.Array:
        data = [text.encode() for text in texts]
        offsets = np.cumsum([len(guard), *map(len, data)]).astype(np.int32)
        buffers = [pa.py_buffer(offsets), pa.py_buffer(guard + b"".join(data) + guard)]
        return pa.StringArray.from_buffers(len(texts), *buffers)

    return make


@pytest.fixture(scope="session")
def outcomes():  # type: ignore[no-untyped-def]
    """(stage, texts) -> for each text its reasons ([] if kept) and the text that the stage gave back."""

    def run(stage, texts):  # type: ignore[no-untyped-def]
        result = stage(_batch(texts))
        out = {
            int(row["doc_id"]): (row.get("reasons", []), row["text"])
            for part in (result.kept, result.dropped)
            for row in part.to_pylist()
        }
        assert len(out) == len(texts)
        return [out[i] for i in range(len(texts))]

    return run
