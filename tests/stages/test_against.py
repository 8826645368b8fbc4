"""Earlier runs as an index: what they have is dropped or marked, and nothing of theirs is signed again."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.documents import apply_decisions
from gristmill.stages.exact import Exact
from gristmill.stages.minhash import MinHash
from gristmill.stages.signatures import ClusterError

STAGES = [Exact, MinHash]


def batch(texts: list[str], ids: list[str]) -> pa.RecordBatch:
    n = len(texts)
    columns = {"doc_id": pa.array(ids, pa.string()), "source": pa.array(["web"] * n, pa.string())}
    columns |= {name: pa.nulls(n, pa.string()) for name in ("dump", "date", "url")}
    return pa.RecordBatch.from_pydict({**columns, "text": pa.array(texts, pa.string())})


def write(stage: Any, folder: Path, whole: pa.RecordBatch) -> None:
    signed = stage.sign(whole)
    with pa.ipc.new_file(folder / "part-00000.arrow", signed.schema) as writer:
        writer.write_batch(signed)


def kept(stage: Any, whole: pa.RecordBatch) -> tuple[dict[str, str | None], dict[str, Any]]:
    """-> doc_id of each document that stays and what it is marked with, figures."""
    decisions, figures = stage.cluster([pa.Table.from_batches([stage.sign(whole)])])
    result, met = apply_decisions(stage, whole, decisions[0])
    assert met == decisions[0].num_rows
    column = f"{stage.name}.older"
    marks = result.kept[column].to_pylist() if column in result.kept.schema.names else [None] * result.kept.num_rows
    return dict(zip(result.kept["doc_id"].to_pylist(), marks, strict=True)), figures


TEXTS = [" ".join(random.Random(i).choices("abcdefghijklmnopqrstuvwxyz", k=40)) for i in range(5)]


@pytest.mark.parametrize("kind", STAGES)
def test_marked_documents_stay(kind: type, tmp_path: Path) -> None:
    """Old: 0, 1. New: 0 twice, 1, 2 twice, 3. One each of 0, 1, 2, 3 stays; 0 and 1 name the older document."""
    write(kind(), tmp_path, batch([TEXTS[0], TEXTS[1]], ["old0", "old1"]))
    whole = batch([TEXTS[i] for i in (0, 0, 1, 2, 2, 3)], list("abcdef"))
    plain, _ = kept(kind(keep="first"), whole)
    dropped, figures = kept(kind(keep="first", against=(str(tmp_path),)), whole)
    stage = kind(keep="first", against=(str(tmp_path),), against_action="mark")
    marked, marked_figures = kept(stage, whole)
    assert plain == {"a": None, "c": None, "d": None, "f": None}
    assert dropped == {"d": None, "f": None}
    assert marked == {"a": "old0", "c": "old1", "d": None, "f": None}
    assert (figures["removed"], figures["removed_for_older"]) == (4, 3)
    assert (marked_figures["removed"], marked_figures["removed_for_older"]) == (2, 0)
    assert marked_figures["marked_for_older"] == 2
    assert "marked_for_older" not in figures
    decisions, _ = stage.cluster([pa.Table.from_batches([stage.sign(whole)])])
    only = decisions[0].filter(pa.array(i == "c" for i in decisions[0]["doc_id"].to_pylist())).to_pylist()
    cluster, size = (name for name in stage.adds if not name.endswith(".older"))
    assert only == [{"doc_id": "c", "reason": None, cluster: None, size: None, f"{stage.name}.older": "old1"}]


@pytest.mark.parametrize("kind", STAGES)
def test_the_column_is_there_where_documents_are_marked(kind: type) -> None:
    column = f"{kind.name}.older"  # type: ignore[attr-defined]
    assert column not in kind.adds  # type: ignore[attr-defined]
    assert column not in kind(against=("x",)).adds
    assert kind(against=("x",), against_action="mark").adds[column] == pa.string()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=6), st.lists(st.integers(0, 4), max_size=8), st.sampled_from(STAGES))
def test_what_is_marked_is_what_would_be_dropped(
    tmp_path_factory: pytest.TempPathFactory, old: list[int], new: list[int], kind: type
) -> None:
    """Marking keeps what a run of its own keeps; marked are those of them that dropping would not keep."""
    folder = tmp_path_factory.mktemp("old")
    write(kind(), folder, batch([TEXTS[i] for i in old], [f"old{i}" for i in range(len(old))]))
    whole = batch([TEXTS[i] for i in new], [f"d{i}" for i in range(len(new))])
    plain, _ = kept(kind(), whole)
    dropped, _ = kept(kind(against=(str(folder),)), whole)
    marked, figures = kept(kind(against=(str(folder),), against_action="mark"), whole)
    assert set(marked) == set(plain)
    assert {i for i, mark in marked.items() if mark is not None} == set(plain) - set(dropped)
    assert figures["marked_for_older"] == len(plain) - len(dropped)
    assert set(dropped) <= set(plain)


@pytest.mark.parametrize("kind", STAGES)
def test_older_signatures_are_read_not_made(kind: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new dump costs itself: `sign` sees its documents and no others, and the older files stay as they are."""
    write(kind(), tmp_path, batch(TEXTS, [f"old{i}" for i in range(5)]))
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.iterdir()}
    (tmp_path / "part-00000.arrow").chmod(0o444)
    stage = kind(against=(str(tmp_path),))
    whole = batch([TEXTS[0], "new"], ["a", "b"])
    signed = pa.Table.from_batches([stage.sign(whole)])

    def never(*_: Any) -> None:
        raise AssertionError("nothing is to be signed while clustering")

    monkeypatch.setattr(kind, "sign", never)
    decisions, _ = stage.cluster([signed])
    assert decisions[0]["doc_id"].to_pylist() == ["a"]
    assert {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in tmp_path.iterdir()} == before


@pytest.mark.parametrize("kind", STAGES)
def test_older_signatures_of_other_settings_are_refused(kind: type, tmp_path: Path) -> None:
    other = Exact(by="normalized") if kind is Exact else MinHash(normalize={"numbers": False})
    write(other, tmp_path, batch(TEXTS, list("abcde")))
    with pytest.raises(ClusterError, match=r"/part-00000\.arrow were made with .*normalize.*use those here"):
        kept(kind(against=(str(tmp_path),)), batch(["x"], ["a"]))
    with pytest.raises(ClusterError, match=r"holds no signatures.*keep_signatures: false"):
        kept(kind(against=(str(tmp_path / "none"),)), batch(["x"], ["a"]))
