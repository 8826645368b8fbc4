"""The classifier: planted quality, preparation of text, training through `models.FastText`, its figures by hand."""

import functools
import itertools
import json
import pickle
import random
import re
from pathlib import Path

import fasttext
import numpy as np
import pyarrow as pa
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gristmill.stages import classifier
from gristmill.stages.classifier import Classifier, load_classifier, prepare, probabilities
from gristmill.stages.documents import apply_decisions, with_columns
from gristmill.stages.duplicates import ClusterError
from gristmill.stages.kneser_ney import ModelError
from gristmill.stages.models import FastText, Limits, Selection
from gristmill.stages.train_fasttext import PRESETS, auc, evaluate

SELECTIONS = {"positive": Selection(sources=("docs",)), "negative": Selection(where={"x": Limits(at_most=3)})}


@functools.cache
def prose():
    """Some hundred docstrings of SciPy: real English of many hands."""
    found = []
    for path in sorted(Path(scipy.__file__).parent.glob("*/*.py")):
        found += [t for t in re.findall(r'"""(.*?)"""', path.read_text("utf-8"), re.DOTALL) if len(t) > 600]
    return sorted(set(found))[:800]


@functools.cache
def junk():
    """Machine boilerplate and random characters, each document of its own."""
    draw = random.Random(8)
    menu = (
        "Home|Log in|Sign up|Cookie settings|Accept all|Share on|Read more|Privacy policy|Next page|Add to cart".split(
            "|"
        )
    )
    letters = "abcdefghijklmnopqrstuvwxyz0123456789{}<>=;/ \n"
    return [
        "\n".join(draw.choices(menu, k=draw.randint(20, 60)))
        if i % 2
        else "".join(draw.choices(letters, k=draw.randint(400, 900)))
        for i in range(600)
    ]


def dirty_memory():
    """Leaves memory behind for the next allocations that is neither zero nor a small number."""
    blocks = [np.full(8_000 * k, 7e8, np.float32) for k in range(1, 40)]
    blocks.clear()


def batch(texts):
    return pa.RecordBatch.from_pydict({"doc_id": [str(i) for i in range(len(texts))], "text": texts})


def sourced(texts, languages=None):
    """A batch as a global stage gets it."""
    named = {"source": ["web"] * len(texts), "language": languages or ["en"] * len(texts)}
    return with_columns(batch(texts), {name: pa.array(values, pa.string()) for name, values in named.items()})


def through(stage, shards):
    """Signs, clusters and joins -> (kept, dropped) tables, figures."""
    parts = [[shard.slice(i, 4) for i in range(0, max(1, shard.num_rows), 4)] for shard in shards]
    signed = [pa.Table.from_batches(map(stage.sign, batches)) for batches in parts]
    decisions, figures = stage.cluster(signed)
    results = []
    for shard, decided in zip(shards, decisions, strict=True):
        result, met = apply_decisions(stage, shard, decided)
        assert met == shard.num_rows == decided.num_rows
        results.append(result)
    kept, dropped = (
        pa.concat_tables(pa.Table.from_batches([getattr(r, side)]) for r in results if getattr(r, side).num_rows)
        for side in ("kept", "dropped")
    )
    return kept, dropped, figures


