"""Token shards of at most so many tokens, and documents in another order: nothing is lost, cut or changed."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.tokenize import pieces
from gristmill.tokenize.encode import Encoder
from gristmill.tokenize.shards import INDEX_SCHEMA, TokenError, TokenSet
from gristmill.tokenize.verify import verify_tokens
from gristmill.tokenize.write import write_manifest, write_shard


def write(folder, encoder, batches, **options):
    infos = write_shard(batches, encoder, str(folder), "part-00000", options.pop("share", 0.0), **options)
    write_manifest(str(folder), infos, encoder, holdout_share=0.0)
    return infos


def documents(folder):
    return [(doc_id, ids.tolist()) for doc_id, ids, _ in TokenSet.open(folder).sources["docs"].documents()]


@pytest.fixture(scope="module")
def encoder(tokenizer_json):
    return Encoder(tokenizer_json, backend="tokenizers")


def test_a_worked_example(tmp_path, encoder, make_batch):
    """A letter is a token and its end; control characters are not joined by any merge."""
    texts = ["a", "\x01\x02\x01", "a", "a", "\x01\x02\x01\x02"]  # 2, 4, 2, 2, 5 ids with the end of text
    infos = write(tmp_path, encoder, [make_batch(texts)], max_tokens=6)
    assert [(info.name, info.documents, info.tokens) for info in infos] == [
        ("part-00000", 2, 6),
        ("part-00000-001", 2, 4),
        ("part-00000-002", 1, 5),
    ]
    assert [doc_id for doc_id, _ in documents(tmp_path)] == ["d0", "d1", "d2", "d3", "d4"]
    assert verify_tokens(tmp_path) == []
    with pytest.raises(TokenError, match=r"part-00000: document 'd4' has 5 tokens, more than the 4 of `max_tokens`"):
        write_shard([make_batch(texts)], encoder, str(tmp_path / "no"), "part-00000", max_tokens=4)
    assert not list((tmp_path / "no").glob("*.idx"))


def test_pieces_hold_the_same_documents_and_no_more_than_they_may(tmp_path, encoder, real_texts, make_batch):
    write(tmp_path / "whole", encoder, [make_batch(real_texts)])
    longest = max(len(ids) for _, ids in documents(tmp_path / "whole"))
    infos = write(tmp_path / "cut", encoder, [make_batch(real_texts)], max_tokens=longest)
    assert len(infos) > 3
    assert all(info.tokens <= longest for info in infos)
    assert documents(tmp_path / "cut") == documents(tmp_path / "whole")
    assert verify_tokens(tmp_path / "cut") == []


def test_the_order_is_that_of_a_keyed_hash(tmp_path, encoder, real_texts, make_batch, monkeypatch):
    monkeypatch.setattr(pieces, "GATHERED_IDS", 5_000)
    write(tmp_path / "plain", encoder, [make_batch(real_texts)])
    plain = documents(tmp_path / "plain")
    for seed in (0, 7):
        write(tmp_path / f"{seed}", encoder, [make_batch(real_texts)], shuffle_seed=seed)
        columns = pa.array([f"d{i}" for i in range(len(real_texts))]), pa.array(real_texts)
        place = dict(zip(columns[0].to_pylist(), pieces.order_keys(*columns, seed).tolist(), strict=True))
        expected = sorted(plain, key=lambda row: place[row[0]])
        assert documents(tmp_path / f"{seed}") == expected != plain
        assert verify_tokens(tmp_path / f"{seed}") == []


@settings(max_examples=25, deadline=None)
@given(st.lists(st.text("ab \x01", min_size=1, max_size=12), max_size=30), st.integers(13, 60), st.integers(0, 3))
def test_batches_do_not_matter(tmp_path_factory, encoder, make_batch, texts, max_tokens, seed):
    """Every document once, whole, whatever the batches; the split is what it would be without either setting."""
    folder = tmp_path_factory.mktemp("p")
    whole = make_batch(texts)
    options = {"max_tokens": max_tokens, "shuffle_seed": seed, "source": "docs", "share": 0.3}
    infos = write(folder / "a", encoder, [whole], **options)
    again = write(folder / "b", encoder, [whole.slice(i, 1) for i in range(len(texts))], **options)
    assert infos == again
    plain = write(folder / "c", encoder, [whole], source="docs", share=0.3)
    for split in ("train", "holdout"):
        sums = [[sum(getattr(i, k) for i in of if i.split == split) for k in ("documents", "tokens", "bytes")]
                for of in (infos, plain)]  # fmt: skip
        assert sums[0] == sums[1]
    assert verify_tokens(folder / "a") == []


def test_an_index_of_a_slice_is_the_index_of_a_copy():
    """Arrow keeps the bytes around a slice of a string column, up to an alignment that depends on where it lies."""
    names = [f"document {'x' * (i % 7)}{i}" for i in range(40)]
    columns = [names, ["docs"] * 40, list(range(0, 80, 2)), [2] * 40, [1] * 40]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, INDEX_SCHEMA, strict=True)]
    whole = pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA)
    for low, count in ((0, 40), (3, 11), (17, 1), (40, 0)):
        copy = pa.Table.from_pylist(whole.slice(low, count).to_pylist(), schema=INDEX_SCHEMA)
        assert pieces.index_bytes(whole.slice(low, count)) == pieces.index_bytes(copy)


def test_a_spool_of_wide_ids(tmp_path, wide_folder, make_batch):
    encoder = Encoder((wide_folder / "tokenizer.json").read_bytes(), backend="tokenizers")
    infos = write(tmp_path, encoder, [make_batch(["a<w65999>b", "x", "<w7>"])], shuffle_seed=1)
    ids = np.concatenate([np.array(ids) for _, ids in documents(tmp_path)])
    assert (ids.max() > 65_536, infos[0].documents) == (True, 3)
