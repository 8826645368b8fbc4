"""Readers: every record is kept, dropped, failed or skipped, and damage costs what it hit."""

import gzip
import io
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages import documents, readers_warc
from gristmill.stages.documents import MAX_BATCH_BYTES, MAX_BATCH_DOCUMENTS
from gristmill.stages.ledger import StageLedger, amount
from gristmill.stages.readers import FORMATS, READ_FIELDS, columns_of, detect_format, read_batches
from gristmill.stages.readers_common import clean_string
from gristmill.stages.shards import Shard, ShardError

noise = random.Random(1).randbytes  # bytes that do not compress


class Read:
    """A file that was read, with its books, which are checked."""

    def __init__(self, path: Path, format: str, data: bytes, start: int = 0, stop: int | None = None, **options):
        path.write_bytes(data)
        shard = Shard(
            index=0,
            source="web",
            path=str(path),
            name=path.name,
            format=format,
            size=len(data),
            stamp="",
            dump="CC-1",
            start=start,
            stop=stop,
        )
        self.ledger, self.problems = StageLedger(stage="read"), []
        self.batches = list(read_batches(shard, self.ledger, self.problems, **options))
        self.ledger.check(str(path))
        kept = self.ledger.kept
        assert kept == sum((amount(batch) for batch in self.batches), start=type(kept)())
        assert all(batch.schema.names == [*READ_FIELDS, *columns_of(format)] for batch in self.batches)
        ids = [row["doc_id"] for row in self.rows]
        assert len(set(ids)) == len(ids)

    @property
    def rows(self):
        return [row for batch in self.batches for row in batch.to_pylist()]

    @property
    def texts(self):
        return [row["text"] for row in self.rows]

    @property
    def dropped(self):
        return {reason: size.documents for reason, size in self.ledger.dropped.items()}

    @property
    def failed(self):
        return {reason: size.documents for reason, size in self.ledger.failed.items()}


@pytest.fixture
def read(tmp_path):
    def reader(data, format="jsonl", name="a file-ü", **options):
        return Read(tmp_path / name, format, data, **options)

    return reader


def line(**record):
    return json.dumps(record).encode() + b"\n"


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "format"),
    [
        ("s3://b/CC-MAIN-2024.warc.gz", "warc"),
        ("x.warc.wet.gz", "wet"),
        ("x.warc.zst", "warc"),
        ("x.WARC", "warc"),
        ("a/b.jsonl", "jsonl"),
        ("a/b.jsonl.zst", "jsonl"),
        ("a/b.json.gz", "jsonl"),
        ("a/b.parquet", "parquet"),
        ("a/data-00000-of-00002.arrow", "arrow"),
        ("a/b.csv.gz", "csv"),
        ("a/b.tsv", "tsv"),
        ("a/b.txt", "text"),
    ],
)
def test_the_name_says_the_format(path, format):
    assert detect_format(path) == format


def test_a_name_without_a_known_ending_is_an_error_that_lists_the_known():
    with pytest.raises(ShardError, match=r"corpus\.doc.*\.jsonl.*\.parquet"):
        detect_format("corpus.doc")


def test_columns_of_a_format():
    assert {name for name in FORMATS if columns_of(name) == ("html", "html_charset")} == {"warc"}
    assert {columns_of(name) for name in FORMATS if name != "warc"} == {("text",)}
    with pytest.raises(ShardError, match="Unknown format 'doc'"):
        columns_of("doc")


# --- JSONL -----------------------------------------------------------------------------------------------------------


