"""Token shards of a run: cut, shuffled, measured, and without near copies of held-out documents."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import orjson
import pyarrow as pa
import pytest

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.learn import _remove_pieces
from gristmill.pipelines.near_holdout import warning
from gristmill.pipelines.open_run import funnel, open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.report.figures import page_data
from gristmill.pipelines.report.write import render
from gristmill.pipelines.run import Options, Outcome, run
from gristmill.pipelines.verify import verify
from gristmill.stages.settings_file import SettingsError
from gristmill.tokenize.sample import is_held_out
from gristmill.tokenize.shards import TokenSet

SHARE = 0.3
RECIPE = """
name: near
sources:
  a: {{files: "{folder}/a-*.jsonl"}}
  b: {{files: "{folder}/b.jsonl"}}
tokenizer: {{vocab_size: 300}}
tokens: {{holdout_share: {share}{more}}}
"""


def do(folder: Path, more: str = "") -> Outcome:
    (folder / "near.yaml").write_text(RECIPE.format(folder=folder, share=SHARE, more=more))
    with Display() as display:
        return run(recipes.load(folder / "near.yaml"), str(folder / "run"), Options(debug=True), display)


def held_out(text: str) -> bool:
    return bool(is_held_out(pa.array([text]), SHARE)[0])


def sentence(n: int, last: str) -> str:
    """Sixty words of their own, then one more."""
    return " ".join(letters(100 * n + i) for i in range(60)) + f" {last}"


def letters(n: int) -> str:
    """A word for a number; numbers themselves are all alike to shingles."""
    return "".join("abcdefghij"[int(digit)] for digit in f"{n:04d}")


def with_side(n: int, side: bool) -> str:
    """A text of the family n that is held out, or one that is not."""
    return next(text for i in range(1_000) if held_out(text := sentence(n, f"end{letters(i)}")) == side)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of family 0, one document is held out and a near copy of it in each of the other files is not."""
    copies = [t for i in range(1_000) if not held_out(t := sentence(0, f"copy{letters(i)}"))][:2]
    others = [with_side(n, n % 3 == 0) for n in range(1, 25)]
    files = {
        "a-0": [with_side(0, True), *others[:8]],
        "a-1": [*others[8:16], copies[0]],
        "b": [copies[1], *others[16:]],
    }
    for name, texts in files.items():
        lines = (json.dumps({"id": f"{name}-{i}", "text": text}) for i, text in enumerate(texts))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return tmp_path


def documents(path: Path) -> dict[tuple[str, str], list[list[int]]]:
    tokens = TokenSet.open(path / "run/tokens")
    splits = {"train": tokens.sources, "holdout": tokens.holdout}
    return {
        (split, name): [ids.tolist() for _, ids, _ in source.documents()]
        for split, sources in splits.items()
        for name, source in sources.items()
    }


def test_near_copies_of_held_out_documents_are_named_and_dropped_on_request(folder: Path) -> None:
    do(folder)
    report = orjson.loads((folder / "run/tokens/holdout_report.json").read_bytes())
    assert {k: report[k] for k in ("held_out", "training", "near", "held_out_with_near", "dropped")} == {
        "held_out": 9,
        "training": 18,
        "near": 2,
        "held_out_with_near": 1,
        "dropped": False,
    }
    assert report["near_by_source"] == {"a": 1, "b": 1}
    # 61 words: 57 shingles each, 56 of them shared; 56 / 58
    assert [(e["doc_id"], e["holdout"], e["similarity"]) for e in report["examples"]] == [
        ("a-1-8", "a-0-0", 0.9655),
        ("b-0", "a-0-0", 0.9655),
    ]
    data = page_data(open_run(folder / "run"), recipes.STAGES)
    assert any("2 of 18 training documents are nearly the same" in text for text in data["warnings"])
    assert "Near held-out documents" in render(data)
    before = documents(folder)

    outcome = do(folder, ", drop_near_holdout: true")
    assert outcome.done == 3  # the token shards; what is near was known
    opened = open_run(folder / "run")
    assert verify(opened) == []
    after = documents(folder)
    assert {key: len(before[key]) - len(after[key]) for key in before} == {
        ("train", "a"): 1, ("train", "b"): 1, ("holdout", "a"): 0, ("holdout", "b"): 0
    }  # fmt: skip
    book = opened.stages()["tokenize"]
    assert (book.dropped["near_holdout"].documents, book.kept.documents) == (2, 16)
    assert [row.dropped for row in funnel(opened, sources=False)][-1] == 2
    report = orjson.loads((folder / "run/tokens/holdout_report.json").read_bytes())
    assert (report["near"], report["dropped"], warning(report)) == (2, True, None)
    assert do(folder, ", drop_near_holdout: true").done == 0


