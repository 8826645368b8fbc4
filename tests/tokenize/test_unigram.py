"""Unigram with byte fallback: the ids of SentencePiece, the same every time, and nothing lost."""

from __future__ import annotations

import random

import pyarrow as pa
import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gristmill.tokenize.encode import Encoder
from gristmill.tokenize.shards import TokenError, TokenSet
from gristmill.tokenize.tokenizer_json import token_bytes
from gristmill.tokenize.train import TokenizerSettings, _expression, tokenizer_bytes, train
from gristmill.tokenize.unigram import as_sentencepiece, from_sentencepiece, learn_unigram, rounded
from gristmill.tokenize.verify import verify_tokens
from gristmill.tokenize.write import write_manifest, write_shard

OPTIONS = {"model": "unigram", "vocab_size": 900, "max_bytes": 100_000, "max_chunk_chars": 3_000}
SPLITS = [("gpt2", False), ("llama3", False), ("llama3", True)]
LETTERS = list(" \t\n\r\u00a0\u3000'sStehtaniorl019<>|x\u2581\u2585\U000f0009\u00e9\u6f22\u0939\u0915\u044f\U0001d7d8")


@pytest.fixture(scope="module")
def unigram_json(real_texts):
    return tokenizer_bytes(train({"s": [pa.array(real_texts)]}, TokenizerSettings(**OPTIONS)))


def with_rounded_scores(model):
    """The SentencePiece model with the scores of the tokenizer.json; nothing else of it changes."""
    pytest.importorskip("google.protobuf")
    from sentencepiece import sentencepiece_model_pb2

    parsed = sentencepiece_model_pb2.ModelProto.FromString(model)
    for piece in parsed.pieces:
        assert abs(piece.score - rounded(piece.score)) <= 2**-11
        piece.score = rounded(piece.score)
    return parsed.SerializeToString()


@pytest.mark.parametrize(("split", "single_digits"), SPLITS)
def test_every_word_is_cut_as_sentencepiece_cuts_it(real_texts, split, single_digits):
    cuts = _expression(split, single_digits=single_digits)
    model = learn_unigram([[text[:2_000] for text in real_texts]], 800, {"\u6f22"}, cuts)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=with_rounded_scores(model))
    ours = from_sentencepiece(model, cuts)
    chosen = random.Random(1)
    texts = [*real_texts[-10:-6], *real_texts[:20]]
    texts += ["".join(chosen.choices(LETTERS, k=chosen.randrange(1, 40))) for _ in range(3_000)]
    count = 0
    for text in texts:
        words = [word for word, _ in cuts.pre_tokenize_str(text)]
        if any(char in word for word in words for char in "\u2581\u2585\U000f0009"):
            continue  # SentencePiece itself cannot tell these from its own signs
        expected = [i for word in words for i in theirs.encode(as_sentencepiece(word))]
        assert ours.encode(text, add_special_tokens=False).ids == expected
        count += len(words)
    assert count > 20_000


def test_the_file_holds_what_it_should(unigram_json):
    tokenizer = Tokenizer.from_str(unigram_json.decode())
    assert tokenizer.get_vocab_size() == 900
    assert tokenizer.token_to_id("<|endoftext|>") == 899
    assert [tokenizer.token_to_id(piece) for piece in ("<unk>", "<0x00>", "<0xFF>")] == [0, 1, 256]
    pieces = tokenizer.get_vocab()
    assert not [piece for piece in pieces if "\u2581" in piece]
    assert " the" in pieces
    assert tokenizer.encode("\U0001d7d8").tokens == ["<0xF0>", "<0x9D>", "<0x9F>", "<0x98>"]


def test_the_same_documents_in_any_order_give_the_same_bytes(unigram_json, real_texts):
    again = train({"s": [pa.array(real_texts[::-1])]}, TokenizerSettings(**OPTIONS))
    assert tokenizer_bytes(again) == unigram_json


@settings(max_examples=80, deadline=None)
@given(
    text=st.lists(
        st.one_of(
            st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20),
            st.sampled_from(["<0x41>", "<unk>", "<s>", "\u2581", "\u2585", " ", "   \n", "\t", "<|endoftext|>"]),
        )
    ).map("".join)
)
def test_nothing_is_lost(unigram_json, text):
    encoder = Encoder(unigram_json)
    ids = encoder.encode(pa.array([text])).ids.tolist()  # proves it byte by byte
    assert 0 not in ids
    assert encoder.eos_id not in ids
    pieces = token_bytes(unigram_json)
    assert b"".join(pieces[i] for i in ids).decode() == text
    assert Tokenizer.from_str(unigram_json.decode()).decode(ids, skip_special_tokens=False) == text


def test_token_shards_of_a_unigram_tokenizer(unigram_json, real_texts, make_batch, tmp_path):
    encoder = Encoder(unigram_json)
    infos = write_shard([make_batch(real_texts)], encoder, str(tmp_path), "part-00000")
    assert encoder.active == "tokenizers"
    assert encoder.message.startswith("gigatoken cannot load this tokenizer")
    write_manifest(str(tmp_path), infos, encoder)
    assert verify_tokens(tmp_path) == []
    pieces = token_bytes(unigram_json)
    found = [
        b"".join(pieces[i] for i in ids).decode() for _, ids, _ in TokenSet.open(tmp_path).sources["docs"].documents()
    ]
    assert found == real_texts


def test_too_small_a_vocabulary_is_refused():
    with pytest.raises(ValueError, match="vocab_size 258 is too small"):
        TokenizerSettings(model="unigram", vocab_size=258)
    with pytest.raises(TokenError, match="There is no text to train a tokenizer on"):
        train({"s": [pa.array([], pa.string())]}, TokenizerSettings(**OPTIONS))


def test_a_text_that_makes_no_model_is_named():
    with pytest.raises(TokenError, match="SentencePiece cannot learn 300 pieces from this text"):
        train({"s": [pa.array(["\u2581\u2581"])]}, TokenizerSettings(model="unigram", vocab_size=301))
