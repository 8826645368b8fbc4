"""Exports are read by the peers' own readers where these install, and by readers of bytes written here elsewhere."""

from __future__ import annotations

import csv
import gzip
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from tokenizers import AddedToken, Tokenizer

from gristmill.tokenize import export
from gristmill.tokenize.adopt import adopt_tokens
from gristmill.tokenize.encode import Encoder
from gristmill.tokenize.export import export_tokens
from gristmill.tokenize.shards import TokenError, TokenSet
from gristmill.tokenize.verify import verify_tokens
from gristmill.tokenize.write import write_manifest, write_shard


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(export, "BLOCK_IDS", 1_000)  # so that every export takes several


@pytest.fixture
def tokens(token_folder):
    return TokenSet.open(token_folder)


@pytest.fixture
def wide_tokens(wide_folder):
    """A vocabulary above 65,536, so ids of 32 bits."""
    return TokenSet.open(wide_folder)


def documents_of(source):
    return [ids.tolist() for _, ids, _ in source.documents()]


def read_megatron(stem):
    """The documents of a Megatron-LM file, by the layout of `indexed_dataset.py`, one field after the other."""
    data = (stem.with_name(stem.name + ".idx")).read_bytes()
    assert data[:9] == b"MMIDIDX\x00\x00"
    (version,) = struct.unpack_from("<Q", data, 9)
    (code,) = struct.unpack_from("<B", data, 17)
    (sequences,) = struct.unpack_from("<Q", data, 18)
    (entries,) = struct.unpack_from("<Q", data, 26)
    assert version == 1
    dtype = {8: np.uint16, 4: np.int32}[code]
    lengths = struct.unpack_from(f"<{sequences}i", data, 34)
    pointers = struct.unpack_from(f"<{sequences}q", data, 34 + 4 * sequences)
    documents = struct.unpack_from(f"<{entries}q", data, 34 + 12 * sequences)
    assert len(data) == 34 + 12 * sequences + 8 * entries
    assert documents == tuple(range(sequences + 1))
    ids = stem.with_name(stem.name + ".bin").read_bytes()
    return [
        np.frombuffer(ids, dtype, count=length, offset=at).tolist()
        for length, at in zip(lengths, pointers, strict=True)
    ]


def test_megatron(tokens, wide_tokens, tmp_path):
    written = export_tokens(tokens, "megatron", str(tmp_path / "m"))
    names = {path.rsplit("/", 1)[1] for path in written}
    assert names == {f"{s}_{p}.{e}" for s in ("docs", "web") for p in ("train", "holdout") for e in ("bin", "idx")}
    for name, source in tokens.sources.items():
        assert read_megatron(tmp_path / "m" / f"{name}_train") == documents_of(source)
        assert read_megatron(tmp_path / "m" / f"{name}_holdout") == documents_of(tokens.holdout[name])
    export_tokens(wide_tokens, "megatron", str(tmp_path / "w"))
    found = read_megatron(tmp_path / "w" / "docs_train")
    assert found == documents_of(wide_tokens.sources["docs"])
    assert max(map(max, found)) == 67_199


def test_datatrove_reads_its_format(tokens, wide_tokens, tmp_path):
    torch_data = pytest.importorskip("datatrove.utils.dataset")
    for tokens_of, width in ((tokens, 2), (wide_tokens, 4)):
        folder = tmp_path / f"d{width}"
        export_tokens(tokens_of, "datatrove", str(folder))
        source = tokens_of.sources["docs"]
        path = folder / "docs_train.ds"
        dataset = torch_data.DatatroveFileDataset(str(path), seq_len=63, token_size=width, return_positions=True)
        assert len(dataset) == source.tokens // 64
        for window in range(0, len(dataset), 17):
            item = dataset[window]
            assert item["input_ids"].tolist() == source.read(window * 64, 64).tolist()
            starts = source.bounds(window * 64, 64)
            expected = [at - max([0, *starts[starts <= at]]) for at in range(64)]
            assert item["positions"].tolist() == expected
        del dataset
        name, count, _ = (folder / "docs_train.ds.metadata").read_text().split("\n")
        assert (name, count) == (f"tokenizer.json|{width}", str(source.tokens))
        ends = struct.unpack(f"<{source.documents_count}Q", (folder / "docs_train.ds.index").read_bytes())
        assert list(ends) == np.cumsum([len(ids) for ids in documents_of(source)]).tolist()