def test_another_similarity_is_looked_for_without_a_new_shard(folder: Path) -> None:
    do(folder)
    outcome = do(folder, ", near_holdout_similarity: 0.97")
    assert outcome.done == 3
    assert orjson.loads((folder / "run/tokens/holdout_report.json").read_bytes())["near"] == 0


def test_a_shard_that_is_cut_and_shuffled_holds_the_same_documents(folder: Path) -> None:
    do(folder)
    plain = documents(folder)
    longest = max(len(ids) for found in plain.values() for ids in found)
    outcome = do(folder, f", max_tokens: {longest + 10}, shuffle: documents, seed: 3")
    assert outcome.done == 3
    cut = documents(folder)
    names = {p.name for p in (folder / "run/tokens").glob("*.bin")}
    assert {"part-00000.bin", "part-00000-001.bin", "holdout-00000-001.bin"} <= names
    assert {key: sorted(found) for key, found in cut.items()} == {key: sorted(found) for key, found in plain.items()}
    assert cut != plain
    assert all(s.tokens <= longest + 10 for s in TokenSet.open(folder / "run/tokens").manifest.shards)
    assert verify(open_run(folder / "run")) == []
    lost = folder / "run/tokens/part-00000-002.bin"
    data = lost.read_bytes()
    lost.unlink()
    assert do(folder, f", max_tokens: {longest + 10}, shuffle: documents, seed: 3").done == 1
    assert lost.read_bytes() == data
    do(folder)  # fewer shards than before: none of the others stays
    assert documents(folder) == plain
    assert verify(open_run(folder / "run")) == []


def test_settings_that_make_no_sense(folder: Path) -> None:
    for more, message in ((", shuffle: shards", "shuffle"), (", max_tokens: 1", "max_tokens"), (", seed: -1", "seed")):
        with pytest.raises(SettingsError, match=message):
            do(folder, more)


def test_nothing_held_out_nothing_compared(folder: Path) -> None:
    do(folder)  # what it says of held-out documents does not stay
    assert (folder / "run/tokens/near").exists()
    (folder / "near.yaml").write_text(RECIPE.format(folder=folder, share=0, more=""))
    with Display() as display:
        run(recipes.load(folder / "near.yaml"), str(folder / "run"), Options(debug=True), display)
    assert not (folder / "run/tokens/holdout_report.json").exists()
    assert not (folder / "run/tokens/near").exists()
    assert page_data(open_run(folder / "run"), recipes.STAGES)["holdout"] is None


def test_the_tokenizer_is_measured_once_and_drawn(
    finished_run: Path, recipe_file: Callable[..., Path], folder: Path
) -> None:
    card = orjson.loads((finished_run / "tokens/tokenizer_report.json").read_bytes())
    data = page_data(open_run(finished_run), recipes.STAGES)
    shown = data["tokenizer"]
    assert (shown["vocab_size"], shown["lossy"]) == (400, 0)
    groups = card["report"]["tokenizers"]["tokenizer"]["groups"]
    assert {row["group"] for row in shown["groups"]} == set(groups)
    first = shown["groups"][0]
    assert first["bytes_per_token"] == first["bytes"] / first["tokens"]
    page = render(data)
    assert f"{first['bytes_per_token']:.3f}" in page
    assert 'id="tokenizer-probes"' in page


def test_pieces_of_an_earlier_attempt_go_and_no_others(tmp_path: Path) -> None:
    names = ["part-00001", "part-00001-001", "part-00001-002", "holdout-00001"]
    others = ["part-00010", "part-000011-001", "holdout-00010"]
    for name in (*names, *others):
        (tmp_path / f"{name}.bin").write_bytes(b"1")
        (tmp_path / f"{name}.idx").write_bytes(b"1")
    (tmp_path / "part-00001-002.bin").unlink()
    _remove_pieces(str(tmp_path), "part-00001")
    assert {path.stem for path in tmp_path.iterdir()} == set(others)