def test_jsonl_worked_example(read):
    got = read(
        line(text="Ä b", id="one", metadata={"url": "http://x", "date": "2024", "language": "de", "n": 1}, extra=True)
        + line(text="c", url="http://y", dump="CC-2", language_score=0.5)
    )
    assert got.rows[0] == {
        "doc_id": "one",
        "source": "web",
        "url": "http://x",
        "dump": "CC-1",
        "date": "2024",
        "metadata": '{"n":1,"extra":true}',
        "language": "de",
        "language_score": None,
        "position": "1",
        "text": "Ä b",
    }
    assert (got.rows[1]["dump"], got.rows[1]["url"], got.rows[1]["language_score"]) == ("CC-2", "http://y", 0.5)
    assert re.fullmatch("[0-9a-f]{32}", got.rows[1]["doc_id"])
    assert (got.ledger.read.documents, got.ledger.read.chars, got.ledger.read.bytes) == (2, 4, 5)
    assert got.problems == []


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (b'{"text": "\xff"}', "not_utf8"),
        (b'{"text": "a"', "not_json"),
        (b"[" * 100_000, "not_json"),
        (b'["text"]', "bad_record"),
        (b'{"text": 5}', "no_text"),
        (b'{"text": null}', "no_text"),
        (b'{"txt": "a"}', "no_text"),
        (b'{"text": "a", "deep": ' + b"[" * 900 + b"]" * 900 + b"}", None),
    ],
)
def test_a_bad_line_fails_alone(read, bad, reason):
    got = read(line(text="before") + bad + b"\n" + line(text="after"))
    if reason is None:
        assert got.texts == ["before", "a", "after"]
    else:
        assert got.texts == ["before", "after"]
        assert got.failed == {reason: 1}
        assert got.ledger.failed[reason].bytes == len(bad)
        assert f"a file-ü:2: {reason}: " in got.problems[0]


def test_only_the_first_failures_are_described(read):
    got = read(b"{\n" * 50)
    assert got.failed == {"not_json": 50}
    assert len(got.problems) == 20


def test_empty_and_blank(read):
    got = read(b"\n" + line(text="") + line(text=" \n\t ") + b"  \n" + line(text="x"))
    assert got.texts == ["x"]
    assert got.dropped == {"empty": 2}
    assert got.ledger.counters == {"skipped.blank": 2}


def test_text_policy_replaces_and_books_what_it_changed(read):
    got = read(b'{"text": "a\\u0000b\\ud800c\\ud83d\\ude00", "url": "u\\u0000"}\n')
    assert got.texts == ["a\ufffdb\ufffdc😀"]
    assert got.rows[0]["url"] == "u\ufffd"
    assert got.ledger.counters == {"replaced.nul": 1, "replaced.surrogate": 1}
    assert (got.ledger.edited.bytes, got.ledger.edited.chars) == (-2, 0)  # NUL has 1 byte, U+FFFD has 3


def test_ids_are_unique_and_stable(read):
    lines = (
        line(text="a", id="i") + line(text="b", id="i") + line(text="c") + line(text="d", id="i") + line(text="e", id=7)
    )
    got = read(lines)
    assert [row["doc_id"] for row in got.rows if len(row["doc_id"]) < 32] == ["i", "i#2", "i#3", "7"]
    assert got.ledger.counters["duplicate_id"] == 2
    assert [row["doc_id"] for row in read(lines).rows] == [row["doc_id"] for row in got.rows]


def test_an_id_that_looks_like_a_suffix_is_not_taken_twice(read):
    got = read(line(text="a", id="i#2") + line(text="b", id="i") + line(text="c", id="i"))
    assert [row["doc_id"] for row in got.rows] == ["i#2", "i", "i#3"]


def test_columns_can_be_named(read):
    got = read(line(content="a", key="k", href="h"), columns={"text": "content", "doc_id": "key", "url": "href"})
    assert got.rows[0] | {"text": "a", "doc_id": "k", "url": "h", "metadata": None} == got.rows[0]


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
def test_compression_is_seen_in_the_bytes_not_the_name(read, compress):
    data = b"".join(line(text=f"text {i}") for i in range(1000))
    got = read(compress(data[:500]) + compress(data[500:]), name="x.jsonl.gz")
    assert got.texts == [f"text {i}" for i in range(1000)]


def test_gzip_padding_is_no_damage(read):
    assert read(gzip.compress(line(text="a"), mtime=0) + b"\0" * 100).texts == ["a"]


def test_a_byte_order_mark_is_no_text(read):
    assert read(b"\xef\xbb\xbf" + line(text="a")).texts == ["a"]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_a_cut_stream_gives_everything_before_the_cut(read, compress):
    count = 40
    data = b"".join(line(text=noise(4000).hex()) for _ in range(count))
    whole = read(data).texts
    got = read(compress(data)[:-1000])
    assert got.failed == {"truncated": 1}
    assert got.texts == whole[: len(got.texts)]
    assert len(got.texts) >= count - 20  # zstd gives whole blocks of 128 KiB only
    if compress is gzip.compress:
        assert len(got.texts) == count - 1
    assert "truncated" in got.problems[0]


