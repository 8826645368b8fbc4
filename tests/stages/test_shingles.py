"""The shingle kernel against datatrove's simplify_text and slow Python."""

from __future__ import annotations

import random
import re
import unicodedata

import numpy as np
import pytest
from datatrove.utils.text import PUNCTUATION, TextNormConfig, simplify_text
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.kernels import shingles, unicode, word_hashes
from gristmill.stages.kernels.fold import fold

MASK = 2**64 - 1
TRANSLATED = set(PUNCTUATION)
GOLDEN = 0x9E3779B97F4A7C15


def unsegmented(char: str) -> bool:
    return bool(unicode.class_of(*unicode.TABLES, np.uint32(ord(char))) & unicode.UNSEGMENTED)


def known(char: str) -> bool:
    """Assigned in the frozen Unicode version, and not a spacing mark that NFD would move (see the module)."""
    category = unicodedata.category(char)
    return category not in ("Cn", "Cs") and not (category == "Mc" and unicodedata.combining(char))


def weight(word: str) -> int:
    """Of a word in a shingle: 4, but 2 of a character of Han or kana, 1 of one of Thai, Lao, Burmese, Khmer."""
    if len(word) > 1 or not unsegmented(word):
        return 0 if word.isspace() else 4
    name = unicodedata.name(word)
    return 1 if name.split()[0] in ("THAI", "LAO", "MYANMAR", "KHMER") else 2


def runs(words: list[str], ngram: int) -> list[list[str]]:
    """From each word on, the shortest run that weighs 4 * ngram; the last of them goes on to the end."""
    weights = [weight(word) for word in words]
    starts = [i for i in range(len(words)) if weights[i] and sum(weights[i:]) >= 4 * ngram]
    if not starts:
        first = next((i for i in range(len(words)) if weights[i]), None)
        return [] if first is None else [words[first:]]
    out = []
    for i in starts:
        end = i
        while sum(weights[i:end]) < 4 * ngram:
            end += 1
        out.append(words[i:end])
    return [*out[:-1], words[starts[-1] :]]


def slow_fold(text: str, config: TextNormConfig, whitespace: bool) -> list[str]:
    """`reference`; without `whitespace` each white-space character outside of punctuation is a word as well."""
    if whitespace:
        return reference(text, config)
    pieces = re.split(r"([\s\x1c-\x1f])", text)
    kept = [p for p in pieces if not (p.isspace() and p in TRANSLATED and config.remove_punctuation)]
    return [w for p in kept for w in ([p] if p.isspace() else reference(p, config))]


def reference(text: str, config: TextNormConfig | None = None) -> list[str]:
    """The words, by datatrove's normalisation and Python's strings."""
    simple = simplify_text(text, config or TextNormConfig())
    if config is None or config.lowercase:
        simple = simple.replace("ς", "σ")
    return "".join(f" {c} " if unsegmented(c) else c for c in simple).split()


characters = st.one_of(
    st.sampled_from(
        "aAzZéÉ019.,:;!?-'\"’« \n\t\0\x1c\u0085\u00a0\u2028Σς"
        "σİıﬁÅ،٫⎖٣४０𝟗한글각中文カが゛ー・ไทย กำກʼn🤷\u0301\u0345\u200d\ufeff"
    ),
    st.characters(exclude_categories=("Cs", "Cn")).filter(known),
)
texts = st.text(characters, max_size=60)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Ünï-code  costs 1,50 €.", "uni code costs 0 €"),
        ("1.2.3 1,2,x ٣٫٥ 4، 5", "0 0 0 x 0 0، 0"),
        ("中文 abc中x カガ", "中 文 abc 中 x カ カ"),
        ("한글", "\u1112\u1161\u11ab\u1100\u1173\u11af"),
        ("ΛΟΓΟΣ λόγος İ", "λογοσ λογοσ i"),
        ("  ...  \0\x1f\n", ""),
        ("", ""),
        ("x", "x"),
        ("🤷🏽‍♀️ ok", "🤷🏽\u200d♀ ok"),
        ("e\u0301 \u0301 a", "e a"),
        ("\u037e", ";"),  # the Greek question mark is a semicolon after decomposition, as in datatrove
    ],
)
def test_worked_examples(text: str, words: str) -> None:
    assert shingles.normalised(text) == words


