"""Token shards: what is written is what is read, and whatever was changed since is refused, by name."""

from __future__ import annotations

import pickle
import re
import resource
import shutil

import numpy as np
import orjson
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from gristmill.mixtures.mixture import Mixture
from gristmill.tokenize import shards
from gristmill.tokenize.blocks import metadata_of
from gristmill.tokenize.encode import Encoder
from gristmill.tokenize.pieces import index_bytes
from gristmill.tokenize.sample import is_held_out
from gristmill.tokenize.shards import (
    INDEX_SCHEMA,
    MANIFEST_FILE,
    ShardInfo,
    TokenError,
    TokenManifest,
    TokenSet,
    dtype_for,
    map_file,
    read_index,
    read_manifest,
)
from gristmill.tokenize.tokenizer_json import token_byte_lengths
from gristmill.tokenize.verify import verify_tokens
from gristmill.tokenize.write import with_eos, write_manifest, write_shard


def files_of(folder):
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_every_document_comes_back(token_folder, real_texts):
    tokens = TokenSet.open(token_folder)
    assert (list(tokens.sources), list(tokens.holdout)) == (["docs", "web"], ["docs", "web"])
    decoder = Tokenizer.from_file(str(tokens.tokenizer_path))
    expected = {f"{prefix}{i}": text for prefix, part in _parts(real_texts) for i, text in enumerate(part)}
    found = {}
    for split in (tokens.sources, tokens.holdout):
        for source in split.values():
            for doc_id, ids, utf8_bytes in source.documents():
                assert doc_id not in found
                assert int(ids[-1]) == tokens.eos_id
                found[doc_id] = decoder.decode(ids[:-1].tolist(), skip_special_tokens=False)
                assert utf8_bytes == len(found[doc_id].encode())
    assert found == expected
    assert verify_tokens(token_folder) == []


def _parts(real_texts):
    return (("a", real_texts[:20]), ("b", real_texts[20:40]), ("c", real_texts[40:]))


def test_a_worked_example(tmp_path, make_batch):
    """A tokenizer of the 256 bytes: "Hi" is H, i; the file is 16-bit numbers and nothing else."""
    encoder = Encoder(_bytes_tokenizer())
    infos = write_shard([make_batch(["Hi", "a b"])], encoder, str(tmp_path), "part-00003", key="k")
    write_manifest(str(tmp_path), infos, encoder)
    tokens = TokenSet.open(str(tmp_path))
    names = Tokenizer.from_str(_bytes_tokenizer().decode()).get_vocab()
    ids = [names[piece] for piece in ("H", "i", "<|endoftext|>", "a", "Ġ", "b", "<|endoftext|>")]
    assert (tmp_path / "part-00003.bin").read_bytes() == b"".join(i.to_bytes(2, "little") for i in ids)
    assert infos[0].model_dump(include={"source", "split", "documents", "tokens", "bytes", "key"}) == {
        "source": "docs",
        "split": "train",
        "documents": 2,
        "tokens": 7,
        "bytes": 5,
        "key": "k",
    }
    docs = tokens.sources["docs"]
    assert docs.read(1, 4).tolist() == ids[1:5]
    assert docs.bounds(0, 7).tolist() == [0, 3]
    assert docs.bounds(1, 6).tolist() == [2]
    assert docs.bounds(1, 2).tolist() == []
    assert (docs.document_at(2), docs.document_at(3)) == (("d0", "part-00003", 0), ("d1", "part-00003", 1))
    index = read_index(map_file(tmp_path / "part-00003.idx"), "x").to_pylist()
    assert index[1] == {"doc_id": "d1", "source": "docs", "start": 3, "length": 4, "bytes": 3}


def _bytes_tokenizer():
    from gristmill.tokenize.train import TokenizerSettings, tokenizer_bytes, train

    return tokenizer_bytes(train({"a": [pa.array(["x"])]}, TokenizerSettings(vocab_size=257)))