def train(folder, positive, negative, **settings):
    texts = {"positive": [pa.array(positive, pa.string())], "negative": [pa.array(negative, pa.string())]}
    return FastText(**SELECTIONS, **settings).train(texts, folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """-> (folder, card) of a model that saw the first 500 and 400 documents."""
    folder = tmp_path_factory.mktemp("quality")
    return folder, train(folder, prose()[:500], junk()[:400], word_ngrams=2, buckets=20_000, dim=16)


def test_junk_scores_below_prose(trained):
    """Planted quality on documents never seen."""
    stage = Classifier(model=str(trained[0]))
    good = np.array(stage(batch(prose()[500:])).kept["classifier.score"].to_pylist())
    bad = np.array(stage(batch(junk()[400:])).kept["classifier.score"].to_pylist())
    assert len(good) > 100
    assert auc(good, bad) > 0.95
    assert good.min() >= 0
    assert good.max() <= 1


def test_min_score(trained):
    texts = batch([*prose()[500:510], *junk()[400:410]])
    everything = Classifier(model=str(trained[0]))(texts)
    assert everything.kept.num_rows == 20
    cut = Classifier(model=str(trained[0]), min_score=0.5)(texts)
    assert cut.kept["doc_id"].to_pylist() == [str(i) for i in range(10)]
    assert cut.dropped["reasons"].to_pylist() == [["classifier_score_too_low"]] * 10
    assert (
        pa.concat_arrays([cut.kept["classifier.score"], cut.dropped["classifier.score"]])
        == everything.kept["classifier.score"]
    )


def test_a_draw_spares_the_share_of_the_pareto_distribution(trained):
    """Of documents of score s stay (2 - s) ^ -alpha, the same ones in every run, and others with another seed."""
    text = junk()[401]
    texts = batch([text] * 4_000)
    stage = Classifier(model=str(trained[0]), pareto=9)
    result = stage(texts)
    score = result.dropped["classifier.score"][0].as_py()
    assert score < 0.5
    alpha = -np.log(0.3) / np.log(2 - score)
    kept = Classifier(model=str(trained[0]), pareto=alpha)(texts).kept["doc_id"].to_pylist()
    assert len(kept) == pytest.approx(0.3 * 4_000, abs=4 * (4_000 * 0.3 * 0.7) ** 0.5)
    assert Classifier(model=str(trained[0]), pareto=alpha)(texts.slice(1_000)).kept["doc_id"].to_pylist() == [
        i for i in kept if int(i) >= 1_000
    ]
    assert Classifier(model=str(trained[0]), pareto=alpha, seed=1)(texts).kept["doc_id"].to_pylist() != kept
    assert all(reasons == ["classifier_score_below_draw"] for reasons in result.dropped["reasons"].to_pylist())


@pytest.fixture
def unknown_words(monkeypatch):
    """A model of others may know no word of a document: here of those that say "qqqqqq"."""
    scored = classifier.probabilities

    def probabilities(model, texts, label):
        return np.where(["qqqqqq" in text for text in texts.to_pylist()], np.nan, scored(model, texts, label))

    monkeypatch.setattr(classifier, "probabilities", probabilities)


def test_the_top_is_the_same_for_any_shards_and_batches(trained, unknown_words):
    """Of 60 documents the best third: 20 by score, whatever the signatures came from; scores stay for all."""
    stage = pickle.loads(pickle.dumps(Classifier(model=str(trained[0]), keep_top=1 / 3)))
    texts = sourced([*prose()[500:530], *junk()[400:429], "qqqqqq"])
    rowwise = Classifier(model=str(trained[0]))(texts).kept["classifier.score"].to_pylist()
    assert rowwise[59] is None
    best = sorted(range(60), key=lambda i: (rowwise[i] is None, -(rowwise[i] or 0), str(i)))[:20]
    for cuts in ([0, 60], [0, 7, 7, 31, 60]):
        shards = [texts.slice(a, b - a) for a, b in itertools.pairwise(cuts)]
        kept, dropped, figures = through(stage, shards)
        assert sorted(map(int, kept["doc_id"].to_pylist())) == sorted(best)
        assert dropped["reasons"].to_pylist() == [["not_in_top"]] * 40
        together = pa.concat_tables([t.select(["doc_id", "classifier.score"]) for t in (kept, dropped)])
        assert {int(r["doc_id"]): r["classifier.score"] for r in together.to_pylist()} == dict(enumerate(rowwise))
        lowest = min(rowwise[i] for i in best)
        assert (figures["documents"], figures["in_top"], figures["not_in_top"]) == (60, 20, 40)
        assert (figures["threshold"], figures["without_score"], figures["keep_top"]) == (lowest, 1, 1 / 3)
        json.dumps(figures)


def test_the_top_of_each_language_above_a_limit(trained):
    """Of English, three of prose and one of junk, two are in the top; of French junk one is, and fails the limit."""
    texts = sourced([*prose()[500:503], *junk()[400:402]], ["en", "en", "en", "en", "fr"])
    stage = Classifier(model=str(trained[0]), keep_top=0.5, keep_top_by="language", min_score=0.5)
    assert stage.needs == ("text", "source", "language")
    kept, dropped, figures = through(stage, [texts])
    assert kept.num_rows == 2
    assert set(kept["doc_id"].to_pylist()) < {"0", "1", "2"}
    reasons = {r["doc_id"]: r["reasons"] for r in dropped.to_pylist()}
    assert reasons.pop("3") == ["classifier_score_too_low", "not_in_top"]
    assert reasons.pop("4") == ["classifier_score_too_low"]
    assert list(reasons.values()) == [["not_in_top"]]
    assert [(k, v["documents"], v["in_top"]) for k, v in figures["by_language"].items()] == [("en", 4, 2), ("fr", 1, 1)]
    assert "threshold" not in figures


def test_a_column_of_its_own(trained):
    one, other = Classifier(model=str(trained[0])), Classifier(model=str(trained[0]), column="edu", min_score=0.5)
    assert [dict(s.adds) for s in (Classifier, one, other)] == [
        {"classifier.score": pa.float64()},
        {"classifier.score": pa.float64()},
        {"edu.score": pa.float64()},
    ]
    assert [m.column for m in other.measures] == ["edu.score"]
    assert (one.heading, other.heading) == ("classifier", "classifier.edu")
    result = other(one(batch([prose()[500], junk()[400]])).kept)
    assert result.kept["classifier.score"] == result.kept["edu.score"]
    assert result.dropped["reasons"].to_pylist() == [["edu_score_too_low"]]
    draw = Classifier(model=str(trained[0]), column="edu", pareto=50)(batch([junk()[400]] * 9))
    assert draw.dropped["reasons"].to_pylist()[0] == ["edu_score_below_draw"]
    _, dropped, _ = through(other.model_copy(update={"keep_top": 0.5}), [sourced(prose()[500:504])])
    assert dropped["reasons"].to_pylist() == [["edu_not_in_top"]] * 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_top": 0.1, "pareto": 9}, "contradict each other"),
        ({"keep_top_by": "source"}, "give `keep_top` too"),
        ({"keep_top": 0}, "greater than 0"),
        ({"keep_top": 1.5}, "less than or equal to 1"),
        ({"keep_top": 0.1, "keep_top_by": "dump"}, "'source' or 'language'"),
        ({"column": "a.b"}, "match pattern"),
    ],
)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(ValidationError, match=message):
        Classifier(model="m", **settings)


