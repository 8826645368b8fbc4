"""What is exported comes back through our readers, datatrove's own, and a reader of Hugging Face's layout."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import xxhash
from ruamel.yaml import YAML

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.cli import main
from gristmill.pipelines.dataset_card import size_category, table
from gristmill.pipelines.export_documents import FORMATS, export_documents
from gristmill.pipelines.open_run import RunError, open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.run import Options, run
from gristmill.stages.hf_folder import hf_files
from gristmill.stages.ledger import StageLedger
from gristmill.stages.readers import detect_format, read_batches
from gristmill.stages.shards import Shard, filesystem

LIMIT = 100_000


def kept_rows(run_folder: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = open_run(run_folder).kept().to_table().to_pylist()
    return rows


def export(run_folder: Path, out: Path, format: str, limit: int = LIMIT) -> list[Path]:
    done = export_documents(open_run(run_folder), format, str(out), limit)
    assert done.contents.documents == len(kept_rows(run_folder))
    record = json.loads((out / "export.json").read_bytes())
    files = [out / file["path"] for file in record["files"]]
    for path, file in zip(files, record["files"], strict=True):
        data = path.read_bytes()
        assert (len(data), xxhash.xxh3_128_hexdigest(data)) == (file["bytes"], file["xxh3"])
        assert len(data) <= limit
    assert sum(file["rows"] for file in record["files"]) == record["documents"] == done.contents.documents
    return files


@pytest.mark.parametrize("format", FORMATS)
def test_our_own_readers_give_back_every_document(finished_run: Path, tmp_path: Path, format: str) -> None:
    files = export(finished_run, tmp_path / "out", format)
    back = []
    for path in files:
        state = {"size": 1, "stamp": "", "format": detect_format(str(path))}
        shard = Shard(index=0, source="s", path=str(path), name=path.name, **state)
        ledger = StageLedger(stage="read")
        back += [row for batch in read_batches(shard, ledger, []) for row in batch.to_pylist()]
        assert ledger.kept.documents == ledger.read.documents
    kept = kept_rows(finished_run)
    by_id = ("parquet", "hf").__contains__(format)
    for row, old in zip(back, kept, strict=True):
        assert [row[name] for name in ("text", "url", "date", "language")] == [
            old[name] for name in ("text", "url", "date", "language")
        ]
        metadata = json.loads(row["metadata"])
        assert (metadata["doc_id"] if by_id else row["doc_id"]) == old["doc_id"]
        assert metadata["source"] == old["source"]
        if old["extract.chars"] is not None:
            assert metadata["extract.chars"] == old["extract.chars"]


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_run_gives_the_same_bytes_and_files_are_bounded(
    finished_run: Path, tmp_path: Path, format: str
) -> None:
    first = export(finished_run, tmp_path / "a", format)
    export(finished_run, tmp_path / "b", format)
    assert len(export(finished_run, tmp_path / "c", format, 1 << 30)) == 1
    names = [path.relative_to(tmp_path / "a") for path in first]
    assert [(tmp_path / "a" / n).read_bytes() for n in names] == [(tmp_path / "b" / n).read_bytes() for n in names]


def test_many_files(tmp_path: Path) -> None:
    """3 MB of text that hardly compresses, in files of at most 300 kB, each format; and a document larger than that."""
    import random

    rng = random.Random(1)
    with gzip.open(tmp_path / "x.jsonl.gz", "wt") as file:
        for i in range(120):
            size = 500_000 if i == 60 else rng.randrange(30_000)
            file.write(json.dumps({"text": rng.randbytes(size).hex(), "id": str(i)}) + "\n")
    (tmp_path / "r.yaml").write_text(f"name: r\nsources: {{s: {{files: '{tmp_path}/x.jsonl.gz'}}}}\n")
    with Display() as display:
        run(recipes.load(tmp_path / "r.yaml"), str(tmp_path / "run"), Options(debug=True), display)
    for format in FORMATS:
        done = export_documents(open_run(tmp_path / "run"), format, str(tmp_path / format), 300_000)
        large = [file for file in done.files if file.bytes > 300_000]
        assert [file.rows for file in large] == [1]
        assert 7 <= len(done.files) <= 16, format
        assert sum(file.rows for file in done.files) == 120


def test_datatrove_reads_it(finished_run: Path, tmp_path: Path) -> None:
    from datatrove.pipeline.readers import JsonlReader

    export(finished_run, tmp_path / "out", "datatrove")
    found = list(JsonlReader(str(tmp_path / "out"), glob_pattern="*.jsonl.gz").run())
    kept = kept_rows(finished_run)
    assert [(d.id, d.text) for d in found] == [(row["doc_id"], row["text"]) for row in kept]
    assert found[0].metadata["url"] == kept[0]["url"]
    assert found[0].metadata["extract.chars"] == kept[0]["extract.chars"]


def test_dolma_documents_have_the_fields_of_its_format(finished_run: Path, tmp_path: Path) -> None:
    (path,) = export(finished_run, tmp_path / "out", "dolma", 1 << 30)
    records = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]
    for record in records:
        assert {"id", "text", "source", "metadata"} <= set(record) <= {"id", "text", "source", "created", "metadata"}
    assert records[0]["created"] == "2026-01-01T00:00:00Z"


def test_a_dataset_with_its_card(finished_run: Path, tmp_path: Path) -> None:
    """The files that the card's head names, its features and its figures are those of the data."""
    export(finished_run, tmp_path / "out", "hf")
    text = (tmp_path / "out/README.md").read_text("utf-8")
    head = YAML(typ="safe").load(re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)[1])  # type: ignore[index]
    fs, inner = filesystem(str(tmp_path / "out"))
    files = hf_files(fs, inner, None, "train")
    tables = [pq.read_table(path) for path in files]
    kept = kept_rows(finished_run)
    assert sum(part.num_rows for part in tables) == len(kept)
    info = head["dataset_info"]
    assert info["splits"][0]["num_examples"] == len(kept)
    assert info["download_size"] == sum(Path(path).stat().st_size for path in files)
    features = {one["name"]: one.get("dtype") for one in info["features"]}
    assert list(features) == tables[0].schema.names
    assert (features["text"], features["language_score"]) == ("string", "float64")
    assert head["size_categories"] == ["n<1K"]
    assert "en" in head["language"]
    assert f"{len(kept):,} documents" in text
    for part in ("## Sources", "| docs |", "| extract |", "| minhash |", "name: small", "measure of the stage extract"):
        assert part in text


