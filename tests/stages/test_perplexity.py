"""Perplexity: by hand on a tiny model, planted quality, limits and buckets, training through `models.KenLM`."""

import functools
import json
import pickle
import random
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import scipy
from pydantic import ValidationError

from gristmill.stages.kernels import ngram_table
from gristmill.stages.kneser_ney import ModelError
from gristmill.stages.models import KenLM, Selection
from gristmill.stages.perplexity import Perplexity, load_models, percentile_of
from gristmill.stages.train_fasttext import auc


@functools.cache
def prose(limit):
    """Docstrings of SciPy of some length, about `limit` characters: real English of many hands."""
    found, total = [], 0
    for path in sorted(Path(scipy.__file__).parent.rglob("*.py")):
        if "tests" not in path.parts:
            found += [t for t in re.findall(r'"""(.*?)"""', path.read_text("utf-8"), re.DOTALL) if len(t) > 600]
            total = sum(map(len, found))
        if total > limit:
            break
    return sorted(set(found))


def shuffled(text, seed):
    words = text.split()
    random.Random(seed).shuffle(words)
    it = iter(words)
    return "\n".join(" ".join(next(it) for _ in line.split()) for line in text.split("\n"))


def batch(texts, languages=None):
    columns = {"doc_id": [str(i) for i in range(len(texts))], "text": texts}
    if languages is not None:
        columns["language"] = pa.array(languages, pa.string())
    return pa.RecordBatch.from_pydict(columns)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """-> (folder of a model of docstrings, its card, documents that it did not see)."""
    texts = prose(3_000_000)
    unseen = texts[::4]
    seen = [t for i, t in enumerate(texts) if i % 4]
    folder = tmp_path_factory.mktemp("prose")
    settings = KenLM(text=Selection(sources=("docs",)), order=3, prune=(0, 0, 1))
    assert settings.roles() == {"text": Selection(sources=("docs",))}
    card = settings.train({"text": [pa.array(seen[:100]), pa.array(seen[100:])]}, folder)
    return folder, card, unseen


@pytest.fixture
def uniform(tmp_path):
    """A model of three words, each as likely as the end of a line: 1/4, whatever stands before; 1/100 for others."""
    text, ends = np.frombuffer(b"<unk><s></s>abc", np.uint8).copy(), np.array([5, 8, 12, 13, 14, 15], np.int64)
    prob = np.array([0.01, 0, 0.25, 0.25, 0.25, 0.25], np.float32)
    table = np.zeros((ngram_table.slots(6), 2), np.uint64)
    nothing = np.zeros(0, np.int32)
    words = (np.arange(6, dtype=np.int32), *[nothing] * 5)
    keys = ngram_table.word_keys(text, ends, 6)
    ngram_table.enter(1, words, words, prob, np.ones(6, np.float32), keys, table, table.view(np.float32))
    np.save(tmp_path / "lm.npy", table)
    entry = {"table": "lm.npy", "percentiles": [float(x) for x in range(2, 103)]}
    description = {"kind": "kenlm", "format": 1, "order": 2, "languages": {"": entry}}
    (tmp_path / "model.json").write_text(json.dumps(description))
    return str(tmp_path)


def test_worked_example(uniform):
    """`A b` and `c`: two lines, three words and two line ends of 1/4 each: 4. `a z b c`: three words and the end at
    1/4, one unknown at 1/100: the fifth root of 4^4 * 100."""
    result = Perplexity(model=uniform)(batch(["A b\n\nc\n", "a z b c", "  \n"]))
    assert result.dropped.num_rows == 0
    found = result.kept["perplexity.perplexity"].to_pylist()
    assert found[0] == pytest.approx(4, rel=1e-5)
    assert found[1] == pytest.approx((4**4 * 100) ** 0.2, rel=1e-5)
    assert found[2] is None
    assert result.kept["perplexity.percentile"].to_pylist()[0] == pytest.approx(2, abs=1e-4)  # percentile 2 is 4.0
    assert result.kept["perplexity.bucket"].to_pylist() == ["head", "head", "all"]


def test_limits(uniform):
    texts = batch(["a b c", "a z b c", ""])
    low = Perplexity(model=uniform, max_perplexity=5)(texts)
    assert low.kept["doc_id"].to_pylist() == ["0"]
    assert low.dropped["reasons"].to_pylist() == [["perplexity_too_high"], ["perplexity_too_high"]]
    high = Perplexity(model=uniform, min_perplexity=5)(texts)
    assert high.kept["doc_id"].to_pylist() == ["1"]
    assert high.dropped["reasons"].to_pylist() == [["perplexity_too_low"], ["perplexity_too_low"]]
    assert high.counters["rule.perplexity_too_low"] == 2


