"""`estimator: lmplz`: a stand-in for the program, ARPA files as tables, and what goes wrong named."""

import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from gristmill.stages import lmplz
from gristmill.stages.kernels import ngram_table
from gristmill.stages.kneser_ney import ModelError, TokenFile, load_table
from gristmill.stages.models import KenLM, Selection
from gristmill.stages.perplexity import Perplexity

TEXT = [f"the cat number {i % 7} sat on mat {i % 5}\nand slept for {i % 3} days" for i in range(300)]
ARPA = "\\data\\\nngram 1=5\nngram 2=2\n\n"
ARPA += "\\1-grams:\n-1\t<unk>\t0\n0\t<s>\t-0.25\n-0.5\t</s>\t0\n-0.75\ta\t-1e-1\n-2.5\tb\n\n"
ARPA += "\\2-grams:\n-0.125\ta b\n-3.5e+0\t<s> a\n\n\\end\\\n"


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Puts a program lmplz on the PATH: `body` is its shell script. -> function."""

    def install(body):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "lmplz").write_text(f"#!/bin/sh\n{body}\n")
        (folder / "lmplz").chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        return folder

    return install


def train(folder, **more):
    folder.mkdir()
    return KenLM(text=Selection(), order=3, estimator="lmplz", prune=(0, 0, 1), **more).train(
        {"text": [pa.array(TEXT)]}, folder
    )


def test_the_program_gets_pieces_and_its_model_is_scored(tmp_path, stand_in):
    """The stand-in notes its arguments and its text, and answers with a model that our estimator made of that text."""
    ours = tmp_path / "ours"
    ours.mkdir()
    plain = KenLM(text=Selection(), order=3, prune=(0, 0, 1))
    plain.train({"text": [pa.array(TEXT)]}, ours)
    seen = stand_in(f'echo "$@" > "$0.args"; cat > "$0.text"; cat {ours}/lm.arpa; echo "Unigram tokens 99 types 9" >&2')
    card = train(tmp_path / "theirs")
    arguments = (seen / "lmplz.args").read_text().split()
    assert arguments[:4] == ["-o", "3", "-S", "1000M"]
    assert arguments[6:] == ["--prune", "0", "0", "1", "--discount_fallback"]
    text = (seen / "lmplz.text").read_text()
    assert "the cat number 0 sat on mat 0\n" in text
    entry = card["languages"][""]
    assert entry["estimate"]["by"] == "lmplz"
    assert entry["estimate"]["tokens"] == 99
    assert sum(entry["estimate"]["kept"]) == sum(
        line.count("\t") > 0 for line in (ours / "lm.arpa").read_text().split("\n")
    )
    batch = pa.RecordBatch.from_pydict({"doc_id": ["0", "1"], "text": ["The cat sat\non a mat", "unheard words"]})
    values = [
        Perplexity(model=str(tmp_path / f))(batch).kept["perplexity.perplexity"].to_pylist() for f in ("ours", "theirs")
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-5)
    assert sorted(p.name for p in (tmp_path / "theirs").iterdir()) == ["lm.arpa", "lm.npy", "model.json"]


def test_pieces_of_sentencepiece_go_to_the_program(tmp_path, stand_in):
    arpa = tmp_path / "some.arpa"
    arpa.write_text(ARPA)
    seen = stand_in(f'cat > "$0.text"; cat {arpa}')
    train(tmp_path / "theirs", tokenize="sentencepiece", vocabulary=100)
    assert (seen / "lmplz.text").read_text().startswith("\u2581")


@pytest.mark.skipif(shutil.which("lmplz") is None, reason="lmplz is not on the PATH")
def test_agrees_with_ours_on_real_runs(tmp_path):
    (tmp_path / "ours").mkdir()
    KenLM(text=Selection(), order=3, prune=(0, 0, 1)).train({"text": [pa.array(TEXT)]}, tmp_path / "ours")
    train(tmp_path / "theirs")
    batch = pa.RecordBatch.from_pydict({"doc_id": ["0", "1"], "text": ["The cat sat\non a mat", "unheard words"]})
    values = [
        Perplexity(model=str(tmp_path / f))(batch).kept["perplexity.perplexity"].to_pylist() for f in ("ours", "theirs")
    ]
    assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_without_the_program_nothing_is_read(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = KenLM(text=Selection(), estimator="lmplz")
    with pytest.raises(ModelError, match=r"the program lmplz, which is not on the PATH .* or leave `estimator` out"):
        settings.train({"text": iter([None])}, tmp_path)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("cat > /dev/null; echo 'no memory' >&2; exit 3", r"lmplz failed \(exit code 3\): no memory"),
        ("cat > /dev/null; exit 1", "It said nothing"),
        ("cat > /dev/null", r"lm\.arpa is empty: lmplz wrote no model"),
        ("cat > /dev/null; echo hello", "does not begin as an ARPA file does"),
        (
            "cat > /dev/null; printf '\\\\data\\\\\\nngram 1=2\\n\\n\\\\1-grams:\\n-1\\ta\\n\\n'",
            "1 1-grams, and says 2: it was cut short",
        ),
    ],
)
def test_what_the_program_does_wrong(tmp_path, stand_in, body, message):
    stand_in(body)
    with pytest.raises(ModelError, match=message):
        train(tmp_path / "theirs")


def value_of(table, *words):
    """(log10 probability, back-off) of an n-gram, looked up as the scorer does."""
    text = np.frombuffer("".join(words).encode(), np.uint8).copy()
    keys = ngram_table.word_keys(text, np.cumsum([len(w) for w in words]), len(words))
    probe = np.zeros_like(table)
    ids = [np.arange(len(words), dtype=np.int32)[[i]] if i else np.zeros(1, np.int32) for i in range(len(words))]
    prefixes = tuple(np.zeros(1, np.int32) for _ in range(6))
    columns = tuple(ids + [np.zeros(1, np.int32)] * (6 - len(ids)))
    one = np.ones(1, np.float32)
    ngram_table.enter(len(words), prefixes, columns, one, one, keys, probe, probe.view(np.float32))
    key = probe[probe[:, 0] != 0, 0][0]
    return table.view(np.float32)[table[:, 0] == key, 2:][0].tolist()


def test_worked_table(tmp_path):
    (tmp_path / "lm.arpa").write_text(ARPA)
    assert lmplz.write_table(tmp_path / "lm.arpa", tmp_path / "lm.npy") == (5, 2)
    table = load_table(tmp_path / "lm.npy")
    assert (table[:, 0] != 0).sum() == 7
    assert value_of(table, "a") == pytest.approx([-0.75, -0.1])
    assert value_of(table, "b") == [-2.5, 0]
    assert value_of(table, "<unk>") == [-1, 0]
    assert value_of(table, "a", "b") == [-0.125, 0]
    assert value_of(table, "<s>", "a") == [-3.5, 0]
    assert value_of(table, "<s>")[1] == -0.25


@pytest.mark.parametrize("order", [2, 5])
def test_the_table_of_our_arpa_file_is_our_table(tmp_path, order):
    data = np.frombuffer(("\n".join(TEXT) + "\n").encode(), np.uint8)
    with TokenFile(tmp_path) as tokens:
        tokens.add(data)
        tokens.estimate(tmp_path / "lm.arpa", order=order, table=tmp_path / "lm.npy")
    lmplz.write_table(tmp_path / "lm.arpa", tmp_path / "again.npy")
    ours, again = load_table(tmp_path / "lm.npy"), load_table(tmp_path / "again.npy")
    assert ours[:, 0].tolist() == again[:, 0].tolist()
    assert np.allclose(ours.view(np.float32)[:, 2:], again.view(np.float32)[:, 2:], atol=2e-6)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("-0.75\ta", "x\ta", "this is no 1-gram of an ARPA file: b'x"),
        ("-0.125\ta b", "-0.125\ta", "this is no 2-gram"),
        ("-0.125\ta b", "-0.125\ta b c", "this is no 2-gram"),
        ("-0.125\ta b", "-0.125\ta b\t0x", "this is no 2-gram"),
        ("\\2-grams:", "\\3-grams:", "no whole section of 2-grams"),
        ("ngram 2=2", "ngram two", "does not begin as an ARPA file does"),
        ("-3.5e+0\t<s> a\n\n\\end\\\n", "-3.5", "no whole section of 2-grams"),
    ],
)
def test_arpa_files_that_are_broken(tmp_path, old, new, message):
    path = Path(tmp_path / "lm.arpa")
    path.write_text(ARPA.replace(old, new))
    with pytest.raises(ModelError, match=message):
        lmplz.write_table(path, tmp_path / "lm.npy")
