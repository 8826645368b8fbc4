"""`gristmill models`: trained on files, tested on files, asked on standard input; errors that say what next."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

import orjson
import pytest

from gristmill.pipelines import model_files
from gristmill.pipelines.cli import main
from gristmill.stages.kneser_ney import ModelError, load_arpa

GOOD = [f"The cat number {i} sat on the mat.\nIt slept for {i % 9} days, and then it woke." for i in range(160)]
BAD = [f"Home Login Cart {i}\nAccept all cookies {i % 9} Privacy Next" for i in range(160)]


@pytest.fixture
def corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, texts in (("good", GOOD), ("bad", BAD)):
        with gzip.open(f"{name}.jsonl.gz", "wb") as file:
            file.writelines(orjson.dumps({"id": f"{name}-{i}", "text": t}) + b"\n" for i, t in enumerate(texts))
    Path("prose.yaml").write_text("kenlm: {text: {files: '*ood.jsonl.gz'}, order: 2, holdout: 0.2}\n")
    Path("quality.yaml").write_text(
        "fasttext:\n  positive: {files: good.jsonl.gz}\n  negative: {files: bad.jsonl.gz}\n  epoch: 40\n  lr: 0.5\n"
        "  dim: 8\n  buckets: 100\n"
    )
    return tmp_path


def call(capfdbinary: pytest.CaptureFixture[bytes], *arguments: str) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of a command in this process."""
    with pytest.raises(SystemExit) as ended:
        main(["models", *arguments])
    shown = capfdbinary.readouterr()
    return int(ended.value.code or 0), shown.out.decode(), shown.err.decode()


def last_event(out: str) -> dict:
    return dict(json.loads(out.splitlines()[-1]))


def stdin_of(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))


def test_a_language_model(
    corpus: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = call(capfdbinary, "train", "prose.yaml", "--out", "m", "--json")
    assert code == 0
    card = last_event(out)["card"]
    entry = card["languages"][""]
    assert entry["documents"] + entry["held_out"]["documents"] == 160
    assert json.loads(Path("m/card.json").read_bytes()) == card
    assert sorted(p.name for p in Path("m").iterdir()) == ["card.json", "lm.arpa", "lm.npy", "model.json"]

    code, out, _ = call(capfdbinary, "eval", "m", "--text", "good.jsonl.gz", "--text", "bad.jsonl.gz", "--json")
    assert code == 0
    figures = last_event(out)["languages"][""]
    assert figures["documents"] == 320
    good = last_event(call(capfdbinary, "eval", "m", "--text", "good.jsonl.gz", "--json")[1])["languages"][""]
    assert good["perplexity"] < figures["perplexity"] / 3

    stdin_of(monkeypatch, b"The cat sat.\n\nqqq zzz")
    code, out, _ = call(capfdbinary, "score", "m", "-")
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["line"] for row in rows] == [1, 2, 3]
    log10 = load_arpa("m/lm.arpa").score("the cat sat .")
    assert rows[0]["perplexity"] == pytest.approx(10 ** (-log10 / 5), rel=1e-5)
    assert rows[1]["perplexity"] is None
    assert rows[2]["perplexity"] > 3 * rows[0]["perplexity"]

    code, out, _ = call(capfdbinary, "eval", "m", "--text", "good.jsonl.gz")
    assert code == 0
    assert "all" in out
    assert "160" in out


def test_a_classifier(corpus: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, _ = call(capfdbinary, "train", "quality.yaml", "--out", "c")
    assert code == 0
    assert "Calibration" in out
    assert out.rstrip().endswith("c")
    two = ("--positive", "good.jsonl.gz", "--negative", "bad.jsonl.gz")
    code, out, _ = call(capfdbinary, "eval", "c", *two, "--json", "--min-score", "0.9")
    assert code == 0
    figures = last_event(out)
    assert (figures["positive"], figures["negative"], figures["min_score"]) == (160, 160, 0.9)
    assert figures["auc"] == 1
    assert len(figures["calibration"]) == 10
    assert sum(row["documents"] for row in figures["calibration"]) == 320

    code, out, _ = call(capfdbinary, "score", "c", "bad.jsonl.gz", "good.jsonl.gz")
    assert code == 0
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["id"] for row in rows] == [f"bad-{i}" for i in range(160)] + [f"good-{i}" for i in range(160)]
    assert max(row["score"] for row in rows[:160]) < min(row["score"] for row in rows[160:])
    stdin_of(monkeypatch, b'\n{"id": "x", "text": "The cat slept."}\n{"text": "Login \\ud800 Cart"}\nplain\n')
    code, out, err = call(capfdbinary, "score", "c/model.bin")
    assert code == 1
    assert "Line 4 of standard input is no JSON object with a string `text`" in err
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row.get("id") for row in rows] == [None, "x", None]
    assert rows[1]["score"] > 0.5 > rows[2]["score"]