def test_nanogpt(tokens, wide_tokens, tmp_path):
    export_tokens(tokens, "nanogpt", str(tmp_path))
    for file, source in (("train.bin", tokens.sources["docs"]), ("val.bin", tokens.holdout["docs"])):
        data = np.memmap(tmp_path / "docs" / file, dtype=np.uint16, mode="r")  # as its train.py does
        assert data.tolist() == source.read(0, source.tokens).tolist()
    with pytest.raises(TokenError, match="nanoGPT reads 16-bit ids; a vocabulary of 67,200 does not fit"):
        export_tokens(wide_tokens, "nanogpt", str(tmp_path))


def test_nanogpt_needs_held_out_tokens(tmp_path, tokenizer_json, make_batch):
    encoder = Encoder(tokenizer_json)
    infos = write_shard([make_batch(["a"])], encoder, str(tmp_path / "t"), "part-00000")
    write_manifest(str(tmp_path / "t"), infos, encoder)
    with pytest.raises(TokenError, match="'docs' has 2 tokens to train on and 0 held out"):
        export_tokens(TokenSet.open(tmp_path / "t"), "nanogpt", str(tmp_path / "n"))


def read_llmc(path, magic, version, dtype):
    """The ids of a file of llm.c, by the layout of `dataloader.h`: a header of 256 int32, then ids."""
    data = path.read_bytes()
    header = struct.unpack_from("<256i", data)
    assert header[:2] == (magic, version)
    assert set(header[3:]) == {0}
    ids = np.frombuffer(data, dtype, offset=1024)
    assert len(ids) == header[2]
    return ids.tolist()