def test_a_rank_is_not_to_be_had_from_a_batch(trained):
    with pytest.raises(TypeError, match="use `sign` and `cluster`"):
        Classifier(model=str(trained[0]), keep_top=0.5)(batch(["a"]))
    twice = Classifier(model=str(trained[0]), keep_top=0.5).sign(sourced(["a", "b"]).take(pa.array([0, 0])))
    with pytest.raises(ClusterError, match="has 1 doc_ids more than once"):
        Classifier(model=str(trained[0]), keep_top=0.5).cluster([pa.Table.from_batches([twice])])


def test_card(trained):
    folder, card = trained
    assert sorted(p.name for p in folder.iterdir()) == ["model.bin", "model.json"]
    validation = card["validation"]
    data = card["data"]
    assert data["positive"]["documents"] + validation["positive"] == 500
    assert data["negative"]["documents"] + validation["negative"] == 400
    assert 20 < validation["positive"] < 90
    assert validation["auc"] > 0.95
    assert validation["precision"] > 0.9
    assert validation["recall"] > 0.9
    assert sum(b["documents"] for b in validation["calibration"]) == validation["positive"] + validation["negative"]
    assert len(validation["percentiles"]) == 101
    assert "the" in card["features"]["positive"]
    assert {"Cookie", "policy"} & set(card["features"]["negative"])
    assert card["reproducible"] is True
    assert card["files"]["model.bin"]["bytes"] == (folder / "model.bin").stat().st_size
    json.dumps(card)