@pytest.mark.parametrize(
    ("keep", "kept"),
    [(["head"], "0"), (["head", "middle"], "01"), (["middle"], "1"), (["middle", "tail"], "12"), (["tail"], "2")],
)
def test_buckets(uniform, keep, kept):
    """Percentile 30 is 32 and percentile 60 is 62; the documents have 4, 46 and about 100."""
    texts = batch(["a b c", "z " * 20 + "a b c " * 2 + "a", "z " * 300])
    result = Perplexity(model=uniform, keep=keep)(texts)
    values = Perplexity(model=uniform)(texts).kept
    assert values["perplexity.bucket"].to_pylist() == ["head", "middle", "tail"]
    assert result.kept["doc_id"].to_pylist() == list(kept)
    assert set(result.dropped["perplexity.bucket"].to_pylist()).isdisjoint(keep)


def test_a_value_on_the_bound_is_in_the_lower_bucket():
    rules = Perplexity(model="m", keep=("middle",)).rules()
    values = np.array([30.0, np.nextafter(30, 31), 60.0, np.nextafter(60, 61)])
    assert [r.reason for r in rules] == ["perplexity_percentile_too_low", "perplexity_percentile_too_high"]
    assert rules[0].fails(values).tolist() == [True, False, False, False]
    assert rules[1].fails(values).tolist() == [False, False, False, True]


@pytest.mark.parametrize("keep", [["head", "tail"], [], ["nose"]])
def test_keep_must_be_neighbours(keep):
    with pytest.raises(ValidationError):
        Perplexity(model="m", keep=keep)


def test_percentile_of():
    table = np.linspace(10, 110, 101)
    places = np.linspace(0, 100, 101)
    assert percentile_of(np.array([5, 10, 35.5, 110, 500]), table, places).tolist() == [0, 0, 25.5, 100, 100]
    assert np.isnan(percentile_of(np.array([np.nan]), table, places)).all()
    assert np.isnan(percentile_of(np.array([3.0]), np.zeros(0), places)).all()


def test_shuffled_words_are_more_surprising(trained):
    """Planted quality: the same words out of order, and random characters, against documents never seen."""
    folder, _, unseen = trained
    stage = Perplexity(model=str(folder))

    def values(texts):
        return np.array(stage(batch(texts)).kept["perplexity.perplexity"].to_pylist())

    real = values(unseen)
    mixed = values([shuffled(t, i) for i, t in enumerate(unseen)])
    letters = random.Random(4)
    noise = values(["".join(letters.choice("abcdefghij klmnop qrst uvwxyz. ") for _ in t) for t in unseen])
    assert len(unseen) > 100
    assert auc(mixed, real) > 0.95
    assert auc(noise, real) > 0.99
    assert (mixed > real).mean() > 0.99


def test_card_and_files(trained):
    folder, card, _ = trained
    assert sorted(p.name for p in folder.iterdir()) == ["lm.arpa", "lm.npy", "model.json"]
    entry = card["languages"][""]
    assert entry["documents"] + entry["held_out"]["documents"] == pytest.approx(len(prose(3_000_000)) * 0.75, abs=2)
    assert 0.02 < entry["held_out"]["documents"] / entry["documents"] < 0.09
    assert entry["held_out"]["perplexity"] > 10
    assert len(entry["percentiles"]) == 101
    assert entry["percentiles"] == sorted(entry["percentiles"])
    assert entry["estimate"]["order"] == 3
    assert card["files"]["lm.arpa"]["bytes"] == (folder / "lm.arpa").stat().st_size
    assert card["settings"]["prune"] == [0, 0, 1]
    json.dumps(card)


def test_training_is_reproducible_and_order_of_batches_is_all_that_counts(tmp_path):
    texts = prose(120_000)
    cards, files = [], []
    for i, parts in enumerate([[texts], [texts[:7], texts[7:]]]):
        folder = tmp_path / str(i)
        folder.mkdir()
        cards.append(KenLM(text=Selection(), holdout=0.2).train({"text": map(pa.array, parts)}, folder))
        files.append({p.name: p.read_bytes() for p in folder.iterdir()})
    assert files[0] == files[1]
    assert cards[0] | {"seconds": 0} == cards[1] | {"seconds": 0}


def test_a_sample_of_its_own_sets_the_percentiles(tmp_path, trained):
    _, _, unseen = trained
    settings = KenLM(text=Selection(), sample=Selection(sources=("web",)))
    assert list(settings.roles()) == ["text", "sample"]
    card = settings.train({"text": [pa.array(prose(200_000))], "sample": [pa.array([*unseen, ""])]}, tmp_path)
    entry = card["languages"][""]
    assert entry["percentiles_of"] == {"documents": len(unseen), "from": "sample"}
    values = Perplexity(model=str(tmp_path))(batch(unseen)).kept["perplexity.percentile"].to_pylist()
    assert np.mean(values) == pytest.approx(50, abs=1)