@settings(max_examples=400, deadline=None)
@given(texts)
def test_words_are_those_of_simplify_text(text: str) -> None:
    assert shingles.normalised(text) == " ".join(reference(text))


@settings(max_examples=60, deadline=None)
@given(texts, st.booleans(), st.booleans(), st.booleans(), st.booleans())
def test_each_switch(text: str, lowercase: bool, numbers: bool, punctuation: bool, diacritics: bool) -> None:
    config = TextNormConfig(
        lowercase=lowercase,
        norm_numbers=numbers,
        remove_punctuation=punctuation,
        norm_unicode_diacritics=diacritics,
    )
    tables = fold(lowercase, numbers, punctuation, diacritics)
    assert shingles.normalised(text, tables) == " ".join(reference(text, config))


def test_every_code_point() -> None:
    """One text with all assigned characters between letters: nothing is forgotten in the tables."""
    points = [chr(p) for p in range(0x110000) if not 0xD800 <= p < 0xE000 and known(chr(p))]
    for start in range(0, len(points), 4096):
        text = "x ".join(f"q{c}" for c in points[start : start + 4096])
        assert shingles.normalised(text) == " ".join(reference(text))


def test_documented_differences() -> None:
    assert simplify_text("λόγος") == "λογος"  # ours: a sigma is a sigma
    assert simplify_text("a \u0301 b") == "a  b"  # ours: one space
    marks = "ꦱ\u302e꧀"  # Mc of combining class 224, then 9: NFD changes their order
    assert simplify_text(marks) != marks
    assert shingles.normalised(marks) == marks


def word_hash(word: bytes) -> int:
    h = len(word) * 0xD6E8FEB86659FD93 & MASK
    while len(word) > 8:
        h = (h ^ int.from_bytes(word[:8], "little")) * GOLDEN & MASK
        h ^= h >> 32
        word = word[8:]
    h = (h ^ int.from_bytes(word, "little")) * GOLDEN & MASK
    return h ^ h >> 32


def run_hash(words: list[str]) -> int:
    h = 0
    for word in words:
        h = (h * GOLDEN + word_hash(word.encode())) & MASK
    h = (h ^ h >> 33) * 0xFF51AFD7ED558CCD & MASK
    h = (h ^ h >> 33) * 0xC4CEB9FE1A85EC53 & MASK
    return (h ^ h >> 33) >> 32


@settings(max_examples=150, deadline=None)
@given(texts, st.integers(1, 7))
def test_shingles_equal_slow_python(text: str, ngram: int) -> None:
    found = runs(reference(text), ngram)
    assert shingles.shingle_set(text, ngram).tolist() == sorted({run_hash(run) for run in found})


unspaced = st.text(
    st.one_of(
        st.sampled_from("ab 1.\n é"),
        st.characters(min_codepoint=0x4E00, max_codepoint=0x4E20),
        st.characters(min_codepoint=0x3041, max_codepoint=0x3096),
        st.characters(min_codepoint=0x0E01, max_codepoint=0x0EDF).filter(known),
        st.characters(min_codepoint=0x1000, max_codepoint=0x109F).filter(known),
        st.characters(min_codepoint=0x1780, max_codepoint=0x17FF).filter(known),
    ),
    max_size=80,
)


@settings(max_examples=300, deadline=None)
@given(unspaced, st.integers(1, 5))
def test_shingles_of_scripts_without_spaces_equal_slow_python(text: str, ngram: int) -> None:
    found = runs(reference(text), ngram)
    assert shingles.shingle_set(text, ngram).tolist() == sorted({run_hash(run) for run in found})