def test_garbage_in_a_gzip_stream_gives_everything_before_it(read):
    data = b"".join(line(text=noise(500).hex()) for _ in range(200))
    packed = bytearray(gzip.compress(data, mtime=0))
    packed[60_000:60_100] = b"\xff" * 100
    got = read(bytes(packed))
    assert got.failed["corrupt"] == 1  # inflate takes damage for text at first: some lines of garbage fail before it
    assert set(got.failed) <= {"corrupt", "not_json", "not_utf8"}
    assert 70 < len(got.texts) < 130  # of 200, the damage stands in the middle
    assert got.texts == read(data).texts[: len(got.texts)]


def test_a_long_line_is_dropped_and_the_rest_is_read(read):
    long = line(text="x" * 17_000_000)
    got = read(line(text="a") + long + line(text="b"), max_chars=10)
    assert got.texts == ["a", "b"]
    assert got.dropped == {"too_large": 1}
    assert got.ledger.dropped["too_large"].bytes == len(long) - 1


def test_too_many_characters(read):
    got = read(line(text="ä" * 10) + line(text="ä" * 11), max_chars=10)
    assert got.texts == ["ä" * 10]
    assert got.ledger.dropped["too_large"].model_dump() == {"documents": 1, "chars": 11, "bytes": 22, "tokens": 0}


def test_batches_are_bounded(read, monkeypatch):
    monkeypatch.setattr("gristmill.stages.readers_common.MAX_BATCH_BYTES", 1000)
    monkeypatch.setattr("gristmill.stages.readers_common.MAX_BATCH_DOCUMENTS", 5)
    got = read(b"".join(line(text="x" * size) for size in [10] * 12 + [2000, 10, 600, 600]))
    assert [batch.num_rows for batch in got.batches] == [5, 5, 2, 1, 2, 1]


def test_a_bomb_costs_no_memory(tmp_path):
    """1 GB of one line from 1 MB of gzip and 30 KB of zstd, read by a process of its own under a limit."""
    code = """
import resource, sys
from gristmill.stages.readers import read_batches
from gristmill.stages.shards import Shard
from gristmill.stages.ledger import StageLedger
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ledger = StageLedger(stage="read")
shard = Shard(index=0, source="s", path=sys.argv[1], name="x", format="jsonl", size=1, stamp="")
list(read_batches(shard, ledger, [], max_chars=1000))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, ledger.dropped["too_large"].bytes)
"""
    block = zstandard.compress(b"x" * (1 << 20), 1)
    (tmp_path / "bomb").write_bytes(block * 1024)
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "bomb")], capture_output=True, check=True)
    more_kb, size = map(int, done.stdout.split())
    assert size == 1 << 30
    assert more_kb < 200_000


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.binary(max_size=60), st.text(max_size=30).map(lambda s: json.dumps({"text": s}).encode())))
)
def test_any_bytes_are_accounted_for(tmp_path_factory, parts):
    data = b"\n".join(parts)
    got = Read(tmp_path_factory.mktemp("any") / "x", "jsonl", data)
    lines = data.split(b"\n")[: -1 if data.endswith(b"\n") or not data else None]
    skipped = got.ledger.counters.get("skipped.blank", 0)
    if data[:4] not in (b"\x28\xb5\x2f\xfd",) and data[:2] != b"\x1f\x8b":
        assert got.ledger.read.documents + skipped == len(lines)


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=[]), max_size=30))
def test_clean_strings_are_utf8(text):
    clean, nuls, surrogates = clean_string(text)
    clean.encode()
    assert "\0" not in clean
    assert len(clean) == len(text)
    assert nuls == text.count("\0")
    assert surrogates == sum("\ud800" <= char <= "\udfff" for char in text)


# --- Parquet ---------------------------------------------------------------------------------------------------------


def parquet(table, **options):
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.getvalue()