def test_what_cannot_be_exported_is_refused(finished_run: Path, tmp_path: Path) -> None:
    opened = open_run(finished_run)
    with pytest.raises(RunError, match=r"No format 'xml'. There are: parquet"):
        export_documents(opened, "xml", str(tmp_path / "x"), LIMIT)
    with pytest.raises(RunError, match="too small"):
        export_documents(opened, "parquet", str(tmp_path / "x"), 10)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    with pytest.raises(RunError, match="is there and not empty"):
        export_documents(opened, "parquet", str(tmp_path / "full"), LIMIT)
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["file"]


def test_a_run_that_is_not_finished_is_refused(finished_run: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(finished_run, tmp_path / "run")
    last = sorted((tmp_path / "run").glob("0*-*"))[-1]
    (last / "ledger/part-00001.json").unlink()
    with pytest.raises(RunError, match=r"is not finished: \d of \d shards passed"):
        export_documents(open_run(tmp_path / "run"), "parquet", str(tmp_path / "x"), LIMIT)


def test_the_command(finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", "documents", str(finished_run), "--format", "dolma", "--out", str(tmp_path / "x"), "--json"]
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 0
    assert json.loads(capsys.readouterr().out)["documents"] == len(kept_rows(finished_run))
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2


@pytest.mark.parametrize(
    ("documents", "name"),
    [(0, "n<1K"), (999, "n<1K"), (1000, "1K<n<10K"), (5_000_000, "1M<n<10M"), (10**12, "n>1T")],
)
def test_size_categories(documents: int, name: str) -> None:
    assert size_category(documents) == name


def test_a_markdown_table() -> None:
    assert table(["a", "b"], [["x", "1"]]) == "| a | b |\n| --- | ---: |\n| x | 1 |"