def test_one_model_for_each_language(tmp_path):
    english, numbers = prose(150_000), ["uno due tre quattro cinque sei sette otto nove dieci\n" * 20] * 30
    texts = batch([*english, *numbers, "x y z", "q q"], ["en"] * len(english) + ["it"] * len(numbers) + ["de", None])
    card = KenLM(text=Selection(), per_language=True, min_language_bytes=1_000).train({"text": [texts]}, tmp_path)
    assert sorted(card["languages"]) == ["en", "it"]
    assert card["languages_skipped"] == {"de": 5, "und": 3}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["en.arpa", "en.npy", "it.arpa", "it.npy", "model.json"]
    stage = Perplexity(model=str(tmp_path), max_perplexity=500)
    result = stage(batch([english[0], "uno due tre quattro", "uno due tre quattro", "ja"], ["en", "it", "en", "ja"]))
    assert result.kept["doc_id"].to_pylist() == ["0", "1", "3"]
    assert result.kept["perplexity.perplexity"].to_pylist()[2] is None
    assert result.kept["perplexity.bucket"].to_pylist()[2] == "all"
    with pytest.raises(ModelError, match="Put the stage `language` before `perplexity`"):
        stage(batch(["a"]))
    with pytest.raises(ModelError, match="needs documents with a column `language`"):
        KenLM(text=Selection(), per_language=True).train({"text": [pa.array(english)]}, tmp_path)
    with pytest.raises(ModelError, match=r"its language is '\.\./x', which cannot name a file"):
        KenLM(text=Selection(), per_language=True).train({"text": [batch(["a"], ["../x"])]}, tmp_path)
    with pytest.raises(ModelError, match=r"no language has 2,000,000 bytes: \{'de': 5, 'en': "):
        KenLM(text=Selection(), per_language=True).train({"text": [texts]}, tmp_path)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([], "There is no training text"),
        ([[]], "has 0 pieces in 0 documents; at least 1,000"),
        ([["", " \n"]], "has 0 pieces in"),
        ([["too little text"] * 40], r"has \d+ pieces in \d+ documents; at least 1,000"),
    ],
)
def test_little_text_makes_no_model(tmp_path, texts, message):
    with pytest.raises(ModelError, match=message):
        KenLM(text=Selection()).train({"text": [pa.array(t, pa.string()) for t in texts]}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_without_held_out_documents_there_are_no_buckets(tmp_path):
    KenLM(text=Selection(), holdout=0).train({"text": [pa.array(prose(50_000))]}, tmp_path)
    result = Perplexity(model=str(tmp_path))(batch(["some text"]))
    assert result.kept["perplexity.bucket"].to_pylist() == ["all"]
    with pytest.raises(ModelError, match="stored without percentiles"):
        Perplexity(model=str(tmp_path), keep=["head"])(batch(["some text"]))


def test_models_that_cannot_be_read(tmp_path, uniform):
    with pytest.raises(ModelError, match=r"does not exist\. A stage names a model that was not trained"):
        Perplexity(model=str(tmp_path / "nowhere"))(batch(["a"]))
    for content, message in (
        ("{", "cannot be read"),
        ('{"kind": "fasttext", "format": 1}', "a kenlm model is needed; this is a model of kind fasttext"),
        ('{"kind": "kenlm", "format": 0}', "has format 0, this version reads format 1"),
    ):
        (Path(uniform) / "model.json").write_text(content)
        with pytest.raises(ModelError, match=message):
            load_models.__wrapped__(uniform)
    bad = tmp_path / "bad"
    bad.mkdir()
    languages = {"": {"table": "lm.npy", "percentiles": []}}
    (bad / "model.json").write_text(json.dumps({"kind": "kenlm", "format": 1, "order": 2, "languages": languages}))
    with pytest.raises(ModelError, match=r"lm\.npy cannot be read"):
        Perplexity(model=str(bad))(batch(["a"]))
    np.save(bad / "lm.npy", np.zeros((3, 2), np.uint64))
    with pytest.raises(ModelError, match="is not the table of a language model"):
        Perplexity(model=str(bad))(batch(["a"]))


def test_batches_do_not_matter_and_the_stage_travels(trained):
    folder, _, unseen = trained
    stage = pickle.loads(pickle.dumps(Perplexity(model=str(folder), keep=["head", "middle"])))
    whole = stage(batch(unseen))
    parts = [stage(batch(unseen).slice(i, 50)) for i in range(0, len(unseen), 50)]
    assert pa.Table.from_batches([p.kept for p in parts]) == pa.Table.from_batches([whole.kept])
    assert whole.kept.num_rows + whole.dropped.num_rows == len(unseen)
    assert 0.3 < whole.kept.num_rows / len(unseen) < 0.9


def test_an_empty_batch(trained):
    result = Perplexity(model=str(trained[0]), keep=["head"])(batch(["a"]).slice(1))
    assert result.kept.num_rows == result.dropped.num_rows == 0
    assert result.kept.schema.field("perplexity.bucket").type == pa.string()
