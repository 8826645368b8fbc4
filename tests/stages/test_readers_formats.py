"""Readers of Arrow, CSV and text files, and documents as datatrove and dolma write them."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.ledger import StageLedger
from gristmill.stages.readers import READ_FIELDS, read_batches
from gristmill.stages.shards import Member, Shard, ShardError


class Read:
    """A shard that was read, with its books, which are checked."""

    def __init__(self, path: Path, format: str, **options: Any) -> None:
        shard = Shard(index=0, source="s", path=str(path), name=path.name, format=format, size=1, stamp="")
        max_chars = options.pop("max_chars", 10_000_000)
        self.ledger, self.problems = StageLedger(stage="read"), []  # type: ignore[var-annotated]
        batches = list(read_batches(shard.model_copy(update=options), self.ledger, self.problems, max_chars))
        self.ledger.check(str(path))
        assert all(batch.schema.names == [*READ_FIELDS, "text"] for batch in batches)
        self.rows = [row for batch in batches for row in batch.to_pylist()]
        assert len({row["doc_id"] for row in self.rows}) == len(self.rows)

    @property
    def texts(self) -> list[str]:
        return [row["text"] for row in self.rows]

    @property
    def lost(self) -> dict[str, int]:
        """Reason -> documents dropped or failed."""
        return {k: size.documents for k, size in (self.ledger.dropped | self.ledger.failed).items()}


def read(folder: Path, format: str, data: bytes, **options: Any) -> Read:
    (folder / "a file-ü").write_bytes(data)
    return Read(folder / "a file-ü", format, **options)


# --- Arrow -----------------------------------------------------------------------------------------------------------

TABLE = pa.table({"text": ["a", None, " ", "b" * 20, "c\0"], "id": ["i", "j", "k", "l", "m"], "n": [1, 2, 3, 4, 5]})


def arrow(table: pa.Table, *, stream: bool, rows: int = 2) -> bytes:
    sink = io.BytesIO()
    with (pa.ipc.new_stream if stream else pa.ipc.new_file)(sink, table.schema) as writer:
        writer.write_table(table, rows)
    return sink.getvalue()


@pytest.mark.parametrize("stream", [True, False])
def test_arrow_worked_example(tmp_path: Path, stream: bool) -> None:
    got = read(tmp_path, "arrow", arrow(TABLE, stream=stream), max_chars=10)
    assert [(row["doc_id"], row["text"], row["metadata"], row["position"]) for row in got.rows] == [
        ("i", "a", '{"n":1}', "0"),
        ("m", "c\ufffd", '{"n":5}', "4"),
    ]
    assert got.lost == {"no_text": 1, "empty": 1, "too_large": 1}


@pytest.mark.parametrize("stream", [True, False])
def test_an_arrow_file_that_was_cut_gives_what_stands_before(tmp_path: Path, stream: bool) -> None:
    table = pa.table({"text": [f"text {i} " * 50 for i in range(40)]})
    data = arrow(table, stream=stream, rows=10)
    got = read(tmp_path, "arrow", data[: len(data) * 5 // 8])
    assert got.texts == table["text"].to_pylist()[: len(got.texts)]
    assert len(got.texts) in (10, 20)
    assert got.lost == {"corrupt": 1}
    assert "everything before was read" in got.problems[0]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"hello" * 10, "not an Arrow file or stream"),
        (b"ARROW1", "not an Arrow file or stream"),
        (arrow(pa.table({"txt": ["a"]}), stream=True), "no column 'text'; there are txt"),
        (arrow(pa.table({"text": [1]}), stream=False), "'text' is int64"),
    ],
)
def test_what_is_no_arrow_file_is_an_error(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(ShardError, match=message):
        read(tmp_path, "arrow", data)


def test_a_stored_batch_of_many_rows_becomes_batches_of_ours(tmp_path: Path) -> None:
    table = pa.table({"text": [str(i) for i in range(20_000)]})
    (tmp_path / "x").write_bytes(arrow(table, stream=False, rows=20_000))
    shard = Shard(index=0, source="s", path=str(tmp_path / "x"), name="x", format="arrow", size=1, stamp="")
    batches = list(read_batches(shard, StageLedger(stage="read"), []))
    assert [batch.num_rows for batch in batches] == [8192, 8192, 3616]
    assert [row for batch in batches for row in batch["text"].to_pylist()] == table["text"].to_pylist()


# --- CSV -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_csv_worked_example(tmp_path: Path, pack: Any) -> None:
    data = b'id,body,url,language_score,n\r\n1,"a, ""b""\nc",http://x,0.5,\r\n2,,,,\r\n3,d\0,,,7\r\n'
    got = read(tmp_path, "csv", pack(b"\xef\xbb\xbf" + data), columns={"text": "body"})
    assert got.texts == ['a, "b"\nc', "d\ufffd"]
    first, second = got.rows
    assert (first["doc_id"], first["url"], first["language_score"], first["metadata"]) == ("1", "http://x", 0.5, None)
    assert (second["doc_id"], second["url"], second["metadata"], second["position"]) == ("3", None, '{"n":"7"}', "5")
    assert got.lost == {"empty": 1}
    assert got.ledger.counters == {"replaced.nul": 1}


def test_tsv(tmp_path: Path) -> None:
    assert read(tmp_path, "tsv", b"text\tid\na, b\tx\n").texts == ["a, b"]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [(b"x,y,z\n", "bad_record"), (b"x\n", "bad_record"), (b"\xff,b\n", "not_utf8"), (b'"a"b,c\n', "bad_record"),
     (b"y" * 17_000_000 + b",c\n", "too_large")],
)  # fmt: skip
def test_a_bad_row_fails_alone(tmp_path: Path, bad: bytes, reason: str) -> None:
    got = read(tmp_path, "csv", b"text,id\nbefore,1\n" + bad + b"\n" + b"after,2\n", max_chars=100)
    assert got.texts == ["before", "after"]
    assert got.lost == {reason: 1}
    assert got.ledger.counters == {"skipped.blank": 1}


def test_a_quote_that_never_closes_costs_what_it_swallowed(tmp_path: Path) -> None:
    got = read(tmp_path, "csv", b'text,id\na,1\n"b,2\nc,3\n')
    assert got.texts == ["a"]
    assert got.lost == {"bad_record": 1}


def test_csv_without_the_column_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match="no column 'text'; there are a;b"):
        read(tmp_path, "csv", b"a;b\n1;2\n")


def test_a_cut_csv_gives_what_stands_before(tmp_path: Path) -> None:
    rows = "".join(f"{hash((i, 'x'))} {i},{i}\n" for i in range(2000))
    got = read(tmp_path, "csv", gzip.compress(b"text,id\n" + rows.encode(), mtime=0)[:-500])
    assert got.lost == {"truncated": 1}
    assert got.texts == [line.rpartition(",")[0] for line in rows.splitlines()[: len(got.texts)]]
    assert len(got.texts) > 1000


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=20), st.text(max_size=20)), max_size=8))
def test_any_table_that_csv_writes_comes_back(tmp_path_factory: pytest.TempPathFactory, rows: list[Any]) -> None:
    import csv

    sink = io.StringIO(newline="")
    writer = csv.writer(sink, quoting=csv.QUOTE_ALL)
    writer.writerows([("text", "extra"), *rows])
    got = read(tmp_path_factory.mktemp("csv"), "csv", sink.getvalue().encode())
    assert got.texts == [text.replace("\0", "\ufffd") for text, _ in rows if text and not text.isspace()]


# --- text ------------------------------------------------------------------------------------------------------------


def bundle(folder: Path, files: dict[str, bytes]) -> Read:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    members = tuple(Member(name=name, size=len(data), stamp="") for name, data in files.items())
    return Read(folder, "text", members=members, name="", max_chars=50)


def test_a_folder_of_code(tmp_path: Path) -> None:
    files = {
        "src/a b-ü.py": b"print('a')\n",
        "empty.py": b"",
        "logo.png": b"\x89PNG\0\0" + bytes(100),
        "latin.c": b"/* \xfc */",
        "long.txt": b"x" * 51,
        "longer.txt": b"x" * 500,
        "wide.txt": "hällo".encode("utf-16"),
        "packed.py.gz": gzip.compress(b"packed", mtime=0),
        "cut.gz": gzip.compress(b"packed" * 100, mtime=0)[:-9],
    }
    got = bundle(tmp_path, files)
    assert got.texts == ["print('a')\n", "hällo", "packed"]
    assert got.rows[0]["metadata"] == json.dumps({"path": "src/a b-ü.py"}, ensure_ascii=False, separators=(",", ":"))
    assert got.rows[0]["position"] == "src/a b-ü.py"
    assert got.lost == {"empty": 1, "binary": 1, "not_utf8": 1, "too_large": 2, "truncated": 1}


def test_ids_of_text_files_do_not_depend_on_the_bundle(tmp_path: Path) -> None:
    both = bundle(tmp_path, {"a": b"a", "b": b"b"})
    alone = bundle(tmp_path, {"b": b"b"})
    assert alone.rows[0]["doc_id"] == both.rows[1]["doc_id"]
    assert both.rows[0]["doc_id"] != both.rows[1]["doc_id"]


def test_a_text_file_that_is_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=r"gone\.py: the file cannot be opened"):
        Read(tmp_path, "text", members=(Member(name="gone.py", size=1, stamp=""),), name="")


# --- documents of others ---------------------------------------------------------------------------------------------


def test_documents_that_datatrove_wrote(tmp_path: Path) -> None:
    from datatrove.data import Document
    from datatrove.pipeline.writers import JsonlWriter

    with JsonlWriter(str(tmp_path), output_filename="${rank}.jsonl.gz") as writer:
        writer.write(Document(text="Häuser", id="d1", metadata={"url": "http://x", "date": "2024", "n": 3}))
    row = Read(tmp_path / "00000.jsonl.gz", "jsonl").rows[0]
    assert (row["doc_id"], row["text"], row["url"], row["date"]) == ("d1", "Häuser", "http://x", "2024")
    assert json.loads(row["metadata"]) == {"n": 3}


def test_documents_of_dolma(tmp_path: Path) -> None:
    """The fields of dolma's docs/data-format.md."""
    document = {
        "id": "d1",
        "text": "words",
        "source": "books",
        "added": "2024-02-02T00:00:00Z",
        "created": "2001-01-01T00:00:00Z",
        "version": "v1",
        "metadata": {"url": "http://x", "title": "T"},
    }
    row = read(tmp_path, "jsonl", gzip.compress(json.dumps(document).encode(), mtime=0)).rows[0]
    assert (row["doc_id"], row["date"], row["url"]) == ("d1", "2001-01-01T00:00:00Z", "http://x")
    assert json.loads(row["metadata"]) == {
        "title": "T", "source": "books", "added": "2024-02-02T00:00:00Z", "version": "v1",
    }  # fmt: skip
