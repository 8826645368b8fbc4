"""The page behind a document, found again by its position in the archive."""

from __future__ import annotations

import gzip

import pytest

from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.originals import original
from gristmill.stages.extract_pages import decode_page
from gristmill.stages.ledger import StageLedger
from gristmill.stages.readers import read_batches
from gristmill.stages.shards import Shard

PAGES = [
    ("http://a.example/", b"<p>first \xe4</p>"),
    ("http://b.example/", b"<p>second</p>"),
    ("http://c.example/", b"x"),
]


def record(url: str, body: bytes) -> bytes:
    http = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=latin-1\r\n\r\n" + body
    head = f"WARC/1.0\r\nWARC-Type: response\r\nWARC-Target-URI: {url}\r\nContent-Type: application/http\r\n"
    return head.encode() + f"Content-Length: {len(http)}\r\n\r\n".encode() + http + b"\r\n\r\n"


@pytest.mark.parametrize("packed", ["plain", "member each", "one stream"])
def test_every_page_that_the_reader_found_is_found_again(tmp_path, packed):
    records = [record(*page) for page in PAGES]
    data = {
        "plain": b"".join(records),
        "member each": b"".join(map(gzip.compress, records)),
        "one stream": gzip.compress(b"".join(records)),
    }[packed]
    path = tmp_path / "a.warc"
    path.write_bytes(data)
    shard = Shard(index=0, source="s", path=str(path), name="a.warc", format="warc", size=len(data), stamp="")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/inputs.json").write_text(f"[{shard.model_dump_json()}]")
    run = open_run(tmp_path / "run")
    rows = [row for batch in read_batches(shard, StageLedger(stage="read"), []) for row in batch.to_pylist()]
    assert [row["url"] for row in rows] == [url for url, _ in PAGES]
    for row in rows:
        expected = decode_page(row["html"], row["html_charset"])[0]
        assert original(run, "01-extract/kept/part-00000.parquet", row) == expected
    assert original(run, "01-extract/kept/part-00000.parquet", rows[0]) == "<p>first ä</p>"
    # what is not there is not guessed
    assert original(run, "part-00000.parquet", {**rows[0], "url": "http://b.example/"}) is None
    assert original(run, "part-00000.parquet", {**rows[0], "position": None}) is None
    assert original(run, "part-00000.parquet", {**rows[0], "position": "line 3"}) is None
    assert original(run, "part-00000.parquet", {**rows[0], "position": str(len(data))}) is None
    assert original(run, "part-00001.parquet", rows[0]) is None
    assert original(run, "card.json", rows[0]) is None
    path.write_bytes(b"something else altogether")
    assert original(run, "part-00000.parquet", rows[0]) is None
    path.unlink()
    assert original(run, "part-00000.parquet", rows[0]) is None


def test_kept_documents_of_a_run_lead_to_their_pages(finished_run):
    run = open_run(finished_run)
    seen = 0
    for part in run.parts("kept"):
        with run.open_parquet(part) as file:
            for row in file.read(columns=["source", "url", "position"]).to_pylist():
                html = original(run, part, row)
                assert (html is not None) == (row["source"] == "docs")
                seen += html is not None and "<" in html
    assert seen > 5