TABLE = pa.table(
    {
        "text": ["a b", None, "", " \n", "x\0y", "é" * 20, "good"],
        "id": ["i", None, "i", "i", None, "z", "i"],
        "url": ["u"] * 7,
        "n": [1, 2, 3, None, 5, 6, 7],
        "metadata": ['{"date":"d","k":1}'] * 7,
    }
)


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), pa.binary(), pa.dictionary(pa.int32(), pa.string())])
def test_parquet_worked_example(read, kind):
    table = TABLE.set_column(0, "text", TABLE["text"].cast(kind))
    got = read(parquet(table, row_group_size=3), "parquet", max_chars=10)
    assert got.texts == ["a b", "x\ufffdy", "good"]
    assert got.dropped == {"empty": 2, "too_large": 1}
    assert got.failed == {"no_text": 1}
    assert got.ledger.counters == {"replaced.nul": 1, "duplicate_id": 1}
    assert got.rows[0]["metadata"] == '{"k":1,"n":1}'
    assert (got.rows[0]["date"], got.rows[2]["doc_id"]) == ("d", "i#2")
    assert ":row 1: no_text" in got.problems[0]


def test_row_groups_are_shards_and_ids_do_not_depend_on_the_split(read):
    data = parquet(pa.table({"text": [f"t{i}" for i in range(10)]}), row_group_size=2)
    whole = [row["doc_id"] for row in read(data, "parquet").rows]
    parts = [row["doc_id"] for start in range(5) for row in read(data, "parquet", start=start, stop=start + 1).rows]
    assert parts == whole
    assert read(data, "parquet", start=2, stop=4).texts == ["t4", "t5", "t6", "t7"]
    with pytest.raises(ShardError, match="has 5 row groups"):
        read(data, "parquet", start=4, stop=6)


def test_strings_that_are_not_utf8(read):
    raw = pa.array([b"ok", b"\xff\xfe", b"a\xed\xa0\x80b", None, b"c\0"], pa.binary())
    broken = pa.Array.from_buffers(pa.string(), 5, raw.buffers())
    got = read(parquet(pa.table({"text": broken})), "parquet")
    assert got.texts == ["ok", "a\ufffdb", "c\ufffd"]
    assert got.failed == {"not_utf8": 1, "no_text": 1}
    assert got.ledger.failed["not_utf8"].bytes == 2
    assert got.ledger.counters == {"replaced.nul": 1, "replaced.surrogate": 1}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (parquet(pa.table({"txt": ["a"]})), "no column 'text'; there are txt"),
        (parquet(pa.table({"text": [1]})), "'text' is int64, not a string"),
        (parquet(TABLE)[:-20], "not a whole Parquet file"),
        (b"hello" * 100, "not a whole Parquet file"),
    ],
)
def test_files_that_cannot_be_read_are_errors(read, data, message):
    with pytest.raises(ShardError, match=message):
        read(data, "parquet")


def test_a_damaged_row_group_costs_its_own_rows(read):
    table = pa.table({"text": [f"hello {i} " * 50 for i in range(1000)]})
    data = bytearray(parquet(table, row_group_size=250, compression="zstd", use_dictionary=False))
    page = pq.ParquetFile(io.BytesIO(data)).metadata.row_group(1).column(0).data_page_offset
    data[page + 2 : page + 60] = b"\xff" * 58
    got = read(bytes(data), "parquet")
    assert len(got.texts) == 750
    assert got.failed == {"corrupt": 250}
    assert "row group 1" in got.problems[0]


def test_values_of_other_types_are_kept_as_metadata(read):
    table = pa.table({"text": ["a"], "id": [7], "when": [pa.scalar(0, pa.timestamp("s")).as_py()], "raw": [b"\xff"]})
    assert read(parquet(table), "parquet").rows[0]["metadata"] == '{"when":"1970-01-01T00:00:00","raw":"\\\\xff"}'


def test_large_documents_make_batches_of_their_own(read):
    table = pa.table({"text": ["x" * (20 << 20), "y" * (20 << 20), "z"]})
    got = read(parquet(table), "parquet", max_chars=30 << 20)
    assert [batch.num_rows for batch in got.batches] == [1, 1, 1]
    assert MAX_BATCH_BYTES == 32 << 20
    assert MAX_BATCH_DOCUMENTS == documents.MAX_BATCH_DOCUMENTS


# --- WARC ------------------------------------------------------------------------------------------------------------