def test_any_range_is_a_range_of_the_concatenation(token_folder):
    tokens = TokenSet.open(token_folder)
    docs = tokens.sources["docs"]
    whole = np.concatenate([ids for _, ids, _ in docs.documents()])
    starts = np.cumsum([0] + [len(ids) for _, ids, _ in docs.documents()])[:-1]
    names = [doc_id for doc_id, _, _ in docs.documents()]
    assert (len(docs.shards), docs.tokens, docs.documents_count) == (2, len(whole), len(starts))
    edge = docs.shards[0].tokens
    assert docs.read(edge - 3, 6).tolist() == whole[edge - 3 : edge + 3].tolist()

    @settings(max_examples=150, deadline=None)
    @given(st.data())
    def check(data):
        start = data.draw(st.integers(0, docs.tokens))
        length = data.draw(st.integers(0, docs.tokens - start))
        assert np.array_equal(docs.read(start, length), whole[start : start + length])
        inside = starts[(starts >= start) & (starts < start + length)] - start
        assert docs.bounds(start, length).tolist() == inside.tolist()
        if start < docs.tokens:
            assert docs.document_at(start)[0] == names[int(np.searchsorted(starts, start, side="right")) - 1]

    check()


def test_reads_are_views_and_cannot_be_written_to(token_folder):
    docs = TokenSet.open(token_folder).sources["docs"]
    window = docs.read(5, 10)
    assert (window.dtype, window.flags.writeable) == (np.uint16, False)
    assert np.shares_memory(window, docs.read(0, 20))


@pytest.mark.parametrize(("start", "length"), [(-1, 2), (0, -1), (0, None), (None, 1)])
def test_a_range_outside_the_source_is_refused(token_folder, start, length):
    docs = TokenSet.open(token_folder).sources["docs"]
    start, length = docs.tokens if start is None else start, docs.tokens + 1 if length is None else length
    for read in (docs.read, docs.bounds):
        with pytest.raises(TokenError, match=r"Source 'docs' \(train\) holds [\d,]+ tokens; the range"):
            read(start, length)


def test_a_source_can_be_sent_to_another_process(token_folder):
    docs = TokenSet.open(token_folder).sources["docs"]
    docs.read(0, 10)
    docs.bounds(0, 10)
    sent = pickle.dumps(docs)
    assert len(sent) < 5_000
    assert pickle.loads(sent).read(3, 50).tolist() == docs.read(3, 50).tolist()


