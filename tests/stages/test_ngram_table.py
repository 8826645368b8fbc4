"""The table of n-grams scores text as KenLM does on the ARPA file of the same model."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.stages.kernels import ngram_table
from gristmill.stages.kernels.normalise import Pieces
from gristmill.stages.kneser_ney import ModelError, TokenFile, load_arpa, load_table
from gristmill.stages.perplexity import score_lines

LINES = st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=9).map(" ".join), min_size=1, max_size=30)
PROBES = st.lists(st.text(st.sampled_from("abcdefxy \n"), max_size=40), max_size=8)


def train(folder, text, order, prune):
    """-> (model of KenLM, table)."""
    with TokenFile(folder) as tokens:
        tokens.add(Pieces(pa.array([text])).data)
        tokens.estimate(folder / "lm.arpa", order=order, prune=prune, table=folder / "lm.npy")
    return load_arpa(folder / "lm.arpa"), load_table(folder / "lm.npy")


def by_kenlm(model, texts):
    pieces = Pieces(pa.array(texts, pa.string()))
    documents = [pieces.document(i) for i in range(len(pieces))]
    return [sum(model.score(line) for line in d.split(b"\n")) if d else 0.0 for d in documents]


@settings(max_examples=60, deadline=None)
@given(LINES, PROBES, st.integers(2, 5), st.sampled_from([(), (0, 0, 1), (0, 1), (0, 1, 2)]))
def test_scores_are_kenlms(tmp_path_factory, lines, probes, order, prune):
    folder = tmp_path_factory.mktemp("table")
    try:
        model, table = train(folder, "\n".join(lines), order, prune[:order])
    except ModelError:
        assert max(len(line.split()) for line in lines) + 2 < order
        return
    texts = [*probes, "\n".join(lines), "a z\n\nb"]
    found = score_lines(table, order, Pieces(pa.array(texts, pa.string())))
    assert found == pytest.approx(by_kenlm(model, texts), rel=1e-5, abs=1e-4)


@pytest.mark.parametrize(("order", "prune"), [(2, ()), (3, (0, 0, 1)), (6, ())])
def test_scores_are_kenlms_on_many_words(tmp_path, order, prune):
    draw = np.random.default_rng(5).zipf(1.4, 40_000) % 3_000
    text = "\n".join(" ".join(f"w{x}" for x in row) for row in draw.reshape(-1, 16))
    model, table = train(tmp_path, text, order, prune)
    texts = [*text.split("\n")[:300], "w1 neverseen w2 w3\nw1", text]
    assert score_lines(table, order, Pieces(pa.array(texts))) == pytest.approx(by_kenlm(model, texts), rel=1e-5)
    filled = (table[:, 0] != 0).mean()
    assert 0.2 < filled < 0.67


def test_scoring_stays_inside_its_document(tmp_path):
    """Documents between bytes that would change their last and first words."""
    _, table = train(tmp_path, "ab c\nc ab c\nab ab", 2, ())
    pieces = Pieces(pa.array(["ab c\nab", "c"]))
    poison = np.frombuffer(b"abab", np.uint8)
    data = np.concatenate([poison, pieces.data[:-1], poison])  # without the last newline: the end must end the line
    ends = pieces.ends + len(poison)
    ends[-1] -= 1
    out = np.full(2, np.nan)
    ngram_table.score(data, ends, ngram_table.RESERVED, 2, table, table.view(np.float32), out)
    assert out.tolist() == score_lines(table, 2, pieces).tolist()


def test_the_table_is_the_same_every_time(tmp_path):
    train(tmp_path, "a b c\nb c", 3, ())
    first = (tmp_path / "lm.npy").read_bytes()
    train(tmp_path, "a b c\nb c", 3, ())
    assert (tmp_path / "lm.npy").read_bytes() == first


@given(st.integers(0, 10**9))
def test_slots_leave_room(ngrams):
    found = ngram_table.slots(ngrams)
    assert found & (found - 1) == 0
    assert 3 * ngrams <= 2 * found + 2


def test_warm_compiles_without_error():
    ngram_table.warm()
    assert ngram_table.score.signatures