HTML = b"<html><body>hi</body></html>"


def record(number, content=None, *, kind="response", length=None, mime="application/http; msgtype=response", more=""):
    content = http() if content is None else content
    head = (
        f"WARC/1.0\r\nWARC-Type: {kind}\r\nWARC-Record-ID: <urn:uuid:{number}>\r\nWARC-Date: 2024-05-01T00:00:00Z\r\n"
        f"WARC-Target-URI: http://x/{number}\r\nContent-Type: {mime}\r\n{more}"
        f"Content-Length: {len(content) if length is None else length}\r\n\r\n"
    )
    return head.encode() + content + b"\r\n\r\n"


def http(body=HTML, *, status="200 OK", mime="text/html; charset=ISO-8859-1", more=""):
    return f"HTTP/1.1 {status}\r\nContent-Type: {mime}\r\n{more}\r\n".encode() + body


def frames(*records, compress=gzip.compress):
    return b"".join(compress(one) for one in records)


BIG = record(2, http(noise(60_000).hex().encode()))


@pytest.mark.parametrize("pack", [b"".join, lambda r: frames(*r), lambda r: gzip.compress(b"".join(r), mtime=0),
                                  lambda r: frames(*r, compress=zstandard.compress)])  # fmt: skip
def test_warc_worked_example(read, pack):
    got = read(
        pack(
            [
                record("info", b"software: x\r\n", kind="warcinfo", mime="application/warc-fields"),
                record("req", b"GET / HTTP/1.1\r\n\r\n", kind="request"),
                record(1),
                BIG,
                record(3, http(status="404 Not Found")),
                record(4, http(b"%PDF-1.4 ...", mime="application/pdf")),
                record(5, http(b"")),
                record(6, HTML, kind="resource", mime="text/html"),
                record(7, b"text", kind="conversion", mime="text/plain"),
            ]
        ),
        "warc",
    )
    assert [row["doc_id"] for row in got.rows] == ["1", "2", "6"]
    assert got.rows[0] == {
        "doc_id": "1",
        "source": "web",
        "url": "http://x/1",
        "dump": "CC-1",
        "date": "2024-05-01T00:00:00Z",
        "metadata": None,
        "language": None,
        "language_score": None,
        "position": got.rows[0]["position"],
        "html": HTML,
        "html_charset": "iso-8859-1",
    }
    assert got.dropped == {"http_status": 1, "not_html": 1, "empty": 1}
    assert got.failed == {}
    skipped = {k: v for k, v in got.ledger.counters.items() if k.startswith("skipped")}
    assert skipped == {"skipped.warcinfo": 1, "skipped.request": 1, "skipped.conversion": 1}
    assert got.ledger.read.documents + sum(skipped.values()) == 9


def test_wet_gives_the_texts_of_conversions(read):
    got = read(
        frames(
            record("i", b"x", kind="warcinfo"),
            record(1, "Tschüß".encode(), kind="conversion", more="WARC-Identified-Content-Language: deu,eng\r\n"),
            record(2, b"a\xff", kind="conversion"),
            record(3, b"  ", kind="conversion"),
            record(4, b"a\0", kind="conversion"),
        ),
        "wet",
    )
    assert got.texts == ["Tschüß", "a\ufffd"]
    assert got.rows[0]["metadata"] == '{"languages":"deu,eng"}'
    assert (got.failed, got.dropped) == ({"not_utf8": 1}, {"empty": 1})


@pytest.mark.parametrize(
    ("identified", "mime", "body", "kept", "by"),
    [
        ("text/html", "text/plain", HTML, True, "identified"),
        ("application/xml", "text/html", HTML, False, "identified"),
        (None, "TEXT/HTML;charset=x", HTML, True, "declared"),
        (None, "application/xhtml+xml", HTML, True, "declared"),
        (None, "text/plain", HTML, False, "declared"),
        (None, "", HTML, True, "sniffed"),
        (None, "", b"hello", False, "sniffed"),
        (None, "text/html", b"%PDF-1.7", False, "binary"),
        ("text/html", "text/html", b"a\0b", False, "binary"),
        (None, "text/html", "\ufeff<p>".encode("utf-16-le"), True, "declared"),
    ],
)
def test_what_is_html(read, identified, mime, body, kept, by):
    more = f"WARC-Identified-Payload-Type: {identified}\r\n" if identified else ""
    got = read(record(1, http(body, mime=mime), more=more), "warc")
    assert len(got.rows) == kept
    assert got.dropped == ({} if kept else {"not_html": 1})
    assert got.ledger.counters == {f"mime.{by}": 1}


