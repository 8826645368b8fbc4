"""CCNet's own models: the newline fault reproduced, the table of cutoffs, and what is missing named."""

import json

import pyarrow as pa
import pytest
from datatrove.utils.perplexity import KenlmModel
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.ccnet import load_pairs, normalise
from gristmill.stages.kneser_ney import ModelError
from gristmill.stages.perplexity import Perplexity


class Letters:
    """Stands for SentencePiece: every character is a piece, white space is ▁."""

    def __init__(self, model_file):
        self.model_file = model_file

    def encode(self, text, out_type):
        assert out_type is str
        return list(text.replace(" ", "▁"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """English, with a, b and the line end at 1/4 each and all else at 1/100; percentiles 0, 50 and 100 are 2, 4, 12."""
    monkeypatch.setattr("sentencepiece.SentencePieceProcessor", Letters)
    arpa = ["\\data\\", "ngram 1=5", "ngram 2=1", "", "\\1-grams:", "-2\t<unk>\t0", "-99\t<s>\t0"]
    arpa += [f"-0.60206\t{w}\t0" for w in ("</s>", "a", "b")] + ["", "\\2-grams:", "-0.60206\ta b", "", "\\end\\", ""]
    (tmp_path / "en.arpa.bin").write_text("\n".join(arpa))
    (tmp_path / "en.sp.model").write_bytes(b"")
    (tmp_path / "cutoff.csv").write_text(",en,fr\n0,2,1\n50,4,2\n100,12,3\n")
    return str(tmp_path)


def batch(texts, languages):
    ids = [str(i) for i in range(len(texts))]
    return pa.RecordBatch.from_pydict({"doc_id": ids, "text": texts, "language": pa.array(languages, pa.string())})


def test_words_at_line_ends_are_glued(folder):
    """`A\\nB` becomes `ab`: three predictions of 1/4. `a b` has a ▁ of 1/100 besides."""
    stage = Perplexity(model=folder, compat="ccnet", max_perplexity=5)
    result = stage(batch(["A\nB", "a b", "a", "a b"], ["en", "en", "fr", None]))
    assert result.kept["doc_id"].to_pylist() == ["0", "2", "3"]
    glued, french, unknown = result.kept["perplexity.perplexity"].to_pylist()
    assert glued == pytest.approx(4, rel=1e-5)
    assert french is unknown is None
    assert result.dropped["perplexity.perplexity"].to_pylist() == pytest.approx(
        [10 ** ((2 + 3 * 0.60206) / 4)], rel=1e-5
    )
    assert result.kept["perplexity.percentile"].to_pylist()[0] == pytest.approx(50, abs=1e-3)
    assert result.dropped["perplexity.percentile"].to_pylist()[0] == pytest.approx(50 + 50 * (8.944 - 4) / 8, abs=0.01)
    assert result.kept["perplexity.bucket"].to_pylist() == ["middle", "all", "all"]


@given(st.text(st.characters(blacklist_categories=("Cs", "Cn", "Co", "Nd")), max_size=60).map(str.strip))
@settings(max_examples=200, deadline=None)
def test_normalises_as_datatroves_copy(text):
    """Digits apart: datatrove makes one 0 of a number, CCNet one of each digit."""
    assert normalise(text) == KenlmModel("wikipedia", "en").normalize(text)


def test_worked_normalisation():
    assert normalise("  Él dijo:\n«2024»… ") == 'el dijo:"0000"...'


def test_what_is_missing_is_named(tmp_path, folder, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(ModelError, match=r"holds no <language>\.arpa\.bin"):
        load_pairs(str(empty))
    (tmp_path / "en.sp.model").unlink()
    with pytest.raises(ModelError, match=r"en\.sp\.model is missing"):
        load_pairs(folder)
    (tmp_path / "en.sp.model").write_bytes(b"")
    (tmp_path / "cutoff.csv").write_text(",en\n0,x\n")
    with pytest.raises(ModelError, match=r"cutoff\.csv is not a table of numbers"):
        load_pairs(folder)
    (tmp_path / "cutoff.csv").unlink()
    monkeypatch.undo()
    with pytest.raises(ModelError, match=r"en\.sp\.model: SentencePiece cannot read this model"):
        load_pairs(folder)


def test_without_cutoffs_keep_is_refused(tmp_path, folder):
    (tmp_path / "cutoff.csv").unlink()
    with pytest.raises(ModelError, match="without percentiles"):
        Perplexity(model=folder, compat="ccnet", keep=["head"])(batch(["a"], ["en"]))
    assert json.loads(Perplexity(model=folder, compat="ccnet").model_dump_json())["compat"] == "ccnet"