def test_training_is_reproducible_and_needs_no_order(tmp_path):
    files = []
    for i, good in enumerate((prose()[:60], prose()[:60][::-1])):
        folder = tmp_path / str(i)
        folder.mkdir()
        dirty_memory()
        train(folder, good, junk()[:60], dim=8, buckets=1_000, word_ngrams=2)
        files.append({p.name: p.read_bytes() for p in folder.iterdir()})
    assert files[0].keys() == {"model.bin", "model.json"}
    assert files[0]["model.bin"] == files[1]["model.bin"]
    card = train(tmp_path, prose()[:60], junk()[:60], dim=8, buckets=1_000, threads=2)
    assert card["reproducible"] is False


def test_another_seed_is_another_model(tmp_path, trained):
    train(tmp_path, prose()[:60], junk()[:60], dim=8, buckets=1_000, seed=1)
    first = (tmp_path / "model.bin").read_bytes()
    train(tmp_path, prose()[:60], junk()[:60], dim=8, buckets=1_000, seed=2)
    assert first != (tmp_path / "model.bin").read_bytes()


def test_text_is_prepared_for_fasttext():
    texts = pa.array(["a\nb\n", "__label__negative x", "a </s> b __label__", ""])
    assert prepare(texts).to_pylist() == ["a b ", "__label_ _negative x", "a < /s> b __label_ _", ""]


def test_documents_cannot_label_themselves(tmp_path, trained):
    """A positive document that says `__label__negative` trains as positive, and what follows `</s>` is read."""
    trick = ["__label__negative </s> " + text for text in prose()[:100]]
    card = train(tmp_path, trick, junk()[:100], dim=8)
    assert card["validation"]["auc"] > 0.9
    labels = load_classifier(str(tmp_path), "__label__positive").labels
    assert sorted(labels) == ["__label__negative", "__label__positive"]
    stage = Classifier(model=str(trained[0]))
    whole, head = stage(batch([f"{junk()[1]}\n</s>\n{prose()[600]}", junk()[1]])).kept["classifier.score"].to_pylist()
    assert whole > head


def test_lines_are_words_apart(trained):
    """Newlines separate words: the score is that of the text with spaces."""
    model = Classifier(model=str(trained[0]))
    scores = model(batch(["Cookie\nsettings\nof the", "Cookie settings of the", "Cookiesettingsof the"])).kept
    first, second, glued = scores["classifier.score"].to_pylist()
    assert first == second != glued


def test_models_of_others_load_by_path(tmp_path, trained):
    folder, _ = trained
    by_file = Classifier(model=str(folder / "model.bin"), label="__label__negative")(batch(junk()[400:405])).kept
    by_folder = Classifier(model=str(folder))(batch(junk()[400:405])).kept
    sums = np.add(by_file["classifier.score"].to_pylist(), by_folder["classifier.score"].to_pylist())
    assert sums == pytest.approx(1, abs=1e-4)
    with pytest.raises(ModelError, match="has no label __label__hq; it has __label__"):
        Classifier(model=str(folder), label="__label__hq")(batch(["a"]))
    with pytest.raises(ModelError, match="was not trained"):
        Classifier(model=str(tmp_path / "nowhere"))(batch(["a"]))
    (tmp_path / "bad.bin").write_bytes(b"no model")
    with pytest.raises(ModelError, match="fastText cannot read this model"):
        Classifier(model=str(tmp_path / "bad.bin"))(batch(["a"]))


def test_the_stage_travels_and_batches_do_not_matter(trained):
    stage = pickle.loads(pickle.dumps(Classifier(model=str(trained[0]), min_score=0.5)))
    texts = batch(prose()[500:540] + junk()[400:440] + [""])
    whole = stage(texts)
    parts = [stage(texts.slice(i, 9)).kept for i in range(0, 81, 9)]
    assert pa.Table.from_batches(parts).combine_chunks() == pa.Table.from_batches([whole.kept])
    assert stage(texts.slice(0, 0)).kept.num_rows == 0


@pytest.mark.parametrize(
    ("positive", "negative", "message"),
    [
        ([], ["a b"] * 50, "`positive` has 0"),
        ([f"word {i}" for i in range(50)], [], "`negative` has 0"),
        ([f"word {i}" for i in range(50)], [" ", "\n"] * 30, "`negative` has 0"),
        ([f"word {i}" for i in range(5)], [f"word {i}" for i in range(50)], r"`positive` has \d\. Look at what"),
    ],
)
def test_too_few_examples_make_no_model(tmp_path, positive, negative, message):
    with pytest.raises(ModelError, match=message):
        train(tmp_path, positive, negative)
    assert list(tmp_path.iterdir()) == []


