"""Token shards of a run: cut, shuffled, measured, and without near copies of held-out documents."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import orjson
import pyarrow as pa
import pytest

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines import shuffled_tokens
from gristmill.pipelines.funnel import funnel
from gristmill.pipelines.learn import remove_pieces
from gristmill.pipelines.near_holdout import warning
from gristmill.pipelines.open_run import open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.report.figures import page_data
from gristmill.pipelines.report.write import render
from gristmill.pipelines.run import Options, Outcome, run
from gristmill.pipelines.trace import trace
from gristmill.pipelines.verify import verify
from gristmill.stages.ledger import LedgerError
from gristmill.stages.settings_file import SettingsError
from gristmill.stages.shards import Shard
from gristmill.tokenize.sample import is_held_out
from gristmill.tokenize.shards import ShardInfo, TokenSet

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
    assert any("2 of 18 training documents nearly repeat a held-out document" in text for text in data["warnings"])
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


@pytest.mark.parametrize(("shuffle", "pieces", "mended"), [("within_shard", 3, 1), ("documents", 6, 3)])
def test_shards_that_are_cut_and_shuffled_hold_the_same_documents(
    folder: Path, shuffle: str, pieces: int, mended: int
) -> None:
    """Across shards, parts are sorted and shards merged; to mend one, the two parts of its source are sorted again."""
    do(folder)
    plain = documents(folder)
    longest = max(len(ids) for found in plain.values() for ids in found)
    outcome = do(folder, f", max_tokens: {longest + 10}, shuffle: {shuffle}, seed: 3")
    assert outcome.done == pieces
    cut = documents(folder)
    names = {p.name for p in (folder / "run/tokens").glob("*.bin")}
    assert {"part-00000.bin", "part-00000-001.bin", "holdout-00000-001.bin"} <= names
    assert not (folder / "run/tokens/shuffle").exists()
    manifest = TokenSet.open(folder / "run/tokens").manifest
    assert (manifest.shuffle, manifest.seed) == (shuffle, 3)
    assert {key: sorted(found) for key, found in cut.items()} == {key: sorted(found) for key, found in plain.items()}
    assert cut != plain
    assert all(s.tokens <= longest + 10 for s in TokenSet.open(folder / "run/tokens").manifest.shards)
    assert verify(open_run(folder / "run")) == []
    lost = folder / "run/tokens/part-00000-002.bin"
    data = lost.read_bytes()
    lost.unlink()
    assert do(folder, f", max_tokens: {longest + 10}, shuffle: {shuffle}, seed: 3").done == mended
    assert lost.read_bytes() == data
    do(folder)  # fewer shards than before: none of the others stays
    assert documents(folder) == plain
    assert verify(open_run(folder / "run")) == []


def files_of(folder: Path) -> dict[str, bytes]:
    found = [path for pattern in ("*.bin", "*.idx", "shards.json") for path in folder.glob(f"run/tokens/{pattern}")]
    return {path.name: path.read_bytes() for path in found}


def test_documents_move_between_the_shards_of_their_source_and_are_found(folder: Path) -> None:
    do(folder, ", shuffle: documents")
    opened = open_run(folder / "run")
    assert verify(opened) == []
    tokens = TokenSet.open(folder / "run/tokens")
    moved = 0
    for source in tokens.sources.values():
        for info, _, index in source.parts():
            assert {doc_id.as_py()[:1] for doc_id in index.doc_id} <= {source.name}
            for row, doc_id in enumerate(index.doc_id):
                (found,) = trace(opened, doc_id.as_py())
                at = found.tokens
                assert at is not None
                assert (at.file, at.row) == (f"tokens/{info.bin}", row)
                assert (at.start, at.length) == (int(index.start[row]), int(index.length[row]))
                moved += int(info.name.removeprefix("part-")) != found.shard
    assert moved > 2
    book = opened.stages()["tokenize"]
    assert (book.kept.documents, book.dropped["holdout"].documents) == (18, 9)
    # the books of a part are those of its own documents
    plain = [ledger.stages[0].read.documents for ledger in opened.ledgers("tokens")]
    assert plain == [9, 9, 9]


def test_a_shuffle_that_was_killed_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    do(folder, ", shuffle: documents")
    whole = files_of(folder)
    shutil.rmtree(folder / "run")
    real = shuffled_tokens.gather_shard

    def killed(path: str, parts: Any, at: int, name: str, **options: Any) -> Any:
        if name == "part-00001":
            raise KeyboardInterrupt
        return real(path, parts, at, name, **options)

    monkeypatch.setattr(shuffled_tokens, "gather_shard", killed)
    with pytest.raises(KeyboardInterrupt):
        do(folder, ", shuffle: documents")
    assert not (folder / "run/tokens/shards.json").exists()
    sorted_parts = sorted(path.name for path in (folder / "run/tokens/shuffle").glob("*.json"))
    assert sorted_parts == ["part-00000.json", "part-00001.json", "part-00002.json"]
    monkeypatch.setattr(shuffled_tokens, "gather_shard", real)
    assert (
        do(folder, ", shuffle: documents").done == 3
    )  # two shards that were not merged, and the tokenizer's report; nothing is encoded again
    assert files_of(folder) == whole
    assert verify(open_run(folder / "run")) == []
    assert do(folder, ", shuffle: documents").done == 0
    assert do(folder, ", shuffle: documents, seed: 1").done == 6
    assert files_of(folder).keys() == whole.keys()
    assert files_of(folder) != whole


def test_a_shuffle_in_a_store_gives_the_bytes_of_one_on_a_disk(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    do(folder, ", shuffle: documents")
    monkeypatch.setenv("GRISTMILL_CACHE", str(tmp_path / "cache"))
    store = fsspec.filesystem("memory")
    out = "memory://shuffled/run"
    try:
        with Display() as display:
            run(recipes.load(folder / "near.yaml"), out, Options(debug=True), display)
        names = [path.rsplit("/", 1)[-1] for path in store.find("/shuffled/run/tokens")]
        there = {name: store.cat_file(f"/shuffled/run/tokens/{name}") for name in files_of(folder)}
    finally:
        store.rm("/shuffled", recursive=True)
    assert there == files_of(folder)
    assert not [name for name in names if name.endswith((".ids", ".rows"))]


def test_a_document_that_is_lost_or_doubled_between_shards_stops_the_manifest(folder: Path) -> None:
    do(folder, ", shuffle: documents")
    opened = open_run(folder / "run")
    infos = [ShardInfo.model_validate(info) for info in opened.token_shards["shards"]]
    ledgers = list(opened.ledgers("tokens"))
    assert shuffled_tokens.balance(infos, ledgers) == []
    (line,) = shuffled_tokens.balance(infos[1:], ledgers)
    assert line.startswith("source 'a', train: the token shards hold ")
    shards = [Shard.model_validate(entry) for entry in opened.inputs]
    with pytest.raises(LedgerError, match=r"tokens: source 'b', train: .* No manifest was written"):
        shuffled_tokens.check_balance(str(folder / "run"), [*infos, infos[2]], shards)


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
    for name in ("part-00001", "holdout-00001"):
        remove_pieces(str(tmp_path), name)
    assert {path.stem for path in tmp_path.iterdir()} == set(others)