def test_more_shards_than_open_files(tmp_path, make_batch):
    """Mapped files hold no descriptors: 90 shards are read under a limit of 64 open files."""
    encoder, infos = Encoder(_bytes_tokenizer()), []
    for i in range(90):
        infos += write_shard([make_batch(["some text", "more"])], encoder, str(tmp_path), f"part-{i:05d}")
    write_manifest(str(tmp_path), infos, encoder)
    docs = TokenSet.open(tmp_path).sources["docs"]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    try:
        assert len(docs.read(0, docs.tokens)) == docs.tokens == 90 * 15
        assert len(docs.bounds(0, docs.tokens)) == 180
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_shards_beyond_4_gib_and_2_to_the_31_tokens(tmp_path, tokenizer_json):
    """A sparse file: documents of 2^20 ids, 0 but for the last, and a short one beyond 2^31. Read, verified, mixed."""
    encoder, path = Encoder(tokenizer_json), tmp_path / "part-00000.bin"
    lengths = np.array([2**20] * 2048 + [11])
    ends = np.cumsum(lengths)
    total = int(ends[-1])
    with open(path, "wb") as file:
        for end in ends.tolist():
            file.seek(2 * (end - 1))
            file.write((1199).to_bytes(2, "little"))
    ids = np.memmap(path, "<u2", "r")
    utf8 = (lengths - 1) * int(token_byte_lengths(tokenizer_json)[0])
    columns = [[f"d{i}" for i in range(2049)], ["docs"] * 2049, ends - lengths, lengths, utf8]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, INDEX_SCHEMA, strict=True)]
    index = index_bytes(pa.Table.from_arrays(arrays, schema=INDEX_SCHEMA), metadata_of(ids.data))
    (tmp_path / "part-00000.idx").write_bytes(index)
    hashes = {"bin_xxh3": xxhash.xxh3_128_hexdigest(ids.data), "idx_xxh3": xxhash.xxh3_128_hexdigest(index)}
    info = ShardInfo(
        name="part-00000", source="docs", split="train", documents=2049, tokens=total, bytes=int(utf8.sum()),
        idx_bytes=len(index), **hashes,
    )  # fmt: skip
    write_manifest(str(tmp_path), [info], encoder)
    docs = TokenSet.open(tmp_path).sources["docs"]
    assert (docs.tokens, path.stat().st_size) == (2**31 + 11, 2**32 + 22)
    assert docs.read(2**31 - 2, 4).tolist() == [0, 1199, 0, 0]
    assert docs.bounds(2**31 - 7, 18).tolist() == [7]
    assert docs.document_at(2**31) == ("d2048", "part-00000", 2048)
    plan = Mixture(name="m", sources={"docs": 1}).plan(TokenSet.open(tmp_path), 2**20, 2**31)
    at = next(i for i in range(2048) if plan.locate(i)[2] == 2047)
    (batch,) = plan.loader(start_window=at).batch(at).tokens
    assert batch.tolist() == docs.read(2**31 - 2**20, 2**20 + 1).tolist()
    assert verify_tokens(tmp_path) == []
    with open(path, "r+b") as file:
        file.seek(2**32 + 5)
        file.write(b"\1")
    (wrong, decoded) = verify_tokens(tmp_path)
    assert "in ids 2,147,483,648 to 2,147,483,658, of document 2048 ('d2048')" in wrong
    assert "document 2048" in decoded
    with pytest.raises(TokenError, match=r"part-00000\.bin: .* of document 2048 \('d2048'\)"):
        TokenSet.open(tmp_path).sources["docs"].read(2**31 + 5, 1)


def test_the_same_bytes_whatever_the_batches_and_the_encoder(tmp_path, tokenizer_json, real_texts, make_batch):
    whole = make_batch(real_texts)
    cuts = {
        "one": ([whole], "auto"),
        "many": ([whole.slice(i, 1) for i in range(whole.num_rows)], "auto"),
        "uneven": ([whole.slice(0, 7), whole.slice(7, 0), whole.slice(7)], "gigatoken"),
        "slow": ([whole.slice(0, 11), whole.slice(11)], "tokenizers"),
    }
    written = {}
    for name, (batches, backend) in cuts.items():
        encoder, folder = Encoder(tokenizer_json, backend=backend), tmp_path / name
        infos = write_shard(batches, encoder, str(folder), "part-00000", 0.3)
        write_manifest(str(folder), infos, encoder, holdout_share=0.3)
        written[name] = files_of(folder)
        assert encoder.active == ("tokenizers" if backend == "tokenizers" else "gigatoken")
    assert len(written["one"]) == 6
    for name in cuts:
        assert written[name] == written["one"]


def test_an_empty_part_is_legal(tmp_path, tokenizer_json, make_batch):
    encoder = Encoder(tokenizer_json)
    infos = write_shard([make_batch([])], encoder, str(tmp_path), "part-00000", 0.1, source="docs")
    infos += write_shard([make_batch(["x", "y"])], encoder, str(tmp_path), "part-00001", 0.0)
    infos += write_shard([], encoder, str(tmp_path), "part-00002", source="void")
    write_manifest(str(tmp_path), infos, encoder, holdout_share=0.1)
    assert (tmp_path / "part-00000.bin").stat().st_size == 0
    tokens = TokenSet.open(tmp_path)
    assert tokens.sources["docs"].tokens == 4
    assert (tokens.sources["void"].tokens, tokens.sources["void"].read(0, 0).tolist()) == (0, [])
    assert list(tokens.holdout["docs"].documents()) == []
    assert verify_tokens(tmp_path) == []
    with pytest.raises(TokenError, match="no documents, and no source named"):
        write_shard([], encoder, str(tmp_path), "part-00009")