def test_a_model_for_each_language_finds_languages_itself(
    corpus: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    german = [f"Die Katze Nummer {i} schlief auf der Matte, und niemand weckte sie an diesem Tag." for i in range(120)]
    Path("de.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in german))
    Path("each.yaml").write_text(
        "kenlm: {text: {files: '*.jsonl*'}, order: 2, per_language: true, min_language_bytes: 6000}\n"
    )
    code, out, _ = call(capfdbinary, "train", "each.yaml", "--out", "m", "--json")
    assert code == 0
    card = last_event(out)["card"]
    assert {"de", "en"} <= set(card["languages"])
    code, out, _ = call(capfdbinary, "eval", "m", "--text", "de.jsonl", "--json")
    assert last_event(out)["languages"]["de"]["documents"] > 100
    stdin_of(monkeypatch, "Die Katze schlief auf der Matte und niemand weckte sie.\nねこはねむる。\n".encode())
    rows = [json.loads(line) for line in call(capfdbinary, "score", "m")[1].splitlines()]
    assert [row["language"] for row in rows] == ["de", "ja"]
    assert rows[0]["perplexity"] > 1
    assert rows[1] | {"line": 2} == {
        "line": 2,
        "language": "ja",
        "perplexity": None,
        "percentile": None,
        "bucket": "all",
    }


def test_lines_are_scored_as_they_come(corpus: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Two lines are written into a pipe that stays open; their rows arrive."""
    call(capfdbinary, "train", "prose.yaml", "--out", "m")
    reading, writing = os.pipe()
    with open(reading, "rb") as stream, open(writing, "wb") as pipe:
        pipe.write(b"The cat.\nThe mat.\nIt sl")
        pipe.flush()
        rows = model_files.score_lines_of("m", stream)
        assert [row["line"] for row in next(rows)] == [1, 2]
        pipe.write(b"ept.")
        pipe.close()
        assert [row["line"] for row in next(rows)] == [3]
        assert next(rows, None) is None


def test_a_reader_that_has_enough_is_no_error(corpus: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    call(capfdbinary, "train", "prose.yaml", "--out", "m")
    command = [sys.executable, "-m", "gristmill.pipelines.cli", "models", "score", "m"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        feeder = threading.Thread(target=_feed, args=(process.stdin,))
        feeder.start()
        assert json.loads(process.stdout.readline())["line"] == 1
        process.stdout.close()
        feeder.join()
        error = process.stderr.read().decode()
    assert process.returncode == 0
    assert "Traceback" not in error


def _feed(stdin: IO[bytes]) -> None:
    try:
        for _ in range(3_000):
            stdin.write(b"The cat sat on the mat and slept.\n" * 100)
        stdin.close()
    except BrokenPipeError:
        return


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", r"one model a file, `kenlm: \{\.\.\.\}` or `fasttext: \{\.\.\.\}`.*this one has nothing"),
        ("kenlm: {}\nfasttext: {}\n", "this one has `kenlm`, `fasttext`"),
        ("\nkenml: {}\n", r"model\.yaml:2: no kind of model `kenml`\. Did you mean `kenlm`\?"),
        ("kenlm:\n  text: {sources: [docs]}\n", r"model\.yaml:2: `text` does not say which files to read"),
        ("kenlm:\n  text: {files: x}\n  ordr: 3\n", r"model\.yaml:3: .*ordr.*order"),
    ],
)
def test_files_of_settings_that_are_wrong(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model.yaml").write_text(text)
    with pytest.raises(ValueError, match=message):
        model_files.load(tmp_path / "model.yaml")


def test_wrong_questions_are_2_and_failures_1(corpus: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    def fails(code: int, message: str, *arguments: str) -> None:
        found, _, err = call(capfdbinary, *arguments)
        assert (found, message in err) == (code, True), err

    fails(2, "no such file", "train", "none.yaml", "--out", "m")
    fails(1, "m holds no model.json. Name a folder that `gristmill models train`", "score", "m", "good.jsonl.gz")
    Path("missing.yaml").write_text("kenlm: {text: {files: 'none*.jsonl'}}\n")
    fails(1, "No file matches none*.jsonl", "train", "missing.yaml", "--out", "m")
    Path("one.jsonl").write_text('{"text": "too little"}\n')
    Path("little.yaml").write_text("kenlm: {text: {files: one.jsonl}}\n")
    fails(1, "at least 1,000 are needed", "train", "little.yaml", "--out", "m")
    assert not Path("m").exists()
    assert call(capfdbinary, "train", "prose.yaml", "--out", "m")[0] == 0
    fails(1, "m exists already. Give another --out", "train", "prose.yaml", "--out", "m")
    fails(2, "m is a language model: give --text FILES", "eval", "m", "--positive", "x", "--negative", "y")
    fails(2, "`-` is standard input: give it alone", "score", "m", "-", "good.jsonl.gz")
    fails(1, "good.doc: the name does not say which format the file has", "score", "m", _named("good.doc"))
    Path("m/model.json").write_text('{"kind": "word2vec"}')
    fails(1, "is of a model of kind 'word2vec'; known are kenlm, fasttext", "score", "m")
    Path("m/model.json").write_text("{")
    fails(1, "cannot be read", "score", "m")


def _named(name: str) -> str:
    Path(name).write_text("x\n")
    return name


def test_a_classifier_wants_both_kinds(corpus: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert call(capfdbinary, "train", "quality.yaml", "--out", "c")[0] == 0
    code, _, err = call(capfdbinary, "eval", "c", "--positive", "good.jsonl.gz")
    assert code == 2
    assert "c is a classifier: give --positive FILES and --negative FILES" in err
    with pytest.raises(ModelError, match="has no label __label__hq; it has"):
        model_files.evaluate_classifier("c", ["good.jsonl.gz"], ["bad.jsonl.gz"], _display(), label="__label__hq")


def _display() -> model_files.Display:
    return model_files.Display()