@pytest.mark.parametrize(
    ("encoding", "body", "expected", "undecoded"),
    [
        ("Content-Encoding: gzip", gzip.compress(HTML, mtime=0), HTML, None),
        ("Content-Encoding: deflate", __import__("zlib").compress(HTML), HTML, None),
        ("Content-Encoding: zstd", zstandard.compress(HTML), HTML, None),
        ("Content-Encoding: br", HTML, HTML, "br"),
        ("Content-Encoding: gzip", HTML, HTML, "gzip"),
        ("Content-Encoding: x-own", HTML, HTML, "other"),
        ("Content-Encoding: identity", HTML, HTML, None),
        ("Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(HTML), HTML), HTML, None),
        ("Transfer-Encoding: chunked", HTML, HTML, "chunked"),
    ],
)
def test_encoded_bodies(read, encoding, body, expected, undecoded):
    got = read(record(1, http(body, more=encoding + "\r\n")), "warc")
    assert [row["html"] for row in got.rows] == [expected]
    wanted = {"mime.declared": 1} | ({f"undecoded.{undecoded}": 1} if undecoded else {})
    assert got.ledger.counters == wanted


def test_a_chunked_gzip_body_is_undone_in_order(read):
    packed = gzip.compress(HTML, mtime=0)
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(packed), packed)
    got = read(record(1, http(body, more="Content-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n")), "warc")
    assert [row["html"] for row in got.rows] == [HTML]


def test_bombs_and_giants_are_too_large(read, monkeypatch):
    monkeypatch.setattr(readers_warc, "MAX_RECORD_BYTES", 100_000)
    bomb = http(gzip.compress(b"x" * 50_000_000, mtime=0), more="Content-Encoding: gzip\r\n")
    got = read(frames(record(1, bomb), record(2, http(b"x" * 200_000)), record(3)), "warc")
    assert got.dropped == {"too_large": 2}
    assert [row["doc_id"] for row in got.rows] == ["3"]


def test_records_without_id_url_or_date(read):
    bare = f"WARC/1.0\r\nWARC-Type: response\r\nContent-Type: application/http\r\nContent-Length: {len(http())}\r\n\r\n"
    one = bare.encode() + http() + b"\r\n\r\n"
    for data in (one * 2, frames(one, one), gzip.compress(one * 2, mtime=0)):
        rows = read(data, "warc").rows
        assert [row["url"] for row in rows] == [None, None]
        assert [row["date"] for row in rows] == [None, None]
        assert len({row["doc_id"] for row in rows}) == 2


def test_two_records_with_one_id(read):
    got = read(frames(record(1), record(1)), "warc")
    assert [row["doc_id"] for row in got.rows] == ["1", "1#2"]


@pytest.mark.parametrize("content", [b"garbage", b"", b"\r\n\r\n", b"HTTP/1.1 abc\r\n\r\n"])
def test_a_response_without_http(read, content):
    got = read(frames(record(1, content), record(2)), "warc")
    assert [row["doc_id"] for row in got.rows] == ["2"]
    assert got.failed == {"bad_record": 1}