@pytest.mark.parametrize("bad", [["a", ""], ["a", None]])
def test_documents_without_text_are_refused_and_nothing_is_published(tmp_path, tokenizer_json, make_batch, bad):
    with pytest.raises(TokenError, match="part-00000: document 'd1' has no text"):
        write_shard([make_batch(["fine"]), make_batch(bad)], Encoder(tokenizer_json), str(tmp_path), "part-00000")
    assert list(tmp_path.iterdir()) == []


def test_a_shard_of_two_sources_is_refused(tmp_path, tokenizer_json, make_batch):
    encoder = Encoder(tokenizer_json)
    with pytest.raises(TokenError, match="documents of 'web' came for the shard of 'docs'"):
        write_shard([make_batch(["a"]), make_batch(["b"], "web")], encoder, str(tmp_path), "part-00000")
    with pytest.raises(TokenError, match="documents of 'docs' came for the shard of 'web'"):
        write_shard([make_batch(["a"])], encoder, str(tmp_path), "part-00000", source="web")
    with pytest.raises(TokenError, match="part-NNNNN, not 'x'"):
        write_shard([], encoder, str(tmp_path), "x", source="web")
    info = write_shard([make_batch(["a"])], encoder, str(tmp_path), "part-00000")
    with pytest.raises(TokenError, match="Two token shards have the name part-00000"):
        write_manifest(str(tmp_path), info * 2, encoder)
    with pytest.raises(TokenError, match="from 0 to below 1, not 1"):
        write_shard([make_batch(["a"])], encoder, str(tmp_path), "part-00000", 1)


def test_writing_to_another_file_system(tokenizer_json, make_batch, monkeypatch, tmp_path):
    import fsspec

    encoder, folder = Encoder(tokenizer_json), "memory://tokens-test/run"
    infos = write_shard([make_batch(["a", "b"])], encoder, folder, "part-00000")
    write_manifest(folder, infos, encoder)
    names = {path.rsplit("/", 1)[1] for path in fsspec.filesystem("memory").ls("/tokens-test/run", detail=False)}
    assert names == {"part-00000.bin", "part-00000.idx", "shards.json", "tokenizer.json"}
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path))
    assert TokenSet.open(folder).sources["docs"].tokens == infos[0].tokens  # mapped in a local copy


def test_large_vocabularies_use_32_bits(wide_folder):
    tokens = TokenSet.open(wide_folder)
    _, ids, _ = next(tokens.sources["docs"].documents())
    assert (tokens.dtype, ids.dtype, tokens.vocab_size) == (np.dtype("<u4"), np.uint32, 67_200)
    assert int(ids.max()) == 67_199
    decoder = Tokenizer.from_file(str(tokens.tokenizer_path))
    assert decoder.decode(ids[:-1].tolist()) == "a<w65999>b<w7>"
    assert (wide_folder / "part-00000.bin").stat().st_size == 4 * tokens.sources["docs"].tokens
    assert verify_tokens(wide_folder) == []
    assert [dtype_for(size).name for size in (1, 65_536, 65_537)] == ["uint16", "uint16", "uint32"]


def test_the_held_out_split_depends_on_the_text_alone(real_texts):
    texts = [f"{i} {text[:50]}" for text in real_texts for i in range(60)]
    held = is_held_out(pa.array(texts), 0.1)
    assert 0.08 < held.mean() < 0.12
    shuffled = np.random.default_rng(1).permutation(len(texts))
    assert np.array_equal(is_held_out(pa.array([texts[i] for i in shuffled] + ["more"]), 0.1)[:-1], held[shuffled])
    more = is_held_out(pa.array(texts), 0.3)
    assert (more >= held).all()
    assert not is_held_out(pa.array(texts), 0).any()


