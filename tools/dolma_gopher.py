"""Writes tests/data/gopher_dolma.json: documents, and what dolma itself measures of them.

dolma needs versions of its own, so it lives in an environment of its own; run from the repository root:

    uv venv dolma-env && uv pip install --python dolma-env/bin/python dolma==1.2.1
    dolma-env/bin/python tools/dolma_gopher.py

The documents are made here: by hand, at random from pieces and from all of Unicode, and from this repository's own
Markdown. Python 3.11, whose Unicode version is that of the kernels' tables. The file is an array of
[text, {measure: value}] with the names of dolma's tagger `gopher_v2`; a measure that it does not give is left out.
"""

from __future__ import annotations

import json
import random
import sys
import unicodedata
from pathlib import Path

from dolma.core.data_types import Document
from dolma.taggers.gopher import GopherTaggerV2

OUT = Path("tests/data/gopher_dolma.json")
UNICODE = "14.0.0"

BY_HAND = [
    "",
    " ",
    "\n",
    "\n\n\n",
    " \n \n ",
    "\t\r\n\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2003\u2028\u2029\u202f\u205f\u3000",
    "x",
    "#",
    "…",
    "\x00",
    "\x00\x00 \x00",
    "。",
    "😀",
    "e\u0301",
    "\u200b \ufeff \u00ad",
    "the the the",
    "The THE the, the.",
    "* a\n* a\n- b\n  * c\n• d\n*\n-",
    "one…\ntwo… \nthree...\n…\nfour….",
    "a#b c…d … # x... #",
    "\na\n",
    "a\n\n\na\nb",
    "a b a b a b a b a b a b",
    "a b c d e f a b c d e f",
    "ab c ab c a bc",
    "1 00 10 0 1 00 10 0",
    "aa b c aa b c d e d e",
    "z yy z yy yy z",
    "one two three four five six seven eight nine ten",
    "one two three four five six seven eight nine ten one two three four five six seven eight nine ten",
    "这是一个没有空格的句子。" * 20,
    "这是 一个 有空格的 句子 。 " * 20,
    "ひらがな カタカナ 漢字\u3000全角 " * 8,
    "ภาษาไทยไม่มีช่องว่าง " * 8,
    "مرحبا بالعالم، هذا نص. " * 15,
    "שלום עולם #תגית… " * 10,
    "😀😀 👩‍👩‍👧‍👦 🇩🇪 " * 20,
    "नमस्ते दुनिया। " * 12,
    "x" * 700,
    "word " * 150,
    "- item\n" * 40,
    "same line\n\n" * 30 + "other line\n",
    "a\rb\rc\x85a\u2028a",
    "Ⅷ ⅷ ² ½ ٣ 三 ª º ʰ ー \u0345 \u24d0",
]
PIECES = (
    "the be to of and that have with The a b ab ba 1 00 10 # … ... * - • -- * # word words Wörter naïve 日本 語 。 "
    "مرحبا שלום 😀 é e\u0301 ß İ ﬁ \u200b \ufeff \x00 x2 3.5 don’t e.g. http://x.com/a#b"
).split(" ")
SPACES = [" "] * 12 + ["\n", "\n", "\n\n", "\r\n", "\t", "  ", "\xa0", "\x85", "\u2028", "\u3000", "\x1c", ""]


def documents() -> list[str]:
    rng = random.Random(20)  # noqa: S311
    out = list(BY_HAND)
    for size in [*range(1, 30), *range(30, 330, 10)]:
        vocabulary = rng.sample(PIECES, rng.randint(2, len(PIECES)))
        out.append("".join(rng.choice(vocabulary) + rng.choice(SPACES) for _ in range(size)))
    valid = [chr(point) for point in range(0x110000) if not 0xD800 <= point < 0xE000]
    for size in range(3, 20):  # phrases that come again
        phrases = ["".join(rng.choice(PIECES) + " " for _ in range(rng.randint(3, 14))) for _ in range(4)]
        out.append("".join(rng.choice(phrases) + rng.choice(PIECES) + rng.choice(SPACES) for _ in range(size)))
    common = [*" \n#…*-\t\x85\u2003"]
    out += ["".join(rng.choices(valid, k=200)) for _ in range(5)]
    out += [
        "".join(rng.choice(common if rng.random() < 0.3 else valid[:0x3000]) for _ in range(250)) for _ in range(15)
    ]
    for path in ("README.md", "CONTRIBUTING.md", "docs/architecture.md"):
        text = Path(path).read_text(encoding="utf-8")
        out += [text[at : at + 1500] for at in range(0, len(text), 4000)]
    return out


def measures(text: str) -> dict[str, float]:
    spans = GopherTaggerV2().predict(Document(source="", id="", text=text)).spans
    return {span.type: span.score for span in spans}


def main() -> None:
    if unicodedata.unidata_version != UNICODE:
        sys.exit(f"Python {sys.version.split()[0]} has Unicode {unicodedata.unidata_version}; use one with {UNICODE}.")
    rows = [json.dumps([text, measures(text)]) for text in documents()]
    OUT.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="ascii")
    print(f"{OUT}: {len(rows)} documents")


if __name__ == "__main__":
    main()