DAMAGE = {  # name: (data, ids kept, failed)
    "cut in the last record": (frames(record(1), BIG)[:-5000], ["1"], {"truncated": 1}),
    "cut in the last record, zstd": (
        frames(record(1), BIG, compress=zstandard.compress)[:-50],
        ["1"],
        {"truncated": 1},
    ),
    "cut in the last record, plain": ((record(1) + BIG)[:-5000], ["1"], {"truncated": 1}),
    "cut in the last record, one stream": (gzip.compress(record(1) + BIG, mtime=0)[:-5000], ["1"], {"truncated": 1}),
    "cut in a record that is no page": (frames(record(1), record(9, kind="request"))[:-40], ["1"], {"truncated": 1}),
    "cut in the headers": ((record(1) + BIG)[: len(record(1)) + 30], ["1"], {"truncated": 1}),
    "garbage in a gzip member": (
        frames(record(1)) + frames(BIG)[:100] + b"\xff" * 100 + frames(BIG)[200:] + frames(record(3)),
        ["1", "3"],
        {"corrupt": 1},
    ),
    "garbage in the first member": (frames(BIG)[:99] + b"\xff" * 99 + frames(record(3)), ["3"], {"corrupt": 1}),
    "garbage between members": (frames(record(1)) + b"??" * 50 + frames(record(3)), ["1", "3"], {"corrupt": 1}),
    "length too short": (frames(record(1), record(8, length=20), record(3)), ["1", "3"], {"wrong_length": 1}),
    "length too short, plain": (record(1) + record(8, length=20) + record(3), ["1", "3"], {"wrong_length": 1}),
    "length too short, one stream": (
        gzip.compress(record(1) + record(8, length=20) + record(3) + BIG, mtime=0),
        ["1", "3", "2"],
        {"wrong_length": 1},
    ),
    "length too long": (frames(record(8, length=500), record(3), record(4)), ["3", "4"], {"wrong_length": 1}),
    "length over all that follows": (
        frames(record(1), record(8, length=9999), record(3)),
        ["1", "3"],
        {"wrong_length": 1},
    ),
    "length too long, plain": (record(8, length=320) + record(3) + record(4), ["4"], {"wrong_length": 1}),
    "length twice too short": (
        b"".join([record(1), record(8, length=20), record(3), record(9, length=20), record(5)]),
        ["1", "3", "5"],
        {"wrong_length": 2},
    ),
    "length is no number": (frames(record(8, length="many"), record(3)), ["3"], {"wrong_length": 1}),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_costs_what_it_hit(read, name):
    data, ids, failed = DAMAGE[name]
    got = read(data, "warc")
    assert [row["doc_id"] for row in got.rows] == ids
    assert got.failed == failed
    assert len(got.problems) == sum(failed.values())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_warc_with_any_damage_is_read_to_its_end(tmp_path_factory, data):
    """One place overwritten, or the end cut: no crash, no hang, and the records away from it are there."""
    packed = frames(record(1), record(2, http(random.Random(1).randbytes(300).hex().encode())), record(3), record(4))
    at = data.draw(st.integers(0, len(packed) - 1))
    if data.draw(st.booleans()):
        damaged = packed[:at]
    else:
        damaged = packed[:at] + data.draw(st.binary(min_size=1, max_size=30)) + packed[at:]
    try:
        got = Read(tmp_path_factory.mktemp("any") / "x", "warc", damaged)
    except ShardError:
        return
    assert len(got.rows) >= 2 or len(damaged) < len(packed)
    assert len(got.rows) <= 5


@pytest.mark.parametrize("data", [b"hello\n" * 1000, bytes(range(256)) * 9, gzip.compress(b"hello\n" * 1000, mtime=0),
                                  b"\x1f\x8b\x08" * 1000, b"<html></html>"])  # fmt: skip
def test_what_is_no_warc_is_an_error(read, data):
    with pytest.raises(ShardError, match="no record was found"):
        read(data, "warc")


# --- all formats -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_an_empty_file_has_no_records(read, format):
    got = read(b"", format)
    assert got.batches == []
    assert got.ledger.read.documents == 0
    assert "empty_file" in got.problems[0]


@pytest.mark.parametrize("format", FORMATS)
def test_a_missing_file_is_an_error(tmp_path, format):
    shard = Shard(index=0, source="s", path=str(tmp_path / "gone"), name="gone", format=format, size=1, stamp="")
    with pytest.raises(ShardError, match="cannot be opened"):
        list(read_batches(shard, StageLedger(stage="read"), []))


def test_paths_are_urls():
    import fsspec

    with fsspec.open("memory://corpus/x.jsonl", "wb") as file:
        file.write(gzip.compress(line(text="a"), mtime=0))
    shard = Shard(index=0, source="s", path="memory://corpus/x.jsonl", name="x", format="jsonl", size=1, stamp="")
    assert [b["text"].to_pylist() for b in read_batches(shard, StageLedger(stage="read"), [])] == [["a"]]