def test_the_held_out_split_is_stable_and_disjoint_on_disk(tmp_path, tokenizer_json, real_texts, make_batch):
    def split(folder, texts):
        encoder = Encoder(tokenizer_json)
        infos = write_shard([make_batch(texts)], encoder, str(folder), "part-00000", 0.3)
        write_manifest(str(folder), infos, encoder, holdout_share=0.3)
        tokens = TokenSet.open(folder)
        return ({doc_id for doc_id, _, _ in part["docs"].documents()} for part in (tokens.sources, tokens.holdout))

    train, holdout = split(tmp_path / "small", real_texts[:30])
    grown_train, grown_holdout = split(tmp_path / "grown", real_texts)
    assert train & holdout == set()
    assert (len(train) + len(holdout), holdout != set(), train != set()) == (30, True, True)
    assert grown_train & grown_holdout == set()
    assert (train <= grown_train, holdout <= grown_holdout) == (True, True)


@given(st.lists(st.integers(0, 6), max_size=12))
def test_end_of_text_ids_stand_after_each_document(lengths):
    ids = np.arange(sum(lengths), dtype=np.uint16)
    found = with_eos(ids, np.array(lengths, np.int64), 999).tolist()
    expected, at = [], 0
    for length in lengths:
        expected += [*range(at, at + length), 999]
        at += length
    assert found == expected


# ----- what was changed after writing


def replace_info(folder, **changes):
    """Rewrites the manifest with a valid digest and another first shard."""
    manifest = read_manifest(folder)
    shards = [manifest.shards[0].model_copy(update=changes), *manifest.shards[1:]]
    (folder / MANIFEST_FILE).write_bytes(manifest.model_copy(update={"shards": shards}).sealed())


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(bytes(data))


