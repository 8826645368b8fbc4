"""Both encoders give the ids of `tokenizers`, and text is always text."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gristmill.tokenize import encode
from gristmill.tokenize.encode import Encoder, thread_encoder
from gristmill.tokenize.shards import TokenError
from gristmill.tokenize.tokenizer_json import plain_tokenizer, special_tokens, token_bytes
from gristmill.tokenize.verify import verify_tokens
from gristmill.tokenize.write import write_manifest, write_shard

SPLITS = [(split, digits) for split in ("gpt2", "cl100k", "llama3") for digits in (False, True)]
ALPHABET = st.one_of(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0"),
    st.sampled_from(list(" \t\n\r\u00a0\u3000\u2028'sStTrRlLvVdDmM019٣½ſéß漢字かなกकа")),
)
TEXTS = st.lists(
    st.one_of(
        st.text(ALPHABET, max_size=60),
        st.lists(
            st.sampled_from(["<|endoftext|>", " ", "\n", "'ll", "12345", " the", "x", "\u3000", "漢"]), max_size=12
        ).map("".join),
        st.tuples(ALPHABET, st.integers(1, 400)).map(lambda pair: pair[0] * pair[1]),
    ),
    max_size=8,
)


def ids_of(encoder: Encoder, texts: list[str]) -> list[list[int]]:
    encoded = encoder.encode(pa.array(texts, pa.string()))
    return [part.tolist() for part in np.split(encoded.ids, np.cumsum(encoded.lengths)[:-1])] if texts else []


def reference_ids(tokenizer_json: bytes, texts: list[str]) -> list[list[int]]:
    """What `tokenizers` says when it knows no special token, one text at a time."""
    config = orjson.loads(tokenizer_json)
    tokenizer = Tokenizer.from_str(orjson.dumps(config | {"added_tokens": []}).decode())
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


@pytest.mark.parametrize(("split", "digits"), SPLITS)
def test_real_text_has_the_ids_of_tokenizers_and_decodes_to_itself(tokenizers_by_split, real_texts, split, digits):
    data = tokenizers_by_split[split, digits]
    encoder = Encoder(data)
    encoder.begin(pa.array(real_texts))
    found = ids_of(encoder, real_texts)
    assert found == reference_ids(data, real_texts)
    pieces = token_bytes(data)
    assert [b"".join(pieces[i] for i in ids).decode() for ids in found] == real_texts
    assert encoder.active == ("tokenizers" if (split, digits) == ("gpt2", True) else "gigatoken")


@pytest.mark.parametrize(("split", "digits"), [pair for pair in SPLITS if pair != ("gpt2", True)])
def test_random_unicode_has_the_ids_of_tokenizers(tokenizers_by_split, split, digits):
    data = tokenizers_by_split[split, digits]
    fast, decoder = Encoder(data, backend="gigatoken"), Tokenizer.from_str(data.decode())

    @settings(max_examples=50, deadline=None)
    @given(TEXTS)
    def check(texts: list[str]) -> None:
        found = ids_of(fast, texts)
        assert found == reference_ids(data, texts)
        assert [decoder.decode(ids, skip_special_tokens=False) for ids in found] == texts

    check()


@pytest.mark.parametrize("char", ["a", " "])
def test_a_megabyte_of_one_character(tokenizer_json, char):
    text = char * (1_000_000 // len(char.encode()))
    fast = Encoder(tokenizer_json, backend="gigatoken").encode(pa.array([text])).ids
    slow = Encoder(tokenizer_json, backend="tokenizers").encode(pa.array([text])).ids
    assert np.array_equal(fast, slow)


@pytest.mark.parametrize("backend", ["gigatoken", "tokenizers"])
def test_special_tokens_spelled_out_are_ordinary_text(tokenizer_json, backend):
    encoder = Encoder(tokenizer_json, backend=backend)
    text = "<|endoftext|>a<|endoftext|><|endoftext|>"
    ids = encoder.encode(pa.array([text])).ids
    assert encoder.eos_id not in ids.tolist()
    assert Tokenizer.from_str(tokenizer_json.decode()).decode(ids.tolist(), skip_special_tokens=False) == text


@pytest.mark.parametrize("backend", ["gigatoken", "tokenizers"])
def test_slices_and_chunks_of_a_column(tokenizer_json, real_texts, backend):
    encoder, column = Encoder(tokenizer_json, backend=backend), pa.array(real_texts)
    whole = ids_of(encoder, real_texts)
    sliced = encoder.encode(column.slice(3, 5))
    assert sliced.ids.tolist() == [i for ids in whole[3:8] for i in ids]
    assert sliced.lengths.tolist() == [len(ids) for ids in whole[3:8]]
    chunked = encoder.encode(pa.chunked_array([column.slice(0, 2), column.slice(2, 2)]))
    assert chunked.lengths.tolist() == [len(ids) for ids in whole[:4]]
    wide = encoder.encode(column.cast(pa.large_string()).slice(1, 2))
    assert wide.lengths.tolist() == [len(ids) for ids in whole[1:3]]
    assert encoder.encode(pa.array([], pa.string())).ids.dtype == np.uint16


def test_an_unknown_splitting_rule_falls_back_with_a_message(tokenizers_by_split, caplog):
    data = tokenizers_by_split["gpt2", True]
    with caplog.at_level(logging.WARNING):
        encoder = Encoder(data)
    assert encoder.active == "tokenizers"
    assert "gigatoken cannot load this tokenizer: Unsupported pre_tokenizer type" in encoder.message
    assert "The slower `tokenizers` encodes instead." in caplog.text
    encoder.begin(pa.array(["some text"]))
    assert len([record for record in caplog.records if "slower" in record.message]) == 1
    with pytest.raises(TokenError, match="Use `tokenizers` or `auto`"):
        Encoder(data, backend="gigatoken")


class Wrong:
    """A fast encoder that drops the last id of every document that holds `needle`."""

    def __init__(self, real, needle: bytes) -> None:
        self.real, self.needle = real, needle

    def encode_batch(self, array, parallel):
        import awkward as ak

        lists = [
            ids[:-1] if self.needle in text.encode() else ids
            for ids, text in zip(self.real.encode_batch(array, parallel=parallel).tolist(), array.tolist(), strict=True)
        ]
        return ak.values_astype(ak.Array(lists), np.uint32)


def test_a_fast_encoder_that_differs_is_not_used(tokenizer_json, monkeypatch):
    encoder = Encoder(tokenizer_json)
    monkeypatch.setattr(encoder, "_fast", Wrong(encoder._fast, b"needle"))
    encoder.begin(pa.array(["hay", "a needle in it", "hay"]))
    assert encoder.active == "tokenizers"
    assert encoder.message == "gigatoken and tokenizers differ on 'a needle in it'."
    encoder.begin(pa.array(["hay"]))  # the next shard gives it another chance
    assert (encoder.active, encoder.message) == ("gigatoken", "")


def test_a_difference_in_the_middle_of_a_shard_stops_it(tokenizer_json, monkeypatch):
    encoder = Encoder(tokenizer_json)
    monkeypatch.setattr(encoder, "_fast", Wrong(encoder._fast, b"needle"))
    encoder.begin(pa.array(["hay"]))
    with pytest.raises(TokenError, match=r"'needle needle.* after they agreed at the start of the shard"):
        encoder.encode(pa.array(["hay", "needle " * 100]))


def test_the_fast_encoder_is_made_anew_so_that_its_memory_is_bounded(tokenizer_json, monkeypatch):
    memory = [0]
    monkeypatch.setattr(encode, "_memory_bytes", lambda: memory[0])
    monkeypatch.setattr(encode, "MIN_RECYCLE_BYTES", 1_000)
    monkeypatch.setattr(encode, "BLIND_RECYCLE_BYTES", 2_000)
    monkeypatch.setattr(encode, "MAX_GROWTH_BYTES", 50)
    encoder = Encoder(tokenizer_json, backend="gigatoken")

    def is_new_after(size, grown_to):
        before, memory[0] = encoder._fast, grown_to
        encoder.encode(pa.array(["x" * size]))
        encoder._recycle()
        return encoder._fast is not before

    assert not is_new_after(1_999, 0)  # memory cannot be read: after 2,000 bytes
    assert is_new_after(1, 0)
    memory[0] = 100
    encoder._load_fast()
    assert not is_new_after(5_000, 150)  # not grown by more than 50
    assert is_new_after(1, 151)
    assert not is_new_after(998, 300)  # too soon
    assert is_new_after(1, 300)


def test_memory_is_read_where_the_system_tells():
    assert encode._memory_bytes() == 0 or 10 << 20 < encode._memory_bytes() < 1 << 40


def test_null_text_is_refused(tokenizer_json):
    with pytest.raises(TokenError, match="1 of 2 documents have no text"):
        Encoder(tokenizer_json).encode(pa.array(["a", None]))


def test_a_missing_end_of_text_token_is_named(tokenizer_json):
    with pytest.raises(TokenError, match=r"no token '</s>' .* its special tokens are: '<\|endoftext\|>'"):
        Encoder(tokenizer_json, eos_token="</s>")
    with pytest.raises(TokenError, match=r"Not a tokenizer\.json"):
        Encoder(b"{}")
    with pytest.raises(TokenError, match=r"Not a tokenizer\.json"):
        Encoder(b"\xff\xfe")


def test_added_tokens_that_are_not_special_keep_their_ids(tokenizer_json):
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    tokenizer.add_special_tokens([AddedToken("<|pad|>", special=True)])
    tokenizer.add_tokens([AddedToken("    \n", normalized=False)])
    data = tokenizer.to_str().encode()
    added = tokenizer.token_to_id("    \n")
    for backend in ("auto", "tokenizers"):
        encoder = Encoder(data, backend=backend)
        encoder.begin(pa.array(["a"]))
        ids = encoder.encode(pa.array(["a    \nb<|pad|>"])).ids.tolist()
        assert added in ids
        assert tokenizer.token_to_id("<|pad|>") not in ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == "a    \nb<|pad|>"
    assert special_tokens(data) == {"<|endoftext|>": 1199, "<|pad|>": 1200}


def test_models_that_look_words_up_cannot_make_special_tokens():
    """With `ignore_merges` a whole word of the vocabulary is taken: here, the special token `eos` is such a word."""
    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))} | {"eos": 256}
    tokenizer = Tokenizer(models.BPE(vocab, [], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("eos", special=True)])
    encoder = Encoder(tokenizer.to_str().encode(), eos_token="eos")
    ids = encoder.encode(pa.array(["eos"])).ids.tolist()
    assert (len(ids), encoder.eos_id) == (3, 256)
    assert tokenizer.decode(ids) == "eos"


def test_templates_truncation_and_padding_do_not_touch_documents(tokenizer_json):
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    plain = Tokenizer.from_str(plain_tokenizer(tokenizer.to_str().encode()).decode())
    assert (
        plain.encode("one two three four five six").ids
        == reference_ids(tokenizer_json, ["one two three four five six"])[0]
    )


def test_a_thread_keeps_its_encoder(tokenizer_json, tokenizers_by_split):
    first = thread_encoder(tokenizer_json)
    assert thread_encoder(tokenizer_json) is first
    assert thread_encoder(tokenizer_json, backend="tokenizers") is not first
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(thread_encoder, tokenizer_json).result() is not first
    other = thread_encoder(tokenizers_by_split["gpt2", False])
    assert other.tokenizer_json == tokenizers_by_split["gpt2", False]


def test_a_unigram_tokenizer_of_others_can_be_used(tmp_path, make_batch):
    """Its pieces are looked up in the text, so the names of special tokens must not be found there. What it does not
    know becomes the unknown token, which is no error."""
    pieces = ["<unk>", "<s>", "</s>", *"<>/s", "ab", "a", "b", " "]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0 - i / 10) for i, piece in enumerate(pieces)], unk_id=0))
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in pieces[:3]])
    encoder = Encoder(tokenizer.to_str().encode(), eos_token="</s>")
    assert encoder.message.startswith("gigatoken cannot load this tokenizer: Unsupported model type")
    assert ids_of(encoder, ["ab<s>", "\u00e9a</s>"]) == [[7, 3, 6, 4], [0, 8, 3, 5, 6, 4]]
    infos = write_shard([make_batch(["ab<s>", "\u00e9a</s>"])], encoder, str(tmp_path), "part-00000")
    manifest = write_manifest(str(tmp_path), infos, encoder)
    assert manifest.special_ids == {"<s>": 1, "</s>": 2}
    assert verify_tokens(tmp_path) == []
