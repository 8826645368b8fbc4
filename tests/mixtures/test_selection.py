"""Parts of a source: the windows of chosen documents are those of shards that hold nothing else."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.mixtures.consumption import Consumption
from gristmill.mixtures.mixture import Mixture
from gristmill.mixtures.plan import MixtureError
from gristmill.mixtures.reader import ranges, stretches
from gristmill.mixtures.selection import SelectedTokens
from gristmill.tokenize.shards import TokenError

DOCS = [[300, 13, 87, 100], [250, 250]]
LOW, HIGH = "q.score < 0.5", "q.score >= 0.5"


def write_run(tokens: Any, scores: dict[str, list[float | None]]) -> None:
    """The kept documents of a run around the tokens, in another order than the tokens are. scores: by source."""
    for name, source in tokens.sources.items():
        at = 0
        for info in source.shards:
            ids = [f"{name}-{int(info.name[-5:])}-{i}" for i in range(info.documents)]
            rows = {
                "doc_id": ids[::-1],
                "q.score": pa.array(scores[name][at : at + len(ids)][::-1], pa.float64()),
                "url": [f"https://x.example/{doc_id}" for doc_id in ids[::-1]],
                "text": ["t"] * len(ids),
            }
            at += len(ids)
            path = tokens.folder.parent / "02-minhash/kept" / f"{info.name}.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            pq.write_table(pa.table(rows), path)


@pytest.fixture
def scored(make_tokens: Callable[..., Any]) -> Any:
    """docs: six documents, of which 0, 2 and 5 are good."""
    tokens = make_tokens({"docs": DOCS, "code": [[40] * 10]})
    write_run(tokens, {"docs": [0.9, 0.1, 0.5, 0.2, 0.4, 0.7], "code": [None] * 10})
    return tokens


def parts(**more: Any) -> dict[str, Any]:
    return {
        "low": {"source": "docs", "where": LOW, "epochs": 1},
        "high": {"source": "docs", "where": HIGH, "epochs": 1},
        **more,
    }


def test_worked_example(scored: Any) -> None:
    plan = Mixture(name="m", sources=parts()).plan(scored, 10)
    # low: documents of 13, 100 and 250 tokens; high: 300, 87 and 250.
    assert {name: size.tokens for name, size in plan.sizes.items()} == {"low": 363, "high": 637}
    assert {name: size.utf8_bytes for name, size in plan.sizes.items()} == {"low": 4 * 363, "high": 4 * 637}
    assert plan.source_windows == (36, 63)
    high = plan.tokens.sources["high"]
    # Ids say their place among the tokens of docs: 1 + place, and 0 ends a document.
    assert high.read(298, 5).tolist() == [299, 0, 314, 315, 316]
    assert high.read(385, 4).tolist() == [399, 0, 751, 752]
    assert high.bounds(295, 100).tolist() == [5, 92]
    assert high.document_at(386) == ("docs-0-2", "part-00000", 2)
    assert high.document_at(387) == ("docs-1-1", "part-00001", 1)
    assert "high: 3 of 6 documents of docs where q.score >= 0.5" in plan.table()
    with pytest.raises(TokenError, match="holds 637 tokens; the range from 637 of 1 tokens leaves it"):
        high.read(637, 1)


def test_windows_are_those_of_shards_with_the_chosen_documents_alone(
    scored: Any, tmp_path: Path, make_tokens: Callable[..., Any]
) -> None:
    plan = Mixture(name="m", sources=parts()).plan(scored, 10, seed=3)
    seen: dict[str, set[int]] = {"low": set(), "high": set()}
    for batch in plan.loader(batch_windows=20):
        for i in range(len(batch.tokens)):
            name, window = plan.sources[batch.source[i]], int(batch.window[i])
            held = plan.tokens.sources[name]
            whole = np.concatenate([ids for k, (_, ids, _) in enumerate(held.whole.documents()) if _good(k, name)])
            assert (batch.tokens[i] == whole[window * 10 : window * 10 + 11]).all()
            assert (batch.starts[i] == held.bounds(window * 10, 11)).all()
            assert (np.flatnonzero(np.diff(batch.documents[i])) + 1).tolist() == [s for s in batch.starts[i] if s]
            seen[name].add(window)
    assert seen == {"low": set(range(36)), "high": set(range(63))}


def _good(document: int, name: str) -> bool:
    return (document in (0, 2, 5)) == (name == "high")


def test_packed_by_best_fit_each_chosen_token_comes_once(scored: Any) -> None:
    plan = Mixture(name="m", sources=parts(), packing="best_fit").plan(scored, 128)
    seen: list[int] = []
    for batch in plan.loader(batch_windows=5):
        assert batch.predicted is not None
        seen += batch.tokens[:, 1:][batch.predicted].tolist()
        for row, pad in zip(batch.tokens, batch.padding, strict=True):
            assert (row[len(row) - pad :] == scored.eos_id).all()
    # All targets but the first tokens of documents that begin a window, those in padding being none.
    assert set(seen) <= set(range(1001))
    starts, ends = (0, 300, 313, 400, 500, 750), (300, 313, 400, 500, 750, 1000)
    inner = [place + 1 for a, b in zip(starts, ends, strict=True) for place in range(a + 1, b - 1)]
    assert sorted(t for t in seen if t in set(inner)) == inner
    assert len(seen) == plan.predicted_tokens(0, plan.windows)


def test_any_world_size_and_pickling(scored: Any) -> None:
    plan = Mixture(name="m", sources=parts(), seed=2).plan(scored, 10)
    whole = np.concatenate([b.tokens for b in plan.loader(batch_windows=12)])
    for world in (2, 3):
        loaders = [pickle.loads(pickle.dumps(plan.loader(r, world, 12))) for r in range(world)]
        again = [b.tokens for step in zip(*loaders, strict=True) for b in step]
        assert (np.concatenate(again) == whole).all()


# --- what is refused ---


def test_documents_in_two_sources_are_refused(scored: Any) -> None:
    both = parts(high={"source": "docs", "where": "q.score > 0.3", "epochs": 1})
    with pytest.raises(MixtureError, match="1 documents of docs are in both 'low' and 'high', and would be repeated"):
        Mixture(name="m", sources=both).plan(scored, 10)
    with pytest.raises(MixtureError, match="6 documents of docs are in both 'docs' and 'again'"):
        Mixture(name="m", sources={"docs": 1, "again": {"source": "docs", "weight": 1}}).plan(scored, 10, 100)


def test_what_no_source_takes_is_said(scored: Any) -> None:
    plan = Mixture(name="m", sources={"best": {"source": "docs", "where": "q.score > 0.8", "weight": 1}}).plan(
        scored, 10, 200
    )
    assert "5 of 6 documents of docs are in no source of this mixture" in plan.notes


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("q.scor > 1", r"have no column 'q\.scor' .*Did you mean `q\.score`\?"),
        ("q.score > 2", r"holds for none of the 6 documents of docs"),
        ("q.score == 'good'", "cannot be decided"),
    ],
)
def test_conditions_that_cannot_be_met(scored: Any, where: str, message: str) -> None:
    with pytest.raises(MixtureError, match=message):
        Mixture(name="m", sources={"docs": {"where": where, "weight": 1}}).plan(scored, 10, 100)


def test_without_measures_the_way_to_them_is_told(tokens: Any) -> None:
    with pytest.raises(MixtureError, match=r"is not known: .*`gristmill tokens measures RUN`"):
        Mixture(name="m", sources={"docs": {"where": LOW, "weight": 1}}).plan(tokens, 10, 100)


def test_a_bad_condition_has_a_line(tmp_path: Path) -> None:
    path = tmp_path / "m.yaml"
    path.write_text("name: m\nsources:\n  a: {weight: 1, where: 'open(1) > 2'}\n")
    with pytest.raises(MixtureError, match=r"m\.yaml:3: `sources\.a\.where`: `open\(1\)` is neither a column"):
        Mixture.load(path)
    path.write_text("name: m\nsources: {a: 1}\nphases: [{name: x, share: 1, weights: {a: {where: 'n > 1'}}}]\n")
    with pytest.raises(MixtureError, match="say what a is, in every phase: give them under sources"):
        Mixture.load(path)


# --- identity and books ---


def test_another_measure_is_another_plan(scored: Any) -> None:
    first = Mixture(name="m", sources=parts()).plan(scored, 10)
    write_run(scored, {"docs": [0.9, 0.6, 0.5, 0.2, 0.4, 0.7], "code": [None] * 10})
    second = Mixture(name="m", sources=parts()).plan(scored, 10)
    assert first.hash != second.hash
    same = parts(low={"source": "docs", "where": "not (q.score >= 0.5)", "epochs": 1})
    assert Mixture(name="m", sources=same).plan(scored, 10).hash == second.hash


def test_books_of_parts(scored: Any) -> None:
    trunk = Mixture(name="t", sources=parts()).plan(scored, 10)
    books = Consumption.after(trunk, 50)
    assert books.sources["high"].source == "docs"
    assert books.sources["high"].where == HIGH
    fork = {"high": {"source": "docs", "where": HIGH, "weight": 1}}
    plan = Mixture(name="f", sources=fork, max_epochs=1).plan(scored, 10, 200, continue_from=books)
    seen = {trunk.locate(i) for i in range(50)}
    assert not seen & {plan.locate(i) for i in range(20)}
    # The same documents under other names or conditions: what was seen of them is not known.
    for sources in (
        {"docs": 1},
        {"best": {"source": "docs", "where": "q.score > 0.8", "weight": 1}},
    ):
        with pytest.raises(MixtureError, match="the run to continue from used docs as '"):
            Mixture(name="f", sources=sources).plan(scored, 10, 100, continue_from=books)
    whole = Consumption.after(Mixture(name="t", sources={"docs": 1}).plan(scored, 10, 300), 30)
    with pytest.raises(MixtureError, match="used docs as 'docs', and 3 of those documents are in 'high' now"):
        Mixture(name="f", sources=fork).plan(scored, 10, 100, continue_from=whole)


def test_a_part_can_keep_the_name_of_its_source(scored: Any) -> None:
    plan = Mixture(name="m", sources={"docs": {"where": HIGH, "weight": 1}, "code": 1}).plan(scored, 10, 200)
    assert isinstance(plan.tokens.sources["docs"], SelectedTokens)
    assert plan.sizes["docs"].tokens == 637
    assert plan.sizes["code"].tokens == 400


# --- arithmetic of pieces ---


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 30), st.data())
def test_stretches_cover_ranges(lengths: list[int], length: int, data: st.DataObject) -> None:
    offset = np.concatenate([[0], np.cumsum(lengths)])
    total = int(offset[-1])
    length = min(length, total)
    begins = np.array(data.draw(st.lists(st.integers(0, total - length), min_size=1, max_size=6)))
    first, start, size = stretches(offset, begins, length)
    document = np.repeat(np.arange(len(lengths)), lengths)
    for i, begin in enumerate(begins.tolist()):
        mine = slice(int(first[i]), int(first[i + 1]))
        covered = [t for a, n in zip(start[mine], size[mine], strict=True) for t in range(a, a + n)]
        assert covered == list(range(begin, begin + length))
        assert all(len(set(document[a : a + n].tolist())) == 1 for a, n in zip(start[mine], size[mine], strict=True))


def test_ranges() -> None:
    first, numbers = ranges(np.array([3, 7, 7]), np.array([5, 7, 9]))
    assert first.tolist() == [0, 2, 2, 4]
    assert numbers.tolist() == [3, 4, 7, 8]


def test_a_part_of_a_source_that_is_not_there_names_that_source(scored: Any) -> None:
    mixture = Mixture(name="m", sources={"low": {"source": "dosc", "where": LOW, "weight": 1}})
    with pytest.raises(MixtureError, match=r"no tokens of source 'dosc' for 'low'\. Did you mean `docs`\?$"):
        mixture.plan(scored, 8, 100)