def test_a_flipped_bit_anywhere_is_found(token_folder):
    for name in ("part-00000.bin", "part-00001.idx", "holdout-00002.bin"):
        path = token_folder / name
        original = path.read_bytes()
        for at in (0, len(original) // 2, len(original) - 1):
            flip(path, at)
            problems = verify_tokens(token_folder)
            assert any(f"{name}: its checksum is not the one in shards.json" in problem for problem in problems)
            path.write_bytes(original)
    assert verify_tokens(token_folder) == []


@pytest.mark.parametrize("change", [1, 0x80, 0xFF])
def test_an_index_with_any_changed_byte_is_named_and_nothing_else_happens(token_folder, change):
    """Lengths and offsets of Arrow are among them: read as they stand they lead outside of the file."""
    path = token_folder / "part-00001.idx"
    original = path.read_bytes()
    for at in range(0, len(original), 31):
        data = bytearray(original)
        data[at] ^= change
        path.write_bytes(bytes(data))
        assert any("its checksum is not the one" in problem for problem in verify_tokens(token_folder))


def test_the_loader_refuses_a_changed_index(token_folder):
    path = token_folder / "part-00001.idx"
    flip(path, path.stat().st_size // 2)
    docs = TokenSet.open(token_folder).sources["docs"]
    with pytest.raises(TokenError, match=r"part-00001\.idx: its checksum is not the one in shards\.json"):
        docs.bounds(0, docs.tokens)


def test_the_loader_refuses_a_flipped_bit(token_folder, monkeypatch):
    """An id that is as good as the right one, in the middle of a document: file and document are named."""
    path = token_folder / "part-00001.bin"
    flip(path, 10)
    words = r"part-00001\.bin: its checksum is not the one in shards\.json: .* in ids 0 to [\d,]+, of document"
    docs = TokenSet.open(token_folder).sources["docs"]
    first = docs.shards[0].tokens
    assert len(docs.read(0, first)) == first  # the other file is sound
    with pytest.raises(TokenError, match=words):
        docs.read(first, 1)
    assert any(re.search(words, problem) for problem in verify_tokens(token_folder))
    monkeypatch.setattr(shards, "CHECKED_BYTES", 1_000)  # a set that is too large to be read by all who open it
    with pytest.raises(TokenError, match=r"part-00001\.bin: the checksum of a block is not the one in its index"):
        TokenSet.open(token_folder).sources["docs"].read(first, 1)
    with pytest.raises(TokenError, match=words):
        TokenSet.open(token_folder, check="bytes").sources["docs"].read(first, 1)
    assert len(TokenSet.open(token_folder, check="sizes").sources["docs"].read(first, 1)) == 1


@pytest.mark.parametrize("name", ["part-00000.bin", "part-00000.idx", "holdout-00001.bin"])
def test_truncated_grown_and_missing_files_are_refused(token_folder, name):
    path = token_folder / name
    original = path.read_bytes()
    for data, words in ((original[:-2], "was truncated"), (b"", "was truncated"), (original + b"\0\0", "has grown")):
        path.write_bytes(data)
        with pytest.raises(TokenError, match=rf"{name}: [\d,]+ bytes, but shards\.json says .* {words}"):
            TokenSet.open(token_folder)
        assert any(name in problem for problem in verify_tokens(token_folder))
    path.unlink()
    with pytest.raises(TokenError, match=f"{name}: no such file, but shards.json lists it"):
        TokenSet.open(token_folder)
    assert any(f"{name}: no such file" in problem for problem in verify_tokens(token_folder))


def test_a_foreign_tokenizer_is_refused(token_folder, tokenizers_by_split):
    (token_folder / "tokenizer.json").write_bytes(tokenizers_by_split["gpt2", False])
    with pytest.raises(TokenError, match=r"tokenizer\.json: this is not the tokenizer that made the shards"):
        TokenSet.open(token_folder)
    assert "tokenizer.json: not the tokenizer that made the shards" in verify_tokens(token_folder)[0]
    (token_folder / "tokenizer.json").unlink()
    with pytest.raises(TokenError, match=r"tokenizer\.json: no such file"):
        TokenSet.open(token_folder)
    assert "tokenizer.json: no such file" in verify_tokens(token_folder)[0]


def test_a_shard_of_another_run_is_refused(token_folder, tmp_path, tokenizers_by_split, real_texts, make_batch):
    other = Encoder(tokenizers_by_split["gpt2", False])
    write_shard([make_batch(real_texts[:20], prefix="a")], other, str(tmp_path / "other"), "part-00000", 0.2)
    shutil.copy(tmp_path / "other" / "part-00000.bin", token_folder / "part-00000.bin")
    with pytest.raises(TokenError, match=r"part-00000\.bin: [\d,]+ bytes, but"):
        TokenSet.open(token_folder)


def test_a_file_of_the_right_size_that_is_no_shard_is_refused(token_folder):
    path = token_folder / "part-00000.bin"
    path.write_bytes(bytes(path.stat().st_size))
    docs = TokenSet.open(token_folder).sources["docs"]
    with pytest.raises(TokenError, match=r"part-00000\.bin: the last id is 0, not the end-of-text id 1199"):
        docs.read(0, 1)


def test_a_changed_manifest_is_refused(token_folder):
    path = token_folder / MANIFEST_FILE
    good = orjson.loads(path.read_bytes())
    cases = {
        "its digest does not match": good | {"vocab_size": 1_201},
        "format version 2; this program reads version 1": good | {"version": 2},
        "not a manifest": good | {"extra": 1},
        "format version None": {},
    }
    for words, content in cases.items():
        path.write_bytes(orjson.dumps(content))
        with pytest.raises(TokenError, match=words):
            TokenSet.open(token_folder)
        assert words in verify_tokens(token_folder)[0]
    path.write_bytes(b"{")
    with pytest.raises(TokenError, match="not a manifest of token shards"):
        TokenSet.open(token_folder)
    manifest = TokenManifest.model_validate(good).model_copy(update={"dtype": "uint32"})
    path.write_bytes(manifest.sealed())
    with pytest.raises(TokenError, match="dtype uint32 does not go with a vocabulary of 1,200; uint16 does"):
        TokenSet.open(token_folder)
    path.unlink()
    with pytest.raises(TokenError, match="tokenizing did not finish; run the recipe again"):
        TokenSet.open(token_folder)


def rewrite(folder, name, change):
    """Writes a changed .bin under a manifest whose checksums fit, as a faulty writer would."""

    path = folder / f"{name}.bin"
    ids = np.frombuffer(path.read_bytes(), "<u2").copy()
    change(ids)
    path.write_bytes(ids.tobytes())
    replace_info(folder, bin_xxh3=xxhash.xxh3_128_hexdigest(path.read_bytes()))


def test_verify_says_what_is_wrong_with_ids_and_where(token_folder):
    first = TokenSet.open(token_folder).sources["docs"].shards[0]
    table = read_index(map_file(token_folder / first.idx), "x")
    end = int(table["start"][1].as_py()) - 1
    names = [value.as_py() for value in table["doc_id"]]
    original = (token_folder / first.bin).read_bytes()

    def problems(change):
        rewrite(token_folder, first.name, change)
        found = verify_tokens(token_folder)
        (token_folder / first.bin).write_bytes(original)
        return found

    def put(at, value):
        def change(ids):
            ids[at] = value

        return change

    where = f"{token_folder / first.bin}: "
    assert problems(put(end + 2, 1_200)) == [
        f"{where}id 1200 at position {end + 2:,} (document 1, {names[1]!r}) is outside the vocabulary of 1,200."
    ]
    assert problems(put(end + 2, 1_199))[0] == (
        f"{where}special id 1199 at position {end + 2:,}, inside document 1 ({names[1]!r})."
    )
    assert problems(put(end, 5))[0] == (
        f"{where}document 0 ({names[0]!r}) ends with id 5, not with the end-of-text id 1199."
    )
    lengths = token_byte_lengths((token_folder / "tokenizer.json").read_bytes())
    now = int(np.frombuffer(original, "<u2")[end + 1])
    byte_counts = problems(put(end + 1, int(np.argmax((lengths != lengths[now]) & (lengths > 0)))))
    assert byte_counts[0].startswith(f"{where}document 1 ({names[1]!r}) decodes to ")


def test_verify_says_what_is_wrong_with_an_index(token_folder):

    first = TokenSet.open(token_folder).sources["docs"].shards[0]
    path = token_folder / first.idx
    table = read_index(pa.py_buffer(path.read_bytes()), "x")
    ids = table["doc_id"].to_pylist()

    def problems(name, row, value, **changes):
        column = table[name].to_pylist()
        column[row] = value
        at = table.schema.get_field_index(name)
        data = index_bytes(table.set_column(at, table.schema.field(at), pa.array(column, table.schema.field(at).type)))
        path.write_bytes(data)
        replace_info(token_folder, idx_bytes=len(data), idx_xxh3=xxhash.xxh3_128_hexdigest(data), **changes)
        return "\n".join(verify_tokens(token_folder))

    assert f"document 1 ({ids[1]!r}) starts at 5, but the one before it ends at" in problems("start", 1, 5)
    assert f"document 0 ({ids[0]!r}) is empty" in problems("length", 0, 1)
    assert f"document {ids[0]!r} is listed more than once" in problems("doc_id", 2, ids[0])
    assert "holds documents of source 'web', but shards.json says 'docs'" in problems("source", 1, "web")
    assert "bytes of text, but shards.json says" in problems("bytes", 0, 1)
    assert "documents, but shards.json says 99" in problems("bytes", 0, 1, documents=99)
    path.write_bytes(b"not arrow")
    replace_info(token_folder, idx_bytes=9, idx_xxh3=xxhash.xxh3_128_hexdigest(b"not arrow"))
    assert "not an index of documents" in "\n".join(verify_tokens(token_folder))


def test_verify_names_files_that_do_not_belong(token_folder):
    (token_folder / "part-00099.bin").write_bytes(b"")
    assert verify_tokens(token_folder) == [
        f"{token_folder / 'part-00099.bin'}: not listed in shards.json: left from another run. Delete it."
    ]
