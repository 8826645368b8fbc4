"""Measures of documents beside their tokens: joined by id, carried with the folder, refused when they are others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.tokenize.measures import document_columns, known_columns, rows_of, write_measures
from gristmill.tokenize.shards import TokenError, TokenSet


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished_run, tmp_path / "run"))


def by_id(run: Path, column: str) -> dict[tuple[str, str], object]:
    last = sorted(path for path in run.glob("[0-9][0-9]-*"))[-1]
    rows = [
        (path.stem, row)
        for path in last.glob("kept/*.parquet")
        for row in pq.read_table(path, columns=["doc_id", column]).to_pylist()
    ]
    return {(part, row["doc_id"]): row[column] for part, row in rows}


def test_the_run_and_the_folder_alone_say_the_same(run: Path, tmp_path: Path) -> None:
    names = ["classifier.score", "language", "gopher_quality.words"]
    tokens = TokenSet.open(run / "tokens")
    before = {name: document_columns(source, names) for name, source in tokens.sources.items()}
    for name, source in tokens.sources.items():
        expected = by_id(run, "classifier.score")
        ids = [(info.name, doc_id) for _, info, index in source.indexes() for doc_id in index.doc_id.to_pylist()]
        assert before[name]["classifier.score"].to_pylist() == [expected[key] for key in ids]
        assert set(names) <= set(known_columns(source))
    columns = write_measures(run / "tokens")
    assert "text" not in columns
    assert "url" in columns
    alone = Path(shutil.copytree(run / "tokens", tmp_path / "elsewhere/tokens"))
    moved = TokenSet.open(alone)
    for name, source in moved.sources.items():
        assert document_columns(source, names).equals(before[name])
    shard = moved.sources["docs"].shards[0].name
    assert rows_of(moved, shard, [1, 0]) == rows_of(tokens, shard, [1, 0])
    assert rows_of(moved, shard, [0])[0]["url"].startswith("https://docs.example/")


def test_measures_of_other_shards_are_refused(run: Path) -> None:
    write_measures(run / "tokens", ["classifier.score"])
    tokens = TokenSet.open(run / "tokens")
    name = tokens.sources["docs"].shards[0].name
    path = run / "tokens/measures" / f"{name}.parquet"
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"idx_xxh3": "0" * 32}), path)
    with pytest.raises(TokenError, match=r"does not belong to the index .*idx: one of them was made anew"):
        document_columns(tokens.sources["docs"], ["classifier.score"])


def test_a_document_that_the_run_does_not_have_is_an_error(run: Path) -> None:
    tokens = TokenSet.open(run / "tokens")
    name = tokens.sources["docs"].shards[0].name
    path = sorted(run.glob("[0-9][0-9]-*"))[-1] / "kept" / f"{name}.parquet"
    table = pq.read_table(path)
    pq.write_table(table.set_column(0, "doc_id", pa.array([f"x{i}" for i in range(len(table))])), path)
    with pytest.raises(TokenError, match=r"is not there, but .*\.idx has it: documents and tokens are of different"):
        document_columns(tokens.sources["docs"], ["classifier.score"])


def test_a_folder_without_run_and_measures_says_what_to_do(run: Path, tmp_path: Path) -> None:
    alone = Path(shutil.copytree(run / "tokens", tmp_path / "elsewhere/tokens"))
    tokens = TokenSet.open(alone)
    assert known_columns(tokens.sources["docs"]) == []
    for ask in (lambda: document_columns(tokens.sources["docs"], ["x"]), lambda: write_measures(alone)):
        with pytest.raises(TokenError, match="where the run is"):
            ask()
