"""The proof that ids stand for the text finds every wrong byte, and reads nothing outside its buffers."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.tokenize.encode import Encoder
from gristmill.tokenize.lossless import Pieces
from gristmill.tokenize.shards import TokenError

WORDS = [b"", b"a", b"bc", "é".encode(), b"12345678", b"123456789", b"a long piece of text"]


def guarded(texts: list[str]) -> pa.Array:
    """The column as a slice, with other text directly before and after it."""
    return pa.array(["\x7f" * 9, *texts, "\x7f" * 9]).slice(1, len(texts))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.lists(st.integers(1, 6), max_size=9), max_size=6), st.data())
def test_right_ids_pass_and_wrong_ones_are_named(documents, data):
    pieces = Pieces(WORDS)
    texts = [b"".join(WORDS[i] for i in document).decode() for document in documents]
    ids = np.array([i for document in documents for i in document], np.uint32)
    lengths = np.array([len(document) for document in documents], np.int64)
    for column in (pa.array(texts, pa.string()), guarded(texts)):
        assert pieces.first_difference(column, ids, lengths) == -1
    if len(ids):
        at = data.draw(st.integers(0, len(ids) - 1))
        wrong = ids.copy()
        wrong[at] = data.draw(st.sampled_from([i for i in range(7) if i != ids[at]]))
        row = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
        for column in (pa.array(texts, pa.string()), guarded(texts)):
            found = pieces.first_difference(column, wrong, lengths)
            expected = b"".join(WORDS[i] for i in wrong[lengths[:row].sum() : lengths[: row + 1].sum()]).decode()
            assert found == (-1 if expected == texts[row] else row)


def test_text_that_is_longer_or_shorter_than_its_ids_is_named():
    pieces = Pieces(WORDS)
    for texts, ids in ((["a", "bcx"], [1, 2]), (["a", "b"], [1, 2]), (["a", ""], [1, 2])):
        assert pieces.first_difference(pa.array(texts), np.array(ids, np.uint16), np.array([1, 1])) == 1


def test_an_encoder_that_loses_text_is_caught(tokenizer_json, monkeypatch):
    encoder = Encoder(tokenizer_json, backend="tokenizers")
    real = encoder._encode_reference

    def lossy(texts):
        ids, lengths = real(texts)
        lengths[-1] -= 1
        return ids[:-1], lengths

    monkeypatch.setattr(encoder, "_encode_reference", lossy)
    with pytest.raises(TokenError, match="Document 1 of the batch, which begins 'two', does not decode to its text"):
        encoder.encode(pa.array(["one", "two"]))


def test_an_encoder_that_makes_special_tokens_is_caught(tokenizer_json, monkeypatch):
    encoder = Encoder(tokenizer_json, backend="tokenizers")
    for ids, words in (
        ([5, 1199], r"Document 1 .* special token '<\|endoftext\|>' \(id 1199\)"),
        ([5, 1200], "id 1200"),
    ):
        result = (np.array(ids, np.uint32), np.array([1, 1]))
        monkeypatch.setattr(encoder, "_encode_reference", lambda texts, result=result: result)
        with pytest.raises(TokenError, match=words):
            encoder.encode(pa.array(["one", "two"]))
