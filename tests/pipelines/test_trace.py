"""A trace leads back to the bytes that the document came from, and on to its tokens."""

from __future__ import annotations

import gzip
import json
import shutil
import zlib
from pathlib import Path

import numpy as np
import pytest

from gristmill.pipelines import recipe as recipes
from gristmill.pipelines.cli import main
from gristmill.pipelines.open_run import RunError, open_run
from gristmill.pipelines.progress import Display
from gristmill.pipelines.run import Options, run
from gristmill.pipelines.trace import Reading, trace
from gristmill.stages.shards import join


def test_a_kept_page_leads_to_its_record_and_to_its_tokens(finished_run: Path) -> None:
    opened = open_run(finished_run)
    kept = opened.kept().to_table(columns=["doc_id", "source", "url", "text"]).to_pylist()
    page = next(row for row in kept if row["source"] == "docs")
    (found,) = trace(opened, page["doc_id"])
    assert (found.kept, found.url, found.source) == (True, page["url"], "docs")
    data = Path(found.file).read_bytes()[int(found.position or "") :]
    record = zlib.decompressobj(31).decompress(data)
    assert f"WARC-Target-URI: {page['url']}\r\n".encode() in record
    assert page["doc_id"].encode() in record
    assert found.place == f"record at byte {int(found.position or ''):,}"

    stages = {step.stage: step for step in found.steps}
    assert next(iter(stages)) == "extract"
    assert set(stages) >= {"language", "minhash"}
    assert {step.decision for step in found.steps} <= {"kept", "other sources"}
    chars = stages["extract"].readings[0]
    assert (chars.name, chars.at_least, chars.at_most) == ("extract.chars", 100, None)
    assert isinstance(chars.value, float)

    assert found.tokens is not None
    ids = np.fromfile(join(str(finished_run), found.tokens.file), np.uint16)
    ids = ids[found.tokens.start : found.tokens.start + found.tokens.length]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(finished_run / "tokens/tokenizer.json"))
    assert tokenizer.decode(ids[:-1].tolist(), skip_special_tokens=False) == page["text"]


def test_every_dropped_document_says_where_it_ended(finished_run: Path) -> None:
    opened = open_run(finished_run)
    for row in opened.dropped().to_table(columns=["doc_id", "source", "stage", "reasons"]).to_pylist():
        (found,) = [one for one in trace(opened, row["doc_id"]) if one.source == row["source"]]
        assert not found.kept
        assert found.tokens is None
        (last,) = [step for step in found.steps if step.decision == "dropped"]
        assert (last.stage, list(last.reasons)) == (row["stage"], row["reasons"])
        behind = found.steps[found.steps.index(last) + 1 :]
        assert {step.decision for step in behind} <= {"not reached", "other sources"}


def test_a_worked_example(tmp_path: Path) -> None:
    lines = [
        {"text": "one two", "id": "a"},
        {"text": "The cat and the dog of that house.", "id": "b", "metadata": {"k": 1}},
    ]
    for name in ("x", "y"):
        packed = gzip.compress("".join(json.dumps(line) + "\n" for line in lines).encode(), mtime=0)
        (tmp_path / f"{name}.jsonl.gz").write_bytes(packed)
    (tmp_path / "r.yaml").write_text(
        f"name: r\nsources: {{s: {{files: '{tmp_path}/*.gz'}}}}\nstages: [gopher_quality: {{min_words: 3}}, pii]\n"
    )
    with Display() as display:
        run(recipes.load(tmp_path / "r.yaml"), str(tmp_path / "run"), Options(debug=True), display)
    opened = open_run(tmp_path / "run")
    first, second = trace(opened, "a")
    assert [found.file.rpartition("/")[2] for found in (first, second)] == ["x.jsonl.gz", "y.jsonl.gz"]
    assert (first.place, first.chars) == ("line 1", 7)
    quality, pii = first.steps
    assert (quality.decision, pii.decision) == ("dropped", "not reached")
    assert "too_few_words" in quality.reasons
    assert Reading("gopher_quality.words", 2.0, 3, 100_000) in quality.readings
    assert trace(opened, "b")[0].metadata == '{"k":1}'
    with pytest.raises(RunError, match=r"has no document 'c'.*inspect"):
        trace(opened, "c")
    shutil.rmtree(tmp_path / "run" / "01-gopher_quality" / "ledger")
    assert {step.decision for step in trace(opened, "b")[0].steps} == {"not run yet"}


def test_the_command(finished_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    doc_id = open_run(finished_run).kept().to_table(columns=["doc_id"])["doc_id"][0].as_py()
    with pytest.raises(SystemExit) as ended:
        main(["trace", doc_id, str(finished_run)])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    for part in (doc_id, "record at byte", "extract", "chars", "tokens/part-"):
        assert part in shown
    with pytest.raises(SystemExit):
        main(["trace", doc_id, str(finished_run), "--json"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["doc_id"] == doc_id
    with pytest.raises(SystemExit) as ended:
        main(["trace", "none", str(finished_run)])
    assert ended.value.code == 2