@settings(max_examples=150, deadline=None)
@given(st.one_of(texts, unspaced), st.tuples(*[st.booleans()] * 5), st.integers(1, 4))
def test_shingles_under_each_switch(text: str, switches: tuple[bool, ...], ngram: int) -> None:
    lowercase, numbers, punctuation, diacritics, whitespace = switches
    config = TextNormConfig(
        lowercase=lowercase,
        norm_numbers=numbers,
        remove_punctuation=punctuation,
        norm_unicode_diacritics=diacritics,
    )
    found = runs(slow_fold(text, config, whitespace), ngram)
    expected = sorted({run_hash(run) for run in found})
    assert shingles.shingle_set(text, ngram, fold(*switches)).tolist() == expected


def test_a_shingle_of_a_script_without_spaces_is_longer() -> None:
    """Five words, or ten characters of Chinese, or twenty letters of Thai: as many shingles as positions."""
    assert len(shingles.shingle_set(" ".join("abcdefg"), 5)) == 3
    assert len(shingles.shingle_set("天地玄黃宇宙洪荒日月盈昃", 5)) == 3
    assert len(shingles.shingle_set("กขคฆงจฉชซฌญฎฏฐฑฒณดตถทธ", 5)) == 3
    assert len(shingles.shingle_set("天地玄黃宇宙洪荒日月盈昃", 6)) == 1


def test_the_end_of_a_document_is_in_a_shingle() -> None:
    """A run that begins with a word of weight 4 can jump over its length; what is left still makes a difference."""
    texts = [f"a b c d e ก{end}" for end in ("", "ข", "ค")]
    assert len({tuple(shingles.shingle_set(t, 5).tolist()) for t in texts}) == 3


def test_white_space_counts_where_it_is_not_normalised() -> None:
    tables = fold(whitespace=False)
    assert shingles.normalised("a b\n\nc", tables) == "a   b \n \n c"
    assert shingles.shingle_set(" \t\n", 5, tables).tolist() == []
    assert shingles.shingle_set("a b", 5, tables).tolist() != shingles.shingle_set("a  b", 5, tables).tolist()
    assert len(shingles.shingle_set("a b c d e f", 5, tables)) == 2


