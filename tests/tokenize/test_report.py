"""The figures of a tokenizer, on an example that can be counted by hand."""

from __future__ import annotations

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from gristmill.tokenize.report import Sums, tokenizer_report
from gristmill.tokenize.shards import TokenError
from gristmill.tokenize.train import TokenizerSettings, tokenizer_bytes, train


def batch(texts, sources, languages=None):
    columns = {"source": sources, "text": texts}
    if languages is not None:
        columns["language"] = pa.array(languages, pa.string())
    return pa.RecordBatch.from_pydict(columns)


@pytest.fixture(scope="module")
def of_bytes():
    """256 bytes and an end-of-text id: a token is a byte."""
    return tokenizer_bytes(train({"s": [pa.array(["x"])]}, TokenizerSettings(vocab_size=257)))


@pytest.fixture(scope="module")
def lossy():
    """Lower-cases, so that capitals are lost."""
    alphabet = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer.to_str().encode()


def test_a_worked_example(of_bytes, lossy):
    batches = [batch(["Zu Öl", "ab"], ["web", "code"], ["de", None]), batch(["cd ef"], ["web"], ["de"])]
    report = tokenizer_report({"bytes": of_bytes, "lossy": lossy}, batches)
    assert report.sample == {"code/unknown": 2, "web/de": 11}
    figures = report.tokenizers["bytes"]
    assert figures.groups["web/de"] == Sums(documents=2, bytes=11, chars=10, words=4, tokens=11, lossy=0)
    assert (figures.groups["web/de"].bytes_per_token, figures.groups["web/de"].tokens_per_word) == (1, 11 / 4)
    assert figures.total.tokens == 13
    assert figures.vocab_size == 257
    assert figures.unused == 256 - len(set("Zu Öl ab cd ef".encode()))
    assert figures.indentation[8] == 8
    assert figures.numbers["2026"] == 4
    assert report.tokenizers["lossy"].total.lossy == 1
    assert figures.whole_words == {"code/unknown": 0, "web/de": 0}
    assert "bytes per token" in report.table()
    assert "web/de" in report.table()


def test_common_words_in_one_token():
    """Of four words, "the" and "cat" are learned; " dog" and " xyz" are not."""
    text = "the cat the cat the cat the cat"
    learned = tokenizer_bytes(train({"s": [pa.array([" " + text] * 3)]}, TokenizerSettings(vocab_size=400)))
    report = tokenizer_report({"t": learned}, [batch([text + " dog xyz"], ["s"])])
    assert report.tokenizers["t"].whole_words == {"s/unknown": 0.5}


def test_a_word_of_hindi_is_one_word(of_bytes):
    """Vowel signs and the virama are marks, which belong to their word: two words here."""
    report = tokenizer_report(
        {"bytes": of_bytes}, [batch(["\u0939\u093f\u0928\u094d\u0926\u0940 \u092d\u093e\u0937\u093e"], ["s"])]
    )
    assert report.tokenizers["bytes"].groups["s/unknown"].words == 2


def test_the_order_of_documents_does_not_matter(tokenizer_json, real_texts):
    whole = batch(real_texts, ["docs"] * len(real_texts))
    backwards = [whole.slice(i, 1) for i in reversed(range(whole.num_rows))]
    once = tokenizer_report({"t": tokenizer_json}, [whole], max_bytes=40_000)
    assert tokenizer_report({"t": tokenizer_json}, backwards, max_bytes=40_000) == once
    assert once.sample == {"docs/unknown": 40_000}
    assert once.tokenizers["t"].total.lossy == 0


def test_a_file_that_is_no_tokenizer_is_refused():
    with pytest.raises(TokenError, match=r"Not a tokenizer\.json"):
        tokenizer_report({"x": b"[]"}, [])