def test_llmc(tokens, wide_tokens, tmp_path):
    source, size = tokens.sources["docs"], 5_003
    written = export_tokens(tokens, "llmc", str(tmp_path / "l"), shard_ids=size)
    found = []
    for number in range(1, -(-source.tokens // size) + 1):
        path = tmp_path / "l" / f"docs_train_{number:06d}.bin"
        assert str(path) in written
        found += read_llmc(path, 20240520, 1, np.uint16)
    expected = [i for ids in documents_of(source) for i in [ids[-1], *ids[:-1]]]
    assert found == expected
    assert (tmp_path / "l" / "web_val_000000.bin").exists()
    wide = wide_tokens.sources["docs"]
    export_tokens(wide_tokens, "llmc", str(tmp_path / "w"))
    ids = read_llmc(tmp_path / "w" / "docs_train_000001.bin", 20240801, 7, np.uint32)
    assert ids == [i for ids in documents_of(wide) for i in [ids[-1], *ids[:-1]]]
    for shard_ids in (0, 1 << 30):
        with pytest.raises(TokenError, match="must stay below 2 GiB"):
            export_tokens(tokens, "llmc", str(tmp_path), shard_ids=shard_ids)


def test_olmo(tokens, tmp_path):
    export_tokens(tokens, "olmo", str(tmp_path))
    source = tokens.sources["docs"]
    ids = np.memmap(tmp_path / "docs_train.npy", dtype=np.uint16, mode="r").tolist()
    with gzip.open(tmp_path / "docs_train.csv.gz", "rt") as file:
        rows = list(csv.reader(file))
    assert [ids[int(start) : int(end)] for start, end, *_ in rows] == documents_of(source)
    assert [row[2:] for row in rows] == [[d, "docs", str(i)] for i, (d, _, _) in enumerate(source.documents())]


@pytest.mark.parametrize("kind", ["megatron", "datatrove", "nanogpt", "llmc", "olmo"])
def test_exports_are_deterministic(tokens, tmp_path, kind):
    first, second = (
        export_tokens(tokens, kind, str(tmp_path / name), **({"shard_ids": 9_999} if kind == "llmc" else {}))
        for name in ("a", "b")
    )
    read = [[Path(path).read_bytes() for path in paths] for paths in (first, second)]
    assert read[0] == read[1]


def test_an_unknown_format_is_named(tokens, tmp_path):
    with pytest.raises(TokenError, match="no export format 'mds'; choose one of megatron, datatrove"):
        export_tokens(tokens, "mds", str(tmp_path))


# ----- the other way


@pytest.mark.parametrize("kind", ["megatron", "datatrove"])
def test_exports_come_back_as_they_were(tokens, tmp_path, tokenizer_json, kind):
    export_tokens(tokens, kind, str(tmp_path / "x"))
    suffix = {"megatron": ".idx", "datatrove": ".ds"}[kind]
    paths = [tmp_path / "x" / f"docs_{split}{suffix}" for split in ("train", "holdout")]
    manifest = adopt_tokens(paths, tmp_path / "back", tokenizer_json, source="docs", eos_token="<|endoftext|>")
    back = TokenSet.open(tmp_path / "back").sources["docs"]
    assert documents_of(back) == documents_of(tokens.sources["docs"]) + documents_of(tokens.holdout["docs"])
    assert back.utf8_bytes == tokens.sources["docs"].utf8_bytes + tokens.holdout["docs"].utf8_bytes
    assert (tmp_path / "back" / "part-00000.bin").is_symlink()
    assert manifest.plain_text
    assert verify_tokens(tmp_path / "back") == []


@pytest.mark.parametrize(
    ("kind", "wide"), [("nanogpt", False), ("llmc", False), ("llmc", True), ("olmo", False), ("olmo", True)]
)
def test_plain_files_come_back_as_they_were(tokens, wide_tokens, tmp_path, kind, wide):
    given = wide_tokens if wide else tokens
    export_tokens(given, kind, str(tmp_path / "x"), shard_ids=1_500)
    paths = {"nanogpt": ["docs/train.bin"], "olmo": ["docs_train.npy"]}.get(kind)
    found = [tmp_path / "x" / name for name in paths] if paths else sorted((tmp_path / "x").glob("docs_train_*.bin"))
    assert len(found) > 3 or kind != "llmc"  # documents go on from file to file
    data = given.tokenizer_path.read_bytes()
    manifest = adopt_tokens(found, tmp_path / "back", data, source="docs", eos_token="<|endoftext|>")
    back, own = TokenSet.open(tmp_path / "back").sources["docs"], given.sources["docs"]
    assert documents_of(back) == documents_of(own)
    assert back.utf8_bytes == own.utf8_bytes
    assert [info.name for info in manifest.shards] == ["part-00000"]
    assert (tmp_path / "back/part-00000.bin").is_symlink() == (kind != "llmc")
    names = [doc_id for doc_id, _, _ in back.documents()]
    assert names == [doc_id for doc_id, _, _ in own.documents()] if kind == "olmo" else len(set(names)) == len(names)
    assert verify_tokens(tmp_path / "back") == []
    again = adopt_tokens(found, tmp_path / "back", data, source="docs", eos_token="<|endoftext|>")
    assert again == manifest  # into the same folder


def test_plain_files_as_the_peers_write_them(tmp_path, tokenizer_json):
    """nanoGPT's prepare.py: ids, then the end of text. llm.c's fineweb.py: the end of text, then ids; a header of 256
    int32; a document that does not fit goes on in the next file. dolma: the raw array of numpy.memmap, no bounds."""
    docs, eos = [[5, 6, 7], [8], [9, 10, 11, 12]], 1199
    np.array([i for doc in docs for i in (*doc, eos)], np.uint16).tofile(tmp_path / "train.bin")
    stored = np.memmap(tmp_path / "part-0-00000.npy", np.uint16, "w+", shape=(11,))
    stored[:] = [i for doc in docs for i in (*doc, eos)]
    stored.flush()
    stream = np.array([i for doc in docs for i in (eos, *doc)], np.uint16)
    for number, part in enumerate((stream[:3], stream[3:10], stream[10:])):
        head = np.zeros(256, np.int32)
        head[:3] = 20240520, 1, len(part)
        (tmp_path / f"f_{number:06d}.bin").write_bytes(head.tobytes() + part.tobytes())
    files = [tmp_path / "train.bin", tmp_path / "part-0-00000.npy", *sorted(tmp_path.glob("f_*.bin"))]
    manifest = adopt_tokens(files, tmp_path / "out", tokenizer_json, source="s", eos_token="<|endoftext|>")
    assert [(info.documents, info.tokens) for info in manifest.shards] == [(3, 11)] * 3
    assert documents_of(TokenSet.open(tmp_path / "out").sources["s"]) == 3 * [[*doc, eos] for doc in docs]
    assert verify_tokens(tmp_path / "out") == []


def test_plain_files_that_cannot_be_adopted_are_named(tokens, wide_tokens, tmp_path, tokenizer_json):
    for kind in ("nanogpt", "llmc", "olmo", "megatron"):
        export_tokens(tokens, kind, str(tmp_path / kind), shard_ids=1_500)

    def refused(path, words, tokenizer=tokenizer_json):
        with pytest.raises(TokenError, match=words):
            adopt_tokens([path], tmp_path / "out", tokenizer, source="s", eos_token="<|endoftext|>")
        assert not (tmp_path / "out" / "shards.json").exists()

    nano, npy = tmp_path / "nanogpt/docs/train.bin", tmp_path / "olmo/docs_train.npy"
    llmc = sorted((tmp_path / "llmc").glob("docs_train_*.bin"))
    refused(tmp_path / "megatron/docs_train.bin", r"its index lies beside it. Give .*docs_train\.idx instead")
    refused(llmc[1], r"docs_train_000002\.bin: begins with id \d+, inside a document")
    refused(llmc[0], "its ids have 2 bytes, but those of .* with 4", wide_tokens.tokenizer_path.read_bytes())
    llmc[0].write_bytes(llmc[0].read_bytes()[:-2])
    refused(llmc[0], r"but its header says 1,500 ids: it was truncated")
    original = nano.read_bytes()
    nano.write_bytes(original[:-2])
    refused(nano, r"train\.bin: the last document does not end with the end-of-text id 1199")
    nano.write_bytes(original[:-1])
    refused(nano, r"train\.bin: .* bytes are no whole number of ids of 2 bytes")
    nano.write_bytes(original[-2:] + original)
    refused(nano, r"train\.bin: document 0 holds no text")
    bounds = npy.with_suffix(".csv.gz")
    rows = gzip.decompress(bounds.read_bytes()).decode().splitlines()
    bounds.write_bytes(gzip.compress("\n".join([rows[0], *rows[2:]]).encode()))
    refused(npy, r"docs_train\.csv\.gz: line 2 does not begin where the document before it ends")
    bounds.write_bytes(gzip.compress(b"a,b,c"))
    refused(npy, r"docs_train\.csv\.gz: not the bounds of dolma")
    bounds.write_bytes(gzip.compress("\n".join(rows[:-1]).encode()))
    refused(npy, "ids, but its index says .* one was truncated")
    np.save(npy, np.zeros(4, np.uint16))
    refused(npy, "this is a file of numpy with a header")
    refused(tmp_path / "olmo/docs_train.csv.gz", "not a name of Megatron-LM")


@pytest.fixture
def by_datatrove(tmp_path, tokenizer_json, real_texts):
    """Files that datatrove's own tokenizers wrote -> folder."""
    pytest.importorskip("datatrove")
    from datatrove.data import Document
    from datatrove.pipeline.tokens import DocumentTokenizer, MegatronDocumentTokenizer

    path = tmp_path / "tokenizer.json"
    path.write_bytes(tokenizer_json)
    common = {"tokenizer_name_or_path": str(path), "eos_token": "<|endoftext|>"}
    pages = [Document(text=text, id=str(i)) for i, text in enumerate(real_texts[:10])]
    DocumentTokenizer(str(tmp_path / "ds"), **common, shuffle_documents=False).run(iter(pages))
    MegatronDocumentTokenizer(str(tmp_path / "mg"), **common).run(iter(pages))
    return tmp_path


@pytest.mark.parametrize(("folder", "pattern"), [("ds", "*.ds"), ("mg", "*.idx")])
def test_files_that_datatrove_wrote_are_read_where_they_lie(by_datatrove, tokenizer_json, real_texts, folder, pattern):
    (path,) = (by_datatrove / folder).glob(pattern)
    target = by_datatrove / "adopted"
    adopt_tokens([path], target, tokenizer_json, source="theirs", eos_token="<|endoftext|>")
    source = TokenSet.open(target).sources["theirs"]
    expected = Encoder(tokenizer_json).encode(pa.array(real_texts[:10]))
    ends = np.cumsum(expected.lengths)
    assert documents_of(source) == [
        [*expected.ids[end - n : end].tolist(), 1199] for end, n in zip(ends, expected.lengths, strict=True)
    ]
    assert [n for _, _, n in source.documents()] == [len(text.encode()) for text in real_texts[:10]]
    assert verify_tokens(target) == []


def test_what_cannot_be_adopted_is_named(tokens, wide_tokens, tmp_path, tokenizer_json):
    export_tokens(tokens, "megatron", str(tmp_path / "x"))
    export_tokens(tokens, "datatrove", str(tmp_path / "x"))
    idx, ds, ids = (tmp_path / "x" / name for name in ("docs_train.idx", "docs_train.ds", "docs_train.bin"))

    def refused(path, words, tokenizer=tokenizer_json, eos_token="<|endoftext|>"):
        with pytest.raises(TokenError, match=words):
            adopt_tokens([path], tmp_path / "out", tokenizer, source="s", eos_token=eos_token)
        assert not (tmp_path / "out" / "shards.json").exists()

    wide = wide_tokens.tokenizer_path.read_bytes()
    refused(idx, r"docs_train\.bin: its ids have 2 bytes, but a vocabulary of 67,200 is stored with 4", wide)
    plain = Tokenizer.from_str(tokenizer_json.decode())
    plain.add_special_tokens([AddedToken("</s>", special=True)])
    refused(idx, "document 0 ends with id 1199, not with '</s>'", plain.to_str().encode(), "</s>")
    good = idx.read_bytes()
    idx.write_bytes(b"x" + good[1:])
    refused(idx, r"docs_train\.idx: not an index of Megatron-LM")
    idx.write_bytes(good[:17] + b"\x05" + good[18:])
    refused(idx, "version 1, dtype code 5; only version 1 with uint16 or int32 is known")
    idx.write_bytes(good[:60])
    refused(idx, "it was truncated")
    at = 34 + 4 * tokens.sources["docs"].documents_count
    idx.write_bytes(good[:at] + struct.pack("<q", 2) + good[at + 8 :])
    refused(idx, "its sequences are not stored one after the other")
    idx.write_bytes(good)
    original = ids.read_bytes()
    ids.write_bytes(original[:-2])
    refused(idx, "ids, but its index says .* one was truncated")
    ids.write_bytes(struct.pack("<H", 1_200) + original[2:])
    refused(idx, r"id 1200 is outside the vocabulary of 1,200")
    index = ds.with_name("docs_train.ds.index")
    ends = np.frombuffer(index.read_bytes(), "<u8")
    index.write_bytes(np.concatenate([[1], ends]).astype("<u8").tobytes())
    refused(ds, "document 0 holds no text")
    ds.with_name("docs_train.ds.metadata").write_text("no width\n1")
    refused(ds, "the first line does not end with the bytes of an id")
    index.unlink()
    refused(ds, r"docs_train\.ds\.index: no such file")


def test_special_ids_inside_adopted_documents_are_allowed_and_known(tokens, tmp_path, tokenizer_json):
    export_tokens(tokens, "megatron", str(tmp_path / "x"))
    path = tmp_path / "x" / "docs_train.bin"
    path.write_bytes(struct.pack("<H", 1_199) + path.read_bytes()[2:])
    manifest = adopt_tokens(
        [path.with_suffix(".idx")], tmp_path / "y", tokenizer_json, source="s", eos_token="<|endoftext|>"
    )
    assert not manifest.plain_text
    assert verify_tokens(tmp_path / "y") == []