@settings(max_examples=50, deadline=None)
@given(texts, st.integers(0, 20), st.integers(0, 20))
def test_bytes_around_a_document_do_not_matter(text: str, before: int, after: int) -> None:
    """Guard bytes: the kernel reads without bounds, so what lies outside must not change anything."""
    data = text.encode()
    found = []
    for guard in (b"\xe4", b"9"):
        buffer = np.frombuffer(guard * before + data + guard * after, np.uint8)
        out = np.full(3 * len(data) + word_hashes.PADDING, ord("z"), np.uint8)
        ends = np.full(len(data) // 2 + 3, -1, np.int64)
        length, words = word_hashes.normalise(buffer, before, before + len(data), *fold(), out, ends)
        hashes = np.zeros(words + 1, np.uint64)
        out[length:] = guard[0]
        weights = np.full(words + 1, 4, np.uint8)
        total = word_hashes.hash_words(out, ends, words, *fold()[1:3], hashes, weights, 0)
        assert total == weights[:words].sum() == sum(weight(w) for w in reference(text))
        assert weights[-1] == 4
        assert ends[-1] == -1
        assert hashes[-1] == 0
        again = np.zeros(words + 1, np.uint64)
        scratch, heavy = np.empty_like(out), np.full(words + 1, 4, np.uint8)
        here = (buffer, before, before + len(data))
        assert (words, total) == word_hashes.word_hashes(*here, *fold(), scratch, ends, again, heavy)
        assert heavy.tolist() == weights.tolist()
        assert again.tolist() == hashes.tolist()
        found.append((out[:length].tobytes(), hashes.tolist()))
    assert found[0] == found[1]
    assert found[0][0].decode() == " ".join(reference(text))


latin = st.text(st.sampled_from("abcdefgXYZ@[`{  .,-'19é中\n"), max_size=120)


@settings(max_examples=300, deadline=None)
@given(latin, st.integers(0, 17))
def test_the_short_way_is_the_long_way(text: str, before: int) -> None:
    """Words of ASCII letters are hashed from the text; the hashes must be those of the normalised words."""
    data = text.encode()
    buffer = np.frombuffer(b"w" * before + data + b"w" * 3, np.uint8)
    out, ends = np.empty(3 * len(data) + word_hashes.PADDING, np.uint8), np.empty(len(data) // 2 + 2, np.int64)
    hashes = np.zeros(len(data) // 2 + 2, np.uint64)
    here = (buffer, before, before + len(data))
    count, _ = word_hashes.word_hashes(*here, *fold(), out, ends, hashes, np.full(len(hashes), 4, np.uint8))
    assert hashes[:count].tolist() == [word_hash(word.encode()) for word in reference(text)]


@pytest.mark.parametrize("seed", range(40))
def test_blocks_of_bytes_are_the_long_way(seed: int) -> None:
    """Texts of several blocks; words of all lengths, and odd ones, at every place of a block and at its borders."""
    chance = random.Random(seed)
    odd = ["é", "1", "1,5", "a1", "中文", "don’t", "x" * chance.randint(60, 200), "3.a", "9,", "é" * 70]
    pieces = []
    for _ in range(chance.randint(10, 120)):
        plain = "".join(chance.choices("abcXYZ", k=chance.randint(1, 18)))
        pieces.append(chance.choice(odd) if chance.random() < seed / 80 else plain)
        pieces.append(chance.choice([" ", ". ", ",", "\n\n", " - ", ".", " " * chance.randint(1, 80)]))
    text = "".join(pieces)
    expected = [word_hash(word.encode()) for word in reference(text)]
    data = text.encode()
    for guard in (b"w", b" "):
        buffer = np.frombuffer(guard * 70 + data + guard * 70, np.uint8)
        out, ends = np.empty(3 * len(data) + word_hashes.PADDING, np.uint8), np.empty(len(data) + 2, np.int64)
        hashes, weights = np.zeros(len(data), np.uint64), np.full(len(data), 4, np.uint8)
        here = (buffer, 70, 70 + len(data))
        count, total = word_hashes.word_hashes(*here, *fold(), out, ends, hashes, weights)
        assert hashes[:count].tolist() == expected
        assert total == weights[:count].sum()


@pytest.mark.parametrize("length", range(1, 40))
def test_words_of_every_length(length: int) -> None:
    text = " ".join(["Q" * length, "z" * length]) + "." * 20
    expected = sorted(run_hash([letter * length]) for letter in "qz")
    assert shingles.shingle_set(text, 1).tolist() == expected
    assert shingles.shingle_set(text.strip("."), 1).tolist() == expected


def test_growth_bound_holds() -> None:
    """The longest outputs: Hangul, and characters of scripts without spaces between letters."""
    for text in ("각" * 50, "a中" * 50, "中" * 50, "𝅘𝅥𝅯" * 20, "1中" * 50):
        assert len(shingles.normalised(text).encode()) <= word_hashes.GROWTH * len(text.encode())


def smallest(values: list[int], cap: int) -> list[int]:
    array = np.array(values, np.uint32)
    spare, begin = np.empty(len(values), np.uint32), np.empty(len(values) + 3, np.int32)
    return array[: shingles.distinct(array, len(values), cap, spare, begin)].tolist()


@settings(max_examples=150, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 2**32 - 1), st.integers(0, 9)), max_size=80), st.integers(1, 90))
def test_a_long_document_is_cut_to_its_smallest_hashes(values: list[int], cap: int) -> None:
    assert smallest(values, cap) == sorted(set(values))[:cap]


def test_distinct_of_values_that_fall_into_one_bucket() -> None:
    """Two values that alternate cost insertion count^2 / 4 moves; the bound sends them to the library's sort."""
    assert smallest([2, 1] * 3_000, 9) == [1, 2]
    values = np.random.default_rng(0).integers(0, 2**32, 50_000, dtype=np.uint32).tolist()
    assert smallest(values, 40_000) == sorted(set(values))[:40_000]
