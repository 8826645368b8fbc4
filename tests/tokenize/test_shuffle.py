"""Documents of a source in one random order over all its shards: none lost, none twice, always the same bytes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.tokenize import pieces
from gristmill.tokenize.encode import Encoder
from gristmill.tokenize.pieces import order_keys
from gristmill.tokenize.shards import TokenError, TokenSet
from gristmill.tokenize.shuffle import gather_shard, range_of, scatter_shard
from gristmill.tokenize.verify import verify_tokens
from gristmill.tokenize.write import write_manifest, write_shard


@pytest.fixture(scope="module")
def encoder(tokenizer_json):
    return Encoder(tokenizer_json, backend="tokenizers")


def shuffled(folder, encoder, shards, *, seed=1, share=0.0, max_tokens=None, order=None):
    """Token shards of batches, one of each shard of documents. order: in which the pieces of work are done."""
    order = order or list(range(len(shards)))
    cards, infos = {}, {}
    for i in order:
        options = {"seed": seed, "source": "docs", "max_tokens": max_tokens}
        cards[i] = scatter_shard([shards[i]], encoder, str(folder), f"part-{i:05d}", share, **options)
    parts = [cards[i] for i in range(len(shards))]
    for i in order:
        infos[i] = gather_shard(str(folder), parts, i, f"part-{i:05d}", max_tokens=max_tokens)
    every = [info for i in range(len(shards)) for info in (*infos[i], *cards[i].holdout)]
    write_manifest(str(folder), every, encoder, holdout_share=share, shuffle="documents", seed=seed)
    return every


def documents(folder, split="sources"):
    found = getattr(TokenSet.open(folder), split)
    return [(doc_id, ids.tolist(), size) for doc_id, ids, size in found["docs"].documents()] if found else []


def files_of(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_worked_example(tmp_path, encoder, make_batch):
    """Two shards, keys below and above a half of all keys; the first token shard gets those below."""
    texts = [f"text {i}" for i in range(9)]
    shards = [make_batch(texts[:3]), make_batch(texts[3:], prefix="e")]
    keys = {}
    for shard in shards:
        of_shard = order_keys(shard["doc_id"], shard["text"], 5).tolist()
        keys |= dict(zip(shard["doc_id"].to_pylist(), of_shard, strict=True))
    infos = shuffled(tmp_path, encoder, shards, seed=5)
    low = [doc_id for doc_id in sorted(keys, key=keys.get) if keys[doc_id] < 2**63]
    assert [doc_id for doc_id, _, _ in documents(tmp_path)] == sorted(keys, key=keys.get)
    assert [(info.name, info.documents) for info in infos] == [("part-00000", len(low)), ("part-00001", 9 - len(low))]
    assert 0 < len(low) < 9
    assert verify_tokens(tmp_path) == []


def test_the_bytes_do_not_depend_on_the_order_of_the_work(tmp_path, encoder, real_texts, make_batch, monkeypatch):
    shards = [make_batch(real_texts[i::4], prefix=f"s{i}-") for i in range(4)]
    options = {"share": 0.2, "max_tokens": 20_100}
    shuffled(tmp_path / "a", encoder, shards, **options)
    monkeypatch.setattr(pieces, "GATHERED_IDS", 3_000)
    shuffled(tmp_path / "b", encoder, shards, order=[2, 0, 3, 1], **options)
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    assert verify_tokens(tmp_path / "a") == []
    assert any("-001" in name for name in files_of(tmp_path / "a"))


def test_the_order_does_not_depend_on_how_documents_were_dealt_to_shards(tmp_path, encoder, real_texts, make_batch):
    whole = make_batch(real_texts)
    cuts = {"one": [whole], "three": [whole.slice(0, 9), whole.slice(9, 40), whole.slice(49)]}
    for name, shards in cuts.items():
        shuffled(tmp_path / name, encoder, shards)
    assert documents(tmp_path / "one") == documents(tmp_path / "three")
    write_manifest(
        str(tmp_path / "plain"), write_shard([whole], encoder, str(tmp_path / "plain"), "part-00000"), encoder
    )
    plain = documents(tmp_path / "plain")
    assert plain != documents(tmp_path / "one")
    assert sorted(plain) == sorted(documents(tmp_path / "one"))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.text("ab \x01", min_size=1, max_size=12), max_size=8), min_size=1, max_size=5),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0.0, 0.4]),
)
def test_every_document_once_whatever_ids_they_have(tmp_path_factory, encoder, make_batch, texts, seed, share):
    """Ids are the same in all shards here, and so are some texts. Splits are what they are without shuffling."""
    folder = tmp_path_factory.mktemp("s")
    shards = [make_batch(of_shard) for of_shard in texts]
    shuffled(folder / "a", encoder, shards, seed=seed, share=share)
    infos = [
        info
        for i, shard in enumerate(shards)
        for info in write_shard([shard], encoder, str(folder / "b"), f"part-{i:05d}", share, source="docs")
    ]
    write_manifest(str(folder / "b"), infos, encoder, holdout_share=share)
    for split in ("sources", "holdout"):
        assert sorted(documents(folder / "a", split)) == sorted(documents(folder / "b", split))
    assert verify_tokens(folder / "a") == []


def test_keys_spread_over_all_ranges_and_differ_by_seed_id_and_text():
    """40,000 documents in 64 ranges: 625 each, of standard deviation 25."""
    ids, texts = pa.array([str(i) for i in range(40_000)]), pa.array(["same"] * 40_000)
    keys = order_keys(ids, texts, 0)
    counts = np.bincount([range_of(key, 64) for key in keys.tolist()], minlength=64)
    assert len(counts) == 64
    assert np.abs(counts - 625).max() < 6 * 25
    assert len(np.unique(keys)) == 40_000
    others = [order_keys(ids, texts, 1), order_keys(texts, ids, 0), order_keys(ids, ids, 0)]
    for other in others:
        assert (other != keys).all()
    # neighbours in the order are not neighbours in the corpus
    moved = np.abs(np.diff(np.argsort(keys)))
    assert 0.3 < moved.mean() / 40_000 < 0.37  # a third for a random permutation


def test_the_last_key_belongs_to_the_last_range():
    assert [range_of(key, 3) for key in (0, 2**64 // 3, 2**64 // 3 + 1, 2**64 - 1)] == [0, 0, 1, 2]


def test_more_shards_than_documents(tmp_path, encoder, make_batch):
    shards = [make_batch(["a"]), *[make_batch([]) for _ in range(6)]]
    infos = shuffled(tmp_path, encoder, shards)
    assert (len(infos), sum(info.documents for info in infos)) == (7, 1)
    assert verify_tokens(tmp_path) == []


def test_memory_is_that_of_the_documents_not_of_their_ids(tmp_path, encoder, make_batch):
    """1,200 documents of 5,000 ids, 12 MB of ids in all. What numpy holds at most is a few blocks."""
    texts = [f"{i:05d}" + "\x01" * 5_000 for i in range(150)]
    shards = [make_batch(texts, prefix=f"{i}-") for i in range(8)]
    cards = [scatter_shard([shard], encoder, str(tmp_path), f"part-{i:05d}", seed=1) for i, shard in enumerate(shards)]
    blocks = pieces.GATHERED_IDS
    try:
        pieces.GATHERED_IDS = 50_000
        tracemalloc.start()
        gather_shard(str(tmp_path), cards, 3, "part-00003")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pieces.GATHERED_IDS = blocks
    assert peak < 700_000  # a range holds 1.5 MB of ids


def test_a_document_longer_than_a_shard_is_named_before_anything_is_published(tmp_path, encoder, make_batch):
    with pytest.raises(TokenError, match=r"part-00000: document 'd1' has 41 tokens, more than the 20 of `max_tokens`"):
        shuffled(tmp_path, encoder, [make_batch(["a", "\x01" * 40])], max_tokens=20)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_changed_files_and_foreign_parts_are_refused(tmp_path, encoder, real_texts, make_batch):
    shards = [make_batch(real_texts[i::2], prefix=f"s{i}-") for i in range(2)]
    cards = [scatter_shard([shard], encoder, str(tmp_path), f"part-{i:05d}", seed=1) for i, shard in enumerate(shards)]
    other = cards[1].model_copy(update={"source": "web"})
    with pytest.raises(TokenError, match="parts of several sources or tokenizers cannot be merged"):
        gather_shard(str(tmp_path), [cards[0], other], 0, "part-00000")
    path = tmp_path / "shuffle/part-00001.ids"
    data = path.read_bytes()
    path.write_bytes(data[:-2])
    with pytest.raises(TokenError, match=r"part-00001\.ids: [\d,]+ bytes instead of"):
        gather_shard(str(tmp_path), cards, 0, "part-00000")
    path.write_bytes(bytes(len(data)))
    with pytest.raises(TokenError, match=r"part-00001\.ids: a document does not end with the end-of-text id 1199"):
        gather_shard(str(tmp_path), cards, 0, "part-00000")
    assert not list(tmp_path.glob("part-*"))
