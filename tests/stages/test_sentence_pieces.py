"""SentencePiece's pieces: learned the same every time, cut the same in training and scoring, lines kept."""

import json

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.kneser_ney import ModelError, load_arpa
from gristmill.stages.models import KenLM, Selection
from gristmill.stages.perplexity import Perplexity, load_models
from gristmill.stages.sentence_pieces import UNKNOWN, Cutter, blocks, excerpt, learn

WORDS = [f"{a}{b}{c}" for a in ("tree", "house", "river") for b in ("less", "side", "") for c in ("s", "ward", "")]
LINES = [" ".join(WORDS[(i * k) % len(WORDS)] for k in (1, 3, 7, 11)) for i in range(1, 400)]


@pytest.fixture(scope="module")
def cutter():
    return Cutter(learn(LINES, 100))


def texts_of(pieces):
    return [pieces.document(i).decode() for i in range(len(pieces))]


def batch(texts):
    return pa.RecordBatch.from_pydict({"doc_id": [str(i) for i in range(len(texts))], "text": texts})


def test_worked_example(cutter):
    """The vocabulary has the words; a word unseen falls into pieces of it, and a character unseen is unknown."""
    found = cutter(pa.array(["Treeless HOUSE\n\nriver", "", "housesides ☃"]))
    first, empty, last = texts_of(found)
    assert first.replace(" ", "").replace("\u2581", " ") == " treeless house\n river"
    assert empty == ""
    assert last.replace(" ", "").replace("\u2581", " ") == f" housesides {UNKNOWN}"
    assert found.lines.tolist() == [2, 0, 1]
    assert found.pieces.tolist() == [len(t.split()) for t in (first, empty, last)]
    assert found.pieces[0] < len("treelesshouseriver")


@given(st.lists(st.text(st.sampled_from("trehous lv.\n漢\u2581<s>/"), max_size=30), max_size=6))
@settings(max_examples=100, deadline=None)
def test_documents_apart_are_documents_together(cutter, texts):
    together = cutter(pa.array(texts, pa.string()))
    apart = [cutter(pa.array([text])) for text in texts]
    assert texts_of(together) == [texts_of(one)[0] for one in apart]
    assert together.pieces.tolist() == [int(one.pieces[0]) for one in apart]
    assert together.ends.tolist() == np.cumsum([0, *(len(one.data) for one in apart)]).tolist()
    assert all(line.split() for line in together.data.tobytes().decode().split("\n")[:-1])
    assert not {"<s>", "</s>", "<unk>"} & set(together.data.tobytes().decode().split())


def test_learning_is_reproducible():
    assert learn(LINES, 100) == learn(iter(LINES), 100)


@pytest.mark.parametrize(("lines", "vocabulary"), [([], 100), ([chr(0x4E00 + i) for i in range(500)], 100)])
def test_text_that_makes_no_pieces(lines, vocabulary):
    with pytest.raises(ModelError, match="SentencePiece cannot learn 100 pieces from this text"):
        learn(lines, vocabulary)


def test_bytes_that_are_no_model():
    with pytest.raises(ModelError, match="SentencePiece model cannot be read"):
        Cutter(b"nonsense")


def test_excerpts_are_whole_lines_spread_evenly(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"line {i:07d} {'x' * 50}\n" for i in range(20_000)))
    whole = path.read_text().splitlines()
    assert list(excerpt(path, 10**9)) == whole
    part = list(excerpt(path, 200_000))
    assert set(part) < set(whole)
    assert part == sorted(part)
    assert len(part) == len(set(part))
    assert 190_000 < sum(len(line) + 1 for line in part) < 210_000
    numbers = [int(line.split()[1]) for line in part]
    assert max(numbers) > 2 / 3 * 20_000
    assert b"".join(block.tobytes() for block in blocks(path)) == path.read_bytes()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pieces")
    texts = ["\n".join(LINES[i : i + 4]) for i in range(0, 396, 4)]
    model = KenLM(text=Selection(), tokenize="sentencepiece", vocabulary=100, holdout=0.2)
    return folder, model.train({"text": [pa.array(texts)]}, folder), texts, model


def test_a_model_of_pieces_is_scored_with_its_pieces(trained):
    """KenLM itself on the ARPA file, and the pieces of the file beside it, give the perplexities of the stage."""
    folder, card, texts, _ = trained
    assert sorted(p.name for p in folder.iterdir()) == ["lm.arpa", "lm.npy", "lm.sp.model", "model.json"]
    entry = card["languages"][""]
    assert entry["pieces"]["file"] == "lm.sp.model"
    assert entry["pieces"]["vocabulary"] <= 100
    assert entry["held_out"]["documents"] > 5
    found = Perplexity(model=str(folder))(batch([texts[3], "treeward housesides\nno such words"])).kept
    cutter, kenlm = Cutter((folder / "lm.sp.model").read_bytes()), load_arpa(folder / "lm.arpa")
    for i, value in enumerate(found["perplexity.perplexity"].to_pylist()):
        lines = texts_of(cutter(pa.array([found["text"][i].as_py()])))[0].split("\n")
        total = sum(kenlm.score(line) for line in lines)
        assert value == pytest.approx(10 ** (-total / sum(len(line.split()) + 1 for line in lines)), rel=1e-4)


def test_training_twice_gives_the_same_files(tmp_path, trained):
    folder, card, texts, model = trained
    again = model.train({"text": [pa.array(texts[:30]), pa.array(texts[30:])]}, tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == {p.name: p.read_bytes() for p in folder.iterdir()}
    assert again | {"seconds": 0} == card | {"seconds": 0}


def test_pieces_of_another_model_are_refused(tmp_path, trained, cutter):
    folder, _, texts, model = trained
    model.train({"text": [pa.array(texts)]}, tmp_path)
    (tmp_path / "lm.sp.model").write_bytes(learn(LINES[:200], 100))
    with pytest.raises(ModelError, match=r"lm\.sp\.model is not the file that the model was trained with"):
        load_models(str(tmp_path))
    (tmp_path / "lm.sp.model").unlink()
    with pytest.raises(ModelError, match=r"lm\.sp\.model cannot be read"):
        load_models(str(tmp_path))
    assert json.loads((folder / "model.json").read_text())["languages"][""]["pieces"]["xxh3"]


def test_scripts_without_spaces_get_pieces_of_several_characters():
    lines = ["機械学習の教科書を読む", "教科書の機械学習", "学習の機械を読む教科書"] * 60
    text = texts_of(Cutter(learn(lines, 100))(pa.array(["機械学習の教科書"])))[0]
    assert max(map(len, text.split())) > 1


@pytest.mark.parametrize("texts", [[], [""], ["too little text"]])
def test_little_text_makes_no_model(tmp_path, texts):
    with pytest.raises(ModelError, match=r"at least 1,000|cannot learn|no training text"):
        KenLM(text=Selection(), tokenize="sentencepiece", holdout=0).train(
            {"text": [pa.array(t, pa.string()) for t in [texts] if t]}, tmp_path
        )
    assert [p for p in tmp_path.iterdir() if p.suffix != ".model"] == []