def test_settings_name_their_roles_and_refuse_the_unknown():
    assert FastText(**SELECTIONS).roles() == SELECTIONS
    with pytest.raises(ValidationError, match="word_ngram"):
        FastText(**SELECTIONS, word_ngram=2)
    with pytest.raises(ValidationError):
        Selection(max_bytes=0)


def test_figures_by_hand():
    """Of positives .9 .6 .2 and negatives .6 .1: .9 beats both, .6 one and ties with one, .2 one: 4.5 of 6 pairs."""
    figures = evaluate(np.array([0.9, 0.6, 0.2]), np.array([0.6, 0.1]))
    assert figures["auc"] == 0.75
    assert figures["precision"] == pytest.approx(2 / 3)
    assert figures["recall"] == pytest.approx(2 / 3)
    assert figures["calibration"][6] == {"documents": 2, "mean_score": 0.6, "share_positive": 0.5}
    assert figures["calibration"][9]["documents"] == 1
    assert figures["percentiles"][0] == 0.1
    empty = evaluate(np.zeros(0), np.zeros(0))
    assert empty["auc"] is None
    assert empty["precision"] is None


@given(st.lists(st.integers(0, 5), min_size=1, max_size=9), st.lists(st.integers(0, 5), min_size=1, max_size=9))
@settings(max_examples=60, deadline=None)
def test_auc_counts_pairs(positive, negative):
    pairs = [(p > n) + (p == n) / 2 for p in positive for n in negative]
    assert auc(np.array(positive, float), np.array(negative, float)) == pytest.approx(sum(pairs) / len(pairs))


def test_scores_agree_with_fasttext_one_by_one(trained):
    model = load_classifier(str(trained[0]), "__label__positive")
    texts = prepare(pa.array(prose()[500:520] + junk()[400:420]))
    theirs = fasttext.load_model(str(trained[0] / "model.bin"))
    expected = [dict(zip(*theirs.predict(t, k=-1), strict=True))["__label__positive"] for t in texts.to_pylist()]
    assert probabilities(model, texts) == pytest.approx(np.clip(expected, 0, 1), abs=1e-7)


def test_presets_give_what_is_not_given():
    """DCLM's released model has word bigrams; what is named beside a preset wins; the resolved settings show all."""
    small, dclm = FastText(**SELECTIONS), FastText(**SELECTIONS, preset="dclm", dim=50)
    assert (small.preset, small.dim, small.buckets, small.word_ngrams) == ("small", 32, 200_000, 1)
    assert (dclm.dim, dclm.buckets, dclm.word_ngrams, dclm.lr, dclm.epoch) == (50, 2_000_000, 2, 0.1, 5)
    assert FastText(**SELECTIONS, preset="fasttext").word_ngrams == 1
    written = dclm.model_dump(mode="json")
    assert written["preset"] == "dclm"
    assert written["min_count"] == 1
    assert FastText(**written) == dclm
    with pytest.raises(ValidationError, match="preset"):
        FastText(**SELECTIONS, preset="dlcm")


def test_the_small_preset_is_the_default_of_every_field():
    assert {name: FastText.model_fields[name].default for name in PRESETS["small"]} == dict(PRESETS["small"])


def test_fasttexts_own_defaults():
    """As the library trains when it is asked for nothing; its supervised training changes none of these four."""
    from fasttext.FastText import unsupervised_default

    names = {"dim": "dim", "epoch": "epoch", "word_ngrams": "wordNgrams", "buckets": "bucket"}
    own = {name: unsupervised_default[theirs] for name, theirs in names.items()}
    assert own == {name: PRESETS["fasttext"][name] for name in names}


def test_figures_at_another_score():
    figures = evaluate(np.array([0.9, 0.6, 0.2]), np.array([0.6, 0.1]), 0.15)
    assert (figures["precision"], figures["recall"], figures["min_score"]) == (0.75, 1, 0.15)
